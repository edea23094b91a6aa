"""The manifest as a hostile file: every way to lie is a FormatError, quickly, and nothing else."""

import copy
import gc
import json
import tempfile
import time
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptfs
from ckptfs.checkpoint import Checkpoint
from ckptfs.errors import CkptError, FormatError
from ckptfs.manifest import Manifest, digest, run_lengths, without_collection
from ckptfs.storage import MemoryStore

SMALL = ckptfs.Settings(chunk_bytes=256, block_bytes=512, extent_bytes=128, io_bytes=512)


def sample():
    """Path → bytes of a step with a sharded, a compressed, a 0-d, an empty and a tied array."""
    tied = np.arange(300, dtype="f4").reshape(30, 10)
    value = {"w": tied, "b": np.zeros(99, "i8"), "s": np.array(1.0), "e": np.zeros((0, 2)), "tied": tied, "n": [1, "x"]}
    with tempfile.TemporaryDirectory() as folder, ckptfs.Run(folder, settings=SMALL) as run:
        run.save(1, value, assets={"a/config.json": "{}"}, compression={"b": "zstd"})
        store = run.store.sub("step-00000001")
        return {path: store.read(path) for path, _ in store.list()}


FILES = sample()
RAW = FILES["manifest.json"]
DATA = json.loads(RAW)


def sealed(data):
    """As a file whose checksum is right: what is left to find is the lie itself."""
    data = {key: value for key, value in data.items() if key != "xxh3_128"} if isinstance(data, dict) else data
    body = data if isinstance(data, bytes) else json.dumps(data, separators=(",", ":")).encode()[:-1]
    return body + b',"xxh3_128":"' + digest(body).hex().encode() + b'"}\n'


def lie(change):
    data = copy.deepcopy(DATA)
    change(data)
    return sealed(data)


def refused(raw, match=None):
    began = time.perf_counter()
    with pytest.raises(FormatError, match=match):
        Manifest.parse(raw)
    assert time.perf_counter() - began < 20


def test_the_sample_itself_is_fine():
    parsed = Manifest.parse(sealed(DATA))
    assert parsed.params.keys() == {"w", "b", "s", "e"}
    assert Manifest.parse(RAW).dump("x").startswith(b'{"format":"ckptfs"')
    again = Manifest.parse(parsed.dump(DATA["software"]))
    assert again.dump(DATA["software"]) == RAW


# --- the file ------------------------------------------------------------------------------------------------


def test_empty_file():
    refused(b"", "cut off")


def test_not_json():
    refused(sealed(b'{"format": oops'), "not JSON")


def test_not_utf8():
    refused(sealed(b'{"format":"\xff\xfe"'), "not JSON")


def test_not_an_object():
    refused(sealed(b"[1"), "not JSON|cut off")


