"""Who writes what: a pure function that every rank computes alike from the same descriptions.

Rules: every byte has exactly one writer. What several ranks hold is laid end to end and cut into equal shares,
so that with R replicas nobody writes more than 1/R of it plus one extent. Pieces too small for files of their own, and
blocks that several ranks hold parts of, are handed over: one rank writes what others hold (parties.py). Nothing here
grows with ranks x tensors: a rank works out its own part, and the layouts.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from math import prod
from typing import TYPE_CHECKING, Any

from ckptfs import dtypes, parties
from ckptfs.box import Box
from ckptfs.codec import Codec
from ckptfs.errors import MismatchError
from ckptfs.grid import Layout, choose
from ckptfs.manifest import LIMIT
from ckptfs.mesh import Mesh, Spread, boxes_of
from ckptfs.parties import Members, Portion
from ckptfs.ranges import deal, merge, share
from ckptfs.settings import MIB

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

Split = tuple[tuple[str, tuple[int, ...]], ...]  # (pattern, into how many parts each dimension will be read)
_MANY_FILES, _TINY_FILE = 256, 16 << 10  # compressed blocks that are so many and so small are not worth their files
_FEW_FILES = 16  # fewer blocks than that may be as small as they like


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


# --- the plan --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Array:
    """What is stored under a name, the same on every rank."""

    name: str
    dtype: dtypes.DType
    layout: Layout
    codec: Codec | None
    note: str = ""  # why it is stored otherwise than asked


Handed = tuple[int, int, int]  # start and stop of a logical range, and the other rank


@dataclass(frozen=True)
class SavePlan:
    """One rank's part of a save: `pieces[i]` are the logical ranges of `arrays[i]` that it writes."""

    arrays: list[Array]
    pieces: dict[int, list[tuple[int, int]]]
    aliases: dict[str, str]
    extent_bytes: int  # at most; see Layout.extent_bytes
    pulls: dict[int, list[Handed]] = field(default_factory=dict)  # by array: what of the pieces comes from which rank
    gives: dict[int, list[Handed]] = field(default_factory=dict)  # by array: what this rank holds and which one writes

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
    handover: bool = True  # a rank may write what another holds
    handover_ranks: int = 16  # where so many shards or more make small pieces, neighbours put them together
    files_per_rank: int = 256  # what they aim at
    large_bytes: int = 8 * MIB  # pieces that are written where they are: a file costs less than their way
    split: Split = ()  # first match wins


Pieces = dict[int, list[tuple[int, int]]]  # array → logical ranges of it
Parts = list[tuple[int, list[tuple[int, int]]]]  # the same in order


def plan(
    descriptions: Sequence[tuple[Sequence[Desc], dict[str, str]]], of_rank: Sequence[int], rank: int, options: Options
) -> SavePlan:
    """The part of `rank`, when rank r has given `descriptions[of_rank[r]]`."""
    arrays, parts, aliases, extent_bytes = _parts(descriptions, of_rank, rank, options)
    pieces: Pieces = defaultdict(list)
    pulls: dict[int, list[Handed]] = defaultdict(list)
    gives: dict[int, list[Handed]] = defaultdict(list)
    for members, portions in parts.items():
        held = _ranges_of(portions)
        units = _units(arrays, held, extent_bytes)
        if not any(portion.changes_hands for _, portion in portions):
            for number, ranges in share(held, units, len(members), members.index(rank)):
                pieces[number] += ranges
            continue
        for place, which, ranges in deal(held, units, len(members)):
            number, portion = portions[which]
            writer = members[place]
            if writer == rank:
                pieces[number] += ranges
            for source, handed in parties.sources(portion, ranges, writer, place, rank):
                into, other = (pulls, source) if writer == rank else (gives, writer)
                into[number] += [(a, b, other) for a, b in handed]
    return SavePlan(
        arrays,
        {i: merge(r) for i, r in sorted(pieces.items())},
        aliases,
        extent_bytes,
        {i: sorted(r) for i, r in sorted(pulls.items())},
        {i: sorted(r) for i, r in sorted(gives.items())},
    )


