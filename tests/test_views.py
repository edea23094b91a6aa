"""Views against the arrays that were saved: every file, every way to store, sizes known before a byte is read."""

import errno
import io
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import threading
import time
from math import prod

import ml_dtypes
import numpy as np
import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptfs
import view_runs
from ckptfs import commit, dtypes, expr, lease, maps, rules, zarr3
from ckptfs.errors import CkptError, CorruptError, MismatchError, NotFoundError, StaleError, StorageError
from ckptfs.grid import Layout
from ckptfs.manifest import Manifest, Param, digest
from ckptfs.views import Dir, File, Link, ViewConfig, open_root, resolve, walk
from ckptfs.views.hf import Tensor, shards
from ckptfs.views.windows import WindowCache, produced

WAYS = ("raw", "panels", "zstd", "memory", "verify")


def make(way, folder):
    """(what to view, the arrays in it, where it is on disk if it is)."""
    run = f"{folder}/run"
    if way == "panels":
        return {"url": run}, view_runs.save_in_panels(run), run
    if way == "memory":
        url = f"memory://views-{os.path.basename(folder)}/run"
        return {"url": url}, view_runs.save(url), None
    found = view_runs.save(run, compression="zstd" if way == "zstd" else None)
    return {"url": run, "verify": way == "verify"}, found, run


@pytest.fixture(scope="module", params=WAYS)
def viewed(request, tmp_path_factory):
    config, found, run = make(request.param, str(tmp_path_factory.mktemp(request.param)))
    return open_root({"cache_bytes": 4 << 20} | config), found, run


STEP = "step-00000001"


def bits(array):
    return np.ascontiguousarray(array).tobytes()


def node_path(name):
    return zarr3.path_of_name(name)


# --- arrays ----------------------------------------------------------------------------------------------


def test_every_array_as_npy_and_as_plain_bytes(viewed):
    root, found, _ = viewed
    for name, array in found.items():
        npy = resolve(root, f"{STEP}/params/{node_path(name)}.npy")
        loaded = np.load(io.BytesIO(npy.read_bytes()))
        assert loaded.shape == array.shape
        assert bits(loaded) == bits(array), name
        if dtypes.of(array.dtype).native:
            assert loaded.dtype == array.dtype
        else:
            assert (loaded.dtype.kind, loaded.dtype.itemsize) == ("V", array.itemsize)
            assert (b"'<V2'" if array.itemsize == 2 else b"'|V1'") in npy.read_bytes(0, 200)
        assert npy.size == 4096 + array.nbytes
        raw = resolve(root, f"{STEP}/raw/{node_path(name)}")
        assert raw.read_bytes() == bits(array)
        told = {key: value.decode() for key, value in raw.xattrs.items()}
        assert told["user.ckptfs.dtype"] == dtypes.of(array.dtype).name
        assert told["user.ckptfs.shape"] == ",".join(map(str, array.shape))
        assert told["user.ckptfs.step"] == "1"
        assert told == {key: value.decode() for key, value in npy.xattrs.items()}


def test_sizes_are_exact_and_known_before_anything_is_read(viewed):
    root, _, _ = viewed
    files = [(path, node) for path, node in walk(root) if isinstance(node, File) and ".ckptfs" not in path]
    assert len(files) > 40
    for path, node in files:
        size, version = node.size, node.version
        assert len(node.read_bytes(0, size + 100)) == size, path
        assert (node.size, node.version) == (size, version)
    assert len({node.version for _, node in files if "README" not in _}) == len(files) - 1


def test_the_same_tree_every_time(viewed):
    root, _, run = viewed
    if run is None:
        return
    again = open_root({"url": run})

    def told(tree):
        return [(p, type(n).__name__, getattr(n, "size", 0), n.mtime_ns) for p, n in walk(tree) if ".ckptfs" not in p]

    assert [row[0] for row in told(root)] == [row[0] for row in told(again)]
    assert [row[2:] for row in told(root)] == [row[2:] for row in told(again)]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_range_is_what_the_whole_says(viewed, data):
    root, _, _ = viewed
    paths = [p for p, node in walk(resolve(root, STEP)) if isinstance(node, File) and ".ckptfs" not in p]
    path = data.draw(st.sampled_from(paths))
    file = resolve(root, f"{STEP}/{path}")
    whole = _whole(file)
    with file.open() as reader:
        for _ in range(data.draw(st.integers(1, 4))):
            offset = data.draw(st.integers(0, file.size + 3))
            length = data.draw(st.one_of(st.integers(0, 300), st.integers(0, file.size + 3)))
            buffer = bytearray(b"\xee" * length)
            count = reader.read_into(offset, memoryview(buffer))
            assert bytes(buffer[:count]) == whole[offset : offset + length]


