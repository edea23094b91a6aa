"""Jobs for test_dcp_torchrun.py, run by torchrun: `dcp_jobs.py <folder> <jobs>`; every rank prints `ok`."""

import itertools
import os
import sys
import warnings
import zlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import ckptfs
from ckptfs.adapters import dcp as adapter
from ckptfs.adapters.dcp import StorageReader, StorageWriter
from ckptfs.errors import ExistsError, MismatchError, StorageError
from ckptfs.storage import FileOps

SHAPES = [(), (0, 4), (1,), (3,), (7,), (8, 6), (5, 7), (13, 4, 3), (16, 12), (3, 2, 4, 5)]
SPREADS = [
    None,  # a plain tensor
    [Replicate()],
    [Shard(0)],
    [Shard(1)],
    [Shard(2)],
    [Replicate(), Shard(0)],
    [Shard(0), Replicate()],
    [Shard(0), Shard(1)],
    [Shard(1), Shard(0)],
    [Shard(0), Shard(0)],
    [_StridedShard(0, split_factor=2), Shard(0)],
]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn, torch.bool]


def full(name, shape, dtype):
    """The same values wherever they are asked for."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * 10
    return values > 0 if dtype == torch.bool else values.to(dtype)


def wanted():
    found = {}
    for number, (shape, which) in enumerate(itertools.product(SHAPES, range(len(SPREADS)))):
        found[f"s{'x'.join(map(str, shape))}p{which}"] = (shape, DTYPES[number % len(DTYPES)])
    return found


def spread_of(shape, which):
    spread = SPREADS[which % len(SPREADS)]
    if spread is None or any(not p.is_replicate() and p.dim >= len(shape) for p in spread):
        return None
    if isinstance(spread[0], _StridedShard) and shape[0] % 4:
        return None  # DCP itself takes a strided shard for one box, which it only is when everything divides
    return spread


def placed(make, rotate=0):
    """All arrays as one nested state dict, each in its own layout, or (`rotate`) in another one."""
    meshes = {1: init_device_mesh("cpu", (4,)), 2: init_device_mesh("cpu", (2, 2))}
    out = {}
    for name, (shape, dtype) in wanted().items():
        spread = spread_of(shape, int(name.rpartition("p")[2]) + rotate)
        value = make(name, shape, dtype)
        out[name] = (
            value if spread is None else distribute_tensor(value, meshes[len(spread)], spread, src_data_rank=None)
        )
    return {"model": out, "step": 17}


def zeros(_name, shape, dtype):
    return torch.zeros(shape, dtype=dtype)


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def check(tensors):
    for name, (shape, dtype) in wanted().items():
        got, want = tensors[name], full(name, shape, dtype)
        if isinstance(got, DTensor):
            want = distribute_tensor(want, got.device_mesh, got.placements, src_data_rank=None).to_local()
            got = got.to_local()
        assert got.shape == want.shape, name
        assert torch.equal(bits(got), bits(want)), name


def failure(call):
    try:
        call()
    except CheckpointException as error:
        return error.failures
    raise AssertionError("no CheckpointException")


def failure_of(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


# --- jobs ----------------------------------------------------------------------------------------------------------


def matrix(folder):
    """Each layout into each other, through DCP and across: DCP → Run.load, Run.save → DCP."""
    saved = placed(full)
    dcp.save(saved, storage_writer=StorageWriter(f"{folder}/run@1"))
    for rotate in range(len(SPREADS)):
        target = placed(zeros, rotate)
        dcp.load(target, storage_reader=StorageReader(f"{folder}/run@1"))
        check(target["model"])
        assert target["step"] == 17
    run = ckptfs.Run(f"{folder}/run")
    target = placed(zeros, 3)
    run.load(target, 1)
    check(target["model"])
    run.save(2, saved)
    target = placed(zeros, 5)
    dcp.load(target, storage_reader=StorageReader(f"{folder}/run@latest"))
    check(target["model"])
    dist.barrier()
    # the same with every tensor compressed
    dcp.save(saved, storage_writer=StorageWriter(f"{folder}/run@3", compression="zstd"))
    target = placed(zeros, 7)
    dcp.load(target, storage_reader=StorageReader(f"{folder}/run@3"))
    check(target["model"])


def planned(folder):
    """Plan caching: new values, a new writer and a new path every time; then a rank whose plan changes."""
    mesh = init_device_mesh("cpu", (4,))

    def state(step, extra):
        wide = torch.arange(96.0).reshape(8, 12) + step
        found = {"w": distribute_tensor(wide, mesh, [Shard(1)], src_data_rank=None), "plain": torch.full((5,), step)}
        if extra:
            found[f"own{dist.get_rank()}"] = torch.full((3,), float(dist.get_rank()))
        return found

    for step in range(1, 5):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        extra = step == 3 and dist.get_rank() == 2
        dcp.save(state(step, extra), storage_writer=StorageWriter(f"{folder}/run@{step}"), planner=planner)
        target = {
            "w": distribute_tensor(torch.zeros(8, 12), mesh, [Shard(0)], src_data_rank=None),
            "plain": torch.zeros(5).long(),
        }
        dcp.load(target, storage_reader=StorageReader(f"{folder}/run@{step}"))
        assert torch.equal(target["w"].full_tensor(), torch.arange(96.0).reshape(8, 12) + step)
        assert target["plain"].tolist() == [step] * 5
    checkpoint = ckptfs.open(f"{folder}/run@3")
    assert "own2" in checkpoint
    assert len({ckptfs.open(f"{folder}/run@{step}").manifest.save_id for step in range(1, 5)}) == 4
    # column shards lie in panels: what a rank wrote is one run of the file
    assert checkpoint["w"].param.layout.block == (8, 3)
    dist.barrier()


def some_ranks(folder):
    """A process group of some ranks saves for itself; so does a rank alone, with `no_dist`."""
    rank = dist.get_rank()
    group, mesh = dist.new_group([2, 3]), DeviceMesh("cpu", [2, 3])
    if rank in (2, 3):
        state = {"w": distribute_tensor(torch.arange(20.0).reshape(4, 5), mesh, [Shard(1)], src_data_rank=None), "n": 1}
        dcp.save(state, storage_writer=StorageWriter(f"{folder}/run@1"), process_group=group)
    dist.barrier()
    target = {"w": torch.zeros(4, 5), "n": 0}
    dcp.load(target, storage_reader=StorageReader(f"{folder}/run@1"))
    assert target["w"].tolist() == torch.arange(20.0).reshape(4, 5).tolist()
    dcp.save({"mine": torch.full((3,), rank)}, storage_writer=StorageWriter(f"{folder}/own{rank}"), no_dist=True)
    target = {"mine": torch.zeros(3).long()}
    dcp.load(target, storage_reader=StorageReader(f"{folder}/own{rank}"), no_dist=True)
    assert target["mine"].tolist() == [rank] * 3


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(12, 20), nn.Linear(20, 5)

    def forward(self, x):
        return self.two(self.one(x).relu())


def model_of(seed, mesh):
    torch.manual_seed(seed)
    model = Small()
    for layer in (model.one, model.two):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(4, 12)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def values_of(model, optimizer):
    states = get_state_dict(model, optimizer)
    flat = {}

    def walk(value, path):
        if isinstance(value, dict):
            for key, item in value.items():
                walk(item, (*path, key))
        else:
            flat[path] = value.full_tensor() if isinstance(value, DTensor) else value

    walk(dict(zip("mo", states, strict=True)), ())
    return flat


def same(one, two):
    assert one.keys() == two.keys()
    for key, value in one.items():
        assert torch.equal(value, two[key]) if isinstance(value, torch.Tensor) else value == two[key], key


def training(folder):
    """get_state_dict and set_state_dict of FSDP2 models, saved at once and in a thread; HSDP from FSDP; FSDP1."""
    flat, hybrid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "shard"))
    model, optimizer = model_of(1, flat)
    before = values_of(model, optimizer)
    weights, state = get_state_dict(model, optimizer)
    future = dcp.async_save({"model": weights, "optim": state}, storage_writer=StorageWriter(f"{folder}/run@1"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    future.result()
    other, its_optimizer = model_of(2, hybrid)
    weights, state = get_state_dict(other, its_optimizer)
    target = {"model": weights, "optim": state}
    dcp.load(target, storage_reader=StorageReader(f"{folder}/run@1"))
    set_state_dict(other, its_optimizer, model_state_dict=target["model"], optim_state_dict=target["optim"])
    same(values_of(other, its_optimizer), before)
    # FSDP1's ShardedTensor (loaded plain: DCP cannot load into one of which a rank holds nothing)
    torch.manual_seed(5)
    old = FullyShardedDataParallel(
        Small(), sharding_strategy=ShardingStrategy.FULL_SHARD, device_id=torch.device("cpu")
    )
    with FullyShardedDataParallel.state_dict_type(old, StateDictType.SHARDED_STATE_DICT):
        dcp.save({"model": old.state_dict()}, storage_writer=StorageWriter(f"{folder}/run@2"))
    target = {"model": {name: torch.zeros_like(value) for name, value in plain_weights(5).items()}}
    dcp.load(target, storage_reader=StorageReader(f"{folder}/run@2"))
    same(target["model"], dict(plain_weights(5)))


def plain_weights(seed):
    torch.manual_seed(seed)
    return Small().state_dict()


def process(folder):
    """async_save in a process: the writer and the planner are pickled, twice."""
    mesh = init_device_mesh("cpu", (4,))
    for step in (1, 2):
        state = {"w": distribute_tensor(torch.arange(40.0) * step, mesh, [Shard(0)], src_data_rank=None), "step": step}
        future = dcp.async_save(
            state,
            storage_writer=StorageWriter(f"{folder}/run@{step}"),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        future.result()
        assert ckptfs.open(f"{folder}/run@{step}")["w"][...].tolist() == (torch.arange(40.0) * step).tolist()
    refused = dcp.async_save(
        state,
        storage_writer=StorageWriter(f"{folder}/run@2", overwrite=False),
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )
    assert isinstance(failure(refused.result)[0][0], ExistsError)
    dist.barrier()


class FullDisk(FileOps):
    """A disk that is full for one rank: nothing can be reserved, nothing written."""

    def pwrite(self, fd, data, offset):
        raise OSError(28, "No space left on device")

    def write(self, fd, data):
        raise OSError(28, "No space left on device")


def failing(folder):
    """A rank that cannot write, a rank that cannot read: every rank hears of it, nothing is lost, nothing hangs."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (4,))

    def state(value):
        return {"w": distribute_tensor(torch.full((4000, 300), value), mesh, [Shard(0)], src_data_rank=None)}

    dcp.save(state(1.0), storage_writer=StorageWriter(f"{folder}/ck"))
    faulty = {"ops": FullDisk()} if rank == 2 else {}
    failures = failure(lambda: dcp.save(state(2.0), storage_writer=StorageWriter(f"{folder}/ck", **faulty)))
    assert isinstance(failures[2][0], StorageError), failures
    assert "space" in str(failures[2][0])
    dist.barrier()
    assert ckptfs.open(f"{folder}/ck")["w"][0, 0].item() == 1.0
    # an asynchronous save loses no error either
    future = dcp.async_save(state(2.0), storage_writer=StorageWriter(f"{folder}/ck", **faulty))
    assert 2 in failure(future.result)
    dist.barrier()
    assert ckptfs.open(f"{folder}/ck")["w"][0, 0].item() == 1.0

    # plain_errors makes of it what `except Exception` catches
    def save_plainly():
        with adapter.plain_errors():
            dcp.save(state(2.0), storage_writer=StorageWriter(f"{folder}/ck", **faulty))

    assert "space" in str(failure_of(StorageError, save_plainly))
    dist.barrier()
    # the next save works, and clears away what the others left
    dcp.save(state(3.0), storage_writer=StorageWriter(f"{folder}/ck"))
    assert ckptfs.open(f"{folder}/ck")["w"][3999, 299].item() == 3.0
    dist.barrier()
    assert os.listdir(folder) == ["ck"], os.listdir(folder)
    dist.barrier()
    # refused on every rank alike
    failures = failure(lambda: dcp.save(state(4.0), storage_writer=StorageWriter(f"{folder}/ck", overwrite=False)))
    assert isinstance(failures[0][0], ExistsError)
    failures = failure_of(
        MismatchError, lambda: dcp.save(state(4.0), storage_writer=StorageWriter(f"{folder}/x"), use_collectives=False)
    )
    # one rank cannot read the metadata: all raise, none waits
    target = state(0.0)
    path = f"{folder}/ck" if rank != 1 else f"{folder}/nothing"
    failures = failure(lambda: dcp.load(target, storage_reader=StorageReader(path)))
    assert list(failures) == [1]
    # one rank has another type: no silent cast anywhere
    other = {"w": target["w"].to(torch.float16)} if rank == 3 else target
    failures = failure(lambda: dcp.load(other, storage_reader=StorageReader(f"{folder}/ck")))
    assert isinstance(failures[3][0], MismatchError)
    dcp.load(other, storage_reader=StorageReader(f"{folder}/ck", cast=True))
    assert torch.all(other["w"].to_local() == 3.0)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    dist.init_process_group("cpu:gloo")
    jobs = {job.__name__: job for job in (matrix, planned, some_ranks, training, process, failing)}
    for name in sys.argv[2:]:
        jobs[name](f"{sys.argv[1]}/{name}")
        print(name, "done")
    dist.barrier()
    dist.destroy_process_group()
    print("ok")
