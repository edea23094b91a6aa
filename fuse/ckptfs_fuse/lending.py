"""Answering READ on the kernel's own channel, for both backends: the bytes are sent from where they lie.

Rules: one writev from the page cache, mapped, or from what was read ahead; nothing is copied here. What only a reader
can make is read into the caller's buffer, behind the room for the header, and sent with one write.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from ckptfs.errors import StorageError
from ckptfs_fuse import wire

if TYPE_CHECKING:
    from ckptfs_fuse.table import Handle

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
