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
    """A weight of 4 bits with a scale for each ``group`` inputs of a row, computed from floating-point numbers."""

    def __init__(self, info: ModuleInfo, group: int) -> None:
        out, inp, device = info.out_features, info.in_features, info.device
        weight = torch.empty(out, inp // 2, dtype=torch.uint8, device=device)
        scale = torch.empty(out, inp // group, dtype=torch.float32, device=device)
        numbers = torch.tensor(NF4_TABLE, dtype=torch.float32)
        table = torch.empty_like(numbers, device=device)
        super().__init__(info, weight, scale, table)
        self._numbers = numbers
        both = numbers[1:] + numbers[:-1]
        middles = both / 2
        self._bounds = middles.to(device)

    def quantize(self, w: Tensor, rows: slice) -> None:
        count, groups = len(w), self.scale.shape[1]
        wide = w.to(self.weight.device).float()
        blocks = wide.view(count, groups, -1)
        largest = blocks.abs().amax(2)
        divisor = torch.where(largest > 0, largest, 1)
        unit = blocks / divisor[..., None]
        codes = torch.bucketize(unit, self._bounds, out_int32=True)
        by_row = codes.to(torch.uint8).view(count, -1)
        self.weight[rows] = pack(by_row)
        self.scale[rows] = largest

    def finish(self) -> None:
        # the table is a buffer, which is filled with the 16 numbers of NF4 after the weights were loaded
        self.table.copy_(self._numbers)
        group = self.info.in_features // self.scale.shape[1]
        self.kernels = kernels_of(self.weight, self.scale, None, group, self.table)

    def joined(self, bias: Tensor | None, mode: int, activation: str) -> Any:
        return joined(self.kernels, bias, mode, activation)

    def served(self, device: str, sm: int) -> Mapping[str, str]:
        return served_by(self.weight.dtype, device, sm, table=True)


class Nf4(OnlineQuantizer):
    name = "nf4"
    options_type = Nf4Options
    options: Nf4Options

    def made(self, m: ModuleInfo) -> WeightScheme:
        group = self.options.group_size
        if m.in_features % group:
            raise does_not_divide("nf4", m, group, (32, 64, 128))
        return Nf4Weight(m, group)
