"""Single values that JSON lacks, as tagged JSON and back: ints of any size, NaN, bytes, dtypes, dates, paths, enums...

Rules: a tag is an object with the key "$"; encoding is exact or refused; decoding runs no code that a checkpoint names
(classes are only looked up in modules that are already imported) and needs torch only for torch's own values.
`docs/tree.md` is the normative description. Containers and arrays live in `tree`.
"""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import enum
import fractions
import math
import pathlib
import re
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckptfs.errors import FormatError, MismatchError

Node = Any  # plain JSON data: dict, list, str, int, float, bool, None

# ints that other JSON readers keep in 64 bits stay bare; longer ones are hex, which has no length limit in Python
INT_MIN, INT_MAX = -(2**63), 2**64 - 1
_CANONICAL_NAN = struct.pack(">d", math.nan)
_DTYPE_STR = re.compile(r"[<>|][biufcSUVOmM]\d*(\[[0-9A-Za-z]+\])?")
_ML_DTYPE = re.compile(r"bfloat16|float[468]_e[0-9a-z]+|u?int[124]")
_CLASS_NAME = re.compile(r"[^\s:]+:[^\s:]+")
_BAD = (ValueError, TypeError, KeyError, IndexError, ArithmeticError, AttributeError, MemoryError, RecursionError)


class Unsupported(Exception):
    """A value that has no exact tagged form; the caller knows the path and says what to do."""


@dataclass(frozen=True)
class Tag:
    """One kind of tagged value: the keys it has besides "$", and how it is read."""

    fields: frozenset[str]
    decode: Callable[[dict[str, Any]], object]
    check: Callable[[dict[str, Any]], object]
    optional: frozenset[str] = frozenset()
    hashable: bool = True


