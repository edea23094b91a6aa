"""The state that is saved: a transformer's fp32 parameters, 300 tensors, rows divided over the ranks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

LAYERS = 33
BIG_COUNT, BIG_COLUMNS = 3, 4096
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def size_of(text: str) -> int:
    """`256M` as bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not found:
        raise ValueError(f"{text!r} is not a size: write 256M or 2G")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def shapes(nbytes: int) -> dict[str, tuple[int, ...]]:
    """300 tensors of about this many bytes in fp32: the width follows from the size."""
    d = max(64, round(math.sqrt(nbytes / 1840) / 64) * 64)
    hidden = 64 * round(d * 8 / 3 / 64)
    found: dict[str, tuple[int, ...]] = {"embed.weight": (32 * d, d)}
    for i in range(LAYERS):
        for name in ("wq", "wk", "wv", "wo"):
            found[f"layers.{i}.attention.{name}.weight"] = (d, d)
        found[f"layers.{i}.mlp.gate.weight"] = (hidden, d)
        found[f"layers.{i}.mlp.up.weight"] = (hidden, d)
        found[f"layers.{i}.mlp.down.weight"] = (d, hidden)
        found[f"layers.{i}.norm1.weight"] = (d,)
        found[f"layers.{i}.norm2.weight"] = (d,)
    found["norm.weight"] = (d,)
    found["output.weight"] = (32 * d, d)
    return found


def big_shapes(nbytes: int) -> dict[str, tuple[int, ...]]:
    """Three tensors that are all of it: 1.1 GiB each of 3.3 GiB."""
    rows = max(64, round(nbytes / BIG_COUNT / 4 / BIG_COLUMNS / 64) * 64)
    return {f"big.{i}": (rows, BIG_COLUMNS) for i in range(BIG_COUNT)}


def rows_of(count: int, rank: int, size: int) -> tuple[int, int]:
    """The rows of a rank, as torch's Shard(0) divides them."""
    each = -(-count // size)
    return min(count, rank * each), min(count, (rank + 1) * each)


def fill(shapes: Mapping[str, Sequence[int]], first_row: Mapping[str, int], arrays: Mapping[str, Any]) -> None:
    """Values that say where they belong, and do not compress; each array holds the rows from `first_row` on."""
    noise = np.random.default_rng(7).standard_normal(1 << 20, dtype=np.float32)
    for number, (name, array) in enumerate(arrays.items()):
        flat = array.reshape(-1)
        first = first_row[name] * math.prod(shapes[name][1:])
        for at in range(0, flat.size, noise.size):
            part = flat[at : at + noise.size]
            np.add(np.roll(noise, -((first + at) % noise.size))[: part.size], number, out=part)


def fingerprint(arrays: Iterable[Any]) -> str:
    import xxhash

    whole = xxhash.xxh3_128()
    for array in arrays:
        whole.update(memoryview(array).cast("B"))
    return whole.hexdigest()


@dataclass
class State:
    """One rank's part of the state, in memory that has been touched and is used again and again."""

    shapes: dict[str, tuple[int, ...]]
    rank: int
    size: int
    local: dict[str, Any] = field(default_factory=dict)  # name → this rank's rows, a torch tensor

    def __post_init__(self) -> None:
        import torch

        for name, shape in self.shapes.items():
            low, high = rows_of(shape[0], self.rank, self.size)
            self.local[name] = torch.empty(high - low, *shape[1:])
        self.fill()

    @property
    def total_bytes(self) -> int:
        return sum(4 * math.prod(shape) for shape in self.shapes.values())

    @property
    def local_bytes(self) -> int:
        return sum(t.nbytes for t in self.local.values())

    def fill(self) -> None:
        first = {name: rows_of(shape[0], self.rank, self.size)[0] for name, shape in self.shapes.items()}
        fill(self.shapes, first, {name: tensor.numpy() for name, tensor in self.local.items()})

    def zero(self) -> None:
        for tensor in self.local.values():
            tensor.zero_()

    def fingerprint(self) -> str:
        return fingerprint(tensor.numpy() for tensor in self.local.values())

    def distributed(self, mesh: Any) -> dict[str, Any]:
        """The same memory as DTensors over a mesh."""
        from torch.distributed.tensor import DTensor, Shard

        out = {}
        for name, tensor in self.local.items():
            shape = self.shapes[name]
            stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
            out[name] = DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
        return out
