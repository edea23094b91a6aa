"""What Zarr v3 readers see: node names, zarr.json documents and shard indexes.

Pure: values in, values and bytes out. What is written here is read back strictly: a document that
`array_json` would not have written is a FormatError, so a parsed one needs no further checks.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfs import dtypes
from ckptfs.codec import Codec
from ckptfs.errors import CorruptError, FormatError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckptfs.dtypes import DType
    from ckptfs.grid import Layout

MAX_NODE_NAME_BYTES = 200
_KEPT_NAME_BYTES = 120
_MAX_SIZE = (1 << 63) - 1
_MISSING = (1 << 64) - 1
_SAFE = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-+=@,()")
_EMPTY = "%empty"  # neither this nor the next is a legal %XX, so no other name can look like them
_CUT = "%~"
_TOP_RESERVED = ("assets", "manifest.json")
_CRC_BYTES = 4
_ENTRY_BYTES = 16


# --- node names ------------------------------------------------------------------------------------------


def escape(component: str, *, top: bool = False) -> str:
    """The node name (a folder's name) of one component of a parameter's name; `top`: directly in the step."""
    if component == "":
        return _EMPTY
    raw = component.encode("utf-8", "surrogatepass")
    return _fit(_plain(raw), raw, top=top)


def _plain(raw: bytes) -> str:
    return "".join(chr(byte) if byte in _SAFE else f"%{byte:02X}" for byte in raw)


def _fit(name: str, raw: bytes, *, top: bool) -> str:
    """A node name made legal: no reserved one, and short enough."""
    if _reserved(name, top=top):
        name = f"%{raw[0]:02X}{name[1:]}"
    if len(name) <= MAX_NODE_NAME_BYTES:
        return name
    # Not cut inside an escape: at most two of its three characters stand behind the last "%".
    kept = re.sub(r"%.?$", "", name[:_KEPT_NAME_BYTES])
    return kept + _CUT + hashlib.sha256(raw).hexdigest()[:32]


def _reserved(name: str, *, top: bool) -> bool:
    if name.startswith("__") or name == "zarr.json" or not name.strip("."):
        return True
    return top and (name.startswith(".") or name in _TOP_RESERVED)


def unescape(node: str, *, top: bool = False) -> str | None:
    """The component that `escape` turned into this node name; None if it was cut (the manifest has the real name)."""
    if node == _EMPTY:
        return ""
    if re.fullmatch(r".+%~[0-9a-f]{32}", node) and len(node) <= MAX_NODE_NAME_BYTES:
        return None
    try:
        raw = re.sub(rb"%([0-9A-F]{2})", lambda found: bytes([int(found[1], 16)]), node.encode("ascii"))
        component = raw.decode("utf-8", "surrogatepass")
    except UnicodeError as error:
        raise FormatError(f"{node!r:.300} is not an escaped node name") from error
    if escape(component, top=top) != node:
        raise FormatError(f"{node!r:.300} is not an escaped node name")
    return component


def node_path(components: Sequence[str]) -> str:
    """The path of a node in its step: `model/layers.0.wq.weight`."""
    if not components:
        raise MismatchError("the root itself cannot be an array; put the tensor into a dict")
    return "/".join(escape(component, top=at == 0) for at, component in enumerate(components))


@lru_cache(maxsize=1 << 16)  # asked for several times a save, and in every save
def path_of_name(name: str) -> str:
    """The node path of a parameter's name: components joined by "/", escaped as ckptfs.tree does it."""
    return "/".join(_node_of(part, name, top=at == 0) for at, part in enumerate(name.split("/")))


# What stands in a component besides itself: see docs/tree.md.
_ESCAPES = {"%25": b"%", "%2F": b"/", "%40": b"@", "%7E": b"~", "%00": b""}
_MARK = re.compile(r"%25|%2F|%40|%7E|%ED%[AB][0-9A-F]%[89AB][0-9A-F]|~\d+(?:@rank\d+)?\Z|~|%|[^%~]+")


def _node_of(part: str, name: str, *, top: bool) -> str:
    if part in ("", "%00"):
        return _EMPTY
    head = 3 if part.startswith("%00") else 0  # an empty key with a suffix
    raw, node = b"", ""
    for mark in _MARK.findall(part[head:]):
        if mark == "%":
            raise FormatError(f"parameter name {name!r:.300}: '%' stands only in %25, %2F, %40, %7E and %00")
        if mark in _ESCAPES:
            value = _ESCAPES[mark]
        elif mark.startswith("%ED"):
            value = bytes.fromhex(mark.replace("%", ""))
        else:
            value = mark.encode("utf-8", "surrogatepass")
        raw += value
        # Suffixes ("@rank0", "~2") stand as they are; the same characters in a key are escaped, so they never meet.
        node += mark if mark == "%40" or mark[:1] == "~" != mark else _plain(value)
    return _fit(node, part.encode("utf-8", "surrogatepass") if "~" in node or "%40" in node else raw, top=top)


# --- documents -------------------------------------------------------------------------------------------


def dump(document: Mapping[str, Any]) -> bytes:
    """The bytes of a document: the same document, the same bytes."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"


def load(data: bytes) -> dict[str, Any]:
    """A JSON object, strictly: no duplicate keys, no NaN."""
    try:
        document = json.loads(data, object_pairs_hook=_object, parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"zarr.json is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise FormatError("zarr.json is not a JSON object")
    return document


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise FormatError("zarr.json has an object with duplicate keys")
    return found


def _constant(word: str) -> None:
    raise FormatError(f"zarr.json holds {word}, which JSON has not")


def group_json(attributes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes or {})}


def array_json(
    layout: Layout, dtype: DType, codec: Codec | None, attributes: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The zarr.json of an array: its layout in Zarr's words."""
    if layout.compressed != (codec is not None):
        raise MismatchError(f"layout says compressed={layout.compressed}, the codec is {codec}")
    if layout.itemsize != dtype.itemsize:
        raise MismatchError(f"layout has {layout.itemsize} bytes an element, {dtype.name} has {dtype.itemsize}")
    inner = _bytes_codecs(dtype) + ([codec.to_json()] if codec else [])
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(layout.shape),
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(outer_chunk(layout))}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": fill_value(dtype),
        "codecs": [_sharding(layout.chunk, inner)] if layout.sharded else inner,
        "attributes": dict(attributes or {}),
        "storage_transformers": [],
    }


