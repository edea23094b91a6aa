"""The life of a mount: served by a process of its own, announced when usable, unmounted cleanly, cleaned when killed.

Rules:
- The server is always another process than the one that reads: a process that serves a mount and reads from it waits
  for itself. `mount` starts it and returns when the mount answers; nothing is forked after threads exist.
- A small guardian process, forked before anything else, holds a pipe to the server: when the server is killed, the
  guardian takes the dead mount away. Were both killed, the next mount at that path cleans up.
- What is mounted is kept as one JSON file per mount in a folder of the runtime directory, and believed only as far as
  /proc/self/mountinfo agrees.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ckptfs import errors
from ckptfs.errors import CkptError, MismatchError, NotFoundError, StorageError
from ckptfs.views.nodes import Dir
from ckptfs_fuse import fusepy_backend, kernel
from ckptfs_fuse.answers import log
from ckptfs_fuse.ending import STOP_SIGNALS, stop_pipe, wait_for_end
from ckptfs_fuse.lending import READ_BYTES_MAX
from ckptfs_fuse.native import NativeServer
from ckptfs_fuse.options import BACKENDS, MountOptions

READY_TIMEOUT_S = 60.0
END_TIMEOUT_S = 10.0
LOG_TAIL_BYTES = 2000


# --- the server's side -------------------------------------------------------------------------------------------


def serve(
    root: Dir, mountpoint: str, backend: str = "auto", options: MountOptions | None = None, ready_fd: int | None = None
) -> None:
    """Mount `root` and answer until unmounted or a signal says stop. Never in a process that reads the mount."""
    options = options or MountOptions()
    if backend not in BACKENDS:
        raise MismatchError(f"backend {backend!r}: use one of {', '.join(BACKENDS)}")
    path = kernel.prepare(mountpoint, nonempty=options.nonempty)
    guard = _start_guardian(path)

    def announce(chosen: str) -> Callable[[], None]:
        def ready() -> None:
            lost = kernel.raise_readahead(path, options.readahead_kib)
            if lost is not None:
                log.warning("%s", lost)
            log.info("mounted at %s by the %s backend", path, chosen)
            _tell(ready_fd, {"ready": True, "mountpoint": path, "backend": chosen, "pid": os.getpid()})

        return ready

    try:
        if backend == "fusepy" or not _serve_native(root, path, options, announce("native"), must=backend == "native"):
            fusepy_backend.serve(root, path, options, announce("fusepy"))
    finally:
        os.close(guard)  # the guardian looks once more, and ends


def _serve_native(root: Dir, path: str, options: MountOptions, ready: Callable[[], None], *, must: bool) -> bool:
    """False when it could not mount, and another backend may try."""
    with stop_pipe() as stop_fd:
        try:
            fd = kernel.mount(
                path, allow_other=options.allow_other, max_read_bytes=READ_BYTES_MAX, nonempty=options.nonempty
            )
        except CkptError as error:
            if must:
                raise
            log.warning("the native backend can't mount, so fusepy does, without passthrough: %s", error)
            return False
        server = NativeServer(root, fd, options, ready)
        server.start()
        wait_for_end(server, path, stop_fd)
        server.close()
    return True


def _tell(ready_fd: int | None, message: dict[str, Any]) -> None:
    if ready_fd is not None:
        with contextlib.suppress(OSError):  # who started the server has gone; the mount may well go on
            os.write(ready_fd, json.dumps(message).encode() + b"\n")
            os.close(ready_fd)


def _start_guardian(path: str) -> int:
    """Fork the guardian; it ends when the descriptor returned here is closed, by the server or by its death."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    if os.fork() == 0:
        try:
            _guard(path, reading)
        finally:
            os._exit(0)
    os.close(reading)
    return writing


def _guard(path: str, reading: int) -> None:
    os.setsid()  # a signal to the server's process group is not for the guardian
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    os.dup2(reading, 0)
    os.closerange(1, 65536)  # holds no file of anybody, above all not the ready pipe
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 2)
    os.read(0, 1)  # returns when the last writer is gone
    point = kernel.mounted_at(path)
    if point is not None and point.fs_type == kernel.FS_TYPE and kernel.is_dead(path):
        kernel.unmount(path, lazy=True)


