"""Captured steps: a decode step, or a mixed one, is two replays and next to no work per row on the host.

    host:    slots (if they changed), or a packed row table ──►                                 packed ──► pinned memory
    device:  FORWARD[kind, rows, tokens]   begin ─ embed ─ layers ─ norm ──► hidden of each row      ▲
             SAMPLE[rows, what is asked]   head ─ processors ─ draw ─ commit ────────────────────────┘

A *decode* step (one token a row) reads token, length and block table of each slot from the device's own columns, and
``commit`` writes them, so step N + 1 can be launched before the host has seen the tokens of step N.  A *mixed* step
(some rows bring several tokens) gets its rows and positions from the host in one copy.  Rows and tokens are padded
to the next captured size with the *spare slot*, the last one of the columns: it belongs to nobody, counts as ended, and
what it computes is not kept (its cache slot is in the null block).

The masks of late rows are copied, beside the layers, to where SAMPLE finds them (``device.kernels.mask``).

What cannot be captured (a processor that is not graph safe, a token that the host chooses, a model that waits)
runs as separate launches instead; ``notes`` says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from minivllm.core.external_calls import as_exception
from minivllm.core.interfaces.attention import GraphKey
from minivllm.core.interfaces.params import SamplingParams
from minivllm.core.interfaces.sampling import Draw
from minivllm.device.kernels.mask import DeviceMasks
from minivllm.device.layers.captured_sizes import (
    MOST_TOKENS,
    coarse_sizes,
    first_mixed,
    row_sizes,
    token_size,
    useful_sizes,
)
from minivllm.errors import describe_error

from . import step
from .capture import GraphRecorder
from .captured import Asked, Buffers, CapturedCalls, bounds, column_tensors, read_columns
from .state import staged

if TYPE_CHECKING:
    from minivllm.core.interfaces.model import StepTensors
    from minivllm.core.interfaces.plan import LateInputs, StepPlan

    from .runner import Runner

log = logging.getLogger(__name__)
# contexts up to here share their captures; longer ones are cut differently by the attention back end
SHORT = 8192
CAPTURES = 160  # mixed steps and sampling variants that are kept
# A kind of mixed steps is captured when its steps have cost about as much as its capture will: after so many that ran
# as separate launches, or by what a larger capture computes for nothing.  A burst has many kinds.
SIGHTS = 4
CAPTURE_FLOPS = 3e13  # of an H100 at half its peak, while its host captures a step: 80 ms
# a larger capture serves a mixed step of so many times its tokens, and up to so many in any case: the device takes less
# time than the host takes to launch a step's kernels
WASTE, CHEAP_TOKENS = 1.5, 512
MOST_KINDS = 4096  # that are counted; points can be tapped in many combinations
TAPPED_CAPTURES = 48  # of the captures, those of steps with taps


@dataclass(frozen=True)
class TappedKey(GraphKey):
    """The captured shape of a step with taps: numbers of the points at which something is added, and of those that are
    read."""

    steered: tuple[int, ...] = ()
    read: tuple[int, ...] = ()


def replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    """Milliseconds of a replay: the least of three."""
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    for _ in range(3):
        begun.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        found.append(begun.elapsed_time(ended))
    return min(found)


@dataclass
class Captured:
    graph: Any
    result: Any = None
    # i64, the packed row table of a mixed step (see ``step.pack_rows``)
    rows: torch.Tensor | None = None
    # tensors of the graph that were made outside of it: it knows their addresses only
    keep: Any = None


@dataclass
class Graphs:
    """The captures of one runner.  All share one memory pool: they run one after another."""

    # rows; captures of fewer differ in how attention cuts a context, which spare rows do not show
    measured_from = 128
    runner: Runner
    mixed: bool  # the attention back end can be captured in mixed steps
    buffers: dict[int, Buffers] = field(default_factory=dict)
    forwards: dict[GraphKey, Captured] = field(default_factory=dict)
    samples: dict[tuple[int, Asked], Captured | None] = field(default_factory=dict)
    # of mixed steps that have no capture of their own: what they have cost; 1.0 is as much as a capture
    paid: dict[GraphKey, float] = field(default_factory=dict)
    # the larger captures in which mixed steps run meanwhile, as far as they were looked for
    serving: dict[GraphKey, GraphKey | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    masks: DeviceMasks | None = None  # of late rows, from the first step that has some
    # captures that failed: such steps run uncaptured
    refused: set[GraphKey] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.spare = self.runner.wiring.max_num_seqs
        self.sizes, self.coarse = row_sizes(self.spare), coarse_sizes(self.spare)
        self.recorder = GraphRecorder()
        # about the operations of a token (two for the two bytes of a weight); of a mixture all experts are counted
        self.token_flops = self.runner.worker.weight_bytes

    # ---- which capture -------------------------------------------------------------------------------------------

    def key(self, plan: StepPlan) -> GraphKey | None:
        """The capture that a step can run in, or None."""
        rows, tokens = len(plan.slots), int(plan.q_len.sum())
        if not rows or rows > self.sizes[-1] or len(plan.host) or len(plan.prompt):
            return None
        if len(plan.draft) and self.runner.state.recurrent is not None:
            return None  # a row and its drafts are one row to a recurrent state
        most = int((plan.computed + plan.q_len).max())
        span = SHORT if most <= SHORT else self.runner.wiring.max_model_len
        steered, read = self.runner.taps.of_step(plan)
        # drafts have places of their own
        if tokens == rows and len(plan.samples) == rows and not len(plan.draft):
            size = self.sizes[int(np.searchsorted(self.sizes, rows))]
            key = GraphKey("decode", size, size, span)
            if not steered and not read:
                return self._unless_refused(key)
        elif not self.mixed or tokens > MOST_TOKENS or read:
            return None  # what many tokens have at a point is kept by no capture
        else:
            size = self.coarse[int(np.searchsorted(self.coarse, rows))]
            key = GraphKey("mixed", size, max(token_size(tokens), size), span)
        if steered or read:
            key = TappedKey(key.kind, key.rows, key.tokens, key.span, steered, read)
        if key in self.forwards:
            return key
        larger = self._larger(key)
        due = self._is_due(key, larger)
        return (self._unless_refused(key) if due else None) or larger

    def _larger(self, key: GraphKey) -> GraphKey | None:
        """The smallest capture that a mixed step without taps can run in, if there is one that is not much larger."""
        if type(key) is not GraphKey:
            return None
        if key not in self.serving:
            most = max(CHEAP_TOKENS, WASTE * key.tokens)
            found = [
                one
                for one in self.forwards
                if type(one) is GraphKey and one.kind == "mixed" and one.span == key.span
                if one.rows >= key.rows and key.tokens <= one.tokens <= most
            ]
            self.serving[key] = min(found, key=lambda one: (one.tokens, one.rows), default=None)
        return self.serving[key]

    def _is_due(self, key: GraphKey, larger: GraphKey | None) -> bool:
        """Whether steps of this kind, in ``larger`` or apart, have cost as much as their capture, and there is room."""
        if len(self.paid) >= MOST_KINDS:
            self.paid.clear()
        padding = larger and larger.tokens - key.tokens + larger.rows - key.rows
        now = 1.0 if padding is None else min(padding * self.token_flops / CAPTURE_FLOPS * SIGHTS, 1)
        self.paid[key] = self.paid.get(key, 0.0) + now / SIGHTS
        if self.paid[key] < 1 or len(self.forwards) >= CAPTURES:
            return False
        tapped = sum(isinstance(one, TappedKey) for one in self.forwards)
        return tapped < TAPPED_CAPTURES or not isinstance(key, TappedKey)

    def _unless_refused(self, key: GraphKey) -> GraphKey | None:
        return None if key in self.refused else key

    def asked(self, plan: StepPlan) -> Asked | None:
        """What the rows of a step ask of processors and sampler; None if that cannot be captured."""
        if not len(plan.samples) or len(plan.held) or len(plan.draft) or len(plan.guided):
            return None
        slots = plan.slots[plan.samples]
        state = self.runner.state
        variants = []
        for i, processor in enumerate(state.processors):
            on = processor.active[slots]
            active = bool(on.any()) or i == len(state.processors) - 1
            if active and not self.runner.graph_safe[i]:
                return None
            variants.append(int(np.bitwise_or.reduce(processor.variant[slots])) if active else -1)
        wants_min = bool(state.wants_min[slots].any())
        return Asked(tuple(variants), wants_min, plan.topk, len(plan.late) > 0)

    # ---- run -----------------------------------------------------------------------------------------------------

    def forward(self, key: GraphKey, plan: StepPlan) -> torch.Tensor | None:
        """Hidden states [R, H] of the rows; captures the step first if this is the first of its kind.  None if it
        cannot be captured."""
        if key not in self.forwards and not self._try_forward(key):
            return None
        captured = self.forwards[key]
        if key.kind == "mixed":
            table = step.pack_rows(plan, key.rows, key.tokens, self.spare)
            captured.rows.copy_(staged(table, self.runner.device), non_blocking=True)
            slots = np.full(len(plan.slots), self.spare)
            slots[plan.samples] = plan.slots[plan.samples]
            b = self._take(key.rows, slots)
        else:
            b = self._take(key.rows, plan.slots)
        captured.graph.replay()
        return b.hidden[: len(plan.slots)]

    def sample(
        self,
        key: GraphKey,
        asked: Asked,
        plan: StepPlan,
        late: LateInputs | None,
    ) -> tuple[torch.Tensor, Any] | None:
        """(i32 [3, B] tokens, counts and flags of the rows; their log-probabilities or None).  None if what is asked
        cannot be captured.  ``late``: the masks of late rows."""
        if late is not None:
            self.late_masks().put(plan.samples[plan.late], late.mask)
        captured = self._sample_of(key.rows, asked)
        if captured is None:
            return None
        captured.graph.replay()
        if late is not None:
            self.masks.read_now()
        return self.buffers[key.rows].out, captured.result

    def _sample_of(self, rows: int, asked: Asked) -> Captured | None:
        """The capture of a draw, made if it is the first of its kind; None if there is none."""
        at = (rows, asked)
        if at not in self.samples:
            if len(self.samples) >= CAPTURES:
                self._note(f"{CAPTURES} kinds of draws are captured: others are launched apart")
                return None
            self.samples[at] = self._capture_sample(rows, asked)
        return self.samples[at]

    def late_masks(self) -> DeviceMasks:
        if self.masks is None:
            self.masks = DeviceMasks(self.sizes[-1], self.runner.worker.vocab_size, self.runner.device)
        return self.masks

    def warm(self) -> None:
        """Capture decode steps of every size and some mixed ones, the largest first: others find their memory there."""
        none = (-1,) * (len(self.runner.processors) - 1)
        sampler, prompt = self.runner.sampler, np.zeros(1, np.int32)
        bound = [sampler.bind_prompt(SamplingParams(temperature=t), prompt) for t in (0.0, 1.0)]
        variants = sorted({row.variant for row in bound if row is not None})
        for size in sorted({*self.sizes, *self.coarse}, reverse=True):
            if size in self.sizes:
                self._capture_forward(GraphKey("decode", size, size, SHORT))
            for variant in variants:
                self._sample_of(size, Asked((*none, variant), False, -1, False))
        keys = {size: GraphKey("decode", size, size, SHORT) for size in self.sizes if size >= self.measured_from}
        # so kernels are compiled now, not in the middle of the first burst; the least tells whether it can be done
        if self.mixed:
            *more, least = first_mixed(self.coarse, self.runner.wiring.max_num_batched_tokens)
            if self._try_forward(GraphKey("mixed", *least, SHORT)):
                for size in more:
                    self._try_forward(GraphKey("mixed", *size, SHORT))
        if self.runner.graph_safe[-1]:
            for variant in variants:
                self._draw_once(variant)
        times = {size: replay_ms(self.forwards[key].graph) for size, key in keys.items()}
        for size in set(keys) - set(useful_sizes(times)):
            self.sizes.remove(size)
            del self.forwards[keys[size]]

    def _draw_once(self, variant: int) -> None:
        """A draw of the spare row over float32 logits, which is what steps that are not captured have."""
        r = self.runner
        slots = torch.full((1,), self.spare, dtype=torch.int64, device=r.device)
        rows = step.rows_of(r.state, slots, torch.zeros_like(slots), 1)
        rows.variant = variant
        logits = torch.zeros(1, r.worker.vocab_size, device=r.device)
        try:
            r.sampler.draw(logits, rows, r.state.processors[-1].columns, Draw(torch.zeros_like(slots)))
        except BaseException as e:  # a plug-in's: requests will tell
            self._note(f"the sampler was not tried before the first request: {describe_error(as_exception(e))}")

    def _take(self, size: int, slots: np.ndarray) -> Buffers:
        """The buffers of a size, holding these slots."""
        b = self._buffers(size)
        if not np.array_equal(b.host_slots[: len(slots)], slots) or (b.host_slots[len(slots) :] != self.spare).any():
            b.host_slots[: len(slots)], b.host_slots[len(slots) :] = slots, self.spare
            b.slots.copy_(torch.from_numpy(b.host_slots.copy()), non_blocking=True)
        return b

    # ---- capture -------------------------------------------------------------------------------------------------

    def _buffers(self, size: int) -> Buffers:
        if size not in self.buffers:
            r = self.runner
            slots = torch.full((size,), self.spare, dtype=torch.int64, device=r.device)
            hidden = torch.zeros(size, r.worker.hidden_size, dtype=getattr(torch, r.wiring.dtype), device=r.device)
            out = torch.zeros(3, size, dtype=torch.int32, device=r.device)
            self.buffers[size] = Buffers(slots, hidden, out, np.full(size, self.spare))
        return self.buffers[size]

    def _try_forward(self, key: GraphKey) -> bool:
        """Capture a step; False, and said once, if that fails."""
        try:
            self._capture_forward(key)
        except BaseException as e:
            # a model or back end that cannot be captured, or no memory left for it
            self.refused.add(key)
            self._note(f"a step is not captured, it runs as separate launches: {describe_error(as_exception(e))}")
            return False
        return True

    def _capture_forward(self, key: GraphKey) -> None:
        b = self._buffers(key.rows)
        b.host_slots[:] = self.spare
        b.slots.fill_(self.spare)
        self.serving.clear()
        self.forwards[key] = self._decode(key, b) if key.kind == "decode" else self._mixed(key, b)

    def _decode(self, key: GraphKey, b: Buffers) -> Captured:
        r = self.runner
        static = column_tensors(r.state, b.slots, bounds(key, len(r.worker.groups)))

        def run() -> None:
            read = read_columns(r.state, static)
            self._tap(key, read)
            step.forward(r.model, r.backend, read, key, out=b.hidden)

        captured = self._capture(run)
        captured.keep = static
        return captured

    def _mixed(self, key: GraphKey, b: Buffers) -> Captured:
        r, size = self.runner, step.table_size(key.rows, key.tokens)
        host = bounds(key, len(r.worker.groups))
        table = torch.zeros(size, dtype=torch.int64, device=r.device)
        table[: key.rows] = self.spare

        def run() -> None:
            read, last = step.read_rows(r.state, table, host, padded=True)
            self._tap(key, read)
            selects = r.selects and read.taps is None
            step.forward(r.model, r.backend, read, key, last, selects, b.hidden)

        captured = self._capture(run)
        captured.rows = table
        return captured

    def _tap(self, key: GraphKey, read: StepTensors) -> None:
        if isinstance(key, TappedKey):
            read.taps = self.runner.taps.captured(key.steered, key.read, read.meta)

    def _capture_sample(self, size: int, asked: Asked) -> Captured | None:
        b, r = self._buffers(size), self.runner
        before = b.slots.clone()
        b.slots.fill_(self.spare)

        def run() -> tuple[torch.Tensor, ...] | None:
            return step.sample(CapturedCalls(r, b, asked, self.masks), r.state, r.model, b.hidden)

        try:
            return self._capture(run)
        except BaseException as e:  # a plug-in that cannot be captured runs uncaptured
            self._note(f"sampling is not captured, it runs as separate launches: {describe_error(as_exception(e))}")
            return None
        finally:
            b.slots.copy_(before)

    def _note(self, text: str) -> None:
        """Say it once."""
        if text not in self.notes:
            self.notes.append(text)
            log.warning(text)

    def _capture(self, run: Callable[[], Any]) -> Captured:
        """Record it on rows of the spare slot."""
        return Captured(*self.recorder.capture(run))
