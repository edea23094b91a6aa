"""manifest.json: what a step holds, where, and the checksum of every byte. Its presence is the commit.

Parsing is validation: a Manifest that exists is legal, whatever the file said. Extents are stored as lengths
only (run-length encoded), so overlaps, holes and negative offsets cannot even be written down; what is left to
check is that the lengths add up to exactly what the layout says. The last key is a checksum of everything before.
"""

from __future__ import annotations

import contextlib
import gc
import json
import re
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate, chain, groupby, pairwise, starmap
from math import prod
from operator import mul
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import xxhash

from ckptfs import dtypes
from ckptfs.codec import Codec
from ckptfs.dtypes import DType
from ckptfs.errors import FormatError
from ckptfs.grid import MAX_CHUNKS, Layout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

READER = 1  # a reader must know this number to read
WRITER = 1  # a writer must know this number to change anything beside
NAME = "manifest.json"
HASH_BYTES = 16
_TAIL = re.compile(rb',"xxh3_128":"([0-9a-f]{32})"}\n\Z')
LIMIT = 1 << 62  # of every number
_LONG = 64  # more runs than arrays have that are not compressed
_SHORT = 256  # extents that are counted one by one
_HASH = re.compile(r"[0-9a-f]{32}\Z")
_SEGMENT = re.compile(r"[^/\\\x00-\x1f\x7f]{1,255}\Z")


def digest(data: Any) -> bytes:
    """The checksum of the format: xxh3, 128 bits."""
    return xxhash.xxh3_128_digest(data)


@dataclass(frozen=True, eq=False)
class Param:
    """One stored array."""

    name: str
    path: str
    dtype: DType
    layout: Layout
    codec: Codec | None
    runs: tuple[tuple[int, int], ...]  # (stored length, how many in a row), in logical order
    hashes: bytes  # 16 bytes an extent
    zarr_hash: str = ""  # checksum of the array's zarr.json

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    @cached_property
    def stored_bytes(self) -> int:
        return sum(length * count for length, count in self.runs)

    @cached_property
    def shortest_extent(self) -> int:
        """Stored bytes of the smallest extent: a shorter read holds no whole one."""
        return min((length for length, _ in self.runs), default=0)

    @cached_property
    def longest_extent(self) -> int:
        return max((length for length, _ in self.runs), default=0)

    @property
    def extent_count(self) -> int:
        return len(self.hashes) // HASH_BYTES

    def file(self, number: int = 0) -> str:
        """Path of a file of this array, relative to the step."""
        return f"{self.path}/{self.layout.key(number)}"

    @cached_property
    def extents(self) -> Extents:
        if self.codec is not None:
            return Extents.of(self)
        same = (self.layout, self.runs)  # layers are alike: a table for each would take as long as a read of 100 KiB
        found = _tables.get(same)
        if found is None:
            found = _tables[same] = Extents.of(self)
        return found

    def stored_in(self, file: int) -> list[int]:
        """Stored lengths of the chunks in one file of a compressed array."""
        table = self.extents
        a, b = np.searchsorted(table.file, [file, file + 1])
        return [int(n) for n in table.length[a:b]]

    def index_entries(self, file: int) -> list[tuple[int, int]]:
        return self.layout.index_entries(file, self.stored_in(file) if self.codec else None)

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {"dtype": self.dtype.name, "shape": list(self.shape), "path": self.path}
        solid = tuple(max(1, d) for d in self.shape)
        if self.layout.block != solid:
            data["block"] = list(self.layout.block)
        if self.layout.chunk != self.layout.block:
            data["chunk"] = list(self.layout.chunk)
        if self.layout.many:
            data["many"] = True
        if self.codec is not None:
            data["codec"] = self.codec.to_json()
        data["extents"] = self.runs
        data["xxh3"] = self.hashes.hex()
        data["zarr_xxh3"] = self.zarr_hash
        return data


