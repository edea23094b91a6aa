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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.model import size_of
from benchmarks.systems import UNMEASURED

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
    """One job of `nproc` ranks; its whole process group ends with it."""
    plan = {
        "run": options.run,
        "scenario": scenario,
        "size": options.size,
        "repetitions": options.repetitions,
        "systems": options.systems,
        "folder": str(folder),
        "results": str(options.results),
        "drop_caches": options.drop_caches,
        "detail": {"part": part, **more},
    }
    command = [sys.executable]
    if nproc > 1:
        command += [
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
    job = subprocess.Popen([*command, str(_WORK), json.dumps(plan)], env=env, start_new_session=True)
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


def skip_unmeasured(options: Options, scenario: str) -> None:
    for name, reason in UNMEASURED.items():
        results.append(options.results, results.Skip(options.run, scenario, name, reason))


# --- scenarios -------------------------------------------------------------------------------------------------------


def save(options: Options) -> None:
    with workspace(options.folder, options.size, 1) as folder:
        launch(options, "save", "save and load", 2, folder)
    skip_unmeasured(options, "save and load")


def reshard(options: Options) -> None:
    with workspace(options.folder, options.size, 4) as folder:
        launch(options, "reshard_prepare", "reshard", 2, folder)
        launch(options, "reshard", "reshard", 4, folder)


def small(options: Options) -> None:
    with workspace(options.folder, "32M", 2) as folder:
        launch(options, "small", "small tensors", 1, folder)


def asynchronous(options: Options) -> None:
    with workspace(options.folder, options.size, 3) as folder:
        launch(options, "async", "training", 2, folder)


def slices(options: Options) -> None:
    with workspace(options.folder, options.size, 7) as folder:
        launch(options, "slice", "slices", 1, folder)


def mount(options: Options) -> None:
    from benchmarks.mounts import measure_mounts

    with workspace(options.folder, options.size, 3) as folder:
        measure_mounts(options, folder)


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
    "mount": mount,
    "import": imports,
}


def spread(values: list[float]) -> tuple[float, float, float]:
    """Median, smallest, largest."""
    return statistics.median(values), min(values), max(values)
