"""``minivllm bench batching``: what ``bench_runs`` parses, done."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

from minivllm.cli.bench_runs import (
    asks_of,
    bill_planned,
    checked,
    energy_line,
    machine_line,
    progress,
    settings,
    tell,
    watch_of,
)
from minivllm.cli.common import load
from minivllm.errors import ConfigError, MinivllmError

if TYPE_CHECKING:
    from minivllm.config import Loaded
    from minivllm.lab.bench.batching import BatchingWay
    from minivllm.lab.bench.workload import BenchAsk


def batching(args: argparse.Namespace) -> int:
    import asyncio

    from minivllm.lab.bench import batching as lab
    from minivllm.lab.bench import limits, repeats

    check(args)
    most = limits.planned(load(checked(args)))
    asks, args.batch = asks_of(args, most), args.batch or min(8, most.rows)
    if any(ask.at is not None for ask in asks(args.seed)):
        raise ConfigError(f"{args.dataset}: its requests say when they come (at); want some without, or bench serve")
    found = [(way, _loaded(args, way)) for way in lab.ways(args.batch, args.timeout_ms, args.policy)]
    bills = {way.name: bill_planned(loaded) for way, loaded in found}  # what is wrong is told before anything is run
    rows: list[dict[str, Any]] = []
    states: list[dict[str, Any]] = []
    title = ""
    for together in [found] if args.in_turns else [[one] for one in found]:
        title, own, seen = asyncio.run(measure(args, asks, together))
        rows, states = [*rows, *own], [*states, *seen]
    lab.compared(rows)
    runs = [run for row in rows for run in row["repeats"]]
    more = {"rows": rows, "model_id": title, "num_prompts": len(asks(args.seed)), "bills_of_materials": bills}
    whole = repeats.result("batching", runs, states, settings(args), None, **more)
    return tell(
        whole, args, "\n".join([*lines(title, rows, whole, args), energy_line(whole, states), machine_line(states)])
    )


def check(args: argparse.Namespace) -> None:
    """ConfigError for policies that would be measured twice, and for a wait that no policy takes."""
    if twice := sorted({"static", "fcfs", "adaptive"} & set(args.policy)):
        raise ConfigError(f"--policy {','.join(twice)}: measured anyway; leave it out")
    if args.timeout_ms > 10_000:
        raise ConfigError(f"--timeout-ms {args.timeout_ms:g}: want at most 10000, which the static batch waits")
    if set_here := [text for text in args.set if text.startswith("scheduler")]:
        raise ConfigError(f"--set {set_here[0]}: the scheduler is what is compared; name another one by --policy")


def _loaded(args: argparse.Namespace, way: BatchingWay) -> Loaded:
    own = copy(args)
    own.set = [*args.set, *way.sets]
    loaded = load(own)
    if loaded.engine.max_num_seqs is not None and loaded.engine.max_num_seqs < args.batch:
        raise ConfigError(f"--batch {args.batch} is more than max_num_seqs={loaded.engine.max_num_seqs}; lower it")
    return loaded


async def measure(
    args: argparse.Namespace,
    asks: Callable[[int], Sequence[BenchAsk]],
    found: Sequence[tuple[BatchingWay, Loaded]],
) -> tuple[str, list[dict[str, Any]], list[dict[str, Any]]]:
    """(what was measured, a row for each policy and rate, machine states): all policies with the same seeds, a run each
    in turns, in an order that rotates.  One engine a policy: intervals do not hold how engines of a kind differ."""
    from minivllm import AsyncLLM
    from minivllm.lab.bench.direct import DirectEngine
    from minivllm.lab.bench.loads import Bench, OfferedLoad, row_of

    rows, title = [], ""
    async with contextlib.AsyncExitStack() as stack:
        benches = []
        for _, loaded in found:
            llm = await stack.enter_async_context(AsyncLLM(config=loaded))
            engine, wiring = DirectEngine(llm, args.temperature), llm.engine.wiring
            watch = watch_of(llm.config, wiring.device)
            benches.append(Bench(engine, asks, watch, seed=args.seed, reset=engine.reset))
            title = f"{llm.config.model} on {wiring.device}, {wiring.dtype}"
            for _ in range(args.warmups):
                await benches[-1].warm(len(asks(args.seed)), None)
        for rate in args.request_rate:
            load, runs = OfferedLoad(rate), [[] for _ in found]  # type: ignore[var-annotated]
            for turn in range(args.repeats):
                for place in range(len(found)):
                    i = (place + turn) % len(found)
                    runs[i].append(await benches[i].once(load))
                    took = runs[i][-1][0]["mean_e2el_ms"]
                    progress(f"{found[i][0].name} at {rate:g} requests/s, run {turn + 1}: {took:.0f} ms")
            for (way, _), own in zip(found, runs, strict=True):
                row = row_of(load, [figures for figures, _ in own], own[-1][1])
                rows.append({**row, "policy": way.name, "sets": list(way.sets)})
                if row["failed"]:
                    why = next((e for _, answers in own for e in (one.error for one in answers) if e), "")
                    raise MinivllmError(f"{way.name}: a request failed: {why}")
        return title, rows, [state for bench in benches for state in bench.states]


def lines(title: str, rows: Sequence[dict[str, Any]], whole: dict[str, Any], args: argparse.Namespace) -> list[str]:
    from minivllm.lab.bench.repeats import with_bounds
    from minivllm.lab.bench.trials import ratio_text

    out = [
        f"{title}: {whole['num_prompts']} requests, {args.repeats} runs each by one engine a policy, paired by seed; "
        f"batches of {args.batch}, timeout {args.timeout_ms:g} ms; medians, ± half the 95 % interval",
        f"{'rate':>7} {'policy':16} {'latency ms':>16} {'p99':>8} {'TTFT ms':>8} {'TPOT ms':>8} {'requests/s':>14} "
        f"{'latency over continuous':>26}",
    ]
    for rate in args.request_rate:
        for row in (row for row in rows if row["request_rate"] == rate):
            one = row.get("against")
            over = f"{ratio_text(one):>26}  {one['says']}" if one else ""
            out.append(
                f"{rate:>7.2f} {row['policy']:16} {with_bounds(row, 'mean_e2el_ms'):>16} {row['p99_e2el_ms']:>8.0f} "
                f"{row['mean_ttft_ms']:>8.1f} {row['mean_tpot_ms']:>8.2f} "
                f"{with_bounds(row, 'request_throughput', 2):>14} {over}".rstrip()
            )
    return out
