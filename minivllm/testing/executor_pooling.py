"""Tests of executors that return sums of hidden states (pooled rows), from which embeddings are made."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from .base import since
from .driver import NEAR, Driver, by_slot, check_result, prompts, tiny
from .executor_rows import ExecutorRows


class ExecutorPooling(ExecutorRows):
    """The tests of pooled rows, a base class of ``ExecutorConformance``."""

    @since(2, 5)
    def test_rows_return_the_sums_of_their_hidden_states(self) -> None:
        """Check that ``StepPlan.pooled`` returns sums of transformers' last hidden states over tokens.

        Sums are float64.  Steps have chunks and single tokens, rows that read all tokens, some or none, and a row that
        draws.
        """
        a, b, c = prompts(9, 6, 1)
        with self.started() as driver:
            if not driver.capacity.hidden:
                pytest.skip("excused: its capacity has hidden=0, so the engine gives it no such rows")
            for slot, prompt in enumerate((a, b, c)):
                driver.join(slot, prompt, 20)
            steps = [
                ({0: 5, 1: 6, 2: 1}, [(0, 0, 5), (2, 0, 1)]),
                ({0: 4, 1: 1}, [(0, 1, 2)]),
            ]
            plans = [driver.submit(rows, pooled=pooled) for rows, pooled in steps]
            driver.leave(0, 2)
            driver.join(0, b, 20)
            driver.join(2, a, 20)
            step = ({1: 1, 0: 6, 2: 9}, [(0, 5, 1), (2, 0, 0)])
            steps.append(step)
            plans.append(driver.submit(*steps[-1][:1], pooled=steps[-1][1]))
            results = list(driver.executor.collect(0))
        states = [hidden(prompt) for prompt in (a, b, c)]
        expected = [
            [states[0][:5].sum(0), states[2][0]],
            [states[0][6:8].sum(0)],
            [states[1][5], np.zeros(states[0].shape[1])],
        ]
        tokens = []
        for plan, result, sums in zip(plans, results, expected, strict=True):
            check_result(plan, result, driver.capacity.vocab_size)
            self.check_sums(driver, result.pooled, sums, plan.id)
            tokens += [token for slot, token in by_slot(result).items() if slot == 1]
        drawn = self.greedy(b, 3)
        assert tokens == drawn, f"a row that reads nothing draws {tokens}: expected {drawn}"

    def check_sums(self, driver: Driver, found: np.ndarray, sums: Sequence[np.ndarray], step: int) -> None:
        """Fail unless the sums of a step have the width that the capacity declares and are close to ``sums``."""
        shape = (len(sums), driver.capacity.hidden)
        assert found.dtype == np.float64 and found.shape == shape, (
            f"step {step}: pooled are {found.dtype} {list(found.shape)}: expected float64 {list(shape)}"
        )
        worst = float(np.abs(found - np.stack(sums)).max())
        assert worst < 5 * NEAR, f"step {step}: sums differ from those of transformers by {worst:.2g}"


def hidden(tokens: Sequence[int]) -> np.ndarray:
    """Return the last hidden states of some tokens by transformers, float64 [tokens, hidden]."""
    with torch.inference_mode():
        output = tiny().model(torch.tensor([list(tokens)]), output_hidden_states=True)
    return output.hidden_states[-1][0].double().numpy()