@pytest.mark.parametrize("size", [1, 10, 100, len(RAW) // 2, len(RAW) - 2, len(RAW) - 1])
def test_cut_off(size):
    refused(RAW[:size], "cut off")


@pytest.mark.parametrize("at", range(0, len(RAW), 41))
def test_a_flipped_bit(at):
    raw = bytearray(RAW)
    raw[at] ^= 4
    refused(bytes(raw), "damaged|cut off")


def test_something_behind_the_end():
    refused(RAW + b"\n", "cut off")


def test_deep_nesting():
    refused(sealed(b'{"format":"ckptfs","tree":' + b"[" * 100_000 + b"]" * 100_000))


def test_huge_integer():
    refused(sealed(b'{"format":"ckptfs","reader":1,"step":' + b"9" * 100_000))


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_has_not(word):
    refused(sealed(RAW[: RAW.rindex(b',"xxh3_128"')].replace(b'"step":1,', f'"step":{word},'.encode())), word)


@pytest.mark.parametrize("old", ['"format":"ckptfs"', '"dtype":"float32"', '"params":{', '"w":{'])
def test_duplicate_keys(old):
    body = RAW[: RAW.rindex(b',"xxh3_128"')].decode()
    key = old.split(":")[0]
    refused(sealed(body.replace(old, f"{key}:0,{old}", 1).encode()), "duplicate key")


# --- the head ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reader", [0, 2, 99])
def test_a_reader_of_the_future(reader):
    refused(lie(lambda d: d.update(reader=reader)), "upgrade ckptfs")


@pytest.mark.parametrize("reader", ["1", 1.0, True, None, -1, [1]])
def test_a_reader_that_is_no_number(reader):
    refused(lie(lambda d: d.update(reader=reader)), "reader")


def test_another_format():
    refused(lie(lambda d: d.update(format="dcp")), "not a ckptfs manifest")


def test_an_unknown_key():
    refused(lie(lambda d: d.update(surprise=1)), "unknown key 'surprise'")


def test_a_key_marked_ignorable_is_ignored():
    assert Manifest.parse(lie(lambda d: d.update({"x-note": 1}))).step == 1


def test_a_writer_of_the_future_can_be_read():
    assert Manifest.parse(lie(lambda d: d.update(writer=9))).writer == 9


@pytest.mark.parametrize(
    "key", ["writer", "save_id", "created", "world", "params", "aliases", "assets", "root_xxh3", "maps"]
)
@pytest.mark.parametrize("value", [None, 1.5, [], "zz", -1])
def test_heads_of_wrong_types(key, value):
    if type(DATA[key]) is not type(value):
        refused(lie(lambda d: d.update({key: value})))


@pytest.mark.parametrize(
    "key", ["reader", "writer", "save_id", "created", "world", "params", "aliases", "assets", "root_xxh3", "maps"]
)
def test_a_missing_head(key):
    refused(lie(lambda d: d.pop(key)))


@pytest.mark.parametrize("step", ["1", -1, 1.0, True, 1 << 70])
def test_a_step_that_is_no_number(step):
    refused(lie(lambda d: d.update(step=step)), "step")


# --- arrays --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["dtype", "shape", "path", "extents", "xxh3", "zarr_xxh3"])
@pytest.mark.parametrize("value", [None, 7, "x", [1.5], {"a": 1}, True, [["1", "2"]], [[1, 2, 3]], "é"])
def test_entries_of_wrong_types(key, value):
    if not (key == "path" and isinstance(value, str)):
        refused(lie(lambda d: d["params"]["w"].update({key: value})), "array 'w'")


def test_an_entry_that_is_no_object():
    refused(lie(lambda d: d["params"].update(w=[1])), "array 'w'")


def test_an_unknown_key_in_an_entry():
    refused(lie(lambda d: d["params"]["w"].update(layout="odd")), "unknown key 'layout'")


def test_an_unknown_dtype():
    refused(lie(lambda d: d["params"]["w"].update(dtype="float7")), "unknown dtype 'float7'")


@pytest.mark.parametrize("shape", [[30, 11], [31, 10], [10], [30, 10, 2], [], [0, 10], [300, 1, 2]])
def test_a_shape_that_the_extents_do_not_fill(shape):
    refused(lie(lambda d: d["params"]["w"].update(shape=shape)), "array 'w'")


@pytest.mark.parametrize("shape", [[1 << 61, 10], [1 << 40, 1 << 40], [(1 << 62) - 1, 4], [2] * 64, [1] * 65, [-1, 10]])
def test_an_absurd_shape(shape):
    refused(lie(lambda d: d["params"]["w"].update(shape=shape)), "array 'w'")


@pytest.mark.parametrize("size", [0, -1, 1.5, 1 << 62, 1 << 61, None])
def test_an_absurd_block_or_chunk(size):
    for key in ("block", "chunk"):
        refused(lie(lambda d, key=key: d["params"]["w"].update({key: [size, 10]})), "array 'w'")
        refused(lie(lambda d, key=key: d["params"]["w"].update({key: [30, size]})), "array 'w'")


def test_a_chunk_that_does_not_tile_its_block():
    refused(lie(lambda d: d["params"]["w"].update(chunk=[7, 10], block=[30, 10])), "does not divide")
    refused(lie(lambda d: d["params"]["w"].update(chunk=[2, 5], block=[30, 10])), "runs of rows")


@pytest.mark.parametrize("many", [False, 1, "yes", None])
def test_many_is_true_or_absent(many):
    if many is False:
        assert Manifest.parse(lie(lambda d: d["params"]["s"].update(many=False)))
        return
    refused(lie(lambda d: d["params"]["w"].update(many=many)), "many")


def extents_of(name):
    return DATA["params"][name]["extents"]


def test_a_hole():
    refused(lie(lambda d: d["params"]["w"]["extents"][0].__setitem__(0, extents_of("w")[0][0] - 4)), "extents hold")


def test_an_overlap():
    refused(lie(lambda d: d["params"]["w"]["extents"][0].__setitem__(0, extents_of("w")[0][0] + 4)), "extents hold")


@pytest.mark.parametrize("run", [[0, 1], [1, 0], [-128, 1], [128, -1], [1.0, 1], [True, 1], ["128", 1], [1 << 63, 1]])
def test_extents_of_impossible_lengths(run):
    refused(lie(lambda d: d["params"]["w"]["extents"].append(run)), "array 'w'")


@pytest.mark.parametrize("run", [[1], [1, 2, 3], [], 7, None, "ab"])
def test_extents_that_are_no_pairs(run):
    refused(lie(lambda d: d["params"]["w"]["extents"].append(run)))


def test_a_run_of_very_many_extents():
    refused(lie(lambda d: d["params"]["w"].update(extents=[[1, 1 << 50]])), "number")


def test_too_few_and_too_many_checksums():
    refused(lie(lambda d: d["params"]["w"].update(xxh3=d["params"]["w"]["xxh3"][32:])), "number")
    refused(lie(lambda d: d["params"]["w"].update(xxh3=d["params"]["w"]["xxh3"] + "0" * 32)), "number")


@pytest.mark.parametrize("text", ["0", "g" * 32, " " * 32, "0" * 31, "00 " * 32 + "0" * 32, "é" * 32])
def test_checksums_that_are_none(text):
    refused(lie(lambda d: d["params"]["s"].update(xxh3=text)))


@pytest.mark.parametrize("text", ["", "0" * 31, "G" * 32, "0" * 32 + "\n", "A" * 32])
def test_checksums_of_documents_that_are_none(text):
    refused(lie(lambda d: d["params"]["s"].update(zarr_xxh3=text)), "checksum")
    refused(lie(lambda d: d.update(root_xxh3=text)), "checksum")


def test_an_empty_array_with_extents():
    refused(lie(lambda d: d["params"]["e"].update(extents=[[16, 1]], xxh3="0" * 32)), "empty array")


def many(data, **change):
    """Turn `w` into an array of several raw files."""
    data["params"]["w"].pop("chunk", None)
    data["params"]["w"].update(block=[10, 10], many=True, **change)


def test_an_extent_that_crosses_from_one_file_into_the_next():
    assert Manifest.parse(lie(lambda d: many(d, extents=[[400, 3]], xxh3="0" * 96)))
    refused(lie(lambda d: many(d, extents=[[600, 2]], xxh3="0" * 64)), "fewer extents|crosses")
    refused(lie(lambda d: many(d, extents=[[300, 4]], xxh3="0" * 128)), "crosses")


def test_very_many_files():
    refused(lie(lambda d: (many(d), d["params"]["w"].update(shape=[1 << 40, 10], block=[1, 10]))), "array 'w'")


def test_very_many_chunks():
    refused(
        lie(lambda d: d["params"]["w"].update(shape=[1 << 40, 10], block=[1 << 40, 10], chunk=[1, 10])), "array 'w'"
    )


@pytest.mark.parametrize(
    "codec",
    [
        "zstd",
        None,
        {},
        {"name": "lz77", "configuration": {}},
        {"name": "zstd", "configuration": {"level": 99, "checksum": False}},
        {"name": "zstd", "configuration": {"level": 1}},
        {"name": "blosc", "configuration": {"typesize": 0, "cname": "x", "clevel": 1, "shuffle": "y", "blocksize": 0}},
    ],
)
def test_codecs_that_are_none(codec):
    refused(lie(lambda d: d["params"]["b"].update(codec=codec)), "array 'b'")


def test_a_codec_on_a_raw_file():
    codec = {"name": "zstd", "configuration": {"level": 3, "checksum": False}}
    refused(lie(lambda d: d["params"]["s"].update(codec=codec)), "many files")


def test_a_compressed_chunk_of_absurd_length():
    count = extents_of("b")[0][1]
    refused(lie(lambda d: d["params"]["b"]["extents"].__setitem__(0, [1 << 40, count])), "far longer")


# --- paths and names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "../w",
        "/etc/passwd",
        "a/../../w",
        "a//b",
        "",
        ".",
        "..",
        "a/.",
        "a\\..\\b",
        "a\x00b",
        "a\nb",
        "w/",
        "/",
        "a" * 256,
    ],
)
def test_paths_that_leave_the_step(path):
    refused(lie(lambda d: d["params"]["w"].update(path=path)), "array 'w'.*does not stay inside")


