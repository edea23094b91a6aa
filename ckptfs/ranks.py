"""How the ranks of one save talk: rounds over a key-value store, never collectives.

Rules:
- A collective blocks for ever when one peer is gone and must not run beside the user's own; a key-value store does
  neither. Nothing here touches a process group; everything may run in a background thread.
- One `Round` is the conversation of one save. Rank 0 leads: it opens the round, collects what the others say, and
  publishes one verdict, which every rank returns or raises alike.
- Every wait ends: by an answer, by a rank's failure, by lack of progress, by silence, or by a deadline.
- Nothing blocks inside the store. Waiting means asking again after a pause, so one connection serves all threads of a
  process and a peer that died cannot hold a lock in it.
- Deciding is pure (`joining`, `PeerWatch`, `_TRANSITIONS`); the loops around only carry bytes.

Keys of a topic, below `<digest of topic>/`:

    seq                number of the newest round (a counter; only the leader adds)
    now                the newest round: its opening, or that it is closed; and how the rounds before it ended
    <seq>/hi           hello records of the ranks, appended
    <seq>/all          the leader's answer: all hellos in rank order, or an error
    <seq>/b/<rank>     the rank's last beat
    <seq>/d/<key>      shared data, `<seq>/shared` the list of such keys
    <seq>/r/<rank>     the rank's report or failure
    <seq>/done         who has reported, appended; `<seq>/failed` exists once somebody failed
    <seq>/verdict      what became of the save
    <seq>/acks         how many ranks have read the verdict; the last one removes what is left of the round
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import queue
import secrets
import socket
import statistics
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, TypeVar

from .errors import CkptError, MismatchError, SaveError, StorageError, from_dict

_log = logging.getLogger("ckptfs")
_T = TypeVar("_T")

PART_BYTES = 4 << 20  # the TCPStore refuses values above 8 MiB
HISTORY_ROUNDS = 32  # how far back a rank that missed rounds can learn how they ended
_KEYS_PER_REQUEST = 4096


@dataclass(frozen=True)
class Timeouts:
    """How long a round waits for what. Only `enter_timeout_s` runs from a fixed moment; the others from progress."""

    enter_timeout_s: float = 600.0  # for every rank to call save
    progress_timeout_s: float = 120.0  # for a rank that lives but gets nothing done
    silence_timeout_s: float = 30.0  # for a rank that does not even beat: dead, or stopped
    grace_s: float = 10.0  # how much longer than the leader the others wait: its verdict says more
    beat_s: float = 1.0  # between two beats of a rank; longer in very large groups


# ---------------------------------------------------------------------------------------------- key-value stores


class KV(Protocol):
    """The little that a round needs of a store. No call blocks but `get` and `wait`, and those not past `timeout_s`."""

    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str, timeout_s: float) -> bytes: ...
    def get_many(self, keys: Sequence[str]) -> list[bytes | None]: ...
    def check(self, key: str) -> bool: ...
    def wait(self, keys: Sequence[str], timeout_s: float) -> None: ...
    def add(self, key: str, n: int) -> int: ...
    def append(self, key: str, value: bytes) -> None: ...
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

    def delete(self, key: str) -> bool:
        with self._changed:
            return self._values.pop(key, None) is not None

    def keys(self) -> list[str]:
        with self._changed:
            return sorted(self._values)


class Pauses:
    """How long to wait before asking again: a tenth of what was waited already, within bounds.

    So an answer is late by a tenth at most, and 16,384 ranks that wait for minutes ask about 20,000 times a second
    together, which one TCPStore answers without effort.
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

    The thread is there because a request to a TCPStore whose host is stopped (SIGSTOP, lost machine) never returns and
    torch has no timeout for it: only the thread hangs then, the caller gets a StorageError. It is not joined at exit
    for the same reason. The store handed in must be a clone: its lock is held during each request.
    """

    def __init__(self, store: Any, *, prefix: str = "ckptfs/", hosted_by: str = "", answer_timeout_s: float = 30.0):
        self._store = store
        self._prefix = prefix
        self._hosted_by = hosted_by or "the process that hosts it"
        self._answer_timeout_s = answer_timeout_s
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._extended = bool(store.has_extended_api())
        threading.Thread(target=self._serve, name="ckptfs-kv", daemon=True).start()

    def _serve(self) -> None:
        while True:
            call = self._calls.get()
            try:
                call.value = call.work()
            except BaseException as error:  # whatever it is, it belongs to the caller
                call.error = error
            call.finished.set()
            del call  # keep no value alive while waiting

    def _ask(self, work: Callable[[], _T]) -> _T:
        call = _Call(work)
        self._calls.put(call)
        if not call.finished.wait(self._answer_timeout_s):
            raise StorageError(
                f"the coordination store does not answer for {self._answer_timeout_s:g} s: {self._hosted_by} is "
                "stopped or unreachable; restart the job, older steps are intact"
            )
        if call.error is None:
            value: _T = call.value
            return value
        if isinstance(call.error, RuntimeError):  # torch's DistNetworkError, DistStoreError
            raise StorageError(
                f"the coordination store is gone: {self._hosted_by} died "
                f"({str(call.error).splitlines()[0]}); restart the job, older steps are intact"
            ) from call.error
        raise call.error

    def set(self, key: str, value: bytes) -> None:
        self._ask(lambda: self._store.set(self._prefix + key, bytes(value)))

    def get(self, key: str, timeout_s: float) -> bytes:
        self.wait([key], timeout_s)
        value = self.get_many([key])[0]
        if value is None:
            raise TimeoutError(f"the value of {key!r} was removed while it was read")
        return value

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        return [value for part in _parts(keys, _KEYS_PER_REQUEST) for value in self._ask(lambda p=part: self._read(p))]

    def _read(self, keys: Sequence[str]) -> list[bytes | None]:
        names = [self._prefix + key for key in keys]
        # get and multi_get block on keys that are not there, so ask first. Two requests for all keys in the usual case.
        there = names if self._store.check(names) else [name for name in names if self._store.check([name])]
        if len(there) > 1 and self._extended:
            found = dict(zip(there, self._store.multi_get(there), strict=True))
        else:
            found = {name: self._store.get(name) for name in there}
        return [bytes(found[name]) if name in found else None for name in names]

    def check(self, key: str) -> bool:
        return self._ask(lambda: bool(self._store.check([self._prefix + key])))

    def wait(self, keys: Sequence[str], timeout_s: float) -> None:
        # Not the store's own wait: it logs a warning for each one that times out, and it holds the connection.
        names = [self._prefix + key for key in keys]
        pauses, ends = Pauses(1), time.monotonic() + timeout_s
        while not self._ask(lambda: self._store.check(names)):
            left_s = ends - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"not all of {list(keys)!r} were set within {timeout_s:g} s")
            pauses.pause(left_s)

    def add(self, key: str, n: int) -> int:
        return self._ask(lambda: int(self._store.add(self._prefix + key, n)))

    def append(self, key: str, value: bytes) -> None:
        if self._extended:
            self._ask(lambda: self._store.append(self._prefix + key, bytes(value)))
        else:
            self._ask(lambda: self._append_slowly(self._prefix + key, bytes(value)))

    def _append_slowly(self, name: str, value: bytes) -> None:
        """For stores without append (FileStore): replace until nobody was faster."""
        while True:
            before = bytes(self._store.get(name)) if self._store.check([name]) else b""
            # compare_set takes text: latin-1 would be re-encoded, so such logs are kept in hex with a mark.
            raise StorageError(f"{type(self._store).__name__} cannot append ({len(before)} bytes at {name!r})")

    def delete(self, key: str) -> bool:
        return self._ask(lambda: bool(self._store.delete_key(self._prefix + key)))


def _parts(items: Sequence[_T], length: int) -> Iterator[Sequence[_T]]:
    for start in range(0, len(items), length):
        yield items[start : start + length]


def put_value(kv: KV, key: str, value: bytes) -> None:
    """Store a value of any size: small ones as they are, large ones in parts that are there before the head is."""
    if len(value) < PART_BYTES:
        kv.set(key, b"\0" + value)
        return
    parts = list(_parts(value, PART_BYTES))
    for number, part in enumerate(parts):
        kv.set(f"{key}/{number}", bytes(part))
    kv.set(key, b"\1" + struct.pack("<I", len(parts)))


def take_values(kv: KV, keys: Sequence[str]) -> list[bytes | None]:
    """What `put_value` stored, for keys that are there."""
    return [None if head is None else _whole(kv, key, head) for key, head in zip(keys, kv.get_many(keys), strict=True)]


def _whole(kv: KV, key: str, head: bytes) -> bytes | None:
    if head[:1] == b"\0":
        return head[1:]
    (count,) = struct.unpack("<I", head[1:])
    pieces: list[bytes] = []
    for number in range(count):  # one at a time: many at once could exceed what one answer may hold
        piece = kv.get_many([f"{key}/{number}"])[0]
        if piece is None:
            return None
        pieces.append(piece)
    return b"".join(pieces)


def drop_value(kv: KV, key: str) -> None:
    """Remove a value and its parts, also those of a writer that died before it set the head."""
    kv.delete(key)
    number = 0
    while kv.delete(f"{key}/{number}"):
        number += 1


# ---------------------------------------------------------------------------------------------- group


@dataclass
class _Topic:
    """What this rank remembers of a topic between rounds."""

    last_seq: int = 0  # newest round it took part in, or was told the end of
    unswept: list[int] = field(default_factory=list)  # leader: rounds that may have left keys


@dataclass
class Group:
    """The ranks that save together, as one of them sees it."""

    rank: int
    size: int
    kv_factory: Callable[[], KV] | None = None
    host: str = ""
    store_rank: int | None = None  # the rank whose process hosts the store, if it is one of them
    _kv: KV | None = None
    _topics: dict[str, _Topic] = field(default_factory=dict)

    @property
    def kv(self) -> KV:
        if self._kv is None:
            if self.kv_factory is None:
                raise CkptError("a group of one process has no store to talk over")
            self._kv = self.kv_factory()
        return self._kv

    def topic(self, name: str) -> _Topic:
        return self._topics.setdefault(name, _Topic())

    @classmethod
    def solo(cls) -> Group:
        return cls(0, 1, None, socket.gethostname(), 0)

    @classmethod
    def threads(cls, size: int) -> list[Group]:
        """A group whose ranks are threads of this process."""
        kv = MemoryKV()
        return [cls(rank, size, lambda: kv, socket.gethostname(), None) for rank in range(size)]

    @classmethod
    def current(cls) -> Group:
        """All ranks of torch.distributed if it is initialised, else this process alone."""
        import sys

        if "torch.distributed" not in sys.modules:  # never loaded, so never initialised
            return cls.solo()
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return cls.solo()
        return _torch_group()


_torch_groups: dict[str, Group] = {}  # by the nonce of the store, see `_nonce`
_torch_groups_lock = threading.Lock()


def _torch_group() -> Group:
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    world = dist.group.WORLD
    with _torch_groups_lock:
        group = _torch_groups.get("world")
        if group is not None and getattr(group, "_world", None) is world:
            return group
        agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
        hosted_by = "the torchrun agent, which hosts it," if agent_hosts else "the process of rank 0, which hosts it,"
        # torch has no public way to the store that init_process_group made; this one is used by torch's own
        # sub-packages. The clone is a connection of our own: the user's may be locked by a blocking wait.
        store = distributed_c10d._get_default_store().clone()
        kv = C10dKV(store, hosted_by=hosted_by)
        group = Group(
            dist.get_rank(), dist.get_world_size(), lambda: kv, socket.gethostname(), None if agent_hosts else 0
        )
        group._world = world  # type: ignore[attr-defined]
        _torch_groups["world"] = group
        return group


# ---------------------------------------------------------------------------------------------- beats and judgement


@dataclass(frozen=True)
class Beat:
    """What a rank says about itself now and then."""

    counter: int
    phase: str
    bytes_done: int
    bytes_total: int | None
    in_phase_s: float

    _HEAD = struct.Struct("<IQqd")

    def pack(self) -> bytes:
        total = -1 if self.bytes_total is None else self.bytes_total
        head = self._HEAD.pack(self.counter & 0xFFFFFFFF, self.bytes_done, total, self.in_phase_s)
        return head + self.phase.encode()

    @classmethod
    def unpack(cls, data: bytes) -> Beat:
        counter, done, total, in_phase_s = cls._HEAD.unpack_from(data)
        return cls(counter, data[cls._HEAD.size :].decode(), done, None if total < 0 else total, in_phase_s)

    def rate(self) -> float | None:
        """Bytes per second in this phase, if it moves bytes."""
        return self.bytes_done / self.in_phase_s if self.bytes_done and self.in_phase_s > 0 else None

    def where(self) -> str:
        text = f"in phase {self.phase!r}"
        if self.bytes_total is not None:
            text += f" at {bytes_text(self.bytes_done)} of {bytes_text(self.bytes_total)}"
        elif self.bytes_done:
            text += f" at {bytes_text(self.bytes_done)}"
        return text


def bytes_text(count: float) -> str:
    """3.1 GiB, 512 B: for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


