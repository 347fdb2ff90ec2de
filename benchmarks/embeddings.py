"""Measure the speed of embeddings against that of prefill: the same prompts through ``LLM.generate`` with one token.

    python benchmarks/embeddings.py --model DIR --load-format dummy --texts 64 --tokens 256
    python benchmarks/embeddings.py --shape 0.6B --layers 28 --texts 8 --device cpu

All ways run in turns, without the prefix cache.  A figure is the median of ``--repeat`` runs in prompt tokens a second,
and a ratio is the median of the ratios of a turn: by the clock, and by the CPU seconds of the process.  ``best`` is the
ratio of the shortest runs, which a busy machine changes least.  OMP_NUM_THREADS=1 keeps CPU seconds free of waiting.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

QWEN3 = {  # 0.6B parameters
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
PREFILL = "generate, 1 token"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder; or --shape")
    parser.add_argument("--shape", choices=["0.6B"], help="random weights in the shape of Qwen3-0.6B")
    parser.add_argument("--layers", type=int, default=28, help="layers of --shape")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    if bool(args.model) == bool(args.shape):
        parser.error("expected one of --model and --shape")
    if args.model:
        compare(args, args.model, args.load_format)
        return
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps({**QWEN3, "num_hidden_layers": args.layers}))
        compare(args, folder, "dummy")


def compare(args: argparse.Namespace, model: str, load_format: str) -> None:
    """Time all ways in turns and print their medians."""
    from minivllm import LLM, SamplingParams

    options: dict[str, Any] = {"device": args.device, "dtype": args.dtype, "load_format": load_format}
    llm = LLM(model=model, skip_tokenizer_init=True, enable_prefix_caching=False, **options)
    one = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    ways = {
        PREFILL: lambda prompts: llm.generate(prompts, one, use_tqdm=False),
        "embed, last": lambda prompts: llm.embed(prompts, "last", use_tqdm=False),
        "embed, mean": lambda prompts: llm.embed(prompts, "mean", use_tqdm=False),
    }
    rng = random.Random(0)
    prompts = [[rng.randrange(5, 1000) for _ in range(args.tokens)] for _ in range(args.texts)]
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way(prompts[:2])
    for _ in range(args.repeat):
        for name, way in ways.items():
            begun, cpu_begun = time.perf_counter(), time.process_time()
            way(prompts)
            seconds[name].append(time.perf_counter() - begun)
            cpu[name].append(time.process_time() - cpu_begun)
    print(f"{args.texts} prompts of {args.tokens} tokens, {args.repeat} turns")
    for name in ways:
        rate = args.texts * args.tokens / statistics.median(seconds[name])
        line = f"{name:<20}{rate:>10,.0f} tokens/s"
        for kind, times in (("clock", seconds), ("CPU", cpu)):
            turns = [one / other for one, other in zip(times[PREFILL], times[name], strict=True)]
            best = min(times[PREFILL]) / min(times[name])
            line += f"   {kind} {statistics.median(turns):.3f} ({min(turns):.3f} to {max(turns):.3f}, best {best:.3f})"
        print(line)
    llm.close()


if __name__ == "__main__":
    main()
