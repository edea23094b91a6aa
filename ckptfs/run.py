"""A run: a folder or URL of steps. Save, find, load."""

from __future__ import annotations

import operator
import os
import re
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from ckptfs import commit, retention
from ckptfs.asyncsave import Background, HookPoint, OnBusy, Save, hold_updates, hook_points, owned_by
from ckptfs.checkpoint import Checkpoint
from ckptfs.errors import FormatError, MismatchError, NotFoundError
from ckptfs.manifest import LIMIT, check_relative, without_collection
from ckptfs.manifest import NAME as MANIFEST
from ckptfs.meet import PlanCache
from ckptfs.ranks import Group
from ckptfs.save import Request, Result, Saver
from ckptfs.settings import Settings
from ckptfs.stage import Pools, affordable_bytes
from ckptfs.storage import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from ckptfs.verify import Problem
    from ckptfs.watch import Leased

Compression = "str | None | Mapping[str, str | None]"
_AT = re.compile(r"(?s)(.*)@(latest|\d{1,19})\Z")
_STEPS = range(LIMIT)  # what a manifest can say


class Run:
    """Steps under one URL. Cheap to make; safe to make on every rank.

    `keep_last`, `keep_every` and `keep` (step → whether it stays) limit what is kept: see retention.py.
    """

    def __init__(
        self,
        url: Any,
        *,
        group: Group | None = None,
        settings: Settings | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep: Callable[[int], bool] | None = None,
        **options: Any,
    ) -> None:
        self.store = url if hasattr(url, "read_into") else open_store(url, **options)
        self.settings = settings or Settings()
        self._group = group
        self._cache = PlanCache()
        self._pools = Pools(self.settings.io_bytes)
        self._background = Background()
        self._turn = threading.RLock()  # threads save one after the other: the plan and the buffers are one save's
        self._policy = retention.Policy(keep_last, keep_every, keep)
        self._pruner = retention.Pruner(self.store, self._policy, self.steps)

    def __repr__(self) -> str:
        return f"<ckptfs.Run {self.url}>"

    @property
    def url(self) -> str:
        return self.store.url

    @property
    def group(self) -> Group:
        return self._group or Group.current()

    # --- finding ---------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The committed steps, ascending."""
        found = ((commit.step_number(name), name) for name in self.store.children()[0])
        return sorted(step for step, name in found if step is not None and commit.exists(self.store, name))

    def __getitem__(self, step: int) -> Checkpoint:
        try:
            name = commit.step_name(operator.index(step))
        except TypeError:
            raise MismatchError(f"{self.url}: a step is a number, not {step!r}; the newest is run.latest") from None
        if not commit.exists(self.store, name):
            steps = self.steps()
            have = f"it has {', '.join(map(str, steps[-8:]))}" if steps else "it has none"
            raise NotFoundError(f"{self.url} has no step {step}; {have}")
        return Checkpoint(self.store.sub(name), settings=self.settings)

    @property
    def latest(self) -> Checkpoint:
        steps = self.steps()
        if not steps:
            raise NotFoundError(f"{self.url} has no committed step")
        return self[steps[-1]]

    def watch(self, after: int | Literal["latest"] | None = None, **how: Any) -> Iterator[Leased]:
        """Committed steps above `after` in order, as they appear, each pinned until the next; see watch.watch."""
        from ckptfs.watch import watch

        return watch(self, after, **how)

    def wait(
        self, after: int | Literal["latest"] | None = None, timeout_s: float | None = None, **how: Any
    ) -> Leased | None:
        """The next committed step above `after`, pinned until it is closed; None if none came in time."""
        from ckptfs.watch import wait

        return wait(self, after, timeout_s, **how)

    # --- saving ----------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        value: object,
        *,
        assets: str | os.PathLike[str] | Mapping[str, bytes | str] | None = None,
        compression: Any = None,
        split: Mapping[str, Sequence[int]] | None = None,
        overwrite: bool = False,
        allow_pickle: bool = False,
        maps: Mapping[str, Any] | None = None,
    ) -> Result:
        """Save a tree as `step`; returns when it is committed, durable and visible, or raises. Called by every rank.

        `split`: {pattern of names: into how many parts each dimension will be read}, such as {"*.wo.weight": (1, 8)}
        for eight ranks that take an eighth of the columns each. The parts are stored as blocks, whoever saves: reading
        one reads its bytes and no more.

        A save in the background ends first. Alone, what went wrong is raised as it is; with several ranks a failing
        rank makes every rank raise the same SaveError.
        """
        request = self._request(step, assets, compression, split, overwrite, maps, allow_pickle)
        return self._save(request, value)

    def save_async(
        self,
        step: int,
        value: object,
        *,
        before_update: HookPoint = None,
        on_busy: OnBusy = "wait",
        assets: str | os.PathLike[str] | Mapping[str, bytes | str] | None = None,
        compression: Any = None,
        split: Mapping[str, Sequence[int]] | None = None,
        overwrite: bool = False,
        allow_pickle: bool = False,
        maps: Mapping[str, Any] | None = None,
    ) -> Save:
        """Save a tree as `step` in the background. Called by every rank.

        Without `before_update` this returns when the snapshot is taken: tensors may change from then on. With an
        optimizer, or several, it returns at once, and their next step waits for what is not copied yet; whatever these
        optimizers do not own is copied before this returns. Instead of an optimizer, a function that is given what to
        call before anything in the tree changes.

        `on_busy`: while another save of this run is under way, "wait" for it, "skip" this one, or raise an "error".
        The ranks decide alike.
        """
        if on_busy not in ("wait", "skip", "error"):
            raise MismatchError(f"on_busy is 'wait', 'skip' or 'error', not {on_busy!r}")
        points = None if before_update is None else hook_points(before_update)
        request = self._request(step, assets, compression, split, overwrite, maps, allow_pickle)
        save = self._begin(request)
        with save.blocking(), self._turn:
            self._background.tell()
            limit_s = self.settings.enter_timeout_s
            if not self._background.may_start(on_busy, self.group, request.topic, step, limit_s):
                save.skip()
            elif points is None:
                self._background.wait_idle()
                save.snapshot(value)  # copies before it writes, so that the caller waits for memory only
                self._background.start(save)
            else:
                self._save_lazily(save, value, points)
        return save

    def _save_lazily(self, save: Save, value: object, points: list[Any]) -> None:
        owned = owned_by(points)
        copied_bytes = save.describe(value, owned)
        if copied_bytes > affordable_bytes(self.settings.async_buffer_bytes) // 4:
            save.note(f"{copied_bytes} bytes that no given optimizer owns were copied before save_async returned")
        try:
            hold_updates(points, save)
        except BaseException as error:  # from a function of the caller: what it has hooked already must not wait
            save.give_up(error)
            raise
        self._background.start(save)

    def _request(
        self, step: int, assets: Any, compression: Any, split: Any, overwrite: bool, maps: Any, allow_pickle: bool
    ) -> Request:
        if type(step) is not int or step not in _STEPS:
            raise MismatchError(f"a step is a whole number from 0 on, and below 2^62, not {step!r}")
        return _request(
            commit.step_name(step), step, self.url, assets, compression, split, overwrite, maps, allow_pickle
        )

    def _save(self, request: Request, value: object) -> Result:
        with self._turn:
            self._background.tell()
            self._background.wait_idle()
            saver = Saver(self.store, request, self.group, self.settings, self._cache, self._pools)
            with without_collection():
                result = Save(saver).run(value)
        self._committed()
        return result

    def _begin(self, request: Request) -> Save:
        saver = Saver(self.store, request, self.group, self.settings, self._cache, self._pools)
        saver.buffer_bytes = affordable_bytes(self.settings.async_buffer_bytes)
        return Save(saver, self._committed)

    def _committed(self) -> None:
        if self.group.rank == 0:
            self._pruner.after_commit()

    def wait_idle(self) -> None:
        """Until no save is under way and no step is being deleted. Failures are not raised here."""
        self._background.wait_idle()
        self._pruner.wait()

    def close(self) -> None:
        """Wait for saves and deletions under way, give buffers back; raises a failure that nobody has asked for."""
        failure = self._close()
        if failure is not None:
            raise failure

    def _close(self) -> BaseException | None:
        failure = self._background.close()
        self._pruner.wait()
        self._pools.close()
        return failure

    # --- keeping ---------------------------------------------------------------------------------------

    def pin(self, step: int) -> None:
        """Keep a step whatever the policy says, until `unpin`; it holds for every process."""
        retention.pin(self.store, step)

    def unpin(self, step: int) -> None:
        """Leave a step to the policy again."""
        retention.unpin(self.store, step)

    @property
    def pinned(self) -> list[int]:
        return sorted(retention.pinned(self.store))

    def verify(self, step: int | None = None, **how: Any) -> list[Problem]:
        """Check every stored byte of a step (default: the latest), and remember if it is sound: see verify.verify.

        The newest step that is known to be sound is never deleted.
        """
        from ckptfs.verify import verify

        with self.latest if step is None else self[step] as checkpoint:
            number = checkpoint.step
            mark = None if number is None else retention.mark_of(self.store, number)
            problems = verify(checkpoint, **how)
        if number is not None:
            retention.note_verified(self.store, number, mark if all(problem.warning for problem in problems) else None)
        return problems

    def prune(self) -> list[int]:
        """Delete now what the policy does not keep; the steps that are gone. Saves do this by themselves."""
        return retention.prune(self.store, self.steps(), self._policy)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        elif (failure := self._close()) is not None:
            error.add_note(f"besides, a save in the background failed: {failure}")

    # --- loading ---------------------------------------------------------------------------------------

    def load(self, value: Any, step: int | None = None, **how: Any) -> Any:
        """Fill a tree in place from a step (default: the latest), whatever layout it has; see Checkpoint.load."""
        with without_collection(), self.latest if step is None else self[step] as checkpoint:
            pool = self._pools.idle(self.settings.buffer_bytes)
            if pool is not None:
                checkpoint.borrow(pool)
            return checkpoint.load(value, rank=self.group.rank, **how)

    # --- mounting --------------------------------------------------------------------------------------

    def mount(
        self, mountpoint: str | os.PathLike[str] | None = None, *, step: int | str | None = None, **how: Any
    ) -> AbstractContextManager[str]:
        """`with run.mount() as folder:` the run, or one step of it, as files; see ckptfs.views.mounting.mount."""
        from importlib import import_module  # the views are a layer above

        mounted: AbstractContextManager[str] = import_module("ckptfs.views.mounting").mount(
            self.store, mountpoint, step=step, **how
        )
        return mounted


