"""Saves in the background: what is committed is the state at the call, whatever training does meanwhile."""

import importlib
import logging
import os
import random
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import ckptfs
from ckptfs import asyncsave, commit, pace, retention, write
from ckptfs import run as run_module
from ckptfs.errors import CkptError, ExistsError, MismatchError, SaveError, StorageError
from ckptfs.ranks import Group
from ckptfs.settings import Settings
from ckptfs.storage import FaultOps, FaultPlan, FileOps, LocalStore, MemoryStore, join

torch = pytest.importorskip("torch")

# Small pieces and two buffers: a save consists of many turns of copying and writing, so there is much to interleave.
TIGHT = Settings(
    io_bytes=8192, extent_bytes=4096, chunk_bytes=8192, small_file_bytes=1024, buffer_bytes=1, async_buffer_bytes=1
)


class JitteryOps(FileOps):
    """Writes that now and then let others run first; nothing is made durable, which would only cost time here."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.never = threading.Event()

    def pwrite(self, fd, data, offset):
        if self.random.random() < 0.3:
            self.never.wait(self.random.random() * 0.002)
        return super().pwrite(fd, data, offset)

    def fsync(self, fd):
        pass

    def syncfs(self, fd):
        pass


class JitteryStore(MemoryStore):
    """The same without files, for thousands of saves."""

    def __init__(self, name, prefix="", seed=0):
        super().__init__(name, prefix)
        self.random = random.Random(seed)
        self.never = threading.Event()

    def sub(self, prefix):
        return JitteryStore(self.name, join(self.prefix, prefix), self.random.random())

    def write(self, path, data):
        if self.random.random() < 0.3:
            self.never.wait(self.random.random() * 0.002)
        super().write(path, data)


class BlockingOps(FileOps):
    """Writes that wait until the test lets them."""

    def __init__(self):
        self.go = threading.Event()
        self.reached = threading.Event()

    def pwrite(self, fd, data, offset):
        self.reached.set()
        assert self.go.wait(60)
        return super().pwrite(fd, data, offset)


class Training:
    """A model with buffers that change in forward, an optimizer with state, and values that are no tensors."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.BatchNorm1d(96, affine=False))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.array = np.arange(1000.0)
        self.count = 0
        self.forward_backward()
        self.optimizer.step()

    def state(self):
        return {
            "model": self.model.state_dict(),
            "optim": self.optimizer.state_dict(),
            "array": self.array,
            "count": self.count,
        }

    def forward_backward(self):
        """What may happen right after a lazy save: everything but the update."""
        self.model(torch.randn(4, 64)).square().mean().backward()
        self.array += 1
        self.count += 1

    def change_everything(self):
        with torch.no_grad():
            for value in [*self.model.state_dict().values(), *self.moments()]:
                value.add_(1)
        self.array += 1
        self.count += 1

    def moments(self):
        return [v for state in self.optimizer.state.values() for v in state.values() if torch.is_tensor(v)]


