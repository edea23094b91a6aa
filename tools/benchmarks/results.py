"""What a measurement says: one JSON line each. A file of them is only appended to: an interrupted run is usable.

A run begins with one line of kind "run" (the machine, the versions, the settings); "measure" lines refer to it by
`run`; a system that could not be measured leaves a line of kind "skip" with the reason.
"""

from __future__ import annotations

import json
import os
import platform
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("ckptfs", "torch", "safetensors", "tensorstore", "zarr", "numpy", "transformers")


@dataclass(frozen=True)
class Measure:
    """One repetition of one operation of one system. Bytes; seconds; memory of the largest rank."""

    run: str
    scenario: str
    operation: str
    system: str
    bytes: int  # of tensors moved, all ranks
    seconds: float  # until durable (save) or complete in memory (load), the slowest rank
    repetition: int  # 0 is the first one counted: warm-up repetitions are not written
    ranks: int = 1
    cache: str = ""  # "cold (fadvise)", "cold (drop_caches)", "warm", "durable"
    blocked_s: float | None = None  # how long the caller waited, where it is less than `seconds`
    peak_memory_bytes: int | None = None  # resident memory above what it was before
    files: int | None = None
    bytes_read: int | None = None  # from the disk, all ranks
    bytes_written: int | None = None
    of_raw: float | None = None  # seconds of the raw limit in the same repetition / seconds
    of_memcpy: float | None = None  # seconds of a memcpy of the same bytes in the same repetition / seconds
    detail: dict[str, Any] = field(default_factory=dict)
    kind: str = "measure"


def line_of(measure: Measure) -> str:
    """What the terminal is told of one: a rate only where the bytes are those that were moved."""
    time_text = f"{measure.seconds:8.3f} s " if measure.seconds >= 0.1 else f"{measure.seconds * 1e3:8.3f} ms"
    if "slower" in measure.detail:
        rest = f"slower by {measure.detail['slower']:.1%}"
    else:
        rest = f"{measure.bytes / measure.seconds / 1e9:6.2f} GB/s"
        rest += f", {measure.of_raw:.2f} of raw" if measure.of_raw is not None else ""
    return f"{measure.operation:24} {measure.system:28} {time_text}  {rest}"


@dataclass(frozen=True)
class Skip:
    """A system that was not measured, and why."""

    run: str
    scenario: str
    system: str
    reason: str
    kind: str = "skip"


@dataclass(frozen=True)
class RunFacts:
    """Where and how the measures of one run were made."""

    run: str
    at: str
    scenarios: list[str]
    size: str
    repetitions: int
    command: str
    host: dict[str, Any]
    versions: dict[str, str]
    kind: str = "run"


KINDS: dict[str, type[Measure | Skip | RunFacts]] = {"measure": Measure, "skip": Skip, "run": RunFacts}


def append(path: str | os.PathLike[str], record: Measure | Skip | RunFacts) -> None:
    """One line, in one write, on disk when this returns."""
    line = json.dumps(asdict(record), allow_nan=False) + "\n"
    with open(path, "a", encoding="utf-8") as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def read(path: str | os.PathLike[str]) -> Iterator[Measure | Skip | RunFacts]:
    """All records of a file; a last line that was cut off by an interruption is left out."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            yield parse(line)
        except ValueError as error:
            if number < len(lines):
                raise ValueError(f"{path}, line {number}: {error}") from error


def parse(line: str) -> Measure | Skip | RunFacts:
    """One record, refused unless it has the fields of its kind, no others, and sensible numbers."""
    raw = json.loads(line)
    kind = KINDS.get(raw.get("kind")) if isinstance(raw, dict) else None
    if kind is None:
        raise ValueError("not a record of kind run, measure or skip")
    names = {f.name for f in fields(kind)}
    needed = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}
    if not needed <= set(raw) <= names:
        raise ValueError(f"fields {sorted((needed - set(raw)) | (set(raw) - names))} are missing or unknown")
    record = kind(**raw)
    if isinstance(record, Measure) and not (record.seconds > 0 and record.bytes >= 0 and record.repetition >= 0):
        raise ValueError("seconds must be above 0, bytes and repetition at least 0")
    return record


def begin(path: str | os.PathLike[str], scenarios: Sequence[str], size: str, repetitions: int, command: str) -> str:
    """Write the first line of a run; returns the run's name."""
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    run = f"{at[:10]}-{uuid.uuid4().hex[:8]}"
    append(path, RunFacts(run, at, list(scenarios), size, repetitions, command, host_facts(Path(path)), versions()))
    return run


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def host_facts(path: Path) -> dict[str, Any]:
    """The machine, without its name."""
    cpu = [line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory = [int(line.split()[1]) * 1024 for line in _lines("/proc/meminfo") if line.startswith("MemTotal")]
    folder = os.path.realpath(path.parent)
    mounts = [line.split() for line in _lines("/proc/mounts")]
    inside = [m for m in mounts if m[1] == "/" or folder == m[1] or folder.startswith(m[1] + "/")]
    mount = max(inside, key=lambda m: len(m[1]), default=["", "", "unknown"])
    return {
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpu": cpu[0] if cpu else "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory[0] if memory else 0,
        "file_system": mount[2],
        "load_before": round(os.getloadavg()[0], 2),
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
