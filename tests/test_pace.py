"""A save goes gently while nobody waits for it, and every kind of waiting ends that."""

import os
import signal
import subprocess
import sys
import threading

import pytest

import ckptfs
from ckptfs import pace, write
from ckptfs.errors import StorageError
from ckptfs.pace import Pace
from ckptfs.settings import Settings
from ckptfs.storage import FileOps, LocalStore

torch = pytest.importorskip("torch")

# A byte a second: what is not hurried does not end. Two buffers, so that copies wait for writes.
CRAWL = Settings(
    background_bytes_per_s=1, io_bytes=8192, extent_bytes=4096, chunk_bytes=8192, small_file_bytes=1024,
    buffer_bytes=1, async_buffer_bytes=1,
)  # fmt: skip
ROOMY = Settings(background_bytes_per_s=1, io_bytes=8192, extent_bytes=4096, small_file_bytes=1024)


def within_a_minute(work):
    """Run it in a thread, so that a wait that never ends fails the test instead of stopping it."""
    errors = []

    def guarded():
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "nobody hurried"
    if errors:
        raise errors[0]


class Training:
    def __init__(self, store, settings=ROOMY):
        self.weights = torch.nn.Parameter(torch.arange(50_000.0))
        self.weights.grad = torch.ones(50_000)
        self.optimizer = torch.optim.SGD([self.weights], lr=1.0)
        self.run = ckptfs.Run(store, settings=settings)

    def snapshot(self, step, **how):
        return self.run.save_async(step, {"w": self.weights}, **how)

    def lazy(self, step):
        return self.snapshot(step, before_update=self.optimizer)


def test_nobody_waits_for_a_save_that_takes_its_time(tmp_path):
    training = Training(tmp_path)
    for step, begin in enumerate([training.snapshot, training.lazy]):
        save = begin(step)
        assert save._staged.wait(60)  # copies are not held back
        assert not save._done.wait(0.3)
        assert not save.done
        within_a_minute(save.wait)
    assert training.run.steps() == [0, 1]
    training.run.close()


def _stop_on_a_signal(training, save):
    with ckptfs.install_signal_handler(training.run) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested(2)
        within_a_minute(lambda: training.run.save(2, {"w": training.weights}))


def _leave_with_an_error(save):
    with pytest.raises(KeyError), save:
        raise KeyError


WAITERS = {
    "wait": lambda training, save: within_a_minute(save.wait),
    "result": lambda training, save: within_a_minute(save.result),
    "with": lambda training, save: within_a_minute(lambda: save.__enter__().__exit__(None, None, None)),
    "with an error": lambda training, save: within_a_minute(lambda: _leave_with_an_error(save)),
    "a synchronous save": lambda training, save: within_a_minute(lambda: training.run.save(2, {"w": training.weights})),
    "a snapshot": lambda training, save: within_a_minute(lambda: training.snapshot(2)),
    "the update after a lazy save": lambda training, save: within_a_minute(
        lambda: (training.lazy(2), training.optimizer.step())
    ),
    "staged, of the next save": lambda training, save: within_a_minute(lambda: training.lazy(2).staged()),
    "wait_idle": lambda training, save: within_a_minute(training.run.wait_idle),
    "close": lambda training, save: within_a_minute(training.run.close),
    "a signal": _stop_on_a_signal,
}


@pytest.mark.parametrize("lazy", [False, True], ids=["snapshot", "lazy"])
@pytest.mark.parametrize("waiter", WAITERS)
def test_whoever_waits_makes_it_hurry(tmp_path, waiter, lazy):
    training = Training(tmp_path)
    save = training.lazy(1) if lazy else training.snapshot(1)
    assert save._staged.wait(60)
    WAITERS[waiter](training, save)
    assert save._done.wait(60)
    assert training.run.steps()[0] == 1
    within_a_minute(training.run.close)


