"""Hand-over between real processes: DTensors and flat shards, and ranks that stop or die while others fetch from them."""

import json
import os

import pytest

import ckptfs

pytest.importorskip("torch")

PRELUDE = """
import json, os, signal, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
import ckptfs
from ckptfs.storage import LocalStore
from failing_ranks import AtWrite, begin, caught, die, gathered, stop
from spreads import NoSync

rank, size, folder, pids = begin()
SETTINGS = ckptfs.Settings(
    io_bytes=65536, extent_bytes=16384, enter_timeout_s=20.0, progress_timeout_s=20.0, silence_timeout_s=5.0,
    small_file_bytes=1024, buffer_bytes=1, async_buffer_bytes=1, handover_ranks=2, files_per_rank=0,
)
mesh = init_device_mesh("cpu", (size,))


def full(step):
    made = torch.Generator().manual_seed(step)
    return {f"w{i}": torch.randn(101 + 40 * i, 64, generator=made).to(torch.bfloat16 if i % 2 else torch.float32) for i in range(12)}


def tree(step):
    # Sharded by rows, and flat ranges that begin in the middle of rows.
    found = {}
    for name, tensor in full(step).items():
        found[name] = distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)
        part = -(-tensor.numel() // size)
        piece = tensor.reshape(-1)[rank * part : (rank + 1) * part].clone()
        found["flat." + name] = ckptfs.FlatShard(piece, tuple(tensor.shape), rank * part)
    return found


def spoil(tree):
    for value in tree.values():
        local = value.data if isinstance(value, ckptfs.FlatShard) else value.to_local()
        local.fill_(-1)


def save(step, mode="save", ops=None, **how):
    run = ckptfs.Run(LocalStore(folder, ops=ops or NoSync()), settings=SETTINGS)
    value = tree(step)
    if mode == "save":
        run.save(step, value, **how)
    else:
        pending = run.save_async(step, value, **how, **({"before_update": [lambda hold: holds.append(hold)]} if mode == "lazy" else {}))
        while holds:
            holds.pop()()
        spoil(value)
        pending.wait()


holds = []


def sound(step):
    run = ckptfs.Run(folder)
    assert run.verify(step) == []
    with run[step] as checkpoint:
        for name, tensor in full(step).items():
            assert torch.equal(checkpoint[name].torch(), tensor), name
            assert torch.equal(checkpoint["flat." + name].torch(), tensor), name
"""

MODES = (
    PRELUDE
    + """
for step, (mode, how) in enumerate([(m, h) for m in ("save", "snapshot", "lazy") for h in ({}, {"compression": "zstd"})]):
    save(step, mode, **how)
    if rank == 0:
        sound(step)
    dist.barrier()


def stopped(victim, step, mode):
    try:
        return save(step, mode, AtWrite(stop, at=4) if rank == victim else None)
    finally:
        if rank == 0:
            os.kill(pids[victim], signal.SIGCONT)


for step, mode in ((10, "save"), (12, "snapshot"), (14, "lazy")):
    found = gathered(caught(lambda: stopped(2, step, mode)))
    if rank == 0:
        print("FOUND", json.dumps([mode, found]), flush=True)
    dist.barrier()
    save(step + 1)
    if rank == 0:
        sound(step + 1)
    dist.barrier()
dist.destroy_process_group()
"""
)


def test_real_ranks_hand_over_in_every_mode_and_name_one_that_is_stopped(torchrun, tmp_path):
    job = torchrun(4, MODES, tmp_path / "run", timeout_s=250)
    found = dict(json.loads(line[6:]) for line in job.by_rank[0].splitlines() if line.startswith("FOUND "))
    assert found.keys() == {"save", "snapshot", "lazy"}
    for mode, errors in found.items():
        assert None not in errors, f"{mode}: a rank did not notice: {errors}"
        assert all(error["ranks"] == [2] for error in errors), f"{mode}: {errors}"
        assert len({error["text"] for error in errors}) == 1, f"{mode}: not the same everywhere: {errors}"
        assert max(error["took_s"] for rank, error in enumerate(errors) if rank != 2) < 50, f"{mode}: {errors}"
    assert ckptfs.Run(tmp_path / "run").steps() == [0, 1, 2, 3, 4, 5, 11, 13, 15]


