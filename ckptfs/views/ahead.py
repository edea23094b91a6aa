"""Bringing local files into the page cache before they are read, by threads that do nothing else.

A range is mapped with huge pages asked for, and populated: the kernel then reads it in pieces of 2 MiB into large pages.
`posix_fadvise(WILLNEED)` reads into single pages; each of them is a piece of memory to the disk, which made it half as
fast on the disks this was tried on, and costs several times the processor time. It stays the way out for kernels before
5.14 and for files that cannot be mapped.

Rules: hints only. A hint that comes while many wait is dropped, errors are for whoever really reads, and the file that
is read ahead of need not stay open.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import threading

THREADS = 2
WAITING_MAX = 64
PIECE_BYTES = 16 << 20  # mapped at once

_MADV_HUGEPAGE = 14
_MADV_POPULATE_READ = 22
_FAILED = ctypes.c_void_p(-1).value


class _Ahead:
    def __init__(self) -> None:
        self._wanted: queue.SimpleQueue[tuple[int, int, int]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started = False

    def bring(self, fd: int, offset: int, length: int) -> None:
        if length <= 0 or self._wanted.qsize() >= WAITING_MAX:
            return
        with self._lock:
            if not self._started:
                self._started = True
                for _ in range(THREADS):
                    threading.Thread(target=self._work, name="read-ahead", daemon=True).start()
        self._wanted.put((os.dup(fd), offset, length))

    def _work(self) -> None:
        while True:
            fd, offset, length = self._wanted.get()
            try:
                _bring(fd, offset, length)
            except OSError:
                pass  # whoever really reads it sees the error
            finally:
                os.close(fd)


def _bring(fd: int, offset: int, length: int) -> None:
    start = offset // mmap.PAGESIZE * mmap.PAGESIZE
    for at in range(start, offset + length, PIECE_BYTES):
        size = min(PIECE_BYTES, offset + length - at)
        if not _populate(fd, at, size):
            os.posix_fadvise(fd, at, size, os.POSIX_FADV_WILLNEED)


def _populate(fd: int, offset: int, length: int) -> bool:
    """Whether that worked. Called through ctypes, which lets other threads go on meanwhile; mmap.madvise does not."""
    address = _libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, fd, offset)
    if address == _FAILED:
        return False
    try:
        _libc.madvise(address, length, _MADV_HUGEPAGE)  # refused without huge pages: then single ones do
        return bool(_libc.madvise(address, length, _MADV_POPULATE_READ) == 0)
    finally:
        _libc.munmap(address, length)


def _load() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


_libc = _load()
_ahead = _Ahead()


def bring(fd: int, offset: int, length: int) -> None:
    """Have a range of an open local file brought into the page cache; returns at once."""
    _ahead.bring(fd, offset, length)
