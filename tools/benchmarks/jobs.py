"""Scenarios as jobs: torchrun for those with ranks, plain processes for the others. Everything is bounded in time."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.environments import Unavailable, default_folder, python_of
from benchmarks.machine import copy_seconds
from benchmarks.model import size_of

ROOT = Path(__file__).resolve().parent.parent.parent
_WORK = Path(__file__).resolve().parent / "work.py"


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    run: str
    size: str
    repetitions: int
    folder: Path
    results: Path
    systems: list[str] = field(default_factory=list)
    drop_caches: bool = False
    timeout_s: float = 600.0
    environments: Path = field(default_factory=default_folder)  # of peers that have their own


@contextmanager
def workspace(parent: Path, size: str, copies: int) -> Iterator[Path]:
    """A folder on the measured disk that is gone afterwards, whatever happens; refused when it could fill the disk."""
    parent.mkdir(parents=True, exist_ok=True)
    wanted, free = copies * size_of(size), shutil.disk_usage(parent).free
    if free < wanted * 1.5 + (2 << 30):
        raise SystemExit(f"{parent}: {free >> 20} MiB are free, {int(wanted * 1.5) + (2 << 30) >> 20} MiB are needed")
    folder = Path(tempfile.mkdtemp(prefix="ckptfs-bench-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.sync()


def launch(options: Options, part: str, scenario: str, nproc: int, folder: Path, **more: Any) -> None:
    """One job of `nproc` ranks that does a part of a scenario."""
    plan = {
        "run": options.run,
        "scenario": scenario,
        "size": options.size,
        "repetitions": options.repetitions,
        "systems": options.systems,
        "folder": str(folder),
        "results": str(options.results),
        "drop_caches": options.drop_caches,
        "peers": {},
        "unavailable": {},
        **environments_of(options, scenario),
        "detail": {"part": part, **more},
    }
    run_ranks(options, scenario, nproc, [sys.executable], [str(_WORK), json.dumps(plan)])


def run_ranks(options: Options, scenario: str, nproc: int, python: list[str], arguments: list[str]) -> None:
    """A program on `nproc` ranks, in a process group that ends with it."""
    command = python
    if nproc > 1:
        command = [
            *python,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--local-addr=127.0.0.1",
            f"--nproc-per-node={nproc}",
        ]
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
    }
    job = subprocess.Popen([*command, *arguments], env=env, start_new_session=True)
    try:
        code = job.wait(options.timeout_s)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{scenario} took more than {options.timeout_s:.0f} s") from None
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGTERM)  # torchrun passes it on to its ranks
            try:
                job.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
    if code:
        raise RuntimeError(f"{scenario} ended with {code}")


WITH_PEERS = ("save and load", "big tensors", "reshard", "small tensors")


def environments_of(options: Options, scenario: str) -> dict[str, dict[str, str]]:
    """The peers' environments, made now if they are wanted and not there."""
    peers, unavailable = {}, {}
    for peer in ("Orbax", "ByteCheckpoint 0.0.2") if scenario in WITH_PEERS else ():
        if options.systems and peer not in options.systems:
            continue
        try:
            _check_memory(options)
            peers[peer] = python_of(peer, options.environments)
        except Unavailable as reason:
            unavailable[peer] = str(reason)
    return {"peers": peers, "unavailable": unavailable}


def _check_memory(options: Options) -> None:
    """Their ranks hold the state once more, beside ours, and copies of it while they save or load."""
    needed = 4 * size_of(options.size)
    has = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if has < needed:
        raise Unavailable(f"it takes about {needed >> 30} GiB of memory, this machine has {has >> 30}")


def note_memcpy(options: Options, scenario: str) -> None:
    """The memory's limit beside a scenario that does not measure it in turn with the systems."""
    nbytes = size_of(options.size)
    for turn in range(options.repetitions):
        measure = results.Measure(
            options.run, scenario, "memcpy", "memcpy", nbytes, copy_seconds(nbytes), turn, cache="warm"
        )
        results.append(options.results, measure)


