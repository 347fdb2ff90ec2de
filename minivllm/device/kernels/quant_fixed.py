"""Products of 33 to 1,024 rows with an int8 weight on the int8 tensor cores.

    parts     x [M, K] -> q int8 [2, M, K], scale [M]:  x = (128 q[0] + q[1]) * scale, scale = a row's largest / 16256
    product   y [M, N] = (128 q[0] W^T + q[1] W^T) * scale[m] * (scale of the weight)[n], grid (N / BN, M / BM)

A row of x becomes whole numbers of 15 bits, which two int8 products multiply.  The weight is not converted, and the two
products take the time of one bfloat16 product.  Sums are int32 and exact.  An element of x changes by at most 1 / 32512
of its row's largest element.  The error of an output is below a fourth of the error that rounding the weight to int8
made, for every row, because that error is proportional to the row's norm, which is at least its largest element.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import kernel, pdl, wait

TOP = 16256.0  # 127 times 128


@kernel("M")
def _parts(x, q, scale, M, K: tl.constexpr, BK: tl.constexpr, TOP: tl.constexpr, PDL: tl.constexpr):
    """Split a row of x into high and low parts of int8."""
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    ok = tl.arange(0, BK)
    most, odd = tl.zeros([BK], tl.float32), tl.zeros([BK], tl.float32)
    for k in tl.range(0, K, BK):
        v = tl.load(x + row * K + k + ok, mask=k + ok < K, other=0.0).to(tl.float32)
        most, odd = tl.maximum(most, tl.abs(v)), odd + (v - v)
    top = tl.max(most, 0)
    step = tl.where(top > 0, tl.div_rn(top, TOP), 1.0)
    tl.store(scale + row, step + tl.sum(odd, 0))  # a number that is not finite makes the scale NaN
    inverse = tl.div_rn(1.0, step)
    for k in tl.range(0, K, BK):
        v = tl.load(x + row * K + k + ok, mask=k + ok < K, other=0.0).to(tl.float32) * inverse
        high = (v * 0.0078125 + 12582912.0) - 12582912.0  # round to the nearest multiple of 128
        low = (v - high * 128.0 + 12582912.0) - 12582912.0
        low = tl.minimum(tl.maximum(low, -127.0), 127.0)
        tl.store(q + row * K + k + ok, high.to(tl.int8), mask=k + ok < K)
        tl.store(q + (M + row) * K + k + ok, low.to(tl.int8), mask=k + ok < K)


def parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split contiguous x [M, K] into q int8 [2 M, K], with the high parts of all rows first, and scale f32 [M]."""
    m, k = x.shape
    q = torch.empty((2 * m, k), dtype=torch.int8, device=x.device)
    scale = torch.empty(m, dtype=torch.float32, device=x.device)
    if m:
        block = min(triton.next_power_of_2(k), 8192)
        _parts[(m,)](x, q, scale, m, K=k, BK=block, TOP=TOP, num_warps=8 if block > 2048 else 4, **pdl(x))
    return q, scale


@kernel("M")
def _fixed(
    x, weight, x_scale, w_scale, y, M, N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply parts of rows by an int8 weight with integer sums.

    ``x`` and ``weight`` are descriptors with blocks [BM, BK] and [BN, BK], which return 0 outside the tensors.
    """
    wait(PDL)
    row, tile = tl.program_id(0), tl.program_id(1)
    high, low = tl.zeros([BM, BN], tl.int32), tl.zeros([BM, BN], tl.int32)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        w = weight.load([tile * BN, k]).T
        high = tl.dot(x.load([row * BM, k]), w, high, out_dtype=tl.int32)
        low = tl.dot(x.load([M + row * BM, k]), w, low, out_dtype=tl.int32)
    om, on = row * BM + tl.arange(0, BM), tile * BN + tl.arange(0, BN)
    by_row = tl.load(x_scale + om, mask=om < M, other=0.0)
    by_column = tl.load(w_scale + on, mask=on < N, other=0.0)
    out = (high.to(tl.float32) * 128.0 + low.to(tl.float32)) * by_row[:, None] * by_column[None, :]
    at_y = y + om.to(tl.int64)[:, None] * N + on[None, :]
    tl.store(at_y, out.to(y.dtype.element_ty), mask=(om < M)[:, None] & (on < N)[None, :])


def fixed_tile(n: int) -> dict[str, int]:
    """Return the fastest tile of benchmarks/quant_kernels.py on an H100, for 64 to 256 rows."""
    return dict(BM=64, BN=128 if n > 4096 else 64, BK=128, STAGES=3 if n > 4096 else 4, num_warps=4)


def fixed(
    x: Tensor, weight: Tensor, scale: Tensor, y: Tensor | None = None, tile: dict[str, int] | None = None
) -> Tensor:
    """Compute y [M, N] of contiguous x [M, K] and an int8 weight [N, K] with scale f32 [N].

    K must be a multiple of 16.
    """
    (m, k), n = x.shape, len(weight)
    y = x.new_empty(m, n) if y is None else y
    if not m:
        return y
    q, by_row = parts(x)
    tile = tile or fixed_tile(n)
    _fixed[(triton.cdiv(m, tile["BM"]), triton.cdiv(n, tile["BN"]))](
        TensorDescriptor.from_tensor(q, [tile["BM"], tile["BK"]]),
        TensorDescriptor.from_tensor(weight, [tile["BN"], tile["BK"]]),
        by_row,
        scale,
        y,
        m,
        N=n,
        K=k,
        **tile,
        **pdl(x),
    )
    return y
