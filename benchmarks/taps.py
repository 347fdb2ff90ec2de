"""Measure the time of taps in a decode step.

    python benchmarks/taps.py --model DIR --load-format dummy --rows 1 64 256

Steps have no taps, one row that reads a layer, all rows reading it, or all rows steered there.  The time of a step is
that of 256 tokens minus that of 128, over 128, so that prompts and captures do not count.  It is the median of
``--repeat`` in turns.
"""

from __future__ import annotations

import argparse
import random
import time

import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--point", default="", help="default: the residual stream behind the middle layer")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()

    from minivllm import LLM, SamplingParams, Tap

    llm = LLM(model=args.model, load_format=args.load_format, skip_tokenizer_init=True, max_tap_bytes=1 << 33)
    points = llm.tap_points()
    residuals = [name for name in points if name.endswith(".residual")]
    point = args.point or residuals[len(residuals) // 2]
    read = [Tap(point, read=True)]
    steered = [Tap(point, add=np.full(points[point], 1e-3))]
    ways = {
        "none": lambda n: [[]] * n,
        "one reads": lambda n: [read, *[[]] * (n - 1)],
        "all read": lambda n: [read] * n,
        "all steered": lambda n: [steered] * n,
    }
    rng = random.Random(0)

    def seconds(rows: int, tokens: int, taps: list) -> float:
        prompts = [[rng.randrange(5, 1000) for _ in range(64)] for _ in range(rows)]
        params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=tokens, detokenize=False)
        begun = time.perf_counter()
        llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False, taps=taps)
        return time.perf_counter() - begun

    print(f"milliseconds of a decode step, {point}")
    print("  rows" + "".join(f"{name:>16}" for name in ways))
    for rows in args.rows:
        found = {name: [] for name in ways}
        for taps in ways.values():  # captures and compilations of the first run do not count
            seconds(rows, 128, taps(rows))
            seconds(rows, 256, taps(rows))
        for _ in range(args.repeat):
            for name, taps in ways.items():
                short = seconds(rows, 128, taps(rows))
                found[name].append((seconds(rows, 256, taps(rows)) - short) / 128 * 1e3)
        best = {name: sorted(values)[len(values) // 2] for name, values in found.items()}
        line = "".join(f"{ms:8.3f} ({ms / best['none']:5.3f})" for ms in best.values())
        print(f"{rows:6}{line}", flush=True)


if __name__ == "__main__":
    main()
