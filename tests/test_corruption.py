"""Damage after the fact: whatever byte is flipped and whatever file is cut, a load that needs it says so.

`verify` has its own, finer tests; here every region is damaged once and both must notice.
"""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import ckptfs
from ckptfs.errors import CorruptError, FormatError, NotFoundError
from ckptfs.verify import verify

SMALL = ckptfs.Settings(
    chunk_bytes=2048, block_bytes=4096, extent_bytes=512, io_bytes=2048, small_file_bytes=256, read_threads=2
)


def tree():
    rng = np.random.default_rng(3)
    return {
        "model": {"w": rng.standard_normal((33, 50)).astype("f4"), "exact": np.arange(77, dtype="i8")},
        "scalar": np.array(2.5),
        "squeezed": np.repeat(np.arange(40, dtype="f8"), 40),
        "words": ["a", 1],
    }


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corruption") / "run"
    with ckptfs.Run(folder, settings=SMALL) as run:
        run.save(1, tree(), assets={"deep/vocab.txt": "abc" * 500}, compression={"squeezed": "blosc"})
    return folder


@pytest.fixture
def run(sound, tmp_path):
    return ckptfs.Run(shutil.copytree(sound, tmp_path / "run"), settings=SMALL)


def step_of(run):
    return f"{run.url}/step-00000001"


def files_of(folder):
    return sorted(
        os.path.relpath(os.path.join(where, name), folder) for where, _, names in os.walk(folder) for name in names
    )


def flip(path, at):
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def array_of(run, path):
    """The array that a data file belongs to, None for other files; and how many bytes of it a reader needs."""
    for param in run[1].manifest.params.values():
        for number in range(param.layout.files):
            if param.file(number) == path:
                table = param.extents
                stored = int(table.length[table.file == number].sum())
                return param.name, min(stored, param.nbytes) if param.codec is None else stored
    return None, 0


