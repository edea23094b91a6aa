"""Positional I/O against a plain bytearray: any offsets, any memory alignment, any refusal of the file system."""

import errno
import itertools
import logging
import mmap
import os
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ckptfs.errors import CorruptError, NotFoundError, StorageError
from ckptfs.storage import BufferPool, DirectReader, DirectWriter, FaultOps, FaultPlan, FileOps, directio

PAGE = directio.ALIGN_BYTES
BIG = directio.DIRECT_MIN_BYTES


class RefusingOps(FileOps):
    """A file system without direct I/O: it says so at open, or only at the first write or read."""

    def __init__(self, at_open, code=errno.EINVAL):
        self.at_open = at_open
        self.code = code
        self.direct = set()

    def open(self, path, flags, mode=0o666):
        if flags & os.O_DIRECT and self.at_open:
            raise OSError(self.code, "no direct I/O")
        fd = super().open(path, flags & ~os.O_DIRECT, mode)
        self.direct.discard(fd)
        if flags & os.O_DIRECT:
            self.direct.add(fd)
        return fd

    def pwrite(self, fd, data, offset):
        self._refuse(fd)
        return super().pwrite(fd, data, offset)

    def preadv(self, fd, into, offset):
        self._refuse(fd)
        return super().preadv(fd, into, offset)

    def _refuse(self, fd):
        if fd in self.direct:
            raise OSError(self.code, "no direct I/O")


class CountingReads(FileOps):
    def __init__(self):
        self.lengths = []

    def preadv(self, fd, into, offset):
        self.lengths.append(len(into))
        return super().preadv(fd, into, offset)


class RecordingOps(FileOps):
    """Which descriptors are direct, and what was done through them."""

    def __init__(self):
        self.direct = set()
        self.calls = []

    def open(self, path, flags, mode=0o666):
        fd = super().open(path, flags, mode)
        self.direct.discard(fd)
        if flags & os.O_DIRECT:
            self.direct.add(fd)
        return fd

    def pwrite(self, fd, data, offset):
        self.calls.append(("direct" if fd in self.direct else "buffered", offset, len(data)))
        return super().pwrite(fd, data, offset)


@pytest.fixture(autouse=True)
def forget_refusals():
    """What is remembered about file systems must not pass from one test to the next."""
    known = set(directio._refusing)
    directio._refusing.clear()
    yield
    directio._refusing.clear()
    directio._refusing.update(known)


@pytest.fixture
def pool():
    pool = BufferPool(8 << 20, 1 << 20)
    yield pool
    pool.close()


def random_bytes(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8).tobytes()


def evict(path):
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


