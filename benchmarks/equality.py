"""Compare families, dtypes and execution modes with transformers on tiny random models.

    python benchmarks/equality.py [--device cpu|cuda] [--heads mha gqa mqa]

Each cell shows how many greedy sequences of 32 tokens equal those of transformers in float32, and the largest
difference of a chosen token's log-probability to transformers' float32 forward pass over the engine's tokens.  If a
half-precision sequence differs, the gap between the two best float32 logits at that token is printed.  A small gap is a
tie that rounding decided.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

LENGTHS = (1, 15, 16, 17, 33, 70)
WAYS = {
    "in a batch": {},
    "chunked by 16": {"max_num_batched_tokens": 16, "enable_prefix_caching": False},
    "token by token": {"max_num_batched_tokens": 1, "max_num_seqs": 1, "enable_prefix_caching": False},
    "after preemption": {"num_kvcache_blocks": 10},
    "3 steps ahead": {"run_ahead": 3},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--heads", nargs="+", default=["mha", "gqa", "mqa"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "float16"])
    args = parser.parse_args()
    head = f"{'family':7} {'heads':5} {'dtype':9} {'way':17} {'equal':>6} {'max |d logprob|':>16}"
    print(f"{head}  first divergences (gap)")
    for family in ("llama", "qwen2", "qwen3"):
        for heads in args.heads:
            with tempfile.TemporaryDirectory() as folder:
                for row in rows(family, heads, Path(folder), args):
                    print(row, flush=True)


def rows(family, heads, folder, args):
    import numpy as np

    from minivllm import LLM, SamplingParams
    from minivllm.testing.tiny import tiny_dir

    model = tiny_dir(folder, family, heads, vocab_size=257)[2]
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 257, n).tolist() for n in LENGTHS]
    want = [greedy(model, p) for p in prompts]
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=0)
    for dtype in args.dtypes:
        for way, options in WAYS.items():
            base = dict(skip_tokenizer_init=True, num_kvcache_blocks=200, max_num_seqs=16, max_num_batched_tokens=256)
            with LLM(model=str(folder), device=args.device, dtype=dtype, **{**base, **options}) as llm:
                runs = [(way, llm.generate(prompts, params, use_tqdm=False))]
                if way == "in a batch":
                    runs.append(("after prefix hit", llm.generate(prompts, params, use_tqdm=False)))
                    runs.append(("alone", [llm.generate([p], params, use_tqdm=False)[0] for p in prompts]))
                if way == "after preemption":
                    assert llm.stats()["preemptions"] > 0
            for name, outs in runs:
                yield cell(family, heads, dtype, name, model, prompts, outs, want)


def cell(family, heads, dtype, way, model, prompts, outs, want) -> str:
    equal, worst, gaps = 0, 0.0, []
    for prompt, out, right in zip(prompts, outs, want, strict=True):
        lp = forward(model, prompt + out.tokens)[len(prompt) - 1 : -1]
        got = [next(iter(entry.values())).logprob for entry in out.outputs[0].logprobs]
        worst = max(worst, *(abs(lp[i, t].item() - g) for i, (t, g) in enumerate(zip(out.tokens, got, strict=True))))
        equal += out.tokens == right
        if out.tokens != right:
            at = next(i for i, (a, b) in enumerate(zip(out.tokens, right, strict=True)) if a != b)
            best = lp[at].topk(2).values
            gaps.append(f"{(best[0] - best[1]).item():.3f}")
    return f"{family:7} {heads:5} {dtype:9} {way:17} {equal:>3}/{len(want)} {worst:>16.2e}  {' '.join(gaps)}"


def greedy(model, prompt):
    import torch

    ids = torch.tensor([prompt])
    keep = dict(max_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0)
    return model.generate(ids, attention_mask=torch.ones_like(ids), **keep)[0, len(prompt) :].tolist()


def forward(model, ids):
    import torch

    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)


if __name__ == "__main__":
    main()