def offsets(size, data):
    """Both ends and the middle of the file, and both sides of where its data end."""
    return sorted({at for at in (0, 1, size // 2, data - 1, data, (data + size) // 2, size - 1) if 0 <= at < size})


def test_a_flipped_bit_in_any_region_of_any_file_is_found(run):
    folder, hit = step_of(run), set()
    for path in files_of(folder):
        name, data = (None, 0) if path == "manifest.json" else array_of(run, path)
        size = os.path.getsize(f"{folder}/{path}")
        for at in offsets(size, data):
            flip(f"{folder}/{path}", at)
            region = path if name is None else f"{name} {'data' if at < data else 'index'}"
            hit.add(region)
            if path == "manifest.json":
                with pytest.raises(FormatError, match=r"manifest\.json"):
                    run[1]
                assert [p.path for p in verify(run.store.sub("step-00000001"))] == [path]
            else:
                with run[1] as checkpoint:
                    assert path in [p.path for p in verify(checkpoint)], (path, at)
                    if name is not None and at < data:
                        refuses_to_load(checkpoint, name, path)
            flip(f"{folder}/{path}", at)
    assert {"model/w data", "model/w index", "squeezed data", "scalar data", "model/exact data"} <= hit
    assert {"zarr.json", "model/zarr.json", "model/w/zarr.json", "assets/deep/vocab.txt", "manifest.json"} <= hit
    with run[1] as checkpoint:
        assert verify(checkpoint) == []


def refuses_to_load(checkpoint, name, path):
    """Both ways: all of the tree, and this one array; the error names the array and the file."""
    into = {"model": {k: np.empty_like(v) for k, v in tree()["model"].items()}}
    for load in (
        lambda: checkpoint.tree(numpy=True),
        checkpoint[name].numpy,
        lambda: checkpoint.load(into) if name.startswith("model") else checkpoint[name].torch(),
    ):
        with pytest.raises((CorruptError, ckptfs.MismatchError)) as caught:
            load()
        if isinstance(caught.value, CorruptError):
            assert repr(name) in str(caught.value)
            assert path in str(caught.value)


def test_a_load_into_a_tree_of_one_damaged_array_is_a_corrupt_error(run):
    flip(f"{step_of(run)}/model/w/c.0.0", 3000)
    full = {"model": tree()["model"], "scalar": np.zeros(()), "squeezed": np.zeros(1600), "words": [0, 0]}
    with pytest.raises(CorruptError, match=r"'model/w'.*extent 5.*offset 2560 of .*model/w/c\.0\.0"):
        run.load(full)
    # What is not touched can still be had.
    assert run[1]["model/w"].numpy((slice(0, 2), ...)).shape == (2, 50)
    run.load(full, only="model/exact")
    assert full["model"]["exact"].tolist() == list(range(77))


@pytest.mark.parametrize("keep", [0, 1, -1, -70])
def test_cut_files_are_found(run, keep):
    folder = step_of(run)
    for path in files_of(folder):
        copy = Path(folder, path).read_bytes()
        size = len(copy)
        left = keep if keep >= 0 else size + keep
        if not 0 <= left < size:
            continue
        name, data = (None, 0) if path == "manifest.json" else array_of(run, path)
        os.truncate(f"{folder}/{path}", left)
        if path == "manifest.json":
            with pytest.raises(FormatError, match="cut off"):
                run[1]
        else:
            with run[1] as checkpoint:
                assert path in [p.path for p in verify(checkpoint)], path
                if name is not None and left < data:
                    with pytest.raises(CorruptError, match=name):
                        checkpoint[name].numpy()
        Path(folder, path).write_bytes(copy)


def test_missing_files_are_found(run):
    folder = step_of(run)
    for path in files_of(folder):
        name, _ = (None, 0) if path == "manifest.json" else array_of(run, path)
        os.rename(f"{folder}/{path}", f"{run.url}/aside")
        if path == "manifest.json":
            assert run.steps() == []
            with pytest.raises(NotFoundError, match="no step 1"):
                run[1]
            with pytest.raises(NotFoundError, match="not a committed checkpoint"):
                ckptfs.Checkpoint(folder)
        else:
            with run[1] as checkpoint:
                assert (path, "missing") in [(p.path, p.kind) for p in verify(checkpoint)]
                if name is not None:
                    with pytest.raises(CorruptError, match=f"'{name}'.*is missing"):
                        checkpoint[name].numpy()
        os.rename(f"{run.url}/aside", f"{folder}/{path}")


def test_a_folder_of_another_array_in_its_place_is_found(run):
    """Everything of a file is right, but for being another file."""
    other = tree()
    other["model"]["w"] += 1
    run.save(2, other, compression={"squeezed": "blosc"})
    shutil.copy(f"{run.url}/step-00000002/model/w/c.0.0", f"{step_of(run)}/model/w/c.0.0")
    with run[1] as checkpoint:
        assert {p.path for p in verify(checkpoint)} == {"model/w/c.0.0"}
        with pytest.raises(CorruptError, match="'model/w'"):
            checkpoint.tree(numpy=True)


# --- folders that are not ours ---------------------------------------------------------------------------------


def test_other_peoples_folders(tmp_path):
    (tmp_path / "step-00000007").mkdir()
    (tmp_path / "step-00000007" / "weights.bin").write_bytes(b"x" * 100)
    (tmp_path / "step-8").mkdir()
    (tmp_path / "step-8" / "manifest.json").write_text("{}")
    (tmp_path / "step-00000009").write_text("a file")
    (tmp_path / "notes.txt").write_text("mine")
    run = ckptfs.Run(tmp_path)
    assert run.steps() == []
    with pytest.raises(NotFoundError, match="no committed step"):
        run.latest  # noqa: B018 - the look is the test
    with pytest.raises(NotFoundError, match="has no step 7"):
        run[7]
    with pytest.raises(NotFoundError):
        ckptfs.Checkpoint(tmp_path / "step-00000009")
    (tmp_path / "step-00000007" / "manifest.json").write_text('{"version": 3, "shards": []}')
    with pytest.raises(FormatError, match="not one of ours"):
        run[7]
    # What is there is never replaced or removed, whoever made it.
    with pytest.raises(ckptfs.ExistsError):
        run.save(7, {"a": np.arange(3)})
    with pytest.raises(ckptfs.CkptError):
        run.save(9, {"a": np.arange(3)})
    run.save(10, {"a": np.arange(3)})
    assert (tmp_path / "step-00000007" / "weights.bin").exists()
    assert (tmp_path / "step-00000009").read_text() == "a file"
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_folder_in_the_way_without_a_manifest_is_not_replaced_silently(tmp_path):
    """Somebody's files under the name of a step: not ours to throw away."""
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / "precious.bin").write_bytes(b"x")
    with pytest.raises(ckptfs.ExistsError, match="step-00000001"):
        ckptfs.Run(tmp_path).save(1, {"a": np.arange(3)})
    assert (tmp_path / "step-00000001" / "precious.bin").exists()
    assert os.listdir(tmp_path) == ["step-00000001"]


def test_torch_and_dcp_files_are_not_ours(tmp_path):
    (tmp_path / ".metadata").write_bytes(b"\x80\x05")
    (tmp_path / "model.pt").write_bytes(b"PK")
    with pytest.raises(NotFoundError, match="no committed step"):
        ckptfs.load(tmp_path)
    with pytest.raises(NotFoundError):
        ckptfs.load(tmp_path / "model.pt")
    with pytest.raises(NotFoundError):
        ckptfs.load(tmp_path / "nothing here")
