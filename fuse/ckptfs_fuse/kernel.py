"""The system calls of mounting: mount, unmount, what is mounted, the kernel's readahead.

Rules: nothing here touches a path below a mount (that would call the server, which may be the caller): what is mounted
is read from /proc/self/mountinfo. As root the calls are made directly; other users go through the setuid fusermount.
"""

from __future__ import annotations

import array
import ctypes
import errno
import os
import re
import shutil
import socket
import subprocess
from dataclasses import dataclass

from ckptfs.errors import ExistsError, MismatchError, NotFoundError, StorageError

FS_TYPE = "fuse.ckptfs"
DEV_FUSE = "/dev/fuse"
INSTALL_HINT = "install it with `apt-get install fuse3` or `dnf install fuse3`"

_MS_RDONLY, _MS_NOSUID, _MS_NODEV = 1, 2, 4
_MNT_DETACH = 2
_UMOUNT_NOFOLLOW = 8


@dataclass(frozen=True, slots=True)
class MountPoint:
    """One line of mountinfo."""

    path: str
    device: str  # MAJOR:MINOR
    fs_type: str
    source: str


def mount_points() -> list[MountPoint]:
    """Everything mounted here, the topmost mount of a path last."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        return [_parse(line) for line in lines]


def _parse(line: str) -> MountPoint:
    before, _, after = line.rstrip("\n").partition(" - ")
    fields, (fs_type, source, *_rest) = before.split(" "), after.split(" ")
    return MountPoint(_unescape(fields[4]), fields[2], fs_type, _unescape(source))


def _unescape(text: str) -> str:
    raw = re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m[1], 8)]), text.encode(errors="surrogateescape"))
    return raw.decode(errors="surrogateescape")


def mounted_at(path: str) -> MountPoint | None:
    """The topmost mount at that path."""
    return next((point for point in reversed(mount_points()) if point.path == path), None)


def resolved(path: str | os.PathLike[str]) -> str:
    """An absolute path without links above its last part. The last part itself is not looked at: it may be dead."""
    folder, name = os.path.split(os.path.abspath(os.fspath(path)))
    return os.path.join(os.path.realpath(folder), name)


# --- mounting ------------------------------------------------------------------------------------------------------


def open_device() -> int:
    try:
        return os.open(DEV_FUSE, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        raise StorageError(
            f"{DEV_FUSE} does not exist: `modprobe fuse`, or give the container --device {DEV_FUSE}"
        ) from None
    except OSError as error:
        raise StorageError(f"{DEV_FUSE} cannot be opened: {error.strerror}; check its permissions") from error


def mount(mountpoint: str, *, allow_other: bool, max_read_bytes: int, nonempty: bool) -> int:
    """Mount, and give back the descriptor the kernel's requests come from."""
    options = ["default_permissions", f"max_read={max_read_bytes}"]
    options += ["allow_other"] if allow_other else []
    if os.geteuid() == 0:
        fd = open_device()
        try:
            mode = os.stat(mountpoint).st_mode
            data = ",".join([f"fd={fd}", f"rootmode={mode & 0o170000:o}", "user_id=0", "group_id=0", *options])
            _mount_call(mountpoint, data)
        except BaseException:
            os.close(fd)
            raise
        return fd
    return _mount_by_helper(
        mountpoint, ["ro", "nosuid", "nodev", "fsname=ckptfs", "subtype=ckptfs", *options], nonempty
    )


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _mount_call(mountpoint: str, data: str) -> None:
    flags = _MS_RDONLY | _MS_NOSUID | _MS_NODEV
    target = os.fsencode(mountpoint)
    if _libc().mount(b"ckptfs", target, FS_TYPE.encode(), ctypes.c_ulong(flags), data.encode()) != 0:
        number = ctypes.get_errno()
        raise StorageError(f"mounting at {mountpoint} failed: {os.strerror(number)}{_mount_hint(number)}")


def _mount_hint(number: int) -> str:
    if number == errno.EPERM:
        return "; in a container this needs --cap-add SYS_ADMIN"
    if number == errno.ENODEV:
        return "; the kernel has no FUSE: `modprobe fuse`"
    return ""


def _helper() -> str:
    found = shutil.which("fusermount3") or shutil.which("fusermount")
    if found is None:
        raise StorageError(f"fusermount3 is not installed, and only root mounts without it: {INSTALL_HINT}")
    return found


