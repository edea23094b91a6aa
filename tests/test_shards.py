"""What a rank says it holds: shapes, boxes and live data; what is tied; and what is refused with a hint."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckptfs
from ckptfs import dtypes
from ckptfs.box import Box
from ckptfs.errors import MismatchError
from ckptfs.shards import FlatShard, LocalShard, as_numpy, hold, tie

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("name", sorted(dtypes.BY_NAME))
def test_every_type_as_numpy_shares_memory(name):
    dtype = dtypes.of(name)
    array = np.zeros(3, dtype.numpy)
    view = as_numpy(array)
    view.view("u1")[...] = 1
    assert array.view("u1").tolist() == [1] * 3 * dtype.itemsize
    tensor = torch.zeros(2, 3, dtype=dtype.torch).t()
    view = as_numpy(tensor)
    assert view.shape == (3, 2)
    assert view.dtype.itemsize == dtype.itemsize
    assert view.__array_interface__["data"][0] == tensor.data_ptr()


def test_conjugates_and_negatives_are_resolved():
    value = torch.tensor([1 + 2j, 3 - 4j])
    assert as_numpy(value.conj()).view("c8").tolist() == [1 - 2j, 3 + 4j]
    assert as_numpy(value.conj().imag).view("f4").tolist() == [-2.0, 4.0]


@given(st.integers(0, 24), st.integers(0, 24))
def test_flat_shards_are_boxes_in_order(a, b):
    start, stop = sorted((a, b))
    full = np.arange(24).reshape(2, 3, 4)
    held = hold("w", FlatShard(full.reshape(-1)[start:stop], full.shape, start), 0)
    out = np.full(full.shape, -1)
    for box, data in held.pieces:
        out[box.slices] = data
    assert out.reshape(-1).tolist() == [i if start <= i < stop else -1 for i in range(24)]


@pytest.mark.parametrize(("start", "count"), [(-1, 3), (20, 5), (25, 0)])
def test_flat_shards_outside_of_their_array(start, count):
    with pytest.raises(MismatchError, match="'w'"):
        hold("w", FlatShard(np.zeros(count), (4, 6), start), 0)


@pytest.mark.parametrize(
    "value",
    [
        LocalShard(np.zeros((3, 2)), (4, 2), ["mesh", [2], [0, 1], ["S0"]]),
        LocalShard([np.zeros((3, 2))], (4, 2), ["boxes", [[[0, 0], [2, 2]]]]),
        LocalShard([np.zeros((2, 2))], (4, 2), ["boxes", [[[3, 0], [5, 2]]]]),
        LocalShard(np.zeros((2, 2)), (4, 2), ["flat", 0, 4]),
        LocalShard([], (4, 2), ["boxes", []]),
    ],
)
def test_local_parts_that_do_not_fit_their_spread(value):
    with pytest.raises(MismatchError, match="'w'"):
        hold("w", value, 0)


def test_what_has_no_values_is_refused_with_a_hint():
    for value, hint in [
        (torch.empty(3, device="meta"), "materialise"),
        (torch.eye(3).to_sparse(), "to_dense"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "unbind"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "unbind"),
        (torch.nn.UninitializedParameter(), "batch"),
        (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), "int_repr"),
    ]:
        with pytest.raises(MismatchError, match=f"'a/b'.*{hint}"):
            hold("a/b", value, 0)


def test_types_that_are_not_known_are_named():
    with pytest.raises(MismatchError, match=r"M8\[s\].*cannot be stored"):
        hold("w", np.zeros(3, "M8[s]"), 0)


# --- ties ------------------------------------------------------------------------------------------------------------


def tied(**values):
    return tie([hold(name, value, 0) for name, value in values.items()])[1]


def test_the_same_bytes_are_stored_once():
    w = torch.ones(4, 3)
    n = np.ones((4, 3))
    assert tied(a=w, b=w, c=w.view(4, 3), d=w.clone()) == {"b": "a", "c": "a"}
    assert tied(a=n, b=n, c=n[:], d=n.copy()) == {"b": "a", "c": "a"}
    assert tied(a=torch.nn.Parameter(w), b=w) == {"b": "a"}


def test_other_views_of_the_same_memory_are_not_the_same():
    w = torch.ones(4, 4)
    assert tied(a=w, b=w.t(), c=w[:2], d=w[2:], e=w.reshape(-1), f=w.view(torch.int32)) == {}
    z = torch.tensor([1 + 2j])
    assert tied(a=z, b=z.conj()) == {}
    r = torch.view_as_real(torch.tensor([1 + 2j])).clone()
    c = torch.view_as_complex(r)
    assert tied(a=c.imag, b=c.conj().imag) == {}


def test_empty_arrays_are_never_tied():
    assert tied(a=torch.zeros(0, 3), b=torch.zeros(0, 3)) == {}


# --- the tree's side ---------------------------------------------------------------------------------------------------


def test_conjugate_views_of_one_tensor_keep_their_own_values(tmp_path):
    z = torch.tensor([1 + 2j, 3 - 1j])
    ckptfs.save(tmp_path / "z", {"a": z, "b": z.conj(), "i": z.imag, "n": z.conj().imag})
    back = ckptfs.load(tmp_path / "z")
    assert back["a"].tolist() == z.tolist()
    assert back["b"].tolist() == z.conj().tolist()
    assert back["n"].tolist() == (-z.imag).tolist()


@pytest.mark.parametrize(
    "names",
    [
        ["a/b", "a", "a.b", "a%2Fb"],
        ["..", ".", "", "/", "//", "../../etc/passwd"],
        ["zarr.json", "c", "c.0", "manifest.json", "assets", ".hidden", "__x"],
        ["é", "日本語", "a b", "a\nb", "a\\b", "\x00", "💾" * 80, "x" * 1000, "x" * 999 + "y"],
        ["con", "NUL", "a:b", "a*b?", "A", "a@rank0"],
    ],
)
def test_any_name_that_a_state_dict_can_hold(tmp_path, names):
    tree = {name: np.full(3, i) for i, name in enumerate(names)}
    nested = {name: {name: np.full(2, i)} for i, name in enumerate(names)}
    with ckptfs.Run(tmp_path / "run") as run:
        run.save(1, tree)
        run.save(2, nested)
        assert list(tmp_path.iterdir()) == [tmp_path / "run"]
        for step, saved in ((1, tree), (2, nested)):
            back = run[step].tree(numpy=True)
            assert list(back) == list(saved)
            for name in names:
                want, got = saved[name], back[name]
                assert np.array_equal(*((want, got) if step == 1 else (want[name], got[name])))
            into = run[step].tree(numpy=True)
            for name in names:
                (into[name] if step == 1 else into[name][name])[...] = -1
            run.load(into, step=step)
            for name in names:
                assert np.array_equal(
                    *((saved[name], into[name]) if step == 1 else (saved[name][name], into[name][name]))
                )


def test_loading_fills_numpy_arrays_of_either_byte_order_and_any_strides(tmp_path):
    want = np.arange(12, dtype="f4").reshape(3, 4)
    with ckptfs.Run(tmp_path / "run") as run:
        run.save(1, {"w": want, "big": want.astype(">f4"), "half": want.astype(ml_dtypes.bfloat16)})
        into = {
            "w": np.zeros((4, 3), "f4").T,
            "big": np.zeros((3, 4), ">f4"),
            "half": np.zeros((6, 8), ml_dtypes.bfloat16)[::2, ::2],
        }
        same = dict(into)
        run.load(into)
        for name, value in into.items():
            assert np.array_equal(value, want), name
            assert np.array_equal(same[name], want), f"{name} was not filled in place"


class Total:
    """Made of an array's values, not of the array."""

    def __init__(self, value):
        self.value = value


