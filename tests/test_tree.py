"""State trees: exact round trips, one named refusal per rule, merging ranks, and a parser that only fails as promised."""

import argparse
import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import json
import math
import pathlib
import pickle
import random
import struct
import subprocess
import sys
import types
from typing import Any, NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from ckptfs import tree as trees
from ckptfs.errors import ExistsError, FormatError, MismatchError, NotFoundError
from ckptfs.tree import PerRank, PerRankValues, dumps, encode_name, fill, flatten, loads, merge, names, unflatten

torch = pytest.importorskip("torch")


class Point(NamedTuple):
    x: Any
    y: Any


class Color(enum.Enum):
    RED = 1
    GREEN = 2


class Access(enum.IntFlag):
    READ = 1
    WRITE = 2


class Level(enum.IntEnum):
    LOW = 0


@dataclasses.dataclass
class Progress:
    step: int
    average: Any


@dataclasses.dataclass
class Unregistered:
    step: int


trees.register(
    Progress, lambda p: {"step": p.step, "average": p.average}, lambda d: Progress(**d), name="test.Progress"
)


# ---- the slow twin: are two trees the same, types and order and bits included? ----------------------------------------


def bits(value):
    return struct.pack(">d", value)


def same(one, two):
    if type(one) is not type(two):
        return False
    if isinstance(one, float) and type(one) is float:
        return bits(one) == bits(two)
    if type(one) is complex:
        return bits(one.real) == bits(two.real) and bits(one.imag) == bits(two.imag)
    if isinstance(one, torch.Tensor):
        return one.dtype == two.dtype and one.shape == two.shape and bool(torch.equal(one, two))
    if isinstance(one, (np.str_, np.bytes_)):
        return list(one) == list(two)
    if isinstance(one, (np.ndarray, np.generic)):
        return one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes()
    if isinstance(one, dict):
        extras = getattr(one, "default_factory", None) is getattr(two, "default_factory", None)
        metadata = same(getattr(one, "_metadata", None), getattr(two, "_metadata", None))
        return extras and metadata and same(list(one.items()), list(two.items()))
    if isinstance(one, (list, tuple, collections.deque)):
        together = len(one) == len(two) and all(same(a, b) for a, b in zip(one, two, strict=True))
        return together and getattr(one, "maxlen", None) == getattr(two, "maxlen", None)
    if isinstance(one, (set, frozenset)):
        return len(one) == len(two) and all(any(same(a, b) for b in two) for a in one)
    if isinstance(one, (argparse.Namespace, types.SimpleNamespace, Progress)):
        return same(vars(one), vars(two))
    if isinstance(one, slice):
        return same((one.start, one.stop, one.step), (two.start, two.stop, two.step))
    return repr(one) == repr(two) and (repr(one) == "Decimal('sNaN')" or one == two)


def round_trip(tree, **options):
    node, leaves = flatten(tree, **options)
    stored = {leaf.name: leaf.value for leaf in leaves}
    assert len(stored) == len(leaves)
    assert list(stored) == names(node)
    text = dumps(node)
    again = loads(text)
    assert dumps(again) == text
    return unflatten(again, lambda name, tag: stored[name], **({"rank": options["rank"]} if "rank" in options else {}))


# ---- strategies -------------------------------------------------------------------------------------------------------

