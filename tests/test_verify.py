"""verify finds every kind of damage: each stored byte flipped, each file cut, grown, lost or added."""

import json
import os
import random
import shutil

import numpy as np
import pytest

import ckptfs
import view_runs
from ckptfs.manifest import digest
from ckptfs.settings import Settings
from ckptfs.storage import LocalStore, MemoryStore
from ckptfs.verify import KINDS, verify

SMALL = Settings(chunk_bytes=4096, block_bytes=8192, extent_bytes=1024, io_bytes=8192, read_threads=2)


def save(url, compression=None):
    rng = np.random.default_rng(7)
    value = {
        "model": {
            "sharded": rng.standard_normal((37, 64)).astype("f4"),
            "exact": np.arange(300, dtype="i8"),
            "scalar": np.array(3.5),
            "empty": np.zeros((0, 4)),
            "odd name/é": np.ones((3, 5), "i2"),
        },
        "optim": {"state": [np.repeat(np.arange(700, dtype="f4"), 8), "words", 4]},
    }
    run = ckptfs.Run(url, settings=SMALL)
    run.save(1, value, assets={"config.json": "{}", "sub/big.bin": bytes(range(256)) * 50}, compression=compression)
    return run[1]


def open_again(folder):
    return ckptfs.Checkpoint(str(folder), settings=SMALL)


def files_of(folder):
    return sorted(
        os.path.relpath(os.path.join(where, name), folder) for where, _, names in os.walk(folder) for name in names
    )


@pytest.fixture(scope="module", params=[None, "zstd", "blosc"], ids=["raw", "zstd", "blosc"])
def sound(tmp_path_factory, request):
    with save(tmp_path_factory.mktemp("sound") / "run", request.param) as checkpoint:
        return checkpoint.url


@pytest.fixture
def step(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "step-00000001")


def check(folder):
    with open_again(folder) as checkpoint:
        return verify(checkpoint)


def flip(path, at, bit=1):
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ bit]))


@pytest.mark.parametrize("compression", [None, "zstd", "blosc"])
def test_a_sound_step_in_every_store(tmp_path, compression):
    for url in (tmp_path / "run", f"memory://verify-{compression}"):
        with save(url, compression) as checkpoint:
            seen = []
            assert verify(checkpoint, progress=lambda *now, seen=seen: seen.append(now)) == []
            assert verify(checkpoint.store, threads=1) == []
            total = seen[0][1]
            assert seen[-1] == (total, total)
            assert [done for done, _ in seen] == sorted(done for done, _ in seen)
            assert total >= checkpoint.manifest.stored_bytes


def test_every_byte_of_every_file(step, sound):
    """One flip in each byte of small files and in a sample of large ones; each is found, in the right file."""
    rng = random.Random(3)
    with open_again(step) as checkpoint:
        for name in files_of(step):
            if name == "manifest.json":
                continue
            size = (step / name).stat().st_size
            ends = {*range(min(8, size)), *range(max(0, size - 12), size)}
            for at in sorted(ends | set(rng.sample(range(size), min(size, 12)))):
                flip(step / name, at, 1 << rng.randrange(8))
                problems = verify(checkpoint, threads=1)
                shutil.copyfile(f"{sound}/{name}", step / name)
                assert {p.path for p in problems} == {name}, f"byte {at} of {name}"
                assert not any(p.warning for p in problems)
    assert check(step) == []