@pytest.mark.parametrize("path", ["assets", "assets/x", "manifest.json", "zarr.json", "a/zarr.json", "zarr.json/x"])
def test_paths_of_something_else(path):
    refused(lie(lambda d: d["params"]["w"].update(path=path)), "reserved")


def test_two_arrays_at_one_path():
    refused(lie(lambda d: d["params"]["w"].update(path="b")), "two arrays")


def test_an_array_inside_another():
    refused(lie(lambda d: d["params"]["w"].update(path="b/w")), "two arrays")
    # Sorted as text, "b-" stands between "b" and "b/w".
    refused(lie(lambda d: (d["params"]["w"].update(path="b/w"), d["params"]["s"].update(path="b-"))), "two arrays")


@pytest.mark.parametrize("path", ["../x", "/x", "a//b", "", "..", "a/../b", "x\x00"])
def test_assets_that_leave_the_step(path):
    refused(lie(lambda d: d["assets"].update({path: {"bytes": 1, "xxh3": "0" * 32}})), "does not stay inside")


@pytest.mark.parametrize(
    "entry", [None, 1, [], {}, {"bytes": 1}, {"bytes": -1, "xxh3": "0" * 32}, {"bytes": 1, "xxh3": 5}]
)
def test_assets_that_are_none(entry):
    refused(lie(lambda d: d["assets"].update(x=entry)))


