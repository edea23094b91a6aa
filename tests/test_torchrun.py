"""The `torchrun` fixture itself: other tests rely on it to notice failures and to leave nothing behind."""

import pytest

from conftest import _pids_with

SUM_OF_RANKS = """
import sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor(float(dist.get_rank()))
dist.all_reduce(total)
print("total", total.item(), sys.argv[1])
dist.monitored_barrier()  # Gloo's threads let go of tensors meanwhile: later they abort the process
dist.destroy_process_group()
"""
ONE_RANK_HANGS = """
import os, signal, sys
print("rank", os.environ["RANK"], "here")
if os.environ["RANK"] == "1":
    def waiting_for_nothing():
        signal.pause()
    waiting_for_nothing()
"""


def test_ranks_talk_to_each_other(torchrun):
    result = torchrun(2, SUM_OF_RANKS, "argument")
    assert result.returncode == 0
    assert result.by_rank == ["total 1.0 argument\n"] * 2


def test_a_failing_rank_fails_the_test(torchrun):
    script = "import os, sys; sys.exit('no disk' if os.environ['RANK'] == '1' else 0)"
    with pytest.raises(pytest.fail.Exception, match="no disk"):
        torchrun(2, script)


def test_a_hanging_rank_shows_its_stack_and_is_killed(torchrun, monkeypatch):
    with pytest.raises(pytest.fail.Exception, match=r"took more than 25 s[\s\S]*in waiting_for_nothing"):
        torchrun(2, ONE_RANK_HANGS, timeout_s=25, env={"CKPTFS_TEST_NAME": "hang"})
    assert list(_pids_with(b"CKPTFS_TEST_NAME=hang")) == []
