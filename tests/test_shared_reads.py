"""shared_reads: bytes that several ranks need are read once, whatever the layout, and damage is everybody's error."""

import itertools
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptfs
from ckptfs import dtypes
from ckptfs.box import Box
from ckptfs.errors import MismatchError
from ckptfs.grid import Layout
from ckptfs.manifest import Manifest, Param, run_lengths
from ckptfs.read import Target
from ckptfs.shared_reads import deal, needs_of, rounds_of

JOB = """
import json, sys
import torch, torch.distributed as dist, ckptfs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, zeros
from ckptfs.errors import CkptError
from ckptfs.read import Reader
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
url, compressed, damaged = sys.argv[1:]
answers = []
mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replica", "shard"))
names = [f"l{i}" for i in range(4)]
full = lambda i: (torch.arange(1000 * 300) * (i + 1) % 251).float().reshape(1000, 300)

def target():
    tree = {"plain": torch.zeros(700, 500), "vector": torch.zeros(13)}
    for i, name in enumerate(names):
        tree[name] = zeros(1000, 300, device_mesh=mesh, placements=[Replicate(), Shard(i % 2)])
    return tree

def check(tree):
    assert torch.equal(tree["plain"], torch.arange(350000).float().reshape(700, 500))
    assert torch.equal(tree["vector"], torch.arange(13).float())
    for i, name in enumerate(names):
        assert torch.equal(tree[name].full_tensor(), full(i)), name

for where, how in ((url, True), (compressed, dist.group.WORLD)):
    ck = ckptfs.open(where)
    tree = target()
    ck.load(tree, rank=rank, shared_reads=how)
    check(tree)
    answers.append(ck.bytes_read)
alone = ckptfs.open(url)
tree = target()
alone.load(tree, rank=rank)
check(tree)
counts = {"shared": answers, "alone": alone.bytes_read, "errors": []}

# A module with DTensor parameters: alone each rank reads its own shard, together each byte once.
net = torch.nn.Module()
for name, value in target().items():
    net.register_parameter(name, torch.nn.Parameter(value))
for how in (False, True):
    with torch.no_grad():
        for value in net.parameters():
            value.zero_()
    ck = ckptfs.open(url)
    assert ck.load(net, shared_reads=how, rank=rank) is net
    check(dict(net.named_parameters()))
    counts["module shared" if how else "module"] = ck.bytes_read

# One rank's mismatch, and a damaged file that one rank reads: an error on every rank, and nobody hangs.
wrong = target()
if rank == 1:
    wrong["plain"] = torch.zeros(7, 5)
for tree, where in ((wrong, url), (target(), damaged)):
    try:
        ckptfs.open(where).load(tree, rank=rank, shared_reads=True)
    except CkptError as error:
        counts["errors"].append(f"{type(error).__name__}: {error}"[:300])

# What is no error of ckptfs, on one rank: the others wait for its bytes and hear of it.
class Full(Reader):
    def fetch(self, *wanted):
        raise MemoryError("no room")

ck = ckptfs.open(url)
if rank == 1:
    ck._reader.__class__ = Full
try:
    ck.load(target(), rank=rank, shared_reads=True)
except CkptError as error:
    counts["errors"].append(f"{type(error).__name__}: {error}"[:300])
run = ckptfs.Run(url.rpartition("/")[0])
tree = target()
run.load(tree, shared_reads=True)
check(tree)
print(json.dumps(counts))
dist.barrier()
dist.destroy_process_group()
"""


def state():
    full = [(torch.arange(1000 * 300) * (i + 1) % 251).float().reshape(1000, 300) for i in range(4)]
    plain = torch.arange(350000).float().reshape(700, 500)
    return {"plain": plain, "vector": torch.arange(13).float()} | {f"l{i}": t for i, t in enumerate(full)}


