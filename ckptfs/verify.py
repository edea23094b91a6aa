"""Checks every stored byte of a step against its manifest, and says all that is wrong.

Rules: every extent is hashed, its padding included; file sizes are exact; shard indexes and zarr.json documents are
those of the layout; assets have their checksums; files that nothing names are warnings. The first problem does not end
the check, and only I/O that affects everything (no listing, no manifest) raises. Memory: one request per thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from ckptfs import manifest as mf
from ckptfs import zarr3
from ckptfs.checkpoint import Checkpoint
from ckptfs.errors import CkptError, CorruptError, FormatError, NotFoundError, StorageError
from ckptfs.manifest import HASH_BYTES, Manifest, Param, digest
from ckptfs.storage.directio import Buffer, BufferPool, slot_bytes

if TYPE_CHECKING:
    from ckptfs.settings import Settings
    from ckptfs.storage import Store

# What a problem can be. "extra" is a warning: it cannot change what a reader gets.
KINDS = {
    "manifest": "the manifest itself is not one",
    "missing": "a file is not there",
    "size": "a file is longer or shorter than it was",
    "checksum": "stored bytes differ from what was saved",
    "index": "a shard index differs from what the layout says",
    "metadata": "a zarr.json differs from what the manifest says",
    "unreadable": "the store could not deliver the bytes",
    "extra": "a file that the step does not name",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong. `path` is relative to the step; `array` and `extent` are None outside array data."""

    path: str
    array: str | None
    extent: int | None
    offset: int | None
    kind: str
    message: str

    @property
    def warning(self) -> bool:
        return self.kind == "extra"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        array = f"array {self.array!r}: " if self.array is not None else ""
        return f"{self.path}: {array}{self.message}"


Progress = Callable[[int, int], None]


def verify(
    checkpoint: Checkpoint | Store, *, progress: Progress | None = None, threads: int | None = None
) -> list[Problem]:
    """Everything that is wrong with a step (a Checkpoint, or its store), sorted by file and offset; [] if it is sound.

    `progress(done_bytes, total_bytes)` is called as bytes are checked, by one thread at a time.
    """
    if isinstance(checkpoint, Checkpoint):
        return _Check(checkpoint).run(progress, threads)
    try:
        opened = Checkpoint(checkpoint)
    except FormatError as error:
        return [Problem(mf.NAME, None, None, None, "manifest", str(error))]
    with opened:
        return _Check(opened).run(progress, threads)


@dataclass(frozen=True, slots=True)
class _Job:
    """A piece of work: about how many bytes, and what finds the problems in them."""

    nbytes: int
    check: Callable[[Buffer], Iterable[Problem]]