any_text = st.text(st.characters(), max_size=6) | st.sampled_from(
    ["", "$", "$x", "a/b", "%", "..", ".", "x@rank0", "x~2", "1", "True", "é", "\ud800", "\ud83d\ude00", "\x00"]
)
fixed_zone = st.integers(-23 * 60, 23 * 60).map(lambda minutes: dt.timezone(dt.timedelta(minutes=minutes)))
hashable = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(2**62, 2**66),
    st.integers(0, 3),
    st.floats(allow_nan=False),
    any_text,
    st.binary(max_size=5),
    st.complex_numbers(allow_nan=False),
    st.sampled_from([*Color, *Access, Access.READ | Access.WRITE, Level.LOW, torch.bfloat16, torch.device("cuda", 1)]),
    st.sampled_from([torch.Size([2, 3]), torch.Size([]), np.dtype("<f8"), np.dtype(">i2"), ..., range(2, 9, 3)]),
    st.sampled_from([np.int64(3), np.float32(0.1), np.bool_(True), np.str_("a\0"), np.bytes_(b"b"), np.float16(2)]),
    st.decimals(allow_nan=False),
    st.fractions(),
    st.dates(),
    st.datetimes(timezones=st.none() | fixed_zone),
    st.times(),
    st.timedeltas(),
    any_text.filter(lambda text: "\0" not in text).map(pathlib.PurePosixPath),
    st.sampled_from([pathlib.Path("/ckpts/run7"), pathlib.PureWindowsPath("c:/x"), pathlib.Path(".")]),
)
keys = hashable | st.tuples(hashable, hashable) | st.frozensets(hashable, max_size=2)
arrays = st.sampled_from(
    [
        torch.arange(6).reshape(2, 3),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.zeros(0, 4),
        np.arange(3, dtype=">f4"),
        np.array(7, dtype=np.int16),
        np.zeros((2, 0), np.complex64),
        np.array(["a", "bcd"]),
        np.array([b"xy", b""]),
        np.array(["2024-01-02", "NaT"], dtype="datetime64[D]"),
        np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "<i4"), ("b", ">f8", (2,))]),
        np.zeros((3, 0), "<U2"),
        np.arange(2, dtype=np.longdouble),
    ]
)
singles = st.one_of(
    hashable,
    arrays,
    st.floats(),
    st.sampled_from(
        [math.nan, -math.nan, math.inf, -math.inf, -0.0, struct.unpack(">d", bytes.fromhex("7ff8000000000123"))[0]]
    ),
    st.complex_numbers(),
    st.binary(max_size=4).map(bytearray),
    st.sampled_from(
        [np.float32("nan"), np.float64("-inf"), np.complex64(1 + 2j), np.datetime64("2024-01-01T00:00", "s")]
    ),
    st.sampled_from(
        [slice(1, None, 2), slice(np.int64(2)), decimal.Decimal("sNaN"), np.dtype([("a", "u1"), ("b", "<f4")])]
    ),
    st.sampled_from([np.timedelta64(3, "D"), np.void(b"ab"), np.longdouble("0.1"), 2**70]),
)


def unique_keys(pairs):
    return dict(pairs)


def containers(children):
    mapping = st.lists(st.tuples(keys, children), max_size=4).map(unique_keys)
    texts = st.dictionaries(any_text, children, max_size=4)
    items = st.lists(children, max_size=4)
    return st.one_of(
        texts,
        mapping,
        items,
        items.map(tuple),
        mapping.map(collections.OrderedDict),
        st.tuples(st.sampled_from([None, list, dict, set, int]), mapping).map(lambda p: collections.defaultdict(*p)),
        st.dictionaries(keys, st.integers(), max_size=3).map(collections.Counter),
        st.tuples(children, children).map(lambda pair: Point(*pair)),
        st.sets(keys, max_size=3),
        st.frozensets(keys, max_size=3),
        items.map(lambda values: collections.deque(values, maxlen=5)),
        texts.map(lambda d: argparse.Namespace(**d)),
        texts.map(lambda d: types.SimpleNamespace(**d)),
        children.map(lambda value: Progress(3, value)),
    )


any_tree = st.recursive(singles, containers, max_leaves=12)
thorough = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=400)
quick = settings(thorough, max_examples=100)


# ---- round trips ------------------------------------------------------------------------------------------------------


@thorough
@given(any_tree)
def test_any_tree_comes_back_exactly(tree):
    assert same(round_trip(tree), tree)


@quick
@given(st.dictionaries(keys, any_tree, max_size=3))
def test_every_node_is_checked_and_stable(tree):
    node, leaves = flatten(tree)
    trees.check(node)
    assert flatten(tree)[0] == node
    assert [leaf.name for leaf in leaves] == names(node)


@pytest.mark.parametrize(
    ("one", "two"),
    [(1, True), (1, 1.0), (0.0, -0.0), ((1,), [1]), ({1: 2}, {"1": 2}), (b"a", bytearray(b"a")), ({1}, frozenset({1})),
     ({}, collections.OrderedDict()), (np.int32(1), np.int64(1)), ([1], torch.Size([1])), ({"a": 1, "b": 2}, {"b": 2, "a": 1})],
)  # fmt: skip
def test_lookalikes_stay_apart(one, two):
    assert dumps(flatten(one)[0]) != dumps(flatten(two)[0])
    assert same(round_trip(one), one)
    assert same(round_trip(two), two)


def test_real_training_state():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    schedulers = [
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2, 2]),
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9),
        torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [torch.optim.lr_scheduler.LinearLR(optimizer), torch.optim.lr_scheduler.ConstantLR(optimizer)],
            [2],
        ),
    ]
    tree = {
        "model": model.state_dict(),
        "optim": optimizer.state_dict(),
        "schedulers": [scheduler.state_dict() for scheduler in schedulers],
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
        # the legacy state is what most training loops still save
        "rng": [random.getstate(), np.random.get_state(), np.random.get_state(legacy=False), torch.get_rng_state()],  # noqa: NPY002
        "generators": [
            getattr(np.random, name)(5).state for name in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
        ],
        "args": argparse.Namespace(lr=1e-3, betas=(0.9, 0.95), out=pathlib.Path("runs"), dtype=torch.bfloat16),
        "loader": {
            "_snapshot": {"_last_yielded_worker_id": 1, "_worker_snapshots": {"worker_0": {"n": 3, "it": None}}}
        },
    }
    back = round_trip(tree)
    assert same(back, tree)
    assert back["model"]._metadata == model.state_dict()._metadata
    random.setstate(back["rng"][0])
    np.random.set_state(back["rng"][1])  # noqa: NPY002
    np.random.PCG64().state = back["generators"][0]
    torch.set_rng_state(back["rng"][3])


