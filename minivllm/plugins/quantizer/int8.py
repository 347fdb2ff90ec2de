"""Weight-only int8, made while loading, with W[o, i] = scale[o] * q[o, i], q = round(W / scale), scale = max |W[o]| /
127.

It halves a bf16 model's weights.  Rounding is symmetric per output channel, as in LLM.int8() (arXiv:2208.07339) without
its outlier columns.  Activations are not quantized, so the error of an element is at most scale / 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.core.interfaces.quantizer import ModuleInfo, StoredWeight
from minivllm.device.layers.linear import part_rows
from minivllm.device.layers.module import check_shape
from minivllm.device.layers.stored_product import widened

from .fast import joined, kernels_of, served_by
from .online import OnlineQuantizer
from .tiled import WholeWeight


class ByteRows(WholeWeight):
    """``weight`` int8 or float8 [out, in], ``scale`` float32 [out]."""

    rounds_rows = True  # whether a kernel for many rows may round the rows of x

    def __init__(self, info: ModuleInfo, weight: Tensor, scale: Tensor) -> None:
        super().__init__(info, weight=weight, scale=scale)
        self.weight = weight
        self.scale = scale

    def finish(self) -> None:
        stored = StoredWeight(self.weight, self.scale)
        self.kernels = kernels_of(self.weight, self.scale)
        if self.kernels is not None:
            self.kernels.rounds_rows = self.rounds_rows
        self.native = self.native_product(stored)

    def stored(self) -> StoredWeight:
        return StoredWeight(self.weight, self.scale)

    def joined(self, bias: Tensor | None, mode: int, activation: str) -> Any:
        return joined(self.kernels, bias, mode, activation)

    def served(self, device: str, sm: int) -> Mapping[str, str]:
        native = self.native is not None
        return served_by(self.weight.dtype, device, sm, native=native, rounds_rows=self.rounds_rows)

    def gather(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        steps = self.weight[ids].float()
        numbers = steps * self.scale[ids, None]
        return numbers.to(dtype)

    def _product(self, x: Tensor, rows: slice, out: Tensor | None = None) -> Tensor:
        weight, scale = self.weight[rows], self.scale[rows]
        dtype = x.dtype
        if x.device.type == "cpu" and widened(dtype):
            y = F.linear(x.float(), weight.float())
            y = y.mul_(scale).to(dtype)
        elif dtype == torch.float16:  # sums of unscaled int8 products overflow float16
            numbers = weight.float() * scale[:, None]
            y = F.linear(x, numbers.to(dtype))
        else:
            y = F.linear(x, weight.to(dtype))
            y.mul_(scale)
        return y if out is None else out.copy_(y)


class Int8Weight(ByteRows):
    """An int8 weight that is computed from floating-point numbers, one part at a time."""

    dtype = torch.int8
    top = 127.0  # the largest code

    def __init__(self, info: ModuleInfo) -> None:
        out, inp, device = info.out_features, info.in_features, info.device
        weight = torch.empty(out, inp, dtype=self.dtype, device=device)
        scale = torch.empty(out, dtype=torch.float32, device=device)
        super().__init__(info, weight, scale)

    def params(self) -> dict[str, tuple[int, ...]]:
        return {"weight": tuple(self.weight.shape)}

    def load(self, param: str, tensor: Tensor, part: str) -> None:
        rows = part_rows(self.info, part)
        weight = self.weight
        check_shape(tensor, weight[rows].shape)
        w = tensor.to(weight.device).float()
        tiny = torch.finfo(torch.float32).tiny  # avoids a division by zero for a row of zeros
        largest = w.abs().amax(dim=1)
        scale = largest.div_(self.top).clamp_(min=tiny)
        steps = w / scale[:, None]
        self.scale[rows] = scale
        weight[rows] = self.codes(steps)

    def codes(self, steps: Tensor) -> Tensor:
        """Round multiples of the scales, float32, to stored codes."""
        whole = steps.round_()
        return whole.clamp_(-self.top, self.top).to(self.dtype)

    def stored(self) -> StoredWeight:
        # This override only marks that exactly this class supports the method, because a subclass may multiply in
        # another way.
        return super().stored()

    def joined(self, bias: Tensor | None, mode: int, activation: str) -> Any:
        return super().joined(bias, mode, activation)


class Int8(OnlineQuantizer):
    name = "int8"
    scheme_type: type[Int8Weight] = Int8Weight

    def made(self, m: ModuleInfo) -> Int8Weight:
        return self.scheme_type(m)
