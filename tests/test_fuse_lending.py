"""Replies through a pipe: all of a reply or nothing of it, and nothing of a failed one in the next. What is read ahead."""

import errno
import fcntl
import os
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptfs.views.nodes import BytesFile, Reader
from ckptfs_fuse import lending
from ckptfs_fuse.lending import PIPE_BYTES, READ_BYTES_MAX, _Pipe
from ckptfs_fuse.table import AHEAD_BYTES_MIN, BURST_BYTES, Handle

SIZE = 300_000


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    path = tmp_path_factory.mktemp("lending") / "file"
    path.write_bytes(random.Random(3).randbytes(SIZE))
    fd = os.open(path, os.O_RDONLY)
    yield fd, path.read_bytes()
    os.close(fd)


@pytest.fixture
def kernel():
    """Where replies go: a pipe that takes as much."""
    reading, writing = os.pipe2(os.O_NONBLOCK)
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    yield reading, writing
    os.close(reading)
    os.close(writing)


def received(reading):
    parts = []
    try:
        while part := os.read(reading, 1 << 20):
            parts.append(part)
    except BlockingIOError:
        return b"".join(parts)


stretches = st.lists(
    st.one_of(st.binary(min_size=1, max_size=9000), st.tuples(st.integers(0, SIZE + 9000), st.integers(1, 100_000))),
    max_size=8,
)


@given(st.lists(stretches, max_size=4))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_reply_is_whole_or_nothing(stored, kernel, replies):
    fd, data = stored
    pipe = _Pipe()
    for index, parts in enumerate(replies):
        header = b"header %d" % index
        expected = b"".join(part if isinstance(part, bytes) else data[part[0] : sum(part)] for part in parts)
        announced = sum(len(part) if isinstance(part, bytes) else part[1] for part in parts)
        sent = pipe.send(kernel[1], header, [part if isinstance(part, bytes) else (fd, *part) for part in parts])
        assert sent == (len(expected) == announced)  # a stretch past the end is refused
        assert received(kernel[0]) == (header + expected if sent else b"")


def test_what_does_not_fit_is_refused_and_nobody_waits(stored, kernel):
    fd, data = stored
    pipe = _Pipe()
    assert not pipe.send(kernel[1], b"h", [(fd, 0, 4097)] * 200)
    assert not pipe.send(kernel[1], b"h", [bytes(PIPE_BYTES)])
    assert pipe.send(kernel[1], b"h", [(fd, 5, 9)])
    assert received(kernel[0]) == b"h" + data[5:14]


def test_where_pipes_are_small_replies_go_another_way(stored, kernel, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EPERM, "pipe-max-size")

    monkeypatch.setattr(lending.fcntl, "fcntl", refuse)
    before = set(os.listdir("/proc/self/fd"))
    assert not _Pipe().send(kernel[1], b"h", [(stored[0], 0, 9)])
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_mount_that_is_gone_is_no_error(stored):
    pipe = _Pipe()
    with open(os.devnull, "wb") as nowhere:
        assert pipe.send(nowhere.fileno(), b"h", [(stored[0], 0, 9)])
        number = nowhere.fileno()
    assert pipe.send(number, b"h", [(stored[0], 0, 9)])  # EBADF: nobody waits for it


LIMIT = 32 << 20


class _Told(Reader):
    """Remembers which bytes it was told to bring."""

    def __init__(self):
        super().__init__(BytesFile(b""))
        self.ranges = []

    def prefetch(self, offset, length):
        self.ranges.append((offset, offset + length))


def read_run(handle, start, count, size=READ_BYTES_MAX):
    for offset in range(start, start + count * size, size):
        handle.read_ahead(offset, size, LIMIT)


def test_readahead_around_a_fault_is_brought_whole_and_little_beyond_it():
    told = _Told()
    start = 300 << 20
    read_run(Handle(None, told), start, BURST_BYTES // READ_BYTES_MAX)
    assert told.ranges[0][0] == start
    for (_, end), (begin, _) in zip(told.ranges, told.ranges[1:], strict=False):
        assert begin == end  # each byte once, the first request's own too
    assert BURST_BYTES <= told.ranges[-1][1] - start <= BURST_BYTES + AHEAD_BYTES_MIN


def test_a_page_somewhere_brings_nothing_with_it():
    told = _Told()
    handle = Handle(None, told)
    for offset in (5 << 20, 90 << 20, 40 << 20):
        handle.read_ahead(offset, 4096, LIMIT)
    assert told.ranges == []


def test_who_reads_on_and_on_is_read_ahead_of_up_to_the_limit():
    told = _Told()
    handle = Handle(None, told)
    read_run(handle, 0, 100)
    position = 100 * READ_BYTES_MAX
    assert position + LIMIT // 2 < told.ranges[-1][1] <= position + LIMIT
