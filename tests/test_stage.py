"""From live tensors to stored bytes: what is copied, by the processor and by the code for GPUs, against the whole array."""

import contextlib
import functools

import numpy as np
import pytest
from hypothesis import given, settings

from ckptfs.saveplan import plan
from ckptfs.shards import hold
from ckptfs.stage import Stager, StagingPool, Started, jobs_of
from test_saveplan import descriptions_of, options, worlds

torch = pytest.importorskip("torch")


class OnDevice:
    """A tensor that says that it lies on a GPU. It lies here, so its copies really happen."""

    is_cuda = True
    device = torch.device("cuda", 0)

    def __init__(self, array):
        self._tensor = torch.from_numpy(array)
        self.streams = []

    def resolve_conj(self):
        return self._tensor.resolve_conj()

    def record_stream(self, stream):
        self.streams.append(stream)


class Event:
    def __init__(self):
        self.stream = None

    def record(self, stream):
        self.stream = stream


def expected(layout, full, start, stop):
    out = bytearray()
    for _, valid, padded in layout.parts(start, stop):
        part = np.zeros(padded.shape, full.dtype)
        inside = valid.within(padded.start)
        part[inside.slices] = full[valid.slices]
        out += part.tobytes()
    return bytes(out)


def _ours(streams, device):
    return streams.setdefault(device, "a stream of our own")


def check(made, chosen, on_device):
    arrays, leaves = made
    descs, of_rank = descriptions_of(leaves)
    pool = StagingPool(1 << 20, 1 << 16)
    pool.pin = lambda buffer: None
    for rank, mine in enumerate(leaves):
        one = plan(descs, of_rank, rank, chosen)
        pieces = [hold(a.name, mine[a.name], rank).pieces if a.name in mine else [] for a in one.arrays]
        if on_device:
            pieces = [[(box, OnDevice(data)) for box, data in held] for held in pieces]
        stager = Stager(one, pieces, Started({}), pool)
        stager._stream = functools.partial(_ours, stager._streams)
        for job in jobs_of(one, 4096, 64):
            buffer = pool.acquire()
            buffer.view[:] = b"\xee" * len(buffer.view)
            events = stager.copy(job, buffer)
            assert [event.stream for event in events] == (["a stream of our own"] if on_device else [])
            for part in job.parts:
                array = one.arrays[part.array]
                found = bytes(buffer.view[part.at : part.at + part.stop - part.start])
                assert found == expected(array.layout, arrays[array.name], part.start, part.stop)
                if on_device:  # the allocator is told of every copy that is under way
                    assert any(data.streams for _, data in pieces[part.array])
            pool.release(buffer)
    pool.close()


@settings(max_examples=150)
@given(worlds(), options)
def test_every_job_holds_the_bytes_of_the_array(made, chosen):
    check(made, chosen, on_device=False)


@settings(max_examples=60)
@given(worlds(), options)
def test_the_code_for_gpus_copies_the_same(made, chosen):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        patch.setattr(torch.cuda, "Event", Event)
        check(made, chosen, on_device=True)
