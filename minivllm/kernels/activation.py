"""SiLU(gate) * up in one kernel over the joined projection [T, 2 * inner].

grid (T, inner / BLOCK);  bytes: 3 * inner * 2 a token.  Reference: ``layers.activation.silu_mul``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import pdl, wait

BLOCK = 2048


@triton.jit
def _silu_mul(x, y, INNER: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    on = at < INNER
    gate = tl.load(x + row * 2 * INNER + at, mask=on, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * INNER + INNER + at, mask=on, other=0.0).to(tl.float32)
    silu = gate / (1.0 + tl.exp(-gate))
    tl.store(y + row * INNER + at, (silu * up).to(y.dtype.element_ty), mask=on)


def silu_mul(x: Tensor) -> Tensor:
    """x [T, 2 * inner], contiguous: gate, then up -> [T, inner]."""
    tokens, inner = x.shape[0], x.shape[1] // 2
    y = torch.empty((tokens, inner), dtype=x.dtype, device=x.device)
    if tokens:
        _silu_mul[(tokens, triton.cdiv(inner, BLOCK))](x, y, INNER=inner, BLOCK=BLOCK, num_warps=8, **pdl(x))
    return y
