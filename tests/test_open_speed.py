"""Opening is cheap: counted in reads and calls, because times depend on the machine."""

import contextlib
import gc
import sys
import uuid

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptfs
from ckptfs import dtypes
from ckptfs.array import Selection, select
from ckptfs.grid import choose
from ckptfs.manifest import Manifest, Param
from ckptfs.storage import CountingStore, MemoryStore


def calls_of(action):
    """How many Python functions an action calls, and how many objects of ours it leaves."""
    count = 0

    def profile(frame, event, arg):
        nonlocal count
        count += event == "call"

    with nothing_collected():
        sys.setprofile(profile)
        try:
            value = action()
        finally:
            sys.setprofile(None)
    return value, count


@contextlib.contextmanager
def nothing_collected():
    """What other tests left to the collector calls its finalizers at some other time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def manifest(arrays, rows_mib):
    params = {}
    for i in range(arrays):
        layout = choose((rows_mib * 256, 1024), 4)
        lengths = [(1 << 20, layout.logical_bytes >> 20)]
        lengths += [(layout.logical_bytes % (1 << 20), 1)] if layout.logical_bytes % (1 << 20) else []
        count = sum(n for _, n in lengths)
        name = f"model/layers.{i}.weight"
        hashes = np.random.default_rng(i).bytes(16 * count)
        params[name] = Param(name, name, dtypes.of("float32"), layout, None, tuple(lengths), hashes, "0" * 32)
    return Manifest(params, save_id="x", step=1, root_hash="0" * 32).dump("test")


def test_parsing_grows_with_arrays_not_with_extents():
    few, many = manifest(20, 2), manifest(20, 2000)
    assert len(many) > 100 * len(few)
    (one, calls_few), (other, calls_many) = (
        calls_of(lambda: Manifest.parse(few)),
        calls_of(lambda: Manifest.parse(many)),
    )
    assert sum(p.extent_count for p in other.params.values()) > 900 * sum(p.extent_count for p in one.params.values())
    assert calls_many <= 2 * calls_few


def test_equal_layouts_are_worked_out_once():
    raw = manifest(300, 3)
    parsed = Manifest.parse(raw)
    assert len({id(p.layout) for p in parsed.params.values()}) == 1
    _, calls = calls_of(lambda: Manifest.parse(raw))
    assert calls < 300 * 60
    assert len({id(p.extents) for p in parsed.params.values()}) == 1


@pytest.fixture
def counted():
    name = f"open-speed-{uuid.uuid4().hex}"
    ckptfs.Run(f"memory://{name}").save(1, {"model": {f"l{i}": torch.ones(4, 4) for i in range(300)}})
    store = CountingStore(MemoryStore(name, "step-00000001"))
    return ckptfs.Checkpoint(store), store


def test_opening_reads_the_manifest_and_nothing_else(counted):
    ck, store = counted
    assert operations(store) == {"read": 1}
    names = list(ck)
    assert len(names) == 300 and ck[names[7]].shape == (4, 4)
    assert operations(store) == {"read": 1}


def test_a_small_slice_is_one_read(counted):
    ck, store = counted
    before = operations(store).get("read_into", 0)
    ck["model/l5"].numpy((2, slice(1, 3)))
    assert operations(store)["read_into"] == before + 1


@pytest.mark.parametrize(("cached", "most"), [(True, 25), (False, 130)])
def test_a_small_slice_takes_few_calls(tmp_path, cached, most):
    ckptfs.Run(tmp_path / "run").save(1, {"w": torch.arange(1 << 16).reshape(256, 256)})
    array = ckptfs.Run(tmp_path / "run")[1]["w"]
    if cached:
        (tmp_path / "run/step-00000001" / array.param.file()).read_bytes()
    array.numpy(slice(1, 2))
    for index in (slice(3, 4), (slice(3, 9), slice(5, 7))):
        _, calls = calls_of(lambda i=index: array.numpy(i))
        assert calls < most


def operations(store):
    return dict(store.counts.calls)


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_bands_of_a_selection_are_its_rows(data):
    """What is read into a CUDA tensor goes band by band: the bands together select the same."""
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    ends, steps = st.one_of(st.none(), st.integers(-7, 7)), st.one_of(st.none(), st.integers(-3, 3).filter(bool))
    items = [data.draw(st.one_of(st.builds(slice, ends, ends, steps), st.integers(0, n - 1))) for n in shape]
    for _ in range(data.draw(st.integers(0, 1))):
        items.insert(data.draw(st.integers(0, len(items))), None)
    whole = np.arange(np.prod(shape)).reshape(shape)
    expected = whole[tuple(items)]
    selection = select(tuple(items), shape, "w")
    if not expected.ndim or not expected.size:
        return
    rows = data.draw(st.integers(1, len(expected)))
    for first in range(0, len(expected), rows):
        last = min(first + rows, len(expected))
        band = selection.band(first, last)
        assert band.shape == expected[first:last].shape
        assert np.array_equal(taken(whole, band), expected[first:last])


def taken(whole, selection: Selection):
    out = np.zeros(selection.shape, whole.dtype)
    out[selection.undo][...] = whole[selection.box.slices][tuple(slice(None, None, s) for s in selection.steps)]
    return out
