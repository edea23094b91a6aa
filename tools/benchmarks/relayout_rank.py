"""One rank of a job that saves, or loads, a model with its Adam state. Started under torchrun by relayout.py.

The model is 24 square linear layers without bias; a third of the bytes are parameters, two thirds are moments.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.machine import evict, files_of, measured, sync_tree
from benchmarks.model import fingerprint, size_of

LAYERS = 24
MOMENTS = ("exp_avg", "exp_avg_sq")


def model_of(size: str) -> nn.Sequential:
    width = max(64, round(math.sqrt(size_of(size) / 12 / LAYERS) / 64) * 64)
    torch.manual_seed(5)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))


class Fsdp:
    """fully_shard over the ranks; alone, the plain model. The base of those that load without a conversion."""

    def __init__(self, size: str) -> None:
        self.model: nn.Module = model_of(size)
        if dist.get_world_size() > 1:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for layer in self.model.children():
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def step(self) -> None:
        self.model(_input(self.model)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self, name: str, parameter: Any) -> list[torch.Tensor]:
        """The whole parameter and its moments."""
        found = [parameter.detach(), *(self.optimizer.state[parameter][moment] for moment in MOMENTS)]
        return [value.full_tensor() if hasattr(value, "full_tensor") else value for value in found]

    def save(self, folder: Path) -> None:
        raise NotImplementedError

    def load(self, folder: Path) -> None:
        raise NotImplementedError


class Ckptfs(Fsdp):
    def save(self, folder: Path) -> None:
        import ckptfs

        ckptfs.save(folder / "saved", ckptfs.state_of(self.model, self.optimizer))

    def load(self, folder: Path) -> None:
        import ckptfs

        tree = ckptfs.state_of(self.model, self.optimizer)
        ckptfs.load(folder / "saved", tree)
        ckptfs.restore(self.model, self.optimizer, tree)


class Dcp(Fsdp):
    def save(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optim": optimizer}, checkpoint_id=str(folder / "saved"))

    def load(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": model, "optim": optimizer}, checkpoint_id=str(folder / "saved"))
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)


class DeepSpeed:
    """ZeRO in fp32 with torch's Adam; what it loads is the universal checkpoint."""

    def __init__(self, size: str, stage: int, *, universal: bool) -> None:
        import deepspeed

        deepspeed.init_distributed("gloo")
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
            "checkpoint": {"load_universal": universal},
        }
        model = model_of(size)
        self.engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
        self.model = self.engine.module

    def step(self) -> None:
        self.engine.backward(self.engine(_input(self.model)).sum())
        self.engine.step()

    def values(self, name: str, parameter: Any) -> list[torch.Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        moments = (safe_get_full_optimizer_state(parameter, moment) for moment in MOMENTS)
        return [safe_get_full_fp32_param(parameter), *moments]

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(str(folder), tag="saved")

    def load(self, folder: Path) -> None:
        found, _ = self.engine.load_checkpoint(str(folder), tag="universal")
        if found is None:
            raise RuntimeError("DeepSpeed found nothing to load")


def _input(model: nn.Module) -> torch.Tensor:
    return torch.linspace(-1, 1, next(iter(model.children())).in_features).reshape(1, -1)  # type: ignore[arg-type]


def everything(trained: Any) -> str:
    """A digest of the whole model and its moments, the same in every layout."""
    values = (
        value.detach().float().contiguous().numpy()
        for name, parameter in trained.model.named_parameters()
        for value in trained.values(name, parameter)
    )
    return fingerprint(values)


def timed(action: Callable[[], None]) -> dict[str, float]:
    """The slowest rank's seconds, the largest memory, the sum of the traffic."""
    dist.barrier()
    error = ""
    with measured() as cost:
        try:
            action()
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (error, vars(cost)))
    if problems := [text for text, _ in found if text]:
        raise SystemExit("; ".join(problems))
    costs = [each for _, each in found]
    largest = {key: max(c[key] for c in costs) for key in ("seconds", "peak_memory_bytes")}
    return largest | {key: sum(c[key] for c in costs) for key in ("bytes_read", "bytes_written")}


def main() -> None:
    plan = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    for key, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        os.environ.setdefault(key, value)
    folder, saving = Path(plan["folder"]), plan["phase"] == "save"
    if int(os.environ["WORLD_SIZE"]) == 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    elif "DeepSpeed" not in plan["system"]:
        dist.init_process_group("gloo")
    trained: Any
    if "DeepSpeed" in plan["system"]:
        trained = DeepSpeed(plan["size"], int(plan["system"][-1]), universal=not saving)
    else:
        trained = {"ckptfs": Ckptfs, "DCP": Dcp}[plan["system"]](plan["size"])
    rank, costs = dist.get_rank(), []
    trained.step()
    nbytes = 12 * sum(getattr(p, "ds_numel", p.numel()) for p in trained.model.parameters())
    if saving and (digest := everything(trained)) and rank == 0:
        (folder / "digest").write_text(digest, encoding="ascii")
    for turn in range(plan["turns"]):
        step = folder / str(turn)
        if rank == 0:
            step.mkdir(exist_ok=True)
            if not saving:
                evict(step)
        dist.barrier()

        def save(step: Path = step) -> None:
            trained.save(step)
            dist.barrier()
            if rank == 0 and plan["system"] != "ckptfs":
                sync_tree(step)

        cost = timed(save if saving else lambda step=step: trained.load(step))
        costs.append(cost | {"bytes": nbytes} | ({"files": len(files_of(step / "saved"))} if saving else {}))
        if not saving and turn == 0 and everything(trained) != (folder / "digest").read_text(encoding="ascii"):
            raise SystemExit(f"{plan['system']}: what {dist.get_world_size()} ranks loaded is not what was saved")
    if rank == 0:
        Path(plan["answer"]).write_text(json.dumps(costs), encoding="utf-8")
    dist.barrier()
    # Without the interpreter's own end: Gloo's threads let go of the last collectives' tensors a little late, and that
    # aborts a process whose interpreter is already ending.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
