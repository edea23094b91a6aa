"""Lists of byte ranges: cut, joined, compared, and dealt out in equal shares.

A range is (start, stop); lists are ascending and without overlaps.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Range = tuple[int, int]


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
        return cut(start, stop, most if most < grain else most // grain * grain)
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


def deal(
    parts: Sequence[tuple[int, list[Range]]], unit: dict[int, int], shares: int
) -> Iterator[tuple[int, int, list[Range]]]:
    """What `share` gives out, for all shares at once: (share, place in `parts`, ranges)."""
    total = sum(b - a for _, ranges in parts for a, b in ranges)
    at = 0
    for place, (number, ranges) in enumerate(parts):
        size = unit[number]
        which = -1
        taken: list[Range] = []
        for a, b in ranges:
            start = a
            while start < b:
                owner = (at + start - a) * shares // total
                high = -(-total * (owner + 1) // shares)
                stop = b if at + b - a <= high else min(b, _unit_at_or_after(a, a + high - at, size))
                if owner != which and taken:
                    yield which, place, taken
                    taken = []
                which = owner
                taken.append((start, stop))
                start = stop
            at += b - a
        if taken:
            yield which, place, taken


def intersect(one: Sequence[Range], two: Sequence[Range]) -> list[Range]:
    """What is in both."""
    out: list[Range] = []
    i = j = 0
    while i < len(one) and j < len(two):
        low, high = max(one[i][0], two[j][0]), min(one[i][1], two[j][1])
        if low < high:
            out.append((low, high))
        if one[i][1] < two[j][1]:
            i += 1
        else:
            j += 1
    return out
