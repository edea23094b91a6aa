"""Which steps a run keeps, and how the others go.

Rules: what to keep is a pure decision (`doomed`); the newest step, the newest that `verify` found sound, and pinned
ones always stay. Deleting happens on rank 0, after a commit, in a thread of its own. It begins with one rename (an
object store: with the manifest), so a crash leaves a whole step or none; what it leaves besides is removed by the next
save. A step that somebody reads (ckptfs.lease) stays until a later turn.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptfs import commit
from ckptfs.errors import CkptError, MismatchError, NotFoundError
from ckptfs.manifest import NAME as MANIFEST
from ckptfs.manifest import digest
from ckptfs.pace import let_others_in, step_back

if TYPE_CHECKING:
    from ckptfs.storage import Store

_log = logging.getLogger("ckptfs")
PINS = ".pins"  # a folder of the run; an object in it for each pinned step
VERIFIED = ".verified"  # the same for steps that were found sound; it holds the checksum of their manifest


@dataclass(frozen=True)
class Policy:
    """A step stays if any of these keeps it. None of them given: everything stays."""

    keep_last: int | None = None
    keep_every: int | None = None
    keep: Callable[[int], bool] | None = None

    def __post_init__(self) -> None:
        for name, value in (("keep_last", self.keep_last), ("keep_every", self.keep_every)):
            if value is not None and (type(value) is not int or value < 1):
                raise MismatchError(f"{name} is a whole number from 1 on, not {value!r}")
        if self.keep is not None and not callable(self.keep):
            raise MismatchError("keep takes a function: step → whether it stays")

    @property
    def keeps_all(self) -> bool:
        return self.keep_last is None and self.keep_every is None and self.keep is None


def doomed(steps: Sequence[int], policy: Policy, pinned: Collection[int] = ()) -> list[int]:
    """The steps that nothing keeps, oldest first."""
    ordered = sorted(steps)
    if policy.keeps_all or not ordered:
        return []
    kept = {ordered[-1], *pinned, *ordered[len(ordered) - min(policy.keep_last or 0, len(ordered)) :]}
    return [
        step
        for step in ordered
        if step not in kept
        and not (policy.keep_every and step % policy.keep_every == 0)
        and not (policy.keep is not None and policy.keep(step))
    ]


def pinned(store: Store) -> set[int]:
    """The steps with a pin."""
    numbers = (commit.step_number(name) for name in store.children(PINS)[1])
    return {number for number in numbers if number is not None}


def mark_of(store: Store, step: int) -> bytes:
    """Which step it is that is found sound: to be taken before it is checked, for it may be replaced meanwhile."""
    return digest(store.read(f"{commit.step_name(step)}/{MANIFEST}")).hex().encode()


def note_verified(store: Store, step: int, mark: bytes | None) -> None:
    """Remember what a check of every byte found: the mark of a sound step, None if it is not sound."""
    path = f"{VERIFIED}/{commit.step_name(step)}"
    if mark is not None:
        store.write(path, mark)
    else:
        store.remove(path)


def latest_verified(store: Store, steps: Collection[int]) -> int | None:
    """The newest of these steps that was found sound, and has not been replaced since."""
    noted = set(store.children(VERIFIED)[1])
    for step in sorted(steps, reverse=True):
        name = commit.step_name(step)
        if name not in noted:
            continue
        with contextlib.suppress(NotFoundError):
            if store.read(f"{VERIFIED}/{name}") == mark_of(store, step):
                return step
    return None


def protected(store: Store, steps: Collection[int]) -> set[int]:
    """The steps that stay whatever the policy says, besides the newest."""
    verified = latest_verified(store, steps)
    return pinned(store) | ({verified} if verified is not None else set())


def pin(store: Store, step: int) -> None:
    """Keep a step whatever the policy says, until `unpin`; it holds for every process."""
    name = commit.step_name(step)
    if commit.exists(store, name):  # else nothing is written, not even the folder of a run that is not there
        store.write(f"{PINS}/{name}", b"")
        if commit.exists(store, name):  # once more, now that the pin is there: who deletes looks the other way round
            return
        store.remove(f"{PINS}/{name}")
    raise NotFoundError(f"{store.url} has no step {step} to pin")


def unpin(store: Store, step: int) -> None:
    store.remove(f"{PINS}/{commit.step_name(step)}")


def prune(store: Store, steps: Sequence[int], policy: Policy) -> list[int]:
    """Delete what the policy does not keep, oldest first; returns the steps that are gone.

    Steps in use stay for now. A failure ends this turn, not the run: it is logged and the next turn tries again.
    """
    from ckptfs import lease

    gone: list[int] = []
    try:
        for step in doomed(steps, policy, protected(store, steps)):
            # Pins again: deleting takes long, and somebody may want a step because he has seen it named.
            if step not in pinned(store) and lease.discard(store, commit.step_name(step)):
                gone.append(step)
                store.remove(f"{VERIFIED}/{commit.step_name(step)}")
    except CkptError as error:
        _log.warning("old steps of %s could not be deleted, the next save tries again: %s", store.url, error)
    return gone


def _unhurried(store: Store) -> Store:
    """The same store, where deleting a thousand files leaves the interpreter to others in between."""
    from ckptfs.storage import LocalStore

    return LocalStore(store.root, ops=store.ops, between=let_others_in) if type(store) is LocalStore else store


class Pruner:
    """Does the deleting behind a run's back, one turn at a time."""

    def __init__(self, store: Store, policy: Policy, steps: Callable[[], list[int]]) -> None:
        self._store, self._policy, self._steps = _unhurried(store), policy, steps
        self._lock = threading.Lock()
        self._wanted = False
        self._thread: threading.Thread | None = None

    def after_commit(self) -> None:
        """Begin a turn, or have the one under way look once more."""
        if self._policy.keeps_all:
            return
        with self._lock:
            self._wanted = True
            if self._thread is None:
                # Not a daemon: an interpreter that ends finishes the step it is deleting.
                self._thread = threading.Thread(target=self._work, name="ckptfs-prune", daemon=False)
                self._thread.start()

    def _work(self) -> None:
        step_back()
        while True:
            with self._lock:
                if not self._wanted:
                    self._thread = None
                    return
                self._wanted = False
            self._turn()

    def _turn(self) -> None:
        try:
            prune(self._store, self._steps(), self._policy)
        except Exception as error:  # the policy's own function, or a store that cannot even list
            _log.warning("old steps of %s could not be deleted: %s: %s", self._store.url, type(error).__name__, error)

    def wait(self) -> None:
        thread = self._thread
        if thread is not None:
            thread.join()
