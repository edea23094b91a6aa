"""Virtual trees of files over checkpoints: plain objects computed from manifests, exact sizes, no kernel in them.

`ckptfs.views.nodes` is the protocol: directories, files, links. The mount and the HTTP server are thin faces over it.
"""

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
    "Zeros",
    "resolve",
    "walk",
]
