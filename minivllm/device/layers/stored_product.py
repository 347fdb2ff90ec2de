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
        first = 0
        last = self.outputs
        if rows is not None:
            first = rows.start
            last = rows.stop
        if out is None or out.stride(1) != 1 or out.dtype != x.dtype:
            y = x.new_empty(len(x), last - first)
        else:
            y = out
        if len(x):
            matrix = self._matrix()
            numbers = x.float().contiguous()
            given = ctypes.addressof(matrix), numbers.data_ptr(), len(x)
            result = y.data_ptr(), FORMATS[y.dtype], y.stride(0)
            team().run("shared_product", *given, first, last, *result)
        if out is None or y is out:
            return y
        return out.copy_(y)

    def _matrix(self) -> MatrixAddresses:
        """Return the weight for the native library, which reads the memory of its tensors."""
        weight, scale, zero, group = self.stored
        addresses = [None if t is None else t.data_ptr() for t in (weight, scale, zero, None)]
        kind = FORMATS[weight.dtype]
        return MatrixAddresses(*addresses, kind, self.outputs, self.inputs, group or self.inputs)


def widened(dtype: torch.dtype) -> bool:
    """Return whether torch's products on this CPU are faster in float32 than in ``dtype``."""
    if dtype == torch.float32:
        return False
    name = str(dtype).removeprefix("torch.")
    return not hardware.multiplies(name)


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
    given = [t for t in tensors if t is not None]
    return all(t.is_contiguous() and t.device.type == "cpu" for t in given)


def readable(stored: StoredWeight, outputs: int, inputs: int) -> bool:
    """Return whether the native kernels can read a weight of shape [outputs, inputs] that is stored as ``stored``.

    Only devices, dtypes and shapes are checked, because the kernels read the memory without checks of their own."""
    weight, scale, zero, group = stored
    if not whole(weight, scale, zero):
        return False
    if any(t is not None and t.dtype != torch.float32 for t in (scale, zero)):
        return False
    shape = (outputs, inputs)
    scales = _count(scale)
    zeros = _count(zero)
    if weight.dtype in PLAIN:
        return weight.shape == shape and scale is None and zero is None
    if weight.dtype == torch.int8:
        one_group = group in (0, inputs)
        return weight.shape == shape and one_group and zero is None and scales == outputs
    group = group or inputs
    if weight.dtype != torch.uint8 or group % NIBBLES or inputs % group:
        return False
    if weight.shape != (outputs, inputs // 2):
        return False
    groups = outputs * (inputs // group)
    return scales == groups and zeros in (0, groups)


def _count(tensor: Tensor | None) -> int:
    if tensor is None:
        return 0
    return tensor.numel()
