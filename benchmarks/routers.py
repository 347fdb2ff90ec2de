"""Compare routers on a trace: prefix hits of N replicas against one large cache, and times to the first token.

    python benchmarks/routers.py TRACE [prefix round-robin ...] [--replicas 4] [--blocks 2000,8000,30000]

The routers are those of the server.  A replica computes ``--speed`` prompt tokens a second, one prompt after the other,
and a request runs ``--tpot`` seconds for each output token after that.  Hits are counted by the cache simulator
(``lab/replay/blocks.py``) with the evictor lru.  One large cache has the blocks of all replicas, and computes as fast
as all of them.
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from minivllm.config import load_config
from minivllm.core.interfaces.router import ReplicaLoad, RoutedRequest, RouterContext
from minivllm.lab.replay.blocks import run_cache
from minivllm.lab.traces.read import read_trace
from minivllm.lab.traces.trace import Trace
from minivllm.plugins.evictor.lru import Lru
from minivllm.plugins.router.prefix import Prefix
from minivllm.server.replicas.routing import Routing


@dataclass
class Machine:
    """The queue of one replica and the content of its cache."""

    free: float = 0.0  # time at which its last prompt is computed
    requests: int = 0
    tokens: int = 0
    waiting: int = 0
    chains: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """The results of a router."""

    rate: float  # share of all blocks that were hit
    ttft: np.ndarray  # f64 [n] seconds
    requests: list[int]  # of each replica


def routing_of(name: str, options: dict | None = None) -> Routing:
    """Return the router of a server with some replicas."""
    server = {"replicas": 2, "router": name, "router_options": options or {}}
    return Routing(load_config(keywords={"server": server}, environ={}))


def simulate(
    trace: Trace, routing: Routing, replicas: int, blocks: int, speed: float, tpot: float, pace: float = 1.0
) -> Outcome:
    """Route a trace whose arrivals are ``pace`` times as fast as recorded."""
    block = trace.unit or 16
    routing.start(RouterContext(replicas, block, blocks))
    cached = Prefix(type("Options", (), {"remember": 1.0})(), RouterContext(replicas, block, blocks))
    machines = [Machine() for _ in range(replicas)]
    ends: list[tuple[float, bool, int, int]] = []  # time, whether the request ends, replica, prompt tokens
    ttft = np.zeros(len(trace))
    for i, (arrival, prompt, output) in enumerate(zip(trace.arrival / pace, trace.prompt, trace.output, strict=True)):
        while ends and ends[0][0] <= arrival:
            _, over, at, tokens = heapq.heappop(ends)
            machines[at].waiting -= 0 if over else tokens
            machines[at].requests -= over
            machines[at].tokens -= tokens if over else 0
        chain = trace.chain(i, block)
        request = RoutedRequest(int(prompt), "", lambda chain=chain: chain)
        loads = [ReplicaLoad(k, one.requests, one.tokens, one.waiting) for k, one in enumerate(machines)]
        number = routing.choose(request, loads)
        routing.sent(request, number)
        left = max(1, int(prompt) - block * cached.matched(chain, number))
        cached.sent(request, number)
        one = machines[number]
        one.free = max(one.free, arrival) + left / speed
        ttft[i] = one.free - arrival
        one.requests += 1
        one.tokens += int(prompt)
        one.waiting += int(prompt)
        one.chains.append(chain)
        heapq.heappush(ends, (one.free, False, number, int(prompt)))
        heapq.heappush(ends, (one.free + tpot * output, True, number, int(prompt)))
    assert not routing.faults
    runs = [run_cache(one.chains, blocks, block, lambda ctx: Lru(None, ctx)) for one in machines]
    hits, requested = (sum(int(getattr(run, name).sum()) for run in runs) for name in ("hits", "requested"))
    return Outcome(hits / max(1, requested), ttft, [len(one.chains) for one in machines])


def one_cache(trace: Trace, blocks: int) -> float:
    """Return the hit rate of one cache that serves all requests."""
    block = trace.unit or 16
    chains: Sequence[list[int]] = [trace.chain(i, block) for i in range(len(trace))]
    return run_cache(chains, blocks, block, lambda ctx: Lru(None, ctx)).rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("routers", nargs="*", default=["prefix", "least-tokens", "round-robin"])
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--blocks", default="2000,8000,30000")
    parser.add_argument("--speed", type=float, default=16000)
    parser.add_argument("--tpot", type=float, default=0.03)
    parser.add_argument("--pace", type=float, default=1.0)
    args = parser.parse_args()
    trace = read_trace(args.trace)
    for blocks in map(int, args.blocks.split(",")):
        large = one_cache(trace, args.replicas * blocks)
        for name in args.routers:
            found = simulate(trace, routing_of(name), args.replicas, blocks, args.speed, args.tpot, args.pace)
            line = {
                "blocks": blocks,
                "router": name,
                "hits": round(found.rate, 4),
                "of_one_cache": round(found.rate / large, 4) if large else None,
                "ttft_mean": round(float(found.ttft.mean()), 2),
                "ttft_p99": round(float(np.quantile(found.ttft, 0.99)), 2),
                "requests": found.requests,
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