@dataclass(frozen=True, eq=False)
class Extents:
    """The extents of one array as columns, in logical order."""

    file: np.ndarray[Any, Any]
    offset: np.ndarray[Any, Any]  # in the file
    length: np.ndarray[Any, Any]  # stored bytes
    start: np.ndarray[Any, Any]  # logical
    stop: np.ndarray[Any, Any]

    @classmethod
    def of(cls, param: Param) -> Extents:
        runs = np.array(param.runs, dtype=np.int64).reshape(-1, 2)
        length = np.repeat(runs[:, 0], runs[:, 1])
        layout = param.layout
        before = np.cumsum(length) - length
        if not layout.many:
            return cls(np.zeros_like(length), before, length, before, before + length)
        used = np.array([layout.used_bytes(b) for b in range(layout.blocks)], dtype=np.int64)
        if param.codec is None:
            ends = np.cumsum(used)
            file = np.searchsorted(ends, before, side="right")
            offset = before - (ends - used)[file]
            start = file * layout.block_bytes + offset
            return cls(file, offset, length, start, start + length)
        chunks = used // layout.chunk_bytes
        file = np.repeat(np.arange(layout.blocks), chunks)
        first = np.cumsum(chunks) - chunks
        number = np.arange(len(length)) - first[file]
        offset = before - before[first[file]]
        start = file * layout.block_bytes + number * layout.chunk_bytes
        return cls(file, offset, length, start, start + layout.chunk_bytes)


_tables: WeakValueDictionary[tuple[Layout, tuple[tuple[int, int], ...]], Extents] = WeakValueDictionary()


