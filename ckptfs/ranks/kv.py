"""The key-value stores that ranks talk through: one narrow protocol, one in memory, one over torch's c10d store.

Rule: nothing blocks inside a store. Waiting means asking again after a pause, so one connection serves all threads of a
process, a peer that died cannot hold a lock in it, and a wait that runs out leaves no warning in the job's log.
"""

from __future__ import annotations

import queue
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from ckptfs.errors import StorageError

_T = TypeVar("_T")

PART_BYTES = 4 << 20  # a TCPStore refuses values above 8 MiB
_KEYS_PER_REQUEST = 4096
_ONE_BY_ONE = 64  # so many keys are read by a request each: 6 ms
_NOTHING = "ckptfs: nothing is stored here"  # no value of ours is this


class KV(Protocol):
    """The little that a round needs of a store. Only `get` and `wait` wait, at most `timeout_s`.

    Any key may be removed at any time, also by others while this process is stopped in the middle of a call. Only who
    reads more than 64 at once sees to it that nobody removes them meanwhile: the leader reads beats and reports, and
    their owners remove them after its verdict.
    """

    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str, timeout_s: float) -> bytes: ...
    def get_many(self, keys: Sequence[str]) -> list[bytes | None]: ...
    def check(self, key: str) -> bool: ...
    def wait(self, keys: Sequence[str], timeout_s: float) -> None: ...
    def add(self, key: str, n: int) -> int: ...
    def append(self, key: str, value: bytes) -> None: ...
    def log(self, key: str) -> bytes: ...  # what was appended so far
    def delete(self, key: str) -> bool: ...


class MemoryKV:
    """A store inside this process, for threads that play ranks."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = bytes(value)
            self._changed.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout_s):
                raise TimeoutError(f"no value for {key!r} within {timeout_s:g} s")
            return self._values[key]

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        with self._changed:
            return [self._values.get(key) for key in keys]

    def check(self, key: str) -> bool:
        with self._changed:
            return key in self._values

    def wait(self, keys: Sequence[str], timeout_s: float) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: all(key in self._values for key in keys), timeout_s):
                raise TimeoutError(f"not all of {list(keys)!r} were set within {timeout_s:g} s")

    def add(self, key: str, n: int) -> int:
        with self._changed:
            total = int(self._values.get(key, b"0")) + n
            self._values[key] = str(total).encode()
            self._changed.notify_all()
            return total

    def append(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = self._values.get(key, b"") + value
            self._changed.notify_all()

    def log(self, key: str) -> bytes:
        return self.get_many([key])[0] or b""

    def delete(self, key: str) -> bool:
        with self._changed:
            return self._values.pop(key, None) is not None

    def keys(self) -> list[str]:
        with self._changed:
            return sorted(self._values)


class Pauses:
    """How long to wait before asking again: a tenth of what was waited already, within bounds.

    So an answer is late by a tenth at most, and 16,384 ranks that wait for minutes ask 20,000 times a second together.
    """

    def __init__(self, size: int) -> None:
        self._longest_s = min(max(size / 20_000, 0.05), 2.0)
        self._never = threading.Event()
        self.restart()

    def restart(self) -> None:
        self._since = time.monotonic()

    def pause(self, at_most_s: float = float("inf")) -> None:
        waited_s = time.monotonic() - self._since
        self._never.wait(max(0.0, min(max(0.001, waited_s / 10), self._longest_s, at_most_s)))


@dataclass
class _Call:
    """One operation on its way through the connection's thread."""

    work: Callable[[], Any]
    finished: threading.Event = field(default_factory=threading.Event)
    value: Any = None
    error: BaseException | None = None


