"""What stays and what goes: the decision against an obvious twin, the deleting against crashes, pins and readers."""

import os
import pickle
import threading

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

import ckptfs
from ckptfs import commit, lease, retention, verify
from ckptfs.cli import main
from ckptfs.errors import ExistsError, MismatchError, NotFoundError, StaleError
from ckptfs.retention import Policy, doomed
from ckptfs.storage import FaultOps, FaultPlan, LocalStore, MemoryStore, SimulatedCrash

TREE = {"x": np.arange(3000.0), "y": {"z": np.arange(5)}}


def save_all(run, steps):
    for step in steps:
        run.save(step, TREE)
    run.wait_idle()


# --- the decision ----------------------------------------------------------------------------------------------------


@given(
    st.sets(st.integers(0, 60)),
    st.none() | st.integers(1, 8),
    st.none() | st.integers(1, 12),
    st.none() | st.integers(2, 5),
    st.sets(st.integers(0, 60), max_size=4),
)
def test_doomed_is_what_nothing_keeps(steps, keep_last, keep_every, keep_multiple, pins):
    keep = None if keep_multiple is None else lambda step: step % keep_multiple == 1
    gone = doomed(sorted(steps), Policy(keep_last, keep_every, keep), pins)
    for step in steps:
        newer = sum(other > step for other in steps)
        stays = (
            newer == 0
            or step in pins
            or (keep_last is not None and newer < keep_last)
            or (keep_every is not None and step % keep_every == 0)
            or (keep is not None and keep(step))
            or (keep_last is None and keep_every is None and keep is None)
        )
        assert (step in gone) != stays
    assert gone == sorted(gone)


@pytest.mark.parametrize("bad", [{"keep_last": 0}, {"keep_every": -1}, {"keep_last": True}, {"keep": 3}])
def test_policies_that_make_no_sense(tmp_path, bad):
    with pytest.raises(MismatchError, match=next(iter(bad))):
        ckptfs.Run(tmp_path, **bad)


# --- a run -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["folder", "memory"])
def test_old_steps_go_after_a_commit(tmp_path, url):
    run = ckptfs.Run(
        tmp_path if url == "folder" else MemoryStore(f"retention-{os.getpid()}"), keep_last=2, keep_every=10
    )
    save_all(run, [0, 4, 8, 10, 11])
    assert run.steps() == [0, 10, 11]
    save_all(run, [12, 13])
    assert run.steps() == [0, 10, 12, 13]
    left = {path.partition("/")[0] for path, _ in run.store.list()}
    assert left == {commit.step_name(step) for step in run.steps()}
    run.close()


def test_background_saves_prune_too(tmp_path):
    with ckptfs.Run(tmp_path, keep_last=1) as run:
        for step in range(4):
            run.save_async(step, TREE)
        run.wait_idle()
        assert run.steps() == [3]


def test_without_a_policy_everything_stays(tmp_path):
    with ckptfs.Run(tmp_path) as run:
        save_all(run, range(4))
        assert run.steps() == [0, 1, 2, 3]
        assert run.prune() == []


def test_pins(tmp_path):
    with ckptfs.Run(tmp_path, keep_last=1) as run:
        save_all(run, [1])
        run.pin(1)
        assert ckptfs.Run(tmp_path).pinned == [1]  # every process sees it
        save_all(run, [2, 3])
        assert run.steps() == [1, 3]
        run.unpin(1)
        assert run.prune() == [1]
        with pytest.raises(NotFoundError, match="no step 1"):
            run.pin(1)
        assert run.pinned == []


def test_a_pin_on_what_is_not_there_leaves_nothing(tmp_path):
    with pytest.raises(NotFoundError, match="no step 1"):
        ckptfs.Run(tmp_path / "misspelt").pin(1)
    assert os.listdir(tmp_path) == []


def test_a_step_in_use_stays_until_it_is_free(tmp_path):
    with ckptfs.Run(tmp_path, keep_last=1) as run:
        save_all(run, [1])
        with lease.take(run.store, "step-00000001"):
            save_all(run, [2, 3])
            assert run.steps() == [1, 3]
        save_all(run, [4])
        assert run.steps() == [4]


