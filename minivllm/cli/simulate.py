"""``minivllm calibrate`` and ``minivllm simulate``: what a configuration would do under a trace, on a virtual clock.
Parsing it imports nothing heavy; simulating imports no torch."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from copy import copy
from dataclasses import replace
from typing import Any

from minivllm import files
from minivllm.cli.common import load, named_parts
from minivllm.cli.replay import choices_of, configs_of, part_of, sizes
from minivllm.errors import ConfigError

SEAMS = ("scheduler", "evictor")
REPEATS = 3  # of the real engine: the fewest whose interval is not absurdly wide


def add_commands(command: Any, wiring: argparse.ArgumentParser) -> None:
    """Add both.  ``command`` and the parent of its flags are of ``minivllm.cli``."""
    text = "Measure what steps of a configuration cost on this machine, for `minivllm simulate`."
    sub = command("calibrate", "cli.simulate:calibrate", text, wiring)
    sub.add_argument("-o", "--output", default="costs.json", metavar="FILE", help="table of costs (default costs.json)")
    sub.add_argument("--seconds", type=float, default=60.0, help="to measure for, after the start (default 60)")
    sub.add_argument(
        "--watts", default="", metavar="BUSY,IDLE", help="of the device, which gives joules in simulations"
    )
    text = "Run a trace through the real engine on a virtual clock, and compare configurations."
    sub = command("simulate", "cli.simulate:simulate", text)
    sub.add_argument("--trace", required=True, help="sample:NAME, synthetic:like=NAME,..., a .csv or a .jsonl")
    sub.add_argument("--costs", required=True, metavar="FILE", help="what `minivllm calibrate` wrote")
    sub.add_argument(
        "--config", action="append", default=[], metavar="FILE", help="TOML, YAML or JSON; one run for each"
    )
    sub.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for every run")
    for seam in SEAMS:
        text = "instead of the configurations': run each of these (a,b or again)"
        sub.add_argument(f"--{seam}", action="append", default=[], metavar="NAME", help=text)
    sub.add_argument("--allow-target", action="append", default=[], metavar="MODULE", help="may be named module:Class")
    sub.add_argument(
        "--rate", action="append", default=[], metavar="xK", help="arrivals K times as fast; xinf: at once"
    )
    sub.add_argument("--requests", default="", metavar="A:B", help="only requests A to B-1, by arrival")
    sub.add_argument("--goodput", action="append", default=[], metavar="NAME:MS", help="ttft, tpot or e2el at most")
    sub.add_argument("--oracle", action="store_true", help="bounds: Belady's evictor; the shortest answer first")
    sub.add_argument("--real", action="store_true", help="the trace on the real engine too, and how far off this was")
    text = f"runs of the real engine for each row, whose figures get 95 %% intervals (default {REPEATS}; with --real)"
    sub.add_argument("--repeats", type=int, metavar="N", help=text)
    text = "no bands: skip the two runs with faster and slower steps that give them"
    sub.add_argument("--no-band", action="store_true", help=text)
    sub.add_argument("--no-answer-hits", action="store_true", help="later prompts hold no answers of earlier requests")
    sub.add_argument("--output-json", default="", metavar="FILE", help="write the figures as JSON, for report")
    sub.add_argument("--json", action="store_true", help="print the figures as JSON")


def calibrate(args: argparse.Namespace) -> int:
    """Run ``minivllm calibrate`` and return its exit code."""
    if not 1 <= args.seconds <= 3600:
        raise ConfigError(f"--seconds {args.seconds:g}: want 1 to 3600")
    watts = _watts(args.watts)
    files.check_output(args.output)
    loaded = load(args)
    _refuse_sim(loaded)
    from minivllm import LLM
    from minivllm.frontend.record.machine import machine, versions
    from minivllm.lab.simulate import calibrate as measuring
    from minivllm.lab.simulate import uncertainty

    with LLM(config=loaded) as llm:
        about = {
            "model": llm.config.model,
            "dtype": llm.engine.wiring.dtype,
            "parts": {seam: part.name for seam, part in llm.resolved.parts.items()},
            "machine": machine(llm.resolved.device),
            "versions": versions(),
        }
        table = measuring.calibrate(llm.engine, about, args.seconds, _tell)
    with open(args.output, "w", encoding="utf-8") as file:
        json.dump(replace(table, watts=watts).as_json(), file, indent=1)
        file.write("\n")
    print(fit_table(table.fit))
    print(f"costs of steps to {args.output}")
    if warning := uncertainty.error_of(table).warning(args.output):
        _tell(warning)
    return 0


def _refuse_sim(loaded: Any) -> None:
    """By the part that a name stands for: ``minivllm/sim`` is ``sim``."""
    from minivllm.config.resolve import choose_seams
    from minivllm.registry import Catalog

    config = loaded.engine
    if config.executor.name == "auto":
        return
    parts = choose_seams(config, Catalog.discover(allow_targets=config.allow_targets), ("executor",), loaded.origins)
    if parts["executor"].name.removeprefix("minivllm/") == "sim":
        raise ConfigError("executor=sim has no steps to measure; calibrate the executor that it is to stand for")


def fit_table(fit: Any) -> str:
    """How far the table is from what was measured.  ``check`` are steps that the fit did not see."""
    lines = ["steps        number   error: median      90 %    of the sum"]
    for phase, x in fit.items():
        errors = (
            f"{100 * x['median_error']:>12.1f} %  {100 * x['p90_error']:>6.1f} %    {100 * x['sum_error']:>+6.1f} %"
        )
        lines.append(f"{phase:10} {x['steps']:>8} {errors}")
    return "\n".join(lines)


def simulate(args: argparse.Namespace) -> int:
    """Run ``minivllm simulate`` and return its exit code."""
    from minivllm.lab.bench import repeats
    from minivllm.lab.simulate import cases, figures, uncertainty
    from minivllm.lab.traces.read import about, read_trace
    from minivllm.plugins.executor.costs import read_costs
    from minivllm.runtime.hooks.figures import text

    _check(args)
    goals, rates = figures.parse_goals(args.goodput), [_rate(text) for text in args.rate or ["x1"]]
    costs = read_costs(args.costs)
    error = uncertainty.error_of(costs)
    if warning := error.warning(args.costs):
        _tell(warning)
    trace = part_of(read_trace(args.trace), args.requests)
    configs, options = _configs(args)
    answers = not (args.real or args.no_answer_hits)
    scales = () if args.no_band or error.error is None else error.scales()
    rows = []
    for case in cases.cases(configs, costs, _tell, args.oracle, options):
        for rate in rates:
            _tell(" ".join([f"x{rate:g}", *case.head.values()]))
            faster = cases.at_rate(trace, rate)
            of = lambda table: figures.figures(cases.simulate(case, faster, table, answers), goals, costs.watts)  # noqa: B023, E731
            found = of(costs)
            rows.append({**case.head, "rate": rate if math.isfinite(rate) else "inf", **found})
            if scales:
                rows[-1]["band"] = uncertainty.bands(found, [of(costs.scaled(by)) for by in scales])
            if args.real:
                rows[-1]["real"] = real = _really(case, faster, goals, args.repeats)
                rows[-1]["off"], rows[-1]["off_intervals"] = figures.off(found, real)
    whole = {
        **repeats.head("simulate"),
        **sizes(trace),
        "costs": args.costs,
        "costs_about": dict(costs.about),
        "uncertainty": error.as_json(args.costs),
        "goodput": goals,
        "runs": rows,
    }
    if args.output_json:
        repeats.write(args.output_json, whole)
    if args.json:
        print(repeats.dumps(whole, None))
        return 0
    print(about(trace))
    print(table(rows))
    for row in rows:
        for name, run in (("", row), (" really", row.get("real", {}))):
            if own := text(run):
                head = [row["config"], f"x{float(row['rate']):g}", row["scheduler"], row["evictor"]]
                print(f"figures of {' '.join(head)}{name}: {own}")
    print(error.line() if scales or error.error is None else f"{error.line()}; not run (--no-band)")
    if warning:
        print(f"rough: {warning}")
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raise ConfigError for flags that contradict each other; fill in ``--repeats``."""
    if args.output_json:
        files.check_output(args.output_json)
    if args.real and args.oracle:
        raise ConfigError("--oracle has no real run to compare with; leave out --real")
    if args.repeats is not None and not args.real:
        raise ConfigError(
            f"--repeats {args.repeats}: of the real engine; want --real too, for a simulation has no noise"
        )
    if args.repeats is not None and not 1 <= args.repeats <= 100:
        raise ConfigError(f"--repeats {args.repeats}: want 1 to 100")
    args.repeats = args.repeats or REPEATS


