"""The start of a runner: kernels that are compiled before they are needed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from minivllm.core.external_calls import as_exception
from minivllm.core.timing import StartTimes
from minivllm.core.wiring import wiring_to_json
from minivllm.errors import describe_error

if TYPE_CHECKING:
    from minivllm.core.interfaces.executor import Wiring
    from minivllm.device.kernels.ahead import CompileAhead, CompiledMarks

log = logging.getLogger(__name__)
OWN = "minivllm/"  # start of the names of minivllm's own plug-ins
# captures whose kernels are compiled
FIRST = "first"  # the captures that are made before the server is ready
ALL = "all"


class Rehearsals:
    """Compiles the kernels of steps before these run, unless an earlier start has compiled them.

    Without ``compile_ahead`` of the configuration it does nothing, and kernels are compiled at their first launch.
    ``note`` gives the reason if the configuration has it and kernels are still compiled at their first launch.
    ``kernels`` is whether the device runs Triton's kernels.
    """

    def __init__(self, wiring: Wiring, times: StartTimes, device: torch.device, kernels: bool) -> None:
        self.times = times
        self.device = device
        self.ahead: CompileAhead | None = None
        self.marks: CompiledMarks | None = None
        self.note: str | None = None
        if not wiring.steps.compile_ahead:
            return
        reason = _reason_against(wiring, kernels)
        if reason is None:
            self._begin(wiring)
        else:
            self.note = f"kernels are compiled at their first launch, in spite of compile_ahead: {reason}"

    def _begin(self, wiring: Wiring) -> None:
        from minivllm.device.kernels.ahead import CompileAhead, CompiledMarks

        self.marks = CompiledMarks(self.device, _facts(wiring))
        if not self.marks.has(ALL):
            self.ahead = CompileAhead(self.device)

    @property
    def active(self) -> bool:
        """Return whether a rehearsal may still find kernels that are not compiled."""
        return self.ahead is not None

    def compile(self, *runs: Callable[[], Any]) -> None:
        """Compile the kernels of the captures of a start, or of its trial step, and wait for them."""
        if self.marks is None or self.marks.has(FIRST):
            return
        with self.times.of("compile"):
            jobs = [job for run in runs for job in self.start(run)]
            if self.ahead is not None:
                self.ahead.wait(jobs)

    def start(self, run: Callable[[], Any]) -> Sequence[Any]:
        """Start the compilation of the kernels of an operation, and return the compilations.

        If an operation cannot be rehearsed, its kernels and those of all later operations are compiled when they run.
        """
        if self.ahead is None:
            return ()
        try:
            return self.ahead.rehearse(run)
        except Exception as e:
            log.info("kernels are compiled one after another: %s", describe_error(as_exception(e)))
            self.close()
            return ()

    def done(self, stage: str) -> None:
        """Note that all kernels of a stage are compiled.  After the last stage no more are rehearsed."""
        if self.marks is not None and self.ahead is not None:
            self.marks.set(stage)
        if stage == ALL:
            self.close()

    def close(self) -> None:
        """Drop the compilations that have not begun."""
        if self.ahead is not None:
            self.ahead.close()
            self.ahead = None


def _reason_against(wiring: Wiring, kernels: bool) -> str | None:
    """Return the reason why the kernels of steps cannot be compiled before these run, or None."""
    if not kernels:
        return "the device runs no kernels of Triton"
    from triton import knobs

    if knobs.runtime.interpret:
        return "kernels are interpreted (TRITON_INTERPRET)"
    if wiring.parallel.tensor_parallel_size > 1:
        return "several processes share the model"
    parts = (*wiring.parts.values(), *wiring.processors)
    others = [part.name for part in parts if not part.name.startswith(OWN)]
    if others:  # results of the kernels may be read on the host by other plug-ins
        return f"parts of other packages run on the device ({', '.join(others)})"
    return None


def _facts(wiring: Wiring) -> list[str]:
    """Return all values on which the kernels of a configuration depend: its wiring, and the sizes of the model."""
    folder = Path(wiring.model_dir)
    config = folder / "config.json"
    shapes = config.read_text(encoding="utf-8") if config.is_file() else str(folder)
    return [wiring_to_json(replace(wiring, model_dir="", seed=0)), shapes]
