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
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from minivllm.core import progress
from minivllm.core.external_calls import as_exception
from minivllm.core.interfaces.attention import GraphKey
from minivllm.core.interfaces.params import SamplingParams
from minivllm.core.interfaces.plan import StepPlan
from minivllm.core.interfaces.sampling import Draw
from minivllm.device.kernels.mask import DeviceMasks
from minivllm.device.layers.captured_sizes import (
    FIRST_TOKENS,
    MOST_TOKENS,
    coarse_sizes,
    first_mixed,
    long_decode,
    row_sizes,
    shared_sizes,
    token_size,
    useful_sizes,
)
from minivllm.device.layers.pooling import reads_last_tokens
from minivllm.errors import describe_error

from . import step
from .adapters import applied
from .calls import SeparateCalls
from .capture import GraphRecorder, replay_ms
from .captured import Buffers, CapturedCalls, Drawn, SampleOperations, bounds, column_tensors, read_columns
from .graph_keys import AdaptedKey, ImagedKey, TappedKey, adapted, holds
from .later import LaterCaptures
from .query_store import StepQueries
from .running import Running
from .state import staged
from .step_costs import NARROW, StepCosts, pair_flops, pairs_of

if TYPE_CHECKING:
    from minivllm.core.interfaces.model import StepTensors
    from minivllm.core.interfaces.plan import LateInputs

    from .runner import Runner

log = logging.getLogger(__name__)
# Steps whose contexts have at most this number of tokens share their captures.  The attention back end splits longer
# contexts differently, so they have captures of their own.
SHORT = 8192
WHOLE_TOKENS = 1024  # mixed steps of at least this many tokens are captured only for contexts of any length
CAPTURES = 160  # largest number of captures of FORWARD (the layers), and of SAMPLE (the draw)
# A mixed step of a new shape is captured when the steps of this shape have lost as much time as a capture takes.  A
# capture takes the host about as long as SIGHTS steps of separate launches: a run, a recording, and the graph's
# instantiation.  A burst of requests has many shapes, so capturing each at once would be slow.
SIGHTS = 4
# A decode step runs in a larger capture this many times before its size is captured during a step.  Each time costs at
# most a few milliseconds, a capture 20 to 80, so gaps between tokens are rare.
DECODE_SIGHTS = 16
MOST_KINDS = 4096  # largest number of shapes in ``Graphs.paid``; taps of several points have many combinations
TAPPED_CAPTURES = 48  # largest number of captured shapes with tap points that rows read or change
OBSERVED_ROWS = 64  # captures of decode steps of at most this many rows keep their queries for a KV compressor


