"""Following a run: every step once and in order, nothing deleted under a reader, nobody pinned after death."""

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import ckptfs
from ckptfs import commit, lease
from ckptfs.errors import NotFoundError
from ckptfs.storage import FsspecStore, LocalStore, MemoryStore
from ckptfs.watch import _News, pinned, wait, watch

ROOT = Path(__file__).resolve().parent.parent


def save(run, step):
    run.save(step, {"w": np.full((64, 33), step, "i4"), "b": np.full(5, step, "i8"), "step": step})


@pytest.fixture(params=["local", "memory", "fsspec"])
def run(request, tmp_path):
    url = tmp_path / "run" if request.param == "local" else f"memory://{request.node.name}"
    if request.param == "fsspec":  # another store of objects, reached as S3 is
        url = FsspecStore(f"memory:///{request.node.name}")
    with ckptfs.Run(url) as run:
        yield run


def delete(run, step):
    return lease.discard(run.store, commit.step_name(step))


# --- leases ----------------------------------------------------------------------------------------------


def test_a_leased_step_is_not_deleted(run):
    save(run, 1)
    with lease.take(run.store, "step-00000001"), lease.take(run.store, "step-00000001") as second:
        assert lease.held(run.store, "step-00000001")
        assert not delete(run, 1)
        second.release()
        second.release()
        assert not delete(run, 1)
        assert run.steps() == [1]
    assert not lease.held(run.store, "step-00000001")
    assert delete(run, 1)
    assert run.steps() == []


def test_followers_on_s3(s3_server):
    """Two clients of a real server: one saves and deletes behind the other, which misses nothing."""
    url = f"{s3_server.fresh_url()}/run"
    saver, reader = ckptfs.Run(url, **s3_server.options), ckptfs.Run(url, **s3_server.options)
    save(saver, 1)
    found = reader.watch(every=True, idle_timeout_s=30)
    first = next(found)
    for step in (2, 3, 4):
        save(saver, step)
        assert not any(delete(saver, old) for old in saver.steps()[:-1])
    got = [first.step]
    for checkpoint in found:
        assert (checkpoint["w"].numpy() == checkpoint.step).all()
        got.append(checkpoint.step)
        assert delete(saver, checkpoint.step - 1)
        assert not delete(saver, checkpoint.step)
        if checkpoint.step == 4:
            break
    found.close()
    assert got == [1, 2, 3, 4]
    assert delete(saver, 4)
    assert saver.store.children(lease.FOLDER)[1] == []


def test_what_is_not_there_cannot_be_leased(run):
    with pytest.raises(NotFoundError, match="step-00000001 is not a committed step"):
        lease.take(run.store, "step-00000001")
    assert not lease.held(run.store, "step-00000001")
    assert delete(run, 1)  # nothing to delete is no error
    assert list(lease._live(run.store)) == []


def test_nobody_can_start_while_a_step_is_deleted(run):
    save(run, 1)
    with lease.deleting(run.store, "step-00000001") as free:
        assert free
        taken = threading.Event()
        failed = []

        def taker():
            try:
                lease.take(run.store, "step-00000001").release()
            except NotFoundError as error:
                failed.append(error)
            taken.set()

        thread = threading.Thread(target=taker)
        thread.start()
        commit.discard(run.store, "step-00000001")
    thread.join(20)
    assert taken.is_set()
    assert failed


@pytest.mark.parametrize("again", [False, True])
def test_a_step_deleted_between_opening_and_locking(tmp_path, monkeypatch, again):
    """The lock would be on a file that is no longer the step's: it is not taken for a lease."""
    run = ckptfs.Run(tmp_path / "run")
    save(run, 1)
    lock = lease._lock

    def late(fd, how):
        monkeypatch.setattr(lease, "_lock", lock)
        commit.discard(run.store, "step-00000001")
        if again:
            save(run, 1)
        return lock(fd, how)

    monkeypatch.setattr(lease, "_lock", late)
    if again:
        with lease.take(run.store, "step-00000001"):
            assert not delete(run, 1)
    else:
        with pytest.raises(NotFoundError):
            lease.take(run.store, "step-00000001")


def test_a_follower_pins_what_comes_after_it(run):
    for step in (1, 2, 3):
        save(run, step)
    with lease.follow(run.store, 1) as follower:
        assert delete(run, 1)
        assert not delete(run, 2)
        assert not delete(run, 3)
        follower.move(2)
        assert delete(run, 2)
        assert not delete(run, 3)
    assert delete(run, 3)


def test_object_leases_expire_and_are_renewed():
    store = MemoryStore("expire")
    run = ckptfs.Run(store)
    save(run, 1)
    path = f"{lease.FOLDER}/dead.json"
    store.write(path, json.dumps({"step": "step-00000001", "expires": 1.0, "who": "a machine that died"}).encode())
    store.write(f"{lease.FOLDER}/junk.json", b"not json")
    assert not lease.held(store, "step-00000001")
    assert not store.exists(path)  # long dead: swept
    renewed = threading.Event()

    class Watched(MemoryStore):
        writes = 0

        def write(self, path, data):
            super().write(path, data)
            self.writes += 1
            if self.writes == 3:
                renewed.set()

    with lease.take(Watched("expire"), "step-00000001", ttl_s=0.03):
        assert renewed.wait(20)
    assert not lease.held(store, "step-00000001")


