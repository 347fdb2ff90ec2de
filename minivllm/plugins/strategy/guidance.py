"""Guide an answer towards the prompt and away from a negative prompt (transformers' ``guidance_scale``)::

    p, q = log_softmax(logits after the prompt), log_softmax(logits after the negative prompt)
    logits = guidance_scale * (p - q) + q

A scale above 1 strengthens the prompt, 1 changes nothing, and 0 uses only the negative prompt.  Without a negative
prompt, q follows the last token of the prompt, so that the guidance strengthens all tokens before it.
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
    """The strategy of requests with ``guidance_scale``.

    Each of the n (or best_of) samples has a guide: a second sequence with the negative prompt, or with the last token
    of the prompt if the request has no negative prompt.
    """

    reads = GUIDANCE.reads | {"best_of"}

    def takes(self, params: SamplingParams) -> bool:
        return _fault(params) is None

    def start(self, params: SamplingParams) -> Sequence[Branch]:
        if (fault := _fault(params)) is not None:
            raise fault
        ids = params.negative_prompt_token_ids
        field = SCALE if ids is None else IDS
        guide = Guide(params.guidance_scale, tuple(map(int, ids or ())), field)
        return tuple(Branch(branch.sample, guide) for branch in super().start(params))


def _fault(params: SamplingParams) -> RequestError | None:
    """Return the reason why the strategy cannot serve a request, or None."""
    scale = params.guidance_scale
    text = params.negative_prompt
    ids = params.negative_prompt_token_ids
    if scale == 1.0:
        if text or ids is not None:
            field = TEXT if ids is None else IDS
            problem = f"{field} without {SCALE}, or with {SCALE}=1, changes nothing: set another {SCALE}"
            return RequestError(problem, field)
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
