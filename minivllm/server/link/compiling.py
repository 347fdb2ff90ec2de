"""Compile the grammars of requests in threads beside the engine's loop, since that may take seconds.

    begin ──► grammar found at once? ──yes────────────────────────────────────► ready
                   └──no──► jobs wait, owners in turn ──► workers, never all for one owner ──┘

Requests with equal grammars share one job.  A job whose requests have all been cancelled is removed or stopped.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from minivllm.server.fair_queue import FairQueue

LOOK = 0.005  # seconds between checks of an idle loop while a grammar is compiled


class _CompileJob:
    """A grammar to compile, for the requests in ``lives`` (by number).  ``number`` is that of the first request."""

    __slots__ = ("begun", "key", "lives", "number", "params")

    def __init__(self, number: int, key: Hashable, params: Any) -> None:
        self.number = number
        self.key = key
        self.params = params
        self.lives: dict[int, Any] = {}
        self.begun = False


class Compiling:
    """The requests, by number, whose grammars are being compiled.  One thread calls its methods.

    ``find(params)`` returns an existing grammar or None, or raises the error of a refused one.  ``compile(params)``
    makes a grammar.  At most ``workers`` calls run at a time.  ``stop(params)`` interrupts a call.  If there are
    several workers, an owner may use all but one of them, so that other owners need not wait.

    Invariant: a job in ``_jobs`` has a request.  A job in ``_queue`` has a request and has not begun.
    """

    def __init__(
        self,
        find: Callable[[Any], Any],
        compile: Callable[[Any], Any],
        workers: int,
        stop: Callable[[Any], None] = lambda params: None,
    ) -> None:
        self._find = find
        self._compile = compile
        self._stop = stop
        self._workers = workers
        self._most = max(workers - 1, 1)  # largest number of workers of one owner
        self._pool = ThreadPoolExecutor(workers, "minivllm-compile")
        self._lock = threading.Lock()
        self._queue: FairQueue[_CompileJob] = FairQueue()
        self._jobs: dict[Hashable, _CompileJob] = {}
        # number of a request -> its job; None means that the result is in ``_done``
        self._of: dict[int, _CompileJob | None] = {}
        self._busy: Counter[str] = Counter()  # owner -> running jobs
        # (number, request, grammar, error) that ``ready`` has to return
        self._done: deque[tuple[int, Any, Any, BaseException | None]] = deque()
        self._closed = False

    def __len__(self) -> int:
        return len(self._of)

    def begin(self, number: int, live: Any) -> None:
        """Find or compile the grammar of ``live.request``.  Requests of an owner with the same grammar share a job.
        ``ready`` later returns ``live``."""
        request = live.request
        found, error = None, None
        try:
            found = self._find(request.params)
        except BaseException as e:  # the grammar was refused before
            error = e
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
        """Start waiting jobs on free workers, within the limit of each owner.  The caller holds the lock."""
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
        """Compile the grammar of a job, on a thread of the pool.  Add the grammar or the error to the results, and
        start the next job."""
        grammar, error = None, None
        try:
            grammar = self._compile(job.params)
        except BaseException as e:  # any error must reach the requests, which would otherwise wait for ever
            error = e
        with self._lock:
            self._busy[owner] -= 1
            if not self._busy[owner]:
                del self._busy[owner]
            if self._jobs.get(job.key) is job:
                del self._jobs[job.key]
            for number, live in job.lives.items():
                self._done.append((number, live, grammar, error))
            self._start()

    def cancel(self, number: int) -> bool:
        """Forget a request, which ``ready`` will not return.  Return whether its grammar was being compiled."""
        with self._lock:
            if number not in self._of:
                return False
            job = self._of.pop(number)
            if job is not None:
                job.lives.pop(number, None)
                if not job.lives:
                    self._abandon(job)
            return True

    def _abandon(self, job: _CompileJob) -> None:
        """Remove or stop a job without requests; the lock is held.  Later requests for the grammar get a new job."""
        if self._jobs.get(job.key) is job:
            del self._jobs[job.key]
        if job.begun:
            self._stop(job.params)
        else:
            self._queue.remove(job.number)

    def ready(self) -> list[tuple[Any, BaseException | None]]:
        """Return the requests whose compilation has ended, each with None or its error, and set their ``grammar``."""
        found = []
        while self._done:
            number, live, grammar, error = self._done.popleft()
            with self._lock:
                wanted = number in self._of  # not cancelled
                self._of.pop(number, None)
            if wanted:
                live.request.grammar = grammar
                found.append((live, error))
        return found

    def close(self) -> None:
        """Forget all requests and end the threads without waiting for them."""
        with self._lock:
            self._closed = True
            self._of.clear()
            self._jobs.clear()
            self._queue.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)
