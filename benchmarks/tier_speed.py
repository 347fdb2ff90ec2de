"""Measure prefixes that return from a tier: the time to the first token against computing, and the speed of copies.

    python benchmarks/tier_speed.py --model DIR --load-format dummy --prompt 4096 --tier cpu --bytes 16e9

Each prompt is computed, stored, removed from the device, and sent again.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from minivllm import LLM, SamplingParams

ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)


def settle(llm: LLM) -> None:
    """Run the engine until no page moves."""
    while llm.engine.cache.tiers.active:
        llm.engine.step()


def first_token(llm: LLM, prompts: list[list[int]]) -> float:
    """Return the seconds until each prompt has one token."""
    begun = time.perf_counter()
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], ONE, use_tqdm=False)
    return time.perf_counter() - begun


def forget(llm: LLM) -> None:
    """Remove all prefixes from the device."""
    for pool in llm.engine.cache.pools:
        pool.reset()


def main() -> None:
    """Print the times to the first token and the counters of the tier."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--tier", choices=["cpu", "disk"], default="cpu")
    parser.add_argument("--bytes", type=float, default=16e9)
    parser.add_argument("--path", default="/tmp/minivllm-tier")
    parser.add_argument("--options", default="{}", help="further options of the engine, as JSON")
    args = parser.parse_args()
    options: dict[str, Any] = {"bytes": int(args.bytes), "eager": True}
    if args.tier == "disk":
        options["path"] = args.path
    rng = random.Random(1)
    made = [[rng.randrange(10000) for _ in range(args.prompt)] for _ in range(args.count)]
    begun = time.perf_counter()
    with LLM(
        args.model,
        load_format=args.load_format,
        skip_tokenizer_init=True,
        max_model_len=args.prompt + 256,
        kvstore={"name": args.tier, "options": options},
        **json.loads(args.options),
    ) as llm:
        print(f"ready after {time.perf_counter() - begun:.1f} s", flush=True)
        first_token(llm, [[7] * args.prompt])
        computed = []
        for prompt in made:
            computed.append(first_token(llm, [prompt]))
            settle(llm)
        for turn in range(2):
            forget(llm)
            loaded = [first_token(llm, [prompt]) for prompt in made]
            ratio = median(computed) / median(loaded)
            facts = f"computed {1e3 * median(computed):.1f} ms, loaded {1e3 * median(loaded):.1f} ms, {ratio:.1f} x"
            print(f"turn {turn}: first token of {args.prompt} tokens: {facts}", [round(1e3 * x, 1) for x in loaded])
        forget(llm)
        together = first_token(llm, made)
        print(f"{args.count} at once from the tier: {1e3 * together:.1f} ms")
        print(json.dumps({name: llm.stats()[name] for name in ("tiers", "tier_choice")}, default=str))


if __name__ == "__main__":
    main()
