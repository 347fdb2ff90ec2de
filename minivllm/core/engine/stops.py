"""The stop rule of a request: which token ids end its sequences, from where on, and what a mask avoids before that.

The device applies it to all rows of a step (``Join``, ``worker.sampling.stop_flags``); here it is applied to one token
that the host chose, or that a search may go on with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minivllm.core.interfaces.finish import Finish, finish_of
from minivllm.core.interfaces.plan import EOS, LENGTH, STOP_ID

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minivllm.core.interfaces.params import SamplingParams


@dataclass(frozen=True)
class StopRule:
    """Of a request without a grammar no id in ``ids`` is drawn while the known length is below ``min_end``.  A grammar
    may leave nothing else to draw: its mask avoids ids while there are others, and those that it cannot avoid count."""

    ids: tuple[int, ...] = ()  # the first ``n_eos`` are end-of-sequence ids
    n_eos: int = 0
    min_end: int = 0  # known length before which none of them ends a sequence
    end: int = 0  # known length at which a sequence ends in any case
    # prompt and ``min_tokens``: known length below which a mask avoids ``avoided_before``
    min_length: int = 0
    avoided_before: tuple[int, ...] = ()
    avoided_after: tuple[int, ...] = ()  # and from there on these

    @classmethod
    def of(
        cls, params: SamplingParams, eos_ids: Sequence[int], prompt: int, end: int, grammar: bool
    ) -> StopRule:
        """``eos_ids``: the model's, within its vocabulary; ``prompt``: tokens; ``grammar``: a text may end where that
        says so, with an end-of-sequence token, whatever ``ignore_eos`` asks for."""
        eos = () if params.ignore_eos and not grammar else tuple(eos_ids)
        ids = tuple(dict.fromkeys((*eos, *(params.stop_token_ids or ()))))
        min_length = min(prompt + params.min_tokens, end)  # a column of int32 keeps it
        return cls(
            ids,
            len(eos),
            prompt if grammar else min_length,
            end,
            min_length,
            ids if params.min_tokens else (),
            tuple(eos_ids) if params.ignore_eos else (),
        )

    def finish(self, token: int, known: int) -> Finish | None:
        """How a sequence of ``known`` tokens ends with its last one, ``token``; None if it goes on."""
        flags = LENGTH if known >= self.end else 0
        if token in self.ids and known > self.min_end:
            flags |= EOS if token in self.ids[: self.n_eos] else STOP_ID
        return finish_of(flags, token)

    def allowed(self, tokens: np.ndarray, known: int) -> np.ndarray:
        """bool, of the shape of ``tokens``: whether a sequence of ``known`` tokens may go on with each of them."""
        if known >= self.min_end:
            return np.ones(tokens.shape, bool)
        return ~np.isin(tokens, self.ids)