def is_plain_text(text: str) -> bool:
    """Whether the string survives JSON: lone surrogates may be joined into one character by a reader."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# ---- numbers, text, bytes -------------------------------------------------------------------------------------------


def encode_int(value: int) -> Node:
    return value if INT_MIN <= value <= INT_MAX else {"$": "int", "value": hex(value)}


def encode_float(value: float) -> Node:
    if math.isfinite(value):
        return value
    if math.isinf(value):
        return {"$": "float", "value": "inf" if value > 0 else "-inf"}
    bits = struct.pack(">d", value)
    return {"$": "float", "value": "nan" if bits == _CANONICAL_NAN else "nan:" + bits.hex()}


def encode_str(value: str) -> Node:
    return value if is_plain_text(value) else {"$": "str", "b64": to_b64(value.encode("utf-8", "surrogatepass"))}


def to_b64(raw: bytes | bytearray | memoryview) -> str:
    return base64.b64encode(raw).decode("ascii")


def from_b64(text: object) -> bytes:
    if not isinstance(text, str):
        raise TypeError("base64 text expected")
    return base64.b64decode(text.encode("ascii"), validate=True)


def _int(node: Node) -> int:
    """A bare or tagged int."""
    if type(node) is int:
        return node
    if type(node) is dict and node.get("$") == "int":
        return _decode_int(node)
    raise TypeError("integer expected")


def _decode_int(tag: dict[str, Any]) -> int:
    if not re.fullmatch(r"-?0x[0-9a-f]+", tag["value"]):
        raise ValueError("not a hexadecimal integer")
    value = int(tag["value"], 16)
    if INT_MIN <= value <= INT_MAX:
        raise ValueError("an integer this small stands for itself")
    return value


def _float(node: Node) -> float:
    """A bare or tagged float."""
    if type(node) is float:
        return node
    if type(node) is dict and node.get("$") == "float":
        return _decode_float(node)
    raise TypeError("float expected")


def _decode_float(tag: dict[str, Any]) -> float:
    text = tag["value"]
    if text in ("nan", "inf", "-inf"):
        return float(text)
    if not re.fullmatch(r"nan:[0-9a-f]{16}", text):
        raise ValueError("not a float that JSON lacks")
    value: float = struct.unpack(">d", bytes.fromhex(text[4:]))[0]
    if not math.isnan(value):
        raise ValueError("not a NaN")
    return value


def _str(node: Node) -> str:
    """A bare or tagged string."""
    if type(node) is str:
        return node
    if type(node) is dict and node.get("$") == "str":
        return _decode_str(node)
    raise TypeError("string expected")


def _decode_str(tag: dict[str, Any]) -> str:
    return from_b64(tag["b64"]).decode("utf-8", "surrogatepass")


# ---- numpy ----------------------------------------------------------------------------------------------------------


def dtype_to_json(dtype: np.dtype[Any]) -> Node:
    """The dtype as text ("<f8", "bfloat16") or, for subarrays and records, as an object; Unsupported if inexact."""
    node = _dtype_to_json(dtype)
    try:
        same = json_to_dtype(node) == dtype
    except _BAD as problem:
        raise Unsupported(f"the dtype {dtype} has no portable description") from problem
    if not same:
        raise Unsupported(f"the dtype {dtype} has no portable description")
    return node


def _dtype_to_json(dtype: np.dtype[Any]) -> Node:
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return {"base": _dtype_to_json(base), "shape": list(shape)}
    if dtype.names is not None and dtype.fields is not None:
        members = [dtype.fields[name] for name in dtype.names]
        if any(len(member) > 2 for member in members):
            raise Unsupported("record fields with titles have no portable description")
        return {
            "names": list(dtype.names),
            "formats": [_dtype_to_json(member[0]) for member in members],
            "offsets": [int(member[1]) for member in members],
            "itemsize": dtype.itemsize,
            "aligned": dtype.isalignedstruct,
        }
    return dtype.name if dtype.type.__module__.startswith("ml_dtypes") else dtype.str


def json_to_dtype(node: Node, depth: int = 0) -> np.dtype[Any]:
    if depth > 16:
        raise ValueError("dtype nested too deeply")
    if isinstance(node, str):
        if _ML_DTYPE.fullmatch(node):
            import ml_dtypes  # only here do these names exist; numpy is not enough

            named: np.dtype[Any] = np.dtype(getattr(ml_dtypes, node))
            return named
        if not _DTYPE_STR.fullmatch(node):
            raise ValueError("not a dtype")
        return np.dtype(node)
    if set(node) == {"base", "shape"}:
        return np.dtype((json_to_dtype(node["base"], depth + 1), tuple(_sizes(node["shape"]))))
    if set(node) != {"names", "formats", "offsets", "itemsize", "aligned"} or type(node["aligned"]) is not bool:
        raise ValueError("not a dtype")
    formats = [json_to_dtype(each, depth + 1) for each in node["formats"]]
    description = {"names": [_str(name) for name in node["names"]], "formats": formats}
    description["offsets"], description["itemsize"] = _sizes(node["offsets"]), _sizes([node["itemsize"]])[0]
    return np.dtype(description, align=node["aligned"])  # type: ignore[call-overload, no-any-return]


def _sizes(node: Node) -> list[int]:
    if type(node) is not list or any(type(size) is not int or not 0 <= size < 2**63 for size in node):
        raise TypeError("a list of sizes expected")
    return node


def encode_inline_array(array: np.ndarray[Any, Any]) -> Node:
    """An array whose dtype is no Zarr and no torch dtype (text, dates, records) as bytes inside the JSON."""
    if array.dtype.hasobject:
        raise Unsupported("an array of Python objects")
    return {
        "$": "ndarray",
        "dtype": dtype_to_json(array.dtype),
        "shape": list(array.shape),
        "b64": to_b64(array.tobytes()),
    }


def _decode_inline_array(tag: dict[str, Any]) -> np.ndarray[Any, Any]:
    return _raw_array(tag["dtype"], _sizes(tag["shape"]), tag["b64"])


def _raw_array(dtype_node: Node, shape: list[int], b64: object) -> np.ndarray[Any, Any]:
    dtype, raw = json_to_dtype(dtype_node), bytearray(from_b64(b64))
    if dtype.hasobject or len(raw) != dtype.itemsize * math.prod(shape):
        raise ValueError("bytes do not fit the dtype and shape")
    return np.ndarray(tuple(shape), dtype=dtype, buffer=raw)


def _encode_numpy_scalar(value: np.generic) -> Node:
    if isinstance(value, np.str_):
        return {"$": "numpy", "dtype": "str", "value": encode_str("".join(value))}  # str() drops NULs at the end
    if isinstance(value, np.bytes_):
        return {"$": "numpy", "dtype": "bytes", "value": to_b64(bytes(value))}
    if value.dtype.hasobject:
        raise Unsupported("a numpy scalar that holds Python objects")
    dtype = dtype_to_json(value.dtype)
    item = value.item() if value.dtype.kind in "biuf" else None
    if type(item) in (bool, int) or (type(item) is float and math.isfinite(item)):
        return {"$": "numpy", "dtype": dtype, "value": item}
    return {"$": "numpy", "dtype": dtype, "b64": to_b64(value.tobytes())}


def _decode_numpy_scalar(tag: dict[str, Any]) -> object:
    if ("value" in tag) == ("b64" in tag):
        raise ValueError("either value or b64 expected")
    if "b64" in tag:
        return _raw_array(tag["dtype"], [], tag["b64"])[()]
    value = tag["value"]
    if tag["dtype"] == "str":
        return np.str_(_str(value))
    if tag["dtype"] == "bytes":
        return np.bytes_(from_b64(value))
    dtype = json_to_dtype(tag["dtype"])
    if {"b": bool, "i": int, "u": int, "f": float}.get(dtype.kind) is not type(value):
        raise TypeError("the value does not fit its dtype")
    with np.errstate(over="ignore"):  # refused below, without a warning
        scalar = dtype.type(value)
    if scalar.item() != value:
        raise ValueError("the value does not fit its dtype")
    return scalar


# ---- time, paths, enums, torch --------------------------------------------------------------------------------------


def _encode_moment(value: dt.datetime | dt.time) -> Node:
    name = "datetime" if isinstance(value, dt.datetime) else "time"
    node: dict[str, Any] = {"$": name, "value": value.isoformat()}
    if value.fold:
        node["fold"] = 1
    if repr(_decode_moment(node)) != repr(value):
        raise Unsupported(
            "only naive times and fixed offsets from UTC are stored exactly: use .astimezone(timezone.utc)"
        )
    return node


def _decode_moment(tag: dict[str, Any]) -> dt.datetime | dt.time:
    if tag.get("fold", 1) != 1 or type(tag.get("fold", 1)) is not int:
        raise ValueError("fold is 1 or absent")
    kind: Any = {"datetime": dt.datetime, "time": dt.time}[tag["$"]]
    moment: dt.datetime | dt.time = kind.fromisoformat(tag["value"])
    return moment.replace(fold=tag.get("fold", 0))


def _decode_timedelta(tag: dict[str, Any]) -> dt.timedelta:
    days, seconds, microseconds = tag["value"]
    if any(type(part) is not int for part in tag["value"]):
        raise TypeError("integers expected")
    return dt.timedelta(days, seconds, microseconds)


_PATHS = {
    kind.__name__: kind
    for kind in (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath)
}


def _decode_path(tag: dict[str, Any]) -> pathlib.PurePath:
    kind, text = _PATHS[tag["type"]], _str(tag["value"])
    try:
        return kind(text)
    except NotImplementedError:  # a concrete path of the other operating system
        return _PATHS["Pure" + tag["type"]](text)


def class_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def find_class(name: str) -> type | None:
    """The class named "module:qualname" if its module is imported already; looked up without running any code."""
    module_name, _, qualname = name.partition(":")
    scope: Any = sys.modules.get(module_name)
    for part in qualname.split("."):
        try:
            scope = vars(scope).get(part)
        except TypeError:
            return None
    return scope if isinstance(scope, type) else None


def _encode_enum(value: enum.Enum) -> Node:
    kind = type(value)
    node = {"$": "enum", "type": class_name(kind)}
    if kind.__members__.get(value.name or "") is value:
        return {**node, "name": value.name}
    if isinstance(value, enum.Flag) and type(value.value) is int:
        return {**node, "value": encode_int(value.value)}
    raise Unsupported("an enum member without a name")


def _check_enum(tag: dict[str, Any]) -> None:
    if not _CLASS_NAME.fullmatch(tag["type"]) or ("name" in tag) == ("value" in tag):
        raise ValueError("a class name and one of name and value expected")
    if type(tag.get("name", "")) is not str:
        raise TypeError("name is a string")
    _int(tag.get("value", 0))


def _decode_enum(tag: dict[str, Any]) -> object:
    kind = find_class(tag["type"])
    member: object = None
    if kind is not None and issubclass(kind, enum.Enum) and "name" in tag:
        member = kind.__members__.get(tag["name"])
    if kind is not None and issubclass(kind, enum.Flag) and "value" in tag:
        member = kind(_int(tag["value"]))
    if member is None:
        what = f"{tag['type']}.{tag.get('name', tag.get('value'))}"
        raise MismatchError(f"the enum member {what} is not known here; import its module before loading")
    return member


def loaded_torch() -> Any:
    """The torch module if this process has imported it, else None: values of its types cannot exist without it."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "Size") and hasattr(torch, "Tensor") else None