def _ranges_of(portions: list[tuple[int, Portion]]) -> Parts:
    return [(number, portion.ranges) for number, portion in portions]


def _parts(
    descriptions: Sequence[tuple[Sequence[Desc], dict[str, str]]], of_rank: Sequence[int], rank: int, options: Options
) -> tuple[list[Array], dict[Members, list[tuple[int, Portion]]], dict[str, str], int]:
    """All arrays; what is dealt out among whom, where `rank` is involved; aliases; extents."""
    descriptions, aliases = untie(descriptions)
    known = _gather(descriptions, of_rank)
    names: dict[str, list[str]] = defaultdict(list)  # of tied arrays the others
    if options.split:
        check_split([*known, *aliases], options.split)
        for alias, target in aliases.items():
            names[target].append(alias)
    total = sum(_nbytes(views[0][0]) for views in known.values())
    extent_bytes = extent_size(total, options.extent_bytes)
    spans = _spans(known, options, extent_bytes)
    arrays: list[Array] = []
    parts: dict[Members, list[tuple[int, Portion]]] = defaultdict(list)
    whole: set[tuple[int, str]] = set()
    alike: dict[Any, tuple[Layout, Codec | None, str, list[tuple[Members, Portion]]]] = {}
    for name in sorted(known):
        views = known[name]
        _check_holders(name, views, len(of_rank), whole)
        desc = views[0][0]
        codec = None if name in options.raw else codec_for(name, dtypes.of(desc.dtype), options.compression)
        note = "stored raw: compression does not pay" if name in options.raw else ""
        part = part_of([name, *names[name]], desc.shape, options.split) if prod(desc.shape) else None
        key = (desc.dtype, desc.shape, str(desc.spread), codec, part, id(views[0][1])) if len(views) == 1 else name
        if key not in alike:
            alike[key] = _array(name, views, rank, options, codec, part, _span_of(desc, spans, options))
        layout, codec, found_note, dealt = alike[key]
        for members, portion in dealt:
            parts[members].append((len(arrays), portion))
        arrays.append(Array(name, dtypes.of(desc.dtype), layout, codec, found_note or note))
    mine = {
        members: portions
        for members, portions in parts.items()
        if rank in members or any(portion.involves(rank) for _, portion in portions)
    }
    return arrays, mine, aliases, extent_bytes


def _nbytes(desc: Desc) -> int:
    return prod(desc.shape) * dtypes.of(desc.dtype).itemsize


def _spans(known: dict[str, list[tuple[Desc, list[int]]]], options: Options, extent_bytes: int) -> dict[str, int]:
    """Spread → how many neighbouring shards put their small pieces together."""
    sizes: dict[str, list[int]] = defaultdict(list)
    meshes: dict[str, Mesh] = {}
    for views in known.values():
        desc = views[0][0]
        if desc.spread[0] != "mesh" or not (options.handover and options.positional):
            continue
        key = str(desc.spread)
        mesh = meshes[key] = meshes.get(key) or Mesh(desc.spread)
        if mesh.shards() >= options.handover_ranks and _is_small(desc, mesh, options):
            sizes[key].append(_nbytes(desc))
    return {
        key: parties.span_for(of_it, meshes[key], extent_bytes, options.files_per_rank) for key, of_it in sizes.items()
    }


def _span_of(desc: Desc, spans: dict[str, int], options: Options) -> int:
    span = spans.get(str(desc.spread), 1)
    return span if span > 1 and _is_small(desc, Mesh(desc.spread), options) else 1


def _is_small(desc: Desc, mesh: Mesh, options: Options) -> bool:
    """Whether the pieces that a mesh makes of an array are better put together. Those of nothing are not."""
    return 0 < _nbytes(desc) < options.large_bytes * mesh.holders(desc.shape)


