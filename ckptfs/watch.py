"""Following a run: every committed step in ascending order, once, pinned while it is used.

Rules:
- A step counts when its manifest is there. Steps below the last one seen are not looked at again.
- A step is leased before it is handed out (lease.py) and until the next is asked for. One that was deleted between
  being listed and being leased is reported as skipped, never half read. With `every`, nothing after the follower's
  position can be deleted, so none is skipped; a follower that stands still then keeps all new steps on the disk.
- Waiting is one cheap listing at growing intervals. On a local file system the kernel tells when something appears; the
  intervals stay, because it does not tell what other machines do.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import select
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal, Self

from ckptfs import commit, lease
from ckptfs.checkpoint import Checkpoint
from ckptfs.errors import MismatchError, NotFoundError, StaleError
from ckptfs.storage import LocalStore

if TYPE_CHECKING:
    from ckptfs.run import Run
    from ckptfs.storage import Store

After = int | Literal["latest"] | None
_FIRST_POLL_S = 0.05
_LAST_POLL_S = {True: 1.0, False: 5.0}  # positional or not
_TOLD_POLL_S = 2.0  # where the kernel tells of local changes
_log = logging.getLogger("ckptfs.watch")


class Leased(Checkpoint):
    """A checkpoint that is neither deleted nor changed before it is closed: what replaces the step is not read."""

    def __init__(self, store: Store, number: int, held: lease.Lease, **how: Any) -> None:
        self.number = number  # the step by its folder's name
        self.lease = held
        self._named = store
        super().__init__(_held(store, held), **how)

    def close(self) -> None:
        super().close()
        if isinstance(self.store, LocalStore) and isinstance(self._named, LocalStore):
            self.store.root = self._named.root  # before the descriptor goes: its number will be another folder's
        self.lease.release()

    def __reduce__(self) -> tuple[Any, ...]:
        remake, (_, *rest) = super().__reduce__()
        return remake, (self._named, *rest)  # a descriptor means nothing to another process


def _held(store: Store, held: lease.Lease) -> Store:
    """The step that the lease is on, whatever takes its name meanwhile."""
    if not isinstance(store, LocalStore) or not isinstance(held, lease.FileLease):
        return store
    here = LocalStore(held.hold(store.full()), ops=store.ops)
    here.url = store.url
    return here


def pinned(run: Run, step: int) -> Leased:
    """The step, leased until it is closed; NotFoundError if it is not there."""
    name = commit.step_name(step)
    while True:
        held = lease.take(run.store, name)
        try:
            return Leased(run.store.sub(name), step, held, settings=run.settings)
        except StaleError:  # replaced between the lease and the look
            held.release()
        except BaseException:
            held.release()
            raise


def watch(
    run: Run,
    after: After = None,
    *,
    every: bool = False,
    newest: bool = False,
    idle_timeout_s: float | None = None,
    on_skipped: Callable[[int], None] | None = None,
    stop: threading.Event | None = None,
) -> Iterator[Leased]:
    """Committed steps above `after` as they appear ("latest": those still to come; None: all), each until the next.

    Ends when nothing came for `idle_timeout_s`, or `stop` is set. `newest`: of several new steps only the last.
    `on_skipped(step)` hears of steps that were deleted before they could be leased.
    """
    seen = _position(run, after)
    with ExitStack() as stack:
        news = stack.enter_context(_News(run.store, stop))
        follower = stack.enter_context(lease.follow(run.store, seen)) if every else None
        while True:
            found = _next(run, seen, news, newest=newest, timeout_s=idle_timeout_s, on_skipped=on_skipped)
            if found is None:
                return
            with found:
                seen = found.number
                if follower is not None:
                    follower.move(seen)  # this one is leased by itself
                yield found


def wait(run: Run, after: After = None, timeout_s: float | None = None, *, newest: bool = False) -> Leased | None:
    """The next committed step above `after`, pinned until it is closed; None if none came in time."""
    with _News(run.store, None) as news:
        return _next(run, _position(run, after), news, newest=newest, timeout_s=timeout_s)


def _position(run: Run, after: After) -> int:
    if after is None:
        return -1
    if after == "latest":
        return max(run.steps(), default=-1)
    if type(after) is not int:
        raise MismatchError(f"after is a step's number, 'latest' or None, not {after!r}")
    return after


def _next(
    run: Run,
    seen: int,
    news: _News,
    *,
    newest: bool,
    timeout_s: float | None,
    on_skipped: Callable[[int], None] | None = None,
) -> Leased | None:
    """The lowest (newest: highest) step above `seen`, as soon as there is one."""
    end = None if timeout_s is None else time.monotonic() + timeout_s
    delay_s = _FIRST_POLL_S
    while True:
        news.clear()
        for step in _candidates(run.store, seen, newest=newest):
            try:
                return pinned(run, step)
            except NotFoundError:
                if _was_deleted(run.store, step):
                    seen = step if not newest else seen
                    _log.warning("%s: step %d was deleted before it was seen", run.url, step)
                    if on_skipped is not None:
                        on_skipped(step)
        left_s = None if end is None else end - time.monotonic()
        if news.stopped or (left_s is not None and left_s <= 0):
            return None
        pause_s = news.longest_s if news.told else delay_s
        news.wait(pause_s if left_s is None else min(pause_s, left_s))
        delay_s = min(delay_s * 1.5, news.longest_s)


def _candidates(store: Store, seen: int, *, newest: bool) -> list[int]:
    numbers = (commit.step_number(name) for name in store.children()[0])
    return sorted((n for n in numbers if n is not None and n > seen), reverse=newest)


def _was_deleted(store: Store, step: int) -> bool:
    """A folder without a manifest is a step that is not there yet; without the folder, one that is no more."""
    if not store.positional:
        return False  # nothing distinguishes the two; if it comes back it is found again
    return commit.step_name(step) not in store.children()[0]


# --- waiting ---------------------------------------------------------------------------------------------

_IN_MOVED_TO, _IN_CREATE, _IN_DELETE_SELF, _IN_MOVE_SELF, _IN_ONLYDIR = 0x80, 0x100, 0x400, 0x800, 0x01000000
_IN_IGNORED = 0x8000
_SLICE_S = 0.2  # how long a `stop` may go unnoticed


class _News:
    """Waits until something may have changed: for the kernel's word where there is one, else for a while."""

    def __init__(self, store: Store, stop: threading.Event | None) -> None:
        self._root: str | None = getattr(store, "root", None) if store.positional else None
        self._positional = store.positional
        self._stop = stop
        self._fd = -1
        self._idle = threading.Event()  # never set: waiting for it is a sleep that a signal ends
        self._arm()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._disarm()

    @property
    def stopped(self) -> bool:
        return self._stop is not None and self._stop.is_set()

    @property
    def told(self) -> bool:
        """Whether the kernel tells of changes."""
        return self._fd >= 0

    @property
    def longest_s(self) -> float:
        return _TOLD_POLL_S if self._fd >= 0 else _LAST_POLL_S[self._positional]

    def clear(self) -> None:
        """Forget what was told so far: the caller looks now."""
        if self._fd < 0:
            self._arm()
        while self._fd >= 0:
            try:
                events = os.read(self._fd, 65536)
            except BlockingIOError:
                return
            self._note(events)

    def wait(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while (left_s := end - time.monotonic()) > 0 and not self.stopped:
            slice_s = min(left_s, _SLICE_S) if self._stop is not None else left_s
            if self._fd < 0:
                (self._stop or self._idle).wait(slice_s)
            elif _readable(self._fd, slice_s):
                return

    def _note(self, events: bytes) -> None:
        at = 0
        while at + 16 <= len(events):
            _, mask, _, length = struct.unpack_from("iIII", events, at)
            if mask & (_IN_IGNORED | _IN_DELETE_SELF | _IN_MOVE_SELF):
                self._disarm()  # the folder itself went away; the next look tries again
                return
            at += 16 + length

    def _arm(self) -> None:
        if self._root is None or not os.path.isdir(self._root):
            return
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            if fd < 0:
                raise OSError(ctypes.get_errno(), "inotify_init1")
            mask = _IN_MOVED_TO | _IN_CREATE | _IN_DELETE_SELF | _IN_MOVE_SELF | _IN_ONLYDIR
            if libc.inotify_add_watch(fd, os.fsencode(self._root), mask) < 0:
                code = ctypes.get_errno()
                os.close(fd)
                raise OSError(code, "inotify_add_watch")
        except (OSError, AttributeError) as error:
            if getattr(error, "errno", None) != errno.ENOENT:
                self._root = None  # no inotify here, or no more of it: intervals only
                _log.info("watching by intervals only: %s", error)
            return
        self._fd = fd

    def _disarm(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _readable(fd: int, timeout_s: float) -> bool:
    poll = select.poll()  # not select: descriptors may have high numbers
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1e3))
