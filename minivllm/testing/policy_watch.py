"""What a scheduling policy is shown and answers: each answer is checked where it is given."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from minivllm.core.interfaces.scheduler import Load, QueueView, SchedulerPolicy, StepShape
from minivllm.errors import RequestError

SHAPES = ("mix", "prefill_first", "static")


COLUMNS = tuple(f.name for f in fields(QueueView))


class Shown(QueueView):
    """A copy of a view, whose columns cannot be written, and which can be read until it is ``over``: the engine makes a
    column when it is first read, so of a view that is kept it would make those of a later time."""

    def __init__(self, view: QueueView, call: str = "key", late: list[str] | None = None) -> None:
        """``call`` is whose argument it is; ``late`` hears of what is read too late."""
        columns = {name: getattr(view, name).copy() for name in COLUMNS}
        for column in columns.values():
            column.setflags(write=False)
        self.__dict__.update(_columns=columns, _call=call, _over=False, _n=len(view))
        self.__dict__["_late"] = [] if late is None else late

    def __getattribute__(self, name: str) -> Any:
        if name in COLUMNS:
            own = object.__getattribute__(self, "__dict__")
            if own["_over"]:
                what = f"it reads column {name!r} of the view that {own['_call']}() was given after that call"
                own["_late"].append(f"{what}: a view is of no use then, keep the columns that are needed")
                raise AssertionError(own["_late"][-1])
            return own["_columns"][name]
        return object.__getattribute__(self, name)

    def __len__(self) -> int:
        return self.__dict__["_n"]

    def take(self, index: np.ndarray) -> QueueView:
        return Taken(self, np.arange(len(self))[index])

    def over(self) -> None:
        """From now on it is of no use."""
        self.__dict__["_over"] = True


class Taken(QueueView):
    """Some rows of a view, which is read when they are."""

    def __init__(self, view: QueueView, index: np.ndarray) -> None:
        self.__dict__.update(_view=view, _index=index)

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__")
        return getattr(own["_view"], name)[own["_index"]] if name in COLUMNS else object.__getattribute__(self, name)

    def __len__(self) -> int:
        return len(self.__dict__["_index"])

    def take(self, index: np.ndarray) -> QueueView:
        return Taken(self, np.arange(len(self))[index])


def frozen(view: QueueView) -> QueueView:
    """A copy whose columns cannot be written."""
    return Shown(view)


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
        self.late: list[str] = []  # what was read of views after their calls
        for name, check in CHECKS.items():
            setattr(policy, name, self._watched(name, getattr(policy, name), check))

    def _watched(self, name: str, call: Callable[..., Any], check: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any) -> Any:
            real, args = args, tuple(Shown(a, name, self.late) if isinstance(a, QueueView) else a for a in args)
            try:
                given = call(*args)
            except Exception as e:
                if not (name == "key" and isinstance(e, RequestError) and not real[0].preempted.any()):
                    self.faults.append(f"{name}() raised {type(e).__name__}: {e}")
                raise
            finally:
                for shown in (a for a in args if isinstance(a, Shown)):
                    shown.over()
            try:
                self.log.append((name, check(given, *real)))
            except AssertionError as e:
                self.faults.append(str(e))
                raise
            return given

        return watched

    def check(self) -> None:
        assert not self.late, self.late[0]
        assert not self.faults, self.faults[0]


def check_key(given: Any, new: QueueView) -> list[float]:
    array = np.asarray(given)
    assert array.shape == (len(new),), f"key() gave shape {array.shape} for {len(new)} sequences: want ({len(new)},)"
    assert array.dtype.kind in "iuf", f"key() gave dtype {array.dtype}: want numbers that float64 holds"
    keys = array.astype(np.float64)
    assert not np.isnan(keys).any(), f"key() gave {keys.tolist()} for the sequences {new.id.tolist()}: NaN has no place"
    return keys.tolist()


def check_lane(given: Any, new: QueueView) -> list[int]:
    array = np.asarray(given)
    assert array.shape == (len(new),) and array.dtype.kind in "iu", (
        f"lane() gave {array.dtype} of shape {array.shape} for {len(new)} sequences: want whole numbers, ({len(new)},)"
    )
    return array.tolist()


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


def check_ended(given: Any, gone: QueueView) -> list[int]:
    return gone.id.tolist()


CHECKS: Mapping[str, Callable[..., Any]] = {
    "key": check_key, "lane": check_lane, "order": check_order, "shape": check_shape, "victim": check_victim,
    "ended": check_ended,
}  # fmt: skip
