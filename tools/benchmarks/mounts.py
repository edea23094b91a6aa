"""The mount beside a plain copy of the same files: sequential reads of 1 MiB, safetensors through mmap, listings.

All ways take part in each turn, in an order of its own: a virtual machine's memory is 5 GB/s in one minute and 8 in the
next, and a way would be compared with plain files of another minute.
"cold": neither the mount nor the disk's page cache has the bytes (looked at page by page before each). "backing
cached": the step's own files are in the page cache, the mount's are not. "again": the second read of the same mount.
One file of zarr/, which the kernel passes on, is compared with the stored file itself: a copy of it lies in other pages
of the page cache, larger or smaller ones, and that difference would be taken for the mount's.
Before bytes are read that the page cache has not, as much free memory is touched: for plain files and mounts alike.
Beside it: fusepy as its own example uses it, over the plain copy; fusepy with a plain class over the very tree that our
mounts show; and the native backend with a copy of hot files.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks import results
from benchmarks.claims import PLAIN_CLASS
from benchmarks.machine import evict, files_of, shuffled, touch_free_memory
from benchmarks.model import State, shapes, size_of

if TYPE_CHECKING:
    from benchmarks.jobs import Options

BACKENDS = ("native", "fusepy")
_BLOCK = memoryview(bytearray(1 << 20))
_HF = "hf/*.safetensors"
_HOT = "ckptfs mount, native, hot files copied"
STOCK = "fusepy, its own example"
_FILES, _FEW_FILES = 10_000, 1_000  # few: in a quick look
_COLUMNS = 4096
_ONE = "one file of zarr/, sequential"
_ROUNDS = 8  # in each repetition, of the one file: it takes 20 ms, so that single readings say little
_QUICK_ROUNDS = 2
_STOCK = """
import os, sys
import fuse