def test_what_is_made_of_arrays_is_made_of_what_was_read(tmp_path):
    """Objects of registered classes, and big-endian arrays, which are stored in the other order."""
    ckptfs.register(
        Total,
        lambda total: {"parts": np.full(30_000, total.value / 30_000)},
        lambda tree: Total(tree["parts"].sum()),
        name="test_shards.Total",
    )
    big = np.arange(30_000, dtype=">f8")
    with ckptfs.Run(tmp_path / "run") as run:
        run.save(1, {"total": Total(60_000), "big": big, "one": np.array(7, ">i4"), "in": [big]})
        empty = {"total": None, "big": None, "one": None, "in": []}
        for back in (run[1].tree(), run[1].tree(numpy=True), run.load({}), run.load(empty)):
            assert back["total"].value == 60_000
            for found, want in ((back["big"], big), (back["in"][0], big), (back["one"], 7)):
                assert found.dtype.byteorder == ">"
                assert np.array_equal(found, want)


def test_what_cannot_be_made_is_said_before_anything_is_filled(tmp_path):
    with ckptfs.Run(tmp_path / "run") as run:
        run.save(1, {"w": np.ones(3), "code": object}, allow_pickle=True)
        into = {"w": np.zeros(3), "code": None}
        with pytest.raises(MismatchError, match="allow_pickle"):
            run.load(into)
        assert not into["w"].any()
        assert run.load(into, allow_pickle=True)["code"] is object


