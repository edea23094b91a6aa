"""The lazy tensor under what vLLM's weight loaders do: right values, and only the bytes of the part.

vLLM itself is not there; the loaders below do what its linear, embedding and expert layers document, operation by
operation, and a stand-in of its registry takes the plug-in.
"""

import sys
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptfs
from ckptfs.adapters import vllm as plugin
from ckptfs.adapters.lazy_tensor import LazyTensor, window
from ckptfs.errors import MismatchError, NotFoundError

SHAPES = {"w": (64, 48), "qkv": (96, 32), "experts": (4, 40, 24), "bias": (64,), "scale": (), "odd": (6, 5, 4, 3)}


@pytest.fixture(scope="module")
def ck(tmp_path_factory):
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("vllm")
    ckptfs.Run(folder / "run").save(1, {name: torch.randn(shape) for name, shape in SHAPES.items()})
    return ckptfs.Run(folder / "run")[1]


@pytest.fixture(scope="module")
def full(ck):
    return {name: ck[name][...] for name in ck}


def read_bytes(ck, action):
    before = ck.bytes_read
    value = action()
    return value, ck.bytes_read - before


def loaded(param, part):
    assert param.shape == part.shape
    param.data.copy_(part)
    return param


def column(weight, rank, ranks):
    size = weight.shape[0] // ranks
    return loaded(torch.nn.Parameter(torch.zeros(size, *weight.shape[1:])), weight.narrow(0, rank * size, size))


def row(weight, rank, ranks):
    size = weight.shape[1] // ranks
    return loaded(torch.nn.Parameter(torch.zeros(weight.shape[0], size)), weight.narrow(1, rank * size, size))


def merged(gate, up, rank, ranks):
    size = gate.shape[0] // ranks
    param = torch.nn.Parameter(torch.zeros(2 * size, gate.shape[1]))
    for at, weight in enumerate((gate, up)):
        loaded(param.data.narrow(0, at * size, size), weight.narrow(0, rank * size, size))
    return param


def fused_qkv(weight, rank, ranks, heads=(4, 1, 1)):
    unit = weight.shape[0] // sum(heads)
    parts, at = [], 0
    for count in heads:
        whole = weight.narrow(0, at * unit, count * unit)
        size = count * unit // ranks
        parts.append(loaded(torch.zeros(size, weight.shape[1]), whole.narrow(0, rank * size, size)))
        at += count
    return torch.cat(parts)


def experts(weight, rank, ranks):
    size = weight.shape[1] // ranks
    param = torch.zeros(weight.shape[0], size, weight.shape[2])
    for number in range(weight.shape[0]):
        loaded(param[number], weight[number].narrow(0, rank * size, size))
    return param


def transposed_experts(weight, rank, ranks):
    part = weight.transpose(1, 2).chunk(ranks, dim=2)[rank]
    return loaded(torch.zeros(part.shape), part)


