"""The virtual tree: directories, files and links as plain objects, read into buffers that the caller owns.

Rules:
- A file's `size` is exact and known without reading data.
- A file object is one *version* of its content and never changes: new content under the same name is a new object with
  another `version`. A `Reader` therefore never mixes two versions; when its bytes are gone it raises StaleError.
- A `Reader` is a lease: the local files it needs are open from `open()` on (up to `PINNED_FILES_MAX` of them), so
  deleting the checkpoint does not disturb who is reading it.
- `read_into` fills the whole view except at the end of the file; anything else is an error from `ckptfs.errors`.
- Nothing here knows how the tree is shown (mounted, served, exported).
"""

from __future__ import annotations

import bisect
import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from ckptfs.errors import CkptError, CorruptError, NotFoundError, StaleError, StorageError
from ckptfs.storage.directio import all_cached
from ckptfs.views.mapped import MappedFile, mapped

PINNED_FILES_MAX = 512  # a reader holds at most this many files open; further ones are opened when they are read
LENT_MAX = 1000  # what a writev takes is 1024
SPLICED_MAX = 120  # stretches: each begins a page of its own, and a pipe has few
SHARED_FDS_MAX = 128  # reads without a reader, and files beyond a reader's pins, share this many open files

_NO_XATTRS: Mapping[str, bytes] = {}


class Node:
    """What a directory holds: a `Dir`, a `File` or a `Link`."""

    mtime_ns: int = 0
    xattrs: Mapping[str, bytes] = _NO_XATTRS  # complete names, such as user.ckptfs.dtype


class Link(Node):
    """A symbolic link. It may change whenever its directory is not immutable."""

    def __init__(self, target: str, *, mtime_ns: int = 0, xattrs: Mapping[str, bytes] = _NO_XATTRS) -> None:
        self.target = target
        self.mtime_ns = mtime_ns
        self.xattrs = xattrs


Stretch = bytes | tuple[int, int, int]  # bytes, or (descriptor, offset, length) of a local file


class Reader:
    """One opening of a file: a lease on its bytes until `close`. May be used from several threads at once."""

    backing_fd: int | None = None  # open on a local file whose bytes are exactly this file's; belongs to the reader

    def __init__(self, file: File) -> None:
        self.file = file

    def read_into(self, offset: int, view: memoryview) -> int:
        return self.file.read_into(offset, view)

    def lend(self, offset: int, length: int) -> list[memoryview] | None:
        """The bytes where they lie, for the kernel to read; None when only `read_into` can have them.

        Only for system calls: looking into these views from Python may be SIGBUS. They may outlive the reader.
        """
        return None

    def cached(self, offset: int, length: int) -> list[Stretch] | None:
        """The same, as bytes and as stretches of open files of which the page cache has all, for splice().

        None when any byte of it is elsewhere, was read ahead, or may be: `lend` and `read_into` know.
        """
        return None

    def prefetch(self, offset: int, length: int) -> None:
        """A hint that this range will be read soon; returns at once."""

    def is_near(self, offset: int, length: int) -> bool:
        """False when reading this range now would wait for a request to the disk that is on its way."""
        return True

    def close(self) -> None:
        """End the lease; calling it again does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class File(Node):
    """One version of a file's content. Subclasses set `size` and `version` and define `read_into`, `open` or both."""

    size: int
    version: str  # two files with the same version have the same bytes
    backing: str | None = None  # the path of one whole local file with exactly these bytes
    blocking: bool = False  # reading may be slow (decoding, a remote store): never on the thread that takes requests

    def open(self) -> Reader:
        return Reader(self)

    def read_into(self, offset: int, view: memoryview) -> int:
        """Fill `view` from `offset` on; the count is less than the view's length only at the end of the file."""
        with self.open() as reader:
            return reader.read_into(offset, view)

    def read_bytes(self, offset: int = 0, length: int | None = None) -> bytes:
        """A copy of a range, for small files and tests."""
        length = max(0, min(self.size - offset, self.size if length is None else length))
        data = bytearray(length)
        return bytes(data[: self.read_into(offset, memoryview(data))])