cuts = st.lists(st.integers(1, 3 * BIG), min_size=1, max_size=6)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=cuts, first=st.integers(0, 3 * PAGE), seed=st.integers(0, 99), shift=st.sampled_from([0, 0, 1, 64, 512]))
def test_writers_of_disjoint_ranges_make_the_file(tmp_path, cuts, first, seed, shift):
    path = str(tmp_path / "f")
    data = random_bytes(first + sum(cuts), seed)
    pool = BufferPool(64 << 20, 4 * BIG)
    edges = np.cumsum([first, *cuts]).tolist()
    ranges = list(itertools.pairwise(edges))

    def write(writer, start, stop):
        buffer = pool.acquire(60)
        view = buffer.at(start + shift, stop - start)
        view[:] = data[start:stop]
        writer.write(start, view)
        pool.release(buffer)

    try:
        with DirectWriter(path) as one, DirectWriter(path) as other:
            one.reserve(0, len(data))
            one.write(0, data[:first])
            work = [
                threading.Thread(target=write, args=(one if number % 2 else other, *edge))
                for number, edge in enumerate(ranges)
            ]
            for thread in work:
                thread.start()
            for thread in work:
                thread.join()
            one.sync()
        with open(path, "rb") as file:
            assert file.read() == data
    finally:
        os.unlink(path)
        pool.close()


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    offset=st.integers(0, 2 * BIG) | st.integers(0, 4 * BIG // PAGE).map(lambda n: n * 512),
    nbytes=st.integers(0, 3 * BIG),
    shift=st.integers(0, PAGE) | st.integers(0, 8).map(lambda n: n * 512),
    cold=st.booleans(),
    scratch=st.booleans(),
    edges=st.lists(st.integers(0, 3 * BIG), max_size=8),
)
@example(
    offset=1000,
    nbytes=3 * BIG,
    shift=64,
    cold=True,
    scratch=True,
    edges=[10, 20, 100_000, 300_000, 2 * BIG, 2 * BIG + 50_000],
)
def test_reads_at_any_alignment_agree_with_the_bytes(tmp_path, offset, nbytes, shift, cold, scratch, edges):
    path = str(tmp_path / "f")
    data = random_bytes(5 * BIG + 1234)
    if not os.path.exists(path):
        with open(path, "wb") as file:
            file.write(data)
    if cold:
        evict(path)
    pool = BufferPool(1 << 20, BIG)  # smaller than most reads: they take several turns
    memory = np.zeros(shift + nbytes + 1, np.uint8)
    into = memoryview(memory)[shift : shift + nbytes]
    with DirectReader(path, scratch=pool if scratch else None) as reader:
        assert reader.size == len(data)
        # Every other range between the edges is a part that is to be looked at; two of them are not sound.
        ends = sorted({edge for edge in edges if edge <= nbytes})
        parts = [(number, *part) for number, part in enumerate(itertools.pairwise(ends))][::2]
        looked = []

        def is_sound(number, view):
            looked.append((number, bytes(view)))
            return number not in (2, 4)

        checks = directio.Checks(parts, is_sound)
        reader.read_into(offset, into, checks=checks)
        checks.finish(into)
    assert not checks.left
    assert bytes(into) == data[offset : offset + nbytes]
    assert sorted(looked) == [(number, data[offset + low : offset + high]) for number, low, high in parts]
    assert sorted(checks.wrong) == [number for number, *_ in parts if number in (2, 4)]
    assert memory[shift + nbytes] == 0
    pool.close()


def test_cold_reads_into_fitting_memory_need_no_scratch(tmp_path, pool):
    path = str(tmp_path / "f")
    data = random_bytes(2 * BIG + 5)
    with open(path, "wb") as file:
        file.write(data)
    evict(path)
    buffer = pool.acquire()
    with DirectReader(path) as reader:
        view = buffer.at(100, len(data) - 100)
        reader.read_into(100, view)
        assert bytes(view) == data[100:]


def test_a_bufferful_at_any_offset_is_one_request(tmp_path):
    path = str(tmp_path / "f")
    data = random_bytes(2 * BIG)
    with open(path, "wb") as file:
        file.write(data)
    evict(path)
    ops, pool = CountingReads(), BufferPool(4 * BIG, BIG)
    memory = np.zeros(BIG + PAGE, np.uint8)
    misfit = (1 - memory.__array_interface__["data"][0]) % PAGE  # an odd address: never read in place
    into = memoryview(memory)[misfit : misfit + BIG]
    with DirectReader(path, scratch=pool, ops=ops) as reader:
        reader.read_into(512 * 3, into)
    assert bytes(into) == data[512 * 3 : 512 * 3 + BIG]
    assert ops.lengths == [BIG + PAGE]
    pool.close()


def test_blocks_go_directly_and_edges_buffered(tmp_path, pool):
    ops = RecordingOps()
    buffer = pool.acquire()
    with DirectWriter(str(tmp_path / "f"), ops=ops) as writer:
        writer.write(100, buffer.at(100, BIG))
    assert ops.calls == [
        ("buffered", 100, PAGE - 100),
        ("direct", PAGE, BIG - PAGE),
        ("buffered", BIG, 100),
    ]


def test_small_writes_are_buffered(tmp_path, pool):
    ops = RecordingOps()
    with DirectWriter(str(tmp_path / "f"), ops=ops) as writer:
        writer.write(0, pool.acquire().at(0, PAGE))
    assert ops.calls == [("buffered", 0, PAGE)]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("at_open", [True, False])
