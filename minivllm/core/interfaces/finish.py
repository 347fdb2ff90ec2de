"""Why a sequence ended: the conversion of device flags into the finish reason that a client reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

from .plan import EOS, LENGTH, STOP_ID

#: Reasons why a sequence ended.  "stop": an end-of-sequence token, a stop token or a stop string ended the sequence.
#: "length": it reached its largest length.  "abort": the client cancelled the request.  "error": the step or a plug-in
#: failed; the ``error`` of the output describes it.
FinishReason = Literal["stop", "length", "abort", "error"]
FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)


class Finish(NamedTuple):
    """The reason for which a sequence ended.  ``stop`` is the stop token id or stop string that ended the sequence.  It
    is None for an end-of-sequence token and for other reasons."""

    reason: FinishReason
    stop: int | str | None = None

    @property
    def by_token(self) -> bool:
        """Return whether the last token ended the sequence.  That token is then not part of the text."""
        return self.reason == "stop" and not isinstance(self.stop, str)


def finish_of(flags: int, token: int) -> Finish | None:
    """Return the finish of a row that drew ``token``, from its ``plan.StepResult.flags``.  None means that the row goes
    on.

    Rows that failed have no finish here; their error is reported separately.
    """
    if flags & (EOS | STOP_ID):
        return Finish("stop", None if flags & EOS else token)
    return Finish("length") if flags & LENGTH else None


def eos_within(eos_ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    """Return the end-of-sequence ids of a model without repetitions and without ids outside its vocabulary."""
    return tuple(dict.fromkeys(i for i in eos_ids if i < vocab_size))