class Dir(Node):
    """A directory: a mapping of names to nodes, or a function that makes one.

    `immutable` says that neither the names nor what they stand for ever change, so every answer may be kept for ever.
    Otherwise `children` is called each time and answers may be kept for `refresh_s`. An immutable directory that was
    deleted and made again under the same name has another `version`. `blocking`: looking into it may be slow.
    """

    def __init__(
        self,
        children: Mapping[str, Node] | Callable[[], Mapping[str, Node]] = _NO_XATTRS,  # type: ignore[assignment]
        *,
        immutable: bool = True,
        refresh_s: float = 1.0,
        version: str = "",
        blocking: bool = False,
        mtime_ns: int = 0,
        xattrs: Mapping[str, bytes] = _NO_XATTRS,
    ) -> None:
        self._children = children
        self._lock = threading.Lock()
        self.immutable = immutable
        self.version = version
        self.blocking = blocking
        self.refresh_s = refresh_s
        self.mtime_ns = mtime_ns
        self.xattrs = xattrs

    def children(self) -> Mapping[str, Node]:
        """Everything in it, in listing order."""
        if not callable(self._children):
            return self._children
        if not self.immutable:
            return self._children()
        with self._lock:  # made once, also when several threads ask first
            if callable(self._children):
                self._children = self._children()
            return self._children

    def lookup(self, name: str) -> Node:
        """The node of that name; NotFoundError when there is none. Override where the whole mapping costs more."""
        try:
            return self.children()[name]
        except KeyError:
            raise NotFoundError(f"no {name!r} in this directory") from None


# --- bytes that lie in memory --------------------------------------------------------------------------------------


class BytesFile(File):
    """A file whose bytes are in memory."""

    def __init__(
        self,
        data: bytes,
        *,
        version: str | None = None,
        mtime_ns: int = 0,
        xattrs: Mapping[str, bytes] = _NO_XATTRS,
    ) -> None:
        self.data = data
        self.size = len(data)
        self.version = version or f"{len(data)}:{hash(data)}"
        self.mtime_ns = mtime_ns
        self.xattrs = xattrs

    def read_into(self, offset: int, view: memoryview) -> int:
        part = memoryview(self.data)[offset : offset + len(view)]
        view[: len(part)] = part
        return len(part)


# --- local files and the descriptors that read them ----------------------------------------------------------------


