"""What a local file has in the page cache, copied out of a mapping of it.

A copy out of a mapping costs no system call and no buffer: twice as fast as reads of large ranges, ten times for small
boxes. But a page that cannot be had is a signal there, not an error. So the rules:

- A mapping is only looked into where every page was in the page cache within the last second, and after asking the
  file for its size: a file that was truncated or closed is left to reads, which have errors.
- Cold pages are brought by calls that fail: a read, or MADV_POPULATE_READ (Linux 5.14).
- The mapping lives as long as anybody holds a view of it; it needs no descriptor of its own.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from ckptfs.storage.base import Store
from ckptfs.storage.directio import BufferPool, Checks, DirectReader, Turns, all_cached, cached_pages

TRUSTED_S = 1.0  # how long a page that was in the page cache is taken to be there
REGION_BYTES = 1 << 20
_ASK_AGAIN_S = 0.05
_POPULATE_BYTES = 64 << 20
_OPEN_FILES = max(256, min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
_HUGEPAGE = 14
_POPULATE_READ = 22
_FAILED = ctypes.c_void_p(-1).value
_PAGE = mmap.PAGESIZE


class OpenFile:
    """An open file of a local step, and a mapping of it once one is asked for."""

    def __init__(self, reader: DirectReader) -> None:
        self.reader = reader
        self.fd = reader.fileno()
        self.size = reader.size
        self.users = 0
        self.whole_until = 0.0  # until then all of the file is taken to be in the page cache
        self._ask_at = 0.0
        self._nothing_until = 0.0
        self._seen: dict[int, float] = {}  # region → until when it is taken to be there
        self._bytes: np.ndarray[Any, Any] | None = None
        self._lock = threading.Lock()

    def intact(self) -> bool:
        """Whether the file is open and as long as it was."""
        try:
            return os.lseek(self.fd, 0, os.SEEK_END) == self.size  # a quarter of the time of fstat
        except OSError:
            return False

    def bytes(self) -> np.ndarray[Any, Any]:
        """The mapped file; only to be looked into where `holds` or `whole` has just said so."""
        found = self._bytes
        if found is None:
            with self._lock:  # two mappings would let go of the one whose address somebody has
                found = self._bytes = self._map() if self._bytes is None else self._bytes
        return found

    def _map(self) -> np.ndarray[Any, Any]:
        libc = _libc()
        address = libc.mmap(None, self.size, mmap.PROT_READ, mmap.MAP_SHARED, self.fd, 0)
        if address in {None, _FAILED}:
            raise OSError(ctypes.get_errno(), "cannot be mapped")
        memory = (ctypes.c_ubyte * self.size).from_address(address)
        weakref.finalize(memory, libc.munmap, address, self.size).atexit = False
        libc.madvise(address, self.size, _HUGEPAGE)  # cold pages then come in large pieces, 2.5 times as fast
        found: np.ndarray[Any, Any] = np.frombuffer(memoryview(memory).cast("B"), np.uint8)
        found.flags.writeable = False
        return found

    def whole(self) -> bool:
        """Whether all of the file is in the page cache, and it is what was opened."""
        now = time.monotonic()
        if now >= self.whole_until:
            if now < self._ask_at or not self.size:
                return False
            cached = cached_pages(self.fd, 0, self.size)
            if cached < -(-self.size // _PAGE):
                self._ask_at = now + _ASK_AGAIN_S
                self._nothing_until = 0.0 if cached else self._ask_at
                return False
            self.whole_until = now + TRUSTED_S
            if self._bytes is None and self.size <= _POPULATE_BYTES:
                self.populate(0, self.size)  # one call instead of a page fault for every 64 KiB
        return self.intact()

    def cold(self) -> bool:
        """Whether nothing of the file was in the page cache a moment ago."""
        return time.monotonic() < self._nothing_until

    def holds(self, offset: int, length: int) -> bool:
        """Whether all of a range is in the page cache, and the file is what was opened."""
        if offset + length > self.size:  # the file was cut: reading it says so
            return False
        if self.whole():
            return True
        if self.cold():
            return False
        if length > 4 * REGION_BYTES:
            return all_cached(self.fd, offset, length) and self.intact()
        # Asking the kernel about 2 MiB takes longer than copying 64 KiB out of them: regions are remembered.
        now = time.monotonic()
        for region in range(offset // REGION_BYTES, (offset + length - 1) // REGION_BYTES + 1):
            if self._seen.get(region, 0.0) < now:
                start = region * REGION_BYTES
                if not all_cached(self.fd, start, min(REGION_BYTES, self.size - start)):
                    return all_cached(self.fd, offset, length) and self.intact()
                self._seen[region] = now + TRUSTED_S
        return self.intact()

    def populate(self, offset: int, length: int) -> bool:
        """Bring a range into the page cache, with the kernel's readahead; False when that failed or is impossible."""
        if offset + length > self.size or not self.intact():
            return False
        data, low = self.bytes(), offset // _PAGE * _PAGE
        address = data.__array_interface__["data"][0]
        return bool(_libc().madvise(address + low, offset + length - low, _POPULATE_READ) == 0)

    def close(self) -> None:
        self.fd = -1
        self.whole_until = 0.0
        self._bytes = None  # unmapped when nobody copies out of it any more
        self.reader.close()

    def __del__(self) -> None:
        try:
            self.close()  # of a checkpoint that nobody closed, or that was closed while this file was read
        except Exception:  # nobody is there to hear of it
            pass


class Window:
    """All of an array, as long as its file is in the page cache: ask `file.whole()` before every look."""

    __slots__ = ("count", "data", "file")

    def __init__(self, file: OpenFile, data: np.ndarray[Any, Any], count: Callable[[int], None]) -> None:
        self.file, self.data = file, data
        self.count = count  # told how many bytes were copied


class OpenFiles:
    """Open files of a local step, the least recently used closed first."""

    def __init__(self, store: Store, scratch: BufferPool, turns: Turns) -> None:
        self._store, self._scratch, self._turns = store, scratch, turns
        self._open: OrderedDict[str, OpenFile] = OrderedDict()
        self._lock = threading.Lock()

    def read_into(self, path: str, offset: int, view: memoryview, checks: Checks | None = None) -> None:
        """As `DirectReader.read_into`; stores that are not local do no check on the way."""
        if not self._store.positional:
            self._store.read_into(path, offset, view)
            return
        file = self.take(path)
        try:
            file.reader.read_into(offset, view, cold=file.cold(), checks=checks)
        finally:
            self.give(file)

    def take(self, path: str) -> OpenFile:
        """The file, open until it is given back."""
        with self._lock:
            file = self._open.get(path)
            if file is None:
                reader = self._store.open_reader(path, self._scratch, self._turns)  # type: ignore[attr-defined]
                file = OpenFile(reader)
                self._open[path] = file
            elif len(self._open) > _OPEN_FILES // 2:
                self._open.move_to_end(path)
            file.users += 1
            return file

    def give(self, file: OpenFile) -> None:
        with self._lock:
            file.users -= 1
            if len(self._open) > _OPEN_FILES:
                self._close_oldest()

    def _close_oldest(self) -> None:
        for path, file in self._open.items():
            if not file.users:
                del self._open[path]
                file.close()
                return

    def close(self) -> None:
        """Close what nobody reads, and forget the rest: that is closed when its last reader lets go of it."""
        with self._lock:
            for file in self._open.values():
                if not file.users:
                    file.close()
            self._open.clear()


_loaded: list[Any] = []


def _libc() -> Any:
    if not _loaded:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        _loaded.append(libc)
    return _loaded[0]