@dataclass
class Captured:
    """A captured graph, the tensors that a replay reads, and the tensors of its result."""

    graph: Any
    result: Any = None
    # i64 row table of a mixed step (see ``step.pack_rows``)
    rows: torch.Tensor | None = None
    # tensors that the graph uses without having allocated them; it stores only their addresses, so they must stay alive
    keep: Any = None
    queries: StepQueries | None = None  # queries of a replay of a decode step, if a compressor reads them


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
    # variant bits of the samplers in captures so far: False -> with 16-bit logits, True -> with float32 logits
    draw_bits: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})
    masks: DeviceMasks | None = None  # memory of token masks; None until the first step in which a row has a mask
    # shapes whose capture failed; their steps run as separate launches
    refused: set[GraphKey] = field(default_factory=set)
    # rows of a measured decode step -> milliseconds of its replay
    times: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        wanted = self.known is not None or self.runner.wiring.steps.graph_captures == "gradual"
        gradual = self.gradual and wanted
        self.later = LaterCaptures(self, self.runner.worker.rehearsals, gradual)
        self.spare = self.runner.wiring.max_num_seqs
        self.sizes = row_sizes(self.spare)
        self.coarse = coarse_sizes(self.spare)
        self.shared_sizes = [] if self.runner.shared is None else shared_sizes(self.spare)
        self.recorder = GraphRecorder()
        self.imaged = self.runner.image_steps()
        # first estimate: two operations for each weight (of two bytes) and token, with the weights of all experts
        self.costs = StepCosts.guessed(self.runner.worker.weight_bytes)  # ``_measure`` replaces it
        if self.known is not None:
            self.costs = self.known.costs
            self.sizes = list(self.known.sizes)

    def measured(self) -> MeasuredCaptures:
        """Return the costs and sizes of the captures that were measured so far."""
        return MeasuredCaptures(self.costs, tuple(self.sizes))

    # ---- which capture -------------------------------------------------------------------------------------------

    def shape(self, plan: StepPlan) -> GraphKey | None:
        """Return the shape of the smallest capture in which a step could run; None if such a step cannot be
        captured."""
        rows = len(plan.slots)
        tokens = int(plan.q_len.sum())
        if not rows or rows > self.sizes[-1] or len(plan.host) or len(plan.prompt):
            return None
        if len(plan.sums):
            return None  # attention sums use numbers of tokens from the host, which a replay would not update
        if len(plan.pooled) and not reads_last_tokens(plan):
            return None  # a capture returns the hidden state of only one token per row
        if len(plan.draft) and self.runner.state.recurrent is not None:
            return None  # recurrent layers need a row and its drafts as one row of several tokens
        longest = int((plan.computed + plan.q_len).max())
        (steered, read) = self.runner.taps.of_step(plan)
        given = len(plan.given) > 0
        methods, changed = self.runner.adapts(plan)
        adapts = bool(methods)
        observed = len(plan.observe) > 0
        kind = AdaptedKey if adapts else GraphKey
        if (images := self.runner.images) is not None and images.reached(plan):
            if self.imaged is None or steered or read or given or adapts or not self.imaged.takes(plan):
                return None
            kind = ImagedKey
        # a decode step takes the newest token of each slot, so rows of drafts cannot run in one
        if tokens == rows and len(plan.samples) == rows and not len(plan.draft) and kind is not ImagedKey:
            plain = not (steered or read or given or adapts or observed)
            span = self._span(longest)
            if plain and (shared := self._shared(plan, span)) is not None:
                return shared
            size = self.sizes[int(np.searchsorted(self.sizes, rows))]
            if observed and size > OBSERVED_ROWS:
                return None  # only captures of few rows keep queries
            key = kind("decode", size, size, span)
        elif observed or not self.mixed or tokens > MOST_TOKENS or read or given:
            return None  # a capture has memory for the queries, tap values and set experts of one token per row only
        else:
            size = self.coarse[int(np.searchsorted(self.coarse, rows))]
            padded = max(token_size(tokens), size)
            key = kind("mixed", size, padded, self._span(longest, padded))
        if steered or read or given or changed:
            shape = key.kind, key.rows, key.tokens, key.span
            key = TappedKey(*shape, steered=steered, read=read, adapted=adapts, given=given, changed=changed)
        return key

    def _span(self, longest: int, tokens: int = 0) -> int:
        """Return the longest context in tokens, SHORT or ``max_model_len``, of the captures for a step.

        ``longest`` is the longest context of the step.  ``tokens`` is the size of a mixed step, 0 for a decode step.  A
        long mixed step hardly gains from a separate capture of short contexts, so it has none."""
        whole = self.runner.wiring.max_model_len
        return SHORT if longest <= SHORT and (tokens < WHOLE_TOKENS or whole <= SHORT) else whole

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
        if larger is not None and self.costs.padding_ms(tokens, larger.tokens) > saved:
            larger = None
        if larger is not None:
            lost = self.costs.padding_ms(key.tokens + key.rows, larger.tokens + larger.rows)
        due = self._is_due(key, lost) and (larger is None or self.later.compiled(key))
        return (self._unless_refused(key) if due else None) or larger

    def _decode_key(self, key: GraphKey) -> GraphKey | None:
        """Return the shape of the capture that runs a decode step of shape ``key``, None if this capture failed.  With
        gradual captures or a long context a larger one runs it until its shape has occurred DECODE_SIGHTS times."""
        if key in self.forwards or (not self.later.gradual and key.span <= SHORT):
            return self._unless_refused(key)
        larger = self._larger(key)
        if larger is None:
            return self._unless_refused(key)
        due = self._has_paid(key, 1.0 / DECODE_SIGHTS) and self.later.compiled(key)
        return (self._unless_refused(key) if due else None) or larger

    def _shared(self, plan: StepPlan, span: int) -> GraphKey | None:
        """Return the shape of a decode step whose rows read a common prefix once; None if each row reads its own
        blocks."""
        if not self.runner.shared_rows(plan):
            return None
        at = int(np.searchsorted(self.shared_sizes, len(plan.slots)))
        if at == len(self.shared_sizes):
            return None
        size = self.shared_sizes[at]
        return self._unless_refused(GraphKey("decode", size, size, span, shared=True))

    def _larger(self, key: GraphKey) -> GraphKey | None:
        """Return the shape of the smallest existing capture that can run a step of shape ``key``, possibly with
        padding.

        It may be for longer contexts.  Return None if there is none, or if rows read or change values at tap points."""
        if isinstance(key, TappedKey):
            return None
        if key not in self.serving:
            found = [one for one in self.forwards if holds(one, key)]
            self.serving[key] = min(found, key=lambda one: (one.tokens, one.rows, one.span), default=None)
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
        self.paid[key] = self.paid.get(key, 0.0) + share
        if self.paid[key] < 1 or len(self.forwards) >= CAPTURES:
            return False
        tapped = sum(isinstance(one, TappedKey) for one in self.forwards)
        return tapped < TAPPED_CAPTURES or not isinstance(key, TappedKey)

    def _unless_refused(self, key: GraphKey) -> GraphKey | None:
        return None if key in self.refused else key

    def sample_operations(self, plan: StepPlan) -> SampleOperations | None:
        """Return the operations that the SAMPLE part of a step needs, or None if they cannot be captured."""
        if not len(plan.samples) or len(plan.held) or len(plan.draft) or len(plan.guided):
            return None
        return self.slot_operations(plan.slots[plan.samples], plan.topk, len(plan.late) > 0)

    def slot_operations(self, slots: np.ndarray, topk: int, late: bool) -> SampleOperations | None:
        """Return the operations with which a token is drawn for each of ``slots`` i32 [N]; None if they cannot be
        captured.

        ``topk`` is ``StepPlan.topk``.  ``late`` means that at least one row has a token mask (``StepPlan.late``).
        """
        state = self.runner.state
        variants = []
        for i, processor in enumerate(state.processors):
            on = processor.active[slots]
            active = bool(on.any()) or i == len(state.processors) - 1
            if active and not self.runner.graph_safe[i]:
                return None
            bits = np.bitwise_or.reduce(processor.variant[slots])
            variants.append(int(bits) if active else -1)
        wants_min = bool(state.wants_min[slots].any())
        return SampleOperations(tuple(variants), wants_min, topk, late)

    # ---- run -----------------------------------------------------------------------------------------------------

    def forward(self, key: GraphKey, plan: StepPlan) -> torch.Tensor | None:
        """Replay the layers of a step, and return the hidden states [R, H] of its rows.  A missing capture of shape
        ``key`` is made first.  Return None if it cannot be made."""
        if key not in self.forwards and not self._try_forward(key):
            return None
        captured = self.forwards[key]
        if key.kind == "mixed":
            table = step.pack_rows(plan, key.rows, key.tokens, self.spare)
            # ``rows`` is set, because the capture of a mixed step has a row table
            captured.rows.copy_(staged(table, self.runner.device), non_blocking=True)  # type: ignore[union-attr]
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
    ) -> tuple[torch.Tensor, Any] | None:
        """Replay the SAMPLE part of a step.

        Return (i32 [3, B] with tokens, counts and flags of the rows; their log-probabilities, or None if ``operations``
        has none).  Return None if the capture fails.  ``late`` has the token masks, None if no row has one."""
        if late is not None:
            self.late_masks().put(plan.samples[plan.late], late.mask)
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
            self.masks = DeviceMasks(self.sizes[-1], self.runner.worker.vocab_size, self.runner.device)
        return self.masks

    def warm(self) -> None:
        """Capture the steps that first requests need, and queue the captures of other sizes in ``later``.

        Without ``gradual`` all sizes are captured now.  The largest sizes come first, so that smaller captures reuse
        their memory."""
        sampler = self.runner.sampler
        prompt = np.zeros(1, np.int32)
        bound = [sampler.bind_prompt(SamplingParams(temperature=t), prompt) for t in (0.0, 1.0)]
        variants = sorted({row.variant for row in bound if row is not None})
        others = (-1,) * (len(self.runner.processors) - 1)
        kinds = (GraphKey,) if self.runner.adapters is None else (GraphKey, AdaptedKey)
        decodes = [kind("decode", n, n, SHORT) for n in reversed(self.sizes) for kind in kinds]
        if (pages := self.runner.shared) is not None:
            sizes = [n for n in reversed(self.shared_sizes) if pages.can_save(n, SHORT)]
            decodes += [GraphKey("decode", n, n, SHORT, shared=True) for n in sizes]
        rows = sorted({*self.sizes, *self.coarse}, reverse=True)
        draws = [Drawn(n, SampleOperations((*others, variant), False, -1, False)) for n in rows for variant in variants]
        now, later = self.later.divide(decodes, draws)
        whole = self._span(SHORT + 1)
        long = [GraphKey("decode", n, n, whole) for n in long_decode(self.sizes)] if whole > SHORT else []
        (later if self.later.gradual else now).extend(long)
        self._compile(now)
        with self.runner.worker.times.of("captures"):
            for shape in progress.counted(progress.CAPTURES, now):
                self.capture_shape(shape)
            if self.mixed:
                later += self._warm_mixed()
            if self.runner.graph_safe[-1] and self.known is None:
                for variant in variants:
                    self._draw_once(variant)
        self.later.begin(later)

    def _compile(self, shapes: Sequence[GraphKey | Drawn]) -> None:
        """Compile the kernels of captures before they are made, if ``compile_ahead`` is on."""
        self.runner.worker.rehearsals.compile(*(partial(self.rehearse, shape) for shape in shapes))

    def capture_shape(self, shape: GraphKey | Drawn) -> None:
        """Make a capture ahead of the steps that need it.  Only an error in a decode step at the start is raised."""
        if isinstance(shape, Drawn):
            self._sample_of(*shape)
        elif shape.shared or (shape.kind == "decode" and shape.span > SHORT):
            self._try_forward(shape)
        elif shape.kind == "decode" and shape.rows not in self.sizes:
            return
        elif shape.kind == "decode" and not self.later.begun:
            self._capture_forward(shape)
            self._time_decode(shape)
        else:
            self._try_forward(shape)

    def _time_decode(self, key: GraphKey) -> None:
        """Measure the replay of a decode step, and remove the sizes whose replays take longer than that of a larger
        size.

        The slots of all rows must be the spare slot."""
        whole = key == GraphKey("decode", key.rows, key.rows, SHORT)
        if not whole or key.rows < self.measured_from or self.known is not None:
            return
        self.times[key.rows] = replay_ms(self.forwards[key].graph)
        for size in set(self.times) - set(useful_sizes(self.times)):
            del self.times[size]
            self.sizes.remove(size)
            self.serving.clear()
            for kind in (GraphKey, AdaptedKey):
                self.forwards.pop(kind("decode", size, size, SHORT), None)

    def _warm_mixed(self) -> list[GraphKey]:
        """Capture some mixed steps, so that neither kernels nor long steps are captured during the first burst.

        The smallest step is first; if its capture fails, no other is tried.  Then the costs are measured, and sizes are
        left out in which the device computes longer than the launches take.  Return the shapes that are captured later.
        """
        budget = self.runner.wiring.max_num_batched_tokens
        rows, tokens = first_mixed(self.coarse, 1)[-1]
        least = GraphKey("mixed", rows, tokens, self._span(1, tokens))
        most = max(token_size(min(budget, FIRST_TOKENS[-1])), rows)
        measured = GraphKey("mixed", rows, most, self._span(1, most))
        self._compile([least, measured])
        if not self._try_forward(least):
            return []
        if self.known is None and (measured == least or self._try_forward(measured)):
            self.costs = self._measure(measured)
        sizes = first_mixed(self.coarse, min(budget, max(self.costs.most_tokens(), tokens)))
        now, later = self.later.divide_mixed(GraphKey("mixed", r, t, self._span(1, t)) for r, t in sizes)
        if self.runner.adapters is not None:
            now.append(AdaptedKey("mixed", rows, tokens, SHORT))
        if self.imaged is not None:
            now.append(ImagedKey("mixed", rows, tokens, SHORT))
        self._compile(now)
        for key in progress.counted(f"{progress.CAPTURES} of mixed steps", now):
            if key not in self.forwards:
                self._try_forward(key)
        tokens = 1 + max(key.tokens for key in (*self.forwards, *later))
        if tokens <= min(budget, self.runner.wiring.max_model_len) and self.known is None:
            self._launch_once(tokens)
        return later

    def step_tokens(self) -> int:
        """Return the number of tokens to which the scheduler should limit steps, 0 for no limit.

        It is the size of the longest capture if a step of ``max_num_batched_tokens`` takes longer to launch than to
        compute.  Two captured steps are then faster than one step of the same tokens as separate launches."""
        budget = self.runner.wiring.max_num_batched_tokens
        longest = max(self._mixed_tokens(), default=0)
        return longest if FIRST_TOKENS[-1] <= longest < budget < self.costs.most_tokens() else 0

    def step_sizes(self) -> tuple[int, ...]:
        """Return the numbers of tokens for which long mixed steps are captured, ascending."""
        return tuple(sorted(n for n in self._mixed_tokens() if n >= FIRST_TOKENS[-1]))

    def _mixed_tokens(self) -> set[int]:
        """Return the sizes in tokens of the mixed steps whose captures exist or are queued."""
        shapes = {*self.forwards, *self.later.queue}
        return {key.tokens for key in shapes if type(key) is GraphKey and key.kind == "mixed"}

    def _launch_once(self, tokens: int) -> None:
        """Run a step of one prompt of ``tokens`` tokens as separate launches, up to the drawn token.

        This compiles and loads the kernels of such steps before the first request.  The prompt is in the spare slot,
        which counts as ended.  So no token is accepted, and keys and values are written to the null block.
        """
        r = self.runner
        if r.state.recurrent is not None:
            return  # the trial step would change recurrent states
        slots, q_len, first = np.array([[self.spare], [tokens], [0]], np.int32)
        plan = StepPlan(0, slots, q_len, computed=first, samples=first)
        read = r.read(plan)
        try:
            last = r.state.to(q_len - 1).long()
            hidden = step.forward(r.model, r.backend, read, GraphKey(), last, r.selects_tokens(read))
            if self.draws_apart:
                self._draw_apart(plan, hidden)
        except BaseException as e:  # a plug-in raised; requests that use it will report the error
            self._note(f"a long step was not tried before the first request: {describe_error(as_exception(e))}")

    def _draw_apart(self, plan: StepPlan, hidden: torch.Tensor) -> None:
        """Draw the tokens of a step of the spare slot from ``hidden`` [1, H] by separate launches.

        An exception of a plug-in is noted."""
        r = self.runner
        running = Running(plan)
        calls = SeparateCalls(r.chain, r.wiring, r.own_models, running, None, {})
        step.sample(calls, r.state, r.model, hidden)
        for error in running.errors:
            self._note(f"{error.plugin} failed in a step before the first request: {error.message}")
        r.seams.take()  # discard the measured times of this step, which include the compilation of kernels

    def _measure(self, key: GraphKey) -> StepCosts:
        """Measure the costs of mixed steps by a replay of the last capture, which has the shape ``key``.

        The replay computes all matrix products but no attention, because its row table has no rows."""
        worker = self.runner.worker
        token_ms = replay_ms(self.forwards[key].graph) / key.tokens
        # time of a (query, key) pair in attention, relative to the time of a token in all products
        each_pair = pair_flops(worker.parts.layers) / max(worker.weight_bytes, 1)
        narrow = any(x.element_size() == 1 for cache in worker.caches for layer in cache for x in layer.values())
        return StepCosts(self.recorder.launch_ms, token_ms, token_ms * each_pair, NARROW if narrow else 1.0)

    def _draw_once(self, variant: int) -> None:
        """Draw once for the spare slot from float32 logits, so that the sampler's kernels are compiled.

        Steps of separate launches always use float32 logits."""
        r = self.runner
        slots = torch.full((1,), self.spare, dtype=torch.int64, device=r.device)
        rows = step.rows_of(r.state, slots, torch.zeros_like(slots), 1)
        rows.variant = variant
        logits = torch.zeros(1, r.worker.vocab_size, device=r.device)
        try:
            r.sampler.draw(logits, rows, r.state.processors[-1].columns, Draw(torch.zeros_like(slots)))
        except BaseException as e:  # the sampler raised; requests that use it will report the error
            self._note(f"the sampler was not tried before the first request: {describe_error(as_exception(e))}")

    def _take(self, size: int, slots: np.ndarray) -> Buffers:
        """Return the buffers of captures of ``size`` rows, after ``slots`` [n] were copied to their first n rows.

        The other rows get the spare slot.  Slots that did not change are not copied."""
        b = self._buffers(size)
        used = b.host_slots[: len(slots)]
        padding = b.host_slots[len(slots) :]
        if not np.array_equal(used, slots) or (padding != self.spare).any():
            used[:] = slots
            padding[:] = self.spare
            b.slots.copy_(torch.from_numpy(b.host_slots.copy()), non_blocking=True)
        return b

    # ---- capture -------------------------------------------------------------------------------------------------

    def _buffers(self, size: int) -> Buffers:
        if size not in self.buffers:
            r = self.runner
            slots = torch.full((size,), self.spare, dtype=torch.int64, device=r.device)
            dtype = getattr(torch, r.wiring.dtype)
            hidden = torch.zeros(size, r.worker.hidden_size, dtype=dtype, device=r.device)
            out = torch.zeros(3, size, dtype=torch.int32, device=r.device)
            self.buffers[size] = Buffers(slots, hidden, out, np.full(size, self.spare))
        return self.buffers[size]

    def _try_forward(self, key: GraphKey) -> bool:
        """Capture the layers of a step of shape ``key``.

        Return False and write a note if that fails; return False if the capture was slower than a larger one."""
        try:
            self._capture_forward(key)
        except BaseException as e:
            # the model or the attention back end cannot be captured, or memory is exhausted
            self.refused.add(key)
            how = "it runs as separate launches, or in a larger capture"
            self._note(f"a step is not captured, {how}: {describe_error(as_exception(e))}")
            return False
        self._time_decode(key)
        return key in self.forwards

    def _capture_forward(self, key: GraphKey) -> None:
        b = self._buffers(key.rows)
        b.host_slots[:] = self.spare
        b.slots.fill_(self.spare)
        self.serving.clear()
        run, tensors = self._decode(key, b) if key.kind == "decode" else self._mixed(key, b)
        graph, result = self.recorder.capture(run)
        self.forwards[key] = Captured(graph, result, **tensors)

    def rehearse(self, shape: GraphKey | Drawn) -> None:
        """Run the operations of a capture on spare rows, without recording them."""
        b = self._buffers(shape.rows)
        b.host_slots[:] = self.spare
        b.slots.fill_(self.spare)
        if isinstance(shape, Drawn):
            run = self._draw(b, shape.operations)
        else:
            run, _ = self._decode(shape, b) if shape.kind == "decode" else self._mixed(shape, b)
        self.recorder.rehearse(run)

    def _decode(self, key: GraphKey, b: Buffers) -> tuple[Callable[[], None], dict[str, Any]]:
        """Return the function that runs a decode step in the rows of ``b``, and the fields of its ``Captured``."""
        r = self.runner
        static = column_tensors(r.state, b.slots, bounds(key, len(r.worker.groups)))
        observes = r.compactor is not None and r.compactor.queries is not None and key.rows <= OBSERVED_ROWS
        queries = StepQueries() if observes else None

        def run() -> None:
            read = read_columns(r.state, static)
            read.queries = queries
            self._tap(key, read)
            read.watch = r.watch(read)
            with applied(r.adapters, read.meta, self._methods(key)):
                step.forward(r.model, r.backend, read, key, out=b.hidden)

        return run, {"keep": static, "queries": queries}

    def _mixed(self, key: GraphKey, b: Buffers) -> tuple[Callable[[], None], dict[str, Any]]:
        """Return the function that runs a mixed step in the rows of ``b``, and the fields of its ``Captured``."""
        r = self.runner
        size = step.table_size(key.rows, key.tokens)
        host = bounds(key, len(r.worker.groups))
        table = torch.zeros(size, dtype=torch.int64, device=r.device)
        table[: key.rows] = self.spare

        def run() -> None:
            read, last = step.read_rows(r.state, table, host, padded=True)
            self._tap(key, read)
            if isinstance(key, ImagedKey) and self.imaged is not None:
                self.imaged.enter(read)
            read.watch = r.watch(read)
            selects = r.selects_tokens(read, len(last) if adapted(key) else 0)
            with applied(r.adapters, read.meta, self._methods(key), last if selects else None):
                step.forward(r.model, r.backend, read, key, last, selects, b.hidden)

        return run, {"rows": table}

    def _methods(self, key: GraphKey) -> tuple[int, ...]:
        """Return the indices of the adapter methods that a captured step computes: all, because rows of a replay may
        use any."""
        adapters = self.runner.adapters
        return adapters.all if adapters is not None and adapted(key) else ()

    def _tap(self, key: GraphKey, read: StepTensors) -> None:
        if not isinstance(key, TappedKey):
            return
        if key.steered or key.read or key.given:
            read.taps = self.runner.taps.captured(key.steered, key.read, read.meta, key.given)
        if self.runner.adapters is not None:
            read.taps = self.runner.adapters.taps(self._methods(key), key.changed, read.taps)

    def _capture_sample(self, size: int, operations: SampleOperations) -> Captured | None:
        b = self._buffers(size)
        before = b.slots.clone()
        b.slots.fill_(self.spare)
        try:
            captured = Captured(*self.recorder.capture(self._draw(b, operations)))
            self.draw_bits[self._calls(b, operations).float32] |= operations.variants[-1]
            return captured
        except BaseException as e:  # a plug-in that cannot be captured runs as separate launches
            self._note(f"sampling is not captured, it runs as separate launches: {describe_error(as_exception(e))}")
            return None
        finally:
            b.slots.copy_(before)

    def _draw(self, b: Buffers, operations: SampleOperations) -> Callable[[], Any]:
        """Return the function that draws the tokens of the rows of ``b`` (the SAMPLE part of a step)."""
        r = self.runner
        return lambda: step.sample(self._calls(b, operations), r.state, r.model, b.hidden)

    def _calls(self, b: Buffers, operations: SampleOperations) -> CapturedCalls:
        """Return the calls of processors and the sampler for the rows of ``b``.

        The sampler gets float32 logits if its kernels are compiled for these and not for 16-bit logits, because a
        compilation takes up to two seconds.  ``draw_bits`` shows for which variants they are compiled.  The tokens do
        not depend on the dtype."""
        calls = CapturedCalls(self.runner, b, operations, self.masks)
        variant = operations.variants[-1]
        compiled = {wide: not variant & ~bits for wide, bits in self.draw_bits.items()}
        calls.float32 = calls.float32 or (compiled[True] and not compiled[False])
        return calls

    def _note(self, text: str) -> None:
        """Add a text to the notes and log it as a warning, unless it has been added before."""
        if text not in self.notes:
            self.notes.append(text)
            log.warning(text)
