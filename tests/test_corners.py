"""Branches of the pure core that no property meets by chance, each under its own name."""

from __future__ import annotations

import argparse
import collections
import enum
import json
import mmap
import sys
import types
from itertools import pairwise
from pathlib import PureWindowsPath
from typing import NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from ckptfs import expr, loadplan, manifest, mesh, rules, saveplan, tags, tree
from ckptfs.box import Box
from ckptfs.codec import Codec
from ckptfs.errors import CorruptError, FormatError, MismatchError
from ckptfs.grid import Layout, choose
from ckptfs.layout_ops import _short
from ckptfs.tree import PerRank, fill, flatten, loads, merge

torch = pytest.importorskip("torch")

# --- codec -----------------------------------------------------------------------------------------------------------


def test_blosc_takes_no_chunk_beyond_its_limit():
    with mmap.mmap(-1, (1 << 31) + 4096) as huge, pytest.raises(MismatchError, match="use zstd"):
        Codec("blosc", 5, "zstd", "shuffle", 4).encode(huge)


@pytest.mark.parametrize("descriptor", [0x00, 0x80], ids=["no size", "a size that is cut off"])
def test_a_zstd_frame_that_does_not_say_its_size_is_corrupt(descriptor):
    with pytest.raises(CorruptError):
        Codec("zstd", 3).decode(b"\x28\xb5\x2f\xfd" + bytes([descriptor, 0]), 10)


# --- grid ------------------------------------------------------------------------------------------------------------


def test_chunks_divide_files_that_end_where_shards_do():
    halves = [Box((0, 0), (7, 4)), Box((7, 0), (14, 4))]
    found = choose((14, 4), 4, halves, many=True, chunk_bytes=64)
    assert (found.block, found.chunk) == ((7, 4), (1, 4))


# --- expr ------------------------------------------------------------------------------------------------------------


def source(*shape, name="a"):
    return expr.Source(name, shape, "int32")


def test_an_array_knows_its_bytes():
    assert source(2, 3).nbytes == 24


def test_empty_arrays_take_any_empty_shape():
    empty = expr.reshape(source(0, 3), (3, 0, 2))
    assert empty.read(None, lambda name, box: np.zeros(box.shape, np.int32)).shape == (3, 0, 2)


def test_dimensions_and_indices_that_are_not_there():
    with pytest.raises(MismatchError, match="no dimension 3 in a stack"):
        expr.stack([source(2), source(2)], 3)
    with pytest.raises(MismatchError, match="no index 2"):
        expr.pick(source(2), 0, 2)


@st.composite
def expressions(draw, depth=3):
    """(expression over sources a and b, what numpy makes of them)"""
    name = draw(st.sampled_from("ab"))
    whole = np.arange(24, dtype=np.int32).reshape(draw(st.sampled_from([(2, 3, 4), (24,), (1, 24), (6, 4)])))
    one, value = source(*whole.shape, name=name), whole + 100 * (name == "b")
    for _ in range(draw(st.integers(0, depth))):
        dim = draw(st.integers(0, max(0, value.ndim - 1)))
        kind = draw(st.sampled_from(["cut", "pick", "concat", "stack", "reshape", "transpose", "pad", "cast"]))
        if value.ndim == 0 and kind not in ("stack", "reshape"):
            continue
        if kind == "cut":
            low = draw(st.integers(0, value.shape[dim]))
            high = draw(st.integers(low, value.shape[dim]))
            one, value = expr.cut(one, dim, low, high), value[(slice(None),) * dim + (slice(low, high),)]
        elif kind == "pick" and value.shape[dim]:
            at = draw(st.integers(0, value.shape[dim] - 1))
            one, value = expr.pick(one, dim, at), value.take(at, dim)
        elif kind == "concat":
            one, value = expr.concat([one, one], dim), np.concatenate([value, value], dim)
        elif kind == "stack":
            one, value = expr.stack([one, one], dim), np.stack([value, value], dim)
        elif kind == "reshape":
            one, value = expr.reshape(one, (value.size,)), value.reshape(-1)
        elif kind == "transpose":
            axes = list(range(value.ndim))[::-1]
            one, value = expr.transpose(one, axes), value.transpose(axes)
        elif kind == "pad":
            one = expr.pad(one, dim, 1, value.shape[dim] + 1)
            value = np.pad(value, [(1, 0) if d == dim else (0, 0) for d in range(value.ndim)])
        elif kind == "cast":
            one, value = expr.cast(one, "int64"), value.astype(np.int64)
    return one, value


