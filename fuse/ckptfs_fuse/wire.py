"""The kernel's FUSE messages as bytes: numbers, layouts, parsing and packing. No I/O.

Written after include/uapi/linux/fuse.h, protocol 7.41; names are the kernel's, in lower case or without prefix. All
integers are in the machine's own order. A layout is never longer than what kernels since 5.10 (7.32) know.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

MAJOR, MINOR = 7, 41
MINOR_OLDEST = 28  # Linux 4.20: the first with max_pages

ROOT_ID = 1
HEADER_BYTES = 40
REPLY_HEADER_BYTES = 16
PAGE_BYTES = 4096
REQUEST_BYTES = 64 * 1024  # nothing but names and small structures comes in: the mount is read-only
BACKGROUND_MAX = 64  # requests of readahead at the same time: those around four faults
WRITE_BYTES_MAX = 4096  # the least that the kernel takes

# INIT flags
ASYNC_READ = 1 << 0
EXPORT_SUPPORT = 1 << 4
DO_READDIRPLUS = 1 << 13
READDIRPLUS_AUTO = 1 << 14
PARALLEL_DIROPS = 1 << 18
MAX_PAGES = 1 << 22
CACHE_SYMLINKS = 1 << 23
EXPLICIT_INVAL_DATA = 1 << 25
INIT_EXT = 1 << 30
DIRECT_IO_ALLOW_MMAP = 1 << 36
PASSTHROUGH = 1 << 37

# OPEN flags
FOPEN_DIRECT_IO = 1 << 0
FOPEN_KEEP_CACHE = 1 << 1
FOPEN_CACHE_DIR = 1 << 3
FOPEN_NOFLUSH = 1 << 5
FOPEN_PASSTHROUGH = 1 << 7

# ioctls of /dev/fuse
IOC_BACKING_OPEN = 0x4010E501
IOC_BACKING_CLOSE = 0x4004E502


class Op(IntEnum):
    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    SETXATTR = 21
    GETXATTR = 22
    LISTXATTR = 23
    REMOVEXATTR = 24
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    ACCESS = 34
    CREATE = 35
    INTERRUPT = 36
    DESTROY = 38
    BATCH_FORGET = 42
    FALLOCATE = 43
    READDIRPLUS = 44
    RENAME2 = 45
    COPY_FILE_RANGE = 47
    TMPFILE = 51


WRITING = frozenset({
    Op.SETATTR, Op.SYMLINK, Op.MKNOD, Op.MKDIR, Op.UNLINK, Op.RMDIR, Op.RENAME, Op.LINK, Op.WRITE, Op.SETXATTR,
    Op.REMOVEXATTR, Op.CREATE, Op.FALLOCATE, Op.RENAME2, Op.COPY_FILE_RANGE, Op.TMPFILE,
})  # fmt: skip

_HEADER = struct.Struct("=IIQQIIIHH")
_REPLY = struct.Struct("=IiQ")
_INIT_IN = struct.Struct("=IIII")
_INIT_OUT = struct.Struct("=IIIIHHIIHHII24x")
INIT_OUT_OLD_BYTES = 24  # before Linux 3.12
_ATTR = struct.Struct("=QQQqqqIIIIIIIIII")
_ENTRY = struct.Struct("=QQQQII")
_ATTR_OUT = struct.Struct("=QII")
_OPEN_OUT = struct.Struct("=QIi")
_READ_IN = struct.Struct("=QQI")
_DIRENT = struct.Struct("=QQII")
_STATFS = struct.Struct("=QQQQQIIII24x")
_GETXATTR_IN = struct.Struct("=I4x")
_SIZE_OUT = struct.Struct("=I4x")
_FORGET = struct.Struct("=Q")
_FORGET_ONE = struct.Struct("=QQ")
_BATCH = struct.Struct("=I4x")
_INT32 = struct.Struct("=i")
_BACKING = struct.Struct("=iIQ")


class Request(NamedTuple):
    """A message's header; `op` is a plain integer, as kernels may send what is not in `Op`."""

    length: int
    op: int
    unique: int
    nodeid: int
    uid: int
    gid: int
    pid: int


