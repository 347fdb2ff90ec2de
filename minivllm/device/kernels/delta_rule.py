"""The gated delta rule over the tokens of each row, with the convolution before it and the gated norm behind it.

    one    grid (R, value heads, parts of a value)   all of a step whose rows have one token each
    scan   grid (R, value heads, parts of a value)   convolution, delta rule: state and window stay in registers
    keep   grid (R, parts of the channels)           the newest inputs go to the ring, after ``scan``
    norm   grid (T * value heads / 8)                RMSNorm of a head, times silu(z)

The state is read and written once for each row: 8 * key_dim * value_dim bytes a head and layer, which bounds a decode
step.  ``scan`` computes the tokens of a row one after another.  ``delta_chunks`` computes long rows of 16-bit models.
The ring is explained in ``core.interfaces.states``.  Reference: ``device.layers.delta_net.scan``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.core.interfaces.states import COPIES

from . import delta_chunks
from .launch import cdiv, compile_once, kernel, pdl, power, release, settle, wait

if TYPE_CHECKING:
    from minivllm.core.interfaces.states import StepStates

OF_ROWS = ("rows", "start", "behind", "cu_q", "save_at", "save_to")  # kernel arguments that differ in each step
MOST_TAPS = 3  # largest number of earlier inputs that the convolution reads for a token
EPS = tl.constexpr(1e-6)  # added to the squared length of queries and keys before the division
# constants that were fastest on an H200 with value dim 128: elements of a state per warp, largest number of few rows
WARP, FEW_ROWS, PART = 4096, 4, 32
HEADS = 8  # number of (token, head) pairs that each program of the gated norm computes


@triton.jit
def _conv(x0, x1, x2, x3, w0, w1, w2, w3):
    """Return silu of the convolution of the newest input x0 and the inputs x1 to x3 before it."""
    y = x0 * w0 + x1 * w1 + x2 * w2 + x3 * w3
    return y * tl.sigmoid(y)


@triton.jit
def _unit(x):
    return x * tl.rsqrt(tl.sum(x * x, 0) + EPS)


@triton.jit
def _weights(weight, c, on, W: tl.constexpr):
    """Return the weights of lags 0 to 3 of the channels ``c``; the weight of lag j is column W - 1 - j."""
    w0 = tl.load(weight + c * W + W - 1, mask=on, other=0.0).to(tl.float32)
    w1 = tl.load(weight + c * W + W - 2, mask=on & (W > 1), other=0.0).to(tl.float32)
    w2 = tl.load(weight + c * W + W - 3, mask=on & (W > 2), other=0.0).to(tl.float32)
    w3 = tl.load(weight + c * W + W - 4, mask=on & (W > 3), other=0.0).to(tl.float32)
    return w0, w1, w2, w3


@triton.jit
def _load(ring, at, position, c, on, C: tl.constexpr, RING: tl.constexpr):
    """Return the input of ``position`` from the ring of newest inputs, zero before the sequence."""
    place = at * RING + (position + RING) % RING
    return tl.load(ring + place * C + c, mask=on & (position >= 0), other=0.0).to(tl.float32)


@triton.jit
def _window(ring, at, position, c, on, C: tl.constexpr, RING: tl.constexpr, W: tl.constexpr):
    """Return the inputs of the W - 1 positions before ``position``, newest first, filled up to 3 with zeros."""
    x1 = _load(ring, at, position - 1, c, on & (W > 1), C, RING)
    x2 = _load(ring, at, position - 2, c, on & (W > 2), C, RING)
    x3 = _load(ring, at, position - 3, c, on & (W > 3), C, RING)
    return x1, x2, x3


@triton.jit
def _advance(S, q, k, v, a, b, decay_rate, dt):
    """Apply the delta rule for one token to the state S [DK, BV]; return (new state, output).  q and k are [DK], v is
    [BV]."""
    gated = a + dt
    soft = tl.where(gated > 20.0, gated, tl.log(1.0 + tl.exp(tl.minimum(gated, 20.0))))
    S = S * tl.exp(-decay_rate * soft)
    read = tl.sum(S * k[:, None], 0)
    S = S + k[:, None] * ((v - read) * tl.sigmoid(b))[None, :]
    return S, tl.sum(S * q[:, None], 0)


@kernel("x", "ab", *OF_ROWS, "drafts", "long", "out", "x_stride", "ab_stride")
def _scan(
    x, ab, weight, rates, dt_bias, ring, gates, state, rows, start, behind, cu_q, drafts, save_at, save_to, long, out,
    x_stride, ab_stride,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, W: tl.constexpr, RING: tl.constexpr,
    PK: tl.constexpr, BV: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = 2 * HK * DK + HV * DV
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    key = head // (HV // HK)
    ok, ov = tl.arange(0, PK), part * BV + tl.arange(0, BV)
    on_k, on_v = ok < DK, ov < DV
    cq, ck, cv = key * DK + ok, (HK + key) * DK + ok, 2 * HK * DK + head * DV + ov
    q0, q1, q2, q3 = _weights(weight, cq, on_k, W)
    k0, k1, k2, k3 = _weights(weight, ck, on_k, W)
    v0, v1, v2, v3 = _weights(weight, cv, on_v, W)
    rate, dt = tl.load(rates + head), tl.load(dt_bias + head)
    wait(PDL)
    at = tl.load(rows + row)
    first, gap = tl.load(start + row), tl.load(behind + row)
    token = tl.load(cu_q + row).to(tl.int64)
    n = (tl.load(cu_q + row + 1) - token).to(tl.int32)
    kept0, kept1 = tl.load(save_at + 2 * row), tl.load(save_at + 2 * row + 1)
    to0, to1 = tl.load(save_to + 2 * row), tl.load(save_to + 2 * row + 1)
    provisional = tl.load(drafts + row) != 0
    tile = (head * DK + ok)[:, None] * DV + ov[None, :]
    on = on_k[:, None] & on_v[None, :]
    size: tl.constexpr = HV * DK * DV
    mine = tl.load(long + row) == 0  # long rows are left to ``delta_chunks``
    on, n = on & mine, tl.where(mine, n, 0)
    usable, fold = gap >= 0, tl.maximum(gap, 0)
    begin = first - fold
    S = tl.load(state + at * size + tile, mask=on & (begin > 0) & usable, other=0.0)
    S = tl.where(usable, S, float("nan"))
    xq1, xq2, xq3 = _window(ring, at, begin, cq, on_k, C, RING, W)
    xk1, xk2, xk3 = _window(ring, at, begin, ck, on_k, C, RING, W)
    xv1, xv2, xv3 = _window(ring, at, begin, cv, on_v, C, RING, W)
    for i in range(fold):
        p = begin + i
        xq = _load(ring, at, p, cq, on_k, C, RING)
        xk = _load(ring, at, p, ck, on_k, C, RING)
        xv = _load(ring, at, p, cv, on_v, C, RING)
        place = (at * RING + p % RING) * 2 * HV
        b, a = tl.load(gates + place + head).to(tl.float32), tl.load(gates + place + HV + head).to(tl.float32)
        q = _unit(_conv(xq, xq1, xq2, xq3, q0, q1, q2, q3))
        k = _unit(_conv(xk, xk1, xk2, xk3, k0, k1, k2, k3))
        v = _conv(xv, xv1, xv2, xv3, v0, v1, v2, v3)
        S, _ = _advance(S, q, k, v, a, b, rate, dt)
        if p + 1 == kept0:
            tl.store(state + to0 * size + tile, S, mask=on)
        if p + 1 == kept1:
            tl.store(state + to1 * size + tile, S, mask=on)
        xq3 = xq2
        xq2 = xq1
        xq1 = xq
        xk3 = xk2
        xk2 = xk1
        xk1 = xk
        xv3 = xv2
        xv2 = xv1
        xv1 = xv
    if provisional:
        tl.store(state + at * size + tile, S, mask=on)
    for i in range(n):
        t = token + i
        xq = tl.load(x + t * x_stride + cq, mask=on_k, other=0.0).to(tl.float32)
        xk = tl.load(x + t * x_stride + ck, mask=on_k, other=0.0).to(tl.float32)
        xv = tl.load(x + t * x_stride + cv, mask=on_v, other=0.0).to(tl.float32)
        b = tl.load(ab + t * ab_stride + head).to(tl.float32)
        a = tl.load(ab + t * ab_stride + HV + head).to(tl.float32)
        q = _unit(_conv(xq, xq1, xq2, xq3, q0, q1, q2, q3))
        k = _unit(_conv(xk, xk1, xk2, xk3, k0, k1, k2, k3))
        v = _conv(xv, xv1, xv2, xv3, v0, v1, v2, v3)
        S, o = _advance(S, q * (DK**-0.5), k, v, a, b, rate, dt)
        tl.store(out + (t * HV + head) * DV + ov, o.to(out.dtype.element_ty), mask=on_v)
        certain = (provisional == 0) | (i == 0)
        if (first + i + 1 == kept0) & certain:
            tl.store(state + to0 * size + tile, S, mask=on)
        if (first + i + 1 == kept1) & certain:
            tl.store(state + to1 * size + tile, S, mask=on)
        xq3 = xq2
        xq2 = xq1
        xq1 = xq
        xk3 = xk2
        xk2 = xk1
        xk1 = xk
        xv3 = xv2
        xv2 = xv1
        xv1 = xv
    if (provisional == 0) & (fold + n > 0):
        tl.store(state + at * size + tile, S, mask=on)


@triton.jit
def _keep_input(ring, to, p, value, c, on, C: tl.constexpr, RING: tl.constexpr):
    """Store the input ``value`` of position ``p`` in the ring of the state ``to``, if ``p`` is not before the
    sequence.
    """
    place = to * RING + (p + RING) % RING
    tl.store(ring + place * C + c, value.to(ring.dtype.element_ty), mask=on & (p >= 0))


@triton.jit
def _copy_inputs(ring, to, p, x0, x1, x2, c, on, C: tl.constexpr, RING: tl.constexpr, W: tl.constexpr):
    """Store the W - 1 inputs up to position ``p`` in the ring of a copied state; x0 is the newest."""
    if W > 1:
        _keep_input(ring, to, p, x0, c, on, C, RING)
    if W > 2:
        _keep_input(ring, to, p - 1, x1, c, on, C, RING)
    if W > 3:
        _keep_input(ring, to, p - 2, x2, c, on, C, RING)


@kernel("x", "ab", "z", *OF_ROWS, "out", "R", "x_stride", "ab_stride", "z_stride")
def _one(
    x, ab, z, weight, rates, dt_bias, norm, ring, gates, state, rows, start, behind, cu_q, save_at, save_to, out,
    R, x_stride, ab_stride, z_stride, eps,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, W: tl.constexpr, RING: tl.constexpr,
    PK: tl.constexpr, BV: tl.constexpr, COPIES: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = 2 * HK * DK + HV * DV
    release(PDL)
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    key = head // (HV // HK)
    ok, ov = tl.arange(0, PK), part * BV + tl.arange(0, BV)
    on_k, on_v = ok < DK, ov < DV
    cq, ck, cv = key * DK + ok, (HK + key) * DK + ok, 2 * HK * DK + head * DV + ov
    # The state and the window are read before ``settle``, while the preceding product still runs. That is safe because
    # only an earlier step wrote them, and each step begins with launches of torch, which wait for all earlier work.
    at, first, gap = tl.load(rows + row), tl.load(start + row), tl.load(behind + row)
    token = tl.load(cu_q + row)
    mine = tl.load(cu_q + row + 1) > token
    tile = (head * DK + ok)[:, None] * DV + ov[None, :]
    on = on_k[:, None] & on_v[None, :] & mine
    size: tl.constexpr = HV * DK * DV
    S = tl.load(state + at * size + tile, mask=on & (first > 0) & (gap >= 0), other=0.0)
    q0, q1, q2, q3 = _weights(weight, cq, on_k, W)
    k0, k1, k2, k3 = _weights(weight, ck, on_k, W)
    v0, v1, v2, v3 = _weights(weight, cv, on_v, W)
    rate, dt = tl.load(rates + head), tl.load(dt_bias + head)
    xq1, xq2, xq3 = _window(ring, at, first, cq, on_k & mine, C, RING, W)
    xk1, xk2, xk3 = _window(ring, at, first, ck, on_k & mine, C, RING, W)
    xv1, xv2, xv3 = _window(ring, at, first, cv, on_v & mine, C, RING, W)
    settle(PDL)
    t = token.to(tl.int64)
    xq = tl.load(x + t * x_stride + cq, mask=on_k & mine, other=0.0).to(tl.float32)
    xk = tl.load(x + t * x_stride + ck, mask=on_k & mine, other=0.0).to(tl.float32)
    xv = tl.load(x + t * x_stride + cv, mask=on_v & mine, other=0.0).to(tl.float32)
    b = tl.load(ab + t * ab_stride + head, mask=mine, other=0.0).to(tl.float32)
    a = tl.load(ab + t * ab_stride + HV + head, mask=mine, other=0.0).to(tl.float32)
    S = tl.where(gap >= 0, S, float("nan"))
    q = _unit(_conv(xq, xq1, xq2, xq3, q0, q1, q2, q3))
    k = _unit(_conv(xk, xk1, xk2, xk3, k0, k1, k2, k3))
    v = _conv(xv, xv1, xv2, xv3, v0, v1, v2, v3)
    S, o = _advance(S, q * (DK**-0.5), k, v, a, b, rate, dt)
    tl.store(state + at * size + tile, S, mask=on)
    if NORM:
        dtype = out.dtype.element_ty
        gate = tl.load(z + t * z_stride + head * DV + ov, mask=on_v & mine, other=0.0).to(tl.float32)
        o = o.to(dtype).to(tl.float32)
        o = (o * tl.rsqrt(tl.sum(o * o, 0) / DV + eps)).to(dtype).to(tl.float32)
        o = (o * tl.load(norm + ov, mask=on_v, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
        o = o * gate * tl.sigmoid(gate)
    tl.store(out + (t * HV + head) * DV + ov, o.to(out.dtype.element_ty), mask=on_v & mine)
    spare = row >= tl.load(cu_q + R)  # whether the token is padding, which belongs to no row
    tl.store(
        out + (row.to(tl.int64) * HV + head) * DV + ov, tl.zeros_like(o).to(out.dtype.element_ty), mask=on_v & spare
    )
    # Only one program of each channel stores the inputs of the channel.
    lead = (head % (HV // HK) == 0) & (part == 0)
    keeps_k, keeps_v, keeps_gate = on_k & mine & lead, on_v & mine, mine & (part == 0)
    _keep_input(ring, at, first, xq, cq, keeps_k, C, RING)
    _keep_input(ring, at, first, xk, ck, keeps_k, C, RING)
    _keep_input(ring, at, first, xv, cv, keeps_v, C, RING)
    _keep_input(gates, at, first, b, head, keeps_gate, 2 * HV, RING)
    _keep_input(gates, at, first, a, HV + head, keeps_gate, 2 * HV, RING)
    for copy in tl.static_range(COPIES):
        kept, to = tl.load(save_at + row * COPIES + copy), tl.load(save_to + row * COPIES + copy)
        if mine & (kept == first + 1):
            tl.store(state + to * size + tile, S, mask=on)
            _copy_inputs(ring, to, first, xq, xq1, xq2, cq, keeps_k, C, RING, W)
            _copy_inputs(ring, to, first, xk, xk1, xk2, ck, keeps_k, C, RING, W)
            _copy_inputs(ring, to, first, xv, xv1, xv2, cv, keeps_v, C, RING, W)
            b1, b2, _ = _window(gates, at, first, head, keeps_gate, 2 * HV, RING, W)
            a1, a2, _ = _window(gates, at, first, HV + head, keeps_gate, 2 * HV, RING, W)
            _copy_inputs(gates, to, first, b, b1, b2, head, keeps_gate, 2 * HV, RING, W)
            _copy_inputs(gates, to, first, a, a1, a2, HV + head, keeps_gate, 2 * HV, RING, W)


@triton.jit
def _keep_row(
    x, x_stride, ring, c, row, rows, start, behind, cu_q, drafts, save_at, save_to,
    C: tl.constexpr, COPIES: tl.constexpr, TAPS: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Store the newest inputs of the channels ``c`` of a row, and those before a copied state."""
    on = c < C
    at, first = tl.load(rows + row), tl.load(start + row)
    token = tl.load(cu_q + row).to(tl.int64)
    n = (tl.load(cu_q + row + 1) - token).to(tl.int32)
    certain = tl.where(tl.load(drafts + row) != 0, 1, n)
    begin = first - tl.maximum(tl.load(behind + row), 0)
    for copy in range(COPIES):
        kept, to = tl.load(save_at + row * COPIES + copy), tl.load(save_to + row * COPIES + copy)
        if (kept > begin) & (kept <= first + certain):
            for j in range(1, TAPS + 1):
                p = kept - j
                if p >= first:
                    new = tl.load(x + (token + p - first) * x_stride + c, mask=on)
                    tl.store(ring + (to * RING + p % RING) * C + c, new, mask=on)
                elif p >= 0:
                    old = tl.load(ring + (at * RING + p % RING) * C + c, mask=on)
                    tl.store(ring + (to * RING + p % RING) * C + c, old, mask=on)
    for i in range(tl.maximum(n - RING, 0), n):
        new = tl.load(x + (token + i) * x_stride + c, mask=on)
        tl.store(ring + (at * RING + (first + i) % RING) * C + c, new, mask=on)


