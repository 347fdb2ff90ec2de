"""The facts that clients send about sessions (conversations), with numbers for names, as schedulers and evictors read
them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.core.interfaces.session import Session, SessionTurn

from .blocks import chain_key

if TYPE_CHECKING:
    from .cache import KVCache
    from .request import Request, Seq

NO_KEYS = np.empty(0, np.uint64)
NO_KINDS = np.empty(0, np.int8)


def number_of(salt: tuple[str, ...], name: str | None) -> int:
    """Return the number that stands for the name of a session or turn: a positive 63-bit hash of the salt and the name,
    or 0 without a name.

    The salt begins with the tenant, so tenants with equal names have different numbers."""
    if name is None:
        return 0
    return chain_key(0, repr((*salt, "session", name)).encode()) >> 1 or 1


def turn_of(request: Request) -> SessionTurn | None:
    """Return the facts about the session of a request, with numbers for its names; None if the client has sent none."""
    facts = request.params.session
    salt = request.params.salt
    if not isinstance(facts, Session):
        return None
    known: dict[str, Any] = {}
    if facts.next_s is not None:
        known["next_s"] = float(facts.next_s)
    if facts.deadline_s is not None:
        known["deadline"] = request.arrival + facts.deadline_s
    if facts.budget is not None:
        known["budget"] = facts.budget
    return SessionTurn(
        number_of(salt, facts.id),
        number_of(salt, facts.turn),
        number_of(salt, facts.parent),
        len(request.prompt),
        **known,
    )


def kinds_of(request: Request, block: int) -> np.ndarray:
    """Return the kind of text (such as system prompt or tool result) of each block of a prompt, i8 [blocks]; empty if
    the client has sent no spans."""
    facts = request.params.session
    if not isinstance(facts, Session) or not facts.spans:
        return NO_KINDS
    return facts.kinds(len(request.prompt), block)


def report_turn(cache: KVCache, seq: Seq, event: str) -> None:
    """Call the method ``event`` of the evictor plug-ins, because a sequence of a session was admitted ("began") or ends
    ("ended").

    The sequence is in a slot, or ends while it waits."""
    turn = seq.request.turn
    if turn is None:
        return
    s = cache.slots
    slot = seq.slot
    length = int(s.collected[slot]) if slot >= 0 else seq.known
    turn = replace(turn, tokens=length)
    for g, pool in enumerate(cache.pools):
        if not pool.reads_turns:
            continue
        keys = NO_KEYS
        if slot >= 0:
            n = int(s.blocks[g, slot])
            keys = pool.key[s.table[g, slot, :n]]
        pool.report(event, keys[keys > 0], turn)
    if cache.tiers is not None:
        cache.tiers.report(event, seq, turn)
