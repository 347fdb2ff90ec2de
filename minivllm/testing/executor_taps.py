"""Tests of executors: reading activations at tap points of the model, and adding vectors to them (steering)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from minivllm.core.interfaces.plan import StepPlan, StepResult

from .base import since
from .driver import NEAR, Driver, by_slot, check_result, output_of, prompts, tiny
from .executor_rows import ExecutorRows

# tap points whose values transformers returns as hidden states
READ = ("layers.0.input", "layers.2.input", "layers.3.input")
# slot -> number of tokens in each step of the test of taps
STEPS: tuple[dict[int, int], ...] = ({0: 5, 1: 6, 2: 1}, {0: 4, 1: 1}, {0: 1, 2: 1}, {0: 1, 2: 1})
# (index in STEPS, tap point, slot, first token to read); nothing is read in the last step
TAPS = [
    (0, READ[0], 0, 0),
    (0, READ[1], 0, 2),
    (0, READ[1], 2, 0),
    (0, READ[2], 2, 0),
    (1, READ[1], 0, 0),
    (1, READ[2], 0, 3),
    (1, "logits", 0, 3),
    (2, READ[1], 0, 0),
    (2, READ[2], 2, 0),
    (2, "logits", 2, 0),
]
Tap = tuple[str, int, int]  # (tap point, slot, first token to read)


class ExecutorTaps(ExecutorRows):
    """The tests of taps and steering."""

    def need_points(self, driver: Driver) -> None:
        """Skip the test if the executor's capacity has no tap points."""
        if driver.capacity.taps is None:
            pytest.skip("excused: its capacity has taps=None, so the engine gives it none")

    @since(2, 3)
    def test_rows_read_what_transformers_has_at_points_of_the_model(self) -> None:
        """Check that ``StepPlan.taps`` reads the activations that transformers computes at tap points of the model.

        They are float32, point after point, from the row's token ``first`` on.  Steps have chunks and single tokens,
        and rows that read nothing.  The point ``logits`` has the logits from which the row draws.
        """
        a, b, c = prompts(9, 6, 1)
        taps: list[list[Tap]] = [[] for _ in STEPS]
        for step, *tap in TAPS:
            taps[step].append(tuple(tap))
        plans = []
        with self.started() as driver:
            self.need_points(driver)
            for slot, prompt in enumerate((a, b, c)):
                driver.join(slot, prompt, 20)
            for rows, of_step in zip(STEPS, taps, strict=True):
                plans.append(driver.submit(rows, taps=of_step))
            results = driver.collect()
        known = {0: list(a), 1: list(b), 2: list(c)}
        for plan, result, of_step in zip(plans, results, taps, strict=True):
            check_result(plan, result, driver.capacity.vocab_size)
            self.check_taps(driver, plan, result, of_step, known)
            for slot, token in by_slot(result).items():
                known[slot].append(token)
        tokens = known[1][len(b) :]
        expected = self.greedy(b, 2)
        assert tokens == expected, f"a row that reads nothing draws {tokens}: expected {expected}"

    def check_taps(
        self, driver: Driver, plan: StepPlan, result: StepResult, taps: Sequence[Tap], known: Mapping[int, list[int]]
    ) -> None:
        """Fail unless a step result has the activations that ``taps`` names, each a (tap point, slot, first token).

        ``known`` has the tokens of each slot before the step draws.
        """
        slots = plan.slots.tolist()

        def place(tap: Tap) -> tuple[int, int]:
            point, slot, _ = tap
            return driver.point(point), slots.index(slot)

        parts = [np.empty(0, np.float32)]
        for point, slot, first in sorted(taps, key=place):
            row = slots.index(slot)
            start = int(plan.computed[row])
            end = start + int(plan.q_len[row])
            of_row = hidden(known[slot][:end], point)
            part = of_row[start + first :].ravel()
            parts.append(part)
        expected = np.concatenate(parts)
        found = result.taps
        form = f"{found.dtype} {list(found.shape)}"
        wanted = f"float32 {list(expected.shape)}"
        assert form == wanted, f"step {plan.id}: taps are {form}: expected {wanted}"
        difference = np.abs(found - expected)
        worst = float(difference.max(initial=0))
        assert worst < NEAR, f"step {plan.id}: taps differ from those of transformers by {worst:.2g}: allowed {NEAR}"

    @since(2, 3)
    def test_what_is_added_to_a_row_changes_it_alone_and_goes_on_with_its_forks(self) -> None:
        """Check that the vectors of ``Join.steer`` change only their own row and its forks.

        Vectors are added at one or several tap points of the model, from the first token on.  Another row of the step,
        and the next sequence in the slot, are not changed.
        """
        a, b, c = prompts(9, 11, 5)
        width = tiny().model.config.hidden_size
        vector = np.linspace(-4, 4, width).astype(np.float32)
        reversed_vector = vector[::-1].copy()
        add = {"layers.1.residual": vector, "layers.2.residual": reversed_vector**2}
        expected = steered(a, add, 4)
        assert expected != self.greedy(a, 4), "the vectors change nothing"
        plain = self.greedy(c, 3)
        assert plain != steered(c, add, 3), "the vectors change nothing"
        with self.started() as driver:
            self.need_points(driver)
            vectors = {name: x.tolist() for name, x in add.items()}
            driver.join(0, a, 4, add=vectors)
            driver.join(1, b, 4)
            tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
            driver.submit({0: 8, 1: 11})
            driver.fork(0, 2, 1)
            for _ in range(3):
                driver.submit({0: 1, 1: 1, 2: 1})
            driver.submit({0: 1, 2: 1})
            for result in driver.collect():
                for slot, token in by_slot(result).items():
                    tokens[slot].append(token)
            row, other_row, fork = tokens.values()
            other = self.greedy(b, 4)
            assert other_row == other, f"the other row draws {other_row}: expected {other}"
            assert row == expected, f"the row with vectors draws {row}: expected {expected}"
            assert fork == expected, f"the fork of the row draws {fork}: expected {expected}"
            driver.leave(0, 1, 2)
            (found,) = driver.generate([c], 3)
            assert found == plain, f"the next sequence in the slot does not draw {plain}"