@pytest.mark.parametrize("waiter", ["nobody", "update", "staged", "snapshot"])
def test_copies_that_need_a_buffer_do_not_wait_for_the_pace(tmp_path, waiter):
    training = Training(tmp_path, CRAWL)
    expected = training.weights.detach().clone()
    if waiter == "snapshot":
        saves = []
        within_a_minute(lambda: saves.append(training.snapshot(1)))
        save = saves[0]
    else:
        save = training.lazy(1)
    if waiter == "update":
        within_a_minute(training.optimizer.step)
    elif waiter == "staged":
        within_a_minute(save.staged)
    assert save._staged.wait(60)
    training.optimizer.step()
    within_a_minute(save.wait)
    with training.run[1] as checkpoint:
        assert torch.equal(checkpoint.tree()["w"].detach(), expected)
    training.run.close()


def test_the_end_of_the_interpreter_makes_it_hurry(tmp_path):
    code = (
        "import sys, torch, ckptfs\n"
        "settings = ckptfs.Settings(background_bytes_per_s=1, io_bytes=8192, extent_bytes=4096, small_file_bytes=1024)\n"
        "ckptfs.Run(sys.argv[1], settings=settings).save_async(1, {'w': torch.arange(50_000.0)})\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120)
    assert ckptfs.Run(tmp_path).steps() == [1]


def test_a_failure_ends_a_save_that_nobody_waits_for(tmp_path):
    class Full(FileOps):
        def pwrite(self, fd, data, offset):
            if threading.current_thread().name.startswith("ckptfs-write"):
                raise OSError(28, os.strerror(28))
            return super().pwrite(fd, data, offset)

    training = Training(LocalStore(tmp_path, ops=Full()))
    save = training.snapshot(1)
    assert save._done.wait(60)
    with pytest.raises(StorageError, match="No space"):
        save.wait()
    training.run.close()


def test_a_synchronous_save_has_no_pace(tmp_path):
    training = Training(tmp_path)
    within_a_minute(lambda: training.run.save(1, {"w": training.weights}))
    training.run.close()


# --- the pace itself -------------------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(pace, "time", clock)
    monkeypatch.setattr(write, "time", clock)
    return clock


def paced(clock, bytes_per_s):
    """A pace whose waits move the clock."""
    made = Pace(bytes_per_s)

    def wait_for(predicate, timeout):
        if not predicate():
            clock.now += timeout
        return predicate()

    made._changed.wait_for = wait_for
    return made


@pytest.mark.parametrize("spare", [0, 1, 3])
def test_writes_begin_as_often_as_the_rate_allows(clock, monkeypatch, spare):
    monkeypatch.setattr(pace, "spare_cores", lambda: spare)
    one, began = paced(clock, 1000), []
    for _ in range(4):
        one.turn(2000)
        began.append(clock.now)
    assert began == pytest.approx([0, 2, 4, 6] if spare < 2 else [0, 2 / 3, 4 / 3, 2])


def test_a_slow_store_is_not_slowed_down_and_saves_no_time_up(clock):
    one, began = paced(clock, 1000 / max(1, pace.spare_cores())), []
    for took_s in (5, 0, 0):
        one.turn(2000)
        began.append(clock.now)
        clock.now += took_s
    assert began == pytest.approx([0, 5, 7])


def test_nothing_is_held_back_without_a_rate_or_in_a_hurry(clock):
    none = paced(clock, None)
    one = paced(clock, 1)
    for _ in range(3):
        none.turn(1000)
    with one.hurry(), one.hurry():
        one.turn(1000)
        one.turn(1000)
    assert clock.now == 0
    one.turn(10)
    assert clock.now > 0


def test_one_of_two_waits_that_ends_leaves_the_other(clock):
    one = paced(clock, 1)
    first, second = one.hurry(), one.hurry()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    one.turn(1000)
    one.turn(1000)
    assert clock.now == 0
    second.__exit__(None, None, None)


def test_what_is_checked_may_end_a_turn(clock):
    one = paced(clock, 1)
    one.turn(1000)

    def check():
        raise StorageError("broken")

    with pytest.raises(StorageError, match="broken"):
        one.turn(1000, check)


def test_rates_do_not_depend_on_how_many_write_at_a_time(clock):
    alone, together = write._Clock(), write._Clock()
    for _ in range(2):
        with alone.counting(1 << 25):
            clock.now += 1
    clock.now += 10
    with together.counting(1 << 25), together.counting(1 << 25):
        clock.now += 2
    assert alone.rate() == together.rate() == 1 << 25
    with (few := write._Clock()).counting(1 << 20):
        clock.now += 1
    assert few.rate() == 0
