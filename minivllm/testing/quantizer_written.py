"""Write weights in the documented layouts of quantized checkpoints, with each element rounded to the nearest code.

The suite loads them into quantizers that read such checkpoints.  The codes are symmetric around 0.  A scale belongs to
a group of 32 inputs or to a row, and is float32, so that numbers of any size can be written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minivllm.registration.spec import ANY, Spec, allows

GROUP = 32
BLOCK = 128  # number of rows and of inputs of a block with one float8 scale
TOP = 7  # largest signed 4-bit code
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
TINY = torch.finfo(torch.float32).tiny

Tensors = Callable[[Tensor], dict[str, Tensor]]


class WrittenMethod(NamedTuple):
    """A quantization method of checkpoints, with functions that write a weight [out, in] in its layout."""

    config: Mapping[str, Any]  # ``quantization_config`` of config.json
    tensors: Tensors  # weight -> checkpoint tensors, by parameter name
    step: Callable[[Tensor], Tensor]  # weight -> distance of neighbouring numbers of the format at each element
    bits: int = 4
    exponent: int = 0
    outs: tuple[int, ...] = (5, 8, 64, 136)  # numbers of output rows of a part (such as q, k or v) to test
    scales: str = ""  # "float16" if the scales have this dtype, which limits the size of numbers; else empty


def packed(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [rows, n] into int32 words [rows, n * bits / 32], low bits first, each row padded with zeros."""
    numbers = codes.numpy().astype(np.uint8)
    shifts = np.arange(bits, dtype=np.uint8)
    shifted = numbers[..., None] >> shifts
    stream = (shifted & 1).reshape(len(codes), -1)
    missing = -stream.shape[1] % 32
    stream = np.pad(stream, ((0, 0), (0, missing)))
    octets = np.packbits(stream, axis=1, bitorder="little")
    words = octets.view(np.int32)
    return torch.from_numpy(words.copy())


def largest(weight: Tensor) -> Tensor:
    """Return the largest absolute value of each group of ``GROUP`` inputs, [out, groups].

    The last group may be shorter.
    """
    groups = weight.abs().split(GROUP, dim=1)
    parts = [group.amax(1) for group in groups]
    return torch.stack(parts, dim=1)


