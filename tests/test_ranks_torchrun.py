"""Ranks as real processes over a real TCPStore: killed, stopped, and with the store's host gone."""

import contextlib
import ctypes
import datetime as dt
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ckptfs.errors import StorageError
from ckptfs.ranks import C10dKV, Group, Round, Timeouts

ROOT = Path(__file__).resolve().parent.parent

UNDER_TORCHRUN = """
import torch.distributed as dist
from ckptfs.ranks import Group, Round
dist.init_process_group("gloo")
group = Group.current()
assert Group.current() is group and group.size == 4
for step in (1, 2):
    with Round.enter(group, "/run", bytes([group.rank]) * 32, step=step, deadline_s=60) as round_:
        if group.rank == 3:
            round_.share("big", b"x" * (9 << 20))
        assert len(round_.fetch("big")) == 9 << 20
        round_.heartbeat("write", 1, 2)
        round_.report(bytes([group.rank]))
        if group.rank == 0:
            round_.publish(None, b"".join(round_.gather()))
        assert round_.verdict() == bytes(range(4))
        print("step", step, "rank", group.rank, "fine")
dist.barrier()
dist.destroy_process_group()
"""

HOST = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""

# Takes part in saves as its lines on stdin say, and answers each with a line of JSON.
RANK = """
import json, signal, sys
from torch.distributed import TCPStore
from ckptfs.errors import CkptError, SaveError
from ckptfs.ranks import Group, Round, Timeouts
from ckptfs.ranks.kv import Pauses
port, rank, size = map(int, sys.argv[1:])
store = TCPStore("127.0.0.1", port, None, False)
group = Group.over(store, rank, size, hosted_by="the test's host")
group.kv._answer_timeout_s = 5.0
timeouts = Timeouts(enter_timeout_s=20, progress_timeout_s=20, silence_timeout_s=3, grace_s=2, beat_s=0.1)
def save(step, hang):
    with Round.enter(group, "/run", b"", step=step, timeouts=timeouts) as round_:
        round_.heartbeat("write", 3 << 20, 8 << 20)
        pauses = Pauses(1)
        while b"write" not in group.kv.get_many([round_.key(f"b/{rank}")])[0]:
            pauses.pause()  # what is said of a rank that dies next depends on its last beat
        print(json.dumps("writing"), flush=True)
        if hang:
            signal.pause()
        sys.stdin.readline()
        round_.report(b"")
        if rank == 0:
            try:
                round_.gather()
            except CkptError as error:
                round_.publish(error)
            else:
                round_.publish()
        round_.verdict()
for line in sys.stdin:
    order = json.loads(line)
    try:
        save(order["step"], order.get("hang"))
        answer = {"ok": True}
    except SaveError as error:
        answer = {"ok": False, "by_rank": error.by_rank, "text": str(error)}
    print(json.dumps(answer), flush=True)
"""


class Peer:
    """One process of the test, spoken to by lines."""

    def __init__(self, program, *args):
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", program, *map(str, args)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env, text=True
        )

    def say(self, order=None):
        self.process.stdin.write((json.dumps(order) if order else "") + "\n")
        self.process.stdin.flush()

    def hear(self):
        return json.loads(self.process.stdout.readline())

    def kill(self):
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def job():
    """A host for the store and four ranks."""
    host = Peer(HOST)
    ranks = []
    try:
        port = host.hear()
        ranks += [Peer(RANK, port, rank, 4) for rank in range(4)]
        yield host, ranks
    finally:
        for peer in [*ranks, host]:
            peer.kill()


def begin(ranks, hanging=(), step=1):
    for rank, peer in enumerate(ranks):
        peer.say({"step": step, "hang": rank in hanging})
    for peer in ranks:
        assert peer.hear() == "writing"


def finish(ranks):
    for peer in ranks:
        peer.say()
    return [peer.hear() for peer in ranks]


def test_four_ranks_under_torchrun(torchrun):
    result = torchrun(4, UNDER_TORCHRUN)
    assert result.output.count("fine") == 8
    assert "timed out" not in result.output


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_killed_or_stopped_is_named_by_all_others(job, number):
    _, ranks = job
    begin(ranks, hanging={2})
    ranks[2].process.send_signal(number)
    answers = finish([ranks[0], ranks[1], ranks[3]])
    assert {answer["ok"] for answer in answers} == {False}
    assert len({answer["text"] for answer in answers}) == 1
    assert answers[0]["by_rank"].keys() == {"2"}
    assert "no sign of life" in answers[0]["by_rank"]["2"]
    assert "in phase 'write' at 3.0 MiB of 8.0 MiB" in answers[0]["by_rank"]["2"]


