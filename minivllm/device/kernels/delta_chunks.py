"""The gated delta rule over long rows, 64 tokens at a time (arXiv:2412.06464, section 3.3).

    mix      grid (tokens / 32, heads)          convolution, silu, unit length of q and k
    prepare  grid (chunks, value heads)         products within a chunk, and the inverse of its triangular matrix
    advance  grid (R, value heads, parts)       the state from chunk to chunk, and the outputs

With g the logarithm of the decay summed up to a token, and beta its write strength, a chunk of keys K, values V and
queries Q that begins at the state S has::

    A = tril(beta K K^T * exp(g_i - g_j), -1)          T = (I + A)^-1 beta
    V' = T (V - exp(g) K S)                            P = tril(Q K^T * exp(g_i - g_j))
    O = exp(g) Q S + P V'                              S <- exp(g_last) S + K^T (exp(g_last - g) V')

A row is cut into three parts, at the positions whose state is copied, and each part into chunks.

Products have operands of 16 bits and sums of 32 bits.  A row is long if it has at least ``LONG`` tokens, no drafts and
a state that lacks no token or is not usable; ``delta_rule`` computes the other rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.core.interfaces.states import COPIES

from .launch import cdiv, compile_once, kernel, pdl, wait

if TYPE_CHECKING:
    from minivllm.core.interfaces.states import StepStates

CHUNK, LONG = 64, 32  # tokens
DIMS = (64, 128)  # supported sizes of a head; narrower products were wrong in Triton 3.6 with some numbers of stages
TOKENS = 32  # number of tokens that each program of the kernel ``mix`` computes
# constants that were fastest on an H200: warps, stages of loads, elements of a value for each of many or few programs
WARPS, STAGES, PART, SMALL_PART, MANY = 4, 3, 64, 32, 128
EPS = tl.constexpr(1e-6)  # added to the squared length of queries and keys before the division


class Chunks(NamedTuple):
    """The division of a step's long rows into chunks of tokens."""

    long: Tensor  # u8 [R], 1 for rows that are computed in chunks
    cuts: Tensor  # i32 [R, 4] 0, then the number of the row's tokens up to the end of each of its three parts
    row: Tensor  # i32 [chunks] index of each chunk's row, R for unused chunks at the end
    first: Tensor  # i32 [R] index of each row's first chunk

    @classmethod
    def none(cls, rows: int, device: torch.device) -> Chunks:
        """Return the chunks of a step without long rows."""
        long = torch.zeros(rows, dtype=torch.uint8, device=device)
        return cls(long, long, long[:0], long)


