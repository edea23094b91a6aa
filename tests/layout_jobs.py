"""Jobs for test_layouts_torchrun.py, run by torchrun: `layout_jobs.py <job> <folder>`, every rank prints `ok`."""

import itertools
import sys
import zlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import ckptfs
from ckptfs.mesh import intervals
from ckptfs.verify import verify

SHAPES = [(), (0, 4), (1,), (3,), (7,), (64,), (8, 6), (5, 7), (13, 4, 3), (2, 9, 5), (16, 12), (3, 2, 4, 5)]
SHARDINGS_1D = [[Replicate()], [Shard(0)], [Shard(1)], [Shard(2)]]
SHARDINGS_2D = [
    [Replicate(), Shard(0)],
    [Shard(0), Replicate()],
    [Shard(0), Shard(1)],
    [Shard(1), Shard(0)],
    [Shard(0), Shard(0)],
    [Replicate(), Replicate()],
]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex128, torch.float8_e4m3fn, torch.float16]


def full(name, shape, dtype):
    """The same values wherever they are asked for."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * 10
    return values > 0 if dtype == torch.bool else values.to(dtype)


def wanted():
    """name → (shape, dtype) of every array that the placement jobs share."""
    found = {}
    for number, (shape, which) in enumerate(itertools.product(SHAPES, range(len(SHARDINGS_1D) + len(SHARDINGS_2D)))):
        found[f"s{'x'.join(map(str, shape))}p{which}"] = (shape, DTYPES[number % len(DTYPES)])
    return found


def placed(tensors, rotate=0):
    """Each as a DTensor: of its placement, or (`rotate`) of another one."""
    world = dist.get_world_size()
    meshes = {1: init_device_mesh("cpu", (world,)), 2: init_device_mesh("cpu", (2, world // 2))}
    out = {}
    for name, tensor in tensors.items():
        options = SHARDINGS_1D + SHARDINGS_2D
        placements = options[(int(name.rpartition("p")[2]) + rotate) % len(options)]
        if any(isinstance(p, Shard) and p.dim >= tensor.ndim for p in placements):
            placements = [Replicate()]
        out[name] = distribute_tensor(tensor, meshes[len(placements)], placements, src_data_rank=None)
    return out


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def check(got, want, name):
    got = got.full_tensor() if isinstance(got, DTensor) else got
    assert got.dtype == want.dtype, name
    assert got.shape == want.shape, name
    assert torch.equal(bits(got), bits(want)), name


def check_placed(loaded):
    for name, (shape, dtype) in wanted().items():
        want = distribute_tensor(
            full(name, shape, dtype), loaded[name].device_mesh, loaded[name].placements, src_data_rank=None
        ).to_local()
        assert torch.equal(bits(loaded[name].to_local()), bits(want)), name


def zeros():
    return {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in wanted().items()}


def save_placements(folder):
    tree = placed({name: full(name, shape, dtype) for name, (shape, dtype) in wanted().items()})
    with ckptfs.Run(f"{folder}/placements") as run:
        run.save(1, tree)
        run.save(2, tree, compression="zstd")
    load_placements(folder)


def load_placements(folder):
    with ckptfs.Run(f"{folder}/placements") as run:
        for step, rotate in ((1, 0), (1, 3), (2, 5)):
            tree = placed(zeros(), rotate)
            run.load(tree, step=step)
            check_placed(tree)


def strided(folder):
    """What torch puts into local tensors of uneven _StridedShard is what `intervals` says, and comes back."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tree, wants = {}, {}
    for length, factor in itertools.product([1, 2, 3, 4, 5, 7, 8, 11, 13, 16, 24], [2, 3, 4]):
        tensor = torch.arange(length * 3, dtype=torch.float32).reshape(length, 3)
        for number, placements in enumerate(
            [[_StridedShard(0, split_factor=factor), Shard(0)], [_StridedShard(0, split_factor=factor), Replicate()]]
        ):
            local = tensor
            for axis, placement in enumerate(placements):
                if not placement.is_replicate():
                    parts, _ = placement._split_tensor(local, 2, with_padding=False, contiguous=True)
                    local = parts[mesh.get_local_rank(axis)]
            name = f"l{length}f{factor}p{number}"
            tree[name] = DTensor.from_local(
                local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
            )
            wants[name] = tensor
            splits = tuple(
                (2, mesh.get_local_rank(axis), getattr(p, "split_factor", 1))
                for axis, p in enumerate(placements)
                if not p.is_replicate()
            )
            rows = [i for a, b in intervals(length, splits) for i in range(a, b)]
            assert local[:, 0].tolist() == [3.0 * i for i in rows], (name, local[:, 0].tolist(), rows)
    with ckptfs.Run(f"{folder}/strided") as run:
        run.save(1, tree)
        back = run[1].tree()
        for name, want in wants.items():
            check(back[name], want, name)
        want_locals = {name: value.to_local().clone() for name, value in tree.items()}
        for value in tree.values():
            value.to_local().zero_()
        run.load(tree)
        for name, want in want_locals.items():
            assert torch.equal(tree[name].to_local(), want), name


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Odd sizes, a tied head."""

    def __init__(self, width=10, hidden=23):
        super().__init__()
        self.embed = nn.Embedding(31, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(2))
        self.head = nn.Linear(width, 31, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model(seed=1):
    torch.manual_seed(seed)
    return Model()


def trained(made, steps=2, optimizer=None):
    optimizer = optimizer or torch.optim.AdamW(made.parameters(), lr=1e-2)
    for step in range(steps):
        torch.manual_seed(100 + step + dist.get_rank())
        made(torch.randint(0, 31, (4, 6))).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def sharded(kind):
    world = dist.get_world_size()
    made = model()
    if kind == "fsdp2":
        for block in made.blocks:
            fully_shard(block, mesh=init_device_mesh("cpu", (world,)))
        fully_shard(made, mesh=init_device_mesh("cpu", (world,)))
        return made
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("outer", "inner"))
    if kind == "hsdp":
        for block in made.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(made, mesh=mesh)
        return made
    for block in made.blocks:
        parallelize_module(block, mesh["inner"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["outer"])
    return made  # fsdp2 x tp; embedding and head stay plain


def save_models(folder):
    for kind in ("fsdp2", "hsdp", "fsdp_tp"):
        made = sharded(kind)
        if kind != "fsdp_tp":  # the mix of plain and sharded parameters does not train here without more wrapping
            trained(made)
        state = made.state_dict()
        fulls = {n: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for n, t in state.items()}
        with ckptfs.Run(f"{folder}/{kind}") as run:
            run.save(5, {"model": state})
            ck = run[5]
            for name, want in fulls.items():
                check(ck[f"model/{name}"][...], want, name)
            assert dict(ck.manifest.aliases) == {"model/head.weight": "model/embed.weight"}, ck.manifest.aliases
            assert verify(ck) == []
        if dist.get_rank() == 0:
            torch.save(fulls, f"{folder}/{kind}.pt")
    dist.barrier()
    load_models(folder)


def load_models(folder):
    """Every layout into every other, and into a plain model."""
    for saved, into in itertools.product(("fsdp2", "hsdp", "fsdp_tp"), ("fsdp2", "hsdp", "fsdp_tp", "plain")):
        fulls = torch.load(f"{folder}/{saved}.pt", weights_only=True)
        made = model(seed=9) if into == "plain" else sharded(into)
        with ckptfs.Run(f"{folder}/{saved}") as run:
            run.load({"model": made.state_dict()})
        for name, value in made.state_dict().items():
            check(value, fulls[name], f"{saved} into {into}: {name}")
        assert made.head.weight is made.embed.weight


OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, nesterov=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
}


def state_in_full(made, optimizer):
    """Model, state and settings of the optimizer by parameter names, every tensor whole."""
    options = StateDictOptions(full_state_dict=True)
    found = {"model": get_model_state_dict(made, options=options)}
    found["optim"] = get_optimizer_state_dict(made, optimizer, options=options)
    return found


def save_optimizers(folder):
    for name, optimizer_for in OPTIMIZERS.items():
        made = sharded("fsdp2")
        optimizer = optimizer_for(made.parameters())
        trained(made, optimizer=optimizer)
        ckptfs.save(f"{folder}/{name}", ckptfs.state_of(made, optimizer))
        fulls = state_in_full(made, optimizer)
        if dist.get_rank() == 0:
            torch.save(fulls, f"{folder}/{name}.pt")
    dist.barrier()
    load_optimizers(folder, lambda: sharded("hsdp"))


def load_optimizers(folder, make):
    """What FSDP2 over four ranks saved goes on in this layout."""
    for name, optimizer_for in OPTIMIZERS.items():
        made = make()
        optimizer = optimizer_for(made.parameters())
        tree = ckptfs.state_of(made, optimizer)
        ckptfs.load(f"{folder}/{name}", tree)
        ckptfs.restore(made, optimizer, tree)
        want, got = torch.load(f"{folder}/{name}.pt", weights_only=True), state_in_full(made, optimizer)
        for key, value in want["model"].items():
            check(got["model"][key], value, f"{name}: {key}")
        assert got["optim"]["param_groups"] == want["optim"]["param_groups"], name
        assert got["optim"]["state"].keys() == want["optim"]["state"].keys(), name
        for key, values in want["optim"]["state"].items():
            assert values.keys() == got["optim"]["state"][key].keys(), (name, key)
            assert any(value.count_nonzero() for value in values.values()), (name, key)
            for part, value in values.items():
                check(got["optim"]["state"][key][part], value, f"{name}: {part} of {key}")


def fsdp1(folder):
    """FullyShardedDataParallel: its ShardedTensors, and the flat shards of use_orig_params."""
    made = FullyShardedDataParallel(
        model(),
        use_orig_params=True,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        device_id=torch.device("cpu"),
    )
    trained(made)
    with FullyShardedDataParallel.state_dict_type(made, StateDictType.FULL_STATE_DICT):
        fulls = {name: value.clone() for name, value in made.state_dict().items()}
    with (
        FullyShardedDataParallel.state_dict_type(made, StateDictType.SHARDED_STATE_DICT),
        ckptfs.Run(f"{folder}/fsdp1") as run,
    ):
        state = made.state_dict()
        run.save(1, {"model": state})
        back = run[1].tree()["model"]
        for name, want in fulls.items():
            check(back[name], want, name)
        other = made.state_dict()
        for value in other.values():
            for shard in value.local_shards() if hasattr(value, "local_shards") else []:
                shard.tensor.detach().zero_()
        run.load({"model": other})
        made.load_state_dict(other)
    with FullyShardedDataParallel.state_dict_type(made, StateDictType.FULL_STATE_DICT):
        again = made.state_dict()
    for name, want in fulls.items():
        check(again[name], want, name)
    flat_shards(folder)


def flat_shards(folder):
    """Each rank has a run of the row-major elements, as ZeRO and use_orig_params make them; some ranks have none."""
    rank, world = dist.get_rank(), dist.get_world_size()
    tree, wants = {}, {}
    for number, shape in enumerate([(7, 5), (3,), (4, 4, 4), (1, 1)]):
        want = full(f"flat{number}", shape, torch.float32)
        size = -(-want.numel() // world)
        start = min(rank * size, want.numel())
        part = want.reshape(-1)[start : start + size].clone()
        tree[f"w{number}"] = ckptfs.FlatShard(part, shape, start)
        wants[f"w{number}"] = want
    with ckptfs.Run(f"{folder}/flat") as run:
        run.save(1, tree)
        back = run[1].tree()
        for name, want in wants.items():
            check(back[name], want, name)
        parts = {name: shard.data.clone() for name, shard in tree.items()}
        for shard in tree.values():
            shard.data.zero_()
        run.load(tree)
        for name, part in parts.items():
            assert torch.equal(tree[name].data, part), name


def odd_ones(folder):
    """Views, PerRank, values that differ by rank, Partial, ranks with arrays of their own."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    base = full("views", (12, 10), torch.float32)
    tree = {
        "transposed": base.t(),
        "every_other": base[::2, 1::3],
        "expanded": base[:1].expand(4, 10),
        "conj": torch.view_as_complex(base.reshape(12, 5, 2)).conj(),
        "parameter": nn.Parameter(base[3:5]),
        "mine": ckptfs.PerRank(torch.full((3,), float(rank))),
        "seed": ckptfs.PerRank(1000 + rank),
        "sharded_transposed": DTensor.from_local(
            torch.arange(6.0).reshape(2, 3).t() + rank, mesh, [Shard(0)], run_check=False
        ),
    }
    if rank == 1:
        tree["only_one_rank"] = torch.arange(5)
    with ckptfs.Run(f"{folder}/odd") as run:
        run.save(1, tree)
        with run[1] as ck:
            back = ck.tree(rank=rank)
            for name in ("transposed", "every_other", "expanded", "parameter"):
                check(back[name], tree[name].detach(), name)
            check(back["conj"], tree["conj"].resolve_conj(), "conj")
            assert isinstance(back["parameter"], nn.Parameter)
            assert back["seed"] == 1000 + rank
            assert back["mine"].tolist() == [float(rank)] * 3
            check(back["only_one_rank"], torch.arange(5), "only_one_rank")
            check(back["sharded_transposed"], tree["sharded_transposed"].full_tensor(), "sharded_transposed")
            assert verify(ck) == []
        into = {"transposed": torch.zeros(12, 10).t(), "every_other": torch.zeros(20, 20)[::4, ::7][:5, :3]}
        into = {"transposed": torch.zeros(12, 10).t(), "every_other": torch.zeros(12, 9)[::2, ::3]}
        run.load(into, only=["transposed", "every_other"])
        check(into["transposed"], tree["transposed"], "transposed")
        check(into["every_other"], tree["every_other"], "every_other")
        refuse(run, {"p": DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)}, "redistribute", "'p'")
        refuse(run, {"m": torch.ones(3, device="meta")}, "materialise", "'m'")
        refuse(run, {"s": torch.eye(3).to_sparse()}, "to_dense", "'s'")
        refuse(run, {"d": torch.full((2,), float(rank))}, "PerRank", "'d'")
        refuse(run, {"n": torch.ones(2 + rank)}, "PerRank", "'n'")
        run.save(3, tree)
        assert run.steps() == [1, 3]


