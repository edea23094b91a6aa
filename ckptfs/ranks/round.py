"""One save's conversation: who enters, what is told, how it ends.

Keys of a topic, below `<digest of topic>/`:

    seq                number of the newest round (a counter; only the leader adds)
    now                the newest round: its opening, or that it is closed; and how the rounds before it ended
    <seq>/hi           hello records of the ranks, appended
    <seq>/all          the leader's answer: all hellos in rank order, or an error
    <seq>/b/<rank>     the rank's last beat
    <seq>/d/<key>      shared data; `<seq>/shared` lists such keys
    <seq>/r/<rank>     the rank's report or failure
    <seq>/done         who has reported, appended; `<seq>/failed` exists once somebody failed
    <seq>/order        who is lost, and who is to write what the lost ranks did not; then `r2` and `done2` as above
    <seq>/verdict      what became of the save
    <seq>/acks         how many ranks have read the verdict; the last one removes what is left of the round
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import secrets
import struct
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from types import TracebackType
from typing import Self

from ckptfs.errors import CkptError, MismatchError, SaveError, StorageError, from_dict

from .group import Group
from .kv import Pauses, drop_value, put_value, take_value, take_values
from .watch import Beat, Ended, Now, PeerWatch, Timeouts, joining, moved, slow_ranks

_log = logging.getLogger("ckptfs")

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
        self._shared: list[str] = []
        self._verdict: tuple[CkptError | None, bytes] | None = None
        self._leaderless: SaveError | None = None  # the leader was found lost
        self._prepare: Callable[[str], None] = lambda save_id: None
        self._act = ""  # "2" once this rank has heard the order to stand in for others
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
        prepare: Callable[[str], None] = lambda save_id: None,
    ) -> Round:
        """Begin or join the save of `step`; returns when every rank is there and its hello is known.

        `deadline_s` bounds the whole round; without it only lack of progress ends it. `prepare` is called on the leader
        when every rank is there, and before any of them goes on; it must not raise.
        """
        kind = SoloRound if group.size == 1 else LeaderRound if group.rank == 0 else cls
        self = kind(group, topic, step, timeouts or Timeouts(), deadline_s)
        self._prepare = prepare
        with self._naming_the_store():
            try:
                self._enter(hello, info)
            except BaseException:
                self._beats.stop()
                raise
        return self

    def _enter(self, hello: bytes, info: bytes) -> None:
        limit_s = self._enter_limit_s() + self.timeouts.grace_s
        known_seq = self._topic.last_seq
        while True:
            self._join(hello, limit_s)
            answer = self._await_all(limit_s)
            if answer is not None:
                break
            # Superseded: what became of that round is in the history, so act as if it had not been joined.
            self._topic.last_seq = known_seq
            self._drop_own()
        if answer[:1] == b"\1":
            self._verdict = from_dict(json.loads(answer[1:])), b""
            self._state = "judged"
            self.close()
            raise self._verdict[0] or CkptError("unreachable")
        self.hellos = _unpack_hellos(zlib.decompress(answer[1:]))

    def _enter_limit_s(self) -> float:
        limits = [self.timeouts.enter_timeout_s] + ([] if self._deadline_s is None else [self._deadline_s])
        return min(limits)

    def _join(self, hello: bytes, limit_s: float) -> None:
        """Wait for a round that is ours and say hello in it."""
        opening, self.opening = self._await_round(limit_s)
        self.seq, self.save_id = opening.seq, opening.save_id
        self._topic.last_seq = self.seq
        self._beats.start()
        self._say_hello(hello)

    def _say_hello(self, hello: bytes) -> None:
        self.group.kv.append(self.key("hi"), _HELLO.pack(self.group.rank, self.step, len(hello)) + hello)

    def _await_round(self, limit_s: float) -> tuple[Now, bytes]:
        pauses = Pauses(self.group.size)
        while True:
            now = self._read_now()
            decision = joining(now[0] if now else None, self.step, self._topic.last_seq)
            if isinstance(decision, Ended):
                self._topic.last_seq = decision.seq
                raise self._left_behind(decision)
            if decision == "join" and now is not None:
                return now
            if self._elapsed_s() > limit_s:
                took = f"{self._elapsed_s():.0f} s"
                raise self._failed({0: f"never entered: as the leader it opened no save of this step within {took}"})
            pauses.pause()

    def _await_all(self, limit_s: float) -> bytes | None:
        """The leader's answer to the hellos; None when it has opened another round instead."""
        for looking in self._patience("answer", self._started_s + limit_s):
            answer = take_value(self.group.kv, self.key("all"))
            if answer is not None or (looking and self._superseded()):
                return answer
        return None

    def _superseded(self) -> bool:
        now = self._read_now()
        return now is not None and now[0].seq != self.seq

    def _left_behind(self, ended: Ended) -> CkptError:
        if ended.error is None:
            return SaveError(
                f"step {self.step} of {self._name} was committed without rank {self.group.rank}, which came too late",
                {self.group.rank: "entered after the save was over"},
            )
        error = from_dict(ended.error)
        by_rank = error.by_rank if isinstance(error, SaveError) else {}
        return SaveError(
            f"the leader gave up on step {self.step} of {self._name} before rank {self.group.rank} "
            f"entered: {error.args[0]}",
            by_rank,
        )

    def _read_now(self) -> tuple[Now, bytes] | None:
        data = self.group.kv.get_many([f"{self._base}/now"])[0]
        return None if data is None else Now.unpack(data)

    # -- data that some ranks have and others need

    def share(self, key: str, data: bytes) -> None:
        """Publish data under a name that says its content (a digest); only one rank needs to."""
        self._only("share", "entered")
        with self._naming_the_store():
            self.group.kv.append(self.key("shared"), json.dumps(key).encode() + b"\n")
            self._shared.append(key)
            put_value(self.group.kv, self.key(f"d/{key}"), data)

    def fetch(self, key: str, timeout_s: float | None = None) -> bytes:
        """What some rank shared under this name; raises when the round fails meanwhile."""
        self._only("fetch", "entered")
        wait_s = self.timeouts.progress_timeout_s if timeout_s is None else timeout_s
        ends_s = time.monotonic() + wait_s
        with self._naming_the_store():
            for _ in self._patience("data", None):
                data = take_value(self.group.kv, self.key(f"d/{key}"))
                if data is not None:
                    return data
                self.check()
                if time.monotonic() > ends_s:
                    raise self._failed({self.group.rank: f"got no data {key} from any rank within {wait_s:g} s"})
        raise CkptError("unreachable: patience ends by raising")

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
        if self._verdict is None and self.group.kv.check(self.key("verdict")):
            self._read_verdict()
        if self._verdict is not None and self._verdict[0] is not None:
            raise self._verdict[0]

    def listen(self, limit_s: float) -> None:
        """Something is wrong that another rank knows more of: raise what the save has failed with, if that is known
        within `limit_s`, or that the leader is lost.
        """
        ends_s = time.monotonic() + limit_s
        with self._naming_the_store():
            for _ in self._patience("verdict", None):
                self.check()
                if time.monotonic() > ends_s:
                    return

    # -- the end

    def report(self, payload: bytes = b"") -> None:
        """This rank has done its part."""
        self._move("report")
        self._send_report(_REPORTED, payload)

    def fail(self, error: BaseException) -> None:
        """This rank cannot do its part."""
        self._move("fail")
        in_vain = self._verdict is not None and isinstance(error, SaveError)
        self._send_report(_GAVE_WAY if in_vain else _FAILED, self._told(error))

    def _told(self, error: BaseException) -> bytes:
        """An error of this rank for the leader, with what it was at."""
        return json.dumps({**_ours(error).to_dict(), "where": self._beats.where()}).encode()

    def _send_report(self, kind: int, payload: bytes) -> None:
        rates = json.dumps(self._beats.rates()).encode()
        with self._naming_the_store():
            value = struct.pack("<I", len(rates)) + rates + payload
            put_value(self.group.kv, self.key(f"r{self._act}/{self.group.rank}"), value)
            self.group.kv.append(self.key(f"done{self._act}"), _DONE.pack(self.group.rank, kind))
            if kind == _FAILED:
                self.group.kv.set(self.key("failed"), b"")

    def gather(self, on_report: Callable[[int, bytes], None] | None = None) -> list[bytes]:
        raise CkptError(f"only the leader gathers, this is rank {self.group.rank}")

    def publish(self, error: BaseException | None = None, payload: bytes = b"") -> None:
        raise CkptError(f"only the leader publishes, this is rank {self.group.rank}")

    def verdict(self, on_order: Callable[[bytes], bytes | None] | None = None) -> bytes:
        """Wait for the leader's verdict: its payload, or the error that every rank raises.

        `on_order` is called with the leader's order if ranks were lost; what it returns (None: nothing) is reported.
        """
        if self._state != "judged":
            self._only("verdict", "reported")
            with self._naming_the_store():
                try:
                    self._await_verdict(on_order)
                except CkptError:
                    self._move("leader lost")
                    raise
            self._move("verdict heard")
        self._move("verdict")
        if self._verdict is None:
            raise CkptError("unreachable: judged without a verdict")
        error, payload = self._verdict
        if error is not None:
            raise error
        return payload

    def _await_verdict(self, on_order: Callable[[bytes], bytes | None] | None) -> None:
        if self._leaderless is not None and not self._read_verdict():
            raise self._leaderless
        self.heartbeat("verdict")
        ends = None if self._deadline_s is None else self._started_s + self._deadline_s + self.timeouts.grace_s
        for looking in self._patience("verdict", ends):
            if self._verdict is not None or self._read_verdict():
                return
            now = self._read_now() if looking else None
            if now is not None and now[0].seq != self.seq and not self._read_verdict():
                self._verdict = self._verdict_from(now[0])
                return
            if on_order is not None and self._beats.ordered and not self._act:
                self._hear_order(on_order)

    def _hear_order(self, on_order: Callable[[bytes], bytes | None]) -> None:
        order = take_value(self.group.kv, self.key("order"))
        if order is None:
            return
        self._act = "2"
        try:
            payload = on_order(order)
        except Exception as error:
            kind = _FAILED if self._verdict is None else _GAVE_WAY
            self._send_report(kind, self._told(error))
        else:
            if payload is not None:
                self._send_report(_REPORTED, payload)
        self.heartbeat("verdict")

    def _verdict_from(self, now: Now) -> tuple[CkptError | None, bytes]:
        """The verdict of a round whose keys are swept: this rank was away for long."""
        past = now.how(self.seq)
        if past is not None:
            return (None if past.error is None else from_dict(past.error)), b""
        return self._failed({self.group.rank: "was away until the leader had gone on to another save"}), b""

    def _read_verdict(self) -> bool:
        data = take_value(self.group.kv, self.key("verdict"))
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
            if self.group.kv.add(self.key("acks"), 1) == self.group.size:
                self._drop_common(self.seq)

    def _drop_own(self) -> None:
        kv, rank = self.group.kv, self.group.rank
        kv.delete(self.key(f"b/{rank}"))
        drop_value(kv, self.key(f"r/{rank}"))
        if self._act:
            drop_value(kv, self.key(f"r2/{rank}"))
        for key in self._shared:
            drop_value(kv, self.key(f"d/{key}"))

    def _drop_common(self, seq: int) -> None:
        base = f"{self._base}/{seq}"
        for key in ("hi", "all", "done", "failed", "shared", "order", "done2", "verdict", "acks"):
            drop_value(self.group.kv, f"{base}/{key}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._state == "entered":
            with contextlib.suppress(CkptError):
                self.fail(error)
        self.close()

    # -- small parts

    @property
    def state(self) -> str:
        """Where this rank is in the round: a state of watch.TRANSITIONS."""
        return self._state

    def key(self, name: str) -> str:
        return f"{self._base}/{self.seq}/{name}"

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def _move(self, event: str) -> None:
        self._state = moved(self._state, event, f"step {self.step} of {self._name}")

    def _only(self, what: str, *states: str) -> None:
        if self._state not in states:
            raise CkptError(f"a round that is {self._state} cannot {what}: step {self.step} of {self._name}")

    def _failed(self, by_rank: dict[int, str]) -> SaveError:
        ranks = "one rank" if len(by_rank) == 1 else f"{len(by_rank)} ranks"
        return SaveError(
            f"step {self.step} was not saved to {self._name}: {ranks} of {self.group.size} failed; "
            "older steps are intact",
            by_rank,
        )

    def _patience(self, what: str, ends_s: float | None) -> Iterator[bool]:
        """Turns of a wait for the leader, true now and then; raises when it is silent, stuck, or the time is over."""
        look_s = self.timeouts.look_s()
        watch = PeerWatch([0], time.monotonic(), max_gap_s=2 * look_s)
        pauses, next_look_s = Pauses(self.group.size), time.monotonic() + look_s
        looking = False
        while True:
            yield looking
            looking = time.monotonic() >= next_look_s
            if looking and self.group.rank != 0:
                next_look_s = time.monotonic() + look_s
                self._look_at_leader(watch, what)
            elif looking:
                next_look_s = time.monotonic() + look_s
            if ends_s is not None and time.monotonic() > ends_s:
                raise self._leader_lost(what, f"no {what} from it within {self._elapsed_s():.0f} s")
            pauses.pause()

    def _look_at_leader(self, watch: PeerWatch, what: str) -> None:
        data = self.group.kv.get_many([self.key("b/0")])[0]
        watch.look({0: Beat.unpack(data) if data else None}, time.monotonic())
        # Before all have entered there is no progress to expect of the leader: the late ones are what it waits for.
        patience_s = math.inf if what == "answer" else self.timeouts.progress_timeout_s
        timeouts = dataclasses.replace(self.timeouts, progress_timeout_s=patience_s)
        wrong = watch.judge(0, timeouts, grace_s=self.timeouts.grace_s)
        if wrong is not None:
            raise self._leader_lost(what, wrong)

    def _leader_lost(self, what: str, wrong: str) -> SaveError:
        unsure = "; it may still have committed: look at the run's latest step" if what == "verdict" else ""
        self._leaderless = SaveError(
            f"step {self.step} of {self._name} was not confirmed: rank 0, which leads the save, is lost{unsure}",
            {0: wrong},
        )
        return self._leaderless

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

    def __init__(self, group: Group, topic: str, step: int, timeouts: Timeouts, deadline_s: float | None) -> None:
        super().__init__(group, topic, step, timeouts, deadline_s)
        self.rates: dict[int, dict[str, float]] = {}  # after gather: rank → phase → bytes per second
        self._now = Now(0, step, "", open=False)
        self._own_report: bytes | None = None
        self.lost: dict[int, str] = {}  # after gather_some: ranks without a report, and why
        self.silent: set[int] = set()  # those of them that said nothing: they may only be stopped
        # Whether the save can do without these ranks: asked whenever one fails.
        self.bearable: Callable[[Collection[int]], bool] = lambda _: False
        self._expected: Collection[int] = range(1, group.size)
        self._failures: dict[int, str] = {}
        self._abort_error: SaveError | None = None
        self._around: tuple[PeerWatch, float] | None = None  # of `look_around`, and when it last looked

    def _enter(self, hello: bytes, info: bytes) -> None:
        kv = self.group.kv
        history = self._history()
        self.seq = self._topic.last_seq = kv.add(f"{self._base}/seq", 1)
        self.save_id = secrets.token_hex(8)
        self.opening = info
        self._beats.start()  # before the opening: who reads that watches our beats
        self._say_hello(hello)
        self._now = Now(self.seq, self.step, self.save_id, open=True, history=history)
        kv.set(f"{self._base}/now", self._now.pack(info))
        try:
            self.hellos = self._await_hellos()
        except CkptError as error:
            put_value(kv, self.key("all"), b"\1" + json.dumps(error.to_dict()).encode())
            self.publish(error)
            self.close()
            raise
        self._prepare(self.save_id)
        put_value(kv, self.key("all"), b"\0" + zlib.compress(_pack_hellos(self.hellos), 1))
        self._sweep()

    def _history(self) -> tuple[Ended, ...]:
        """How earlier rounds ended. One that is still open was led by a process that is gone."""
        previous = self._read_now()
        if previous is None:
            return ()
        now, _ = previous
        if not now.open:
            return now.history
        self._topic.unswept.append(now.seq)
        return now.ended(SaveError("the process that led the save was restarted before it had a verdict")).history

    def _await_hellos(self) -> list[bytes]:
        limit_s = self._enter_limit_s()
        pauses = Pauses(self.group.size)
        while True:
            there = self._read_hellos()
            others = {rank: step for rank, (step, _) in there.items() if step != self.step}
            if others:
                said = ", ".join(f"rank {rank} wants step {step}" for rank, step in sorted(others.items())[:8])
                raise MismatchError(
                    f"ranks disagree about what to save to {self._name}: rank 0 saves step {self.step}, but {said}; "
                    "call save with the same step on every rank"
                )
            if len(there) == self.group.size:
                return [there[rank][1] for rank in range(self.group.size)]
            if self._elapsed_s() > limit_s:
                missing = [rank for rank in range(self.group.size) if rank not in there]
                raise self._failed(
                    dict.fromkeys(missing, f"never entered: it did not call save within {limit_s:.0f} s")
                )
            pauses.pause(limit_s - self._elapsed_s() + 0.001)

    def _read_hellos(self) -> dict[int, tuple[int, bytes]]:
        data = self.group.kv.log(self.key("hi"))
        there: dict[int, tuple[int, bytes]] = {}
        offset = 0
        while offset < len(data):
            rank, step, length = _HELLO.unpack_from(data, offset)
            offset += _HELLO.size + length
            there[rank] = step, data[offset - length : offset]
        return there

    def check(self) -> None:
        if self._abort_error is None and self.group.kv.check(self.key("failed")):
            self._read_done(lambda *_: None, None)
            if not self._is_bearable():
                self._abort_error = self._failed(dict(self._failures))
        if self._abort_error is not None:
            raise self._abort_error

    def fail(self, error: BaseException) -> None:
        self._move("fail")
        # Not "is": threads that looked at the same moment raised equal errors of their own.
        if self._abort_error is None or not isinstance(error, SaveError):
            self._failures[0] = f"failed {self._beats.where()}: {_say(_ours(error))}"

    def report(self, payload: bytes = b"") -> None:
        self._move("report")
        self._own_report = payload
        self.rates[0] = self._beats.rates()

    def gather(self, on_report: Callable[[int, bytes], None] | None = None) -> list[bytes]:
        """Wait for the reports of all ranks; raises SaveError as soon as one fails, hangs, dies or is late."""
        reports = self.gather_some(on_report)
        return [reports[rank] for rank in range(self.group.size)]

    def gather_some(self, on_report: Callable[[int, bytes], None] | None = None) -> dict[int, bytes]:
        """As `gather`, but goes on without ranks whose loss is `bearable`; they are in `lost` then."""
        self._move("gather")
        try:
            with self._naming_the_store():
                return self._gather(on_report or (lambda *_: None))
        except BaseException:
            self._move("gather failed")
            raise

    def lose(self, rank: int, why: str) -> SaveError:
        """The leader itself has found a rank gone before all have reported: the error that every rank raises."""
        self._failures.setdefault(rank, why)
        self._abort_error = self._failed(dict(self._failures))
        return self._abort_error

    def look_around(self) -> None:
        """Called again and again while the leader waits for others in the middle of its own part: raises when some rank
        gives no sign of life. Who gets nothing done may only be waiting for that one, so nobody else is blamed.
        """
        now_s, look_s = time.monotonic(), self.timeouts.look_s()
        if self._around is None:
            self._around = PeerWatch(self._expected, now_s, max_gap_s=2 * look_s), now_s
        watch, looked_s = self._around
        if now_s - looked_s >= look_s:
            self._around = watch, now_s
            silence_only = dataclasses.replace(self.timeouts, progress_timeout_s=math.inf)
            self._look(watch, [rank for rank in self._expected if rank not in self._failures], silence_only)

    def order(self, payload: bytes, ranks: Collection[int]) -> None:
        """After gather_some: have these ranks stand in for the lost ones; a second `gather_some` collects them."""
        self._move("order")
        self._act, self._expected, self._own_report = "2", [rank for rank in ranks if rank != 0], None
        known = set(self.lost)
        self.bearable = lambda lost: set(lost) == known  # nobody stands in for a stand-in
        with self._naming_the_store():
            put_value(self.group.kv, self.key("order"), payload)

    def _is_bearable(self) -> bool:
        return not self._failures or self.bearable(frozenset(self._failures))

    def _gather(self, on_report: Callable[[int, bytes], None]) -> dict[int, bytes]:
        look_s = self.timeouts.look_s()
        watch = PeerWatch(self._expected, time.monotonic(), max_gap_s=2 * look_s)
        reports: dict[int, bytes] = {}
        if self._own_report is not None:
            reports[0] = self._own_report
            on_report(0, self._own_report)
        pauses, next_look_s = Pauses(self.group.size), time.monotonic() + look_s
        while True:
            if self._read_done(on_report, reports):
                pauses.restart()
            if not self._is_bearable():
                raise self._failed(dict(self._failures))
            pending = [rank for rank in self._expected if rank not in reports and rank not in self._failures]
            if not pending:
                self.lost = dict(self._failures)
                return reports
            late = self._deadline_s is not None and self._elapsed_s() > self._deadline_s
            if late or time.monotonic() >= next_look_s:
                next_look_s = time.monotonic() + look_s
                self._look(watch, pending)
            if late:
                raise self._failed({rank: watch.judge_late(rank, self.rates) for rank in pending})
            self.heartbeat("gather", len(reports) + watch.progress)
            pauses.pause()

    def _look(self, watch: PeerWatch, pending: Sequence[int], timeouts: Timeouts | None = None) -> None:
        beats = self.group.kv.get_many([self.key(f"b/{rank}") for rank in pending])
        seen = {rank: Beat.unpack(beat) if beat else None for rank, beat in zip(pending, beats, strict=True)}
        watch.look(seen, time.monotonic())
        wrong = {rank: watch.judge(rank, timeouts or self.timeouts) for rank in pending}
        lost = {rank: text for rank, text in wrong.items() if text is not None}
        self._failures |= lost
        self.silent |= lost.keys()
        if not self._is_bearable():
            raise self._failed(dict(self._failures))

    def _read_done(self, on_report: Callable[[int, bytes], None], reports: dict[int, bytes] | None) -> bool:
        """Fetch the failures, and the reports too if asked for, that came since the last time; True if any did."""
        log = self.group.kv.log(self.key(f"done{self._act}"))
        told = [_DONE.unpack_from(log, at) for at in range(0, len(log), _DONE.size)]
        new = [(rank, kind) for rank, kind in told if rank not in self._failures and rank not in (reports or {})]
        new = [(rank, kind) for rank, kind in new if reports is not None or kind == _FAILED]
        for start in range(0, len(new), 256):
            some = new[start : start + 256]
            values = take_values(self.group.kv, [self.key(f"r{self._act}/{rank}") for rank, _ in some])
            for (rank, kind), value in zip(some, values, strict=True):
                payload = self._take_report(rank, kind, value)
                if payload is not None and reports is not None:
                    reports[rank] = payload
                    on_report(rank, payload)
        return bool(new)

    def _take_report(self, rank: int, kind: int, value: bytes | None) -> bytes | None:
        """The payload of a report; None if the rank failed, which is noted."""
        if value is None:
            self._failures[rank] = "failed: its report was lost"
            return None
        (length,) = struct.unpack_from("<I", value)
        self.rates[rank] = json.loads(value[4 : 4 + length])
        if kind == _REPORTED:
            return value[4 + length :]
        told = json.loads(value[4 + length :])
        self._failures[rank] = f"failed {told['where']}: {_say(from_dict(told))}"
        return None

    def with_late_failures(self, error: SaveError, settle_s: float) -> SaveError:
        """The error with those added who fail within `settle_s`: what stops one rank (a full disk) often stops more."""
        known = {**error.by_rank, **self._failures}
        pauses, ends_s = Pauses(self.group.size), time.monotonic() + settle_s
        while self.group.size > 1 and time.monotonic() < ends_s and len(known) < self.group.size:
            with contextlib.suppress(StorageError):
                self._read_done(lambda *_: None, None)
            known |= self._failures
            pauses.pause(0.05)
        return error if known == error.by_rank else self._failed(known)

    def slow_ranks(self, times: float = 4.0) -> dict[int, str]:
        """After gather: ranks that were `times` slower than the median in a phase, with both rates."""
        return slow_ranks(self.rates, times)

    def publish(self, error: BaseException | None = None, payload: bytes = b"") -> None:
        """Tell every rank how the save ended."""
        self._move("publish" if error is None else "publish error")
        told = None if error is None else _ours(error)
        self._verdict = told, payload
        self._topic.unswept.append(self.seq)
        data = json.dumps(None if told is None else told.to_dict()).encode()
        try:
            put_value(self.group.kv, self.key("verdict"), struct.pack("<I", len(data)) + data + payload)
            self.group.kv.set(f"{self._base}/now", self._now.ended(told).pack())
        except StorageError as lost:  # the step is what it is; the others find out by themselves that the store is gone
            _log.warning("the verdict on step %d could not be told to the other ranks: %s", self.step, lost)

    def close(self) -> None:
        if self._state not in {"judged", "closed"}:
            if self._state == "entered":
                self.fail(CkptError("left the save without a report"))
            self.publish(self._failed(dict(self._failures) or {0: "left the save before its end"}))
        super().close()

    def _sweep(self) -> None:
        """Remove what earlier rounds left. All ranks are in this one, so none of them reads there any more."""
        for seq in self._topic.unswept:
            if not self.group.kv.log(f"{self._base}/{seq}/hi"):
                continue  # the last to leave removed all
            for line in self.group.kv.log(f"{self._base}/{seq}/shared").splitlines():
                drop_value(self.group.kv, f"{self._base}/{seq}/d/{json.loads(line)}")
            for rank in range(self.group.size):
                self.group.kv.delete(f"{self._base}/{seq}/b/{rank}")
                drop_value(self.group.kv, f"{self._base}/{seq}/r/{rank}")
                drop_value(self.group.kv, f"{self._base}/{seq}/r2/{rank}")
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
        self._prepare(self.save_id)

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

    def gather_some(self, on_report: Callable[[int, bytes], None] | None = None) -> dict[int, bytes]:
        self._move("gather")
        if self._failures or self._own_report is None:
            self._move("gather failed")
            raise self._failed(dict(self._failures))
        if on_report:
            on_report(0, self._own_report)
        return {0: self._own_report}

    def publish(self, error: BaseException | None = None, payload: bytes = b"") -> None:
        self._move("publish" if error is None else "publish error")
        self._verdict = (None if error is None else _ours(error)), payload

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
        self.ordered = False

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

    def where(self) -> str:
        """The phase, and how many bytes were done in it."""
        with self._lock:
            return Beat(0, self._phase, self._done, self._total, 0.0).where()

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
            self._thread.join(1.0)  # a store that hangs must not hold up who leaves

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
        self._round.group.kv.set(self._round.key(f"b/{self._round.group.rank}"), beat.pack())

    def _listen(self) -> None:
        bad_news = "failed" if self._round.group.rank == 0 else "verdict"
        self.abort = self.abort or self._round.group.kv.check(self._round.key(bad_news))
        if self._phase == "verdict":
            self.ordered = self.ordered or self._round.group.kv.check(self._round.key("order"))


def _pack_hellos(hellos: Sequence[bytes]) -> bytes:
    return b"".join(struct.pack("<H", len(hello)) + hello for hello in hellos)


def _unpack_hellos(data: bytes) -> list[bytes]:
    hellos, offset = [], 0
    while offset < len(data):
        (length,) = struct.unpack_from("<H", data, offset)
        offset += 2 + length
        hellos.append(data[offset - length : offset])
    return hellos


def _ours(error: BaseException) -> CkptError:
    """Any error, as one that travels between ranks."""
    return error if isinstance(error, CkptError) else CkptError(f"{type(error).__name__}: {error}")


def _say(error: CkptError) -> str:
    return str(error) if type(error) is CkptError else f"{type(error).__name__}: {error}"
