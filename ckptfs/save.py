"""One save, from the caller's tree to the verdict: describe, plan, reserve, stage, write, report, commit.

The life cycle is `PHASES`; each rank walks it once, forward only. Synchronous, snapshot and lazy saves differ only in
which thread copies and how long the caller waits.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptfs import commit, saveplan, tree
from ckptfs.codec import pays, sample_ranges
from ckptfs.errors import CkptError, ExistsError, MismatchError, SaveError, StorageError
from ckptfs.manifest import digest
from ckptfs.ranks import Group, Round, Timeouts
from ckptfs.shards import Held, as_numpy, hold, tie
from ckptfs.stage import Job, Stager, jobs_of
from ckptfs.storage.directio import BufferPool
from ckptfs.version import __version__
from ckptfs.write import Pipeline

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptfs.saveplan import SavePlan
    from ckptfs.settings import Settings
    from ckptfs.storage import Store

PHASES = ("describe", "enter", "plan", "reserve", "stage", "write", "report", "commit")
_SMALL = 64 << 10  # replicated plain tensors up to this size are compared between ranks


@dataclass(frozen=True)
class Request:
    """What to save and how; the same on every rank, but for the tree's own values."""

    name: str  # the folder, once committed
    step: int | None
    topic: str
    overwrite: bool = False
    compression: tuple[tuple[str, str | None], ...] = ()
    assets: Mapping[str, bytes] = field(default_factory=dict)
    maps: Mapping[str, Any] = field(default_factory=dict)
    allow_pickle: bool = False


@dataclass
class Result:
    """What a save did, on this rank and in all."""

    step: int | None
    path: str
    nbytes: int = 0  # bytes of the arrays, all ranks
    stored_bytes: int = 0  # bytes in the store, all ranks
    rank_bytes: int = 0  # bytes this rank wrote
    blocked_s: float = 0.0
    total_s: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    ratio: float = 1.0  # stored / raw, this rank
    codec_gbps: float = 0.0
    notes: list[str] = field(default_factory=list)


class PlanCache:
    """The last plan of a run, with a key that cannot lie: the digests of all ranks' descriptions and the options."""

    def __init__(self) -> None:
        self.key = b"\0" * 16
        self.plan: SavePlan | None = None
        self.jobs: list[Job] = []


