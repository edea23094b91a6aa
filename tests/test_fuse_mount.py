"""The life of a mount and its hard cases: slow, corrupt and failing files, killed servers, busy mounts, refused writes."""

import contextlib
import errno
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import pytest

import ckptfs_fuse
from ckptfs import errors
from ckptfs.storage.directio import cached_pages
from ckptfs_fuse import Mount, MountOptions, fusepy_backend, kernel, mount, mounts, umount
from ckptfs_fuse.server import _await_end
from fuse_mounting import needs_fuse

pytestmark = [pytest.mark.fuse, needs_fuse]

LOCAL = "ckptfs.views.nodes:LocalTree"
BACKENDS = pytest.mark.parametrize("backend", ["native", "fusepy"])
WAIT_S = 60
SERVED = MountOptions(passthrough=False)


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # so that every mount of this test lies below it
    fds = set(os.listdir("/proc/self/fd"))
    yield
    assert [point for point in kernel.mount_points() if point.path.startswith(f"{tmp_path}/")] == []
    assert len(os.listdir("/proc/self/fd")) <= len(fds)


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "plain"
    (root / "sub").mkdir(parents=True)
    (root / "file").write_bytes(bytes(range(256)) * 4096)
    (root / "sub" / "small").write_bytes(b"small")
    return root


@pytest.fixture
def at(tmp_path):
    path = tmp_path / "mnt"
    path.mkdir()
    return path


@pytest.fixture
def trouble(tmp_path):
    data, pipe = tmp_path / "data", tmp_path / "pipe"
    data.write_bytes(os.urandom(300_000))
    os.mkfifo(pipe)
    return {"pipe": str(pipe), "data": str(data)}