_wholes: dict[str, bytes] = {}


def _whole(file):
    return _wholes.setdefault(file.version, file.read_bytes())


def test_tied_arrays_are_links(viewed):
    root, _, run = viewed
    if run is None or "model/tied" not in ckptfs.Run(run)[1]:
        return
    link = resolve(root, f"{STEP}/params/model/tied.npy")
    assert isinstance(link, Link)
    assert link.target == "embed.npy"
    assert resolve(root, f"{STEP}/raw/model/tied").target == "embed"


def test_the_readme_tells_how_to_view_types_that_numpy_lacks(viewed):
    root, found, _ = viewed
    text = resolve(root, f"{STEP}/params/README.txt").read_bytes().decode()
    line = next(line for line in text.splitlines() if "ml_dtypes.bfloat16" in line)
    assert line.strip().startswith("a = numpy.load(")
    loaded = np.load(io.BytesIO(resolve(root, f"{STEP}/params/model/embed.npy").read_bytes()))
    assert (loaded.view(ml_dtypes.bfloat16) == found["model/embed"]).all()


def test_names_that_meet_are_kept_apart(tmp_path):
    tree = {"a": np.zeros(3), "a.npy": {"b": np.ones(3)}, "README.txt": {"c": np.ones(2)}}
    ckptfs.save(tmp_path / "one", tree)
    params = open_root(str(tmp_path / "one")).lookup("params")
    assert list(params.children()) == ["README.txt", "a%2Enpy", "a.npy"]
    assert isinstance(params.lookup("README.txt"), Dir)
    assert np.load(io.BytesIO(resolve(params, "a.npy/b.npy").read_bytes())).sum() == 3


# --- zarr ------------------------------------------------------------------------------------------------


def test_zarr_is_the_stored_folder(viewed):
    root, _, run = viewed
    zarr_dir = resolve(root, f"{STEP}/zarr")
    shown = {path: node.read_bytes() for path, node in walk(zarr_dir) if isinstance(node, File)}
    if run is None:
        store = ckptfs.Run(root._store.url)[1].store
        stored = {path: store.read(path) for path, _ in store.list()}
    else:
        base = f"{run}/{STEP}"
        stored = {
            os.path.relpath(os.path.join(where, name), base): open(os.path.join(where, name), "rb").read()  # noqa: SIM115
            for where, _, names in os.walk(base)
            for name in names
        }
    assert shown == stored


def test_whole_files_of_the_store_can_be_passed_through(viewed):
    root, _, run = viewed
    exact = resolve(root, f"{STEP}/raw/model/layers.0.attn.bias")
    chunk = resolve(root, f"{STEP}/zarr/model/embed/c.0.0")
    passes = run is not None and not root._shared.config.verify
    is_exact = passes and ckptfs.Run(run)[1].manifest.params["model/layers.0.attn.bias"].layout.exact
    assert (exact.backing is not None) == is_exact
    assert (chunk.backing is not None) == passes
    if chunk.backing is not None:
        with chunk.open() as reader:
            assert os.fstat(reader.backing_fd).st_size == chunk.size


# --- hf --------------------------------------------------------------------------------------------------


