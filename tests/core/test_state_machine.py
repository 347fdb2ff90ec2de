"""The engine through any order of events under unusual policies.

The conformance kit does the same with the real ones.
"""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from minivllm.core.interfaces.scheduler import StepShape
from minivllm.plugins.scheduler.fcfs import Fcfs
from minivllm.testing.base import Seen
from minivllm.testing.scheduler import HARD, EngineMachine


class AnyVictim(Fcfs):
    """A policy that preempts a row which depends on the ids of the rows."""

    def victim(self, candidates, need):
        return int(candidates.id.sum() * 7919 % len(candidates))


class Reversed(AnyVictim):
    """A policy that serves the latest request first."""

    def order(self, head, running, now):
        return np.argsort(-head.id)


class PrefillFirst(AnyVictim):
    def shape(self, load, now):
        return StepShape("prefill_first")


def test_no_policy_can_make_the_engine_lose_a_block_or_a_token():
    seen = Seen()
    machine = type("Machine", (EngineMachine,), {"policies": [AnyVictim, Reversed, PrefillFirst], "seen": seen})
    how = settings(max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
    for _ in range(4):  # rare events may be missing in examples that are drawn once
        run_state_machine_as_test(machine, settings=how)
        if all(seen[event] for event in HARD):
            break
    seen.require(**dict.fromkeys(HARD, 1))
