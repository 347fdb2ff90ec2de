"""What hooks are told: frozen dataclasses and read-only numpy columns.  A view is a copy or never written again, so a
hook may keep it; nothing in it leads back to the engine.

Times are seconds of ``time.monotonic``.  A *sequence* is one branch of a request, known by its engine-wide number.
R rows of a step, N of them drew a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class EngineView:
    """An engine as it was built."""

    model: str  # directory of the model
    device: str
    dtype: str
    block: int  # tokens of a KV block
    blocks: tuple[int, ...]  # KV blocks of each group
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    parts: Mapping[str, str]  # seam -> plug-in, for seams that take one


@dataclass(frozen=True)
class RequestView:
    """A request as it was accepted."""

    id: str
    sequences: tuple[int, ...]  # numbers of its branches
    prompt: np.ndarray  # i32 [n]
    params: Mapping[str, Any]  # the fields of SamplingParams
    arrival: float


@dataclass(frozen=True)
class RequestEnd:
    """How a request ended."""

    reasons: tuple[str, ...]  # per branch: stop, length, abort or error
    tokens: tuple[int, ...]  # generated, per branch
    cached_tokens: int  # of the prompt, found in the prefix cache
    preempted: int  # times, all branches together
    scheduled: float | None  # when it left the queue for the first time
    first_token: float | None
    finished: float
    error: str | None


@dataclass(frozen=True)
class PreemptionView:
    """A running sequence that went back to the queue; it will compute its tokens again."""

    request: str
    sequence: int
    tokens: int  # known to the host
    times: int  # that this sequence has been preempted, this time included


@dataclass(frozen=True)
class BlocksView:
    """Blocks of the prefix cache that came or went, of one KV group; columns of equal length, parents before children
    where they come, after them where they go."""

    group: int
    tier: str  # device
    reason: str  # stored, evicted (room was needed) or dropped (a reset, or newer content took its place)
    keys: np.ndarray  # u64 hash of the content and of all that comes before it
    parents: np.ndarray  # u64 key of the block before it, 0 = none; empty unless stored
    depth: np.ndarray  # i32 blocks before it; empty unless stored


@dataclass(frozen=True)
class PlannedStep:
    """A step that was submitted."""

    id: int
    sequence: np.ndarray  # i64 [R]
    q_len: np.ndarray  # i32 [R] tokens that the row computes
    computed: np.ndarray  # i32 [R] tokens that were computed before
    drawn: np.ndarray  # i32 [N] rows that draw a token

    @property
    def rows(self) -> int:
        return len(self.q_len)

    @property
    def tokens(self) -> int:
        """Tokens that the step computes."""
        return int(self.q_len.sum())


@dataclass(frozen=True)
class FinishedStep(PlannedStep):
    """A step whose result was published.  The figures of the engine are those after the turn of the loop in which it
    was; blocks are those of the leading KV group.  Counters never go down."""

    token: np.ndarray  # i32 [N]
    count: np.ndarray  # i32 [N] 1 if the token was accepted, else 0
    flags: np.ndarray  # u8 [N] EOS, STOP_ID, LENGTH, NAN, OVERSHOOT, FAILED (core.interfaces.plan)
    error: str | None  # what failed in it
    time: float
    plan_ms: float  # host, of the turn that planned it
    submit_ms: float
    wait_ms: float  # host, of the turn that collected it
    publish_ms: float
    device_ms: float
    running: int
    waiting: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int  # idle, in the prefix cache
    finished: int  # counter: requests
    generated: int  # counter: tokens
    preemptions: int  # counter
    evictions: int  # counter: blocks
    prefix_queries: int  # counter: tokens
    prefix_hits: int  # counter: tokens
