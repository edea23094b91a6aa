"""SIGTERM: the loop is told between two steps, all ranks stop after the same one, and the grace time ends."""

import os
import signal
import subprocess
import sys
import threading

import pytest

import ckptfs
from ckptfs.errors import MismatchError
from ckptfs.ranks import Group
from ckptfs.signals import Stop


def test_the_loop_saves_and_leaves(tmp_path):
    import numpy as np

    before = signal.getsignal(signal.SIGTERM)
    with ckptfs.Run(tmp_path) as run, ckptfs.install_signal_handler(run, grace_s=30) as stop:
        for step in range(10):
            if step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            if stop.requested(step):
                run.save(step, {"x": np.arange(3), "step": step})
                break
        assert run.steps() == [3]
    assert signal.getsignal(signal.SIGTERM) is before


def test_all_ranks_stop_after_the_same_step(tmp_path):
    """Whichever rank is told, and even if others are a step behind."""
    groups = Group.threads(3)
    stops = [Stop(group, "run", 30.0) for group in groups]
    assert not any(stop.requested(0) for stop in stops)
    stops[1]._signal = signal.SIGTERM
    assert not stops[0].requested(1)  # not told yet
    assert not stops[1].requested(1)  # tells: after step 2
    assert not stops[2].requested(1)
    stops[2]._signal = signal.SIGTERM  # told as well, later
    assert [stop.requested(2) for stop in stops] == [True, True, True]
    assert [stop.requested(3) for stop in stops] == [True, True, True]


HANGS = """
import os, signal, sys, threading
import ckptfs
ckptfs.install_signal_handler(ckptfs.Run(sys.argv[1]), grace_s=0.5)
os.kill(os.getpid(), signal.SIGTERM)
threading.Event().wait()
"""


def test_the_grace_time_ends_a_process_that_hangs(tmp_path):
    command = [sys.executable, "-c", HANGS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 128 + signal.SIGTERM
    assert "grace time" in done.stderr


def test_only_the_main_thread_can_install(tmp_path):
    caught = []

    def install():
        with pytest.raises(MismatchError, match="main thread") as error:
            ckptfs.install_signal_handler(ckptfs.Run(tmp_path))
        caught.append(error)

    thread = threading.Thread(target=install)
    thread.start()
    thread.join()
    assert caught