def main() -> int:
    """What `python -m ckptfs_fuse` does: a JSON configuration on stdin, readiness on the descriptor it names."""
    config = json.load(sys.stdin)
    logging.basicConfig(level=config.get("log_level", "INFO"), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    ready_fd = config.get("ready_fd")
    try:
        root = build_root(config["builder"], config["arguments"])
        serve(root, config["mountpoint"], config["backend"], MountOptions.from_dict(config["options"]), ready_fd)
    except CkptError as error:
        log.error("%s", error)
        _tell(ready_fd, {"error": error.to_dict()})
        return 1
    return 0


def build_root(builder: str, arguments: dict[str, Any]) -> Dir:
    """Call `module:function` with the arguments; it makes the tree."""
    module, _, name = builder.partition(":")
    root = getattr(importlib.import_module(module), name)(**arguments)
    if not isinstance(root, Dir):
        raise MismatchError(f"{builder} gave a {type(root).__name__}, not a directory of ckptfs.views.nodes")
    return root


# --- the client's side -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mounted:
    """What is known of a mount. `state` is "ok", or "dead" when its server is gone."""

    mountpoint: str
    what: str
    backend: str
    pid: int
    pid_started: int
    user: int
    since: float  # seconds since 1970
    log: str
    state: str = "ok"


def mount(
    builder: str,
    arguments: dict[str, Any],
    mountpoint: str | os.PathLike[str],
    *,
    what: str = "",
    backend: str = "auto",
    options: MountOptions | None = None,
    ready_timeout_s: float = READY_TIMEOUT_S,
) -> Mounted:
    """Start a server for the tree that `builder` ("module:function") makes; returns when the mount is usable."""
    options = options or MountOptions()
    path = kernel.prepare(mountpoint, nonempty=options.nonempty)  # errors early, without starting anything
    log_path = _record_path(path).removesuffix(".json") + ".log"
    reading, writing = os.pipe2(os.O_CLOEXEC)
    config = {
        "builder": builder,
        "arguments": arguments,
        "mountpoint": path,
        "backend": backend,
        "options": options.to_dict(),
        "ready_fd": writing,
    }
    with open(log_path, "wb") as log_file:
        server = subprocess.Popen(
            [sys.executable, "-m", "ckptfs_fuse"],
            stdin=subprocess.PIPE,
            stdout=log_file,
            stderr=log_file,
            pass_fds=[writing],
            cwd="/",
            env=os.environ | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)},
            start_new_session=True,
        )
    os.close(writing)
    try:
        with contextlib.suppress(BrokenPipeError), server.stdin or contextlib.nullcontext() as stdin:
            if stdin is not None:
                stdin.write(json.dumps(config).encode())
        answer = _await_ready(reading, server, log_path, ready_timeout_s)
    finally:
        os.close(reading)
    server.returncode = 0  # not this object's to wait for: it outlives us, and `umount` waits for it by its pid
    mounted = Mounted(
        path,
        what or builder,
        str(answer["backend"]),
        server.pid,
        _started(server.pid),
        os.geteuid(),
        time.time(),
        log_path,
    )
    with open(_record_path(path), "w", encoding="utf-8") as record:
        json.dump(asdict(mounted), record)
    return mounted


def _await_ready(fd: int, server: subprocess.Popen[bytes], log_path: str, timeout_s: float) -> dict[str, Any]:
    if not select.select([fd], [], [], timeout_s)[0]:
        server.terminate()
        raise StorageError(f"the mount's server was not ready after {timeout_s:g} s; its log: {_tail(log_path)}")
    line = os.read(fd, 1 << 16)
    if not line:
        server.wait(END_TIMEOUT_S)
        raise StorageError(f"the mount's server ended before it was ready; its log: {_tail(log_path)}")
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        server.wait(END_TIMEOUT_S)
        raise errors.from_dict(answer["error"])
    return answer


def _tail(path: str) -> str:
    with open(path, "rb") as log_file:
        return log_file.read()[-LOG_TAIL_BYTES:].decode(errors="replace").strip() or "(empty)"


def umount(mountpoint: str | os.PathLike[str], *, lazy: bool = False, timeout_s: float = END_TIMEOUT_S) -> None:
    """Unmount, and wait for the server to end. `lazy`: hide it now; who has files open keeps them, then it ends."""
    path = kernel.resolved(mountpoint)
    point = kernel.mounted_at(path)
    if point is None:
        path = os.path.realpath(path)
        point = kernel.mounted_at(path)
    if point is None or point.fs_type != kernel.FS_TYPE:
        raise NotFoundError(f"no checkpoint is mounted at {path}: `ckptfs mounts` lists what is")
    record = _read_record(_record_path(path))
    try:
        kernel.unmount(path, lazy=lazy)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise StorageError(f"unmounting {path} failed: {error.strerror}") from error
        users = ", ".join(kernel.users_of(path)) or "a process that this user may not see"
        raise StorageError(f"{path} is in use by {users}: end that, or unmount lazily (--lazy)") from None
    if record is not None:
        if not lazy:
            _await_end(record.pid, record.pid_started, timeout_s)
        _remove_record(path)