def parse(data):
    """A safetensors file taken apart by hand: name → bytes; everything that loaders rely on is checked."""
    (length,) = struct.unpack_from("<Q", data)
    assert (8 + length) % 4096 == 0
    table = json.loads(data[8 : 8 + length])
    assert table.pop("__metadata__") == {"format": "pt"}
    base, at, found = 8 + length, 0, {}
    for name, entry in sorted(table.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = entry["data_offsets"]
        assert start == at, f"a gap before {name}"
        at = stop
        found[name] = (entry["dtype"], entry["shape"], data[base + start : base + stop])
    assert base + at == len(data)
    return found


def test_the_model_folder_is_flat_and_holds_the_model_only(viewed):
    root, found, _ = viewed
    hf = resolve(root, f"{STEP}/hf")
    assert list(hf.children()) == ["big.txt", "config.json", "model.safetensors", "tokenizer.json"]
    assert hf.lookup("config.json").read_bytes() == view_runs.ASSETS["config.json"].encode()
    data = hf.lookup("model.safetensors").read_bytes()
    weights = parse(data)
    wanted = {name.removeprefix("model/"): array for name, array in found.items() if name.startswith("model/")}
    assert weights.keys() == wanted.keys()
    for name, array in wanted.items():
        kind, shape, content = weights[name]
        assert (kind, shape) == (dtypes.of(array.dtype).safetensors, list(array.shape))
        assert content == bits(array), name


def test_digits_that_are_no_number_are_names(tmp_path):
    with ckptfs.Run(tmp_path / "run") as run:
        run.save(1, {"model": {"x.²": np.zeros(3), "x.10": np.zeros(2), "x.9": np.zeros(1)}})
    hf = open_root(f"{tmp_path}/run@1").lookup("hf")
    assert list(parse(hf.lookup("model.safetensors").read_bytes())) == ["x.9", "x.10", "x.²"]


def test_weights_are_cut_between_layers(tmp_path):
    found = view_runs.save(tmp_path / "run")
    hf = open_root({"url": f"{tmp_path}/run@1", "shard_bytes": 200_000}).lookup("hf")
    names = [name for name in hf.children() if name.endswith(".safetensors")]
    assert names == [f"model-{i:05d}-of-{len(names):05d}.safetensors" for i in range(1, len(names) + 1)]
    assert len(names) > 2
    assert "model.safetensors" not in hf.children()
    index = json.loads(hf.lookup("model.safetensors.index.json").read_bytes())
    parsed = {name: parse(hf.lookup(name).read_bytes()) for name in names}
    assert index["weight_map"] == {tensor: name for name, part in parsed.items() for tensor in part}
    total = sum(a.nbytes for n, a in found.items() if n.startswith("model/"))
    assert index["metadata"]["total_size"] == total
    of_layer_0 = {index["weight_map"][n] for n in ("layers.0.attn.weight", "layers.0.attn.bias")}
    assert len(of_layer_0) == 1


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 12), st.integers(0, 3), st.integers(1, 50))),
    st.integers(1, 300),
)
def test_shards_hold_whole_layers_and_no_more_than_they_may(parts, shard_bytes):
    named = {f"{stem}.{layer}.{part}": size for stem, layer, part, size in parts}
    found = [Tensor(name, expr.Source(name, (size,), "uint8")) for name, size in named.items()]
    made = shards(found, shard_bytes)
    assert sorted(t.name for shard in made for t in shard) == sorted(named)
    where = {}
    for number, shard in enumerate(made):
        layers = {t.name.rpartition(".")[0] for t in shard}
        assert len(layers) == 1 or sum(t.nbytes for t in shard) <= shard_bytes
        for layer in layers:
            assert where.setdefault(layer, number) == number


def test_wider_types_come_first_so_that_every_tensor_is_aligned(viewed):
    root, _, _ = viewed
    data = resolve(root, f"{STEP}/hf/model.safetensors").read_bytes()
    at = 0
    for kind, _, content in parse(data).values():
        assert at % dtypes.BY_SAFETENSORS[kind].itemsize == 0
        at += len(content)


LLAMA = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "tie_word_embeddings": False}


def titan(seed=0, bias=0.0):
    rng = np.random.default_rng(seed)

    def floats(*shape):
        return (rng.standard_normal(shape) + bias).astype("f4")

    tree = {"tok_embeddings.weight": floats(50, 32), "norm.weight": floats(32), "output.weight": floats(50, 32)}
    for i in range(2):
        layer = f"layers.{i}"
        tree |= {
            f"{layer}.attention.wq.weight": floats(32, 32),
            f"{layer}.attention.wk.weight": floats(16, 32),
            f"{layer}.attention.wv.weight": floats(16, 32),
            f"{layer}.attention.wo.weight": floats(32, 32),
            f"{layer}.feed_forward.w1.weight": floats(64, 32),
            f"{layer}.feed_forward.w2.weight": floats(32, 64),
            f"{layer}.feed_forward.w3.weight": floats(64, 32),
            f"{layer}.attention_norm.weight": floats(32),
            f"{layer}.ffn_norm.weight": floats(32),
        }
    return tree


