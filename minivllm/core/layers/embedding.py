"""Token embedding and the output head, which may share its weight.  Both are whole on every process."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.core.interfaces.quantizer import ModuleInfo, WeightScheme

from .linear import Linear
from .matmul import matmul, pack
from .module import Module


class Embedding(Module):
    """ids i64 [T] -> [T, dim]."""

    def __init__(self, name: str, rows: int, dim: int, dtype: torch.dtype, device: str) -> None:
        super().__init__(name)
        self.weight = torch.empty(rows, dim, dtype=dtype, device=device)
        self.tensors = {"weight": self.weight}

    def __call__(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class LMHead(Linear):
    """Hidden states [N, dim] -> logits [N, V] with a weight of its own."""


class TiedLMHead(Module):
    """The head whose weight is the embedding's; a quantized one (``scheme``) makes its own copy once that is loaded."""

    def __init__(self, info: ModuleInfo, tied: Embedding, scheme: WeightScheme | None) -> None:
        super().__init__(info.name)
        self.tied, self.scheme, self.part = tied, scheme, info.parts[0][0]
        self.tensors = dict(scheme.tensors) if scheme else {}
        self.packed: Tensor | None = None

    def wanted(self) -> dict[tuple[str, str], tuple[int, ...] | None]:
        return {}

    def finish(self) -> None:
        if self.scheme is not None:
            self.scheme.load("weight", self.tied.weight, self.part)
            self.scheme.finish()
            self.tensors = dict(self.scheme.tensors)
        else:
            self.packed = pack(self.tied.weight)

    def __call__(self, x: Tensor) -> Tensor:
        return matmul(x, self.tied.weight, self.packed) if self.scheme is None else self.scheme.apply(x)
