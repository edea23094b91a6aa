"""Lightning's CheckpointIO: `Trainer(plugins=[CkptfsCheckpointIO()])`.

Lightning hands the whole checkpoint to one rank (DDP, single device), which saves it alone. Its sharded strategies do
not use CheckpointIO: for them call `ckptfs.adapters.dcp.install(everywhere=True)`, see docs/dcp.md.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from ckptfs import commit
from ckptfs.ranks import Group
from ckptfs.run import load, save
from ckptfs.storage import open_store

from .dcp_paths import locate

try:
    from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
except ImportError:
    from lightning_fabric.plugins import CheckpointIO, TorchCheckpointIO  # type: ignore[assignment, unused-ignore]

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class CkptfsCheckpointIO(CheckpointIO):  # type: ignore[misc, unused-ignore]
    """Checkpoints as ckptfs steps: a `.ckpt` is a folder. Files that Lightning wrote itself are still read."""

    def __init__(
        self,
        *,
        compression: Any = None,
        split: Mapping[str, Sequence[int]] | None = None,
        allow_pickle: bool = False,
        assets: str | Mapping[str, bytes] | None = None,
    ) -> None:
        self.compression, self.split, self.allow_pickle, self.assets = compression, split, allow_pickle, assets

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        if os.path.isfile(path):
            os.remove(path)  # an older checkpoint in one file, which Lightning means to replace
        save(
            path,
            checkpoint,
            overwrite=True,
            compression=self.compression,
            split=self.split,
            allow_pickle=self.allow_pickle,
            assets=self.assets,
            group=Group.solo(),
            **(storage_options or {}),
        )

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if os.path.isfile(path):
            found: dict[str, Any] = TorchCheckpointIO().load_checkpoint(os.fspath(path), map_location, weights_only)
            return found
        tree: dict[str, Any] = load(path, allow_pickle=self.allow_pickle and not weights_only)
        if isinstance(map_location, (str, torch.device)):
            tree = _to(tree, torch.device(map_location))
        return tree

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        base, name, _ = locate(path)
        store = open_store(base)
        if commit.exists(store, name):
            commit.discard(store, name)
        else:
            TorchCheckpointIO().remove_checkpoint(os.fspath(path))


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        for key in value:
            value[key] = _to(value[key], device)
        return value
    return [_to(item, device) for item in value] if type(value) is list else value
