"""A committed step, open for reading: a mapping from names to lazy arrays, and the way back into a tree.

Opening reads the manifest only. Reading to numpy never imports torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ckptfs import dtypes, tree
from ckptfs.box import Box
from ckptfs.errors import FormatError, MismatchError, NotFoundError
from ckptfs.manifest import NAME, Manifest, Param
from ckptfs.read import Reader, Target
from ckptfs.saveplan import matches
from ckptfs.settings import Settings
from ckptfs.shards import Held, as_numpy, hold
from ckptfs.storage import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from ckptfs.dtypes import DType
    from ckptfs.storage import Store


class Array:
    """One stored array: its shape and type now, its bytes when asked for."""

    def __init__(self, checkpoint: Checkpoint, param: Param, name: str) -> None:
        self._checkpoint = checkpoint
        self.param = param
        self.name = name

    def __repr__(self) -> str:
        return f"<ckptfs.Array {self.name} {self.param.dtype.name} {list(self.shape)}>"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.param.shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return self.param.nbytes

    @property
    def dtype(self) -> DType:
        return self.param.dtype

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a 0-d array has no length")
        return self.shape[0]

    def numpy(self, index: Any = ...) -> np.ndarray[Any, Any]:
        """The whole array or a part of it, by numpy's rules, as a numpy array (bfloat16, float8: ml_dtypes)."""
        box, rest = split_index(index, self.shape, self.name)
        out = np.empty(box.shape, dtype=self.param.dtype.carrier)
        self._checkpoint.read_boxes([(self.param, [Target(box, out)])], verify="extents")
        return out.view(self.param.dtype.numpy)[rest]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if copy is False:
            raise ValueError("a stored array cannot be had without a copy")
        data = self.numpy()
        return data if dtype is None else data.astype(dtype, copy=False)

    def torch(self, index: Any = ...) -> torch.Tensor:
        """The same as a torch tensor."""
        import torch

        box, rest = split_index(index, self.shape, self.name)
        out = torch.empty(box.shape, dtype=self.param.dtype.torch)
        self._checkpoint.read_boxes([(self.param, [Target(box, as_numpy(out))])], verify="extents")
        return out[rest]

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.torch(index)


def split_index(index: Any, shape: Sequence[int], name: str) -> tuple[Box, tuple[Any, ...]]:
    """A basic numpy index as (the box to read, the index that takes the result out of it)."""
    items = list(index) if isinstance(index, tuple) else [index]
    if sum(item is Ellipsis for item in items) > 1:
        raise IndexError(f"{name}: an index has at most one '...'")
    wanted = sum(item is not None and item is not Ellipsis for item in items)
    if wanted > len(shape):
        raise IndexError(f"{name}: {wanted} indices for {len(shape)} dimensions")
    if Ellipsis not in [i for i in items if i is None or i is Ellipsis]:
        items.append(Ellipsis)
    at = next(i for i, item in enumerate(items) if item is Ellipsis)
    items[at : at + 1] = [slice(None)] * (len(shape) - wanted)
    start, stop, rest, d = [], [], [], 0
    for item in items:
        if item is None:
            rest.append(None)
            continue
        n = shape[d]
        if isinstance(item, slice):
            picked = range(*item.indices(n))
            low, high = (min(picked[0], picked[-1]), max(picked[0], picked[-1]) + 1) if picked else (0, 0)
            inner = slice(None)
            if picked and picked.step != 1:
                first = picked[0] - low
                inner = slice(first, None, picked.step)
        elif hasattr(item, "__index__") and not isinstance(item, (bool, np.bool_)):
            i = item.__index__()
            if not -n <= i < n:
                raise IndexError(f"{name}: index {i} is out of bounds for dimension {d} of length {n}")
            low, high, inner = i % n, i % n + 1, 0
        else:
            msg = f"{name}: cannot index with {item!r}: integers, slices, None and '...' are possible"
            raise IndexError(msg)
        start.append(low)
        stop.append(high)
        rest.append(inner)
        d += 1
    return Box(tuple(start), tuple(stop)), tuple(rest)


