"""Attention between the patches of an image on a Hopper (compute capability 9.0), in Gluon.

    q, k, v [T, H, D]     T / ``length`` sequences of ``length`` patches; each patch sees all patches of its sequence
    a tile is 128 patches of one sequence and one head

    warp          copies keys and values     ──TMA──► shared memory, STAGES tiles of N keys each
    warp group 0  patches  0 ..  63   k, v ──► s = q k (wgmma) ──► p = 2 ** (s - shift) ──► p v (wgmma), a tile behind
    warp group 1  patches 64 .. 127   k, v ──► the same

The warp groups start their products in turns (barriers ``order``), so one computes powers of two while the products of
the other run.  Queries are read from registers, so products with keys read less shared memory.

A head has 64 elements and REST more, the next power of two from 16 on: 72 elements are 64 + 16.  A head of 128 for the
same products would have 1.6 times as many.  Copies of the rest also read elements of the next head.  Those of q are 0,
so they change no score, and those of the output are not stored.

The shift is the largest score of the first N keys, so it does not change, and no sum is scaled later.  Softmax does not
depend on it unless a later score is larger by about 64 (in powers of two).  Such a tile of 64 patches is computed once
more by ``_again``, with the largest score so far, as in FlashAttention-2 (arXiv:2307.08691).

The output of a sequence depends on no other sequence: its tiles read no others, and copies behind its end are 0.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .launch import cdiv, multiprocessors, power

KEYS = 128  # keys of a tile (N)
STAGES = 3  # number of key tiles, and of value tiles, that shared memory holds
# Sizes of heads that the kernel serves.  For 64 and 96 an earlier variant was slower than cuDNN.
SIZES = (72, 80)
FAR = 0.03  # largest accepted distance of a patch's output in ``distance``, relative to its norm
NEVER = gl.constexpr(-1.0e30)
MOST = gl.constexpr(1.8446744073709552e19)  # 2 ** 64, the largest sum of probabilities before division


@gluon.jit
def _place(turn, works, length, heads):
    """Return whether this program computes a tile in turn ``turn``, and its sequence, head and first patch."""
    work = turn * gl.num_programs(0) + gl.program_id(0)
    tiles = (length + 127) // 128
    return work < works, work // (tiles * heads), work // tiles % heads, work % tiles * 128


@gluon.jit
def _copy(first, rest, sequence, key, column, full, part, more, REST: gl.constexpr, N: gl.constexpr):
    """Start the copy of N keys or values of a head to the tiles ``part`` and ``more``."""
    mbarrier.expect(full, N * (64 + REST) * 2)
    tma.async_copy_global_to_shared(first, [sequence, key, column], full, part)
    tma.async_copy_global_to_shared(rest, [sequence, key, column + 64], full, more)


@gluon.jit
def _produce(
    k_first, k_rest, v_first, v_rest, stored, barriers, works, length, heads,
    D: gl.constexpr, REST: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the keys and values of all tiles of a program to shared memory, as soon as a stage is empty."""
    k1, k2, v1, v2 = stored
    k_full, k_empty, v_full, v_empty, _order = barriers
    tiles = (length + N - 1) // N
    done = 0
    for turn in range((works + gl.num_programs(0) - 1) // gl.num_programs(0)):
        some, sequence, head, _line = _place(turn, works, length, heads)
        if some:
            for i in range(tiles):
                stage, phase = (done + i) % STAGES, (done + i) // STAGES & 1
                mbarrier.wait(k_empty.index(stage), phase ^ 1)
                _copy(k_first, k_rest, sequence, i * N, head * D, k_full.index(stage), k1.index(stage),
                      k2.index(stage), REST, N)  # fmt: skip
                mbarrier.wait(v_empty.index(stage), phase ^ 1)
                _copy(v_first, v_rest, sequence, i * N, head * D, v_full.index(stage), v1.index(stage),
                      v2.index(stage), REST, N)  # fmt: skip
            done += tiles


@gluon.jit
def _read(x, stride, row, length, column, D: gl.constexpr, REST: gl.constexpr, B1: gl.constexpr, B2: gl.constexpr):
    """Load the head at ``column`` of 64 rows from ``row`` on, as 64 and the rest of its elements.  Rows from ``length``
    on are 0."""
    m1 = row + gl.arange(0, 64, layout=gl.SliceLayout(1, B1))
    d1 = gl.arange(0, 64, layout=gl.SliceLayout(0, B1))
    at = m1.to(gl.int64)[:, None] * stride + column + d1[None, :]
    first = gl.load(x + at, mask=(m1 < length)[:, None], other=0.0)
    m2 = row + gl.arange(0, 64, layout=gl.SliceLayout(1, B2))
    d2 = 64 + gl.arange(0, REST, layout=gl.SliceLayout(0, B2))
    at = m2.to(gl.int64)[:, None] * stride + column + d2[None, :]
    rest = gl.load(x + at, mask=(m2 < length)[:, None] & (d2 < D)[None, :], other=0.0)
    return first, rest


@gluon.jit
def _queries(
    turn, q, stride, works, length, heads,
    WG: gl.constexpr, D: gl.constexpr, REST: gl.constexpr, B1: gl.constexpr, B2: gl.constexpr,
):  # fmt: skip
    """Load the queries of warp group WG for the tile of turn ``turn``; without a tile they are 0."""
    some, sequence, head, line = _place(turn, works, length, heads)
    base = q + sequence.to(gl.int64) * length * stride
    return _read(base, stride, line + WG * 64, gl.where(some, length, 0), head * D, D, REST, B1, B2)


@gluon.jit
def _scores(q1, q2, k1, k2, N: gl.constexpr, LAYOUT: gl.constexpr):
    """Start the products f32 [64, N] of queries and keys."""
    s = gl.zeros([64, N], gl.float32, layout=LAYOUT)
    s = warpgroup_mma(q1, k1.permute((1, 0)), s, use_acc=False, is_async=True)
    s = warpgroup_mma(q2, k2.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _add(p, v1, v2, o1, o2, P1: gl.constexpr, P2: gl.constexpr):
    """Start the addition of values, weighted by p, to the outputs o1 and o2."""
    o1 = warpgroup_mma(gl.convert_layout(p, P1), v1, o1, is_async=True)
    o2 = warpgroup_mma(gl.convert_layout(p, P2), v2, o2, is_async=True)
    return o1, o2


@gluon.jit
def _drain(o1, o2, p):
    """Wait for all products.  The registers of p are in use until then."""
    return warpgroup_mma_wait(0, deps=[o1, o2, p])


@gluon.jit
def _sums(p32, N: gl.constexpr):
    """Return the sums f32 [64, 4] of p32 [64, N], each of every fourth pair of columns.  One thread has all of them."""
    return gl.sum(gl.sum(p32.reshape([64, N // 8, 4, 2]), 3), 1)


@gluon.jit
def _await(order, tile, WG: gl.constexpr):
    """Wait until warp group WG may start its products for the key tile that is the ``tile``-th of this program.

    Warp group 0 waits until warp group 1 has started those for the tile before, and warp group 1 until warp group 0 has
    started those for the same tile."""
    mbarrier.wait(order.index(WG), tile & 1 ^ (1 - WG))


@gluon.jit
def _turn(
    i, q1, q2, stored, barriers, done, length, by, p, shift, total, o1, o2, on, WG: gl.constexpr,
    N: gl.constexpr, REST: gl.constexpr, S: gl.constexpr, P1: gl.constexpr, P2: gl.constexpr, STAGES: gl.constexpr,
    MASK: gl.constexpr,
):  # fmt: skip
    """Compute the probabilities p [64, N] of key tile i while the values of tile i - 1 are added to the outputs.

    ``done`` is the number of key tiles of earlier tiles.  Return the arguments p, total, o1 and o2 of the next turn."""
    k1, k2, v1, v2 = stored
    k_full, k_empty, v_full, v_empty, order = barriers
    stage, phase = (done + i) % STAGES, (done + i) // STAGES & 1
    before, past = (done + i - 1) % STAGES, (done + i - 1) // STAGES & 1
    mbarrier.wait(k_full.index(stage), phase)
    _await(order, done + i, WG)
    s = _scores(q1, q2, k1.index(stage).reshape([N, 64]), k2.index(stage).reshape([N, REST]), N, S)
    mbarrier.wait(v_full.index(before), past)
    o1, o2 = _add(p, v1.index(before).reshape([N, 64]), v2.index(before).reshape([N, REST]), o1, o2, P1, P2)
    mbarrier.arrive(order.index(1 - WG))
    s = warpgroup_mma_wait(2, deps=[s])
    mbarrier.arrive(k_empty.index(stage))
    if MASK:
        s = gl.where((i * N + on < length)[None, :], s, NEVER)
    p32 = gl.exp2(s * by - shift[:, None])
    total += _sums(p32, N)
    p = p32.to(p.dtype)
    mbarrier.wait(v_full.index(before), past)  # prevents the compiler from moving the powers after the wait
    o1, o2, p = _drain(o1, o2, p)
    mbarrier.arrive(v_empty.index(before))
    return p, total, o1, o2


@gluon.jit
def _again(
    q1, q2, t1, t2, k, v, k_stride, v_stride, length, column, by,
    D: gl.constexpr, REST: gl.constexpr, B1: gl.constexpr, B2: gl.constexpr, O1: gl.constexpr, O2: gl.constexpr,
    P1: gl.constexpr, P2: gl.constexpr,
):  # fmt: skip
    """Compute the outputs of 64 patches with a shift that grows with the largest score so far.

    Keys and values are read to the tiles t1 and t2, 64 at a time.  Return o1, o2 and the sum of the probabilities."""
    on = gl.arange(0, 64, layout=gl.SliceLayout(0, O1))
    peak = gl.full([64], NEVER, gl.float32, layout=gl.SliceLayout(1, O1))
    total = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, O1))
    o1 = gl.zeros([64, 64], gl.float32, layout=O1)
    o2 = gl.zeros([64, REST], gl.float32, layout=O2)
    for key in range(0, length, 64):
        first, rest = _read(k, k_stride, key, length, column, D, REST, B1, B2)
        t1.store(first)
        t2.store(rest)
        fence_async_shared()
        s = warpgroup_mma_wait(0, deps=[_scores(q1, q2, t1, t2, 64, O1)])
        s = gl.where((key + on < length)[None, :], s, NEVER)
        before = peak
        peak = gl.maximum(peak, gl.max(s, 1))
        fade = gl.exp2((before - peak) * by)
        p32 = gl.exp2(s * by - (peak * by)[:, None])
        total = total * fade + gl.sum(p32, 1)
        o1 = o1 * fade[:, None]
        o2 = o2 * gl.convert_layout(fade, gl.SliceLayout(1, O2))[:, None]
        first, rest = _read(v, v_stride, key, length, column, D, REST, B1, B2)
        t1.store(first)
        t2.store(rest)
        fence_async_shared()
        p = p32.to(k.dtype.element_ty)
        o1, o2 = _add(p, t1, t2, o1, o2, P1, P2)
        o1, o2, p = _drain(o1, o2, p)
    return o1, o2, total


@gluon.jit
def _consume(
    q, k, v, out, q_stride, k_stride, v_stride, q1, q2, t1, t2, stored, barriers, works, length, heads, by,
    WG: gl.constexpr, D: gl.constexpr, REST: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute and store the outputs of warp group WG, 64 of 128 patches, in all tiles of this program."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    O1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    O2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST, 16])
    P1: gl.constexpr = gl.DotOperandLayout(0, O1, 2)
    P2: gl.constexpr = gl.DotOperandLayout(0, O2, 2)
    B1: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    B2: gl.constexpr = gl.BlockedLayout([1, 8], [256 // REST, REST // 8], [4, 1], [1, 0])
    k1, k2, v1, v2 = stored
    k_full, k_empty, v_full, v_empty, order = barriers
    on = gl.arange(0, N, layout=gl.SliceLayout(0, S))
    m1 = gl.arange(0, 64, layout=gl.SliceLayout(1, B1))
    m2 = gl.arange(0, 64, layout=gl.SliceLayout(1, B2))
    d1 = gl.arange(0, 64, layout=gl.SliceLayout(0, B1))
    d2 = 64 + gl.arange(0, REST, layout=gl.SliceLayout(0, B2))
    dtype: gl.constexpr = q.dtype.element_ty
    tiles = (length + N - 1) // N
    whole = gl.maximum(length // N, 1)
    done = 0
    first, rest = _queries(0, q, q_stride, works, length, heads, WG, D, REST, B1, B2)
    for turn in range((works + gl.num_programs(0) - 1) // gl.num_programs(0)):
        some, sequence, head, line = _place(turn, works, length, heads)
        if some:
            start = sequence.to(gl.int64) * length
            q1.store(first)
            q2.store(rest)
            fence_async_shared()
            # the same queries in registers; ``_again`` reads those in shared memory
            h1 = q1.load(gl.DotOperandLayout(0, S, 2))
            h2 = q2.load(gl.DotOperandLayout(0, S, 2))
            o1 = gl.zeros([64, 64], gl.float32, layout=O1)
            o2 = gl.zeros([64, REST], gl.float32, layout=O2)

            stage, phase = done % STAGES, done // STAGES & 1
            mbarrier.wait(k_full.index(stage), phase)
            _await(order, done, WG)
            s = _scores(h1, h2, k1.index(stage).reshape([N, 64]), k2.index(stage).reshape([N, REST]), N, S)
            mbarrier.arrive(order.index(1 - WG))
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(k_empty.index(stage))
            s = gl.where((on < length)[None, :], s, NEVER)
            shift = gl.max(s, 1) * by
            p32 = gl.exp2(s * by - shift[:, None])
            total = _sums(p32, N)
            p = p32.to(dtype)
            for i in range(1, whole):
                p, total, o1, o2 = _turn(
                    i, h1, h2, stored, barriers, done, length, by, p, shift, total, o1, o2, on, WG, N, REST, S, P1, P2,
                    STAGES, False,
                )  # fmt: skip
            for i in range(whole, tiles):
                p, total, o1, o2 = _turn(
                    i, h1, h2, stored, barriers, done, length, by, p, shift, total, o1, o2, on, WG, N, REST, S, P1, P2,
                    STAGES, True,
                )  # fmt: skip
            done += tiles
            first, rest = _queries(turn + 1, q, q_stride, works, length, heads, WG, D, REST, B1, B2)
            stage, phase = (done - 1) % STAGES, (done - 1) // STAGES & 1
            mbarrier.wait(v_full.index(stage), phase)
            o1, o2 = _add(p, v1.index(stage).reshape([N, 64]), v2.index(stage).reshape([N, REST]), o1, o2, P1, P2)
            o1, o2, p = _drain(o1, o2, p)
            mbarrier.arrive(v_empty.index(stage))

            total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, O1))
            if gl.max(gl.where(total < MOST, 0, 1), 0) > 0:  # also if it is NaN
                o1, o2, total = _again(
                    q1, q2, t1, t2, k + start * k_stride, v + start * v_stride, k_stride, v_stride, length, head * D,
                    by, D, REST, B1, B2, O1, O2, P1, P2,
                )  # fmt: skip
            inverse = 1.0 / total
            o1 = gl.convert_layout((o1 * inverse[:, None]).to(dtype), B1)
            patch = line + WG * 64 + m1
            at = out + (start + patch)[:, None] * (heads * D) + head * D
            gl.store(at + d1[None, :], o1, mask=(patch < length)[:, None])
            inverse = gl.convert_layout(inverse, gl.SliceLayout(1, O2))
            o2 = gl.convert_layout((o2 * inverse[:, None]).to(dtype), B2)
            patch = line + WG * 64 + m2
            at = out + (start + patch)[:, None] * (heads * D) + head * D
            gl.store(at + d2[None, :], o2, mask=(patch < length)[:, None] & (d2 < D)[None, :])


CHANGING = ["works", "length", "heads"]


@gluon.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=CHANGING)
def _attend(
    q, k, v, k_first, k_rest, v_first, v_rest, out, works, length, heads, q_stride, k_stride, v_stride, by,
    D: gl.constexpr, REST: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute the outputs of ``works`` tiles.  ``by`` is the factor from scores to powers of two."""
    dtype: gl.constexpr = q.dtype.element_ty
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    narrow: gl.constexpr = gl.NVMMASharedLayout(2 * REST, 16, 2)
    copied_wide: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
    copied_narrow: gl.constexpr = gl.NVMMASharedLayout(2 * REST, 16, 3)
    q1 = gl.allocate_shared_memory(dtype, [2, 64, 64], wide)
    q2 = gl.allocate_shared_memory(dtype, [2, 64, REST], narrow)
    t1 = gl.allocate_shared_memory(dtype, [2, 64, 64], wide)
    t2 = gl.allocate_shared_memory(dtype, [2, 64, REST], narrow)
    k1 = gl.allocate_shared_memory(dtype, [STAGES, 1, N, 64], copied_wide)
    k2 = gl.allocate_shared_memory(dtype, [STAGES, 1, N, REST], copied_narrow)
    v1 = gl.allocate_shared_memory(dtype, [STAGES, 1, N, 64], copied_wide)
    v2 = gl.allocate_shared_memory(dtype, [STAGES, 1, N, REST], copied_narrow)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    order = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), 1)
        mbarrier.init(k_empty.index(i), 2)
        mbarrier.init(v_full.index(i), 1)
        mbarrier.init(v_empty.index(i), 2)
    mbarrier.init(order.index(0), 1)
    mbarrier.init(order.index(1), 1)
    fence_async_shared()
    stored = (k1, k2, v1, v2)
    barriers = (k_full, k_empty, v_full, v_empty, order)
    gl.warp_specialize(
        [
            (_consume, (
                q, k, v, out, q_stride, k_stride, v_stride, q1.index(0), q2.index(0), t1.index(0), t2.index(0),
                stored, barriers, works, length, heads, by, 0, D, REST, N, STAGES)),
            (_consume, (
                q, k, v, out, q_stride, k_stride, v_stride, q1.index(1), q2.index(1), t1.index(1), t2.index(1),
                stored, barriers, works, length, heads, by, 1, D, REST, N, STAGES)),
            (_produce, (
                k_first, k_rest, v_first, v_rest, stored, barriers, works, length, heads, D, REST, N, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@lru_cache(maxsize=4)
def _layout(width: int) -> gl.NVMMASharedLayout:
    """Return the shared layout of tiles of ``width`` elements.  It is kept, because it takes longer to build than a
    descriptor."""
    return gl.NVMMASharedLayout(2 * width, 16, 3)


def _boxes(x: Tensor, length: int, rest: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Return descriptors of keys or values [T, H, D] as [sequences, length, H * D]: boxes of ``KEYS`` patches by 64 and
    by ``rest`` elements."""
    tokens, heads, dim = x.shape
    step = x.stride(0)
    shape = [tokens // length, length, heads * dim]
    strides = [length * step, step, 1]
    first = TensorDescriptor(x, shape, strides, [1, KEYS, 64], _layout(64))
    return first, TensorDescriptor(x, shape, strides, [1, KEYS, rest], _layout(rest))


def attend(q: Tensor, k: Tensor, v: Tensor, length: int) -> Tensor:
    """Return the outputs [T, H, D] of attention within sequences of ``length`` patches.

    q, k and v are bfloat16 [T, H, D], with D in ``SIZES``; the heads of a patch are contiguous, patches may be apart.
    """
    tokens, heads, dim = q.shape
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    rest = max(power(dim - 64), 16)
    works = tokens // length * heads * cdiv(length, 128)
    by = dim**-0.5 * math.log2(math.e)
    boxes = (*_boxes(k, length, rest), *_boxes(v, length, rest))
    strides = (q.stride(0), k.stride(0), v.stride(0))
    programs = min(works, multiprocessors(q.device))
    constants = {"D": dim, "REST": rest, "N": KEYS, "STAGES": STAGES}
    _attend[(programs,)](q, k, v, *boxes, out, works, length, heads, *strides, by, **constants, num_warps=4)
    return out


def distance(dim: int, device: torch.device) -> float:
    """Return the largest distance of an output for heads of ``dim`` elements from that of products in float32, relative
    to its norm.

    The kernel is written in Gluon, which has no interpreter, so an encoder compares it once before it is used.  The
    last scores are so large that tiles are computed again.  The call waits for the device, and compiles the kernel on
    the first start."""
    draw = torch.Generator(device).manual_seed(0)
    length = 2 * KEYS + 40
    qkv = torch.randn(2 * length, 3, 2, dim, generator=draw, device=device).to(torch.bfloat16)
    qkv[-20:, 1] *= 60.0
    q, k, v = qkv.unbind(1)
    found = attend(q, k, v, length).float()
    q, k, v = (one.float().view(2, length, 2, dim).transpose(1, 2) for one in (q, k, v))
    scores = q @ k.mT * dim**-0.5
    right = scores.softmax(-1) @ v
    right = right.transpose(1, 2).reshape(found.shape)
    far = (found - right).norm(dim=2) / right.norm(dim=2)
    return float(far.max())
