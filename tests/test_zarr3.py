"""Zarr v3 documents, node names and shard indexes: written exactly, read strictly."""

import copy
import json
import os
import re
import struct
from itertools import product

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from ckptfs import dtypes, zarr3
from ckptfs.box import Box
from ckptfs.codec import Codec
from ckptfs.errors import CorruptError, FormatError, MismatchError
from ckptfs.grid import Layout, choose

F32 = dtypes.of("float32")
names = st.text(st.characters(codec=None, exclude_categories=()), max_size=80) | st.text(
    "./%_~caszrmanifet-json\0 \n", max_size=30
)


# --- node names ----------------------------------------------------------------------------------------------


@given(names, st.booleans())
@example("", False)
@example("..", False)
@example("%empty", False)
@example("%~" + "0" * 32, False)
@example("x%~" + "0" * 32, True)
@example("\ud800", True)
@example("e\u0301", False)
def test_names_come_back(name, top):
    node = zarr3.escape(name, top=top)
    assert zarr3.unescape(node, top=top) in {name, None}
    if len(name.encode("utf-8", "surrogatepass")) <= zarr3.MAX_NODE_NAME_BYTES // 3:
        assert zarr3.unescape(node, top=top) == name


@given(names, st.booleans())
def test_nodes_are_safe_everywhere(name, top):
    node = zarr3.escape(name, top=top)
    assert 1 <= len(node.encode("ascii")) <= zarr3.MAX_NODE_NAME_BYTES
    assert not set(node) - set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-+=@,()%~")
    assert node.strip("."), "Zarr forbids names of dots only"
    assert not node.startswith("__"), "Zarr reserves these"
    assert node != "zarr.json"
    if top:
        assert not node.startswith(".")
        assert node not in {"assets", "manifest.json"}


@given(names, names, st.booleans())
def test_different_names_are_different_nodes(a, b, top):
    assert (zarr3.escape(a, top=top) == zarr3.escape(b, top=top)) == (a == b)


def test_different_long_names_are_different_nodes():
    stems = [
        "x" * 200,
        "x" * 201,
        "x" * 202,
        "ü" * 66,
        "ü" * 67,
        "ü" * 67 + "x",
        "/" * 300,
        "/" * 301,
        "x" * 119 + "/" * 99,
    ]
    nodes = {zarr3.escape(stem) for stem in stems}
    assert len(nodes) == len(stems)
    assert zarr3.unescape(zarr3.escape("x" * 201)) is None
    assert zarr3.unescape(zarr3.escape("x" * 200)) == "x" * 200


@pytest.mark.parametrize(
    ("name", "node"),
    [
        ("layers.0.attn.wq.weight", "layers.0.attn.wq.weight"),
        ("a b", "a%20b"),
        ("a/b", "a%2Fb"),
        ("50%", "50%25"),
        ("größe", "gr%C3%B6%C3%9Fe"),
        ("", "%empty"),
        (".", "%2E"),
        ("..", "%2E."),
        ("__x__", "%5F_x__"),
        ("zarr.json", "%7Aarr.json"),
        ("assets", "assets"),
        ("c.0.0", "c.0.0"),
        ("_fsdp_wrapped_module.w", "_fsdp_wrapped_module.w"),
        ("weight@lora(q,v)+1=2", "weight@lora(q,v)+1=2"),
    ],
)
def test_the_escapes_that_the_format_names(name, node):
    assert zarr3.escape(name) == node


@pytest.mark.parametrize("name", ["assets", "manifest.json", ".step", ".zarr"])
def test_the_top_of_a_step_keeps_its_own_names(name):
    node = zarr3.escape(name, top=True)
    assert node == f"%{ord(name[0]):02X}{name[1:]}"
    assert zarr3.unescape(node, top=True) == name
    assert zarr3.escape(name) == name


@pytest.mark.parametrize(
    "node", ["", "a b", "a/b", "%", "%2", "%zz", "%2f", "%41", "..", "__x", "%ff", "ü", "a%empty", "x" * 201]
)
def test_nodes_that_escape_never_makes_are_refused(node):
    with pytest.raises(FormatError):
        zarr3.unescape(node)


