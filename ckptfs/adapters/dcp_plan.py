"""What the ranks of a DCP save tell each other through DCP's own plan and results.

The coordinator sees all parts of all tensors once, in prepare_global_plan: it decides how each array lies in its file,
and names the folder of this save. DCP's plan caching may keep a plan, with what we attached to it, for later saves. So
a plan carries only what stays true while it stays the same (the layouts); the folder travels as a `Ticket`, which is
left for the receiving thread at the moment it is unpickled, whether DCP then uses the plan it came with or not.
"""

from __future__ import annotations

import json
import struct
import threading
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from ckptfs import dtypes
from ckptfs.box import Box
from ckptfs.codec import Codec
from ckptfs.errors import CkptError, MismatchError
from ckptfs.grid import Layout, choose
from ckptfs.ranges import cut
from ckptfs.report import Written
from ckptfs.saveplan import Array, check_split, codec_for, extent_size, part_of

from .dcp_tree import name_of, path_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.checkpoint.planner import SavePlan, WriteItem

    from ckptfs.saveplan import Options


# --- from the coordinator to the ranks -------------------------------------------------------------------


@dataclass(frozen=True)
class Ticket:
    """The folder that this save, and no other, writes to."""

    url: str
    name: str
    save_id: str

    def __reduce__(self) -> tuple[Any, ...]:
        return _deliver, (self.url, self.name, self.save_id)


_mailbox = threading.local()


def _deliver(url: str, name: str, save_id: str) -> Ticket:
    _mailbox.ticket = ticket = Ticket(url, name, save_id)
    return ticket


def clear_mailbox() -> None:
    _mailbox.ticket = None


def take_ticket(url: str, name: str) -> Ticket:
    """The ticket that came with this save's plan."""
    ticket: Ticket | None = getattr(_mailbox, "ticket", None)
    _mailbox.ticket = None
    if ticket is None or ticket.name != name:
        raise CkptError(
            f"the plan for {url}/{name} did not come from a ckptfs StorageWriter on the coordinating rank: "
            "use the same writer and the same path on every rank"
        )
    return ticket


@dataclass(frozen=True)
class Attached:
    """What a plan carries: layouts that differ from the ordinary row-major one, by flat name."""

    ticket: Ticket
    extent_bytes: int
    layouts: dict[str, tuple[tuple[int, ...], tuple[int, ...], bool]]


def box_of(item: WriteItem) -> Box:
    chunk = _tensor(item).chunk
    return Box(tuple(chunk.offsets), tuple(a + n for a, n in zip(chunk.offsets, chunk.sizes, strict=True)))


def _tensor(item: WriteItem) -> Any:
    if item.tensor_data is None:
        raise MismatchError(f"{item.index.fqn!r}: a tensor without a description in the plan")
    return item.tensor_data


def attach(plans: Sequence[SavePlan], ticket: Ticket, options: Options) -> list[Attached]:
    """For each rank the layouts of the arrays that it writes to."""
    boxes: dict[str, list[Box]] = {}
    kinds: dict[str, tuple[tuple[int, ...], dtypes.DType, str]] = {}
    for plan in plans:
        for item in plan.items:
            if item.tensor_data is not None:
                fqn = item.index.fqn
                boxes.setdefault(fqn, []).append(box_of(item))
                if fqn not in kinds:
                    name = name_of(path_of(fqn, plan.planner_data))
                    kinds[fqn] = tuple(item.tensor_data.size), dtypes.of(item.tensor_data.properties.dtype), name
    total = sum(prod(shape) * dtype.itemsize for shape, dtype, _ in kinds.values())
    extent_bytes = extent_size(total, options.extent_bytes)
    check_split([name for *_, name in kinds.values()], options.split)
    decided: dict[str, tuple[tuple[int, ...], tuple[int, ...], bool]] = {}
    for fqn, (shape, dtype, name) in kinds.items():
        layout = _decide(name, shape, dtype, boxes[fqn], options)
        if layout != ordinary(shape, dtype, options):
            decided[fqn] = layout.block, layout.chunk, layout.many
    return [
        Attached(ticket, extent_bytes, {f: decided[f] for f in {item.index.fqn for item in plan.items} if f in decided})
        for plan in plans
    ]


def ordinary(shape: tuple[int, ...], dtype: dtypes.DType, options: Options) -> Layout:
    """The layout that follows from shape and type alone."""
    return choose(
        shape,
        dtype.itemsize,
        many=not options.positional and prod(shape) > 0,
        chunk_bytes=options.chunk_bytes,
        block_bytes=options.block_bytes,
    )


