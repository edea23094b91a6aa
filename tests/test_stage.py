"""From live tensors to stored bytes: what is copied, by the processor and by the code for GPUs, against the whole array."""

import contextlib
import functools
import os
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptfs
from ckptfs import dtypes, write
from ckptfs.box import Box
from ckptfs.errors import CkptError, SaveError
from ckptfs.grid import Layout, choose
from ckptfs.ranges import merge
from ckptfs.saveplan import Array, SavePlan, plan
from ckptfs.settings import MIB
from ckptfs.shards import hold
from ckptfs.stage import Job, Part, Stager, StagingPool, Started, jobs_of
from ckptfs.storage import LocalStore
from ckptfs.storage.fileops import FileOps
from test_saveplan import descriptions_of, options, with_split, worlds

torch = pytest.importorskip("torch")


class OnDevice:
    """A tensor that says that it lies on a GPU. It lies here, so its copies really happen."""

    is_cuda = True
    device = torch.device("cuda", 0)

    def __init__(self, array):
        self._tensor = torch.from_numpy(array)
        self.streams = []

    def resolve_conj(self):
        return self._tensor.resolve_conj()

    def record_stream(self, stream):
        self.streams.append(stream)


class Event:
    def __init__(self):
        self.stream = None

    def record(self, stream):
        self.stream = stream


def expected(layout, full, start, stop):
    out = bytearray()
    for _, valid, padded in layout.parts(start, stop):
        part = np.zeros(padded.shape, full.dtype)
        inside = valid.within(padded.start)
        part[inside.slices] = full[valid.slices]
        out += part.tobytes()
    return bytes(out)


def _ours(streams, device):
    return streams.setdefault(device, "a stream of our own")


def check(made, chosen, on_device, dense=False):
    arrays, leaves = made
    descs, of_rank = descriptions_of(leaves)
    pool = StagingPool(1 << 20, 1 << 16)
    pool.pin = lambda buffer: None
    for rank, mine in enumerate(leaves):
        one = plan(descs, of_rank, rank, chosen)
        pieces = [hold(a.name, mine[a.name], rank).pieces if a.name in mine else [] for a in one.arrays]
        if on_device:
            pieces = [[(box, OnDevice(data)) for box, data in held] for held in pieces]
        stager = Stager(one, pieces, Started({}), pool)
        stager._stream = functools.partial(_ours, stager._streams)
        for job in jobs_of(one, 4096, 64, dense=dense):
            buffer = pool.acquire()
            buffer.view[:] = b"\xee" * len(buffer.view)
            events = stager.copy(job, buffer)
            held = [
                sum(valid.size for _, valid, _ in one.arrays[p.array].layout.parts(p.start, p.stop)) for p in job.parts
            ]
            copied = on_device and any(held)  # not where there is only padding
            assert [event.stream for event in events] == (["a stream of our own"] if copied else [])
            for part, elements in zip(job.parts, held, strict=True):
                array = one.arrays[part.array]
                found = bytes(buffer.view[part.at : part.at + part.stop - part.start])
                assert found == expected(array.layout, arrays[array.name], part.start, part.stop)
                if on_device and elements:  # the allocator is told of every copy that is under way
                    assert any(data.streams for _, data in pieces[part.array])
            pool.release(buffer)
    pool.close()


@settings(max_examples=150)
@given(worlds(), options, st.booleans(), st.data())
def test_every_job_holds_the_bytes_of_the_array(made, chosen, dense, data):
    chosen = with_split(chosen, made[0], data)
    check(made, chosen, on_device=False, dense=dense)


def _plan_of(sizes, extent):
    arrays = [Array(f"a{i}", dtypes.of("uint8"), Layout((n,), 1, (n,), (n,)), None) for i, n in enumerate(sizes)]
    return SavePlan(arrays, {i: [(0, n)] for i, n in enumerate(sizes)}, {}, extent)


@settings(max_examples=300)
@given(st.lists(st.integers(1, 40_000), min_size=1, max_size=60))
def test_dense_jobs_are_the_same_bytes_cut_between_extents_in_buffers_that_are_full(sizes):
    extent, full, small = 4096, 32768, 512
    plan = _plan_of(sizes, extent)
    jobs = jobs_of(plan, full, small, dense=True)
    parts = [part for job in jobs for part in job.parts]
    for number, size in enumerate(sizes):
        mine = [part for part in parts if part.array == number]
        assert [0, *(part.stop for part in mine)] == [*(part.start for part in mine), size]
        assert all(part.start % plan.arrays[number].layout.extent_bytes(extent) == 0 for part in mine)
        assert len(mine) == 1 or all(part.stop - part.start >= extent for part in mine[:-1])
    for job in jobs:
        edges = [edge for part in job.parts for edge in (part.at, part.at + part.stop - part.start)]
        assert edges == sorted(edges)
        assert edges[-1] <= full + 4096


