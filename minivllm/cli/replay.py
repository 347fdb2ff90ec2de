"""``minivllm replay``: run a trace of requests through the scheduler and the evictor, without a model.

Parsing the command imports no large package.  Running it imports no torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm import files
from minivllm.cli.common import (
    add_repeatable,
    add_switch,
    add_value,
    config_flags,
    named_parts,
    print_notes,
    read_config,
    report,
    target_flags,
)
from minivllm.errors import ConfigError, brief

if TYPE_CHECKING:
    from minivllm.config import Loaded, PluginChoice
    from minivllm.lab.traces.trace import Trace


def add_commands(command: Any) -> None:
    """Add the command ``replay``; ``command(name, ...)`` makes its parser."""
    text = "Run a trace through the engine's scheduler and cache without a model, and compare configurations."
    sub = command("replay", "cli.replay:replay", text)
    sub.add_argument("trace", help="a .csv, a .jsonl, sample:NAME, or synthetic:requests=5000,seed=0,...")
    config_flags(sub, "one run for each file", "setting of every run")
    add_repeatable(sub, "--evictor", "NAME", "one run for each evictor (a,b, or repeat the flag)")
    add_repeatable(sub, "--scheduler", "NAME", "one run for each scheduler")
    text = "KV blocks, or a percentage of the distinct blocks of the trace"
    add_value(sub, "--blocks", str, "N|P%", text, "")
    add_switch(sub, "--cache-only", "no scheduler: the cache alone, with one request after the other")
    add_switch(sub, "--optimum", "add Belady's offline optimum to the evictors")
    text = "milliseconds that a step takes between arrivals (default 50); 0: all requests arrive at the start"
    add_value(sub, "--step-ms", float, "MS", text, 50.0)
    part_flags(sub)


def part_flags(sub: argparse.ArgumentParser) -> None:
    """Add the flags that select requests of a trace, and those for the output of the result."""
    add_value(sub, "--requests", str, "A:B", "use only requests A to B-1, in order of arrival; the first is 0", "")
    text = "write the figures as JSON, for `minivllm report`"
    add_value(sub, "--output-json", str, "FILE", text, "")
    add_switch(sub, "--json", "print the figures as JSON")


def replay(args: argparse.Namespace) -> int:
    """Run ``minivllm replay``, which compares evictors and scheduling policies on a recorded trace of requests, and
    return its exit code.  ConfigError for wrong arguments."""
    from minivllm.lab.bench import repeats
    from minivllm.lab.replay import compare
    from minivllm.lab.traces.read import about, read_trace

    if not 0 <= args.step_ms <= 3.6e6:
        raise ConfigError(f"--step-ms {args.step_ms:g}: expected 0 to 3600000")
    if args.output_json:
        files.check_output(args.output_json)
    trace = part_of(read_trace(args.trace), args.requests)
    evictors = choices_of(args, "evictor")
    schedulers = choices_of(args, "scheduler")
    if args.cache_only and schedulers:
        raise ConfigError("--scheduler has no meaning with --cache-only, which runs none; leave one of them out")
    args.set += _options_owner("evictor", evictors, args.set)
    args.set += _options_owner("scheduler", schedulers, args.set)
    cases = compare.cases(
        trace, configs_of(args), evictors, schedulers, args.blocks, alone=args.cache_only, optimum=args.optimum
    )
    result = {**repeats.head("replay"), **sizes(trace), "step_ms": None}
    if args.cache_only:
        rows = compare.run_alone(trace, cases)
    else:
        rows = compare.run_engine(trace, cases, args.step_ms / 1e3, report)
        result["step_ms"] = args.step_ms
    result["runs"] = rows
    if args.output_json:
        repeats.write(args.output_json, result)
    if args.json:
        print(repeats.dumps(result, None))
        return 0
    print(about(trace))
    print(compare.table(rows))
    for row in rows:
        print_figures(row, [row["config"], row["scheduler"], row["evictor"]])
    return 0


def print_figures(row: Mapping[str, Any], names: Sequence[str]) -> None:
    """Print the figures that hooks plug-ins added to a run, if there are any."""
    from minivllm.runtime.hooks.figures import text

    if figures := text(row):
        print(f"figures of {' '.join(names)}: {figures}")


def choices_of(args: argparse.Namespace, seam: str) -> list[PluginChoice]:
    """Return the plug-ins of ``--evictor`` or ``--scheduler``, with the options that ``--set`` gives them.  ConfigError
    if a name or an option is wrong."""
    from minivllm.config import load_config

    choices = []
    for name in named_parts(getattr(args, seam), f"--{seam}"):
        try:
            choices.append(getattr(load_config([], [f"{seam}={name}"], environ={}).engine, seam))
        except ConfigError as exc:
            raise ConfigError(str(exc).replace("--set", f"--{seam}", 1)) from None
    return choices


def _options_owner(seam: str, choices: list[PluginChoice], sets: list[str]) -> list[str]:
    """Return the ``--set`` argument that names the plug-in to which the options in ``sets`` belong, if it is missing.

    The options belong to the only plug-in of ``--evictor`` or ``--scheduler``, or to the plug-in of ``--set
    SEAM.name``.  ConfigError if several plug-ins are possible, or if the flag also has options of this plug-in.
    """
    names = [choice.name for choice in choices]
    keys = {text.partition("=")[0].strip(): text.partition("=")[2] for text in sets}
    options = [key for key in keys if key.startswith(f"{seam}.options")]
    if not options or not names:
        return []
    only_name = names[0] if len(set(names)) == 1 else ""
    owner = keys.get(f"{seam}.name", only_name)
    if owner not in names:
        raise ConfigError(
            f"--set {options[0]} with --{seam} {','.join(names)}: the options must belong to a plug-in that is run; "
            f"give --{seam} one name, name the owner with --set {seam}.name=NAME, or use a file for each (--config)"
        )
    if all(choice.model_fields_set > {"name"} for choice in choices if choice.name == owner):
        raise ConfigError(
            f"--set {options[0]} and --{seam} both have options of {owner}; expected them in only one place"
        )
    return [] if f"{seam}.name" in keys else [f"{seam}.name={owner}"]


def configs_of(args: argparse.Namespace, printed: set[str] | None = None) -> list[tuple[str, Loaded]]:
    """Read each ``--config`` file, or the defaults if there is none, and return (label, configuration) of each.

    The notes of each configuration are printed, except those in ``printed``, and added to it.  ConfigError if a file is
    given twice."""
    if not args.config:
        return [("defaults", read_config([], args.set, target_flags(args)))]
    stems = [Path(file).stem for file in args.config]
    labels = stems if len(set(stems)) == len(stems) else args.config
    if len(set(labels)) < len(labels):
        raise ConfigError(f"--config {brief(labels[0])}: the same file twice; give each file once")
    configs = []
    for label, file in zip(labels, args.config, strict=True):
        configs.append((label, read_config([file], args.set, target_flags(args))))
    for _, loaded in configs:
        if printed is None:
            print_notes(loaded.notes)
        else:
            print_notes(note for note in loaded.notes if note not in printed)
            printed.update(loaded.notes)
    return configs


def sizes(trace: Trace) -> dict[str, Any]:
    """Return the sizes of a trace for a result.  ``seconds`` is the arrival of the last request."""
    return {
        "trace": trace.name,
        "requests": len(trace),
        "prompt_tokens": int(trace.prompt.sum()),
        "output_tokens": int(trace.output.sum()),
        "seconds": float(trace.arrival[-1]),
    }


def part_of(trace: Trace, text: str) -> Trace:
    """Return the requests A to B-1 of a trace for ``text`` "A:B", or all requests for "".

    A is 0 and B is the length of the trace if they are left out.  ConfigError for a malformed or empty range, and for a
    range outside of the trace.
    """
    if not text:
        return trace
    first, colon, last = text.partition(":")
    try:
        start = int(first or 0)
        stop = int(last or len(trace))
    except ValueError:
        start = stop = 0
    if not colon or not 0 <= start < stop <= len(trace):
        raise ConfigError(f"--requests {brief(text)}: expected A:B with 0 <= A < B <= {len(trace)}")
    return trace.part(start, stop)
