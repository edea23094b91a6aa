"""What all tests share: how they are selected, and real torchrun jobs that cannot outlive their test."""

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import pytest

from seaweed import s3_server  # noqa: F401  one server for all test modules

ROOT = Path(__file__).resolve().parent.parent

# No deadline: the machine is shared. In CI the examples are the same every time: a red run can be run again.
hypothesis.settings.register_profile("local", deadline=None, print_blob=True)
hypothesis.settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


# --- selection -------------------------------------------------------------------------------------------------------


def pytest_addoption(parser):
    parser.addoption("--heavy", action="store_true", help="also run the tests marked heavy")
    parser.addoption(
        "--phase", choices=["shared", "serial"], help="only the tests that share the machine, or the others"
    )


def pytest_collection_modifyitems(config, items):
    kept, left_out = [], []
    for item in items:
        (kept if _is_selected(config, item) else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def _is_selected(config, item):
    if item.get_closest_marker("heavy") and not (config.getoption("heavy") or "heavy" in config.option.markexpr):
        return False
    phase = config.getoption("phase")
    return phase is None or (phase == "serial") == bool(item.get_closest_marker("serial"))


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu"):
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")


# --- torchrun --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JobResult:
    """A finished torchrun job: its exit status, and what each rank printed (stdout, then stderr)."""

    returncode: int
    by_rank: list[str]
    launcher: str

    @property
    def output(self) -> str:
        """What all ranks printed, one after the other, then the launcher."""
        return "\n".join([*self.by_rank, self.launcher])

    def tail(self, line_count: int = 40) -> str:
        """The end of every rank's output and of the launcher's, for the message of a failed test."""
        named = [(f"rank {rank}", text) for rank, text in enumerate(self.by_rank)] + [("launcher", self.launcher)]
        return "\n".join(f"--- {name}\n" + "\n".join(text.splitlines()[-line_count:]) for name, text in named if text)


@pytest.fixture
def torchrun(tmp_path):
    """`torchrun(nproc, script, *args, timeout_s=250, env=None, check=True, max_restarts=0) -> JobResult`: ranks as real
    processes.

    `script` is a path or the text of a program; gloo works, and each rank has one thread. With `check`, a job that
    fails or takes too long fails the test with the end of its output; too long includes the stack of every rank.
    Nothing of the job is alive afterwards, whatever happened.
    """

    def run(nproc, script, *args, timeout_s=250.0, env=None, check=True, max_restarts=0):
        path = script if isinstance(script, Path) else _write_script(tmp_path, script)
        token = uuid.uuid4().hex
        logs = tmp_path / f"torchrun-{token[:8]}"
        logs.mkdir()
        launcher_log = logs / "launcher.log"
        job_env = os.environ | {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]).rstrip(
                ":"
            ),
            "PYTHONFAULTHANDLER": "1",  # SIGABRT prints the stacks
            "PYTHONUNBUFFERED": "1",
            "CKPTFS_TEST_JOB": token,
        }
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        command += [f"--log-dir={logs}", "--redirects=3"]  # a file for each rank: lines of two ranks never mix
        command += [f"--nproc-per-node={nproc}", f"--max-restarts={max_restarts}", str(path), *map(str, args)]
        with launcher_log.open("wb") as out:
            job = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=tmp_path,
                env=job_env | (env or {}),
                start_new_session=True,
            )
            try:
                job.wait(timeout_s)
                late = False
            except subprocess.TimeoutExpired:
                late = True
                _signal_job(token, signal.SIGABRT, but=job.pid)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    job.wait(5)  # the launcher sees its ranks die; their stacks are in the log by then
            finally:
                _signal_job(token, signal.SIGKILL)
                job.wait()
        by_rank = [_read_logs(logs, rank) for rank in range(nproc)]
        result = JobResult(job.returncode, by_rank, launcher_log.read_text(errors="replace"))
        if late:
            pytest.fail(f"{path.name}: {nproc} ranks took more than {timeout_s} s\n{result.tail()}", pytrace=False)
        if check and result.returncode != 0:
            pytest.fail(f"{path.name} ended with {result.returncode}\n{result.tail()}", pytrace=False)
        return result

    return run


def _write_script(folder, text):
    path = folder / f"job-{uuid.uuid4().hex[:8]}.py"
    path.write_text(text)
    return path


def _read_logs(folder, rank):
    return "".join(
        path.read_text(errors="replace")
        for stream in ("stdout", "stderr")
        for path in sorted(folder.glob(f"*/attempt_*/{rank}/{stream}.log"))
    )


def _signal_job(token, number, but=None):
    """Signal every process that has the job's token in its environment: ranks lead sessions of their own."""
    for pid in _pids_with(f"CKPTFS_TEST_JOB={token}".encode()):
        if pid != but:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _pids_with(variable: bytes) -> Iterator[int]:
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if variable in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)
