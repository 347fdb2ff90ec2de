"""Codes to what a checkpoint has of them, and back.

GPTQ's tensors are those of ``plugins/quantizer/gptq.py``, compressed-tensors' those of its pack-quantized format in
``plugins/quantizer/compressed.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from minivllm import __version__
from minivllm.plugins.quantizer.forms import fields

from .grid import Coded
from .options import QuantizeOptions


def words(codes: Tensor, bits: int) -> Tensor:
    """Codes u8 [n, k] -> i32 [n, ceil(k * bits / 32)], low first; a row is filled up with zeros."""
    each = 32 // bits
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % each))
    fields_of = codes.view(len(codes), -1, each)
    made = torch.zeros(fields_of.shape[:2], dtype=torch.int32, device=codes.device)
    for i in range(each):
        made |= fields_of[:, :, i].int() << i * bits  # the last reaches the sign
    return made


class PackedFormat:
    """``stored``: the dtype of scales."""

    def __init__(self, options: QuantizeOptions, stored: torch.dtype) -> None:
        self.options, self.stored = options, stored

    @staticmethod
    def of(options: QuantizeOptions, dtype: torch.dtype) -> PackedFormat:
        """That of ``options.format``, for a checkpoint of ``dtype``."""
        if options.format == "compressed-tensors":
            return CompressedFormat(options, dtype)
        return GptqFormat(options, torch.float16)

    def tensors(self, coded: Coded) -> dict[str, Tensor]:
        raise NotImplementedError

    def coded(self, tensors: Mapping[str, Tensor]) -> Coded:
        """What ``tensors`` made those of."""
        raise NotImplementedError

    def settings(self, plain: Sequence[str]) -> dict[str, Any]:
        """``quantization_config``; ``plain`` are modules that were left out."""
        raise NotImplementedError


class GptqFormat(PackedFormat):
    """AutoGPTQ's; of format "gptq" its v1, whose zero points are stored less one, and which it reads itself."""

    def __init__(self, options: QuantizeOptions, stored: torch.dtype) -> None:
        super().__init__(options, stored)
        self.less = int(options.format == "gptq")

    def tensors(self, coded: Coded) -> dict[str, Tensor]:
        bits = self.options.bits
        return {
            "qweight": words(coded.codes, bits).t().contiguous(),
            "qzeros": words((coded.zero - self.less).t(), bits),
            "scales": coded.scale.t().to(self.stored).contiguous(),
            "g_idx": coded.group_of.int(),
        }

    def coded(self, tensors: Mapping[str, Tensor]) -> Coded:
        bits, group_of = self.options.bits, tensors["g_idx"].long()
        codes = fields(tensors["qweight"].t(), bits, len(group_of)).contiguous()
        zero = fields(tensors["qzeros"], bits, len(codes)).t() + self.less
        return Coded(codes, tensors["scales"].t().float(), zero.contiguous(), group_of)

    def settings(self, plain: Sequence[str]) -> dict[str, Any]:
        options = self.options
        dynamic = {f"-:^{name.replace('.', chr(92) + '.')}$": {} for name in plain}
        return {
            "quant_method": "gptq",
            "bits": options.bits,
            "group_size": options.group,
            "desc_act": options.sorts,
            "sym": options.symmetric,
            "lm_head": False,
            "checkpoint_format": options.format,
            "pack_dtype": "int32",
            "damp_percent": options.damping,
            **({"dynamic": dynamic} if dynamic else {}),
            "meta": {"quantizer": [f"minivllm:{__version__}"], "method": options.method},
        }


class CompressedFormat(PackedFormat):
    """compressed-tensors, pack-quantized."""

    def tensors(self, coded: Coded) -> dict[str, Tensor]:
        bits = self.options.bits
        made = {
            "weight_packed": words(coded.codes, bits),
            "weight_scale": coded.scale.to(self.stored),
            "weight_shape": torch.tensor(coded.codes.shape),
        }
        if not self.options.symmetric:
            made["weight_zero_point"] = words(coded.zero.t(), bits).t().contiguous()
        return made

    def coded(self, tensors: Mapping[str, Tensor]) -> Coded:
        bits, scale = self.options.bits, tensors["weight_scale"].float()
        n, k = tensors["weight_shape"].tolist()
        zero = torch.full(scale.shape, 1 << (bits - 1), dtype=torch.uint8)
        if "weight_zero_point" in tensors:
            zero = fields(tensors["weight_zero_point"].t(), bits, n).t().contiguous()
        group_of = torch.arange(k) // (k // scale.shape[1])
        return Coded(fields(tensors["weight_packed"], bits, k).contiguous(), scale, zero.to(scale.device), group_of)

    def settings(self, plain: Sequence[str]) -> dict[str, Any]:
        options = self.options
        ordered = options.act_order == "static" and options.group != -1  # a channel's scale is of all, in any order
        weights = {
            "num_bits": options.bits,
            "type": "int",
            "symmetric": options.symmetric,
            "strategy": "channel" if options.group == -1 else "group",
            "group_size": None if options.group == -1 else options.group,
            "dynamic": False,
            "actorder": "weight" if ordered else None,
        }
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head", *plain],
            "kv_cache_scheme": None,
        }
