"""What differs between two steps: arrays added, removed and changed (by how much), and plain values.

Rules: arrays that are stored in the same way with the same checksums are equal and not read. The others are read once,
in bands, from both sides. The relative change of an array is |b - a| / |a|, Euclidean norms over the elements that are
finite on both sides; equal bits are no change, whatever they mean.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfs.saveplan import matches
from ckptfs.stats import as_float, bands

if TYPE_CHECKING:
    from ckptfs.checkpoint import Checkpoint
    from ckptfs.manifest import Param

_BAND_ELEMENTS = 4 << 20


@dataclass(frozen=True)
class Change:
    """One array that differs. Without numbers when the shapes do not allow a comparison."""

    name: str
    old_shape: tuple[int, ...]
    new_shape: tuple[int, ...]
    old_dtype: str
    new_dtype: str
    relative: float | None = None  # |new - old| / |old|; inf if old is all zero
    max_abs: float | None = None
    changed: int = 0  # elements
    not_finite: int = 0  # changed elements that are NaN or infinite on a side

    @property
    def comparable(self) -> bool:
        return self.relative is not None

    @property
    def sort_key(self) -> tuple[bool, float, str]:
        relative = self.relative
        return relative is not None, -math.inf if relative is None else -relative, self.name

    def to_json(self) -> dict[str, Any]:
        return {key: _finite(value) for key, value in asdict(self).items()}


@dataclass(frozen=True)
class ValueChange:
    """One plain value that differs, as JSON text; None where there is none."""

    path: str
    old: str | None
    new: str | None


@dataclass(frozen=True)
class Diff:
    """The difference between two steps. `changed`: what cannot be compared first, then the largest change first."""

    added: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    changed: list[Change] = field(default_factory=list)
    same: list[str] = field(default_factory=list)
    values: list[ValueChange] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed or self.values)

    def to_json(self) -> dict[str, Any]:
        return {
            "added": self.added,
            "removed": self.removed,
            "changed": [change.to_json() for change in self.changed],
            "same": len(self.same),
            "values": [asdict(value) for value in self.values],
        }


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def diff(
    old: Checkpoint,
    new: Checkpoint,
    pattern: str = "*",
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Diff:
    """Compare two steps (array names that fit the pattern). Tied names count once each, read once."""
    names = [name for name in old if matches(name, pattern)]
    theirs = {name for name in new if matches(name, pattern)}
    both = [name for name in names if name in theirs]
    known: dict[tuple[str, str], Change | None] = {}
    pairs = {(old.param(n).name, new.param(n).name) for n in both}
    total = sum(_cost(old.param(a), new.param(b)) for a, b in pairs)
    changed, same, done = [], [], 0
    for name in both:
        one, two = old.param(name), new.param(name)
        key = one.name, two.name
        if key not in known:
            known[key] = _compare(old, one, new, two, lambda n, base=done: progress(base + n, total))  # type: ignore[misc]
            done += _cost(one, two)
        found = known[key]
        if found is None:
            same.append(name)
        else:
            changed.append(Change(**(vars(found) | {"name": name})))
    return Diff(
        added=sorted(theirs - set(names)),
        removed=[name for name in names if name not in theirs],
        changed=sorted(changed, key=lambda change: change.sort_key),
        same=same,
        values=_value_changes(old, new) if pattern == "*" else [],
    )


def _cost(one: Param, two: Param) -> int:
    return 0 if _equal_bytes(one, two) or one.shape != two.shape else one.nbytes + two.nbytes


def _equal_bytes(one: Param, two: Param) -> bool:
    alike = (one.dtype, one.layout, one.codec, one.runs) == (two.dtype, two.layout, two.codec, two.runs)
    return alike and one.hashes == two.hashes


def _compare(
    old: Checkpoint, one: Param, new: Checkpoint, two: Param, progress: Callable[[int], None]
) -> Change | None:
    if _equal_bytes(one, two):
        return None
    facts: dict[str, Any] = {
        "name": one.name,
        "old_shape": one.shape,
        "new_shape": two.shape,
        "old_dtype": one.dtype.name,
        "new_dtype": two.dtype.name,
    }
    if one.shape != two.shape:
        return Change(**facts)
    sums = _Sums(one, two)
    done = 0
    pieces = zip(
        bands(old, one, _BAND_ELEMENTS * one.dtype.itemsize),
        bands(new, two, _BAND_ELEMENTS * two.dtype.itemsize),
        strict=True,
    )
    for a, b in pieces:
        sums.add(a, b)
        done += a.nbytes + b.nbytes
        progress(done)
    if not sums.changed and one.dtype is two.dtype:
        return None
    return Change(
        **facts,
        relative=sums.relative,
        max_abs=sums.max_abs,
        changed=sums.changed,
        not_finite=sums.not_finite,
    )


class _Sums:
    """Running sums of one comparison."""

    def __init__(self, one: Param, two: Param) -> None:
        self._one, self._two = one, two
        self._delta = self._norm = self.max_abs = 0.0
        self.changed = self.not_finite = 0

    def add(self, a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> None:
        x, y = _numbers(self._one, a), _numbers(self._two, b)
        if self._one.dtype is self._two.dtype:
            moved = a.view(np.uint8).reshape(a.size, -1) != b.view(np.uint8).reshape(b.size, -1)
            differs = moved.any(axis=1)
        else:
            differs = ~((x == y) | (np.isnan(x) & np.isnan(y)))
        self.changed += int(differs.sum())
        good = np.isfinite(x) & np.isfinite(y)
        self.not_finite += int((differs & ~good).sum())
        with np.errstate(over="ignore", invalid="ignore"):
            delta = np.abs(y[good] - x[good])
            self._norm += float(np.square(np.abs(x[good])).sum())
            self._delta += float(np.square(delta).sum())
        self.max_abs = max(self.max_abs, float(delta.max(initial=0.0)))

    @property
    def relative(self) -> float:
        if self._delta == 0:
            return 0.0
        return math.sqrt(self._delta / self._norm) if self._norm else math.inf


def _numbers(param: Param, flat: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Elements as float64, complex ones as complex128: their difference has a direction."""
    if param.dtype.name.startswith("complex"):
        return flat.view(param.dtype.numpy).astype(np.complex128)
    return as_float(param, flat)


