"""Ranks as real processes that die, hang, run out of space or do something else: the save ends in time and says who.

Where others hold the same bytes it even commits. Every job goes on to a save that commits. Deadlines are short here;
the machine may be busy, so they are not tiny. Starting a job is what costs most, so each goes through many failures.
"""

import json
import os

import pytest

import ckptfs

pytest.importorskip("torch")

LIMIT_S = 40  # of a save that fails: its deadlines are 10 s at most; the machine may be busy

PRELUDE = """
import json, os, signal, sys
import torch
import torch.distributed as dist
import ckptfs
from ckptfs.ranks import Group
from ckptfs.storage import FaultOps, FaultPlan, LocalStore
from failing_ranks import AtWrite, begin, caught, die, gathered, stop
from spreads import NoSync

rank, size, folder, pids = begin()
SETTINGS = ckptfs.Settings(
    io_bytes=65536, extent_bytes=16384, enter_timeout_s=10.0, progress_timeout_s=10.0, silence_timeout_s=5.0, small_file_bytes=1024,
)


def run_with(ops=None, group=None):
    return ckptfs.Run(LocalStore(folder, ops=ops or NoSync()), settings=SETTINGS, group=group)


def shared(step):
    # What all ranks hold alike.
    return {"shared": torch.arange(200_000.0) + step, "bias": torch.arange(2000.0) - step}


def tree(step):
    return {"own": ckptfs.PerRank(torch.full((100_000,), float(rank + step))), **shared(step)}


def smaller(ranks):
    # A group of these ranks, as after a restart without the others.
    store = dist.PrefixStore(str(ranks), dist.distributed_c10d._get_default_store())
    return Group.over(store, ranks.index(rank), len(ranks))


def sound(step):
    run = run_with()
    assert run.verify(step) == []
    stored = run[step].tree(rank=0)
    assert all(torch.equal(stored[name], value) for name, value in shared(step).items())


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
def scenario(name, step, action, survived=False):
    found = gathered(caught(action))
    if rank == 0:
        print("FOUND", json.dumps([name, found]), flush=True)
        latest = run_with().steps()
        assert latest == [s for s in range(0, step, 10)] + [step] * survived, latest  # without this one if it failed
    dist.barrier()
    if survived:
        if rank == 0:
            sound(step)
            run_with().store.remove_tree(f"step-{step:08d}")
        dist.barrier()
    commits(step + 9 - (step + 9) % 10)


def save(step, ops=None, value=None, lazy=False):
    run = run_with(ops)
    if not lazy:
        return run.save(step, value or tree(step))
    weights = torch.nn.Parameter(torch.zeros(10))
    return run.save_async(step, value or tree(step), before_update=torch.optim.SGD([weights])).result()


def full(kind, at=0):
    return FaultOps(FaultPlan("error-before", at=at, only=frozenset([kind])), code=28)


def stopped(step, value=None):
    try:
        return save(step, AtWrite(stop, at=3) if rank == 2 else None, value)
    finally:
        if rank == 0:
            os.kill(pids[2], signal.SIGCONT)


def broken():
    raise RuntimeError("a cosmic ray")


commits(0)
scenario("full", 1, lambda: save(1, full("pwrite", 2) if rank == 2 else None))
scenario("tree", 11, lambda: save(11, None, {"x": object()} if rank == 1 else None))
scenario("full-lazy", 21, lambda: save(21, full("fallocate") if rank == 3 else None, lazy=True))
scenario("absent", 31, lambda: save(31) if rank != 3 else None)
scenario("stopped", 41, lambda: stopped(41))
scenario("replica-full", 51, lambda: save(51, full("pwrite") if rank == 2 else None, shared(51)), True)
scenario("replica-raises", 61, lambda: save(61, AtWrite(broken, at=3) if rank == 3 else None, shared(61)), True)
scenario("replica-stopped", 71, lambda: stopped(71, shared(71)), True)

# Rank 3 is stopped; the others give up, go on without it as a smaller job in the same folder, and then it wakes up.
if rank == 3:
    error = caught(lambda: save(90, AtWrite(stop, at=3)))
else:
    error = caught(lambda: save(90))
    group = smaller([0, 1, 2])
    for step in (90, 91):
        run_with(group=group).save(step, shared(step))
    into = {"shared": torch.zeros(200_000), "bias": torch.zeros(2000)}
    run_with(group=group).load(into)
    assert torch.equal(into["shared"], shared(91)["shared"])
    if rank == 0:
        os.kill(pids[3], signal.SIGCONT)
assert error["ranks"] == [3], error
dist.barrier()  # what rank 3 had begun has ended
if rank == 0:
    sound(90)
    sound(91)
commits(92)
dist.destroy_process_group()
"""
)


