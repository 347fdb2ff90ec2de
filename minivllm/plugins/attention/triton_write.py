"""QK-norm, rotary embedding and the KV write in one kernel: q, k and v of a step are read once and written once.

    grid (T, head groups); a program takes ``HB`` of the heads [q 0 .. H-1 | k 0 .. KH-1 | v 0 .. KH-1] of one token

    q head: RMSNorm, rotate ──► q_out          k head: RMSNorm, rotate ──► k cache          v head: ──► v cache

The null block is not written here, so that the results of padded and stopped rows, NaN included, are stored nowhere.

All arithmetic is float32.  Bytes: 2 * (heads + 2 kv_heads) * D * 2 a token.  Reference:
``device.layers.rotary.prepare_qk`` and ``KVFormat.store`` of the plain formats.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.core.interfaces.attention import AttnLayer, AttnMeta, QKPre
from minivllm.device.kernels.eight_bits import divided
from minivllm.device.kernels.launch import cdiv, kernel, pdl, power, release, settle

from .triton_decode import scales_of

TINY: tl.constexpr = tl.constexpr(1.1754943508222875e-38)  # the smallest normal float32 number
ROUND: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2 ** 23: adding this number rounds to a whole number


@triton.jit
def _scale(greatest, nothing, MOST: tl.constexpr):
    """Return the scale of heads with largest magnitudes ``greatest`` [HB]; ``nothing`` is 0, or NaN for NaN and
    infinity.
    """
    return tl.div_rn(greatest, tl.full(greatest.shape, MOST, tl.float32)) + nothing


@triton.jit
def _scaled(x, by, MOST: tl.constexpr):
    """Divide x [HB, n] by its scales, and clamp it to the range of the stored dtype.

    For int8 the result is rounded to whole numbers, ties to even.  Small numbers are first raised to normal numbers,
    which ``divided`` requires.
    """
    by = tl.maximum(by, TINY)
    lift = tl.where(by < 1e-18, 1.2089258196146292e24, 1.0)  # 2 ** 80
    by = by * lift
    inverse = tl.div_rn(tl.full(by.shape, 1.0, tl.float32), by)
    x = divided(x * lift[:, None], by[:, None], inverse[:, None])
    x = tl.minimum(tl.maximum(x, -MOST), MOST)
    if MOST < 128:
        x = (x + ROUND) - ROUND
    return x


@kernel("position", "slot_map")
def _write(
    q, k, v, q_out, k_cache, v_cache, k_scales, v_scales, q_norm, k_norm, cos, sin, position, slot_map,
    q_stride, k_stride, v_stride, slot_stride, eps,
    QH: tl.constexpr, KH: tl.constexpr, D: tl.constexpr, R: tl.constexpr, DV: tl.constexpr, H: tl.constexpr,
    DVP: tl.constexpr, HB: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, ROTARY: tl.constexpr,
    HAS_V: tl.constexpr, MOST: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rotate and store queries, keys and values of a token.

    The first R elements of a head are rotated in pairs (i, i + R / 2), and the others are copied.  Each lane handles
    two elements.  EARLY means that an earlier layer used the same positions and slots, which are then loaded before q,
    k and v are ready.
    """
    if not EARLY:
        settle(PDL)
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head = part * HB + tl.arange(0, HB)
    od = tl.arange(0, H)
    ia, ib = od, od + D // 2
    if R < D:
        ia = tl.where(od < R // 2, od, od + R // 2)
        ib = ia + tl.where(od < R // 2, R // 2, (D - R) // 2)
    slot = tl.load(slot_map + token * slot_stride)
    kept = slot >= BLOCK  # smaller slots belong to the null block
    if ROTARY:
        pos = tl.load(position + token)
        c = tl.load(cos + pos * R + od, mask=od < R // 2, other=1.0)[None, :]
        s = tl.load(sin + pos * R + od, mask=od < R // 2, other=0.0)[None, :]
    if NORM:
        wq_a, wq_b = tl.load(q_norm + ia, mask=od < D // 2), tl.load(q_norm + ib, mask=od < D // 2)
        wk_a, wk_b = tl.load(k_norm + ia, mask=od < D // 2), tl.load(k_norm + ib, mask=od < D // 2)
    if EARLY:
        settle(PDL)
    # the next kernel may start only now, so that its programs find all multiprocessors free (kernels.launch)
    release(PDL)
    if part * HB < QH + KH:
        is_q = head < QH
        is_k = (head >= QH) & (head < QH + KH)
        on = (od < D // 2)[None, :]
        at_q = q + token * q_stride + head[:, None] * D
        at_k = k + token * k_stride + (head - QH)[:, None] * D
        a = tl.load(at_q + ia[None, :], mask=is_q[:, None] & on, other=0.0).to(tl.float32)
        b = tl.load(at_q + ib[None, :], mask=is_q[:, None] & on, other=0.0).to(tl.float32)
        a += tl.load(at_k + ia[None, :], mask=is_k[:, None] & on, other=0.0).to(tl.float32)
        b += tl.load(at_k + ib[None, :], mask=is_k[:, None] & on, other=0.0).to(tl.float32)
        if NORM:
            inv = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
            a = a * inv * tl.where(is_q[:, None], wq_a[None, :], wk_a[None, :]).to(tl.float32)
            b = b * inv * tl.where(is_q[:, None], wq_b[None, :], wk_b[None, :]).to(tl.float32)
        if ROTARY:
            a, b = a * c - b * s, b * c + a * s
        to_q = q_out + (token * QH + head)[:, None] * D
        tl.store(to_q + ia[None, :], a.to(q_out.dtype.element_ty), mask=is_q[:, None] & on)
        tl.store(to_q + ib[None, :], b.to(q_out.dtype.element_ty), mask=is_q[:, None] & on)
        if part * HB + HB > QH:
            to_k = k_cache + (slot * KH + head - QH)[:, None] * D
            if MOST > 0:
                a, b = tl.where(on, a, 0.0), tl.where(on, b, 0.0)
                by = _scale(tl.maximum(tl.max(tl.abs(a), 1), tl.max(tl.abs(b), 1)), tl.sum(a * 0.0 + b * 0.0, 1), MOST)
                tl.store(k_scales + slot * KH + head - QH, by, mask=is_k & kept)
                a, b = _scaled(a, by, MOST), _scaled(b, by, MOST)
            tl.store(to_k + ia[None, :], a.to(k_cache.dtype.element_ty), mask=is_k[:, None] & on & kept)
            tl.store(to_k + ib[None, :], b.to(k_cache.dtype.element_ty), mask=is_k[:, None] & on & kept)
    if HAS_V and part * HB + HB > QH + KH:
        mine = head - QH - KH
        ov = tl.arange(0, DVP)
        on_v = ((mine >= 0) & (mine < KH))[:, None] & (ov < DV)[None, :]
        value = tl.load(v + token * v_stride + mine[:, None] * DV + ov[None, :], mask=on_v, other=0.0)
        to_v = v_cache + (slot * KH + mine)[:, None] * DV + ov[None, :]
        if MOST > 0:
            value = value.to(tl.float32)
            by = _scale(tl.max(tl.abs(value), 1), tl.sum(value * 0.0, 1), MOST)
            tl.store(v_scales + slot * KH + mine, by, mask=(mine >= 0) & (mine < KH) & kept)
            value = _scaled(value, by, MOST)
        tl.store(to_v, value.to(v_cache.dtype.element_ty), mask=on_v & kept)


def fits(q: Tensor, k: Tensor, v: Tensor, pre: QKPre | None) -> bool:
    """Return whether the kernel supports the inputs: heads and rotated parts of even size, and adjacent heads in a
    token.
    """
    dim = q.shape[2]
    if dim % 2 or any(x.stride(2) != 1 or x.stride(1) != x.shape[2] for x in (q, k, v)):
        return False
    if pre is None:
        return True
    if pre.cos is not None and (pre.cos.shape[1] % 2 or not pre.cos.is_contiguous()):
        return False
    return (pre.q_norm is None) == (pre.k_norm is None)


MANY = 512  # number of tokens above which programs are large and an early start gains no time
FIXED = MANY  # number of tokens that chooses the sizes if they must not depend on the step


def heads_each(tokens: int) -> tuple[int, int]:
    """Return the heads and the warps of a program.

    Small steps get many programs, while the device has room for them.
    """
    if tokens <= 16:
        return 1, 1
    if tokens <= MANY:
        return 8, 4
    return 16, 4


def write(
    layer: AttnLayer, q: Tensor, k: Tensor, v: Tensor, meta: AttnMeta, pre: QKPre | None, fixed: bool = False
) -> Tensor:
    """Write keys and values as ``AttentionBackend.write`` if ``fits``, and return new queries [T, heads, D].

    With ``fixed`` the order of the sums in a head does not depend on T.
    """
    tokens, heads, dim = q.shape
    kv_heads, dim_v = k.shape[1], v.shape[2]
    out = q.new_empty(tokens, heads, dim)
    if not tokens:
        return out
    has_v = "v" in layer.cache
    keys = layer.cache["k"]
    values = layer.cache["v"] if has_v else out
    most = 0.0
    if "k_scale" in layer.cache:
        most = 127.0 if keys.dtype == torch.int8 else torch.finfo(keys.dtype).max
    q_norm = k_norm = cos = sin = q  # the kernel does not read absent tensors
    norm = pre is not None and pre.q_norm is not None
    if norm:
        q_norm, k_norm = pre.q_norm, pre.k_norm
    rotary = pre is not None and pre.cos is not None
    rotated = dim
    if rotary:
        cos, sin = pre.cos, pre.sin
        rotated = cos.shape[1]
    each, warps = heads_each(FIXED if fixed else tokens)
    total = heads + kv_heads * (2 if has_v else 1)
    constants = pdl(q)
    constants["QH"] = heads
    constants["KH"] = kv_heads
    constants["D"] = dim
    constants["R"] = rotated
    constants["DV"] = dim_v
    constants["H"] = power(dim // 2)
    constants["DVP"] = power(dim_v)
    constants["HB"] = each
    constants["BLOCK"] = meta.block
    constants["NORM"] = norm
    constants["ROTARY"] = rotary
    constants["HAS_V"] = has_v
    constants["MOST"] = most
    constants["EARLY"] = tokens <= MANY and "settled" in meta.work
    constants["num_warps"] = warps
    tensors = (q, k, v, out, keys, values, *scales_of(layer), q_norm, k_norm, cos, sin)
    places = (meta.position, meta.slot_map[layer.group])
    strides = (q.stride(0), k.stride(0), v.stride(0), meta.slot_map.stride(1))
    eps = pre.eps if pre else 0.0
    _write[(tokens, cdiv(total, each))](*tensors, *places, *strides, eps, **constants)
    return out
