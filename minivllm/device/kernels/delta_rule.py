"""The gated delta rule over the tokens of each row, with the convolution before it and the gated norm behind it.

    scan   grid (R, value heads, parts of a value)   convolution, delta rule: state and window stay in registers
    keep   grid (R, parts of the channels)           the newest inputs go to the ring, behind ``scan``
    norm   grid (T, value heads)                     RMSNorm of a head, times silu(z)

The state is read and written once for each row: 8 * key_dim * value_dim bytes a head and layer, which bounds a decode
step.  Tokens of a row are computed one after another.
Reference: ``device.layers.delta_net.scan``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.core.interfaces.states import COPIES

from .launch import kernel, pdl, wait

if TYPE_CHECKING:
    from minivllm.core.interfaces.states import StepStates

MOST_TAPS = 3  # inputs before a token that the convolution reads
EPS = tl.constexpr(1e-6)  # of the norm of queries and keys
# times of an H200 choose these (value dim 128): elements of a state in the registers of a warp, rows that are few
WARP, FEW_ROWS, PART = 4096, 4, 32


@triton.jit
def _conv(x0, x1, x2, x3, w0, w1, w2, w3):
    """Return silu of the convolution, of the newest input x0 and those before it."""
    y = x0 * w0 + x1 * w1 + x2 * w2 + x3 * w3
    return y * tl.sigmoid(y)


@triton.jit
def _unit(x):
    return x * tl.rsqrt(tl.sum(x * x, 0) + EPS)


@triton.jit
def _load(ring, at, first: tl.constexpr, position, channels, on, C: tl.constexpr, RING: tl.constexpr):
    """Return the input of ``position`` from the ring, zero before the sequence."""
    place = at * RING + (position + RING) % RING
    return tl.load(ring + place * C + first + channels, mask=on & (position >= 0), other=0.0).to(tl.float32)


@triton.jit
def _advance(S, q, k, v, a, b, decay_rate, dt):
    """Return (state after the token, output): S [DK, BV], q and k [DK], v [BV]."""
    gated = a + dt
    soft = tl.where(gated > 20.0, gated, tl.log(1.0 + tl.exp(tl.minimum(gated, 20.0))))
    S = S * tl.exp(-decay_rate * soft)
    read = tl.sum(S * k[:, None], 0)
    S = S + k[:, None] * ((v - read) * tl.sigmoid(b))[None, :]
    return S, tl.sum(S * q[:, None], 0)


@kernel("x", "ab", "rows", "start", "behind", "cu_q", "drafts", "save_at", "save_to", "out", "x_stride", "ab_stride")
def _scan(
    x, ab, weight, rates, dt_bias, ring, gates, state, rows, start, behind, cu_q, drafts, save_at, save_to, out,
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
    # taps: the weight of lag j is column W - 1 - j
    q0 = tl.load(weight + cq * W + W - 1, mask=on_k, other=0.0).to(tl.float32)
    q1 = tl.load(weight + cq * W + W - 2, mask=on_k & (W > 1), other=0.0).to(tl.float32)
    q2 = tl.load(weight + cq * W + W - 3, mask=on_k & (W > 2), other=0.0).to(tl.float32)
    q3 = tl.load(weight + cq * W + W - 4, mask=on_k & (W > 3), other=0.0).to(tl.float32)
    k0 = tl.load(weight + ck * W + W - 1, mask=on_k, other=0.0).to(tl.float32)
    k1 = tl.load(weight + ck * W + W - 2, mask=on_k & (W > 1), other=0.0).to(tl.float32)
    k2 = tl.load(weight + ck * W + W - 3, mask=on_k & (W > 2), other=0.0).to(tl.float32)
    k3 = tl.load(weight + ck * W + W - 4, mask=on_k & (W > 3), other=0.0).to(tl.float32)
    v0 = tl.load(weight + cv * W + W - 1, mask=on_v, other=0.0).to(tl.float32)
    v1 = tl.load(weight + cv * W + W - 2, mask=on_v & (W > 1), other=0.0).to(tl.float32)
    v2 = tl.load(weight + cv * W + W - 3, mask=on_v & (W > 2), other=0.0).to(tl.float32)
    v3 = tl.load(weight + cv * W + W - 4, mask=on_v & (W > 3), other=0.0).to(tl.float32)
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
    usable, fold = gap >= 0, tl.maximum(gap, 0)
    begin = first - fold
    S = tl.load(state + at * size + tile, mask=on & (begin > 0) & usable, other=0.0)
    S = tl.where(usable, S, float("nan"))
    xq1 = _load(ring, at, 0, begin - 1, cq, on_k, C, RING)
    xq2 = _load(ring, at, 0, begin - 2, cq, on_k, C, RING)
    xq3 = _load(ring, at, 0, begin - 3, cq, on_k, C, RING)
    xk1 = _load(ring, at, 0, begin - 1, ck, on_k, C, RING)
    xk2 = _load(ring, at, 0, begin - 2, ck, on_k, C, RING)
    xk3 = _load(ring, at, 0, begin - 3, ck, on_k, C, RING)
    xv1 = _load(ring, at, 0, begin - 1, cv, on_v, C, RING)
    xv2 = _load(ring, at, 0, begin - 2, cv, on_v, C, RING)
    xv3 = _load(ring, at, 0, begin - 3, cv, on_v, C, RING)
    for i in range(fold):
        p = begin + i
        xq, xk, xv = (
            _load(ring, at, 0, p, cq, on_k, C, RING),
            _load(ring, at, 0, p, ck, on_k, C, RING),
            _load(ring, at, 0, p, cv, on_v, C, RING),
        )
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
    if provisional == 0:
        tl.store(state + at * size + tile, S, mask=on)


@kernel("x", "rows", "start", "behind", "cu_q", "drafts", "save_at", "save_to", "x_stride")
def _keep(
    x, ring, rows, start, behind, cu_q, drafts, save_at, save_to, x_stride,
    C: tl.constexpr, COPIES: tl.constexpr, TAPS: tl.constexpr, RING: tl.constexpr, BC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    row = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
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


@kernel("o", "z", "y", "z_stride")
def _norm(
    o, z, weight, y, z_stride, eps, HV: tl.constexpr, DV: tl.constexpr, PV: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    wait(PDL)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, PV)
    on = at < DV
    dtype = y.dtype.element_ty
    x = tl.load(o + (token * HV + head) * DV + at, mask=on, other=0.0).to(tl.float32)
    x = (x * tl.rsqrt(tl.sum(x * x, 0) / DV + eps)).to(dtype).to(tl.float32)
    x = (x * tl.load(weight + at, mask=on, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
    gate = tl.load(z + token * z_stride + head * DV + at, mask=on, other=0.0).to(tl.float32)
    tl.store(y + (token * HV + head) * DV + at, (x * gate * tl.sigmoid(gate)).to(dtype), mask=on)


def part_of(rows: int, tokens: int) -> int:
    """Return the elements of a value that a program computes, for a step of ``rows`` rows.

    Long rows need short sums, which one warp adds without the others; few of them need many programs.  Rows of one
    token read their state once, and its loads are widest in one program."""
    if tokens > rows:
        return 16 if rows <= FEW_ROWS else PART
    return PART if rows <= FEW_ROWS else 128


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
) -> Tensor:
    """Return the outputs of the delta rule [T, value heads, value dim], and bring states and rings up to date.

    As ``device.layers.delta_net.scan``.  Tokens behind ``cu_q[R]`` get zeros.  ``invariant`` means that the bits of a
    row do not depend on the other rows of the step.
    """
    key_heads, heads, key_dim, value_dim = sizes
    ring, gates, state = memory["ring"], memory["gates"], memory["state"]
    out = x.new_zeros(len(x), heads, value_dim)
    rows, taps = len(step.rows), weight.shape[1]
    drafts = step.drafts.view(torch.uint8)
    of_rows = (step.rows, step.start, step.behind, step.cu_q, drafts, step.save_at, step.save_to)
    keys = triton.next_power_of_2(key_dim)
    part = PART if invariant else part_of(rows, len(x))
    part = min(part, triton.next_power_of_2(value_dim))
    grid = (rows, heads, triton.cdiv(value_dim, part))
    shape = {"HK": key_heads, "HV": heads, "DK": key_dim, "DV": value_dim, "W": taps, "RING": ring.shape[1]}
    tile = {"PK": keys, "BV": part, "num_warps": min(max(keys * part // WARP, 1), 8)}
    weights, strides = (weight, rates, dt_bias), (x.stride(0), ab.stride(0))
    _scan[grid](x, ab, *weights, ring, gates, state, *of_rows, out, *strides, **shape, **tile, **pdl(x))
    for new, kept in ((x, ring), (ab, gates)):
        keep(new, kept, step, taps - 1)
    return out


def keep(new: Tensor, ring: Tensor, step: StepStates, taps: int) -> None:
    """Store the newest inputs ``new`` [T, channels] of each row in its ring [states, places, channels], and the
    ``taps`` inputs before a copied state in the ring of the copy."""
    drafts = step.drafts.view(torch.uint8)
    of_rows = (step.rows, step.start, step.behind, step.cu_q, drafts, step.save_at, step.save_to)
    width = ring.shape[2]
    columns = min(1024, triton.next_power_of_2(width))
    shape = {"C": width, "COPIES": COPIES, "TAPS": taps, "RING": ring.shape[1], "BC": columns}
    grid = (len(step.rows), triton.cdiv(width, columns))
    _keep[grid](new, ring, *of_rows, new.stride(0), **shape, num_warps=4, **pdl(new))


def gated_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return RMSNorm(o) * weight * silu(z) [T, heads * dim], of o [T, heads, dim] and z [T, heads * dim].

    The rows of z may lie apart.  The statistics are float32.
    """
    tokens, heads, dim = o.shape
    y = torch.empty(tokens, heads * dim, dtype=o.dtype, device=o.device)
    if tokens:
        _norm[(tokens, heads)](
            o, z, weight, y, z.stride(0), eps, HV=heads, DV=dim, PV=triton.next_power_of_2(dim), num_warps=1, **pdl(o)
        )
    return y
