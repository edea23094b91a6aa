"""Replies through a pipe: all of a reply or nothing of it, and nothing of a failed one in the next."""

import errno
import fcntl
import os
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptfs_fuse import lending
from ckptfs_fuse.lending import PIPE_BYTES, _Pipe

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
