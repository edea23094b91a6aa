"""Answering READ on the kernel's own channel, for both backends: the bytes are sent from where they lie.

Rules:
- What the page cache has all of goes through a pipe, as references to its pages (splice): the processor touches the
  bytes once, and nobody's page tables are filled for it. Otherwise one writev from what was read ahead, or from the
  file, mapped. What only a reader can make is read into the caller's buffer, and sent with one write.
- A pipe holds pages by number, so the kernel may not ask for more than `READ_BYTES_MAX` at once: with more, a reply
  would not fit into the largest pipe that everybody may have. What does not fit nevertheless goes the other way.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import weakref
from typing import TYPE_CHECKING

from ckptfs.errors import StorageError
from ckptfs_fuse import wire

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptfs.views.nodes import Stretch
    from ckptfs_fuse.table import Handle

READ_BYTES_MAX = 512 << 10  # with `SPLICED_MAX` stretches at most 250 pages, and a pipe has room for 256
PIPE_BYTES = 1 << 20  # what /proc/sys/fs/pipe-max-size is unless somebody changed it
GONE = frozenset({errno.ENODEV, errno.EBADF})  # unmounted
AGAIN = frozenset({errno.EINTR, errno.EAGAIN, errno.ENOENT})  # ENOENT: the request was interrupted before it was read


def send(fd: int, reply: bytes | memoryview) -> None:
    """One whole reply. Nobody waits for it any more when the caller was interrupted, or everything was unmounted."""
    try:
        os.write(fd, reply)
    except OSError as error:
        if error.errno not in GONE | AGAIN:
            raise


def answer_read(fd: int, unique: int, handle: Handle, offset: int, size: int, reply: memoryview) -> None:
    """`reply`: room for the header and `size` bytes."""
    stretches = handle.reader.cached(offset, size)
    if stretches is not None and _pipe_of_thread().send(fd, wire.reply_header(unique, size), stretches):
        return
    lent = handle.reader.lend(offset, size)
    if lent is not None:
        _send_lent(fd, unique, lent, handle, offset, reply[:size])
        return
    start = wire.REPLY_HEADER_BYTES
    count = handle.reader.read_into(offset, reply[start : start + size])
    wire.put_reply_header(reply, unique, count)
    send(fd, reply[: start + count])


def _send_lent(fd: int, unique: int, lent: list[memoryview], handle: Handle, offset: int, spare: memoryview) -> None:
    """A page that cannot be had is EIO to the reader by then; reading it again says why."""
    try:
        os.writev(fd, [wire.reply_header(unique, sum(map(len, lent))), *lent])
    except OSError as error:
        if error.errno == errno.EFAULT:
            handle.reader.read_into(offset, spare)
            raise StorageError(
                f"a page at {offset} could not be read, and now it can: see whether the disk is well"
            ) from None
        elif error.errno not in GONE | AGAIN:
            raise


class _Pipe:
    """A pipe for replies, as large as it may be; made when it is needed, and anew when something is left in it."""

    def __init__(self) -> None:
        self._ends = (-1, -1)
        self._close: Callable[[], object] = lambda: None
        self._is_small = False  # this process may not have a large one

    def send(self, fd: int, header: bytes, stretches: Sequence[Stretch]) -> bool:
        """False, and nothing was sent, when it does not fit in, or could not be read."""
        if self._ends[0] < 0 and not self._is_small:
            self._open()
        if self._is_small:
            return False
        if not self._fill(header, stretches):
            self._drop()
            return False
        total = len(header) + sum(len(part) if isinstance(part, bytes) else part[2] for part in stretches)
        try:
            os.splice(self._ends[0], fd, total)
        except OSError as error:
            self._drop()
            if error.errno not in GONE | AGAIN:
                raise
        return True

    def _fill(self, header: bytes, stretches: Sequence[Stretch]) -> bool:
        into = self._ends[1]
        try:
            for part in (header, *stretches):
                if isinstance(part, bytes):
                    if os.write(into, part) < len(part):
                        return False
                    continue
                source, offset, length = part
                while length > 0:
                    count = os.splice(source, into, length, offset_src=offset)
                    if count == 0:  # the file was truncated
                        return False
                    offset, length = offset + count, length - count
        except OSError:  # the disk fails, or it is full after all: who reads in the ordinary way hears what it is
            return False
        return True

    def _open(self) -> None:
        self._ends = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._close = weakref.finalize(self, _close_both, *self._ends)
        try:
            fcntl.fcntl(self._ends[1], fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        except OSError:
            self._is_small = True
            self._drop()

    def _drop(self) -> None:
        self._close()
        self._ends = (-1, -1)


def _close_both(reading: int, writing: int) -> None:
    os.close(reading)
    os.close(writing)


_mine = threading.local()


def _pipe_of_thread() -> _Pipe:
    found: _Pipe | None = getattr(_mine, "pipe", None)
    if found is None:
        found = _mine.pipe = _Pipe()
    return found
