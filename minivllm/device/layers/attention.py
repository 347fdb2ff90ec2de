"""The attention layer, which calls the attention back end with the projections of a model."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from minivllm.core.interfaces.attention import AttentionBackend, AttnLayer, AttnMeta, QKPre
from minivllm.core.interfaces.model import StepTensors
from minivllm.core.interfaces.quantizer import Shard

from .module import Module, Wanted, check_shape, fill

FACTORS = "query factors"  # key of ``AttnMeta.work``, which ``step.forward`` removes before each run


class AttentionLayer(Module):
    """Attention of this process's heads, with the KV cache of one layer.

    A call takes q [T, heads * dim_qk], k [T, kv_heads * dim_qk] and v [T, kv_heads * dim_v], writes k and v to the
    cache, and returns [T, heads * dim_v].  ``pre`` is the norm and rotary embedding of q and k; None means neither."""

    def __init__(self, name: str, layer: AttnLayer, backend: AttentionBackend, device: str, shard: Shard) -> None:
        super().__init__(name)
        self.layer = layer
        self.backend = backend
        self.shard = shard
        self.pre: QKPre | None = None  # norms and rotary tables of q and k in the last call
        # [rows of the rotary tables], the factor of each query by position; None means that queries have none
        self.factors: Tensor | None = None
        if layer.spec.sinks:
            layer.sinks = torch.empty(layer.spec.heads, dtype=torch.float32, device=device)
            self.tensors["sinks"] = layer.sinks
        if layer.spec.alibi is not None:
            layer.slopes = torch.tensor(layer.spec.alibi, dtype=torch.float32, device=device)

    def wanted(self) -> Wanted:
        heads = self.layer.spec.heads * self.shard.size
        return {("", name): (heads,) for name in self.tensors}

    def load(self, part: str, param: str, tensor: Tensor) -> None:
        shape = self.wanted()[part, param]
        assert shape is not None
        check_shape(tensor, shape)
        here = tensor.chunk(self.shard.size)[self.shard.rank]
        fill(self.tensors[param], here)

    def refresh(self, params: Collection[str]) -> None:
        if self.pre is not None:  # drop the copy of the weights of the norms of q and k, which only a CPU makes
            self.pre.both = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, step: StepTensors, pre: QKPre | None = None) -> Tensor:
        layer = self.layer
        spec = layer.spec
        meta = step.meta
        tokens = q.shape[0]
        self.pre = pre
        q = q.view(tokens, spec.heads, spec.dim_qk)
        k = k.view(tokens, spec.kv_heads, spec.dim_qk)
        v = v.view(tokens, spec.kv_heads, spec.dim_v)
        q = self.backend.write(layer, q, k, v, meta, pre)
        if self.factors is not None:
            q = q * self._factors(self.factors, meta)
        if step.queries is not None:
            step.queries.keep(layer.index, q)
        out = q.new_empty(tokens, spec.heads, spec.dim_v)
        sums = step.sums
        norms = None if sums is None else sums.norms(layer, q)
        self.backend.forward(layer, q, meta, out, norms)
        if sums is not None:
            sums.add(layer, q, meta, norms)
        return out.view(tokens, spec.heads * spec.dim_v)

    def _factors(self, factors: Tensor, meta: AttnMeta) -> Tensor:
        """Return the factors [T, 1, 1] of the step's queries.  The first layer of a step stores them for the others."""
        found: dict[int, Tensor] = meta.work.setdefault(FACTORS, {})
        key = id(factors)
        if key not in found:
            of_tokens = factors.index_select(0, meta.position)
            found[key] = of_tokens.view(-1, 1, 1)
        return found[key]
