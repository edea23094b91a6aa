"""Where the bytes of an array lie: blocks, chunks, files and logical offsets.

An array is cut into a regular grid of *blocks*. A block is a dense row-major array (edge blocks are padded
with zeros to full size). `many=False`: one file; blocks follow each other in C-order of the block grid, then
comes the shard index. The usual array is one block, so its file is the row-major tensor plus the index.
Arrays split in a later dimension (tensor parallelism) have one block per panel of columns, so every rank's
part is still one contiguous range. `many=True`: every block is a file of its own (object stores, compression).

*Chunks* are Zarr's inner chunks: the chunks of a block, one after the other, are the block's row-major bytes.
*Logical offset*: the blocks' bytes laid end to end; with one file it is the file offset.

Pure integers: no I/O, no arrays of data.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import gcd, isqrt, prod
from typing import TYPE_CHECKING

from ckptfs.box import Box, boxes_of_range, runs, strides_of
from ckptfs.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

CHUNK_BYTES = 8 << 20
MAX_CHUNKS = 1 << 16
PAGE = 4096


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Layout:
    """The geometry of one stored array. An instance that exists is legal."""

    shape: tuple[int, ...]
    itemsize: int
    block: tuple[int, ...]
    chunk: tuple[int, ...]
    many: bool = False
    compressed: bool = False

    def __post_init__(self) -> None:
        n = len(self.shape)
        if len(self.block) != n or len(self.chunk) != n:
            raise FormatError(f"block {self.block} and chunk {self.chunk} do not have the {n} dimensions of the shape")
        if any(d < 0 for d in self.shape) or any(d < 1 for d in self.block + self.chunk):
            raise FormatError(f"negative or empty sizes in shape {self.shape}, block {self.block}, chunk {self.chunk}")
        if any(b % c for b, c in zip(self.block, self.chunk, strict=True)):
            raise FormatError(f"chunk {self.chunk} does not divide block {self.block}")
        if n and not self.many and self.shape[0] > self.block[0]:
            raise FormatError(f"one file needs blocks that span dimension 0: block {self.block}, shape {self.shape}")
        # The chunks of a block concatenated are its row-major bytes: ones, then one free size, then whole.
        free = next((d for d in range(n) if self.chunk[d] != 1), n)
        if any(self.chunk[d] != self.block[d] for d in range(free + 1, n)):
            raise FormatError(f"chunk {self.chunk} does not cut block {self.block} into runs of rows")

    # --- sizes -----------------------------------------------------------------------------------------

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the array itself."""
        return prod(self.shape) * self.itemsize

    @cached_property
    def grid(self) -> tuple[int, ...]:
        """Blocks in every dimension."""
        return tuple(_ceil(d, b) for d, b in zip(self.shape, self.block, strict=True))

    @cached_property
    def blocks(self) -> int:
        return prod(self.grid)

    @cached_property
    def block_bytes(self) -> int:
        return prod(self.block) * self.itemsize

    @cached_property
    def chunk_bytes(self) -> int:
        return prod(self.chunk) * self.itemsize

    @cached_property
    def chunks_per_block(self) -> int:
        return prod(b // c for b, c in zip(self.block, self.chunk, strict=True))

    @cached_property
    def sharded(self) -> bool:
        """Whether a file holds several chunks and an index (Zarr's sharding_indexed)."""
        return self.chunks_per_block > 1 or (not self.many and self.blocks > 1)

    @cached_property
    def exact(self) -> bool:
        """Whether the only file is exactly the tensor's bytes."""
        plain = not self.many and not self.compressed and not self.sharded
        return plain and 0 < self.nbytes == self.logical_bytes

    @cached_property
    def row_major(self) -> bool:
        """Whether logical offsets are those of the row-major array: one block, padded in dimension 0 only."""
        return self.blocks <= 1 and self.block[1:] == self.shape[1:]

    def used_bytes(self, block: int) -> int:
        """Bytes of a block that are stored: whole chunks up to the last row that the array has."""
        if not self.many or not self.shape:
            return self.block_bytes
        i = self._index(block)[0]
        rows = min(self.block[0], self.shape[0] - i * self.block[0])
        row_bytes = self.block_bytes // self.block[0]
        rows = _ceil(rows, self.chunk[0]) * self.chunk[0]
        return rows * row_bytes

    def extent_bytes(self, most_bytes: int) -> int:
        """What the extents of a raw file are cut at multiples of: at most `most_bytes`, and a third of that at least.

        The halves of the rows, their quarters, eighths and so on, if they are alike and larger than an extent, begin at
        such multiples: who loads part of what another number of ranks saved reads no extent for a few rows of it.
        No extent ends inside an element.
        """
        most_bytes = max(self.itemsize, most_bytes - most_bytes % self.itemsize)
        if self.nbytes == 0 or not self.shape or self.logical_bytes <= most_bytes:
            return most_bytes
        rows, even = min(self.shape[0], self.block[0]), self.block_bytes // self.block[0]
        if even <= most_bytes:
            if rows % 2:
                return most_bytes
            even *= rows // (rows & -rows)
            while 2 * even <= most_bytes:
                even *= 2
        least = _ceil(even, most_bytes)
        fitting = (even // n for n in range(least, 2 * least) if even % (n * self.itemsize) == 0)
        return next(fitting, most_bytes)

    @cached_property
    def index_bytes(self) -> int:
        """Length of the shard index behind the data of a file: 16 bytes a chunk and a crc32c."""
        if not self.sharded:
            return 0
        return 16 * self.chunks_per_block * (1 if self.many else self.blocks) + 4

    def file_bytes(self, file: int = 0) -> int:
        """Size of a raw file, the index included."""
        if self.many:
            return self.used_bytes(file) + self.index_bytes
        return self.blocks * self.block_bytes + self.index_bytes

    @cached_property
    def logical_bytes(self) -> int:
        """The logical space: every block at its full size."""
        return self.blocks * self.block_bytes

    # --- blocks and files ------------------------------------------------------------------------------

    def _index(self, block: int) -> tuple[int, ...]:
        index = []
        for stride in strides_of(self.grid):
            at, block = divmod(block, stride)
            index.append(at)
        return tuple(index)

    def block_origin(self, block: int) -> tuple[int, ...]:
        return tuple(i * b for i, b in zip(self._index(block), self.block, strict=True))

    def block_box(self, block: int) -> Box:
        """The elements of the array that lie in a block (clipped at the array's edges)."""
        origin = self.block_origin(block)
        stop = tuple(min(o + b, d) for o, b, d in zip(origin, self.block, self.shape, strict=True))
        return Box(origin, stop)

    def blocks_of(self, box: Box) -> Iterator[int]:
        """The blocks that a box touches, ascending."""
        if box.size == 0:
            return
        strides = strides_of(self.grid)
        ranges = (range(a // b, _ceil(z, b)) for a, z, b in zip(box.start, box.stop, self.block, strict=True))
        for index in product(*ranges):
            yield sum(i * s for i, s in zip(index, strides, strict=True))

    def key(self, file: int = 0) -> str:
        """The Zarr chunk key of a file: `c.0.1` (separator '.'), `c` for 0-d arrays."""
        return ".".join(("c", *map(str, self._index(file)))) if self.many else self._only_key

    @cached_property
    def _only_key(self) -> str:
        return ".".join(("c", *("0" for _ in self.shape)))

    @property
    def files(self) -> int:
        if self.nbytes == 0:
            return 0
        return self.blocks if self.many else 1

    # --- boxes and logical ranges ----------------------------------------------------------------------

    def ranges(self, box: Box) -> list[tuple[int, int]]:
        """The logical byte ranges of a box, merged, ascending; a box at the array's edge owns the padding there."""
        if box.size == 0:
            return []
        out: list[tuple[int, int]] = []
        for block in self.blocks_of(box):
            origin = self.block_origin(block)
            inner = (box & self.block_box(block)).within(origin)
            # Whoever holds the last elements also stores the padding behind them.
            stop = tuple(
                b if o + s == d else s for o, s, d, b in zip(origin, inner.stop, self.shape, self.block, strict=True)
            )
            base = block * self.block_bytes
            used = base + self.used_bytes(block)
            for a, z in runs(Box(inner.start, stop), self.block):
                a, z = base + a * self.itemsize, min(base + z * self.itemsize, used)
                if a >= z:
                    continue
                if out and out[-1][1] == a:
                    out[-1] = (out[-1][0], z)
                else:
                    out.append((a, z))
        return out

    def parts(self, start: int, stop: int) -> Iterator[tuple[int, Box, Box]]:
        """What a logical byte range holds: (byte offset in the range, box of the array, box in padded coordinates).

        The range must consist of whole elements. The padded box is what the bytes look like (its row-major bytes
        stand at that offset); the array's box is its valid part, at the same start, possibly empty.
        """
        size = self.itemsize
        at = start
        while at < stop:
            block, inside = divmod(at, self.block_bytes)
            end = min(stop, (block + 1) * self.block_bytes)
            origin = self.block_origin(block)
            first = inside // size
            offset = at - start
            for inner in boxes_of_range(first, first + (end - at) // size, self.block):
                padded = Box(
                    tuple(a + o for a, o in zip(inner.start, origin, strict=True)),
                    tuple(a + o for a, o in zip(inner.stop, origin, strict=True)),
                )
                edges = zip(padded.start, padded.stop, self.shape, strict=True)
                valid = Box(padded.start, tuple(max(a, min(z, d)) for a, z, d in edges))
                yield offset, valid, padded
                offset += inner.size * size
            at = end

    # --- chunks ----------------------------------------------------------------------------------------

    def chunk_used(self, block: int, number: int) -> bool:
        """Whether chunk `number` of a block holds any element of the array."""
        return number * self.chunk_bytes < self.used_bytes(block)

    def index_entries(self, file: int, stored: Sequence[int] | None = None) -> list[tuple[int, int]]:
        """(offset, length) of every chunk of a file in the order of Zarr's shard index; (-1, -1): not stored.

        `stored`: lengths of the file's used chunks when compressed.
        """
        per_block = tuple(b // c for b, c in zip(self.block, self.chunk, strict=True))
        if self.many:
            used = self.used_bytes(file) // self.chunk_bytes
            lengths = list(stored) if stored is not None else [self.chunk_bytes] * used
            entries, at = [], 0
            for number in range(self.chunks_per_block):
                if number < len(lengths):
                    entries.append((at, lengths[number]))
                    at += lengths[number]
                else:
                    entries.append((-1, -1))
            return entries
        outer = tuple(g * p for g, p in zip(self.grid, per_block, strict=True))
        grid_strides, chunk_strides = strides_of(self.grid), strides_of(per_block)
        entries = []
        for index in product(*map(range, outer)):
            block = sum((i // p) * s for i, p, s in zip(index, per_block, grid_strides, strict=True))
            number = sum((i % p) * s for i, p, s in zip(index, per_block, chunk_strides, strict=True))
            entries.append((block * self.block_bytes + number * self.chunk_bytes, self.chunk_bytes))
        return entries


def _band(shape: Sequence[int], itemsize: int, chunk_bytes: int) -> tuple[int, ...]:
    """A chunk of about `chunk_bytes` that cuts a dense array of this shape into runs of rows."""
    shape = tuple(max(1, d) for d in shape)
    for d in range(len(shape)):
        row = prod(shape[d + 1 :]) * itemsize
        if row * shape[d] <= chunk_bytes:
            return (1,) * d + shape[d:]
        if row > chunk_bytes and d + 1 < len(shape):
            continue
        rows = max(1, chunk_bytes // row)
        if d == 0:
            # Dimension 0 may be padded: equal bands keep the padding under one row a band.
            # Without any, if a divisor is near: the rank with the last rows would have to write all of it.
            best = _divisor(shape[0], rows)
            rows = best if best * 2 > rows else _ceil(shape[0], _ceil(shape[0], rows))
        else:
            # Later dimensions may not be padded; without a divisor near the goal a larger chunk is the lesser evil.
            best = _divisor(shape[d], rows)
            rows = best if best * 8 > rows else shape[d]
        return (1,) * d + (rows, *shape[d + 1 :])
    return shape


def choose(
    shape: Sequence[int],
    itemsize: int,
    boxes: Iterable[Box] = (),
    *,
    flat: bool = False,
    many: bool = False,
    compressed: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
    block_bytes: int = 64 << 20,
) -> Layout:
    """The layout for an array of which writers hold these boxes (`flat`: ranges of the row-major array)."""
    shape = tuple(shape)
    solid = tuple(max(1, d) for d in shape)
    steps = _common_steps(shape, boxes)
    if many:
        block = list(solid)
        for d, step in enumerate(steps):
            block[d] = min(step or solid[d], solid[d])
        # Blocks are objects: cut dimension 0 further until one is of a handy size.
        row = prod(block[1:]) * itemsize
        limit = max(1, block_bytes // row)
        if block and block[0] > limit:
            best = _divisor(block[0], limit)
            block[0] = limit if steps[0] is None else best if best * 16 > limit else block[0]
        chunk = _band(block, itemsize, chunk_bytes)
        if chunk and block[0] % chunk[0]:
            block[0] = _ceil(block[0], chunk[0]) * chunk[0] if steps[0] is None else block[0]
            if block[0] % chunk[0]:
                chunk = (_divisor(block[0], chunk[0]), *chunk[1:])
        return Layout(shape, itemsize, tuple(block), chunk, many=True, compressed=compressed)
    block = list(solid)
    if not flat and any(step is not None for step in steps[1:]):
        panel = [step or solid[d] for d, step in enumerate(steps)]
        panel[0] = solid[0]
        chunk = _band(panel, itemsize, chunk_bytes)
        panels = prod(_ceil(d, p) for d, p in zip(solid, panel, strict=True))
        pieces = panels * prod(_ceil(p, c) for p, c in zip(panel, chunk, strict=True))
        # Very narrow panels would make more chunks than strided writes make runs: then stay row-major.
        if pieces <= min(MAX_CHUNKS, max(4096, prod(solid[:-1]))):
            block = panel
    chunk = _band(block, itemsize, chunk_bytes)
    if block:
        block[0] = _ceil(block[0], chunk[0]) * chunk[0]
    return Layout(shape, itemsize, tuple(block), chunk)


def _divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit`."""
    # In pairs, up to the root: counting down from `limit` takes a second for a prime of ten digits.
    pairs = ((d, number // d) for d in range(1, isqrt(number) + 1) if number % d == 0)
    return max(d for pair in pairs for d in pair if d <= limit)


def _common_steps(shape: Sequence[int], boxes: Iterable[Box]) -> list[int | None]:
    """For each dimension the largest step that every inner boundary is a multiple of; None: never split."""
    steps: list[int | None] = [None] * len(shape)
    for box in boxes:
        if box.size == 0:
            continue
        for d, length in enumerate(shape):
            for edge in (box.start[d], box.stop[d]):
                if 0 < edge < length:
                    steps[d] = gcd(steps[d] or 0, edge)
    return steps
