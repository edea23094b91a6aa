"""The StorageReader: any ckptfs step as DCP wants to see it, whatever saved it.

DCP is told that every tensor is one whole chunk: any layout loads, and planning costs nothing that grows with ranks.
`read_metadata` takes no keyword arguments: with them, a rank that fails leaves the collectives and the others hang.
"""

from __future__ import annotations

import io
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.storage import StorageReader as TorchReader
from torch.futures import Future

from ckptfs import tree
from ckptfs.box import Box
from ckptfs.errors import CkptError, MismatchError
from ckptfs.read import Target
from ckptfs.run import open_checkpoint
from ckptfs.shards import as_numpy

from . import dcp_tree
from .dcp_paths import plain_url

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

    from ckptfs.checkpoint import Checkpoint
    from ckptfs.manifest import Param


class StorageReader(TorchReader):
    """Loads any ckptfs step through `dcp.load`, into any layout; every byte that is used has been verified.

    `path`: a step's folder, `run@step`, `run@latest`, a run (its latest step), or any fsspec URL of these.
    `cast`: convert where the stored element type differs from the target's; without it that is an error.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        _extension_registry: Any = None,
        *,
        cast: bool = False,
        allow_pickle: bool = False,
        **storage_options: Any,
    ) -> None:
        del _extension_registry  # undoes what stream extensions did to torch's own files
        self.path = path
        self.cast, self.allow_pickle, self._options = cast, allow_pickle, storage_options
        self._checkpoint: Checkpoint | None = None
        self._rank = 0
        self._nodes: dict[str, Any] = {}  # what DCP may ask for: flat name → tree

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_checkpoint": None, "_nodes": {}}

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        try:
            open_checkpoint(plain_url(checkpoint_id)).close()
        except (CkptError, OSError, ValueError):
            return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._close()
        if checkpoint_id:
            self.path = checkpoint_id

    def _close(self) -> None:
        if self._checkpoint is not None:
            self._checkpoint.close()
        self._checkpoint = None

    def _open(self) -> Checkpoint:
        if self._checkpoint is None:
            self._checkpoint = open_checkpoint(plain_url(self.path), **self._options)
        return self._checkpoint

    # Without **kwargs on purpose: see the head of this file.
    def read_metadata(self) -> Metadata:
        self._close()  # what is at the path now, also if this reader has read an older one
        checkpoint = self._open()
        dist = torch.distributed
        self._rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        values = _values_of(checkpoint, self._rank)
        entries = _Entries()
        for fqn, (_, node) in values.items():
            tensor = dcp_tree.is_tensor(node)
            entries[fqn] = _whole_tensor(checkpoint.param(node["name"])) if tensor else BytesStorageMetadata()
        whole = dcp_tree.containers(checkpoint.manifest.tree)
        entries.whole = frozenset(whole.keys() - values.keys())
        self._nodes = whole | {fqn: node for fqn, (_, node) in values.items()}
        return Metadata(
            entries,
            planner_data={fqn: path for fqn, (path, _) in values.items()},
            storage_meta=StorageMeta(checkpoint_id=self.path, save_id=checkpoint.manifest.save_id),
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: what is read comes from the manifest, whoever made the metadata."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return replace(plan, storage_data=self._open().manifest.save_id)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        if len({plan.storage_data for plan in plans}) > 1:
            raise MismatchError(f"{plain_url(self.path)}: the ranks found different checkpoints there; name one step")
        return [replace(plan, storage_data=None) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        checkpoint = self._open()
        wanted = _Wanted(checkpoint, cast=self.cast)
        tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        for item in tensors:
            node = self._nodes[item.storage_index.fqn]
            start = tuple(item.storage_offsets)
            box = Box(start, tuple(a + n for a, n in zip(start, item.lengths, strict=True)))
            wanted.add(item, checkpoint.param(node["name"]), box, planner.resolve_tensor(item).detach())
        wanted.read()
        for item, target in zip(tensors, wanted.tensors, strict=True):
            planner.commit_tensor(item, target)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._bytes(checkpoint, item.storage_index.fqn))
        self._close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _bytes(self, checkpoint: Checkpoint, fqn: str) -> io.BytesIO:
        """A value in the form that DCP's planners expect: what torch.save would have written of it."""
        work: list[tuple[Param, list[Target]]] = []

        def array(name: str, tag: dict[str, Any]) -> Any:
            param = checkpoint.param(name)
            if tag["as"] == "numpy":
                made: Any = np.empty(param.shape, dtype=param.dtype.numpy)
            else:
                made = torch.empty(param.shape, dtype=param.dtype.torch, device="cpu")
            work.append((param, [Target(Box.whole(param.shape), as_numpy(made))] if made.size else []))
            return made

        value = tree.unflatten(
            self._nodes[fqn],
            array,
            rank=self._rank,
            allow_pickle=self.allow_pickle,
            read=lambda: checkpoint.read_boxes(work, verify="full"),
        )
        buffer = io.BytesIO()
        torch.save(value, buffer)
        buffer.seek(0)
        return buffer


class _Entries(dict[str, Any]):
    """DCP's entries by flat name. A planner that does not flatten asks for a whole container: it finds a value there.

    Those are found but not listed, for what is listed is loaded by tools that load everything.
    """

    whole: frozenset[str] = frozenset()

    def __contains__(self, fqn: object) -> bool:
        return super().__contains__(fqn) or fqn in self.whole

    def __missing__(self, fqn: str) -> BytesStorageMetadata:
        if fqn in self.whole:
            return BytesStorageMetadata()
        raise KeyError(fqn)


def _values_of(checkpoint: Checkpoint, rank: int) -> dict[str, tuple[dcp_tree.Path, Any]]:
    if checkpoint.manifest.tree is not None:
        return dcp_tree.flat(checkpoint.manifest.tree, rank)
    return {name: ((name,), {"$": "array", "name": name, "as": "torch"}) for name in checkpoint}


def _whole_tensor(param: Param) -> TensorStorageMetadata:
    """One chunk for the whole: any layout loads, and planning costs nothing that grows with ranks."""
    size = torch.Size(param.shape)
    chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(TensorProperties(dtype=param.dtype.torch), size, [chunk])


class _Wanted:
    """Collects what to read; parts that need a conversion or another device go through a copy."""

    def __init__(self, checkpoint: Checkpoint, *, cast: bool) -> None:
        self._checkpoint, self._cast = checkpoint, cast
        self._work: dict[str, tuple[Param, list[Target]]] = {}
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.tensors: list[torch.Tensor] = []

    def add(self, item: Any, param: Param, box: Box, target: torch.Tensor) -> None:
        fqn = item.dest_index.fqn
        if tuple(target.shape) != box.shape:
            raise MismatchError(
                f"{fqn!r}: {list(box.shape)} stored elements for a target of shape {list(target.shape)}"
            )
        same = target.dtype == param.dtype.torch
        if not same and not self._cast:
            have = str(target.dtype).removeprefix("torch.")
            raise MismatchError(f"type of {fqn!r}: {have} here, {param.dtype.name} stored (cast=True converts)")
        self.tensors.append(target)
        if not box.size:
            return
        source = target
        if not same or target.device.type != "cpu":
            source = torch.empty(box.shape, dtype=param.dtype.torch, device="cpu")
            self._copies.append((target, source))
        self._work.setdefault(param.name, (param, []))[1].append(Target(box, as_numpy(source)))

    def read(self) -> None:
        self._checkpoint.read_boxes(self._work.values(), verify="full")
        with torch.no_grad():
            for target, source in self._copies:
                target.copy_(source)
