"""What an inference engine reads from a training checkpoint: rows, columns, a tensor-parallel shard, small boxes.

One process; every system reads into memory that the engine owns already: warm, page-aligned, in huge pages, as pinned
memory is. A model that was saved whole lies in rows, and a rank's columns of it are on every page; so ckptfs reads the
shard also from a step as eight tensor-parallel ranks save it, where it is exactly its bytes, and columns and shard from
steps that were saved whole with `split`. Files are opened before
the clock starts, new for each cold read, because pages that are mapped can't be made cold. Each cold read was done
once before its pages were dropped, the raw ones too: a virtual disk gives what it gave lately twice as fast (7 reads of
271 MB: 166 – 280 ms the first time, 100 – 106 ms the second), and nobody is to be measured against what it has at hand
of somebody else. *warm*: all files were read into the page cache, and the operation was done once.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import random
import statistics
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.machine import copy_bytes, evict, files_of, raw_read, raw_write, settle, shuffled
from benchmarks.model import State, shapes, size_of
from benchmarks.systems import (
    ALL,
    EXTENTS,
    PAGES,
    SPLIT,
    UNCHECKED,
    Ckptfs,
    Job,
    Safetensors,
    TensorStore,
    TorchDcp,
    TorchSave,
    ZarrPython,
)

if TYPE_CHECKING:
    from benchmarks.work import Ranks

Index = tuple[slice, ...]


@dataclass(frozen=True)
class Piece:
    """A box of a tensor and the memory it goes to."""

    name: str
    index: Index
    out: np.ndarray[Any, Any]


class Engine:
    """A reader of one saved model."""

    kind: type = object

    def __init__(self, place: Path) -> None:
        self.place = place

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def read(self, pieces: list[Piece]) -> None:
        raise NotImplementedError


class CkptfsEngine(Engine):
    kind = Ckptfs
    verify = "extents"

    def open(self) -> None:
        import ckptfs

        self._ck = ckptfs.Checkpoint(self.place, verify=self.verify)

    def close(self) -> None:
        self._ck.close()
        del self._ck

    def read(self, pieces: list[Piece]) -> None:
        if len(pieces) == 1:
            self._ck["model/" + pieces[0].name].read(pieces[0].index, out=pieces[0].out)
            return
        self._ck.read([("model/" + piece.name, piece.index, piece.out) for piece in pieces])


class UncheckedEngine(CkptfsEngine):
    """What the others do: no checksums."""

    verify = "none"


class SplitEngine(CkptfsEngine):
    """A step that was told what would be read of it."""


class SafetensorsEngine(Engine):
    """mmap, as safetensors does by itself."""

    kind = Safetensors

    def open(self) -> None:
        from safetensors import safe_open

        self._file = safe_open(self.place / "0.safetensors", framework="np")

    def close(self) -> None:
        del self._file

    def read(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            np.copyto(piece.out, self._file.get_slice(piece.name)[piece.index])


class TorchLoadEngine(Engine):
    """torch.load(mmap=True): tensors that are pages of the file."""

    kind = TorchSave

    def open(self) -> None:
        import torch

        self._tensors = torch.load(self.place / "0.pt", mmap=True, weights_only=True)

    def close(self) -> None:
        del self._tensors

    def read(self, pieces: list[Piece]) -> None:
        import torch

        for piece in pieces:
            torch.from_numpy(piece.out).copy_(self._tensors[piece.name][piece.index])


class DcpEngine(Engine):
    """DCP has no slices: the whole tensor is read (into memory that is kept), then cut."""

    kind = TorchDcp

    def open(self) -> None:
        self._whole: dict[str, Any] = {}
        from torch.distributed.checkpoint import FileSystemReader

        self._shapes = {
            name: tuple(meta.size)
            for name, meta in FileSystemReader(self.place).read_metadata().state_dict_metadata.items()
        }

    def read(self, pieces: list[Piece]) -> None:
        import torch
        import torch.distributed.checkpoint as dcp

        keys = ["model." + piece.name for piece in pieces]
        for key in keys:
            if key not in self._whole:
                self._whole[key] = torch.zeros(self._shapes[key])
        dcp.load({key: self._whole[key] for key in keys}, checkpoint_id=str(self.place), no_dist=True)
        for key, piece in zip(keys, pieces, strict=True):
            torch.from_numpy(piece.out).copy_(self._whole[key][piece.index])


class TensorStoreEngine(Engine):
    kind = TensorStore

    def __init__(self, place: Path) -> None:
        super().__init__(place)
        self._table = shapes(size_of(SIZE[0]))

    def open(self) -> None:
        import tensorstore as ts

        system = TensorStore()
        waiting = {n: ts.open(system.spec(self.place, n, s, 1), open=True) for n, s in self._table.items()}
        self._arrays = {name: future.result() for name, future in waiting.items()}

    def close(self) -> None:
        del self._arrays

    def read(self, pieces: list[Piece]) -> None:
        import tensorstore as ts

        waiting = [
            ts.array(p.out, dtype=ts.float32, copy=False).write(self._arrays[p.name][p.index].translate_to[0])
            for p in pieces
        ]
        for future in waiting:
            future.result()


class ZarrEngine(Engine):
    kind = ZarrPython

    def open(self) -> None:
        self._arrays: dict[str, Any] = {}

    def read(self, pieces: list[Piece]) -> None:
        import zarr

        for piece in pieces:
            if piece.name not in self._arrays:
                self._arrays[piece.name] = zarr.open_array(self.place / piece.name, mode="r")
            np.copyto(piece.out, self._arrays[piece.name][piece.index])


ENGINES: tuple[type[Engine], ...] = (
    CkptfsEngine,
    SafetensorsEngine,
    TensorStoreEngine,
    ZarrEngine,
    DcpEngine,
    TorchLoadEngine,
)
SIZE = ["256M"]
RANKS = 8
HUGE_BYTES = 2 << 20
PAGE_BYTES = 4096
BOX = 128  # 128 × 128 float32 are 64 KiB


def rows(table: dict[str, tuple[int, ...]], pick: random.Random) -> list[tuple[str, Index]]:
    n, d = table["embed.weight"]
    at = pick.randrange(8) * (n // 8)
    return [("embed.weight", (slice(at, at + n // 8), slice(0, d)))]


def columns(table: dict[str, tuple[int, ...]], pick: random.Random) -> list[tuple[str, Index]]:
    n, d = table["embed.weight"]
    at = pick.randrange(8) * (d // 8)
    return [("embed.weight", (slice(0, n), slice(at, at + d // 8)))]


def split_dim(name: str) -> int:
    return 1 if name.endswith(("wo.weight", "down.weight")) else 0


def shard(table: dict[str, tuple[int, ...]], pick: random.Random) -> list[tuple[str, Index]]:
    """One of eight tensor-parallel ranks: attention output and mlp.down by columns, norms whole, the rest by rows."""
    rank, found = pick.randrange(RANKS), []
    for name, shape in table.items():
        index = [slice(0, n) for n in shape]
        if len(shape) == 2:
            dim = split_dim(name)
            each = shape[dim] // RANKS
            index[dim] = slice(rank * each, (rank + 1) * each)
        found.append((name, tuple(index)))
    return found


def box(table: dict[str, tuple[int, ...]], pick: random.Random) -> list[tuple[str, Index]]:
    name = pick.choice([name for name, shape in table.items() if len(shape) == 2])
    sides = [min(BOX, n) for n in table[name]]  # smaller in tiny models
    corner = [pick.randrange(n - side + 1) for n, side in zip(table[name], sides, strict=True)]
    return [(name, tuple(slice(a, a + side) for a, side in zip(corner, sides, strict=True)))]


AS_RANKS = "1/8 shard, saved by 8 ranks"  # by ckptfs alone
# Rounds in which everybody has a turn: what slows the machine down for a moment does not meet one of them alone.
ROUNDS, READS_A_ROUND = 3, 10  # at least so many rounds; with no more reads than that in each
# operation → what to read, reads in one repetition (cold, warm)
Choose = Callable[[dict[str, tuple[int, ...]], random.Random], list[tuple[str, Index]]]
OPERATIONS: dict[str, tuple[Choose, int, int]] = {
    "1/8 of the rows": (rows, 4, 8),
    "1/8 of the columns": (columns, 4, 8),
    "1/8 shard of the model": (shard, 1, 3),
    "64 KiB box": (box, 16, 120),
    AS_RANKS: (shard, 6, 3),
}


def save_as_ranks(state: State, folder: Path) -> Path:
    """The model as eight tensor-parallel ranks save it, in one process."""
    import ckptfs
    from ckptfs.shards import LocalShard

    tree: dict[str, Any] = {}
    for name, shape in state.shapes.items():
        whole = state.local[name]
        if len(shape) != 2:
            tree[name] = whole
            continue
        dim = split_dim(name)
        parts, boxes = whole.tensor_split(RANKS, dim), []
        for at, part in enumerate(parts):
            start = [at * (n // RANKS) if d == dim else 0 for d, n in enumerate(shape)]
            boxes.append([start, [x + n for x, n in zip(start, part.shape, strict=True)]])
        tree[name] = LocalShard(list(parts), shape, ["boxes", boxes])
    run = ckptfs.Run(folder / "ckptfs-ranks")
    run.save(0, {"model": tree})
    return folder / "ckptfs-ranks" / f"step-{0:08d}"


def save_split(state: State, folder: Path) -> dict[str, Path]:
    """Operation → the model (or the one weight that is read) as a process saves it that knows what will be read."""
    import ckptfs

    run = ckptfs.Run(folder / "ckptfs-split")
    columns_of = {f"model/{name}": (1, RANKS) for name in state.shapes if split_dim(name) == 1}
    run.save(0, {"model": {"embed.weight": state.local["embed.weight"]}}, split={"*": (1, RANKS)})
    run.save(1, {"model": state.local}, split=columns_of)
    return {f"1/8 {of}": Path(run[step].url) for step, of in enumerate(("of the columns", "shard of the model"))}


def slices(ranks: Ranks) -> None:
    plan = ranks.plan
    SIZE[0] = plan.size
    state = State(shapes(size_of(plan.size)), 0, 1)
    job = Job(state, None, lambda: None)
    table = state.shapes
    engines: list[tuple[str, Engine]] = []
    for kind in ENGINES:
        system = kind.kind()
        if plan.systems and system.name not in plan.systems:
            continue
        reason = system.missing()
        if reason is None and not any(system.name == k().name for k in ALL):
            reason = "unknown"
        if reason is None:
            try:
                folder = ranks.folder / f"{kind.kind.__name__}-0"
                system.save(job, folder)
                engine = kind(system.place(folder))
                _check(engine, state)
                evict(engine.place)
                engines.append((system.name, engine))
                continue
            except Exception as error:
                reason = f"failed: {type(error).__name__}: {error}"
        ranks.skip(system.name, reason)
    raw = ranks.folder / "raw"
    raw.mkdir()
    if not engines:
        return
    engines += [(UNCHECKED, UncheckedEngine(engine.place)) for _, engine in engines if isinstance(engine, CkptfsEngine)]
    as_ranks: list[tuple[str, Engine]] = []
    if any(isinstance(engine, UncheckedEngine) for _, engine in engines):
        place = save_as_ranks(state, ranks.folder)
        as_ranks = [(Ckptfs.name, CkptfsEngine(place)), (UNCHECKED, UncheckedEngine(place))]
        _check(as_ranks[0][1], state)
    split: dict[str, Engine] = {}
    if as_ranks:
        split = {operation: SplitEngine(place) for operation, place in save_split(state, ranks.folder).items()}
        for operation, engine in split.items():
            _check(engine, state, [operation])
    quick = plan.repetitions == 1  # fewer reads, and no warm-up but looking whether everybody reads right
    for turn in range(0 if quick else -1, plan.repetitions):
        ranks.say("warm-up, not counted" if turn < 0 else f"repetition {turn + 1} of {plan.repetitions}")
        for operation, (choose, cold_count, warm_count) in OPERATIONS.items():
            for cache, count in (("cold", cold_count), ("warm", warm_count)):
                if operation == AS_RANKS and not as_ranks:
                    continue
                of = as_ranks if operation == AS_RANKS else engines
                of = [*of, (SPLIT, split[operation])] if operation in split else of
                reads = 1 if turn < 0 else max(1, count // 4) if quick else count
                _once(ranks, of, table, operation, choose, cache, reads, turn, raw)


def _check(engine: Engine, state: State, operations: Iterable[str] = OPERATIONS) -> None:
    """What it reads is what was saved."""
    engine.open()
    for operation in operations:
        pieces = _pieces(OPERATIONS[operation][0](state.shapes, random.Random(3)))[:20]
        engine.read(pieces)
        for piece in pieces:
            if not np.array_equal(piece.out, state.local[piece.name].numpy()[piece.index]):
                raise RuntimeError(f"{piece.name}{piece.index} read wrong")
    engine.close()


def _make_cold(place: Path) -> str:
    """Drop all pages, and look: pages that are mapped, or still on their way from the disk, would stay."""
    said = ""
    for _ in range(200):
        said = evict(place, durable=True)
        left = [path.name for path in files_of(place) if _pages_of(path) * PAGE_BYTES > 1 << 16]
        if not left:
            return said
        time.sleep(0.01)
    raise RuntimeError(f"{left[0]} stays in the page cache")


def _pages_of(path: Path) -> int:
    from ckptfs.storage.directio import cached_pages

    with path.open("rb") as file:
        return cached_pages(file.fileno(), 0, max(1, path.stat().st_size))


_memory: list[np.ndarray[Any, Any]] = []


def _pieces(wanted: list[tuple[str, Index]]) -> list[Piece]:
    """Pieces that lie one after the other in the engine's memory, each on a page of its own."""
    shaped = [(n, i, tuple(s.stop - s.start for s in i)) for n, i in wanted]
    sizes = [4 * math.prod(shape) for *_, shape in shaped]
    ends = list(itertools.accumulate(-(-size // 4096) * 4096 for size in sizes))
    if not _memory or len(_memory[0]) < ends[-1]:
        _memory[:] = [_huge(ends[-1])]
    return [
        Piece(n, i, _memory[0][end - -(-size // 4096) * 4096 :][:size].view(np.float32).reshape(shape))
        for (n, i, shape), size, end in zip(shaped, sizes, ends, strict=True)
    ]


def _huge(nbytes: int) -> np.ndarray[Any, Any]:
    memory = mmap.mmap(-1, -(-nbytes // HUGE_BYTES) * HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    array[:] = 1
    return array


def pages_of(shape: tuple[int, ...], index: Index) -> int:
    """Bytes of the pages that a box of a row-major file touches: what any reader must get from the disk."""
    strides = [4 * math.prod(shape[d + 1 :]) for d in range(len(shape))]
    low = np.zeros((), np.int64)
    for part, stride in zip(index[:-1], strides, strict=False):
        low = low[..., None] + np.arange(part.start, part.stop) * stride
    first = low.reshape(-1) + 4 * index[-1].start
    last = first + 4 * (index[-1].stop - index[-1].start) - 1
    first, last = first // PAGE_BYTES, last // PAGE_BYTES
    shared = np.count_nonzero(first[1:] == last[:-1])
    return int((last - first + 1).sum() - shared) * PAGE_BYTES


def extents_of(place: Path, wanted: list[tuple[str, Index]]) -> int:
    """Bytes of the extents of a step of ckptfs that these boxes lie on."""
    import ckptfs
    from ckptfs.box import Box
    from ckptfs.loadplan import requests

    total = 0
    with ckptfs.Checkpoint(place) as ck:
        for name, index in wanted:
            box = Box(tuple(part.start for part in index), tuple(part.stop for part in index))
            param = ck.param("model/" + name)
            total += sum(one.length for one in requests(param, [box], whole=True, io_bytes=ck.settings.io_bytes))
    return total


def _raw_limit(folder: Path, nbytes: int) -> Callable[[], None]:
    """The raw read of so many bytes, from one file that is written anew when it is too small."""
    path = folder / "raw"
    if not path.exists() or path.stat().st_size < nbytes:
        raw_write(path, nbytes)
    return partial(raw_read, path, nbytes)


def _seconds(action: Callable[[], None]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def _times(
    engine: Engine,
    table: dict[str, tuple[int, ...]],
    choose: Choose,
    cache: str,
    count: int,
    seed: int,
    *,
    settled: bool,
) -> tuple[list[float], str]:
    """How long each of `count` reads took. settled: warm ones were done once before, each, as cold ones always."""
    pick = random.Random(seed)
    times, said = [], cache
    if cache == "warm":
        for path in files_of(engine.place):
            if _pages_of(path) * PAGE_BYTES < path.stat().st_size:
                path.read_bytes()
        engine.open()
        engine.read(_pieces(choose(table, random.Random(seed))))
    for _ in range(count):
        pieces = _pieces(choose(table, pick))
        if cache == "cold":
            engine.open()
            engine.read(pieces)
            engine.close()
            said = _make_cold(engine.place)
            engine.open()
        elif settled:
            engine.read(pieces)
        times.append(_seconds(partial(engine.read, pieces)))
        if cache == "cold":
            engine.close()
    if cache == "warm":
        engine.close()
    return times, said


def _once(
    ranks: Ranks,
    engines: list[tuple[str, Engine]],
    table: dict[str, tuple[int, ...]],
    operation: str,
    choose: Choose,
    cache: str,
    count: int,
    turn: int,
    raw: Path,
) -> None:
    from benchmarks.machine import Cost
    from benchmarks.work import with_limits

    rounds = min(max(ROUNDS, count // READS_A_ROUND), count) if cache == "warm" or operation == AS_RANKS else 1
    times: dict[str, list[float]] = {}
    states: dict[str, str] = {}
    for part in range(rounds):
        seed = zlib.crc32(f"{operation} {turn} {part}".encode())
        wanted = choose(table, random.Random(seed))
        nbytes = sum(4 * math.prod(s.stop - s.start for s in i) for _, i in wanted)
        limits = _limits(engines, table, operation, cache, wanted, nbytes, raw)
        share = count // rounds
        for name, who in shuffled([*engines, *limits], turn * rounds + part):
            if cache == "cold":
                settle()
            if not isinstance(who, Engine):
                who()
                times.setdefault(name, []).extend(_seconds(who) for _ in range(share))
                continue
            try:
                found, said = _times(who, table, choose, cache, share, seed, settled=operation == "64 KiB box")
            except Exception as error:
                ranks.skip(name, f"{operation}, {cache}: failed: {type(error).__name__}: {error}")
                continue
            times.setdefault(name, []).extend(found)
            states[name] = said
    done = []
    for name, taken in times.items():
        p99_s, exact = float(np.quantile(taken, 0.99)), [round(t, 6) for t in taken]
        detail = {"p99_s": p99_s, "count": len(taken), "times_s": exact}
        cost, said = Cost(statistics.median(taken)), states.get(name, cache)
        done.append(ranks.measure(operation, name, nbytes, max(turn, 0), cost, cache=said, detail=detail))
    for measure in with_limits(done) if turn >= 0 else []:
        ranks.note(measure)


def _limits(
    engines: list[tuple[str, Engine]],
    table: dict[str, tuple[int, ...]],
    operation: str,
    cache: str,
    wanted: list[tuple[str, Index]],
    nbytes: int,
    raw: Path,
) -> list[tuple[str, Callable[[], None]]]:
    """What no reader can beat: memory's rate for the bytes; the disk's for them, for their pages, for their extents."""
    if cache == "warm":
        return [("memcpy", partial(copy_bytes, nbytes))]
    limits = []
    if operation != "64 KiB box":
        limits.append(("raw", _raw_limit(raw, nbytes)))
    if operation != AS_RANKS:
        limits.append((PAGES, _raw_limit(raw, sum(pages_of(table[name], index) for name, index in wanted))))
        own = [engine for _, engine in engines if type(engine) is CkptfsEngine]
        limits += [(EXTENTS, _raw_limit(raw, extents_of(engine.place, wanted))) for engine in own]
    return limits
