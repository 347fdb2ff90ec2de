"""Numbers to the points of a grid: w = (code - zero) * scale, a scale and a zero point for each group of inputs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .options import QuantizeOptions

CUTS = 20  # widths that are tried
SHORTEST = 0.5  # of a group's whole width


class Coded(NamedTuple):
    """A weight [n, k], w[i, j] = (codes[i, j] - zero[i, g]) * scale[i, g] with g = group_of[j]."""

    codes: Tensor  # u8 [n, k]
    scale: Tensor  # f32 [n, groups], with the digits of the dtype that it is stored in
    zero: Tensor  # u8 [n, groups]
    group_of: Tensor  # i64 [k]

    def weight(self) -> Tensor:
        """float32 [n, k]."""
        steps = self.codes.float() - self.zero.float()[:, self.group_of]
        return steps.mul_(self.scale[:, self.group_of])


class Grid:
    """What ``options`` say of codes.  ``stored``: the dtype of scales in the checkpoint, to which they are rounded
    before codes are chosen by them."""

    def __init__(self, options: QuantizeOptions, stored: torch.dtype) -> None:
        self.symmetric, self.stored = options.symmetric, stored
        self.top = (1 << options.bits) - 1
        self.centre = 1 << (options.bits - 1)
        self.least_zero = 1 if options.format == "gptq" else 0  # v1 has no field for 0
        self.group = options.group

    def size(self, inputs: int) -> int:
        return inputs if self.group == -1 else self.group

    def whole(self, w: Tensor, width: float = 1.0) -> tuple[Tensor, Tensor]:
        """(scale, zero) f32 [...] that hold groups w [..., size], or ``width`` of what they reach over."""
        if self.symmetric:
            scale = w.abs().amax(-1) * (2 * width / self.top)
            zero = torch.full_like(scale, self.centre)
            return self._rounded(scale), zero
        low, high = w.amin(-1).clamp(max=0) * width, w.amax(-1).clamp(min=0) * width
        scale = self._rounded((high - low) / self.top)
        return scale, (-low / scale).round_().clamp_(self.least_zero, self.top)

    def _rounded(self, scale: Tensor) -> Tensor:
        scale = torch.where(scale > 0, scale, 1.0)  # a group of zeros
        return scale.clamp(min=torch.finfo(self.stored).tiny).to(self.stored).float()

    def codes(self, w: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """The nearest codes, as float32; scale and zero of as many axes as w."""
        return torch.div(w, scale).round_().add_(zero).clamp_(0, self.top)

    def fitted(self, w: Tensor, moments: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(scale, zero) f32 [n, groups] of groups w f32 [n, groups, size], each of the width with the least error.
        ``moments`` [groups, size, size] are those of the inputs, by which errors count; [groups, size]: their diagonal;
        None: all count alike."""
        best = torch.full(w.shape[:2], torch.inf, device=w.device)
        scale, zero = self.whole(w)
        for cut in range(CUTS):
            s, z = self.whole(w, 1 - cut * (1 - SHORTEST) / CUTS)
            error = (self.codes(w, s[..., None], z[..., None]) - z[..., None]).mul_(s[..., None]).sub_(w)
            if moments is None:
                lost = error.square().sum(-1)
            elif moments.dim() == 2:
                lost = (error.square() * moments).sum(-1)
            else:
                lost = torch.einsum("ngi,gij,ngj->ng", error, moments, error)
            better = lost < best
            best = torch.where(better, lost, best)
            scale, zero = torch.where(better, s, scale), torch.where(better, z, zero)
        return scale, zero

    def coded(self, w: Tensor, moments: Tensor | None = None, cut: bool = False) -> Coded:
        """Groups of neighbouring inputs of w f32 [n, k], each rounded by itself.  ``cut``: of the widths by ``moments``
        [k, k], else they hold all."""
        size = self.size(w.shape[1])
        groups = w.view(len(w), -1, size)
        if cut:
            blocks = None if moments is None else diagonal_blocks(moments, size)
            scale, zero = self.fitted(groups, blocks)
        else:
            scale, zero = self.whole(groups)
        codes = self.codes(groups, scale[..., None], zero[..., None]).to(torch.uint8)
        group_of = torch.arange(w.shape[1], device=w.device) // size
        return Coded(codes.view(len(w), -1), scale, zero.to(torch.uint8), group_of)


def diagonal_blocks(moments: Tensor, size: int) -> Tensor:
    """[k, k] -> the [k / size, size, size] along the diagonal."""
    n = len(moments) // size
    return moments.view(n, size, n, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()
