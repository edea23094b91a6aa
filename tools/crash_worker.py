"""One rank of the crash campaign's job: resume, check, save again and again. Started under torchrun by tools/crash.py.

Every value is a function of the step, so that whatever is loaded can be checked in full. Faults of the file system
are injected here (seeded, one rank, one operation), those that kill come from outside.
"""

from __future__ import annotations

import argparse
import errno
import os
import random
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ckptfs
from ckptfs.errors import CkptError
from ckptfs.storage import LocalStore
from ckptfs.storage.wrap import FaultOps, FaultPlan

ROWS, COLUMNS, SMALL = 1024, 512, 40


def state(step: int, mesh: object) -> dict[str, object]:
    """The tree of a step: sharded, replicated, small and plain values."""
    big = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS) + step
    sharded = distribute_tensor(big, mesh, [Shard(0)]) if mesh is not None else big
    small = {f"s{i}": torch.full((17,), float(step * 100 + i)) for i in range(SMALL)}
    return {"model": {"big": sharded, "copy": big * 2, **small}, "step": step}


def blank(mesh: object) -> dict[str, object]:
    tree = state(0, mesh)
    for value in tree["model"].values():  # type: ignore[attr-defined]
        (value.to_local() if isinstance(value, DTensor) else value).fill_(-1)
    return tree


def check(tree: dict[str, object], mesh: object) -> None:
    """Exit loudly if what was loaded is not what its step saved."""
    wanted = state(int(tree["step"]), mesh)  # type: ignore[call-overload]
    for name, value in tree["model"].items():  # type: ignore[attr-defined]
        other = wanted["model"][name]  # type: ignore[index]
        a, b = (x.to_local() if isinstance(x, DTensor) else x for x in (value, other))
        if not torch.equal(a, b):
            print(f"WRONG DATA in {name} of step {tree['step']}", flush=True)
            os._exit(77)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("--saves", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=float, default=0.0, help="chance that a save gets a file system fault")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,)) if world > 1 else None
    settings = ckptfs.Settings(enter_timeout_s=20, progress_timeout_s=10)
    ops = FaultOps(FaultPlan(), code=errno.EIO)
    run = ckptfs.Run(LocalStore(args.run, ops=ops), settings=settings)
    step = 0
    if run.steps():
        tree = run.load(blank(mesh))
        check(tree, mesh)
        step = int(tree["step"])
    draw = random.Random(args.seed)  # the same on every rank
    if rank == 0:
        print(f"READY at step {step}", flush=True)
    for _ in range(args.saves):
        faulty = draw.random() < args.faults
        victim, at = draw.randrange(world), draw.randrange(160)
        kind = draw.choice(["error-before", "error-after", "short"])
        code = draw.choice([errno.EIO, errno.ENOSPC])
        if faulty and rank == victim:
            ops.plan, ops.code = FaultPlan(kind, at=at), code
        try:
            run.save(step + 1, state(step + 1, mesh))
        except CkptError as error:
            ops.plan = FaultPlan()
            if rank == 0:
                print(f"FAULT {kind} {errno.errorcode[code]} → {type(error).__name__}", flush=True)
            if not faulty:
                print(f"UNEXPECTED on rank {rank}: {type(error).__name__}: {error}", flush=True)
                sys.exit(78)
        ops.plan = FaultPlan()
        dist.barrier()  # the step may have been published although the answer was lost
        step = run.steps()[-1] if run.steps() else 0
        if rank == 0:
            print(f"SAVED {step}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
