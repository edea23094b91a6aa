"""Maps against slow, obvious twins: every operation, the built-in maps, and a real transformers model."""

from __future__ import annotations

import copy
import json
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptfs import expr, maps, rules
from ckptfs.box import Box
from ckptfs.errors import CkptError, FormatError, MismatchError, NotFoundError
from ckptfs.expr import Source

# --- helpers: a dictionary of arrays as the store --------------------------------------------------------------


class Store:
    """Arrays by name, and which of their elements were asked for."""

    def __init__(self, arrays):
        self.arrays = arrays
        self.elements = 0
        self.names = set()

    def fetch(self, name, box):
        self.elements += box.size
        self.names.add(name)
        return self.arrays[name][box.slices]

    @property
    def described(self):
        return {name: (a.shape, a.dtype.name) for name, a in self.arrays.items()}

    def source(self, name):
        return Source(name, *self.described[name])


def numbered(*shape, start=0, dtype="int64"):
    return (np.arange(int(np.prod(shape)), dtype=dtype) + start).reshape(shape)


def a_map(*rule_list, **more):
    return rules.parse({"ckptfs_map": 1, "name": "test", "rules": list(rule_list), **more})


def mapped(arrays, *rule_list, variables=None, **more):
    store = Store(arrays)
    return rules.compile_map(a_map(*rule_list, **more), store.described, variables), store


def apply_all(map_, arrays, variables=None):
    store = Store(arrays)
    view = rules.compile_map(map_, store.described, variables)
    return {name: e.read(None, store.fetch) for name, e in view.items()}


@st.composite
def boxes(draw, shape):
    start, stop = [], []
    for n in shape:
        a = draw(st.integers(0, n))
        start.append(a)
        stop.append(draw(st.integers(a, n)))
    return Box(tuple(start), tuple(stop))


def check(expression, expected, box, store, bound=1):
    """The box has numpy's values, `sources` tells what is read, and no more than `bound` times the box is read."""
    assert expression.shape == expected.shape
    assert expression.dtype == expected.dtype.name
    store.elements = 0
    got = expression.read(box, store.fetch)
    np.testing.assert_array_equal(got, expected[box.slices])
    assert sum(b.size for _, b in expression.sources(box)) == store.elements
    assert store.elements <= bound * box.size
    # The same into a strided destination.
    out = np.zeros((*box.shape, 2), expected.dtype)[..., 0]
    plan = expression.plan(box, out)
    for piece in reversed(plan.pieces):  # any order
        piece.into[...] = store.fetch(piece.source, piece.box)
    plan.finish()
    np.testing.assert_array_equal(out, expected[box.slices])


# --- every operation, random boxes ------------------------------------------------------------------------------

dims = st.integers(0, 5)
shapes = st.lists(dims, min_size=1, max_size=4).map(tuple)


@given(st.data(), shapes)
def test_a_source_reads_the_box(data, shape):
    store = Store({"a": numbered(*shape)})
    check(store.source("a"), store.arrays["a"], data.draw(boxes(shape)), store)


@given(st.data(), shapes)
def test_split_reads_exactly_its_part(data, shape):
    store = Store({"a": numbered(*shape)})
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    edge = data.draw(st.integers(0, shape[dim]))
    parts = expr.split(store.source("a"), dim, [edge, shape[dim] - edge])
    for part, expected in zip(parts, np.split(store.arrays["a"], [edge], axis=dim), strict=True):
        check(part, expected, data.draw(boxes(expected.shape)), store)


@given(st.data(), shapes, st.integers(1, 4))
def test_concat_reads_exactly_the_parts_touched(data, shape, count):
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    arrays = {}
    for i in range(count):
        own = list(shape)
        own[dim] = data.draw(dims)
        arrays[str(i)] = numbered(*own, start=1000 * i)
    store = Store(arrays)
    expected = np.concatenate(list(arrays.values()), axis=dim)
    check(expr.concat([store.source(n) for n in arrays], dim), expected, data.draw(boxes(expected.shape)), store)


@given(st.data(), st.lists(dims, max_size=3).map(tuple), st.integers(1, 4))
def test_stack_and_pick(data, shape, count):
    dim = data.draw(st.integers(-len(shape) - 1, len(shape)))
    store = Store({str(i): numbered(*shape, start=1000 * i) for i in range(count)})
    stacked = expr.stack([store.source(n) for n in store.arrays], dim)
    expected = np.stack(list(store.arrays.values()), axis=dim)
    check(stacked, expected, data.draw(boxes(expected.shape)), store)
    index = data.draw(st.integers(0, count - 1))
    check(expr.pick(stacked, dim, index), store.arrays[str(index)], data.draw(boxes(shape)), store)


