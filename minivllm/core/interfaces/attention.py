"""The attention seam: where keys and values live, and how queries read them.

A back end sees three things: the *spec* of a layer (heads, dimensions, window ...), the *cache* of that layer (named
tensors whose first axis is the block), and the *meta* of the step (which rows, how long, where).  It decides the
layout of a block; the engine decides which block belongs to whom.

Layout of a step.  Rows are sequences, tokens are packed row after row, rows that bring one token come first::

    row        0   1   2        3                4
    q_len      1   1   1        4                3
    token      a   b   c   d0 d1 d2 d3   e0 e1 e2          T = 10 tokens, R = 5 rows, decode_rows = 3
    cu_q       0   1   2   3             7          10

KV layer groups (G) are layers that share a geometry (KV heads, dimensions, window); each has a block table of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .attnspec import AttnSpec as AttnSpec

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from .kvformat import KVFormat, KVLayout

# 1.1: AttentionContext.prepare_qk; 1.2: forward is asked for no scores; 1.3: AttnMeta.position;
# 1.4: AttnSpec.alibi; 1.5: the trait ``approximate``, AttentionBackend.selected and most_keys
API = (1, 5)
# Never handed to a sequence.  Padded, stopped and failed rows write there, so it may hold NaN; ``write`` may clear it.
NULL_BLOCK = 0


@dataclass(frozen=True)
class GraphKey:
    """The captured shape that a step runs in: ``rows`` and ``tokens`` are the padded sizes; eager steps have none.

    A back end that declares ``plan: device`` has ``plan`` captured with the step.  In a captured mixed step only the
    device knows who brings how much: ``AttnMeta.decode_rows`` is then the number of rows, and ``q_len`` is 1 for those
    that decode (they still come first), more for those behind them, and 0 for what fills up the rows.
    """

    kind: str = "eager"  # eager | decode | mixed
    rows: int = 0
    tokens: int = 0
    span: int = 0  # no row's context is longer


@dataclass
class AttnMeta:
    """Tensors that describe a step, on the device.  R rows, T tokens, G KV groups, S slots, M table columns.

    ``kv_len`` and the host copies count the tokens of this step too, so a row's queries are the last ``q_len`` of
    ``kv_len`` positions (bottom-right causal).  For a row that met its end on the device while the step was on its way
    they count on; what is computed for it goes to the null block and is dropped.
    """

    slots: Tensor  # i64 [R] row -> slot
    cu_q: Tensor  # i32 [R + 1]
    q_len: Tensor  # i32 [R]
    kv_len: Tensor  # i32 [G, R]
    # i64 [T] the row of ``QKPre.cos`` for each token: its position, or behind all positions for
    # requests whose rotary embedding is another one
    position: Tensor
    row: Tensor  # i64 [T] the row of each token
    table: Tensor  # i32 [G, S, M] (slot, index) -> block
    slot_map: Tensor  # i64 [G, T] block * block_size + offset where the token's K and V go
    block: int  # tokens per block
    decode_rows: int  # rows [0, decode_rows) bring one token each
    host_q_len: np.ndarray  # i32 [R]
    host_kv_len: np.ndarray  # i32 [G, R]
    # what ``plan`` prepared, shared by the layers of a step
    work: dict[Any, Any] = field(default_factory=dict)


@dataclass
class QKPre:
    """What happens to q and k between projection and attention: optional per-head RMSNorm, then rotary embedding.

    ``cos`` and ``sin`` are [rows, rotary_dim] float32, halves repeated (the "rotate half" convention).
    """

    cos: Tensor | None = None
    sin: Tensor | None = None
    q_norm: Tensor | None = None  # [dim_qk]
    k_norm: Tensor | None = None
    eps: float = 1e-6
    # q_norm and k_norm for each head of q and k, kept by who has use for it
    both: Tensor | None = None


@dataclass
class AttnLayer:
    """One attention layer as a back end sees it; ``cache`` is filled when the KV memory is allocated."""

    index: int
    group: int
    spec: AttnSpec
    # name -> [num_blocks, *layout.tensors[name].shape]
    cache: Mapping[str, Tensor] = field(default_factory=dict)
    sinks: Tensor | None = None  # [heads] float32
    slopes: Tensor | None = None  # [heads] float32, ``spec.alibi`` on the device


@dataclass(frozen=True)
class AttentionContext:
    """What a back end is told when it is made.

    ``prepare_qk(q, k, position, pre)`` gives q and k [T, heads, dim_qk] normalised and rotated as ``pre`` says, at
    ``position`` i64 [T]: the engine's own operations, for a back end that has no kernel for them.
    """

    device: str
    dtype: str
    kv_format: KVFormat
    block: int
    max_rows: int
    max_len: int
    prepare_qk: Callable[[Tensor, Tensor, Tensor, QKPre], tuple[Tensor, Tensor]]
    batch_invariant: bool = False
    fuse: bool = True  # False: no fused kernels, so that their share can be measured


class AttentionBackend(ABC):
    """Reads and writes the paged KV cache.  One instance serves all layers; state that belongs to a step goes into
    ``meta.work``.  Contract: a query sees exactly the positions ``<=`` its own of its own row (within the window), read
    from the cache after ``write``; blocks that the row does not own are never read; ``write`` touches the named slots
    and nothing else.
    """

    def __init__(self, options: Any, ctx: AttentionContext) -> None:
        self.options, self.ctx = options, ctx

    def layout(self, spec: AttnSpec, fmt: KVFormat, block: int) -> KVLayout:
        """Named tensors of one block.  Default: ``k`` [block, kv_heads, dim_qk] and ``v`` [block, kv_heads, dim_v]."""
        return fmt.layout(spec, block)

    def plan(self, meta: AttnMeta, key: GraphKey) -> None:  # noqa: B027  (optional)
        """Once a step, before the layers run: prepare what all layers share in ``meta.work``."""

    def write(
        self, layer: AttnLayer, q: Tensor, k: Tensor, v: Tensor, meta: AttnMeta, pre: QKPre | None
    ) -> Tensor:
        """Normalise and rotate q and k, store k and v at ``meta.slot_map[layer.group]``; returns q [T, heads, dim_qk].

        q [T, heads, dim_qk], k [T, kv_heads, dim_qk], v [T, kv_heads, dim_v].  This default is unfused.
        """
        if pre is not None:
            q, k = self.ctx.prepare_qk(q, k, meta.position, pre)
        self.ctx.kv_format.store(layer.cache, k, v, meta.slot_map[layer.group])
        return q

    @abstractmethod
    def forward(
        self,
        layer: AttnLayer,
        q: Tensor,
        meta: AttnMeta,
        out: Tensor,
        lse: Tensor | None = None,
    ) -> None:
        """Attend, writing all of ``out`` [T, heads, dim_v] and changing nothing else.

        Where claimed, write ``lse`` [T, heads] float32, the natural logarithm of the softmax's denominator (sink
        included), with which the answers over parts of a context are merged.  Where it is not claimed it is refused:
        PluginError unless None.
        """

    def selected(self, layer: AttnLayer, q: Tensor, meta: AttnMeta) -> Sequence[Tensor]:
        """Return the keys that ``forward`` attends to, bool [q_len, heads, kv_len] of each row; nothing is written.

        For the trait ``approximate`` only.  ``forward`` is exact attention over these keys.  They are keys that the
        query may see, at least one and at most ``most_keys``, and depend on the row itself alone.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say which keys it selects")

    def most_keys(self, visible: int, queries: int) -> int:
        """Return how many of ``visible`` keys a query attends to at most, in a row of ``queries`` queries."""
        return visible