@dataclass
class _Seen:
    """How one rank looked from outside, so far."""

    beat: Beat | None = None
    silent_s: float = 0.0  # since its beat last changed
    idle_s: float = 0.0  # since its phase or bytes last changed


class PeerWatch:
    """Tells ranks that live, lag, hang and died apart, from their beats alone. Pure: the time is told to it.

    Time counts only while we look: a gap between two looks adds `max_gap_s` at most, because a gap means that *we* were
    stopped or starved, perhaps together with everybody else.
    """

    def __init__(self, ranks: Iterable[int], now_s: float, *, max_gap_s: float) -> None:
        self._seen = {rank: _Seen() for rank in ranks}
        self._looked_s = now_s
        self._max_gap_s = max_gap_s
        self.progress = 0  # how often any rank was seen to get on

    def look(self, beats: dict[int, Beat | None], now_s: float) -> None:
        gap_s = min(max(now_s - self._looked_s, 0.0), self._max_gap_s)
        self._looked_s = now_s
        for rank, beat in beats.items():
            seen = self._seen[rank]
            seen.silent_s += gap_s
            seen.idle_s += gap_s
            if beat is None or (seen.beat is not None and beat.counter == seen.beat.counter):
                continue
            seen.silent_s = 0.0
            if seen.beat is None or (beat.phase, beat.bytes_done) != (seen.beat.phase, seen.beat.bytes_done):
                seen.idle_s = 0.0
                self.progress += 1
            seen.beat = beat

    def judge(self, rank: int, timeouts: Timeouts, *, grace_s: float = 0.0) -> str | None:
        """What is wrong with a rank, if it has been wrong for long enough."""
        seen = self._seen[rank]
        if seen.silent_s >= timeouts.silence_timeout_s + grace_s:
            return self._silent(seen)
        if seen.idle_s >= timeouts.progress_timeout_s + grace_s:
            return self._stuck(seen)
        return None

    def judge_late(self, rank: int, rates: Iterable[float]) -> str:
        """What to say of a rank that has not reported at the deadline; `rates` are those of the others."""
        seen = self._seen[rank]
        if seen.beat is None or seen.silent_s > 2 * self._max_gap_s:
            return self._silent(seen)
        rate, others = seen.beat.rate(), sorted(rates)
        if rate is None or not others or seen.idle_s > 2 * self._max_gap_s:
            return self._stuck(seen)
        median = statistics.median(others)
        return f"slow: {rate / 1e9:.2g} GB/s against a median of {median / 1e9:.2g}, {seen.beat.where()}"

    @staticmethod
    def _silent(seen: _Seen) -> str:
        where = seen.beat.where() if seen.beat else "since it entered"
        return f"no sign of life for {seen.silent_s:.0f} s {where}"

    @staticmethod
    def _stuck(seen: _Seen) -> str:
        return f"stuck {seen.beat.where() if seen.beat else ''} for {seen.idle_s:.0f} s"

    def rates(self) -> dict[int, float]:
        found = {rank: seen.beat.rate() for rank, seen in self._seen.items() if seen.beat}
        return {rank: rate for rank, rate in found.items() if rate is not None}