@pytest.mark.parametrize("given_map", [False, True])
def test_a_map_gives_names_and_layouts(tmp_path, given_map):
    tree = titan()
    how = {"maps": {"hf": maps.load("llama-torchtitan").to_json()}} if given_map else {}
    with ckptfs.Run(tmp_path / "run") as run:
        run.save(3, {"model": tree, "optim": {"x": np.ones(3)}}, assets={"config.json": json.dumps(LLAMA)}, **how)
    file = open_root(f"{tmp_path}/run@3").lookup("hf").lookup("model.safetensors")
    assert file.blocking  # rotary permutations are made off the request path
    sources = {f"model/{name}": (array.shape, "float32") for name, array in tree.items()}
    mapped = rules.compile_map(maps.load("llama-torchtitan"), sources, rules.variables_of(LLAMA))
    weights = parse(file.read_bytes())
    assert weights.keys() == set(mapped)
    for name, array in mapped.items():
        wanted = array.read(None, lambda source, box: tree[source.removeprefix("model/")][box.slices])
        assert weights[name][2] == bits(wanted), name


def test_a_map_that_does_not_fit_leaves_the_folder_out_and_says_why(tmp_path):
    bad = {"ckptfs_map": 1, "name": "bad", "rules": [{"from": "nothing", "to": "nothing"}]}
    with ckptfs.Run(tmp_path / "run") as run:
        run.save(1, {"model": {"w": np.ones(3)}}, maps={"hf": bad})
        run.save(2, {"model": {"w": np.ones(3, "c16")}})
        run.save(3, {"note": "no arrays"})
    root = open_root(str(tmp_path / "run"))
    for step, reason in ((1, "no rule matches"), (2, "complex128"), (3, "neither arrays nor assets")):
        children = resolve(root, f"step-0000000{step}").children()
        assert "hf" not in children
        assert reason in json.loads(resolve(children[".ckptfs"], "config").read_bytes())["hf"]


# --- damage ----------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(tmp_path, request):
    way = request.param
    config, found, run = make(way, str(tmp_path))
    return open_root(config), found, f"{run}/{STEP}"


@pytest.mark.parametrize("damaged", ["panels", "zstd", "verify"], indirect=True)
def test_a_flipped_bit_is_an_error_that_names_the_extent(damaged):
    root, _, folder = damaged
    name = "model/layers.1.attn.weight"
    stored = f"{folder}/{name}/c.0.0"
    view_runs.flip(stored, 33_000)
    for path in (f"params/{name}.npy", f"raw/{name}", "hf/model.safetensors"):
        with resolve(root, f"{STEP}/{path}").open() as reader, pytest.raises(CorruptError) as caught:
            for at in range(0, reader.file.size, 65536):
                reader.read_into(at, memoryview(bytearray(65536)))
        assert caught.value.errno == errno.EIO
        assert "layers.1.attn.weight" in str(caught.value)
        assert "extent" in str(caught.value) or "decode" in str(caught.value)
        assert "/proc/self" not in str(caught.value)
    # the other arrays are as good as ever
    assert resolve(root, f"{STEP}/raw/model/embed").read_bytes()
    log = resolve(root, f"{STEP}/.ckptfs/accesslog").read_bytes().decode()
    assert "error params/model/layers.1.attn.weight.npy CorruptError" in log
    assert json.loads(resolve(root, ".ckptfs/stats").read_bytes())["errors"] >= 3


def test_zarr_files_are_verified_too(tmp_path):
    view_runs.save(tmp_path / "run")
    view_runs.flip(tmp_path / "run" / STEP / "model/embed/c.0.0", 20_000)
    view_runs.flip(tmp_path / "run" / STEP / "assets/big.txt", 20_000)
    root = open_root({"url": str(tmp_path / "run"), "verify": True})
    for path in ("zarr/model/embed/c.0.0", "zarr/assets/big.txt", "hf/big.txt"):
        with pytest.raises(CorruptError, match="checksum differs"):
            resolve(root, f"{STEP}/{path}").read_bytes()


def test_without_verify_direct_files_show_what_the_disk_says(tmp_path):
    found = view_runs.save(tmp_path / "run")
    view_runs.flip(tmp_path / "run" / STEP / "model/embed/c.0.0", 0)
    data = resolve(open_root(str(tmp_path / "run")), f"{STEP}/raw/model/embed").read_bytes()
    assert data[0] == bits(found["model/embed"])[0] ^ 1


