"""The configurations of a comparison that no other beats, by the tests of the comparison.

One rule holds for the table of ``compare`` and for its report: a figure is better or worse only if the test of paired
values says "a difference" (95 %, Holm's correction).  A pair with the first configuration has the verdict of the table;
all other pairs are tested here, as a second family.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from . import trials
from .comparing import QUALITY, of_quality
from .lm_tasks import LOWER
from .statistics import DIFFERENT, NAN

Row = Mapping[str, Any]
SPEED = "output_throughput"
MORE_IS_BETTER = {SPEED, "top1_agreement"}
NAMES = {SPEED: "tokens/s", **QUALITY, "weight_bytes": "weights"}


class Front:
    """Verdicts of each pair of a comparison's rows.  ``found`` is a result of ``compare``."""

    def __init__(self, found: Row) -> None:
        self.rows: Sequence[Row] = found["rows"]
        runs = found["runs_by_name"]
        self.tasks = sorted({key for row in self.rows for key in row if key.startswith("task_")})
        pairs = [(i, j) for j in range(len(self.rows)) for i in range(1, j)]
        tests = []
        for i, j in pairs:
            a, b = self.rows[i], self.rows[j]
            metrics = [trials.Metric(key, key, True) for key in (SPEED, *self.tasks) if self._compared(i, j, key)]
            quality = of_quality(a["quality"] or {}, b["quality"] or {})
            tests.append({**trials.against(runs[a["name"]], runs[b["name"]], metrics), **quality})
        self.verdicts = dict(zip(pairs, trials.judged(tests), strict=True))
        self.verdicts |= {(0, j): row["against_first"] for j, row in enumerate(self.rows) if j}

    def _compared(self, i: int, j: int, key: str) -> bool:
        """Whether the table compares a figure of both rows with the first: not at clocks that differ."""
        own = [str(self.rows[at]["against_first"].get(key, {}).get("says", "")) for at in (i, j)]
        return not any(text.startswith("not compared") for text in own)

    def figures(self, *keys: str) -> list[str]:
        """Return ``keys`` with the tasks of the comparison."""
        return [*keys, *self.tasks]

    def sign(self, i: int, j: int, key: str) -> int:
        """Return 1 if row i is better than row j in a figure, -1 if worse, 0 if neither is shown."""
        if i == j:
            return 0
        if i > j:
            return -self.sign(j, i, key)
        if key == "weight_bytes":
            a, b = (self.rows[at].get(key) or 0 for at in (i, j))
            return (a < b) - (a > b)
        one = self.verdicts[i, j].get(key)
        if one is None or one["says"] != DIFFERENT:
            return 0
        change = one["difference"] if "difference" in one else math.log(one["ratio"] or NAN)
        lower = not (key in MORE_IS_BETTER or (key.startswith("task_") and not key.startswith(f"task_{LOWER}")))
        return (-1 if change > 0 else 1) * (-1 if lower else 1)

    def beaten(self, j: int, keys: Sequence[str]) -> str:
        """Return by which row, and in which figures, row j is beaten; "" if by none.

        Beaten: another row is better in one of the figures, and worse in none.
        """
        for i in range(len(self.rows)):
            signs = {key: self.sign(i, j, key) for key in keys}
            if 1 in signs.values() and -1 not in signs.values():
                better = ", ".join(name_of(key) for key, sign in signs.items() if sign > 0)
                return f"beaten by {self.rows[i]['name']} ({better})"
        return ""

    def rule(self, keys: Sequence[str]) -> str:
        """Return the rule in a sentence for a report."""
        names = ", ".join(map(name_of, keys))
        return (
            f"Beaten: another configuration is better in one of {names} and worse in none, where better and worse are "
            "differences by the paired tests of the table (95 %, Holm's correction). Weights are exact. On the front "
            "are all others, so a configuration may be there because the runs do not decide."
        )


def name_of(key: str) -> str:
    """Return the name of a figure in a table."""
    return NAMES.get(key, key.removeprefix("task_").removeprefix(LOWER))
