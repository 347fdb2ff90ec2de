"""Draw with top-a: keep tokens with p >= a * max(p) ** 2, for a = ``my_plugin`` and p after the temperature.

The likelier the best token is, the fewer tokens are kept.
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

COLD = 1e-5  # below this temperature 1 / T overflows, and the draw is greedy


class MyPlugin(Sampler):
    """A sampler that draws argmax(logits / T + gumbel noise).  Requests with parameters that ``reads`` does not name,
    such as top_p, are refused."""

    reads = MY_PLUGIN.reads | {"temperature"}

    def columns(self) -> Mapping[str, Column]:
        return {"temperature": Column(), "a": Column()}  # float32 [S]; temperature 0 is greedy

    def bind(self, params: SamplingParams, prompt_len: int) -> Row:
        temperature = params.temperature if params.temperature >= COLD else 0.0
        return Row({"temperature": temperature, "a": params.my_plugin})

    def draw(self, logits: Tensor, rows: Rows, state: Mapping[str, Tensor], out: Draw) -> None:
        best = logits.argmax(dim=1)
        x = self.drawn_from(logits, rows, state)
        x += gumbel(rows.seed, rows.position, rows.sample, x.shape[1])
        is_random = state["temperature"][rows.slots] > 0
        tokens = torch.where(is_random, x.argmax(dim=1), best)
        out.tokens.copy_(tokens)

    def drawn_from(self, logits: Tensor, rows: Rows, state: Mapping[str, Tensor]) -> Tensor:
        temperature = state["temperature"][rows.slots]
        a = state["a"][rows.slots]
        x = logits - logits.amax(dim=1, keepdim=True)  # relative to the best, against overflow at small temperatures
        x /= torch.where(temperature > 0, temperature, 1.0)[:, None]
        highest = torch.softmax(x, dim=1).amax(dim=1)
        a = torch.where(temperature > 0, a, 0.0)  # a greedy row keeps all logits
        # p >= a * highest ** 2 and p = highest * exp(x); the best token has x = 0 and is kept, as a * highest <= 1
        least = (a * highest).log()[:, None]
        return x.masked_fill(x < least, float("-inf"))
