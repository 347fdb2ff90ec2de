"""Layers of drafters that read hidden states of the served model: one decoder layer behind a product of two inputs.

MTP       embedding ─ norm ─┐                            EAGLE-3   embedding ─ norm ─┐
          states ─── norm ──┴─ fc ─ layer ─ norm ─ head            states ─ fc ─ norm ┴─ layer ─ norm ─ head
                                                                            └─ stream ─┘
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from minivllm.core.interfaces.decoder import AFTER, DecoderSpec
from minivllm.core.interfaces.model import StepTensors
from minivllm.errors import ModelError

from .decoder import DecoderBlock
from .fused import Normed
from .module import Module, Wanted
from .module_parts import ModuleParts


class PredictionHead:
    """A head for multi-token prediction (MTP), which uses the embedding and the output layer of the served model.

    ``spec`` describes its layer.  A call returns the states [T, H] after its norm.
    """

    def __init__(self, spec: DecoderSpec, parts: ModuleParts) -> None:
        hidden = spec.hidden
        self.spec = spec
        self.embedding_norm = parts.norm("embedding_norm", hidden, spec.norm)
        self.hidden_norm = parts.norm("hidden_norm", hidden, spec.norm)
        self.fc = parts.linear("fc", 2 * hidden, [("", hidden)])
        before = spec.layers[0].norms != AFTER
        self.first = parts.norm("layers.0.norm1", hidden, spec.norm) if before else None
        self.norm = parts.norm("norm", hidden, spec.norm)
        self.block = DecoderBlock(spec, 0, parts, self.norm)
        self.target: Any = None

    def attach(self, target: Any) -> None:
        """Store the served model, whose embedding and output layer this head uses."""
        self.target = target

    def __call__(self, step: StepTensors) -> Tensor:
        assert step.hidden is not None
        embedding = self.target.embedded(step.ids)
        embedding, _ = self.embedding_norm(embedding)
        states, _ = self.hidden_norm(step.hidden)
        both = torch.cat([embedding, states], dim=1)
        x = self.fc(both)
        h = Normed(x)
        residual = x
        if self.first is not None:
            x, residual = self.first(x)
            h = Normed(x)
        h, _ = self.block(h, residual, step)
        return h.x

    def logits(self, hidden: Tensor) -> Tensor:
        return self.target.logits(hidden)


class VocabularyMap(Module):
    """The token ids i64 [D] of the served model for the D outputs of a head.

    A checkpoint has the difference ``d2t`` i64 [D] of each id from its index, and perhaps ``t2d`` bool [V], which is
    true for the D ids.  ModelError if they contradict each other.
    """

    def __init__(self, name: str, drafted: int, vocab: int, params: Iterable[str], device: str) -> None:
        super().__init__(name)
        self.vocab = vocab
        self.shapes = {"d2t": (drafted,), "t2d": (vocab,)}
        self.params = tuple(params)
        self.ids = torch.arange(drafted, device=device)
        self.marked: Tensor | None = None  # ``t2d``
        self.tensors = {"ids": self.ids}

    def wanted(self) -> Wanted:
        return {("", param): self.shapes[param] for param in self.params}

    def load(self, part: str, param: str, tensor: Tensor) -> None:
        if tensor.is_floating_point():  # random numbers, of ``load_format="dummy"``
            return
        if param == "t2d":
            self.marked = tensor.bool().cpu()
            return
        ids = tensor.cpu() + torch.arange(len(tensor))
        wrong = ids[(ids < 0) | (ids >= self.vocab)]
        found = ""
        if len(wrong):
            found = str(int(wrong[0]))
        elif len(ids.unique()) < len(ids):
            found = "a token id twice"
        if found:
            raise ModelError(f"it maps an output to {found}; expected different ids from 0 to {self.vocab - 1}")
        self.ids.copy_(ids)

    def finish(self) -> None:
        if self.marked is None:
            self._check_differences()
            return
        marked = self.marked.nonzero()[:, 0]
        self.marked = None
        ids, _ = self.ids.cpu().sort()
        if not torch.equal(marked, ids):
            raise ModelError("d2t and t2d of the drafter's head name different token ids; download the files again")

    def _check_differences(self) -> None:
        """Raise ModelError if ``d2t`` holds token ids, which grow from each output to the next.

        Differences grow only where token ids are left out, and do not grow everywhere in a vocabulary."""
        differences = self.ids.cpu() - torch.arange(len(self.ids))
        if len(differences) > 1 and (differences.diff() > 0).all():
            raise ModelError("d2t of the drafter's head holds token ids; expected their differences from 0, 1, 2 ...")


class WideBlock(DecoderBlock):
    """A decoder layer whose projection of q, k and v reads two concatenated vectors of the hidden size for each
    token."""

    inputs = 2


class EagleHead:
    """The layer of EAGLE-3, with a separate output layer for ``drafted`` tokens.

    ``spec`` describes the layer.  ``states`` is the width of the hidden states that it reads.  ``params`` are the
    tensors of the vocabulary map in the checkpoint.  ``embeds`` means that the head has a separate embedding.
    """

    def __init__(
        self, spec: DecoderSpec, parts: ModuleParts, states: int, drafted: int, params: Sequence[str], embeds: bool
    ) -> None:
        hidden = spec.hidden
        self.vocab = spec.vocab
        self.reduced = drafted < spec.vocab
        self.embed: Any = None
        if embeds:
            self.embed = parts.embedding("embed", spec.vocab, hidden)
        self.fc = parts.linear("fc", states, [("", hidden)])
        self.embedding_norm = parts.norm("layers.0.norm1", hidden, spec.norm)
        self.hidden_norm = parts.norm("hidden_norm", hidden, spec.norm)
        self.block = WideBlock(spec, 0, parts, None)
        self.norm = parts.norm("norm", hidden, spec.norm)
        self.head = parts.lm_head("lm_head", hidden, drafted)
        vocabulary = VocabularyMap("map", drafted, spec.vocab, params, parts.device)
        self.map = parts.add(vocabulary)

    def attach(self, target: Any) -> None:
        """Store the embedding of the served model, unless this head has its own."""
        if self.embed is None:
            self.embed = target.embedded

    def __call__(self, step: StepTensors) -> Tensor:
        states = step.hidden
        assert states is not None
        if not step.drafted:
            states = self.fc(states)
        embedding = self.embed(step.ids)
        embedding, _ = self.embedding_norm(embedding)
        normed, _ = self.hidden_norm(states)
        both = torch.cat([embedding, normed], dim=1)
        _, stream = self.block(Normed(both), states, step)
        return stream

    def logits(self, hidden: Tensor) -> Tensor:
        normed, _ = self.norm(hidden)
        logits = self.head(normed)
        if not self.reduced:
            return logits
        every = logits.new_full((len(logits), self.vocab), -torch.inf)
        return every.index_copy_(1, self.map.ids, logits)
