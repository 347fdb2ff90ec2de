"""What goes to a device and what comes back: arrays, a few KB a step, no objects per sequence.

All arrays are numpy, read-only by agreement once they are handed over.  S slots, R rows of the step, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

# bits of StepResult.flags
EOS, STOP_ID, LENGTH, NAN, OVERSHOOT, FAILED = 1, 2, 4, 8, 16, 32
ENDED = EOS | STOP_ID | LENGTH | NAN | FAILED

STOP_IDS = 32  # stop token ids a sequence may have (its end-of-sequence ids included)


def no_rows(*shape: int, dtype: Any = np.int32) -> np.ndarray:
    return np.empty(shape or (0,), dtype)


def nothing(*shape: int, dtype: Any = np.int32) -> Callable[[], np.ndarray]:
    """Gives the same empty array each time: there is nothing in it to write to, and to make one takes long."""
    made = no_rows(*shape, dtype=dtype)
    return lambda: made


@dataclass(frozen=True)
class Join:
    """Sequences that take a slot with this step: n of them, their known tokens laid one after another."""

    slot: np.ndarray  # i32 [n]
    known: np.ndarray  # i32 [n] tokens known
    computed: np.ndarray  # i32 [n] tokens whose KV is there already (prefix hit)
    prompt: np.ndarray  # i32 [n] prompt length, the first of ``known``
    # i32 [n] known length at which the sequence ends (prompt + max_tokens, or max_model_len)
    end: np.ndarray
    seed: np.ndarray  # i64 [n]
    sample: np.ndarray  # i32 [n]
    min_end: np.ndarray  # i32 [n] known length before which no stop id counts (prompt + min_tokens)
    # i32 [n, STOP_IDS], -1 = none; the first ``n_eos`` of a row are end-of-sequence ids
    stop_ids: np.ndarray
    n_eos: np.ndarray  # i32 [n]
    tokens: np.ndarray  # i32 [sum(known)]
    # per processor (sampler last): index into the join -> Row
    bound: tuple[Mapping[int, Any], ...] = ()
    # i64 [n] sequence whose kept columns come back, -1 = none; empty: none of any
    saved: np.ndarray = field(default_factory=nothing(dtype=np.int64))
    # i32 [m, 2] (index into the join, point of ``Capacity.taps``): what is added there to each of the
    # row's tokens, and f32 these vectors, one after another
    steer: np.ndarray = field(default_factory=nothing(0, 2))
    vectors: np.ndarray = field(default_factory=nothing(dtype=np.float32))


@dataclass(frozen=True)
class Delta:
    """What changed on the host since the last step; applied in this order before the step runs:
    keep, leave, join, fork, table, trim, copy, forget, token."""

    join: Join | None = None
    leave: np.ndarray = field(default_factory=nothing())  # i32 [n] slots
    # i32 [n, 3] (source slot, new slot, sample)
    fork: np.ndarray = field(default_factory=nothing(0, 3))
    # i32 [n, 4] (group, slot, index, block)
    table: np.ndarray = field(default_factory=nothing(0, 4))
    # i32 [n, 4] (group, slot, first, count) -> null block
    trim: np.ndarray = field(default_factory=nothing(0, 4))
    # i32 [n, 3] (group, source block, new block); every source is read before a block is written
    copy: np.ndarray = field(default_factory=nothing(0, 3))
    # i64 [n, 2] (slot, sequence): put the row's kept columns aside; they come back by Join.saved
    keep: np.ndarray = field(default_factory=nothing(0, 2, dtype=np.int64))
    # i64 [n] sequences that ended with columns put aside
    forget: np.ndarray = field(default_factory=nothing(dtype=np.int64))
    # i32 [n, 2] (slot, token id chosen on the host)
    token: np.ndarray = field(default_factory=nothing(0, 2))


NO_CHANGE = Delta()


@dataclass(frozen=True)
class StepPlan:
    """One step.  Rows with one token come first (see ``AttnMeta``).

    Drafts are rows of one token: a row that speculates stands for its newest token, and right behind it a row of the
    same slot for each draft, ``computed`` counting up.  All of them draw (see ``interfaces.drafter``).  They come
    behind the other rows of one token, because attention may take a row and its drafts for one row of several tokens.

    ``q_len`` is exact; a row that met its end on the device although the host could not know does nothing (OVERSHOOT).
    """

    id: int
    slots: np.ndarray  # i32 [R]
    q_len: np.ndarray  # i32 [R]
    computed: np.ndarray  # i32 [R] tokens before this step's, as the host expects them
    samples: np.ndarray  # i32 [N] rows that draw a token
    topk: int = -1  # log-probabilities wanted: -1 none, 0 the chosen token's, k the k best too
    # i32 indices into ``samples`` whose mask comes by ``supply``
    late: np.ndarray = field(default_factory=nothing())
    # i32 indices into ``samples`` whose logits go to the host
    host: np.ndarray = field(default_factory=nothing())
    # i32 indices into ``samples`` that draw nothing: the host chooses from their log-probabilities
    held: np.ndarray = field(default_factory=nothing())
    # i32 [P, 2] (row, count): the first ``count`` tokens of the row are followed by a token of its prompt, whose
    # log-probability is wanted
    prompt: np.ndarray = field(default_factory=nothing(0, 2))
    prompt_topk: int = 0  # the k best too
    # i32 [R] 1, 2 ... for the drafts of a row, 0 else; empty: none
    draft: np.ndarray = field(default_factory=nothing())
    delta: Delta = NO_CHANGE
    # i32 [n, 2] indices into ``samples``: a row, and its guide (see ``strategy.Guide``), which gets the row's token
    guided: np.ndarray = field(default_factory=nothing(0, 2))
    # f32 [n] the scale of each of these
    scale: np.ndarray = field(default_factory=nothing(dtype=np.float32))
    # i32 [n, 3] (point of ``Capacity.taps``, row, first), in this order: what the row's tokens of this step from number
    # ``first`` on have there is wanted; of the point "logits" tokens that draw, or that ``prompt`` has
    taps: np.ndarray = field(default_factory=nothing(0, 3))
    # i32 [k] points at which something is added to some row of the step (``Join.steer``), ascending
    steered: np.ndarray = field(default_factory=nothing())

    def further(self, id: int, computed: np.ndarray, delta: Delta) -> StepPlan:
        """A step of the same rows, whose other columns are the same: in a tenth of the time that a new one takes."""
        made: StepPlan = object.__new__(StepPlan)
        made.__dict__.update(self.__dict__, id=id, computed=computed, delta=delta)
        return made


@dataclass(frozen=True)
class LateInputs:
    """Masks for the late rows of a step: bit t % 32 of ``mask[j, t // 32]`` allows token t in row ``StepPlan.late[j]``.
    The array stays as it is until the step's result has been collected."""

    mask: np.ndarray  # i32 [len(late), ceil(V / 32)]


@dataclass(frozen=True)
class LogProbs:
    """Natural logarithms of softmax(logits), float32; ``rank`` is 1 + how many tokens are strictly likelier.

    The best are ordered by logit, of equal ones the lower id first.  So the first of a row's do not depend on k, which
    is the largest that some row asks for.  Tokens without any probability (-inf) stand last; clients are not told."""

    chosen: np.ndarray  # f32 [N]
    rank: np.ndarray  # i32 [N]
    top_ids: np.ndarray  # i32 [N, k]
    top: np.ndarray  # f32 [N, k]

    @cached_property
    def lists(self) -> tuple[list[float], list[int], list[int], list[float], int]:
        """As flat lists of Python's numbers, and k: at once for all rows, in a tenth of the time of one by one."""
        k = self.top.shape[1]
        return (
            self.chosen.tolist(),
            self.rank.tolist(),
            self.top_ids.ravel().tolist(),
            self.top.ravel().tolist(),
            k,
        )


@dataclass(frozen=True)
class StepError:
    """A failure as a value.  ``scope``: "rows" (FAILED is set in their flags), "step" (no row of the step has a
    result), "device" (the columns of all rows are in doubt, so every running sequence ends) or "drafts" (the step has
    none)."""

    scope: str
    plugin: str  # what failed, e.g. "processor minivllm/penalties"; "" if unknown
    message: str
    rows: tuple[int, ...] = ()  # indices into ``samples``


@dataclass(frozen=True)
class StepResult:
    """One step's outcome, N = len(plan.samples)."""

    id: int
    slots: np.ndarray  # i32 [N]
    tokens: np.ndarray  # i32 [N]
    # i32 [N] tokens accepted: 1, or 0 where the row had ended before (OVERSHOOT), waits for the host, or stands behind
    # a draft that was rejected
    count: np.ndarray
    flags: np.ndarray  # u8 [N]
    logprobs: LogProbs | None = None
    prompt: LogProbs | None = None  # N = sum of the counts of ``plan.prompt``
    logits: np.ndarray | None = None  # f32 [len(plan.host), V] processed logits of host rows
    errors: tuple[StepError, ...] = ()
    device_ms: float = 0.0  # time on the device (wall time of the compute on CPU)
    # i32, for each row that speculates: drafts that there were
    drafted: np.ndarray = field(default_factory=nothing())
    # f32 the vectors of ``plan.taps``, one after another
    taps: np.ndarray = field(default_factory=nothing(dtype=np.float32))
    # host seconds of each plug-in that this step ran
    seams: Mapping[str, float] = field(default_factory=dict)

    @property
    def failure(self) -> StepError | None:
        """What failed the whole step."""
        return next((e for e in self.errors if e.scope in ("step", "device")), None)


def group_rows(draft: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(for each row of a plan the row of its newest token, i64 [R]; those of them that have drafts)."""
    first = np.arange(len(draft)) - draft
    return first, first[draft == 1]


def with_drafts(slots: np.ndarray, drafts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of one token, and a row for each of their ``drafts``: slots, drafts of the slot, ``StepPlan.draft``."""
    size = 1 + drafts
    first = np.repeat(np.cumsum(size) - size, size)
    return slots.repeat(size), drafts.repeat(size), (np.arange(len(first)) - first).astype(np.int32)


def merged(plan: StepPlan) -> StepPlan:
    """The plan as attention sees it that reads rows of several tokens well: a row and its drafts are one."""
    if not plan.draft.any():
        return plan
    heads = np.flatnonzero(plan.draft == 0)
    q_len = np.add.reduceat(plan.q_len, heads)
    return replace(
        plan, slots=plan.slots[heads], q_len=q_len.astype(np.int32), computed=plan.computed[heads]
    )
