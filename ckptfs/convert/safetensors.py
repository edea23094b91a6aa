"""safetensors files and Hugging Face directories, in and out, without torch and without holding a model in memory.

The format: 8 bytes, the little-endian length of a JSON header; the header, padded with spaces; the tensors, row-major
and little-endian, without gaps, in the order of their offsets, which count from the end of the header.

Rules: a header is parsed as a whole and strictly, so a `Header` that exists describes its file exactly. Exports are
written under a temporary name and appear complete; every byte is checked against the step's checksums on the way.
Headers are padded to a page, so that tensors can be mapped. Tied names are left out: loaders tie them again.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfs.box import boxes_of_range
from ckptfs.checkpoint import Checkpoint
from ckptfs.dtypes import BY_SAFETENSORS, DType
from ckptfs.errors import CorruptError, ExistsError, FormatError, MismatchError, NotFoundError, StorageError
from ckptfs.manifest import digest, strict_json
from ckptfs.stats import BAND_BYTES

if TYPE_CHECKING:
    from ckptfs.array import LazyArray
    from ckptfs.run import Run
    from ckptfs.save import Result

_HEADER_LIMIT = 100 << 20  # what the safetensors library accepts
_PAGE = 4096
_SUFFIX = ".safetensors"
_INDEX = "model.safetensors.index.json"
_LAYER = re.compile(r"(?:^|\.)\d+\.")
Progress = Callable[[int, int], None]


# --- the format ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file; offsets count from the start of the file."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Header:
    """What a safetensors file holds; its tensors tile the file from the header's end to the last byte."""

    tensors: tuple[Tensor, ...]
    metadata: dict[str, str]

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Header:
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                prefix = file.read(8)
                length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
                if not 2 <= length <= min(_HEADER_LIMIT, size - 8):
                    raise FormatError(f"{path} is not a safetensors file: it announces a header of {length} bytes")
                raw = file.read(length)
        except FileNotFoundError:
            raise NotFoundError(f"{path} is not there") from None
        except OSError as error:
            raise StorageError(f"reading {path}: {error.strerror}") from error
        try:
            return cls.parse(raw, 8 + length, size)
        except FormatError as error:
            raise FormatError(f"{path}: {error}") from None

    @classmethod
    def parse(cls, raw: bytes, base: int, size: int) -> Header:
        """The header in these bytes, of a file of `size` bytes whose data begin at `base`."""
        data = strict_json(raw)
        if not isinstance(data, dict):
            raise FormatError("the header is not a JSON object")
        metadata = data.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise FormatError("__metadata__ is not an object of strings")
        tensors = sorted((_tensor(name, entry, base) for name, entry in data.items()), key=lambda t: (t.start, t.stop))
        at = base
        for tensor in tensors:
            if tensor.start != at:
                what = "a gap before" if tensor.start > at else "bytes shared with"
                raise FormatError(f"{what} tensor {tensor.name!r}")
            at = tensor.stop
        if at != size:
            raise FormatError(f"the tensors end at byte {at}, the file at {size}: it was cut or grew")
        return cls(tuple(tensors), metadata)


def _tensor(name: str, entry: object, base: int) -> Tensor:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"tensor {name!r} is not described by dtype, shape and data_offsets")
    dtype = BY_SAFETENSORS.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        known = ", ".join(map(str, BY_SAFETENSORS))
        raise FormatError(f"tensor {name!r} has the element type {entry['dtype']!r}; known: {known}")
    numbers = [entry["shape"], entry["data_offsets"]]
    if any(not isinstance(x, list) or any(type(n) is not int or not 0 <= n < 1 << 62 for n in x) for x in numbers):
        raise FormatError(f"tensor {name!r}: shape and data_offsets are not lists of whole numbers")
    shape, offsets = numbers
    nbytes = math.prod(shape) * dtype.itemsize
    if len(offsets) != 2 or offsets[1] - offsets[0] != nbytes:
        raise FormatError(f"tensor {name!r} of {nbytes} bytes has the offsets {offsets}")
    return Tensor(name, dtype, tuple(shape), base + offsets[0], base + offsets[1])


