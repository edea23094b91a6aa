"""The DCP plug-in in one process: trees, values, what DCP's tools do with it, and the defects it must not have."""

import argparse
import io
import json
import os
import pickle
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import zarr
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict, _load_state_dict_from_keys

import ckptfs
from ckptfs import dtypes, tree
from ckptfs.adapters import dcp as adapter
from ckptfs.adapters import dcp_plan, dcp_tree
from ckptfs.adapters.dcp import StorageReader, StorageWriter
from ckptfs.adapters.dcp_paths import locate
from ckptfs.box import Box, split_evenly
from ckptfs.convert.safetensors import export_folder
from ckptfs.errors import CkptError, CorruptError, ExistsError, MismatchError, SaveError
from ckptfs.grid import Layout
from ckptfs.saveplan import Array, Options, merge
from ckptfs.storage import FaultOps, FaultPlan, FileOps, SimulatedCrash
from ckptfs.verify import verify
from ckptfs.views import open_root, resolve
from fuse_mounting import needs_fuse

pytestmark = pytest.mark.filterwarnings("ignore")


def state():
    return {
        "model": {"layer.weight": torch.randn(300, 40), "ids": torch.arange(7), "empty": torch.zeros(0, 3)},
        "half": torch.randn(5, 3).bfloat16(),
        "eight": torch.randn(9).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(3.0),
        "list": [torch.ones(3), {"x": 1.5}],
        "epoch": 5,
        "plain": [1, 2.5, "three", None, True],
        "rng": (3, tuple(range(5)), None),
        "pair": (1, torch.arange(4)),
        "array": np.arange(6.0).reshape(2, 3),
        "args": argparse.Namespace(lr=1e-3, name="a"),
        "$odd/key.x": {"$": 3},
    }


def blank(value):
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    return [blank(item) for item in value] if isinstance(value, list) else None


def save(value, path, **how):
    return dcp.save(value, storage_writer=StorageWriter(path, **how))


def load(value, path, **how):
    dcp.load(value, storage_reader=StorageReader(path, **how))
    return value


def same(one, two):
    if isinstance(one, torch.Tensor):
        one_bits, two_bits = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, two))
        return (one.dtype, one.shape) == (two.dtype, two.shape) and torch.equal(one_bits, two_bits)
    if isinstance(one, np.ndarray):
        return one.dtype == two.dtype and np.array_equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(two) and len(one) == len(two) and all(map(same, one, two))
    return type(one) is type(two) and one == two


@pytest.fixture
def at(tmp_path):
    return str(tmp_path / "run")


# --- both ways -------------------------------------------------------------------------------------------


def test_round_trip(at):
    value = state()
    save(value, f"{at}@7")
    assert same(load(blank(value), f"{at}@7"), value)
    assert same(load(blank(value), f"{at}@latest"), value)
    assert same(load(blank(value), f"{at}/step-00000007"), value)


def test_saved_by_dcp_is_an_ordinary_step(at):
    value = state()
    save(value, f"{at}@7")
    run = ckptfs.Run(at)
    assert run.steps() == [7]
    assert run[7].manifest.step == 7
    assert same(run.load(blank(value)), value)
    assert same(run[7].tree(), value)
    assert same(run[7]["model/layer.weight"][10:20, 3], value["model"]["layer.weight"][10:20, 3])
    assert verify(run[7]) == []
    found = zarr.open_group(f"{at}/step-00000007", mode="r")["model/layer.weight"][...]
    assert np.array_equal(found, value["model"]["layer.weight"].numpy())


def test_saved_by_ckptfs_loads_through_dcp(at):
    value = state()
    ckptfs.Run(at).save(3, {**value, "numbers": {0: torch.ones(2), 1: {"x": torch.zeros(3)}}})
    target = {**blank(value), "numbers": {0: torch.zeros(2), 1: {"x": torch.ones(3)}}}
    load(target, f"{at}@3")
    assert target["numbers"][0].tolist() == [1, 1]
    assert target["numbers"][1]["x"].tolist() == [0, 0, 0]
    del target["numbers"]
    assert same(target, value)