def _await_end(pid: int, started: int, timeout_s: float) -> None:
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if _started(pid) == started:
            select.select([fd], [], [], timeout_s)
            with contextlib.suppress(ChildProcessError):  # ours to bury only when this process started it
                os.waitpid(pid, os.WNOHANG)
    finally:
        os.close(fd)


def _started(pid: int) -> int:
    """When a process started, in ticks since boot: with it a pid names one process for ever. 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


def mounts() -> list[Mounted]:
    """Every checkpoint mounted here, whoever mounted it; records of mounts that are no more are removed."""
    found = []
    names = sorted(os.listdir(registry_folder()))  # before mountinfo: a mount made in between must not look gone
    records = [_read_record(os.path.join(registry_folder(), name)) for name in names if name.endswith(".json")]
    points = {point.path: point for point in kernel.mount_points() if point.fs_type == kernel.FS_TYPE}
    for record in records:
        if record is None:
            continue
        if points.pop(record.mountpoint, None) is None:
            _remove_record(record.mountpoint)
            continue
        state = "ok" if _started(record.pid) == record.pid_started else "dead"
        found.append(Mounted(**asdict(record) | {"state": state}))
    unknown = [Mounted(path, "?", "?", 0, 0, -1, 0.0, "", "unknown") for path in points]
    return found + unknown


def registry_folder() -> str:
    if os.geteuid() == 0:
        base = "/run"
    else:
        base = os.environ.get("XDG_RUNTIME_DIR") or os.path.join(tempfile.gettempdir(), f"runtime-{os.geteuid()}")
    folder = os.path.join(base, "ckptfs-mounts")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    if os.stat(folder).st_uid != os.geteuid():
        raise StorageError(f"{folder} belongs to another user: remove it, or set XDG_RUNTIME_DIR")
    return folder


def _record_path(mountpoint: str) -> str:
    digest = hashlib.sha256(os.fsencode(mountpoint)).hexdigest()[:16]
    return os.path.join(registry_folder(), f"{digest}.json")


def _read_record(path: str) -> Mounted | None:
    try:
        with open(path, encoding="utf-8") as record:
            return Mounted(**json.load(record))
    except (OSError, ValueError, TypeError):
        return None


def _remove_record(mountpoint: str) -> None:
    path = _record_path(mountpoint)
    for name in (path, path.removesuffix(".json") + ".log"):
        with contextlib.suppress(OSError):
            os.unlink(name)


class Mount:
    """`with Mount(builder, arguments) as folder:` — mounted at `mountpoint`, or at a new temporary folder.

    Files that are still open or mapped at the end stay readable until they are closed; that is warned about.
    """

    def __init__(
        self,
        builder: str,
        arguments: dict[str, Any],
        mountpoint: str | os.PathLike[str] | None = None,
        *,
        what: str = "",
        backend: str = "auto",
        options: MountOptions | None = None,
    ) -> None:
        self._start = (builder, arguments)
        self._mountpoint = mountpoint
        self._how: dict[str, Any] = {"what": what, "backend": backend, "options": options}
        self._temporary: str | None = None
        self.mounted: Mounted | None = None

    def __enter__(self) -> str:
        if self._mountpoint is None:
            self._temporary = tempfile.mkdtemp(prefix="ckptfs-")
        try:
            self.mounted = mount(*self._start, self._mountpoint or self._temporary or "", **self._how)
        except BaseException:
            self._remove_temporary()
            raise
        return self.mounted.mountpoint

    def __exit__(self, *_: object) -> None:
        mounted, self.mounted = self.mounted, None
        if mounted is not None:
            self._unmount(mounted)
        self._remove_temporary()

    @staticmethod
    def _unmount(mounted: Mounted) -> None:
        try:
            umount(mounted.mountpoint)
        except NotFoundError:
            return  # somebody else did it, or the server was killed
        except StorageError as error:
            umount(mounted.mountpoint, lazy=True)
            warnings.warn(f"{error}; unmounted lazily", ResourceWarning, stacklevel=3)

    def _remove_temporary(self) -> None:
        if self._temporary is not None:
            with contextlib.suppress(OSError):
                os.rmdir(self._temporary)
            self._temporary = None
