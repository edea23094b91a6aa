"""Who writes what others hold, against an obvious twin: every byte one writer, every byte that changes hands held by its
giver, both sides agreeing about it, and the members of a party writing equally much.
"""

from collections import defaultdict
from dataclasses import replace
from math import prod

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs.mesh import Mesh
from ckptfs.parties import span_for
from ckptfs.ranges import deal, intersect, share
from ckptfs.saveplan import Desc, Inputs, Options, plan, stand_ins
from ckptfs.shards import hold
from test_saveplan import descriptions_of, with_split, worlds

EAGER = {"handover_ranks": 2, "files_per_rank": 0}
options = st.builds(
    Options,
    positional=st.booleans(),
    chunk_bytes=st.sampled_from([16, 64, 4096]),
    block_bytes=st.sampled_from([64, 512]),
    extent_bytes=st.sampled_from([16, 32, 1024]),
    compression=st.sampled_from([(), (("*", "zstd"),), (("a0", "blosc"),)]),
    handover_ranks=st.sampled_from([2, 3]),
    files_per_rank=st.sampled_from([0, 1]),
    large_bytes=st.sampled_from([16, 1 << 20]),
)


def holders(arrays, leaves, array):
    """rank → which elements of the array it holds."""
    held = np.zeros((len(leaves), *arrays[array.name].shape), bool)
    for rank, of_rank in enumerate(leaves):
        if array.name in of_rank:
            for box, _ in hold(array.name, of_rank[array.name], rank).pieces:
                held[(rank, *box.slices)] = True
    return held


@settings(max_examples=300)
@given(worlds(), options, st.data())
def test_every_byte_has_one_writer_who_holds_it_or_is_given_it(made, chosen, data):
    arrays, leaves = made
    chosen = with_split(chosen, arrays, data)
    descs, of_rank = descriptions_of(leaves)
    plans = [plan(descs, of_rank, rank, chosen) for rank in range(len(leaves))]
    for number, array in enumerate(plans[0].arrays):
        assert all(one.arrays[number] == array for one in plans)
        layout, held = array.layout, holders(arrays, leaves, array)
        writers = np.full(layout.logical_bytes, -1)
        for rank, one in enumerate(plans):
            for a, b in one.pieces.get(number, []):
                assert (writers[a:b] == -1).all(), "two writers"
                writers[a:b] = rank
                if layout.many:
                    used = a // layout.block_bytes * layout.block_bytes
                    assert a == used
        stored = np.zeros(layout.logical_bytes, bool)
        for block in range(layout.blocks if layout.nbytes else 0):
            at = block * layout.block_bytes
            stored[at : at + layout.used_bytes(block)] = True
        assert ((writers >= 0) == stored).all()
        source = writers.copy()
        for rank, one in enumerate(plans):
            for a, b, giver in one.pulls.get(number, []):
                assert giver != rank
                assert (writers[a:b] == rank).all()
                assert (source[a:b] == rank).all(), "pulled twice"
                source[a:b] = giver
            assert one.pulls.get(number, []) == [
                (a, b, giver)
                for a, b, giver in sorted(
                    (a, b, giver)
                    for giver, other in enumerate(plans)
                    for a, b, taker in other.gives.get(number, [])
                    if taker == rank
                )
            ]
        for rank in range(len(leaves)):
            at = 0
            mine = source == rank
            while at < len(mine):
                if mine[at]:
                    for _, valid, _ in layout.parts(at, at + layout.itemsize):
                        assert held[(rank, *valid.slices)].all(), "a rank gives or writes what it does not hold"
                at += layout.itemsize