def test_a_dead_process_holds_nothing(tmp_path):
    run = ckptfs.Run(tmp_path / "run")
    save(run, 1)
    program = (
        "import sys; from ckptfs import lease; from ckptfs.storage import LocalStore\n"
        "held = lease.take(LocalStore(sys.argv[1]), 'step-00000001'); print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "run")]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        assert not delete(run, 1)
        holder.send_signal(signal.SIGKILL)
        holder.wait(20)
        assert delete(run, 1)


def test_leases_write_nothing_on_a_file_system(tmp_path):
    run = ckptfs.Run(tmp_path / "run")
    save(run, 1)
    before = sorted(path for path, _ in run.store.list())
    with lease.take(run.store, "step-00000001"):
        assert sorted(path for path, _ in run.store.list()) == before


def test_a_forgotten_lease_is_given_back(tmp_path):
    run = ckptfs.Run(tmp_path / "run")
    save(run, 1)
    held = lease.take(run.store, "step-00000001")
    assert lease.held(run.store, "step-00000001")
    del held
    gc.collect()
    assert not lease.held(run.store, "step-00000001")


@pytest.mark.parametrize("kind", [lease.FileLease, lease.ObjectLease])
def test_a_forked_child_lets_go_of_nothing(tmp_path, kind):
    run = ckptfs.Run(tmp_path / "run")
    save(run, 1)
    name = "step-00000001"
    with lease.take(run.store, name) if kind is lease.FileLease else lease.follow(run.store, 0) as held:
        assert isinstance(held, kind)
        child = os.fork()
        if not child:
            held.release()
            os._exit(0)
        os.waitpid(child, 0)
        assert lease.held(run.store, name)
    assert not lease.held(run.store, name)


def test_where_flock_does_not_work_objects_do(tmp_path, monkeypatch):
    def refuse(fd, how):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(lease.fcntl, "flock", refuse)
    run = ckptfs.Run(tmp_path / "run")
    save(run, 1)
    with lease.take(run.store, "step-00000001") as held:
        assert isinstance(held, lease.ObjectLease)
        assert lease.held(run.store, "step-00000001")
        assert not delete(run, 1)
    assert delete(run, 1)


# --- watch and wait --------------------------------------------------------------------------------------


def steps_of(found):
    return [checkpoint.step for checkpoint in found]


def test_what_is_there_comes_in_order(run):
    for step in (3, 1, 20, 100000000):
        save(run, step)
    assert steps_of(run.watch(idle_timeout_s=0)) == [1, 3, 20, 100000000]
    assert steps_of(run.watch(after=3, idle_timeout_s=0)) == [20, 100000000]
    assert steps_of(run.watch(after="latest", idle_timeout_s=0)) == []
    assert steps_of(run.watch(newest=True, idle_timeout_s=0)) == [100000000]
    with pytest.raises(ckptfs.MismatchError, match="after is"):
        next(run.watch(after="7"))


def test_new_steps_arrive_while_waiting(run):
    def saver():
        for step in range(1, 8):
            save(run, step)

    thread = threading.Thread(target=saver)
    found = run.watch(after=2, idle_timeout_s=20)
    thread.start()
    got = []
    for checkpoint in found:
        got.append(checkpoint.step)
        assert (checkpoint["w"].numpy() == checkpoint.step).all()
        if checkpoint.step == 7:
            break
    thread.join()
    assert got == [3, 4, 5, 6, 7]


def test_the_step_in_hand_is_pinned_and_then_not(run):
    save(run, 1)
    save(run, 2)
    found = run.watch(idle_timeout_s=0)
    with next(found):
        assert not delete(run, 1)
        next(found)
        assert delete(run, 1)
        assert not delete(run, 2)
    found.close()
    assert delete(run, 2)


def test_wait(run):
    assert run.wait(timeout_s=0) is None
    save(run, 5)
    save(run, 6)
    with run.wait(after=4, timeout_s=0) as checkpoint:
        assert checkpoint.step == 5
        assert not delete(run, 5)
    assert delete(run, 5)
    with wait(run, None, 0, newest=True) as checkpoint:
        assert checkpoint.step == 6
    assert run.wait(after="latest", timeout_s=0.01) is None


def test_wait_wakes_up_for_another_machine(tmp_path):
    """The kernel says nothing of what other machines do: the interval must find it."""
    run = ckptfs.Run(tmp_path / "run")
    save(run, 1)
    news = _News(run.store, None)
    news._root = None
    news._disarm()
    assert not news.told
    timer = threading.Timer(0.05, save, [run, 2])
    timer.start()
    from ckptfs.watch import _next

    with _next(run, 1, news, newest=False, timeout_s=20) as checkpoint:
        assert checkpoint.step == 2
    timer.join()


def test_the_folder_may_come_later(tmp_path):
    run = ckptfs.Run(tmp_path / "later" / "run")
    timer = threading.Timer(0.1, save, [run, 4])
    timer.start()
    with run.wait(timeout_s=20) as checkpoint:
        assert checkpoint.step == 4
    timer.join()


def test_an_unfinished_step_is_waited_for():
    """On an object store the folder is there long before the manifest."""
    run = ckptfs.Run("memory://unfinished")
    save(run, 2)
    manifest = run.store.read("step-00000002/manifest.json")
    run.store.remove("step-00000002/manifest.json")
    assert run.wait(timeout_s=0) is None
    timer = threading.Timer(0.1, run.store.write, ["step-00000002/manifest.json", manifest])
    timer.start()
    with run.wait(timeout_s=20) as checkpoint:
        assert checkpoint.step == 2
    timer.join()


class Vanishing(LocalStore):
    """Deletes steps 2 and 3 between the listing and the lease."""

    def children(self, prefix=""):
        found = super().children(prefix)
        if not prefix:
            for name in ("step-00000002", "step-00000003"):
                commit.discard(LocalStore(self.root), name)
        return found


def test_a_step_deleted_before_it_was_leased_is_reported(tmp_path):
    for step in (1, 2, 3, 4):
        save(ckptfs.Run(tmp_path / "run"), step)
    skipped = []
    run = ckptfs.Run(Vanishing(tmp_path / "run"))
    assert steps_of(watch(run, idle_timeout_s=0, on_skipped=skipped.append)) == [1, 4]
    assert skipped == []  # they were gone before they were asked for the second time
    save(ckptfs.Run(tmp_path / "run"), 2)
    assert steps_of(watch(run, 1, idle_timeout_s=0, on_skipped=skipped.append)) == [4]
    assert skipped == [2]


def test_stop_ends_it(run):
    stop = threading.Event()
    found = run.watch(stop=stop)
    timer = threading.Timer(0.1, stop.set)
    timer.start()
    assert list(found) == []
    timer.join()


def test_no_descriptor_is_left(tmp_path):
    run = ckptfs.Run(tmp_path / "run")
    save(run, 1)
    assert steps_of(run.watch(idle_timeout_s=0)) == [1]
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        found = run.watch(every=True)
        next(found)
        found.close()
        pinned(run, 1).close()
    assert len(os.listdir("/proc/self/fd")) <= before
    assert run.store.children(".leases")[1] == []


FOLLOWER = """
import sys
import ckptfs
run = ckptfs.Run(sys.argv[1])
last, every = int(sys.argv[2]), sys.argv[3] == "every"
skipped = []
found = run.watch(after=0, every=every, on_skipped=skipped.append)
first = True
print("ready", flush=True)
for checkpoint in found:
    values = checkpoint.tree(numpy=True)
    assert values["step"] == checkpoint.step
    assert (values["w"] == checkpoint.step).all() and (values["b"] == checkpoint.step).all(), "torn"
    print(checkpoint.step, flush=True)
    if checkpoint.step == last:
        break
found.close()
assert not skipped or not every, skipped
print("done", *skipped, flush=True)
"""


def test_two_followers_and_deletion_behind_them(tmp_path):
    """200 quick steps; only the newest and those in use are kept. Nothing is missed, doubled or torn."""
    last = 200
    run = ckptfs.Run(tmp_path / "run")
    save(run, 1)
    script = tmp_path / "follower.py"
    script.write_text(FOLLOWER)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), str(tmp_path / "run"), str(last)]
    followers = [
        subprocess.Popen([*command, how], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for how in ("every", "every", "quick")
    ]
    try:
        for follower in followers:
            assert follower.stdout.readline() == "ready\n", follower.stderr.read()
            assert follower.stdout.readline() == "1\n", follower.stderr.read()
        deleted = set()
        for step in range(2, last + 1):
            save(run, step)
            for old in run.steps()[:-1]:
                if delete(run, old):
                    deleted.add(old)
        while any(follower.poll() is None for follower in followers):  # those that lag behind, on a busy machine
            deleted.update(old for old in run.steps()[:-1] if delete(run, old))
            with contextlib.suppress(subprocess.TimeoutExpired):
                followers[0].wait(0.05)
        said = [follower.communicate(timeout=60) for follower in followers]
    finally:
        for follower in followers:
            follower.kill()
            follower.wait()
    seen = []
    for follower, (out, err) in zip(followers, said, strict=True):
        assert follower.returncode == 0, err
        *steps, done = out.splitlines()
        assert done.startswith("done")
        seen.append([1, *map(int, steps)])
    assert seen[0] == seen[1] == list(range(1, last + 1))
    assert all(a < b for a, b in pairwise(seen[2]))
    assert seen[2][-1] == last
    assert len(deleted) > last // 4, "the test deletes nothing"
    for old in run.steps()[:-1]:
        assert delete(run, old)