def test_ints_too_long_for_decimal_text_come_back():
    assert round_trip({"n": 10**5000, "m": -(2**63) - 1})["n"] == 10**5000


def test_enum_members_are_the_very_same():
    back = round_trip([Color.RED, Access.READ | Access.WRITE, Level.LOW])
    assert back[0] is Color.RED
    assert back[1] == Access(3)
    assert back[2] is Level.LOW


def test_namedtuple_of_a_class_that_is_not_imported_becomes_an_equivalent():
    node, _ = flatten(Point(1, (2, 3)))
    node["type"] = "no_such_module:Point"
    back = unflatten(node, None)
    assert (back.x, back.y) == (1, (2, 3))
    assert type(back).__name__ == "Point"
    assert flatten(back)[0] == node
    assert type(unflatten(node, None)) is type(back)


def test_namedtuple_of_a_class_with_other_fields_becomes_an_equivalent():
    node, _ = flatten(Point(1, 2))
    node["fields"] = ["x", "z"]
    assert unflatten(node, None).z == 2


def test_reading_imports_no_module_and_runs_no_code():
    node = {"$": "namedtuple", "type": "antigravity:Point", "fields": ["x"], "items": [1]}
    unflatten(node, None)
    assert "antigravity" not in sys.modules


def test_parameters_are_marked():
    node, leaves = flatten({"w": torch.nn.Parameter(torch.ones(2)), "b": torch.ones(2)})
    assert [tag["as"] for tag in trees.arrays(node)] == ["parameter", "torch"]
    assert leaves[0].path == ("w",)


def test_tensor_subclasses_are_leaves():
    class Sharded(torch.Tensor):
        pass

    tensor = torch.ones(2).as_subclass(Sharded)
    node, leaves = flatten([tensor])
    assert node == [{"$": "array", "name": "0", "as": "torch"}]
    assert leaves[0].value is tensor


def test_tied_leaves_keep_both_names():
    tensor = torch.ones(2)
    node, leaves = flatten({"embed": tensor, "head": tensor})
    assert names(node) == ["embed", "head"]
    assert leaves[0].value is leaves[1].value


def test_shared_containers_are_stored_twice():
    shared = [1]
    assert round_trip([shared, shared]) == [[1], [1]]


def test_pickle_round_trip_when_allowed_on_both_sides():
    node, _ = flatten({"f": fractions.Fraction, "o": np.array([{1}], dtype=object)}, allow_pickle=True)
    back = unflatten(loads(dumps(node)), None, allow_pickle=True)
    assert back["f"] is fractions.Fraction
    assert back["o"][0] == {1}


def test_no_torch_import():
    program = (
        "import sys, numpy as np; from ckptfs.tree import *; from ckptfs.tree import flatten, loads, dumps, unflatten\n"
        "node, leaves = flatten({'a': np.ones(2), 'b': (1, {2: np.float32(1)})})\n"
        "unflatten(loads(dumps(node)), lambda name, tag: None); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# ---- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (("model", "layers.0.weight"), "model/layers.0.weight"),
        (("a/b", "50%"), "a%2Fb/50%25"),
        (("state", 0, "step"), "state/0/step"),
        (("", "x"), "%00/x"),
        (("x@rank3",), "x%40rank3"),
        (("x~2",), "x%7E2"),
        (("x~y", "a@b"), "x~y/a@b"),
        ((True, None, 1.5, (1, "a")), "True/None/1.5/(1, 'a')"),
        ((-1,), "-1"),
        (("\ud800",), "%ED%A0%80"),
        ((), "value"),
    ],
)
def test_encode_name(path, name):
    assert encode_name(path) == name


@quick
@given(st.lists(any_text, min_size=1, max_size=3), st.lists(any_text, min_size=1, max_size=3))
def test_names_of_different_text_paths_differ(one, two):
    assert (encode_name(tuple(one)) == encode_name(tuple(two))) == (one == two)


def test_collisions_get_numbers_in_order():
    node, _ = flatten({1: np.ones(1), "1": np.ones(1), "1~2": np.ones(1), True and (1,): np.ones(1)})
    assert names(node) == ["1", "1~2", "1%7E2", "(1,)"]
    assert names(flatten({True: np.ones(1), "True": np.ones(1)})[0]) == ["True", "True~2"]


