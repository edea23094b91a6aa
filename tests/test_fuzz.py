"""Every parser of bytes from outside, fuzzed: whatever it is given, a legal object or one of our errors.

`CKPTFS_FUZZ_EXAMPLES` is the number of inputs for each parser: 300 takes seconds, which CI does every time; more is for
the long run. Manifests, trees and maps are fuzzed beside their own tests, by changing good ones.
"""

from __future__ import annotations

import copy
import json
import os
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptfs
from ckptfs import dtypes, rules, tree, zarr3
from ckptfs.cli.show import parse_index
from ckptfs.codec import Codec
from ckptfs.convert.safetensors import Header
from ckptfs.errors import CkptError, CorruptError, FormatError, MismatchError
from ckptfs.grid import Layout
from ckptfs.manifest import Manifest
from ckptfs.run import split_url

fuzz = settings(
    max_examples=int(os.environ.get("CKPTFS_FUZZ_EXAMPLES", "300")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)

# Things that have surprised parsers: huge and nested numbers, halves of pairs, names of other things.
odd = st.sampled_from(
    [0, -1, 1, 1 << 31, 1 << 63, 1 << 64, 10**400, 1.5, 1e308, True, "", "\0", "\ud800", "é" * 200, "../x", "float32", "zstd", "blosc", "bytes", [], {}, [[[[[]]]]]]
)  # fmt: skip
any_json = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=6) | odd,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def places(node, path=()):
    yield path
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from places(value, (*path, key))


@st.composite
def damaged(draw, good):
    """A good document with up to three places replaced or removed."""
    node = json.loads(json.dumps(draw(good)))
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(places(node))))
        value = copy.deepcopy(draw(any_json))  # later edits must not change what is drawn from
        if not path:
            node = value
            continue
        at = node
        for key in path[:-1]:
            at = at[key]
        if draw(st.booleans()):
            at[path[-1]] = value
        else:
            del at[path[-1]]
    return node


def text_of(document):
    return json.dumps(document).encode("utf-8", "surrogatepass")


# --- documents -------------------------------------------------------------------------------------------------------

junk = st.binary(max_size=200) | any_json.map(text_of)


@fuzz
@given(junk)
def test_any_bytes_are_a_document_or_an_error(raw):
    for parse in (zarr3.load, zarr3.parse_array_json, Manifest.parse, rules.loads, tree.loads):
        try:
            parse(raw)
        except CkptError:
            pass


def array_documents():
    out = []
    for name in ("float32", "bfloat16", "int8", "complex64"):
        dtype = dtypes.BY_NAME[name]
        for sizes, many in ((((12, 4), (12, 4)), False), (((4, 4), (2, 4)), True)):
            for codec in (None, Codec("zstd", 3), Codec.spec("blosc", dtype)):
                layout = Layout((12, 4), dtype.itemsize, *sizes, many=many, compressed=codec is not None)
                out.append(zarr3.array_json(layout, dtype, codec, {"note": [1, "x"]}))
    return out


@fuzz
@given(damaged(st.sampled_from(array_documents())))
def test_a_damaged_array_document_is_an_array_or_a_format_error(document):
    try:
        found = zarr3.parse_array_json(text_of(document))
    except FormatError:
        return
    assert all(isinstance(n, int) for n in (*found.shape, *found.outer, *found.inner))


FLOAT = dtypes.BY_NAME["float32"]
CODECS = [codec.to_json() for codec in (Codec("zstd", 3), Codec.spec("blosc", FLOAT)) if codec]


@fuzz
@given(any_json | damaged(st.sampled_from(CODECS)))
def test_any_codec_document_is_a_codec_or_a_format_error(document):
    try:
        found = Codec.from_json(document)
    except FormatError:
        return
    data = bytes(range(256)) * 4
    assert bytes(found.decode(found.encode(data), len(data))) == data


@fuzz
@given(st.binary(max_size=80), st.integers(0, 5), st.none() | st.integers(0, 100), st.booleans())
def test_any_shard_index_is_one_or_an_error(raw, chunks, data_bytes, signed):
    if signed:
        raw += struct.pack("<I", zarr3.crc32c(raw))
    try:
        entries = zarr3.parse_index(raw, chunks, data_bytes)
    except (FormatError, CorruptError):
        return
    assert len(entries) == chunks
    for offset, length in entries:
        assert (offset, length) == (-1, -1) or 0 <= offset <= offset + length <= (data_bytes or 1 << 64)


HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]},
}


@fuzz
@given(junk | damaged(st.just(HEADER)).map(text_of), st.sampled_from([26, 100]))
def test_any_safetensors_header_is_one_or_a_format_error(raw, size):
    try:
        found = Header.parse(raw, 0, size)
    except FormatError:
        return
    assert sum(t.stop - t.start for t in found.tensors) == size


# --- names and URLs --------------------------------------------------------------------------------------------------

words = st.lists(
    st.sampled_from(["a", "run", "@", "latest", "1", "/", "..", ".", "~", "%2F", "%00", "%", "%ED%A0%80", "é", "\0", "\udc80", " ", "\n", "a" * 300, "9" * 5000, "٣", ":", ",", "+", "-", "..."])
    | st.text(max_size=3),
    max_size=6,
).map("".join)  # fmt: skip


@fuzz
@given(
    st.sampled_from(["", "run@", "file://", "file:///", "memory://", "memory://a@", "nope://", "://", "FILE://"]), words
)
def test_any_url_is_opened_or_an_error_of_ours(tmp_path, monkeypatch, scheme, rest):
    """Only schemes that stay on this machine."""
    monkeypatch.chdir(tmp_path)
    url = scheme + rest
    base, step = split_url(url)
    assert step is None or url.startswith(base + "@")
    try:
        ckptfs.open(url)
    except CkptError:
        pass
    assert not list(tmp_path.iterdir()), "opening wrote something"


@fuzz
@given(words)
def test_any_name_has_a_path_or_is_an_error(name):
    try:
        path = zarr3.path_of_name(name)
    except CkptError:
        return
    assert not path.startswith("/")
    assert not {"", ".", ".."} & set(path.split("/"))
    assert "\0" not in path


@fuzz
@given(words)
def test_any_node_is_a_component_or_a_format_error(node):
    try:
        component = zarr3.unescape(node)
    except FormatError:
        return
    assert component is None or zarr3.escape(component) == node


@fuzz
@given(words)
def test_any_index_is_one_or_a_mismatch(text):
    try:
        found = parse_index(text)
    except MismatchError:
        return
    assert isinstance(found, tuple)


def test_the_fuzzer_reaches_good_documents_too():
    """A strategy that only ever makes refused input would prove nothing."""
    accepted = [zarr3.parse_array_json(text_of(document)) for document in array_documents()]
    assert len(accepted) == 24
    assert len(Header.parse(text_of(HEADER), 0, 26).tensors) == 2
    assert zarr3.parse_index(zarr3.shard_index([(0, 8)]), 1, 8) == [(0, 8)]
    with pytest.raises(CkptError):
        ckptfs.open("nope://x")