def test_a_file_system_that_refuses_is_written_and_read_buffered(tmp_path, pool, at_open, code, caplog):
    caplog.set_level(logging.WARNING, "ckptfs.storage")
    ops = RefusingOps(at_open, code)
    data = random_bytes(2 * BIG + 77)
    for name in ("f", "g"):
        path = str(tmp_path / name)
        with DirectWriter(path, ops=ops) as writer:
            view = pool.acquire().at(5, len(data))
            view[:] = data
            writer.write(5, view)
        evict(path)
        into = bytearray(len(data))
        with DirectReader(path, scratch=pool, ops=ops) as reader:
            reader.read_into(5, memoryview(into))
        assert into == data
    assert len([record for record in caplog.records if "refuses direct I/O" in record.message]) == 1


@pytest.mark.parametrize("kind", ["short", "error-before"])
def test_every_call_short_or_failing(tmp_path, pool, kind):
    """Short writes are continued; an error is reported, with the path and the offset, whichever call it is."""
    data = random_bytes(BIG + 3000)

    def save(ops):
        path = str(tmp_path / "f")
        with DirectWriter(path, ops=ops) as writer:
            view = buffer.at(7, len(data))
            view[:] = data
            writer.reserve(7, 7 + len(data))
            writer.write(7, view)
            writer.sync()
        with open(path, "rb") as file:
            return file.read()[7:]

    buffer = pool.acquire()
    counting = FaultPlan()
    assert save(FaultOps(counting)) == data
    assert {"open", "pwrite", "fallocate", "fsync", "close"} <= set(counting.log)
    for number, name in enumerate(counting.log):
        plan = FaultPlan(kind, at=number)
        if kind == "short":
            assert save(FaultOps(plan)) == data
        else:
            with pytest.raises(StorageError, match=str(tmp_path / "f")):
                save(FaultOps(plan))
        assert plan.faults == 1, name


def test_a_full_disk_says_how_much_is_missing(tmp_path):
    ops = FaultOps(FaultPlan(at=0, only=frozenset({"fallocate"})), code=errno.ENOSPC)
    with DirectWriter(str(tmp_path / "f"), ops=ops) as writer, pytest.raises(StorageError) as caught:
        writer.reserve(0, 12345)
    message = str(caught.value)
    assert str(tmp_path / "f") in message
    assert "12345" in message
    assert "are free" in message
    assert "free some space" in message


class AlmostFullOps(FileOps):
    """A disk with 1000 bytes left; to reserve on it for real would be the mistake."""

    def __init__(self):
        self.reserved = []

    def free_bytes(self, fd):
        return 1000

    def fallocate(self, fd, start, nbytes):
        self.reserved.append((start, nbytes))


def test_a_reservation_that_cannot_fit_takes_nothing(tmp_path):
    """fallocate that fails keeps what it got: once this filled the disk that all tests share."""
    ops = AlmostFullOps()
    with DirectWriter(str(tmp_path / "f"), ops=ops) as writer:
        with pytest.raises(StorageError, match=r"reserving 1001 bytes, 1000 are free.*No space left"):
            writer.reserve(5, 1006)
        assert ops.reserved == []
        writer.reserve(5, 1005)
        assert ops.reserved == [(5, 1000)]


def test_reading_what_is_missing_or_short(tmp_path):
    with pytest.raises(NotFoundError):
        DirectReader(str(tmp_path / "none"))
    (tmp_path / "f").write_bytes(b"123")
    with DirectReader(str(tmp_path / "f")) as reader, pytest.raises(CorruptError, match="too short"):
        reader.read_into(1, memoryview(bytearray(3)))


def test_a_closed_writer_and_reader_refuse(tmp_path):
    writer = DirectWriter(str(tmp_path / "f"))
    writer.close()
    writer.close()
    with pytest.raises(StorageError, match="closed"):
        writer.write(0, b"x")
    reader = DirectReader(str(tmp_path / "f"))
    reader.close()
    with pytest.raises(StorageError, match="closed"):
        reader.read_into(0, memoryview(bytearray()))