def test_paths_of_names():
    assert zarr3.path_of_name("model/layers.0.wq.weight") == "model/layers.0.wq.weight"
    assert zarr3.path_of_name("model/a%2Fb%25") == "model/a%2Fb%25"
    assert zarr3.path_of_name("a//b") == "a/%empty/b"
    assert zarr3.path_of_name("assets/assets") == "%61ssets/assets"
    assert zarr3.node_path(["..", "../x"]) == "%2E./..%2Fx"
    assert os.path.normpath(zarr3.path_of_name("../../x")) == zarr3.path_of_name("../../x"), "no way out of the step"
    with pytest.raises(FormatError, match="'%' stands only in"):
        zarr3.path_of_name("a%20b")
    with pytest.raises(MismatchError, match="put the tensor into a dict"):
        zarr3.node_path([])


@given(st.lists(names, min_size=1, max_size=4))
def test_a_name_and_its_components_have_one_path(components):
    name = "/".join(part.replace("%", "%25").replace("/", "%2F") for part in components)
    assume(
        not any(re.search(r"~\d+(@rank\d+)?\Z", part) for part in components)
    )  # marks of duplicates stand as they are
    assert zarr3.path_of_name(name) == zarr3.node_path(components)


# --- array documents -----------------------------------------------------------------------------------------


def columns(shape, parts):
    step = shape[1] // parts
    return [Box((0, p * step), (shape[0], (p + 1) * step)) for p in range(parts)]


