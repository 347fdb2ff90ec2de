"""Check the values that plug-ins and functions of a request return, where they are used.  A wrong value is a
ValueError.

The caller converts it into an error with the name of the plug-in.  Values are never truncated, rounded or clamped,
because that would turn a wrong value into a wrong text without a message.
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

from .interfaces.plan import FORMS, LogProbs, StepForm, StepPlan, StepResult
from .interfaces.sampling import Column, Row
from .interfaces.scheduler import SchedulerPolicy, StepShape
from .interfaces.strategy import Branch, Guide

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from .interfaces.executor import Capacity

RESULT = {"tokens": np.dtype(np.int32), "count": np.dtype(np.int32), "flags": np.dtype(np.uint8)}
# array, because numpy compares with an array twice as fast as with a number
ONE = np.ones(1, np.uint32)
MOST_FIGURES = 64  # largest number of counters that the method ``figures`` of a plug-in may return
FIGURE = re.compile(r"[a-z][a-z0-9_]{0,63}")
SHAPES = ("mix", "prefill_first", "static")


def whole(value: Any, low: int, high: int, what: str) -> int:
    """Return ``value`` as an int, if it is a whole number from ``low`` to ``high``; else raise ValueError.  It may be a
    Python or numpy number, or a tensor with one element.

    ``what`` is the beginning of the error message."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        found = operator.index(value)
    except TypeError:
        found = low - 1
    if not low <= found <= high:
        raise ValueError(f"{what} {shown(value)}; expected a whole number from {low} to {high}")
    return found


def _array(value: Any, kinds: str, what: str) -> np.ndarray:
    """Convert a value to an array whose ``dtype.kind`` is one of ``kinds``.  TypeError for other values."""
    try:
        array = np.asarray(value)
    except (ValueError, TypeError):  # lists of unequal length, or objects that are not numbers
        array = np.empty(0, object)
    if array.dtype.kind not in kinds:
        expected = "numbers" if "f" in kinds else "whole numbers"
        raise ValueError(f"{what} {shown(value)}; expected {expected}")
    return array


# ---- a request's functions -------------------------------------------------------------------------------------------


def chosen_token(value: Any, vocab: int) -> int:
    """Return the token id that a request's function ``choose_fn`` returned, after a check."""
    return whole(value, 0, vocab - 1, "it chose token")


def allowed_tokens(value: Any, vocab: int) -> np.ndarray:
    """Return the token ids i64 [n] that a request's function ``allowed_tokens_fn`` returned, after a check."""
    if not hasattr(value, "__len__") or not len(value):
        found = "no token" if hasattr(value, "__len__") else shown(value)
        raise ValueError(f"it allowed {found}; expected a list of ids 0 to {vocab - 1}")
    ids = _array(value, "iu", "it allowed")
    if ids.ndim != 1:
        raise ValueError(f"it allowed ids of shape {ids.shape}; expected one list of ids")
    if ids.min() < 0 or ids.max() >= vocab:
        raise ValueError(f"it allowed tokens outside the vocabulary; expected ids 0 to {vocab - 1}")
    return ids.astype(np.int64)


# ---- processors and samplers -----------------------------------------------------------------------------------------


def bound(row: Any, columns: Mapping[str, Column]) -> Row | None:
    """Return the Row that a processor's ``bind`` returned, with its values as arrays that fit the processor's columns;
    None if it returned None."""
    if row is None:
        return None
    if not isinstance(row, Row):
        raise ValueError(f"bind returned {shown(row)}; expected a Row or None")
    whole(row.variant, 0, 2**63 - 1, "its Row has the variant")
    values = {}
    for name, value in row.values.items():
        if name not in columns:
            raise ValueError(
                f"it has no column {shown(name)}; expected one of {', '.join(columns) or 'none'}"
            )
        values[name] = _fitting(name, value, columns[name])
    return replace(row, values=values) if values else row


