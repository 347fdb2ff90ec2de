"""Write the adapter folders of the kit, and compute their effect in float64, for the built-in values of ``peft_type``.

There are three test adapters.  Adapter 0 changes all layers and tap points, adapter 1 only the last one, and adapter 2
all except the last one.  Their ranks differ too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FOLDERS = 3
RANKS = (6, 3, 1)
PREFIX = "base_model.model."
# names of layers whose inputs IA3 scales; IA3 scales the outputs of all other layers
SCALED_INPUTS = ("o_proj", "down_proj")
Shapes = Mapping[str, tuple[int, int]]  # layer of the checkpoint -> (outputs, inputs)


def chosen(names: Mapping[str, Any], number: int) -> list[str]:
    """Return the names of the layers or tap points that test adapter ``number`` changes."""
    ordered = list(names)
    changed = (ordered, ordered[-1:], ordered[:-1] or ordered)
    return changed[number]


def save(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write adapter_config.json and adapter_model.safetensors of an adapter into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config)
    (folder / "adapter_config.json").write_text(text, encoding="utf-8")
    save_file(dict(tensors), folder / "adapter_model.safetensors")


def write_lora(folder: Path, number: int, layers: Shapes, points: Mapping[str, int]) -> None:
    """Write a LoRA folder: random matrices A and B of each changed layer, with lora_alpha / r = 3."""
    generator = torch.Generator().manual_seed(number)
    rank = RANKS[number]
    tensors = {}
    for name in chosen(layers, number):
        outputs, inputs = layers[name]
        a = torch.randn(rank, inputs, generator=generator)
        b = torch.randn(outputs, rank, generator=generator)
        tensors[f"{PREFIX}{name}.lora_A.weight"] = a * inputs**-0.5
        tensors[f"{PREFIX}{name}.lora_B.weight"] = b * 0.3
    save(folder, {"peft_type": "LORA", "r": rank, "lora_alpha": 3 * rank}, tensors)


def write_ia3(folder: Path, number: int, layers: Shapes, points: Mapping[str, int]) -> None:
    """Write an IA3 folder: random factors near 1 for the inputs or the outputs of each changed layer."""
    generator = torch.Generator().manual_seed(number)
    tensors: dict[str, Tensor] = {}
    for name in chosen(layers, number):
        outputs, inputs = layers[name]
        if name.endswith(SCALED_INPUTS):
            shape = (1, inputs)
        else:
            shape = (outputs, 1)
        random = torch.randn(shape, generator=generator)
        tensors[f"{PREFIX}{name}.ia3_l"] = 1 + 0.5 * random
    save(folder, {"peft_type": "IA3"}, tensors)


def write_steering(folder: Path, number: int, layers: Shapes, points: Mapping[str, int]) -> None:
    """Write a steering folder: a random vector to add at each changed tap point, with scale 2."""
    generator = torch.Generator().manual_seed(number)
    tensors = {}
    for point in chosen(points, number):
        tensors[point] = torch.randn(points[point], generator=generator)
    save(folder, {"peft_type": "STEERING", "scale": 2.0}, tensors)


def lora_output(folder: Path, name: str, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the layer output with LoRA, x W^T + bias + scale * x A^T B^T, float64 [T, out]."""
    tensors, config = read(folder)
    y = x @ weight.T + bias
    if f"{PREFIX}{name}.lora_A.weight" not in tensors:
        return y
    a = tensors[f"{PREFIX}{name}.lora_A.weight"].double()
    b = tensors[f"{PREFIX}{name}.lora_B.weight"].double()
    scale = config["lora_alpha"] / config["r"]
    return y + scale * (x @ a.T @ b.T)


def ia3_output(folder: Path, name: str, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the layer output with IA3, float64 [T, out]: the inputs or the outputs of the layer are scaled."""
    tensors, _ = read(folder)
    factors = tensors.get(f"{PREFIX}{name}.ia3_l")
    if factors is None:
        return x @ weight.T + bias
    factors = factors.double()
    if factors.shape[0] == 1:
        scaled = x * factors[0]
        return scaled @ weight.T + bias
    y = x @ weight.T + bias
    return y * factors[:, 0]


def steering_value(folder: Path, point: str, x: Tensor) -> Tensor:
    """Return the value of a tap point with steering, float64 [T, width]: x plus the scaled vector of the point."""
    tensors, config = read(folder)
    if point not in tensors:
        return x
    vector = tensors[point].double()
    return x + config["scale"] * vector


def read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read an adapter folder, and return its tensors and its config."""
    text = (folder / "adapter_config.json").read_text(encoding="utf-8")
    tensors = load_file(folder / "adapter_model.safetensors")
    return tensors, json.loads(text)


WRITERS = {"LORA": write_lora, "IA3": write_ia3, "STEERING": write_steering}
OUTPUTS = {"LORA": lora_output, "IA3": ia3_output}
VALUES = {"STEERING": steering_value}
