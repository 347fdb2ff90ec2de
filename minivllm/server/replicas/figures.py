"""Join the statistics of replicas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

ADDED = ("_joules", "_seconds")  # ends of the names of numbers with a fraction that are added
# running totals of an engine, which start at 0 when it is restarted
TOTALS = (
    "finished", "generated_tokens", "prompt_tokens", "overshoot_tokens", "preemptions", "prefix_queries",
    "prefix_hits", "evictions", "steps",
)  # fmt: skip


class LifeTotals:
    """The running totals of a replica over all its engines."""

    def __init__(self) -> None:
        self.before: dict[str, int] = dict.fromkeys(TOTALS, 0)  # the totals of all ended engines
        self.last: dict[str, int] = dict.fromkeys(TOTALS, 0)  # the totals of the running engine

    def read(self, stats: Mapping[str, Any]) -> dict[str, Any]:
        """Return the statistics ``stats`` of the running engine, with the totals of the replica's ended engines added
        to its running totals."""
        found = dict(stats)
        for name in TOTALS:
            if name in stats:
                self.last[name] = stats[name]
                found[name] = self.before[name] + stats[name]
        return found

    def ended(self) -> None:
        """Note that the engine has ended, so that the next one counts from 0."""
        for name in TOTALS:
            self.before[name] += self.last[name]
            self.last[name] = 0

    def totals(self) -> dict[str, int]:
        """Return only the totals over all its engines, for a replica whose engine does not answer."""
        return {name: self.before[name] + self.last[name] for name in TOTALS}


def merged(values: Sequence[Any], name: str = "") -> Any:
    """Combine the values of one figure of several replicas.

    Whole numbers are added.  Numbers with a fraction are averaged, except energy and total times, which are added.
    Tables and lists are combined by key and by position.  Of other values the first is returned.
    """
    values = [value for value in values if value is not None]
    if not values:
        return None
    first = values[0]
    if isinstance(first, Mapping):
        names: Iterable[str] = dict.fromkeys(key for value in values for key in value)
        return {key: merged([value[key] for value in values if key in value], key) for key in names}
    if isinstance(first, (list, tuple)):
        return [merged(column, name) for column in zip_longest(*values)]
    if isinstance(first, bool) or not isinstance(first, (int, float)):
        return first
    total = sum(values)
    if all(isinstance(value, int) for value in values) or name.endswith(ADDED):
        return total
    return total / len(values)
