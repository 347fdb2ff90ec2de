"""The memory of IA3, an adapter that multiplies the inputs and outputs of linear layers by factors.

    inputs[layer]   [places + 1, in]     factors of the inputs of a layer (``feedforward_modules``)
    outputs[layer]  [places + 1, out]    factors of its outputs
    y [T, out]  =  outputs[place] * (product(x * inputs[place]) + bias)

A place is the slot of one loaded adapter, here the index of its row.  The row of an adapter that does not change the
layer is ones, and so is the last row, for tokens without an adapter.  The layer adds its bias later, so the bias times
(factor - 1) is added to the product.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minivllm.core.interfaces.adapter import (
    AdaptedLayer,
    AdaptedModel,
    AdapterMemory,
    AdapterSource,
    AdapterTarget,
    LayerChange,
    adapter_refusal,
)
from minivllm.device.layers.module import all_finite
from minivllm.errors import brief, shown

from .peft_config import MERGE
from .peft_targets import DROP, read_targets

NAME = re.compile(r"(base_model\.model\.)?(?P<module>.+)\.ia3_l(\.default)?")


class Factors(NamedTuple):
    """The factors of one adapter in host memory, by layer."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]

    @property
    def layers(self) -> frozenset[str]:
        """Return the layers that the adapter changes."""
        return frozenset(self.inputs) | frozenset(self.outputs)


class LayerFactors:
    """The factors of one layer for every place (slot for one loaded adapter on the device)."""

    def __init__(self, memory: IA3Memory, name: str, layer: AdaptedLayer) -> None:
        self.memory = memory
        self.name = name
        rows = memory.none + 1
        info = layer.info
        model = memory.model
        options: dict[str, Any] = {"dtype": model.dtype, "device": model.device}
        self.inputs = torch.ones(rows, info.in_features, **options)
        self.outputs = torch.ones(rows, info.out_features, **options)
        # if the results of several processes are added, only one of them adds the bias
        adds_bias = info.split != "row" or info.shard.rank == 0
        self.bias = layer.bias if adds_bias else None

    def store(self, place: int, factors: Factors) -> None:
        """Copy the factors of an adapter to a place (slot on the device).  A layer that the adapter does not change
        gets ones.
        """
        memories = (self.inputs, factors.inputs), (self.outputs, factors.outputs)
        for memory, by_layer in memories:
            row = memory[place]
            if self.name in by_layer:
                row.copy_(by_layer[self.name], non_blocking=True)
            else:
                row.fill_(1)

    def __call__(self, product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return product(x) [T, out], with inputs and outputs multiplied by the factors of each token's adapter; x is
        [T, in].
        """
        memory = self.memory
        if memory.rows is None:
            return product(x)
        if memory.used is not None and self.name not in memory.used:
            return product(x)
        y = product(x * self.inputs[memory.rows])
        factors = self.outputs[memory.rows]
        if self.bias is None:
            return y * factors
        return y * factors + self.bias * (factors - 1)


class IA3Memory(AdapterMemory):
    """The factors of all loaded adapters for all linear layers."""

    def __init__(self, model: AdaptedModel, places: int) -> None:
        self.model = model
        self.none = places
        self.changes = {name: LayerFactors(self, name, layer) for name, layer in model.layers.items()}
        self.layers: list[frozenset[str]] = [frozenset()] * places  # layers that the adapter in each place changes
        self.rows: Tensor | None = None  # i64 [T] index of the row of factors for each token of the step
        # layers that the adapters of the step change; None means that all layers are multiplied, because the adapters
        # of a step on a GPU are not read on the host
        self.used: frozenset[str] | None = None

    def layer(self, name: str) -> LayerChange:
        return self.changes[name]

    # ---- adapters ----------------------------------------------------------------------------------------------------

    def read(self, source: AdapterSource) -> Factors:
        found = Factors({}, {})
        if not source.names:
            raise adapter_refusal(source.folder, "its file of weights has no tensors")
        targets = read_targets(source.folder, source.config)
        seen: dict[str, str] = {}  # name of a module -> name of its tensor
        for name in source.names:
            match = NAME.fullmatch(name)
            if match is None:
                raise adapter_refusal(source.folder, f"tensor {shown(name)} is not adapted: expected factors, ia3_l")
            module = match["module"]
            other = seen.setdefault(module, name)
            if other != name:
                what = f"{shown(other)} and {shown(name)} are factors of the same layer"
                raise adapter_refusal(source.folder, f"{what}; expected each layer once")
            if why := targets.refusal(module):
                raise adapter_refusal(source.folder, f"{brief(module)} has weights, but {why}: {DROP}")
            target = source.target(module)
            self._take(source, name, target, found)
        return found

    def _take(self, source: AdapterSource, name: str, target: AdapterTarget, found: Factors) -> None:
        """Add a tensor of a folder to the factors ``found``.  Raise RequestError if it does not fit the model."""
        shape = source.shape(name)
        values = source.tensor(name)
        dtype = str(self.model.dtype).removeprefix("torch.")
        if not all_finite(values, self.model.dtype):
            raise adapter_refusal(source.folder, f"{brief(name)}: its factors are not all finite numbers in {dtype}")
        layer = self.model.layers[target.layer]
        if shape == (target.outputs, 1):
            factors = self._of(found.outputs, target.layer, layer.info.out_features)
            for _, rows, share in target.rows(values[:, 0]):
                factors[rows] = share
        elif shape == (1, target.inputs):
            if len(target.parts) < len(layer.info.parts):
                merged = ", ".join(part for part, _ in layer.info.parts)
                what = f"{brief(name)} has factors of the inputs of one part of a merged layer ({merged})"
                raise adapter_refusal(source.folder, f"{what}, which is not implemented: {MERGE}")
            factors = self._of(found.inputs, target.layer, layer.info.in_features)
            factors.copy_(target.columns(values[0]))
        else:
            expected = f"[{target.outputs}, 1] (outputs) or [1, {target.inputs}] (inputs)"
            what = f"{brief(name)} has shape {list(shape)}, expected {expected}; it was trained on another model"
            raise adapter_refusal(source.folder, what)

    def _of(self, factors: dict[str, Tensor], layer: str, size: int) -> Tensor:
        """Return the factors [size] of a layer in host memory.  They are created as ones if ``factors`` does not have
        the layer.
        """
        if layer not in factors:
            zeros = self.model.zeros(size, self.model.dtype)
            factors[layer] = zeros.fill_(1)
        return factors[layer]

    def store(self, place: int, loaded: Factors) -> None:
        before = self.layers[place]
        self.layers[place] = loaded.layers
        for name in before | loaded.layers:
            self.changes[name].store(place, loaded)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def begin(self, tokens: Tensor) -> None:
        self.rows = torch.where(tokens < 0, self.none, tokens).long()
        self.used = None
        if chooses_layers(tokens.device):
            places = tokens.unique().tolist()
            changed = [self.layers[place] for place in places if place >= 0]
            self.used = frozenset().union(*changed)

    def end(self) -> None:
        self.rows = self.used = None


def chooses_layers(device: torch.device) -> bool:
    """Return whether a step multiplies only the layers that its adapters change.

    This needs the adapters of the step on the host, where only a CPU has them without waiting.
    """
    return device.type == "cpu"
