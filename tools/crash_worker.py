"""One rank of the crash campaign's job: resume, check, save again and again. Started under torchrun by tools/crash.py.

Every value is a function of the step, so that whatever is loaded can be checked in full; after a save in the background
all of them change at the first moment allowed. Faults of the file system are injected here (seeded, one rank, one
operation), those that kill or stop come from outside. Drawn at random: how a step is saved, whether it holds only what
all ranks have (then others stand in for a rank that fails), and whether ranks put small pieces together.
"""

from __future__ import annotations

import argparse
import errno
import os
import random
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckptfs
from ckptfs.errors import CkptError
from ckptfs.storage import LocalStore
from ckptfs.storage.wrap import FaultOps, FaultPlan

ROWS, COLUMNS, SMALL = 1024, 512, 40


Tree = dict[str, Any]


def state(step: int, mesh: object, *, shared: bool) -> Tree:
    """The tree of a step: replicated, small and plain values; unless `shared`, also what each rank has a part of."""
    big = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS) + step
    model: Tree = {"copy": big * 2, **{f"s{i}": torch.full((17,), float(step * 100 + i)) for i in range(SMALL)}}
    if not shared:
        rank, world = dist.get_rank(), dist.get_world_size()
        begin, end = (big.numel() * i // world + 5 * (0 < i < world) for i in (rank, rank + 1))  # within rows
        model["flat"] = ckptfs.FlatShard(big.reshape(-1)[begin:end] * 3, (ROWS, COLUMNS), begin)
        model["big"] = distribute_tensor(big, mesh, [Shard(0)]) if mesh is not None else big
        rows = torch.arange(77 * 9, dtype=torch.float32).reshape(77, 9) + step
        model |= {f"r{i}": distribute_tensor(rows, mesh, [Shard(0)]) for i in range(SMALL) if mesh is not None}
    return {"model": model, "step": step}


def local(value: Any) -> torch.Tensor:
    return value.data if isinstance(value, ckptfs.FlatShard) else getattr(value, "to_local", lambda: value)()


def spoil(tree: Tree) -> Tree:
    for value in tree["model"].values():
        local(value).fill_(-1)
    return tree


def resumed(run: ckptfs.Run, mesh: object) -> int:
    """The newest step, loaded; exits loudly if it is not what was saved."""
    names = set(run.latest)
    tree = spoil(state(0, mesh, shared="model/big" not in names))
    tree["model"] = {
        name: value for name, value in tree["model"].items() if f"model/{name}" in names
    }  # one rank: no r0
    run.load(tree, strict=False)
    wanted = state(tree["step"], mesh, shared=False)["model"]
    for name, value in tree["model"].items():
        if not torch.equal(local(value), local(wanted[name])):
            print(f"WRONG DATA in {name} of step {tree['step']}", flush=True)
            os._exit(77)
    return int(tree["step"])


def save(run: ckptfs.Run, mode: str, tree: Tree) -> Any:
    """The result of a save, of which the tensors have changed as soon as they may."""
    if mode == "save":
        return run.save(tree["step"], tree)
    holds: list[Any] = []
    pending = run.save_async(tree["step"], tree, **({"before_update": holds.append} if mode == "lazy" else {}))
    for hold in holds:
        hold()
    spoil(tree)
    return pending.result()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("--saves", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=float, default=0.0, help="chance that a save gets a file system fault")
    parser.add_argument("--stops", action="store_true", help="ranks will be stopped for a while: saves may fail")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,)) if world > 1 else None
    draw = random.Random(args.seed)  # the same on every rank
    settings = ckptfs.Settings(
        enter_timeout_s=60,
        progress_timeout_s=60,
        silence_timeout_s=3 if args.stops else 30,
        **draw.choice([{}, {"handover_ranks": 2, "files_per_rank": 0}]),
    )
    ops = FaultOps(FaultPlan(), code=errno.EIO)
    run = ckptfs.Run(LocalStore(args.run, ops=ops), settings=settings)
    step = 0
    if run.steps():
        step = resumed(run, mesh)
    if rank == 0:
        print(f"READY at step {step}", flush=True)
    for _ in range(args.saves):
        faulty = draw.random() < args.faults
        victim, at = draw.randrange(world), draw.randrange(160)
        kind = draw.choice(["error-before", "error-after", "short"])
        code = draw.choice([errno.EIO, errno.ENOSPC])
        mode, shared = draw.choice(["save", "snapshot", "lazy"]), draw.random() < 0.4
        if faulty and rank == victim:
            ops.plan, ops.code = FaultPlan(kind, at=at), code
        try:
            result = save(run, mode, state(step + 1, mesh, shared=shared))
            came_to = f"others stood in: {result.lost}" if result.lost else ""
        except CkptError as error:
            came_to = f"{type(error).__name__}: {error}"
        if came_to and not (faulty or args.stops):
            print(f"UNEXPECTED on rank {rank} in a {mode}: {came_to}", flush=True)
            sys.exit(78)
        if came_to and rank == 0:
            cause = f"{kind} {errno.errorcode[code]}" if faulty else "stopped"
            print(f"FAULT {cause} in a {mode} → {came_to.partition(':')[0]}", flush=True)
        ops.plan = FaultPlan()
        dist.barrier()  # the step may have been published although the answer was lost
        step = run.steps()[-1] if run.steps() else 0
        if rank == 0:
            print(f"SAVED {step}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
