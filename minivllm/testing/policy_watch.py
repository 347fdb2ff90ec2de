"""Check the arguments and results of a scheduling policy at each call."""

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
    """A read-only copy of a view (columns of requests) that can be read until ``over`` is called.

    The engine makes a column when it is first read, so a view that a policy stores would show the state of a later
    time.
    """

    def __init__(self, view: QueueView, call: str = "key", late: list[str] | None = None) -> None:
        """Copy a view that is an argument of the method ``call``; ``late`` receives a message for each late read."""
        columns = {name: getattr(view, name).copy() for name in COLUMNS}
        for column in columns.values():
            column.setflags(write=False)
        self.__dict__["_late"] = [] if late is None else late
        self.__dict__.update(_columns=columns, _call=call, _over=False, _n=len(view))

    def __getattribute__(self, name: str) -> Any:
        if name not in COLUMNS:
            return object.__getattribute__(self, name)
        own = object.__getattribute__(self, "__dict__")
        if own["_over"]:
            message = (
                f"it reads column {name!r} of the argument of {own['_call']}() after that call: a view is valid only "
                "during the call, store the columns that are needed"
            )
            own["_late"].append(message)
            raise AssertionError(message)
        return own["_columns"][name]

    def __len__(self) -> int:
        return self.__dict__["_n"]

    def take(self, index: np.ndarray) -> QueueView:
        every = np.arange(len(self))
        return Taken(self, every[index])

    def over(self) -> None:
        """Refuse further reads of the view."""
        self.__dict__["_over"] = True


class Taken(QueueView):
    """Some rows of a view.  Each access to a column reads it from that view, which may be invalid by then."""

    def __init__(self, view: QueueView, index: np.ndarray) -> None:
        self.__dict__.update(_view=view, _index=index)

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__")
        if name in COLUMNS:
            return getattr(own["_view"], name)[own["_index"]]
        return object.__getattribute__(self, name)

    def __len__(self) -> int:
        return len(self.__dict__["_index"])

    def take(self, index: np.ndarray) -> QueueView:
        every = np.arange(len(self))
        return Taken(self, every[index])


def frozen(view: QueueView) -> QueueView:
    """Return a read-only copy of a view."""
    return Shown(view)


def arrivals(arrival: np.ndarray, **columns: np.ndarray) -> QueueView:
    """Return a view of new requests that arrive at these seconds, alike except for the passed columns."""
    n = len(arrival)
    zeros = np.zeros(n, np.int32)
    sevens = np.full(n, 7, np.int32)
    never = np.full(n, np.inf)
    usual = {name: zeros.copy() for name in ("computed", "cached", "priority", "tenant", "preempted", "blocks")}
    usual |= {name: sevens.copy() for name in ("prompt", "known", "predicted_out", "max_out")}
    usual |= {"ttft_due": never, "tpot_due": never.copy()}
    usual |= {"id": np.arange(n), "arrival": arrival}
    return QueueView(**{**usual, **columns})


