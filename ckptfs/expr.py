"""Arrays that are computed from stored arrays by moving elements: names for boxes of other arrays.

An `Expr` knows its shape and dtype before any data is read, and answers one question: to fill a box of it, which
boxes of which sources are read, and where does each land? `plan(box, out)` answers with views of `out`, so a
reader writes straight into the destination; only where no view exists (a strided gather, a cast) it names a
temporary and a step that copies it afterwards. Pieces may be read in any order, by any number of threads.

What is read is exactly what is needed, with one exception: single elements at short strides (rotary
permutations) are read as the range that covers them, never more than twice what is needed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptfs import dtypes
from ckptfs.box import Box, boxes_of_range, run_shape, runs, strides_of
from ckptfs.errors import MismatchError

Array = NDArray[Any]
Fetch = Callable[[str, Box], Array]
_NOTHING = np.dtype([])  # elements of no bytes: plans that are only looked at allocate nothing
_COVER = 2  # strided elements are read as one range when it holds at most this many times as many


@dataclass(frozen=True, slots=True)
class Piece:
    """One read: this box of this source fills `into`, which has the box's shape and any strides."""

    source: str
    box: Box
    into: Array


@dataclass(slots=True)
class Plan:
    """The reads that fill a destination, and what remains to be copied when all of them are done."""

    pieces: list[Piece] = field(default_factory=list)
    steps: list[Callable[[], None]] = field(default_factory=list)

    def finish(self) -> None:
        for step in self.steps:
            step()


