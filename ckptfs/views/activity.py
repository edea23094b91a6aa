"""What was read: counters and the last openings, for `.ckptfs/stats` and `.ckptfs/accesslog`.

Reads that the kernel answers by itself (its cache, passthrough) do not come by here.
"""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections import deque

LOG_LINES = 1000


class Activity:
    """Counters of one mount or one step. Reads and bytes are counted when their reader closes."""

    def __init__(self, parent: Activity | None = None) -> None:
        self._parent = parent
        self._lock = threading.Lock()
        self._began = time.time()
        self._counts = {"opens": 0, "open_now": 0, "reads": 0, "bytes": 0, "errors": 0}
        self._lines: deque[str] = deque(maxlen=LOG_LINES)

    def opened(self, path: str) -> None:
        self._note(f"open {path}", opens=1, open_now=1)

    def closed(self, path: str, reads: int, read_bytes: int, since_s: float) -> None:
        self._note(
            f"close {path} {reads} reads {read_bytes} bytes {since_s:.3f} s", open_now=-1, reads=reads, bytes=read_bytes
        )

    def failed(self, path: str, error: BaseException) -> None:
        self._note(f"error {path} {type(error).__name__}: {error}", errors=1)

    def _note(self, text: str, **counts: int) -> None:
        now = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        with self._lock:
            self._lines.append(f"{now} {text}\n")
            for name, count in counts.items():
                self._counts[name] += count
        if self._parent is not None:
            self._parent._note(text, **counts)  # noqa: SLF001

    def stats(self) -> dict[str, float]:
        with self._lock:
            return {"seconds": round(time.time() - self._began, 3), **self._counts}

    def log(self) -> str:
        with self._lock:
            return "".join(self._lines)
