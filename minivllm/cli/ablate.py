"""``minivllm ablate``: what each part of a configuration is worth.  Parsing it imports nothing heavy."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

from minivllm.cli.bench_runs import (
    IN_TURNS,
    asks_of,
    checked,
    energy_line,
    machine_line,
    progress,
    repeat_flags,
    settings,
    tell,
    watch_of,
    workload_flags,
)
from minivllm.cli.common import load, open_llm
from minivllm.errors import ConfigError, shown

if TYPE_CHECKING:
    from minivllm.config import Loaded
    from minivllm.lab.bench.ablate import Ablation
    from minivllm.lab.bench.trials import Cell
    from minivllm.lab.bench.workload import BenchAsk

BASELINE, AGAIN = "baseline", "nothing (again)"


def add_commands(command: Any, *parents: argparse.ArgumentParser) -> None:
    """Add ``ablate``.  ``command`` and the ``parents`` of its flags are of ``minivllm.cli``."""
    text = "Take one part of a configuration away at a time: what each is worth, with error bars."
    sub = command("ablate", "cli.ablate:ablate", text, *parents)
    text = "only these; default: all that the configuration has"
    sub.add_argument("--part", action="append", default=[], metavar="NAME,NAME", help=text)
    text = "a part of your own: a setting that takes it away; again for more settings of it, or for other parts"
    sub.add_argument("--define", action="append", default=[], metavar="NAME:KEY=VALUE", help=text)
    text = "TOML or YAML with a table of settings for each part of your own, as [small-batches] max_num_seqs = 2"
    sub.add_argument("--parts", default="", metavar="FILE", help=text)
    workload_flags(sub, ratio=0.5, prefix=32)
    sub.add_argument("--in-turns", action="store_true", help=IN_TURNS)
    repeat_flags(sub, repeats=5)


def ablate(args: argparse.Namespace) -> int:
    """The baseline is measured at the beginning and at the end: their difference is what noise and drift come to."""
    from minivllm.lab.bench import ablate as parts
    from minivllm.lab.bench import limits, repeats, trials

    checked(args)
    names = [name for text in args.part for name in text.split(",")]
    own = parts.defined(args.define, args.parts)
    loaded = load(args)
    check_defined(args, own, loaded)
    with open_llm(loaded, args) as llm:
        asks = asks_of(args, limits.of_engine(llm))
        found, missing = parts.chosen(llm, names, own)
        bill = llm.bill_of_materials() if args.json or args.output_json else None
        title = f"{llm.config.model} on {llm.engine.wiring.device}, {llm.engine.wiring.dtype}"
    baseline = trials.Cell(BASELINE, lambda: _open(args, ()))
    taken = [trials.Cell(p.name, functools.partial(_open, args, p.sets), _generate(p)) for p in found]
    again = trials.Cell(AGAIN, baseline.open)
    runs = measure(args, [baseline, *taken, again], asks)
    same = trials.same_over_seeds(runs, args.dataset, args.temperature)
    judged = trials.judged([trials.against(own, runs[0], trials.SPEED) for own in runs[1:]])
    rows = [
        {
            "part": part.name if part else AGAIN,
            "sets": list(part.sets) if part else [],
            "means": part.means if part else "",
            "worth": verdict,
            "same_tokens": trials.same_tokens(runs[0], own),
            **repeats.merged([run["figures"] for run in own]),
        }
        for part, own, verdict in zip([*found, None], runs[1:], judged, strict=True)
    ]
    states = [run["state"] for own in runs for run in own]
    figures = [run["figures"] for run in runs[0]]
    more = {"rows": rows, "not_measured": dict(missing), "model_id": title}
    whole = repeats.result("ablate", figures, [r["state"] for r in runs[0]], settings(args), bill, **more)
    whole["seeds_change_nothing"] = same
    warned = [f"warning: {same}"] if same else []
    return tell(whole, args, "\n".join([*lines(title, whole, args.repeats), *warned, *_ends(whole, states)]))


def check_defined(args: argparse.Namespace, own: Sequence[Ablation], loaded: Loaded) -> None:
    """Read the settings of the user's own parts.  ConfigError if they are wrong, or change nothing."""
    for part in own:
        other = copy(args)
        other.set = [*args.set, *part.sets]
        try:
            changed = load(other).engine
        except ConfigError as exc:
            raise ConfigError(f"part {shown(part.name)}: {exc}") from None
        if changed == loaded.engine:
            sets = ", ".join(part.sets)
            raise ConfigError(
                f"part {shown(part.name)}: there is nothing to take away: {sets} is what there is already"
            )


