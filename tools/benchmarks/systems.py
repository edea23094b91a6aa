"""The systems that are compared. Each saves and loads the same rows of the same tensors, in place, durable.

A system that is missing says why; nothing stands in for it. Where a library leaves its files in the page cache, they
are synced inside the measured time, because all are measured to the same standard.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import copy_bytes, raw_read, raw_write, sync_tree
from benchmarks.model import State, rows_of

CHUNK_BYTES = 8 << 20


@dataclass
class Job:
    """What a rank brings along: its state, the mesh of the ranks that take part, and a barrier over them."""

    state: State
    mesh: Any
    barrier: Callable[[], None]

    def tensors(self) -> dict[str, Any]:
        """DTensors where there are several ranks; plain tensors alone."""
        return self.state.distributed(self.mesh) if self.state.size > 1 else dict(self.state.local)


class System:
    """One way to save and load. `save` and `load` are called by every rank at the same time."""

    name = ""
    needs: tuple[str, ...] = ()
    blocked_s: float | None = None  # how long the last save kept its caller, where that is less than the whole

    def missing(self) -> str | None:
        """Why it cannot run here."""
        for module in self.needs:
            try:
                found = importlib.util.find_spec(module)
            except ModuleNotFoundError:
                found = None
            if found is None:
                return f"{module} is not there"
        return None

    def save(self, job: Job, folder: Path) -> None:
        raise NotImplementedError

    def load(self, job: Job, folder: Path) -> None:
        raise NotImplementedError

    def place(self, folder: Path) -> Path:
        """Where the files of this save lie."""
        return folder

    # A peer in an environment of its own works in a process of its own, with a state of its own.

    def open(self, job: Job, folder: Path) -> None:
        """Before the first save or load of this job."""

    def close(self) -> None:
        pass

    def process_of(self, job: Job) -> int:
        """The process that is measured."""
        return os.getpid()

    def zero(self, job: Job) -> None:
        job.state.zero()

    def fingerprint(self, job: Job) -> str:
        return job.state.fingerprint()


class Raw(System):
    """The limit: one file a rank, O_DIRECT, 4 threads, nothing but the bytes."""

    name = "raw"

    def save(self, job: Job, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        raw_write(folder / str(job.state.rank), job.state.local_bytes)

    def load(self, job: Job, folder: Path) -> None:
        found = sorted(folder.iterdir())
        for path in found[job.state.rank :: job.state.size]:
            raw_read(path)


class Memcpy(System):
    """The other limit: the same bytes copied within warm memory by each rank's one thread."""

    name = "memcpy"

    def save(self, job: Job, folder: Path) -> None:
        copy_bytes(job.state.local_bytes)

    def load(self, job: Job, folder: Path) -> None:
        copy_bytes(job.state.local_bytes)


PAGES = "raw, whole pages"  # the pages that what is read lies on, as one file
EXTENTS = "raw, whole extents"  # what a checksum covers, of all that is read: the same
UNCHECKED = "ckptfs, no checksums"
SPLIT = "ckptfs, saved with split"  # by one process, in the parts that are read
LIMITS = ("raw", PAGES, EXTENTS, "memcpy")


class Ckptfs(System):
    name = "ckptfs"
    needs = ("ckptfs",)

    def __init__(self) -> None:
        self._runs: dict[Path, Any] = {}
        self._shared: Any = None

    def _run(self, folder: Path) -> Any:
        """One Run for all repetitions, as a training job has: its buffers are warm, like everybody's memory."""
        import ckptfs

        if folder.parent not in self._runs:
            self._runs[folder.parent] = ckptfs.Run(folder.parent / "ckptfs-run")
        return self._runs[folder.parent]

    def save(self, job: Job, folder: Path) -> None:
        self._run(folder).save(_step(folder), {"model": job.tensors()})

    def load(self, job: Job, folder: Path) -> None:
        self._run(folder).load({"model": job.tensors()}, step=_step(folder))

    def place(self, folder: Path) -> Path:
        return folder.parent / "ckptfs-run" / f"step-{_step(folder):08d}"


