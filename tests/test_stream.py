"""stream: every array once, in order, read ahead within a budget; load(module)."""

import threading

import numpy as np
import pytest
import torch

import ckptfs
from ckptfs.errors import CorruptError, MismatchError, NotFoundError
from ckptfs.stream import read_ahead


@pytest.fixture
def run(tmp_path):
    run = ckptfs.Run(tmp_path / "run")
    model = {f"layers.{i}.w": torch.full((64, 32), float(i)) for i in range(12)}
    run.save(1, {"model": model, "other": torch.arange(5)})
    return run


def test_every_array_once_in_order(run):
    ck = run[1]
    found = dict(ck.stream("model/*"))
    assert list(found) == [n for n in ck.manifest.params if n.startswith("model/")]
    assert all(torch.equal(t, ck[name][:]) for name, t in found.items())
    assert [name for name, _ in ck.stream("*", order="name")] == sorted(ck)
    assert all(isinstance(a, np.ndarray) for _, a in ck.stream("*", numpy=True))
    assert list(ck.stream("nothing*")) == []
    with pytest.raises(MismatchError, match="order"):
        list(ck.stream(order="random"))
    with pytest.raises(MismatchError, match="budget"):
        list(ck.stream(budget_bytes=0))


def test_the_budget_holds():
    """What is read and not taken never exceeds the budget, except by a single array that is larger."""
    sizes = {"a": 3, "b": 3, "c": 3, "d": 50, "e": 1, "f": 9, "g": 2}
    lock, out, peaks = threading.Lock(), set(), []

    def read(name):
        with lock:
            out.add(name)
            peaks.append((sum(sizes[n] for n in out), set(out)))
        return name

    for name, value in read_ahead(list(sizes), read, sizes.__getitem__, 10):
        assert name == value
        with lock:
            out.discard(name)
    assert all(total <= 10 + 50 and (total <= 10 or len(names) <= 2) for total, names in peaks)
    assert {name for _, names in peaks for name in names} == set(sizes)


def test_reading_runs_ahead_of_the_consumer():
    second = threading.Event()

    def read(name):
        if name == "b":
            second.set()
        return name

    stream = read_ahead(["a", "b"], read, lambda _: 1, 10)
    assert next(stream) == ("a", "a")
    assert second.wait(60)  # without b having been asked for
    stream.close()


def test_leaving_early_stops_the_reading(run):
    ck = run[1]
    for _ in ck.stream(budget_bytes=8192):
        break
    assert ck.bytes_read < sum(p.nbytes for p in ck.manifest.params.values())


def test_damage_is_found(run, tmp_path):
    (path,) = (tmp_path / "run" / "step-00000001" / "model" / "layers.3.w").glob("c*")
    path.write_bytes(b"\1" + path.read_bytes()[1:])
    with pytest.raises(CorruptError):
        list(run[1].stream("model/*"))


# --- load(module) ----------------------------------------------------------------------------------------------------


def module(bias=True):
    net = torch.nn.Sequential(torch.nn.Linear(4, 3, bias=bias), torch.nn.BatchNorm1d(3))
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape))
    return net


@pytest.mark.parametrize("prefix", ["model/", "", "policy/net/"])
def test_load_a_module(tmp_path, prefix):
    source, run = module(), ckptfs.Run(tmp_path / "run")
    tree = source.state_dict()
    for part in reversed(prefix.split("/")[:-1]):
        tree = {part: tree}
    run.save(1, {**tree, "optim": {"step": torch.tensor(1)}} if prefix else tree)
    target = module()
    assert run[1].load(target) is target
    assert all(
        torch.equal(a, b) for a, b in zip(source.state_dict().values(), target.state_dict().values(), strict=True)
    )
    again = module()
    run[1].load(again, prefix=prefix)
    assert torch.equal(again[0].weight, source[0].weight)


def test_a_module_that_does_not_fit(tmp_path):
    run = ckptfs.Run(tmp_path / "run")
    run.save(1, {"model": module().state_dict(), "ema": module().state_dict()})
    before = module(bias=False)
    copy = {k: v.clone() for k, v in before.state_dict().items()}
    with pytest.raises(MismatchError, match=r"unexpected in the checkpoint: model/0\.bias"):
        run[1].load(before)
    assert all(torch.equal(v, copy[k]) for k, v in before.state_dict().items())
    run[1].load(before, strict=False)
    with pytest.raises(MismatchError, match=r"shape of model/0\.weight"):
        run[1].load(torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3)))
    with pytest.raises(MismatchError, match="none of the module's names"):
        run[1].load(torch.nn.Bilinear(1, 1, 1))
    with pytest.raises(NotFoundError):
        run[2]
    with pytest.raises(MismatchError, match=r"not 'latest'; the newest is run\.latest"):
        run["latest"]


def test_an_ambiguous_prefix_is_asked_for(tmp_path):
    run = ckptfs.Run(tmp_path / "run")
    run.save(1, {"actor": module().state_dict(), "critic": module().state_dict()})
    with pytest.raises(MismatchError, match="prefix="):
        run[1].load(module())
    run[1].load(module(), prefix="critic/")