class _Check:
    """One pass over one step."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.store = checkpoint.store
        self.manifest = checkpoint.manifest
        self.settings: Settings = checkpoint.settings
        self.problems: list[Problem] = []
        self.sizes = dict(self.store.list())
        self.named = {mf.NAME}
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def run(self, progress: Progress | None, threads: int | None) -> list[Problem]:
        self._check_manifest()
        self._work(sum(self.sizes.values()), progress, max(1, threads or self.settings.read_threads))
        self.problems += [
            Problem(path, None, None, None, "extra", f"{size} bytes that the step does not name")
            for path, size in self.sizes.items()
            if path not in self.named
        ]
        return sorted(self.problems, key=lambda p: (p.path, -1 if p.offset is None else p.offset, p.kind))

    # --- the work --------------------------------------------------------------------------------------

    def _work(self, total: int, progress: Progress | None, threads: int) -> None:
        io_bytes = self.settings.io_bytes
        pool = BufferPool(threads * slot_bytes(io_bytes), io_bytes)
        todo, done = self._jobs(), 0  # jobs are made as they are taken: a step may have millions of extents

        def worker() -> None:
            nonlocal done
            buffer = pool.acquire()
            try:
                while not self._stop.is_set():
                    with self._lock:
                        job = next(todo, None)
                    if job is None:
                        return
                    found = list(job.check(buffer))
                    with self._lock:
                        self.problems += found
                        done += job.nbytes
                        if progress is not None:
                            progress(min(done, total), total)
            except BaseException:
                self._stop.set()
                raise
            finally:
                pool.release(buffer)

        try:
            with ThreadPoolExecutor(threads, "ckptfs-verify") as workers:
                futures = [workers.submit(worker) for _ in range(threads)]
                try:
                    for future in futures:
                        future.result()
                except BaseException:
                    self._stop.set()
                    raise
        finally:
            pool.close()
        if progress is not None and done != total:  # what is missing or extra has no bytes to check
            progress(total, total)

    def _jobs(self) -> Iterator[_Job]:
        yield from self._document_jobs()
        for path, (size, checksum) in self.manifest.assets.items():
            yield from self._hashed(f"assets/{path}", size, bytes.fromhex(checksum), "asset")
        for param in self.manifest.params.values():
            for number in range(param.layout.files):
                yield from self._file_jobs(param, number)

    def _expect(self, path: str, size: int | None, param: Param | None = None) -> int | None:
        """The size of a file that has to be there (None: it is not); what is wrong with it is noted."""
        self.named.add(path)
        have = self.sizes.get(path)
        array = param.name if param else None
        if have is None:
            self.problems.append(Problem(path, array, None, None, "missing", "the file is missing"))
        elif size is not None and have != size:
            what = f"{size - have} bytes are missing at its end" if have < size else f"{have - size} bytes too many"
            message = f"the file has {have} bytes, it was saved with {size}: {what}"
            self.problems.append(Problem(path, array, None, min(have, size), "size", message))
        return have

    # --- array data ------------------------------------------------------------------------------------

    def _file_jobs(self, param: Param, number: int) -> Iterator[_Job]:
        path, table = param.file(number), param.extents
        first, last = (int(n) for n in np.searchsorted(table.file, [number, number + 1]))
        data_bytes = int(table.length[first:last].sum())
        index_bytes = param.layout.index_bytes
        have = self._expect(path, data_bytes + index_bytes, param)
        if have is None:
            return
        for a, b in self._units(param, first, last):
            end = int(table.offset[b - 1] + table.length[b - 1])
            if end <= have:
                yield self._extents_job(param, path, a, b)
            elif b - a > 1:  # the file ends inside: what is there is checked all the same
                yield from (
                    self._extents_job(param, path, n, n + 1)
                    for n in range(a, b)
                    if int(table.offset[n] + table.length[n]) <= have
                )
        if index_bytes and have >= data_bytes + index_bytes:
            yield self._index_job(param, path, number, data_bytes)

    def _units(self, param: Param, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Neighbouring extents of one file that fit into one request, or single larger ones."""
        lengths = param.extents.length[first:last].tolist()
        at = begin = 0
        size = 0
        for at, length in enumerate(lengths):
            if size and size + length > self.settings.io_bytes:
                yield first + begin, first + at
                begin, size = at, 0
            size += length
        if size:
            yield first + begin, first + at + 1

    def _extents_job(self, param: Param, path: str, first: int, last: int) -> _Job:
        table = param.extents
        start = int(table.offset[first])
        length = int(table.offset[last - 1] + table.length[last - 1]) - start

        def check(buffer: Buffer) -> Iterator[Problem]:
            if last - first > 1:
                try:
                    view = buffer.at(start, length)
                    self.store.read_into(path, start, view)
                except CkptError:
                    pass  # one by one, below: that names those that cannot be read
                else:
                    for n in range(first, last):
                        low = int(table.offset[n]) - start
                        yield from self._compare(param, path, n, digest(view[low : low + int(table.length[n])]))
                    return
            for n in range(first, last):
                offset = int(table.offset[n])
                try:
                    found = self._stream_digest(path, offset, int(table.length[n]), buffer)
                except CkptError as error:
                    yield Problem(path, param.name, n, offset, *_failure(error))
                else:
                    yield from self._compare(param, path, n, found)

        return _Job(length, check)

    @staticmethod
    def _compare(param: Param, path: str, number: int, found: bytes) -> Iterator[Problem]:
        if found != param.hashes[number * HASH_BYTES : (number + 1) * HASH_BYTES]:
            offset, length = int(param.extents.offset[number]), int(param.extents.length[number])
            message = f"extent {number} ({length} bytes at offset {offset}) differs from what was saved"
            yield Problem(path, param.name, number, offset, "checksum", message)

    def _stream_digest(self, path: str, offset: int, length: int, buffer: Buffer) -> bytes:
        state = xxhash.xxh3_128()
        step = self.settings.io_bytes
        for at in range(offset, offset + length, step):
            view = buffer.at(at, min(step, offset + length - at))
            self.store.read_into(path, at, view)
            state.update(view)
        return state.digest()

    def _index_job(self, param: Param, path: str, number: int, data_bytes: int) -> _Job:
        size = param.layout.index_bytes

        def check(_: Buffer) -> Iterator[Problem]:
            try:
                found = self.store.read(path, data_bytes, data_bytes + size)
            except CkptError as error:
                yield Problem(path, param.name, None, data_bytes, *_failure(error))
                return
            wanted = zarr3.shard_index(param.index_entries(number))
            if found != wanted:
                at = data_bytes + _first_difference(found, wanted)
                message = f"the shard index ({size} bytes at offset {data_bytes}) is wrong from offset {at} on"
                yield Problem(path, param.name, None, at, "index", message)

        return _Job(size, check)

    # --- documents and assets --------------------------------------------------------------------------

    def _hashed(self, path: str, size: int, wanted: bytes, what: str) -> Iterator[_Job]:
        have = self._expect(path, size)
        if have is None or have < size:
            return

        def check(buffer: Buffer) -> Iterator[Problem]:
            try:
                found = self._stream_digest(path, 0, size, buffer)
            except CkptError as error:
                yield Problem(path, None, None, None, *_failure(error))
                return
            if found != wanted:
                yield Problem(path, None, None, 0, "checksum", f"the {what} differs from what was saved")

        yield _Job(size, check)

    def _check_manifest(self) -> None:
        """The manifest was parsed when the step was opened; what counts is what the store has now."""
        try:
            again = Manifest.parse(self.store.read(mf.NAME))
        except CkptError as error:
            kind = "missing" if isinstance(error, NotFoundError) else "manifest"
            self.problems.append(Problem(mf.NAME, None, None, None, kind, str(error)))
            return
        if again.save_id != self.manifest.save_id:
            message = "the step was replaced by another save since it was opened"
            self.problems.append(Problem(mf.NAME, None, None, None, "manifest", message))

    def _document_jobs(self) -> Iterator[_Job]:
        params = {param.path: param for param in self.manifest.params.values()}
        root = self._root(params)
        for path in zarr3.groups_of(params):
            wanted = dict(root.get(path) or zarr3.group_json())
            wanted.pop("consolidated_metadata", None)
            yield from self._document(f"{path}/zarr.json", zarr3.dump(wanted))
        for param in params.values():
            yield from self._array_document(param)

    def _root(self, params: dict[str, Param]) -> dict[str, Any]:
        """What the root's zarr.json says of every node, {} if it is not to be trusted."""
        path = "zarr.json"
        if self._expect(path, None) is None:
            return {}
        try:
            raw = self.store.read(path)
        except CkptError as error:
            self.problems.append(Problem(path, None, None, None, *_failure(error)))
            return {}
        if digest(raw).hex() != self.manifest.root_hash:
            self.problems.append(Problem(path, None, None, 0, "checksum", "the root group differs from what was saved"))
            return {}
        try:
            nodes: dict[str, Any] = zarr3.load(raw)["consolidated_metadata"]["metadata"]
            listed = set(nodes)
        except (CkptError, KeyError, TypeError) as error:
            self._metadata(path, f"the root group lists no nodes: {error}")
            return {}
        for missing in sorted({*params, *zarr3.groups_of(params)} ^ listed):
            what = "lists" if missing in listed else "does not list"
            self._metadata(path, f"the root group {what} {missing!r}, against the manifest")
        for node in sorted(listed & set(params)):
            param = params[node]
            if digest(zarr3.dump(nodes[node])).hex() != param.zarr_hash:
                self._metadata(path, "the root group describes it in another way than its own zarr.json", param)
        return nodes

    def _metadata(self, path: str, message: str, param: Param | None = None) -> None:
        self.problems.append(Problem(path, param.name if param else None, None, None, "metadata", message))

    def _document(self, path: str, wanted: bytes) -> Iterator[_Job]:
        if self._expect(path, None) is None:
            return

        def check(_: Buffer) -> Iterator[Problem]:
            try:
                found = self.store.read(path)
            except CkptError as error:
                yield Problem(path, None, None, None, *_failure(error))
                return
            if found != wanted:
                yield Problem(
                    path, None, None, _first_difference(found, wanted), "metadata", "the group differs from the root's"
                )

        yield _Job(len(wanted), check)

    def _array_document(self, param: Param) -> Iterator[_Job]:
        path = f"{param.path}/zarr.json"
        have = self._expect(path, None, param)
        if have is None:
            return

        def check(_: Buffer) -> Iterator[Problem]:
            try:
                raw = self.store.read(path)
                if digest(raw).hex() != param.zarr_hash:
                    yield Problem(path, param.name, None, 0, "checksum", "zarr.json differs from what was saved")
                    return
                zarr3.parse_array_json(raw).check(param.layout, param.dtype, param.codec)
            except FormatError as error:
                yield Problem(path, param.name, None, None, "metadata", str(error))
            except CkptError as error:
                yield Problem(path, param.name, None, None, *_failure(error))

        yield _Job(have, check)


def _failure(error: CkptError) -> tuple[str, str]:
    """Kind and message for an error of the store."""
    if isinstance(error, NotFoundError):
        return "missing", "the file vanished while it was checked"
    if isinstance(error, CorruptError):
        return "size", str(error)
    prefix = "" if isinstance(error, StorageError) else f"{type(error).__name__}: "
    return "unreadable", f"{prefix}{error}"


def _first_difference(found: bytes, wanted: bytes) -> int:
    for at, (a, b) in enumerate(zip(found, wanted, strict=False)):
        if a != b:
            return at
    return min(len(found), len(wanted))
