"""Every slice of a stored array equals numpy's slice of a full copy, and reads no more than it should."""

import gc
import itertools
import mmap
import os
import pickle
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptfs
from ckptfs import checkpoint, commit, dtypes, loadplan, read, shards
from ckptfs.box import Box
from ckptfs.errors import CorruptError, MismatchError, NotFoundError, StaleError, StorageError
from ckptfs.grid import Layout
from ckptfs.ranks import Group
from ckptfs.read import contiguous
from ckptfs.storage.directio import all_cached
from ckptfs.storage.pagecache import OpenFile

RELAXED = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def filled(shape, dtype, seed=0):
    """Random bits of a type as a tensor, and the same as a numpy array of its carrier."""
    kind = dtypes.of(dtype)
    raw = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 256, prod(shape) * kind.itemsize, np.uint8)
    tensor = (
        torch.from_numpy(raw).view(kind.torch).reshape(shape) if prod(shape) else torch.empty(shape, dtype=kind.torch)
    )
    return tensor, shards.as_numpy(tensor).copy()


def save_panels(url, whole, panels, settings=None):
    """Save a tensor as `panels` ranks that hold columns, so that it is stored as panels."""
    ends = [0, *np.linspace(0, whole.shape[1], panels + 1).astype(int)[1:].tolist()]
    groups = Group.threads(panels)
    errors = []

    def rank(r):
        part = whole[:, ends[r] : ends[r + 1]].contiguous()
        box = [[0, ends[r]], [whole.shape[0], ends[r + 1]]]
        value = shards.LocalShard([part], tuple(whole.shape), ["boxes", [box]])
        try:
            ckptfs.Run(url, group=groups[r], settings=settings).save(1, {"w": value})
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(panels)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    return ckptfs.Run(url)[1]


SMALL = ckptfs.Settings(chunk_bytes=256, extent_bytes=128, block_bytes=512, io_bytes=256)


class Kept(list):
    """(checkpoint, full copies by name), with a short name for messages."""

    def __repr__(self):
        return f"<{len(self)} checkpoints>"


def kept(kind, tmp_path_factory):
    """One checkpoint of many arrays, stored in one way."""
    arrays, tree = {}, {}
    cases = [
        ((), "float32"), ((0, 3), "int64"), ((7,), "bfloat16"), ((1,), "complex128"), ((64, 33), "float32"), ((5, 6, 7), "int16"),
        ((3, 1, 4, 9), "float8_e4m3fn"), ((129, 2), "bool"), ((2, 300), "float64"), ((17, 19), "complex64"),
    ]  # fmt: skip
    for seed, (shape, dtype) in enumerate(cases):
        tree[f"a{seed}"], arrays[f"a{seed}"] = filled(shape, dtype, seed)
    store, _, compression = kind.partition("+")
    url = tmp_path_factory.mktemp("run") / "run" if store == "local" else f"memory://slices-{kind.replace('+', '-')}"
    ckptfs.Run(url, settings=SMALL if "small" in kind else None).save(
        1,
        tree,
        compression=compression if compression in ("zstd", "blosc") else None,
        split={"a[458]": (1, 3), "a6": (2, 1, 2, 2)} if compression == "split" else None,
    )
    ck = ckptfs.Run(url)[1]
    if store == "local" and not compression:
        panels, copy = filled((48, 60), "float32", 99)
        arrays["w"] = shards.as_numpy(panels).copy()
        return Kept(
            [(ck, {k: v for k, v in arrays.items() if k != "w"}), (save_panels(f"{url}-p", panels, 4), {"w": copy})]
        )
    return Kept([(ck, arrays)])


@pytest.fixture(scope="module", params=["local", "local+small", "local+split", "local+zstd", "memory", "memory+blosc"])
def stored(request, tmp_path_factory):
    return kept(request.param, tmp_path_factory)


def indices(shape):
    def one(n):
        ends = st.one_of(st.none(), st.integers(-n - 2, n + 2))
        steps = st.one_of(st.none(), st.integers(-4, 4).filter(bool))
        slices = st.builds(slice, ends, ends, steps)
        return st.one_of(slices, st.integers(-n, n - 1)) if n else slices

    @st.composite
    def index(draw):
        items = [draw(one(n)) for n in shape[: draw(st.integers(0, len(shape)))]]
        if draw(st.booleans()):
            at = draw(st.integers(0, len(items)))
            used = items[:at]
            items = [*used, ..., *[draw(one(n)) for n in shape[len(shape) - draw(st.integers(0, len(shape) - at)) :]]]
            items = items if len(items) - 1 <= len(shape) else used
        for _ in range(draw(st.integers(0, 2))):
            items.insert(draw(st.integers(0, len(items))), None)
        return tuple(items) if len(items) != 1 or draw(st.booleans()) else items[0]

    return index()


@given(data=st.data())
@RELAXED
def test_slices_equal_numpys(stored, data):
    for ck, arrays in stored:
        name = data.draw(st.sampled_from(sorted(arrays)))
        copy, array = arrays[name], ck[name]
        index = data.draw(indices(copy.shape))
        expected = copy[index]
        found = array.numpy(index)
        assert found.shape == expected.shape
        assert found.dtype == array.element.numpy
        assert found.view(copy.dtype).tobytes() == expected.tobytes()
        tensor = array[index]
        assert tuple(tensor.shape) == expected.shape
        assert shards.as_numpy(tensor).tobytes() == expected.tobytes()