def _fitting(name: str, value: Any, column: Column) -> np.ndarray:
    """Return a value as an array of its column's shape that converts to the column's dtype without loss."""
    what = f"column {name!r} got"
    real = "float" in column.dtype
    array = _array(value, "fiub" if real else "iub", what)
    if array.size != math.prod(column.shape):
        raise ValueError(f"{what} shape {array.shape}; expected {column.shape}")
    if real:
        if np.isnan(array).any() and not math.isnan(column.fill):
            raise ValueError(f"{what} NaN; expected numbers")
        return array.astype(np.float64)
    dtype = np.dtype(column.dtype)
    fitting = array.astype(dtype)
    if (fitting != array).any():
        raise ValueError(f"{what} {shown(value)}; expected values of {dtype}")
    return fitting


def figures(value: Any) -> dict[str, float]:
    """Return the counters that the method ``figures`` of a plug-in returned, as Python numbers by name, after a
    check."""
    if not isinstance(value, Mapping) or len(value) > MOST_FIGURES:
        expected = f"a mapping of at most {MOST_FIGURES} names to numbers"
        raise ValueError(f"its figures are {shown(value)}; expected {expected}")
    found: dict[str, float] = {}
    for name, number in value.items():
        if not isinstance(name, str) or not FIGURE.fullmatch(name):
            expected = "up to 64 lower-case letters, digits, underscores"
            raise ValueError(f"a figure is named {shown(name)}; expected {expected}")
        if not isinstance(number, (int, float, np.number)) or not np.isfinite(float(number)):
            raise ValueError(f"its figure {name} is {shown(number)}; expected a finite number")
        found[name] = int(number) if isinstance(number, (int, np.integer)) else float(number)
    return found


# ---- schedulers ------------------------------------------------------------------------------------------------------


def window(policy: SchedulerPolicy) -> int:
    """Return how many waiting sequences a scheduling policy wants to receive (its ``window``).  PluginError if it is
    below 1."""
    if not isinstance(policy.window, int) or policy.window < 1:
        problem = f"scheduler {type(policy).__name__}: its window is {shown(policy.window)}"
        raise PluginError(f"{problem}; expected a whole number of waiting sequences, at least 1")
    return policy.window


def key(value: Any) -> float:
    """Return the sort key of one sequence that a policy's method ``key`` returned, after a check."""
    found = _array(value, "fiu", "key() gave")
    if found.shape != (1,) or np.isnan(found[0]):
        raise ValueError(
            f"key() gave {shown(value)}; expected an array of one number that is not NaN"
        )
    return float(found[0])


def lane(value: Any) -> int:
    """Return the number of the queue (lane) of one sequence that a policy's method ``lane`` returned, after a check."""
    found = _array(value, "iu", "lane() gave")
    if found.shape != (1,):
        raise ValueError(f"lane() gave {shown(value)}; expected an array of one whole number")
    return int(found[0])


def ordered(value: Any, n: int) -> Iterator[int]:
    """Yield the indices that a policy's method ``order`` returned.  Each is checked only when it is used, because
    usually few of them are."""
    if not hasattr(value, "__len__") or len(value) > n:
        raise ValueError(f"order() gave {shown(value)}; expected at most {n} indices, each once")
    return (whole(i, 0, n - 1, "order() gave") for i in value)


def shape(value: Any) -> StepShape:
    """Return the StepShape that a policy's method ``shape`` returned, after a check."""
    if not isinstance(value, StepShape) or value.kind not in SHAPES:
        kinds = ", ".join(SHAPES)
        raise ValueError(f"shape() gave {shown(value)}; expected a StepShape of kind {kinds}")
    cap, hold = value.prefill_cap, value.hold_until
    if cap is not None and not (_number(cap) and cap >= 0):
        expected = "a number of tokens, or None"
        raise ValueError(f"shape() gave the prefill_cap {shown(cap)}; expected {expected}")
    if not _number(hold) and hold not in (math.inf, -math.inf):
        expected = "seconds of the engine's clock"
        raise ValueError(f"shape() gave the hold_until {shown(hold)}; expected {expected}")
    return value


