"""Saves that training does not wait for: the handle, the hook before the update, and the order of a run's saves.

Rules:
- A run has one save under way at a time, and they commit in the order of the calls. Each runs in a thread of its own
  that is not a daemon: the interpreter ends after it, never in the middle of it.
- The copy is consistent because nothing may change what has not been copied: in snapshot mode the caller waits, in
  lazy mode the optimizer's step does. What no given optimizer owns (buffers, random states) is copied at the call.
- A failure that nobody asked for is told at the next save, at `close()`, or when the interpreter ends.
- Nothing here touches a process group or runs a collective.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Literal, Self

from ckptfs.errors import CkptError, MismatchError, SaveError
from ckptfs.pace import Pace, step_back
from ckptfs.ranks.kv import Pauses
from ckptfs.stage import storage_addresses

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptfs.ranks import Group
    from ckptfs.save import Result, Saver

_log = logging.getLogger("ckptfs")
OnBusy = Literal["wait", "skip", "error"]
_BUSY = {"wait", "skip", "error"}


class Save:
    """A save under way, or done. Dropping it is fine: it goes on, and its failure will be told."""

    def __init__(self, saver: Saver, committed: Callable[[], None] = lambda: None) -> None:
        self._saver = saver
        self._committed = committed
        self._staged = threading.Event()
        self._done = threading.Event()
        self._wanted = threading.Event()  # somebody waits for the copies
        self._error: BaseException | None = None
        self._result: Result | None = None
        self._began = time.perf_counter()
        self._blocked_s = 0.0
        self._thread: threading.Thread | None = None
        self.step = saver.request.step
        self.skipped = False  # by on_busy="skip": nothing was saved, and nothing is wrong
        self.seen = False  # whether somebody has taken note of the failure, if there is one

    def __repr__(self) -> str:
        state = "skipped" if self.skipped else "failed" if self._error else "done" if self.done else "under way"
        return f"<ckptfs.Save of step {self.step}: {state}>"

    # --- for the caller --------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done.is_set()

    def staged(self, timeout: float | None = None) -> bool:
        """Wait until the snapshot is complete and the tensors may change; False if that takes longer than `timeout`.

        Raises what the save has failed with.
        """
        self._wanted.set()
        with self.blocking():
            copied = self._staged.wait(timeout)
        if self._error is not None:
            self._raise()
        return copied

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the step is committed; False after `timeout` seconds. Raises what it has failed with."""
        ended = self.ended(timeout)
        if ended and self._error is not None:
            self._raise()
        return ended

    def result(self, timeout: float | None = None) -> Result | None:
        """What the save did, once it is committed; None if it was skipped."""
        if not self.wait(timeout):
            raise TimeoutError(f"step {self.step} is not saved after {timeout:g} s; it goes on")
        if self._result is not None:
            self._result.blocked_s = self._blocked_s
        return self._result

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.wait()
        else:  # what went wrong inside matters more; a failure of the save is told later
            self.ended()

    def ended(self, timeout: float | None = None) -> bool:
        """Wait for its end, whatever that is; meanwhile it hurries."""
        with self._saver.pace.hurry():
            return self._done.wait(timeout)

    def _raise(self) -> None:
        self.seen = True
        assert self._error is not None
        raise self._error

    # --- for the thread that runs it -------------------------------------------------------------------

    def run(self, value: object) -> Result:
        """Everything, in this thread."""
        self._saver.keeps_tensors = True
        self._saver.pace = Pace()  # the caller waits
        try:
            self._saver.describe(value)
            self._copy()
            self._finish()
        except BaseException as error:
            self._fail(error)
            self._raise_from(error)
        assert self._result is not None
        self._result.blocked_s = self._blocked_s = self._result.total_s
        return self._result

    def snapshot(self, value: object) -> None:
        """The part that the caller waits for when there is no hook."""
        self._saver.copy_first = True
        try:
            self._saver.describe(value)
            self._copy()
        except BaseException as error:
            self._fail(error)
            self._raise_from(error)

    def describe(self, value: object, owned: set[int] | None) -> int:
        """The part that the caller waits for when there is a hook; the bytes that were copied at once."""
        self._saver.hurry = self._wanted.is_set
        try:
            return self._saver.describe(value, owned)
        except BaseException as error:
            self._fail(error)
            self._raise_from(error)
            raise

    def go_on(self, previous: Save | None, ended: Callable[[Save], None]) -> None:
        """What is left, in a thread of its own, after the previous save."""

        def work() -> None:
            step_back()
            try:
                if previous is not None:
                    previous.ended()
                if not self._staged.is_set():
                    self._copy()
                if not self.done:  # others may have finished it without this rank
                    self._finish()
                    self._committed()
            except BaseException as error:
                if not self.done:
                    self._fail(error)
            finally:
                ended(self)

        # Not a daemon: the interpreter waits for it before it ends.
        thread = threading.Thread(target=work, name=f"ckptfs-save-{self.step}", daemon=False)
        thread.start()
        self._thread = thread

    def give_up(self, error: BaseException) -> None:
        """It could not even be begun, and the caller is told: nobody is to wait for it."""
        self.seen = True
        self._fail(error)

    def note(self, text: str) -> None:
        """Something for the result to mention."""
        self._saver.notes.append(text)

    def skip(self) -> None:
        self.skipped = True
        self._staged.set()
        self._done.set()

    def hold(self) -> None:
        """What runs before an update: waits until the tensors may change. A failed save holds nobody."""
        self._wanted.set()
        with self.blocking():
            self._staged.wait()

    def blocking(self) -> _Waiting:
        """For a block of code that holds up training because of this save."""
        return _Waiting(self)

    @property
    def error(self) -> BaseException | None:
        """What it failed with, so far as is known; does not count as having taken note."""
        return self._error

    def _copy(self) -> None:
        saver = self._saver
        saver.enter()
        saver.reserve()
        saver.stage()
        self._staged.set()

    def _finish(self) -> None:
        result = self._saver.finish()
        result.total_s = time.perf_counter() - self._began
        self._saver.close()
        self._result = result
        self._done.set()

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._staged.set()  # nobody copies any more, so nobody needs to be held up
        try:
            ended = self._saver.abort(error)
            # An interrupt stays one; everything else ends as it does on all ranks.
            if isinstance(error, Exception):
                self._error = ended if isinstance(ended, CkptError) else None
            if not isinstance(ended, CkptError):
                self._result = ended
                ended.total_s = time.perf_counter() - self._began
        finally:
            self._saver.close()
            self._done.set()

    def _raise_from(self, cause: BaseException) -> None:
        self.seen = True
        if self._error is None:
            return
        if self._error is cause:
            raise cause
        raise self._error from cause