def per_input(groups: Tensor, weight: Tensor) -> Tensor:
    """Repeat a value of each group [out, groups] for each input of a weight [out, in]."""
    scales = groups.repeat_interleave(GROUP, 1)
    return scales[:, : weight.shape[1]]


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight to 4-bit codes; return (codes from -7 to 7 [out, in], scales float32 [out, groups])."""
    weight = weight.float()
    scale = (largest(weight) / TOP).clamp(min=TINY)
    steps = weight / per_input(scale, weight)
    codes = steps.round().clamp(-TOP, TOP)
    return codes.long(), scale


def step(weight: Tensor) -> Tensor:
    """Return the distance of neighbouring numbers of grouped int4 at each element of a weight [out, in]."""
    return per_input(largest(weight.double()) / TOP, weight)


def _gptq(weight: Tensor) -> dict[str, Tensor]:
    codes, scale = rounded(weight)
    words = packed(codes + 8, 4)
    zeros = torch.full_like(scale, 7)
    inputs = torch.arange(weight.shape[1], dtype=torch.int32)
    tensors = {"qweight": words.t().contiguous()}
    tensors["qzeros"] = packed(zeros.t(), 4)
    tensors["scales"] = scale.t().contiguous()
    tensors["g_idx"] = inputs // GROUP
    return tensors


def _awq(weight: Tensor) -> dict[str, Tensor]:
    codes, scale = rounded(weight)
    words = (codes + 8).t()
    zeros = torch.full_like(scale, 8).t()
    tensors = {"qweight": awq_words(words)}
    tensors["qzeros"] = awq_words(zeros)
    tensors["scales"] = scale.t().contiguous()
    return tensors


def awq_words(codes: Tensor) -> Tensor:
    """Pack 4-bit codes [n, out] into int32 words [n, out / 8].

    The fields of a word, low bits first, hold its 8 outputs in the order ``AWQ_ORDER``.
    """
    by_word = codes.unflatten(1, (-1, 8))
    ordered = by_word[:, :, AWQ_ORDER]
    return packed(ordered.flatten(1), 4)


def _compressed(weight: Tensor) -> dict[str, Tensor]:
    codes, scale = rounded(weight)
    words = packed(codes + 8, 4)
    shape = torch.tensor(weight.shape)
    return {"weight_packed": words, "weight_scale": scale, "weight_shape": shape}


def _fp8(weight: Tensor) -> dict[str, Tensor]:
    """Return a weight in float8 with the same scale in all blocks."""
    weight = weight.float()
    top = weight.abs().amax()
    scale = (top / 448).clamp(min=TINY)
    blocks = [-(-n // BLOCK) for n in weight.shape]
    codes = (weight / scale).to(torch.float8_e4m3fn)
    scales = scale.expand(blocks).clone()
    return {"weight": codes, "weight_scale_inv": scales}


def _fp8_step(weight: Tensor) -> Tensor:
    sizes = weight.double().abs()
    least = sizes.amax() * 2.0**-17
    return torch.maximum(sizes / 8, least)


def _int8(weight: Tensor) -> dict[str, Tensor]:
    weight = weight.float()
    top = weight.abs().amax(1)
    top = top.clamp(min=TINY * 127)
    scaled = weight / top[:, None] * 127
    codes = scaled.round().to(torch.int8)
    return {"weight": codes, "SCB": top}


def _int8_step(weight: Tensor) -> Tensor:
    sizes = weight.double().abs()
    top = sizes.amax(1, keepdim=True)
    return (top / 127).expand_as(weight)


def _q8_0(weight: Tensor) -> dict[str, Tensor]:
    """Return a weight in blocks of 32 inputs, each a float16 scale followed by 32 int8 codes."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    largest_of_group = groups.abs().amax(-1, keepdim=True)
    scale = (largest_of_group / 127).half()
    tiny = torch.finfo(torch.float16).tiny
    divisor = scale.float().clamp(min=tiny)
    steps = (groups / divisor).round()
    codes = steps.clamp(-127, 127).to(torch.int8)
    parts = [t.view(torch.uint8) for t in (scale, codes)]
    merged = torch.cat(parts, dim=-1)
    return {"q8_0": merged.flatten(1)}


def _q8_0_step(weight: Tensor) -> Tensor:
    """Return an upper bound of the distance of neighbouring numbers: a scale may be rounded up to float16."""
    exact = largest(weight.double()) / 127
    scale = exact * (1 + 2.0**-10) + 2.0**-24
    return per_input(scale, weight)


_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
_LINEAR = {"targets": ["Linear"], "weights": _INT4}
_COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
_COMPRESSED["config_groups"] = {"group_0": _LINEAR}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
_INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}
_Q8_0 = {"quant_method": "gguf"}

METHODS = [
    WrittenMethod(_AWQ, _awq, step),
    WrittenMethod(_INT8, _int8, _int8_step, bits=8),
    WrittenMethod(_COMPRESSED, _compressed, step),
    WrittenMethod(_FP8, _fp8, _fp8_step, bits=8, exponent=4),
    WrittenMethod(_Q8_0, _q8_0, _q8_0_step, bits=8, scales="float16"),
    WrittenMethod(_GPTQ, _gptq, step),
]
WRITTEN: Mapping[str, WrittenMethod] = {method.config["quant_method"]: method for method in METHODS}


def methods(spec: Spec) -> Any:
    """Return the quantization methods of checkpoints that a quantizer reads, in the form of a limit of its spec."""
    if spec.limits == ANY:
        return ANY
    return spec.limits["checkpoint"]


def sizes(spec: Spec, default: tuple[float, float], *dtypes: str) -> tuple[float, float]:
    """Return the magnitudes of the numbers in a tiny and in a huge test weight.

    They are ``default``, or 0.01 and 10000 if a dtype, or the dtype of the scales, is float16, whose range is small.
    """
    method = of(spec)
    if method is not None and method.scales:
        dtypes = (*dtypes, method.scales)
    return (1e-2, 1e4) if "float16" in dtypes else default


def of(spec: Spec) -> WrittenMethod | None:
    """Return the method by which the kit writes checkpoints for a quantizer.

    None means that the quantizer reads plain weights, or a method that is not in ``WRITTEN``.
    """
    limit = methods(spec)
    if allows(limit, "none"):
        return None
    return WRITTEN.get(min(limit))
