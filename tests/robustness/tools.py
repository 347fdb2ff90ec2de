"""The command line in a process that runs ``minivllm`` repeatedly, so that torch is imported once.

A command that ends, blocks or kills the process is noticed, and the next command gets a new process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .ground import ROOT, children, command, environment, gone

LIMIT = 60.0  # the most seconds of a command


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str
    seconds: float

    def ended(self, code: int, *words: str) -> None:
        """Raise AssertionError unless the command ended with this status and one line with the reason, which has the
        words.
        """
        assert self.code == code, f"ended with {self.code}, expected {code}: {self.err[-500:]}"
        lines = [line for line in self.err.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("minivllm: error: ")]
        assert len(errors) == 1 and lines[-1] == errors[0], f"expected one line that says why: {self.err[-800:]}"
        assert "Traceback" not in self.err and "(a bug;" not in self.err, self.err[-800:]
        for word in words:
            assert word in errors[0], f"{word!r} is not in: {errors[0][:600]}"


class Tools:
    """Runs commands: ``run`` in the shared process, ``really`` in a new one, as for a user.

    ``folder`` is empty for each case.
    """

    def __init__(self) -> None:
        self._root = tempfile.TemporaryDirectory(prefix="minivllm-robust-")
        self._number = 0
        self._child: Any = None

    @property
    def canary(self) -> Path:
        """Return the file that hostile code in data would write if it ran."""
        return Path(self._root.name) / "canary"

    def folder(self) -> Path:
        self._number += 1
        made = Path(self._root.name) / str(self._number)
        made.mkdir()
        return made

    def run(self, *argv: str, path: Sequence[Path] = (), env: Mapping[str, str] | None = None) -> Done:
        child = self._start()
        start = time.monotonic()
        child.stdin.write(json.dumps({"argv": argv, "path": [str(p) for p in path], "env": dict(env or {})}) + "\n")
        child.stdin.flush()
        with _alarm(LIMIT, child):
            line = child.stdout.readline()
        if not line:
            self._child = None
            raise AssertionError(f"minivllm {' '.join(argv)} ended its process with {child.wait()}")
        received = json.loads(line)
        return Done(received["code"], received["out"], received["err"], time.monotonic() - start)

    def really(self, *argv: str, path: Sequence[Path] = (), env: Mapping[str, str] | None = None) -> Done:
        env = {**environment(), **(env or {})}
        env["PYTHONPATH"] = os.pathsep.join([*map(str, path), str(ROOT)])
        start = time.monotonic()
        process = subprocess.Popen(
            command(*argv),
            env=env,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            inner: list[int] = []
            end = start + 2 * LIMIT
            while process.poll() is None and time.monotonic() < end:
                inner = children(process.pid) or inner
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)
            assert process.poll() is not None, f"minivllm {' '.join(argv)} did not end"
        finally:
            if process.poll() is None:
                process.kill()
            out, err = process.communicate()
        gone(inner)
        return Done(process.returncode, out, err, time.monotonic() - start)

    def at_rest(self) -> None:
        assert not self.canary.exists(), "code in data was run"

    def _start(self) -> Any:
        if self._child is None or self._child.poll() is not None:
            self._child = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("worker.py"))],
                env=environment(),
                cwd="/",
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        return self._child

    def stop(self) -> None:
        if self._child is not None:
            self._child.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(5)
            if self._child.poll() is None:
                self._child.kill()
                self._child.wait()
            self._child.stdout.close()
        self._root.cleanup()


@contextlib.contextmanager
def _alarm(seconds: float, child: Any) -> Any:
    """Kill the process after ``seconds``, so that reading from it ends."""

    def kill(number: int, at: Any) -> None:
        child.kill()

    before = signal.signal(signal.SIGALRM, kill)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
