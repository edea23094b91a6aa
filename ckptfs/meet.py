"""What the ranks of a save tell each other before anything is written: from many descriptions to one plan.

Every rank says hello with digests (what it holds, its tree, the plan it remembers); only descriptions that differ
travel, and none when all ranks remember the plan that these digests led to. A rank that could not describe its tree
says so in its hello, so that nobody waits for it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NoReturn

from ckptfs import saveplan
from ckptfs.errors import CkptError
from ckptfs.manifest import digest
from ckptfs.ranks.kv import Pauses
from ckptfs.stage import Job, jobs_of

if TYPE_CHECKING:
    from ckptfs.commit import Documents
    from ckptfs.ranks import Group, Round
    from ckptfs.saveplan import Options, SavePlan
    from ckptfs.settings import Settings

_NO_KEY = b"\0" * 16
_KEPT = 256  # so many different descriptions are kept at most: where there are more, nearly nothing is replicated
UNFIT = b"unfit to be saved"  # the hello of a rank whose tree cannot be described


class PlanCache:
    """The last plan of a run, with a key that cannot lie: the digests of all ranks' descriptions and the options."""

    def __init__(self) -> None:
        self.key = _NO_KEY
        self.plan: SavePlan | None = None
        self.jobs: list[Job] = []
        self.inputs: saveplan.Inputs | None = None  # what the plans of other ranks follow from
        self.dense: list[Job] | None = None  # the jobs that fill their buffers: worked out when first needed
        self.spare: list[Job] | None = None  # what this rank may copy for another: worked out when first needed
        self.documents: Documents | None = None  # the leader's

    def forget(self) -> None:
        self.key, self.plan, self.jobs, self.inputs = _NO_KEY, None, [], None
        self.spare = self.dense = self.documents = None


class Description:
    """What one rank brings to a save: its arrays, the arrays it found not to shrink, its tree."""

    def __init__(self, arrays: bytes, raw_names: list[str], node: bytes) -> None:
        self.arrays, self.raw, self.node = arrays, "\n".join(raw_names).encode(), node
        self.own = digest(arrays + b"\0" + self.raw)

    def hello(self, cache: PlanCache) -> bytes:
        return self.own + digest(self.node) + cache.key

    def pack(self) -> bytes:
        return len(self.raw).to_bytes(8, "little") + self.raw + self.arrays


def _unpack(blob: bytes) -> tuple[set[str], bytes]:
    size = int.from_bytes(blob[:8], "little")
    raw = blob[8 : 8 + size]
    return (set(raw.decode().split("\n")) if raw else set()), blob[8 + size :]


def await_failure(round_: Round, size: int, limit_s: float) -> NoReturn:
    """A rank has said that it will fail: wait for the error that every rank raises."""
    pauses, ends_s = Pauses(size), time.monotonic() + limit_s
    while time.monotonic() < ends_s:
        round_.check()
        pauses.pause()
    raise CkptError("another rank could not describe its tree, and did not say why")


def agree(
    round_: Round, group: Group, cache: PlanCache, mine: Description, options: Options, settings: Settings
) -> tuple[SavePlan, list[Job]]:
    """The plan, the same on every rank, and this rank's jobs."""
    if UNFIT in round_.hellos:
        await_failure(round_, group.size, settings.progress_timeout_s)
    digests = [hello[:16] for hello in round_.hellos]
    key = digest(b"".join(digests) + repr(options).encode() + repr(settings.io_bytes).encode())
    if cache.plan is not None and all(hello[32:48] == key for hello in round_.hellos):
        return cache.plan, cache.jobs
    distinct = list(dict.fromkeys(digests))
    if group.size > 1 and digests.index(mine.own) == group.rank:
        round_.share(mine.own.hex(), mine.pack())
    descriptions, votes = [], []
    for one in distinct:
        vote, arrays = _unpack(mine.pack() if one == mine.own else round_.fetch(one.hex()))
        descriptions.append(saveplan.parse(arrays))
        votes.append(vote)
    options = saveplan.with_raw(options, descriptions, votes)
    where = {one: i for i, one in enumerate(distinct)}
    of_rank = [where[d] for d in digests]
    plan = saveplan.plan(descriptions, of_rank, group.rank, options)
    jobs = jobs_of(plan, settings.io_bytes, settings.small_file_bytes)
    cache.inputs = saveplan.Inputs(descriptions, of_rank, options) if len(distinct) <= _KEPT else None
    cache.plan, cache.jobs, cache.key = plan, jobs, key
    cache.spare = cache.dense = cache.documents = None
    return plan, jobs
