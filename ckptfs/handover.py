"""Bytes that one rank holds and another writes: the writer fetches them while it fills its buffers.

Rules:
- Who fetches what from whom is in the plan of both (parties.py). A rank that holds bytes for others listens on a TCP
  port; address and token reach the others through the key-value store, so only ranks of this save can fetch.
- Nothing is sent that nobody asked for: a writer that has no free buffer asks for nothing, and holds nobody up.
- A holder answers from the caller's tensors as long as these may not change, afterwards from copies. It lets go of the
  tensors when all it holds for others is fetched or copied.
- A connection that ends, or stands still, says nothing about whose fault it is: the verdict of the save does. Only
  where none comes, the rank at its other end is named.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NoReturn

from ckptfs.errors import StorageError
from ckptfs.ranges import cut
from ckptfs.stage import Job, Part

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptfs.saveplan import SavePlan
    from ckptfs.stage import Stager, StagingPool, Wanted

_MAGIC = b"ckptfs hand-over 1"
_HELLO = struct.Struct(f"<{len(_MAGIC)}s16sI")
_COUNT = struct.Struct("<I")
_RANGE = struct.Struct("<IQQ")
_ANSWER = struct.Struct("<BQ")  # 0 and the bytes that follow, or 1 and the length of an error's text
_MOST_RANGES, _MOST_TEXT = 1 << 20, 1 << 16
_SCRATCH_BYTES = 256 << 10
_VIEWS = 512  # buffers in one system call; Linux takes 1024
_TURN_S = 0.25  # how long to wait between two looks at whether the save still goes on
_GREETING_S = 30.0  # for a connection to say whose it is


def local_address(chosen: str = "") -> str:
    """Where other ranks reach this one: the address from which this machine talks to the job's master."""
    alone = int(os.environ.get("LOCAL_WORLD_SIZE") or 0) == int(os.environ.get("WORLD_SIZE") or 0)
    # An address of the documentation: nothing is sent, the kernel only says which way it would take.
    for target in (chosen,) if chosen else ("127.0.0.1",) if alone else (os.environ.get("MASTER_ADDR"), "192.0.2.1"):
        if chosen:
            return socket.gethostbyname(target or "")
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            found: str = probe.getsockname()[0]
            if alone or not found.startswith("127."):
                return found
    return socket.gethostbyname(socket.gethostname())


# --- who holds bytes for others --------------------------------------------------------------------------


