"""torch.distributed.checkpoint with ckptfs below: a StorageWriter and a StorageReader.

    dcp.save(state_dict, storage_writer=StorageWriter("run7@1000"))
    dcp.load(state_dict, storage_reader=StorageReader("run7@1000"))

What is written is an ordinary ckptfs step: checksums, no pickle, committed by one rename.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from torch.distributed import checkpoint as torch_dcp
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader

from ckptfs.errors import CkptError, SaveError

from .dcp_read import StorageReader
from .dcp_write import StorageWriter

if TYPE_CHECKING:
    from collections.abc import Iterator

_CHOOSER = "_storage_setup"  # DCP's function that picks a storage for a checkpoint_id; there is no public way
_replaced: list[tuple[Any, str, Any]] = []  # (module, name, what stood there)


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Inside, DCP's CheckpointException (a BaseException, which `except Exception` misses) is a ckptfs error."""
    try:
        yield
    except CheckpointException as error:
        raise _plain(error) from error


def _plain(error: CheckpointException) -> CkptError:
    found = {rank: one for rank, (one, _) in error.failures.items()}
    text = {rank: f"{type(one).__name__}: {one}" for rank, one in found.items()}
    first = next(iter(found.values()), None)
    if isinstance(first, CkptError) and {(type(one), str(one)) for one in found.values()} == {
        (type(first), str(first))
    }:
        return first
    if (
        isinstance(first, CkptError)
        and not isinstance(first, SaveError)
        and len({type(one) for one in found.values()}) == 1
    ):
        return type(first)("; ".join(f"rank {rank}: {one}" for rank, one in found.items()))
    phase = str(error.args[0])
    message = f"torch.distributed.checkpoint failed in its {phase!r} phase"
    if phase == "write":
        return SaveError(message, text)
    return CkptError("\n".join([message, *(f"  rank {rank}: {one}" for rank, one in text.items())]))


def install(*, everywhere: bool = False) -> None:
    """Make `dcp.save(state_dict, checkpoint_id="ckptfs://…")` and `dcp.load` find this module; `uninstall` undoes it.

    DCP has no registry for storages: the function that picks one is replaced in the two modules that call it.
    `everywhere`: also for every other path, and for code that names FileSystemWriter and FileSystemReader itself
    (Lightning's sharded strategies, Accelerate). What torch has saved is still read by torch.
    """
    uninstall()
    for module in (state_dict_saver, state_dict_loader):
        original = getattr(module, _CHOOSER)
        _replaced.append((module, _CHOOSER, original))
        setattr(module, _CHOOSER, _chooser(original, everywhere=everywhere))
    if everywhere:
        for name, ours in (("FileSystemWriter", StorageWriter), ("FileSystemReader", _AnyReader)):
            _replaced.append((torch_dcp, name, getattr(torch_dcp, name)))
            setattr(torch_dcp, name, ours)


def uninstall() -> None:
    while _replaced:
        module, name, original = _replaced.pop()
        setattr(module, name, original)


def _chooser(original: Any, *, everywhere: bool) -> Any:
    def storage_setup(storage: Any, checkpoint_id: Any, reader: bool = False) -> Any:
        if storage is None and checkpoint_id:
            by_name = os.fspath(checkpoint_id).startswith("ckptfs:")
            if reader and (by_name or (everywhere and StorageReader.validate_checkpoint_id(checkpoint_id))):
                return StorageReader(checkpoint_id)
            if not reader and (by_name or everywhere):
                return StorageWriter(checkpoint_id)
        return original(storage, checkpoint_id, reader=reader)

    return storage_setup


class _AnyReader(FileSystemReader):
    """In FileSystemReader's place: ours for what is ours."""

    def __new__(cls, path: str | os.PathLike[str], *_args: Any, **_kwargs: Any) -> Any:
        return StorageReader(path) if StorageReader.validate_checkpoint_id(path) else super().__new__(cls)


__all__ = ["StorageReader", "StorageWriter", "install", "plain_errors", "uninstall"]
