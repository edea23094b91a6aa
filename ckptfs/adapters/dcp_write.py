"""The StorageWriter: DCP decides which rank writes which part, ckptfs's engines write and commit.

Rules that DCP imposes: what is true of one save only never travels in a plan (see dcp_plan); the writer can be pickled
at any time; every error of every thread is raised in the rank where it happened, from where DCP brings it to all ranks.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
import uuid
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter as TorchWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ckptfs import commit, dtypes, saveplan, tree, zarr3
from ckptfs.errors import CkptError, ExistsError, MismatchError, SaveError
from ckptfs.ranges import merge
from ckptfs.report import Finished
from ckptfs.run import parts_of, patterns_of, read_assets
from ckptfs.settings import Settings
from ckptfs.shards import hold
from ckptfs.stage import Pools, Stager, Started, affordable_bytes, jobs_of
from ckptfs.storage import open_store
from ckptfs.write import Pipeline

from . import dcp_plan, dcp_tree
from .dcp_paths import locate
from .dcp_plan import Attached, Report, Ticket

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

    from ckptfs.box import Box
    from ckptfs.saveplan import Array
    from ckptfs.storage import Store

_REPORT = "ckptfs report"  # not the name of anything saved: the index of a rank's one result
_writing = threading.Lock()  # saves of one process take turns: they share their buffers
_pools: dict[int, Pools] = {}
_claims: dict[tuple[str, str], commit.Claim] = {}  # a writer is not told when another rank has failed; the next one is


class StorageWriter(TorchWriter):
    """Saves one checkpoint per call of `dcp.save`, `dcp.async_save` in a thread or in a process.

    `path`: a folder for this checkpoint, `run@step`, or any fsspec URL of either. The arguments up to
    `serialization_format` are FileSystemWriter's; those that speak of its files have no meaning here.
    `overwrite` replaces a ckptfs checkpoint at the same path by one atomic exchange, after everything is durable.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Any = None,
        serialization_format: Any = None,
        *,
        compression: Any = None,
        split: Mapping[str, Sequence[int]] | None = None,
        allow_pickle: bool = False,
        assets: Any = None,
        maps: Mapping[str, Any] | None = None,
        settings: Settings | None = None,
        **storage_options: Any,
    ) -> None:
        del single_file_per_rank, sync_files, per_thread_copy_ahead, cache_staged_state_dict, serialization_format
        if _extensions:
            raise MismatchError(
                "stream extensions belong to torch's own file format; compression='zstd' compresses here"
            )
        self.path = path
        self.overwrite = overwrite
        self.settings = settings or Settings()
        if thread_count > self.settings.write_threads:
            self.settings = replace(self.settings, write_threads=thread_count)
        self.compression, self.split = patterns_of(compression), parts_of(split)
        self.allow_pickle, self.maps, self._options = allow_pickle, dict(maps or {}), storage_options
        self._assets = assets
        self._rank = 0
        self._start()

    def _start(self) -> None:
        self.url, self._name, self._step = locate(self.path)
        self._alone = False  # no other rank can still be writing when this one fails
        self._ticket: Ticket | None = None
        self._claim: commit.Claim | None = None
        self._end: weakref.finalize[..., Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ticket": None, "_claim": None, "_end": None}

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        try:
            locate(checkpoint_id)
        except CkptError:
            return False
        return True

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.path, save_id=self._ticket.save_id if self._ticket else None)

    def _store(self) -> Store:
        return open_store(self.url, **self._options)

    # --- DCP's steps, in their order -------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._forsake()
        if checkpoint_id:
            self.path = checkpoint_id
        self._start()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        del is_coordinator, args
        self._forsake()
        dcp_plan.clear_mailbox()
        self._rank = kwargs.get("rank") or 0
        dist = torch.distributed
        if not kwargs.get("use_collectives", True) and dist.is_initialized() and dist.get_world_size() > 1:
            raise MismatchError("use_collectives=False would make a checkpoint of every rank: ckptfs saves one for all")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Coordinator: see that the target may be written, name the folder, decide the layouts."""
        store = self._store()
        self._check_target(store)
        self._alone = len(plans) == 1
        self._ticket = Ticket(self.url, self._name, uuid.uuid4().hex)
        attached = dcp_plan.attach(plans, self._ticket, self._plan_options(store))
        if store.positional:
            folder = self._folder(store, self._ticket)
            store.sub(folder).make_dirs()  # type: ignore[attr-defined]
            self._claim = _claims[self.url, self._name] = commit.Claim(store, folder)  # type: ignore[arg-type]
            self._end = weakref.finalize(self, _abandon, store, folder, self._claim)
        return [replace(plan, storage_data=one) for plan, one in zip(plans, attached, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        ticket = self._ticket or dcp_plan.take_ticket(self.url, self._name)
        attached = plan.storage_data if isinstance(plan.storage_data, Attached) else None
        store = self._store()
        try:
            raw, size = self._write(store, ticket, attached, plan, planner)
        except BaseException:
            if self._alone:
                self._forsake()
            raise
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(MetadataIndex(_REPORT), size, raw)])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Coordinator: from the reports to a committed step, or an error and no step."""
        ticket, store = self._ticket, self._store()
        if ticket is None:
            raise CkptError("finish without prepare_global_plan: this writer did not coordinate the save")
        reports = [dcp_plan.unpack(one.storage_data) for some in results for one in some if one.index.fqn == _REPORT]
        arrays, written, values = dcp_plan.unite(reports)
        folder = self._folder(store, ticket)
        target = self._claim.store(store, folder) if self._claim is not None else store.sub(folder)  # type: ignore[arg-type]
        for array in arrays:
            if array.layout.nbytes == 0:
                commit.put(target, f"{zarr3.path_of_name(array.name)}/zarr.json", commit.array_document(array))
        node = tree.dumps(_tree_of(metadata, values)).decode()
        extras: list[dict[str, Any]] = [{"small": {}, "node": node}, *({"small": {}} for _ in reports[1:])]
        pieces = [[Finished.of(written)], *([] for _ in reports[1:])]
        manifest, _ = commit.assemble(
            target,
            saveplan.SavePlan(arrays, {}, {}, self.settings.extent_bytes),
            list(zip(pieces, extras, strict=True)),
            save_id=ticket.save_id,
            step=self._step,
            assets=read_assets(self._assets),
            maps=self.maps,
        )
        commit.publish(store, self._name, folder, commit.dump(manifest), overwrite=self.overwrite, claim=self._claim)
        metadata.storage_meta = self.storage_meta()
        self._release()
        self._ticket = None

    # --- parts -----------------------------------------------------------------------------------------

    def _check_target(self, store: Store) -> None:
        left = _claims.pop((self.url, self._name), None)
        if left is not None:
            left.close()
        where = f"{store.url}/{self._name}"
        if commit.exists(store, self._name):
            if not self.overwrite:
                raise ExistsError(f"{where} exists already; pass overwrite=True to replace it")
            if not store.positional:
                raise MismatchError(f"{where}: a step in an object store cannot be replaced safely: use another step")
        elif store.positional:
            store.make_dirs()  # type: ignore[attr-defined]
            if self._name in store.children()[0] and any(store.children(self._name)):
                raise ExistsError(
                    f"{where} is a folder with other files in it: give the checkpoint a folder of its own"
                )
        else:
            store.remove_tree(self._name)  # parts of a save that did not commit
        commit.collect(store, "step-" if self._step is not None else self._name)

    def _folder(self, store: Store, ticket: Ticket) -> str:
        return commit.saving_name(self._name, ticket.save_id) if store.positional else self._name

    def _plan_options(self, store: Store) -> saveplan.Options:
        s = self.settings
        sizes = s.chunk_bytes, s.block_bytes, s.extent_bytes
        return saveplan.Options(store.positional, *sizes, self.compression, split=self.split)

    def _write(
        self, store: Store, ticket: Ticket, attached: Attached | None, plan: SavePlan, planner: SavePlanner
    ) -> tuple[bytes, int]:
        """Everything of this rank: written, durable, and reported."""
        options = self._plan_options(store)
        arrays, pieces, values = self._resolve(plan, planner, attached, options)
        ranges = {
            i: merge([r for box, _ in pieces[i] for r in array.layout.ranges(box)]) for i, array in enumerate(arrays)
        }
        extent_bytes = attached.extent_bytes if attached is not None else self.settings.extent_bytes
        own = saveplan.SavePlan(arrays, {i: r for i, r in ranges.items() if r}, {}, extent_bytes)
        target = store.sub(self._folder(store, ticket))
        if target.positional:
            target.make_dirs()  # type: ignore[attr-defined]
        with _writing:
            pipeline = self._run_pipeline(target, own, pieces)
        for number, array in enumerate(arrays):
            if ranges[number] and ranges[number][0][0] == 0:
                commit.put(target, f"{zarr3.path_of_name(array.name)}/zarr.json", commit.array_document(array))
        if target.positional:
            target.syncfs()  # type: ignore[attr-defined]
        return dcp_plan.pack(Report(arrays, pipeline.written, values), extent_bytes), pipeline.stored_bytes

    def _run_pipeline(self, target: Store, plan: saveplan.SavePlan, pieces: list[list[tuple[Box, Any]]]) -> Pipeline:
        settings = self.settings
        jobs = jobs_of(plan, settings.io_bytes, settings.small_file_bytes)
        largest = max((p.at + p.stop - p.start for job in jobs for p in job.parts), default=1)
        pools = _pools.setdefault(settings.io_bytes, Pools(settings.io_bytes))
        pool = pools.fit(affordable_bytes(settings.buffer_bytes), largest)
        stager = Stager(plan, pieces, Started.now(), pool)
        pipeline = Pipeline(target, plan, jobs, stager, pool, settings)
        try:
            if pipeline.files is not None:
                pipeline.files.reserve()
            for job in jobs:
                pipeline.feed(job)
            pipeline.finish()
        except BaseException as error:
            pipeline.cancel(error)
            raise
        return pipeline

    def _resolve(
        self, plan: SavePlan, planner: SavePlanner, attached: Attached | None, options: saveplan.Options
    ) -> tuple[list[Array], list[list[tuple[Box, Any]]], dict[str, Any]]:
        """This rank's items as arrays with their live parts, and its other values as trees."""
        number: dict[str, int] = {}
        arrays: list[Array] = []
        pieces: list[list[tuple[Box, Any]]] = []
        values: dict[str, Any] = {}
        for item in plan.items:
            name = dcp_tree.name_of(dcp_tree.path_of(item.index.fqn, plan.planner_data))
            if item.type == WriteItemType.BYTE_IO:
                values[item.index.fqn], leaves = self._value(item, name, planner)
                for leaf in leaves:
                    held = hold(leaf.name, leaf.value, self._rank)
                    if held.desc.spread[0] != "whole":
                        raise MismatchError(
                            f"{leaf.name!r} is spread over ranks inside a value that DCP does not look into"
                        )
                    dtype = dtypes.of(held.desc.dtype)
                    layout = dcp_plan.ordinary(held.desc.shape, dtype, options)
                    arrays.append(saveplan.Array(leaf.name, dtype, layout, None))
                    pieces.append([(box, data) for box, data in held.pieces if box.size])
                continue
            data, box = _live(item, planner), dcp_plan.box_of(item)
            if name not in number:
                number[name] = len(arrays)
                arrays.append(dcp_plan.array_of(item, name, dtypes.of(data.dtype), attached, options))
                pieces.append([])
            if box.size:
                pieces[number[name]].append((box, data))
        return arrays, pieces, values

    def _value(self, item: WriteItem, name: str, planner: SavePlanner) -> tuple[Any, list[tree.Leaf]]:
        """A value that is no tensor as a tree, its arrays named below `name`."""
        value = _plain_value(item, planner, allow_pickle=self.allow_pickle)
        try:
            node, leaves = tree.flatten(value, rank=self._rank, allow_pickle=self.allow_pickle)
        except MismatchError as error:
            raise MismatchError(f"{item.index.fqn!r}: {error}") from None
        alone = isinstance(node, dict) and node.get("$") == "array"
        named = [tree.Leaf(name if alone else f"{name}/{leaf.name}", leaf.value, leaf.path) for leaf in leaves]
        return dcp_tree.under(name, node), named

    def _forsake(self) -> None:
        """Clear away what an earlier save of this writer left, if it failed on another rank."""
        self._ticket = None
        if self._end is not None:
            self._end()
        self._release()

    def _release(self) -> None:
        if self._end is not None:
            self._end.detach()
            self._end = None
        claim, self._claim = self._claim, None
        if claim is not None:
            claim.close()
            if _claims.get((self.url, self._name)) is claim:
                del _claims[self.url, self._name]


