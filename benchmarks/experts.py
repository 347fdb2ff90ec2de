"""Time decode steps of a model with experts, and count the experts of a layer that a step reads.

    python benchmarks/experts.py --model DIR --load-format dummy --rows 1 8 64 256 --skew 0 4

Random weights route nearly uniformly, so a step reads the largest number of experts.  ``--skew S`` multiplies the
router's rows by 1 + S * exp(-e / 8), so that the first experts are chosen more often.  Experts are counted over
``--sample`` decode steps at the point ``layers.i.experts``.  Times are those of requests without taps, for 128 further
tokens, the best of ``--repeat``.
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
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--skew", type=float, nargs="+", default=[0.0])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--sample", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=2)
    args = parser.parse_args()

    import torch

    from minivllm import LLM, SamplingParams, Tap

    llm = LLM(
        model=args.model,
        load_format=args.load_format,
        skip_tokenizer_init=True,
        max_model_len=4096,
        max_num_seqs=max(args.rows),
        executor="local",
    )
    blocks = [b for b in llm.engine.executor.runner.model.blocks if b.experts is not None]
    points = [b.name + "experts" for b in blocks]
    weights = [b.experts.router.scheme.tensors["weight"] for b in blocks]
    plain = [w.clone() for w in weights]
    rng = random.Random(0)

    def generate(rows: int, tokens: int, taps: list) -> tuple[float, list]:
        prompts = [[rng.randrange(5, 10000) for _ in range(args.prompt)] for _ in range(rows)]
        params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=tokens, detokenize=False)
        begun = time.perf_counter()
        given = [{"prompt_token_ids": p} for p in prompts]
        out = llm.generate(given, params, use_tqdm=False, taps=[taps] * rows)
        return time.perf_counter() - begun, out

    print("  skew   rows    ms a step   experts that a layer reads: mean, least, most")
    for skew in args.skew:
        with torch.inference_mode():
            for w, was in zip(weights, plain, strict=True):
                at = torch.arange(len(w), device=w.device)
                w.copy_(was * (1 + skew * torch.exp(-at / 8))[:, None])
        for rows in args.rows:
            generate(rows, 140, [])
            found = [generate(rows, n, [])[0] for _ in range(args.repeat) for n in (2, 130)]
            ms = (min(found[1::2]) - min(found[::2])) / 128 * 1e3
            _, out = generate(rows, args.sample, [Tap(p, read=True) for p in points])
            touched = []
            for point in points:
                ids = np.stack([o.outputs[0].taps[point][args.prompt :] for o in out])  # [rows, steps, chosen]
                touched += [len(np.unique(ids[:, step])) for step in range(ids.shape[1])]
            print(
                f"{skew:6.1f} {rows:6} {ms:12.3f}   {np.mean(touched):8.1f} {min(touched):4} {max(touched):4}",
                flush=True,
            )


if __name__ == "__main__":
    main()
