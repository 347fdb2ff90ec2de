"""Rotate queries and keys of a vision tower by the positions of their patches, in one kernel.

    qkv [T, 3, H, D] ──► q, k [2, T, H, D]     one program for the queries or keys of a patch

The two halves of a head turn against each other, as in the text model.  The products are float32.  The
reference is ``device.layers.patch_tower.turned``.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from .launch import kernel, power


@kernel("tokens", "patches")
def _turn(qkv, cos, sin, out, tokens, patches, HEADS: tl.constexpr, DIM: tl.constexpr, HEADS_P: tl.constexpr,
          DIM_P: tl.constexpr):  # fmt: skip
    """Rotate the queries (program 0 of the second axis) or keys (1) of a patch.  ``cos`` and ``sin`` are [patches,
    DIM], with the sign of the rotation in ``sin``."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    head, at = tl.arange(0, HEADS_P)[:, None], tl.arange(0, DIM_P)[None, :]
    on = (head < HEADS) & (at < DIM)
    other = tl.where(at < DIM // 2, at + DIM // 2, at - DIM // 2)
    base = (token * 3 + part) * HEADS * DIM + head * DIM
    x = tl.load(qkv + base + at, mask=on, other=0.0).to(tl.float32)
    y = tl.load(qkv + base + other, mask=on, other=0.0).to(tl.float32)
    where = (token % patches) * DIM + at
    c = tl.load(cos + where, mask=at < DIM, other=0.0)
    s = tl.load(sin + where, mask=at < DIM, other=0.0)
    value = (x * c + y * s).to(out.dtype.element_ty)
    tl.store(out + (part * tokens + token) * HEADS * DIM + head * DIM + at, value, mask=on)


def turn(qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return rotated queries and keys [2, T, H, D] of ``qkv`` [T, 3, H, D], which is contiguous.

    ``cos`` and ``sin`` f32 [N, D] belong to N patches, and T is a multiple of N: several images of one grid.  The
    first half of ``sin`` has the opposite sign."""
    tokens, _, heads, dim = qkv.shape
    heads_p = power(heads)
    dim_p = power(dim)
    out = torch.empty(2, tokens, heads, dim, dtype=qkv.dtype, device=qkv.device)
    _turn[(tokens, 2)](qkv, cos, sin, out, tokens, len(cos), heads, dim, heads_p, dim_p, num_warps=4)
    return out
