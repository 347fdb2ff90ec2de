"""Captured steps: a decode step or a mixed step is two replays of CUDA graphs, with little work per row on the host.

    host:    slots (if they changed), or a packed row table ──►                                 packed ──► pinned memory
    device:  FORWARD[kind, rows, tokens]   begin ─ embed ─ layers ─ norm ──► hidden of each row      ▲
             SAMPLE[rows, SampleOperations]           head ─ processors ─ draw ─ commit ────────────────────────┘

A *decode* step (one token a row) reads token, length and block table of each slot from the device's own columns, and
``commit`` writes them, so step N + 1 can be launched before the host has seen the tokens of step N.  A *mixed* step
(some rows have several tokens) gets its rows and positions from the host in one copy.  Rows and tokens are padded to
the next captured size with the *spare slot*, the last slot of the columns.  No request uses it and it is marked as
stopped, so its results are dropped; its keys and values are written to the null block.

Token masks of rows arrive while the layers run.  They are copied to a fixed buffer, from which SAMPLE reads them
(``device.kernels.mask``).

Steps that cannot be captured (a processor is not graph safe, the host chooses a token, the model waits for the device)
run as separate launches.  ``notes`` gives the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minivllm.core import progress
from minivllm.core.external_calls import as_exception
from minivllm.core.interfaces.attention import GraphKey
from minivllm.core.interfaces.plan import StepPlan
from minivllm.device.kernels.mask import DeviceMasks
from minivllm.device.layers.captured_sizes import (
    FIRST_TOKENS,
    MOST_TOKENS,
    WHOLE_TOKENS,
    coarse_sizes,
    first_imaged,
    first_mixed,
    row_sizes,
    shared_sizes,
    token_size,
    useful_sizes,
)
from minivllm.device.layers.pooling import reads_last_tokens
from minivllm.errors import describe_error

from . import step
from .capture import GraphRecorder, replay_ms
from .captured import Buffers, Captured, CapturedCalls, Drawn, SampleOperations, sampler_variants
from .distinct_layers import DistinctLayers
from .first_captures import SHORT, rehearse_first
from .graph_keys import AdaptedKey, ImagedKey, TappedKey, holds, padded_rows
from .image_steps import image_steps
from .later import LaterCaptures
from .query_store import StepQueries
from .recorded_layers import LayersRun, decode_run, mixed_run
from .served_kernels import finish_served
from .state import staged
from .step_costs import NARROW, StepCosts, pair_flops, pairs_of
from .trial_launches import draw_once, launch_once

if TYPE_CHECKING:
    from minivllm.core.interfaces.plan import LateInputs

    from .runner import Runner

log = logging.getLogger(__name__)
CAPTURES = 160  # largest number of captures of FORWARD (the layers), and of SAMPLE (the draw)
# A mixed step of a new shape is captured when the steps of this shape have lost as much time as a capture takes.  A
# capture takes the host at most as long as SIGHTS steps of separate launches: a run of few layers, a recording, and the
# graph's instantiation.  A burst of requests has many shapes, so capturing each at once would be slow.
SIGHTS = 2
# A decode step runs in a larger capture this many times before its size is captured during a step.  Each time costs at
# most a few milliseconds, a capture about 25, so gaps between tokens are rare.
DECODE_SIGHTS = 8
MOST_KINDS = 4096  # largest number of shapes in ``Graphs.paid``; taps of several points have many combinations
TAPPED_CAPTURES = 48  # largest number of captured shapes with tap points that rows read or change
OBSERVED_ROWS = 64  # captures of decode steps of at most this many rows keep their queries for a KV compressor


class MeasuredCaptures(NamedTuple):
    """Measurements that a runner reuses when it captures its steps again after sleep."""

    costs: StepCosts
    sizes: tuple[int, ...]  # numbers of rows for which decode steps are captured


@dataclass
class Graphs:
    """The CUDA graphs of one runner.  They share one memory pool, because only one of them runs at a time."""

    # Captures of at least this number of rows are timed, and useless sizes are removed.  Captures of fewer rows differ
    # in how attention splits a context, and a replay with spare rows does not show this.
    measured_from = 128
    gradual = True  # whether some captures may be made while the engine serves requests, instead of at its start
    draws_apart = True  # whether ``_launch_once`` also draws a token
    runner: Runner
    mixed: bool  # whether the attention back end can be captured in mixed steps, in which rows have several tokens
    # Measurements from before a sleep; None at the first start.  The kernels are compiled already,
    # so only the steps that first requests need are captured before the engine is ready again.
    known: MeasuredCaptures | None = None
    buffers: dict[int, Buffers] = field(default_factory=dict)
    forwards: dict[GraphKey, Captured] = field(default_factory=dict)
    samples: dict[tuple[int, SampleOperations], Captured | None] = field(default_factory=dict)
    # shape without an own capture -> time that its steps have lost so far, as a share of the time of a capture
    paid: dict[GraphKey, float] = field(default_factory=dict)
    serving: dict[GraphKey, GraphKey | None] = field(default_factory=dict)  # shape of a step -> shape of its capture
    notes: list[str] = field(default_factory=list)
    # variant bits of the sampler whose kernels are compiled: False -> for 16-bit logits, True -> for float32 logits
    draw_bits: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})
    masks: DeviceMasks | None = None  # memory of token masks; None until the first step in which a row has a mask
    # shapes whose capture failed; their steps run as separate launches
    refused: set[GraphKey] = field(default_factory=set)
    # rows of a measured decode step -> milliseconds of its replay
    times: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        runner = self.runner
        wiring = runner.wiring
        wanted = self.known is not None or wiring.steps.graph_captures == "gradual"
        gradual = self.gradual and wanted
        self.later = LaterCaptures(self, gradual)
        self.spare = wiring.max_num_seqs
        self.sizes = row_sizes(self.spare)
        self.coarse = coarse_sizes(self.spare)
        self.shared_sizes: list[int] = []
        if runner.shared is not None:
            self.shared_sizes = shared_sizes(self.spare)
        self.recorder = GraphRecorder()
        self.layers = DistinctLayers(runner)
        self.imaged = image_steps(runner.images, runner.worker)
        # first estimate: two operations for each weight (of two bytes) and token, with the weights of all experts
        self.costs = StepCosts.guessed(runner.worker.weight_bytes)  # ``_measure`` replaces it
        if self.known is not None:
            self.costs = self.known.costs
            self.sizes = list(self.known.sizes)

    def measured(self) -> MeasuredCaptures:
        """Return the costs and sizes of the captures that were measured so far."""
        sizes = tuple(self.sizes)
        return MeasuredCaptures(self.costs, sizes)

    # ---- which capture -------------------------------------------------------------------------------------------

    def shape(self, plan: StepPlan) -> GraphKey | None:
        """Return the shape of the smallest capture in which a step could run; None if such a step cannot be
        captured."""
        rows = len(plan.slots)
        tokens = int(plan.q_len.sum())
        if not rows or rows > self.sizes[-1]:
            return None
        if len(plan.host) or len(plan.prompt):
            return None
        if len(plan.sums):
            return None  # attention sums use numbers of tokens from the host, which a replay would not update
        if len(plan.pooled) and not reads_last_tokens(plan):
            return None  # a capture returns the hidden state of only one token per row
        if len(plan.draft) and self.runner.state.recurrent is not None:
            return None  # recurrent layers need a row and its drafts as one row of several tokens
        ends = plan.computed + plan.q_len
        longest = int(ends.max())
        steered, read = self.runner.taps.of_step(plan)
        given = len(plan.given) > 0
        methods, changed = self.runner.adapts(plan)
        adapts = bool(methods)
        observed = len(plan.observe) > 0
        kind = AdaptedKey if adapts else GraphKey
        images = self.runner.images
        if images is not None and images.reached(plan):
            if steered or read or given or adapts:
                return None
            if self.imaged is None or not self.imaged.takes(plan):
                return None
            kind = ImagedKey
        # a decode step takes the newest token of each slot, so rows of drafts cannot run in one
        newest = tokens == rows and len(plan.samples) == rows and not len(plan.draft)
        if newest and kind is not ImagedKey:
            span = self._span(longest)
            if not (steered or read or given or adapts or observed):
                shared = self._shared(plan, span)
                if shared is not None:
                    return shared
            size = padded_rows(self.sizes, rows)
            if observed and size > OBSERVED_ROWS:
                return None  # only captures of few rows keep queries
            key = kind("decode", size, size, span)
        elif observed or not self.mixed or tokens > MOST_TOKENS or read or given:
            return None  # a capture has memory for the queries, tap values and set experts of one token per row only
        else:
            size = padded_rows(self.coarse, rows)
            padded = max(token_size(tokens), size)
            span = self._span(longest, padded)
            key = kind("mixed", size, padded, span)
        if steered or read or given or changed:
            shape = key.kind, key.rows, key.tokens, key.span
            key = TappedKey(*shape, steered=steered, read=read, adapted=adapts, given=given, changed=changed)
        return key

    def _span(self, longest: int, tokens: int = 0) -> int:
        """Return the longest context in tokens, SHORT or ``max_model_len``, of the captures for a step.

        ``longest`` is the longest context of the step.  ``tokens`` is the size of a mixed step, 0 for a decode step.  A
        long mixed step hardly gains from a separate capture of short contexts, so it has none."""
        whole = self.runner.wiring.max_model_len
        if longest > SHORT:
            return whole
        if tokens >= WHOLE_TOKENS and whole > SHORT:
            return whole
        return SHORT

    def key(self, plan: StepPlan) -> GraphKey | None:
        """Return the shape of the capture in which a step runs, or None if it must run as separate launches.

        The capture may not exist yet; ``forward`` then makes it."""
        key = self.shape(plan)
        if key is None:
            return None
        if len(plan.observe):
            return self._unless_refused(key)  # a larger capture may have no memory for queries
        if key.kind == "decode" and not isinstance(key, TappedKey):
            return self._decode_key(key)
        tokens = int(plan.q_len.sum())
        saved = self.costs.saved_ms(tokens, pairs_of(plan))
        own = self.costs.padding_ms(tokens, key.tokens)
        if key in self.forwards:
            # in a long step the device computes longer than the host launches, so padding would only cost time
            return key if own <= saved else None
        larger = self._larger(key)
        lost = saved - own
        if larger is not None:
            if self.costs.padding_ms(tokens, larger.tokens) > saved:
                larger = None
            else:
                needed = key.tokens + key.rows
                lost = self.costs.padding_ms(needed, larger.tokens + larger.rows)
        if not self._is_due(key, lost):
            return larger
        return self._unless_refused(key) or larger

    def _decode_key(self, key: GraphKey) -> GraphKey | None:
        """Return the shape of the capture that runs a decode step of shape ``key``, None if this capture failed.  With
        gradual captures or a long context a larger one runs it until its shape has occurred DECODE_SIGHTS times."""
        if key in self.forwards:
            return self._unless_refused(key)
        if not self.later.gradual and key.span <= SHORT:
            return self._unless_refused(key)
        larger = self._larger(key)
        if larger is None:
            return self._unless_refused(key)
        if not self._has_paid(key, 1.0 / DECODE_SIGHTS):
            return larger
        return self._unless_refused(key) or larger

    def _shared(self, plan: StepPlan, span: int) -> GraphKey | None:
        """Return the shape of a decode step whose rows read a common prefix once; None if each row reads its own
        blocks."""
        if not self.runner.shared_rows(plan):
            return None
        rows = len(plan.slots)
        if not self.shared_sizes or rows > self.shared_sizes[-1]:
            return None
        size = padded_rows(self.shared_sizes, rows)
        key = GraphKey("decode", size, size, span, shared=True)
        return self._unless_refused(key)

    def _larger(self, key: GraphKey) -> GraphKey | None:
        """Return the shape of the smallest existing capture that can run a step of shape ``key``, possibly with
        padding.

        It may be for longer contexts.  Return None if there is none, or if rows read or change values at tap points."""
        if isinstance(key, TappedKey):
            return None
        if key not in self.serving:
            found = [one for one in self.forwards if holds(one, key)]
            size = attrgetter("tokens", "rows", "span")
            self.serving[key] = min(found, key=size, default=None)
        return self.serving[key]

    def _is_due(self, key: GraphKey, lost: float) -> bool:
        """Count ``lost`` milliseconds that a step of shape ``key`` loses without a capture of its own; return whether
        to capture this shape now.

        It is captured once its steps have lost as much time as a capture takes, unless the largest number of captures
        is reached."""
        share = max(lost, 0.0) / self.costs.launch_ms
        return self._has_paid(key, min(share, 1.0) / SIGHTS)

    def _has_paid(self, key: GraphKey, share: float) -> bool:
        """Add the ``share`` of a capture's time that a step of shape ``key`` lost; return whether to capture the shape
        now."""
        if len(self.paid) >= MOST_KINDS:
            self.paid.clear()
        paid = self.paid.get(key, 0.0) + share
        self.paid[key] = paid
        if paid < 1 or len(self.forwards) >= CAPTURES:
            return False
        if not isinstance(key, TappedKey):
            return True
        tapped = sum(isinstance(one, TappedKey) for one in self.forwards)
        return tapped < TAPPED_CAPTURES

    def _unless_refused(self, key: GraphKey) -> GraphKey | None:
        return None if key in self.refused else key

    def sample_operations(self, plan: StepPlan) -> SampleOperations | None:
        """Return the operations that the SAMPLE part of a step needs, or None if they cannot be captured."""
        if len(plan.held) or len(plan.draft) or len(plan.guided):
            return None
        if not len(plan.samples):
            return None
        slots = plan.slots[plan.samples]
        late = len(plan.late) > 0
        return self.slot_operations(slots, plan.topk, late)

    def slot_operations(self, slots: np.ndarray, topk: int, late: bool) -> SampleOperations | None:
        """Return the operations with which a token is drawn for each of ``slots`` i32 [N]; None if they cannot be
        captured.

        ``topk`` is ``StepPlan.topk``.  ``late`` means that at least one row has a token mask (``StepPlan.late``).
        """
        state = self.runner.state
        sampler = len(state.processors) - 1
        variants = []
        for i, processor in enumerate(state.processors):
            on = processor.active[slots]
            if i != sampler and not on.any():
                variants.append(-1)
                continue
            if not self.runner.graph_safe[i]:
                return None
            bits = np.bitwise_or.reduce(processor.variant[slots])
            variants.append(int(bits))
        wants_min = bool(state.wants_min[slots].any())
        return SampleOperations(tuple(variants), wants_min, topk, late)

    # ---- run -----------------------------------------------------------------------------------------------------

    def forward(self, key: GraphKey, plan: StepPlan) -> Tensor | None:
        """Replay the layers of a step, and return the hidden states [R, H] of its rows.  A missing capture of shape
        ``key`` is made first.  Return None if it cannot be made."""
        if key not in self.forwards and not self._try_forward(key):
            return None
        captured = self.forwards[key]
        if key.kind == "mixed":
            packed = step.pack_rows(plan, key.rows, key.tokens, self.spare)
            table = staged(packed, self.runner.device)
            # ``rows`` is set, because the capture of a mixed step has a row table
            captured.rows.copy_(table, non_blocking=True)  # type: ignore[union-attr]
            slots = np.full(len(plan.slots), self.spare)
            slots[plan.samples] = plan.slots[plan.samples]
            b = self._take(key.rows, slots)
            if isinstance(key, ImagedKey) and self.imaged is not None:
                self.imaged.fill(plan, key.tokens)
        else:
            b = self._take(key.rows, plan.slots)
        if isinstance(key, TappedKey) and key.given:
            self.runner.taps.give(plan, key.rows)
        captured.graph.replay()
        if captured.queries is not None and len(plan.observe):
            self.runner.compactor.queries.take(plan, captured.queries)  # type: ignore[union-attr]
        return b.hidden[: len(plan.slots)]

    def sample(
        self,
        key: GraphKey,
        operations: SampleOperations,
        plan: StepPlan,
        late: LateInputs | None,
    ) -> tuple[Tensor, Any] | None:
        """Replay the SAMPLE part of a step.

        Return (i32 [3, B] with tokens, counts and flags of the rows; their log-probabilities, or None if ``operations``
        has none).  Return None if the capture fails.  ``late`` has the token masks, None if no row has one."""
        if late is not None:
            rows = plan.samples[plan.late]
            self.late_masks().put(rows, late.mask)
        captured = self._sample_of(key.rows, operations)
        if captured is None:
            return None
        captured.graph.replay()
        if late is not None:
            self.late_masks().read_now()
        return self.buffers[key.rows].out, captured.result

    def _sample_of(self, rows: int, operations: SampleOperations) -> Captured | None:
        """Return the SAMPLE capture for ``rows`` rows, and make it if it is missing.  Return None if its capture
        failed, or if there are already CAPTURES of them."""
        at = (rows, operations)
        if at not in self.samples:
            if len(self.samples) >= CAPTURES:
                self._note(f"{CAPTURES} kinds of draws are captured: others are launched apart")
                return None
            self.samples[at] = self._capture_sample(rows, operations)
        return self.samples[at]

    def late_masks(self) -> DeviceMasks:
        if self.masks is None:
            r = self.runner
            self.masks = DeviceMasks(self.sizes[-1], r.worker.vocab_size, r.device)
        return self.masks

    def warm(self) -> None:
        """Capture the steps that first requests need, and queue the captures of other sizes in ``later``.

        Without ``gradual`` all sizes are captured now.  The largest sizes come first, so that smaller captures reuse
        their memory."""
        r = self.runner
        now, later, compiled, served = rehearse_first(self)
        rehearsals = r.worker.rehearsals
        with r.worker.times.of("captures"):
            for shape in progress.counted(progress.CAPTURES, now):
                rehearsals.wait(compiled[shape])  # of this shape only; others are compiled during its capture
                self.capture_shape(shape)
            if self.mixed:
                later += self._warm_mixed()
            if r.graph_safe[-1] and self.known is None:
                for variant in sampler_variants(r.sampler):
                    self._draw_once(variant)
        self.later.begin(later)
        finish_served(self, served)

    def _compile(self, shapes: Sequence[GraphKey | Drawn]) -> None:
        """Compile the kernels of captures before they are made, if ``compile_ahead`` is on."""
        rehearsals = self.runner.worker.rehearsals
        begun = rehearsals.begin_named({shape: partial(self.rehearse, shape) for shape in shapes})
        for jobs in begun.values():
            rehearsals.wait(jobs)

    def capture_shape(self, shape: GraphKey | Drawn) -> None:
        """Make a capture ahead of the steps that need it, and measure it if ``unmeasured``.  Only an error in a decode
        step at the start is raised."""
        if isinstance(shape, Drawn):
            self._sample_of(*shape)
            return
        plain = shape.kind == "decode" and not shape.shared and shape.span <= SHORT
        if plain and shape.rows not in self.sizes:
            return
        if plain and not self.later.begun:
            self._capture_forward(shape)
        elif shape not in self.forwards:
            self._try_forward(shape)
        if self.unmeasured(shape):
            self._time_decode(shape)

    def unmeasured(self, key: GraphKey) -> bool:
        """Return whether a replay can be timed and was not, for example because it was captured during a step."""
        if self.known is not None or key not in self.forwards or key.rows < self.measured_from:
            return False
        return key == GraphKey("decode", key.rows, key.rows, SHORT) and key.rows not in self.times

    def _time_decode(self, key: GraphKey) -> None:
        """Measure the replay of a decode step, and remove the sizes whose replays take longer than that of a larger
        size."""
        self._spare_buffers(key.rows)
        graph = self.forwards[key].graph
        self.times[key.rows] = replay_ms(graph)
        useful = useful_sizes(self.times)
        for size in set(self.times).difference(useful):
            del self.times[size]
            self.sizes.remove(size)
            self.serving.clear()
            for kind in (GraphKey, AdaptedKey):
                removed = kind("decode", size, size, SHORT)
                self.forwards.pop(removed, None)

    def _warm_mixed(self) -> list[GraphKey]:
        """Capture some mixed steps, so that neither kernels nor long steps are captured during the first burst.

        The smallest step is first; if its capture fails, no other is tried.  Then the costs are measured, and sizes are
        left out in which the device computes longer than the launches take.  Return the shapes that are captured later.
        """
        wiring = self.runner.wiring
        budget = wiring.max_num_batched_tokens
        rows, tokens = first_mixed(self.coarse, 1)[-1]
        least = self._short_mixed(rows, tokens)
        longest = token_size(min(budget, FIRST_TOKENS[-1]))
        measured = self._short_mixed(rows, max(longest, rows))
        self._compile([least, measured])
        if not self._try_forward(least):
            return []
        if self.known is None and (measured == least or self._try_forward(measured)):
            self.costs = self._measure(measured)
        most = max(self.costs.most_tokens(), tokens)
        sizes = first_mixed(self.coarse, min(budget, most))
        now, later = self.later.divide_mixed([self._short_mixed(r, t) for r, t in sizes])
        if self.runner.adapters is not None:
            now.append(AdaptedKey("mixed", rows, tokens, SHORT))
        if self.imaged is not None:
            imaged = first_imaged(sizes, self.imaged.most_tokens)
            now += [self._short_mixed(r, t, ImagedKey) for r, t in imaged]
        self._compile(now)
        for key in progress.counted(f"{progress.CAPTURES} of mixed steps", now):
            if key not in self.forwards:
                self._try_forward(key)
        captured = [key.tokens for key in (*self.forwards, *later)]
        tokens = 1 + max(captured)
        if self.known is None and tokens <= min(budget, wiring.max_model_len):
            self._launch_once(tokens)
        return later

    def _short_mixed(self, rows: int, tokens: int, kind: type[GraphKey] = GraphKey) -> GraphKey:
        """Return the shape of a mixed step with short contexts."""
        span = self._span(1, tokens)
        return kind("mixed", rows, tokens, span)

    def step_tokens(self) -> int:
        """Return the number of tokens to which the scheduler should limit steps, 0 for no limit.

        It is the size of the longest capture if a step of ``max_num_batched_tokens`` takes longer to launch than to
        compute.  Two captured steps are then faster than one step of the same tokens as separate launches."""
        budget = self.runner.wiring.max_num_batched_tokens
        longest = max(self._mixed_tokens(), default=0)
        if FIRST_TOKENS[-1] <= longest < budget < self.costs.most_tokens():
            return longest
        return 0

    def step_sizes(self) -> tuple[int, ...]:
        """Return the numbers of tokens for which long mixed steps are captured, ascending."""
        long = [n for n in self._mixed_tokens() if n >= FIRST_TOKENS[-1]]
        return tuple(sorted(long))

    def _mixed_tokens(self) -> set[int]:
        """Return the sizes in tokens of the mixed steps whose captures exist or are queued."""
        shapes = {*self.forwards, *self.later.queue}
        plain = [key for key in shapes if type(key) is GraphKey]
        return {key.tokens for key in plain if key.kind == "mixed"}

    def _launch_once(self, tokens: int) -> None:
        """Run a prompt of ``tokens`` tokens as separate launches, and note the exceptions of plug-ins."""
        for note in launch_once(self.runner, tokens, self.draws_apart):
            self._note(note)

    def _measure(self, key: GraphKey) -> StepCosts:
        """Measure the costs of mixed steps by a replay of the last capture, which has the shape ``key``.

        The replay computes all matrix products but no attention, because its row table has no rows."""
        worker = self.runner.worker
        graph = self.forwards[key].graph
        token_ms = replay_ms(graph) / key.tokens
        # time of a (query, key) pair in attention, relative to the time of a token in all products
        each_pair = pair_flops(worker.parts.layers) / max(worker.weight_bytes, 1)
        layers = [layer for cache in worker.caches for layer in cache]
        narrow = any(x.element_size() == 1 for layer in layers for x in layer.values())
        factor = NARROW if narrow else 1.0
        return StepCosts(self.recorder.launch_ms, token_ms, token_ms * each_pair, factor)

    def _draw_once(self, variant: int) -> None:
        """Draw a token as a separate launch, and note an exception of the sampler."""
        for note in draw_once(self.runner, variant):
            self._note(note)

    def _take(self, size: int, slots: np.ndarray) -> Buffers:
        """Return the buffers of captures of ``size`` rows, after ``slots`` [n] were copied to their first n rows.

        The other rows get the spare slot.  Slots that did not change are not copied."""
        b = self._buffers(size)
        used = b.host_slots[: len(slots)]
        padding = b.host_slots[len(slots) :]
        if not np.array_equal(used, slots) or (padding != self.spare).any():
            used[:] = slots
            padding[:] = self.spare
            copied = torch.from_numpy(b.host_slots.copy())
            b.slots.copy_(copied, non_blocking=True)
        return b

    # ---- capture -------------------------------------------------------------------------------------------------

    def _buffers(self, size: int) -> Buffers:
        if size not in self.buffers:
            r = self.runner
            device = r.device
            host_slots = np.full(size, self.spare)
            slots = torch.full((size,), self.spare, dtype=torch.int64, device=device)
            dtype = getattr(torch, r.wiring.dtype)
            hidden = torch.zeros(size, r.worker.hidden_size, dtype=dtype, device=device)
            out = torch.zeros(3, size, dtype=torch.int32, device=device)
            self.buffers[size] = Buffers(slots, hidden, out, host_slots)
        return self.buffers[size]

    def _try_forward(self, key: GraphKey) -> bool:
        """Capture the layers of a step of shape ``key``.  Return False and write a note if that fails."""
        try:
            self._capture_forward(key)
        except BaseException as e:
            # the model or the attention back end cannot be captured, or memory is exhausted
            self.refused.add(key)
            how = "it runs as separate launches, or in a larger capture"
            self._note(f"a step is not captured, {how}: {describe_error(as_exception(e))}")
            return False
        return True

    def _capture_forward(self, key: GraphKey) -> None:
        b = self._spare_buffers(key.rows)
        self.serving.clear()
        run, tensors = self._layers(key, b)
        graph, result = self.recorder.capture(run, self.layers.before(key, run))
        self.forwards[key] = Captured(graph, result, **tensors)

    def rehearse(self, shape: GraphKey | Drawn) -> None:
        """Run the operations of a capture on spare rows, without recording them."""
        b = self._spare_buffers(shape.rows)
        run = self._draw(b, shape.operations) if isinstance(shape, Drawn) else self._layers(shape, b)[0]
        self.recorder.rehearse(partial(self.layers.shortened, run))

    def _spare_buffers(self, size: int) -> Buffers:
        """Return the buffers of captures of ``size`` rows, all of them with the spare slot."""
        b = self._buffers(size)
        b.host_slots[:] = self.spare
        b.slots.fill_(self.spare)
        return b

    def _layers(self, key: GraphKey, b: Buffers) -> LayersRun:
        """Return the function that runs the layers of a step in the rows of ``b``, and the fields of its
        ``Captured``."""
        r = self.runner
        if key.kind == "mixed":
            return mixed_run(r, self.imaged, key, b)
        queries = None
        if r.compactor is not None and r.compactor.queries is not None and key.rows <= OBSERVED_ROWS:
            queries = StepQueries()
        return decode_run(r, key, b, queries)

    def _capture_sample(self, size: int, operations: SampleOperations) -> Captured | None:
        b = self._buffers(size)
        before = b.slots.clone()
        b.slots.fill_(self.spare)
        try:
            graph, result = self.recorder.capture(self._draw(b, operations))
            wide = self._calls(b, operations).float32
            self.draw_bits[wide] |= operations.variants[-1]
            return Captured(graph, result)
        except BaseException as e:  # a plug-in that cannot be captured runs as separate launches
            self._note(f"sampling is not captured, it runs as separate launches: {describe_error(as_exception(e))}")
            return None
        finally:
            b.slots.copy_(before)

    def _draw(self, b: Buffers, operations: SampleOperations) -> Callable[[], Any]:
        """Return the function that draws the tokens of the rows of ``b`` (the SAMPLE part of a step)."""
        r = self.runner

        def run() -> Any:
            calls = self._calls(b, operations)
            return step.sample(calls, r.state, r.model, b.hidden)

        return run

    def _calls(self, b: Buffers, operations: SampleOperations) -> CapturedCalls:
        """Return the calls of processors and the sampler for the rows of ``b``.

        The sampler gets float32 logits if its kernels are compiled for these and not for 16-bit logits, because a
        compilation takes up to two seconds.  ``draw_bits`` shows for which variants they are compiled.  The tokens do
        not depend on the dtype."""
        calls = CapturedCalls(self.runner, b, operations, self.masks)
        variant = operations.variants[-1]
        compiled = {wide: not variant & ~bits for wide, bits in self.draw_bits.items()}
        if compiled[True] and not compiled[False]:
            calls.float32 = True
        return calls

    def _note(self, text: str) -> None:
        """Add a text to the notes and log it as a warning, unless it has been added before."""
        if text not in self.notes:
            self.notes.append(text)
            log.warning(text)
