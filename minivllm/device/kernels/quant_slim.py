"""Products of 2 to 8 rows with an 8-bit weight and their epilogue, in one kernel on tensor cores (``products``).

    grid (N / BN)     y^T [BN, 8] = W [BN, K] x^T, P times BK inputs at a time, with one warp per BK inputs

The weight is read as elements of 16 bits, which is the layout that the tensor cores' operand has in shared memory.  A
register holds two elements and is converted to one register per byte of the elements.  The low bytes are *plane* 0,
with input 2 i of element i, the high bytes are plane 1, with input 2 i + 1.  x is read two inputs at a time, so each
half of an element of x is the factor of one plane.  bfloat16 has 8 bits of significand, so 128 + q is exact for q in
0..127, and its bits are 0x4300 | q.  Sums are float32.

For one row ``quant_vector`` is faster, because it has no padding.  ``quant_slim_four`` handles 4 bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import capability, kernel, pdl, wait
from .products import GATED, _finish
from .quant import Quantized
from .quant_around import Surrounded
from .quant_words import WIDE
from .scaled import rows

LEAST_ROWS, ROWS = 2, 8


@triton.jit
def _halves(pair, like, ASM: tl.constexpr):
    """Return the lower and the upper half of an int32 as numbers of the dtype that ``like`` points to."""
    if ASM:
        low, high = tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;",
            "=&r,=r,r,r",
            [pair],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        dtype: tl.constexpr = like.dtype.element_ty
        low, high = pair.to(tl.int16).to(dtype, bitcast=True), (pair >> 16).to(tl.int16).to(dtype, bitcast=True)
    return low, high


@triton.jit
def _planes(w, dtype: tl.constexpr, FLOAT8: tl.constexpr, ASM: tl.constexpr):
    """Return the low and the high byte of an int16 as numbers of int8 or float8_e4m3fn."""
    if not ASM:
        low, high = w.to(tl.int8), (w >> 8).to(tl.int8)
        if FLOAT8:
            low, high = low.to(tl.float8e4nv, bitcast=True), high.to(tl.float8e4nv, bitcast=True)
        a, b = low.to(dtype), high.to(dtype)
    elif FLOAT8:
        # exponent and significand, shifted to those of bfloat16, are 2 ** -120 of the number, subnormal numbers
        # included
        a, b = tl.inline_asm_elementwise(
            """{
            .reg .b32 p, sign, many;
            mov.b32 many, 0x7b807b80;
            shl.b32 p, $2, 8;
            and.b32 sign, p, 0x80008000;
            shr.u32 p, p, 4;
            lop3.b32 p, p, 0x07f007f0, sign, 0xea;
            mul.rn.bf16x2 $0, p, many;
            and.b32 sign, $2, 0x80008000;
            shr.u32 p, $2, 4;
            lop3.b32 p, p, 0x07f007f0, sign, 0xea;
            mul.rn.bf16x2 $1, p, many;
            }""",
            "=&r,=&r,r",
            [w],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        # subtract 128, or 256 for a negative number, from 128 + the lower bits
        a, b = tl.inline_asm_elementwise(
            """{
            .reg .b32 w, lo, hi, one;
            mov.b32 one, 0x43004300;
            lop3.b32 lo, $2, 0x007f007f, one, 0xea;
            lop3.b32 hi, $2, 0x00800080, one, 0xea;
            sub.rn.bf16x2 $0, lo, hi;
            shr.u32 w, $2, 8;
            lop3.b32 lo, w, 0x007f007f, one, 0xea;
            lop3.b32 hi, w, 0x00800080, one, 0xea;
            sub.rn.bf16x2 $1, lo, hi;
            }""",
            "=&r,=&r,r",
            [w],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    return a, b


@triton.jit
def _sum(acc, w_at, keep, x0, x1, FLOAT8: tl.constexpr, IEEE: tl.constexpr, ASM: tl.constexpr):
    """Return acc [P, BN, 8] + the products of P tiles of the weight with the inputs of both planes."""
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    w = tl.load(w_at, mask=keep[:, :, None], other=0, eviction_policy="evict_first")
    a, b = _planes(w, x0.dtype, FLOAT8, ASM)
    acc = tl.dot(a, x0, acc, input_precision=precision)
    return tl.dot(b, x1, acc, input_precision=precision)


@kernel("M")
def _slim(
    x, weight, scale, by_row, y, bias, residual, norm, in_squares, out_squares, eps, M,
    N: tl.constexpr, K: tl.constexpr, FLOAT8: tl.constexpr, BY_ROW: tl.constexpr, PARTS: tl.constexpr,
    PARTS_P: tl.constexpr, MODE: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, P: tl.constexpr, STAGES: tl.constexpr, IEEE: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Multiply x int32 [M, K / 2] by a weight int16 [N, K / 2], with GATED [2 N, ...], for 2 to 8 rows.

    BY_ROW multiplies the sums of a row by ``by_row`` [M]. K is a multiple of BK. An iteration handles P times BK
    inputs, the last may handle fewer.
    """
    wait(PDL)
    tile, om, op = tl.program_id(0), tl.arange(0, 8), tl.arange(0, P)
    on, ow = tile * BN + tl.arange(0, BN), tl.arange(0, BK // 2)
    at = op[:, None] * (BK // 2) + ow[None, :]
    w_at = weight + on.to(tl.int64)[None, :, None] * (K // 2) + at[:, None, :]
    x_at = x + om[None, None, :] * (K // 2) + at[:, :, None]
    acc = tl.zeros([P, BN, 8], tl.float32)
    up = tl.zeros([P, BN, 8], tl.float32)
    for k in tl.range(0, K, BK * P, num_stages=STAGES):
        there = k + op * BK < K
        on_x = (om < M)[None, None, :] & there[:, None, None] & (ow >= 0)[None, :, None]
        keep = there[:, None] & (on < N)[None, :]
        x0, x1 = _halves(tl.load(x_at + k // 2, mask=on_x, other=0), y, ASM)
        acc = _sum(acc, w_at + k // 2, keep, x0, x1, FLOAT8, IEEE, ASM)
        if MODE == 1:
            up = _sum(up, w_at + (N * (K // 2) + k // 2), keep, x0, x1, FLOAT8, IEEE, ASM)
    total = tl.sum(acc, 0) * tl.load(scale + on, mask=on < N, other=0.0)[:, None]
    total_up = tl.sum(up, 0)
    if MODE == 1:
        total_up = total_up * tl.load(scale + N + on, mask=on < N, other=0.0)[:, None]
    if BY_ROW:
        factor = tl.load(by_row + om, mask=om < M, other=0.0)[None, :]
        total = total * factor
        total_up = total_up * factor
    _finish(tl.trans(total), tl.trans(total_up), om, on, tile, y, bias, residual, norm, in_squares, out_squares, eps,
            M, N, K, PARTS, PARTS_P, MODE, BIAS, ACT)  # fmt: skip


def slim_tile(n: int, gated: bool) -> dict[str, int]:
    """Return the fastest tile of benchmarks/quant_kernels.py on an H200, for 4,096 and 28,672 outputs.

    Gated products have half as many outputs, each with a second sum.
    """
    wide = n >= WIDE and not gated
    return dict(BN=32 if wide else 16, BK=128, P=4, STAGES=3 if wide or gated else 6, num_warps=4)


class SlimProduct(Surrounded):
    """A product with a weight of 8 bits for 2 to 8 rows."""

    def __init__(self, of: Quantized, *around: Any, **more: Any) -> None:
        super().__init__(of, *around, **more)
        whole = of.k % 128 == 0 and of.weight.data_ptr() % 16 == 0
        self.rows = ROWS if whole and capability(of.weight.device) >= 9 else 0

    def fits(self, x: Tensor) -> bool:
        """Return whether the kernel supports x."""
        aligned = x.is_contiguous() and x.data_ptr() % 16 == 0
        return LEAST_ROWS <= len(x) <= self.rows and x.dtype == torch.bfloat16 and aligned

    def __call__(
        self,
        x: Tensor,
        squares: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        norm: Tensor | None = None,
        tile: dict[str, int] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the product as ``products.Product``; K must be a multiple of the tile's BK."""
        of, m, by_row = self.of, len(x), None
        if self.rounded is not None:
            x, by_row = rows(x, self.rounded, x.dtype)
        tile = tile or slim_tile(self.n, self.mode == GATED)
        y, sums, around, constants = self.given(
            x, by_row, squares, eps, residual, norm, triton.cdiv(self.n, tile["BN"])
        )
        _slim[(triton.cdiv(self.n, tile["BN"]),)](
            x.view(torch.int32),
            of.weight.view(torch.int16),
            of.scale,
            *around,
            m,
            N=self.n,
            K=self.k,
            IEEE=x.dtype == torch.float32,
            ASM=x.dtype == torch.bfloat16 and capability(x.device) >= 9,
            **constants,
            **tile,
            **pdl(x),
        )
        return y, sums