def _open_local(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise StaleError(f"{path} is gone: the checkpoint was probably deleted; open a newer one") from None
    except OSError as error:
        raise StorageError(f"{path} cannot be opened: {error.strerror}; check the store") from error


def _pread_full(fd: int, path: str, offset: int, view: memoryview) -> None:
    """Fill the whole view; fewer bytes than promised are an error, because sizes come from the manifest."""
    done = 0
    while done < len(view):
        try:
            count = os.preadv(fd, [view[done:] if done else view], offset + done)
        except OSError as error:
            if error.errno == errno.ESTALE:
                raise StaleError(f"{path} is gone from its server; open a newer checkpoint") from None
            raise StorageError(
                f"{path} cannot be read at {offset + done}: {error.strerror}; check the store"
            ) from error
        if count == 0:
            raise CorruptError(
                f"{path} ends at byte {offset + done}, {offset + len(view)} were promised: it was truncated"
            )
        done += count


def _read_local(file: MappedFile | None, fd: int, path: str, offset: int, view: memoryview) -> None:
    """From the memory that was read ahead where there is such, else from the file."""
    if file is None:
        _pread_full(fd, path, offset, view)
        return
    done = 0
    for memory, start, count in file.parts(offset, len(view)):
        part = view[done : done + count]
        if memory is None:
            _pread_full(fd, path, start, part)
        else:
            part[:] = memory
        done += count


def _is_at_hand(file: MappedFile | None, fd: int, offset: int, length: int) -> bool:
    """Whether the page cache has all of a range, and nothing of it was read ahead into other memory."""
    return (file is None or not file.has_window(offset, length)) and all_cached(fd, offset, length)


class _SharedFds:
    """A bounded set of open files, least recently used closed first; one that is being read is never closed."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._open: OrderedDict[str, list[int]] = OrderedDict()  # path → [fd, readers now]

    def read(self, path: str, offset: int, view: memoryview) -> None:
        entry = self._take(path)
        try:
            _pread_full(entry[0], path, offset, view)
        finally:
            self._give_back(entry)

    def _take(self, path: str) -> list[int]:
        with self._lock:
            entry = self._open.get(path)
            if entry is not None and _is_deleted_or_replaced(entry[0], path):
                # Without a lease a path means what it names now; old bytes are for those who hold them open.
                self._drop(path)
                entry = None
            if entry is None:
                entry = self._open[path] = [_open_local(path), 0]
            self._open.move_to_end(path)
            entry[1] += 1
            self._shrink()
            return entry

    def _give_back(self, entry: list[int]) -> None:
        with self._lock:
            entry[1] -= 1
            if entry[1] == 0 and not any(entry is kept for kept in self._open.values()):
                os.close(entry[0])

    def _drop(self, path: str) -> None:
        entry = self._open.pop(path)
        if entry[1] == 0:
            os.close(entry[0])

    def _shrink(self) -> None:
        while len(self._open) > self._capacity:
            idle = next((path for path, entry in self._open.items() if entry[1] == 0), None)
            if idle is None:
                return
            self._drop(idle)

    def close(self) -> None:
        with self._lock:
            for path in list(self._open):
                self._drop(path)


def _is_deleted_or_replaced(fd: int, path: str) -> bool:
    try:
        now, held = os.stat(path), os.fstat(fd)
    except OSError:
        return True
    return (now.st_dev, now.st_ino) != (held.st_dev, held.st_ino)


_shared_fds = _SharedFds(SHARED_FDS_MAX)


class _BackingReader(Reader):
    def __init__(self, file: BackingFile) -> None:
        super().__init__(file)
        self._path = file.path
        fd = _open_local(file.path)
        found = os.fstat(fd)
        if _local_version(found) != file.version:
            os.close(fd)
            raise StaleError(f"{file.path} was replaced since it was listed; list the directory again")
        self.backing_fd = fd
        self._mapped: MappedFile | None = None

    def read_into(self, offset: int, view: memoryview) -> int:
        count = max(0, min(len(view), self.file.size - offset))
        if self.backing_fd is None:
            raise StorageError(f"{self._path}: read after close")
        _read_local(self._mapped, self.backing_fd, self._path, offset, view[:count])
        return count

    def lend(self, offset: int, length: int) -> list[memoryview] | None:
        file = self._map()
        if file is None or offset + length > len(file.view):
            return None
        return file.lent(offset, length)

    def cached(self, offset: int, length: int) -> list[Stretch] | None:
        fd = self.backing_fd
        return None if fd is None or not _is_at_hand(self._mapped, fd, offset, length) else [(fd, offset, length)]

    def is_near(self, offset: int, length: int) -> bool:
        return self._mapped is None or self._mapped.is_near(offset, length)

    def prefetch(self, offset: int, length: int) -> None:
        if self.backing_fd is not None and all_cached(self.backing_fd, offset, min(length, self.file.size - offset)):
            return
        file = self._map()
        if file is not None:
            file.bring(offset, length)

    def _map(self) -> MappedFile | None:
        if self._mapped is None and self.backing_fd is not None:
            self._mapped = mapped(self.backing_fd, self._path)
        return self._mapped

    def close(self) -> None:
        self._mapped = None
        fd, self.backing_fd = self.backing_fd, None
        if fd is not None:
            os.close(fd)


def _local_version(found: os.stat_result) -> str:
    return f"{found.st_dev}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}"


class BackingFile(File):
    """A file whose bytes are exactly those of one whole local file."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        found: os.stat_result | None = None,
        xattrs: Mapping[str, bytes] = _NO_XATTRS,
        mtime_ns: int | None = None,
    ) -> None:
        self.path = os.fspath(path)
        if found is None:
            try:
                found = os.stat(self.path)
            except FileNotFoundError:
                raise NotFoundError(f"{self.path} does not exist") from None
            except OSError as error:
                raise StorageError(f"{self.path}: {error.strerror}; check the store") from error
        self.size = found.st_size
        self.version = _local_version(found)
        self.backing = self.path
        self.mtime_ns = found.st_mtime_ns if mtime_ns is None else mtime_ns
        self.xattrs = xattrs

    def open(self) -> Reader:
        return _BackingReader(self)


# --- concatenations ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Range:
    """`length` bytes of a local file.

    `check(offset, length)`, offsets counted within this range, is called before each read and raises CorruptError when
    the stored bytes there are not the ones that were written; it remembers what it has checked.
    """

    path: str
    offset: int
    length: int
    check: Callable[[int, int], None] | None = None


@dataclass(frozen=True, slots=True)
class Zeros:
    """A run of zero bytes."""

    length: int


@dataclass(frozen=True, slots=True)
class Computed:
    """Bytes that a function produces: `read(offset, view)` fills the whole view, offsets counted within the segment."""

    length: int
    read: Callable[[int, memoryview], object]