def header_bytes(arrays: Mapping[str, LazyArray], metadata: Mapping[str, str]) -> bytes:
    """The start of a file with these tensors, in this order."""
    data: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, array in arrays.items():
        data[name] = {
            "dtype": array.element.safetensors,
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode()
    padded = -(-(len(text) + 8) // _PAGE) * _PAGE - 8
    return struct.pack("<Q", padded) + text.ljust(padded)


# --- out -------------------------------------------------------------------------------------------------


def chosen(checkpoint: Checkpoint, prefix: str | None = None, mapping: Any = None) -> dict[str, LazyArray]:
    """What is exported: name in the file → array.

    By a map (see docs/rules.md) if one is given, or was saved as "hf". Else names that begin with the prefix ("model/"
    if there are such names), without it.
    """
    if mapping is not None or (prefix is None and "hf" in checkpoint.manifest.maps):
        out: dict[str, LazyArray] = dict(checkpoint.view("hf", map=mapping))
    else:
        out = _below(checkpoint, prefix)
    for name, array in out.items():
        if array.element.safetensors is None:
            raise MismatchError(f"array {name!r}: safetensors has no {array.element.name}; export a part without it")
    return out


def _below(checkpoint: Checkpoint, prefix: str | None) -> dict[str, LazyArray]:
    if prefix is None:
        prefix = "model/" if any(name.startswith("model/") for name in checkpoint) else ""
    out: dict[str, LazyArray] = {}
    for name in checkpoint.manifest.params:
        if not name.startswith(prefix):
            continue
        plain = name[len(prefix) :].replace("%2F", "/").replace("%25", "%")
        if plain in out:
            raise MismatchError(f"two arrays would have the name {plain!r}: export a part with another prefix")
        out[plain] = checkpoint[name]
    if not out:
        raise NotFoundError(f"{checkpoint.url} has no array whose name begins with {prefix!r}; see ckptfs ls")
    return out


def _checking(checkpoint: Checkpoint) -> Checkpoint:
    """The same step, opened so that no byte is used unchecked."""
    return Checkpoint(checkpoint.store, settings=checkpoint.settings, verify="full")


def _bands(array: LazyArray) -> Iterator[np.ndarray[Any, Any]]:
    """The array's bytes in row-major order, some at a time."""
    step = max(1, BAND_BYTES // array.element.itemsize)
    for start in range(0, array.size, step):
        stop = min(array.size, start + step)
        out = np.empty(stop - start, array.element.carrier)
        at, parts = 0, []
        for box in boxes_of_range(start, stop, array.shape):
            parts.append((box, out[at : at + box.size].reshape(box.shape)))
            at += box.size
        array.fill(parts)
        yield out.view(np.uint8)


def export_file(
    checkpoint: Checkpoint,
    path: str | os.PathLike[str],
    *,
    prefix: str | None = None,
    mapping: Any = None,
    overwrite: bool = False,
    progress: Progress = lambda done, total: None,
) -> int:
    """Write one safetensors file; returns its size."""
    if not overwrite and os.path.lexists(path):
        raise ExistsError(f"{path} exists already; remove it, or allow overwriting")
    with _checking(checkpoint) as source:
        arrays = chosen(source, prefix, mapping)
        total = sum(array.nbytes for array in arrays.values())
        return _write(Path(path), arrays, lambda done: progress(done, total))


def export_folder(
    checkpoint: Checkpoint,
    path: str | os.PathLike[str],
    *,
    prefix: str | None = None,
    mapping: Any = None,
    shard_bytes: int = 5_000_000_000,
    progress: Progress = lambda done, total: None,
) -> int:
    """Write a Hugging Face directory: the step's assets, one or more safetensors files, an index; returns all bytes."""
    folder = Path(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ExistsError(f"{folder} exists already and is not an empty folder")
    with _checking(checkpoint) as source:
        shards = split(chosen(source, prefix, mapping), shard_bytes)
        return _export_shards(source, folder, shards, progress)


def _export_shards(checkpoint: Checkpoint, folder: Path, shards: list[dict[str, LazyArray]], progress: Progress) -> int:
    total, done = sum(array.nbytes for shard in shards for array in shard.values()), 0
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=_parent(folder)))
    try:
        written = _write_assets(checkpoint, temporary)
        weights: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            name = f"model{_SUFFIX}" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}{_SUFFIX}"
            written += _write(temporary / name, shard, lambda n, base=done: progress(base + n, total))  # type: ignore[misc]
            done += sum(array.nbytes for array in shard.values())
            weights |= dict.fromkeys(shard, name)
        if len(shards) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": weights}
            (temporary / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
        temporary.chmod(0o755)
        if folder.exists():
            folder.rmdir()
        temporary.rename(folder)
    except BaseException:
        import shutil

        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return written


def _parent(path: Path) -> Path:
    parent = path.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"creating {parent}: {error.strerror}") from error
    return parent


def split(arrays: Mapping[str, LazyArray], shard_bytes: int) -> list[dict[str, LazyArray]]:
    """Arrays dealt to files of about that size; a layer (`….7.`) stays in one file if it fits into one."""
    groups: dict[str, dict[str, LazyArray]] = {}
    for name, array in arrays.items():
        layer = _LAYER.search(name)
        groups.setdefault(name[: layer.end()] if layer else name, {})[name] = array
    shards: list[dict[str, LazyArray]] = [{}]
    used = 0
    for group in groups.values():
        size = sum(array.nbytes for array in group.values())
        if used and used + size > shard_bytes:
            shards.append({})
            used = 0
        shards[-1] |= group
        used += size
    return shards


def _write(path: Path, arrays: Mapping[str, LazyArray], progress: Callable[[int], None]) -> int:
    # Wide types first: then every tensor lies at a multiple of its element size, which readers that map it need.
    arrays = dict(sorted(arrays.items(), key=lambda item: -item[1].element.itemsize))
    head = header_bytes(arrays, {"format": "pt"})
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=_parent(path))
    try:
        with os.fdopen(handle, "wb", buffering=0) as file:
            _write_all(file, memoryview(head))
            done = 0
            for array in arrays.values():
                for band in _bands(array):
                    _write_all(file, band.data)
                    done += band.nbytes
                    progress(done)
            os.fsync(file.fileno())
        size = os.path.getsize(temporary)
        if size != len(head) + sum(array.nbytes for array in arrays.values()):
            raise StorageError(f"writing {path}: the file has {size} bytes, which is not what was written")
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        _remove(temporary)
        raise StorageError(f"writing {path}: {error.strerror}") from error
    except BaseException:
        _remove(temporary)
        raise
    return size


