"""The campaign and the simulation, in short: the long runs are recorded in docs/testing.md."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parent.parent / "tools"


@pytest.mark.serial
def test_a_short_crash_campaign_breaks_no_promise() -> None:
    done = subprocess.run(
        [sys.executable, TOOLS / "crash.py", "--minutes", "0.5", "--seed", "7"],
        capture_output=True,
        text=True,
        timeout=350,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ") and line[-3].isdigit()]
    counts = [[int(cell) for cell in row.split("|")[2:4]] for row in rows]
    assert sum(tried for tried, _ in counts) > 0
    assert all(tried == survived for tried, survived in counts)


def test_portions_of_a_campaign_are_summed(tmp_path: Path) -> None:
    portions = [
        {"seed": 1, "minutes": 2.0, "rounds": 3, "tried": {"kill one rank": 2}, "survived": {"kill one rank": 2}},
        {"seed": 2, "minutes": 0.5, "rounds": 4, "tried": {"full disk": 1}, "survived": {"full disk": 1}},
        {"seed": 3, "minutes": 0.5, "rounds": 1, "tried": {"kill one rank": 1}, "survived": {}},
    ]
    path = tmp_path / "crash.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in portions))
    command = [sys.executable, TOOLS / "crash.py", "--table", path]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "3.0 minutes, 8 jobs, seeds 1, 2, 3" in text
    assert "| kill one rank | 3 | 2 |" in text
    assert "| full disk | 1 | 1 |" in text
    assert "| stop one rank | 0 | 0 |" in text


def test_sixteen_thousand_ranks_plan_within_bounds() -> None:
    command = [sys.executable, TOOLS / "simulate.py", "--json", "--samples", "1", "--model", "70b", "--ranks", "16384"]
    done = subprocess.run([*command, "--layout", "hsdp", "tp-pp-dp"], capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["layout"] for row in rows] == ["hsdp", "tp-pp-dp"]
    for row in rows:
        assert row["exchanged_mb"] < 10
        assert row["replica_imbalance"] < 0.05
        assert row["files_per_rank"] < 100


def test_the_merge_of_a_thousand_ranks_makes_a_legal_manifest() -> None:
    command = [sys.executable, TOOLS / "simulate.py", "--merge", "--json", "--model", "70b", "--ranks", "1024"]
    done = subprocess.run([*command, "--layout", "fsdp"], capture_output=True, text=True, check=True)
    row = json.loads(done.stdout)
    assert row["extents"] > 100_000