class Holder:
    """Serves this rank's part of what others write. `open` when the tensors are there, `let_go` before they change."""

    def __init__(self, plan: SavePlan, stager: Stager, host: str) -> None:
        self._plan, self._stager = plan, stager
        self._token = secrets.token_bytes(16)
        self._changed = threading.Condition()
        self._left: dict[int, int] = defaultdict(int)  # rank → bytes that it has not fetched yet
        for handed in plan.gives.values():
            for start, stop, rank in handed:
                self._left[rank] += stop - start
        self._copies: dict[int, _Copies] = {}  # by rank; complete ones only
        self._answering = 0
        self._gone: set[int] = set()  # ranks that hung up before they had everything
        self._closed = False
        self._connections: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        try:
            self._listener = socket.create_server((host, 0), backlog=1024)
        except OSError as error:
            raise StorageError(
                f"cannot listen on {host} for the ranks that write what this one holds: {error}"
            ) from error
        self.address = json.dumps([host, self._listener.getsockname()[1], self._token.hex()]).encode()
        self._start(self._accept)

    def _start(self, work: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=work, args=args, name="ckptfs-handover", daemon=True)
        self._threads = [t for t in self._threads if t.is_alive()]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            with self._changed:
                if self._closed:
                    connection.close()
                    return
                self._connections.add(connection)
                self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        rank: int | None = None
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(_GREETING_S)
            rank = self._greeted(connection)
            connection.settimeout(None)  # `close` wakes whoever waits
            while rank is not None and self._answer(connection, rank):
                pass
        except (OSError, EOFError):
            pass
        finally:
            with self._changed:
                self._connections.discard(connection)
                if rank is not None and self._left.get(rank, 0) > 0:
                    self._gone.add(rank)
                self._changed.notify_all()
            connection.close()

    def _greeted(self, connection: socket.socket) -> int | None:
        """The rank that calls; None for strangers, who are told nothing but that."""
        magic, token, rank = _HELLO.unpack(_read(connection, _HELLO.size))
        if magic == _MAGIC and hmac.compare_digest(token, self._token) and rank in self._left:
            return int(rank)
        _refuse(
            connection, "this is another save, another version of ckptfs, or a rank that gets nothing from this one"
        )
        return None

    def _answer(self, connection: socket.socket, rank: int) -> bool:
        """One request; False when the other side has hung up."""
        head = _read(connection, _COUNT.size, may_end=True)
        if not head:
            return False
        (count,) = _COUNT.unpack(head)
        if count > _MOST_RANGES:
            _refuse(connection, f"a request for {count} ranges")
            return False
        ranges = list(_RANGE.iter_unpack(_read(connection, count * _RANGE.size)))
        total = sum(stop - start for _, start, stop in ranges)
        with self._changed:
            copies = self._copies.get(rank)
            left = 0 if self._closed else self._left[rank]
            self._answering += total <= left
        if total > left:
            _refuse(connection, f"{total} bytes asked for, {left} are left for rank {rank}")
            return False
        try:
            connection.sendall(_ANSWER.pack(0, total))
            read = self._stager.read if copies is None else copies.read
            _send_ranges(connection, ranges, read)
        finally:
            with self._changed:
                self._answering -= 1
                self._changed.notify_all()
        with self._changed:
            self._left[rank] -= total
            if not self._left[rank] and (done := self._copies.pop(rank, None)) is not None:
                done.release()
            self._changed.notify_all()
        return True

    # --- before the tensors change

    def let_go(self, pool: StagingPool, wait: Callable[[list[int], list[int]], None]) -> None:
        """Return when the tensors are not needed any more: everything is fetched, or copied into buffers that are free.

        `wait` is called now and then with the ranks that have not fetched everything, and those of them that have hung
        up; it raises when the save is over.
        """
        partly: dict[int, _Copies] = {}
        try:
            while True:
                self._copy(partly, pool)
                with self._changed:
                    late = [rank for rank, left in self._left.items() if left and rank not in self._copies]
                    if not late and not self._answering:
                        return
                    self._changed.wait(_TURN_S)
                    gone = [rank for rank in late if rank in self._gone]
                wait(late, gone)
        finally:
            for copies in partly.values():
                copies.release()

    def _copy(self, partly: dict[int, _Copies], pool: StagingPool) -> None:
        for rank in [rank for rank, left in self._left.items() if left and rank not in self._copies]:
            copies = partly.get(rank)
            if copies is None:
                copies = partly[rank] = _Copies(_jobs_for(self._plan, rank, pool.buffer_bytes), pool)
            if copies.fill(self._stager):
                with self._changed:
                    del partly[rank]
                    if self._left[rank]:
                        self._copies[rank] = copies
                    else:
                        copies.release()
            elif not self._left[rank]:
                partly.pop(rank).release()

    @property
    def left_bytes(self) -> int:
        """What the others have not fetched yet."""
        with self._changed:
            return sum(self._left.values())

    def close(self) -> None:
        """Hang up on everybody, and give the copies' memory back."""
        with self._changed:
            self._closed = True
            for connection in [self._listener, *self._connections]:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        for thread in self._threads:
            thread.join(10.0)
        with self._changed:
            for copies in self._copies.values():
                copies.release()
            self._copies.clear()