# ---------------------------------------------------------------------------------------------- joining


@dataclass(frozen=True)
class Ended:
    """How a round ended, for ranks that were not in it."""

    seq: int
    step: int
    error: dict[str, Any] | None


@dataclass(frozen=True)
class Now:
    """The newest round of a topic."""

    seq: int
    step: int
    save_id: str
    open: bool
    history: tuple[Ended, ...] = ()

    def pack(self, info: bytes = b"") -> bytes:
        data = json.dumps(dataclasses.asdict(self)).encode()
        return struct.pack("<I", len(data)) + data + info

    @classmethod
    def unpack(cls, data: bytes) -> tuple[Now, bytes]:
        (length,) = struct.unpack_from("<I", data)
        fields = json.loads(data[4 : 4 + length])
        fields["history"] = tuple(Ended(**ended) for ended in fields["history"])
        return cls(**fields), data[4 + length :]


def joining(now: Now | None, step: int, last_seq: int) -> str | Ended:
    """What a rank that wants to save `step` does: "join", "wait", or learn that its round ended without it.

    | newest round            | ended a round of this step since | then                                              |
    | none yet                | -                                | wait                                              |
    | open, known already     | -                                | wait: the leader will open the next one           |
    | open, this step         | -                                | join                                              |
    | open, another step      | no                               | join: the leader sees the mismatch and tells all  |
    | open, another step      | yes                              | ended                                             |
    | closed                  | no                               | wait                                              |
    | closed                  | yes                              | ended                                             |
    """
    if now is None:
        return "wait"
    ended = [past for past in now.history if past.step == step and past.seq > last_seq]
    fresh = now.open and now.seq > last_seq
    if fresh and (now.step == step or not ended):
        return "join"
    return ended[-1] if ended else "wait"


