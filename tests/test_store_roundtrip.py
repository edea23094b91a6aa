"""Whatever the layout a tree is saved in and whatever the layout it is loaded into: the same bits.

Ranks are threads; meshes, flat ranges and boxes are cut by the slow twin in `spreads`.
"""

import contextlib
import gc
import mmap
import os
import shutil
import tempfile

import ml_dtypes  # noqa: F401 - numpy learns bfloat16 and float8 from it
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptfs import Checkpoint, LocalShard, Run, Settings, commit, save
from ckptfs.box import Box
from ckptfs.errors import CkptError, CorruptError, MismatchError, SaveError, StorageError
from ckptfs.read import Reader
from ckptfs.storage import LocalStore, MemoryStore
from ckptfs.storage.directio import all_cached
from ckptfs.verify import verify
from spreads import DTYPES, NoSync, Spreading, blank, on_ranks, parts_of, random_array, shapes, splits, spreadings

TINY = {"read_threads": 2, "write_threads": 2, "buffer_bytes": 1 << 20, "read_buffer_bytes": 1 << 18}


@st.composite
def tiny_settings(draw):
    """Sizes so small that small arrays have many blocks, chunks, extents and requests."""
    extent = draw(st.sampled_from([16, 64, 1024]))
    return Settings(
        extent_bytes=extent,
        io_bytes=extent * draw(st.sampled_from([1, 4])),
        chunk_bytes=draw(st.sampled_from([16, 128, 4096])),
        block_bytes=draw(st.sampled_from([64, 512, 8192])),
        small_file_bytes=draw(st.sampled_from([0, 64, 1 << 18])),
        **TINY,
    )


@st.composite
def cases(draw, kinds=("whole", "mesh", "flat", "boxes"), most_ranks=8):
    """(arrays, their spreadings at save, at load, worlds, settings, what is stored in parts)"""
    world, other = draw(st.integers(1, most_ranks)), draw(st.integers(1, most_ranks))
    arrays, saved, loaded = {}, {}, {}
    for number in range(draw(st.integers(1, 3))):
        shape = draw(shapes())
        name = f"a{number}"
        arrays[name] = random_array(shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99)))
        saved[name] = draw(spreadings(shape, world, kinds=kinds))
        loaded[name] = draw(spreadings(shape, other))
    split = draw(splits({name: full.shape for name, full in arrays.items()}))
    return arrays, saved, loaded, world, other, draw(tiny_settings()), split


def tree_of(arrays, spread, rank):
    leaves = {name: spread[name].leaf(full, rank) for name, full in arrays.items()}
    return {name: leaf for name, leaf in leaves.items() if leaf is not None}


def same(one, two):
    return one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes()


def save_on_ranks(store, arrays, saved, world, config, **how):
    def save(rank, group):
        with Run(store, group=group, settings=config) as run:
            return run.save(1, tree_of(arrays, saved, rank), **how)

    return on_ranks(world, save)


def load_and_compare(store, arrays, loaded, other, config):
    """Every rank loads its part in the other layout; each extent is read once per process and array at most."""

    def load(rank, group):
        tree = tree_of(arrays, loaded, rank)
        wanted = {name: [part.copy() for part in parts_of(leaf)] for name, leaf in tree.items()}
        for leaf in tree.values():
            blank(leaf)
        with Run(store, group=group, settings=config)[1] as checkpoint:
            back = checkpoint.load(tree, rank=rank, strict=False)
            assert checkpoint._reader.extents_read <= sum(checkpoint.param(name).extent_count for name in tree), (
                "an extent was read twice"
            )
        for name, parts in wanted.items():
            for got, want in zip(parts_of(back[name]), parts, strict=True):
                assert same(got, want), f"{name} of rank {rank}"

    on_ranks(other, load)


def round_trip(store, case, **how):
    arrays, saved, loaded, world, other, config, split = case
    save_on_ranks(store, arrays, saved, world, config, split=split, **how)
    with Run(store, settings=config)[1] as checkpoint:
        assert verify(checkpoint) == []
        whole = checkpoint.tree(numpy=True)
        for name, full in arrays.items():
            assert same(whole[name], full), name
    load_and_compare(store, arrays, loaded, other, config)


@pytest.fixture(scope="module")
def folder():
    where = tempfile.mkdtemp(prefix="ckptfs-roundtrip-")
    yield where
    shutil.rmtree(where)


@settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(cases())
def test_any_layout_into_any_other_on_local_files(folder, case):
    store = LocalStore(f"{folder}/run", ops=NoSync())
    try:
        round_trip(store, case)
    finally:
        shutil.rmtree(store.root, ignore_errors=True)


@settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow])
@given(cases(kinds=("whole", "mesh", "boxes"), most_ranks=4))
def test_any_layout_into_any_other_in_an_object_store(case):
    store = MemoryStore("roundtrip")
    try:
        round_trip(store, case)
    finally:
        store.sub("step-00000001").remove_tree("x")
        for path, _ in list(store.list()):
            store.remove(path)


@settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(cases(most_ranks=4), st.sampled_from(["zstd", "blosc"]))
def test_any_layout_into_any_other_compressed(folder, case, compression):
    store = LocalStore(f"{folder}/run", ops=NoSync())
    try:
        round_trip(store, case, compression=compression)
    finally:
        shutil.rmtree(store.root, ignore_errors=True)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_what_two_saved_by_rows_any_power_of_two_reads_without_a_byte_twice(tmp_path, ranks):
    """Weights as a transformer has them: no checksum covers rows of two ranks."""
    shapes_of = {"q": (1088, 68), "up": (2880, 68), "down": (1088, 180), "embed": (4352, 68), "experts": (8, 180, 68)}
    arrays = {name: random_array(shape, "float32", 0) for name, shape in shapes_of.items()}
    rows = {n: dict.fromkeys(arrays, Spreading("mesh", ((n,), tuple(range(n)), ("S0",)))) for n in (2, ranks)}
    config = Settings(extent_bytes=1 << 16, io_bytes=1 << 19, chunk_bytes=1 << 19, small_file_bytes=1 << 14)
    save_on_ranks(LocalStore(tmp_path, ops=NoSync()), arrays, rows[2], 2, config)

    def load(rank, group):
        with Run(tmp_path, group=group, settings=config)[1] as checkpoint:
            checkpoint.load(tree_of(arrays, rows[ranks], rank), rank=rank)
            return checkpoint.bytes_read

    assert sum(on_ranks(ranks, load)) == sum(full.nbytes for full in arrays.values())


def test_ties_that_only_some_ranks_see_keep_both_values():
    store = MemoryStore("ties")
    a, b = np.arange(40, dtype="f4"), np.arange(40, dtype="f4")

    def save(rank, group):
        tree = {"a": a, "b": a} if rank == 0 else {"a": a.copy(), "b": b}
        with Run(store, group=group) as run:
            run.save(1, tree)
            run.save(2, {"a": a, "b": a}, compression="zstd")

    on_ranks(2, save)
    with Run(store) as run:
        assert dict(run[1].manifest.aliases) == {}
        assert dict(run[2].manifest.aliases) == {"b": "a"}
        for step in (1, 2):
            assert verify(run[step]) == []
            tree = run[step].tree(numpy=True)
            assert same(tree["a"], a)
            assert same(tree["b"], b)


@pytest.mark.parametrize("size", [100, 1 << 20])
def test_values_that_differ_by_rank_under_one_name_are_never_mixed(size):
    """Plain tensors are taken for replicas: large ones are compared in samples."""
    store = MemoryStore(f"differ{size}")
    caught = {}

    def save(rank, group):
        with Run(store, group=group) as run:
            try:
                run.save(1, {"mask": np.random.default_rng(rank).random(size)})
            except CkptError as error:
                caught[rank] = error

    on_ranks(2, save)
    assert set(caught) == {0, 1}
    assert all("'mask'" in str(error) and "PerRank" in str(error) for error in caught.values())
    assert Run(store).steps() == []


@pytest.mark.parametrize("handed_over", [True, False])
def test_shards_without_a_useful_common_boundary_are_handed_over_or_stored_raw_with_a_note(folder, handed_over):
    """Compressed and each from its holder, every row would be a file of its own."""
    where = f"{folder}/boundary-{handed_over}"
    data = np.zeros((3001, 4), "f4")
    cuts = [(0, 1000), (1000, 2001), (2001, 3001)]

    def save(rank, group):
        a, b = cuts[rank]
        shard = LocalShard([data[a:b].copy()], data.shape, ["boxes", [[[a, 0], [b, 4]]]])
        with Run(LocalStore(where), group=group, settings=Settings(handover=handed_over)) as run:
            return run.save(1, {"w": shard}, compression="zstd")

    # Other notes may say that the disk of one was slow.
    notes = [note for note in on_ranks(3, save)[0].notes if "w: stored raw" in note]
    assert len(notes) == (0 if handed_over else 1)
    with Run(where)[1] as checkpoint:
        assert checkpoint.param("w").layout.files == 1
        assert (checkpoint.param("w").codec is not None) == handed_over
        assert same(checkpoint["w"].numpy(), data)