LAYOUTS = {
    "scalar": choose((), 4),
    "empty": choose((0, 3), 4),
    "one chunk": choose((10, 7), 4),
    "bands": choose((10, 7), 4, chunk_bytes=56),
    "padded": choose((11, 7), 4, chunk_bytes=112),
    "panels": choose((8, 8), 4, columns((8, 8), 2)),
    "panels and bands": choose((8, 8), 4, columns((8, 8), 2), chunk_bytes=32),
    "objects": choose((8, 8), 4, columns((8, 8), 4), many=True),
    "sharded objects": choose((64, 8), 4, many=True, block_bytes=512, chunk_bytes=64),
    "4-D": choose((3, 4, 5, 6), 4, chunk_bytes=200),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_documents_come_back(name):
    layout = LAYOUTS[name]
    document = zarr3.array_json(layout, F32, None, {"note": ["x", 1.5]})
    meta = zarr3.parse_array_json(zarr3.dump(document))
    meta.check(layout, F32, None)
    assert (meta.shape, meta.dtype, meta.codec) == (layout.shape, F32, None)
    assert meta.attributes == {"note": ["x", 1.5]}
    assert zarr3.parse_array_json(document) == meta
    assert zarr3.dump(document) == zarr3.dump(copy.deepcopy(document))


@pytest.mark.parametrize("dtype", dtypes.BY_NAME.values(), ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("word", [None, "zstd", "blosc"])
def test_documents_of_every_type_and_codec_are_what_zarr_writes(dtype, word):
    from zarr.core.metadata import ArrayV3Metadata

    import ckptfs.zarr_plugin  # noqa: F401 - the data types that zarr lacks

    codec = Codec.spec(word, dtype)
    layout = choose((8, 8), dtype.itemsize, many=True, compressed=codec is not None, chunk_bytes=64, block_bytes=256)
    document = json.loads(zarr3.dump(zarr3.array_json(layout, dtype, codec)))
    theirs = json.loads(json.dumps(ArrayV3Metadata.from_dict(copy.deepcopy(document)).to_dict()))
    assert theirs == document
    zarr3.parse_array_json(document).check(layout, dtype, codec)


def test_the_document_of_another_layout_is_noticed():
    for (a, one), (b, two) in product(LAYOUTS.items(), repeat=2):
        meta = zarr3.parse_array_json(zarr3.array_json(one, F32, None))
        if a == b:
            meta.check(two, F32, None)
        else:
            with pytest.raises(FormatError, match="the manifest"):
                meta.check(two, F32, None)


def test_layout_dtype_and_codec_must_agree():
    with pytest.raises(MismatchError):
        zarr3.array_json(choose((4,), 4), dtypes.of("int8"), None)
    with pytest.raises(MismatchError):
        zarr3.array_json(choose((4,), 4), F32, Codec.spec("zstd", F32))
    with pytest.raises(MismatchError):
        zarr3.array_json(choose((4,), 4, many=True, compressed=True), F32, None)


SHARDED = zarr3.array_json(LAYOUTS["bands"], F32, None)
PLAIN = zarr3.array_json(LAYOUTS["one chunk"], F32, None)
SIMPLE_LIES = {
    "version": ("zarr_format", 2),
    "version text": ("zarr_format", "3"),
    "node": ("node_type", "group"),
    "type": ("data_type", "float31"),
    "type object": ("data_type", {"name": "float32"}),
    "wrong width is another type": ("data_type", "int8"),
    "grid": ("chunk_grid", {"name": "rectilinear", "configuration": {"chunk_shape": [10, 7]}}),
    "grid empty": ("chunk_grid", {}),
    "grid null": ("chunk_grid", None),
    "chunk zero": ("chunk_grid", {"name": "regular", "configuration": {"chunk_shape": [0, 7]}}),
    "chunk dims": ("chunk_grid", {"name": "regular", "configuration": {"chunk_shape": [10]}}),
    "keys": ("chunk_key_encoding", {"name": "default", "configuration": {"separator": "/"}}),
    "fill": ("fill_value", 1.0),
    "fill bool": ("fill_value", False),
    "fill text": ("fill_value", "NaN"),
    "shape negative": ("shape", [-10, 7]),
    "shape bool": ("shape", [True, 7]),
    "shape float": ("shape", [10.0, 7]),
    "shape huge": ("shape", [1 << 63, 7]),
    "shape text": ("shape", "10"),
    "shape null": ("shape", None),
    "attributes": ("attributes", []),
    "transformers": ("storage_transformers", [{"name": "x"}]),
    "codecs null": ("codecs", None),
    "codecs empty": ("codecs", []),
    "codecs order": ("codecs", [Codec.spec("zstd", F32).to_json(), {"name": "bytes"}]),
    "codecs big endian": ("codecs", [{"name": "bytes", "configuration": {"endian": "big"}}]),
    "codecs no endian": ("codecs", [{"name": "bytes"}]),
    "codecs three": ("codecs", PLAIN["codecs"] + [Codec.spec("zstd", F32).to_json()] * 2),
    "codecs words": ("codecs", ["bytes"]),
}


@pytest.mark.parametrize("lie", SIMPLE_LIES)
@pytest.mark.parametrize("document", [PLAIN, SHARDED], ids=["plain", "sharded"])
def test_a_document_that_lies_is_a_format_error(document, lie):
    key, value = SIMPLE_LIES[lie]
    with pytest.raises(FormatError):
        zarr3.parse_array_json(json.dumps({**document, key: value}).encode())


@pytest.mark.parametrize("key", sorted(PLAIN))
def test_a_missing_key_is_a_format_error(key):
    with pytest.raises(FormatError, match="keys"):
        zarr3.parse_array_json({k: v for k, v in PLAIN.items() if k != key})


def test_an_unknown_key_is_a_format_error():
    with pytest.raises(FormatError, match="keys"):
        zarr3.parse_array_json({**PLAIN, "dimension_names": ["x", "y"]})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("chunk_shape", [3, 7]),
        ("chunk_shape", [2]),
        ("chunk_shape", [0, 7]),
        ("index_location", "start"),
        ("index_codecs", [{"name": "bytes", "configuration": {"endian": "little"}}]),
        ("codecs", SHARDED["codecs"]),
        ("codecs", []),
        ("codecs", None),
        ("extra", 1),
    ],
)
def test_a_sharding_codec_that_lies_is_a_format_error(key, value):
    document = copy.deepcopy(SHARDED)
    document["codecs"][0]["configuration"][key] = value
    with pytest.raises(FormatError):
        zarr3.parse_array_json(document)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b'{"a":1,"a":2}',
        b'{"x":{"a":1,"a":1}}',
        b'{"fill_value":NaN}',
        b'{"fill_value":-Infinity}',
        b"\xff\xfe",
        b'{"a":' + b"9" * 10000 + b"}",
        b'{"a":' + b"[" * 100_000,
        b'{"a":1}x',
    ],
    ids=lambda data: repr(data[:16]),
)
def test_what_is_not_strict_json_is_a_format_error(data):
    with pytest.raises(FormatError):
        zarr3.load(data)


