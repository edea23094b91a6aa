"""What to read for which boxes: a pure function from an array's extents to requests, each stored byte at most once.

A request is one range of one file. Ranges that lie close together are read as one; with `whole` (verify everything)
they grow to whole extents, so that every byte that is used has been checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from ckptfs.box import run_shape, strides_of
from ckptfs.ranges import cut

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ckptfs.box import Box
    from ckptfs.grid import Layout
    from ckptfs.manifest import Param

PAGE_BYTES = 4096  # what a disk and the page cache give at least
GAP_BYTES = 32 << 10  # reading through a gap this small is cheaper than a second request
DENSE_PAGES = 4  # where one page of so many is touched anyway, the page cache may get the others as well
DENSE_FROM_BYTES = 1 << 20  # less is read into a buffer, with all that is between


@dataclass(frozen=True, slots=True)
class Request:
    """Bytes [offset, offset + length) of a file: logical bytes [start, stop), checked by extents [first, last)."""

    file: int
    offset: int
    length: int
    start: int
    stop: int
    first: int
    last: int


def covering(layout: Layout, box: Box, gap_bytes: int = GAP_BYTES) -> Iterator[tuple[int, int]]:
    """Logical ranges that cover a box, ascending within each block; gaps up to `gap_bytes` are read through."""
    size = layout.itemsize
    strides = strides_of(layout.block)
    for block in layout.blocks_of(box):
        inner = (box & layout.block_box(block)).within(layout.block_origin(block))
        k, n = run_shape(inner, layout.block)
        counts = inner.shape
        while k > 0 and (strides[k - 1] - n) * size <= gap_bytes:
            n += (counts[k - 1] - 1) * strides[k - 1]
            k -= 1
        starts = np.array([sum(a * s for a, s in zip(inner.start, strides, strict=True))], dtype=np.int64)
        for d in range(k):
            starts = (starts[:, None] + np.arange(counts[d], dtype=np.int64) * strides[d]).reshape(-1)
        base = block * layout.block_bytes
        for at in starts.tolist():
            yield base + at * size, base + (at + n) * size


@dataclass(frozen=True, slots=True)
class Comb:
    """A box of one block as equal ranges of the block's bytes, which may have gaps inside."""

    length: int
    dims: int  # each range is one index of this many leading dimensions
    run_bytes: int  # of every contiguous run inside
    bridged_bytes: int  # in gaps, beyond the pages that are touched anyway; all ranges together
    passed_bytes: int  # the same of gaps between runs so dense that the page cache gets all of it; not counted above


def comb(layout: Layout, inner: Box, allowance_bytes: int, *, passing: bool = False) -> Comb:
    """How to read a (not empty) box of a block from a file: gaps are read through while they are few and small.

    A gap under a page costs nothing: its pages are touched anyway. Of larger ones, up to GAP_BYTES each, what is more
    than a page is counted, and at most `allowance_bytes` of that are read through; else every run is on its own.

    passing: ranges are brought into the page cache, and only their runs copied from there. Then gaps that small cost
    nothing either where a page of every DENSE_PAGES is touched anyway: the disk gives all pages sooner than some of
    them one by one, and the machine's other ranks find theirs.
    """
    strides = [s * layout.itemsize for s in strides_of(layout.block)]
    counts = inner.shape
    k, n = run_shape(inner, layout.block)
    length = run_bytes = n * layout.itemsize
    split, bridged, passed = k, 0, 0
    touched = length + PAGE_BYTES - 1  # bytes of the pages of one range, wherever it begins
    for d in range(k - 1, -1, -1):
        gap = strides[d] - length if counts[d] > 1 else 0
        more = max(0, gap - PAGE_BYTES + 1) * (counts[d] - 1) * prod(counts[:d])
        if gap > GAP_BYTES:
            break
        dense = touched * DENSE_PAGES >= strides[d] and strides[d] * counts[d] >= DENSE_FROM_BYTES
        if bridged + more <= allowance_bytes:
            bridged += more
        elif passing and dense:
            passed += more
        else:
            break
        length += (counts[d] - 1) * strides[d]
        touched = min(touched * counts[d], length + PAGE_BYTES - 1)
        split = d
    return Comb(length, split, run_bytes, bridged, passed)


def starts_of(layout: Layout, inner: Box, dims: int) -> list[int]:
    """Where in a block the ranges of a comb of this box begin."""
    strides = [s * layout.itemsize for s in strides_of(layout.block)]
    starts = np.array([sum(a * s for a, s in zip(inner.start, strides, strict=True))], dtype=np.int64)
    for d in range(dims):
        starts = (starts[:, None] + np.arange(inner.shape[d], dtype=np.int64) * strides[d]).reshape(-1)
    found: list[int] = starts.tolist()
    return found


def union(ranges: Iterable[tuple[int, int]], gap_bytes: int = 0) -> list[tuple[int, int]]:
    """Sorted and joined where they overlap, touch, or nearly do."""
    out: list[tuple[int, int]] = []
    for a, b in sorted(ranges):
        if out and a <= out[-1][1] + gap_bytes:
            if b > out[-1][1]:
                out[-1] = (out[-1][0], b)
        else:
            out.append((a, b))
    return out


def requests(param: Param, boxes: Iterable[Box], *, whole: bool, io_bytes: int) -> list[Request]:
    """Everything to read of an array for these boxes."""
    layout = param.layout
    wanted = union((r for box in boxes for r in covering(layout, box)), GAP_BYTES)
    if not wanted:
        return []
    table = param.extents
    starts, stops = table.start, table.stop
    if whole or param.codec is not None:
        touched = [
            (int(np.searchsorted(stops, a, side="right")), int(np.searchsorted(starts, b, side="left")))
            for a, b in wanted
        ]
        out: list[Request] = []
        for first, last in union(touched):
            out += requests_of_extents(param, first, last, io_bytes)
        return out
    out = []
    for a, b in wanted:
        for low, high in _by_block(layout, a, b):
            for x, y in cut(low, high, io_bytes):
                first = int(np.searchsorted(starts, x, side="left"))
                last = max(first, int(np.searchsorted(stops, y, side="right")))
                file, base = divmod(x, layout.block_bytes) if layout.many else (0, x)
                out.append(Request(file, base, y - x, x, y, first, last))
    return out


def _by_block(layout: Layout, start: int, stop: int) -> list[tuple[int, int]]:
    """A range cut where one file ends, without the padding that files do not store."""
    if not layout.many:
        return [(start, stop)]
    out = []
    for low, high in cut(start, stop, layout.block_bytes):
        block = low // layout.block_bytes
        end = min(high, block * layout.block_bytes + layout.used_bytes(block))
        if low < end:
            out.append((low, end))
    return out


def requests_of_extents(param: Param, first: int, last: int, io_bytes: int) -> Iterator[Request]:
    """Extents [first, last) as requests of at most `io_bytes` (or one extent), each in one file.

    Compressed extents go one by one: each is decoded on its own.
    """
    table = param.extents
    at = first
    while at < last:
        file, offset, end = int(table.file[at]), int(table.offset[at]), at + 1
        length = int(table.length[at])
        while (
            param.codec is None
            and end < last
            and table.file[end] == file
            and length + int(table.length[end]) <= io_bytes
        ):
            length += int(table.length[end])
            end += 1
        yield Request(file, offset, length, int(table.start[at]), int(table.stop[end - 1]), at, end)
        at = end
