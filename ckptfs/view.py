"""A checkpoint seen under other names and layouts, still lazy: a name-and-layout map (docs/rules.md) over its arrays.

A view is a mapping of arrays that are read when they are indexed, and then only the stored bytes that the index
needs. Where its map comes from, first found: the caller, the manifest (`maps`, put there by the save), a built-in map
that recognises the names; names that are Hugging Face's already have the identity. The variables of a map come from
`assets/config.json`. Tied weights are compared by their checksums, without reading them.

View arrays are made for torch loaders: their `dtype` is torch's. `numpy()` and the rest do not need torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptfs import dtypes, rules
from ckptfs.array import LazyArray, Part
from ckptfs.errors import MismatchError, NotFoundError
from ckptfs.expr import Expr, Plan
from ckptfs.manifest import strict_json
from ckptfs.read import Target

if TYPE_CHECKING:
    import torch

    from ckptfs.checkpoint import Checkpoint
    from ckptfs.manifest import Param

CONFIG = "config.json"
MapLike = "rules.Map | Mapping[str, Any] | str | os.PathLike[str]"


class ViewArray(LazyArray):
    """An array of a view: computed from stored arrays by moving (and, where the map says so, casting) elements.

    `expression` says how: which boxes of which stored arrays fill a box of this one.
    """

    def __init__(self, view: View, name: str, expression: Expr) -> None:
        self._view = view
        self.expression = expression
        self.name = name
        self.shape = expression.shape
        self.element = dtypes.of(expression.dtype)

    @property
    def dtype(self) -> torch.dtype:
        return self.element.torch

    def is_floating_point(self) -> bool:
        return self.element.name.startswith(("float", "bfloat"))

    def dim(self) -> int:
        return self.ndim

    def numel(self) -> int:
        return self.size

    def sources(self) -> list[str]:
        """The names of the stored arrays that it is made of."""
        return list(dict.fromkeys(name for name, _ in self.expression.sources()))

    def fill(self, parts: Sequence[Part]) -> None:
        plans = [self.expression.plan(box, out.view(self.element.numpy)) for box, out in parts]
        self._view.read(plans)

    def __reduce__(self) -> tuple[Any, ...]:
        return _array_again, (self._view, self.name)


class View(Mapping[str, ViewArray]):
    """A checkpoint's arrays under the names of a map."""

    def __init__(self, checkpoint: Checkpoint, mapping: rules.Map, variables: Mapping[str, Any]) -> None:
        self.checkpoint, self.map, self.variables = checkpoint, mapping, dict(variables)
        sources = {name: (param.shape, param.dtype.name) for name in checkpoint if (param := checkpoint.param(name))}
        self._mapped = rules.compile_map(mapping, sources, variables, equal=self._equal)

    def __repr__(self) -> str:
        return f"<ckptfs view of {self.checkpoint.url} by map {self.map.name!r}, {len(self)} arrays>"

    def __getitem__(self, name: str) -> ViewArray:
        try:
            return ViewArray(self, name, self._mapped[name])
        except KeyError:
            msg = f"the view of {self.checkpoint.url} by map {self.map.name!r} has no array {name!r}"
            raise NotFoundError(msg) from None

    def __contains__(self, name: object) -> bool:
        return name in self._mapped

    def __iter__(self) -> Iterator[str]:
        return iter(self._mapped)

    def __len__(self) -> int:
        return len(self._mapped)

    @property
    def ignored(self) -> list[str]:
        """Stored arrays that the map leaves out on purpose."""
        return list(self._mapped.ignored)

    @property
    def dropped(self) -> dict[str, str]:
        """Stored arrays left out because they equal another one: name → the other."""
        return dict(self._mapped.dropped)

    def match(self, pattern: str) -> list[str]:
        """Names that fit a shell-style pattern."""
        from ckptfs.saveplan import matches

        return [name for name in self if matches(name, pattern)]

    def read(self, plans: Sequence[Plan]) -> None:
        """Do what these plans say: every stored array is read in one go."""
        work: dict[str, tuple[Param, list[Target]]] = {}
        for plan in plans:
            for piece in plan.pieces:
                param = self.checkpoint.param(piece.source)
                target = Target(piece.box, piece.into.view(param.dtype.carrier))
                work.setdefault(param.name, (param, []))[1].append(target)
        self.checkpoint.read_boxes(work.values(), verify=self.checkpoint.verify)
        for plan in plans:
            plan.finish()

    def _equal(self, one: str, other: str) -> bool:
        a, b = self.checkpoint.param(one), self.checkpoint.param(other)
        if a is b:
            return True
        if (a.layout, a.codec, a.runs) == (b.layout, b.codec, b.runs):
            return a.hashes == b.hashes
        rows = max(1, (16 << 20) // max(1, a.nbytes // max(1, a.shape[0]))) if a.shape else 1
        bands = range(0, a.shape[0], rows) if a.shape else [None]
        one_array, other_array = self.checkpoint[one], self.checkpoint[other]
        for first in bands:
            index: Any = ... if first is None else slice(first, first + rows)
            if one_array.numpy(index).tobytes() != other_array.numpy(index).tobytes():
                return False
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        return View, (self.checkpoint, self.map, self.variables)


def _array_again(view: View, name: str) -> ViewArray:
    return view[name]


def view_of(checkpoint: Checkpoint, name: str, given: Any = None, variables: Mapping[str, Any] | None = None) -> View:
    """The view `name` of a checkpoint; `given` is a map as a document, a file, a built-in name or a Map."""
    mapping = find_map(checkpoint, name, given)
    return View(checkpoint, mapping, {**config_variables(checkpoint), **(variables or {})})


def find_map(checkpoint: Checkpoint, name: str, given: Any = None) -> rules.Map:
    from ckptfs import maps

    if given is not None:
        return parse_map(given)
    stored = checkpoint.manifest.maps.get(name)
    if stored is not None:
        return parse_map(stored)
    if name != "hf":
        have = ", ".join(map(repr, ["hf", *checkpoint.manifest.maps]))
        raise NotFoundError(f"{checkpoint.url} has no view {name!r}: there are {have}; or pass map=")
    found = maps.detect(checkpoint)
    if found is None:
        raise MismatchError(
            f"{checkpoint.url}: no built-in map knows these names; pass map= (a file or a document, see docs/rules.md)"
        )
    return maps.load(found)


def parse_map(given: Any) -> rules.Map:
    """A map from whatever names one: a Map, a document, the name of a built-in map, a file."""
    from ckptfs import maps

    if isinstance(given, rules.Map):
        return given
    if isinstance(given, Mapping):
        return rules.parse(given)
    text = os.fspath(given)
    if text in maps.NAMES:
        return maps.load(text)
    path = Path(text)
    if not path.is_file():
        raise NotFoundError(f"{text!r} is neither a map file nor a built-in map: those are {', '.join(maps.NAMES)}")
    return rules.loads(path.read_bytes())


def config_variables(checkpoint: Checkpoint) -> dict[str, int]:
    """What the checkpoint's assets/config.json gives; nothing if there is none."""
    if CONFIG not in checkpoint.manifest.assets:
        return {}
    data = strict_json(checkpoint.store.read(f"assets/{CONFIG}"))
    return rules.variables_of(data) if isinstance(data, Mapping) else {}
