"""Run a workload on engines in this process, and compare configurations with the first of them."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minivllm.errors import MinivllmError, brief
from minivllm.runtime.hooks.figures import FIGURE

from . import Result, Row, Rows, offline
from .repeats import joules_a_token
from .statistics import NAN, Paired, Shift, holm, paired
from .workload import BenchAsk

Generate = Callable[..., tuple[list[Any], float]]


@dataclass(frozen=True)
class Metric:
    """A compared result: its key, its name in a table, whether higher is better, and its number of digits."""

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
# metrics of runs in which the KV caches of requests were compressed
HELD = (
    Metric("mean_rows", "rows at once", True),
    Metric("most_rows", "most rows", True, 0),
    Metric("kv_peak_mib", "KV MiB", False, 2),
    Metric("compressions", "compressions", False, 0),
)


def counted(runs: Sequence[Rows]) -> tuple[Metric, ...]:
    """Return the counters of the engine and its plug-ins (``figures()``) that are not 0 in every run.

    ``runs`` are the runs of each configuration.
    """
    every = [run for own in runs for run in own]
    plugins = {}
    for run in every:
        for key in run["figures"]:
            if key.startswith(FIGURE):
                plugins[key] = Metric(key, key.removeprefix(FIGURE), True, 3)
    found = []
    held = HELD if any(run["figures"].get("compressions") for run in every) else ()
    for metric in (*COUNTED, *held, *plugins.values()):
        known = [value for value in values(every, metric.key) if not math.isnan(value)]
        if any(known):
            found.append(metric)
    return tuple(found)


def run(
    llm: Any,
    asks: Sequence[BenchAsk],
    temperature: float,
    seed: int,
    watch: Callable[[], Any],
    generate: Generate = offline.generate,
) -> Result:
    """Measure one run, and return its results, the ``state`` of the machine, and the ``tokens`` of each answer."""
    with watch() as state:
        found = offline.throughput(llm, asks, temperature, seed, generate)
    tokens = found.pop("token_ids")
    (joules,) = joules_a_token([found], [state.found])
    found["joules_per_output_token"] = joules
    return {"seed": seed, "figures": found, "state": state.found, "tokens": tokens}


def values(runs: Rows, key: str) -> list[float]:
    """Return the value of the result ``key`` of each run, NaN for a run without it."""
    found = [run["figures"].get(key) for run in runs]
    return [NAN if value is None else float(value) for value in found]


def same_tokens(a: Rows, b: Rows) -> float:
    """Return the share of requests whose answers have the same tokens in both configurations, NaN without requests."""
    same = [x == y for x, y in _answer_pairs(a, b)]
    return sum(same) / len(same) if same else NAN


def _answer_pairs(a: Rows, b: Rows) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Yield the tokens of each request's answer in the runs of two configurations."""
    for one, two in zip(a, b, strict=True):
        yield from zip(one["tokens"], two["tokens"], strict=True)


def same_over_seeds(cells: Sequence[Rows], dataset: str, temperature: float) -> str:
    """Return a warning if all seeds gave the same answers, "" if they did not or there is a single seed.

    ``cells`` are the runs of each configuration.
    """
    known = [own for own in cells if len(own) > 1]
    if not known:
        return ""
    for own in known:
        if any(run["tokens"] != own[0]["tokens"] for run in own):
            return ""
    reason = "no draw differs"
    if dataset and not temperature:
        reason = f"{dataset} at temperature 0: all seeds have the same requests"
    return (
        f"seeds change nothing: the {len(known[0])} runs of each configuration gave the same answers ({reason}), so "
        "intervals contain only the noise of timing; use --temperature above 0, or random prompts"
    )


def first_divergence(a: Rows, b: Rows) -> int | None:
    """Return the first position, counted from 1, at which any request's answers differ; None if all are equal."""
    positions = []
    for x, y in _answer_pairs(a, b):
        if x != y:
            equal = [one == two for one, two in zip(x, y, strict=False)]
            equal.append(False)
            positions.append(1 + equal.index(False))
    return min(positions, default=None)


def against(first: Rows, other: Rows, metrics: Sequence[Metric]) -> dict[str, Paired]:
    """Return the test of each metric of ``other`` against ``first``, paired by seed.

    Pairs without a value are left out; without any pair the verdict is "not measured".
    """
    found = {}
    for metric in metrics:
        pairs = zip(values(first, metric.key), values(other, metric.key), strict=True)
        xs = []
        ys = []
        for x, y in pairs:
            if not (math.isnan(x) or math.isnan(y)):
                xs.append(x)
                ys.append(y)
        found[metric.key] = paired(xs, ys)
    return found


