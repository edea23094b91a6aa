"""The native backend: a loop over /dev/fuse in Python, with no libfuse.

Rules:
- Several threads read requests; each answers what it read, so none waits for another. What may be slow (a blocking file
  or directory) is answered by `SlowWork`, within a deadline.
- Bytes of local files are sent from where they lie, without a copy here (see lending).
- All open handles of a node are opened alike (passed through, direct or cached), as the kernel demands.
- Every failure is an errno and, when it is EIO, a line in the log. Whatever writes is EROFS; unknown requests ENOSYS.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from typing import ClassVar

from ckptfs.errors import NotFoundError
from ckptfs.views.nodes import Dir, File, Link, Node
from ckptfs_fuse import wire
from ckptfs_fuse.answers import (
    FOR_EVER_S,
    attribute,
    attributes,
    errno_of,
    inode_number,
    keep_names_s,
    log,
    log_failure,
    version_of,
)
from ckptfs_fuse.ending import answer_nobody
from ckptfs_fuse.lending import AGAIN, GONE, READ_BYTES_MAX, answer_read, send
from ckptfs_fuse.options import MountOptions
from ckptfs_fuse.passthrough import Materialised, Passthrough
from ckptfs_fuse.slow import Job, SlowWork
from ckptfs_fuse.table import Handle, Known, Listing, Table
from ckptfs_fuse.wire import Op

Body = bytes
Answer = Callable[["NativeServer", wire.Request, Body], bytes | None]


class _Later(Exception):
    """The answer comes from a slow worker."""


class _Channel:
    """One thread's way to the kernel: a descriptor and a buffer for replies."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.reply = memoryview(bytearray(wire.REPLY_HEADER_BYTES + READ_BYTES_MAX))

    def send(self, header: bytes, payload: bytes = b"") -> None:
        send(self.fd, header + payload)


