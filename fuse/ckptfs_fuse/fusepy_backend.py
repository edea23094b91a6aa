"""The default backend: fusepy on libfuse 2, or mfusepy where only libfuse 3 exists.

Rules:
- READ is answered on libfuse's channel, without libfuse, from where the bytes lie (see fusepy_loop). What that leaves
  (content that is worked out, libfuse 3) goes into libfuse's own buffer; stock usage returns bytes, copied twice.
- Immutable content: keep_cache for a version that the kernel has seen, long timeouts when the whole tree is immutable.
- Every failure is an errno (fusepy itself would answer EINVAL); whatever writes is EROFS.
- A step that replaces one of its name is another inode, as libfuse hears another name (see fusepy_loop).
- One slow read does not stall others (see fusepy_loop), and is bounded by a deadline.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import importlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any, NoReturn

from ckptfs.errors import CkptError, NotFoundError, StaleError, StorageError
from ckptfs.views.nodes import Dir, File, Link, Node
from ckptfs_fuse import wire
from ckptfs_fuse.answers import FOR_EVER_S, attribute, attributes, errno_of, log, log_failure, version_of
from ckptfs_fuse.fusepy_loop import LeaderLoop, installed
from ckptfs_fuse.lending import answer_read, send
from ckptfs_fuse.options import MountOptions
from ckptfs_fuse.slow import SlowWork
from ckptfs_fuse.table import Handle, Known

INSTALL_HINT = (
    "install libfuse 2 and fusepy: `apt-get install fuse libfuse2 && pip install fusepy`, "
    "or, where there is only libfuse 3: `pip install mfusepy`"
)
SEEN_VERSIONS_MAX = 65536
TAG_SIGN = "@"


def load_library() -> ModuleType:
    """The library: fusepy on libfuse 2, else mfusepy, else a StorageError that says what to install."""
    found = _import("fuse") or _import("mfusepy")
    if found is None:
        raise StorageError(f"neither fusepy nor mfusepy works here: {INSTALL_HINT}")
    return found


def tag_of(node: Node) -> str:
    """Tells a step from another one of its name; empty for what may change as it is."""
    if not isinstance(node, Dir) or not node.immutable or not node.version:
        return ""
    return hashlib.blake2b(node.version.encode(errors="surrogateescape"), digest_size=8).hexdigest()


def _import(name: str) -> ModuleType | None:
    try:
        module = importlib.import_module(name)
    except (ImportError, OSError, AttributeError):  # OSError: there is no libfuse
        return None
    if not hasattr(module, "FUSE"):  # a folder named fuse/ in the current directory imports as an empty package
        return None
    library = getattr(module, "_libfuse", None)
    if name == "fuse" and (library is None or library.fuse_version() >= 30):
        log.warning("fusepy found libfuse 3, on which it mounts but every call fails: not used")
        return None
    return module


def _fuse_class(module: ModuleType) -> Any:
    """The library's FUSE with a `read` that hands out libfuse's buffer."""

    class ReadingInPlace(module.FUSE):  # type: ignore[name-defined,misc]
        def read(self, path: Any, buf: Any, size: int, offset: int, fip: Any) -> int:
            address = buf if isinstance(buf, int) else ctypes.addressof(buf.contents)
            view = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
            return _OPERATIONS[id(self)].read_into(fip.contents.fh, offset, view)

        def __init__(self, operations: Operations | ByMethod, mountpoint: str, **options: Any) -> None:
            _OPERATIONS[id(self)] = operations  # FUSE.__init__ returns only after the unmount
            try:
                super().__init__(operations, mountpoint, **options)
            finally:
                del _OPERATIONS[id(self)]

    return ReadingInPlace


_OPERATIONS: dict[int, Operations | ByMethod] = {}


def serve(root: Dir, mountpoint: str, options: MountOptions, on_ready: Callable[[], None]) -> None:
    """Mount and answer until unmounted or told to stop by SIGTERM, SIGINT or SIGHUP."""
    module = load_library()
    keep_s = FOR_EVER_S if root.immutable else root.refresh_s
    loop = installed(module, mountpoint)
    operations = Operations(root, mountpoint, options, on_ready, loop)
    settings: dict[str, Any] = {
        "foreground": True,
        "raw_fi": True,
        "ro": True,
        "fsname": "ckptfs",
        "subtype": "ckptfs",
        "attr_timeout": keep_s,
        "entry_timeout": keep_s,
        "default_permissions": True,
    }
    if options.allow_other:
        settings["allow_other"] = True
    if options.nonempty and module.__name__ == "fuse":  # libfuse 3 has no such option: it always allows it
        settings["nonempty"] = True
    try:
        called = operations if module.__name__ == "fuse" else ByMethod(operations)
        _fuse_class(module)(called, mountpoint, **settings)
    except RuntimeError as error:
        is_asked = options.allow_other and os.geteuid() != 0
        hint = "; allow_other needs the line user_allow_other in /etc/fuse.conf" if is_asked else ""
        raise StorageError(f"libfuse could not mount at {mountpoint} (status {error}){hint}: see its log") from None
    finally:
        operations.close()


class Operations:
    """The operations, by path. fusepy calls any of them through `__call__`; for mfusepy see `ByMethod`."""

    use_ns = True
    flag_nullpath_ok = 1  # open files go on when their name is gone: libfuse 2 then gives None for the path

    def __init__(
        self, root: Dir, mountpoint: str, options: MountOptions, on_ready: Callable[[], None], loop: LeaderLoop | None
    ) -> None:
        self._root = root
        self._loop = loop
        self._ahead_bytes = options.prefetch_kib * 1024
        self._mountpoint = mountpoint
        self._on_ready = on_ready
        self._slow = SlowWork(options.slow_threads, options.read_timeout_s)
        self._handles: dict[int, Handle] = {}
        self._numbers = itertools.count(1)
        self._dropping: dict[int, tuple[str, str]] = {}  # open handle → path and version
        self._seen: dict[str, str] = {}  # path → the version whose pages the kernel may hold
        self._owner = (os.geteuid(), os.getegid())
        if loop is not None:
            loop.answer_read = self.answer_read
            loop.on_ready = on_ready
            loop.stat = self.stat_quickly(loop.stat_kind)
            loop.name_inside = self.name_inside

    def __call__(self, name: str, path: str | None, *args: Any) -> Any:
        operation = getattr(self, name)
        try:
            return operation(path, *args)
        except (CkptError, OSError, ArithmeticError, LookupError, TypeError, ValueError, RuntimeError) as error:
            log_failure(f"{name.upper()} of {self._shown(path)}", error)
            raise OSError(errno_of(error), str(error)) from error

    def _node(self, path: str | None) -> Node:
        if path is None:
            raise StaleError("the name is gone; open it anew")
        node: Node = self._root
        names = [name for name in path.split("/") if name]
        if names and self._loop is not None:
            name, _, tag = names[0].rpartition(TAG_SIGN)
            node = self._tagged(name, tag)
            names = names[1:]
        for name in names:
            node = self._look(node, name)
        return node

    def _tagged(self, name: str, tag: str) -> Node:
        try:
            node = self._look(self._root, name)
        except NotFoundError:
            if tag:
                raise StaleError(f"{name} is gone") from None
            raise
        if tag_of(node) != tag:
            raise StaleError(f"{name} is another one now; open it anew")
        return node

    def _node_or_open(self, path: bytes) -> Node:
        """What is open goes on to be known, also of a step that is gone: fstat() comes with the name only."""
        try:
            return self._node(os.fsdecode(path))
        except StaleError:
            for handle in list(self._handles.values()):
                if handle.known.key[1] == path:
                    return handle.reader.file
            raise

    def name_inside(self, name: bytes) -> bytes:
        """What libfuse knows a name below the root by: with its version, so that another one is another inode."""
        try:
            tag = tag_of(self._look(self._root, os.fsdecode(name)))
        except Exception:  # libfuse asks for it next, and hears the error
            tag = ""
        return name + f"{TAG_SIGN}{tag}".encode()

    def _shown(self, path: str | None) -> str:
        """The path as users know it."""
        if path is None or self._loop is None:
            return str(path)
        first, slash, rest = path[1:].partition("/")
        return f"/{first.rpartition(TAG_SIGN)[0]}{slash}{rest}"

    def _look(self, folder: Node, name: str) -> Node:
        if not isinstance(folder, Dir):
            raise OSError(errno.ENOTDIR, "not a directory")
        return self._bounded(partial(folder.lookup, name)) if folder.blocking else folder.lookup(name)

    def init(self, _path: str) -> None:
        """The kernel has no answer yet; when it has, it sets the readahead back: only then is the mount ready."""
        if self._loop is None:
            threading.Thread(target=self._wait_until_ready, name="ready", daemon=True).start()

    def _wait_until_ready(self) -> None:
        os.statvfs(self._mountpoint)  # returns when another thread has answered it
        self._on_ready()

    def destroy(self, _path: str) -> None:
        pass

    def getattr(self, path: str | None, info: Any = None) -> dict[str, Any]:
        handle = self._handles.get(info.fh) if info is not None else None
        told = attributes(handle.reader.file if handle is not None else self._node(path))
        return {
            "st_mode": told.mode,
            "st_size": told.size,
            "st_nlink": 1,
            "st_blocks": -(-told.size // 512),
            "st_blksize": 4096,
            "st_uid": self._owner[0],
            "st_gid": self._owner[1],
            "st_mtime": told.mtime_ns,
            "st_atime": told.mtime_ns,
            "st_ctime": told.mtime_ns,
        }

    def stat_quickly(self, kind: type[ctypes.Structure]) -> Callable[[bytes, int], int]:
        """Getattr as a function of C: path and address of a `kind` (a struct stat, all zeros) to 0 or minus an errno.

        Who lists a directory asks for each of its names; what the library does around `getattr` takes longer than that.
        """
        user, group = self._owner

        def stat(path: bytes, address: int) -> int:
            try:
                told = attributes(self._node_or_open(path))
            except Exception as error:
                log_failure(f"GETATTR of {self._shown(os.fsdecode(path))}", error)
                return -errno_of(error)
            into: Any = kind.from_address(address)
            into.st_mode, into.st_size, into.st_nlink = told.mode, told.size, 1
            into.st_blocks, into.st_blksize = -(-told.size // 512), 4096
            into.st_uid, into.st_gid = user, group
            seconds, nanoseconds = divmod(told.mtime_ns, 1_000_000_000)
            for time in (into.st_atimespec, into.st_mtimespec, into.st_ctimespec):
                time.tv_sec, time.tv_nsec = seconds, nanoseconds
            return 0

        return stat

    def readlink(self, path: str) -> str:
        node = self._node(path)
        if not isinstance(node, Link):
            raise OSError(errno.EINVAL, "not a link")
        return node.target

    def opendir(self, _path: str) -> int:
        return 0

    def releasedir(self, _path: str, _handle: int) -> int:
        return 0

    def readdir(self, path: str, _handle: int) -> Iterator[tuple[str, dict[str, int], int]]:
        folder = self._node(path)
        if not isinstance(folder, Dir):
            raise OSError(errno.ENOTDIR, "not a directory")
        names = [(".", 0o040000), ("..", 0o040000)]
        children = self._bounded(folder.children) if folder.blocking else folder.children()
        names += [(name, attributes(node).mode) for name, node in children.items()]
        return iter([(name, {"st_mode": mode}, 0) for name, mode in names])

    def open(self, path: str, info: Any) -> int:
        if info.flags & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(errno.EROFS, "read-only")
        file = self._node(path)
        if not isinstance(file, File):
            raise OSError(errno.EISDIR, "not a file")
        known = Known(0, 0, file, (0, os.fsencode(path)), version_of(file), 0.0)
        handle = Handle(known, self._bounded(file.open) if file.blocking else file.open())
        info.fh = next(self._numbers)
        self._handles[info.fh] = handle
        # The kernel drops the pages of another version when this is 0. It has done so for certain only when it goes on
        # with this handle: answers to openings at the same time may overtake each other.
        info.keep_cache = int(self._seen.get(path) == file.version)
        if not info.keep_cache:
            self._seen.pop(path, None)
            self._dropping[info.fh] = path, file.version
        return 0

    def _dropped(self, number: int) -> None:
        """The kernel goes on with a handle that made it drop the pages of other versions."""
        found = self._dropping.pop(number, None)
        if found is not None:
            if len(self._seen) >= SEEN_VERSIONS_MAX:
                self._seen.clear()
            self._seen[found[0]] = found[1]

    def read_into(self, number: int, offset: int, view: memoryview) -> int:
        """The count read, or minus an errno: what libfuse wants."""
        handle = self._handles.get(number)
        try:
            if handle is None:
                return -errno.EBADF
            if number in self._dropping:
                self._dropped(number)
            file = handle.reader.file
            part = view[: max(0, min(len(view), file.size - offset))]
            if len(part) == 0:
                return 0
            return self._read_bounded(handle, offset, part) if file.blocking else handle.reader.read_into(offset, part)
        except Exception as error:
            log_failure(f"READ of {self._shown(os.fsdecode(handle.known.key[1])) if handle else '?'}", error)
            return -errno_of(error)

    def answer_read(self, fd: int, unique: int, read: wire.Read, reply: memoryview) -> bool:
        """Answer the kernel without libfuse; False for what may be slow, and for what libfuse has to refuse."""
        handle = self._handles.get(read.handle)
        if handle is None or handle.reader.file.blocking:
            return False
        if read.handle in self._dropping:
            self._dropped(read.handle)
        try:
            size = min(read.size, handle.reader.file.size - read.offset)
            if size <= 0:
                send(fd, wire.reply_header(unique, 0))
                return True
            handle.read_ahead(read.offset, size, self._ahead_bytes)
            if self._loop is not None and not handle.reader.is_near(read.offset, size):
                self._loop.step_aside()
            answer_read(fd, unique, handle, read.offset, size, reply)
        except Exception as error:
            log_failure(f"READ of {self._shown(os.fsdecode(handle.known.key[1]))}", error)
            send(fd, wire.reply_header(unique, 0, errno_of(error)))
        return True

    def _read_bounded(self, handle: Handle, offset: int, view: memoryview) -> int:
        """Into a buffer of its own: libfuse's is gone when the deadline has passed."""
        handle.take()

        def work() -> bytearray:
            try:
                data = bytearray(len(view))
                count = handle.reader.read_into(offset, memoryview(data))
                return data[:count]
            finally:
                handle.give_back()

        data = self._bounded(work)
        view[: len(data)] = data
        return len(data)

    def _bounded(self, work: Callable[[], Any]) -> Any:
        ended = threading.Event()
        answer: list[Any] = []

        def done(result: Any, error: BaseException | None) -> None:
            answer.extend([result, error])
            ended.set()

        if self._loop is not None:
            self._loop.step_aside()
        self._slow.submit(work, done)
        ended.wait()
        if answer[1] is not None:
            raise answer[1]
        return answer[0]

    def release(self, _path: str, info: Any) -> int:
        self._dropping.pop(info.fh, None)
        handle = self._handles.pop(info.fh, None)
        if handle is not None:
            handle.give_back()
        return 0

    def statfs(self, _path: str) -> dict[str, int]:
        return {"f_bsize": 4096, "f_frsize": 4096, "f_namemax": 255}

    def getxattr(self, path: str, name: str, *_position: int) -> bytes:
        return attribute(self._node(path), name)

    def listxattr(self, path: str) -> list[str]:
        return list(self._node(path).xattrs)

    def read(self, *_: Any) -> NoReturn:  # its presence makes the library install the callback; see ReadingInPlace
        raise StorageError("reads go through read_into")

    def _refuse(self, *_: Any) -> NoReturn:
        raise OSError(errno.EROFS, "read-only")

    create = mkdir = mknod = unlink = rmdir = symlink = rename = link = _refuse
    chmod = chown = truncate = write = setxattr = removexattr = utimens = _refuse

    def close(self) -> None:
        handles, self._handles = self._handles, {}
        for handle in handles.values():
            handle.give_back()


class ByMethod:
    """The operations for mfusepy, which calls methods directly: errors become errnos there as well."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._operations, name)
        return partial(self._operations, name) if callable(value) else value
