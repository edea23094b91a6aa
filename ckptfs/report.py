"""What the ranks report to the leader: which bytes of which arrays they wrote, with checksums.

A large save has millions of pieces, and all ranks wait while the leader puts them together: they are columns, never an
object each. Nothing is believed: the pieces must tile every array exactly.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
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
    hashes = np.frombuffer(b"".join(pieces.hashes for pieces in reported), dtype=f"V{HASH_BYTES}")
    hashes = hashes[_spans(_before(counts)[order], counts[order])]
    given = np.concatenate([np.empty(0, np.int64), *(pieces.lengths for pieces in reported)])
    given_counts = rows["lengths"].astype(np.int64)
    given = given[_spans(_before(given_counts)[order], given_counts[order])]
    rows, counts, given_counts = rows[order], counts[order], given_counts[order]
    array_edges = np.searchsorted(rows["array"], np.arange(len(plan.arrays) + 1))
    extent_edges = np.append(_before(counts), counts.sum())[array_edges].tolist()
    given_edges = np.append(_before(given_counts), given_counts.sum())[array_edges].tolist()
    row_edges = array_edges.tolist()
    params = {}
    for i, array in enumerate(plan.arrays):
        own = slice(row_edges[i], row_edges[i + 1])
        start, stop = rows["start"][own], rows["stop"][own]
        _check_tiling(array, start, stop)
        theirs = given[given_edges[i] : given_edges[i + 1]]
        lengths = _lengths(
            array, start, stop, counts[own], given_counts[own], theirs, array.layout.extent_bytes(plan.extent_bytes)
        )
        params[array.name] = Param(
            array.name,
            zarr3.path_of_name(array.name),
            array.dtype,
            array.layout,
            array.codec,
            run_lengths(lengths),
            hashes[extent_edges[i] : extent_edges[i + 1]].tobytes(),
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


def _check_tiling(array: Array, start: Column, stop: Column) -> None:
    """The pieces, ascending, are exactly the bytes of the array's files, and none crosses from one into the next."""
    layout = array.layout
    if layout.nbytes == 0:
        first = last = np.empty(0, np.int64)
    elif layout.many:
        first = np.arange(layout.blocks) * layout.block_bytes
        last = first + np.array([layout.used_bytes(b) for b in range(layout.blocks)])
    else:
        first, last = np.array([0]), np.array([layout.logical_bytes])
    file = np.searchsorted(first, start, side="right") - 1
    if (
        (file >= 0).all()
        and (start < stop).all()
        and (stop <= last[file]).all()
        and (stop[:-1] <= start[1:]).all()
        and (stop - start).sum() == (last - first).sum()
    ):
        return
    raise SaveError(f"array {array.name!r}: {_fault(first, last, start, stop)}; nothing was committed")


def _fault(first: Column, last: Column, start: Column, stop: Column) -> str:
    """Where pieces stop to be a tiling."""
    pieces = iter(zip(start.tolist(), stop.tolist(), strict=True))
    for low, high in zip(first.tolist(), last.tolist(), strict=True):
        at = low
        while at < high:
            a, b = next(pieces, (-1, -1))
            if a != at or not a < b <= high:
                return f"reports leave a hole or an overlap at byte {at}"
            at = b
    return "two ranks wrote the same bytes"


def _lengths(
    array: Array, start: Column, stop: Column, counts: Column, given_counts: Column, given: Column, extent_bytes: int
) -> Column:
    """Stored bytes of every extent: as reported, or as the piece is cut."""
    # Files of their own count extents from their first byte.
    base = start if array.layout.many else np.zeros_like(start)
    low, high = start - base, stop - base
    cut = given_counts == 0
    if not (counts == np.where(cut, -(-high // extent_bytes) - low // extent_bytes, given_counts)).all():
        raise SaveError(f"array {array.name!r}: a report has a wrong number of checksums; nothing was committed")
    edge = _spans(low // extent_bytes, counts) * extent_bytes  # at or before each extent
    found: Column = np.minimum(edge + extent_bytes, np.repeat(high, counts)) - np.maximum(edge, np.repeat(low, counts))
    found[np.repeat(~cut, counts)] = given
    return found
