"""Log-probabilities of a request: how many a client may request, and the log-probabilities of the prompt's tokens.

The steps that compute a prompt return its log-probabilities, one part per chunk.  The prefix cache is not used until
all parts are collected, because a cached block has no log-probabilities."""

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
    """Set how many log-probabilities per token the client receives, and how many the device returns.

    RequestError if the client requests more than the engine allows.  With ``logprobs_mode=raw_logprobs`` RequestError
    too for a beam search with sampling parameters, because the log-probabilities that rank its beams ignore them."""
    p = request.params
    most = vocab if wiring.max_logprobs < 0 else min(wiring.max_logprobs, vocab)
    for name in ("logprobs", "prompt_logprobs"):
        k = getattr(p, name)
        if k is not None and (vocab if k < 0 else min(k, vocab)) > most:
            raise RequestError(
                f"{name}={shown(k)}: expected at most {most} of {vocab} tokens; raise the engine's max_logprobs "
                f"(it is {wiring.max_logprobs}; -1: no limit)",
                name,
            )
    k = p.prompt_logprobs
    request.prompt_topk = (
        -1 if k is None or len(request.prompt) == 1 else vocab if k < 0 else min(k, vocab)
    )
    request.logprobs = vocab if (p.logprobs or 0) < 0 else p.logprobs or 0
    requested = request.topk + len(request.stops.ids) if request.beams is not None else request.topk
    request.topk = min(max(-1 if p.logprobs is None else request.logprobs, requested), vocab)
    raw = [name for name in p.changed_parameters() if name != "temperature" or not p.greedy]
    if request.beams is not None and raw and wiring.logprobs_mode == "raw_logprobs":
        raise RequestError(
            f"{raw[0]} does not change the model's raw log-probabilities, by which the beams are ranked; leave it "
            "out, or set the engine's logprobs_mode to 'processed_logprobs'",
            raw[0],
        )


def prompt_rows(
    s: Slots, slots: np.ndarray, computed: np.ndarray, q_len: np.ndarray
) -> dict[str, Any]:
    """Return the columns ``prompt`` and ``prompt_topk`` of plan.StepPlan: the prompt tokens of the step whose
    log-probabilities are requested."""
    count = np.minimum(q_len, s.prompt[slots] - 1 - computed)
    rows = np.flatnonzero((s.prompt_topk[slots] >= 0) & (count > 0))
    return {
        "prompt": np.stack([rows, count[rows]], axis=1).astype(np.int32),
        "prompt_topk": int(s.prompt_topk[slots[rows]].max(initial=0)),
    }


def keep_prompt(
    s: Slots, plan: StepPlan, sequence: Callable[[int], Seq | None], got: LogProbs
) -> None:
    """Append the log-probabilities of prompt tokens that a step returned to their requests.

    They are not requested again once a request has all of them.  ``sequence(row)`` returns the sequence of a plan row,
    also if it was preempted in the meantime, or None if it has ended.  Tokens that are computed again after a
    preemption replace the earlier ones."""
    at = 0
    for row, count in plan.prompt.tolist():
        part = slice(at, at + count)
        at = at + count
        seq = sequence(row)
        if seq is None or seq.request.prompt_topk < 0:
            continue
        request = seq.request
        k = seq.request.prompt_topk
        first = int(plan.computed[row]) + 1
        mine = LogProbs(got.chosen[part], got.rank[part], got.top_ids[part, :k], got.top[part, :k])
        request.prompt_parts.append((first, mine))
        if first + count == len(request.prompt):
            request.prompt_topk = -1
            if seq.slot >= 0:
                s.prompt_topk[seq.slot] = -1
                s.asking -= 1
