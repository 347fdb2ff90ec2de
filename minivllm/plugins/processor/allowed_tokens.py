"""Only the tokens of a list may be drawn (vLLM's ``allowed_token_ids``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from minivllm.core.interfaces.sampling import Column, Columns, Processor, Row, Rows, State
from minivllm.device.worker.sampling import apply_mask

from .ids import token_ids

if TYPE_CHECKING:
    from minivllm.core.interfaces.params import SamplingParams


class AllowedTokens(Processor):
    """A processor that sets the logits of all tokens outside of a request's list to -inf.

    Column ``mask`` is i32 [S, ceil(V / 32)].  Bit t % 32 of word t // 32 allows token t, so the list may be as long as
    the vocabulary.  A row without a list has all bits set.
    """

    reads = frozenset(("allowed_token_ids",))

    def columns(self) -> Columns:
        words = -(-self.ctx.vocab_size // 32)
        return {"mask": Column((words,), "int32", -1)}

    def bind(self, params: SamplingParams, prompt_len: int) -> Row | None:
        if params.allowed_token_ids is None:
            return None
        vocab = self.ctx.vocab_size
        bits = np.zeros(-(-vocab // 32) * 32, bool)
        allowed = token_ids(params.allowed_token_ids, vocab, "allowed_token_ids", vocab)
        bits[allowed] = True
        packed = np.packbits(bits, bitorder="little")
        return Row({"mask": packed.view("<i4")})

    def apply(self, logits: Tensor, rows: Rows, state: State) -> None:
        apply_mask(logits, state["mask"][rows.slots])
