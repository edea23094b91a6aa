"""Runs in object stores: a real S3 server, and the memory of this process. Two ranks as threads."""

import uuid

import numpy as np
import pytest

import ckptfs
from ckptfs.errors import CorruptError, ExistsError, MismatchError, NotFoundError, SaveError
from ckptfs.storage import open_store
from ckptfs.verify import verify
from seaweed import s3_server  # noqa: F401 - the fixture
from spreads import LocalShard, on_ranks

SMALL = ckptfs.Settings(
    chunk_bytes=1 << 16, block_bytes=1 << 18, extent_bytes=1 << 14, io_bytes=1 << 16, read_threads=2
)
ROWS, COLUMNS = 300, 128


@pytest.fixture(params=["s3", "memory"])
def where(request):
    """(url, storage options) of a fresh run."""
    if request.param == "memory":
        return f"memory://run-{uuid.uuid4().hex}/exp 1", {}
    server = request.getfixturevalue("s3_server")
    return f"{server.fresh_url()}/exp/run7", server.options


def run_of(where, **how):
    url, options = where
    return ckptfs.Run(url, settings=SMALL, **how, **options)


def full():
    return np.random.default_rng(1).standard_normal((ROWS, COLUMNS)).astype("f4")


def sharded(rank, place, data=None):
    """Half of the matrix, by rows or by columns."""
    data = full() if data is None else data
    part = np.split(data, 2, axis=int(place[1]))[rank]
    return LocalShard(np.ascontiguousarray(part), data.shape, ["mesh", [2], [0, 1], [place]])


def tree(rank, place="S0"):
    return {
        "model": {"w": sharded(rank, place), "bias": np.arange(10.0), "flat": np.repeat(np.arange(500, dtype="i8"), 9)},
        "scalar": np.array(7, "i4"),
        "empty": np.zeros((0, 3)),
        "mine": ckptfs.PerRank(np.full(4, rank)),
        "note": "é",
    }


def save(where, step, place="S0", **how):
    def work(rank, group):
        with run_of(where, group=group) as run:
            return run.save(step, tree(rank, place), assets={"config.json": "{}"}, **how)

    return on_ranks(2, work)


def check(checkpoint):
    assert verify(checkpoint) == []
    found = checkpoint.tree(numpy=True, rank=1)
    assert np.array_equal(found["model"]["w"], full())
    assert np.array_equal(found["model"]["flat"], np.repeat(np.arange(500), 9))
    assert found["scalar"] == 7
    assert found["empty"].shape == (0, 3)
    assert found["mine"].tolist() == [1] * 4
    assert found["note"] == "é"


@pytest.mark.parametrize(("place", "into"), [("S0", "S1"), ("S1", "S0")])
def test_save_and_load_in_another_layout(where, place, into):
    results = save(where, 10, place)
    assert results[0].nbytes == results[1].nbytes > 0
    with run_of(where) as run:
        assert run.steps() == [10]
        check(run.latest)

    def load(rank, group):
        value = tree(rank, into)
        value["model"]["w"].data[...] = 0
        with run_of(where, group=group) as run:
            back = run.load(value)
        assert np.array_equal(back["model"]["w"].data, sharded(rank, into).data)
        assert back["mine"].value.tolist() == [rank] * 4

    on_ranks(2, load)


@pytest.mark.parametrize("compression", ["zstd", "blosc", {"model/fl*": "zstd"}])
def test_compressed(where, compression):
    results = save(where, 1, "S1", compression=compression)
    assert results[0].stored_bytes < results[0].nbytes
    with run_of(where) as run:
        check(run[1])
        assert run[1].param("model/flat").codec is not None


def test_steps_are_found_and_slices_read_little(where):
    for step in (3, 20, 100):
        save(where, step)
    with run_of(where) as run:
        assert run.steps() == [3, 20, 100]
        with run[20] as checkpoint:
            part = checkpoint["model/w"].numpy((slice(5, 7), ...))
            assert np.array_equal(part, full()[5:7])
            assert checkpoint.bytes_read < full().nbytes / 4
        with pytest.raises(NotFoundError, match=r"no step 4; it has 3, 20, 100"):
            run[4]


