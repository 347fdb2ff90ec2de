"""Score the tokens of a row in the KV cache with a compressor.

    layers 0 1 2 3 ...   ── a part of them ──►  keys [n, layers * kv_heads, dim]  ── score ──►  [layers, kv_heads, n]

A compressor with ``joins_layers`` gets as many layers in one call as ``LOADED`` bytes allow, because the operations of
one layer take longer to launch than to run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from minivllm.core.external_calls import as_exception, call_foreign
from minivllm.core.interfaces.compressor import Compressor, StoredTokens
from minivllm.core.interfaces.plan import StepError
from minivllm.errors import PluginError, describe_error

from .query_store import QueryStore

if TYPE_CHECKING:
    from minivllm.core.interfaces.attention import AttnLayer
    from minivllm.core.interfaces.executor import Wiring
    from minivllm.core.interfaces.kvformat import KVFormat

    from .attention_sums import AttentionSums

LOADED = 1 << 27  # most bytes of keys that are loaded for one call of the compressor
PLAIN = ("minivllm/bf16", "minivllm/fp16", "minivllm/fp32")  # formats that store keys and values without scales


class CompactedRow(NamedTuple):
    """A row to compress: its slot, the ids i32 [n] of the KV blocks with its tokens, and its numbers of tokens."""

    slot: int
    sources: Tensor
    stored: int
    kept: int
    computed: int


class RowScores:
    """Calls of a compressor that score the stored tokens of a row.  ``kernels`` means that Triton kernels read the
    cache."""

    def __init__(
        self, compressor: Compressor, name: str, wiring: Wiring, fmt: KVFormat, dtype: torch.dtype, kernels: bool
    ) -> None:
        self.compressor = compressor
        self.name = name
        self.format = fmt
        self.dtype = dtype
        self.gathers = kernels and wiring.parts["kvformat"].name in PLAIN
        self.queries = QueryStore() if compressor.window else None
        self.sums: AttentionSums | None = None  # attention sums; None unless the compressor reads them
        self.seeds: dict[int, int] = {}  # slot -> sampling seed of its request

    def of(self, layers: list[AttnLayer], row: CompactedRow) -> tuple[Tensor, StepError | None]:
        """Return the scores f32 [layers, kv_heads, stored] of a row's tokens in ``layers``, and an error if the
        compressor raised.

        Layers without scores get scores that increase with the position, so that the newest tokens are kept.
        """
        error = None
        shape = (len(layers), layers[0].spec.kv_heads, row.stored)
        scores = torch.empty(shape, device=row.sources.device)
        first = 0
        for part in self._parts(layers, row.stored):
            end = first + len(part)
            out = scores[first:end]
            first = end
            try:
                out.copy_(self._score(part, row))
            except BaseException as e:
                message = describe_error(as_exception(e), self.compressor)
                error = StepError("rows", self.name, message)
                out.copy_(torch.arange(row.stored, device=out.device))
        infinity = float("inf")
        return scores.nan_to_num_(nan=-infinity, posinf=infinity, neginf=-infinity), error

    def _parts(self, layers: list[AttnLayer], stored: int) -> list[list[AttnLayer]]:
        """Divide the layers of a KV group into parts; the compressor scores the layers of a part in one call."""
        spec = layers[0].spec
        most = 1
        if self.compressor.joins_layers:
            dim = max(spec.dim_qk, spec.dim_v)
            of_layer = spec.kv_heads * dim * stored * self.dtype.itemsize
            most = max(1, LOADED // of_layer)
        count = -(-len(layers) // most)
        size = -(-len(layers) // count)
        return [layers[i : i + size] for i in range(0, len(layers), size)]

    def _score(self, layers: list[AttnLayer], row: CompactedRow) -> Tensor:
        """Return the scores of the compressor, [stored] or [layers, kv_heads, stored].  PluginError for scores of
        another shape."""
        stored = row.stored
        first = layers[0]
        heads = first.spec.kv_heads
        keys, values = self._load(layers, row)
        sums: Tensor | None = None
        counts: Tensor | None = None
        if self.sums is not None:
            sums, counts = self.sums.of(row.slot, layers, stored)
        queries = None
        if self.queries is not None:
            queries = self.queries.of(row.slot, layers)
        tokens = StoredTokens(
            layer=first.index,
            keys=keys,
            values=values,
            queries=queries,
            scale=first.spec.softmax_scale,
            keep=row.kept,
            computed=row.computed,
            seed=self.seeds.get(row.slot, 0),
            attention_sums=sums,
            sum_queries=counts,
            layers=len(layers),
        )
        scores = call_foreign(self.compressor.score, tokens)
        lines = len(layers) * heads
        wanted = f"a tensor [{lines}, {stored}] or [{stored}]"
        if not isinstance(scores, Tensor):
            raise PluginError(f"score() gave {type(scores).__name__}; expected {wanted}")
        shape = tuple(scores.shape)
        if shape not in ((stored,), (lines, stored)):
            raise PluginError(f"score() gave {shape}; expected {wanted}")
        return scores if scores.dim() == 1 else scores.reshape(len(layers), heads, stored)

    def _load(self, layers: list[AttnLayer], row: CompactedRow) -> tuple[Tensor, Tensor]:
        """Return the keys [stored, layers * kv_heads, dim_qk] and the values [stored, layers * kv_heads, dim_v] of a
        row.

        Keys or values that the compressor does not read are zeros, which need no memory.
        """
        spec = layers[0].spec
        loads = self.compressor.loads
        lines = len(layers) * spec.kv_heads
        zero = row.sources.new_zeros((), dtype=self.dtype)
        keys = zero.expand(row.stored, lines, spec.dim_qk)
        values = zero.expand(row.stored, lines, spec.dim_v)
        if not loads:
            return keys, values
        if self.gathers and layers[0].cache["k"].dtype == self.dtype:
            if "keys" in loads or spec.v_in_k:
                keys = self._gathered("k", layers, row)
            if "values" in loads:
                values = keys if spec.v_in_k else self._gathered("v", layers, row)
            return keys, values
        blocks = row.sources.long()[None]
        loaded = [self.format.load(layer.cache, blocks, self.dtype) for layer in layers]
        if "keys" in loads:
            keys = _joined([k[0, : row.stored] for k, _ in loaded])
        if "values" in loads:
            values = _joined([v[0, : row.stored] for _, v in loaded])
        return keys, values

    def _gathered(self, name: str, layers: list[AttnLayer], row: CompactedRow) -> Tensor:
        """Return the keys or values [stored, layers * kv_heads, dim] of a row, read from the cache tensors ``name`` of
        ``layers``."""
        from minivllm.device.kernels.kept_tokens import gather

        lines = gather([layer.cache[name] for layer in layers], row.sources, row.stored)
        return lines.transpose(0, 1)


def _joined(of_layers: list[Tensor]) -> Tensor:
    """Concatenate the tensors [n, heads, dim] of several layers to one tensor [n, layers * heads, dim]."""
    return torch.cat(of_layers, dim=1) if len(of_layers) > 1 else of_layers[0]
