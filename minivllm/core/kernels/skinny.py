"""x W^T for one to four rows, which is the weight's bytes and nothing else: it is streamed once, at full width.

    grid (N / BN,): a program takes BN outputs and the whole of their weight rows, K elements each

    plain    y = x W^T
    normed   the residual is added and RMSNorm taken first: s = x + residual; y = norm(s) W^T; program 0 writes s
    gated    x is gate | up: y = (silu(gate) * up) W^T

The prologues are computed by every program anew: a few KB from the L2 cache, where a kernel of their own would cost a
launch.  Products and sums are float32 on the CUDA cores, in an order that depends on N and K alone.
Reference: ``layers.linear.Dense``, ``layers.norm.rms_norm``, ``layers.activation.silu_mul``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import pdl, wait

MOST_ROWS = 4
MOST = 1 << 23
PLAIN, NORMED, GATED = 0, 1, 2


@triton.jit
def _skinny(
    x, residual, norm, weight, bias, y, total, eps, x_stride,
    M: tl.constexpr, MP: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    MODE: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BN
    om, on, ok = tl.arange(0, MP), first + tl.arange(0, BN), tl.arange(0, BK)
    w_at = weight + on.to(tl.int64)[:, None] * K + ok[None, :]
    # weights are there before the kernel in front has ended
    w = tl.load(w_at, mask=(on < N)[:, None] & (ok < K)[None, :], other=0.0)
    wait(PDL)
    acc = tl.zeros([MP, BN, BK], tl.float32)
    square = tl.zeros([MP, BK], tl.float32)
    for j in tl.static_range((K + BK - 1) // BK):
        at = j * BK + ok
        in_k = at < K
        if MODE == 1:
            s, on_s = _summed(x, residual, om, at, x_stride, M, K, ADD)
            if ADD and first == 0:
                tl.store(total + om[:, None] * K + at[None, :], s, mask=on_s)
            s = s.to(tl.float32)
            square += s * s
            v = s * tl.load(norm + at, mask=in_k, other=0.0).to(tl.float32)[None, :]
        elif MODE == 2:
            x_at = x + om[:, None] * x_stride + at[None, :]
            on_x = (om < M)[:, None] & in_k[None, :]
            gate = tl.load(x_at, mask=on_x, other=0.0).to(tl.float32)
            v = gate / (1.0 + tl.exp(-gate)) * tl.load(x_at + K, mask=on_x, other=0.0).to(tl.float32)
        else:
            x_at = x + om[:, None] * x_stride + at[None, :]
            v = tl.load(x_at, mask=(om < M)[:, None] & in_k[None, :], other=0.0).to(tl.float32)
        acc += w.to(tl.float32)[None, :, :] * v[:, None, :]
        if (j + 1) * BK < K:
            w = tl.load(w_at + (j + 1) * BK, mask=(on < N)[:, None] & (at + BK < K)[None, :], other=0.0)
    out = tl.sum(acc, 2)
    if MODE == 1:  # the scale of a row leaves the sum
        out = out * tl.rsqrt(tl.sum(square, 1) / K + eps)[:, None]
    if BIAS:
        out += tl.load(bias + on, mask=on < N, other=0.0).to(tl.float32)[None, :]
    tl.store(y + om[:, None] * N + on[None, :], out.to(y.dtype.element_ty), mask=(om < M)[:, None] & (on < N)[None, :])


@triton.jit
def _summed(x, residual, om, at, x_stride, M: tl.constexpr, K: tl.constexpr, ADD: tl.constexpr):
    """x + residual [MP, BK] at columns ``at``, rounded as the stream is, and where it is real."""
    on = (om < M)[:, None] & (at < K)[None, :]
    s = tl.load(x + om[:, None] * x_stride + at[None, :], mask=on, other=0.0)
    if ADD:
        s = (s + tl.load(residual + om[:, None] * K + at[None, :], mask=on, other=0.0)).to(x.dtype.element_ty)
    return s, on


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether this is faster than a matrix product and a kernel for the prologue, as measured on an H200: one row of a
    weight of up to 8 M elements (or as wide as a vocabulary), and up to four where K is large beside N."""
    n, k = weight.shape
    rows = x.shape[0]
    few = (rows == 1 and (n * k <= MOST or k <= 1024)) or (rows <= MOST_ROWS and k >= 2 * n and n * k <= MOST)
    return few and x.stride(1) == 1 and weight.is_contiguous() and x.dtype == weight.dtype


def _launch(mode, x, weight, bias, k, residual=None, norm=None, eps=0.0, total=None) -> Tensor:
    rows, n = x.shape[0], weight.shape[0]
    y = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    if rows:
        padded = triton.next_power_of_2(rows)
        bk = min(triton.next_power_of_2(k), 1024)
        bn = 8 if n >= 4096 else 4
        _skinny[(triton.cdiv(n, bn),)](
            x, x if residual is None else residual, x if norm is None else norm, weight, x if bias is None else bias,
            y, x if total is None else total, eps, x.stride(0), M=rows, MP=padded, N=n, K=k, BN=bn, BK=bk, MODE=mode,
            ADD=residual is not None, BIAS=bias is not None,
            num_warps=8 if mode == GATED else 4, **pdl(x),
        )  # fmt: skip
    return y


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [M, K], weight [N, K] -> [M, N]."""
    return _launch(PLAIN, x, weight, bias, weight.shape[1])


def norm_linear(
    x: Tensor, residual: Tensor | None, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(norm(x + residual) W^T [M, N], x + residual [M, K]); without a residual x is it."""
    total = torch.empty_like(residual) if residual is not None else x
    return _launch(NORMED, x, weight, bias, weight.shape[1], residual, norm, eps, total), total


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [M, 2 K] = gate | up -> (silu(gate) * up) W^T [M, N]."""
    return _launch(GATED, x, weight, bias, weight.shape[1])
