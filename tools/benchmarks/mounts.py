"""The mount beside a plain copy of the same files: sequential reads of 1 MiB, and safetensors through mmap.

"cold": neither the mount nor the disk's page cache has the bytes. "backing cached": the step's own files are in the
page cache, the mount's are not. "again": the second read of the same open mount.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks import results
from benchmarks.machine import evict, files_of
from benchmarks.model import State, shapes, size_of

if TYPE_CHECKING:
    from benchmarks.jobs import Options

BACKENDS = ("native", "fusepy")
_BLOCK = memoryview(bytearray(1 << 20))


@dataclass(frozen=True)
class Place:
    """One way to the same files."""

    name: str
    folder: Path  # holds hf/ and zarr/


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
def mounted(run: Path, folder: Path, backend: str) -> Iterator[Path]:
    """The run's only step, served by another process."""
    folder.mkdir()
    command = [sys.executable, "-m", "ckptfs"]
    done = subprocess.run(
        [*command, "mount", f"{run}@1", str(folder), "--backend", backend],
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
    state = State(shapes(size_of(options.size)), 0, 1)
    with ckptfs.Run(run) as opened:
        opened.save(1, dict(state.local))
    step = run / "step-00000001"
    copy = folder / "copy"
    for backend in BACKENDS:
        try:
            with mounted(run, folder / backend, backend) as here:
                if not copy.exists():
                    _copy(here, copy)
                _compare(options, Place("plain files", copy), Place(f"ckptfs mount, {backend}", here), step)
        except Exception as error:
            reason = f"failed: {type(error).__name__}: {error}"
            results.append(options.results, results.Skip(options.run, "mount", f"ckptfs mount, {backend}", reason))
            print(f"  mount: {backend}: {reason}", flush=True)


def _copy(here: Path, copy: Path) -> None:
    """What the mount shows, as plain files; the largest file of the store, which the kernel can pass on."""
    (copy / "hf").mkdir(parents=True)
    for path in here.glob("hf/*.safetensors"):
        shutil.copyfile(path, copy / "hf" / path.name)
    largest = max(files_of(here / "zarr"), key=lambda p: p.stat().st_size)
    target = copy / largest.relative_to(here)
    target.parent.mkdir(parents=True)
    shutil.copyfile(largest, target)


def _compare(options: Options, plain: Place, mount: Place, step: Path) -> None:
    hf = sorted(p.relative_to(plain.folder) for p in plain.folder.glob("hf/*.safetensors"))
    zarr = [p.relative_to(plain.folder) for p in files_of(plain.folder / "zarr")]
    for turn in range(-1, options.repetitions):
        for place in (plain, mount) if turn % 2 else (mount, plain):
            for kind, paths, read in (
                ("hf/*.safetensors, sequential", hf, read_through),
                ("hf/*.safetensors, mmap", hf, map_through),
                ("one file of zarr/, sequential", zarr, read_through),
            ):
                _one(options, place, [place.folder / p for p in paths], kind, read, step, turn)


def _one(
    options: Options, place: Place, paths: list[Path], kind: str, read: Callable[[Path], int], step: Path, turn: int
) -> None:
    own = [step] if place.name != "plain files" else paths

    def forget(everything: bool) -> None:
        for path in paths:
            evict(path)
        for path in own if everything else []:
            evict(path)

    def timed() -> tuple[int, float]:
        begin = time.perf_counter()
        count = sum(read(path) for path in paths)
        return count, time.perf_counter() - begin

    def warm_backing() -> None:
        if place.name != "plain files":
            for path in files_of(step):
                read_through(path)

    for cache, prepare in (
        ("cold", lambda: forget(everything=True)),
        ("backing", lambda: (forget(everything=False), warm_backing())),
        ("again", lambda: None),
    ):
        prepare()
        if cache == "backing" and place.name == "plain files":
            timed()  # plain files are their own backing
        count, seconds = timed()
        if turn < 0:
            continue
        shown = {"cold": "cold (fadvise)", "backing": "warm: backing files cached", "again": "again: second read"}[
            cache
        ]
        results.append(
            options.results,
            results.Measure(options.run, "mount", kind, place.name, count, seconds, turn, cache=shown),
        )
        print(f"  mount: {kind:30} {cache:8} {place.name:22} {count / seconds / 1e9:6.2f} GB/s", flush=True)