def _open(args: argparse.Namespace, sets: Sequence[str]) -> Any:
    """The engine of the configuration with some settings over it."""
    own = copy(args)
    own.set = [*args.set, *sets]
    return open_llm(load(own), own)


def _generate(part: Ablation) -> Any:
    from minivllm.lab.bench import ablate as parts
    from minivllm.lab.bench import offline

    return parts.recompute if part.recompute else offline.generate


def measure(
    args: argparse.Namespace, cells: Sequence[Cell], asks: Callable[[int], Sequence[BenchAsk]]
) -> list[list[dict[str, Any]]]:
    """The counted runs of each cell."""
    from minivllm.lab.bench import trials

    def run(cell: Cell, llm: Any, seed: int) -> dict[str, Any]:
        watch = watch_of(llm.config, llm.engine.wiring.device)
        return trials.run(llm, asks(seed), args.temperature, seed, watch, cell.generate)

    def warm(cell: Cell, llm: Any) -> None:
        for turn in range(args.warmups):
            run(cell, llm, args.seed - 1 - turn)

    def once(cell: Cell, llm: Any, seed: int) -> dict[str, Any]:
        found = run(cell, llm, seed)
        progress(f"{cell.name}, seed {seed}: {found['figures']['output_throughput']:.1f} tokens/s")
        return found

    seeds = range(args.seed, args.seed + args.repeats)
    return trials.Trials(once, warm).measure(cells, seeds, args.in_turns)


def lines(title: str, whole: dict[str, Any], repeats: int) -> list[str]:
    """The table.  Worth: the baseline's figure over that without the part; of times the inverse."""
    from minivllm.lab.bench.repeats import with_bounds
    from minivllm.lab.bench.trials import ratio_text
    from minivllm.runtime.hooks.figures import text

    out = [
        f"{title}: {whole['num_requests']} requests, {repeats} runs each, paired by seed; intervals of 95 %",
        f"{'without':20} {'tokens/s':>16} {'the part is worth':>20}  {'TTFT ms':>14} {'TPOT ms':>14} same tokens",
        f"{BASELINE:20} {with_bounds(whole, 'output_throughput'):>16} {'':20}  "
        f"{with_bounds(whole, 'median_ttft_ms'):>14} {with_bounds(whole, 'median_tpot_ms', 2):>14}",
    ]
    for row in whole["rows"]:
        worth = row["worth"]["output_throughput"]
        out.append(
            f"{row['part']:20} {with_bounds(row, 'output_throughput'):>16} {ratio_text(worth):>20}  "
            f"{with_bounds(row, 'median_ttft_ms'):>14} {with_bounds(row, 'median_tpot_ms', 2):>14} "
            f"{100 * row['same_tokens']:>9.0f} %  {worth['says']}"
        )
    out += [f"{row['part']}: {', '.join(row['sets'])}: {row['means']}" for row in whole["rows"] if row["sets"]]
    for name, row in ((BASELINE, whole), *((row["part"], row) for row in whole["rows"])):
        if own := text(row):
            out.append(f"figures of {name}: {own}")
    return [*out, *(f"not measured: {name}: {why}" for name, why in whole["not_measured"].items())]


def _ends(whole: dict[str, Any], states: Sequence[dict[str, Any]]) -> list[str]:
    return [energy_line(whole, states), machine_line(states)]