def test_when_the_leader_is_killed_the_others_name_it(job):
    _, ranks = job
    begin(ranks, hanging={0})
    ranks[0].process.kill()
    for answer in finish(ranks[1:]):
        assert answer["by_rank"].keys() == {"0"}
        assert "no sign of life" in answer["by_rank"]["0"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_when_the_host_of_the_store_is_gone_or_stopped_all_ranks_end_and_say_so(job, number):
    host, ranks = job
    begin(ranks)
    host.process.send_signal(number)
    for answer in finish(ranks):
        assert answer["ok"] is False
        assert "the coordination store" in answer["text"]
        assert "the test's host" in answer["text"]


# --- the store alone -------------------------------------------------------------------------------------------------


@pytest.fixture
def stores(tmp_path):
    distributed = pytest.importorskip("torch.distributed")
    tcp, old = (
        distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, use_libuv=new) for new in (True, False)
    )
    return {
        "tcp": tcp,
        "tcp without libuv": old,
        "prefix": distributed.PrefixStore("of/", distributed.PrefixStore("ours", tcp)),
        "file": distributed.FileStore(str(tmp_path / "store"), 4),
        "hash": distributed.HashStore(),
    }


KINDS = ["tcp", "tcp without libuv", "prefix", "hash"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_store_does_what_a_round_needs(stores, kind):
    kv = C10dKV(stores[kind].clone())
    kv.set("a", b"\0\xff")
    assert kv.get("a", 1) == b"\0\xff"
    assert kv.get_many(["a", "missing", "a"]) == [b"\0\xff", None, b"\0\xff"]
    kv.append("log", b"\0one")
    kv.append("log", b"two")
    assert kv.log("log") == b"\0onetwo"
    assert (kv.add("n", 2), kv.add("n", 3)) == (2, 5)
    assert kv.delete("a") is True
    assert kv.check("a") is False
    assert kv.nonce("x") == kv.nonce("y") == "x"
    with pytest.raises(TimeoutError):
        kv.wait(["a"], 0.05)
    many = {f"many/{number}": bytes([number]) for number in range(100)} | {"empty": b""}
    for key, value in many.items():
        kv.set(key, value)
    assert kv.get_many(list(many)) == list(many.values())
    assert kv.get_many([*many, "missing"]) == [*many.values(), None]
    assert kv.check("missing") is False  # reading left nothing


class Emptied:
    """A store from which somebody removes a key after each request about it."""

    def __init__(self, store):
        self._store, self._other = store.clone(), store.clone()

    def __getattr__(self, name):
        method = getattr(self._store, name)

        def call(*args):
            answer = method(*args)
            for key in args[:1]:
                for one in [key] if isinstance(key, str) else key:
                    self._other.delete_key(one)
            return answer

        return call


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_that_goes_while_it_is_read_holds_nobody_up(stores, kind):
    """As for a rank that is stopped in the middle of a read and goes on when the others have left the round."""
    there, going = C10dKV(stores[kind].clone()), C10dKV(Emptied(stores[kind]), answer_timeout_s=2)
    for keys in (["a"], ["a", "b", "a"]):
        there.set("a", b"\0\xff")
        there.set("b", b"b")
        found = dict(zip(keys, going.get_many(keys), strict=True))
        assert found["a"] in {b"\0\xff", None}
        assert found.get("b") in {b"b", None}
        assert not there.check("a")  # or nothing was tested
    there.set("a", b"\0\xff")
    with pytest.raises(TimeoutError):
        going.get("a", 0.05)
    there.set("b", b"b")
    assert going.get_many(["b"]) == [b"b"]


def test_who_was_held_up_itself_still_takes_the_answer(stores):
    """As a process that was stopped: for longer than the store may take, none of its threads runs."""
    kv = C10dKV(stores["tcp"].clone(), answer_timeout_s=1.0)
    hold_the_interpreter = ctypes.PyDLL(None).usleep
    hold_the_interpreter.argtypes = [ctypes.c_uint]
    assert kv._ask(lambda: hold_the_interpreter(1_100_000)) == 0


@pytest.mark.parametrize("size", [8, 64])
def test_threads_play_ranks_over_a_torch_store(stores, size):
    groups = [Group.over(stores["tcp"], rank, size) for rank in range(size)]
    verdicts = []

    def save(group):
        with Round.enter(group, "/run", bytes([group.rank]), step=1, timeouts=Timeouts(beat_s=0.1)) as round_:
            round_.report(bytes([group.rank]))
            if group.rank == 0:
                round_.publish(None, b"".join(round_.gather()))
            verdicts.append(round_.verdict())

    threads = [threading.Thread(target=save, args=[group]) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert verdicts == [bytes(range(size))] * size


def test_a_user_blocked_in_the_store_does_not_block_us(stores):
    user = stores["tcp"].clone()
    waiting = threading.Thread(target=user.wait, args=[["released"], dt.timedelta(seconds=30)], daemon=True)
    waiting.start()
    kv = C10dKV(user.clone(), prefix="", answer_timeout_s=10)
    kv.set("k", b"v")
    kv.set("released", b"")
    waiting.join(10)
    assert not waiting.is_alive()


def test_a_store_that_raises_is_a_storage_error(stores):
    kv = C10dKV(stores["tcp"].clone())
    with pytest.raises(StorageError, match="is gone"):
        kv._ask(lambda: (_ for _ in ()).throw(RuntimeError("Connection reset by peer")))


def test_a_file_store_is_refused(stores):
    with pytest.raises(StorageError, match="env:// or tcp://"):
        C10dKV(stores["file"])
