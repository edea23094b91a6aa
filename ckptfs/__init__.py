"""Checkpoints of distributed training as plain Zarr v3: saved in parallel, loaded anywhere, sliced, mounted."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

from ckptfs.version import __version__ as __version__

# name → module; imported at first use, so that `import ckptfs` stays quick and pulls in nothing heavy.
_PUBLIC = {
    "Checkpoint": "ckptfs.checkpoint",
    "CkptError": "ckptfs.errors",
    "CorruptError": "ckptfs.errors",
    "ExistsError": "ckptfs.errors",
    "FlatShard": "ckptfs.shards",
    "FormatError": "ckptfs.errors",
    "LocalShard": "ckptfs.shards",
    "MismatchError": "ckptfs.errors",
    "NotFoundError": "ckptfs.errors",
    "PerRank": "ckptfs.tree",
    "Run": "ckptfs.run",
    "Save": "ckptfs.asyncsave",
    "SaveError": "ckptfs.errors",
    "Settings": "ckptfs.settings",
    "StorageError": "ckptfs.errors",
    "install_signal_handler": "ckptfs.signals",
    "load": "ckptfs.run",
    "open": ("ckptfs.run", "open_url"),
    "register": "ckptfs.tree",
    "restore": "ckptfs.training",
    "safe_open": "ckptfs.safe_open",
    "save": "ckptfs.run",
    "state_of": "ckptfs.training",
}
__all__ = sorted([*_PUBLIC, "__version__"])  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    where = _PUBLIC.get(name)
    if where is None:
        raise AttributeError(f"module 'ckptfs' has no attribute {name!r}")
    module, attribute = where if isinstance(where, tuple) else (where, name)
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


class _Package(types.ModuleType):
    """Keeps `ckptfs.save` the function: importing the module of that name would put itself in its place."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _PUBLIC and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
