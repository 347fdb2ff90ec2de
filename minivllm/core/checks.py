"""What plug-ins and a request's own functions return, checked where it is used: ValueError says what was wanted.

Who calls turns that into an error with the name of the plug-in.  Nothing is cut, rounded or clamped to fit: a wrong
answer that is made to fit is a wrong text that nobody is told of.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.errors import PluginError, shown

from .interfaces.plan import LogProbs, StepPlan, StepResult
from .interfaces.sampling import Column, Row
from .interfaces.scheduler import SchedulerPolicy, StepShape
from .interfaces.strategy import Branch, Guide

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from .interfaces.executor import Capacity

RESULT = {"tokens": np.dtype(np.int32), "count": np.dtype(np.int32), "flags": np.dtype(np.uint8)}
ONE = np.ones(1, np.uint32)  # numpy compares with an array in half the time of a number
MOST_FIGURES = 64  # of a plug-in
FIGURE = re.compile(r"[a-z][a-z0-9_]{0,63}")
SHAPES = ("mix", "prefill_first", "static")


def whole(value: Any, low: int, high: int, what: str) -> int:
    """A whole number from ``low`` to ``high``: Python's, numpy's, or a tensor of one."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        found = operator.index(value)
    except TypeError:
        found = low - 1
    if not low <= found <= high:
        raise ValueError(f"{what} {shown(value)}; want a whole number from {low} to {high}")
    return found


def _array(value: Any, kinds: str, what: str) -> np.ndarray:
    """An array of numbers of these kinds (of ``np.dtype.kind``)."""
    try:
        array = np.asarray(value)
    except (ValueError, TypeError):  # lists of unequal length, objects that are no numbers
        array = np.empty(0, object)
    if array.dtype.kind not in kinds:
        raise ValueError(
            f"{what} {shown(value)}; want {'numbers' if 'f' in kinds else 'whole numbers'}"
        )
    return array


# ---- a request's functions -------------------------------------------------------------------------------------------


def chosen_token(value: Any, vocab: int) -> int:
    """The token of a ``choose_fn``."""
    return whole(value, 0, vocab - 1, "it chose token")


def allowed_tokens(value: Any, vocab: int) -> np.ndarray:
    """The ids i64 [n] of an ``allowed_tokens_fn``."""
    if not hasattr(value, "__len__") or not len(value):
        what = "no token" if hasattr(value, "__len__") else shown(value)
        raise ValueError(f"it allowed {what}; want a list of ids 0 to {vocab - 1}")
    ids = _array(value, "iu", "it allowed")
    if ids.ndim != 1:
        raise ValueError(f"it allowed ids of shape {ids.shape}; want one list of them")
    if ids.min() < 0 or ids.max() >= vocab:
        raise ValueError(f"it allowed tokens outside the vocabulary; want ids 0 to {vocab - 1}")
    return ids.astype(np.int64)


# ---- processors and samplers -----------------------------------------------------------------------------------------


def bound(row: Any, columns: Mapping[str, Column]) -> Row | None:
    """What ``bind`` returned, its values as arrays that fit their columns."""
    if row is None:
        return None
    if not isinstance(row, Row):
        raise ValueError(f"bind returned {shown(row)}; want a Row or None")
    whole(row.variant, 0, 2**63 - 1, "its Row has the variant")
    values = {}
    for name, value in row.values.items():
        if name not in columns:
            raise ValueError(
                f"it has no column {shown(name)}; want one of {', '.join(columns) or 'none'}"
            )
        values[name] = _fitting(name, value, columns[name])
    return replace(row, values=values) if values else row


def _fitting(name: str, value: Any, column: Column) -> np.ndarray:
    """A value as an array of its column's shape and of a dtype that becomes the column's without loss."""
    what = f"column {name!r} got"
    real = "float" in column.dtype
    array = _array(value, "fiub" if real else "iub", what)
    if array.size != math.prod(column.shape):
        raise ValueError(f"{what} shape {array.shape}; want {column.shape}")
    if real:
        if np.isnan(array).any() and not math.isnan(column.fill):
            raise ValueError(f"{what} NaN; want numbers")
        return array.astype(np.float64)
    dtype = np.dtype(column.dtype)
    fitting = array.astype(dtype)
    if (fitting != array).any():
        raise ValueError(f"{what} {shown(value)}; want what {dtype} holds")
    return fitting


