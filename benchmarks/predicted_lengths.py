"""Shortest predicted job first, by the error of the predicted lengths: first tokens and last tokens of a trace.

    python benchmarks/predicted_lengths.py AzureLLMInferenceTrace_conv.csv --requests 5000 --rate 3

The engine's planner, cache and policies run on a virtual clock with assumed costs of a model of 8B: a decode step takes
7 ms and 0.05 ms for each row, a prompt token takes 0.05 ms.  A row of the table is a scheduler and a predictor.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from minivllm.config import load_config
from minivllm.lab.simulate import cases
from minivllm.lab.traces.read import read_trace
from minivllm.plugins.executor.costs import SLOPES, BrokenLine, CostTable, PromptCosts

SIZES = {
    "kvcache_block_size": 16, "num_kvcache_blocks": 20_000, "max_model_len": 16_384, "max_num_seqs": 64,
    "max_num_batched_tokens": 2048, "depth": 0, "windows": [None],
}  # fmt: skip
NOTHING = dict.fromkeys(SLOPES, 0.0)
PROMPTS = PromptCosts(BrokenLine([1, 2048], [0.0071, 0.1094]), {"row": 5e-5, "kv": 0.0, "pairs": 0.0, "chunk": 0.0})
COSTS = CostTable(BrokenLine([0, 1, 64], [0.007, 0.00705, 0.0102]), PROMPTS, PROMPTS, 0, NOTHING, engine=SIZES)
NOISES = (0.0, 0.25, 0.5, 1.0, 2.0)


def ways(wait: float, ageing: float) -> list[tuple[str, list[str]]]:
    """Return (name, settings) of each row of the table."""
    shortest = ["scheduler=shortest-job", f"scheduler.options.max_wait={wait}", f"scheduler.options.ageing={ageing}"]
    found = [("fcfs", ["scheduler=fcfs"])]
    for noise in NOISES:
        oracle = ["predictor=oracle", f"predictor.options.noise={noise}"]
        found.append((f"shortest-job, oracle, noise {noise:g}", [*shortest, *oracle]))
    for name in ("prompt", "history"):
        found.append((f"shortest-job, {name}", [*shortest, f"predictor={name}"]))
    return found


def main() -> None:
    """Print a table of the simulated runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--rate", type=float, default=1.0, help="factor of the rate of arrivals")
    parser.add_argument("--max-wait", type=float, default=300.0, help="option max_wait of shortest-job, in seconds")
    parser.add_argument("--ageing", type=float, default=50.0, help="option ageing of shortest-job")
    args = parser.parse_args()
    trace = cases.at_rate(read_trace(args.trace).part(0, args.requests), args.rate)
    print("| scheduler, predictor | first token: mean s | p99 | last token: mean s | p50 | p99 |")
    print("|---|---|---|---|---|---|")
    for name, sets in ways(args.max_wait, args.ageing):
        loaded = load_config([], [*(f"{key}={value}" for key, value in SIZES.items() if key.startswith("max_")), *sets])
        (case,) = cases.cases([(name, loaded)], COSTS, print)
        begin = time.perf_counter()
        run = cases.simulate(case, trace, COSTS)
        first, last = run.first - run.arrival, run.finished - run.arrival
        served = np.isfinite(last)
        cells = [first[served].mean(), np.percentile(first[served], 99), last[served].mean()]
        cells += [np.percentile(last[served], q) for q in (50, 99)]
        shown = " | ".join(f"{cell:.2f}" for cell in cells)
        print(f"| {name} | {shown} |", flush=True)
        seconds = time.perf_counter() - begin
        print(f"  {int((~served).sum())} failed, {run.preemptions} preempted, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
