"""The weights of a mixture of experts: those of all experts in one module, and those of the router."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.core.interfaces.quantizer import ModuleInfo, WeightScheme

from .invariant import FixedRows
from .linear import Dense, Linear
from .module import fill

CHOICE_BIAS = "e_score_correction_bias"


class DenseExperts(Dense):
    """The unquantized weights of all experts, [experts * rows of one, in]."""

    def __init__(self, info: ModuleInfo, fuse: bool = False, weight: Tensor | None = None, invariant: bool = False):
        super().__init__(info, fuse, weight, invariant)
        self.each = self.weight.view(info.experts, -1, info.in_features)
        self._fixed: dict[int, FixedRows] = {}
        self._rows = 0

    def finish(self) -> None:
        """There is nothing to pack: what an expert multiplies is few rows."""

    def expert(self, x: Tensor, e: int) -> Tensor:
        if not self.invariant or self.weight.device.type != "cpu":
            return F.linear(x, self.each[e])
        if e not in self._fixed:
            self._fixed[e] = FixedRows(self.each[e], self._rows)
            self._rows = self._fixed[e].rows  # of one shape all do alike
        return self._fixed[e](x)


class ExpertLinear(Linear):
    """One of the two products of all experts.  Its ``split`` is within each expert; over processes the sum is the
    caller's."""

    def load(self, part: str, param: str, tensor: Tensor) -> None:
        if param == "bias" and self.info.split == "row" and self.info.shard.rank > 0:
            tensor = torch.zeros_like(tensor)  # the sum over processes has it once
        super().load(part, param, tensor)

    def expert(self, x: Tensor, e: int) -> Tensor:
        """x [T, in] -> [T, rows of an expert]."""
        y = self.scheme.expert(x, e)
        return y if self.bias is None else y.add_(self.bias.view(self.info.experts, -1)[e])


class RouterLinear(Linear):
    """Logits [T, E]; with the number of each expert that is added for the choice alone, if there is one."""

    def __init__(self, info: ModuleInfo, scheme: WeightScheme, choice_bias: bool) -> None:
        super().__init__(info, scheme)
        self.choice_bias: Tensor | None = None
        if choice_bias:
            self.choice_bias = torch.empty(info.out_features, dtype=torch.float32, device=info.device)
            self.tensors[CHOICE_BIAS] = self.choice_bias

    def wanted(self) -> dict[tuple[str, str], tuple[int, ...] | None]:
        want = super().wanted()
        return want if self.choice_bias is None else {**want, ("", CHOICE_BIAS): tuple(self.choice_bias.shape)}

    def load(self, part: str, param: str, tensor: Tensor) -> None:
        if param == CHOICE_BIAS and self.choice_bias is not None:
            fill(self.choice_bias, tensor)
        else:
            super().load(part, param, tensor)

    def finish(self) -> None:
        super().finish()
        if self.choice_bias is not None:
            self.tensors[CHOICE_BIAS] = self.choice_bias
