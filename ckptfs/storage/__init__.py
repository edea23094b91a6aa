"""Where bytes live: one narrow interface, three stores, and wrappers of the same interface.

Nothing here imports fsspec before a URL needs it, and no submodule is imported before its name is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptfs.storage.base import Store, check_path, join, open_store
    from ckptfs.storage.directio import Buffer, BufferPool, DirectReader, DirectWriter
    from ckptfs.storage.fileops import FileOps
    from ckptfs.storage.local import LocalStore
    from ckptfs.storage.memory import MemoryStore
    from ckptfs.storage.remote import FsspecStore
    from ckptfs.storage.wrap import CountingStore, FaultOps, FaultPlan, FaultStore, RetryStore, SimulatedCrash

_MODULES = {
    "base": ("Store", "check_path", "join", "open_store"),
    "directio": ("Buffer", "BufferPool", "DirectReader", "DirectWriter"),
    "fileops": ("FileOps",),
    "local": ("LocalStore",),
    "memory": ("MemoryStore",),
    "remote": ("FsspecStore",),
    "wrap": ("CountingStore", "FaultOps", "FaultPlan", "FaultStore", "RetryStore", "SimulatedCrash"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Buffer",
    "BufferPool",
    "CountingStore",
    "DirectReader",
    "DirectWriter",
    "FaultOps",
    "FaultPlan",
    "FaultStore",
    "FileOps",
    "FsspecStore",
    "LocalStore",
    "MemoryStore",
    "RetryStore",
    "SimulatedCrash",
    "Store",
    "check_path",
    "join",
    "open_store",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
