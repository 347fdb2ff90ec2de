"""The attention seam (plug-in interface): how keys and values are stored in the cache, and how queries read them.

An attention back end receives three objects: the *spec* of a layer (heads, dimensions, window), the *cache* of the
layer (named tensors whose first axis is the block), and the *meta* of the step (its rows, their lengths and their block
tables).  The back end chooses the layout inside a block.  The engine assigns blocks to sequences.

Layout of a step.  Each row is a sequence.  The tokens of all rows are packed one row after another.  Rows with one
token come first::

    row        0   1   2        3                4
    q_len      1   1   1        4                3
    token      a   b   c   d0 d1 d2 d3   e0 e1 e2          T = 10 tokens, R = 5 rows, decode_rows = 3
    cu_q       0   1   2   3             7          10

A KV group is a set of layers with the same geometry (KV heads, dimensions, window).  The layers of a group share a
block table.  G is the number of KV groups.
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

# Changes by version: 1.1: AttentionContext.prepare_qk; 1.2: forward no longer returns scores; 1.3:
# AttnMeta.position; 1.4: AttnSpec.alibi; 1.5: the trait ``approximate``, AttentionBackend.selected
# and most_keys 1.6: AttentionBackend.notes, GraphKey.shared, AttentionBackend.shares_from; 1.7:
# AttnMeta.host_sees
API = (1, 7)
# Number of the null block, which no sequence owns.  Padded, stopped and failed rows write to it, so
# it may hold NaN.  ``AttentionBackend.write`` may clear it.
NULL_BLOCK = 0


@dataclass(frozen=True)
class GraphKey:
    """The key of the CUDA graph that a step runs in.  ``rows`` and ``tokens`` are the padded sizes.  An eager step,
    which runs without a graph, has the default values.

    If a back end declares the feature ``plan: device``, its ``plan`` is captured in the graph together with the step.
    In a captured mixed step the number of tokens of each row is not on the host.  ``AttnMeta.decode_rows`` is then
    the total number of rows.  On the device, ``q_len`` is 1 for decoding rows (they come first), larger for prefilling
    rows, and 0 for padding rows.
    """

    kind: str = "eager"  # "eager", "decode" (all rows have one token) or "mixed"
    rows: int = 0
    tokens: int = 0
    span: int = 0  # upper bound of the context lengths of the rows
    # Decoding rows share full blocks at the start of their block tables: the same block numbers mean the same keys and
    # values.  Only back ends with ``shares_from`` get such a step.  They find the rows and blocks on the device.
    shared: bool = field(default=False, kw_only=True)


@dataclass
class AttnMeta:
    """Device tensors that describe a step.  R rows, T tokens, G KV groups, S slots, M columns of a block table.

    ``kv_len`` and the host copies include the tokens of this step.  The queries of a row are therefore the last
    ``q_len`` of its ``kv_len`` positions (bottom-right causal mask).  A sequence may end on the device before the host
    can see it.  Its lengths then continue to grow in the next steps; the results of such rows go to the null block and
    are dropped.
    """

    slots: Tensor  # i64 [R] slot of each row
    cu_q: Tensor  # i32 [R + 1] the tokens of row r are cu_q[r] to cu_q[r + 1] - 1
    q_len: Tensor  # i32 [R]
    kv_len: Tensor  # i32 [G, R]
    # i64 [T] the row of ``QKPre.cos`` for each token.  It is the position of the token.  Requests that use the
    # rotary embedding of long contexts read a second table behind the first, so max_model_len + 1 is added.  A part of
    # an image that has a position for each axis has a row of its own behind the tables.
    position: Tensor
    row: Tensor  # i64 [T] index of the row to which each token belongs
    # i32 [G, S, M] block tables: number of the block at each index of a slot, in each KV group
    table: Tensor
    # i64 [G, T] block * block_size + offset at which the token's K and V are stored
    slot_map: Tensor
    block: int  # tokens per block
    decode_rows: int  # count of the rows with one token, which come first
    host_q_len: np.ndarray  # i32 [R]
    host_kv_len: np.ndarray  # i32 [G, R]
    # i64 [T] the last position that each token sees; None means its own.  A token of an image may see the later ones of
    # the image, which are tokens of the same step.  Only back ends with the feature ``spans`` get such a step.
    host_sees: np.ndarray | None = field(default=None, kw_only=True)
    # results that ``AttentionBackend.plan`` computes once and all layers of the step use
    work: dict[Any, Any] = field(default_factory=dict)


@dataclass
class QKPre:
    """The operations on q and k between projection and attention: an optional RMSNorm per head, then the rotary
    embedding.

    ``cos`` and ``sin`` are float32 [rows, rotary_dim].  Their second half repeats the first (the "rotate half"
    convention).
    """

    cos: Tensor | None = None
    sin: Tensor | None = None
    q_norm: Tensor | None = None  # [dim_qk]
    k_norm: Tensor | None = None
    eps: float = 1e-6
    # [q heads + k heads, dim_qk] the norm weight of each head. The first kernel that needs this
    # tensor creates it.
    both: Tensor | None = None


@dataclass
class AttnLayer:
    """One attention layer, as the back end receives it.  The engine fills ``cache`` when it allocates the KV memory."""

    index: int
    group: int
    spec: AttnSpec
    # tensors of the KV cache of this layer: name -> [num_blocks, *layout.tensors[name].shape]
    cache: Mapping[str, Tensor] = field(default_factory=dict)
    sinks: Tensor | None = None  # [heads] float32
    slopes: Tensor | None = None  # [heads] float32 on the device: the values of ``spec.alibi``


@dataclass(frozen=True)
class AttentionContext:
    """The arguments with which the engine constructs a back end.

    ``prepare_qk(q, k, position, pre)`` applies the norms and the rotary embedding of ``pre`` to q and k, both [T,
    heads, dim_qk], at ``position`` i64 [T].  It returns new q and k.  It is the engine's own implementation, for back
    ends without a fused kernel.
    """

    device: str
    dtype: str
    kv_format: KVFormat
    block: int
    max_rows: int
    max_len: int
    prepare_qk: Callable[[Tensor, Tensor, Tensor, QKPre], tuple[Tensor, Tensor]]
    batch_invariant: bool = False
    fuse: bool = True  # False disables fused kernels, for measurements of their effect


class AttentionBackend(ABC):
    """Reads and writes the paged KV cache.  One instance serves all layers.  Store the state of a step in
    ``meta.work``.

    Contract.  A query attends to exactly the positions of its row up to its own, or up to ``AttnMeta.host_sees`` if
    that is set, within the window.  Their keys and values are read from the cache after ``write``.  Blocks that the
    row does not own are never read.  ``write`` changes the slots of ``meta.slot_map`` and nothing else.
    """

    # The back end can read blocks that decoding rows share once for all of them.  The number is the least number of
    # bytes of a layer that this must save in a step.  None means that it reads the blocks of each row separately.
    shares_from: int | None = None

    def __init__(self, options: Any, ctx: AttentionContext) -> None:
        self.options, self.ctx = options, ctx
        # Messages for the user, such as which kernels run. They are read after ``layout`` was
        # called for every layer.
        self.notes: list[str] = []

    def layout(self, spec: AttnSpec, fmt: KVFormat, block: int) -> KVLayout:
        """Return the named tensors of one block of a layer.

        The default is the layout of the KV format, usually ``k`` [block, kv_heads, dim_qk] and ``v`` [block, kv_heads,
        dim_v].
        """
        return fmt.layout(spec, block)

    def plan(self, meta: AttnMeta, key: GraphKey) -> None:  # noqa: B027  (optional)
        """Prepare the data that all layers share, once per step before the layers run.  Store it in ``meta.work``."""

    def write(
        self, layer: AttnLayer, q: Tensor, k: Tensor, v: Tensor, meta: AttnMeta, pre: QKPre | None
    ) -> Tensor:
        """Normalize and rotate q and k, then store k and v in the cache at ``meta.slot_map[layer.group]``.

        q is [T, heads, dim_qk], k [T, kv_heads, dim_qk], v [T, kv_heads, dim_v].  Return the prepared q [T, heads,
        dim_qk].  This default uses separate operations and no fused kernel.
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
        """Compute the attention output of a layer.  Write every element of ``out`` [T, heads, dim_v], and no other
        memory.

        ``lse`` is float32 [T, heads] or None.  A back end that declares the feature ``lse`` writes the natural
        logarithm of the softmax denominator to it (sinks included).  The engine merges attention over parts of a
        context with it.  A back end without the feature raises PluginError if ``lse`` is not None.
        """

    def selected(self, layer: AttnLayer, q: Tensor, meta: AttnMeta) -> Sequence[Tensor]:
        """Return the keys that ``forward`` attends to, as one tensor bool [q_len, heads, kv_len] for each row.

        Only back ends with the trait ``approximate`` implement it.  It writes nothing.  ``forward`` must equal exact
        attention over the selected keys.  A query selects at least one and at most ``most_keys`` of the keys that it
        may see.  The selection depends only on its own row.
        """
        raise NotImplementedError(f"{type(self).__name__} lacks the method selected")

    def most_keys(self, visible: int, queries: int) -> int:
        """Return to how many keys a query attends at most, if ``visible`` keys are visible to it and its row has
        ``queries`` queries."""
        return visible
