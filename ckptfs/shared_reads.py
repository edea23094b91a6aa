"""Loading together: bytes that several ranks need leave storage once and travel between the ranks.

Every rank says which extents it needs; all compute the same pieces (runs of extents needed by the same ranks), deal
the pieces that several need over those ranks, least loaded first, and go through them in the same order, in rounds.
In a round a rank reads its own pieces, sends each to the others as soon as it is there, and takes theirs; the next
round's reads run meanwhile. So the bytes read by all ranks together are the distinct bytes that are needed.

Rules: whoever reads a piece checks it, extent by extent; stored bytes travel (compressed ones stay compressed). A rank
that fails still takes part, with rubbish in place of data, and says so at the end: nobody waits for ever, all raise.
Messages are JSON; the exchange uses the caller's process group, in the foreground.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptfs.errors import CkptError, MismatchError, from_dict
from ckptfs.loadplan import Request, requests, requests_of_extents
from ckptfs.read import Reader, Target

if TYPE_CHECKING:
    import torch

    from ckptfs.manifest import Manifest, Param

ROUND_BYTES = 64 << 20  # what a rank holds of one round, read or received
Needs = dict[str, list[list[int]]]  # array → [first, last) runs of extents


@dataclass(frozen=True, slots=True)
class Piece:
    """One read that several ranks may wait for."""

    param: Param
    request: Request
    owner: int
    takers: tuple[int, ...]  # all ranks that need it


def needs_of(work: Iterable[tuple[Param, Sequence[Target]]]) -> Needs:
    """The extents that these targets touch."""
    out: Needs = {}
    for param, targets in work:
        runs: list[list[int]] = []
        for request in requests(param, (t.box for t in targets), whole=True, io_bytes=1):
            if runs and runs[-1][1] == request.first:
                runs[-1][1] = request.last
            else:
                runs.append([request.first, request.last])
        if runs:
            out[param.name] = runs
    return out


def deal(manifest: Manifest, needs: Sequence[Needs], io_bytes: int) -> list[Piece]:
    """What is read by whom, the same on every rank: pure."""
    pieces: list[Piece] = []
    load = [0] * len(needs)
    for name in sorted(set().union(*needs)):
        param = manifest.params[name]
        for first, last, takers in _segments([need.get(name, []) for need in needs]):
            for request in requests_of_extents(param, first, last, io_bytes):
                owner = min(takers, key=lambda rank: (load[rank], rank))
                load[owner] += request.length
                pieces.append(Piece(param, request, owner, takers))
    return pieces


def _segments(runs: Sequence[Sequence[Sequence[int]]]) -> Iterable[tuple[int, int, tuple[int, ...]]]:
    """Extents cut where the set of ranks that need them changes."""
    edges = sorted({edge for of_rank in runs for run in of_rank for edge in run})
    at = [0] * len(runs)
    for low, high in pairwise(edges):
        takers = []
        for rank, of_rank in enumerate(runs):
            while at[rank] < len(of_rank) and of_rank[at[rank]][1] <= low:
                at[rank] += 1
            if at[rank] < len(of_rank) and of_rank[at[rank]][0] <= low:
                takers.append(rank)
        if takers:
            yield low, high, tuple(takers)


def rounds_of(pieces: Sequence[Piece], size: int, budget_bytes: int) -> list[list[Piece]]:
    """Pieces in order, cut so that no rank holds more than the budget in a round (one piece is always allowed)."""
    rounds: list[list[Piece]] = []
    held = [0] * size
    for piece in pieces:
        over = any(held[rank] and held[rank] + piece.request.length > budget_bytes for rank in piece.takers)
        if over or not rounds:
            rounds.append([])
            held = [0] * size
        rounds[-1].append(piece)
        for rank in piece.takers:
            held[rank] += piece.request.length
    return rounds


class Peers:
    """A torch process group, for bytes: gloo as it is, NCCL through device memory."""

    def __init__(self, group: Any = None) -> None:
        import torch
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            raise MismatchError("shared_reads needs torch.distributed: call init_process_group first, or leave it out")
        self._dist, self._torch, self.group = dist, torch, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        on_cpu = "cpu" in str(dist.get_backend_config(group)) or dist.get_backend(group) in ("gloo", "mpi")
        self.device = torch.device("cpu" if on_cpu else f"cuda:{torch.cuda.current_device()}")

    def gather(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """The messages of all ranks, in order."""
        data = np.frombuffer(json.dumps(message).encode(), np.uint8).copy()
        mine = self._torch.from_numpy(data).to(self.device)
        lengths = [self._torch.zeros(1, dtype=self._torch.int64, device=self.device) for _ in range(self.size)]
        self._dist.all_gather(lengths, self._torch.tensor([len(data)], device=self.device), group=self.group)
        longest = max(int(n) for n in lengths)
        padded = self._torch.zeros(longest, dtype=self._torch.uint8, device=self.device)
        padded[: len(data)] = mine
        found = [self._torch.empty_like(padded) for _ in range(self.size)]
        self._dist.all_gather(found, padded, group=self.group)
        return [json.loads(bytes(t[: int(n)].cpu().numpy())) for t, n in zip(found, lengths, strict=True)]

    def send(self, data: np.ndarray[Any, Any], to: int) -> Any:
        tensor = self._torch.from_numpy(data).to(self.device)
        return self._dist.isend(tensor, group=self.group, group_dst=to), tensor

    def receive(self, nbytes: int, origin: int) -> tuple[Any, torch.Tensor]:
        tensor = self._torch.empty(nbytes, dtype=self._torch.uint8, device=self.device)
        return self._dist.irecv(tensor, group=self.group, group_src=origin), tensor


def known(error: Exception) -> CkptError:
    """As an error that can be told to the other ranks."""
    return error if isinstance(error, CkptError) else CkptError(f"{type(error).__name__}: {error}")


def fail_together(peers: Peers, error: CkptError | None) -> None:
    """One rank's error becomes everybody's."""
    answers = peers.gather({"error": error.to_dict() if error else None})
    if error is not None:
        raise error
    for rank, answer in enumerate(answers):
        if answer["error"] is not None:
            found = from_dict(answer["error"])
            raise type(found)(f"rank {rank}: {answer['error']['message']}")


def read_shared(
    reader: Reader,
    manifest: Manifest,
    work: Iterable[tuple[Param, Sequence[Target]]],
    peers: Peers,
    progress: Callable[[int], None] = lambda done: None,
) -> None:
    """Fill the targets of all ranks; called by every rank of the group."""
    mine = {param.name: (param, list(targets)) for param, targets in work}
    needs = [answer["needs"] for answer in peers.gather({"needs": needs_of(mine.values())})]
    exchange = _Exchange(reader, peers, {name: targets for name, (_, targets) in mine.items()})
    total = sum(manifest.params[name].stored_bytes for name in set().union(*needs))
    # Pieces small enough that every rank gets a fair share of them, large enough for the disk.
    piece_bytes = min(reader.settings.io_bytes, max(1 << 20, total // (16 * peers.size)))
    rounds = rounds_of(deal(manifest, needs, piece_bytes), peers.size, ROUND_BYTES)
    done = 0
    with ThreadPoolExecutor(reader.settings.read_threads, "ckptfs-shared") as threads:
        ahead = exchange.start(rounds[0], threads) if rounds else []
        for number, pieces in enumerate(rounds):
            reads = ahead
            ahead = exchange.start(rounds[number + 1], threads) if number + 1 < len(rounds) else []
            done += exchange.finish(pieces, reads)
            progress(done)
    fail_together(peers, exchange.error)


class _Exchange:
    """One rank's part in the rounds."""

    def __init__(self, reader: Reader, peers: Peers, targets: dict[str, list[Target]]) -> None:
        self._reader, self._peers, self._targets = reader, peers, targets
        self.error: CkptError | None = None

    def start(self, pieces: Sequence[Piece], threads: ThreadPoolExecutor) -> list[Future[np.ndarray[Any, Any]]]:
        """Begin to read what this rank owns of a round."""
        return [threads.submit(self._read, piece) for piece in pieces if piece.owner == self._peers.rank]

    def _read(self, piece: Piece) -> np.ndarray[Any, Any]:
        data = np.empty(piece.request.length, np.uint8)
        try:
            self._reader.fetch(piece.param, piece.request, data.data)
        except Exception as error:  # the others wait for these bytes, good or bad
            self.error = self.error or known(error)
        return data

    def finish(self, pieces: Sequence[Piece], reads: Sequence[Future[np.ndarray[Any, Any]]]) -> int:
        """Send, take and deliver the pieces of a round; what was delivered, in stored bytes."""
        rank, peers = self._peers.rank, self._peers
        # Both sides post the transfers between two ranks in the order of the pieces: no tags are needed.
        coming = [
            (p, *peers.receive(p.request.length, p.owner)) for p in pieces if rank in p.takers and p.owner != rank
        ]
        sent, done = [], 0
        for piece, read in zip([p for p in pieces if p.owner == rank], reads, strict=True):
            data = read.result()
            sent += [peers.send(data, taker) for taker in piece.takers if taker != rank]
            done += self._deliver(piece, data)
        for piece, transfer, tensor in coming:
            transfer.wait()
            done += self._deliver(piece, tensor.cpu().numpy())
        for transfer, _ in sent:
            transfer.wait()
        return done

    def _deliver(self, piece: Piece, data: np.ndarray[Any, Any]) -> int:
        if self.error is None:
            try:
                self._reader.deliver(piece.param, self._targets[piece.param.name], piece.request, data.data)
            except Exception as error:  # such as rubbish from a rank that failed to read it
                self.error = known(error)
        return piece.request.length