class Expr(ABC):
    """An array that is not there yet."""

    __slots__ = ("dtype", "shape")

    def __init__(self, shape: Sequence[int], dtype: str) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype

    @abstractmethod
    def place(self, box: Box, out: Array, plan: Plan) -> None:
        """Add to the plan what fills `out` with this (not empty) box."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * dtypes.of(self.dtype).itemsize

    def plan(self, box: Box, out: Array) -> Plan:
        """What fills `out` with this box."""
        if len(box.start) != len(self.shape) or not Box.whole(self.shape).contains(box):
            raise MismatchError(f"box {box.start}..{box.stop} does not lie in an array of shape {self.shape}")
        if out.shape != box.shape:
            raise MismatchError(f"a destination of shape {out.shape} cannot take a box of shape {box.shape}")
        plan = Plan()
        if box.size:
            self.place(box, out, plan)
        return plan

    def sources(self, box: Box | None = None) -> list[tuple[str, Box]]:
        """The boxes of the sources that a read of this box would read."""
        box = Box.whole(self.shape) if box is None else box
        return [(piece.source, piece.box) for piece in self.plan(box, np.empty(box.shape, _NOTHING)).pieces]

    def read(self, box: Box | None, fetch: Fetch) -> Array:
        """The box (None: everything) as an array; `fetch(name, box)` reads from a source."""
        box = Box.whole(self.shape) if box is None else box
        out = np.empty(box.shape, dtypes.of(self.dtype).numpy)
        plan = self.plan(box, out)
        for piece in plan.pieces:
            piece.into[...] = fetch(piece.source, piece.box)
        plan.finish()
        return out


def _copy(target: Array, origin: Array) -> Callable[[], None]:
    def step() -> None:
        target[...] = origin

    return step


def _temporary(shape: Sequence[int], dtype: np.dtype[Any], out: Array) -> Array:
    return np.empty(shape, dtype if out.itemsize else _NOTHING)


def _moved(box: Box, dim: int, by: int) -> Box:
    shift = tuple(-by if d == dim else 0 for d in range(len(box.start)))
    return box.within(shift)


class Source(Expr):
    """A stored array."""

    __slots__ = ("name",)

    def __init__(self, name: str, shape: Sequence[int], dtype: str) -> None:
        super().__init__(shape, dtype)
        self.name = name

    def place(self, box: Box, out: Array, plan: Plan) -> None:
        plan.pieces.append(Piece(self.name, box, out))


class _Cut(Expr):
    """The indices from `start` on of one dimension."""

    __slots__ = ("child", "dim", "start")

    def __init__(self, child: Expr, dim: int, start: int, stop: int) -> None:
        shape = list(child.shape)
        shape[dim] = stop - start
        super().__init__(shape, child.dtype)
        self.child, self.dim, self.start = child, dim, start

    def place(self, box: Box, out: Array, plan: Plan) -> None:
        self.child.place(_moved(box, self.dim, self.start), out, plan)


class _Joined(Expr):
    """Arrays one behind the other in one dimension; a None is a stretch of zeros."""

    __slots__ = ("children", "dim", "edges")

    def __init__(self, children: Sequence[Expr | None], dim: int, lengths: Sequence[int]) -> None:
        first = next(child for child in children if child is not None)
        shape = list(first.shape)
        shape[dim] = sum(lengths)
        super().__init__(shape, first.dtype)
        self.children, self.dim = tuple(children), dim
        self.edges = tuple(sum(lengths[:i]) for i in range(len(lengths) + 1))

    def place(self, box: Box, out: Array, plan: Plan) -> None:
        dim, start, stop = self.dim, box.start[self.dim], box.stop[self.dim]
        for child, low, high in zip(self.children, self.edges[:-1], self.edges[1:], strict=True):
            a, z = max(start, low), min(stop, high)
            if a >= z:
                continue
            part = Box(
                (*box.start[:dim], a - low, *box.start[dim + 1 :]), (*box.stop[:dim], z - low, *box.stop[dim + 1 :])
            )
            into = out[(slice(None),) * dim + (slice(a - start, z - start),)]
            if child is None:
                plan.steps.append(_copy(into, np.zeros((), out.dtype)))
            else:
                child.place(part, into, plan)


class _Stacked(Expr):
    """Equal arrays along a new dimension."""

    __slots__ = ("children", "dim")

    def __init__(self, children: Sequence[Expr], dim: int) -> None:
        shape = children[0].shape
        super().__init__((*shape[:dim], len(children), *shape[dim:]), children[0].dtype)
        self.children, self.dim = tuple(children), dim

    def place(self, box: Box, out: Array, plan: Plan) -> None:
        dim = self.dim
        inner = Box(box.start[:dim] + box.start[dim + 1 :], box.stop[:dim] + box.stop[dim + 1 :])
        for at, index in enumerate(range(box.start[dim], box.stop[dim])):
            # The slice keeps a view even where all other dimensions are gone; an index would copy a scalar.
            self.children[index].place(inner, out[(slice(None),) * dim + (at, ...)], plan)


class _Picked(Expr):
    """One index of one dimension, which goes away."""

    __slots__ = ("child", "dim", "index")

    def __init__(self, child: Expr, dim: int, index: int) -> None:
        super().__init__(child.shape[:dim] + child.shape[dim + 1 :], child.dtype)
        self.child, self.dim, self.index = child, dim, index

    def place(self, box: Box, out: Array, plan: Plan) -> None:
        dim = self.dim
        start = (*box.start[:dim], self.index, *box.start[dim:])
        stop = (*box.stop[:dim], self.index + 1, *box.stop[dim:])
        self.child.place(Box(start, stop), np.expand_dims(out, dim), plan)


class _Transposed(Expr):
    """The dimensions in another order."""

    __slots__ = ("axes", "child")

    def __init__(self, child: Expr, axes: tuple[int, ...]) -> None:
        super().__init__([child.shape[a] for a in axes], child.dtype)
        self.child, self.axes = child, axes

    def place(self, box: Box, out: Array, plan: Plan) -> None:
        back = tuple(self.axes.index(d) for d in range(len(self.axes)))
        inner = Box(tuple(box.start[b] for b in back), tuple(box.stop[b] for b in back))
        self.child.place(inner, out.transpose(back), plan)


class _Cast(Expr):
    """The values in another element type."""

    __slots__ = ("child",)

    def __init__(self, child: Expr, dtype: str) -> None:
        super().__init__(child.shape, dtype)
        self.child = child

    def place(self, box: Box, out: Array, plan: Plan) -> None:
        values = _temporary(box.shape, dtypes.of(self.child.dtype).numpy, out)
        self.child.place(box, values, plan)

        def convert() -> None:
            with np.errstate(over="ignore", invalid="ignore"):  # what does not fit becomes inf or NaN, as in torch
                out[...] = values.astype(out.dtype)

        plan.steps.append(convert)


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Within one group of dimensions: a box of the new shape, and the elements [start, stop) that fill it.

    `gather` picks the box's elements from those (None: all of them, in order).
    """

    box: Box
    start: int
    stop: int
    gather: NDArray[np.intp] | None = None


