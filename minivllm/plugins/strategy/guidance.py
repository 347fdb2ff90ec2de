"""Classifier-free guidance: the answer is drawn towards the prompt, away from a negative prompt (transformers'
``guidance_scale``)::

    p, q = log_softmax(logits after the prompt), log_softmax(logits after the negative prompt)
    logits = guidance_scale * (p - q) + q

Above 1 the prompt counts for more than it does by itself, at 1 nothing changes, and at 0 the negative prompt alone
speaks.  Without a negative prompt the other side has the last token of the prompt, so that what came before it counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from minivllm.core.interfaces.strategy import Branch, Guide
from minivllm.errors import RequestError, shown

from .parallel import Parallel
from .spec import GUIDANCE

if TYPE_CHECKING:
    from minivllm.core.interfaces.params import SamplingParams

SCALE, TEXT, IDS = "guidance_scale", "negative_prompt", "negative_prompt_token_ids"


class Guidance(Parallel):
    """Takes requests with ``guidance_scale``; each of n samples, or of best_of, has a guide."""

    reads = GUIDANCE.reads | {"best_of"}

    def takes(self, params: SamplingParams) -> bool:
        return _fault(params) is None

    def start(self, params: SamplingParams) -> Sequence[Branch]:
        if (fault := _fault(params)) is not None:
            raise fault
        ids = params.negative_prompt_token_ids
        guide = Guide(params.guidance_scale, tuple(map(int, ids or ())), SCALE if ids is None else IDS)
        return tuple(Branch(branch.sample, guide) for branch in super().start(params))


def _fault(params: SamplingParams) -> RequestError | None:
    """Return the reason why the strategy cannot serve a request, or None."""
    scale, text, ids = params.guidance_scale, params.negative_prompt, params.negative_prompt_token_ids
    given = IDS if ids is not None else TEXT if text else ""
    if scale == 1.0:
        if given:
            return RequestError(
                f"{given} without {SCALE}, or with {SCALE}=1, changes nothing: set another {SCALE}", given
            )
        return RequestError(f"{SCALE} is not set: the strategy 'guidance' is for requests that set it", SCALE)
    if (width := params.beam_width) is not None:
        return RequestError(f"beam_width={width}: expected no beam_width beside {SCALE}={scale:g}", "beam_width")
    if text and ids is not None:
        return RequestError(f"{TEXT} and {IDS} say the same: set only one of them", TEXT)
    if text:
        return RequestError(f"{TEXT}: a text needs a tokenizer; give {IDS}, or drop skip_tokenizer_init", TEXT)
    if ids is not None and not (len(ids) and all(_is_id(i) for i in ids)):
        expected = f"token ids, at least one; without {IDS} it is the last token of the prompt"
        return RequestError(f"{IDS}={shown(ids)}: expected {expected}", IDS)
    return None


def _is_id(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        return False
    return bool(0 <= value < 2**31)
