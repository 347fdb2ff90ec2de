"""``minivllm ablate``: measure how much each part of a configuration (such as prefix caching) contributes.

Parsing the command imports no large package.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

from minivllm.cli.bench_runs import (
    IN_TURNS,
    bill_of,
    check_output,
    print_result,
    progress,
    repeat_flags,
    requests_by_seed,
    settings,
    watch_of,
    workload_flags,
)
from minivllm.cli.common import JsonObject, add_repeatable, add_switch, add_value, load, open_llm
from minivllm.errors import ConfigError, shown

if TYPE_CHECKING:
    from minivllm.cli.bench_runs import RequestsBySeed
    from minivllm.config import Loaded
    from minivllm.lab.bench.ablate import Ablation
    from minivllm.lab.bench.trials import Cell

BASELINE = "baseline"
AGAIN = "nothing (again)"  # name of the second measurement of the baseline, from which no part is removed


def add_commands(command: Any, *parents: argparse.ArgumentParser) -> None:
    """Add the command ``ablate``.

    ``command(name, ...)`` makes the parser of a command; ``parents`` have flags for it.
    """
    text = "Remove one part of a configuration at a time and measure the difference, with error bars."
    sub = command("ablate", "cli.ablate:ablate", text, *parents)
    text = "measure only these parts; default: all parts of the configuration"
    add_repeatable(sub, "--part", "NAME,NAME", text)
    text = "define a part by a setting that removes it; repeat the flag for more settings or for other parts"
    add_repeatable(sub, "--define", "NAME:KEY=VALUE", text)
    text = "define parts in TOML or YAML: a table of settings for each, such as [small-batches] max_num_seqs = 2"
    add_value(sub, "--parts", str, "FILE", text, "")
    workload_flags(sub, range_ratio=0.5, prefix_len=32)
    add_switch(sub, "--in-turns", IN_TURNS)
    repeat_flags(sub, repeats=5)


def ablate(args: argparse.Namespace) -> int:
    """Run ``minivllm ablate`` and return its exit code.

    The baseline, which has every part, is measured at the beginning and at the end.  The difference of the two shows
    noise and drift.
    """
    from minivllm.lab.bench import ablate as parts
    from minivllm.lab.bench import limits, repeats, trials

    check_output(args)
    names = [name for text in args.part for name in text.split(",")]
    defined = parts.defined(args.define, args.parts)
    loaded = load(args)
    check_defined(args, defined, loaded)
    with open_llm(loaded, args) as llm:
        requests = requests_by_seed(args, limits.of_engine(llm))
        measured, not_measured = parts.chosen(llm, names, defined)
        bill = bill_of(llm, args)
        title = f"{llm.config.model} on {llm.engine.wiring.device}, {llm.engine.wiring.dtype}"
    baseline = trials.Cell(BASELINE, lambda: _open(args, ()))
    removed = [trials.Cell(part.name, functools.partial(_open, args, part.sets), _generate(part)) for part in measured]
    again = trials.Cell(AGAIN, baseline.open)
    runs = measure(args, [baseline, *removed, again], requests)
    rows = _rows([*measured, None], runs)
    same = trials.same_over_seeds(runs, args.dataset, args.temperature)
    figures = [run["figures"] for run in runs[0]]
    baseline_states = [run["state"] for run in runs[0]]
    more = {"rows": rows, "not_measured": dict(not_measured), "model_id": title}
    result = repeats.result("ablate", figures, baseline_states, settings(args), bill, **more)
    result["seeds_change_nothing"] = same
    out = lines(title, result, args.repeats)
    if same:
        out.append(f"warning: {same}")
    states = [run["state"] for cell_runs in runs for run in cell_runs]
    return print_result(result, args, out, states)


def _rows(parts: Sequence[Ablation | None], runs: Sequence[list[JsonObject]]) -> list[JsonObject]:
    """Return the result row of each removed part.

    ``runs[0]`` has the runs of the baseline, and ``runs[1:]`` those without one of ``parts``.  The part None is the
    second baseline.
    """
    from minivllm.lab.bench import repeats, trials

    baseline, *others = runs
    comparisons = [trials.against(cell_runs, baseline, trials.SPEED) for cell_runs in others]
    rows = []
    for part, cell_runs, verdict in zip(parts, others, trials.judged(comparisons), strict=True):
        row: JsonObject = {"part": AGAIN, "sets": [], "means": ""}
        if part is not None:
            row = {"part": part.name, "sets": list(part.sets), "means": part.means}
        row["worth"] = verdict
        row["same_tokens"] = trials.same_tokens(baseline, cell_runs)
        row |= repeats.merged([run["figures"] for run in cell_runs])
        rows.append(row)
    return rows


def check_defined(args: argparse.Namespace, defined: Sequence[Ablation], loaded: Loaded) -> None:
    """Raise ConfigError if the settings of a part that the user defined are wrong, or change nothing."""
    for part in defined:
        try:
            changed = load(_with_settings(args, part.sets)).engine
        except ConfigError as exc:
            raise ConfigError(f"part {shown(part.name)}: {exc}") from None
        if changed == loaded.engine:
            sets = ", ".join(part.sets)
            raise ConfigError(
                f"part {shown(part.name)}: the configuration has {sets} already; expected a setting that changes it"
            )


def _with_settings(args: argparse.Namespace, sets: Sequence[str]) -> argparse.Namespace:
    """Return a copy of the command's arguments with more ``--set`` settings."""
    changed = copy(args)
    changed.set = [*args.set, *sets]
    return changed


