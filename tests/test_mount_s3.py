"""A run in a real S3 server, mounted by both backends; and what readers see when the store is slow or broken."""

import errno
import os
import socket
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

import ckptfs
import view_runs
from ckptfs.storage import open_store
from ckptfs.views import ViewConfig, open_root
from ckptfs_fuse import MountOptions, mounts
from fuse_mounting import needs_fuse

pytestmark = [pytest.mark.fuse, needs_fuse]

BACKENDS = ("native", "fusepy")
STEP = "step-00000001"
TIMEOUT_S = 2.0


class Line:
    """A TCP proxy in front of the store: it passes everything on, holds everything back, or hangs up."""

    def __init__(self, endpoint_url):
        parts = urlsplit(endpoint_url)
        self._target = (parts.hostname, parts.port)
        self._flows = threading.Event()
        self._is_cut = False
        self._sockets = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        self.flow()
        threading.Thread(target=self._accept, daemon=True).start()

    def flow(self):
        self._is_cut = False
        self._flows.set()

    def hold(self):
        self._flows.clear()

    def cut(self):
        """Connections end, new ones too."""
        self._is_cut = True
        self._hang_up()

    def _hang_up(self):
        sockets, self._sockets = self._sockets, []
        for one in sockets:
            with_errors_ignored(one.shutdown, socket.SHUT_RDWR)  # the other side may have hung up before

    def _accept(self):
        while True:
            try:
                here, _ = self._server.accept()
            except OSError:
                return
            if self._is_cut:
                here.close()
                continue
            try:
                there = socket.create_connection(self._target)
            except OSError:
                here.close()
                continue
            self._sockets += [here, there]
            if self._is_cut:  # in the moment since it was asked
                self._hang_up()
            for pair in ((here, there), (there, here)):
                threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source, target):
        try:
            while data := source.recv(1 << 16):
                self._flows.wait()
                target.sendall(data)
        except OSError:
            pass
        for one in (source, target):
            with_errors_ignored(one.shutdown, socket.SHUT_RDWR)

    def close(self):
        self.flow()
        with_errors_ignored(self._server.shutdown, socket.SHUT_RDWR)  # or the thread that accepts goes on
        self._server.close()
        for one in self._sockets:
            with_errors_ignored(one.close)


def with_errors_ignored(call, *args):
    try:
        call(*args)
    except OSError:
        pass


@pytest.fixture
def line(s3_server):
    made = Line(s3_server.endpoint_url)
    yield made
    made.close()


@pytest.fixture(scope="module")
def run(s3_server):
    """Two steps in the store: stored plainly, and compressed. (url, options, arrays by step)"""
    url, options = f"{s3_server.fresh_url()}/exp/run7", s3_server.options
    store = open_store(url, **options)
    found = {1: view_runs.save(store), 2: view_runs.save(store, 2, seed=2, compression="zstd")}
    return url, options, found


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    url, options, _ = run
    root = open_root(ViewConfig(url=url, storage=options, linger_s=0.0))
    return view_runs.export(root, str(tmp_path_factory.mktemp("s3") / "tree"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_file_of_a_run_in_s3_is_read_equal(run, exported, backend):
    """Against the same tree without a mount, and against the arrays that were saved."""
    from safetensors.torch import load_file

    url, options, found = run
    with ckptfs.Run(url, **options).mount(backend=backend, storage=options) as folder:
        names = [os.path.relpath(os.path.join(at, n), exported) for at, _, ns in os.walk(exported) for n in ns]
        names = [name for name in names if ".ckptfs" not in name.split("/")]
        assert len(names) > 100
        for name in names:
            assert Path(folder, name).read_bytes() == Path(exported, name).read_bytes(), name
        for step, arrays in found.items():
            for name in ("model/embed", "model/layers.1.attn.weight"):
                shown = np.load(f"{folder}/step-{step:08d}/params/{name}.npy", mmap_mode="r")
                assert shown.tobytes() == arrays[name].tobytes()
            loaded = load_file(f"{folder}/step-{step:08d}/hf/model.safetensors")["layers.0.attn.weight"]
            assert loaded.numpy().tobytes() == arrays["model/layers.0.attn.weight"].tobytes()
            with ckptfs.open(f"{folder}/step-{step:08d}/zarr") as copied:
                assert (copied["model/embed"].numpy() == arrays["model/embed"]).all()


def outcome(path):
    began = time.monotonic()
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        return error.errno, time.monotonic() - began
    return data, time.monotonic() - began


def until_read(path, wanted):
    """The store answers: in time for the mount's short deadline, if not at once."""
    deadline = time.monotonic() + 60
    while (data := outcome(path)[0]) != wanted:
        assert data == errno.EIO
        assert time.monotonic() < deadline, "the store is there, its bytes are not"


@pytest.mark.parametrize(("backend", "trouble"), [("native", "hold"), ("fusepy", "cut")])
def test_a_store_that_does_not_answer_is_eio_in_time(run, line, backend, trouble):
    """What was read before goes on being read; the rest is EIO within the deadline, and is there when the store is."""
    url, options, found = run
    through = options | {"endpoint_url": line.url}
    limits = MountOptions(read_timeout_s=TIMEOUT_S)
    how = {"storage": through, "read_timeout_s": TIMEOUT_S, "refresh_s": 3600.0, "options": limits, "step": 1}
    with ckptfs.Run(url, **through).mount(backend=backend, **how) as folder:
        known, unknown = f"{folder}/raw/model/layers.0.attn.weight", f"{folder}/raw/model/layers.1.attn.weight"
        wanted = [found[1][f"model/layers.{i}.attn.weight"].tobytes() for i in (0, 1)]
        until_read(known, wanted[0])  # what comes first is slow: connections, imports
        size = os.path.getsize(unknown)
        getattr(line, trouble)()
        try:
            for _ in range(2):
                number, took_s = outcome(unknown)
                assert number == errno.EIO
                assert took_s < 3 * TIMEOUT_S + 20  # the opening has a deadline, and each of two reads
            assert os.path.getsize(unknown) == size == len(wanted[1])
            assert "model" in os.listdir(f"{folder}/raw")
        finally:
            line.flow()
        log = Path(next(one.log for one in mounts() if one.mountpoint == folder)).read_text()
        assert "layers.1.attn.weight" in log
        until_read(unknown, wanted[1])