def start(path):
    """A process that reads a file, prints what became of it, and can be waited for."""
    code = (
        "import sys\n"
        "try: print(len(open(sys.argv[1], 'rb').read()))\n"
        "except OSError as error: print('errno', error.errno)\n"
    )
    command = [sys.executable, "-S", "-c", code, str(path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def let_go(process, pipe):
    """Until it has ended: a read that came late has opened the pipe late."""
    deadline = time.monotonic() + WAIT_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # ENXIO: nobody waits at this moment
            os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)


def wait_until_unmounted(path):
    """mountinfo says by itself when it changes."""
    deadline = time.monotonic() + WAIT_S
    with open("/proc/self/mountinfo", "rb") as info:
        poll = select.poll()
        poll.register(info, select.POLLERR | select.POLLPRI)
        while kernel.mounted_at(str(path)) is not None:
            assert time.monotonic() < deadline, f"{path} is still mounted"
            poll.poll(1000)


def copies_of(pid):
    """The sizes of the copies of hot files that a server has."""
    sizes = []
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            if "ckptfs-materialised" in os.readlink(f"/proc/{pid}/fd/{number}"):
                sizes.append(os.stat(f"/proc/{pid}/fd/{number}").st_size)
    return sizes


def log_of(path):
    return Path(next(found.log for found in mounts() if found.mountpoint == str(path))).read_text()


# --- what it refuses ---------------------------------------------------------------------------------------------


@BACKENDS
def test_everything_that_writes_is_erofs(folder, backend):
    with Mount(LOCAL, {"folder": str(folder)}, backend=backend) as root:
        file, sub = f"{root}/file", f"{root}/sub"
        writes = {
            "open w": lambda: os.open(file, os.O_WRONLY),
            "open r+": lambda: os.open(file, os.O_RDWR),
            "create": lambda: os.open(f"{root}/new", os.O_CREAT | os.O_WRONLY),
            "truncate": lambda: os.truncate(file, 1),
            "mkdir": lambda: os.mkdir(f"{root}/new"),
            "rmdir": lambda: os.rmdir(sub),
            "unlink": lambda: os.unlink(file),
            "rename": lambda: os.rename(file, f"{root}/new"),
            "link": lambda: os.link(file, f"{root}/new"),
            "symlink": lambda: os.symlink("x", f"{root}/new"),
            "mkfifo": lambda: os.mkfifo(f"{root}/new"),
            "chmod": lambda: os.chmod(file, 0o777),
            "chown": lambda: os.chown(file, 1, 1),
            "utime": lambda: os.utime(file),
            "setxattr": lambda: os.setxattr(file, "user.x", b"1"),
            "removexattr": lambda: os.removexattr(file, "user.x"),
        }
        got = {}
        for name, write in writes.items():
            with pytest.raises(OSError) as caught:
                write()
            got[name] = errno.errorcode[caught.value.errno]
        assert got == dict.fromkeys(writes, "EROFS")
    assert (folder / "file").stat().st_size == 1 << 20


def test_where_it_can_not_mount_it_says_why(folder, at, tmp_path):
    (at / "full").touch()
    for place, kind, text in [
        (tmp_path / "nowhere", errors.NotFoundError, "mkdir -p"),
        (folder / "file", errors.MismatchError, "not a directory"),
        (at, errors.ExistsError, "not empty"),
    ]:
        with pytest.raises(kind, match=text):
            mount(LOCAL, {"folder": str(folder)}, place)
    with Mount(LOCAL, {"folder": str(folder)}, at, options=MountOptions(nonempty=True)):
        assert sorted(os.listdir(at)) == ["file", "sub"]
        with pytest.raises(errors.ExistsError, match="mounted already"):
            mount(LOCAL, {"folder": str(folder)}, at)
    assert os.listdir(at) == ["full"]
    with pytest.raises(errors.NotFoundError, match="no checkpoint is mounted"):
        umount(at)


def test_an_error_of_the_tree_reaches_who_mounts(at, tmp_path):
    with pytest.raises(errors.NotFoundError, match="absent"):
        mount(LOCAL, {"folder": str(tmp_path / "absent")}, at)
    with pytest.raises(errors.StorageError, match="no_such_builder"):
        mount("fuse_trees:no_such_builder", {}, at)
    assert str(at) not in {found.mountpoint for found in mounts()}


def test_options_that_make_no_sense_are_refused():
    for wrong in ({"request_threads": 0}, {"read_timeout_s": 0.0}):
        with pytest.raises(errors.MismatchError):
            MountOptions(**wrong)
    with pytest.raises(errors.MismatchError, match="unknown"):
        MountOptions.from_dict({"speed": 11})
    assert MountOptions.from_dict(json.loads(json.dumps(MountOptions().to_dict()))) == MountOptions()


def test_without_a_library_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(fusepy_backend, "_import", lambda _name: None)
    with pytest.raises(errors.StorageError, match="apt-get install"):
        fusepy_backend.load_library()


def test_fusepy_on_libfuse_3_is_refused(monkeypatch, caplog):
    import fuse

    class Libfuse3:
        @staticmethod
        def fuse_version():
            return 314

    monkeypatch.setattr(fuse, "_libfuse", Libfuse3)
    assert fusepy_backend._import("fuse") is None
    assert "libfuse 3" in caplog.text


# --- hard cases of reading ---------------------------------------------------------------------------------------


@BACKENDS
def test_one_slow_file_does_not_stall_others(trouble, backend):
    with Mount("fuse_trees:troubled", trouble, backend=backend) as root:
        slow = [start(f"{root}/slow") for _ in range(3)]
        gate = os.open(trouble["pipe"], os.O_WRONLY)  # returns when a reader waits: the slow reads are under way
        try:
            expected = Path(trouble["data"]).read_bytes()
            for _ in range(20):
                assert Path(root, "good").read_bytes() == b"head" + expected
                assert Path(root, "computed").read_bytes() == expected[:5]
                assert "slow" in os.listdir(root)
            assert all(process.poll() is None for process in slow)
        finally:
            os.close(gate)
            for process in slow:
                let_go(process, trouble["pipe"])
        assert [process.communicate(timeout=WAIT_S)[0] for process in slow] == ["8192\n"] * 3


@BACKENDS
def test_a_read_that_hangs_becomes_eio_in_time(trouble, backend):
    options = MountOptions(read_timeout_s=2.0, slow_threads=1)  # far longer than the good read below takes
    with Mount("fuse_trees:troubled", trouble, backend=backend, options=options) as root:
        slow = [start(f"{root}/slow") for _ in range(2)]
        for process in slow:
            assert process.communicate(timeout=WAIT_S)[0] == f"errno {errno.EIO}\n"
        assert Path(root, "computed").read_bytes() == Path(trouble["data"]).read_bytes()[:5]  # the worker was replaced
        assert "took more than 2 s" in log_of(root)
        assert "/slow" in log_of(root)


def test_an_interrupted_slow_read_ends_at_once(trouble):
    with Mount("fuse_trees:troubled", trouble, backend="native") as root:
        slow = start(f"{root}/slow")
        gate = os.open(trouble["pipe"], os.O_WRONLY)
        slow.kill()
        slow.communicate(timeout=WAIT_S)
        os.close(gate)


@BACKENDS
def test_corrupt_and_failing_files_are_eio_and_named_in_the_log(trouble, backend):
    with Mount("fuse_trees:troubled", trouble, backend=backend) as root:
        with open(f"{root}/corrupt", "rb", buffering=0) as file, pytest.raises(OSError) as caught:
            file.read()
        assert caught.value.errno == errno.EIO
        with pytest.raises(OSError) as caught:
            Path(root, "failing").read_bytes()
        assert caught.value.errno == errno.EIO
        with pytest.raises(OSError) as caught:
            os.open(f"{root}/gone", os.O_RDONLY)
        assert caught.value.errno == errno.ESTALE
        log = log_of(root)
        assert f"/corrupt: CorruptError: {trouble['data']}: extent 7" in log
        assert "/failing: unforeseen ZeroDivisionError" in log
        assert ".gone is gone" in log
        assert Path(root, "small").read_bytes() == b"hello"  # and it goes on


@BACKENDS
def test_a_file_that_is_truncated_while_it_is_open_is_eio(tmp_path, folder, backend):
    """The native backend sends pages of the file itself: those that are gone must not become zeros."""
    (folder / "file").write_bytes(bytes(range(1, 256)) * 40_000)
    with Mount("fuse_trees:segmented", {"folder": str(folder)}, backend=backend) as root:
        with open(f"{root}/file", "rb", buffering=0) as file:
            assert os.pread(file.fileno(), 10, 0) == bytes(range(1, 11))
            os.truncate(folder / "file", 5_000_000)
            with pytest.raises(OSError) as caught:
                os.pread(file.fileno(), 100, 9_000_000)
        assert caught.value.errno == errno.EIO
        assert "it was truncated" in log_of(root)


@BACKENDS
def test_extended_attributes(trouble, backend):
    with Mount("fuse_trees:troubled", trouble, backend=backend) as root:
        assert sorted(os.listxattr(f"{root}/whole")) == ["user.ckptfs.dtype", "user.ckptfs.shape"]
        assert os.getxattr(f"{root}/whole", "user.ckptfs.dtype") == b"bfloat16"
        assert os.listxattr(f"{root}/small") == []
        with pytest.raises(OSError) as caught:
            os.getxattr(f"{root}/whole", "user.other")
        assert caught.value.errno == errno.ENODATA


@BACKENDS
def test_new_content_is_seen_and_an_open_file_keeps_its_own(folder, backend):
    with Mount(LOCAL, {"folder": str(folder), "refresh_s": 0.0}, backend=backend) as root:
        for round_number in range(5):
            with open(f"{root}/file", "rb") as before:
                first = before.read(10)
                content = b"%d" % round_number * 100_000
                (folder / "next").write_bytes(content)
                os.replace(folder / "next", folder / "file")
                (folder / f"step-{round_number}").mkdir()
                assert Path(root, "file").read_bytes() == content
                before.seek(0)
                assert before.read(10) == first
            assert f"step-{round_number}" in os.listdir(root)
        os.unlink(folder / "file")
        assert not os.path.exists(f"{root}/file")


@pytest.mark.serial
@BACKENDS
def test_ten_thousand_files_list(backend):
    """How quickly is measured by tools/bench; here a listing only must not take a request a byte."""
    with Mount("fuse_trees:many", {"count": 10_000}, backend=backend) as root:
        for command in (["ls", "-l", f"{root}/many"], ["find", root, "-size", "-2"]):
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True, timeout=WAIT_S)
            listed = subprocess.run(command, capture_output=True, check=True, timeout=WAIT_S).stdout
            assert len(listed.splitlines()) >= 10_000
        assert Path(root, "many", "layer.07777.weight.npy").read_bytes() == b"7777"


