"""Stock Zarr readers open the bytes of the format: zarr-python, TensorStore and zarrs.

The writer here is slow and obvious, with numpy and plain files; it shares only the layout and the documents with
the real one. What it writes is what docs/format.md says.
"""

import itertools
import json
import subprocess
import sys
from math import prod

import ml_dtypes
import numpy as np
import pytest

import ckptfs.zarr_plugin  # noqa: F401 - zarr.open_array, unlike open_group, does not ask for plug-ins
from ckptfs import dtypes, zarr3
from ckptfs.box import Box
from ckptfs.codec import Codec
from ckptfs.grid import Layout, choose

# --- a slow writer -------------------------------------------------------------------------------------------


def write_array(folder, layout, array, codec=None):
    """The array as zarr.json and files, chunk by chunk."""
    dtype = dtypes.of(array.dtype)
    folder.mkdir(parents=True, exist_ok=True)
    document = zarr3.array_json(layout, dtype, codec)
    (folder / "zarr.json").write_bytes(zarr3.dump(document))
    for file in range(layout.files):
        blocks = [file] if layout.many else range(layout.blocks)
        chunks = [chunk for block in blocks for chunk in block_chunks(layout, array, block)]
        stored = [codec.encode(chunk) for chunk in chunks] if codec else chunks
        lengths = [len(chunk) for chunk in stored] if codec else None
        data = b"".join(stored)
        if layout.sharded:
            data += zarr3.shard_index(layout.index_entries(file, lengths))
        if not codec:
            assert len(data) == layout.file_bytes(file)
        (folder / layout.key(file)).write_bytes(data)
    return document


def block_chunks(layout, array, block):
    """The used chunks of a block, padded with zeros."""
    raw = bytearray(layout.used_bytes(block))
    start = block * layout.block_bytes
    for offset, valid, padded in layout.parts(start, start + len(raw)):
        piece = np.zeros(padded.shape, array.dtype)
        if valid.size:
            piece[valid.within(padded.start).slices] = array[valid.slices]
        raw[offset : offset + piece.nbytes] = piece.tobytes()
    return [bytes(raw[at : at + layout.chunk_bytes]) for at in range(0, len(raw), layout.chunk_bytes)]


def write_step(folder, arrays):
    """A step's Zarr side: {node path: (layout, array, codec)}."""
    documents = {path: write_array(folder / path, *made) for path, made in arrays.items()}
    for group in zarr3.groups_of(documents):
        (folder / group / "zarr.json").write_bytes(zarr3.dump(zarr3.group_json()))
    (folder / "zarr.json").write_bytes(zarr3.dump(zarr3.root_json(documents, {"made by": "a test"})))


# --- readers -------------------------------------------------------------------------------------------------


def read_zarr(path):
    import zarr

    return zarr.open_array(path, mode="r")[...]


def read_tensorstore(path):
    import tensorstore

    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}
    return tensorstore.open(spec, open=True, read=True).result().read().result()


def read_zarrs(path):
    import zarr
    import zarrs  # noqa: F401 - registers its pipeline

    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline", "codec_pipeline.strict": True}):
        return zarr.open_array(path, mode="r")[...]


READERS = {"zarr": read_zarr, "tensorstore": read_tensorstore, "zarrs": read_zarrs}


def check(reader, path, array):
    found = np.asarray(READERS[reader](path))
    assert found.dtype == array.dtype
    assert found.shape == array.shape
    assert np.ascontiguousarray(found).tobytes() == array.tobytes()


# --- arrays --------------------------------------------------------------------------------------------------