class _Reshaped(Expr):
    """The same elements in row-major order under another shape."""

    __slots__ = ("child", "groups")

    def __init__(self, child: Expr, shape: tuple[int, ...]) -> None:
        super().__init__(shape, child.dtype)
        self.child = child
        self.groups = _groups(child.shape, shape)

    def place(self, box: Box, out: Array, plan: Plan) -> None:
        stretches = [
            list(_stretches(Box(box.start[j0:j1], box.stop[j0:j1]), self.shape[j0:j1])) for _, (j0, j1) in self.groups
        ]
        for combination in product(*stretches):
            target = _product([s.box for s in combination])
            where: tuple[Any, ...] = (*target.within(box.start).slices, ...)
            self._place_one(combination, out[where], plan)

    def _place_one(self, stretches: tuple[_Stretch, ...], out: Array, plan: Plan) -> None:
        flat_shape = tuple(s.stop - s.start for s in stretches)
        if any(s.gather is not None for s in stretches):
            flat = _temporary(flat_shape, out.dtype, out)
            self._fill(stretches, flat, plan)
            plan.steps.append(_gathered(out, flat, stretches))
            return
        if all(_is_flat(out, j0, j1) for _, (j0, j1) in self.groups):
            self._fill(stretches, out.reshape(flat_shape), plan)
            return
        flat = _temporary(flat_shape, out.dtype, out)
        self._fill(stretches, flat, plan)
        plan.steps.append(_copy(out, flat.reshape(out.shape)))

    def _fill(self, stretches: tuple[_Stretch, ...], flat: Array, plan: Plan) -> None:
        """Fill an array that has one dimension for each group, from the boxes of the child."""
        per_group = []
        for stretch, ((i0, i1), _) in zip(stretches, self.groups, strict=True):
            at, boxes = 0, []
            for inner in boxes_of_range(stretch.start, stretch.stop, self.child.shape[i0:i1]):
                boxes.append((slice(at, at + inner.size), inner))
                at += inner.size
            per_group.append(boxes)
        for combination in product(*per_group):
            where: tuple[Any, ...] = (*(place for place, _ in combination), ...)
            part = flat[where]
            inner = _product([b for _, b in combination])
            # One dimension becomes several here, which numpy can always view.
            self.child.place(inner, part.reshape(inner.shape), plan)


def _is_flat(out: Array, start: int, stop: int) -> bool:
    """Whether these dimensions can be viewed as one (asking numpy's reshape would copy when they cannot)."""
    dims = [d for d in range(start, stop) if out.shape[d] != 1]
    return all(out.strides[a] == out.strides[b] * out.shape[b] for a, b in pairwise(dims))


def _gathered(out: Array, flat: Array, stretches: tuple[_Stretch, ...]) -> Callable[[], None]:
    def step() -> None:
        picked = flat
        for axis, stretch in enumerate(stretches):
            if stretch.gather is not None:
                picked = picked.take(stretch.gather, axis=axis)
        out[...] = picked.reshape(out.shape)

    return step


def _product(boxes: Sequence[Box]) -> Box:
    """One box over the dimensions of all of them, in order."""
    return Box(tuple(a for b in boxes for a in b.start), tuple(z for b in boxes for z in b.stop))


