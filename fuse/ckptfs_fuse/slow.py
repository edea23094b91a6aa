"""Work that may hang, done beside the threads that take requests, each piece with a deadline.

Rules: `done` is called exactly once for every piece, with a result or an error, at the latest shortly after its
deadline. A worker that is still busy then is written off and replaced, up to `LOST_MAX` of them, so that a store that
hangs does not use up the workers of one that works.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

LOST_MAX = 64

Done = Callable[[Any, BaseException | None], None]


class Job:
    """One piece of work. Whoever claims it first (worker, deadline, interrupt) is the one that answers."""

    __slots__ = ("_claim", "_done", "_work", "deadline", "state")

    def __init__(self, work: Callable[[], Any], done: Done, deadline: float) -> None:
        self._work: Callable[[], Any] | None = work
        self._done: Done | None = done
        self._claim = threading.Lock()
        self.deadline = deadline
        self.state = "waiting"  # → "running" → "ended"; "waiting" | "running" → "overdue"

    def finish(self, result: Any, error: BaseException | None) -> bool:
        """Answer, unless somebody has; nothing the job held is held afterwards."""
        if not self._claim.acquire(blocking=False):
            return False
        done, self._done, self._work = self._done, None, None
        if done is not None:
            done(result, error)
        return True

    @property
    def is_answered(self) -> bool:
        return self._claim.locked()

    def run(self) -> None:
        work = self._work
        if work is None:
            return
        try:
            result, error = work(), None
        except BaseException as caught:
            result, error = None, caught
        self.finish(result, error)


class SlowWork:
    """A few daemon threads and one clock."""

    def __init__(self, threads: int, timeout_s: float) -> None:
        self._threads = threads
        self._timeout_s = timeout_s
        self._queue: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._due: deque[Job] = deque()  # all have the same time, so the first is due first
        self._changed = threading.Condition()
        self._lost = 0
        self._started = False

    def submit(self, work: Callable[[], Any], done: Done) -> Job:
        job = Job(work, done, time.monotonic() + self._timeout_s)
        with self._changed:
            self._start()
            while self._due and self._due[0].is_answered and self._due[0].state == "ended":
                self._due.popleft()
            self._due.append(job)
            if len(self._due) == 1:
                self._changed.notify()
        self._queue.put(job)
        return job

    def _start(self) -> None:
        if not self._started:
            self._started = True
            for _ in range(self._threads):
                self._start_worker()
            threading.Thread(target=self._watch, name="slow-clock", daemon=True).start()

    def _start_worker(self) -> None:
        threading.Thread(target=self._work, name="slow-work", daemon=True).start()

    def _work(self) -> None:
        while True:
            job = self._queue.get()
            with self._changed:
                if job.state == "overdue":
                    continue
                job.state = "running"
            job.run()
            with self._changed:
                if job.state == "overdue":  # this worker was written off meanwhile, and replaced
                    self._lost -= 1
                    return
                job.state = "ended"
            del job  # keeps nothing alive while it waits

    def _watch(self) -> None:
        while True:
            with self._changed:
                while not self._due:
                    self._changed.wait()
                wait_s = self._due[0].deadline - time.monotonic()
                if wait_s > 0:
                    self._changed.wait(wait_s)
                    continue
                job = self._due.popleft()
                if job.state == "running" and self._lost < LOST_MAX:
                    job.state = "overdue"
                    self._lost += 1
                    self._start_worker()
                elif job.state == "waiting":
                    job.state = "overdue"
            job.finish(None, TimeoutError(f"took more than {self._timeout_s:g} s"))
            del job