def _abandon(store: Store, folder: str, claim: commit.Claim) -> None:
    """When the coordinator's writer goes without having committed: a rank has failed, and its space is wanted back.

    Not earlier: a rank that took the folder away at its own failure would make the others fail for want of it.
    """
    claim.close()
    with contextlib.suppress(CkptError, OSError):
        store.remove_tree(folder)


def _live(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    data = planner.resolve_data(item)
    if not isinstance(data, torch.Tensor):
        raise MismatchError(f"{item.index.fqn!r}: the planner gave a {type(data).__name__} for a tensor")
    data = data.detach()
    box = dcp_plan.box_of(item)
    if tuple(data.shape) != box.shape:
        raise MismatchError(f"{item.index.fqn!r}: the planner gave shape {list(data.shape)} for {box}")
    return data


def _plain_value(item: WriteItem, planner: SavePlanner, *, allow_pickle: bool) -> object:
    """The value itself where the planner has it, else what its torch.save bytes hold, without running their code."""
    ours = isinstance(planner, DefaultSavePlanner) and all(
        getattr(type(planner), method) is getattr(DefaultSavePlanner, method)
        for method in ("resolve_data", "transform_object")
    )
    if ours:
        return planner.lookup_object(item.index)  # type: ignore[attr-defined]
    data = planner.resolve_data(item)
    if not isinstance(data, io.BytesIO):
        raise MismatchError(f"{item.index.fqn!r}: the planner gave a {type(data).__name__} for a value")
    data.seek(0)
    try:
        return torch.load(data, map_location="cpu", weights_only=not allow_pickle)
    except Exception as error:
        raise MismatchError(
            f"{item.index.fqn!r} cannot be stored without pickle: {error}. Store plain data, or pass allow_pickle=True"
        ) from None


def _tree_of(metadata: Metadata, values: Mapping[str, Any]) -> Any:
    leaves = []
    for fqn, entry in metadata.state_dict_metadata.items():
        path = dcp_tree.path_of(fqn, metadata.planner_data)
        if isinstance(entry, BytesStorageMetadata):
            if fqn not in values:
                raise SaveError(f"no rank has written the value {fqn!r}; nothing was committed")
            leaves.append((path, values[fqn]))
        else:
            leaves.append((path, {"$": "array", "name": dcp_tree.name_of(path), "as": "torch"}))
    return dcp_tree.nest(leaves)
