"""Every error ckptfs raises on purpose.

Rules: few kinds, split by whose fault it is; each message says what happened, where, and what to do;
each has an errno for the mount; all survive a trip between ranks (picklable, and `to_dict`/`from_dict`).
"""

from __future__ import annotations

import errno as _errno
from typing import Any, ClassVar


class CkptError(Exception):
    """Base of all ckptfs errors."""

    errno: ClassVar[int] = _errno.EIO

    def to_dict(self) -> dict[str, Any]:
        """A JSON form that another rank turns back into the same kind of error."""
        return {"kind": type(self).__name__, "message": str(self)}


class NotFoundError(CkptError, KeyError):
    """A run, step, parameter or file that is not there."""

    errno = _errno.ENOENT

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0]) if self.args else ""


class ExistsError(CkptError):
    """Something is there already and was not to be replaced."""

    errno = _errno.EEXIST


class MismatchError(CkptError, ValueError):
    """What was asked for does not fit what is stored, or ranks disagree with each other."""

    errno = _errno.EINVAL


class FormatError(CkptError, ValueError):
    """Bytes that are not a ckptfs checkpoint, or one from a future this reader does not know."""

    errno = _errno.EINVAL


class CorruptError(CkptError):
    """Stored bytes that differ from what was written: the checksum says so."""

    errno = _errno.EIO


class StorageError(CkptError):
    """The store failed: no space, no permission, no connection. `transient`: trying again may help."""

    errno = _errno.EIO
    transient: bool = False


class StaleError(CkptError):
    """Something that was there when it was listed or opened and has been deleted or replaced since."""

    errno = _errno.ESTALE


class SaveError(CkptError):
    """A save that did not commit; `by_rank` says what each failing rank reported."""

    errno = _errno.EIO

    def __init__(self, message: str, by_rank: dict[int, str] | None = None) -> None:
        super().__init__(message, by_rank or {})
        self.by_rank: dict[int, str] = dict(by_rank or {})

    def __str__(self) -> str:
        lines = [str(self.args[0])]
        lines += [f"  rank {rank}: {text}" for rank, text in sorted(self.by_rank.items())]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": "SaveError",
            "message": str(self.args[0]),
            "by_rank": {str(rank): text for rank, text in self.by_rank.items()},
        }


_KINDS = {
    kind.__name__: kind
    for kind in (
        CkptError,
        NotFoundError,
        ExistsError,
        MismatchError,
        FormatError,
        CorruptError,
        StorageError,
        StaleError,
    )
}


def from_dict(data: dict[str, Any]) -> CkptError:
    """The error that `to_dict` described; an unknown kind becomes a plain CkptError."""
    if data.get("kind") == "SaveError":
        by_rank = {int(rank): str(text) for rank, text in data.get("by_rank", {}).items()}
        return SaveError(str(data.get("message", "")), by_rank)
    return _KINDS.get(str(data.get("kind")), CkptError)(str(data.get("message", "")))
