"""What each rank of a measured job does; started by torchrun from jobs.py. Rank 0 writes the results.

All ranks stay alive over all repetitions; in each one every system has its turn, in an order of its own, and the
first repetition (a warm-up, in which what was loaded is also compared with what was saved) is not counted.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import results
from benchmarks.machine import Cost, evict, files_of, measured, settle, shuffled
from benchmarks.model import State, big_shapes, shapes, size_of
from benchmarks.peers import PEERS
from benchmarks.systems import ALL, LIMITS, Job, Memcpy, System


@dataclass(frozen=True)
class Plan:
    """What a job is told, as JSON in its argument."""

    run: str
    scenario: str
    size: str
    repetitions: int
    systems: list[str]
    folder: str
    results: str
    drop_caches: bool
    peers: dict[str, str]  # interpreters of the peers in environments of their own
    unavailable: dict[str, str]  # and why the others have none
    detail: dict[str, Any]


class Ranks:
    """The ranks of this job, as one of them sees it."""

    def __init__(self, plan: Plan) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self.plan = plan
        self.rank, self.size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        if self.size > 1:
            dist.init_process_group("gloo")
        self.folder = Path(plan.folder)
        self._first_peak: dict[tuple[str, str], int] = {}
        self._emptied: list[Path] = []

    def barrier(self) -> None:
        import torch.distributed as dist

        if self.size > 1:
            dist.barrier()

    def gather(self, value: Any) -> list[Any]:
        import torch.distributed as dist

        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def mesh(self, count: int) -> Any:
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh("cpu", list(range(count))) if self.size > 1 else None

    def timed(self, action: Callable[[], None], process: int | None = None) -> Cost:
        """All ranks do it at once; the slowest counts, memory is the largest, traffic the sum; same on all."""
        self.barrier()
        error: BaseException | None = None
        mine = Cost()
        try:
            with measured(process) as mine:
                action()
        except BaseException as caught:
            error = caught
        found = self.gather((mine, repr(error) if error else None))
        problems = [text for _, text in found if text]
        if problems:
            raise RuntimeError("; ".join(problems)) from error
        costs = [cost for cost, _ in found]
        return Cost(
            max(c.seconds for c in costs),
            max(c.peak_memory_bytes for c in costs),
            sum(c.bytes_read for c in costs),
            sum(c.bytes_written for c in costs),
        )

    def note(self, measure: results.Measure) -> None:
        if self.rank != 0:
            return
        results.append(self.plan.results, measure)
        self.say(results.line_of(measure))

    def skip(self, system: str, reason: str) -> None:
        if self.rank == 0:
            results.append(self.plan.results, results.Skip(self.plan.run, self.plan.scenario, system, reason))
            self.say(f"{system}: skipped: {reason}")

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(f"  {self.plan.scenario}: {text}", flush=True)

    def measure(
        self, operation: str, system: str, nbytes: int, repetition: int, cost: Cost, **more: Any
    ) -> results.Measure:
        # Memory that a system keeps for the next time was taken in the warm-up: it counts.
        peak = max(cost.peak_memory_bytes, self._first_peak.get((operation, system), 0))
        self._first_peak.setdefault((operation, system), peak)
        return results.Measure(
            self.plan.run,
            self.plan.scenario,
            operation,
            system,
            nbytes,
            cost.seconds,
            repetition,
            ranks=more.pop("ranks", self.size),
            peak_memory_bytes=peak,
            bytes_read=cost.bytes_read,
            bytes_written=cost.bytes_written,
            **more,
        )

    def systems(self) -> list[System]:
        """Those that are asked for and there; the limits always, because every result is compared with them."""
        chosen = []
        everything = [*(kind() for kind in ALL), *(kind(self.plan.peers, self.plan.unavailable) for kind in PEERS)]
        for system in everything:
            if system.name not in LIMITS and self.plan.systems and system.name not in self.plan.systems:
                continue
            reason = system.missing()
            if reason:
                self.skip(system.name, reason)
            else:
                chosen.append(system)
        return chosen

    def opened(self, systems: Sequence[System], jobs: Sequence[Job | None]) -> list[System]:
        """Those that are ready for these jobs."""
        ready = []
        for system in systems:
            try:
                for job in jobs:
                    self.timed(lambda s=system, j=job: s.open(j, self.folder) if j else None)  # type: ignore[misc]
                ready.append(system)
            except RuntimeError as error:
                self.skip(system.name, f"failed: {error}")
                system.close()
        return ready

    def remove(self, *paths: Path) -> None:
        """Give the space back; the emptied files go at the end.

        ext4 passes by inodes that were freed in the last minutes, one by one, whenever it makes a file: after the
        files of one system were deleted, the next one's would be made ten times slower.
        """
        self.barrier()
        if self.rank == 0:
            for path in paths:
                for file in files_of(path) if path.exists() else []:
                    os.truncate(file, 0)
                self._emptied.append(path)
            os.sync()
            settle()
        self.barrier()

    def close(self) -> None:
        """Remove what was emptied."""
        self.barrier()
        for path in self._emptied:
            shutil.rmtree(path, ignore_errors=True)


def with_limits(measures: list[results.Measure]) -> list[results.Measure]:
    """Every result of a repetition as a fraction of the limits of the same operation in it."""
    seconds = {(m.system, m.operation): m.seconds for m in measures if m.system in LIMITS}

    def share(limit: str, m: results.Measure) -> float | None:
        found = seconds.get((limit, m.operation))
        return found / m.seconds if found else None

    return [replace(m, of_raw=share("raw", m), of_memcpy=share("memcpy", m)) for m in measures]


# --- save and load ---------------------------------------------------------------------------------------------------


SHAPES = {"transformer": shapes, "big": big_shapes}


def save_and_load(ranks: Ranks) -> None:
    """Each system saves, durable, and loads its own bytes back cold, in place."""
    plan = ranks.plan
    state = State(SHAPES[plan.detail["shapes"]](size_of(plan.size)), ranks.rank, ranks.size)
    job = Job(state, ranks.mesh(ranks.size), ranks.barrier)
    before = state.fingerprint()
    systems = ranks.opened(ranks.systems(), [job])
    for turn in range(-1, plan.repetitions):
        ranks.say("warm-up, not counted" if turn < 0 else f"repetition {turn + 1} of {plan.repetitions}")
        done: list[results.Measure] = []
        for system in shuffled(systems, turn):
            try:
                done += _round_trip(ranks, job, system, turn, before)
            except RuntimeError as error:
                ranks.skip(system.name, f"failed: {error}")
                systems = [s for s in systems if s is not system]
                system.close()
                state.fill()
        if turn >= 0:
            for measure in with_limits(done):
                ranks.note(measure)


def _round_trip(ranks: Ranks, job: Job, system: System, turn: int, before: str) -> list[results.Measure]:
    folder = ranks.folder / f"{type(system).__name__}-{turn + 1}"
    place = system.place(folder)
    nbytes, out = job.state.total_bytes, []
    process = system.process_of(job)
    try:
        cost = ranks.timed(lambda: system.save(job, folder), process)
        files = 0 if isinstance(system, Memcpy) else len(files_of(place))
        blocked_s = max((b for b in ranks.gather(system.blocked_s) if b is not None), default=None)
        out.append(
            ranks.measure(
                "save", system.name, nbytes, max(0, turn), cost, cache="durable", files=files, blocked_s=blocked_s
            )
        )
        ranks.barrier()
        cache = evict(place, drop_caches=ranks.plan.drop_caches) if ranks.rank == 0 and files else ""
        cache = ranks.gather(cache)[0]
        check = turn < 0 and system.name not in LIMITS
        if check:
            system.zero(job)
        cost = ranks.timed(lambda: system.load(job, folder), process)
        out.append(ranks.measure("load", system.name, nbytes, max(0, turn), cost, cache=cache, files=files))
        if check and not all(ranks.gather(system.fingerprint(job) == before)):
            raise RuntimeError("what it loaded is not what was saved")
    finally:
        ranks.remove(place)
    return out


# --- reshard ---------------------------------------------------------------------------------------------------------


def reshard_prepare(ranks: Ranks) -> None:
    """Two ranks save; the folders stay for the four that load them."""
    state = State(shapes(size_of(ranks.plan.size)), ranks.rank, ranks.size)
    job = Job(state, ranks.mesh(ranks.size), ranks.barrier)
    for system in ranks.opened([s for s in ranks.systems() if s.name in RESHARD], [job]):
        try:
            ranks.timed(lambda s=system: s.save(job, ranks.folder / f"{type(s).__name__}-0"))
        except RuntimeError as error:
            ranks.skip(system.name, f"failed: {error}")


RESHARD = (*LIMITS, "ckptfs", "DCP + ckptfs", "DCP", "Orbax", "ByteCheckpoint 0.0.2")


def reshard(ranks: Ranks) -> None:
    """What two ranks saved is loaded by two and by four of these ranks in turn."""
    plan = ranks.plan
    table = shapes(size_of(plan.size))
    jobs = {}
    for count in (2, 4):
        mesh = ranks.mesh(count)
        if ranks.rank < count:
            jobs[count] = Job(State(table, ranks.rank, count), mesh, ranks.barrier)
    before = {count: job.state.fingerprint() for count, job in jobs.items()}
    saved = [s for s in ranks.systems() if s.name in RESHARD and _was_saved(ranks, s)]
    systems = ranks.opened(saved, [jobs.get(2), jobs.get(4)])
    for turn in range(-1, plan.repetitions):
        ranks.say("warm-up, not counted" if turn < 0 else f"repetition {turn + 1} of {plan.repetitions}")
        done: list[results.Measure] = []
        for system in shuffled(systems, turn):
            try:
                done += [
                    _reshard_once(ranks, jobs.get(count), system, count, turn, before.get(count))
                    for count in ((2, 4) if turn % 2 else (4, 2))
                ]
            except RuntimeError as error:
                ranks.skip(system.name, f"failed: {error}")
                systems = [s for s in systems if s is not system]
                system.close()
                for job in jobs.values():
                    job.state.fill()
        if turn >= 0:
            for measure in with_limits(done):
                ranks.note(measure)


def _was_saved(ranks: Ranks, system: System) -> bool:
    there = isinstance(system, Memcpy) or system.place(ranks.folder / f"{type(system).__name__}-0").exists()
    return bool(ranks.gather(there)[0])


def _reshard_once(
    ranks: Ranks, job: Job | None, system: System, count: int, turn: int, before: str | None
) -> results.Measure:
    folder = ranks.folder / f"{type(system).__name__}-0"
    ranks.barrier()
    on_disk = not isinstance(system, Memcpy)
    cache = evict(system.place(folder), drop_caches=ranks.plan.drop_caches) if ranks.rank == 0 and on_disk else ""
    cache = ranks.gather(cache)[0]
    check = turn < 0 and system.name not in LIMITS
    if check and job:
        system.zero(job)
    process = system.process_of(job) if job else None
    cost = ranks.timed(lambda: system.load(job, folder) if job else None, process)
    if check and not all(ranks.gather(job is None or system.fingerprint(job) == before)):
        raise RuntimeError(f"{system.name} 2→{count}: what it loaded is not what was saved")
    nbytes = ranks.gather(job.state.total_bytes if job else 0)[0]
    return ranks.measure(f"load 2→{count}", system.name, nbytes, max(0, turn), cost, cache=cache, ranks=count)


# --- small tensors ---------------------------------------------------------------------------------------------------

SMALL_COUNT, SMALL_BYTES, SLOW_S = 3000, 4096, 5.0


def small(ranks: Ranks) -> None:
    """3,000 tensors of 4 KiB, saved durably by one rank."""
    state = State({f"p{i}": (SMALL_BYTES // 4,) for i in range(SMALL_COUNT)}, 0, 1)
    job = Job(state, None, lambda: None)
    systems = ranks.opened([s for s in ranks.systems() if s.name not in LIMITS], [job])
    slow: set[str] = set()
    for turn in range(-1, ranks.plan.repetitions):
        for system in shuffled([s for s in systems if turn < 1 or s.name not in slow], turn):
            folder = ranks.folder / f"{type(system).__name__}-{turn + 1}"
            try:
                cost = ranks.timed(lambda s=system, f=folder: s.save(job, f), system.process_of(job))
            except RuntimeError as error:
                ranks.skip(system.name, f"failed: {error}")
                systems = [s for s in systems if s is not system]
                continue
            if cost.seconds > SLOW_S:
                slow.add(system.name)  # one counted repetition is enough to know
            files = len(files_of(system.place(folder)))
            measure = ranks.measure(
                "save small", system.name, state.total_bytes, max(0, turn), cost, cache="durable", files=files
            )
            if turn >= 0:
                ranks.note(measure)
            ranks.remove(system.place(folder))


def main() -> None:
    plan = Plan(**json.loads(sys.argv[1]))
    from benchmarks import asyncwork, slices

    scenarios: dict[str, Callable[[Ranks], None]] = {
        "save": save_and_load,
        "reshard_prepare": reshard_prepare,
        "reshard": reshard,
        "small": small,
        "async": asyncwork.asynchronous,
        "beside": asyncwork.beside,
        "slice": slices.slices,
    }
    begin = time.perf_counter()
    ranks = Ranks(plan)
    scenarios[plan.detail["part"]](ranks)
    ranks.say(f"took {time.perf_counter() - begin:.0f} s")
    ranks.close()
    ranks.barrier()
    if ranks.size > 1:
        import torch.distributed as dist

        dist.destroy_process_group()


if __name__ == "__main__":
    main()