def test_root_leaf_is_named_value():
    assert names(flatten(np.ones(2))[0]) == ["value"]
    assert names(flatten(PerRank(np.ones(2)), rank=4)[0]) == ["value@rank4"]


def test_rank_suffix_stands_at_the_last_component():
    node, leaves = flatten({"rng": PerRank({"cpu": np.ones(1), "x@rank2": np.ones(1)})}, rank=2)
    assert names(node) == ["rng/cpu@rank2", "rng/x%40rank2@rank2"]
    assert leaves[0].path == ("rng", "cpu")


# ---- refusals, one test each --------------------------------------------------------------------------------------------


def refusal(tree, kind=MismatchError, **options):
    with pytest.raises(kind) as caught:
        flatten(tree, **options)
    return str(caught.value)


def test_unknown_object_is_refused_with_path_type_and_advice():
    text = refusal({"optim": {"state": {3: argparse.Namespace(foo=object())}}})
    assert text.startswith('optim["state"][3].foo: ')
    assert "builtins.object" in text
    assert "ckptfs.register" in text
    assert "allow_pickle=True" in text


def test_unregistered_dataclass_is_refused_with_a_hint():
    assert "ckptfs.register" in refusal({"a": Unregistered(1)})


@pytest.mark.parametrize("code", [lambda: 1, len, dict, json, random.random])
def test_code_is_refused(code):
    assert "Code is not state" in refusal([code])


def test_objects_with_a_state_dict_are_refused_with_a_hint():
    assert "state_dict()" in refusal({"model": torch.nn.Linear(1, 1)})


def test_object_array_is_refused():
    assert refusal({"x": np.array([{}], dtype=object)}).startswith("x: an array of Python objects")


def test_masked_array_is_refused():
    refusal(np.ma.masked_array([1, 2], [True, False]))


def test_cycle_is_refused():
    tree: dict[str, Any] = {"a": [1]}
    tree["a"].append(tree)
    assert refusal({"t": tree}).startswith('t["a"][1]: this container contains itself')


def test_deep_nesting_is_refused():
    tree: list[Any] = []
    for _ in range(10_000):
        tree = [tree]
    assert "containers inside each other" in refusal(tree)


def test_the_deepest_allowed_tree_comes_back():
    tree: Any = 1
    for index in range(trees.MAX_DEPTH):
        tree = {index: tree}
    assert same(round_trip(tree), tree)


def test_registered_class_that_yields_itself_is_refused():
    class Endless:
        pass

    trees.register(Endless, lambda value: Endless(), lambda value: value, name="test.Endless")
    assert "containers inside each other" in refusal(Endless())


def test_unknown_dict_subclass_is_refused():
    class Mine(dict):
        pass

    refusal(Mine(a=1))


def test_defaultdict_with_own_factory_is_refused():
    assert "factory" in refusal(collections.defaultdict(lambda: 0))


def test_ordered_dict_with_attributes_is_refused():
    value = collections.OrderedDict()
    value.note = "lost otherwise"
    assert "note" in refusal(value)


def test_array_as_key_is_refused():
    assert "an array as a dict key" in refusal({torch.ones(1): 1})
    assert "an array as a dict key" in refusal({torch.ones(1)})


def test_nan_keys_are_refused():
    assert "cannot be told apart" in refusal({float("nan"): 1, float("nan"): 2})


def test_nan_members_are_refused():
    assert "s: two members" in refusal({"s": {float("nan"), float("nan")}})


def test_nested_per_rank_is_refused():
    assert "PerRank inside" in refusal(PerRank([PerRank(1)]))


def test_datetime_with_rules_of_a_place_is_refused():
    class Summer(dt.tzinfo):
        def utcoffset(self, when):
            return dt.timedelta(hours=2)

        def dst(self, when):
            return dt.timedelta(hours=1)

    assert "astimezone" in refusal({"when": dt.datetime(2024, 6, 1, tzinfo=Summer())})


def test_str_subclass_is_refused():
    class Text(str):
        __slots__ = ()

    refusal([Text("a")])


def test_what_pickle_refuses_is_refused():
    assert "pickle refused" in refusal([lambda: 1], allow_pickle=True)


def test_pickle_is_refused_at_load():
    node, _ = flatten({"a": [object()]}, allow_pickle=True)
    with pytest.raises(MismatchError, match=r"a\[0\]: stored with pickle"):
        unflatten(node, None)


def test_class_not_registered_at_load_is_refused():
    with pytest.raises(MismatchError, match=r"x: .*ckptfs.register\(cls, to_json, from_json, name='gone'\)"):
        unflatten({"x": {"$": "user:gone", "value": 1}}, None)