def test_every_byte_leaves_storage_once(tmp_path, torchrun):
    small = ckptfs.Settings(extent_bytes=64 << 10, chunk_bytes=128 << 10)
    runs = [ckptfs.Run(tmp_path / name, settings=small) for name in ("plain", "zstd", "bad")]
    for run in runs:
        run.save(1, state(), compression="zstd" if run is runs[1] else None)
    (path,) = (tmp_path / "bad" / "step-00000001" / "l2").glob("c*")
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])
    job = torchrun(4, JOB, *(run[1].url for run in runs))
    answers = [
        json.loads(next(line for line in text.splitlines() if line.startswith('{"shared"'))) for text in job.by_rank
    ]
    for at, run in enumerate(runs[:2]):
        unique = sum(param.stored_bytes for param in run[1].manifest.params.values())
        assert sum(answer["shared"][at] for answer in answers) == unique
        assert max(answer["shared"][at] for answer in answers) < 0.4 * unique  # a quarter each, but for whole extents
    assert sum(answer["module shared"] for answer in answers) == runs[0][1].manifest.stored_bytes
    assert all(answer["module"] == answer["alone"] for answer in answers)
    assert sum(answer["alone"] for answer in answers) > 2 * runs[0][1].manifest.stored_bytes
    for answer in answers:
        assert "shape of plain" in answer["errors"][0]
        assert "CorruptError" in answer["errors"][1]
        assert "l2" in answer["errors"][1]
        assert "MemoryError: no room" in answer["errors"][2]


def test_it_needs_a_process_group(tmp_path):
    run = ckptfs.Run(tmp_path / "run")
    run.save(1, {"a": torch.ones(2)})
    with pytest.raises(MismatchError, match="init_process_group"):
        run.load({"a": torch.zeros(2)}, shared_reads=True)


# --- the plan --------------------------------------------------------------------------------------------------------


def manifest_of(rows, extents):
    layout = Layout((rows, 4), 4, (rows, 4), (rows, 4))
    cuts = sorted({0, *[e * 16 % (rows * 16) for e in extents], rows * 16})
    lengths = [b - a for a, b in itertools.pairwise(cuts)]
    param = Param("w", "w", dtypes.of("float32"), layout, None, run_lengths(lengths), b"\0" * 16 * len(lengths))
    return Manifest({"w": param}), param


@given(
    st.integers(1, 40),
    st.lists(st.integers(1, 100), max_size=8),
    st.lists(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=3), min_size=1, max_size=5),
    st.sampled_from([16, 64, 1 << 20]),
)
@settings(max_examples=200, deadline=None)
def test_pieces_are_what_is_needed_once_each(rows, extents, wanted, io_bytes):
    manifest, param = manifest_of(rows, extents)
    needs, bytewise = [], []
    for of_rank in wanted:
        spans = [(min(a, b, rows), min(max(a, b), rows)) for a, b in of_rank]
        needs.append(needs_of([(param, [Target(Box((a, 0), (b, 4)), None) for a, b in spans if a < b])]))
        bytewise.append({byte for a, b in spans for byte in range(a * 16, b * 16)})
    table = param.extents
    touched = [
        {e for e in range(param.extent_count) if any(table.start[e] <= x < table.stop[e] for x in of_rank)}
        for of_rank in bytewise
    ]
    pieces = deal(manifest, needs, io_bytes)
    for rank, of_rank in enumerate(touched):
        covered = [e for p in pieces if rank in p.takers for e in range(p.request.first, p.request.last)]
        assert len(covered) == len(set(covered))
        assert set(covered) >= of_rank
    seen = [e for p in pieces for e in range(p.request.first, p.request.last)]
    assert len(seen) == len(set(seen))  # nothing is read twice
    assert all(p.owner in p.takers for p in pieces)
    rounds = rounds_of(pieces, len(wanted), 64)
    assert [p for one in rounds for p in one] == pieces
    for one in rounds:
        for rank in range(len(wanted)):
            held = [p.request.length for p in one if rank in p.takers]
            assert sum(held) <= 64 or len(held) == 1
