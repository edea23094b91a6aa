"""Bytes that one rank holds and another writes: any layout, all modes of saving, little memory, and every way to break.

Ranks are threads; what real processes do is in test_handover_torchrun.py. Thresholds are forced low, so that a few
ranks with small arrays do what thousands do with large ones.
"""

import json
import os
import shutil
import socket
import struct
import tempfile
import threading
import uuid
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptfs import FlatShard, LocalShard, Run, Settings, handover
from ckptfs.errors import SaveError
from ckptfs.saveplan import SavePlan
from ckptfs.stage import Wanted
from ckptfs.storage import FaultOps, FaultPlan, LocalStore, MemoryStore
from ckptfs.verify import verify
from spreads import NoSync, on_ranks
from test_store_roundtrip import cases, round_trip, same

EAGER = {"handover_ranks": 2, "files_per_rank": 0}
MODES = st.sampled_from(["save", "snapshot", "lazy"])


def eager(case):
    *rest, config, split = case
    return (*rest, replace(config, **EAGER), split)


@pytest.fixture(scope="module")
def folder():
    where = tempfile.mkdtemp(prefix="ckptfs-handover-")
    yield where
    shutil.rmtree(where)


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(cases(kinds=("mesh", "mesh", "whole")))
def test_small_pieces_of_neighbours_into_any_other_layout(folder, case):
    store = LocalStore(f"{folder}/run", ops=NoSync())
    try:
        round_trip(store, eager(case))
    finally:
        shutil.rmtree(store.root, ignore_errors=True)


@settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow])
@given(cases(kinds=("flat", "mesh", "boxes"), most_ranks=5), st.sampled_from([None, "zstd"]))
def test_flat_and_uneven_shards_in_an_object_store(case, compression):
    store = MemoryStore(f"handover-{uuid.uuid4().hex}")
    try:
        round_trip(store, eager(case), compression=compression)
    finally:
        for path, _ in list(store.list()):
            store.remove(path)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(cases(kinds=("flat", "mesh", "boxes"), most_ranks=5), st.sampled_from(["zstd", "blosc"]))
def test_flat_and_uneven_shards_compressed(folder, case, compression):
    store = LocalStore(f"{folder}/run", ops=NoSync())
    try:
        round_trip(store, eager(case), compression=compression)
    finally:
        shutil.rmtree(store.root, ignore_errors=True)


# --- what others fetch, after training has gone on -------------------------------------------------------------------


def arrays_of(step, count=24):
    rng = np.random.default_rng(step)
    return {f"w{i:02}": rng.standard_normal((37 + 5 * i, 16)).astype("f4") for i in range(count)}