def _number(value: Any) -> bool:
    """Return whether a value is a finite number and not a bool."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        return False
    return math.isfinite(value)


# ---- strategies ------------------------------------------------------------------------------------------------------


def branches(value: Any, width: int, stepwise: bool) -> list[Branch]:
    """Return the branches of a new request that a strategy's method ``start`` returned, after a check.  A stepwise
    strategy must return exactly ``width`` of them, any other at most ``width``."""
    found = _listed(value)
    least = width if stepwise else 1
    if not all(isinstance(b, Branch) for b in found) or not least <= len(found) <= width:
        count = f"{width}" if least == width else f"1 to {width}"
        raise ValueError(f"start() gave {shown(value)}; expected a list of {count} Branch objects")
    samples = [whole(b.sample, 0, width - 1, "start() gave the sample") for b in found]
    if len(set(samples)) < len(samples):
        raise ValueError(f"start() gave the samples {samples}; expected no two that are equal")
    if any(b.guide is not None for b in found):
        for b in found:
            _guide(b.guide, stepwise)
    return found


def _listed(value: Any) -> list[Any]:
    """Return the elements of ``value`` as a list; an empty list if it cannot be iterated over."""
    try:
        return list(value)
    except TypeError:
        return []


def _guide(value: Any, stepwise: bool) -> None:
    """Raise ValueError unless ``value`` is a valid guide of a branch."""
    if not isinstance(value, Guide) or stepwise:
        expected = (
            "none in a stepwise strategy" if stepwise else "a Guide for each branch, or for none"
        )
        raise ValueError(f"start() gave the guide {shown(value)}; expected {expected}")
    if not _number(value.scale):
        raise ValueError(f"its scale is {shown(value.scale)}; expected a finite number")
    for token in value.prompt:
        whole(token, -(2**31), 2**31 - 1, "the prompt of a guide has the token id")


def answer(value: Any, samples: Collection[int], most: int) -> list[int]:
    """Return the numbers of the samples that a strategy's method ``result`` chose as outputs, after a check.

    ``samples`` are the numbers of the ended branches.  ``most`` is the largest number of outputs."""
    order = [whole(i, 0, max(samples), "result() gave the sample") for i in _listed(value)]
    distinct = set(order)
    if not 1 <= len(order) <= most or len(distinct) < len(order) or not distinct <= set(samples):
        expected = f"1 to {most} of the samples {sorted(samples)}, each once"
        raise ValueError(f"result() gave {shown(value)}; expected {expected}")
    return order


def score(value: Any) -> float:
    """Return the score that a beam search gave a continuation, after a check."""
    if not isinstance(value, (int, float, np.integer, np.floating)) or math.isnan(value):
        raise ValueError(f"a continuation has the score {shown(value)}; expected a number")
    return float(value)


# ---- grammars --------------------------------------------------------------------------------------------------------


def accepted(value: Any, tokens: Sequence[Sequence[int]]) -> list[int]:
    """Return how many of its ``tokens`` each grammar matcher accepted: the result of the plug-in's method ``accept``,
    after a check."""
    if value is None or len(value) != len(tokens):
        raise ValueError(f"accept() gave {shown(value)} for {len(tokens)} matchers")
    every = [len(ids) for ids in tokens]
    # fast path for valid results, because the device waits for them
    if type(value) is list and value == every and set(map(type, value)) <= {int}:
        return every
    return [whole(n, 0, len(ids), "accept() gave") for n, ids in zip(value, tokens, strict=True)]


def stuck(value: Any, n: int) -> dict[int, str]:
    """Return the result of a grammar plug-in's method ``fill`` after a check: for each of the ``n`` matchers that
    cannot continue, its index and a message."""
    if not isinstance(value, Mapping):
        expected = "a mapping of matchers that cannot go on"
        raise ValueError(f"fill() gave {shown(value)}; expected {expected}")
    found: dict[int, str] = {}
    for i, message in value.items():
        index = whole(i, 0, n - 1, "fill() gave the matcher")
        found[index] = message if isinstance(message, str) else shown(message)
    return found


# ---- executors -------------------------------------------------------------------------------------------------------


def _kept(found: StepResult, plan: StepPlan, capacity: Capacity) -> None:
    """Raise ValueError unless ``StepResult.kept`` has as many kept tokens as the plan's ``Delta.kept`` requests."""
    rows = plan.delta.compact[plan.delta.kept]
    size = sum(kept * sum(capacity.kept_heads[group]) for group, _, _, kept, _ in rows.tolist())
    if found.kept.shape != (size,) or found.kept.dtype != np.int32:
        what = f"{found.kept.dtype} {list(found.kept.shape)}"
        raise ValueError(f"kept tokens of step {plan.id} are {what}; expected int32 [{size}]")