@settings(max_examples=100)
@given(st.integers(2, 24), st.integers(1, 5), st.lists(st.integers(1, 90), min_size=1, max_size=12), st.integers(1, 4))
def test_a_party_writes_equally_much_and_opens_fewer_files(shards, copies, rows, columns):
    spread = ["mesh", [copies, shards], [*range(copies * shards)], ["R", "S0"]]
    descs = [Desc(f"a{i:02}", "uint8", (n, columns), spread) for i, n in enumerate(rows)]
    chosen = Options(extent_bytes=8, chunk_bytes=64, handover_ranks=2, files_per_rank=1)
    plans = [plan([(descs, {})], [0] * (copies * shards), rank, chosen) for rank in range(copies * shards)]
    span = span_for([n * columns for n in rows], Mesh(spread), 8, 1)
    for first in range(0, shards, span):
        party = [c * shards + s for c in range(copies) for s in range(first, min(first + span, shards))]
        written = [plans[rank].nbytes for rank in party]
        assert max(written) <= sum(written) / len(party) + 8, "more than a unit above the mean"
        given_away = [sum(b - a for of in plans[r].gives.values() for a, b, _ in of) for r in party]
        taken = [sum(b - a for of in plans[r].pulls.values() for a, b, _ in of) for r in party]
        assert sum(given_away) == sum(taken)
        assert all(taken[i] <= written[i] for i in range(len(party)))
    if span > 1:
        apart = [plan([(descs, {})], [0] * (copies * shards), 0, replace(chosen, handover=False))]
        assert len(plans[0].pieces) <= len(apart[0].pieces) or len(rows) <= 2


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 60)), min_size=1, max_size=6), st.integers(1, 7))
def test_dealing_gives_to_all_what_sharing_gives_to_each(lengths, count):
    parts, at = [], 0
    for number, (gap, length) in enumerate(lengths):
        parts.append(
            (
                number,
                [(at + gap, at + gap + length), (at + gap + length + 3, at + gap + 2 * length)][: 1 + length // 30],
            )
        )
        at += 7
    unit = {number: (8, 16)[number % 2] for number, _ in parts}
    dealt = defaultdict(dict)
    for which, place, ranges in deal(parts, unit, count):
        assert parts[place][0] not in dealt[which]
        dealt[which][parts[place][0]] = ranges
    assert [dealt[which] for which in range(count)] == [
        dict(share(parts, unit, count, which)) for which in range(count)
    ]


@given(*[st.sets(st.integers(0, 40)).map(lambda some: sorted(some)[: len(some) // 2 * 2])] * 2)
def test_intersections(one, two):
    def ranges(edges):
        return [*zip(edges[::2], edges[1::2], strict=True)]

    def inside(some):
        return {i for a, b in some for i in range(a, b)}

    found = intersect(ranges(one), ranges(two))
    assert inside(found) == inside(ranges(one)) & inside(ranges(two))
    assert found == sorted(found)
    assert all(a < b for a, b in found)


def test_neighbours_are_those_whose_ranges_touch():
    """Of columns by rows, in panels: the rows of one panel; of rows by columns, in one block: the columns of one row."""
    panels = Mesh(["mesh", [4, 8], [0, 32], ["S1", "S0"]])
    assert panels.neighbours((2, 5), 4, [True, False]) == [(2, 4), (2, 5), (2, 6), (2, 7)]
    rows = Mesh(["mesh", [4, 8], [0, 32], ["S1", "S0"]])
    assert rows.neighbours((2, 5), 4, [True, True]) == [(0, 5), (1, 5), (2, 5), (3, 5)]
    both = Mesh(["mesh", [4, 8], [0, 32], ["SS0:8", "S0"]])  # rows are cut by the second first
    assert both.neighbours((2, 5), 8, [True]) == [(i, j) for i in range(4) for j in (4, 5)]
    odd = Mesh(["mesh", [6], [0, 6], ["S0"]])
    assert odd.neighbours((5,), 4, [True]) == [(4,), (5,)]
    assert odd.neighbours((1,), 4, [True]) == [(0,), (1,), (2,), (3,)]


def test_small_jobs_and_large_pieces_stay_where_they_are():
    spread = ["mesh", [8], [0, 8], ["S0"]]
    small = [Desc(f"a{i}", "float32", (64, 4), spread) for i in range(400)]
    assert not plan([(small, {})], [0] * 8, 3, Options()).gives
    spread = ["mesh", [32], [0, 32], ["S0"]]
    few_large = [Desc(f"a{i}", "float32", (1 << 15, 1 << 12), spread) for i in range(300)]
    assert not plan([(few_large, {})], [0] * 32, 3, Options()).gives
    many_small = [Desc(f"a{i}", "float32", (64, 4), spread) for i in range(400)]
    found = plan([(many_small, {})], [0] * 32, 3, Options())
    assert found.gives
    assert len(found.pieces) <= 14
    assert not plan([(many_small, {})], [0] * 32, 3, Options(handover=False)).gives


def test_nobody_stands_in_for_a_rank_that_hands_over():
    spread = ["mesh", [2, 2], [0, 4], ["R", "S0"]]
    descs = [Desc(f"a{i}", "float32", (64, 4), spread) for i in range(4)]
    inputs = Inputs([(descs, {})], [0] * 4, Options(**EAGER))
    assert inputs.plan(0).gives
    assert stand_ins(inputs, [1]) is None
    assert stand_ins(replace(inputs, options=Options()), [1]) is not None


def test_flat_and_uneven_shards_have_blocks_with_one_writer_in_stores_and_compressed():
    flat = [Desc("w", "float32", (100, 7), ["flat", a, b]) for a, b in [(0, 333), (333, 340), (340, 700)]]
    for chosen in (Options(positional=False), Options(compression=(("*", "zstd"),))):
        plans = [
            plan([([d], {}) for d in flat], [0, 1, 2], rank, replace(chosen, extent_bytes=256)) for rank in range(3)
        ]
        layout = plans[0].arrays[0].layout
        assert layout.many
        assert plans[0].arrays[0].note == ""
        assert sum(p.nbytes for p in plans) == sum(layout.used_bytes(i) for i in range(layout.blocks))
        assert prod(layout.shape) * 4 <= layout.logical_bytes


def test_shards_of_a_mesh_too_small_for_files_share_blocks_with_one_writer_each():
    """Sixteen shards of 64 bytes, two replicas, in a store that takes whole files only: four blocks of an extent."""
    spread = ["mesh", [2, 16], [0, 32], ["R", "S0"]]
    descs = [Desc("w", "float32", (64, 4), spread)]
    chosen = Options(positional=False, chunk_bytes=64, extent_bytes=256)
    plans = [plan([(descs, {})], [0] * 32, rank, chosen) for rank in range(32)]
    layout = plans[0].arrays[0].layout
    assert (layout.blocks, layout.block_bytes) == (4, 256)
    writers = {piece: rank for rank, one in enumerate(plans) for piece in one.pieces.get(0, [])}
    assert len(writers) == 4
    assert sum(one.nbytes for one in plans) == 64 * 16
    for (start, stop), writer in writers.items():
        assert stop - start == 256
        pulled = [(a, b) for a, b, _ in plans[writer].pulls[0]]
        at = 64 * (writer % 16)  # what it holds itself
        assert sorted([*pulled, (at, at + 64)]) == [(a, a + 64) for a in range(start, stop, 64)]
        assert all((giver % 16) * 64 == a for a, _, giver in plans[writer].pulls[0])


def test_large_pieces_stay_although_most_ranks_hold_none():
    """Eight experts over 32 ranks: a piece is an eighth, not a thirty-second."""
    mesh = Mesh(["mesh", [32], [0, 32], ["S0"]])
    assert mesh.shards() == 32
    assert mesh.holders((8, 1000)) == 8
    assert mesh.holders((33, 5)) == 17
    assert mesh.holders((0, 5)) == 1
    experts = [Desc(f"e{i}", "float32", (8, 1 << 19), ["mesh", [32], [0, 32], ["S0"]]) for i in range(300)]
    assert plan([(experts, {})], [0] * 32, 3, Options(large_bytes=1 << 22)).gives
    assert not plan([(experts, {})], [0] * 32, 3, Options(large_bytes=1 << 21)).gives
