"""An executor on the accelerator: minivllm's ``Runner`` with the models in torch, on the device that ``Device`` opens.

An accelerator with a runtime of its own implements the methods without ``Runner``: a ``StepPlan`` has the rows, block
tables and tokens of a step as numpy arrays, and a ``StepResult`` the drawn tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from minivllm.plugin import Capacity, Executor, LateInputs, Runner, StepPlan, StepResult, Wiring

from .attention import make_device
from .options import AcceleratorOptions


@dataclass
class Flight:
    """A step that was submitted and not collected yet."""

    plan: StepPlan
    running: Any  # the step as ``Runner`` returns it
    sampled: bool = False  # its tokens are drawn; False until its masks have arrived


class Accelerator(Executor):
    """Run the steps in this process, on one device."""

    def __init__(self, options: AcceleratorOptions | None = None) -> None:
        super().__init__(options)
        self.device = make_device(options)
        self.runner: Runner | None = None
        self.flights: deque[Flight] = deque()

    def start(self, wiring: Wiring) -> Capacity:
        name = self.device.open()
        try:
            runner = Runner(replace(wiring, device=name))
        except BaseException:
            self.device.close()
            raise
        self.runner = runner
        return runner.capacity()

    def submit(self, plan: StepPlan) -> None:
        flight = Flight(plan, self.runner.forward(plan))
        self.flights.append(flight)
        if not len(plan.late):
            self._sample(flight, None)

    def supply(self, step: int, late: LateInputs) -> None:
        self._sample(next(flight for flight in self.flights if flight.plan.id == step), late)

    def _sample(self, flight: Flight, late: LateInputs | None) -> None:
        """Draw the tokens of a step."""
        self.runner.sample(flight.running, late)
        flight.sampled = True

    def collect(self, in_flight: int) -> Sequence[StepResult]:
        results = []
        while len(self.flights) > in_flight and self.flights[0].sampled:
            self.device.wait()
            results.append(self.flights.popleft().running.result())
        return results

    def call(self, verb: str, args: Mapping[str, Any] | None = None) -> Any:
        if verb == "profile_start":
            return self.runner.profile_start()
        if verb == "profile_stop":
            return self.runner.profile_stop(str((args or {})["path"]))
        return super().call(verb, args)

    def alive(self) -> bool:
        return self.runner is not None

    def stop(self, deadline: float = 10.0) -> None:
        self.flights.clear()
        runner, self.runner = self.runner, None
        if runner is not None:
            runner.close()
            self.device.close()