def copied(tree):
    if isinstance(tree, dict):
        return {key: copied(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [copied(value) for value in tree]
    return tree.clone() if torch.is_tensor(tree) else tree.copy() if isinstance(tree, np.ndarray) else tree


def equal(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    if torch.is_tensor(one):
        return torch.equal(one, other)
    return np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other


def stored(run, step, **how):
    with run[step] as checkpoint:
        return checkpoint.tree(**how)


def campaign(store, seed, count, modes):
    """Random saves with changes at the first moment each mode allows them; the steps that were not saved as they were."""
    training = Training(seed)
    wrong = []
    with ckptfs.Run(store, settings=TIGHT, keep_last=8) as run:
        waiting = []
        for step in range(count):
            mode = training.random.choice(modes)
            expected = copied(training.state())
            if mode == "sync":
                run.save(step, training.state())
                training.change_everything()
            elif mode == "snapshot":
                waiting.append((run.save_async(step, training.state()), expected))
                training.change_everything()
            else:
                save = run.save_async(step, training.state(), before_update=training.optimizer)
                waiting.append((save, expected))
                for _ in range(training.random.choice([0, 0, 1, 2])):  # gradient accumulation
                    training.forward_backward()
                training.optimizer.step()
                training.optimizer.zero_grad()
            if mode == "sync" or training.random.random() < 0.5:
                wrong += [s.step for s, tree in waiting if s.wait() and not equal(stored(run, s.step), tree)]
                waiting.clear()
                if mode == "sync" and not equal(stored(run, step), expected):
                    wrong.append(step)
            if wrong or len(waiting) == 2:
                wrong += [s.step for s, tree in waiting if s.wait() and not equal(stored(run, s.step), tree)]
                waiting.clear()
            if wrong:
                return wrong
        wrong += [s.step for s, tree in waiting if s.wait() and not equal(stored(run, s.step), tree)]
    return wrong


MODES = [["sync"], ["snapshot"], ["lazy"], ["sync", "snapshot", "lazy"]]


@pytest.fixture
def memory(request):
    yield lambda seed: JitteryStore(f"{request.node.name}-{seed}", "run", seed)
    for seed in range(4):
        MemoryStore(f"{request.node.name}-{seed}").remove_tree("run")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("modes", MODES, ids="-".join)
def test_a_committed_step_is_the_state_at_the_call(memory, modes, seed):
    count = {"sync": 100, "lazy": 250}.get("-".join(modes), 300)  # 3,800 in all
    assert campaign(memory(seed), seed, count, modes) == []


def test_a_committed_step_is_the_state_at_the_call_in_files(tmp_path):
    assert campaign(LocalStore(tmp_path, ops=JitteryOps(0)), 0, 60, MODES[-1]) == []


def test_the_campaign_notices_an_update_that_does_not_wait(memory, monkeypatch):
    monkeypatch.setattr(asyncsave.Save, "hold", lambda self: None)
    assert campaign(memory(1), 1, 130, ["lazy"])


def test_the_campaign_notices_a_snapshot_that_does_not_wait(memory, monkeypatch):
    monkeypatch.setattr(asyncsave.Save, "snapshot", lambda self, value: self._saver.describe(value))
    assert campaign(memory(1), 1, 130, ["snapshot"])


def test_the_campaign_notices_buffers_that_are_not_copied_at_the_call(memory, monkeypatch):
    monkeypatch.setattr(run_module, "owned_by", lambda points: None)
    assert campaign(memory(1), 1, 130, ["lazy"])


def test_two_ranks_in_different_modes(tmp_path):
    """How a rank copies is its own business: what is committed is each rank's state at its call."""
    wrong = []

    def work(group):
        rank, rng = group.rank, random.Random(group.rank)
        generator = torch.Generator().manual_seed(rank)
        values = {"own": ckptfs.PerRank(torch.nn.Parameter(torch.randn(5000, generator=generator)))}
        optimizer = torch.optim.SGD([values["own"].value], lr=1.0)
        run = ckptfs.Run(LocalStore(tmp_path, ops=JitteryOps(rank)), group=group, settings=TIGHT)
        for step in range(30):
            expected = values["own"].value.detach().clone()
            values["own"].value.grad = torch.ones(5000)
            if rng.random() < 0.5:
                save = run.save_async(step, values, before_update=optimizer)
            else:
                save = run.save_async(step, values)
            optimizer.step()
            save.wait()
            if not torch.equal(stored(run, step, rank=rank)["own"].detach(), expected):
                wrong.append((rank, step))
        run.close()

    in_threads(Group.threads(2), work)
    assert wrong == []


def in_threads(groups, work):
    errors = []

    def guarded(group):
        try:
            work(group)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=[group]) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


# --- the handle ------------------------------------------------------------------------------------------------------


def test_a_save_tells_what_it_did(tmp_path):
    training = Training(0)
    with ckptfs.Run(tmp_path) as run, run.save_async(3, training.state()) as save:
        assert save.staged()
        result = save.result()
        assert save.done
        assert result.step == 3
        assert run.steps() == [3]
    assert result.nbytes == run.latest.manifest.nbytes
    assert 0 < result.blocked_s <= result.total_s
    assert {"describe", "enter", "plan", "reserve", "stage", "write", "commit"} <= result.phases.keys()


def test_lazy_returns_before_anything_is_copied_and_the_update_waits(tmp_path):
    ops = BlockingOps()
    training = Training(0)
    settings = Settings(io_bytes=8192, extent_bytes=4096, small_file_bytes=1024, async_buffer_bytes=1)
    with ckptfs.Run(LocalStore(tmp_path, ops=ops), settings=settings) as run:
        save = run.save_async(1, training.state(), before_update=training.optimizer)
        assert not save.staged(0)
        assert not save.wait(0)
        with pytest.raises(TimeoutError, match="step 1"):
            save.result(0)
        updated = threading.Event()
        update = threading.Thread(target=lambda: (training.optimizer.step(), updated.set()))
        update.start()
        assert ops.reached.wait(30)
        assert save._wanted.wait(30)  # the update has asked
        assert not updated.wait(0.5)  # two buffers are full, the rest is not copied
        ops.go.set()
        update.join(30)
        assert updated.is_set()
        assert save.result().blocked_s > 0.2  # the update's wait counts
    assert not training.optimizer._optimizer_step_pre_hooks


def test_hooks_are_removed_after_the_step_and_never_pile_up(tmp_path):
    training = Training(0)
    with ckptfs.Run(tmp_path) as run:
        for step in range(5):
            run.save_async(step, training.state(), before_update=[training.optimizer])
            assert len(training.optimizer._optimizer_step_pre_hooks) == 1
            training.optimizer.step()
            assert not training.optimizer._optimizer_step_pre_hooks
    assert len(training.optimizer._optimizer_step_post_hooks) == 1


def test_several_optimizers_all_wait(tmp_path):
    first, second = Training(0), Training(1)
    before = copied([first.state(), second.state()])
    with ckptfs.Run(LocalStore(tmp_path, ops=JitteryOps(0)), settings=TIGHT) as run:
        save = run.save_async(
            1, {"a": first.state(), "b": second.state()}, before_update=[first.optimizer, second.optimizer]
        )
        first.optimizer.step()
        second.optimizer.step()
        save.wait()
        tree = stored(run, 1)
    assert equal([tree["a"], tree["b"]], before)


def test_a_function_can_be_the_point_before_the_update(tmp_path):
    values = torch.arange(50_000.0)
    before = []
    with ckptfs.Run(LocalStore(tmp_path, ops=JitteryOps(0)), settings=TIGHT) as run:
        save = run.save_async(1, {"x": values}, before_update=before.append)
        before[0]()
        values.add_(1)
        save.wait()
        assert torch.equal(stored(run, 1)["x"], torch.arange(50_000.0))


def test_what_cannot_be_hooked_is_refused(tmp_path):
    with ckptfs.Run(tmp_path) as run:
        with pytest.raises(MismatchError, match="int is neither"):
            run.save_async(1, {}, before_update=3)
        with pytest.raises(MismatchError, match="no optimizer"):
            run.save_async(1, {}, before_update=[])
        with pytest.raises(MismatchError, match="on_busy"):
            run.save_async(1, {}, on_busy="maybe")
        assert run.steps() == []


@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "snapshot"])
@pytest.mark.parametrize("spare", [0, 1])
def test_background_threads_step_back_equally_far_where_there_is_a_second_core(tmp_path, monkeypatch, lazy, spare):
    """No further: not even those that were begun by one that has stepped back already."""
    steps: dict[str, set[int]] = {}
    usual = os.getpriority(os.PRIO_PROCESS, os.getpid())

    class Watched(FileOps):
        def _note(self):
            if (thread := threading.current_thread()) is not threading.main_thread():
                kind = re.sub(r"-\d+$", "", thread.name)
                steps.setdefault(kind, set()).add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) - usual)

        def open(self, path, flags, mode=0o666):
            self._note()
            return super().open(path, flags, mode)

        def pwrite(self, fd, data, offset):
            self._note()
            return super().pwrite(fd, data, offset)

        def unlink(self, path):
            self._note()
            return super().unlink(path)

    monkeypatch.setattr(pace, "spare_cores", lambda: spare)
    training = Training(0)
    with ckptfs.Run(LocalStore(tmp_path, ops=Watched()), settings=TIGHT, keep_last=1) as run:
        for step in range(2):
            run.save_async(step, training.state(), before_update=training.optimizer if lazy else None).wait()
    background = {"ckptfs-save", "ckptfs-write", "ckptfs-reserve", "ckptfs-prune"}
    assert steps == {kind: {min(usual + 10, 19) - usual if spare else 0} for kind in background}
    assert os.getpriority(os.PRIO_PROCESS, os.getpid()) == usual