@pytest.mark.parametrize("way", ["raw", "zstd", "verify"])
def test_truncated_and_missing_files(tmp_path, way):
    config, _, run = make(way, str(tmp_path))
    root = open_root(config)
    cut, lost = "model/layers.1.attn.weight", "model/embed"
    os.truncate(f"{run}/{STEP}/{cut}/c.0.0", 500)
    os.unlink(f"{run}/{STEP}/{lost}/c.0.0")
    for name in (cut, lost):
        for path in (f"params/{name}.npy", f"raw/{name}", f"zarr/{name}/c.0.0"):
            with pytest.raises(CkptError) as caught:
                resolve(root, f"{STEP}/{path}").read_bytes()
            assert caught.value.errno in {errno.EIO, errno.ESTALE}
            assert name in str(caught.value)
            assert "/proc/self" not in str(caught.value)


# --- steps that come and go ------------------------------------------------------------------------------


def names_of(root):
    return [name for name in root.children() if name != ".ckptfs"]


def test_new_steps_appear_and_deleted_ones_go(tmp_path):
    run = tmp_path / "run"
    view_runs.save(run, 1)
    root = open_root(str(run))
    assert names_of(root) == [STEP, "latest"]
    view_runs.save(run, 20)
    (run / "step-00000030").mkdir()  # not committed
    (run / "notes").mkdir()
    assert names_of(root) == [STEP, "step-00000020", "latest"]
    assert root.lookup("latest").target == "step-00000020"
    commit.discard(ckptfs.Run(run).store, "step-00000020")
    assert names_of(root) == [STEP, "latest"]
    assert root.lookup("latest").target == STEP
    for name in ("step-00000020", "step-00000030", "notes", "step-1"):
        with pytest.raises(NotFoundError):
            root.lookup(name)