class PolicyWatch:
    """Check the arguments and the result of each call of a policy's methods.

    ``log`` has every result as plain data, ``faults`` each violation of the contract.  The engine replaces a wrong
    result by a valid one, so no other code would report it.  ``late`` has reads of a view after the call that received
    it.
    """

    def __init__(self, policy: SchedulerPolicy) -> None:
        self.policy = policy
        self.log: list[tuple[str, Any]] = []
        self.faults: list[str] = []
        self.late: list[str] = []
        for name, check in CHECKS.items():
            call = getattr(policy, name)
            setattr(policy, name, self._watched(name, call, check))

    def _watched(self, name: str, call: Callable[..., Any], check: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that calls the policy's method with read-only views and checks its result."""

        def watched(*real: Any) -> Any:
            args = [Shown(a, name, self.late) if isinstance(a, QueueView) else a for a in real]
            try:
                result = call(*args)
            except Exception as e:
                refuses = name == "key" and isinstance(e, RequestError) and not real[0].preempted.any()
                if not refuses:
                    self.faults.append(f"{name}() raised {type(e).__name__}: {e}")
                raise
            finally:
                for view in args:
                    if isinstance(view, Shown):
                        view.over()
            try:
                self.log.append((name, check(result, *real)))
            except AssertionError as e:
                self.faults.append(str(e))
                raise
            return result

        return watched

    def check(self) -> None:
        """Fail if a call violated the contract."""
        assert not self.late, self.late[0]
        assert not self.faults, self.faults[0]


def check_key(result: Any, new: QueueView) -> list[float]:
    """Return the sort keys of new sequences, or fail if they are not one number for each."""
    array = np.asarray(result)
    n = len(new)
    assert array.shape == (n,), f"key() returned shape {array.shape} for {n} sequences: expected ({n},)"
    assert array.dtype.kind in "iuf", f"key() returned dtype {array.dtype}: expected numbers that float64 can hold"
    keys = array.astype(np.float64)
    assert not np.isnan(keys).any(), (
        f"key() returned {keys.tolist()} for the sequences {new.id.tolist()}: NaN has no order"
    )
    return keys.tolist()


def check_lane(result: Any, new: QueueView) -> list[int]:
    """Return the lane numbers of new sequences, or fail if they are not one whole number for each."""
    array = np.asarray(result)
    n = len(new)
    assert array.shape == (n,) and array.dtype.kind in "iu", (
        f"lane() returned {array.dtype} of shape {array.shape} for {n} sequences: expected whole numbers, ({n},)"
    )
    return array.tolist()


def check_order(result: Any, head: QueueView, running: QueueView, now: float) -> list[int]:
    """Return the ids of the sequences in the policy's order, or fail if the result is no list of distinct indices."""
    array = np.asarray(result)
    n = len(head)
    whole = not array.size or array.dtype.kind in "iu"
    assert array.ndim == 1 and whole, (
        f"order() returned {array.dtype} of shape {array.shape}: expected whole numbers in one dimension"
    )
    wrong = [int(i) for i in array if not 0 <= i < n]
    assert not wrong, f"order() returned the indices {wrong}: there are {n} sequences, so expected 0 to {n - 1}"
    indices, counts = np.unique(array, return_counts=True)
    twice = indices[counts > 1].astype(int).tolist()
    assert not twice, f"order() returned the indices {twice} more than once in {array.tolist()}"
    return head.id[array.astype(int)].tolist()


def check_shape(result: Any, load: Load, now: float) -> tuple[str, Any, float]:
    """Return the fields of a StepShape that a policy returned, or fail if they are not valid."""
    assert isinstance(result, StepShape), f"shape() returned a {type(result).__name__}: expected a StepShape"
    assert result.kind in SHAPES, f"shape() returned kind={result.kind!r}: expected one of {', '.join(SHAPES)}"
    cap = result.prefill_cap
    assert cap is None or (_is_whole(cap) and cap >= 0), (
        f"shape() returned prefill_cap={cap!r}: expected None or a whole number of tokens >= 0"
    )
    assert result.hold_until == result.hold_until, "shape() returned hold_until=nan: expected seconds of the clock"
    return result.kind, cap, float(result.hold_until)


def check_victim(result: Any, candidates: QueueView, need: int) -> tuple[int, int]:
    """Return (id of the victim, number of blocks needed), or fail if the result is no index of a candidate."""
    n = len(candidates)
    try:
        index = operator.index(result)
    except TypeError:
        index = -1
    assert 0 <= index < n and not isinstance(result, bool), (
        f"victim() returned {result!r} ({type(result).__name__}) for {n} candidates: expected a whole number from 0 to "
        f"{n - 1}, the index of a candidate"
    )
    return int(candidates.id[index]), need


def check_displaced(result: Any, head: QueueView, running: QueueView, now: float) -> tuple[int, int]:
    """Return (id of the preempted row or -1, id of the waiting sequence), or fail if the result is no index or -1."""
    n = len(running)
    valid = _is_whole(result) and -1 <= result < n
    assert valid, f"displaced() returned {result!r} for {n} rows: expected the index of one, or -1"
    return int(running.id[result]) if result >= 0 else -1, int(head.id[0])


def _is_whole(number: Any) -> bool:
    """Return whether a value is a whole number, of Python or of numpy, and no truth value."""
    return isinstance(number, (int, np.integer)) and not isinstance(number, bool)


def check_ended(result: Any, gone: QueueView) -> list[int]:
    """Return the ids of the sequences that ended.  The policy's result, ``result``, has no meaning here."""
    return gone.id.tolist()


CHECKS: Mapping[str, Callable[..., Any]] = {
    "key": check_key, "lane": check_lane, "order": check_order, "shape": check_shape, "victim": check_victim,
    "ended": check_ended, "displaced": check_displaced,
}  # fmt: skip
