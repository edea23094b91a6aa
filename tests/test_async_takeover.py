"""A rank is lost in the middle of a save: who stands in for it, with which bytes, and that it harms nothing later."""

import os
import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptfs
from ckptfs.errors import SaveError, StorageError
from ckptfs.saveplan import Inputs, plan, stand_ins, understudy
from ckptfs.settings import Settings
from ckptfs.shards import hold
from ckptfs.storage import FaultOps, FaultPlan, FileOps, LocalStore, MemoryStore, join
from ckptfs.verify import verify
from spreads import NoSync, on_ranks
from test_saveplan import descriptions_of, options, worlds

pytestmark = pytest.mark.filterwarnings("ignore:step 1 of")
TIGHT = Settings(io_bytes=8192, extent_bytes=4096, chunk_bytes=8192, small_file_bytes=1024, buffer_bytes=1)
ROOMY = Settings(io_bytes=8192, extent_bytes=4096, chunk_bytes=8192, small_file_bytes=1024)


# --- who stands in -----------------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(worlds(), options, st.data())
def test_what_lost_ranks_would_have_written_is_written_once_by_ranks_that_hold_it(made, chosen, data):
    arrays, leaves = made
    world = len(leaves)
    lost = data.draw(st.sets(st.integers(0, world - 1), min_size=1))
    inputs = Inputs(*descriptions_of(leaves), chosen)
    plans = [plan(inputs.descriptions, inputs.of_rank, rank, chosen) for rank in range(world)]
    found = stand_ins(inputs, lost)
    orphaned = False
    for number, array in enumerate(plans[0].arrays):
        wanted, written = np.zeros(array.layout.logical_bytes, int), np.zeros(array.layout.logical_bytes, int)
        held = np.zeros((world, *arrays[array.name].shape), bool)
        for rank in range(world):
            if array.name in leaves[rank]:
                for box, _ in hold(array.name, leaves[rank][array.name], rank).pieces:
                    held[(rank, *box.slices)] = True
        alive = held[[rank for rank in range(world) if rank not in lost]].any(axis=0)
        for rank in lost:
            for a, b in plans[rank].pieces.get(number, []):
                wanted[a:b] += 1
                orphaned |= any(not alive[valid.slices].all() for _, valid, _ in array.layout.parts(a, b))
        for rank, pieces in (found or {}).items():
            assert rank not in lost
            for a, b in pieces.get(number, []):
                written[a:b] += 1
                assert all(held[(rank, *valid.slices)].all() for _, valid, _ in array.layout.parts(a, b))
        assert found is None or (written == wanted).all()
    assert (found is None) == orphaned


@settings(max_examples=100)
@given(worlds(), options)
def test_an_understudy_knows_beforehand_what_it_would_write(made, chosen):
    leaves = made[1]
    inputs = Inputs(*descriptions_of(leaves), chosen)
    for lost in range(len(leaves)):
        for rank, pieces in (stand_ins(inputs, [lost]) or {}).items():
            known = understudy(inputs, rank)
            assert all(known[number] == ranges for number, ranges in pieces.items())


# --- saves that lose ranks ---------------------------------------------------------------------------------------


class StopAt(FileOps):
    """The n-th call of one kind waits until the test lets it go on: a rank that is stopped just there."""

    def __init__(self, kind, at):
        self.at, self.count = at, 0
        self.go = threading.Event()
        self.lock = threading.Lock()
        original = getattr(self, kind)

        def call(*args):
            with self.lock:
                self.count += 1
                stop = self.count == self.at + 1
            if stop:
                assert self.go.wait(60)
            return original(*args)

        setattr(self, kind, call)

    def syncfs(self, fd):
        pass


def full_disk(at, kind="pwrite"):
    return FaultOps(FaultPlan("error-before", at=at, only=frozenset([kind])), code=28)


def attempt(action):
    """What a save returned or raised: all ranks must agree about which."""
    try:
        return action()
    except SaveError as error:
        return error


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(made=worlds(), data=st.data())
def test_any_layout_survives_what_can_be_survived(tmp_path_factory, made, data):
    arrays, leaves = made
    world = len(leaves)
    lost = data.draw(st.sets(st.integers(1, world), max_size=world).map(lambda some: {r for r in some if r < world}))
    compression = data.draw(st.sampled_from([None, "zstd"]))
    at = data.draw(st.integers(0, 3))
    folder = tmp_path_factory.mktemp("takeover")
    config = Settings(extent_bytes=16, io_bytes=64, chunk_bytes=64, block_bytes=512, small_file_bytes=32)

    def save(rank, group):
        ops = full_disk(at) if rank in lost else NoSync()
        with ckptfs.Run(LocalStore(folder, ops=ops), group=group, settings=config) as run:
            return attempt(lambda: run.save(1, leaves[rank], compression=compression))

    found = on_ranks(world, save)
    run = ckptfs.Run(folder)
    if isinstance(found[0], SaveError):
        assert run.steps() == []
        assert len({str(error) for error in found}) == 1
        assert set(found[0].by_rank) <= lost
    else:
        assert {tuple(result.lost) for result in found} == {tuple(found[0].lost)}
        assert set(found[0].lost) <= lost
        with run[1] as checkpoint:
            assert verify(checkpoint) == []
            stored = checkpoint.tree(numpy=True)
            assert all(stored[name].tobytes() == full.tobytes() for name, full in arrays.items())
    assert [name for name in os.listdir(folder) if name.startswith(".")] == []


