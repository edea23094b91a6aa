"""What is read for a box: everything it needs, each extent at most once, little else; against slow twins."""

from itertools import pairwise
from math import prod

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs import dtypes
from ckptfs.box import Box
from ckptfs.codec import Codec
from ckptfs.grid import choose
from ckptfs.loadplan import covering, requests, union
from ckptfs.manifest import HASH_BYTES, Param, run_lengths
from ckptfs.ranges import cut


@st.composite
def boxes_in(draw, shape):
    pairs = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))


@st.composite
def params(draw):
    """A stored array of any geometry: one file or many, panels, compressed, extents of any writer's cut."""
    shape = draw(st.lists(st.integers(0, 9), max_size=4).map(tuple).filter(lambda s: prod(s) <= 1000))
    dtype = dtypes.BY_NAME[draw(st.sampled_from(["uint8", "float32", "complex128"]))]
    codec = Codec.spec("zstd", dtype) if prod(shape) and draw(st.integers(0, 3)) == 0 else None
    many = codec is not None or (prod(shape) > 0 and draw(st.booleans()))
    layout = choose(
        shape,
        dtype.itemsize,
        draw(st.lists(boxes_in(shape), max_size=2)),
        many=many,
        compressed=codec is not None,
        chunk_bytes=draw(st.sampled_from([16, 64, 1024])),
        block_bytes=draw(st.sampled_from([32, 256, 4096])),
    )
    lengths = []
    if codec is not None:
        for block in range(layout.blocks):
            lengths += [draw(st.integers(1, 9)) for _ in range(layout.used_bytes(block) // layout.chunk_bytes)]
    elif layout.nbytes:
        sizes = [layout.used_bytes(b) for b in range(layout.blocks)] if many else [layout.logical_bytes]
        for size in sizes:
            edges = sorted(
                {0, size, *(draw(st.integers(0, size // dtype.itemsize)) * dtype.itemsize for _ in range(2))}
            )
            for a, b in pairwise(edges):
                lengths += [y - x for x, y in cut(a, b, 16 * draw(st.integers(1, 5)))]
    return Param("w", "w", dtype, layout, codec, run_lengths(lengths), bytes(HASH_BYTES * len(lengths)))


def needed(layout, box):
    """The logical offsets of a box's bytes, element by element."""
    out = set()
    for index in np.ndindex(*box.shape):
        at = tuple(i + a for i, a in zip(index, box.start, strict=True))
        block = 0
        inside = 0
        for i, b, n in zip(at, layout.block, layout.grid, strict=True):
            block = block * n + i // b
            inside = inside * b + i % b
        base = block * layout.block_bytes + inside * layout.itemsize
        out.update(range(base, base + layout.itemsize))
    return out


@settings(max_examples=200)
@given(params(), st.data())
def test_covering_has_every_byte_of_a_box_and_no_large_gap(param, data):
    layout = param.layout
    box = data.draw(boxes_in(layout.shape))
    gap = data.draw(st.sampled_from([0, 8, 64]))
    ranges = list(covering(layout, box, gap))
    covered = {i for a, b in ranges for i in range(a, b)}
    want = needed(layout, box)
    assert want <= covered
    if gap == 0:
        assert covered == want
        assert len(covered) == sum(b - a for a, b in ranges)
    for at in covered - want:  # every byte too many lies in a gap that is small enough
        low = max((i for i in want if i < at), default=at - gap - 1)
        high = min((i for i in want if i > at), default=at + gap + 1)
        assert high - low - 1 <= gap


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=8), st.integers(0, 5))
def test_union(pairs, gap):
    ranges = [(a, a + n) for a, n in pairs]
    found = union(ranges, gap)
    covered = {i for a, b in found for i in range(a, b)}
    want = {i for a, b in ranges for i in range(a, b)}
    assert want <= covered
    assert all(b + gap < c for (_, b), (c, _) in pairwise(found))
    if gap == 0:
        assert covered == want


@settings(max_examples=300)
@given(params(), st.data())
def test_requests_read_each_extent_once_and_all_that_is_needed(param, data):
    layout, table = param.layout, param.extents
    boxes = data.draw(st.lists(boxes_in(layout.shape), min_size=1, max_size=3))
    whole = data.draw(st.booleans())
    io_bytes = data.draw(st.sampled_from([16, 48, 1024]))
    found = requests(param, boxes, whole=whole, io_bytes=io_bytes)
    want = set().union(*(needed(layout, box) for box in boxes))
    read, stored = set(), set()
    for one in found:
        logical, places = set(range(one.start, one.stop)), {(one.file, one.offset + i) for i in range(one.length)}
        assert not read & logical, "read twice"
        assert not stored & places, "read twice"
        read |= logical
        stored |= places
        if param.codec is None:
            assert one.length == one.stop - one.start
            base = one.file * layout.block_bytes if layout.many else 0
            assert one.start == base + one.offset
        for number in range(one.first, one.last):  # what it says it can check lies whole in it
            assert int(table.file[number]) == one.file
            assert one.offset <= int(table.offset[number])
            assert int(table.offset[number] + table.length[number]) <= one.offset + one.length
        one_extent = one.last - one.first == 1
        assert one.length <= io_bytes or one_extent
    assert want <= read
    if whole or param.codec is not None:
        checked = [n for one in found for n in range(one.first, one.last)]
        assert len(checked) == len(set(checked))
        for number in range(param.extent_count):
            span = set(range(int(table.start[number]), int(table.stop[number])))
            assert not (span & want) or number in checked, "used, but not checked"
    assert bool(found) == bool(want)
