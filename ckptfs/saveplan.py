"""Who writes what: a pure function that every rank computes alike from the same descriptions.

Rules: every byte has exactly one writer. What several ranks hold is laid end to end and cut into equal shares,
so that with R replicas nobody writes more than 1/R of it plus one extent. Nothing here grows with
ranks x tensors: a rank works out its own part, and the layouts.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise, product
from math import gcd, prod
from typing import TYPE_CHECKING, Any

from ckptfs import dtypes
from ckptfs.box import Box, boxes_of_range, split_evenly
from ckptfs.codec import Codec
from ckptfs.errors import MismatchError
from ckptfs.grid import Layout, choose
from ckptfs.settings import MIB

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

_MANY_FILES, _TINY_FILE = 256, 16 << 10  # compressed blocks that are so many and so small are not worth their files

# How an array is spread over ranks (the `spread` of a description), as plain data:
#   ["whole"]                      every rank that names it has all of it
#   ["mesh", shape, ranks, places] a device mesh; places: "R", "S<dim>" or "SS<dim>:<split factor>" per mesh dimension
#   ["flat", start, stop]          this rank has elements [start, stop) of the row-major array
#   ["boxes", [[start, stop], …]]  this rank has these boxes
Spread = list[Any]


@dataclass(frozen=True)
class Desc:
    """One array as one rank knows it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    spread: Spread

    def to_json(self) -> list[Any]:
        return [self.name, self.dtype, list(self.shape), self.spread]

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> Desc:
        name, dtype, shape, spread = data
        return cls(name, dtype, tuple(shape), spread)


def describe(descs: Sequence[Desc], aliases: dict[str, str]) -> bytes:
    """A rank's description as canonical bytes; equal bytes mean equal plans."""
    data = {"arrays": [d.to_json() for d in descs], "aliases": aliases}
    return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()


def parse(raw: bytes) -> tuple[list[Desc], dict[str, str]]:
    data = json.loads(raw)
    return [Desc.from_json(d) for d in data["arrays"]], data["aliases"]


# --- shards of a mesh ------------------------------------------------------------------------------------


def place(text: str) -> tuple[int, int] | None:
    """(tensor dimension, split factor) of a sharding placement; None for replication."""
    if text == "R":
        return None
    if text.startswith("SS"):
        dim, factor = text[2:].split(":")
        return int(dim), int(factor)
    return int(text[1:]), 1


@lru_cache(maxsize=1 << 16)
def intervals(length: int, splits: tuple[tuple[int, int, int], ...]) -> tuple[tuple[int, int], ...]:
    """What is left of [0, length) after each split (parts, which, factor), in local order, neighbours merged.

    A split cuts what is there as torch.chunk does; with a factor f the piece is taken from each of f parts.
    """
    held: list[tuple[int, int]] = [(0, length)]
    for parts, which, factor in splits:
        size = sum(b - a for a, b in held)
        taken: list[tuple[int, int]] = []
        for low, high in split_evenly(size, factor):
            a, b = split_evenly(high - low, parts)[which]
            taken += _window(held, low + a, low + b)
        held = taken
    return tuple(held)