def hidden(tokens: Sequence[int], point: str) -> np.ndarray:
    """Return the activations of transformers at a tap point of ``READ``, or the logits, float32 [tokens, width]."""
    output = output_of(tokens)
    if point == "logits":
        return output.logits[0].numpy()
    states = output.hidden_states[_layer(point)]
    return states[0].numpy()


def _layer(point: str) -> int:
    """Return the index of the layer in the name of a point, such as layers.2.input."""
    return int(point.split(".")[1])


def steered(prompt: Sequence[int], add: Mapping[str, np.ndarray], n: int) -> list[int]:
    """Return n greedy tokens of transformers after a prompt, with vectors added to the outputs of layers.

    ``add`` has tap point -> vector.
    """
    model = tiny().model
    handles = []
    for point, vector in add.items():
        layer = model.model.layers[_layer(point)]
        hook = _adding(torch.from_numpy(vector))
        handles.append(layer.register_forward_hook(hook))
    tokens = list(prompt)
    try:
        for _ in range(n):
            last = output_of(tokens).logits[0, -1]
            tokens.append(int(last.argmax()))
    finally:
        for handle in handles:
            handle.remove()
    return tokens[len(prompt) :]


def _adding(vector: torch.Tensor) -> Callable[[Any, Any, Any], Any]:
    """Return a hook that adds a vector to the output of a layer; if that is a tuple, to its first element."""

    def hook(_: Any, args: Any, out: Any) -> Any:
        if isinstance(out, tuple):
            first, *others = out
            return (first + vector, *others)
        return out + vector

    return hook
