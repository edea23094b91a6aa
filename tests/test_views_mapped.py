"""Reading ahead: whatever was read ahead, given up, refused or replaced, the bytes are those of the file."""

import itertools
import os
import random
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptfs.errors import CkptError
from ckptfs.storage.directio import all_cached
from ckptfs.views import mapped
from ckptfs.views.mapped import BUFFERS, WINDOW_BYTES, MappedFile
from ckptfs.views.nodes import BackingFile, Range, SegmentsFile

SIZE = 3 * WINDOW_BYTES + 70_001


def make(path, size=SIZE, seed=1):
    path.write_bytes(random.Random(seed).randbytes(size))
    return path.read_bytes()


def forget(path):
    """The page cache has nothing of it afterwards."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def opened(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        return MappedFile(fd, str(path))
    finally:
        os.close(fd)


def takes_direct_requests(path):
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


def knows_what_is_cached(path):
    with open(path, "rb") as file:
        file.read()
        return all_cached(file.fileno(), 0, SIZE)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    path = tmp_path_factory.mktemp("mapped") / "file"
    return path, make(path)


def test_a_cold_file_is_read_past_the_page_cache_and_given_up_piece_by_piece(stored):
    path, expected = stored
    if not takes_direct_requests(path):
        pytest.skip("this file system refuses direct requests")
    forget(path)
    file = opened(path)
    file.bring(0, SIZE)
    assert set(file._windows) == {0, 1, 2, 3}
    got, pieces = b"", 100_000
    for offset in range(0, SIZE - 70_001, pieces):
        parts = list(file.parts(offset, min(pieces, SIZE - 70_001 - offset)))
        assert all(memory is not None for memory, _, _ in parts), offset
        got += b"".join(memory for memory, _, _ in parts)
    assert got == expected[: len(got)]
    # The end is too short for a request of its own, and came through the page cache.
    assert [memory for memory, _, _ in file.parts(SIZE - 70_001, 70_001)] == [None]
    assert file._windows == {}


@pytest.mark.parametrize("in_pieces", [False, True])
def test_only_what_the_page_cache_has_is_said_to_be_there(stored, in_pieces):
    path, expected = stored
    if not takes_direct_requests(path) or not knows_what_is_cached(path):
        pytest.skip("this file system refuses direct requests, or this kernel does not say what is cached")
    file = SegmentsFile([Range(str(path), 0, SIZE)], version="1") if in_pieces else BackingFile(path)
    with file.open() as reader:
        ((_, *where),) = reader.cached(0, SIZE)
        assert where == [0, SIZE]
        forget(path)
        assert reader.cached(100, 1) is None
        reader.prefetch(0, WINDOW_BYTES)
        assert b"".join(reader.lend(0, 10)) == expected[:10]  # it is read ahead now, past the page cache
        with open(path, "rb") as other:
            other.read()
        assert reader.cached(WINDOW_BYTES, 100) is not None
        assert reader.cached(WINDOW_BYTES - 1, 100) is None  # the window is to be handed out, and given up
        assert b"".join(reader.lend(10, WINDOW_BYTES - 10)) == expected[10:WINDOW_BYTES]
        assert reader.cached(WINDOW_BYTES - 1, 100) is not None


def test_what_is_cached_is_taken_from_there(stored):
    path, expected = stored
    path.read_bytes()
    file = opened(path)
    file.bring(0, SIZE)
    assert b"".join(file.lent(0, SIZE)) == expected
    assert [memory for memory, _, _ in file.parts(0, SIZE) if memory is not None] == []


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["bring", "lend", "read", "forget"]), st.integers(0, SIZE), st.integers(1, SIZE)),
        max_size=12,
    ),
    in_pieces=st.booleans(),
)
def test_any_order_of_hints_and_reads_gives_the_bytes_of_the_file(stored, steps, in_pieces):
    path, expected = stored
    cuts = [0, 70_001, WINDOW_BYTES, WINDOW_BYTES + 5, SIZE]
    ranges = [Range(str(path), start, stop - start) for start, stop in itertools.pairwise(cuts)]
    file = SegmentsFile(ranges, version="1") if in_pieces else BackingFile(path)
    forget(path)
    with file.open() as reader:
        for what, offset, length in steps:
            length = min(length, SIZE - offset)
            if what == "bring":
                reader.prefetch(offset, length)
                reader.is_near(offset, max(1, length))
            elif what == "forget":
                forget(path)
            elif what == "lend":
                assert b"".join(reader.lend(offset, length)) == expected[offset : offset + length]
            else:
                data = bytearray(length)
                assert reader.read_into(offset, memoryview(data)) == length
                assert data == expected[offset : offset + length]


def test_more_than_fits_comes_through_the_page_cache(tmp_path):
    """Nobody takes anything: the memory is used up, and everything is still right."""
    path = tmp_path / "large"
    expected = make(path, (BUFFERS + 3) * WINDOW_BYTES)
    forget(path)
    file = opened(path)
    file.bring(0, len(expected))
    for offset in range(0, len(expected), 1 << 20):
        assert b"".join(file.lent(offset, 1 << 20)) == expected[offset : offset + (1 << 20)]
    assert mapped._ahead._made <= BUFFERS


def bring_all(file):
    """Which windows there are when everything that was asked for is there."""
    file.bring(0, len(file.view))
    for window in list(file._windows.values()):
        assert window.ready.wait(30)
    return set(file._windows)


def test_a_hint_that_is_refused_keeps_nobody_waiting(stored, monkeypatch):
    """A reader in another thread may have found the window before the hint was refused."""
    path, expected = stored
    found = []
    monkeypatch.setattr(mapped._ahead, "want", lambda _file, window: found.append(window))
    file = opened(path)
    file.bring(0, SIZE)
    assert len(found) == 4
    assert all(window.ready.is_set() and window.data is None for window in found)
    assert file._windows == {}
    assert b"".join(file.lent(0, SIZE)) == expected


def test_windows_that_nobody_comes_for_give_way(tmp_path, monkeypatch):
    monkeypatch.setattr(mapped, "FORGOTTEN_S", 60.0)
    paths = [tmp_path / "first", tmp_path / "second"]
    contents = [make(path, BUFFERS * WINDOW_BYTES, seed) for seed, path in enumerate(paths)]
    if not takes_direct_requests(paths[0]):
        pytest.skip("this file system refuses direct requests")
    for path in paths:
        forget(path)
    first, second = map(opened, paths)
    kept = bring_all(first)
    assert bring_all(second) - kept == set()  # the first came a moment ago, and is left alone
    for window in list(first._windows.values()):
        window.used_s = 0.0
        del window
    del second  # what is mapped can't be forgotten
    forget(paths[1])
    second = opened(paths[1])
    assert bring_all(second)
    assert set(first._windows) < kept
    for file, expected in ((first, contents[0]), (second, contents[1])):
        assert b"".join(file.lent(5, 9_000_000)) == expected[5:9_000_005]


def test_another_file_of_the_same_name_is_not_taken_for_it(tmp_path):
    path = tmp_path / "file"
    expected = make(path)
    forget(path)
    file = opened(path)
    os.unlink(path)
    make(path, seed=2)
    forget(path)
    file.bring(0, SIZE)
    assert b"".join(file.lent(0, SIZE)) == expected


def test_a_file_that_was_truncated_is_an_error_of_who_reads(tmp_path):
    path = tmp_path / "file"
    make(path)
    with BackingFile(path).open() as reader:
        os.truncate(path, WINDOW_BYTES)
        forget(path)
        reader.prefetch(0, SIZE)
        with pytest.raises(CkptError, match="truncated"):
            reader.read_into(2 * WINDOW_BYTES, memoryview(bytearray(10)))


def test_readers_in_many_threads(stored):
    path, expected = stored
    forget(path)
    wrong = []

    def read(seed):
        choose = random.Random(seed)
        file = opened(path)
        offset = 0
        while offset < SIZE:
            length = min(choose.randrange(1, 900_000), SIZE - offset)
            file.bring(offset, 3 * length)
            if b"".join(file.lent(offset, length)) != expected[offset : offset + length]:
                wrong.append((seed, offset))
            offset += length

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
