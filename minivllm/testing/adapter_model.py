"""A model of three served linear layers and two tap points, for the suite of adapters.

checkpoint                          served layer
q_proj, k_proj, v_proj              "layers.0.attn.qkv"      merged, outputs are split over processes
gate_up_proj                        "layers.0.mlp.gate_up"   two parts of one tensor, outputs are split
down_proj                           "layers.0.mlp.down"      inputs are split
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minivllm.core.interfaces.adapter import AdaptedLayer, AdaptedModel, AdapterMemory, AdapterMethod
from minivllm.core.interfaces.model import Rule
from minivllm.core.interfaces.quantizer import ModuleInfo, Shard
from minivllm.device.loading.adapter_weights import OpenFolder, TargetLayer
from minivllm.device.loading.tensor_files import opened
from minivllm.errors import RequestError, shown

HIDDEN = 16
INNER = 40
POINTS = {"embedding": HIDDEN, "layers.0.residual": HIDDEN}
_ATTENTION = "model.layers.0.self_attn."
_MLP = "model.layers.0.mlp."
# name of a layer in the checkpoint -> (number of outputs, number of inputs)
LAYERS = {
    _ATTENTION + "q_proj": (24, HIDDEN),
    _ATTENTION + "k_proj": (8, HIDDEN),
    _ATTENTION + "v_proj": (8, HIDDEN),
    _MLP + "gate_up_proj": (2 * INNER, HIDDEN),
    _MLP + "down_proj": (HIDDEN, INNER),
}
# name of a served layer -> (layer of the checkpoint -> the parts that it fills, dimension that is split)
Sources = dict[str, tuple[str, ...]]
_QKV: Sources = {f"{_ATTENTION}{part}_proj": (part,) for part in "qkv"}
_GATE_UP: Sources = {_MLP + "gate_up_proj": ("gate", "up")}
_DOWN: Sources = {_MLP + "down_proj": ("",)}
_SERVED: dict[str, tuple[Sources, str]] = {
    "layers.0.attn.qkv": (_QKV, "column"),
    "layers.0.mlp.gate_up": (_GATE_UP, "column"),
    "layers.0.mlp.down": (_DOWN, "row"),
}


@dataclass(frozen=True)
class Layer:
    """A linear layer of the checkpoint, float32: ``weight`` [outputs, inputs] and ``bias`` [outputs]."""

    weight: Tensor
    bias: Tensor


def layers_of(device: str) -> dict[str, Layer]:
    """Return the random layers of the checkpoint by name; they are the same in each call."""
    generator = torch.Generator().manual_seed(5)
    found = {}
    for name, (outputs, inputs) in LAYERS.items():
        weight = torch.randn(outputs, inputs, generator=generator)
        weight = weight * inputs**-0.5
        bias = torch.randn(outputs, generator=generator)
        found[name] = Layer(weight.to(device), bias.to(device))
    return found


def _zeros(count: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(count, dtype=dtype)


def _nans(count: int, dtype: torch.dtype) -> Tensor:
    return torch.full((count,), torch.nan, dtype=dtype)


class ModelProcess:
    """The share of tensor-parallel process ``rank`` of ``size`` in the test model, with the adapter memory of a
    method."""

    def __init__(
        self, method: AdapterMethod, device: str, rank: int = 0, size: int = 1, invariant: bool = False
    ) -> None:
        self.shard = Shard(rank, size)
        self.layers = layers_of(device)
        self.infos = {}
        self.targets = {}
        for served, (sources, _) in _SERVED.items():
            info = self._info(served, device)
            self.infos[served] = info
            for source, parts in sources.items():
                rule = Rule(source, served, parts)
                self.targets[source] = TargetLayer(info, parts, rule)
        self.weights = {}
        self.biases = {}
        layers = {}
        for served, info in self.infos.items():
            bias = self._cut(served, "bias")
            self.weights[served] = self._cut(served, "weight")
            self.biases[served] = bias
            layers[served] = AdaptedLayer(info, bias)
        place = torch.device(device)
        self.model = AdaptedModel(layers, POINTS, torch.float32, place, invariant, _zeros, _nans)
        self.memory: AdapterMemory = method.memory(self.model)
        self.changes = {name: self.memory.layer(name) for name in _SERVED}

    def _info(self, name: str, device: str) -> ModuleInfo:
        """Return the description of this process's shard of a served layer: its parts, sizes and split."""
        sources, split = _SERVED[name]
        size = self.shard.size
        parts = []
        for source, names in sources.items():
            outputs, inputs = LAYERS[source]
            rows = outputs // len(names)
            if split == "column":
                rows //= size
            parts += [(part, rows) for part in names]
        share = inputs // size if split == "row" else inputs
        return ModuleInfo(name, "linear", share, tuple(parts), "float32", device, True, split, self.shard)

    def _cut(self, name: str, kind: str) -> Tensor:
        """Return this process's shard of the weight or the bias (``kind``) of a served layer."""
        found = []
        sources, _ = _SERVED[name]
        for source in sources:
            values = getattr(self.layers[source], kind)
            target = self.targets[source]
            found += [share for _, _, share in target.rows(values)]
        joined = torch.cat(found)
        if kind == "weight":
            return target.columns(joined).contiguous()
        return joined

    def read(self, folder: Path) -> Any:
        """Load an adapter folder into host memory with the method's ``read``."""
        with opened(folder / "adapter_model.safetensors") as file, torch.inference_mode():
            opened_folder = OpenFolder(str(folder), file, self.target)
            return self.memory.read(opened_folder)

    def store(self, folders: Sequence[Path | None]) -> list[Any]:
        """Load adapter folders and store them in the slots of adapter memory with their indices.

        None leaves a slot as it is.  Return the loaded adapters.
        """
        loaded = [None if folder is None else self.read(folder) for folder in folders]
        for place, adapter in enumerate(loaded):
            if adapter is not None:
                self.memory.store(place, adapter)
        return loaded

    def target(self, name: str) -> TargetLayer:
        """Return the served layer and the rows that hold a layer of the checkpoint.  RequestError for an unknown
        name."""
        if name not in self.targets:
            raise RequestError(f"its target {shown(name)} is no layer of this model", "lora_request")
        return self.targets[name]

    def outputs(self, places: Sequence[int], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return this process's product of each served layer in a step, without the bias, [T, out] by name.

        ``places`` has the slot of adapter memory of each token, or -1.  ``inputs`` has the whole input [T, in] of each
        served layer.
        """
        found = {}
        with self.step(places):
            for name in self.changes:
                x = inputs[name]
                if self.infos[name].split == "row":
                    shards = x.chunk(self.shard.size, dim=1)
                    x = shards[self.shard.rank].contiguous()
                found[name] = self.output(name, x)
        return found

    def output(self, name: str, x: Tensor) -> Tensor:
        """Return the product [T, out] of a served layer in a step that has begun; x [T, in] is its own input."""
        product = partial(_product, self.weights[name])
        change = self.changes[name]
        if change is None:
            return product(x)
        return change(product, x)

    def step(self, places: Sequence[int]) -> Any:
        """Return a context manager for a step whose tokens use the adapters in the slots ``places`` (-1 for none)."""
        slots = torch.tensor(places, dtype=torch.int32, device=self.model.device)
        return _AdaptedStep(self.memory, slots)

    def values(self, places: Sequence[int], loaded: Sequence[Any], x: Tensor) -> dict[str, Tensor]:
        """Return the value of each tap point in a step, [T, width] by point, for the value x without adapters.

        ``places`` has the slot of adapter memory of each token, or -1, and ``loaded`` the adapters that were stored.
        """
        changed = {point for one in loaded for point in self.memory.points(one)}
        found = dict.fromkeys(POINTS, x)
        with self.step(places):
            for point in POINTS:
                if point in changed:
                    found[point] = self.memory.at_point(point, x)
        return found


class _AdaptedStep:
    """A context manager that calls the adapter memory's ``begin`` with the slots of a step's tokens, and then its
    ``end``."""

    def __init__(self, memory: AdapterMemory, tokens: Tensor) -> None:
        self.memory = memory
        self.tokens = tokens

    def __enter__(self) -> None:
        self.memory.begin(self.tokens)

    def __exit__(self, *exc: Any) -> None:
        self.memory.end()


def _product(weight: Tensor, x: Tensor) -> Tensor:
    return x @ weight.T


def inputs_of(tokens: int, device: str, seed: int = 0) -> dict[str, Tensor]:
    """Return random inputs of each served layer for a step of some tokens, [tokens, in] by name, not split."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, (sources, _) in _SERVED.items():
        _, size = LAYERS[next(iter(sources))]
        x = torch.randn(tokens, size, generator=generator)
        found[name] = x.to(device)
    return found


def sources_of(name: str) -> dict[str, tuple[str, ...]]:
    """Return the checkpoint's layers that a served layer consists of, each with its parts."""
    sources, _ = _SERVED[name]
    return sources
