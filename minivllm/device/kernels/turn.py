"""Rotate queries and keys of a vision tower by the positions of their patches, in one kernel.

    qkv [T, 3, H, D] ──► q, k [2, T, H, D]     one program for a patch

The two halves of a head turn against each other, as in the text model.  The products are float32.  The
reference is ``device.layers.patch_tower.turned``.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from .launch import kernel, power


@kernel("tokens", "patches")
def _turn(qkv, cos, sin, out, tokens, patches, HEADS: tl.constexpr, DIM: tl.constexpr, BOTH_P: tl.constexpr,
          HALF_P: tl.constexpr):  # fmt: skip
    """Rotate the queries and keys of a patch.  ``cos`` and ``sin`` are [patches, DIM], with the sign of the rotation in
    ``sin``.  Queries and keys follow one another in ``qkv``, so they are 2 * HEADS heads here."""
    token = tl.program_id(0).to(tl.int64)
    head, at = tl.arange(0, BOTH_P)[:, None], tl.arange(0, HALF_P)[None, :]
    half = DIM // 2
    on = (head < 2 * HEADS) & (at < half)
    base = token * 3 * HEADS * DIM + head * DIM + at
    low = tl.load(qkv + base, mask=on, other=0.0).to(tl.float32)
    high = tl.load(qkv + base + half, mask=on, other=0.0).to(tl.float32)
    # cos has two equal halves, and the first half of sin is minus the second
    where = (token % patches) * DIM + at
    c = tl.load(cos + where, mask=at < half, other=0.0)
    s = tl.load(sin + where + half, mask=at < half, other=0.0)
    part = head // HEADS
    to = (part * tokens + token) * HEADS * DIM + (head - part * HEADS) * DIM + at
    tl.store(out + to, (low * c - high * s).to(out.dtype.element_ty), mask=on)
    tl.store(out + to + half, (high * c + low * s).to(out.dtype.element_ty), mask=on)


def turn(qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return rotated queries and keys [2, T, H, D] of ``qkv`` [T, 3, H, D], which is contiguous.

    ``cos`` and ``sin`` f32 [N, D] belong to N patches, and T is a multiple of N: several images of one grid.  Their
    halves are equal, except that the first half of ``sin`` has the opposite sign."""
    tokens, _, heads, dim = qkv.shape
    both_p = power(2 * heads)
    half_p = power(dim // 2)
    out = torch.empty(2, tokens, heads, dim, dtype=qkv.dtype, device=qkv.device)
    _turn[(tokens,)](qkv, cos, sin, out, tokens, len(cos), heads, dim, both_p, half_p, num_warps=4)
    return out
