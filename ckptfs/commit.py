"""From the ranks' reports to a committed step, and from committed steps to none.

Order on a file system: data durable (each rank), metadata and manifest into the temporary folder, all durable,
one rename to the final name, the parent folder durable. On an object store the manifest is created last.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import os
import re
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ckptfs import manifest as mf
from ckptfs import tree, zarr3
from ckptfs.errors import CkptError, ExistsError, MismatchError, NotFoundError, StorageError
from ckptfs.manifest import Manifest, Param, digest, without_collection
from ckptfs.report import params_of
from ckptfs.storage.base import os_error
from ckptfs.version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptfs.codec import Codec
    from ckptfs.dtypes import DType
    from ckptfs.grid import Layout
    from ckptfs.report import Report
    from ckptfs.saveplan import Array, SavePlan
    from ckptfs.storage import LocalStore, Store

SAVING, DELETING = ".saving", ".deleting"
_CLAIM_TIMEOUT_S = 10.0
_STEP = re.compile(r"step-(\d{8,})\Z")


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def step_number(name: str) -> int | None:
    """The step of a folder name, None for any other folder. Only the name that `step_name` gives counts."""
    found = _STEP.match(name)
    return int(found[1]) if found and step_name(int(found[1])) == name else None


def saving_name(name: str, save_id: str) -> str:
    return f".{name}.{save_id}{SAVING}"


# --- metadata --------------------------------------------------------------------------------------------


def array_document(array: Array) -> bytes:
    """An array's zarr.json, a pure function of the plan."""
    return _document(array.layout, array.dtype, array.codec)[1]


@lru_cache(maxsize=1024)
def _document(layout: Layout, dtype: DType, codec: Codec | None) -> tuple[dict[str, Any], bytes, str]:
    """A zarr.json, its bytes and their checksum; a model has few that differ."""
    document = zarr3.array_json(layout, dtype, codec)
    text = zarr3.dump(document)
    return document, text, digest(text).hex()


Documents = tuple[dict[str, bytes], dict[str, str]]


def documents(params: dict[str, Param]) -> Documents:
    """(path → bytes of every zarr.json above the arrays, path → checksum of every array's own)."""
    found = {p.path: _document(p.layout, p.dtype, p.codec) for p in params.values()}
    arrays = {path: document for path, (document, _, _) in found.items()}
    out = {f"{group}/zarr.json": zarr3.dump(zarr3.group_json()) for group in zarr3.groups_of(arrays)}
    out["zarr.json"] = zarr3.dump(zarr3.root_json(arrays))
    return out, {path: checksum for path, (_, _, checksum) in found.items()}


def now() -> str:
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def put(target: Store, path: str, data: bytes, like: str = "") -> None:
    """A small file of a step that is not committed yet. `like`: a file there with these very bytes."""
    if not target.positional:
        target.write(path, data)
        return
    local: LocalStore = target  # type: ignore[assignment]
    folder = path.rpartition("/")[0]
    if folder:
        local.make_dirs(folder)
    if like in ("", path) or not local.link_unsynced(like, path):
        local.write_unsynced(path, data)


def assemble(
    target: Store,
    plan: SavePlan,
    reports: Sequence[Report],
    *,
    save_id: str,
    step: int | None,
    assets: Mapping[str, bytes],
    maps: Mapping[str, Any],
    known: Documents | None = None,
) -> tuple[Manifest, Documents]:
    """The manifest of what the ranks reported, and the documents and assets that it speaks of, written.

    The documents follow from the plan: those of its last save are `known`.
    """
    compare_small([extra["small"] for _, extra in reports])
    node = tree.merge({r: tree.loads(extra["node"]) for r, (_, extra) in enumerate(reports) if "node" in extra})
    params = params_of(plan, (pieces for reported, _ in reports for pieces in reported))
    texts, hashes = known or documents(params)
    for path, text in texts.items():
        put(target, path, text)
    listed = {}
    for path, data in assets.items():
        put(target, f"assets/{path}", data)
        listed[path] = (len(data), digest(data).hex())
    built = build(
        params,
        tree=node,
        save_id=save_id,
        step=step,
        world=len(reports),
        aliases=dict(plan.aliases),
        assets=listed,
        maps=dict(maps),
        root_hash=digest(texts["zarr.json"]).hex(),
        zarr_hashes=hashes,
    )
    return built, (texts, hashes)