def result(found: Any, plan: StepPlan, capacity: Capacity) -> StepResult:
    """Return the result of a step, after a check that its columns fit the plan.  The columns of a failed step are not
    checked, because they are not read."""
    vocab = capacity.vocab_size
    if not isinstance(found, StepResult) or found.id != plan.id:
        other = f"step {found.id}" if isinstance(found, StepResult) else shown(found)
        raise ValueError(f"it answered {other} where step {plan.id} was due")
    form = found.form
    if type(form) is not StepForm or form.kind not in FORMS:
        raise ValueError(
            f"form of step {plan.id} is {shown(form)}; expected a StepForm of kind {', '.join(map(repr, FORMS))}"
        )
    if found.failure is not None:
        return found
    n = len(plan.samples)
    for name, dtype in RESULT.items():
        column = getattr(found, name)
        if not isinstance(column, np.ndarray) or column.shape != (n,) or column.dtype != dtype:
            raise ValueError(
                f"{name} of step {plan.id} are {shown(column)}; expected {dtype} [{n}]"
            )
    # These checks run in every step, so they use few operations.  Viewed as unsigned, a negative number is large.
    if np.count_nonzero(found.count.view(np.uint32) > ONE):
        raise ValueError(
            f"count of step {plan.id} has {shown(found.count)}; expected 0 or 1 per row"
        )
    outside = found.tokens.view(np.uint32) >= np.array(vocab, np.uint32)
    if np.count_nonzero(outside) and found.count[outside].any():
        raise ValueError(f"tokens of step {plan.id} are out of range; expected 0 to {vocab - 1}")
    if plan.topk >= 0:
        _logprobs(found.logprobs, n, plan.topk, f"log-probabilities of step {plan.id}")
    if len(plan.delta.kept):
        _kept(found, plan, capacity)
    if len(plan.prompt):
        count = int(plan.prompt[:, 1].sum())
        label = f"those of prompts in step {plan.id}"
        _logprobs(found.prompt, count, plan.prompt_topk, label)
    shape = len(plan.host), vocab
    if shape[0] and _shape_of(found.logits) != shape:
        logits_shape = _shape_of(found.logits)
        raise ValueError(f"logits of step {plan.id} have shape {logits_shape}; expected {shape}")
    if len(plan.taps):
        tokens = plan.q_len[plan.taps[:, 1]] - plan.taps[:, 2]
        widths = np.array([*(capacity.taps or {}).values()])
        size = int(tokens @ widths[plan.taps[:, 0]])
        if found.taps is None or found.taps.shape != (size,) or found.taps.dtype != np.float32:
            have = shown(found.taps)
            raise ValueError(f"taps of step {plan.id} are {have}; expected float32 [{size}]")
    if len(plan.pooled):
        shape = len(plan.pooled), capacity.hidden
        if _shape_of(found.pooled) != shape or found.pooled.dtype != np.float64:
            have = shown(found.pooled)
            raise ValueError(f"pooled of step {plan.id} are {have}; expected float64 {list(shape)}")
    return found


def _shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of an array, or () for None."""
    return () if value is None else np.shape(value)


def _logprobs(lp: LogProbs | None, n: int, k: int, what: str) -> None:
    """Check the log-probabilities of n tokens, with at least the k best of each."""
    shapes = [_shape_of(getattr(lp, name, None)) for name in ("chosen", "rank", "top_ids", "top")]
    chosen, rank, ids, top = shapes
    if (chosen, rank) != ((n,), (n,)) or ids != top or len(ids) != 2 or ids[0] != n or ids[1] < k:
        expected = f"those of {n} tokens and the {k} best of each"
        raise ValueError(f"{what} have the shapes {shapes}; expected {expected}")