def test_loading_a_part_fills_big_endian_arrays_too(tmp_path):
    with ckptfs.Run(tmp_path / "run") as run:
        run.save(1, {"w": np.arange(3.0), "b": np.ones(2)})
        into = {"w": np.zeros(3, ">f8"), "b": np.zeros(2)}
        run.load(into, only="w")
        assert into["w"].tolist() == [0, 1, 2]
        assert into["b"].tolist() == [0, 0]


def test_a_pattern_that_fits_nothing_is_an_error(tmp_path):
    net = torch.nn.Linear(2, 3)
    with ckptfs.Run(tmp_path / "run") as run:
        run.save(1, {"model": net.state_dict(), "w": torch.ones(3)})
        into = {"w": torch.zeros(3)}
        for target in (into, net):
            with pytest.raises(MismatchError, match=r"'wieght\*' fits no array"):
                run.load(target, only=["w*", "wieght*"])
        assert not into["w"].any()
        run.load(into, only=["w", "model/*"])  # what other ranks hold
        run.load(net, only="weight")
        run.load(into, only="wieght*", strict=False)


def test_expanded_destinations_are_refused(tmp_path):
    with ckptfs.Run(tmp_path / "run") as run:
        run.save(1, {"w": torch.arange(6.0).reshape(2, 3), "v": torch.ones(1, 3)})
        for wide in (torch.zeros(3).expand(2, 3), np.broadcast_to(np.zeros(3, "f4"), (2, 3))):
            with pytest.raises(MismatchError, match="w is expanded here"):
                run.load({"w": wide, "v": torch.zeros(1, 3)})
        row = torch.zeros(3).expand(1, 3)  # nothing is shared
        run.load({"w": torch.zeros(2, 3), "v": row})
        assert row.tolist() == [[1, 1, 1]]


def test_loading_a_module_whose_parts_have_slashes_in_their_names(tmp_path):
    def model():
        return torch.nn.ModuleDict({"en/de": torch.nn.Linear(2, 3), "100%": torch.nn.Linear(3, 1)})

    saved, into, bare = model(), model(), model()
    with ckptfs.Run(tmp_path / "run") as run:
        run.save(1, {"model": saved.state_dict()})
        run.load(into)
        run.save(2, saved.state_dict())
        run.load(bare, only="en/de.*")
    for name, value in saved.state_dict().items():
        assert torch.equal(into.state_dict()[name], value), name
        assert torch.equal(bare.state_dict()[name], value) == name.startswith("en/de."), name


def test_loading_into_conjugate_views(tmp_path):
    z = torch.tensor([1 + 2j, 3 - 4j])
    with ckptfs.Run(tmp_path / "run") as run:
        run.save(1, {"z": z, "r": z.real.clone()})
        memory = torch.zeros(2, dtype=torch.complex64)
        into = {"z": memory.conj(), "r": torch.zeros(2)}
        run.load(into)
        assert into["z"].tolist() == z.tolist()
        assert memory.tolist() == z.conj().tolist()


