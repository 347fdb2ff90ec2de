"""Token embedding and the output head, which may share its weight.  Both are whole on every process."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.core.interfaces.quantizer import ModuleInfo, WeightScheme

from .linear import Dense, Linear
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

    def __init__(
        self, info: ModuleInfo, tied: Embedding, scheme: WeightScheme | None, fuse: bool = False, invariant=False
    ) -> None:  # fmt: skip
        super().__init__(info.name)
        self.tied, self.scheme, self.part = tied, scheme, info.parts[0][0]
        self.tensors = dict(scheme.tensors) if scheme else {}
        self.plain = Dense(info, fuse, tied.weight, invariant) if scheme is None else None

    def wanted(self) -> dict[tuple[str, str], tuple[int, ...] | None]:
        return {}

    def finish(self) -> None:
        if self.plain is not None:
            self.plain.finish()
            return
        self.scheme.load("weight", self.tied.weight, self.part)
        self.scheme.finish()
        self.tensors = dict(self.scheme.tensors)

    def __call__(self, x: Tensor) -> Tensor:
        return (self.plain or self.scheme).apply(x)
