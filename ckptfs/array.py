"""Lazy arrays: a shape and a type now, bytes when asked for, by numpy's rules of basic indexing.

A subclass says how boxes are filled; everything else lives here: what an index selects, where its parts land, and
the ways out (torch, numpy, an existing tensor or array, a CUDA device, DLPack). A selection never reads through a
temporary when a view of the destination can take it: integers, new axes and negative steps are views.

Fancy indexing (lists, arrays, masks) is refused: what it would read is not a box, and the caller knows better
whether to read the covering slice or row by row.
"""

from __future__ import annotations

import operator
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ckptfs import dtypes
from ckptfs.box import Box
from ckptfs.errors import MismatchError
from ckptfs.shards import as_numpy, is_expanded

if TYPE_CHECKING:
    from torch import Tensor

    from ckptfs.dtypes import DType

Data = NDArray[Any]
Part = tuple[Box, Data]
PINNED_BYTES = 16 << 20  # a piece on its way to a CUDA device; two are in flight


Item = int | range | None  # an index of a dimension, indices of one, or a new axis


@dataclass(frozen=True, slots=True)
class Selection:
    """A basic index of an array: the box that covers it, the step in every dimension, and the result's form."""

    items: tuple[Item, ...]
    box: Box
    steps: tuple[int, ...]
    shape: tuple[int, ...]
    undo: tuple[Any, ...]  # an index that gives a result back the array's dimensions, in ascending order, as a view

    @classmethod
    def of(cls, items: Sequence[Item]) -> Selection:
        start: list[int] = []
        stop: list[int] = []
        steps: list[int] = []
        shape: list[int] = []
        undo: list[Any] = []
        for item in items:
            if item is None:
                shape.append(1)
                undo.append(0)
            elif isinstance(item, range):
                low, high = (min(item[0], item[-1]), max(item[0], item[-1]) + 1) if item else (0, 0)
                start.append(low)
                stop.append(high)
                steps.append(abs(item.step) if len(item) > 1 else 1)
                shape.append(len(item))
                undo.append(slice(None, None, -1 if item.step < 0 else 1))
            else:
                start.append(item)
                stop.append(item + 1)
                steps.append(1)
                undo.append(None)
        return cls(tuple(items), Box(tuple(start), tuple(stop)), tuple(steps), tuple(shape), (*undo, ...))

    def band(self, first: int, last: int) -> Selection:
        """Rows [first, last) of the result."""
        at = next(i for i, item in enumerate(self.items) if not isinstance(item, int))
        leading = self.items[at]
        if not isinstance(leading, range):  # a new axis: its only row is everything
            return self
        return Selection.of((*self.items[:at], leading[first:last], *self.items[at + 1 :]))


def select(index: Any, shape: Sequence[int], name: str) -> Selection:
    """What a numpy index selects; IndexError where numpy has one, or says what is not possible here."""
    items = list(index) if isinstance(index, tuple) else [index]
    dots = [at for at, item in enumerate(items) if item is Ellipsis]
    if len(dots) > 1:
        raise IndexError(f"{name}: an index has at most one '...'")
    wanted = len([item for item in items if item is not None and item is not Ellipsis])
    if wanted > len(shape):
        raise IndexError(f"{name}: {wanted} indices for {len(shape)} dimensions")
    at = dots[0] if dots else len(items)
    items[at : at + 1] = [slice(None)] * (len(shape) - wanted)
    lengths = iter(enumerate(shape))
    return Selection.of([None if item is None else _item(item, *next(lengths), name) for item in items])


def _item(item: Any, dim: int, length: int, name: str) -> int | range:
    if isinstance(item, slice):
        return _slice(item, length, name)
    i = _integer(item, name)
    if not -length <= i < length:
        raise IndexError(f"{name}: index {i} is out of bounds for dimension {dim} of length {length}")
    return i % length


def _slice(item: slice, length: int, name: str) -> range:
    try:
        return range(*item.indices(length))
    except (TypeError, ValueError) as error:
        raise IndexError(f"{name}: cannot slice with {item!r}: {error}") from None


def _integer(item: Any, name: str) -> int:
    plain = not isinstance(item, bool) and not str(getattr(item, "dtype", "")).endswith("bool")
    if plain and getattr(item, "shape", ()) == ():
        try:
            return operator.index(item)
        except TypeError:
            pass
    kind = f"a {type(item).__name__}" if hasattr(item, "__len__") else repr(item)
    raise IndexError(
        f"{name}: cannot index with {kind}: integers, slices, None and '...' are possible. "
        "For a list, an array or a mask (fancy indexing), read the slice that covers it and index the result"
    )


