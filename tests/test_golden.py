"""Steps that released formats wrote, kept for ever: added for each format version, never made anew.

`python tests/test_golden.py tests/golden/format-N` writes one for a new format version; an existing one is refused.
"""

import sys
from pathlib import Path

import ml_dtypes  # noqa: F401 - bfloat16 and float8 for numpy
import numpy as np
import pytest

import ckptfs
from ckptfs import dtypes
from ckptfs.checkpoint import Checkpoint
from ckptfs.shards import LocalShard
from ckptfs.verify import verify

GOLDEN = Path(__file__).parent / "golden"
SMALL = ckptfs.Settings(chunk_bytes=1024, block_bytes=2048, extent_bytes=512, io_bytes=1024)


def pattern(name, shape, step=7):
    """Bytes that depend on nothing but the name of the type and the shape."""
    dtype = dtypes.of(name)
    count = int(np.prod(shape)) * dtype.itemsize
    raw = ((np.arange(count, dtype="i8") * step + len(name)) % 251).astype("u1")
    return (raw % 2 if name == "bool" else raw).view(dtype.numpy).reshape(shape)


def arrays():
    found = {f"dtypes/{name}": pattern(name, (3, 5)) for name in sorted(dtypes.BY_NAME)}
    found |= {
        "model/rows": pattern("float32", (70, 9)),
        "model/columns": pattern("int16", (12, 40)),
        "model/scalar": pattern("float64", ()),
        "model/empty": pattern("float32", (0, 4)),
        "model/cube": pattern("uint8", (5, 6, 7)),
        "squeezed/zstd": np.repeat(pattern("int64", (20,)), 30),
        "squeezed/blosc": np.repeat(pattern("bfloat16", (20,)), 90),
        "names/a%2Fb c": pattern("uint8", (2,)),
        "names/..": pattern("uint8", (3,)),
        "names/%00": pattern("uint8", (4,)),
        "names/é": pattern("uint8", (5,)),
    }
    return found


def tree():
    made = {}
    for name, array in arrays().items():
        group, key = name.split("/")
        key = {"%00": "", "a%2Fb c": "a/b c"}.get(key, key)
        made.setdefault(group, {})[key] = array
    made["model"]["tied"] = made["model"]["rows"]
    made["step"], made["lr"], made["list"] = 12, 1.5e-3, [1, (2, None), {"x": b"\x00\xff"}, float("inf"), 2 + 3j]
    made["int keys"] = {0: "a", -1: True}
    return made


@pytest.fixture(params=sorted(path.name for path in GOLDEN.iterdir() if path.is_dir()))
def golden(request):
    with Checkpoint(GOLDEN / request.param) as checkpoint:
        yield checkpoint


def test_golden_steps_are_sound(golden):
    assert verify(golden) == []


def test_golden_steps_say_what_they_said(golden):
    found, want = golden.tree(numpy=True), tree()
    assert list(found) == list(want)
    for group in ("dtypes", "model", "squeezed", "names"):
        assert list(found[group]) == list(want[group])
        for key, array in want[group].items():
            assert found[group][key].dtype == array.dtype
            assert found[group][key].shape == array.shape
            assert found[group][key].tobytes() == array.tobytes(), key
    for key in ("step", "lr", "list", "int keys"):
        assert found[key] == want[key]
        assert repr(found[key]) == repr(want[key])
    assert dict(golden.manifest.aliases) == {"model/tied": "model/rows"}
    assert golden.store.read("assets/config.json") == b'{"golden":true}'


def test_golden_arrays_by_name_and_slice(golden):
    for name, want in arrays().items():
        assert golden[name].numpy().tobytes() == want.tobytes(), name
    assert (
        golden["model/columns"].numpy((slice(2, 9), slice(13, 29))).tolist()
        == arrays()["model/columns"][2:9, 13:29].tolist()
    )
    assert golden.param("model/columns").layout.block[1] < 40, "columns lie in panels"
    assert golden.param("squeezed/zstd").codec.name == "zstd"


def test_golden_steps_are_small():
    assert sum(path.stat().st_size for path in GOLDEN.rglob("*") if path.is_file()) < 100_000 * len(
        [p for p in GOLDEN.iterdir() if p.is_dir()]
    )


def write(folder):
    """Two ranks, so that one array has panels of columns."""
    from spreads import on_ranks

    def save(rank, group):
        value = tree()
        columns = value["model"]["columns"]
        half = np.ascontiguousarray(np.split(columns, 2, axis=1)[rank])
        value["model"]["columns"] = LocalShard(half, columns.shape, ["mesh", [2], [0, 1], ["S1"]])
        with ckptfs.Run(folder.parent, settings=SMALL, group=group) as run:
            compression = {"squeezed/zstd": "zstd", "squeezed/blosc": "blosc"}
            run.save(12, value, assets={"config.json": '{"golden":true}'}, compression=compression)

    if folder.exists():
        sys.exit(f"{folder} exists: golden steps are never made anew")
    on_ranks(2, save)
    (folder.parent / "step-00000012").rename(folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
