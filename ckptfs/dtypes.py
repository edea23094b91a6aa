"""The element types: one table for torch, numpy, Zarr v3 and safetensors.

The stored name is the Zarr v3 (or zarr-extensions registry) name. Elements are little-endian on disk.
`carrier` is the unsigned numpy type of the same width that moves the bytes when numpy has no such type.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfs.errors import MismatchError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class DType:
    """One element type."""

    name: str
    itemsize: int
    safetensors: str | None
    native: bool = True  # numpy itself has it; the others need ml_dtypes

    @property
    def numpy(self) -> np.dtype[Any]:
        """The numpy type; bfloat16 and float8 come from ml_dtypes."""
        if self.native:
            return np.dtype(self.name)
        import ml_dtypes  # only needed for types numpy lacks

        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, self.name))
        return dtype

    @property
    def carrier(self) -> np.dtype[Any]:
        """An unsigned type of the same width, good for moving bytes (complex128 for 16 bytes)."""
        return np.dtype({1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}[self.itemsize])

    @property
    def torch(self) -> torch.dtype:
        import torch

        dtype: torch.dtype = getattr(torch, self.name)
        return dtype


_TABLE = [
    DType("bool", 1, "BOOL"),
    DType("int8", 1, "I8"),
    DType("uint8", 1, "U8"),
    DType("int16", 2, "I16"),
    DType("uint16", 2, "U16"),
    DType("int32", 4, "I32"),
    DType("uint32", 4, "U32"),
    DType("int64", 8, "I64"),
    DType("uint64", 8, "U64"),
    DType("float16", 2, "F16"),
    DType("bfloat16", 2, "BF16", native=False),
    DType("float32", 4, "F32"),
    DType("float64", 8, "F64"),
    DType("float8_e4m3fn", 1, "F8_E4M3", native=False),
    DType("float8_e5m2", 1, "F8_E5M2", native=False),
    DType("float8_e4m3fnuz", 1, None, native=False),
    DType("float8_e5m2fnuz", 1, None, native=False),
    DType("complex64", 8, "C64"),
    DType("complex128", 16, None),
]
BY_NAME = {dtype.name: dtype for dtype in _TABLE}
BY_SAFETENSORS = {dtype.safetensors: dtype for dtype in _TABLE if dtype.safetensors}


@cache
def _numpy_name(dtype: np.dtype[Any]) -> str:
    return dtype.name  # numpy works it out anew each time, in twenty calls


def of(thing: object) -> DType:
    """The DType of a torch dtype, numpy dtype or name; a MismatchError names what is not known."""
    if isinstance(thing, DType):
        return thing
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(thing, torch.dtype):
        name = str(thing).removeprefix("torch.")
    elif isinstance(thing, str) and thing in BY_NAME:
        name = thing
    else:
        try:
            name = _numpy_name(np.dtype(thing))  # type: ignore[call-overload]
        except TypeError:
            name = str(thing)
    found = BY_NAME.get(name)
    if found is None:
        msg = f"element type {thing!r} cannot be stored; known types: {', '.join(BY_NAME)}. Convert the tensor first."
        raise MismatchError(msg)
    return found
