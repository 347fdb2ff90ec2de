"""What the weight loader sees of a module that owns weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from minivllm.errors import ModelError


class Module:
    """A named owner of ``tensors``.  The loader asks ``wanted``, calls ``load`` once an entry, then ``finish`` once.

    A *part* is one of several checkpoint tensors that are stacked into one parameter (q, k, v); "" where there is one.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.tensors: dict[str, Tensor] = {}

    def wanted(self) -> dict[tuple[str, str], tuple[int, ...] | None]:
        """(part, parameter) -> full checkpoint shape, before tensor-parallel slicing (None: only the scheme knows)."""
        return {("", name): tuple(t.shape) for name, t in self.tensors.items()}

    def load(self, part: str, param: str, tensor: Tensor) -> None:
        """Take a full checkpoint tensor of any floating dtype on any device.  ModelError on a wrong shape or dtype."""
        fill(self.tensors[param], tensor)

    def finish(self) -> None:
        """All modules that come before this one, and all its own parts, are loaded."""


class Tensors(Module):
    """Weights that somebody else computes with."""

    def __init__(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(name)
        self.tensors = dict(tensors)


def fill(target: Tensor, tensor: Tensor) -> None:
    """Copy with a cast; refuses what would be silently wrong."""
    check_shape(tensor, target.shape)
    target.copy_(tensor)


def check_shape(tensor: Tensor, want: Sequence[int]) -> None:
    """ModelError unless ``tensor`` has exactly the shape ``want`` and numbers that need no scale.

    A float8 weight without its scales is refused, because a cast would keep its numbers and lose their size."""
    if tuple(tensor.shape) != tuple(want):
        raise ModelError(f"shape {list(tensor.shape)}, want {list(want)}")
    if not tensor.is_floating_point():
        raise ModelError(f"dtype {str(tensor.dtype).removeprefix('torch.')}, want a floating-point weight")
    if tensor.element_size() < 2:
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise ModelError(
            f"dtype {dtype} without scales, want a weight of 16 or 32 bits, or a checkpoint with its scales"
        )