def test_names_that_look_like_the_marks_of_ranks_and_duplicates(tmp_path):
    tree = {
        "a@rank0": np.full(1, 1),
        "a": ckptfs.PerRank(np.full(1, 2)),
        1: np.full(1, 3),
        "1": np.full(1, 4),
        "1~2": np.full(1, 5),
        "": np.full(1, 6),
        "%00": np.full(1, 7),
        "%40": np.full(1, 8),
        "@rank0": np.full(1, 9),
        "\ud800": np.full(1, 10),
        "x" * 300 + "@rank0": np.full(1, 11),
        "x" * 300: ckptfs.PerRank(np.full(1, 12)),
    }
    with ckptfs.Run(tmp_path / "run") as run:
        run.save(1, tree)
        with run[1] as checkpoint:
            paths = [param.path for param in checkpoint.manifest.params.values()]
            assert len(set(paths)) == len(tree)
            back = checkpoint.tree(numpy=True, rank=0)
    assert [int(value[0]) for value in back.values()] == list(range(1, 13))
    assert list(back) == list(tree)


def test_loading_into_what_cannot_be_written_is_an_error(tmp_path):
    with ckptfs.Run(tmp_path / "run") as run:
        run.save(1, {"w": np.arange(3)})
        fixed = np.zeros(3, int)
        fixed.flags.writeable = False
        with pytest.raises(MismatchError, match=r"w.*read-only"):
            run.load({"w": fixed})
        swapped = np.zeros(3, ">i8")
        swapped.flags.writeable = False
        with pytest.raises(MismatchError, match=r"w.*read-only"):
            run.load({"w": swapped})


def test_loading_what_does_not_fit_touches_nothing(tmp_path):
    with ckptfs.Run(tmp_path / "run") as run:
        run.save(1, {"a": np.ones(3), "b": np.ones((2, 2)), "c": np.ones(2, "i4"), "more": np.ones(1)})
        into = {"a": np.zeros(3), "b": np.zeros((4, 1)), "c": np.zeros(2, "i8"), "extra": np.zeros(1)}
        with pytest.raises(MismatchError) as caught:
            run.load(into)
        for part in ("missing", "extra", "unexpected", "more", "shape", "[4, 1]", "[2, 2]", "int32", "int64"):
            assert part in str(caught.value), part
        assert all(not value.any() for value in into.values())
        into = {"a": np.zeros(3), "c": np.zeros(2, "i8")}
        run.load(into, strict=False, cast=True)
        assert into["a"].all()
        assert into["c"].tolist() == [1, 1]


def test_one_destination_for_two_stored_arrays_gets_one_of_them_whole(tmp_path):
    """Tied now, but saved apart: the tree to fill has one memory for two values."""
    with ckptfs.Run(tmp_path / "run") as run:
        run.save(1, {"a": np.ones(3), "b": np.full(3, 2.0)})
        one = np.zeros(3)
        run.load({"a": one, "b": one})
        assert one.tolist() in ([1] * 3, [2] * 3)


def test_a_tied_pair_is_loaded_into_two_tensors(tmp_path):
    w = torch.arange(6.0)
    with ckptfs.Run(tmp_path / "run") as run:
        run.save(1, {"a": w, "b": w})
        into = {"a": torch.zeros(6), "b": torch.zeros(6)}
        run.load(into)
        assert torch.equal(into["a"], w)
        assert torch.equal(into["b"], w)
        run.load({"b": into["b"].zero_()}, only="b")
        assert torch.equal(into["b"], w)


def test_an_empty_array_of_a_shape_that_no_manifest_holds_is_refused(tmp_path):
    """Committed, such a step could never be read."""
    with ckptfs.Run(tmp_path / "run") as run, pytest.raises(MismatchError, match=r"'a/x'.*shape"):
        run.save(1, {"a": {"x": torch.empty((0, 1 << 61))}})


def test_boxes_say_where_they_are():
    held = hold("w", LocalShard(np.zeros((2, 2)), (4, 2), ["mesh", [2], [0, 1], ["S0"]]), 1)
    assert [box for box, _ in held.pieces] == [Box((2, 0), (4, 2))]