def _units(arrays: list[Array], held: Parts, extent_bytes: int) -> dict[int, int]:
    """What is never cut, of each array: a file of its own, or an extent."""
    layouts = ((i, arrays[i].layout) for i, _ in held)
    return {i: layout.block_bytes if layout.many else layout.extent_bytes(extent_bytes) for i, layout in layouts}


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
    """Rank → the pieces it writes instead of lost ranks; None if nobody else holds some of theirs, or if they take part
    in a hand-over.

    The stand-in for a rank is, among those that hold the same, the next one round that is not lost.
    """
    taken: dict[int, Pieces] = defaultdict(lambda: defaultdict(list))
    for rank in sorted(lost):
        arrays, parts, _, extent_bytes = _parts(inputs.descriptions, inputs.of_rank, rank, inputs.options)
        for group, portions in parts.items():
            if any(portion.changes_hands for _, portion in portions):
                return None  # who writes what others hold, or has to give it, cannot be stood in for
            held, at = _ranges_of(portions), group.index(rank)
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
    for group, portions in parts.items():
        if len(group) > 1 and not any(portion.changes_hands for _, portion in portions):
            before, held = (group.index(rank) - 1) % len(group), _ranges_of(portions)
            for number, ranges in share(held, _units(arrays, held, extent_bytes), len(group), before):
                pieces.setdefault(number, []).extend(ranges)
    return {i: merge(r) for i, r in sorted(pieces.items())}


def extent_size(total: int, extent_bytes: int) -> int:
    """Extents of a checkpoint of `total` bytes: small enough to reshard well and to deal out evenly (the share of one
    of 128 replicas may be 48 MiB), few enough to list (about 2^19).
    """
    while extent_bytes < 8 * MIB and total > extent_bytes << 19:
        extent_bytes *= 2
    return extent_bytes


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
    name: str,
    views: list[tuple[Desc, list[int]]],
    rank: int,
    options: Options,
    codec: Codec | None,
    part: Box | None,
    span: int,
) -> tuple[Layout, Codec | None, str, list[tuple[Members, Portion]]]:
    """The array's layout, its codec, why it is stored otherwise than asked, and what is dealt out of it among whom.

    Of the parties at least those are there in which `rank` is involved.
    """
    first = views[0][0]
    shape, kind = first.shape, first.spread[0]
    if prod(max(1, d) for d in shape) * dtypes.of(first.dtype).itemsize > LIMIT:  # also of arrays that hold nothing
        raise MismatchError(f"{name!r} has the shape {list(shape)}, which is more than a manifest can say")
    if any(v.spread[0] != kind for v, _ in views) or (kind in ("mesh", "whole") and len(views) > 1):
        a, b = views[0], views[1]
        msg = (
            f"{name!r} is spread as {_say(a[0].spread)} on rank {a[1][0]} "
            f"but as {_say(b[0].spread)} on rank {b[1][0]}: "
            "all ranks must describe an array alike"
        )
        raise MismatchError(msg)
    edges = _edges(name, views) + ([part] if part else [])
    note = ""
    if codec is not None and prod(shape) == 0:
        codec = None
    if codec is not None and kind == "flat" and not options.handover:
        codec, note = None, "stored raw: flat shards do not end at chunk boundaries"
    many = codec is not None or (not options.positional and prod(shape) > 0)
    if not options.positional and kind == "flat" and not options.handover:
        msg = (
            f"{name!r} is held as flat ranges, which this store cannot take from several writers without a hand-over; "
            "allow it (Settings.handover), or save it as DTensor shards or to a local path"
        )
        raise MismatchError(msg)
    layout = _layout(first, edges, options, codec, many=many)
    if many and (kind == "flat" or _too_small(layout, options, codec)):
        if options.handover:
            layout = _blocks_for(first, views, options, codec)
            return layout, codec, note or _unsplit(layout, part), parties.of_blocks(layout, _shards(layout, views))
        # Without a hand-over these are compressed arrays in stores that take many writers of a file.
        codec, note = None, "stored raw: its shards have no useful common boundary"
        layout = _layout(first, edges, options, None, many=False)
    return layout, codec, note or _unsplit(layout, part), _held(layout, views, rank, span)


def _layout(desc: Desc, edges: list[Box], options: Options, codec: Codec | None, *, many: bool) -> Layout:
    return choose(
        desc.shape,
        dtypes.of(desc.dtype).itemsize,
        edges,
        flat=desc.spread[0] == "flat",
        many=many,
        compressed=codec is not None,
        chunk_bytes=options.chunk_bytes,
        block_bytes=options.block_bytes,
    )


