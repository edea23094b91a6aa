"""`zarr/`: the step's own folder as it is stored, also when it lies in an object store.

Sizes come from the manifest: documents and shard indexes are pure functions of it, chunk files have known lengths.
On a local file system every chunk file is one backing file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ckptfs import zarr3
from ckptfs.commit import documents
from ckptfs.errors import NotFoundError
from ckptfs.loadplan import Request
from ckptfs.manifest import NAME, Param, digest
from ckptfs.read import check_extents
from ckptfs.views.arrays import tree
from ckptfs.views.files import StepFile, WholeFile
from ckptfs.views.nodes import BytesFile, Dir, File, Node, Range, Segment
from ckptfs.views.windows import produced

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptfs.views.source import Source

_WINDOW_BYTES = 4 << 20


def zarr_dir(source: Source) -> Dir:
    """Blocking on object stores: a document that this version would write differently has to be asked for."""

    def children() -> dict[str, Node]:
        with source.working():
            return tree(source, _entries(source))

    return Dir(
        children,
        version=source.version,
        mtime_ns=source.mtime_ns,
        blocking=not source.is_local,
    )


def _entries(source: Source) -> Iterator[tuple[str, Node]]:
    manifest = source.manifest
    params = manifest.params
    shared, _ = documents(params)
    for path, data in shared.items():
        expected = manifest.root_hash if path == "zarr.json" else None
        yield path, _document(source, path, data, expected)
    for param in params.values():
        path = f"{param.path}/zarr.json"
        data = zarr3.dump(zarr3.array_json(param.layout, param.dtype, param.codec))
        yield path, _document(source, path, data, param.zarr_hash)
        for number in range(param.layout.files):
            yield param.file(number), _chunk_file(source, param, number)
    for path in manifest.assets:
        yield f"assets/{path}", asset(source, path, f"zarr/assets/{path}")
    yield NAME, stored(source, NAME, f"zarr/{NAME}", source.manifest_bytes)


def _document(source: Source, path: str, data: bytes, expected: str | None) -> File:
    if expected is not None and digest(data).hex() != expected:
        return stored(source, path, f"zarr/{path}", source.store.size(path))
    return BytesFile(data, version=f"{source.version}/zarr/{path}", mtime_ns=source.mtime_ns)


def _chunk_file(source: Source, param: Param, number: int) -> StepFile:
    path, shown = param.file(number), f"zarr/{param.file(number)}"
    stored_bytes = _stored_bytes(param, number)
    size = stored_bytes + param.layout.index_bytes
    if source.is_local and not source.config.verify:
        return WholeFile(source, shown, size, path, param=param)

    def segments() -> list[Segment]:
        index = zarr3.shard_index(param.index_entries(number)) if param.layout.sharded else b""
        return [_data(source, param, number, stored_bytes), index]

    return StepFile(source, shown, size, segments, blocking=not source.is_local, param=param)


def _stored_bytes(param: Param, number: int) -> int:
    if param.codec is not None:
        return sum(param.stored_in(number))
    return param.layout.file_bytes(number) - param.layout.index_bytes


def _data(source: Source, param: Param, number: int, size: int) -> Segment:
    """The extents of one file, checked."""
    if source.is_local:
        return Range(source.path(param.file(number)), 0, size, lambda a, n: check(source, param, number, a, n))
    # Whole extents can be checked; windows that end between them would read some twice.
    table = param.extents
    low, high = np.searchsorted(table.file, [number, number + 1])
    longest = int(table.length[low:high].max(initial=1))
    window_bytes = max(1, _WINDOW_BYTES // longest) * longest

    def make(start: int, view: memoryview) -> None:
        source.store.read_into(param.file(number), start, view)
        for extent in range(low, high):
            a, n = int(table.offset[extent]), int(table.length[extent])
            if start <= a and a + n <= start + len(view):
                request = Request(number, a, n, 0, 0, extent, extent + 1)
                check_extents(param, request, view[a - start : a - start + n], source.url)

    return produced(source.shared.windows, (source.version, "zarr", param.path, number), size, window_bytes, make)


def check(source: Source, param: Param, number: int, offset: int, length: int) -> None:
    """Check the extents of bytes [offset, offset + length) of one file."""
    table = param.extents
    low, high = np.searchsorted(table.file, [number, number + 1])
    ends = table.offset[low:high] + table.length[low:high]
    first = low + int(np.searchsorted(ends, offset, side="right"))
    last = low + int(np.searchsorted(table.offset[low:high], offset + length, side="left"))
    source.check_numbers(param, first, last)


def asset(source: Source, path: str, shown: str) -> StepFile:
    size, expected = source.manifest.assets[path]
    return stored(source, f"assets/{path}", shown, size, expected)


def stored(source: Source, path: str, shown: str, size: int, expected: str | None = None) -> StepFile:
    """A file of the step as it is; `expected`: the checksum of the whole, for small files."""
    if source.is_local and not (source.config.verify and expected):
        return WholeFile(source, shown, size, path)

    def make(_start: int, view: memoryview) -> None:
        try:
            source.store.read_into(path, 0, view)
        except NotFoundError as error:
            raise source.missing(path) from error
        if expected is not None and digest(view).hex() != expected:
            raise source.differs(path)

    def segments() -> list[Segment]:
        return [produced(source.shared.windows, (source.version, shown), size, size, make)] if size else []

    return StepFile(source, shown, size, segments, blocking=True)