def test_enum_not_imported_at_load_is_refused():
    with pytest.raises(MismatchError, match=r"x: the enum member no\.module:Color\.RED"):
        unflatten({"x": {"$": "enum", "type": "no.module:Color", "name": "RED"}}, None)


def test_unknown_torch_dtype_at_load_is_refused():
    with pytest.raises(MismatchError, match="no dtype 'float7'"):
        unflatten({"$": "torch.dtype", "value": "float7"}, None)
    with pytest.raises(MismatchError, match="no dtype 'load'"):
        unflatten({"$": "torch.dtype", "value": "load"}, None)


def test_failing_converters_are_named():
    with pytest.raises(MismatchError, match=r"x: from_json of the class registered as 'test.Progress' refused .*Type"):
        unflatten({"x": {"$": "user:test.Progress", "value": {"tep": 1}}}, None)
    broken = Progress(1, 2)
    del broken.step
    assert "to_json of the class registered as 'test.Progress' failed: AttributeError" in refusal([broken])


def test_name_registered_by_another_class_is_refused():
    with pytest.raises(ExistsError, match="belongs to"):
        trees.register(Unregistered, vars, Unregistered, name="test.Progress")
    with pytest.raises(MismatchError, match="no usable name"):
        trees.register(Unregistered, vars, Unregistered, name="a/b")


# ---- merge --------------------------------------------------------------------------------------------------------------


def node_of(tree, rank=0):
    return flatten(tree, rank=rank)[0]


@quick
@given(any_tree)
def test_merge_of_equal_trees_is_the_tree(tree):
    node = node_of(tree)
    assert merge({0: node}) == node
    assert dumps(merge({0: node, 1: loads(dumps(node)), 5: node})) == dumps(node)


key_sets = st.lists(st.sets(st.sampled_from(["a", "b", 1, (2,), "$", 2.5]), max_size=5), min_size=3, max_size=3)


@quick
@given(key_sets, st.sampled_from([dict, collections.OrderedDict]))
def test_merge_unites_keys_in_order_of_ranks_and_is_associative(sets, kind):
    rank_trees = [
        kind((key, [str(key), PerRank((rank, np.ones(1)))]) for key in some) for rank, some in enumerate(sets)
    ]
    nodes = {rank: node_of({"deep": tree}, rank) for rank, tree in enumerate(rank_trees)}
    merged = merge(nodes)
    trees.check(loads(dumps(merged)))
    left = merge({0: merge({0: nodes[0], 1: nodes[1]}), 2: nodes[2]})
    right = merge({0: nodes[0], 1: merge({1: nodes[1], 2: nodes[2]})})
    assert dumps(left) == dumps(right) == dumps(merged)
    order = list(dict.fromkeys(key for tree in rank_trees for key in tree))
    back = unflatten(merged, lambda name, tag: name)["deep"]
    assert type(back) is kind
    assert list(back) == order
    for key in order:
        holders = [rank for rank, tree in enumerate(rank_trees) if key in tree]
        assert list(back[key][1]) == holders
        assert all(value[0] == rank for rank, value in back[key][1].items())


def test_merge_unites_an_empty_dict_with_int_keys():
    assert merge({0: node_of({"state": {}}), 1: node_of({"state": {3: 1}})}) == node_of({"state": {3: 1}})
    assert merge({0: node_of({"a": 1}), 1: node_of({3: 1})}) == node_of({"a": 1, 3: 1})


@pytest.mark.parametrize(
    ("one", "two"),
    [(1, 2), (1, True), (1, 1.0), (0.0, -0.0), ([1], (1,)), ({}, []), (np.ones(1), 1), ({1}, {2}), (PerRank(1), 1),
     (np.ones(1), torch.ones(1)), ({}, collections.OrderedDict()), (None, {}), ("a", b"a")],
)  # fmt: skip
def test_merge_refuses_values_that_differ(one, two):
    with pytest.raises(MismatchError, match=r'optim\["x"\]\[1\] is .* on rank 2 and .* on rank 7; .*ckptfs\.PerRank\('):
        merge({2: node_of({"optim": {"x": [0, one]}}, 2), 7: node_of({"optim": {"x": [0, two]}}, 7)})


def test_merge_names_both_values():
    with pytest.raises(MismatchError, match=r'optim\["lr"\] is 0.1 on rank 0 and 0.2 on rank 3'):
        merge(
            {0: node_of({"optim": {"lr": 0.1}}), 1: node_of({"optim": {"lr": 0.1}}), 3: node_of({"optim": {"lr": 0.2}})}
        )


def test_merge_refuses_lists_of_different_length():
    with pytest.raises(MismatchError, match=r"a has 1 items on rank 0 and 2 on rank 1"):
        merge({0: node_of({"a": [1]}), 1: node_of({"a": [1, 2]})})