def _groups(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Neighbouring dimensions of both shapes that hold the same elements: [((i0, i1), (j0, j1)), ...]."""
    groups = []
    i = j = 0
    if prod(old) == 0:
        return []
    while i < len(old) and j < len(new):
        i0, j0, a, b = i, j, old[i], new[j]
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                a, i = a * old[i], i + 1
            else:
                b, j = b * new[j], j + 1
        groups.append(((i0, i), (j0, j)))
    if i < len(old) or j < len(new):  # only ones are left
        groups.append(((i, len(old)), (j, len(new))))
    return groups


def _stretches(box: Box, shape: tuple[int, ...]) -> Iterator[_Stretch]:
    """The runs that a box of these dimensions consists of; elements at short strides as one covering run."""
    count, length = run_shape(box, shape)
    pieces = prod(box.shape[:count])
    strides = strides_of(shape)
    first = sum(a * s for a, s in zip(box.start, strides, strict=True))
    last = sum((z - 1) * s for z, s in zip(box.stop, strides, strict=True))
    if length == 1 and pieces > 1 and last + 1 - first <= _COVER * box.size:
        gather = np.zeros((), np.intp)
        for size, stride in zip(box.shape, strides, strict=True):
            gather = np.add.outer(gather, np.arange(size, dtype=np.intp) * stride)
        yield _Stretch(box, first, last + 1, gather.reshape(-1))
        return
    heads = product(*(range(box.start[d], box.stop[d]) for d in range(count)))
    for head, (start, stop) in zip(heads, runs(box, shape), strict=True):
        one = Box(head + box.start[count:], tuple(h + 1 for h in head) + box.stop[count:])
        yield _Stretch(one, start, stop)


# --- what rules build with: each checks that it fits, and leaves out what would change nothing ---------------


def _dim(child: Expr, dim: int) -> int:
    if not -len(child.shape) <= dim < len(child.shape):
        raise MismatchError(f"there is no dimension {dim} in an array of shape {child.shape}")
    return dim % len(child.shape)


def cut(child: Expr, dim: int, start: int, stop: int) -> Expr:
    """Indices [start, stop) of a dimension."""
    dim = _dim(child, dim)
    length = child.shape[dim]
    if not 0 <= start <= stop <= length:
        raise MismatchError(f"[{start}, {stop}) does not lie in dimension {dim} of an array of shape {child.shape}")
    return child if (start, stop) == (0, length) else _Cut(child, dim, start, stop)


def split(child: Expr, dim: int, sizes: Sequence[int]) -> list[Expr]:
    """Parts of these sizes along a dimension; they must cover it."""
    dim = _dim(child, dim)
    if any(size < 0 for size in sizes) or sum(sizes) != child.shape[dim]:
        raise MismatchError(f"sizes {list(sizes)} do not cover dimension {dim} of an array of shape {child.shape}")
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [cut(child, dim, start, start + size) for start, size in zip(starts, sizes, strict=True)]


def split_equally(child: Expr, dim: int, parts: int) -> list[Expr]:
    dim = _dim(child, dim)
    if parts < 1 or child.shape[dim] % parts:
        raise MismatchError(f"dimension {dim} of an array of shape {child.shape} does not split into {parts} parts")
    return split(child, dim, [child.shape[dim] // parts] * parts)


def _alike(children: Sequence[Expr], dim: int | None) -> None:
    """Same dtype, and same shape except in one dimension."""
    kinds = {(tuple(n for d, n in enumerate(child.shape) if d != dim), child.dtype) for child in children}
    if len(kinds) > 1 or len({len(child.shape) for child in children}) > 1:
        listed = ", ".join(f"{child.shape} {child.dtype}" for child in children[:8])
        raise MismatchError(f"these do not fit together: {listed}")


def concat(children: Sequence[Expr], dim: int) -> Expr:
    dim = _dim(children[0], dim)
    _alike(children, dim)
    if len(children) == 1:
        return children[0]
    return _Joined(children, dim, [child.shape[dim] for child in children])


def stack(children: Sequence[Expr], dim: int) -> Expr:
    """Equal arrays along a new dimension, which stands at `dim` of the result."""
    _alike(children, None)
    rank = len(children[0].shape) + 1
    if not -rank <= dim < rank:
        raise MismatchError(f"there is no dimension {dim} in a stack of arrays of shape {children[0].shape}")
    return _Stacked(children, dim % rank)


def pick(child: Expr, dim: int, index: int) -> Expr:
    """One index of a dimension, which goes away."""
    dim = _dim(child, dim)
    if not 0 <= index < child.shape[dim]:
        raise MismatchError(f"there is no index {index} in dimension {dim} of an array of shape {child.shape}")
    return _Picked(child, dim, index)


def transpose(child: Expr, axes: Sequence[int]) -> Expr:
    if sorted(axes) != list(range(len(child.shape))):
        raise MismatchError(f"axes {list(axes)} are not an order of the dimensions of shape {child.shape}")
    return child if list(axes) == sorted(axes) else _Transposed(child, tuple(axes))


def reshape(child: Expr, shape: Sequence[int]) -> Expr:
    if prod(shape) != prod(child.shape) or any(n < 0 for n in shape):
        raise MismatchError(f"an array of shape {child.shape} cannot be reshaped to {tuple(shape)}")
    if tuple(shape) == child.shape:
        return child
    if isinstance(child, _Reshaped):
        return reshape(child.child, shape)
    return _Reshaped(child, tuple(shape))


def pad(child: Expr, dim: int, start: int, length: int) -> Expr:
    """Zeros around the array so that it stands at `start` of a dimension of this length."""
    dim = _dim(child, dim)
    behind = length - start - child.shape[dim]
    if start < 0 or behind < 0:
        raise MismatchError(f"shape {child.shape} does not fit at {start} of dimension {dim} of length {length}")
    lengths = [start, child.shape[dim], behind]
    return child if start == behind == 0 else _Joined([None, child, None], dim, lengths)


def cast(child: Expr, dtype: str) -> Expr:
    return child if dtype == child.dtype else _Cast(child, dtype)


# --- seeing through what moves nothing -----------------------------------------------------------------------


def contiguous(array: Expr) -> list[tuple[str, int, int]] | None:
    """The array as row-major stretches of sources, one behind the other: [(source, first element, end), ...].

    None when its elements are rearranged, converted or made up: then only `plan` can say.
    """
    try:
        return _merged(_stretches_of(array, 0, prod(array.shape)))
    except _RearrangedError:
        return None


class _RearrangedError(Exception):
    pass


def _stretches_of(array: Expr, start: int, stop: int) -> Iterator[tuple[str, int, int]]:
    """Elements [start, stop) of the row-major array."""
    if start == stop:
        return
    if isinstance(array, Source):
        yield array.name, start, stop
    elif isinstance(array, _Reshaped):
        yield from _stretches_of(array.child, start, stop)
    elif isinstance(array, _Cut | _Picked) and 1 in (prod(array.child.shape[: (d := array.dim)]), array.child.shape[d]):
        first = array.start if isinstance(array, _Cut) else array.index
        moved = first * prod(array.child.shape[array.dim + 1 :])
        yield from _stretches_of(array.child, start + moved, stop + moved)
    elif isinstance(array, _Joined | _Stacked) and prod(array.shape[: array.dim]) == 1:
        low = 0
        for child in array.children:
            if child is None:
                raise _RearrangedError
            high = low + prod(child.shape)
            if low < stop and high > start:
                yield from _stretches_of(child, max(start, low) - low, min(stop, high) - low)
            low = high
    else:
        raise _RearrangedError


def _merged(parts: Iterator[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    out: list[tuple[str, int, int]] = []
    for name, start, stop in parts:
        if out and out[-1][0] == name and out[-1][2] == start:
            out[-1] = (name, out[-1][1], stop)
        else:
            out.append((name, start, stop))
    return out
