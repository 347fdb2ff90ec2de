"""Tests of executors that return sums of hidden states (pooled rows), from which embeddings are made."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from .base import since
from .driver import NEAR, Driver, by_slot, check_result, output_of, prompts
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
            plans = [driver.submit({0: 5, 1: 6, 2: 1}, pooled=[(0, 0, 5), (2, 0, 1)])]
            plans.append(driver.submit({0: 4, 1: 1}, pooled=[(0, 1, 2)]))
            driver.leave(0, 2)
            driver.join(0, b, 20)
            driver.join(2, a, 20)
            plans.append(driver.submit({1: 1, 0: 6, 2: 9}, pooled=[(0, 5, 1), (2, 0, 0)]))
            results = driver.collect()
        of_a = hidden(a)
        of_b = hidden(b)
        of_c = hidden(c)
        nothing = np.zeros_like(of_b[5])
        expected = [[of_a[:5].sum(0), of_c[0]]]
        expected.append([of_a[6:8].sum(0)])
        expected.append([of_b[5], nothing])
        tokens = []
        for plan, result, sums in zip(plans, results, expected, strict=True):
            check_result(plan, result, driver.capacity.vocab_size)
            self.check_sums(driver, result.pooled, sums, plan.id)
            of_slots = by_slot(result)
            if 1 in of_slots:
                tokens.append(of_slots[1])
        greedy = self.greedy(b, 3)
        assert tokens == greedy, f"a row that reads nothing draws {tokens}: expected {greedy}"

    def check_sums(self, driver: Driver, found: np.ndarray, sums: Sequence[np.ndarray], step: int) -> None:
        """Fail unless the sums of a step have the width that the capacity declares and are close to ``sums``."""
        shape = [len(sums), driver.capacity.hidden]
        form = f"{found.dtype} {list(found.shape)}"
        wanted = f"float64 {shape}"
        assert form == wanted, f"step {step}: pooled are {form}: expected {wanted}"
        difference = np.abs(found - np.stack(sums))
        worst = float(difference.max())
        assert worst < 5 * NEAR, f"step {step}: sums differ from those of transformers by {worst:.2g}"


def hidden(tokens: Sequence[int]) -> np.ndarray:
    """Return the last hidden states of some tokens by transformers, float64 [tokens, hidden]."""
    states = output_of(tokens).hidden_states[-1]
    return states[0].double().numpy()
