"""The system calls the local store makes, one method each, so that a test can count them and fail any of them.

Rules: nothing is decided here and nothing is caught; each method is one call and raises OSError as the kernel said.
"""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache
from typing import Any

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2


@cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: Any) -> None:
    function = getattr(_libc(), name, None)
    if function is None:
        raise OSError(errno.ENOSYS, f"this C library has no {name}")
    while function(*arguments) != 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


class FileOps:
    """The real calls. os functions repeat on EINTR by themselves, and so does `_call`."""

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def close(self, fd: int) -> None:
        os.close(fd)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def preadv(self, fd: int, into: memoryview, offset: int) -> int:
        return os.preadv(fd, [into], offset)

    def fallocate(self, fd: int, start: int, nbytes: int) -> None:
        """The plain system call: posix_fallocate may write zeros instead, over what another process just wrote."""
        _call("fallocate", fd, 0, ctypes.c_int64(start), ctypes.c_int64(nbytes))

    def free_bytes(self, fd: int) -> int:
        """What an unprivileged process can still write to the file system of an open file."""
        found = os.fstatvfs(fd)
        return found.f_bavail * found.f_frsize

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def syncfs(self, fd: int) -> None:
        _call("syncfs", fd)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def rename_new(self, source: str, target: str) -> None:
        """EEXIST when the target is there."""
        self._renameat2(source, target, _RENAME_NOREPLACE)

    def exchange(self, one: str, other: str) -> None:
        self._renameat2(one, other, _RENAME_EXCHANGE)

    def link(self, source: str, target: str) -> None:
        os.link(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def mkdir(self, path: str) -> None:
        os.mkdir(path)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def _renameat2(self, source: str, target: str, flags: int) -> None:
        names = os.fsencode(source), os.fsencode(target)
        _call("renameat2", _AT_FDCWD, names[0], _AT_FDCWD, names[1], ctypes.c_uint(flags))


REAL_OPS = FileOps()
