"""Run the steps of an engine on one device, in the process in which the executor is constructed.

On a GPU ``submit`` enqueues a step and the copy of its result to pinned host memory, and then records a CUDA event.
``collect`` returns the result when the event shows that the copy is complete.  On a CPU the step has run when
``submit`` returns, unless it waits for token masks."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.core.interfaces.executor import Capacity, Executor, Wiring
from minivllm.core.interfaces.plan import LateInputs, StepPlan, StepResult
from minivllm.core.timing import StartTimes
from minivllm.device import early
from minivllm.errors import RequestError, ResourceError
from minivllm.runtime.processes.memory import HeapTrimmer, resident_bytes

from . import part_figures
from .shared_device import with_others

if TYPE_CHECKING:
    from minivllm.device.worker.runner import Runner


class Local(Executor):
    """Run the steps of one runner, each in two parts: FORWARD (the model) and SAMPLE (the draw of tokens).

    A step whose token masks have not arrived waits between the two.  Later steps wait before FORWARD, because captured
    steps share the tensors of their inputs and hidden states."""

    takes_tensors = True

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.runner: Any = None
        self._seams: Any = None  # the running profile of plug-in times, or None
        # submitted steps (runner.Running) in order; all but the last have drawn their tokens
        self._running: deque[Any] = deque()
        self._behind: deque[StepPlan] = deque()  # steps that wait until the token masks of an earlier step arrive
        # Token masks that arrived for steps in ``_behind``, by step id; None on a rank that draws no tokens.
        self._early: dict[int, LateInputs | None] = {}
        # returns unused heap memory to the system, if steps use this process's heap
        self._heap: HeapTrimmer | None = None

    def start(self, wiring: Wiring) -> Capacity:
        times = StartTimes()
        with times.of("imports"):
            early.prepare_kernels(wiring.device)
            from minivllm.device.worker.runner import Runner

        try:
            runner = Runner(wiring)
            runner.worker.times.include(times.seconds)
            return self.adopt(runner)
        except BaseException as e:
            if wiring.device != "cpu":
                _free_failed_start(e)
            if isinstance(e, ResourceError):
                raise with_others(e, wiring.device) from e
            raise

    def adopt(self, runner: Runner) -> Capacity:
        """Use an existing runner for the steps, and return its capacity."""
        self.runner = runner
        self._heap = HeapTrimmer() if self.runner.device.type == "cpu" else None
        return self.runner.capacity()

    def submit(self, plan: StepPlan) -> None:
        self._behind.append(plan)
        self._enqueue()

    def _enqueue(self) -> None:
        while self._behind and (not self._running or self._running[-1].sampled):
            plan = self._behind.popleft()
            running = self.runner.forward(plan)
            if plan.id in self._early or not len(plan.late):
                self.runner.sample(running, self._early.pop(plan.id, None))
            self._running.append(running)

    def supply(self, step: int, late: LateInputs | None) -> None:
        if any(plan.id == step for plan in self._behind):
            self._early[step] = late
            return
        running = next(r for r in self._running if r.plan.id == step)
        self.runner.sample(running, late)
        self._enqueue()

    def mask_memory(self, rows: int, words: int) -> np.ndarray:
        return self.runner.mask_memory(rows, words)

    def collect(self, in_flight: int) -> Sequence[StepResult]:
        out = []
        while self._running and (len(self._running) > in_flight or self._running[0].finished()):
            if not self._running[0].sampled:
                break  # the masks of the step have not arrived
            out.append(self._running.popleft().result())
        if out and self._heap is not None:
            self._heap.look()
        return out

    def call(self, verb: str, args: Mapping[str, Any] | None = None) -> Any:
        if verb == "profile_start":
            return self.runner.profile_start()
        if verb == "profile_stop":
            return self.runner.profile_stop(str((args or {})["path"]))
        if verb == "seams_start":
            self._seams = self._profile()
            return None
        if verb == "seams_stop":
            if self._seams is None:
                raise RequestError("no profile of seams is running; call seams_start first")
            seams = self._seams
            self._seams = None
            return seams.stop(**(args or {}))
        if verb == "kv_resident":
            caches = [t for group in self.runner.worker.caches for layer in group for t in layer.values()]
            return resident_bytes([(t.data_ptr(), t.nbytes) for t in caches if t.device.type == "cpu"])
        if verb == "kv_tiers" and self.runner.mover is not None:
            return [self.runner.mover.answer(args or {})]
        if verb == "adapters" and self.runner.adapters is not None:
            return [self.runner.adapters.answer(args or {})]
        if verb == "weights":
            return [self.runner.weights.answer(args or {})]
        if verb == "captures":
            return self.runner.capture_later()
        if verb == "start_times":
            return self.runner.worker.times.seconds
        if verb == "devices":
            return [_name(self.runner.device)]
        if verb == "figures":
            return part_figures.of_runner(self.runner)
        return super().call(verb, args)

    def _profile(self) -> Any:
        if self._seams is not None:
            raise RequestError("a profile of seams is running already; call seams_stop first")
        from .seam_profile import SeamProfile

        return SeamProfile(self.runner)

    def alive(self) -> bool:
        return self.runner is not None

    def stop(self, deadline: float = 10.0) -> None:
        for waiting in (self._running, self._behind, self._early):
            waiting.clear()
        if self.runner is not None:
            self.runner.close()
            self.runner = None


def _free_failed_start(error: BaseException) -> None:
    """Free the device memory of an engine that could not start.

    The frames of its traceback refer to weights and caches, and a notebook keeps the last traceback.
    """
    from minivllm.device.worker.capture import release_unused

    chain: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and one not in chain:
        chain.append(one)
        traceback.clear_frames(one.__traceback__)
        one = one.__cause__ or one.__context__
    release_unused()


def _name(device: Any) -> str:
    if device.type == "cpu":
        return "cpu"
    import torch

    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
