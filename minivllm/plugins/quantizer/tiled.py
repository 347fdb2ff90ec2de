"""Products with quantized weights that are complete in memory, with row scales or converted some rows at a time."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.core.interfaces.quantizer import ModuleInfo, StoredWeight, WeightScheme
from minivllm.device.layers.linear import no_adapter, part_rows
from minivllm.device.layers.module import check_shape
from minivllm.device.layers.stored_product import StoredProduct, stored_product, widened
from minivllm.errors import ModelError

AT_ONCE = {"cpu": 1 << 19}  # elements that are converted at a time, which a CPU's caches can hold
AT_ONCE_ELSEWHERE = 1 << 21  # elements that are converted at a time on other devices: 8 MiB in float32


class WholeWeight(WeightScheme):
    """A quantized weight that is complete when it is constructed, instead of being loaded.

    Subclasses implement the product with some of its rows.
    """

    def __init__(self, info: ModuleInfo, **tensors: Tensor | None) -> None:
        self.info = info
        self.tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        self.kernels: Any = None  # on a GPU
        # the product by the native library on a CPU; None if torch's product is faster
        self.native: StoredProduct | None = None

    def params(self) -> dict[str, tuple[int, ...]]:
        return {}

    def load(self, param: str, tensor: Tensor, part: str) -> None:
        raise ModelError(f"{self.info.name} is complete, and has no parameter {param}")

    @abstractmethod
    def _product(self, x: Tensor, rows: slice, out: Tensor | None = None) -> Tensor:
        """Return the product of x [T, in] and rows of the weight, [T, rows]."""

    def apply(self, x: Tensor, out: Tensor | None = None, adapter: Any = None) -> Tensor:
        no_adapter(self, adapter)
        if self.kernels is not None:
            return self.kernels(x, out)
        if self.native is not None:
            return self.native(x, None, out)
        return self._product(x, slice(0, self.info.out_features), out)

    def expert(self, x: Tensor, e: int) -> Tensor:
        count = self.info.out_features // self.info.experts
        rows = slice(e * count, (e + 1) * count)
        if self.native is not None:
            return self.native(x, rows)
        return self._product(x, rows)

    def native_product(self, stored: StoredWeight) -> StoredProduct | None:
        """Return the native product of a weight for this module's activations, or None if torch's is faster."""
        info = self.info
        dtype = getattr(torch, info.dtype)
        return stored_product(stored, info.out_features, info.in_features, dtype)


class Tiled(WholeWeight):
    """A weight that is converted to numbers a few rows at a time."""

    elsewhere = AT_ONCE_ELSEWHERE

    def __init__(self, info: ModuleInfo, **tensors: Tensor | None) -> None:
        super().__init__(info, **tensors)
        first = next(iter(self.tensors.values()))
        elements = AT_ONCE.get(first.device.type, self.elsewhere)
        self._tile = max(1, elements // info.in_features)  # rows

    @abstractmethod
    def numbers(self, rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows of the weight as numbers [rows, in]; ``rows`` is a slice, or indices i64 [rows]."""

    def gather(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return self.numbers(ids, dtype)

    def _product(self, x: Tensor, rows: slice, out: Tensor | None = None) -> Tensor:
        first, last = rows.start, rows.stop
        y = x.new_empty(len(x), last - first) if out is None else out
        if x.device.type == "cpu" and widened(x.dtype):
            x = x.float()
        for start in range(first, last, self._tile):
            stop = min(start + self._tile, last)
            numbers = self.numbers(slice(start, stop), x.dtype)
            columns = slice(start - first, stop - first)
            y[:, columns] = F.linear(x, numbers)
        return y


class MadeByTiles(Tiled):
    """A weight that is computed from floating-point numbers, a few rows at a time."""

    @abstractmethod
    def quantize(self, w: Tensor, rows: slice) -> None:
        """Quantize w [rows, in], of any floating dtype on any device, and store it as the given rows."""

    def params(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.info.out_features, self.info.in_features)}

    def load(self, param: str, tensor: Tensor, part: str) -> None:
        rows = part_rows(self.info, part)
        start = rows.start
        check_shape(tensor, (rows.stop - start, self.info.in_features))
        for some in tensor.split(self._tile):
            stop = start + len(some)
            self.quantize(some, slice(start, stop))
            start = stop
