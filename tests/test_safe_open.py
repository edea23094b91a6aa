"""ckptfs.safe_open gives what safetensors.safe_open gives for the same tensors."""

import numpy as np
import pytest
import safetensors
import torch
from safetensors.torch import save_file

import ckptfs
from ckptfs.errors import MismatchError, NotFoundError
from ckptfs.safe_open import safe_open


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("safe")
    tensors = {
        "a": torch.randn(12, 7),
        "b": torch.randn(3, 4, 5).bfloat16(),
        "c": torch.arange(9),
        "d": torch.randn(2, 2).to(torch.float8_e4m3fn),
        "e": torch.tensor([True, False]),
    }
    save_file(tensors, folder / "m.safetensors", metadata={"format": "pt"})
    ckptfs.Run(folder / "run").save(5, tensors)
    return folder / "m.safetensors", f"{folder / 'run'}@5", folder / "run"


INDICES = [
    slice(None),
    slice(1, 3),
    (slice(None), slice(0, 2)),
    (slice(2, None), slice(1, 2)),
    (Ellipsis,),
    (1,),
    (0, 1),
]


def test_the_same_as_safetensors(both):
    file, url, run = both
    with safetensors.safe_open(file, framework="pt", device="cpu") as theirs:
        for where in (url, run):
            with safe_open(where, framework="pt", device="cpu") as ours:
                assert list(ours.keys()) == sorted(theirs.keys())
                assert sorted(ours.offset_keys()) == sorted(theirs.offset_keys())
                assert ours.metadata() == {"format": "pt", "step": "5"}
                for name in theirs.keys():  # noqa: SIM118 - it is no mapping
                    one, other = ours.get_slice(name), theirs.get_slice(name)
                    assert one.get_shape() == other.get_shape()
                    assert one.get_dtype() == other.get_dtype()
                    assert torch.equal(ours.get_tensor(name).float(), theirs.get_tensor(name).float())
                    assert ours.get_tensor(name).dtype is theirs.get_tensor(name).dtype
                    for index in INDICES[: 2 + 2 * (len(one.get_shape()) > 1)]:
                        assert torch.equal(one[index].float(), other[index].float())


def test_numpy(both):
    file, url, _ = both
    with safetensors.safe_open(file, framework="np") as theirs, safe_open(url, framework="np") as ours:
        for name in ("a", "c", "e"):
            found = ours.get_tensor(name)
            assert isinstance(found, np.ndarray)
            assert np.array_equal(found, theirs.get_tensor(name))
            assert np.array_equal(ours.get_slice(name)[1:2], theirs.get_slice(name)[1:2])


def test_refusals(both):
    _, url, _ = both
    for how in ({"framework": "jax"}, {"framework": "np", "device": "cuda"}):
        with pytest.raises(MismatchError):
            safe_open(url, **how)
    with safe_open(url) as f:
        with pytest.raises(NotFoundError):
            f.get_tensor("z")
    with pytest.raises(MismatchError, match="closed"):
        f.get_tensor("a")


def test_it_is_public():
    assert ckptfs.safe_open is safe_open
