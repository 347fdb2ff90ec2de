"""The arguments of hooks: frozen dataclasses and read-only numpy columns.

The engine does not change the data of a view, so a hook may keep it.  A view has no reference to the engine.

Times are seconds of ``time.monotonic``.  A *sequence* is one branch of a request, identified by a number that is unique
in the engine.  R is the number of rows of a step, and N the number of its rows that draw a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class EngineView:
    """The configuration of an engine, as hooks receive it when the engine starts and stops."""

    model: str  # folder of the model
    device: str
    dtype: str
    block: int  # number of tokens of a KV block
    blocks: tuple[int, ...]  # number of KV blocks of each group
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    parts: Mapping[str, str]  # kind of plug-in -> name of the plug-in, for kinds with a single plug-in


@dataclass(frozen=True)
class RequestView:
    """An accepted request."""

    id: str
    sequences: tuple[int, ...]  # numbers of the sequences (branches) of the request
    prompt: np.ndarray  # i32 [n]
    params: Mapping[str, Any]  # all sampling parameters of the request by name
    arrival: float


@dataclass(frozen=True)
class RequestEnd:
    """The end of a request."""

    reasons: tuple[str, ...]  # for each branch: stop, length, abort or error
    tokens: tuple[int, ...]  # number of generated tokens of each branch
    cached_tokens: int  # number of prompt tokens found in the prefix cache
    preempted: int  # number of preemptions of all branches together
    scheduled: float | None  # time at which the request first left the queue
    first_token: float | None
    finished: float
    error: str | None


@dataclass(frozen=True)
class PreemptionView:
    """A running sequence that returns to the queue and will compute its tokens again."""

    request: str
    sequence: int
    tokens: int  # number of tokens of the sequence that the host has
    times: int  # number of preemptions of the sequence, including this one


@dataclass(frozen=True)
class BlocksView:
    """Blocks of one KV group that entered or left the prefix cache, as columns of equal length.

    Parents come before their children if the blocks entered, and after them if the blocks left."""

    group: int
    tier: str  # device
    reason: str  # "stored", "evicted" (for other blocks) or "dropped" (by a reset, or replaced by newer content)
    keys: np.ndarray  # u64 hash of the content and of all earlier blocks
    parents: np.ndarray  # u64 key of the previous block, 0 for none; empty unless ``reason`` is "stored"
    depth: np.ndarray  # i32 number of earlier blocks; empty unless ``reason`` is "stored"


@dataclass(frozen=True)
class PlannedStep:
    """A submitted step."""

    id: int
    sequence: np.ndarray  # i64 [R]
    q_len: np.ndarray  # i32 [R] number of tokens that the row computes
    computed: np.ndarray  # i32 [R] number of tokens of the row that were computed before
    drawn: np.ndarray  # i32 [N] indices of the rows that draw a token

    @property
    def rows(self) -> int:
        """Return the number of rows of the step, each of which computes tokens of one sequence."""
        return len(self.q_len)

    @property
    def tokens(self) -> int:
        """Return the number of tokens that the step computes."""
        return int(self.q_len.sum())


@dataclass(frozen=True)
class FinishedStep(PlannedStep):
    """A step whose result the engine has processed.

    The figures of the engine are taken after the same turn of its loop.  Blocks are those of the first KV group.
    Counters never decrease."""

    token: np.ndarray  # i32 [N]
    count: np.ndarray  # i32 [N] 1 if the drawn token was accepted, else 0 (see ``StepResult.count``)
    flags: np.ndarray  # u8 [N] EOS, STOP_ID, LENGTH, NAN, OVERSHOOT, FAILED (core.interfaces.plan)
    error: str | None  # error of a plug-in in the step
    time: float
    plan_ms: float  # host time of planning in ms, in the turn that planned the step
    submit_ms: float
    wait_ms: float  # host time of waiting in ms, in the turn that received the result
    publish_ms: float
    device_ms: float
    running: int
    waiting: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int  # number of blocks in the prefix cache that no request uses
    finished: int  # counter: requests
    generated: int  # counter: tokens
    preemptions: int  # counter
    evictions: int  # counter: blocks
    prefix_queries: int  # counter: tokens
    prefix_hits: int  # counter: tokens