@given(data=st.data())
@RELAXED
def test_read_into_any_strides(stored, data):
    for ck, arrays in stored:
        name = data.draw(st.sampled_from(sorted(arrays)))
        copy, array = arrays[name], ck[name]
        index = data.draw(indices(copy.shape))
        expected = np.asarray(copy[index])
        order = data.draw(st.permutations(range(expected.ndim)))
        space = np.zeros([2 * expected.shape[d] + 1 for d in order], copy.dtype)
        view = space[(*(slice(1, 1 + 2 * expected.shape[d], 2) for d in order), ...)]
        view = view.transpose([order.index(d) for d in range(expected.ndim)])
        out = view.view(array.element.numpy)
        assert array.read(index, out=out) is out
        assert np.array_equal(view, expected)
        assert np.count_nonzero(space) == np.count_nonzero(expected)  # nothing beside it was touched
        if all(s > 0 for s in view.strides):
            bits = torch.from_numpy(space.view({16: "c16"}.get(space.itemsize, f"i{space.itemsize}")).copy()).zero_()
            strides = [s // copy.itemsize for s in view.strides]
            tensor = bits.view(array.element.torch).as_strided(
                expected.shape, strides, expected.ndim and sum(bits.stride())
            )
            assert array.read(index, out=tensor) is tensor
            assert np.array_equal(shards.as_numpy(tensor), expected)


def test_boxes_do_not_wrap(stored):
    ck, arrays = stored[0]
    name = "a5"
    assert shards.as_numpy(ck[name].box((1, 2, 3), (4, 2, 7))).shape == (3, 0, 4)
    assert shards.as_numpy(ck[name].box((1, 2, 3), (4, 5, 7))).tobytes() == arrays[name][1:4, 2:5, 3:7].tobytes()
    for start, stop in [((-1, 0, 0), (1, 1, 1)), ((0, 0, 0), (5, 6, 8)), ((0,), (1,)), ((2, 0, 0), (1, 1, 1))]:
        with pytest.raises(IndexError, match="does not lie in shape"):
            ck[name].box(start, stop)


# --- what an array says of itself ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ck(tmp_path_factory):
    url = tmp_path_factory.mktemp("one") / "run"
    tree = {"w": torch.arange(24.0).reshape(4, 6), "b": torch.arange(6).bfloat16(), "s": torch.tensor(3)}
    ckptfs.Run(url).save(1, tree)
    return ckptfs.Run(url)[1]


def test_protocol(ck):
    w = ck["w"]
    assert (w.shape, w.ndim, w.nbytes, w.size, len(w)) == ((4, 6), 2, 96, 24, 4)
    assert (w.get_shape(), w.get_dtype(), ck["b"].get_dtype()) == ([4, 6], "F32", "BF16")
    assert w.dtype.name == "float32"
    assert np.asarray(w).tolist() == np.arange(24.0).reshape(4, 6).tolist()
    assert np.asarray(w, dtype="float64").dtype == np.float64
    assert np.from_dlpack(w)[1, 1] == 7
    assert torch.from_dlpack(ck["b"]).dtype is torch.bfloat16
    assert [row.tolist() for row in w] == w[...].tolist()
    assert "w" in repr(w)
    with pytest.raises(TypeError):
        len(ck["s"])
    with pytest.raises(ValueError, match="without a copy"):
        np.asarray(w, copy=False)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ((0, 0, 0), "3 indices for 2 dimensions"),
        (4, "index 4 is out of bounds for dimension 0 of length 4"),
        ((0, -7), "index -7 is out of bounds for dimension 1"),
        ((..., ...), "at most one"),
        ([0, 1], "fancy indexing"),
        (np.array([0]), "fancy indexing"),
        (torch.tensor([1]), "fancy indexing"),
        (np.zeros((4, 6), bool), "fancy indexing"),
        (True, "cannot index with True"),
        (1.5, "cannot index with 1.5"),
        ("x", "cannot index with a str"),
        (slice(0, 4, 0), "cannot slice"),
        (slice(0.5, 2), "cannot slice"),
    ],
)
def test_bad_indices(ck, index, says):
    for way in (ck["w"].numpy, ck["w"].torch):
        with pytest.raises(IndexError, match=says):
            way(index)


@pytest.mark.parametrize("store", ["local", "memory"])
def test_a_step_that_was_deleted_meanwhile_is_not_called_damaged(tmp_path, store):
    run = ckptfs.Run(tmp_path / "run" if store == "local" else "memory://slices-deleted")
    run.save(1, {"a": np.ones(3), "b": np.ones((2, 3))})
    ck = run[1]
    commit.discard(run.store, "step-00000001")
    for way in (lambda: ck["b"][0], ck["a"].numpy, ck.tree, lambda: ck.read([("a", ..., np.empty(3))])):
        with pytest.raises(StaleError, match="step-00000001 was deleted since it was opened: open a newer step"):
            way()


@pytest.mark.parametrize("kind", [np.matrix, np.ma.masked_array, np.recarray])
@pytest.mark.parametrize("verify", ["extents", "full"])
def test_destinations_of_a_class_of_their_own(ck, kind, verify):
    again = ckptfs.Checkpoint(ck.url, verify=verify)
    out = np.zeros((4, 6), "f4").view(kind)
    assert again["w"].read(out=out) is out
    assert np.asarray(out).tolist() == np.arange(24.0).reshape(4, 6).tolist()
    again.read([("w", slice(None, None, -1), out)])
    assert np.asarray(out)[:, 1].tolist() == [19, 13, 7, 1]


def test_a_name_that_is_no_text_is_not_there(ck):
    assert ck.get(0) is None
    with pytest.raises(NotFoundError, match="no array 0"):
        ck[0]


def test_bad_destinations(ck):
    w = ck["w"]
    read_only = np.empty((4, 6), "f4")
    read_only.flags.writeable = False
    for out in (
        np.empty((4, 6), "f8"),
        np.empty((4, 6), "u4"),  # as wide, but the bits would mean something else
        np.empty((4, 5), "f4"),
        torch.empty(6, 4),
        [0],
        read_only,
        torch.empty(4, 1).expand(4, 6),
    ):
        with pytest.raises(MismatchError):
            w.read(out=out)
        with pytest.raises(MismatchError):
            ck.read([("w", ..., out)])
    with pytest.raises(NotFoundError, match="did you mean"):
        ck["ww"]


@pytest.mark.parametrize("device", ["meta", "cuda"])
@pytest.mark.parametrize("verify", ["extents", "full"])
def test_what_is_read_is_in_main_memory_whatever_the_default_device(ck, device, verify):
    with ckptfs.Checkpoint(ck.url, verify=verify) as again, torch.device(device):
        found = [again["w"][1:3, ::2], again["b"][...], again["s"][()], *again.tree().values()]
        target = {name: torch.zeros(again[name].shape, dtype=torch.float64, device="cpu") for name in again}
        again.load(target, cast=True)
        whole = dict(again.stream())
    assert all(one.device.type == "cpu" for one in (*found, *whole.values()))
    assert found[0].tolist() == [[6, 8, 10], [12, 14, 16]]
    assert target["w"].tolist() == whole["w"].tolist() == np.arange(24.0).reshape(4, 6).tolist()


def test_numpy_integers_index(ck):
    assert ck["w"][np.int64(1), torch.tensor(2)].item() == 8