Segment = bytes | Range | Zeros | Computed

_ZEROS = memoryview(bytes(1 << 17))


def _fill_zeros(view: memoryview) -> None:
    for start in range(0, len(view), len(_ZEROS)):
        part = view[start : start + len(_ZEROS)]
        part[:] = _ZEROS[: len(part)]


class _SegmentsReader(Reader):
    """Holds the files of a concatenation open, so that they can be deleted meanwhile."""

    def __init__(self, file: SegmentsFile) -> None:
        super().__init__(file)
        self._segments = file
        self._fds: dict[str, int] = {}
        self._maps: dict[str, MappedFile | None] = {}
        try:
            for path in file.paths[:PINNED_FILES_MAX]:
                self._fds[path] = _open_local(path)
        except CkptError:
            self.close()
            raise

    def read_into(self, offset: int, view: memoryview) -> int:
        return self._segments.read_through(offset, view, self._read_range)

    def _read_range(self, path: str, offset: int, view: memoryview) -> None:
        fd = self._fds.get(path)
        if fd is None:
            _shared_fds.read(path, offset, view)
        else:
            _read_local(self._maps.get(path), fd, path, offset, view)

    def lend(self, offset: int, length: int) -> list[memoryview] | None:
        lent: list[memoryview] = []
        for segment, within, count in self._segments.pieces(offset, length):
            views = self._views(segment, within, count)
            if sum(map(len, views)) < count or len(lent) + len(views) > LENT_MAX:
                return None
            lent += views
        return lent

    def _views(self, segment: Segment, within: int, count: int) -> list[memoryview]:
        if isinstance(segment, bytes):
            return [memoryview(segment)[within : within + count]]
        if not isinstance(segment, Range):
            return []
        file = self._mapped(segment.path)
        if file is None:
            return []
        if segment.check is not None:
            segment.check(within, count)
        return file.lent(segment.offset + within, count)

    def cached(self, offset: int, length: int) -> list[Stretch] | None:
        found: list[Stretch] = []
        for segment, within, count in self._segments.pieces(offset, length):
            if isinstance(segment, bytes):
                found.append(segment[within : within + count])
                continue
            fd = self._fds.get(segment.path) if isinstance(segment, Range) else None
            if fd is None or not isinstance(segment, Range):
                return None
            if not _is_at_hand(self._maps.get(segment.path), fd, segment.offset + within, count):
                return None
            if len(found) == SPLICED_MAX:
                return None
            if segment.check is not None:
                segment.check(within, count)
            found.append((fd, segment.offset + within, count))
        return found

    def _mapped(self, path: str) -> MappedFile | None:
        """Several threads may come here at once: then one mapping of theirs stays."""
        if path not in self._maps and path in self._fds:
            self._maps.setdefault(path, mapped(self._fds[path], path))
        return self._maps.get(path)

    def prefetch(self, offset: int, length: int) -> None:
        for segment, within, count in self._segments.pieces(offset, length):
            if not isinstance(segment, Range):
                continue
            fd = self._fds.get(segment.path)
            if fd is not None and all_cached(fd, segment.offset + within, count):
                continue
            file = self._mapped(segment.path)
            if file is not None:
                file.bring(segment.offset + within, count)

    def is_near(self, offset: int, length: int) -> bool:
        for segment, within, count in self._segments.pieces(offset, length):
            file = self._maps.get(segment.path) if isinstance(segment, Range) else None
            if file is not None and isinstance(segment, Range) and not file.is_near(segment.offset + within, count):
                return False
        return True

    def close(self) -> None:
        self._maps = {}
        fds, self._fds = self._fds, {}
        for fd in fds.values():
            os.close(fd)