def figures(value: Any) -> dict[str, float]:
    """The figures of a plug-in by name, as Python's numbers."""
    if not isinstance(value, Mapping) or len(value) > MOST_FIGURES:
        raise ValueError(
            f"its figures are {shown(value)}; want a mapping of at most {MOST_FIGURES} names to numbers"
        )
    for name, number in value.items():
        if not isinstance(name, str) or not FIGURE.fullmatch(name):
            raise ValueError(
                f"a figure is named {shown(name)}; want up to 64 lower-case letters, digits, underscores"
            )
        if not isinstance(number, (int, float, np.number)) or not np.isfinite(float(number)):
            raise ValueError(f"its figure {name} is {shown(number)}; want a finite number")
    return {
        name: int(n) if isinstance(n, (int, np.integer)) else float(n) for name, n in value.items()
    }


# ---- schedulers ------------------------------------------------------------------------------------------------------


def window(policy: SchedulerPolicy) -> int:
    """How many waiting sequences a policy is shown.  PluginError: none would ever be admitted."""
    if not isinstance(policy.window, int) or policy.window < 1:
        what = f"scheduler {type(policy).__name__}: its window is {shown(policy.window)}"
        raise PluginError(
            f"{what}; want a whole number of waiting sequences that it is shown, at least 1"
        )
    return policy.window


def key(value: Any) -> float:
    """The key of one sequence."""
    found = _array(value, "fiu", "key() gave")
    if found.shape != (1,) or np.isnan(found[0]):
        raise ValueError(f"key() gave {shown(value)}; want an array of one number that is not NaN")
    return float(found[0])


def lane(value: Any) -> int:
    """The lane of one sequence."""
    found = _array(value, "iu", "lane() gave")
    if found.shape != (1,):
        raise ValueError(f"lane() gave {shown(value)}; want an array of one whole number")
    return int(found[0])


def ordered(value: Any, n: int) -> Iterator[int]:
    """The indices that ``order`` gave, each checked as it is used, which is few of them."""
    if not hasattr(value, "__len__") or len(value) > n:
        raise ValueError(f"order() gave {shown(value)}; want at most {n} indices, each once")
    return (whole(i, 0, n - 1, "order() gave") for i in value)


def shape(value: Any) -> StepShape:
    """The answer of ``shape``."""
    if not isinstance(value, StepShape) or value.kind not in SHAPES:
        raise ValueError(
            f"shape() gave {shown(value)}; want a StepShape of kind {', '.join(SHAPES)}"
        )
    cap, hold = value.prefill_cap, value.hold_until
    if cap is not None and not (_number(cap) and cap >= 0):
        raise ValueError(
            f"shape() gave the prefill_cap {shown(cap)}; want a number of tokens, or None"
        )
    if not _number(hold) and hold not in (math.inf, -math.inf):
        raise ValueError(
            f"shape() gave the hold_until {shown(hold)}; want seconds of the engine's clock"
        )
    return value


def _number(value: Any) -> bool:
    """A finite number that is no truth value."""
    number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(
        value, bool
    )
    return number and math.isfinite(value)


# ---- strategies ------------------------------------------------------------------------------------------------------


def branches(value: Any, width: int, stepwise: bool) -> list[Branch]:
    """The branches of a new request: at most ``width``, for which room is kept; exactly so many of a stepwise one."""
    try:
        found = list(value)
    except TypeError:
        found = []
    if (
        not all(isinstance(b, Branch) for b in found)
        or not (width if stepwise else 1) <= len(found) <= width
    ):
        most = f"{width}" if stepwise or width == 1 else f"1 to {width}"
        raise ValueError(f"start() gave {shown(value)}; want {most} of Branch")
    samples = [whole(b.sample, 0, width - 1, "start() gave the sample") for b in found]
    if len(set(samples)) < len(samples):
        raise ValueError(f"start() gave the samples {samples}; want no two that are equal")
    if any(b.guide is not None for b in found):
        for b in found:
            _guide(b.guide, stepwise)
    return found


def _guide(value: Any, stepwise: bool) -> None:
    """The guide of a branch of a request that has guides."""
    if not isinstance(value, Guide) or stepwise:
        want = "none in a stepwise strategy" if stepwise else "a Guide for each branch, or for none"
        raise ValueError(f"start() gave the guide {shown(value)}; want {want}")
    if not _number(value.scale):
        raise ValueError(f"its scale is {shown(value.scale)}; want a finite number")
    for token in value.prompt:
        whole(token, -(2**31), 2**31 - 1, "the prompt of a guide has the token id")


