"""Snapshots of the engine for the live page: requests, the map of KV blocks, and the times of the last steps.

A snapshot is made on the engine's thread, only when the server asks for it.  It has no text and no token id.
``owner`` limits a snapshot to the requests and blocks of one owner, and leaves out all figures of the whole engine.

    cells   one byte for each block of the leading KV group, in base64: ``FREE`` ... ``SHARED``, plus ``IN_TIER``
    of      i16 for each block, in base64: the index of the request in ``rows`` that uses the block, or -1
"""

from __future__ import annotations

import base64
import time
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.core.timing import PARTS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from minivllm.core.engine.engine import Engine
    from minivllm.core.engine.request import Request, Seq

# states of a block, in the order of precedence for a cell that shows several blocks
FREE, CACHED, USED, SHARED = range(4)
IN_TIER = 8  # flag of a block's state: the content is also in a tier
MOST_CELLS = 16_384  # largest number of cells of the map; a larger cache is shown with several blocks in a cell
MOST_ROWS = 512  # largest number of running and waiting sequences in a snapshot
LEAST_WAITING = 64  # number of waiting sequences that a snapshot has room for, however many run
MOST_SEARCHED = 4096  # largest number of waiting sequences that are searched for the sequences of an owner
MOST_ENDED = 64  # largest number of ended requests that are kept for open pages
MOST_STEPS = 512  # largest number of steps over which times are averaged
MOST_FORMS = 6  # largest number of forms of steps in a snapshot
# time of an ended request -> field of ``Request``
TIMES = {"arrival": "arrival", "scheduled": "scheduled", "first": "first_token", "finished": "finished"}
WATCHED = 10.0  # seconds after a snapshot in which ended requests are recorded
# reasons why a request does not run, in the order in which they are checked
LOADING, NO_ROW, HELD, PREFIX, NO_BLOCKS, BUDGET = "loading", "rows", "held", "prefix", "blocks", "budget"


