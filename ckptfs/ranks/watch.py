"""What to conclude from what is seen: pure decisions about peers and rounds, with the time told to them.

Rules: a rank is blamed only for what it did or left undone while we were looking; a verdict says phase, bytes and time.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ckptfs.errors import CkptError, SaveError

HISTORY_ROUNDS = 32  # how far back a rank that missed rounds can learn how they ended
_HISTORY_NAMES = 64  # how many ranks are named in an error that is kept there


@dataclass(frozen=True)
class Timeouts:
    """How long a round waits for what. Only `enter_timeout_s` runs from a fixed moment; the others from progress."""

    enter_timeout_s: float = 600.0  # for every rank to call save
    progress_timeout_s: float = 120.0  # for a rank that lives but gets nothing done
    silence_timeout_s: float = 30.0  # for a rank that does not even beat: dead, or stopped
    grace_s: float = 10.0  # how much longer than the leader the others wait: its verdict says more
    beat_s: float = 1.0  # between two beats of a rank; longer in very large groups

    def look_s(self) -> float:
        """How often to look at beats: often enough to be on time, no more often than they come."""
        return max(min(self.silence_timeout_s, self.progress_timeout_s) / 8, self.beat_s / 2, 0.005)


# ----------------------------------------------------------------------------------------------------- peers


@dataclass(frozen=True)
class Beat:
    """What a rank says about itself now and then."""

    counter: int
    phase: str
    bytes_done: int
    bytes_total: int | None
    in_phase_s: float

    _HEAD: ClassVar[struct.Struct] = struct.Struct("<IQqd")

    def pack(self) -> bytes:
        total = -1 if self.bytes_total is None else self.bytes_total
        return self._HEAD.pack(self.counter, self.bytes_done, total, self.in_phase_s) + self.phase.encode()

    @classmethod
    def unpack(cls, data: bytes) -> Beat:
        counter, done, total, in_phase_s = cls._HEAD.unpack_from(data)
        return cls(counter, data[cls._HEAD.size :].decode(), done, None if total < 0 else total, in_phase_s)

    def rate(self) -> float:
        """Bytes per second in this phase; 0 when it moves none."""
        return self.bytes_done / self.in_phase_s if self.in_phase_s > 0 else 0.0

    def where(self) -> str:
        text = f"in phase {self.phase!r}"
        if self.bytes_total is not None:
            return f"{text} at {bytes_text(self.bytes_done)} of {bytes_text(self.bytes_total)}"
        return f"{text} at {bytes_text(self.bytes_done)}" if self.bytes_done else text


def bytes_text(count: float) -> str:
    """3.1 GiB, 512 B: for people."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


def rate_text(bytes_per_s: float) -> str:
    """In GB/s, with as many digits as are worth saying."""
    return f"{bytes_per_s / 1e9:.2g}"


@dataclass
class _Seen:
    """How one rank looked from outside, so far."""

    beat: Beat | None = None
    silent_s: float = 0.0  # since its beat last changed
    idle_s: float = 0.0  # since its phase or bytes last changed

    def silent(self) -> str:
        return f"no sign of life for {self.silent_s:.0f} s {self.beat.where() if self.beat else 'since it entered'}"

    def stuck(self) -> str:
        return f"stuck {self.beat.where() if self.beat else 'since it entered'} for {self.idle_s:.0f} s"


