"""The one way to read: boxes of arrays into memory, checked.

Requests run on a few threads. A request whose bytes are contiguous in the destination lands there directly; others
pass through a reusable buffer and are scattered. Every extent that is read whole is compared with its checksum.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfs.errors import CorruptError, MismatchError, NotFoundError
from ckptfs.loadplan import Request, requests
from ckptfs.manifest import HASH_BYTES, digest
from ckptfs.storage.directio import ALIGN_BYTES, BufferPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ckptfs.box import Box
    from ckptfs.manifest import Param
    from ckptfs.settings import Settings
    from ckptfs.storage import Store

_OPEN_FILES = 256


@dataclass(frozen=True)
class Target:
    """A box of an array and the memory it goes to: a carrier-typed array of the box's shape, any strides."""

    box: Box
    out: np.ndarray[Any, Any]


class _Files:
    """Open files of a local step, the least recently used closed first."""

    def __init__(self, store: Store, scratch: BufferPool) -> None:
        self._store, self._scratch = store, scratch
        self._open: OrderedDict[str, tuple[Any, int]] = OrderedDict()
        self._users: dict[int, int] = {}
        self._lock = threading.Lock()

    def read_into(self, path: str, offset: int, view: memoryview) -> None:
        if not self._store.positional:
            self._store.read_into(path, offset, view)
            return
        reader = self._take(path)
        try:
            reader.read_into(offset, view)
        finally:
            self._give(reader)

    def _take(self, path: str) -> Any:
        with self._lock:
            found = self._open.pop(path, None)
            reader = found[0] if found else self._store.open_reader(path, scratch=self._scratch)  # type: ignore[attr-defined]
            self._open[path] = (reader, 0)
            self._users[id(reader)] = self._users.get(id(reader), 0) + 1
            return reader

    def _give(self, reader: Any) -> None:
        with self._lock:
            self._users[id(reader)] -= 1
            if len(self._open) > _OPEN_FILES:
                for path, (one, _) in list(self._open.items()):
                    if not self._users.get(id(one)):
                        del self._open[path]
                        self._users.pop(id(one), None)
                        one.close()
                        break

    def close(self) -> None:
        with self._lock:
            for reader, _ in self._open.values():
                reader.close()
            self._open.clear()
            self._users.clear()


class Reader:
    """Reads arrays of one step. Thread-safe."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self.store, self.settings = store, settings
        self._pool_lock = threading.Lock()
        self._pool: BufferPool | None = None
        self._files: _Files | None = None
        self.bytes_read = 0  # from the store; for tests and reports
        self.extents_read = 0
        self._count_lock = threading.Lock()

    def _scratch(self) -> BufferPool:
        with self._pool_lock:
            if self._pool is None:
                self._pool = BufferPool(self.settings.read_buffer_bytes, self.settings.io_bytes)
            return self._pool

    def _opened(self) -> _Files:
        if self._files is None:
            pool = self._scratch()
            with self._pool_lock:
                self._files = self._files or _Files(self.store, pool)
        return self._files

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
        """Fill all targets. verify: "full" (every byte that is used), "extents" (extents that are read whole), "none"."""
        if verify not in ("full", "extents", "none"):
            raise MismatchError(f"verify is 'full', 'extents' or 'none', not {verify!r}")
        work = [
            (param, targets, request)
            for param, targets in wanted
            for request in requests(
                param, (t.box for t in targets), whole=verify == "full", io_bytes=self.settings.io_bytes
            )
        ]
        check = verify != "none"
        if len(work) <= 1:
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
            msg = f"array {param.name!r}: file {path} is missing from {self.store.url}: restore the step from a copy, or load an older one"
            raise CorruptError(msg) from error
        except CorruptError as error:
            raise CorruptError(
                f"array {param.name!r}: {error}; restore the step from a copy, or load an older one"
            ) from error
        with self._count_lock:
            self.bytes_read += request.length
            self.extents_read += request.last - request.first
        if check:
            check_extents(param, request, view, self.store.url)


def check_extents(param: Param, request: Request, view: memoryview, where: str) -> None:
    """Compare every extent that lies whole in the request with its checksum."""
    table = param.extents
    for number in range(request.first, request.last):
        low = int(table.offset[number]) - request.offset
        found = digest(view[low : low + int(table.length[number])])
        if found != param.hashes[number * HASH_BYTES : (number + 1) * HASH_BYTES]:
            msg = (
                f"array {param.name!r}: extent {number} ({int(table.length[number])} bytes at offset "
                f"{int(table.offset[number])} of {where}/{param.file(request.file)}) is not what was saved: its checksum differs. "
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
    return memoryview(out.reshape(-1).view(np.uint8))[low : low + request.stop - request.start]


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
                    target.out[(..., *inner.within(target.box.start).slices)],
                    source[(..., *inner.within(padded.start).slices)],
                )