def test_merge_refuses_keys_whose_arrays_would_share_a_name():
    with pytest.raises(MismatchError, match="both be named '1'"):
        merge({0: node_of({1: np.ones(1)}), 1: node_of({"1": np.ones(1)})})


def test_merge_refuses_two_values_of_one_rank():
    with pytest.raises(MismatchError, match="is 1 on rank 0 and 2 on rank 1"):
        merge({0: node_of(PerRank(1), 5), 1: node_of(PerRank(2), 5)})


def test_merge_refuses_nothing():
    with pytest.raises(MismatchError, match="no rank"):
        merge({})


def test_per_rank_gives_each_rank_its_own():
    node = merge({rank: node_of({"rng": PerRank({"seed": rank, "t": np.ones(rank)})}, rank) for rank in range(11)})
    assert names(node)[:3] == ["rng/t@rank0", "rng/t@rank1", "rng/t@rank2"]
    assert unflatten(node, lambda name, tag: name, rank=10) == {"rng": {"seed": 10, "t": "rng/t@rank10"}}
    everything = unflatten(node, lambda name, tag: name)["rng"]
    assert type(everything) is PerRankValues
    assert list(everything) == list(range(11))
    with pytest.raises(
        NotFoundError, match=r"rng: no value stored for rank 11; it was saved per rank by 11 ranks \(0, 1"
    ):
        unflatten(node, None, rank=11)


# ---- fill ---------------------------------------------------------------------------------------------------------------


def filler(leaves):
    stored = {leaf.name: leaf.value for leaf in leaves}

    def array(name, tag, target):
        if target is None:
            return stored[name]
        target[...] = stored[name]
        return target

    return array


def test_fill_replaces_values_and_fills_arrays_in_place():
    node, leaves = flatten(
        {"step": 1000, "model": {"w": np.ones(2)}, "rng": (1, [2, 3]), "args": argparse.Namespace(lr=2)}
    )
    weights, model, inner, args = np.zeros(2), {}, [0, 0], argparse.Namespace(lr=1)
    model["w"] = weights
    state = {"step": 0, "model": model, "rng": (0, inner), "args": args}
    done = fill(state, node, filler(leaves))
    assert done == (state, [], [], [])
    assert done.tree is state
    assert state["step"] == 1000
    assert state["model"] is model
    assert model["w"] is weights
    assert weights.tolist() == [1, 1]
    assert state["rng"] == (1, [2, 3])
    assert state["rng"][1] is inner
    assert args.lr == 2


def test_fill_reports_what_does_not_fit_and_touches_nothing():
    node, leaves = flatten({"a": 1, "new": {"x": 2}, "m": {"w": np.ones(2), "n": 4}, "p": 3})
    target = {"a": 0, "old": 5, "m": {"w": np.zeros(2), "b": np.zeros(1)}, "p": np.zeros(1)}
    done = fill(target, node, filler(leaves))
    assert done.missing == ["old", 'm["b"]']
    assert done.unexpected == ["new", 'm["n"]'] or sorted(done.unexpected) == ['m["n"]', "new"]
    assert done.mismatched == ["p: an array here, 3 stored"]
    assert target["a"] == 0
    assert target["m"]["w"].tolist() == [0, 0]


def test_fill_without_strict_fills_what_fits():
    node, leaves = flatten({"a": 1, "new": 2, "w": np.ones(2)})
    target = {"a": 0, "old": 5, "w": np.zeros(2)}
    done = fill(target, node, filler(leaves), strict=False)
    assert (done.missing, done.unexpected) == (["old"], ["new"])
    assert target["a"] == 1
    assert target["old"] == 5
    assert "new" not in target
    assert target["w"].tolist() == [1, 1]


def test_fill_takes_everything_where_the_target_has_a_placeholder():
    stored = {"optim": {"state": {0: {"m": np.ones(2)}}}, "extra": [1, 2], "more": (np.ones(1), {"k": 1}), "list": [3]}
    node, leaves = flatten(stored)
    target = {"optim": {}, "extra": None, "more": 0, "list": []}
    done = fill(target, node, filler(leaves))
    assert done[1:] == ([], [], [])
    assert same(target, stored)


def test_fill_replaces_data_of_another_length_but_not_arrays():
    node, leaves = flatten({"seen": [1, 2, 3], "pair": (1,), "ws": [np.ones(1)]})
    target = {"seen": [0], "pair": (1, 2), "ws": [np.zeros(1), np.zeros(1)]}
    done = fill(target, node, filler(leaves))
    assert [text.split(":")[0] for text in done.mismatched] == ["ws"]
    done = fill(target, node, filler(leaves), strict=False)
    assert target["seen"] == [1, 2, 3]
    assert target["pair"] == (1,)
    assert len(target["ws"]) == 2