# ---------------------------------------------------------------------------------------------- round

_TRANSITIONS = {
    # (state, event): next state. What is not here is a mistake of the caller and raises.
    ("entered", "report"): "reported",
    ("entered", "fail"): "reported",
    ("reported", "gather"): "gathered",  # leader
    ("gathered", "gather failed"): "broken",  # leader
    ("gathered", "publish ok"): "judged",  # leader
    ("entered", "publish error"): "judged",  # leader: it cannot even take part
    ("reported", "publish error"): "judged",  # leader
    ("gathered", "publish error"): "judged",  # leader
    ("broken", "publish error"): "judged",  # leader
    ("reported", "verdict"): "judged",  # the others
    ("reported", "no verdict"): "broken",  # the others: the leader is gone
    ("judged", "verdict"): "judged",
    ("entered", "close"): "closed",
    ("reported", "close"): "closed",
    ("gathered", "close"): "closed",
    ("broken", "close"): "closed",
    ("judged", "close"): "closed",
    ("closed", "close"): "closed",
}

_HELLO = struct.Struct("<IqH")
_DONE = struct.Struct("<IB")
_REPORTED, _FAILED, _GAVE_WAY = 0, 1, 2


class Round:
    """One conversation: the save of one step. Made by `Round.enter`."""

    def __init__(self, group: Group, topic: str, step: int, timeouts: Timeouts, deadline_s: float | None) -> None:
        self.group = group
        self.step = step
        self.seq = 0
        self.save_id = ""
        self.opening = b""
        self.hellos: list[bytes] = []
        self.timeouts = timeouts
        self._name = topic
        self._topic = group.topic(topic)
        self._base = hashlib.blake2b(topic.encode(), digest_size=8).hexdigest()
        self._state = "entered"
        self._started_s = time.monotonic()
        self._deadline_s = deadline_s
        self._history: tuple[Ended, ...] = ()
        self._shared: list[str] = []
        self._own_report: bytes | None = None
        self._failures: dict[int, str] = {}
        self._verdict: tuple[CkptError | None, bytes] | None = None
        self._phases: dict[str, tuple[int, float]] = {}
        self._rates: dict[int, dict[str, float]] = {}
        self._done_read = 0
        self._beats = _Beats(self)

    # -- entering

    @classmethod
    def enter(
        cls,
        group: Group,
        topic: str,
        hello: bytes,
        *,
        step: int = 0,
        deadline_s: float | None = None,
        info: bytes = b"",
        timeouts: Timeouts | None = None,
    ) -> Round:
        """Begin or join the save of `step`; returns when every rank is there and its hello is known.

        `deadline_s` bounds the whole round; without it only lack of progress ends it.
        """
        kind = SoloRound if group.size == 1 else LeaderRound if group.rank == 0 else cls
        self = kind(group, topic, step, timeouts or Timeouts(), deadline_s)
        with self._naming_the_store():
            try:
                self._enter(hello, info)
            except BaseException:
                self._beats.stop()
                raise
        return self

    def _enter(self, hello: bytes, info: bytes) -> None:
        kv, timeouts = self.group.kv, self.timeouts
        limit_s = self._enter_limit_s() + timeouts.grace_s
        pauses = Pauses(self.group.size)
        while True:
            self._join(hello, pauses, limit_s)
            answer = self._await_all(limit_s)
            if answer is not None:
                break
        if answer[:1] == b"\1":
            error = from_dict(json.loads(answer[1:]))
            self._state = "judged"
            self._verdict = (error, b"")
            self.close()
            raise error
        self.hellos = _unpack_hellos(zlib.decompress(answer[1:]))
        del kv

    def _enter_limit_s(self) -> float:
        limits = [self.timeouts.enter_timeout_s] + ([] if self._deadline_s is None else [self._deadline_s])
        return min(limits)

    def _join(self, hello: bytes, pauses: Pauses, limit_s: float) -> None:
        """Wait for a round that is ours and say hello in it."""
        while True:
            now = self._read_now()
            decision = joining(now[0] if now else None, self.step, self._topic.last_seq)
            if isinstance(decision, Ended):
                self._topic.last_seq = decision.seq
                raise self._left_behind(decision)
            if decision == "join" and now is not None:
                break
            if self._elapsed_s() > limit_s:
                raise self._failed({0: f"never entered: the leader opened no save of step {self.step} "
                                       f"within {self._elapsed_s():.0f} s"})
            pauses.pause()
        opening, self.opening = now
        self.seq, self.save_id = opening.seq, opening.save_id
        self._topic.last_seq = self.seq
        self._beats.start()
        record = _HELLO.pack(self.group.rank, self.step, len(hello)) + hello
        self.group.kv.append(self._key("hi"), record)

    def _await_all(self, limit_s: float) -> bytes | None:
        """The leader's answer to the hellos; None when it opened another round instead."""
        for _ in self._patience("enter", self._started_s + limit_s):
            answer = take_values(self.group.kv, [self._key("all")])[0]
            if answer is not None:
                return answer
            now = self._read_now()
            if now is not None and now[0].seq != self.seq:
                return None
        raise AssertionError("patience never ends without raising")  # pragma: no cover

    def _left_behind(self, ended: Ended) -> CkptError:
        if ended.error is None:
            return SaveError(f"step {self.step} of {self._name} was committed without rank {self.group.rank}, "
                             "which came too late", {self.group.rank: "entered after the save was over"})
        error = from_dict(ended.error)
        by_rank = error.by_rank if isinstance(error, SaveError) else {}
        return SaveError(f"the leader gave up on step {self.step} of {self._name} before rank {self.group.rank} "
                         f"entered: {error.args[0]}", by_rank)

    def _read_now(self) -> tuple[Now, bytes] | None:
        data = self.group.kv.get_many([f"{self._base}/now"])[0]
        return None if data is None else Now.unpack(data)

    # -- data that some ranks have and others need

    def share(self, key: str, data: bytes) -> None:
        """Publish data under a name that says its content (a digest); only one rank needs to."""
        self._only("share", "entered")
        with self._naming_the_store():
            self.group.kv.append(self._key("shared"), json.dumps(key).encode() + b"\n")
            self._shared.append(key)
            put_value(self.group.kv, self._key(f"d/{key}"), data)

    def fetch(self, key: str, timeout_s: float | None = None) -> bytes:
        """What some rank shared under this name; raises when the round fails meanwhile."""
        self._only("fetch", "entered")
        limit_s = time.monotonic() + (self.timeouts.progress_timeout_s if timeout_s is None else timeout_s)
        with self._naming_the_store():
            for _ in self._patience(f"fetch of {key}", limit_s):
                data = take_values(self.group.kv, [self._key(f"d/{key}")])[0]
                if data is not None:
                    return data
                self.check()
        raise AssertionError("patience never ends without raising")  # pragma: no cover

    # -- while working

    def heartbeat(self, phase: str, bytes_done: int = 0, bytes_total: int | None = None) -> None:
        """Say where this rank is. Costs nothing: a thread tells the others, once a second or when the phase changes."""
        self._beats.note(phase, bytes_done, bytes_total)

    @property
    def aborted(self) -> bool:
        """Whether this save is known to have failed already, so that work on it is in vain. Costs nothing."""
        return self._beats.abort

    def check(self) -> None:
        """Raise the SaveError if this save has failed already."""
        if self._verdict is None and self.group.kv.check(self._key("verdict")):
            self._read_verdict()
        if self._verdict is not None and self._verdict[0] is not None:
            raise self._verdict[0]

    # -- the end

    def report(self, payload: bytes = b"") -> None:
        """This rank has done its part."""
        self._move("report")
        self._send_report(_REPORTED, payload)

    def fail(self, error: CkptError) -> None:
        """This rank cannot do its part."""
        self._move("fail")
        in_vain = self._verdict is not None and error is self._verdict[0]
        self._send_report(_GAVE_WAY if in_vain else _FAILED, json.dumps(error.to_dict()).encode())

    def _send_report(self, kind: int, payload: bytes) -> None:
        rates = json.dumps(self._beats.rates()).encode()
        with self._naming_the_store():
            put_value(self.group.kv, self._key(f"r/{self.group.rank}"), struct.pack("<I", len(rates)) + rates + payload)
            self.group.kv.append(self._key("done"), _DONE.pack(self.group.rank, kind))
            if kind == _FAILED:
                self.group.kv.set(self._key("failed"), b"")

    def gather(self, on_report: Callable[[int, bytes], None] | None = None) -> list[bytes]:
        raise CkptError(f"only the leader gathers, this is rank {self.group.rank}")

    def publish(self, error: CkptError | None = None, payload: bytes = b"") -> None:
        raise CkptError(f"only the leader publishes, this is rank {self.group.rank}")

    def verdict(self) -> bytes:
        """Wait for the leader's verdict: its payload, or the error that every rank raises."""
        if self._state != "judged":
            self._only("verdict", "reported")
            with self._naming_the_store():
                try:
                    self._await_verdict()
                except CkptError:
                    self._move("no verdict")
                    raise
        self._move("verdict")
        if self._verdict is None:
            raise CkptError("judged without a verdict")
        error, payload = self._verdict
        if error is not None:
            raise error
        return payload

    def _await_verdict(self) -> None:
        self.heartbeat("verdict")
        ends = None if self._deadline_s is None else self._started_s + self._deadline_s + self.timeouts.grace_s
        for _ in self._patience("verdict", ends):
            if self._verdict is not None or self._read_verdict():
                return
            now = self._read_now()
            if now is not None and now[0].seq != self.seq and not self._read_verdict():
                self._verdict = self._verdict_from(now[0])
                return

    def _verdict_from(self, now: Now) -> tuple[CkptError | None, bytes]:
        """The verdict of a round whose keys are swept: this rank was away for long."""
        for past in now.history:
            if past.seq == self.seq:
                return (None if past.error is None else from_dict(past.error)), b""
        return self._failed({self.group.rank: "was away until the leader had gone on to another save"}), b""

    def _read_verdict(self) -> bool:
        data = take_values(self.group.kv, [self._key("verdict")])[0]
        if data is None:
            return False
        (length,) = struct.unpack_from("<I", data)
        error = json.loads(data[4 : 4 + length])
        self._verdict = (None if error is None else from_dict(error)), data[4 + length :]
        return True

    def close(self) -> None:
        """Leave the round. A rank that leaves before it has reported fails it."""
        if self._state == "entered":
            with contextlib.suppress(CkptError):
                self.fail(CkptError("left the save without a report"))
        judged = self._state == "judged"
        if self._state != "closed":
            self._beats.stop()
            with contextlib.suppress(StorageError):
                self._leave(judged)
        self._move("close")

    def _leave(self, judged: bool) -> None:
        """Remove what nobody reads any more. Without a verdict everything stays: the leader may still read it."""
        now = self._read_now()
        if now is not None and now[0].seq != self.seq:
            self._drop_own()  # swept already: an ack would only leave a key behind
        elif judged:
            self._drop_own()
            if self.group.kv.add(self._key("acks"), 1) == self.group.size:
                self._drop_common(self.seq)

    def _drop_own(self) -> None:
        kv, rank = self.group.kv, self.group.rank
        kv.delete(self._key(f"b/{rank}"))
        drop_value(kv, self._key(f"r/{rank}"))
        for key in self._shared:
            drop_value(kv, self._key(f"d/{key}"))

    def _drop_common(self, seq: int) -> None:
        for key in ("hi", "done", "failed", "shared", "acks"):
            self.group.kv.delete(f"{self._base}/{seq}/{key}")
        for key in ("all", "verdict"):
            drop_value(self.group.kv, f"{self._base}/{seq}/{key}")

    def __enter__(self) -> Round:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- small parts

    def _key(self, name: str) -> str:
        return f"{self._base}/{self.seq}/{name}"

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def _move(self, event: str) -> None:
        after = _TRANSITIONS.get((self._state, event))
        if after is None:
            raise CkptError(f"a round that is {self._state} cannot {event}: step {self.step} of {self._name}")
        self._state = after

    def _only(self, what: str, *states: str) -> None:
        if self._state not in states:
            raise CkptError(f"a round that is {self._state} cannot {what}: step {self.step} of {self._name}")

    def _failed(self, by_rank: dict[int, str]) -> SaveError:
        ranks = "one rank" if len(by_rank) == 1 else f"{len(by_rank)} ranks"
        return SaveError(
            f"step {self.step} was not saved to {self._name}: {ranks} of {self.group.size} failed; "
            "older steps are intact", by_rank)

    def _patience(self, what: str, ends_s: float | None) -> Iterator[None]:
        """Turns of a wait for the leader; raises when it is silent, stuck, or the time is over."""
        timeouts = self.timeouts
        look_s = _look_s(timeouts)
        watch = PeerWatch([0], time.monotonic(), max_gap_s=2 * look_s)
        pauses, next_look_s = Pauses(self.group.size), time.monotonic() + look_s
        while True:
            yield
            now_s = time.monotonic()
            if self.group.rank != 0 and now_s >= next_look_s:
                next_look_s = now_s + look_s
                data = self.group.kv.get_many([self._key("b/0")])[0]
                watch.look({0: Beat.unpack(data) if data else None}, now_s)
                wrong = watch.judge(0, timeouts, grace_s=timeouts.grace_s)
                if wrong:
                    raise self._leader_lost(what, wrong)
            if ends_s is not None and now_s > ends_s:
                raise self._leader_lost(what, f"no {what} within {self._elapsed_s():.0f} s")
            pauses.pause()

    def _leader_lost(self, what: str, wrong: str) -> SaveError:
        unsure = "; it may still have committed: look at the run's latest step" if what == "verdict" else ""
        return SaveError(
            f"step {self.step} of {self._name} was not confirmed: rank 0, which leads the save, is lost{unsure}",
            {0: wrong})

    @contextlib.contextmanager
    def _naming_the_store(self) -> Iterator[None]:
        """A store that is gone fails the save like a rank does; the rank that hosted it is named."""
        try:
            yield
        except StorageError as error:
            by_rank = {} if self.group.store_rank is None else {self.group.store_rank: str(error)}
            raise SaveError(f"step {self.step} of {self._name} was not confirmed: {error}", by_rank) from error