def test_a_run_without_steps(tmp_path):
    (tmp_path / "run").mkdir()
    root = open_root(str(tmp_path / "run"))
    assert names_of(root) == []
    with pytest.raises(NotFoundError):
        root.lookup("latest")
    with pytest.raises(NotFoundError, match="does not exist"):
        open_root(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("way", ["raw", "zstd"])
def test_who_reads_keeps_the_step(tmp_path, way):
    config, found, run = make(way, str(tmp_path))
    root = open_root(config | {"linger_s": 0.0})
    store = ckptfs.Run(run).store
    file = resolve(root, f"{STEP}/raw/model/embed")
    assert not lease.held(store, STEP)
    with file.open() as reader, file.open():
        assert lease.held(store, STEP)
        assert not lease.discard(store, STEP)
        buffer = bytearray(file.size)
        reader.read_into(0, memoryview(buffer))
    assert bytes(buffer) == bits(found["model/embed"])
    assert not lease.held(store, STEP)
    assert lease.discard(store, STEP)
    with pytest.raises(StaleError, match="deleted"):
        file.open()


def test_the_lease_lingers_between_two_files(tmp_path):
    view_runs.save(tmp_path / "run")
    store = ckptfs.Run(tmp_path / "run").store
    root = open_root({"url": str(tmp_path / "run"), "linger_s": 2.0})
    began = time.monotonic()
    resolve(root, f"{STEP}/raw/model/embed").read_bytes()
    if time.monotonic() - began < 0.5:
        assert lease.held(store, STEP)
    pause = threading.Event()
    while lease.held(store, STEP):
        assert time.monotonic() - began < 60
        pause.wait(0.05)
    assert time.monotonic() - began >= 2.0


def test_a_deleted_step_is_stale_and_open_files_go_on(tmp_path):
    found = view_runs.save(tmp_path / "run")
    root = open_root(str(tmp_path / "run"))
    file = resolve(root, f"{STEP}/params/model/embed.npy")
    reader = file.open()
    shutil.rmtree(tmp_path / "run" / STEP)
    buffer = bytearray(file.size)
    reader.read_into(0, memoryview(buffer))
    assert buffer[4096:] == bits(found["model/embed"])
    reader.close()
    for path in ("params/model/embed.npy", "raw/model/flags", "zarr/model/embed/c.0.0"):
        with pytest.raises(StaleError):
            _node_of(file, path).open()


def _node_of(file, path):
    """A node of the same step, made from its source as the tree made it."""
    from ckptfs.views.step import step_children

    return resolve(Dir(step_children(file.source)), path)


@pytest.mark.parametrize("way", ["raw", "zstd", "memory"])
def test_a_replaced_step_never_gives_other_bytes(tmp_path, way):
    config, old, run = make(way, str(tmp_path))
    url = config["url"]
    root = open_root(config | {"cache_bytes": 1, "linger_s": 0.0})
    name = "model/layers.1.attn.weight"
    before = resolve(root, f"{STEP}/raw/{name}")
    step_before = root.lookup(STEP)
    if run is None:
        commit.discard(ckptfs.Run(url).store, STEP)
    new = view_runs.save(url, seed=2, compression="zstd" if way == "zstd" else None, overwrite=run is not None)
    with pytest.raises(StaleError):
        before.read_bytes()
    assert root.lookup(STEP).version != step_before.version
    after = resolve(root, f"{STEP}/raw/{name}")
    assert after.version != before.version
    assert after.read_bytes() == bits(new[name]) != bits(old[name])


def test_the_store_goes_away_and_comes_back(tmp_path):
    found = view_runs.save(tmp_path / "run")
    root = open_root(str(tmp_path / "run"))
    wanted = bits(found["model/embed"])
    assert resolve(root, f"{STEP}/raw/model/embed").read_bytes() == wanted
    os.rename(tmp_path / "run", tmp_path / "away")
    with pytest.raises(CkptError):
        resolve(root, f"{STEP}/raw/model/embed")
    os.rename(tmp_path / "away", tmp_path / "run")
    assert resolve(root, f"{STEP}/raw/model/embed").read_bytes() == wanted


# --- what to show ----------------------------------------------------------------------------------------


def test_steps_and_parts_as_roots(tmp_path):
    run = tmp_path / "run"
    view_runs.save(run, 1)
    view_runs.save(run, 2)
    whole = {".ckptfs", "hf", "manifest.json", "params", "raw", "zarr"}
    for url in (f"{run}@1", f"{run}@latest", str(run / STEP)):
        assert set(open_root(url).children()) == whole
    config = json.loads(resolve(open_root(f"{run}@latest"), ".ckptfs/config").read_bytes())
    assert config["step"] == 2
    for subtree in ("hf", "/hf/"):
        assert "model.safetensors" in open_root({"url": f"{run}@1", "subtree": subtree}).children()
    for subtree in (f"{STEP}/hf", "latest/hf"):
        assert "model.safetensors" in open_root({"url": str(run), "subtree": subtree}).children()
    with pytest.raises(MismatchError, match="is a file"):
        open_root({"url": f"{run}@1", "subtree": "manifest.json"})
    with pytest.raises(NotFoundError):
        open_root({"url": f"{run}@1", "subtree": "nope"})
    with pytest.raises(NotFoundError):
        open_root(f"{run}@7")


def test_the_config_is_checked_and_survives_json():
    config = ViewConfig(url="a", storage={"key": "secret"})
    assert ViewConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(MismatchError, match="unknown view options"):
        ViewConfig.from_dict({"nope": 1})
    for wrong in ({"cache_bytes": 0}, {"linger_s": -1}):
        with pytest.raises(MismatchError):
            ViewConfig(**wrong)


def test_secrets_of_the_store_are_not_shown(tmp_path):
    view_runs.save("memory://views-secret/run")
    root = open_root({"url": "memory://views-secret/run", "storage": {}})
    text = resolve(root, f"{STEP}/.ckptfs/config").read_bytes()
    assert json.loads(text)["view"]["storage"] == []


def test_ten_thousand_arrays_from_the_manifest_alone(tmp_path):
    """No array is on the disk at all: what is shown follows from the manifest. And it is quick."""
    layout = Layout((64,), 4, (64,), (64,))
    hashes, no_hash = digest(b"x"), "0" * 32
    params = {}
    for i in range(10_000):
        name = f"model/layers.{i // 10}.part{i % 10}.weight"
        params[name] = Param(name, name, dtypes.of("float32"), layout, None, ((256, 1),), hashes, no_hash)
    folder = tmp_path / "run" / STEP
    folder.mkdir(parents=True)
    manifest = Manifest(params, None, "id", 1, "2026-01-01T00:00:00Z", root_hash=no_hash)
    (folder / "manifest.json").write_bytes(manifest.dump("test"))
    began = time.process_time()
    root = open_root(str(tmp_path / "run"))
    listed = [(name, node.size) for name, node in resolve(root, f"{STEP}/params/model").children().items()]
    seconds = time.process_time() - began
    assert len(listed) == 10_000
    assert {size for _, size in listed} == {4096 + 256}
    assert resolve(root, f"{STEP}/hf/model.safetensors").size > 2_560_000
    assert seconds < 2, f"{seconds:.2f} s"  # about 0.4 on an idle machine


def test_the_server_side_imports_nothing_heavy(tmp_path):
    view_runs.save(tmp_path / "run", compression="zstd")
    script = (
        "import sys; from ckptfs.views import build, walk, File\n"
        f"for path, node in walk(build(url={str(tmp_path / 'run')!r})): isinstance(node, File) and node.read_bytes()\n"
        "print(sorted({'torch', 'zarr', 'transformers', 'safetensors', 'fsspec'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_files_are_closed_again(tmp_path):
    view_runs.save(tmp_path / "run", compression="zstd")
    view_runs.save(tmp_path / "run", 2)

    def look():
        root = open_root({"url": str(tmp_path / "run"), "linger_s": 0.0})
        for _, node in walk(root):
            if isinstance(node, File):
                node.read_bytes()

    look()
    import gc

    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        look()
        gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before + 128  # nodes share at most that many for unleased reads
    held = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{fd}")
    ]
    assert not [path for path in held if str(tmp_path) in path and path.endswith((STEP, "manifest.json"))]


# --- pieces ----------------------------------------------------------------------------------------------


@st.composite
def expressions(draw):
    """(an expression built by steps that may or may not keep the order, the shapes of its sources by name)."""
    shapes = {}

    def source(shape):
        name = f"s{len(shapes)}"
        shapes[name] = shape
        return expr.Source(name, shape, "int64")

    made = source(tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))))
    for step in draw(st.lists(st.sampled_from(["cut", "pick", "stack", "concat", "reshape", "turn"]), max_size=4)):
        n = len(made.shape)
        dim = draw(st.integers(0, n - 1)) if n else 0
        if step == "cut" and n:
            start = draw(st.integers(0, made.shape[dim] - 1))
            made = expr.cut(made, dim, start, draw(st.integers(start + 1, made.shape[dim])))
        elif step == "pick" and n > 1:
            made = expr.pick(made, dim, draw(st.integers(0, made.shape[dim] - 1)))
        elif step == "stack":
            made = expr.stack([made, source(made.shape)], dim)
        elif step == "concat" and n:
            made = expr.concat([source(made.shape), made], dim)
        elif step == "reshape":
            made = expr.reshape(made, (prod(made.shape),))
        elif step == "turn" and n == 2:
            made = expr.transpose(made, (1, 0))
    return made, shapes


