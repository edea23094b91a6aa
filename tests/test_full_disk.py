"""A disk that fills up during a save: a clear error, the older step intact, the space given back.

A small ext4 in a file, mounted over a loop device; needs root. Skipped where that is impossible, but not in CI.
"""

import contextlib
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

import ckptfs
from ckptfs.errors import SaveError, StorageError
from ckptfs.verify import verify
from spreads import on_ranks

MIB = 1 << 20
DISK_MIB = 48


def run_command(*command):
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def disk(tmp_path):
    """A folder on a file system of its own with about 40 MiB of space."""
    image, mount = tmp_path / "disk.img", tmp_path / "disk"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(DISK_MIB * MIB)
    made = run_command("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
    if made.returncode == 0:
        made = run_command("mount", "-o", "loop", str(image), str(mount))
    if made.returncode != 0:
        if os.environ.get("CI"):
            pytest.fail(f"no loop device: {made.stderr}")
        pytest.skip(f"no loop device: {made.stderr.strip()}")
    try:
        yield mount
    finally:
        if run_command("umount", str(mount)).returncode != 0:
            run_command("umount", "-l", str(mount))


def free_bytes(folder):
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def tree(mib, seed):
    return {"w": np.random.default_rng(seed).integers(0, 255, mib * MIB, "u1"), "b": np.arange(100), "seed": seed}


def same(checkpoint, want):
    found = checkpoint.tree(numpy=True)
    return found["seed"] == want["seed"] and np.array_equal(found["w"], want["w"])


def left_over(folder):
    return sorted(name for name in os.listdir(folder) if name.startswith(".") and name != "lost+found")


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_save_that_does_not_fit(disk, compression):
    old = tree(12, 1)
    with ckptfs.Run(disk / "run") as run:
        run.save(1, old)
        before = free_bytes(disk)
        with pytest.raises(StorageError, match=r"(?i)no space|space left") as caught:
            run.save(2, tree(60, 2), compression=compression)
        assert str(disk) in str(caught.value)
        assert free_bytes(disk) >= before - MIB
        assert run.steps() == [1]
        assert left_over(disk / "run") == []
        with run.latest as checkpoint:
            assert verify(checkpoint) == []
            assert same(checkpoint, old)
        run.save(3, tree(12, 3))
        assert run.steps() == [1, 3]


def test_overwriting_with_what_does_not_fit_keeps_the_old(disk):
    old = tree(25, 1)
    with ckptfs.Run(disk / "run") as run:
        run.save(1, old)
        with pytest.raises(StorageError):
            run.save(1, tree(25, 2), overwrite=True)
        with run[1] as checkpoint:
            assert verify(checkpoint) == []
            assert same(checkpoint, old)
        assert left_over(disk / "run") == []


def test_a_full_disk_stops_all_ranks(disk):
    """Together they do not fit; whoever notices, every rank raises the same and nothing stays."""
    small = tree(4, 1)
    with ckptfs.Run(disk / "run") as run:
        run.save(1, small)
    before = free_bytes(disk)
    caught = {}

    def work(rank, group):
        with ckptfs.Run(disk / "run", group=group) as run:
            try:
                run.save(2, {"big": ckptfs.PerRank(np.zeros(30 * MIB, "u1")), "seed": 2})
            except ckptfs.CkptError as error:
                caught[rank] = error

    on_ranks(2, work)
    assert set(caught) == {0, 1}
    assert isinstance(caught[0], SaveError)
    assert str(caught[0]) == str(caught[1])
    assert "space" in str(caught[0])
    assert set(caught[0].by_rank) <= {0, 1}
    assert free_bytes(disk) >= before - MIB
    with ckptfs.Run(disk / "run") as run:
        assert run.steps() == [1]
        assert left_over(disk / "run") == []
        with run.latest as checkpoint:
            assert verify(checkpoint) == []
            assert same(checkpoint, small)


def test_a_disk_that_is_filled_up_by_somebody_else_while_small_files_are_written(disk):
    """Small files are not reserved: the last straw is found when it is written, and still is an error."""
    many = {f"p{i}": np.full(2000, i % 251, "u1") for i in range(3000)}
    filler = Path(disk) / "filler"
    with ckptfs.Run(disk / "run") as run:
        run.save(1, {"a": np.arange(5)})
        with contextlib.suppress(OSError), filler.open("wb") as file:
            file.write(bytes(max(0, free_bytes(disk) - 7 * MIB)))
        with pytest.raises(StorageError, match=r"(?i)space"):
            run.save(2, many)
        assert run.steps() == [1]
        filler.unlink()
        assert left_over(disk / "run") == []
        run.save(2, many)
        with run.latest as checkpoint:
            assert verify(checkpoint) == []
