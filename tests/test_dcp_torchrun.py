"""The DCP plug-in with four real ranks: layouts, plan caching, asynchronous saves, failures. The jobs: dcp_jobs.py."""

from pathlib import Path

import pytest

JOBS = Path(__file__).parent / "dcp_jobs.py"


@pytest.mark.parametrize(
    "jobs", ["matrix planned some_ranks", "training failing process"]
)  # a launch takes longer than a job
def test_four_ranks(torchrun, tmp_path, jobs):
    for job in jobs.split():
        (tmp_path / "checkpoints" / job).mkdir(parents=True)
    result = torchrun(4, JOBS, tmp_path / "checkpoints", *jobs.split(), timeout_s=250)
    assert all("ok" in text.splitlines() for text in result.by_rank), result.tail()