def dump(manifest: Manifest) -> bytes:
    with without_collection():
        return manifest.dump(f"ckptfs {__version__}")


def compare_small(tables: Sequence[dict[str, str]]) -> None:
    """Small plain tensors under one name must be equal wherever they are."""
    first: dict[str, tuple[int, str]] = {}
    for rank, table in enumerate(tables):
        for name, value in table.items():
            known = first.setdefault(name, (rank, value))
            if known[1] != value:
                msg = (
                    f"{name!r} differs between rank {known[0]} and rank {rank}, but is a plain tensor on both: wrap it "
                    "in ckptfs.PerRank(...) to keep every rank's own, or make the ranks agree"
                )
                raise MismatchError(msg)


# --- publishing ------------------------------------------------------------------------------------------


class Claim:
    """The leader's hold on the folder of its unfinished save.

    It is a lock, so that another job on this machine leaves the folder alone while we live, and a descriptor, so that
    the manifest can only ever go into the folder the data went into: if another job has cleared that away (it thought
    us dead), stragglers may have made a new one of the same name.
    """

    def __init__(self, run: LocalStore, folder: str) -> None:
        """Make the folder and lock it. To be done before anybody writes there: without the lock it looks like a dead
        save's, and another job may have cleared it away by then; it is made once more.
        """
        path, give_up = run.full(folder), time.monotonic() + _CLAIM_TIMEOUT_S
        while True:
            run.make_dirs(folder)
            self._fd: int | None = _locked(path)
            if self._fd is not None:
                return
            if time.monotonic() > give_up:
                raise StorageError(f"{path} could not be locked within {_CLAIM_TIMEOUT_S:g} s: who removes it?")
            time.sleep(0.001)

    def store(self, run: LocalStore, folder: str) -> LocalStore:
        """The folder itself, whatever its name is by now."""
        from ckptfs.storage.local import LocalStore

        here = f"/proc/self/fd/{self._fd}"
        return LocalStore(here, ops=run.ops) if self._fd is not None and os.path.isdir(here) else run.sub(folder)

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            unlock(fd)


def _locked(path: str) -> int | None:
    """A descriptor of the folder that holds its lock; None if another has the lock, or the folder is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise os_error("opening", path, error) from error
    if _lock(fd):
        with contextlib.suppress(OSError):  # it is gone, and is made once more
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
    unlock(fd)
    return None


def unlock(fd: int) -> None:
    """Let go of a lock and close its descriptor."""
    try:
        fcntl.flock(fd, fcntl.LOCK_UN)  # not close alone: a forked child may have a copy of the descriptor
    except OSError:
        pass  # where a file system has no locks
    finally:
        os.close(fd)


def _lock(fd: int) -> bool:
    """Whether we hold the lock now; where a file system has none, nobody is kept out."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def publish(run: Store, name: str, folder: str, raw: bytes, *, overwrite: bool, claim: Claim | None = None) -> None:
    """Make the finished save in `folder` the step `name`. `raw`: its manifest."""
    if not run.positional:
        _publish_object(run, name, raw)
        return
    local: LocalStore = run  # type: ignore[assignment]
    target = claim.store(local, folder) if claim is not None else local.sub(folder)
    target.write_unsynced(mf.NAME, raw)  # nobody sees the folder yet: one sync for all that is in it
    target.syncfs()
    try:
        local.rename_dir(folder, name)
    except ExistsError:
        check_free(local, name, overwrite=overwrite)
        local.exchange_dirs(folder, name)
        local.sync_dir()
        _collect(local, folder)
        return
    local.sync_dir()


