"""Only the tokens of a list may be drawn (vLLM's ``allowed_token_ids``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from minivllm.core.interfaces.sampling import Column, Processor, Row, Rows
from minivllm.device.worker.sampling import apply_mask

from .ids import token_ids

if TYPE_CHECKING:
    from minivllm.core.interfaces.params import SamplingParams


class AllowedTokens(Processor):
    """All other logits become -inf.  Column ``mask`` i32 [S, ceil(V / 32)]: bit t % 32 of word t // 32 allows token t,
    so the list may be as long as the vocabulary; a row without a list has all bits set."""

    reads = frozenset(("allowed_token_ids",))

    def columns(self) -> Mapping[str, Column]:
        return {"mask": Column((-(-self.ctx.vocab_size // 32),), "int32", -1)}

    def bind(self, params: SamplingParams, prompt_len: int) -> Row | None:
        if params.allowed_token_ids is None:
            return None
        vocab = self.ctx.vocab_size
        bits = np.zeros(-(-vocab // 32) * 32, bool)
        bits[token_ids(params.allowed_token_ids, vocab, "allowed_token_ids", vocab)] = True
        return Row({"mask": np.packbits(bits, bitorder="little").view("<i4")})

    def apply(self, logits: Tensor, rows: Rows, state: Mapping[str, Tensor]) -> None:
        apply_mask(logits, state["mask"][rows.slots])
