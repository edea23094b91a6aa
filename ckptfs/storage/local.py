"""The local store: a folder of a file system, with the extra operations a commit by rename needs.

Rules: an object appears whole (temporary file, then rename) and durable (fsync of the file, then of its folder) before
`write` returns. Bulk data does not go through `write`: writers put byte ranges into files of a folder that is not
committed yet (directio.py), make the tree durable once, and one rename commits it. Symbolic links are never followed
when deleting. Every system call that changes something goes through `ops`, so tests can fail each of them.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
import uuid
from collections.abc import Callable, Iterator
from typing import ClassVar

from ckptfs.errors import CkptError, ExistsError, NotFoundError, StorageError
from ckptfs.storage.base import Names, Store, check_path, check_range, join, os_error
from ckptfs.storage.directio import ANY, BufferPool, DirectReader, DirectWriter, Turns
from ckptfs.storage.fileops import REAL_OPS, FileOps

_TEMPORARY = ".ckptfs-tmp-"  # what a crash in `write` leaves behind; never listed
_numbers = itertools.count()
Entries = list[os.DirEntry[str]]
Found = list[tuple[str, int]]
_UNSUPPORTED = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP})


def _at_once() -> None:
    """Between one file and the next. Stores are pickled, so this has a name."""


class LocalStore(Store):
    """Objects are files below `root`; the folder need not exist before the first write."""

    positional: ClassVar[bool] = True

    def __init__(
        self, root: str | os.PathLike[str], *, ops: FileOps = REAL_OPS, between: Callable[[], None] = _at_once
    ) -> None:
        self.root = os.path.abspath(os.fspath(root))
        self.url = self.root
        self.ops = ops
        self._between = between  # called after each file that `remove_tree` deletes

    def __repr__(self) -> str:
        return f"LocalStore({self.root!r})"

    def full(self, path: str = "") -> str:
        """The path the operating system knows; "" is the store's own folder."""
        return f"{self.root}/{check_path(path)}" if path else self.root

    def _object(self, path: str) -> str:
        """As `full`, for what must be below the store's own folder."""
        return f"{self.root}/{check_path(path)}"

    # -- reading ---------------------------------------------------------------------------------------------------

    def open_reader(self, path: str, scratch: BufferPool | None = None, turns: Turns = ANY) -> DirectReader:
        return DirectReader(self._object(path), scratch=scratch, turns=turns, ops=self.ops)

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        check_range(path, start, stop)
        with self.open_reader(path) as reader:
            end = reader.size if stop is None else min(stop, reader.size)
            data = bytearray(max(0, end - start))
            if data:  # a start past the end is an empty slice here
                reader.read_into(start, memoryview(data))
        return bytes(data)

    def read_into(self, path: str, offset: int, into: memoryview) -> None:
        check_range(path, offset, None)
        with self.open_reader(path) as reader:
            reader.read_into(offset, into)

    def size(self, path: str) -> int:
        where = self._object(path)
        try:
            found = os.stat(where)
        except OSError as error:
            raise os_error("looking at", where, error) from error
        if not stat.S_ISREG(found.st_mode):
            raise NotFoundError(f"looking at {where}: it is not a file")
        return found.st_size

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        found: Found = []
        pending = [check_path(prefix, empty_ok=True)]
        while pending:
            folder = pending.pop()
            for entry in self._scan(folder):
                path = join(folder, entry.name)
                if entry.is_dir(follow_symlinks=False):
                    pending.append(path)
                elif size := _file_size(entry):
                    found.append((path, size[0]))
        return iter(sorted(found))

    def children(self, prefix: str = "") -> tuple[Names, Names]:
        dirs: Names = []
        files: Names = []
        for entry in self._scan(check_path(prefix, empty_ok=True)):
            if entry.is_dir():
                dirs.append(entry.name)
            elif entry.is_file():
                files.append(entry.name)
        return sorted(dirs), sorted(files)

    def _scan(self, folder: str) -> Entries:
        where = self.full(folder)
        try:
            with os.scandir(where) as entries:
                return [entry for entry in entries if not entry.name.startswith(_TEMPORARY)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise os_error("listing", where, error) from error

    # -- whole objects ---------------------------------------------------------------------------------------------

    def write(self, path: str, data: bytes | bytearray | memoryview) -> None:
        self._publish(path, data, self.ops.rename)

    def create(self, path: str, data: bytes | bytearray | memoryview) -> None:
        where = self._object(path)
        if os.path.lexists(where):  # spares the work; the rename below is what decides
            raise ExistsError(f"{where} exists already and is not replaced")
        self._publish(path, data, self._rename_new)

    def write_unsynced(self, path: str, data: bytes | bytearray | memoryview) -> None:
        """A file in a folder that is not committed yet: neither atomic nor durable until `sync_tree` or `syncfs`.

        The file's folder must exist. (Thousands of small files are ten times faster this way than with `write`.)
        """
        where = self._object(path)
        try:
            # Not cut first: who writes it a second time, for a rank that was lost, writes the same bytes.
            self._write_file(where, memoryview(data).cast("B"), 0, sync=False)
        except OSError as error:
            raise os_error("writing", where, error) from error

    def link_unsynced(self, source: str, path: str) -> bool:
        """Another name for a file that will not change any more; False where that can't be.

        A name costs a tenth of a file, and users are given only so many files.
        """
        try:
            self.ops.link(self._object(source), self._object(path))
        except OSError:  # no links here, or too many of this file: writing it says what is really wrong
            return False
        return True

    def _publish(self, path: str, data: bytes | bytearray | memoryview, rename: Callable[[str, str], None]) -> None:
        where = self._object(path)
        folder = os.path.dirname(where)
        # In the same folder, so that the rename stays inside one file system; unique among processes and threads.
        temporary = f"{folder}/{_TEMPORARY}{uuid.uuid4().hex}-{next(_numbers)}"
        self._make_folder(folder)
        try:
            # O_EXCL: nobody else's file is ever written to. The fsync comes before the rename, because a rename that
            # reaches the disk before the data would show an empty file after a power cut.
            self._write_file(temporary, memoryview(data).cast("B"), os.O_EXCL, sync=True)
            rename(temporary, where)
        except OSError as error:
            self._discard(temporary)
            if error.errno == errno.EEXIST:
                raise ExistsError(f"{where} exists already and is not replaced") from error
            raise os_error("writing", where, error) from error
        self._sync_folder(folder)  # the name itself is durable only now

    def _write_file(self, where: str, view: memoryview, flags: int, *, sync: bool) -> None:
        fd = self.ops.open(where, os.O_WRONLY | os.O_CREAT | flags)
        try:
            done = 0
            while done < len(view):
                count = self.ops.pwrite(fd, view[done:], done)
                if count <= 0:
                    raise OSError(errno.EIO, "nothing was written")
                done += count
            if os.fstat(fd).st_size != len(view):  # some network file systems cut files and say so only here
                raise OSError(errno.EIO, "the length differs from what was written")
            if sync:
                self.ops.fsync(fd)
        except BaseException:
            _close_quietly(self.ops, fd)
            raise
        self.ops.close(fd)  # NFS reports lost writes here, so its error counts

    def _rename_new(self, source: str, target: str) -> None:
        """Rename, EEXIST when the target is there; link and unlink where the kernel or file system can't (NFS)."""
        try:
            self.ops.rename_new(source, target)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            self.ops.link(source, target)
            self.ops.unlink(source)

    def _discard(self, where: str) -> None:
        try:
            self.ops.unlink(where)
        except OSError:
            pass  # hidden from listings anyway; the error that led here matters more

    def remove(self, path: str) -> None:
        where = self._object(path)
        try:
            self.ops.unlink(where)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise os_error("removing", where, error) from error

    def remove_tree(self, prefix: str) -> None:
        where = self._object(prefix)
        try:
            if os.path.islink(where):  # what it points to is somebody else's
                _ignore_missing(self.ops.unlink, where)
            else:
                self._remove_folder(where)
        except OSError as error:
            raise os_error("removing", where, error) from error

    def _remove_folder(self, where: str) -> None:
        try:
            with os.scandir(where) as scan:
                entries = list(scan)
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                self._remove_folder(entry.path)
            else:
                _ignore_missing(self.ops.unlink, entry.path)
                self._between()
        _ignore_missing(self.ops.rmdir, where)

    def sub(self, prefix: str) -> LocalStore:
        return LocalStore(self.full(prefix), ops=self.ops, between=self._between)

    # -- byte ranges and folders -----------------------------------------------------------------------------------

    def open_writer(self, path: str) -> DirectWriter:
        """A file for positional writes by any number of processes; its folder must exist."""
        return DirectWriter(self._object(path), ops=self.ops)

    def make_dirs(self, prefix: str = "") -> None:
        """The folder and its parents; there already is no error."""
        self._make_folder(self.full(prefix))

    def _make_folder(self, where: str) -> None:
        if os.path.isdir(where):
            return
        parent = os.path.dirname(where)
        if parent != where:
            self._make_folder(parent)
        try:
            self.ops.mkdir(where)
        except OSError as error:
            if not os.path.isdir(where):  # another process may have been first
                raise os_error("writing", where, error, " (creating the folder)") from error

    def rename_dir(self, source: str, target: str) -> None:
        """Give a folder its final name at once; ExistsError if the name is taken, even by an empty folder.

        Not durable before `sync_dir` of the parent.
        """
        from_path, to_path = self._object(source), self._object(target)
        try:
            self.ops.rename_new(from_path, to_path)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                self._rename_dir_checked(from_path, to_path)
                return
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                raise ExistsError(f"{to_path} exists already and is not replaced") from error
            raise os_error("renaming", from_path, error, f" to {to_path}") from error

    def _rename_dir_checked(self, from_path: str, to_path: str) -> None:
        """Where no rename refuses by itself (NFS): rename(2) refuses a folder that is not empty, mkdir any that is.

        mkdir of the target is the claim: of several committers one gets it, and replacing one's own empty folder is
        atomic. A crash in between leaves an empty folder, which no reader takes for a step.
        """
        try:
            self.ops.mkdir(to_path)
        except FileExistsError as error:
            raise ExistsError(f"{to_path} exists already and is not replaced") from error
        except OSError as error:
            raise os_error("renaming", from_path, error, f" to {to_path}") from error
        try:
            self.ops.rename(from_path, to_path)
        except OSError as error:
            _ignore_missing(self.ops.rmdir, to_path)
            raise os_error("renaming", from_path, error, f" to {to_path}") from error

    def exchange_dirs(self, one: str, other: str) -> None:
        """Swap two folders in one step: at no moment is either name without a folder. Not durable before `sync_dir`."""
        paths = self._object(one), self._object(other)
        try:
            self.ops.exchange(*paths)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                raise StorageError(
                    f"replacing {paths[1]}: this file system can't exchange two folders at once; "
                    "remove the old folder first, or save under another step"
                ) from error
            raise os_error("exchanging", paths[0], error, f" and {paths[1]}") from error

    def sync_dir(self, prefix: str = "") -> None:
        """Make the names in this one folder durable."""
        self._sync_folder(self.full(prefix))

    def sync_tree(self, prefix: str = "") -> None:
        """Make every file and name below `prefix` durable, one by one: for few files. Many: `syncfs`."""
        where = self.full(prefix)
        for folder, _, names in os.walk(where, topdown=False, onerror=_raise):
            for name in names:
                self._sync_path(f"{folder}/{name}", os.O_RDONLY)
            self._sync_folder(folder)

    def syncfs(self, prefix: str = "") -> None:
        """Make everything this machine wrote to the file system durable in one call."""
        where = self.full(prefix)
        try:
            fd = self.ops.open(where, os.O_RDONLY | os.O_DIRECTORY)
            try:
                self.ops.syncfs(fd)
            finally:
                _close_quietly(self.ops, fd)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                self.sync_tree(prefix)
                return
            raise os_error("syncing", where, error) from error

    def _sync_folder(self, where: str) -> None:
        self._sync_path(where, os.O_RDONLY | os.O_DIRECTORY)

    def _sync_path(self, where: str, flags: int) -> None:
        try:
            fd = self.ops.open(where, flags)
            try:
                self.ops.fsync(fd)
            finally:
                _close_quietly(self.ops, fd)
        except OSError as error:
            if flags & os.O_DIRECTORY and error.errno == errno.EINVAL:
                return  # some network file systems refuse fsync of a folder: their names are durable at once
            raise os_error("syncing", where, error) from error

    def free_bytes(self) -> int:
        """What an unprivileged process can still write; asked of the nearest folder that exists."""
        where = self.root
        while not os.path.exists(where):
            where = os.path.dirname(where)
        found = os.statvfs(where)
        return found.f_bavail * found.f_frsize


def _file_size(entry: os.DirEntry[str]) -> tuple[int] | None:
    """The size, in a tuple because 0 is one; None for what is not a file, or is gone by now."""
    try:
        found = entry.stat()
    except FileNotFoundError:
        return None
    return (found.st_size,) if stat.S_ISREG(found.st_mode) else None


def _ignore_missing(call: Callable[[str], None], path: str) -> None:
    try:
        call(path)
    except FileNotFoundError:
        pass


def _close_quietly(ops: FileOps, fd: int) -> None:
    try:
        ops.close(fd)
    except OSError:
        pass


def _raise(error: OSError) -> None:
    raise _walk_error(error) from error


def _walk_error(error: OSError) -> CkptError:
    return os_error("syncing", str(error.filename), error)
