"""Sequences of tokens that must not come (vLLM's ``bad_words``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from minivllm.core.interfaces.sampling import Column, Processor, Row, Rows
from minivllm.errors import RequestError, shown

from .ids import token_ids

if TYPE_CHECKING:
    from minivllm.core.interfaces.params import SamplingParams

MAX_WORDS = 256  # token sequences of a request
MAX_LEN = 16  # tokens of one
ANY, NOTHING = -1, -2  # in ``before``: matches whatever came; a position before the output


class BadWords(Processor):
    """The last token of a sequence becomes -inf where the output so far ends with the others; as in vLLM a sequence
    does not begin in the prompt.  A front door with a tokenizer has made token ids of words before.

    Columns: ``last`` i32 [S, MAX_WORDS], -1 = none; ``before`` i32 [S, MAX_WORDS, MAX_LEN - 1], what must have come
    before it, at the right end, filled up with ANY.
    """

    reads = frozenset(("bad_words",))

    def columns(self) -> Mapping[str, Column]:
        return {
            "last": Column((MAX_WORDS,), "int32", -1),
            "before": Column((MAX_WORDS, MAX_LEN - 1), "int32", ANY),
        }

    def bind(self, params: SamplingParams, prompt_len: int) -> Row | None:
        wanted = params.bad_words
        if wanted is None:
            return None
        _check(
            isinstance(wanted, (list, tuple)), f"bad_words={shown(wanted)}: expected a list of words or of token ids"
        )
        _check(
            len(wanted) <= MAX_WORDS, f"bad_words has {len(wanted)} sequences of tokens: expected at most {MAX_WORDS}"
        )
        last, before = np.full(MAX_WORDS, -1, np.int32), np.full((MAX_WORDS, MAX_LEN - 1), ANY, np.int32)
        for i, word in enumerate(wanted):
            ids = self._ids(word)
            last[i], rest = ids[-1], len(ids) - 1
            before[i, MAX_LEN - 1 - rest :] = ids[:-1]
        return Row({"last": last, "before": before}) if wanted else None

    def _ids(self, word: Any) -> np.ndarray:
        _check(
            not isinstance(word, str), f"bad_words: the word {shown(word)} needs a tokenizer: give lists of token ids"
        )
        return token_ids(word, self.ctx.vocab_size, "bad_words", MAX_LEN)

    def apply(self, logits: Tensor, rows: Rows, state: Mapping[str, Tensor]) -> None:
        at = rows.position[:, None] - torch.arange(MAX_LEN - 1, 0, -1, device=logits.device)  # [N, MAX_LEN - 1]
        came = rows.tokens[rows.slots[:, None], at.clamp(min=0)]
        came = torch.where(at >= rows.prompt[:, None], came, NOTHING)
        last, before = state["last"][rows.slots], state["before"][rows.slots]
        banned = ((before == came[:, None]) | (before == ANY)).all(dim=2) & (last >= 0)
        # added, not stored: what is not banned falls on token 0 with 0
        push = torch.where(banned, float("-inf"), 0.0).to(logits.dtype)
        logits.scatter_add_(1, torch.where(banned, last, 0).long(), push)


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise RequestError(message, "bad_words")
