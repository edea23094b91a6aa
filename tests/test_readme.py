"""The README's Python runs as it stands, block after block."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


def test_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ckpts").mkdir()
    model = torch.nn.Linear(16, 8)
    optimizer = torch.optim.AdamW(model.parameters())

    def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()

    train_step(model, optimizer)
    names = {"model": model, "optimizer": optimizer, "train_step": train_step}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(block, names)
    assert names["run"].steps() == [1000, 2000]  # type: ignore[attr-defined]
    assert names["tree"]["lr"] == 3e-4  # type: ignore[index]
    saved = names["checkpoint"]["model/weight"].numpy()  # type: ignore[index]
    assert saved.shape == (8, 16)
