"""Grammars of requests that come to the engine's loop: compiled beside it, because that may take seconds.

    begin ──► found at once? ──yes──────────────────────────────────────────────► ready
                   └──no──► jobs wait, owners in turn ──► workers, not all of one owner's ──┘

Requests that ask for the same are one job.  A job whose requests have all been cancelled is not begun, or stopped.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from minivllm.server.fair_queue import FairQueue

LOOK = 0.005  # seconds between looks while something is compiled and nothing else happens


class _CompileJob:
    """What is to be compiled, and for which requests."""

    __slots__ = ("begun", "key", "lives", "number", "params")

    def __init__(self, number: int, key: Hashable, params: Any) -> None:
        self.number, self.key, self.params = number, key, params  # the number of its first request
        self.lives: dict[int, Any] = {}
        self.begun = False


class Compiling:
    """Requests by number whose grammars are being compiled.  One thread asks; ``cancel`` forgets one.

    ``find(params)`` gives a grammar that is there already, or None, or raises why there is none; ``compile(params)``
    makes it, at most ``workers`` at once, and ``stop(params)`` has it end before it has.  One owner has all workers but
    one at most, if there are several: another's waits for nobody.

    Invariant: a job in ``_jobs`` has a request; one in ``_queue`` has a request and has not begun.
    """

    def __init__(
        self,
        find: Callable[[Any], Any],
        compile: Callable[[Any], Any],
        workers: int,
        stop: Callable[[Any], None] = lambda params: None,
    ) -> None:
        self._find, self._compile, self._stop = find, compile, stop
        self._workers, self._most = workers, max(workers - 1, 1)
        self._pool = ThreadPoolExecutor(workers, "minivllm-compile")
        self._lock = threading.Lock()
        self._queue: FairQueue[_CompileJob] = FairQueue()
        self._jobs: dict[Hashable, _CompileJob] = {}
        self._of: dict[int, _CompileJob | None] = {}  # by request; None: there is an answer, which ``ready`` is to give
        self._busy: Counter[str] = Counter()  # jobs that run, by owner
        self._done: deque[tuple[int, Any, Any, BaseException | None]] = deque()
        self._closed = False

    def __len__(self) -> int:
        return len(self._of)

    def begin(self, number: int, live: Any) -> None:
        """``live.request.grammar`` will be there when ``ready`` gives ``live`` back."""
        request = live.request
        try:
            found, error = self._find(request.params), None
        except BaseException as e:  # refused before: it is told as any refusal is
            found, error = None, e
        with self._lock:
            if found is not None or error is not None:
                self._of[number] = None
                self._done.append((number, live, found, error))
                return
            key = request.owner, request.params.salt, request.params.structured_outputs.source
            job = self._jobs.get(key)
            if job is None:
                job = self._jobs[key] = _CompileJob(number, key, request.params)
                self._queue.push(request.owner, number, job)
            job.lives[number] = live
            self._of[number] = job
            self._start()

    def _start(self) -> None:
        """Give free workers what is next; the lock is held."""
        while not self._closed and self._busy.total() < self._workers:
            full = [owner for owner, jobs in self._busy.items() if jobs >= self._most]
            next_up = self._queue.pop(full)
            if next_up is None:
                return
            owner, _, job = next_up
            job.begun = True
            self._busy[owner] += 1
            self._pool.submit(self._run, owner, job)

    def _run(self, owner: str, job: _CompileJob) -> None:
        made, error = None, None
        try:
            made = self._compile(job.params)
        except BaseException as e:  # what is not told here is told nowhere: its requests would wait for ever
            error = e
        with self._lock:
            self._busy[owner] -= 1
            if not self._busy[owner]:
                del self._busy[owner]
            if self._jobs.get(job.key) is job:
                del self._jobs[job.key]
            for number, live in job.lives.items():
                self._done.append((number, live, made, error))
            self._start()

    def cancel(self, number: int) -> bool:
        """Whether it was being compiled; it will not come back."""
        with self._lock:
            if number not in self._of:
                return False
            job = self._of.pop(number)
            if job is not None:
                job.lives.pop(number, None)
                if not job.lives:  # who asks for the same now has a job of its own
                    if self._jobs.get(job.key) is job:
                        del self._jobs[job.key]
                    self._stop(job.params) if job.begun else self._queue.remove(job.number)
            return True

    def ready(self) -> list[tuple[Any, BaseException | None]]:
        """What has been compiled, or why it could not be."""
        found = []
        while self._done:
            number, live, grammar, error = self._done.popleft()
            with self._lock:
                here = number in self._of
                self._of.pop(number, None)
            if here:
                live.request.grammar = grammar
                found.append((live, error))
        return found

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._of.clear()
            self._jobs.clear()
            self._queue.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)
