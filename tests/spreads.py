"""Arrays spread over ranks at random, and the obvious way to find out what a rank then holds.

The twin never computes an interval: it puts the number of each element into an array and cuts that as torch does,
one chunk after the other.
"""

import threading
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np
from hypothesis import strategies as st

from ckptfs import dtypes
from ckptfs.ranks import Group
from ckptfs.shards import FlatShard, LocalShard
from ckptfs.storage import FileOps

DTYPES = sorted(dtypes.BY_NAME)


class NoSync(FileOps):
    """Real files that nobody makes durable: for tests of what is written, not of when."""

    def fsync(self, fd):
        pass

    def syncfs(self, fd):
        pass


def chunks(indices, parts):
    """torch.chunk of a list, filled up with empty ones."""
    size = -(-len(indices) // parts)
    found = [indices[i : i + size] for i in range(0, len(indices), size)] if size else []
    return found + [[]] * (parts - len(found))


def strided(indices, parts, factor):
    """torch's _StridedShard: cut into `factor` pieces, each of them into `parts`, take one of each."""
    pieces = [chunks(piece, parts) for piece in chunks(indices, factor)]
    return [[i for piece in pieces for i in piece[which]] for which in range(parts)]


def local_indices(shape, mesh_shape, places, coordinate):
    """Per dimension the indices that the rank at a mesh coordinate holds, in local order."""
    held = [list(range(length)) for length in shape]
    for parts, which, place in zip(mesh_shape, coordinate, places, strict=True):
        if place == "R":
            continue
        if place.startswith("SS"):
            dim, factor = map(int, place[2:].split(":"))
            held[dim] = strided(held[dim], parts, factor)[which]
        else:
            dim = int(place[1:])
            held[dim] = chunks(held[dim], parts)[which]
    return held


@dataclass(frozen=True)
class Spreading:
    """How one array is spread over `world` ranks; `leaf(full, rank)` is what that rank's tree holds (None: nothing)."""

    kind: str
    detail: tuple

    def leaf(self, full, rank):
        if self.kind == "whole":
            return full.copy() if rank in self.detail else None
        if self.kind == "flat":
            start, stop = self.detail[rank]
            return FlatShard(full.reshape(-1)[start:stop].copy(), full.shape, start)
        if self.kind == "boxes":
            boxes = self.detail[rank]
            if not boxes:
                return None
            parts = [full[tuple(slice(a, b) for a, b in zip(*box, strict=True))].copy() for box in boxes]
            return LocalShard(parts, full.shape, ["boxes", [[list(a), list(b)] for a, b in boxes]])
        mesh_shape, ranks, places = self.detail
        if rank not in ranks:
            return None
        coordinate = [int(i) for i in np.unravel_index(ranks.index(rank), mesh_shape)]
        held = local_indices(full.shape, mesh_shape, places, coordinate)
        local = full[np.ix_(*held)] if full.ndim else full
        return LocalShard(local.copy(), full.shape, ["mesh", list(mesh_shape), list(ranks), list(places)])


def parts_of(leaf):
    """The arrays of a leaf that a load fills."""
    data = leaf.data if isinstance(leaf, (FlatShard, LocalShard)) else leaf
    return data if isinstance(data, list) else [data]


def blank(leaf):
    """The same leaf with other values in it."""
    for part in parts_of(leaf):
        part.view(carrier(part))[...] = 1
    return leaf


def carrier(array):
    return {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}[array.dtype.itemsize]


def random_array(shape, dtype_name, seed):
    """Every bit pattern of the type (of bool: the two it has)."""
    dtype = dtypes.of(dtype_name)
    raw = np.random.default_rng(seed).bytes(prod(shape) * dtype.itemsize)
    flat = np.frombuffer(raw, "u1").copy()
    if dtype.name == "bool":
        flat &= 1
    return flat.view(dtype.numpy).reshape(shape)


@st.composite
def shapes(draw, largest=600):
    return draw(st.lists(st.integers(0, 9), max_size=4).map(tuple).filter(lambda shape: prod(shape) <= largest))


@st.composite
def mesh_shapes(draw, count):
    """1-D to 3-D meshes of exactly `count` ranks."""
    options = [(a, b, c) for a in range(1, count + 1) for b in range(1, count + 1) for c in range(1, count + 1)]
    full = draw(st.sampled_from([o for o in options if prod(o) == count]))
    return draw(st.sampled_from(((count,), full, full[:2] if full[2] == 1 else full)))


@st.composite
def spreadings(draw, shape, world, *, kinds=("whole", "mesh", "flat", "boxes")):
    kind = draw(st.sampled_from(kinds))
    if kind == "boxes" and (not shape or 0 in shape):
        kind = "whole"
    if kind == "whole":
        return Spreading(kind, tuple(sorted(draw(st.sets(st.integers(0, world - 1), min_size=1)))))
    if kind == "flat":
        total = prod(shape)
        cuts = sorted(draw(st.lists(st.integers(0, total), min_size=world - 1, max_size=world - 1)))
        edges = [0, *cuts, total]
        return Spreading(kind, tuple(pairwise(edges)))
    if kind == "boxes":
        dim = draw(st.integers(0, len(shape) - 1))
        cuts = sorted(draw(st.lists(st.integers(0, shape[dim]), max_size=3)))
        edges = [0, *cuts, shape[dim]]
        of_rank = [[] for _ in range(world)]
        for a, b in pairwise(edges):
            if a < b:
                start, stop = [0] * len(shape), list(shape)
                start[dim], stop[dim] = a, b
                of_rank[draw(st.integers(0, world - 1))].append((tuple(start), tuple(stop)))
        return Spreading(kind, tuple(map(tuple, of_rank)))
    count = draw(st.integers(1, world))
    ranks = draw(st.permutations(range(world)))[:count] if draw(st.booleans()) else list(range(count))
    mesh_shape = draw(mesh_shapes(count))
    places = []
    for _ in mesh_shape:
        options = ["R"]
        if shape:
            dim = draw(st.integers(0, len(shape) - 1))
            options += [f"S{dim}", f"S{dim}", f"SS{dim}:{draw(st.integers(2, 3))}"]
        places.append(draw(st.sampled_from(options)))
    return Spreading("mesh", (mesh_shape, tuple(ranks), tuple(places)))


@st.composite
def splits(draw, shapes_of):
    """What a save may be asked to store in parts: some of the arrays, cut in some of their dimensions."""
    chosen = {}
    for name, shape in shapes_of.items():
        if shape and draw(st.booleans()):
            chosen[name] = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=len(shape))))
    return chosen


def on_ranks(world, work, *, groups=None):
    """`work(rank, group)` on every rank as a thread; the results by rank. Errors of ranks are raised as one."""
    groups = groups or Group.threads(world)
    results, errors = [None] * world, {}

    def one(rank):
        try:
            results[rank] = work(rank, groups[rank])
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=one, args=[rank]) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        error = errors[min(errors)]
        error.by_thread = errors
        raise error
    return results
