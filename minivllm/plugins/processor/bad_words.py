"""Prevent sequences of tokens in answers (vLLM's ``bad_words``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from minivllm.core.interfaces.sampling import Column, Columns, Processor, Row, Rows, State
from minivllm.errors import RequestError, shown

from .ids import ban, token_ids

if TYPE_CHECKING:
    from minivllm.core.interfaces.params import SamplingParams

MAX_WORDS = 256  # largest number of forbidden sequences of a request
MAX_LEN = 16  # largest number of tokens of a sequence
ANY = -1  # entry of the column ``before`` that matches every token
NOTHING = -2  # token id that stands for a position before the output


class BadWords(Processor):
    """A processor that sets the last token of a sequence to -inf if the output ends with its other tokens.

    As in vLLM, a sequence does not begin in the prompt.  The front door has already encoded words to token ids.

    Column ``last`` is i32 [S, MAX_WORDS], where -1 means no sequence.  Column ``before`` is i32 [S, MAX_WORDS,
    MAX_LEN - 1], the other tokens of a sequence at the right end of a row, which is padded with ANY.
    """

    reads = frozenset(("bad_words",))

    def columns(self) -> Columns:
        last = Column((MAX_WORDS,), "int32", -1)
        before = Column((MAX_WORDS, MAX_LEN - 1), "int32", ANY)
        return {"last": last, "before": before}

    def bind(self, params: SamplingParams, prompt_len: int) -> Row | None:
        words = params.bad_words
        if words is None:
            return None
        if not isinstance(words, (list, tuple)):
            raise _error(f"bad_words={shown(words)}: expected a list of words or of token ids")
        if len(words) > MAX_WORDS:
            raise _error(f"bad_words has {len(words)} sequences of tokens: expected at most {MAX_WORDS}")
        last = np.full(MAX_WORDS, -1, np.int32)
        before = np.full((MAX_WORDS, MAX_LEN - 1), ANY, np.int32)
        for i, word in enumerate(words):
            ids = self._ids(word)
            last[i] = ids[-1]
            before[i, MAX_LEN - len(ids) :] = ids[:-1]
        if not words:
            return None
        return Row({"last": last, "before": before})

    def _ids(self, word: Any) -> np.ndarray:
        if isinstance(word, str):
            raise _error(f"bad_words: the word {shown(word)} needs a tokenizer: give lists of token ids")
        return token_ids(word, self.ctx.vocab_size, "bad_words", MAX_LEN)

    def apply(self, logits: Tensor, rows: Rows, state: State) -> None:
        back = torch.arange(MAX_LEN - 1, 0, -1, device=logits.device)
        # index in the history of each of the last MAX_LEN - 1 tokens, [N, MAX_LEN - 1]
        at = rows.position[:, None] - back
        slots = rows.slots[:, None]
        output = rows.tokens[slots, at.clamp(min=0)]
        output = torch.where(at >= rows.prompt[:, None], output, NOTHING)
        last = state["last"][rows.slots]
        before = state["before"][rows.slots]
        matches = (before == output[:, None]) | (before == ANY)
        complete = matches.all(dim=2)
        ban(logits, last, complete & (last >= 0))


def _error(message: str) -> RequestError:
    return RequestError(message, "bad_words")
