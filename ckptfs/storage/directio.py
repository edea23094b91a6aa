"""Byte ranges of files, past the page cache: aligned buffers, a writer, a reader.

Rules: O_DIRECT moves whole blocks between aligned memory and aligned offsets; everything else (edges, small pieces,
file systems that refuse) goes through the page cache, with the same result. Blocks that one call writes directly are
never touched by another writer's buffered edge, as long as writers write disjoint ranges: an edge block is buffered for
both neighbours. Writers and readers are used by many threads at once. Errors name the path and the offset.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ckptfs.errors import StorageError
from ckptfs.storage.base import os_error, truncated
from ckptfs.storage.fileops import REAL_OPS, FileOps

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ALIGN_BYTES = 4096  # satisfies every disk in use; many accept less, see `sector_bytes`
BUFFER_BYTES = 8 << 20  # one request: 4 MiB reach 0.93 of the rate of 8 MiB, 1 MiB 0.7
_HUGE_PAGE_BYTES = 2 << 20  # another size elsewhere: then some of the mapping stays in small pages
_MAPPING_BYTES = 256 << 20  # address space taken at once; memory only as buffers are used
DIRECT_MIN_BYTES = 256 << 10  # below this a buffered call costs less than a trip to the disk

Turns = Callable[[int], AbstractContextManager[object]]  # what a direct request of so many bytes waits in for its turn

_REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
_log = logging.getLogger("ckptfs.storage")
_refusing: set[int] = set()  # devices whose file system refused O_DIRECT; each is logged once
_AT_EMPTY_PATH, _STATX_DIOALIGN = 0x1000, 0x2000
ANY: Turns = nullcontext
_CACHESTAT = 451  # system call number, the same on all architectures; Linux 6.5
_QUICK_BYTES = 4 << 20  # the kernel counts so many in 2 to 25 µs
_PageRange, _PageCounts = ctypes.c_uint64 * 2, ctypes.c_uint64 * 5  # of cachestat(2)


def address_of(view: memoryview) -> int:
    """Where in memory a buffer starts."""
    if not len(view):
        return 0
    if view.readonly:
        return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
    return ctypes.addressof(ctypes.c_char.from_buffer(view))  # a tenth of the time


# -- buffers -----------------------------------------------------------------------------------------------------------


def slot_bytes(buffer_bytes: int) -> int:
    """The memory that a buffer of a pool takes: a page of slack, for any alignment."""
    return -(-(buffer_bytes + ALIGN_BYTES) // ALIGN_BYTES) * ALIGN_BYTES


def _mapping(nbytes: int) -> memoryview:
    """Fresh memory, in huge pages if it is large; none of it is there before it is touched.

    The kernel begins a mapping at a huge page only if it is made of whole ones.
    """
    page = _HUGE_PAGE_BYTES if nbytes >= _HUGE_PAGE_BYTES else ALIGN_BYTES
    memory = mmap.mmap(-1, -(-nbytes // page) * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        # A request to or from 4 KiB pages is a list of thousands of addresses: huge pages read 1.9 times as fast
        # and write 1.4 times as fast past the page cache (virtual disk, 2 processes of 4 threads).
        memory.madvise(mmap.MADV_HUGEPAGE)
    except (AttributeError, OSError):
        pass  # not in this kernel, or switched off
    return memoryview(memory)


class Buffer:
    """Page-aligned reusable memory. `at(offset, nbytes)` is the part that suits direct I/O at that file offset.

    The memory goes when nobody holds a part of it any more.
    """

    def __init__(self, nbytes: int, memory: memoryview | None = None) -> None:
        self.view = _mapping(nbytes)[:nbytes] if memory is None else memory

    def at(self, offset: int, nbytes: int) -> memoryview:
        start = offset % ALIGN_BYTES
        if start + nbytes > len(self.view):
            raise StorageError(f"a buffer of {len(self.view)} bytes can't hold {nbytes} bytes for offset {offset}")
        return self.view[start : start + nbytes]

    def close(self) -> None:
        self.view.release()


class BufferPool:
    """At most `budget_bytes` of buffers, made when first needed and reused, because first touch of memory is slow.

    A buffer holds `buffer_bytes` at any file offset: it has a page of slack for the alignment. Buffers lie side by side
    in larger mappings: one by one they would waste a huge page each for that slack.
    """

    def __init__(self, budget_bytes: int, buffer_bytes: int = BUFFER_BYTES) -> None:
        if buffer_bytes <= 0:
            raise StorageError(f"a buffer of {buffer_bytes} bytes can't be made; give buffer_bytes > 0")
        self.buffer_bytes = buffer_bytes
        self._slot_bytes = slot_bytes(buffer_bytes)
        self.capacity = budget_bytes // self._slot_bytes
        if self.capacity < 1:
            raise StorageError(
                f"a memory budget of {budget_bytes} bytes has no room for one buffer of {self._slot_bytes}; "
                "raise the budget or use smaller buffers"
            )
        self._free: list[Buffer] = []
        self._rest = memoryview(b"")  # of the newest mapping: what no buffer has yet
        self._made = 0
        self._in_use = 0
        self._peak = 0
        self._closed = False
        self._changed = threading.Condition()

    @property
    def peak_bytes(self) -> int:
        """The most memory that was out at once."""
        return self._peak * self._slot_bytes

    @property
    def in_use(self) -> int:
        """How many buffers are out."""
        return self._in_use

    @property
    def made_bytes(self) -> int:
        """The memory this pool has mapped so far."""
        return self._made * self._slot_bytes

    def acquire(self, timeout_s: float | None = None) -> Buffer:
        """A buffer, as soon as one is free; StorageError after `timeout_s`."""
        with self._changed:
            ready = self._changed.wait_for(self._available, timeout_s)
            if self._closed:
                raise StorageError("the buffer pool is closed")
            if not ready:
                raise StorageError(
                    f"all {self.capacity} buffers stayed in use for {timeout_s} s: the store is stuck, or too slow"
                )
            if not self._free:
                self._free.append(self._make())
                self._made += 1
            self._in_use += 1
            self._peak = max(self._peak, self._in_use)
            return self._free.pop()  # the last one used: its memory is the warmest

    def _make(self) -> Buffer:
        size = self._slot_bytes
        if len(self._rest) < size:
            self._rest = _mapping(max(1, min(self.capacity - self._made, _MAPPING_BYTES // size)) * size)
        memory, self._rest = self._rest[:size], self._rest[size:]
        return Buffer(size, memory)

    def _available(self) -> bool:
        return self._closed or bool(self._free) or self._made < self.capacity

    def release(self, buffer: Buffer) -> None:
        with self._changed:
            self._in_use -= 1
            if self._closed:
                buffer.close()
            else:
                self._free.append(buffer)
            self._changed.notify()

    def close(self) -> None:
        """Give the memory back; buffers that are out go when they are released. Waiting `acquire`s fail."""
        with self._changed:
            self._closed = True
            for buffer in self._free:
                buffer.close()
            self._free.clear()
            self._rest = memoryview(b"")
            self._changed.notify_all()


# -- the direct descriptor ---------------------------------------------------------------------------------------------


class _DirectFd:
    """A second, O_DIRECT descriptor of an open file, opened at first need; None once the file system refused."""

    def __init__(self, path: str, flags: int, device: int, ops: FileOps) -> None:
        self._path = path
        self._flags = flags
        self._device = device
        self._ops = ops
        self._fd: int | None = None
        self._lock = threading.Lock()

    def get(self) -> int | None:
        if self._fd is not None or self._device in _refusing:
            return self._fd
        with self._lock:
            if self._fd is None:
                try:
                    self._fd = self._ops.open(self._path, self._flags | os.O_DIRECT)
                except OSError as error:
                    if error.errno not in _REFUSALS:
                        raise
                    self.refuse(error)
            return self._fd

    def refuse(self, error: OSError) -> None:
        """From now on everything on this file system is buffered; the descriptor stays open until `close`."""
        if self._device not in _refusing:
            _refusing.add(self._device)
            _log.warning(
                "%s: this file system refuses direct I/O (%s); using the page cache, which is slower",
                self._path,
                os.strerror(error.errno or 0),
            )

    @property
    def usable(self) -> bool:
        return self._device not in _refusing

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            self._ops.close(fd)


# -- writing -----------------------------------------------------------------------------------------------------------


class DirectWriter:
    """An open file that any number of processes and threads write disjoint byte ranges of.

    Never truncates. `write` is fastest from memory whose address equals the offset modulo 4096 (`Buffer.at`), and
    correct from any. Nothing is durable before `sync`.
    """

    def __init__(self, path: str, *, ops: FileOps = REAL_OPS) -> None:
        self.path = path
        self._ops = ops
        try:
            self._fd: int | None = ops.open(path, os.O_WRONLY | os.O_CREAT)
        except OSError as error:
            raise os_error("writing", path, error) from error
        self._direct = _DirectFd(path, os.O_WRONLY, os.fstat(self._fd).st_dev, ops)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _open_fd(self) -> int:
        if self._fd is None:
            raise StorageError(f"writing {self.path}: the writer is closed")
        return self._fd

    def reserve(self, start: int, stop: int) -> None:
        """Have the file system set space aside for [start, stop), so that a full disk is an error now.

        Free space is asked for first: fallocate that fails half-way keeps what it got, and a reservation that can't
        fit would take the last block from everybody else on the disk. After an error, remove the file.
        """
        if stop <= start:
            return
        fd, nbytes = self._open_fd(), stop - start
        try:
            if nbytes > self._ops.free_bytes(fd):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._ops.fallocate(fd, start, nbytes)
        except OSError as error:
            if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP):
                return  # the check above is all that this file system allows
            free = f" (reserving {nbytes} bytes, {self._ops.free_bytes(fd)} are free)"
            raise os_error("writing", self.path, error, free) from error

    def write(self, offset: int, buffer: bytes | bytearray | memoryview) -> None:
        """All of `buffer` at `offset`: blocks directly where that is possible and pays, the rest buffered."""
        view = memoryview(buffer).cast("B")
        fd = self._open_fd()
        # Memory that does not fit the offset can never be written directly: everything is the head.
        fits = len(view) >= DIRECT_MIN_BYTES and (address_of(view) - offset) % ALIGN_BYTES == 0
        done = 0
        while done < len(view):
            at, left = offset + done, len(view) - done
            head = min(-at % ALIGN_BYTES, left) if fits else left
            middle = 0 if head else left - left % ALIGN_BYTES
            if middle and (written := self._write_direct(view[done : done + middle], at)) is not None:
                done += written
                continue
            if not head:  # the unaligned tail, or all of it when the file system refuses
                head = left
            done += self._write_some(fd, view[done : done + head], at)

    def _write_direct(self, view: memoryview, at: int) -> int | None:
        """Bytes written; None when the file system refuses, which it may say at the first write only (NFS)."""
        try:
            fd = self._direct.get()
            if fd is None or not self._direct.usable:
                return None
            written = self._ops.pwrite(fd, view, at)
        except OSError as error:
            if error.errno in _REFUSALS:
                self._direct.refuse(error)
                return None
            raise self._write_error(error, at, len(view)) from error
        return self._checked(written, at, len(view))

    def _write_some(self, fd: int, view: memoryview, at: int) -> int:
        try:
            written = self._ops.pwrite(fd, view, at)
        except OSError as error:
            raise self._write_error(error, at, len(view)) from error
        return self._checked(written, at, len(view))

    def _checked(self, written: int, at: int, wanted: int) -> int:
        if written <= 0:
            raise StorageError(f"writing {self.path} ({wanted} bytes at offset {at}): the file system wrote none")
        return written

    def _write_error(self, error: OSError, at: int, wanted: int) -> Exception:
        return os_error("writing", self.path, error, f" ({wanted} bytes at offset {at})")

    def sync(self) -> None:
        """What was written, by anyone on this machine, is durable."""
        try:
            self._ops.fsync(self._open_fd())
        except OSError as error:
            raise os_error("syncing", self.path, error) from error

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is None:
            return
        try:
            try:
                self._direct.close()
            finally:
                self._ops.close(fd)
        except OSError as error:
            raise os_error("closing", self.path, error) from error


# -- reading -----------------------------------------------------------------------------------------------------------


class Checks:
    """Parts of what is read (number, [low, high) of it, ascending): each is looked at once, wherever it is at hand."""

    def __init__(self, parts: Iterable[tuple[int, int, int]], is_sound: Callable[[int, memoryview], bool]) -> None:
        self.wrong: list[int] = []  # the numbers of those that are not sound
        self.left = list(parts)
        self._is_sound = is_sound

    def look(self, source: memoryview, base: int = 0) -> Iterator[int]:
        """Look at those that lie in these bytes, which begin at `base`; after each look, where that part ends."""
        left = []
        for part in self.left:
            number, low, high = part
            if low < base or high > base + len(source):
                left.append(part)
                continue
            if not self._is_sound(number, source[low - base : high - base]):
                self.wrong.append(number)
            yield high - base
        self.left = left

    def finish(self, view: memoryview) -> None:
        """Look at all that are left, where everything is."""
        for _ in self.look(view):
            pass


def copy_checked(source: memoryview, into: memoryview, base: int = 0, checks: Checks | None = None) -> None:
    """Copy bytes that begin at `base` of a read; each part right after the look at it: the processor has it at hand.

    With two passes over a bufferful, the second waits for memory again: cold loads took 1.05 of the time.
    """
    # With numpy: a slice assignment of memoryviews would keep the interpreter locked.
    to, of, done = np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8), 0
    for end in checks.look(source, base) if checks is not None else ():
        np.copyto(to[done:end], of[done:end])
        done = end
    np.copyto(to[done:], of[done:])


class DirectReader:
    """An open file to read byte ranges of: from the page cache what is in it, the rest past it.

    The memory may lie anywhere; blocks that don't fit its alignment pass through `scratch` (a pool to share among
    readers), which costs a copy. Without scratch such reads are buffered. Each direct request takes one of `turns`.
    """

    def __init__(
        self, path: str, *, scratch: BufferPool | None = None, turns: Turns = ANY, ops: FileOps = REAL_OPS
    ) -> None:
        self.path = path
        self._turns = turns
        self._ops = ops
        self._scratch = scratch
        try:
            self._fd: int | None = ops.open(path, os.O_RDONLY)
        except OSError as error:
            raise os_error("reading", path, error) from error
        found = os.fstat(self._fd)
        self.size: int = found.st_size
        self._device = found.st_dev
        self._direct = _DirectFd(path, os.O_RDONLY, found.st_dev, ops)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def fileno(self) -> int:
        """The descriptor that goes through the page cache; StorageError when the reader is closed."""
        return self._open_fd()

    def _open_fd(self) -> int:
        if self._fd is None:
            raise StorageError(f"reading {self.path}: the reader is closed")
        return self._fd

    def read_into(self, offset: int, into: memoryview, *, cold: bool = False, checks: Checks | None = None) -> None:
        """Fill `into` with the bytes from `offset` on; CorruptError if the file ends before that.

        `cold`: the page cache is known to have none of it, and is not asked. Of `checks` those are done on the way that
        can be; the rest is left to the caller.
        """
        view = memoryview(into).cast("B")
        fd = self._open_fd()
        if offset + len(view) > self.size:
            raise truncated(self.path, offset, len(view), max(0, self.size - offset))
        if len(view) < DIRECT_MIN_BYTES or (not cold and is_cached(fd, offset, len(view))):
            self._read_buffered(fd, offset, view)
        elif (address_of(view) - offset) % (sector := sector_bytes(fd, self._device)) == 0:
            self._read_in_place(fd, offset, view, sector)
        elif self._scratch is not None:
            self._read_through_scratch(fd, offset, view, self._scratch, checks)
        else:
            self._read_buffered(fd, offset, view)

    def _read_in_place(self, fd: int, offset: int, view: memoryview, sector: int) -> None:
        head = -offset % sector
        middle = (len(view) - head) // sector * sector
        if head:
            self._read_buffered(fd, offset, view[:head])
        done = head + self._read_direct(offset + head, view[head : head + middle])
        if done < len(view):
            self._read_buffered(fd, offset + done, view[done:])

    def _read_through_scratch(
        self, fd: int, offset: int, view: memoryview, scratch: BufferPool, checks: Checks | None
    ) -> None:
        buffer = scratch.acquire()
        try:
            done = 0
            while done < len(view):
                at = offset + done
                skip = at % ALIGN_BYTES
                room = len(buffer.view) // ALIGN_BYTES * ALIGN_BYTES  # with the slack: a bufferful is one request
                wanted = min(room, -(-(skip + len(view) - done) // ALIGN_BYTES) * ALIGN_BYTES)
                got = self._read_direct(at - skip, buffer.view[:wanted])
                if got <= skip:
                    break
                count = min(got - skip, len(view) - done)
                copy_checked(buffer.view[skip : skip + count], view[done : done + count], done, checks)
                done += count
        finally:
            scratch.release(buffer)
        self._read_buffered(fd, offset + done, view[done:])

    def _read_direct(self, at: int, view: memoryview) -> int:
        """Bytes read; fewer than wanted at the end of the file or when the file system refuses."""
        done = 0
        while done < len(view):
            try:
                fd = self._direct.get()
                if fd is None or not self._direct.usable:
                    break
                with self._turns(len(view) - done):
                    got = self._ops.preadv(fd, view[done:], at + done)
            except OSError as error:
                if error.errno in _REFUSALS:
                    self._direct.refuse(error)
                    break
                raise self._read_error(error, at + done, len(view) - done) from error
            done += got
            if got == 0 or got % sector_bytes(fd, self._device):
                break
        return done

    def _read_buffered(self, fd: int, offset: int, view: memoryview) -> None:
        done = 0
        while done < len(view):
            try:
                got = self._ops.preadv(fd, view[done:], offset + done)
            except OSError as error:
                raise self._read_error(error, offset + done, len(view) - done) from error
            if got == 0:
                raise truncated(self.path, offset, len(view), done)
            done += got

    def _read_error(self, error: OSError, at: int, wanted: int) -> Exception:
        return os_error("reading", self.path, error, f" ({wanted} bytes at offset {at})")

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is None:
            return
        try:
            try:
                self._direct.close()
            finally:
                self._ops.close(fd)
        except OSError as error:
            raise os_error("closing", self.path, error) from error


@cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _syscall_of(library: ctypes.CDLL) -> Any:
    call = library.syscall
    call.argtypes = [ctypes.c_long, ctypes.c_int, _PageRange, _PageCounts, ctypes.c_uint]
    call.restype = ctypes.c_long
    return call


_cachestat = _syscall_of(ctypes.CDLL(None))
_quick_cachestat = _syscall_of(ctypes.PyDLL(None))  # so short that other threads are given no turn meanwhile
_sectors: dict[int, int] = {}


def sector_bytes(fd: int, device: int) -> int:
    """What direct reads of a file must be multiples of, in memory and on disk: asked once a device (Linux 6.1).

    Arrays that several ranks saved begin at any multiple of their rows: 512 lets most of them be read in place.
    """
    known = _sectors.get(device)
    if known is None:
        found = ctypes.create_string_buffer(256)
        said = 0
        if hasattr(_libc(), "statx") and _libc().statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, found) == 0:
            mask, memory, offset = (ctypes.c_uint32.from_buffer(found, at).value for at in (0, 152, 156))
            said = max(memory, offset) if mask & _STATX_DIOALIGN else 0
        known = _sectors[device] = said if said in (512, 1024, 2048) else ALIGN_BYTES
    return known


def cached_pages(fd: int, offset: int, nbytes: int) -> int:
    """How many pages of a byte range are in the page cache; -1 where the kernel can't tell (before 6.5).

    cachestat(2), not a read with RWF_NOWAIT: that one starts readahead, so the disk would read cold bytes twice.
    """
    counts = _PageCounts()  # the first is what is cached
    call = _quick_cachestat if nbytes <= _QUICK_BYTES else _cachestat
    return counts[0] if call(_CACHESTAT, fd, _PageRange(offset, nbytes), counts, 0) == 0 else -1


def is_cached(fd: int, offset: int, nbytes: int) -> bool:
    """Whether at least half of a byte range is in the page cache; True where the kernel can't tell."""
    cached = cached_pages(fd, offset, nbytes)
    return cached < 0 or cached * 2 >= _pages(offset, nbytes)


def all_cached(fd: int, offset: int, nbytes: int) -> bool:
    """Whether the page cache has all of a byte range; False also where the kernel can't tell."""
    return cached_pages(fd, offset, nbytes) >= _pages(offset, nbytes)


def _pages(offset: int, nbytes: int) -> int:
    return (offset + nbytes - 1) // mmap.PAGESIZE - offset // mmap.PAGESIZE + 1
