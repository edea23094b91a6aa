"""bfloat16 and float8 for zarr-python, which has neither: read, written, with any fill value.

zarr finds these classes by the entry points of the group `zarr.data_type`; nobody imports this module by name.
The names are those of the zarr-extensions registry (TensorStore and zarrs use the same). ml_dtypes carries the values.
Fill values are JSON numbers, "NaN", "Infinity", "-Infinity", or "0x…", the element's bits, for every other NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import ml_dtypes
import numpy as np
from zarr.core.dtype.common import HasEndianness, HasItemSize
from zarr.dtype import DataTypeValidationError, ZDType

if TYPE_CHECKING:
    from zarr.core.common import ZarrFormat

_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, kw_only=True)
class _Float(ZDType[Any, Any], HasItemSize):
    """A floating-point type of ml_dtypes with one byte an element."""

    dtype_cls: ClassVar[type[Any]]
    _zarr_v3_name: ClassVar[str]
    _native: ClassVar[np.dtype[Any]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        name = cls.__dict__.get("_zarr_v3_name")
        if name is not None:
            cls._native = np.dtype(getattr(ml_dtypes, name))
            cls.dtype_cls = type(cls._native)

    @property
    def item_size(self) -> int:
        return self._native.itemsize

    # --- the type --------------------------------------------------------------------------------------

    @classmethod
    def from_native_dtype(cls, dtype: np.dtype[Any]) -> Self:
        if not cls._check_native_dtype(dtype):
            raise DataTypeValidationError(f"{dtype} is not {cls._zarr_v3_name}")
        return cls()

    def to_native_dtype(self) -> np.dtype[Any]:
        return self._native

    @classmethod
    def _from_json_v2(cls, data: object) -> Self:
        raise DataTypeValidationError(f"Zarr v2 has no {cls._zarr_v3_name}; {data!r} is something else")

    @classmethod
    def _from_json_v3(cls, data: object) -> Self:
        if data != cls._zarr_v3_name:
            raise DataTypeValidationError(f"{data!r} is not {cls._zarr_v3_name}")
        return cls()

    def to_json(self, zarr_format: ZarrFormat) -> Any:
        if zarr_format != 3:
            raise ValueError(f"Zarr v2 has no {self._zarr_v3_name}; write zarr_format=3")
        return self._zarr_v3_name

    # --- scalars ---------------------------------------------------------------------------------------

    def _check_scalar(self, data: object) -> bool:
        try:
            self._native.type(data)
        except (TypeError, ValueError, OverflowError):
            return False
        return True

    def cast_scalar(self, data: object) -> Any:
        if not self._check_scalar(data):
            raise TypeError(f"{data!r} of type {type(data).__name__} is not a value for {self._zarr_v3_name}")
        return self._native.type(data)

    def default_scalar(self) -> Any:
        return self._native.type(0)

    def from_json_scalar(self, data: Any, *, zarr_format: ZarrFormat) -> Any:
        del zarr_format
        if isinstance(data, str):
            return self._from_text(data)
        if isinstance(data, bool) or not isinstance(data, int | float):
            raise TypeError(f"{data!r} is not a fill value for {self._zarr_v3_name}")
        return self._native.type(data)

    def _from_text(self, text: str) -> Any:
        digits = 2 * self.item_size
        if text.startswith("0x") and len(text) == 2 + digits:
            bits = int(text, 16)
            return np.array(bits, f"u{self.item_size}").view(self._native)[()]
        if text not in _SPECIAL:
            raise ValueError(f"fill value {text!r} is not NaN, Infinity, -Infinity or 0x and {digits} digits")
        value = self._native.type(_SPECIAL[text])
        if math.isnan(value) != (text == "NaN"):
            raise ValueError(f"{self._zarr_v3_name} has no {text}")
        return value

    def to_json_scalar(self, data: object, *, zarr_format: ZarrFormat) -> float | str:
        del zarr_format
        value = self.cast_scalar(data)
        if self.item_size == 1:
            return f"0x{_bits(value):02x}"  # legal for every value, and the only form that zarrs reads
        if math.isinf(value):
            return "Infinity" if value > 0 else "-Infinity"
        if not math.isnan(value):
            return float(value)
        bits, usual = _bits(value), _bits(self._native.type(math.nan))
        return "NaN" if bits == usual else f"0x{bits:0{2 * self.item_size}x}"


def _bits(value: Any) -> int:
    return int.from_bytes(np.asarray(value).tobytes(), "little")


@dataclass(frozen=True, kw_only=True)
class BFloat16(_Float, HasEndianness):
    """Truncated float32: the only type here that has a byte order."""

    _zarr_v3_name = "bfloat16"

    @classmethod
    def from_native_dtype(cls, dtype: np.dtype[Any]) -> Self:
        if not cls._check_native_dtype(dtype):
            raise DataTypeValidationError(f"{dtype} is not {cls._zarr_v3_name}")
        return cls(endianness="little" if dtype.newbyteorder("<").byteorder == dtype.byteorder else "big")

    def to_native_dtype(self) -> np.dtype[Any]:
        return self._native.newbyteorder("<" if self.endianness == "little" else ">")


@dataclass(frozen=True, kw_only=True)
class Float8E4M3FN(_Float):
    """OCP FP8 E4M3: finite, with NaN."""

    _zarr_v3_name = "float8_e4m3fn"


@dataclass(frozen=True, kw_only=True)
class Float8E5M2(_Float):
    """OCP FP8 E5M2: IEEE-like, with Inf and NaN."""

    _zarr_v3_name = "float8_e5m2"


@dataclass(frozen=True, kw_only=True)
class Float8E4M3FNUZ(_Float):
    """E4M3 as AMD and Graphcore hardware has it: finite, one NaN, no negative zero."""

    _zarr_v3_name = "float8_e4m3fnuz"


@dataclass(frozen=True, kw_only=True)
class Float8E5M2FNUZ(_Float):
    """E5M2 as AMD and Graphcore hardware has it: finite, one NaN, no negative zero."""

    _zarr_v3_name = "float8_e5m2fnuz"