class _Waiting:
    """Counts the time its block takes as time that training was held up."""

    def __init__(self, save: Save) -> None:
        self._save = save

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        self._save._blocked_s += time.perf_counter() - self._began  # noqa: SLF001


# --- the order of a run's saves --------------------------------------------------------------------------


class Background:
    """A run's saves: one at a time, in order; and the failures that nobody has asked for yet."""

    def __init__(self) -> None:
        self._last: Save | None = None
        self._calls: dict[int | None, int] = {}

    @property
    def last(self) -> Save | None:
        """The save that the next one has to wait for."""
        return self._last if self._last is not None and not self._last.done else None

    def wait_idle(self) -> None:
        """Until nothing is under way; failures are not raised here."""
        if self._last is not None:
            self._last.ended()
            if self._last._thread is not None:  # noqa: SLF001
                self._last._thread.join()  # noqa: SLF001

    def may_start(self, policy: OnBusy, group: Group, topic: str, step: int, limit_s: float) -> bool:
        """Whether this save takes place. "wait" always does; otherwise rank 0 decides for all, by its own last save."""
        if policy == "wait":
            return True
        busy = self.last is not None
        if group.size > 1:
            attempt = self._calls[step] = self._calls.get(step, 0) + 1
            busy = _as_the_leader(group, f"busy/{topic}/{step}/{attempt}", busy, limit_s)
        if busy and policy == "error":
            raise CkptError(
                f"step {step} was not saved: the save before it is still under way; wait for it, or use on_busy"
            )
        return not busy

    def start(self, save: Save) -> None:
        previous, self._last = self.last, save
        try:
            save.go_on(previous, self._ended)
        except BaseException as error:  # no thread is to be had
            save.give_up(error)
            raise

    def _ended(self, save: Save) -> None:
        if save.error is not None:
            with _lock:
                _untold.append((self, save))

    def tell(self) -> None:
        """Report failures that nobody has asked for; called when the next save begins."""
        for save in _take_untold(self):
            text = f"an earlier save, of step {save.step}, failed and nobody asked: {save.error}"
            _log.error(text)
            warnings.warn(text, RuntimeWarning, stacklevel=4)

    def close(self) -> BaseException | None:
        """Wait for everything; the first failure that nobody has asked for."""
        self.wait_idle()
        untold = _take_untold(self)
        for save in untold[1:]:
            _log.error("step %s was not saved: %s", save.step, save.error)
        return untold[0].error if untold else None