@given(st.data(), shapes)
def test_transpose_reads_exactly_the_box(data, shape):
    store = Store({"a": numbered(*shape)})
    axes = data.draw(st.permutations(range(len(shape))))
    expected = store.arrays["a"].transpose(axes)
    check(expr.transpose(store.source("a"), axes), expected, data.draw(boxes(expected.shape)), store)


@given(st.data(), st.lists(st.sampled_from([1, 2, 2, 3, 4]), max_size=5))
def test_reshape_of_anything_to_anything(data, factors):
    def regroup():
        order = data.draw(st.permutations(factors))
        shape, at = [], 0
        while at < len(order):
            step = data.draw(st.integers(1, 3))
            shape.append(int(np.prod(order[at : at + step])))
            at += step
        return tuple(shape)

    before, after = regroup(), regroup()
    store = Store({"a": numbered(*before)})
    expected = store.arrays["a"].reshape(after)
    # 2: strided single elements may be read as the range that covers them
    check(expr.reshape(store.source("a"), after), expected, data.draw(boxes(after)), store, bound=2)


@given(st.data(), shapes)
def test_slice_off_padding_and_pad(data, shape):
    store = Store({"a": numbered(*shape, start=1)})
    dim = data.draw(st.integers(0, len(shape) - 1))
    start, behind = data.draw(dims), data.draw(dims)
    wide = expr.pad(store.source("a"), dim, start, start + shape[dim] + behind)
    expected = np.pad(store.arrays["a"], [(start, behind) if d == dim else (0, 0) for d in range(len(shape))])
    check(wide, expected, data.draw(boxes(expected.shape)), store)
    check(expr.cut(wide, dim, start, start + shape[dim]), store.arrays["a"], data.draw(boxes(shape)), store)


@given(st.data(), shapes, st.sampled_from(["float32", "bfloat16", "float16", "int32", "float8_e4m3fn"]))
def test_cast(data, shape, dtype):
    from ckptfs import dtypes

    store = Store({"a": numbered(*shape, dtype="float64") / 8})
    expected = store.arrays["a"].astype(dtypes.of(dtype).numpy)
    box = data.draw(boxes(shape))
    check(expr.cast(store.source("a"), dtype), expected, box, store)


OPS = ["transpose", "reshape", "cut", "pad", "concat", "stack", "pick", "cast"]


@settings(max_examples=200)
@given(st.data())
def test_operations_on_top_of_each_other(data):
    """A random tower of operations equals the same tower on numpy arrays."""
    store = Store({"a": numbered(4, 6), "b": numbered(4, 6, start=100)})
    pairs = [(store.source(n), array) for n, array in store.arrays.items()]
    for _ in range(data.draw(st.integers(1, 6))):
        op = data.draw(st.sampled_from(OPS))
        e, a = pairs[0]
        dim = data.draw(st.integers(0, max(0, a.ndim - 1)))
        if op == "stack":
            pairs = [(expr.stack([x for x, _ in pairs], dim), np.stack([x for _, x in pairs], dim))]
        elif a.ndim == 0:
            continue
        elif op == "concat":
            pairs = [(expr.concat([x for x, _ in pairs], dim), np.concatenate([x for _, x in pairs], dim))]
        elif op == "transpose":
            axes = data.draw(st.permutations(range(a.ndim)))
            pairs = [(expr.transpose(x, axes), y.transpose(axes)) for x, y in pairs]
        elif op == "reshape":
            n = a.shape[dim]
            f = data.draw(st.sampled_from([k for k in range(1, n + 1) if n % k == 0] or [1]))
            new = (*a.shape[:dim], f, n // f, *a.shape[dim + 1 :]) if data.draw(st.booleans()) else (a.size,)
            pairs = [(expr.reshape(x, new), y.reshape(new)) for x, y in pairs]
        elif op == "cut" and a.shape[dim]:
            at = data.draw(st.integers(0, a.shape[dim] - 1))
            end = data.draw(st.integers(at + 1, a.shape[dim]))
            pairs = [(expr.cut(x, dim, at, end), y.take(range(at, end), axis=dim)) for x, y in pairs]
        elif op == "pad":
            width = [(1, 2) if d == dim else (0, 0) for d in range(a.ndim)]
            pairs = [(expr.pad(x, dim, 1, y.shape[dim] + 3), np.pad(y, width)) for x, y in pairs]
        elif op == "pick" and a.shape[dim]:
            at = data.draw(st.integers(0, a.shape[dim] - 1))
            pairs = [(expr.pick(x, dim, at), y.take(at, axis=dim)) for x, y in pairs]
        elif op == "cast":
            dtype = data.draw(st.sampled_from(["int64", "int32", "float64"]))
            pairs = [(expr.cast(x, dtype), y.astype(dtype)) for x, y in pairs]
    e, a = pairs[0]
    check(e, a, data.draw(boxes(a.shape)), store, bound=10**9)
