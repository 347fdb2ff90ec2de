"""Measure KV compression: tokens per second and requests at the same time with a full cache, and the cost of scores.

    python benchmarks/compression.py --model DIR --load-format dummy --prompt 16000 --tokens 512 --requests 24 \\
        --cache 160000 --budgets 0.5 0.25 --scorers knorm snapkv

The first part runs all requests through a KV cache of --cache tokens, and counts the rows that run at the same time.
The second part times --alone prompts with two tokens each, in turns without and with a scorer, and takes medians.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from minivllm import LLM, SamplingParams


def prompts(count: int, length: int, seed: int) -> list[dict[str, list[int]]]:
    """Return ``count`` random prompts of ``length`` tokens."""
    rng = random.Random(seed)
    return [{"prompt_token_ids": [rng.randrange(10000) for _ in range(length)]} for _ in range(count)]


def start(args: argparse.Namespace, scorer: str, tokens: int, rows: int) -> LLM:
    """Return an engine with a compressor and a KV cache of ``tokens`` tokens."""
    options = json.loads(args.options)
    block = options.get("kvcache_block_size", 256)
    return LLM(
        args.model,
        load_format=args.load_format,
        skip_tokenizer_init=True,
        compressor=scorer,
        num_kvcache_blocks=tokens // block,
        kvcache_block_size=block,
        max_num_seqs=max(rows, 1),
        max_model_len=args.prompt + args.tokens,
        **{name: value for name, value in options.items() if name != "kvcache_block_size"},
    )


def crowd(llm: LLM, args: argparse.Namespace, budget: float, seed: int) -> tuple[float, int, float]:
    """Return tokens per second, the most rows that run at the same time, and their mean over the steps."""
    params = SamplingParams(
        temperature=0.6, ignore_eos=True, max_tokens=args.tokens, detokenize=False, kv_budget=budget
    )
    running: list[int] = []
    step = llm.engine.step

    def watched() -> object:
        result = step()
        running.append(len(llm.engine.slots.running))
        return result

    llm.engine.step = watched
    begun = time.perf_counter()
    outputs = llm.generate(prompts(args.requests, args.prompt, seed), params, use_tqdm=False)
    spent = time.perf_counter() - begun
    llm.engine.step = step
    assert all(len(output.tokens) == args.tokens for output in outputs), outputs[0].error
    return args.requests * args.tokens / spent, max(running), sum(running) / len(running)


def prefill(llm: LLM, args: argparse.Namespace, budget: float, seed: int) -> float:
    """Return the seconds of --alone prompts with two tokens each."""
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=2, detokenize=False, kv_budget=budget)
    begun = time.perf_counter()
    llm.generate(prompts(args.alone, args.prompt, seed), params, use_tqdm=False)
    return time.perf_counter() - begun


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--prompt", type=int, default=16000)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--requests", type=int, default=24, help="requests of the first part; 0 leaves it out")
    parser.add_argument("--cache", type=int, default=160000, help="tokens in the KV cache")
    parser.add_argument("--alone", type=int, default=2, help="prompts of the second part; 0 leaves it out")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.5, 0.25])
    parser.add_argument("--scorers", nargs="+", default=["knorm", "snapkv"])
    parser.add_argument("--options", default="{}", help="further options of the engine, as JSON")
    args = parser.parse_args()
    base = 0.0
    for scorer in args.scorers:
        with start(args, scorer, args.cache, args.requests) as llm:
            prefill(llm, argparse.Namespace(**{**vars(args), "alone": 1}), 0.25, 1)
            budgets = args.budgets if base else [0.0, *args.budgets]
            for budget in budgets if args.requests else []:
                rate, most, mean = crowd(llm, args, budget, 2)
                base = base or rate
                facts = f"{rate:8.1f} tok/s ({rate / base:.2f} x), rows at most {most}, on average {mean:.1f}"
                print(f"{scorer:10} budget {budget:4}: {facts}", flush=True)
            times: dict[float, list[float]] = {0.0: [], 0.25: []}
            for turn in range(args.repeat if args.alone else 0):
                for budget, found in times.items():
                    found.append(prefill(llm, args, budget, 10 + 2 * turn + bool(budget)))
            if args.alone:
                plain, scored = (1e3 * median(found) for found in times.values())
                print(
                    f"{scorer:10} prefill {plain:.1f} ms, with scores and moves {scored:.1f} ms ({scored / plain:.3f})"
                )


if __name__ == "__main__":
    main()