def _request(
    name: str,
    step: int | None,
    topic: str,
    assets: Any,
    compression: Any,
    split: Any,
    overwrite: bool,
    maps: Any,
    allow_pickle: bool,
) -> Request:
    """What a caller asks for, looked at before anything is done."""
    return Request(
        name,
        step,
        topic,
        overwrite,
        patterns_of(compression),
        parts_of(split),
        partial(read_assets, assets),
        maps or {},
        allow_pickle,
    )


def patterns_of(compression: Any) -> tuple[tuple[str, str | None], ...]:
    """None, one codec for all, or {pattern: codec} with the first match winning."""
    if compression is None:
        return ()
    table = dict(compression) if isinstance(compression, Mapping) else {"*": compression}
    for pattern, codec in table.items():
        if codec not in (None, "zstd", "blosc"):
            raise MismatchError(f"compression {codec!r} for {pattern!r}: possible are None, 'zstd' and 'blosc'")
    return tuple(table.items())


def parts_of(split: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """None, or {pattern: parts in each dimension} with the first match winning."""
    table = {} if split is None else dict(split)
    for pattern, parts in table.items():
        if not isinstance(parts, (tuple, list)) or not parts or any(type(n) is not int or n < 1 for n in parts):
            raise MismatchError(f"split: {pattern!r} is {parts!r}; say the parts of each dimension, such as (1, 8)")
    return tuple((pattern, tuple(parts)) for pattern, parts in table.items())


def read_assets(assets: Any) -> dict[str, bytes]:
    """Files to carry along, from a folder or a mapping of paths to contents."""
    if assets is None:
        return {}
    if isinstance(assets, (str, os.PathLike)):
        root = Path(assets)
        if not root.is_dir():
            raise NotFoundError(f"assets: {root} is not a folder")
        files = {str(p.relative_to(root)): p for p in sorted(root.rglob("*")) if p.is_file()}
        for path in files:
            try:
                check_relative(path)
            except FormatError as error:  # no reader would take the manifest that names it
                raise MismatchError(
                    f"assets: {path!r} cannot be stored, its name holds a backslash or a control character: rename it"
                ) from error
        return {path: file.read_bytes() for path, file in files.items()}
    out = {}
    for path, data in dict(assets).items():
        check_relative(path)
        if not isinstance(data, (str, bytes, bytearray, memoryview)):
            raise MismatchError(f"assets: {path!r} is a {type(data).__name__}, not text or bytes")
        out[path] = data.encode() if isinstance(data, str) else bytes(data)
    return out


def split_url(url: str | os.PathLike[str]) -> tuple[str, str | None]:
    """`run@1000` as ("run", "1000"), `run@latest` as ("run", "latest"); anything else has no step."""
    text = os.fspath(url)
    found = _AT.match(text)
    return (found[1], found[2]) if found else (text, None)


def open_url(url: str | os.PathLike[str], **options: Any) -> Run | Checkpoint:
    """A run, or with `@step` or at a step's own folder a checkpoint."""
    base, step = split_url(url)
    if step is None:
        store = open_store(base, **options)
        return Checkpoint(store) if store.exists(MANIFEST) else Run(store)
    run = Run(base, **options)
    return run.latest if step == "latest" else run[int(step)]


def open_checkpoint(url: str | os.PathLike[str], **options: Any) -> Checkpoint:
    """A checkpoint, where a run stands for its latest step."""
    found = open_url(url, **options)
    return found.latest if isinstance(found, Run) else found


def _parent(path: str | os.PathLike[str]) -> tuple[str, str]:
    text = os.fspath(path).rstrip("/")
    head, _, name = text.rpartition("/")
    if not name or name.startswith("."):
        raise MismatchError(f"{text!r} cannot be saved to: the last part of the path names the checkpoint")
    scheme = text.partition("://")[0] if "://" in text else ""
    if scheme and head in (f"{scheme}:/", f"{scheme}:"):
        raise MismatchError(f"{text!r} names no folder inside the store")
    if _AT.match(name):
        raise MismatchError(f"{text!r} would be read as a step of a run: save with Run(...).save, or without the '@'")
    return head or ("/" if text.startswith("/") else "."), name


def save(
    path: str | os.PathLike[str],
    value: object,
    *,
    assets: Any = None,
    compression: Any = None,
    split: Mapping[str, Sequence[int]] | None = None,
    overwrite: bool = False,
    allow_pickle: bool = False,
    maps: Mapping[str, Any] | None = None,
    **options: Any,
) -> Result:
    """Save a tree as one checkpoint at this path, outside any run. Called by every rank."""
    base, name = _parent(path)
    with Run(base, **options) as run:
        topic = f"{run.url}/{name}"
        request = _request(name, None, topic, assets, compression, split, overwrite, maps, allow_pickle)
        return run._save(request, value)  # noqa: SLF001


def load(path: str | os.PathLike[str], value: Any = None, **how: Any) -> Any:
    """Fill a tree in place from a checkpoint (a run: its latest step); without a tree, return the saved one."""
    with without_collection(), open_checkpoint(path) as checkpoint:
        rank = Group.current().rank
        if value is None:
            return checkpoint.tree(rank=rank, **how)
        return checkpoint.load(value, rank=rank, **how)


__all__: Sequence[str] = ["Run", "load", "open_checkpoint", "open_url", "save"]
