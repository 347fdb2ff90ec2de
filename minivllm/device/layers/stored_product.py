"""Products of a CPU that the native library computes from a weight as it is stored, in steps that run part by part.

    x [T, in] ─ float32 ─► sums in float32 over the stored weight, converted in registers ─► y [T, out] in x's dtype

torch multiplies 16-bit numbers fast only with instructions for them; without these its product takes 3 to 10 times as
long as one of float32.  A packed weight would become numbers in memory for torch's product.  The bits of a row do not
depend on the other rows.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from minivllm.core.interfaces.quantizer import StoredWeight
from minivllm.device import hardware
from minivllm.device.native import library
from minivllm.device.native.program import FORMATS, MatrixAddresses
from minivllm.device.native.team import team

PLAIN = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of weights without scales
NIBBLES = 32  # the kernels read int4 weights whose groups have a multiple of this many inputs


class StoredProduct(NamedTuple):
    """The product x W^T by the native CPU library, for a weight [outputs, inputs] that ``readable`` accepts."""

    stored: StoredWeight
    outputs: int
    inputs: int

    def __call__(self, x: Tensor, rows: slice | None = None, out: Tensor | None = None) -> Tensor:
        """Multiply x [T, in] by the weight, or by its ``rows``: y [T, rows] in x's dtype, in ``out`` if given."""
        first, last = (0, self.outputs) if rows is None else (rows.start, rows.stop)
        y = out
        if out is None or out.stride(1) != 1 or out.dtype != x.dtype:
            y = x.new_empty(len(x), last - first)
        assert y is not None
        if len(x):
            weight, scale, zero, group = self.stored
            addresses = [None if t is None else t.data_ptr() for t in (weight, scale, zero, None)]
            size = FORMATS[weight.dtype], self.outputs, self.inputs, group or self.inputs
            matrix = MatrixAddresses(*addresses, *size)
            numbers = x.float().contiguous()
            given = ctypes.addressof(matrix), numbers.data_ptr(), len(x), first, last
            result = y.data_ptr(), FORMATS[y.dtype], y.stride(0)
            team().run("shared_product", *given, *result)
        if out is None or y is out:
            return y
        return out.copy_(y)


def widened(dtype: torch.dtype) -> bool:
    """Return whether torch's products on this CPU are faster in float32 than in ``dtype``."""
    return dtype != torch.float32 and not hardware.multiplies(str(dtype).removeprefix("torch."))


def stored_product(stored: StoredWeight, outputs: int, inputs: int, dtype: torch.dtype) -> StoredProduct | None:
    """Return the native product of a weight by x of ``dtype``; None if torch's is faster or the library cannot do it.

    torch's is faster for float32 weights, and for x of 16 bits on a CPU that has instructions for them."""
    packed = stored.weight.dtype not in PLAIN
    wanted = widened(dtype) or (packed and dtype == torch.float32)
    if not wanted or library.load() is None or not readable(stored, outputs, inputs):
        return None
    return StoredProduct(stored, outputs, inputs)


def whole(*tensors: Tensor | None) -> bool:
    """Return whether all tensors are contiguous and in CPU memory; elements that are None are ignored."""
    return all(t is None or (t.is_contiguous() and t.device.type == "cpu") for t in tensors)


def readable(stored: StoredWeight, outputs: int, inputs: int) -> bool:
    """Return whether the native kernels can read a weight of shape [outputs, inputs] that is stored as ``stored``.

    Only devices, dtypes and shapes are checked, because the kernels read the memory without checks of their own."""
    weight, scale, zero, group = stored
    if not whole(weight, scale, zero):
        return False
    if any(t is not None and t.dtype != torch.float32 for t in (scale, zero)):
        return False
    if weight.dtype in PLAIN:
        return weight.shape == (outputs, inputs) and scale is None and zero is None
    if weight.dtype == torch.int8:
        one_group = group in (0, inputs)
        return weight.shape == (outputs, inputs) and one_group and zero is None and _count(scale) == outputs
    group = group or inputs
    if weight.dtype != torch.uint8 or group % NIBBLES or inputs % group:
        return False
    scales = outputs * (inputs // group)
    if weight.shape != (outputs, inputs // 2):
        return False
    return _count(scale) == scales and _count(zero) in (0, scales)


def _count(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel()
