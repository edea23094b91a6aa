"""Layouts against slow, obvious twins: one element, one chunk, one byte at a time."""

from itertools import pairwise, product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs.box import Box
from ckptfs.errors import FormatError
from ckptfs.grid import CHUNK_BYTES, MAX_CHUNKS, Layout, choose

solid_shapes = st.lists(st.integers(1, 9), max_size=4).map(tuple).filter(lambda shape: prod(shape) <= 1500)
shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple).filter(lambda shape: prod(shape) <= 1500)
itemsizes = st.sampled_from([1, 2, 4, 8])


@st.composite
def partitions(draw, shape):
    """A grid of boxes that covers the array, as ranks would hold it; even and uneven cuts, empty boxes too."""
    edges = []
    for length in shape:
        if draw(st.booleans()) and length:
            parts = draw(st.integers(1, 4))
            step = -(-length // parts)
            edges.append([min(i * step, length) for i in range(parts + 1)])
        else:
            edges.append(sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=2))}))
    cuts = [list(pairwise(edge)) or [(0, 0)] for edge in edges]
    return [Box(tuple(a for a, _ in cut), tuple(z for _, z in cut)) for cut in product(*cuts)]


@st.composite
def chosen(draw):
    """(layout, boxes) as `choose` makes them."""
    shape = draw(shapes)
    boxes = draw(partitions(shape))
    many = draw(st.booleans())
    layout = choose(
        shape,
        draw(itemsizes),
        boxes,
        many=many,
        compressed=many and draw(st.booleans()),
        chunk_bytes=draw(st.sampled_from([16, 64, 1 << 20])),
        block_bytes=draw(st.sampled_from([64, 256, 1 << 20])),
    )
    return layout, boxes


@st.composite
def legal(draw):
    """Any legal layout, also ones that `choose` never makes, and boxes."""
    shape = draw(solid_shapes)
    many = draw(st.booleans())
    block = [draw(st.integers(1, d + 2)) for d in shape]
    if block and not many:
        block[0] = shape[0] + draw(st.integers(0, 3))
    free = draw(st.integers(0, len(shape)))
    chunk = [1] * min(free, len(shape)) + block[free:]
    if free < len(shape):
        chunk[free] = draw(st.sampled_from([c for c in range(1, block[free] + 1) if block[free] % c == 0]))
    layout = Layout(shape, draw(itemsizes), tuple(block), tuple(chunk), many=many)
    return layout, draw(partitions(shape))


layouts = st.one_of(chosen(), legal())


# --- twins ---------------------------------------------------------------------------------------------------


def ravel(index, shape):
    at = 0
    for i, d in zip(index, shape, strict=True):
        at = at * d + i
    return at