def pieces_of(arrays, rank, world, kind="mesh"):
    """Rank's rows of every array, in memory of its own."""
    tree = {}
    for name, full in arrays.items():
        step = -(-len(full) // world)
        a, b = min(rank * step, len(full)), min(rank * step + step, len(full))
        if kind == "flat":
            tree[name] = FlatShard(full[a:b].reshape(-1).copy(), full.shape, a * full.shape[1])
        else:
            tree[name] = LocalShard(full[a:b].copy(), full.shape, ["mesh", [world], [*range(world)], ["S0"]])
    return tree


def spoil(tree):
    for leaf in tree.values():
        leaf.data[...] = -1


class Jitter(NoSync):
    """Now and then lets others run first."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)
        self.never = threading.Event()

    def pwrite(self, fd, data, offset):
        if self.random.random() < 0.3:
            self.never.wait(self.random.random() * 0.003)
        return super().pwrite(fd, data, offset)


def start(run, mode, step, tree, **how):
    """Begin a save and come back at the first moment at which the tensors may change."""
    if mode == "save":
        run.save(step, tree, **how)
        return None
    if mode == "snapshot":
        return run.save_async(step, tree, **how)
    holds = []
    save = run.save_async(step, tree, before_update=holds.append, **how)
    for hold in holds:
        hold()
    return save


TIGHT = Settings(
    io_bytes=8192,
    extent_bytes=4096,
    chunk_bytes=8192,
    small_file_bytes=1024,
    buffer_bytes=1,
    async_buffer_bytes=1,
    **EAGER,
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(MODES, st.integers(2, 6), st.booleans(), st.sampled_from(["mesh", "flat"]), st.integers(0, 99))
def test_training_that_goes_on_changes_nothing_that_others_fetch(folder, mode, world, tight, kind, seed):
    config = TIGHT if tight else replace(TIGHT, buffer_bytes=1 << 22, async_buffer_bytes=1 << 22)
    where, steps = f"{folder}/{uuid.uuid4().hex}", (1, 2)
    compression = "zstd" if kind == "flat" else None

    def work(rank, group):
        with Run(LocalStore(where, ops=Jitter(seed + rank)), group=group, settings=config) as run:
            for step in steps:
                tree = pieces_of(arrays_of(step), rank, world, kind)
                save = start(run, mode, step, tree, compression=compression)
                spoil(tree)
                if save is not None:
                    save.wait()

    on_ranks(world, work)
    run = Run(where)
    for step in steps:
        with run[step] as checkpoint:
            assert verify(checkpoint) == []
            stored = checkpoint.tree(numpy=True)
            assert all(same(stored[name], full) for name, full in arrays_of(step).items())
    shutil.rmtree(where)


def test_a_snapshot_keeps_copies_if_there_is_room_and_waits_if_there_is_none(folder):
    """Rank 1 fetches nothing until it is let go: with memory rank 0's snapshot is complete without it."""

    class Held(NoSync):
        def __init__(self):
            self.go = threading.Event()

        def open(self, *args):
            assert self.go.wait(60)
            return super().open(*args)

    for config, complete in ((replace(TIGHT, async_buffer_bytes=1 << 24), True), (TIGHT, False)):
        where, held, staged = f"{folder}/{uuid.uuid4().hex}", Held(), threading.Event()

        def work(rank, group, where=where, held=held, staged=staged, config=config, complete=complete):
            ops = held if rank == 1 else NoSync()
            with Run(LocalStore(where, ops=ops), group=group, settings=config) as run:
                tree = pieces_of(arrays_of(1), rank, 2)
                save = run.save_async(1, tree, before_update=lambda hold: None)
                if rank == 0:
                    assert save.staged(20 if complete else 0.5) == complete
                    if complete:
                        spoil(tree)
                    staged.set()
                else:
                    assert staged.wait(30)
                    held.go.set()
                save.wait()

        on_ranks(2, work)
        with Run(where)[1] as checkpoint:
            assert all(same(checkpoint[name].numpy(), full) for name, full in arrays_of(1).items())


# --- what breaks -----------------------------------------------------------------------------------------------------


def left_over():
    return [t.name for t in threading.enumerate() if t.name.startswith("ckptfs-handover")]


@pytest.mark.parametrize("mode", ["save", "snapshot", "lazy"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_full_disk_on_one_rank_names_it_everywhere_and_the_next_save_commits(tmp_path, mode, victim):
    open_before = len(os.listdir("/proc/self/fd"))

    def work(rank, group):
        ops = (
            FaultOps(FaultPlan("error-before", at=2, only=frozenset(["pwrite"])), code=28)
            if rank == victim
            else NoSync()
        )
        found = None
        config = replace(TIGHT, silence_timeout_s=30.0, progress_timeout_s=30.0)
        with Run(LocalStore(tmp_path / "run", ops=ops), group=group, settings=config) as run:
            tree = pieces_of(arrays_of(1), rank, 4)
            try:
                save = start(run, mode, 1, tree)
                if save is not None:
                    save.wait()
            except SaveError as error:
                found = error
        with Run(LocalStore(tmp_path / "run", ops=NoSync()), group=group, settings=config) as run:
            run.save(2, pieces_of(arrays_of(2), rank, 4))
        return found

    found = on_ranks(4, work)
    assert all(error is not None and set(error.by_rank) == {victim} for error in found), found
    assert "No space left" in str(found[0])
    assert left_over() == []
    with Run(tmp_path / "run") as run, run[2] as checkpoint:
        assert run.steps() == [2]
        assert all(same(checkpoint[name].numpy(), full) for name, full in arrays_of(2).items())
    assert len(os.listdir("/proc/self/fd")) <= open_before + 2


class Live:
    """Stands for a stager: byte i of array n is (n + i) % 251."""

    def read(self, array, start, stop, into):
        into[:] = bytes((array + i) % 251 for i in range(start, stop))


@pytest.fixture
def holder():
    gives = {0: [(0, 1000, 1), (1000, 3000, 2)], 3: [(0, 400_000, 1)]}
    held = handover.Holder(SavePlan([], {}, {}, 1024, gives=gives), Live(), "127.0.0.1")
    yield held
    held.close()
    assert left_over() == []


def lost(rank, why):
    raise SaveError("lost", {rank: why})


def fetcher(rank, address, check=lambda: None, patience_s=20.0):
    return handover.Fetcher(rank, lambda _: address, check, lost, patience_s)


def wanted(array, start, stop):
    return Wanted(7, array, start, stop, memoryview(bytearray(stop - start)))


def test_ranges_are_fetched_as_they_are_held(holder):
    fetch = fetcher(1, holder.address)
    some = [wanted(0, i, i + 1) for i in range(900)] + [wanted(3, 5, 300_006), wanted(0, 900, 1000)]
    fetch(some)
    for one in some:
        expected = bytearray(one.stop - one.start)
        Live().read(one.array, one.start, one.stop, expected)
        assert one.into == expected
    expected = 2000 + 400_000 - 300_001
    with holder._changed:  # counted after they were sent
        assert holder._changed.wait_for(lambda: sum(holder._left.values()) == expected, 30)
    assert holder.left_bytes == expected
    fetch([wanted(3, 0, 5), wanted(3, 300_006, 400_000)])
    with pytest.raises(SaveError, match="1 bytes asked for, 0 are left"):
        fetch([wanted(0, 0, 1)])
    fetch.close()


@pytest.mark.parametrize("wrong", ["token", "rank", "version"])
def test_strangers_get_nothing(holder, wrong):
    host, port, token = json.loads(holder.address)
    if wrong == "version":
        with socket.create_connection((host, port)) as raw:
            raw.sendall(b"ckptfs hand-over 9".ljust(handover._HELLO.size, b"\0") + struct.pack("<I", 0))
            assert raw.recv(1) == b"\1"
        return
    address = json.dumps([host, port, "00" * 16 if wrong == "token" else token])
    with pytest.raises(SaveError, match="another save") as caught:
        fetcher(5 if wrong == "rank" else 1, address)([wanted(0, 0, 10)])
    assert set(caught.value.by_rank) == {7}
    assert holder.left_bytes == 403_000


def test_a_holder_that_hangs_up_refuses_or_says_nothing_is_named():
    def answer(sends, then=lambda peer: None):
        server = socket.create_server(("127.0.0.1", 0))

        def serve():
            with server, server.accept()[0] as peer:
                peer.recv(10_000)
                peer.sendall(sends)
                then(peer)

        thread = threading.Thread(target=serve)
        thread.start()
        return json.dumps(["127.0.0.1", server.getsockname()[1], "00" * 16]), thread

    done = threading.Event()
    for sends, then, words, patience_s in [
        (b"", lambda _: None, "hung up|broke off", 20.0),
        (struct.pack("<BQ", 0, 10) + b"abc", lambda _: None, "hung up|broke off", 20.0),
        (struct.pack("<BQ", 0, 9) + b"123456789", lambda _: done.wait(20), "9 bytes instead of 10", 20.0),
        (struct.pack("<BQ", 1, 3) + b"no!", lambda _: done.wait(20), "no!", 20.0),
        (b"", lambda _: done.wait(20), "none of the bytes", 0.5),
    ]:
        address, thread = answer(sends, then)
        done.clear()
        fetch = fetcher(1, address, patience_s=patience_s)
        with pytest.raises(SaveError, match=words) as caught:
            fetch([wanted(0, 0, 10)])
        assert set(caught.value.by_rank) == {7}
        done.set()
        fetch.close()
        thread.join()
    with socket.socket() as unused:  # bound, so that nobody else listens there
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(SaveError, match="cannot be reached"):
            fetcher(1, json.dumps(["127.0.0.1", unused.getsockname()[1], "00" * 16]))([wanted(0, 0, 10)])


def test_a_save_that_has_failed_ends_the_wait_with_its_own_error():
    def check():
        raise SaveError("the verdict", {3: "its fault"})

    server = socket.create_server(("127.0.0.1", 0))  # never answers
    address = json.dumps(["127.0.0.1", server.getsockname()[1], "00" * 16])
    with pytest.raises(SaveError, match="the verdict"):
        fetcher(1, address, check)([wanted(0, 0, 10)])
    server.close()


def test_addresses(monkeypatch):
    assert handover.local_address("localhost") == "127.0.0.1"
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert handover.local_address() == "127.0.0.1"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert handover.local_address() != ""