def test_dense_jobs_take_less_memory_where_pieces_are_nearly_as_large_as_buffers():
    plan = _plan_of([6 << 20] * 100, 1 << 20)
    assert [len(jobs_of(plan, 8 << 20, 1 << 18, dense=dense)) for dense in (False, True)] == [100, 80]


@settings(max_examples=60)
@given(worlds(), options, st.data())
def test_the_code_for_gpus_copies_the_same(made, chosen, data):
    chosen = with_split(chosen, made[0], data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        patch.setattr(torch.cuda, "Event", Event)
        check(made, chosen, on_device=True)


class Stream:
    def __init__(self):
        self.landed = False

    def synchronize(self):
        self.landed = True


@pytest.mark.parametrize("held", ["less than the plan says", "all"])
def test_an_error_beside_copies_from_gpus_leaves_none_under_way(monkeypatch, held):
    """The buffer goes to somebody else then, and a copy that lands late would be in his bytes."""
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    rows = 4 if held == "all" else 3
    data = OnDevice(np.arange(rows * 8, dtype=np.uint8).reshape(rows, 8))
    layout = Layout((6, 8), 1, (6, 8), (6, 8))
    pulls = {0: [(32, 48, 1)]}  # the last two rows come from another rank
    one = SavePlan([Array("w", dtypes.of("uint8"), layout, None)], {0: [(0, 48)]}, {}, 4096, pulls=pulls)
    pool = StagingPool(1 << 20, 1 << 16)
    pool.pin = lambda buffer: None

    def pull(wanted):
        raise SaveError("the other rank is gone", {1: "gone"})

    stager = Stager(one, [[(Box((0, 0), (rows, 8)), data)]], Started({}), pool, pull)
    stream = Stream()
    monkeypatch.setattr(stager, "_stream", lambda device: stager._streams.setdefault(device, stream))
    buffer = pool.acquire()
    kind, text = (SaveError, "is gone") if held == "all" else (CkptError, "8 elements at .* are not held by this rank")
    with pytest.raises(kind, match=text):
        stager.copy(Job((Part(0, 0, 48, 0),)), buffer)
    assert data.streams == [stream]
    assert stream.landed
    pool.release(buffer)
    pool.close()


@pytest.mark.parametrize("shape", [(32400, 1000), (151936, 3584), (50257, 768), (2880, 1088), (34816, 1088)])
def test_large_pieces_are_cut_where_pages_end(shape):
    """However long the extents: a block that two requests share would go through the page cache twice."""
    layout = choose(shape, 4)
    middle = shape[0] // 2 * shape[1] * 4
    one = SavePlan(
        [Array("w", dtypes.of("float32"), layout, None)], {0: [(0, middle), (middle, layout.logical_bytes)]}, {}, MIB
    )
    parts = [part for job in jobs_of(one, 8 * MIB, MIB // 4) for part in job.parts]
    assert all(part.start % 4096 == 0 for part in parts if part.start != middle)
    assert all(part.stop - part.start <= 8 * MIB for part in parts)
    assert [(0, layout.logical_bytes)] == merge([(part.start, part.stop) for part in parts])


@pytest.mark.parametrize("background", [True, False])
def test_files_are_made_with_pauses_where_something_else_goes_on(tmp_path, monkeypatch, background):
    pauses = []
    monkeypatch.setattr(write, "let_others_in", lambda: pauses.append(1))
    plan = _plan_of([1 << 20] * 5, 1 << 20)
    files = write.Files(LocalStore(tmp_path), plan, jobs_of(plan, 8 << 20, 1 << 18), 1 << 18, background=background)
    made = threading.Event()
    files.reserve(made.set)
    assert not list(tmp_path.iterdir())  # the first copies come first
    files.go()
    assert made.wait(60)
    files.close()
    assert len(pauses) == (5 if background else 0)


class Reserving(FileOps):
    """Remembers what was set aside in each file, and what was written without."""

    def __init__(self):
        self.reserved, self.early = {}, []

    def fallocate(self, fd, start, nbytes):
        super().fallocate(fd, start, nbytes)
        self.reserved.setdefault(os.fstat(fd).st_ino, []).append((start, start + nbytes))

    def pwrite(self, fd, data, offset):
        if len(data) > MIB and not any(a <= offset < b for a, b in self.reserved.get(os.fstat(fd).st_ino, [])):
            self.early.append((offset, len(data)))
        return super().pwrite(fd, data, offset)


def test_nothing_large_is_written_before_its_space_is_set_aside(tmp_path):
    ops = Reserving()
    tree = {f"w{i}": torch.full((MIB,), float(i)) for i in range(24)}
    with ckptfs.Run(LocalStore(tmp_path, ops=ops)) as run:
        run.save(1, tree)
        assert sum(b - a for ranges in ops.reserved.values() for a, b in ranges) == 24 * 4 * MIB
        assert ops.early == []
