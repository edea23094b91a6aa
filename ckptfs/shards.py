"""From live tensors to descriptions: what each rank holds of which array, and where its bytes are now.

Knows torch's ways of spreading a tensor (plain, DTensor, FSDP1's ShardedTensor, flat ranges); does no I/O.
torch is only needed when a torch tensor comes along.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ckptfs import dtypes
from ckptfs.box import Box
from ckptfs.errors import MismatchError
from ckptfs.mesh import boxes_of
from ckptfs.saveplan import Desc

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptfs.mesh import Spread


@dataclass(frozen=True)
class FlatShard:
    """Elements [start, start + data.numel()) of an array of this shape, in row-major order (FSDP1, ZeRO)."""

    data: Any
    shape: tuple[int, ...]
    start: int
    is_ckptfs_array: ClassVar[bool] = True


@dataclass(frozen=True)
class LocalShard:
    """This rank's part of an array, spread as `spread` says (see saveplan): for frameworks that have no DTensor.

    `data` is the local array as the mesh makes it; for boxes, a list with one array a box.
    """

    data: Any
    shape: tuple[int, ...]
    spread: Spread
    is_ckptfs_array: ClassVar[bool] = True


@dataclass
class Held:
    """One array as this rank holds it: its description, and its boxes with the live data of each."""

    desc: Desc
    pieces: list[tuple[Box, Any]]  # Any: a torch tensor or numpy array of exactly the box's shape
    value: Any = None  # what the caller's tree holds


def hold(name: str, value: Any, rank: int) -> Held:
    """Describe a leaf of a tree. Refuses what has no definite value (Partial, meta tensors) with a hint."""
    if isinstance(value, FlatShard):
        return _flat(name, value)
    if isinstance(value, LocalShard):
        return _local(name, value, rank)
    if isinstance(value, np.ndarray):
        dtype = dtypes.of(value.dtype)
        return Held(Desc(name, dtype.name, value.shape, ["whole"]), [(Box.whole(value.shape), value)], value)
    torch = sys.modules["torch"]
    dtensor = sys.modules.get("torch.distributed.tensor")
    if dtensor is not None and isinstance(value, dtensor.DTensor):
        return _dtensor(name, value, rank)
    sharded = sys.modules.get("torch.distributed._shard.sharded_tensor")
    if sharded is not None and isinstance(value, sharded.ShardedTensor):
        return _sharded(name, value)
    if not isinstance(value, torch.Tensor):
        raise MismatchError(f"{name!r} is a {type(value).__name__}, not a tensor")
    _refuse(name, value)
    data = value.detach()
    shape = tuple(data.shape)
    return Held(Desc(name, dtypes.of(data.dtype).name, shape, ["whole"]), [(Box.whole(shape), data)], value)


def _refuse(name: str, tensor: Any) -> None:
    if tensor.is_nested:
        raise MismatchError(f"{name!r} is a nested tensor: save the tensors that .unbind() gives")
    if sys.modules["torch"].nn.parameter.is_lazy(tensor):
        raise MismatchError(f"{name!r} has no shape and no values yet: run a batch through its module first")
    if tensor.layout is not sys.modules["torch"].strided:
        raise MismatchError(f"{name!r} is a {tensor.layout} tensor: call .to_dense() before saving")
    if tensor.is_meta:
        raise MismatchError(
            f"{name!r} is on the meta device and has no values: materialise it before saving or loading"
        )
    if tensor.is_quantized:
        raise MismatchError(f"{name!r} is quantized: save .int_repr() and its scales instead")


def _dtensor(name: str, value: Any, rank: int) -> Held:
    shape = tuple(value.shape)
    known = _spreads.setdefault(value.device_mesh, {})
    key = (value.placements, shape, rank)
    if key not in known:  # many tensors are alike, and so is each in the next save
        spread = ["mesh", *_mesh(value.device_mesh), _places(name, value)]
        known[key] = spread, [box for box in boxes_of(spread, shape, rank) if box.size]
    spread, boxes = known[key]
    local = value._local_tensor  # noqa: SLF001 - to_local() is differentiable and wraps; this is the storage
    if type(local).__name__ == "AsyncCollectiveTensor":
        local = local.wait()
    local = local.detach()  # of the local tensor: DTensor's own takes 20 µs longer
    dtype = dtypes.of(value.dtype).name
    if boxes:
        _refuse(name, local)
    return Held(Desc(name, dtype, shape, spread), _cut_local(name, local, boxes), value)


# By mesh: (placements, shape, rank) → (spread, boxes).
_spreads: weakref.WeakKeyDictionary[Any, dict[Any, tuple[Spread, list[Box]]]] = weakref.WeakKeyDictionary()


def _places(name: str, value: Any) -> list[str]:
    places = []
    for placement in value.placements:
        kind = type(placement).__name__
        if placement.is_partial():
            msg = (
                f"{name!r} has the placement {placement}: its value is a sum that is not computed yet; "
                "call .redistribute() or .full_tensor() first"
            )
            raise MismatchError(msg)
        if placement.is_replicate():
            places.append("R")
        elif kind == "_StridedShard":
            places.append(f"SS{placement.dim % value.ndim}:{placement.split_factor}")
        elif kind == "Shard":
            places.append(f"S{placement.dim % value.ndim}")
        else:
            raise MismatchError(
                f"{name!r} has the placement {placement}, which ckptfs does not know: redistribute it first"
            )
    return places


def _mesh(mesh: Any) -> tuple[list[int], list[int]]:
    """A device mesh's sizes and its ranks, as a spread says them. Torch works them out anew (0.1 ms) at every look."""
    table = mesh.mesh
    ranks = table.flatten().tolist()
    if len(ranks) != 2 and ranks == list(range(ranks[0], ranks[0] + len(ranks))):
        ranks = [ranks[0], len(ranks)]
    return list(table.shape), ranks