def columns(shape, parts, dim=1):
    step = -(-shape[dim] // parts)
    boxes = []
    for part in range(parts):
        start, stop = [0] * len(shape), list(shape)
        start[dim], stop[dim] = min(part * step, shape[dim]), min((part + 1) * step, shape[dim])
        boxes.append(Box(tuple(start), tuple(stop)))
    return boxes


def layouts(itemsize):
    """Every kind of layout, with the word for its codec."""
    size = itemsize
    made = {
        "scalar": choose((), size),
        "scalar object": choose((), size, many=True),
        "empty": choose((0, 3), size),
        "empty later": choose((3, 0, 2), size, many=True),
        "exact": choose((10, 7), size),
        "one element": choose((1,), size),
        "bands": choose((12, 8), size, chunk_bytes=16 * size),
        "bands padded": choose((11, 7), size, chunk_bytes=14 * size),
        "bands of a vector": choose((1000,), size, chunk_bytes=96 * size),
        "inside a row": choose((3, 64), size, chunk_bytes=16 * size),
        "panels": choose((8, 12), size, columns((8, 12), 3)),
        "panels cut": choose((8, 12), size, columns((8, 12), 3), chunk_bytes=8 * size),
        "panels uneven": choose((7, 10), size, columns((7, 10), 4), chunk_bytes=6 * size),
        "panels of the last dimension": choose((3, 4, 8), size, columns((3, 4, 8), 2, dim=2)),
        "4-D": choose((3, 4, 5, 6), size, chunk_bytes=40 * size),
        "4-D panels": choose((3, 4, 6, 5), size, columns((3, 4, 6, 5), 3, dim=2), chunk_bytes=20 * size),
        "padded panels": Layout((5, 7), size, (6, 4), (2, 4)),
        "objects": choose((9, 8), size, many=True, block_bytes=16 * size),
        "objects in a grid": choose((8, 12), size, columns((8, 12), 3), many=True),
        "objects with chunks": choose((50, 8), size, many=True, block_bytes=128 * size, chunk_bytes=16 * size),
        "objects 4-D": Layout((3, 4, 5, 6), size, (2, 4, 3, 6), (1, 1, 3, 6), many=True),
    }
    out = {name: (layout, None) for name, layout in made.items()}
    for word in ("zstd", "blosc"):
        out[f"{word} exact"] = (choose((10, 7), size, many=True, compressed=True), word)
        out[f"{word} scalar"] = (choose((), size, many=True, compressed=True), word)
        out[f"{word} empty"] = (choose((0, 3), size, many=True, compressed=True), word)
        out[f"{word} chunks"] = (
            choose((50, 8), size, many=True, compressed=True, block_bytes=128 * size, chunk_bytes=16 * size),
            word,
        )
    return out


def values(dtype, shape):
    """Every bit pattern that the type allows, in no order."""
    raw = np.random.default_rng(abs(hash(shape)) % 1000).integers(0, 256, prod(shape) * dtype.itemsize, "u1")
    if dtype.name == "bool":
        raw &= 1
    return raw.view(dtype.numpy).reshape(shape)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", layouts(4))
def test_every_layout_reads_back(name, reader, tmp_path):
    layout, word = layouts(4)[name]
    dtype = dtypes.of("float32")
    array = values(dtype, layout.shape)
    write_array(tmp_path, layout, array, Codec.spec(word, dtype))
    check(reader, tmp_path, array)


# zarrs 0.2 has no float8_e4m3fn, and its Python side refuses the types that numpy lacks (all but float8_e5m2 there).
ZARRS_REFUSES = {"bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2fnuz"}


def check_as_carrier(folder, array):
    """zarrs refuses the type by its name and reads the very same files as unsigned integers."""
    from zarrs.pipeline import UnsupportedDataTypeError, UnsupportedMetadataError

    with pytest.raises((UnsupportedDataTypeError, UnsupportedMetadataError)):
        read_zarrs(folder)
    document = json.loads((folder / "zarr.json").read_bytes())
    document |= {"data_type": f"uint{8 * array.itemsize}", "fill_value": 0}
    (folder / "zarr.json").write_text(json.dumps(document))
    check("zarrs", folder, np.frombuffer(array.tobytes(), f"u{array.itemsize}").reshape(array.shape))


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("dtype", dtypes.BY_NAME.values(), ids=lambda dtype: dtype.name)
def test_every_type_reads_back(dtype, reader, tmp_path):
    for number, name in enumerate(
        ("scalar", "empty", "exact", "bands padded", "panels cut", "zstd chunks", "blosc chunks")
    ):
        layout, word = layouts(dtype.itemsize)[name]
        array = values(dtype, layout.shape)
        folder = tmp_path / str(number)
        write_array(folder, layout, array, Codec.spec(word, dtype))
        if reader != "zarrs" or dtype.name not in ZARRS_REFUSES:
            check(reader, folder, array)
        elif array.size:
            check_as_carrier(folder, array)


@pytest.mark.parametrize("reader", READERS)
def test_random_layouts_read_back(reader, tmp_path):
    random = np.random.default_rng(11)
    dtype = dtypes.of("int16")
    for number in range(40):
        shape = tuple(int(d) for d in random.integers(1, 9, random.integers(1, 5)))
        parts, dim = int(random.integers(1, 4)), int(random.integers(0, len(shape)))
        many = bool(random.integers(0, 2))
        chunk_bytes, block_bytes = (int(random.choice(sizes)) for sizes in ([8, 32, 4096], [64, 4096]))
        boxes = columns(shape, parts, dim)
        layout = choose(shape, 2, boxes, many=many, chunk_bytes=chunk_bytes, block_bytes=block_bytes)
        array = values(dtype, shape)
        write_array(tmp_path / str(number), layout, array)
        check(reader, tmp_path / str(number), array)


# --- a whole step --------------------------------------------------------------------------------------------

NAMES = [
    "model/layers.0.wq.weight",
    "model/a%2Fb c",
    "optim/exp_avg/größe",
    "../..",
    "top",
    "MODEL/x",
    "model/",
    "assets",
]


def write_names(folder):
    arrays, by_path = {}, {}
    for name, dtype in zip(NAMES, itertools.cycle(["bfloat16", "float8_e4m3fn", "float32"]), strict=False):
        kind = dtypes.of(dtype)
        layout, _ = layouts(kind.itemsize)["bands padded"]
        path = zarr3.path_of_name(name)
        by_path[path] = values(kind, layout.shape)
        arrays[path] = (layout, by_path[path], None)
    write_step(folder, arrays)
    return by_path


PLAIN_ZARR = """
import json, sys, zarr
group = zarr.open_group(sys.argv[1], mode="r", use_consolidated={consolidated})
found = {{path: [str(node.dtype), node[...].tobytes().hex()] for path, node in group.members(None) if isinstance(node, zarr.Array)}}
assert "torch" not in sys.modules
json.dump(found, sys.stdout)
"""


@pytest.mark.parametrize("consolidated", [True, False])
def test_plain_zarr_opens_a_step_that_ckptfs_never_touched(consolidated, tmp_path):
    """A process that imports only zarr: the data types come through the entry points of the installed package."""
    arrays = write_names(tmp_path / "step")
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        PLAIN_ZARR.format(consolidated=consolidated),
        str(tmp_path / "step"),
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    expected = {path: [array.dtype.name, array.tobytes().hex()] for path, array in arrays.items()}
    assert json.loads(done.stdout) == expected


def test_consolidated_metadata_is_what_zarr_itself_consolidates(tmp_path):
    import warnings

    import zarr

    write_names(tmp_path)
    ours = json.loads((tmp_path / "zarr.json").read_bytes())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zarr.consolidate_metadata(tmp_path)
    theirs = json.loads((tmp_path / "zarr.json").read_bytes())
    assert ours == theirs


@pytest.mark.parametrize("reader", READERS)
def test_arrays_of_a_step_open_one_by_one(reader, tmp_path):
    for path, array in write_names(tmp_path).items():
        if reader != "zarrs" or array.dtype.name not in ZARRS_REFUSES:
            check(reader, tmp_path / path, array)


# --- zarr writes our types -----------------------------------------------------------------------------------

EXTRA = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]