@settings(max_examples=400, deadline=None)
@given(expressions())
def test_what_is_contiguous_is_the_array_row_after_row(made):
    one, value = made
    found = expr.contiguous(one)
    if found is None:
        return
    stored = np.arange(24, dtype=np.int32)
    parts = [stored[start:stop] + 100 * (name == "b") for name, start, stop in found]
    assert np.concatenate([np.zeros(0, np.int32), *parts]).tolist() == value.reshape(-1).tolist()
    assert all(a[0] != b[0] or a[2] != b[1] for a, b in pairwise(found))


def test_what_moves_nothing_is_seen_through_and_what_moves_something_is_not():
    rows = expr.concat([expr.cut(source(6, 4), 0, 0, 2), expr.cut(source(6, 4), 0, 2, 3), source(2, 4, name="b")], 0)
    assert expr.contiguous(rows) == [("a", 0, 12), ("b", 0, 8)]
    assert expr.contiguous(expr.pick(expr.reshape(source(6, 4), (2, 3, 4)), 0, 1)) == [("a", 12, 24)]
    assert expr.contiguous(expr.cut(rows, 0, 2, 4)) == [("a", 8, 12), ("b", 0, 4)]
    assert expr.contiguous(expr.stack([source(2), source(2, name="b")], 0)) == [("a", 0, 2), ("b", 0, 2)]
    for moved in (
        expr.transpose(source(6, 4), [1, 0]),
        expr.cut(source(6, 4), 1, 0, 2),
        expr.pad(source(6, 4), 0, 1, 7),
        expr.cast(source(6), "int64"),
        expr.stack([source(6), source(6)], 1),
    ):
        assert expr.contiguous(moved) is None


# --- rules -----------------------------------------------------------------------------------------------------------


def test_values_too_deep_to_show_are_named_by_their_type():
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert _short(deep) == "a list"
    while deep:  # freed level by level: the destructor recurses too
        deep = deep.pop()


def a_map(*rest, **more):
    return rules.loads(json.dumps({"ckptfs_map": 1, "name": "m", "rules": list(rest), **more}))


def test_names_that_count_twice_fit_no_map():
    twice = a_map({"from": "w", "to": "w"}, strip=["module."], detect=["w"])
    assert twice.fits(["module.w"])
    assert not twice.fits(["module.w", "w"])


def test_ignored_sources_are_listed_and_a_view_says_how_many_targets_it_has():
    made = rules.compile_map(
        a_map({"from": "w", "to": "v"}, {"from": "x", "ignore": True}), {"w": ((2,), "int8"), "x": ((1,), "int8")}
    )
    assert made.ignored == ["x"]
    assert repr(made) == "<Mapped: 1 targets>"


def test_an_alias_is_dropped_again_by_the_inverse():
    there = a_map({"from": "w", "to": "w"}, {"alias": "tied", "of": "w"})
    back = rules.invert(there)
    sources = {"w": ((2,), "int8"), "tied": ((2,), "int8")}
    assert list(rules.compile_map(back, sources)) == ["w"]
    assert any(isinstance(rule, rules.Drop) for rule in back.rules)


# --- loadplan --------------------------------------------------------------------------------------------------------


def test_padding_between_files_is_not_read():
    layout = Layout((3, 4), 4, (2, 4), (1, 4), many=True)  # the second block has one row and one of padding
    assert loadplan._by_block(layout, 0, 64) == [(0, 32), (32, 48)]
    assert loadplan._by_block(layout, 48, 64) == []