def request(message: bytes | bytearray | memoryview) -> Request:
    return Request(*_HEADER.unpack_from(message)[:7])


def reply_header(unique: int, payload_bytes: int, error: int = 0) -> bytes:
    """`error` is a positive errno, or 0."""
    return _REPLY.pack(REPLY_HEADER_BYTES + payload_bytes, -error, unique)


def put_reply_header(into: memoryview, unique: int, payload_bytes: int) -> None:
    _REPLY.pack_into(into, 0, REPLY_HEADER_BYTES + payload_bytes, 0, unique)


class Init(NamedTuple):
    """What the kernel offers."""

    major: int
    minor: int
    max_readahead: int
    flags: int


def init_in(body: bytes) -> Init:
    major, minor, max_readahead, flags = _INIT_IN.unpack_from(body)
    if flags & INIT_EXT and len(body) >= 20:
        flags |= struct.unpack_from("=I", body, 16)[0] << 32
    return Init(major, minor, max_readahead, flags)


def init_out(offer: Init, flags: int, *, max_pages: int, max_background: int, stack_depth: int) -> bytes:
    flags &= offer.flags | INIT_EXT
    if not offer.flags & INIT_EXT:
        flags &= 0xFFFFFFFF & ~INIT_EXT
    return _INIT_OUT.pack(
        MAJOR, min(MINOR, offer.minor), offer.max_readahead, flags & 0xFFFFFFFF,
        max_background, max_background * 3 // 4, WRITE_BYTES_MAX, 1, max_pages, 0,
        flags >> 32, stack_depth if flags & PASSTHROUGH else 0,
    )  # fmt: skip


def request_bytes(request: Request, op: int, body: bytes) -> bytes:
    """Another request of the same caller about the same node."""
    head = (HEADER_BYTES + len(body), op, request.unique, request.nodeid, request.uid, request.gid, request.pid)
    return _HEADER.pack(*head, 0, 0) + body


def reply_payload(reply: bytes) -> tuple[int, bytes]:
    """(a positive errno or 0, what follows the header)."""
    return -int(_REPLY.unpack_from(reply)[1]), reply[REPLY_HEADER_BYTES:]


