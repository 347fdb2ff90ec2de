"""Token embedding and the output head, which may share its weight.

With several processes each stores the rows of one range of the vocabulary.  If the processes do not divide it, the last
ranges are shorter, and their weights are padded with rows of zeros::

    ids ──► rows of the ids in this range, zeros for others ──► sum over the processes ──► [T, dim]
    x   ──► logits of this range ──► side by side on rank 0 ──► [N, V];  on other ranks [N, 0]
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.core.interfaces.quantizer import ModuleInfo, Shard, StoredWeight, WeightScheme
from minivllm.errors import ModelError, OptionError

from .communicator import share_of
from .linear import Dense, Linear, stored_by
from .module import Module, Wanted, check_shape, fill


class VocabRange:
    """The range of token ids whose rows a process stores: ``first`` up to but not including ``end``.

    Its weight has ``rows`` rows, which may be more than the range."""

    def __init__(self, vocab: int, shard: Shard) -> None:
        self.vocab = vocab
        self.rows = -(-vocab // shard.size)
        begin = shard.rank * self.rows
        self.first = min(vocab, begin)
        self.end = min(vocab, begin + self.rows)

    def cut(self, tensor: Tensor) -> Tensor:
        """Return the range's rows [rows, ...] of a tensor [V, ...], padded with rows of zeros."""
        mine = tensor[self.first : self.end]
        missing = self.rows - len(mine)
        if not missing:
            return mine
        other_axes = (0, 0) * (mine.dim() - 1)
        return F.pad(mine, (*other_axes, 0, missing))


class Embedding(Module):
    """A token embedding: ids i64 [T] -> [T, dim].  With a quantized weight (``scheme``) a call dequantizes its rows."""

    def __init__(self, info: ModuleInfo, rows: int, scheme: WeightScheme | None = None, group: Any = None) -> None:
        """Allocate this process's part of an embedding that has ``rows`` rows in total.

        ``info`` describes the part of this process.  ``group`` is the communicator of the processes that share the
        rows; None means that this process has all rows.  ``scheme`` None means an unquantized weight."""
        super().__init__(info.name)
        self.info = info
        self.scheme = scheme
        self.group = group
        self.range = VocabRange(rows, share_of(group))
        self.dim = info.in_features
        self.dtype: torch.dtype = getattr(torch, info.dtype)
        if scheme is None:
            self.weight = torch.empty(self.range.rows, self.dim, dtype=self.dtype, device=info.device)
        self.tensors = {"weight": self.weight} if scheme is None else dict(scheme.tensors)

    def wanted(self) -> Wanted:
        return {("", "weight"): (self.range.vocab, self.dim)}

    def load(self, part: str, param: str, tensor: Tensor) -> None:
        check_shape(tensor, (self.range.vocab, self.dim))
        mine = self.range.cut(tensor)
        if self.scheme is None:
            fill(self.weight, mine)
        else:
            whole, _ = self.info.parts[0]
            self.scheme.load(param, mine, whole)

    def finish(self) -> None:
        if self.scheme is not None:
            self.scheme.finish()
            self.tensors = dict(self.scheme.tensors)

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows [T, dim] of this process's weight with the indices ``ids`` i64 [T]."""
        if self.scheme is None:
            return F.embedding(ids, self.weight)
        return self.scheme.gather(ids, self.dtype)

    def __call__(self, ids: Tensor) -> Tensor:
        if self.group is None:
            return self.rows(ids)
        first = self.range.first
        here = (ids >= first) & (ids < self.range.end)
        row = torch.where(here, ids - first, 0)
        x = self.rows(row).masked_fill_(~here[:, None], 0)
        self.group.all_reduce(x)
        return x


def beside(logits: Tensor, vocab: int, group: Any) -> Tensor:
    """Gather the logits of all ranks' vocabulary ranges on rank 0, and return the ``vocab`` columns there, [N, V].

    Other ranks return [N, 0].  Without a ``group`` there is one process, and ``logits`` are returned unchanged.
    """
    if group is None:
        return logits
    whole = group.gather(logits, vocab)
    return logits[:, :0] if whole is None else whole


