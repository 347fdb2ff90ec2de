"""Guides: second sequences whose logits steer the sampling of a request's sequence (``strategy.Guide``).

    lead     p p p p p p p .  g g g        the request's sequence
    guide    q q q . . . . .  g g g        its guide, with its own slot and prompt

The last known token of each row waits (.) until all other tokens of both are computed.  From then on both lack one
token, so a step contains both or neither.  The device samples from the logits of both and appends the same token to
both.  They enter and leave their slots together, and wait in the queue as the lead.

A guide has its own internal request, without a sink, processors or masks.  It ends together with its lead.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from minivllm.core.interfaces.params import SamplingParams
from minivllm.errors import RequestError

from .request import RUNNING, Request, Seq
from .request_checks import check_prompt, salt_of

if TYPE_CHECKING:
    from minivllm.core.interfaces.strategy import Guide

    from .cache import KVCache
    from .request_checks import Intake
    from .slots import Slots


def add_guide(engine: Intake, lead: Seq, guide: Guide) -> None:
    """Attach a guide (a second sequence that steers the sampling) to the sequence of a new request.  RequestError if
    the request cannot have a guide, or if both do not fit the KV cache."""
    request = lead.request
    p = lead.request.params
    cache = engine.cache
    for name in ("choose_fn", "logits_processors"):
        if getattr(p, name):
            what = f"{name} chooses from the logits of one row; use it without {guide.param}"
            raise RequestError(what, name)
    if not engine.capacity.guides:
        who = f"the executor {type(engine.executor).__name__}"
        raise RequestError(
            f"{guide.param}: {who} does not support guides (second rows that steer sampling); use another executor",
            guide.param,
        )
    if engine.wiring.max_num_seqs < 2:
        raise RequestError(
            f"{guide.param} takes two rows; expected max_num_seqs of at least 2"
            f", and it is {engine.wiring.max_num_seqs}",
            guide.param,
        )
    prompt = np.array(list(guide.prompt) or request.prompt[-1:], np.int32)
    most = request.end - len(request.prompt)
    own = SamplingParams(
        max_tokens=most, priority=p.priority, tenant=p.tenant, cache_salt=p.cache_salt
    )
    beside = Request(request.id, prompt, own, request.arrival)
    try:
        check_prompt(beside, engine.wiring, engine.capacity.vocab_size, cache)
    except RequestError as e:
        raise RequestError(f"{guide.param}: {e}", guide.param) from e
    request.end = len(request.prompt) + beside.end - len(prompt)
    for g, pool in enumerate(cache.pools):
        need = sum(cache.worst(g, len(r.prompt), r.end) for r in (request, beside))
        if need > pool.total - 1:
            raise RequestError(
                f"{guide.param}: the request and its guide need {need} blocks of the KV cache, "
                f"which has {pool.total - 1}; shorten them, lower max_tokens, or raise num_kvcache_blocks",
                guide.param,
            )
    request.stops = replace(request.stops, end=request.end)
    further = len(prompt) - len(request.prompt)
    beside.stops = replace(request.stops, end=beside.end, min_end=request.stops.min_end + further)
    beside.lora = request.lora
    beside.adapter = request.adapter
    for one in (request, beside):
        one.salt = engine.weights.salted(salt_of(one, engine.wiring))
    beside.rows = (None,) * len(request.rows)
    beside.tenant = request.tenant
    beside.owner_number = request.owner_number
    request.speculates = False
    lead.scale = guide.scale
    lead.guide = Seq(
        lead.id, beside, lead.sample, lead.seed, tokens=prompt, known=len(prompt), lead=lead
    )


# ---- while a step is planned -----------------------------------------------------------------------------------------


def enter_guide(
    s: Slots, cache: KVCache, joins: list[tuple[int, Seq]], lead: Seq, protected: bool
) -> None:
    """Put the guide of a sequence into a slot, right after the sequence itself has entered one.

    Both rows then wait for each other.  The guide's (slot, sequence) is appended to ``joins``.  A ``protected`` guide
    receives all its blocks now, so that it is never preempted for blocks."""
    guide = lead.guide
    assert guide is not None
    slot = s.enter(guide)
    joins.append((slot, guide))
    guide.status = RUNNING
    cache.adopt(slot, cache.lookup(guide, guide.known), guide.known)
    if protected:
        cache.reserve(slot, guide.request.end)
    pair = [lead.slot, slot]
    s.partner[pair] = slot, lead.slot
    s.leads[lead.slot] = True
    s.scale[lead.slot] = lead.scale
    s.forking[pair] = True
    s.schedulable[pair] = s.known[pair] - 1
    s.paired += 2


def release(s: Slots, slot: int) -> None:
    """Release a row and its partner (its guide, or the row that it guides) to draw their next token, once each of them
    lacks only one computed token."""
    pair = [slot, s.partner[slot]]
    if (s.computed[pair] >= s.schedulable[pair]).all():
        s.forking[pair] = False
        s.schedulable[pair] = s.known[pair]


def guided_rows(s: Slots, drawn: np.ndarray) -> dict[str, np.ndarray]:
    """Return the columns ``guided`` (pairs of indices: row, its guide) and ``scale`` of plan.StepPlan.  ``drawn`` i64
    [N] are the slots of the rows that draw a token in the step."""
    leads = np.flatnonzero(s.leads[drawn])
    at = np.zeros(s.size, np.int32)
    at[drawn] = np.arange(len(drawn))
    guides = at[s.partner[drawn[leads]]]
    pairs = np.stack([leads, guides], axis=1).astype(np.int32)
    return {"guided": pairs, "scale": s.scale[drawn[leads]]}
