"""The one interface to stored bytes, and how a URL becomes a store.

Rules: a store holds *objects* under relative '/'-separated paths; an object is replaced whole or not at all; nothing
here knows about checkpoints. Every failure is a ckptfs error that names the store and the path. Wrappers (retry,
counting, faults) implement the same interface, and one conformance suite runs over all of them. A store is used by
many threads at once.
"""

from __future__ import annotations

import errno
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from ckptfs.errors import CkptError, CorruptError, ExistsError, MismatchError, NotFoundError, StorageError

# What goes away by itself: worth another try. EIO is not in it: a disk that failed once is not to be trusted with more.
_TRANSIENT = frozenset(
    {
        errno.EAGAIN,
        errno.EBUSY,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTUNREACH,
        errno.ENETUNREACH,
        errno.EPIPE,
    }
)
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})

Names = list[str]  # a name of its own, because `Store.list` hides the built-in one


class Store(ABC):
    """Objects under relative paths. `positional` says whether many writers may write byte ranges of one object."""

    positional: ClassVar[bool] = False
    url: str

    @abstractmethod
    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes [start, stop) of an object, cut at its end as a slice is; NotFoundError if it is not there."""

    @abstractmethod
    def read_into(self, path: str, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `offset` on; CorruptError if the object ends before that."""

    @abstractmethod
    def write(self, path: str, data: bytes | bytearray | memoryview) -> None:
        """Make the object exactly `data`; readers see the old one or the new one, never a mixture."""

    @abstractmethod
    def create(self, path: str, data: bytes | bytearray | memoryview) -> None:
        """As `write`, but ExistsError when the object is there. Of several creators exactly one wins."""

    @abstractmethod
    def size(self, path: str) -> int:
        """The object's length in bytes; NotFoundError if it is not there."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """Every object below the folder `prefix`, at any depth, as (path, size), sorted by path; none is no error."""

    @abstractmethod
    def children(self, prefix: str = "") -> tuple[Names, Names]:
        """Sorted names of the folders and of the objects directly in `prefix`. Only a local store has empty folders."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Afterwards the object is gone; that it was gone before is no error (so a lost answer can be repeated)."""

    @abstractmethod
    def remove_tree(self, prefix: str) -> None:
        """Afterwards nothing is below the folder `prefix`, and on a local store the folder is gone too."""

    @abstractmethod
    def sub(self, prefix: str) -> Store:
        """The store of what lies below the folder `prefix`."""

    def exists(self, path: str) -> bool:
        try:
            self.size(path)
        except NotFoundError:
            return False
        return True


_UNSAFE = re.compile(r"(?:\A|/)\.{0,2}(?:/|\Z)|\0")  # a segment that is empty, "." or ".."; a null byte


def check_path(path: str, *, empty_ok: bool = False) -> str:
    """The path itself if it stays inside its store; StorageError otherwise."""
    if not path and empty_ok:
        return path
    if _UNSAFE.search(path):
        raise StorageError(
            f"{path!r} is not a path inside a store: use relative segments separated by '/', none empty, '.' or '..'"
        )
    return path


def join(prefix: str, path: str) -> str:
    """Both validated; either may be empty."""
    check_path(prefix, empty_ok=True)
    check_path(path, empty_ok=True)
    return f"{prefix}/{path}" if prefix and path else prefix or path


def check_range(path: str, start: int, stop: int | None) -> None:
    if start < 0 or (stop is not None and stop < start):
        raise StorageError(f"reading {path}: [{start}, {stop}) is not a byte range")


def truncated(where: str, offset: int, wanted: int, got: int) -> CorruptError:
    return CorruptError(
        f"{where} is too short: {wanted} bytes wanted from offset {offset}, {got} are there; "
        "it was truncated after it was written, restore it from a copy or use an older step"
    )


def os_error(action: str, where: str, error: OSError, detail: str = "") -> CkptError:
    """The ckptfs error for a failed system call: `action` is what was tried ("writing"), `where` the full path."""
    text = os.strerror(error.errno) if error.errno else str(error)
    message = f"{action} {where}{detail}: {text}"
    if error.errno in (errno.ENOENT, errno.ENOTDIR) and action != "writing":
        return NotFoundError(message)
    if error.errno == errno.EEXIST:
        return ExistsError(message)
    if error.errno in _NO_SPACE:
        message += "; free some space there or save elsewhere"
    failure = StorageError(message)
    failure.transient = error.errno in _TRANSIENT
    return failure


def open_store(url: str | os.PathLike[str], **options: Any) -> Store:
    """The store a URL names: a path or file:// is local, memory://name is this process, the rest goes to fsspec.

    `options` go to the store: `ops=` for a local one, fsspec's storage options (`key=`, `endpoint_url=` ...) otherwise.
    """
    text = os.fspath(url)
    try:
        legal = b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        legal = False
    if not legal:
        raise StorageError(f"{text!r:.200} is no place: it holds characters that no file name can have")
    scheme, separator, rest = text.partition("://")
    known = {"": {"ops"}, "file": {"ops"}, "memory": set[str]()}.get(scheme if separator else "")
    if known is not None and (unknown := sorted(options.keys() - known)):
        raise MismatchError(f"{text}: this store has no option {', '.join(unknown)}")
    if not separator:
        from ckptfs.storage.local import LocalStore

        return LocalStore(text, **options)
    if scheme == "file":
        from ckptfs.storage.local import LocalStore

        if not rest.startswith("/"):
            raise StorageError(f"{text!r} names no absolute path: write file:///folder/run, or just the path")
        return LocalStore(rest, **options)
    if scheme == "memory":
        from ckptfs.storage.memory import MemoryStore

        name, _, prefix = rest.strip("/").partition("/")
        return MemoryStore(name, prefix, **options)
    if not rest.strip("/"):
        raise StorageError(f"{text!r} names no bucket or folder")
    from ckptfs.storage.remote import FsspecStore

    return FsspecStore(text, **options)