def _cut_local(name: str, local: Any, boxes: list[Box]) -> list[tuple[Box, Any]]:
    """The parts of a local tensor that belong to each box; several boxes lie in it in order of the dimensions."""
    boxes = [box for box in boxes if box.size]
    if not boxes:
        return []
    if len(boxes) == 1:
        if tuple(local.shape) != boxes[0].shape:
            msg = f"{name!r}: the local part has shape {list(local.shape)}, its placement says {list(boxes[0].shape)}"
            raise MismatchError(msg)
        return [(boxes[0], local)]
    # A product of intervals: the local offset of an interval is the length of those before it in local order.
    offsets: list[dict[int, int]] = []
    for d in range(local.ndim):
        at, where = 0, {}
        for box in boxes:
            if box.start[d] not in where:
                where[box.start[d]] = at
                at += box.stop[d] - box.start[d]
        if at != local.shape[d]:
            raise MismatchError(f"{name!r}: the local part has shape {list(local.shape)}, its placement says otherwise")
        offsets.append(where)
    out = []
    for box in boxes:
        index = tuple(
            slice(offsets[d][box.start[d]], offsets[d][box.start[d]] + box.stop[d] - box.start[d])
            for d in range(local.ndim)
        )
        out.append((box, local[index]))
    return out


def _sharded(name: str, value: Any) -> Held:
    """FSDP1's ShardedTensor: its shards carry their own offsets."""
    shape = tuple(value.metadata().size)
    pieces = []
    for shard in value.local_shards():
        start = tuple(shard.metadata.shard_offsets)
        stop = tuple(a + n for a, n in zip(start, shard.metadata.shard_sizes, strict=True))
        if prod(shard.metadata.shard_sizes):
            pieces.append((Box(start, stop), shard.tensor.detach()))
    spread = ["boxes", [[list(box.start), list(box.stop)] for box, _ in pieces]]
    return Held(Desc(name, dtypes.of(value.dtype).name, shape, spread), pieces, value)


