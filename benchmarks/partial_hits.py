"""Count the prefix hits of a trace with and without hits that end inside a block (``partial_prefix_hits``).

Each request is served with its prompt and one token, so that only the cache matters.

python benchmarks/partial_hits.py TRACE [--requests 3000] [--block 512 64] [--tokens 200000 800000 3200000]
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from minivllm.lab.replay.serve import ServeRun, ServeSizes, serve
from minivllm.lab.traces.read import read_trace
from minivllm.lab.traces.trace import Trace
from minivllm.plugins.evictor.lru import Lru
from minivllm.plugins.scheduler.fcfs import Fcfs


def run(trace: Trace, block: int, tokens: int, partial: bool) -> ServeRun:
    """Serve the prompts of a trace one after the other, with a cache of ``tokens`` tokens."""
    longest = int(trace.prompt.max()) + 1
    sizes = ServeSizes(1, longest, longest, block, tokens // block, partial=partial)
    return serve(trace, sizes, lambda ctx: Fcfs(None, ctx), lambda ctx: Lru(None, ctx), seconds_per_step=0.0)


def main() -> None:
    """Print a line for each block size and cache."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace")
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--block", type=int, nargs="+", default=[512, 64])
    parser.add_argument("--tokens", type=int, nargs="+", default=[200_000, 800_000, 3_200_000])
    args = parser.parse_args()
    trace = read_trace(args.trace).part(0, args.requests)
    trace = replace(trace, output=np.ones_like(trace.output))
    print("block   cache tokens   hits % without   with   evictions without     with")
    for block in args.block:
        for tokens in args.tokens:
            without, with_ = (run(trace, block, tokens, partial) for partial in (False, True))
            hits = [100 * one.hit_rate for one in (without, with_)]
            line = f"{block:5} {tokens:14,} {hits[0]:16.2f} {hits[1]:6.2f} {without.evictions:19,} {with_.evictions:8,}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
