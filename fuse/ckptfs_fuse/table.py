"""What the kernel knows by number: nodes it looked up, and what it has open. No system calls here.

Rules: a number is given to (parent, name, version) and lives as long as the kernel remembers it (lookups minus forgets)
or has it open. New content under an old name is a new version, so a new number, so a new page cache: what was opened
before never mixes with it. Every method takes the lock; none calls out.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field

from ckptfs.errors import StaleError
from ckptfs.views.nodes import Dir, File, Node, Reader
from ckptfs_fuse.answers import inode_number, version_of

OUT_OF_ORDER_BYTES = 2 << 20  # as far apart come the kernel's readahead requests of one reader
AHEAD_BYTES_MIN = 4 << 20
BURST_BYTES = 8 << 20  # what the kernel reads around a fault: nobody may come for what follows
BURST_REQUEST_BYTES = 256 << 10  # requests of single pages are smaller


@dataclass(slots=True)
class Known:
    """A node with a number."""

    nodeid: int
    ino: int
    node: Node
    key: tuple[int, bytes]
    version: str
    keep_s: float  # how long its attributes keep
    lookups: int = 0
    opens: int = 0  # open handles now
    open_count: int = 0  # openings ever, to tell what is hot
    mode: int | None = None  # FOPEN_* of its open handles: all of one node are opened alike
    backing_id: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)  # held while opening and releasing


class Handle:
    """An open file. Reads that outlive RELEASE (late ones, given up on) keep it open until they end."""

    __slots__ = ("_lock", "_uses", "expected", "known", "prefetched", "reader", "run_bytes")

    def __init__(self, known: Known, reader: Reader) -> None:
        self.known = known
        self.reader = reader
        self.expected = 0  # where a sequential reader continues
        self.prefetched = 0
        self.run_bytes = 0  # how much was read one after the other
        self._uses = 1
        self._lock = threading.Lock()

    def read_ahead(self, offset: int, size: int, limit_bytes: int) -> None:
        """Files are read from the disk ahead of a reader that goes on where it was: further, the longer it does.

        A large request somewhere else is the kernel's readahead around a fault: that is read in large pieces as well.
        """
        is_sequential = abs(offset - self.expected) <= OUT_OF_ORDER_BYTES
        self.expected = offset + size
        # What is asked for now is read past the page cache too if it is much: else it would be in memory twice.
        needed = offset if size >= BURST_REQUEST_BYTES else offset + size
        if is_sequential:
            self.run_bytes += size
            ahead = min(limit_bytes, max(AHEAD_BYTES_MIN, 2 * (self.run_bytes - BURST_BYTES)))
        else:
            self.run_bytes = self.prefetched = ahead = 0
        if offset + size + ahead // 2 > self.prefetched:
            start = max(self.prefetched, needed)
            self.prefetched = offset + size + ahead
            if start < self.prefetched:
                self.reader.prefetch(start, self.prefetched - start)

    def take(self) -> None:
        with self._lock:
            if self._uses == 0:
                raise StaleError("read after close")
            self._uses += 1

    def give_back(self) -> None:
        with self._lock:
            self._uses -= 1
            ended = self._uses == 0
        if ended:
            self.reader.close()


class Table:
    def __init__(self, root: Dir, root_id: int, keep_root_s: float) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(root_id + 1)
        self._handle_numbers = itertools.count(1)
        self._root = Known(root_id, root_id, root, (0, b""), version_of(root), keep_root_s, lookups=1)
        self._by_id = {root_id: self._root}
        self._by_key: dict[tuple[int, bytes], Known] = {}
        self._handles: dict[int, Handle] = {}
        self._listings: dict[int, Listing] = {}

    def known(self, nodeid: int) -> Known:
        try:
            return self._by_id[nodeid]
        except KeyError:
            raise StaleError(f"node {nodeid} is not known any more") from None

    def remember(self, parent: Known, name: bytes, node: Node, keep_s: float) -> Known:
        """The number of what a lookup found; counts as one lookup."""
        key, version = (parent.nodeid, name), version_of(node)
        with self._lock:
            found = self._by_key.get(key)
            if found is not None and found.version == version:
                if not isinstance(node, File):  # a directory or link may be described by a newer object
                    found.node = node
            else:
                ino = inode_number(parent.ino, name, version, keep_s)
                found = Known(next(self._numbers), ino, node, key, version, keep_s)
                self._by_key[key] = self._by_id[found.nodeid] = found
            found.lookups += 1
            return found

    def forget(self, nodeid: int, lookups: int) -> None:
        with self._lock:
            found = self._by_id.get(nodeid)
            if found is not None and found is not self._root:
                found.lookups -= lookups
                self._drop_unused(found)

    def _drop_unused(self, known: Known) -> None:
        if known.lookups <= 0 and known.opens == 0:
            self._by_id.pop(known.nodeid, None)
            if self._by_key.get(known.key) is known:
                del self._by_key[known.key]

    def add_handle(self, handle: Handle) -> int:
        with self._lock:
            number = next(self._handle_numbers)
            self._handles[number] = handle
            handle.known.opens += 1
            handle.known.open_count += 1
            return number

    def handle(self, number: int) -> Handle:
        try:
            return self._handles[number]
        except KeyError:
            raise StaleError(f"handle {number} is not open") from None

    def remove_handle(self, number: int) -> Handle | None:
        with self._lock:
            handle = self._handles.pop(number, None)
            if handle is not None:
                handle.known.opens -= 1
                self._drop_unused(handle.known)
            return handle

    def add_listing(self, listing: Listing) -> int:
        with self._lock:
            number = next(self._handle_numbers)
            self._listings[number] = listing
            return number

    def listing(self, number: int) -> Listing:
        try:
            return self._listings[number]
        except KeyError:
            raise StaleError(f"directory handle {number} is not open") from None

    def remove_listing(self, number: int) -> None:
        with self._lock:
            self._listings.pop(number, None)

    @property
    def sizes(self) -> dict[str, int]:
        return {"nodes": len(self._by_id), "handles": len(self._handles), "listings": len(self._listings)}

    def close_all(self) -> None:
        with self._lock:
            handles, self._handles = list(self._handles.values()), {}
        for handle in handles:
            handle.give_back()


@dataclass(frozen=True, slots=True)
class Listing:
    """A directory as it was when it was opened: one opening never mixes two states of it."""

    known: Known
    parent_ino: int
    keep_s: float
    entries: list[tuple[bytes, Node]]
