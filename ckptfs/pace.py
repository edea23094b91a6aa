"""How a save in the background leaves the machine to training: its cores, the interpreter, memory and the disk.

Rules:
- What a save takes from a loop on another core grows with how fast it goes. So it goes gently while nobody waits for
  it, and as fast as a synchronous one as soon as somebody does: every wait for a save stands in `Pace.hurry`.
- Copies are not slowed down: an update may be waiting for them next.
- A store that is slower than the pace is not slowed down further.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_NICE = 10  # of background threads, beside a loop at 0
_PAUSE_S, _LONG_S, _RARELY = 1e-4, 1e-3, 20
_LOOK_S = 1.0  # how late a failure, or the end of the main thread, may be noticed


def spare_cores() -> int:
    """How many cores a rank has besides the one that it computes on."""
    return len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE") or 1) - 1


class Pace:
    """When a save's next write may begin: at once while somebody waits for the save, else so that there are
    `bytes_per_s` for each spare core. Without a rate nothing is held back.
    """

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self._bytes_per_s = (bytes_per_s or 0) * max(1, spare_cores())
        self._changed = threading.Condition()
        self._waiting = 0
        self._next_s = 0.0

    @contextlib.contextmanager
    def hurry(self) -> Iterator[None]:
        """For a block that waits for this save, or for a part of it."""
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._waiting -= 1

    def _hurried(self) -> bool:
        # An interpreter whose main thread has ended waits for the save.
        return not self._bytes_per_s or self._waiting > 0 or not threading.main_thread().is_alive()

    def turn(self, nbytes: int, check: Callable[[], None] = lambda: None) -> None:
        """Wait until `nbytes` may be written; `check` is called now and then, and may raise."""
        with self._changed:
            now = time.perf_counter()
            begin_s = now if self._hurried() else max(now, self._next_s)
            self._next_s = begin_s + (nbytes / self._bytes_per_s if self._bytes_per_s else 0.0)
        while not self._may_begin(begin_s):
            check()

    def _may_begin(self, begin_s: float) -> bool:
        with self._changed:
            left_s = begin_s - time.perf_counter()
            return left_s <= 0 or self._changed.wait_for(self._hurried, min(left_s, _LOOK_S))


def step_back() -> None:
    """Let other threads have this one's core first, if this rank has a second one.

    Where every core computes, saves would starve: they took twice as long for nothing. No further than this, also where
    a thread was begun by one that had stepped back: among ten processes on two cores, a lazy save of 512 MiB
    took 2 to 4 s with nice 10, 13 and 17 s with 19. Beside one loop alone there was no difference.
    """
    if spare_cores() < 1:
        return
    usual = os.getpriority(os.PRIO_PROCESS, os.getpid())  # the main thread's: others may have stepped back already
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(19, usual + _NICE))


_own = threading.local()  # until when a thread makes no more pauses


def let_others_in() -> None:
    """Leave the interpreter to a thread that waits for it: for loops of short calls in the background.

    A call that gives up the interpreter for microseconds lets nobody in: who waits takes 50 µs to wake up, finds it
    taken again, and does not ask for it before 5 ms without any such call. Beside 600 calls in a row a loop stood still
    for 20 ms. Where others want the cores, a pause can take as long as they like: then there are few of them.
    """
    began = time.perf_counter()
    if began < getattr(_own, "until", 0.0):
        return
    time.sleep(_PAUSE_S)
    took_s = time.perf_counter() - began
    _own.until = began + _RARELY * took_s if took_s > _LONG_S else 0.0
