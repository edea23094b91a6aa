"""The launcher restarts a job whose worker was killed in the middle of a save: it goes on as if nothing had been."""

import json
import os

import pytest

import ckptfs

pytest.importorskip("torch")

PROGRAM = """
import json, os, signal, sys, threading
import torch
import torch.distributed as dist
import ckptfs
from ckptfs.storage import FileOps, LocalStore

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
folder = sys.argv[1]
SETTINGS = ckptfs.Settings(io_bytes=65536, extent_bytes=16384, small_file_bytes=1024, enter_timeout_s=30.0)


class Deadly(FileOps):
    # SIGKILL instead of the third write, when all ranks are in the middle of the same save

    def __init__(self):
        self.writes = 0

    def pwrite(self, fd, data, offset):
        self.writes += 1
        if self.writes == 3:
            dist.distributed_c10d._get_default_store().wait([f"writing-{r}" for r in range(size)])
            os.kill(os.getpid(), signal.SIGKILL)
        return super().pwrite(fd, data, offset)


class Telling(FileOps):
    # Says that this rank writes, and then waits for the launcher's signal

    def pwrite(self, fd, data, offset):
        dist.distributed_c10d._get_default_store().set(f"writing-{rank}", "")
        threading.Event().wait()


def run_with(ops=None):
    return ckptfs.Run(LocalStore(folder, **({"ops": ops} if ops else {})), settings=SETTINGS, keep_last=2)


def tree(step):
    return {"own": ckptfs.PerRank(torch.full((100_000,), float(rank + step))), "all": torch.arange(50_000.0) + step}


def load_latest():
    into = tree(0)
    run = run_with()
    step = run.latest.step
    run.load(into)
    assert torch.equal(into["own"].value, tree(step)["own"].value) and torch.equal(into["all"], tree(step)["all"])
    return step


def leftovers():
    return sorted(name for name in os.listdir(folder) if name.startswith(".") and name.endswith("ing"))


def told(**what):
    if rank == 0:
        with open(f"{folder}.json", "a") as file:
            file.write(json.dumps({"attempt": attempt, **what}) + "\\n")


def die_in_save(step, victim, lazy):
    class Both(Deadly):
        def pwrite(self, fd, data, offset):
            dist.distributed_c10d._get_default_store().set(f"writing-{rank}", "")
            return super().pwrite(fd, data, offset)

    run = run_with(Both() if rank == victim else Telling())
    if lazy:
        weights = torch.nn.Parameter(torch.zeros(3))
        run.save_async(step, tree(step), before_update=torch.optim.SGD([weights])).wait()
    run.save(step, tree(step))


if attempt:
    left = leftovers()
    dist.barrier()  # everybody has looked
    start = load_latest()
    with run_with() as run:  # which waits until the oldest step is deleted
        run.save(start + 1, tree(start + 1))  # the step that the dead attempt was to save
    told(left=len(left), loaded=start, after=len(leftovers()))
    assert load_latest() == start + 1
else:
    run_with().save(1, tree(1))
    start = 0
dist.barrier()
if attempt < 3:
    # A rank that only follows, then the leader, then one behind a loop that trains on.
    die_in_save(start + 2, [1, 0, 2][attempt], lazy=attempt == 2)
dist.destroy_process_group()
"""


def test_a_worker_is_killed_in_the_middle_of_a_save_and_the_launcher_restarts_all(torchrun, tmp_path):
    folder = tmp_path / "run"
    torchrun(3, PROGRAM, folder, timeout_s=250, max_restarts=3, env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    told = [json.loads(line) for line in (tmp_path / "run.json").read_text().splitlines()]
    assert told == [
        {"attempt": 1, "left": 1, "loaded": 1, "after": 0},
        {"attempt": 2, "left": 1, "loaded": 2, "after": 0},
        {"attempt": 3, "left": 1, "loaded": 3, "after": 0},
    ]
    assert sorted(os.listdir(folder)) == ["step-00000003", "step-00000004"]
    with ckptfs.Run(folder) as run:
        assert run.verify() == []
