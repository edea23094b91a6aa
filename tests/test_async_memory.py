"""Staging memory: a state many times larger than the budget streams through it."""

import json
import subprocess
import sys

import pytest

import ckptfs
from ckptfs.errors import StorageError
from ckptfs.stage import Pools, affordable_bytes

pytest.importorskip("torch")

MIB = 1 << 20

PROGRAM = """
import gc, json, sys, threading
import torch, ckptfs
BUDGET, MIB = 64 << 20, 1 << 20
run = ckptfs.Run(sys.argv[1], settings=ckptfs.Settings(async_buffer_bytes=BUDGET, buffer_bytes=BUDGET), keep_last=1)
weights = [torch.nn.Parameter(torch.ones(8 * MIB)) for _ in range(16)]  # 32 MiB each, 8 times the budget together
optimizer = torch.optim.SGD(weights)
small = {"x": torch.ones(1000)}
run.save(0, small)  # imports, threads


def peak():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))


def reset():
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts again from what is there now
    return peak()


before = reset()
mode = sys.argv[2]
tree = {str(i): w for i, w in enumerate(weights)}
if mode == "sync":
    result = run.save(1, tree)
else:
    save = run.save_async(1, tree, before_update=optimizer if mode == "lazy" else None)
    for w in weights:
        w.grad = None
    optimizer.step()
    result = save.result()
print(json.dumps({"extra": peak() - before, "budget": BUDGET, "saved": result.nbytes}))
"""


@pytest.mark.serial
@pytest.mark.parametrize("mode", ["sync", "snapshot", "lazy"])
def test_extra_memory_stays_within_the_budget(tmp_path, mode):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), mode], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["saved"] == 8 * found["budget"]
    assert found["extra"] <= 1.1 * found["budget"], f"{found['extra'] / MIB:.0f} MiB"
    assert found["extra"] > found["budget"] / 4, "the measurement sees the buffers"


def test_buffers_are_kept_from_save_to_save(tmp_path):
    import torch

    tree = {"x": torch.zeros(4 * MIB)}
    with ckptfs.Run(tmp_path) as run:
        run.save_async(1, tree).wait()
        pool = run._pools._pool
        made = pool.made_bytes
        for step in range(2, 5):
            run.save_async(step, tree).wait()
        run.save(9, tree)
        assert run._pools._pool is pool
        assert pool.made_bytes == made


def test_pools_grow_their_buffers_and_keep_their_budget():
    pools = Pools(1 * MIB)
    first = pools.fit(16 * MIB, 100)
    assert pools.fit(8 * MIB, 1 * MIB) is first
    assert first.capacity == 7  # a page of slack each
    larger = pools.fit(16 * MIB, 5 * MIB)
    assert larger is not first
    assert larger.buffer_bytes >= 5 * MIB
    assert pools.fit(1, 5 * MIB).capacity == 2  # one to fill while the other is written
    pools.close()
    with pytest.raises(StorageError, match="closed"):
        larger.acquire()


def test_the_budget_is_what_the_machine_affords(monkeypatch):
    assert affordable_bytes(1) == 1
    huge = 1 << 60
    alone = affordable_bytes(huge)
    assert alone < huge
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert affordable_bytes(huge) < alone / 4


@pytest.mark.parametrize(
    ("memory_gib", "ranks", "expected_mib"),
    [((64, 60), 2, 4096), ((16, 12), 8, 768), ((64, 60), 16, 1024), ((64, 2), 1, 1024), (None, 1, 1024)],
)
def test_without_a_wish_the_budget_is_a_part_of_the_machine(monkeypatch, memory_gib, ranks, expected_mib):
    memory = memory_gib and tuple(gib << 30 for gib in memory_gib)
    monkeypatch.setattr("ckptfs.stage._memory_bytes", lambda: memory)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert affordable_bytes(None) == expected_mib * MIB
