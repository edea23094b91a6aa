"""Real gloo ranks: every way torch spreads tensors, saved on four ranks, loaded on four, two and one."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import ckptfs  # noqa: E402
import layout_jobs  # noqa: E402 - needs torch

JOBS = Path(layout_jobs.__file__)


def test_saved_on_four_ranks_loaded_on_four_two_and_one(torchrun, tmp_path):
    result = torchrun(4, JOBS, "four", tmp_path, timeout_s=250)
    assert all(text.count(" ok\n") == len(layout_jobs.JOBS["four"]) for text in result.by_rank), result.tail()
    result = torchrun(2, JOBS, "two", tmp_path, timeout_s=150)
    assert all(text.count(" ok\n") == 1 for text in result.by_rank), result.tail()
    with ckptfs.Run(tmp_path / "placements") as run:
        for step in (1, 2):
            tree = run[step].tree()
            for name, (shape, dtype) in layout_jobs.wanted().items():
                layout_jobs.check(tree[name], layout_jobs.full(name, shape, dtype), name)
    for saved in ("fsdp2", "hsdp", "fsdp_tp"):
        made = layout_jobs.model(seed=7)
        ckptfs.Run(tmp_path / saved).load({"model": made.state_dict()})
        for name, want in torch.load(tmp_path / f"{saved}.pt", weights_only=True).items():
            layout_jobs.check(made.state_dict()[name], want, name)
    layout_jobs.load_optimizers(tmp_path, lambda: layout_jobs.model(seed=9))
    # One rank has no share of what four kept for themselves: all shares, or a clear error.
    back = ckptfs.Run(tmp_path / "odd").latest.tree()
    assert {rank: value.tolist() for rank, value in back["mine"].items()} == {r: [float(r)] * 3 for r in range(4)}