class Saver:
    """The work of one save on one rank. `run` does it all; `prepare`, `stage`, `finish` are its parts."""

    def __init__(  # noqa: PLR0913
        self,
        store: Store,
        request: Request,
        group: Group,
        settings: Settings,
        cache: PlanCache,
        pool: BufferPool | None,
    ) -> None:
        self.store, self.request, self.group, self.settings = store, request, group, settings
        self.cache, self.pool = cache, pool
        self.phases: dict[str, float] = {}
        self.result: Result | None = None
        self._own_pool: BufferPool | None = None
        self._round: Round | None = None
        self._pipeline: Pipeline | None = None
        self._phase_at = time.perf_counter()
        self._phase = "describe"

    # --- the parts -------------------------------------------------------------------------------------

    def describe(self, value: object) -> None:
        """Look at the caller's tree: no data is read, nothing is sent."""
        self._enter_phase("describe")
        rank = self.group.rank
        node, leaves = tree.flatten(value, rank=rank, allow_pickle=self.request.allow_pickle)
        self._node = tree.dumps(node)
        self._held, self._aliases = tie([hold(leaf.name, leaf.value, rank) for leaf in leaves])
        self._by_name = {held.desc.name: held for held in self._held}
        self._raw = self._incompressible() if self.request.compression else []
        descs = sorted((held.desc for held in self._held), key=lambda d: d.name)
        self._description = saveplan.describe(descs, self._aliases)

    def _incompressible(self) -> list[str]:
        """Arrays whose samples do not shrink: asked of all ranks before any byte is written."""
        raw = []
        for held in self._held:
            codec = saveplan.codec_for(held.desc.name, held.desc.dtype, self.request.compression)
            if codec is not None and held.pieces and not any(_sample_pays(data, codec) for _, data in held.pieces):
                raw.append(held.desc.name)
        return sorted(raw)

    def enter(self) -> None:
        """Meet the other ranks and agree on the plan."""
        self._enter_phase("enter")
        request, group = self.request, self.group
        raw = "\n".join(self._raw).encode()
        own = digest(self._description + b"\0" + raw)
        hello = own + digest(self._node) + self.cache.key
        leader_error = self._check_target() if group.rank == 0 else None
        self._round = Round.enter(
            group,
            request.topic,
            hello,
            step=request.step or 0,
            info=b"",
            timeouts=Timeouts(self.settings.enter_timeout_s, self.settings.progress_timeout_s),
        )
        if leader_error is not None:
            raise leader_error
        self._round.heartbeat("plan")
        self._enter_phase("plan")
        self._folder = commit.saving_name(request.name, self._round.save_id) if self.store.positional else request.name
        self.plan, self.jobs = self._agree(own, raw)

    def _check_target(self) -> CkptError | None:
        """The leader looks whether the step may be written, and clears away what dead saves left."""
        request = self.request
        try:
            if commit.exists(self.store, request.name):
                if not request.overwrite:
                    return ExistsError(
                        f"{self.store.url}/{request.name} exists already; pass overwrite=True to replace it"
                    )
                if not self.store.positional:
                    return MismatchError("a step in an object store cannot be replaced safely: save under another step")
            elif not self.store.positional:
                self.store.remove_tree(request.name)
            prefix = "step-" if request.step is not None else request.name
            commit.collect(self.store, prefix)
            if self.store.positional:
                self.store.make_dirs()  # type: ignore[attr-defined]
        except CkptError as error:
            return error
        return None

    def _agree(self, own: bytes, raw: bytes) -> tuple[SavePlan, list[Job]]:
        round_, cache = self._round, self.cache
        assert round_ is not None  # noqa: S101 - entered above
        digests = [hello[:16] for hello in round_.hellos]
        options = saveplan.Options(
            positional=self.store.positional,
            chunk_bytes=self.settings.chunk_bytes,
            block_bytes=self.settings.block_bytes,
            extent_bytes=self.settings.extent_bytes,
            compression=self.request.compression,
        )
        key = digest(b"".join(digests) + repr(options).encode() + repr(self.settings.io_bytes).encode())
        if cache.plan is not None and all(hello[32:48] == key for hello in round_.hellos):
            return cache.plan, cache.jobs
        distinct = list(dict.fromkeys(digests))
        if self.group.size > 1 and digests.index(own) == self.group.rank:
            round_.share(own.hex(), len(raw).to_bytes(8, "little") + raw + self._description)
        descriptions, votes = [], []
        for one in distinct:
            data = self._description
            mine = raw
            if one != own:
                blob = round_.fetch(one.hex())
                size = int.from_bytes(blob[:8], "little")
                mine, data = blob[8 : 8 + size], blob[8 + size :]
            descriptions.append(saveplan.parse(data))
            votes.append(set(mine.decode().split("\n")) if mine else set())
        options = saveplan.with_raw(options, descriptions, votes)
        where = {one: i for i, one in enumerate(distinct)}
        plan = saveplan.plan(descriptions, [where[d] for d in digests], self.group.rank, options)
        jobs = jobs_of(plan, self.settings.io_bytes, self.settings.small_file_bytes)
        cache.plan, cache.jobs, cache.key = plan, jobs, key
        return plan, jobs

    def reserve(self) -> None:
        """Open the files and have their space set aside."""
        self._enter_phase("reserve")
        assert self._round is not None  # noqa: S101 - entered above
        self._round.heartbeat("reserve")
        target = self.store.sub(self._folder)
        if target.positional:
            target.make_dirs()  # type: ignore[attr-defined]
        names = {alias: name for alias, name in self.plan.aliases.items()}
        pieces = []
        for array in self.plan.arrays:
            held = self._by_name.get(array.name) or self._by_name.get(names.get(array.name, ""))
            pieces.append(held.pieces if held is not None else [])
        self._pipeline = Pipeline(
            target,
            self.plan,
            self.jobs,
            Stager(self.plan, pieces),
            self._pool_for(),
            self.settings,
            progress=self._beat,
            cancelled=lambda: self._round is not None and self._round.aborted,
        )
        if self._pipeline.files is not None:
            self._pipeline.files.reserve()

    def _pool_for(self) -> BufferPool:
        """Buffers that a job fits in: the run's own, or larger ones for files of their own."""
        largest = max((p.at + p.stop - p.start for job in self.jobs for p in job.parts), default=0)
        if self.pool is not None and largest <= self.pool.buffer_bytes:
            return self.pool
        budget = max(self.settings.buffer_bytes, 2 * (largest + 8192))
        self._own_pool = BufferPool(budget, max(largest, 1))
        return self._own_pool

    def _beat(self, done: int) -> None:
        if self._round is not None:
            self._round.heartbeat("write", done, self.plan.nbytes)

    def stage(self) -> None:
        """Copy everything this rank writes; the writers follow behind. Afterwards the caller's tensors are free."""
        self._enter_phase("stage")
        assert self._pipeline is not None  # noqa: S101 - reserved above
        for job in self.jobs:
            self._pipeline.feed(job)
        self._held = []
        self._by_name = {}

    def finish(self) -> Result:
        """Write to the end, make it durable, report; the leader commits. Returns when the verdict is known."""
        self._enter_phase("write")
        round_, pipeline = self._round, self._pipeline
        assert round_ is not None and pipeline is not None  # noqa: S101, PT018 - reserved above
        pipeline.finish()
        target = self.store.sub(self._folder)
        self._write_documents(target)
        if target.positional:
            target.syncfs()  # type: ignore[attr-defined]
        self._enter_phase("report")
        round_.report(commit.pack_report(pipeline.written, self._extra()))
        self._enter_phase("commit")
        if self.group.rank == 0:
            self._commit(target)
        verdict = round_.verdict()
        round_.close()
        stored, raw = (int(x) for x in verdict.split(b",")) if verdict else (0, 0)
        self._enter_phase("")
        ratio = pipeline.stored_bytes / pipeline.raw_bytes if pipeline.raw_bytes else 1.0
        rate = pipeline.raw_bytes / pipeline.codec_s / 1e9 if pipeline.codec_s else 0.0
        notes = [f"{array.name}: {array.note}" for array in self.plan.arrays if array.note]
        self.result = Result(
            self.request.step,
            f"{self.store.url}/{self.request.name}",
            nbytes=raw,
            stored_bytes=stored,
            rank_bytes=pipeline.raw_bytes,
            phases=dict(self.phases),
            ratio=ratio,
            codec_gbps=rate,
            notes=notes,
        )
        return self.result

    def _write_documents(self, target: Store) -> None:
        """The zarr.json of every array whose first byte this rank writes; the leader does the empty ones."""
        for number, array in enumerate(self.plan.arrays):
            ranges = self.plan.pieces.get(number)
            if (ranges and ranges[0][0] == 0) or (array.layout.nbytes == 0 and self.group.rank == 0):
                _put(target, f"{commit.zarr3.path_of_name(array.name)}/zarr.json", commit.array_document(array))

    def _extra(self) -> dict[str, Any]:
        """What the report says besides checksums: the tree, once per distinct tree, and the small replicas."""
        assert self._round is not None  # noqa: S101 - entered above
        nodes = [hello[16:32] for hello in self._round.hellos]
        extra: dict[str, Any] = {"small": self._small}
        if nodes.index(nodes[self.group.rank]) == self.group.rank:
            extra["node"] = self._node.decode()
        return extra

    def fingerprint(self) -> None:
        """Checksums of small replicated tensors, to find values that differ by rank under one name."""
        self._small = {}
        if self.group.size == 1:
            return
        for held in self._held:
            if held.desc.spread[0] == "whole" and held.pieces:
                data = held.pieces[0][1]
                if getattr(data, "is_cuda", False):
                    data = data.cpu() if data.nbytes <= _SMALL else None
                if data is not None and data.nbytes <= _SMALL:
                    self._small[held.desc.name] = digest(as_numpy(data).tobytes()).hex()[:16]

    def _commit(self, target: Store) -> None:
        round_ = self._round
        assert round_ is not None  # noqa: S101 - entered above
        try:
            reports = [commit.unpack_report(raw) for raw in round_.gather()]
        except SaveError as error:
            round_.publish(error)
            raise
        try:
            round_.heartbeat("commit")
            payload = self._publish(target, reports)
        except CkptError as error:
            round_.publish(error)
            raise
        except Exception as error:
            wrapped = StorageError(f"commit failed: {type(error).__name__}: {error}")
            round_.publish(wrapped)
            raise wrapped from error
        round_.publish(payload=payload)

    def _publish(self, target: Store, reports: Sequence[tuple[list[Any], dict[str, Any]]]) -> bytes:
        _compare_small([extra["small"] for _, extra in reports])
        node = tree.merge({r: tree.loads(extra["node"]) for r, (_, extra) in enumerate(reports) if "node" in extra})
        params = commit.params_of(self.plan, (w for written, _ in reports for w in written))
        texts, hashes = commit.documents(params)
        for path, text in texts.items():
            _put(target, path, text)
        assets = {}
        for path, data in self.request.assets.items():
            _put(target, f"assets/{path}", data)
            assets[path] = (len(data), digest(data).hex())
        built = commit.build(
            params,
            tree=node,
            save_id=self._round.save_id if self._round else "",
            step=self.request.step,
            world=self.group.size,
            aliases=dict(self.plan.aliases),
            assets=assets,
            maps=dict(self.request.maps),
            root_hash=digest(texts["zarr.json"]).hex(),
            zarr_hashes=hashes,
        )
        raw = built.dump(f"ckptfs {__version__}")
        commit.publish(self.store, self.request.name, self._folder, raw, overwrite=self.request.overwrite)
        return f"{built.stored_bytes},{built.nbytes}".encode()

    # --- failure ---------------------------------------------------------------------------------------

    def abort(self, error: BaseException) -> CkptError:
        """Clean up after an error on this rank and say what to raise: the same SaveError on every rank."""
        known = error if isinstance(error, CkptError) else _wrap(error)
        if self._pipeline is not None:
            self._pipeline.stop()
        round_ = self._round
        raised: CkptError = known
        if round_ is not None:
            try:
                if self.group.rank == 0:
                    raised = _lead_out(round_, known)
                else:
                    round_.fail(known)
                    round_.verdict()
            except CkptError as verdict:
                raised = verdict
            finally:
                round_.close()
        self.cache.plan, self.cache.key = None, b"\0" * 16
        if self.group.rank == 0 and round_ is not None:
            self._clear()
        return raised

    def _clear(self) -> None:
        """Give the space of a failed save back; whatever cannot be removed now is collected by the next save."""
        try:
            if self.store.positional or not commit.exists(self.store, self.request.name):
                self.store.remove_tree(self._folder)
        except (CkptError, AttributeError):
            pass

    def close(self) -> None:
        if self._own_pool is not None:
            self._own_pool.close()
            self._own_pool = None

    def _enter_phase(self, phase: str) -> None:
        at = time.perf_counter()
        self.phases[self._phase] = self.phases.get(self._phase, 0.0) + at - self._phase_at
        self._phase, self._phase_at = phase, at


