"""Carries jobs from memory to the store: copy, hash, write, in a pipeline that is bounded by its buffers.

One thread copies (the caller's, when it must wait for the copies anyway), a few write. Every error of every thread
reaches the caller of `finish`; after the first one the others stop early.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from ckptfs import zarr3
from ckptfs.errors import CkptError, StorageError
from ckptfs.manifest import digest
from ckptfs.pace import Pace, let_others_in, spare_cores, step_back
from ckptfs.ranges import cut
from ckptfs.report import Written
from ckptfs.storage.directio import DirectWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from ckptfs.saveplan import Array, SavePlan
    from ckptfs.settings import Settings
    from ckptfs.stage import Job, Part, Stager, StagingPool
    from ckptfs.storage import LocalStore, Store


_SHORT_BYTES = 1 << 20  # what is written faster than others wake up
_TELLING_BYTES = 16 << 20  # the rate of fewer says more about the moment than about the target


class Files:
    """The open files of a positional save: opened and reserved ahead of the writes, closed when their last piece is in.

    Making a file costs as much as writing a megabyte. As soon as every writer has something to write, a thread makes
    those that come later: earlier, it would take the processor from the first copies, and the disk would wait. A disk
    that has become full meanwhile ends the writing.
    """

    def __init__(
        self, store: LocalStore, plan: SavePlan, jobs: Sequence[Job], small_bytes: int, *, background: bool = False
    ) -> None:
        self._store = store
        self._background = background
        self._plan = plan
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._writers: dict[int, DirectWriter] = {}
        self._left: dict[int, int] = defaultdict(int)
        for job in jobs:
            for part in job.parts:
                self._left[part.array] += 1
        self._small_bytes = small_bytes
        self._stopped = False
        self._reserving: threading.Thread | None = None
        self._error: BaseException | None = None

    def path(self, number: int) -> str:
        array = self._plan.arrays[number]
        return f"{zarr3.path_of_name(array.name)}/{array.layout.key()}"

    def reserve(self, then: Callable[[], None] = lambda: None) -> None:
        """Look whether everything this rank will write fits; `go` then has space set aside for it, and goes on with
        `then`, in a thread.
        """
        needed = sum(b - a for ranges in self._plan.pieces.values() for a, b in ranges)
        free = self._store.free_bytes()
        if needed > free:
            raise StorageError(f"no space: {needed} bytes to write to {self._store.url}, {free} are free")

        def work() -> None:
            try:
                if self._background:
                    step_back()
                self._reserve()
                then()
            except BaseException as error:
                self._error = error

        self._reserving = threading.Thread(target=work, name="ckptfs-reserve", daemon=True)

    def go(self) -> None:
        """Begin with what `reserve` was to do."""
        if self._reserving is not None and self._reserving.ident is None:
            self._reserving.start()

    def _reserve(self) -> None:
        for number in self._plan.pieces:
            if not self._is_reserved(number):
                continue
            with self._lock:
                if self._stopped:
                    return
                if not self._left[number]:
                    continue  # the writers were faster
                self._left[number] += 1  # so that they do not close it meanwhile
            try:
                self._get(number)
            finally:
                self._drop(number)
            if self._background:
                let_others_in()

    def _is_reserved(self, number: int) -> bool:
        total = sum(b - a for a, b in self._plan.pieces[number])
        return total > self._small_bytes and not self._plan.arrays[number].layout.many

    def raise_error(self) -> None:
        """Raise what went wrong in the thread of `reserve`, if anything did."""
        if self._error is not None:
            raise self._error

    def _get(self, number: int) -> DirectWriter:
        with self._lock:
            writer = self._writers.get(number)
        if writer is not None:
            return writer
        with self._opening:  # while a file is made, the writers of others are not held up
            with self._lock:
                writer = self._writers.get(number)
            if writer is None:
                self._store.make_dirs(zarr3.path_of_name(self._plan.arrays[number].name))
                writer = self._open(number)
                with self._lock:
                    self._writers[number] = writer
            return writer

    def _open(self, number: int) -> DirectWriter:
        writer = self._store.open_writer(self.path(number))
        try:
            for start, stop in self._plan.pieces[number] if self._is_reserved(number) else []:
                writer.reserve(start, stop)
        except BaseException:
            writer.close()
            raise
        return writer

    def write(self, part: Part, view: memoryview) -> None:
        array = self._plan.arrays[part.array]
        layout = array.layout
        end = part.stop == layout.logical_bytes
        if part.start == 0 and end and part.stop <= self._small_bytes:
            # A small array goes out in one call, its index with it.
            self._store.make_dirs(zarr3.path_of_name(array.name))
            data = bytes(view) + _index(array, 0) if layout.sharded else view
            self._store.write_unsynced(self.path(part.array), data)
        else:
            writer = self._get(part.array)
            writer.write(part.start, view)
            if end and layout.sharded:
                writer.write(part.stop, _index(array, 0))
        self._drop(part.array)

    def _drop(self, number: int) -> None:
        """One piece of the array less to come; after the last the file is closed."""
        with self._lock:
            self._left[number] -= 1
            writer = self._writers.pop(number, None) if not self._left[number] else None
        if writer is not None:
            writer.close()

    def close(self) -> None:
        """Close everything, whatever happened."""
        with self._lock:
            self._stopped = True
        if self._reserving is not None and self._reserving.ident is not None:
            self._reserving.join()
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()


def _bytes_of(part: Part, buffer: Any) -> memoryview:
    view: memoryview = buffer.view[part.at : part.at + part.stop - part.start]
    return view


def _index(array: Array, file: int, stored: list[int] | None = None) -> bytes:
    return zarr3.shard_index(array.layout.index_entries(file, stored))


class _Clock:
    """Bytes, and how long at least one thread was at them: the rate does not depend on how many there are."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = self._threads = 0
        self._since = self._spent_s = 0.0

    @contextlib.contextmanager
    def counting(self, nbytes: int) -> Iterator[None]:
        with self._lock:
            if not self._threads:
                self._since = time.perf_counter()
            self._threads += 1
        try:
            yield
        finally:
            with self._lock:
                self._threads -= 1
                self._bytes += nbytes
                if not self._threads:
                    self._spent_s += time.perf_counter() - self._since

    def rate(self) -> float:
        """Bytes per second; 0 if there were too few to tell anything."""
        with self._lock:
            return self._bytes / self._spent_s if self._bytes >= _TELLING_BYTES and self._spent_s else 0.0


