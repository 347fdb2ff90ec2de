"""RMSNorm (arXiv:1910.07467) and LayerNorm (arXiv:1607.06450), with the residual addition that precedes them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.core.interfaces.decoder import Norm

from .module import Module, Wanted, check_shape, fill


class RMSNorm(Module):
    """RMSNorm with the residual addition before it: ``norm(x, residual) -> (y, sum)``, all [T, dim].

    sum = residual + x is the new residual stream, and y is the norm of the sum.  If ``residual`` is None the sum is x.
    The fused kernel adds in place, so the caller may not use the old ``residual`` again.  The statistics are float32.
    If ``kind.offset`` is added to the weight, the weight is float32, because a lower precision would lose its small
    differences from the offset.
    """

    def __init__(self, name: str, dim: int, kind: Norm, dtype: torch.dtype, device: str, fuse: bool = False) -> None:
        super().__init__(name)
        self.eps = kind.eps
        self.offset = kind.offset
        self.fused = None
        if fuse:
            from minivllm.device.kernels.norm import add_rms_norm

            self.fused = add_rms_norm
        kept = torch.float32 if kind.offset else dtype
        self.weight = torch.empty(dim, dtype=kept, device=device)
        self.tensors["weight"] = self.weight

    def load(self, part: str, param: str, tensor: Tensor) -> None:
        fill(self.weight, tensor)
        if self.offset:
            self.weight.add_(self.offset)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self.fused is not None:
            return self.fused(x, residual, self.weight, self.eps)
        residual = x if residual is None else x + residual
        y = rms_norm(residual, self.weight, self.eps)
        return y, residual

    def rounded(self, x: Tensor, residual: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Do the same as a call, but quantize the normed rows y to the 8-bit ``dtype``; the norm must be ``fused``.

        Return (codes [T, dim], scale f32 [T, 1], new residual), where y = codes * scale."""
        from minivllm.device.kernels.norm import add_rms_norm_rounded

        return add_rms_norm_rounded(x, residual, self.weight, self.eps, dtype)


class SplitNorm(Module):
    """RMSNorm over all ``dim`` elements of a projection's heads, which are split over the processes.

    A call takes and returns this process's share, x [T, dim * copies / processes].  The mean square is over all heads,
    which needs a sum over the processes.  ``copies`` is the number of neighbouring processes with the same share.
    """

    def __init__(
        self, name: str, dim: int, kind: Norm, dtype: torch.dtype, device: str, group: Any, copies: int
    ) -> None:
        super().__init__(name)
        self.dim = dim
        self.eps = kind.eps
        self.offset = kind.offset
        self.group = group
        self.copies = copies
        self.shares = group.size // copies
        kept = torch.float32 if kind.offset else dtype
        self.weight = torch.empty(dim // self.shares, dtype=kept, device=device)
        self.tensors["weight"] = self.weight

    def wanted(self) -> Wanted:
        return {("", "weight"): (self.dim,)}

    def load(self, part: str, param: str, tensor: Tensor) -> None:
        check_shape(tensor, (self.dim,))
        share = self.group.rank // self.copies
        mine = tensor.chunk(self.shares)[share]
        fill(self.weight, mine)
        if self.offset:
            self.weight.add_(self.offset)

    def __call__(self, x: Tensor) -> tuple[Tensor, None]:
        wide = x.float()
        squares = wide.square().sum(dim=-1, keepdim=True)
        self.group.all_reduce(squares)
        mean = squares.div_(self.dim * self.copies)
        scale = mean.add_(self.eps).rsqrt_()
        y = wide * scale * self.weight.float()
        return y.to(x.dtype), None


class LayerNorm(Module):
    """LayerNorm with the residual addition before it, called as ``RMSNorm``; it has a bias if ``kind.bias``.

    With ``kind.offset``, which is added to the weight, weight and bias are float32, as in ``RMSNorm``.
    """

    def __init__(self, name: str, dim: int, kind: Norm, dtype: torch.dtype, device: str, fuse: bool = False) -> None:
        super().__init__(name)
        self.eps = kind.eps
        self.fused = None
        if fuse:
            from minivllm.device.kernels.norm import add_layer_norm

            self.fused = add_layer_norm
        self.offset = kind.offset
        kept = torch.float32 if kind.offset else dtype
        self.weight = torch.empty(dim, dtype=kept, device=device)
        self.tensors["weight"] = self.weight
        self.bias: Tensor | None = None
        if kind.bias:
            self.bias = torch.empty(dim, dtype=kept, device=device)
            self.tensors["bias"] = self.bias

    def load(self, part: str, param: str, tensor: Tensor) -> None:
        super().load(part, param, tensor)
        if self.offset and param == "weight":
            self.weight.add_(self.offset)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self.fused is not None:
            return self.fused(x, residual, self.weight, self.bias, self.eps)
        residual = x if residual is None else x + residual
        y = F.layer_norm(residual.to(self.weight.dtype), self.weight.shape, self.weight, self.bias, self.eps)
        return y.to(residual.dtype), residual


class HeadsNorm(Module):
    """A norm that normalises each head separately and has weights for each head: RMSNorm, or LayerNorm if centered.

    This process has the heads with indices ``here`` of ``heads``; a call takes and returns x [T, len(here) * dim].  The
    statistics are float32.  In a checkpoint the part of a head is its index as a text.
    """

    def __init__(
        self, name: str, heads: int, here: range, dim: int, kind: Norm, dtype: torch.dtype, device: str
    ) -> None:
        super().__init__(name)
        self.heads = heads
        self.here = here
        self.dim = dim
        self.kind = kind
        kept = torch.float32 if kind.offset else dtype
        self.weight = torch.empty(len(here), dim, dtype=kept, device=device)
        self.tensors["weight"] = self.weight

    def wanted(self) -> Wanted:
        heads = map(str, range(self.heads))
        return {(head, "weight"): (self.dim,) for head in heads}

    def load(self, part: str, param: str, tensor: Tensor) -> None:
        check_shape(tensor, (self.dim,))
        head = int(part)
        if head in self.here:
            row = self.here.index(head)
            fill(self.weight[row], tensor + self.kind.offset)

    def __call__(self, x: Tensor) -> tuple[Tensor, None]:
        heads = x.view(len(x), len(self.here), self.dim)
        wide = heads.float()
        if self.kind.centered:
            mean = wide.mean(-1, keepdim=True)
            wide = wide - mean
        variance = wide.square().mean(-1, keepdim=True)
        scale = (variance + self.kind.eps).rsqrt()
        wide = wide * scale
        weighted = wide * self.weight.float()
        narrow = weighted.to(x.dtype)
        return narrow.view(x.shape), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x [..., dim] / sqrt(mean(x^2) + eps) * weight [dim] in the dtype of x; the statistics are float32.

    The mean is over the last axis."""
    if weight.dtype != x.dtype:
        wide = rms_norm(x.float(), weight.float(), eps)
        return wide.to(x.dtype)
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    # torch computes this norm on a CPU by seven operations; these take a third less time
    norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    mean = norms.square_().mul_(1 / x.shape[-1])
    scale = mean.add_(eps).rsqrt_()
    return x.mul(scale).mul_(weight)