DYING = (
    PRELUDE
    + """
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from the launcher, when it sees that a rank is gone
victim = int(sys.argv[2])
save(1)
error = caught(lambda: save(2, "save", AtWrite(die, at=4) if rank == victim else None))
with open(f"{folder}-rank{rank}.json", "w") as file:
    json.dump([error, ckptfs.Run(folder).steps()], file)
os._exit(1)
"""
)


@pytest.mark.parametrize("victim", [3, 0])
def test_a_rank_that_is_killed_in_a_hand_over_is_named(torchrun, tmp_path, victim):
    folder = tmp_path / "run"
    job = torchrun(4, DYING, folder, str(victim), timeout_s=150, check=False)
    for rank in {0, 1, 2, 3} - {victim}:
        path = f"{folder}-rank{rank}.json"
        if not os.path.exists(path):
            pytest.fail(job.tail())
        with open(path) as file:
            error, steps = json.load(file)
        assert error["ranks"] == [victim], error
        assert error["took_s"] < 50
        assert steps == [1]
    torchrun(
        3,
        PRELUDE + "save(5)\nif rank == 0:\n    sound(1)\n    sound(5)\ndist.barrier()\ndist.destroy_process_group()",
        folder,
    )
    assert ckptfs.Run(folder).steps() == [1, 5]
    assert [name for name in os.listdir(folder) if name.endswith("ing")] == []


FRAMEWORKS = """
import os, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
import ckptfs
from ckptfs import handover
from layout_jobs import Model, bits, full, trained

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
folder, url, options = sys.argv[1], sys.argv[2], dict(part.split("=", 1) for part in sys.argv[3].split(","))
SETTINGS = ckptfs.Settings(
    chunk_bytes=4096, block_bytes=16384, extent_bytes=4096, io_bytes=8192, handover_ranks=2, files_per_rank=0
)
SHAPES = {"odd": ((101, 67), torch.float32), "few": ((3, 900), torch.bfloat16), "three": ((13, 7, 31), torch.float64)}


def grid():
    "Rows and columns over a 2-D mesh, one dimension over both, and rows over one axis only."
    line, square = init_device_mesh("cpu", (size,)), init_device_mesh("cpu", (2, size // 2))
    made = {}
    for name, (shape, dtype) in SHAPES.items():
        want = full(name, shape, dtype)
        for mesh, places in [
            (line, [Shard(0)]), (line, [Shard(1)]), (square, [Shard(0), Shard(1)]), (square, [Shard(1), Shard(1)]),
            (square, [Replicate(), Shard(0)]),
        ]:
            made[f"{name}-{len(made)}"] = distribute_tensor(want, mesh, places, src_data_rank=None)
    return made


def fsdp_tp():
    torch.manual_seed(3)
    made, mesh = Model(50, 131), init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("outer", "inner"))
    for block in made.blocks:
        parallelize_module(block, mesh["inner"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["outer"])
    return made.state_dict()


def flattened(made):
    "This rank's part of the flat parameters as FSDP1 keeps them: of each original one a run that begins anywhere."
    found = {}
    for unit in FSDP.fsdp_modules(made):
        flat = unit._handle.flat_param
        for name, shape, info in zip(flat._fqns, flat._shapes, flat._shard_param_infos, strict=True):
            begin, count = (info.offset_in_shard, info.numel_in_shard) if info.in_shard else (0, 0)
            part = flat.detach().reshape(-1)[begin : begin + count].clone()
            found[name] = ckptfs.FlatShard(part, tuple(shape), info.intra_param_start_idx or 0)
    return found
"""

