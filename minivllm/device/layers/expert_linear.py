"""The linear layers of a mixture of experts: one with the stacked weights of all experts, and the router."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.core.interfaces.quantizer import ModuleInfo, WeightScheme

from .invariant import FixedRows
from .linear import Dense, Linear
from .module import Wanted, fill

CHOICE_BIAS = "e_score_correction_bias"


class DenseExperts(Dense):
    """The unquantized weights of all experts of a layer in one matrix, [experts * rows of an expert, in]."""

    def __init__(self, info: ModuleInfo, fuse: bool = False, weight: Tensor | None = None, invariant: bool = False):
        super().__init__(info, fuse, weight, invariant)
        self.each = self.weight.view(info.experts, -1, info.in_features)
        self._fixed: dict[int, FixedRows] = {}
        self._rows = 0

    def finish(self) -> None:
        """Choose the function that multiplies.  It uses no packed copy, which is not faster for the few rows of an
        expert."""
        self.native = self.find_native()

    def release(self) -> None:
        self._fixed.clear()

    def refresh(self) -> None:
        self._fixed.clear()

    def expert(self, x: Tensor, e: int) -> Tensor:
        if self.native is not None:
            rows = self.each.shape[1]
            begin = e * rows
            return self.native(x, slice(begin, begin + rows))
        if not self.invariant or self.weight.device.type != "cpu":
            return F.linear(x, self.each[e])
        if e not in self._fixed:
            self._fixed[e] = FixedRows(self.each[e], self._rows)
            # rows of a library call, equal for all experts because their shapes are equal
            self._rows = self._fixed[e].rows
        return self._fixed[e](x)


class ExpertLinear(Linear):
    """The first or the last linear layer of all experts, with their weights stacked.

    ``split`` divides each expert over the processes.  The caller sums the results of a row split over processes."""

    def load(self, part: str, param: str, tensor: Tensor) -> None:
        if param == "bias" and self.info.split == "row" and self.info.shard.rank > 0:
            # only one process stores the bias of a row split, so that the sum over processes contains it once
            tensor = torch.zeros_like(tensor)
        super().load(part, param, tensor)

    def expert(self, x: Tensor, e: int) -> Tensor:
        """Multiply x [T, in] by the weight of expert e and add its bias: [T, rows of an expert]."""
        y = self.scheme.expert(x, e)
        if self.bias is None:
            return y
        biases = self.bias.view(self.info.experts, -1)
        return y.add_(biases[e])


class RouterLinear(Linear):
    """The router: x [T, in] -> logits [T, E].

    ``choice_bias`` f32 [E] is added to the scores only to choose the experts; None means that there is none."""

    def __init__(self, info: ModuleInfo, scheme: WeightScheme, choice_bias: bool) -> None:
        super().__init__(info, scheme)
        self.choice_bias: Tensor | None = None
        if choice_bias:
            self.choice_bias = torch.empty(info.out_features, dtype=torch.float32, device=info.device)
            self.tensors[CHOICE_BIAS] = self.choice_bias

    def wanted(self) -> Wanted:
        want = super().wanted()
        if self.choice_bias is not None:
            want["", CHOICE_BIAS] = tuple(self.choice_bias.shape)
        return want

    def load(self, part: str, param: str, tensor: Tensor) -> None:
        if param == CHOICE_BIAS and self.choice_bias is not None:
            fill(self.choice_bias, tensor)
        else:
            super().load(part, param, tensor)

    def finish(self) -> None:
        super().finish()
        if self.choice_bias is not None:
            self.tensors[CHOICE_BIAS] = self.choice_bias
