"""The costs of a step, read from a table that ``minivllm calibrate`` has measured, and the seconds that follow from
them.

    a step of decodes   rows(R) + kv * K
    one with prompts    tokens(R + T) + row * R + kv * K + pairs * P + chunk * C
    any                 + join * J + plan * N + end * E + fresh * F + W * (cold + cold_kv * K) + V * wake

    R   rows that decode             K   tokens whose KV they read          J   rows that enter
    T   prompt tokens computed       P   pairs of a prompt token and one    E   rows that end
    C   chunks of prompts                before it                 F   0 if the rows are those of the preceding step
    V   1 after a pause; a step beyond the limit then costs wake_large more
    N   prompt tokens, if the host plans a step during the preceding one; otherwise T contains their cost

Steps with prompts have two sets of costs, for up to ``limit`` tokens and for more.  Captured steps and kernels for few
tokens end at some number of tokens.  All costs of larger steps differ, also those of decoding rows in the same step.  W
is 1 for a step within the limit if one of the two preceding steps was beyond it, because caches are then cold.

``rows`` and ``tokens`` are broken lines through measured points.  Captured steps have the costs of their padded sizes,
and small chunks do not fill a device.  Beyond the last point the last slope continues.  All times are from one step to
the next as the engine measures it, including the work of the host.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from minivllm import files
from minivllm.core.interfaces.plan import StepPlan
from minivllm.errors import ConfigError

FORMAT = "minivllm-costs 4"
# Names of the costs in seconds per unit. ``kv`` applies to steps without prompts.
SLOPES = ("kv", "join", "plan", "end", "fresh", "cold", "cold_kv", "wake", "wake_large")
PROMPT_SLOPES = ("row", "kv", "pairs", "chunk")  # names of the costs that steps with prompts have in addition

PAUSE = 2e-3  # after this many seconds without a step, caches are cold and threads sleep

SIZES = {  # option that sizes the engine -> its smallest value
    "kvcache_block_size": 1,
    "num_kvcache_blocks": 1,
    "max_model_len": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "depth": 0,
}


@dataclass(frozen=True)
class BrokenLine:
    """A function of a number of rows or tokens that returns seconds: straight lines between measured points.  Beyond
    the last point the slope of the last two continues."""

    at: Sequence[int]
    seconds: Sequence[float]

    def __call__(self, x: int) -> float:
        at = self.at
        y = self.seconds
        if len(at) == 1:
            return y[0]
        i = min(max(bisect_right(at, x), 1), len(at) - 1)
        rise = y[i] - y[i - 1]
        run = at[i] - at[i - 1]
        return y[i - 1] + rise * (x - at[i - 1]) / run


class StepCounts(NamedTuple):
    """The counts of rows and tokens in a step from which its time is computed."""

    rows: int
    kv: int
    prefill: int
    pairs: float
    chunks: int
    joins: int = 0
    ends: int = 0
    fresh: int = 0
    before: int = 0  # larger number of tokens of the two preceding steps, where a step without prompts counts as 0
    wake: int = 0  # 1 for a step after a pause, else 0
    planned: int = 0  # number of prompt tokens for which the host's planning costs time

    @property
    def tokens(self) -> int:
        return self.rows + self.prefill


class StepCounter:
    """Computes the counts of steps in the order in which they run.  The costs of a step also depend on the two steps
    before it."""

    def __init__(self) -> None:
        self.last: StepPlan | None = None
        self.before = (0, 0)  # numbers of tokens of the last two steps, 0 for a step without prompts

    def count(self, plan: StepPlan, ends: int = 0, wake: bool = False) -> StepCounts:
        """Return the counts of a step, in which ``ends`` sequences end.

        ``wake`` means that the step follows a pause.  Rows of one token come first in a plan.  A plan that continues
        the last plan with the same rows (``StepPlan.further``) is built in a fraction of the time and finds warm
        caches.
        """
        q = plan.q_len
        n = len(plan.q_len)
        joins = 0 if plan.delta.join is None else len(plan.delta.join.slot)
        if not n or q[-1] == 1:
            return self.decodes(plan, int(plan.computed.sum()) + n, joins, ends, wake)
        rows = int(np.count_nonzero(q == 1))
        long = q[rows:].tolist()
        first = plan.computed[rows:].tolist()
        pairs = 0.0
        for tokens, at in zip(long, first, strict=True):
            pairs += tokens * (at + (tokens + 1) / 2)
        kv = int(plan.computed[:rows].sum()) + rows
        prefill = sum(long)
        fresh, before = self._begin(plan, rows + prefill)
        return StepCounts(rows, kv, prefill, pairs, n - rows, joins, ends, fresh, before, int(wake), prefill)

    def decodes(self, plan: StepPlan, kv: int, joins: int = 0, ends: int = 0, wake: bool = False) -> StepCounts:
        """Return the counts of a step without prompts, whose rows read ``kv`` tokens.

        ``joins`` and ``ends`` are numbers of sequences, and ``wake`` means that the step follows a pause.
        """
        fresh, before = self._begin(plan, 0)
        return StepCounts(len(plan.slots), kv, 0, 0.0, 0, joins, ends, fresh, before, int(wake))

    def _begin(self, plan: StepPlan, tokens: int) -> tuple[int, int]:
        """Return two fields of ``StepCounts``: ``fresh`` is 1 if the rows differ from those of the preceding step, and
        ``before`` is the larger number of tokens of the last two steps with prompts, else 0.

        Remember this plan for the next call.  ``tokens`` is its number of tokens if it has prompts, else 0.
        """
        fresh = self.last is None or plan.slots is not self.last.slots
        before = max(self.before)
        self.last = plan
        self.before = (self.before[1], tokens)
        return int(fresh), before

    def skip(self, plan: StepPlan) -> None:
        """Note that at least two decode steps, without prompts, have run since the last counted step; ``plan`` is the
        last one.
        """
        self.last = plan
        self.before = (0, 0)


@dataclass(frozen=True)
class PromptCosts:
    """The costs of steps with prompts, for steps of up to ``limit`` tokens or for longer ones."""

    tokens: BrokenLine
    slopes: Mapping[str, float]  # by ``PROMPT_SLOPES``

    def seconds(self, c: StepCounts) -> float:
        s = self.slopes
        own = s["row"] * c.rows + s["kv"] * c.kv
        own += s["pairs"] * c.pairs
        own += s["chunk"] * c.chunks
        return self.tokens(c.tokens) + own

    def as_json(self) -> dict[str, Any]:
        return {"tokens": _points(self.tokens), **{name: self.slopes[name] for name in PROMPT_SLOPES}}


@dataclass(frozen=True)
class CostTable:
    rows: BrokenLine  # seconds of a step without prompts, by its number of rows
    small: PromptCosts
    large: PromptCosts
    # largest number of tokens of a step with prompts for which the first set of costs is used; 0 means that there is
    # one set
    limit: int
    slopes: Mapping[str, float]  # by ``SLOPES``
    add: float = 0.0  # seconds of host work for a request that is added to the engine
    # power of a "busy" and of an "idle" device, if it has an energy counter
    watts: Mapping[str, float] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)  # options that size the engine which was measured
    about: Mapping[str, Any] = field(default_factory=dict)  # machine, configuration, date
    fit: Mapping[str, Any] = field(default_factory=dict)  # by how much the costs deviate from the measurements

    def seconds(self, c: StepCounts) -> float:
        s = self.slopes
        if not c.prefill:
            found = self.decode(c.rows, c.kv)
        elif c.tokens <= self.limit:
            found = self.small.seconds(c)
        else:
            found = self.large.seconds(c)
        host = s["join"] * c.joins + s["plan"] * c.planned
        host += s["end"] * c.ends
        host += s["fresh"] * c.fresh
        found += host
        if c.wake:
            found += s["wake"] + s["wake_large"] * self.is_large(c)
        if not self.is_cold(c):
            return found
        return found + s["cold"] + s["cold_kv"] * c.kv

    def decode(self, rows: int, kv: int) -> float:
        """Return the seconds of a step that repeats the last one, with ``rows`` decoding rows that read KV of
        ``kv`` tokens.
        """
        return self.rows(rows) + self.slopes["kv"] * kv

    def is_large(self, c: StepCounts) -> bool:
        return c.prefill > 0 and c.tokens > self.limit > 0

    def is_cold(self, c: StepCounts) -> bool:
        return c.before > self.limit > 0 and (not c.prefill or c.tokens <= self.limit)

    def scaled(self, by: float) -> CostTable:
        """Return the costs of a machine on which every cost is ``by`` times as high."""

        def times(costs: Mapping[str, float]) -> dict[str, float]:
            return {name: by * cost for name, cost in costs.items()}

        def line(given: BrokenLine) -> BrokenLine:
            return BrokenLine(given.at, [by * seconds for seconds in given.seconds])

        def prompts(costs: PromptCosts) -> PromptCosts:
            return PromptCosts(line(costs.tokens), times(costs.slopes))

        rows = line(self.rows)
        small = prompts(self.small)
        large = prompts(self.large)
        slopes = times(self.slopes)
        return replace(self, rows=rows, small=small, large=large, slopes=slopes, add=by * self.add)

    def as_json(self) -> dict[str, Any]:
        seconds = {
            "rows": _points(self.rows),
            **{name: self.slopes[name] for name in SLOPES},
            "add": self.add,
            "limit": self.limit,
            "small": self.small.as_json(),
            "large": self.large.as_json(),
        }
        return {
            "format": FORMAT,
            "about": dict(self.about),
            "engine": dict(self.engine),
            "fit": dict(self.fit),
            "seconds": seconds,
            "watts": dict(self.watts),
        }


def read_costs(path: str) -> CostTable:
    """Read a file that ``minivllm calibrate`` wrote.  Raise ConfigError for an invalid file."""
    expected = "a file that `minivllm calibrate` wrote"
    raw = files.read_json(path, files.SMALL, expected=expected)
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise ConfigError(f"{path}: not a table of costs ({FORMAT!r}); expected {expected}")
    try:
        found = raw["seconds"]
        rows = _line(found["rows"])
        small = _prompts(found["small"])
        large = _prompts(found["large"])
        limit = _limit(found["limit"])
        slopes = {name: _number(found[name]) for name in SLOPES}
        add = _number(found["add"])
        watts = {name: _number(watt) for name, watt in raw["watts"].items()}
        engine = _engine(raw["engine"])
        return CostTable(rows, small, large, limit, slopes, add, watts, engine, raw["about"], raw["fit"])
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise ConfigError(f"{path}: {type(e).__name__}: {e}; expected a file that `minivllm calibrate` wrote") from e


def _engine(raw: Any) -> dict[str, Any]:
    """Return the options that size the measured engine, after a check.  Raise ValueError for an invalid one."""
    for name, low in SIZES.items():
        if type(raw[name]) is not int or not low <= raw[name] < 2**31:
            raise ValueError(f"engine.{name}={raw[name]!r}: expected a whole number from {low} on, below 2**31")
    copies = raw.get("state_checkpoints", 0)
    if type(copies) is not int or copies < 0:
        raise ValueError(f"engine.state_checkpoints={copies!r}: expected a whole number from 0 on")
    windows = raw["windows"]
    if not isinstance(windows, list) or not windows:
        raise ValueError(f"engine.windows={windows!r}: expected a list, a window (or null) of each KV group")
    for window in windows:
        if window is not None and (type(window) is not int or window < 1):
            raise ValueError(f"engine.windows={windows!r}: expected whole numbers from 1 on, or null")
    return dict(raw)


def _points(line: BrokenLine) -> dict[str, Any]:
    return {"at": list(line.at), "seconds": list(line.seconds)}


def _prompts(raw: Any) -> PromptCosts:
    return PromptCosts(_line(raw["tokens"]), {name: _number(raw[name]) for name in PROMPT_SLOPES})


def _limit(raw: Any) -> int:
    if type(raw) is not int or not 0 <= raw < 2**31:
        raise ValueError(f"limit={raw!r}: expected a whole number of tokens from 0 on, below 2**31")
    return raw


def _line(raw: Any) -> BrokenLine:
    at = [int(x) for x in raw["at"]]
    seconds = [_number(x) for x in raw["seconds"]]
    if not at or len(at) != len(seconds) or any(b <= a for a, b in itertools.pairwise(at)):
        raise ValueError("points that do not ascend, or not a number of seconds for each")
    return BrokenLine(at, seconds)


def _number(x: Any) -> float:
    value = float(x)
    if not 0 <= value < 1e6:
        raise ValueError(f"{x!r}: expected seconds or watts from 0 on")
    return value