def test_tied_tensors_and_views(at):
    weight = torch.randn(4, 6)
    ckptfs.Run(at).save(1, {"a": weight, "b": weight})
    found = load({"a": torch.zeros(4, 6), "b": torch.zeros(6, 4).T}, f"{at}@1")
    assert same(found["a"], weight)
    assert torch.equal(found["b"], weight)
    save({"t": weight.T, "column": weight[:, 2]}, f"{at}@2")
    assert torch.equal(ckptfs.Run(at)[2]["t"][...], weight.T)
    assert torch.equal(ckptfs.Run(at)[2]["column"][...], weight[:, 2])


def test_a_step_that_other_ranks_saved_parts_of(at):
    ckptfs.Run(at).save(1, {"rng": ckptfs.PerRank({"seed": 4, "state": torch.arange(3)})})
    assert same(load({"rng": {"seed": 0, "state": torch.zeros(3, dtype=torch.int64)}}, f"{at}@1")["rng"]["seed"], 4)


def test_unflattened_and_custom_planners(at):
    value = {"a.b": torch.ones(3), "inner": {"c": 1, "t": torch.zeros(2)}}
    writer = StorageWriter(f"{at}@1")
    dcp.save(value, storage_writer=writer, planner=DefaultSavePlanner(flatten_state_dict=False))
    target = {"a.b": torch.zeros(3), "inner": None}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(target, storage_reader=StorageReader(f"{at}@1"), planner=planner)
    assert same(target, value)

    class Bytes(DefaultSavePlanner):
        """One that hands over bytes, as any planner that is not torch's own may."""

        def transform_object(self, write_item, object):  # noqa: A002
            return super().transform_object(write_item, object)

    dcp.save(state(), storage_writer=StorageWriter(f"{at}@2", allow_pickle=True), planner=Bytes())
    assert ckptfs.Run(at)[2].tree(allow_pickle=True)["rng"] == state()["rng"]
    with pytest.raises(CheckpointException, match="'args'"):
        dcp.save({"args": argparse.Namespace(a=1)}, storage_writer=StorageWriter(f"{at}@3"), planner=Bytes())
    assert ckptfs.Run(at).steps() == [1, 2]


