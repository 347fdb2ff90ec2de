"""Help tests of compression: a model of transformers whose queries do not see removed keys, and preemptions."""

from __future__ import annotations

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from minivllm.core.engine.planner import Planner
from minivllm.device.worker.compaction import Compactor

NAME = "minivllm_compressed"


class Recorder:
    """The tokens that each compression of an engine removes.

    ``removed[layer]`` [kv_heads, tokens] is the number of computed tokens at which each token was removed, or NEVER."""

    NEVER = 1 << 30

    def __init__(self, monkeypatch, layers: int) -> None:
        self.removed: list[np.ndarray | None] = [None] * layers
        self.events: list[tuple[int, int, int]] = []  # (computed, stored, kept)
        real = Compactor._chosen

        def chosen(compactor, layers, row, scores):
            kept = real(compactor, layers, row, scores)
            for layer, tokens in zip(layers, kept.cpu(), strict=True):
                self._note(layer.index, tokens.numpy(), row.stored, row.computed)
                if layer.index == 0:
                    self.events.append((row.computed, row.stored, row.kept))
            return kept

        monkeypatch.setattr(Compactor, "_chosen", chosen)

    def _note(self, layer: int, chosen: np.ndarray, stored: int, computed: int) -> None:
        heads = len(chosen)
        removed = self.removed[layer]
        grown = np.full((heads, computed), self.NEVER)
        if removed is not None:
            grown[:, : removed.shape[1]] = removed
        for head in range(heads):
            there = np.flatnonzero(grown[head] == self.NEVER)
            assert len(there) == stored
            gone = np.setdiff1d(there, there[chosen[head]])
            grown[head, gone] = computed
        self.removed[layer] = grown

    def visible(self, layer: int, heads: int, tokens: int) -> torch.Tensor:
        """Return bool [heads, tokens, tokens]: the keys that each query sees."""
        at = np.arange(tokens)
        causal = at[None, :] <= at[:, None]
        removed = self.removed[layer]
        if removed is None:
            return torch.from_numpy(np.broadcast_to(causal, (heads, tokens, tokens)).copy())
        whole = np.full((len(removed), tokens), self.NEVER)
        n = min(tokens, removed.shape[1])
        whole[:, :n] = removed[:, :n]
        seen = causal[None] & (at[None, :, None] < whole[:, None, :])
        return torch.from_numpy(seen.repeat(heads // len(removed), axis=0))


def logits_of(model, tokens: list[int], recorder: Recorder) -> torch.Tensor:
    """Return the logits f32 [tokens, V] of a model of transformers whose queries see the tokens that
    ``recorder`` kept.
    """

    def attend(module, query, key, value, mask, scaling=None, softcap=None, sliding_window=None, **_):
        heads, n = query.shape[1], query.shape[2]
        key = key.repeat_interleave(heads // key.shape[1], dim=1)
        value = value.repeat_interleave(heads // value.shape[1], dim=1)
        scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        seen = recorder.visible(module.layer_idx, heads, n)
        if sliding_window is not None:
            at = torch.arange(n)
            seen = seen & (at[:, None] - at[None] < sliding_window)
        out = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        with torch.inference_mode():
            return model(torch.tensor([tokens])).logits[0].float()
    finally:
        model.set_attn_implementation(before)


def preempt_often(monkeypatch):
    """Preempt a running row in every third step, each row at most five times."""
    real = Planner.next

    def plan(planner, now):
        rows = planner.slots.running
        if len(rows) and planner.step_id % 3 == 0 and planner.slots.preempted[rows[-1]] < 5:
            planner.preempt(int(rows[-1]))
        return real(planner, now)

    monkeypatch.setattr(Planner, "next", plan)
