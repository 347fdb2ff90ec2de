"""Round weights to a grid: w = (code - zero) * scale, with a scale and a zero point for each group of inputs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .options import QuantizeOptions

CUTS = 20  # widths of a group's range that are tried
SHORTEST = 0.5  # the smallest width, as a share of the whole range


class Coded(NamedTuple):
    """A quantized weight [n, k]: w[i, j] = (codes[i, j] - zero[i, g]) * scale[i, g] with g = group_of[j]."""

    codes: Tensor  # u8 [n, k]
    scale: Tensor  # f32 [n, groups], rounded to the dtype of the checkpoint's scales
    zero: Tensor  # u8 [n, groups]
    group_of: Tensor  # i64 [k]

    def weight(self) -> Tensor:
        """Return the dequantized weight, f32 [n, k]."""
        steps = self.codes.float() - self.zero.float()[:, self.group_of]
        return steps.mul_(self.scale[:, self.group_of])


class Grid:
    """Choose scales, zero points and codes for the bits, group size and format of ``options``.

    ``stored`` is the dtype of the checkpoint's scales.  Scales are rounded to it before codes are computed.
    """

    def __init__(self, options: QuantizeOptions, stored: torch.dtype) -> None:
        self.symmetric = options.symmetric
        self.stored = stored
        self.top = (1 << options.bits) - 1
        self.centre = 1 << (options.bits - 1)
        self.least_zero = 1 if options.format == "gptq" else 0  # AutoGPTQ's v1 stores zero - 1, unsigned
        self.group = options.group

    def size(self, inputs: int) -> int:
        """Return the inputs of a group, for a weight with ``inputs`` inputs."""
        return inputs if self.group == -1 else self.group

    def whole(self, w: Tensor, width: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return the scales and zero points f32 [...] that cover the range of groups w [..., size].

        ``width`` is the covered share of the range; values outside it are clipped.
        """
        if self.symmetric:
            scale = self._rounded(w.abs().amax(-1) * (2 * width / self.top))
            return scale, torch.full_like(scale, self.centre)
        low = w.amin(-1).clamp(max=0) * width
        high = w.amax(-1).clamp(min=0) * width
        scale = self._rounded((high - low) / self.top)
        zero = (-low / scale).round_()
        return scale, zero.clamp_(self.least_zero, self.top)

    def _rounded(self, scale: Tensor) -> Tensor:
        """Return scales rounded to the stored dtype, with 1 for a group of zeros."""
        scale = torch.where(scale > 0, scale, 1.0)
        return scale.clamp(min=torch.finfo(self.stored).tiny).to(self.stored).float()

    def codes(self, w: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """Return the nearest codes as float32; ``scale`` and ``zero`` have as many axes as w."""
        return torch.div(w, scale).round_().add_(zero).clamp_(0, self.top)

    def fitted(self, w: Tensor, moments: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the scales and zero points f32 [n, groups] of groups w f32 [n, groups, size] with the least error.

        Ranges of ``CUTS`` widths are tried for each group.  ``moments`` weigh the errors: the second moments of the
        inputs [groups, size, size], or their diagonals [groups, size].  None weighs all inputs equally.
        """
        best = torch.full(w.shape[:2], torch.inf, device=w.device)
        scale, zero = self.whole(w)
        for cut in range(CUTS):
            s, z = self.whole(w, 1 - cut * (1 - SHORTEST) / CUTS)
            steps = self.codes(w, s[..., None], z[..., None]) - z[..., None]
            error = steps.mul_(s[..., None]).sub_(w)
            if moments is None:
                loss = error.square().sum(-1)
            elif moments.dim() == 2:
                loss = (error.square() * moments).sum(-1)
            else:
                loss = torch.einsum("ngi,gij,ngj->ng", error, moments, error)
            better = loss < best
            best = torch.where(better, loss, best)
            scale = torch.where(better, s, scale)
            zero = torch.where(better, z, zero)
        return scale, zero

    def coded(self, w: Tensor, moments: Tensor | None = None, cut: bool = False) -> Coded:
        """Round w f32 [n, k] to codes, without compensation between groups.

        ``cut`` chooses each group's range by its error, weighed by the inputs' second moments ``moments`` [k, k];
        otherwise a range covers the whole group.
        """
        inputs = w.shape[1]
        size = self.size(inputs)
        groups = w.view(len(w), -1, size)
        if cut:
            blocks = None if moments is None else diagonal_blocks(moments, size)
            scale, zero = self.fitted(groups, blocks)
        else:
            scale, zero = self.whole(groups)
        codes = self.codes(groups, scale[..., None], zero[..., None]).to(torch.uint8)
        group_of = torch.arange(inputs, device=w.device) // size
        return Coded(codes.view(len(w), -1), scale, zero.to(torch.uint8), group_of)


def diagonal_blocks(moments: Tensor, size: int) -> Tensor:
    """Return the blocks [k / size, size, size] along the diagonal of a matrix [k, k]."""
    n = len(moments) // size
    blocks = moments.view(n, size, n, size).diagonal(dim1=0, dim2=2)
    return blocks.permute(2, 0, 1).contiguous()