@pytest.mark.parametrize("way", ["lazy", "snapshot", "sync"])
def test_background_threads_leave_the_interpreter_between_short_calls(tmp_path, monkeypatch, way):
    """After each file that is made, each small array and each document; not where the caller waits anyway."""
    pauses: list[str] = []

    def pause():
        pauses.append(re.sub(r"-\d+$", "", threading.current_thread().name))

    for module in (write, retention, importlib.import_module("ckptfs.save")):
        monkeypatch.setattr(module, "let_others_in", pause)
    small = [torch.full((3,), float(i)) for i in range(20)]
    large = [torch.full((1 << 18,), float(i)) for i in range(4)]
    optimizer = torch.optim.SGD([*small, *large], 0.1)
    tree = {"small": small, "large": large}
    with ckptfs.Run(tmp_path, keep_last=1) as run:
        run.save(0, {"old": small})
        assert pauses == []
        if way == "sync":
            run.save(1, tree)
        else:
            run.save_async(1, tree, before_update=optimizer if way == "lazy" else None).wait()
    found = {name: pauses.count(name) for name in set(pauses)}
    assert found.pop("ckptfs-prune") >= 40  # files and documents of the older step
    if way != "sync":
        assert found.pop("ckptfs-write") == 20  # the large ones take long enough
        assert 24 <= found.pop("ckptfs-reserve") <= 24 + 4  # documents, and files that no writer had opened before
    assert found == {}


