"""Ranks' reports as columns: against a slow twin, and every way in which pieces are no tiling."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfs import dtypes
from ckptfs.codec import Codec
from ckptfs.errors import SaveError
from ckptfs.grid import Layout
from ckptfs.ranges import cut
from ckptfs.report import Written, pack_report, params_of, unpack_report
from ckptfs.saveplan import Array, SavePlan

EXTENT = 16


def layout_of(kind, size):
    if kind == "one":
        return Layout((size,), 1, (max(1, size),), (max(1, size),))
    return Layout((size,), 1, (24,), (24,), many=True, compressed=kind == "compressed")


def array_of(name, kind, size):
    codec = Codec("zstd", 3) if kind == "compressed" else None
    return Array(name, dtypes.of("uint8"), layout_of(kind, size), codec)


def files_of(layout):
    if layout.nbytes == 0:
        return []
    if not layout.many:
        return [(0, layout.logical_bytes)]
    size = layout.block_bytes
    return [(b * size, b * size + layout.used_bytes(b)) for b in range(layout.blocks)]


@st.composite
def saves(draw):
    """(arrays, their pieces in order, for each the lengths and checksums of its extents)."""
    rng = random.Random(draw(st.integers(0, 1 << 30)))
    arrays, pieces = [], []
    for number in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["one", "many", "compressed"]))
        array = array_of(f"a{number}", kind, draw(st.integers(0, 90)))
        arrays.append(array)
        for low, high in files_of(array.layout):
            inner = [] if kind == "compressed" else [x for x in range(low + 1, high) if rng.random() < 0.1]
            edges = [low, *inner, high]
            for a, b in pairwise(edges):
                base = a if array.layout.many else 0
                lengths = [rng.randrange(1, 99)] if kind == "compressed" else None
                count = len(lengths or cut(a - base, b - base, array.layout.extent_bytes(EXTENT)))
                pieces.append(Written(number, a, b, lengths, rng.randbytes(16 * count)))
    return arrays, pieces, rng


def merged(arrays, by_rank):
    plan = SavePlan(arrays, {}, {}, EXTENT)
    reports = [unpack_report(pack_report(pieces, {"rank": rank})) for rank, pieces in enumerate(by_rank)]
    assert [head for _, head in reports] == [{"rank": rank} for rank in range(len(by_rank))]
    return params_of(plan, (found for finished, _ in reports for found in finished))


@given(saves(), st.integers(1, 4))
def test_as_one_piece_after_another_would_be(save, world):
    arrays, pieces, rng = save
    by_rank = [[] for _ in range(world)]
    for piece in rng.sample(pieces, len(pieces)):
        by_rank[rng.randrange(world)].append(piece)
    params = merged(arrays, by_rank)
    assert list(params) == [array.name for array in arrays]
    for number, array in enumerate(arrays):
        lengths, hashes = [], b""
        for piece in pieces:
            if piece.array == number:
                base = piece.start if array.layout.many else 0
                size = array.layout.extent_bytes(EXTENT)
                lengths += piece.lengths or [b - a for a, b in cut(piece.start - base, piece.stop - base, size)]
                hashes += piece.hashes
        param = params[array.name]
        assert [length for length, count in param.runs for _ in range(count)] == lengths
        assert all(one[0] != two[0] for one, two in pairwise(param.runs))
        assert param.hashes == hashes
        assert (param.layout, param.dtype, param.codec) == (array.layout, array.dtype, array.codec)


def test_what_is_no_tiling_is_refused():
    arrays = [array_of("one", "one", 40), array_of("many", "many", 48), array_of("none", "one", 0)]

    def of(number, *ranges):
        size = arrays[number].layout.extent_bytes(EXTENT)
        base = {a: a if arrays[number].layout.many else 0 for a, _ in ranges}
        return [Written(number, a, b, None, bytes(16 * len(cut(a - base[a], b - base[a], size)))) for a, b in ranges]

    sound = [*of(0, (0, 16), (16, 40)), *of(1, (0, 24), (24, 48))]
    assert list(merged(arrays, [sound])) == ["one", "many", "none"]
    hole = "leave a hole or an overlap at byte"
    for number, ranges, words in [
        (0, [], f"{hole} 0"),
        (0, [(0, 16)], f"{hole} 16"),
        (0, [(16, 40)], f"{hole} 0"),
        (0, [(0, 16), (0, 16), (16, 40)], f"{hole} 16"),
        (0, [(0, 32), (16, 40)], f"{hole} 32"),
        (0, [(0, 16), (16, 41)], f"{hole} 16"),
        (0, [(0, 16), (16, 16), (16, 40)], f"{hole} 16"),
        (0, [(0, 40), (40, 56)], "two ranks wrote the same bytes"),
        (1, [(0, 24)], f"{hole} 24"),
        (1, [(0, 40)], f"{hole} 0"),
        (1, [(24, 48)], f"{hole} 0"),
        (2, [(0, 1)], "two ranks wrote the same bytes"),
    ]:
        name = arrays[number].name
        with pytest.raises(SaveError, match=f"'{name}'.*{words}; nothing was committed"):
            merged(arrays, [[piece for piece in sound if piece.array != number], of(number, *ranges)])


@pytest.mark.parametrize("lengths", [None, [3]])
def test_a_wrong_number_of_checksums_is_refused(lengths):
    with pytest.raises(SaveError, match="'w': a report has a wrong number of checksums"):
        merged([array_of("w", "one", 40)], [[Written(0, 0, 40, lengths, bytes(16 * 5))]])
