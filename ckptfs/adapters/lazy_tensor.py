"""A tensor that is not read yet: it remembers which part of a stored array it is, and reads that part when copied.

Loaders of inference engines cut a tensor with narrow, chunk, indexing, view and transpose, and then `copy_` the part
into a parameter. Such operations only move a window over the array; `copy_` reads the window's bytes, straight into
the parameter where that is possible. Any other operation reads the window first and goes on with an ordinary tensor:
slower, never wrong. Writing to one is refused.

The window is a tensor on the meta device whose strides are those of the row-major array, so torch itself does the
arithmetic of views. Reading turns its strides back into a box of the array.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from ckptfs.box import strides_of
from ckptfs.errors import MismatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptfs.array import LazyArray

_ATEN = torch.ops.aten
_VIEWS = {
    _ATEN.alias, _ATEN.as_strided, _ATEN.detach, _ATEN.diagonal, _ATEN.expand, _ATEN.permute, _ATEN.select,
    _ATEN.slice, _ATEN.split, _ATEN.split_with_sizes, _ATEN.squeeze, _ATEN.t, _ATEN.transpose, _ATEN.unbind,
    _ATEN.unfold, _ATEN.unsqueeze, _ATEN.view, _ATEN._reshape_alias, _ATEN._unsafe_view,  # noqa: SLF001
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Window:
    """A box of the array (with steps), and how its elements, read in order, are seen as the tensor."""

    index: tuple[slice, ...]
    counts: tuple[int, ...]  # the shape of what is read
    shape: tuple[int, ...]  # of the view, dimensions of one array dimension still apart
    strides: tuple[int, ...]
    axes: tuple[int, ...] | None  # where each dimension of the view lies in what is read, if they are the same ones


def window(base: Sequence[int], shape: Sequence[int], strides: Sequence[int], offset: int) -> Window | None:
    """The part of a row-major array that a strided view of it sees; None when that is not a part of this form."""
    steps_of_base = strides_of(base)
    first = [offset // s % n if n else 0 for s, n in zip(steps_of_base, base, strict=True)]
    pieces: list[tuple[int, int, int]] = []  # (array dimension or -1, count, step in it), in the view's order
    for n, s in zip(shape, strides, strict=True):
        found = _dims(n, s, base, steps_of_base, first)
        if found is None:
            return None
        pieces += found
    index, counts, units = [], [], []
    for d, length in enumerate(base):
        own = [(n, step) for at, n, step in pieces if at == d and n > 1]
        reach = sum((n - 1) * step for n, step in own)
        unit = own[0][1] if len(own) == 1 else 1
        if first[d] + reach >= max(length, 1):
            return None
        index.append(slice(first[d], first[d] + reach + 1, unit))
        counts.append(reach // unit + 1)
        units.append(unit)
    read = strides_of(counts)
    view = tuple(0 if d < 0 or n == 1 else read[d] * (step // units[d]) for d, n, step in pieces)
    kept = [(d, n) for d, n, _ in pieces if n > 1]
    direct = sorted(kept) == [(d, n) for d, n in enumerate(counts) if n > 1]
    axes = tuple(d for d, _ in kept) if direct else None
    return Window(tuple(index), tuple(counts), tuple(n for _, n, _ in pieces), view, axes)


def _dims(
    n: int, stride: int, base: Sequence[int], steps: Sequence[int], first: Sequence[int]
) -> list[tuple[int, int, int]] | None:
    """One dimension of a view as counts along dimensions of the array, outermost first."""
    if n == 1 or stride == 0:
        return [(-1, n, 0)]
    for d in range(len(base)):
        if base[d] == 1 or stride < steps[d] or stride % steps[d]:
            continue
        step = stride // steps[d]
        if first[d] + (n - 1) * step < base[d]:
            return [(d, n, step)]
        # More than this dimension has: whole rounds of it, and the rest along the dimensions left of it.
        if step == 1 and first[d] == 0 and n % base[d] == 0:
            left = _dims(n // base[d], stride * base[d], base, steps, first)
            return None if left is None else [*left, (d, base[d], 1)]
    return None


class LazyTensor(torch.Tensor):
    """A window on a stored array; see the module."""

    source: LazyArray
    view_of_base: torch.Tensor

    @staticmethod
    def __new__(cls: Any, source: LazyArray, meta: torch.Tensor | None = None) -> Any:
        if meta is None:
            meta = torch.empty(source.shape, dtype=source.element.torch, device="meta")
        made = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=torch.device("cpu"),
        )
        made.source, made.view_of_base = source, meta
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<lazy {list(self.shape)} of {self.source!r}>"

    def materialize(self) -> torch.Tensor:
        """An ordinary tensor with the values of this one."""
        out = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.read_into(out)
        return out

    def read_into(self, out: torch.Tensor) -> None:
        """Fill a tensor of the same shape and type."""
        meta = self.view_of_base
        if not meta.numel():
            return
        found = window(self.source.shape, meta.shape, meta.stride(), int(meta.storage_offset()))
        if found is None:  # a view that is no part of the array: all of it is read
            whole = self.source.torch()
            out.copy_(torch.as_strided(whole, meta.shape, meta.stride(), meta.storage_offset()))
            return
        if found.axes is not None and tuple(meta.shape) == found.shape:
            small = [d for d, n in enumerate(meta.shape) if n == 1]
            target = out.squeeze(small) if small else out
            order = sorted(range(len(found.axes)), key=found.axes.__getitem__)
            index = tuple(
                item.start if count == 1 else item for item, count in zip(found.index, found.counts, strict=True)
            )
            self.source.read(index, out=target.permute(order))
            return
        read = self.source.torch(found.index)
        out.copy_(torch.as_strided(read, found.shape, found.strides).reshape(meta.shape))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        # view(dtype) is a view too, but its elements are not the array's.
        if isinstance(first, cls) and func.overloadpacket in _VIEWS and func is not _ATEN.view.dtype:
            made = func(first.view_of_base, *args[1:], **kwargs)
            return pytree.tree_map_only(torch.Tensor, lambda meta: cls(first.source, meta), made)
        if func is _ATEN.copy_.default and not isinstance(first, cls) and isinstance(args[1], cls):
            return _copy(args[0], args[1])
        if func._schema.is_mutable and isinstance(first, cls):  # noqa: SLF001
            raise MismatchError(f"{first!r} is stored data and cannot be written to: .clone() it first")
        args, kwargs = pytree.tree_map_only(cls, cls.materialize, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _OUT_OF_TORCH:
            args = pytree.tree_map_only(cls, cls.materialize, args)
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            return func(*args, **(kwargs or {}))


_OUT_OF_TORCH = {torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__dlpack__}


def _copy(target: torch.Tensor, lazy: LazyTensor) -> torch.Tensor:
    simple = target.shape == lazy.shape and target.dtype == lazy.dtype and target.device.type in ("cpu", "cuda")
    overlaps = any(s == 0 and n > 1 for s, n in zip(target.stride(), target.shape, strict=True))
    if simple and not overlaps and type(target) is torch.Tensor and target.numel():
        lazy.read_into(target)
    else:
        target.copy_(lazy.materialize())
    return target