def test_dcp_tools(at):
    value = state()
    save(value, f"{at}@1")
    everything = {}
    _load_state_dict(
        everything, storage_reader=StorageReader(f"{at}@1"), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    assert same(everything, value)
    some = _load_state_dict_from_keys({"model", "epoch"}, storage_reader=StorageReader(f"{at}@1"))
    assert same(some, {"model": value["model"], "epoch": 5})
    partly = {"half": torch.zeros_like(value["half"]), "new": torch.full((2,), 7.0)}
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(partly, storage_reader=StorageReader(f"{at}@1"), planner=planner)
    assert same(partly, {"half": value["half"], "new": torch.full((2,), 7.0)})
    with pytest.raises(CheckpointException, match="Missing key"):
        load({"new": torch.zeros(2)}, f"{at}@1")
    with pytest.raises(CheckpointException, match="Size mismatch"):
        load({"half": torch.zeros(5, 4)}, f"{at}@1")


def test_metadata_is_what_dcp_expects(at):
    metadata = save({"a": {"b": torch.zeros(3, 4)}, "c": [torch.ones(2)], "d": 1}, f"{at}@1")
    assert metadata.storage_data is None
    read = StorageReader(f"{at}@1").read_metadata()
    assert read.planner_data == metadata.planner_data == {"a.b": ("a", "b"), "c.0": ("c", 0), "d": ("d",)}
    assert read.state_dict_metadata == metadata.state_dict_metadata
    assert read.storage_meta.save_id == metadata.storage_meta.save_id


def test_by_url(at):
    adapter.install()
    adapter.install()
    try:
        value = state()
        dcp.save(value, checkpoint_id=f"ckptfs://{at}@3")
        target = blank(value)
        dcp.load(target, checkpoint_id=f"ckptfs://{at}@latest")
        assert same(target, value)
        dcp.save({"a": torch.ones(2)}, checkpoint_id=f"{at}-torch")
        assert Path(f"{at}-torch/.metadata").exists()
    finally:
        adapter.uninstall()
    with pytest.raises((RuntimeError, CheckpointException)):
        dcp.load({}, checkpoint_id=f"ckptfs://{at}@latest")


def test_reused_and_pickled_writers(at):
    writer = StorageWriter(f"{at}@1")
    dcp.save({"a": torch.ones(2)}, storage_writer=writer)
    dcp.save({"a": torch.ones(2) * 2}, storage_writer=writer, checkpoint_id=f"{at}@2")
    dcp.save({"a": torch.ones(2) * 3}, storage_writer=pickle.loads(pickle.dumps(writer)), checkpoint_id=f"{at}@3")
    reader = StorageReader(f"{at}@1")
    for step in (1, 2, 3):
        target = {"a": torch.zeros(2)}
        dcp.load(target, storage_reader=pickle.loads(pickle.dumps(reader)), checkpoint_id=f"{at}@{step}")
        assert target["a"].tolist() == [step, step]
    assert not isinstance(writer, torch.distributed.checkpoint.staging.AsyncStager)


def test_a_memory_store_and_compression():
    url = "memory://dcp-test/run"
    value = {"a": torch.randn(500, 30), "b": 3}
    save(value, f"{url}@1", compression={"*": "zstd"})
    assert same(load(blank(value), f"{url}@1"), value)
    with pytest.raises(CheckpointException, match="cannot be replaced"):
        save(value, f"{url}@1")


def test_compression_of_one_name(at):
    value = {"a": torch.zeros(500, 30), "b": torch.zeros(500, 30)}
    save(value, f"{at}@1", compression={"a": "zstd"})
    found = ckptfs.Run(at)[1]
    assert found.param("a").stored_bytes < 6000 < found.param("b").stored_bytes
    assert same(load(blank(value), f"{at}@1"), value)


def test_parts_of_one_name(at):
    value = {"a": torch.randn(64, 32), "b": torch.randn(64, 32)}
    save(value, f"{at}@1", split={"a": (1, 4)})
    found = ckptfs.Run(at)[1]
    assert [found.param(name).layout.block for name in "ab"] == [(64, 8), (64, 32)]
    assert same(load(blank(value), f"{at}@1"), value)
    with pytest.raises(CheckpointException, match="no array has a name like 'c'"):
        save(value, f"{at}@2", split={"c": (1, 4)})


def test_assets_come_along(at):
    save({"a": torch.ones(2)}, f"{at}@1", assets={"config.json": "{}"})
    assert Path(f"{at}/step-00000001/assets/config.json").read_text() == "{}"


# --- the defects of DCP's own storage, none of which is here ------------------------------------------------


class FullDisk(FileOps):
    """Nothing more fits."""

    def pwrite(self, fd, data, offset):
        raise OSError(28, "No space left on device")


def test_an_error_in_a_writer_thread_fails_the_save(at):
    save({"a": torch.ones(600, 600)}, f"{at}@1")
    with pytest.raises(CheckpointException, match="space"):
        save({"a": torch.zeros(600, 600)}, f"{at}@1", thread_count=4, ops=FullDisk())
    with pytest.raises(CheckpointException, match="space"):
        save({"a": torch.zeros(600, 600)}, f"{at}@2", ops=FullDisk())
    future = dcp.async_save(
        {"a": torch.zeros(9)}, storage_writer=StorageWriter(f"{at}@3", ops=FullDisk()), no_dist=True
    )
    with pytest.raises(CheckpointException, match="space"):
        future.result()
    assert ckptfs.Run(at).steps() == [1]
    assert ckptfs.Run(at)[1]["a"][5, 5].item() == 1
    assert os.listdir(at) == ["step-00000001"]


def test_a_crash_while_overwriting_leaves_the_old_or_the_new(at):
    """Never the old metadata over new bytes: at every operation of the save, the process may end."""
    old, new = {"a": torch.full((700, 100), 1.0)}, {"a": torch.full((700, 100), 2.0)}
    save(old, f"{at}@1")
    plan = FaultPlan()
    save(new, f"{at}@1", ops=FaultOps(plan))
    operations = len(plan.log)
    assert operations > 10
    seen = set()
    for number in range(operations):
        save(old, f"{at}@1")
        with pytest.raises((CheckpointException, SimulatedCrash)):
            save(new, f"{at}@1", ops=FaultOps(FaultPlan("crash-before", at=number)))
        found = load({"a": torch.zeros(700, 100)}, f"{at}@1")["a"].unique().tolist()
        assert found in ([1.0], [2.0])
        seen.add(found[0])
    assert 1.0 in seen


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


def test_a_flipped_byte_never_loads(at):
    save({"a": torch.randn(50, 40), "n": 5}, f"{at}@1")
    files = [path for path in Path(at).rglob("*") if path.is_file() and path.name != "zarr.json"]
    assert len(files) == 2  # the tensor and the manifest
    for path in files:
        for position in (0, path.stat().st_size // 2, path.stat().st_size - 3):
            flip(path, position)
            with pytest.raises(CheckpointException, match=r"checksum|damaged|not end as|differ"):
                load({"a": torch.zeros(50, 40), "n": 0}, f"{at}@1")
            flip(path, position)
    load({"a": torch.zeros(50, 40), "n": 0}, f"{at}@1")


def test_no_silent_cast(at):
    save({"a": torch.tensor([1.0, 1e30])}, f"{at}@1")
    target = {"a": torch.zeros(2, dtype=torch.float16)}
    with pytest.raises(CheckpointException, match="type of 'a': float16 here, float32 stored"):
        load(target, f"{at}@1")
    assert target["a"].tolist() == [0, 0]
    assert load(target, f"{at}@1", cast=True)["a"][0].item() == 1


def test_nothing_on_disk_is_a_pickle(at):
    save(state(), f"{at}@1")
    for path in Path(at).rglob("*"):
        if not path.is_file():
            continue
        data = path.read_bytes()
        assert not data.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x04"))
        if path.suffix == ".json":
            json.loads(data)
        with pytest.raises(Exception):  # noqa: B017
            pickle.loads(data)


class Odd:
    """Nothing that JSON could hold."""


def test_what_cannot_be_stored_is_refused_by_name(at):
    with pytest.raises(CheckpointException, match=r"'deep\.odd'.*Odd") as caught:
        save({"deep": {"odd": Odd()}}, f"{at}@1")
    assert isinstance(caught.value.failures[0][0], MismatchError)
    assert os.listdir(at) == []
    save({"deep": {"odd": Odd()}}, f"{at}@1", allow_pickle=True)
    with pytest.raises(CheckpointException, match="pickle"):
        load({"deep": {"odd": None}}, f"{at}@1")
    assert type(load({"deep": {"odd": None}}, f"{at}@1", allow_pickle=True)["deep"]["odd"]) is Odd


def test_a_slice_reads_only_its_bytes(at):
    save({"a": torch.zeros(1024, 1024)}, f"{at}@1")
    checkpoint = ckptfs.Run(at)[1]
    _ = checkpoint["a"][128:256]
    assert checkpoint.bytes_read <= 512 << 10


def test_integers_in_every_view(at):
    value = {"ids": torch.arange(9), "bytes": torch.arange(9, dtype=torch.uint8), "on": torch.tensor([True, False])}
    save(value, f"{at}@1")
    assert same(ckptfs.Run(at)[1].tree(), value)
    assert same(load(blank(value), f"{at}@1"), value)
    export_folder(ckptfs.Run(at)[1], f"{at}-hf")
    assert same(load_file(f"{at}-hf/model.safetensors"), value)
    group = zarr.open_group(f"{at}/step-00000001", mode="r")
    assert group["ids"][...].tolist() == list(range(9))


def test_errors_that_except_exception_catches(at):
    with (
        pytest.raises(CkptError, match=r"(?s)'plan' phase.*rank 0.*(not a committed|no committed|has no step)"),
        adapter.plain_errors(),
    ):
        load({"a": torch.zeros(2)}, f"{at}@1")
    save({"a": torch.zeros(2)}, f"{at}@1")
    with pytest.raises(ExistsError, match="overwrite=True"), adapter.plain_errors():
        save({"a": torch.zeros(2)}, f"{at}@1", overwrite=False)
    with pytest.raises(MismatchError, match="type of 'a'"), adapter.plain_errors():
        load({"a": torch.zeros(2).half()}, f"{at}@1")
    flip(Path(at) / "step-00000001/a/c.0", 1)
    with pytest.raises(CorruptError), adapter.plain_errors():
        load({"a": torch.zeros(2)}, f"{at}@1")
    with pytest.raises(SaveError, match="rank 0"), adapter.plain_errors():
        raise CheckpointException("write", {0: (ValueError("x"), None), 1: (OSError("y"), None)})


def test_plan_caching_never_writes_to_an_earlier_place(at):
    for step in (1, 2, 3):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save({"a": torch.full((4,), step)}, storage_writer=StorageWriter(f"{at}@{step}"), planner=planner)
        again = load({"a": torch.zeros(4, dtype=torch.int64)}, f"{at}@{step}")
        assert again["a"].tolist() == [step] * 4
    assert ckptfs.Run(at)[1]["a"][0].item() == 1


def test_read_metadata_takes_no_keywords():
    import inspect

    assert list(inspect.signature(StorageReader.read_metadata).parameters) == ["self"]
    assert "kwargs" in inspect.signature(StorageWriter.set_up_storage_writer).parameters


def test_ranks_that_store_an_array_differently_are_found_out():
    dtype = dtypes.of("float32")
    wide, tall = Layout((8, 6), 4, (8, 3), (8, 3)), Layout((8, 6), 4, (8, 6), (8, 6))
    reports = [
        dcp_plan.unpack(dcp_plan.pack(dcp_plan.Report([Array("a", dtype, layout, None)], [], {}), 1 << 20))
        for layout in (wide, wide, tall)
    ]
    arrays, _, _ = dcp_plan.unite(reports[:2])
    assert [array.layout for array in arrays] == [wide]
    with pytest.raises(MismatchError, match=r"'a'.*enable_plan_caching"):
        dcp_plan.unite(reports)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 5), st.integers(0, 1), st.booleans(), st.integers(1, 4))
