"""Which part of an array each rank holds: device meshes with placements, flat ranges, boxes.

A spread is plain data, so that ranks can tell each other; nothing here asks torch. Cuts are torch's own: `torch.chunk`.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from math import gcd, prod
from typing import TYPE_CHECKING, Any

from ckptfs.box import Box, boxes_of_range, split_evenly

if TYPE_CHECKING:
    from collections.abc import Sequence

# How an array is spread over ranks (the `spread` of a description), as plain data:
#   ["whole"]                      every rank that names it has all of it
#   ["mesh", shape, ranks, places] a device mesh; places: "R", "S<dim>" or "SS<dim>:<split factor>" per mesh dimension
#   ["flat", start, stop]          this rank has elements [start, stop) of the row-major array
#   ["boxes", [[start, stop], …]]  this rank has these boxes
Spread = list[Any]


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
            step = -(-(high - low) // parts)
            taken += _window(held, min(low + which * step, high), min(low + (which + 1) * step, high))
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

    def shards(self) -> int:
        """How many different parts it makes of an array."""
        return prod(n for n, p in zip(self.shape, self.places, strict=True) if p is not None)

    def holders(self, shape: Sequence[int]) -> int:
        """How many of the shards are not empty, about: a short dimension leaves some without anything."""
        count = 1
        for d, length in enumerate(shape):
            parts = prod(n for n, p in zip(self.shape, self.places, strict=True) if p is not None and p[0] == d)
            count *= -(-length // -(-length // parts)) if length else 1
        return count

    def coordinates(self) -> list[tuple[int, ...]]:
        """One coordinate of each shard."""
        return [*product(*(range(1 if p is None else n) for n, p in zip(self.shape, self.places, strict=True)))]

    def neighbours(self, coordinate: Sequence[int], most: int, whole: Sequence[bool]) -> list[tuple[int, ...]]:
        """The coordinates of up to `most` shards that lie side by side, this one among them; the same for each of them.

        `whole`: the dimensions of the array that its blocks are not cut in; shards of these lie side by side.
        """
        finest = sorted(
            (m for m, p in enumerate(self.places) if p is not None),
            key=lambda m: (whole[self._dim(m)], self._dim(m), self._factor(m) > 1, m),
            reverse=True,
        )
        sides: list[tuple[int, ...]] = [(c,) for c in coordinate]
        for m in finest:
            taken = min(most, self.shape[m])
            first = coordinate[m] // taken * taken
            sides[m] = tuple(range(first, min(first + taken, self.shape[m])))
            most //= taken
        return [*product(*sides)]

    def _dim(self, m: int) -> int:
        placed = self.places[m]
        return placed[0] if placed is not None else -1

    def _factor(self, m: int) -> int:
        placed = self.places[m]
        return placed[1] if placed is not None else 1

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
