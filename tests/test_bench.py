"""The benchmarks: results that cannot be misread, a report whose figures follow from them, and a tiny real run."""

import json
import random
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptfs

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from benchmarks import (  # noqa: E402
    claims,
    command,
    environments,
    machine,
    model,
    peers,
    report,
    results,
    slices,
    systems,
    work,
)
from benchmarks.model import State, shapes  # noqa: E402
from benchmarks.systems import EXTENTS, PAGES, SPLIT, UNCHECKED  # noqa: E402


def measure(**changes):
    base = results.Measure("r1", "save and load", "save", "ckptfs", 10**9, 1.0, 0, ranks=2, cache="durable")
    return results.Measure(**(asdict(base) | changes))


def facts(run="r1", at="2026-01-01T00:00:00Z"):
    host = {"cpu": "a", "cores": 2, "memory_bytes": 1 << 30, "file_system": "ext4", "kernel": "6", "load_before": 0.1}
    return results.RunFacts(run, at, ["save"], "1G", 3, "tools/bench save", host, {"torch": "2"})


# --- schema ----------------------------------------------------------------------------------------------------------


def test_records_come_back_as_they_were_written(tmp_path):
    path = tmp_path / "r.jsonl"
    records = [facts(), measure(detail={"p99_s": 0.1}), results.Skip("r1", "save and load", "Orbax", "not there")]
    for record in records:
        results.append(path, record)
    assert list(results.read(path)) == records


