"""The operations of a model in plain torch, to which ``kernels`` compares those of a configuration.

Each function returns calls without arguments.  Operands are random.  Several copies of them are used in turn, more than
a cache can hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.core.interfaces.attention import AttnSpec, QKPre
from minivllm.device.layers.activation import APPLY
from minivllm.device.layers.norm import LayerNorm

COLD = 256 << 20  # bytes of all copies of an operand; the level 2 cache of a GPU has 50 MB
MOST_COPIES = 64

Call = Callable[[], Any]
Function = Callable[[Tensor], Any]


def copies(size: int, wanted: int) -> int:
    """Return the number of copies of an operand of ``size`` bytes, for ``wanted`` calls that use them in turn."""
    cold = -(-COLD // max(1, size))
    return max(1, min(wanted, MOST_COPIES, cold))


class TorchOperations:
    """Operands and matrix products on a device, in a dtype.  Weights of a shape are created once."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self._weights: dict[tuple[int, int], list[Tensor]] = {}

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Return normally distributed numbers with a standard deviation of ``scale``."""
        numbers = torch.randn(*shape, device=self.device) * scale
        return numbers.to(self.dtype)

    def weights(self, outputs: int, inputs: int, wanted: int) -> list[Tensor]:
        """Return copies of a weight [outputs, inputs] for ``wanted`` calls."""
        kept = self._weights.setdefault((outputs, inputs), [])
        size = outputs * inputs * self.dtype.itemsize
        while len(kept) < copies(size, wanted):
            kept.append(self.random(outputs, inputs, scale=inputs**-0.5))
        return kept

    def drop(self) -> None:
        """Release all weights."""
        self._weights.clear()

    def product(self, x: Tensor, outputs: int, wanted: int, then: Function | None = None) -> list[Call]:
        """Return a call of ``then(F.linear(x, w))`` for each copy of the weight w.  ``then`` None means the linear
        layer alone."""

        def call(w: Tensor) -> Any:
            y = F.linear(x, w)
            return y if then is None else then(y)

        return [partial(call, w) for w in self.weights(outputs, x.shape[1], wanted)]


def gated(activation: str, is_gated: bool) -> Function:
    """Return the function between the matrix products of an MLP: activation(gate) * up, or the activation alone."""

    def gate(y: Tensor) -> Tensor:
        first, up = y.chunk(2, dim=-1)
        return APPLY[activation](first) * up

    return gate if is_gated else APPLY[activation]


def normed(norm: Any, dtype: torch.dtype) -> Function:
    """Return torch's function for a norm of ``device.layers.norm``."""
    weight = norm.weight.to(dtype)
    if isinstance(norm, LayerNorm):
        return lambda x: F.layer_norm(x, weight.shape, weight, norm.bias, norm.eps)
    return lambda x: F.rms_norm(x, weight.shape, weight, norm.eps)


def joined(residual: Tensor, norms: Sequence[Any], dtype: torch.dtype) -> Function:
    """Return the function that adds an output to the residual stream.

    ``norms`` are the norm of the output and the norm of the sum; None means no norm.
    """
    functions = [None if norm is None else normed(norm, dtype) for norm in norms]
    of_output, of_sum = functions

    def call(y: Tensor) -> Tensor:
        if of_output is not None:
            y = of_output(y)
        stream = residual + y
        return stream if of_sum is None else of_sum(stream)

    return call


def rotated(q: Tensor, k: Tensor, v: Tensor, position: Tensor, slots: Tensor, pre: QKPre, room: int) -> Call:
    """Return a call that normalizes and rotates q and k, and writes k and v to a cache of ``room`` tokens."""
    keys = k.new_zeros(room, *k.shape[1:])
    values = v.new_zeros(room, *v.shape[1:])
    place = slots % room

    def turn(x: Tensor, norm: Tensor | None) -> Tensor:
        if norm is not None:
            x = F.rms_norm(x, norm.shape, norm.to(x.dtype), pre.eps)
        if pre.cos is None or pre.sin is None:
            return x
        cos = pre.cos[position][:, None].to(x.dtype)
        sin = pre.sin[position][:, None].to(x.dtype)
        dim = cos.shape[-1]
        head = x[..., :dim]
        rest = x[..., dim:]
        first, second = head.chunk(2, dim=-1)
        half = torch.cat((-second, first), dim=-1)
        turned = head * cos + half * sin
        return torch.cat((turned, rest), dim=-1)

    def call() -> Tensor:
        keys.index_copy_(0, place, turn(k, pre.k_norm))
        values.index_copy_(0, place, v)
        return turn(q, pre.q_norm)

    return call


def attention(made: TorchOperations, spec: AttnSpec, rows: int, tokens: int, context: int, wanted: int) -> list[Call]:
    """Return calls of ``scaled_dot_product_attention`` with ``tokens`` queries per row and contiguous keys and values.

    There are none for a layer that this function cannot compute: with sinks, soft caps, or a window that excludes keys
    of some queries only.
    """
    moving_window = spec.window is not None and tokens > 1 and spec.window < context
    if spec.sinks or spec.softcap is not None or moving_window:
        return []
    length = context
    if spec.window is not None:
        length = min(context, spec.window)
    elements = spec.kv_heads * (spec.dim_qk + spec.dim_v)
    size = rows * length * elements * made.dtype.itemsize
    q = made.random(rows, spec.heads, tokens, spec.dim_qk)
    found: list[Call] = []
    for _ in range(copies(size, wanted)):
        k = made.random(rows, spec.kv_heads, length, spec.dim_qk)
        v = made.random(rows, spec.kv_heads, length, spec.dim_v)

        def call(k: Tensor = k, v: Tensor = v) -> Tensor:
            options: dict[str, Any] = {"is_causal": tokens > 1, "enable_gqa": spec.heads != spec.kv_heads}
            return F.scaled_dot_product_attention(q, k, v, scale=spec.softmax_scale, **options)

        found.append(call)
    return found


def greedy(logits: Tensor) -> Call:
    """Return a call that chooses the token with the largest logit."""
    return lambda: logits.argmax(dim=-1)


def drawn(logits: Tensor) -> Call:
    """Return a call that draws a token from the softmax with exponential noise, as ``torch.multinomial`` does."""

    def call() -> Tensor:
        p = logits.float().softmax(dim=-1)
        noise = torch.empty_like(p).exponential_(1)
        return p.div_(noise).argmax(dim=-1)

    return call
