"""Differences and statistics against numpy on full copies."""

import collections
import json
import math
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import ckptfs
import view_runs
from ckptfs.diff import diff, plain_values
from ckptfs.settings import Settings
from ckptfs.stats import Stats, bands, histogram

SMALL = Settings(chunk_bytes=1024, extent_bytes=256, io_bytes=4096)


def pair(name, old, new, **how):
    run = ckptfs.Run(f"memory://diff-{name}", settings=SMALL)
    run.store.remove_tree("step-00000001")
    run.store.remove_tree("step-00000002")
    run.save(1, old, **how)
    run.save(2, new, **how)
    return run[1], run[2]


def test_added_removed_changed_same():
    ones = np.ones((4, 5), "f4")
    moved = ones.copy()
    moved[1, 2] = 3
    old = {"a": ones, "gone": ones, "same": ones, "shape": ones, "type": ones}
    new = {"a": moved, "new": ones, "same": ones.copy(), "shape": ones.T.copy(), "type": ones.astype("f8")}
    found = diff(*pair("kinds", old, new))
    assert (found.added, found.removed, found.same) == (["new"], ["gone"], ["same"])
    assert [c.name for c in found.changed] == ["shape", "a", "type"]
    shape, a, kind = found.changed
    assert not shape.comparable
    assert (shape.old_shape, shape.new_shape) == ((4, 5), (5, 4))
    assert a.relative == pytest.approx(2 / math.sqrt(20))
    assert (a.max_abs, a.changed, a.not_finite) == (2.0, 1, 0)
    assert (kind.relative, kind.changed, kind.new_dtype) == (0.0, 0, "float64")
    assert found
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["same"] == 1


@given(
    st.sampled_from(["f4", "f8", "f2", "i4", "u1", "c8", "bfloat16"]).flatmap(
        lambda kind: st.tuples(
            st.just(kind),
            hnp.arrays(
                np.float32,
                st.shared(hnp.array_shapes(min_dims=0, max_dims=3, max_side=9), key="s"),
                elements=st.floats(0, 200, width=32),
            ),
            hnp.arrays(
                np.float32,
                st.shared(hnp.array_shapes(min_dims=0, max_dims=3, max_side=9), key="s"),
                elements=st.floats(0, 200, width=32),
            ),
        )
    )
)
def test_numbers_equal_numpys(case):
    kind, a, b = case
    dtype = ml_dtypes.bfloat16 if kind == "bfloat16" else np.dtype(kind)
    a, b = a.astype(dtype), b.astype(dtype)
    found = diff(*pair("numpy", {"w": a}, {"w": b}))
    if a.tobytes() == b.tobytes():
        assert found.same == ["w"]
        return
    (change,) = found.changed
    x, y = a.astype("c16"), b.astype("c16")
    norm = np.linalg.norm(x.reshape(-1))
    delta = np.linalg.norm((y - x).reshape(-1))
    assert change.max_abs == pytest.approx(np.abs(y - x).max())
    if delta == 0:
        assert change.relative == 0
    elif norm == 0:
        assert change.relative == math.inf
    else:
        assert change.relative == pytest.approx(delta / norm)
    assert change.changed >= int((x != y).sum())


def test_what_is_not_finite():
    old = np.array([1, np.nan, np.inf, 2, np.nan], "f4")
    new = np.array([1, np.nan, 5, np.nan, 3], "f4")
    (change,) = diff(*pair("nan", {"w": old}, {"w": new})).changed
    assert (change.changed, change.not_finite, change.relative) == (3, 3, 0.0)
    assert not diff(*pair("nan", {"w": old}, {"w": old.copy()}))


def test_equal_checksums_are_not_read_and_layouts_do_not_matter():
    value = {"w": np.arange(3000, dtype="f4").reshape(50, 60)}
    one, two = pair("unread", value, value)
    assert not diff(one, two)
    assert one.bytes_read == two.bytes_read == 0
    run = ckptfs.Run("memory://diff-zstd", settings=Settings(chunk_bytes=512, extent_bytes=100))
    run.save(1, {"w": np.zeros((50, 60), "f4") + value["w"]}, compression="zstd")
    assert not diff(one, run[1])
    assert one.bytes_read > 0


def test_panels_and_plain_rows_are_compared(tmp_path):
    """The same values stored in another layout are no change; bands come in row-major order from any layout."""
    found = view_runs.save_in_panels(tmp_path / "panels")
    view_runs.save(tmp_path / "plain")
    with ckptfs.Run(tmp_path / "panels")[1] as one, ckptfs.Run(tmp_path / "plain")[1] as two:
        result = diff(one, two)
        assert not result.changed
        assert one.bytes_read > 0
        for name, value in found.items():
            pieces = [piece.view(one.param(name).dtype.numpy) for piece in bands(one, one.param(name), 100_000)]
            assert b"".join(piece.tobytes() for piece in pieces) == np.ascontiguousarray(value).tobytes()


