"""The one way to read: boxes of arrays into memory, checked.

Requests run on a few threads. A request whose bytes are contiguous in the destination lands there directly; others
pass through a reusable buffer and are scattered. Every extent that is read whole is compared with its checksum.

Two shortcuts serve small slices, where planning would cost more than reading: one contiguous run is one read without
a plan, and scattered runs of a file that is in the page cache anyway are copied out of a mapping of it. Cold bytes are
never read through a mapping: page faults are slower than requests, and a disk error would be a signal, not an error.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfs.box import strides_of
from ckptfs.errors import CorruptError, MismatchError, NotFoundError
from ckptfs.loadplan import GAP_BYTES, Request, requests
from ckptfs.manifest import HASH_BYTES, digest
from ckptfs.storage.directio import ALIGN_BYTES, BufferPool, is_cached
from ckptfs.storage.fileops import REAL_OPS
from ckptfs.storage.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ckptfs.box import Box
    from ckptfs.grid import Layout
    from ckptfs.manifest import Param
    from ckptfs.settings import Settings
    from ckptfs.storage import Store

_OPEN_FILES = 256
_REGION_BYTES = 1 << 20
_ALONE_BYTES = 32 << 20  # more is copied faster by several threads, fresh memory above all
_THREADS_FROM_BYTES = 1 << 20  # less is read before threads have started
_WARM_BYTES = 4 << 20  # what a small slice may pull into the page cache, where the next one will find it


@dataclass(frozen=True)
class Target:
    """A box of an array and the memory it goes to: a carrier-typed array of the box's shape, any strides."""

    box: Box
    out: np.ndarray[Any, Any]