@dataclass(frozen=True, eq=False)
class Manifest:
    """A committed step."""

    params: dict[str, Param]
    tree: Any = None
    save_id: str = ""
    step: int | None = None
    created: str = ""
    world: int = 1
    aliases: dict[str, str] = field(default_factory=dict)
    assets: dict[str, tuple[int, str]] = field(default_factory=dict)  # path → (bytes, checksum)
    root_hash: str = ""
    maps: dict[str, Any] = field(default_factory=dict)  # named views, see docs/rules.md
    writer: int = WRITER

    @cached_property
    def nbytes(self) -> int:
        return sum(param.nbytes for param in self.params.values())

    @cached_property
    def stored_bytes(self) -> int:
        return sum(param.stored_bytes for param in self.params.values())

    def dump(self, software: str) -> bytes:
        data = {
            "format": "ckptfs",
            "reader": READER,
            "writer": WRITER,
            "software": software,
            "save_id": self.save_id,
            "step": self.step,
            "created": self.created,
            "world": self.world,
            "params": {name: param.to_json() for name, param in self.params.items()},
            "aliases": self.aliases,
            "assets": {path: {"bytes": size, "xxh3": value} for path, (size, value) in self.assets.items()},
            "root_xxh3": self.root_hash,
            "maps": self.maps,
            "tree": self.tree,
        }
        body = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=True).encode()[:-1]
        return body + b',"xxh3_128":"' + digest(body).hex().encode() + b'"}\n'

    @classmethod
    def parse(cls, raw: bytes, where: str = NAME) -> Manifest:
        """The manifest in these bytes; FormatError says what is wrong with them, and where."""
        try:
            with without_collection():
                return _parse(raw)
        except FormatError as error:
            msg = f"{where}: {error}"
            raise FormatError(msg) from None
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError, MemoryError) as error:
            msg = f"{where}: not a manifest: {error}"
            raise FormatError(msg) from None


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """While many objects are made of which none is garbage: looking for some doubles the time for a million of them.

    And they are gone soon. A load of 300 arrays makes some nine thousand; when the interpreter then looked at all that
    the program has (265,000 objects with torch and zarr), a load of 0.9 s stood still for 0.2 s of it.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        keys = [key for key, _ in pairs]
        raise FormatError(f"duplicate key {next(k for k in keys if keys.count(k) > 1)!r}")
    return data


def _no_constant(text: str) -> Any:
    raise FormatError(f"{text} is not JSON")


def strict_json(raw: bytes) -> Any:
    """JSON without duplicate keys, NaN or infinities."""
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise error if isinstance(error, FormatError) else FormatError(f"not JSON: {error}") from None


_KEYS = {"format", "reader", "writer", "software", "save_id", "step", "created", "world", "params", "aliases",
         "assets", "root_xxh3", "maps", "tree", "xxh3_128"}  # fmt: skip


def _parse(raw: bytes) -> Manifest:
    tail = _TAIL.search(raw, max(0, len(raw) - 64))
    if tail is None:
        raise FormatError("the file does not end as a manifest does: it was cut off or is not one of ours")
    if digest(memoryview(raw)[: tail.start()]).hex().encode() != tail.group(1):
        raise FormatError("the manifest's own checksum does not match: the file is damaged; restore it from a copy")
    data = _typed(strict_json(raw), dict, "manifest")
    if data.get("format") != "ckptfs":
        raise FormatError("not a ckptfs manifest")
    reader = _int(data.get("reader"), "reader")
    if reader != READER:
        raise FormatError(f"needs a reader for format {reader}; this ckptfs reads {READER}: upgrade ckptfs")
    unknown = [key for key in data if key not in _KEYS and not key.startswith("x-")]
    if unknown:
        raise FormatError(f"unknown key {unknown[0]!r}")
    params = {}
    for name, entry in _typed(data.get("params"), dict, "params").items():
        try:
            params[name] = _param(name, entry)
        except FormatError as error:
            raise FormatError(f"array {name!r}: {error}") from None
    _check_paths(params)
    aliases = _typed(data.get("aliases"), dict, "aliases")
    for alias, target in aliases.items():
        if alias in params or target not in params:
            raise FormatError(f"alias {alias!r} of {target!r} does not name one stored array")
    assets = {}
    for path, entry in _typed(data.get("assets"), dict, "assets").items():
        check_relative(path)
        entry = _typed(entry, dict, "asset")
        assets[path] = (_int(entry.get("bytes"), "bytes"), _hash(entry.get("xxh3")))
    step = data.get("step")
    return Manifest(
        params=params,
        tree=data.get("tree"),
        save_id=_typed(data.get("save_id"), str, "save_id"),
        step=None if step is None else _int(step, "step"),
        created=_typed(data.get("created"), str, "created"),
        world=_int(data.get("world"), "world"),
        aliases=aliases,
        assets=assets,
        root_hash=_hash(data.get("root_xxh3")),
        maps=_typed(data.get("maps"), dict, "maps"),
        writer=_int(data.get("writer"), "writer"),
    )


def _param(name: str, raw: object) -> Param:
    entry: dict[str, Any] = _typed(raw, dict, "entry")
    unknown = entry.keys() - {
        "dtype",
        "shape",
        "path",
        "block",
        "chunk",
        "many",
        "codec",
        "extents",
        "xxh3",
        "zarr_xxh3",
    }
    if any(not key.startswith("x-") for key in unknown):
        raise FormatError(f"unknown key {min(unknown)!r}")
    dtype = dtypes.BY_NAME.get(_typed(entry.get("dtype"), str, "dtype"))
    if dtype is None:
        raise FormatError(f"unknown dtype {entry['dtype']!r}")
    shape = _ints(entry.get("shape"), "shape")
    block = _ints(entry["block"], "block") if "block" in entry else tuple(max(1, d) for d in shape)
    chunk = _ints(entry["chunk"], "chunk") if "chunk" in entry else block
    if any(x < 1 for x in block + chunk) or len(block) != len(shape) or len(chunk) != len(shape):
        raise FormatError(f"block {block} and chunk {chunk} do not fit shape {shape}")
    if prod(max(1, d) for d in shape) * dtype.itemsize > LIMIT or prod(block) * dtype.itemsize > LIMIT:
        raise FormatError(f"shape {shape} or block {block} is absurdly large")
    codec = Codec.from_json(entry["codec"]) if "codec" in entry else None
    many = entry.get("many", False)
    if many is not True and many is not False:
        raise FormatError("many is true or absent")
    if codec is not None and not many:
        raise FormatError("a compressed array has many files")
    layout = _layout(shape, dtype.itemsize, block, chunk, many, codec is not None)
    path = _typed(entry.get("path"), str, "path")
    check_relative(path)
    runs, count = _runs(_typed(entry.get("extents"), list, "extents"))
    hashes = _hex(entry.get("xxh3"))
    if count * HASH_BYTES != len(hashes):
        raise FormatError("extents and checksums do not agree in number")
    # Long lists are those of compressed arrays, of which no two are equal: not kept.
    (_check_sum if len(runs) < _LONG else _check_sum.__wrapped__)(layout, codec, runs, count)
    return Param(name, path, dtype, layout, codec, runs, hashes, _hash(entry.get("zarr_xxh3")))


def _runs(raw: list[Any]) -> tuple[tuple[tuple[int, int], ...], int]:
    """Run lengths and how many extents they are; long lists are looked at without a loop of Python's."""
    if len(raw) < _LONG or set(map(type, raw)) != {list} or set(map(len, raw)) != {2}:
        if any(not isinstance(run, list) or len(run) != 2 for run in raw):
            raise FormatError("extents are not pairs of a length and a count")
        runs = tuple((_int(a, "length"), _int(b, "count")) for a, b in raw)
        if any(length < 1 or n < 1 for length, n in runs):
            raise FormatError("an extent without bytes, or a run without extents")
        return runs, sum(n for _, n in runs)
    if set(map(type, chain.from_iterable(raw))) != {int}:
        raise FormatError("lengths and counts of extents are not whole numbers")
    table = np.array(raw, dtype=np.int64)  # an OverflowError is one of the ways in which a manifest is none
    if table.min() < 1 or table.max() >= LIMIT or table[:, 1].max() > LIMIT // len(raw):
        raise FormatError("lengths and counts of extents are not in range")
    return tuple(map(tuple, raw)), int(table[:, 1].sum())


