"""Add a bias to the logits of chosen tokens (OpenAI's ``logit_bias``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from minivllm.core.interfaces.sampling import Column, Columns, Processor, Row, Rows, State
from minivllm.errors import RequestError, shown

if TYPE_CHECKING:
    from minivllm.core.interfaces.params import SamplingParams

MAX_ENTRIES = 300  # OpenAI's limit
LIMIT = 100.0


class LogitBias(Processor):
    """A processor for ``logit_bias={token id: bias}``.

    A bias is from -100, which in practice prevents a token, to 100.  Ids may be strings, as in JSON.
    """

    reads = frozenset(("logit_bias",))

    def columns(self) -> Columns:
        ids = Column((MAX_ENTRIES,), "int32", -1)
        return {"ids": ids, "bias": Column((MAX_ENTRIES,))}

    def bind(self, params: SamplingParams, prompt_len: int) -> Row | None:
        biases = params.logit_bias
        if biases is None:
            return None
        _check(isinstance(biases, Mapping), f"logit_bias={shown(biases)}: expected a mapping from token id to bias")
        n = len(biases)
        _check(n <= MAX_ENTRIES, f"logit_bias has {n} entries: expected at most {MAX_ENTRIES}")
        ids = np.full(MAX_ENTRIES, -1, np.int32)
        bias = np.zeros(MAX_ENTRIES, np.float32)
        for i, (key, value) in enumerate(biases.items()):
            ids[i] = self._token(key)
            number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
            ok = number and -LIMIT <= value <= LIMIT  # false for NaN
            _check(ok, f"logit_bias[{shown(key)}]={shown(value)}: expected a number from -100 to 100")
            bias[i] = value
        distinct = set(ids[:n].tolist())
        _check(len(distinct) == n, "logit_bias names a token id twice")
        if not bias.any():
            return None
        return Row({"ids": ids, "bias": bias})

    def _token(self, key: Any) -> int:
        if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10:
            key = int(key)
        whole = isinstance(key, (int, np.integer)) and not isinstance(key, bool)
        last = self.ctx.vocab_size - 1
        known = whole and 0 <= key <= last
        _check(known, f"logit_bias: token id {shown(key)} is not in the vocabulary: expected 0 to {last}")
        return int(key)

    def apply(self, logits: Tensor, rows: Rows, state: State) -> None:
        ids = state["ids"][rows.slots]
        bias = state["bias"][rows.slots]
        # padding entries add a bias of 0 to token 0
        bias = torch.where(ids >= 0, bias, 0.0)
        tokens = ids.clamp(min=0)
        logits.scatter_add_(1, tokens.long(), bias)


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise RequestError(message, "logit_bias")
