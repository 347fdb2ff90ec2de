"""Layers of drafters that read hidden states of the served model: one decoder layer behind a product of two inputs.

MTP       embedding ─ norm ─┐                            EAGLE-3   embedding ─ norm ─┐
          states ─── norm ──┴─ fc ─ layer ─ norm ─ head            states ─ fc ─ norm ┴─ layer ─ norm ─ head
                                                                            └─ stream ─┘
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minivllm.core.interfaces.decoder import AFTER, DecoderSpec
from minivllm.core.interfaces.model import StepTensors

from .decoder import DecoderBlock
from .fused import Normed
from .module_parts import ModuleParts


class PredictionHead:
    """A head for next-token prediction (MTP), with the embedding and the output layer of the served model.

    ``spec`` describes its layer.  A call returns the states [T, H] behind its norm."""

    def __init__(self, spec: DecoderSpec, parts: ModuleParts) -> None:
        hidden = spec.hidden
        self.embedding_norm = parts.norm("embedding_norm", hidden, spec.norm)
        self.hidden_norm = parts.norm("hidden_norm", hidden, spec.norm)
        self.fc = parts.linear("fc", 2 * hidden, [("", hidden)])
        before = spec.layers[0].norms != AFTER
        self.first = parts.norm("layers.0.norm1", hidden, spec.norm) if before else None
        self.norm = parts.norm("norm", hidden, spec.norm)
        self.block = DecoderBlock(spec, 0, parts, self.norm)
        self.target: Any = None

    def attach(self, target: Any) -> None:
        """Use the embedding and the output layer of the served model."""
        self.target = target

    def __call__(self, step: StepTensors) -> Tensor:
        assert step.hidden is not None
        embedding = self.embedding_norm(self.target.embedded(step.ids))[0]
        states = self.hidden_norm(step.hidden)[0]
        x = self.fc(torch.cat([embedding, states], dim=1))
        h, residual = Normed(x), x
        if self.first is not None:
            x, residual = self.first(x)
            h = Normed(x)
        h, _ = self.block(h, residual, step)
        return h.x

    def logits(self, hidden: Tensor) -> Tensor:
        return self.target.logits(hidden)
