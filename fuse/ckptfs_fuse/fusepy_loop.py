"""libfuse 2's loop over requests, so that one thread at a time takes them.

libfuse's own loop has a thread for each request of a burst of readahead; in Python they wake one another and wait for
the interpreter, which halved the speed. Here one thread leads: it takes a request and answers it, and takes the next.
Before a request that may be slow, it hands the lead to another thread (`step_aside`), so that nobody waits for it.

READ of an open file is answered here, on the channel that libfuse made (see lending): libfuse would copy the bytes and
look for the file's name first, and each call through ctypes takes longer than the kernel needs for the bytes. And its
answer to INIT, which is older than requests of more than 128 KiB, is completed here, so that the kernel sends those.

libfuse knows files by path, and gives the kernel one inode for one path, with one set of pages. So it is told another
name for another version of what lies below the root: a step that replaces one of the same number has inodes of its own.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable
from typing import Any

from ckptfs.errors import StorageError
from ckptfs_fuse import wire
from ckptfs_fuse.answers import log
from ckptfs_fuse.ending import answer_nobody, stop_pipe, wait_for_end
from ckptfs_fuse.lending import READ_BYTES_MAX, send

CHANNEL_BYTES = (128 << 10) + wire.PAGE_BYTES  # what libfuse's own channels have
# (descriptor, the request's number, what is wanted, room for a reply) → whether it was answered
AnswerRead = Callable[[int, int, wire.Read, memoryview], bool]
# a name below the root → the name that libfuse knows it by
NameInside = Callable[[bytes], bytes]

IDLE_MAX = 4  # threads that wait for the lead; more of them end


class _IoVec(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("length", ctypes.c_size_t))


_SEND = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(_IoVec), ctypes.c_size_t)
_GETATTR = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_DESTROY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _ChannelOps(ctypes.Structure):
    _fields_ = (("receive", ctypes.c_void_p), ("send", _SEND), ("destroy", _DESTROY))


class _Channel:
    """A channel of libfuse whose replies come here."""

    def __init__(self, library: Any) -> None:
        self.reply = b""
        self._ops = _ChannelOps(None, _SEND(self._send), _DESTROY(lambda _channel: None))
        library.fuse_chan_new.restype = ctypes.c_void_p
        library.fuse_chan_new.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p]
        self.pointer = ctypes.c_void_p(library.fuse_chan_new(ctypes.byref(self._ops), -1, CHANNEL_BYTES, None))

    def _send(self, _channel: int, parts: Any, count: int) -> int:
        self.reply = b"".join(ctypes.string_at(part.address, part.length) for part in parts[:count] if part.length)
        return 0


class _Inquiry:
    """One thread's way to ask libfuse what the kernel did not ask in that form; the answers stay here.

    libfuse 2 is older than what the kernel offers by now: requests of more than 128 KiB, and listings with attributes,
    which save a request for each name.
    """

    def __init__(self, library: Any, session: ctypes.c_void_p, name_inside: NameInside) -> None:
        self._library = library
        self._session = session
        self._name_inside = name_inside
        self._channel = _Channel(library)

    def ask(self, message: bytes) -> bytes:
        """The reply with its header."""
        self._channel.reply = b""
        self._library.fuse_session_process(self._session, message, len(message), self._channel.pointer)
        return self._channel.reply

    def init(self, message: bytes) -> bytes:
        abilities = wire.MAX_PAGES | wire.DO_READDIRPLUS & wire.init_in(message[wire.HEADER_BYTES :]).flags
        pages = READ_BYTES_MAX // wire.PAGE_BYTES
        return wire.with_newer_abilities(self.ask(message), abilities, pages, wire.BACKGROUND_MAX)

    def readdirplus(self, request: wire.Request, body: bytes) -> bytes:
        reply = self.ask(wire.request_bytes(request, wire.Op.READDIR, body))
        error, payload = wire.reply_payload(reply)
        if error:
            return reply
        room = wire.read_in(body).size
        parts: list[bytes] = []
        for entry, name in wire.dirents_in(payload):
            room -= len(entry) + wire.ENTRY_BYTES
            if room < 0:
                break
            parts += [self._entry(request, name), entry]
        listed = b"".join(parts)
        return wire.reply_header(request.unique, len(listed)) + listed

    def _entry(self, request: wire.Request, name: bytes) -> bytes:
        """What LOOKUP says, which counts as one; nothing of "." and "..", and of a name that is gone."""
        if name not in {b".", b".."}:
            error, found = wire.reply_payload(self.ask(lookup(request, name, self._name_inside)))
            if not error and len(found) == wire.ENTRY_BYTES:
                return found
        return wire.entry_out(0, wire.NO_ENTRY, 0, 0)


def lookup(request: wire.Request, name: bytes, name_inside: NameInside) -> bytes:
    """LOOKUP as libfuse is asked: below the root, by the name that it is to know."""
    inside = name_inside(name) if request.nodeid == wire.ROOT_ID else name
    return wire.request_bytes(request, wire.Op.LOOKUP, inside + b"\0")


class LeaderLoop:
    """Stands in for the library object of fusepy: `fuse_main_real` is ours, everything else the library's."""

    def __init__(self, library: Any, mountpoint: str, stat_kind: type[ctypes.Structure]) -> None:
        """`stat_kind`: the library's idea of struct stat."""
        self._library = library
        self.stat_kind = stat_kind
        self.stat: Callable[[bytes, int], int] | None = None  # what answers getattr, instead of the library's wrapper
        self._mountpoint = mountpoint
        self._session = ctypes.c_void_p()
        self._channel = ctypes.c_void_p()
        self._fd = -1
        self.answer_read: AnswerRead | None = None
        self.name_inside: NameInside = lambda name: name
        self.on_ready: Callable[[], None] = lambda: None  # called when the kernel and libfuse have agreed
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
        if self.stat is not None:
            function = _GETATTR(self.stat)  # alive until this returns
            table = operations.contents
            table.getattr = ctypes.cast(function, type(table.getattr))
        with stop_pipe() as stop_fd:  # handlers that are there are left alone by libfuse
            place, threads = ctypes.c_char_p(), ctypes.c_int()
            fuse = self._library.fuse_setup(
                count, arguments, operations, ctypes.c_size_t(size), ctypes.byref(place), ctypes.byref(threads), None
            )
            if not fuse:
                return 1
            self._session.value = self._library.fuse_get_session(ctypes.c_void_p(fuse))
            self._channel.value = self._library.fuse_session_next_chan(self._session, None)
            self._fd = self._library.fuse_chan_fd(self._channel)
            self._start_thread()
            wait_for_end(self, self._mountpoint, stop_fd)
            answer_nobody(self._fd)
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
        message = memoryview(buffer).cast("B")
        reply = memoryview(bytearray(wire.REPLY_HEADER_BYTES + READ_BYTES_MAX))
        inquiry = _Inquiry(self._library, self._session, self.name_inside)
        while True:
            self._lead.acquire()
            with self._count:
                self._idle -= 1
            self._mine.leads = True
            while self._mine.leads:
                if not self._goes_on(buffer, message, reply, inquiry):
                    if self._mine.leads:
                        self._lead.release()
                    return
            with self._count:
                if self._idle >= IDLE_MAX:
                    return
                self._idle += 1

    def _goes_on(
        self, buffer: ctypes.Array[ctypes.c_char], message: memoryview, reply: memoryview, inquiry: _Inquiry
    ) -> bool:
        try:
            if self._answer_one(buffer, message, reply, inquiry):
                return True
        except BaseException as error:
            log.critical("the thread that answers requests died", exc_info=error)
        self._end()
        return False

    def _answer_one(
        self, buffer: ctypes.Array[ctypes.c_char], message: memoryview, reply: memoryview, inquiry: _Inquiry
    ) -> bool:
        """False when it was unmounted. `message` is the memory of `buffer`."""
        if self._ended.is_set():
            return False
        channel = ctypes.c_void_p(self._channel.value)
        count = self._library.fuse_chan_recv(ctypes.byref(channel), buffer, ctypes.c_size_t(len(buffer)))
        if count == -errno.EINTR:
            return True
        if count <= 0:
            return False
        request = wire.request(message)
        if request.op == wire.Op.READ and self.answer_read is not None:
            read = wire.read_in(message, wire.HEADER_BYTES)
            if read.size <= READ_BYTES_MAX and self.answer_read(self._fd, request.unique, read, reply):
                return True
        elif request.op == wire.Op.READDIRPLUS:
            send(self._fd, inquiry.readdirplus(request, bytes(message[wire.HEADER_BYTES : count])))
            return True
        elif request.op == wire.Op.LOOKUP and request.nodeid == wire.ROOT_ID:
            name = wire.name_in(bytes(message[wire.HEADER_BYTES : count]))
            asked = lookup(request, name, self.name_inside)
            self._library.fuse_session_process(self._session, asked, len(asked), channel)
            return True
        elif request.op == wire.Op.INIT:
            send(self._fd, inquiry.init(bytes(message[:count])))
            self.on_ready()
            return True
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
    module._libfuse = LeaderLoop(library, mountpoint, module.c_stat)  # noqa: SLF001 - a process serves one mount
    return module._libfuse  # type: ignore[no-any-return]  # noqa: SLF001
