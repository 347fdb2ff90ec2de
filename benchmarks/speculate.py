"""Measure the gain of speculative decoding in tokens per second, without and with drafts in turns.

    python benchmarks/speculate.py                       # pocket on this machine: stories and copies
    python benchmarks/speculate.py --device cuda --model DIR --draft DIR --batches 1,4,16,64
    python benchmarks/speculate.py --head pocket-mtp --clock cpu --k 3,4,6 --turns 8       # drafts of a head

The table is by drafter and batch size.  Stories are open text, for the draft model and the head.  Copies are texts to
repeat, for prompt lookup; a head of stories guesses none of their words.  The time is the sum over the prompts of the
best of several turns.  The cost ratio is the time of a step of the draft model over that of the model, at batch 1.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from minivllm import LLM, SamplingParams
from minivllm.pocket.tasks import cases

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
STORIES = ("a fox", "a red ball", "a boat", "the rain", "a lost key", "a dog", "a cake", "the forest")


def prompts(kind: str, n: int) -> list[list[dict[str, str]]]:
    if kind == "copies":
        return [case.messages for case in cases("copy", n, words=(32, 40))]
    return [[{"role": "user", "content": f"Tell me a story about {STORIES[i % len(STORIES)]}."}] for i in range(n)]


def make(args: argparse.Namespace, drafter: Any, k: int) -> LLM:
    return LLM(
        args.model,
        device=args.device,
        dtype=args.dtype,
        drafter=drafter,
        num_speculative_tokens=k,
        speculate="auto" if args.auto else "always",
        max_num_seqs=max(args.batches),
        enable_prefix_caching=False,
        num_kvcache_blocks=max(args.batches) * 64,
    )


def timed(args: argparse.Namespace, llm: LLM, chats: list, params: SamplingParams) -> tuple[float, list]:
    clock = CLOCKS[args.clock]
    start = clock()
    outs = llm.chat(chats, params, use_tqdm=False)
    return clock() - start, outs


def in_turns(args: argparse.Namespace, engines: dict[str, LLM], parts: list, params: SamplingParams) -> tuple:
    """Return the best seconds of each engine for all ``parts`` (lists of chats), and the tokens of its answers."""
    best = {what: [1e9] * len(parts) for what in engines}
    found: dict[str, list] = {}
    for turn in range(args.turns + 1):
        found = {what: [] for what in engines}
        for i, chats in enumerate(parts):
            for what, llm in engines.items():
                seconds, outs = timed(args, llm, chats, params)
                found[what] += [o.tokens for o in outs]
                if turn:  # the first turn warms up
                    best[what][i] = min(best[what][i], seconds)
    return {what: sum(times) for what, times in best.items()}, found


def compare(args: argparse.Namespace, kind: str, drafter: Any, k: int, params: SamplingParams) -> None:
    name = drafter if isinstance(drafter, str) else drafter["name"]
    with make(args, "none", k) as plain, make(args, drafter, k) as drafted:
        for batch in args.batches:
            chats = prompts(kind, max(batch, args.least // batch * batch))
            parts = [chats[i : i + batch] for i in range(0, len(chats), batch)]
            before = drafted.stats()["speculation"]
            best, found = in_turns(args, {"plain": plain, "drafted": drafted}, parts, params)
            tokens = sum(map(len, found["plain"]))
            same = sum(a == b for a, b in zip(found["plain"], found["drafted"], strict=True))
            after = drafted.stats()["speculation"]
            share = (after["accepted"] - before["accepted"]) / max(1, after["proposed"] - before["proposed"])
            print(
                f"{kind:8} {name:6} k={k:<2} T={params.temperature:<4} batch {batch:<3} "
                f"{tokens / best['plain']:8.1f} tokens/s {tokens / best['drafted']:8.1f} with drafts "
                f"{best['plain'] / best['drafted']:5.2f} x   accepted {share:5.1%}   same answers {same}/{len(chats)}",
                flush=True,
            )
        print(f"  by position {after['acceptance_by_position']}, tokens per row and step {after['tokens_per_row']}")


def cost_ratio(args: argparse.Namespace) -> None:
    params, chats, ms = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True), prompts("stories", 1), {}
    for name in (args.model, args.draft):
        with LLM(name, device=args.device, dtype=args.dtype, max_num_seqs=1, num_kvcache_blocks=64) as llm:
            ms[name] = min(timed(args, llm, chats, params)[0] for _ in range(args.turns + 1)) * 10
    print(
        f"a step of {args.model}: {ms[args.model]:.2f} ms, of {args.draft}: {ms[args.draft]:.2f} ms, cost ratio "
        f"{ms[args.draft] / ms[args.model]:.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--draft", default="pocket-draft")
    parser.add_argument("--head", help="a head whose drafts are compared, in place of the other drafters")
    parser.add_argument(
        "--clock", default="wall", choices=CLOCKS, help="cpu: the time of the process, for a busy machine"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batches", default="1", type=lambda s: [int(x) for x in s.split(",")])
    parser.add_argument("--least", type=int, default=4, help="prompts of a run at least")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--k", default="4", type=lambda s: [int(x) for x in s.split(",")])
    parser.add_argument("--k-ngram", default="8", type=lambda s: [int(x) for x in s.split(",")])
    parser.add_argument("--temperatures", default="0,0.8", type=lambda s: [float(x) for x in s.split(",")])
    parser.add_argument("--auto", action="store_true", help="let it switch itself off")
    args = parser.parse_args()
    model = {"name": "model", "options": {"model": args.draft}}
    head = {"name": "mtp", "options": {"model": args.head}}
    if not args.head:
        cost_ratio(args)
    for t in args.temperatures:
        params = SamplingParams(temperature=t, max_tokens=args.max_tokens, seed=1)
        if args.head:
            for k in args.k:
                for kind in ("stories", "copies"):
                    compare(args, kind, head, k, params)
            continue
        for k in args.k:
            compare(args, "stories", model, k, params)
        for k in args.k_ngram:
            compare(args, "copies", "ngram", k, params)


if __name__ == "__main__":
    main()
