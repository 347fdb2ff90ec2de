"""``minivllm calibrate`` and ``minivllm simulate``: predict how configurations serve a trace, on a virtual clock.

Parsing the commands imports no large package.  Simulating imports no torch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from copy import copy
from dataclasses import replace
from typing import Any

from minivllm import files
from minivllm.cli.common import (
    JsonObject,
    add_repeatable,
    add_switch,
    add_value,
    config_flags,
    load,
    named_parts,
    report,
)
from minivllm.cli.replay import choices_of, configs_of, part_flags, part_of, print_figures, sizes
from minivllm.errors import ConfigError

SEAMS = ("scheduler", "evictor")
REPEATS = 3  # number of runs of the real engine; fewer give no useful interval


def add_commands(command: Any, wiring: argparse.ArgumentParser) -> None:
    """Add the commands ``calibrate`` and ``simulate``.

    ``command(name, ...)`` makes the parser of a command; ``wiring`` has flags for ``calibrate``.
    """
    text = "Measure how long the steps of a configuration take on this machine, for `minivllm simulate`."
    sub = command("calibrate", "cli.simulate:calibrate", text, wiring)
    sub.add_argument("-o", "--output", default="costs.json", metavar="FILE", help="table of costs (default costs.json)")
    text = "time to measure, without the start (default 60)"
    sub.add_argument("--seconds", type=float, default=60.0, help=text)
    text = "power of the device when busy and when idle, so that simulations can give joules"
    add_value(sub, "--watts", str, "BUSY,IDLE", text, "")
    text = "Run a trace through the real engine on a virtual clock, and compare configurations."
    sub = command("simulate", "cli.simulate:simulate", text)
    sub.add_argument("--trace", required=True, help="sample:NAME, synthetic:like=NAME,..., a .csv or a .jsonl")
    sub.add_argument("--costs", required=True, metavar="FILE", help="the file that `minivllm calibrate` wrote")
    config_flags(sub, "one run for each file", "setting of every run")
    for seam in SEAMS:
        text = f"one run for each {seam} (a,b, or repeat the flag), in place of the configurations' own"
        add_repeatable(sub, f"--{seam}", "NAME", text)
    add_repeatable(sub, "--rate", "xK", "make arrivals K times as fast; xinf: all at the start")
    add_repeatable(sub, "--goodput", "NAME:MS", "latency target: ttft, tpot or e2el of at most MS milliseconds")
    add_switch(sub, "--oracle", "add upper bounds: Belady's evictor, and the shortest answer first")
    add_switch(sub, "--real", "run the trace on the real engine too, and print the error of the simulation")
    text = f"with --real: runs of the real engine for each row, which give 95 %% intervals (default {REPEATS})"
    add_value(sub, "--repeats", int, "N", text)
    text = "skip the two runs with faster and slower steps, which give the error bands"
    add_switch(sub, "--no-band", text)
    add_switch(sub, "--no-answer-hits", "later prompts do not contain answers of earlier requests")
    part_flags(sub)


def calibrate(args: argparse.Namespace) -> int:
    """Run ``minivllm calibrate`` and return its exit code.  ConfigError if ``--seconds`` is outside 1 to 3600, or if
    the executor is simulated."""
    if not 1 <= args.seconds <= 3600:
        raise ConfigError(f"--seconds {args.seconds:g}: expected 1 to 3600")
    watts = _watts(args.watts)
    files.check_output(args.output)
    loaded = load(args)
    _refuse_sim(loaded)
    from minivllm import LLM
    from minivllm.frontend.record.machine import machine, versions
    from minivllm.lab.simulate import calibrate as measuring
    from minivllm.lab.simulate import uncertainty

    with LLM(config=_without_drafts(loaded)) as llm:
        about = {
            "model": llm.config.model,
            "dtype": llm.engine.wiring.dtype,
            "parts": {seam: part.name for seam, part in llm.resolved.parts.items()},
            "machine": machine(llm.resolved.device),
            "versions": versions(),
        }
        table = measuring.calibrate(llm.engine, about, args.seconds, report)
    files.write_text(args.output, json.dumps(replace(table, watts=watts).as_json(), indent=1) + "\n")
    print(fit_table(table.fit))
    print(f"costs of steps to {args.output}")
    if warning := uncertainty.error_of(table).warning(args.output):
        report(warning)
    return 0


def _without_drafts(loaded: Any) -> Any:
    """Return a configuration whose drafter is none instead of automatic, because the cost table has no drafts."""
    config = loaded.engine
    choice = type(config.drafter)
    if config.drafter != choice():
        return loaded
    return replace(loaded, engine=config.model_copy(update={"drafter": choice(name="none")}))


def _refuse_sim(loaded: Any) -> None:
    """Raise ConfigError if the executor is ``sim``, also under its full name ``minivllm/sim``."""
    from minivllm.config.resolve import choose_seams
    from minivllm.registry import Catalog

    config = loaded.engine
    if config.executor.name == "auto":
        return
    catalog = Catalog.discover(allow_targets=config.allow_targets)
    parts = choose_seams(config, catalog, ("executor",), loaded.origins)
    if parts["executor"].name.removeprefix("minivllm/") == "sim":
        raise ConfigError("executor=sim has no steps to measure; calibrate the executor that it is to stand for")


def fit_table(fit: Any) -> str:
    """Return the errors of a fitted cost table as text.

    The phase ``check`` has steps that the fit did not use.
    """
    lines = ["steps        number   error: median      90 %    of the sum"]
    for phase, errors in fit.items():
        median = f"{100 * errors['median_error']:>12.1f} %"
        most = f"{100 * errors['p90_error']:>6.1f} %"
        total = f"{100 * errors['sum_error']:>+6.1f} %"
        lines.append(f"{phase:10} {errors['steps']:>8} {median}  {most}    {total}")
    return "\n".join(lines)


def simulate(args: argparse.Namespace) -> int:
    """Run ``minivllm simulate``, which predicts the latencies of a trace of requests from measured costs of steps, and
    return its exit code."""
    from minivllm.lab.bench import repeats
    from minivllm.lab.simulate import figures, uncertainty
    from minivllm.lab.traces.read import about, read_trace
    from minivllm.plugins.executor.costs import read_costs

    _check(args)
    goals = figures.parse_goals(args.goodput)
    rates = [_rate(text) for text in args.rate or ["x1"]]
    costs = read_costs(args.costs)
    error = uncertainty.error_of(costs)
    warning = error.warning(args.costs)
    if warning:
        report(warning)
    trace = part_of(read_trace(args.trace), args.requests)
    scales = () if args.no_band or error.error is None else error.scales()
    rows = _rows(args, trace, costs, goals, rates, scales)
    result = {
        **repeats.head("simulate"),
        **sizes(trace),
        "costs": args.costs,
        "costs_about": dict(costs.about),
        "uncertainty": error.as_json(args.costs),
        "goodput": goals,
        "runs": rows,
    }
    if args.output_json:
        repeats.write(args.output_json, result)
    if args.json:
        print(repeats.dumps(result, None))
        return 0
    print(about(trace))
    print(table(rows))
    for row in rows:
        names = [row["config"], f"x{float(row['rate']):g}", row["scheduler"], row["evictor"]]
        print_figures(row, names)
        print_figures(row.get("real", {}), [*names, "really"])
    print(error.line() if scales or error.error is None else f"{error.line()}; not run (--no-band)")
    if warning:
        print(f"rough: {warning}")
    return 0


def _rows(args: argparse.Namespace, trace: Any, costs: Any, goals: Any, rates: Any, scales: Any) -> list[Any]:
    """Simulate each configuration at each request rate, and return the rows of the result.

    ``scales`` are factors of the step costs; each gives one more run for the error band of the row.
    """
    from minivllm.lab.simulate import cases, figures, uncertainty

    configs, options = _configs(args)
    answers = not (args.real or args.no_answer_hits)

    def simulated(case: Any, faster: Any, table: Any) -> JsonObject:
        return figures.figures(cases.simulate(case, faster, table, answers), goals, costs.watts)

    rows = []
    for case in cases.cases(configs, costs, report, args.oracle, options):
        for rate in rates:
            report(" ".join([f"x{rate:g}", *case.head.values()]))
            faster = cases.at_rate(trace, rate)
            found = simulated(case, faster, costs)
            row = {**case.head, "rate": rate if math.isfinite(rate) else "inf", **found}
            if scales:
                scaled = [simulated(case, faster, costs.scaled(by)) for by in scales]
                row["band"] = uncertainty.bands(found, scaled)
            if args.real:
                row["real"] = _really(case, faster, goals, args.repeats)
                row["off"], row["off_intervals"] = figures.off(found, row["real"])
            rows.append(row)
    return rows


def _check(args: argparse.Namespace) -> None:
    """Raise ConfigError for flags that contradict each other; fill in ``--repeats``."""
    if args.output_json:
        files.check_output(args.output_json)
    if args.real and args.oracle:
        raise ConfigError("--oracle has no real run to compare with; leave out --real")
    if args.repeats is not None:
        if not args.real:
            raise ConfigError(
                f"--repeats {args.repeats}: only runs of the real engine vary; add --real, or leave out --repeats"
            )
        if not 1 <= args.repeats <= 100:
            raise ConfigError(f"--repeats {args.repeats}: expected 1 to 100")
    args.repeats = args.repeats or REPEATS


def _configs(args: argparse.Namespace) -> tuple[list[tuple[str, Any]], list[tuple[str, str]]]:
    """Return (label, configuration) for each file and each pair of ``--scheduler`` and ``--evictor``, file by file.

    The second list has the options of (evictor, scheduler) of each as text, for the table.
    """
    from minivllm.lab.replay.compare import options_text

    settings = []
    for seam in SEAMS:
        sets = [f"{seam}={name}" for name in named_parts(getattr(args, seam), f"--{seam}")]
        texts = map(options_text, choices_of(args, seam))
        settings.append(list(zip(sets, texts, strict=True)) or [("", "")])
    by_label: dict[str, list[Any]] = {}
    printed: set[str] = set()
    for (scheduler, scheduler_options), (evictor, evictor_options) in itertools.product(*settings):
        changed = copy(args)
        changed.set = [*args.set, *filter(None, (scheduler, evictor))]
        for label, loaded in configs_of(changed, printed):
            by_label.setdefault(label, []).append((loaded, (evictor_options, scheduler_options)))
    configs = []
    options = []
    for label, cases in by_label.items():
        configs += [(label, loaded) for loaded, _ in cases]
        options += [case_options for _, case_options in cases]
    return configs, options


def _really(case: Any, trace: Any, goals: Any, count: int) -> JsonObject:
    """Run a trace ``count`` times, each on a new real engine; return medians and 95 % intervals of the figures."""
    from minivllm import LLM
    from minivllm.lab.bench import repeats
    from minivllm.lab.simulate import cases, figures

    runs = []
    for turn in range(count):
        with LLM(config=case.loaded) as llm:
            cases.warm(llm.engine, trace)
            runs.append(figures.figures(cases.run_really(llm.engine, trace), goals, {}))
        report(f"really, run {turn + 1} of {count}: {runs[-1]['duration']:.1f} s")
    return {**repeats.merged(runs), "repeats": runs}


def _rate(text: str) -> float:
    """Return the factor of a ``--rate`` argument such as ``x2``.

    ConfigError if it is not above 0.
    """
    try:
        factor = float(text.removeprefix("x"))
    except ValueError:
        factor = -1.0
    if not factor > 0:
        raise ConfigError(f"--rate {text}: expected xK with K above 0, or xinf")
    return factor


def _watts(text: str) -> dict[str, float]:
    """Return the busy and idle watts of a ``--watts`` argument, an empty dict for "".

    ConfigError for wrong numbers.
    """
    if not text:
        return {}
    try:
        busy, idle = map(float, text.split(","))
    except ValueError:
        busy = idle = -1.0
    if not 0 <= idle <= busy < 1e6 or not math.isfinite(busy):
        raise ConfigError(f"--watts {text}: expected BUSY,IDLE in watts, such as 450,120")
    return {"busy": busy, "idle": idle}


COLUMNS = {
    "output_throughput": "tok/s",
    "request_throughput": "req/s",
    "request_goodput": "good/s",
    "mean_ttft_ms": "TTFT ms mean",
    "p50_ttft_ms": "p50",
    "p99_ttft_ms": "p99",
    "mean_tpot_ms": "TPOT ms mean",
    "p99_tpot_ms": "p99",
    "mean_e2el_ms": "E2E ms mean",
    "p99_e2el_ms": "p99",
    "prefix_hit_rate": "hits",
    "preemptions": "preempted",
    "joules_per_output_token": "J/tok",
    "failed": "failed",
}


def table(rows: list[JsonObject]) -> str:
    """Return the simulated runs as a text table.

    Below a run are the bounds of its error band, and with ``--real`` the figures of the real engine and the error of
    the simulation.
    """
    keys = [key for key in COLUMNS if any(row.get(key) is not None for row in rows)]
    if not any(row["failed"] for row in rows):
        keys.remove("failed")
    lines = [["config", "rate", "scheduler", "evictor", *(COLUMNS[key] for key in keys)]]
    for row in rows:
        lines += _row_lines(row, keys)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = []
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line[:4], widths[:4], strict=True)]
        cells += [cell.rjust(width) for cell, width in zip(line[4:], widths[4:], strict=True)]
        texts.append("  ".join(cells).rstrip())
    return "\n".join(texts)


def _row_lines(row: JsonObject, keys: list[str]) -> list[list[str]]:
    """Return the table cells of a run: its line, the error band, the real figures and the differences."""
    names = [row["config"], f"x{float(row['rate']):g}", row["scheduler"], row["evictor"]]
    lines = [[*names, *(_cell(key, row.get(key)) for key in keys)]]

    def add(name: str, cells: list[str]) -> None:
        lines.append(["", "", name, "", *cells])

    if "band" in row:
        band = row["band"]
        for i, name in enumerate(("from", "to")):
            add(name, [_cell(key, band[key][i]) if key in band else "" for key in keys])
    if "real" in row:
        real = row["real"]
        runs = len(real["repeats"])
        add("really", [_cell(key, real.get(key)) for key in keys])
        if runs > 1:
            add(f"± of {runs} runs", [_half(key, real) for key in keys])
        add("off by", [_off(row, key) for key in keys])
    return lines


def _half(key: str, real: JsonObject) -> str:
    """Return half the width of the interval of a real figure, as text."""
    bounds = real["intervals"].get(key)
    return _cell(key, (bounds[1] - bounds[0]) / 2) if bounds else ""


def _off(row: JsonObject, key: str) -> str:
    """Return the relative error of a simulated figure as text, with its interval if the real figure has one."""
    if key not in row["off"]:
        return ""
    bounds = row["off_intervals"].get(key)
    interval = f" [{100 * bounds[0]:+.0f}, {100 * bounds[1]:+.0f}]" if bounds else ""
    return f"{100 * row['off'][key]:+.1f} %{interval}"


def _cell(key: str, value: Any) -> str:
    """Return a figure as the text of a table cell, ``-`` for None."""
    if value is None:
        return "-"
    if key == "prefix_hit_rate":
        return f"{100 * value:.1f} %"
    if isinstance(value, int):
        return str(value)
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"
