"""Every operation of a publish or a commit fails or is the last one: the old or the new is there, never anything else."""

import uuid

import pytest

from ckptfs.errors import CkptError, ExistsError, NotFoundError, StorageError
from ckptfs.storage import (
    CountingStore,
    FaultOps,
    FaultPlan,
    FaultStore,
    FsspecStore,
    LocalStore,
    MemoryStore,
    RetryStore,
    SimulatedCrash,
    open_store,
)

KINDS = ["error-before", "error-after", "short", "torn", "crash-before", "crash-after"]


def run_with_each_fault(action, prepare, kind):
    """Run `action(ops)` once for each of its operations, with that one failing; yields after each run."""
    prepare()
    plan = FaultPlan()
    action(FaultOps(plan))
    assert plan.log
    for number in range(len(plan.log)):
        prepare()
        plan = FaultPlan(kind, at=number)
        try:
            action(FaultOps(plan))
        except (CkptError, SimulatedCrash) as error:
            assert plan.faults == 1
            yield error
        else:
            yield None


@pytest.mark.parametrize("kind", KINDS)
def test_write_is_all_or_nothing(tmp_path, kind):
    store = LocalStore(tmp_path)
    outcomes = []

    def write(ops):
        LocalStore(tmp_path, ops=ops).write("d/a", b"the new value")

    for outcome in run_with_each_fault(write, lambda: store.write("d/a", b"old"), kind):
        outcomes.append(outcome)
        found = store.read("d/a")
        assert found == b"the new value" if outcome is None else found in (b"old", b"the new value")
        assert dict(store.list()) == {"d/a": len(found)}
    if kind != "short":
        assert any(outcome is not None for outcome in outcomes)


@pytest.mark.parametrize("kind", KINDS)
def test_create_is_all_or_nothing(tmp_path, kind):
    store = LocalStore(tmp_path)

    def create(ops):
        LocalStore(tmp_path, ops=ops).create("d/a", b"new")

    for outcome in run_with_each_fault(create, lambda: store.remove_tree("d"), kind):
        assert store.exists("d/a") or outcome is not None
        if store.exists("d/a"):
            assert store.read("d/a") == b"new"


@pytest.mark.parametrize("kind", KINDS)
def test_renames_and_exchanges_leave_whole_folders(tmp_path, kind):
    store = LocalStore(tmp_path)

    def prepare():
        store.remove_tree("old")
        store.remove_tree("new")
        store.write("old/a", b"old")
        store.write("new/a", b"new")

    def commit(ops):
        local = LocalStore(tmp_path, ops=ops)
        local.exchange_dirs("new", "old")
        local.sync_dir()
        local.remove_tree("new")

    for outcome in run_with_each_fault(commit, prepare, kind):
        assert store.read("old/a") in (b"old", b"new")
        if outcome is None:
            assert store.read("old/a") == b"new"
            assert not store.exists("new/a")


class OldKernelOps(FaultOps):
    """A file system without the flags of renameat2."""

    def rename_new(self, source, target):
        raise OSError(22, "no such flag")

    def exchange(self, one, other):
        raise OSError(22, "no such flag")


@pytest.mark.parametrize("ops", [FaultOps(FaultPlan()), OldKernelOps(FaultPlan())])
def test_rename_dir_refuses_a_taken_name(tmp_path, ops):
    store = LocalStore(tmp_path, ops=ops)
    store.write("temporary/a", b"new")
    store.write("step/a", b"old")
    store.make_dirs("empty")
    for taken in ("step", "empty"):
        with pytest.raises(ExistsError, match=taken):
            store.rename_dir("temporary", taken)
    assert store.read("step/a") == b"old"
    store.rename_dir("temporary", "free")
    assert dict(store.list()) == {"free/a": 3, "step/a": 3}
    store.create("free/b", b"1")
    with pytest.raises(ExistsError):
        store.create("free/b", b"2")
    assert sorted(name for name in (tmp_path / "free").iterdir()) == [tmp_path / "free/a", tmp_path / "free/b"]


def test_exchange_without_kernel_support_says_so(tmp_path):
    store = LocalStore(tmp_path, ops=OldKernelOps(FaultPlan()))
    store.write("a/x", b"")
    store.write("b/x", b"")
    with pytest.raises(StorageError, match="can't exchange two folders"):
        store.exchange_dirs("a", "b")


def test_a_missing_folder_to_rename_is_not_found(tmp_path):
    with pytest.raises(NotFoundError):
        LocalStore(tmp_path).rename_dir("none", "step")


def test_nothing_works_after_a_crash(tmp_path):
    store = FaultStore(LocalStore(tmp_path), FaultPlan("crash-after", at=1))
    store.write("a", b"1")
    with pytest.raises(SimulatedCrash):
        store.write("b", b"2")
    for action in (lambda: store.read("a"), lambda: store.sub("c").write("d", b""), lambda: list(store.list())):
        with pytest.raises(SimulatedCrash):
            action()
    assert dict(LocalStore(tmp_path).list()) == {"a": 1, "b": 1}