class Pipeline:
    """One rank's writes. `feed` every job, then `finish`."""

    def __init__(
        self,
        store: Store,
        plan: SavePlan,
        jobs: Sequence[Job],
        stager: Stager,
        pool: StagingPool,
        settings: Settings,
        *,
        progress: Callable[[int], None] = lambda done: None,
        check: Callable[[], None] = lambda: None,
        copy_first: bool = False,  # write when all is copied or no buffer is left: who copies is in a hurry
        background: bool = False,  # something else goes on meanwhile: leave it the processor
        pace: Pace | None = None,
    ) -> None:
        self._background = background
        self._pace = pace or Pace()
        self._store, self._plan, self._stager, self._pool = store, plan, stager, pool
        self._progress, self._check = progress, check
        self.written: list[Written] = []
        self.raw_bytes = self.stored_bytes = 0
        self.codec_s = 0.0
        self._copied = _Clock()
        self._stored = _Clock()
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[Job, Any, list[Any], dict[int, list[bytes]]] | None] = queue.SimpleQueue()
        self.files: Files | None = None
        if store.positional:
            small_bytes = settings.small_file_bytes
            self.files = Files(store, plan, jobs, small_bytes, background=background)  # type: ignore[arg-type]
        # Taken for each copy or checksum in the background: no more of them at once than there are cores for it. With
        # more, one that holds the interpreter loses its core to one that does not, and the loop waits for both: 2 to
        # 5 ms each time.
        self._turns: AbstractContextManager[object] = (
            threading.BoundedSemaphore(max(1, spare_cores())) if background else contextlib.nullcontext()
        )
        # Who copies first has a caller that waits, and who fetches from others may wait long.
        self._copy_turns = contextlib.nullcontext() if copy_first or plan.pulls else self._turns
        # A disk may tell of all requests at once that they are done. Then each writer has the next one to write at
        # once, not a checksum to take: who copies has taken it, if nobody waits for the copies.
        self._checks_early = not background and not copy_first
        self._handed = 0
        self._go = threading.Event()
        if not copy_first:
            self._go.set()
        # No more threads than there are jobs: a tiny save starts one.
        self._threads = [
            threading.Thread(target=self._run, name=f"ckptfs-write-{i}", daemon=True)
            for i in range(max(1, min(settings.write_threads, len(jobs))))
        ]
        for thread in self._threads:
            thread.start()

    def feed(self, job: Job) -> None:
        """Copy a job's bytes (here, now) and hand them to the writers; waits while all buffers are in use."""
        self.raise_if_broken()
        buffer = self._acquire()
        try:
            with self._copy_turns, self._copied.counting(job.nbytes):
                events = self._stager.copy(job, buffer)
            hashes = self._early_hashes(job, buffer) if self._checks_early and not events else {}
        except BaseException:
            self._pool.release(buffer)
            raise
        self._queue.put((job, buffer, events, hashes))
        self._handed += 1
        if self._handed == len(self._threads) and self._go.is_set():
            self.go()

    def feed_copied(self, job: Job, buffer: Any, events: list[Any]) -> None:
        """Hand over a buffer that holds the job's bytes already; it is released when they are written."""
        self._queue.put((job, buffer, events, {}))

    def _acquire(self) -> Any:
        with contextlib.suppress(StorageError):
            return self._pool.acquire(0.0)
        self.go()
        with self._pace.hurry():  # buffers become free by being written
            while True:
                try:
                    return self._pool.acquire(1.0)
                except StorageError:
                    self.raise_if_broken()  # else: just a slow store

    def go(self) -> None:
        """Write, if that has not begun yet; make the files that are not needed yet."""
        if self.files is not None:
            self.files.go()
        self._go.set()

    def raise_if_broken(self) -> None:
        """Raise what this save has failed with, here or on another rank, if it has."""
        if self._error is not None:
            raise self._error
        if self.files is not None:
            self.files.raise_error()
        self._check()

    def cancel(self, error: BaseException) -> None:
        """End the threads, leaving what is not written yet."""
        self._error = self._error or error
        with contextlib.suppress(CkptError), self._pace.hurry():
            self.stop()

    def finish(self) -> None:
        """Wait for all writes; raises the first error."""
        self.go()
        self.stop()
        if self._error is not None:
            raise self._error
        if self.files is not None:
            self.files.raise_error()

    def stop(self) -> None:
        """End the threads, whatever happened."""
        self._go.set()
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []
        if self.files is not None:
            self.files.close()

    def _run(self) -> None:
        if self._background:
            step_back()
        self._go.wait()
        while True:
            item = self._queue.get()
            if item is None:
                return
            job, buffer, events, hashes = item
            try:
                for event in events:  # also after an error: a copy must not land in a buffer that others use
                    event.synchronize()
                if self._error is None:
                    self.raise_if_broken()
                    self._pace.turn(job.nbytes, self.raise_if_broken)
                    for number, part in enumerate(job.parts):
                        self._write(part, _bytes_of(part, buffer), hashes.get(number))
                        if self._background and part.stop - part.start < _SHORT_BYTES:
                            let_others_in()
            except BaseException as error:
                self._error = self._error or error
            finally:
                self._pool.release(buffer)

    def _early_hashes(self, job: Job, buffer: Any) -> dict[int, list[bytes]]:
        """The checksums of those parts of a job (by number) that are written as they are."""
        arrays = self._plan.arrays
        return {
            number: self._hashes(part, _bytes_of(part, buffer))
            for number, part in enumerate(job.parts)
            if not arrays[part.array].layout.many
        }

    def _hashes(self, part: Part, view: memoryview) -> list[bytes]:
        """The checksums of all extents of a part."""
        size = self._plan.arrays[part.array].layout.extent_bytes(self._plan.extent_bytes)
        with self._turns:
            return [digest(view[a - part.start : b - part.start]) for a, b in cut(part.start, part.stop, size)]

    def _write(self, part: Part, view: memoryview, hashes: list[bytes] | None = None) -> None:
        array = self._plan.arrays[part.array]
        lengths = None
        if array.layout.many:
            lengths, hashes, stored = self._write_block(array, part, view)
        else:
            hashes = hashes or self._hashes(part, view)
            assert self.files is not None  # files that several ranks share are planned for positional stores only
            with self._stored.counting(len(view)):
                self.files.write(part, view)
            stored = len(view)
        with self._lock:
            self.written.append(Written(part.array, part.start, part.stop, lengths, b"".join(hashes)))
            self.raw_bytes += len(view)
            self.stored_bytes += stored
        self._progress(self.raw_bytes)

    def rates(self) -> dict[str, float]:
        """Bytes per second out of this host's memory and into the store, if they tell anything."""
        found = {"memory": self._copied.rate(), "store": self._stored.rate()}
        return {target: rate for target, rate in found.items() if rate}

    def _write_block(self, array: Array, part: Part, view: memoryview) -> tuple[list[int] | None, list[bytes], int]:
        """A block as a file of its own: its chunks (compressed or not), then their index."""
        layout = array.layout
        block = part.start // layout.block_bytes
        lengths = None
        body: bytes | memoryview = view
        if array.codec is not None:
            size = layout.chunk_bytes
            with self._turns:
                begin = time.perf_counter()
                chunks = [array.codec.encode(view[a : a + size]) for a in range(0, len(view), size)]
            self.codec_s += time.perf_counter() - begin
            lengths = [len(chunk) for chunk in chunks]
            hashes = [digest(chunk) for chunk in chunks]
            body = b"".join(chunks)
        else:
            size = layout.extent_bytes(self._plan.extent_bytes)
            with self._turns:
                hashes = [digest(view[a:b]) for a, b in cut(0, len(view), size)]
        if layout.sharded:
            body = bytes(body) + _index(array, block, lengths)
        path = f"{zarr3.path_of_name(array.name)}/{layout.key(block)}"
        with self._stored.counting(len(body)):
            if self._store.positional:
                self._store.make_dirs(zarr3.path_of_name(array.name))  # type: ignore[attr-defined]
                self._store.write_unsynced(path, body)  # type: ignore[attr-defined]
            else:
                self._store.write(path, body)
        return lengths, hashes, len(body)
