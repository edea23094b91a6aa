"""Saved in one layout, resumed in another, end to end: a model and its Adam state, from 2 ranks to 1 and to 4.

DeepSpeed needs a conversion between the two (`ds_to_universal`); ckptfs and DCP load what was saved. What counts is
the sum: save (durable), conversion, load (cold). Starting processes and building models is not counted, for nobody.
The repetitions of one system follow each other: each phase is a job of its own.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import results
from benchmarks.environments import Unavailable, python_of
from benchmarks.machine import evict, files_of

if TYPE_CHECKING:
    from benchmarks.jobs import Options

_PROGRAM = Path(__file__).resolve().parent / "relayout_rank.py"
SYSTEMS = ("ckptfs", "DCP", "DeepSpeed ZeRO-1", "DeepSpeed ZeRO-2", "DeepSpeed ZeRO-3")
SAVED_BY, LOADED_BY = 2, (1, 4)
SCENARIO = "layouts"
BUILD_TIMEOUT_S = 300.0


def measure_relayout(options: Options, folder: Path) -> None:
    for system in SYSTEMS:
        if options.systems and system not in options.systems:
            continue
        try:
            python = _deepspeed(options.environments) if "DeepSpeed" in system else sys.executable
            _one(options, folder / system.replace(" ", "-"), system, python)
        except (Unavailable, RuntimeError, subprocess.TimeoutExpired) as error:
            reason = str(error) if isinstance(error, Unavailable) else f"failed: {error}"
            results.append(options.results, results.Skip(options.run, SCENARIO, system, reason))
            print(f"  {SCENARIO}: {system}: skipped: {reason}", flush=True)


@functools.cache
def _deepspeed(environments: Path) -> str:
    """The interpreter of its environment, once the extension that it compiles at first use is there.

    Left to the ranks, they compile it at the same time, and now and then one of them fails.
    """
    python = python_of("DeepSpeed", environments)
    command = [python, "-c", "from deepspeed.comm.torch import build_shm_op; build_shm_op()"]
    env = os.environ | {"DS_ACCELERATOR": "cpu"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=BUILD_TIMEOUT_S, env=env)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"compiling its extension took more than {BUILD_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        raise Unavailable(f"compiling its extension: {(done.stderr.strip().splitlines() or ['it said nothing'])[-1]}")
    return python


def _one(options: Options, folder: Path, system: str, python: str) -> None:
    """All repetitions of one system; the first is a warm-up in which what is loaded is compared with what was saved."""
    folder.mkdir()
    turns = options.repetitions + 1
    found = {"save": _ranks(options, folder, system, python, SAVED_BY, "save")}
    if "DeepSpeed" in system:
        found["convert"] = [
            _convert(options, folder / str(turn), python) | {"bytes": found["save"][turn]["bytes"]}
            for turn in range(turns)
        ]
    for count in LOADED_BY:
        found[f"load by {count}"] = _ranks(options, folder, system, python, count, "load")
    for turn in range(turns - 1):
        for operation, costs in found.items():
            _note(options, system, operation, turn, costs[turn + 1])
        for count in LOADED_BY:
            parts = [found[name][turn + 1] for name in ("save", "convert", f"load by {count}") if name in found]
            total: dict[str, float] = defaultdict(float)
            for part in parts:
                for key in ("seconds", "bytes_read", "bytes_written"):
                    total[key] += part[key]
            total["peak_memory_bytes"] = max(part["peak_memory_bytes"] for part in parts)
            total["bytes"] = parts[0]["bytes"]
            _note(options, system, f"{SAVED_BY} to {count}, end to end", turn, total)


def _note(options: Options, system: str, operation: str, turn: int, cost: dict[str, float]) -> None:
    measure = results.Measure(
        options.run,
        SCENARIO,
        operation,
        system,
        int(cost["bytes"]),
        cost["seconds"],
        turn,
        ranks=int(operation[-1]) if operation.startswith("load") else SAVED_BY,
        cache="durable" if operation == "save" else "cold (fadvise)",
        peak_memory_bytes=int(cost["peak_memory_bytes"]),
        bytes_read=int(cost["bytes_read"]),
        bytes_written=int(cost["bytes_written"]),
        files=int(cost["files"]) if "files" in cost else None,
    )
    results.append(options.results, measure)
    print(f"  {SCENARIO}: {operation:22} {system:18} {measure.seconds:8.3f} s", flush=True)


def _ranks(options: Options, folder: Path, system: str, python: str, count: int, phase: str) -> list[dict[str, float]]:
    from benchmarks.jobs import run_ranks

    answer = folder / f"{phase}-{count}.json"
    plan = {
        "system": system,
        "phase": phase,
        "size": options.size,
        "turns": options.repetitions + 1,
        "folder": str(folder),
        "answer": str(answer),
    }
    run_ranks(options, f"{SCENARIO}: {system}, {phase} on {count}", count, [python], [str(_PROGRAM), json.dumps(plan)])
    answered: list[dict[str, float]] = json.loads(answer.read_text(encoding="utf-8"))
    return answered


# The converter's own main function, without the start of Python and the imports.
_CONVERT = """
import json, sys, time
sys.path.insert(0, {tools!r})
from benchmarks.machine import measured, sync_tree
from deepspeed.checkpoint import ds_to_universal
if __name__ == "__main__":
    with measured() as cost:
        ds_to_universal.main(ds_to_universal.parse_arguments())
        sync_tree(__import__("pathlib").Path({target!r}))
    print("COST " + json.dumps(vars(cost)))
"""


def _convert(options: Options, step: Path, python: str) -> dict[str, float]:
    """`ds_to_universal` as its documentation has it, with its default numbers of workers, from cold files."""
    source, target, program = step / "saved", step / "universal", step / "convert.py"
    evict(source)
    tools = str(Path(__file__).resolve().parent.parent)
    program.write_text(_CONVERT.format(tools=tools, target=str(target)), encoding="utf-8")
    command = [python, str(program), "--input_folder", str(source), "--output_folder", str(target)]
    if not list(source.glob("zero_pp_rank_*_model_states.pt")):
        command.append("--inject_missing_state")  # a plain module has none: stages 1 and 2 ask for it
    begin = time.monotonic()
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=options.timeout_s,
        env=os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("COST ")]
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RuntimeError(f"{shlex.join(command[2:])} after {time.monotonic() - begin:.0f} s: {last}")
    cost: dict[str, float] = json.loads(lines[0][5:])
    return cost | {"files": len(files_of(target))}
