"""The numbers one may turn, in one frozen object. Sizes and times carry their unit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Settings:
    """Defaults are what measured best on ordinary disks; see docs/adr for the figures."""

    chunk_bytes: int = 8 * MIB  # Zarr inner chunk, what stock readers fetch at once
    block_bytes: int = 64 * MIB  # object size where a block is an object of its own
    extent_bytes: int = MIB  # what one checksum covers; grows with the checkpoint, see saveplan
    io_bytes: int = 8 * MIB  # one request to the disk
    buffer_bytes: int = 230 * MIB  # for copies, per rank: with all else that a save needs it stays within 256 MiB
    async_buffer_bytes: int | None = None  # the same for asynchronous saves; None: what the machine allows, see stage
    read_buffer_bytes: int = 128 * MIB  # scratch for reads that do not land in place
    write_threads: int = 8
    background_bytes_per_s: int | None = 500_000_000  # for each spare core, while nobody waits for a save; None: any
    read_threads: int = 4  # bulk reads have more, see read.py
    small_file_bytes: int = 256 * 1024  # below: no reservation, no direct I/O, written in one call
    enter_timeout_s: float = 600.0  # how long the leader waits for a rank to enter a save
    progress_timeout_s: float = 120.0  # how long a rank may stand still before a save is given up
    silence_timeout_s: float = 30.0  # how long a rank may give no sign of life (dead, stopped) before that
    # Whether a rank may write what another holds: blocks that several hold parts of, and small pieces of neighbours.
    # Ranks then talk to each other over TCP. The same on all ranks.
    handover: bool = True
    handover_ranks: int = 16  # neighbours put small pieces together where an array has so many shards or more
    files_per_rank: int = 256  # how many files they aim at
    handover_host: str = ""  # where the others reach this rank; empty: by the way that leads to MASTER_ADDR
    # Whether ranks that hold the same write the part of one that fails. "always": each rank of a background save copies
    # that part too, before training goes on, if the staging memory has room. "free": only while nobody waits, so not in
    # snapshots. "off": the save fails.
    takeover: Literal["always", "free", "off"] = "always"
