"""One run of a workload by an engine in this process, and a table of configurations against the first of them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import offline
from .repeats import joules_a_token
from .statistics import NAN, Paired, holm, paired
from .workload import BenchAsk

Generate = Callable[..., tuple[list[Any], float]]


@dataclass(frozen=True)
class Metric:
    """A figure that is compared: its key, its name in a table, whether more is better, and the digits shown."""

    key: str
    name: str
    more: bool
    digits: int = 1


SPEED = (
    Metric("output_throughput", "tokens/s", True),
    Metric("median_ttft_ms", "TTFT ms", False),
    Metric("median_tpot_ms", "TPOT ms", False, 2),
    Metric("joules_per_output_token", "J/token", False, 4),
)


def run(
    llm: Any,
    asks: Sequence[BenchAsk],
    temperature: float,
    seed: int,
    watch: Callable[[], Any],
    generate: Generate = offline.generate,
) -> dict[str, Any]:
    """Figures of one run, the machine's ``state`` meanwhile, and the ``tokens`` of each answer."""
    with watch() as state:
        found = offline.throughput(llm, asks, temperature, seed, generate)
    tokens = found.pop("token_ids")
    found["joules_per_output_token"] = joules_a_token([found], [state.found])[0]
    return {"seed": seed, "figures": found, "state": state.found, "tokens": tokens}


def values(runs: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """One figure of each run, NaN where it was not measured."""
    return [NAN if (value := run["figures"].get(key)) is None else float(value) for run in runs]


def same_tokens(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> float:
    """The share of requests whose tokens are the same in both."""
    pairs = [x == y for one, two in zip(a, b, strict=True) for x, y in zip(one["tokens"], two["tokens"], strict=True)]
    return sum(pairs) / len(pairs) if pairs else NAN


def first_divergence(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> int | None:
    """The earliest token of an answer, counted from 1, that differs in any request; None if none does."""
    found = None
    for one, two in zip(a, b, strict=True):
        for x, y in zip(one["tokens"], two["tokens"], strict=True):
            at = next((i for i, (s, t) in enumerate(zip(x, y, strict=False), 1) if s != t), None)
            at = min(len(x), len(y)) + 1 if at is None and len(x) != len(y) else at
            found = at if found is None else min(found, at or found)
    return found


def against(
    first: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]], metrics: Sequence[Metric]
) -> dict[str, Paired]:
    """Each figure of ``other`` over that of ``first``, paired by seed; NaN pairs say "not measured"."""
    found = {}
    for metric in metrics:
        a, b = values(first, metric.key), values(other, metric.key)
        known = [(x, y) for x, y in zip(a, b, strict=True) if not (math.isnan(x) or math.isnan(y))]
        found[metric.key] = paired([x for x, _ in known], [y for _, y in known])
    return found


def judged(rows: Sequence[dict[str, Paired]]) -> list[dict[str, dict[str, Any]]]:
    """All comparisons of a table with their sentences; p-values are corrected for how many there are."""
    keys = [(i, key) for i, row in enumerate(rows) for key in row]
    corrected = holm([rows[i][key].p for i, key in keys])
    out: list[dict[str, dict[str, Any]]] = [{} for _ in rows]
    for (i, key), p in zip(keys, corrected, strict=True):
        one = rows[i][key]
        out[i][key] = {"ratio": one.ratio, "low": one.low, "high": one.high, "p": p, "says": one.sentence(p)}
    return out


def ratio_text(one: Mapping[str, Any]) -> str:
    """A ratio with its interval."""
    if one["ratio"] is None or math.isnan(one["ratio"]):
        return "-"
    bounds = "" if one["low"] is None or math.isnan(one["low"]) else f" [{one['low']:.2f}, {one['high']:.2f}]"
    return f"{one['ratio']:.2f}x{bounds}"


@dataclass(frozen=True)
class Cell:
    """One configuration of a table: ``open`` makes its engine, a context that ends it; ``generate`` runs requests."""

    name: str
    open: Callable[[], Any]
    generate: Generate = offline.generate


def measure(
    cells: Sequence[Cell], seeds: Sequence[int], in_turns: bool, once: Callable[[Cell, Any, int], Any]
) -> list[list[Any]]:
    """What ``once(cell, llm, seed)`` gives, for each cell by seed.

    Cells run one after the other, or ``in_turns``: their engines are there at once and take turns, a seed each, in an
    order that rotates, so that a machine which becomes slower or warmer does so for all of them alike.
    """
    found: list[list[Any]] = [[] for _ in cells]
    if not in_turns:
        for cell, own in zip(cells, found, strict=True):
            with cell.open() as llm:
                own += [once(cell, llm, seed) for seed in seeds]
        return found
    with contextlib.ExitStack() as stack:
        llms = [stack.enter_context(cell.open()) for cell in cells]
        for turn, seed in enumerate(seeds):
            for place in range(len(cells)):
                i = (place + turn) % len(cells)
                found[i].append(once(cells[i], llms[i], seed))
    return found
