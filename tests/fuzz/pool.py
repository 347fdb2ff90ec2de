"""Worker processes that play one case at a time, and are replaced if they die or hang."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .cases import Case

HERE = Path(__file__).resolve().parent
START_SECONDS = 120.0  # seconds for imports, with many processes on few cores
MOST_UNUSED = 20  # number of workers that may end without a case before the run ends
TAIL = 1500  # characters of a log that are reported
Result = dict[str, Any]


@dataclass
class Worker:
    """A process, its case, and the time of its last message."""

    process: subprocess.Popen[bytes]
    log: Path
    case: Case | None = None
    heard: float = 0.0
    begun: float = 0.0
    stage: str = "starting"
    ready: bool = False
    buffer: bytes = b""

    @property
    def out(self) -> Any:
        return self.process.stdout

    def tail(self) -> str:
        """Return the end of its log, from its last case on."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return text.rpartition("== seed")[2][-TAIL:].strip()


@dataclass
class Pool:
    """A pool of ``processes`` workers, with models, logs and shared answers in ``folder``.

    ``silence`` is the number of seconds without a message after which a worker hangs.  ``until`` is the time.monotonic
    at which all work ends.
    """

    processes: int
    folder: Path
    silence: float
    until: float
    program: Path = HERE / "worker.py"
    workers: list[Worker] = field(default_factory=list)
    started: int = 0
    enough: bool = False
    unused: int = 0
    slowest: float = 1.0  # seconds of a case, about the longest of recent cases

    def run(
        self,
        cases: Iterator[Case],
        done: Callable[[Case, Result], bool | None],
        tick: Callable[[], None] = lambda: None,
        keep: bool = False,
    ) -> int:
        """Play cases until there are no more, time is up or ``done(case, result)`` returns True.

        Return the number of cases that were cut off.  ``tick()`` is called a few times a second.  With ``keep`` idle
        workers stay for the next call.
        """
        left: Iterator[Case] | None = cases
        self.enough = False
        try:
            while True:
                tick()
                now = time.monotonic()
                if now >= self.until or self.enough:
                    break
                # do not begin a case that would be cut off; half of the cases take less than half of the slowest
                open_ = left is not None and now + min(0.5 * self.slowest, 10.0) < self.until
                if open_ and left is not None and not self._fill(left):
                    left = None
                if not any(w.case for w in self.workers) and (left is None or not open_):
                    break
                self._listen(done)
        finally:
            busy = [w for w in self.workers if w.case is not None]
            self.close(busy if keep else self.workers)
        return len(busy)

    def close(self, workers: list[Worker] | None = None) -> None:
        """End these workers, or all."""
        gone = list(self.workers if workers is None else workers)
        for worker in gone:
            _kill(worker)
        for worker in gone:
            worker.process.wait()
            self.workers.remove(worker)

    def _fill(self, cases: Iterator[Case]) -> bool:
        """Give every idle worker a case, and return False if there are no more."""
        while len(self.workers) < self.processes:
            self.workers.append(self._start())
        for worker in self.workers:
            if worker.case is None and worker.ready:
                case = next(cases, None)
                if case is None:
                    return False
                self._give(worker, case)
        return True

    def _start(self) -> Worker:
        self.started += 1
        log = self.folder / f"worker-{self.started}.log"
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
        shared = self.folder / "alone"
        shared.mkdir(exist_ok=True)
        with open(log, "wb") as file:
            process = subprocess.Popen(
                [sys.executable, str(self.program), str(self.folder), str(shared)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=env,
                start_new_session=True,
            )
        os.set_blocking(process.stdout.fileno(), False)  # type: ignore[union-attr]
        return Worker(process, log, heard=time.monotonic())

    def _give(self, worker: Worker, case: Case) -> None:
        worker.case, worker.begun, worker.heard, worker.stage = case, time.monotonic(), time.monotonic(), "given"
        with contextlib.suppress(BrokenPipeError):  # the worker has died, which the next read detects
            worker.process.stdin.write(case.to_json().encode() + b"\n")  # type: ignore[union-attr]
            worker.process.stdin.flush()  # type: ignore[union-attr]

    def _listen(self, done: Callable[[Case, Result], bool | None]) -> None:
        """Wait a short time for messages of the workers, and handle silent workers."""
        with selectors.DefaultSelector() as selector:
            for worker in self.workers:
                selector.register(worker.out, selectors.EVENT_READ, worker)
            for key, _ in selector.select(min(0.2, max(self.until - time.monotonic(), 0))):
                self._hear(key.data, done)
        for worker in list(self.workers):
            patience = self.silence if worker.ready else max(START_SECONDS, self.silence)
            if time.monotonic() - worker.heard > patience and (worker.case or not worker.ready):
                self._hung(worker, done)

    def _hear(self, worker: Worker, done: Callable[[Case, Result], bool | None]) -> None:
        data = worker.out.read()
        if data == b"":  # the worker has closed its side
            self._ended(worker, done)
            return
        *lines, worker.buffer = (worker.buffer + (data or b"")).split(b"\n")
        for line in lines:
            worker.heard = time.monotonic()
            reported = json.loads(line)
            if "stage" in reported:
                worker.stage, worker.ready = reported["stage"], True
            elif worker.case is not None:
                case, worker.case, result = worker.case, None, reported["done"]
                self.slowest = max(0.95 * self.slowest, result["seconds"])
                worker.ready = not result["replace"]
                self.enough |= bool(done(case, result))

    def _ended(self, worker: Worker, done: Callable[[Case, Result], bool | None]) -> None:
        self.workers.remove(worker)
        status = worker.process.wait()
        if worker.case is not None:
            name = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
            self.enough |= bool(
                done(worker.case, self._lost(worker, "died", f"died ({name}) in {worker.stage!r}: {worker.tail()}"))
            )
        elif status:
            self._unused(worker, f"ended with status {status}")

    def _hung(self, worker: Worker, done: Callable[[Case, Result], bool | None]) -> None:
        with contextlib.suppress(ProcessLookupError):
            worker.process.send_signal(signal.SIGUSR1)  # faulthandler writes all stacks
        time.sleep(1.0)
        reported = f"hung: no end of {worker.stage!r} within {self.silence:.0f} s: {worker.tail()}"
        self.workers.remove(worker)
        _kill(worker)
        worker.process.wait()
        if worker.case is None:
            self._unused(worker, "did not start")
            return
        self.enough |= bool(done(worker.case, self._lost(worker, "hung", reported)))

    def _unused(self, worker: Worker, what: str) -> None:
        """Count a worker that ended without a case, which is accepted unless it happens often."""
        self.unused += 1
        print(f"a worker {what}: {worker.tail()}", flush=True)
        if self.unused > MOST_UNUSED:
            raise SystemExit(f"{self.unused} workers went away before they had a case")

    def _lost(self, worker: Worker, kind: str, message: str) -> Result:
        case = worker.case
        assert case is not None
        return {
            "seed": case.seed,
            "dtype": case.dtype,
            "requests": len(case.asks),
            "tokens": 0,
            "met": {},
            "faults": [[kind, message, None]],
            "replace": True,
            "seconds": time.monotonic() - worker.begun,
        }


def _kill(worker: Worker) -> None:
    """End the process and its children, which form a session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.process.pid, signal.SIGKILL)