def test_pauses_are_rare_where_they_take_long(monkeypatch):
    """Among many processes, a pause takes until its thread has a core again: hundreds of them would starve a save."""

    class Clock:
        now, pauses, pause_takes = 0.0, 0, 0.0

        def perf_counter(self):
            return self.now

        def sleep(self, seconds):
            self.pauses += 1
            self.now += self.pause_takes

    def pauses_of(pause_takes, turns):
        clock = Clock()
        clock.pause_takes = pause_takes
        monkeypatch.setattr(pace, "time", clock)
        monkeypatch.setattr(pace, "_own", threading.local())
        for _ in range(turns):
            pace.let_others_in()
            clock.now += 1e-4  # the work between
        return clock.pauses, clock.now

    assert pauses_of(1.5e-4, 1000)[0] == 1000
    for long in (2e-3, 1e-2):
        count, took_s = pauses_of(long, 10_000)
        assert 2 <= count <= 30
        assert took_s < 1.1 * 10_000 * 1e-4


# --- training loops --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overflow", [False, True], ids=["steps", "skips"])
def test_grad_scaler(tmp_path, overflow):
    training = Training(0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with ckptfs.Run(LocalStore(tmp_path, ops=JitteryOps(0)), settings=TIGHT) as run:
        for step in range(5):
            training.optimizer.zero_grad()
            expected = copied(training.state())
            save = run.save_async(
                step, {**training.state(), "scaler": scaler.state_dict()}, before_update=training.optimizer
            )
            expected["scaler"] = scaler.state_dict()
            loss = training.model(torch.randn(4, 64)).square().mean()
            scaler.scale(loss * float("inf") if overflow and step % 2 else loss).backward()
            scaler.step(training.optimizer)  # does not step after an overflow: the hook stays for the next one
            scaler.update()
            assert bool(training.optimizer._optimizer_step_pre_hooks) == (overflow and step % 2 == 1)
            save.wait()
            assert equal(stored(run, step), expected)


def test_compiled_model_and_step(tmp_path):
    training = Training(0)
    forward = torch.compile(training.model, backend="eager")
    update = torch.compile(training.optimizer.step, backend="eager")
    with ckptfs.Run(LocalStore(tmp_path, ops=JitteryOps(0)), settings=TIGHT) as run:
        for step in range(4):
            expected = copied(training.state())
            save = run.save_async(step, training.state(), before_update=training.optimizer)
            forward(torch.randn(4, 64)).square().mean().backward()
            update()
            assert not training.optimizer._optimizer_step_pre_hooks
            save.wait()
            assert equal(stored(run, step), expected)


def test_an_optimizer_whose_state_is_elsewhere_than_its_parameters(tmp_path):
    """CPU-offloaded: the update runs on copies in host memory and writes the parameters back."""

    class Offloaded(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})
            for p in self.param_groups[0]["params"]:
                self.state[p]["master"] = p.detach().double().clone()

        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                master = self.state[p]["master"].add_(1)
                p.copy_(master)

    weights = torch.nn.Parameter(torch.randn(300, 100).bfloat16())
    optimizer = Offloaded([weights])
    with ckptfs.Run(LocalStore(tmp_path, ops=JitteryOps(0)), settings=TIGHT) as run:
        for step in range(10):
            tree = {"w": weights.detach(), "optim": optimizer.state_dict()}
            expected = copied(tree)
            save = run.save_async(step, tree, before_update=optimizer)
            optimizer.step()
            save.wait()
            assert equal(stored(run, step), expected)


