"""Measure the time of the host in steps with drafts: planning, publishing, and a whole turn of the loop.

    python benchmarks/drafted_host.py --rows 1 8 64 256 --k 4

The executor ``sim`` makes up tokens, and its time is not counted.  A line for each number of rows shows microseconds of
a step with drafts: the lower quartile of all steps, so that other work on the machine has little effect.
"""

from __future__ import annotations

import argparse
import statistics
import time

from minivllm.testing.sim import request, sim_engine


def measured(rows: int, k: int, accepted: float, tokens: int) -> dict[str, float]:
    """Return the lower quartiles of the parts of a step in microseconds."""
    longest = tokens + 24
    blocks = rows * (longest // 16 + 4) + 2
    engine = sim_engine(slots=rows, blocks=blocks, block=16, max_len=longest, budget=2048, drafts=k)
    sim = engine.executor
    sim.options.check, sim.options.drafts_accepted = False, accepted
    parts: dict[str, list[float]] = {"plan": [], "publish": [], "turn": []}
    away = 0.0

    def timed(owner, name, part):
        call = getattr(owner, name)

        def run(*args):
            nonlocal away
            begun = time.perf_counter()
            try:
                return call(*args)
            finally:
                spent = time.perf_counter() - begun
                if part:
                    parts[part].append(spent)
                else:
                    away += spent

        setattr(owner, name, run)

    timed(engine, "plan", "plan")
    timed(engine, "_publish", "publish")
    timed(sim, "submit", "")
    timed(sim, "collect", "")
    for i in range(rows):
        prompt = [i % 50, i // 50, *range(6)]  # rows with equal prompts would share blocks
        request(engine, str(i), prompt, max_tokens=tokens, ignore_eos=True)
    while engine.busy:
        begun, away = time.perf_counter(), 0.0
        engine.step()
        parts["turn"].append(time.perf_counter() - begun - away)
    return {name: 1e6 * statistics.quantiles(times, n=4)[0] for name, times in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--accepted", type=float, default=0.77, help="share of right drafts")
    parser.add_argument("--tokens", type=int, default=400)
    args = parser.parse_args()
    for rows in args.rows:
        found = measured(rows, args.k, args.accepted, args.tokens)
        print(f"{rows:4} rows  " + "  ".join(f"{name} {us:7.0f}" for name, us in found.items()), flush=True)


if __name__ == "__main__":
    main()