def test_a_line_that_was_cut_off_at_the_end_is_left_out_but_one_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "r.jsonl"
    results.append(path, measure())
    whole = path.read_text()
    path.write_text(whole + whole[: len(whole) // 2])
    assert list(results.read(path)) == [measure()]
    path.write_text(whole[: len(whole) // 2] + "\n" + whole)
    with pytest.raises(ValueError, match="line 1"):
        list(results.read(path))


@pytest.mark.parametrize(
    "change",
    [{"seconds": 0}, {"seconds": -1.0}, {"bytes": -1}, {"repetition": -1}, {"kind": "guess"}, {"surprise": 1}],
)
def test_records_that_make_no_sense_are_refused(change):
    with pytest.raises(ValueError, match=r"."):
        results.parse(json.dumps(asdict(measure()) | change))


def test_a_record_with_a_field_missing_is_refused():
    raw = asdict(measure())
    del raw["seconds"]
    with pytest.raises(ValueError, match="seconds"):
        results.parse(json.dumps(raw))


def test_host_facts_hold_no_path_and_no_name(tmp_path):
    found = json.dumps(results.host_facts(tmp_path / "x"))
    assert str(tmp_path) not in found
    assert "/" not in json.loads(found)["file_system"]


# --- the state -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["8M", "256M", "1G", "2G"])
def test_the_state_has_300_tensors_and_about_the_size_asked_for(size):
    table = model.shapes(model.size_of(size))
    assert len(table) == 300
    total = sum(4 * n * (m[0] if m else 1) for n, *m in table.values())
    assert 0.8 < total / model.size_of(size) < 1.2


@pytest.mark.parametrize("text", ["", "G", "2T", "-1M", "1 giga"])
def test_sizes_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match="size"):
        model.size_of(text)


def test_the_parts_of_the_ranks_are_the_whole():
    pytest.importorskip("torch")
    import numpy as np

    table = {"a": (7, 3), "b": (2,)}
    whole = model.State(table, 0, 1)
    parts = [model.State(table, rank, 3) for rank in range(3)]
    for name in table:
        joined = np.concatenate([part.local[name].numpy() for part in parts])
        assert np.array_equal(joined, whole.local[name].numpy())


def test_a_fingerprint_notices_one_changed_value():
    pytest.importorskip("torch")
    state = model.State({"a": (5, 3)}, 0, 1)
    before = state.fingerprint()
    state.local["a"][4, 2] += 1
    assert state.fingerprint() != before


def test_large_tensors_are_three_of_the_size_asked_for():
    table = model.big_shapes(model.size_of("3.3G"))
    sizes = [4 * rows * columns for rows, columns in table.values()]
    assert len(sizes) == 3
    assert min(sizes) > 1 << 30
    assert 0.98 < sum(sizes) / model.size_of("3.3G") < 1.02


# --- the machine -----------------------------------------------------------------------------------------------------


def test_raw_limits_move_exactly_the_bytes(tmp_path):
    path = tmp_path / "raw"
    nbytes = 3 * machine.IO_BYTES + 4096
    try:
        machine.raw_write(path, nbytes)
    except OSError as error:
        pytest.skip(f"no O_DIRECT here: {error}")
    assert path.stat().st_size == nbytes
    assert path.read_bytes()[: machine.IO_BYTES].strip(b"\0")
    machine.raw_read(path)


def test_a_measured_block_sees_its_memory_and_its_time():
    with machine.measured() as cost:
        block = bytearray(64 << 20)
        block[::4096] = b"x" * len(block[::4096])
        del block
    assert cost.seconds > 0
    assert cost.peak_memory_bytes > 48 << 20


# --- the report ------------------------------------------------------------------------------------------------------


def rendered(*records):
    return report.render(report.Results([facts(), *records]), ["x.jsonl"])


def test_medians_and_fractions_follow_from_the_lines():
    own = [measure(seconds=s, repetition=i) for i, s in enumerate((1.0, 2.0, 9.0))]
    raw = [measure(system="raw", seconds=1.0, repetition=i) for i in range(3)]
    text = rendered(*own, *raw)
    assert "| **ckptfs** | 2.00 s (1.00 s – 9.00 s) | 0.50 | 0.50 |" in text
    assert "| durable save at least 0.85 of raw | 0.50 | **missed** |" in text


def test_a_goal_that_is_just_missed_does_not_look_met():
    text = rendered(measure(seconds=1.0), measure(system="raw", seconds=0.848))
    assert "| durable save at least 0.85 of raw | 0.848 | **missed** |" in text


def test_goals_are_met_only_where_the_figures_say_so():
    text = rendered(measure(seconds=1.0), measure(system="raw", seconds=0.9), measure(system="DCP", seconds=3.0))
    assert "| durable save at least 0.85 of raw | 0.90 | met |" in text
    assert "| durable save: times faster than DCP | 3.00 | met |" in text
    assert "| loading 2→4 takes at most 1.10 of 2→2 | not measured | – |" in text


def test_the_newest_run_of_a_scenario_counts():
    old, new = measure(run="r0", seconds=5.0), measure(seconds=1.0)
    text = report.render(report.Results([facts("r0", "2025-01-01T00:00:00Z"), facts(), new, old]), ["x"])
    assert "5.00 s" not in text
    assert "1.00 s" in text


def test_what_was_skipped_is_said_with_its_reason():
    assert "- Orbax: no JAX" in rendered(measure(), results.Skip("r1", "save and load", "Orbax", "no JAX"))


def test_latencies_are_compared_with_the_fastest_peer():
    base = {"scenario": "slices", "operation": "64 KiB box", "cache": "warm", "bytes": 1 << 16}
    text = rendered(
        measure(**base, seconds=2e-4, detail={"p99_s": 5e-4}),
        measure(**base, system="safetensors", seconds=1e-4, detail={"p99_s": 3e-4}),
        measure(**base, system="zarr-python", seconds=2e-3, detail={"p99_s": 3e-3}),
    )
    assert "| **ckptfs** | 200 µs | 500 µs | 2.00 |" in text
    assert "| 64 KiB box, warm: within 10 % of the fastest peer | 2.00 | **missed** |" in text
    assert "| 64 KiB box, warm: times faster than zarr-python (5) | 10.00 | met |" in text


def test_the_report_is_written_with_its_plots(tmp_path):
    pytest.importorskip("matplotlib")
    source = tmp_path / "r.jsonl"
    for record in (
        facts(),
        measure(),
        measure(system="raw"),
        measure(operation="load"),
        measure(operation="load", system="raw"),
    ):
        results.append(source, record)
    report.write_report([source], tmp_path / "docs" / "benchmarks.md")
    assert "(benchmarks-save.svg)" in (tmp_path / "docs" / "benchmarks.md").read_text()
    assert (tmp_path / "docs" / "benchmarks-save.svg").stat().st_size > 1000


def test_nothing_to_report_is_an_error(tmp_path):
    with pytest.raises(SystemExit, match="no results"):
        report.write_report([], tmp_path / "x.md")


# --- claims ----------------------------------------------------------------------------------------------------------


def sources():
    return sorted((ROOT / "docs" / "results").glob("*.jsonl"))


def test_the_readme_and_the_benchmarks_say_what_the_results_say():
    found = report.results_of(sources())
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    again = "run tools/bench report"
    assert claims.with_claims(readme, found, sources()) == readme, again
    names = [path.name for path in sources() if report.is_bench(path)]
    assert report.render(found, names) == (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8"), again


def table_of(tmp_path, *records, **others):
    paths = []
    for name, rows in others.items():
        paths.append(tmp_path / f"{name}.jsonl")
        paths[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return claims.claims_table(report.Results([facts(), *records]), paths)


def test_a_claim_names_its_figure_its_verdict_and_its_command(tmp_path):
    text = table_of(tmp_path, measure(seconds=1.0), measure(system="raw", seconds=0.9))
    assert "| durable save at least 0.85 of raw | 0.90 | met | `tools/bench save` |" in text
    assert "times faster than DCP" not in text  # nothing was measured: nothing is claimed
    assert "**missed**" in table_of(tmp_path, measure(seconds=1.0), measure(system="raw", seconds=0.5))


def test_many_slices_are_one_claim_by_the_worst_of_them(tmp_path):
    rows = []
    for operation, ours in (("row", 1.0), ("column", 3.0)):
        base = {"scenario": "slices", "operation": operation, "cache": "warm"}
        rows += [measure(**base, seconds=ours), measure(**base, system="zarr-python", seconds=2.0)]
    text = table_of(tmp_path, *rows)
    assert "| slices within 10 % of the fastest peer's time | 1 of 2 kinds; the worst 1.50 | **missed** |" in text
    assert "| slices at least 5 times faster than zarr-python | 0 of 2 kinds; the worst 0.67 | **missed** |" in text


def test_what_the_disk_cannot_give_is_said_beside_the_goal(tmp_path):
    base = {"scenario": "slices", "operation": "column", "cache": "cold"}
    rows = [measure(**base, system=s, seconds=t) for s, t in (("ckptfs", 1.0), ("zarr-python", 2.0), (PAGES, 0.5))]
    text = table_of(tmp_path, *rows)
    assert "| slices at least 5 times faster than zarr-python | 2.00 (the disk's limit: 4.00) | **missed** |" in text
    rows += [
        measure(**{**base, "cache": "warm"}, system=s, seconds=t) for s, t in (("ckptfs", 1.0), ("zarr-python", 6.0))
    ]
    text = table_of(tmp_path, *rows)
    assert "| 1 of 2 kinds; the worst 2.00 (1 beyond what disk or memory give) | **missed** |" in text


def test_slices_without_checksums_and_the_limits_of_disk_and_memory_are_claimed_beside(tmp_path):
    times = {"ckptfs": 2.0, UNCHECKED: 1.0, "torch.save": 1.25, "zarr-python": 6.0}
    cold = [measure(scenario="slices", operation="row", cache="cold", system=s, seconds=t) for s, t in times.items()]
    cold += [
        measure(scenario="slices", operation="row", cache="cold", system=s, seconds=t)
        for s, t in ((PAGES, 3.0), (EXTENTS, 1.5))  # the sooner of both is what the disk can do
    ]
    warm = [measure(scenario="slices", operation="row", cache="warm", system=s, seconds=t) for s, t in times.items()]
    warm.append(measure(scenario="slices", operation="row", cache="warm", system="memcpy", seconds=0.5))
    found = {goal.text: goal for goal in claims.goals(report.Results([facts(), *cold, *warm]))}
    for cache, limit in (("cold", "the disk's limit: 4.00"), ("warm", "memory's limit: 12.00")):
        peer = found[f"row, {cache}: within 10 % of the fastest peer"]
        alike = found[f"row, {cache}: within 10 % of the fastest peer where ckptfs, like the peers, checks nothing"]
        zarr = found[f"row, {cache}: times faster than zarr-python (5)"]
        assert (peer.shown, peer.met, alike.shown, alike.met) == ("1.60", False, "0.80", True)
        assert (zarr.shown, zarr.met) == (f"3.00 ({limit})", False)
    text = table_of(tmp_path, *cold, *warm)
    assert "| slices within 10 % of the fastest peer's time | 0 of 2 kinds; the worst 1.60 | **missed** |" in text
    assert "without checksums, as the peers have none, within 10 % of the fastest's time | 2 of 2 kinds" in text


def test_what_was_saved_with_split_is_claimed_beside_and_is_no_peer(tmp_path):
    times = {"raw": 0.9, "ckptfs": 4.0, SPLIT: 1.0, PAGES: 3.5, "torch.save": 5.0, "zarr-python": 6.0}
    rows = [
        measure(scenario="slices", operation="1/8 shard of the model", cache="cold", system=s, seconds=t)
        for s, t in times.items()
    ]
    found = {goal.text: (goal.shown, goal.met) for goal in claims.goals(report.Results([facts(), *rows]))}
    whole, split = "1/8 shard of the model, cold", "1/8 shard of the model, saved with split, cold"
    assert found[f"{whole}: within 10 % of the fastest peer"] == ("0.80", True)
    assert found[f"{split}: within 10 % of the fastest peer"] == ("0.20", True)
    assert found[f"{split}: times faster than zarr-python (5)"] == ("6.00", True)
    assert found["1/8 shard, cold, at least 0.85 of raw"] == ("0.23 (the disk's limit: 0.26)", False)
    assert found["1/8 shard, saved with split, cold, at least 0.85 of raw"] == ("0.90", True)


def test_a_step_saved_with_split_is_read_by_the_benchmark(tmp_path):
    state = State(shapes(32 << 20), 0, 1)
    for operation, place in slices.save_split(state, tmp_path).items():
        slices._check(slices.SplitEngine(place), state, [operation])
        with ckptfs.Checkpoint(place) as step:
            name, index = slices.OPERATIONS[operation][0](state.shapes, random.Random(1))[0]
            step[f"model/{name}"].numpy(index)
            assert step.bytes_read == state.local[name].nbytes // 8


def test_the_extents_of_a_slice_are_those_its_checksums_cover(tmp_path):
    data = np.zeros((1 << 10, 1 << 10), "f4")  # four extents
    ckptfs.Run(tmp_path / "run").save(1, {"model": {"w": data}})
    step = tmp_path / "run/step-00000001"
    assert slices.extents_of(step, [("w", (slice(0, 1), slice(0, 9)))]) == 1 << 20
    assert slices.extents_of(step, [("w", (slice(255, 257), slice(0, 9)))]) == 2 << 20
    assert slices.extents_of(step, [("w", (slice(0, 1024), slice(0, 9)))]) == 4 << 20


@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple),
    cuts=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=3, max_size=3),
    wide=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_the_pages_of_a_slice_are_those_its_elements_lie_on(shape, cuts, wide):
    shape = (*shape[:-1], shape[-1] * (40 if wide else 1))
    index = tuple(slice(int(min(c) * (n - 1)), int(max(c) * (n - 1)) + 1) for n, c in zip(shape, cuts, strict=False))
    elements = np.arange(np.prod(shape)).reshape(shape)[index]
    assert slices.pages_of(shape, index) == 4096 * len(np.unique(elements * 4 // 4096))


def test_mounts_are_compared_with_plain_files_in_the_same_state_of_the_caches(tmp_path):
    base = {"scenario": "mount", "operation": "hf/*.safetensors, sequential"}
    rows = [
        measure(**base, cache="cold (fadvise)", system="plain files", seconds=1.0),
        measure(**base, cache="cold (fadvise)", system="ckptfs mount, native", seconds=1.25),
        measure(**base, cache="warm: backing files cached", system="plain files", seconds=0.1),
        measure(**base, cache="warm: backing files cached", system="ckptfs mount, native", seconds=0.2),
    ]
    text = table_of(tmp_path, *rows)
    assert "| mount, native, cold, sequential: at least 0.9 of plain files | 0.80 | **missed** |" in text
    assert "| mount, native, backing files cached, sequential: at least 0.3 of plain files | 0.50 | met |" in text
    assert "mount, fusepy" not in text


def test_campaigns_and_simulations_are_claimed_from_their_own_files(tmp_path):
    crash = [
        {"seed": 1, "minutes": 2.0, "tried": {"kill": 5, "stop": 2}, "survived": {"kill": 5, "stop": 2}},
        {"seed": 2, "minutes": 2.0, "tried": {"kill": 3}, "survived": {"kill": 2}},
    ]
    simulate = [
        {"model": "a", "layout": "x", "ranks": 16384, "plan_max_s": 0.4, "exchanged_mb": 1.0},
        {"model": "b", "layout": "y", "ranks": 16384, "plan_max_s": 1.4, "exchanged_mb": 2.0},
        {"model": "c", "layout": "y", "ranks": 1024, "plan_max_s": 9.0, "merge_s": 3.0},
    ]
    text = table_of(tmp_path, measure(), crash=crash, simulate=simulate)
    assert "| 9 of 10 in 4 minutes | **missed** |" in text
    assert "| 16,384 simulated ranks: a rank plans in under 1 s | 1.40 s at worst (b, y) | **missed** |" in text
    assert "| 16,384 simulated ranks: under 10 MB exchanged by all ranks | 2.00 MB at worst (b, y) | met |" in text
    assert "merge" not in text


def test_commands_are_said_without_the_paths_of_the_run():
    run = facts()
    run = results.RunFacts(**(asdict(run) | {"command": "tools/bench save --size 1G --results /a/b --folder '/c d'"}))
    found = report.Results([run, measure()])
    assert claims.command_of(found, "save and load") == "tools/bench save --size 1G"
    run = results.RunFacts(**(asdict(run) | {"command": "tools/bench record --results /a/b"}))
    found = report.Results([run, measure()])
    assert claims.command_of(found, "save and load") == "tools/bench record --only save"


def test_a_readme_without_its_marks_is_an_error():
    with pytest.raises(SystemExit, match="marks"):
        claims.with_claims("nothing", report.Results([facts(), measure()]), [])


def test_every_scenario_of_the_record_can_be_claimed_again():
    assert set(claims.KEYS.values()) == set(command.RECORD)


# --- peers -----------------------------------------------------------------------------------------------------------


def test_fractions_are_of_the_limits_of_the_same_repetition_and_operation():
    found = work.with_limits(
        [measure(seconds=4.0), measure(system="raw", seconds=1.0), measure(system="memcpy", seconds=0.5)]
    )
    assert (found[0].of_raw, found[0].of_memcpy) == (0.25, 0.125)
    assert work.with_limits([measure(operation="load")])[0].of_raw is None


def test_an_environment_that_cannot_be_made_says_why(tmp_path, monkeypatch):
    wanted = environments.Environment("none", (str(tmp_path / "nothing==1.whl"),), "pass")
    monkeypatch.setitem(environments.ENVIRONMENTS, "Nobody", wanted)
    with pytest.raises(environments.Unavailable, match=r"nothing==1\.whl"):
        environments.python_of("Nobody", tmp_path / "envs")
    with pytest.raises(environments.Unavailable, match=r"nothing==1\.whl"):  # half an environment is none
        environments.python_of("Nobody", tmp_path / "envs")


def test_a_peer_without_an_environment_is_missing_with_its_reason():
    assert peers.Orbax({}, {"Orbax": "no JAX for this machine"}).missing() == "no JAX for this machine"
    assert peers.Orbax({"Orbax": "/python"}, {}).missing() is None


def test_a_peer_that_fails_or_ends_is_an_error_with_what_it_said(tmp_path):
    pytest.importorskip("torch")
    job = systems.Job(model.State({"a": (4, 2)}, 0, 1), None, lambda: None)
    with pytest.raises(RuntimeError, match="KeyError: 'Nobody'"):
        peers.Child(sys.executable, "Nobody", job, tmp_path)
    with pytest.raises(RuntimeError, match="its process ended; it said nothing"):
        peers.Child("/bin/false", "Nobody", job, tmp_path)


# --- the command -----------------------------------------------------------------------------------------------------


def test_a_quick_look_is_at_every_scenario_once_and_in_small(tmp_path, monkeypatch, capsys):
    seen = {}
    monkeypatch.setattr(
        command, "SCENARIOS", {name: lambda o, name=name: seen.update({name: o}) for name in command.RECORD}
    )
    assert command.main(["all", "--size", "64M", "--results", str(tmp_path / "r.jsonl")]) == 0
    assert seen.keys() == command.RECORD.keys()
    assert {options.repetitions for options in seen.values()} == {1}
    assert (seen["save"].size, seen["relayout"].size, seen["import"].systems) == ("32M", "16M", [])
    assert seen["mount"].systems == ["ckptfs mount, native", "ckptfs mount, fusepy"]
    assert "relayout: 16M, 1 repetition, only ckptfs" in capsys.readouterr().out


def test_an_unknown_scenario_is_named(tmp_path):
    with pytest.raises(SystemExit, match="no scenario speed"):
        command.main(["speed", "--results", str(tmp_path / "r.jsonl")])


@pytest.mark.serial
def test_a_tiny_run_measures_saves_and_loads_and_leaves_nothing(tmp_path):
    pytest.importorskip("torch")
    out, work = tmp_path / "r.jsonl", tmp_path / "work"
    arguments = ["save", "--size", "8M", "--repetitions", "1", "--systems", "ckptfs", "safetensors"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "bench"), *arguments, "--results", str(out), "--folder", str(work)],
        capture_output=True,
        text=True,
        timeout=350,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = list(results.read(out))
    measures = {(m.operation, m.system): m for m in found if isinstance(m, results.Measure)}
    assert {(o, s) for o in ("save", "load") for s in ("ckptfs", "safetensors")} <= set(measures)
    assert measures["save", "ckptfs"].files > 300
    assert measures["save", "ckptfs"].ranks == 2
    failed = [r.reason for r in found if isinstance(r, results.Skip) and r.system in ("ckptfs", "safetensors", "all")]
    assert not failed
    assert list(work.iterdir()) == []
