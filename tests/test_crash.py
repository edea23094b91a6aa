"""A save that dies at any moment: the old step or the new one is there and sound, and the next save cleans up.

Crashes of one rank are simulated at every single operation that changes something; real ranks are killed with
SIGKILL at each phase.
"""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import ckptfs
from ckptfs import commit
from ckptfs.errors import CkptError, MismatchError, SaveError, StorageError
from ckptfs.save import Saver
from ckptfs.storage import FaultOps, FaultPlan, FaultStore, LocalStore, MemoryStore, SimulatedCrash
from ckptfs.verify import verify
from spreads import NoSync, on_ranks

ROOT = Path(__file__).resolve().parent.parent
SMALL = ckptfs.Settings(
    chunk_bytes=4096, block_bytes=8192, extent_bytes=1024, io_bytes=8192, small_file_bytes=2048, write_threads=1,
    buffer_bytes=1 << 16,
)  # fmt: skip
CRASHES = ["crash-before", "crash-after", "torn"]
ERRORS = ["error-before", "error-after"]


def tree(seed):
    rng = np.random.default_rng(seed)
    return {
        "large": rng.standard_normal((50, 61)),
        "small": rng.standard_normal(5),
        "empty": np.zeros((0, 3)),
        "step": seed,
    }


def equal(one, two):
    return one["step"] == two["step"] and all(np.array_equal(one[k], two[k]) for k in ("large", "small", "empty"))


def save(store, step, **how):
    with ckptfs.Run(store, settings=SMALL) as run:
        return run.save(step, tree(step if "seed" not in how else how.pop("seed")), assets={"a.json": "{}"}, **how)


def sound(store, step, *candidates):
    """The step is there, verifies, and is one of the candidates; which one."""
    with ckptfs.Run(store, settings=SMALL)[step] as checkpoint:
        assert verify(checkpoint) == []
        found = checkpoint.tree(numpy=True)
    return next(seed for seed in candidates if equal(found, tree(seed)))


# --- local ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CRASHES)
def test_a_crash_at_any_system_call_of_a_save(tmp_path, kind):
    seen = set()
    only = frozenset({"pwrite"}) if kind == "torn" else None  # a crash before any other call
    for number in range(10_000):
        plan = FaultPlan(kind, at=number, only=only)
        good = LocalStore(tmp_path / f"run{number}", ops=NoSync())
        save(good, 1)
        try:
            save(LocalStore(good.root, ops=FaultOps(plan)), 2)
        except SimulatedCrash:
            pass
        steps = ckptfs.Run(good).steps()
        assert steps in ([1], [1, 2]), (number, steps)
        for step in steps:
            sound(good, step, step)
        seen.add(tuple(steps))
        save(good, 3)
        assert set(os.listdir(good.root)) == {f"step-0000000{s}" for s in {*steps, 3}}, plan.log[number:]
        if not plan.faults:
            break
    assert number > 10
    assert seen == {(1,), (1, 2)}


@pytest.mark.parametrize("kind", CRASHES)
def test_overwriting_never_leaves_a_moment_without_the_step(tmp_path, kind):
    seen = set()
    only = frozenset({"pwrite"}) if kind == "torn" else None  # a crash before any other call
    for number in range(10_000):
        plan = FaultPlan(kind, at=number, only=only)
        good = LocalStore(tmp_path / f"run{number}", ops=NoSync())
        save(good, 1)
        try:
            save(LocalStore(good.root, ops=FaultOps(plan)), 1, seed=5, overwrite=True)
        except SimulatedCrash:
            pass
        seen.add(sound(good, 1, 1, 5))
        save(good, 2)
        assert set(os.listdir(good.root)) == {"step-00000001", "step-00000002"}
        if not plan.faults:
            break
    assert seen == {1, 5}


@pytest.mark.parametrize("kind", ERRORS)
def test_a_failing_system_call_is_a_clear_error_or_survived(tmp_path, kind):
    """No error is lost: a save that returns is there and sound, one that raises names what failed."""
    raised = 0
    for number in range(10_000):
        plan = FaultPlan(kind, at=number)
        good = LocalStore(tmp_path / f"run{number}", ops=NoSync())
        save(good, 1)
        try:
            save(LocalStore(good.root, ops=FaultOps(plan)), 2)
        except CkptError as error:
            failed = error
            # Only the very last calls fail after the step is there.
            if 2 in ckptfs.Run(good).steps():
                sound(good, 2, 2)
        else:
            failed = None
            sound(good, 2, 2)
        if failed is not None:
            assert isinstance(failed, StorageError), (plan.log[number], failed)
            assert "Input/output error" in str(failed), (plan.log[number], failed)
            raised += 1
        sound(good, 1, 1)
        save(good, 3)
        assert {n for n in os.listdir(good.root) if n.startswith(".")} == set(), plan.log[number:]
        if not plan.faults:
            break
    assert raised > 20


