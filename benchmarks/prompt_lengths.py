"""Time to the first token of one prompt, over lengths of the prompt; fail at a cliff.

python benchmarks/prompt_lengths.py --model DIR --load-format dummy
python benchmarks/prompt_lengths.py --lengths 16 32 64 128 256 512

The exit status is 1 if a prompt with at most twice the tokens of a shorter one takes more than max(2, 1.3 x the ratio
of their flops) times as long.  The lengths 2^k + 1 show the cliffs behind sizes for which an engine prepares its steps.
Each prompt is new, so that no prefix is cached.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from typing import NamedTuple

import numpy as np

from minivllm import LLM, SamplingParams
from minivllm.device.worker.step_costs import pair_flops

LENGTHS = [n + more for n in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384) for more in (0, 1)] + [32000]
LEAST_RATIO = 2.0  # ratio of the times of two prompts below which there is no cliff
SLACK = 1.3  # factor by which the ratio of the times may exceed the ratio of the flops


class PromptTime(NamedTuple):
    """The times of a prompt length: the first run and the median of the others, in milliseconds."""

    tokens: int
    flops: float
    first_ms: float
    ms: float


def cliffs(found: list[PromptTime]) -> list[str]:
    """Return a text for each pair of lengths, ascending, at which the time grows by too much."""
    texts = []
    for a, b in itertools.combinations(found, 2):
        if b.tokens > 2 * a.tokens:
            continue
        most = max(LEAST_RATIO, SLACK * b.flops / a.flops)
        if b.ms > most * a.ms:
            texts.append(
                f"{b.tokens} tokens take {b.ms:.1f} ms, {b.ms / a.ms:.2f} times as long as {a.tokens} tokens "
                f"({a.ms:.1f} ms); expected at most {most:.2f} times as long"
            )
    return texts


def measure(llm: LLM, lengths: list[int], repeat: int) -> list[PromptTime]:
    """Return the times of prompts of random tokens with ``lengths`` tokens, each ``repeat`` times after a first one."""
    worker = llm.engine.executor.runner.worker
    each, pair = 2.0 * worker.weight_bytes / worker.parts.dtype.itemsize, pair_flops(worker.parts.layers)
    random = np.random.default_rng(0)
    params = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False)
    found = []
    for n in lengths:
        times = []
        for _ in range(repeat + 1):
            prompt = random.integers(10, worker.vocab_size, n).tolist()
            begun = time.perf_counter()
            (out,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
            times.append(1e3 * (time.perf_counter() - begun))
            assert out.error is None, out.error
        flops = each * n + pair * n * (n + 1) / 2
        found.append(PromptTime(n, flops, times[0], statistics.median(times[1:])))
        row = found[-1]
        print(
            f"{n:6} tokens  first {row.first_ms:9.2f} ms  median {row.ms:9.2f} ms  {1e3 * row.ms / n:8.2f} us a token"
        )
    return found


def main() -> None:
    """Measure the lengths of the command line, and exit with 1 at a cliff."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--repeat", type=int, default=9)
    args = parser.parse_args()
    lengths = sorted(set(args.lengths))
    if lengths[0] < 1 or args.repeat < 1:
        parser.error("--lengths and --repeat: expected numbers from 1 on")
    options = dict(max_model_len=lengths[-1] + 1, skip_tokenizer_init=True, enable_prefix_caching=False)
    with LLM(args.model, load_format=args.load_format, device=args.device, executor="local", **options) as llm:
        measure(llm, lengths[:1], 1)  # warm up
        found = cliffs(measure(llm, lengths, args.repeat))
    if found:
        print("\n".join(found), file=sys.stderr)
        raise SystemExit(1)
    print("no cliff")


if __name__ == "__main__":
    main()
