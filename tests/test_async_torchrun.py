"""Lazy saves under sharded training in real processes: nothing that FSDP shards is copied at the call, and all is right."""

import pytest

import ckptfs

pytest.importorskip("torch")

PROGRAM = """
import sys
import torch
import torch.distributed as dist
import ckptfs
from ckptfs.asyncsave import owned_by
from ckptfs.training import state_of
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(37, 64), torch.nn.ReLU(), torch.nn.Linear(64, 11))
mesh = init_device_mesh("cpu", (size,))
for layer in (model[0], model[2]):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
run = ckptfs.Run(sys.argv[1], keep_last=3)


def batch():
    model(torch.randn(4, 37)).square().mean().backward()


def state():
    return {"model": model.state_dict(), "optim": optimizer.state_dict()}


def locals_of(tree):
    if isinstance(tree, dict):
        return [one for value in tree.values() for one in locals_of(value)]
    if torch.is_tensor(tree):
        return [getattr(tree, "_local_tensor", tree).detach().clone()]
    return []


batch()
optimizer.step()
addresses = owned_by([optimizer])
saves = []
for step in range(8):
    tree = state()
    live = [t for t in [*tree["model"].values()] if hasattr(t, "_local_tensor") and t._local_tensor.numel()]
    assert live and all(t._local_tensor.untyped_storage().data_ptr() in addresses for t in live), "copied at the call"
    expected = locals_of(tree)
    save = run.save_async(step, tree, before_update=optimizer)
    for _ in range(1 + step % 3):  # gradient accumulation
        batch()
    optimizer.step()
    optimizer.zero_grad()
    if step % 2:
        save.wait()
        target = state()
        run.load(target, step)
        assert all(torch.equal(a, b) for a, b in zip(locals_of(target), expected, strict=True)), step
        optimizer.load_state_dict(target["optim"])
    saves.append(save)
assert max(s.result().total_s for s in saves) < 60
run.close()
dist.barrier()
assert len(ckptfs.Run(sys.argv[1]).steps()) == 3
dist.destroy_process_group()
"""


def test_fsdp_trains_on_while_it_is_saved(torchrun, tmp_path):
    torchrun(2, PROGRAM, tmp_path / "run", timeout_s=250)
    assert ckptfs.Run(tmp_path / "run").steps() == [5, 6, 7]


LAST = """
import os, signal, sys
import torch
import torch.distributed as dist
import ckptfs

dist.init_process_group("gloo")
rank = dist.get_rank()
run = ckptfs.Run(sys.argv[1])
stop = ckptfs.install_signal_handler(run, grace_s=60)
x = torch.zeros(1000)
for step in range(1000):
    if rank == 1 and step == 7:
        os.kill(os.getpid(), signal.SIGTERM)
    grad = torch.ones(1000)
    dist.all_reduce(grad)
    x += grad
    if stop.requested(step):
        run.save(step, {"x": x})
        break
stop.uninstall()
dist.monitored_barrier()  # Gloo's threads let go of tensors meanwhile: later they abort the process
dist.destroy_process_group()
"""


def test_preemption_of_one_rank_is_a_last_save_of_all(torchrun, tmp_path):
    torchrun(2, LAST, tmp_path / "run", timeout_s=250)
    run = ckptfs.Run(tmp_path / "run")
    (step,) = run.steps()
    assert step in (7, 8)
    assert run.latest["x"].numpy().tolist() == [2.0 * (step + 1)] * 1000