def outer_chunk(layout: Layout) -> tuple[int, ...]:
    """The array elements of one file; an array without elements has no file but needs a chunk shape."""
    if layout.many:
        return layout.block
    return tuple(max(1, blocks) * size for blocks, size in zip(layout.grid, layout.block, strict=True))


def fill_value(dtype: DType) -> bool | int | float | str | list[float]:
    """Zero, as JSON wants it for this type."""
    if dtype.name == "bool":
        return False
    if dtype.name.startswith("float8"):
        return "0x00"  # a number is as legal, but zarrs reads only the bits
    if dtype.name.startswith("complex"):
        return [0.0, 0.0]
    return 0 if dtype.name.startswith(("int", "uint")) else 0.0


def _bytes_codecs(dtype: DType) -> list[dict[str, Any]]:
    # One-byte types have no byte order; zarr-python and TensorStore leave the configuration out as well.
    return [{"name": "bytes"}] if dtype.itemsize == 1 else [_LITTLE]


_LITTLE: dict[str, Any] = {"name": "bytes", "configuration": {"endian": "little"}}


def _sharding(chunk: Sequence[int], codecs: list[dict[str, Any]]) -> dict[str, Any]:
    configuration = {
        "chunk_shape": list(chunk),
        "codecs": codecs,
        "index_codecs": [_LITTLE, {"name": "crc32c"}],
        "index_location": "end",
    }
    return {"name": "sharding_indexed", "configuration": configuration}