def _configs(args: argparse.Namespace) -> tuple[list[tuple[str, Any]], list[tuple[str, str]]]:
    """Each configuration with each of the parts that flags name, configuration by configuration; of each the options
    that a flag gave evictor and scheduler, as they are shown."""
    from minivllm.lab.replay.compare import options_text

    found: dict[str, list[Any]] = {}
    said: set[str] = set()
    given = []
    for seam in SEAMS:
        sets = [f"{seam}={name}" for name in named_parts(getattr(args, seam), f"--{seam}")]
        given.append(list(zip(sets, map(options_text, choices_of(args, seam)), strict=True)) or [("", "")])
    for scheduler, evictor in itertools.product(*given):
        own = copy(args)
        own.set = [*args.set, *filter(None, (scheduler[0], evictor[0]))]
        for label, loaded in configs_of(own, said):
            found.setdefault(label, []).append((loaded, (evictor[1], scheduler[1])))
    each = [(label, *one) for label, own in found.items() for one in own]
    return [(label, loaded) for label, loaded, _ in each], [options for _, _, options in each]


def _really(case: Any, trace: Any, goals: Any, count: int) -> dict[str, Any]:
    """Return medians of ``count`` runs of the real engine, with 95 % intervals, each run by an engine of its own."""
    from minivllm import LLM
    from minivllm.lab.bench import repeats
    from minivllm.lab.simulate import cases, figures

    runs = []
    for turn in range(count):
        with LLM(config=case.loaded) as llm:
            cases.warm(llm.engine, trace)
            runs.append(figures.figures(cases.run_really(llm.engine, trace), goals, {}))
        _tell(f"really, run {turn + 1} of {count}: {runs[-1]['duration']:.1f} s")
    return {**repeats.merged(runs), "repeats": runs}


