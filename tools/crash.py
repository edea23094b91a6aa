"""A crash campaign: real torchrun jobs, faults at random moments, and after each the four promises checked.

    tools/dev run python tools/crash.py --minutes 20 --seed 1 [--results docs/results/crash.jsonl]
    tools/dev run python tools/crash.py --table docs/results/crash.jsonl

A long campaign may be run in portions with different seeds: each adds a line to the results, `--table` sums them.
After every fault: the latest step is the old or the new one; every visible step verifies; the next save succeeds;
nothing is left over. Prints a table of faults tried and survived; exits 1 at the first broken promise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import ckptfs
from ckptfs.verify import verify

WORKER = Path(__file__).resolve().parent / "crash_worker.py"
KINDS = ("kill one rank", "kill all ranks", "stop one rank", "stop and wake one rank", "file system fault", "full disk")
DISK_BYTES = 24 << 20  # of the small disk: holds a few steps


class Job:
    """A torchrun job in a process group of its own."""

    def __init__(self, run: str, ranks: int, *args: object) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        self.process = subprocess.Popen(
            [*command, str(WORKER), run, *map(str, args)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.lines: list[str] = []
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            self._queue.put(line)
        self._queue.put(None)

    def wait_for(self, text: str, timeout_s: float) -> bool:
        """Whether a line with this text came before the job ended or the time was up."""
        end = time.monotonic() + timeout_s
        while (left := end - time.monotonic()) > 0:
            try:
                line = self._queue.get(timeout=left)
            except queue.Empty:
                return False
            if line is None:
                return False
            if text in line:
                return True
        return False

    def workers(self) -> list[int]:
        """Process ids of the ranks."""
        out = []
        for status in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = status.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == self.process.pid:
                out.append(int(status.parent.name))
        return sorted(out)

    def kill(self) -> None:
        for pid in [*self.workers(), self.process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def finish(self, timeout_s: float) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return self.process.wait(30)


def steps_of(run: str) -> list[int]:
    return ckptfs.Run(run).steps() if os.path.isdir(run) else []


def broken(run: str, before: list[int], job: Job) -> str | None:
    """The first promise that does not hold after a fault, or None."""
    output = "".join(job.lines)
    if "WRONG DATA" in output or "UNEXPECTED" in output:
        return output
    after = steps_of(run)
    if before and (not after or after[-1] < before[-1]):
        return f"steps went from {before[-3:]} to {after[-3:]}"
    for step in after[-3:]:
        with ckptfs.Run(run)[step] as checkpoint:
            problems = verify(checkpoint)
            if problems:
                return f"step {step} does not verify: {problems[0]}"
    return None


def leftovers(run: str) -> list[str]:
    return [name for name in os.listdir(run) if name.endswith((".saving", ".deleting"))]


def campaign(folder: str, seconds: float, seed: int, results: Path | None) -> int:
    draw = random.Random(seed)
    run, small = f"{folder}/run", f"{folder}/small"
    disk = _small_disk(folder, small)
    tried: Counter[str] = Counter()
    survived: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    rounds = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end or not tried.total():  # on a slow machine at least one
        kind = draw.choice(KINDS if disk else KINDS[:-1])
        ranks = draw.choice([1, 2, 4])
        where = f"{small}/run" if kind == "full disk" else run
        before = steps_of(where)
        rate = 0.7 if kind == "file system fault" else 0.0
        options = ["--seed", draw.randrange(1 << 30), "--saves", draw.randint(3, 9), "--faults", rate]
        job = Job(where, ranks, *options, *(["--stops"] if "wake" in kind else []))
        delay_s = draw.random() * 1.5
        struck = False
        if kind.startswith(("kill", "stop")) and job.wait_for("READY", 60):
            with contextlib.suppress(ProcessLookupError):  # the rank ended by itself at that moment
                struck = _strike(kind, job, draw, delay_s)
        code = job.finish(90)
        job.kill()
        job.reader.join(30)  # every line it printed, before they are counted
        if kind == "full disk":
            # The steps themselves fill it; that error is expected there, any other and damage are not.
            struck = any("no space" in line.lower() for line in job.lines)
            if struck:
                job.lines = [line.replace("UNEXPECTED", "expected") for line in job.lines]
        # Only what really happened counts: a job may end before it is struck, a disk may not have filled.
        faults = sum("FAULT" in line for line in job.lines) if rate else int(struck)
        tried[kind] += faults
        wrong = broken(where, before, job)
        if wrong is None and "wake" in kind and code:
            wrong = f"the job did not go on: exit status {code}"
        if wrong is None and kind == "full disk":
            for step in steps_of(where)[:-1]:
                ckptfs.run.commit.discard(ckptfs.Run(where).store, ckptfs.run.commit.step_name(step))
        if wrong is None:
            wrong = _next_save(where, draw)
        if wrong is not None:
            print(f"BROKEN after {kind!r} on {ranks} rank(s), exit status {code}:\n{wrong}\n{''.join(job.lines[-40:])}")
            return 1
        survived[kind] += faults
        outcomes.update(line.strip().partition(" in a ")[2] for line in job.lines if line.startswith("FAULT"))
        rounds += 1
        _thin(run)
        print(
            f"{time.strftime('%H:%M:%S')}  {kind} ({ranks} ranks): {faults} survived, latest {steps_of(where)[-1:]}",
            flush=True,
        )
    record = {
        "seed": seed, "minutes": seconds / 60, "rounds": rounds, "tried": tried, "survived": survived,
        "outcomes": dict(sorted(outcomes.items())),
    }  # fmt: skip
    if results:
        with open(results, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    print("\n" + table([record]))
    return 0


def table(records: list[dict[str, Any]]) -> str:
    """What portions of a campaign tried and survived, together."""
    sums = {key: sum((Counter(record[key]) for record in records), Counter()) for key in ("tried", "survived")}
    seeds = ", ".join(str(record["seed"]) for record in records)
    minutes, rounds = (sum(record[key] for record in records) for key in ("minutes", "rounds"))
    head = f"{minutes:.1f} minutes, {rounds} jobs, seeds {seeds}\n\n| fault | tried | survived |\n|---|---|---|"
    rows = [f"| {kind} | {sums['tried'][kind]} | {sums['survived'][kind]} |" for kind in KINDS]
    outcomes = sum((Counter(record.get("outcomes", {})) for record in records), Counter())
    told = [f"a fault in a {what}: {count}" for what, count in sorted(outcomes.items())]
    return "\n".join([head, *rows, *(["", *told] if told else [])])


def _strike(kind: str, job: Job, draw: random.Random, delay_s: float) -> bool:
    """Whether there was still a rank to strike."""
    job.wait_for("no such line", delay_s)  # a random moment, ended early when the job ends
    workers = job.workers()
    if not workers:
        return False
    if kind == "kill all ranks":
        job.kill()
        return True
    victim = draw.choice(workers)
    os.kill(victim, signal.SIGKILL if kind == "kill one rank" else signal.SIGSTOP)
    if kind.startswith("stop"):
        job.wait_for("no such line", 2.0 if kind == "stop one rank" else 2.0 + 8.0 * draw.random())
    if kind == "stop one rank":
        job.kill()
    elif kind == "stop and wake one rank":  # the others have waited, given up, or stood in for it
        os.kill(victim, signal.SIGCONT)
    return True


def _next_save(run: str, draw: random.Random) -> str | None:
    """The save after a fault must succeed, on another number of ranks, and clean up."""
    before = steps_of(run)
    job = Job(run, draw.choice([1, 2]), "--saves", 1)
    code = job.finish(90)
    after = steps_of(run)
    if code or not after or (before and after[-1] != before[-1] + 1):
        return f"the next save failed (exit status {code}, steps {after[-3:]}):\n{''.join(job.lines[-40:])}"
    left = leftovers(run)
    return f"left over after a good save: {left}" if left else None


def _thin(run: str) -> None:
    """Keep the folder small: the last three steps stay."""
    for step in steps_of(run)[:-3]:
        ckptfs.run.commit.discard(ckptfs.Run(run).store, ckptfs.run.commit.step_name(step))


def _small_disk(folder: str, mounted: str) -> bool:
    """A small file system on a loop device, where root may make one."""
    image = f"{folder}/disk"
    os.makedirs(mounted)
    with open(image, "wb") as file:
        file.truncate(DISK_BYTES)
    steps = (["mkfs.ext4", "-q", "-F", image], ["mount", "-o", "loop", image, mounted])
    return os.geteuid() == 0 and all(
        subprocess.run(step, capture_output=True, check=False).returncode == 0 for step in steps
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, help="JSON-lines file that gets a line")
    parser.add_argument("--table", type=Path, help="only print what such a file holds, summed")
    args = parser.parse_args()
    if args.table:
        print(table([json.loads(line) for line in args.table.read_text(encoding="utf-8").splitlines()]))
        return
    with tempfile.TemporaryDirectory(prefix="ckptfs-crash-") as folder:
        try:
            code = campaign(folder, args.minutes * 60, args.seed, args.results)
        finally:
            subprocess.run(["umount", f"{folder}/small"], capture_output=True, check=False)
    sys.exit(code)


if __name__ == "__main__":
    main()
