"""What a run looks like: its steps, `latest`, and `.ckptfs/`; and how a mount or a server gets the tree it shows."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckptfs import commit
from ckptfs.errors import MismatchError, NotFoundError
from ckptfs.manifest import NAME
from ckptfs.run import split_url
from ckptfs.storage import LocalStore, open_store
from ckptfs.views.config import ViewConfig
from ckptfs.views.nodes import Dir, Link, Node
from ckptfs.views.source import Shared, Source
from ckptfs.views.step import about_dir, step_children

if TYPE_CHECKING:
    from ckptfs.storage import Store


class RunDir(Dir):
    """Committed steps by name. A step that is replaced gets another version, so nobody mixes two of them."""

    def __init__(self, store: Store, shared: Shared) -> None:
        super().__init__(
            self._list, immutable=False, refresh_s=shared.config.refresh_s, blocking=not isinstance(store, LocalStore)
        )
        self._store, self._shared = store, shared
        self._known: dict[str, tuple[str, StepDir]] = {}
        self._known_lock = threading.Lock()
        self._about = about_dir(shared.activity, shared, {"url": store.url})

    def _list(self) -> Mapping[str, Node]:
        names = self._names()
        found = {name: self._step(name) for name in names}
        children: dict[str, Node] = {".ckptfs": self._about}
        children |= {name: step for name, step in found.items() if step is not None}
        with self._known_lock:
            for gone in self._known.keys() - set(names):
                self._drop(gone)
        steps = [name for name, step in found.items() if step is not None]
        if steps:
            children["latest"] = Link(steps[-1])
        return children

    def _names(self) -> list[str]:
        numbers = ((commit.step_number(name), name) for name in self._store.children()[0])
        return [name for _, name in sorted((number, name) for number, name in numbers if number is not None)]

    def lookup(self, name: str) -> Node:
        if name == ".ckptfs":
            return self._about
        if name == "latest":
            for step in reversed(self._names()):
                if self._step(step) is not None:
                    return Link(step)
        found = self._step(name) if commit.step_number(name) is not None else None
        if found is None:
            raise NotFoundError(f"{self._store.url} has no {name!r}")
        return found

    def _step(self, name: str) -> StepDir | None:
        version = _identity(self._store, name)
        with self._known_lock:
            known = self._known.get(name)
            if known is not None and known[0] == version:
                return known[1]
            self._drop(name)
            if version is None:
                return None
            step = StepDir(self._store, name, self._shared, version)
            self._known[name] = (version, step)
            return step

    def _drop(self, name: str) -> None:
        if name in self._known:
            self._known.pop(name)[1].retire()


class StepDir(Dir):
    """One step; its manifest is read when somebody looks inside."""

    def __init__(self, run: Store, name: str, shared: Shared, version: str) -> None:
        self._run, self._name, self._shared = run, name, shared
        self._source: weakref.ref[Source] | None = None
        super().__init__(
            self._open,
            immutable=True,
            version=version,
            blocking=not isinstance(run, LocalStore),
            mtime_ns=_changed_ns(run, name),
        )

    def _open(self) -> Mapping[str, Node]:
        source = Source(self._run, self._name, self._shared)
        self._source = weakref.ref(source)
        return step_children(source)

    def retire(self) -> None:
        """There is no such step any more."""
        source = self._source() if self._source is not None else None
        if source is not None:
            source.retire()


def _identity(run: Store, name: str) -> str | None:
    """Something that differs between two steps of one name; None if there is no such step. One cheap call."""
    if isinstance(run, LocalStore):
        try:
            found = os.stat(run.full(f"{name}/{NAME}"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return f"{found.st_dev}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}"
    try:
        size = run.size(f"{name}/{NAME}")
        return run.read(f"{name}/{NAME}", size - 35, size - 3).decode("ascii", "replace")
    except NotFoundError:
        return None


def _changed_ns(run: Store, name: str) -> int:
    if not isinstance(run, LocalStore):
        return 0
    try:
        return os.stat(run.full(f"{name}/{NAME}")).st_mtime_ns
    except OSError:
        return 0


def open_root(config: ViewConfig | Mapping[str, Any] | str) -> Dir:
    """The directory that a mount or a server shows: a run, one step of it, or a folder in one of them.

    A mapping is what `ViewConfig.to_dict` gave. Nothing here or below imports torch.
    """
    if isinstance(config, str):
        config = ViewConfig(url=config)
    elif not isinstance(config, ViewConfig):
        config = ViewConfig.from_dict(config)
    shared = Shared(config)
    root: Dir = _root(config, shared)
    for name in filter(None, config.subtree.split("/")):
        node = root.lookup(name)
        if isinstance(node, Link):
            node = root.lookup(node.target)  # `latest` names a step beside it
        if not isinstance(node, Dir):
            raise MismatchError(f"{config.url}: {config.subtree!r} is a file; name a directory")
        root = node
    return root


def _root(config: ViewConfig, shared: Shared) -> Dir:
    base, step = split_url(config.url)
    store = open_store(base, **config.storage)
    if step is None and not store.exists(NAME):
        if isinstance(store, LocalStore) and not os.path.isdir(store.root):
            raise NotFoundError(f"{store.url} does not exist: name a run, or a step of one")
        return RunDir(store, shared)
    if step is None:
        base, _, name = base.rstrip("/").rpartition("/") if "://" in base else os.path.abspath(base).rpartition("/")
        store = open_store(base or "/", **config.storage)
        return _one_step(store, name, shared)
    run = RunDir(store, shared)
    node = run.lookup("latest" if step == "latest" else commit.step_name(int(step)))
    return _one_step(store, node.target if isinstance(node, Link) else commit.step_name(int(step)), shared)


def _one_step(store: Store, name: str, shared: Shared) -> Dir:
    """A step as the root: it is opened now, so that a mistake shows at once, and stays the same for ever."""
    source = Source(store, name, shared)
    # Not immutable, because of `.ckptfs`: the backend that keeps one time for everything takes it from here.
    return Dir(step_children(source), immutable=False, refresh_s=60.0, version=source.version, mtime_ns=source.mtime_ns)
