"""Replay choices between loading blocks from a tier and computing them: each request is served both ways.

The store is memory with a limited speed.  A choice is right if the other way took longer, and close if its way took at
most 10 % longer.  Times are medians of --repeats.

python benchmarks/tier_choices.py [--choices 200] [--repeats 3] [--speeds 20 60 120 250 1000]
python benchmarks/tier_choices.py --model DIR --load-format dummy --prompts 500 4000 --blocks 2000 --bytes 8e9 \\
    --speeds 1500 3000 6000 12000 40000
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from minivllm import LLM, SamplingParams
from minivllm.plugin import Spec
from minivllm.plugins.kvstore.cpu import CpuStore

CLOSE = 1.1
ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


class SlowStore(CpuStore):
    """A store in memory that returns ``speed`` bytes per second."""

    spec = Spec(
        "__main__:SlowStore", (1, 0), "memory of a limited speed",
        options="minivllm.plugins.kvstore.options:CpuStoreOptions",
    )  # fmt: skip
    speed = 1e9

    def get(self, key: bytes) -> np.ndarray | None:
        begun, page = time.monotonic(), super().get(key)
        end = begun + (0 if page is None else page.nbytes / self.speed)
        while time.monotonic() < end:
            time.sleep(max(0.0, end - time.monotonic()))
        return page


class Forced:
    """Replaces ``LoadChoice.loads``.  It notes the choice, and returns the opposite if set."""

    def __init__(self, choice: Any) -> None:
        self.choice, self.real = choice, choice.loads
        self.forced: bool | None = None
        self.chosen = False
        self.facts: dict[str, float] = {}

    def __call__(self, own: Any, sizes: Any, tokens: int, others: int = 0) -> bool:
        if self.forced is not None:
            return self.forced
        self.facts = {"load": self.choice.seconds_to_load(sizes), "tokens": tokens}
        self.facts["compute"] = tokens * (self.choice.token_seconds or 0.0)
        self.chosen = self.real(own, sizes, tokens, others)
        return self.chosen


def serve(llm: LLM, prompt: list[int]) -> float:
    """Return the seconds to the first token of a prompt whose blocks only the tier has."""
    for pool in llm.engine.cache.pools:
        pool.reset()
    start = time.perf_counter()
    llm.generate({"prompt_token_ids": prompt}, ONE, use_tqdm=False)
    return time.perf_counter() - start


def at_speed(speed: float, count: int, seed: int, args: argparse.Namespace) -> int:
    """Return the number of right or close choices of ``count``, with a store of ``speed`` bytes per second."""
    rng, good, repeats = random.Random(seed), 0, args.repeats
    SlowStore.speed = speed
    store = {"name": "__main__:SlowStore", "options": {"bytes": int(args.bytes), "eager": True}}
    options: dict[str, Any] = {"num_kvcache_blocks": args.blocks, "max_model_len": args.prompts[1] + 64}
    if args.load_format is not None:
        options |= {"load_format": args.load_format, "skip_tokenizer_init": True}
    with LLM(args.model, kvstore=store, allow_targets=["__main__"], **options) as llm:
        choice = llm.engine.cache.tiers.choice
        forced = choice.loads = Forced(choice)
        for number in range(-8, count):  # the first are not counted, because no time was measured yet
            prompt = [rng.randrange(100, 2000) for _ in range(rng.randrange(*args.prompts))]
            forced.forced = False
            serve(llm, prompt)
            while llm.engine.cache.tiers.active:
                llm.engine.step()
            forced.forced = None
            first = serve(llm, prompt)
            loads = forced.chosen
            times = {True: [], False: []}
            times[loads].append(first)
            for way in [True, False] * repeats:
                forced.forced = way
                times[way].append(serve(llm, prompt))
            mine, other = median(times[loads]), median(times[not loads])
            fine = mine <= CLOSE * other
            if number >= 0:
                good += fine
                if args.show and not fine:
                    facts = {name: round(1e3 * value, 2) for name, value in forced.facts.items()}
                    print(f"  {len(prompt)} tokens, loads={loads}: {1e3 * mine:.1f} ms, else {1e3 * other:.1f}", facts)
        figures = llm.stats()["tier_choice"]
        names = ("loaded", "computed", "predicted_seconds", "measured_seconds", "error_seconds")
        print("  " + ", ".join(f"{name} {figures[name]:.4g}" for name in names))
    return good


def main() -> None:
    """Print the number of right choices at each speed, and in all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--load-format")
    parser.add_argument("--choices", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--speeds", type=float, nargs="+", default=[20, 60, 120, 250, 1000])
    parser.add_argument("--prompts", type=int, nargs=2, default=[40, 900], help="range of the lengths of prompts")
    parser.add_argument("--blocks", type=int, default=400, help="blocks of the KV cache")
    parser.add_argument("--bytes", type=float, default=1 << 30, help="bytes of the store")
    parser.add_argument("--show", action="store_true", help="print each wrong choice")
    args = parser.parse_args()
    total, each = 0, args.choices // len(args.speeds)
    for seed, speed in enumerate(args.speeds):
        good = at_speed(speed * 1e6, each, seed, args)
        total += good
        print(f"{speed:6g} MB/s: {good} of {each} right or within 10 %", flush=True)
    print(f"{total} of {each * len(args.speeds)} right or within 10 %")


if __name__ == "__main__":
    main()