# --- plain values ----------------------------------------------------------------------------------------


def plain_values(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Every plain value of a saved tree as (path, JSON text); lists of numbers and unusual values count as one."""
    if isinstance(node, dict) and "$" in node:
        if node["$"] == "array":
            return
        items = node.get("items")
        if node["$"] == "per_rank":
            for rank, value in node["ranks"].items():
                yield from plain_values(value, f"{path}@rank{rank}")
            return
        if not isinstance(items, list) or not _holds_containers(items):
            yield path, _text(node)
            return
        pairs = node["$"] in ("dict", "odict", "counter", "defaultdict", "namespace", "simple_namespace")
        names = node.get("fields") or range(len(items))
        for name, item in zip(names, items, strict=False):
            key, value = item if pairs else (name, item)
            yield from plain_values(value, _below(path, key))
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from plain_values(value, _below(path, key))
    elif isinstance(node, list) and _holds_containers(node):
        for at, value in enumerate(node):
            yield from plain_values(value, _below(path, at))
    else:
        yield path, _text(node)


def _holds_containers(items: list[Any]) -> bool:
    return any(isinstance(item, (dict, list)) for item in items)


def _below(path: str, key: Any) -> str:
    name = key if isinstance(key, str) else _text(key)
    return f"{path}/{name}" if path else name


def _text(node: Any) -> str:
    if isinstance(node, dict) and set(node) == {"$", "value"} and isinstance(node["value"], (str, int, float)):
        return str(node["value"])
    return json.dumps(node, ensure_ascii=False)


def _value_changes(old: Checkpoint, new: Checkpoint) -> list[ValueChange]:
    one, two = dict(plain_values(old.manifest.tree)), dict(plain_values(new.manifest.tree))
    paths = [*one, *(path for path in two if path not in one)]
    return [ValueChange(p, one.get(p), two.get(p)) for p in paths if one.get(p) != two.get(p)]