def test_short_writes_are_continued(tmp_path):
    for number in range(10_000):
        plan = FaultPlan("short", at=number, only=frozenset({"pwrite"}))
        store = LocalStore(tmp_path / f"run{number}", ops=FaultOps(plan))
        save(store, 1)
        sound(LocalStore(store.root), 1, 1)
        if not plan.faults:
            break
    assert number > 5


# --- object stores -------------------------------------------------------------------------------------------


def emptied(name):
    store = MemoryStore(name)
    for path, _ in list(store.list()):
        store.remove(path)
    return store


@pytest.mark.parametrize("kind", [*CRASHES, *ERRORS, "short"])
def test_an_object_store_that_fails_at_any_request(kind):
    seen = set()
    # An object store never shows half an object, so the manifest's create is not torn; what is written before it may be.
    only = frozenset({"write", "remove", "remove_tree", "list", "read", "size"}) if kind in ("torn", "short") else None
    for number in range(10_000):
        plan = FaultPlan(kind, at=number, only=only)
        good = emptied(f"crash-{kind}")
        save(good, 1)
        try:
            save(FaultStore(good, plan), 2)
        except (SimulatedCrash, CkptError) as error:
            failed = error
        else:
            failed = None
        run = ckptfs.Run(good)
        try:
            steps = run.steps()
            for step in steps:
                sound(good, step, step)
        except CkptError as error:
            raise AssertionError(f"{plan.log[number]} (operation {number}): {error}") from error
        assert failed is not None or steps == [1, 2]
        seen.add(tuple(steps))
        if 2 not in steps:
            save(good, 2)  # the next try of the same step cleans up what the first left
        names = {path for path, _ in good.list("step-00000002")}
        clean = emptied(f"crash-{kind}-clean")
        save(clean, 2)
        assert names == {path for path, _ in clean.list("step-00000002")}
        if not plan.faults:
            break
    assert number > 10
    assert (1, 2) in seen


# --- several ranks -------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*was saved although:RuntimeWarning")
@pytest.mark.parametrize(
    ("failing", "takeover", "expected"), [(0, "off", {0, 2}), (0, "free", {0, 2}), (1, "off", {0, 2}), (1, "free", {0})]
)
def test_a_rank_that_fails_makes_every_rank_raise_the_same(tmp_path, failing, takeover, expected):
    """Whatever call fails on one rank: all ranks raise, name it, and agree; or all succeed, as they always do when the
    others hold the same and may stand in."""
    outcomes = set()
    settings = dataclasses.replace(SMALL, takeover=takeover)
    for number in range(10_000):
        plan = FaultPlan(
            "error-before", at=number, only=frozenset({"open", "pwrite", "fallocate", "syncfs", "rename_new"})
        )
        good = LocalStore(tmp_path / f"run{number}", ops=NoSync())
        caught = {}

        def work(rank, group, good=good, plan=plan, caught=caught):
            store = LocalStore(good.root, ops=FaultOps(plan)) if rank == failing else good
            try:
                with ckptfs.Run(store, group=group, settings=settings) as run:
                    run.save(2, tree(2))
            except CkptError as error:
                caught[rank] = error

        on_ranks(2, work)
        outcomes.add(len(caught))
        steps = ckptfs.Run(good).steps()
        if caught and 2 not in steps:
            assert set(caught) == {0, 1}, (plan.log[number], caught)
            assert str(caught[0]) == str(caught[1])
            assert "Input/output error" in str(caught[0])
            if isinstance(caught[0], SaveError):
                assert set(caught[0].by_rank) == {failing}
        for step in steps:
            sound(good, step, step)
        save(good, 3)
        assert {n for n in os.listdir(good.root) if n.startswith(".")} == set(), plan.log[number:]
        if not plan.faults:
            break
    assert outcomes == expected


# --- real processes ------------------------------------------------------------------------------------------

DIES = """
import os, signal, sys
import numpy as np
import ckptfs
from test_crash import SMALL, tree
from ckptfs.storage import FileOps, LocalStore

class Dies(FileOps):
    def __getattribute__(self, name):
        if not name.startswith("_") and name == wanted[0]:
            wanted[1] -= 1
            if wanted[1] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().__getattribute__(name)

name, count, overwrite = sys.argv[2], int(sys.argv[3]), sys.argv[4] == "1"
wanted = [name, count]
run = ckptfs.Run(LocalStore(sys.argv[1], ops=Dies()), settings=SMALL)
run.save(1 if overwrite else 2, tree(5 if overwrite else 2), overwrite=overwrite)
"""


