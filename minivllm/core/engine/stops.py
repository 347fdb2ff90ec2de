"""The stop rule of a request: the token ids that end its sequences, and from which length on they do.

It also has the ids that a token mask forbids if possible.  The device applies the rule to all rows of a step (``Join``,
``worker.sampling.stop_flags``).  Here it is applied to one token that the host chose, or to a candidate of a beam
search."""

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
    """The conditions under which a sequence ends.

    Without a grammar no id of ``ids`` is drawn while the length is below ``min_end``.  A grammar may allow only such
    ids.  Then its mask forbids them as long as it allows other tokens, and an id that cannot be forbidden ends the
    sequence."""

    ids: tuple[int, ...] = ()  # token ids that end a sequence, the end-of-sequence ids first
    n_eos: int = 0
    min_end: int = 0  # length in tokens below which no stop id ends a sequence
    end: int = 0  # length in tokens at which a sequence ends in any case
    # Prompt length plus ``min_tokens``. Below this length a token mask forbids the ids
    # ``avoided_before`` if possible.
    min_length: int = 0
    avoided_before: tuple[int, ...] = ()
    # token ids that a mask forbids from ``min_length`` tokens on if possible
    avoided_after: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, params: SamplingParams, eos_ids: Sequence[int], prompt: int, end: int, grammar: bool
    ) -> StopRule:
        """Return the stop rule of a request.  ``eos_ids`` are the model's end-of-sequence ids within its vocabulary;
        ``prompt`` and ``end`` are lengths in tokens.  With a ``grammar`` the text ends where the grammar allows it,
        with an end-of-sequence token, even with ``ignore_eos``."""
        eos = () if params.ignore_eos and not grammar else tuple(eos_ids)
        ids = tuple(dict.fromkeys((*eos, *(params.stop_token_ids or ()))))
        # at most ``end``, because it is stored as int32
        min_length = min(prompt + params.min_tokens, end)
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
        """Return how a sequence of ``known`` tokens ends whose last token is ``token``, or None if it continues."""
        flags = LENGTH if known >= self.end else 0
        if token in self.ids and known > self.min_end:
            flags |= EOS if token in self.ids[: self.n_eos] else STOP_ID
        return finish_of(flags, token)

    def allowed(self, tokens: np.ndarray, known: int) -> np.ndarray:
        """Return bool, of the shape of ``tokens``: True for each token that may follow a sequence of ``known``
        tokens."""
        if known >= self.min_end:
            return np.ones(tokens.shape, bool)
        return ~np.isin(tokens, self.ids)