# --- aliases -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aliases", [{"tied": "tied"}, {"x": "y", "y": "x"}, {"x": "tied", "tied": "w"}, {"x": "no"}])
def test_aliases_that_go_round_or_nowhere(aliases):
    refused(lie(lambda d: d.update(aliases=aliases)), "alias")


@pytest.mark.parametrize("target", [None, 1, ["w"], {"w": 1}, True])
def test_aliases_of_what_is_no_name(target):
    refused(lie(lambda d: d.update(aliases={"x": target})))


def test_an_alias_with_the_name_of_an_array():
    refused(lie(lambda d: d.update(aliases={"b": "w"})), "alias 'b'")


# --- fuzz ----------------------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 65), 1 << 65)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["w", "../x", "float32", "0" * 32, "bfloat16"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def places(node, path=()):
    yield path
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from places(value, (*path, key))


PLACES = [path for path in places(DATA) if path]


edits = st.tuples(
    st.sampled_from(PLACES),
    st.sampled_from(["replace", "replace", "delete", "nudge", "swap"]),
    st.sampled_from(PLACES),
    st.sampled_from([-1, 1, 7, 1 << 20, 1 << 40, -(1 << 40)]),
    json_values,
)


def at(data, path):
    for step in path:
        data = data[step]
    return data


def edited(edit_list):
    """A manifest after some edits; those that earlier ones made impossible are left out."""
    data = copy.deepcopy(DATA)
    for path, kind, other, amount, value in edit_list:
        try:
            node, key = at(data, path[:-1]), path[-1]
            if kind == "delete":
                del node[key]
            elif kind == "nudge" and isinstance(node[key], int):
                node[key] += amount
            elif kind == "swap":
                node[key] = copy.deepcopy(at(data, other))
            else:
                node[key] = value
        except (KeyError, IndexError, TypeError):
            continue
    return data


@settings(max_examples=600, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(edits, min_size=1, max_size=3).map(edited))
def test_fuzzed_manifests_are_legal_or_a_format_error(data):
    """And what is accepted can be used: every reader meets errors of ours only, without allocating what is not there."""
    raw = sealed(data)
    began = time.perf_counter()
    try:
        parsed = Manifest.parse(raw)
    except FormatError:
        return
    finally:
        assert time.perf_counter() - began < 20
    assert Manifest.parse(parsed.dump("fuzz")).params.keys() == parsed.params.keys()
    store = MemoryStore("manifest-fuzz")
    for path, _ in list(store.list()):
        store.remove(path)
    for path, content in (FILES | {"manifest.json": raw}).items():
        store.write(path, content)
    with Checkpoint(store, settings=SMALL) as checkpoint:
        for name in checkpoint:
            if checkpoint[name].nbytes < 1 << 20:
                try:
                    checkpoint[name].numpy()
                except CkptError:
                    pass
        try:
            checkpoint.tree(numpy=True)
        except CkptError:
            pass


def test_absurd_arrays_do_not_allocate():
    """A manifest that says of itself that it is huge costs what its own bytes cost."""

    def huge(data):
        rows = (1 << 61) // 4
        data["params"] = {"w": {**data["params"]["w"], "shape": [rows], "extents": [[1 << 61, 1]], "xxh3": "0" * 32}}
        for key in ("block", "chunk"):
            data["params"]["w"].pop(key, None)
        data["aliases"] = {}

    raw = lie(huge)
    tracemalloc.start()
    try:
        try:
            parsed = Manifest.parse(raw)
            assert parsed.params["w"].extents.length.tolist() == [1 << 61]
        except FormatError:
            pass
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@given(st.lists(st.integers(1, 3), max_size=30))
def test_run_lengths(lengths):
    runs = run_lengths(lengths)
    assert [n for n, count in runs for _ in range(count)] == lengths
    assert all(a[0] != b[0] for a, b in pairwise(runs))


def test_collection_of_garbage_is_left_as_it_was():
    before = gc.isenabled()
    try:
        for wanted in (True, False):
            (gc.enable if wanted else gc.disable)()
            with without_collection():
                assert not gc.isenabled()
            assert gc.isenabled() is wanted
    finally:
        (gc.enable if before else gc.disable)()