@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
@pytest.mark.parametrize(
    ("call", "count"),
    [("mkdir", 1), ("fallocate", 1), ("pwrite", 2), ("syncfs", 1), ("syncfs", 2), ("rename_new", 1), ("fsync", 1)],
)
def test_a_process_that_is_killed(tmp_path, call, count, overwrite):
    store = LocalStore(tmp_path / "run")
    save(store, 1)
    job = subprocess.run(
        [sys.executable, "-c", DIES, store.root, call, str(count), str(int(overwrite))],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert job.returncode == -signal.SIGKILL, job.stderr
    steps = ckptfs.Run(store).steps()
    assert steps in ([1], [1, 2])
    sound(store, 1, 1, 5)
    if 2 in steps:
        sound(store, 2, 2)
    save(store, 3)
    assert set(os.listdir(store.root)) == {f"step-0000000{s}" for s in {*steps, 3}}


# --- jobs that save to one run at the same time ------------------------------------------------------------------


class SweptOps(NoSync):
    """Another job takes the folder of a save for a dead one's, before it is locked, and removes it."""

    def __init__(self):
        self.swept = 0

    def mkdir(self, path):
        super().mkdir(path)
        if path.endswith(".saving") and self.swept < 2:
            self.swept += 1
            os.rmdir(path)


def test_a_folder_that_was_cleared_away_before_it_was_locked_is_made_again(tmp_path):
    ops = SweptOps()
    save(LocalStore(tmp_path, ops=ops), 1)
    assert ops.swept == 2
    sound(LocalStore(tmp_path), 1, 1)


def test_the_folder_is_locked_before_any_rank_writes_there(tmp_path, monkeypatch):
    """What a rank wrote before would be cleared away with the folder, and the step committed without it."""
    looked, found = threading.Event(), []
    reserve = Saver.reserve

    def look_first(saver):
        if saver.group.rank == 1:
            found.append((os.path.isdir(saver.store.full(saver._folder)), commit.collect(saver.store, "step-")))
            looked.set()
        else:
            assert looked.wait(30)
        reserve(saver)

    monkeypatch.setattr(Saver, "reserve", look_first)

    def work(rank, group):
        with ckptfs.Run(tmp_path, group=group, settings=SMALL) as run:
            run.save(1, tree(1))

    on_ranks(2, work)
    assert found == [(True, [])]
    sound(LocalStore(tmp_path), 1, 1)


# --- mistakes of the caller --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({"assets": "/nowhere at all"}, "is not a folder"),
        ({"assets": {"../x": b""}}, "does not stay inside"),
        ({"assets": {"x": 3.5}}, "text or bytes"),
        ({"compression": "lz77"}, "'zstd' and 'blosc'"),
        ({"compression": 3}, "'zstd' and 'blosc'"),
    ],
)
def test_wrong_arguments_are_errors_on_every_rank_at_once(tmp_path, how, match):
    """Assets are read by the leader alone, and the others must not wait for it."""
    caught = {}

    def work(rank, group):
        with ckptfs.Run(tmp_path / "run", group=group, settings=SMALL) as run:
            try:
                run.save(1, tree(1), **how)
            except CkptError as error:
                caught[rank] = error
            run.save(2, tree(2))

    on_ranks(2, work)
    assert set(caught) == {0, 1}
    assert all(match in str(error) for error in caught.values())
    assert ckptfs.Run(tmp_path / "run").steps() == [2]


@pytest.mark.parametrize("name", ["a\\b", "a\nb", "deep/a\x7f"])
def test_assets_whose_names_no_manifest_holds_are_refused(tmp_path, name):
    """Committed, such a step could never be read."""
    file = tmp_path / "assets" / name
    file.parent.mkdir(parents=True)
    file.write_text("x")
    with pytest.raises(MismatchError, match="rename it"):
        ckptfs.save(tmp_path / "step", tree(1), assets=tmp_path / "assets")
    assert not (tmp_path / "step").exists()


def test_a_number_that_no_manifest_holds_is_no_step(tmp_path):
    with ckptfs.Run(tmp_path / "run") as run:
        with pytest.raises(MismatchError, match=r"below 2\^62"):
            run.save(1 << 62, tree(1))
        run.save((1 << 62) - 1, tree(1))
        assert equal(run.latest.tree(numpy=True), tree(1))


@pytest.mark.parametrize("name", ["run@5", "run@latest"])
def test_a_name_that_is_read_as_a_step_of_a_run_is_refused(tmp_path, name):
    with pytest.raises(MismatchError, match="step of a run"):
        ckptfs.save(tmp_path / name, tree(1))


def test_a_folder_of_other_things_is_never_replaced(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "precious").write_text("x")
    for overwrite in (False, True):
        with pytest.raises(ckptfs.ExistsError, match="is not a checkpoint"):
            ckptfs.save(tmp_path / "data", tree(1), overwrite=overwrite)
    assert os.listdir(tmp_path / "data") == ["precious"]
    assert os.listdir(tmp_path) == ["data"]


@pytest.mark.parametrize("target", ["nowhere", "empty"])
def test_a_symbolic_link_is_never_replaced(tmp_path, target):
    """It may lead to a disk that is not mounted at the moment."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "data").symlink_to(target)
    with pytest.raises(ckptfs.ExistsError, match="is not a checkpoint"):
        ckptfs.save(tmp_path / "data", tree(1))
    assert os.readlink(tmp_path / "data") == target
    assert sorted(os.listdir(tmp_path)) == ["data", "empty"]


@pytest.mark.parametrize("url", ["s3://", "s3:///", "gs://"])
def test_a_url_without_a_place_is_refused(url):
    with pytest.raises(StorageError, match="names no bucket"):
        ckptfs.Run(url)
