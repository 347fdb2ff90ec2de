"""Linear layers: merged parts, tensor parallelism after Megatron-LM (arXiv:1909.08053), and the unquantized weight."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from minivllm.core.interfaces.quantizer import ModuleInfo, StoredWeight, WeightScheme
from minivllm.errors import ModelError, PluginError

from .extended_weight import ExtendedProduct
from .invariant import FixedRows
from .matmul import Packed, matmul
from .module import Module, Wanted, check_shape, fill
from .stored_product import StoredProduct, stored_product

GATED = 1  # mode of ``WeightScheme.joined`` in which the kernel also computes activation(gate) * up
CAPTURED = "of captured steps"  # key of ``WeightScheme.served`` that describes the native program of a CPU


def part_rows(info: ModuleInfo, part: str) -> slice:
    """Return the rows of a part, such as "q", in the weight of a merged linear layer.  KeyError for an unknown part."""
    if part in info.rows:
        return info.rows[part]
    raise KeyError(f"{info.name} has no part {part!r}")


def no_adapter(scheme: WeightScheme, adapter: Any) -> None:
    """Raise PluginError if a scheme that applies no adapters (LoRA) is given one."""
    if adapter is not None:
        raise PluginError(f"{type(scheme).__name__} applies no adapters: expected adapter=None")


def stored_by(scheme: WeightScheme) -> StoredWeight | None:
    """Return ``scheme.stored()`` if the scheme's own class defines it, else None.

    An inherited method is ignored, because a subclass may multiply in another way."""
    if "stored" not in vars(type(scheme)):
        return None
    return scheme.stored()


def joined_by(scheme: WeightScheme, bias: Tensor | None, mode: int, activation: str) -> Any:
    """Return the kernel ``scheme.joined(...)`` if the scheme's own class defines the method, else None.

    An inherited method is ignored, as in ``stored_by``."""
    if "joined" not in vars(type(scheme)):
        return None
    return scheme.joined(bias, mode, activation)


class Dense(WeightScheme):
    """The unquantized weight [out, in] in the activations' dtype.

    ``behind`` is the number of further rows in the memory behind a new weight (``extended``)."""

    def __init__(
        self,
        info: ModuleInfo,
        fuse: bool = False,
        weight: Tensor | None = None,
        invariant: bool = False,
        behind: int = 0,
    ) -> None:
        self.info = info
        self.extended: ExtendedProduct | None = None
        self.fuse = fuse
        self.invariant = invariant
        self.row: Any = None  # the kernel that multiplies one row, or None
        self.fixed: Any = None  # with ``invariant``, a product whose bits for a row do not depend on the number of rows
        self.native: StoredProduct | None = None  # product of the native CPU library; None if torch's is faster
        shape = (info.out_features, info.in_features)
        if weight is None and behind:
            self.extended = ExtendedProduct(info, behind)
            weight = self.extended.weight
        elif weight is None:
            weight = torch.empty(shape, dtype=getattr(torch, info.dtype), device=info.device)
        self.weight = weight
        self.tensors = {"weight": self.weight}
        self.packed: Packed | None = None

    def params(self) -> dict[str, tuple[int, ...]]:
        return {"weight": tuple(self.weight.shape)}

    def load(self, param: str, tensor: Tensor, part: str) -> None:
        fill(self.weight[part_rows(self.info, part)], tensor)

    def finish(self) -> None:
        self.native = self.find_native()
        if self.native is not None:
            return
        if self.invariant and self.weight.device.type == "cpu":
            self.fixed = FixedRows(self.weight)
            return
        if self.invariant:
            from minivllm.device.kernels.fixed_products import leaves_of
            from minivllm.device.kernels.fixed_rows import FixedLinear

            leaves = 1
            if self.info.split == "row":
                leaves = leaves_of(self.info.in_features * self.info.shard.size)
            self.fixed = FixedLinear(self.weight, leaves)
            return
        self.packed = Packed(self.weight)
        if self.fuse:
            from minivllm.device.kernels.products import Product

            self.row = Product(self.weight, None)
            if self.extended is not None:
                self.extended.finish()

    def find_native(self) -> StoredProduct | None:
        """Return the product of the native CPU library, or None if torch's is faster.

        The bits of a row do not depend on the other rows, as ``invariant`` requires.
        """
        outputs, inputs = self.weight.shape
        return stored_product(StoredWeight(self.weight), outputs, inputs, self.weight.dtype)

    def release(self) -> None:
        """Free the packed copy of the weight, which ``refresh`` makes again."""
        if self.weight.device.type == "cpu":
            self.fixed = None
        self.packed = None

    def refresh(self) -> None:
        """Make the packed copies of the weight and the rows behind it again after it has changed in place."""
        if self.extended is not None:
            self.extended.refresh()
        if self.native is not None:
            return
        if self.invariant and self.weight.device.type == "cpu":
            self.fixed = FixedRows(self.weight)
        elif not self.invariant:
            self.packed = Packed(self.weight)

    def stored(self) -> StoredWeight | None:
        return StoredWeight(self.weight)

    def joined(self, bias: Tensor | None, mode: int, activation: str) -> Any:
        if self.invariant:
            from minivllm.device.kernels.fixed_rows import FixedJoined, FixedLinear

            if bias is not None or self.fixed is None:
                return None
            if mode == GATED:
                return FixedJoined(FixedLinear(self.weight, 1, activation))
            return FixedJoined(self.fixed)
        from minivllm.device.kernels.products import Product

        return Product(self.weight, bias, mode, activation)

    def apply(self, x: Tensor, out: Tensor | None = None, adapter: Any = None) -> Tensor:
        no_adapter(self, adapter)
        if self.native is not None:
            return self.native(x, None, out)
        if self.fixed is not None:
            y = self.fixed(x)
            return y if out is None else out.copy_(y)
        if out is not None:
            return torch.mm(x, self.weight.t(), out=out)
        rows = x.shape[0]
        if self.row is not None and rows == 1 and self.row.fits(x):
            return self.row(x)[0]
        packed = None if self.packed is None else self.packed.of(rows)
        return matmul(x, self.weight, packed)


class Linear(Module):
    """A linear layer: x [T, in] -> x W^T (+ b) [T, out], with this process's share of inputs and outputs.

    ``split="column"`` divides the outputs of every part over the processes, ``"row"`` the inputs.  A row-split layer
    sums its result over ``group`` (one all-reduce) and then adds the bias once.  If a part has copies
    (``ModuleInfo.copies``), that many neighbouring processes have the same share of it.
    """

    def __init__(self, info: ModuleInfo, scheme: WeightScheme, group: Any = None) -> None:
        super().__init__(info.name)
        self.info = info
        self.scheme = scheme
        self.group = group
        self.reduce = info.split == "row" and info.shard.size > 1
        self.adapter: Any = None  # ``LayerAdapters``, which add the changes of adapters; None if no adapters are served
        self.tensors = dict(scheme.tensors)
        self.bias: Tensor | None = None
        if info.bias:
            self.bias = torch.empty(info.out_features, dtype=getattr(torch, info.dtype), device=info.device)
            self.tensors["bias"] = self.bias

    def wanted(self) -> Wanted:
        info = self.info
        size = info.shard.size
        inputs = info.in_features * size if info.split == "row" else info.in_features
        local = (info.out_features, info.in_features)
        want: Wanted = {}
        for part, rows in info.parts:
            outputs = rows
            if info.split == "column":
                outputs *= info.share(part).size
            for param, shape in self.scheme.params_of(part).items():
                plain = tuple(shape) == local
                want[part, param] = (outputs, inputs) if plain else None
            if info.bias:
                want[part, "bias"] = (outputs,)
        return want

    def load(self, part: str, param: str, tensor: Tensor) -> None:
        info = self.info
        shard = self.info.share(part)
        size = shard.size
        if param == "bias" and self.bias is not None:
            rows = part_rows(info, part)
            cut = size if info.split == "column" else 1
            whole = (rows.stop - rows.start) * cut
            check_shape(tensor, (whole,))
            share = shard.rank if cut > 1 else 0
            fill(self.bias[rows], tensor.chunk(cut)[share])
            return
        try:
            mine = self.scheme.slice(param, tensor, info.split, shard)
        except IndexError:
            raise ModelError(f"shape {list(tensor.shape)} cannot be cut over {size} processes") from None
        if mine.numel() not in (tensor.numel(), tensor.numel() // size):
            raise ModelError(f"shape {list(tensor.shape)} cannot be cut evenly over {size} processes")
        self.scheme.load(param, mine, part)

    def finish(self) -> None:
        self.scheme.finish()
        # a scheme may have repacked its tensors; this drops the last references to the old ones
        self.tensors = dict(self.scheme.tensors)
        if self.bias is not None:
            self.tensors["bias"] = self.bias

    def release(self) -> None:
        for weight in self._unquantized():
            weight.release()

    def refresh(self, params: Collection[str]) -> None:
        for weight in self._unquantized():
            weight.refresh()

    def _unquantized(self) -> list[Dense]:
        """Return the schemes of unquantized weights in the layer: of the whole weight, or of parts that a quantizer
        leaves out."""
        parts = getattr(self.scheme, "schemes", (self.scheme,))
        return [one for one in parts if isinstance(one, Dense)]

    def replace(self, scheme: WeightScheme) -> None:
        """Use the weight of another scheme, which has been loaded, in place of the current one."""
        self.scheme = scheme
        self.finish()

    def stored(self) -> StoredWeight | None:
        return stored_by(self.scheme)

    def __call__(self, x: Tensor) -> Tensor:
        return self.summed(self.partial(x))

    @property
    def adapted(self) -> bool:
        """Return whether the running step has adapters, so that the product does not depend only on the weight."""
        return self.adapter is not None and self.adapter.on

    def partial(self, x: Tensor) -> Tensor:
        """Return this process's part of the product [T, out], with the adapters of the step."""
        return self.scheme.apply(x) if self.adapter is None else self.adapter.added_to(self.scheme.apply, x)

    def summed(self, y: Tensor) -> Tensor:
        """Complete the product ``y`` [T, out] of this process, and return the layer's result [T, out].

        Sums over the processes if the inputs are split, and adds the bias; ``y`` may be changed in place."""
        if self.reduce:
            self.group.all_reduce(y)
        return y if self.bias is None else y.add_(self.bias)