# --- life cycle --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may raise it")
@BACKENDS
def test_the_readahead_is_raised_for_good(folder, backend):
    """The kernel sets it back when it has the answer to its first request."""
    with Mount(LOCAL, {"folder": str(folder)}, backend=backend, options=MountOptions(readahead_kib=512)) as root:
        assert Path(root, "file").read_bytes() == (folder / "file").read_bytes()
        device = kernel.mounted_at(root).device
        assert Path(f"/sys/class/bdi/{device}/read_ahead_kb").read_text() == "512\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may raise the readahead")
@BACKENDS
def test_what_is_read_around_a_fault_is_not_in_memory_twice(folder, backend):
    """On a busy machine a part of it may be: then another file is tried. Through the page cache, all of it always is."""
    size, at, twice = 24 << 20, 12 << 20, []
    names = [f"large{number}" for number in range(8)]
    with Mount(LOCAL, {"folder": str(folder)}, backend=backend, options=SERVED) as root:
        for name in names:
            (folder / name).write_bytes(os.urandom(size))
            twice.append(_held_twice(folder / name, f"{root}/{name}", size, at))
            if twice[-1] < 1 << 20:
                return
    raise AssertionError(f"bytes in the page cache of what is shown, file by file: {twice}")


def _held_twice(stored, shown_path, size, at):
    """Bytes of the stored file that are in the page cache after a fault in the shown one."""
    import mmap

    with open(stored, "rb") as file:
        if cached_pages(file.fileno(), 0, size) != size // mmap.PAGESIZE:
            pytest.skip("this kernel does not say what is cached")
        for _ in range(1000):  # on a busy disk some pages are still being written
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if not (before := cached_pages(file.fileno(), 0, size)):
                break
        assert before == 0
        try:
            os.close(os.open(stored, os.O_RDONLY | os.O_DIRECT))
        except OSError:
            pytest.skip("this file system refuses direct requests")
        with open(shown_path, "rb") as shown, mmap.mmap(shown.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            found = mapped[at]
            assert cached_pages(shown.fileno(), 0, size) * mmap.PAGESIZE >= 2 << 20  # it did read around it
            twice = cached_pages(file.fileno(), 0, size) * mmap.PAGESIZE
        assert found == os.pread(file.fileno(), 1, at)[0]
        return twice


@BACKENDS
def test_the_process_that_mounts_can_read_and_map_it(folder, backend):
    import mmap

    with Mount(LOCAL, {"folder": str(folder)}, backend=backend, what="plain") as root:
        found = next(entry for entry in mounts() if entry.mountpoint == root)
        assert found.pid != os.getpid()
        assert (found.what, found.backend, found.state, found.user) == ("plain", backend, "ok", os.geteuid())
        assert abs(found.since - time.time()) < WAIT_S
        with open(f"{root}/file", "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            assert mapped[:] == (folder / "file").read_bytes()
    assert not os.path.exists(root)


@BACKENDS
def test_a_busy_mount_is_not_taken_away_unless_lazily(folder, at, backend):
    mounted = mount(LOCAL, {"folder": str(folder)}, at, backend=backend)
    with open(at / "file", "rb") as held:
        with pytest.raises(errors.StorageError, match=rf"in use by .*pid {os.getpid()} .*--lazy"):
            umount(at)
        assert (at / "file").exists()
        umount(at, lazy=True)
        assert os.listdir(at) == []
        assert held.read() == (folder / "file").read_bytes()
    _await_end(mounted.pid, mounted.pid_started, WAIT_S)


def test_leaving_a_busy_context_warns_and_keeps_what_is_open(folder):
    with contextlib.ExitStack() as stack:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with Mount(LOCAL, {"folder": str(folder)}) as root:
                held = stack.enter_context(open(f"{root}/sub/small", "rb"))
        assert any("in use" in str(warning.message) for warning in caught)
        assert held.read() == b"small"


@BACKENDS
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_unmounts_cleanly(folder, at, backend, number):
    mounted = mount(LOCAL, {"folder": str(folder)}, at, backend=backend)
    os.kill(mounted.pid, number)
    wait_until_unmounted(at)
    _await_end(mounted.pid, mounted.pid_started, WAIT_S)
    assert mounted.mountpoint not in {found.mountpoint for found in mounts()}


@BACKENDS
def test_a_killed_server_is_cleaned_up_by_its_guardian(folder, at, backend):
    mounted = mount(LOCAL, {"folder": str(folder)}, at, backend=backend)
    held = os.open(at / "sub" / "small", os.O_RDONLY)
    os.kill(mounted.pid, signal.SIGKILL)
    wait_until_unmounted(at)
    if backend == "fusepy":  # a passed-through file lives on without its server
        with pytest.raises(OSError) as caught:
            os.read(held, 5)
        assert caught.value.errno in {errno.ENOTCONN, errno.ECONNABORTED}
    with contextlib.suppress(OSError):  # closing asks the dead server, too
        os.close(held)
    _await_end(mounted.pid, mounted.pid_started, WAIT_S)
    assert os.listdir(at) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may pass files through")
@pytest.mark.parametrize("place", ["memory", "folder"])
def test_a_copy_that_is_open_outlives_a_killed_server_and_nothing_else_does(folder, at, tmp_path, place):
    copies = tmp_path / "copies"
    copies.mkdir()
    where = str(copies) if place == "folder" else None
    options = MountOptions(materialise_bytes=1 << 24, materialise_after_opens=1, materialise_folder=where)
    expected = (folder / "file").read_bytes()
    mounted = mount("fuse_trees:segmented", {"folder": str(folder)}, at, backend="native", options=options)
    deadline = time.monotonic() + WAIT_S
    while copies_of(mounted.pid) != [len(expected)]:
        assert (at / "file").read_bytes() == expected
        assert time.monotonic() < deadline, "it was not copied"
    held = start(at / "file")
    held.communicate(timeout=WAIT_S)  # its handle is let go of: the next one is passed through
    with open(at / "file", "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.kill(mounted.pid, signal.SIGKILL)
        wait_until_unmounted(at)
        _await_end(mounted.pid, mounted.pid_started, WAIT_S)
        assert file.read() == expected  # no server has it any more: the kernel reads the copy
    assert os.listdir(copies) == os.listdir(at) == []


@BACKENDS
def test_the_next_mount_cleans_up_after_both_were_killed(folder, at, backend):
    mounted = mount(LOCAL, {"folder": str(folder)}, at, backend=backend)
    readers = [start(at / "file") for _ in range(4)]
    children = Path(f"/proc/{mounted.pid}/task/{mounted.pid}/children").read_text().split()
    for pid in [*map(int, children), mounted.pid]:
        os.kill(pid, signal.SIGKILL)
    _await_end(mounted.pid, mounted.pid_started, WAIT_S)
    for reader in readers:
        reader.communicate(timeout=WAIT_S)  # an error or everything, but no hang
    assert kernel.is_dead(str(at))
    assert next(found.state for found in mounts() if found.mountpoint == str(at)) == "dead"
    with Mount(LOCAL, {"folder": str(folder)}, at, backend=backend):
        assert (at / "file").read_bytes() == (folder / "file").read_bytes()


@BACKENDS
def test_the_server_leaks_no_files(trouble, folder, backend):
    with Mount("fuse_trees:segmented", {"folder": str(folder)}, backend=backend) as root:

        def read_everything():
            for _ in range(20):
                (Path(root, "file").read_bytes(), Path(root, "sub/small").read_bytes(), os.listdir(f"{root}/sub"))

        pid = next(found.pid for found in mounts() if found.mountpoint == root)
        read_everything()
        subprocess.run(["sync", "-f", root], check=False)
        before = len(os.listdir(f"/proc/{pid}/fd"))
        read_everything()
        deadline = time.monotonic() + WAIT_S
        while len(os.listdir(f"/proc/{pid}/fd")) > before + 1:  # RELEASE comes a little after close
            assert time.monotonic() < deadline, "files stay open"
            subprocess.run(["sync", "-f", root], check=False)


def test_the_server_imports_no_torch(folder):
    with Mount(LOCAL, {"folder": str(folder)}) as root:
        pid = next(found.pid for found in mounts() if found.mountpoint == root)
        assert "torch" not in Path(f"/proc/{pid}/maps").read_text()


def test_the_public_names_are_there():
    assert all(hasattr(ckptfs_fuse, name) for name in ckptfs_fuse.__all__)
