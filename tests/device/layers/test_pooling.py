"""Sums of hidden states of a step: lines of one token, of several and of none, in any order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minivllm.core.interfaces.plan import StepPlan
from minivllm.device.layers.pooling import pool, pool_captured, pooled_tokens, used_tokens


class State:
    """In the place of ``DeviceState``, on a CPU."""

    def to(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array)


class Count(TorchDispatchMode):
    """Counter of the operations of torch."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += 1
        return func(*args, **(kwargs or {}))


def plan_of(q_len, pooled):
    rows = len(q_len)
    slots, computed = np.arange(rows, dtype=np.int32), np.zeros(rows, np.int32)
    lines = np.array(pooled, np.int32).reshape(-1, 3)
    return StepPlan(1, slots, np.array(q_len, np.int32), computed, np.empty(0, np.int32), pooled=lines)


@pytest.mark.parametrize(
    "pooled",
    [
        [(0, 0, 1), (1, 2, 3), (2, 4, 0), (3, 0, 1), (4, 1, 2)],
        [(0, 0, 1), (1, 4, 1), (3, 0, 1)],
        [(1, 0, 5), (4, 0, 4)],
        [(2, 0, 0), (3, 0, 0)],
        [(4, 3, 1), (2, 1, 0)],
    ],
)
@pytest.mark.parametrize("all_tokens", [False, True])
def test_each_line_has_the_sum_of_its_tokens(pooled, all_tokens):
    plan = plan_of([1, 5, 4, 1, 4], pooled)
    hidden = torch.randn(15, 6)
    begin = plan.q_len.cumsum() - plan.q_len
    expected = [hidden[begin[r] + a : begin[r] + a + n].double().sum(0) for r, a, n in pooled]
    used = None if all_tokens else used_tokens(plan, np.array([14]))
    kept = hidden if used is None else hidden[used]
    found = pool(plan, kept, used, State())
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=1e-12)
    assert len(pooled_tokens(plan)) == sum(n for *_, n in pooled)


def test_the_last_tokens_of_all_rows():
    hidden = torch.randn(3, 6)
    found = pool_captured(plan_of([1, 1, 4], [(0, 0, 1), (1, 0, 0), (2, 3, 1)]), hidden, State())
    torch.testing.assert_close(found, torch.stack([hidden[0], torch.zeros(6), hidden[2]]).double())


def test_lines_of_one_token_are_gathered_together():
    numbers = []
    for rows in (2, 60):
        plan = plan_of([*[1] * rows, 3], [*((row, 0, 1) for row in range(rows)), (rows, 0, 3)])
        with Count() as count:
            pool(plan, torch.zeros(rows + 3, 6), None, State())
        numbers.append(count.number)
    assert numbers[0] == numbers[1]