class LeaderRound(Round):
    """Rank 0's side of a round."""

    def _enter(self, hello: bytes, info: bytes) -> None:
        kv = self.group.kv
        previous = self._read_now()
        self._history = previous[0].history if previous else ()
        if previous and previous[0].open:  # by a process that is gone
            self._topic.unswept.append(previous[0].seq)
            lost = SaveError("its leader was restarted before it had a verdict").to_dict()
            self._history = _and(self._history, Ended(previous[0].seq, previous[0].step, lost))
        self.seq = self._topic.last_seq = kv.add(f"{self._base}/seq", 1)
        self.save_id = secrets.token_hex(8)
        self.opening = info
        self._beats.start()  # before the opening: who reads that watches our beats
        kv.set(f"{self._base}/now", Now(self.seq, self.step, self.save_id, True, self._history).pack(info))
        try:
            self.hellos = self._await_hellos(hello)
        except CkptError as error:
            put_value(kv, self._key("all"), b"\1" + json.dumps(error.to_dict()).encode())
            self.publish(error)
            self.close()
            raise
        put_value(kv, self._key("all"), b"\0" + zlib.compress(_pack_hellos(self.hellos), 1))
        self._sweep()

    def _await_hellos(self, hello: bytes) -> list[bytes]:
        limit_s = self._enter_limit_s()
        pauses = Pauses(self.group.size)
        while True:
            there = {0: (self.step, hello)} | self._read_hellos()
            others = {rank: step for rank, (step, _) in there.items() if step != self.step}
            if others:
                said = ", ".join(f"rank {rank} wants step {step}" for rank, step in sorted(others.items())[:8])
                raise MismatchError(
                    f"ranks disagree about what to save to {self._name}: rank 0 saves step {self.step}, but {said}; "
                    "call save with the same step on every rank")
            if len(there) == self.group.size:
                return [there[rank][1] for rank in range(self.group.size)]
            if self._elapsed_s() > limit_s:
                missing = [rank for rank in range(self.group.size) if rank not in there]
                raise self._failed({rank: f"never entered: it did not call save within {limit_s:.0f} s"
                                    for rank in missing})
            pauses.pause(limit_s - self._elapsed_s() + 0.001)

    def _read_hellos(self) -> dict[int, tuple[int, bytes]]:
        data = self.group.kv.get_many([self._key("hi")])[0] or b""
        there: dict[int, tuple[int, bytes]] = {}
        offset = 0
        while offset < len(data):
            rank, step, length = _HELLO.unpack_from(data, offset)
            offset += _HELLO.size + length
            there[rank] = step, data[offset - length : offset]
        return there

    def check(self) -> None:
        if self._beats.abort or self.group.kv.check(self._key("failed")):
            self._read_done(lambda rank, payload: None, keep={})
        if self._failures:
            if self._verdict is None:
                self._abort_error = self._failed(dict(self._failures))
            raise self._abort_error

    def fail(self, error: CkptError) -> None:
        self._move("fail")
        if error is not getattr(self, "_abort_error", None):
            self._failures[0] = f"failed: {_say(error)}"
        self._own_report = b""

    def report(self, payload: bytes = b"") -> None:
        self._move("report")
        self._own_report = payload
        self._rates[0] = self._beats.rates()

    def gather(self, on_report: Callable[[int, bytes], None] | None = None) -> list[bytes]:
        """Wait for the reports of all ranks; raises SaveError as soon as one fails, hangs, dies or is late."""
        self._move("gather")
        try:
            with self._naming_the_store():
                return self._gather(on_report or (lambda rank, payload: None))
        except BaseException:
            self._move("gather failed")
            raise

    def _gather(self, on_report: Callable[[int, bytes], None]) -> list[bytes]:
        timeouts = self.timeouts
        look_s = _look_s(timeouts)
        watch = PeerWatch(range(1, self.group.size), time.monotonic(), max_gap_s=2 * look_s)
        reports: dict[int, bytes] = {}
        if self._own_report is not None and not self._failures:
            reports[0] = self._own_report
            on_report(0, self._own_report)
        pauses, next_look_s = Pauses(self.group.size), 0.0
        while True:
            if self._read_done(on_report, reports):
                pauses.restart()
            if self._failures:
                raise self._failed(dict(self._failures))
            if len(reports) == self.group.size:
                return [reports[rank] for rank in range(self.group.size)]
            pending = [rank for rank in range(self.group.size) if rank not in reports]
            if time.monotonic() >= next_look_s:
                next_look_s = time.monotonic() + look_s
                self._look(watch, pending)
            if self._deadline_s is not None and self._elapsed_s() > self._deadline_s:
                self._look(watch, pending)
                rates = list(watch.rates().values()) + [max(r.values()) for r in self._rates.values() if r]
                raise self._failed({rank: watch.judge_late(rank, rates) for rank in pending})
            self.heartbeat("gather", len(reports) + watch.progress)
            pauses.pause()

    def _look(self, watch: PeerWatch, pending: Sequence[int]) -> None:
        beats = self.group.kv.get_many([self._key(f"b/{rank}") for rank in pending])
        seen = {rank: Beat.unpack(beat) if beat else None for rank, beat in zip(pending, beats, strict=True)}
        watch.look(seen, time.monotonic())
        wrong = {rank: watch.judge(rank, self.timeouts) for rank in pending}
        lost = {rank: text for rank, text in wrong.items() if text is not None}
        if lost:
            raise self._failed(lost)

    def _read_done(self, on_report: Callable[[int, bytes], None], keep: dict[int, bytes]) -> bool:
        """Fetch the reports that came since the last time; True if there were any."""
        log = self.group.kv.get_many([self._key("done")])[0] or b""
        new = [_DONE.unpack_from(log, at) for at in range(self._done_read, len(log), _DONE.size)]
        new = [(rank, kind) for rank, kind in new if rank not in keep]
        for batch in _parts(new, 256):
            values = take_values(self.group.kv, [self._key(f"r/{rank}") for rank, _ in batch])
            for (rank, kind), value in zip(batch, values, strict=True):
                self._take_report(rank, kind, value, on_report, keep)
        return bool(new)

    def _take_report(
        self, rank: int, kind: int, value: bytes | None, on_report: Callable[[int, bytes], None], keep: dict[int, bytes]
    ) -> None:
        if value is None:
            self._failures[rank] = "failed: its report was lost"
            return
        (length,) = struct.unpack_from("<I", value)
        self._rates[rank] = json.loads(value[4 : 4 + length])
        payload = value[4 + length :]
        if kind == _FAILED:
            self._failures[rank] = f"failed: {_say(from_dict(json.loads(payload)))}"
        elif kind == _REPORTED:
            keep[rank] = payload
            on_report(rank, payload)

    @property
    def rates(self) -> dict[int, dict[str, float]]:
        """After gather: rank → phase → bytes per second."""
        return self._rates

    def slow_ranks(self, times: float = 4.0) -> dict[int, str]:
        """Ranks that were this many times slower than the median in a phase, with both rates."""
        slow: dict[int, str] = {}
        for phase in {phase for rates in self._rates.values() for phase in rates}:
            rates = {rank: rates[phase] for rank, rates in self._rates.items() if phase in rates}
            median = statistics.median(rates.values())
            for rank, rate in rates.items():
                if rate * times < median:
                    slow[rank] = f"{rate / 1e9:.2g} GB/s in phase {phase!r} against a median of {median / 1e9:.2g}"
        return slow

    def publish(self, error: CkptError | None = None, payload: bytes = b"") -> None:
        """Tell every rank how the save ended."""
        self._move("publish ok" if error is None else "publish error")
        self._verdict = error, payload
        data = json.dumps(None if error is None else error.to_dict()).encode()
        ended = Ended(self.seq, self.step, None if error is None else _short(error).to_dict())
        self._history = _and(self._history, ended)
        self._topic.unswept.append(self.seq)
        try:
            put_value(self.group.kv, self._key("verdict"), struct.pack("<I", len(data)) + data + payload)
            closed = Now(self.seq, self.step, self.save_id, False, self._history)
            self.group.kv.set(f"{self._base}/now", closed.pack())
        except StorageError as lost:  # the step is what it is; the others find out that the store is gone
            _log.warning("the verdict on step %d could not be told to the other ranks: %s", self.step, lost)

    def close(self) -> None:
        if self._state not in ("judged", "closed"):
            if self._state == "entered":
                self.fail(CkptError("left the save without a report"))
            self.publish(self._failed(dict(self._failures) or {0: "left the save before its end"}))
        super().close()

    def _sweep(self) -> None:
        """Remove what earlier rounds left. All ranks are in this one, so none of them reads there any more."""
        for seq in self._topic.unswept:
            if not self.group.kv.check(f"{self._base}/{seq}/hi"):
                continue  # the last to leave removed all
            for line in (self.group.kv.get_many([f"{self._base}/{seq}/shared"])[0] or b"").splitlines():
                drop_value(self.group.kv, f"{self._base}/{seq}/d/{json.loads(line)}")
            for rank in range(self.group.size):
                self.group.kv.delete(f"{self._base}/{seq}/b/{rank}")
                drop_value(self.group.kv, f"{self._base}/{seq}/r/{rank}")
            self._drop_common(seq)
        self._topic.unswept.clear()


