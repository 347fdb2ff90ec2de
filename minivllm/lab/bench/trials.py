"""One run of a workload by an engine in this process, and a table of configurations against the first of them."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minivllm.errors import MinivllmError, brief
from minivllm.runtime.hooks.figures import FIGURE

from . import offline
from .repeats import joules_a_token
from .statistics import NAN, Paired, Shift, holm, paired
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


COUNTED = (
    Metric("prefix_hit_rate", "prefix hits", True, 3),
    Metric("evictions", "evictions", False, 0),
    Metric("preemptions", "preemptions", False, 0),
    Metric("draft_acceptance", "draft acceptance", True, 3),
)


def counted(runs: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[Metric, ...]:
    """Return what the engine or a plug-in (``figures()``) counted in any run of any configuration."""
    named = dict.fromkeys(key for own in runs for run in own for key in run["figures"] if key.startswith(FIGURE))
    plugins = tuple(Metric(key, key.removeprefix(FIGURE), True, 3) for key in named)
    return _not_zero(runs, (*COUNTED, *plugins))


def _not_zero(runs: Sequence[Sequence[Mapping[str, Any]]], metrics: Sequence[Metric]) -> tuple[Metric, ...]:
    """Return the metrics that are not 0 in every run."""
    return tuple(
        one for one in metrics if any(value != 0 for own in runs for value in values(own, one.key) if value == value)
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


def same_over_seeds(cells: Sequence[Sequence[Mapping[str, Any]]], dataset: str, temperature: float) -> str:
    """Return a warning if the seeds changed no answer of any configuration, "" if they did or there is one seed."""
    known = [own for own in cells if len(own) > 1]
    if not known or any(run["tokens"] != own[0]["tokens"] for own in known for run in own):
        return ""
    why = (
        f"{dataset} at temperature 0: all seeds ask for the same" if dataset and not temperature else "no draw differs"
    )
    return (
        f"seeds change nothing: the {len(known[0])} runs of each configuration gave the same answers ({why}), so "
        "intervals hold the noise of timing alone; want --temperature above 0, or random prompts"
    )


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


def judged(rows: Sequence[Mapping[str, Paired | Shift]]) -> list[dict[str, dict[str, Any]]]:
    """Return all comparisons of a table with their sentences; p-values are corrected for their number (Holm)."""
    keys = [(i, key) for i, row in enumerate(rows) for key in row]
    corrected = holm([rows[i][key].p for i, key in keys])
    out: list[dict[str, dict[str, Any]]] = [{} for _ in rows]
    for (i, key), p in zip(keys, corrected, strict=True):
        one = rows[i][key]
        value = {"difference": one.difference} if isinstance(one, Shift) else {"ratio": one.ratio}
        out[i][key] = {**value, "low": one.low, "high": one.high, "p": p, "says": one.sentence(p)}
    return out


def ratio_text(one: Mapping[str, Any]) -> str:
    """Return a ratio, or a difference, with its interval."""
    key, mark, digits = ("difference", "", 5) if "difference" in one else ("ratio", "x", 2)
    if one[key] is None or math.isnan(one[key]):
        return "-"
    known = one["low"] is not None and not math.isnan(one["low"])
    bounds = f" [{one['low']:.{digits}f}, {one['high']:.{digits}f}]" if known else ""
    sign = "+" if key == "difference" else ""
    return f"{one[key]:{sign}.{digits}f}{mark}{bounds}"


@dataclass(frozen=True)
class Cell:
    """One configuration of a table: ``open`` makes its engine, a context that ends it; ``generate`` runs requests."""

    name: str
    open: Callable[[], Any]
    generate: Generate = offline.generate


def _raised(cell: Cell, exc: Exception) -> None:
    raise exc


def _let_go() -> None:
    """Memory that an engine held which could not be made: the next one counts what is free."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Trials:
    """What is done with the engines of a table: ``warm(cell, llm)`` with each that is made, then ``once(cell, llm,
    seed)``, whose results are the runs.  ``there(cell, seed)``: a run that need not be made, and is not among them.
    ``failed(cell, exc)`` hears of a cell that could not go on; where it returns the others do."""

    once: Callable[[Cell, Any, int], Any]
    warm: Callable[[Cell, Any], Any] = lambda cell, llm: None
    there: Callable[[Cell, int], bool] = lambda cell, seed: False
    failed: Callable[[Cell, Exception], None] = _raised

    def measure(
        self, cells: Sequence[Cell], seeds: Sequence[int], in_turns: bool, apart: bool = False
    ) -> list[list[Any]]:
        """The runs of each cell, by seed.

        Cells run one after the other, each with one engine, or with one for each run (``apart``); or ``in_turns``, a
        seed each in an order that rotates, so that a machine which becomes slower or warmer does so for all of them
        alike.  In turns each run has an engine of its own: two engines of one configuration differ (where their memory
        lies), which a spread over the runs of one engine would not show.
        """
        found: list[list[Any]] = [[] for _ in cells]
        gone: set[int] = set()
        turns = [(i, [seed]) for turn, seed in enumerate(seeds) for i in rotated(len(cells), turn)]
        each = [(i, [seed]) for i in range(len(cells)) for seed in seeds] if apart else enumerate([seeds] * len(cells))
        for i, own in turns if in_turns else each:
            todo = [seed for seed in own if i not in gone and not self.there(cells[i], seed)]
            if not todo:
                continue
            try:
                with cells[i].open() as llm:
                    self.warm(cells[i], llm)
                    found[i] += [self.once(cells[i], llm, seed) for seed in todo]
            except Exception as exc:
                if isinstance(exc, MinivllmError):  # of many configurations the one that failed
                    exc.args = (f"{brief(cells[i].name)}: {exc}", *exc.args[1:])
                self.failed(cells[i], exc)
                gone.add(i)
            if i in gone:
                _let_go()
        return found


def rotated(count: int, by: int) -> list[int]:
    """0 to count - 1, beginning with ``by``."""
    return [(place + by) % count for place in range(count)]