def fills(name):
    numbers = [0, 1.5, float("nan")]
    return numbers + [float("inf"), float("-inf")] * (name in {"bfloat16", "float8_e5m2"})


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("name", "fill"), [(name, fill) for name in EXTRA for fill in fills(name)])
def test_what_zarr_writes_tensorstore_reads(name, fill, sharded, tmp_path):
    import zarr

    dtype = np.dtype(getattr(ml_dtypes, name))
    shards = (4, 5) if sharded else None
    array = zarr.create_array(tmp_path, shape=(9, 5), chunks=(2, 5), shards=shards, dtype=dtype, fill_value=fill)
    data = values(dtypes.of(name), (4, 5))
    array[:4] = data
    expected = np.full((9, 5), fill, "f4").astype(dtype)
    expected[:4] = data
    for reader in ("zarr", "tensorstore"):
        found = np.asarray(READERS[reader](tmp_path))
        assert found[:4].tobytes() == data.tobytes()
        assert np.array_equal(found[4:].astype("f4"), expected[4:].astype("f4"), equal_nan=True)


@pytest.mark.parametrize("name", EXTRA)
def test_fill_values_of_every_bit_pattern_round_trip(name):
    from zarr.dtype import data_type_registry

    kind = data_type_registry.get(name)()
    width = kind.item_size
    for bits in range(0, 256**width, 1 if width == 1 else 37):
        value = np.array(bits, f"u{width}").view(kind.to_native_dtype())[()]
        written = json.loads(json.dumps(kind.to_json_scalar(value, zarr_format=3), allow_nan=False))
        back = kind.from_json_scalar(written, zarr_format=3)
        assert np.asarray(back).tobytes() == np.asarray(value).tobytes(), (bits, written)


@pytest.mark.parametrize("bad", ["inf", "0x", "0x123456", "0xzz", "nan", None, True, [1.0], {}])
@pytest.mark.parametrize("name", EXTRA)
def test_malformed_fill_values_are_refused(name, bad):
    from zarr.dtype import data_type_registry

    with pytest.raises((TypeError, ValueError)):
        data_type_registry.get(name)().from_json_scalar(bad, zarr_format=3)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_types_without_infinity_refuse_it(name):
    from zarr.dtype import data_type_registry

    with pytest.raises(ValueError, match="has no Infinity"):
        data_type_registry.get(name)().from_json_scalar("Infinity", zarr_format=3)
