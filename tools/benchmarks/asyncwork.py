"""A training loop with a checkpoint every iteration: how long each system makes it wait, and what it costs end to end.

An iteration is: a fixed number of matrix products on one core (forward and backward), the optimizer's update of every
parameter, the call that begins a save. A save is under way when the clock starts, so that every counted iteration
meets the one before it. Before a new save, a system waits for its previous one.

Beside it, one rank with a core to spare: how much slower the same work gets while a save runs, and why.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.machine import Cost, measured, shuffled
from benchmarks.model import State, shapes, size_of

if TYPE_CHECKING:
    from benchmarks.work import Ranks

ITERATIONS = 3
BYTES_PER_COMPUTE_S = 0.4e9  # the step between two saves is long enough for a save at 0.4 GB/s in the background


class Saving:
    """One way to checkpoint in a loop. `begin` returns when training may go on; `finish` when the last is durable."""

    name = "no checkpoints"

    def __init__(self, ranks: Ranks, tensors: dict[str, Any], optimizer: Any) -> None:
        self.ranks, self.tensors, self.optimizer = ranks, tensors, optimizer
        self.open()

    def open(self) -> None:
        pass

    def begin(self, number: int) -> None:
        pass

    def finish(self) -> None:
        pass

    def under_way(self) -> bool:
        """Whether the save that `begin` began still runs."""
        return False

    def folders(self, number: int) -> list[Path]:
        return [self.ranks.folder / f"{type(self).__name__}-{number}"]


class DcpSync(Saving):
    name = "DCP save"

    def begin(self, number: int) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save({"model": self.tensors}, checkpoint_id=str(self.folders(number)[0]))


class DcpAsync(Saving):
    """In its thread mode, with a stager that keeps its host memory, and a process group of its own."""

    name = "DCP async_save"

    def open(self) -> None:
        import torch.distributed as dist
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self._group = dist.new_group()
        self._stager = DefaultStager(StagingOptions(False, False, False, False))
        self._future: Any = None

    def begin(self, number: int) -> None:
        import torch.distributed.checkpoint as dcp

        self.finish()
        self._future = dcp.async_save(
            {"model": self.tensors},
            checkpoint_id=str(self.folders(number)[0]),
            process_group=self._group,
            async_stager=self._stager,
        )

    def under_way(self) -> bool:
        return self._future is not None and not getattr(self._future, "upload_completion", self._future).done()

    def finish(self) -> None:
        if self._future is not None:
            getattr(self._future, "upload_completion", self._future).result()
            self._future = None


class CkptfsSync(Saving):
    name = "ckptfs save"

    def open(self) -> None:
        import ckptfs

        self._run = ckptfs.Run(self.ranks.folder / f"{type(self).__name__}-run")
        self._save: Any = None

    def begin(self, number: int) -> None:
        self._run.save(number, {"model": self.tensors})

    def under_way(self) -> bool:
        return self._save is not None and not self._save.done

    def finish(self) -> None:
        if self._save is not None:
            self._save.result()
            self._save = None

    def folders(self, number: int) -> list[Path]:
        return [self.ranks.folder / f"{type(self).__name__}-run" / f"step-{number:08d}"]


class CkptfsSnapshot(CkptfsSync):
    name = "ckptfs save_async"

    def begin(self, number: int) -> None:
        self.finish()
        self._save = self._run.save_async(number, {"model": self.tensors})


class CkptfsLazy(CkptfsSync):
    name = "ckptfs save_async(before_update)"

    def begin(self, number: int) -> None:
        self.finish()
        self._save = self._run.save_async(number, {"model": self.tensors}, before_update=self.optimizer)


WAYS: tuple[type[Saving], ...] = (Saving, DcpSync, DcpAsync, CkptfsSync, CkptfsSnapshot, CkptfsLazy)


def _optimizer(tensors: list[Any]) -> Any:
    import torch

    class Shift(torch.optim.Optimizer):
        """An update that touches every parameter."""

        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for param in group["params"]:
                    param.add_(1e-3)

    return Shift(tensors)


def _computing(seconds: float) -> Callable[[], None]:
    """Always the same work, which takes about this long on an idle core."""
    import torch

    a, b = torch.randn(512, 512), torch.randn(512, 512)
    for _ in range(5):
        torch.mm(a, b)
    begin = time.perf_counter()
    for _ in range(40):
        torch.mm(a, b)
    count = max(1, round(seconds * 40 / (time.perf_counter() - begin)))

    def work() -> None:
        for _ in range(count):
            torch.mm(a, b)

    return work


def asynchronous(ranks: Ranks) -> None:
    plan = ranks.plan
    state = State(shapes(size_of(plan.size)), ranks.rank, ranks.size)
    tensors = state.distributed(ranks.mesh(ranks.size))
    optimizer = _optimizer(list(state.local.values()))
    compute = _computing(state.total_bytes / BYTES_PER_COMPUTE_S)
    ways = [
        kind(ranks, tensors, optimizer)
        for kind in WAYS
        if not plan.systems or kind is Saving or kind.name in plan.systems
    ]
    number = 0
    for turn in range(-1, plan.repetitions):
        ranks.say("warm-up, not counted" if turn < 0 else f"repetition {turn + 1} of {plan.repetitions}")
        for way in shuffled(ways, turn):
            try:
                number = _loop(ranks, way, compute, optimizer, state, number, turn)
            except RuntimeError as error:
                ranks.skip(way.name, f"failed: {error}")
                ways = [w for w in ways if w is not way]


def _loop(
    ranks: Ranks, way: Saving, compute: Callable[[], None], optimizer: Any, state: State, number: int, turn: int
) -> int:
    """Some iterations; then one save with nothing beside it, for the rate in the background."""
    times: dict[str, list[float]] = {"compute_s": [], "update_s": [], "begin_s": []}
    numbers = range(number, number + ITERATIONS + 2)

    def clean(done: int) -> None:
        if ranks.rank == 0:
            for folder in way.folders(done):
                shutil.rmtree(folder, ignore_errors=True)

    error: BaseException | None = None
    cost = Cost()
    ranks.barrier()
    try:
        with measured() as first:  # its memory counts: what is kept for the next time is taken here
            way.begin(numbers[0])
        with measured() as cost:
            for at in numbers[1:-1]:
                marks = [time.perf_counter()]
                compute()
                marks.append(time.perf_counter())
                optimizer.step()
                marks.append(time.perf_counter())
                way.begin(at)
                marks.append(time.perf_counter())
                for key, a, b in zip(times, marks, marks[1:], strict=False):
                    times[key].append(b - a)
        way.finish()
    except BaseException as caught:
        error = caught
    problems = [text for text in ranks.gather(repr(error) if error else None) if text]
    if problems:
        raise RuntimeError("; ".join(problems)) from error
    for at in numbers[:-1]:
        clean(at)
    ranks.barrier()
    begin = time.perf_counter()
    way.begin(numbers[-1])
    returned = time.perf_counter() - begin
    way.finish()
    alone = time.perf_counter() - begin
    cost.peak_memory_bytes += first.peak_memory_bytes if turn < 0 else 0
    found = ranks.gather((cost, times, returned, alone))
    clean(numbers[-1])
    ranks.remove()
    mean = {key: max(sum(t[key]) / ITERATIONS for _, t, _, _ in found) for key in times}
    total = Cost(
        max(c.seconds for c, *_ in found) / ITERATIONS,
        max(c.peak_memory_bytes for c, *_ in found),
        sum(c.bytes_read for c, *_ in found),
        sum(c.bytes_written for c, *_ in found),
    )
    measure = ranks.measure(
        "iteration", way.name, state.total_bytes, max(0, turn), total, blocked_s=mean["begin_s"], detail=mean
    )
    if turn < 0:
        return number + len(numbers)
    ranks.note(measure)
    if type(way) is not Saving:
        cost = Cost(max(f[3] for f in found))
        blocked = max(f[2] for f in found)
        ranks.note(
            ranks.measure("save alone", way.name, state.total_bytes, turn, cost, blocked_s=blocked, cache="durable")
        )
    return number + len(numbers)


# --- a core to spare -------------------------------------------------------------------------------------------------

PLAIN_S = 0.4
UNIT_FLOP = 2.5e8  # about 5 ms
# How often by the kind of work: that of the loop above, operations of 3 ms; and such short ones (10 µs) that the
# interpreter is always wanted. What a loop loses varies by several percent from save to save on a virtual machine, and
# by as much when nothing happens: one save says nothing.
STRETCHES = {512: 11, 64: 3}
PRODUCTS = tuple(STRETCHES)


class Idle(Saving):
    """Nothing happens: by how much the same work differs from itself."""

    name = "nothing else"

    def begin(self, number: int) -> None:
        self._end = time.perf_counter() + 0.7

    def under_way(self) -> bool:
        return time.perf_counter() < self._end

    def folders(self, number: int) -> list[Path]:
        return []


class Spinning(Saving):
    """What the machine takes from a loop when its other core is busy at all: nothing is shared with this process."""

    name = "another process that only spins"
    code = "import time; end = time.time() + 0.7\nwhile time.time() < end: pass"

    def begin(self, number: int) -> None:
        command = [sys.executable, "-c", self.code, str(self.ranks.folder / "written")]
        self._process = subprocess.Popen(command, preexec_fn=lambda: os.nice(10))  # noqa: PLW1509

    def under_way(self) -> bool:
        return self._process.poll() is None

    def finish(self) -> None:
        self._process.wait()

    def folders(self, number: int) -> list[Path]:
        return []


class Copying(Spinning):
    name = "another process that copies memory"
    code = (
        "import time; a, b = bytearray(64 << 20), memoryview(bytearray(64 << 20)); end = time.time() + 0.7\n"
        "while time.time() < end: b[:] = a"
    )


class Writing(Spinning):
    """Past the page cache, again and again the same memory: what a loop loses to the disk whoever writes."""

    name = "another process that only writes"
    code = (
        "import mmap, os, sys, threading, time; end = time.time() + 0.7; part = 8 << 20\n"
        "fd = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY | os.O_DIRECT); os.posix_fallocate(fd, 0, 64 * part)\n"
        "def write(first):\n"
        "    memory = mmap.mmap(-1, part, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
        "    memory.madvise(mmap.MADV_HUGEPAGE)\n"
        "    done = 0\n"
        "    while time.time() < end: done += os.pwrite(fd, memory, (first + done // part % 32) * part)\n"
        "threads = [threading.Thread(target=write, args=[at]) for at in (0, 32)]\n"
        "[thread.start() for thread in threads]; [thread.join() for thread in threads]"
    )


BESIDE: tuple[type[Saving], ...] = (Idle, Spinning, Copying, Writing, DcpAsync, CkptfsSnapshot, CkptfsLazy)


def beside_name(size: int) -> str:
    return f"computing beside a save, products of {size} × {size}"


@dataclass(frozen=True)
class Spent:
    """Seconds that one unit of work took; of these, on the processor, and waiting for one."""

    wall_s: float
    cpu_s: float
    queue_s: float

    def mean(self, other: Spent) -> Spent:
        return Spent(
            (self.wall_s + other.wall_s) / 2, (self.cpu_s + other.cpu_s) / 2, (self.queue_s + other.queue_s) / 2
        )


class Products:
    """Matrix products in this thread, one by one as a loop in Python does them."""

    def __init__(self, size: int) -> None:
        import torch

        a, b, out = torch.randn(size, size), torch.randn(size, size), torch.empty(size, size)
        count = max(1, round(UNIT_FLOP / (2 * size**3)))

        def unit() -> None:
            for _ in range(count):
                torch.mm(a, b, out=out)

        self._unit = unit

    def until(self, over: Callable[[], bool]) -> Spent:
        count, begin, (cpu_ns, queue_ns) = 0, time.perf_counter(), _scheduled_ns()
        while not count or not over():
            self._unit()
            count += 1
        wall_s, (cpu_after_ns, queue_after_ns) = time.perf_counter() - begin, _scheduled_ns()
        return Spent(wall_s / count, (cpu_after_ns - cpu_ns) / 1e9 / count, (queue_after_ns - queue_ns) / 1e9 / count)


def _scheduled_ns() -> tuple[int, int]:
    """How long this thread has had a processor, and how long it has been ready and waited for one."""
    cpu, queue, _ = Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()
    return int(cpu), int(queue)


def beside(ranks: Ranks) -> None:
    """One rank, whose loop computes on one core while saves have another."""
    plan = ranks.plan
    if len(os.sched_getaffinity(0)) < 2:
        ranks.skip("computing beside a save", "there is only one core")
        return
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for DCP
    state = State(shapes(size_of(plan.size)), 0, 1)
    optimizer = _optimizer(list(state.local.values()))
    quick = plan.repetitions == 1  # without other processes to compare with
    ways = [
        kind(ranks, dict(state.local), optimizer)
        for kind in BESIDE
        if kind is Idle or (issubclass(kind, Spinning) and not quick) or not plan.systems or kind.name in plan.systems
    ]
    number = 0
    for size, count in {PRODUCTS[0]: 1}.items() if quick else STRETCHES.items():
        work = Products(size)
        for turn in range(-1, count):
            ranks.say("warm-up, not counted" if turn < 0 else f"{turn + 1} of {count}, products of {size}")
            for way in shuffled(ways, turn):
                number += 1
                found = _stretch(ranks, way, work, optimizer, number)
                if turn >= 0:
                    _note_stretch(ranks, way, size, state.total_bytes, turn, *found)


def _stretch(ranks: Ranks, way: Saving, work: Products, optimizer: Any, number: int) -> tuple[Spent, Spent, float]:
    """The work alone (before and after), and while a save runs; how long that took."""

    def plain() -> Spent:
        end = time.perf_counter() + PLAIN_S
        return work.until(lambda: time.perf_counter() > end)

    before = plain()
    way.begin(number)
    begin = time.perf_counter()
    busy = work.until(lambda: not way.under_way())
    took_s = time.perf_counter() - begin
    optimizer.step()
    way.finish()
    after = plain()
    ranks.remove(*way.folders(number))
    return before.mean(after), busy, took_s


def _note_stretch(
    ranks: Ranks, way: Saving, size: int, nbytes: int, turn: int, alone: Spent, busy: Spent, took_s: float
) -> None:
    detail = {
        "slower": busy.wall_s / alone.wall_s - 1,
        "processor": (busy.cpu_s - alone.cpu_s) / alone.wall_s,
        "queue": (busy.queue_s - alone.queue_s) / alone.wall_s,
        "save_s": took_s,
    }
    ranks.note(ranks.measure(beside_name(size), way.name, nbytes, turn, Cost(busy.wall_s), detail=detail))
