"""torch.distributed.checkpoint with ckptfs below: a StorageWriter and a StorageReader.

    dcp.save(state_dict, storage_writer=StorageWriter("run7@1000"))
    dcp.load(state_dict, storage_reader=StorageReader("run7@1000"))

What is written is an ordinary ckptfs step: checksums, no pickle, committed by one rename.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.api import CheckpointException

from ckptfs.errors import CkptError, SaveError

from .dcp_read import StorageReader
from .dcp_write import StorageWriter

if TYPE_CHECKING:
    from collections.abc import Iterator

_CHOOSER = "_storage_setup"  # DCP's function that picks a storage for a checkpoint_id; there is no public way


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Inside, DCP's CheckpointException (a BaseException, which `except Exception` misses) is a ckptfs error."""
    try:
        yield
    except CheckpointException as error:
        raise _plain(error) from error


def _plain(error: CheckpointException) -> CkptError:
    found = {rank: one for rank, (one, _) in error.failures.items()}
    kinds = {type(one) for one in found.values()}
    first = next(iter(found.values()), None)
    if len(kinds) == 1 and isinstance(first, CkptError):
        return first
    text = {rank: f"{type(one).__name__}: {one}" for rank, one in found.items()}
    return SaveError(f"torch.distributed.checkpoint failed in its {error.args[0]!r} phase", text)


def install() -> None:
    """Make `dcp.save(state_dict, checkpoint_id="ckptfs://…")` and `dcp.load` find this module; `uninstall` undoes it.

    DCP has no registry for storages: the function that picks one is replaced in the two modules that call it.
    """
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

    for module in (state_dict_saver, state_dict_loader):
        original = getattr(module, _CHOOSER)
        if not hasattr(original, "ckptfs_original"):
            setattr(module, _CHOOSER, _chooser(original))


def uninstall() -> None:
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

    for module in (state_dict_saver, state_dict_loader):
        original = getattr(getattr(module, _CHOOSER), "ckptfs_original", None)
        if original is not None:
            setattr(module, _CHOOSER, original)


def _chooser(original: Any) -> Any:
    def storage_setup(storage: Any, checkpoint_id: Any, reader: bool = False) -> Any:
        if storage is None and checkpoint_id and os.fspath(checkpoint_id).startswith("ckptfs:"):
            return StorageReader(checkpoint_id) if reader else StorageWriter(checkpoint_id)
        return original(storage, checkpoint_id, reader=reader)

    storage_setup.ckptfs_original = original  # type: ignore[attr-defined]
    return storage_setup


__all__ = ["StorageReader", "StorageWriter", "install", "plain_errors", "uninstall"]