class Loopback(fuse.Operations):
    def __init__(self, root): self.root = root
    def __call__(self, op, path, *args): return super().__call__(op, self.root + path, *args)
    def getattr(self, path, fh=None):
        found = os.lstat(path)
        return {key: getattr(found, key) for key in ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid", "st_mtime")}
    def readdir(self, path, fh): return [".", "..", *os.listdir(path)]
    def open(self, path, flags): return os.open(path, flags)
    def release(self, path, fh): return os.close(fh)
    def read(self, path, size, offset, fh): return os.pread(fh, size, offset)

fuse.FUSE(Loopback(sys.argv[1]), sys.argv[2], foreground=True, ro=True)
"""


# The same tree as our own mounts show, as a class for fusepy is written: methods that return attributes and bytes.
_PLAIN_CLASS = """
import errno, itertools, stat, sys
import fuse
from ckptfs.views import Dir, Link, open_root
from ckptfs.views.nodes import resolve

class Views(fuse.Operations):
    def __init__(self, root): self.root, self.readers, self.numbers = root, {}, itertools.count(1)
    def node(self, path):
        try: return resolve(self.root, path)
        except Exception: raise fuse.FuseOSError(errno.ENOENT)
    def getattr(self, path, fh=None):
        node = self.node(path)
        if isinstance(node, Dir): return {"st_mode": stat.S_IFDIR | 0o755, "st_nlink": 2}
        if isinstance(node, Link): return {"st_mode": stat.S_IFLNK | 0o777, "st_nlink": 1}
        return {"st_mode": stat.S_IFREG | 0o444, "st_nlink": 1, "st_size": node.size}
    def readdir(self, path, fh): return [".", "..", *self.node(path).children()]
    def open(self, path, flags):
        number = next(self.numbers)
        self.readers[number] = self.node(path).open()
        return number
    def release(self, path, fh): self.readers.pop(fh).close()
    def read(self, path, size, offset, fh):
        data = bytearray(size)
        count = self.readers[fh].read_into(offset, memoryview(data))
        return bytes(data[:count])

fuse.FUSE(Views(open_root(sys.argv[1])), sys.argv[2], foreground=True, ro=True)
"""


@dataclass(frozen=True)
class Way:
    """One way to the same files."""

    name: str
    folder: Path  # holds hf/ and zarr/
    own: Path | None  # the files that are read to serve it; None: these are the files
    store: Path | None  # what its zarr/ shows. None: only what is cached is compared
    maps: bool = True  # whether it is tried with mapped files too


def read_through(path: Path) -> int:
    """All bytes, with plain reads."""
    done = 0
    fd = os.open(path, os.O_RDONLY)
    try:
        while count := os.readv(fd, [_BLOCK]):
            done += count
    finally:
        os.close(fd)
    return done


def map_through(path: Path) -> int:
    """All tensors, mapped by safetensors, every byte looked at."""
    from safetensors import safe_open

    done = 0
    with safe_open(path, framework="np") as file:
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            done += int(file.get_tensor(name).reshape(-1).view(np.uint8).max(initial=0) >= 0)
    return os.path.getsize(path)


@contextmanager
def mounted(run: Path, folder: Path, backend: str, *settings: str) -> Iterator[Path]:
    """The run's only step, served by another process."""
    folder.mkdir()
    command = [sys.executable, "-m", "ckptfs"]
    words = [word for setting in settings for word in ("--set", setting)]
    done = subprocess.run(
        [*command, "mount", f"{run}@1", str(folder), "--backend", backend, *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(" ".join(done.stderr.strip().splitlines()[-2:]) or f"mount ended with {done.returncode}")
    try:
        yield folder
    finally:
        subprocess.run([*command, "umount", str(folder)], capture_output=True, timeout=60, check=False)


def measure_mounts(options: Options, folder: Path) -> None:
    import ckptfs

    run = folder / "run"
    # Beside the model a tensor of a quarter of the size: opening a file is not what is to be seen of passing it on.
    large = {"large.weight": (max(1, size_of(options.size) // 4 // 4 // _COLUMNS), _COLUMNS)}
    state = State(shapes(size_of(options.size)) | large, 0, 1)
    with ckptfs.Run(run) as opened:
        opened.save(1, dict(state.local))
    step = run / "step-00000001"
    copy = folder / "copy"
    with _reported(options, "ckptfs mount, native"), mounted(run, folder / "first", "native") as here:
        _copy(here, copy)
    with ExitStack() as mounts:
        ways = [Way("plain files", copy, None, step)]

        def add(name: str, mount: AbstractContextManager[Path], own: Path, store: Path | None, **kinds: bool) -> None:
            if options.systems and name not in options.systems:
                return
            with _reported(options, name):
                ways.append(Way(name, mounts.enter_context(mount), own, store, **kinds))

        for backend in BACKENDS:
            add(f"ckptfs mount, {backend}", mounted(run, folder / backend, backend), step, step)
        add(STOCK, _served(_STOCK, str(copy), folder / "stock"), copy, copy / "zarr", maps=False)
        add(PLAIN_CLASS, _served(_PLAIN_CLASS, f"{run}@1", folder / "class"), step, step, maps=False)
        add(_HOT, _warmed_up(run, folder / "hot", 2 * size_of(options.size)), step, None)
        _compare(options, ways)
    _listings(options, folder)


@contextmanager
def _reported(options: Options, system: str) -> Iterator[None]:
    """A system that does not work here is a line in the results; the others go on."""
    try:
        yield
    except Exception as error:
        reason = f"failed: {type(error).__name__}: {error}"
        results.append(options.results, results.Skip(options.run, "mount", system, reason))
        print(f"  mount: {system}: {reason}", flush=True)


@contextmanager
def _served(program: str, what: str, folder: Path) -> Iterator[Path]:
    folder.mkdir()
    server = subprocess.Popen([sys.executable, "-c", program, what, str(folder)])
    try:
        deadline = time.monotonic() + 20
        while not os.path.ismount(folder):
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("it did not mount")
            time.sleep(0.05)
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], capture_output=True, timeout=60, check=False)
        server.wait(20)


@contextmanager
def _warmed_up(run: Path, folder: Path, copies_bytes: int) -> Iterator[Path]:
    """A mount whose files are hot, so that the kernel passes their copies on: then the server reads nothing more."""
    with mounted(run, folder, "native", "materialise_after_opens=1", f"materialise_bytes={copies_bytes}") as here:
        paths = list(here.glob(_HF))
        for _ in range(100):
            for path in paths:
                evict(path)
            before = _server_reads(here)
            for path in paths:
                read_through(path)
            if _server_reads(here) == before:
                break
        else:
            raise RuntimeError("the files were not copied")
        yield here


def _server_reads(here: Path) -> int:
    time.sleep(0.2)  # they are counted when a file is closed, and the server hears of that a little later
    return int(json.loads((here / ".ckptfs" / "stats").read_text(encoding="utf-8"))["reads"])


def _listings(options: Options, folder: Path) -> None:
    """`ls -l` of many parameters: a mount that nobody has looked into, and files on the disk that are known."""
    import ckptfs

    run, plain = folder / "many", folder / "many-plain"
    count = _FEW_FILES if options.repetitions == 1 else _FILES
    with ckptfs.Run(run) as opened:
        opened.save(1, {f"layer.{n:05d}.weight": np.full(16, n, np.float32) for n in range(count)})
    plain.mkdir()
    for number in range(count):
        (plain / f"layer.{number:05d}.weight").write_bytes(bytes(64))
    for turn in range(options.repetitions):
        _list_once(options, "plain files", plain, count, turn)
        for backend in BACKENDS:
            name = f"ckptfs mount, {backend}"
            with _reported(options, name), mounted(run, folder / f"many-{backend}-{turn}", backend) as here:
                _list_once(options, name, here / "raw", count, turn)


def _list_once(options: Options, system: str, folder: Path, count: int, turn: int) -> None:
    begin = time.perf_counter()
    done = subprocess.run(["ls", "-l", str(folder)], capture_output=True, check=True, timeout=60)
    seconds = time.perf_counter() - begin
    if done.stdout.count(b"\n") <= count:
        raise RuntimeError(f"{folder}: not everything was listed")
    measure = results.Measure(options.run, "mount", f"ls -l of {count:,} parameters", system, 0, seconds, turn)
    results.append(options.results, measure)
    print(f"  mount: {measure.operation:30} {system:22} {seconds:6.3f} s", flush=True)


def _copy(here: Path, copy: Path) -> None:
    """What the mount shows, as plain files; the largest file of the store, which the kernel can pass on."""
    (copy / "hf").mkdir(parents=True)
    for path in here.glob("hf/*.safetensors"):
        shutil.copyfile(path, copy / "hf" / path.name)
    largest = max(files_of(here / "zarr"), key=lambda p: p.stat().st_size)
    target = copy / largest.relative_to(here)
    target.parent.mkdir(parents=True)
    shutil.copyfile(largest, target)


def _compare(options: Options, ways: list[Way]) -> None:
    """All ways in each turn, each turn in another order: this machine has slow minutes, and they are everybody's."""
    plain = ways[0].folder
    hf = sorted(path.relative_to(plain) for path in plain.glob(_HF))
    (one,) = (path.relative_to(plain / "zarr") for path in files_of(plain / "zarr"))
    quick = options.repetitions == 1  # warms nothing up
    for turn in range(0 if quick else -1, options.repetitions):
        order = shuffled(ways, turn)
        for way in order:
            _try(options, ways, way, partial(_read_all, options, way, hf, turn))
        for round_ in range(_QUICK_ROUNDS if quick else _ROUNDS):
            for way in order[:: -1 if round_ % 2 else 1]:
                if way.store is not None:
                    _try(options, ways, way, partial(_read_one, options, way, way.store, one, turn, first=round_ == 0))


def _try(options: Options, ways: list[Way], way: Way, read: Callable[[], None]) -> None:
    """A way that fails once is not measured any more."""
    if way not in ways:
        return
    ways.remove(way)
    with _reported(options, way.name):
        read()
        ways.append(way)


def _read_all(options: Options, way: Way, hf: list[Path], turn: int) -> None:
    for kind, read in [(f"{_HF}, sequential", read_through), (f"{_HF}, mmap", map_through)][: 1 + way.maps]:
        files = [way.folder / path for path in hf]
        _measure(options, way, kind, turn, _read(files, way.own, read, cold_too=way.store is not None))


def _read_one(options: Options, way: Way, store: Path, path: Path, turn: int, *, first: bool) -> None:
    """The file of zarr/, from a mount or where it is stored."""
    file, behind = (store / path, None) if way.own is None else (way.folder / "zarr" / path, store / path)
    _measure(options, way, _ONE, turn, _read([file], behind, read_through, cold_too=first))


def _measure(options: Options, way: Way, kind: str, turn: int, found: Iterator[tuple[str, int, float]]) -> None:
    for cache, count, seconds in found:
        if turn >= 0:
            _note(options, way, kind, cache, count, seconds, turn)


def _read(
    paths: list[Path], own: Path | None, read: Callable[[Path], int], *, cold_too: bool
) -> Iterator[tuple[str, int, float]]:
    """(state of the caches, bytes, seconds). Plain files have no `own` files behind them."""
    behind = files_of(own) if own is not None else []

    nbytes = sum(path.stat().st_size for path in paths)

    def timed() -> tuple[int, float]:
        begin = time.perf_counter()
        count = sum(read(path) for path in paths)
        return count, time.perf_counter() - begin

    if cold_too:
        _make_cold([*paths, *behind])
        touch_free_memory(nbytes)
        yield ("cold (fadvise)", *timed())
    if own is not None:
        for path in paths:
            evict(path)
        for path in behind:
            read_through(path)
    else:
        timed()
    touch_free_memory(nbytes)  # also where none is needed: it takes the bytes out of the processor's caches
    yield ("warm: backing files cached", *timed())
    yield ("again: second read", *timed())


def _note(options: Options, way: Way, kind: str, cache: str, count: int, seconds: float, turn: int) -> None:
    measure = results.Measure(options.run, "mount", kind, way.name, count, seconds, turn, cache=cache)
    results.append(options.results, measure)
    print(f"  mount: {kind:30} {cache[:7]:8} {way.name:22} {count / seconds / 1e9:6.2f} GB/s", flush=True)


# --- page cache ----------------------------------------------------------------------------------------------------


def _make_cold(paths: list[Path]) -> None:
    """Until no page is left: a server that was read from a moment ago may still hold some."""
    for _ in range(100):
        for path in paths:
            evict(path, durable=True)
        if not any(_is_cached(path) for path in paths):
            return
        time.sleep(0.02)
    raise RuntimeError("files stay in the page cache")


def _is_cached(path: Path) -> bool:
    size = path.stat().st_size
    if not size:
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as mapped:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        start = ctypes.c_ubyte.from_buffer(mapped)
        failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), pages)
        del start
        return failed != 0 or any(byte & 1 for byte in bytes(pages))
