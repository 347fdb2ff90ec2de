"""Quantizers with 8 bits besides int8 weights: float8 weights, and activations that are quantized row by row.

float8 is e4m3 with 4 bits of exponent, 3 of significand, a maximum of 448, and no infinity (arXiv:2209.05433).  The
error of a weight's element is at most 1/16 of the element.  int8 has equal steps of a row's largest element / 127, so
float8 is more exact for small elements.  With activations of 8 bits the products use the tensor cores' 8-bit modes,
which are twice as fast as bfloat16.  Each row of x is scaled by its own largest element (dynamic, per token), which
needs no calibration.  Steps of few rows are rounded too, although they gain no speed.  Otherwise the result of a token
would depend strongly on the number of other tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from minivllm.core.interfaces.quantizer import ModuleInfo, StoredWeight
from minivllm.device.layers.linear import no_adapter

from .fast import joined_scaled, scaled_kernels_of, served_by
from .int8 import Int8, Int8Weight
from .options import LlmInt8Options


def quantized_rows(x: Tensor, dtype: torch.dtype, top: float) -> Tensor:
    """Round x [T, in] to the 8-bit dtype, row by row, and return the rounded numbers in the dtype of x."""
    wide = x.float()
    scale = wide.abs().amax(1, keepdim=True) / top
    divisor = torch.where(scale > 0, scale, 1)
    steps = wide / divisor
    if dtype == torch.int8:
        rounded = steps.round_()
    else:
        rounded = steps.clamp_(-top, top).to(dtype).float()
    return (rounded * scale).to(x.dtype)


class Fp8Weight(Int8Weight):
    """``weight`` float8_e4m3fn [out, in], ``scale`` float32 [out]."""

    dtype = torch.float8_e4m3fn
    top = 448.0

    def codes(self, steps: Tensor) -> Tensor:
        return steps.clamp_(-self.top, self.top).to(self.dtype)

    def stored(self) -> StoredWeight:
        return super().stored()

    def joined(self, bias: Tensor | None, mode: int, activation: str) -> Any:
        return super().joined(bias, mode, activation)


class _Both(Int8Weight):
    """A weight whose products use x [T, in] rounded to 8 bits, row by row.  Experts use x without rounding."""

    def finish(self) -> None:
        self.kernels = scaled_kernels_of(self.weight, self.scale)

    def apply(self, x: Tensor, out: Tensor | None = None, adapter: Any = None) -> Tensor:
        no_adapter(self, adapter)
        if self.kernels is not None:
            return self.kernels(x, out)
        rounded = quantized_rows(x, self.dtype, self.top)
        rows = slice(0, len(self.weight))
        return self._product(rounded, rows, out)

    def served(self, device: str, sm: int) -> Mapping[str, str]:
        return served_by(self.weight.dtype, device, sm, rounded=self.dtype)

    def joined(self, bias: Tensor | None, mode: int, activation: str) -> Any:
        return joined_scaled(self.kernels, bias, mode, activation)


class Int8Both(_Both):
    """``weight`` int8 [out, in], ``scale`` float32 [out]."""

    joined = _Both.joined


class Fp8Both(_Both, Fp8Weight):
    """``weight`` float8_e4m3fn [out, in], ``scale`` float32 [out]."""

    joined = _Both.joined


class LlmInt8Weight(Int8Weight):
    """``weight`` int8 [out, in] with ``scale`` float32 [out].  Elements of x [T, in] below ``threshold`` are rounded.

    LLM.int8() (arXiv:2208.07339) separates inputs that are large in any row of a batch, and multiplies them in 16 bits.
    Here each element is judged separately, so that no row depends on other rows.  For a single row this is the method
    of the paper.  One product serves both kinds, because each element is either rounded or not.
    """

    homogeneous = False  # the result does not scale with x, because the threshold for large elements is fixed
    rounds_rows = False  # large elements of x must not be rounded

    def __init__(self, info: ModuleInfo, threshold: float) -> None:
        super().__init__(info)
        self.threshold = threshold

    def apply(self, x: Tensor, out: Tensor | None = None, adapter: Any = None) -> Tensor:
        if self.kernels is not None:
            from minivllm.device.kernels.scaled import rounded_but_large

            rounded = rounded_but_large(x.contiguous(), self.threshold)
        else:
            large = x.abs() >= self.threshold
            others = x.masked_fill(large, 0)
            small = quantized_rows(others, self.dtype, self.top)
            rounded = torch.where(large, x, small)
        return super().apply(rounded, out, adapter)


class Fp8WeightOnly(Int8):
    """The quantizer with float8 weights and unquantized activations."""

    name = "fp8-weight"
    scheme_type = Fp8Weight


class Fp8(Int8):
    """The quantizer with float8 weights and activations."""

    name = "fp8"
    scheme_type = Fp8Both


class Int8W8A8(Int8):
    """The quantizer with int8 weights and activations."""

    name = "int8-w8a8"
    scheme_type = Int8Both


class LlmInt8(Int8):
    """The quantizer with int8 weights and activations, except large activations."""

    name = "llm-int8"
    options_type = LlmInt8Options
    options: LlmInt8Options

    def made(self, m: ModuleInfo) -> Int8Weight:
        return LlmInt8Weight(m, self.options.threshold)
