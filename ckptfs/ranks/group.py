"""Which ranks save together, and the store between them.

The keys live in the store that `init_process_group` made, under a prefix. It is new after an elastic restart: a store
in which another attempt's keys are left breaks torch's own handshake before it could confuse ours (see docs/async.md).
TORCHELASTIC_RESTART_COUNT does not tell attempts apart: agents that joined later count differently.
What a rank remembers of earlier rounds belongs to one store, known by a nonce in it, so it survives
destroy_process_group() and a new group over the same store, and is forgotten with another store.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ckptfs.errors import CkptError

from .kv import KV, C10dKV, MemoryKV


@dataclass
class TopicMemory:
    """What this rank remembers of a topic between rounds."""

    last_seq: int = 0  # the newest round it took part in, or was told the end of
    unswept: list[int] = field(default_factory=list)  # leader: rounds that may have left keys
    # Leader: whether training waited → target → bytes per second in good saves.
    usual: dict[bool, dict[str, float]] = field(default_factory=dict)


@dataclass
class Group:
    """The ranks that save together, as one of them sees it."""

    rank: int
    size: int
    kv_factory: Callable[[], KV] | None = None
    host: str = ""
    store_rank: int | None = None  # the rank whose process hosts the store, if it is one of them
    memory: dict[str, TopicMemory] = field(default_factory=dict)
    _kv: KV | None = None

    @property
    def kv(self) -> KV:
        if self._kv is None:
            if self.kv_factory is None:
                raise CkptError("a group of one process has no store to talk over")
            self._kv = self.kv_factory()
        return self._kv

    def topic(self, name: str) -> TopicMemory:
        return self.memory.setdefault(name, TopicMemory())

    @classmethod
    def solo(cls) -> Group:
        return cls(0, 1, None, socket.gethostname())

    @classmethod
    def threads(cls, size: int) -> list[Group]:
        """A group whose ranks are threads of this process."""
        kv = MemoryKV()
        return [cls(rank, size, lambda: kv, socket.gethostname()) for rank in range(size)]

    @classmethod
    def over(
        cls, store: Any, rank: int, size: int, *, hosted_by: str = "its host", store_rank: int | None = None
    ) -> Group:
        """A group over a torch store of the caller's, which is cloned."""
        # The clone is a connection of our own: the caller's may be locked by a blocking wait.
        kv = C10dKV(store.clone(), hosted_by=hosted_by)
        memory = _memory_by_nonce.setdefault(kv.nonce(secrets.token_hex(8)), {})
        # A process is one rank, except in tests that let threads play ranks over one store.
        return cls(rank, size, lambda: kv, socket.gethostname(), store_rank, memory.setdefault(rank, {}), kv)

    @classmethod
    def current(cls) -> Group:
        """All ranks of torch.distributed if it is initialised, else this process alone."""
        if "torch.distributed" not in sys.modules:  # never loaded, so never initialised
            return cls.solo()
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return cls.solo()
        return _world_group(dist.group.WORLD)


_memory_by_nonce: dict[str, dict[int, dict[str, TopicMemory]]] = {}
_world: list[tuple[Any, Group]] = []  # the process group last seen, and what was made for it
_world_lock = threading.Lock()


def _world_group(world: Any) -> Group:
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    with _world_lock:
        if _world and _world[0][0] is world:
            return _world[0][1]
        if _world and isinstance(_world[0][1].kv, C10dKV):
            _world[0][1].kv.close()
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        group = Group.over(
            # torch has no public way to the store that init_process_group made.
            distributed_c10d._get_default_store(),  # noqa: SLF001
            dist.get_rank(),
            dist.get_world_size(),
            hosted_by="the torchrun agent that hosts it" if agent else "the process that hosts it (rank 0)",
            store_rank=None if agent else 0,
        )
        _world[:] = [(world, group)]
        return group