def logical_element(layout, index):
    """Where an element lies, in elements of the logical space."""
    block = ravel([i // b for i, b in zip(index, layout.block, strict=True)], layout.grid)
    return block * prod(layout.block) + ravel([i % b for i, b in zip(index, layout.block, strict=True)], layout.block)


def elements(box):
    return product(*[range(a, z) for a, z in zip(box.start, box.stop, strict=True)])


def padded_array(layout):
    """Numbered elements (from 1) in whole blocks; padding is 0."""
    array = np.arange(1, prod(layout.shape) + 1, dtype=np.int64).reshape(layout.shape)
    padding = [(0, g * b - d) for g, b, d in zip(layout.grid, layout.block, layout.shape, strict=True)]
    return array, np.pad(array, padding) if layout.shape else array


def logical_image(layout):
    """The whole logical space, element numbers in place."""
    image = np.zeros(layout.logical_bytes // layout.itemsize, np.int64)
    for number, index in enumerate(elements(Box.whole(layout.shape)), 1):
        image[logical_element(layout, index)] = number
    return image


def used_mask(layout):
    one = np.arange(layout.block_bytes)
    masks = [one < layout.used_bytes(block) for block in range(layout.blocks)]
    return np.concatenate(masks) if masks else np.zeros(0, bool)


# --- extents -------------------------------------------------------------------------------------------------


@given(layouts, st.integers(1, 200))
def test_extents_are_as_long_as_allowed_or_a_third_of_that(made, most):
    layout, _ = made
    allowed = max(layout.itemsize, most // layout.itemsize * layout.itemsize)  # whole elements
    assert allowed / 3 < layout.extent_bytes(most) <= allowed
    assert layout.extent_bytes(most) % layout.itemsize == 0


@given(
    rows=st.integers(1, 2000),
    columns=st.integers(1, 300),
    itemsize=itemsizes,
    most=st.integers(100, 5000).map(lambda n: n * 8),
)
def test_equal_shares_of_the_rows_begin_where_extents_do(rows, columns, itemsize, most):
    layout = choose((rows, columns), itemsize)
    size, row_bytes = layout.extent_bytes(most), columns * itemsize
    shares = [rows // parts * row_bytes for parts in (2**i for i in range(12)) if rows % parts == 0]
    whole = layout.logical_bytes
    if whole <= most or (rows % 2 and row_bytes <= most):
        assert size == most
    elif min(shares) <= most:  # equal parts of the rows are small enough to be extents
        assert all(share % size == 0 for share in shares if share > most)
        assert size in shares or size % min(shares) == 0
    elif size != most:  # else no equal parts of whole elements are of about that length
        assert min(shares) % size == 0
        assert size % itemsize == 0


@pytest.mark.parametrize(
    "shape", [(1088, 1088), (2880, 1088), (1088, 2880), (4096, 14336), (34816, 1088), (128256, 4096), (152064, 3584)]
)
def test_two_to_eight_ranks_share_no_extent_of_a_usual_weight(shape):
    layout = choose(shape, 4)
    for ranks in (2, 4, 8):
        assert layout.nbytes // ranks % layout.extent_bytes(1 << 20) == 0


# --- ranges and parts ----------------------------------------------------------------------------------------


@given(layouts)
def test_every_stored_byte_has_exactly_one_owner(made):
    layout, boxes = made
    owners = np.zeros(layout.logical_bytes, int)
    for box in boxes:
        for start, stop in layout.ranges(box):
            owners[start:stop] += 1
    assert (owners == used_mask(layout)).all()


@given(layouts)
def test_the_ranges_of_a_box_hold_its_elements_and_no_others(made):
    layout, boxes = made
    image = logical_image(layout)
    for box in boxes:
        ranges = layout.ranges(box)
        assert ranges == sorted(ranges)
        assert all(a < z for a, z in ranges)
        assert all(before[1] < after[0] for before, after in pairwise(ranges)), "adjacent ranges are merged"
        held = {int(n) for a, z in ranges for n in image[a // layout.itemsize : z // layout.itemsize] if n}
        full = padded_array(layout)[0]
        assert held == set(full[box.slices].ravel().tolist())


@given(layouts)
def test_parts_of_ranges_say_what_the_bytes_are(made):
    layout, boxes = made
    image, (array, _) = logical_image(layout), padded_array(layout)
    for box in boxes:
        for start, stop in layout.ranges(box):
            values = read_parts(layout, array, start, stop)
            assert (values == image[start // layout.itemsize : stop // layout.itemsize]).all()


@given(layouts, st.data())
def test_parts_of_any_range_of_elements(made, data):
    layout, _ = made
    image, (array, _) = logical_image(layout), padded_array(layout)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, image.size)] * 2)))
    values = read_parts(layout, array, start * layout.itemsize, stop * layout.itemsize)
    assert (values == image[start:stop]).all()


def read_parts(layout, array, start, stop):
    """The elements of a logical range, taken from the array as `parts` directs."""
    values = np.full((stop - start) // layout.itemsize, -1)
    end = 0
    for offset, valid, padded in layout.parts(start, stop):
        assert offset == end
        assert valid.start == padded.start
        assert Box.whole(layout.shape).contains(valid) or valid.size == 0
        piece = np.zeros(padded.shape, int)
        if valid.size:
            piece[valid.within(padded.start).slices] = array[valid.slices]
        end = offset + piece.size * layout.itemsize
        values[offset // layout.itemsize : end // layout.itemsize] = piece.ravel()
    assert end == stop - start
    return values


# --- chunks and files ----------------------------------------------------------------------------------------


@given(layouts)
def test_index_entries_name_the_chunks_that_zarr_expects(made):
    """Every inner chunk, cut from the padded array by numpy, lies where the index says; unused ones are missing."""
    layout, _ = made
    image, (_, padded) = logical_image(layout), padded_array(layout)
    outer = layout.block if layout.many else padded.shape
    block_elements = prod(layout.block)
    for file in range(layout.files):
        origin = layout.block_origin(file) if layout.many else (0,) * len(outer)
        stored = image[file * block_elements : (file + 1) * block_elements] if layout.many else image
        entries = iter(layout.index_entries(file))
        for index in product(*[range(o // c) for o, c in zip(outer, layout.chunk, strict=True)]):
            slices = tuple(
                slice(o + i * c, o + (i + 1) * c) for o, i, c in zip(origin, index, layout.chunk, strict=True)
            )
            offset, length = next(entries)
            if offset == -1:
                assert length == -1
                assert not padded[slices].any()
                continue
            at = offset // layout.itemsize
            assert length == layout.chunk_bytes
            assert (stored[at : at + length // layout.itemsize] == padded[slices].ravel()).all()
        assert next(entries, None) is None


@given(layouts)
def test_chunks_of_a_file_tile_its_data(made):
    layout, _ = made
    for file in range(layout.files):
        entries = sorted(entry for entry in layout.index_entries(file) if entry != (-1, -1))
        end = 0
        for offset, length in entries:
            assert offset == end
            end += length
        assert end + layout.index_bytes == layout.file_bytes(file)
        assert layout.index_bytes == (16 * len(layout.index_entries(file)) + 4 if layout.sharded else 0)


@given(legal(), st.data())
def test_index_entries_of_compressed_chunks_add_up(made, data):
    layout, _ = made
    layout = Layout(layout.shape, layout.itemsize, layout.block, layout.chunk, many=True, compressed=True)
    for file in range(layout.files):
        used = [n for n in range(layout.chunks_per_block) if layout.chunk_used(file, n)]
        lengths = [data.draw(st.integers(1, 99)) for _ in used]
        expected = [
            (sum(lengths[:n]), lengths[n]) if n < len(used) else (-1, -1) for n in range(layout.chunks_per_block)
        ]
        assert layout.index_entries(file, lengths) == expected


@given(layouts)
def test_blocks_of_a_box_are_those_it_shares_elements_with(made):
    layout, boxes = made
    for box in boxes:
        expected = [b for b in range(layout.blocks) if (layout.block_box(b) & box).size]
        assert list(layout.blocks_of(box)) == expected


@given(layouts)
def test_keys_are_zarr_chunk_keys(made):
    layout, _ = made
    keys = [layout.key(file) for file in range(layout.files)]
    if layout.many:
        assert keys == [".".join(["c", *map(str, i)]) for i in np.ndindex(layout.grid)][: layout.files]
    else:
        assert keys == [".".join(["c"] + ["0"] * len(layout.shape))][: layout.files]


@given(layouts)
def test_row_major_means_logical_offsets_of_the_plain_array(made):
    layout, _ = made
    expected = np.arange(1, prod(layout.shape) + 1)
    image = logical_image(layout)
    if layout.row_major:
        assert (image[: expected.size] == expected).all()
    if layout.exact:
        assert layout.file_bytes() == layout.nbytes
        assert image.tolist() == expected.tolist()


# --- choose --------------------------------------------------------------------------------------------------


@given(chosen())
def test_an_object_has_one_writer(made):
    layout, boxes = made
    if layout.many:
        for block in range(layout.blocks):
            assert sum((layout.block_box(block) & box).size > 0 for box in boxes) <= 1


@given(st.integers(1, 8), st.integers(1, 6), st.integers(0, 2), itemsizes)
def test_even_shards_of_any_dimension_are_one_range_each(ranks, width, dim, itemsize):
    shape = [5, 6, 7]
    shape[dim] = ranks * width
    boxes = []
    for rank in range(ranks):
        start, stop = [0, 0, 0], list(shape)
        start[dim], stop[dim] = rank * width, (rank + 1) * width
        boxes.append(Box(tuple(start), tuple(stop)))
    layout = choose(shape, itemsize, boxes)
    assert all(len(layout.ranges(box)) == 1 for box in boxes)


@given(st.integers(2, 8), st.integers(1, 500))
@settings(max_examples=50)
def test_rows_and_flat_shards_keep_the_row_major_file(ranks, rows):
    boxes = [Box((r * rows // ranks, 0), ((r + 1) * rows // ranks, 64)) for r in range(ranks)]
    assert choose((rows, 64), 4, boxes, chunk_bytes=4096).row_major
    columns = [Box((0, 0), (rows, 32)), Box((0, 32), (rows, 64))]
    assert choose((rows, 64), 4, columns, flat=True, chunk_bytes=4096).row_major


@pytest.mark.parametrize(
    "shape",
    [
        (32000, 4096),
        (50257, 768),
        (1_000_003, 3),
        (7, 10_000_019),
        (1, 1, 30_000_001),
        (128, 4096, 14336),
        (151_936, 8192),
        (104_729, 1),
        (1 << 33,),
        (3, 1, 1, 40_000_003),
    ],
)
@pytest.mark.parametrize("many", [False, True])
def test_sizes_of_real_and_awkward_shapes_are_handy(shape, many):
    layout = choose(shape, 4, many=many)
    assert layout.chunk_bytes <= 8 * CHUNK_BYTES or prod(layout.chunk) == layout.block[-1]
    assert layout.blocks * layout.chunks_per_block <= MAX_CHUNKS
    padding = layout.logical_bytes - layout.nbytes
    assert padding <= layout.nbytes // 100 + layout.block_bytes * many + (1 << 20)


def test_tensor_parallel_columns_are_panels():
    boxes = [Box((0, r * 1024), (4096, (r + 1) * 1024)) for r in range(4)]
    layout = choose((4096, 4096), 2, boxes)
    assert layout.block == (4096, 1024)
    assert layout.grid == (1, 4)
    assert [layout.ranges(box) for box in boxes] == [[(r << 23, (r + 1) << 23)] for r in range(4)]


def test_panels_too_narrow_to_be_worth_it_stay_row_major():
    boxes = [Box((0, c), (4, c + 1)) for c in range(9000)]
    assert choose((4, 9000), 4, boxes).row_major


def test_a_small_array_is_exactly_its_file():
    layout = choose((300, 7), 4)
    assert layout.exact
    assert layout.file_bytes() == 300 * 7 * 4


def test_a_padded_file_is_not_exactly_the_tensor():
    layout = Layout((1,), 1, (2,), (2,))
    assert not layout.sharded
    assert not layout.exact


def test_an_empty_array_has_no_file_and_a_scalar_one():
    assert choose((3, 0), 4).files == 0
    assert choose((), 4).files == 1
    assert choose((), 4).key() == "c"


@pytest.mark.parametrize(
    ("shape", "block", "chunk", "many"),
    [
        pytest.param((4, 4), (4,), (4,), False, id="dimensions"),
        pytest.param((4, -4), (4, 4), (4, 4), False, id="negative size"),
        pytest.param((4, 4), (4, 0), (4, 1), False, id="empty block"),
        pytest.param((4, 4), (4, 4), (3, 4), False, id="chunk does not divide"),
        pytest.param((4, 4), (2, 4), (2, 4), False, id="one file, several bands"),
        pytest.param((4, 4), (4, 4), (2, 2), False, id="chunk is not rows"),
    ],
)
def test_an_illegal_layout_does_not_exist(shape, block, chunk, many):
    with pytest.raises(FormatError):
        Layout(shape, 4, block, chunk, many)
