"""Measure output tokens per second of a whole workload whose requests arrive at once.

    python benchmarks/throughput.py nano chat --model DIR [--load-format dummy] [--set max_num_seqs=256]

``nano`` has 256 prompts of 100 to 1,024 random tokens, with 100 to 1,024 output tokens, uniform (nano-vllm's
benchmark).  ``chat`` has 1,000 requests of log-normal lengths, about 190 input and 210 output tokens, as in
conversations.  Requests have token ids and no text, temperature 0.6, and every requested token must be returned.  Each
workload runs ``--repeat`` times with other prompts of the same lengths, so that no prefix is cached.  The best time
counts, because the first run warms up.
"""

from __future__ import annotations

import argparse
import random
import time


def nano(seed: int = 0) -> tuple[list[list[int]], list[int]]:
    rng = random.Random(seed)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    return prompts, [rng.randint(100, 1024) for _ in range(256)]


def chat(seed: int = 1) -> tuple[list[list[int]], list[int]]:
    rng = random.Random(seed)
    ins = [int(min(max(rng.lognormvariate(4.7, 1.15), 4), 2048)) for _ in range(1000)]
    outs = [int(min(max(rng.lognormvariate(5.0, 0.9), 4), 1024)) for _ in range(1000)]
    return [[rng.randint(0, 10000) for _ in range(n)] for n in ins], outs


WORKLOADS = {"nano": nano, "chat": chat}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", choices=list(WORKLOADS))
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of minivllm run")
    args = parser.parse_args()

    from minivllm import LLM, SamplingParams
    from minivllm.config import load_config

    start = time.perf_counter()
    keywords = {"model": args.model, "load_format": args.load_format, "skip_tokenizer_init": True}
    llm = LLM(config=load_config(sets=args.set, keywords=keywords))
    print(f"ready after {time.perf_counter() - start:.1f} s", flush=True)
    for name in args.workloads:
        prompts, outs = WORKLOADS[name]()
        params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n, detokenize=False) for n in outs]
        seconds = []
        for turn in range(args.repeat):
            shifted = [[(t + 17 * (turn + 1)) % 10000 for t in p] for p in prompts]
            start = time.perf_counter()
            got = sum(len(o.tokens) for o in llm.generate(shifted, params, use_tqdm=False))
            seconds.append(time.perf_counter() - start)
            assert got == sum(outs), f"{got} tokens of {sum(outs)}"
        times = ", ".join(f"{s:.2f} s" for s in seconds)
        rate = sum(outs) / min(seconds)
        ins = sum(map(len, prompts))
        print(f"{name}: {len(prompts)} requests, {ins} in, {sum(outs)} out: {times} s; {rate:.0f} tok/s", flush=True)
    print({k: v for k, v in llm.stats().items() if k.endswith("_ms") or k in ("steps", "preemptions")})


if __name__ == "__main__":
    main()
