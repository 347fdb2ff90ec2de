"""Compile the kernels of steps at the start of a runner, before steps need them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch

from minivllm.core.external_calls import as_exception
from minivllm.core.timing import StartTimes
from minivllm.core.wiring import wiring_to_json
from minivllm.device import early
from minivllm.errors import describe_error

if TYPE_CHECKING:
    from minivllm.core.interfaces.executor import Wiring
    from minivllm.device.kernels.ahead import CompileAhead, CompiledMarks

log = logging.getLogger(__name__)
OWN = "minivllm/"  # start of the names of minivllm's own plug-ins


class Rehearsals:
    """Compiles the kernels of steps before the steps run, unless an earlier start of the engine has compiled them.

    With ``compile_ahead=False`` in the configuration it does nothing, and kernels are compiled at their first launch.
    If the option is True and kernels are still compiled at their first launch, ``note`` gives the reason.  ``kernels``
    is whether the device runs Triton's kernels.
    """

    def __init__(self, wiring: Wiring, times: StartTimes, device: torch.device, kernels: bool) -> None:
        self.times = times
        self.device = device
        self.ahead: CompileAhead | None = None
        self._preparing: Thread | None = None  # loads what rehearsals use while the weights are loaded
        self._finishing: CompileAhead | None = None  # its last compilations run behind the start
        self.marks: CompiledMarks | None = None
        self.note: str | None = None
        self.captures: Callable[[Any], None] | None = None  # rehearses captures with a worker
        self.named: dict[Hashable, list[Future[None]]] = {}  # name of a rehearsed function -> its compilations
        wanted = wiring.steps.compile_ahead
        if wanted is False:
            return
        reason = _reason_against(wiring, kernels)
        if reason is None:
            self._begin(wiring)
        elif wanted:
            self.note = f"kernels are compiled at their first launch, in spite of compile_ahead: {reason}"

    def _begin(self, wiring: Wiring) -> None:
        from minivllm.device.compile_processes import start_processes, usable_threads
        from minivllm.device.kernels.ahead import CompileAhead, CompiledMarks, prepare_rehearsals

        self.marks = CompiledMarks(self.device, _facts(wiring))
        if self.ready:
            return
        processes = start_processes(usable_threads()) if self.device.type == "cuda" else None
        self.ahead = CompileAhead(self.device, processes=processes)
        self._preparing = early.begin(prepare_rehearsals)

    @property
    def active(self) -> bool:
        """Return whether this start compiles kernels before they run, and no rehearsal has failed."""
        return self.ahead is not None

    @property
    def compiling(self) -> bool:
        """Return whether compilations of a start that has ended are still queued or running."""
        ahead = self._finishing
        return ahead is not None and not all(job.done() for job in ahead.jobs.values())

    @property
    def ready(self) -> bool:
        """Return whether an earlier start, or ``done``, has noted on the disk that the kernels are compiled."""
        return self.marks is not None and self.marks.exist()

    def compile(self, *runs: Callable[[], Any]) -> None:
        """Compile the kernels that the functions ``runs`` launch, by calls that record the kernels, and wait for the
        compiler."""
        self.wait(self.begin(*runs))

    def begin(self, *runs: Callable[[], Any], first: bool = False) -> list[Future[None]]:
        """Start to compile the kernels that the functions ``runs`` launch, and return the compilations.

        If an earlier start has compiled them, no function is called.  If the rehearsal of a function fails, further
        kernels are compiled at their first launch.  ``first`` is that of ``CompileAhead.rehearse``."""
        if self.ahead is None:
            return []
        with self.times.of("compile"):
            if self._preparing is not None:
                self._preparing.join()
            return [job for run in runs for job in self._start(run, first)]

    def begin_named(self, runs: Mapping[Hashable, Callable[[], Any]]) -> dict[Hashable, list[Future[None]]]:
        """Call ``begin`` for each function whose name was not rehearsed before; return the compilations by name."""
        if self.ahead is None:
            return {name: [] for name in runs}
        for name, run in runs.items():
            if name not in self.named:
                self.named[name] = self.begin(run)
        return {name: self.named[name] for name in runs}

    @contextmanager
    def held(self) -> Iterator[None]:
        """Begin no compilation in threads during the body of the ``with`` statement, which rehearses functions."""
        with self.ahead.held() if self.ahead is not None else nullcontext():
            yield

    def wait(self, jobs: Sequence[Future[None]]) -> None:
        """Wait for compilations that ``begin`` returned."""
        if jobs and self.ahead is not None:
            with self.times.of("compile"):
                self.ahead.wait(jobs)

    def _start(self, run: Callable[[], Any], first: bool) -> Sequence[Future[None]]:
        """Start to compile the kernels that ``run`` launches, and return the compilations."""
        if self.ahead is None:
            return ()
        try:
            return self.ahead.rehearse(run, first)
        except Exception as e:
            log.info("further kernels are compiled one after another: %s", describe_error(as_exception(e)))
            self._end((), lambda: None)
            return ()

    def done(self, jobs: Sequence[Future[None]] = ()) -> None:
        """End the rehearsals.  When the compilations ``jobs`` have ended too, note that all kernels are compiled."""
        if self.marks is not None:
            self._end(jobs, self.marks.set)

    def _end(self, jobs: Sequence[Future[None]], finished: Callable[[], None]) -> None:
        """Accept no more functions, and call ``finished`` when the compilations ``jobs`` have ended.

        All queued compilations continue."""
        if self.ahead is not None:
            self.ahead.finish(jobs, finished)
            self._finishing = self.ahead
            self.ahead = None

    @contextmanager
    def needed(self) -> Iterator[None]:
        """Cancel the compilations that have not begun if the body of the ``with`` statement, a part of a start,
        fails."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Cancel the compilations that have not begun."""
        for ahead in (self.ahead, self._finishing):
            if ahead is not None:
                ahead.close()
        self.ahead = self._finishing = None


def _reason_against(wiring: Wiring, kernels: bool) -> str | None:
    """Return the reason why kernels cannot be compiled before their first launch; None if they can."""
    if not kernels:
        return "the device runs no kernels of Triton"
    from triton import knobs

    if knobs.runtime.interpret:
        return "kernels are interpreted (TRITON_INTERPRET)"
    if wiring.parallel.tensor_parallel_size > 1:
        return "several processes share the model"
    parts = (*wiring.parts.values(), *wiring.processors)
    others = [part.name for part in parts if not part.name.startswith(OWN)]
    if others:  # foreign plug-ins may read results of kernels on the host, which do not exist while these are compiled
        return f"parts of other packages run on the device ({', '.join(others)})"
    return None


def _facts(wiring: Wiring) -> list[str]:
    """Return texts of all values on which the compiled kernels depend: the configuration (wiring), and the model's
    sizes."""
    folder = Path(wiring.model_dir)
    config = folder / "config.json"
    shapes = config.read_text(encoding="utf-8") if os.path.isfile(config) else str(folder)
    return [wiring_to_json(replace(wiring, model_dir="", seed=0)), shapes]
