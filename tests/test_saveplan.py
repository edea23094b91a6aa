"""Plans against slow twins: what torch would hold, who writes each byte, how much, and every way to disagree."""

from collections import Counter
from dataclasses import replace
from itertools import product
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs import dtypes
from ckptfs.box import Box
from ckptfs.errors import MismatchError
from ckptfs.mesh import Mesh, boxes_of, intervals
from ckptfs.ranges import cut, cut_evenly, merge, share
from ckptfs.saveplan import Desc, Options, describe, parse, plan
from ckptfs.shards import hold
from spreads import chunks, local_indices, random_array, shapes, splits, spreadings, strided

SMALL = Options(chunk_bytes=64, block_bytes=256, extent_bytes=32)


# --- intervals -------------------------------------------------------------------------------------------------------


@st.composite
def cuts(draw):
    out = []
    for _ in range(draw(st.integers(0, 3))):
        parts = draw(st.integers(1, 5))
        out.append((parts, draw(st.integers(0, parts - 1)), draw(st.integers(1, 4))))
    return tuple(out)


@given(st.integers(0, 60), cuts())
def test_intervals_are_what_torch_would_hold(length, made):
    held = list(range(length))
    for parts, which, factor in made:
        held = strided(held, parts, factor)[which] if factor > 1 else chunks(held, parts)[which]
    assert [i for a, b in intervals(length, made) for i in range(a, b)] == held
    assert all(a < b or length == 0 for a, b in intervals(length, made))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple), st.data())
def test_replicas_hold_the_same_and_all_together_everything(shape, data):
    mesh_shape = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple))
    places = [
        data.draw(st.sampled_from(["R", f"S{d}", f"SS{d}:2"]))
        for d in (data.draw(st.integers(0, len(shape) - 1)) for _ in mesh_shape)
    ]
    ranks = data.draw(st.permutations(range(10, 10 + prod(mesh_shape))))
    mesh = Mesh(["mesh", list(mesh_shape), list(ranks), places])
    seen = Counter()
    for at, coordinate in zip(ranks, product(*map(range, mesh_shape)), strict=True):
        assert mesh.coordinate(at) == coordinate
        held = [[i for a, b in axis for i in range(a, b)] for axis in mesh.local(shape, coordinate)]
        assert held == local_indices(shape, mesh_shape, places, coordinate)
        alike = [
            rank
            for rank, other in zip(ranks, product(*map(range, mesh_shape)), strict=True)
            if all(p == "R" or a == b for p, a, b in zip(places, coordinate, other, strict=True))
        ]
        assert mesh.replicas(coordinate) == tuple(sorted(alike))
        for index in product(*held):
            seen[index] += 1
    copies = prod(n for n, p in zip(mesh_shape, places, strict=True) if p == "R")
    assert seen == Counter(dict.fromkeys(product(*map(range, shape)), copies))
    assert mesh.coordinate(9) is None
    assert mesh.coordinate(10 + prod(mesh_shape)) is None


def test_a_mesh_of_consecutive_ranks_is_written_short():
    assert Mesh(["mesh", [2, 2], [4, 4], ["R", "S0"]]).coordinate(7) == (1, 1)
    assert Mesh(["mesh", [2], [4, 1], ["S0"]]).coordinate(1) == (1,)
    assert Mesh(["mesh", [1], [4, 1], ["S0"]]).coordinate(4) == (0,)
    assert Mesh(["mesh", [1, 2], [0, 5], ["R", "S0"]]).coordinate(5) == (0, 1)


# --- the plan --------------------------------------------------------------------------------------------------------


def descriptions_of(leaves_by_rank):
    """As ranks would exchange them: distinct descriptions, and which one each rank gave."""
    raw = []
    for rank, leaves in enumerate(leaves_by_rank):
        raw.append(describe(sorted((hold(n, v, rank).desc for n, v in leaves.items()), key=lambda d: d.name), {}))
    distinct = list(dict.fromkeys(raw))
    return [parse(one) for one in distinct], [distinct.index(one) for one in raw]


@st.composite
def worlds(draw, kinds=("whole", "mesh", "flat", "boxes")):
    world = draw(st.integers(1, 6))
    arrays, spread = {}, {}
    for number in range(draw(st.integers(1, 4))):
        shape = draw(shapes(300))
        name = f"a{number}"
        arrays[name] = random_array(shape, draw(st.sampled_from(["uint8", "float32", "complex128"])), number)
        spread[name] = draw(spreadings(shape, world, kinds=kinds))
    leaves = [
        {name: leaf for name, full in arrays.items() if (leaf := spread[name].leaf(full, rank)) is not None}
        for rank in range(world)
    ]
    return arrays, leaves


