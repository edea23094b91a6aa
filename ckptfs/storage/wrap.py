"""Wrappers with the interface of a store: retry, count, and fail on purpose.

Rules: a wrapper adds one thing and passes everything else on; `sub` wraps the inner store's `sub` and shares counters
and plans with it. Faults come from a plan with a seed or an operation number, so a failure is repeated by repeating the
numbers. Wrapped stores are object stores: the byte-range writes of a local store are failed through its `ops`.
"""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

from ckptfs.errors import ExistsError, NotFoundError, StorageError
from ckptfs.storage.base import Names, Store
from ckptfs.storage.fileops import FileOps

Result = TypeVar("Result")
Data = bytes | bytearray | memoryview


class _Wrapper(Store):
    """Every operation passes through `_call(name, path, data, operation)`; `data` is what is written, if anything."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.url = inner.url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    def _call(self, name: str, path: str, data: Data | None, operation: Callable[[], Result]) -> Result:
        raise NotImplementedError

    def _wrap(self, inner: Store) -> Store:
        raise NotImplementedError

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._call("read", path, None, lambda: self.inner.read(path, start, stop))

    def read_into(self, path: str, offset: int, into: memoryview) -> None:
        self._call("read_into", path, None, lambda: self.inner.read_into(path, offset, into))

    def write(self, path: str, data: Data) -> None:
        self._call("write", path, data, lambda: self.inner.write(path, data))

    def create(self, path: str, data: Data) -> None:
        self._call("create", path, data, lambda: self.inner.create(path, data))

    def size(self, path: str) -> int:
        return self._call("size", path, None, lambda: self.inner.size(path))

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        # Inside the call, because the requests of a lazy listing would otherwise happen outside it.
        return iter(self._call("list", prefix, None, lambda: sorted(self.inner.list(prefix))))

    def children(self, prefix: str = "") -> tuple[Names, Names]:
        return self._call("children", prefix, None, lambda: self.inner.children(prefix))

    def remove(self, path: str) -> None:
        self._call("remove", path, None, lambda: self.inner.remove(path))

    def remove_tree(self, prefix: str) -> None:
        self._call("remove_tree", prefix, None, lambda: self.inner.remove_tree(prefix))

    def sub(self, prefix: str) -> Store:
        return self._wrap(self.inner.sub(prefix))


class RetryStore(_Wrapper):
    """Repeats what failed in a way that may pass (StorageError with `transient`), waiting longer each time.

    The wait is random below a limit that doubles, so that a thousand ranks that failed together don't come back
    together. NotFoundError and ExistsError are answers, not failures.
    """

    def __init__(
        self,
        inner: Store,
        *,
        attempts: int = 6,
        first_delay_s: float = 0.2,
        max_delay_s: float = 10.0,
        sleep: Callable[[float], None] = time.sleep,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        super().__init__(inner)
        self._settings: dict[str, Any] = {
            "attempts": attempts,
            "first_delay_s": first_delay_s,
            "max_delay_s": max_delay_s,
            "sleep": sleep,
            "uniform": uniform,
        }
        self._attempts = attempts
        self._delays_s = [min(first_delay_s * 2**number, max_delay_s) for number in range(attempts - 1)]
        self._sleep = sleep
        self._uniform = uniform

    def _wrap(self, inner: Store) -> Store:
        return RetryStore(inner, **self._settings)

    def _call(self, name: str, path: str, data: Data | None, operation: Callable[[], Result]) -> Result:
        for delay_s in self._delays_s:
            try:
                return operation()
            except StorageError as error:
                if not error.transient:
                    raise
            self._sleep(self._uniform(0.0, delay_s))
        return operation()

    def create(self, path: str, data: Data) -> None:
        """If an answer was lost, "exists already" may be our own object: it is ours when its bytes are.

        So what is created must differ between creators (a manifest carries its save_id).
        """
        tries = 0

        def attempt() -> None:
            nonlocal tries
            tries += 1
            try:
                self.inner.create(path, data)
            except ExistsError:
                if tries == 1 or not self._holds(path, data):
                    raise

        self._call("create", path, data, attempt)

    def _holds(self, path: str, data: Data) -> bool:
        try:
            return self.inner.size(path) == memoryview(data).nbytes and self.inner.read(path) == bytes(data)
        except NotFoundError:
            return False


class Counts:
    """What passed through a CountingStore, by operation; safe to add to from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.calls: dict[str, int] = {}
        self.read_bytes = 0
        self.written_bytes = 0

    def add(self, name: str, *, calls: int = 0, read_bytes: int = 0, written_bytes: int = 0) -> None:
        with self._lock:
            self.calls[name] = self.calls.get(name, 0) + calls
            self.read_bytes += read_bytes
            self.written_bytes += written_bytes