def _mount_by_helper(mountpoint: str, options: list[str], nonempty: bool) -> int:
    helper = _helper()
    if nonempty and helper.endswith("fusermount"):
        options = [*options, "nonempty"]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours:
        with theirs:
            result = subprocess.run(
                [helper, "-o", ",".join(options), "--", mountpoint],
                env=os.environ | {"_FUSE_COMMFD": str(theirs.fileno())},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
            )
        if result.returncode != 0:
            raise StorageError(f"mounting at {mountpoint} failed: {result.stderr.strip()}")
        descriptors = array.array("i")
        for level, kind, data in ours.recvmsg(1, socket.CMSG_LEN(descriptors.itemsize))[1]:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(data[: descriptors.itemsize])
    if not descriptors:
        raise StorageError(f"{helper} gave no descriptor for {mountpoint}")
    os.set_inheritable(descriptors[0], False)
    return descriptors[0]


# --- unmounting ----------------------------------------------------------------------------------------------------


def unmount(mountpoint: str, *, lazy: bool = False) -> None:
    """Take the topmost mount away. Busy is an OSError with EBUSY; `lazy` hides it now, and it ends when unused."""
    if os.geteuid() == 0:
        flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0)
        if _libc().umount2(os.fsencode(mountpoint), flags) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), mountpoint)
        return
    command = [_helper(), "-u", *(["-z"] if lazy else []), "--", mountpoint]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        is_busy = "busy" in result.stderr.lower()
        raise OSError(errno.EBUSY if is_busy else errno.EPERM, result.stderr.strip() or "fusermount failed", mountpoint)


def is_dead(mountpoint: str) -> bool:
    """Whether there is a mount whose server is gone. One that is alive but stuck makes this call wait for it."""
    try:
        os.statvfs(mountpoint)  # unlike stat, never answered from the kernel's cache
    except OSError as error:
        return error.errno in {errno.ENOTCONN, errno.ECONNABORTED}  # the latter: it died while it was asked
    return False


def prepare(mountpoint: str | os.PathLike[str], *, nonempty: bool) -> str:
    """The path to mount at, usable: a dead mount of ours is cleaned away; anything else in the way is an error."""
    path = resolved(mountpoint)
    found = mounted_at(path)
    if found is not None and is_dead(path):
        if found.fs_type != FS_TYPE:
            raise ExistsError(f"{path} is a dead mount of {found.fs_type}: `umount -l {path}` first")
        unmount(path, lazy=True)
        return prepare(path, nonempty=nonempty)
    if found is not None and found.fs_type == FS_TYPE:
        raise ExistsError(f"{path} has a checkpoint mounted already: `ckptfs umount {path}` first")
    if not os.path.lexists(path):
        raise NotFoundError(f"{path} does not exist: `mkdir -p {path}` first")
    path = os.path.realpath(path)
    if not os.path.isdir(path):
        raise MismatchError(f"{path} is not a directory: name an empty directory to mount at")
    if not nonempty and os.listdir(path):
        raise ExistsError(f"{path} is not empty and would be hidden: use another directory, or nonempty=True")
    return path


def users_of(mountpoint: str) -> list[str]:
    """Processes with something open below the mount, as "pid 12 (python)"; those that we may look at."""
    pids = filter(str.isdigit, os.listdir("/proc"))
    return [f"pid {pid} ({_command(pid)})" for pid in pids if _uses(f"/proc/{pid}", mountpoint)]


def _uses(process: str, mountpoint: str) -> bool:
    inside = mountpoint.rstrip("/") + "/"
    try:
        links = [f"{process}/cwd", f"{process}/root", *(entry.path for entry in os.scandir(f"{process}/fd"))]
        for link in links:
            try:
                target = os.readlink(link)
            except OSError:
                continue
            if target == mountpoint or target.startswith(inside):
                return True
        with open(f"{process}/maps", "rb") as maps:
            return b" " + os.fsencode(inside) in maps.read()
    except OSError:
        return False


def _command(pid: str) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as comm:
            return comm.read().strip()
    except OSError:
        return "?"


# --- readahead -----------------------------------------------------------------------------------------------------


def raise_readahead(mountpoint: str, kib: int) -> str | None:
    """Set the mount's readahead. None when that worked, else one sentence about what is lost."""
    point = mounted_at(mountpoint)
    if point is None:
        return f"readahead stays small: {mountpoint} is not in /proc/self/mountinfo"
    path = f"/sys/class/bdi/{point.device}/read_ahead_kb"
    try:
        with open(path, "w", encoding="ascii") as setting:
            setting.write(str(kib))
    except OSError as error:
        return (
            f"{path} cannot be set to {kib} ({error.strerror}): first reads, mapped ones above all, are 1.5 to 5 times "
            f"slower than they could be; as root: echo {kib} > {path}"
        )
    return None
