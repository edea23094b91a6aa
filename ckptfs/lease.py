"""Leases: a step that somebody uses is not deleted.

Rules:
- `take(store, name)` pins one committed step, `follow(store, after)` pins every step after a position; `discard` is how
  steps are deleted: it refuses while either holds, and nobody can take a lease on a step that is going away.
- On a file system a lease is a shared flock on the step's manifest.json. Nothing is written, a read-only mount will do,
  and the kernel drops it when the process dies. Deleting takes the same lock exclusively.
- On object stores, for followers, and where flock does not work, it is an object in `.leases/` that expires. A thread
  renews it; after a crash it holds for `ttl_s` more. The clocks of the machines must agree to a fraction of that.
- Replacing a step (`overwrite=True`) asks nobody, but what was replaced stays, hidden, while a file's lease holds it,
  and is read through `FileLease.hold`. Steps in object stores are never replaced.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, Self

from ckptfs import commit
from ckptfs.errors import CkptError, NotFoundError, StaleError, StorageError
from ckptfs.manifest import NAME
from ckptfs.storage.base import os_error

if TYPE_CHECKING:
    from ckptfs.storage import LocalStore, Store

FOLDER = ".leases"
TTL_S = 60.0
_BUSY_TIMEOUT_S = 10.0  # how long somebody may look at a step (`held`) before `take` gives up
_NO_FLOCK = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL})
_log = logging.getLogger("ckptfs.lease")


class Lease(Protocol):
    """What `take` returns: held until `release`, which may be called twice."""

    def release(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exc: object) -> None: ...


def take(store: Store, name: str, *, ttl_s: float = TTL_S) -> Lease:
    """Pin the step in folder `name` of a run's store; NotFoundError if it is not there, or just being deleted."""
    if store.positional:
        found = _take_file(store, name)  # type: ignore[arg-type]
        if found is not None:
            return found
    lease = ObjectLease(store, {"step": name}, ttl_s)
    # First the lease, then the look: of a taker and a deleter at the same moment at least one sees the other.
    try:
        gone = not commit.exists(store, name) or any(entry.get("deleting") == name for entry in _live(store))
    except BaseException:
        lease.release()
        raise
    if gone:
        lease.release()
        raise _gone(store, name)
    return lease


def follow(store: Store, after: int, *, ttl_s: float = TTL_S) -> ObjectLease:
    """Pin every step with a number above `after`, also those yet to come; `move(after)` lets go of the lower ones."""
    return ObjectLease(store, {"after": after}, ttl_s)


def held(store: Store, name: str) -> bool:
    """Whether anybody uses the step now. To delete it, call `discard`: this answer is old when it arrives."""
    if _holders(store, name):
        return True
    if not store.positional:
        return False
    with _exclusive(store, name) as free:  # type: ignore[arg-type]
        return not free


@contextmanager
def deleting(store: Store, name: str) -> Iterator[bool]:
    """Whether nobody uses the step; if so nobody can start to before the block ends. Delete it inside."""
    marker = ObjectLease(store, {"deleting": name}, TTL_S) if not store.positional or _flock_missing(store) else None
    try:
        if _holders(store, name):
            yield False
        elif store.positional:
            with _exclusive(store, name) as free:  # type: ignore[arg-type]
                yield free
        else:
            yield True
    finally:
        if marker is not None:
            marker.release()


def discard(store: Store, name: str) -> bool:
    """Delete a step unless somebody uses it; says whether it is gone."""
    with deleting(store, name) as free:
        if free:
            commit.discard(store, name)
    return free


def _gone(store: Store, name: str) -> NotFoundError:
    return NotFoundError(f"{store.url}/{name} is not a committed step, or is being deleted; see what the run has now")


# --- file systems ----------------------------------------------------------------------------------------


class FileLease:
    """A shared lock on an open manifest."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._folder_fd = -1
        self._process = os.getpid()

    def hold(self, folder: str) -> str:
        """A path of the step's folder that means this step until `release`; StaleError if `folder` is another now."""
        try:
            fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise StaleError(f"{folder} was deleted or replaced: open it again") from error
        here = f"/proc/self/fd/{fd}"
        if not _same_file(self._fd, f"{here}/{NAME}"):
            os.close(fd)
            raise StaleError(f"{folder} was replaced: open it again")
        self._folder_fd = fd
        return here

    def release(self) -> None:
        folder_fd, self._folder_fd = self._folder_fd, -1
        if folder_fd >= 0:
            os.close(folder_fd)
        fd, self._fd = self._fd, -1
        if fd >= 0 and self._process == os.getpid():
            commit.unlock(fd)
        elif fd >= 0:
            os.close(fd)  # a forked child's copy: unlocking it would unlock the parent's

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def __del__(self) -> None:
        if os is not None and fcntl is not None:  # None while the interpreter ends; then the kernel unlocks
            self.release()