def test_fill_gives_each_rank_its_own():
    node = merge({rank: node_of({"rng": PerRank((rank, 7))}, rank) for rank in range(2)})
    assert fill({"rng": PerRank((0, 0))}, node, None, rank=1).tree == {"rng": PerRank((1, 7))}
    assert fill({"rng": (0, 0)}, node, None, rank=1).tree == {"rng": (1, 7)}


def test_fill_rebuilds_namedtuples_and_counters():
    node, leaves = flatten({"p": Point(np.ones(1), 2), "c": collections.Counter([1, 1])})
    target = {"p": Point(np.zeros(1), 0), "c": collections.Counter([5])}
    x = target["p"].x
    fill(target, node, filler(leaves))
    assert target["p"].x is x
    assert target["p"].y == 2
    assert target["c"] == collections.Counter([1, 1])


@quick
@given(any_tree)
def test_fill_of_the_same_tree_is_the_same_tree(tree):
    node, leaves = flatten(tree)
    stored = {leaf.name: leaf.value for leaf in leaves}
    done = fill(tree, node, lambda name, tag, target: stored[name] if target is None else target)
    assert done[1:] == ([], [], [])
    assert dumps(flatten(done.tree)[0]) == dumps(node)


# ---- the strict parser ----------------------------------------------------------------------------------------------------

