"""Ranks as real processes that die, hang, run out of space or do something else: the save ends in time and says who.

Every job goes on to a save that commits. Deadlines are short here; the machine may be busy, so they are not tiny.
"""

import json
import os

import pytest

import ckptfs

pytest.importorskip("torch")

PRELUDE = """
import json, os, signal, sys, threading, time
import torch
import torch.distributed as dist
import ckptfs
from ckptfs.storage import FaultOps, FaultPlan, FileOps, LocalStore

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
folder = sys.argv[1]
SETTINGS = ckptfs.Settings(
    io_bytes=65536, enter_timeout_s=6.0, progress_timeout_s=6.0, silence_timeout_s=5.0, small_file_bytes=1024
)
pids = [None] * size
dist.all_gather_object(pids, os.getpid())


class AtWrite(FileOps):
    '''Does something instead of the third write.'''

    def __init__(self, action):
        self.action, self.writes = action, 0

    def pwrite(self, fd, data, offset):
        self.writes += 1
        if self.writes == 3:
            self.action()
        return super().pwrite(fd, data, offset)


def run_with(ops=None):
    return ckptfs.Run(LocalStore(folder, **({"ops": ops} if ops else {})), settings=SETTINGS)


def tree(step):
    return {
        "own": ckptfs.PerRank(torch.full((100_000,), float(rank + step))),
        "shared": torch.arange(200_000.0) + step,
    }


def caught(action, step):
    began = time.monotonic()
    try:
        action()
    except ckptfs.SaveError as error:
        return {"text": str(error), "ranks": sorted(error.by_rank), "took_s": time.monotonic() - began}
    return None


def gathered(value):
    values = [None] * size
    dist.all_gather_object(values, value)
    return values


def commits(step):
    '''The next save: on every rank, whole, and nothing left over.'''
    run = run_with()
    run.save(step, tree(step))
    with run[step] as checkpoint:
        stored = checkpoint.tree(rank=rank)
    assert torch.equal(stored["own"], tree(step)["own"].value) and torch.equal(stored["shared"], tree(step)["shared"])
    dist.barrier()
    assert run.steps()[-1] == step
    left = [name for name in os.listdir(folder) if name.startswith(".") and name.endswith("ing")]
    assert not left, left
"""

LIVING = (
    PRELUDE
    + """
def scenario(name, step, action, asynchronous=False):
    found = gathered(caught(action, step))
    if rank == 0:
        print("FOUND", json.dumps([name, found]), flush=True)
        latest = run_with().steps()
        assert latest == list(range(0, step, 10)), latest  # the older steps, not this one
    dist.barrier()
    commits(step + 9 - (step + 9) % 10)


def save(step, ops=None, value=None, lazy=False):
    run = run_with(ops)
    if lazy:
        weights = torch.nn.Parameter(torch.zeros(10))
        run.save_async(step, value or tree(step), before_update=torch.optim.SGD([weights])).wait()
    else:
        run.save(step, value or tree(step))


commits(0)
full = FaultOps(FaultPlan("error-before", at=2, only=frozenset(["pwrite"])), code=28)
scenario("full", 1, lambda: save(1, full if rank == 2 else None))
scenario("tree", 11, lambda: save(11, None, {"x": object()} if rank == 1 else None))
full = FaultOps(FaultPlan("error-before", at=0, only=frozenset(["fallocate"])), code=28)
scenario("full-lazy", 21, lambda: save(21, full if rank == 3 else None, lazy=True))
scenario("absent", 31, lambda: save(31) if rank != 3 else None)


def stop():
    '''Stopped in the middle of a write, as a debugger or a frozen machine does it; rank 0 lets it go on.'''
    os.kill(os.getpid(), signal.SIGSTOP)


def stopped():
    try:
        save(41, AtWrite(stop) if rank == 2 else None)
    finally:
        if rank == 0:
            os.kill(pids[2], signal.SIGCONT)


scenario("stopped", 41, stopped)

go_on = threading.Event()


def stuck():
    '''A store that does not answer on one rank; it comes back when the others have given up.'''
    if rank == 3:
        threading.Timer(12, go_on.set).start()
    save(51, AtWrite(lambda: go_on.wait(60)) if rank == 3 else None)


scenario("stuck", 51, stuck)
dist.destroy_process_group()
"""
)


@pytest.mark.timeout(170)
def test_ranks_that_fail_and_live_on(torchrun, tmp_path):
    job = torchrun(4, LIVING, tmp_path / "run", timeout_s=150)
    found = dict(json.loads(line[6:]) for line in job.by_rank[0].splitlines() if line.startswith("FOUND "))
    expected = {
        "full": ([2], "No space left"),
        "tree": ([1], "object"),
        "full-lazy": ([3], "No space left"),
        "absent": ([3], "never entered"),
        "stopped": ([2], "no sign of life"),
        "stuck": ([3], "stuck in phase"),
    }
    assert found.keys() == expected.keys()
    for name, (ranks, words) in expected.items():
        errors = [error for rank, error in enumerate(found[name]) if not (name == "absent" and rank == 3)]
        assert None not in errors, f"{name}: a rank did not notice: {found[name]}"
        assert all(error["ranks"] == ranks for error in errors), f"{name}: {errors}"
        assert len({error["text"] for error in errors}) == 1, f"{name}: not the same everywhere: {errors}"
        assert words in errors[0]["text"], f"{name}: {errors[0]['text']}"
        assert max(error["took_s"] for rank, error in enumerate(errors) if rank not in ranks) < 20, f"{name}: {errors}"
    run = ckptfs.Run(tmp_path / "run")
    assert run.steps() == list(range(0, 61, 10))


DYING = (
    PRELUDE
    + """
victim = int(sys.argv[2])
commits(1)
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from the launcher, when it sees that a rank is gone: it waits 30 s more
ops = AtWrite(lambda: os.kill(os.getpid(), signal.SIGKILL))
found = caught(lambda: run_with(ops if rank == victim else None).save(2, tree(2)), 2)
with open(f"{folder}-rank{rank}.json", "w") as file:
    json.dump([found, run_with().steps()], file)
os._exit(1)
"""
)


@pytest.mark.timeout(170)
@pytest.mark.parametrize(("victim", "ranks_after"), [(2, 4), (0, 2)], ids=["rank", "leader"])
def test_a_rank_that_is_killed(torchrun, tmp_path, victim, ranks_after):
    folder = tmp_path / "run"
    job = torchrun(4, DYING, folder, victim, timeout_s=120, check=False)
    for rank in {0, 1, 2, 3} - {victim}:
        with open(f"{folder}-rank{rank}.json") as file:
            found, steps = json.load(file)
        assert found is not None, job.tail()
        assert found["ranks"] == [victim], found
        assert found["took_s"] < 20
        assert steps == [1]  # the older one is still the latest
        assert "no sign of life" in found["text"]
    assert ckptfs.Run(folder).steps() == [1]
    # The job is started again, perhaps with fewer ranks: it goes on, and collects what the dead one left.
    torchrun(ranks_after, PRELUDE + "commits(3)", folder)
    assert ckptfs.Run(folder).steps() == [1, 3]
    assert sorted(os.listdir(folder)) == ["step-00000001", "step-00000003"]
