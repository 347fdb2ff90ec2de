"""Log-probabilities that a request asks for: how many it may have, and those of its prompt.

A prompt's come from the steps that compute it, in parts, one a chunk.  The prefix cache is left out until they are all
there: a cached block has no log-probabilities.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.core.interfaces.plan import LogProbs, StepPlan
from minivllm.errors import RequestError, shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from minivllm.core.interfaces.executor import Wiring

    from .request import Request, Seq
    from .slots import Slots


def check_logprobs(request: Request, wiring: Wiring, vocab: int) -> None:
    """Sets how many the client is told and how many the device has to give.  RequestError: more than the engine allows,
    or a parameter that has no part in the log-probabilities by which branches are ranked."""
    p, most = request.params, vocab if wiring.max_logprobs < 0 else min(wiring.max_logprobs, vocab)
    for name in ("logprobs", "prompt_logprobs"):
        k = getattr(p, name)
        if k is not None and (vocab if k < 0 else min(k, vocab)) > most:
            raise RequestError(
                f"{name}={shown(k)}: want at most {most} of {vocab} tokens; raise the engine's max_logprobs "
                f"(it is {wiring.max_logprobs}; -1: no limit)",
                name,
            )
    k = p.prompt_logprobs
    request.prompt_topk = (
        -1 if k is None or len(request.prompt) == 1 else vocab if k < 0 else min(k, vocab)
    )
    request.logprobs = vocab if (p.logprobs or 0) < 0 else p.logprobs or 0
    asked = request.topk + len(request.stops.ids) if request.beams is not None else request.topk
    request.topk = min(max(-1 if p.logprobs is None else request.logprobs, asked), vocab)
    raw = [name for name in p.asked() if name != "temperature" or not p.greedy]
    if request.beams is not None and raw and wiring.logprobs_mode == "raw_logprobs":
        raise RequestError(
            f"{raw[0]} has no part in the model's own log-probabilities, by which branches are ranked; leave it out, "
            "or set the engine's logprobs_mode to 'processed_logprobs'",
            raw[0],
        )


def prompt_rows(
    s: Slots, slots: np.ndarray, computed: np.ndarray, q_len: np.ndarray
) -> dict[str, Any]:
    """``prompt`` and ``prompt_topk`` of plan.StepPlan for the rows of a step."""
    count = np.minimum(q_len, s.prompt[slots] - 1 - computed)
    rows = np.flatnonzero((s.prompt_topk[slots] >= 0) & (count > 0))
    return {
        "prompt": np.stack([rows, count[rows]], axis=1).astype(np.int32),
        "prompt_topk": int(s.prompt_topk[slots[rows]].max(initial=0)),
    }


def keep_prompt(
    s: Slots, plan: StepPlan, sequence: Callable[[int], Seq | None], got: LogProbs
) -> None:
    """Parts of prompts to their requests; who has all is not asked again.  ``sequence`` gives that of a row of the
    step, also one that was preempted meanwhile: it keeps what the step has drawn for it, and may end by that.  If it
    begins anew, what comes later counts."""
    at = 0
    for row, count in plan.prompt.tolist():
        part, at = slice(at, at + count), at + count
        seq = sequence(row)
        if seq is None or seq.request.prompt_topk < 0:
            continue
        request, k = seq.request, seq.request.prompt_topk
        first = int(plan.computed[row]) + 1
        mine = LogProbs(got.chosen[part], got.rank[part], got.top_ids[part, :k], got.top[part, :k])
        request.prompt_parts.append((first, mine))
        if first + count == len(request.prompt):
            request.prompt_topk = -1
            if seq.slot >= 0:
                s.prompt_topk[seq.slot] = -1
                s.asking -= 1