def _decide(name: str, shape: tuple[int, ...], dtype: dtypes.DType, boxes: list[Box], options: Options) -> Layout:
    sizes: Any = {"chunk_bytes": options.chunk_bytes, "block_bytes": options.block_bytes}
    compressed = codec_for(name, dtype, options.compression) is not None
    part = part_of([name], shape, options.split)
    edges = [*boxes, part] if part else boxes
    if prod(shape) and (compressed or not options.positional):
        layout = choose(shape, dtype.itemsize, edges, many=True, compressed=compressed, **sizes)
        if all(_whole_blocks(layout, box) for box in boxes):
            return layout
        if not options.positional:
            raise MismatchError(f"{name!r}: its shards do not end at common boundaries; save it to a local path")
    return choose(shape, dtype.itemsize, edges, **sizes)


def _whole_blocks(layout: Layout, box: Box) -> bool:
    return all(box.contains(layout.block_box(block)) for block in layout.blocks_of(box))


def array_of(item: WriteItem, name: str, dtype: dtypes.DType, attached: Attached | None, options: Options) -> Array:
    """How the array that an item belongs to is stored; the same on every rank."""
    shape = tuple(_tensor(item).size)
    found = attached.layouts.get(item.index.fqn) if attached is not None else None
    if found is None:
        return Array(name, dtype, ordinary(shape, dtype, options), None)
    block, chunk, many = found
    codec = codec_for(name, dtype, options.compression) if many else None
    return Array(name, dtype, Layout(shape, dtype.itemsize, block, chunk, many, codec is not None), codec)


# --- from the ranks to the coordinator -------------------------------------------------------------------


@dataclass
class Report:
    """What one rank has written: arrays, their pieces (by number of the rank's own list), values as trees."""

    arrays: list[Array]
    written: list[Written]
    values: dict[str, Any]


def pack(report: Report, extent_bytes: int) -> bytes:
    """The report as bytes: a JSON head, then the checksums."""
    head = {
        "arrays": [
            [a.name, a.dtype.name, a.layout.shape, a.layout.block, a.layout.chunk, a.layout.many,
             a.codec.to_json() if a.codec else None]
            for a in report.arrays
        ],
        "pieces": [
            [w.array, w.start, w.stop, _lengths(w, report, extent_bytes), len(w.hashes)] for w in report.written
        ],
        "values": report.values,
    }  # fmt: skip
    raw = json.dumps(head, separators=(",", ":")).encode()
    return b"".join([struct.pack("<Q", len(raw)), raw, *(w.hashes for w in report.written)])


def _lengths(piece: Written, report: Report, extent_bytes: int) -> list[int]:
    """Extent lengths, always said: ranks whose plans are of different age may use different extent sizes."""
    if piece.lengths:
        return piece.lengths
    layout = report.arrays[piece.array].layout
    base = piece.start if layout.many else 0
    return [b - a for a, b in cut(piece.start - base, piece.stop - base, layout.extent_bytes(extent_bytes))]


def unpack(raw: bytes) -> Report:
    (length,) = struct.unpack_from("<Q", raw)
    head = json.loads(raw[8 : 8 + length])
    arrays = []
    for name, dtype, shape, block, chunk, many, codec in head["arrays"]:
        kind = dtypes.of(dtype)
        layout = Layout(tuple(shape), kind.itemsize, tuple(block), tuple(chunk), many, codec is not None)
        arrays.append(Array(name, kind, layout, Codec.from_json(codec) if codec is not None else None))
    at, written = 8 + length, []
    for array, start, stop, lengths, size in head["pieces"]:
        written.append(Written(array, start, stop, lengths, raw[at : at + size]))
        at += size
    return Report(arrays, written, head["values"])


def unite(reports: Sequence[Report]) -> tuple[list[Array], list[Written], dict[str, Any]]:
    """One list of arrays for all ranks, and the pieces renumbered to it."""
    number: dict[str, int] = {}
    arrays: list[Array] = []
    written: list[Written] = []
    values: dict[str, Any] = {}
    for report in reports:
        values.update(report.values)
        for array in report.arrays:
            if array.name not in number:
                number[array.name] = len(arrays)
                arrays.append(array)
            elif arrays[number[array.name]] != array:
                raise MismatchError(
                    f"{array.name!r}: the ranks do not agree how it is stored. A planner with enable_plan_caching "
                    "keeps the plans of some ranks when others change; save once without plan caching"
                )
        names = [number[array.name] for array in report.arrays]
        written += [Written(names[w.array], w.start, w.stop, w.lengths, w.hashes) for w in report.written]
    return arrays, written, values
