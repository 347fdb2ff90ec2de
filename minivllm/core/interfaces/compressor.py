"""The compressor seam (plug-in interface): which tokens of a sequence stay in the KV cache.

A request with a ``kv_budget`` of k tokens is compressed when its prompt has been computed, and with the option
``compress_every`` = m again after every m generated tokens.  A compressor gives each stored token a score.  The engine
keeps the k tokens with the highest scores, for each layer and KV head, moves them to the first blocks of the row, and
frees the other blocks::

    stored    t0 t1 t2 t3 t4 t5 t6 t7        scores of a head    9 1 7 2 3 8 4 6        k = 4
    kept      t0 t2 t5 t7                    later tokens follow: t0 t2 t5 t7 t8 t9 ...

Keys stay as they were rotated, and later tokens keep their positions, unless ``Compressor.rerotates``.  Every layer and
head keeps the same number of tokens, so a row has one length, and memory is freed.  A head sees only its own kept
tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# Additions by version: 1.1: Compressor.attention_sums, StoredTokens.attention_sums and sum_queries,
# Compressor.rerotates; 1.2: Compressor.loads, Compressor.joins_layers and StoredTokens.layers
API = (1, 2)


@dataclass(frozen=True)
class CompressorContext:
    """The arguments with which a worker constructs a compressor."""

    device: str
    dtype: str  # dtype of queries, keys and values, such as "float16"
    max_len: int  # largest number of tokens of a sequence


@dataclass(frozen=True)
class StoredTokens:
    """The n tokens of a sequence that one layer stores, in the order of their positions.

    With ``Compressor.joins_layers`` they are those of one or several layers.  The heads of each layer then follow those
    of the layer before, in all tensors, and ``kv_heads`` and ``heads`` count the heads of all of these layers."""

    layer: int  # index of the attention layer, from 0; of several layers the first one
    # Keys [n, kv_heads, dim_qk], normalized and rotated as attention reads them; zeros if the
    # compressor reads no keys.
    keys: Tensor
    values: Tensor  # [n, kv_heads, dim_v]; zeros if the compressor reads no values
    # Queries [w, heads, dim_qk] of the last w tokens, 1 <= w <= ``window``; None if the compressor
    # reads none.  Query head i reads KV head i // (heads // kv_heads).
    queries: Tensor | None
    scale: float  # factor by which attention multiplies its scores before the softmax
    keep: int  # count of tokens that stay in the cache
    # Count of the sequence's tokens that were computed; the last stored token is the last of them.
    computed: int
    seed: int  # seed of the request, for a compressor that uses random numbers
    # f32 [kv_heads, n] attention probabilities of each token, added up over the queries of the prompt and over the
    # query heads of the KV head; None unless ``Compressor.attention_sums``.  Generated tokens have 0.
    attention_sums: Tensor | None = None
    # f32 [kv_heads, n] how many queries were added up in each attention sum: those of the prompt's
    # tokens from the token itself on
    sum_queries: Tensor | None = None
    layers: int = 1  # count of layers whose tokens these are, 1 unless ``Compressor.joins_layers``


class Compressor(ABC):
    """Scores stored tokens.  One instance serves all layers and rows of a process.

    Contract.  Scores depend only on the arguments of ``score``, so that a preempted sequence keeps the same tokens
    when it is computed again.  ``score`` must not wait for the device, and must not change its arguments.
    """

    # The tensors of the cache that ``score`` reads, besides their shapes and dtypes: "keys", "values", both or none.
    # The others are not loaded.
    loads: tuple[str, ...] = ("keys", "values")
    # True if ``score`` accepts the heads of several layers at once, so that a compression has few operations.  The
    # scores of a layer must not depend on the other layers.
    joins_layers = False
    # Number of last tokens whose queries ``score`` reads, 0 for none.  Steps that compute the end of a prompt then run
    # as separate launches.  At a compression after the prompt only the query of the last token is there, and decode
    # steps remain captured.
    window = 0
    # True if ``score`` reads the sums of attention.  Prompts are then computed whole, without prefix hits, and their
    # steps run as separate launches.  Queries of generated tokens are not added, so decode steps remain captured.
    attention_sums = False

    # True if the kept keys are rotated to the positions 0, 1 ... k - 1 of their layer and head, in which later tokens
    # follow as k, k + 1 ... (StreamingLLM, arXiv:2309.17453).  Queries have these positions too.  A subclass may set it
    # in its constructor.  Config refuses models and KV formats that cannot do this.
    rerotates = False

    def __init__(self, options: Any, ctx: CompressorContext) -> None:
        self.options, self.ctx = options, ctx

    @abstractmethod
    def score(self, stored: StoredTokens) -> Tensor:
        """Return the scores of the stored tokens, [kv_heads, n], or [n] for all heads alike.

        Tokens with higher scores are kept.  Of equal scores, the earlier token is kept.  NaN counts as the lowest.
        """
