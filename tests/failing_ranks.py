"""What jobs under torchrun share in which ranks stop, die or fail in the middle of a save. Imported by their programs."""

import os
import signal
import sys
import time

import torch.distributed as dist

import ckptfs
from spreads import NoSync


def begin():
    """(rank, size, folder, process ids of all ranks) of this job, which begins here."""
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size(), sys.argv[1], gathered(os.getpid())


def gathered(value):
    """What every rank has, on every rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class AtWrite(NoSync):
    """Does something instead of the n-th write. Nothing is made durable: a slow disk must not look like a stuck rank."""

    def __init__(self, action, at):
        self.action, self.at, self.writes = action, at, 0

    def pwrite(self, fd, data, offset):
        self.writes += 1
        if self.writes == self.at:
            self.action()
        return super().pwrite(fd, data, offset)


def stop():
    """As a debugger or a frozen machine does it."""
    os.kill(os.getpid(), signal.SIGSTOP)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def caught(action):
    """What a save came to: its error, or which ranks were lost."""
    began = time.monotonic()
    try:
        result = action()
    except ckptfs.SaveError as error:
        return {"text": str(error), "ranks": sorted(error.by_rank), "took_s": time.monotonic() - began}
    return {"lost": result.lost, "took_s": time.monotonic() - began} if result else None
