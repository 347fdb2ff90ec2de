"""Measure times to first tokens of an engine that has just started, and of the same engine a little later.

    python benchmarks/early_tokens.py --model DIR --load-format dummy [--trace synthetic:like=chat,requests=100]

Each round serves the trace in real time, with other contents.  The first round has kinds of steps that have not run
before.  A line for each round shows the seconds until the engine was ready, and then milliseconds of times to first
token and per token.
"""

from __future__ import annotations

import argparse
import time

from minivllm import LLM
from minivllm.lab.simulate.cases import run_really
from minivllm.lab.simulate.figures import figures
from minivllm.lab.traces.read import read_trace

SHOWN = ("mean_ttft_ms", "p50_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--trace", default="synthetic:like=azure-conversation,requests=100")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    begun = time.perf_counter()
    options = {"skip_tokenizer_init": True, "tensor_parallel_size": args.tensor_parallel_size}
    with LLM(args.model, load_format=args.load_format, **options) as llm:
        ready = time.perf_counter() - begun
        for i in range(args.rounds):
            found = figures(run_really(llm.engine, read_trace(f"{args.trace},seed={i + 1}")), {}, {})
            reported = ", ".join(f"{name} {found[name]:.2f}" for name in SHOWN)
            print(f"round {i + 1}: ready {ready:.1f} s, {reported}", flush=True)


if __name__ == "__main__":
    main()
