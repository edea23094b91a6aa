"""When a rank is lost in the middle of a save, the ranks that hold the same bytes write its part.

Rules:
- Who stands in for whom is a pure function (`saveplan.stand_ins`). What nobody else holds ends the save.
- The bytes come from the caller's tensors while the save still blocks the caller, afterwards from copies that were kept
  for this (`Spare`). A rank that has neither any more says so, and the save fails as it would have.
- A rank that was silent may only be stopped, and go on writing at any later time. So before anybody stands in for it,
  the unfinished save gets another name, and every file that it may hold open is replaced by a new one (`fence`). What
  it writes then goes to files that nobody reads.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptfs import commit, zarr3
from ckptfs.errors import StorageError
from ckptfs.stage import Job
from ckptfs.storage.base import os_error

if TYPE_CHECKING:
    from ckptfs.report import Report
    from ckptfs.saveplan import Array, Pieces, SavePlan
    from ckptfs.stage import Stager, StagingPool
    from ckptfs.storage import LocalStore, Store

_COPY_BYTES = 8 << 20


@dataclass(frozen=True)
class Order:
    """What the leader tells the others: who is lost and why, where the save goes on, and who has something to do."""

    lost: dict[int, str]
    folder: str
    ranks: list[int]

    def pack(self) -> bytes:
        return json.dumps([list(self.lost.items()), self.folder, self.ranks]).encode()

    @classmethod
    def unpack(cls, raw: bytes) -> Order:
        lost, folder, ranks = json.loads(raw)
        return cls(dict(lost), folder, ranks)


# --- copies for later ------------------------------------------------------------------------------------


class Spare:
    """Copies of what another rank writes, kept until the save has ended. They take only buffers that are free."""

    def __init__(self, pool: StagingPool) -> None:
        self._pool = pool
        self._kept: list[tuple[Job, Any, list[Any]]] = []

    def fill(self, jobs: Iterable[Job], stager: Stager, hurry: Callable[[], bool]) -> None:
        """Copy jobs until somebody waits for us; none if there are not buffers for all: a part of them helps nobody."""
        jobs = list(jobs)
        if len(jobs) > self._pool.capacity - self._pool.in_use:
            return
        for job in jobs:
            if hurry():
                return
            try:
                buffer = self._pool.acquire(0.0)
            except StorageError:
                return
            try:
                self._kept.append((job, buffer, stager.copy(job, buffer)))
            except BaseException:
                self._pool.release(buffer)
                raise

    def take(self, pieces: Pieces) -> list[tuple[Job, Any, list[Any]]] | None:
        """The copies that make up these pieces, which are the caller's to release; None if some are missing.

        An array's pieces are asked for as a whole or not at all: one rank wrote them.
        """
        found = [(Job(tuple(p for p in job.parts if p.array in pieces)), b, e) for job, b, e in self._kept]
        found = [one for one in found if one[0].parts]
        if sum(job.nbytes for job, _, _ in found) != sum(b - a for ranges in pieces.values() for a, b in ranges):
            return None
        taken = {id(buffer) for _, buffer, _ in found}
        self._kept = [one for one in self._kept if id(one[1]) not in taken]
        return found

    def close(self) -> None:
        for _, buffer, events in self._kept:
            for event in events:
                event.synchronize()
            self._pool.release(buffer)
        self._kept = []


# --- keeping the lost out --------------------------------------------------------------------------------


def fence(
    run: LocalStore,
    folder: str,
    arrays: list[Array],
    pieces: Iterable[Pieces],
    documents: Collection[int],
    on_copied: Callable[[int], None],
) -> str:
    """The new name of an unfinished save in which no file is open to those who would have written these pieces.

    `documents`: the arrays whose zarr.json they would have written. `on_copied` hears how many bytes were copied.
    """
    renamed = folder.removesuffix(commit.SAVING) + "-2" + commit.SAVING
    run.rename_dir(folder, renamed)
    target = run.sub(renamed)
    for number in documents:
        target.remove(f"{zarr3.path_of_name(arrays[number].name)}/zarr.json")
    theirs: dict[int, list[tuple[int, int]]] = {}
    for of_one in pieces:
        for number, ranges in of_one.items():
            theirs.setdefault(number, []).extend(ranges)
    done = 0
    for number, ranges in theirs.items():
        for path, keep in _files(arrays[number], ranges):
            done = _renew(target, path, keep, done, on_copied)
    return renamed


def _files(array: Array, ranges: list[tuple[int, int]]) -> list[tuple[str, list[tuple[int, int | None]]]]:
    """The files that hold these ranges, each with what of it others have written (None: to its end)."""
    layout, base = array.layout, zarr3.path_of_name(array.name)
    if layout.many:
        size = layout.block_bytes
        return [(f"{base}/{layout.key(i)}", []) for a, b in ranges for i in range(a // size, (b - 1) // size + 1)]
    keep: list[tuple[int, int | None]] = []
    at = 0
    for start, stop in sorted(ranges):
        if at < start:
            keep.append((at, start))
        at = stop
    if at < layout.logical_bytes:  # who writes the last byte writes the index behind it
        keep.append((at, None))
    return [(f"{base}/{layout.key()}", keep)]


def _renew(
    target: LocalStore, path: str, keep: list[tuple[int, int | None]], done: int, on_copied: Callable[[int], None]
) -> int:
    """Put a new file in the place of another, with the parts to keep; returns `done` plus what was copied."""
    where = target.full(path)
    if not keep or not os.path.exists(where):
        target.remove(path)
        return done
    ops, made = target.ops, f"{where}.renewed"
    try:
        with contextlib.ExitStack() as files:
            source = ops.open(where, os.O_RDONLY)
            files.callback(ops.close, source)
            copy = ops.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            files.callback(ops.close, copy)
            size = os.fstat(source).st_size
            for start, stop in keep:
                at, end = start, size if stop is None else min(stop, size)
                while at < end:
                    data = memoryview(os.pread(source, min(_COPY_BYTES, end - at), at))
                    if not data:
                        break
                    while data:
                        written = ops.pwrite(copy, data, at)
                        data, at, done = data[written:], at + written, done + written
                    on_copied(done)
        ops.rename(made, where)
    except OSError as error:
        raise os_error("copying", where, error) from error
    return done


# --- reports ---------------------------------------------------------------------------------------------


def first_with(nodes: list[bytes], lost: Collection[int]) -> dict[int, int] | None:
    """Lost rank → the rank that reports its tree instead, for those that would have reported one (the first of all that
    have it); None if a tree is lost with them. `nodes`: every rank's digest of its tree.
    """
    found: dict[int, int] = {}
    for rank in sorted(lost):
        if nodes.index(nodes[rank]) == rank:
            other = next((r for r, node in enumerate(nodes) if node == nodes[rank] and r not in lost), None)
            if other is None:
                return None
            found[rank] = other
    return found


def combine(size: int, reports: dict[int, Report], second: dict[int, Report], trees: dict[int, int]) -> list[Report]:
    """One report for each rank: a lost one's is empty, but for the tree; its stand-ins' are longer."""
    out: list[Report] = [reports.get(rank, ([], {"small": {}})) for rank in range(size)]
    for rank, (written, _) in second.items():
        out[rank] = ([*out[rank][0], *written], out[rank][1])
    for rank, other in trees.items():
        out[rank] = (out[rank][0], {**out[rank][1], "node": second[other][1]["node"]})
    return out


def lost_text(lost: dict[int, str], step: int | None, run: str) -> str:
    """The warning."""
    who = "; ".join(f"rank {rank}: {reason}" for rank, reason in sorted(lost.items()))
    return f"step {step} of {run} was saved although {len(lost)} rank(s) failed; others wrote their part: {who}"


def documents_of(plan: SavePlan, ranks: Collection[int], size: int) -> list[int]:
    """The arrays whose zarr.json is written by these ranks: dealt in turn."""
    return [number for number in range(len(plan.arrays)) if number % size in ranks]


def put_documents(
    target: Store, plan: SavePlan, numbers: Iterable[int], between: Callable[[], None] = lambda: None
) -> None:
    """Those of arrays alike are one file with many names. `between` is called after each."""
    first: dict[bytes, str] = {}
    for number in numbers:
        array = plan.arrays[number]
        path, text = f"{zarr3.path_of_name(array.name)}/zarr.json", commit.array_document(array)
        commit.put(target, path, text, first.setdefault(text, path))
        between()