class LazyArray(ABC):
    """An array that is read when it is indexed. Thread-safe."""

    name: str
    shape: tuple[int, ...]
    element: DType  # its element type, in ckptfs's table

    @abstractmethod
    def fill(self, parts: Sequence[Part]) -> None:
        """Fill destinations (carrier-typed arrays of each box's shape, any strides) with boxes of the array."""

    def at_hand(self, index: Any) -> Data | None:
        """What an index selects, in memory to copy from (of a carrier type where numpy has no own), or None."""
        return None

    def skips(self, dim: int, step: int) -> bool:
        """Whether single indices of a dimension, `step` apart, are better read one by one than with what is between."""
        return False

    # --- what it is --------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"<ckptfs array {self.name} {self.element.name} {list(self.shape)}>"

    @property
    def dtype(self) -> Any:
        return self.element

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=object))

    @property
    def nbytes(self) -> int:
        return self.size * self.element.itemsize

    def get_shape(self) -> list[int]:
        """The shape, as safetensors' slices give it."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """The element type by its safetensors name (by its own where safetensors has none)."""
        return self.element.safetensors or self.element.name.upper()

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a 0-d array has no length")
        return self.shape[0]

    # --- ways out ----------------------------------------------------------------------------------------

    def numpy(self, index: Any = ...) -> Data:
        """The whole array or a part of it as a numpy array (bfloat16 and float8 have types of ml_dtypes)."""
        ready = self.at_hand(index)
        if ready is not None:
            return ready.copy().view(self.element.numpy)
        selection = select(index, self.shape, self.name)
        out = np.empty(selection.shape, self.element.carrier)
        self._into(selection, out)
        return out.view(self.element.numpy)

    def torch(self, index: Any = ...) -> Tensor:
        """The same as a torch tensor."""
        import torch

        ready = self.at_hand(index)
        if ready is not None:
            out = torch.empty(ready.shape, dtype=self.element.torch, device="cpu")
            np.copyto(as_numpy(out), ready.view(self.element.carrier))
            return out
        selection = select(index, self.shape, self.name)
        out = torch.empty(selection.shape, dtype=self.element.torch, device="cpu")
        plain = out if self.element.native else out.view(torch.int16 if self.element.itemsize == 2 else torch.uint8)
        self._into(selection, plain.numpy().view(self.element.carrier))
        return out

    def __getitem__(self, index: Any) -> Tensor:
        return self.torch(index)

    def __iter__(self) -> Iterator[Tensor]:
        return (self.torch(i) for i in range(len(self)))

    def box(self, start: Sequence[int], stop: Sequence[int]) -> Tensor:
        """The elements from `start` up to `stop`, which must lie in the array: nothing is cut off or wraps around."""
        box = Box(tuple(start), tuple(stop))
        fits = len(box.start) == len(box.stop) == self.ndim
        if not fits or not all(0 <= a <= b <= n for a, b, n in zip(box.start, box.stop, self.shape, strict=True)):
            raise IndexError(f"{self.name}: box {list(start)}..{list(stop)} does not lie in shape {list(self.shape)}")
        return self.torch(box.slices)

    def read(self, index: Any = ..., *, out: Any) -> Any:
        """Read into an existing numpy array or torch tensor of the same type and shape, with any strides; returns it.

        A CUDA tensor is filled through pinned memory, piece by piece, on its current stream.
        """
        ready = self.at_hand(index)
        if ready is not None and self.take(ready, out):
            return out
        selection = select(index, self.shape, self.name)
        self._check(selection, out)
        if getattr(out, "is_cuda", False):
            self._into_cuda(selection, out)
        else:
            self._into(selection, _memory_of(out))
        return out

    def parts(self, index: Any, out: Any) -> tuple[list[Part], Callable[[], None]]:
        """What a read into memory of this process has to fill, and what is to be done afterwards."""
        selection = select(index, self.shape, self.name)
        self._check(selection, out)
        if getattr(out, "is_cuda", False):
            raise MismatchError(f"{self.name}: several slices at once are read into memory, not into a CUDA tensor")
        return self._parts(selection, _memory_of(out))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Data:
        if copy is False:
            raise ValueError("a stored array cannot be had without a copy")
        data = self.numpy()
        return data if dtype is None else data.astype(dtype, copy=False)

    def __dlpack__(self, **how: Any) -> Any:
        how.pop("copy", None)  # what is handed out is a copy already, and nobody else's
        source = self.numpy() if self.element.native and "torch" not in sys.modules else self.torch()
        return source.__dlpack__(**how)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)  # main memory

    # --- how ---------------------------------------------------------------------------------------------

    def _check(self, selection: Selection, out: Any) -> None:
        torch = sys.modules.get("torch")
        if not isinstance(out, np.ndarray) and not (torch and isinstance(out, torch.Tensor)):
            raise MismatchError(f"{self.name}: cannot read into a {type(out).__name__}: give a numpy array or a tensor")
        same = self.element.native and out.dtype == self.element.numpy  # what is asked most, without a look-up
        if not same and dtypes.of(out.dtype) is not self.element:
            raise MismatchError(
                f"{self.name} holds {self.element.name}, the destination {out.dtype}: "
                "read into the same type, then convert"
            )
        if tuple(out.shape) != selection.shape:
            raise MismatchError(
                f"{self.name}: the index selects shape {list(selection.shape)}, the destination has {list(out.shape)}"
            )
        if isinstance(out, np.ndarray):
            good = out.flags.writeable and out.dtype.byteorder != ">"
        else:
            good = not (out.is_conj() or out.is_neg() or out.is_meta)
        if not good or is_expanded(out):
            raise MismatchError(
                f"{self.name}: the destination cannot be written to: "
                "it is read-only, expanded, conjugated, byte-swapped or meta"
            )

    def take(self, ready: Data, out: Any) -> bool:
        """Copy what is at hand into an ordinary destination; False: look closer."""
        same = type(out) is np.ndarray and out.dtype == ready.dtype and self.element.native  # most: without a look-up
        data = out if same and out.flags.writeable and 0 not in out.strides else self.plain(out)
        if data is None or data.shape != ready.shape or data.dtype != ready.dtype:
            return False
        np.copyto(data, ready)
        return True

    def plain(self, out: Any) -> Data | None:
        """An ordinary destination as what is at hand would be: of a carrier type where numpy has no own; else None."""
        element = self.element
        if type(out) is np.ndarray:
            if not out.flags.writeable or 0 in out.strides:
                return None
            if element.native:
                return out if out.dtype == element.numpy else None
            return out.view(element.carrier) if out.dtype == element.numpy else None
        torch = sys.modules.get("torch")
        if torch is None or type(out) is not torch.Tensor or not out.is_cpu:
            return None
        if out.dtype != element.torch or 0 in out.stride() or out.is_conj() or out.is_neg():
            return None
        data: Data = out.detach().numpy() if element.native else as_numpy(out.detach())
        return data

    def _into(self, selection: Selection, out: Data) -> None:
        parts, finish = self._parts(selection, out)
        if parts:
            self.fill(parts)
        finish()

    def _parts(self, selection: Selection, out: Data) -> tuple[list[Part], Callable[[], None]]:
        if not out.size:
            return [], _nothing
        view = out[selection.undo]
        if max(selection.steps, default=1) == 1:
            return [(selection.box, view)], _nothing
        parts: list[Part] = []
        copies: list[tuple[Data, Data]] = []
        for box, steps, target in self._by_index(selection.box, selection.steps, view, 0):
            if max(steps, default=1) == 1:
                parts.append((box, target))
            else:
                whole = np.empty(box.shape, out.dtype)
                parts.append((box, whole))
                copies.append((target, whole[tuple(slice(None, None, s) for s in steps)]))

        def finish() -> None:
            for target, picked in copies:
                target[...] = picked

        return parts, finish

    def _by_index(
        self, box: Box, steps: tuple[int, ...], view: Data, dim: int
    ) -> Iterator[tuple[Box, tuple[int, ...], Data]]:
        """A stepped box as boxes, cut where the steps of leading dimensions jump over much."""
        d = next((d for d in range(dim, len(steps)) if steps[d] > 1), None)
        if d is None or not self.skips(d, steps[d]):
            yield box, steps, view
            return
        for at, i in enumerate(range(box.start[d], box.stop[d], steps[d])):
            one = Box((*box.start[:d], i, *box.start[d + 1 :]), (*box.stop[:d], i + 1, *box.stop[d + 1 :]))
            where = (slice(None),) * d + (slice(at, at + 1),)
            yield from self._by_index(one, (*steps[:d], 1, *steps[d + 1 :]), view[where], d + 1)

    def _into_cuda(self, selection: Selection, out: Tensor) -> None:
        """Bands of the result, read into one of two pinned pieces while the other is copied."""
        import torch

        target = out.detach()
        if not target.numel():
            return
        if not target.shape:
            piece = torch.empty((), dtype=target.dtype, device="cpu")
            self._into(selection, as_numpy(piece))
            target.copy_(piece)
            return
        count = len(target)
        rows = max(1, PINNED_BYTES // (target[0].numel() * target.element_size()))
        pinned = [
            torch.empty((min(rows, count), *target.shape[1:]), dtype=target.dtype, device="cpu", pin_memory=True)
            for _ in range(1 if rows >= count else 2)
        ]
        copied: list[Any] = [None, None]
        with torch.cuda.device(target.device):
            for number, first in enumerate(range(0, count, rows)):
                turn, last = number % 2, min(first + rows, count)
                if copied[turn] is not None:
                    copied[turn].synchronize()
                piece = pinned[turn][: last - first]
                self._into(selection.band(first, last), as_numpy(piece))
                target[first:last].copy_(piece, non_blocking=True)
                copied[turn] = torch.cuda.Event()
                copied[turn].record()
            torch.cuda.current_stream().synchronize()  # the pinned memory goes back to torch's cache


def _memory_of(out: Any) -> Data:
    """A destination as an ordinary array: a matrix or a masked array is indexed by rules of its own."""
    return as_numpy(np.asarray(out) if isinstance(out, np.ndarray) else out.detach())


def _nothing() -> None:
    """All of it landed in place."""