def test_largest_change_first():
    rng = np.random.default_rng(1)
    base = {f"w{i}": rng.standard_normal(50).astype("f4") for i in range(6)}
    new = {name: value * (1 + 0.1 * ((7 * i) % 6)) for i, (name, value) in enumerate(base.items())}
    new = {name: value.astype("f4") for name, value in new.items()}
    found = diff(*pair("sorted", base, new))
    sizes = [c.relative for c in found.changed]
    assert sizes == sorted(sizes, reverse=True)
    assert found.same == ["w0"]


def test_pattern_and_progress():
    old = {"m": {"a": np.zeros(700), "b": np.zeros(5)}, "o": np.zeros(3), "n": 1}
    new = {"m": {"a": np.ones(700), "b": np.ones(5)}, "o": np.ones(3), "n": 2}
    seen = []
    found = diff(*pair("pattern", old, new), "m/*", progress=lambda *now: seen.append(now))
    assert {c.name for c in found.changed} == {"m/a", "m/b"}
    assert found.values == []
    assert seen[-1] == (2 * 705 * 8, 2 * 705 * 8)


def test_plain_values():
    old = {"lr": 0.1, "step": 3, "names": ["a", {"b": 1}], "nums": [1, 2], "t": (1, {"x": None}), "w": np.ones(2)}
    new = {"lr": 0.2, "names": ["a", {"b": 2}], "nums": [1, 3], "t": (1, {"x": True}), "w": np.ones(2), "z": math.inf}
    found = diff(*pair("values", old, new))
    assert {(v.path, v.old, v.new) for v in found.values} == {
        ("lr", "0.1", "0.2"),
        ("step", "3", None),
        ("names/1/b", "1", "2"),
        ("nums", "[1, 2]", "[1, 3]"),
        ("t/1/x", "null", "true"),
        ("z", None, "inf"),
    }


def test_plain_values_of_odd_trees():
    class P(NamedTuple):
        u: int
        v: list

    tree = {
        "d": {1: "x", (2, 3): {"deep": 4}},
        "o": collections.OrderedDict(a=1, b=[{}]),
        "p": P(1, [[2]]),
        "r": ckptfs.PerRank(7),
    }
    run = ckptfs.Run("memory://odd-values")
    run.save(1, tree)
    found = dict(plain_values(run[1].manifest.tree))
    assert found["d/1"] == '"x"'
    assert "4" in found.values()
    assert found["o/a"] == "1"
    assert found["p/u"] == "1"
    assert found["r@rank0"] == "7"


# --- statistics ------------------------------------------------------------------------------------------


@given(
    hnp.arrays(
        np.float64, st.integers(0, 60), elements=st.floats(-1e6, 1e6) | st.sampled_from([np.nan, np.inf, -np.inf, 0.0])
    ),
    st.integers(1, 9),
)
def test_stats_in_pieces_equal_numpys(values, step):
    stats = Stats()
    for at in range(0, len(values), step):
        stats.add(values[at : at + step])
    good = values[np.isfinite(values)]
    assert (stats.count, stats.nan, stats.inf) == (len(values), np.isnan(values).sum(), np.isinf(values).sum())
    assert (stats.finite, stats.zero) == (len(good), (good == 0).sum())
    if len(good):
        assert (stats.min, stats.max) == (good.min(), good.max())
        assert stats.mean == pytest.approx(good.mean(), rel=1e-9, abs=1e-6)
        assert stats.std == pytest.approx(good.std(), rel=1e-6, abs=1e-5)
        counts = histogram(iter([values[:step], values[step:]]), stats.min, stats.max, 7)
        assert counts.sum() == len(good)
        if stats.min < stats.max:
            assert counts[0] >= 1
            assert counts[-1] >= 1
    json.dumps(stats.to_json(), allow_nan=False)


@given(st.lists(st.integers(0, 7), max_size=3), st.integers(1, 64), st.sampled_from([None, "zstd"]))
def test_bands_are_the_array(shape, band_bytes, compression):
    value = np.arange(math.prod(shape), dtype="i4").reshape(shape)
    run = ckptfs.Run("memory://bands", settings=Settings(chunk_bytes=40, extent_bytes=24))
    run.store.remove_tree("step-00000001")
    run.save(1, {"w": value}, compression=compression)
    with run[1] as checkpoint:
        pieces = list(bands(checkpoint, checkpoint.param("w"), band_bytes))
    assert all(piece.nbytes <= max(4, band_bytes) for piece in pieces)
    flat = np.concatenate([np.empty(0, "u4"), *pieces])
    assert flat.view("i4").tolist() == value.reshape(-1).tolist()
