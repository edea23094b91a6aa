"""What the ranks report to the leader: which bytes of which arrays they wrote, with checksums.

A large save has millions of pieces, and all ranks wait while the leader puts them together: they are columns, never an
object each. Nothing is believed: the pieces must tile every array exactly.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfs import zarr3
from ckptfs.errors import SaveError
from ckptfs.manifest import HASH_BYTES, Param, run_lengths, without_collection

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckptfs.saveplan import Array, SavePlan

    Column = np.ndarray[Any, np.dtype[np.int64]]

_HEAD = struct.Struct("<I")
_ROW = np.dtype([("array", "<u4"), ("start", "<i8"), ("stop", "<i8"), ("hashes", "<u4"), ("lengths", "<u4")])
_LENGTH = np.dtype("<i8")


@dataclass(frozen=True, slots=True)
class Written:
    """A finished piece, as a rank reports it: stored lengths only where compression made them differ."""

    array: int
    start: int
    stop: int
    lengths: list[int] | None
    hashes: bytes


@dataclass(frozen=True, eq=False)
class Finished:
    """Finished pieces as columns: a row for each; stored lengths of those that have some, and all checksums."""

    rows: np.ndarray[Any, Any]
    lengths: Column
    hashes: bytes

    @classmethod
    def of(cls, written: Sequence[Written]) -> Finished:
        rows = [(w.array, w.start, w.stop, len(w.hashes) // HASH_BYTES, len(w.lengths or ())) for w in written]
        lengths = np.array([n for w in written for n in w.lengths or ()], dtype=_LENGTH)
        return cls(np.array(rows, dtype=_ROW), lengths, b"".join(w.hashes for w in written))


Report = tuple[list[Finished], dict[str, Any]]


def pack_report(written: Sequence[Written], extra: Mapping[str, Any]) -> bytes:
    """A rank's report as bytes: a JSON head, then the columns."""
    pieces = Finished.of(written)
    head = json.dumps({**extra, "pieces": [len(pieces.rows), len(pieces.lengths)]}, separators=(",", ":")).encode()
    return b"".join([_HEAD.pack(len(head)), head, pieces.rows.tobytes(), pieces.lengths.tobytes(), pieces.hashes])


def unpack_report(raw: bytes) -> Report:
    (size,) = _HEAD.unpack_from(raw)
    at = _HEAD.size + size
    head = json.loads(raw[_HEAD.size : at])
    count, lengths = head.pop("pieces")
    rows = np.frombuffer(raw, _ROW, count, at)
    at += rows.nbytes
    pieces = Finished(rows, np.frombuffer(raw, _LENGTH, lengths, at), raw[at + lengths * _LENGTH.itemsize :])
    return [pieces], head


def params_of(plan: SavePlan, reported: Iterable[Finished]) -> dict[str, Param]:
    """The manifest's arrays; SaveError if the pieces do not tile an array exactly."""
    with without_collection():
        return _params_of(plan, [pieces for pieces in reported if len(pieces.rows)])


def _params_of(plan: SavePlan, reported: list[Finished]) -> dict[str, Param]:
    rows = np.concatenate([np.empty(0, _ROW), *(pieces.rows for pieces in reported)])
    order = np.lexsort((rows["start"], rows["array"]))
    counts = rows["hashes"].astype(np.int64)
    found = np.frombuffer(b"".join(pieces.hashes for pieces in reported), dtype=f"V{HASH_BYTES}")
    hashes = found[_spans(_before(counts)[order], counts[order])].tobytes()
    given = np.concatenate([np.empty(0, np.int64), *(pieces.lengths for pieces in reported)])
    given_counts = rows["lengths"].astype(np.int64)
    given = given[_spans(_before(given_counts)[order], given_counts[order])]
    rows, counts, given_counts = rows[order], counts[order], given_counts[order]
    array_edges = np.searchsorted(rows["array"], np.arange(len(plan.arrays) + 1))
    rows, counts, given_counts = (column[: array_edges[-1]] for column in (rows, counts, given_counts))
    _check_tiling(plan.arrays, rows, array_edges)
    lengths = _lengths(plan, rows, counts, given_counts, given)
    edges = np.append(_before(counts), counts.sum())[array_edges].tolist()
    params = {}
    for i, array in enumerate(plan.arrays):
        params[array.name] = Param(
            array.name,
            zarr3.path_of_name(array.name),
            array.dtype,
            array.layout,
            array.codec,
            run_lengths(lengths[edges[i] : edges[i + 1]]),
            hashes[HASH_BYTES * edges[i] : HASH_BYTES * edges[i + 1]],
        )
    return params


