"""The mount and the plain folder agree byte for byte, whatever several processes do at once, on every way to serve."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptfs_fuse import Mount, MountOptions
from fuse_mounting import needs_fuse

pytestmark = [pytest.mark.fuse, needs_fuse]

LOCAL, SEGMENTED = "ckptfs.views.nodes:LocalTree", "fuse_trees:segmented"
WAYS = {
    "native-passthrough": ("native", LOCAL, {}, MountOptions()),
    "native-cached": ("native", LOCAL, {}, MountOptions(passthrough=False)),
    "native-segmented": ("native", SEGMENTED, {}, MountOptions()),
    "native-many-pieces": ("native", SEGMENTED, {"piece_bytes": 3_001}, MountOptions()),  # more than a pipe takes
    "native-direct": ("native", SEGMENTED, {}, MountOptions(direct_io=True)),
    "native-materialised": (
        "native",
        SEGMENTED,
        {},
        MountOptions(materialise_bytes=32 << 20, materialise_after_opens=1),
    ),
    "native-blocking": ("native", SEGMENTED, {"blocking": True}, MountOptions()),
    "fusepy-local": ("fusepy", LOCAL, {}, MountOptions()),
    "fusepy-blocking": ("fusepy", SEGMENTED, {"blocking": True}, MountOptions()),
    "fusepy-segmented": ("fusepy", SEGMENTED, {}, MountOptions()),
}
SIZES = {"empty": 0, "one": 1, "page-1": 4095, "page": 4096, "page+1": 4097, "sub/odd": 1_048_579, "sub/big": 9_400_000}
NAMES = [*SIZES, "sub/link", "sub/deep/é ü", "sub", "sub/deep", "missing", "sub/missing", "dangling", "page/x"]
PROCESSES = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("plain")
    (root / "sub" / "deep").mkdir(parents=True)
    generator = random.Random(5)
    for name, size in SIZES.items():
        (root / name).write_bytes(generator.randbytes(size))
    (root / "sub" / "deep" / "é ü").write_bytes(b"text")
    (root / "sub" / "link").symlink_to("odd")
    (root / "dangling").symlink_to("nowhere")
    return root


@pytest.fixture(scope="module")
def workers():
    script = Path(__file__).with_name("fuse_trees.py")
    processes = [
        subprocess.Popen([sys.executable, "-S", str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(PROCESSES)
    ]
    yield processes
    for process in processes:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()


@pytest.fixture(scope="module", params=WAYS)
def mounted(request, folder):
    backend, builder, more, options = WAYS[request.param]
    with Mount(builder, {"folder": str(folder)} | more, backend=backend, options=options) as path:
        yield path


def run_all(workers, root, plans):
    """Each worker does its plan, all at the same time."""
    for worker, plan in zip(workers, plans, strict=True):
        worker.stdin.write(json.dumps([str(root), plan]) + "\n")
        worker.stdin.flush()
    return [json.loads(worker.stdout.readline()) for worker in workers]


OFFSETS = st.one_of(
    st.integers(0, 9000), st.integers(0, 9_500_000), st.sampled_from([4096, 131072, 1 << 20, 4 << 20, 70_001])
)
LENGTHS = st.one_of(st.integers(0, 10_000), st.integers(0, 9_500_000))
STEP = st.tuples(OFFSETS, st.just(0), LENGTHS) | st.tuples(st.integers(-5000, 5000), st.sampled_from([1, 2]), LENGTHS)
NAME = st.sampled_from(NAMES)
ACTION = st.one_of(
    st.tuples(st.just("pread"), NAME, OFFSETS, LENGTHS),
    st.tuples(st.just("seeks"), NAME, st.lists(STEP, max_size=4)),
    st.tuples(st.just("map"), NAME, st.booleans(), OFFSETS, LENGTHS),
    st.tuples(st.just("list"), NAME),
    st.tuples(st.just("stat"), NAME),
    st.tuples(st.just("readlink"), NAME),
)
PLANS = st.tuples(*[st.lists(ACTION, min_size=1, max_size=6)] * PROCESSES)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(plans=PLANS)
def test_random_reads_agree_with_the_folder(mounted, folder, workers, plans):
    assert run_all(workers, mounted, plans) == run_all(workers, folder, plans)


def forget(path):
    """Neither the mount nor the disk has it in memory: what follows is read ahead, past the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def test_whole_files_agree_twice(mounted, folder):
    for name in SIZES:
        forget(os.path.join(mounted, name))
        forget(folder / name)
    for _ in range(2):  # the second time from the kernel's cache, or from the materialised copy
        for name in SIZES:
            assert Path(mounted, name).read_bytes() == (folder / name).read_bytes()


def test_tools_copy_it_exactly(mounted, folder, tmp_path):
    subprocess.run(["cp", "-r", mounted, tmp_path / "cp"], check=True, timeout=60)
    subprocess.run(["diff", "-r", "--no-dereference", folder, tmp_path / "cp"], check=True, timeout=60)
    subprocess.run(["rsync", "-a", mounted + "/", tmp_path / "rsync"], check=True, timeout=60)
    subprocess.run(["diff", "-r", "--no-dereference", folder, tmp_path / "rsync"], check=True, timeout=60)
    listings, sums = [], []
    for root in (mounted, folder):
        listings.append(subprocess.run(["find", ".", "-printf", "%y %p\n"], cwd=root, capture_output=True, check=True))
        files = [name for name in SIZES if name != "empty"]
        sums.append(subprocess.run(["sha256sum", *files], cwd=root, capture_output=True, check=True).stdout)
    assert sorted(listings[0].stdout.splitlines()) == sorted(listings[1].stdout.splitlines())
    assert sums[0] == sums[1]


def test_reading_with_o_direct_agrees(mounted, folder):
    fd = os.open(os.path.join(mounted, "sub/big"), os.O_RDONLY | os.O_DIRECT)
    try:
        import mmap

        with mmap.mmap(-1, 1 << 20) as aligned:
            count = os.preadv(fd, [aligned], 4096 * 3)
            assert aligned[:count] == (folder / "sub/big").read_bytes()[4096 * 3 :][:count]
            assert count == 1 << 20
    finally:
        os.close(fd)
