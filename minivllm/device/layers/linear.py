"""Linear layers: merged parts, tensor parallelism after Megatron-LM (arXiv:1909.08053), and the unquantized weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minivllm.core.interfaces.quantizer import ModuleInfo, StoredWeight, WeightScheme
from minivllm.errors import ModelError, PluginError

from .invariant import FixedRows
from .matmul import Packed, matmul
from .module import Module, check_shape, fill

CAPTURED = "of captured steps"  # in ``WeightScheme.served``: what a CPU's native part reads, if it reads all weights


def part_rows(info: ModuleInfo, part: str) -> slice:
    """Where the output rows of a part lie in the merged weight."""
    if part in info.rows:
        return info.rows[part]
    raise KeyError(f"{info.name} has no part {part!r}")


def no_adapter(scheme: WeightScheme, adapter: Any) -> None:
    if adapter is not None:
        raise PluginError(f"{type(scheme).__name__} applies no adapters: want adapter=None")


def stored_by(scheme: WeightScheme) -> StoredWeight | None:
    """What the class of a scheme says of itself: one made of it may multiply in another way."""
    return scheme.stored() if "stored" in vars(type(scheme)) else None


def joined_by(scheme: WeightScheme, bias: Tensor | None, mode: int, activation: str) -> Any:
    """Likewise."""
    return scheme.joined(bias, mode, activation) if "joined" in vars(type(scheme)) else None


class Dense(WeightScheme):
    """The unquantized weight [out, in] in the activations' dtype."""

    def __init__(self, info: ModuleInfo, fuse: bool = False, weight: Tensor | None = None, invariant: bool = False):
        self.info, self.fuse, self.invariant = info, fuse, invariant
        self.row: Any = None  # the kernel for a single row
        self.fixed: Any = None  # the product that is the same for any number of rows, if ``invariant``
        shape = (info.out_features, info.in_features)
        if weight is None:
            weight = torch.empty(shape, dtype=getattr(torch, info.dtype), device=info.device)
        self.weight = weight
        self.tensors = {"weight": self.weight}
        self.packed: Packed | None = None

    def params(self) -> dict[str, tuple[int, ...]]:
        return {"weight": tuple(self.weight.shape)}

    def load(self, param: str, tensor: Tensor, part: str) -> None:
        fill(self.weight[part_rows(self.info, part)], tensor)

    def finish(self) -> None:
        if self.invariant and self.weight.device.type == "cpu":
            self.fixed = FixedRows(self.weight)
            return
        if self.invariant:
            from minivllm.device.kernels.products import FixedProduct

            self.fixed = FixedProduct(self.weight)
            return
        self.packed = Packed(self.weight)
        if self.fuse:
            from minivllm.device.kernels.products import Product

            self.row = Product(self.weight, None)

    def stored(self) -> StoredWeight | None:
        return StoredWeight(self.weight)

    def joined(self, bias: Tensor | None, mode: int, activation: str) -> Any:
        from minivllm.device.kernels.products import Product

        return Product(self.weight, bias, mode, activation)

    def apply(self, x: Tensor, out: Tensor | None = None, adapter: Any = None) -> Tensor:
        no_adapter(self, adapter)
        if self.fixed is not None:
            return self.fixed(x) if out is None else out.copy_(self.fixed(x))
        if self.row is not None and out is None and x.shape[0] == 1 and self.row.fits(x):
            return self.row(x)[0]
        if out is not None:
            return torch.mm(x, self.weight.t(), out=out)
        return matmul(x, self.weight, self.packed.of(x.shape[0]) if self.packed is not None else None)


class Linear(Module):
    """y = x W^T (+ b): x [T, in] -> [T, out], both this process's share.

    ``split="column"`` cuts the outputs of every part over the processes, ``"row"`` the inputs; a row-split layer sums
    its result over ``group`` (one all-reduce) and then adds the bias once.  Of a part of which there are copies
    neighbouring processes have the same share (``ModuleInfo.copies``).
    """

    def __init__(self, info: ModuleInfo, scheme: WeightScheme, group: Any = None) -> None:
        super().__init__(info.name)
        self.info, self.scheme, self.group = info, scheme, group
        self.reduce = info.split == "row" and info.shard.size > 1
        self.tensors = dict(scheme.tensors)
        self.bias: Tensor | None = None
        if info.bias:
            self.bias = torch.empty(info.out_features, dtype=getattr(torch, info.dtype), device=info.device)
            self.tensors["bias"] = self.bias

    def wanted(self) -> dict[tuple[str, str], tuple[int, ...] | None]:
        info = self.info
        inputs = info.in_features * (info.shard.size if info.split == "row" else 1)
        local = (info.out_features, info.in_features)
        want: dict[tuple[str, str], tuple[int, ...] | None] = {}
        for part, rows in info.parts:
            outputs = rows * (info.share(part).size if info.split == "column" else 1)
            for param, shape in self.scheme.params_of(part).items():
                want[part, param] = (outputs, inputs) if tuple(shape) == local else None
            if info.bias:
                want[part, "bias"] = (outputs,)
        return want

    def load(self, part: str, param: str, tensor: Tensor) -> None:
        info, shard = self.info, self.info.share(part)
        size = shard.size
        if param == "bias" and self.bias is not None:
            rows = part_rows(info, part)
            cut = size if info.split == "column" else 1
            check_shape(tensor, ((rows.stop - rows.start) * cut,))
            fill(self.bias[rows], tensor.chunk(cut)[shard.rank if cut > 1 else 0])
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
        self.tensors = dict(self.scheme.tensors)  # a scheme may have repacked: what it dropped is not kept alive here
        if self.bias is not None:
            self.tensors["bias"] = self.bias

    def stored(self) -> StoredWeight | None:
        return stored_by(self.scheme)

    def __call__(self, x: Tensor) -> Tensor:
        return self.summed(self.scheme.apply(x))

    def summed(self, y: Tensor) -> Tensor:
        """The result, of this process's part ``y`` [T, out] of the product; ``y`` belongs to the layer from then on."""
        if self.reduce:
            self.group.all_reduce(y)
        return y if self.bias is None else y.add_(self.bias)
