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

HIDDEN, INNER = 16, 40
POINTS = {"embedding": HIDDEN, "layers.0.residual": HIDDEN}
_ATTENTION, _MLP = "model.layers.0.self_attn.", "model.layers.0.mlp."
# name of a layer in the checkpoint -> (number of outputs, number of inputs)
LAYERS = {
    _ATTENTION + "q_proj": (24, HIDDEN),
    _ATTENTION + "k_proj": (8, HIDDEN),
    _ATTENTION + "v_proj": (8, HIDDEN),
    _MLP + "gate_up_proj": (2 * INNER, HIDDEN),
    _MLP + "down_proj": (HIDDEN, INNER),
}
# name of a served layer -> (layer of the checkpoint -> the parts that it fills, dimension that is split)
_SERVED: dict[str, tuple[dict[str, tuple[str, ...]], str]] = {
    "layers.0.attn.qkv": ({f"{_ATTENTION}{part}_proj": (part,) for part in "qkv"}, "column"),
    "layers.0.mlp.gate_up": ({_MLP + "gate_up_proj": ("gate", "up")}, "column"),
    "layers.0.mlp.down": ({_MLP + "down_proj": ("",)}, "row"),
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
        weight = torch.randn(outputs, inputs, generator=generator) * inputs**-0.5
        bias = torch.randn(outputs, generator=generator).to(device)
        found[name] = Layer(weight.to(device), bias)
    return found


class ModelProcess:
    """The share of tensor-parallel process ``rank`` of ``size`` in the test model, with the adapter memory of a
    method."""

    def __init__(
        self, method: AdapterMethod, device: str, rank: int = 0, size: int = 1, invariant: bool = False
    ) -> None:
        self.shard = Shard(rank, size)
        self.layers = layers_of(device)
        self.infos = {name: self._info(name, device) for name in _SERVED}
        self.targets = {}
        for served, (sources, _) in _SERVED.items():
            for source, parts in sources.items():
                rule = Rule(source, served, parts)
                self.targets[source] = TargetLayer(self.infos[served], parts, rule)
        self.weights = {name: self._cut(name, "weight") for name in _SERVED}
        self.biases = {name: self._cut(name, "bias") for name in _SERVED}
        layers = {name: AdaptedLayer(info, self.biases[name]) for name, info in self.infos.items()}
        self.model = AdaptedModel(
            layers,
            POINTS,
            torch.float32,
            torch.device(device),
            invariant,
            lambda count, dtype: torch.zeros(count, dtype=dtype),
            lambda count, dtype: torch.full((count,), torch.nan, dtype=dtype),
        )
        self.memory: AdapterMemory = method.memory(self.model)
        self.changes = {name: self.memory.layer(name) for name in _SERVED}

    def _info(self, name: str, device: str) -> ModuleInfo:
        """Return the description of this process's shard of a served layer: its parts, sizes and split."""
        sources, split = _SERVED[name]
        size = self.shard.size
        parts = []
        for source, names in sources.items():
            rows = LAYERS[source][0] // len(names)
            parts += [(part, rows // size if split == "column" else rows) for part in names]
        inputs = LAYERS[next(iter(sources))][1]
        share = inputs // size if split == "row" else inputs
        return ModuleInfo(name, "linear", share, tuple(parts), "float32", device, True, split, self.shard)

    def _cut(self, name: str, kind: str) -> Tensor:
        """Return this process's shard of the weight or the bias (``kind``) of a served layer."""
        found = []
        for source in _SERVED[name][0]:
            values = getattr(self.layers[source], kind)
            target = self.targets[source]
            found += [share for _, _, share in target.rows(values)]
        joined = torch.cat(found)
        if kind == "weight":
            return self.targets[source].columns(joined).contiguous()
        return joined

    def read(self, folder: Path) -> Any:
        """Load an adapter folder into host memory with the method's ``read``."""
        with opened(folder / "adapter_model.safetensors") as file, torch.inference_mode():
            return self.memory.read(OpenFolder(str(folder), file, self.target))

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
            for name, change in self.changes.items():
                x = inputs[name]
                if self.infos[name].split == "row":
                    shards = x.chunk(self.shard.size, dim=1)
                    x = shards[self.shard.rank].contiguous()
                product = partial(_product, self.weights[name])
                found[name] = product(x) if change is None else change(product, x)
        return found

    def step(self, places: Sequence[int]) -> Any:
        """Return a context manager for a step whose tokens use the adapters in the slots ``places`` (-1 for none)."""
        slots = torch.tensor(places, dtype=torch.int32, device=self.model.device)
        return _AdaptedStep(self.memory, slots)

    def values(self, places: Sequence[int], loaded: Sequence[Any], x: Tensor) -> dict[str, Tensor]:
        """Return the value of each tap point in a step, [T, width] by point, for the value x without adapters.

        ``places`` has the slot of adapter memory of each token, or -1, and ``loaded`` the adapters that were stored.
        """
        changed = {point for one in loaded for point in self.memory.points(one)}
        with self.step(places):
            return {point: self.memory.at_point(point, x) if point in changed else x for point in POINTS}


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
    sizes = {}
    for name, (sources, _) in _SERVED.items():
        sizes[name] = LAYERS[next(iter(sources))][1]
    found = {}
    for name, size in sizes.items():
        x = torch.randn(tokens, size, generator=generator)
        found[name] = x.to(device)
    return found


def sources_of(name: str) -> dict[str, tuple[str, ...]]:
    """Return the checkpoint's layers that a served layer consists of, each with its parts."""
    return _SERVED[name][0]