# --- scenarios -------------------------------------------------------------------------------------------------------


def save(options: Options) -> None:
    with workspace(options.folder, options.size, 1) as folder:
        launch(options, "save", "save and load", 2, folder, shapes="transformer")


def big(options: Options) -> None:
    with workspace(options.folder, options.size, 1) as folder:
        launch(options, "save", "big tensors", 2, folder, shapes="big")


def reshard(options: Options) -> None:
    with workspace(options.folder, options.size, 6) as folder:
        launch(options, "reshard_prepare", "reshard", 2, folder)
        launch(options, "reshard", "reshard", 4, folder)


def small(options: Options) -> None:
    with workspace(options.folder, "32M", 2) as folder:
        launch(options, "small", "small tensors", 1, folder)


def asynchronous(options: Options) -> None:
    with workspace(options.folder, options.size, 3) as folder:
        launch(options, "async", "training", 2, folder)
        half = replace(options, size=str(size_of(options.size) // 2))  # as much a rank
        launch(half, "beside", "training", 1, folder)
    note_memcpy(options, "training")


def slices(options: Options) -> None:
    with workspace(options.folder, options.size, 7) as folder:
        launch(options, "slice", "slices", 1, folder)
    note_memcpy(options, "slices")


def mount(options: Options) -> None:
    from benchmarks.mounts import measure_mounts

    with workspace(options.folder, options.size, 3) as folder:
        measure_mounts(options, folder)
    note_memcpy(options, "mount")


def relayout(options: Options) -> None:
    from benchmarks.relayout import measure_relayout

    with workspace(options.folder, options.size, 12) as folder:
        measure_relayout(options, folder)
    note_memcpy(options, "layouts")


def coldstart(options: Options) -> None:
    from benchmarks.coldstart import measure_cold_starts

    with workspace(options.folder, options.size, 3) as folder:
        measure_cold_starts(options, folder)
    note_memcpy(options, "cold start")


IMPORTS = {
    "python alone": "pass",
    "import ckptfs": "import ckptfs",
    "import ckptfs, open a step, slice to numpy": "import ckptfs; ckptfs.open({path!r})['w'].numpy((slice(0, 4),))",
    "import torch": "import torch",
    "import safetensors.torch": "import safetensors.torch",
    "import tensorstore": "import tensorstore",
    "import zarr": "import zarr",
}


def imports(options: Options) -> None:
    """New processes, from start to end; and what reading to numpy has imported."""
    import numpy as np

    import ckptfs

    with workspace(options.folder, "1M", 1) as folder:
        path = str(folder / "step")
        ckptfs.save(path, {"w": np.arange(64, dtype=np.float32)})
        for turn in range(-1, options.repetitions):
            for name, code in IMPORTS.items():
                begin = time.perf_counter()
                done = subprocess.run(
                    [sys.executable, "-c", f"{code.format(path=path)}\nimport sys; print('torch' in sys.modules)"],
                    cwd=ROOT,
                    capture_output=True,
                    text=True,
                    check=False,
                    timeout=60,
                )
                seconds = time.perf_counter() - begin
                if done.returncode and turn < 0:
                    reason = f"failed: {done.stderr.strip().splitlines()[-1:]}"
                    results.append(options.results, results.Skip(options.run, "imports", name, reason))
                if done.returncode or turn < 0:
                    continue
                detail = {"imports_torch": done.stdout.strip() == "True"}
                results.append(
                    options.results,
                    results.Measure(options.run, "imports", "start to end", name, 0, seconds, turn, detail=detail),
                )
                print(f"  imports: {name:45} {seconds * 1e3:6.0f} ms", flush=True)


SCENARIOS = {
    "save": save,
    "load": save,  # one job measures both
    "reshard": reshard,
    "async": asynchronous,
    "slice": slices,
    "small": small,
    "big": big,
    "relayout": relayout,
    "mount": mount,
    "coldstart": coldstart,
    "import": imports,
}


def spread(values: list[float]) -> tuple[float, float, float]:
    """Median, smallest, largest."""
    return statistics.median(values), min(values), max(values)