LIES = {
    "duplicate key": '{"a":1,"a":2}',
    "NaN": "[NaN]",
    "Infinity": "[-Infinity]",
    "overflowing float": "[1e999]",
    "overflowing int": "[18446744073709551616]",
    "endless int": "[" + "9" * 100_000 + "]",
    "minus zero int": "[-0]",
    "not JSON": "[1",
    "trailing text": "[1] 2",
    "empty": "",
    "not UTF-8": b'["\xff"]',
    "recursion bomb of lists": "[" * 100_000,
    "closed recursion bomb": "[" * 5000 + "]" * 5000,
    "recursion bomb of tuples": '{"$":"tuple","items":[' * 300 + "]}" * 300,
    "recursion bomb of keys": '{"$":"frozenset","items":[' * 300 + "]}" * 300,
    "recursion bomb of dtypes": '{"$":"numpy.dtype","value":' + '{"shape":[1],"base":' * 100 + '"<f4"' + "}" * 101,
    "lone surrogate": '["\\ud800"]',
    "unknown tag": '{"$":"lambda"}',
    "tag that is no string": '{"$":1}',
    "marker key without tag": '{"$x":1}',
    "too many fields": '{"$":"tuple","items":[],"x":1}',
    "too few fields": '{"$":"tuple"}',
    "items no list": '{"$":"tuple","items":{}}',
    "pair of three": '{"$":"dict","items":[[1,2,3]]}',
    "duplicate pair": '{"$":"dict","items":[[1,2],[1,3]]}',
    "list as a key": '{"$":"dict","items":[[[1],2]]}',
    "array as a key": '{"$":"dict","items":[[{"$":"array","name":"a","as":"numpy"},2]]}',
    "bytearray as a member": '{"$":"set","items":[{"$":"bytearray","b64":""}]}',
    "member twice": '{"$":"set","items":[1,1]}',
    "unknown factory": '{"$":"defaultdict","factory":"eval","items":[]}',
    "slice of two": '{"$":"slice","items":[1,2]}',
    "overfull deque": '{"$":"deque","maxlen":1,"items":[1,2]}',
    "negative maxlen": '{"$":"deque","maxlen":-1,"items":[]}',
    "namedtuple field that is code": '{"$":"namedtuple","type":"a:B","fields":["x=print()"],"items":[1]}',
    "namedtuple with too few items": '{"$":"namedtuple","type":"a:B","fields":["x","y"],"items":[1]}',
    "class without module": '{"$":"namedtuple","type":"B","fields":["x"],"items":[1]}',
    "array without a name": '{"$":"array","name":"","as":"numpy"}',
    "array name with an empty component": '{"$":"array","name":"a//b","as":"numpy"}',
    "two arrays of one name": '[{"$":"array","name":"a","as":"numpy"},{"$":"array","name":"a","as":"torch"}]',
    "array of an unknown kind": '{"$":"array","name":"a","as":"jax"}',
    "big-endian tensor": '{"$":"array","name":"a","as":"torch","byteorder":"big"}',
    "no ranks": '{"$":"per_rank","ranks":{}}',
    "rank 01": '{"$":"per_rank","ranks":{"01":1}}',
    "rank inside a rank": '{"$":"per_rank","ranks":{"0":{"$":"per_rank","ranks":{"0":1}}}}',
    "pickle without base64": '{"$":"pickle","b64":"?"}',
    "bytes without base64": '{"$":"bytes","b64":"a"}',
    "small int in hex": '{"$":"int","value":"0x1"}',
    "finite float as a tag": '{"$":"float","value":"1.0"}',
    "infinity posing as NaN": '{"$":"float","value":"nan:7ff0000000000000"}',
    "dtype of objects in an array": '{"$":"ndarray","dtype":"|O","shape":[1],"b64":"AAAAAAAAAAA="}',
    "array with too few bytes": '{"$":"ndarray","dtype":"<U1","shape":[1000000000000],"b64":""}',
    "array with a negative size": '{"$":"ndarray","dtype":"<U1","shape":[-1],"b64":""}',
    "dtype that is code": '{"$":"numpy.dtype","value":"f4,(2,)i8"}',
    "huge item size": '{"$":"numpy.dtype","value":"|V99999999999999999999"}',
    "scalar out of range": '{"$":"numpy","dtype":"|u1","value":300}',
    "half that overflows": '{"$":"numpy","dtype":"<f2","value":1e9}',
    "dtype alias that numpy warns of": '{"$":"numpy.dtype","value":"|a3"}',
    "scalar of another kind": '{"$":"numpy","dtype":"|u1","value":true}',
    "scalar without value": '{"$":"numpy","dtype":"|u1"}',
    "division by zero": '{"$":"fraction","value":[1,0]}',
    "range without steps": '{"$":"range","value":[0,1,0]}',
    "no date": '{"$":"date","value":"2024-13-01"}',
    "absurd timedelta": '{"$":"timedelta","value":[99999999999,0,0]}',
    "unknown path class": '{"$":"path","type":"Path2","value":"a"}',
    "enum with name and value": '{"$":"enum","type":"a:B","name":"C","value":1}',
    "negative size": '{"$":"torch.Size","value":[-1]}',
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_tree_that_lies_is_refused(lie):
    with pytest.raises(FormatError):
        loads(LIES[lie])


def test_keys_that_python_takes_for_equal_are_refused_when_read():
    with pytest.raises(FormatError, match="two keys"):
        unflatten(loads('{"$":"dict","items":[[1,2],[true,3]]}'), None)
    with pytest.raises(FormatError, match="two keys"):
        unflatten(loads('{"$":"set","items":[1,1.0]}'), None)


def read_or_refuse(text):
    """A tree, or one of our errors; everything else escapes and fails the test."""
    try:
        node = loads(text)
    except FormatError:
        return
    assert loads(dumps(node)) == node
    try:
        unflatten(node, lambda name, tag: None)
    except (FormatError, MismatchError):
        return


@thorough
@given(any_tree, st.data())
def test_changed_text_is_a_tree_or_a_format_error(tree, data):
    text = bytearray(dumps(flatten(tree)[0]))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        text[at : at + data.draw(st.integers(0, 3))] = data.draw(
            st.binary(max_size=3) | st.sampled_from([b"null", b"[]", b"{}", b'"$"', b"1", b"-1", b'""', b"1e5", b","])
        )
    read_or_refuse(bytes(text))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(0, 1) | st.sampled_from(["", "a", "0x1", "AA==", "<f4", "nan", "2024-01-01"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "0", "shape", "base"]), inner, max_size=2),
    max_leaves=5,
)  # fmt: skip
ALL_FIELDS = sorted({"value", "b64", "dtype", "shape", "re", "im", "type", "name", "fold", *(f for r, o in trees._FIELDS.values() for f in r | o)})  # fmt: skip


@thorough
@given(st.sampled_from([*trees._FIELDS, *trees.tags.TAGS, "user:a"]), st.data())
def test_any_shape_of_any_tag_is_a_tree_or_a_format_error(tag, data):
    known = trees.tags.TAGS.get(tag)
    required, optional = (known.fields, known.optional) if known else trees._FIELDS.get(tag, ({"value"}, set()))
    fields = set(required) | data.draw(st.sets(st.sampled_from(sorted(optional) or ALL_FIELDS), max_size=2))
    read_or_refuse(json.dumps({"$": tag, **{field: data.draw(json_values) for field in sorted(fields)}}))


def test_pickle_is_never_imported_by_reading():
    program = (
        "import sys; before = 'pickle' in sys.modules\n"
        "from ckptfs.tree import loads, unflatten\n"
        "import builtins; builtins.__dict__['hit'] = []\n"
        "import pickle; pickle.loads = lambda raw: hit.append(raw)\n"
        'try: unflatten(loads(\'{"$":"pickle","b64":"gAQu"}\'), None)\n'
        "except ValueError as problem: assert 'allow_pickle' in str(problem)\n"
        "assert not hit"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_errors_travel_between_ranks():
    with pytest.raises(MismatchError) as caught:
        flatten([object()])
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
