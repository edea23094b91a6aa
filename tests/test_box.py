"""Boxes and runs against numpy: an array that holds its own offsets says where every element lies."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.box import Box, boxes_of_range, run_shape, runs, split_evenly, strides_of

shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)
solid_shapes = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@st.composite
def boxes_in(draw, shape):
    edges = [sorted((draw(st.integers(0, d)), draw(st.integers(0, d)))) for d in shape]
    return Box(tuple(a for a, _ in edges), tuple(z for _, z in edges))


def offsets(shape):
    """The array whose elements are their own row-major offsets."""
    return np.arange(int(np.prod(shape, dtype=int))).reshape(shape)


@given(shapes)
def test_strides_are_those_of_numpy(shape):
    expected = np.empty(shape, "u1").strides if 0 not in shape else None
    assert expected is None or strides_of(shape) == expected


@given(st.data(), shapes)
def test_runs_are_the_elements_of_the_box_in_order(data, shape):
    box = data.draw(boxes_in(shape))
    found = [at for start, stop in runs(box, shape) for at in range(start, stop)]
    assert found == offsets(shape)[box.slices].ravel().tolist()


@given(st.data(), shapes)
def test_runs_have_one_length_and_none_continues_another(data, shape):
    box = data.draw(boxes_in(shape))
    found = list(runs(box, shape))
    if not found:
        assert box.size == 0
        return
    k, length = run_shape(box, shape)
    assert {stop - start for start, stop in found} == {length}
    assert len(found) == int(np.prod(box.shape[:k], dtype=int))
    assert all(a[1] < b[0] for a, b in pairwise(found))


def test_a_whole_array_is_one_run():
    assert list(runs(Box.whole((3, 4, 5)), (3, 4, 5))) == [(0, 60)]
    assert list(runs(Box.whole(()), ())) == [(0, 1)]
    assert list(runs(Box.whole((1, 1)), (1, 1))) == [(0, 1)]


@given(st.data(), solid_shapes)
def test_a_range_is_boxes_in_order(data, shape):
    array = offsets(shape)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, array.size)] * 2)))
    found = boxes_of_range(start, stop, shape)
    assert [at for box in found for at in array[box.slices].ravel().tolist()] == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)
    assert all(len(list(runs(box, shape))) == 1 for box in found)


def test_a_range_of_an_empty_array_is_nothing():
    assert boxes_of_range(0, 0, (3, 0)) == []


@given(st.data(), shapes)
def test_intersection_and_containment_are_those_of_sets(data, shape):
    a, b = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    array = offsets(shape)
    in_a, in_b = (set(array[box.slices].ravel().tolist()) for box in (a, b))
    both = a & b
    assert set(array[both.slices].ravel().tolist()) == in_a & in_b
    assert both.size == len(in_a & in_b)
    if a.contains(b):
        assert in_b <= in_a
    elif in_b:
        assert not in_b <= in_a


@given(st.data(), shapes)
def test_within_moves_the_origin(data, shape):
    outer = data.draw(boxes_in(shape))
    inner = outer & data.draw(boxes_in(shape))
    array = offsets(shape)
    if inner.size:
        assert (array[outer.slices][inner.within(outer.start).slices] == array[inner.slices]).all()


@given(st.integers(0, 40), st.integers(1, 9))
def test_split_evenly_is_torch_chunk(length, parts):
    pieces = split_evenly(length, parts)
    assert len(pieces) == parts
    step = -(-length // parts)
    expected = [list(range(length))[i * step : (i + 1) * step] for i in range(parts)]
    assert [list(range(a, z)) for a, z in pieces] == expected
