"""Kernel passthrough: files whose reads the kernel answers by itself, from one whole local file.

It needs root and Linux 6.9. Passed through are files that are one backing file, and *hot* files (opened several times)
that were materialised: copied whole into memory or into unlinked files of a folder. All copies take `materialise_bytes`
at most, and there are never more than `COPIES_MAX`, because each is an open file; least recently opened ones go first.
One that nobody opened for `keep_s` goes too: memory that is not used belongs to others.
A copy is made in the background by the file's own reader, so it is checked like any read; until it is complete, the
file is read as before.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import queue
import tempfile
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass

from ckptfs.views.nodes import File
from ckptfs_fuse import wire
from ckptfs_fuse.answers import log, log_failure

COPY_BYTES = 4 << 20
COPIES_MAX = 256


class Passthrough:
    """Registers backing files with the kernel."""

    def __init__(self, device_fd: int) -> None:
        self._device_fd = device_fd
        self.refused: str | None = None

    def register(self, fd: int) -> int:
        """The kernel's number for an open file, or 0 when this file can't be passed through."""
        if self.refused is not None:
            return 0
        try:
            # A mutable argument, because only then the call's own return value comes back.
            return int(fcntl.ioctl(self._device_fd, wire.IOC_BACKING_OPEN, bytearray(wire.backing_map(fd)), True))
        except OSError as error:
            if error.errno in {errno.EPERM, errno.ENOTTY, errno.EOPNOTSUPP}:
                self.refused = f"the kernel refuses passthrough ({error.strerror}); it needs root and Linux 6.9"
                log.warning("%s: files are read by the server instead", self.refused)
            return 0

    def forget(self, backing_id: int) -> None:
        try:
            fcntl.ioctl(self._device_fd, wire.IOC_BACKING_CLOSE, wire.backing_id_in(backing_id))
        except OSError as error:
            log.warning("backing file %d was not released: %s", backing_id, error)


@dataclass(slots=True)
class _Copy:
    fd: int
    nbytes: int
    opened_s: float


class Materialised:
    """Copies of hot files, by version, within a budget."""

    def __init__(self, budget_bytes: int, folder: str | None, keep_s: float = math.inf) -> None:
        self._budget_bytes = budget_bytes
        self._keep_s = keep_s
        self._folder = folder
        self._lock = threading.Lock()
        self._copies: OrderedDict[str, _Copy] = OrderedDict()  # by version, least recently opened first
        self._used_bytes = 0
        self._wanted: queue.SimpleQueue[File] = queue.SimpleQueue()
        self._queued: set[str] = set()
        self._copier: threading.Thread | None = None

    def fd_of(self, file: File) -> int | None:
        """A duplicate of the copy's descriptor, to be closed by the caller; None when there is no copy (yet)."""
        with self._lock:
            found = self._copies.get(file.version)
            if found is None:
                return None
            self._copies.move_to_end(file.version)
            found.opened_s = time.monotonic()
            return os.dup(found.fd)

    def want(self, file: File) -> None:
        """Copy it in the background, if it fits at all."""
        with self._lock:
            if file.size == 0 or file.size > self._budget_bytes or file.version in self._queued:
                return
            if file.version in self._copies:
                return
            self._queued.add(file.version)
            if self._copier is None:
                self._copier = threading.Thread(target=self._copy_wanted, name="materialise", daemon=True)
                self._copier.start()
        self._wanted.put(file)

    def _copy_wanted(self) -> None:
        while True:
            try:
                file = self._wanted.get(timeout=self._rest())
            except queue.Empty:
                continue
            try:
                self._copy(file)
            except Exception as error:
                log_failure(f"copying a file of {file.size} bytes to pass it through", error)
            finally:
                with self._lock:
                    self._queued.discard(file.version)
            del file

    def _rest(self) -> float | None:
        """Give up what nobody opened for long; how long until the next one may have to go."""
        with self._lock:
            while self._copies:
                idle_s = time.monotonic() - next(iter(self._copies.values())).opened_s
                if idle_s < self._keep_s:
                    return min(self._keep_s - idle_s, threading.TIMEOUT_MAX)
                self._give_up_oldest()
        return None

    def _give_up_oldest(self) -> None:
        """Who has it open keeps it in the kernel until it is closed; here it no longer counts. Holds the lock."""
        _, oldest = self._copies.popitem(last=False)
        os.close(oldest.fd)
        self._used_bytes -= oldest.nbytes

    def _copy(self, file: File) -> None:
        self._make_room(file.size)
        fd = self._new_file()
        try:
            buffer = memoryview(bytearray(min(COPY_BYTES, file.size)))
            with file.open() as reader:
                done = 0
                while done < file.size:
                    count = reader.read_into(done, buffer[: min(len(buffer), file.size - done)])
                    _write_full(fd, buffer[:count])
                    done += count
        except BaseException:
            os.close(fd)
            with self._lock:
                self._used_bytes -= file.size
            raise
        with self._lock:
            self._copies[file.version] = _Copy(fd, file.size, time.monotonic())

    def _make_room(self, size: int) -> None:
        with self._lock:
            while self._copies and (self._used_bytes + size > self._budget_bytes or len(self._copies) >= COPIES_MAX):
                self._give_up_oldest()
            self._used_bytes += size

    def _new_file(self) -> int:
        if self._folder is None:
            return os.memfd_create("ckptfs-materialised", os.MFD_CLOEXEC)
        fd, path = tempfile.mkstemp(prefix="ckptfs-materialised-", dir=self._folder)
        os.unlink(path)
        return fd

    def close(self) -> None:
        with self._lock:
            copies, self._copies = self._copies, OrderedDict()
        for copy in copies.values():
            os.close(copy.fd)


def _write_full(fd: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        done += os.write(fd, view[done:])
