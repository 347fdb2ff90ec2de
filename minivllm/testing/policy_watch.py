"""What a scheduling policy is shown and answers: each answer is checked where it is given."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np

from minivllm.core.interfaces.scheduler import Load, QueueView, SchedulerPolicy, StepShape
from minivllm.errors import RequestError

SHAPES = ("mix", "prefill_first", "static")


def frozen(view: QueueView) -> QueueView:
    """A copy whose columns cannot be written."""
    columns = {f.name: getattr(view, f.name).copy() for f in fields(view)}
    for column in columns.values():
        column.setflags(write=False)
    return QueueView(**columns)


def arrivals(arrival: np.ndarray, **columns: np.ndarray) -> QueueView:
    """New requests, in every other respect alike but for the columns given."""
    n = len(arrival)
    usual = dict.fromkeys(("computed", "cached", "priority", "tenant", "preempted", "blocks"), 0)
    usual |= dict.fromkeys(("prompt", "known", "predicted_out", "max_out"), 7)
    made: dict[str, np.ndarray] = {name: np.full(n, value, np.int32) for name, value in usual.items()}
    due = {"ttft_due": np.full(n, np.inf), "tpot_due": np.full(n, np.inf)}
    return QueueView(**{"id": np.arange(n), "arrival": arrival, **made, **due, **columns})


class Watch:
    """Stands between the engine and a policy.  ``log``: every answer as plain data; ``faults``: what broke the contract
    (the engine makes the best of a wrong answer, so nobody else would tell)."""

    def __init__(self, policy: SchedulerPolicy) -> None:
        self.policy = policy
        self.log: list[tuple[str, Any]] = []
        self.faults: list[str] = []
        for name, check in (
            ("key", check_key),
            ("order", check_order),
            ("shape", check_shape),
            ("victim", check_victim),
        ):
            setattr(policy, name, self._watched(name, getattr(policy, name), check))

    def _watched(self, name: str, call: Callable[..., Any], check: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any) -> Any:
            args = tuple(frozen(a) if isinstance(a, QueueView) else a for a in args)
            try:
                given = call(*args)
            except Exception as e:
                if not (name == "key" and isinstance(e, RequestError) and not args[0].preempted.any()):
                    self.faults.append(f"{name}() raised {type(e).__name__}: {e}")
                raise
            try:
                self.log.append((name, check(given, *args)))
            except AssertionError as e:
                self.faults.append(str(e))
                raise
            return given

        return watched

    def check(self) -> None:
        assert not self.faults, self.faults[0]


def check_key(given: Any, new: QueueView) -> list[float]:
    array = np.asarray(given)
    assert array.shape == (len(new),), f"key() gave shape {array.shape} for {len(new)} sequences: want ({len(new)},)"
    assert array.dtype.kind in "iuf", f"key() gave dtype {array.dtype}: want numbers that float64 holds"
    keys = array.astype(np.float64)
    assert not np.isnan(keys).any(), f"key() gave {keys.tolist()} for the sequences {new.id.tolist()}: NaN has no place"
    return keys.tolist()


def check_order(given: Any, head: QueueView, running: QueueView, now: float) -> list[int]:
    array, n = np.asarray(given), len(head)
    assert array.ndim == 1 and (not array.size or array.dtype.kind in "iu"), (
        f"order() gave {array.dtype} of shape {array.shape}: want whole numbers in one dimension"
    )
    wrong = [int(i) for i in array if not 0 <= i < n]
    assert not wrong, f"order() gave the indices {wrong}: there are {n} sequences, so want 0 to {n - 1}"
    twice = sorted({int(i) for i in array if (array == i).sum() > 1})
    assert not twice, f"order() gave the indices {twice} more than once in {array.tolist()}"
    return head.id[array.astype(int)].tolist()


def check_shape(given: Any, load: Load, now: float) -> tuple[str, Any, float]:
    assert isinstance(given, StepShape), f"shape() gave a {type(given).__name__}: want a StepShape"
    assert given.kind in SHAPES, f"shape() gave kind={given.kind!r}: want one of {', '.join(SHAPES)}"
    cap = given.prefill_cap
    assert cap is None or (isinstance(cap, (int, np.integer)) and not isinstance(cap, bool) and cap >= 0), (
        f"shape() gave prefill_cap={cap!r}: want None or a whole number of tokens >= 0"
    )
    assert given.hold_until == given.hold_until, "shape() gave hold_until=nan: want seconds of the clock"
    return given.kind, cap, float(given.hold_until)


def check_victim(given: Any, candidates: QueueView, need: int) -> tuple[int, int]:
    n = len(candidates)
    try:
        index = operator.index(given)
    except TypeError:
        index = -1
    assert 0 <= index < n and not isinstance(given, bool), (
        f"victim() gave {given!r} ({type(given).__name__}) for {n} candidates: want a whole number from 0 to {n - 1}, "
        "the index of one of them"
    )
    return int(candidates.id[index]), need