def test_the_pool_keeps_to_its_budget_and_reuses():
    pool = BufferPool(3 * (PAGE + PAGE), PAGE)
    assert pool.capacity == 3
    assert pool.made_bytes == 0
    taken = [pool.acquire() for _ in range(3)]
    assert pool.peak_bytes == pool.made_bytes == 3 * 2 * PAGE
    with pytest.raises(StorageError, match="stayed in use"):
        pool.acquire(timeout_s=0.01)
    pool.release(taken[0])
    assert pool.acquire(timeout_s=0) is taken[0]
    assert all(directio.address_of(buffer.view) % PAGE == 0 for buffer in taken)


def test_a_waiting_acquire_gets_what_is_released_and_fails_at_close():
    pool = BufferPool(2 * PAGE, PAGE)
    buffer = pool.acquire()
    got = []

    def wait():
        try:
            got.append(pool.acquire(30))
        except StorageError as error:
            got.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    pool.release(buffer)
    thread.join(30)
    assert got == [buffer]
    thread = threading.Thread(target=wait)
    thread.start()
    pool.close()
    thread.join(30)
    assert isinstance(got[1], StorageError)


def test_a_budget_too_small_for_one_buffer():
    with pytest.raises(StorageError, match="raise the budget"):
        BufferPool(PAGE, PAGE)


class Counted:
    """Turns that count who is inside."""

    def __init__(self) -> None:
        self.inside = self.taken = 0
        self.asked = []

    def __call__(self, nbytes: int) -> "Counted":
        self.asked.append(nbytes)
        return self

    def __enter__(self) -> None:
        self.inside += 1
        self.taken += 1

    def __exit__(self, *_: object) -> None:
        self.inside -= 1


def test_direct_requests_take_a_turn_and_give_it_back_after_an_error(tmp_path):
    class Failing(FileOps):
        inside = 0

        def preadv(self, fd: int, into: memoryview, offset: int) -> int:
            self.inside = turns.inside
            raise OSError(errno.EIO, "broken")

    path = str(tmp_path / "f")
    (tmp_path / "f").write_bytes(bytes(1 << 20))
    turns, ops, pool = Counted(), Failing(), BufferPool(4 << 20, 1 << 20)
    reader = DirectReader(path, scratch=pool, turns=turns, ops=ops)
    with pytest.raises(StorageError, match="Input/output"):
        reader._read_direct(0, pool.acquire().view[: 1 << 20])
    assert (ops.inside, turns.inside, turns.taken) == (1, 0, 1)
    assert turns.asked == [1 << 20]
    reader.close()


def test_what_the_page_cache_has_of_a_range(tmp_path):
    path, page = tmp_path / "file", mmap.PAGESIZE
    path.write_bytes(bytes(16 * page))
    with path.open("rb") as file:
        fd = file.fileno()
        if directio.cached_pages(fd, 0, 1) < 0:
            pytest.skip("this kernel does not say")
        assert directio.all_cached(fd, 0, 16 * page)
        assert directio.cached_pages(fd, page - 1, 2) == 2
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if directio.cached_pages(fd, 0, 16 * page):
            pytest.skip("this file system keeps the bytes in memory")
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no readahead
        os.pread(fd, 1, 5 * page)
        assert [directio.cached_pages(fd, n * page, page) for n in (4, 5, 6)] == [0, 1, 0]
        ranges = {"in it": (5 * page + 1, 9), "half": (5 * page, 2 * page), "a third": (5 * page - 1, page + 2)}
        assert {name: directio.all_cached(fd, *of) for name, of in ranges.items()} == {
            "in it": True, "half": False, "a third": False,
        }  # fmt: skip
        assert {name: directio.is_cached(fd, *of) for name, of in ranges.items()} == {
            "in it": True, "half": True, "a third": False,
        }  # fmt: skip