class LMHead(Linear):
    """The output head with its own weight: hidden states [N, dim] -> logits [N, V]."""

    def __init__(self, info: ModuleInfo, scheme: WeightScheme, vocab: int, group: Any = None) -> None:
        super().__init__(info, scheme)
        self.range = VocabRange(vocab, info.shard)
        self.over = group

    def wanted(self) -> Wanted:
        mine = super().wanted()
        vocab = self.range.vocab
        for key, shape in mine.items():
            if shape is not None:
                mine[key] = (vocab, *shape[1:])
        return mine

    def load(self, part: str, param: str, tensor: Tensor) -> None:
        if self.over is None:
            super().load(part, param, tensor)
            return
        whole = self.wanted()[part, param]
        # only the weight scheme can slice a packed weight; ``ModuleParts.lm_head`` has checked that it divides
        # evenly
        if whole is None or getattr(self.scheme, "cuts_parts", False):
            super().load(part, param, tensor)
            return
        check_shape(tensor, whole)
        self.scheme.load(param, self.range.cut(tensor), part)

    def __call__(self, x: Tensor) -> Tensor:
        return beside(super().__call__(x), self.range.vocab, self.over)


class TiedLMHead(Module):
    """The output head that shares the weight of the embedding, quantized or not.

    If ``scheme_of`` quantizes only the head, ``finish`` makes a quantized copy of the loaded embedding.  ``untie``
    replaces the shared weight by a separate one; call it before any weight is loaded.
    """

    def __init__(
        self,
        info: ModuleInfo,
        tied: Embedding,
        scheme_of: Callable[[ModuleInfo], WeightScheme | None],
        fuse: bool = False,
        invariant: bool = False,
    ) -> None:
        """Share the weight of ``tied``.  OptionError if the embedding and the head would have two quantized forms."""
        super().__init__(info.name)
        self.info = info
        self.tied = tied
        self.part = info.parts[0][0]
        self.scheme_of = scheme_of
        self.fuse = fuse
        self.invariant = invariant
        self.shared = tied.scheme
        described = info if self.shared is None else replace(info, device="meta")
        own_scheme = scheme_of(described)
        if self.shared is not None and own_scheme is not None and type(own_scheme) is not type(self.shared):
            kinds = f"{type(self.shared).__name__} and {type(own_scheme).__name__}"
            raise OptionError(
                f"{info.name} shares the weight of {tied.name}, and they are to be quantized in two ways ({kinds}): "
                "expected the same for both, or the embedding unquantized"
            )
        self.scheme = None if self.shared is not None else own_scheme
        self.tensors = dict(self.scheme.tensors) if self.scheme else {}
        bare = self.shared is None and self.scheme is None
        self.plain = Dense(info, fuse, tied.weight, invariant) if bare else None
        self.own: LMHead | None = None

    def untie(self) -> None:
        if self.shared is not None:
            self.scheme = self.scheme_of(self.info)
        self.plain = self.shared = None
        scheme = self.scheme or Dense(self.info, self.fuse, invariant=self.invariant)
        self.own = LMHead(self.info, scheme, self.tied.range.vocab, self.tied.group)
        self.tensors = self.own.tensors

    def wanted(self) -> Wanted:
        return {} if self.own is None else self.own.wanted()

    def load(self, part: str, param: str, tensor: Tensor) -> None:
        if self.own is None:
            raise ModelError(f"{self.name} shares the embedding's weight: expected no tensor for it")
        self.own.load(part, param, tensor)

    def finish(self) -> None:
        if self.own is not None:
            self.own.finish()
            self.tensors = self.own.tensors
        elif self.plain is not None:
            self.plain.finish()
        elif self.scheme is not None:
            self.scheme.load("weight", self.tied.weight, self.part)
            self.scheme.finish()
            self.tensors = dict(self.scheme.tensors)

    def release(self) -> None:
        layer = self.own or self.plain
        if layer is not None:
            layer.release()

    def refresh(self, params: Collection[str]) -> None:
        if self.own is not None:
            self.own.refresh(params)
        elif self.plain is not None:
            self.plain.refresh()

    def stored(self) -> StoredWeight | None:
        return self.own.stored() if self.own is not None else stored_by(self._weight())

    def _weight(self) -> WeightScheme:
        weight = self.plain or self.scheme or self.shared
        assert weight is not None
        return weight

    def __call__(self, x: Tensor) -> Tensor:
        if self.own is not None:
            return self.own(x)
        return beside(self._weight().apply(x), self.tied.range.vocab, self.tied.group)