def _jobs_for(plan: SavePlan, rank: int, most_bytes: int) -> list[Job]:
    """What `rank` fetches from this one, in buffers of at most so many bytes."""
    jobs: list[Job] = []
    parts: list[Part] = []
    used = 0
    for array, handed in plan.gives.items():
        for first, last, to in handed:
            for start, stop in cut(first, last, most_bytes // 64 * 64) if to == rank else []:
                if used + stop - start > most_bytes:
                    jobs.append(Job(tuple(parts)))
                    parts, used = [], 0
                parts.append(Part(array, start, stop, used))
                used = -(-(used + stop - start) // 64) * 64
    return [*jobs, Job(tuple(parts))] if parts else jobs


class _Copies:
    """What one rank will fetch, in buffers."""

    def __init__(self, jobs: list[Job], pool: StagingPool) -> None:
        self._todo = jobs[::-1]
        self._pool = pool
        self._buffers: list[Any] = []
        self._ranges: dict[int, list[tuple[int, int, memoryview]]] = defaultdict(list)

    def fill(self, stager: Stager) -> bool:
        """Copy as long as buffers are free; whether all is copied."""
        events = []
        while self._todo:
            try:
                buffer = self._pool.acquire(0.0)
            except StorageError:
                break
            self._buffers.append(buffer)
            job = self._todo.pop()
            events += stager.copy(job, buffer)
            for part in job.parts:
                view = buffer.view[part.at : part.at + part.stop - part.start]
                self._ranges[part.array].append((part.start, part.stop, view))
        for event in events:
            event.synchronize()
        return not self._todo

    def read(self, array: int, start: int, stop: int, into: memoryview) -> None:
        done = 0
        for a, b, view in self._ranges[array]:
            low, high = max(a, start), min(b, stop)
            if low < high:
                into[low - start : high - start] = view[low - a : high - a]
                done += high - low
        if done != stop - start:
            raise EOFError(f"{stop - start - done} bytes of array {array} at {start} were not kept")

    def release(self) -> None:
        self._ranges.clear()
        while self._buffers:
            self._pool.release(self._buffers.pop())


def _send_ranges(
    connection: socket.socket,
    ranges: Sequence[tuple[int, int, int]],
    read: Callable[[int, int, int, memoryview], None],
) -> None:
    """Small ranges go out together, large ones in parts."""
    scratch = memoryview(bytearray(min(_SCRATCH_BYTES, sum(b - a + 15 for _, a, b in ranges))))
    views: list[memoryview] = []
    used = 0
    for array, start, stop in ranges:
        at = start
        while at < stop:
            used = -(-used // 16) * 16  # elements lie where their size wants them
            count = min(stop - at, (len(scratch) - used) // 16 * 16 or len(scratch) - used)
            if count <= 0:
                _send(connection, views)
                views, used = [], 0
                continue
            if count < stop - at:
                count = count // 16 * 16
                if not count:
                    _send(connection, views)
                    views, used = [], 0
                    continue
            view = scratch[used : used + count]
            read(array, at, at + count, view)
            views.append(view)
            used, at = used + count, at + count
    _send(connection, views)


def _send(connection: socket.socket, views: list[memoryview]) -> None:
    while views:
        sent = connection.sendmsg(views[:_VIEWS])
        views = _after(views, sent)


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of some memory behind its first bytes."""
    for i, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[i + 1 :]]
        count -= len(view)
    return []


def _read(connection: socket.socket, count: int, *, may_end: bool = False) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(min(count - len(data), 1 << 20))
        if not more:
            if may_end and not data:
                return b""
            raise EOFError("the connection ended in the middle of a message")
        data += more
    return data


def _refuse(connection: socket.socket, why: str) -> None:
    text = why.encode()
    connection.sendall(_ANSWER.pack(1, len(text)) + text)


# --- who writes what others hold -------------------------------------------------------------------------


class Fetcher:
    """Gets bytes from the ranks that hold them.

    `find` gives the address of a rank's Holder, `check` raises when the save is over, `lost` raises what is to be said
    of a rank that cannot be reached or says nothing for `patience_s`.
    """

    def __init__(
        self,
        rank: int,
        find: Callable[[int], bytes],
        check: Callable[[], None],
        lost: Callable[[int, str], NoReturn],
        patience_s: float,
    ) -> None:
        self._rank, self._find, self._check, self._lost, self._patience_s = rank, find, check, lost, patience_s
        self._connections: dict[int, socket.socket] = {}

    def __call__(self, wanted: list[Wanted]) -> None:
        """Fill the memory of all that is wanted. Every holder is asked before the first answer is read."""
        by_rank: dict[int, list[Wanted]] = defaultdict(list)
        for one in wanted:
            by_rank[one.rank].append(one)
        for rank, some in by_rank.items():
            request = [_RANGE.pack(one.array, one.start, one.stop) for one in some]
            self._send(rank, b"".join([_COUNT.pack(len(some)), *request]))
        for rank, some in by_rank.items():
            self._receive(rank, [one.into for one in some])

    def _connection(self, rank: int) -> socket.socket:
        known = self._connections.get(rank)
        if known is not None:
            return known
        host, port, token = json.loads(self._find(rank))
        try:
            connection = self._connections[rank] = socket.create_connection((host, port), timeout=self._patience_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(_HELLO.pack(_MAGIC, bytes.fromhex(token), self._rank))
        except OSError as error:
            self._lost(rank, f"cannot be reached at {host}:{port} for the bytes it holds: {error}")
        return connection

    def _send(self, rank: int, request: bytes) -> None:
        connection = self._connection(rank)
        connection.settimeout(self._patience_s)  # it reads requests at all times
        try:
            connection.sendall(request)
        except OSError as error:
            self._lost(rank, f"broke off while it was asked for the bytes it holds: {error}")
        connection.settimeout(_TURN_S)

    def _receive(self, rank: int, views: list[memoryview]) -> None:
        head = bytearray(_ANSWER.size)
        self._fill(rank, [memoryview(head)])
        status, length = _ANSWER.unpack(head)
        if status:
            text = bytearray(min(length, _MOST_TEXT))
            self._fill(rank, [memoryview(text)])
            self._lost(rank, f"refused to give the bytes it holds: {text.decode(errors='replace')}")
        if length != sum(map(len, views)):
            self._lost(rank, f"gave {length} bytes instead of {sum(map(len, views))}")
        self._fill(rank, views)

    def _fill(self, rank: int, views: list[memoryview]) -> None:
        connection = self._connections[rank]
        heard_s = time.monotonic()
        while views:
            try:
                count = connection.recvmsg_into(views[:_VIEWS])[0]
            except TimeoutError:
                self._check()
                if time.monotonic() - heard_s > self._patience_s:
                    self._lost(rank, f"has given none of the bytes it holds for {self._patience_s:.0f} s")
                continue
            except OSError as error:
                self._lost(rank, f"broke off while it gave the bytes it holds: {error}")
            if not count:
                self._lost(rank, "hung up before it had given all the bytes it holds")
            heard_s = time.monotonic()
            views = _after(views, count)

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()


def key_of(rank: int) -> str:
    """The name under which a rank's address is shared."""
    return f"handover-{rank}"