LOADERS = {
    "column": (column, ["w"]),
    "column bias": (column, ["bias"]),
    "row": (row, ["w"]),
    "merged": (merged, ["w", "w"]),
    "qkv": (fused_qkv, ["qkv"]),
    "experts": (experts, ["experts"]),
    "transposed experts": (transposed_experts, ["experts"]),
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", LOADERS)
def test_loader_patterns(ck, full, kind, rank):
    loader, names = LOADERS[kind]
    expected = loader(*(full[n] for n in names), rank, 2)
    found, count = read_bytes(ck, lambda: loader(*(LazyTensor(ck[n]) for n in names), rank, 2))
    assert torch.equal(found, expected)
    assert type(found) in (torch.Tensor, torch.nn.Parameter)
    assert count == expected.numel() * 4


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(), lambda t: t.view(4, 16, 48)[1:3], lambda t: t.reshape(8, 8, 48)[:, ::2], lambda t: t.view(-1)[100:900],
        lambda t: t.unsqueeze(0).expand(3, -1, -1), lambda t: t[:, None, 5], lambda t: t.view(64, 6, 8).permute(1, 0, 2)[2:4],
        lambda t: t.split([16, 48])[1], lambda t: t.unbind(1)[7], lambda t: torch.chunk(t, 3, -1)[2], lambda t: t.diagonal(),
        lambda t: t[5], lambda t: t[5, 6], lambda t: t.flatten()[7::48], lambda t: t.detach(), lambda t: t.data, lambda t: t[3:3],
        lambda t: t.view(torch.int32), lambda t: t[3:9].view(torch.bfloat16)[:, 1::2], lambda t: t.view(torch.uint8),
        lambda t: t.view(2, 2, 16, 48).transpose(0, 1).reshape(64, 48)[4:8], lambda t: t.contiguous(), lambda t: t.movedim(0, 1),
    ],
)  # fmt: skip
def test_views(ck, full, view):
    lazy = view(LazyTensor(ck["w"]))
    expected = view(full["w"])
    assert lazy.shape == expected.shape
    assert torch.equal(torch.zeros_like(expected, memory_format=torch.contiguous_format).copy_(lazy), expected)
    assert torch.equal(lazy + 0, expected + 0)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_windows_see_what_the_view_sees(data):
    """Random chains of views: what is read and how it is seen gives the view's elements, and covers them."""
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    base = torch.arange(int(np.prod(shape))).reshape(shape)
    view = base
    for _ in range(data.draw(st.integers(0, 4))):
        if not view.ndim:
            break
        d = data.draw(st.integers(0, view.ndim - 1))
        action = data.draw(st.sampled_from(["slice", "select", "transpose", "split", "merge", "unsqueeze"]))
        n = view.shape[d]
        if action == "slice":
            a = data.draw(st.integers(0, n - 1))
            view = view[
                (slice(None),) * d + (slice(a, data.draw(st.integers(a + 1, n)), data.draw(st.integers(1, 3))),)
            ]
        elif action == "select":
            view = view.select(d, data.draw(st.integers(0, n - 1)))
        elif action == "transpose":
            view = view.transpose(d, data.draw(st.integers(0, view.ndim - 1)))
        elif action == "split":
            k = data.draw(st.sampled_from([k for k in range(1, n + 1) if n % k == 0]))
            view = view.unflatten(d, (k, n // k))
        elif action == "unsqueeze":
            view = view.unsqueeze(d)
        elif d + 1 < view.ndim:
            try:
                view = view.view(*view.shape[:d], n * view.shape[d + 1], *view.shape[d + 2 :])
            except RuntimeError:
                continue
    found = window(shape, view.shape, view.stride(), view.storage_offset())
    if found is not None:
        read = base[found.index].contiguous()
        assert tuple(read.shape) == found.counts
        assert torch.equal(torch.as_strided(read, found.shape, found.strides).reshape(view.shape), view)


def test_unknown_operations_read_first(ck, full):
    w = LazyTensor(ck["w"])
    assert torch.equal(w.to(torch.bfloat16), full["w"].bfloat16())
    assert torch.equal(w @ torch.ones(48), full["w"] @ torch.ones(48))
    assert torch.equal(torch.cat([w, w]), torch.cat([full["w"]] * 2))
    assert np.array_equal(w.numpy(), full["w"].numpy())
    assert w[0, :3].tolist() == full["w"][0, :3].tolist()
    assert LazyTensor(ck["scale"]).item() == full["scale"].item()
    assert LazyTensor(ck["scale"]).reshape(1).shape == (1,)
    assert torch.equal(w.clone(), full["w"]) and type(w.clone()) is torch.Tensor
    assert torch.zeros(64, 48, dtype=torch.bfloat16).copy_(w).dtype is torch.bfloat16
    assert torch.equal(torch.zeros(2, 64).copy_(LazyTensor(ck["bias"])), full["bias"].expand(2, -1))
    with pytest.raises(MismatchError, match="cannot be written"):
        w.add_(1)
    with pytest.raises(MismatchError, match="cannot be written"):
        w[0].copy_(torch.zeros(48))


def test_the_default_device_does_not_matter(ck, full):
    with torch.device("meta"):
        found = LazyTensor(ck["w"]).clone()
    assert torch.equal(found, full["w"])


def test_shapes_and_types_read_nothing(ck):
    def look():
        w = LazyTensor(ck["w"])
        return (
            w.shape,
            w.dtype,
            w.ndim,
            w.numel(),
            w.is_floating_point(),
            w.device,
            len(w),
            w.stride(),
            repr(w),
            w.dim(),
        )

    assert read_bytes(ck, look)[1] == 0


def test_the_plug_in_registers_and_loads(ck, full, tmp_path, monkeypatch):
    formats = {}

    class BaseModelLoader:
        def __init__(self, load_config):
            self.load_config = load_config

    loader = types.ModuleType("vllm.model_executor.model_loader")
    loader.register_model_loader = lambda name: lambda kind: formats.setdefault(name, kind)
    base = types.ModuleType("vllm.model_executor.model_loader.base_loader")
    base.BaseModelLoader = BaseModelLoader
    for module in (types.ModuleType("vllm"), types.ModuleType("vllm.model_executor"), loader, base):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    plugin.register()
    seen = {}
    model = types.SimpleNamespace(load_weights=lambda weights: seen.update({n: t.clone() for n, t in weights}))
    config = types.SimpleNamespace(model_loader_extra_config={"url": ck.url, "view": None})
    formats["ckptfs"](config).load_weights(model, types.SimpleNamespace(model="anything"))
    assert seen.keys() == full.keys() and all(torch.equal(seen[n], full[n]) for n in full)


def test_where_the_checkpoint_is(ck, tmp_path):
    run = ckptfs.Run(tmp_path / "run")
    run.save(3, {"a": torch.ones(1)}, assets={"config.json": "{}"})
    for model in (tmp_path / "run", tmp_path / "run" / "step-00000003", tmp_path / "run" / "step-00000003" / "assets"):
        assert plugin.open_for(str(model))[0].step == 3
    assert plugin.open_for("x", {"url": ck.url})[0].step == 1
    with pytest.raises(MismatchError, match="not other"):
        plugin.open_for("x", {"other": 1})
    with pytest.raises(NotFoundError, match="assets folder"):
        plugin.open_for(str(tmp_path / "nothing"))
