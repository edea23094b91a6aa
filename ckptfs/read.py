"""The one way to read: boxes of arrays into memory, checked.

Requests run on a few threads. A request whose bytes are contiguous in the destination lands there directly; others
pass through a reusable buffer and are scattered. Every extent that is read whole is compared with its checksum.

Slices of raw local files go shorter ways, because planning would cost more than reading: what is in the page cache is
copied out of a mapping; one contiguous run is read in parts without a plan; scattered runs are brought into the page
cache as the ranges that `loadplan.comb` says, and copied from there.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from math import gcd, prod
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ckptfs.box import Box, run_shape, strides_of
from ckptfs.errors import CkptError, CorruptError, MismatchError, NotFoundError, StaleError
from ckptfs.loadplan import PAGE_BYTES, Comb, Request, comb, requests, starts_of
from ckptfs.manifest import HASH_BYTES, NAME, digest
from ckptfs.ranges import cut
from ckptfs.storage.directio import DIRECT_MIN_BYTES, Buffer, BufferPool, Checks, copy_checked, is_cached
from ckptfs.storage.fileops import REAL_OPS
from ckptfs.storage.local import LocalStore
from ckptfs.storage.pagecache import OpenFile, OpenFiles, Window

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Future

    from ckptfs.grid import Layout
    from ckptfs.manifest import Param
    from ckptfs.settings import Settings
    from ckptfs.storage import Store

    Rest = Callable[[], None]


class Job(NamedTuple):
    """What fills a part of a destination."""

    nbytes: int  # of the destination
    do: Callable[[], Rest | None]  # returns what is left to check
    held: bool = False  # in memory already: nothing to wait for


_THREADS_FROM_BYTES = 1 << 20  # less is read before threads have started
_PART_BYTES = 2 << 20  # of one run: the fastest request through huge pages
_BAND_BYTES = 4 << 20  # of scattered runs that are brought together
_STREAMS = 2  # places of one file where bands are brought at the same time
_SCRATCH_BYTES = 1 << 20  # a shorter range is read into a buffer: readahead would bring far more
_ALONE_BYTES = 64 << 10  # a range of this length is worth a job of its own
# A virtual disk tells what is done when nothing is left to do, of all requests at once. So that it gets new ones at
# that moment, and not when what came is copied and checked, a bulk read has more threads at work than requests in
# flight: the next ones wait with their buffers. Short requests need more in flight. (Multiples of read_threads.)
_IN_FLIGHT, _SHORT_IN_FLIGHT, _AT_WORK = 2, 3, 4
_FEW = 8  # pieces of one array that are looked at one by one
_CARRIERS = {size: np.dtype(name) for size, name in {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}.items()}
_CORES = os.cpu_count() or 1
_END = Job(0, lambda: None)
_SMALL_TOGETHER = 64  # requests below the size that goes past the page cache, in one job
_RUNS = 256  # shorter runs that one job reads


@dataclass(frozen=True)
class Target:
    """A box of an array and the memory it goes to: a carrier-typed array of the box's shape, any strides."""

    box: Box
    out: np.ndarray[Any, Any]


Whole = tuple[int, int, int]  # an extent that was read whole: its number, and [low, high) of what was read


class Run(NamedTuple):
    """A box that is one run of a raw array, as requests: the same for all arrays that are laid out alike."""

    shape: tuple[int, ...]  # of what is selected
    key: str  # of the file, in an array's folder
    start: int  # logical
    offset: int  # in the file
    parts: tuple[tuple[int, int, tuple[Whole, ...]], ...]  # [low, high) of the run, and the extents that lie in it
    check: bool


class Piece(NamedTuple):
    """A run of an array, and contiguous memory for it."""

    param: Param
    run: Run
    out: np.ndarray[Any, Any]


class _Turns:
    """So many at once. Threads wait for a turn in C: with `threading.Semaphore` each would run Python to wait and to
    wake another, as long as it takes to check a megabyte.
    """

    def __init__(self, count: int) -> None:
        self._free: SimpleQueue[None] = SimpleQueue()
        for _ in range(count):
            self._free.put(None)

    def __enter__(self) -> None:
        self._free.get()

    def __exit__(self, *exc: object) -> None:
        self._free.put(None)


class _Behind:
    """What one thread at a time does behind the others: they ask the disk for more meanwhile."""

    def __init__(self) -> None:
        self._left: SimpleQueue[Rest] = SimpleQueue()
        self._busy = threading.Lock()

    def add(self, rest: Rest | None) -> None:
        """Returns when it is done, or when another thread is at it, which then does this too."""
        if rest is None:
            return
        self._left.put(rest)
        while not self._left.empty() and self._busy.acquire(blocking=False):
            try:
                with suppress(Empty):
                    while True:
                        self._left.get_nowait()()
            finally:
                self._busy.release()