def tree(rank, step=1):
    """Nothing that only one rank has; the values of rank 2 are its own, to tell whose bytes were stored."""
    rng = np.random.default_rng(step if rank != 2 else 1000)
    return {f"w{i}": rng.standard_normal((n, 16)) for i, n in enumerate([700, 3, 1500, 1, 40])} | {"step": step}


def saved_by(folder, ops, how=lambda run, rank: run.save(1, tree(rank)), config=TIGHT):
    """`how` on every rank, where rank 2 has other file operations; what each returned."""

    def work(rank, group):
        store = LocalStore(folder, ops=ops if rank == 2 else NoSync())
        with ckptfs.Run(store, group=group, settings=config) as run:
            return attempt(lambda: how(run, rank))

    return on_ranks(4, work)


def assert_whole(run, step=1):
    with run[step] as checkpoint:
        assert verify(checkpoint) == []
        stored = checkpoint.tree(numpy=True)
    assert all(np.array_equal(stored[name], value) for name, value in tree(0, step).items())


def test_a_full_disk_on_one_of_several_replicas(tmp_path, caplog):
    found = saved_by(tmp_path, full_disk(2))
    assert all(set(result.lost) == {2} and "No space" in result.lost[2] for result in found)
    assert "rank 2" in caplog.text
    run = ckptfs.Run(tmp_path)
    assert_whole(run)
    saved_by(tmp_path, NoSync(), lambda run, rank: run.save(2, tree(0, 2)))
    assert_whole(run, 2)
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]


def test_the_loss_is_warned_of(tmp_path):
    with pytest.warns(
        RuntimeWarning, match=r"saved although 1 rank.*rank 2: failed in phase .* of .*: StorageError: .*No space"
    ):
        saved_by(tmp_path, full_disk(2))


@pytest.mark.parametrize(
    ("value", "config"),
    [
        (tree, replace(TIGHT, takeover="off")),
        (lambda rank: {**tree(0), "own": ckptfs.PerRank(np.full(5000, rank))}, TIGHT),
        (lambda rank: {**tree(0), "own": ckptfs.PerRank(rank)}, TIGHT),
    ],
    ids=["opted out", "an array of its own", "a value of its own"],
)
def test_what_ends_a_save_all_the_same(tmp_path, value, config):
    found = saved_by(tmp_path, full_disk(2), lambda run, rank: run.save(1, value(rank)), config)
    assert {str(error) for error in found} == {str(found[0])}
    assert set(found[0].by_rank) == {2}
    assert os.listdir(tmp_path) == []


def test_a_tree_that_more_than_the_lost_rank_has(tmp_path):
    def how(run, rank):
        return run.save(1, {**tree(0), **({"more": 5, "b": np.arange(3000.0)} if rank in (2, 3) else {})})

    found = saved_by(tmp_path, full_disk(2), how)
    assert set(found[0].lost) == {2}
    with ckptfs.Run(tmp_path)[1] as checkpoint:
        stored = checkpoint.tree(numpy=True)
    assert stored["more"] == 5
    assert np.array_equal(stored["b"], np.arange(3000.0))


def test_who_leads_is_not_replace(tmp_path):
    def work(rank, group):
        with ckptfs.Run(LocalStore(tmp_path, ops=full_disk(0) if rank == 0 else NoSync()), group=group) as run:
            return attempt(lambda: run.save(1, tree(0)))

    assert all(set(error.by_rank) == {0} for error in on_ranks(3, work))


def test_nobody_stands_in_for_a_stand_in(tmp_path):
    """The rank after the lost one fails when it does the other's work."""
    own_writes = []

    class Counting(NoSync):
        def pwrite(self, fd, data, offset):
            own_writes.append(1)
            return super().pwrite(fd, data, offset)

    def work(failing):
        def rank_work(rank, group):
            ops = full_disk(1) if rank == 2 else failing if rank == 3 else NoSync()
            with ckptfs.Run(LocalStore(tmp_path, ops=ops), group=group, settings=TIGHT) as run:
                return attempt(lambda: run.save(1, tree(0)))

        return rank_work

    assert all(set(result.lost) == {2} for result in on_ranks(4, work(Counting())))
    ckptfs.commit.discard(LocalStore(tmp_path), "step-00000001")
    found = on_ranks(4, work(full_disk(len(own_writes) - 1)))
    assert {str(error) for error in found} == {str(found[0])}
    assert set(found[0].by_rank) == {2, 3}
    assert os.listdir(tmp_path) == []


