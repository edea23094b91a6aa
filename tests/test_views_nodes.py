"""The virtual tree without any mount: segments against plain bytes, readers as leases, local folders."""

import errno
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfs import errors
from ckptfs.views import nodes
from ckptfs.views.nodes import BackingFile, BytesFile, Computed, Dir, Link, LocalTree, Range, SegmentsFile, Zeros


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    path = tmp_path_factory.mktemp("stored") / "data"
    path.write_bytes(bytes(range(256)) * 40)
    return path


def fill_with(data):
    def read(offset, view):
        view[:] = data[offset : offset + len(view)]

    return read


@st.composite
def segments(draw, path):
    """(segments, the bytes they stand for)."""
    data = path.read_bytes()
    made, expected = [], b""
    for kind in draw(st.lists(st.sampled_from("bzrc"), max_size=8)):
        length = draw(st.integers(0, 300))
        start = draw(st.integers(0, 9000))
        piece = bytes(length) if kind == "z" else data[start : start + length]
        made.append({
            "b": piece,
            "z": Zeros(length),
            "r": Range(str(path), start, length),
            "c": Computed(length, fill_with(piece)),
        }[kind])  # fmt: skip
        expected += piece
    return made, expected


@given(st.data())
def test_segments_read_like_the_bytes_they_stand_for(stored, data):
    made, expected = data.draw(segments(stored))
    file = SegmentsFile(made, version="1")
    assert file.size == len(expected)
    offset, length = data.draw(st.integers(0, len(expected) + 5)), data.draw(st.integers(0, 800))
    for use in (file.open(), file):
        buffer = bytearray(b"\xee" * length)
        count = use.read_into(offset, memoryview(buffer))
        assert bytes(buffer[:count]) == expected[offset : offset + length]
        assert set(buffer[count:]) <= {0xEE}  # nothing is touched past the end
    with file.open() as reader:
        reader.prefetch(offset, length)
        lent = reader.lend(offset, len(expected[offset : offset + length]))
        if lent is not None:  # no Computed or Zeros among them
            assert b"".join(lent) == expected[offset : offset + length]
        parts = reader.cached(offset, len(expected[offset : offset + length]))
        if parts is not None:
            assert lent is not None
            whole = [part if isinstance(part, bytes) else os.pread(part[0], part[2], part[1]) for part in parts]
            assert b"".join(whole) == expected[offset : offset + length]


def test_computed_segments_make_a_file_blocking_unless_told_otherwise(stored):
    assert SegmentsFile([Computed(3, fill_with(b"abc"))], version="1").blocking
    assert not SegmentsFile([Computed(3, fill_with(b"abc"))], version="1", blocking=False).blocking
    assert not SegmentsFile([b"a", Range(str(stored), 0, 3)], version="1").blocking


def test_a_reader_survives_the_deletion_of_its_files(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"0123456789")
    file = SegmentsFile([b">", Range(str(path), 2, 5)], version="1")
    whole = BackingFile(path)
    with file.open() as reader, whole.open() as whole_reader:
        path.unlink()
        buffer = bytearray(6)
        assert reader.read_into(0, memoryview(buffer)) == 6
        assert buffer == b">23456"
        assert whole_reader.read_into(8, memoryview(buffer)) == 2
    for gone in (file, whole):
        with pytest.raises(errors.StaleError) as caught:
            gone.open()
        assert caught.value.errno == errno.ESTALE


def test_a_replaced_file_is_stale_and_never_read_as_the_old_one(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    file = BackingFile(path)
    os.utime(path, ns=(1, 1))
    with pytest.raises(errors.StaleError, match="replaced"):
        file.open()


def test_reads_without_a_lease_see_what_the_path_names_now(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    file = SegmentsFile([Range(str(path), 0, 3)], version="1")
    assert file.read_into(0, memoryview(bytearray(3))) == 3
    (tmp_path / "b").write_bytes(b"new")
    os.replace(tmp_path / "b", path)
    buffer = bytearray(3)
    file.read_into(0, memoryview(buffer))
    assert buffer == b"new"


def test_a_truncated_file_is_corrupt_not_short(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"0123")
    file = SegmentsFile([Range(str(path), 0, 10)], version="1")
    with file.open() as reader, pytest.raises(errors.CorruptError, match="truncated"):
        reader.read_into(2, memoryview(bytearray(4)))


def test_a_range_is_checked_before_it_is_read(stored):
    asked = []

    def check(offset, length):
        asked.append((offset, length))
        if offset + length > 50:
            raise errors.CorruptError("extent 1 of data differs")

    file = SegmentsFile([b"xx", Range(str(stored), 0, 100, check)], version="1")
    assert file.read_bytes(0, 10)[:2] == b"xx"
    assert asked == [(0, 8)]
    with pytest.raises(errors.CorruptError, match="extent 1"):
        file.read_bytes(40, 40)


def test_open_files_are_bounded_and_given_back(tmp_path, monkeypatch):
    monkeypatch.setattr(nodes, "PINNED_FILES_MAX", 3)
    shared = nodes._SharedFds(2)
    monkeypatch.setattr(nodes, "_shared_fds", shared)
    for index in range(8):
        (tmp_path / str(index)).write_bytes(bytes([index]) * 10)
    file = SegmentsFile([Range(str(tmp_path / str(index)), 0, 10) for index in range(8)], version="1")
    before = len(os.listdir("/proc/self/fd"))
    with file.open() as reader:
        buffer = bytearray(80)
        reader.read_into(0, memoryview(buffer))
        assert bytes(buffer) == b"".join(bytes([index]) * 10 for index in range(8))
        assert len(os.listdir("/proc/self/fd")) <= before + 3 + 2
    shared.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_shared_files_are_not_closed_under_a_reader(tmp_path, monkeypatch):
    shared = nodes._SharedFds(1)
    for name in "abc":
        (tmp_path / name).write_bytes(name.encode() * 1000)
    wrong = []

    def read_all():
        buffer = bytearray(1000)
        for _ in range(200):
            for name in "abc":
                shared.read(str(tmp_path / name), 0, memoryview(buffer))
                if bytes(buffer) != name.encode() * 1000:
                    wrong.append(name)

    threads = [threading.Thread(target=read_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shared.close()
    assert not wrong


def test_an_immutable_directory_is_made_once_and_a_mutable_one_each_time():
    made = []

    def children():
        made.append(1)
        return {"a": BytesFile(b"x")}

    fixed, changing = Dir(children), Dir(children, immutable=False)
    assert fixed.lookup("a") is fixed.children()["a"]
    assert len(made) == 1
    changing.children()
    changing.lookup("a")
    assert len(made) == 3
    with pytest.raises(errors.NotFoundError):
        fixed.lookup("b")


def test_a_local_tree_mirrors_files_folders_and_links(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "f").write_bytes(b"abc")
    (tmp_path / "l").symlink_to("sub/f")
    os.mkfifo(tmp_path / "pipe")
    tree = LocalTree(tmp_path)
    assert [path for path, _ in nodes.walk(tree)] == ["l", "sub", "sub/f"]
    assert nodes.resolve(tree, "sub/f").read_bytes() == b"abc"
    assert isinstance(nodes.resolve(tree, "l"), Link)
    for missing in ("nope", "pipe", "sub/nope", "l/x", "..", "sub/../l"):
        with pytest.raises(errors.NotFoundError):
            nodes.resolve(tree, missing)
    with pytest.raises(errors.NotFoundError):
        tree.lookup("sub/f")
