"""The DCP plug-in with four real ranks: layouts, plan caching, asynchronous saves, failures. The jobs: dcp_jobs.py."""

from pathlib import Path

import pytest

JOBS = Path(__file__).parent / "dcp_jobs.py"


@pytest.mark.parametrize("job", ["matrix", "planned", "training", "process", "failing"])
def test_four_ranks(torchrun, tmp_path, job):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    result = torchrun(4, JOBS, job, folder)
    assert all("ok" in text.splitlines() for text in result.by_rank), result.tail()