def test_ranks_that_fail_and_live_on(torchrun, tmp_path):
    job = torchrun(4, LIVING, tmp_path / "run", timeout_s=250)
    found = dict(json.loads(line[6:]) for line in job.by_rank[0].splitlines() if line.startswith("FOUND "))
    expected = {
        "full": ([2], "No space left"),
        "tree": ([1], "object"),
        "full-lazy": ([3], "No space left"),
        "absent": ([3], "never entered"),
        "stopped": ([2], "no sign of life"),
    }
    survived = {
        "replica-full": ("2", "No space left"),
        "replica-raises": ("3", "cosmic ray"),
        "replica-stopped": ("2", "no sign of life"),
    }
    assert found.keys() == expected.keys() | survived.keys()
    for name, (ranks, words) in expected.items():
        errors = [error for rank, error in enumerate(found[name]) if not (name == "absent" and rank == 3)]
        assert None not in errors, f"{name}: a rank did not notice: {found[name]}"
        assert all(error["ranks"] == ranks for error in errors), f"{name}: {errors}"
        assert len({error["text"] for error in errors}) == 1, f"{name}: not the same everywhere: {errors}"
        assert words in errors[0]["text"], f"{name}: {errors[0]['text']}"
        assert max(error["took_s"] for rank, error in enumerate(errors) if rank not in ranks) < LIMIT_S, (
            f"{name}: {errors}"
        )
    for name, (rank, words) in survived.items():
        assert all(list(result["lost"]) == [rank] for result in found[name]), f"{name}: {found[name]}"
        assert words in found[name][0]["lost"][rank]
        assert found[name][0]["took_s"] < LIMIT_S
    run = ckptfs.Run(tmp_path / "run")
    assert run.steps() == [*range(0, 81, 10), 90, 91, 92]


DYING = (
    PRELUDE
    + """
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from the launcher, when it sees that a rank is gone: it waits 30 s more
deadly = AtWrite(die, at=3)
done = []


def dies(victim, action):
    done.append([victim, caught(action), run_with().steps()])
    with open(f"{folder}-rank{rank}.json", "w") as file:
        json.dump(done, file)


if sys.argv[2] == "leader":
    dies(0, lambda: run_with(deadly if rank == 0 else None).save(4, tree(4)))
else:
    commits(1)
    dies(3, lambda: run_with(deadly if rank == 3 else None).save(2, shared(2)))
    if rank == 0:
        sound(2)
    dies(2, lambda: run_with(deadly if rank == 2 else None, smaller([0, 1, 2])).save(3, tree(3)))
os._exit(1)
"""
)


def test_ranks_that_are_killed(torchrun, tmp_path):
    folder = tmp_path / "run"
    first = torchrun(4, DYING, folder, "ranks", timeout_s=150, check=False)
    for rank in (0, 1):
        replica, owner = told(folder, rank, first)
        assert replica[1]["lost"].keys() == {"3"}  # others had what it was to write: the step was committed
        assert "no sign of life" in replica[1]["lost"]["3"]
        assert replica[2] == [1, 2]
        assert owner[1]["ranks"] == [2]
        assert "no sign of life" in owner[1]["text"]
        assert owner[2] == [1, 2]  # the older one is still the latest
        assert max(replica[1]["took_s"], owner[1]["took_s"]) < LIMIT_S
    second = torchrun(4, DYING, folder, "leader", timeout_s=150, check=False)
    for rank in (1, 2, 3):
        ((_, found, steps),) = told(folder, rank, second)
        assert found["ranks"] == [0], found
        assert found["took_s"] < LIMIT_S
        assert steps == [1, 2]
    # The job is started again with fewer ranks: it goes on, and collects what the dead ones left.
    torchrun(3, PRELUDE + "commits(5)", folder)
    assert ckptfs.Run(folder).steps() == [1, 2, 5]
    assert sorted(name for name in os.listdir(folder) if name != ".verified") == [
        "step-00000001",
        "step-00000002",
        "step-00000005",
    ]


def told(folder, rank, job):
    try:
        with open(f"{folder}-rank{rank}.json") as file:
            found = json.load(file)
    except FileNotFoundError:
        pytest.fail(job.tail())
    os.remove(f"{folder}-rank{rank}.json")
    return found
