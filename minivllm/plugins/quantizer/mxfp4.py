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
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def unpack(blocks: Tensor, scales: Tensor) -> Tensor:
    """Unpack blocks u8 [rows, groups, 16] with scales u8 [rows, groups] to float32 [rows, groups * 32]."""
    table = torch.tensor([*VALUES, *(-v for v in VALUES)], device=blocks.device)
    elements = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    return torch.ldexp(table[elements.long()], (scales.int() - 127)[..., None]).flatten(1)


class UnpackedExperts(DenseExperts):
    """Experts whose ``blocks`` and ``scales`` of each part, in either order, are unpacked to a weight while loading."""

    def __init__(self, info: ModuleInfo) -> None:
        super().__init__(info)
        self._half: dict[str, dict[str, Tensor]] = {}

    def params(self) -> dict[str, tuple[int, ...]]:
        return packed_shapes(self.info)

    def load(self, param: str, tensor: Tensor, part: str) -> None:
        rows = checked_rows(self.info, param, tensor, part)
        half = self._half.setdefault(part, {})
        half[param] = tensor
        if len(half) == 2:
            del self._half[part]
            pair = (half[name].to(self.weight.device) for name in ("blocks", "scales"))
            self.weight[rows] = unpack(*pair).to(self.weight.dtype)


class KeptExperts(Tiled):
    """Experts that keep ``blocks`` and ``scales`` of all rows, 4.25 bits per element.

    The rows of an expert are converted to numbers when it is used, some at a time.
    """

    elsewhere = WITHOUT_KERNELS

    def __init__(self, info: ModuleInfo) -> None:
        made = {n: torch.empty(s, dtype=torch.uint8, device=info.device) for n, s in packed_shapes(info).items()}
        super().__init__(info, **made)
        self.blocks, self.scales = made["blocks"], made["scales"]

    def params(self) -> dict[str, tuple[int, ...]]:
        return packed_shapes(self.info)

    def load(self, param: str, tensor: Tensor, part: str) -> None:
        self.tensors[param][checked_rows(self.info, param, tensor, part)] = tensor.to(self.blocks.device)

    def numbers(self, rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
        return unpack(self.blocks[rows], self.scales[rows]).to(dtype)


def packed_shapes(info: ModuleInfo) -> dict[str, tuple[int, ...]]:
    rows, groups = info.out_features, info.in_features // GROUP
    return {"blocks": (rows, groups, GROUP // 2), "scales": (rows, groups)}


def checked_rows(info: ModuleInfo, param: str, tensor: Tensor, part: str) -> slice:
    """Return the rows of a part.  Raise ModelError if the tensor has another shape or dtype."""
    rows = part_rows(info, part)
    want = (rows.stop - rows.start, *packed_shapes(info)[param][1:])
    if tuple(tensor.shape) != want or tensor.dtype != torch.uint8:
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise ModelError(f"{param} of shape {list(tensor.shape)} and {dtype}, expected {list(want)} and uint8")
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
        if m.in_features % GROUP:
            raise ModelError(
                f"{m.name} has {m.in_features} inputs here: expected a multiple of {GROUP}, which share a scale"
            )
        return type(self).experts(m)


class Mxfp4Kept(Mxfp4):
    """The quantizer that keeps experts in MXFP4."""

    experts = KeptExperts
