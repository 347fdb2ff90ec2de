"""Weight-only int4, made while loading, with W[o, i] = scale[o, g] * (q[o, i] - zero[o, g]), q in 0..15, g = i //
group.

It takes a quarter of a bf16 model's weights, and 1 bit more per element for the scales of groups of 32.  Activations
are not quantized.  Without zero points the grid reaches from -8 to 7 steps.  A scale may be negative, so that the side
with 8 steps has the largest element (the idea is from GGUF's Q4_0).

With ``clip`` a group gets the scale of the least squared error among 20.  Most of these clip the largest elements, and
so have smaller steps for all others (OMSE, arXiv:1902.06822; ACIQ, arXiv:1810.05723).  It is not the default.  The
error of the weights falls by 5 to 8 %, but pocket's perplexity rises (docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from minivllm.core.interfaces.quantizer import ModuleInfo, StoredWeight, WeightScheme
from minivllm.errors import OptionError

from .fast import GROUPS, joined, kernels_of, served_by
from .online import OnlineQuantizer
from .options import Int4Options
from .tiled import MadeByTiles, Tiled

BLOCK = 32  # inputs that are stored in 16 bytes
CENTRE = 8  # the code in the middle of the grid, which is the zero point if none is stored
CANDIDATES = 20  # number of tried scales, besides the scales that clip no element
# smallest part of its range to which a group may be clipped; normally distributed weights are never best below
SHORTEST = 0.7
FLAT = 2.0**-20  # smallest step, relative to a group's largest element, for groups of equal elements


def pack(q: Tensor) -> Tensor:
    """Pack codes u8 [n, in] to [n, in / 2].

    Byte j of a block of 16 has input j of 32 in its low half and input 16 + j in its high half.
    """
    halves = q.view(len(q), -1, 2, BLOCK // 2)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).view(len(q), -1)


def dequantize(weight: Tensor, scale: Tensor, zero: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the numbers [n, in] of a weight u8 [n, in / 2], computed in float32 and rounded to ``dtype``.

    ``scale`` and ``zero`` are f32 [n, in / group]. ``zero`` None means 8 for all groups.
    """
    rows, halves = len(weight), weight.view(len(weight), -1, 1, BLOCK // 2)
    q = torch.cat((halves & 15, halves >> 4), dim=2).view(*scale.shape, -1)
    steps = q.view(torch.int8).sub_(CENTRE).float() if zero is None else q.float().sub_(zero[..., None])
    return steps.mul_(scale[..., None]).to(dtype).view(rows, -1)


def fit(w: Tensor, symmetric: bool, clip: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize groups w f32 [group, n], and return codes u8 [group, n], scale f32 [n] and zero f32 [n].

    A group with an element that is not finite gets a scale that is not finite.
    """
    size = w.abs().amax(0)
    w = w / torch.where(size > 0, size, 1)  # the squares of very small numbers would be 0
    middle, half = torch.zeros_like(size), 0.0
    if not symmetric:  # the grid has as many points above the middle of a group as below
        middle, half = (w.amax(0) + w.amin(0)) / 2, 0.5
        w -= middle
    least, scale = torch.full_like(size, torch.inf), torch.full_like(size, torch.nan)
    # allocated once, because an allocation takes longer than the computation on a CPU
    steps, codes = torch.empty_like(w), torch.empty_like(w)
    moved = torch.empty_like(w) if half else steps
    for whole, factors in _ranges(w, symmetric, clip):
        torch.div(w, whole, out=steps)
        for factor in factors:
            given = torch.sub(steps, half * factor, out=moved) if half else steps
            _codes(given, 1 / factor, codes)
            error = torch.sub(given, codes, alpha=factor, out=codes).square_().sum(0).mul_(whole.square())
            better = error < least
            least = torch.where(better, error, least)
            scale = torch.where(better, whole * factor, scale)
    q = _codes(w.sub_(half * scale), 1 / scale, codes).add_(CENTRE).to(torch.uint8)
    return q, scale * size, CENTRE - half - middle / scale


def _codes(w: Tensor, times: Tensor | float, out: Tensor) -> Tensor:
    """Round w * times to the steps -8 to 7."""
    return torch.mul(w, times, out=out).round_().clamp_(-CENTRE, CENTRE - 1)


def _ranges(w: Tensor, symmetric: bool, clip: bool) -> Iterator[tuple[Tensor, list[float]]]:
    """Yield the step f32 [n] of each group of w f32 [group, n], and the factors by which the step is shortened.

    The step is the smallest for which the 16 points of the grid cover all elements of the group.  ``symmetric`` yields
    two steps, the second one negative, since the grid from -8 to 7 has one point more below 0 than above.  Without
    ``clip`` the only factor is 1.
    """
    low, high = w.amin(0), w.amax(0)
    wholes = [(high - low) / 15]
    if symmetric:
        wholes = [torch.maximum(high / 7, low / -8), torch.maximum(high / 8, low / -7)]
    tries = CANDIDATES // len(wholes)
    factors = [1 - i * (1 - SHORTEST) / (tries - 1) for i in range(tries if clip else 1)]
    for sign, whole in zip((1, -1), wholes, strict=False):
        yield sign * whole.clamp(min=FLAT), factors


class Int4Rows(Tiled):
    """``weight`` uint8 [out, in / 2] (see ``pack``) with ``scale`` float32 [out, in / group].

    If there are zero points, ``zero`` has the shape of ``scale``.
    """

    def __init__(self, info: ModuleInfo, weight: Tensor, scale: Tensor, zero: Tensor | None, group: int) -> None:
        super().__init__(info, weight=weight, scale=scale, zero=zero)
        self.weight, self.scale, self.zero, self.group = weight, scale, zero, group

    def finish(self) -> None:
        self.kernels = kernels_of(self.weight, self.scale, self.zero, self.group)
        self.native = self.native_product(StoredWeight(self.weight, self.scale, self.zero, self.group))

    def stored(self) -> StoredWeight:
        return StoredWeight(self.weight, self.scale, self.zero, self.group)

    def joined(self, bias: Tensor | None, mode: int, activation: str) -> Any:
        return joined(self.kernels, bias, mode, activation)

    def served(self, device: str, sm: int) -> Mapping[str, str]:
        return served_by(self.weight.dtype, device, sm, native=self.native is not None)

    def numbers(self, rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
        zero = None if self.zero is None else self.zero[rows]
        return dequantize(self.weight[rows], self.scale[rows], zero, dtype)


class Int4Weight(MadeByTiles, Int4Rows):
    def __init__(self, info: ModuleInfo, group: int = 32, symmetric: bool = True, clip: bool = False) -> None:
        out, groups = info.out_features, info.in_features // group
        weight = torch.empty(out, info.in_features // 2, dtype=torch.uint8, device=info.device)
        scale = torch.empty(out, groups, dtype=torch.float32, device=info.device)
        super().__init__(info, weight, scale, None if symmetric else torch.empty_like(scale), group)
        self.clip = clip

    def quantize(self, w: Tensor, rows: slice) -> None:
        groups = w.to(self.weight.device).float().reshape(-1, self.group).t().contiguous()
        q, scale, zero = fit(groups, self.zero is None, self.clip)
        self.weight[rows] = pack(q.t().reshape(len(w), -1))
        self.scale[rows] = scale.view(len(w), -1)
        if self.zero is not None:
            self.zero[rows] = zero.view(len(w), -1)

    def stored(self) -> StoredWeight:
        return super().stored()  # only this class itself, because a subclass may multiply in another way

    def joined(self, bias: Tensor | None, mode: int, activation: str) -> Any:
        return super().joined(bias, mode, activation)


class Int4(OnlineQuantizer):
    name, options_type = "int4", Int4Options
    options: Int4Options

    def made(self, m: ModuleInfo) -> WeightScheme:
        group = self.options.group_size
        if m.in_features % group:
            raise does_not_divide("int4", m, group, GROUPS)
        return Int4Weight(m, group, self.options.symmetric, self.options.clip)


def does_not_divide(quantizer: str, m: ModuleInfo, group: int, groups: Sequence[int]) -> OptionError:
    """Return the error for ``group`` inputs per scale, which do not divide a module's inputs; ``groups`` are
    possible values.
    """
    fits = " or ".join(str(n) for n in groups if m.in_features % n == 0)
    instead = f"group_size={fits}" if fits else f"a multiple of {BLOCK}"
    return OptionError(
        f"{quantizer}: {m.name} has {m.in_features} inputs here, which group_size={group} does not divide: expected "
        f"{instead}, or leave it out with skip=[{m.name!r}]"
    )
