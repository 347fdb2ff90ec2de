"""A bias added to the logits of given tokens (OpenAI's ``logit_bias``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from minivllm.core.interfaces.sampling import Column, Processor, Row, Rows
from minivllm.errors import RequestError, shown

if TYPE_CHECKING:
    from minivllm.core.interfaces.params import SamplingParams

MAX_ENTRIES = 300  # OpenAI's limit
LIMIT = 100.0


class LogitBias(Processor):
    """``logit_bias={token id: bias}``, bias from -100 (never, in practice) to 100; ids may be strings, as in JSON."""

    reads = frozenset(("logit_bias",))

    def columns(self) -> Mapping[str, Column]:
        return {"ids": Column((MAX_ENTRIES,), "int32", -1), "bias": Column((MAX_ENTRIES,))}

    def bind(self, params: SamplingParams, prompt_len: int) -> Row | None:
        wanted = params.logit_bias
        if wanted is None:
            return None
        _check(isinstance(wanted, Mapping), f"logit_bias={shown(wanted)}: expected a mapping from token id to bias")
        _check(len(wanted) <= MAX_ENTRIES, f"logit_bias has {len(wanted)} entries: expected at most {MAX_ENTRIES}")
        ids, bias = np.full(MAX_ENTRIES, -1, np.int32), np.zeros(MAX_ENTRIES, np.float32)
        for i, (key, value) in enumerate(wanted.items()):
            ids[i] = self._token(key)
            number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
            ok = number and -LIMIT <= value <= LIMIT  # NaN is not
            _check(ok, f"logit_bias[{shown(key)}]={shown(value)}: expected a number from -100 to 100")
            bias[i] = value
        _check(len(set(ids[: len(wanted)].tolist())) == len(wanted), "logit_bias names a token id twice")
        return Row({"ids": ids, "bias": bias}) if bias.any() else None

    def _token(self, key: Any) -> int:
        if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10:
            key = int(key)
        whole = isinstance(key, (int, np.integer)) and not isinstance(key, bool)
        size = self.ctx.vocab_size
        _check(
            whole and 0 <= key < size,
            f"logit_bias: token id {shown(key)} is not in the vocabulary: expected 0 to {size - 1}",
        )
        return int(key)

    def apply(self, logits: Tensor, rows: Rows, state: Mapping[str, Tensor]) -> None:
        ids, bias = state["ids"][rows.slots], state["bias"][rows.slots]
        # added, not stored: the padding entries all fall on token 0, with a bias of 0
        logits.scatter_add_(1, ids.clamp(min=0).long(), torch.where(ids >= 0, bias, 0.0))


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise RequestError(message, "logit_bias")