def test_what_the_ranks_write_tiles_every_array(rows, columns, parts, dim, compressed, split):
    """Layouts from the coordinator, pieces from each rank on its own: together each byte exactly once."""
    options = Options(chunk_bytes=256, block_bytes=512, compression=(("*", "zstd"),) if compressed else ())
    options = replace(options, split=(("a", (1, split)),))
    boxes = []
    for low, high in split_evenly((rows, columns)[dim], parts):
        start, stop = [0, 0], [rows, columns]
        start[dim], stop[dim] = low, high
        boxes.append(Box(tuple(start), tuple(stop)))
    plans = [SavePlan([write_item(box, (rows, columns))]) for box in boxes]
    written = []
    for plan, attached in zip(plans, dcp_plan.attach(plans, dcp_plan.Ticket("/", "a", "1"), options), strict=True):
        attached = pickle.loads(pickle.dumps(attached))
        array = dcp_plan.array_of(plan.items[0], "a", dtypes.of("float32"), attached, options)
        written += array.layout.ranges(dcp_plan.box_of(plan.items[0]))
        if array.layout.many:
            assert array.codec is not None
    ends = merge(written)
    if array.layout.many:
        size = array.layout.block_bytes
        assert sum(b - a for a, b in ends) == sum(array.layout.used_bytes(b) for b in range(array.layout.blocks))
        assert all(a % size == 0 for a, _ in ends)
    else:
        assert ends == [(0, array.layout.logical_bytes)]
    assert sum(b - a for a, b in written) == sum(b - a for a, b in ends)


