"""Run the tests of suites in several processes, one test at a time in each.

On a GPU the kit spends most of its time on the compilation of kernels, which takes a CPU core.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from .session import Outcome, run, suite

LONGEST_FIRST = (
    "definition",
    "head_size",
    "engine_serves",
    "values_in_the_keys",
    "normalises",
)  # parts of the names of tests that take long


def tests_of(seam: str) -> list[str]:
    """Return the names of a suite's tests, the long ones first, so that all processes end at about the same time."""
    names = [name for name in dir(suite(seam)) if name.startswith("test_")]
    return sorted(names, key=lambda name: not any(word in name for word in LONGEST_FIRST))


def run_parallel(
    plugins: Sequence[tuple[str, str]],
    processes: int,
    *,
    device: str = "",
    profile: str = "",
    seed: int | None = None,
    select: str = "",
    known: Mapping[str, str] | None = None,
) -> Iterator[tuple[tuple[str, str], list[Outcome]]]:
    """Run the suites of some plug-ins in parallel, and yield each plug-in, in order, with its outcomes.

    The arguments and outcomes are those of ``session.run``.  A test that ends its process has failed, and the next
    test gets a new process.  The same holds after a fault of the GPU, because the process cannot use it any more.
    """
    # torch uses one thread per process, because the processes alone use all cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    how = dict(device=device, profile=profile, seed=seed, select=select, known=dict(known or {}))
    free: SimpleQueue[_Child] = SimpleQueue()
    children = [_Child(how) for _ in range(processes)]
    for child in children:
        free.put(child)

    def outcomes(plugin: tuple[str, str], name: str) -> list[Outcome]:
        child = free.get()
        try:
            return child.run(plugin, name)
        finally:
            free.put(child)

    with ThreadPoolExecutor(processes) as threads:
        try:
            jobs = []
            for plugin in plugins:
                jobs.append([threads.submit(outcomes, plugin, name) for name in tests_of(plugin[0])])
            for plugin, futures in zip(plugins, jobs, strict=True):
                yield plugin, [outcome for future in futures for outcome in future.result()]
        finally:  # stop the processes also if the caller stops early
            threads.shutdown(cancel_futures=True)
            for child in children:
                child.end()


class _Child:
    """A child process that runs tests.  The first test starts it.  If it has ended, the next test starts another."""

    def __init__(self, how: Mapping[str, Any]) -> None:
        self.how = how
        self.process = None
        self.pipe = None

    def run(self, plugin: tuple[str, str], name: str) -> list[Outcome]:
        """Run the test ``name`` of the plug-in ``plugin``, (seam, name), in the process, and return its outcomes: one
        for each set of the test's parameters, none if ``select`` leaves it out.

        If the test ends the process, its outcome is "failed".  An error of ``session.run`` is raised."""
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.pipe, remote = context.Pipe()
            args = (remote, self.how, list(sys.path))
            self.process = context.Process(target=_serve, args=args)
            self.process.start()
            remote.close()  # closed here too, so that the end of the process closes the pipe
        try:
            self.pipe.send((plugin, name))
            answer, gpu_works = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode
            self.process = None
            return [Outcome(*plugin, name, "failed", 0.0, f"it ended its process, with exit code {code}")]
        if not gpu_works:
            self.end()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def end(self) -> None:
        """Terminate the process."""
        if self.process is not None:
            self.process.terminate()
            self.process.join()
            self.process = None


def _serve(pipe: Any, how: Mapping[str, Any], path: list[str]) -> None:
    """Receive (plug-in, name of a test) through a pipe in a child process, and run each test.

    Send (its outcomes or an error, whether the GPU still works) for each test.
    """
    sys.path[:] = path
    while True:
        try:
            plugin, name = pipe.recv()
        except EOFError:  # the parent process has ended
            return
        try:
            answer: Any = run([plugin], only={name}, **how)
        except Exception as exc:
            answer = exc
        pipe.send((answer, _gpu_works()))


def _gpu_works() -> bool:
    """Return whether this process can use the GPU, or has not used it yet."""
    import torch

    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # the next test may run in another process on the same GPU
    except RuntimeError:
        return False
    return True
