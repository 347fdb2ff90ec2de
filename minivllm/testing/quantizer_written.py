"""Weights written as quantized checkpoints are, by the documented layouts, each element rounded to the nearest.

The suite gives them to quantizers that read such checkpoints.  What is written is symmetric, of groups of 32 inputs or
of rows, with scales in float32, so that numbers of any size can be written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minivllm.registration.spec import ANY, Spec, allows

GROUP = 32
BLOCK = 128  # of float8
TOP = 7  # of codes around 0


class WrittenMethod(NamedTuple):
    """One method: its ``quantization_config``, and a weight [out, in] -> parameter -> tensor."""

    config: Mapping[str, Any]
    tensors: Callable[[Tensor], dict[str, Tensor]]
    step: Callable[[Tensor], Tensor]  # distance of neighbouring numbers at each element of a weight
    bits: int = 4
    exponent: int = 0
    outs: tuple[int, ...] = (5, 8, 64, 136)  # output rows of a part, tried with
    scales: str = ""  # "float16": larger numbers than its own cannot be written


def packed(codes: Tensor, bits: int) -> Tensor:
    """Codes [rows, n] -> i32 [rows, n * bits / 32], low first, rows filled up with zeros."""
    each = (codes.numpy().astype(np.uint8)[..., None] >> np.arange(bits, dtype=np.uint8)) & 1
    stream = each.reshape(len(codes), -1)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    return torch.from_numpy(np.packbits(stream, axis=1, bitorder="little").view(np.int32).copy())


def largest(weight: Tensor) -> Tensor:
    """[out, groups], of which the last may be shorter."""
    return torch.stack([group.abs().amax(1) for group in weight.split(GROUP, dim=1)], dim=1)


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(codes -7 to 7 [out, in], scale f32 [out, groups])."""
    tiny = torch.finfo(torch.float32).tiny
    scale = (largest(weight.float()) / TOP).clamp(min=tiny)
    steps = weight.float() / scale.repeat_interleave(GROUP, 1)[:, : weight.shape[1]]
    return steps.round().clamp(-TOP, TOP).long(), scale


def step(weight: Tensor) -> Tensor:
    """Distance of neighbouring numbers of int4 in groups, at each element [out, in]."""
    return (largest(weight.double()) / TOP).repeat_interleave(GROUP, 1)[:, : weight.shape[1]]


def _gptq(weight: Tensor) -> dict[str, Tensor]:
    codes, scale = rounded(weight)
    return {
        "qweight": packed(codes + 8, 4).t().contiguous(),
        "qzeros": packed(torch.full_like(scale, 7).t(), 4),
        "scales": scale.t().contiguous(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }


def _awq(weight: Tensor) -> dict[str, Tensor]:
    codes, scale = rounded(weight)
    return {
        "qweight": awq_words((codes + 8).t()),
        "qzeros": awq_words(torch.full_like(scale, 8).t()),
        "scales": scale.t().contiguous(),
    }


def awq_words(codes: Tensor) -> Tensor:
    """Codes [n, out] -> i32 [n, out / 8], whose fields have outputs 0, 2, 4, 6, 1, 3, 5, 7 of the 8."""
    by_field = codes.unflatten(1, (-1, 8))[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
    return packed(by_field.flatten(1), 4)


def _compressed(weight: Tensor) -> dict[str, Tensor]:
    codes, scale = rounded(weight)
    return {
        "weight_packed": packed(codes + 8, 4),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }


def _fp8(weight: Tensor) -> dict[str, Tensor]:
    """Of all blocks the same scale."""
    scale = (weight.float().abs().amax() / 448).clamp(min=torch.finfo(torch.float32).tiny)
    blocks = [-(-n // BLOCK) for n in weight.shape]
    return {
        "weight": (weight.float() / scale).to(torch.float8_e4m3fn),
        "weight_scale_inv": scale.expand(blocks).clone(),
    }


def _fp8_step(weight: Tensor) -> Tensor:
    sizes = weight.double().abs()
    return torch.maximum(sizes / 8, sizes.amax() * 2.0**-17)


def _int8(weight: Tensor) -> dict[str, Tensor]:
    largest = weight.float().abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny * 127)
    codes = (weight.float() / largest[:, None] * 127).round().to(torch.int8)
    return {"weight": codes, "SCB": largest}


def _int8_step(weight: Tensor) -> Tensor:
    return (weight.double().abs().amax(1, keepdim=True) / 127).expand_as(weight)


def _q8_0(weight: Tensor) -> dict[str, Tensor]:
    """Blocks of 32 inputs: a scale as float16, and their codes."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    scale = (groups.abs().amax(-1, keepdim=True) / 127).half()
    steps = groups / scale.float().clamp(min=torch.finfo(torch.float16).tiny)
    codes = steps.round().clamp(-127, 127).to(torch.int8)
    return {"q8_0": torch.cat((scale.view(torch.uint8), codes.view(torch.uint8)), dim=-1).flatten(1)}


def _q8_0_step(weight: Tensor) -> Tensor:
    """A float16 may be larger than the scale that it is rounded from."""
    scale = largest(weight.double()) / 127 * (1 + 2.0**-10) + 2.0**-24
    return scale.repeat_interleave(GROUP, 1)[:, : weight.shape[1]]


def _config_groups(**weights: Any) -> dict[str, Any]:
    return {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", **weights}}}


WRITTEN: Mapping[str, WrittenMethod] = {
    "awq": WrittenMethod({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, _awq, step),
    "bitsandbytes": WrittenMethod({"quant_method": "bitsandbytes", "load_in_8bit": True}, _int8, _int8_step, bits=8),
    "compressed-tensors": WrittenMethod(
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": _config_groups(strategy="group", group_size=GROUP, symmetric=True),
            "ignore": ["lm_head"],
        },
        _compressed,
        step,
    ),
    "fp8": WrittenMethod(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]},
        _fp8,
        _fp8_step,
        bits=8,
        exponent=4,
    ),
    "gguf": WrittenMethod({"quant_method": "gguf"}, _q8_0, _q8_0_step, bits=8, scales="float16"),
    "gptq": WrittenMethod({"quant_method": "gptq", "bits": 4, "group_size": GROUP}, _gptq, step),
}


def methods(spec: Spec) -> Any:
    """Those that a quantizer reads."""
    return ANY if spec.limits == ANY else spec.limits["checkpoint"]


def sizes(spec: Spec, own: tuple[float, float], *dtypes: str) -> tuple[float, float]:
    """Of the smallest and the largest numbers that a weight is tried with: ``own``, or what float16 holds where a dtype
    or the scales are that."""
    made = of(spec)
    return (1e-2, 1e4) if "float16" in dtypes or (made and made.scales == "float16") else own


def of(spec: Spec) -> WrittenMethod | None:
    """What a quantizer that reads one of the methods is given; None: it quantizes plain weights, or reads another."""
    limit = methods(spec)
    return None if allows(limit, "none") else WRITTEN.get(min(limit))
