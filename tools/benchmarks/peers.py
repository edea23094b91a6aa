"""Peers in environments of their own: a process beside each rank, told by lines what to save and what to load.

The process holds its own copy of the rank's state. It is measured from outside, by the same clock and the same
counters as the rest; one line each way through a pipe is what that adds.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import tempfile
from pathlib import Path
from typing import IO, Any

from benchmarks.machine import sync_tree
from benchmarks.systems import Job, System

ANSWER_TIMEOUT_S = 180.0
_PROGRAM = Path(__file__).resolve().parent / "peer_rank.py"


class Child:
    """One rank's process of a peer."""

    def __init__(self, python: str, peer: str, job: Job, folder: Path) -> None:
        plan: dict[str, Any] = {
            "peer": peer,
            "rank": job.state.rank,
            "size": job.state.size,
            "shapes": job.state.shapes,
        }
        job_name = os.environ.get("TORCHELASTIC_RUN_ID", str(os.getpid()))  # another job must not meet this one
        plan |= {"folder": str(folder), "meeting": f"{peer.split(maxsplit=1)[0]}-{job.state.size}-{job_name}"}
        read_end, write_end = os.pipe()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self.process = subprocess.Popen(
            [python, str(_PROGRAM), str(write_end)],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            pass_fds=[write_end],
            text=True,
            env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        )
        os.close(write_end)
        self._replies = os.fdopen(read_end, encoding="utf-8")
        self.ask(plan)

    def ask(self, what: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(what) + "\n")
            self.process.stdin.flush()
            if not select.select([self._replies], [], [], ANSWER_TIMEOUT_S)[0]:
                self.process.kill()
                raise RuntimeError(f"no answer within {ANSWER_TIMEOUT_S:.0f} s")
            line = self._replies.readline()
        except BrokenPipeError:
            line = ""
        reply: dict[str, Any] = json.loads(line) if line else {"error": f"its process ended; {self._last_words()}"}
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.process.stdin.close()  # type: ignore[union-attr]
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._replies.close()
        self._log.close()


class Peer(System):
    """A system whose ranks are processes of its own."""

    def __init__(self, environments: dict[str, str], unavailable: dict[str, str]) -> None:
        self._python = environments.get(self.name)
        self._reason = unavailable.get(self.name, "its environment was not made")
        self._children: dict[int, Child] = {}

    def missing(self) -> str | None:
        return None if self._python else self._reason

    def open(self, job: Job, folder: Path) -> None:
        assert self._python is not None
        self._children[job.state.size] = Child(self._python, self.name, job, folder)

    def close(self) -> None:
        for child in self._children.values():
            child.close()

    def process_of(self, job: Job) -> int:
        return self._children[job.state.size].process.pid

    def save(self, job: Job, folder: Path) -> None:
        try:
            self.blocked_s = self._children[job.state.size].ask({"do": "save", "folder": str(folder)})["blocked_s"]
        finally:
            job.barrier()  # also when it failed: the others are waiting here
        if job.state.rank == 0:
            sync_tree(folder)

    def load(self, job: Job, folder: Path) -> None:
        self._children[job.state.size].ask({"do": "load", "folder": str(folder)})

    def zero(self, job: Job) -> None:
        self._children[job.state.size].ask({"do": "zero"})

    def fingerprint(self, job: Job) -> str:
        return str(self._children[job.state.size].ask({"do": "fingerprint"})["fingerprint"])


class Orbax(Peer):
    """StandardCheckpointer over jax.distributed: a process a rank, OCDBT underneath, saved in the background."""

    name = "Orbax"


class ByteCheckpoint(Peer):
    """Its FSDP2 door, with DTensors in a module's state dict."""

    name = "ByteCheckpoint 0.0.2"


PEERS: tuple[type[Peer], ...] = (Orbax, ByteCheckpoint)
