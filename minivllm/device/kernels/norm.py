"""Residual addition and norm in one kernel, which reads x and the residual once and writes sum and norm once.

x may be normalized before the addition, so that two norms with the addition between them are one kernel too.  LayerNorm
(``CENTERED``) subtracts the mean and may add a bias.

    grid (T,), one token per program      4 * dim * 2 bytes per token

The reference is ``device.layers.norm.rms_norm``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .eight_bits import TOP, codes_of, empty_rows, size_of, step_of
from .launch import pdl, power, wait


@triton.jit
def _add_norm(x, residual, first, weight, bias, y, scale, x_stride, first_eps, eps, DIM: tl.constexpr,
              P: tl.constexpr, ADD: tl.constexpr, FIRST: tl.constexpr, CENTERED: tl.constexpr, BIAS: tl.constexpr,
              TOP: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Add and normalize a row.

    TOP > 0 means that y gets 8-bit codes and ``scale`` [T] their factors (``eight_bits``).
    """
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, P)
    on = at < DIM
    value = tl.load(x + row * x_stride + at, mask=on, other=0.0)
    if FIRST:
        wide = value.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(wide * wide, 0) / DIM + first_eps)
        w = tl.load(first + at, mask=on, other=0.0).to(tl.float32)
        value = (wide * inverse * w).to(x.dtype.element_ty)
    if ADD:
        # rounded to the dtype of the residual stream before it is squared, because the next layer reads the rounded sum
        value = (tl.load(residual + row * DIM + at, mask=on, other=0.0) + value).to(x.dtype.element_ty)
        tl.store(residual + row * DIM + at, value, mask=on)
    wide = value.to(tl.float32)
    if CENTERED:
        wide = tl.where(on, wide - tl.sum(wide, 0) / DIM, 0.0)
    inverse = tl.rsqrt(tl.sum(wide * wide, 0) / DIM + eps)
    w = tl.load(weight + at, mask=on, other=0.0).to(tl.float32)
    normed = wide * inverse * w
    if BIAS:
        normed += tl.load(bias + at, mask=on, other=0.0).to(tl.float32)
    if TOP > 0:
        normed = normed.to(x.dtype.element_ty).to(tl.float32)  # rounded here, because the separate norm rounds here too
        step, inverse = step_of(tl.max(size_of(tl.where(on, normed, 0.0)), 0), TOP)
        tl.store(scale + row, step)
        normed = codes_of(normed, step, inverse, TOP, WHOLE)
    tl.store(y + row * DIM + at, normed.to(y.dtype.element_ty), mask=on)


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    first: Tensor | None = None,
    first_eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Add x [T, dim] to ``residual`` in place, normalize the sum, and return the result and the residual.

    Without a residual, x is the residual.  ``first`` [dim] is the weight of a norm that is applied to x before the
    addition.  Tokens of x may be apart, as in a slice; the residual is contiguous.
    """
    return _launch(x, residual, weight, eps, first, first_eps)


def add_rms_norm_rounded(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``add_rms_norm`` and round y to an 8-bit dtype, as ``scaled.rows``.

    Return codes [T, dim], scale f32 [T, 1] and the residual.
    """
    codes, scale = empty_rows(*x.shape, dtype, x.device)
    _, residual = _launch(x, residual, weight, eps, y=codes, scale=scale)
    return codes, scale, residual


def add_layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute ``add_rms_norm`` with LayerNorm; ``bias`` [dim] is added to the result if it is not None."""
    return _launch(x, residual, weight, eps, bias=bias, centered=True)


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    first: Tensor | None = None,
    first_eps: float = 0.0,
    bias: Tensor | None = None,
    centered: bool = False,
    y: Tensor | None = None,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    tokens, dim = x.shape
    if y is None:
        y = torch.empty((tokens, dim), dtype=x.dtype, device=x.device)
    stream = x if residual is None else residual
    if not tokens:
        return y, stream
    constants = pdl(x)
    constants["DIM"] = dim
    constants["P"] = power(dim)
    constants["ADD"] = residual is not None
    constants["FIRST"] = first is not None
    constants["CENTERED"] = centered
    constants["BIAS"] = bias is not None
    constants["TOP"] = TOP.get(y.dtype, 0.0)
    constants["WHOLE"] = y.dtype == torch.int8
    constants["num_warps"] = 4 if dim <= 2048 else 16
    # A fused multiply-add would give other bits than the separate norm, which steps with taps use. With 16 bits the
    # product is rounded first, so it cannot be fused.
    constants["enable_fp_fusion"] = x.dtype != torch.float32
    # the kernel does not read absent tensors
    if first is None:
        first = weight
    if bias is None:
        bias = weight
    if scale is None:
        scale = y
    stride = x.stride(0)
    arguments = (x, stream, first, weight, bias, y, scale, stride, first_eps, eps)
    _add_norm[(tokens,)](*arguments, **constants)
    return y, stream
