"""`hf/`: a Hugging Face model folder, made from the step's own bytes.

Rules (what loaders need):
- Flat, and nothing but the model's files: assets that lie at the top, and weights either as `model.safetensors` or as
  `model-00001-of-0000N.safetensors` with `model.safetensors.index.json`. Assets that hold weights are left out.
- The arrays below `model/`, under the names of the step's `hf` view if it has one; a tied array is stored once.
- A header padded to 4096 bytes with metadata {"format": "pt"}; tensors one behind the other without gaps, those of
  wider types first; a layer lies in one file.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptfs import dtypes, maps
from ckptfs.errors import MismatchError
from ckptfs.expr import Expr
from ckptfs.expr import Source as Stored
from ckptfs.view import View, config_variables, find_map
from ckptfs.views.files import StepFile
from ckptfs.views.nodes import BytesFile, Dir, Node
from ckptfs.views.zarr import asset

if TYPE_CHECKING:
    from ckptfs.views.nodes import Segment
    from ckptfs.views.source import Source

PAGE_BYTES = 4096
INDEX = "model.safetensors.index.json"
_ROOT = "model/"
_OPTIMIZERS = ("optim", "opt_state", "optimizer", "optimizers")
_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|gguf|h5|msgpack|ckpt|onnx)(\.index\.json)?\Z")
_LAYER = re.compile(r"(.*?(?:^|\.)\d+)(?:\.|\Z)")


@dataclass(frozen=True)
class Tensor:
    name: str
    array: Expr

    @property
    def nbytes(self) -> int:
        return self.array.nbytes


def hf_dir(source: Source) -> Dir:
    """Blocking on object stores, because config.json has a say in it."""

    def children() -> dict[str, Node]:
        with source.working():
            return _children(source)

    return Dir(children, version=source.version, mtime_ns=source.mtime_ns, blocking=not source.is_local)


def is_empty_model(source: Source) -> bool:
    """Whether there is nothing to show; MismatchError when there is something that the folder cannot hold.

    It decides what a step lists, so it looks at everything only where that may fail: with a map of the step's own.
    """
    manifest = source.manifest
    kinds = {param.dtype for param in manifest.params.values()}
    if "hf" in manifest.maps or any(kind.safetensors is None for kind in kinds):
        return not _children(source)
    return not manifest.params and not any(_is_shown(path) for path in manifest.assets)


def _is_shown(asset_path: str) -> bool:
    return "/" not in asset_path and not _WEIGHTS.match(asset_path)


def _children(source: Source) -> dict[str, Node]:
    children: dict[str, Node] = {
        path: asset(source, path, f"hf/{path}") for path in source.manifest.assets if _is_shown(path)
    }
    children.update(weights(source, tensors(source)))
    return dict(sorted(children.items()))


# --- which arrays, under which names ---------------------------------------------------------------------


def tensors(source: Source) -> list[Tensor]:
    """What the folder holds, in natural order of names. MismatchError when the step's own map does not fit it."""
    mapped = _mapped(source)
    found = _plain(source) if mapped is None else dict(mapped)
    without = [name for name, array in found.items() if dtypes.of(array.dtype).safetensors is None]
    if without:
        raise MismatchError(
            f"{source.url}: safetensors has no {found[without[0]].dtype}, the type of {without[0]!r}, "
            "so there is no hf/ folder"
        )
    return [Tensor(name, found[name]) for name in sorted(found, key=_natural)]


def _natural(name: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in name.split(".")]


def _mapped(source: Source) -> Mapping[str, Expr] | None:
    """Through the step's own `hf` map, or a built-in one that its names fit and its config makes sense of."""
    checkpoint = source.checkpoint
    asked_for = "hf" in source.manifest.maps
    if not asked_for and (not _config(source) or maps.detect(checkpoint) in {None, "identity"}):
        return None
    try:
        view = View(checkpoint, find_map(checkpoint, "hf"), config_variables(checkpoint))
    except MismatchError:
        if asked_for:
            raise
        return None
    return _once(source, {name: array.expression for name, array in view.items()})


def _once(source: Source, found: dict[str, Expr]) -> dict[str, Expr]:
    """Without arrays that are another one under a second name, unless the model says that it wants both."""
    if _wants_ties(source):
        return found
    first: dict[str, str] = {}
    kept = {}
    for name in sorted(found, key=_natural):
        array = found[name]
        stored = source.checkpoint.param(array.name).name if isinstance(array, Stored) else None
        if stored is None or first.setdefault(stored, name) == name:
            kept[name] = array
    return kept