def _torch() -> Any:
    try:
        import torch
    except ImportError as problem:
        raise MismatchError("this tree holds values of torch's types; install torch to load it") from problem
    return torch


def _encode_torch(value: Any) -> Node | None:
    torch = loaded_torch()
    if torch is None:
        return None
    if type(value) is torch.dtype:
        return {"$": "torch.dtype", "value": str(value).removeprefix("torch.")}
    if type(value) is torch.device:
        return {"$": "torch.device", "value": str(value)}
    if type(value) is torch.Size:
        return {"$": "torch.Size", "value": [int(size) for size in value]}
    return None


def _check_torch_name(tag: dict[str, Any]) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*(:\d{1,4})?", tag["value"]):
        raise ValueError("not a name of torch")


def _decode_torch_dtype(tag: dict[str, Any]) -> object:
    torch = _torch()
    dtype = vars(torch).get(tag["value"])
    if not isinstance(dtype, torch.dtype):
        raise MismatchError(f"this torch ({torch.__version__}) has no dtype {tag['value']!r}; load with a newer one")
    return dtype


def _decode_torch_device(tag: dict[str, Any]) -> object:
    torch = _torch()
    try:
        return torch.device(tag["value"])
    except RuntimeError as problem:
        raise MismatchError(f"this torch ({torch.__version__}) knows no device {tag['value']!r}") from problem


