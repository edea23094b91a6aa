"""How a server's main thread waits: until the mount is gone, or a signal says stop.

Stopped, it unmounts; who has files open is served for `GRACE_S` more while the mount is hidden already.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator
from typing import Protocol

from ckptfs_fuse import kernel
from ckptfs_fuse.answers import log

GRACE_S = 5.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Serving(Protocol):
    """Threads that answer requests until the mount is gone."""

    ended_fd: int  # readable then

    def wait(self, timeout_s: float | None = None) -> bool: ...


@contextlib.contextmanager
def stop_pipe() -> Iterator[int]:
    """A descriptor that becomes readable when a signal says stop."""
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    before = {number: signal.signal(number, lambda *_: None) for number in STOP_SIGNALS}
    wakeup = signal.set_wakeup_fd(writing)
    try:
        yield reading
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reading)
        os.close(writing)


def answer_nobody(fd: int) -> None:
    """Threads may still serve a mount that is hidden, while what they read from is closed: no answer goes out now.

    A closed number would be given to another file; so it stays, and is a file that swallows everything.
    """
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(nowhere, fd, inheritable=False)
    os.close(nowhere)


def wait_for_end(serving: Serving, path: str, stop_fd: int) -> None:
    while not select.select([stop_fd, serving.ended_fd], [], [], None)[0]:
        continue
    if not serving.wait(0):
        try:
            kernel.unmount(path)
        except OSError as error:
            log.warning("%s is %s: hidden now, readers are served for %g s more", path, error.strerror, GRACE_S)
            with contextlib.suppress(OSError):
                kernel.unmount(path, lazy=True)
        serving.wait(GRACE_S)
