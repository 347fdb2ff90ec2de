"""Compare evictors on agents beside single requests: the tokens that the turns of sessions have to compute.

Agents call tools that take seconds, and come back; single requests with long prompts push their blocks out meanwhile.
The trace is generated, the cache and the planner are the engine's, and the device only counts.

python benchmarks/sessions.py [--seeds 3] [--blocks 1400] [--budget 2048]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from minivllm.core.interfaces.evictor import Evictor
from minivllm.lab.replay.serve import MakeEvictor, ServeRun, ServeSizes, serve
from minivllm.lab.traces.read import read_trace
from minivllm.lab.traces.trace import Trace
from minivllm.plugins.evictor import options as kinds
from minivllm.plugins.evictor import spec as specs
from minivllm.plugins.scheduler.fcfs import Fcfs
from minivllm.registration.spec import Spec

TRACE = (
    "synthetic:like=agent,requests={requests},seed={seed},rate={rate},single={single},node=1500,question=200,answer=40,turns=20,"
    "longest=9000"
)
BLOCK = 32


def maker(spec: Spec, options: object = None) -> MakeEvictor:
    """Return a function that constructs an evictor of the package."""
    module, _, name = spec.impl.partition(":")
    cls: type[Evictor] = getattr(__import__(module, fromlist=[name]), name)
    return lambda ctx: cls(options, ctx)


def evictors(budget: int) -> dict[str, MakeEvictor]:
    """Return the compared evictors by name."""
    return {
        "lru": maker(specs.LRU),
        "s3fifo": maker(specs.S3FIFO, kinds.S3FifoOptions()),
        "cost-aware": maker(specs.COST_AWARE, kinds.CostAwareOptions()),
        "tail-lru": maker(specs.TAIL_LRU, kinds.TailLruOptions(budget=budget, prompt=600)),
        "agent-ttl": maker(specs.AGENT_TTL, kinds.AgentTtlOptions()),
    }


def run(trace: Trace, blocks: int, evictor: MakeEvictor) -> ServeRun:
    """Serve a trace, and return its results."""
    longest = int((trace.prompt + trace.output).max())
    sizes = ServeSizes(64, 4096, longest, BLOCK, blocks)
    return serve(trace, sizes, lambda ctx: Fcfs(None, ctx), evictor, seconds_per_step=0.05)


def later_turns(trace: Trace) -> np.ndarray:
    """Return bool [n]: the requests of a session that are not its first."""
    _, first = np.unique(trace.session, return_index=True)
    later = trace.session >= 0
    later[first] = False
    return later


def row(name: str, runs: list[ServeRun], traces: list[Trace], budget: int) -> str:
    """Return the line of an evictor: means over the seeds."""
    computed = np.concatenate([(r.prompt - r.cached)[later_turns(t)] for r, t in zip(runs, traces, strict=True)])
    hits = np.mean([r.hit_rate for r in runs])
    p50, p90, p99 = np.percentile(computed, (50, 90, 99))
    late = 100 * np.mean(computed > budget)
    return f"{name:12} {100 * hits:6.1f} {computed.mean():7.0f} {p50:6.0f} {p90:6.0f} {p99:6.0f} {late:6.1f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--single", type=float, default=0.95)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1000, 1400])
    parser.add_argument("--budget", type=int, default=2048)
    args = parser.parse_args()
    facts = {"requests": args.requests, "rate": args.rate, "single": args.single}
    texts = [TRACE.format(**facts, seed=seed) for seed in range(1, args.seeds + 1)]
    traces = [read_trace(text) for text in texts]
    for blocks in args.blocks:
        print(f"{blocks} blocks of {BLOCK}; later turns of sessions: computed tokens, and % above {args.budget}")
        print(f"{'evictor':12} {'hits %':>6} {'mean':>7} {'p50':>6} {'p90':>6} {'p99':>6} {'late %':>6}")
        for name, make in evictors(args.budget).items():
            print(row(name, [run(trace, blocks, make) for trace in traces], traces, args.budget), flush=True)


if __name__ == "__main__":
    main()
