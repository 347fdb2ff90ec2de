"""``minivllm replay``: a trace through the scheduler and the evictor, without a model.  Parsing it imports nothing
heavy; running it imports no torch."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm import files
from minivllm.cli.common import named_parts, read_config
from minivllm.errors import ConfigError, brief

if TYPE_CHECKING:
    from minivllm.config import Loaded, PluginChoice
    from minivllm.lab.traces.trace import Trace


def add_commands(command: Any) -> None:
    """Add ``replay``.  ``command`` is that of ``minivllm.cli``."""
    text = "Run a trace through the engine's scheduler and cache without a model, and compare configurations."
    sub = command("replay", "cli.replay:replay", text)
    sub.add_argument("trace", help="a .csv, a .jsonl, sample:NAME, or synthetic:requests=5000,seed=0,...")
    sub.add_argument(
        "--config", action="append", default=[], metavar="FILE", help="TOML, YAML or JSON; one run for each"
    )
    sub.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for every run")
    sub.add_argument("--evictor", action="append", default=[], metavar="NAME", help="run each of these (a,b or again)")
    sub.add_argument("--scheduler", action="append", default=[], metavar="NAME", help="run each of these")
    sub.add_argument("--allow-target", action="append", default=[], metavar="MODULE", help="may be named module:Class")
    sub.add_argument("--blocks", default="", metavar="N|P%", help="KV blocks, or a share of the trace's distinct ones")
    sub.add_argument("--cache-only", action="store_true", help="no scheduler: requests one after the other, in blocks")
    sub.add_argument("--optimum", action="store_true", help="Belady's offline optimum beside the evictors")
    sub.add_argument(
        "--step-ms",
        type=float,
        default=50.0,
        metavar="MS",
        help="what a step counts for between arrivals (default 50); 0: all requests are there at once",
    )
    sub.add_argument("--requests", default="", metavar="A:B", help="only requests A to B-1, by arrival")
    sub.add_argument("--output-json", default="", metavar="FILE", help="write the figures as JSON, for report")
    sub.add_argument("--json", action="store_true", help="print the figures as JSON")


def replay(args: argparse.Namespace) -> int:
    from minivllm.lab.bench import repeats
    from minivllm.lab.replay import compare
    from minivllm.lab.traces.read import about, read_trace
    from minivllm.runtime.hooks.figures import text

    if not 0 <= args.step_ms <= 3.6e6:
        raise ConfigError(f"--step-ms {args.step_ms:g}: want 0 to 3600000")
    if args.output_json:
        files.check_output(args.output_json)
    trace = part_of(read_trace(args.trace), args.requests)
    evictors, schedulers = choices_of(args, "evictor"), choices_of(args, "scheduler")
    if args.cache_only and schedulers:
        raise ConfigError("--scheduler has no meaning with --cache-only, which runs none; leave one of them out")
    for seam, choices in (("evictor", evictors), ("scheduler", schedulers)):
        args.set += _whose_options(seam, choices, args.set)
    found = compare.cases(
        trace, configs_of(args), evictors, schedulers, args.blocks, alone=args.cache_only, optimum=args.optimum
    )
    if args.cache_only:
        rows = compare.run_alone(trace, found)
    else:
        told = lambda text: print(f"minivllm: {text}", file=sys.stderr)  # noqa: E731
        rows = compare.run_engine(trace, found, args.step_ms / 1e3, told)
    step_ms = None if args.cache_only else args.step_ms
    whole = {**repeats.head("replay"), **sizes(trace), "step_ms": step_ms, "runs": rows}
    if args.output_json:
        repeats.write(args.output_json, whole)
    if args.json:
        print(repeats.dumps(whole, None))
        return 0
    print(about(trace))
    print(compare.table(rows))
    for row in rows:
        if own := text(row):
            print(f"figures of {row['config']} {row['scheduler']} {row['evictor']}: {own}")
    return 0


def choices_of(args: argparse.Namespace, seam: str) -> list[PluginChoice]:
    """What ``--evictor`` or ``--scheduler`` names, each as ``--set`` would read it."""
    from minivllm.config import load_config

    found = []
    for name in named_parts(getattr(args, seam), f"--{seam}"):
        try:
            found.append(getattr(load_config([], [f"{seam}={name}"], environ={}).engine, seam))
        except ConfigError as exc:
            raise ConfigError(str(exc).replace("--set", f"--{seam}", 1)) from None
    return found


def _whose_options(seam: str, choices: list[PluginChoice], sets: list[str]) -> list[str]:
    """``--set`` that names the plug-in whose options are given beside ``--evictor`` or ``--scheduler``."""
    names = [choice.name for choice in choices]
    keys = {text.partition("=")[0].strip(): text.partition("=")[2] for text in sets}
    options = [key for key in keys if key.startswith(f"{seam}.options")]
    if not options or not names:
        return []
    whose = keys.get(f"{seam}.name", names[0] if len(set(names)) == 1 else "")
    if whose in names and all(choice.model_fields_set > {"name"} for choice in choices if choice.name == whose):
        raise ConfigError(
            f"--set {options[0]} beside --{seam}, which says the options of {whose} itself: want them once"
        )
    if whose not in names:
        raise ConfigError(
            f"--set {options[0]} beside --{seam} {','.join(names)}: want options of one that is run; "
            f"give --{seam} one name, say whose they are with --set {seam}.name=NAME, or use a file for each (--config)"
        )
    return [] if f"{seam}.name" in keys else [f"{seam}.name={whose}"]


def configs_of(args: argparse.Namespace, said: set[str] | None = None) -> list[tuple[str, Loaded]]:
    """(label, configuration) for each file, or the defaults.  ``said``: notes that are not printed again."""
    flags = {"allow_targets": args.allow_target} if args.allow_target else {}
    stems = [Path(file).stem for file in args.config]
    labels = stems if len(set(stems)) == len(stems) else args.config
    if len(set(labels)) < len(labels):
        raise ConfigError(f"--config {brief(labels[0])}: the same file twice; each is a run of its own")
    found = [(label, read_config([file], args.set, flags)) for label, file in zip(labels, args.config, strict=True)]
    for _, loaded in found:
        for note in loaded.notes:
            if said is None or note not in said:
                print(f"minivllm: {note}", file=sys.stderr)
        if said is not None:
            said.update(loaded.notes)
    return found or [("defaults", read_config([], args.set, flags))]


def sizes(trace: Trace) -> dict[str, Any]:
    """What a result says of its trace."""
    return {
        "trace": trace.name,
        "requests": len(trace),
        "prompt_tokens": int(trace.prompt.sum()),
        "output_tokens": int(trace.output.sum()),
        "seconds": float(trace.arrival[-1]),
    }


def part_of(trace: Trace, text: str) -> Trace:
    if not text:
        return trace
    start, colon, stop = text.partition(":")
    try:
        a, b = int(start or 0), int(stop or len(trace))
    except ValueError:
        a, b = 0, 0
    if not colon or not 0 <= a < b <= len(trace):
        raise ConfigError(f"--requests {brief(text)}: want A:B with 0 <= A < B <= {len(trace)}")
    return trace.part(a, b)
