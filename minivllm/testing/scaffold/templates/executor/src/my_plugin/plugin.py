"""Run the steps on a thread.  The engine plans the next step while torch, which releases the GIL, computes.

The thread can become a process or another machine.  Its inputs are a ``Wiring`` and ``StepPlan`` objects, its results a
``Capacity`` and ``StepResult`` objects, which consist of arrays and plain data.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from minivllm.plugin import Capacity, Executor, LateInputs, Runner, StepPlan, StepResult, Wiring


@dataclass
class Flight:
    """A step that was submitted and not yet collected."""

    plan: StepPlan
    result: Future[StepResult] | None = None  # None until its masks have arrived
    running: Any = None  # between FORWARD and SAMPLE


class MyPlugin(Executor):
    """An executor with a thread that makes all calls of the runner, in order."""

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.thread: ThreadPoolExecutor | None = None
        self.runner: Runner | None = None
        self.flights: deque[Flight] = deque()

    def start(self, wiring: Wiring) -> Capacity:
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="my-plugin")
        try:
            self.runner = self.thread.submit(Runner, wiring).result()
            capacity = self.runner.capacity()
        except BaseException:
            self.stop()
            raise
        depth = 1 if wiring.steps.run_ahead is None else wiring.steps.run_ahead
        return replace(capacity, depth=depth)

    def submit(self, plan: StepPlan) -> None:
        flight = Flight(plan)
        if len(plan.late):
            self.thread.submit(self._forward, flight)
        else:
            flight.result = self.thread.submit(self._step, flight)
        self.flights.append(flight)

    def supply(self, step: int, late: LateInputs) -> None:
        flight = next(f for f in self.flights if f.plan.id == step)
        flight.result = self.thread.submit(self._sample, flight, late)

    def _forward(self, flight: Flight) -> None:
        flight.running = self.runner.forward(flight.plan)

    def _sample(self, flight: Flight, late: LateInputs | None = None) -> StepResult:
        self.runner.sample(flight.running, late)
        return flight.running.result()

    def _step(self, flight: Flight) -> StepResult:
        self._forward(flight)
        return self._sample(flight)

    def collect(self, in_flight: int) -> Sequence[StepResult]:
        done = []
        while self.flights and self.flights[0].result is not None:
            result = self.flights[0].result
            if len(self.flights) <= in_flight and not result.done():
                break
            done.append(result.result())
            self.flights.popleft()
        return done

    def call(self, verb: str, args: Mapping[str, Any] | None = None) -> Any:
        if verb == "profile_start":
            return self.thread.submit(self.runner.profile_start).result()
        if verb == "profile_stop":
            return self.thread.submit(self.runner.profile_stop, str((args or {})["path"])).result()
        return super().call(verb, args)

    def alive(self) -> bool:
        return self.runner is not None

    def stop(self, deadline: float = 10.0) -> None:
        self.flights.clear()
        thread = self.thread
        runner = self.runner
        self.thread = self.runner = None
        if runner is not None:
            thread.submit(runner.close).result(deadline)
        if thread is not None:
            thread.shutdown()