class Snapshots:
    """Makes the snapshots of an engine, and keeps facts of the requests that ended while a page is open."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._until = 0.0  # time.monotonic until which ended requests are kept
        self._ended: deque[tuple[int, dict[str, Any]]] = deque(maxlen=MOST_ENDED)
        self._count = 0  # number of ended requests so far
        engine.events.request_finished.subscribe(self._finished)

    def _finished(self, request: Request) -> None:
        """Keep the facts of an ended request if a page is open."""
        if time.monotonic() < self._until:
            self._count += 1
            self._ended.append((self._count, _facts(request)))
        elif self._ended:
            self._ended.clear()

    def take(self, owner: str | None, steps: int, ended: int, arriving: int = 0) -> dict[str, Any]:
        """Return a snapshot.

        ``owner`` None means the whole engine.  ``steps`` and ``ended`` are the counts of the reader's last snapshot.
        ``arriving`` is the number of requests that wait before the engine.
        """
        engine = self.engine
        self._until = time.monotonic() + WATCHED
        now = engine.now()
        slots = engine.slots
        running = [slots.at(slot) for slot in slots.running.tolist()]
        if owner is not None:
            running = [seq for seq in running if seq.request.owner == owner]
        waiting = self._waiting(owner, max(MOST_ROWS - len(running), LEAST_WAITING))
        running = running[: MOST_ROWS - len(waiting)]
        why = self._why(waiting)
        rows = _columns(engine, [*running, *waiting], now)
        rows["why"] = [""] * len(running) + why
        found: dict[str, Any] = {
            "at": round(time.time(), 3),
            "rows": rows,
            "blocks": self._blocks(running, owner),
            "count": self._count,
            "ended": [_aged(facts, now) for n, facts in self._ended if n > ended and owner in (None, facts["owner"])],
        }
        if owner is None:
            found["engine"] = {**self._figures(), "arriving": arriving}
            found["steps"] = self._steps(steps)
        return found

    def _waiting(self, owner: str | None, most: int) -> list[Seq]:
        """Return at most ``most`` waiting sequences of an owner (None means all owners), sequences that wait for a tier
        first."""
        tiers = self.engine.cache.tiers
        loading: Iterable[Seq] = () if tiers is None else tiers.waits
        queued: list[Seq] = [*loading]
        if owner is None:
            entries = self.engine.planner.waiting.first(most)
            queued += [entry[2] for entry in entries]
        else:
            queued += islice(self.engine.planner.waiting, MOST_SEARCHED)
            queued = [seq for seq in queued if seq.request.owner == owner]
        return queued[:most]

    def _why(self, waiting: list[Seq]) -> list[str]:
        """Return the reason for which each waiting sequence does not run yet."""
        engine = self.engine
        planner, cache = engine.planner, engine.cache
        tiers = cache.tiers
        loading = set() if tiers is None else set(tiers.waits)
        delayed = {id(seq) for seq in planner.underway.delayed}
        if len(engine.slots.free) <= planner.reserved:
            reason = NO_ROW
        elif planner.wake_at:
            reason = HELD
        else:
            reason = BUDGET
        reasons = []
        for seq in waiting:
            other = reason
            if reason == BUDGET and id(seq) in delayed:
                other = PREFIX
            elif reason == BUDGET and cache.blocks_for(seq.known) > cache.available:
                other = NO_BLOCKS
            reasons.append(LOADING if seq in loading else other)
        return reasons

    def _blocks(self, running: list[Seq], owner: str | None) -> dict[str, Any]:
        """Return the map of the blocks of the leading KV group: the state of each block, and the running row that uses
        it."""
        cache, slots = self.engine.cache, self.engine.slots
        pool = cache.pools[0]
        of = np.full(pool.total, -1, np.int16)
        rows = np.array([seq.slot for seq in running], np.intp)
        counts = slots.blocks[0, rows]
        table = slots.table[0, rows, : int(counts.max(initial=0))]
        held = np.arange(table.shape[1]) < counts[:, None]
        of[table[held]] = np.repeat(np.arange(len(rows), dtype=np.int16), counts)
        state = np.zeros(pool.total, np.uint8)
        state[pool.ref > 0] = USED
        state[pool.ref > 1] = SHARED
        if owner is not None:
            state[of < 0] = FREE
        else:
            state[(pool.ref == 0) & (pool.key > 0)] = CACHED
            if cache.tiers is not None:
                named = cache.tiers.named[0]
                state[np.fromiter(named, np.intp, len(named))] += IN_TIER
        state, of = state[1:], of[1:]  # the null block is left out
        per = -(-len(state) // MOST_CELLS)
        if per > 1:
            starts = np.arange(0, len(state), per)
            state = np.maximum.reduceat(state, starts)
            of = np.maximum.reduceat(of, starts)
        cells = base64.b64encode(state.tobytes()).decode()
        owners = base64.b64encode(of.astype("<i2").tobytes()).decode()
        return {"total": pool.total - 1, "per": per, "block": pool.block, "cells": cells, "of": owners}

    def _figures(self) -> dict[str, Any]:
        """Return the counters of the whole engine."""
        engine = self.engine
        pool, tiers = engine.cache.pools[0], engine.cache.tiers
        return {
            "running": engine.slots.n_running,
            "waiting": engine.planner.n_waiting + (0 if tiers is None else len(tiers.waits)),
            "finished": engine.finished,
            "generated": engine.publisher.tokens,
            "preemptions": engine.planner.preemptions,
            "free": pool.free,
            "cached": pool.idle,
            "held": pool.held,
            "queries": pool.queries,
            "hits": pool.hits,
            "evictions": pool.evictions,
            "tiers": [] if tiers is None else [tier.figures() for tier in tiers.tiers],
        }

    def _steps(self, since: int) -> dict[str, Any]:
        """Return the mean times in ms of the steps after step ``since`` by part and by plug-in, and their forms.

        ``forms`` has lists [kind, rows, tokens, number of steps] (``StepForm``), the most frequent first.
        """
        clock = self.engine.clock
        count = min(clock.count - since, MOST_STEPS, clock.size)
        found: dict[str, Any] = {"count": clock.count, "n": max(count, 0)}
        if count <= 0:
            return found
        rows = np.arange(clock.count - count, clock.count) % clock.size
        parts = 1e3 * clock.part[rows].mean(axis=0)
        seams = {name: round(1e3 * float(column[rows].mean()), 4) for name, column in clock.seam.items()}
        found["ms"] = dict(zip(PARTS, parts.round(4).tolist(), strict=True))
        found["device_ms"] = round(float(clock.device_ms[rows].mean()), 4)
        found["rows"] = round(float(clock.rows[rows].mean()), 1)
        found["tokens"] = int(clock.tokens[rows].sum())
        found["seams"] = seams
        found["forms"] = [[*form, n] for form, n in clock.form_counts(rows)[:MOST_FORMS]]
        return found


def _columns(engine: Engine, seqs: list[Seq], now: float) -> dict[str, Any]:
    """Return the columns of the given sequences.  Times are in seconds before now, None for what has not happened."""
    slots = engine.slots
    requests = [seq.request for seq in seqs]
    at = np.array([seq.slot for seq in seqs], np.intp)
    runs = at >= 0  # waiting requests have slot -1, whose columns are not used
    known = np.where(runs, slots.known[at], [seq.known for seq in seqs]).tolist()
    computed = np.where(runs, slots.computed[at], 0).tolist()
    blocks = np.where(runs, slots.blocks[0, at], 0).tolist()
    return {
        "id": [request.id for request in requests],
        "owner": [request.owner for request in requests],
        "sample": [seq.sample for seq in seqs],
        "running": runs.tolist(),
        "prompt": [len(request.prompt) for request in requests],
        "cached": [request.cached_tokens for request in requests],
        "known": known,
        "computed": computed,
        "end": [request.end for request in requests],
        "blocks": blocks,
        "preempted": [seq.preempted for seq in seqs],
        "arrival": _ages([request.arrival for request in requests], now),
        "scheduled": _ages([request.scheduled for request in requests], now),
        "first": _ages([request.first_token for request in requests], now),
    }


def _ages(times: list[float | None], now: float) -> list[float | None]:
    """Return the seconds from each time until ``now``, or None for a missing time."""
    if None in times:
        return [_before(at, now) for at in times]
    return np.round(now - np.array(times, np.float64), 3).tolist()


def _before(at: float | None, now: float) -> float | None:
    """Return the seconds from a time until ``now``, or None for a missing time."""
    return None if at is None else round(now - at, 3)


def _facts(request: Request) -> dict[str, Any]:
    """Return the facts of an ended request, with times of ``time.monotonic``."""
    return {
        "id": request.id,
        "owner": request.owner,
        "prompt": len(request.prompt),
        "cached": request.cached_tokens,
        "tokens": sum(seq.known for seq in request.sequences) - len(request.sequences) * len(request.prompt),
        "why": request.sequences[0].finish_reason if request.sequences else None,
        "preempted": sum(seq.preempted for seq in request.sequences),
        **{name: getattr(request, field) for name, field in TIMES.items()},
    }


def _aged(facts: dict[str, Any], now: float) -> dict[str, Any]:
    """Return the facts of an ended request, with times in seconds before now."""
    return {**facts, **{name: _before(facts[name], now) for name in TIMES}}