def _step(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


class TorchDcp(System):
    name = "DCP"
    needs = ("torch.distributed.checkpoint",)

    def save(self, job: Job, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save({"model": job.tensors()}, checkpoint_id=str(folder), no_dist=job.state.size == 1)

    def load(self, job: Job, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp

        group = job.mesh.get_group() if job.mesh is not None else None
        dcp.load({"model": job.tensors()}, checkpoint_id=str(folder), process_group=group, no_dist=job.state.size == 1)


class CkptfsDcp(System):
    """DCP's own calls with ckptfs underneath."""

    name = "DCP + ckptfs"
    needs = ("ckptfs.adapters.dcp",)

    def save(self, job: Job, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp

        from ckptfs.adapters import dcp as adapter

        writer = adapter.StorageWriter(f"{folder.parent}/dcp-run@{_step(folder)}")
        dcp.save({"model": job.tensors()}, storage_writer=writer, no_dist=job.state.size == 1)

    def load(self, job: Job, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp

        from ckptfs.adapters import dcp as adapter

        reader = adapter.StorageReader(f"{folder.parent}/dcp-run@{_step(folder)}")
        group = job.mesh.get_group() if job.mesh is not None else None
        dcp.load({"model": job.tensors()}, storage_reader=reader, process_group=group, no_dist=job.state.size == 1)

    def place(self, folder: Path) -> Path:
        return folder.parent / "dcp-run" / f"step-{_step(folder):08d}"


class TorchSave(System):
    """A file a rank: no other layout can load it, which is its best case."""

    name = "torch.save"
    needs = ("torch",)

    def save(self, job: Job, folder: Path) -> None:
        import torch

        folder.mkdir(exist_ok=True)
        path = folder / f"{job.state.rank}.pt"
        torch.save(job.state.local, path)
        sync_tree(path)

    def load(self, job: Job, folder: Path) -> None:
        import torch

        found = torch.load(folder / f"{job.state.rank}.pt", weights_only=True)
        for name, tensor in job.state.local.items():
            tensor.copy_(found[name])


class Safetensors(System):
    """A file a rank, as with torch.save."""

    name = "safetensors"
    needs = ("safetensors",)

    def save(self, job: Job, folder: Path) -> None:
        from safetensors.torch import save_file

        folder.mkdir(exist_ok=True)
        path = folder / f"{job.state.rank}.safetensors"
        save_file(job.state.local, path)
        sync_tree(path)

    def load(self, job: Job, folder: Path) -> None:
        from safetensors import safe_open

        with safe_open(folder / f"{job.state.rank}.safetensors", framework="pt") as file:
            for name, tensor in job.state.local.items():
                tensor.copy_(file.get_tensor(name))


def chunk_of(shape: tuple[int, ...], size: int) -> list[int]:
    """Rows of about 8 MiB that divide a rank's rows, so that no two ranks write one chunk."""
    rows = max(1, rows_of(shape[0], 0, size)[1])
    row_bytes = 4
    for n in shape[1:]:
        row_bytes *= n
    each = max((n for n in range(1, rows + 1) if rows % n == 0 and n * row_bytes <= CHUNK_BYTES), default=1)
    return [each, *shape[1:]]


class TensorStore(System):
    """Zarr v3 arrays of 8 MiB chunks, every file synced by TensorStore itself."""

    name = "TensorStore zarr3"
    needs = ("tensorstore",)

    def spec(self, folder: Path, name: str, shape: tuple[int, ...], size: int) -> dict[str, Any]:
        grid = {"name": "regular", "configuration": {"chunk_shape": chunk_of(shape, size)}}
        return {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": str(folder / name)},
            "metadata": {
                "shape": list(shape),
                "data_type": "float32",
                "chunk_grid": grid,
                "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
            },
        }

    def _open(self, job: Job, folder: Path, *, create: bool) -> dict[str, Any]:
        import tensorstore as ts

        waiting = {
            name: ts.open(self.spec(folder, name, shape, job.state.size), create=create, open=True)
            for name, shape in job.state.shapes.items()
        }
        return {name: future.result() for name, future in waiting.items()}

    def save(self, job: Job, folder: Path) -> None:
        state = job.state
        if state.rank == 0:
            self._open(job, folder, create=True)
        job.barrier()
        waiting = []
        for name, array in self._open(job, folder, create=False).items():
            low, high = rows_of(state.shapes[name][0], state.rank, state.size)
            if high > low:
                waiting.append(array[low:high].write(state.local[name].numpy()))
        for future in waiting:
            future.result()

    def load(self, job: Job, folder: Path) -> None:
        import tensorstore as ts

        state = job.state
        waiting = []
        for name, array in self._open(job, folder, create=False).items():
            low, high = rows_of(state.shapes[name][0], state.rank, state.size)
            if high > low:
                target = ts.array(state.local[name].numpy(), dtype=ts.float32, copy=False)
                waiting.append(target.write(array[low:high].translate_to[0]))
        for future in waiting:
            future.result()


class ZarrPython(System):
    """The same arrays through zarr-python, which leaves syncing to the caller."""

    name = "zarr-python"
    needs = ("zarr",)

    def save(self, job: Job, folder: Path) -> None:
        import zarr

        state = job.state
        if state.rank == 0:
            for name, shape in state.shapes.items():
                zarr.create_array(
                    folder / name,
                    shape=shape,
                    chunks=tuple(chunk_of(shape, state.size)),
                    dtype="float32",
                    compressors=None,
                )
        job.barrier()
        for name, shape in state.shapes.items():
            low, high = rows_of(shape[0], state.rank, state.size)
            if high > low:
                zarr.open_array(folder / name, mode="r+")[low:high] = state.local[name].numpy()
        job.barrier()
        if state.rank == 0:
            sync_tree(folder)

    def load(self, job: Job, folder: Path) -> None:
        import torch
        import zarr

        state = job.state
        for name, shape in state.shapes.items():
            low, high = rows_of(shape[0], state.rank, state.size)
            if high > low:
                found = zarr.open_array(folder / name, mode="r")[low:high]
                state.local[name].copy_(torch.from_numpy(found))


ALL: tuple[type[System], ...] = (
    Raw,
    Memcpy,
    Ckptfs,
    CkptfsDcp,
    TorchDcp,
    TorchSave,
    Safetensors,
    TensorStore,
    ZarrPython,
)
