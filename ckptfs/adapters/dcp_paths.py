"""What DCP calls a checkpoint_id, as a place of ours. Pure."""

from __future__ import annotations

import os
import re

from ckptfs import commit
from ckptfs.errors import MismatchError
from ckptfs.run import split_url

_SCHEME = re.compile(r"ckptfs:(//)?")


def plain_url(path: str | os.PathLike[str]) -> str:
    """`ckptfs:///runs/a@5` as "/runs/a@5", `ckptfs://s3://bucket/run` as "s3://bucket/run", others as they are."""
    text = os.fspath(path)
    return _SCHEME.sub("", text, count=1) if text.startswith("ckptfs:") else text


def locate(path: str | os.PathLike[str]) -> tuple[str, str, int | None]:
    """(the folder above, the checkpoint's own name, its step if the name is a step's) of a path to save to."""
    text, step = split_url(plain_url(path))
    if step is not None:
        if not step.isdecimal():
            raise MismatchError(f"{os.fspath(path)!r}: a save needs the number of its step, not {step!r}")
        return _absolute(text), commit.step_name(int(step)), int(step)
    head, _, name = _absolute(text).rpartition("/")
    if not name or name.startswith(".") or head.endswith(":/"):
        raise MismatchError(f"{os.fspath(path)!r}: the last part of the path names the checkpoint")
    return head or "/", name, commit.step_number(name)


def _absolute(text: str) -> str:
    return text.rstrip("/") if "://" in text else os.path.abspath(text)
