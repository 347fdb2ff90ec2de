"""Token embedding and the output head, which may share its weight.  Both are whole on every process."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.core.interfaces.quantizer import ModuleInfo, StoredWeight, WeightScheme
from minivllm.errors import ModelError

from .linear import Dense, Linear, stored_by
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
    """The head whose weight is the embedding's; a quantized one (``scheme``) makes its own copy once that is loaded.

    ``untie`` gives it a weight of its own after all, before anything is loaded.
    """

    def __init__(
        self, info: ModuleInfo, tied: Embedding, scheme: WeightScheme | None, fuse: bool = False, invariant=False
    ) -> None:
        super().__init__(info.name)
        self.info, self.tied, self.scheme, self.part = info, tied, scheme, info.parts[0][0]
        self.fuse, self.invariant = fuse, invariant
        self.tensors = dict(scheme.tensors) if scheme else {}
        self.plain = Dense(info, fuse, tied.weight, invariant) if scheme is None else None
        self.own: LMHead | None = None

    def untie(self) -> None:
        self.plain = None
        self.own = LMHead(self.info, self.scheme or Dense(self.info, self.fuse, invariant=self.invariant))
        self.tensors = self.own.tensors

    def wanted(self) -> dict[tuple[str, str], tuple[int, ...] | None]:
        return {} if self.own is None else self.own.wanted()

    def load(self, part: str, param: str, tensor: Tensor) -> None:
        if self.own is None:
            raise ModelError(f"{self.name} shares the embedding's weight: want no tensor for it")
        self.own.load(part, param, tensor)

    def finish(self) -> None:
        if self.own is not None:
            self.own.finish()
            self.tensors = self.own.tensors
        elif self.plain is not None:
            self.plain.finish()
        else:
            self.scheme.load("weight", self.tied.weight, self.part)
            self.scheme.finish()
            self.tensors = dict(self.scheme.tensors)

    def stored(self) -> StoredWeight | None:
        return self.own.stored() if self.own is not None else stored_by(self.plain or self.scheme)

    def __call__(self, x: Tensor) -> Tensor:
        if self.own is not None:
            return self.own(x)
        return (self.plain or self.scheme).apply(x)