class Checkpoint(Mapping[str, Array]):
    """A committed step as a mapping of lazy arrays."""

    def __init__(self, url: Any, *, settings: Settings | None = None, **options: Any) -> None:
        self.store: Store = url if hasattr(url, "read_into") else open_store(url, **options)
        self.settings = settings or Settings()
        where = f"{self.store.url}/{NAME}"
        try:
            raw = self.store.read(NAME)
        except NotFoundError:
            msg = f"{self.store.url} is not a committed checkpoint: it has no {NAME}"
            raise NotFoundError(msg) from None
        self.manifest = Manifest.parse(raw, where)
        self._reader = Reader(self.store, self.settings)

    def __repr__(self) -> str:
        return f"<ckptfs.Checkpoint {self.url} step {self.step}, {len(self)} arrays, {self.manifest.nbytes} bytes>"

    @property
    def url(self) -> str:
        return self.store.url

    @property
    def step(self) -> int | None:
        return self.manifest.step

    def close(self) -> None:
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- mapping ---------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Array:
        return Array(self, self.param(name), name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self.manifest.params or name in self.manifest.aliases

    @cached_property
    def _names(self) -> list[str]:
        return sorted([*self.manifest.params, *self.manifest.aliases])

    def param(self, name: str) -> Param:
        """The manifest's entry behind a name; tied names share one."""
        target = self.manifest.aliases.get(name, name)
        found = self.manifest.params.get(target)
        if found is None:
            from difflib import get_close_matches

            close = get_close_matches(name, self._names, 3)
            hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
            raise NotFoundError(f"{self.url} has no array {name!r}{hint}")
        return found

    def match(self, pattern: str) -> list[str]:
        """Names that fit a shell-style pattern."""
        return [name for name in self._names if matches(name, pattern)]

    def read_boxes(self, wanted: Iterable[tuple[Param, Sequence[Target]]], **how: Any) -> None:
        """Fill targets from several arrays at once."""
        self._reader.read(wanted, **how)

    @property
    def bytes_read(self) -> int:
        """Bytes of arrays read from the store so far."""
        return self._reader.bytes_read

    # --- trees -----------------------------------------------------------------------------------------

    def tree(self, *, rank: int | None = None, numpy: bool = False, allow_pickle: bool = False) -> Any:
        """The saved tree as a new one, all arrays read. With `numpy`, arrays are numpy's and torch is not needed."""
        work: dict[str, tuple[Param, list[Target]]] = {}
        made: dict[str, Any] = {}

        def array(name: str, tag: dict[str, Any]) -> Any:
            if name not in made:
                made[name] = self._new(name, tag, work, numpy=numpy)
            return made[name]

        value = tree.unflatten(self.manifest.tree, array, rank=rank, allow_pickle=allow_pickle)
        self.read_boxes(work.values(), verify="full")
        return value

    def _new(self, name: str, tag: dict[str, Any], work: dict[str, tuple[Param, list[Target]]], *, numpy: bool) -> Any:
        param = self.param(name)
        if numpy or tag.get("as") == "numpy":
            value: Any = np.empty(param.shape, dtype=param.dtype.numpy)
        else:
            import torch

            value = torch.empty(param.shape, dtype=param.dtype.torch)
        _add(work, param, [Target(Box.whole(param.shape), as_numpy(value))])
        if tag.get("as") == "parameter" and not numpy:
            import torch

            value = torch.nn.Parameter(value, requires_grad=param.dtype.name.startswith(("float", "bfloat", "complex")))
        return value

    def load(
        self,
        value: Any,
        *,
        rank: int = 0,
        strict: bool = True,
        only: str | Sequence[str] | None = None,
        cast: bool = False,
        allow_pickle: bool = False,
        progress: Callable[[int], None] = lambda done: None,
    ) -> Any:
        """Fill a tree in place, whatever its layout. `only`: patterns; then just the arrays with such names are filled.

        Nothing is touched unless everything fits (`strict`); stored types are converted only with `cast`.
        """
        if self.manifest.tree is None:
            raise FormatError(f"{self.url} was saved without a tree")
        _, leaves = tree.flatten(value, rank=rank, allow_pickle=True)
        patterns = [only] if isinstance(only, str) else only
        held = {
            leaf.name: hold(leaf.name, leaf.value, rank)
            for leaf in leaves
            if patterns is None or any(matches(leaf.name, p) for p in patterns)
        }
        report = self._misfits(held, cast=cast)
        if patterns is None:
            rehearsal = tree.rehearse(value, self.manifest.tree, rank=rank, allow_pickle=allow_pickle)
            if strict:
                report = [f"missing in the checkpoint: {p}" for p in rehearsal.missing] + report
                report += [f"unexpected in the checkpoint: {p}" for p in rehearsal.unexpected]
            report += [f"different: {p}" for p in rehearsal.mismatched]
        elif strict:
            report = [f"missing in the checkpoint: {name}" for name in held if name not in self] + report
        if report:
            shown = report[:200]
            more = [f"… and {len(report) - len(shown)} more"] if len(report) > len(shown) else []
            raise MismatchError("\n  ".join([f"{self.url} does not fit what it is loaded into:", *shown, *more]))
        filler = _Filler(self, held, cast=cast)
        if patterns is None:
            result = tree.fill(
                value, self.manifest.tree, filler.array, strict=False, rank=rank, allow_pickle=allow_pickle
            ).tree
        else:
            result = value
            for name in held:
                if name in self:
                    filler.want(name)
        self.read_boxes(filler.work.values(), verify="full", progress=progress)
        filler.finish()
        return result

    def _misfits(self, held: dict[str, Held], *, cast: bool) -> list[str]:
        out = []
        for name, one in held.items():
            if name not in self:
                continue
            param = self.param(name)
            if param.shape != one.desc.shape:
                out.append(f"shape of {name}: {list(one.desc.shape)} here, {list(param.shape)} stored")
            elif param.dtype.name != one.desc.dtype and not cast:
                out.append(f"type of {name}: {one.desc.dtype} here, {param.dtype.name} stored (cast=True converts)")
        return out


class _Filler:
    """Collects what to read for a load; values that need a conversion or another device go through a copy."""

    def __init__(self, checkpoint: Checkpoint, held: dict[str, Held], *, cast: bool) -> None:
        self._checkpoint, self._held, self._cast = checkpoint, held, cast
        self.work: dict[str, tuple[Param, list[Target]]] = {}
        self._after: list[Callable[[], None]] = []
        self._ids = {id(one.value): name for name, one in held.items()}
        self._wanted: set[str] = set()

    def array(self, name: str, tag: dict[str, Any], target: Any) -> Any:
        if target is None:
            return self._checkpoint._new(name, tag, self.work, numpy=False)  # noqa: SLF001
        self.want(self._ids.get(id(target), name), name)
        return None

    def want(self, held_name: str, stored_name: str | None = None) -> None:
        """Read into the leaf that the target tree has under `held_name`."""
        if held_name in self._wanted:
            return
        self._wanted.add(held_name)
        param = self._checkpoint.param(stored_name or held_name)
        _add(self.work, param, [self._target(param, box, data) for box, data in self._held[held_name].pieces])

    def _target(self, param: Param, box: Box, data: Any) -> Target:
        own = dtypes.of(data.dtype)
        direct = own is param.dtype and not getattr(data, "is_cuda", False)
        if direct and isinstance(data, np.ndarray):
            direct = data.dtype.byteorder != ">" and data.flags.writeable
        if direct:
            return Target(box, as_numpy(data))
        staging = np.empty(box.shape, dtype=param.dtype.carrier)
        self._after.append(lambda: _convert(staging, param, data))
        return Target(box, staging)

    def finish(self) -> None:
        for step in self._after:
            step()


def _convert(staging: np.ndarray[Any, Any], param: Param, data: Any) -> None:
    if isinstance(data, np.ndarray):
        data[...] = staging.view(param.dtype.numpy)
        return
    torch = sys.modules["torch"]
    source = torch.empty(staging.shape, dtype=param.dtype.torch)
    as_numpy(source)[...] = staging
    with torch.no_grad():
        data.copy_(source)


def _add(work: dict[str, tuple[Param, list[Target]]], param: Param, targets: list[Target]) -> None:
    """One entry an array, however many places it goes to: its bytes are read once."""
    work.setdefault(param.name, (param, []))[1].extend(t for t in targets if t.out.size)
