"""Subtract ``my_plugin`` from the logit of each of the last ``last`` tokens of a sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minivllm.plugin import Column, Processor, Row, Rows, SamplingContext

from .options import Options
from .spec import MY_PLUGIN

if TYPE_CHECKING:
    from minivllm import SamplingParams


class MyPlugin(Processor):
    """A processor without state.  State would be in more columns, written in ``commit``; ``rows`` has all tokens."""

    reads = MY_PLUGIN.reads
    options: Options

    def __init__(self, options: Options | None, ctx: SamplingContext) -> None:
        super().__init__(options or Options(), ctx)

    def columns(self) -> Mapping[str, Column]:
        return {"penalty": Column()}  # float32 [S]

    def bind(self, params: SamplingParams, prompt_len: int) -> Row | None:
        if params.my_plugin:
            return Row({"penalty": params.my_plugin})
        return None

    def apply(self, logits: Tensor, rows: Rows, state: Mapping[str, Tensor]) -> None:
        back = torch.arange(1, self.options.last + 1, device=logits.device)
        at = rows.position[:, None] - back  # [N, last]; below 0 before the start
        valid = at >= 0
        tokens = rows.tokens[rows.slots[:, None], at.clamp(min=0)].long()
        tokens = torch.where(valid, tokens, 0)
        counts = torch.zeros_like(logits).scatter_add_(1, tokens, valid.to(logits.dtype))
        penalty = state["penalty"][rows.slots]
        logits -= (counts > 0) * penalty[:, None]
