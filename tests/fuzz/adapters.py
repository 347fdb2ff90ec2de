"""Adapters (LoRA) for the fuzzer's models, in the format of PEFT but written without PEFT."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

COUNT = 3  # adapters of each model; every other one has an alpha for each layer
# names of matrices of attention, MLPs and recurrent layers, without the path of the module
TARGETS = re.compile(
    r".*\.([qkvo]_proj|out_proj|in_proj\w*|(gate|up|down|qkv|gate_up)_proj|query_key_value|dense\w*|Wqkv|c_attn|c_proj"
    r"|c_fc|w[123])\.weight"
)


def write(folder: Path, tensors: dict[str, Any], transposed: bool = False) -> None:
    """Write ``COUNT`` adapters for a model's ``tensors``.  ``transposed`` means that matrices are [in, out]."""
    import torch
    from safetensors.torch import save_file

    matrices = {
        name.removesuffix(".weight"): tuple(x.shape)
        for name, x in tensors.items()
        if x.dim() == 2 and TARGETS.fullmatch(name) and ".experts." not in name
    }
    for number in range(1, COUNT + 1):
        rng, generator = random.Random(f"adapter {number}"), torch.Generator().manual_seed(number)
        rank, made = rng.choice([2, 4, 8]), {}
        targets = sorted(rng.sample(sorted(matrices), max(1, len(matrices) * number // COUNT)))
        for name in targets:
            outputs, inputs = matrices[name][::-1] if transposed else matrices[name]
            a = torch.randn(rank, inputs, generator=generator) * 0.5 * inputs**-0.5
            b = torch.randn(outputs, rank, generator=generator) * 0.2
            made |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
        config: dict[str, Any] = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "use_rslora": number == 2}
        if number % 2:
            config["alpha_pattern"] = {targets[0]: rank}
        where = folder.with_name(f"{folder.name}-lora{number}")
        where.mkdir(exist_ok=True)
        (where / "adapter_config.json").write_text(json.dumps(config))
        save_file(made, where / "adapter_model.safetensors")


def lora_of(params: dict[str, Any], folder: Path, model: str) -> Any:
    """Return the adapter of a request, None without one."""
    from minivllm import LoRARequest

    if "adapter" not in params:
        return None
    number = params["adapter"]
    return LoRARequest(f"lora{number}", number, str(folder / f"{model}-lora{number}"))