def with_split(chosen, arrays, data):
    return replace(chosen, split=tuple(data.draw(splits({name: full.shape for name, full in arrays.items()})).items()))


options = st.builds(
    Options,
    chunk_bytes=st.sampled_from([16, 64, 4096]),
    block_bytes=st.sampled_from([64, 512]),
    extent_bytes=st.sampled_from([16, 32, 1024]),
)


@settings(max_examples=150)
@given(worlds(), options, st.data())
def test_every_stored_byte_has_exactly_one_writer_who_holds_it(made, chosen, data):
    arrays, leaves = made
    chosen = with_split(chosen, arrays, data)
    descs, of_rank = descriptions_of(leaves)
    plans = [plan(descs, of_rank, rank, chosen) for rank in range(len(leaves))]
    for number, array in enumerate(plans[0].arrays):
        assert all(one.arrays[number] == array for one in plans)
        writers = np.zeros(array.layout.logical_bytes, int)
        for rank, one in enumerate(plans):
            ranges = one.pieces.get(number, [])
            assert ranges == merge(ranges)
            for a, b in ranges:
                assert a % array.layout.itemsize == b % array.layout.itemsize == 0
                writers[a:b] += 1
            held = np.zeros(arrays[array.name].shape, bool)
            if array.name in leaves[rank]:
                for box, _ in hold(array.name, leaves[rank][array.name], rank).pieces:
                    held[box.slices] = True
            for a, b in ranges:
                for _, valid, _ in array.layout.parts(a, b):
                    assert held[valid.slices].all(), "a rank writes what it does not hold"
        assert (writers == 1).all()


@settings(max_examples=150)
@given(st.integers(1, 7), st.lists(st.integers(0, 700), min_size=1, max_size=6), st.sampled_from([16, 64, 256]))
def test_replicas_write_equal_shares(world, lengths, extent):
    """With R replicas nobody writes more than total / R and one extent."""
    descs = [Desc(f"a{i}", "uint8", (n,), ["whole"]) for i, n in enumerate(lengths)]
    chosen = replace(SMALL, extent_bytes=extent, chunk_bytes=1 << 20)
    plans = [plan([(descs, {})], [0] * world, rank, chosen) for rank in range(world)]
    stored = sum(a.layout.logical_bytes for a in plans[0].arrays)
    assert sum(p.nbytes for p in plans) == stored
    assert max(p.nbytes for p in plans) <= stored / world + extent