# --- contiguous runs -------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3)), min_size=1, max_size=4), st.randoms(use_true_random=False)
)
@settings(max_examples=300, deadline=None)
def test_contiguous_agrees_with_a_full_list(dims, random):
    block = tuple(b for b, _ in dims)
    shape = (block[0], *(b * n - random.randrange(b) for b, n in dims[1:]))
    layout = Layout(shape, 2, block, block)
    start = tuple(random.randrange(n) for n in shape)
    stop = tuple(random.randrange(a, n) + 1 for a, n in zip(start, shape, strict=True))
    offsets = []
    for at in np.ndindex(*(z - a for a, z in zip(start, stop, strict=True))):
        place = tuple(a + i for a, i in zip(start, at, strict=True))
        (number,) = layout.blocks_of(Box(place, tuple(p + 1 for p in place)))
        inner = np.ravel_multi_index(tuple(p % b for p, b in zip(place, block, strict=True)), block)
        offsets.append(number * layout.block_bytes + int(inner) * 2)
    one_run = [b - a for a, b in itertools.pairwise(offsets)] == [2] * (len(offsets) - 1)
    crosses = len({o // layout.block_bytes for o in offsets}) > 1
    found = contiguous(layout, Box(start, stop))
    assert found == ((offsets[0], offsets[-1] + 2) if one_run and not crosses else None)


# --- how much is read ------------------------------------------------------------------------------------------------


def bytes_of(ck, read):
    before = ck.bytes_read
    read()
    return ck.bytes_read - before


@pytest.fixture(scope="module", params=["local", "memory"])
def big(request, tmp_path_factory):
    url = tmp_path_factory.mktemp("big") / "run" if request.param == "local" else "memory://slices-big"
    whole = torch.arange(1 << 20, dtype=torch.int32).reshape(64, 16384)
    ckptfs.Run(url).save(1, {"w": whole})
    return ckptfs.Run(url)[1], whole


@pytest.mark.parametrize("index", [3, slice(3, 9), (5, slice(100, 200)), (slice(7, 8), slice(-9, None)), slice(None)])
def test_a_row_slice_reads_exactly_its_bytes(big, index):
    ck, whole = big
    assert bytes_of(ck, lambda: ck["w"][index]) == whole[index].numel() * 4
    assert torch.equal(ck["w"][index], whole[index])


def test_wide_steps_read_only_their_rows(big):
    ck, whole = big
    assert bytes_of(ck, lambda: ck["w"][::-8]) == whole[::8].numel() * 4


def test_a_single_element_is_four_bytes_and_an_array_without_dimensions(big):
    ck, whole = big
    for _ in range(2):  # from the second time on by way of the page cache
        for index in ((3, -5), (3, ..., -5), (np.int64(3), 16379)):
            assert bytes_of(ck, lambda i=index: ck["w"].numpy(i)) == 4
            found, out = ck["w"].numpy(index), torch.zeros((), dtype=torch.int32)
            assert (type(found), found.shape, found.dtype, found.item()) == (np.ndarray, (), "i4", 4 * 16384 - 5)
            assert ck["w"].read(index, out=out).item() == ck["w"][index].item() == whole[3, -5]
        with pytest.raises(IndexError, match="out of bounds"):
            ck["w"][3, 16384]
        ck["w"].numpy()


def test_nothing_is_read_for_nothing(big):
    ck, _ = big
    assert bytes_of(ck, lambda: ck["w"][5:5]) == 0


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_tensor_parallel_rank_reads_its_share(tmp_path, ranks, dim):
    """Of weights stored as rows, as columns and in parts: at most 1/k of the bytes, and one extent for each edge."""
    whole = torch.arange(1 << 20, dtype=torch.int32).reshape(512, 2048)
    run = ckptfs.Run(tmp_path / "rows")
    run.save(1, {"w": whole})
    run.save(2, {"w": whole}, split={"w": (1, ranks)})
    assert run[2]["w"].param.layout.blocks == ranks  # each part is a block of its own
    extent = ckptfs.Settings().extent_bytes
    for ck in (run[1], save_panels(tmp_path / "columns", whole, ranks), run[2]):
        by_columns_in_rows = dim == 1 and len(list(ck["w"].param.layout.grid)) == 2 and ck["w"].param.layout.blocks == 1
        for r, part in enumerate(whole.chunk(ranks, dim)):
            width = whole.shape[dim] // ranks
            index = (slice(None),) * dim + (slice(r * width, (r + 1) * width),)
            read = bytes_of(ck, lambda c=ck, i=index: c["w"].numpy(i))
            edges = 2 * (ranks if ck["w"].param.layout.blocks > 1 else 1)
            assert read <= whole.numel() * 4 // ranks + edges * extent
            if not by_columns_in_rows:
                assert read == part.numel() * 4
            assert np.array_equal(ck["w"].numpy(index), part.numpy())


@pytest.mark.parametrize("shape", [(1 << 16, 128), (4096, 2880), (1024, 8192), (256, 32768)])
@pytest.mark.parametrize("ranks", [2, 8])
def test_cold_columns_of_rows_read_their_share(tmp_path, shape, ranks):
    """Rows shorter than a page, dense and sparse gaps that could be read through, and wide ones: what is counted (what
    the process copies, with what lies between in its buffers) is 1/k, and one extent for each edge."""
    whole = torch.arange(prod(shape), dtype=torch.int32).reshape(shape)
    ckptfs.Run(tmp_path / "run").save(1, {"w": whole})
    ck = ckptfs.Run(tmp_path / "run")[1]
    width, extent = shape[1] // ranks, ckptfs.Settings().extent_bytes
    for r in (0, ranks // 2, ranks - 1):
        evict(ck, "w")
        index = (slice(None), slice(r * width, (r + 1) * width))
        out = np.zeros((shape[0], width), "i4")
        read = bytes_of(ck, lambda i=index, o=out: ck["w"].read(i, out=o))
        assert read <= whole.numel() * 4 // ranks + (1 if r in (0, ranks - 1) else 2) * extent
        assert np.array_equal(out, whole.numpy()[index])
        ck.close()  # lets go of the mapping, so that the next rank is cold


@pytest.mark.parametrize("cold", [True, False])
def test_extents_that_a_save_cut_short_are_checked_and_cost_no_share(tmp_path, cold):
    """Two of 2 KiB among those of 1 MiB: quarters of the rows may hold one whole, and still read a quarter."""
    whole = np.random.default_rng(4).integers(0, 256, (2442, 12288), np.uint8)
    ckptfs.Run(tmp_path / "run").save(1, {"w": whole})
    ck = ckptfs.Run(tmp_path / "run")[1]
    param = ck["w"].param
    short = np.flatnonzero(param.extents.length == 2048)
    assert short.size
    quarters = [(slice(None), slice(start, start + 3072)) for start in range(0, 12288, 3072)]
    for out in (np.zeros((2442, 3072), np.uint8), np.zeros((3072, 2442), np.uint8).T):
        for index in quarters:
            if cold:
                ck.close()
                evict(ck, "w")
            read_bytes = bytes_of(ck, lambda i=index, o=out: ck["w"].read(i, out=o))
            assert read_bytes <= whole.nbytes // 4 + 2 * param.longest_extent
            assert np.array_equal(out, whole[index])
    start = int(param.extents.start[short[0]])
    with open(f"{ck.url}/{param.file(0)}", "r+b") as file:
        file.seek(start)
        file.write(bytes(255 - byte for byte in whole.reshape(-1)[start : start + 9].tobytes()))
        os.fsync(file.fileno())
    held = [start % 12288 >= i.start and start % 12288 + 2048 <= i.stop for _, i in quarters]
    assert sum(held) == 1
    for index, damaged in zip(quarters, held, strict=True):
        if cold:
            ck.close()
            evict(ck, "w")
        if damaged:
            with pytest.raises(CorruptError, match=f"extent {short[0]} "):
                ck["w"].numpy(index)
        else:
            ck["w"].numpy(index)


def evict(ck, name):
    """Ask the kernel to forget a file's pages; it may keep them, and then the test is weaker, not wrong."""
    fd = os.open(f"{ck.url}/{ck.param(name).file(0)}", os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


@pytest.mark.parametrize(
    ("index", "at_most"),
    [
        ((slice(3, 9), slice(100, 200)), None),  # gaps of almost 64 KiB: only the pieces
        ((slice(3, 9), slice(0, 12000)), 6 * 65536),  # gaps under 32 KiB: with the gaps
        (slice(2, 40), None),
        ((slice(None), slice(0, 8192)), 1 << 22),
    ],
)
def test_cold_slices(tmp_path, index, at_most):
    whole = torch.arange(1 << 20, dtype=torch.int32).reshape(64, 16384)
    ckptfs.Run(tmp_path / "run").save(1, {"w": whole})
    for _ in range(2):
        ck = ckptfs.Run(tmp_path / "run")[1]
        evict(ck, "w")
        expected = whole[index]
        read = bytes_of(ck, lambda c=ck: c["w"].numpy(index))
        assert expected.numel() * 4 <= read <= (at_most or expected.numel() * 4)
        evict(ck, "w")
        assert np.array_equal(ck["w"].numpy(index), expected.numpy())


@pytest.fixture(scope="module")
def scattered(tmp_path_factory):
    url = tmp_path_factory.mktemp("scattered")
    whole, copy = filled((40, 50, 60), "int16", 5)
    ckptfs.Run(url / "one", settings=ckptfs.Settings(extent_bytes=4096)).save(1, {"w": whole})
    flat, flat_copy = filled((300, 700), "int16", 6)
    return [(ckptfs.Run(url / "one")[1], copy), (save_panels(url / "panels", flat, 5), flat_copy)]


@given(data=st.data())
@RELAXED
def test_every_way_to_read_a_box(scattered, data):
    """Cold and warm, by ranges, bands and single runs (limits made small), into memory of any strides."""
    ck, copy = data.draw(st.sampled_from(scattered))
    pairs = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in copy.shape]
    index = tuple(slice(a, z) for a, z in pairs)
    expected = copy[index]
    limits = {
        "_SCRATCH_BYTES": data.draw(st.sampled_from([1, 3000, 1 << 20])),
        "_BAND_BYTES": data.draw(st.sampled_from([2000, 4 << 20])),
        "_ALONE_BYTES": data.draw(st.sampled_from([10, 1 << 16])),
        "_PART_BYTES": data.draw(st.sampled_from([4096, 2 << 20])),
        "_THREADS_FROM_BYTES": data.draw(st.sampled_from([1, 1 << 20])),
    }
    gap_bytes, page_bytes = data.draw(st.sampled_from([(0, 1), (50, 1), (2000, 100), (32768, 4096)]))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in limits.items():
            patch.setattr(read, name, value)
        patch.setattr(loadplan, "GAP_BYTES", gap_bytes)
        patch.setattr(loadplan, "PAGE_BYTES", page_bytes)
        patch.setattr(loadplan, "DENSE_FROM_BYTES", data.draw(st.sampled_from([1, 1 << 20])))
        if data.draw(st.booleans()):
            patch.setattr(OpenFile, "populate", lambda *_: False)  # a kernel before 5.14
        patch.setattr(checkpoint, "AT_HAND_BYTES", data.draw(st.sampled_from([0, 8 << 20])))
        if data.draw(st.booleans()):
            ck.close()
            evict(ck, "w")
        out = np.zeros(expected.shape, "i2", order=data.draw(st.sampled_from("CF")))
        before = ck.bytes_read
        ck["w"].read(index, out=out)
        assert np.array_equal(out.view(copy.dtype), expected)
        assert ck.bytes_read - before >= expected.nbytes


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_a_comb_has_all_of_a_box_and_few_gaps(data):
    block = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    layout = Layout(block, 2, block, block)
    pairs = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in block]
    if any(a == z for a, z in pairs):
        return
    box = Box(tuple(a for a, _ in pairs), tuple(z for _, z in pairs))
    allowance = data.draw(st.integers(0, 60))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loadplan, "GAP_BYTES", gap := data.draw(st.integers(0, 40)))
        patch.setattr(loadplan, "PAGE_BYTES", page := data.draw(st.integers(1, 20)))
        patch.setattr(loadplan, "DENSE_PAGES", dense := data.draw(st.integers(1, 6)))
        patch.setattr(loadplan, "DENSE_FROM_BYTES", data.draw(st.integers(0, 60)))
        comb = loadplan.comb(layout, box, allowance, passing=(passing := data.draw(st.booleans())))
    starts = loadplan.starts_of(layout, box, comb.dims)
    wanted = {
        int(np.ravel_multi_index(tuple(a + i for a, i in zip(box.start, at, strict=True)), block)) * 2 + byte
        for at in np.ndindex(*box.shape)
        for byte in (0, 1)
    }
    covered = [byte for start in starts for byte in range(start, start + comb.length)]
    assert len(covered) == len(set(covered))
    assert wanted <= set(covered)
    edges = sorted(wanted)
    gaps = [b - a - 1 for a, b in itertools.pairwise(edges) if b > a + 1 and a + 1 in set(covered)]
    assert all(one <= gap for one in gaps)
    assert sum(max(0, one - page + 1) for one in gaps) == comb.bridged_bytes + comb.passed_bytes
    assert comb.bridged_bytes <= allowance
    if comb.passed_bytes:  # the page cache gets `dense` times the pages of the runs at most
        assert passing
        pages_bytes = len(wanted) // comb.run_bytes * (comb.run_bytes + page - 1)
        assert len(covered) <= dense * pages_bytes + comb.bridged_bytes
    assert comb.length % comb.run_bytes == 0 or gaps


def test_what_is_dense_in_each_dimension_may_be_sparse_in_all(monkeypatch):
    """A quarter of what is between the rows, a third of the rows: a twelfth."""
    for name, value in {"PAGE_BYTES": 1, "DENSE_PAGES": 4, "DENSE_FROM_BYTES": 0}.items():
        monkeypatch.setattr(loadplan, name, value)
    layout = Layout((3, 40, 4), 2, (3, 40, 4), (3, 40, 4))
    found = loadplan.comb(layout, Box((0, 0, 0), (3, 12, 1)), 0, passing=True)
    assert (found.dims, found.length, found.passed_bytes) == (1, 11 * 8 + 2, 3 * 11 * 6)
    assert loadplan.comb(layout, Box((0, 0, 0), (3, 40, 1)), 0, passing=True).dims == 0
    assert loadplan.comb(layout, Box((0, 0, 0), (3, 40, 1)), 0).dims == 2


def test_many_slices_at_once(scattered):
    ck, copy = scattered[0]
    tensor = torch.zeros(5, 3, 60, dtype=torch.int16)
    strided = np.zeros((60, 40), "i2").T
    ck.read(
        [
            ("w", (slice(1, 6), slice(4, 7)), tensor),
            ("w", (slice(None), 3), strided),
            ("w", (0, 0, 0), np.zeros((), "i2")),
        ]
    )
    assert np.array_equal(shards.as_numpy(tensor), copy[1:6, 4:7])
    assert np.array_equal(strided.view(copy.dtype), copy[:, 3])
    back = np.zeros((14, 50), "i2")
    ck.read([("w", (slice(None, None, -3), slice(None), 7), back)])
    assert np.array_equal(back.view(copy.dtype), copy[::-3, :, 7])
    for piece, kind in (
        (("w", 0, np.zeros(3, "i2")), MismatchError),
        (("x", 0, back), NotFoundError),
        (("w", 99, back), IndexError),
    ):
        with pytest.raises(kind):
            ck.read([piece])


ALIKE = [
    slice(8, 40), (slice(8, 40),), (slice(8, 40), ...), slice(8, 40, 1), slice(8, 40, 2), slice(39, 7, -1), slice(-92, -60),
    1, (1,), -1, (1, slice(None)), (1, slice(3, 900)), (None, 1), (..., 1), ..., (), slice(None), slice(4, 4), None,
    (slice(0, 100), slice(0, 512)), (slice(0, 100), slice(512, 1024)), (slice(0, 64), slice(512, 1024)), (99, 1023),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["local", "memory"])
@pytest.mark.parametrize("verify", ["extents", "none"])
def test_what_arrays_that_are_laid_out_alike_share_is_right_for_each(tmp_path, kind, verify):
    """Planned once for all: into numpy and torch, into memory of any strides, whatever was asked for before."""
    url = tmp_path / "run" if kind == "local" else f"memory://alike-{verify}"
    rng = np.random.default_rng(5)
    tree = {name: rng.standard_normal((100, 1024), dtype="f4") for name in "abcd"}
    tree["ints"] = rng.integers(-9, 9, (100, 1024), dtype="i4")
    tree["half"] = torch.from_numpy(tree["a"]).to(torch.bfloat16)
    columns, ends = [tree["b"][:, :512], tree["b"][:, 512:]], [[[0, 0], [100, 512]], [[0, 512], [100, 1024]]]
    panels = {name: shards.LocalShard(columns, (100, 1024), ["boxes", ends]) for name in ("p", "q")}
    wide = {"wide": tree["a"].reshape(1024, 100).copy()}
    ckptfs.Run(url).save(1, tree | panels | wide)
    tree |= dict.fromkeys(panels, tree["b"])
    tensors = {name: value if torch.is_tensor(value) else torch.from_numpy(value) for name, value in tree.items()}
    with ckptfs.Checkpoint(f"{url}/step-00000001", verify=verify) as ck:
        for strided in (False, True):
            pieces, wanted = [], []
            for index in ALIKE:
                for name, tensor in tensors.items():
                    array = shards.as_numpy(tensor)[index]
                    out = torch.zeros((*array.shape, 2) if strided else array.shape, dtype=tensor.dtype)
                    out = out[..., 0] if strided else out
                    pieces.append((name, index, out if name in ("a", "d", "half") else out.numpy()))
                    wanted.append((array, out))
            if kind == "local":
                for name in tree:
                    evict(ck, name)
            ck.read(pieces)
            for array, out in wanted:
                assert np.array_equal(shards.as_numpy(out), array)
        row, rows = np.zeros(1024, "f4"), np.zeros((2, 1024), "f4")
        good = [("a", slice(1, 3), rows), ("a", 1, row)]
        for bad in (("b", True, row), ("b", slice(1.0, 3), rows), ("wide", slice(1, 3), rows), ("b", 100, row)):
            if kind == "local":
                evict(ck, "a")
                evict(ck, bad[0])
            with pytest.raises((IndexError, MismatchError)):
                ckptfs.Checkpoint(f"{url}/step-00000001", verify=verify).read([*good, bad])
        for out in (np.zeros((2, 1024), "i4"), np.zeros((1, 2048), "f4"), np.broadcast_to(row, (2, 1024))):
            with pytest.raises(MismatchError):
                ck.read([*good, ("b", slice(1, 3), out)])
        rows.fill(0)
        with pytest.raises(NotFoundError):
            ck.read([*good, ("nobody", 1, row)])
        assert not rows.any()
    if kind == "local":
        step = Path(f"{url}/step-00000001")
        with next((step / "c").glob("c*")).open("r+b") as stored:
            stored.seek(5000)
            stored.write(b"\xff\xff")
            os.fsync(stored.fileno())
        with ckptfs.Checkpoint(step, verify=verify) as ck:
            evict(ck, "c")
            evict(ck, "d")
            pieces = [(name, slice(0, 100), np.zeros((100, 1024), "f4")) for name in "dc"]
            ck.read([pieces[0], ("c", slice(0, 99), np.zeros((99, 1024), "f4"))])  # not a whole extent
            if verify == "none":
                ck.read(pieces)
            else:
                with pytest.raises(CorruptError, match="'c': extent 0"):
                    ck.read(pieces)


@pytest.mark.parametrize("verify", ["extents", "none", "full"])
def test_many_slices_cold_warm_and_damaged_are_each_as_they_would_be_alone(tmp_path, verify):
    made = np.random.default_rng(0)
    arrays = {f"a{i}": made.standard_normal((64 * (i % 5 + 1), 1000)).astype("f4") for i in range(20)}
    arrays |= {f"norm{i}": made.standard_normal(1000 + i).astype("f4") for i in range(9)}
    ckptfs.Run(tmp_path / "run").save(1, arrays)
    with ckptfs.Checkpoint(tmp_path / "run" / "step-00000001", verify=verify) as ck:
        for number, name in enumerate(arrays):
            if number % 3 == 0:
                evict(ck, name)
            elif number % 3 == 1:
                ck[name].numpy()
        before = ck.bytes_read
        pieces = [(name, (slice(len(a) // 8, None),), np.zeros_like(a[len(a) // 8 :])) for name, a in arrays.items()]
        ck.read(pieces)
        for name, index, out in pieces:
            assert np.array_equal(out, arrays[name][index]), name
        exact = sum(out.nbytes for *_, out in pieces)
        assert ck.bytes_read - before == exact or verify == "full"
    damage = next((tmp_path / "run" / "step-00000001" / "norm7").glob("c*"))
    with damage.open("r+b") as file:
        file.seek(2000)
        file.write(b"\x01\x02\x03\x04")
    for warm in (False, True):
        with ckptfs.Checkpoint(tmp_path / "run" / "step-00000001", verify=verify) as ck:
            damage.read_bytes()
            if not warm:
                evict(ck, "norm7")
            whole = [(name, ..., np.zeros_like(a)) for name, a in arrays.items()]
            if verify == "none":
                ck.read(whole)
                continue
            with pytest.raises(CorruptError, match="norm7"):
                ck.read(whole)


def test_a_file_that_is_closed_between_look_and_copy_is_read_again(tmp_path):
    data = np.arange(4000, dtype="f4").reshape(40, 100)
    ckptfs.Run(tmp_path / "run").save(1, {"w": data})
    with ckptfs.Checkpoint(tmp_path / "run" / "step-00000001") as ck:
        out = np.zeros((5, 100), "f4")
        ck["w"].numpy((0,))
        job = ck["w"].hand_over((slice(5, 10),), out)
        ck.close()
        job.do()
        assert job.nbytes == out.nbytes and job.held
        assert np.array_equal(out, data[5:10])


def test_a_file_that_is_closed_while_it_is_read_is_read_to_the_end(tmp_path):
    """Its descriptor's number would mean another file by then."""
    data = np.arange(1000, dtype="f4")
    ckptfs.Run(tmp_path / "run").save(1, {"w": data})
    ck = ckptfs.Run(tmp_path / "run")[1]
    files, out = ck._reader._opened(), bytearray(data.nbytes)
    file = files.take("w/c.0")
    ck.close()
    file.reader.read_into(0, memoryview(out))
    assert bytes(out) == data.tobytes()
    fd = file.fd
    files.give(file)
    del file
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_reading_in_one_thread_while_another_closes(tmp_path):
    data = np.arange(1 << 20, dtype="f4").reshape(1024, 1024)
    ckptfs.Run(tmp_path / "run").save(1, {"w": data})
    ck = ckptfs.Run(tmp_path / "run")[1]
    over, wrong = threading.Event(), []

    def read(seed):
        for low in np.random.default_rng(seed).integers(0, 500, 300):
            index = slice(low, low + 500), slice(low, low + 3 + 500 * (low % 2))
            out = np.empty_like(data[index])
            try:
                ck.read([("w", index, out)])
                if not np.array_equal(out, data[index]):
                    wrong.append(index)
            except StorageError:  # its buffers are gone
                pass
            except BaseException as error:
                wrong.append(error)

    def close():
        while not over.is_set():
            ck.close()
            with (tmp_path / "other").open("w"):  # descriptors' numbers are used again
                pass

    closing = threading.Thread(target=close)
    closing.start()
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(read, range(3)))
    over.set()
    closing.join()
    assert not wrong


def test_a_checkpoint_that_nobody_closes_leaves_no_descriptor(tmp_path):
    ckptfs.Run(tmp_path / "run").save(1, {"w": np.arange(1000, dtype="f4")})
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        assert ckptfs.open(tmp_path / "run@1")["w"].numpy(7) == 7
        gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


# --- checksums -------------------------------------------------------------------------------------------------------


def bring(path):
    """Have a file in the page cache. Once in a thousand times the kernel lacks a few pages of what was just read."""
    with path.open("rb", buffering=0) as file:
        for _ in range(20):
            size = len(file.read())
            file.seek(0)
            if all_cached(file.fileno(), 0, size):
                return
    raise AssertionError(f"the page cache does not keep {path}")


def damaged(tmp_path, at):
    url = tmp_path / "run"
    ckptfs.Run(url).save(1, {"w": torch.zeros(1 << 20, dtype=torch.int32).reshape(1024, 1024)})
    (path,) = (url / "step-00000001" / "w").glob("c*")
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\xff")
    return url / "step-00000001"


def test_a_whole_extent_is_checked_a_part_only_on_request(tmp_path):
    step = damaged(tmp_path, (1 << 20) + 5000)  # row 257, in the second extent
    ck = ckptfs.open(step)
    with pytest.raises(CorruptError, match="extent 1"):
        ck["w"][:]
    with pytest.raises(CorruptError, match="extent 1"):
        ck["w"][200:600]
    assert ck["w"][257:258].sum() != 0  # not read whole: not checked
    with pytest.raises(CorruptError, match="extent 1"):
        ckptfs.Checkpoint(step, verify="full")["w"][257:258]
    assert ckptfs.Checkpoint(step, verify="full")["w"][600:601].sum() == 0
    assert ckptfs.Checkpoint(step, verify="none")["w"][:].sum() != 0
    with pytest.raises(MismatchError):
        ckptfs.Checkpoint(step, verify="perhaps")


def test_a_truncated_file_is_an_error_not_a_signal(tmp_path):
    step = damaged(tmp_path, 0)
    (path,) = (step / "w").glob("c*")
    os.truncate(path, 1 << 20)
    ck = ckptfs.open(step)
    assert ck["w"][100:101].sum() == 0
    for index in (slice(600, 601), (slice(None), slice(0, 3)), ...):
        with pytest.raises(CorruptError):
            ck["w"].numpy(index)


def test_a_file_that_is_truncated_while_it_is_mapped_is_an_error_not_a_signal(tmp_path):
    """In a process of its own: a signal would end it."""
    program = f"""
import os, numpy as np, ckptfs
from pathlib import Path
folder = Path({str(tmp_path)!r})
ckptfs.Run(folder / "run").save(1, {{"w": np.ones((1024, 1024), "i4")}})
ck = ckptfs.Run(folder / "run")[1]
(path,) = (folder / "run/step-00000001/w").glob("c*")
while path.read_bytes() and ck["w"].at_hand(0) is None:  # a few pages may be missing at first
    ck.close()
for index in (slice(600, 601), (slice(None), slice(0, 3))):
    assert (ck["w"].numpy(index) == 1).all()
assert ck["w"]._window is not None
os.truncate(path, 1 << 20)
for index in (slice(600, 601), (slice(None), slice(0, 3)), ...):
    try:
        ck["w"].numpy(index)
    except ckptfs.errors.CorruptError as error:
        print("error:", error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("error:") == 3


def test_what_is_at_hand_is_checked_too(tmp_path):
    step = damaged(tmp_path, (1 << 20) + 5000)
    bring(next((step / "w").glob("c*")))
    ck = ckptfs.open(step)
    assert ck["w"][257:258].sum() != 0
    assert ck["w"]._window is not None
    for index in (slice(200, 600), slice(256, 512), (slice(256, 512), slice(None))):
        with pytest.raises(CorruptError, match="extent 1"):
            ck["w"].numpy(index)
    assert ck["w"].numpy((slice(None), slice(0, 3))).shape == (1024, 3)
    assert ckptfs.Checkpoint(step, verify="none")["w"].numpy(slice(256, 512)).sum() != 0


def test_a_large_slice_of_the_page_cache_is_checked_extent_by_extent(tmp_path):
    """What several threads copy: all whole extents in it, and none that lie in it in part."""
    whole = np.random.default_rng(0).integers(0, 9, (20, 1 << 18), dtype="i4")  # rows of an extent each
    ckptfs.Run(tmp_path / "run").save(1, {"w": whole})
    file = next((tmp_path / "run/step-00000001/w").glob("c*"))
    bring(file)
    with ckptfs.Run(tmp_path / "run")[1] as ck:
        ck["w"].numpy(0)
        before, out = ck._reader.extents_read, np.zeros((17, 1 << 18), "i4")
        ck["w"].read(slice(1, 18), out=out)
        assert ck["w"]._window.file.whole()
        assert ck._reader.extents_read - before == 17
        assert np.array_equal(out, whole[1:18])
    with file.open("r+b") as stored:
        for row in (0, 3, 11, 18):
            stored.seek(row << 20)
            stored.write(b"\xff")
    with ckptfs.Run(tmp_path / "run")[1] as ck:
        for rows, bad in ((slice(1, 11), "extent 3"), (slice(4, 18), "extent 11"), (slice(10, 19), "extent 1[18]")):
            with pytest.raises(CorruptError, match=bad):
                ck["w"].read(rows, out=np.zeros((rows.stop - rows.start, 1 << 18), "i4"))
        part = ck["w"].param.extents
        assert part.length.tolist() == [1 << 20] * 20
        assert len(ck["w"].numpy(slice(4, 11))) == 7


@pytest.mark.parametrize("hot", [False, True])
@pytest.mark.parametrize("columns", [1088, 1000, 1024, 900])
def test_every_whole_extent_of_a_long_run_is_checked(tmp_path, columns, hot):
    """A run is read in parts: none of them ends inside an extent, whatever its length."""
    whole = np.arange(4352 * columns, dtype="i4").reshape(4352, columns)
    ckptfs.Run(tmp_path / "run").save(1, {"w": whole})
    with ckptfs.Run(tmp_path / "run")[1] as ck:
        if hot:
            (tmp_path / "run/step-00000001" / ck["w"].param.file(0)).read_bytes()
        else:
            evict(ck, "w")
        table, row = ck["w"].param.extents, columns * 4
        out = np.zeros((4000, columns), "i4")
        ck["w"].read(slice(300, 4300), out=out)
        assert np.array_equal(out, whole[300:4300])
        inside = (table.start >= 300 * row) & (table.stop <= 4300 * row)
        assert ck._reader.extents_read == inside.sum() > 10


@pytest.mark.parametrize("verify", ["extents", "none"])
def test_hot_slices_are_copied_by_one_thread_a_core_and_others_read_by_more(tmp_path, monkeypatch, verify):
    arrays = {f"w{i}": np.full((1024, 1024), i, "f4") for i in range(6)}
    ckptfs.Run(tmp_path / "run").save(1, arrays)
    monkeypatch.setattr(ckptfs.read, "_CORES", 2)
    called = []
    submit = ThreadPoolExecutor.submit
    monkeypatch.setattr(ThreadPoolExecutor, "submit", lambda self, *a: (called.append(1), submit(self, *a))[1])
    pieces = [(name, slice(0, 512), np.zeros((512, 1024), "f4")) for name in arrays]
    for cold in ((), ("w4",), ("w1", "w2", "w4"), tuple(arrays)):
        monkeypatch.setattr(
            OpenFile, "holds", lambda self, *a, cold=cold: Path(self.reader.path).parent.name not in cold
        )
        with ckptfs.Checkpoint(tmp_path / "run/step-00000001", verify=verify) as ck:
            for name in arrays:
                next((tmp_path / "run/step-00000001" / name).glob("c*")).read_bytes()
                ck[name]._look_at = float("inf") if name in cold else 0.0
            called.clear()
            ck.read(pieces)
        # Where the first is hot, a helper may have done everything before the others could be called.
        assert len(called) in ((5,) if "w0" in cold else (1, 5) if cold else (1,))
        for name, _, out in pieces:
            assert (out == arrays[name][:512]).all()
            out.fill(-1)


def test_hot_slices_are_checked_extent_by_extent_into_any_memory(tmp_path):
    """Several at once: into contiguous memory extents are copied and checked one after the other, else all at once."""
    whole = np.random.default_rng(0).integers(0, 9, (8, 1 << 18), dtype="i4")  # rows of an extent each
    ckptfs.Run(tmp_path / "run").save(1, {"w": whole, "x": whole + 1})
    file = next((tmp_path / "run/step-00000001/w").glob("c*"))
    index = (slice(2, 7),)
    for strided in (False, True):
        for path in (tmp_path / "run/step-00000001").glob("[wx]/c*"):
            bring(path)
        outs = [np.zeros((5, 2 << 18), "i4")[:, ::2] if strided else np.zeros((5, 1 << 18), "i4") for _ in "wx"]
        with ckptfs.Checkpoint(tmp_path / "run/step-00000001") as ck:
            ck.read([("w", index, outs[0]), ("x", index, outs[1])])
            assert np.array_equal(outs[0], whole[2:7]) and np.array_equal(outs[1], whole[2:7] + 1)
            assert ck["w"]._window is not None
        with file.open("r+b") as stored:
            for row, at in ((6, 5), (1, 0), (7, 0)):  # one inside, two outside
                stored.seek((row << 20) + at)
                stored.write(b"\xff")
        with ckptfs.Checkpoint(tmp_path / "run/step-00000001") as ck, pytest.raises(CorruptError, match="extent 6"):
            ck.read([("w", index, outs[0]), ("x", index, outs[1])])
        with file.open("r+b") as stored:
            stored.write(whole.tobytes())


# --- threads, processes, imports -------------------------------------------------------------------------------------


def test_threads_share_a_checkpoint(big):
    ck, whole = big
    wrong = []

    def work(seed):
        for i in np.random.default_rng(seed).integers(0, 60, 100):
            if not np.array_equal(
                ck["w"].numpy((slice(i, i + 4), slice(i * 5, i * 5 + 300))), whole[i : i + 4, i * 5 : i * 5 + 300]
            ):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_checkpoint_travels_to_other_processes(tmp_path):
    ckptfs.Run(tmp_path / "run").save(1, {"w": torch.arange(6.0)})
    ck = ckptfs.Run(tmp_path / "run")[1]
    again = pickle.loads(pickle.dumps(ck["w"]))
    assert again.numpy().tolist() == ck["w"].numpy().tolist()
    assert pickle.loads(pickle.dumps(ck)).url == ck.url
    kept = pickle.dumps(ck)
    ckptfs.Run(Path(ck.url).parent).save(1, {"w": torch.zeros(1)}, overwrite=True)
    with pytest.raises(StaleError, match="was replaced"):
        pickle.loads(kept)
    ckptfs.Run("memory://slices-pickled").save(1, {"w": torch.ones(1)})
    with pytest.raises(MismatchError, match="memory of this process"):
        pickle.dumps(ckptfs.Run("memory://slices-pickled")[1])


def test_a_forked_child_reads_with_locks_of_its_own(ck):
    reader = ck._reader
    ck["w"].numpy(0)
    held = (reader._pool_lock, reader._count_lock, reader._files._lock)
    for lock in held:
        lock.acquire()  # as if another thread of the parent were reading at the moment of the fork
    try:
        child = os.fork()
        if not child:
            ok = False
            try:
                ok = ck["w"].numpy((1, 1)) == 7
            finally:
                os._exit(0 if ok else 1)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        for lock in held:
            lock.release()


def test_numpy_slices_do_not_import_torch(ck):
    program = f"""
import sys, ckptfs, numpy as np
ck = ckptfs.open({ck.url!r})
assert ck["w"].numpy((slice(1, 3), 2)).tolist() == [8.0, 14.0]
assert ck["b"].numpy().astype("f4").tolist() == [0, 1, 2, 3, 4, 5]
assert np.asarray(ck["w"]).shape == np.from_dlpack(ck["w"]).shape == (4, 6)
out = np.empty((4, 6), "f4"); ck["w"].read(out=out); assert out[3, 5] == 23
assert [n for n, _ in ck.stream("*", numpy=True)]
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_reads_into_a_cuda_tensor(ck, tmp_path):
    whole = torch.arange(10 << 20, dtype=torch.int32).reshape(10240, 1024)
    ckptfs.Run(tmp_path / "run").save(1, {"w": whole})
    array = ckptfs.Run(tmp_path / "run")[1]["w"]
    for index in (
        ...,
        slice(5, 9000),
        (slice(None, None, -3), slice(7, 900)),
        (5, 6),
        (None, 4),
        (3, slice(None, None, 2)),
    ):
        expected = torch.from_numpy(whole.numpy()[index].copy()) if index is not ... else whole
        out = torch.zeros(expected.shape, dtype=torch.int32, device="cuda")
        assert torch.equal(array.read(index, out=out).cpu(), expected)
    strided = torch.zeros(1024, 10240, dtype=torch.int32, device="cuda").t()
    assert torch.equal(array.read(out=strided).cpu(), whole)


# --- the document ----------------------------------------------------------------------------------------------------


def test_the_document_is_true(tmp_path):
    text = (Path(__file__).resolve().parent.parent / "docs" / "slices.md").read_text()
    blocks = re.findall(r"(?ms)^```python\n(.*?)^```", text)
    assert len(blocks) == 7
    names = {"folder": str(tmp_path / "run7")}
    for block in blocks:
        exec(compile(block, "docs/slices.md", "exec"), names)


def test_what_cold_reads_bring_is_all_checked_by_one_thread_at_a_time(tmp_path, monkeypatch):
    arrays = {f"a{i}": np.random.default_rng(i).integers(0, 256, 600_000, np.uint8) for i in range(40)}
    ckptfs.Run(tmp_path).save(1, arrays)
    for asked in ("whole", "holds"):
        monkeypatch.setattr(OpenFile, asked, lambda *_: False)  # nothing is in memory, they hear
    real, checking, checked = read._is_sound, threading.Lock(), []

    def is_sound(param, number, view):
        assert checking.acquire(blocking=False), "two threads check at the same time"
        try:
            checked.append(param.name)
            return real(param, number, view)
        finally:
            checking.release()

    monkeypatch.setattr(read, "_is_sound", is_sound)
    memory = np.frombuffer(mmap.mmap(-1, 40 * 602_112), np.uint8)  # each on a page of its own: nothing passes a buffer
    out = {name: memory[i * 602_112 :][:600_000] for i, name in enumerate(arrays)}
    with ckptfs.Run(tmp_path)[1] as ck:
        ck.read([(name, ..., into) for name, into in out.items()])
    assert sorted(checked) == sorted(arrays)
    assert all(np.array_equal(out[name], arrays[name]) for name in arrays)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("many", [True, False])
def test_what_cold_reads_bring_damaged_is_refused_and_the_next_read_works(tmp_path, monkeypatch, many, aligned):
    arrays = {f"a{i}": np.random.default_rng(i).integers(0, 256, 3_000_000, np.uint8) for i in range(4)}
    ckptfs.Run(tmp_path).save(1, arrays)
    for asked in ("whole", "holds"):
        monkeypatch.setattr(OpenFile, asked, lambda *_: False)
    with (tmp_path / "step-00000001/a2/c.0").open("r+b") as file:
        file.seek(2_500_000)
        file.write(bytes([arrays["a2"][2_500_000] ^ 1]))
    room = np.frombuffer(mmap.mmap(-1, 4 * 3_002_368), np.uint8)
    shift = 0 if aligned else 64
    out = {name: room[i * 3_002_368 + shift :][:3_000_000] for i, name in enumerate(arrays)}
    with ckptfs.Run(tmp_path)[1] as ck:
        for _ in range(2):
            with pytest.raises(CorruptError, match="'a2'"):
                ck.read([(name, ..., into) for name, into in out.items()]) if many else ck["a2"].read(out=out["a2"])
        sound = [name for name in arrays if name != "a2"]
        ck.read([(name, ..., out[name]) for name in sound])
    assert all(np.array_equal(out[name], arrays[name]) for name in sound)
