"""The interface between the weight loader and a module that owns weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from minivllm.errors import ModelError

# (part, parameter) of a module -> shape of the checkpoint's tensor; None means that only the weight scheme can check it
Wanted = dict[tuple[str, str], tuple[int, ...] | None]


class Module:
    """A named owner of ``tensors``.

    The loader calls ``wanted``, then ``load`` once for each entry, then ``finish`` once.  A *part* is one of several
    checkpoint tensors that are stacked into one parameter, such as q, k and v; "" names the only part.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.tensors: dict[str, Tensor] = {}

    def wanted(self) -> Wanted:
        """Return the checkpoint tensors to load: (part, parameter) -> full shape before tensor-parallel slicing.

        A shape of None means that only the weight scheme can check it."""
        return {("", name): tuple(t.shape) for name, t in self.tensors.items()}

    def load(self, part: str, param: str, tensor: Tensor) -> None:
        """Store a full checkpoint tensor of a floating dtype of 16 bits or more, on any device.

        ModelError on a wrong shape or dtype."""
        fill(self.tensors[param], tensor)

    def finish(self) -> None:
        """Prepare for use; called after all parts of this module, and all earlier modules, are loaded."""

    def release(self) -> None:
        """Free the derived copies of weights, which ``refresh`` makes again."""

    def refresh(self, params: Collection[str]) -> None:
        """Prepare for use after ``load`` replaced the parameters ``params`` of the finished module, in place.

        Derived values are computed again.  ``params`` is empty if tensors got back values that they had before."""


class Tensors(Module):
    """Weights of an architecture that computes with them in its own code."""

    def __init__(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(name)
        self.tensors = dict(tensors)


def fill(target: Tensor, tensor: Tensor) -> None:
    """Copy ``tensor`` to ``target`` with a cast to its dtype.  ModelError as in ``check_shape``."""
    check_shape(tensor, target.shape)
    target.copy_(tensor)


def all_finite(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bool [] on the device of a tensor: whether all its numbers are finite in ``dtype``.

    The check uses the smallest and the largest number, which are NaN if any number is.  It takes a fortieth of the time
    of ``isfinite`` on a CPU, and no memory.
    """
    if not tensor.numel():
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    values = tensor.to(dtype)
    if values.is_floating_point() and values.element_size() == 1:
        values = values.float()  # torch cannot compute the minimum and maximum of float8
    return torch.stack(torch.aminmax(values)).isfinite().all()


def check_shape(tensor: Tensor, want: Sequence[int]) -> None:
    """Raise ModelError unless ``tensor`` has exactly the shape ``want`` and a floating dtype of 16 bits or more.

    A float8 weight without its scales is refused, because a cast would drop the factor that the numbers need."""
    if tuple(tensor.shape) != tuple(want):
        raise ModelError(f"shape {list(tensor.shape)}, expected {list(want)}")
    if not tensor.is_floating_point():
        raise ModelError(f"dtype {str(tensor.dtype).removeprefix('torch.')}, expected a floating-point weight")
    if tensor.element_size() < 2:
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise ModelError(
            f"dtype {dtype} without scales, expected a weight of 16 or 32 bits, or a checkpoint with its scales"
        )