def _take_file(store: LocalStore, name: str) -> FileLease | None:
    """None where the file system knows no flock."""
    path = f"{store.full(name)}/{NAME}"
    give_up = time.monotonic() + _BUSY_TIMEOUT_S
    while True:
        try:
            fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                raise _gone(store, name) from None
            raise os_error("opening", path, error) from error
        try:
            locked = _lock(fd, fcntl.LOCK_SH)
        except OSError as error:
            os.close(fd)
            if error.errno in _NO_FLOCK:
                return None
            raise os_error("locking", path, error) from error
        if locked and _same_file(fd, path):
            return FileLease(fd)
        commit.unlock(fd)
        if not locked:  # somebody deletes it, or only looks whether it is held
            if time.monotonic() > give_up:
                raise StorageError(f"{path} has been locked for {_BUSY_TIMEOUT_S:g} s; see who holds it with lslocks")
            time.sleep(0.002)


def _lock(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _same_file(fd: int, path: str) -> bool:
    """Whether the locked file is still what the path names: it may have been moved away before the lock came."""
    try:
        found = os.stat(path)
    except OSError:
        return False
    mine = os.fstat(fd)
    return (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino)


@contextmanager
def _exclusive(store: LocalStore, name: str) -> Iterator[bool]:
    """Whether the exclusive lock was free; it is held meanwhile. A step that is not there is free."""
    path = f"{store.full(name)}/{NAME}"
    fd = _open_to_lock(path)
    if fd is None:
        yield True
        return
    try:
        try:
            free = _lock(fd, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                raise os_error("locking", path, error) from error
            free = True
        yield free
    finally:
        commit.unlock(fd)


def _open_to_lock(path: str) -> int | None:
    # NFS turns flock into a lock of byte ranges: exclusive ones need a descriptor that may write.
    for flags in (os.O_RDWR, os.O_RDONLY):
        try:
            return os.open(path, flags)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                return None
            if flags == os.O_RDONLY or error.errno not in (errno.EACCES, errno.EROFS, errno.EPERM):
                raise os_error("opening", path, error) from error
    return None


def _flock_missing(store: Store) -> bool:
    root: str = store.root  # type: ignore[attr-defined]
    try:
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        _lock(fd, fcntl.LOCK_SH)
    except OSError as error:
        # Some refuse folders only; then the marker is written for nothing, which harms nobody.
        return error.errno in _NO_FLOCK
    finally:
        os.close(fd)
    return False


# --- objects that expire ---------------------------------------------------------------------------------


class ObjectLease:
    """A lease written as an object, renewed by a thread until it is released."""

    def __init__(self, store: Store, entry: dict[str, Any], ttl_s: float) -> None:
        self._store, self._ttl_s = store, ttl_s
        self._process = os.getpid()
        self._entry = entry | {"who": f"{socket.gethostname()}:{self._process}"}
        self._path = f"{FOLDER}/{uuid.uuid4().hex}.json"
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._write()
        self._thread = threading.Thread(target=self._renew, name="ckptfs-lease", daemon=True)
        self._thread.start()

    def move(self, after: int) -> None:
        """A follower has gone on to another position."""
        with self._lock:
            self._entry["after"] = after
        self._write()

    def release(self) -> None:
        if self._stop.is_set() or self._process != os.getpid():  # a forked child has nothing of its own here
            return
        self._stop.set()
        self._thread.join()  # a renewal under way would bring the object back
        try:
            self._store.remove(self._path)
        except CkptError as error:
            _log.warning("%s: a lease could not be removed and stays until it expires: %s", self._store.url, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def _write(self) -> None:
        with self._lock:
            entry = self._entry | {"expires": time.time() + self._ttl_s}
            self._store.write(self._path, json.dumps(entry).encode())

    def _renew(self) -> None:
        while not self._stop.wait(self._ttl_s / 3):
            try:
                self._write()
            except CkptError as error:
                _log.warning("%s: a lease could not be renewed, trying again: %s", self._store.url, error)


def _live(store: Store) -> Iterator[dict[str, Any]]:
    """Every entry that has not expired; those long dead are removed on the way."""
    now = time.time()
    for name in store.children(FOLDER)[1]:
        path = f"{FOLDER}/{name}"
        try:
            entry = json.loads(store.read(path))
            expires = float(entry["expires"])
        except NotFoundError:
            continue  # released meanwhile
        except (ValueError, KeyError, TypeError):
            continue  # not ours
        if expires > now:
            yield entry
        elif expires < now - 10 * TTL_S:
            store.remove(path)


def _holders(store: Store, name: str) -> list[str]:
    """Who holds the step with an object."""
    step = commit.step_number(name)
    found = []
    for entry in _live(store):
        after = entry.get("after")
        if entry.get("step") == name or (type(after) is int and step is not None and step > after):
            found.append(str(entry.get("who")))
    return found
