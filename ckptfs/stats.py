"""Numbers about arrays, in one pass and bounded memory: range, mean, deviation, what is not finite, a histogram.

Everything is computed in float64. NaN and infinities are counted and left out of the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfs.box import boxes_of_range
from ckptfs.read import Target

if TYPE_CHECKING:
    from ckptfs.checkpoint import Checkpoint
    from ckptfs.manifest import Param

Values = np.ndarray[Any, Any]
BAND_BYTES = 32 << 20


def bands(
    checkpoint: Checkpoint, param: Param, band_bytes: int = BAND_BYTES, *, verify: str = "extents"
) -> Iterator[Values]:
    """An array as flat pieces, one after the other in row-major order, in the carrier's type."""
    count = math.prod(param.shape)
    step = max(1, band_bytes // param.dtype.itemsize)
    for start in range(0, count, step):
        stop = min(count, start + step)
        out = np.empty(stop - start, dtype=param.dtype.carrier)
        at, targets = 0, []
        for box in boxes_of_range(start, stop, param.shape):
            targets.append(Target(box, out[at : at + box.size].reshape(box.shape)))
            at += box.size
        checkpoint.read_boxes([(param, targets)], verify=verify)
        yield out


def as_float(param: Param, flat: Values) -> Values:
    """Carrier elements as numbers; complex ones by their absolute value."""
    values = flat.view(param.dtype.numpy)
    if param.dtype.name.startswith("complex"):
        return np.asarray(np.abs(values.astype(np.complex128)))
    return values.astype(np.float64)


@dataclass
class Stats:
    """What is known of the values added so far."""

    count: int = 0
    nan: int = 0
    inf: int = 0
    zero: int = 0
    min: float = math.inf
    max: float = -math.inf
    mean: float = math.nan
    _moment: float = 0.0  # sum of squared distances from the mean
    _finite: int = field(default=0)

    def add(self, values: Values) -> None:
        """Chan's way to join means and variances: no large sums that cancel."""
        values = values.reshape(-1)
        self.count += values.size
        good = np.isfinite(values)
        if not good.all():
            nan = int(np.isnan(values).sum())
            self.nan += nan
            self.inf += values.size - int(good.sum()) - nan
            values = values[good]
        if not values.size:
            return
        self.zero += int((values == 0).sum())
        self.min, self.max = min(self.min, float(values.min())), max(self.max, float(values.max()))
        with np.errstate(over="ignore", invalid="ignore"):
            mean = float(values.mean())
            moment = float(np.square(values - mean).sum())
        total = self._finite + values.size
        if self._finite:
            delta = mean - self.mean
            moment += delta * delta * self._finite * values.size / total
            mean = self.mean + delta * values.size / total
        self.mean, self._moment, self._finite = mean, self._moment + moment, total

    @property
    def finite(self) -> int:
        return self._finite

    @property
    def std(self) -> float:
        return math.sqrt(self._moment / self._finite) if self._finite else math.nan

    def to_json(self) -> dict[str, Any]:
        numbers = {"min": self.min, "max": self.max, "mean": self.mean, "std": self.std}
        counts = {"count": self.count, "nan": self.nan, "inf": self.inf, "zero": self.zero}
        return counts | {key: value if math.isfinite(value) else None for key, value in numbers.items()}


def histogram(pieces: Iterator[Values], low: float, high: float, bins: int) -> Values:
    """How many finite values lie in each of equal intervals from `low` to `high`."""
    counts = np.zeros(bins, dtype=np.int64)
    if low == high:
        high = low + 1
    half = (high / 2 - low / 2) / bins  # halves, because high - low may overflow
    for piece in pieces:
        good = piece[np.isfinite(piece)]
        at = np.floor((good / 2 - low / 2) / half) if half else (good > low) * bins
        counts += np.bincount(np.clip(at, 0, bins - 1).astype(np.int64), minlength=bins)
    return counts
