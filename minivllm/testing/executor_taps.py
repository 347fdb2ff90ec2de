"""Tests of executors: reading activations at tap points of the model, and adding vectors to them (steering)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from minivllm.core.interfaces.plan import StepPlan, StepResult

from .base import since
from .driver import NEAR, Driver, by_slot, check_result, prompts, tiny
from .executor_rows import ExecutorRows

# tap points whose values transformers returns as hidden states
READ = ("layers.0.input", "layers.2.input", "layers.3.input")


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
        with self.started() as driver:
            self.need_points(driver)
            for slot, prompt in enumerate((a, b, c)):
                driver.join(slot, prompt, 20)
            steps: list[tuple[dict[int, int], list[tuple[str, int, int]]]] = [
                ({0: 5, 1: 6, 2: 1}, [(READ[0], 0, 0), (READ[1], 0, 2), (READ[1], 2, 0), (READ[2], 2, 0)]),
                ({0: 4, 1: 1}, [(READ[1], 0, 0), (READ[2], 0, 3), ("logits", 0, 3)]),
                ({0: 1, 2: 1}, [(READ[1], 0, 0), (READ[2], 2, 0), ("logits", 2, 0)]),
                ({0: 1, 2: 1}, []),
            ]
            plans = [driver.submit(rows, taps=taps) for rows, taps in steps]
            results = list(driver.executor.collect(0))
        known = {0: list(a), 1: list(b), 2: list(c)}
        for plan, result, (_, taps) in zip(plans, results, steps, strict=True):
            check_result(plan, result, driver.capacity.vocab_size)
            self.check_taps(driver, plan, result, taps, known)
            for slot, token in by_slot(result).items():
                known[slot].append(token)
        tokens = known[1][len(b) :]
        expected = self.greedy(b, 2)
        assert tokens == expected, f"a row that reads nothing draws {tokens}: expected {expected}"

    def check_taps(
        self,
        driver: Driver,
        plan: StepPlan,
        result: StepResult,
        taps: Sequence[tuple[str, int, int]],
        known: Mapping[int, list[int]],
    ) -> None:
        """Fail unless a step result has the activations that ``taps`` names, each a (tap point, slot, first token).

        ``known`` has the tokens of each slot before the step draws.
        """
        slots = plan.slots.tolist()
        parts = [np.empty(0, np.float32)]
        for point, slot, first in sorted(taps, key=lambda tap: (driver.point(tap[0]), slots.index(tap[1]))):
            row = slots.index(slot)
            start = int(plan.computed[row])
            end = start + int(plan.q_len[row])
            of_row = hidden(known[slot][:end], point)
            part = of_row[start + first :].ravel()
            parts.append(part)
        expected = np.concatenate(parts)
        found = result.taps
        assert found.dtype == np.float32 and found.shape == expected.shape, (
            f"step {plan.id}: taps are {found.dtype} {list(found.shape)}: expected float32 {list(expected.shape)}"
        )
        worst = float(np.abs(found - expected).max(initial=0))
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
        add = {"layers.1.residual": vector, "layers.2.residual": vector[::-1].copy() ** 2}
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
            for rows in ({0: 1, 1: 1, 2: 1}, {0: 1, 1: 1, 2: 1}, {0: 1, 1: 1, 2: 1}, {0: 1, 2: 1}):
                driver.submit(rows)
            for result in driver.executor.collect(0):
                for slot, token in by_slot(result).items():
                    tokens[slot].append(token)
            other = self.greedy(b, 4)
            assert tokens[1] == other, f"the other row draws {tokens[1]}: expected {other}"
            assert tokens[0] == expected, f"the row with vectors draws {tokens[0]}: expected {expected}"
            assert tokens[2] == expected, f"the fork of the row draws {tokens[2]}: expected {expected}"
            driver.leave(0, 1, 2)
            found = driver.generate([c], 3)[0]
            assert found == plain, f"the next sequence in the slot does not draw {plain}"


def hidden(tokens: Sequence[int], point: str) -> np.ndarray:
    """Return the activations of transformers at a tap point of ``READ``, or the logits, float32 [tokens, width]."""
    with torch.inference_mode():
        output = tiny().model(torch.tensor([list(tokens)]), output_hidden_states=True)
    if point == "logits":
        return output.logits[0].numpy()
    return output.hidden_states[_layer(point)][0].numpy()


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

        def hook(_: Any, args: Any, out: Any, vector: np.ndarray = vector) -> Any:
            add = torch.from_numpy(vector)
            return (out[0] + add, *out[1:]) if isinstance(out, tuple) else out + add

        handles.append(model.model.layers[_layer(point)].register_forward_hook(hook))
    tokens = list(prompt)
    try:
        with torch.inference_mode():
            for _ in range(n):
                token = int(model(torch.tensor([tokens])).logits[0, -1].argmax())
                tokens.append(token)
    finally:
        for handle in handles:
            handle.remove()
    return tokens[len(prompt) :]
