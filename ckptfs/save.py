"""The work of one save on one rank: describe, enter, plan, reserve, stage, write, report, commit.

The life cycle is `PHASES`; each rank walks it once, forward only. Synchronous, snapshot and lazy saves differ only in
which thread does which part (asyncsave.py). Errors: alone, a save raises what went wrong; with several ranks a failing
rank makes every rank raise the same SaveError that names it, and what is wrong with the whole (ranks that disagree)
keeps its kind.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import time
import warnings
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ckptfs import commit, handover, retention, saveplan, takeover, tree
from ckptfs.codec import pays, sample_ranges
from ckptfs.errors import CkptError, ExistsError, MismatchError, SaveError, StorageError
from ckptfs.manifest import digest
from ckptfs.meet import UNFIT, Description, PlanCache, agree
from ckptfs.pace import Pace, let_others_in
from ckptfs.ranks import Group, Round, Timeouts, blame, typical
from ckptfs.ranks.round import LeaderRound
from ckptfs.report import pack_report, unpack_report
from ckptfs.shards import as_numpy, hold, tie
from ckptfs.stage import Pools, Stager, StagingPool, Started, copies_of_unowned, jobs_of
from ckptfs.write import Pipeline

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ckptfs.report import Report
    from ckptfs.saveplan import Pieces, SavePlan
    from ckptfs.settings import Settings
    from ckptfs.shards import Held
    from ckptfs.stage import Job
    from ckptfs.storage import Store

_log = logging.getLogger("ckptfs")
PHASES = ("describe", "queue", "enter", "plan", "reserve", "stage", "write", "report", "commit")
_SMALL = 64 << 10  # replicated plain tensors up to this size are compared between ranks
_LAST_WORDS_S = 2.0  # how long a leader whose connection to a rank ended waits for that rank to say what is wrong
_SETTLE_S = 0.5  # how long a leader that has heard of one failure listens for others of the same cause


@dataclass(frozen=True)
class Request:
    """What to save and how; the same on every rank, but for the tree's own values."""

    name: str  # the folder, once committed
    step: int | None
    topic: str
    overwrite: bool = False
    compression: tuple[tuple[str, str | None], ...] = ()
    split: saveplan.Split = ()
    assets: Mapping[str, bytes] | Callable[[], Mapping[str, bytes]] = field(default_factory=dict)  # asked of the leader
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
    blocked_s: float = 0.0  # how long the training thread waited
    total_s: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)  # seconds by phase
    ratio: float = 1.0  # stored / raw, this rank
    codec_gbps: float = 0.0
    notes: list[str] = field(default_factory=list)
    lost: dict[int, str] = field(default_factory=dict)  # ranks that failed, and why: others wrote their part


