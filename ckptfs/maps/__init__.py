"""The built-in name-and-layout maps: JSON files beside this module, read when asked for.

`load(name)` gives one, `detect(names)` says which of them a checkpoint's names belong to.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import resources

from ckptfs import rules
from ckptfs.errors import NotFoundError

# The order of detection: `identity` has a rule for every name, so it is asked last.
NAMES = ("llama-torchtitan", "llama-megatron", "llama-megatron-stacked", "identity")


@cache
def load(name: str) -> rules.Map:
    """A built-in map by its name."""
    if name not in NAMES:
        raise NotFoundError(f"there is no built-in map {name!r}: use one of {', '.join(NAMES)}, or pass your own")
    return rules.loads(resources.files(__name__).joinpath(f"{name}.json").read_bytes())


def detect(names: Iterable[str]) -> str | None:
    """The built-in map that fits these names, or None: then say which map to use."""
    names = list(names)
    return next((name for name in NAMES if load(name).fits(names)), None)
