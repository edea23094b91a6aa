"""Any fsspec URL as a store: S3 first, and whatever else fsspec reaches.

Rules: nothing is answered from a listing cache, because another process may have committed since; nothing is globbed,
because names may hold any character; every exception of the libraries below becomes a ckptfs error, marked transient
when trying again may help. A library that is not installed is an error that says how to install it.

`create` is one atomic conditional request on S3, GCS and Azure. Elsewhere fsspec has no such request: there it looks,
then puts, and two creators in the same moment may both succeed (`atomic_create` says which it is).
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ckptfs.errors import CkptError, ExistsError, NotFoundError, StorageError
from ckptfs.storage.base import Names, Store, check_path, check_range, join, os_error, truncated

_CONDITIONAL = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"})
_NETWORK_LIBRARIES = frozenset({"aiobotocore", "aiohttp", "botocore", "requests", "urllib3", "gcsfs"})
_EXTRAS = {"s3": "ckptfs[s3]", "s3a": "ckptfs[s3]", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
_DELETES_AT_ONCE = 16  # each is a round trip that waits, so threads cost nothing

Result = TypeVar("Result")


class FsspecStore(Store):
    """Everything under `url`; `options` are the file system's storage options (key, secret, endpoint_url, ...)."""

    def __init__(self, url: str, **options: Any) -> None:
        self.url = url.rstrip("/")
        self._options = options
        self._fs, root = _connect(self.url, options)
        self._root = root.rstrip("/")
        protocols = (self._fs.protocol,) if isinstance(self._fs.protocol, str) else self._fs.protocol
        self.atomic_create = not _CONDITIONAL.isdisjoint(protocols)

    def __repr__(self) -> str:
        return f"FsspecStore({self.url!r})"

    def _key(self, path: str) -> str:
        return f"{self._root}/{check_path(path)}"

    def _folder(self, prefix: str) -> str:
        return self._key(prefix) if prefix else self._root

    def _where(self, path: str) -> str:
        return f"{self.url}/{path}" if path else self.url

    def _ask(self, action: str, path: str, call: Callable[[], Result]) -> Result:
        try:
            return call()
        except CkptError:
            raise
        except Exception as error:  # the libraries below share no base class
            raise _translate(action, self._where(path), error) from error

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        check_range(path, start, stop)
        key = self._key(path)
        if start == 0 and stop is None:
            return bytes(self._ask("reading", path, lambda: self._fs.cat_file(key)))
        # Cut at the end here: servers answer a range past the end with an error, or with less, or with everything.
        size = self.size(path)
        end = size if stop is None else min(stop, size)
        return (
            bytes(self._ask("reading", path, lambda: self._fs.cat_file(key, start=start, end=end)))
            if start < end
            else b""
        )

    def read_into(self, path: str, offset: int, into: memoryview) -> None:
        check_range(path, offset, None)
        view = memoryview(into).cast("B")
        key, end = self._key(path), offset + len(view)
        try:
            data = self._ask("reading", path, lambda: self._fs.cat_file(key, start=offset, end=end))
        except NotFoundError:
            raise
        except StorageError:
            data = b""  # the range may lie past the end; if it does not, the failure stands
            if end <= self.size(path):
                raise
        if len(data) != len(view) or not view:
            size = self.size(path)
            if end > size:
                raise truncated(self._where(path), offset, len(view), max(0, size - offset))
        if len(data) != len(view):
            failure = StorageError(f"reading {self._where(path)}: {len(data)} bytes came, {len(view)} were asked for")
            failure.transient = True
            raise failure
        view[:] = data

    def write(self, path: str, data: bytes | bytearray | memoryview) -> None:
        value = bytes(data)
        self._ask("writing", path, lambda: self._put(self._key(path), value))

    def _put(self, key: str, value: bytes, **options: Any) -> None:
        try:
            self._fs.pipe_file(key, value, **options)
        except FileNotFoundError:  # a file system with real folders; object stores never say this of a key
            if self.atomic_create:
                raise
            self._fs.makedirs(key.rpartition("/")[0], exist_ok=True)
            self._fs.pipe_file(key, value, **options)

    def create(self, path: str, data: bytes | bytearray | memoryview) -> None:
        # Asked first everywhere: servers that ignore the condition then still refuse in all but a race.
        if self.exists(path):
            raise ExistsError(f"{self._where(path)} exists already and is not replaced")
        value = bytes(data)
        condition = {"mode": "create"} if self.atomic_create else {}
        self._ask("creating", path, lambda: self._put(self._key(path), value, **condition))

    def size(self, path: str) -> int:
        key = self._key(path)
        found = self._ask("looking at", path, lambda: self._fs.info(key))
        if found["type"] != "file":
            raise NotFoundError(f"looking at {self._where(path)}: it is not an object")
        return int(found["size"])

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        key = self._folder(prefix)
        self._fs.invalidate_cache(key)
        try:
            found = self._ask("listing", prefix, lambda: self._fs.find(key, detail=True))
        except NotFoundError:
            return iter(())
        below = [(self._below(key, name), int(info["size"] or 0)) for name, info in found.items()]
        return iter(sorted((join(prefix, path), size) for path, size in below if path and not path.endswith("/")))

    def children(self, prefix: str = "") -> tuple[Names, Names]:
        key = self._folder(prefix)
        self._fs.invalidate_cache(key)
        try:
            found = self._ask("listing", prefix, lambda: self._fs.ls(key, detail=True))
        except NotFoundError:
            return [], []
        names = {info["type"]: set[str]() for info in found} | {"directory": set[str](), "file": set[str]()}
        for info in found:
            names[info["type"]].add(self._below(key, info["name"]).rstrip("/"))
        return sorted(names["directory"] - {""}), sorted(names["file"] - {""})

    @staticmethod
    def _below(key: str, name: str) -> str:
        """The part of a full name below the folder `key`; "" for the folder itself, or an object of that very name."""
        start = f"{key.lstrip('/')}/"
        name = name.lstrip("/")
        return name[len(start) :] if name.startswith(start) else ""

    def remove(self, path: str) -> None:
        key = self._key(path)
        try:
            self._ask("removing", path, lambda: self._fs.rm_file(key))
        except NotFoundError:
            return

    def remove_tree(self, prefix: str) -> None:
        check_path(prefix)
        with ThreadPoolExecutor(_DELETES_AT_ONCE) as threads:
            # list(): an error of any thread is raised here
            list(threads.map(self.remove, [path for path, _ in self.list(prefix)]))

    def sub(self, prefix: str) -> FsspecStore:
        return FsspecStore(f"{self.url}/{check_path(prefix)}", **self._options)