def _open(args: argparse.Namespace, sets: Sequence[str]) -> Any:
    """Return an LLM of the configuration with the settings ``sets`` applied on top."""
    changed = _with_settings(args, sets)
    return open_llm(load(changed), changed)


def _generate(part: Ablation) -> Any:
    """Return the function that runs the requests on an engine from which a part is removed."""
    from minivllm.lab.bench import ablate as parts
    from minivllm.lab.bench import offline

    return parts.recompute if part.recompute else offline.generate


def measure(args: argparse.Namespace, cells: Sequence[Cell], requests: RequestsBySeed) -> list[list[JsonObject]]:
    """Measure each cell (an engine to compare), and return the runs of each without the warm-up runs."""
    from minivllm.lab.bench import trials

    def run(cell: Cell, llm: Any, seed: int) -> JsonObject:
        watch = watch_of(llm.config, llm.engine.wiring.device)
        return trials.run(llm, requests(seed), args.temperature, seed, watch, cell.generate)

    def warm(cell: Cell, llm: Any) -> None:
        for turn in range(args.warmups):
            run(cell, llm, args.seed - 1 - turn)

    def once(cell: Cell, llm: Any, seed: int) -> JsonObject:
        counted = run(cell, llm, seed)
        progress(f"{cell.name}, seed {seed}: {counted['figures']['output_throughput']:.1f} tokens/s")
        return counted

    seeds = range(args.seed, args.seed + args.repeats)
    return trials.Trials(once, warm).measure(cells, seeds, args.in_turns)


def lines(title: str, result: JsonObject, repeats: int) -> list[str]:
    """Return the lines of the printed table.

    The worth of a part is the throughput of the baseline divided by that without the part; for times it is the
    inverse.
    """
    from minivllm.runtime.hooks.figures import text

    out = [
        f"{title}: {result['num_requests']} requests, {repeats} runs each, paired by seed; intervals of 95 %",
        f"{'without':20} {'tokens/s':>16} {'the part is worth':>20}  {'TTFT ms':>14} {'TPOT ms':>14} same tokens",
        _line(BASELINE, result, "", ""),
    ]
    rows = result["rows"]
    out += [_part_line(row) for row in rows]
    out += [f"{row['part']}: {', '.join(row['sets'])}: {row['means']}" for row in rows if row["sets"]]
    named = [(BASELINE, result)]
    named += [(row["part"], row) for row in rows]
    for name, row in named:
        if figures := text(row):
            out.append(f"figures of {name}: {figures}")
    out += [f"not measured: {name}: {reason}" for name, reason in result["not_measured"].items()]
    return out


def _line(name: str, row: JsonObject, worth: str, rest: str) -> str:
    """Return a line of the table: the name, the figures of ``row``, and the texts ``worth`` and ``rest``."""
    from minivllm.lab.bench.repeats import with_bounds

    speed = with_bounds(row, "output_throughput")
    ttft = with_bounds(row, "median_ttft_ms")
    tpot = with_bounds(row, "median_tpot_ms", 2)
    return f"{name:20} {speed:>16} {worth:>20}  {ttft:>14} {tpot:>14}{rest}"


def _part_line(row: JsonObject) -> str:
    """Return the table's line of a removed part, with the share of equal tokens and the verdict."""
    from minivllm.lab.bench.trials import ratio_text

    worth = row["worth"]["output_throughput"]
    rest = f" {100 * row['same_tokens']:>9.0f} %  {worth['says']}"
    return _line(row["part"], row, ratio_text(worth), rest)
