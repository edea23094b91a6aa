"""Codecs: round trips, stock decoders, strict metadata, and inputs that lie about themselves."""

import subprocess
import sys
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs import dtypes
from ckptfs.codec import Codec, pays, sample_ranges
from ckptfs.errors import CorruptError, FormatError, MismatchError

ALL_DTYPES = list(dtypes.BY_NAME.values())
BOTH = ["zstd", "blosc"]
codecs = st.builds(Codec.spec, st.sampled_from(BOTH), st.sampled_from(ALL_DTYPES))


def weights(nbytes):
    """Bytes like those of a bfloat16 matrix."""
    values = (np.random.default_rng(5).standard_normal(nbytes // 4) * 0.02).astype("f4")
    return values.tobytes()


# --- round trips ---------------------------------------------------------------------------------------------


@given(codecs, st.binary(min_size=1, max_size=3000), st.integers(1, 90))
def test_what_goes_in_comes_out(codec, piece, times):
    data = piece * times
    coded = codec.encode(data)
    assert bytes(codec.decode(coded, len(data))) == data


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("nbytes", [1, 3, 15, 16, 127, 255, 256, 257, 65535, 65536, 65791, 65792, 70000, 1 << 20])
def test_sizes_around_every_header_form(name, nbytes):
    codec = Codec.spec(name, dtypes.of("float32"))
    data = (bytes(range(251)) * (nbytes // 251 + 1))[:nbytes]
    assert bytes(codec.decode(codec.encode(data), nbytes)) == data


@pytest.mark.parametrize("name", BOTH)
def test_decodes_in_place_from_and_to_any_buffer(name):
    codec = Codec.spec(name, dtypes.of("int16"))
    array = np.arange(5000, dtype="i2").reshape(50, 100)
    target = np.zeros_like(array)
    decoded = codec.decode(bytearray(codec.encode(array)), array.nbytes, out=memoryview(target).cast("B"))
    assert (target == array).all()
    assert decoded.nbytes == array.nbytes
    assert np.shares_memory(np.frombuffer(decoded, "u1"), target)


@pytest.mark.parametrize("name", BOTH)
def test_a_destination_of_another_size_is_refused(name):
    codec = Codec.spec(name, dtypes.of("uint8"))
    with pytest.raises(MismatchError):
        codec.decode(codec.encode(b"abc" * 100), 300, out=memoryview(bytearray(301)))


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("name", BOTH)
def test_zarr_decodes_with_nothing_but_the_metadata(name, dtype, tmp_path):
    import zarr

    codec = Codec.spec(name, dtype)
    data = weights(64 << 10)
    size = len(data)
    array = zarr.create_array(tmp_path, shape=(size,), chunks=(size,), dtype="u1", compressors=[codec.to_json()])
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "0").write_bytes(codec.encode(data))
    assert array[:].tobytes() == data


def test_weights_shrink_as_measured():
    """Order of magnitude only: normal values in bfloat16 keep about three quarters."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    data = (np.random.default_rng(1).standard_normal(1 << 19) * 0.02).astype(ml_dtypes.bfloat16).tobytes()
    for name in BOTH:
        codec = Codec.spec(name, dtypes.of("bfloat16"))
        assert 0.6 < len(codec.encode(data)) / len(data) < 0.85
        assert pays(data, codec)


# --- does it pay ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BOTH)
def test_noise_does_not_pay_and_zeros_do(name):
    codec = Codec.spec(name, dtypes.of("uint8"))
    noise = np.random.default_rng(0).bytes(1 << 16)
    assert not pays(noise, codec)
    assert pays(bytes(1 << 16), codec)
    assert not pays(b"", codec)
    assert len(codec.encode(noise)) <= len(noise) + 64, "what one chunk may cost when the sample misled"


@given(st.integers(0, 5_000_000), st.sampled_from([1, 2, 4, 8, 16]))
def test_sample_ranges_are_whole_elements_inside_and_apart(elements, itemsize):
    nbytes = elements * itemsize
    ranges = sample_ranges(nbytes, itemsize)
    assert all(0 <= a < z <= nbytes and a % itemsize == z % itemsize == 0 for a, z in ranges)
    assert all(before[1] <= after[0] for before, after in pairwise(ranges))
    assert sum(z - a for a, z in ranges) <= 4 * (64 << 10)
    if nbytes:
        assert ranges[0][0] == 0
        assert ranges[-1][1] == nbytes


# --- metadata ------------------------------------------------------------------------------------------------


@given(codecs)
def test_metadata_round_trips(codec):
    assert Codec.from_json(codec.to_json()) == codec


def test_metadata_is_the_registered_form():
    zstd = {"name": "zstd", "configuration": {"level": 3, "checksum": False}}
    assert Codec.spec("zstd", dtypes.of("int8")).to_json() == zstd
    configuration = {"typesize": 4, "cname": "lz4", "clevel": 5, "shuffle": "bitshuffle", "blocksize": 0}
    assert Codec.spec("blosc", dtypes.of("complex64")).to_json() == {"name": "blosc", "configuration": configuration}


def test_no_compression_is_no_codec_and_unknown_words_are_refused():
    assert Codec.spec(None, dtypes.of("int8")) is None
    with pytest.raises(MismatchError, match="'gzip' is not known; use None, 'zstd', 'blosc'"):
        Codec.spec("gzip", dtypes.of("int8"))


BLOSC = {"typesize": 4, "cname": "lz4", "clevel": 5, "shuffle": "bitshuffle", "blocksize": 0}
LIES = {
    "no object": [],
    "null": None,
    "word": "zstd",
    "no name": {"configuration": {}},
    "no configuration": {"name": "zstd"},
    "more keys": {"name": "zstd", "configuration": {"level": 3, "checksum": False}, "x": 1},
    "configuration is a list": {"name": "zstd", "configuration": []},
    "unknown codec": {"name": "gzip", "configuration": {"level": 3}},
    "name is a list": {"name": ["zstd"], "configuration": {"level": 3, "checksum": False}},
    "level missing": {"name": "zstd", "configuration": {"checksum": False}},
    "level too high": {"name": "zstd", "configuration": {"level": 23, "checksum": False}},
    "level true": {"name": "zstd", "configuration": {"level": True, "checksum": False}},
    "level float": {"name": "zstd", "configuration": {"level": 3.0, "checksum": False}},
    "level huge": {"name": "zstd", "configuration": {"level": 10**400, "checksum": False}},
    "checksum on": {"name": "zstd", "configuration": {"level": 3, "checksum": True}},
    "checksum 0": {"name": "zstd", "configuration": {"level": 3, "checksum": 0}},
    "setting too many": {"name": "zstd", "configuration": {"level": 3, "checksum": False, "dict": "x"}},
    "clevel": {"name": "blosc", "configuration": BLOSC | {"clevel": 10}},
    "cname": {"name": "blosc", "configuration": BLOSC | {"cname": "snappy"}},
    "cname is a list": {"name": "blosc", "configuration": BLOSC | {"cname": ["lz4"]}},
    "shuffle": {"name": "blosc", "configuration": BLOSC | {"shuffle": 1}},
    "typesize zero": {"name": "blosc", "configuration": BLOSC | {"typesize": 0}},
    "typesize too big": {"name": "blosc", "configuration": BLOSC | {"typesize": 256}},
    "blocksize": {"name": "blosc", "configuration": BLOSC | {"blocksize": -1}},
}


@pytest.mark.parametrize("data", LIES.values(), ids=LIES)
def test_metadata_that_lies_is_a_format_error(data):
    with pytest.raises(FormatError):
        Codec.from_json(data)


# --- damage --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BOTH)
def test_truncated_or_extended_input_is_corrupt(name):
    codec = Codec.spec(name, dtypes.of("float32"))
    data = weights(4096)
    coded = codec.encode(data)
    for bad in (b"", coded[:3], coded[:10], coded[:17], coded[:-1], coded[: len(coded) // 2], coded + coded):
        with pytest.raises(CorruptError):
            codec.decode(bad, len(data))


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("wrong", [-4, -1, 1, 4, 100000])
def test_a_chunk_of_another_size_is_corrupt(name, wrong):
    codec = Codec.spec(name, dtypes.of("float32"))
    with pytest.raises(CorruptError, match=f"announces 4096 bytes where {4096 + wrong} belong"):
        codec.decode(codec.encode(weights(4096)), 4096 + wrong)


def test_an_announced_terabyte_is_not_allocated():
    import struct

    zstd, blosc = (Codec.spec(name, dtypes.of("float32")) for name in BOTH)
    bomb = b"\x28\xb5\x2f\xfd" + bytes([0xE0]) + struct.pack("<Q", 1 << 40) + b"\x01\x00\x00"
    fat = bytearray(blosc.encode(weights(4096)))
    fat[4:8] = struct.pack("<I", (1 << 31) - 17)
    tracemalloc.start()
    for codec, bad in ((zstd, bomb), (blosc, bytes(fat))):
        with pytest.raises(CorruptError):
            codec.decode(bad, 4096)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


FUZZ = """
import random
from ckptfs import dtypes
from ckptfs.codec import Codec
from ckptfs.errors import CorruptError
random.seed(7)
data = b"".join(b"%d," % (i * i % 977) for i in range(9000))
for name, dtype in (("zstd", "float32"), ("blosc", "float32"), ("blosc", "int8")):
    codec = Codec.spec(name, dtypes.of(dtype))
    good = codec.encode(data)
    refused = 0
    for trial in range(3000):
        bad = bytearray(good)
        for _ in range(random.choice([1, 1, 2, 8])):
            where = random.randrange(random.choice([20, 200, len(bad)]))
            bad[where] = random.randrange(256)
        guarded = bytearray(len(data) + 128)
        try:
            codec.decode(bytes(bad), len(data), memoryview(guarded)[64:-64])
        except CorruptError:
            refused += 1
        assert not any(guarded[:64]) and not any(guarded[-64:]), "wrote outside"
    assert refused > 300, (name, refused)
"""


def test_damaged_input_is_refused_or_wrong_but_never_worse():
    """In a process of its own: a crash of the C library would be a failure of this test, not of the run."""
    subprocess.run([sys.executable, "-c", FUZZ], check=True, timeout=100)


@given(codecs, st.binary(max_size=200), st.integers(1, 500))
@settings(max_examples=200)
def test_random_input_is_corrupt(codec, junk, nbytes):
    with pytest.raises(CorruptError):
        codec.decode(junk, nbytes)


def test_importing_it_does_not_import_numcodecs():
    code = "import sys, ckptfs.codec; assert 'numcodecs' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
