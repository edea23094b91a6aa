"""libfuse 2's loop over requests, so that one thread at a time takes them.

libfuse's own loop has a thread for each request of a burst of readahead; in Python they wake one another and wait for
the interpreter, which halved the speed. Here one thread leads: it takes a request and answers it, and takes the next.
Before a request that may be slow, it hands the lead to another thread (`step_aside`), so that nobody waits for it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from typing import Any

from ckptfs.errors import StorageError
from ckptfs_fuse.answers import log
from ckptfs_fuse.ending import stop_pipe, wait_for_end

IDLE_MAX = 4  # threads that wait for the lead; more of them end


class LeaderLoop:
    """Stands in for the library object of fusepy: `fuse_main_real` is ours, everything else the library's."""

    def __init__(self, library: Any, mountpoint: str) -> None:
        self._library = library
        self._mountpoint = mountpoint
        self._session = ctypes.c_void_p()
        self._channel = ctypes.c_void_p()
        self._lead = threading.Lock()
        self._mine = threading.local()
        self._count = threading.Lock()
        self._idle = 0  # threads that wait for the lead, or are about to
        self._ended = threading.Event()
        self.ended_fd, self._end_fd = os.pipe2(os.O_CLOEXEC)
        for name in ("fuse_setup", "fuse_get_session", "fuse_session_next_chan"):
            getattr(library, name).restype = ctypes.c_void_p
        library.fuse_chan_bufsize.restype = ctypes.c_size_t
        library.fuse_session_process.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def wait(self, timeout_s: float | None = None) -> bool:
        """True when it was unmounted."""
        return self._ended.wait(timeout_s)

    def fuse_main_real(self, count: int, arguments: Any, operations: Any, size: int, _data: None) -> int:
        """Mount and serve. What libfuse holds is not taken down: the process ends, and slow threads may be inside."""
        with stop_pipe() as stop_fd:  # handlers that are there are left alone by libfuse
            place, threads = ctypes.c_char_p(), ctypes.c_int()
            fuse = self._library.fuse_setup(
                count, arguments, operations, ctypes.c_size_t(size), ctypes.byref(place), ctypes.byref(threads), None
            )
            if not fuse:
                return 1
            self._session.value = self._library.fuse_get_session(ctypes.c_void_p(fuse))
            self._channel.value = self._library.fuse_session_next_chan(self._session, None)
            self._start_thread()
            wait_for_end(self, self._mountpoint, stop_fd)
        return 0

    def step_aside(self) -> None:
        """What this thread does now may be slow: another one takes the next request."""
        if not getattr(self._mine, "leads", False):
            return
        self._mine.leads = False
        with self._count:
            is_alone = self._idle == 0
        if is_alone:
            self._start_thread()
        self._lead.release()

    def _start_thread(self) -> None:
        with self._count:
            self._idle += 1
        threading.Thread(target=self._serve, name="fuse", daemon=True).start()

    def _serve(self) -> None:
        buffer = ctypes.create_string_buffer(self._library.fuse_chan_bufsize(self._channel))
        while True:
            self._lead.acquire()
            with self._count:
                self._idle -= 1
            self._mine.leads = True
            while self._mine.leads:
                if not self._goes_on(buffer):
                    self._lead.release()
                    return
            with self._count:
                if self._idle >= IDLE_MAX:
                    return
                self._idle += 1

    def _goes_on(self, buffer: ctypes.Array[ctypes.c_char]) -> bool:
        try:
            if self._answer_one(buffer):
                return True
        except BaseException as error:
            log.critical("the thread that answers requests died", exc_info=error)
        self._end()
        return False

    def _answer_one(self, buffer: ctypes.Array[ctypes.c_char]) -> bool:
        """False when it was unmounted."""
        if self._ended.is_set():
            return False
        channel = ctypes.c_void_p(self._channel.value)
        count = self._library.fuse_chan_recv(ctypes.byref(channel), buffer, ctypes.c_size_t(len(buffer)))
        if count == -errno.EINTR:
            return True
        if count <= 0:
            return False
        self._library.fuse_session_process(self._session, buffer, count, channel)
        return True

    def _end(self) -> None:
        if not self._ended.is_set():
            self._ended.set()
            os.write(self._end_fd, b"x")


def installed(module: Any, mountpoint: str) -> LeaderLoop | None:
    """Have fusepy use this loop; None for libfuse 3, whose own one it keeps."""
    library = getattr(module, "_libfuse", None)
    if module.__name__ != "fuse" or library is None:
        return None
    if not hasattr(library, "fuse_setup"):
        raise StorageError("this libfuse 2 lacks fuse_setup: install libfuse 2.9, or use the native backend")
    module._libfuse = LeaderLoop(library, mountpoint)  # noqa: SLF001 - a process serves one mount
    return module._libfuse  # type: ignore[no-any-return]  # noqa: SLF001
