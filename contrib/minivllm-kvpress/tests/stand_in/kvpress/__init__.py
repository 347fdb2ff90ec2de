"""A stand-in with the interface of kvpress 0.5.5, for machines without it.  Its presses are written anew."""

from .presses.scorer_press import BasePress, ScorerPress
from .presses.scorers import (
    CURPress,
    ExpectedAttentionPress,
    KeyDiffPress,
    KnormPress,
    KVzipPress,
    RandomPress,
    SnapKVPress,
    StreamingLLMPress,
)

__all__ = [
    "BasePress",
    "CURPress",
    "ExpectedAttentionPress",
    "KVzipPress",
    "KeyDiffPress",
    "KnormPress",
    "RandomPress",
    "ScorerPress",
    "SnapKVPress",
    "StreamingLLMPress",
]