def _write_all(file: Any, view: memoryview) -> None:
    while view:
        view = view[file.write(view) :]


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass


def _write_assets(checkpoint: Checkpoint, folder: Path) -> int:
    written = 0
    for path, (size, checksum) in checkpoint.manifest.assets.items():
        data = checkpoint.store.read(f"assets/{path}")
        if len(data) != size or digest(data).hex() != checksum:
            raise CorruptError(f"{checkpoint.url}/assets/{path} is not what was saved: its checksum differs")
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
        written += size
    return written


# --- in --------------------------------------------------------------------------------------------------


def import_path(
    path: str | os.PathLike[str], run: Run, step: int, *, prefix: str = "model", overwrite: bool = False, **how: Any
) -> Result:
    """Save a safetensors file, or a Hugging Face directory with its other files as assets, as a step.

    The tensors are mapped, so the files may be larger than memory. Names are put below `prefix`; a "/" in them makes
    levels of the tree.
    """
    source = Path(path)
    if not source.exists():
        raise NotFoundError(f"{source} is not there")
    files = _files_of(source) if source.is_dir() else [source]
    tree: dict[str, Any] = {}
    seen: dict[str, Path] = {}
    for file in files:
        for name, array in mapped(file):
            if name in seen:
                raise FormatError(f"tensor {name!r} is in {seen[name]} and in {file}")
            seen[name] = file
            _put(tree, f"{prefix}/{name}" if prefix else name, array)
    assets = dict(_assets_of(source)) if source.is_dir() else None
    return run.save(step, tree, assets=assets, overwrite=overwrite, **how)


def mapped(path: Path) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """The tensors of a file as read-only arrays over the mapped file."""
    header = Header.read(path)
    whole = np.memmap(path, dtype=np.uint8, mode="r")
    for tensor in header.tensors:
        if tensor.dtype.name == "bool" and (whole[tensor.start : tensor.stop] > 1).any():
            raise FormatError(f"{path}: tensor {tensor.name!r} is boolean and holds other bytes than 0 and 1")
        part = whole[tensor.start : tensor.stop]
        if tensor.start % tensor.dtype.itemsize:  # older files: numpy could use it, other code may not
            part = part.copy()
        yield tensor.name, np.asarray(part).view(tensor.dtype.numpy).reshape(tensor.shape)


def _files_of(folder: Path) -> list[Path]:
    """The files that hold the weights: those of the index, or all there are."""
    index = folder / _INDEX
    if not index.exists():
        found = sorted(folder.glob(f"*{_SUFFIX}"))
        if not found:
            raise NotFoundError(f"{folder} has no {_SUFFIX} file")
        return found
    weights = strict_json(index.read_bytes())
    weights = weights.get("weight_map") if isinstance(weights, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights.values()):
        raise FormatError(f"{index} has no weight_map of file names")
    names = sorted(set(weights.values()))
    if any("/" in name or not name.endswith(_SUFFIX) for name in names):
        raise FormatError(f"{index} names files outside its folder")
    files = [folder / name for name in names]
    held = {tensor.name for file in files for tensor in Header.read(file).tensors}
    lost = sorted(set(weights) - held)
    if lost:
        raise FormatError(f"{index} names {len(lost)} tensors that no file holds, {lost[0]!r} is one")
    return files


def _assets_of(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder).as_posix()
        hidden = any(part.startswith(".") for part in relative.split("/"))
        if path.is_file() and not hidden and not relative.endswith(_SUFFIX) and path.name != _INDEX:
            yield relative, path.read_bytes()


def _put(tree: dict[str, Any], name: str, array: np.ndarray[Any, Any]) -> None:
    *above, last = name.split("/")
    at = tree
    for part in above:
        at = at.setdefault(part, {})
        if not isinstance(at, dict):
            raise MismatchError(f"tensor {name!r}: {part!r} is a tensor too and cannot hold others")
    if last in at:
        raise MismatchError(f"tensor {name!r}: other tensors have names below it, and it cannot hold them")
    at[last] = array


__all__ = ["Header", "Tensor", "chosen", "export_file", "export_folder", "import_path", "split"]