def test_of_a_step_behind_a_symbolic_link_only_the_link_is_deleted(tmp_path):
    save_all(ckptfs.Run(tmp_path / "archive"), [1])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step-00000001").symlink_to(tmp_path / "archive" / "step-00000001")
    with ckptfs.Run(tmp_path / "run", keep_last=1) as run:
        assert run.steps() == [1]
        save_all(run, [2])
        assert os.listdir(tmp_path / "run") == ["step-00000002"]
    assert ckptfs.Run(tmp_path / "archive").verify(1) == []


def test_a_policy_that_raises_is_logged_and_deletes_nothing(tmp_path, caplog):
    with ckptfs.Run(tmp_path, keep=lambda step: 1 / 0) as run:
        save_all(run, [1, 2])
        assert run.steps() == [1, 2]
    assert "ZeroDivisionError" in caplog.text


def test_a_store_that_cannot_delete_is_logged_and_tried_again(tmp_path, caplog):
    plan = FaultPlan("error-before", at=0, only=frozenset(["unlink"]))
    run = ckptfs.Run(LocalStore(tmp_path, ops=FaultOps(plan)), keep_last=1)
    save_all(run, [1, 2])
    assert run.steps() == [2]  # renamed away first
    assert "could not be deleted" in caplog.text
    save_all(run, [3])
    assert os.listdir(tmp_path) == ["step-00000003"]
    run.close()


def test_a_crash_at_any_moment_leaves_whole_steps(tmp_path):
    """Every system call of a deletion, in turn, is the last one of the process."""
    number = 0
    while True:
        folder = tmp_path / str(number)
        save_all(ckptfs.Run(folder), [1, 2])
        plan = FaultPlan("crash-before", at=number)
        store = LocalStore(folder, ops=FaultOps(plan))
        try:
            retention.prune(store, [1, 2], Policy(keep_last=1))
        except SimulatedCrash:
            pass
        after = ckptfs.Run(folder)
        for step in after.steps():
            with after[step] as checkpoint:
                assert np.array_equal(checkpoint["x"].numpy(), TREE["x"])
        assert after.steps()[-1] == 2
        save_all(after, [3])
        assert not [name for name in os.listdir(folder) if name.endswith(".deleting")]
        after.close()
        if not plan.crashed:
            break
        number += 1
    assert number > 8


