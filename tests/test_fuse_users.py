"""Mounts of users other than root, through fusermount; other users' access; mfusepy where only libfuse 3 exists.

Devices are world-writable on most hosts but not on all: these tests run in a mount namespace of their own, with a
device and an /etc/fuse.conf of their own, and leave nothing behind.
"""

import ctypes.util
import errno
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ckptfs_fuse import Mount, MountOptions, mounts
from fuse_mounting import needs_fuse

pytestmark = [pytest.mark.fuse, needs_fuse]

BACKENDS = pytest.mark.parametrize("backend", ["native", "fusepy"])
LOCAL = "ckptfs.views.nodes:LocalTree"
NOBODY = 65534
# Python may lie where only root may go; being allowed to look there is all that is left of root.
AS_NOBODY = [
    "setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups",
    "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search",
]  # fmt: skip
NEEDS_NAMESPACES = pytest.mark.skipif(
    os.geteuid() != 0
    or not all(map(shutil.which, ("setpriv", "unshare", "fusermount")))
    or subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode != 0,
    reason="needs root, setpriv, unshare and fusermount",
)
MOUNTER = """
import os, sys
from pathlib import Path
from ckptfs.errors import StorageError
from ckptfs_fuse import Mount, MountOptions, mounts
folder, backend, allow_other = sys.argv[1], sys.argv[2], sys.argv[3] == "True"
assert os.geteuid() != 0
try:
    with Mount("ckptfs.views.nodes:LocalTree", {"folder": folder}, backend=backend,
               options=MountOptions(allow_other=allow_other)) as root:
        assert Path(root, "file").read_bytes() == Path(folder, "file").read_bytes()
        log = Path(next(one.log for one in mounts() if one.mountpoint == root)).read_text()
        assert "read_ahead_kb cannot be set" in log and (backend == "fusepy" or "only root may" in log), log
    print("mounted")
except StorageError as error:
    print(error)
"""


@pytest.fixture
def tmp_path():
    """Where other users may go too: pytest's own folders are for root alone."""
    made = Path(tempfile.mkdtemp(prefix="ckptfs-users-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "plain"
    made.mkdir()
    (made / "file").write_bytes(os.urandom(3_000_001))
    return made


def mounted_by_nobody(tmp_path, folder, backend, *, allow_other=False, conf=""):
    device, own = tmp_path / "fuse", tmp_path / "own"
    os.mknod(device, 0o666 | 0o020000, os.stat("/dev/fuse").st_rdev)
    device.chmod(0o666)
    (tmp_path / "fuse.conf").write_text(conf)
    own.mkdir(exist_ok=True)
    os.chown(own, NOBODY, NOBODY)
    script = f'mount --bind {device} /dev/fuse && mount --bind {tmp_path}/fuse.conf /etc/fuse.conf && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", script, "sh", *AS_NOBODY]
    command += [sys.executable, "-c", MOUNTER, str(folder), backend, str(allow_other)]
    here = {"TMPDIR": str(own), "XDG_RUNTIME_DIR": str(own), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | here, check=False)
    return done.stdout + done.stderr


@NEEDS_NAMESPACES
@BACKENDS
def test_a_user_who_is_not_root_mounts_through_fusermount(tmp_path, folder, backend):
    assert mounted_by_nobody(tmp_path, folder, backend) == "mounted\n"


@NEEDS_NAMESPACES
@BACKENDS
def test_allow_other_of_users_needs_the_hosts_consent(tmp_path, folder, backend):
    told = mounted_by_nobody(tmp_path, folder, backend, allow_other=True)
    assert "mounted" not in told.splitlines()
    assert "user_allow_other" in told
    (tmp_path / "fuse").unlink()
    told = mounted_by_nobody(tmp_path, folder, backend, allow_other=True, conf="user_allow_other\n")
    assert told == "mounted\n"


@NEEDS_NAMESPACES
@BACKENDS
@pytest.mark.parametrize("allow_other", [False, True])
def test_other_users_read_what_root_mounted_only_when_told(tmp_path, folder, backend, allow_other):
    at = tmp_path / "mnt"
    at.mkdir()
    with Mount(LOCAL, {"folder": str(folder)}, at, backend=backend, options=MountOptions(allow_other=allow_other)):
        done = subprocess.run([*AS_NOBODY, "cat", at / "file"], capture_output=True, timeout=20, check=False)
    if allow_other:
        assert done.stdout == (folder / "file").read_bytes()
    else:
        assert os.strerror(errno.EACCES).encode() in done.stderr


@pytest.mark.skipif(
    importlib.util.find_spec("mfusepy") is None or ctypes.util.find_library("fuse3") is None,
    reason="needs mfusepy and libfuse 3",
)
@pytest.mark.parametrize("fusepy", ["is not there", "finds libfuse 3"])
def test_mfusepy_serves_where_there_is_only_libfuse_3(tmp_path, folder, monkeypatch, fusepy):
    if fusepy == "is not there":
        hidden = tmp_path / "hidden"
        hidden.mkdir()
        (hidden / "fuse.py").write_text("raise ImportError('no libfuse 2 here')\n")
        monkeypatch.syspath_prepend(str(hidden))  # the server gets the same path
    monkeypatch.setenv("FUSE_LIBRARY_PATH", ctypes.util.find_library("fuse3"))
    with Mount(LOCAL, {"folder": str(folder)}, backend="fusepy") as root:
        pid, log = next((one.pid, one.log) for one in mounts() if one.mountpoint == root)
        assert ("fusepy found libfuse 3" in Path(log).read_text()) == (fusepy == "finds libfuse 3")
        assert "libfuse3.so" in Path(f"/proc/{pid}/maps").read_text()
        assert Path(root, "file").read_bytes() == (folder / "file").read_bytes()
        assert os.listdir(root) == ["file"]
        refused = {
            errno.ENOENT: lambda: os.stat(f"{root}/missing"),
            errno.EROFS: lambda: os.mkdir(f"{root}/new"),
            errno.ENODATA: lambda: os.getxattr(f"{root}/file", "user.none"),
            errno.EOPNOTSUPP: lambda: os.getxattr(f"{root}/file", "security.selinux"),
        }
        for number, call in refused.items():
            with pytest.raises(OSError) as caught:
                call()
            assert caught.value.errno == number
