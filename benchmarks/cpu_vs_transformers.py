"""Measure tokens per second of the engine and of transformers with the same model and prompts, in one run.

    python benchmarks/cpu_vs_transformers.py [--model pocket] [--requests 32] [--prompt 64] [--out 64] [--repeat 5]

transformers runs twice, request by request, and with all requests as one batch of equal length, which needs no padding
and is its best case.  Decoding is greedy in float32 with the machine's default number of threads.  Runs alternate, and
medians are compared.  Every engine must return every requested token.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--out", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()

    import torch
    from transformers import AutoModelForCausalLM

    from minivllm import LLM, SamplingParams
    from minivllm.device.loading.hf_config import find_model

    llm = LLM(model=args.model, dtype="float32", enable_prefix_caching=False, skip_tokenizer_init=True)
    hf = AutoModelForCausalLM.from_pretrained(find_model(args.model), dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, hf.config.vocab_size, (args.requests, args.prompt), generator=generator)
    want = args.requests * args.out
    params = SamplingParams(temperature=0, max_tokens=args.out, ignore_eos=True)

    def ours() -> int:
        return sum(len(o.tokens) for o in llm.generate(ids.tolist(), params, use_tqdm=False))

    def theirs(batch: torch.Tensor) -> int:
        keep = {"min_new_tokens": args.out, "max_new_tokens": args.out, "do_sample": False, "pad_token_id": 0}
        with torch.inference_mode():
            return int(
                (hf.generate(batch, attention_mask=torch.ones_like(batch), **keep).shape[1] - batch.shape[1])
                * len(batch)
            )

    ways = {
        "minivllm": ours,
        "transformers, one by one": lambda: sum(theirs(row[None]) for row in ids),
        "transformers, one batch": lambda: theirs(ids),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.repeat + 1):  # the first round warms up
        for name, run in ways.items():
            start = time.perf_counter()
            got = run()
            seconds[name].append(time.perf_counter() - start)
            assert got == want, f"{name} gave {got} tokens of {want}"
    rate = {name: want / statistics.median(times[1:]) for name, times in seconds.items()}
    work = f"{args.requests} requests of {args.prompt} + {args.out} tokens"
    print(f"{args.model}: {work}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for name, value in rate.items():
        print(f"{name:28} {value:9.0f} tok/s   minivllm is {rate['minivllm'] / value:5.2f} x")
    print({k: v for k, v in llm.stats().items() if k.endswith("_ms")})


if __name__ == "__main__":
    main()