def test_only_rank_0_deletes(tmp_path):
    from ckptfs.ranks import Group

    def work(group):
        run = ckptfs.Run(tmp_path, group=group, keep_last=1)
        for step in range(3):
            run.save(step, {"x": np.arange(10)})
        run.close()
        if group.rank:
            assert run._pruner._thread is None

    threads = [threading.Thread(target=work, args=[group]) for group in Group.threads(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert ckptfs.Run(tmp_path).steps() == [2]


# --- steps that were checked -----------------------------------------------------------------------------------------


def damage(folder, step):
    path = folder / commit.step_name(step) / "x" / "c.0"
    with path.open("r+b") as file:
        file.write(b"\xff" * 64)


def test_the_newest_step_that_was_found_sound_stays(tmp_path):
    with ckptfs.Run(tmp_path, keep_last=1) as run:
        save_all(run, [1, 2])
        assert run.verify() == []
        save_all(run, [3, 4])
        assert run.steps() == [2, 4]
        damage(tmp_path, 4)
        assert [problem.kind for problem in run.verify(4)] == ["checksum"]
        save_all(run, [5])
        assert run.steps() == [2, 5]
        assert run.verify() == []
        assert run.prune() == [2]
        assert os.listdir(tmp_path / ".verified") == ["step-00000005"]


def test_what_was_found_sound_and_then_bad_or_replaced_is_not_protected(tmp_path):
    with ckptfs.Run(tmp_path, keep_last=1) as run:
        save_all(run, [1])
        assert run.verify() == []
        run.save(1, TREE, overwrite=True)
        assert retention.latest_verified(run.store, [1]) is None
        assert run.verify() == []
        assert retention.latest_verified(run.store, [1]) == 1
        damage(tmp_path, 1)
        assert run.verify()
        assert retention.latest_verified(run.store, [1]) is None
        save_all(run, [2])
        assert run.steps() == [2]


@pytest.mark.parametrize("by", ["run", "command"])
def test_a_step_that_is_replaced_while_it_is_checked_is_not_the_one_that_was_found_sound(tmp_path, monkeypatch, by):
    run = ckptfs.Run(tmp_path)
    save_all(run, [1])
    real = verify.verify

    def checked_then_replaced(*args, **how):
        found = real(*args, **how)
        run.save(1, TREE, overwrite=True)
        return found

    monkeypatch.setattr(verify, "verify", checked_then_replaced)
    assert not (run.verify() if by == "run" else main(["verify", f"{tmp_path}@1"]))
    assert retention.latest_verified(run.store, [1]) is None
    monkeypatch.undo()
    assert run.verify() == []
    assert retention.latest_verified(run.store, [1]) == 1
    run.close()


# --- steps that are replaced -----------------------------------------------------------------------------------------


def test_a_pinned_step_is_not_replaced(tmp_path):
    with ckptfs.Run(tmp_path) as run:
        save_all(run, [1])
        run.pin(1)
        with pytest.raises(ExistsError, match="unpin step 1"):
            run.save(1, TREE, overwrite=True)
        run.unpin(1)
        run.save(1, TREE, overwrite=True)


def test_what_was_replaced_stays_while_somebody_reads_it(tmp_path):
    with ckptfs.Run(tmp_path) as run:
        run.save(1, {"x": np.zeros(3000)})
        with lease.take(run.store, "step-00000001"):
            run.save(1, {"x": np.ones(3000)}, overwrite=True)
            run.save(2, TREE)  # which clears away what dead saves left
            (old,) = [name for name in os.listdir(tmp_path) if name.startswith(".step-")]
            with ckptfs.Checkpoint(run.store.sub(old)) as checkpoint:
                assert not checkpoint["x"].numpy().any()
            assert run[1]["x"].numpy().all()
        run.save(3, TREE)
        assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002", "step-00000003"]


def test_who_follows_a_run_reads_the_step_that_it_was_given(tmp_path):
    """Nothing of it has been read when it is replaced, whole and by arrays of other shapes."""
    with ckptfs.Run(tmp_path) as run:
        run.save(1, {"x": np.zeros(300_000), "y": np.zeros(7)})
        with run.wait() as before:
            run.save(1, {"x": np.ones(5)}, overwrite=True)
            run.save(2, TREE)
            assert before.url == run[1].url
            assert before["x"].numpy().shape == (300_000,)
            assert not before["x"].numpy().any()
            assert not before["y"].numpy().any()
            with pytest.raises(StaleError, match="replaced"):
                pickle.loads(pickle.dumps(before))  # another process would find the new one
            assert run[1]["x"].numpy().all()
        run.save(3, TREE)
        assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002", "step-00000003"]
        with run.wait() as first:
            assert first["x"].numpy().all()


def test_a_step_that_is_replaced_while_it_is_opened_is_the_new_one(tmp_path, monkeypatch):
    with ckptfs.Run(tmp_path) as run:
        run.save(1, {"x": np.zeros(5)})
        hold = lease.FileLease.hold

        def replaced_first(self, folder):
            monkeypatch.setattr(lease.FileLease, "hold", hold)
            run.save(1, {"x": np.ones(5)}, overwrite=True)
            return hold(self, folder)

        monkeypatch.setattr(lease.FileLease, "hold", replaced_first)
        with run.wait() as found:
            assert found["x"].numpy().all()


def test_objects_are_never_replaced():
    with ckptfs.Run(MemoryStore(f"replaced-{os.getpid()}")) as run:
        run.save(1, TREE)
        with pytest.raises(MismatchError, match="cannot be replaced safely"):
            run.save(1, {"x": np.ones(5)}, overwrite=True)
        assert np.array_equal(run[1]["x"].numpy(), TREE["x"])
