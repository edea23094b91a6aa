"""Local files mapped into memory: lent to those who send their bytes on, and brought in before they are asked for.

Rules:
- A view that was lent is for the kernel to read from (writev): it answers EFAULT where a page cannot be had, because
  the disk fails or the file was truncated. Python itself must never look into it: that would be SIGBUS.
- What comes soon is populated by threads that do nothing else, into huge pages where the file system has them: the
  disk then gets requests of one piece of memory each. `posix_fadvise(WILLNEED)` brings in single pages, which made the
  disk this was tried on half as fast, for several times the processor time. It is the way out for kernels before 5.14.
- Hints only: one that comes while many wait is dropped, and errors are for whoever really reads.
- A mapping needs no open file, and goes when nobody has a view of it any more.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import threading
import weakref

THREADS = 2
WAITING_MAX = 64

_MADV_WILLNEED = 3
_MADV_HUGEPAGE = 14
_MADV_POPULATE_READ = 22
_FAILED = ctypes.c_void_p(-1).value


class MappedFile:
    """An open local file, mapped whole; OSError when that is impossible. Its `view` keeps the mapping alive."""

    def __init__(self, fd: int) -> None:
        size = os.fstat(fd).st_size
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
        """Have a range brought into the page cache; returns at once."""
        _ahead.want(self, offset, min(length, len(self.view) - offset))

    def populate(self, offset: int, length: int) -> None:
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        for advice in (_MADV_POPULATE_READ, _MADV_WILLNEED):
            if _libc.madvise(self._address + start, offset + length - start, advice) == 0:
                return


class _Ahead:
    """The threads that populate."""

    def __init__(self) -> None:
        self._wanted: queue.SimpleQueue[tuple[MappedFile, int, int]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started = False

    def want(self, file: MappedFile, offset: int, length: int) -> None:
        if length <= 0 or self._wanted.qsize() >= WAITING_MAX:
            return
        with self._lock:
            if not self._started:
                self._started = True
                for _ in range(THREADS):
                    threading.Thread(target=self._work, name="read-ahead", daemon=True).start()
        self._wanted.put((file, offset, length))

    def _work(self) -> None:
        while True:
            file, offset, length = self._wanted.get()
            file.populate(offset, length)
            del file  # holds the mapping


def _load() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


_libc = _load()
_ahead = _Ahead()


def mapped(fd: int) -> MappedFile | None:
    """The file, mapped; None when it cannot be: then it is read in the ordinary way."""
    try:
        return MappedFile(fd)
    except OSError:
        return None