def dirents_in(payload: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Each whole entry of a READDIR reply, with its name."""
    at = 0
    while at + _DIRENT.size <= len(payload):
        length = _DIRENT.unpack_from(payload, at)[2]
        end = at + _DIRENT.size + length + -length % 8
        if end > len(payload):
            return
        yield payload[at:end], payload[at + _DIRENT.size : at + _DIRENT.size + length]
        at = end


def with_newer_abilities(reply: bytes, flags_more: int, max_pages: int, max_background: int) -> bytes:
    """An answer to INIT, also a short one of an older library, that agrees to more.

    Flags, pages of a request, and requests at the same time: with less than a readahead has, its end is left out.
    """
    whole = bytearray(reply.ljust(REPLY_HEADER_BYTES + _INIT_OUT.size, b"\0"))
    _, error, unique = _REPLY.unpack_from(whole)
    major, minor, max_readahead, flags, *rest = _INIT_OUT.unpack_from(whole, REPLY_HEADER_BYTES)
    if error or major != MAJOR or len(reply) < REPLY_HEADER_BYTES + INIT_OUT_OLD_BYTES:
        return reply
    rest[0], rest[1], rest[4] = max_background, max_background * 3 // 4, max_pages
    _REPLY.pack_into(whole, 0, len(whole), 0, unique)
    _INIT_OUT.pack_into(whole, REPLY_HEADER_BYTES, major, minor, max_readahead, flags | flags_more, *rest)
    return bytes(whole)


def init_version_only() -> bytes:
    """The answer to a kernel of another major version: it then asks again."""
    return struct.pack("=II", MAJOR, MINOR) + bytes(56)


def attr(ino: int, size: int, mtime_ns: int, mode: int, uid: int, gid: int) -> bytes:
    seconds, nanoseconds = divmod(mtime_ns, 1_000_000_000)
    return _ATTR.pack(
        ino, size, -(-size // 512), seconds, seconds, seconds, nanoseconds, nanoseconds, nanoseconds,
        mode, 1, uid, gid, 0, PAGE_BYTES, 0,
    )  # fmt: skip


def _seconds(duration_s: float) -> tuple[int, int]:
    whole = int(duration_s)
    return whole, int((duration_s - whole) * 1e9)


def entry_out(nodeid: int, attr_bytes: bytes, names_s: float, attributes_s: float) -> bytes:
    name_seconds, name_rest = _seconds(names_s)
    attr_seconds, attr_rest = _seconds(attributes_s)
    return _ENTRY.pack(nodeid, 0, name_seconds, attr_seconds, name_rest, attr_rest) + attr_bytes


ATTR_BYTES = _ATTR.size
ENTRY_BYTES = _ENTRY.size + ATTR_BYTES
NO_ENTRY = bytes(ATTR_BYTES)


def attr_out(attr_bytes: bytes, keep_s: float) -> bytes:
    whole, rest = _seconds(keep_s)
    return _ATTR_OUT.pack(whole, rest, 0) + attr_bytes


def open_out(handle: int, flags: int, backing_id: int = 0) -> bytes:
    return _OPEN_OUT.pack(handle, flags, backing_id)


class Read(NamedTuple):
    handle: int
    offset: int
    size: int


def read_in(body: bytes | bytearray | memoryview, at: int = 0) -> Read:
    return Read(*_READ_IN.unpack_from(body, at))


def handle_in(body: bytes) -> int:
    """The handle of RELEASE and RELEASEDIR, and the number of INTERRUPT: the first field."""
    return int(_FORGET.unpack_from(body)[0])


def open_flags_in(body: bytes) -> int:
    return int(_INT32.unpack_from(body)[0])


def dirent(ino: int, next_offset: int, name: bytes, mode: int) -> bytes:
    padding = -len(name) % 8
    return _DIRENT.pack(ino, next_offset, len(name), mode >> 12) + name + bytes(padding)


def dirent_bytes(name: bytes) -> int:
    return _DIRENT.size + len(name) + -len(name) % 8


def statfs_out(total_bytes: int, file_count: int) -> bytes:
    return _STATFS.pack(-(-total_bytes // PAGE_BYTES), 0, 0, file_count, 0, PAGE_BYTES, 255, PAGE_BYTES, 0)


def getxattr_in(body: bytes) -> tuple[int, bytes]:
    """(room the caller has, 0 to ask for the size; the name)."""
    return int(_GETXATTR_IN.unpack_from(body)[0]), body[_GETXATTR_IN.size :].split(b"\0", 1)[0]


def size_out(count: int) -> bytes:
    return _SIZE_OUT.pack(count)


def forget_in(body: bytes) -> int:
    return int(_FORGET.unpack_from(body)[0])


def batch_forget_in(body: bytes) -> Iterator[tuple[int, int]]:
    """Pairs of (nodeid, lookups)."""
    count = _BATCH.unpack_from(body)[0]
    for index in range(count):
        nodeid, lookups = _FORGET_ONE.unpack_from(body, _BATCH.size + index * _FORGET_ONE.size)
        yield nodeid, lookups


def name_in(body: bytes) -> bytes:
    return body.split(b"\0", 1)[0]


def backing_map(fd: int) -> bytes:
    return _BACKING.pack(fd, 0, 0)


def backing_id_in(backing_id: int) -> bytes:
    return _INT32.pack(backing_id)
