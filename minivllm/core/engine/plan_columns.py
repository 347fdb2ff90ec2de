"""The columns (arrays) of a plan.StepPlan: its rows in order, optional columns for rows with special features, and the
columns of sequences that enter a slot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.core.interfaces.plan import STOP_IDS, Join, no_rows

from .blocks import owner_of
from .guides import guided_rows
from .images import join_rows
from .pooling import pooled_rows
from .prompt_scores import prompt_rows
from .taps import tap_rows

if TYPE_CHECKING:
    from .images import Images
    from .request import Seq
    from .slots import Slots

NO_VECTORS = no_rows(dtype=np.float32)


def step_rows(
    decode: np.ndarray, n: np.ndarray, draft: np.ndarray, chunks: dict[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return three columns of a StepPlan in the order of its rows: the slots i64, ``q_len`` i32 and ``draft`` i32.

    The order is rows of one token, rows with drafts, prompt chunks.  ``decode`` has the slots of decoding rows, each
    repeated for its drafts (see ``plan.with_drafts``).  ``n`` i32 has the number of drafts of each of these slots, and
    ``draft`` i32 is 0 for the row itself, then 1, 2 ... for its drafts; both are empty without drafts.  ``chunks`` maps
    a slot to its number of prompt tokens."""
    slots = decode
    q_len = np.ones(len(decode), np.int32)
    if chunks:
        slots = np.concatenate([decode, np.fromiter(chunks, np.intp, len(chunks))])
        q_len = np.concatenate([q_len, np.fromiter(chunks.values(), np.int32, len(chunks))])
    # rows of one token are already before the chunks
    if not len(draft) and min(chunks.values(), default=2) > 1:
        return slots, q_len, draft
    key = 2 * (q_len > 1)
    key[: len(n)] += n > 0
    order = np.argsort(key, kind="stable")
    if len(draft):
        draft = np.append(draft, np.zeros(len(slots) - len(draft), np.int32))[order]
    return slots[order], q_len[order], draft


def requested_columns(
    s: Slots, at: np.ndarray, computed: np.ndarray, q_len: np.ndarray, draws: np.ndarray
) -> dict[str, Any]:
    """Return the optional columns of a StepPlan, an empty dict if no row uses any.  ``at`` i64 [R] are the slots of its
    rows, and ``draws`` bool [R] marks the rows that sample."""
    columns: dict[str, Any] = {}
    if s.special:
        columns |= special_rows(s, at[draws])
    if s.paired:
        columns |= guided_rows(s, at[draws])
    if s.asking:
        columns |= prompt_rows(s, at, computed, q_len)
    if s.tapping:
        columns |= tap_rows(s, at, computed, q_len, draws)
    if s.pooling:
        columns |= pooled_rows(s, at, computed, q_len)
    return columns


def special_rows(s: Slots, drawn: np.ndarray) -> dict[str, Any]:
    """Return the columns ``topk``, ``late``, ``host`` and ``held`` of a StepPlan.  ``drawn`` i64 [N] are the slots of
    the rows that draw a token.

    If the host chooses a row's token (``host`` and ``held``), the token does not count as known, and the row is not
    planned again until it is chosen.  A row in ``late`` is planned further, because its mask arrives before it draws.
    """
    host = s.host[drawn]
    beam = s.beam[drawn]
    waits = drawn[host]
    s.known[waits] -= 1
    s.schedulable[waits] = s.known[waits]
    s.ready[waits] = False
    kinds = {"late": s.late[drawn] & ~host, "host": host & ~beam, "held": host & beam}
    rows = {name: np.flatnonzero(which).astype(np.int32) for name, which in kinds.items()}
    return {"topk": int(s.topk[drawn].max(initial=-1)), **rows}


def join_of(joins: list[tuple[int, Seq]], slots: Slots, images: Images | None = None) -> Join:
    """Return the columns of ``plan.Join`` for (slot, sequence) pairs that took a slot since the last plan."""
    n = len(joins)
    seqs = [seq for _, seq in joins]
    slot, known, sample, min_end, n_eos = np.zeros((5, n), np.int32)
    seed, owner = np.zeros((2, n), np.int64)
    saved = np.full(n, -1, np.int64)
    stop_ids = np.full((n, STOP_IDS), -1, np.int32)
    bound: list[dict[int, Any]] = [{} for _ in seqs[0].request.rows]
    steer: list[tuple[int, int]] = []
    vectors = [NO_VECTORS]
    for i, (at, seq) in enumerate(joins):
        request = seq.request
        stops = request.stops
        slot[i] = at
        known[i] = seq.known
        sample[i] = seq.sample
        seed[i] = seq.seed
        min_end[i] = stops.min_end
        n_eos[i] = stops.n_eos
        stop_ids[i, : len(stops.ids)] = stops.ids
        owner[i] = owner_of(request.salt)
        if seq.saved:
            saved[i] = seq.id
        for rows, row in zip(bound, request.rows, strict=True):
            if row is not None:
                rows[i] = row
        if request.tapped is not None:
            for number, vector in request.tapped.steering.items():
                steer.append((i, number))
                vectors.append(vector)
    tokens = np.concatenate([seq.tokens[: seq.known] for seq in seqs]).astype(np.int32)
    adapter = slots.adapter[slot]
    return Join(
        slot=slot,
        known=known,
        computed=slots.computed[slot],
        prompt=slots.prompt[slot],
        end=slots.end[slot],
        seed=seed,
        sample=sample,
        min_end=min_end,
        stop_ids=stop_ids,
        n_eos=n_eos,
        tokens=tokens if images is None else images.ids(tokens),
        bound=tuple(bound),
        saved=saved,
        steer=np.array(steer, np.int32).reshape(-1, 2),
        vectors=np.concatenate(vectors),
        owner=owner if owner.any() else no_rows(dtype=np.int64),
        adapter=adapter if (adapter >= 0).any() else no_rows(),
        image=no_rows(0, 7) if images is None else join_rows(seqs),
    )