def test_a_leader_that_gets_no_folder_to_save_to_says_so_on_every_rank(tmp_path, monkeypatch):
    def save(rank, group):
        Run(tmp_path, group=group).save(1, {"w": np.arange(5000.0)})

    def no_lock(store, folder):
        store.make_dirs(folder)
        raise StorageError("could not be locked")

    with monkeypatch.context() as patch:
        patch.setattr(commit, "Claim", no_lock)
        with pytest.raises(SaveError) as caught:
            on_ranks(2, save)
    found = caught.value.by_thread
    assert sorted(found) == [0, 1]
    assert all("could not be locked" in error.by_rank[0] for error in found.values())
    assert not list(tmp_path.glob(".*saving*"))
    on_ranks(2, save)
    assert Run(tmp_path).verify() == []


@pytest.mark.parametrize("extent_bytes", [1, 1000])
def test_extents_that_no_element_fits_evenly_are_read_as_others(tmp_path, extent_bytes):
    """16 bytes an element: extents of 1,000 would end inside one, and a load of all refused to split it."""
    value = np.arange(6513, dtype=np.complex128).reshape(501, 13)
    run = Run(tmp_path, settings=Settings(extent_bytes=extent_bytes, io_bytes=8192, small_file_bytes=64))
    run.save(1, {"w": value})
    assert np.array_equal(run.load({"w": np.zeros((13, 501), value.dtype).T})["w"], value)
    assert np.array_equal(run[1]["w"].numpy(slice(3, 7)), value[3:7])


def test_arrays_alike_share_their_document_and_others_do_not(tmp_path):
    tree = {"a": np.zeros((2, 3), "f4"), "b": np.ones((2, 3), "f4"), "c": np.zeros((3, 2), "f4")}
    step = Run(tmp_path / "run").save(1, tree).path
    inodes = {name: os.stat(f"{step}/{name}/zarr.json").st_ino for name in tree}
    assert inodes["a"] == inodes["b"] != inodes["c"]


def test_where_links_are_refused_every_array_has_a_document_of_its_own(tmp_path):
    class NoLinks(NoSync):
        def link(self, source, target):
            raise PermissionError(1, "no links here", source)

    tree = {"a": np.zeros((2, 3), "f4"), "b": np.ones((2, 3), "f4")}
    run = Run(LocalStore(tmp_path / "run", ops=NoLinks()))
    step = run.save(1, tree).path
    assert os.stat(f"{step}/a/zarr.json").st_nlink == 1
    assert verify(run[1]) == []


@pytest.mark.parametrize("fails", [False, True])
def test_the_interpreter_does_not_look_for_garbage_while_a_save_or_a_load_waits(tmp_path, fails):
    """In a large program each look takes tenths of a second, in which no request is made."""
    looks: list[str] = []
    state = {f"p{number}": np.arange(8.0) + number for number in range(60)}
    wanted = state | {"more": np.zeros(1)} if fails else state
    usual = gc.get_threshold()
    with Run(tmp_path / "run") as run:
        run.save(0, state)
        gc.set_threshold(5, 1, 1)
        gc.callbacks.append(watch := lambda phase, info: looks.append(phase))
        try:
            lists = [[number] * 20 for number in range(500)]
            seen = len(looks)
            run.save(1, state)
            saved, looks[:] = len(looks), []
            with pytest.raises(CkptError) if fails else contextlib.nullcontext():
                run.load(wanted, step=1)
            loaded = len(looks)
        finally:
            gc.callbacks.remove(watch)
            gc.set_threshold(*usual)
    assert seen, f"{len(lists)} lists were made unseen: this test would not see a look"
    assert saved - seen <= 40  # at the edges of the call; hundreds in all of it
    assert loaded <= 20
    assert gc.isenabled()


def test_a_load_borrows_the_buffers_of_its_run_unless_a_save_has_them(tmp_path, monkeypatch):
    lent = []
    borrow = Checkpoint.borrow
    monkeypatch.setattr(Checkpoint, "borrow", lambda self, pool: (lent.append(pool), borrow(self, pool)))
    tree = {"a": np.arange(200_000, dtype="f8")}
    with Run(tmp_path / "run") as run:
        run.save(1, tree)
        for _ in range(2):
            target = {"a": np.zeros(200_000)}
            run.load(target)
            assert np.array_equal(target["a"], tree["a"])
        (pool,) = set(lent)
        buffer = pool.acquire(0)  # what a load borrowed is open still, and now in use
        run.load(target)
        assert len(lent) == 2
        pool.release(buffer)


def _two_large(folder):
    value = {"b": np.arange(1 << 20, dtype=np.float32), "a": np.ones(3), "c": np.arange(3 << 20, dtype=np.float32) * 2}
    Run(folder).save(1, value)
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                if path.stat().st_size > 1 << 20 and all_cached(file.fileno(), 0, path.stat().st_size):
                    pytest.skip("this file system keeps the bytes in memory")
    return value, {name: np.zeros_like(array) for name, array in value.items()}