class CountingStore(_Wrapper):
    """Counts calls and bytes in `counts`, which its `sub` stores share. Bytes count when they arrived."""

    def __init__(self, inner: Store, counts: Counts | None = None) -> None:
        super().__init__(inner)
        self.counts = counts or Counts()

    def _wrap(self, inner: Store) -> Store:
        return CountingStore(inner, self.counts)

    def _call(self, name: str, path: str, data: Data | None, operation: Callable[[], Result]) -> Result:
        self.counts.add(name, calls=1)
        result = operation()
        written = 0 if data is None else memoryview(data).nbytes
        read = len(result) if isinstance(result, bytes) else 0
        self.counts.add(name, read_bytes=read, written_bytes=written)
        return result

    def read_into(self, path: str, offset: int, into: memoryview) -> None:
        super().read_into(path, offset, into)
        self.counts.add("read_into", read_bytes=memoryview(into).nbytes)


# -- faults ------------------------------------------------------------------------------------------------------------


class SimulatedCrash(BaseException):
    """The process died here. Not an Exception: no cleanup code may catch it and act after its own death."""


FaultKind = Literal["error-before", "error-after", "short", "torn", "crash-before", "crash-after"]
"""error-before: nothing happened. error-after: it happened, the answer was lost. short: half of it happened and the
caller is told so (an error from an object store, a smaller count from a system call). torn: half of it happened, then
the process died. crash-before, crash-after: the process died right before or after it."""


class FaultPlan:
    """Which operations fail: number `at` (from 0), or each with probability `rate` drawn from `seed`.

    `only` limits both the counting and the failing to these operation names. After a crash everything crashes.
    `log` holds the names of the operations so far, so that a test knows how many there are to fail.
    """

    def __init__(
        self,
        kind: FaultKind = "error-before",
        *,
        at: int | None = None,
        seed: int = 0,
        rate: float = 0.0,
        only: frozenset[str] | None = None,
    ) -> None:
        self.kind: FaultKind = kind
        self.at = at
        self.rate = rate
        self.only = only
        self.log: list[str] = []
        self.crashed = False
        self.faults = 0
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def next(self, name: str) -> FaultKind | None:
        """The fault for the operation that starts now, or None."""
        with self._lock:
            if self.crashed:
                raise SimulatedCrash(f"{name} after the crash")
            if self.only is not None and name not in self.only:
                return None
            number = len(self.log)
            self.log.append(name)
            if number != self.at and not (self.rate and self._random.random() < self.rate):
                return None
            self.faults += 1
            return self.kind

    def crash(self, name: str) -> SimulatedCrash:
        """From now on nothing works; the exception to raise."""
        self.crashed = True
        return SimulatedCrash(f"crashed at {name} (operation {len(self.log) - 1})")

    def run(
        self, name: str, fault: Callable[[], Exception], whole: Callable[[], Result], half: Callable[[], Any]
    ) -> Result:
        """Do `whole`, or what the plan has for this operation: `half` of it, the error `fault`, a crash."""
        kind = self.next(name)
        if kind == "error-before":
            raise fault()
        if kind == "crash-before":
            raise self.crash(name)
        if kind in ("short", "torn"):
            half()
            raise fault() if kind == "short" else self.crash(name)
        result = whole()
        if kind == "error-after":
            raise fault()
        if kind == "crash-after":
            raise self.crash(name)
        return result