def groups_of(paths: Iterable[str]) -> list[str]:
    """The groups between the root and these nodes, parents first."""
    groups = {path[:at] for path in paths for at, letter in enumerate(path) if letter == "/"}
    return sorted(groups, key=_depth_first)


def _depth_first(path: str) -> tuple[int, list[str]]:
    return path.count("/"), path.split("/")


def root_json(arrays: Mapping[str, Mapping[str, Any]], attributes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The root group with everything below it inline, as zarr-python consolidates: opening a step is one read.

    `arrays`: the arrays' documents by node path. Siblings stand side by side: zarr-python 3.1 loses those that don't.
    """
    groups = groups_of(arrays)
    both = set(groups) & set(arrays)
    if both:
        raise MismatchError(f"{min(both)!r} is an array and cannot hold other arrays")
    nodes: dict[str, Mapping[str, Any]] = {group: {**group_json(), **_consolidated({})} for group in groups}
    nodes.update(arrays)
    ordered = {path: nodes[path] for path in sorted(nodes, key=_depth_first)}
    return {**group_json(attributes), **_consolidated(ordered)}


def _consolidated(metadata: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {"consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": dict(metadata)}}


@dataclass(frozen=True, slots=True)
class ArrayMeta:
    """What an array's zarr.json says. `outer`: elements of a file; `inner`: of a chunk (equal without sharding)."""

    shape: tuple[int, ...]
    dtype: DType
    outer: tuple[int, ...]
    inner: tuple[int, ...]
    sharded: bool
    codec: Codec | None
    attributes: dict[str, Any]

    def check(self, layout: Layout, dtype: DType, codec: Codec | None) -> None:
        """FormatError unless this is the document of that layout."""
        outer = outer_chunk(layout)
        inner = layout.chunk if layout.sharded else outer
        wanted = (layout.shape, dtype, outer, inner, layout.sharded, codec)
        found = (self.shape, self.dtype, self.outer, self.inner, self.sharded, self.codec)
        if found != wanted:
            raise FormatError(f"zarr.json describes {found}, the manifest {wanted}")


_ARRAY_KEYS = {
    "zarr_format",
    "node_type",
    "shape",
    "data_type",
    "chunk_grid",
    "chunk_key_encoding",
    "fill_value",
    "codecs",
    "attributes",
    "storage_transformers",
}


def parse_array_json(data: bytes | Mapping[str, Any]) -> ArrayMeta:
    """The array that a zarr.json describes; FormatError for anything `array_json` would not write."""
    document = load(data) if isinstance(data, bytes) else data
    _exact("keys", set(document), _ARRAY_KEYS)
    _exact("zarr_format", document["zarr_format"], 3)
    _exact("node_type", document["node_type"], "array")
    _exact(
        "chunk_key_encoding", document["chunk_key_encoding"], {"name": "default", "configuration": {"separator": "."}}
    )
    _exact("storage_transformers", document["storage_transformers"], [])
    name = document["data_type"]
    if not isinstance(name, str) or name not in dtypes.BY_NAME:
        raise FormatError(f"zarr.json: data_type {name!r:.80} is not known to this version")
    dtype = dtypes.BY_NAME[name]
    _exact("fill_value", document["fill_value"], fill_value(dtype))
    attributes = document["attributes"]
    if not isinstance(attributes, dict):
        raise FormatError("zarr.json: attributes is not an object")
    shape = _sizes("shape", document["shape"], 0)
    outer = _sizes("chunk_shape", _configuration(document["chunk_grid"], "regular", {"chunk_shape"})["chunk_shape"], 1)
    inner, codecs = outer, document["codecs"]
    sharded = isinstance(codecs, list) and bool(codecs) and _name(codecs[0]) == "sharding_indexed"
    if sharded:
        keys = {"chunk_shape", "codecs", "index_codecs", "index_location"}
        inside = _configuration(codecs[0], "sharding_indexed", keys)
        inner = _sizes("chunk_shape of a shard", inside["chunk_shape"], 1)
        _exact("codecs", codecs, [_sharding(inner, inside["codecs"])])
        codecs = inside["codecs"]
    if len(outer) != len(shape) or len(inner) != len(shape):
        raise FormatError(f"zarr.json: shape {shape}, chunks {outer} and {inner} differ in their dimensions")
    if any(a % b for a, b in zip(outer, inner, strict=True)):
        raise FormatError(f"zarr.json: inner chunk {inner} does not divide the shard {outer}")
    return ArrayMeta(shape, dtype, outer, inner, sharded, _codec_of(codecs, dtype), dict(attributes))


def _codec_of(codecs: object, dtype: DType) -> Codec | None:
    if not isinstance(codecs, list) or not 1 <= len(codecs) <= 2:
        raise FormatError(f"zarr.json: codecs {codecs!r:.200} are not bytes and at most one compressor")
    _exact("codecs", codecs[:1], _bytes_codecs(dtype))
    return Codec.from_json(codecs[1]) if codecs[1:] else None


def _exact(what: str, found: object, wanted: object) -> None:
    # 1 == True == 1.0 in Python, not in a document.
    if found != wanted or (isinstance(found, bool) != isinstance(wanted, bool)):
        raise FormatError(f"zarr.json: {what} is {found!r:.200}, not {wanted!r:.300}")


def _name(thing: object) -> object:
    return thing.get("name") if isinstance(thing, dict) else None


def _configuration(thing: object, name: str, keys: set[str]) -> dict[str, Any]:
    configuration = thing.get("configuration") if isinstance(thing, dict) else None
    if _name(thing) != name or not isinstance(configuration, dict) or set(configuration) != keys:
        raise FormatError(f"zarr.json: {thing!r:.200} is not {name} with {', '.join(sorted(keys))}")
    return configuration


def _sizes(what: str, value: object, least: int) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(size) is not int or not least <= size <= _MAX_SIZE for size in value):
        raise FormatError(f"zarr.json: {what} {value!r:.200} is not a list of integers from {least}")
    return tuple(value)


