"""What is shown, in one frozen object that travels to the mount's server as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ckptfs.errors import MismatchError

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ViewConfig:
    """Memory is bounded by `cache_bytes`, and `scratch_bytes` for each step that is being read through a decoder."""

    url: str = ""  # a run or a step; `run@1000` and `run@latest` name a step
    subtree: str = ""  # show only what is at this path below it, such as "hf" or "step-00001000/hf"
    verify: bool = False  # check every byte before it is handed out, also of files that need no decoding
    shard_bytes: int = 4 << 30  # hf/: a file of weights is about this long; a layer lies in one file
    cache_bytes: int = 256 * MIB  # content that had to be decoded, fetched or rearranged
    scratch_bytes: int = 32 * MIB
    refresh_s: float = 1.0  # how soon a new step is seen
    linger_s: float = 10.0  # how long a step is kept from deletion after the last file of it was closed
    read_timeout_s: float = 30.0
    storage: Mapping[str, Any] = field(default_factory=dict)  # options of the store, such as endpoint_url

    def __post_init__(self) -> None:
        for name in ("shard_bytes", "cache_bytes", "scratch_bytes", "read_timeout_s"):
            if getattr(self, name) <= 0:
                raise MismatchError(f"{name} must be positive, not {getattr(self, name)}")
        if self.refresh_s < 0 or self.linger_s < 0:
            raise MismatchError("refresh_s and linger_s cannot be negative")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ViewConfig:
        unknown = set(data) - {one.name for one in fields(cls)}
        if unknown:
            raise MismatchError(f"unknown view options {sorted(unknown)}")
        return cls(**data)