class SoloRound(LeaderRound):
    """A round of one process: nobody to talk to, so nothing is sent and no thread is started."""

    def __init__(self, group: Group, topic: str, step: int, timeouts: Timeouts, deadline_s: float | None) -> None:
        super().__init__(group, topic, step, timeouts, deadline_s)
        self._data: dict[str, bytes] = {}

    def _enter(self, hello: bytes, info: bytes) -> None:
        self._topic.last_seq += 1
        self.seq = self._topic.last_seq
        self.save_id = secrets.token_hex(8)
        self.opening = info
        self.hellos = [hello]

    def share(self, key: str, data: bytes) -> None:
        self._only("share", "entered")
        self._data[key] = data

    def fetch(self, key: str, timeout_s: float | None = None) -> bytes:
        self._only("fetch", "entered")
        if key not in self._data:
            raise CkptError(f"nothing was shared under {key!r}, and there is no other rank that could")
        return self._data[key]

    def check(self) -> None:
        pass

    def gather(self, on_report: Callable[[int, bytes], None] | None = None) -> list[bytes]:
        self._move("gather")
        if self._failures or self._own_report is None:
            self._move("gather failed")
            raise self._failed(dict(self._failures))
        if on_report:
            on_report(0, self._own_report)
        return [self._own_report]

    def publish(self, error: CkptError | None = None, payload: bytes = b"") -> None:
        self._move("publish ok" if error is None else "publish error")
        self._verdict = error, payload

    def _leave(self, judged: bool) -> None:
        pass


