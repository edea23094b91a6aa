"""A run: a folder or URL of steps. Save, find, load."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ckptfs import commit
from ckptfs.checkpoint import Checkpoint
from ckptfs.errors import MismatchError, NotFoundError
from ckptfs.manifest import check_relative
from ckptfs.ranks import Group
from ckptfs.save import PlanCache, Request, Result, Save, Saver
from ckptfs.settings import Settings
from ckptfs.storage import open_store
from ckptfs.storage.directio import BufferPool

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ckptfs.watch import Leased

Compression = "str | None | Mapping[str, str | None]"
_AT = re.compile(r"(?s)(.*)@(latest|\d+)\Z")


class Run:
    """Steps under one URL. Cheap to make; safe to make on every rank."""

    def __init__(
        self, url: Any, *, group: Group | None = None, settings: Settings | None = None, **options: Any
    ) -> None:
        self.store = url if hasattr(url, "read_into") else open_store(url, **options)
        self.settings = settings or Settings()
        self._group = group
        self._cache = PlanCache()
        self._pool: BufferPool | None = None

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
        name = commit.step_name(step)
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

    def save(  # noqa: PLR0913
        self,
        step: int,
        value: object,
        *,
        assets: str | os.PathLike[str] | Mapping[str, bytes | str] | None = None,
        compression: Any = None,
        overwrite: bool = False,
        allow_pickle: bool = False,
        maps: Mapping[str, Any] | None = None,
    ) -> Result:
        """Save a tree as `step`; returns when it is committed, durable and visible, or raises. Called by every rank."""
        if type(step) is not int or step < 0:
            raise MismatchError(f"a step is a whole number from 0 on, not {step!r}")
        return self._save(
            Request(
                commit.step_name(step),
                step,
                self.url,
                overwrite,
                patterns_of(compression),
                read_assets(assets) if self.group.rank == 0 else {},
                maps or {},
                allow_pickle,
            ),
            value,
        )

    def _save(self, request: Request, value: object) -> Result:
        return Save(self._saver(request)).run(value)

    def _saver(self, request: Request) -> Saver:
        if self._pool is None and self.store.positional:
            self._pool = BufferPool(self.settings.buffer_bytes, self.settings.io_bytes)
        return Saver(self.store, request, self.group, self.settings, self._cache, self._pool)

    def close(self) -> None:
        """Give buffers back."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- loading ---------------------------------------------------------------------------------------

    def load(self, value: Any, step: int | None = None, **how: Any) -> Any:
        """Fill a tree in place from a step (default: the latest), whatever layout it has; see Checkpoint.load."""
        with self.latest if step is None else self[step] as checkpoint:
            return checkpoint.load(value, rank=self.group.rank, **how)


def patterns_of(compression: Any) -> tuple[tuple[str, str | None], ...]:
    """None, one codec for all, or {pattern: codec} with the first match winning."""
    if compression is None:
        return ()
    table = {"*": compression} if isinstance(compression, str) else dict(compression)
    for pattern, codec in table.items():
        if codec not in (None, "zstd", "blosc"):
            raise MismatchError(f"compression {codec!r} for {pattern!r}: possible are None, 'zstd' and 'blosc'")
    return tuple(table.items())


def read_assets(assets: Any) -> dict[str, bytes]:
    """Files to carry along, from a folder or a mapping of paths to contents."""
    if assets is None:
        return {}
    if isinstance(assets, (str, os.PathLike)):
        root = Path(assets)
        if not root.is_dir():
            raise NotFoundError(f"assets: {root} is not a folder")
        return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}
    out = {}
    for path, data in dict(assets).items():
        check_relative(path)
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
        return Checkpoint(store) if store.exists(commit.mf.NAME) else Run(store)
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
    return head or ("/" if text.startswith("/") else "."), name


def save(  # noqa: PLR0913
    path: str | os.PathLike[str],
    value: object,
    *,
    assets: Any = None,
    compression: Any = None,
    overwrite: bool = False,
    allow_pickle: bool = False,
    maps: Mapping[str, Any] | None = None,
    **options: Any,
) -> Result:
    """Save a tree as one checkpoint at this path, outside any run. Called by every rank."""
    base, name = _parent(path)
    with Run(base, **options) as run:
        assets = read_assets(assets) if run.group.rank == 0 else {}
        request = Request(
            name, None, f"{run.url}/{name}", overwrite, patterns_of(compression), assets, maps or {}, allow_pickle
        )
        return run._save(request, value)  # noqa: SLF001


def load(path: str | os.PathLike[str], value: Any = None, **how: Any) -> Any:
    """Fill a tree in place from a checkpoint (a run: its latest step); without a tree, return the saved one."""
    with open_checkpoint(path) as checkpoint:
        rank = Group.current().rank
        if value is None:
            return checkpoint.tree(rank=rank, **how)
        return checkpoint.load(value, rank=rank, **how)


__all__: Sequence[str] = ["Run", "load", "open_checkpoint", "open_url", "save"]