def _rate(text: str) -> float:
    try:
        found = float(text.removeprefix("x"))
    except ValueError:
        found = -1.0
    if not found > 0:
        raise ConfigError(f"--rate {text}: want xK with K above 0, or xinf")
    return found


def _watts(text: str) -> dict[str, float]:
    if not text:
        return {}
    try:
        busy, idle = (float(x) for x in text.split(","))
    except ValueError:
        busy = idle = -1.0
    if not 0 <= idle <= busy < 1e6 or not math.isfinite(busy):
        raise ConfigError(f"--watts {text}: want BUSY,IDLE in watts, as 450,120")
    return {"busy": busy, "idle": idle}


def _tell(text: str) -> None:
    print(f"minivllm: {text}", file=sys.stderr)


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each run; under one that was run really too, the real figures and how far off the simulation is."""
    named = {
        "tok/s": "output_throughput",
        "req/s": "request_throughput",
        "good/s": "request_goodput",
        "TTFT ms mean": "mean_ttft_ms",
        "p50": "p50_ttft_ms",
        "p99": "p99_ttft_ms",
        "TPOT ms mean": "mean_tpot_ms",
        "p99 ": "p99_tpot_ms",
        "E2E ms mean": "mean_e2el_ms",
        "p99  ": "p99_e2el_ms",
        "hits": "prefix_hit_rate",
        "preempted": "preemptions",
        "J/tok": "joules_per_output_token",
        "failed": "failed",
    }
    shown = [(title, key) for title, key in named.items() if any(row.get(key) is not None for row in rows)]
    shown = [(title, key) for title, key in shown if key != "failed" or any(row["failed"] for row in rows)]
    lines = [["config", "rate", "scheduler", "evictor", *(title.strip() for title, _ in shown)]]
    for row in rows:
        lines.append(
            [
                row["config"],
                f"x{float(row['rate']):g}",
                row["scheduler"],
                row["evictor"],
                *(_cell(k, row.get(k)) for _, k in shown),
            ]
        )
        if "band" in row:
            for i, name in enumerate(("from", "to")):
                bounds = [_cell(k, row["band"][k][i]) if k in row["band"] else "" for _, k in shown]
                lines.append(["", "", name, "", *bounds])
        if "real" in row:
            real = row["real"]
            runs = len(real["repeats"])
            lines.append(["", "", "really", "", *(_cell(k, real.get(k)) for _, k in shown)])
            if runs > 1:
                lines.append(["", "", f"± of {runs} runs", "", *(_half(k, real) for _, k in shown)])
            lines.append(["", "", "off by", "", *(_off(row, k) for _, k in shown)])
    width = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    pad = lambda i, cell: cell.ljust(width[i]) if i < 4 else cell.rjust(width[i])  # noqa: E731
    return "\n".join("  ".join(pad(i, cell) for i, cell in enumerate(line)).rstrip() for line in lines)


def _half(key: str, real: dict[str, Any]) -> str:
    """Return half the width of the interval of a real figure."""
    bounds = real["intervals"].get(key)
    return _cell(key, (bounds[1] - bounds[0]) / 2) if bounds else ""


def _off(row: dict[str, Any], key: str) -> str:
    """Return how far the simulation is off, with the interval where the real figure has one."""
    if key not in row["off"]:
        return ""
    bounds = row["off_intervals"].get(key)
    more = f" [{100 * bounds[0]:+.0f}, {100 * bounds[1]:+.0f}]" if bounds else ""
    return f"{100 * row['off'][key]:+.1f} %{more}"


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if key == "prefix_hit_rate":
        return f"{100 * value:.1f} %"
    return str(value) if isinstance(value, int) else f"{value:.2f}" if value < 100 else f"{value:.0f}"
