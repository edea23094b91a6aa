"""`Run.mount()`: a run's views mounted for the time of a `with` block, by a process of their own.

The server is always another process: one that serves a mount and reads from it waits for itself.
"""

from __future__ import annotations

import importlib
import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from ckptfs.errors import MismatchError, StorageError
from ckptfs.storage import MemoryStore
from ckptfs.views.config import ViewConfig

if TYPE_CHECKING:
    from ckptfs.storage import Store

BUILDER = "ckptfs.views:build"


def mount(
    store: Store,
    mountpoint: str | os.PathLike[str] | None = None,
    *,
    step: int | str | None = None,
    backend: str = "auto",
    options: Any = None,
    **view: Any,
) -> AbstractContextManager[str]:
    """`with run.mount() as folder:` — at `mountpoint`, or at a new temporary folder.

    `step` is a number or "latest"; without one, all steps are shown. `options` is a ckptfs_fuse.MountOptions; `view`
    are fields of ViewConfig, such as subtree="hf", verify=True or storage={...}.
    """
    if isinstance(store, MemoryStore):
        raise MismatchError(f"{store.url} lives in this process, a mount is served by another: copy the run to a disk")
    url = store.url if step is None else f"{store.url}@{step}"
    config = ViewConfig(url=url, **view)
    try:
        fuse = importlib.import_module("ckptfs_fuse")
    except ModuleNotFoundError as error:
        raise StorageError(f"mounting is not possible here: {error}; install ckptfs with ckptfs_fuse") from None
    mounted: AbstractContextManager[str] = fuse.Mount(
        BUILDER, config.to_dict(), mountpoint, what=url, backend=backend, options=options
    )
    return mounted
