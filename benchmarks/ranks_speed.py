"""What it is worth to share a model over several GPUs: decode steps, prefill and a workload by the number of ranks.

    python benchmarks/ranks_speed.py --model DIR --load-format dummy --ranks 1 2 --rows 1 32 256 --workloads nano

Each number of ranks runs in a process of its own, one after the other.  Decode steps have contexts of about
``--prompt`` tokens and are medians from start to start; a workload is the best of two turns (``throughput.py``).
``--set`` changes the configuration of all of them, ``--sums nccl`` the way in which ranks add.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import numpy as np
from throughput import WORKLOADS


def measure(args: argparse.Namespace, ranks: int) -> dict[str, Any]:
    from minivllm import LLM, SamplingParams
    from minivllm.config import load_config

    begun, most = time.perf_counter(), max(args.rows)
    keywords: dict[str, Any] = dict(
        model=args.model, load_format=args.load_format, skip_tokenizer_init=True, tensor_parallel_size=ranks
    )
    if ranks > 1 and args.sums:
        keywords["executor"] = {"name": "multiprocess", "options": {"sums": args.sums}}
    found: dict[str, Any] = {"ranks": ranks}
    with LLM(config=load_config(sets=[f"max_num_seqs={max(most, 256)}", *args.set], keywords=keywords)) as llm:
        found["start_s"] = time.perf_counter() - begun
        rng, top = np.random.default_rng(0), min(10_000, llm.engine.capacity.vocab_size)

        def run(rows: int, steps: int) -> float:
            """Median seconds of a decode step of so many rows."""
            clock = llm.engine.clock
            before = clock.count
            prompts = [rng.integers(0, top, args.prompt).tolist() for _ in range(rows)]
            asked = SamplingParams(temperature=0.6, max_tokens=steps, ignore_eos=True, detokenize=False)
            llm.generate(prompts, asked, use_tqdm=False)
            ran = np.arange(max(before, clock.count - clock.size), clock.count) % clock.size
            last = ran[clock.rows[ran] == rows][steps // 4 :]
            return float(np.median(np.diff(clock.start[last])))

        for rows in args.rows:
            run(rows, 8)
            found[f"decode_{rows}_ms"] = 1e3 * min(run(rows, args.steps) for _ in range(2))
        for many in args.prefill:
            times = []
            for _ in range(3):
                prompts = [rng.integers(0, top, args.prompt).tolist() for _ in range(many)]
                start = time.perf_counter()
                asked = SamplingParams(temperature=0.6, max_tokens=1, ignore_eos=True, detokenize=False)
                llm.generate(prompts, asked, use_tqdm=False)
                times.append(time.perf_counter() - start)
            found[f"prefill_{many}_s"] = sorted(times)[1]
        for name in args.workloads:
            prompts, outs = WORKLOADS[name]()
            params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n, detokenize=False) for n in outs]
            best = 1e9
            for turn in range(2):
                shifted = [[(t + 17 * (turn + 1)) % 10000 for t in p] for p in prompts]
                start = time.perf_counter()
                got = sum(len(o.tokens) for o in llm.generate(shifted, params, use_tqdm=False))
                best = min(best, time.perf_counter() - start)
                assert got == sum(outs), f"{got} tokens of {sum(outs)}"
            found[f"{name}_tok_s"] = sum(outs) / best
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--prefill", type=int, nargs="*", default=[], help="prompts whose prefill is timed")
    parser.add_argument("--workloads", nargs="*", default=[], choices=list(WORKLOADS))
    parser.add_argument("--sums", default="", help="of several ranks: auto, or nccl")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of minivllm run")
    parser.add_argument("--here", action="store_true", help="in this process: one number of ranks, as JSON")
    args = parser.parse_args()
    if args.here:
        print("RESULT " + json.dumps(measure(args, args.ranks[0])), flush=True)
        return
    first: dict[str, Any] = {}
    for ranks in args.ranks:
        command = [sys.executable, __file__, *sys.argv[1:], "--here", "--ranks", str(ranks)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            print(f"{ranks} ranks: ended with {done.returncode}", flush=True)
            continue
        found = json.loads(lines[-1].removeprefix("RESULT "))
        first = first or found
        told = [f"{k} {v:.4g}" + (f" ({v / first[k]:.2f}x)" if k in first else "") for k, v in found.items()]
        print(", ".join(told), flush=True)


if __name__ == "__main__":
    main()
