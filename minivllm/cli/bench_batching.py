"""``minivllm bench batching``: compare scheduling policies, which form batches in different ways.

``bench_runs`` parses its flags.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

from minivllm.cli.bench_runs import (
    bill_of_config,
    check_output,
    print_result,
    progress,
    requests_by_seed,
    settings,
    watch_of,
)
from minivllm.cli.common import JsonObject, load
from minivllm.errors import ConfigError, MinivllmError

if TYPE_CHECKING:
    from minivllm.cli.bench_runs import RequestsBySeed
    from minivllm.config import Loaded
    from minivllm.lab.bench.batching import BatchingWay

LONGEST_TIMEOUT = 10_000  # longest timeout in milliseconds, which is the wait of the static batch


def batching(args: argparse.Namespace) -> int:
    """Run ``bench batching`` and return its exit code.  ConfigError for wrong arguments, such as a dataset with arrival
    times."""
    import asyncio

    from minivllm.lab.bench import batching as lab
    from minivllm.lab.bench import limits, repeats

    check(args)
    check_output(args)
    planned = limits.planned(load(args))
    requests = requests_by_seed(args, planned)
    args.batch = args.batch or min(8, planned.rows)
    if any(request.at is not None for request in requests(args.seed)):
        raise ConfigError(
            f"{args.dataset}: its requests have arrival times (at); remove them, or use bench serve, which keeps them"
        )
    policies = [(way, _loaded(args, way)) for way in lab.ways(args.batch, args.timeout_ms, args.policy)]
    # The bills of materials are made before the first run, so that wrong settings are refused at once.
    bills = {way.name: bill_of_config(loaded) for way, loaded in policies}
    rows: list[JsonObject] = []
    states: list[JsonObject] = []
    title = ""
    groups = [policies] if args.in_turns else [[policy] for policy in policies]
    for group in groups:
        title, group_rows, group_states = asyncio.run(measure(args, requests, group))
        rows += group_rows
        states += group_states
    lab.compared(rows)
    runs = [run for row in rows for run in row["repeats"]]
    more = {
        "rows": rows,
        "model_id": title,
        "num_prompts": len(requests(args.seed)),
        "bills_of_materials": bills,
    }
    result = repeats.result("batching", runs, states, settings(args), None, **more)
    return print_result(result, args, lines(title, rows, result, args), states)


def check(args: argparse.Namespace) -> None:
    """Raise ConfigError for wrong flags.

    They are a policy that is measured in any case, a timeout that is too long, or a scheduler that is set.
    """
    if twice := sorted({"static", "fcfs", "adaptive"} & set(args.policy)):
        raise ConfigError(f"--policy {','.join(twice)}: measured anyway; leave it out")
    if args.timeout_ms > LONGEST_TIMEOUT:
        raise ConfigError(
            f"--timeout-ms {args.timeout_ms:g}: expected at most {LONGEST_TIMEOUT}, which the static batch waits"
        )
    if schedulers := [text for text in args.set if text.startswith("scheduler")]:
        raise ConfigError(f"--set {schedulers[0]}: this command compares schedulers; name another one by --policy")


def _loaded(args: argparse.Namespace, way: BatchingWay) -> Loaded:
    """Return the configuration of one policy.  ConfigError if ``--batch`` is more than max_num_seqs."""
    changed = copy(args)
    changed.set = [*args.set, *way.sets]
    loaded = load(changed)
    most = loaded.engine.max_num_seqs
    if most is not None and most < args.batch:
        raise ConfigError(f"--batch {args.batch} is more than max_num_seqs={most}; lower it")
    return loaded


async def measure(
    args: argparse.Namespace,
    requests: RequestsBySeed,
    policies: Sequence[tuple[BatchingWay, Loaded]],
) -> tuple[str, list[JsonObject], list[JsonObject]]:
    """Measure policies over all rates; return a title, a row for each rate and policy, and the machine states.

    All policies run the same seeds, one run each in turns, in an order that rotates.  Each policy has one engine for
    all its runs, so the intervals do not include differences between engines of one configuration.
    """
    from minivllm import AsyncLLM
    from minivllm.lab.bench.direct import DirectEngine
    from minivllm.lab.bench.loads import Bench, OfferedLoad

    rows = []
    title = ""
    async with contextlib.AsyncExitStack() as stack:
        benches = []
        for _, loaded in policies:
            llm = await stack.enter_async_context(AsyncLLM(config=loaded))
            wiring = llm.engine.wiring
            engine = DirectEngine(llm, args.temperature)
            watch = watch_of(llm.config, wiring.device)
            bench = Bench(engine, requests, watch, seed=args.seed, reset=engine.reset)
            benches.append(bench)
            title = f"{llm.config.model} on {wiring.device}, {wiring.dtype}"
            for _ in range(args.warmups):
                await bench.warm(len(requests(args.seed)), None)
        ways = [way for way, _ in policies]
        for rate in args.request_rate:
            runs = await _runs_at(OfferedLoad(rate), ways, benches, args.repeats)
            rows += [_row(OfferedLoad(rate), way, way_runs) for way, way_runs in zip(ways, runs, strict=True)]
        states = [state for bench in benches for state in bench.states]
    return title, rows, states


async def _runs_at(load: Any, ways: Sequence[BatchingWay], benches: Sequence[Any], repeats: int) -> list[list[Any]]:
    """Return ``repeats`` runs of each policy at one request rate: (figures, answers) of each run."""
    runs: list[list[Any]] = [[] for _ in ways]
    for turn in range(repeats):
        for place in range(len(ways)):
            i = (place + turn) % len(ways)
            figures, answers = await benches[i].once(load)
            runs[i].append((figures, answers))
            took = figures["mean_e2el_ms"]
            progress(f"{ways[i].name} at {load.rate:g} requests/s, run {turn + 1}: {took:.0f} ms")
    return runs


def _row(load: Any, way: BatchingWay, runs: Sequence[Any]) -> JsonObject:
    """Return the result row of a policy at one request rate.  MinivllmError if a request of its runs failed."""
    from minivllm.lab.bench.loads import row_of

    row = row_of(load, [figures for figures, _ in runs], runs[-1][1])
    if row["failed"]:
        errors = [answer.error for _, answers in runs for answer in answers if answer.error]
        raise MinivllmError(f"{way.name}: a request failed: {errors[0] if errors else ''}")
    return {**row, "policy": way.name, "sets": list(way.sets)}


def lines(title: str, rows: Sequence[JsonObject], result: JsonObject, args: argparse.Namespace) -> list[str]:
    """Return the lines of the printed table, grouped by request rate."""
    out = [
        f"{title}: {result['num_prompts']} requests, {args.repeats} runs each by one engine a policy, paired by seed; "
        f"batches of {args.batch}, timeout {args.timeout_ms:g} ms; medians, ± half the 95 % interval",
        f"{'rate':>7} {'policy':16} {'latency ms':>16} {'p99':>8} {'TTFT ms':>8} {'TPOT ms':>8} {'requests/s':>14} "
        f"{'latency over continuous':>26}",
    ]
    for rate in args.request_rate:
        out += [_line(rate, row) for row in rows if row["request_rate"] == rate]
    return out


def _line(rate: float, row: JsonObject) -> str:
    """Return the table's line of a policy at one request rate."""
    from minivllm.lab.bench.repeats import with_bounds
    from minivllm.lab.bench.trials import ratio_text

    ratio = ""
    if against := row.get("against"):
        ratio = f"{ratio_text(against):>26}  {against['says']}"
    line = (
        f"{rate:>7.2f} {row['policy']:16} {with_bounds(row, 'mean_e2el_ms'):>16} {row['p99_e2el_ms']:>8.0f} "
        f"{row['mean_ttft_ms']:>8.1f} {row['mean_tpot_ms']:>8.2f} "
        f"{with_bounds(row, 'request_throughput', 2):>14} {ratio}"
    )
    return line.rstrip()
