"""Virtual trees of files over checkpoints: plain objects computed from manifests, exact sizes, no kernel in them.

`ckptfs.views.nodes` is the protocol: directories, files, links. The mount and the HTTP server are thin faces over it.
`open_root` gives the tree of a run or a step; `build` is the same for a server that is told what to show by name.
"""

from typing import Any

from ckptfs.views.config import ViewConfig
from ckptfs.views.nodes import (
    BackingFile,
    BytesFile,
    Computed,
    Dir,
    File,
    Link,
    LocalTree,
    Node,
    Range,
    Reader,
    Segment,
    SegmentsFile,
    Zeros,
    resolve,
    walk,
)


def open_root(config: Any) -> Dir:
    """The directory that shows a run, a step, or a part of one: `config` is a URL, a ViewConfig or its `to_dict`."""
    from ckptfs.views.run import open_root as opened

    return opened(config)


def build(**config: Any) -> Dir:
    """`open_root` for a server's process, from the fields of a ViewConfig. Lets it open as many files as it may."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # one reader of hf/ holds up to 512 files open
    except (OSError, ValueError):
        pass
    return open_root(config)


__all__ = [
    "BackingFile",
    "BytesFile",
    "Computed",
    "Dir",
    "File",
    "Link",
    "LocalTree",
    "Node",
    "Range",
    "Reader",
    "Segment",
    "SegmentsFile",
    "ViewConfig",
    "Zeros",
    "build",
    "open_root",
    "resolve",
    "walk",
]
