"""Local files mapped into memory, and what a sequential reader will want of them brought in before it asks.

Rules:
- A view that was lent is for the kernel to read from (writev): it answers EFAULT where a page cannot be had, because
  the disk fails or the file was truncated. Python itself must never look into a mapping: that would be SIGBUS.
- What comes soon is read in windows by threads that do nothing else, past the page cache and into huge pages that are
  used again: the disk gets requests of `WINDOW_BYTES`, several at a time, and the bytes are in memory once. What the
  page cache has already is taken from there.
- A window is given up when all of it was handed out. One that nobody comes for is given up when others need its memory.
  All of them together take `BUFFERS` × `WINDOW_BYTES`; when that is in use, or direct requests are refused, the page
  cache is populated instead, by huge pages where the file system has them: `posix_fadvise(WILLNEED)` brings in single
  ones, which made the disk this was tried on half as fast, for several times the processor time.
- Hints only: one that comes while many wait is dropped, and errors are for whoever really reads.
- A mapping needs no open file, and goes when nobody has a view of it any more. While it is there, its inode number
  belongs to no other file, so what is opened by path and has that number has the same bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator

import numpy as np

from ckptfs.errors import StorageError
from ckptfs.storage.directio import Buffer

WINDOW_BYTES = 4 << 20  # cold, four at a time: 1 MiB reach 0.4 of what 4 MiB do, 8 MiB 1.05
BUFFERS = 16
THREADS = 4
WAITING_MAX = 64
SMALLEST_BYTES = 1 << 20  # shorter stretches come through the page cache
WAIT_S = 30.0
FORGOTTEN_S = 0.25  # a window that nobody came for in that time may be given up for another
REST_S = 10.0  # without work for that long, the memory is given back

_MADV_WILLNEED = 3
_MADV_HUGEPAGE = 14
_MADV_POPULATE_READ = 22
_FAILED = ctypes.c_void_p(-1).value


class _Window:
    """A stretch of a file in memory, or on its way there."""

    __slots__ = ("data", "index", "length", "ready", "served_bytes", "used_s")

    def __init__(self, index: int, length: int) -> None:
        self.index = index
        self.length = length
        self.ready = threading.Event()
        self.data: memoryview | None = None  # None when ready: the page cache has it, or it could not be read
        self.served_bytes = 0
        self.used_s = 0.0


class MappedFile:
    """An open local file, mapped whole; OSError when that is impossible. Its `view` keeps the mapping alive."""

    def __init__(self, fd: int, path: str) -> None:
        found = os.fstat(fd)
        self._identity = (found.st_dev, found.st_ino)
        self._path = path
        self._windows: dict[int, _Window] = {}
        size = found.st_size
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        if address in {None, _FAILED}:
            raise OSError(ctypes.get_errno(), "cannot be mapped")
        # Not mmap.mmap: it holds a second descriptor of the file, and its madvise keeps other threads waiting.
        memory = (ctypes.c_ubyte * size).from_address(address)
        weakref.finalize(memory, _libc.munmap, address, size).atexit = False
        self.view = memoryview(memory).cast("B")
        self._address = address
        _libc.madvise(address, size, _MADV_HUGEPAGE)  # refused where there are no huge pages: single ones then

    def bring(self, offset: int, length: int) -> None:
        """Have a range brought into memory; returns at once."""
        end = min(offset + length, len(self.view))
        if end - offset <= 0:
            return
        for index in range(offset // WINDOW_BYTES, -(-end // WINDOW_BYTES)):
            if index not in self._windows:
                window = _Window(index, min(WINDOW_BYTES, len(self.view) - index * WINDOW_BYTES))
                self._windows[index] = window
                if not _ahead.want(self, window):
                    self._give_up(window)
                    window.ready.set()  # somebody may have found it already, and waits

    def parts(self, offset: int, length: int) -> Iterator[tuple[memoryview | None, int, int]]:
        """A range as (memory that has it, offset, length); None for what only the page cache or the disk has."""
        if not self._windows:
            yield None, offset, length
            return
        end = offset + length
        while offset < end:
            index, within = divmod(offset, WINDOW_BYTES)
            count = min(end - offset, WINDOW_BYTES - within)
            yield self._part(index, within, count), offset, count
            offset += count

    def lent(self, offset: int, length: int) -> list[memoryview]:
        """A range for the kernel to read from."""
        parts = self.parts(offset, length)
        return [self.view[at : at + count] if memory is None else memory for memory, at, count in parts]

    def _part(self, index: int, within: int, count: int) -> memoryview | None:
        window = self._windows.get(index)
        if window is None:
            return None
        if not window.ready.wait(WAIT_S):
            raise StorageError(f"{self._path}: reading took more than {WAIT_S:g} s; see whether the disk answers")
        data = window.data
        if data is None:
            return None
        window.served_bytes += count
        window.used_s = time.monotonic()
        if window.served_bytes >= window.length:
            self._give_up(window)
        return data[within : within + count]

    def is_near(self, offset: int, length: int) -> bool:
        """False while a window with a part of that range is being read."""
        if not self._windows:
            return True
        first, last = offset // WINDOW_BYTES, (offset + length - 1) // WINDOW_BYTES
        windows = [self._windows.get(index) for index in range(first, last + 1)]
        return all(window is None or window.ready.is_set() for window in windows)

    def has_window(self, offset: int, length: int) -> bool:
        """Whether a part of that range was read ahead, or is on its way."""
        first, last = offset // WINDOW_BYTES, (offset + length - 1) // WINDOW_BYTES
        return bool(self._windows) and any(index in self._windows for index in range(first, last + 1))

    def fetch(self, window: _Window) -> None:
        """Read a window. It is ready then, whatever happened."""
        start = window.index * WINDOW_BYTES
        try:
            if window.length >= SMALLEST_BYTES and not self._is_cached(start, window.length):
                window.data = self._direct(start, window.length)
            if window.data is None:
                self._populate(start, window.length)
        finally:
            window.used_s = time.monotonic()
            if window.data is None:
                self._give_up(window)
            window.ready.set()

    def _give_up(self, window: _Window) -> None:
        if self._windows.get(window.index) is window:
            del self._windows[window.index]

    def give_up_forgotten(self, before_s: float) -> bool:
        """Whether a window was given up that nobody came for since then."""
        for window in list(self._windows.values()):
            if window.ready.is_set() and window.used_s < before_s:
                self._give_up(window)
                return True
        return False

    def _is_cached(self, start: int, length: int) -> bool:
        """Whether the page cache has nearly all of it. The kernel says yes of files that others may not ask about."""
        pages = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
        if _libc.mincore(self._address + start, length, pages) != 0:
            return True
        return bytes(pages).count(0) <= len(pages) // 16

    def _direct(self, start: int, length: int) -> memoryview | None:
        memory = _ahead.memory()
        if memory is None:
            return None
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:  # deleted, or refused by the file system
            return None
        try:
            found = os.fstat(fd)
            if (found.st_dev, found.st_ino) != self._identity:
                return None
            whole_pages = -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
            return memory[:length] if os.preadv(fd, [memory[:whole_pages]], start) >= length else None
        except OSError:
            return None
        finally:
            os.close(fd)

    def _populate(self, start: int, length: int) -> None:
        for advice in (_MADV_POPULATE_READ, _MADV_WILLNEED):
            if _libc.madvise(self._address + start, length, advice) == 0:
                return


class _Ahead:
    """The threads that fetch, and the memory for it."""

    def __init__(self) -> None:
        self._wanted: queue.SimpleQueue[tuple[MappedFile, _Window]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._files: weakref.WeakSet[MappedFile] = weakref.WeakSet()  # those that may have windows
        self._free: deque[Buffer] = deque()  # filled by finalizers, which must not wait for a lock
        self._made = 0
        self._started = False

    def want(self, file: MappedFile, window: _Window) -> bool:
        """False when too much is asked for already."""
        if self._wanted.qsize() >= WAITING_MAX:
            return False
        with self._lock:
            if not self._started:
                self._started = True
                for _ in range(THREADS):
                    threading.Thread(target=self._work, name="read-ahead", daemon=True).start()
        self._wanted.put((file, window))
        return True

    def _work(self) -> None:
        while True:
            try:
                file, window = self._wanted.get(timeout=REST_S if self._made else None)
            except queue.Empty:
                self._rest()
                continue
            with self._lock:
                self._files.add(file)
            with contextlib.suppress(Exception):  # who reads it asks the page cache then, and sees the error
                file.fetch(window)
            del file, window  # they hold the mapping and the memory

    def memory(self) -> memoryview | None:
        """Memory for a window, given back when nobody has a part of it any more; None when all is in use."""
        with self._lock:
            if not self._free and self._made == BUFFERS:
                self._give_up_forgotten()
            if self._free:
                buffer = self._free.popleft()
            elif self._made < BUFFERS:
                buffer = Buffer(WINDOW_BYTES)
                self._made += 1
            else:
                return None
        lent = np.frombuffer(buffer.view, np.uint8)
        weakref.finalize(lent, self._free.append, buffer).atexit = False
        return lent.data

    def _give_up_forgotten(self) -> None:
        before_s = time.monotonic() - FORGOTTEN_S
        for file in list(self._files):
            if file.give_up_forgotten(before_s):
                return

    def _rest(self) -> None:
        with self._lock:
            while self._free:
                self._free.popleft()
                self._made -= 1


def _load() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


_libc = _load()
_ahead = _Ahead()


def mapped(fd: int, path: str) -> MappedFile | None:
    """The file, mapped; None when it cannot be: then it is read in the ordinary way."""
    try:
        return MappedFile(fd, path)
    except OSError:
        return None
