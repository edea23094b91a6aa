"""What both backends answer from nodes: attributes, numbers of errors, how long answers keep. No system calls here."""

from __future__ import annotations

import errno
import hashlib
import logging
import stat
from dataclasses import dataclass

from ckptfs.errors import CkptError
from ckptfs.views.nodes import Dir, File, Link, Node

log = logging.getLogger("ckptfs.mount")

FOR_EVER_S = 365 * 24 * 3600.0
BLOCK_BYTES = 4096

MODE_DIR = stat.S_IFDIR | 0o555
MODE_FILE = stat.S_IFREG | 0o444
MODE_LINK = stat.S_IFLNK | 0o777


@dataclass(frozen=True, slots=True)
class Attributes:
    """What stat() tells of a node. A directory has one link: no promise about how many directories it holds."""

    mode: int
    size: int
    mtime_ns: int


def attributes(node: Node) -> Attributes:
    if isinstance(node, File):
        return Attributes(MODE_FILE, node.size, node.mtime_ns)
    if isinstance(node, Link):
        return Attributes(MODE_LINK, len(node.target.encode(errors="surrogateescape")), node.mtime_ns)
    return Attributes(MODE_DIR, 0, node.mtime_ns)


def version_of(node: Node) -> str:
    """Two nodes of the same name and version are the same to the kernel, which keeps what it knows."""
    if isinstance(node, File):
        return "f" + node.version
    if isinstance(node, Link):
        return "l" + node.target
    return "d" + (node.version if isinstance(node, Dir) else "")


def inode_number(parent: int, name: bytes, version: str, keep_s: float) -> int:
    """The same for the same path and version, whatever the kernel has forgotten in between. Never 0 or 1.

    Where names may change, a file that grows stays the same file: `cp -r` refuses what it takes for a replacement.
    """
    if keep_s < FOR_EVER_S:
        version = version[:1]
    digest = hashlib.blake2b(b"%d/%s/" % (parent, name) + version.encode(errors="surrogateescape"), digest_size=8)
    return int.from_bytes(digest.digest(), "little") >> 1 | 2


def attribute(node: Node, name: str) -> bytes:
    """An extended attribute. Only user.* exist: `ls -l` asks for others of each file until told that none are."""
    if not name.startswith("user."):
        raise OSError(errno.EOPNOTSUPP, "not supported")
    value = node.xattrs.get(name)
    if value is None:
        raise OSError(errno.ENODATA, "no such attribute")
    return value


def keep_names_s(folder: Dir) -> float:
    """How long the kernel may keep what it learnt about the names in that directory."""
    return FOR_EVER_S if folder.immutable else folder.refresh_s


def errno_of(error: BaseException) -> int:
    """What a failed call is answered with. Anything unforeseen is EIO: never a wrong byte, never a hang."""
    if isinstance(error, CkptError):
        return error.errno
    if isinstance(error, TimeoutError):
        return errno.EIO
    if isinstance(error, OSError) and error.errno:
        return error.errno
    return errno.EIO


def log_failure(what: str, error: BaseException) -> None:
    """A line in the log for whatever a user sees as EIO; a missing name is no failure."""
    if isinstance(error, CkptError | OSError):
        if errno_of(error) in {errno.EIO, errno.ESTALE}:
            log.error("%s: %s: %s", what, type(error).__name__, error)
    else:
        log.error("%s: unforeseen %s", what, type(error).__name__, exc_info=error)