def write_item(box, shape):
    chunk = ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape))
    data = TensorWriteData(chunk, TensorProperties(torch.float32), torch.Size(shape))
    return WriteItem(MetadataIndex("a", box.start), WriteItemType.SHARD, tensor_data=data)


# --- targets ---------------------------------------------------------------------------------------------


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "notes.txt").write_text("precious")
    with pytest.raises(CheckpointException, match="folder of its own"):
        save({"a": torch.ones(2)}, folder)
    assert (folder / "notes.txt").read_text() == "precious"
    (folder / "notes.txt").unlink()
    save({"a": torch.ones(2)}, folder)
    assert same(load({"a": torch.zeros(2)}, folder)["a"], torch.ones(2))


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("/a/run@5", ("/a/run", "step-00000005", 5)),
        ("/a/run/step-00000005", ("/a/run", "step-00000005", 5)),
        ("/a/ck/", ("/a", "ck", None)),
        ("ckptfs:///a/run@5", ("/a/run", "step-00000005", 5)),
        (Path("ckptfs:///a/run@5"), ("/a/run", "step-00000005", 5)),
        ("ckptfs://s3://bucket/run@12", ("s3://bucket/run", "step-00000012", 12)),
        ("s3://bucket/ck", ("s3://bucket", "ck", None)),
    ],
)
def test_places(path, place):
    assert locate(path) == place


@pytest.mark.parametrize("path", ["run@latest", "/", "/a/.hidden", "s3://bucket"])
def test_places_that_cannot_be_saved_to(path):
    with pytest.raises(MismatchError):
        locate(path)
    assert not StorageWriter.validate_checkpoint_id(path)