@lru_cache(4096)
def _layout(
    shape: tuple[int, ...], itemsize: int, block: tuple[int, ...], chunk: tuple[int, ...], many: bool, compressed: bool
) -> Layout:
    """A model has many arrays of few shapes: equal layouts are checked, and work out their sizes, once."""
    return Layout(shape, itemsize, block, chunk, many=many, compressed=compressed)


@lru_cache(4096)
def _check_sum(layout: Layout, codec: Codec | None, runs: tuple[tuple[int, int], ...], count: int) -> None:
    """The extents tile what the layout stores: exactly, and never across two files."""
    if layout.nbytes == 0:
        if runs:
            raise FormatError("an empty array has no extents")
        return
    if (layout.many and layout.blocks > LIMIT >> 32) or (layout.sharded and layout.chunks_per_block > MAX_CHUNKS << 8):
        raise FormatError("absurdly many blocks or chunks")
    total = sum(starmap(mul, runs))
    if not layout.many:
        if total != layout.logical_bytes:
            raise FormatError(f"extents hold {total} bytes, the layout {layout.logical_bytes}")
        return
    if layout.blocks > count:
        raise FormatError("fewer extents than files")
    used = [layout.used_bytes(block) for block in range(layout.blocks)]
    if codec is not None:
        if count != sum(n // layout.chunk_bytes for n in used):
            raise FormatError("a compressed array has one extent per chunk")
        if max(runs)[0] > 2 * layout.chunk_bytes + 4096:
            raise FormatError("a compressed chunk is far longer than what is in it")
        return
    if total != sum(used):
        raise FormatError(f"extents hold {total} bytes, the files {sum(used)}")
    ends = set(accumulate(length for length, n in runs for _ in range(n)))
    if not ends.issuperset(accumulate(used)):
        raise FormatError("an extent crosses from one file into the next")


def check_relative(path: str) -> None:
    """A path that stays inside the step's folder."""
    for segment in path.split("/"):
        if segment in (".", "..") or not _SEGMENT.match(segment):
            raise FormatError(f"path {path!r} does not stay inside the step")


def _check_paths(params: dict[str, Param]) -> None:
    """No two arrays share a folder, and none lies inside another."""
    paths = sorted(param.path.split("/") for param in params.values())
    for one, two in pairwise(paths):
        if two[: len(one)] == one:
            raise FormatError(f"two arrays at {'/'.join(one)!r}")
    for path in paths:
        if path[0] in ("assets", NAME, "zarr.json") or "zarr.json" in path:
            raise FormatError(f"path {'/'.join(path)!r} is a reserved name")


def _typed(value: object, kind: type, what: str) -> Any:
    if not isinstance(value, kind):
        raise FormatError(f"{what} is not a {kind.__name__}")
    return value


def _int(value: object, what: str) -> int:
    if type(value) is not int or not 0 <= value < LIMIT:
        raise FormatError(f"{what} is not a whole number in range: {value!r}")
    return value


def _ints(value: object, what: str) -> tuple[int, ...]:
    values = tuple(_int(x, what) for x in _typed(value, list, what))
    if len(values) > 64:
        raise FormatError(f"{what} has {len(values)} dimensions")
    return values


def _hash(value: object) -> str:
    if not isinstance(value, str) or not _HASH.match(value):
        raise FormatError(f"{value!r} is not a checksum")
    return value


def _hex(value: object) -> bytes:
    if not isinstance(value, str) or len(value) % (2 * HASH_BYTES):
        raise FormatError("checksums have a wrong length")
    raw = bytes.fromhex(value)
    if 2 * len(raw) != len(value):
        raise FormatError("checksums hold other things than hex digits")
    return raw


def run_lengths(lengths: Sequence[int] | np.ndarray[Any, Any]) -> tuple[tuple[int, int], ...]:
    """Equal neighbours counted: [(length, how many), ...]."""
    if len(lengths) < _SHORT:  # most arrays: cheaper without columns
        listed = lengths.tolist() if isinstance(lengths, np.ndarray) else lengths
        return tuple((length, len(list(same))) for length, same in groupby(listed))
    found = np.asarray(lengths)
    edges = np.concatenate([[0], np.flatnonzero(np.diff(found)) + 1, [len(found)]])
    return tuple(zip(found[edges[:-1]].tolist(), np.diff(edges).tolist(), strict=True))