class Reader:
    """Reads arrays of one step. Thread-safe."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self.store, self.settings = store, settings
        self._mappable = isinstance(store, LocalStore) and store.ops is REAL_OPS
        self.bytes_read = 0  # from the store; for tests and reports
        self.extents_read = 0
        self._start()

    def _start(self) -> None:
        self._process = os.getpid()
        self._pool_lock = threading.Lock()
        self._count_lock = threading.Lock()
        self._pool: BufferPool | None = None
        self._lent = False  # the pool is somebody else's to close
        self._files: OpenFiles | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._begun: dict[tuple[str, int, int], tuple[Future[None], Buffer]] = {}
        long, short = (_Turns(n * self.settings.read_threads) for n in (_IN_FLIGHT, _SHORT_IN_FLIGHT))
        self._turns = lambda nbytes: short if nbytes <= _PART_BYTES else long

    def _scratch(self) -> BufferPool:
        with self._pool_lock:
            if self._pool is None:
                self._pool = BufferPool(self.settings.read_buffer_bytes, self.settings.io_bytes)
            return self._pool

    def borrow(self, pool: BufferPool) -> None:
        """Use these buffers until `close`, if there are none yet: memory that was used before is faster."""
        with self._pool_lock:
            if self._pool is None and pool.buffer_bytes >= self.settings.io_bytes:
                self._pool, self._lent = pool, True

    def _opened(self) -> OpenFiles:
        files = self._files
        if files is None:
            pool = self._scratch()
            with self._pool_lock:
                files = self._files = self._files or OpenFiles(self.store, pool, self._turns)
        return files

    def _help(self, do: Callable[..., None], *how: Any) -> Future[None]:
        """Have a thread do it that stays: starting one anew takes as long as a megabyte."""
        with self._pool_lock:  # until it is handed over: the threads may be closed meanwhile
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_AT_WORK * self.settings.read_threads - 1, "ckptfs-read")
            return self._threads.submit(do, *how)

    def count(self, nbytes: int, extents: int = 0) -> None:
        """Add to what has been read."""
        if self._process != os.getpid():
            self._start()
        with self._count_lock:
            self.bytes_read += nbytes
            self.extents_read += extents

    def close(self) -> None:
        with self._pool_lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False)
        if self._files is not None:
            self._files.close()
            self._files = None
        if self._pool is not None:
            if not self._lent:
                self._pool.close()
            self._pool, self._lent = None, False

    # --- reading ---------------------------------------------------------------------------------------

    def read(
        self,
        wanted: Iterable[tuple[Param, Sequence[Target]]],
        *,
        verify: str = "full",
        progress: Callable[[int], None] = lambda done: None,
    ) -> None:
        """Fill all targets. verify: "full" (every byte used), "extents" (those that are read whole), "none"."""
        check_verify(verify)
        if self._process != os.getpid():  # after a fork: another thread of the parent may have held a lock
            self._start()
        wanted = list(wanted)
        if verify == "full":
            jobs = self._together(wanted)
        else:
            jobs = (job for param, targets in wanted for job in self._slices(param, targets, verify))
        nbytes = sum(target.out.nbytes for _, targets in wanted for target in targets)
        threads = self.settings.read_threads
        if verify == "full" and self.store.positional:
            threads = max(threads, min(_AT_WORK * threads, nbytes // self.settings.io_bytes))
        self.run(jobs, nbytes, progress, threads)

    def read_slices(
        self, wanted: Iterable[Job | Piece | tuple[Param, list[Target]]], nbytes: int, *, verify: str
    ) -> None:
        """Many slices, planned while they are read. An error leaves those filled that were read before it.

        Their requests are short, and between them a thread plans, copies and checks: more threads keep the disk busy.
        """
        self.run(self._many(wanted, verify), nbytes, threads=_AT_WORK * self.settings.read_threads)

    def _many(self, wanted: Iterable[Job | Piece | tuple[Param, list[Target]]], verify: str) -> Iterator[Job]:
        """Many slices (or jobs) as jobs, while they are planned; small cold ones are asked for now and done last.

        Each of those would wait for the disk as long as for a megabyte.
        """
        small: list[Job] = []
        for one in wanted:
            if isinstance(one, Job):
                yield one
            elif isinstance(one, Piece):
                jobs, asked = self._of_run(*one)
                if asked:
                    small += jobs
                else:
                    yield from jobs
            else:
                yield from self._slices(*one, verify)
        yield from small

    def _of_run(self, param: Param, run: Run, out: np.ndarray[Any, Any]) -> tuple[list[Job], bool]:
        """A run as jobs; and whether it is short, and the disk begins to bring it into the page cache now."""
        path, nbytes = f"{param.path}/{run.key}", out.nbytes
        asked = self._mappable and nbytes < DIRECT_MIN_BYTES
        if self._mappable:
            file = self._take_path(param, path)
            try:
                if asked:
                    os.posix_fadvise(file.fd, run.offset, nbytes, os.POSIX_FADV_WILLNEED)
                elif file.holds(run.offset, nbytes):
                    return self._parts(param, run.start, run.start + nbytes, out, run.check, held=True), False
            finally:
                self._opened().give(file)
        view = out.reshape(-1).view(np.uint8).data
        return [
            Job(high - low, partial(self._fetch_part, param, path, run.offset + low, view[low:high], extents))
            for low, high, extents in run.parts
        ], asked

    def _fetch_part(
        self, param: Param, path: str, offset: int, view: memoryview, extents: Sequence[Whole]
    ) -> Rest | None:
        rest = self._fetch_bytes(param, path, offset, view, extents)
        self.count(len(view), len(extents))
        return rest

    def begin(self, wanted: Iterable[tuple[Param, Sequence[Box]]]) -> None:
        """Have the disk bring the first requests of a bulk read that is being planned; `end` when it is over.

        They go to buffers: what they are for is not touched before everything is known to fit.
        """
        if self._process != os.getpid():
            self._start()
        pool = self._scratch()
        left = _IN_FLIGHT * self.settings.read_threads if self._mappable else 0
        for param, boxes in wanted:
            for one in requests(param, boxes, whole=True, io_bytes=self.settings.io_bytes):
                if left <= 0 or pool.in_use >= pool.capacity // 2:  # the rest is for the read itself
                    return
                key = (param.file(one.file), one.offset, one.length)
                if (
                    one.length < DIRECT_MIN_BYTES
                    or one.length > pool.buffer_bytes
                    or key in self._begun
                    or self._cached(param, one)
                ):
                    continue
                left -= 1
                buffer = pool.acquire()
                view = buffer.at(one.offset, one.length)
                mine = self._help(self._opened().read_into, *key[:2], view), buffer
                if self._begun.setdefault(key, mine) is not mine:  # another thread's load was quicker
                    self._let_go(*mine)

    def _cached(self, param: Param, request: Request) -> bool:
        file = self._take(param, request.file)
        try:
            return is_cached(file.fd, request.offset, request.length)
        finally:
            self._opened().give(file)

    def end(self) -> None:
        """Let go of what was begun and not asked for."""
        for key in list(self._begun):
            begun = self._begun.pop(key, None)
            if begun is not None:
                self._let_go(*begun)

    def _let_go(self, reading: Future[None], buffer: Buffer) -> None:
        reading.cancel()
        wait_for([reading])
        self._scratch().release(buffer)

    def run(
        self,
        jobs: Iterator[Job],
        nbytes: int,
        progress: Callable[[int], None] = lambda done: None,
        threads: int | None = None,
    ) -> None:
        """All jobs, on this thread and some helpers: the first are done while the later ones are planned.

        What is held is copied by as many threads as there are cores: more would only take turns. The first job that
        waits for a disk brings the others. The first error ends it, when nobody writes any more.
        """
        if self._process != os.getpid():
            self._start()
        done, over = 0, False
        planning, counting = threading.Lock(), threading.Lock()
        helpers: list[Future[None]] = []
        behind = _Behind()
        most = min(threads or self.settings.read_threads, -(-nbytes // _PART_BYTES)) - 1

        def hire(wanted: int) -> None:
            """So many helpers; once there are helpers only while planning, which ends when it is over."""
            while nbytes >= _THREADS_FROM_BYTES and len(helpers) < wanted and not over:
                helpers.append(self._help(work, lambda _: None))

        def work(tell: Callable[[int], None]) -> None:
            nonlocal done, over
            try:
                while not over:
                    with planning:
                        job = next(jobs, _END)
                        if job is _END:
                            return
                        hire(0 if job.held or not called else most)
                    behind.add(job.do())
                    with counting:
                        done += job.nbytes
                    tell(done)
            except BaseException:
                over = True
                raise

        first, called = next(jobs, _END), False
        jobs = chain([first], jobs)
        try:
            hire(min(most, _CORES - 1) if first.held else most)  # not while planning: they begin at once
            called = True
            work(progress)
        finally:
            with planning:  # a helper that was about to hire has done so, or sees that it is over
                pass
            for helper in helpers:
                helper.cancel()  # those that wait behind the helpers of another read
            wait_for(helpers)
        for helper in helpers:
            if not helper.cancelled():
                helper.result()
        if helpers:
            progress(done)

    def _together(self, wanted: Iterable[tuple[Param, Sequence[Target]]]) -> Iterator[Job]:
        """Everything for these targets; of local files, many small ones in a job.

        Each alone would wait for the disk behind the large ones of the other threads.
        """
        small: list[tuple[Param, Sequence[Target], Request]] = []
        for param, targets in sorted(wanted, key=_size, reverse=True):
            for one in requests(param, (t.box for t in targets), whole=True, io_bytes=self.settings.io_bytes):
                if one.length >= DIRECT_MIN_BYTES or not self._mappable:
                    yield Job(one.length, partial(self._serve, param, targets, one, check=True))
                    continue
                small.append((param, targets, one))
                if len(small) == _SMALL_TOGETHER:
                    yield Job(sum(one.length for *_, one in small), partial(self._serve_small, small))
                    small = []
        if small:
            yield Job(sum(one.length for *_, one in small), partial(self._serve_small, small))

    def _serve_small(self, small: Sequence[tuple[Param, Sequence[Target], Request]]) -> None:
        for param, _, request in small:  # the disk gets all requests before the first is waited for
            file = self._take(param, request.file)
            try:
                os.posix_fadvise(file.fd, request.offset, request.length, os.POSIX_FADV_WILLNEED)
            finally:
                self._opened().give(file)
        for param, targets, request in small:
            self._serve(param, targets, request, check=True)

    def _planned(self, param: Param, targets: Sequence[Target], verify: str) -> list[Job]:
        """Everything for these targets, each stored byte once."""
        whole = verify == "full" or (verify == "extents" and any(_is_whole(param, t) for t in targets))
        found = requests(param, (t.box for t in targets), whole=whole, io_bytes=self.settings.io_bytes)
        return [Job(one.length, partial(self._serve, param, targets, one, verify != "none")) for one in found]

    # --- slices ----------------------------------------------------------------------------------------

    def window(self, param: Param) -> Window | None:
        """All of an array, if it is in the page cache."""
        layout = param.layout
        if not self._mappable or param.codec is not None or layout.files != 1 or layout.blocks != 1:
            return None
        if self._process != os.getpid():
            self._start()
        file = self._take(param, 0)
        try:
            if layout.logical_bytes > file.size or not file.whole():
                return None
            data = _window(layout, file.bytes(), 0, layout.shape)
            return Window(file, data.view(param.dtype.numpy) if param.dtype.native else data, self.count)
        finally:
            self._opened().give(file)

    def check_window(self, param: Param, start: int, part: np.ndarray[Any, Any]) -> None:
        """Check the extents that lie whole in a run of a window, which begins at this byte of the array."""
        request = _request(param, start, start + part.nbytes, check=True)
        check_extents(param, request, part.reshape(-1).view(np.uint8).data, self.store.url)

    def copy_window(self, param: Param, start: int, part: np.ndarray[Any, Any], out: np.ndarray[Any, Any]) -> None:
        """Copy a run of a window to contiguous memory, and check the extents that lie whole in it."""
        request = _request(param, start, start + part.nbytes, check=True)
        self._copy(param, request, part.reshape(-1).view(np.uint8), out.reshape(-1).view(np.uint8))

    def _copy(self, param: Param, request: Request, source: np.ndarray[Any, Any], out: np.ndarray[Any, Any]) -> None:
        """Copy the bytes of a request, and check each extent while the processor's cache has it."""
        done = 0
        for number in range(request.first, request.last):
            low = int(param.extents.offset[number]) - request.offset
            high = low + int(param.extents.length[number])
            np.copyto(out[done:high], source[done:high])
            check_extent(param, number, out.data[low:high], self.store.url)
            done = high
        np.copyto(out[done:], source[done:])

    def _slices(self, param: Param, targets: Sequence[Target], verify: str) -> list[Job]:
        """Parts of an array: what is in the page cache is copied here and now, the rest is left to do."""
        targets = [target for target in targets if target.out.size]
        if param.codec is not None or len(targets) > _FEW:  # many pieces, often neighbours: a plan joins them
            return self._planned(param, targets, verify) if targets else []
        check, jobs = verify == "extents", []
        for target in targets:
            short = self._short(param, target, check)
            jobs += self._planned(param, [target], verify) if short is None else short
        return jobs

    def _short(self, param: Param, target: Target, check: bool) -> list[Job] | None:
        """One box of a raw array without a plan; None: make one."""
        layout = param.layout
        if check and _is_whole(param, target) and (layout.blocks > 1 or layout.nbytes != layout.logical_bytes):
            return None  # the padding belongs to extents that are to be checked too
        if not self._mappable:
            run = contiguous(layout, target.box) if target.out.flags.c_contiguous else None
            return None if run is None else self._parts(param, *run, target.out, check)
        jobs: list[Job] = []
        for block, inner, out in _in_blocks(layout, target):
            jobs += self._of_block(param, block, inner, out, check)
        return jobs

    def _of_block(self, param: Param, block: int, inner: Box, out: np.ndarray[Any, Any], check: bool) -> list[Job]:
        """A box of one block of a local file."""
        layout = param.layout
        low, high = _ends(layout, inner)
        if high - low == out.nbytes and out.flags.c_contiguous:
            start = block * layout.block_bytes + low
            return self._parts(param, start, start + out.nbytes, out, check, held=self._holds(param, block, low, high))
        run_bytes = run_shape(inner, layout.block)[1] * layout.itemsize
        if check and run_bytes >= param.longest_extent:  # whole extents, to be checked
            origin = layout.block_origin(block)
            return self._planned(param, [Target(inner.within([-at for at in origin]), out)], "extents")
        if self._holds(param, block, low, high):
            parts = min(_CORES, out.nbytes // _PART_BYTES)
            bands = _cut(inner, out, parts) if parts > 1 else [(inner, out)]
            jobs = [Job(into.nbytes, partial(self._copy_box, param, block, band, into), True) for band, into in bands]
        else:
            jobs = self._cold(param, block, inner, out)
        if check and run_bytes >= param.shortest_extent:
            return _and_then(jobs, partial(self._check_runs, param, block, inner, out))
        return jobs

    def _check_runs(self, param: Param, block: int, inner: Box, out: np.ndarray[Any, Any]) -> None:
        """Check the extents that lie whole in a run of a box: a save may cut a few short."""
        layout, table = param.layout, param.extents
        dims, elements = run_shape(inner, layout.block)
        run_bytes = elements * layout.itemsize
        starts = np.array(starts_of(layout, inner, dims)) + block * layout.block_bytes
        for number in np.flatnonzero(table.length <= run_bytes).tolist():
            run = int(starts.searchsorted(table.start[number], "right")) - 1
            low = int(table.start[number]) - int(starts[run])
            if run >= 0 and low + int(table.length[number]) <= run_bytes:
                data = np.ascontiguousarray(out[np.unravel_index(run, inner.shape[:dims])]).reshape(-1).view(np.uint8)
                check_extent(param, number, data.data[low : low + int(table.length[number])], self.store.url)

    def _cold(
        self, param: Param, block: int, inner: Box, out: np.ndarray[Any, Any], *, passing: bool = True
    ) -> list[Job]:
        """Several runs that are not in the page cache. passing: which may get all that lies between dense ones."""
        found = comb(param.layout, inner, _allowance(param, inner) if passing else 0, passing=passing)
        if found.dims == 0:
            return self._bands(param, block, inner, out, found)
        if found.length >= _ALONE_BYTES or found.length > found.run_bytes:
            jobs: list[Job] = []
            for index in np.ndindex(*inner.shape[: found.dims]):
                at = tuple(a + i for a, i in zip(inner.start, index, strict=False))
                one = Box((*at, *inner.start[found.dims :]), (*(i + 1 for i in at), *inner.stop[found.dims :]))
                into = out[tuple(slice(i, i + 1) for i in index)]
                jobs += self._of_block(param, block, one, into, check=False)
            return jobs
        return self._runs(param, block, inner, out, found)

    def _parts(
        self, param: Param, start: int, stop: int, out: np.ndarray[Any, Any], check: bool, *, held: bool = False
    ) -> list[Job]:
        """One run, in parts that several threads may read, or copy where it is held in the page cache."""
        flat = out.reshape(-1).view(np.uint8)
        part_bytes = max(_PART_BYTES, (stop - start) // _CORES) if held else _PART_BYTES
        jobs: list[Job] = []
        for low, high in _cut_run(param, start, stop, part_bytes, check):
            request = _request(param, low, high, check)
            part = flat[low - start : high - start]
            one = self._copy_run if held else self._fetch_run
            jobs.append(Job(high - low, partial(one, param, request, part), held))
        return jobs

    def _holds(self, param: Param, block: int, low: int, high: int) -> bool:
        """Whether the page cache has these bytes of a block."""
        number, base = _place(param.layout, block)
        file = self._take(param, number)
        try:
            return file.holds(base + low, high - low)
        finally:
            self._opened().give(file)

    def _fetch_run(self, param: Param, request: Request, out: np.ndarray[Any, Any]) -> Rest | None:
        return self._fetch(param, request, out.data, request.last > request.first)

    def _copy_run(self, param: Param, request: Request, out: np.ndarray[Any, Any]) -> Rest | None:
        """Copy one run out of the page cache and check its extents, each while the processor's cache has it."""
        file = self._take(param, request.file)
        try:
            held = file.holds(request.offset, request.length)
            if held:
                self._copy(param, request, file.bytes()[request.offset : request.offset + request.length], out)
        finally:
            self._opened().give(file)
        if not held:
            return self._fetch_run(param, request, out)
        self.count(request.length, request.last - request.first)
        return None

    def _copy_box(self, param: Param, block: int, inner: Box, out: np.ndarray[Any, Any]) -> None:
        """Copy a box of one block out of the page cache."""
        number, base = _place(param.layout, block)
        low, high = _ends(param.layout, inner)
        file = self._take(param, number)
        try:
            held = file.holds(base + low, high - low)
            if held:
                np.copyto(out, _window(param.layout, file.bytes(), base + low, inner.shape))
        finally:
            self._opened().give(file)
        if held:
            self.count(out.nbytes)
            return
        for job in self._cold(param, block, inner, out):
            job.do()

    def _bands(self, param: Param, block: int, inner: Box, out: np.ndarray[Any, Any], found: Comb) -> list[Job]:
        """A box that is read with its gaps, in bands that several threads may bring."""
        if found.length <= _SCRATCH_BYTES and not found.passed_bytes:
            return [Job(out.nbytes, partial(self._through_space, param, block, inner, out))]
        jobs = list(_cut(inner, out, _STREAMS if found.length > _STREAMS * _BAND_BYTES else 1))
        gaps = None if found.passed_bytes else found.bridged_bytes // len(jobs)
        return [Job(part.nbytes, partial(self._stream, param, block, box, part, gaps)) for box, part in jobs]

    def _stream(self, param: Param, block: int, inner: Box, out: np.ndarray[Any, Any], gap_bytes: int | None) -> None:
        """Band after band: many streams in one file would disturb the kernel's readahead.

        gap_bytes: what counts as read beside the runs; None: nothing, and only the page cache may get what is between.
        """
        low, high = _ends(param.layout, inner)
        bands = list(_cut(inner, out, -(-(high - low) // min(_BAND_BYTES, self.settings.io_bytes))))
        for band, part in bands:
            self._band(param, block, band, part, gap_bytes and gap_bytes // len(bands))

    def _band(self, param: Param, block: int, inner: Box, out: np.ndarray[Any, Any], gap_bytes: int | None) -> None:
        layout = param.layout
        number, base = _place(layout, block)
        low, high = _ends(layout, inner)
        file = self._take(param, number)
        try:
            if file.populate(base + low, high - low):
                np.copyto(out, _window(layout, file.bytes(), base + low, inner.shape))
                self.count(out.nbytes + (gap_bytes or 0))
                return
        finally:
            self._opened().give(file)
        if gap_bytes is None:
            for job in self._cold(param, block, inner, out, passing=False):
                job.do()
        else:
            self._through_space(param, block, inner, out)

    def _through_space(self, param: Param, block: int, inner: Box, out: np.ndarray[Any, Any]) -> None:
        """A box with all its gaps, by way of a buffer."""
        layout = param.layout
        number, base = _place(layout, block)
        low, high = _ends(layout, inner)
        request = Request(number, base + low, high - low, 0, 0, 0, 0)
        with self._space(request) as view:
            self._fetch(param, request, view, check=False)
            np.copyto(out, _window(layout, view, 0, inner.shape))

    def _runs(self, param: Param, block: int, inner: Box, out: np.ndarray[Any, Any], found: Comb) -> list[Job]:
        """Short runs far apart, each read on its own."""
        pieces = -(-prod(inner.shape[: found.dims]) // _RUNS)
        return [
            Job(part.nbytes, partial(self._group, param, block, band, part, found))
            for band, part in _cut(inner, out, pieces)
        ]

    def _group(self, param: Param, block: int, inner: Box, out: np.ndarray[Any, Any], found: Comb) -> None:
        number, base = _place(param.layout, block)
        whole = out if out.flags.c_contiguous else np.empty(out.shape, out.dtype)
        flat, n = whole.reshape(-1).view(np.uint8).data, found.run_bytes
        starts = [base + at for at in starts_of(param.layout, inner, found.dims)]
        file = self._take(param, number)
        try:
            for at in starts:  # the disk gets all requests before the first is waited for
                os.posix_fadvise(file.fd, at, n, os.POSIX_FADV_WILLNEED)
            for i, at in enumerate(starts):
                view = flat[i * n : (i + 1) * n]
                if os.preadv(file.fd, [view], at) != n:
                    file.reader.read_into(at, view)  # has the error, or gets the rest
        except OSError:
            for i, at in enumerate(starts):
                file.reader.read_into(at, flat[i * n : (i + 1) * n])
        finally:
            self._opened().give(file)
        if whole is not out:
            out[...] = whole
        self.count(whole.nbytes)

    def _take(self, param: Param, file: int) -> OpenFile:
        return self._take_path(param, param.file(file))

    def _take_path(self, param: Param, path: str) -> OpenFile:
        try:
            return self._opened().take(path)
        except NotFoundError as error:
            raise _missing(param, path, self.store) from error

    # --- requests --------------------------------------------------------------------------------------

    def _serve(self, param: Param, targets: Sequence[Target], request: Request, check: bool) -> None:
        begun = self._begun.pop((param.file(request.file), request.offset, request.length), None)
        if begun is not None and self._serve_begun(param, targets, request, *begun):
            return
        if param.codec is None:
            for target in targets:
                view = _landing(param, target, request)
                if view is not None:
                    _finish(self._fetch(param, request, view, check))
                    if len(targets) > 1:
                        _scatter(param, [t for t in targets if t is not target], request.start, request.stop, view)
                    return
        with self._space(request) as view:
            self._through(param, targets, request, view, check)

    def _serve_begun(
        self, param: Param, targets: Sequence[Target], request: Request, reading: Future[None], buffer: Buffer
    ) -> bool:
        """Deliver what was read ahead; False when no thread has come to read it, or it failed: to be read again."""
        try:
            if reading.cancel() or reading.exception() is not None:
                return False
            view = buffer.at(request.offset, request.length)
            self.count(request.length, request.last - request.first)
            into = _landing(param, targets[0], request) if len(targets) == 1 and param.codec is None else None
            if into is not None:
                checks = Checks(_wholes(param, request), partial(_is_sound, param))
                copy_checked(view, into, checks=checks)
                self._refuse(param, checks)
            else:
                check_extents(param, request, view, self.store.url)
                self.deliver(param, targets, request, view)
            return True
        finally:
            self._scratch().release(buffer)

    @contextmanager
    def _space(self, request: Request) -> Iterator[memoryview]:
        """Memory for the bytes of a request, from the buffers if they are large enough."""
        pool = self._scratch()
        if request.length > pool.buffer_bytes:  # a single extent larger than a buffer, from an unusual writer
            yield memoryview(bytearray(request.length))
            return
        buffer = pool.acquire()
        try:
            yield buffer.at(request.offset, request.length)
        finally:
            pool.release(buffer)

    def _through(
        self, param: Param, targets: Sequence[Target], request: Request, view: memoryview, check: bool
    ) -> None:
        _finish(self._fetch(param, request, view, check))
        self.deliver(param, targets, request, view)

    def fetch(self, param: Param, request: Request, view: memoryview) -> None:
        """Read stored bytes and check every extent in them."""
        _finish(self._fetch(param, request, view, check=True))

    def deliver(self, param: Param, targets: Sequence[Target], request: Request, view: memoryview) -> None:
        """Put the stored bytes of a request where they belong."""
        if param.codec is not None:
            logical = request.stop - request.start
            try:
                view = memoryview(param.codec.decode(view, logical))
            except CorruptError as error:
                raise CorruptError(f"array {param.name!r}, file {param.file(request.file)}: {error}") from error
        _scatter(param, targets, request.start, request.stop, view)

    def _fetch(self, param: Param, request: Request, view: memoryview, check: bool) -> Rest | None:
        extents = list(_wholes(param, request)) if check else ()
        rest = self._fetch_bytes(param, param.file(request.file), request.offset, view, extents)
        self.count(request.length, request.last - request.first)
        return rest

    def _fetch_bytes(
        self, param: Param, path: str, offset: int, view: memoryview, extents: Sequence[Whole]
    ) -> Rest | None:
        """Read these bytes; what is left to check then."""
        checks = Checks(extents, partial(_is_sound, param)) if extents else None
        try:
            self._opened().read_into(path, offset, view, checks)
        except NotFoundError as error:
            raise _missing(param, path, self.store) from error
        except CorruptError as error:
            raise CorruptError(
                f"array {param.name!r}: {error}; restore the step from a copy, or load an older one"
            ) from error
        if checks is not None and checks.left:
            return partial(self._check, param, checks, view)
        self._refuse(param, checks)
        return None

    def _check(self, param: Param, checks: Checks, view: memoryview) -> None:
        checks.finish(view)
        self._refuse(param, checks)

    def _refuse(self, param: Param, checks: Checks | None) -> None:
        if checks is not None and checks.wrong:
            raise _unsound(param, checks.wrong[0], self.store.url)


def _size(wanted: tuple[Param, Sequence[Target]]) -> int:
    return sum(target.out.nbytes for target in wanted[1])


def contiguous(layout: Layout, box: Box) -> tuple[int, int] | None:
    """The logical range of a box that is one run of one block; None when it is more."""
    block, base = layout.block, 0
    start, stop = box.start, box.stop
    if layout.blocks > 1:
        index = tuple(a // b for a, b in zip(start, block, strict=True))
        if any((z - 1) // b != i for z, b, i in zip(stop, block, index, strict=True)):
            return None
        base = sum(i * s for i, s in zip(index, strides_of(layout.grid), strict=True)) * layout.block_bytes
        start = tuple(a - i * b for a, i, b in zip(start, index, block, strict=True))
        stop = tuple(z - i * b for z, i, b in zip(stop, index, block, strict=True))
    at, stride, size, single = 0, 1, 1, True
    for d in range(len(block) - 1, -1, -1):
        length = stop[d] - start[d]
        # Left of a dimension that is not covered whole, only single indices keep it one run.
        if not single and length > 1:
            return None
        single = single and length == block[d]
        at += start[d] * stride
        size *= length
        stride *= block[d]
    first = base + at * layout.itemsize
    return first, first + size * layout.itemsize


def _request(param: Param, start: int, stop: int, check: bool) -> Request:
    """One run of logical bytes in one file, with the whole extents in it if they are to be checked."""
    first = last = 0
    if check and stop - start >= param.shortest_extent:
        table = param.extents
        first = int(table.start.searchsorted(start))
        last = max(first, int(table.stop.searchsorted(stop, "right")))
    layout = param.layout
    file, offset = divmod(start, layout.block_bytes) if layout.many else (0, start)
    return Request(file, offset, stop - start, start, stop, first, last)


def run_of(param: Param, box: Box, shape: tuple[int, ...], check: bool) -> Run | None:
    """A box as one run, in parts that several threads may read; None: plan it."""
    layout = param.layout
    found = contiguous(layout, box) if param.codec is None else None
    if found is None or found[0] == found[1]:
        return None
    if check and found[1] - found[0] == layout.nbytes != layout.logical_bytes:
        return None  # the padding belongs to extents that are to be checked too
    start, stop = found
    requests = [_request(param, low, high, check) for low, high in _cut_run(param, start, stop, _PART_BYTES, check)]
    parts = tuple((one.start - start, one.stop - start, tuple(_wholes(param, one))) for one in requests)
    return Run(shape, layout.key(requests[0].file), start, requests[0].offset, parts, check)


def _wholes(param: Param, request: Request) -> Iterator[Whole]:
    """The extents that lie whole in a request."""
    table = param.extents
    for number in range(request.first, request.last):
        low = int(table.offset[number]) - request.offset
        yield number, low, low + int(table.length[number])


def _cut_run(param: Param, start: int, stop: int, part_bytes: int, check: bool) -> list[tuple[int, int]]:
    """A run of logical bytes in parts of about this length, cut where extents end: one in two parts is not checked.

    Of those cuts the ones at pages, if there are enough: else each would send two edges through the page cache.
    """
    if stop - start <= part_bytes:
        return [(start, stop)]
    grain = param.longest_extent if check else 0
    if not grain:
        return cut(start, stop, part_bytes)
    count, pages = max(1, round(part_bytes / grain)), PAGE_BYTES // gcd(grain, PAGE_BYTES)
    if pages <= 2 * count:
        count = max(1, round(count / pages)) * pages
    base = start // param.layout.block_bytes * param.layout.block_bytes if param.layout.many else 0
    return [(base + low, base + high) for low, high in cut(start - base, stop - base, count * grain)]


def _finish(rest: Rest | None) -> None:
    if rest is not None:
        rest()


def _and_then(jobs: list[Job], last: Callable[[], None]) -> list[Job]:
    """The same jobs, for any threads; the one that is done last does one thing more."""
    left = count(len(jobs) - 1, -1)

    def one(do: Callable[[], Rest | None]) -> Rest | None:
        rest = do()
        if next(left) == 0:
            last()
        return rest

    return [job._replace(do=partial(one, job.do)) for job in jobs]


def _allowance(param: Param, inner: Box) -> int:
    """Bytes beside those of a box that may be read: an extent for each of its faces inside the array."""
    faces = sum(map(bool, inner.start)) + sum(map(int.__lt__, inner.stop, param.layout.block))
    return faces * param.longest_extent


def _place(layout: Layout, block: int) -> tuple[int, int]:
    """The file of a block, and where in it the block begins."""
    return (block, 0) if layout.many else (0, block * layout.block_bytes)


def _ends(layout: Layout, inner: Box) -> tuple[int, int]:
    """The bytes of a block from the first element of a box up to the end of its last one."""
    low = high = 0
    stride = layout.itemsize
    for d in range(len(layout.block) - 1, -1, -1):
        low += inner.start[d] * stride
        high += (inner.stop[d] - 1) * stride
        stride *= layout.block[d]
    return low, high + layout.itemsize


def _window(layout: Layout, data: Any, offset: int, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Part of a block as an array, in memory that holds its bytes from `offset` on."""
    strides = [s * layout.itemsize for s in strides_of(layout.block)]
    return np.ndarray(shape, _CARRIERS[layout.itemsize], data, offset, strides)


def _in_blocks(layout: Layout, target: Target) -> Iterator[tuple[int, Box, np.ndarray[Any, Any]]]:
    """A target divided by blocks: (block, the box seen from its origin, where it goes)."""
    if layout.blocks == 1:
        yield 0, target.box, target.out
        return
    for block in layout.blocks_of(target.box):
        part = target.box & layout.block_box(block)
        yield block, part.within(layout.block_origin(block)), target.out[_inside(part, target.box)]


def _cut(inner: Box, out: np.ndarray[Any, Any], count: int) -> Iterator[tuple[Box, np.ndarray[Any, Any]]]:
    """A box in about `count` bands of its first dimension that has several indices."""
    dim = next((d for d, n in enumerate(inner.shape) if n > 1), 0)
    low, high = inner.start[dim], inner.stop[dim]
    rows = max(1, -(-(high - low) // max(1, count)))
    for first in range(low, high, rows):
        last = min(first + rows, high)
        band = Box(
            (*inner.start[:dim], first, *inner.start[dim + 1 :]), (*inner.stop[:dim], last, *inner.stop[dim + 1 :])
        )
        yield band, out[(*([slice(None)] * dim), slice(first - low, last - low))]


def check_verify(verify: str) -> str:
    if verify not in ("full", "extents", "none"):
        raise MismatchError(f"verify is 'full', 'extents' or 'none', not {verify!r}")
    return verify


def _missing(param: Param, path: str, store: Store) -> CkptError:
    if not store.exists(NAME):
        return StaleError(f"{store.url} was deleted since it was opened: open a newer step")
    return CorruptError(
        f"array {param.name!r}: file {path} is missing from {store.url}: "
        "restore the step from a copy, or load an older one"
    )


def _is_whole(param: Param, target: Target) -> bool:
    return target.out.size * param.layout.itemsize == param.layout.nbytes


def check_extents(param: Param, request: Request, view: memoryview, where: str) -> None:
    """Compare every extent that lies whole in the request with its checksum."""
    for number, low, high in _wholes(param, request):
        check_extent(param, number, view[low:high], where)


def check_extent(param: Param, number: int, view: memoryview, where: str) -> None:
    """Compare the stored bytes of an extent with its checksum."""
    if not _is_sound(param, number, view):
        raise _unsound(param, number, where)


def _is_sound(param: Param, number: int, view: memoryview) -> bool:
    return digest(view) == param.hashes[number * HASH_BYTES : (number + 1) * HASH_BYTES]


def _unsound(param: Param, number: int, where: str) -> CorruptError:
    table = param.extents
    return CorruptError(
        f"array {param.name!r}: extent {number} ({int(table.length[number])} bytes at offset "
        f"{int(table.offset[number])} of {where}/{param.file(int(table.file[number]))}) is not what was saved: "
        "its checksum differs. Restore the step from a copy, or load an older one"
    )


def _landing(param: Param, target: Target, request: Request) -> memoryview | None:
    """The destination's own memory for a request, when its bytes are contiguous there; else None."""
    layout, box, out = param.layout, target.box, target.out
    if not out.flags.c_contiguous or not out.flags.writeable or out.size == 0:
        return None
    block = request.start // layout.block_bytes
    origin = layout.block_origin(block)
    if layout.shape[1:] != () and (
        box.start[1:] != origin[1:]
        or tuple(b - a for a, b in zip(origin[1:], box.stop[1:], strict=True)) != layout.block[1:]
    ):
        return None
    row = layout.block_bytes // layout.block[0] if layout.shape else layout.block_bytes
    first = block * layout.block_bytes + ((box.start[0] - origin[0]) * row if layout.shape else 0)
    low = request.start - first
    if low < 0 or low + request.stop - request.start > out.nbytes:
        return None
    return out.reshape(-1).view(np.uint8).data[low : low + request.stop - request.start]


def _inside(part: Box, whole: Box) -> tuple[Any, ...]:
    """The index of a box in an array that holds a larger one; of a 0-d array a view, not a scalar."""
    return (*part.within(whole.start).slices, ...)


def _scatter(param: Param, targets: Sequence[Target], start: int, stop: int, view: memoryview) -> None:
    """Put logical bytes [start, stop) where they belong."""
    size = param.layout.itemsize
    cut_start = -start % size
    if cut_start or (stop - start) % size:
        raise MismatchError(f"array {param.name!r}: a request splits an element")
    flat = np.frombuffer(view, dtype=param.dtype.carrier)
    for offset, valid, padded in param.layout.parts(start, stop):
        if not valid.size:
            continue
        source = flat[offset // size : offset // size + padded.size].reshape(padded.shape)
        for target in targets:
            inner = valid & target.box
            if inner.size:
                np.copyto(
                    target.out[_inside(inner, target.box)],
                    source[_inside(inner, padded)],
                )