def _connect(url: str, options: dict[str, Any]) -> tuple[Any, str]:
    scheme = url.partition("://")[0]
    install = f"pip install {_EXTRAS.get(scheme, 'fsspec and the package for ' + scheme + '://')}"
    try:
        from fsspec.core import url_to_fs

        found: tuple[Any, str] = url_to_fs(url, use_listings_cache=False, **options)
    except ImportError as error:
        raise StorageError(f"opening {url}: {error}; run: {install}") from error
    except Exception as error:  # wrong options raise anything
        raise StorageError(f"opening {url}: {error}; check the URL and its storage options") from error
    return found


def _translate(action: str, where: str, error: Exception) -> CkptError:
    """The ckptfs error for whatever a file system of fsspec raised."""
    if isinstance(error, FileNotFoundError):
        return NotFoundError(f"{action} {where}: it does not exist")
    if isinstance(error, FileExistsError) or _lost_condition(error):
        return ExistsError(f"{where} exists already and is not replaced")
    if isinstance(error, PermissionError):
        return StorageError(f"{action} {where}: {error}; check the credentials and what they may do")
    if isinstance(error, OSError) and error.errno not in (None, errno.EIO, errno.EREMOTEIO):
        failure = os_error(action, where, error)
    else:
        failure = StorageError(f"{action} {where}: {type(error).__name__}: {error}")
    if isinstance(failure, StorageError):
        failure.transient = failure.transient or _is_transient(error)
    return failure


def _lost_condition(error: Exception) -> bool:
    """Whether a create-only request was refused because the object is there (S3: 412, or 409 in a race)."""
    text = f"{error} {error.__cause__}"  # s3fs keeps the code in the cause only
    return any(code in text for code in ("PreconditionFailed", "ConditionalRequestConflict", "pre-conditions"))


def _is_transient(error: Exception) -> bool:
    if isinstance(error, (TimeoutError, ConnectionError, asyncio.TimeoutError)):
        return True
    if isinstance(error, OSError):
        return error.errno in (errno.EREMOTEIO, errno.EBUSY)  # what s3fs makes of InternalError and SlowDown
    return type(error).__module__.partition(".")[0] in _NETWORK_LIBRARIES
