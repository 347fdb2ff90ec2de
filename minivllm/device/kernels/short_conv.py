"""The gated short convolution of the tokens of each row.

    conv   grid (T, parts of the channels)   inputs b * x, convolution over the step and the ring, times c
    keep   grid (R, parts of the channels)   after ``conv``, the newest inputs are stored in the ring

Reference: ``device.layers.short_conv.convolve``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton.language as tl
from torch import Tensor

from .delta_rule import keep
from .launch import cdiv, kernel, pdl, power, wait

if TYPE_CHECKING:
    from minivllm.core.interfaces.states import StepStates

CHANNELS = 1024  # of a program


@kernel("mixed", "ring", "rows", "start", "behind", "cu_q", "u", "out", "stride", "count", "steps")
def _conv(
    mixed, weight, bias, ring, rows, start, behind, cu_q, u, out, stride, count, steps,
    C: tl.constexpr, W: tl.constexpr, RING: tl.constexpr, BC: tl.constexpr, BIAS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    token, c = tl.program_id(0), tl.program_id(1) * BC + tl.arange(0, BC)
    on = c < C
    dtype = out.dtype.element_ty
    # find the row of the token: the last row that begins at or before it, which skips rows without tokens
    low, high = 0, count
    for _ in range(steps):
        middle = (low + high) // 2
        before = (tl.load(cu_q + middle + 1, mask=middle < count, other=0) <= token) & (middle < high)
        low, high = tl.where(before, middle + 1, low), tl.where(before, high, middle)
    there = low < count
    row = tl.minimum(low, count - 1)
    at = tl.load(rows + row)
    offset = token - tl.load(cu_q + row)
    position = tl.load(start + row) + offset
    usable = tl.load(behind + row) >= 0
    total = tl.zeros((BC,), tl.float32)
    for lag in tl.static_range(W):
        inside = there & (offset >= lag)
        source = mixed + (token - lag).to(tl.int64) * stride + c
        b = tl.load(source, mask=on & inside, other=0.0).to(tl.float32)
        x = tl.load(source + 2 * C, mask=on & inside, other=0.0).to(tl.float32)
        new = (b * x).to(dtype)
        if lag == 0:
            tl.store(u + token.to(tl.int64) * C + c, new, mask=on)
        place = at * RING + (position - lag + RING) % RING
        earlier = on & there & (offset < lag) & (position >= lag)
        old = tl.load(ring + place * C + c, mask=earlier, other=0.0)
        inputs = tl.where(inside, new, old).to(tl.float32)
        total += inputs * tl.load(weight + c * W + W - 1 - lag, mask=on, other=0.0).to(tl.float32)
    if BIAS:
        total += tl.load(bias + c, mask=on, other=0.0).to(tl.float32)
    total = tl.where(usable, total, float("nan"))
    gate = tl.load(mixed + token.to(tl.int64) * stride + C + c, mask=on & there, other=0.0).to(tl.float32)
    y = gate * total.to(dtype).to(tl.float32)
    tl.store(out + token.to(tl.int64) * C + c, tl.where(there, y, 0.0).to(dtype), mask=on)


def convolve(mixed: Tensor, weight: Tensor, bias: Tensor | None, ring: Tensor, step: StepStates) -> Tensor:
    """Return ``c * conv(b * x)`` [T, channels], as ``device.layers.short_conv.convolve``."""
    tokens = len(mixed)
    rows = len(step.rows)
    channels, width = weight.shape
    out = torch.empty(tokens, channels, dtype=mixed.dtype, device=mixed.device)
    if not tokens:
        return out
    u = torch.empty_like(out)
    columns = min(CHANNELS, power(channels))
    grid = (tokens, cdiv(channels, columns))
    of_rows = (step.rows, step.start, step.behind, step.cu_q)
    given = weight if bias is None else bias
    # ``rows.bit_length()`` is the number of steps of the kernel's binary search for the row of a token
    numbers = (mixed.stride(0), rows, rows.bit_length())
    constants = pdl(mixed)
    constants["C"] = channels
    constants["W"] = width
    constants["RING"] = ring.shape[1]
    constants["BC"] = columns
    constants["BIAS"] = bias is not None
    constants["num_warps"] = 4
    _conv[grid](mixed, weight, given, ring, *of_rows, u, out, *numbers, **constants)
    keep(u, ring, step, width - 1)
    return out