def _flat(name: str, value: FlatShard) -> Held:
    data = value.data.detach() if hasattr(value.data, "detach") else value.data
    data = data.reshape(-1)
    shape, start, stop = tuple(value.shape), value.start, value.start + len(data)
    if start < 0 or stop > prod(shape):
        raise MismatchError(f"{name!r}: elements [{start}, {stop}) are not within shape {list(shape)}")
    desc = Desc(name, dtypes.of(data.dtype).name, shape, ["flat", start, stop])
    pieces, at = [], 0
    for box in boxes_of(desc.spread, shape, 0):
        pieces.append((box, data[at : at + box.size].reshape(box.shape)))
        at += box.size
    return Held(desc, pieces, value)


def _local(name: str, value: LocalShard, rank: int) -> Held:
    shape = tuple(value.shape)
    boxes = boxes_of(value.spread, shape, rank)
    if value.spread[0] == "mesh":
        dtype, pieces = value.data.dtype, _cut_local(name, value.data, boxes)
    elif value.spread[0] == "boxes" and len(boxes) == len(value.data) > 0:
        dtype, pieces = value.data[0].dtype, list(zip(boxes, value.data, strict=True))
    else:
        raise MismatchError(f"{name!r}: a LocalShard is spread as a mesh, or as boxes with one array each")
    for box, data in pieces:
        if tuple(data.shape) != box.shape or not Box.whole(shape).contains(box):
            raise MismatchError(f"{name!r}: a part of shape {list(data.shape)} cannot stand at {box} of {list(shape)}")
    return Held(Desc(name, dtypes.of(dtype).name, shape, value.spread), pieces, value)


def is_expanded(data: Any) -> bool:
    """Whether elements share memory, as `expand` and `broadcast_to` make them: they cannot all be written."""
    strides = data.strides if isinstance(data, np.ndarray) else data.stride()
    return (
        0 in strides and 0 not in data.shape and any(s == 0 and n > 1 for s, n in zip(strides, data.shape, strict=True))
    )


def as_numpy(data: Any) -> np.ndarray[Any, Any]:
    """Live CPU data as an array of its carrier type, sharing memory (read it only, or write it in place)."""
    moved: np.ndarray[Any, Any]
    if isinstance(data, np.ndarray):
        dtype = dtypes.of(data.dtype)
        if data.dtype.byteorder == ">":
            data = data.astype(data.dtype.newbyteorder("<"))
        moved = data.view(dtype.carrier)
        return moved
    torch = sys.modules["torch"]
    if data.is_conj() or data.is_neg():
        data = data.resolve_conj().resolve_neg()
    size = data.element_size()
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[size]
    array = data.view(carrier).numpy() if data.dtype != carrier else data.numpy()
    moved = array.view({1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}[size])
    return moved


def tie(held: Sequence[Held]) -> tuple[list[Held], dict[str, str]]:
    """Arrays that share their very bytes are stored once: (those to store, later name → first name)."""
    first: dict[Any, str] = {}
    kept, aliases = [], {}
    places = [_place(one) for one in held]
    shared = Counter(places)
    for one, place in zip(held, places, strict=True):
        key = _identity(one) if shared[place] > 1 else None
        if key is not None and key in first:
            aliases[one.desc.name] = first[key]
            continue
        if key is not None:
            first[key] = one.desc.name
        kept.append(one)
    return kept, aliases


def _place(held: Held) -> tuple[str, int]:
    """Where its bytes begin: who is alone there has nothing to be compared with."""
    if not held.pieces:
        return "object", id(held.value)
    data = held.pieces[0][1]
    if isinstance(data, np.ndarray):
        return "cpu", int(data.__array_interface__["data"][0])
    return data.device.type, data.data_ptr()


def _identity(held: Held) -> Any:
    """What two names must agree in to be the same tensor; None: cannot be told, never tied."""
    desc = held.desc
    if prod(desc.shape) == 0:
        return None
    if not held.pieces:
        return ("object", id(held.value)) if held.value is not None else None
    keys: list[Any] = [desc.dtype, desc.shape, str(desc.spread)]
    for box, data in held.pieces:
        if isinstance(data, np.ndarray):
            keys.append((box, data.__array_interface__["data"][0], data.strides))
        else:
            keys.append((box, str(data.device), data.data_ptr(), data.stride(), data.is_conj(), data.is_neg()))
    return tuple(map(str, keys))
