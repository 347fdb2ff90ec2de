"""Measure steps with adapters (LoRA): decode and prefill by the number of adapters, and the time to load one.

    python benchmarks/adapters.py --model DIR --load-format dummy --folder /tmp/adapters --rank 16

The adapters are written to --folder with random weights, for all projections of a model of Llama's layout.  Times of
decode steps are differences: 129 tokens minus 1 token, best of --repeat, divided by 128.  ``off`` is an engine without
``enable_lora``.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

PROMPT = 512
STEPS = 128


def projections(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return (inputs, outputs) of the projections of a layer by their path."""
    hidden = config["hidden_size"]
    inner = config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries = head * config["num_attention_heads"]
    keys = head * config["num_key_value_heads"]
    return {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }


def write_adapter(model: Path, folder: Path, rank: int, seed: int) -> Path:
    """Write an adapter in PEFT's layout with random weights in bfloat16, and return its folder."""
    config = json.loads((model / "config.json").read_text())
    shapes = projections(config)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for path, (inputs, outputs) in shapes.items():
            name = f"base_model.model.model.layers.{layer}.{path}"
            first = torch.randn(rank, inputs, generator=generator) * 0.01
            second = torch.randn(outputs, rank, generator=generator) * 0.01
            tensors[f"{name}.lora_A.weight"] = first.bfloat16()
            tensors[f"{name}.lora_B.weight"] = second.bfloat16()
    targets = [path.split(".")[-1] for path in shapes]
    facts = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets, "bias": "none"}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(facts))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


class Engine:
    """minivllm or vLLM with the same calls."""

    def __init__(self, args: argparse.Namespace, adapters: int) -> None:
        """Start the engine with room for ``adapters``, without ``enable_lora`` for 0."""
        options: dict[str, Any] = {
            "model": args.model,
            "load_format": args.load_format,
            "skip_tokenizer_init": True,
            "max_num_seqs": max(args.rows),
            "max_model_len": 1024,
            "enable_prefix_caching": False,
        }
        if adapters:
            options.update(enable_lora=True, max_loras=adapters, max_lora_rank=args.rank, max_cpu_loras=2 * adapters)
        options.update(json.loads(args.options))
        if args.engine == "vllm":
            from vllm import LLM, SamplingParams
            from vllm.lora.request import LoRARequest
        else:
            from minivllm import LLM, LoRARequest, SamplingParams
        self.request, self.params = LoRARequest, SamplingParams
        begun = time.perf_counter()
        self.llm = LLM(**options)
        print(f"ready after {time.perf_counter() - begun:.1f} s", flush=True)

    def seconds(self, rows: int, prompt: int, tokens: int, folders: list[Path], seed: int) -> float:
        """Return the seconds that ``rows`` requests take, which use the adapters in turns."""
        rng = random.Random(seed)
        prompts = [{"prompt_token_ids": [rng.randrange(10000) for _ in range(prompt)]} for _ in range(rows)]
        params = self.params(temperature=0.6, ignore_eos=True, max_tokens=tokens, detokenize=False)
        requests: list[Any] | None = None
        if folders:
            requests = []
            for row in range(rows):
                folder = folders[row % len(folders)]
                requests.append(self.request(folder.name, int(folder.name[1:]) + 1, str(folder)))
        begun = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False, lora_request=requests)
        spent = time.perf_counter() - begun
        assert sum(len(output.outputs[0].token_ids) for output in outputs) == rows * tokens
        return spent


def measure(engine: Engine, rows: int, folders: list[Path], repeat: int) -> tuple[float, float]:
    """Return milliseconds of a decode step and of the prefill of all rows."""
    engine.seconds(rows, PROMPT, 8, folders, 99)
    first, whole = [], []
    for turn in range(repeat):
        first.append(engine.seconds(rows, PROMPT, 1, folders, turn))
        whole.append(engine.seconds(rows, PROMPT, STEPS + 1, folders, 100 + turn))
    return 1e3 * (min(whole) - min(first)) / STEPS, 1e3 * min(first)


def main() -> None:
    """Print a line for each number of rows and adapters, then the time to load an adapter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--engine", choices=["minivllm", "vllm"], default="minivllm")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 1, 8, 32])
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--skip-off", action="store_true", help="leave out the engine without enable_lora")
    parser.add_argument("--options", default="{}", help="further options of the engine, as JSON")
    args = parser.parse_args()
    most = max(args.adapters)
    folders = [write_adapter(Path(args.model), args.folder / f"a{i}", args.rank, i) for i in range(most + 5)]
    for room in [most] if args.skip_off else [0, most]:
        engine = Engine(args, room)
        for rows in args.rows:
            for count in args.adapters if room else [0]:
                step, prefill = measure(engine, rows, folders[: min(count, rows)], args.repeat)
                name = f"{count} adapters" if room else "off"
                print(f"{rows:4} rows, {name:>11}: step {step:7.3f} ms, prefill {prefill:8.1f} ms", flush=True)
        if room:
            plain = engine.seconds(1, 16, 1, folders[:1], 1)
            new = [engine.seconds(1, 16, 1, [folders[most + i]], 1) for i in range(5)]
            added = ", ".join(f"{1e3 * (one - plain):.1f}" for one in new)
            print(f"first request of an adapter that is not in memory: {added} ms more than {1e3 * plain:.1f} ms")
        if args.engine == "minivllm":
            engine.llm.close()
        del engine


if __name__ == "__main__":
    main()
