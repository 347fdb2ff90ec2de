"""Measure the time and the memory to load a quantized checkpoint of random words in a model's shape.

    python benchmarks/packed_load.py --config DIR --out DIR/gptq --kind gptq

``--config`` has a config.json.  ``--kind`` is 4 bits of GPTQ or of compressed-tensors in groups of 128, float8 in
blocks of 128 x 128 (fp8), or 16 bits (plain).  All layers have the same numbers, which does not change the times.  The
directory is then loaded ``--times`` times, each in a new process.  The first load finds the files in the page cache,
because they were just written.  ``python benchmarks/quant_speed.py --model DIR/gptq auto`` measures the decode steps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

GROUP = 128
CONFIGS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [GROUP, GROUP]},
    "compressed": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True},
            }
        },
        "ignore": ["lm_head"],
    },
    "plain": {},
}


def of_kind(kind: str, n: int, k: int) -> dict[str, Tensor]:
    """Return the tensors of a weight [n, k] with a standard deviation of about 0.02."""
    groups = -(-k // GROUP)
    if kind == "plain":
        return {"weight": torch.randn(n, k, dtype=torch.bfloat16) * 0.02}
    if kind == "fp8":
        scale = torch.full((-(-n // GROUP), groups), 0.02 / 64)
        return {"weight": (torch.randn(n, k) * 64).to(torch.float8_e4m3fn), "weight_scale_inv": scale}
    step = 0.02 / 4.6
    size = (n, k // 8) if kind == "compressed" else (k // 8, n)
    words = torch.randint(-(2**31), 2**31, size, dtype=torch.int64).int()
    if kind == "compressed":
        scale = torch.full((n, groups), step, dtype=torch.bfloat16)
        return {"weight_packed": words, "weight_scale": scale, "weight_shape": torch.tensor([n, k])}
    return {
        "qweight": words,
        "qzeros": torch.full((groups, n // 8), 0x77777777, dtype=torch.int32),
        "scales": torch.full((groups, n), step, dtype=torch.float16),
        "g_idx": (torch.arange(k) // GROUP).int(),
    }


def layer_of(config: dict[str, Any], kind: str) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield (name, tensors) of the modules of one layer of Llama or Qwen3."""
    h, heads = config["hidden_size"], config["num_attention_heads"]
    dim = config.get("head_dim") or h // heads
    kv = config["num_key_value_heads"] * dim
    for name, n, k in (("q", heads * dim, h), ("k", kv, h), ("v", kv, h), ("o", h, heads * dim)):
        yield f"self_attn.{name}_proj", of_kind(kind, n, k)
    if config["model_type"].startswith("qwen3"):
        for name in ("q", "k"):
            yield f"self_attn.{name}_norm", {"weight": torch.ones(dim, dtype=torch.bfloat16)}
    experts, inner = config.get("num_experts", 0), config["intermediate_size"]
    if experts:
        inner = config["moe_intermediate_size"]
        yield "mlp.gate", {"weight": torch.randn(experts, h, dtype=torch.bfloat16) * 0.02}
    made = {name: of_kind(kind, n, k) for name, n, k in (("gate", inner, h), ("up", inner, h), ("down", h, inner))}
    for e in range(max(1, experts)):
        for name, tensors in made.items():
            where = f"mlp.experts.{e}." if experts else "mlp."
            yield f"{where}{name}_proj", {p: t.clone() for p, t in tensors.items()} if experts else tensors
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield name, {"weight": torch.ones(h, dtype=torch.bfloat16)}


def write(config: dict[str, Any], out: Path, kind: str) -> None:
    """Write a file for each layer, and one for the embedding, the head and the last norm."""
    out.mkdir(parents=True)
    modules, weight_map = list(layer_of(config, kind)), {}
    for i in range(config["num_hidden_layers"]):
        tensors = {f"model.layers.{i}.{m}.{p}": t for m, given in modules for p, t in given.items()}
        save_file(tensors, out / f"layer-{i:03}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"layer-{i:03}.safetensors")
    ends = {"model.norm.weight": torch.ones(config["hidden_size"], dtype=torch.bfloat16)}
    size = config["vocab_size"], config["hidden_size"]
    ends["model.embed_tokens.weight"] = torch.randn(1024, size[1]).bfloat16().repeat(-(-size[0] // 1024), 1)[: size[0]]
    if not config.get("tie_word_embeddings"):
        ends["lm_head.weight"] = ends["model.embed_tokens.weight"] * 0.02
    save_file({name: t.contiguous() for name, t in ends.items()}, out / "ends.safetensors")
    weight_map |= dict.fromkeys(ends, "ends.safetensors")
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    reported = {"quantization_config": CONFIGS[kind]} if CONFIGS[kind] else {}
    (out / "config.json").write_text(json.dumps({**config, **reported}))


def status(key: str) -> float:
    """Return GiB of this process from /proc."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) / 2**20 for line in lines if line.startswith(key)), float("nan"))


def load(folder: str) -> dict[str, float]:
    """Return the seconds to the loaded weights and to the engine, and the memory of host and device."""
    from minivllm import LLM
    from minivllm.device.worker import build

    found: dict[str, float] = {}
    plain, gpu = build.load_weights, torch.cuda.is_available()

    def timed(*args: Any, **more: Any) -> Any:
        begun = time.perf_counter()
        notes = plain(*args, **more)
        if gpu:
            torch.cuda.synchronize()
            found["device_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
            found["device_gib"] = torch.cuda.memory_allocated() / 2**30
        found["weights_s"] = time.perf_counter() - begun
        found["host_gib"] = status("RssAnon")
        return notes

    build.load_weights = timed
    begun = time.perf_counter()
    with LLM(model=folder, skip_tokenizer_init=True, max_model_len=1024, max_num_seqs=64):
        found["ready_s"] = time.perf_counter() - begun
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="a directory with config.json; without: --out is there")
    parser.add_argument("--out", required=True)
    parser.add_argument("--kind", choices=list(CONFIGS), default="gptq")
    parser.add_argument("--layers", type=int, help="fewer than config.json has")
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--here", action="store_true", help="load it in this process")
    args = parser.parse_args()
    if args.here:
        print("FOUND " + json.dumps(load(args.out)), flush=True)
        return
    if args.config:
        config = json.loads((Path(args.config) / "config.json").read_text())
        config["num_hidden_layers"] = args.layers or config["num_hidden_layers"]
        begun = time.perf_counter()
        write(config, Path(args.out), args.kind)
        size = sum(path.stat().st_size for path in Path(args.out).iterdir()) / 2**30
        print(f"{args.kind}: {size:.2f} GiB written in {time.perf_counter() - begun:.1f} s", flush=True)
    for _ in range(args.times):
        command = [sys.executable, os.path.realpath(__file__), "--out", args.out, "--here"]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = [line[6:] for line in ran.stdout.splitlines() if line.startswith("FOUND ")]
        if not lines:
            sys.exit(f"{args.out}: {ran.stderr.strip()[-2000:]}")
        print(args.kind + ": " + ", ".join(f"{k} {v:.2f}" for k, v in json.loads(lines[0]).items()), flush=True)


if __name__ == "__main__":
    main()