# --- one after the other ---------------------------------------------------------------------------------------------


def test_busy_policies(tmp_path):
    ops = BlockingOps()
    training = Training(0)
    with ckptfs.Run(LocalStore(tmp_path, ops=ops)) as run:
        first = run.save_async(1, training.state(), before_update=training.optimizer)
        assert ops.reached.wait(30)
        skipped = run.save_async(2, training.state(), on_busy="skip")
        assert skipped.skipped
        assert skipped.done
        assert skipped.result() is None
        with pytest.raises(CkptError, match="step 3 was not saved: the save before it"):
            run.save_async(3, training.state(), on_busy="error")
        second = run.save_async(4, training.state(), before_update=training.optimizer)
        assert not second.done
        ops.go.set()
        second.wait()
        assert first.done  # in the order of the calls
        assert not run.save_async(5, training.state(), on_busy="skip").skipped
    assert run.steps() == [1, 4, 5]


def test_ranks_skip_together(tmp_path):
    outcome = {}
    ops = BlockingOps()
    first_done = threading.Barrier(2)

    def work(group):
        tree = {"x": ckptfs.PerRank(torch.zeros(1000))}
        # Rank 1's store is quick, rank 0 leads and is held up in its commit: only rank 0 knows that the save goes on.
        run = ckptfs.Run(LocalStore(tmp_path, ops=ops if group.rank == 0 else FileOps()), group=group)
        first = run.save_async(1, tree)
        first_done.wait(30)
        second = run.save_async(2, tree, on_busy="skip")
        outcome[group.rank] = second.skipped
        ops.go.set()
        first.wait()
        run.save_async(3, tree, on_busy="skip").wait()
        run.close()

    in_threads(Group.threads(2), work)
    assert outcome == {0: True, 1: True}
    assert ckptfs.Run(tmp_path).steps() == [1, 3]


@pytest.mark.parametrize("background", [False, True], ids=["save", "save_async"])
def test_threads_that_save_to_one_run_take_turns(tmp_path, background):
    """What a run remembers of its last plan belongs to one save at a time."""
    ops, failed = BlockingOps(), []
    run = ckptfs.Run(LocalStore(tmp_path, ops=ops), settings=TIGHT)
    trees = {1: {"x": torch.zeros(100_000)}, 2: {"y": torch.ones(7), "z": torch.zeros(50_000)}}

    def save(step):
        try:
            (run.save_async if background else run.save)(step, trees[step])
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=save, args=[step]) for step in trees]
    threads[0].start()
    assert ops.reached.wait(30)
    threads[1].start()
    threads[1].join(0.2)  # it waits; not taking turns, it would be at its own plan by now
    ops.go.set()
    for thread in threads:
        thread.join(60)
    run.close()
    assert failed == []
    assert run.steps() == [1, 2]
    for step, tree in trees.items():
        back = run[step].tree()
        assert all(torch.equal(back[name], value) for name, value in tree.items())


def test_a_synchronous_save_waits_for_the_one_before(tmp_path):
    training = Training(0)
    with ckptfs.Run(LocalStore(tmp_path, ops=JitteryOps(0)), settings=TIGHT) as run:
        save = run.save_async(1, training.state(), before_update=training.optimizer)
        run.save(2, training.state())
        assert save.done
    assert run.steps() == [1, 2]


