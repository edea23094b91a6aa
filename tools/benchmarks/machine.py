"""The machine under the systems: its raw limits, its page cache, what a process cost it."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

IO_BYTES = 8 << 20
RAW_THREADS = 4
_ALIGN = 4096


# --- raw limits ------------------------------------------------------------------------------------------------------


def raw_write(path: Path, nbytes: int) -> None:
    """The same bytes as fast as the disk takes them: O_DIRECT, reserved space, warm buffers, durable at the end."""
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o644)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        _in_threads(nbytes, lambda view, at: os.pwrite(fd, view, at))
        os.fsync(fd)
    finally:
        os.close(fd)


def raw_read(path: Path, nbytes: int | None = None) -> None:
    """O_DIRECT into warm buffers, nothing done with the bytes: all of a file, or so many."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        _in_threads(nbytes or os.fstat(fd).st_size, lambda view, at: os.preadv(fd, [view], at))
    finally:
        os.close(fd)


_buffers: list[mmap.mmap] = []


def _in_threads(nbytes: int, move: Callable[[memoryview, int], int]) -> None:
    if not _buffers:
        for _ in range(RAW_THREADS):
            buffer = mmap.mmap(-1, IO_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(AttributeError, OSError):
                buffer.madvise(mmap.MADV_HUGEPAGE)  # the disk is twice as fast into them
            np.frombuffer(buffer, np.uint64)[:] = np.arange(IO_BYTES // 8, dtype=np.uint64) * 0x9E3779B97F4A7C15
            _buffers.append(buffer)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        view = memoryview(_buffers[number])
        try:
            for at in range(number * IO_BYTES, nbytes, RAW_THREADS * IO_BYTES):
                wanted = min(IO_BYTES, -(-(nbytes - at) // _ALIGN) * _ALIGN)
                moved = move(view[:wanted], at)
                if moved < min(wanted, nbytes - at):
                    raise OSError(f"a raw request of {wanted} bytes moved {moved}")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(RAW_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


COPY_BYTES = 64 << 20
_copies: list[np.ndarray] = []


def copy_bytes(nbytes: int) -> None:
    """A memcpy of this many bytes between warm memory, in pieces larger than any cache."""
    if not _copies:
        _copies.extend([np.ones(COPY_BYTES, np.uint8), np.ones(COPY_BYTES, np.uint8)])
    for at in range(0, nbytes, COPY_BYTES):
        piece = min(COPY_BYTES, nbytes - at)
        np.copyto(_copies[0][:piece], _copies[1][:piece])


def copy_seconds(nbytes: int) -> float:
    copy_bytes(1)  # the first touch of the memory is not counted
    begin = time.perf_counter()
    copy_bytes(nbytes)
    return time.perf_counter() - begin


# --- page cache ------------------------------------------------------------------------------------------------------


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else [folder]


def evict(folder: Path, *, drop_caches: bool = False, durable: bool = False) -> str:
    """Make a folder's (or file's) bytes cold; says how. Dirty pages would stay, so they are synced."""
    for path in files_of(folder):
        fd = os.open(path, os.O_RDONLY)
        try:
            if not durable:
                os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    if drop_caches:
        with contextlib.suppress(OSError):
            Path("/proc/sys/vm/drop_caches").write_text("1\n", encoding="ascii")
            return "cold (drop_caches)"
    return "cold (fadvise)"


def sync_tree(folder: Path) -> None:
    """Make files durable that a system left to the page cache, so that all save to the same standard."""
    for path in [*files_of(folder), *(p for p in folder.rglob("*") if p.is_dir()), folder]:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


# --- one after the other ---------------------------------------------------------------------------------------------


def shuffled(items: Sequence[Any], turn: int) -> list[Any]:
    """An order of its own for each turn, the same on every rank: nobody always follows the same one."""
    return [items[i] for i in np.random.default_rng(turn + 1).permutation(len(items))]


QUIET_S, PATIENCE_S = 0.3, 5.0


def settle() -> None:
    """What one system leaves behind must not slow down the next: a disk with work to do, or memory in small pieces.

    Where the kernel finds no huge pages any more, direct I/O takes up to twice as long: after hours of saves and
    loads that was so, with 20 GiB free. Putting memory together again needs root.
    """
    with contextlib.suppress(OSError):
        Path("/proc/sys/vm/compact_memory").write_text("1\n", encoding="ascii")
    last, since = "", time.monotonic()
    end = since + PATIENCE_S
    while time.monotonic() < end:
        now = Path("/proc/diskstats").read_text(encoding="ascii")
        if now != last:
            last, since = now, time.monotonic()
        elif time.monotonic() - since >= QUIET_S:
            return
        time.sleep(QUIET_S / 10)


def touch_free_memory(nbytes: int) -> None:
    """Have free memory there for a page cache to grow into.

    A virtual machine may have given its free memory back, and gets a page anew, slowly, when it is first touched.
    """
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 1


# --- what a process used ---------------------------------------------------------------------------------------------


@dataclass
class Cost:
    """Filled when the measured block ends."""

    seconds: float = 0.0
    peak_memory_bytes: int = 0
    bytes_read: int = 0
    bytes_written: int = 0


@contextlib.contextmanager
def measured(process: int | None = None) -> Iterator[Cost]:
    """Time, disk traffic and peak of resident memory (anonymous and mapped) of a process (this one) over a block."""
    cost = Cost()
    of = f"/proc/{process or 'self'}"
    Path(f"{of}/clear_refs").write_text("5\n", encoding="ascii")  # the peak starts again from here
    before, traffic = _status(of, "VmRSS"), _io(of)
    begin = time.perf_counter()
    yield cost
    cost.seconds = time.perf_counter() - begin
    cost.peak_memory_bytes = max(0, _status(of, "VmHWM") - before)
    cost.bytes_read, cost.bytes_written = (b - a for a, b in zip(traffic, _io(of), strict=True))


def _status(of: str, key: str) -> int:
    for line in Path(f"{of}/status").read_text(encoding="ascii").splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _io(of: str) -> tuple[int, int]:
    try:
        table = dict(line.split(": ") for line in Path(f"{of}/io").read_text(encoding="ascii").splitlines())
    except OSError:
        return 0, 0
    return int(table["read_bytes"]), int(table["write_bytes"])
