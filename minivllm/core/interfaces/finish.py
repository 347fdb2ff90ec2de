"""Why a sequence has ended: the one encoding, from the flags of a device to what a client reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

from .plan import EOS, LENGTH, STOP_ID

#: "stop": an end-of-sequence token, a stop token or a stop string; "length": it has all the tokens that it may have;
#: "abort": whoever asked wants no more of it; "error": something failed, and its ``error`` says what.
FinishReason = Literal["stop", "length", "abort", "error"]
FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)


class Finish(NamedTuple):
    """``stop``: the stop token id or stop string that ended it; None for an end-of-sequence token or another reason."""

    reason: FinishReason
    stop: int | str | None = None

    @property
    def by_token(self) -> bool:
        """Its last token ended it, so that token is no part of the text."""
        return self.reason == "stop" and not isinstance(self.stop, str)


def finish_of(flags: int, token: int) -> Finish | None:
    """What the flags of a row that drew ``token`` say (``plan.StepResult.flags``); None if it goes on.  A row that
    failed has an error instead."""
    if flags & (EOS | STOP_ID):
        return Finish("stop", None if flags & EOS else token)
    return Finish("length") if flags & LENGTH else None


def eos_within(eos_ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    """The end-of-sequence ids of a model, each once, without those that its vocabulary does not have."""
    return tuple(dict.fromkeys(i for i in eos_ids if i < vocab_size))