# --- groups --------------------------------------------------------------------------------------------------


def test_the_root_lists_every_node_parents_first_and_siblings_together():
    arrays = dict.fromkeys(["b/x", "A/z", "a/y", "A/deep/er/w", "top", "b.c/q", "b/y"], PLAIN)
    root = zarr3.root_json(arrays, {"ckptfs": 1})
    nodes = root["consolidated_metadata"]["metadata"]
    assert set(nodes) == set(arrays) | {"A", "a", "b", "b.c", "A/deep", "A/deep/er"}
    parents = [path.rpartition("/")[0] for path in nodes]
    assert [p for p, before in zip(parents, ["-", *parents], strict=False) if p != before] == list(
        dict.fromkeys(parents)
    )
    assert [path.count("/") for path in nodes] == sorted(path.count("/") for path in nodes)
    assert root["attributes"] == {"ckptfs": 1}
    assert zarr3.groups_of(arrays) == ["A", "a", "b", "b.c", "A/deep", "A/deep/er"]


def test_an_array_holds_no_arrays():
    with pytest.raises(MismatchError, match="'a' is an array"):
        zarr3.root_json({"a": PLAIN, "a/b": PLAIN})


# --- shard index ---------------------------------------------------------------------------------------------


def slow_crc32c(data):
    """CRC-32C bit by bit, from its definition."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@given(st.binary(max_size=100))
@example(b"123456789")
def test_crc32c_is_the_one_of_its_definition(data):
    assert zarr3.crc32c(data) == slow_crc32c(data)
    assert slow_crc32c(b"123456789") == 0xE3069283


entries_lists = st.lists(st.tuples(st.integers(0, 1 << 61), st.integers(0, 1 << 61)) | st.just((-1, -1)), max_size=20)


@given(entries_lists)
def test_an_index_comes_back(entries):
    data = zarr3.shard_index(entries)
    words = [word & (1 << 64) - 1 for entry in entries for word in entry]
    table = struct.pack(f"<{len(words)}Q", *words)
    assert data == table + struct.pack("<I", slow_crc32c(table))
    assert zarr3.parse_index(data, len(entries)) == entries


def with_crc(*words):
    table = struct.pack(f"<{len(words)}Q", *words)
    return table + struct.pack("<I", slow_crc32c(table))


ONES = (1 << 64) - 1


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(with_crc(0, 8), id="one chunk too few"),
        pytest.param(with_crc(0, 8, 8, 8, 16, 8), id="one chunk too many"),
        pytest.param(with_crc(0, 8, 8, 8)[:-1], id="cut"),
        pytest.param(b"", id="nothing"),
        pytest.param(with_crc(0, 8, 8, 9), id="beyond the data"),
        pytest.param(with_crc(0, 8, ONES, 8), id="half missing, offset"),
        pytest.param(with_crc(0, 8, 8, ONES), id="half missing, length"),
        pytest.param(with_crc(0, 8, ONES - 7, 8), id="overflows to zero"),
        pytest.param(with_crc(0, 8, 1 << 63, 8), id="negative"),
    ],
)
def test_an_index_that_lies_is_a_format_error(data):
    with pytest.raises(FormatError):
        zarr3.parse_index(data, 2, 16)


def test_a_flipped_bit_of_an_index_is_corrupt():
    good = zarr3.shard_index([(0, 8), (8, 8)])
    for bit in range(len(good) * 8):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptError):
            zarr3.parse_index(bytes(bad), 2, 16)


def test_a_layout_and_its_index_agree():
    layout = Layout((12, 4), 4, (4, 4), (2, 4), many=True)
    for file in range(layout.files):
        data = zarr3.shard_index(layout.index_entries(file))
        assert len(data) == layout.index_bytes
        assert zarr3.parse_index(data, layout.chunks_per_block, layout.used_bytes(file)) == layout.index_entries(file)
