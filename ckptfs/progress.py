"""A progress bar for long work: one line on stderr, with rate and remaining time.

Rules: nothing is written unless the stream is a terminal or the bar is forced; where it is forced without a terminal
(logs), a plain line now and then. The bar never writes to stdout, so output can be piped.
"""

from __future__ import annotations

import shutil
import sys
import time
from typing import Self, TextIO

_REDRAW_S = 0.1
_LOG_S = 5.0
_BAR_CELLS = 24
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def size_text(nbytes: float) -> str:
    """Three digits and a unit: 512 B, 4.1 kB, 23.5 MB."""
    for unit in _UNITS[:-1]:
        if nbytes < 999.5:
            return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 99.95 else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} {_UNITS[-1]}"


def time_text(seconds: float) -> str:
    """Seconds as 12s, 3m05s or 2h07m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


class Bar:
    """Call it with (done_bytes, total_bytes), from one thread at a time."""

    def __init__(self, label: str, *, forced: bool | None = None, stream: TextIO | None = None) -> None:
        self.stream = sys.stderr if stream is None else stream
        self._label = label
        self._terminal = self.stream.isatty()
        self.shown = self._terminal if forced is None else forced
        self._began = time.monotonic()
        self._drawn = self._began - (0 if self._terminal else _LOG_S - 1)
        self._width = 0
        self._last = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __call__(self, done: int, total: int) -> None:
        if not self.shown:
            return
        now = time.monotonic()
        self._last = self._line(done, total, now - self._began)
        if now - self._drawn >= (_REDRAW_S if self._terminal else _LOG_S):
            self._drawn = now
            self._draw()

    def _line(self, done: int, total: int, elapsed_s: float) -> str:
        part = done / total if total else 1.0
        rate = done / elapsed_s if elapsed_s > 0 else 0.0
        left = f", {time_text((total - done) / rate)} left" if rate and done < total else f", {time_text(elapsed_s)}"
        cells = round(part * _BAR_CELLS)
        bar = "█" * cells + "░" * (_BAR_CELLS - cells)
        numbers = f"{part:4.0%} {size_text(done)} of {size_text(total)}, {size_text(rate)}/s{left}"
        return f"{self._label} {bar} {numbers}" if self._terminal else f"{self._label} {numbers}"

    def _draw(self) -> None:
        if not self._terminal:
            self._write(self._last + "\n")
            return
        line = self._last[: shutil.get_terminal_size().columns - 1]
        self._write("\r" + line.ljust(self._width))
        self._width = len(line)

    def _write(self, text: str) -> None:
        try:
            self.stream.write(text)
            self.stream.flush()
        except UnicodeEncodeError:
            self.stream.write(text.replace("█", "#").replace("░", "."))
        except (OSError, ValueError):
            self.shown = False  # nobody looks any more

    def close(self) -> None:
        """The last state; on a terminal the line is wiped, so that what follows stands alone."""
        if self.shown and self._terminal and self._width:
            self._write("\r" + " " * self._width + "\r")
        elif self.shown and not self._terminal and self._last:
            self._draw()
        self.shown = False
