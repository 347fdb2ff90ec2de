"""Convert codes to the tensors and settings of a checkpoint format, and back.

``plugins/quantizer/gptq.py`` describes the tensors of GPTQ, and ``plugins/quantizer/compressed.py`` those of the
pack-quantized format of compressed-tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minivllm import __version__
from minivllm.plugins.quantizer.forms import fields

from .grid import Coded
from .options import QuantizeOptions


def words(codes: Tensor, bits: int) -> Tensor:
    """Pack codes u8 [n, k] into i32 [n, ceil(k * bits / 32)], the lowest bits first; zeros fill the last word."""
    per_word = 32 // bits
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % per_word))
    parts = codes.view(len(codes), -1, per_word)
    packed = torch.zeros(parts.shape[:2], dtype=torch.int32, device=codes.device)
    for i in range(per_word):
        packed |= parts[:, :, i].int() << i * bits  # the last part sets the sign bit
    return packed


@dataclass(frozen=True)
class PackedFormat(ABC):
    """A checkpoint format of quantized weights.  ``stored`` is the dtype of scales."""

    options: QuantizeOptions
    stored: torch.dtype

    @staticmethod
    def of(options: QuantizeOptions, dtype: torch.dtype) -> PackedFormat:
        """Return the format that ``options.format`` names, for a checkpoint of ``dtype``."""
        if options.format == "compressed-tensors":
            return CompressedFormat(options, dtype)
        return GptqFormat(options, torch.float16)

    @abstractmethod
    def tensors(self, coded: Coded) -> dict[str, Tensor]:
        """Return the tensors of a quantized weight, by the last part of their names."""

    @abstractmethod
    def coded(self, tensors: Mapping[str, Tensor]) -> Coded:
        """Return the quantized weight of some tensors, the inverse of ``tensors``."""

    @abstractmethod
    def settings(self, plain: Sequence[str]) -> dict[str, Any]:
        """Return the ``quantization_config`` of config.json; ``plain`` names modules that are not quantized."""


class GptqFormat(PackedFormat):
    """AutoGPTQ's format: version 1 for the option "gptq", which stores zero points less one, or version 2."""

    @property
    def zero_offset(self) -> int:
        """Return the number that is subtracted from stored zero points."""
        return int(self.options.format == "gptq")

    def tensors(self, coded: Coded) -> dict[str, Tensor]:
        bits = self.options.bits
        stored_zero = coded.zero - self.zero_offset
        tensors = {"qweight": words(coded.codes, bits).t().contiguous()}
        tensors["qzeros"] = words(stored_zero.t(), bits)
        tensors["scales"] = coded.scale.t().to(self.stored).contiguous()
        tensors["g_idx"] = coded.group_of.int()
        return tensors

    def coded(self, tensors: Mapping[str, Tensor]) -> Coded:
        bits = self.options.bits
        group_of = tensors["g_idx"].long()
        codes = fields(tensors["qweight"].t(), bits, len(group_of)).contiguous()
        zero = fields(tensors["qzeros"], bits, len(codes)).t() + self.zero_offset
        scale = tensors["scales"].t().float()
        return Coded(codes, scale, zero.contiguous(), group_of)

    def settings(self, plain: Sequence[str]) -> dict[str, Any]:
        options = self.options
        settings: dict[str, Any] = {
            "quant_method": "gptq",
            "bits": options.bits,
            "group_size": options.group,
            "desc_act": options.sorts,
            "sym": options.symmetric,
            "lm_head": False,
            "checkpoint_format": options.format,
            "pack_dtype": "int32",
            "damp_percent": options.damping,
        }
        if plain:
            settings["dynamic"] = {f"-:^{name.replace('.', chr(92) + '.')}$": {} for name in plain}
        settings["meta"] = {"quantizer": [f"minivllm:{__version__}"], "method": options.method}
        return settings


class CompressedFormat(PackedFormat):
    """The pack-quantized format of compressed-tensors."""

    def tensors(self, coded: Coded) -> dict[str, Tensor]:
        bits = self.options.bits
        tensors = {"weight_packed": words(coded.codes, bits)}
        tensors["weight_scale"] = coded.scale.to(self.stored)
        tensors["weight_shape"] = torch.tensor(coded.codes.shape)
        if not self.options.symmetric:
            tensors["weight_zero_point"] = words(coded.zero.t(), bits).t().contiguous()
        return tensors

    def coded(self, tensors: Mapping[str, Tensor]) -> Coded:
        bits = self.options.bits
        scale = tensors["weight_scale"].float()
        n, k = tensors["weight_shape"].tolist()
        zero = torch.full(scale.shape, 1 << (bits - 1), dtype=torch.uint8)
        if "weight_zero_point" in tensors:
            zero = fields(tensors["weight_zero_point"].t(), bits, n).t().contiguous()
        group_of = torch.arange(k) // (k // scale.shape[1])
        codes = fields(tensors["weight_packed"], bits, k).contiguous()
        return Coded(codes, scale, zero.to(scale.device), group_of)

    def settings(self, plain: Sequence[str]) -> dict[str, Any]:
        options = self.options
        per_channel = options.group == -1  # one scale covers all inputs, so their order does not matter
        ordered = options.act_order == "static" and not per_channel
        weights = {
            "num_bits": options.bits,
            "type": "int",
            "symmetric": options.symmetric,
            "strategy": "channel" if per_channel else "group",
            "group_size": None if per_channel else options.group,
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
