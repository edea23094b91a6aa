"""Copies of hot files that the kernel passes on: the file's own bytes, within the budget, and of whole files only."""

import os
import threading
import time

import pytest

from ckptfs.errors import CorruptError
from ckptfs.views.nodes import BytesFile, Computed, SegmentsFile
from ckptfs_fuse import passthrough
from ckptfs_fuse.passthrough import Materialised

WAIT_S = 20
FILE_BYTES = 1_000_003


def file(number, nbytes=FILE_BYTES):
    return BytesFile(bytes([number]) * nbytes, version=str(number))


def held(copies, of):
    """What the copy holds, as soon as there is one."""
    deadline = time.monotonic() + WAIT_S
    while (fd := copies.fd_of(of)) is None:
        assert time.monotonic() < deadline, "it was not copied"
        threading.Event().wait(0.005)
    try:
        return os.pread(fd, of.size + 10, 0)
    finally:
        os.close(fd)


def has(copies, of):
    fd = copies.fd_of(of)
    if fd is not None:
        os.close(fd)
    return fd is not None


@pytest.fixture(params=["memory", "folder"])
def copies(request, tmp_path):
    open_before = len(os.listdir("/proc/self/fd"))
    made = Materialised(3 * FILE_BYTES, None if request.param == "memory" else str(tmp_path))
    yield made
    assert os.listdir(tmp_path) == []  # what is on the disk has no name, so a killed server leaves nothing
    made.close()
    assert len(os.listdir("/proc/self/fd")) <= open_before


def test_the_least_recently_opened_goes_when_the_budget_is_spent(copies):
    files = [file(number) for number in range(4)]
    for one in files[:3]:
        copies.want(one)
        assert held(copies, one) == one.data
    assert has(copies, files[0])  # opened again
    copies.want(files[3])
    assert held(copies, files[3]) == files[3].data
    assert [has(copies, one) for one in files] == [True, False, True, True]


def test_a_file_above_the_budget_is_left_alone(copies):
    large, small = file(1, 3 * FILE_BYTES + 1), file(2)
    copies.want(large)
    copies.want(file(3, 0))
    copies.want(small)
    assert held(copies, small) == small.data
    assert not has(copies, large)


def test_a_damaged_file_is_never_passed_on_and_takes_no_room(copies, caplog):
    def fail(offset, view):
        raise CorruptError("extent 7 of model/w is not what was saved")

    damaged = SegmentsFile([bytes(FILE_BYTES), Computed(2 * FILE_BYTES, fail)], version="damaged")
    copies.want(damaged)
    whole = [file(number) for number in range(3)]
    for one in whole:
        copies.want(one)
        assert held(copies, one) == one.data
    assert not has(copies, damaged)
    assert all(has(copies, one) for one in whole)
    assert "extent 7 of model/w" in caplog.text


def test_small_files_do_not_use_up_the_descriptors(copies, monkeypatch):
    monkeypatch.setattr(passthrough, "COPIES_MAX", 2)
    files = [file(number, 10) for number in range(4)]
    for one in files:
        copies.want(one)
        assert held(copies, one) == one.data
    assert [has(copies, one) for one in files] == [False, False, True, True]


def test_a_copy_that_nobody_opens_any_more_is_given_up(tmp_path):
    open_before = set(os.listdir("/proc/self/fd"))
    copies = Materialised(3 * FILE_BYTES, str(tmp_path), keep_s=0.2)
    first, second = file(1), file(2)
    copies.want(first)
    assert held(copies, first) == first.data
    deadline = time.monotonic() + WAIT_S
    while set(os.listdir("/proc/self/fd")) - open_before:  # not asked for meanwhile: that would be an opening
        assert time.monotonic() < deadline, "it is kept"
        threading.Event().wait(0.02)
    assert not has(copies, first)
    copies.want(second)  # and it goes on
    assert held(copies, second) == second.data
    copies.close()