def judged(rows: Sequence[Mapping[str, Paired | Shift]]) -> list[dict[str, Result]]:
    """Return all tests of a table with their verdicts; p-values are corrected for their number (Holm)."""
    keys = [(i, key) for i, row in enumerate(rows) for key in row]
    corrected = holm([rows[i][key].p for i, key in keys])
    out: list[dict[str, Result]] = [{} for _ in rows]
    for (i, key), p in zip(keys, corrected, strict=True):
        one = rows[i][key]
        value: Result = {}
        if isinstance(one, Shift):
            value["difference"] = one.difference
        else:
            value["ratio"] = one.ratio
        out[i][key] = value | {"low": one.low, "high": one.high, "p": p, "says": one.sentence(p)}
    return out


def ratio_text(one: Row) -> str:
    """Return the ratio or the difference of a test as text, with its interval."""
    is_difference = "difference" in one
    value = one["difference" if is_difference else "ratio"]
    if value is None or math.isnan(value):
        return "-"
    digits = 5 if is_difference else 2
    text = f"{value:+.{digits}f}" if is_difference else f"{value:.{digits}f}x"
    if one["low"] is None or math.isnan(one["low"]):
        return text
    return f"{text} [{one['low']:.{digits}f}, {one['high']:.{digits}f}]"


@dataclass(frozen=True)
class Cell:
    """A configuration of a table.  ``open`` returns a context with its engine, and ``generate`` runs requests on it."""

    name: str
    open: Callable[[], Any]
    generate: Generate = offline.generate


def _raise(cell: Cell, exc: Exception) -> None:
    raise exc


def _free_memory() -> None:
    """Release the memory of an engine that failed, since the next engine measures the free memory."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Trials:
    """The functions by which a table measures the engines of its configurations.

    ``warm(cell, llm)`` is called with each new engine.  ``once(cell, llm, seed)`` measures a run and returns its
    results.  ``there(cell, seed)`` returns whether the run is already stored and can be skipped.  ``failed(cell, exc)``
    is called for a configuration that fails; if it returns, the other configurations continue.
    """

    once: Callable[[Cell, Any, int], Any]
    warm: Callable[[Cell, Any], Any] = lambda cell, llm: None
    there: Callable[[Cell, int], bool] = lambda cell, seed: False
    failed: Callable[[Cell, Exception], None] = _raise

    def measure(
        self, cells: Sequence[Cell], seeds: Sequence[int], in_turns: bool, apart: bool = False
    ) -> list[list[Any]]:
        """Measure all configurations with all seeds, and return the runs of each.

        By default configurations run one after another, each with one engine, or with an engine per run if ``apart``.
        With ``in_turns`` each seed runs on all configurations, in rotating order, so that a machine that becomes slower
        affects all alike.  Each run then has a new engine.  Two engines of a configuration can differ in speed, by the
        place of their memory, and runs on one engine would not show this.
        """
        found: list[list[Any]] = [[] for _ in cells]
        failed: set[int] = set()
        for i, engine_seeds in _engine_order(len(cells), seeds, in_turns, apart):
            todo = [seed for seed in engine_seeds if i not in failed and not self.there(cells[i], seed)]
            if not todo:
                continue
            try:
                with cells[i].open() as llm:
                    self.warm(cells[i], llm)
                    found[i] += [self.once(cells[i], llm, seed) for seed in todo]
            except Exception as exc:
                if isinstance(exc, MinivllmError):  # name the configuration that failed
                    exc.args = (f"{brief(cells[i].name)}: {exc}", *exc.args[1:])
                self.failed(cells[i], exc)
                failed.add(i)
            if i in failed:
                _free_memory()
        return found


def _engine_order(count: int, seeds: Sequence[int], in_turns: bool, apart: bool) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield, for each engine in order, the index of its configuration and the seeds that run on it.

    Each of the ``count`` configurations has one engine for all seeds, or with ``apart`` one for each seed.  With
    ``in_turns`` there is an engine for each seed and configuration; seeds come one after another, and each seed begins
    with another configuration.
    """
    if in_turns:
        for turn, seed in enumerate(seeds):
            for place in range(count):
                yield (place + turn) % count, [seed]
        return
    for i in range(count):
        if apart:
            for seed in seeds:
                yield i, [seed]
        else:
            yield i, seeds
