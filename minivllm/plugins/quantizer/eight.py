"""8 bits beside int8's: float8 weights, and activations that are quantized too, row by row as they come.

float8 here is e4m3: 4 bits of exponent and 3 of significand, up to 448, no infinity (arXiv:2209.05433).  A weight's
element is off by at most 1/16 of itself, and where int8 has steps of a row's largest over 127, small elements keep
their digits.  With activations of 8 bits the products are those of the tensor cores' 8-bit modes, twice as fast as
those of bfloat16; each row of x is scaled by its own largest element (dynamic, per token), which needs no calibration.
Rows are rounded in steps of few rows too, where nothing is gained by it: what a token becomes would else depend, by far
more than rounding, on how many are beside it.
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
    steps = wide / torch.where(scale > 0, scale, 1)
    steps = steps.round_() if dtype == torch.int8 else steps.clamp_(-top, top).to(dtype).float()
    return (steps * scale).to(x.dtype)


class Fp8Weight(Int8Weight):
    """``weight`` float8_e4m3fn [out, in], ``scale`` float32 [out]."""

    dtype, top = torch.float8_e4m3fn, 448.0

    def codes(self, steps: Tensor) -> Tensor:
        return steps.clamp_(-self.top, self.top).to(self.dtype)

    def stored(self) -> StoredWeight:
        return super().stored()

    def joined(self, bias: Tensor | None, mode: int, activation: str) -> Any:
        return super().joined(bias, mode, activation)


class _Both(Int8Weight):
    """And x [T, in] in 8 bits; experts multiply x as it is."""

    def finish(self) -> None:
        self.kernels = scaled_kernels_of(self.weight, self.scale)

    def apply(self, x: Tensor, out: Tensor | None = None, adapter: Any = None) -> Tensor:
        no_adapter(self, adapter)
        if self.kernels is not None:
            return self.kernels(x, out)
        y = self._product(quantized_rows(x, self.dtype, self.top), slice(0, len(self.weight)))
        return y if out is None else out.copy_(y)

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
    """``weight`` int8 [out, in], ``scale`` float32 [out]; of x [T, in] what is smaller than ``threshold`` is rounded.

    LLM.int8() (arXiv:2208.07339) multiplies inputs that are large in any row of a batch apart from the others, in 16
    bits.  Here each element is looked at by itself, so that no row depends on those beside it: a single row is what the
    paper makes of it.  One product serves both, since an element is in one of them.
    """

    homogeneous = False  # what is large is told by a number that does not change with x

    def __init__(self, info: ModuleInfo, threshold: float) -> None:
        super().__init__(info)
        self.threshold = threshold

    def finish(self) -> None:
        super().finish()
        if self.kernels is not None:
            self.kernels.hopper = False  # which rounds rows once more, and not only the small elements

    def apply(self, x: Tensor, out: Tensor | None = None, adapter: Any = None) -> Tensor:
        if self.kernels is not None:
            from minivllm.device.kernels.scaled import rounded_but_large

            return super().apply(rounded_but_large(x.contiguous(), self.threshold), out, adapter)
        large = x.abs() >= self.threshold
        small = quantized_rows(x.masked_fill(large, 0), self.dtype, self.top)
        return super().apply(torch.where(large, x, small), out, adapter)


class Fp8WeightOnly(Int8):
    """float8 weights, activations as they are."""

    name, scheme_type = "fp8-weight", Fp8Weight


class Fp8(Int8):
    """float8 weights and activations."""

    name, scheme_type = "fp8", Fp8Both


class Int8W8A8(Int8):
    """int8 weights and activations."""

    name, scheme_type = "int8-w8a8", Int8Both


class LlmInt8(Int8):
    """int8 weights and activations, of which large ones stay as they are."""

    name, options_type = "llm-int8", LlmInt8Options
    options: LlmInt8Options

    def made(self, m: ModuleInfo) -> Int8Weight:
        return LlmInt8Weight(m, self.options.threshold)
