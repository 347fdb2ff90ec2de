"""The shape of an attention layer, used by the attention seam and the KV format seam."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttnSpec:
    """The shape of one attention layer.

    ``scale`` None means ``dim_qk ** -0.5``.  ``window`` is the number of positions that a query sees, itself included;
    None means no limit.
    """

    heads: int
    kv_heads: int
    dim_qk: int
    dim_v: int
    # True: the value is the first dim_v elements of the key (multi-head latent attention)
    v_in_k: bool = False
    window: int | None = None
    sinks: bool = False  # each head has a learned logit that receives probability but adds no value
    softcap: float | None = None
    scale: float | None = None
    # ALiBi (arXiv:2108.12409), one slope per head.  slope * (key position - query position) is added
    # to the score after scale and soft cap.
    alibi: tuple[float, ...] | None = None

    @property
    def geometry(self) -> tuple:
        """Return the values that must be equal for layers to share a KV group, and with it a block table."""
        return (self.kv_heads, self.dim_qk, self.dim_v, self.v_in_k, self.window)

    @property
    def softmax_scale(self) -> float:
        """Return the factor by which scores are multiplied before the softmax."""
        return self.scale if self.scale is not None else self.dim_qk**-0.5