def test_a_torn_object_write_leaves_half():
    inner = MemoryStore(uuid.uuid4().hex)
    with pytest.raises(SimulatedCrash):
        FaultStore(inner, FaultPlan("torn", at=0)).write("a", b"1234")
    assert inner.read("a") == b"12"


def test_the_same_seed_gives_the_same_faults():
    def faults(seed):
        plan = FaultPlan(seed=seed, rate=0.3)
        return [plan.next("write") for _ in range(50)]

    assert faults(1) == faults(1) != faults(2)
    assert None in faults(1)


# -- retries and counters ----------------------------------------------------------------------------------------------


def test_waits_grow_with_jitter_below_a_limit():
    waits, limits = [], []

    def uniform(low, high):
        limits.append((low, high))
        return high

    flaky = FaultStore(MemoryStore(uuid.uuid4().hex), FaultPlan(rate=1.0))
    store = RetryStore(flaky, attempts=5, first_delay_s=1, max_delay_s=3, sleep=waits.append, uniform=uniform)
    with pytest.raises(StorageError, match="fault injected"):
        store.write("a", b"1")
    assert waits == [1, 2, 3, 3]
    assert limits == [(0.0, 1), (0.0, 2), (0.0, 3), (0.0, 3)]
    assert len(flaky.plan.log) == 5


def test_answers_and_lasting_failures_are_not_retried():
    counting = CountingStore(MemoryStore(uuid.uuid4().hex))
    store = RetryStore(counting, sleep=lambda _: pytest.fail("waited"))
    store.create("a", b"1")
    with pytest.raises(NotFoundError):
        store.read("none")
    with pytest.raises(ExistsError):
        store.create("a", b"1")
    lasting = FaultStore(counting, FaultPlan(at=0), transient=False)
    with pytest.raises(StorageError):
        RetryStore(lasting, sleep=lambda _: pytest.fail("waited")).write("b", b"1")


def test_create_whose_answer_was_lost_is_recognised_by_its_bytes():
    inner = MemoryStore(uuid.uuid4().hex)
    lost = FaultStore(inner, FaultPlan("error-after", at=0))
    RetryStore(lost, sleep=lambda _: None).create("m", b"mine")
    assert inner.read("m") == b"mine"


def test_equal_bytes_of_another_creator_pass_for_ones_own_when_retrying():
    inner = MemoryStore(uuid.uuid4().hex)
    inner.write("m", b"same")
    with pytest.raises(ExistsError):
        RetryStore(inner, sleep=lambda _: None).create("m", b"same")
    RetryStore(FaultStore(inner, FaultPlan(at=0)), sleep=lambda _: None).create("m", b"same")


def test_create_that_lost_the_race_while_retrying_is_refused():
    inner = MemoryStore(uuid.uuid4().hex)
    failing = FaultStore(inner, FaultPlan("error-before", at=0))
    store = RetryStore(failing, sleep=lambda _: inner.write("m", b"them"))
    with pytest.raises(ExistsError):
        store.create("m", b"mine")
    assert inner.read("m") == b"them"


def test_counts_are_shared_with_sub_stores():
    store = CountingStore(MemoryStore(uuid.uuid4().hex))
    store.sub("d").write("a", b"12345")
    store.read("d/a", 1, 3)
    store.read_into("d/a", 0, memoryview(bytearray(4)))
    with pytest.raises(NotFoundError):
        store.read("none")
    assert (store.counts.written_bytes, store.counts.read_bytes) == (5, 6)
    assert store.counts.calls == {"write": 1, "read": 2, "read_into": 1}


# -- URLs --------------------------------------------------------------------------------------------------------------


def test_urls_name_stores(tmp_path):
    assert isinstance(open_store(tmp_path), LocalStore)
    assert open_store(f"file://{tmp_path}").url == str(tmp_path)
    with pytest.raises(StorageError, match="absolute"):
        open_store("file://relative/path")
    name = uuid.uuid4().hex
    open_store(f"memory://{name}/run").write("a", b"1")
    assert open_store(f"memory://{name}").read("run/a") == b"1"
    assert list(open_store(f"memory://{uuid.uuid4().hex}").list()) == []


def test_an_unknown_scheme_says_what_to_install():
    with pytest.raises(StorageError, match="nosuch://"):
        open_store("nosuch://bucket/run")


@pytest.mark.s3
def test_create_on_s3_is_one_conditional_request(s3_server):
    store = open_store(s3_server.fresh_url(), **s3_server.options)
    assert isinstance(store, FsspecStore)
    assert store.atomic_create
    store.write("m", b"first")
    with pytest.raises(ExistsError):  # past the look that `create` takes first
        store._ask("creating", "m", lambda: store._put(store._key("m"), b"second", mode="create"))
    assert store.read("m") == b"first"


@pytest.mark.s3
def test_wrong_credentials_are_a_storage_error(s3_server):
    store = open_store(s3_server.fresh_url(), **(s3_server.options | {"secret": "wrong"}))
    with pytest.raises(StorageError, match="credentials"):
        store.write("a", b"1")