def test_every_region_of_the_manifest(step):
    path = step / "manifest.json"
    raw = path.read_bytes()
    rng = random.Random(5)
    for at in {0, 1, *range(len(raw) - 60, len(raw)), *rng.sample(range(len(raw)), 60)}:
        bad = bytearray(raw)
        bad[at] ^= 1 << rng.randrange(7)
        path.write_bytes(bad)
        assert [p.kind for p in verify(LocalStore(step))] == ["manifest"], at
    for bad in (b"", raw[:-1], raw + b" ", raw[: len(raw) // 2]):
        path.write_bytes(bad)
        assert [p.kind for p in verify(LocalStore(step))] == ["manifest"]


def test_a_flip_is_placed_in_its_extent(step):
    with open_again(step) as checkpoint:
        param = checkpoint.param("model/sharded")
        for number in range(param.extent_count):
            offset = int(param.extents.offset[number]) + int(param.extents.length[number]) - 1
            name = param.file(int(param.extents.file[number]))
            flip(step / name, offset)
            (problem,) = verify(checkpoint)
            flip(step / name, offset)
            assert (problem.path, problem.array, problem.extent, problem.kind) == (name, param.name, number, "checksum")
            assert problem.offset == int(param.extents.offset[number])


def test_padding_counts(tmp_path):
    settings = Settings(chunk_bytes=1024, extent_bytes=1024)
    run = ckptfs.Run(tmp_path / "run", settings=settings)
    run.save(1, {"w": np.ones((7, 100), "f4")})
    with run[1] as checkpoint:
        param = checkpoint.param("w")
        assert param.layout.logical_bytes > param.nbytes, "the test needs padding"
        flip(f"{checkpoint.url}/{param.file()}", param.layout.logical_bytes - 1)
        assert [p.kind for p in verify(checkpoint)] == ["checksum"]


def test_panels_of_columns(tmp_path):
    """Several ranks with columns each: their panels, the padding in them and the index are all covered."""
    view_runs.save_in_panels(tmp_path / "run", settings=SMALL)
    rng = random.Random(9)
    with ckptfs.Run(tmp_path / "run", settings=SMALL)[1] as checkpoint:
        assert verify(checkpoint) == []
        panelled = [p for p in checkpoint.manifest.params.values() if not p.layout.many and p.layout.blocks > 1]
        assert panelled, "the test needs panels"
        for param in panelled[:2]:
            path = f"{checkpoint.url}/{param.file()}"
            size = os.path.getsize(path)
            for at in [0, size - 1, *rng.sample(range(size), 8)]:
                flip(path, at)
                (problem,) = verify(checkpoint)
                flip(path, at)
                assert problem.array == param.name
                assert (problem.kind == "index") == (at >= param.layout.logical_bytes)


def test_every_file_cut_grown_and_lost(step, sound):
    with open_again(step) as checkpoint:
        for name in files_of(step):
            path = step / name
            raw = path.read_bytes()
            kinds = {}
            for label, data in {"cut": raw[:-1], "half": raw[: len(raw) // 2], "grown": raw + b"\0"}.items():
                path.write_bytes(data)
                problems = verify(checkpoint)
                assert {p.path for p in problems} == {name}, label
                kinds[label] = {p.kind for p in problems}
            path.unlink()
            lost = verify(checkpoint)
            shutil.copyfile(f"{sound}/{name}", path)
            assert [(p.path, p.kind) for p in lost] == [(name, "missing")]
            if name.endswith("zarr.json") or name == "manifest.json":
                assert kinds["grown"] <= {"checksum", "metadata", "manifest"}
            else:
                assert kinds["grown"] == {"size"}
                assert "size" in kinds["cut"]


def test_what_is_left_of_a_cut_file_is_still_checked(step):
    with open_again(step) as checkpoint:
        param = checkpoint.param("optim/state/0")
        table = param.extents
        last = int(table.file.searchsorted(0, side="right")) - 1  # the last extent of the first file
        os.truncate(step / param.file(), int(table.offset[last]) + 5)
        flip(step / param.file(), int(table.offset[last - 1]))
        found = {(p.kind, p.extent) for p in verify(checkpoint) if p.path == param.file()}
        assert found == {("size", None), ("checksum", last - 1)}


def test_many_problems_at_once(step):
    with open_again(step) as checkpoint:
        flip(step / checkpoint.param("model/exact").file(), 9)
        (step / "assets/config.json").unlink()
        flip(step / "zarr.json", 5)
        flip(step / "model/zarr.json", 5)
        (step / "stray.txt").write_text("?")
        found = {(p.path, p.kind) for p in verify(checkpoint)}
        assert found == {
            (checkpoint.param("model/exact").file(), "checksum"),
            ("assets/config.json", "missing"),
            ("zarr.json", "checksum"),
            ("model/zarr.json", "metadata"),
            ("stray.txt", "extra"),
        }


def test_unknown_files_are_warnings(step):
    for name in ("stray", "model/more/c.0", "assets/other.json"):
        (step / name).parent.mkdir(exist_ok=True)
        (step / name).write_text("?")
    problems = check(step)
    assert [p.path for p in problems] == ["assets/other.json", "model/more/c.0", "stray"]
    assert all(p.warning for p in problems)


def test_a_lying_writer_is_found(step):
    """Documents with the right checksums that say something else than the manifest."""
    raw = json.loads((step / "manifest.json").read_bytes())
    path = raw["params"]["model/exact"]["path"]
    document = (step / path / "zarr.json").read_bytes().replace(b'"shape":[300]', b'"shape":[299]')
    (step / path / "zarr.json").write_bytes(document)
    raw["params"]["model/exact"]["zarr_xxh3"] = digest(document).hex()
    del raw["xxh3_128"]
    body = json.dumps(raw, separators=(",", ":")).encode()[:-1]
    (step / "manifest.json").write_bytes(body + b',"xxh3_128":"' + digest(body).hex().encode() + b'"}\n')
    found = {(p.path, p.kind, p.array) for p in check(step)}
    assert found == {("zarr.json", "metadata", "model/exact"), (f"{path}/zarr.json", "metadata", "model/exact")}


def test_a_replaced_step_is_noticed(step, tmp_path):
    with open_again(step) as checkpoint:
        save(tmp_path / "other").close()
        shutil.copyfile(tmp_path / "other/step-00000001/manifest.json", step / "manifest.json")
        assert "manifest" in {p.kind for p in verify(checkpoint)}


class Unreadable(MemoryStore):
    """Reads that touch byte `at` of `path` fail."""

    path, at = "", -1

    def read_into(self, path, offset, into):
        if path == self.path and offset <= self.at < offset + len(into):
            raise ckptfs.StorageError(f"reading {path}: Input/output error")
        super().read_into(path, offset, into)


def test_bytes_that_cannot_be_read_are_named():
    with save("memory://unreadable") as checkpoint:
        param = checkpoint.param("optim/state/0")
        number = param.extent_count - 1
        bad = Unreadable("unreadable", "step-00000001")
        bad.path, bad.at = param.file(int(param.extents.file[number])), int(param.extents.offset[number])
        (problem,) = verify(ckptfs.Checkpoint(bad, settings=SMALL))
        assert (problem.path, problem.kind, problem.extent) == (bad.path, "unreadable", number)
        assert "Input/output error" in problem.message


class Noting(MemoryStore):
    """Remembers every byte that was read."""

    def __init__(self, *where):
        super().__init__(*where)
        self.seen = {}

    def read_into(self, path, offset, into):
        self.seen.setdefault(path, []).append((offset, offset + len(into)))
        super().read_into(path, offset, into)

    def read(self, path, start=0, stop=None):
        data = super().read(path, start, stop)
        self.seen.setdefault(path, []).append((start, start + len(data)))
        return data


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_every_stored_byte_is_read_once(compression):
    """The slow twin: with no problem to find, the ranges that were read tile every file exactly."""
    with save(f"memory://tiles-{compression}", compression):
        store = Noting(f"tiles-{compression}", "step-00000001")
        with ckptfs.Checkpoint(store, settings=SMALL) as checkpoint:
            store.seen.clear()
            assert verify(checkpoint) == []
    for path, size in store.list():
        at = 0
        for start, stop in sorted(store.seen[path]):
            assert start == at, path
            at = stop
        assert at == size, path


def test_not_a_step(tmp_path):
    with pytest.raises(ckptfs.NotFoundError, match=r"manifest\.json"):
        verify(LocalStore(tmp_path))


def test_kinds_are_listed(step):
    (step / "zarr.json").unlink()
    assert {p.kind for p in check(step)} <= set(KINDS)