class Saver:
    """One save's parts, in their order: describe, enter, reserve, stage, finish; abort instead of what is left."""

    def __init__(
        self, store: Store, request: Request, group: Group, settings: Settings, cache: PlanCache, pools: Pools
    ) -> None:
        self.store, self.request, self.group, self.settings = store, request, group, settings
        self.cache, self.pools = cache, pools
        self.buffer_bytes = settings.buffer_bytes
        self.copy_first = False  # copy before writing: training waits for the copy alone
        self.keeps_tensors = False  # the caller's tensors stay as they are until the verdict
        self.hurry: Callable[[], bool] = lambda: True  # whether anybody waits for the copies
        self.pace = Pace(settings.background_bytes_per_s)
        self.phases: dict[str, float] = {}
        self.notes: list[str] = []
        self._unfit: Exception | None = None
        self._refused: Exception | None = None  # why the leader cannot have this step written
        self._round: Round | None = None
        self._pipeline: Pipeline | None = None
        self._claim: commit.Claim | None = None
        self._spare: takeover.Spare | None = None
        self._holder: handover.Holder | None = None  # of what other ranks write
        self._fetcher: handover.Fetcher | None = None  # of what other ranks hold
        self._folder = ""
        self._held: list[Held] = []
        self._pieces: list[Any] = []  # by array of the plan: the boxes this rank holds, with their live data
        self._bearable: dict[frozenset[int], bool] = {}
        self._phase_at = time.perf_counter()
        self._phase = "describe"

    # --- the parts -------------------------------------------------------------------------------------

    def describe(self, value: object, owned: set[int] | None = None) -> int:
        """Look at the caller's tree, in the caller's thread: no array is read, nothing is sent.

        With `owned` (addresses of the memory that only an optimizer's step changes) everything else is copied here and
        now; returns how many bytes that were.
        """
        self.phase("describe")
        collecting = gc.isenabled()
        gc.disable()  # many small objects at once would set off a collection, 0.1 s in a process with torch
        try:
            return self._describe(value, owned)
        except Exception as error:
            if self.group.size == 1:
                raise
            self._unfit = error  # the others must hear of it: see enter
            return 0
        finally:
            if collecting:
                gc.enable()
            self.phase("queue")

    def _describe(self, value: object, owned: set[int] | None) -> int:
        request, rank = self.request, self.group.rank
        node, leaves = tree.flatten(value, rank=rank, allow_pickle=request.allow_pickle)
        self._node = tree.dumps(node)  # now: plain values may change as soon as the caller goes on
        if rank == 0:
            self._assets = request.assets() if callable(request.assets) else request.assets
        self._held, self._ties = tie([hold(leaf.name, leaf.value, rank) for leaf in leaves])
        copied = 0 if owned is None else copies_of_unowned(self._held, owned)
        self._started = Started.now()  # after these copies: what is queued on the caller's streams comes first
        return copied

    def _prepare(self) -> None:
        """What the other ranks are told: worked out where it holds nobody up."""
        try:
            raw = self._incompressible() if self.request.compression else []
            descs = sorted((held.desc for held in self._held), key=lambda d: d.name)
            self._mine = Description(saveplan.describe(descs, self._ties), raw, self._node)
        except Exception as error:
            self._unfit = error

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
        self.phase("enter")
        request, group = self.request, self.group
        if self._unfit is None:
            self._prepare()
        self._refused = self._check_target() if group.rank == 0 else None
        self._round = round_ = Round.enter(
            group,
            request.topic,
            UNFIT if self._unfit is not None else self._mine.hello(self.cache),
            step=request.step or 0,
            timeouts=_timeouts(self.settings),
            prepare=self._claim_folder,
        )
        failed = self._unfit or self._refused
        if isinstance(failed, ExistsError) and isinstance(round_, LeaderRound):
            round_.publish(failed)  # no rank has failed: every rank raises this very error
        if failed is not None:
            raise failed
        self.phase("plan")
        self._folder = commit.saving_name(request.name, round_.save_id) if self.store.positional else request.name
        options = saveplan.Options(
            positional=self.store.positional,
            chunk_bytes=self.settings.chunk_bytes,
            block_bytes=self.settings.block_bytes,
            extent_bytes=self.settings.extent_bytes,
            compression=request.compression,
            handover=self.settings.handover,
            handover_ranks=self.settings.handover_ranks,
            files_per_rank=self.settings.files_per_rank,
            split=request.split,
        )
        self.plan, self.jobs = agree(round_, group, self.cache, self._mine, options, self.settings)
        if self.copy_first:  # all of it is in memory at once
            if self.cache.dense is None:
                self.cache.dense = jobs_of(
                    self.plan, self.settings.io_bytes, self.settings.small_file_bytes, dense=True
                )
            self.jobs = self.cache.dense
        self._inputs = self.cache.inputs
        if isinstance(round_, LeaderRound):
            round_.bearable = lambda lost: self._can_do_without(round_, frozenset(lost))

    def _claim_folder(self, save_id: str) -> None:
        """The leader locks the folder of this save before another rank can write there: see commit.Claim."""
        if self._unfit is not None or self._refused is not None or not self.store.positional:
            return
        self._folder = commit.saving_name(self.request.name, save_id)
        try:
            self._claim = commit.Claim(self.store, self._folder)  # type: ignore[arg-type]
        except CkptError as error:
            self._refused = error

    def _check_target(self) -> Exception | None:
        """The leader looks whether the step may be written, and clears away what dead saves left."""
        request, store = self.request, self.store
        try:
            commit.check_free(store, request.name, overwrite=request.overwrite)
            if request.overwrite and request.step in retention.pinned(store) and commit.exists(store, request.name):
                return ExistsError(f"{store.url}/{request.name} is pinned: unpin step {request.step} to replace it")
            if commit.exists(store, request.name):
                if not store.positional:
                    return MismatchError("a step in an object store cannot be replaced safely: save under another step")
            elif not store.positional:
                store.remove_tree(request.name)
            commit.collect(store, "step-" if request.step is not None else request.name)
            if store.positional:
                store.make_dirs()  # type: ignore[attr-defined]
        except Exception as error:
            return error
        return None

    def reserve(self) -> None:
        """Open the files and have their space set aside."""
        self.phase("reserve")
        target = self.store.sub(self._folder)
        if target.positional:
            target.make_dirs()  # type: ignore[attr-defined]
        by_name = {held.desc.name: held.pieces for held in self._held}
        # A name tied here but not on every rank is an array of its own in the plan.
        by_name.update({alias: by_name[target] for alias, target in self._ties.items()})
        self._pieces = [by_name.get(array.name, []) for array in self.plan.arrays]
        spare = self._spare_jobs()
        pool = self.pools.fit(self.buffer_bytes, _largest([*self.jobs, *spare]))
        self._pool = pool
        self._spare = takeover.Spare(pool)
        self._hand_over(pool)
        self._stager = Stager(self.plan, self._pieces, self._started, pool, self._fetcher)
        self._pipeline = self._writers(target, self.plan, self.jobs, self._stager, pool)
        if self._pipeline.files is not None:
            self._pipeline.files.reserve(lambda: self._write_documents(target))

    def _hand_over(self, pool: StagingPool) -> None:
        """Be there for the ranks that write what this one holds, and ready to fetch what this one writes for others."""
        round_, rank = self._round, self.group.rank
        assert round_ is not None
        if self.plan.gives:
            own = Stager(self.plan, self._pieces, self._started, pool)
            self._holder = handover.Holder(self.plan, own, handover.local_address(self.settings.handover_host))
            round_.share(handover.key_of(rank), self._holder.address)
        if self.plan.pulls:
            self._fetcher = handover.Fetcher(
                rank,
                lambda other: round_.fetch(handover.key_of(other)),
                self._check,
                self._lose,
                _timeouts(self.settings).silence_timeout_s,
            )

    def _lose(self, rank: int, why: str) -> NoReturn:
        """A rank that we exchange bytes with is gone: the verdict of the save says why, if there is one in time."""
        round_ = self._round
        assert round_ is not None
        if isinstance(round_, LeaderRound):
            round_.listen(_LAST_WORDS_S)
            raise round_.lose(rank, why)
        timeouts = _timeouts(self.settings)
        round_.listen(timeouts.silence_timeout_s + timeouts.grace_s + 2 * timeouts.look_s())
        raise SaveError(f"step {self.request.step} was not saved to {self.store.url}: a rank is lost", {rank: why})

    def _let_go(self, holder: handover.Holder, pool: StagingPool) -> None:
        """Training may change the tensors afterwards."""
        assert self._pipeline is not None
        pipeline = self._pipeline
        moved_s, left = time.monotonic(), holder.left_bytes

        def wait(late: list[int], gone: list[int]) -> None:
            nonlocal moved_s, left
            pipeline.go()  # buffers become free by being written
            pipeline.raise_if_broken()
            if isinstance(self._round, LeaderRound):
                self._round.look_around()
            if holder.left_bytes != left:
                moved_s, left = time.monotonic(), holder.left_bytes
            if gone:
                self._lose(gone[0], "hung up before it had fetched what it was to write")
            if time.monotonic() - moved_s > self.settings.progress_timeout_s:
                self._lose(
                    late[0], f"has fetched nothing of what it was to write for {time.monotonic() - moved_s:.0f} s"
                )

        holder.let_go(pool, wait)

    def _writers(
        self, target: Store, plan: SavePlan, jobs: Sequence[Job], stager: Stager, pool: StagingPool
    ) -> Pipeline:
        return Pipeline(
            target,
            plan,
            jobs,
            stager,
            pool,
            self.settings,
            progress=self._beat,
            check=self._check,
            copy_first=self.copy_first,
            background=not self.keeps_tensors,  # else the caller waits
            pace=self.pace,
        )

    def _spare_jobs(self) -> list[Job]:
        """What this rank copies besides, where that costs training nothing, to be able to stand in for another."""
        mode = self.settings.takeover
        if self.keeps_tensors or self._inputs is None or mode == "off" or (self.copy_first and mode == "free"):
            return []
        if self.cache.spare is None:
            plan = replace(self.plan, pieces=saveplan.understudy(self._inputs, self.group.rank))
            self.cache.spare = jobs_of(plan, self.settings.io_bytes, self.settings.small_file_bytes)
        return self.cache.spare

    def _beat(self, done: int) -> None:
        if self._round is not None:
            self._round.heartbeat(self._phase, done, self.plan.nbytes)

    def _check(self) -> None:
        """Raise what the save has failed with, if it has failed on another rank. Costs nothing while it has not."""
        if self._round is not None and self._round.aborted:
            self._round.check()

    def stage(self) -> None:
        """Copy everything this rank writes; the writers follow behind. Afterwards the caller's tensors are free."""
        self.phase("stage")
        assert self._pipeline is not None
        for job in self.jobs:
            self._pipeline.feed(job)
        self._small = self._fingerprints()
        if self._fetcher is not None:
            self._fetcher.close()
        if self._holder is not None and not self.keeps_tensors:
            with self.pace.hurry():  # buffers become free by being written
                self._let_go(self._holder, self._pool)
        if self._spare is not None:
            hurry = self.hurry if self.settings.takeover == "free" else lambda: False
            self._spare.fill(self._spare_jobs(), self._stager, hurry)
        self._stager.wait_landed()
        self._pipeline.go()
        self._held = []
        if not self.keeps_tensors:
            self._pieces = []

    def _fingerprints(self) -> dict[str, str]:
        """Checksums of replicated tensors, to find values that differ by rank under one name; samples of large ones."""
        found: dict[str, str] = {}
        for held in self._held if self.group.size > 1 else []:
            if held.desc.spread[0] == "whole" and held.pieces:
                data = held.pieces[0][1]
                if data.nbytes <= _SMALL:
                    data = data.cpu() if getattr(data, "is_cuda", False) else data
                    found[held.desc.name] = digest(as_numpy(data).tobytes()).hex()[:16]
                elif (
                    data.flags.c_contiguous
                    if isinstance(data, np.ndarray)
                    else data.is_contiguous() and not data.is_cuda
                ):
                    found[held.desc.name] = digest(b"".join(_samples(data, 16, 4096))).hex()[:16]
        return found

    def finish(self) -> Result:
        """Write to the end, make it durable, report; the leader commits. Returns when the verdict is known."""
        self.phase("write")
        round_, pipeline = self._round, self._pipeline
        assert round_ is not None
        assert pipeline is not None
        pipeline.finish()
        target = self.store.sub(self._folder)
        if target.positional:
            target.syncfs()  # type: ignore[attr-defined]
        else:
            self._write_documents(target)
        self.phase("report")
        round_.report(pack_report(pipeline.written, self._extra(round_)))
        self.phase("commit")
        if isinstance(round_, LeaderRound):
            self._commit(round_, target)
        verdict = round_.verdict(self._stand_in)
        round_.close()
        self._round = None
        self.phase("")
        return self._result(verdict)

    def _result(self, verdict: bytes) -> Result:
        told = json.loads(verdict) if verdict else {}
        lost = {int(rank): reason for rank, reason in told.get("lost", {}).items()}
        if lost and self.group.rank in {0, *lost}:
            text = takeover.lost_text(lost, self.request.step, self.store.url)
            _log.warning(text)
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        result = Result(
            self.request.step,
            f"{self.store.url}/{self.request.name}",
            nbytes=told.get("raw", 0),
            stored_bytes=told.get("stored", 0),
            phases=dict(self.phases),
            notes=list(self.notes),
            lost=lost,
        )
        if (pipeline := self._pipeline) is not None:
            result.rank_bytes = pipeline.raw_bytes
            result.ratio = pipeline.stored_bytes / pipeline.raw_bytes if pipeline.raw_bytes else 1.0
            result.codec_gbps = pipeline.raw_bytes / pipeline.codec_s / 1e9 if pipeline.codec_s else 0.0
            result.notes += [f"{array.name}: {array.note}" for array in self.plan.arrays if array.note]
        return result

    def _write_documents(self, target: Store) -> None:
        """The zarr.json of every array, dealt over the ranks."""
        numbers = takeover.documents_of(self.plan, [self.group.rank], self.group.size)
        takeover.put_documents(target, self.plan, numbers, self._between)

    def _between(self) -> None:
        if not self.keeps_tensors:  # the caller does something else meanwhile
            let_others_in()

    def _extra(self, round_: Round) -> dict[str, Any]:
        """What the report says besides checksums: the tree, once per distinct tree, and the small replicas."""
        nodes = _nodes(round_)
        extra: dict[str, Any] = {"small": self._small, "host": self.group.host}
        if self._pipeline is not None:
            extra["rates"] = self._pipeline.rates()
        if nodes.index(nodes[self.group.rank]) == self.group.rank:
            extra["node"] = self._mine.node.decode()
        return extra

    def _commit(self, round_: LeaderRound, target: Store) -> None:
        try:
            reports = self._reports(round_)
        except SaveError as error:
            _publish_failure(round_, error)
            raise
        except CkptError as error:
            round_.publish(error)
            raise
        try:
            round_.heartbeat("commit")
            self.notes += [f"rank {rank} was slow: {text}" for rank, text in sorted(round_.slow_ranks().items())]
            self._look_at_rates([extra for _, extra in reports])
            payload = self._publish(round_, self.store.sub(self._folder), reports)
        except CkptError as error:
            round_.publish(error)
            raise
        except Exception as error:
            wrapped = StorageError(f"commit failed: {type(error).__name__}: {error}")
            round_.publish(wrapped)
            raise wrapped from error
        round_.publish(payload=payload)

    def _look_at_rates(self, told: Sequence[Mapping[str, Any]]) -> None:
        """Say so when a host or the store was slow, in the log and in the result."""
        memory = self.group.topic(self.request.topic)
        rates = {rank: extra["rates"] for rank, extra in enumerate(told) if extra.get("rates")}
        if rates and self.group.size > 1:
            hosts = {rank: extra["host"] for rank, extra in enumerate(told) if "host" in extra}
            # Beside training everything is slower than while it waits.
            usual = memory.usual.get(self.keeps_tensors, {})
            fault = blame(rates, hosts, usual)
            memory.usual[self.keeps_tensors] = typical(rates.values(), usual)
            if fault:
                _log.warning("step %s of %s: %s", self.request.step, self.store.url, fault)
                self.notes.append(fault)

    def _publish(self, round_: LeaderRound, target: Store, reports: Sequence[Report]) -> bytes:
        built, self.cache.documents = commit.assemble(
            target,
            self.plan,
            reports,
            save_id=round_.save_id,
            step=self.request.step,
            assets=self._assets,
            maps=self.request.maps,
            known=self.cache.documents,
        )
        commit.publish(
            self.store, self.request.name, self._folder, commit.dump(built), overwrite=self.request.overwrite,
            claim=self._claim,
        )  # fmt: skip
        return json.dumps({"stored": built.stored_bytes, "raw": built.nbytes, "lost": round_.lost}).encode()

    # --- when ranks are lost: see takeover.py -----------------------------------------------------------

    def _can_do_without(self, round_: LeaderRound, lost: frozenset[int]) -> bool:
        """Whether others can write what these ranks were to write, as far as the leader can know."""
        mode = self.settings.takeover
        if mode == "off" or 0 in lost or self._inputs is None or (self.copy_first and mode == "free"):
            return False
        if not self.store.positional and round_.silent:
            return False  # objects that a stopped rank may still write cannot be put out of its reach
        if lost not in self._bearable:
            covered = takeover.first_with(_nodes(round_), lost) is not None
            self._bearable[lost] = covered and saveplan.stand_ins(self._inputs, lost) is not None
        return self._bearable[lost]

    def _reports(self, round_: LeaderRound) -> list[Report]:
        """Of all ranks; what lost ones would have reported comes from those that stand in for them."""
        reports = {rank: unpack_report(raw) for rank, raw in round_.gather_some().items()}
        if not round_.lost:
            return [reports[rank] for rank in range(self.group.size)]
        self.phase("takeover")
        lost = round_.lost
        trees = takeover.first_with(_nodes(round_), lost)
        pieces = saveplan.stand_ins(self._inputs, lost) if self._inputs is not None else None
        if trees is None or pieces is None:
            raise CkptError("unreachable: a loss that cannot be borne ends the gathering")
        ranks = sorted({*pieces, *trees.values()})
        try:
            self._make_room(round_)
            order = takeover.Order(lost, self._folder, ranks).pack()
            round_.order(order, ranks)
            own = self._stand_in(order)
        except (CkptError, OSError, MemoryError) as error:
            if isinstance(error, SaveError):
                raise
            why = f"failed when it stood in: {type(error).__name__}: {error}"
            raise SaveError(f"step {self.request.step} was not saved to {self.store.url}", {**lost, 0: why}) from error
        second = round_.gather_some() | ({} if own is None else {0: own})
        if b"" in second.values():
            raise SaveError(
                f"step {self.request.step} was not saved to {self.store.url}: "
                "ranks that hold what others failed to write were given it back by then; older steps are intact",
                lost,
            )
        return takeover.combine(
            self.group.size, reports, {rank: unpack_report(raw) for rank, raw in second.items()}, trees
        )

    def _make_room(self, round_: LeaderRound) -> None:
        """Keep out who may only be stopped, and write the documents that the lost ranks would have written."""
        documents = takeover.documents_of(self.plan, round_.lost, self.group.size)
        if round_.silent and self._inputs is not None:
            theirs = [self._inputs.plan(rank).pieces for rank in sorted(round_.silent)]
            self._folder = takeover.fence(
                self.store, self._folder, self.plan.arrays, theirs, documents, self._beat  # type: ignore[arg-type]
            )  # fmt: skip
        takeover.put_documents(self.store.sub(self._folder), self.plan, documents)

    def _stand_in(self, raw: bytes) -> bytes | None:
        """Do what the leader's order gives to this rank: its report, b"" if it has not got the bytes any more."""
        order = takeover.Order.unpack(raw)
        rank, inputs = self.group.rank, self._inputs
        if rank not in order.ranks or inputs is None:
            return None
        self.phase("takeover")
        self._folder = order.folder
        target = self.store.sub(order.folder)
        pieces = (saveplan.stand_ins(inputs, order.lost) or {}).get(rank, {})
        pipeline = self._write_for_others(target, pieces)
        if pipeline is None:
            return b""
        if target.positional:
            target.syncfs()  # type: ignore[attr-defined]
        return pack_report(pipeline.written, {"small": {}, "node": self._mine.node.decode()})

    def _write_for_others(self, target: Store, pieces: Pieces) -> Pipeline | None:
        """Write from the caller's tensors or from the copies that were kept; None if there are neither."""
        plan = replace(self.plan, pieces=pieces)
        copies = self._spare.take(pieces) if self._spare is not None and not self.keeps_tensors else None
        if copies is None and not self.keeps_tensors:
            return None
        sizes = self.settings.io_bytes, self.settings.small_file_bytes
        jobs = jobs_of(plan, *sizes) if copies is None else [job for job, _, _ in copies]
        pool = self.pools.fit(self.buffer_bytes, _largest(jobs))
        pipeline = self._writers(target, plan, jobs, Stager(plan, self._pieces, self._started, pool), pool)
        try:
            for copy in copies or []:
                pipeline.feed_copied(*copy)
            for job in jobs if copies is None else []:
                pipeline.feed(job)
            pipeline.finish()
        except BaseException as error:
            pipeline.cancel(error)
            raise
        return pipeline

    # --- failure ---------------------------------------------------------------------------------------

    def abort(self, error: BaseException) -> CkptError | Result:
        """Clean up after an error on this rank; what to raise, or the result if others have written its part."""
        known = error if isinstance(error, CkptError) else _wrap(error)
        self._held = []
        self._hang_up()
        if self._pipeline is not None:
            self._pipeline.cancel(known)
        self.cache.forget()
        if self._round is None:
            return known
        ended, judged = _leave(self._round, known)
        if judged and self._folder:
            self._give_space_back()
        if isinstance(ended, bytes):
            return self._result(ended)
        return ended if self.group.size > 1 else known

    def _give_space_back(self) -> None:
        """Only after a verdict: a leader that was not heard any more may still commit. The next save collects the rest.

        Every rank does it once its own writes have ended, so whoever is last leaves nothing.
        """
        with contextlib.suppress(CkptError):
            if self.store.positional or (self.group.rank == 0 and not commit.exists(self.store, self.request.name)):
                self.store.remove_tree(self._folder)

    def _hang_up(self) -> None:
        if self._fetcher is not None:
            self._fetcher.close()
            self._fetcher = None
        if self._holder is not None:
            self._holder.close()
            self._holder = None

    def close(self) -> None:
        self._hang_up()
        self._pieces = []
        if self._spare is not None:
            self._spare.close()
            self._spare = None
        if self._claim is not None:
            self._claim.close()
            self._claim = None

    def phase(self, phase: str) -> None:
        """Note the time; the other ranks hear of it too."""
        at = time.perf_counter()
        self.phases[self._phase] = self.phases.get(self._phase, 0.0) + at - self._phase_at
        self._phase, self._phase_at = phase, at
        if self._round is not None and phase:
            self._round.heartbeat(phase)