def _as_the_leader(group: Group, key: str, busy: bool, limit_s: float) -> bool:
    """Rank 0's answer, on every rank. Ranks that are not busy when rank 0 is must not begin a save without it."""
    if group.rank == 0:
        group.kv.set(key, b"\1" if busy else b"\0")
        return busy
    pauses, ends_s = Pauses(group.size), time.monotonic() + limit_s
    while (answer := group.kv.get_many([key])[0]) is None:
        if time.monotonic() > ends_s:
            raise SaveError(
                "rank 0 did not call save_async", {0: f"never entered: it did not call within {limit_s:.0f} s"}
            )
        pauses.pause()
    return answer == b"\1"


_untold: list[tuple[Background, Save]] = []
_lock = threading.Lock()


def _take_untold(background: Background | None = None) -> list[Save]:
    """The failures that nobody has asked for, of one run or of all; they count as told from now on."""
    with _lock:
        mine = [(of, save) for of, save in _untold if background is None or of is background]
        _untold[:] = [entry for entry in _untold if entry not in mine]
    found = [save for _, save in mine if not save.seen]
    for save in found:
        save.seen = True
    return found


@atexit.register
def _tell_at_exit() -> None:
    """The interpreter has waited for the threads by now; what failed and was never asked for goes to stderr."""
    for save in _take_untold():
        _log.error("step %s was not saved, and nobody asked: %s", save.step, save.error)


# --- the hook before the update --------------------------------------------------------------------------

HookPoint = Any  # a torch optimizer, a function that takes what is to be called before an update, or several of them
_sweepers: weakref.WeakKeyDictionary[Any, Sweeper] = weakref.WeakKeyDictionary()


class Sweeper:
    """Removes an optimizer's spent pre-hooks after its step: while torch iterates over them, they cannot do it."""

    def __init__(self) -> None:
        self.spent: list[Any] = []

    def __call__(self, *_: object) -> None:
        while self.spent:
            self.spent.pop().remove()


def hook_points(before_update: HookPoint) -> list[Any]:
    points = list(before_update) if isinstance(before_update, (list, tuple)) else [before_update]
    for point in points:
        if not hasattr(point, "register_step_pre_hook") and not callable(point):
            raise MismatchError(
                f"before_update takes torch optimizers, or a function that is given what to call before the update; "
                f"{type(point).__name__} is neither"
            )
    if not points:
        raise MismatchError("before_update names no optimizer: leave it out to copy before save_async returns")
    return points


def owned_by(points: list[Any]) -> set[int] | None:
    """The memory that only these optimizers' steps change; None if a function stands for "everything"."""
    if not all(hasattr(point, "register_step_pre_hook") for point in points):
        return None
    owned: set[int] = set()
    for optimizer in points:
        owned |= storage_addresses(p for group in optimizer.param_groups for p in group["params"])
        owned |= storage_addresses(
            v for state in optimizer.state.values() if isinstance(state, dict) for v in state.values()
        )
    return owned


def hold_updates(points: list[Any], save: Save) -> None:
    """From now on, updates wait for the save's copies; each hook does so once and is then removed."""
    for point in points:
        if hasattr(point, "register_step_pre_hook"):
            _hook(point, save)
        else:
            point(save.hold)


def _hook(optimizer: Any, save: Save) -> None:
    sweeper = _sweepers.get(optimizer)
    if sweeper is None:
        sweeper = _sweepers[optimizer] = Sweeper()
        optimizer.register_step_post_hook(sweeper)
    sweeper()

    def wait(*_: object) -> None:
        if handle not in sweeper.spent:
            save.hold()
            sweeper.spent.append(handle)

    handle = optimizer.register_step_pre_hook(wait)