def _too_small(layout: Layout, options: Options, codec: Codec | None) -> bool:
    """Whether blocks that end where shards do are not worth their files."""
    if codec is not None and options.positional:
        return layout.blocks > _MANY_FILES and layout.block_bytes < _TINY_FILE
    return options.handover and layout.blocks >= _FEW_FILES and layout.block_bytes < min(MIB, options.extent_bytes)


def _blocks_for(desc: Desc, views: list[tuple[Desc, list[int]]], options: Options, codec: Codec | None) -> Layout:
    """Blocks that ignore where shards end: about as many as there are shards, but none of less than an extent."""
    shards = Mesh(desc.spread).shards() if desc.spread[0] == "mesh" else len(views)
    size = min(options.block_bytes, max(_nbytes(desc) // shards, options.extent_bytes))
    return _layout(desc, [], replace(options, block_bytes=size), codec, many=True)


def check_split(known: Collection[str], split: Split) -> None:
    """Every pattern has to fit something: what is not split is read slowly, and nobody would know why."""
    for pattern, _ in split:
        if not any(matches(name, pattern) for name in known):
            some = ", ".join(repr(name) for name in sorted(known)[:3])
            raise MismatchError(f"split: no array has a name like {pattern!r}; there are {some or 'none at all'}")


def part_of(names: Sequence[str], shape: tuple[int, ...], split: Split) -> Box | None:
    """The first of the parts that an array of these names is to be stored in; they are cut as torch.chunk cuts."""
    parts = next((parts for pattern, parts in split if any(matches(name, pattern) for name in names)), None)
    if parts is None:
        return None
    if len(parts) > len(shape):
        msg = f"split: {names[0]!r} of shape {list(shape)} cannot be cut into {parts} parts: narrow the pattern"
        raise MismatchError(msg)
    return Box((0,) * len(shape), tuple(-(-n // k) for n, k in zip_longest(shape, parts, fillvalue=1)))


def _unsplit(layout: Layout, part: Box | None) -> str:
    """Why a part that was asked for is not a block of its own."""
    if part is None or all(have <= want for have, want in zip(layout.block[1:], part.stop[1:], strict=True)):
        return ""
    return "stored in rows: it has flat shards, or the parts that it is split into would be too small"


def _edges(name: str, views: list[tuple[Desc, list[int]]]) -> list[Box]:
    """Boxes with the inner edges of all shards."""
    desc = views[0][0]
    if desc.spread[0] == "whole":
        return []
    return Mesh(desc.spread).steps(desc.shape) if desc.spread[0] == "mesh" else _explicit(name, views)


def _shards(layout: Layout, views: list[tuple[Desc, list[int]]]) -> list[parties.Shard]:
    """All shards of an array: what is held and who holds it."""
    desc = views[0][0]
    if desc.spread[0] == "mesh":
        return parties.all_shards(layout, Mesh(desc.spread))
    return [
        (parties.held_ranges(layout, boxes_of(view.spread, desc.shape, ranks[0])), tuple(ranks))
        for view, ranks in views
    ]


def _held(layout: Layout, views: list[tuple[Desc, list[int]]], rank: int, span: int) -> list[tuple[Members, Portion]]:
    """The parties of an array whose shards begin and end where its files allow it."""
    desc = views[0][0]
    if desc.spread[0] == "mesh":
        return parties.of_mesh(layout, Mesh(desc.spread), rank, span)
    return [parties.one_shard(ranges, ranks) for ranges, ranks in _shards(layout, views) if rank in ranks and ranges]


def _explicit(name: str, views: list[tuple[Desc, list[int]]]) -> list[Box]:
    """Boxes named one by one: equal ones are replicas, different ones must not overlap and must fill the array."""
    shape = views[0][0].shape
    volume = 0
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
    if volume != prod(shape):
        msg = f"{name!r}: the ranks together hold {volume} of {prod(shape)} elements; every element needs a holder"
        raise MismatchError(msg)
    return seen


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


def _say(spread: Spread) -> str:
    if spread[0] == "mesh":
        return f"mesh {spread[1]} with {', '.join(spread[3])}"
    return str(spread[0])
