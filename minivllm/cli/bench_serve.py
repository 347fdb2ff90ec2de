"""``minivllm bench serve``: what ``bench_runs`` parses, done."""

from __future__ import annotations

import argparse
import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from minivllm.cli.bench_runs import (
    SHARE,
    asks_of,
    checked,
    energy_line,
    head,
    machine_line,
    planned_bill,
    settings,
    tell,
    watch_of,
)
from minivllm.cli.common import load
from minivllm.errors import ConfigError, MinivllmError, shown

if TYPE_CHECKING:
    from minivllm.config import Loaded
    from minivllm.lab.bench.workload import BenchAsk

LATE = 20.0  # milliseconds after which a request was sent late
FEWEST = 24  # requests of a run from which a knee can be told


def serve(args: argparse.Namespace) -> int:
    import asyncio

    from minivllm.lab.bench import limits

    check_serve(checked(args))
    loaded = None if args.url else load(args)
    asks = asks_of(args, limits.planned(loaded) if loaded is not None else None)
    if (args.request_rate or args.find_knee) and any(ask.at is not None for ask in asks(args.seed)):
        raise ConfigError(
            f"{args.dataset}: its requests say when they come (at); leave out --request-rate, --find-knee"
        )
    if args.find_knee and (number := len(asks(args.seed))) < FEWEST:
        raise ConfigError(f"--find-knee: {number} requests are too few to see one; want at least {FEWEST}")
    return asyncio.run(serve_async(args, asks, loaded))


def check_serve(args: argparse.Namespace) -> None:
    """ConfigError for flags that contradict each other."""
    if args.url and args.direct:
        raise ConfigError("--url and --direct: want one of them, a server that runs or an engine in this process")
    if args.url and (args.config or args.set or args.model or args.allow_target or args.hf_overrides):
        flags = "--model, --config, --set, --allow-target and --hf-overrides"
        raise ConfigError(f"--url: the server has a configuration of its own; leave out {flags}")
    if args.direct and args.timeout is not None:
        raise ConfigError(f"--timeout {args.timeout:g} is of answers over HTTP; leave it or --direct out")
    if not args.url and (args.served_model or args.api_key_env):
        raise ConfigError("--served-model and --api-key-env are for --url")
    if args.goodput_share > 1:
        raise ConfigError(f"--goodput-share {args.goodput_share:g}: want a share, above 0 and at most 1")
    if args.find_knee and len(args.max_concurrency) > 1:
        raise ConfigError(f"--find-knee: want at most one --max-concurrency, not {len(args.max_concurrency)}")
    if args.find_knee and len(args.request_rate) > 1:
        raise ConfigError(f"--find-knee: want at most one --request-rate, where to begin, not {len(args.request_rate)}")
    if len(args.request_rate) > 1 and len(args.max_concurrency) > 1:
        raise ConfigError("--request-rate and --max-concurrency: want several values of one of them")
    if len({name for name, _ in args.goodput}) < len(args.goodput):
        raise ConfigError("--goodput: the same name twice")
    paced = bool(args.request_rate or args.find_knee)
    if args.burstiness != 1 and not paced:
        raise ConfigError("--burstiness is of arrivals at a --request-rate or of --find-knee; give one of them")
    if args.goodput_share != SHARE and not (args.find_knee and args.goodput):
        raise ConfigError("--goodput-share is for --find-knee with --goodput; leave it out")
    if args.api_key_env and not os.environ.get(args.api_key_env):
        raise ConfigError(f"--api-key-env {shown(args.api_key_env)}: no such environment variable")


async def serve_async(
    args: argparse.Namespace, asks: Callable[[int], Sequence[BenchAsk]], loaded: Loaded | None
) -> int:
    """Measure the server at ``--url``, or start an engine of ``loaded`` and measure it; return the exit code."""
    from minivllm.lab.bench import state
    from minivllm.lab.bench.client import TIMEOUT, HttpServer
    from minivllm.lab.bench.direct import DirectEngine, started

    extra, timeout = {"temperature": args.temperature}, args.timeout or TIMEOUT
    if loaded is None:
        server = HttpServer(args.url, args.served_model, os.environ.get(args.api_key_env, ""), extra, timeout)
        name = await server.find_model()
        elsewhere = functools.partial(state.MachineWatch, None)
        return await measure_serve(args, asks, server, elsewhere, f"{name} at {args.url}", None, None)
    if not args.direct:
        with started(loaded) as (url, pid):
            server = HttpServer(url, "", "", extra, timeout)
            await server.find_model()
            own = watch_of(loaded.engine, _device(loaded), pid)
            bill = planned_bill(loaded, args)
            return await measure_serve(args, asks, server, own, head(loaded, "over HTTP"), bill, None)
    from minivllm import AsyncLLM

    async with AsyncLLM(config=loaded) as llm:
        engine = DirectEngine(llm, args.temperature)
        watch = watch_of(llm.config, llm.engine.wiring.device)
        bill = await llm.bill_of_materials() if args.json or args.output_json else None
        return await measure_serve(args, asks, engine, watch, head(llm, "without HTTP"), bill, engine.reset)