def answer(value: Any, samples: Collection[int], most: int) -> list[int]:
    """The answer of ``result``: which of the branches that ended it is made of."""
    try:
        found = list(value)
    except TypeError:
        found = []
    order = [whole(i, 0, max(samples), "result() gave the sample") for i in found]
    if (
        not 1 <= len(order) <= most
        or len(set(order)) < len(order)
        or not set(order) <= set(samples)
    ):
        raise ValueError(
            f"result() gave {shown(value)}; want 1 to {most} of the samples {sorted(samples)}, each once"
        )
    return order


def score(value: Any) -> float:
    """The score of a continuation."""
    if not isinstance(value, (int, float, np.integer, np.floating)) or math.isnan(value):
        raise ValueError(f"a continuation has the score {shown(value)}; want a number")
    return float(value)


# ---- grammars --------------------------------------------------------------------------------------------------------


def accepted(value: Any, given: Sequence[Sequence[int]]) -> list[int]:
    """The answer of ``accept``: how many of the tokens ``given`` each matcher took."""
    if value is None or len(value) != len(given):
        raise ValueError(f"accept() gave {shown(value)} for {len(given)} matchers")
    every = [len(ids) for ids in given]
    # nearly always; the device waits
    if type(value) is list and value == every and set(map(type, value)) <= {int}:
        return every
    return [whole(n, 0, len(ids), "accept() gave") for n, ids in zip(value, given, strict=True)]


def stuck(value: Any, n: int) -> dict[int, str]:
    """The answer of ``fill``: which of n matchers cannot go on, and why."""
    if not isinstance(value, Mapping):
        raise ValueError(
            f"fill() gave {shown(value)}; want a mapping of matchers that cannot go on"
        )
    return {
        whole(i, 0, n - 1, "fill() gave the matcher"): why if isinstance(why, str) else shown(why)
        for i, why in value.items()
    }


# ---- executors -------------------------------------------------------------------------------------------------------


def result(found: Any, plan: StepPlan, capacity: Capacity) -> StepResult:
    """A step's outcome that fits its plan, unless the step failed: then nobody reads its columns."""
    vocab = capacity.vocab_size
    if not isinstance(found, StepResult) or found.id != plan.id:
        what = f"step {found.id}" if isinstance(found, StepResult) else shown(found)
        raise ValueError(f"it answered {what} where step {plan.id} was due")
    if found.failure is not None:
        return found
    n = len(plan.samples)
    for name, dtype in RESULT.items():
        column = getattr(found, name)
        if not isinstance(column, np.ndarray) or column.shape != (n,) or column.dtype != dtype:
            raise ValueError(f"{name} of step {plan.id} are {shown(column)}; want {dtype} [{n}]")
    # in every step, so as few operations as will do: what is negative is large
    if np.count_nonzero(found.count.view(np.uint32) > ONE):
        raise ValueError(
            f"count of step {plan.id} has {shown(found.count)}; want 0 or 1 token a row"
        )
    outside = found.tokens.view(np.uint32) >= np.array(vocab, np.uint32)
    if np.count_nonzero(outside) and found.count[outside].any():
        raise ValueError(f"tokens of step {plan.id} are out of range; want 0 to {vocab - 1}")
    if plan.topk >= 0:
        _logprobs(found.logprobs, n, plan.topk, f"log-probabilities of step {plan.id}")
    if len(plan.prompt):
        _logprobs(
            found.prompt,
            int(plan.prompt[:, 1].sum()),
            plan.prompt_topk,
            f"those of prompts in step {plan.id}",
        )
    if len(plan.host) and _shape_of(found.logits) != (len(plan.host), vocab):
        raise ValueError(
            f"logits of step {plan.id} have shape {_shape_of(found.logits)}; want {(len(plan.host), vocab)}"
        )
    if len(plan.taps):
        count = plan.q_len[plan.taps[:, 1]] - plan.taps[:, 2]
        want = int(count @ np.array([*(capacity.taps or {}).values()])[plan.taps[:, 0]])
        if found.taps is None or found.taps.shape != (want,) or found.taps.dtype != np.float32:
            raise ValueError(
                f"taps of step {plan.id} are {shown(found.taps)}; want float32 [{want}]"
            )
    return found


def _shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of an array, () for None."""
    return () if value is None else np.shape(value)


def _logprobs(lp: LogProbs | None, n: int, k: int, what: str) -> None:
    shapes = [_shape_of(getattr(lp, name, None)) for name in ("chosen", "rank", "top_ids", "top")]
    chosen, rank, ids, top = shapes
    if (chosen, rank) != ((n,), (n,)) or ids != top or len(ids) != 2 or ids[0] != n or ids[1] < k:
        raise ValueError(
            f"{what} have the shapes {shapes}; want those of {n} tokens and the {k} best of each"
        )