@given(expressions())
def test_contiguous_says_where_the_elements_lie(drawn):
    made, shapes = drawn
    wholes = {name: np.arange(prod(shape)).reshape(shape) + 10_000 * int(name[1:]) for name, shape in shapes.items()}
    elements = made.read(None, lambda name, box: wholes[name][box.slices]).reshape(-1).tolist()
    stretches = expr.contiguous(made)
    if stretches is not None:
        assert elements == [10_000 * int(n[1:]) + i for n, start, stop in stretches for i in range(start, stop)]


def test_contiguous_sees_through_what_moves_nothing():
    a, b = (expr.Source(name, (4, 6), "int64") for name in "ab")
    assert expr.contiguous(expr.cut(a, 0, 1, 3)) == [("a", 6, 18)]
    assert expr.contiguous(expr.split_equally(a, 0, 2)[1]) == [("a", 12, 24)]
    assert expr.contiguous(expr.pick(a, 0, 2)) == [("a", 12, 18)]
    assert expr.contiguous(expr.concat([a, b], 0)) == [("a", 0, 24), ("b", 0, 24)]
    assert expr.contiguous(expr.stack([b, a], 0)) == [("b", 0, 24), ("a", 0, 24)]
    assert expr.contiguous(expr.reshape(a, (24,))) == [("a", 0, 24)]
    assert expr.contiguous(expr.cut(expr.concat([a, b], 0), 0, 3, 5)) == [("a", 18, 24), ("b", 0, 6)]
    for moved in (expr.transpose(a, (1, 0)), expr.cut(a, 1, 0, 3), expr.concat([a, b], 1), expr.cast(a, "int32")):
        assert expr.contiguous(moved) is None


