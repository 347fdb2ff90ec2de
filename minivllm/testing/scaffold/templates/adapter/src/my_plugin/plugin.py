"""Add a vector to the outputs of linear layers.  Change ``LayerVectors.__call__`` to change them in another way.

    adapter_config.json          {"peft_type": "MY_PLUGIN"}
    adapter_model.safetensors    {"model.layers.0.self_attn.q_proj": [outputs], ...}    by the layer of the checkpoint

A request names a folder.  ``read`` reads it in a thread, and ``store`` copies it to a place on the device.  In a step
each token has the place of its row's adapter, -1 for none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from minivllm.plugin import AdaptedModel, AdapterMemory, AdapterMethod, AdapterSource, adapter_refusal


class LayerVectors:
    """The vectors [places + 1, outputs] of a linear layer; the last one, of tokens without an adapter, is zero."""

    def __init__(self, memory: MyMemory, outputs: int) -> None:
        model = memory.model
        self.memory = memory
        self.vectors = torch.zeros(memory.none + 1, outputs, dtype=model.dtype, device=model.device)

    def __call__(self, product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return product(x) + self.vectors[self.memory.rows]


class MyMemory(AdapterMemory):
    """The adapters on the device."""

    def __init__(self, model: AdaptedModel, places: int) -> None:
        self.model = model
        self.none = places
        # the vectors of a layer whose inputs are split are added by one process, because results are summed
        whole = []
        for name, layer in model.layers.items():
            if layer.info.split != "row" or not layer.info.shard.rank:
                whole.append(name)
        self.layers = {}
        for name in whole:
            outputs = model.layers[name].info.out_features
            self.layers[name] = LayerVectors(self, outputs)
        self.rows = torch.zeros(0, dtype=torch.long)

    def layer(self, name: str) -> LayerVectors | None:
        return self.layers.get(name)

    def read(self, source: AdapterSource) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        if not source.names:
            raise adapter_refusal(source.folder, "there are no tensors")
        for name in source.names:
            target = source.target(name)
            values = source.tensor(name)
            if tuple(values.shape) != (target.outputs,) or not values.isfinite().all():
                raise adapter_refusal(source.folder, f"{name}: expected {target.outputs} finite numbers")
            if target.layer not in self.layers:
                continue
            if target.layer not in found:
                outputs = self.model.layers[target.layer].info.out_features
                found[target.layer] = self.model.zeros(outputs, self.model.dtype)
            for _, rows, share in target.rows(values):
                found[target.layer][rows] = share
        return found

    def store(self, place: int, loaded: dict[str, Tensor]) -> None:
        for name, layer in self.layers.items():
            if name in loaded:
                layer.vectors[place].copy_(loaded[name], non_blocking=True)
            else:
                layer.vectors[place].zero_()

    def begin(self, tokens: Tensor) -> None:
        self.rows = torch.where(tokens < 0, self.none, tokens).long()


class MyPlugin(AdapterMethod):
    """A method whose folders have vectors."""

    def check(self, folder: str, config: Mapping[str, Any]) -> None:
        for name in config:
            if name != "peft_type":
                raise adapter_refusal(folder, f"{name} is not implemented")

    def memory(self, model: AdaptedModel) -> MyMemory:
        return MyMemory(model, self.ctx.places)
