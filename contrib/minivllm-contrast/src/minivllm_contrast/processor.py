"""Contrastive decoding (Li et al., arXiv:2210.15097), in the form of O'Brien and Lewis (arXiv:2309.09117).

Of a token let l be the logit of the model, and s that of the smaller one::

    kept      l >= max(l) + log(alpha)      its probability is at least alpha times that of the likeliest
    score     (1 + beta) * l - beta * s     of what is kept; all else gets -inf

The score is the logit that a sampler then draws from.  It is (1 + beta) log p - beta log q, but for a number that all
tokens of a row have in common.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from minivllm.plugin import Column, Processor, Row, Rows, SamplingContext

from .options import ContrastOptions
from .spec import CONTRAST

if TYPE_CHECKING:
    from minivllm import SamplingParams


class Contrast(Processor):
    """Contrast the logits of requests that set ``contrast_beta`` or ``contrast_alpha``.

    The logits of the smaller model come with the rows (``Rows.own_logits``).
    """

    reads = CONTRAST.reads
    options: ContrastOptions

    def __init__(self, options: ContrastOptions | None, ctx: SamplingContext) -> None:
        super().__init__(options or ContrastOptions(), ctx)

    def columns(self) -> Mapping[str, Column]:
        return {"beta": Column(), "below": Column()}

    def bind(self, params: SamplingParams, prompt_len: int) -> Row | None:
        beta, alpha = params.contrast_beta, params.contrast_alpha
        if beta is None and alpha is None:
            return None
        beta = self.options.beta if beta is None else beta
        alpha = self.options.alpha if alpha is None else alpha
        return Row({"beta": beta, "below": math.log(alpha)})

    def apply(self, logits: Tensor, rows: Rows, state: Mapping[str, Tensor]) -> None:
        assert rows.own_logits is not None
        beta, below = (state[name][rows.slots][:, None] for name in ("beta", "below"))
        unlikely = logits < logits.amax(dim=1, keepdim=True) + below
        logits.mul_(1 + beta).sub_(rows.own_logits.mul_(beta)).masked_fill_(unlikely, -math.inf)