# --- shard index -----------------------------------------------------------------------------------------


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli). The library is the one zarr-python brings along; in Python 1 MiB would take 0.1 s."""
    import google_crc32c

    value: int = google_crc32c.value(data)
    return value


def shard_index(entries: Sequence[tuple[int, int]]) -> bytes:
    """The index behind a shard's chunks: (offset, length) pairs and a crc32c; (-1, -1): chunk not stored."""
    table = np.array(entries, dtype="<i8").reshape(-1, 2).tobytes()
    return table + crc32c(table).to_bytes(_CRC_BYTES, "little")


def parse_index(data: bytes, chunks: int, data_bytes: int | None = None) -> list[tuple[int, int]]:
    """The entries of a shard index of that many chunks, all inside the file's first `data_bytes`; (-1, -1): missing."""
    if len(data) != chunks * _ENTRY_BYTES + _CRC_BYTES:
        wanted = chunks * _ENTRY_BYTES + _CRC_BYTES
        raise FormatError(f"the shard index has {len(data)} bytes where {chunks} chunks need {wanted}")
    table = data[:-_CRC_BYTES]
    if crc32c(table) != int.from_bytes(data[-_CRC_BYTES:], "little"):
        raise CorruptError("the shard index does not have its checksum")
    limit = _MAX_SIZE if data_bytes is None else data_bytes
    entries: list[tuple[int, int]] = []
    for offset, length in np.frombuffer(table, "<u8").reshape(-1, 2).tolist():
        if offset == length == _MISSING:
            entries.append((-1, -1))
        elif offset + length > limit:
            raise FormatError(f"the shard index has a chunk of {length} bytes at {offset}, beyond the data's {limit}")
        else:
            entries.append((offset, length))
    return entries
