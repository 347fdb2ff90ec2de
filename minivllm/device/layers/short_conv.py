"""Gated short convolution (LFM2, arXiv:2511.23404): a layer whose state of a sequence is its newest inputs.

    h ─ in ─► b | c | x     u = b * x ─ causal convolution of each channel ─► y     c * y ─► out

The inputs u lie in the ring of the state.  A step reads those before its first token from there, so it folds nothing.
The functions read no tensor on the host, and the bits of a token do not depend on the other tokens of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minivllm.core.interfaces.decoder import ShortConv
from minivllm.core.interfaces.model import StepTensors
from minivllm.core.interfaces.quantizer import Shard
from minivllm.core.interfaces.states import COPIES, StepStates

from .fused import Normed
from .module import Module, Wanted, check_shape, fill
from .state_layer import StateLayer, states_of

Shapes = dict[str, tuple[int, ...]]


class ShortConvolution(Module):
    """A gated short convolution: Normed [T, hidden] -> [T, inner], for the channels of this process.

    ``spec`` has the sizes of the whole model.  ``project`` returns b | c | x.
    """

    def __init__(
        self,
        name: str,
        spec: ShortConv,
        shard: Shard,
        project: Callable[[Normed], Tensor],
        dtype: torch.dtype,
        device: str,
        fuse: bool,
    ) -> None:
        super().__init__(name)
        self.spec = spec
        self.shard = shard
        self.project = project
        channels = spec.inner // shard.size
        self.weight = torch.empty(channels, spec.width, dtype=dtype, device=device)
        self.tensors["weight"] = self.weight
        self.bias: Tensor | None = None
        if spec.bias:
            self.bias = torch.empty(channels, dtype=dtype, device=device)
            self.tensors["bias"] = self.bias
        self.layer = StateLayer(spec.state(shard.size))
        self.convolve: Any = convolve
        if fuse:
            from minivllm.device.kernels import short_conv

            self.convolve = short_conv.convolve

    def shapes(self) -> Shapes:
        """Return the shapes of the checkpoint's tensors by name."""
        spec = self.spec
        shapes: Shapes = {"weight": (spec.inner, 1, spec.width)}
        if spec.bias:
            shapes["bias"] = (spec.inner,)
        return shapes

    def wanted(self) -> Wanted:
        return {("", name): shape for name, shape in self.shapes().items()}

    def load(self, part: str, param: str, tensor: Tensor) -> None:
        shape = self.shapes()[param]
        check_shape(tensor, shape)
        here = tensor.chunk(self.shard.size)[self.shard.rank]
        if param == "weight":
            here = here.squeeze(1)
        fill(self.tensors[param], here)

    def __call__(self, h: Normed, step: StepTensors) -> Tensor:
        """Return the outputs [T, inner] of this process's channels.  PluginError if the step has no states."""
        states = states_of(step)
        mixed = self.project(h)
        ring = self.layer.memory["ring"]
        return self.convolve(mixed, self.weight, self.bias, ring, states)


def convolve(mixed: Tensor, weight: Tensor, bias: Tensor | None, ring: Tensor, step: StepStates) -> Tensor:
    """Return ``c * conv(b * x)`` [T, channels], and store the newest inputs of each row in the ring.

    ``mixed`` [T, 3 * channels] holds b | c | x, ``weight`` is [channels, width], ``bias`` is [channels] or None, and
    ``ring`` is [states, places, channels].  The sum is float32 and is rounded once.  Tokens of no row get zeros.
    """
    b, c, x = mixed.chunk(3, dim=-1)
    u = b * x
    if not len(u):
        return u
    width = weight.shape[1]
    factors = weight.float()
    index = torch.arange(len(u), device=u.device)
    last = len(step.rows) - 1
    wanted = index.to(step.cu_q.dtype)
    row = torch.searchsorted(step.cu_q[1:], wanted, right=True)
    row = row.clamp(max=last)
    offset = index - step.cu_q[row]
    position = step.start[row] + offset
    state = step.rows[row]
    total = u.float() * factors[:, width - 1]
    for lag in range(1, width):
        place = (position - lag) % ring.shape[1]
        kept = ring[state, place]
        source = (index - lag).clamp(min=0)
        fresh = offset >= lag
        inputs = torch.where(fresh[:, None], u[source], kept)
        before = position < lag
        inputs = inputs.masked_fill(before[:, None], 0)
        total = total + inputs.float() * factors[:, width - 1 - lag]
    if bias is not None:
        total = total + bias.float()
    unusable = (step.behind < 0)[row]
    total = total.masked_fill(unusable[:, None], torch.nan)
    out = c * total.to(c.dtype)
    keep(ring, u, step, width - 1)
    padding = index >= step.cu_q[-1]
    return out.masked_fill(padding[:, None], 0)


def keep(ring: Tensor, new: Tensor, step: StepStates, taps: int) -> None:
    """Store the newest inputs of each row in its ring, and ``taps`` inputs in each requested copy; ``new`` is [T,
    channels].

    A row without a copy writes its own ring once more in place of the copy, so that no index depends on values.
    """
    first = step.cu_q[:-1]
    n = step.cu_q[1:] - first
    certain = torch.where(step.drafts, n.clamp(max=1), n)
    certain_end = step.start + certain
    begin = step.start - step.behind.clamp(min=0)
    old = ring[step.rows]
    _, values = _newest(old, new, step.start + n, step)
    targets = [step.rows]
    written = [values]
    for which in range(COPIES):
        at = step.save_at[:, which]
        to = step.save_to[:, which]
        after = at > begin
        saved = after & (at <= certain_end)
        position, copied = _newest(old, new, at, step)
        oldest = (at - taps).clamp(min=0)
        read = position >= oldest[:, None]
        copied = torch.where(read[..., None], copied, ring[to])
        copied = torch.where(saved[:, None, None], copied, values)
        written.append(copied)
        target = torch.where(saved, to, step.rows)
        targets.append(target)
    ring[torch.cat(targets)] = torch.cat(written)


def _newest(old: Tensor, new: Tensor, end: Tensor, step: StepStates) -> tuple[Tensor, Tensor]:
    """Return for each place of a ring the newest position [R, places] before ``end`` [R] that it stores, and its input.

    Inputs of positions before the step are those of ``old`` [R, places, channels]."""
    places = old.shape[1]
    place = torch.arange(places, device=old.device)
    start = step.start[:, None]
    last = end[:, None] - 1
    age = (last - place) % places
    position = last - age
    token = step.cu_q[:-1, None] + position - start
    inputs = new[token.clamp(0, len(new) - 1)]
    fresh = position >= start
    return position, torch.where(fresh[..., None], inputs, old)
