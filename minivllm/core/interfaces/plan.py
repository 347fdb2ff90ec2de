"""The arrays that the host sends to a device for a step, and the arrays that it receives: a few KB per step, and no
object per sequence.

All arrays are numpy arrays.  They must not be written to after they are passed on.  Shapes name S slots, R rows of the
step and T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

# Bits of StepResult.flags, which tell how a row ended.  OVERSHOOT marks a row whose sequence had
# already ended before the step.
EOS, STOP_ID, LENGTH, NAN, OVERSHOOT, FAILED = 1, 2, 4, 8, 16, 32
ENDED = EOS | STOP_ID | LENGTH | NAN | FAILED

STOP_IDS = 32  # largest number of stop token ids of a sequence, end-of-sequence ids included


def no_rows(*shape: int, dtype: Any = np.int32) -> np.ndarray:
    """Return an empty array: shape [0] by default, else ``shape``, which must contain a 0."""
    return np.empty(shape or (0,), dtype)


def nothing(*shape: int, dtype: Any = np.int32) -> Callable[[], np.ndarray]:
    """Return a function that returns an empty array, for default values of fields.  It returns the same array each
    time, because creating an array takes long."""
    empty = no_rows(*shape, dtype=dtype)
    return lambda: empty


@dataclass(frozen=True)
class Join:
    """The n sequences that get a slot in this step.  ``tokens`` holds the known tokens of all of them, concatenated."""

    slot: np.ndarray  # i32 [n]
    known: np.ndarray  # i32 [n] number of known tokens: the prompt and the generated tokens
    computed: (
        np.ndarray
    )  # i32 [n] number of tokens whose keys and values are in the cache (prefix hit)
    prompt: np.ndarray  # i32 [n] prompt length; the prompt is the beginning of the known tokens
    # i32 [n] number of tokens at which the sequence ends in any case (prompt + max_tokens, or
    # max_model_len)
    end: np.ndarray
    seed: np.ndarray  # i64 [n]
    sample: np.ndarray  # i32 [n] index of the sample (branch) within its request
    # i32 [n] number of tokens up to which stop ids are ignored (prompt + min_tokens)
    min_end: np.ndarray
    # i32 [n, STOP_IDS] token ids that end the sequence, padded with -1; the first ``n_eos`` of each
    # are end-of-sequence ids
    stop_ids: np.ndarray
    n_eos: np.ndarray  # i32 [n]
    tokens: np.ndarray  # i32 [sum(known)]
    # For each logits processor, then the sampler: index of a sequence in this join -> column values
    # (Row) that ``bind`` returned.
    bound: tuple[Mapping[int, Any], ...] = ()
    # i64 [n] id of the sequence whose saved columns are restored (see ``Delta.keep``), -1 for none;
    # an empty array means that no columns are restored
    saved: np.ndarray = field(default_factory=nothing(dtype=np.int64))
    # i32 [m, 2] (index into the join, number of a point in ``Capacity.taps``): a vector is added at this
    # point to every token of the sequence.  ``vectors`` holds the m vectors, f32, concatenated.
    steer: np.ndarray = field(default_factory=nothing(0, 2))
    vectors: np.ndarray = field(default_factory=nothing(dtype=np.float32))
    # i64 [n] number that stands for the owner (tenant and salt) of each sequence
    # (``blocks.owner_of``); an empty array means 0 for all
    owner: np.ndarray = field(default_factory=nothing(dtype=np.int64))
    # i32 [n] index on the device of each sequence's LoRA adapter, -1 for none; an empty array means
    # that no sequence has one
    adapter: np.ndarray = field(default_factory=nothing())
    # i32 [m, 7] (index into the join, number of an image, first position, tokens, shape of 3 numbers): the features of
    # the image stand for the embeddings of these tokens of the sequence (see ``interfaces.images``)
    image: np.ndarray = field(default_factory=nothing(0, 7))


@dataclass(frozen=True)
class Delta:
    """The changes on the host since the last step.  The device applies them before the step, in this order: store,
    keep, leave, state, adapter, image, join, fork, save, table, trim, copy, fill, compact, forget, token."""

    join: Join | None = None
    leave: np.ndarray = field(default_factory=nothing())  # i32 [n] slots that become free
    # i32 [n, 3] (source slot, new slot, index of the sample): copy the columns of a sequence to
    # another slot
    fork: np.ndarray = field(default_factory=nothing(0, 3))
    # i32 [n, 4] (group, slot, index, block): set an entry of a block table
    table: np.ndarray = field(default_factory=nothing(0, 4))
    # i32 [n, 4] (group, slot, first, count): set entries of a block table to the null block
    trim: np.ndarray = field(default_factory=nothing(0, 4))
    # i32 [n, 3] (group, source block, new block): copy blocks; all sources are read before any write
    copy: np.ndarray = field(default_factory=nothing(0, 3))
    # i32 [n, 2] (source, new): copy recurrent states, by the index of a slot or checkpoint; all sources are read before
    # a row joins
    state: np.ndarray = field(default_factory=nothing(0, 2))
    # i32 [n, 4] (slot, number, position, checkpoint): copy the row's states to the checkpoint when they cover
    # ``position`` tokens.  ``number`` tells such requests of one row apart; it is below ``states.COPIES``.
    save: np.ndarray = field(default_factory=nothing(0, 4))
    # i64 [n, 2] (slot, id of the sequence): save the columns with ``Column.kept`` of a preempted
    # row; ``Join.saved`` restores them
    keep: np.ndarray = field(default_factory=nothing(0, 2, dtype=np.int64))
    # i64 [n] ids of sequences that ended: free the columns that ``keep`` saved for them
    forget: np.ndarray = field(default_factory=nothing(dtype=np.int64))
    # i32 [n, 2] (slot, token id): tokens that the host chose
    token: np.ndarray = field(default_factory=nothing(0, 2))
    # i64 [n, 6] (tier, group, block, ticket, key as two numbers): blocks to store in a tier (``core.mover``).  The last
    # group are recurrent states, by index; group -1 removes the page of a key.
    store: np.ndarray = field(default_factory=nothing(0, 6, dtype=np.int64))
    # i64 [n, 3] (group, block, id of a loaded page): write loaded pages to blocks; group -1
    # releases a page instead
    fill: np.ndarray = field(default_factory=nothing(0, 3, dtype=np.int64))
    # i32 [n, 2] (place, number of an adapter): copy loaded adapters to places on the device; place
    # -1 frees the adapter's host memory instead
    adapter: np.ndarray = field(default_factory=nothing(0, 2))
    # i32 [n, 7] (number of an image, bytes of its values, bytes of a value, shape of 3 numbers, steps): compute the
    # features of the image from its values, the next bytes of ``pixels``.  A value of 4 bytes is f32, one of 1 byte u8.
    # ``steps`` steps from this one on compute equal shares of the features; a step that reads them computes the rest.
    # Without bytes the features are freed.
    image: np.ndarray = field(default_factory=nothing(0, 7))
    pixels: np.ndarray = field(default_factory=nothing(dtype=np.uint8))
    # i32 [n, 5] (group, slot, stored, kept, computed): compress a row (see ``interfaces.compressor``).  The KV cache of
    # the group holds ``stored`` of its ``computed`` tokens.  ``kept`` of these move to the first entries of the row's
    # block table, which ``table`` has set.
    compact: np.ndarray = field(default_factory=nothing(0, 5))
    # i32 the blocks that hold the stored tokens of each row of ``compact``, concatenated
    sources: np.ndarray = field(default_factory=nothing())
    # i32 indices of the rows of ``compact`` whose kept tokens are returned in ``StepResult.kept``
    kept: np.ndarray = field(default_factory=nothing())


NO_CHANGE = Delta()


@dataclass(frozen=True)
class StepPlan:
    """One step.  Rows with one token come first (see ``AttnMeta``).

    Each draft is a row with one token.  A speculating sequence has a row for its newest token, followed by a row of the
    same slot for each draft, with increasing ``computed``.  All of these rows draw a token (see
    ``interfaces.drafter``).  They come after the other rows with one token, because attention may treat a row and its
    drafts as one row of several tokens.

    ``q_len`` is exact.  If a sequence has ended on the device before the host could see it, its row computes nothing
    and is flagged OVERSHOOT.
    """

    id: int
    slots: np.ndarray  # i32 [R]
    q_len: np.ndarray  # i32 [R]
    computed: np.ndarray  # i32 [R] computed tokens of the row before this step, as the host expects
    samples: np.ndarray  # i32 [N] indices of the rows that draw a token
    # Which log-probabilities to return: -1 none, 0 of the chosen token, k also of the k best
    # tokens.
    topk: int = -1
    # i32 indices into ``samples`` whose mask arrives later, by ``Executor.supply``
    late: np.ndarray = field(default_factory=nothing())
    # i32 indices into ``samples`` of the rows whose logits are returned to the host, which chooses
    # their tokens
    host: np.ndarray = field(default_factory=nothing())
    # i32 indices into ``samples`` of rows that draw no token: a beam search on the host chooses one
    # from their log-probabilities
    held: np.ndarray = field(default_factory=nothing())
    # i32 [P, 2] (row, count): return the log-probabilities of prompt tokens.  Each of the first ``count`` tokens
    # of the row is followed by a prompt token, and that token is scored.
    prompt: np.ndarray = field(default_factory=nothing(0, 2))
    prompt_topk: int = 0  # number of best tokens to return for each scored prompt token
    # i32 [R] 1, 2 ... for the drafts of a row, 0 for other rows; empty if the step has no drafts
    draft: np.ndarray = field(default_factory=nothing())
    # i32 [R] The number by which ``computed`` of a row may be too large, because the accepted
    # drafts of steps in flight are not known yet; the device's lengths count.  Empty if
    # ``computed`` is exact.
    slack: np.ndarray = field(default_factory=nothing())
    delta: Delta = NO_CHANGE
    # i32 [n, 2] indices into ``samples``: a row and its guide (see ``strategy.Guide``).  The guide gets the token
    # that the row draws.
    guided: np.ndarray = field(default_factory=nothing(0, 2))
    # f32 [n] scale (``Guide.scale``) of each pair in ``guided``
    scale: np.ndarray = field(default_factory=nothing(dtype=np.float32))
    # i32 [n, 3] (number of a point in ``Capacity.taps``, row, first), sorted: return the values of the point for
    # the row's tokens of this step, from number ``first`` on.  The point "logits" has values only for tokens that
    # draw or that ``prompt`` scores.
    taps: np.ndarray = field(default_factory=nothing(0, 3))
    # i32 [k] numbers of the tap points at which a vector is added to at least one row of the step
    # (``Join.steer``), ascending
    steered: np.ndarray = field(default_factory=nothing())
    # i32 [n, 3] (row, first, count): return the sum of the hidden states of ``count`` tokens of the row, from its
    # number ``first`` in this step on.  Hidden states are the input of the output layer.  These rows draw nothing.
    pooled: np.ndarray = field(default_factory=nothing(0, 3))
    # i32 [n, 3] (row, count, more): keep the queries of the last ``count`` tokens of the row for
    # the next compression of its slot (``Delta.compact``), in addition to those of earlier steps if
    # ``more`` is 1, else in their place
    observe: np.ndarray = field(default_factory=nothing(0, 3))
    # i32 [n] rows whose tokens are all of the prompt: add the attention of their queries to the attention sums of
    # their slots (see ``interfaces.compressor``)
    sums: np.ndarray = field(default_factory=nothing())
    # i32 [n, 2] (row, count): the experts of the first ``count`` tokens of the row are given.  ``routes`` i32 holds
    # their numbers [tokens, sum of the widths of ``Capacity.given``], concatenated; -1 leaves the choice to the router.
    given: np.ndarray = field(default_factory=nothing(0, 2))
    routes: np.ndarray = field(default_factory=nothing())

    def further(self, id: int, computed: np.ndarray, delta: Delta) -> StepPlan:
        """Return a plan for another step of the same rows.  It takes a tenth of the time of creating a plan."""
        plan: StepPlan = object.__new__(StepPlan)
        plan.__dict__.update(self.__dict__, id=id, computed=computed, delta=delta)
        return plan


@dataclass(frozen=True)
class LateInputs:
    """Token masks of a step, sent after its plan.  Bit t % 32 of ``mask[j, t // 32]`` allows token t in row
    ``StepPlan.late[j]``.  The array must not change until the result of the step was collected."""

    mask: np.ndarray  # i32 [len(late), ceil(V / 32)]


@dataclass(frozen=True)
class LogProbs:
    """Natural logarithms of softmax(logits), float32.  ``rank`` is 1 + the number of strictly likelier tokens.

    The best tokens are ordered by logit; of equal logits, the lower id comes first. k is the largest number that a row
    of the step needs, and the first tokens of a row do not depend on it.  Tokens of probability 0 (-inf) come last and
    are not sent to clients.
    """

    chosen: np.ndarray  # f32 [N]
    rank: np.ndarray  # i32 [N]
    top_ids: np.ndarray  # i32 [N, k]
    top: np.ndarray  # f32 [N, k]

    @cached_property
    def lists(self) -> tuple[list[float], list[int], list[int], list[float], int]:
        """Return (chosen, rank, top_ids, top) as flat lists of Python numbers, and k.  Converting all rows at once
        takes a tenth of the time of converting them one by one."""
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
    """A failure in a step, returned as a value and not raised.

    ``scope`` is "rows" (these rows have FAILED in their flags), "step" (no row of the step has a result), "device" (the
    device state of all rows may be wrong, so every running sequence ends) or "drafts" (the step runs without drafts).
    """

    scope: str
    # name of the plug-in that failed, such as "processor minivllm/penalties"; "" if unknown
    plugin: str
    message: str
    rows: tuple[int, ...] = ()  # indices into ``samples``


FORMS = ("", "separate", "native", "decode", "mixed")


class StepForm(NamedTuple):
    """How the layers of a step ran.

    ``kind`` is one of ``FORMS``: "decode" and "mixed" are captured CUDA graphs (see ``GraphKey``), "native" is one call
    of the compiled CPU code, "separate" means separate operations, and "" that the executor does not report it.
    ``rows`` and ``tokens`` are the padded sizes of a captured graph, 0 for other kinds.
    """

    kind: str = ""
    rows: int = 0
    tokens: int = 0


NO_FORM = StepForm()


@dataclass(frozen=True)
class StepResult:
    """The result of one step, with N = len(plan.samples) drawn tokens."""

    id: int
    slots: np.ndarray  # i32 [N]
    tokens: np.ndarray  # i32 [N]
    # i32 [N] number of accepted tokens, 0 or 1.  It is 0 if the sequence had ended before (OVERSHOOT), if the row
    # waits for the host, or if an earlier draft of the sequence was rejected.
    count: np.ndarray
    flags: np.ndarray  # u8 [N]
    logprobs: LogProbs | None = None
    # The log-probabilities of scored prompt tokens; N is the sum of the counts in ``plan.prompt``.
    prompt: LogProbs | None = None
    # f32 [len(plan.host), V] logits of the rows in ``plan.host``, changed by processors and masks
    logits: np.ndarray | None = None
    errors: tuple[StepError, ...] = ()
    device_ms: float = 0.0  # milliseconds that the device computed
    # i32 [rows with drafts] number of drafts of each row that has any
    drafted: np.ndarray = field(default_factory=nothing())
    # f32 the values of ``plan.taps``, concatenated
    taps: np.ndarray = field(default_factory=nothing(dtype=np.float32))
    # f64 [len(plan.pooled), hidden] the sum of hidden states that each row of ``plan.pooled`` requests
    pooled: np.ndarray = field(default_factory=nothing(0, 0, dtype=np.float64))
    # i32 for each row of ``Delta.kept``, and each layer of its group, the stored tokens [kv_heads, kept] that stay,
    # ascending; all in one dimension.  It is empty if the delta failed.
    kept: np.ndarray = field(default_factory=nothing())
    # Name of a plug-in -> seconds of host time that it took in the step.
    seams: Mapping[str, float] = field(default_factory=dict)
    # Number of an image whose features rows of the step read although they are missing -> why they
    # are missing.  The KV of these rows is wrong, so their sequences end, also those that draw
    # nothing in the step.
    lost: Mapping[int, str] = field(default_factory=dict)
    form: StepForm = NO_FORM
    # count of decoding rows with a common prefix, if the attention back end read its KV once for
    # all of them
    shared: int = 0

    @property
    def failure(self) -> StepError | None:
        """Return the error that failed the whole step, or None."""
        return next((e for e in self.errors if e.scope in ("step", "device")), None)


def group_rows(draft: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays: for each row i64 [R], the row with the newest token of its sequence; and the rows with a
    newest token that have drafts.

    ``draft`` is ``StepPlan.draft``."""
    first = np.arange(len(draft)) - draft
    return first, first[draft == 1]


def with_drafts(slots: np.ndarray, drafts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the slot, the number of drafts and the ``StepPlan.draft`` of each row of a plan, given the ``drafts`` of
    each slot.

    Each slot has a row for its newest token, and then a row for each draft.
    """
    size = 1 + drafts
    first = np.repeat(np.cumsum(size) - size, size)
    return slots.repeat(size), drafts.repeat(size), (np.arange(len(first)) - first).astype(np.int32)


def rows_with_drafts(plan: StepPlan) -> np.ndarray:
    """Return bool, one element for each row of ``merged(plan)``: whether the row has drafts."""
    heads = np.flatnonzero(plan.draft == 0) if len(plan.draft) else np.arange(len(plan.slots))
    return np.diff(np.append(heads, len(plan.slots))) > 1


def merged(plan: StepPlan) -> StepPlan:
    """Return the plan in which a row and its drafts are one row of several tokens, which attention computes faster."""
    if not plan.draft.any():
        return plan
    heads = np.flatnonzero(plan.draft == 0)
    q_len = np.add.reduceat(plan.q_len, heads)
    return replace(
        plan, slots=plan.slots[heads], q_len=q_len.astype(np.int32), computed=plan.computed[heads]
    )
