"""Measure updates of weights and sleep: seconds of each call, and of the first tokens after it.

    python benchmarks/weights.py --model DIR --load-format dummy
    python benchmarks/weights.py --model DIR --load-format dummy --dtype float32 --device cpu --repeat 1

The new weights lie in host memory, which is pinned for a GPU.  They have the names and shapes of the checkpoint.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from minivllm import LLM, SamplingParams

TOKENS = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, detokenize=False)
PROMPTS = [{"prompt_token_ids": [(7 * place + row) % 50 for place in range(64)]} for row in range(8)]


def new_weights(folder: str, dtype: torch.dtype, pinned: bool) -> dict[str, torch.Tensor]:
    """Return random tensors in host memory with the names and shapes of a model's checkpoint."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    found = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        found[name] = torch.empty(tensor.shape, dtype=dtype, pin_memory=pinned).fill_(0.01)
    return found


def seconds(call: Callable[[], object]) -> float:
    """Return the seconds of a call, with the work that it left on the device."""
    begun = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def report(name: str, times: list[float]) -> None:
    """Print the median of the times and each of them."""
    print(f"{name:48} {median(times):7.3f} s   {' '.join(f'{t:.3f}' for t in times)}", flush=True)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    llm = LLM(
        args.model,
        load_format=args.load_format,
        skip_tokenizer_init=True,
        dtype=args.dtype,
        device=args.device,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
    )
    weights = new_weights(args.model, getattr(torch, args.dtype), torch.cuda.is_available())
    size = sum(t.numel() * t.element_size() for t in weights.values())
    print(f"{size / 1e6:,.1f} MB in {len(weights)} tensors")

    def first_tokens() -> None:
        llm.generate(PROMPTS, TOKENS, use_tqdm=False)

    first_tokens()
    calls: dict[str, Callable[[], object]] = {
        "update_weights": lambda: llm.update_weights(weights),
        "update_weights(finite=False)": lambda: llm.update_weights(weights, finite=False),
    }
    for name, call in calls.items():
        times = [(seconds(call), seconds(first_tokens)) for _ in range(args.repeat)]
        report(name, [one for one, _ in times])
        report("  then 16 tokens of 8 prompts", [one for _, one in times])
    for level in (1, 2):
        slept, woken, first = [], [], []
        for _ in range(args.repeat):
            slept.append(seconds(lambda level=level: llm.sleep(level)))
            if level == 2:
                report("  update_weights while asleep", [seconds(lambda: llm.update_weights(weights, finite=False))])
            woken.append(seconds(llm.wake))
            first.append(seconds(first_tokens))
        report(f"sleep({level})", slept)
        report("  wake", woken)
        report("  then 16 tokens of 8 prompts", first)
    llm.close()


if __name__ == "__main__":
    main()