class C10dKV:
    """A torch store, asked through one thread of its own.

    The thread is there because a request to a TCPStore whose host is stopped (SIGSTOP, a lost machine) never returns,
    and torch has no timeout for it: so only this thread hangs, and callers get a StorageError. It is a daemon for the
    same reason. The store handed in must be a clone: its connection is locked during each request.
    """

    def __init__(
        self, store: Any, *, prefix: str = "ckptfs/", hosted_by: str = "its host", answer_timeout_s: float = 30.0
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._hosted_by = hosted_by
        self._answer_timeout_s = answer_timeout_s
        if not store.has_extended_api():
            raise StorageError(
                "this job's coordination store cannot append (a FileStore, from init_method='file://...'): initialise "
                "torch.distributed with env:// or tcp://, so that ranks can agree on a save"
            )
        self._hung: _Call | None = None
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=[self._calls], name="ckptfs-kv", daemon=True).start()

    def close(self) -> None:
        """End the thread, once it has done what was asked before."""
        self._calls.put(None)

    def _ask(self, work: Callable[[], _T]) -> _T:
        if self._hung is not None and not self._hung.finished.is_set():
            raise self._no_answer()
        call = _Call(work)
        self._calls.put(call)
        # Two waits: who was stopped itself finds the first one over while the answer is about to be taken.
        if not any(call.finished.wait(self._answer_timeout_s / 2) for _ in range(2)):
            self._hung = call
            raise self._no_answer()
        if isinstance(call.error, RuntimeError):  # torch's DistNetworkError and DistStoreError
            raise StorageError(
                f"the coordination store is gone: {self._hosted_by} died ({str(call.error).splitlines()[0]}); "
                "restart the job, committed steps are intact"
            ) from call.error
        if call.error is not None:
            raise call.error
        value: _T = call.value
        return value

    def _no_answer(self) -> StorageError:
        return StorageError(
            f"the coordination store has not answered for {self._answer_timeout_s:g} s: {self._hosted_by} is stopped "
            "or unreachable; restart the job, committed steps are intact"
        )

    def set(self, key: str, value: bytes) -> None:
        self._ask(lambda: self._store.set(self._prefix + key, bytes(value)))

    def get(self, key: str, timeout_s: float) -> bytes:
        self.wait([key], timeout_s)
        value = self.get_many([key])[0]
        if value is None:
            raise TimeoutError(f"the value of {key!r} was removed while it was read")
        return value

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        values: list[bytes | None] = []
        for some in _slices([self._prefix + key for key in keys], _KEYS_PER_REQUEST):
            values += self._ask(lambda names=some: self._read(names))  # type: ignore[misc]  # default binds the loop's
        return values

    def _read(self, names: Sequence[str]) -> list[bytes | None]:
        # A store's get and multi_get block for minutes on names that are not there, so also on those that were removed
        # since a check. They are only for what nobody removes.
        if len(names) > _ONE_BY_ONE and self._store.check(list(names)):
            return [bytes(value) for value in self._store.multi_get(list(names))]
        return [self._read_one(name) for name in names]

    def _read_one(self, name: str) -> bytes | None:
        """A read that never blocks: to replace one thing by itself sets nothing, and is answered with what is there."""
        value = bytes(self._store.compare_set(name, _NOTHING, _NOTHING))
        return None if value == _NOTHING.encode() else value

    def check(self, key: str) -> bool:
        return self._ask(lambda: bool(self._store.check([self._prefix + key])))

    def wait(self, keys: Sequence[str], timeout_s: float) -> None:
        # Not the store's own wait: it logs a warning whenever it times out, and it holds the connection meanwhile.
        names = [self._prefix + key for key in keys]
        pauses, ends_s = Pauses(1), time.monotonic() + timeout_s
        while not self._ask(lambda: self._store.check(names)):
            left_s = ends_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"not all of {list(keys)!r} were set within {timeout_s:g} s")
            pauses.pause(left_s)

    def add(self, key: str, n: int) -> int:
        return self._ask(lambda: int(self._store.add(self._prefix + key, n)))

    def append(self, key: str, value: bytes) -> None:
        self._ask(lambda: self._store.append(self._prefix + key, bytes(value)))

    def log(self, key: str) -> bytes:
        return self.get_many([key])[0] or b""

    def delete(self, key: str) -> bool:
        return self._ask(lambda: bool(self._store.delete_key(self._prefix + key)))

    def nonce(self, mine: str) -> str:
        """The text that the first of all clients proposed: it names this store among all there ever were."""
        return self._ask(lambda: bytes(self._store.compare_set(self._prefix + "nonce", "", mine)).decode())


def _serve(calls: queue.SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        try:
            call.value = call.work()
        except BaseException as error:  # whatever it is, it belongs to the caller
            call.error = error
        call.finished.set()
        del call  # keep no value alive while waiting


def _slices(items: Sequence[_T], length: int) -> Iterator[Sequence[_T]]:
    for start in range(0, len(items), length):
        yield items[start : start + length]


def put_value(kv: KV, key: str, value: bytes) -> None:
    """Store a value of any size: small ones as they are, large ones in parts that are there before the head is."""
    if len(value) < PART_BYTES:
        kv.set(key, b"\0" + value)
        return
    starts = range(0, len(value), PART_BYTES)
    for number, start in enumerate(starts):
        kv.set(f"{key}/{number}", value[start : start + PART_BYTES])
    kv.set(key, b"\1" + struct.pack("<I", len(starts)))


def take_value(kv: KV, key: str) -> bytes | None:
    """What `put_value` stored, or None while it is not there."""
    return take_values(kv, [key])[0]


def take_values(kv: KV, keys: Sequence[str]) -> list[bytes | None]:
    return [None if head is None else _whole(kv, key, head) for key, head in zip(keys, kv.get_many(keys), strict=True)]


def _whole(kv: KV, key: str, head: bytes) -> bytes | None:
    if head[:1] == b"\0":
        return head[1:]
    (count,) = struct.unpack("<I", head[1:])
    # One at a time: all at once could exceed what one answer may hold.
    parts = [kv.get_many([f"{key}/{number}"])[0] for number in range(count)]
    return None if None in parts else b"".join(part for part in parts if part is not None)


def drop_value(kv: KV, key: str) -> None:
    """Remove a value and its parts, also those of a writer that died before it set the head."""
    kv.delete(key)
    number = 0
    while kv.delete(f"{key}/{number}"):
        number += 1
