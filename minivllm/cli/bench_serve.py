"""``minivllm bench serve``: measure a server under load.  ``bench_runs`` parses its flags."""

from __future__ import annotations

import argparse
import functools
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minivllm.cli.bench_runs import (
    SHARE,
    check_output,
    config_title,
    energy_line,
    engine_title,
    machine_line,
    planned_bill,
    print_result,
    requests_by_seed,
    settings,
    watch_of,
)
from minivllm.cli.common import JsonObject, load
from minivllm.errors import ConfigError, MinivllmError, shown

if TYPE_CHECKING:
    from minivllm.cli.bench_runs import RequestsBySeed
    from minivllm.config import Loaded

LATE = 20.0  # delay of sending a request in milliseconds from which on the result has a warning
# fewest requests of a run with which the search for the knee (the highest rate that the server keeps up with) is exact
# enough
FEWEST = 24


def serve(args: argparse.Namespace) -> int:
    """Run ``bench serve`` and return its exit code.  ConfigError for wrong arguments, such as a dataset with arrival
    times together with ``--request-rate``."""
    import asyncio

    from minivllm.lab.bench import limits

    check_output(args)
    check_serve(args)
    loaded = None if args.url else load(args)
    planned = limits.planned(loaded) if loaded is not None else None
    requests = requests_by_seed(args, planned)
    paced = args.request_rate or args.find_knee
    if paced and any(request.at is not None for request in requests(args.seed)):
        raise ConfigError(
            f"{args.dataset}: its requests have arrival times (at); leave out --request-rate and --find-knee"
        )
    number = len(requests(args.seed))
    if args.find_knee and number < FEWEST:
        raise ConfigError(f"--find-knee: {number} requests are too few for it; expected at least {FEWEST}")
    return asyncio.run(serve_async(args, requests, loaded))


def check_serve(args: argparse.Namespace) -> None:
    """Raise ConfigError for flags that contradict each other or have no effect."""
    _check_server(args)
    if args.goodput_share > 1:
        raise ConfigError(f"--goodput-share {args.goodput_share:g}: expected a share, above 0 and at most 1")
    rates = len(args.request_rate)
    concurrencies = len(args.max_concurrency)
    if args.find_knee and concurrencies > 1:
        raise ConfigError(f"--find-knee: expected at most one --max-concurrency, not {concurrencies}")
    if args.find_knee and rates > 1:
        raise ConfigError(f"--find-knee: expected at most one --request-rate, where the search begins, not {rates}")
    if rates > 1 and concurrencies > 1:
        raise ConfigError("--request-rate and --max-concurrency: only one of them may have several values")
    if len({name for name, _ in args.goodput}) < len(args.goodput):
        raise ConfigError("--goodput: the same name twice; give each target once")
    if args.burstiness != 1 and not (args.request_rate or args.find_knee):
        raise ConfigError("--burstiness is for arrivals at a --request-rate or with --find-knee; give one of them")
    if args.goodput_share != SHARE and not (args.find_knee and args.goodput):
        raise ConfigError("--goodput-share is for --find-knee with --goodput; leave it out")


def _check_server(args: argparse.Namespace) -> None:
    """Raise ConfigError for flags that do not fit the server or engine that is measured."""
    if args.url and args.direct:
        raise ConfigError("--url is for a running server, --direct for an engine in this process; leave out either")
    if args.url and (args.config or args.set or args.model or args.allow_target or args.hf_overrides):
        flags = "--model, --config, --set, --allow-target and --hf-overrides"
        raise ConfigError(f"--url: the server has a configuration of its own; leave out {flags}")
    if args.direct and args.timeout is not None:
        raise ConfigError(f"--timeout {args.timeout:g} is for answers over HTTP; leave out --timeout or --direct")
    if not args.url and (args.served_model or args.api_key_env):
        raise ConfigError("--served-model and --api-key-env are for --url; add --url, or leave them out")
    if args.api_key_env and not os.environ.get(args.api_key_env):
        raise ConfigError(f"--api-key-env {shown(args.api_key_env)}: no such environment variable; set it to the key")


async def serve_async(args: argparse.Namespace, requests: RequestsBySeed, loaded: Loaded | None) -> int:
    """Measure the server at ``--url``, or the engine of ``loaded``, and return the exit code.

    With ``--direct`` the engine is measured without HTTP.
    """
    from minivllm.lab.bench import state
    from minivllm.lab.bench.client import TIMEOUT, HttpServer
    from minivllm.lab.bench.direct import DirectEngine, started

    extra = {"temperature": args.temperature}
    timeout = args.timeout or TIMEOUT
    if loaded is None:
        server = HttpServer(args.url, args.served_model, os.environ.get(args.api_key_env, ""), extra, timeout)
        name = await server.find_model()
        elsewhere = functools.partial(state.MachineWatch, None)
        return await measure_serve(args, requests, server, elsewhere, f"{name} at {args.url}", None, None)
    if not args.direct:
        with started(loaded) as (url, pid):
            server = HttpServer(url, "", "", extra, timeout)
            await server.find_model()
            watch = watch_of(loaded.engine, _device(loaded), pid)
            bill = planned_bill(loaded, args)
            title = config_title(loaded, "over HTTP")
            return await measure_serve(args, requests, server, watch, title, bill, None)
    from minivllm import AsyncLLM

    async with AsyncLLM(config=loaded) as llm:
        engine = DirectEngine(llm, args.temperature)
        watch = watch_of(llm.config, llm.engine.wiring.device)
        bill = await llm.bill_of_materials() if args.json or args.output_json else None
        title = engine_title(llm, "without HTTP")
        return await measure_serve(args, requests, engine, watch, title, bill, engine.reset)