class _Opened:
    """An open file of a local step, and a mapping of it once one is asked for."""

    def __init__(self, reader: Any) -> None:
        self.reader = reader
        self.users = 0
        self._seen: dict[int, float] = {}  # region → when it was found in the page cache
        self._bytes: np.ndarray[Any, Any] | None = None

    def mapped(self, offset: int, length: int, *, bring: bool = True) -> tuple[np.ndarray[Any, Any] | None, bool]:
        """The file's bytes if this range is in the page cache or, being short, was brought there (then also True)."""
        fd = self.reader._open_fd()  # noqa: SLF001 - one descriptor a file is enough
        if offset + length > self.reader.size:
            return None, False
        brought = False
        if not self._seen_lately(fd, offset, length) and not is_cached(fd, offset, length):
            if length > _WARM_BYTES or not bring:
                return None, False
            brought = True
            os.posix_fadvise(fd, offset, length, os.POSIX_FADV_WILLNEED)
            for at in range(offset, offset + length, 1 << 20):  # by a call that can fail, where a page fault would kill
                os.pread(fd, min(1 << 20, offset + length - at), at)
        if self._bytes is None:
            self._bytes = np.frombuffer(mmap.mmap(fd, self.reader.size, prot=mmap.PROT_READ), np.uint8)
        return self._bytes, brought

    def _seen_lately(self, fd: int, offset: int, length: int) -> bool:
        """Whether all of the range lies in regions found in the page cache within the last second.

        Asking the kernel about 2 MiB takes longer than copying 64 KiB out of them.
        """
        if length > _WARM_BYTES:
            return False
        now = time.monotonic()
        regions = range(offset // _REGION_BYTES, (offset + length - 1) // _REGION_BYTES + 1)
        unknown = [region for region in regions if self._seen.get(region, -1.0) < now - 1]
        for region in unknown:
            start = region * _REGION_BYTES
            if not is_cached(fd, start, min(_REGION_BYTES, self.reader.size - start)):
                return False
            self._seen[region] = now
        return True

    def close(self) -> None:
        self._bytes = None  # unmapped when nobody copies out of it any more
        self.reader.close()


class _Files:
    """Open files of a local step, the least recently used closed first."""

    def __init__(self, store: Store, scratch: BufferPool) -> None:
        self._store, self._scratch = store, scratch
        self._open: OrderedDict[str, _Opened] = OrderedDict()
        self._lock = threading.Lock()

    def read_into(self, path: str, offset: int, view: memoryview) -> None:
        if not self._store.positional:
            self._store.read_into(path, offset, view)
            return
        file = self.take(path)
        try:
            file.reader.read_into(offset, view)
        finally:
            self.give(file)

    def take(self, path: str) -> _Opened:
        """The file, open until it is given back."""
        with self._lock:
            file = self._open.get(path)
            if file is None:
                file = _Opened(self._store.open_reader(path, scratch=self._scratch))  # type: ignore[attr-defined]
                self._open[path] = file
            elif len(self._open) > _OPEN_FILES // 2:
                self._open.move_to_end(path)
            file.users += 1
            return file

    def give(self, file: _Opened) -> None:
        with self._lock:
            file.users -= 1
            if len(self._open) > _OPEN_FILES:
                self._close_oldest()

    def _close_oldest(self) -> None:
        for path, file in self._open.items():
            if not file.users:
                del self._open[path]
                file.close()
                return

    def close(self) -> None:
        with self._lock:
            for file in self._open.values():
                file.close()
            self._open.clear()


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
        self._files: _Files | None = None

    def _scratch(self) -> BufferPool:
        with self._pool_lock:
            if self._pool is None:
                self._pool = BufferPool(self.settings.read_buffer_bytes, self.settings.io_bytes)
            return self._pool

    def _opened(self) -> _Files:
        files = self._files
        if files is None:
            pool = self._scratch()
            with self._pool_lock:
                files = self._files = self._files or _Files(self.store, pool)
        return files

    def _count(self, nbytes: int, extents: int) -> None:
        with self._count_lock:
            self.bytes_read += nbytes
            self.extents_read += extents

    def close(self) -> None:
        if self._files is not None:
            self._files.close()
            self._files = None
        if self._pool is not None:
            self._pool.close()
            self._pool = None

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
        if verify != "full":
            wanted = list(wanted)
            if len(wanted) == 1 and len(wanted[0][1]) == 1:
                param, (target,) = wanted[0]
                if self._shortcut(param, target, check=verify == "extents"):
                    progress(target.out.nbytes)
                    return
        work = [
            (param, targets, request)
            for param, targets in wanted
            for request in requests(
                param,
                (t.box for t in targets),
                whole=verify == "full" or (verify == "extents" and any(_is_whole(param, t) for t in targets)),
                io_bytes=self.settings.io_bytes,
            )
        ]
        check = verify != "none"
        if len(work) <= 1 or sum(request.length for _, _, request in work) < _THREADS_FROM_BYTES:
            for param, targets, request in work:
                self._serve(param, targets, request, check)
            progress(sum(request.length for _, _, request in work))
            return

        def one(item: tuple[Param, Sequence[Target], Request]) -> int:
            self._serve(*item, check)
            return item[2].length

        done = 0
        with ThreadPoolExecutor(min(self.settings.read_threads, len(work)), "ckptfs-read") as threads:
            try:
                for length in threads.map(one, work):
                    done += length
                    progress(done)
            except BaseException:
                threads.shutdown(wait=True, cancel_futures=True)
                raise

    def _shortcut(self, param: Param, target: Target, *, check: bool) -> bool:
        """One box, read at once if that is simple; False: make a plan."""
        layout, out = param.layout, target.out
        if not out.size:
            return True
        if param.codec is not None:
            return False
        found = contiguous(layout, target.box) if out.flags.c_contiguous else None
        if found is None:
            if check and _is_whole(param, target):
                return False
            return self._mappable and self._copied(param, target)
        start, stop = found
        first = last = 0
        if check and _is_whole(param, target) and stop - start != layout.logical_bytes:
            return False  # the padding belongs to the last extent, which is to be checked too
        if check and stop - start >= param.shortest_extent:
            table = param.extents
            first = int(table.start.searchsorted(start))
            last = max(first, int(table.stop.searchsorted(stop, "right")))
        file, offset = divmod(start, layout.block_bytes) if layout.many else (0, start)
        request = Request(file, offset, stop - start, start, stop, first, last)
        flat = out.reshape(-1).view(np.uint8)
        if self._mappable and request.length <= _ALONE_BYTES and self._copied_run(param, request, flat):
            return True
        if request.length > self.settings.io_bytes:
            return False
        self._fetch(param, request, flat.data, last > first)
        return True

    def _copied_run(self, param: Param, request: Request, out: np.ndarray[Any, Any]) -> bool:
        """Copy one run out of the page cache, each extent checked while it is in the processor's; False: not there."""
        files = self._opened()
        opened = self._take(param, request.file)
        try:
            data, _ = opened.mapped(request.offset, request.length)
            if data is None:
                return False
            at, end = request.offset, request.offset + request.length
            if request.first < request.last:
                table = param.extents
                for number in range(request.first, request.last):
                    low = int(table.offset[number])
                    high = low + int(table.length[number])
                    out[at - request.offset : high - request.offset] = data[at:high]
                    one = Request(request.file, low, high - low, 0, 0, number, number + 1)
                    check_extents(param, one, out[low - request.offset : high - request.offset].data, self.store.url)
                    at = high
            out[at - request.offset :] = data[at:end]
        finally:
            files.give(opened)
        self._count(request.length, request.last - request.first)
        return True

    def _take(self, param: Param, file: int) -> Any:
        try:
            return self._opened().take(param.file(file))
        except NotFoundError as error:
            raise _missing(param, file, self.store.url) from error

    def _copied(self, param: Param, target: Target) -> bool:
        """Copy a box out of the page cache; False when it is not there."""
        layout, box = param.layout, target.box
        if layout.blocks == 1:
            return self._copied_from(param, 0, box.start, box.stop, target.out)
        for block in layout.blocks_of(box):
            origin = layout.block_origin(block)
            part = box & layout.block_box(block)
            inner, into = part.within(origin), target.out[_inside(part, box)]
            if not self._copied_from(param, block, inner.start, inner.stop, into):
                return False
        return True

    def _copied_from(
        self, param: Param, block: int, start: Sequence[int], stop: Sequence[int], out: np.ndarray[Any, Any]
    ) -> bool:
        """The same for a box of one block."""
        layout = param.layout
        low = high = gap_bytes = 0
        wide = False  # gaps that a plan would not read through either: then only what is cached is copied here
        stride, where = layout.itemsize, []
        for d in range(len(start) - 1, -1, -1):
            length = stop[d] - start[d]
            wide = wide or (length > 1 and gap_bytes > GAP_BYTES)
            gap_bytes = max(gap_bytes, (layout.block[d] - length) * stride)
            low += start[d] * stride
            high += (stop[d] - 1) * stride
            where.append(slice(start[d], stop[d]))
            stride *= layout.block[d]
        file, base = (block, 0) if layout.many else (0, block * layout.block_bytes)
        files = self._opened()
        opened = self._take(param, file)
        try:
            covered = high + layout.itemsize - low
            data, brought = opened.mapped(base + low, covered, bring=not wide)
            if data is None:
                return False
            rows = data[base : base + layout.used_bytes(block)].view(param.dtype.carrier)
            out[...] = rows.reshape((-1, *layout.block[1:]))[tuple(reversed(where))]
        finally:
            files.give(opened)
        self._count(covered if brought else out.nbytes, 0)
        return True

    def _serve(self, param: Param, targets: Sequence[Target], request: Request, check: bool) -> None:
        if param.codec is None:
            for target in targets:
                view = _landing(param, target, request)
                if view is not None:
                    self._fetch(param, request, view, check)
                    if len(targets) > 1:
                        _scatter(param, [t for t in targets if t is not target], request.start, request.stop, view)
                    return
        pool = self._scratch()
        if request.length > pool.buffer_bytes:  # a single extent larger than a buffer, from an unusual writer
            space = memoryview(bytearray(request.length + ALIGN_BYTES))
            self._through(param, targets, request, space[: request.length], check)
            return
        buffer = pool.acquire()
        try:
            self._through(param, targets, request, buffer.at(request.offset, request.length), check)
        finally:
            pool.release(buffer)

    def _through(
        self, param: Param, targets: Sequence[Target], request: Request, view: memoryview, check: bool
    ) -> None:
        self._fetch(param, request, view, check)
        self.deliver(param, targets, request, view)

    def fetch(self, param: Param, request: Request, view: memoryview) -> None:
        """Read stored bytes and check every extent in them."""
        self._fetch(param, request, view, check=True)

    def deliver(self, param: Param, targets: Sequence[Target], request: Request, view: memoryview) -> None:
        """Put the stored bytes of a request where they belong."""
        if param.codec is not None:
            logical = request.stop - request.start
            try:
                view = memoryview(param.codec.decode(view, logical))
            except CorruptError as error:
                raise CorruptError(f"array {param.name!r}, file {param.file(request.file)}: {error}") from error
        _scatter(param, targets, request.start, request.stop, view)

    def _fetch(self, param: Param, request: Request, view: memoryview, check: bool) -> None:
        path = param.file(request.file)
        try:
            self._opened().read_into(path, request.offset, view)
        except NotFoundError as error:
            raise _missing(param, request.file, self.store.url) from error
        except CorruptError as error:
            raise CorruptError(
                f"array {param.name!r}: {error}; restore the step from a copy, or load an older one"
            ) from error
        self._count(request.length, request.last - request.first)
        if check:
            check_extents(param, request, view, self.store.url)


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


def check_verify(verify: str) -> str:
    if verify not in ("full", "extents", "none"):
        raise MismatchError(f"verify is 'full', 'extents' or 'none', not {verify!r}")
    return verify


def _missing(param: Param, file: int, where: str) -> CorruptError:
    path = param.file(file)
    return CorruptError(
        f"array {param.name!r}: file {path} is missing from {where}: restore the step from a copy, or load an older one"
    )


def _is_whole(param: Param, target: Target) -> bool:
    return target.out.size * param.layout.itemsize == param.layout.nbytes


def check_extents(param: Param, request: Request, view: memoryview, where: str) -> None:
    """Compare every extent that lies whole in the request with its checksum."""
    table = param.extents
    for number in range(request.first, request.last):
        low = int(table.offset[number]) - request.offset
        found = digest(view[low : low + int(table.length[number])])
        if found != param.hashes[number * HASH_BYTES : (number + 1) * HASH_BYTES]:
            msg = (
                f"array {param.name!r}: extent {number} ({int(table.length[number])} bytes at offset "
                f"{int(table.offset[number])} of {where}/{param.file(request.file)}) is not what was saved: "
                "its checksum differs. "
                "Restore the step from a copy, or load an older one"
            )
            raise CorruptError(msg)


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
