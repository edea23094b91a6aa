"""Arrays one after the other, each read while those before it are used.

Rules: names come in the order asked for; what has been read and not taken yet stays within a budget (one array is
always allowed); every byte is checked; leaving the loop early stops the reading.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ckptfs.errors import MismatchError

if TYPE_CHECKING:
    from ckptfs.checkpoint import Checkpoint

BUDGET_BYTES = 512 << 20
_AT_ONCE = 2  # arrays: one is read while another is checked or copied to its device; each uses several threads itself


def in_order(checkpoint: Checkpoint, names: Sequence[str], order: str) -> list[str]:
    """`storage`: as the manifest lists the arrays, which is how they were written; `name`: sorted."""
    if order == "name":
        return sorted(names)
    if order != "storage":
        raise MismatchError(f"order is 'storage' or 'name', not {order!r}")
    place = {name: at for at, name in enumerate(checkpoint.manifest.params)}
    return sorted(names, key=lambda name: (place[checkpoint.param(name).name], name))


def read_ahead(
    names: Sequence[str], read: Callable[[str], Any], nbytes: Callable[[str], int], budget_bytes: int
) -> Iterator[tuple[str, Any]]:
    """(name, read(name)) in order, with reads running ahead."""
    if budget_bytes < 1:
        raise MismatchError(f"budget_bytes is {budget_bytes}: it is at least 1")
    waiting = deque(names)
    ahead: deque[tuple[str, Future[Any]]] = deque()
    ahead_bytes = 0
    threads = ThreadPoolExecutor(_AT_ONCE, "ckptfs-stream")
    try:
        while waiting or ahead:
            while waiting and (not ahead or ahead_bytes + nbytes(waiting[0]) <= budget_bytes):
                name = waiting.popleft()
                ahead_bytes += nbytes(name)
                ahead.append((name, threads.submit(read, name)))
            name, future = ahead.popleft()
            value = future.result()
            ahead_bytes -= nbytes(name)
            yield name, value
            del value, future  # or it would live until the next one is there
    finally:
        threads.shutdown(wait=True, cancel_futures=True)