def test_an_existing_step_is_refused_on_every_rank_and_stays(where):
    save(where, 5)
    caught = {}

    def work(rank, group):
        with run_of(where, group=group) as run:
            try:
                run.save(5, {"w": np.zeros(3)})
            except ckptfs.CkptError as error:
                caught[rank] = error

    on_ranks(2, work)
    assert {type(error) for error in caught.values()} == {ExistsError}
    assert set(caught) == {0, 1}
    with run_of(where) as run:
        check(run[5])
        with pytest.raises(MismatchError, match="another step"):
            run.save(5, {"w": np.zeros(3)}, overwrite=True)
        check(run[5])


def test_what_a_dead_save_left_is_no_step_and_goes_with_the_next_try(where):
    store = open_store(where[0], **where[1])
    store.write("step-00000002/old/c.0", b"left over")
    with run_of(where) as run:
        assert run.steps() == []
    save(where, 2)
    assert not store.exists("step-00000002/old/c.0")
    with run_of(where) as run:
        check(run[2])


def test_a_damaged_object_is_found(where):
    save(where, 1)
    store = open_store(where[0], **where[1])
    path = next(p for p, _ in store.list("step-00000001") if p.startswith("step-00000001/model/w/c"))
    data = bytearray(store.read(path))
    data[100] ^= 1
    store.write(path, data)
    with run_of(where) as run, run[1] as checkpoint:
        assert [f"step-00000001/{problem.path}" for problem in verify(checkpoint)] == [path]
        with pytest.raises(CorruptError, match="'model/w'"):
            checkpoint.tree(numpy=True)
    store.remove(path)
    with run_of(where) as run, pytest.raises(CorruptError, match=r"'model/w'.*missing"):
        run[1].tree(numpy=True)
    store.write(path, data[:50])
    with run_of(where) as run, pytest.raises(CorruptError, match="'model/w'"):
        run[1].tree(numpy=True)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_flat_shards_and_rows_of_any_number_are_read_back_here_and_by_zarr(where, compression):
    """Rank 1 begins in the middle of a row, and neither block nor chunk begins there."""
    data, rows = full(), [0, 101, ROWS]
    cut = 37 * COLUMNS + 5

    def work(rank, group):
        flat = data.reshape(-1)[:cut] if rank == 0 else data.reshape(-1)[cut:]
        a, b = rows[rank : rank + 2]
        boxes = LocalShard([data[a:b].copy()], data.shape, ["boxes", [[[a, 0], [b, COLUMNS]]]])
        tree = {"flat": ckptfs.FlatShard(flat.copy(), data.shape, rank * cut), "boxes": boxes}
        with run_of(where, group=group) as run:
            return run.save(1, tree, compression=compression)

    assert not any("stored raw" in note for note in on_ranks(2, work)[0].notes)
    with run_of(where) as run, run[1] as checkpoint:
        assert verify(checkpoint) == []
        assert checkpoint.param("flat").layout.files > 1
        for name in ("flat", "boxes"):
            assert (checkpoint.param(name).codec is None) == (compression is None)
            assert np.array_equal(checkpoint[name].numpy(), data)
    url, options = where
    if url.startswith("memory:"):  # of this process, where zarr does not look
        return
    group = pytest.importorskip("zarr").open_group(f"{url}/step-00000001", mode="r", storage_options=options)
    assert np.array_equal(group["flat"][...], data)
    assert np.array_equal(group["boxes"][...], data)


def test_without_hand_over_flat_shards_say_what_to_do(where):
    def work(rank, group):
        url, options = where
        with ckptfs.Run(url, settings=ckptfs.Settings(handover=False), group=group, **options) as run:
            shard = ckptfs.FlatShard(np.arange(5.0) + 5 * rank, (10,), 5 * rank)
            with pytest.raises(SaveError, match=r"MismatchError: 'w'.*local path"):
                run.save(1, {"w": shard})

    on_ranks(2, work)


def test_boxes_of_uneven_sizes(where):
    """Their common step is one row: blocks of one row each would be as many objects. Whatever is done, it is right."""
    data = full()[:7]

    def work(rank, group):
        rows = slice(0, 3) if rank == 0 else slice(3, 7)
        spread = ["boxes", [[[rows.start, 0], [rows.stop, COLUMNS]]]]
        with run_of(where, group=group) as run:
            run.save(1, {"w": LocalShard([data[rows].copy()], data.shape, spread)})

    on_ranks(2, work)
    with run_of(where) as run:
        assert verify(run[1]) == []
        assert np.array_equal(run[1]["w"].numpy(), data)
