"""`params/`: every array as an .npy file; `raw/`: its bytes and nothing else. Paths are those of the Zarr nodes."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ckptfs import zarr3
from ckptfs.expr import Source as Stored
from ckptfs.views.files import StepFile, WholeFile
from ckptfs.views.nodes import BytesFile, Dir, Link, Node

if TYPE_CHECKING:
    from ckptfs.dtypes import DType
    from ckptfs.manifest import Param
    from ckptfs.views.source import Source

HEADER_BYTES = 4096  # longer than any header here: 64 dimensions of 19 digits take 1,400
README = b"""\
Every array of this checkpoint as an .npy file, as numpy.load reads it, also with mmap_mode="r".

numpy has no bfloat16 and float8. Arrays of these types are stored as raw elements, <V2 (two bytes, little-endian) and
|V1. The attribute user.ckptfs.dtype of each file names its type (getfattr -d FILE). To see them as what they are:

    import numpy, ml_dtypes
    a = numpy.load("params/model/w.npy", mmap_mode="r").view(ml_dtypes.bfloat16)

    import numpy, torch
    t = torch.from_numpy(numpy.load("params/model/w.npy").view(numpy.uint16)).view(torch.bfloat16)

Types: bfloat16 (V2); float8_e4m3fn, float8_e5m2, float8_e4m3fnuz, float8_e5m2fnuz (V1; view as numpy.uint8 for torch).
Tied arrays are links to the one that is stored. Headers are 4096 bytes long, so data begins on a page.
"""


def descr(dtype: DType) -> str:
    """What an .npy header calls the type."""
    if dtype.native:
        return dtype.numpy.str.replace("=", "<")
    return f"<V{dtype.itemsize}" if dtype.itemsize > 1 else "|V1"


def npy_header(dtype: DType, shape: tuple[int, ...]) -> bytes:
    text = f"{{'descr': {descr(dtype)!r}, 'fortran_order': False, 'shape': {shape!r}, }}".encode("ascii")
    magic = b"\x93NUMPY\x01\x00" + struct.pack("<H", HEADER_BYTES - 10)
    return (magic + text).ljust(HEADER_BYTES - 1) + b"\n"


def params_dir(source: Source) -> Dir:
    return Dir(lambda: _params(source), version=source.version, mtime_ns=source.mtime_ns)


def raw_dir(source: Source) -> Dir:
    def children() -> dict[str, Node]:
        return tree(source, ((p.path, raw_file(source, p)) for p in source.manifest.params.values()), _links(source))

    return Dir(children, version=source.version, mtime_ns=source.mtime_ns)


def _params(source: Source) -> dict[str, Node]:
    groups = set(zarr3.groups_of(p.path for p in source.manifest.params.values()))

    def shown(path: str) -> str:
        name = f"{path}.npy"
        return f"{path}%2Enpy" if name in groups else name  # a group of that name was there first

    files = ((shown(p.path), _npy(source, p, shown(p.path))) for p in source.manifest.params.values())
    children = tree(source, files, _links(source, shown))
    children.setdefault("README.txt", BytesFile(README, version="1", mtime_ns=source.mtime_ns))
    return children


def _npy(source: Source, param: Param, path: str) -> StepFile:
    return StepFile(
        source,
        f"params/{path}",
        HEADER_BYTES + param.nbytes,
        lambda: [npy_header(param.dtype, param.shape), *source.segments(param)],
        blocking=not is_direct(source, param),
        param=param,
    )


def raw_file(source: Source, param: Param) -> StepFile:
    path = f"raw/{param.path}"
    if param.layout.exact and source.is_local and not source.config.verify:
        return WholeFile(source, path, param.nbytes, param.file(), param=param)
    return StepFile(
        source, path, param.nbytes, lambda: source.segments(param), blocking=not is_direct(source, param), param=param
    )


def is_direct(source: Source, param: Param) -> bool:
    return source.is_local and (
        param.nbytes == 0 or source.is_direct(Stored(param.name, param.shape, param.dtype.name))
    )


def _links(source: Source, shown: Callable[[str], str] = str) -> Iterable[tuple[str, Node]]:
    """Tied arrays: a link to the one that is stored."""
    for alias, target in source.manifest.aliases.items():
        path, goal = shown(zarr3.path_of_name(alias)), shown(source.manifest.params[target].path)
        yield path, Link(os.path.relpath(goal, os.path.dirname(path)), mtime_ns=source.mtime_ns)


def tree(source: Source, *entries: Iterable[tuple[str, Node]]) -> dict[str, Node]:
    """Nodes by path as nested directories; of two entries of one path the first stays."""
    root: dict[str, Any] = {}
    for some in entries:
        for path, node in some:
            *folders, name = path.split("/")
            here = root
            for folder in folders:
                here = here.setdefault(folder, {})
                if not isinstance(here, dict):
                    break
            else:
                here.setdefault(name, node)
    return {name: _as_node(source, value) for name, value in sorted(root.items())}


def _as_node(source: Source, value: Any) -> Node:
    if not isinstance(value, dict):
        node: Node = value
        return node
    children = {name: _as_node(source, child) for name, child in sorted(value.items())}
    return Dir(children, version=source.version, mtime_ns=source.mtime_ns)
