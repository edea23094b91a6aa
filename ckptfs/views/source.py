"""A committed step as the views read it: the manifest, and the bytes of every array in row-major order.

Rules:
- On a file system everything is opened relative to a descriptor of the step's folder, so what is read belongs to the
  step that the manifest describes, whatever takes its name meanwhile. What is deleted is ESTALE, never other bytes.
- While a file of the step is open, and `linger_s` longer, a lease keeps retention from deleting it.
- Bytes that lie in local files as they are shown are `Range`s of those files. All others are made in windows by the
  checkpoint's own reader, which checks every extent. With `verify`, ranges are checked too, each extent once.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import os
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from ckptfs import dtypes, lease
from ckptfs.box import boxes_of_range
from ckptfs.checkpoint import Checkpoint
from ckptfs.errors import CkptError, CorruptError, NotFoundError, StaleError
from ckptfs.expr import Expr, contiguous
from ckptfs.expr import Source as Stored
from ckptfs.loadplan import Request
from ckptfs.manifest import HASH_BYTES, NAME, Param, digest
from ckptfs.read import Target, check_extents
from ckptfs.settings import Settings
from ckptfs.storage import LocalStore
from ckptfs.views.activity import Activity
from ckptfs.views.nodes import Range, Segment, SegmentsFile
from ckptfs.views.windows import WindowCache, produced

if TYPE_CHECKING:
    from ckptfs.storage import Store
    from ckptfs.views.config import ViewConfig

_WINDOW_BYTES = 4 << 20
_WINDOW_BYTES_MAX = 32 << 20
_NOWHERE = "/proc/self/fd/none"
_log = logging.getLogger("ckptfs.views")


class Shared:
    """What all steps of a mount have together: the cache, the counters, and the one who ends idle leases."""

    def __init__(self, config: ViewConfig) -> None:
        self.config = config
        self.windows = WindowCache(config.cache_bytes, wait_s=config.read_timeout_s)
        self.activity = Activity()
        self._sources: weakref.WeakSet[Source] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._sweeping = False

    def watch(self, source: Source) -> None:
        """Have an idle source let go of its lease in time."""
        with self._lock:
            self._sources.add(source)
            if not self._sweeping:
                self._sweeping = True
                threading.Thread(target=self._sweep, name="views-leases", daemon=True).start()

    def _sweep(self) -> None:
        pause = threading.Event()
        while True:
            pause.wait(max(0.05, self.config.linger_s / 4))
            if self._sweep_once():
                return

    def _sweep_once(self) -> bool:
        """Whether nobody is left to look after."""
        with self._lock:
            sources = list(self._sources)
        for source in sources:
            source.rest()  # may ask a store, so nobody waits for the lock meanwhile
        with self._lock:
            self._sources.difference_update([source for source in sources if not source.is_lingering])
            self._sweeping = bool(self._sources)
            return not self._sweeping


class Source:
    """One step, open for viewing."""

    def __init__(self, run: Store, name: str, shared: Shared) -> None:
        """`name`: the step's folder in `run`."""
        self.run, self.name, self.shared = run, name, shared
        self.config = shared.config
        self.url = f"{run.url}/{name}"
        self.root = ""  # below it lie the step's files, if they are local
        store: Store = run.sub(name)
        if isinstance(run, LocalStore):
            self.root = self._hold(run.full(name))
            store = LocalStore(self.root, ops=run.ops)
        store.url = self.url
        self.store = store
        settings = Settings(read_buffer_bytes=self.config.scratch_bytes, read_threads=2)
        try:
            self.checkpoint = Checkpoint(store, settings=settings)
            self.manifest = self.checkpoint.manifest
            self.manifest_bytes = store.size(NAME)
            self.version = self._version()
        except NotFoundError as error:
            raise StaleError(f"{self.url} was deleted: list the run again") from error
        self.mtime_ns = _nanoseconds(self.manifest.created)
        self.activity = Activity(shared.activity)
        self._lock = threading.Lock()
        self._users = 0  # open files
        self._making = 0  # windows, also those made ahead for files that are closed by now
        self._idle_since = 0.0
        self._held: list[lease.Lease] = []  # one at most
        weakref.finalize(self, _release, self.url, self._held)  # also when the interpreter ends
        self._may_lease = True
        self._is_over = False  # the step is gone: its folder is closed when nobody reads any more
        self._checked: dict[str, bytearray] = {}
        self._space = threading.local()

    def _hold(self, folder: str) -> str:
        try:
            fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            raise StaleError(f"{folder} was deleted: list the run again") from None
        self._let_go = weakref.finalize(self, os.close, fd)
        return f"/proc/self/fd/{fd}"

    @property
    def is_local(self) -> bool:
        return bool(self.root)

    def path(self, relative: str) -> str:
        """A path that opens a file of exactly this step, if it is local."""
        return f"{self.root}/{relative}"

    def explain(self, error: CkptError) -> CkptError:
        """The error as its reader should see it: ESTALE if the step is gone, and names instead of descriptors."""
        if self._is_gone():
            return StaleError(f"{self.url} was deleted: use a newer step")
        if isinstance(error, StaleError | NotFoundError):  # the step is there, but a file of it is not
            error = CorruptError(f"a file is missing ({error}): restore the step from a copy, or use an older one")
        if not self.root or self.root not in str(error):
            return error
        return type(error)(str(error).replace(self.root, self.url))

    def _is_gone(self) -> bool:
        try:
            size = self.store.size(NAME)
            return size != self.manifest_bytes or (not self.is_local and self._version() != self.version)
        except NotFoundError:
            return True
        except CkptError:
            return False

    def _version(self) -> str:
        """The manifest's own checksum, its last key: what has it is this step and no other."""
        return self.store.read(NAME, self.manifest_bytes - 35, self.manifest_bytes - 3).decode("ascii")

    # --- leases ----------------------------------------------------------------------------------------

    def enter(self) -> None:
        """A file is being opened."""
        with self._lock:
            self._open_again()
            if not self._held and self._may_lease:
                self._held += self._take()
            self._users += 1

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            self._idle_since = time.monotonic()
            is_idle = self._users == 0
            self._end()
        if is_idle and self.config.linger_s == 0:
            self.rest()
        elif is_idle:
            self.shared.watch(self)

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """The step's folder is looked at, without a file being open."""
        with self._lock:
            self._open_again()
            self._making += 1
        try:
            yield
        finally:
            with self._lock:
                self._making -= 1
                self._end()

    def retire(self) -> None:
        """The step is gone. The kernel may remember its files for long: they must not keep a descriptor each."""
        with self._lock:
            self._is_over = True
            self._end()

    def _open_again(self) -> None:
        """If it was let go. Holds the lock. A store that was away and came back has the same steps."""
        if self.root != _NOWHERE or not isinstance(self.store, LocalStore):
            return
        self.root = self.store.root = self._hold(self.run.full(self.name))  # type: ignore[attr-defined]
        try:
            is_same = self.store.size(NAME) == self.manifest_bytes and self._version() == self.version
        except NotFoundError:
            is_same = False
        self._is_over = not is_same
        self._end()
        if not is_same:
            raise StaleError(f"{self.url} was deleted: use a newer step")

    def _end(self) -> None:
        """Holds the lock. Nobody may build a path of a closed descriptor: its number will be another step's."""
        if self._is_over and self.root not in {"", _NOWHERE} and not self._users and not self._making:
            self.root = _NOWHERE
            if isinstance(self.store, LocalStore):
                self.store.root = _NOWHERE
            self._let_go()

    def _take(self) -> list[lease.Lease]:
        try:
            return [lease.take(self.run, self.name)]
        except NotFoundError as error:
            raise StaleError(f"{self.url} was deleted: list the run again") from error
        except CkptError as error:
            self._may_lease = False
            _log.warning("%s: no lease, so retention may delete it while it is read: %s", self.url, error)
            return []

    @property
    def is_lingering(self) -> bool:
        """Nobody has a file open, but the lease is still held."""
        return self._users == 0 and bool(self._held)

    def rest(self) -> None:
        """Let go of lease and buffers if nobody has used the step for a while."""
        with self._lock:
            if self._users or time.monotonic() - self._idle_since < self.config.linger_s:
                return
            held = self._held.copy()
            self._held.clear()
            if not self._making:
                self.checkpoint.close()  # opens its buffers again when they are needed
        _release(self.url, held)

    # --- content ---------------------------------------------------------------------------------------

    def segments(self, param: Param) -> list[Segment]:
        """A whole stored array, row-major."""
        return self.content(Stored(param.name, param.shape, param.dtype.name), param.path)

    def content(self, array: Expr, key: str) -> list[Segment]:
        """A whole array, stored or computed, row-major. `key` names it among what is shown."""
        if array.nbytes == 0:
            return []
        direct = self._ranges(array)
        if direct is not None:
            return direct
        window_bytes = self._window_bytes(array)
        if isinstance(array, Stored):
            key = self.checkpoint.param(array.name).path  # the same windows for params/, raw/ and hf/
        return [
            produced(
                self.shared.windows,
                (self.version, key),
                array.nbytes,
                window_bytes,
                lambda start, view: self._make(array, start, view),
            )
        ]

    def is_direct(self, array: Expr) -> bool:
        """Whether the bytes lie in local files as they are."""
        parts = contiguous(array) if self.is_local else None
        return parts is not None and all(is_rows(self.checkpoint.param(name)) for name, _, _ in parts)

    def _ranges(self, array: Expr) -> list[Segment] | None:
        if not self.is_direct(array):
            return None
        size = dtypes.of(array.dtype).itemsize
        out: list[Segment] = []
        for name, start, stop in contiguous(array) or []:
            out += self._rows(self.checkpoint.param(name), start * size, stop * size)
        return out

    def _rows(self, param: Param, start: int, stop: int) -> list[Segment]:
        """Bytes [start, stop) of an array whose files are bands of its rows."""
        out: list[Segment] = []
        block_bytes = param.layout.block_bytes
        while start < stop:
            file, offset = divmod(start, block_bytes)
            end = min(stop, (file + 1) * block_bytes)
            check = self._checker(param, start) if self.config.verify else None
            out.append(Range(self.path(param.file(file)), offset, end - start, check))
            start = end
        return out

    def _window_bytes(self, array: Expr) -> int:
        """Windows hold whole rows, and enough of them that extents and chunks are not read over and over."""
        row_bytes = array.nbytes // array.shape[0] if array.shape else array.nbytes
        wanted = _WINDOW_BYTES
        if isinstance(array, Stored):
            param = self.checkpoint.param(array.name)
            layout = param.layout
            wanted = max(wanted, prod(layout.grid[1:]) << 20)
            if param.codec is not None and layout.shape:
                row_bytes *= layout.chunk[0]
        wanted = min(wanted, _WINDOW_BYTES_MAX)
        if row_bytes > _WINDOW_BYTES_MAX:
            return wanted
        return max(1, wanted // row_bytes) * row_bytes

    def _make(self, array: Expr, start: int, view: memoryview) -> None:
        """Fill the view with the array's bytes from `start` on; both lie between elements."""
        dtype = dtypes.of(array.dtype)
        flat = np.frombuffer(view, dtype.numpy)
        first = start // dtype.itemsize
        work: defaultdict[str, list[Target]] = defaultdict(list)
        finish: list[Callable[[], None]] = []
        at = 0
        for box in boxes_of_range(first, first + flat.size, array.shape):
            plan = array.plan(box, flat[at : at + box.size].reshape(box.shape))
            for piece in plan.pieces:
                carrier = self.checkpoint.param(piece.source).dtype.carrier
                work[piece.source].append(Target(piece.box, piece.into.view(carrier)))
            finish.append(plan.finish)
            at += box.size
        wanted = [(self.checkpoint.param(name), targets) for name, targets in work.items()]
        with self.working():
            self.checkpoint.read_boxes(wanted, verify="full")
        for step in finish:
            step()

    def missing(self, path: str) -> CkptError:
        return CorruptError(f"{self.url}/{path} is missing: restore the step from a copy, or use an older one")

    def differs(self, path: str) -> CkptError:
        return CorruptError(
            f"{self.url}/{path} is not what was saved: its checksum differs. "
            "Restore the step from a copy, or use an older one"
        )

    # --- checking --------------------------------------------------------------------------------------

    def _checker(self, param: Param, base: int) -> Callable[[int, int], None]:
        return lambda offset, length: self.check(param, base + offset, base + offset + length)

    def check(self, param: Param, start: int, stop: int) -> None:
        """Compare the extents of logical bytes [start, stop) with their checksums, each once."""
        table = param.extents
        first = int(np.searchsorted(table.stop, start, side="right"))
        last = int(np.searchsorted(table.start, stop, side="left"))
        self.check_numbers(param, first, last)

    def check_numbers(self, param: Param, first: int, last: int) -> None:
        done = self._checked.setdefault(param.name, bytearray(param.extent_count))
        for number in range(first, last):
            if not done[number]:
                self._check_extent(param, number)
                done[number] = 1

    def _check_extent(self, param: Param, number: int) -> None:
        table = param.extents
        file, offset, length = int(table.file[number]), int(table.offset[number]), int(table.length[number])
        space: bytearray = getattr(self._space, "bytes", bytearray())
        if len(space) < length:
            space = self._space.bytes = bytearray(length)
        view = memoryview(space)[:length]
        # Buffered, because these bytes are handed out from the page cache right afterwards.
        read_local(self.path(param.file(file)), offset, view)
        low, high = int(table.start[number]), int(table.stop[number])
        check_extents(param, Request(file, offset, length, low, high, number, number + 1), view, self.url)


def _release(url: str, held: list[lease.Lease]) -> None:
    for one in held:
        try:
            one.release()
        except CkptError as error:
            _log.warning("%s: a lease could not be released: %s", url, error)


def read_local(path: str, offset: int, view: memoryview) -> None:
    SegmentsFile([Range(path, offset, len(view))], version="").read_into(0, view)


def is_rows(param: Param) -> bool:
    """Whether the files, one behind the other, are the row-major array: nothing is compressed or cut by columns."""
    return param.codec is None and param.layout.block[1:] == param.shape[1:]


def hash_of(param: Param) -> str:
    """One checksum for an array's stored content: of the only extent, or of all extents' checksums."""
    return param.hashes.hex() if len(param.hashes) == HASH_BYTES else digest(param.hashes).hex()


def _nanoseconds(created: str) -> int:
    try:
        when = dt.datetime.fromisoformat(created)
    except ValueError:
        return 0
    return int(when.timestamp()) * 1_000_000_000