def _plain(source: Source) -> dict[str, Expr]:
    """Names as they were saved, below `model/`; without such, all that are no optimizer's."""
    params = source.manifest.params
    names = [name for name in params if name.startswith(_ROOT)]
    if not names:
        names = [name for name in params if name.partition("/")[0] not in _OPTIMIZERS]
    if _wants_ties(source):
        names += [name for name in source.manifest.aliases if name.startswith(_ROOT)]
    shown = {name: _dotted(name.removeprefix(_ROOT)) for name in names}
    if len(set(shown.values())) < len(names):
        shown = {name: name.removeprefix(_ROOT) for name in names}
    return {shown[name]: _stored(source, name) for name in names}


def _wants_ties(source: Source) -> bool:
    return _config(source).get("tie_word_embeddings") is False


def _stored(source: Source, name: str) -> Expr:
    param = source.checkpoint.param(name)
    return Stored(param.name, param.shape, param.dtype.name)


def _dotted(name: str) -> str:
    return ".".join(part.replace("%2F", "/").replace("%25", "%") for part in name.split("/"))


def _config(source: Source) -> dict[str, Any]:
    if "config.json" not in source.manifest.assets:
        return {}
    try:
        found = json.loads(source.store.read("assets/config.json"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


# --- files of weights ------------------------------------------------------------------------------------


def layers(found: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors that belong into one file: those of a layer, which is what the first number in a name says."""
    groups: dict[str, list[Tensor]] = {}
    for tensor in found:
        layer = _LAYER.match(tensor.name)
        groups.setdefault(layer[1] if layer else tensor.name, []).append(tensor)
    yield from groups.values()


def shards(found: Iterable[Tensor], shard_bytes: int) -> list[list[Tensor]]:
    """Files of at most `shard_bytes` of data, or of one layer that is longer."""
    out: list[list[Tensor]] = []
    room = 0
    for group in layers(found):
        size = sum(tensor.nbytes for tensor in group)
        if not out or size > room:
            out.append([])
            room = shard_bytes
        out[-1] += group
        room -= size
    return out


def header(some: Iterable[Tensor]) -> bytes:
    """The safetensors header, padded with spaces so that data begins on a page."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in some:
        offsets = [at, at + tensor.nbytes]
        kind = dtypes.of(tensor.array.dtype).safetensors
        table[tensor.name] = {"dtype": kind, "shape": list(tensor.array.shape), "data_offsets": offsets}
        at += tensor.nbytes
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-(8 + len(text)) % PAGE_BYTES)
    return struct.pack("<Q", len(text)) + text


def weights(source: Source, found: list[Tensor]) -> dict[str, Node]:
    """The files, by name."""
    parts = shards(found, source.config.shard_bytes)
    if not parts:
        return {}
    if len(parts) == 1:
        return {"model.safetensors": _file(source, "model.safetensors", parts[0])}
    names = [f"model-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
    files: dict[str, Node] = {name: _file(source, name, part) for name, part in zip(names, parts, strict=True)}
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in found)},
        "weight_map": {tensor.name: name for name, part in zip(names, parts, strict=True) for tensor in part},
    }
    data = json.dumps(index, indent=2).encode()
    files[INDEX] = BytesFile(data, version=f"{source.version}/hf/{INDEX}", mtime_ns=source.mtime_ns)
    return files


def _file(source: Source, name: str, part: list[Tensor]) -> StepFile:
    # As safetensors itself orders them, so that every tensor is aligned to its elements.
    ordered = sorted(part, key=lambda tensor: -dtypes.of(tensor.array.dtype).itemsize)
    head = header(ordered)

    def segments() -> list[Segment]:
        out: list[Segment] = [head]
        for tensor in ordered:
            out += source.content(tensor.array, f"hf/{tensor.name}")
        return out

    size = len(head) + sum(tensor.nbytes for tensor in ordered)
    direct = source.is_local and all(tensor.nbytes == 0 or source.is_direct(tensor.array) for tensor in ordered)
    return StepFile(source, f"hf/{name}", size, segments, blocking=not direct)