# --- tags ------------------------------------------------------------------------------------------------------------


def there_and_back(value):
    return tree.unflatten(loads(tree.dumps(flatten({"v": value})[0])), None)["v"]


def refused(node, match="."):
    with pytest.raises(FormatError, match=match):
        loads(json.dumps(node))


def unsupported(value, match):
    with pytest.raises(MismatchError, match=match):
        flatten({"v": value})


def test_a_big_integer_is_hexadecimal():
    refused({"$": "int", "value": "0xG"})
    refused({"$": "timedelta", "value": [1, 2, 0.5]})
    refused({"$": "range", "value": [0, 1.5, 1]})


def test_dtypes_without_a_portable_description():
    titled = np.dtype({"names": ["a"], "formats": ["<f4"], "titles": ["A"]})
    unsupported(np.zeros(2, titled), "titles")
    unsupported(np.dtypes.StringDType(), "portable")
    unsupported(np.dtype(("<i4", [("low", "<i2"), ("high", "<i2")])), "portable")
    unsupported(np.zeros((), [("a", "O")])[()], "Python objects")


def test_dtypes_that_are_described_in_part():
    for node in (
        {"names": []},
        {"base": "<f4"},
        {"names": [], "formats": [], "offsets": [], "itemsize": 0, "aligned": 1},
    ):
        with pytest.raises(ValueError, match="not a dtype"):
            tags.json_to_dtype(node)


def test_dtypes_of_ml_dtypes_come_back():
    import ml_dtypes

    assert there_and_back(np.dtype(ml_dtypes.bfloat16)) == np.dtype(ml_dtypes.bfloat16)


def test_paths_of_another_system_are_pure_here():
    assert there_and_back(PureWindowsPath("a\\b")).parts == ("a", "b")
    found = tree.unflatten(loads(json.dumps({"$": "path", "type": "WindowsPath", "value": "a\\b"})), None)
    assert type(found).__name__ == "PureWindowsPath"


class Unnamed(enum.Enum):
    ONE = 1


def test_members_that_are_no_longer_their_class_s():
    member = Unnamed.ONE
    stray = object.__new__(Unnamed)
    stray._value_, stray._name_ = 7, "SEVEN"
    unsupported(stray, "without a name")
    assert there_and_back(member) is member
    refused({"$": "enum", "type": "m:E", "name": 3})


def test_names_of_torch_that_are_none():
    refused({"$": "torch.dtype", "value": "Float 32"})
    with pytest.raises(MismatchError, match="no dtype"):
        tree.unflatten({"$": "torch.dtype", "value": "float3"}, None)
    with pytest.raises(MismatchError, match="no device"):
        tree.unflatten({"$": "torch.device", "value": "abacus"}, None)


def test_torch_s_values_without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert tags.loaded_torch() is None
    assert tags.encode(b"x") is not None
    assert tags._encode_torch(3) is None
    with pytest.raises(MismatchError, match="install torch"):
        tree.unflatten({"$": "torch.dtype", "value": "float32"}, None)


# --- tree ------------------------------------------------------------------------------------------------------------


class Named(NamedTuple):
    x: int


class Annotated(Named):
    """Has a __dict__, unlike what it stems from."""


class Frozen:
    def __hash__(self):
        return 1

    def __eq__(self, other):
        return self is other


tree.register(Frozen, lambda value: 1, lambda value: Frozen(), name="test.Frozen")


def test_registered_classes_are_no_keys():
    with pytest.raises(MismatchError, match="as a dict key"):
        flatten({Frozen(): 1})


def test_plain_containers_with_attributes_are_refused():
    value = Annotated(1)
    value.note = "lost otherwise"
    unsupported(value, "attributes of its own")


def test_arrays_without_a_zarr_type_are_no_keys():
    writer = tree._Writer(0, False)
    writer.in_key = True
    with pytest.raises(MismatchError, match="as a dict key"):
        writer._single(np.zeros(1, "S3"))


