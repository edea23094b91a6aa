"""Content that has to be worked out (decoded, fetched, rearranged), in windows that are made once and shared.

Rules:
- A window is made by one thread; others that want it wait for that one, at most `wait_s`, and get its error if it
  fails. Nothing is kept of a failure: the next reader tries again.
- All windows together, kept and in reserve, take at most `budget_bytes`; only windows that are being made or copied
  right now may exceed it. The least recently used go first; their memory is used again, because fresh memory is slow.
- Windows ahead of a sequential reader are made by a few threads of the cache, only when there is room.
"""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from ckptfs.errors import StorageError
from ckptfs.views.nodes import Computed

Make = Callable[[memoryview], None]
Key = tuple[object, ...]

_SMALLEST = 1 << 16  # memory comes in powers of two from here on, so that it can be used again


@dataclass(slots=True, eq=False)
class _Window:
    memory: bytearray
    size: int
    ready: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    users: int = 1


def _room(size: int) -> int:
    """How much memory a window of that size is given."""
    return max(_SMALLEST, 1 << (size - 1).bit_length())


class WindowCache:
    """Windows by key. Thread-safe."""

    def __init__(self, budget_bytes: int, *, ahead_threads: int = 2, wait_s: float = 60.0) -> None:
        self._budget_bytes = budget_bytes
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self._windows: OrderedDict[Key, _Window] = OrderedDict()
        self._spare: dict[int, list[bytearray]] = {}
        self._held_bytes = 0  # of windows and spare memory
        self._ahead: queue.SimpleQueue[tuple[Key, int, Make]] = queue.SimpleQueue()
        self._ahead_threads = ahead_threads
        self._ahead_started = False
        self.hits = 0
        self.misses = 0

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    def read(self, key: Key, size: int, make: Make, offset: int, view: memoryview) -> None:
        """Copy part of a window into `view`; make it first if need be."""
        window, is_mine = self._take(key, size)
        try:
            if is_mine:
                self._fill(key, window, make)
            elif not window.ready.wait(self._wait_s):
                raise StorageError(f"the content took more than {self._wait_s:g} s; see whether the store answers")
            if window.error is not None:
                raise window.error
            view[:] = memoryview(window.memory)[offset : offset + len(view)]
        finally:
            self._give_back(key, window)

    def prefetch(self, key: Key, size: int, make: Make) -> None:
        """Have a window made in the background, unless it is there or there is no room for it."""
        with self._lock:
            if key in self._windows or self._ahead.qsize() > 4 * self._ahead_threads:
                return
            if not self._make_room(_room(size)):
                return
            if not self._ahead_started:
                self._ahead_started = True
                for _ in range(self._ahead_threads):
                    threading.Thread(target=self._work_ahead, name="views-ahead", daemon=True).start()
        self._ahead.put((key, size, make))

    def _work_ahead(self) -> None:
        while True:
            key, size, make = self._ahead.get()
            with self._lock:
                is_known = key in self._windows
            if not is_known:
                window, is_mine = self._take(key, size)
                try:
                    if is_mine:
                        self._fill(key, window, make)
                except Exception:
                    pass  # whoever really wants it tries again, and sees the error
                finally:
                    self._give_back(key, window)
                del window
            del key, make  # they hold the checkpoint

    def _take(self, key: Key, size: int) -> tuple[_Window, bool]:
        with self._lock:
            found = self._windows.get(key)
            if found is not None:
                self.hits += 1
                found.users += 1
                self._windows.move_to_end(key)
                return found, False
            self.misses += 1
            window = self._windows[key] = _Window(self._memory(_room(size)), size)
            return window, True

    def _memory(self, room: int) -> bytearray:
        """Memory for a window: spare, of the oldest idle window, or new. Holds the lock."""
        if not self._spare.get(room) and self._held_bytes + room > self._budget_bytes:
            same = (key for key, window in self._windows.items() if not window.users and len(window.memory) == room)
            oldest = next(same, None)
            if oldest is not None:
                return self._windows.pop(oldest).memory
        if self._spare.get(room):
            return self._spare[room].pop()
        self._make_room(room)
        self._held_bytes += room
        return bytearray(room)

    def _fill(self, key: Key, window: _Window, make: Make) -> None:
        try:
            make(memoryview(window.memory)[: window.size])
        except BaseException as error:
            window.error = error
            with self._lock:
                if self._windows.get(key) is window:
                    del self._windows[key]
            raise
        finally:
            window.ready.set()

    def _give_back(self, key: Key, window: _Window) -> None:
        with self._lock:
            window.users -= 1
            if window.users == 0 and self._windows.get(key) is not window:
                self._release(window)
            elif self._held_bytes > self._budget_bytes:
                self._make_room(0)

    def _make_room(self, size: int) -> bool:
        """Whether `size` more bytes fit; idle windows and spare memory are given up for it. Holds the lock."""
        for room in list(self._spare):
            while self._spare[room] and self._held_bytes + size > self._budget_bytes:
                self._spare[room].pop()
                self._held_bytes -= room
        while self._held_bytes + size > self._budget_bytes:
            oldest = next((key for key, window in self._windows.items() if window.users == 0), None)
            if oldest is None:
                return False
            self._held_bytes -= len(self._windows.pop(oldest).memory)
        return True

    def _release(self, window: _Window) -> None:
        room = len(window.memory)
        if self._held_bytes <= self._budget_bytes:
            self._spare.setdefault(room, []).append(window.memory)
        else:
            self._held_bytes -= room


@dataclass(frozen=True, slots=True)
class Produced(Computed):
    """A segment that is made window by window; `ahead(offset, length)` makes what will be read soon."""

    ahead: Callable[[int, int], None]


def produced(
    cache: WindowCache, key: Key, length: int, window_bytes: int, make: Callable[[int, memoryview], None]
) -> Produced:
    """A segment of `length` bytes; `make(start, view)` fills the bytes from `start` on, `view` being a whole window."""

    def window(number: int) -> tuple[Key, int, Make]:
        start = number * window_bytes
        return (*key, number), min(window_bytes, length - start), lambda view: make(start, view)

    def read(offset: int, view: memoryview) -> None:
        done = 0
        while done < len(view):
            number, within = divmod(offset + done, window_bytes)
            name, size, fill = window(number)
            part = view[done : done + size - within]
            cache.read(name, size, fill, within, part)
            done += len(part)

    def ahead(offset: int, count: int) -> None:
        for number in range(offset // window_bytes, -(-min(length, offset + count) // window_bytes)):
            cache.prefetch(*window(number))

    return Produced(length, read, ahead)
