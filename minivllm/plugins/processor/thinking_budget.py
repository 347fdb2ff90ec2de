"""A bound on the tokens of reasoning (vLLM's ``thinking_token_budget``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from minivllm.core.interfaces.sampling import Column, Columns, Processor, Row, Rows, State
from minivllm.runtime.replies.thinking import MOST_IDS, ThinkingTags

from .spec import THINKING_BUDGET

if TYPE_CHECKING:
    from minivllm.core.interfaces.params import SamplingParams

ANY = -1  # entry before a tag in ``start`` and ``end`` that matches every token
NEVER = -1  # budget of a request without a limit


class ThinkingBudget(Processor):
    """Once an answer has its budget of reasoning tokens, all tokens but the next one of the end tag become -inf.

    Everything is computed from the token history, so drafts, preemption and branches need no state.  Reasoning begins
    behind the start tag, or with the answer if the prompt has opened it, and ends behind the end tag.  All parts of the
    reasoning count together, with the end tags of earlier parts.  A part of the end tag at the end of the reasoning is
    completed.

    Columns: ``budget`` i32 [S], ``opened`` i32 [S] (0 or 1), ``start`` and ``end`` i32 [S, MOST_IDS], the ids at the
    right end of a row, filled up with ANY.
    """

    reads = THINKING_BUDGET.reads

    def columns(self) -> Columns:
        budget = Column(dtype="int32", fill=NEVER)
        opened = Column(dtype="int32")
        tag = Column((MOST_IDS,), "int32", ANY)
        return {"budget": budget, "opened": opened, "start": tag, "end": tag}

    def bind_prompt(self, params: SamplingParams, prompt: np.ndarray) -> Row | None:
        budget = params.thinking_token_budget
        if budget is None or budget == NEVER:
            return None
        texts = params.thinking_tags or {}
        tags = ThinkingTags.of(texts, self.ctx.vocab_size)
        opened = tags.opened(prompt, self.ctx.eos_ids)
        start = _right(tags.start)
        end = _right(tags.end)
        longest = max(len(tags.start), len(tags.end))
        variant = 1 << (longest - 1).bit_length()
        values = {"budget": budget, "opened": int(opened), "start": start, "end": end}
        return Row(values, variant)

    def apply(self, logits: Tensor, rows: Rows, state: State) -> None:
        # no tag in the step has more ids than the largest bit of ``rows.variant``
        bit = max(rows.variant.bit_length() - 1, 0)
        longest = min(1 << bit, MOST_IDS)
        slots = rows.slots
        end = state["end"][slots]
        opened = state["opened"][slots] > 0
        inside = _inside(rows, state["start"][slots], end, opened, longest)
        last = rows.position[:, None] - 1
        width = inside.shape[1]
        index = torch.arange(width, device=logits.device)
        # a token counts as reasoning if the index before it is inside the reasoning
        reasoning = torch.where(index < last, inside, 0)
        spent = reasoning.sum(dim=1)
        at = last.clamp(0, width - 1)
        now = inside.gather(1, at).squeeze(1)
        budget = state["budget"][slots]
        used_up = (budget >= 0) & (spent >= budget)
        forced = (now > 0) & used_up
        token = _next(rows, end, longest)
        kept = logits.gather(1, token)
        logits.masked_fill_(forced[:, None], -torch.inf)
        logits.scatter_(1, token, kept)


def _right(ids: tuple[int, ...]) -> np.ndarray:
    """Return the ids of a tag as a row i32 [MOST_IDS], with the ids at its right end and ANY before them."""
    row = np.full(MOST_IDS, ANY, np.int32)
    row[MOST_IDS - len(ids) :] = ids
    return row


def _inside(rows: Rows, start: Tensor, end: Tensor, opened: Tensor, longest: int) -> Tensor:
    """Return i64 [N, L]: 1 if the token after an index belongs to the reasoning, else 0.

    ``start`` and ``end`` i32 [N, MOST_IDS] are the tags, of at most ``longest`` ids.  ``opened`` bool [N] means that
    the prompt has opened the reasoning.
    """
    history = rows.history()
    prompt = rows.prompt[:, None]
    index = torch.arange(history.shape[1], device=history.device)
    output = (index >= prompt) & (index < rows.position[:, None])
    # event indices: odd after a start tag, even after an end tag
    begins = 2 * index + 1
    at_start = output & _ends(history, prompt, start, longest)
    at_end = output & _ends(history, prompt, end, longest)
    at_prompt = (index == prompt - 1) & opened[:, None]
    events = torch.where(at_start | at_prompt, begins, 0)
    events = torch.where(at_end, 2 * index, events)
    latest = events.cummax(dim=1).values
    return latest % 2


def _ends(history: Tensor, prompt: Tensor, tag: Tensor, longest: int) -> Tensor:
    """Return bool [N, L]: whether a tag that begins in the output ends at an index of the history.

    ``history`` is i64 [N, L], ``prompt`` i64 [N, 1] the length of the prompt, ``tag`` i32 [N, MOST_IDS], of at most
    ``longest`` ids.
    """
    width = history.shape[1]
    index = torch.arange(width, device=history.device)
    found = history == tag[:, MOST_IDS - 1 :]
    for back in range(1, min(longest, width)):
        token = tag[:, MOST_IDS - 1 - back, None]
        same = torch.zeros_like(found)
        same[:, back:] = history[:, : width - back] == token
        same &= index - back >= prompt
        found &= same | (token == ANY)
    return found


def _next(rows: Rows, tag: Tensor, longest: int) -> Tensor:
    """Return the token i64 [N, 1] that continues the longest beginning of a tag at the end of the output.

    It is the first token of the tag if the output ends with other text.  ``tag`` is i32 [N, MOST_IDS], of at most
    ``longest`` ids.
    """
    history = rows.history()
    position = rows.position[:, None]
    width = history.shape[1]
    size = (tag != ANY).sum(dim=1, keepdim=True)
    first = MOST_IDS - size
    found = torch.zeros_like(size)
    offset = torch.arange(MOST_IDS, device=history.device)
    for count in range(1, longest):
        begin = position - count
        steps = offset[:count]
        at = begin + steps
        output = history.gather(1, at.clamp(0, width - 1))
        place = (first + steps).clamp(max=MOST_IDS - 1)
        part = tag.gather(1, place)
        same = (output == part).all(dim=1, keepdim=True)
        same &= begin >= rows.prompt[:, None]
        same &= count < size
        found = torch.where(same, count, found)
    following = (first + found).clamp(max=MOST_IDS - 1)
    token = tag.gather(1, following)
    return token.long().clamp(min=0)
