"""From live tensors to the bytes of a file: the only place that reads what training owns.

A job is what one buffer holds: a piece of one array, or several small arrays. Copies release the GIL; copies from
a GPU run on a stream of their own into pinned memory, and the job says when they have landed.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfs.saveplan import cut
from ckptfs.shards import as_numpy

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckptfs.box import Box
    from ckptfs.grid import Layout
    from ckptfs.saveplan import SavePlan

PAGE = 4096
_PACK = 64  # small arrays lie at multiples of this in a shared buffer


@dataclass(frozen=True, slots=True)
class Part:
    """Logical bytes [start, stop) of an array, at `at` in the job's buffer."""

    array: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True)
class Job:
    """What one buffer carries to the store."""

    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        return sum(p.stop - p.start for p in self.parts)


def jobs_of(plan: SavePlan, io_bytes: int, small_bytes: int) -> list[Job]:
    """This rank's pieces as jobs in storage order; arrays below `small_bytes` share buffers.

    Pieces of one array are cut at multiples of `io_bytes` (a multiple of the extent size); files of their own are
    never cut.
    """
    jobs: list[Job] = []
    pack: list[Part] = []
    used = 0
    for number, ranges in plan.pieces.items():
        layout = plan.arrays[number].layout
        for start, stop in ranges:
            if layout.many:
                for block in range(start // layout.block_bytes, (stop - 1) // layout.block_bytes + 1):
                    low = block * layout.block_bytes
                    jobs.append(Job((Part(number, low, low + layout.used_bytes(block), 0),)))
            elif stop - start <= small_bytes:
                if used + stop - start > io_bytes:
                    jobs.append(Job(tuple(pack)))
                    pack, used = [], 0
                pack.append(Part(number, start, stop, used))
                used += -(-(stop - start) // _PACK) * _PACK
            else:
                jobs += [Job((Part(number, a, b, a % PAGE),)) for a, b in cut(start, stop, io_bytes)]
    if pack:
        jobs.append(Job(tuple(pack)))
    return jobs


def fill(layout: Layout, pieces: Iterable[tuple[Box, Any]], start: int, stop: int, into: memoryview) -> None:
    """The stored bytes [start, stop) of an array, from the live CPU data of its boxes."""
    size = layout.itemsize
    flat = np.frombuffer(into, dtype={1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}[size])
    arrays = [(box, as_numpy(data)) for box, data in pieces]
    for offset, valid, padded in layout.parts(start, stop):
        out = flat[offset // size : offset // size + padded.size].reshape(padded.shape)
        if valid.shape != padded.shape:
            out[...] = 0
        for box, data in arrays:
            inner = valid & box
            if inner.size:
                np.copyto(out[(..., *inner.within(padded.start).slices)], data[(..., *inner.within(box.start).slices)])


class Stager:
    """Copies jobs into buffers. One a save; `copy` is called by one thread, `landed` by any."""

    def __init__(self, plan: SavePlan, pieces: Sequence[Sequence[tuple[Box, Any]]]) -> None:
        self._plan = plan
        self._pieces = pieces
        torch = sys.modules.get("torch")
        self._cuda = torch is not None and any(getattr(data, "is_cuda", False) for held in pieces for _, data in held)
        self._stream = torch.cuda.Stream() if self._cuda else None  # type: ignore[union-attr]
        if self._cuda:
            # What the caller's stream has queued (the update that made these values) comes first.
            self._stream.wait_stream(torch.cuda.current_stream())  # type: ignore[union-attr]

    def copy(self, job: Job, view: memoryview) -> Any:
        """Fill the buffer; returns a CUDA event when the copy is still under way, else None."""
        event = None
        for part in job.parts:
            layout = self._plan.arrays[part.array].layout
            into = view[part.at : part.at + part.stop - part.start]
            held = self._pieces[part.array]
            if self._cuda and any(getattr(data, "is_cuda", False) for _, data in held):
                self._fill_from_gpu(layout, held, part, into)
                event = True
            else:
                fill(layout, held, part.start, part.stop, into)
        if event is None:
            return None
        torch = sys.modules["torch"]
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def _fill_from_gpu(self, layout: Layout, held: Sequence[tuple[Box, Any]], part: Part, into: memoryview) -> None:
        torch = sys.modules["torch"]
        size = layout.itemsize
        carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[size]
        flat = torch.frombuffer(into, dtype=carrier)
        with torch.cuda.stream(self._stream):
            for offset, valid, padded in layout.parts(part.start, part.stop):
                out = flat[offset // size : offset // size + padded.size].view(padded.shape)
                if valid.shape != padded.shape:
                    out.zero_()
                for box, data in held:
                    inner = valid & box
                    if not inner.size:
                        continue
                    source = data.resolve_conj().resolve_neg()[inner.within(box.start).slices]
                    out[inner.within(padded.start).slices].copy_(source.view(carrier), non_blocking=True)
                    # The allocator must not hand this memory out again before the copy is done.
                    data.record_stream(self._stream)