@kernel("x", "more", *OF_ROWS, "drafts", "x_stride", "more_stride")
def _keep(
    x, ring, more, more_ring, rows, start, behind, cu_q, drafts, save_at, save_to, x_stride, more_stride,
    C: tl.constexpr, MORE: tl.constexpr, COPIES: tl.constexpr, TAPS: tl.constexpr, RING: tl.constexpr,
    BC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    row, part = tl.program_id(0), tl.program_id(1)
    of_ring: tl.constexpr = (C + BC - 1) // BC
    c = tl.arange(0, BC)
    if part < of_ring:
        _keep_row(
            x, x_stride, ring, part * BC + c, row, rows, start, behind, cu_q, drafts, save_at, save_to,
            C, COPIES, TAPS, RING,
        )  # fmt: skip
    elif MORE > 0:
        _keep_row(
            more, more_stride, more_ring, (part - of_ring) * BC + c, row, rows, start, behind, cu_q, drafts, save_at,
            save_to, MORE, COPIES, TAPS, RING,
        )  # fmt: skip


@kernel("cu_q", "R", "N")
def _norm(
    o, z, weight, y, cu_q, R, N, z_stride, eps, HV: tl.constexpr, DV: tl.constexpr, PV: tl.constexpr,
    HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    at = tl.arange(0, PV)
    which = tl.program_id(0).to(tl.int64) * HEADS + tl.arange(0, HEADS)  # index of a (token, head) pair
    token = which // HV
    dtype = y.dtype.element_ty
    place = which[:, None] * DV + at[None, :]
    on = (which < N)[:, None] & (at < DV)[None, :]
    there = on & (token < tl.load(cu_q + R))[:, None]  # false for padding tokens, whose results become zeros
    x = tl.load(o + place, mask=there, other=0.0).to(tl.float32)
    x = (x * tl.rsqrt(tl.sum(x * x, 1) / DV + eps)[:, None]).to(dtype).to(tl.float32)
    x = (x * tl.load(weight + at, mask=at < DV, other=0.0).to(tl.float32)[None, :]).to(dtype).to(tl.float32)
    gate = tl.load(z + (token * z_stride + which % HV * DV)[:, None] + at[None, :], mask=there, other=0.0)
    gate = gate.to(tl.float32)
    tl.store(y + place, (x * gate * tl.sigmoid(gate)).to(dtype), mask=on)


def part_of(rows: int, tokens: int) -> int:
    """Return how many of the elements of a value vector each program computes, for a step of ``rows`` rows and
    ``tokens`` tokens.

    Rows of several tokens need short sums, which one warp can add alone.  Rows of one token read their state once, and
    one program with wide loads does so fastest.
    """
    return PART if tokens > rows or rows <= FEW_ROWS else 128


def mix(
    x: Tensor,
    ab: Tensor,
    z: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    norm: Tensor,
    eps: float,
    memory: dict[str, Tensor],
    sizes: tuple[int, int, int, int],
    step: StepStates,
    invariant: bool = False,
) -> Tensor:
    """Return gated_norm(scan(x, ab, *weights, ...), z, norm, eps) [T, value heads * value dim].

    A step whose rows have at most one token each, and whose states never lack tokens, is one launch."""
    # without space for drafts in the ring of the newest inputs, a state covers all tokens before its row
    lacks_none = memory["ring"].shape[1] == weights[0].shape[1]
    single = step.longest == 1 and len(x) == len(step.rows)
    if single and lacks_none and not invariant:
        return scan_one(x, ab, z, weights, norm, eps, memory, sizes, step)
    _, heads, _, value_dim = sizes
    o = x.new_empty(len(x), heads, value_dim)
    scan(x, ab, *weights, memory, sizes, step, invariant, o)
    return gated_norm(o, z, norm, eps, step.cu_q)


def scan_one(
    x: Tensor,
    ab: Tensor,
    z: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    norm: Tensor,
    eps: float,
    memory: dict[str, Tensor],
    sizes: tuple[int, int, int, int],
    step: StepStates,
    part: int | None = None,
    warps: int | None = None,
) -> Tensor:
    """Return the same as ``mix`` for a step of R tokens whose rows have at most one token each.

    ``part`` is the elements of a value that a program computes, and ``warps`` its number of warps; None means the
    measured choice."""
    _, heads, key_dim, value_dim = sizes
    rows = len(step.rows)
    few = rows <= FEW_ROWS
    keys = power(key_dim)
    values = power(value_dim)
    if part is None:
        part = PART if few else 128
    part = min(part, values)
    whole = part == values
    out = torch.empty(rows, heads * value_dim, dtype=x.dtype, device=x.device)
    cu_q = step.cu_q
    of_rows = (step.rows, step.start, step.behind, cu_q, step.save_at, step.save_to)
    ring = memory["ring"]
    states = (ring, memory["gates"], memory["state"])
    strides = (x.stride(0), ab.stride(0), z.stride(0))
    constants = pdl(x) | shape_of(sizes)
    constants["W"] = weights[0].shape[1]
    constants["RING"] = ring.shape[1]
    constants["PK"] = keys
    constants["BV"] = part
    constants["COPIES"] = COPIES
    constants["NORM"] = whole
    constants["num_warps"] = warps or (2 if few else 4)
    grid = (rows, heads, values // part)
    _one[grid](x, ab, z, *weights, norm, *states, *of_rows, out, rows, *strides, eps, **constants)
    if whole:
        return out
    by_head = out.view(rows, heads, value_dim)
    return gated_norm(by_head, z, norm, eps, cu_q)


def scan(
    x: Tensor,
    ab: Tensor,
    weight: Tensor,
    rates: Tensor,
    dt_bias: Tensor,
    memory: dict[str, Tensor],
    sizes: tuple[int, int, int, int],
    step: StepStates,
    invariant: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Return the outputs of the delta rule [T, value heads, value dim], and update states and rings.

    The arguments are those of ``device.layers.delta_net.scan``.  ``invariant`` means that the bits of a row do not
    depend on the other rows of the step.  The outputs are written to ``out``, in which tokens of no row keep their
    values.  None means new memory, in which they are zeros.
    """
    _, heads, key_dim, value_dim = sizes
    ring = memory["ring"]
    gates = memory["gates"]
    if out is None:
        out = x.new_zeros(len(x), heads, value_dim)
    rows = len(step.rows)
    taps = weight.shape[1]
    in_chunks, chunks = chunks_of(step, x, sizes, invariant)
    keys = power(key_dim)
    part = PART if invariant else part_of(rows, len(x))
    part = min(part, power(value_dim))
    grid = (rows, heads, cdiv(value_dim, part))
    options = pdl(x) | shape_of(sizes)
    options["W"] = taps
    options["RING"] = ring.shape[1]
    options["PK"] = keys
    options["BV"] = part
    options["num_warps"] = warps_of(keys, part)
    # A state is advanced in two loops, by tokens that it lacks and by tokens of the step.  The compiler fuses different
    # multiply-adds in them, so their bits differ.
    options["enable_fp_fusion"] = not invariant
    weights = (weight, rates, dt_bias)
    states = (ring, gates, memory["state"])
    strides = (x.stride(0), ab.stride(0))
    args = (x, ab, *weights, *states, *rows_of(step), chunks.long, out, *strides)
    all_long = in_chunks and ring.shape[1] == taps and (step.shortest or 0) >= delta_chunks.LONG
    if all_long:
        compile_once(_scan, args, options)
    else:
        _scan[grid](*args, **options)
    if in_chunks:
        delta_chunks.scan_long(x, ab, *weights, memory, sizes, step, chunks, out)
    keep(x, ring, step, taps - 1, ab, gates)
    return out


def shape_of(sizes: tuple[int, int, int, int]) -> dict[str, Any]:
    """Return the constants of a layer's heads, for key heads, value heads, key dim and value dim."""
    key_heads, heads, key_dim, value_dim = sizes
    return {"HK": key_heads, "HV": heads, "DK": key_dim, "DV": value_dim}


def rows_of(step: StepStates) -> tuple[Tensor, ...]:
    """Return the columns of a step's rows in the order of the kernels ``_scan`` and ``_keep``."""
    drafts = step.drafts.view(torch.uint8)
    return step.rows, step.start, step.behind, step.cu_q, drafts, step.save_at, step.save_to


def chunks_of(
    step: StepStates, x: Tensor, sizes: tuple[int, int, int, int], invariant: bool
) -> tuple[bool, delta_chunks.Chunks]:
    """Return whether rows may be computed in chunks, and the chunks of the long rows of a step.

    There are none if results must not depend on the batch (``invariant``).  The chunks are the same for all layers and
    are computed once per step.
    """
    longest = step.longest or 0
    known = step.row is not None and longest >= delta_chunks.LONG
    wanted = known and not invariant and delta_chunks.takes(x.dtype, sizes)
    if step.chunks is None:
        step.chunks = {}
    if wanted not in step.chunks:
        if wanted:
            chunks = delta_chunks.chunks_of(step, len(x))
        else:
            chunks = delta_chunks.Chunks.none(len(step.rows), x.device)
        step.chunks[wanted] = chunks
    return wanted, step.chunks[wanted]


def warps_of(keys: int, part: int) -> int:
    """Return the number of warps of a program that computes a state of ``keys`` times ``part`` elements."""
    return min(max(keys * part // WARP, 1), 8)


def keep(
    new: Tensor,
    ring: Tensor,
    step: StepStates,
    taps: int,
    more: Tensor | None = None,
    more_ring: Tensor | None = None,
) -> None:
    """Store the newest inputs ``new`` [T, channels] of each row in its ring [states, places, channels], and the
    ``taps`` inputs before a copied state in the ring of the copy.

    ``more`` [T, m] and ``more_ring`` [states, places, m] are an optional second pair of inputs and ring.
    """
    places, width = ring.shape[1:]
    second = 0 if more_ring is None else more_ring.shape[2]
    columns = min(1024, power(width))
    constants = pdl(new)
    constants["C"] = width
    constants["MORE"] = second
    constants["COPIES"] = COPIES
    constants["TAPS"] = taps
    constants["RING"] = places
    constants["BC"] = columns
    constants["num_warps"] = 4
    if more is None or more_ring is None:
        more = new
        more_ring = ring
    programs = cdiv(width, columns) + cdiv(second, columns)
    strides = (new.stride(0), more.stride(0))
    grid = (len(step.rows), programs)
    _keep[grid](new, ring, more, more_ring, *rows_of(step), *strides, **constants)


def gated_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float, cu_q: Tensor) -> Tensor:
    """Return RMSNorm(o) * weight * silu(z) [T, heads * dim], of o [T, heads, dim] and z [T, heads * dim].

    The rows of z may lie apart.  The statistics are float32.  Tokens from cu_q[-1] on belong to no row and get zeros.
    """
    tokens, heads, dim = o.shape
    y = torch.empty(tokens, heads * dim, dtype=o.dtype, device=o.device)
    if not tokens:
        return y
    constants = pdl(o)
    constants["HV"] = heads
    constants["DV"] = dim
    constants["PV"] = power(dim)
    constants["HEADS"] = HEADS
    constants["num_warps"] = 4
    rows = len(cu_q) - 1
    every = tokens * heads
    programs = cdiv(every, HEADS)
    _norm[(programs,)](o, z, weight, y, cu_q, rows, every, z.stride(0), eps, **constants)
    return y
