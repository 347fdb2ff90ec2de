"""StepPlan -> StepResult on one device.

    delta ──► columns          FORWARD  gather ids by slot, layers, hidden states of the rows that draw
                               SAMPLE   logits, processors, token masks, draw, commit, stop flags, result ──► host

FORWARD and SAMPLE are separate so that masks may arrive from the host between them.  If a processor or sampler raises,
the rows that use it end with an error.  If the model or attention back end raises, the step fails.  Both errors are
returned in the ``StepResult``; this module does not raise them.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from minivllm.core.external_calls import as_exception, raise_stored
from minivllm.core.interfaces.attention import GraphKey
from minivllm.core.interfaces.executor import Capacity
from minivllm.core.interfaces.model import takes_logits_indices
from minivllm.core.interfaces.plan import Delta, LateInputs, StepError, StepPlan, merged, rows_with_drafts
from minivllm.core.interfaces.taps import LOGITS
from minivllm.core.timing import SeamTimes
from minivllm.device.hardware import free_ram
from minivllm.device.layers.native_steps import NativeSteps, native_steps
from minivllm.device.layers.pooling import pool, pool_captured, rows_of, used_tokens
from minivllm.errors import RequestError, describe_error, describe_step_error, external_part

from . import step
from .adapters import applied
from .build import build_worker, has_kernels
from .calls import GuardedCalls, ProcessorChain, SeparateCalls
from .capture import release_unused, synchronize
from .compaction import Compactor
from .drafting import Drafting
from .head_model import HeadModel
from .images import ImageState
from .native_head import add_native_head
from .own_model import OwnModel
from .pages import page_mover
from .running import Running
from .scoring import score_prompt
from .shared_pages import shared_pages
from .state import DeviceState, pin_ahead, to_host
from .taps import TapState
from .target_states import NORM
from .weights import RunningWeights

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from minivllm.core.interfaces.executor import Wiring
    from minivllm.core.interfaces.model import StepTensors, StepWatch


class Runner:
    """The model, its KV cache and the columns of one device.  It runs the steps of the engine."""

    captures: Any = None  # class that holds the captured steps; None means ``graphs.Graphs``
    drafts: Any = Drafting  # class that runs the drafter

    def __init__(self, wiring: Wiring, ranks: Any = None) -> None:
        self.wiring = wiring
        self.alone = ranks is None
        early = None
        if has_kernels(wiring):
            from .first_captures import rehearse_early  # needs Triton

            early = partial(rehearse_early, self)
        self.worker = build_worker(wiring, ranks, early)
        with self.worker.rehearsals.needed():
            self._build(ranks)

    def _build(self, ranks: Any) -> None:
        """Build what the worker lacks, among it the captured steps."""
        self.build_state(ranks)
        with self.worker.times.of("captures"):
            self.graphs = self.captured_steps()
            raise_stored()  # Ctrl-C during a capture ends the start
            self.native = self.native_steps()
        self.drafted = self.drafted_steps()  # captures of steps with drafts; None if ``captured_drafts`` is off
        self.weights = RunningWeights(self)
        pin_ahead(self.device)

    def build_state(self, ranks: Any) -> None:
        """Build what the worker lacks, except the captured steps and what uses these."""
        wiring, w = self.wiring, self.worker
        self.device = w.device
        self.model = w.model
        self.backend = w.backend
        self.selects = takes_logits_indices(w.model)
        slots = wiring.max_num_seqs + 1  # one for each request, and the spare slot for padding (see ``graphs``)
        sizes = slots, wiring.max_model_len, len(w.groups), wiring.block
        part = wiring.compressor
        sections = w.encoder is not None and bool(wiring.images.facts.sections)
        offsets = sections or wiring.cache.rerotates
        self.state = DeviceState(*sizes, w.device, wiring.rope_switch, part is not None, offsets)
        self.state.recurrent = w.states
        self.compactor = None if part is None else Compactor(part, wiring, w, self.state)
        self.mover = page_mover(wiring, w)
        self.adapters = w.adapters
        self.images: ImageState | None = None
        if w.encoder is not None:
            tables = w.parts.rotary_tables()
            self.images = ImageState(wiring.images.facts, w.encoder, self.state, tables, wiring.max_model_len + 1)
        self.taps = TapState(w.model, w.vocab_size, getattr(torch, wiring.dtype), self.state, ranks)
        self.seams = SeamTimes()
        self.chain = chain = ProcessorChain(w.processors, self.state, slots, self.seams)
        self.names, self.processors, self.sampler = chain.names, chain.made, chain.sampler
        self.processed = wiring.logprobs_mode == "processed_logprobs"
        self._poison: dict[int, StepError] = {}  # slot -> error between two steps, which ends its row in the next step
        self._trace: Any = None  # the running profile, or None
        # "drafter" or the name of a processor -> its own model
        self.states_read = w.target_states  # memory for hidden states that a drafter reads, or None
        self.own_models: dict[str, OwnModel] = {}
        for name, model in w.own_models.items():
            made: Callable[..., OwnModel] = OwnModel
            if name == "drafter" and w.target_states is not None:
                made = partial(HeadModel, states=w.target_states)
            self.own_models[name] = made(wiring, self.state, chain, self.read, model)
        self.drafting: Drafting | None = None
        if wiring.speculation.num_speculative_tokens:
            self.drafting = self.drafts(wiring, self.state, self.seams, w.vocab_size, self.own_models.get("drafter"))
        self.shared = shared_pages(w, self.state)  # None if each row's blocks are read separately
        self.merges = wiring.parts["attention"].traits.get("drafts") == "merged"
        self.graph_safe = ["graph_safe" in p.features for p in (*wiring.processors, wiring.parts["sampler"])]

    def native_steps(self) -> NativeSteps | None:
        """Return the native steps of a CPU, which run all layers in one call, or None if they cannot be used.

        The device, config, plug-ins and model decide; the reason is added to the notes."""
        if self.device.type != "cpu" or self.wiring.steps.graph == "off":
            return None
        with torch.inference_mode():
            parts = self.worker.parts
            room = free_ram() // 4
            adapters = None if self.adapters is None else self.adapters.low_rank
            made, why_not = native_steps(
                self.wiring, self.state, self.model, parts, self.sampler, room, self.states_read, adapters
            )
            if made is not None:
                add_native_head(self, made)
        if made is not None:
            self.worker.weight_bytes += made.copied
        else:
            self.worker.notes.append(f"steps are not captured, they run as separate operations: {why_not}")
        return made

    def forget_native_head(self) -> None:
        """Run the layers of a drafter's head as separate operations from here on."""
        own = self.own_models.get("drafter")
        if isinstance(own, HeadModel):
            own.native = None

    def captured_steps(self, known: Any = None) -> Any:
        """Return the captured steps, or None if device, config or plug-ins do not allow them or their capture fails.

        ``known`` has the measurements of earlier captures (``graphs.MeasuredCaptures``)."""
        if not self.can_capture():
            self.worker.rehearsals.done()
            return None
        graphs = self.new_captures(known)
        try:
            with torch.inference_mode():
                graphs.warm()
        except BaseException as e:
            # the model or the attention back end cannot be captured, or memory is exhausted
            message = describe_error(as_exception(e))
            self.worker.notes.append(f"steps are not captured, they run as separate launches: {message}")
            self.worker.rehearsals.close()
            return None
        return graphs

    def new_captures(self, known: Any = None) -> Any:
        """Return the object of ``captured_steps``, without captures."""
        from .graphs import Graphs

        graph = self.wiring.parts["attention"].traits["graph"]
        mixed = graph == "mixed" and self.wiring.steps.graph != "decode"
        return (self.captures or Graphs)(self, mixed, known)

    def can_capture(self) -> bool:
        """Return whether device, config, plug-ins and model allow captured steps."""
        traits = self.wiring.parts["attention"].traits
        wanted = self.wiring.steps.graph != "off" and has_kernels(self.wiring)
        if not wanted or traits.get("graph", "none") == "none" or traits.get("plan") != "device":
            return False
        if self.state.recurrent is not None and not self.worker.parts.fuse:
            self.worker.notes.append("steps are not captured, they run as separate launches: fuse is off")
            return False
        return True

    def capture_later(self) -> dict[str, int | bool]:
        """Make one of the queued captures; the executor's operation "captures" calls this.

        Return the number of captures that are left, and whether one was made.  None is made while threads compile
        kernels, because a request that comes then would wait for all kernels of the capture."""
        later = None if self.graphs is None else self.graphs.later
        if later is None:
            return {"left": 0, "worked": False}
        worked = not self.worker.rehearsals.compiling and later.capture()
        return {"left": len(later.queue), "worked": worked}

    def drafted_steps(self) -> Any:
        """Return the captures of steps with drafts, or None if the option is off or other steps are not captured.

        Calls of a graph-safe drafter are captured too, unless its model has recurrent states."""
        if self.drafting is None or not self.wiring.speculation.captured_drafts:
            return None
        self.drafting.captured = None
        if self.graphs is None:
            self.worker.notes.append("drafts are not captured, because no steps are captured on this device")
            return None
        from .captured_proposals import CapturedProposals
        from .drafted_steps import DraftedSteps

        steps = DraftedSteps(self)
        own = self.own_models.get("drafter")
        if "graph_safe" in self.drafting.part.features and (own is None or own.second.states is None):
            self.drafting.captured = CapturedProposals(self, self.drafting, steps, own)
        return steps

    def forget_captures(self) -> None:
        """Free all captures and their memory.  Later steps run as separate launches until captures are made again."""
        self.graphs = self.drafted = None
        if self.drafting is not None:
            self.drafting.captured = None

    def capacity(self) -> Capacity:
        """Return the KV blocks, recurrent states and features of the device.

        ``Capacity.depth`` is the number of steps that may be queued behind the running one: by default 1 on a GPU and
        0 on a CPU."""
        w = self.worker
        depth = self.wiring.steps.run_ahead
        if depth is None:
            depth = int(self.device.type == "cuda")
        step_tokens = 0 if self.graphs is None else self.graphs.step_tokens()
        notes = list(w.notes)
        if step_tokens:
            notes.append(
                f"steps have at most {step_tokens:,} tokens, because longer ones take longer to launch than to run"
            )
        capacity = Capacity(
            blocks=tuple(w.num_blocks),
            block_bytes=tuple(w.block_bytes),
            vocab_size=w.vocab_size,
            weight_bytes=w.weight_bytes,
            depth=depth,
            notes=tuple(notes),
            guides=True,
            own_models=True,
            taps=self.taps.points,
            given=tuple(self.taps.given),
            hidden=w.hidden_size,
            image_bytes=self.image_bytes,
            no_images=w.no_images,
            drafts_ahead=self.drafts_ahead,
            step_tokens=step_tokens,
        )
        if w.states is not None:
            capacity = replace(capacity, checkpoints=w.states.checkpoints, state_bytes=w.states.bytes)
        if self.compactor is not None:
            window = self.compactor.compressor.window
            sums = self.compactor.sums is not None
            capacity = replace(capacity, compresses=window, sums=sums, kept_heads=self.compactor.kept_heads)
        if self.graphs is not None:
            capacity = replace(capacity, step_sizes=self.graphs.step_sizes())
        return capacity

    @property
    def drafts_ahead(self) -> bool:
        """Return whether drafts of a row may be planned while an earlier step of the row is still running.

        Compression, drafters that read tokens on the host, and several ranks need exact lengths on the host."""
        exact = self.compactor is not None or not self.alone
        return self.drafting is not None and self.drafting.host is None and not exact

    @property
    def image_bytes(self) -> int:
        """Return the bytes of the features of one token of an image, 0 if no images are read."""
        w = self.worker
        return 0 if w.encoder is None else w.encoder.levels * w.hidden_size * w.parts.dtype.itemsize

    # ---- FORWARD -------------------------------------------------------------------------------------------------

    def forward(self, plan: StepPlan) -> Running:
        """Apply the delta of a plan and run the layers.

        The returned step holds the hidden states of the rows that draw, for ``sample``.  An exception becomes an error
        of the step."""
        running = Running(plan, start=time.perf_counter(), widths=self.taps.widths)
        what = "delta"
        try:
            running.begun = self._mark()
            with torch.inference_mode():
                self._apply(plan.delta)
                if self.compactor is not None:
                    running.kept = self.compactor.sets.take()
                self._recommit(plan)
                self.state.restore(plan.delta.join)
                self._take_tokens(plan)
                for model in self.own_models.values():
                    model.note(plan)
                if self.drafted is None:  # only captured steps with drafts read the lengths of rows on the device
                    plan = running.settle(self.state)
                if self.drafting is not None:
                    if not self._poison and self.drafting.run_natively(running, self.native):
                        return running
                    self.drafting.prepare(running)
                    plan = running.plan
                what = "model"
                apart = self.images is not None and self.images.reached(plan)
                if self.native is not None and not apart and self._runs_natively(self.native, plan):
                    running.hidden, running.pooled = self.seams.run(what, self.native.forward, plan)
                    running.native = True
                    running.draws_natively = running.pooled is None
                    return running
                hidden = self._replay(running, plan)
                if hidden is not None:
                    running.hidden = hidden
                    if len(plan.taps):
                        rows = np.repeat(np.arange(len(plan.slots)), plan.q_len)
                        tokens = self.taps.tokens(plan)
                        self._keep_taps(running, tokens, self.taps.replayed(tokens), hidden, rows)
                    if len(plan.pooled):
                        running.pooled = to_host(pool_captured(plan, hidden, self.state))
                    if len(plan.samples) < len(plan.slots):
                        running.hidden = None
                        if len(plan.samples):
                            running.hidden = hidden[self.state.to(plan.samples).long()]
                    return running
                what = "attention"

                def run(seam: str, call: Callable[..., Any], *args: Any) -> Any:
                    nonlocal what
                    what = seam
                    return self.seams.run(seam, call, *args)

                self._forward(running, running.settle(self.state), run)
        except BaseException as e:
            # an exception of a model or back end must fail this step only, not end the loop of the worker
            self._fail(running, what, as_exception(e))
        return running

    def _replay(self, running: Running, plan: StepPlan) -> Tensor | None:
        """Replay the layers of a step, and return the hidden states [R, H] of its rows; None if it is not captured."""
        for captures in (self.drafted, self.graphs):
            if captures is self.graphs:
                plan = running.settle(self.state)  # ``graphs`` reads the lengths of rows of mixed steps from the host
            if captures is None:
                continue
            key = captures.key(plan)
            if key is None:
                continue
            hidden = captures.forward(key, plan)
            if hidden is not None:
                running.captures = captures
                running.graph = key
                if key.shared:
                    running.shared = self.shared_rows(plan)
                return hidden
        return None

    def _apply(self, delta: Delta) -> None:
        """Apply the changes of a step to the columns and the KV cache, and note the slots that fail."""
        if self.mover is not None and len(delta.store):
            self.mover.store(delta.store)
        self.state.apply(delta, self.worker.caches)
        if self.shared is not None:
            self.shared.apply(delta)
        if self.mover is not None and len(delta.fill):
            self.mover.fill(delta.fill)
        if self.adapters is not None:
            self.adapters.apply(delta)
        if self.images is not None:
            self.images.apply(delta)
        if self._poison:
            for slot in delta.leave.tolist():
                self._poison.pop(slot, None)
        self._poison.update(self.taps.apply(delta))
        if self.compactor is not None:
            self.compactor.note(delta)
            self._poison.update(self.seams.run("compressor", self.compactor.apply, delta))
        if not self._poison:
            return
        for source, to, _ in delta.fork.tolist():
            if source in self._poison:
                self._poison[to] = self._poison[source]

    def _forward(self, running: Running, plan: StepPlan, run: Callable[..., Any]) -> None:
        """Run the layers of a step as separate launches, and store their results in ``running``."""
        read = self.read(plan)
        found = dict[str, "Tensor"]()
        tapped = self.taps.tokens(plan)
        read.taps = own = self.taps.eager(plan, tapped, read.meta, found)
        read.watch = self.watch(read)
        if len(plan.observe):
            assert self.compactor is not None and self.compactor.queries is not None
            read.queries = self.compactor.queries.of_step(plan)
        if len(plan.sums):
            assert self.compactor is not None and self.compactor.sums is not None
            read.sums = self.compactor.sums.of_step(plan)
        methods, points = self.adapts(plan)
        if self.adapters is not None:
            read.taps = self.adapters.taps(methods, points, read.taps)
        if self.images is not None:
            features, running.lost = self.images.enter(plan, read.meta)
            if features is not None:
                features.precede(read.taps)
                read.taps = features
        selects = self.selects_tokens(read)
        ends = np.cumsum(plan.q_len)
        at = ends[plan.samples] - 1
        indices = None
        needed = used_tokens(plan, at)
        used: np.ndarray | None = None
        if not len(plan.prompt) and len(needed) < len(read.ids) and (len(needed) or selects):
            used = needed
            # at least one token, because a kernel cannot be launched for an empty tensor
            indices = self.state.to(used if len(used) else np.zeros(1, np.int64))
        running.shared = self.shared_rows(plan)
        key = GraphKey(shared=running.shared > 0)
        with applied(self.adapters, read.meta, methods, indices if selects else None):
            hidden = step.forward(self.model, self.backend, read, key, indices, selects, run=run)
        if own is not None and (unused := sorted(own.routes.keys() - own.used)):
            raise ValueError(f"the model lets requests set experts at {unused[0]!r}, and did not read them")
        if len(plan.taps):
            place = rows_of(np.arange(len(read.ids)), used)
            self._keep_taps(running, tapped, found, hidden, place)
        if len(plan.pooled):
            running.pooled = to_host(pool(plan, hidden, used, self.state))
        if len(plan.prompt):
            running.prompt = self._score_prompt(plan, hidden)
        if len(at) and len(at) != len(hidden):
            hidden = hidden[self.state.to(rows_of(at, used))]
        if len(at):
            running.hidden = hidden

    def _runs_natively(self, native: NativeSteps, plan: StepPlan) -> bool:
        """Return whether the native CPU code can run the layers of a step, and pass it the adapters of the rows."""
        methods, points = self.adapts(plan)
        native.places = None
        if self.adapters is not None and methods:
            native.places = self.adapters.of_slot
        adapted = not points and all(method == native.adapters for method in methods)
        return adapted and native.takes(plan)

    def adapts(self, plan: StepPlan) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Return the indices of the adapter methods of a step's rows, and the names of the tap points that they
        change."""
        return ((), ()) if self.adapters is None else self.adapters.of_step(plan)

    def shared_rows(self, plan: StepPlan) -> int:
        """Return the number of decoding rows of a step whose common prefixes attention reads once; 0 if it reads each
        row separately."""
        if self.shared is None or len(plan.draft):
            return 0  # a draft is another row with the same slot, so rows with drafts read their blocks separately
        return self.shared.sharing(plan)

    def watch(self, read: StepTensors) -> StepWatch | None:
        """Return the object that stores the hidden states of a step for a drafter; None if no drafter reads them."""
        return None if self.states_read is None else self.states_read.watch(read.meta)

    def selects_tokens(self, read: StepTensors, kept: int = 0) -> bool:
        """Return whether the model may leave out, behind its last attention, the tokens of a step whose hidden states
        are not needed.  It may not if taps or a drafter read the hidden states of all tokens.

        ``kept`` is the number of needed tokens in a captured step with adapters, and 0 in any other step.  If it is the
        number of all tokens, return False, because the layers of adapters detect the change from all to the needed
        tokens by a change of the number (``ActiveMethods.match``)."""
        all_read = read.watch is not None and NORM in read.watch.points
        if read.taps is not None or all_read:
            return False
        return self.selects and kept != len(read.ids)

    def _score_prompt(self, plan: StepPlan, hidden: Tensor) -> tuple[Tensor, ...]:
        """Compute the log-probabilities of prompt tokens, and start their copies to the host."""
        found = score_prompt(plan, hidden, self.model, self.state, self.wiring, self.worker.vocab_size)
        return tuple(to_host(t) for t in found)

    def _keep_taps(
        self,
        running: Running,
        tokens: dict[str, np.ndarray],
        found: dict[str, Tensor],
        hidden: Tensor,
        place: np.ndarray,
    ) -> None:
        """Start the copy of the tap values that rows read to the host.

        ``tokens`` maps a tap point to the indices of the tokens to read, and ``found`` to their values, which a later
        step may overwrite.  ``place`` [T] is the index in ``hidden`` of each token whose logits are read.  Raise
        ValueError if the model computed no value of a point."""
        if LOGITS in tokens:
            rows = self.state.to(place[tokens[LOGITS]])
            found[LOGITS] = self.model.logits(hidden[rows])
        if lost := [point for point in tokens if point not in found]:
            raise ValueError(f"the model names the tap point {lost[0]!r}, and passed no value through it")
        running.taps = to_host(self.taps.flat(found))

    def read(self, plan: StepPlan) -> StepTensors:
        """Return the inputs of the model for a plan.  The host copies one array; token ids are gathered on the
        device."""

        recurrent = self.state.recurrent is not None
        whole = merged(plan) if self.merges or recurrent else plan
        read = self._read(whole if self.merges else plan)
        if recurrent and whole is not plan:
            # recurrent layers need a row and its drafts as one row of several tokens
            meta = read.meta if self.merges else self._read(whole).meta
            drafts = self.state.to(rows_with_drafts(plan))
            read.states = step.states_of(self.state, meta, drafts)
        return read

    def _read(self, plan: StepPlan) -> StepTensors:
        host = step.host_lengths(plan, self.state.dropped_host)
        table = step.pack_rows(plan, len(plan.slots), host.tokens, self.wiring.max_num_seqs)
        return step.read_rows(self.state, self.state.to(table), host)[0]

    def _recommit(self, plan: StepPlan) -> None:
        """Report the accepted tokens of sequences that join again after a preemption to the processors.

        The columns of these sequences were reset, so the processors must see all earlier generated tokens again."""
        join = plan.delta.join
        if join is None or not any(self.chain.commits):
            return
        back = np.flatnonzero(join.known > join.prompt)
        if not len(back):
            return
        slots_np = join.slot[back].astype(np.int64)
        prompt = join.prompt[back].astype(np.int64)
        count = join.known[back] - prompt
        slots, first = self.state.to(np.stack([slots_np, prompt]))
        column = np.minimum(np.arange(count.max()), count[:, None] - 1)
        at = self.state.to(prompt[:, None] + column)
        tokens = self.state.tokens[slots[:, None], at].long()
        self._tell(slots_np, slots, first, tokens, self.state.to(count))

    def _take_tokens(self, plan: StepPlan) -> None:
        """Append the tokens that the host chose to their sequences, and report them to the processors."""
        if not len(plan.delta.token):
            return
        slots_np = plan.delta.token[:, 0].astype(np.int64)
        slots = self.state.to(slots_np)
        tokens = self.state.to(plan.delta.token[:, 1]).long()
        position = self.state.known[slots]
        self.state.tokens[slots, position] = tokens.int()
        self.state.known[slots] = position + 1
        self._tell(slots_np, slots, position, tokens[:, None], torch.ones_like(tokens))

    def _tell(self, slots_np: np.ndarray, slots: Tensor, first: Tensor, tokens: Tensor, count: Tensor) -> None:
        """Report tokens that were accepted between steps to the processors (``Processor.commit``).

        ``slots_np`` and ``slots`` are the slots i64 [N] on the host and on the device.  ``first`` i64 [N] is the index
        of the first token, ``tokens`` i64 [N, k] are the tokens and ``count`` i64 [N] is their number.  If a processor
        raises, the rows that use it end with an error in their next step."""
        rows = step.rows_of(self.state, slots, first, self.wiring.max_model_len)
        calls = GuardedCalls(self.chain, slots_np, [])
        calls.commit(tokens, count, rows)
        for error in calls.errors:
            self._poison |= {int(slots_np[row]): error for row in error.rows}

    # ---- SAMPLE --------------------------------------------------------------------------------------------------

    def sample(self, running: Running, late: LateInputs | None = None) -> None:
        """Draw the tokens of a step, write them to the columns, and start the copy of the result to the host.

        ``late`` has the token masks, None if no row has one."""
        running.sampled = True
        running.sampler = self.names[-1]
        try:
            if running.hidden is not None and not running.errors:
                with torch.inference_mode():
                    native = self.native if running.draws_natively else None
                    if native is not None and self._draws_natively(native, running.plan):
                        seam = self.chain.seam_names[-1]
                        running.packed = self.seams.run(seam, native.sample, running.plan)
                    elif not self._sample_captured(running, late):
                        running.settle(self.state)
                        calls = SeparateCalls(self.chain, self.wiring, self.own_models, running, late, self._poison)
                        found = step.sample(calls, self.state, self.model, running.hidden)
                        running.logprobs = found and tuple(to_host(t) for t in found)
            running.event = self._mark()
        except BaseException as e:
            self._fail(running, "sampling", as_exception(e))
        if self.device.type == "cpu":
            running.device_ms = (time.perf_counter() - running.start) * 1e3
        running.hidden = None
        running.seams = self.seams.take()

    def _draws_natively(self, native: NativeSteps, plan: StepPlan) -> bool:
        """Return whether the native CPU code can draw the tokens of a step.

        It cannot if a slot has an error to report, or if the sampler implements ``commit``."""
        return not self._poison and not self.chain.commits[-1] and native.draws(plan)

    def _sample_captured(self, running: Running, late: LateInputs | None) -> bool:
        """Draw the tokens of a step by a replay of the captured SAMPLE, and return True.  ``late`` has the token masks.

        Return False, without a draw, if the layers were not captured, a slot has an error to report, the step needs an
        operation that cannot be captured, or there is no capture and none can be made.
        """
        plan = running.plan
        captures = running.captures
        if running.graph is None or captures is None or self._poison:
            return False
        operations = captures.sample_operations(plan)
        if operations is None:
            return False
        done = captures.sample(running.graph, operations, plan, late)
        if done is None:
            return False
        packed, logprobs = done
        running.packed = to_host(packed)
        running.pick = plan.samples
        if logprobs is not None:
            running.logprobs = tuple(to_host(t) for t in logprobs)
        return True

    def _mark(self) -> Any:
        """Record a CUDA event after all work queued so far and return it; return None on a CPU."""
        if self.device.type == "cpu":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mask_memory(self, rows: int, words: int) -> np.ndarray:
        """Return the host array i32 [rows, words] to which the engine writes token masks.

        It is the buffer that captured steps copy from if this buffer is large enough, else a new array (pinned on a
        GPU).
        """
        if self.graphs is not None:
            masks = self.graphs.late_masks()
            if len(masks.host) >= rows:
                return masks.host[:rows]
        pinned = self.device.type == "cuda"
        return torch.empty(rows, words, dtype=torch.int32, pin_memory=pinned).numpy()

    # ---- results and faults --------------------------------------------------------------------------------------

    def _fail(self, running: Running, what: str, e: Exception) -> None:
        scope = "device" if what == "delta" else "step"
        parts = self.wiring.parts
        who = external_part(e) or (parts[what].name if what in ("attention", "model") else what)
        running.errors = [StepError(scope, who, describe_step_error(e, parts))]
        running.hidden = None

    def profile_start(self) -> None:
        from .profiling import TorchTrace

        if self._trace is not None:
            raise RequestError("a profile is running already; call stop_profile first")
        self._trace = TorchTrace(self.device.type == "cuda")

    def profile_stop(self, path: str) -> None:
        if self._trace is None:
            raise RequestError("no profile is running; call start_profile first")
        self._trace.stop(path)
        self._trace = None

    def close(self) -> None:
        """Free weights, caches, captures and columns, and end a profile that is running."""
        if self._trace is not None:
            self._trace.close()
            self._trace = None
        if self.worker is not None:
            self.worker.rehearsals.close()
        if self.mover is not None:
            self.mover.close()
        if self.adapters is not None:
            self.adapters.close()
            self.adapters = None
        if self.device.type == "cuda":
            # A device that has failed raises here.  Its results are lost in any case, so the error is ignored.
            with contextlib.suppress(RuntimeError):
                synchronize()  # a step in flight still uses graphs and memory
        if self.native is not None:
            self.native.close()
        if self.worker is not None:
            # the mappings are emptied in place, because the layers of the model refer to them
            for group in self.worker.caches:
                for cache in group:
                    cache.clear()
        # A closed runner is not used again, so the types of its attributes exclude None.
        self.worker = self.backend = self.state = self.weights = None  # type: ignore[assignment]
        self.taps = self.chain = self.processors = None  # type: ignore[assignment]
        self.model = self.graphs = self.drafted = self.drafting = self.native = self.sampler = None
        self.own_models = {}
        if self.device.type == "cuda":
            release_unused()