def chunks_of(step: StepStates, tokens: int) -> Chunks:
    """Divide the long rows of a step of ``tokens`` tokens into chunks.  No tensor is read on the host."""
    n = step.cu_q[1:] - step.cu_q[:-1]
    long = (n >= LONG) & (step.behind <= 0) & ~step.drafts
    length = n[:, None]
    copied = step.save_at - step.start[:, None]
    inside = (copied > 0) & (copied < length)
    ends = torch.where(inside, copied, length)
    ends = ends.sort(dim=1).values
    begin = torch.zeros_like(length)
    cuts = torch.cat([begin, ends, length], dim=1).int()
    between = cuts.diff(dim=1)
    count = ((between + CHUNK - 1) // CHUNK).sum(1)
    end = torch.where(long, count, 0).cumsum(0)
    most_long = min(len(n), tokens // LONG)
    most = tokens // CHUNK + (1 + COPIES) * most_long
    number = torch.arange(most, device=n.device)
    row = torch.searchsorted(end, number, right=True)
    first = (end - count).int()
    return Chunks(long.view(torch.uint8), cuts, row.int(), first)


@kernel("rows", "start", "cu_q", "row_of", "T", "R")
def _mix(
    x, weight, ring, rows, start, cu_q, row_of, y, T, R, x_stride,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, W: tl.constexpr, RING: tl.constexpr,
    BT: tl.constexpr, P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = 2 * HK * DK + HV * DV
    head = tl.program_id(1)
    at = tl.arange(0, P)
    is_value = head >= 2 * HK
    size = tl.where(is_value, DV, DK)
    c = tl.where(is_value, 2 * HK * DK + (head - 2 * HK) * DV, head * DK) + at
    on = at < size
    wait(PDL)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    there = t < tl.minimum(T, tl.load(cu_q + R))
    row = tl.load(row_of + t, mask=there, other=0)
    offset = t - tl.load(cu_q + row, mask=there, other=0)
    begin = tl.load(start + row, mask=there, other=0)
    state = tl.load(rows + row, mask=there, other=0)
    total = tl.zeros((BT, P), tl.float32)
    for lag in tl.static_range(W):
        w = tl.load(weight + c * W + W - 1 - lag, mask=on, other=0.0).to(tl.float32)
        new = (there & (offset >= lag))[:, None] & on[None, :]
        value = tl.load(x + (t - lag).to(tl.int64)[:, None] * x_stride + c[None, :], mask=new, other=0.0)
        total += value.to(tl.float32) * w[None, :]
    if tl.min(tl.where(there, offset, W), 0) < W - 1:  # the first tokens of a row also read the ring of earlier inputs
        for lag in tl.static_range(1, W):
            w = tl.load(weight + c * W + W - 1 - lag, mask=on, other=0.0).to(tl.float32)
            position = begin + offset - lag
            old = (there & (offset < lag) & (position >= 0))[:, None] & on[None, :]
            place = state * RING + (position + RING) % RING
            value = tl.load(ring + place[:, None] * C + c[None, :], mask=old, other=0.0)
            total += value.to(tl.float32) * w[None, :]
    total = total * tl.sigmoid(total)
    length = tl.rsqrt(tl.sum(total * total, 1) + EPS) * tl.where(head < HK, DK**-0.5, 1.0)
    total = total * tl.where(is_value, 1.0, length)[:, None]
    tl.store(
        y + t.to(tl.int64)[:, None] * C + c[None, :], total.to(y.dtype.element_ty), mask=there[:, None] & on[None, :]
    )


@triton.jit
def _inverse(A, C: tl.constexpr, B: tl.constexpr):
    """Return (I + A)^-1 for a strictly lower triangular A [C, C].

    Blocks of B are inverted by substitution, and combined by products.
    """
    N: tl.constexpr = C // B
    i = tl.arange(0, C)
    same = (i // B)[:, None] == (i // B)[None, :]
    block = (i // B)[:, None, None] == tl.arange(0, N)[None, :, None]
    diagonal = tl.sum(tl.where(block, tl.reshape(A, (C, N, B)), 0.0), 1)
    inner = tl.reshape(diagonal, (N, B, B))
    found = tl.zeros((N, B, B), tl.float32)
    index = tl.arange(0, B)[None, :, None]
    for r in range(1, B):
        a = tl.sum(tl.where(index == r, inner, 0.0), 1)
        known = tl.sum(a[:, :, None] * found, 1)
        found = tl.where(index == r, -(a + known)[:, None, :], found)
    wide = tl.where(block, tl.reshape(found, (C, 1, B)), 0.0)
    eye = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    D = tl.reshape(wide, (C, C)) + eye
    L = tl.where(same, 0.0, A)
    M = tl.dot(D, L)
    M2 = tl.dot(M, M)
    X = eye - M + M2 - tl.dot(M, M2)
    return tl.dot(X, D)


@kernel("ab", "cu_q", "row_of", "first_of", "cuts", "R", "ab_stride")
def _prepare(
    m, ab, rates, dt_bias, cu_q, row_of, first_of, cuts, inverse, inner, g, R, ab_stride,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = 2 * HK * DK + HV * DV
    chunk, head = tl.program_id(0), tl.program_id(1)
    key = head // (HV // HK)
    rate, dt = tl.load(rates + head), tl.load(dt_bias + head)
    wait(PDL)
    row = tl.load(row_of + chunk)
    if row < R:
        dtype = m.dtype.element_ty
        i, ok = tl.arange(0, BC), tl.arange(0, DK)
        number = chunk - tl.load(first_of + row)  # within the row
        cut1, cut2, cut3 = tl.load(cuts + 4 * row + 1), tl.load(cuts + 4 * row + 2), tl.load(cuts + 4 * row + 3)
        count1 = (cut1 + BC - 1) // BC
        count2 = count1 + (cut2 - cut1 + BC - 1) // BC
        base = tl.where(number < count1, 0, tl.where(number < count2, cut1 - count1 * BC, cut2 - count2 * BC))
        end = tl.where(number < count1, cut1, tl.where(number < count2, cut2, cut3))
        offset = base + number * BC + i
        on = offset < end
        t = tl.load(cu_q + row).to(tl.int64) + offset
        b = tl.load(ab + t * ab_stride + head, mask=on, other=0.0).to(tl.float32)
        a = tl.load(ab + t * ab_stride + HV + head, mask=on, other=0.0).to(tl.float32) + dt
        soft = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
        total = tl.cumsum(tl.where(on, -rate * soft, 0.0), 0)
        beta = tl.where(on, tl.sigmoid(b), 0.0)
        tl.store(g + t * HV + head, total, mask=on)
        here = m + t[:, None] * C + ok[None, :]
        place = (t[:, None] * HV + head) * BC + i[None, :]
        k = tl.load(here + (HK + key) * DK, mask=on[:, None], other=0.0)
        q = tl.load(here + key * DK, mask=on[:, None], other=0.0)
        lower = i[:, None] >= i[None, :]
        decay = tl.where(lower, tl.exp(tl.where(lower, total[:, None] - total[None, :], 0.0)), 0.0)
        attention = tl.dot(q, tl.trans(k)) * decay
        tl.store(inner + place, attention.to(dtype), mask=on[:, None])
        A = tl.dot(k, tl.trans(k)) * decay * beta[:, None]
        T = _inverse(tl.where(i[:, None] == i[None, :], 0.0, A), BC, 16) * beta[None, :]
        tl.store(inverse + place, T.to(dtype), mask=on[:, None])


@kernel("rows", "start", "behind", "cu_q", "long", "cuts", "save_at", "save_to")
def _advance(
    m, inverse, inner, g, state, rows, start, behind, cu_q, long, cuts, save_at, save_to, out,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BC: tl.constexpr, BV: tl.constexpr,
    COPIES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = 2 * HK * DK + HV * DV
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    key = head // (HV // HK)
    wait(PDL)
    if tl.load(long + row) != 0:
        dtype = m.dtype.element_ty
        at, begin = tl.load(rows + row), tl.load(start + row)
        token = tl.load(cu_q + row).to(tl.int64)
        i, ok, ov = tl.arange(0, BC), tl.arange(0, DK), part * BV + tl.arange(0, BV)
        size: tl.constexpr = HV * DK * DV
        tile = (head * DK + ok)[:, None] * DV + ov[None, :]
        usable = tl.load(behind + row) >= 0
        S = tl.load(state + at * size + tile, mask=(begin > 0) & usable & (ov < DV)[None, :], other=0.0)
        S = tl.where(usable, S, float("nan"))
        for piece in range(1 + COPIES):
            end = tl.load(cuts + 4 * row + piece + 1)
            for first in range(tl.load(cuts + 4 * row + piece), end, BC):
                on = first + i < end
                t = token + first + i
                here = m + t[:, None] * C
                place = t[:, None] * HV + head
                total = tl.load(g + t * HV + head, mask=on, other=0.0)
                last = tl.load(g + (token + tl.minimum(first + BC, end) - 1) * HV + head)
                grown = tl.exp(total)[:, None]
                narrow = S.to(dtype)
                k = tl.load(here + (HK + key) * DK + ok[None, :], mask=on[:, None], other=0.0)
                v = tl.load(here + 2 * HK * DK + head * DV + ov[None, :], mask=on[:, None], other=0.0)
                error = v.to(tl.float32) - tl.dot(k, narrow) * grown
                T = tl.load(inverse + place * BC + i[None, :], mask=on[:, None], other=0.0)
                v = tl.dot(T, error.to(dtype))
                q = tl.load(here + key * DK + ok[None, :], mask=on[:, None], other=0.0)
                o = tl.dot(q, narrow) * grown
                near = tl.load(inner + place * BC + i[None, :], mask=on[:, None], other=0.0)
                o = tl.dot(near, v.to(dtype), o)
                tl.store(out + place * DV + ov[None, :], o.to(out.dtype.element_ty), mask=on[:, None])
                faded = (v * tl.exp(tl.where(on, last - total, 0.0))[:, None]).to(dtype)
                S = tl.dot(tl.trans(k), faded, S * tl.exp(last))
            for copy in tl.static_range(COPIES):
                if tl.load(save_at + COPIES * row + copy) == begin + end:
                    tl.store(state + tl.load(save_to + COPIES * row + copy) * size + tile, S)
        tl.store(state + at * size + tile, S)


def takes(dtype: torch.dtype, sizes: tuple[int, int, int, int]) -> bool:
    """Return whether long rows of this dtype, and of these sizes of heads, can be computed in chunks."""
    _, _, key_dim, value_dim = sizes
    of_16_bits = dtype in (torch.bfloat16, torch.float16)
    return of_16_bits and key_dim in DIMS and value_dim in DIMS


def scan_long(
    x: Tensor,
    ab: Tensor,
    weight: Tensor,
    rates: Tensor,
    dt_bias: Tensor,
    memory: dict[str, Tensor],
    sizes: tuple[int, int, int, int],
    step: StepStates,
    chunks: Chunks,
    out: Tensor,
) -> None:
    """Write the outputs of the delta rule of long rows to ``out`` [T, value heads, value dim], and update their states.

    The arguments are those of ``delta_rule.scan``.  Rings are read, and are not written.
    """
    key_heads, heads, key_dim, value_dim = sizes
    tokens = len(x)
    rows = len(step.rows)
    ring = memory["ring"]
    mixed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    shape = pdl(x) | {"HK": key_heads, "HV": heads, "DK": key_dim, "DV": value_dim}
    conv = shape | {"BT": TOKENS, "num_warps": 4}
    conv["W"] = weight.shape[1]
    conv["RING"] = ring.shape[1]
    conv["P"] = max(key_dim, value_dim)
    cu_q = step.cu_q
    columns = (step.rows, step.start, cu_q, step.row)
    grid = (cdiv(tokens, TOKENS), 2 * key_heads + heads)
    numbers = (tokens, rows, x.stride(0))
    _mix[grid](x, weight, ring, *columns, mixed, *numbers, **conv)
    inverse = x.new_empty(tokens, heads, CHUNK)
    inner = x.new_empty(tokens, heads, CHUNK)
    g = x.new_empty(tokens, heads, dtype=torch.float32)
    made = (inverse, inner, g)
    long, cuts, row, first = chunks
    grid = (len(row), heads)
    inputs = (mixed, ab, rates, dt_bias, cu_q, row, first, cuts)
    stride = ab.stride(0)
    _prepare[grid](*inputs, *made, rows, stride, BC=CHUNK, num_warps=WARPS, **shape)
    states = rows * heads * value_dim
    part = PART if states >= MANY * PART else SMALL_PART
    part = min(part, value_dim)
    shape |= {"BC": CHUNK, "COPIES": COPIES, "num_warps": WARPS, "num_stages": STAGES}
    of_rows = (step.rows, step.start, step.behind, cu_q, long, cuts)
    args = (mixed, *made, memory["state"], *of_rows, step.save_at, step.save_to, out)
    _advance[rows, heads, value_dim // part](*args, BV=part, **shape)
    for other in (PART, SMALL_PART):
        compile_once(_advance, args, shape | {"BV": min(other, value_dim)})
