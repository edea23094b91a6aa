"""Boxes: rectangular parts of an array, and the runs of elements that they are made of.

Pure integers. Two directions matter and both live here: a box is a set of contiguous runs of the
row-major array (`runs`), and a contiguous run of the row-major array is a few boxes (`boxes_of_range`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclass(frozen=True, slots=True)
class Box:
    """The elements with start[d] <= index[d] < stop[d] in every dimension."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        # A list first: a generator would be entered once for each dimension.
        return tuple([max(0, b - a) for a, b in zip(self.start, self.stop, strict=True)])

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def __and__(self, other: Box) -> Box:
        start = tuple(map(max, self.start, other.start))
        stop = tuple(max(a, b) for a, b in zip(start, map(min, self.stop, other.stop), strict=True))
        return Box(start, stop)

    def within(self, origin: Sequence[int]) -> Box:
        """The same box seen from `origin`."""
        return Box(
            tuple(a - o for a, o in zip(self.start, origin, strict=True)),
            tuple(b - o for b, o in zip(self.stop, origin, strict=True)),
        )

    def contains(self, other: Box) -> bool:
        return all(a <= c and d <= b for a, b, c, d in zip(self.start, self.stop, other.start, other.stop, strict=True))


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, in elements."""
    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * shape[d + 1]
    return tuple(strides)


def run_shape(box: Box, shape: Sequence[int]) -> tuple[int, int]:
    """(k, n): the box is one run of n elements for every index of its first k dimensions."""
    k = len(shape)
    n = 1
    while k > 0:
        n *= box.stop[k - 1] - box.start[k - 1]
        k -= 1
        # A dimension that the box does not cover whole ends the run, whatever stands left of it.
        if box.stop[k] - box.start[k] != shape[k]:
            break
    # Leading dimensions of length one repeat nothing.
    while k > 0 and all(box.stop[d] - box.start[d] == 1 for d in range(k)):
        k = 0
    return k, n


def runs(box: Box, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The box as maximal-by-construction runs (start, stop) of the row-major array, ascending."""
    if box.size == 0:
        return
    k, n = run_shape(box, shape)
    strides = strides_of(shape)
    base = sum([a * s for a, s in zip(box.start, strides, strict=True)])
    counts = [box.stop[d] - box.start[d] for d in range(k)]
    index = [0] * k
    while True:
        at = base + sum(i * strides[d] for d, i in enumerate(index))
        yield at, at + n
        d = k - 1
        while d >= 0:
            index[d] += 1
            if index[d] < counts[d]:
                break
            index[d] = 0
            d -= 1
        if d < 0:
            return


def boxes_of_range(start: int, stop: int, shape: Sequence[int]) -> list[Box]:
    """The elements [start, stop) of the row-major array as at most 2n-1 boxes, in order."""
    if start >= stop:
        return []
    n = len(shape)
    if n == 0:
        return [Box((), ())]
    if n == 1:
        return [Box((start,), (stop,))]
    row = prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    boxes: list[Box] = []

    def part(i: int, a: int, b: int) -> None:
        inner = boxes_of_range(a, b, shape[1:])
        boxes.extend(Box((i, *box.start), (i + 1, *box.stop)) for box in inner)

    if first == last:
        part(first, head, tail)
        return boxes
    if head:
        part(first, head, row)
        first += 1
    if first < last:
        boxes.append(Box((first,) + (0,) * (n - 1), (last, *shape[1:])))
    if tail:
        part(last, 0, tail)
    return boxes


def split_evenly(length: int, parts: int) -> list[tuple[int, int]]:
    """torch.chunk's rule: equal pieces of ceil(length / parts), the last ones shorter or empty."""
    step = -(-length // parts) if parts else 0
    return [(min(i * step, length), min((i + 1) * step, length)) for i in range(parts)]