# --- failures --------------------------------------------------------------------------------------------------------


def failing_run(tmp_path, at=0, only=("pwrite",)):
    plan = FaultPlan("error-before", at=at, only=frozenset(only))
    return ckptfs.Run(LocalStore(tmp_path, ops=FaultOps(plan, code=28)), settings=TIGHT)


@pytest.mark.parametrize("lazy", [False, True], ids=["snapshot", "lazy"])
def test_a_failure_reaches_whoever_waits(tmp_path, lazy):
    training = Training(0)
    with failing_run(tmp_path) as run:
        with pytest.raises(StorageError, match="No space"):
            run.save_async(1, training.state(), before_update=training.optimizer if lazy else None).wait()
        training.optimizer.step()  # a failed save holds nobody up
        assert os.listdir(tmp_path) == []  # and its space is free again
        run.save_async(1, training.state()).wait()
    assert run.steps() == [1]


def test_a_failure_that_nobody_asked_for_is_told_at_the_next_save(tmp_path, caplog):
    training = Training(0)
    with failing_run(tmp_path) as run:
        run.save_async(1, training.state(), before_update=training.optimizer)
        run.wait_idle()
        with pytest.warns(RuntimeWarning, match="step 1, failed and nobody asked.*No space"):
            run.save(2, training.state())
        assert "step 1" in caplog.text
    assert run.steps() == [2]  # told once: close() is quiet


@pytest.mark.parametrize("lazy", [False, True], ids=["snapshot", "lazy"])
def test_a_save_that_gets_no_thread_has_failed(tmp_path, monkeypatch, lazy):
    """So it is where the interpreter ends, or the machine has too many: nobody may wait for such a save."""
    start = threading.Thread.start

    def refuse(thread):
        if thread.name.startswith("ckptfs-save-"):
            raise RuntimeError("can't start new thread")
        start(thread)

    training = Training(0)
    with ckptfs.Run(tmp_path) as run:
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="new thread"):
            patch.setattr(threading.Thread, "start", refuse)
            run.save_async(1, training.state(), before_update=training.optimizer if lazy else None)
        training.optimizer.step()
        run.wait_idle()
        assert os.listdir(tmp_path) == []
        run.save_async(2, training.state()).wait()
    assert run.steps() == [2]


def test_updates_do_not_wait_for_a_save_whose_other_hook_failed(tmp_path):
    def refuse(hold):
        raise RuntimeError("no hooks here")

    training = Training(0)
    with ckptfs.Run(tmp_path) as run:
        with pytest.raises(RuntimeError, match="no hooks"):
            run.save_async(1, training.state(), before_update=[training.optimizer, refuse])
        training.optimizer.step()
    assert run.steps() == []


def test_close_raises_a_failure_that_nobody_asked_for(tmp_path):
    training = Training(0)
    run = failing_run(tmp_path)
    run.save_async(1, training.state(), before_update=training.optimizer)
    with pytest.raises(StorageError, match="No space"):
        run.close()
    run.close()
    with pytest.raises(ValueError, match="mine") as caught, failing_run(tmp_path) as run:
        run.save_async(1, training.state(), before_update=training.optimizer)
        raise ValueError("mine")
    assert "No space" in caught.value.__notes__[0]


AT_EXIT = """
import sys, torch, ckptfs
from ckptfs.storage import FaultOps, FaultPlan, LocalStore
ops = FaultOps(FaultPlan("error-before", at=0, only=frozenset(["pwrite"])), code=28) if sys.argv[2] == "fail" else None
run = ckptfs.Run(LocalStore(sys.argv[1], **({"ops": ops} if ops else {})))
weights = torch.nn.Parameter(torch.zeros(4_000_000))
run.save_async(7, {"w": weights}, before_update=torch.optim.SGD([weights]))
if sys.argv[2] == "raise":
    raise RuntimeError("training broke")
"""


