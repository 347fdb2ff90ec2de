"""Log-probabilities of prompt tokens.  They are computed by separate launches, never in a captured step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from . import sampling
from .build import fused

if TYPE_CHECKING:
    from minivllm.core.interfaces.executor import Wiring
    from minivllm.core.interfaces.model import Model
    from minivllm.core.interfaces.plan import StepPlan

    from .state import DeviceState

TILE = 1 << 24  # largest number of logits that are computed at a time: 64 MB in float32


def score_prompt(
    plan: StepPlan, hidden: Tensor, model: Model, state: DeviceState, wiring: Wiring, vocab_size: int
) -> tuple[Tensor, ...]:
    """Return the log-probabilities of the prompt tokens in ``plan.prompt``, as ``sampling.logprobs_of`` does.

    ``hidden`` [T, H] are the hidden states of all tokens of the step.  The output layer runs on parts of them, so that
    memory never has to hold the logits [T, V] of all tokens."""
    rows = plan.prompt[:, 0]
    counts = plan.prompt[:, 1].astype(np.int64)
    row = np.repeat(rows, counts)
    before = np.cumsum(counts) - counts
    ahead = np.arange(counts.sum()) - np.repeat(before, counts)
    first = np.cumsum(plan.q_len) - plan.q_len
    index = first[row] + ahead
    following = plan.computed[row] + ahead + 1
    columns = np.stack([index, plan.slots[row], following])
    at, slots, position = state.to(columns.astype(np.int64))
    tokens = state.tokens[slots, position].long()
    tile = max(1, TILE // vocab_size)
    fuse = fused(wiring)
    parts = []
    for i in range(0, len(tokens), tile):
        logits = model.logits(hidden[at[i : i + tile]])
        drawn = tokens[i : i + tile]
        parts.append(sampling.logprobs_of(logits, drawn, plan.prompt_topk, fuse, wiring.batch_invariant))
        del logits  # frees them before the logits of the next part are computed
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))