class NativeServer:
    """Answers the kernel's requests for one mount, until it is unmounted."""

    def __init__(self, root: Dir, device_fd: int, options: MountOptions, on_ready: Callable[[], None]) -> None:
        self._options = options
        self._device_fd = device_fd
        self._on_ready = on_ready
        self._table = Table(root, wire.ROOT_ID, FOR_EVER_S if root.immutable else root.refresh_s)
        self._slow = SlowWork(options.slow_threads, options.read_timeout_s)
        self._waiting: dict[int, Job] = {}
        self._passthrough: Passthrough | None = None
        self._materialised: Materialised | None = None
        self._may_mmap_direct = False
        self._owner = (os.geteuid(), os.getegid())
        self._ended = threading.Event()
        self.ended_fd, self._end_fd = os.pipe2(os.O_CLOEXEC)  # readable when it was unmounted, for who selects

    # --- the loop ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Answer INIT here, then serve from threads."""
        if not self._initialise():
            self._end()
            return
        for index in range(self._options.request_threads):
            threading.Thread(target=self._serve, name=f"fuse-{index}", daemon=True).start()
        self._on_ready()

    def wait(self, timeout_s: float | None = None) -> bool:
        """True when it was unmounted."""
        return self._ended.wait(timeout_s)

    def close(self) -> None:
        """After the end: give up what is still open. Descriptors that threads may use stay until the process ends."""
        answer_nobody(self._device_fd)
        self._table.close_all()
        if self._materialised is not None:
            self._materialised.close()

    def _initialise(self) -> bool:
        message = bytearray(wire.REQUEST_BYTES)
        while True:
            length = _read_request(self._device_fd, message)
            if length == 0:
                return False
            request = wire.request(message)
            offer = wire.init_in(bytes(message[wire.HEADER_BYTES : length]))
            if request.op != Op.INIT:
                send(self._device_fd, wire.reply_header(request.unique, 0, errno.EIO))
                continue
            if offer.major != wire.MAJOR or offer.minor < wire.MINOR_OLDEST:
                error = errno.EPROTO if offer.major <= wire.MAJOR else 0
                payload = b"" if error else wire.init_version_only()
                send(self._device_fd, wire.reply_header(request.unique, len(payload), error) + payload)
                continue
            payload = self._agree(offer)
            send(self._device_fd, wire.reply_header(request.unique, len(payload)) + payload)
            return True

    def _agree(self, offer: wire.Init) -> bytes:
        flags = wire.ASYNC_READ | wire.PARALLEL_DIROPS | wire.MAX_PAGES | wire.INIT_EXT
        # Always with attributes: who lists a directory looks at them next, and asking for each takes ten times as long.
        flags |= wire.DO_READDIRPLUS | wire.DIRECT_IO_ALLOW_MMAP
        if self._options.passthrough and os.geteuid() == 0:
            flags |= wire.PASSTHROUGH
        agreed = flags & offer.flags
        self._may_mmap_direct = bool(agreed & wire.DIRECT_IO_ALLOW_MMAP)
        if agreed & wire.PASSTHROUGH:
            self._passthrough = Passthrough(self._device_fd)
            if self._options.materialise_bytes:
                told = self._options
                self._materialised = Materialised(
                    told.materialise_bytes, told.materialise_folder, told.materialise_keep_s
                )
        elif self._options.passthrough:
            reason = "only root may" if os.geteuid() else "the kernel is older than 6.9"
            log.warning("no passthrough, %s: files are read by the server, at about a third of the speed", reason)
        pages = READ_BYTES_MAX // wire.PAGE_BYTES
        return wire.init_out(offer, flags, max_pages=pages, max_background=wire.BACKGROUND_MAX, stack_depth=2)

    def _serve(self) -> None:
        # All threads share one descriptor. A clone each would tie late answers to it: the kernel takes a reply only
        # where the request was read.
        fd = self._device_fd
        channel = _Channel(fd)
        message = bytearray(wire.REQUEST_BYTES)
        try:
            while (length := _read_request(fd, message)) != 0:
                request = wire.request(message)
                if request.op == Op.READ:
                    self._read(channel, request, wire.read_in(message, wire.HEADER_BYTES))
                else:
                    self._answer(channel, request, bytes(message[wire.HEADER_BYTES : length]))
        except BaseException as error:
            log.critical("a request thread died", exc_info=error)
        finally:
            self._end()

    def _end(self) -> None:
        if not self._ended.is_set():
            self._ended.set()
            os.write(self._end_fd, b"x")

    def _answer(self, channel: _Channel, request: wire.Request, body: Body) -> None:
        try:
            answer = self._ANSWERS.get(request.op)
            if answer is None:
                number = errno.EROFS if request.op in wire.WRITING else errno.ENOSYS
                channel.send(wire.reply_header(request.unique, 0, number))
                return
            payload = answer(self, request, body)
        except _Later:
            return
        except Exception as error:
            log_failure(self._describe(request), error)
            channel.send(wire.reply_header(request.unique, 0, errno_of(error)))
            return
        if payload is not None:
            channel.send(wire.reply_header(request.unique, len(payload)), payload)

    def _later(self, request: wire.Request, work: Callable[[], bytes]) -> None:
        """Have a slow worker answer. Always raises _Later."""
        unique = request.unique
        what = self._describe(request)

        def done(payload: bytes | None, error: BaseException | None) -> None:
            self._waiting.pop(unique, None)
            if error is None and payload is not None:
                send(self._device_fd, wire.reply_header(unique, len(payload)) + payload)
                return
            if error is not None and not isinstance(error, InterruptedError):
                log_failure(what, error)
            send(self._device_fd, wire.reply_header(unique, 0, errno_of(error or OSError())))

        job = self._slow.submit(work, done)
        self._waiting[unique] = job
        if job.is_answered:
            self._waiting.pop(unique, None)
        raise _Later

    def _describe(self, request: wire.Request) -> str:
        name = Op(request.op).name if request.op in set(Op) else str(request.op)
        return f"{name} of {self._path(request.nodeid)}"

    def _path(self, nodeid: int) -> str:
        parts: list[str] = []
        try:
            known = self._table.known(nodeid)
            while known.nodeid != wire.ROOT_ID:
                parts.append(known.key[1].decode(errors="backslashreplace"))
                known = self._table.known(known.key[0])
        except Exception:
            parts.append("…")
        return "/" + "/".join(reversed(parts))

    # --- names and attributes ----------------------------------------------------------------------------------

    def _attr(self, node: Node, ino: int) -> bytes:
        told = attributes(node)
        return wire.attr(ino, told.size, told.mtime_ns, told.mode, *self._owner)

    def _entry(self, folder: Known, name: bytes, node: Node) -> tuple[bytes, int]:
        """What a lookup is answered with, and the inode number in it."""
        keep_s = keep_names_s(self._dir(folder))
        found = self._table.remember(folder, name, node, keep_s)
        return wire.entry_out(found.nodeid, self._attr(node, found.ino), keep_s, keep_s), found.ino

    def _dir(self, known: Known) -> Dir:
        if not isinstance(known.node, Dir):
            raise NotADirectoryError(errno.ENOTDIR, "not a directory")
        return known.node

    def _lookup(self, request: wire.Request, body: Body) -> bytes:
        folder = self._table.known(request.nodeid)
        name = wire.name_in(body)
        if self._dir(folder).blocking:
            self._later(request, lambda: self._find(folder, name))
        return self._find(folder, name)

    def _find(self, folder: Known, name: bytes) -> bytes:
        try:
            node = self._dir(folder).lookup(os.fsdecode(name))
        except NotFoundError:
            if not self._dir(folder).immutable:
                raise
            return wire.entry_out(0, wire.NO_ENTRY, FOR_EVER_S, 0)  # nothing of that name, and never will be
        return self._entry(folder, name, node)[0]

    def _forget(self, request: wire.Request, body: Body) -> None:
        self._table.forget(request.nodeid, wire.forget_in(body))

    def _batch_forget(self, request: wire.Request, body: Body) -> None:
        for nodeid, lookups in wire.batch_forget_in(body):
            self._table.forget(nodeid, lookups)

    def _getattr(self, request: wire.Request, body: Body) -> bytes:
        known = self._table.known(request.nodeid)
        return wire.attr_out(self._attr(known.node, known.ino), known.keep_s)

    def _readlink(self, request: wire.Request, body: Body) -> bytes:
        node = self._table.known(request.nodeid).node
        if not isinstance(node, Link):
            raise OSError(errno.EINVAL, "not a link")
        return os.fsencode(node.target)

    def _getxattr(self, request: wire.Request, body: Body) -> bytes:
        room, name = wire.getxattr_in(body)
        return _fit(attribute(self._table.known(request.nodeid).node, os.fsdecode(name)), room)

    def _listxattr(self, request: wire.Request, body: Body) -> bytes:
        room, _ = wire.getxattr_in(body)
        names = self._table.known(request.nodeid).node.xattrs
        return _fit(b"".join(os.fsencode(name) + b"\0" for name in names), room)

    def _statfs(self, request: wire.Request, body: Body) -> bytes:
        return wire.statfs_out(0, 0)

    # --- directories -------------------------------------------------------------------------------------------

    def _opendir(self, request: wire.Request, body: Body) -> bytes:
        known = self._table.known(request.nodeid)
        if self._dir(known).blocking:
            self._later(request, lambda: self._list(known))
        return self._list(known)

    def _list(self, known: Known) -> bytes:
        folder = self._dir(known)
        parent = known if known.nodeid == wire.ROOT_ID else self._table.known(known.key[0])
        entries = [(os.fsencode(name), node) for name, node in folder.children().items()]
        number = self._table.add_listing(Listing(known, parent.ino, keep_names_s(folder), entries))
        return wire.open_out(number, wire.FOPEN_CACHE_DIR | wire.FOPEN_KEEP_CACHE if folder.immutable else 0)

    def _readdir(self, request: wire.Request, body: Body) -> bytes:
        return self._fill(wire.read_in(body), plus=False)

    def _readdirplus(self, request: wire.Request, body: Body) -> bytes:
        return self._fill(wire.read_in(body), plus=True)

    def _fill(self, read: wire.Read, *, plus: bool) -> bytes:
        listing = self._table.listing(read.handle)
        room = read.size
        parts: list[bytes] = []
        for index in range(read.offset, 2 + len(listing.entries)):
            name, node = self._entry_at(listing, index)
            room -= wire.dirent_bytes(name) + (wire.ENTRY_BYTES if plus else 0)
            if room < 0:
                break
            if node is None:  # "." and "..": the kernel ignores what is said of them
                ino = listing.known.ino if index == 0 else listing.parent_ino
                parts += [wire.entry_out(0, wire.NO_ENTRY, 0, 0)] if plus else []
                parts.append(wire.dirent(ino, index + 1, name, 0o040000))
                continue
            if plus:
                entry, ino = self._entry(listing.known, name, node)
                parts.append(entry)
            else:
                ino = inode_number(listing.known.ino, name, version_of(node), listing.keep_s)
            parts.append(wire.dirent(ino, index + 1, name, attributes(node).mode))
        return b"".join(parts)

    @staticmethod
    def _entry_at(listing: Listing, index: int) -> tuple[bytes, Node | None]:
        return ((b".", None), (b"..", None))[index] if index < 2 else listing.entries[index - 2]

    def _releasedir(self, request: wire.Request, body: Body) -> bytes:
        self._table.remove_listing(wire.handle_in(body))
        return b""

    # --- files -------------------------------------------------------------------------------------------------

    def _open(self, request: wire.Request, body: Body) -> bytes:
        if wire.open_flags_in(body) & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(errno.EROFS, "read-only")
        known = self._table.known(request.nodeid)
        if not isinstance(known.node, File):
            raise IsADirectoryError(errno.EISDIR, "not a file")
        file = known.node
        if file.blocking:
            self._later(request, lambda: self._open_file(known, file))
        return self._open_file(known, file)

    def _open_file(self, known: Known, file: File) -> bytes:
        handle = Handle(known, file.open())
        with known.lock:
            if known.opens == 0:
                known.mode, known.backing_id = self._mode(known, file, handle)
            number = self._table.add_handle(handle)
            return wire.open_out(number, known.mode or 0, known.backing_id)

    def _mode(self, known: Known, file: File, handle: Handle) -> tuple[int, int]:
        """How all handles of this node are opened, until the last is closed."""
        backing_id = self._backing_id(known, file, handle)
        if backing_id:
            return wire.FOPEN_PASSTHROUGH, backing_id
        if self._options.direct_io and self._may_mmap_direct and not file.blocking:
            return wire.FOPEN_DIRECT_IO | wire.FOPEN_KEEP_CACHE | wire.FOPEN_NOFLUSH, 0
        return wire.FOPEN_KEEP_CACHE | wire.FOPEN_NOFLUSH, 0

    def _backing_id(self, known: Known, file: File, handle: Handle) -> int:
        if self._passthrough is None:
            return 0
        if handle.reader.backing_fd is not None:
            return self._passthrough.register(handle.reader.backing_fd)
        if self._materialised is None:
            return 0
        copy_fd = self._materialised.fd_of(file)
        if copy_fd is None:
            if known.open_count + 1 >= self._options.materialise_after_opens:
                self._materialised.want(file)
            return 0
        try:
            return self._passthrough.register(copy_fd)
        finally:
            os.close(copy_fd)

    def _release(self, request: wire.Request, body: Body) -> bytes:
        number = wire.handle_in(body)
        known = self._table.handle(number).known
        with known.lock:
            handle = self._table.remove_handle(number)
            if known.opens == 0 and known.backing_id and self._passthrough is not None:
                self._passthrough.forget(known.backing_id)
                known.backing_id = 0
        if handle is not None:
            handle.give_back()
        return b""

    def _read(self, channel: _Channel, request: wire.Request, read: wire.Read) -> None:
        """READ, apart from the other requests because it must be quick."""
        try:
            handle = self._table.handle(read.handle)
            file = handle.reader.file
            size = min(read.size, file.size - read.offset, READ_BYTES_MAX)
            if size <= 0:
                channel.send(wire.reply_header(request.unique, 0))
            elif file.blocking:
                self._read_later(request, handle, read.offset, size)
            else:
                self._read_now(channel, request.unique, handle, read.offset, size)
        except _Later:
            return
        except Exception as error:
            log_failure(self._describe(request), error)
            channel.send(wire.reply_header(request.unique, 0, errno_of(error)))

    def _read_now(self, channel: _Channel, unique: int, handle: Handle, offset: int, size: int) -> None:
        handle.read_ahead(offset, size, self._options.prefetch_kib * 1024)
        answer_read(channel.fd, unique, handle, offset, size, channel.reply)

    def _read_later(self, request: wire.Request, handle: Handle, offset: int, size: int) -> None:
        handle.take()

        def work() -> bytes:
            try:
                data = bytearray(size)
                count = handle.reader.read_into(offset, memoryview(data))
                return bytes(data) if count == size else bytes(data[:count])
            finally:
                handle.give_back()

        self._later(request, work)

    def _interrupt(self, request: wire.Request, body: Body) -> None:
        """A reader that gives up on something slow gets its answer now. INTERRUPT itself has none."""
        job = self._waiting.get(wire.handle_in(body))
        if job is not None:
            job.finish(None, InterruptedError(errno.EINTR, "interrupted"))

    def _destroy(self, request: wire.Request, body: Body) -> bytes:
        return b""

    _ANSWERS: ClassVar[dict[int, Answer]] = {
        Op.LOOKUP: _lookup,
        Op.FORGET: _forget,
        Op.BATCH_FORGET: _batch_forget,
        Op.GETATTR: _getattr,
        Op.READLINK: _readlink,
        Op.OPEN: _open,
        Op.RELEASE: _release,
        Op.OPENDIR: _opendir,
        Op.READDIR: _readdir,
        Op.READDIRPLUS: _readdirplus,
        Op.RELEASEDIR: _releasedir,
        Op.STATFS: _statfs,
        Op.GETXATTR: _getxattr,
        Op.LISTXATTR: _listxattr,
        Op.INTERRUPT: _interrupt,
        Op.DESTROY: _destroy,
    }


def _fit(value: bytes, room: int) -> bytes:
    """An extended attribute, or its size when the caller asks with no room."""
    if room == 0:
        return wire.size_out(len(value))
    if len(value) > room:
        raise OSError(errno.ERANGE, "does not fit")
    return value


def _read_request(fd: int, message: bytearray) -> int:
    """The length of the next request; 0 after the unmount."""
    while True:
        try:
            return os.readv(fd, [message])
        except OSError as error:
            if error.errno in GONE:
                return 0
            if error.errno not in AGAIN:
                raise