def _watched(monkeypatch):
    """What loads have begun with, and which of it they used."""
    begun, served = [], []
    begin, serve = Reader.begin, Reader._serve_begun
    monkeypatch.setattr(Reader, "begin", lambda self, wanted: (begin(self, wanted), begun.extend(self._begun))[0])
    monkeypatch.setattr(Reader, "_serve_begun", lambda self, *how: (served.append(how[0].name), serve(self, *how))[1])
    return begun, served


def test_a_load_begins_with_the_largest_while_it_is_planned_and_reads_nothing_twice(tmp_path, monkeypatch):
    begun, served = _watched(monkeypatch)
    value, target = _two_large(tmp_path)
    with Checkpoint(tmp_path / "step-00000001", settings=Settings(io_bytes=4 << 20)) as ck:
        ck.load(target)
        assert all(np.array_equal(target[name], value[name]) for name in value)
        assert len(begun) == 5
        assert sorted(served) == ["b", *"cccc"]
        assert ck.bytes_read == sum(array.nbytes for array in value.values())
        assert not ck._reader._begun
        assert ck._reader._scratch().in_use == 0


def test_two_loads_that_begin_with_the_same_keep_no_buffer(tmp_path, monkeypatch):
    _two_large(tmp_path)
    cached = Reader._cached
    with Checkpoint(tmp_path / "step-00000001") as ck:
        wanted = [(ck.param("c"), [Box.whole(ck["c"].shape)])]

        def meanwhile(self, *how):
            monkeypatch.undo()
            self.begin(wanted)  # as another thread's load may do between two lines of this one
            return cached(self, *how)

        monkeypatch.setattr(Reader, "_cached", meanwhile)
        ck._reader.begin(wanted)
        assert ck._reader._begun
        ck._reader.end()
        assert ck._reader._scratch().in_use == 0


def test_what_was_begun_is_checked_too(tmp_path, monkeypatch):
    begun, _ = _watched(monkeypatch)
    _, target = _two_large(tmp_path)
    with Checkpoint(tmp_path / "step-00000001") as ck:
        place = tmp_path / "step-00000001" / ck.param("c").file(0)
    fd = os.open(place, os.O_RDWR | os.O_DIRECT)  # past the page cache, which is not to know the file
    page = mmap.mmap(-1, 4096)
    os.preadv(fd, [page], 8192)
    page[5] ^= 1
    os.pwrite(fd, page, 8192)
    os.close(fd)
    with Checkpoint(tmp_path / "step-00000001") as ck:
        with pytest.raises(CorruptError, match="'c'"):
            ck.load(target)
        assert begun
        assert ck._reader._scratch().in_use == 0


def test_a_load_that_does_not_fit_lets_go_of_what_it_has_begun_and_touches_nothing(tmp_path, monkeypatch):
    begun, served = _watched(monkeypatch)
    _, target = _two_large(tmp_path)
    target["a"] = np.zeros(4)
    with Checkpoint(tmp_path / "step-00000001") as ck:
        with pytest.raises(MismatchError, match="shape of a"):
            ck.load(target)
        assert begun
        assert not served
        assert not any(array.any() for array in target.values())
        assert ck._reader._scratch().in_use == 0


@pytest.mark.parametrize("way", ["save", "save_async", "ckptfs.save"])
def test_every_way_to_save_stores_parts(tmp_path, way):
    value = {"w": np.arange(64.0).reshape(8, 8)}
    with Run(tmp_path) as run:
        if way == "save":
            run.save(1, value, split={"w": (1, 4)})
        elif way == "save_async":
            run.save_async(1, value, split={"w": (1, 4)}).wait()
        else:
            save(tmp_path / "step-00000001", value, split={"w": (1, 4)})
        with run[1] as checkpoint:
            assert checkpoint.param("w").layout.block == (8, 2)
            assert same(checkpoint["w"].numpy(), value["w"])


@pytest.mark.parametrize("parts", [8, (), (1, 0), (1, True), (1.0, 2), "18", {1: 8}])
def test_what_does_not_say_parts_is_refused(tmp_path, parts):
    with pytest.raises(MismatchError, match="say the parts of each dimension, such as"):
        Run(tmp_path).save(1, {"w": np.ones((8, 8))}, split={"w": parts})


def test_a_plan_is_made_anew_when_other_parts_are_asked_for(tmp_path):
    value = {"w": np.arange(64.0).reshape(8, 8)}
    with Run(tmp_path) as run:
        for step, split in enumerate([None, {"w": (1, 2)}, {"w": (1, 4)}]):
            run.save(step, value, split=split)
        assert [run[step].param("w").layout.blocks for step in run.steps()] == [1, 2, 4]
