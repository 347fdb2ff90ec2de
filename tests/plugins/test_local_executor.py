"""The order of calls from the local executor to its runner.

Captured steps share their tensors, so none may begin while another waits for its masks.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minivllm.core.interfaces.plan import LateInputs
from minivllm.errors import ResourceError
from minivllm.plugins.executor.local import Local
from minivllm.plugins.executor.shared_device import with_others


class Recorder:
    """A runner that records its calls."""

    def __init__(self) -> None:
        self.requested: list[tuple[str, int]] = []
        self.masks: dict[int, Any] = {}

    def forward(self, plan: Any) -> Any:
        self.requested.append(("forward", plan.id))
        return SimpleNamespace(plan=plan, sampled=False, finished=lambda: True, result=lambda: plan.id)

    def sample(self, running: Any, late: LateInputs | None = None) -> None:
        self.requested.append(("sample", running.plan.id))
        running.sampled = True
        if late is not None:
            self.masks[running.plan.id] = int(late.mask[0, 0])


@given(late=st.lists(st.booleans(), min_size=1, max_size=8), draw=st.data(), follows=st.booleans())
def test_each_step_draws_under_its_masks_before_the_next_one_begins(late: list[bool], draw: Any, follows: bool) -> None:
    """Steps are submitted and masks arrive in any order.  A rank that follows is allowed to continue without masks."""
    executor = Local()
    executor.runner = runner = Recorder()
    submitted, due, got = 0, [], []
    while submitted < len(late) or due:
        if submitted < len(late) and (not due or draw.draw(st.booleans())):
            plan = SimpleNamespace(id=submitted, late=np.zeros(int(late[submitted]), np.int32))
            executor.submit(plan)
            due += [submitted] if late[submitted] else []
            submitted += 1
        else:
            step = due.pop(draw.draw(st.integers(0, len(due) - 1)))
            executor.supply(step, None if follows else LateInputs(np.full((1, 2), step, np.int32)))
        got += executor.collect(draw.draw(st.integers(0, 3)))
        first_waiting = min(due, default=submitted)
        assert not [step for step in got if step >= first_waiting], "a step came back before its masks"
    got += executor.collect(0)
    assert got == list(range(len(late))), "each result once, in the order of submission"
    assert runner.requested == [(what, step) for step in range(len(late)) for what in ("forward", "sample")]
    assert runner.masks == {step: step for step, is_late in enumerate(late) if is_late and not follows}


@pytest.mark.parametrize(
    ("device", "free", "reserved", "words"),
    [
        (
            "cuda",
            4,
            2,
            "no room.  About 73.0 of the 80 GiB of cuda:1 are other processes' (nvidia-smi names them), such",
        ),
        ("cuda", 4, 76, "no room"),
        ("cpu", 0, 0, "no room"),
    ],
)
def test_too_little_memory_is_told_with_what_other_processes_have_of_the_device(
    monkeypatch, device, free, reserved, words
):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: reserved << 30)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    error = with_others(ResourceError("no room"), device)
    assert str(error).startswith(words) and len(str(error)) - len(words) < (1 if words == "no room" else 200)