class _Beats:
    """The rank's pulse: a thread that says every second where the rank is, and hears whether the save has failed."""

    def __init__(self, owner: Round) -> None:
        self._round = owner
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._counter = 0
        self._phase = "enter"
        self._done = 0
        self._total: int | None = None
        self._since_s = time.monotonic()
        self._moved_s = self._since_s
        self._past: dict[str, tuple[int, float]] = {}
        self._interval_s = max(owner.timeouts.beat_s, owner.group.size / 8000)
        self.abort = False

    def note(self, phase: str, bytes_done: int, bytes_total: int | None) -> None:
        with self._lock:
            now_s = time.monotonic()
            changed = phase != self._phase
            if changed:
                self._finish_phase()
                self._phase, self._since_s = phase, now_s
            self._done, self._total, self._moved_s = bytes_done, bytes_total, now_s
        if changed and self._thread is not None:
            self._wake.set()

    def _finish_phase(self) -> None:
        self._past[self._phase] = self._done, self._moved_s - self._since_s

    def rates(self) -> dict[str, float]:
        with self._lock:
            self._finish_phase()
            return {phase: done / took_s for phase, (done, took_s) in self._past.items() if done and took_s > 0}

    def start(self) -> None:
        """Beat once before anybody can look, then from the thread."""
        self._beat()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ckptfs-beats", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped:
            self._wake.wait(self._interval_s)
            self._wake.clear()
            if self._stopped:
                return
            try:
                self._beat()
                self._listen()
            except StorageError:  # whoever waits for an answer finds out too, and can raise it
                self.abort = True
                return

    def _beat(self) -> None:
        with self._lock:
            self._counter += 1
            beat = Beat(self._counter, self._phase, self._done, self._total, time.monotonic() - self._since_s)
        self._round.group.kv.set(self._round._key(f"b/{self._round.group.rank}"), beat.pack())

    def _listen(self) -> None:
        bad_news = "failed" if self._round.group.rank == 0 else "verdict"
        self.abort = self.abort or self._round.group.kv.check(self._round._key(bad_news))


def _look_s(timeouts: Timeouts) -> float:
    """How often to look at beats: often enough to be on time, no more often than they come."""
    return max(min(timeouts.silence_timeout_s, timeouts.progress_timeout_s) / 8, timeouts.beat_s / 2, 0.005)


def _say(error: CkptError) -> str:
    return f"{type(error).__name__}: {error}"


def _and(history: tuple[Ended, ...], ended: Ended) -> tuple[Ended, ...]:
    return (*history, ended)[-HISTORY_ROUNDS:]


def _short(error: CkptError) -> CkptError:
    """An error small enough to be kept in the history: thousands of ranks may be named in it."""
    if isinstance(error, SaveError):
        return SaveError(str(error.args[0]), dict(sorted(error.by_rank.items())[:64]))
    return error


def _pack_hellos(hellos: Sequence[bytes]) -> bytes:
    return b"".join(struct.pack("<H", len(hello)) + hello for hello in hellos)


def _unpack_hellos(data: bytes) -> list[bytes]:
    hellos, offset = [], 0
    while offset < len(data):
        (length,) = struct.unpack_from("<H", data, offset)
        offset += 2 + length
        hellos.append(data[offset - length : offset])
    return hellos