def refuse(run, tree, *words):
    with pytest.raises(ckptfs.CkptError) as caught:
        run.save(2, tree)
    for word in words:
        assert word in str(caught.value)
    assert 2 not in run.steps()


def world_of_2(folder):
    load_placements(folder)
    for saved in ("fsdp2", "hsdp", "fsdp_tp"):
        fulls = torch.load(f"{folder}/{saved}.pt", weights_only=True)
        made = model(seed=9)
        fully_shard(made, mesh=init_device_mesh("cpu", (2,)))
        with ckptfs.Run(f"{folder}/{saved}") as run:
            run.load({"model": made.state_dict()})
        for name, value in made.state_dict().items():
            check(value, fulls[name], name)
    load_optimizers(folder, lambda: fully_shard(model(seed=9), mesh=init_device_mesh("cpu", (2,))))
    with ckptfs.Run(f"{folder}/odd") as run:
        tree = {"mine": ckptfs.PerRank(torch.zeros(3)), "only_one_rank": torch.zeros(5, dtype=torch.int64)}
        run.load(tree, strict=False)
        assert tree["mine"].value.tolist() == [float(dist.get_rank())] * 3
        assert tree["only_one_rank"].tolist() == list(range(5))


JOBS = {
    "four": [save_placements, strided, save_models, save_optimizers, fsdp1, odd_ones],
    "two": [world_of_2],
}

if __name__ == "__main__":
    dist.init_process_group("gloo")
    for job in JOBS[sys.argv[1]] if sys.argv[1] in JOBS else [globals()[sys.argv[1]]]:
        job(sys.argv[2])
        print(job.__name__, "ok", flush=True)
    dist.barrier()
    dist.destroy_process_group()
