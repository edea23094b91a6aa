"""Who deals out what among whom: ranks that hold the same, or neighbours whose small pieces belong together.

Rules:
- A party is a list of ranks; the portions that it holds together are laid end to end and dealt out in equal shares.
- A portion says which rank holds which of its bytes. Who writes bytes that it does not hold gets them from a rank that
  does: of those that hold them, the one at its own place in the party, so that replicas are asked equally often.
- Every rank that is involved works out the same parties, from the same descriptions.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptfs.mesh import Mesh, boxes_of_intervals
from ckptfs.ranges import Range, intersect, merge

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ckptfs.box import Box
    from ckptfs.grid import Layout

Shard = tuple[list[Range], tuple[int, ...]]  # ranges, and the ranks that hold them
Members = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Portion:
    """Logical ranges of an array that are dealt out, and who holds which of them."""

    ranges: list[Range]
    shards: tuple[Shard, ...]

    @property
    def changes_hands(self) -> bool:
        """Whether somebody may write what it does not hold."""
        return len(self.shards) > 1

    def involves(self, rank: int) -> bool:
        return any(rank in ranks for _, ranks in self.shards)


def one_shard(ranges: list[Range], ranks: tuple[int, ...]) -> tuple[Members, Portion]:
    """The party of ranks that hold the same."""
    return ranks, Portion(ranges, ((ranges, ranks),))


def sources(
    portion: Portion, ranges: list[Range], writer: int, place: int, rank: int
) -> Iterator[tuple[int, list[Range]]]:
    """Whom a writer gets these ranges from, without what it holds itself, as far as `rank` has to do with it.

    `place`: of the writer in its party.
    """
    for held, ranks in portion.shards:
        source = ranks[place % len(ranks)]
        if rank in (writer, source) and writer not in ranks and (wanted := intersect(ranges, held)):
            yield source, wanted


def span_for(sizes: Iterable[int], mesh: Mesh, extent_bytes: int, files: int, most: int = 64) -> int:
    """How many neighbouring shards give their arrays of these sizes into one hand: a power of two, 1 if all is well.

    All is well with at most `files` files a rank, of which each gets an eighth of an extent or more. Else so many that
    together they have four extents of an array, and so few files.
    """
    sizes = list(sizes)
    copies, shards = len(mesh.ranks) // max(1, mesh.shards()), mesh.shards()
    piece = sum(sizes) / max(1, len(sizes) * shards)
    if len(sizes) <= files * copies and piece * 8 >= extent_bytes:
        return 1
    span = 1
    while span < min(most, shards) and (span * piece < 4 * extent_bytes or len(sizes) > files * copies * span):
        span *= 2
    return span


def held_ranges(layout: Layout, boxes: Iterable[Box]) -> list[Range]:
    return merge([r for box in boxes for r in layout.ranges(box)])


def of_mesh(layout: Layout, mesh: Mesh, rank: int, span: int) -> list[tuple[Members, Portion]]:
    """The party of `rank` for an array that is spread over a mesh: `span` neighbouring shards, with all replicas."""
    coordinate = mesh.coordinate(rank)
    if coordinate is None:
        return []
    whole = [count == 1 for count in layout.grid]
    near = mesh.neighbours(coordinate, span, whole) if span > 1 else [coordinate]
    shards = [_shard(layout, mesh, at) for at in near]
    members = tuple(r for _, ranks in shards for r in ranks)
    return [(members, Portion(merge([r for ranges, _ in shards for r in ranges]), tuple(shards)))]


def all_shards(layout: Layout, mesh: Mesh) -> list[Shard]:
    return [_shard(layout, mesh, at) for at in mesh.coordinates()]


def _shard(layout: Layout, mesh: Mesh, coordinate: Sequence[int]) -> Shard:
    held = boxes_of_intervals(mesh.local(layout.shape, coordinate))
    return held_ranges(layout, held), mesh.replicas(coordinate)


def of_blocks(layout: Layout, shards: Sequence[Shard]) -> list[tuple[Members, Portion]]:
    """The parties of blocks that are files of their own, which one rank has to write whole.

    A block goes to one of the ranks that hold most of it, or at least half of what those hold.
    """
    size = layout.block_bytes
    touched: dict[int, list[tuple[list[Range], tuple[int, ...]]]] = defaultdict(list)
    for ranges, ranks in shards:
        inside: dict[int, list[Range]] = defaultdict(list)
        for a, b in ranges:
            for block in range(a // size, (b - 1) // size + 1):
                inside[block].append((max(a, block * size), min(b, (block + 1) * size)))
        for block, of_it in inside.items():
            touched[block].append((of_it, ranks))
    out = []
    for block, holders in sorted(touched.items()):
        amounts = [sum(b - a for a, b in ranges) for ranges, _ in holders]
        chosen = [ranks for amount, (_, ranks) in zip(amounts, holders, strict=True) if 2 * amount >= max(amounts)]
        members = tuple(dict.fromkeys(r for ranks in chosen for r in ranks))
        whole = [(block * size, block * size + layout.used_bytes(block))]
        out.append((members, Portion(whole, tuple(holders))))
    return out
