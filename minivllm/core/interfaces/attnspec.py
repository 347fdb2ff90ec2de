"""The shape of an attention layer, which the attention seam and the KV format seam share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttnSpec:
    """The shape of one attention layer.

    ``scale`` None means ``dim_qk ** -0.5``.  ``window`` counts the query itself.
    """

    heads: int
    kv_heads: int
    dim_qk: int
    dim_v: int
    # values are the first dim_v elements of the key (multi-head latent attention)
    v_in_k: bool = False
    window: int | None = None
    sinks: bool = False  # a learned logit per head that takes probability and gives no value
    softcap: float | None = None
    scale: float | None = None
    # slope of each head: slope * (key position - query position) is added to the score, behind scale
    # and soft cap (ALiBi, arXiv:2108.12409)
    alibi: tuple[float, ...] | None = None

    @property
    def geometry(self) -> tuple:
        """Return the values that layers of one KV group, which share a block table, have in common."""
        return (self.kv_heads, self.dim_qk, self.dim_v, self.v_in_k, self.window)

    @property
    def softmax_scale(self) -> float:
        """Return the factor of the scores before the softmax."""
        return self.scale if self.scale is not None else self.dim_qk**-0.5
