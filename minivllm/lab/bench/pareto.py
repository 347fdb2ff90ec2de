"""Find the configurations of a comparison that no other configuration beats (the Pareto front).

The table of ``compare`` and its report have one rule: a result is better or worse only if the test of paired values
says "a difference" (95 %, Holm's correction).  Pairs with the first configuration have the verdicts of the table.  All
other pairs are tested here, as a second family of tests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from . import Row, Rows, trials
from .comparing import QUALITY, of_quality
from .lm_tasks import LOWER
from .statistics import DIFFERENT, NAN

SPEED = "output_throughput"
MORE_IS_BETTER = {SPEED, "top1_agreement"}
NAMES = {SPEED: "tokens/s", **QUALITY, "weight_bytes": "weights"}


class Front:
    """The verdicts of all pairs of rows in ``found``, a result of ``compare``."""

    def __init__(self, found: Row) -> None:
        self.rows: Rows = found["rows"]
        runs = found["runs_by_name"]
        keys = {key for row in self.rows for key in row}
        self.tasks = sorted(key for key in keys if key.startswith("task_"))
        pairs = [(i, j) for j in range(len(self.rows)) for i in range(1, j)]
        tests = []
        for i, j in pairs:
            a = self.rows[i]
            b = self.rows[j]
            compared = [key for key in (SPEED, *self.tasks) if self._compared(i, j, key)]
            metrics = [trials.Metric(key, key, True) for key in compared]
            speed = trials.against(runs[a["name"]], runs[b["name"]], metrics)
            quality = of_quality(a["quality"] or {}, b["quality"] or {})
            tests.append({**speed, **quality})
        self.verdicts = dict(zip(pairs, trials.judged(tests), strict=True))
        for j, row in enumerate(self.rows[1:], 1):
            self.verdicts[0, j] = row["against_first"]

    def _compared(self, i: int, j: int, key: str) -> bool:
        """Return whether the result ``key`` of both rows i and j was compared with row 0.

        It was not if a row's runs had other clock rates of the GPU.
        """
        for row in (self.rows[i], self.rows[j]):
            verdict = row["against_first"].get(key, {})
            if str(verdict.get("says", "")).startswith("not compared"):
                return False
        return True

    def figures(self, *keys: str) -> list[str]:
        """Return ``keys`` followed by the scores of the comparison's tasks."""
        return [*keys, *self.tasks]

    def sign(self, i: int, j: int, key: str) -> int:
        """Return 1 if row i is better than row j in a result, -1 if it is worse, 0 if the tests show neither."""
        if i == j:
            return 0
        if i > j:
            return -self.sign(j, i, key)
        if key == "weight_bytes":
            a, b = (self.rows[row].get(key) or 0 for row in (i, j))
            if a == b:
                return 0
            return 1 if a < b else -1
        verdict = self.verdicts[i, j].get(key)
        if verdict is None or verdict["says"] != DIFFERENT:
            return 0
        change = verdict.get("difference")
        if change is None:
            change = math.log(verdict["ratio"] or NAN)
        more_is_better = key in MORE_IS_BETTER
        if key.startswith("task_"):
            more_is_better = not key.startswith(f"task_{LOWER}")
        j_is_better = change > 0 if more_is_better else not change > 0
        return -1 if j_is_better else 1

    def beaten(self, j: int, keys: Sequence[str]) -> str:
        """Return a text that names a row that beats row j, and the results in which it is better, or "".

        A row beats another if it is better in one of the results ``keys`` and worse in none.
        """
        for i in range(len(self.rows)):
            signs = {key: self.sign(i, j, key) for key in keys}
            if 1 in signs.values() and -1 not in signs.values():
                better = [name_of(key) for key, sign in signs.items() if sign > 0]
                return f"beaten by {self.rows[i]['name']} ({', '.join(better)})"
        return ""

    def rule(self, keys: Sequence[str]) -> str:
        """Return the rule by which one configuration beats another, as a sentence for a report."""
        names = ", ".join(map(name_of, keys))
        return (
            f"Beaten: another configuration is better in one of {names} and worse in none, where better and worse are "
            "differences by the paired tests of the table (95 %, Holm's correction). Weights are exact. On the front "
            "are all others, so a configuration may be there because the runs do not decide."
        )


def name_of(key: str) -> str:
    """Return the name of a result in a table."""
    return NAMES.get(key, key.removeprefix("task_").removeprefix(LOWER))
