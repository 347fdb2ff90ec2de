"""Experts in MXFP4 (OCP Microscaling Formats 1.0), the format of GPT-OSS, unpacked while loading or when they are used.

32 neighbouring inputs of a row share a power of two.  An element has a sign, two bits of exponent and one of mantissa::

    blocks  uint8 [rows, in / 32, 16]   two elements a byte, the first in its low half
    scales  uint8 [rows, in / 32]       exponents, 127 stands for 1
    weight  [rows, in] = element * 2 ** (scale - 127), exact in bfloat16
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from minivllm.core.interfaces.quantizer import ModuleInfo, Quantizer, WeightScheme
from minivllm.device.layers.expert_linear import DenseExperts
from minivllm.device.layers.linear import part_rows
from minivllm.errors import ModelError

from .forms import WITHOUT_KERNELS
from .tiled import Tiled

GROUP = 32
# numbers of the codes 0 to 7; the codes 8 to 15 stand for the negative numbers
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def unpack(blocks: Tensor, scales: Tensor) -> Tensor:
    """Unpack blocks u8 [rows, groups, 16] with scales u8 [rows, groups] to float32 [rows, groups * 32]."""
    negative = [-value for value in VALUES]
    table = torch.tensor([*VALUES, *negative], device=blocks.device)
    halves = torch.stack([blocks & 15, blocks >> 4], dim=-1)
    codes = halves.flatten(-2)
    elements = table[codes.long()]
    exponents = scales.int() - 127
    numbers = torch.ldexp(elements, exponents[..., None])
    return numbers.flatten(1)


class UnpackedExperts(DenseExperts):
    """Experts whose weight is unpacked while loading, as soon as both ``blocks`` and ``scales`` of a part are there."""

    def __init__(self, info: ModuleInfo) -> None:
        super().__init__(info)
        self._half: dict[str, dict[str, Tensor]] = {}

    def params(self) -> dict[str, tuple[int, ...]]:
        return packed_shapes(self.info)

    def load(self, param: str, tensor: Tensor, part: str) -> None:
        rows = checked_rows(self.info, param, tensor, part)
        half = self._half.setdefault(part, {})
        half[param] = tensor
        if len(half) < 2:
            return
        del self._half[part]
        weight = self.weight
        blocks, scales = half["blocks"], half["scales"]
        numbers = unpack(blocks.to(weight.device), scales.to(weight.device))
        weight[rows] = numbers.to(weight.dtype)


class KeptExperts(Tiled):
    """Experts that keep ``blocks`` and ``scales`` of all rows, 4.25 bits per element.

    The rows of an expert are converted to numbers when it is used, some at a time.
    """

    elsewhere = WITHOUT_KERNELS

    def __init__(self, info: ModuleInfo) -> None:
        made = {}
        for name, shape in packed_shapes(info).items():
            made[name] = torch.empty(shape, dtype=torch.uint8, device=info.device)
        super().__init__(info, **made)
        self.blocks = made["blocks"]
        self.scales = made["scales"]

    def params(self) -> dict[str, tuple[int, ...]]:
        return packed_shapes(self.info)

    def load(self, param: str, tensor: Tensor, part: str) -> None:
        rows = checked_rows(self.info, param, tensor, part)
        kept = self.tensors[param]
        kept[rows] = tensor.to(kept.device)

    def numbers(self, rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
        numbers = unpack(self.blocks[rows], self.scales[rows])
        return numbers.to(dtype)


def packed_shapes(info: ModuleInfo) -> dict[str, tuple[int, ...]]:
    """Return the shapes of ``blocks`` and ``scales`` for all experts of a layer."""
    rows = info.out_features
    groups = info.in_features // GROUP
    return {"blocks": (rows, groups, GROUP // 2), "scales": (rows, groups)}


def checked_rows(info: ModuleInfo, param: str, tensor: Tensor, part: str) -> slice:
    """Return the rows of a part of the module.

    Raise ModelError if ``tensor``, which is loaded as the parameter ``param``, has another shape or dtype.
    """
    rows = part_rows(info, part)
    _, *row_shape = packed_shapes(info)[param]
    want = [rows.stop - rows.start, *row_shape]
    shape = list(tensor.shape)
    if shape != want or tensor.dtype != torch.uint8:
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise ModelError(f"{param} of shape {shape} and {dtype}, expected {want} and uint8")
    return rows


class Mxfp4(Quantizer):
    """The quantizer that unpacks experts in MXFP4.  All other modules are as in the checkpoint."""

    experts: Callable[[ModuleInfo], WeightScheme] = UnpackedExperts

    def __init__(self, options: Any = None, checkpoint: Mapping[str, Any] | None = None) -> None:
        super().__init__(options, checkpoint)
        method = (checkpoint or {}).get("quant_method", "no method")
        if method != "mxfp4":
            raise ModelError(f"the checkpoint is quantized with {method}: expected mxfp4 for this quantizer")

    def scheme(self, m: ModuleInfo) -> WeightScheme | None:
        if m.kind != "experts":
            return None
        inputs = m.in_features
        if inputs % GROUP:
            raise ModelError(f"{m.name} has {inputs} inputs here: expected a multiple of {GROUP}, which share a scale")
        return type(self).experts(m)


class Mxfp4Kept(Mxfp4):
    """The quantizer that keeps experts in MXFP4."""

    experts = KeptExperts