def _timeouts(settings: Settings) -> Timeouts:
    return Timeouts(
        settings.enter_timeout_s,
        settings.progress_timeout_s,
        min(settings.silence_timeout_s, settings.progress_timeout_s),
    )


def _nodes(round_: Round) -> list[bytes]:
    """Every rank's digest of its tree, from the hellos (see meet.Description)."""
    return [hello[16:32] for hello in round_.hellos]


def _largest(jobs: Sequence[Job]) -> int:
    return max((p.at + p.stop - p.start for job in jobs for p in job.parts), default=1)


def _leave(round_: Round, error: CkptError) -> tuple[CkptError | bytes, bool]:
    """Tell the others; (what every rank raises, or the verdict if others finished the step; whether there is one)."""
    raised: CkptError | bytes = error
    try:
        if isinstance(round_, LeaderRound):
            _lead_out(round_, error)
        elif round_.state == "entered":
            round_.fail(error)
        elif round_.state != "judged":  # the leader is lost, or we were interrupted while it decided
            return raised, False
        raised = round_.verdict()
    except CkptError as verdict:
        raised = verdict
    finally:
        judged = round_.state == "judged"
        round_.close()
    return raised, judged


def _lead_out(round_: LeaderRound, error: CkptError) -> None:
    """The leader's own failure: collect who else failed, and publish one verdict."""
    if round_.state == "entered":
        try:
            round_.fail(error)
            round_.gather()
        except SaveError as found:
            _publish_failure(round_, found)
    elif round_.state != "judged":
        round_.publish(error)


def _publish_failure(round_: LeaderRound, error: SaveError) -> None:
    round_.publish(round_.with_late_failures(error, _SETTLE_S))


def _wrap(error: BaseException) -> CkptError:
    if isinstance(error, MemoryError):
        return StorageError("out of memory while saving: lower buffer_bytes")
    return CkptError(f"{type(error).__name__}: {error}")


def _samples(data: Any, pieces: int = 4, piece_bytes: int = 64 << 10) -> list[bytes]:
    """The bytes of a few parts of live data."""
    if hasattr(data, "detach"):
        flat = data.detach().reshape(-1)
        size = flat.element_size()
        ranges = sample_ranges(flat.nbytes, size, pieces, piece_bytes)
        return [as_numpy(flat[a // size : b // size].cpu()).tobytes() for a, b in ranges]
    flat = data.reshape(-1)
    size = flat.itemsize
    return [flat[a // size : b // size].tobytes() for a, b in sample_ranges(flat.nbytes, size, pieces, piece_bytes)]


def _sample_pays(data: Any, codec: Any) -> bool:
    """Whether a few samples of live data shrink enough to be worth it."""
    picked = _samples(data)
    return bool(pays(b"".join(picked), codec)) if picked else False