def test_what_is_not_plain_json_is_no_tree():
    with pytest.raises(FormatError, match="not plain JSON"):
        tree.check({"a": b"x"})


def test_registered_values_of_ranks_are_merged():
    one = {"$": "user:test.Frozen", "value": {"a": 1}}
    other = {"$": "user:test.Frozen", "value": {"b": 2}}
    assert merge({0: one, 1: other}) == {"$": "user:test.Frozen", "value": {"a": 1, "b": 2}}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (collections.deque([1], 3), collections.deque([1], 4)),
        (collections.defaultdict(int, a=1), collections.defaultdict(list, a=1)),
    ],
)
def test_containers_of_ranks_differ_in_what_they_are(one, other):
    with pytest.raises(MismatchError, match="on rank 1"):
        merge({0: flatten({"v": one})[0], 1: flatten({"v": other})[0]})


def test_metadata_of_ranks_is_merged():
    first = collections.OrderedDict(a=1)
    first._metadata = {"": {"version": 1}}
    second = collections.OrderedDict(b=2)
    second._metadata = {"": {"version": 1}}
    merged = merge({0: flatten(first)[0], 1: flatten(second)[0]})
    assert tree.unflatten(merged, None)._metadata == {"": {"version": 1}}


def no_array(name, tag, target):
    raise AssertionError(name)


@pytest.mark.parametrize("structure", [dict, list, argparse.Namespace, types.SimpleNamespace, PerRank])
def test_a_structure_that_holds_arrays_is_not_replaced_by_a_value(structure):
    inside = np.zeros(1)
    made = {
        dict: lambda: {"w": inside},
        list: lambda: [inside],
        argparse.Namespace: lambda: argparse.Namespace(w=inside),
        types.SimpleNamespace: lambda: types.SimpleNamespace(w=inside),
        PerRank: lambda: [PerRank(inside)],
    }[structure]()
    done = fill({"v": made}, flatten({"v": 3})[0], no_array)
    assert len(done.mismatched) == 1
    assert fill({"v": {"a": 1}}, flatten({"v": 3})[0], no_array).tree == {"v": 3}
    assert fill({"v": [1, 2]}, flatten({"v": 3})[0], no_array).tree == {"v": 3}


def test_an_array_is_no_key():
    node = {"$": "dict", "items": [[{"$": "array", "name": "w", "as": "numpy"}, 1]]}
    with pytest.raises(FormatError):
        fill({}, node, no_array)


def test_big_endian_arrays_are_stored_native_and_come_back_as_they_were():
    node, (leaf,) = flatten({"v": np.arange(3, dtype=">i4")})
    assert leaf.value.dtype.isnative
    found = tree.unflatten(node, lambda name, tag: leaf.value)["v"]
    assert found.dtype == np.dtype(">i4")
    assert found.tolist() == [0, 1, 2]
    assert tree.unflatten(node, lambda name, tag: "a tensor")["v"] == "a tensor"


# --- saveplan --------------------------------------------------------------------------------------------------------


def test_a_rank_outside_a_mesh_holds_nothing():
    spread = ["mesh", [4], [2, 4], ["S0"]]
    assert mesh.Mesh(spread).coordinate(1) is None
    assert mesh.boxes_of(spread, (8, 2), 1) == []


def planned(spreads, shape, **more):
    """Rank 0's plan of one array, each rank's spread given."""
    descs = [([saveplan.Desc("w", "float32", shape, spread)], {}) for spread in spreads]
    chosen = saveplan.Options(chunk_bytes=64, block_bytes=64, extent_bytes=32, **more)
    return saveplan.Inputs(descs, list(range(len(descs))), chosen).plan(0)


def test_without_hand_over_flat_ranges_need_a_store_that_takes_them():
    halves = [["flat", 0, 20], ["flat", 20, 40]]
    assert planned(halves, (10, 4)).nbytes == 80
    assert planned(halves, (10, 4), positional=False).nbytes > 0
    with pytest.raises(MismatchError, match="flat ranges"):
        planned(halves, (10, 4), positional=False, handover=False)


