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

BLOCK = 32  # number of inputs that are packed together, to 16 bytes
CENTRE = 8  # the code in the middle of the grid, which is the zero point if none is stored
CANDIDATES = 20  # number of clipped scales that are tried for a group, besides the scales that clip no element
# smallest share of its range to which a group is clipped; for normally distributed weights a smaller share is never
# best
SHORTEST = 0.7
# smallest step between codes, relative to a group's largest element; it is used for groups of equal elements
FLAT = 2.0**-20


def pack(q: Tensor) -> Tensor:
    """Pack codes u8 [n, in] to [n, in / 2].

    Byte j of a block of 16 has input j of 32 in its low half and input 16 + j in its high half.
    """
    rows = len(q)
    halves = q.view(rows, -1, 2, BLOCK // 2)
    low, high = halves.unbind(2)
    packed = low | high << 4
    return packed.view(rows, -1)


def unpack(weight: Tensor, groups: int) -> Tensor:
    """Return the codes u8 [n, groups, group] of a weight u8 [n, in / 2] that ``pack`` has packed."""
    rows = len(weight)
    halves = weight.view(rows, -1, 1, BLOCK // 2)
    codes = torch.cat((halves & 15, halves >> 4), dim=2)
    return codes.view(rows, groups, -1)


def dequantize(weight: Tensor, scale: Tensor, zero: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the numbers [n, in] of a weight u8 [n, in / 2], computed in float32 and rounded to ``dtype``.

    ``scale`` and ``zero`` are f32 [n, in / group]. ``zero`` None means 8 for all groups.
    """
    codes = unpack(weight, scale.shape[1])
    if zero is None:
        steps = codes.view(torch.int8).sub_(CENTRE).float()
    else:
        steps = codes.float()
        steps.sub_(zero[..., None])
    steps.mul_(scale[..., None])
    return steps.to(dtype).view(len(weight), -1)


def fit(w: Tensor, symmetric: bool, clip: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize groups w f32 [group, n], and return codes u8 [group, n], scale f32 [n] and zero f32 [n].

    A ``symmetric`` group has the middle code as its zero.  With ``clip``, scales that clip the largest elements are
    tried too, and the one with the least squared error is chosen.  A group with an element that is not finite gets a
    scale that is not finite.
    """
    size = w.abs().amax(0)
    w = w / torch.where(size > 0, size, 1)  # the squares of very small numbers would be 0
    middle = torch.zeros_like(size)
    half = 0.0
    if not symmetric:  # the middle of a group's values becomes the middle of the codes
        middle = (w.amax(0) + w.amin(0)) / 2
        half = 0.5
        w -= middle
    least = torch.full_like(size, torch.inf)
    scale = torch.full_like(size, torch.nan)
    # allocated once, because an allocation takes longer than the computation on a CPU
    steps = torch.empty_like(w)
    codes = torch.empty_like(w)
    moved = torch.empty_like(w) if half else steps
    for whole, factors in _ranges(w, symmetric, clip):
        torch.div(w, whole, out=steps)
        for factor in factors:
            given = torch.sub(steps, half * factor, out=moved) if half else steps
            _codes(given, 1 / factor, codes)
            torch.sub(given, codes, alpha=factor, out=codes)
            error = codes.square_().sum(0).mul_(whole.square())
            better = error < least
            least = torch.where(better, error, least)
            scale = torch.where(better, whole * factor, scale)
    w.sub_(half * scale)
    best = _codes(w, 1 / scale, codes)
    q = best.add_(CENTRE).to(torch.uint8)
    zero = CENTRE - half - middle / scale
    return q, scale * size, zero


def _codes(w: Tensor, times: Tensor | float, out: Tensor) -> Tensor:
    """Round w * times to the steps -8 to 7."""
    torch.mul(w, times, out=out)
    return out.round_().clamp_(-CENTRE, CENTRE - 1)


def _ranges(w: Tensor, symmetric: bool, clip: bool) -> Iterator[tuple[Tensor, list[float]]]:
    """Yield the step f32 [n] of each group of w f32 [group, n], and the factors by which the step is shortened.

    The step is the smallest for which the 16 points of the grid cover all elements of the group.  ``symmetric`` yields
    two steps, the second one negative, since the grid from -8 to 7 has one point more below 0 than above.  Without
    ``clip`` the only factor is 1.
    """
    low, high = w.amin(0), w.amax(0)
    if symmetric:
        wide_below = torch.maximum(high / 7, low / -8)
        wide_above = torch.maximum(high / 8, low / -7)
        wholes = [wide_below.clamp(min=FLAT), -wide_above.clamp(min=FLAT)]
    else:
        spread = (high - low) / 15
        wholes = [spread.clamp(min=FLAT)]
    factors = [1.0]
    if clip:
        tries = CANDIDATES // len(wholes)
        shortening = (1 - SHORTEST) / (tries - 1)
        factors = [1 - i * shortening for i in range(tries)]
    for whole in wholes:
        yield whole, factors


class Int4Rows(Tiled):
    """``weight`` uint8 [out, in / 2] (see ``pack``) with ``scale`` float32 [out, in / group].

    If there are zero points, ``zero`` has the shape of ``scale``.
    """

    def __init__(self, info: ModuleInfo, weight: Tensor, scale: Tensor, zero: Tensor | None, group: int) -> None:
        super().__init__(info, weight=weight, scale=scale, zero=zero)
        self.weight = weight
        self.scale = scale
        self.zero = zero
        self.group = group

    def finish(self) -> None:
        stored = StoredWeight(self.weight, self.scale, self.zero, self.group)
        self.kernels = kernels_of(self.weight, self.scale, self.zero, self.group)
        self.native = self.native_product(stored)

    def stored(self) -> StoredWeight:
        return StoredWeight(self.weight, self.scale, self.zero, self.group)

    def joined(self, bias: Tensor | None, mode: int, activation: str) -> Any:
        return joined(self.kernels, bias, mode, activation)

    def served(self, device: str, sm: int) -> Mapping[str, str]:
        native = self.native is not None
        return served_by(self.weight.dtype, device, sm, native=native)

    def numbers(self, rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
        weight, scale = self.weight[rows], self.scale[rows]
        zero = None if self.zero is None else self.zero[rows]
        return dequantize(weight, scale, zero, dtype)


class Int4Weight(MadeByTiles, Int4Rows):
    def __init__(self, info: ModuleInfo, group: int = 32, symmetric: bool = True, clip: bool = False) -> None:
        out, inp, device = info.out_features, info.in_features, info.device
        weight = torch.empty(out, inp // 2, dtype=torch.uint8, device=device)
        scale = torch.empty(out, inp // group, dtype=torch.float32, device=device)
        zero = None if symmetric else torch.empty_like(scale)
        super().__init__(info, weight, scale, zero, group)
        self.clip = clip

    def quantize(self, w: Tensor, rows: slice) -> None:
        count = len(w)
        wide = w.to(self.weight.device).float()
        by_group = wide.reshape(-1, self.group)
        groups = by_group.t().contiguous()
        symmetric = self.zero is None
        q, scale, zero = fit(groups, symmetric, self.clip)
        codes = q.t().reshape(count, -1)
        self.weight[rows] = pack(codes)
        self.scale[rows] = scale.view(count, -1)
        if self.zero is not None:
            self.zero[rows] = zero.view(count, -1)

    def stored(self) -> StoredWeight:
        # This override only marks that exactly this class supports the method, because a subclass may multiply in
        # another way.
        return super().stored()

    def joined(self, bias: Tensor | None, mode: int, activation: str) -> Any:
        return super().joined(bias, mode, activation)


class Int4(OnlineQuantizer):
    name = "int4"
    options_type = Int4Options
    options: Int4Options

    def made(self, m: ModuleInfo) -> WeightScheme:
        options = self.options
        group = options.group_size
        if m.in_features % group:
            raise does_not_divide("int4", m, group, GROUPS)
        return Int4Weight(m, group, options.symmetric, options.clip)


def does_not_divide(quantizer: str, m: ModuleInfo, group: int, groups: Sequence[int]) -> OptionError:
    """Return the error for ``group`` inputs per scale, which do not divide a module's inputs; ``groups`` are
    possible values.
    """
    inputs = m.in_features
    fits = " or ".join(str(n) for n in groups if inputs % n == 0)
    instead = f"group_size={fits}" if fits else f"a multiple of {BLOCK}"
    return OptionError(
        f"{quantizer}: {m.name} has {inputs} inputs here, which group_size={group} does not divide: expected "
        f"{instead}, or leave it out with skip=[{m.name!r}]"
    )
