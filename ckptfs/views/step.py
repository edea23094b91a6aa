"""What a step looks like: `manifest.json`, `params/`, `raw/`, `hf/`, `zarr/` and `.ckptfs/`."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from ckptfs.errors import CkptError
from ckptfs.manifest import NAME, digest
from ckptfs.version import __version__
from ckptfs.views.arrays import params_dir, raw_dir
from ckptfs.views.hf import hf_dir, is_empty_model
from ckptfs.views.nodes import BytesFile, Dir, Node
from ckptfs.views.zarr import stored, zarr_dir

if TYPE_CHECKING:
    from ckptfs.views.activity import Activity
    from ckptfs.views.source import Shared, Source

_log = logging.getLogger("ckptfs.views")


def step_children(source: Source) -> dict[str, Node]:
    """Everything in a step's directory. A step whose arrays fit no model folder has no `hf/`; the log says why."""
    reason = ""
    try:
        is_empty = is_empty_model(source)
        reason = "the step has neither arrays nor assets for it" if is_empty else ""
    except CkptError as error:
        reason = str(source.explain(error))
        _log.warning("%s: no hf/ folder: %s", source.url, reason)
    manifest = source.manifest
    told: dict[str, object] = {
        "url": source.url,
        "step": manifest.step,
        "arrays": len(manifest.params),
        "bytes": manifest.nbytes,
        "hf": reason or "shown",
    }
    children: dict[str, Node] = {
        ".ckptfs": about_dir(source.activity, source.shared, told),
        NAME: stored(source, NAME, NAME, source.manifest_bytes),
        "params": params_dir(source),
        "raw": raw_dir(source),
        "zarr": zarr_dir(source),
    }
    if not reason:
        children["hf"] = hf_dir(source)
    return dict(sorted(children.items()))


def about_dir(activity: Activity, shared: Shared, told: dict[str, object]) -> Dir:
    """`.ckptfs/`: what is shown and what was read, made anew each time somebody looks."""
    windows = shared.windows

    def stats() -> dict[str, object]:
        cache = {"hits": windows.hits, "misses": windows.misses, "held_bytes": windows.held_bytes}
        return {**activity.stats(), "cache": cache}

    def config() -> dict[str, object]:
        shown = shared.config.to_dict()
        shown["storage"] = sorted(shown["storage"])  # names only: the values may be secrets
        return {"ckptfs": __version__, **told, "view": shown}

    texts: dict[str, Callable[[], bytes]] = {
        "accesslog": lambda: activity.log().encode(errors="backslashreplace"),
        "config": lambda: _json(config()),
        "stats": lambda: _json(stats()),
    }

    def one(name: str) -> Node:
        data = texts[name]()
        return BytesFile(data, version=digest(data).hex())

    return _Fresh(one, tuple(texts))


class _Fresh(Dir):
    """A directory of files that are made when they are looked up."""

    def __init__(self, make: Callable[[str], Node], names: tuple[str, ...]) -> None:
        self._make, self._names = make, names
        super().__init__(lambda: {name: make(name) for name in names}, immutable=False, refresh_s=0.0)

    def lookup(self, name: str) -> Node:
        return self._make(name) if name in self._names else super().lookup(name)


def _json(value: object) -> bytes:
    """Padded, so that the size hardly ever changes: it may be known for longer than the content."""
    text = json.dumps(value, indent=1, default=str).encode()
    return text + b" " * (-(len(text) + 1) % 1024) + b"\n"