class PeerWatch:
    """Tells ranks that live, lag, hang and died apart, from their beats alone.

    A gap between two looks counts for `max_gap_s` at most: a longer one means that *we* were stopped or starved,
    perhaps together with everybody else.
    """

    def __init__(self, ranks: Iterable[int], now_s: float, *, max_gap_s: float) -> None:
        self._seen = {rank: _Seen() for rank in ranks}
        self._looked_s = now_s
        self._max_gap_s = max_gap_s
        self.progress = 0  # how often any rank was seen to get on

    def look(self, beats: Mapping[int, Beat | None], now_s: float) -> None:
        gap_s = min(max(now_s - self._looked_s, 0.0), self._max_gap_s)
        self._looked_s = now_s
        for rank, beat in beats.items():
            seen = self._seen[rank]
            seen.silent_s += gap_s
            seen.idle_s += gap_s
            if beat is not None and (seen.beat is None or beat.counter != seen.beat.counter):
                self._heard(seen, beat)

    def _heard(self, seen: _Seen, beat: Beat) -> None:
        seen.silent_s = 0.0
        if seen.beat is None or (beat.phase, beat.bytes_done) != (seen.beat.phase, seen.beat.bytes_done):
            seen.idle_s = 0.0
            self.progress += 1
        seen.beat = beat

    def judge(self, rank: int, timeouts: Timeouts, *, grace_s: float = 0.0) -> str | None:
        """What is wrong with a rank, if it has been wrong for long enough."""
        seen = self._seen[rank]
        if seen.silent_s >= timeouts.silence_timeout_s + grace_s:
            return seen.silent()
        if seen.idle_s >= timeouts.progress_timeout_s + grace_s:
            return seen.stuck()
        return None

    def judge_late(self, rank: int, rates: Mapping[int, Mapping[str, float]]) -> str:
        """What to say of a rank that has not reported at the deadline; `rates` are those of the ranks that have."""
        seen = self._seen[rank]
        if seen.beat is None or seen.silent_s > 2 * self._max_gap_s:
            return seen.silent()
        phase = seen.beat.phase
        others = [of[phase] for of in rates.values() if phase in of]
        others += [
            of.beat.rate() for of in self._seen.values() if of is not seen and of.beat and of.beat.phase == phase
        ]
        if not any(others) or not seen.beat.bytes_done or seen.idle_s > 2 * self._max_gap_s:
            return seen.stuck()
        median = rate_text(statistics.median(others))
        return f"slow: {rate_text(seen.beat.rate())} GB/s against a median of {median}, {seen.beat.where()}"


def slow_ranks(rates: Mapping[int, Mapping[str, float]], times: float) -> dict[int, str]:
    """Ranks that were `times` slower than the median in a phase, with both rates, from a rank × phase table."""
    slow: dict[int, str] = {}
    for phase in sorted({phase for of in rates.values() for phase in of}):
        median = statistics.median(of[phase] for of in rates.values() if phase in of)
        for rank, of in rates.items():
            if phase in of and of[phase] * times < median:
                slow[rank] = f"{rate_text(of[phase])} GB/s in phase {phase!r} against a median of {rate_text(median)}"
    return slow


def blame(
    rates: Mapping[int, Mapping[str, float]], hosts: Mapping[int, str], usual: Mapping[str, float], times: float = 4.0
) -> str:
    """Whose fault it is that a save was slow, from a rank × target table of bytes per second; "" if it was not slow.

    A rank below a `times`-th of the median against every target: its host. Against one of them only: the way from
    that host to it. A target whose median is below half of a `times`-th of what is `usual` for it: the target, for all
    ranks.
    """
    targets = sorted({target for of in rates.values() for target in of})
    medians = {target: statistics.median(of[target] for of in rates.values() if target in of) for target in targets}
    faults = [
        f"{target} is slow for all ranks: {rate_text(medians[target])} GB/s, {rate_text(usual[target])} before"
        for target in targets
        if medians[target] * 2 * times < usual.get(target, 0.0)  # the whole machine is busy more often than one host
    ]
    suspects: dict[int, list[str]] = {}
    for rank, of in sorted(rates.items()):
        slow = [target for target in targets if target in of and of[target] * times < medians[target]]
        if slow:
            suspects[rank] = slow
            against = "every target" if len(slow) == len(targets) > 1 else f"{', '.join(slow)} only"
            faults.append(f"rank {rank} on {hosts.get(rank, '?')} is slow against {against}")
    if not faults:
        return ""
    shown = sorted({*suspects, *sorted(rates)[:4]})[:16]
    table = [f"{'GB/s':>14}" + "".join(f"{target:>9}" for target in targets)]
    for rank in shown:
        cells = "".join(f"{rate_text(rates[rank][t]) if t in rates[rank] else '-':>9}" for t in targets)
        table.append(f"{f'rank {rank}':>14}{cells}")
    return "\n".join(["; ".join(faults), *table])


