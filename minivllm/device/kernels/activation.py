"""Kernels for activation(gate) * up of the joined projection [T, 2 * inner], and for sigmoid(gate) * x.

    grid (T, inner / BLOCK)      3 * inner * 2 bytes per token

The references are ``gate_mul`` and ``gate_out`` of ``device.layers.activation``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .eight_bits import TOP, codes_of, empty_rows, size_of, step_of
from .launch import cdiv, pdl, power, wait

BLOCK = 2048
LONGEST = 65536  # largest inner size for ``gate_mul_rounded``, which keeps a whole row in registers
NUMBER = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4}  # name -> constant ACT of kernels


@triton.jit
def activate(x, ACT: tl.constexpr):
    """Apply the activation of a ``NUMBER`` to float32 x."""
    if ACT == 0:
        y = x / (1.0 + tl.exp(-x))
    elif ACT == 1:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == 2:  # uses (1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z))
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        y = tl.maximum(x, 0.0)
        if ACT == 4:
            y = y * y
    return y


@triton.jit
def gate_rounded(gate, up, dtype: tl.constexpr, ACT: tl.constexpr):
    """Return activation(gate) * up in float32.  Both are rounded to ``dtype`` before, as if another kernel had stored
    them."""
    return activate(gate.to(dtype).to(tl.float32), ACT) * up.to(dtype).to(tl.float32)


@triton.jit
def _gate_mul(
    x, y, squares, eps, INNER: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr, PARTS_P: tl.constexpr,
    ACT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    on = at < INNER
    gate = tl.load(x + row * 2 * INNER + at, mask=on, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * INNER + INNER + at, mask=on, other=0.0).to(tl.float32)
    if PARTS > 0:
        part = tl.arange(0, PARTS_P)
        total = tl.sum(tl.load(squares + row * PARTS + part, mask=part < PARTS, other=0.0), 0)
        factor = tl.rsqrt(total / DIM + eps)
        gate *= factor
        up *= factor
    tl.store(y + row * INNER + at, (activate(gate, ACT) * up).to(y.dtype.element_ty), mask=on)


def gate_mul(
    x: Tensor, squares: Tensor | None = None, dim: int = 1, eps: float = 0.0, activation: str = "silu"
) -> Tensor:
    """Compute activation(gate) * up [T, inner] of a contiguous x [T, 2 * inner], in which the gate is first.

    With ``squares`` float32 [T, P], x is first divided by sqrt(sum of the token's squares / dim + eps), which is the
    division of the norm before the product.
    """
    tokens, width = x.shape
    inner = width // 2
    y = torch.empty((tokens, inner), dtype=x.dtype, device=x.device)
    if not tokens:
        return y
    parts = 0 if squares is None else squares.shape[1]
    if squares is None:
        squares = x  # the kernel does not read it
    constants = pdl(x)
    constants["INNER"] = inner
    constants["DIM"] = dim
    constants["PARTS"] = parts
    constants["PARTS_P"] = power(max(parts, 1))
    constants["ACT"] = NUMBER[activation]
    constants["BLOCK"] = BLOCK
    constants["num_warps"] = 8
    grid = (tokens, cdiv(inner, BLOCK))
    _gate_mul[grid](x, y, squares, eps, **constants)
    return y


@triton.jit
def _gate_out(x, gate, y, gate_stride, INNER: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    on = at < INNER
    share = tl.sigmoid(tl.load(gate + row * gate_stride + at, mask=on, other=0.0).to(tl.float32))
    value = tl.load(x + row * INNER + at, mask=on, other=0.0).to(tl.float32)
    rounded = share.to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + row * INNER + at, (value * rounded).to(y.dtype.element_ty), mask=on)


def gate_out(x: Tensor, gate: Tensor) -> Tensor:
    """Compute x * sigmoid(gate) [T, inner] of a contiguous x [T, inner].  The rows of gate [T, inner] may lie apart."""
    tokens, inner = x.shape
    y = torch.empty_like(x)
    if tokens:
        grid = (tokens, cdiv(inner, BLOCK))
        _gate_out[grid](x, gate, y, gate.stride(0), INNER=inner, BLOCK=BLOCK, num_warps=8, **pdl(x))
    return y


@triton.jit
def _gate_rounded(
    x, y, scale, INNER: tl.constexpr, P: tl.constexpr, ACT: tl.constexpr, TOP: tl.constexpr, WHOLE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, P)
    on = at < INNER
    gate = tl.load(x + row * 2 * INNER + at, mask=on, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * INNER + INNER + at, mask=on, other=0.0).to(tl.float32)
    # rounded to the dtype in which ``_gate_mul`` stores the value
    v = (activate(gate, ACT) * up).to(x.dtype.element_ty).to(tl.float32)
    step, inverse = step_of(tl.max(size_of(v), 0), TOP)
    tl.store(scale + row, step)
    tl.store(y + row * INNER + at, codes_of(v, step, inverse, TOP, WHOLE).to(y.dtype.element_ty), mask=on)


def gate_mul_rounded(x: Tensor, dtype: torch.dtype, activation: str = "silu") -> tuple[Tensor, Tensor]:
    """Compute ``gate_mul`` and round each row to an 8-bit dtype, to codes [T, inner] and scale f32 [T, 1] as
    ``scaled.rows``.

    A program computes a row.  inner is at most LONGEST.
    """
    tokens, width = x.shape
    inner = width // 2
    y, scale = empty_rows(tokens, inner, dtype, x.device)
    if not tokens:
        return y, scale
    size = power(inner)
    constants = pdl(x)
    constants["INNER"] = inner
    constants["P"] = size
    constants["ACT"] = NUMBER[activation]
    constants["TOP"] = TOP[dtype]
    constants["WHOLE"] = dtype == torch.int8
    constants["num_warps"] = min(32, max(4, size // 512))
    _gate_rounded[(tokens,)](x, y, scale, **constants)
    return y, scale