def _device(loaded: Loaded) -> str:
    """Return the kind of device of a configuration: ``cpu`` or ``cuda``."""
    from minivllm.device.hardware import find_device

    return find_device(loaded.engine.device).kind


async def measure_serve(
    args: argparse.Namespace, requests: Any, server: Any, watch: Any, title: str, bill: Any, reset: Any
) -> int:
    """Measure a server under each load (rate or concurrency), print the result, and return the exit code.

    ``reset`` is awaited before each run; None leaves the server as it is.  MinivllmError if every request failed.
    """
    from minivllm.lab.bench.loads import Bench, OfferedLoad
    from minivllm.lab.bench.repeats import result as make_result

    bench = Bench(server, requests, watch, dict(args.goodput), args.burstiness, args.seed, reset)
    most = max(args.max_concurrency, default=None)
    for _ in range(args.warmups):
        await bench.warm(most or len(requests(args.seed)), most)
    more: JsonObject = {}
    if args.find_knee:
        start = args.request_rate[0] if args.request_rate else 1.0
        more = await bench.knee(start, most, args.goodput_share, args.repeats)
        rows = more.pop("rows")
    else:
        rates = args.request_rate or [None]
        concurrencies = args.max_concurrency or [None]
        loads = [OfferedLoad(rate, concurrency) for rate in rates for concurrency in concurrencies]
        rows = [await bench.row(load, args.repeats) for load in loads]
    runs = [run for row in rows for run in row["repeats"]]
    if all(run["completed"] == 0 for run in runs):
        raise MinivllmError(f"every request failed; the last: {rows[-1]['requests']['errors'][-1]}")
    more["failed"] = sum(run["failed"] for run in runs)
    if len(rows) == 1:
        more |= {key: value for key, value in rows[0].items() if key not in ("repeats", "intervals", "requests")}
        more |= rows[0]["requests"]
    more = {
        "backend": "openai" if args.url else "minivllm",
        "model_id": title,
        "num_prompts": len(requests(args.seed)),
        **more,
    }
    result = make_result("serve", runs, bench.states, settings(args), bill, rows=rows, **more)
    return print_result(result, args, serve_lines(title, rows, result, args))


def serve_lines(title: str, rows: Sequence[JsonObject], result: JsonObject, args: argparse.Namespace) -> list[str]:
    """Return the lines of the printed result: a table of loads, the highest rate of ``--find-knee``, notes."""
    from minivllm.lab.bench.serving import knee_text

    goodput = " goodput/s" if args.goodput else ""
    lines = [
        f"{title}; {result['num_prompts']} requests, {args.repeats} runs; medians, ± half the 95 % interval; "
        "failed: in all runs",
        f"{'rate':>8} {'streams':>7} {'failed':>6} {'requests/s':>14} {'tokens/s':>16} {'TTFT p50':>9} {'p99':>9} "
        f"{'TPOT p50':>9} {'p99':>9} {'E2EL p50':>9} {'p99':>9}{goodput}",
    ]
    lines += [_load_line(row, bool(args.goodput)) for row in rows]
    if "knee" in result:
        lines.append(f"knee: {knee_text(result['knee'], result['knee_below'])}")
    late = max(row["p99_late_ms"] for row in rows)
    open_loop = any(row["request_rate"] != "inf" for row in rows) and not args.max_concurrency
    if late > LATE and open_loop:
        lines.append(f"requests were sent up to {late:.0f} ms late (99th percentile): the client was at its limit")
    if args.url:
        lines.append(
            f"prompts are those of --seed {args.seed}: a server that was asked them before may have them cached"
        )
    if args.dataset and not args.direct:
        lines.append("each run sends the prompts of the file again: a server that caches prefixes finds them")
    states = result["machine_states"]
    energy = energy_line(rows[0] if len(rows) == 1 else result, states)
    return [*lines, energy, machine_line(states)]


def _load_line(row: JsonObject, goodput: bool) -> str:
    """Return the table's line of a load; with ``goodput`` it has the answers per second that met the targets."""
    from minivllm.lab.bench.repeats import with_bounds

    rate = row["request_rate"]
    rate_text = rate if isinstance(rate, str) else f"{rate:.2f}"
    streams = row["max_concurrency"] or "any"
    speeds = f"{with_bounds(row, 'request_throughput', 2):>14} {with_bounds(row, 'output_throughput'):>16}"
    cells = []
    for name in ("ttft", "tpot", "e2el"):
        for percentile in ("median", "p99"):
            ms = row[f"{percentile}_{name}_ms"]
            cells.append(f"{ms:>9.1f}" if math.isfinite(ms) else f"{'-':>9}")
    line = f"{rate_text:>8} {streams:>7} {row['failed']:>6} {speeds} {' '.join(cells)}"
    if goodput:
        line += f" {with_bounds(row, 'request_goodput', 2)}"
    if row.get("beyond"):
        line += "  not kept up with"
    return line