def test_arguments_of_torchs_own_writer(at):
    save({"a": torch.ones(2)}, f"{at}@1", single_file_per_rank=False, sync_files=True, thread_count=2, overwrite=True)
    with pytest.raises(MismatchError, match="compression"):
        StorageWriter(at, _extensions=[object()])


# --- names and trees: pure --------------------------------------------------------------------------------

KEYS = st.text(st.characters(codec="utf-8", exclude_characters="."), min_size=1, max_size=4)
LEAVES = st.integers() | st.text(max_size=3) | st.just(torch.ones(2)) | st.just((1, 2))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.dictionaries(KEYS, inner, min_size=1, max_size=3) | st.lists(inner, min_size=1, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(KEYS, TREES, max_size=4))
def test_flat_names_are_those_of_dcp(value):
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    node, _ = tree.flatten(value)
    flat, paths = flatten_state_dict(value)
    found = dcp_tree.flat(node, 0)
    assert {fqn: path for fqn, (path, _) in found.items()} == paths
    assert {fqn for fqn, (_, leaf) in found.items() if dcp_tree.is_tensor(leaf)} == {
        fqn for fqn, leaf in flat.items() if isinstance(leaf, torch.Tensor)
    }
    # and back: the same tree, with the same names
    again = dcp_tree.nest(found.values())
    assert sorted(tree.names(again)) == sorted(tree.names(node))
    for tag in tree.arrays(again):
        for fqn in [fqn for fqn, (_, leaf) in found.items() if leaf is tag]:
            assert tag["name"] == dcp_tree.name_of(paths[fqn])


def test_nest_refuses_what_is_both():
    with pytest.raises(MismatchError, match="container"):
        dcp_tree.nest([(("a", "b"), 1), (("a",), 2)])
    with pytest.raises(MismatchError, match="inside a value"):
        dcp_tree.nest([(("a",), 2), (("a", "b"), 1)])


def test_a_step_that_is_no_dict_is_refused(at):
    ckptfs.Run(at).save(1, [torch.ones(2)])
    with pytest.raises(CheckpointException, match="not saved from a dict"):
        load({"a": torch.zeros(2)}, f"{at}@1")


def test_a_ticket_is_left_where_it_is_unpickled():
    dcp_plan.clear_mailbox()
    ticket = dcp_plan.Ticket("/a", "ck", "17")
    copied = pickle.loads(pickle.dumps(dcp_plan.Attached(ticket, 1, {})))
    assert copied.ticket == ticket
    assert dcp_plan.take_ticket("/a", "ck") == ticket
    with pytest.raises(CkptError, match="coordinating rank"):
        dcp_plan.take_ticket("/a", "ck")


# --- views and the document --------------------------------------------------------------------------------


def test_what_a_mount_would_show(at):
    value = {"model": {"layer.weight": torch.randn(30, 4), "n": torch.arange(5)}}
    save(value, f"{at}@1")
    file = resolve(open_root(f"{at}@1"), "params/model/layer.weight.npy")
    found = np.load(io.BytesIO(file.read_bytes()))
    assert np.array_equal(found, value["model"]["layer.weight"].numpy())


@pytest.mark.fuse
@needs_fuse
def test_a_step_saved_by_dcp_is_mounted(at):
    value = {"model": {"layer.weight": torch.randn(30, 4), "n": torch.arange(5)}}
    save(value, f"{at}@1")
    with ckptfs.Run(at).mount() as folder:
        found = np.load(f"{folder}/latest/params/model/layer.weight.npy")
        assert np.array_equal(found, value["model"]["layer.weight"].numpy())
        assert zarr.open_group(f"{folder}/latest/zarr", mode="r")["model/n"][...].tolist() == list(range(5))


def test_the_document(tmp_path):
    text = (Path(__file__).parent.parent / "docs/dcp.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names = {"state_dict": {"a": torch.ones(3), "b": 2}}
    try:
        for block in blocks[:3]:
            exec(compile(block.replace("/ckpts", str(tmp_path)), "docs/dcp.md", "exec"), names)
            if "future" in names:
                names.pop("future").result()
    finally:
        adapter.uninstall()
    assert ckptfs.Run(tmp_path / "run7").steps() == [1000, 1100]
