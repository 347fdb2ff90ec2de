"""Weight-only NF4, made while loading, with W[o, i] = absmax[o, g] * TABLE[q[o, i]], g = i // 64, as in bitsandbytes.

The 16 numbers are quantiles of a normal distribution, scaled to -1 and 1 at the ends, and include 0 (QLoRA,
arXiv:2305.14314, appendix E).  They are dense where weights are frequent, and the largest element of a block is exact.
Codes and scales are those of bitsandbytes, which need not be installed, even on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from minivllm.core.interfaces.quantizer import ModuleInfo, WeightScheme

from .fast import joined, kernels_of, served_by
from .forms import TableRows
from .int4 import does_not_divide, pack
from .online import OnlineQuantizer
from .options import Nf4Options
from .spec import NF4_TABLE
from .tiled import MadeByTiles


class Nf4Weight(MadeByTiles, TableRows):
    def __init__(self, info: ModuleInfo, group: int) -> None:
        weight = torch.empty(info.out_features, info.in_features // 2, dtype=torch.uint8, device=info.device)
        scale = torch.empty(info.out_features, info.in_features // group, dtype=torch.float32, device=info.device)
        numbers = torch.tensor(NF4_TABLE, dtype=torch.float32)
        super().__init__(info, weight, scale, torch.empty(len(numbers), dtype=torch.float32, device=info.device))
        self._numbers, self._bounds = numbers, ((numbers[1:] + numbers[:-1]) / 2).to(info.device)

    def quantize(self, w: Tensor, rows: slice) -> None:
        blocks = w.to(self.weight.device).float().view(len(w), self.scale.shape[1], -1)
        largest = blocks.abs().amax(2)
        unit = blocks / torch.where(largest > 0, largest, 1)[..., None]
        codes = torch.bucketize(unit, self._bounds, out_int32=True).to(torch.uint8)
        self.weight[rows] = pack(codes.view(len(w), -1))
        self.scale[rows] = largest

    def finish(self) -> None:
        self.table.copy_(self._numbers)  # set after all other tensors are loaded
        group = self.info.in_features // self.scale.shape[1]
        self.kernels = kernels_of(self.weight, self.scale, None, group, self.table)

    def joined(self, bias: Tensor | None, mode: int, activation: str) -> Any:
        return joined(self.kernels, bias, mode, activation)

    def served(self, device: str, sm: int) -> Mapping[str, str]:
        return served_by(self.weight.dtype, device, sm, table=True)


class Nf4(OnlineQuantizer):
    name, options_type = "nf4", Nf4Options
    options: Nf4Options

    def made(self, m: ModuleInfo) -> WeightScheme:
        group = self.options.group_size
        if m.in_features % group:
            raise does_not_divide("nf4", m, group, (32, 64, 128))
        return Nf4Weight(m, group)