def test_who_leads_may_fail_as_a_stand_in(tmp_path):
    """The disk is full for all but rank 0, and then for it, too."""
    fine = NoSync()

    def work(ops_of_0):
        def rank_work(rank, group):
            ops = ops_of_0 if rank == 0 else full_disk(0)
            with ckptfs.Run(LocalStore(tmp_path, ops=ops), group=group, settings=TIGHT) as run:
                return attempt(lambda: run.save(1, tree(0)))

        return rank_work

    assert all(set(result.lost) == {1, 2} for result in on_ranks(3, work(fine)))
    ckptfs.commit.discard(LocalStore(tmp_path), "step-00000001")
    found = on_ranks(3, work(full_disk(8)))
    assert {str(error) for error in found} == {str(found[0])}
    assert set(found[0].by_rank) == {0, 1, 2}
    assert os.listdir(tmp_path) == []


# --- after training went on --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "hook", "survives"),
    [
        (ROOMY, True, True),
        (replace(ROOMY, async_buffer_bytes=1), True, False),  # no room for copies of another's part
        (replace(ROOMY, takeover="off"), True, False),
        (replace(ROOMY, takeover="free"), True, True),
        (ROOMY, False, True),
        (replace(ROOMY, takeover="off"), False, False),
        (replace(ROOMY, takeover="free"), False, False),
    ],
    ids=["lazy", "lazy without room", "lazy, off", "lazy, free", "snapshot", "snapshot, off", "snapshot, free"],
)
def test_a_background_save_survives_if_copies_were_kept(tmp_path, config, hook, survives):
    how = {"before_update": lambda hold: None} if hook else {}

    def save(run, rank):
        value = tree(0)
        made = run.save_async(1, value, **how)
        made._staged.wait(60)  # not staged(): nobody is in a hurry, so copies of another's part are made as well
        for name in value:
            if name != "step":
                value[name] += 1
        return made.result()

    found = saved_by(tmp_path, full_disk(2), save, config)
    if survives:
        assert all(set(result.lost) == {2} for result in found)
        assert_whole(ckptfs.Run(tmp_path))
    else:
        assert all(set(error.by_rank) == {2} for error in found)
        assert ckptfs.Run(tmp_path).steps() == []
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


# --- ranks that only were stopped --------------------------------------------------------------------------------

PATIENT = replace(TIGHT, progress_timeout_s=4.0)


@pytest.mark.parametrize(("kind", "at"), [("pwrite", 0), ("pwrite", 9), ("open", 1), ("fallocate", 0)])
def test_a_stopped_rank_that_goes_on_after_the_commit_harms_nothing(tmp_path, kind, at):
    ops = StopAt(kind, at)

    def work(rank, group):
        store = LocalStore(tmp_path, ops=ops if rank == 2 else NoSync())
        with ckptfs.Run(store, group=group, settings=PATIENT) as run:
            result = attempt(lambda: run.save(1, tree(rank)))
            if rank == 0:
                assert_whole(run)
                ops.go.set()
            return result

    found = on_ranks(4, work)
    assert all(set(result.lost) == {2} and "stuck" in result.lost[2] for result in found[:2]), found
    assert_whole(ckptfs.Run(tmp_path))
    on_ranks(2, lambda rank, group: ckptfs.Run(tmp_path, group=group).save(2, tree(0, 2)))
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]
    assert_whole(ckptfs.Run(tmp_path))


# --- object stores -----------------------------------------------------------------------------------------------


class FailingStore(MemoryStore):
    def sub(self, prefix):
        return FailingStore(self.name, join(self.prefix, prefix))

    def write(self, path, data):
        raise StorageError("the store refuses")


def test_in_an_object_store_only_a_rank_that_said_that_it_failed_is_replace():
    name = f"takeover-{os.getpid()}"

    def work(rank, group):
        store = (FailingStore if rank == 2 else MemoryStore)(name)
        with ckptfs.Run(store, group=group, settings=replace(TIGHT, block_bytes=16384)) as run:
            return attempt(lambda: run.save(1, tree(rank)))

    found = on_ranks(4, work)
    assert all(set(result.lost) == {2} for result in found)
    assert_whole(ckptfs.Run(MemoryStore(name)))
    MemoryStore(name).remove_tree("step-00000001")
