"""Masks of rows that follow each other."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch


@dataclass
class Lengths:
    """The lengths of rows, and their starts i32 [rows + 1]."""

    seqstart: Any
    max_seqlen: int
    seqlen: Any = None  # i32 [rows] used keys of padded rows


def lengths(sizes, device):
    starts = torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=device)
    return Lengths(starts, max(sizes))


@dataclass
class BlockDiagonalCausalFromBottomRightMask:
    q_seqinfo: Lengths
    k_seqinfo: Lengths

    @classmethod
    def from_seqlens(cls, q_seqlen, kv_seqlen, *, device):
        assert all(q <= k for q, k in zip(q_seqlen, kv_seqlen, strict=True))
        return cls(lengths(q_seqlen, device), lengths(kv_seqlen, device))


@dataclass
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalFromBottomRightMask):
    _window_size: int = 0


@dataclass
class BlockDiagonalCausalWithOffsetPaddedKeysMask:
    q_seqinfo: Lengths
    k_seqinfo: Lengths

    @classmethod
    def from_seqlens(cls, q_seqlen, kv_padding, kv_seqlen, *, device):
        assert len(q_seqlen) == len(kv_seqlen) and max(kv_seqlen) <= kv_padding
        padded = lengths([kv_padding] * len(kv_seqlen), device)
        padded.seqlen = torch.tensor(kv_seqlen, dtype=torch.int32, device=device)
        return cls(lengths(q_seqlen, device), padded)