# ---- the table ------------------------------------------------------------------------------------------------------


def _tag(
    decode: Callable[[dict[str, Any]], object],
    *fields: str,
    check: Callable[[dict[str, Any]], object] | None = None,
    optional: tuple[str, ...] = (),
    hashable: bool = True,
) -> Tag:
    return Tag(frozenset(fields), decode, check or decode, frozenset(optional), hashable)


TAGS: Mapping[str, Tag] = {
    "int": _tag(_decode_int, "value"),
    "float": _tag(_decode_float, "value"),
    "str": _tag(_decode_str, "b64"),
    "complex": _tag(lambda tag: complex(_float(tag["re"]), _float(tag["im"])), "re", "im"),
    "bytes": _tag(lambda tag: from_b64(tag["b64"]), "b64"),
    "bytearray": _tag(lambda tag: bytearray(from_b64(tag["b64"])), "b64", hashable=False),
    "range": _tag(lambda tag: range(*_exactly(3, [_int(part) for part in tag["value"]])), "value"),
    "ellipsis": _tag(lambda _: ...),
    "decimal": _tag(lambda tag: decimal.Decimal(_str(tag["value"])), "value"),
    "fraction": _tag(lambda tag: _decode_fraction(tag["value"]), "value"),
    "datetime": _tag(_decode_moment, "value", optional=("fold",)),
    "time": _tag(_decode_moment, "value", optional=("fold",)),
    "date": _tag(lambda tag: dt.date.fromisoformat(tag["value"]), "value"),
    "timedelta": _tag(_decode_timedelta, "value"),
    "path": _tag(_decode_path, "type", "value"),
    "enum": _tag(_decode_enum, "type", check=_check_enum, optional=("name", "value")),
    "numpy": _tag(_decode_numpy_scalar, "dtype", optional=("value", "b64")),
    "numpy.dtype": _tag(lambda tag: json_to_dtype(tag["value"]), "value"),
    "ndarray": _tag(_decode_inline_array, "dtype", "shape", "b64", hashable=False),
    "torch.dtype": _tag(_decode_torch_dtype, "value", check=_check_torch_name),
    "torch.device": _tag(_decode_torch_device, "value", check=_check_torch_name),
    "torch.Size": _tag(lambda tag: _torch().Size(tag["value"]), "value", check=lambda tag: _sizes(tag["value"])),
}