def typical(rates: Iterable[Mapping[str, float]], usual: Mapping[str, float]) -> dict[str, float]:
    """What is usual for each target after one more save: the best median so far, slowly forgotten."""
    rates = list(rates)
    out = {target: rate * 0.98 for target, rate in usual.items()}
    for target in {target for of in rates for target in of}:
        out[target] = max(out.get(target, 0.0), statistics.median(of[target] for of in rates if target in of))
    return out


# ----------------------------------------------------------------------------------------------------- rounds


@dataclass(frozen=True)
class Ended:
    """How a round ended, for ranks that were not in it."""

    seq: int
    step: int
    error: dict[str, Any] | None

    @classmethod
    def of(cls, seq: int, step: int, error: CkptError | None) -> Ended:
        """Thousands of ranks may be named in an error: a part of them will do here."""
        if isinstance(error, SaveError):
            error = SaveError(str(error.args[0]), dict(sorted(error.by_rank.items())[:_HISTORY_NAMES]))
        return cls(seq, step, None if error is None else error.to_dict())


@dataclass(frozen=True)
class Now:
    """The newest round of a topic, and how those before it ended."""

    seq: int
    step: int
    save_id: str
    open: bool
    history: tuple[Ended, ...] = ()

    def ended(self, error: CkptError | None) -> Now:
        history = (*self.history, Ended.of(self.seq, self.step, error))[-HISTORY_ROUNDS:]
        return dataclasses.replace(self, open=False, history=history)

    def how(self, seq: int) -> Ended | None:
        return next((past for past in self.history if past.seq == seq), None)

    def pack(self, info: bytes = b"") -> bytes:
        data = json.dumps(dataclasses.asdict(self)).encode()
        return struct.pack("<I", len(data)) + data + info

    @classmethod
    def unpack(cls, data: bytes) -> tuple[Now, bytes]:
        (length,) = struct.unpack_from("<I", data)
        fields = json.loads(data[4 : 4 + length])
        fields["history"] = tuple(Ended(**past) for past in fields["history"])
        return cls(**fields), data[4 + length :]


def joining(now: Now | None, step: int, last_seq: int) -> str | Ended:
    """What a rank that wants to save `step`, and knows all rounds up to `last_seq`, does: "join", "wait", or learn
    that its round ended without it.

    | newest round          | a round of this step ended since | then                                             |
    | none yet              | -                                | wait                                             |
    | open, this step       | -                                | join                                             |
    | open, another step    | no                               | join: the leader sees the mismatch and tells all |
    | open, another step    | yes                              | ended                                            |
    | closed, or known      | no                               | wait: the leader will open the next one          |
    | closed, or known      | yes                              | ended                                            |
    """
    if now is None:
        return "wait"
    missed = [past for past in now.history if past.step == step and past.seq > last_seq]
    if now.open and now.seq > last_seq and (now.step == step or not missed):
        return "join"
    return missed[-1] if missed else "wait"


TRANSITIONS = {
    # (state, event): next state. What is not here is a mistake of the caller and raises.
    ("entered", "report"): "reported",
    ("entered", "fail"): "reported",
    ("reported", "gather"): "gathered",  # leader
    ("gathered", "gather failed"): "broken",  # leader
    ("gathered", "publish"): "judged",  # leader
    ("gathered", "order"): "reported",  # leader: stand-ins report once more
    ("entered", "publish error"): "judged",  # leader
    ("reported", "publish error"): "judged",  # leader
    ("gathered", "publish error"): "judged",  # leader
    ("broken", "publish error"): "judged",  # leader
    ("reported", "verdict heard"): "judged",  # the others
    ("reported", "leader lost"): "broken",  # the others
    ("judged", "verdict"): "judged",
    ("judged", "close"): "closed",
    ("broken", "close"): "closed",
    ("reported", "close"): "closed",
    ("closed", "close"): "closed",
}


def moved(state: str, event: str, what: str) -> str:
    """The state after an event."""
    after = TRANSITIONS.get((state, event))
    if after is None:
        raise CkptError(f"{event} is out of order: the round of {what} is {state}; see ckptfs.ranks.watch.TRANSITIONS")
    return after
