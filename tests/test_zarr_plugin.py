"""With ckptfs installed, a program that only imports zarr reads arrays of types that zarr itself lacks."""

import json
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

PROGRAM = """
import sys, zarr
group = zarr.open_group(sys.argv[1], mode="r")
print(group["x"][:].dtype, [float(value) for value in group["x"][:]])
print(zarr.open_array(sys.argv[1] + "/x", mode="r").dtype)
"""


def array_document(name):
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [3],
        "data_type": name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [3]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": 0.0,
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "attributes": {},
    }


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"])
@pytest.mark.parametrize("consolidated", [True, False])
def test_plain_zarr_reads_it(tmp_path, name, consolidated):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "zarr.json").write_text(json.dumps(array_document(name)))
    (tmp_path / "x" / "c.0").write_bytes(np.array([1, 2, -0.5], getattr(ml_dtypes, name)).tobytes())
    root = {"zarr_format": 3, "node_type": "group", "attributes": {}}
    if consolidated:
        inlined = {"x": array_document(name)}
        root["consolidated_metadata"] = {"kind": "inline", "must_understand": False, "metadata": inlined}
    (tmp_path / "zarr.json").write_text(json.dumps(root))

    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{name} [1.0, 2.0, -0.5]", name]
