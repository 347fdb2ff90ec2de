"""Torch's own operations, beside which ``kernels`` puts those of a configuration: what one would write without an
engine.  Each function gives a call without arguments; operands are random, in as many copies as no cache can hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.core.interfaces.attention import AttnSpec, QKPre
from minivllm.device.layers.activation import APPLY
from minivllm.device.layers.norm import LayerNorm

COLD = 256 << 20  # bytes of copies; the second level of a GPU's cache has 50 MB
MOST_COPIES = 64

Call = Callable[[], Any]


def copies(size: int, wanted: int) -> int:
    """How many operands of ``size`` bytes are made for ``wanted`` calls, which take turns with them."""
    return max(1, min(wanted, MOST_COPIES, -(-COLD // max(1, size))))


class TorchOperations:
    """On one device, in one dtype.  Weights of one shape are made once."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._weights: dict[tuple[int, int], list[Tensor]] = {}

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device=self.device) * scale).to(self.dtype)

    def weights(self, outputs: int, inputs: int, wanted: int) -> list[Tensor]:
        """[outputs, inputs], as many as there is use for."""
        kept = self._weights.setdefault((outputs, inputs), [])
        while len(kept) < copies(outputs * inputs * self.dtype.itemsize, wanted):
            kept.append(self.random(outputs, inputs, scale=inputs**-0.5))
        return kept

    def drop(self) -> None:
        self._weights.clear()

    def product(self, x: Tensor, outputs: int, wanted: int, then: Callable[[Tensor], Any] | None = None) -> list[Call]:
        """``then(F.linear(x, w))``."""

        def call(w: Tensor) -> Any:
            y = F.linear(x, w)
            return y if then is None else then(y)

        return [lambda w=w: call(w) for w in self.weights(outputs, x.shape[1], wanted)]  # type: ignore[misc]


def gated(activation: str, is_gated: bool) -> Callable[[Tensor], Tensor]:
    """What an MLP does between its products."""

    def gate(y: Tensor) -> Tensor:
        first, up = y.chunk(2, dim=-1)
        return APPLY[activation](first) * up

    return gate if is_gated else APPLY[activation]


def normed(norm: Any, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """The norm of a layer (``device.layers.norm``) as torch has it."""
    weight = norm.weight.to(dtype)
    if isinstance(norm, LayerNorm):
        return lambda x: F.layer_norm(x, weight.shape, weight, norm.bias, norm.eps)
    return lambda x: F.rms_norm(x, weight.shape, weight, norm.eps)


def joined(residual: Tensor, norms: Sequence[Any], dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """What is added to the stream: (norm before it or None, norm behind it or None)."""
    after, before = (None if norm is None else normed(norm, dtype) for norm in norms)

    def call(y: Tensor) -> Tensor:
        stream = residual + (y if after is None else after(y))
        return stream if before is None else before(stream)

    return call


def rotated(q: Tensor, k: Tensor, v: Tensor, position: Tensor, slots: Tensor, pre: QKPre, room: int) -> Call:
    """Norm of heads, rotary embedding, and keys and values put where they belong in a cache of ``room`` tokens."""
    keys = torch.zeros(room, *k.shape[1:], dtype=k.dtype, device=k.device)
    values = torch.zeros(room, *v.shape[1:], dtype=v.dtype, device=v.device)
    place = slots % room

    def turn(x: Tensor, norm: Tensor | None) -> Tensor:
        if norm is not None:
            x = F.rms_norm(x, norm.shape, norm.to(x.dtype), pre.eps)
        if pre.cos is None or pre.sin is None:
            return x
        cos, sin = (table[position][:, None].to(x.dtype) for table in (pre.cos, pre.sin))
        dim = cos.shape[-1]
        head, rest = x[..., :dim], x[..., dim:]
        half = torch.cat((-head[..., dim // 2 :], head[..., : dim // 2]), dim=-1)
        return torch.cat((head * cos + half * sin, rest), dim=-1)

    def call() -> Tensor:
        keys.index_copy_(0, place, turn(k, pre.k_norm))
        values.index_copy_(0, place, v)
        return turn(q, pre.q_norm)

    return call


def attention(made: TorchOperations, spec: AttnSpec, rows: int, tokens: int, context: int, wanted: int) -> list[Call]:
    """``scaled_dot_product_attention`` of ``tokens`` queries a row over contiguous keys and values; none where it has
    no words for what the layer does (sinks, soft caps, a window that moves within the queries)."""
    if spec.sinks or spec.softcap is not None or (spec.window is not None and tokens > 1 and spec.window < context):
        return []
    length = context if spec.window is None else min(context, spec.window)
    size = rows * length * spec.kv_heads * (spec.dim_qk + spec.dim_v) * made.dtype.itemsize
    q = made.random(rows, spec.heads, tokens, spec.dim_qk)
    found: list[Call] = []
    for _ in range(copies(size, wanted)):
        k = made.random(rows, spec.kv_heads, length, spec.dim_qk)
        v = made.random(rows, spec.kv_heads, length, spec.dim_v)

        def call(k: Tensor = k, v: Tensor = v) -> Tensor:
            grouped = spec.heads != spec.kv_heads
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=tokens > 1, scale=spec.softmax_scale, enable_gqa=grouped
            )

        found.append(call)
    return found


def greedy(logits: Tensor) -> Call:
    return lambda: logits.argmax(dim=-1)


def drawn(logits: Tensor) -> Call:
    """From the softmax, by exponential noise, as ``torch.multinomial`` does for one draw."""

    def call() -> Tensor:
        p = logits.float().softmax(dim=-1)
        return p.div_(torch.empty_like(p).exponential_(1)).argmax(dim=-1)

    return call