@given(st.data())
def test_shares_are_whole_units_and_give_out_everything_once(data):
    parts, at = [], 0
    for number in range(data.draw(st.integers(1, 4))):
        ranges = []
        for _ in range(data.draw(st.integers(1, 3))):
            start = at + data.draw(st.integers(0, 40))
            at = start + data.draw(st.integers(1, 90))
            ranges.append((start, at))
        parts.append((number, ranges))
    unit = {number: data.draw(st.sampled_from([8, 16])) for number, _ in parts}
    count = data.draw(st.integers(1, 5))
    owner = {}
    for which in range(count):
        for number, taken in share(parts, unit, count, which):
            for a, b in taken:
                for byte in range(a, b):
                    assert (number, byte) not in owner
                    owner[number, byte] = which
    units = [(n, x, y) for n, ranges in parts for a, b in ranges for x, y in cut(a, b, unit[n])]
    assert sorted(owner) == sorted((n, i) for n, x, y in units for i in range(x, y))
    total, position, expected = len(owner), 0, {}
    for n, x, y in units:  # a unit belongs to the share that its first byte lies in
        expected[n, x] = max(w for w in range(count) if -(-total * w // count) <= position)
        position += y - x
    assert {(n, x): owner[n, x] for n, x, _ in units} == expected
    assert all(owner[n, i] == owner[n, x] for n, x, y in units for i in range(x, y)), "a unit was split"


@given(st.integers(0, 200), st.integers(0, 200), st.integers(1, 50))
def test_cut_is_at_multiples(start, length, size):
    found = cut(start, start + length, size)
    assert [i for a, b in found for i in range(a, b)] == list(range(start, start + length))
    assert all(a // size == (b - 1) // size for a, b in found)
    assert all(b % size == 0 for _, b in found[:-1])


# --- ranks that disagree ---------------------------------------------------------------------------------------------


def of(*descs):
    return [([d], {}) for d in descs], list(range(len(descs)))


@pytest.mark.parametrize(
    ("descs", "match"),
    [
        (
            [Desc("w", "float32", (2,), ["whole"]), Desc("w", "float32", (3,), ["whole"])],
            r"on rank 0 .* rank 1.*PerRank",
        ),
        ([Desc("w", "float32", (2,), ["whole"]), Desc("w", "int32", (2,), ["whole"])], "PerRank"),
        (
            [Desc("w", "float32", (2,), ["whole"]), Desc("w", "float32", (2,), ["mesh", [2], [0, 1], ["S0"]])],
            "must describe an array alike",
        ),
        (
            [
                Desc("w", "float32", (4,), ["mesh", [2], [0, 1], ["R"]]),
                Desc("w", "float32", (4,), ["mesh", [2], [0, 1], ["S0"]]),
            ],
            "must describe an array alike",
        ),
        ([Desc("w", "float32", (4,), ["flat", 0, 3]), Desc("w", "float32", (4,), ["flat", 2, 4])], "overlaps"),
        ([Desc("w", "float32", (4,), ["flat", 0, 1]), Desc("w", "float32", (4,), ["flat", 2, 4])], "3 of 4 elements"),
        ([Desc("w", "float32", (4,), ["boxes", [[[0], [5]]]])], "leaves the shape"),
        ([Desc("w", "float32", (4,), ["boxes", []])], "0 of 4 elements"),
    ],
)
def test_ranks_that_disagree_are_told(descs, match):
    made, of_rank = of(*descs)
    with pytest.raises(MismatchError, match=match) as caught:
        plan(made, of_rank, 0, SMALL)
    assert "'w'" in str(caught.value)


def test_a_mesh_whose_ranks_are_not_all_there_is_refused():
    """Rank 1 of the mesh did not describe the array: its half would be a hole."""
    with pytest.raises(MismatchError, match="rank 1"):
        plan([([Desc("w", "float32", (4,), ["mesh", [2], [0, 1], ["S0"]])], {}), ([], {})], [0, 1], 0, SMALL)


def test_a_mesh_named_by_a_rank_outside_of_it_is_fine():
    """Tensor parallelism inside one half of the job: ranks outside the mesh know the parameter too."""
    desc = Desc("w", "float32", (4,), ["mesh", [1, 2], [0, 1], ["R", "S0"]])
    plans = [plan([([desc], {})], [0, 0, 0], rank, SMALL) for rank in range(3)]
    assert [p.nbytes for p in plans] == [8, 8, 0]


# --- ties ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positional", [True, False])
@given(
    rows=st.integers(1, 60), columns=st.integers(1, 60), parts=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    ranks=st.integers(1, 4), data=st.data(),
)  # fmt: skip
def test_a_part_that_was_asked_for_is_stored_together(positional, rows, columns, parts, ranks, data):
    """Whoever saves it: the columns of a part, as torch.chunk cuts them, are one run for each part of the rows."""
    kind = data.draw(st.sampled_from([["whole"], ["mesh", [ranks], list(range(ranks)), ["S0"]]]))
    desc = Desc("w", "float32", (rows, columns), kind)
    config = Options(positional=positional, split=(("w", parts),), handover=False)
    (array,) = plan([([desc], {})], [0] * ranks, 0, config).arrays
    numbers = np.arange(rows * columns).reshape(rows, columns)
    assert array.note == ""
    for panel in torch.from_numpy(numbers).chunk(parts[1], 1):
        low, high = int(panel[0, 0]), int(panel[0, -1]) + 1
        runs = array.layout.ranges(Box((0, low), (rows, high)))
        assert len(merge(runs)) <= (1 if positional else array.layout.grid[0])


@pytest.mark.parametrize(
    ("split", "match"),
    [
        ({"*.wo": (1, 8)}, r"no array has a name like '\*\.wo'; there are 'b', 'w'"),
        ({"w": (1, 2), "*": (1, 2)}, r"'b' of shape \[4\] cannot be cut into \(1, 2\) parts: narrow"),
    ],
)
def test_a_split_that_does_not_fit_is_refused(split, match):
    descs = [Desc("b", "float32", (4,), ["whole"]), Desc("w", "float32", (4, 4), ["whole"])]
    with pytest.raises(MismatchError, match=match):
        plan([(descs, {})], [0], 0, replace(SMALL, split=tuple(split.items())))


def test_the_first_pattern_that_fits_says_how_an_array_is_split():
    descs = [Desc(name, "float32", (8, 8), ["whole"]) for name in ("a.wo", "b.wo")]
    arrays = plan([(descs, {})], [0], 0, replace(SMALL, split=(("a*", (1, 4)), ("*.wo", (2, 2))))).arrays
    assert [array.layout.block[1] for array in arrays] == [2, 4]


def test_parts_that_are_too_narrow_stay_in_rows_and_the_save_says_so():
    desc = Desc("w", "float32", (4, 9000), ["whole"])
    (array,) = plan([([desc], {})], [0], 0, Options(split=(("w", (1, 9000)),))).arrays
    assert array.layout.row_major
    assert array.note.startswith("stored in rows: ")


def test_objects_that_would_be_too_small_stay_in_rows_and_the_save_says_so():
    desc = Desc("w", "float32", (64, 64), ["whole"])
    (array,) = plan([([desc], {})], [0], 0, Options(positional=False, split=(("w", (1, 32)),))).arrays
    assert array.layout.grid == (1, 1)
    assert array.note.startswith("stored in rows: ")


def test_a_tied_array_is_split_by_any_of_its_names():
    desc = Desc("embed", "float32", (8, 8), ["whole"])
    (array,) = plan([([desc], {"head": "embed"})], [0], 0, replace(SMALL, split=(("head", (1, 4)),))).arrays
    assert array.layout.block == (8, 2)


def test_flat_shards_stay_in_rows_and_the_save_says_so():
    descs = [Desc("w", "float32", (8, 8), ["flat", a, a + 32]) for a in (0, 32)]
    made, of_rank = of(*descs)
    (array,) = plan(made, of_rank, 0, replace(SMALL, split=(("w", (1, 4)),))).arrays
    assert array.layout.row_major
    assert array.note.startswith("stored in rows: it has flat shards")


def test_ties_that_only_some_ranks_see_are_stored_once():
    """Rank 1 has b tied to a; rank 0 holds both apart: then both are stored, and nothing is lost."""
    a, b = Desc("a", "float32", (4,), ["whole"]), Desc("b", "float32", (4,), ["whole"])
    plans = [plan([([a, b], {}), ([a], {"b": "a"})], [0, 1], rank, SMALL) for rank in range(2)]
    assert [x.name for x in plans[0].arrays] == ["a", "b"]
    assert "b" not in plans[0].aliases
    assert sum(p.nbytes for p in plans) == 32


def test_ties_of_pipeline_stages_that_hold_one_name_each():
    """Stage 0 has the embedding only, stage 1 the head tied to it under the other name order: no hole, no lie."""
    a, b = Desc("a", "float32", (4,), ["whole"]), Desc("b", "float32", (4,), ["whole"])
    plans = [plan([([a], {}), ([a], {"b": "a"}), ([b], {})], [0, 1, 2], rank, SMALL) for rank in range(3)]
    names = [x.name for x in plans[0].arrays]
    assert ("b" in names) != ("b" in plans[0].aliases)
    assert all(target in names for target in plans[0].aliases.values())


def test_chains_of_ties_end_at_a_stored_array():
    a, b, c = (Desc(n, "float32", (4,), ["whole"]) for n in "abc")
    made = [([a, c], {"b": "a"}), ([b], {"c": "b"}), ([a, b, c], {})]
    made = made[:2]
    plans = [plan(made, [0, 1], rank, SMALL) for rank in range(2)]
    names = [x.name for x in plans[0].arrays]
    assert set(names) | set(plans[0].aliases) == {"a", "b", "c"}
    assert not set(names) & set(plans[0].aliases)
    assert all(target in names for target in plans[0].aliases.values())


def test_descriptions_are_canonical():
    d = Desc("é/x", "bfloat16", (2, 0), ["mesh", [2], [0, 1], ["S0"]])
    assert describe([d], {"b": "a", "a": "c"}) == describe([d], {"a": "c", "b": "a"})
    assert parse(describe([d], {"x": "y"})) == ([d], {"x": "y"})
    assert dtypes.of(d.dtype).itemsize == 2
    assert boxes_of(["whole"], (), 3)[0].size == 1


@given(st.integers(0, 5), st.integers(0, 500), st.integers(1, 20), st.integers(1, 60))
@settings(max_examples=1000)
def test_even_cuts_tile_the_range_between_grains(first, length, grain, quarters):
    start, stop, most = first * grain, first * grain + length, max(1, quarters * grain // 4)
    parts = cut_evenly(start, stop, most, grain)
    assert [x for a, b in parts for x in range(a, b)] == list(range(start, stop))
    assert all(0 < b - a <= most for a, b in parts)
    if most >= 3 * grain:
        assert all(a % grain == 0 for a, _ in parts[1:])
        assert (
            max((b - a for a, b in parts[1:-1]), default=0) - min((b - a for a, b in parts[1:-1]), default=0) <= grain
        )
    if length <= most:
        assert len(parts) <= 1