def _device(loaded: Loaded) -> str:
    from minivllm.device.hardware import find_device

    return find_device(loaded.engine.device).kind


async def measure_serve(
    args: argparse.Namespace, asks: Any, asked: Any, watch: Any, title: str, bill: Any, reset: Any
) -> int:
    from minivllm.lab.bench.loads import Bench, OfferedLoad
    from minivllm.lab.bench.repeats import result

    bench = Bench(asked, asks, watch, dict(args.goodput), args.burstiness, args.seed, reset)
    most = max(args.max_concurrency, default=None)
    for _ in range(args.warmups):
        await bench.warm(most or len(asks(args.seed)), most)
    more: dict[str, Any] = {}
    if args.find_knee:
        start = args.request_rate[0] if args.request_rate else 1.0
        found = await bench.knee(start, most, args.goodput_share, args.repeats)
        rows = found.pop("rows")
        more |= found
    else:
        loads = [OfferedLoad(r, c) for r in args.request_rate or [None] for c in args.max_concurrency or [None]]
        rows = [await bench.row(one, args.repeats) for one in loads]
    runs = [run for row in rows for run in row["repeats"]]
    if all(run["completed"] == 0 for run in runs):
        raise MinivllmError(f"every request failed; the last: {rows[-1]['requests']['errors'][-1]}")
    more["failed"] = sum(run["failed"] for run in runs)
    if len(rows) == 1:
        more |= {k: v for k, v in rows[0].items() if k not in ("repeats", "intervals", "requests")}
        more |= rows[0]["requests"]
    named = {"backend": "openai" if args.url else "minivllm", "model_id": title, "num_prompts": len(asks(args.seed))}
    whole = result("serve", runs, bench.states, settings(args), bill, rows=rows, **named, **more)
    return tell(whole, args, "\n".join(serve_lines(title, rows, whole, args)))


def serve_lines(
    title: str, rows: Sequence[dict[str, Any]], whole: dict[str, Any], args: argparse.Namespace
) -> list[str]:
    from minivllm.lab.bench.repeats import with_bounds
    from minivllm.lab.bench.serving import knee_text

    good = " goodput/s" if args.goodput else ""
    lines = [
        f"{title}; {whole['num_prompts']} requests, {args.repeats} runs; medians, ± half the 95 % interval; "
        "failed: in all runs",
        f"{'rate':>8} {'streams':>7} {'failed':>6} {'requests/s':>14} {'tokens/s':>16} {'TTFT p50':>9} {'p99':>9} "
        f"{'TPOT p50':>9} {'p99':>9} {'E2EL p50':>9} {'p99':>9}{good}",
    ]
    for row in rows:
        rate = row["request_rate"] if isinstance(row["request_rate"], str) else f"{row['request_rate']:.2f}"
        times = [row[f"{q}_{n}_ms"] for n in ("ttft", "tpot", "e2el") for q in ("median", "p99")]
        cells = " ".join(f"{one:>9.1f}" if math.isfinite(one) else f"{'-':>9}" for one in times)
        met = f" {with_bounds(row, 'request_goodput', 2)}" if args.goodput else ""
        over = "  not kept up with" if row.get("beyond") else ""
        speeds = f"{with_bounds(row, 'request_throughput', 2):>14} {with_bounds(row, 'output_throughput'):>16}"
        streams = row["max_concurrency"] or "any"
        lines.append(f"{rate:>8} {streams:>7} {row['failed']:>6} {speeds} {cells}{met}{over}")
    if "knee" in whole:
        lines.append(f"knee: {knee_text(whole['knee'], whole['knee_below'])}")
    late = max(row["p99_late_ms"] for row in rows)
    if late > LATE and any(row["request_rate"] != "inf" for row in rows) and not args.max_concurrency:
        lines.append(f"requests were sent up to {late:.0f} ms late (99th percentile): the client was at its limit")
    states = whole["machine_states"]
    if args.url:
        lines.append(
            f"prompts are those of --seed {args.seed}: a server that was asked them before may have them cached"
        )
    if args.dataset and not args.direct:
        lines.append("each run sends the prompts of the file again: a server that caches prefixes finds them")
    return [*lines, energy_line(rows[0] if len(rows) == 1 else whole, states), machine_line(states)]
