"""Top-a: of the probabilities p after the temperature, tokens with p >= a * max(p) ** 2 stay, ``my_plugin=a``.

The surer the model is, the fewer tokens stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minivllm.plugin import Column, Draw, Row, Rows, Sampler, gumbel

from .spec import MY_PLUGIN

if TYPE_CHECKING:
    from minivllm import SamplingParams

COLD = 1e-5  # below this temperature 1 / T overflows: greedy


class MyPlugin(Sampler):
    """The draw is argmax(logits / T + gumbel noise).  top_p and others, which it does not name in
    ``reads``, are refused."""

    reads = MY_PLUGIN.reads | {"temperature"}

    def columns(self) -> Mapping[str, Column]:
        return {"temperature": Column(), "a": Column()}  # float32 [S]; temperature 0 is greedy

    def bind(self, params: SamplingParams, prompt_len: int) -> Row:
        return Row({"temperature": params.temperature if params.temperature >= COLD else 0.0, "a": params.my_plugin})

    def draw(self, logits: Tensor, rows: Rows, state: Mapping[str, Tensor], out: Draw) -> None:
        best = logits.argmax(dim=1)
        x = self.drawn_from(logits, rows, state)
        x += gumbel(rows.seed, rows.position, rows.sample, x.shape[1])
        out.tokens.copy_(torch.where(state["temperature"][rows.slots] > 0, x.argmax(dim=1), best))

    def drawn_from(self, logits: Tensor, rows: Rows, state: Mapping[str, Tensor]) -> Tensor:
        temperature, a = state["temperature"][rows.slots], state["a"][rows.slots]
        x = logits - logits.amax(dim=1, keepdim=True)  # relative to the best: no overflow at small temperatures
        x /= torch.where(temperature > 0, temperature, 1.0)[:, None]
        highest = torch.softmax(x, dim=1).amax(dim=1)
        a = torch.where(temperature > 0, a, 0.0)  # a greedy row takes the best of the logits as they are
        # p >= a * highest ** 2, and p = highest * exp(x); the best one has x = 0 and stays, as a * highest <= 1
        return x.masked_fill(x < (a * highest).log()[:, None], float("-inf"))