def fill_with(value):
    def fill(view):
        view[:] = bytes([value]) * len(view)

    return fill


def test_windows_are_made_once_and_memory_is_bounded():
    cache = WindowCache(4 << 16)
    made = []

    def fill(number):
        made.append(number)
        return fill_with(number)

    for number in [0, 1, 2, 0, 3, 4, 0, 1]:
        view = bytearray(10)
        cache.read(("k", number), 60_000, lambda out, number=number: fill(number)(out), 5, memoryview(view))
        assert view == bytes([number]) * 10
        assert cache.held_bytes <= 4 << 16
    assert made == [0, 1, 2, 3, 4, 1]  # 0 was used again and again, 1 was the oldest when 4 came
    assert cache.hits == 2


def test_windows_of_many_sizes_give_way_to_each_other():
    cache, choose = WindowCache(1 << 20), random.Random(4)
    for number in range(300):
        size = 100 if number < 20 else choose.choice([100, 70_000, 200_000, 500_000])
        view = bytearray(50)
        cache.read(("k", number), size, fill_with(number % 256), size - 50, memoryview(view))
        assert view == bytes([number % 256]) * 50
        assert cache.held_bytes <= 1 << 20
    assert cache.held_bytes > 1 << 19  # and what fits is kept
    hits = cache.hits
    cache.read(("k", 299), size, fill_with(0), 0, memoryview(bytearray(50)))
    assert cache.hits == hits + 1


def test_a_window_is_made_by_one_and_waited_for_by_the_others():
    cache = WindowCache(1 << 20)
    began, go_on, calls = threading.Event(), threading.Event(), []

    def slow(view):
        calls.append(1)
        began.set()
        assert go_on.wait(20)
        view[:] = b"x" * len(view)

    results = []

    def read():
        view = bytearray(3)
        cache.read(("k",), 100, slow, 0, memoryview(view))
        results.append(bytes(view))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert began.wait(20)
    go_on.set()
    for thread in threads:
        thread.join(20)
    assert results == [b"xxx"] * 4
    assert calls == [1]


def test_failures_reach_everybody_and_are_not_kept():
    cache = WindowCache(1 << 20, wait_s=0.2)
    view = memoryview(bytearray(4))

    def broken(_view):
        raise CorruptError("extent 3 differs")

    for _ in range(2):
        with pytest.raises(CorruptError, match="extent 3"):
            cache.read(("k",), 100, broken, 0, view)
    cache.read(("k",), 100, fill_with(7), 0, view)
    assert bytes(view) == b"\x07" * 4
    assert cache.held_bytes <= 1 << 20


def test_who_waits_for_a_hanging_store_gives_up():
    cache = WindowCache(1 << 20, wait_s=0.2)
    began, go_on = threading.Event(), threading.Event()

    def hang(view):
        began.set()
        go_on.wait(20)

    thread = threading.Thread(target=lambda: cache.read(("k",), 9, hang, 0, memoryview(bytearray(9))))
    thread.start()
    assert began.wait(20)
    with pytest.raises(StorageError, match="took more than"):
        cache.read(("k",), 9, hang, 0, memoryview(bytearray(9)))
    go_on.set()
    thread.join(20)


def test_sequential_readers_find_the_next_window_made():
    cache = WindowCache(1 << 20)
    made = threading.Semaphore(0)

    def make(start, view):
        view[:] = bytes([start // 1000 % 256]) * len(view)
        made.release()

    segment = produced(cache, ("k",), 2500, 1000, make)
    segment.ahead(0, 2500)
    for _ in range(3):
        assert made.acquire(timeout=20)
    view = bytearray(2500)
    while cache.hits + cache.misses < 3:
        pass
    segment.read(0, memoryview(view))
    assert bytes(view) == b"\0" * 1000 + b"\1" * 1000 + b"\2" * 500
    assert not made.acquire(blocking=False)


def test_safetensors_itself_reads_it(viewed, tmp_path):
    root, found, _ = viewed
    path = tmp_path / "model.safetensors"
    path.write_bytes(resolve(root, f"{STEP}/hf/model.safetensors").read_bytes())
    with safetensors.safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        for name in opened.keys():  # noqa: SIM118
            import torch

            tensor = opened.get_tensor(name)
            flat = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
            assert flat == bits(found[f"model/{name}"])
