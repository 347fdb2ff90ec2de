"""Suites over several processes, a test at a time: on a GPU most of the kit's time is a core that compiles kernels."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from .session import Outcome, run, suite

LONGEST_FIRST = ("definition", "head_size", "engine_serves", "values_in_the_keys", "normalises")  # words of their names


def tests_of(seam: str) -> list[str]:
    """The names of a suite's tests, those that take long first: the others then fill what time is left."""
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
    """Each plug-in, in their order, with what ``session.run`` gives for it.  A test that ends its process has failed;
    the next one gets a new process, and so it does after a fault of the GPU, behind which nothing works any more."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the processes are enough for the cores
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
            jobs = [
                (plugin, [threads.submit(outcomes, plugin, name) for name in tests_of(plugin[0])]) for plugin in plugins
            ]
            for plugin, done in jobs:
                yield plugin, [outcome for future in done for outcome in future.result()]
        finally:  # also where somebody has heard enough
            threads.shutdown(cancel_futures=True)
            for child in children:
                child.end()


class _Child:
    """A process that runs tests, from the first one on; another one after it has ended."""

    def __init__(self, how: Mapping[str, Any]) -> None:
        self.how, self.process, self.pipe = how, None, None

    def run(self, plugin: tuple[str, str], name: str) -> list[Outcome]:
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.pipe, theirs = context.Pipe()
            self.process = context.Process(target=_serve, args=(theirs, self.how, list(sys.path)))
            self.process.start()
            theirs.close()  # so that its end shows here
        try:
            self.pipe.send((plugin, name))
            answer, sound = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            code, self.process = self.process.exitcode, None
            return [Outcome(*plugin, name, "failed", 0.0, f"it ended its process, with exit code {code}")]
        if not sound:
            self.end()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def end(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.join()
            self.process = None


def _serve(pipe: Any, how: Mapping[str, Any], path: list[str]) -> None:
    """In the process: tests as they come, each answered with its outcomes and whether the GPU can go on."""
    sys.path[:] = path
    while True:
        try:
            plugin, name = pipe.recv()
        except EOFError:  # who asked is no more
            return
        try:
            answer: Any = run([plugin], only={name}, **how)
        except Exception as exc:
            answer = exc
        pipe.send((answer, _sound()))


def _sound() -> bool:
    """Whether this process' GPU works, or was not used."""
    import torch

    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # the next test may be in another process, on the same GPU
    except RuntimeError:
        return False
    return True