def _publish_object(run: Store, name: str, raw: bytes) -> None:
    path = f"{name}/{mf.NAME}"
    try:
        run.create(path, raw)
    except ExistsError:
        # The answer to our own create may have been lost: then what is there is ours.
        if run.read(path) != raw:
            raise


def discard(run: Store, name: str) -> None:
    """Delete a folder such that a crash on the way leaves nothing that looks like a step."""
    if run.positional and not name.startswith("."):
        doomed = f".{name}{DELETING}"
        local: LocalStore = run  # type: ignore[assignment]
        try:
            local.remove_tree(doomed)
            local.rename_dir(name, doomed)
        except NotFoundError:
            return
        local.sync_dir()
        local.remove_tree(doomed)
        return
    if not run.positional:
        try:
            run.remove(f"{name}/{mf.NAME}")  # the step stops existing here
        except NotFoundError:
            pass
    run.remove_tree(name)


def collect(run: Store, prefix: str) -> list[str]:
    """Remove what dead saves and half-done deletions left (names that start with `.prefix`); returns what was removed.

    A save that lives on this machine is left alone. One that lives elsewhere, unseen, finds its folder gone: renamed
    first, at once, so that what it commits is whole or nothing.
    """
    if not run.positional:
        return []
    local: LocalStore = run  # type: ignore[assignment]
    left = [name for name in run.children()[0] if name.startswith(f".{prefix}") and name.endswith((SAVING, DELETING))]
    return [name for name in left if _collect(local, name)]


def _collect(run: LocalStore, name: str) -> bool:
    """Remove one hidden folder, unless a save that lives, or a reader of the step that it once was, holds it."""
    try:
        fd = os.open(run.full(name), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # somebody else removes it too
        return False
    try:
        if not _lock(fd) or _is_read(run, name):
            return False
        doomed = name if name.endswith(DELETING) else name + DELETING
        if doomed != name:
            run.rename_dir(name, doomed)
        run.remove_tree(doomed)
    except CkptError:  # it is invisible anyway, and tried again by the next save
        return False
    finally:
        unlock(fd)
    return True


def _is_read(run: LocalStore, name: str) -> bool:
    """Whether somebody holds a lease on the step that was in this folder until it was replaced."""
    try:
        fd = os.open(f"{run.full(name)}/{mf.NAME}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # an unfinished save has no manifest
        return False
    try:
        return not _lock(fd)
    finally:
        unlock(fd)


def check_free(run: Store, name: str, *, overwrite: bool) -> None:
    """ExistsError unless a step may get this name: nothing has it, an empty folder, or a step and `overwrite`.

    In an object store leftovers of a dead save have the name too, and nothing tells them from other people's objects.
    """
    if exists(run, name):
        if not overwrite:
            raise ExistsError(f"{run.url}/{name} exists already; pass overwrite=True to replace it")
    elif run.positional and (run.exists(name) or any(run.children(name)) or _is_link(run, name)):
        raise ExistsError(f"{run.url}/{name} is there and is not a checkpoint: move it away, or save elsewhere")


def _is_link(run: Store, name: str) -> bool:
    """Whether the name is a symbolic link, also one to nowhere or to an empty folder: a commit would take its place."""
    return os.path.islink(run.full(name))  # type: ignore[attr-defined]


def exists(run: Store, name: str) -> bool:
    return run.exists(f"{name}/{mf.NAME}")


def build(
    params: dict[str, Param],
    *,
    tree: Any,
    save_id: str,
    step: int | None,
    world: int,
    aliases: dict[str, str],
    assets: dict[str, tuple[int, str]],
    maps: dict[str, Any],
    root_hash: str,
    zarr_hashes: dict[str, str],
) -> Manifest:
    full = {
        name: Param(p.name, p.path, p.dtype, p.layout, p.codec, p.runs, p.hashes, zarr_hashes[p.path])
        for name, p in params.items()
    }
    return Manifest(full, tree, save_id, step, now(), world, aliases, assets, root_hash, maps)
