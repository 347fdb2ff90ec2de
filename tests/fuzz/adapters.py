"""Adapters of all methods for the fuzzer's models, in the formats of PEFT but written without PEFT."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

METHODS = ("lora", "ia3", "steering")
COUNT = 3  # adapters of each method and model
# names of matrices of attention, MLPs and recurrent layers, without the path of the module
TARGETS = re.compile(
    r".*\.([qkvo]_proj|out_proj|in_proj\w*|(gate|up|down|qkv|gate_up)_proj|query_key_value|dense\w*|Wqkv|c_attn|c_proj"
    r"|c_fc|w[123])\.weight"
)
SCALED_INPUTS = re.compile(r".*\.(o_proj|out_proj|down_proj|dense_4h_to_h|mlp\.c_proj|w2)")  # not merged
EMBEDDING = re.compile(r".*(embed_tokens|wte|word_embeddings)\.weight")


def method_of(number: int) -> str:
    """Return the method of the adapter with a number from 1 to ``COUNT`` for each method."""
    return METHODS[(number - 1) // COUNT]


def number_of(method: str, number: int) -> int:
    """Return the number of an adapter among those of all methods; ``number`` is 1 to ``COUNT``."""
    return METHODS.index(method) * COUNT + number


def methods_of(options: dict[str, Any]) -> list[str]:
    """Return the methods of an engine, from its options."""
    named: list[str] = options.get("adapters", [])
    return [*named, *["lora"] * ("lora" not in named)] if options.get("enable_lora") else named


def write(folder: Path, tensors: dict[str, Any], transposed: bool = False) -> None:
    """Write ``COUNT`` adapters of each method for a model's ``tensors``.  ``transposed``: matrices are [in, out]."""
    from safetensors.torch import save_file

    matrices = {
        name.removesuffix(".weight"): tuple(x.shape[::-1] if transposed else x.shape)
        for name, x in tensors.items()
        if x.dim() == 2 and TARGETS.fullmatch(name) and ".experts." not in name
    }
    width = next(x.shape[1] for name, x in tensors.items() if EMBEDDING.fullmatch(name))
    for number in range(1, len(METHODS) * COUNT + 1):
        kind = method_of(number)
        if kind == "steering":
            config, made = _vectors(number, _layers(tensors), width)
        else:
            config, made = (_low_rank if kind == "lora" else _factors)((number - 1) % COUNT + 1, matrices)
        where = folder.with_name(f"{folder.name}-adapter{number}")
        where.mkdir(exist_ok=True)
        (where / "adapter_config.json").write_text(json.dumps(config))
        save_file(made, where / "adapter_model.safetensors")


def _layers(tensors: dict[str, Any]) -> int:
    """Return the number of layers of a model."""
    return 1 + max(int(found[1]) for name in tensors if (found := re.search(r"\.(\d+)\.", name)))


def _low_rank(number: int, matrices: dict[str, tuple[int, ...]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields and tensors of a LoRA.  Every other one has an alpha for each layer."""
    import torch

    rng, generator = random.Random(f"adapter {number}"), torch.Generator().manual_seed(number)
    rank, made = rng.choice([2, 4, 8]), {}
    targets = sorted(rng.sample(sorted(matrices), max(1, len(matrices) * number // COUNT)))
    for name in targets:
        outputs, inputs = matrices[name]
        a = torch.randn(rank, inputs, generator=generator) * 0.5 * inputs**-0.5
        b = torch.randn(outputs, rank, generator=generator) * 0.2
        made |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
    config: dict[str, Any] = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "use_rslora": number == 2}
    if number % 2:
        config["alpha_pattern"] = {targets[0]: rank}
    return config, made


def _factors(number: int, matrices: dict[str, tuple[int, ...]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields and tensors of an IA3, with factors of outputs and of inputs."""
    import torch

    rng, generator = random.Random(f"factors {number}"), torch.Generator().manual_seed(number)
    made = {}
    for name in rng.sample(sorted(matrices), max(1, len(matrices) * number // COUNT)):
        outputs, inputs = matrices[name]
        scaled = SCALED_INPUTS.fullmatch(name) and rng.random() < 0.7
        shape = (1, inputs) if scaled else (outputs, 1)
        made[f"base_model.model.{name}.ia3_l"] = 1 + 0.3 * torch.randn(shape, generator=generator)
    return {"peft_type": "IA3"}, made


def _vectors(number: int, layers: int, width: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields and tensors of a steering folder."""
    import torch

    rng, generator = random.Random(f"vectors {number}"), torch.Generator().manual_seed(number)
    points = ["embedding", *(f"layers.{i}.residual" for i in range(layers))]
    chosen = rng.sample(points, rng.randint(1, len(points)))
    made = {point: torch.randn(width, generator=generator) for point in chosen}
    return {"peft_type": "STEERING", "scale": rng.choice([0.2, 0.5, -0.3])}, made


def lora_of(params: dict[str, Any], folder: Path, model: str) -> Any:
    """Return the adapter of a request, None without one."""
    from minivllm import LoRARequest

    if "adapter" not in params:
        return None
    number = params["adapter"]
    return LoRARequest(f"{method_of(number)}{number}", number, str(folder / f"{model}-adapter{number}"))