class SegmentsFile(File):
    """A file made of segments, one after the other."""

    def __init__(
        self,
        segments: Sequence[Segment],
        *,
        version: str,
        blocking: bool | None = None,
        mtime_ns: int = 0,
        xattrs: Mapping[str, bytes] = _NO_XATTRS,
    ) -> None:
        """`blocking` defaults to whether any segment is computed."""
        self._segments = [segment for segment in segments if _length(segment)]
        self._starts: list[int] = []
        self.size = 0
        for segment in self._segments:
            self._starts.append(self.size)
            self.size += _length(segment)
        self.version = version
        self.blocking = any(isinstance(s, Computed) for s in self._segments) if blocking is None else blocking
        self.mtime_ns = mtime_ns
        self.xattrs = xattrs
        self.paths = list(dict.fromkeys(s.path for s in self._segments if isinstance(s, Range)))

    def open(self) -> Reader:
        return _SegmentsReader(self) if self.paths else Reader(self)

    def read_into(self, offset: int, view: memoryview) -> int:
        return self.read_through(offset, view, _shared_fds.read)

    def pieces(self, offset: int, length: int) -> Iterator[tuple[Segment, int, int]]:
        """Which segments hold a range: each with where in it the range goes on, and for how many bytes."""
        end = min(offset + length, self.size)
        index = bisect.bisect_right(self._starts, offset) - 1
        while offset < end:
            segment = self._segments[index]
            within = offset - self._starts[index]
            count = min(end - offset, _length(segment) - within)
            yield segment, within, count
            offset += count
            index += 1

    def read_through(self, offset: int, view: memoryview, read_range: Callable[[str, int, memoryview], None]) -> int:
        """Read with the caller's way of reading local files."""
        done = 0
        for segment, within, count in self.pieces(offset, len(view)):
            _read_segment(segment, within, view[done : done + count], read_range)
            done += count
        return done


def _length(segment: Segment) -> int:
    return len(segment) if isinstance(segment, bytes) else segment.length


def _read_segment(
    segment: Segment, offset: int, view: memoryview, read_range: Callable[[str, int, memoryview], None]
) -> None:
    if isinstance(segment, Range):
        if segment.check is not None:
            segment.check(offset, len(view))
        read_range(segment.path, segment.offset + offset, view)
    elif isinstance(segment, bytes):
        view[:] = memoryview(segment)[offset : offset + len(view)]
    elif isinstance(segment, Zeros):
        _fill_zeros(view)
    else:
        segment.read(offset, view)


# --- a real folder -------------------------------------------------------------------------------------------------


class LocalTree(Dir):
    """Mirrors a folder of the local file system: files, folders and links; anything else is left out."""

    def __init__(self, folder: str | os.PathLike[str], *, immutable: bool = False, refresh_s: float = 1.0) -> None:
        self.folder = os.fspath(folder)
        try:
            mtime_ns = os.stat(self.folder).st_mtime_ns
        except OSError as error:
            raise NotFoundError(f"{self.folder}: {error.strerror}") from None
        super().__init__(self._scan, immutable=immutable, refresh_s=refresh_s, mtime_ns=mtime_ns)

    def lookup(self, name: str) -> Node:
        if self.immutable:
            return super().lookup(name)
        node = self._node(name) if name not in {"", ".", ".."} and "/" not in name else None
        if node is None:
            raise NotFoundError(f"no {name!r} in {self.folder}")
        return node

    def _scan(self) -> dict[str, Node]:
        try:
            names = sorted(os.listdir(self.folder))
        except FileNotFoundError:
            raise StaleError(f"{self.folder} is gone; list its parent again") from None
        except OSError as error:
            raise StorageError(f"{self.folder} cannot be listed: {error.strerror}") from error
        nodes = ((name, self._node(name)) for name in names)
        return {name: node for name, node in nodes if node is not None}

    def _node(self, name: str) -> Node | None:
        path = os.path.join(self.folder, name)
        try:
            found = os.lstat(path)
            if stat.S_ISLNK(found.st_mode):
                return Link(os.readlink(path), mtime_ns=found.st_mtime_ns)
            if stat.S_ISDIR(found.st_mode):
                return LocalTree(path, immutable=self.immutable, refresh_s=self.refresh_s)
        except (FileNotFoundError, NotFoundError):
            return None  # deleted while it was looked at
        except OSError as error:
            raise StorageError(f"{path}: {error.strerror}; check the store") from error
        return BackingFile(path, found=found) if stat.S_ISREG(found.st_mode) else None


# --- walking -------------------------------------------------------------------------------------------------------


def resolve(root: Node, path: str) -> Node:
    """The node at a slash-separated path below `root`; links are not followed."""
    node = root
    for name in path.split("/"):
        if not name:
            continue
        if not isinstance(node, Dir):
            raise NotFoundError(f"{path!r}: the part before {name!r} is not a directory")
        node = node.lookup(name)
    return node


def walk(root: Dir, prefix: str = "") -> Iterator[tuple[str, Node]]:
    """Every node below `root` with its path, a directory before what it holds."""
    for name, node in root.children().items():
        path = f"{prefix}{name}"
        yield path, node
        if isinstance(node, Dir):
            yield from walk(node, path + "/")