FRAMEWORKS_SAVE = (
    FRAMEWORKS
    + """
fetched, call = [0], handover.Fetcher.__call__


def counting(self, wanted):
    fetched[0] += sum(one.stop - one.start for one in wanted)
    return call(self, wanted)


handover.Fetcher.__call__ = counting
torch.manual_seed(4)
old = FSDP(Model(50, 131), use_orig_params=True, device_id=torch.device("cpu"))
trained(old)
with FSDP.state_dict_type(old, StateDictType.FULL_STATE_DICT):
    fulls = {f"fsdp1/{name}": value.clone() for name, value in old.state_dict().items()}
with FSDP.state_dict_type(old, StateDictType.SHARDED_STATE_DICT):
    tree = {"grid": grid(), "fsdp_tp": fsdp_tp(), "fsdp1": old.state_dict(), "flat": flattened(old)}
assert any(0 < value.start and value.start % value.shape[-1] for value in tree["flat"].values()) or rank == 0
for name in tree["flat"]:
    fulls[f"flat/{name}"] = fulls[f"fsdp1/{name}"]
for part in ("grid", "fsdp_tp"):
    for name, value in tree[part].items():
        fulls[f"{part}/{name}"] = (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
for run, how in ((ckptfs.Run(url, settings=SETTINGS, **options), {}),
                 (ckptfs.Run(f"{folder}/local", settings=SETTINGS), {"compression": "zstd"})):
    fetched[0] = 0
    run.save(1, tree, **how)
    everybody = [None] * size
    dist.all_gather_object(everybody, fetched[0])
    assert sum(everybody) > 0, "nothing was handed over"
if rank == 0:
    torch.save(fulls, f"{folder}/fulls.pt")
dist.barrier()
dist.destroy_process_group()
"""
)

FRAMEWORKS_LOAD = (
    FRAMEWORKS
    + """
fulls = torch.load(f"{folder}/fulls.pt", weights_only=True)
for run in ckptfs.Run(url, **options), ckptfs.Run(f"{folder}/local"):
    mesh, tree, parts = init_device_mesh("cpu", (size,)), {"grid": {}, "flat": {}}, {}
    for name, want in fulls.items():
        kind, _, rest = name.partition("/")
        if kind == "grid":
            tree[kind][rest] = distribute_tensor(torch.zeros_like(want), mesh, [Shard(0)], src_data_rank=None)
            parts[name] = distribute_tensor(want, mesh, [Shard(0)], src_data_rank=None).to_local()
        elif kind == "flat":
            begin = rank * (want.numel() // size)
            parts[name] = want.reshape(-1)[begin : None if rank == size - 1 else begin + want.numel() // size]
            tree[kind][rest] = ckptfs.FlatShard(torch.zeros_like(parts[name]), tuple(want.shape), begin)
    run.load(tree, strict=False)
    for name, part in parts.items():
        kind, _, rest = name.partition("/")
        got = tree[kind][rest]
        got = got.data if isinstance(got, ckptfs.FlatShard) else got.to_local()
        assert torch.equal(bits(got), bits(part)), name
dist.barrier()
dist.destroy_process_group()
"""
)


def test_what_torch_spreads_goes_to_s3_and_compressed_and_comes_back(torchrun, tmp_path, s3_server):
    """DTensors that do not divide by their mesh, FSDP x TP, FSDP1's tensors and flat parameters; read by one and two."""
    import torch

    from layout_jobs import bits

    url = f"{s3_server.fresh_url()}/run"
    options = ",".join(f"{name}={value}" for name, value in s3_server.options.items())
    torchrun(4, FRAMEWORKS_SAVE, tmp_path, url, options, timeout_s=250)
    torchrun(2, FRAMEWORKS_LOAD, tmp_path, url, options, timeout_s=150)
    fulls = torch.load(tmp_path / "fulls.pt", weights_only=True)
    for run in ckptfs.Run(url, **s3_server.options), ckptfs.Run(tmp_path / "local"):
        assert run.verify(1) == []
        with run[1] as checkpoint:
            for name, want in fulls.items():
                got = checkpoint[name].torch()
                assert got.dtype == want.dtype, name
                assert got.shape == want.shape, name
                assert torch.equal(bits(got), bits(want)), name