class FaultStore(_Wrapper):
    """Fails as its plan says, with transient errors unless told otherwise. Half a write leaves half the object."""

    def __init__(self, inner: Store, plan: FaultPlan, *, transient: bool = True) -> None:
        super().__init__(inner)
        self.plan = plan
        self._transient = transient

    def _wrap(self, inner: Store) -> Store:
        return FaultStore(inner, self.plan, transient=self._transient)

    def _call(self, name: str, path: str, data: Data | None, operation: Callable[[], Result]) -> Result:
        def half() -> None:
            if data is not None:
                view = memoryview(data).cast("B")
                getattr(self.inner, name)(path, view[: len(view) // 2])

        return self.plan.run(name, lambda: self._error(name, path), operation, half)

    def _error(self, name: str, path: str) -> StorageError:
        failure = StorageError(f"{name} {self.url}/{path}: fault injected")
        failure.transient = self._transient
        return failure


class FaultOps(FileOps):
    """System calls that fail as a plan says, with `code`; for `LocalStore(root, ops=FaultOps(plan))`.

    "short" makes pwrite and preadv do half and say so, which a correct caller continues; calls that have no half do
    all of it. "torn" is half a pwrite and a crash; for calls that have no half it is a crash before.
    """

    def __init__(self, plan: FaultPlan, *, code: int = errno.EIO) -> None:
        self.plan = plan
        self.code = code

    def _error(self) -> OSError:
        return OSError(self.code, os.strerror(self.code))

    def _run(self, name: str, whole: Callable[[], Result]) -> Result:
        kind = self.plan.next(name)
        if kind in ("crash-before", "torn"):
            raise self.plan.crash(name)
        if kind == "error-before":
            raise self._error()
        result = whole()
        if kind == "crash-after":
            raise self.plan.crash(name)
        if kind == "error-after":
            raise self._error()
        return result

    def _run_bytes(self, name: str, call: Callable[[memoryview], int], view: memoryview) -> int:
        kind = self.plan.next(name)
        if kind in ("short", "torn") and len(view) > 1:
            count = call(view[: len(view) // 2])
            if kind == "torn":
                raise self.plan.crash(name)
            return count
        if kind in ("crash-before", "torn"):
            raise self.plan.crash(name)
        if kind == "error-before":
            raise self._error()
        count = call(view)
        if kind == "crash-after":
            raise self.plan.crash(name)
        if kind == "error-after":
            raise self._error()
        return count

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        fd = -1

        def whole() -> int:
            nonlocal fd
            fd = super(FaultOps, self).open(path, flags, mode)
            return fd

        try:
            return self._run("open", whole)
        except BaseException:
            if fd >= 0:  # opened, but the caller never learns its number
                os.close(fd)
            raise

    def close(self, fd: int) -> None:
        os.close(fd)  # always, also after the crash: the kernel does that for the dead
        self._run("close", lambda: None)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        return self._run_bytes("pwrite", lambda view: os.pwrite(fd, view, offset), memoryview(data))

    def preadv(self, fd: int, into: memoryview, offset: int) -> int:
        return self._run_bytes("preadv", lambda view: os.preadv(fd, [view], offset), into)

    def fallocate(self, fd: int, start: int, nbytes: int) -> None:
        self._run("fallocate", lambda: super(FaultOps, self).fallocate(fd, start, nbytes))

    def fsync(self, fd: int) -> None:
        self._run("fsync", lambda: super(FaultOps, self).fsync(fd))

    def syncfs(self, fd: int) -> None:
        self._run("syncfs", lambda: super(FaultOps, self).syncfs(fd))

    def rename(self, source: str, target: str) -> None:
        self._run("rename", lambda: super(FaultOps, self).rename(source, target))

    def rename_new(self, source: str, target: str) -> None:
        self._run("rename_new", lambda: super(FaultOps, self).rename_new(source, target))

    def exchange(self, one: str, other: str) -> None:
        self._run("exchange", lambda: super(FaultOps, self).exchange(one, other))

    def link(self, source: str, target: str) -> None:
        self._run("link", lambda: super(FaultOps, self).link(source, target))

    def unlink(self, path: str) -> None:
        self._run("unlink", lambda: super(FaultOps, self).unlink(path))

    def mkdir(self, path: str) -> None:
        self._run("mkdir", lambda: super(FaultOps, self).mkdir(path))

    def rmdir(self, path: str) -> None:
        self._run("rmdir", lambda: super(FaultOps, self).rmdir(path))