@pytest.mark.parametrize("how", ["end", "raise", "fail"])
def test_the_interpreter_finishes_a_save_and_tells_of_its_failure(tmp_path, how):
    command = [sys.executable, "-c", AT_EXIT, str(tmp_path), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ckptfs.Run(tmp_path).steps() == ([] if how == "fail" else [7])
    assert ("step 7 was not saved, and nobody asked" in done.stderr) == (how == "fail")
    assert "schedule new futures" not in done.stderr


def test_an_interrupt_aborts_cleanly(tmp_path):
    class Interrupted(FileOps):
        def fallocate(self, fd, start, nbytes):
            raise KeyboardInterrupt

    tree = {"x": torch.zeros(100_000)}
    before = set(threading.enumerate())
    with ckptfs.Run(LocalStore(tmp_path, ops=Interrupted()), settings=TIGHT) as run:
        with pytest.raises(KeyboardInterrupt):
            run.save(1, tree)
        with pytest.raises(KeyboardInterrupt):
            run.save_async(1, tree)
    assert os.listdir(tmp_path) == []
    assert not [t for t in set(threading.enumerate()) - before if t.name.startswith("ckptfs-write")]


def test_alone_errors_keep_their_kind(tmp_path):
    with ckptfs.Run(tmp_path) as run:
        run.save(1, {"x": torch.zeros(3)})
        with pytest.raises(ExistsError):
            run.save(1, {"x": torch.zeros(3)})
        with pytest.raises(MismatchError):
            run.save(2, {"x": object()})
    with failing_run(tmp_path) as run, pytest.raises(StorageError):
        run.save(3, {"x": torch.zeros(10_000)})


def test_every_failing_rank_is_named_on_every_rank(tmp_path):
    raised = {}

    def work(group):
        plan = FaultPlan("error-before", at=0, only=frozenset(["pwrite"]))
        ops = FaultOps(plan, code=28) if group.rank in (1, 3) else FileOps()
        run = ckptfs.Run(LocalStore(tmp_path, ops=ops), group=group, settings=TIGHT)
        tree = {"x": ckptfs.PerRank(torch.zeros(20_000))}
        with pytest.raises(SaveError) as caught:
            run.save(1, tree)
        raised[group.rank] = caught.value
        assert not run.steps()
        run.save(1, tree)
        run.close()

    in_threads(Group.threads(4), work)
    assert len({str(error) for error in raised.values()}) == 1
    assert raised[0].by_rank.keys() == {1, 3}
    assert "No space" in raised[0].by_rank[1]
    assert os.listdir(tmp_path) == ["step-00000001"]


@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize("lazy", [False, True], ids=["sync", "lazy"])
def test_a_tree_that_cannot_be_saved_on_one_rank(tmp_path, culprit, lazy):
    raised = {}

    def work(group):
        run = ckptfs.Run(tmp_path, group=group)
        with pytest.raises(SaveError) as caught:
            tree = {"x": torch.zeros(5), "y": object() if group.rank == culprit else 1}
            if lazy:
                run.save_async(1, tree, before_update=lambda hold: None).wait()
            else:
                run.save(1, tree)
        raised[group.rank] = caught.value
        run.save(2, {"x": torch.zeros(5)})
        run.close()

    in_threads(Group.threads(3), work)
    assert {frozenset(error.by_rank) for error in raised.values()} == {frozenset([culprit])}
    assert "object" in raised[1].by_rank[culprit]


def test_failures_in_the_log_name_the_step(tmp_path, caplog):
    caplog.set_level(logging.ERROR)
    run = failing_run(tmp_path)
    run.save_async(5, {"x": torch.zeros(10_000)}, before_update=lambda hold: None)
    run.wait_idle()
    asyncsave._tell_at_exit()
    assert "step 5 was not saved" in caplog.text
    run.close()


# --- zombies ---------------------------------------------------------------------------------------------------------


def test_a_live_save_is_not_collected_and_a_dead_one_is(tmp_path):
    ops = BlockingOps()
    tree = {"x": torch.zeros(100_000)}
    run = ckptfs.Run(LocalStore(tmp_path, ops=ops), settings=TIGHT)
    save = run.save_async(1, tree, before_update=lambda hold: None)
    assert ops.reached.wait(30)
    (tmp_path / ".step-00000009.deadbeef.saving").mkdir()
    ckptfs.Run(tmp_path).save(2, tree)
    assert sorted(name for name in os.listdir(tmp_path) if name.startswith(".")) == [
        next(name for name in os.listdir(tmp_path) if name.endswith(".saving"))
    ]
    ops.go.set()
    save.wait()
    run.close()
    assert run.steps() == [1, 2]


def test_a_child_of_this_process_does_not_keep_the_folder_of_a_save_that_has_ended(tmp_path):
    """A forked data loader has a copy of every descriptor, and lives long."""
    store, folder = LocalStore(tmp_path), ".step-00000001.id.saving"
    store.make_dirs(folder)
    claim = commit.Claim(store, folder)
    childs = os.dup(claim._fd)  # the same open file, as after a fork
    try:
        assert commit.collect(store, "step-") == []
        claim.close()
        assert commit.collect(store, "step-") == [folder]
    finally:
        os.close(childs)


def test_a_zombie_whose_folder_was_taken_away_commits_nothing(tmp_path):
    """Another machine took us for dead: it removed the folder, and a straggler made one of the same name."""
    store = LocalStore(tmp_path)
    store.make_dirs(".step-00000001.id.saving")
    claim = commit.Claim(store, ".step-00000001.id.saving")
    store.remove_tree(".step-00000001.id.saving")
    store.make_dirs(".step-00000001.id.saving/half")
    with pytest.raises(CkptError):
        commit.publish(store, "step-00000001", ".step-00000001.id.saving", b"{}", overwrite=False, claim=claim)
    claim.close()
    assert not commit.exists(store, "step-00000001")


# --- the document ----------------------------------------------------------------------------------------------------


def test_the_examples_of_the_document_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parent.parent / "docs" / "async.md").read_text()
    training = Training(0)
    steps = []

    def train_step(model, optimizer):
        steps.append(1)
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    names = {
        "ckptfs": ckptfs,
        "model": training.model,
        "optimizer": training.optimizer,
        "loader": [torch.randn(4, 64) for _ in range(501)],
        "train_step": train_step,
    }
    before = signal.getsignal(signal.SIGTERM)
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(block, names)
    names["stop"].uninstall()
    assert signal.getsignal(signal.SIGTERM) is before
    assert ckptfs.Run("ckpts/run7").steps() == [0, 500, 1002]