def _before(counts: Column) -> Column:
    """How much comes before each, end to end."""
    total: Column = np.cumsum(counts) - counts
    return total


def _spans(starts: Column, counts: Column) -> Column:
    """All of range(start, start + count), one after another."""
    found: Column = np.repeat(starts - _before(counts), counts) + np.arange(counts.sum())
    return found


def _files(array: Array) -> list[tuple[int, int]]:
    """The logical bytes of each file of an array."""
    layout = array.layout
    if layout.nbytes == 0:
        return []
    if not layout.many:
        return [(0, layout.logical_bytes)]
    return [(b * layout.block_bytes, b * layout.block_bytes + layout.used_bytes(b)) for b in range(layout.blocks)]


def _check_tiling(arrays: Sequence[Array], rows: np.ndarray[Any, Any], array_edges: Column) -> None:
    """The pieces, ascending, are exactly the bytes of the arrays' files, and none crosses from one into the next.

    All arrays at once, as if one lay behind the other: a few calls for each would take 50 µs of interpreter for each.
    """
    files = [_files(array) for array in arrays]
    ends = np.array([of_it[-1][1] if of_it else 0 for of_it in files], np.int64)
    base = _before(ends)
    number = rows["array"].astype(np.int64)
    inside = (rows["start"] >= 0) & (rows["start"] < rows["stop"]) & (rows["stop"] <= ends[number])
    start, stop = rows["start"] + base[number], rows["stop"] + base[number]
    all_files = np.array([edge for of_it in files for edge in of_it], np.int64).reshape(-1, 2)
    first, last = (all_files + np.repeat(base, [len(of_it) for of_it in files])[:, None]).T
    file = np.searchsorted(first, start, side="right") - 1
    if (
        inside.all()
        and (stop <= last[file]).all()
        and (stop[:-1] <= start[1:]).all()
        and (stop - start).sum() == (last - first).sum()
    ):
        return
    owns = [rows[a:b] for a, b in pairwise(array_edges)]
    faults = (
        _fault(of_it, own["start"].tolist(), own["stop"].tolist()) for of_it, own in zip(files, owns, strict=True)
    )
    name, fault = next((array.name, fault) for array, fault in zip(arrays, faults, strict=True) if fault)
    raise SaveError(f"array {name!r}: {fault}; nothing was committed")


def _fault(files: Sequence[tuple[int, int]], start: Sequence[int], stop: Sequence[int]) -> str:
    """Where pieces stop to be a tiling; empty if they are one."""
    pieces = iter(zip(start, stop, strict=True))
    for low, high in files:
        at = low
        while at < high:
            a, b = next(pieces, (-1, -1))
            if a != at or not a < b <= high:
                return f"reports leave a hole or an overlap at byte {at}"
            at = b
    return "two ranks wrote the same bytes" if next(pieces, None) else ""


def _lengths(plan: SavePlan, rows: np.ndarray[Any, Any], counts: Column, given_counts: Column, given: Column) -> Column:
    """Stored bytes of every extent: as reported, or as the piece is cut."""
    # Files of their own count extents from their first byte.
    many = np.array([array.layout.many for array in plan.arrays], bool)[rows["array"]]
    base = np.where(many, rows["start"], 0)
    low, high = rows["start"] - base, rows["stop"] - base
    cut = given_counts == 0
    size = np.array([array.layout.extent_bytes(plan.extent_bytes) for array in plan.arrays], np.int64)[rows["array"]]
    wrong = counts != np.where(cut, -(-high // size) - low // size, given_counts)
    if wrong.any():
        name = plan.arrays[rows["array"][wrong][0]].name
        raise SaveError(f"array {name!r}: a report has a wrong number of checksums; nothing was committed")
    sizes = np.repeat(size, counts)
    edge = _spans(low // size, counts) * sizes  # at or before each extent
    found: Column = np.minimum(edge + sizes, np.repeat(high, counts)) - np.maximum(edge, np.repeat(low, counts))
    found[np.repeat(~cut, counts)] = given[: given_counts.sum()]
    return found
