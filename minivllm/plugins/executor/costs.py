"""What a step costs: a table that ``minivllm calibrate`` has measured, and the seconds that follow from it.

    seconds = rows(R) + kv * K + prefill(T) + pairs * P + chunk * C + join * J + end * E + fresh * F

    R   rows that decode             K   tokens whose KV they read          J   rows that enter
    T   prompt tokens computed       P   pairs of a prompt token and one    E   rows that end
    C   chunks of prompts                before it                 F   1 unless its rows are those of the step before

``rows`` and ``prefill`` are broken lines through points that were measured (captured steps make stairs of the one,
and small chunks leave a device idle); beyond the last point they go on as before it.  All of it is the time from one
step to the next as the engine sees it, what the host does included.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minivllm import files
from minivllm.core.interfaces.plan import StepPlan
from minivllm.errors import ConfigError

FORMAT = "minivllm-costs 1"
SLOPES = ("kv", "pairs", "chunk", "join", "end", "fresh")  # seconds for each

SIZES = {  # of the engine, and the least that each may be
    "kvcache_block_size": 1,
    "num_kvcache_blocks": 1,
    "max_model_len": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "depth": 0,
}


@dataclass(frozen=True)
class BrokenLine:
    """Seconds at points, ascending; beyond the last as between the last two."""

    at: Sequence[int]
    seconds: Sequence[float]

    def __call__(self, x: int) -> float:
        at, y = self.at, self.seconds
        i = min(max(bisect_right(at, x), 1), len(at) - 1)
        if len(at) == 1:
            return y[0]
        return y[i - 1] + (y[i] - y[i - 1]) * (x - at[i - 1]) / (at[i] - at[i - 1])


@dataclass(frozen=True)
class StepCounts:
    """What of a step decides its time."""

    rows: int
    kv: int
    prefill: int
    pairs: float
    chunks: int
    joins: int = 0
    ends: int = 0
    fresh: int = 0

    @classmethod
    def of(cls, plan: StepPlan, last: StepPlan | None = None, ends: int = 0) -> StepCounts:
        """Rows of one token come first in a plan.  ``last``: the plan before; one that goes on from it in the same rows
        (``StepPlan.further``) is made in a fraction of the time, and finds caches warm."""
        fresh = int(last is None or plan.slots is not last.slots)
        q, n = plan.q_len, len(plan.q_len)
        joins = 0 if plan.delta.join is None else len(plan.delta.join.slot)
        if not n or q[-1] == 1:
            return cls(n, int(plan.computed.sum()) + n, 0, 0.0, 0, joins, ends, fresh)
        rows = int(np.count_nonzero(q == 1))
        long, before = q[rows:].astype(np.float64), plan.computed[rows:]
        pairs = float((long * (before + (long + 1) / 2)).sum())
        kv = int(plan.computed[:rows].sum()) + rows
        return cls(rows, kv, int(long.sum()), pairs, n - rows, joins, ends, fresh)


@dataclass(frozen=True)
class CostTable:
    rows: BrokenLine
    prefill: BrokenLine  # of no tokens: 0, whatever its first point says
    slopes: Mapping[str, float]  # by ``SLOPES``
    add: float = 0.0  # seconds that a request costs when it comes
    watts: Mapping[str, float] = field(default_factory=dict)  # "busy" and "idle", where there is a counter
    engine: Mapping[str, Any] = field(default_factory=dict)  # sizes of the engine that was measured
    about: Mapping[str, Any] = field(default_factory=dict)  # machine, configuration, date
    fit: Mapping[str, Any] = field(default_factory=dict)  # how far it is from what was measured

    def seconds(self, c: StepCounts) -> float:
        s = self.slopes
        found = self.rows(c.rows) + s["kv"] * c.kv + s["join"] * c.joins + s["end"] * c.ends + s["fresh"] * c.fresh
        if c.prefill:
            found += self.prefill(c.prefill) + s["pairs"] * c.pairs + s["chunk"] * c.chunks
        return found

    def as_json(self) -> dict[str, Any]:
        line = lambda x: {"at": list(x.at), "seconds": list(x.seconds)}  # noqa: E731
        return {
            "format": FORMAT,
            "about": dict(self.about),
            "engine": dict(self.engine),
            "fit": dict(self.fit),
            "seconds": {
                "rows": line(self.rows),
                "prefill": line(self.prefill),
                **{name: self.slopes[name] for name in SLOPES},
                "add": self.add,
            },
            "watts": dict(self.watts),
        }


def read_costs(path: str) -> CostTable:
    """A file that ``minivllm calibrate`` wrote.  ConfigError says what is wrong with it."""
    raw = files.read_json(path, files.SMALL)
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise ConfigError(f"{path}: no table of costs ({FORMAT!r}); want a file that `minivllm calibrate` wrote")
    try:
        found = raw["seconds"]
        return CostTable(
            _line(found["rows"]),
            _line(found["prefill"]),
            {name: _number(found[name]) for name in SLOPES},
            _number(found["add"]),
            {name: _number(x) for name, x in raw["watts"].items()},
            _engine(raw["engine"]),
            raw["about"],
            raw["fit"],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise ConfigError(f"{path}: {type(e).__name__}: {e}; want a file that `minivllm calibrate` wrote") from e


def _engine(raw: Any) -> dict[str, Any]:
    """Sizes of the engine that was measured."""
    for name, low in SIZES.items():
        if type(raw[name]) is not int or not low <= raw[name] < 2**31:
            raise ValueError(f"engine.{name}={raw[name]!r}: want a whole number from {low} on, below 2**31")
    windows = raw["windows"]
    if not isinstance(windows, list) or not windows:
        raise ValueError(f"engine.windows={windows!r}: want a list, a window (or null) of each KV group")
    for window in windows:
        if window is not None and (type(window) is not int or window < 1):
            raise ValueError(f"engine.windows={windows!r}: want whole numbers from 1 on, or null")
    return dict(raw)


def _line(raw: Any) -> BrokenLine:
    at, seconds = [int(x) for x in raw["at"]], [_number(x) for x in raw["seconds"]]
    if not at or len(at) != len(seconds) or any(b <= a for a, b in itertools.pairwise(at)):
        raise ValueError("points that do not ascend, or not a number of seconds for each")
    return BrokenLine(at, seconds)


def _number(x: Any) -> float:
    value = float(x)
    if not 0 <= value < 1e6:
        raise ValueError(f"{x!r} where seconds or watts from 0 on are wanted")
    return value
