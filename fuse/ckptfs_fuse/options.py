"""Everything a mount can be told, in one frozen object that travels to the server as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from ckptfs.errors import MismatchError

BACKENDS = ("auto", "native", "fusepy")


@dataclass(frozen=True, slots=True)
class MountOptions:
    """Defaults are what one training machine wants; memory is bounded by them (see docs/native-fuse.md)."""

    allow_other: bool = False  # other users may read too (needs root, or user_allow_other in /etc/fuse.conf)
    nonempty: bool = False  # mount over a folder that has something in it
    read_timeout_s: float = 30.0  # a blocking read that takes longer is answered with EIO
    request_threads: int = 4  # native: threads that take requests from the kernel
    slow_threads: int = 8  # threads for blocking reads
    readahead_kib: int = 8192  # the kernel's readahead on the mount, raised when permitted
    prefetch_kib: int = 32768  # how far ahead of a sequential reader local files are read from the disk
    direct_io: bool = False  # native: reads bypass the mount's page cache (see docs/native-fuse.md for when it wins)
    passthrough: bool = True  # native: let the kernel read whole backing files by itself, when it can
    materialise_bytes: int = 0  # native: hot files up to this many bytes in total are copied to be passed through
    materialise_folder: str | None = None  # where those copies lie; None: in memory
    materialise_after_opens: int = 2  # a file is hot when it is opened that often
    materialise_keep_s: float = 600.0  # a copy that nobody opened for so long is given up

    def __post_init__(self) -> None:
        for name in ("request_threads", "slow_threads", "materialise_after_opens", "readahead_kib"):
            if getattr(self, name) < 1:
                raise MismatchError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("read_timeout_s", "materialise_keep_s"):
            if getattr(self, name) <= 0:
                raise MismatchError(f"{name} must be positive, not {getattr(self, name)}")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> MountOptions:
        unknown = set(data) - {field.name for field in fields(cls)}
        if unknown:
            raise MismatchError(f"unknown mount options {sorted(unknown)}")
        return cls(**data)
