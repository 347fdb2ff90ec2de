"""Executors: what rows read at points of the model, and what is added to them there."""

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

READ = ("layers.0.input", "layers.2.input", "layers.3.input")  # what transformers calls hidden states


class ExecutorTaps(ExecutorRows):
    def need_points(self, driver: Driver) -> None:
        """Skip the test if there are none."""
        if driver.capacity.taps is None:
            pytest.skip("excused: its capacity says that it serves no taps, so the engine gives it none")

    @since(2, 3)
    def test_rows_read_what_transformers_has_at_points_of_the_model(self) -> None:
        """``StepPlan.taps``: float32, point after point, from the row's token ``first`` on, in steps of chunks and of
        single tokens and beside rows that read nothing; ``logits`` are those that the row draws from."""
        a, b, c = prompts(9, 6, 1)
        due = self.greedy(b, 2)
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
        known, got = {0: list(a), 1: list(b), 2: list(c)}, []
        for plan, result, (_, taps) in zip(plans, results, steps, strict=True):
            check_result(plan, result, driver.capacity.vocab_size)
            self.check_taps(driver, plan, result, taps, known)
            for slot, token in by_slot(result).items():
                known[slot].append(token)
            got.append(by_slot(result).get(1))
        assert got[:2] == due, f"a row that reads nothing draws {got[:2]}: want {due}"

    def check_taps(
        self,
        driver: Driver,
        plan: StepPlan,
        result: StepResult,
        taps: Sequence[tuple[str, int, int]],
        known: Mapping[int, list[int]],
    ) -> None:
        parts, slots = [np.empty(0, np.float32)], plan.slots.tolist()
        for point, slot, first in sorted(taps, key=lambda tap: (driver.point(tap[0]), slots.index(tap[1]))):
            row = slots.index(slot)
            at, end = int(plan.computed[row]), int(plan.computed[row] + plan.q_len[row])
            parts.append(hidden(known[slot][:end], point)[at + first :].ravel())
        want = np.concatenate(parts)
        assert result.taps.dtype == np.float32 and result.taps.shape == want.shape, (
            f"step {plan.id}: taps are {result.taps.dtype} {list(result.taps.shape)}: want float32 {list(want.shape)}"
        )
        worst = float(np.abs(result.taps - want).max(initial=0))
        assert worst < NEAR, f"step {plan.id}: what is read differs from transformers' by {worst:.2g}: allowed {NEAR}"

    @since(2, 3)
    def test_what_is_added_to_a_row_changes_it_alone_and_goes_on_with_its_forks(self) -> None:
        """``Join.steer`` and ``vectors``, one or several points a row, from its first token on; who has the slot next
        has nothing added, nor has the row beside it."""
        a, b, c = prompts(9, 11, 5)
        vector = np.linspace(-4, 4, tiny().model.config.hidden_size).astype(np.float32)
        add = {"layers.1.residual": vector, "layers.2.residual": vector[::-1].copy() ** 2}
        want, other, plain = steered(a, add, 4), self.greedy(b, 4), self.greedy(c, 3)
        assert want != self.greedy(a, 4) and plain != steered(c, add, 3), "the vectors change nothing"
        with self.started() as driver:
            self.need_points(driver)
            driver.join(0, a, 4, add={name: x.tolist() for name, x in add.items()})
            driver.join(1, b, 4)
            out: dict[int, list[int]] = {0: [], 1: [], 2: []}
            driver.submit({0: 8, 1: 11})
            driver.fork(0, 2, 1)
            for rows in ({0: 1, 1: 1, 2: 1}, {0: 1, 1: 1, 2: 1}, {0: 1, 1: 1, 2: 1}, {0: 1, 2: 1}):
                driver.submit(rows)
            for result in driver.executor.collect(0):
                for slot, token in by_slot(result).items():
                    out[slot].append(token)
            assert out[1] == other, f"the row beside it draws {out[1]}: want {other}"
            assert out[0] == want, f"a row to which something is added draws {out[0]}: want {want}"
            assert out[2] == want, f"its fork draws {out[2]}: want {want}"
            driver.leave(0, 1, 2)
            assert driver.generate([c], 3)[0] == plain, f"the next owner of the slot does not draw {plain}"


def hidden(tokens: Sequence[int], point: str) -> np.ndarray:
    """f32 [tokens, width], what transformers has at a point in ``READ``, or its logits."""
    with torch.inference_mode():
        out = tiny().model(torch.tensor([list(tokens)]), output_hidden_states=True)
    return (out.logits if point == "logits" else out.hidden_states[int(point.split(".")[1])])[0].numpy()


def steered(prompt: Sequence[int], add: Mapping[str, np.ndarray], n: int) -> list[int]:
    """transformers' n greedy tokens, vectors being added to the outputs of layers."""
    model, handles = tiny().model, []
    for point, vector in add.items():

        def hook(_: Any, args: Any, out: Any, vector: np.ndarray = vector) -> Any:
            add = torch.from_numpy(vector)
            return (out[0] + add, *out[1:]) if isinstance(out, tuple) else out + add

        handles.append(model.model.layers[int(point.split(".")[1])].register_forward_hook(hook))
    tokens = list(prompt)
    try:
        with torch.inference_mode():
            for _ in range(n):
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    finally:
        for handle in handles:
            handle.remove()
    return tokens[len(prompt) :]