def _lead_out(round_: Round, error: CkptError) -> CkptError:
    """The leader's own failure: collect who else failed, publish one verdict, and return it."""
    try:
        round_.fail(error)
    except CkptError:  # already past its report: the verdict was published by whoever raised
        pass
    else:
        try:
            round_.gather()
        except SaveError as found:
            round_.publish(found)
    try:
        round_.verdict()
    except CkptError as verdict:
        return verdict
    return error


def _wrap(error: BaseException) -> CkptError:
    if isinstance(error, MemoryError):
        return StorageError("out of memory while saving: lower buffer_bytes")
    return CkptError(f"{type(error).__name__}: {error}")


def _put(target: Store, path: str, data: bytes) -> None:
    if target.positional:
        folder = path.rpartition("/")[0]
        if folder:
            target.make_dirs(folder)  # type: ignore[attr-defined]
        target.write_unsynced(path, data)  # type: ignore[attr-defined]
    else:
        target.write(path, data)


def _sample_pays(data: Any, codec: Any) -> bool:
    """Whether a few samples of live data shrink enough to be worth it."""
    if hasattr(data, "detach"):
        flat = data.detach().reshape(-1)
        size = flat.element_size()
        picked = [as_numpy(flat[a // size : b // size].cpu()).tobytes() for a, b in sample_ranges(flat.nbytes, size)]
    else:
        flat = data.reshape(-1)
        size = flat.itemsize
        picked = [flat[a // size : b // size].tobytes() for a, b in sample_ranges(flat.nbytes, size)]
    return bool(pays(b"".join(picked), codec)) if picked else False


def _compare_small(tables: Sequence[dict[str, str]]) -> None:
    """Small plain tensors under one name must be equal wherever they are."""
    first: dict[str, tuple[int, str]] = {}
    for rank, table in enumerate(tables):
        for name, value in table.items():
            known = first.setdefault(name, (rank, value))
            if known[1] != value:
                msg = (
                    f"{name!r} differs between rank {known[0]} and rank {rank}, but is a plain tensor on both: wrap it in "
                    "ckptfs.PerRank(...) to keep every rank's own, or make the ranks agree"
                )
                raise MismatchError(msg)


class Save:
    """A save under way, or done."""

    def __init__(self, saver: Saver) -> None:
        self._saver = saver
        self._staged = threading.Event()
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._began = time.perf_counter()
        self.blocked_s = 0.0
        self.step = saver.request.step
        self.seen = False  # whether somebody has taken note of a failure

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def run(self, value: object) -> Result:
        """Everything, in this thread."""
        try:
            self._saver.describe(value)
            self.until_staged()
            self.after_staged()
        except BaseException as error:
            if not self._done.is_set():
                self._fail(error)
            self.seen = True
            raise self._error from error  # type: ignore[misc]
        result = self._saver.result
        assert result is not None  # noqa: S101 - after_staged would have raised
        result.blocked_s = result.total_s
        return result

    def until_staged(self) -> None:
        saver = self._saver
        saver.enter()
        saver.fingerprint()
        saver.reserve()
        saver.stage()
        self._staged.set()

    def after_staged(self) -> None:
        result = self._saver.finish()
        result.total_s = time.perf_counter() - self._began
        result.blocked_s = self.blocked_s
        self._saver.close()
        self._done.set()

    def _fail(self, error: BaseException) -> None:
        interrupted = not isinstance(error, Exception)
        raised = self._saver.abort(error)
        self._error = error if interrupted else raised
        self._saver.close()
        self._staged.set()
        self._done.set()