def test_without_hand_over_flat_and_very_uneven_shards_are_stored_raw():
    zstd = {"compression": (("*", "zstd"),), "handover": False}
    (array,) = planned([["flat", 0, 20], ["flat", 20, 40]], (10, 4), **zstd).arrays
    assert (array.codec, array.note) == (None, "stored raw: flat shards do not end at chunk boundaries")
    cuts = [["boxes", [[[a, 0], [b, 4]]]] for a, b in [(0, 1000), (1000, 2001), (2001, 3001)]]
    (array,) = planned(cuts, (3001, 4), **zstd).arrays
    assert (array.codec, array.note) == (None, "stored raw: its shards have no useful common boundary")
    (array,) = planned(cuts, (3001, 4), compression=zstd["compression"]).arrays
    assert array.codec is not None
    assert array.note == ""


def test_a_description_that_no_rank_gave_is_left_out():
    whole = ([saveplan.Desc("w", "float32", (2,), ["whole"])], {})
    other = ([saveplan.Desc("v", "float32", (2,), ["whole"])], {})
    found = saveplan.plan([whole, other], [0], 0, saveplan.Options())
    assert [array.name for array in found.arrays] == ["w"]


def test_extents_of_huge_checkpoints_are_longer():
    mib = 1 << 20
    assert saveplan.extent_size(1 << 30, mib) == mib
    assert saveplan.extent_size((1 << 39) + 1, mib) == 2 * mib
    assert saveplan.extent_size(1 << 60, mib) == 8 * mib


# --- manifest --------------------------------------------------------------------------------------------------------

FILES = Layout((8, 4), 4, (4, 4), (4, 4), many=True)
CODED = Layout((8, 4), 4, (4, 4), (2, 4), many=True, compressed=True)


@pytest.mark.parametrize(
    ("layout", "runs", "match"),
    [
        (FILES, ((128, 1),), "fewer extents than files"),
        (FILES, ((63, 2),), "extents hold 126 bytes"),
        (FILES, ((32, 1), (96, 1)), "crosses from one file"),
        (CODED, ((20, 3),), "one extent per chunk"),
        (CODED, ((20, 3), (1 << 20, 1)), "far longer"),
    ],
)
def test_extents_that_do_not_fit_their_files(layout, runs, match):
    codec = Codec("zstd", 3) if layout.compressed else None
    with pytest.raises(FormatError, match=match):
        manifest._check_sum(layout, codec, runs, sum(count for _, count in runs))


def test_long_lists_of_extents_are_read_like_short_ones():
    raw = [[i % 7 + 1, i % 3 + 1] for i in range(manifest._LONG)]
    assert manifest._runs(raw) == (tuple(map(tuple, raw)), sum(n for _, n in raw))
    for lie in ([1.0, 1], [True, 1], [0, 1], [1, 0], [1], "ab", [1 << 62, 1], [1, 1 << 61]):
        with pytest.raises(FormatError):
            manifest._runs([*raw, lie])
    for lie in ([1.0, 1], [True, 1], [0, 1], [1, 0], [1], "ab"):
        with pytest.raises(FormatError):
            manifest._runs([lie])


# --- maps whose variables are not known ------------------------------------------------------------------------------


def test_a_length_before_that_is_not_known_is_not_compared():
    rule = {"from": "w", "to": "w", "ops": [{"op": "slice", "dim": 0, "size": 1, "of": "b"}]}
    assert rules.compile_map(a_map(rule), {"w": ((3,), "int8")})["w"].shape == (1,)
    with pytest.raises(MismatchError, match="expects 4 indices"):
        rules.compile_map(a_map(rule), {"w": ((3,), "int8")}, {"b": 4})


def test_strings_stand_for_themselves_or_in_base64():
    refused({"$": "path", "type": "PurePosixPath", "value": 3})
