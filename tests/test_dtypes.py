"""The table of element types against torch, numpy, zarr and safetensors themselves."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from ckptfs import dtypes
from ckptfs.errors import MismatchError

ALL = list(dtypes.BY_NAME.values())


@pytest.mark.parametrize("dtype", ALL, ids=lambda dtype: dtype.name)
def test_numpy_torch_and_carrier_have_one_width(dtype):
    assert dtype.numpy.itemsize == dtype.itemsize == dtype.torch.itemsize == dtype.carrier.itemsize
    assert dtype.numpy.name == dtype.name


@pytest.mark.parametrize("dtype", ALL, ids=lambda dtype: dtype.name)
def test_every_way_to_say_it_means_the_same(dtype):
    for thing in (dtype, dtype.name, dtype.numpy, dtype.numpy.type, dtype.torch):
        assert dtypes.of(thing) is dtype


@pytest.mark.parametrize("dtype", ALL, ids=lambda dtype: dtype.name)
def test_torch_and_numpy_agree_on_the_bits(dtype):
    import torch

    raw = np.arange(48, dtype="u1") % 2 if dtype.name == "bool" else np.arange(48, dtype="u1")
    ours = raw.view(dtype.numpy)
    theirs = torch.from_numpy(raw.copy()).view(dtype.torch)
    if dtype.name.startswith("complex"):
        assert np.array_equal(theirs.numpy(), ours, equal_nan=True)
        return
    wide = torch.float64 if theirs.is_floating_point() else torch.int64
    kind = "f8" if theirs.is_floating_point() else "i8"
    with np.errstate(invalid="ignore"):
        assert np.array_equal(theirs.to(wide).numpy(), ours.astype(kind), equal_nan=kind == "f8")


def test_every_storable_torch_type_is_known():
    import torch

    left_out = {"complex32", "float4_e2m1fn_x2", "float8_e8m0fnu", "bits16", "bits1x8", "bits2x4", "bits4x2", "bits8"}
    quantized = ("q", "int1", "int2", "int3", "int4", "int5", "int6", "int7", "uint1", "uint2", "uint3", "uint4")
    quantized += ("uint5", "uint6", "uint7")
    torch_names = {str(t).removeprefix("torch.") for t in vars(torch).values() if isinstance(t, torch.dtype)}
    missing = {n for n in torch_names - set(dtypes.BY_NAME) - left_out if not n.startswith("q") and n not in quantized}
    assert not missing


def test_safetensors_names_are_those_of_safetensors():
    from safetensors.torch import _TYPES

    for name, dtype in dtypes.BY_SAFETENSORS.items():
        assert _TYPES[name] == dtype.torch


@pytest.mark.parametrize(
    "thing", ["float7", np.dtype("M8[s]"), np.dtype("U3"), object, ml_dtypes.int4, None.__class__, 3]
)
def test_what_cannot_be_stored_says_so(thing):
    with pytest.raises(MismatchError, match="cannot be stored"):
        dtypes.of(thing)


def test_complex32_says_what_to_do():
    import torch

    with pytest.raises(MismatchError, match="Convert the tensor first"):
        dtypes.of(torch.complex32)


def test_numpy_types_need_neither_torch_nor_ml_dtypes():
    code = """
import sys
from ckptfs import dtypes
dtypes.of("bfloat16"), dtypes.of("float32").numpy, dtypes.of("complex128").carrier
assert not {"torch", "ml_dtypes"} & set(sys.modules)
assert dtypes.of("bfloat16").numpy.itemsize == 2
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
