"""A last save when the machine is taken away.

Rules: a signal handler only notes that the signal came. The save happens where the training loop asks, between two
steps, when the state is whole; all ranks stop after the same step, whichever of them was told. When the grace time is
over, the signal does what it would have done without us.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import TYPE_CHECKING, Any, Self

from ckptfs.errors import MismatchError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from ckptfs.ranks import Group
    from ckptfs.run import Run

_log = logging.getLogger("ckptfs")


class Stop:
    """What `install_signal_handler` returns. Ask `requested(step)` after each step, on every rank."""

    def __init__(self, group: Group, topic: str, grace_s: float) -> None:
        self._group, self._grace_s = group, grace_s
        self._key = f"stop/{topic}"
        self._signal: int | None = None
        self._at: int | None = None
        self._timer: threading.Timer | None = None
        self._before: dict[int, Any] = {}

    @property
    def signalled(self) -> bool:
        """Whether the signal has come to this process."""
        return self._signal is not None

    def requested(self, step: int) -> bool:
        """Whether to save now and leave. The same answer at the same step on every rank.

        Ranks are told apart by at most one step, as gradients are exchanged in each: so who was told names the step
        after its own, and everybody sees that in time. One small request to the job's store a call.
        """
        if self._group.size == 1:
            return self.signalled
        if self._at is None:
            self._at = self._agreed(step)
        return self._at is not None and step >= self._at

    def _agreed(self, step: int) -> int | None:
        kv = self._group.kv
        log = kv.log(self._key)
        if not log and self.signalled:
            kv.append(self._key, b"%d\n" % (step + 1))
            log = kv.log(self._key)
        return int(log.split(b"\n")[0]) if log else None  # several ranks may have been told: the first one counts

    def install(self, signals: Sequence[int]) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise MismatchError("install_signal_handler is called in the main thread: signals arrive there")
        for number in signals:
            self._before[number] = signal.signal(number, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self._signal is not None:
            return
        self._signal = number
        # A daemon: a process that is done in time just ends.
        self._timer = threading.Timer(self._grace_s, self._give_up)
        self._timer.daemon = True
        self._timer.start()

    def _give_up(self) -> None:
        _log.error("the grace time of %g s is over before the last save was: giving up", self._grace_s)
        number = self._signal or signal.SIGTERM
        # Not through Python's handlers, which run in the main thread: that may be stuck.
        os._exit(128 + number)

    def uninstall(self) -> None:
        """Put the handlers back that were there before, and stop the clock."""
        if self._timer is not None:
            self._timer.cancel()
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.uninstall()


def install_signal_handler(run: Run, signals: Sequence[int] = (signal.SIGTERM,), *, grace_s: float = 60.0) -> Stop:
    """Note these signals instead of dying of them, for a last save within `grace_s`.

        stop = ckptfs.install_signal_handler(run, grace_s=25)
        for step in range(first, last):
            train_one_step()
            if stop.requested(step):
                run.save(step, tree)
                break

    Called by every rank, in its main thread. If the process still lives after the grace time, it ends as it would have.
    """
    stop = Stop(run.group, run.url, grace_s)
    stop.install(signals)
    return stop