def _exactly(count: int, parts: list[int]) -> list[int]:
    if len(parts) != count:
        raise ValueError(f"{count} numbers expected")
    return parts


def _decode_fraction(node: Node) -> fractions.Fraction:
    numerator, denominator = _exactly(2, [_int(part) for part in node])
    return fractions.Fraction(numerator, denominator)


_ENCODERS: dict[type, Callable[[Any], Node]] = {
    complex: lambda value: {"$": "complex", "re": encode_float(value.real), "im": encode_float(value.imag)},
    bytes: lambda value: {"$": "bytes", "b64": to_b64(value)},
    bytearray: lambda value: {"$": "bytearray", "b64": to_b64(value)},
    range: lambda value: {"$": "range", "value": [encode_int(i) for i in (value.start, value.stop, value.step)]},
    type(...): lambda _: {"$": "ellipsis"},
    decimal.Decimal: lambda value: {"$": "decimal", "value": str(value)},
    fractions.Fraction: lambda value: {
        "$": "fraction",
        "value": [encode_int(value.numerator), encode_int(value.denominator)],
    },
    dt.datetime: _encode_moment,
    dt.time: _encode_moment,
    dt.date: lambda value: {"$": "date", "value": value.isoformat()},
    dt.timedelta: lambda value: {"$": "timedelta", "value": [value.days, value.seconds, value.microseconds]},
    **{
        kind: lambda value: {"$": "path", "type": type(value).__name__, "value": encode_str(str(value))}
        for kind in _PATHS.values()
    },
}


def encode(value: object) -> Node | None:
    """The tagged form of a single value, None when its type has none, Unsupported when this value has none."""
    encoder = _ENCODERS.get(type(value))
    if encoder is not None:
        return encoder(value)
    if isinstance(value, enum.Enum):
        return _encode_enum(value)
    if isinstance(value, np.generic):
        return _encode_numpy_scalar(value)
    if isinstance(value, np.dtype):
        return {"$": "numpy.dtype", "value": dtype_to_json(value)}
    return _encode_torch(value)


def check(tag: dict[str, Any]) -> None:
    """FormatError unless the tag (one of TAGS) has the right keys and a value that can be read."""
    kind = TAGS[tag["$"]]
    keys = tag.keys() - {"$"}
    if not (kind.fields <= keys <= kind.fields | kind.optional):
        raise FormatError(f"the tag {tag['$']!r} has the keys {sorted(keys)}, expected {sorted(kind.fields)}")
    try:
        kind.check(tag)
    except _BAD as problem:
        raise FormatError(f"the tag {tag['$']!r} holds no valid value: {problem}") from problem
