"""From live tensors to the bytes of a file: the only place that reads what training owns.

A job is what one buffer holds: a piece of one array, or several small arrays. Copies release the GIL; copies from
a GPU run on a stream of their own into pinned memory, and the job says when they have landed.
"""

from __future__ import annotations

import bisect
import os
import sys
import threading
from dataclasses import dataclass
from math import lcm, prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfs.errors import CkptError
from ckptfs.ranges import cut_evenly
from ckptfs.shards import as_numpy
from ckptfs.storage.directio import Buffer, BufferPool, address_of, slot_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ckptfs.array import Data
    from ckptfs.box import Box
    from ckptfs.grid import Layout
    from ckptfs.saveplan import SavePlan
    from ckptfs.shards import Held

PAGE = 4096
_PACK = 64  # small arrays lie at multiples of this in a shared buffer
_JOBS = 32  # as long as jobs are smaller than a buffer, there are about so many


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


def jobs_of(plan: SavePlan, io_bytes: int, small_bytes: int, *, dense: bool = False) -> list[Job]:
    """This rank's pieces as jobs, about in storage order; what is smaller than a buffer shares one.

    Pieces of one array are cut between extents, if those end with pages often enough; files of their own never. Little
    data makes small jobs, so that there is something to do for every thread. `dense`: pieces are also cut so that
    buffers are full, which costs some requests more: where the copies of all jobs are there at once.
    """
    total = sum(b - a for ranges in plan.pieces.values() for a, b in ranges)
    largest_bytes = max(io_bytes, small_bytes)
    packing = _Packing(min(io_bytes, max(small_bytes, total // _JOBS)))
    for number, ranges in plan.pieces.items():
        layout = plan.arrays[number].layout
        extent_bytes = layout.extent_bytes(plan.extent_bytes)
        # A cut inside a page sends both of its sides through the page cache: sooner in two extents.
        paged = lcm(extent_bytes, PAGE)
        grain = paged if 3 * paged <= largest_bytes else min(extent_bytes, PAGE)
        for start, stop in ranges:
            if layout.many:
                for block in range(start // layout.block_bytes, (stop - 1) // layout.block_bytes + 1):
                    low = block * layout.block_bytes
                    packing.jobs.append(Job((Part(number, low, low + layout.used_bytes(block), 0),)))
                continue
            small = stop - start <= small_bytes
            if dense and not small:
                packing.fill(number, start, stop, largest_bytes, grain, max(grain, plan.extent_bytes))
                continue
            for a, b in cut_evenly(start, stop, largest_bytes, grain):
                packing.add(number, a, b, small=small)
    packing.flush()
    return packing.jobs


class _Packing:
    """Pieces into buffers, one after the other."""

    def __init__(self, full_bytes: int) -> None:
        self.jobs: list[Job] = []
        self._full_bytes = full_bytes
        self._pack: list[Part] = []
        self._used = 0

    def add(self, number: int, start: int, stop: int, *, small: bool) -> None:
        at = self._place(start, small=small)
        if self._pack and at + stop - start > self._full_bytes:
            self.flush()
            at = self._place(start, small=small)
        self._pack.append(Part(number, start, stop, at))
        self._used = at + stop - start

    def _place(self, start: int, *, small: bool) -> int:
        # Direct I/O wants memory and file equally far from a page's beginning.
        step, offset = (_PACK, 0) if small else (PAGE, start % PAGE)
        return -(-self._used // step) * step + offset

    def fill(self, number: int, start: int, stop: int, most: int, grain: int, least: int) -> None:
        """A piece, cut so that it fills what is left of a buffer and then others, in parts worth a request."""
        while start < stop:
            room = self._full_bytes - self._place(start, small=False)
            end = stop if stop - start <= room else min(start + room, stop - least) // grain * grain
            if end < stop and end - start < least:
                if self._pack:
                    self.flush()
                    continue
                end = cut_evenly(start, stop, most, grain)[0][1]
            self.add(number, start, end, small=False)
            start = end

    def flush(self) -> None:
        if self._pack:
            self.jobs.append(Job(tuple(self._pack)))
        self._pack, self._used = [], 0


def fill(layout: Layout, pieces: Iterable[tuple[Box, Any]], start: int, stop: int, into: memoryview) -> None:
    """The stored bytes [start, stop) of an array, from the live CPU data of its boxes."""
    size = layout.itemsize
    flat = np.frombuffer(into, dtype={1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}[size])
    arrays = [(box, as_numpy(data)) for box, data in pieces]
    if len(arrays) == 1 and (run := _run_of(layout, *arrays[0], start, stop)) is not None:
        np.copyto(flat, run)
        return
    for to, data, where in _copies(layout, arrays, start, stop, flat):
        np.copyto(to, data[where])


def _copies(
    layout: Layout, pieces: Sequence[tuple[Box, Any]], start: int, stop: int, flat: Any
) -> Iterator[tuple[Any, Any, tuple[Any, ...]]]:
    """What fills the stored bytes [start, stop) of an array: (part of `flat`, data of a piece, the index in it).

    What is padding is zeroed. `flat` and data are arrays of numpy, or tensors.
    """
    size = layout.itemsize
    for offset, valid, padded in layout.parts(start, stop):
        out = flat[offset // size : offset // size + padded.size].reshape(padded.shape)
        if valid.shape != padded.shape:
            out[...] = 0
        missing = valid.size
        for box, data in pieces:
            inner = valid & box
            if inner.size:
                missing -= inner.size
                # `...` so that a 0-d array stays one.
                yield out[(..., *inner.within(padded.start).slices)], data, (..., *inner.within(box.start).slices)
        if missing:  # a plan that gives a rank what it does not hold would store whatever the buffer held before
            raise CkptError(f"{missing} elements at {valid} are not held by this rank: the ranks' plans disagree")


def _run_of(layout: Layout, box: Box, data: Data, start: int, stop: int) -> Data | None:
    """The elements of stored bytes [start, stop) where they lie in the data one after the other: rows of both."""
    shape = layout.shape
    if not shape or stop > layout.nbytes or layout.block[1:] != shape[1:] or not data.flags.c_contiguous:
        return None
    if box.shape[1:] != shape[1:]:
        return None
    first = start // layout.itemsize - box.start[0] * prod(shape[1:])
    last = first + (stop - start) // layout.itemsize
    return data.reshape(-1)[first:last] if first >= 0 and last <= data.size else None


def split(part: Part, handed: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, int, int | None]]:
    """A part as ranges that come from one place each: (start, stop, the rank that holds it, None for this one)."""
    at = part.start
    for i in range(bisect.bisect_right(handed, part.start, key=lambda one: one[1]), len(handed)):
        start, stop, rank = handed[i]
        if start >= part.stop:
            break
        if at < start:
            yield at, start, None
        yield max(start, part.start), min(stop, part.stop), rank
        at = min(stop, part.stop)
    if at < part.stop:
        yield at, part.stop, None


class Started:
    """The moment of the call, on every GPU: copies made later, by another thread, begin after it."""

    def __init__(self, events: dict[Any, Any]) -> None:
        self.events = events  # device → event on the stream that the caller used there

    @classmethod
    def now(cls) -> Started:
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
            return cls({})
        events = {}
        for number in range(torch.cuda.device_count()):
            device = torch.device("cuda", number)
            with torch.cuda.device(device):
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(device))
            events[device] = event
        return cls(events)


class StagingPool(BufferPool):
    """Buffers that a GPU copies to without a detour: each is page-locked once, when it is first used for that."""

    def __init__(self, budget_bytes: int, buffer_bytes: int) -> None:
        super().__init__(budget_bytes, buffer_bytes)
        self._pinned: dict[int, Buffer] = {}  # by address

    def set_budget(self, budget_bytes: int) -> None:
        """From now on at most so much memory, but always one buffer; what is there already stays."""
        self.capacity = max(1, budget_bytes // self._slot_bytes)

    def pin(self, buffer: Buffer) -> None:
        address = address_of(buffer.view)
        if address in self._pinned:
            return
        cudart = sys.modules["torch"].cuda.cudart()
        # 1: cudaHostRegisterPortable, for all devices. A refusal (locked-memory limit) costs speed only.
        if int(cudart.cudaHostRegister(address, len(buffer.view), 1)) == 0:
            self._pinned[address] = buffer

    def close(self) -> None:
        # Before the memory is unmapped. Buffers still out belong to a copy in flight and end with the process.
        for address in [address_of(buffer.view) for buffer in self._free]:
            if self._pinned.pop(address, None) is not None:
                sys.modules["torch"].cuda.cudart().cudaHostUnregister(address)
        super().close()


class Pools:
    """The staging memory of a run: one pool, kept from save to save, replaced only when a file needs larger buffers."""

    def __init__(self, io_bytes: int) -> None:
        self._io_bytes = io_bytes
        self._pool: StagingPool | None = None

    def fit(self, budget_bytes: int, largest_bytes: int) -> StagingPool:
        """A pool whose buffers hold `largest_bytes`, with room for two of them at least."""
        size = max(self._io_bytes, largest_bytes)
        budget_bytes = max(budget_bytes, 2 * slot_bytes(size))
        if self._pool is not None and self._pool.buffer_bytes < size:
            self.close()
        if self._pool is None:
            self._pool = StagingPool(budget_bytes, size)
        self._pool.set_budget(budget_bytes)
        return self._pool

    def idle(self, budget_bytes: int) -> StagingPool | None:
        """The pool for something that is not a save, warm after the first time; None while a save uses it."""
        if self._pool is None:
            return self.fit(budget_bytes, self._io_bytes)
        return None if self._pool.in_use else self._pool

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


_USUAL_BYTES, _USUAL_SHARE = 1 << 30, 8


def affordable_bytes(wanted_bytes: int | None) -> int:
    """A staging budget that this machine has room for: at most half of what is free, shared with the other ranks here.

    Who states no wish gets 1 GiB, or this rank's part of an eighth of the machine's memory if that is more: with it
    most snapshots wait for no disk. Memory is taken only as far as a state needs it.
    """
    memory = _memory_bytes()
    if memory is None:
        return _USUAL_BYTES if wanted_bytes is None else wanted_bytes
    total_bytes, free_bytes = memory
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    if wanted_bytes is None:
        wanted_bytes = max(_USUAL_BYTES, total_bytes // (_USUAL_SHARE * ranks))
    return min(wanted_bytes, free_bytes // (2 * ranks))


def _memory_bytes() -> tuple[int, int] | None:
    """What this machine has, and what of it is free."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            kib = {key: int(rest.split()[0]) for key, rest in (line.split(":") for line in file)}
        return kib["MemTotal"] << 10, kib["MemAvailable"] << 10
    except (OSError, LookupError, ValueError):
        return None


def storage_addresses(values: Iterable[Any]) -> set[int]:
    """Where the memory of these tensors begins, whatever views of it there are."""
    found = set()
    for value in values:
        local = getattr(value, "_local_tensor", value)
        if hasattr(local, "untyped_storage"):
            found.add(local.untyped_storage().data_ptr())
    return found - {0}


def copies_of_unowned(held: Iterable[Held], owned: set[int]) -> int:
    """Replace live data that lies outside the owned memory by copies; returns the bytes copied."""
    copied = 0
    for one in held:
        for i, (box, data) in enumerate(one.pieces):
            if isinstance(data, np.ndarray):
                one.pieces[i] = (box, data.copy())
            elif storage_addresses([data]) <= owned:
                continue
            else:
                one.pieces[i] = (box, data.clone())
            copied += data.nbytes
    return copied


@dataclass(frozen=True, slots=True)
class Wanted:
    """Logical bytes [start, stop) of an array that a rank holds, and where they belong."""

    rank: int
    array: int
    start: int
    stop: int
    into: memoryview


class Stager:
    """Copies jobs into buffers. One a save; `copy` is called by one thread, what it returns is awaited by any.

    `pull` fetches what other ranks hold of a job (see handover.py).
    """

    def __init__(
        self,
        plan: SavePlan,
        pieces: Sequence[Sequence[tuple[Box, Any]]],
        started: Started,
        pool: StagingPool,
        pull: Callable[[list[Wanted]], None] | None = None,
    ) -> None:
        self._pull = pull
        self._lock = threading.Lock()
        self._plan = plan
        self._pieces = pieces
        self._pool = pool
        self._started = started
        self._streams: dict[Any, Any] = {}  # device → a stream of our own

    def copy(self, job: Job, buffer: Buffer) -> list[Any]:
        """Fill the buffer; returns the CUDA events of copies that are still under way."""
        try:
            return self._copy(job, buffer)
        except BaseException:
            self._land()  # whoever gets the buffer next must not find these copies in it
            raise

    def _copy(self, job: Job, buffer: Buffer) -> list[Any]:
        devices: set[Any] = set()
        wanted: list[Wanted] = []
        for part in job.parts:
            into = buffer.view[part.at : part.at + part.stop - part.start]
            pulls = self._plan.pulls.get(part.array) if self._pull is not None else None
            for start, stop, rank in [(part.start, part.stop, None)] if pulls is None else split(part, pulls):
                view = into[start - part.start : stop - part.start]
                if rank is None:
                    devices |= self._fill(part.array, start, stop, view, buffer)
                else:
                    wanted.append(Wanted(rank, part.array, start, stop, view))
        if wanted and self._pull is not None:
            self._pull(wanted)
        return [self._record(device) for device in devices]

    def read(self, array: int, start: int, stop: int, into: memoryview) -> None:
        """The stored bytes [start, stop) of an array, from this rank's live tensors; by any thread."""
        try:
            devices = self._fill(array, start, stop, into, None)
        except BaseException:
            self._land()
            raise
        for device in devices:
            self._record(device).synchronize()

    def _fill(self, array: int, start: int, stop: int, into: memoryview, buffer: Buffer | None) -> set[Any]:
        """Returns the devices that copies were begun from."""
        layout, held = self._plan.arrays[array].layout, self._pieces[array]
        if not any(getattr(data, "is_cuda", False) for _, data in held):
            fill(layout, held, start, stop, into)
            return set()
        if buffer is not None:
            self._pool.pin(buffer)
        return self._fill_from_gpu(layout, held, start, stop, into)

    def wait_landed(self) -> None:
        """Every copy that was begun is complete."""
        self._land()
        self._pieces = ()

    def _land(self) -> None:
        with self._lock:
            streams = list(self._streams.values())
        for stream in streams:
            stream.synchronize()

    def _record(self, device: Any) -> Any:
        event = sys.modules["torch"].cuda.Event()
        event.record(self._streams[device])
        return event

    def _stream(self, device: Any) -> Any:
        with self._lock:
            stream = self._streams.get(device)
            if stream is None:
                stream = self._streams[device] = sys.modules["torch"].cuda.Stream(device)
                # What the caller's stream had queued (the update that made these values) comes first.
                if device in self._started.events:
                    stream.wait_event(self._started.events[device])
        return stream

    def _fill_from_gpu(
        self, layout: Layout, held: Sequence[tuple[Box, Any]], start: int, stop: int, into: memoryview
    ) -> set[Any]:
        devices = set()  # none where there is only padding
        torch = sys.modules["torch"]
        size = layout.itemsize
        carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[size]
        for to, data, where in _copies(layout, held, start, stop, torch.frombuffer(into, dtype=carrier)):
            stream = self._stream(data.device)
            with torch.cuda.stream(stream):
                source = data.resolve_conj().resolve_neg()[where]
                to.copy_(source.view(carrier), non_blocking=True)
            # The allocator must not hand this memory out again before the copy is done.
            data.record_stream(stream)
            devices.add(data.device)
        return devices