def _window(held: list[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """Positions [start, stop) of the concatenation of intervals."""
    out: list[tuple[int, int]] = []
    at = 0
    for a, b in held:
        low, high = max(start, at), min(stop, at + b - a)
        if low < high:
            piece = (a + low - at, a + high - at)
            if out and out[-1][1] == piece[0]:
                out[-1] = (out[-1][0], piece[1])
            else:
                out.append(piece)
        at += b - a
    return out


class Mesh:
    """A description's mesh spread, made handy. `coordinate` is None for ranks outside the mesh."""

    def __init__(self, spread: Spread) -> None:
        _, shape, ranks, places = spread
        self.shape: tuple[int, ...] = tuple(shape)
        # A mesh of consecutive ranks is written as [first, count].
        self.ranks: Sequence[int] = (
            range(ranks[0], ranks[0] + ranks[1]) if len(ranks) == 2 and prod(shape) != 2 else ranks
        )
        self.places = [place(p) for p in places]
        self._key = self.ranks if isinstance(self.ranks, range) else tuple(self.ranks)
        self._where: dict[int, int] | None = None

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        if isinstance(self.ranks, range):
            if rank not in self.ranks:
                return None
            at = rank - self.ranks.start
        else:
            if self._where is None:
                self._where = {r: i for i, r in enumerate(self.ranks)}
            found = self._where.get(rank)
            if found is None:
                return None
            at = found
        coordinate = []
        for d in range(len(self.shape)):
            stride = prod(self.shape[d + 1 :])
            i, at = divmod(at, stride)
            coordinate.append(i)
        return tuple(coordinate)

    def splits(self, dim: int, coordinate: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
        return tuple(
            (self.shape[m], coordinate[m], p[1]) for m, p in enumerate(self.places) if p is not None and p[0] == dim
        )

    def local(self, shape: Sequence[int], coordinate: Sequence[int]) -> list[list[tuple[int, int]]]:
        """Per tensor dimension the intervals that the rank at this coordinate holds, in local order."""
        return [list(intervals(length, self.splits(d, coordinate))) for d, length in enumerate(shape)]

    def replicas(self, coordinate: Sequence[int]) -> tuple[int, ...]:
        """The ranks that hold the same shard, ascending."""
        fixed = tuple(None if p is None else c for p, c in zip(self.places, coordinate, strict=True))
        return _slice_of_mesh(self.shape, self._key, fixed)

    def steps(self, shape: Sequence[int]) -> list[Box]:
        """Boxes whose edges have the same greatest common divisors as all shards of the mesh."""
        boxes = []
        for d, length in enumerate(shape):
            sizes = tuple((self.shape[m], p[1]) for m, p in enumerate(self.places) if p is not None and p[0] == d)
            step = _edge_step(length, sizes)
            if step:
                start, stop = [0] * len(shape), list(shape)
                stop[d] = step
                boxes.append(Box(tuple(start), tuple(stop)))
        return boxes


@lru_cache(maxsize=1 << 10)
def _slice_of_mesh(shape: tuple[int, ...], ranks: Sequence[int], fixed: tuple[int | None, ...]) -> tuple[int, ...]:
    """The ranks of a mesh at all positions that agree with `fixed` where it says something."""
    at = [0]
    for n, where in zip(shape, fixed, strict=True):
        at = [i * n + x for i in at for x in (range(n) if where is None else (where,))]
    return tuple(sorted(ranks[i] for i in at))


@lru_cache(maxsize=1 << 14)
def _edge_step(length: int, sizes: tuple[tuple[int, int], ...]) -> int:
    """The greatest common divisor of all inner edges that these splits make in a dimension; 0: none."""
    if not sizes or length == 0:
        return 0
    if len(sizes) == 1 and sizes[0][1] == 1:
        step = -(-length // sizes[0][0])
        return step if step < length else 0
    step = 0
    for which in product(*(range(parts) for parts, _ in sizes)):
        splits = tuple((parts, at, factor) for (parts, factor), at in zip(sizes, which, strict=True))
        for edge in {e for piece in intervals(length, splits) for e in piece}:
            if 0 < edge < length:
                step = gcd(step, edge)
    return step


def boxes_of(spread: Spread, shape: tuple[int, ...], rank: int) -> list[Box]:
    """The boxes of the array that `rank` holds under this spread, in local order."""
    kind = spread[0]
    if kind == "whole":
        return [Box.whole(shape)]
    if kind == "flat":
        return boxes_of_range(spread[1], spread[2], shape)
    if kind == "boxes":
        return [Box(tuple(a), tuple(b)) for a, b in spread[1]]
    mesh = Mesh(spread)
    coordinate = mesh.coordinate(rank)
    if coordinate is None:
        return []
    return boxes_of_intervals(mesh.local(shape, coordinate))


def boxes_of_intervals(held: list[list[tuple[int, int]]]) -> list[Box]:
    return [Box(tuple(a for a, _ in piece), tuple(b for _, b in piece)) for piece in product(*held)]


# --- the plan --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Array:
    """What is stored under a name, the same on every rank."""

    name: str
    dtype: dtypes.DType
    layout: Layout
    codec: Codec | None
    note: str = ""  # why it is stored otherwise than asked


@dataclass(frozen=True)
class SavePlan:
    """One rank's part of a save: `pieces[i]` are the logical ranges of `arrays[i]` that it writes."""

    arrays: list[Array]
    pieces: dict[int, list[tuple[int, int]]]
    aliases: dict[str, str]
    extent_bytes: int

    @cached_property
    def nbytes(self) -> int:
        """Bytes this rank writes."""
        return sum(b - a for ranges in self.pieces.values() for a, b in ranges)


@dataclass(frozen=True)
class Options:
    """What besides the descriptions decides a plan."""

    positional: bool = True  # many writers can share a file
    chunk_bytes: int = 8 * MIB
    block_bytes: int = 64 * MIB
    extent_bytes: int = MIB
    compression: tuple[tuple[str, str | None], ...] = ()  # (pattern, codec), first match wins
    raw: frozenset[str] = frozenset()  # arrays for which compression does not pay


Pieces = dict[int, list[tuple[int, int]]]  # array → logical ranges of it
Parts = list[tuple[int, list[tuple[int, int]]]]  # the same in order


def plan(
    descriptions: Sequence[tuple[Sequence[Desc], dict[str, str]]], of_rank: Sequence[int], rank: int, options: Options
) -> SavePlan:
    """The part of `rank`, when rank r has given `descriptions[of_rank[r]]`."""
    arrays, parts, aliases, extent_bytes = _parts(descriptions, of_rank, rank, options)
    pieces: Pieces = {}
    for group, held in parts.items():
        for number, ranges in share(held, _units(arrays, held, extent_bytes), len(group), group.index(rank)):
            pieces.setdefault(number, []).extend(ranges)
    return SavePlan(arrays, {i: merge(r) for i, r in sorted(pieces.items())}, aliases, extent_bytes)


def _parts(
    descriptions: Sequence[tuple[Sequence[Desc], dict[str, str]]], of_rank: Sequence[int], rank: int, options: Options
) -> tuple[list[Array], dict[tuple[int, ...], Parts], dict[str, str], int]:
    """All arrays; what `rank` holds of them, by the ranks that hold the same (itself among them); aliases; extents."""
    descriptions, aliases = untie(descriptions)
    known = _gather(descriptions, of_rank)
    total = sum(prod(views[0][0].shape) * dtypes.of(views[0][0].dtype).itemsize for views in known.values())
    extent_bytes = extent_size(total, options.extent_bytes)
    arrays: list[Array] = []
    parts: dict[tuple[int, ...], Parts] = defaultdict(list)
    whole: set[tuple[int, str]] = set()
    for name in sorted(known):
        views = known[name]
        _check_holders(name, views, len(of_rank), whole)
        array, mine = _array(name, views, rank, options)
        for boxes, group in mine:
            ranges = merge([r for box in boxes for r in array.layout.ranges(box)])
            if array.layout.many:
                _check_blocks(array, ranges)
            parts[group].append((len(arrays), ranges))
        arrays.append(array)
    return arrays, parts, aliases, extent_bytes


def _units(arrays: list[Array], held: Parts, extent_bytes: int) -> dict[int, int]:
    """What is never cut, of each array: a file of its own, or an extent."""
    return {i: arrays[i].layout.block_bytes if arrays[i].layout.many else extent_bytes for i, _ in held}


# --- when a rank is lost ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """What all ranks' plans follow from, the same on every rank."""

    descriptions: Sequence[tuple[Sequence[Desc], dict[str, str]]]
    of_rank: Sequence[int]
    options: Options

    def plan(self, rank: int) -> SavePlan:
        return plan(self.descriptions, self.of_rank, rank, self.options)


def stand_ins(inputs: Inputs, lost: Collection[int]) -> dict[int, Pieces] | None:
    """Rank → the pieces it writes instead of lost ranks; None if nobody else holds some of theirs.

    The stand-in for a rank is, among those that hold the same, the next one round that is not lost.
    """
    taken: dict[int, Pieces] = defaultdict(lambda: defaultdict(list))
    for rank in sorted(lost):
        arrays, parts, _, extent_bytes = _parts(inputs.descriptions, inputs.of_rank, rank, inputs.options)
        for group, held in parts.items():
            at = group.index(rank)
            there = next((r for r in (*group[at + 1 :], *group[:at]) if r not in lost), None)
            for number, ranges in share(held, _units(arrays, held, extent_bytes), len(group), at):
                if there is None:
                    return None
                taken[there][number] += ranges
    return {rank: {i: merge(r) for i, r in sorted(pieces.items())} for rank, pieces in taken.items()}


def understudy(inputs: Inputs, rank: int) -> Pieces:
    """The pieces that `rank` would write if the rank before it, in each circle that holds the same, were lost."""
    arrays, parts, _, extent_bytes = _parts(inputs.descriptions, inputs.of_rank, rank, inputs.options)
    pieces: Pieces = {}
    for group, held in parts.items():
        before = (group.index(rank) - 1) % len(group)
        if len(group) > 1:
            for number, ranges in share(held, _units(arrays, held, extent_bytes), len(group), before):
                pieces.setdefault(number, []).extend(ranges)
    return {i: merge(r) for i, r in sorted(pieces.items())}


def extent_size(total: int, extent_bytes: int) -> int:
    """Extents of a checkpoint of `total` bytes: small enough to reshard well, few enough to list (about 2^18)."""
    while extent_bytes < 8 * MIB and total > extent_bytes << 18:
        extent_bytes *= 2
    return extent_bytes


def share(
    parts: list[tuple[int, list[tuple[int, int]]]], unit: dict[int, int], shares: int, which: int
) -> list[tuple[int, list[tuple[int, int]]]]:
    """Lay all ranges end to end, cut at units, and give out equal shares: the units that start in share `which`."""
    total = sum(b - a for _, ranges in parts for a, b in ranges)
    low, high = -(-total * which // shares), -(-total * (which + 1) // shares)
    out: list[tuple[int, list[tuple[int, int]]]] = []
    at = 0
    for number, ranges in parts:
        taken: list[tuple[int, int]] = []
        size = unit[number]
        for a, b in ranges:
            if at < high and at + b - a > low:
                # Units start at a, then at every multiple of the size.
                start = a if at >= low else _unit_at_or_after(a, a + low - at, size)
                stop = b if at + b - a <= high else _unit_at_or_after(a, a + high - at, size)
                start, stop = min(start, b), min(stop, b)
                if start < stop:
                    taken.append((start, stop))
            at += b - a
        if taken:
            out.append((number, taken))
    return out


def _unit_at_or_after(first: int, position: int, size: int) -> int:
    """The first unit boundary of a range that starts at `first` which is not before `position`."""
    return first if position <= first else -(-position // size) * size


def cut(start: int, stop: int, size: int) -> list[tuple[int, int]]:
    """[start, stop) cut at the multiples of `size`."""
    edges = [start, *range((start // size + 1) * size, stop, size), stop]
    return list(pairwise(edges)) if start < stop else []


def cut_evenly(start: int, stop: int, most: int, grain: int) -> list[tuple[int, int]]:
    """[start, stop) in parts of at most `most` and about one length, cut at multiples of `grain`.

    Ranks whose ranges begin anywhere make equally few requests, and so end together.
    """
    if stop - start <= most:
        return [(start, stop)] if start < stop else []
    if most < 3 * grain:  # rounding to grains could leave nothing of a part
        return cut(start, stop, most)
    count = -(-(stop - start) // (most - grain))
    edges = [start, *((start + (stop - start) * i // count) // grain * grain for i in range(1, count)), stop]
    return list(pairwise(edges))


def merge(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted, with neighbours joined."""
    out: list[tuple[int, int]] = []
    for a, b in sorted(ranges):
        if out and out[-1][1] == a:
            out[-1] = (out[-1][0], b)
        else:
            out.append((a, b))
    return out


def untie(
    descriptions: Sequence[tuple[Sequence[Desc], dict[str, str]]],
) -> tuple[list[tuple[list[Desc], dict[str, str]]], dict[str, str]]:
    """Only names that every rank who has them sees tied, to the same array, stay aliases; others are stored.

    Returns the descriptions with the untied names as arrays of their own, and the aliases that are left.
    """
    stored = {desc.name for descs, _ in descriptions for desc in descs}
    targets: dict[str, set[str]] = defaultdict(set)
    for _, ties in descriptions:
        for alias, target in ties.items():
            targets[alias].add(target)
    aliases = {alias: min(of) for alias, of in targets.items() if len(of) == 1 and alias not in stored}
    out = []
    for descs, ties in descriptions:
        loose = {alias: target for alias, target in ties.items() if alias not in aliases}
        by_name = {desc.name: desc for desc in descs} if loose else {}
        own = [replace(by_name[target], name=alias) for alias, target in loose.items()]
        out.append(([*descs, *own], {alias: target for alias, target in ties.items() if alias in aliases}))
    return out, aliases


def _check_holders(name: str, views: list[tuple[Desc, list[int]]], world: int, whole: set[tuple[int, str]]) -> None:
    """Every rank of a mesh has to come with its part, or there would be a hole.

    `whole` remembers what was found complete: thousands of arrays share a mesh and the list of ranks that named them.
    """
    desc, holders = views[0]
    if desc.spread[0] != "mesh":
        return
    ranks = Mesh(desc.spread).ranks
    highest = ranks[-1] if isinstance(ranks, range) else max(ranks)
    key = (id(holders), str(desc.spread))
    if (len(holders) == world and highest < world) or (len(views) == 1 and key in whole):
        return
    missing = sorted(set(ranks).difference(*(of for _, of in views)))
    if missing:
        msg = (
            f"{name!r} is spread as {_say(desc.spread)}, but rank {missing[0]} of that mesh does not have it in its "
            f"tree ({len(missing)} of {len(ranks)} ranks do not): save the same tree on all ranks of the mesh"
        )
        raise MismatchError(msg)
    if len(views) == 1:
        whole.add(key)


def _gather(
    descriptions: Sequence[tuple[Sequence[Desc], dict[str, str]]], of_rank: Sequence[int]
) -> dict[str, list[tuple[Desc, list[int]]]]:
    """Name → its distinct descriptions, each with the ranks that gave it; contradictions are errors."""
    ranks_of: dict[int, list[int]] = defaultdict(list)
    for r, which in enumerate(of_rank):
        ranks_of[which].append(r)
    known: dict[str, list[tuple[Desc, list[int]]]] = {}
    for which, (descs, _) in enumerate(descriptions):
        ranks = ranks_of.get(which, [])
        if not ranks:
            continue
        for desc in descs:
            views = known.setdefault(desc.name, [])
            for i, (other, holders) in enumerate(views):
                if (other.dtype, other.shape) != (desc.dtype, desc.shape):
                    msg = (
                        f"{desc.name!r} is {other.dtype} {list(other.shape)} on rank {holders[0]} but {desc.dtype} "
                        f"{list(desc.shape)} on rank {ranks[0]}: give it one shape, or wrap it in ckptfs.PerRank(...)"
                    )
                    raise MismatchError(msg)
                if other.spread == desc.spread:
                    views[i] = (other, sorted(holders + ranks))
                    break
            else:
                views.append((desc, ranks))  # shared by all arrays of a description: there may be many ranks
    return known


def _array(
    name: str, views: list[tuple[Desc, list[int]]], rank: int, options: Options
) -> tuple[Array, list[tuple[list[Box], tuple[int, ...]]]]:
    """The array's layout, and what `rank` holds of it: (boxes, the ranks that hold the same)."""
    first = views[0][0]
    dtype, shape = dtypes.of(first.dtype), first.shape
    kind = first.spread[0]
    if any(v.spread[0] != kind for v, _ in views) or (kind in ("mesh", "whole") and len(views) > 1):
        a, b = views[0], views[1]
        msg = (
            f"{name!r} is spread as {_say(a[0].spread)} on rank {a[1][0]} "
            f"but as {_say(b[0].spread)} on rank {b[1][0]}: "
            "all ranks must describe an array alike"
        )
        raise MismatchError(msg)
    mine: list[tuple[list[Box], tuple[int, ...]]] = []
    if kind == "whole":
        edges: list[Box] = []
        if rank in views[0][1]:
            mine.append(([Box.whole(shape)], tuple(views[0][1])))
    elif kind == "mesh":
        mesh = Mesh(first.spread)
        edges = mesh.steps(shape)
        coordinate = mesh.coordinate(rank)
        if coordinate is not None:
            mine.append((boxes_of_intervals(mesh.local(shape, coordinate)), mesh.replicas(coordinate)))
    else:
        edges, mine = _explicit(name, views, rank)
    codec = None if name in options.raw else codec_for(name, dtype, options.compression)
    flat = kind == "flat"
    note = "stored raw: compression does not pay" if name in options.raw else ""
    if codec is not None and (flat or prod(shape) == 0):
        codec, note = None, "stored raw: flat shards do not end at chunk boundaries" if flat else ""
    if not options.positional and flat:
        msg = (
            f"{name!r} is held as flat ranges, which this store cannot take from several writers; "
            "save it as DTensor shards or to a local path"
        )
        raise MismatchError(msg)
    layout = choose(
        shape,
        dtype.itemsize,
        edges,
        flat=flat,
        many=codec is not None or (not options.positional and prod(shape) > 0),
        compressed=codec is not None,
        chunk_bytes=options.chunk_bytes,
        block_bytes=options.block_bytes,
    )
    if codec is not None and options.positional and layout.blocks > _MANY_FILES and layout.block_bytes < _TINY_FILE:
        options = replace(options, raw=options.raw | {name})
        array, mine = _array(name, views, rank, options)
        return replace(array, note="stored raw: its shards have no useful common boundary"), mine
    return Array(name, dtype, layout, codec, note), mine


def _explicit(
    name: str, views: list[tuple[Desc, list[int]]], rank: int
) -> tuple[list[Box], list[tuple[list[Box], tuple[int, ...]]]]:
    """Boxes named one by one: equal ones are replicas, different ones must not overlap and must fill the array."""
    shape = views[0][0].shape
    edges, mine, volume = [], [], 0
    seen: list[Box] = []
    for desc, holders in views:
        boxes = [box for box in boxes_of(desc.spread, shape, holders[0]) if box.size]
        for box in boxes:
            clash = next((other for other in seen if (other & box).size), None)
            if clash is not None or not Box.whole(shape).contains(box):
                msg = (
                    f"{name!r}: the part {box} of rank {holders[0]} overlaps {clash} or leaves the shape {list(shape)}"
                )
                raise MismatchError(msg)
            seen.append(box)
            volume += box.size
        edges += boxes
        if rank in holders and boxes:
            mine.append((boxes, tuple(holders)))
    if volume != prod(shape):
        msg = f"{name!r}: the ranks together hold {volume} of {prod(shape)} elements; every element needs a holder"
        raise MismatchError(msg)
    return edges, mine


def codec_for(name: str, dtype: object, compression: Sequence[tuple[str, str | None]]) -> Codec | None:
    """The codec that the first matching pattern asks for."""
    for pattern, kind in compression:
        if matches(name, pattern):
            return Codec.spec(kind, dtypes.of(dtype))
    return None


def with_raw(
    options: Options, descriptions: Sequence[tuple[Sequence[Desc], dict[str, str]]], votes: Sequence[set[str]]
) -> Options:
    """An array stays raw when everybody who holds some of it found that it does not shrink."""
    against: dict[str, bool] = {}
    for (descs, _), raw in zip(descriptions, votes, strict=True):
        for desc in descs:
            against[desc.name] = against.get(desc.name, True) and desc.name in raw
    return replace(options, raw=frozenset(name for name, all_raw in against.items() if all_raw))


def matches(name: str, pattern: str) -> bool:
    """Shell-style patterns over whole names (`*` also crosses slashes)."""
    from fnmatch import fnmatchcase

    return fnmatchcase(name, pattern)


def _check_blocks(array: Array, ranges: list[tuple[int, int]]) -> None:
    """Files of their own need whole blocks from one writer."""
    size = array.layout.block_bytes
    for a, b in ranges:
        last = (b - 1) // size
        if a % size or b != last * size + array.layout.used_bytes(last):
            msg = (
                f"{array.name!r}: its shards do not end at common boundaries; "
                "save it to a local path without compression"
            )
            raise MismatchError(msg)


def _say(spread: Spread) -> str:
    if spread[0] == "mesh":
        return f"mesh {spread[1]} with {', '.join(spread[3])}"
    return str(spread[0])