# --- GPUs ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["sync", "snapshot", "lazy"])
def test_gpu_state_is_the_state_at_the_call(tmp_path, mode):
    """Updates are queued right behind the save, on the caller's own stream; shapes and strides of every kind."""
    stream = torch.cuda.Stream()
    with ckptfs.Run(tmp_path, settings=TIGHT) as run, torch.cuda.stream(stream):
        weights = [
            torch.nn.Parameter(torch.randn(700, 300, device="cuda")),
            torch.nn.Parameter(torch.randn(5, device="cuda")),
        ]
        optimizer = torch.optim.AdamW(weights)
        for step in range(30):
            for weight in weights:
                weight.grad = torch.randn_like(weight)
            optimizer.step()
            tree = {
                "w": list(weights),
                "optim": optimizer.state_dict(),
                "turned": weights[0].detach().t(),
                "half": weights[0].detach().bfloat16(),
                "host": torch.full((1000,), float(step)),
            }
            expected = copied(tree)
            if mode == "sync":
                run.save(step, tree)
            else:
                save = run.save_async(step, tree, before_update=optimizer if mode == "lazy" else None)
            optimizer.step()
            if mode != "sync":
                save.wait()
            found = stored(run, step)
            assert all(
                torch.equal(a.detach().cpu(), b.detach().cpu()) for a, b in zip(found["w"], expected["w"], strict=True)
            )
            for name in ("turned", "half", "host"):
                assert torch.equal(found[name].cpu(), expected[name].cpu())
            for key, state in expected["optim"]["state"].items():
                assert all(torch.equal(found["optim"]["state"][key][n].cpu(), v.cpu()) for n, v in state.items())


@pytest.mark.gpu
def test_gpu_buffers_are_page_locked_once(tmp_path):
    with ckptfs.Run(tmp_path) as run:
        run.save(1, {"x": torch.zeros(4 << 20, device="cuda")})
        pool = run._pools._pool
        first = dict(pool._pinned)
        assert first
        assert torch.frombuffer(next(iter(first.values())).view, dtype=torch.uint8).is_pinned()
        run.save(2, {"x": torch.zeros(4 << 20, device="cuda")})
        assert pool._pinned == first
