"""StepPlan -> StepResult on one device.

    delta ──► columns          FORWARD  gather ids by slot, layers, hidden states of the rows that draw
                               SAMPLE   logits, processors, (late masks), draw, commit, stop flags, result ──► host

FORWARD and SAMPLE are apart so that masks may arrive from the host between them.  A processor or sampler that raises
ends the rows that bound it; a model or attention back end that raises fails the step.  Neither leaves this file as an
exception.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from minivllm.core.foreign import as_exception
from minivllm.core.interfaces.attention import AttnMeta
from minivllm.core.interfaces.executor import Capacity
from minivllm.core.interfaces.model import StepTensors, picks
from minivllm.core.interfaces.plan import FAILED, NAN, OVERSHOOT, LateInputs, StepError, StepPlan
from minivllm.core.interfaces.sampling import Draw, Processor, Rows
from minivllm.core.timing import SeamTimes, processor_seams
from minivllm.errors import RequestError

from . import sampling
from .build import build_worker, fused, has_kernels
from .capture import ALONE, synchronize
from .drafting import Drafting, by_row, holds, merged, settle
from .running import Running
from .scoring import score_prompt
from .state import DeviceState, ProcessorState

if TYPE_CHECKING:
    from minivllm.core.interfaces.executor import Wiring


class Runner:
    """The model, its KV cache and the columns of one device."""

    def __init__(self, wiring: Wiring) -> None:
        self.wiring = wiring
        self.worker = w = build_worker(wiring)
        self.device, self.model, self.backend = w.device, w.model, w.backend
        self.picks = picks(w.model)
        slots = wiring.max_num_seqs + 1  # the last one is the spare slot (see ``graphs``)
        self.state = DeviceState(slots, wiring.max_model_len, len(w.groups), wiring.block, w.device)
        self.names = [name for name, _ in w.processors]
        self.processors: list[Processor] = [made for _, made in w.processors]
        self.sampler = self.processors[-1]
        self.processed = wiring.logprobs_mode == "processed_logprobs"
        self.state.processors = [ProcessorState(p, slots, w.device) for p in self.processors]
        self._commits = [type(p).commit is not Processor.commit for p in self.processors]
        self.seams, self._seam = SeamTimes(), processor_seams(self.names)
        self._poison: dict[int, StepError] = {}  # slots whose processors failed between steps
        self._trace: Any = None  # a profile that is running
        self.drafting = Drafting(self) if wiring.drafts else None
        self.merges = wiring.parts["attention"].traits.get("drafts") == "merged"
        self.graph_safe = ["graph_safe" in p.features for p in (*wiring.processors, wiring.parts["sampler"])]
        self.graphs = self._graphs()

    def _graphs(self) -> Any:
        """Captured decode steps, if device, config and plug-ins allow them."""
        wanted = self.wiring.graph != "off" and has_kernels(self.wiring)
        traits = self.wiring.parts["attention"].traits
        graph = traits.get("graph", "none")
        if not wanted or graph == "none" or traits.get("plan") != "device":
            return None
        from .graphs import Graphs, first_line

        graphs = Graphs(self, graph == "mixed" and self.wiring.graph in ("auto", "mixed"))
        try:
            with torch.inference_mode():
                graphs.warm()
        except BaseException as e:  # a model or back end that cannot be captured, or no memory left for it
            said = first_line(as_exception(e))
            self.worker.notes.append(f"steps are not captured, they run as separate launches: {said}")
            return None
        return graphs

    def capacity(self) -> Capacity:
        """What there is room for.  Unless the config says otherwise one step runs ahead on a GPU, none on a CPU."""
        w, depth = self.worker, self.wiring.run_ahead
        return Capacity(
            blocks=tuple(w.num_blocks), block_bytes=tuple(w.block_bytes), vocab_size=w.vocab_size,
            weight_bytes=w.weight_bytes, depth=depth if depth is not None else int(self.device.type == "cuda"),
            notes=tuple(w.notes),
        )  # fmt: skip

    # ---- FORWARD -------------------------------------------------------------------------------------------------

    def forward(self, plan: StepPlan) -> Running:
        """Apply the delta and run the layers.  The hidden states of the drawing rows wait in the result."""
        running = Running(plan, start=time.perf_counter())
        what = "delta"
        try:
            running.begun = self._mark()
            with torch.inference_mode():
                self.state.apply(plan.delta, self.worker.caches)
                for slot in plan.delta.leave.tolist() if self._poison else ():
                    self._poison.pop(slot, None)
                self._recommit(plan)
                self.state.restore(plan.delta.join)
                self._take_tokens(plan)
                if self.drafting is not None:
                    self.drafting.prepare(running)
                    plan = running.plan
                key = self.graphs.key(plan) if self.graphs is not None else None
                what = "forward"
                hidden = self.graphs.forward(key, plan) if key is not None else None
                if hidden is not None:
                    running.graph, running.hidden = key, hidden
                    if len(plan.samples) < len(plan.slots):
                        running.hidden = hidden[self.state.to(plan.samples).long()] if len(plan.samples) else None
                    return running
                what = "attention"
                meta, step = self._step(plan)
                self.seams.run("attention", self.backend.plan, meta, plan.graph)
                what = "forward"
                at = np.cumsum(plan.q_len)[plan.samples] - 1
                if self.picks and not len(plan.prompt) and len(at) < len(step.ids):
                    # one token where nobody draws: kernels are not launched for none
                    step.wanted = self.state.to(at if len(at) else np.zeros(1, np.int64))
                hidden = self.seams.run("model", self.model, step)
                if len(plan.prompt):
                    running.prompt = tuple(self._host(t) for t in score_prompt(self, plan, hidden))
                if len(at):
                    running.hidden = hidden if len(at) == len(hidden) else hidden[self.state.to(at)]
        except BaseException as e:  # whatever a model or a back end raises is the step's error, never the loop's end
            self._fail(running, what, as_exception(e))
        return running

    def _step(self, plan: StepPlan) -> tuple[AttnMeta, StepTensors]:
        """The tensors of a step: one copy to the device, then gathers."""
        plan = merged(plan) if self.merges else plan
        state, r, block = self.state, len(plan.slots), self.wiring.block
        q_len = plan.q_len
        cu = np.zeros(r + 1, np.int64)
        np.cumsum(q_len, out=cu[1:])
        t = int(cu[-1])
        row = np.repeat(np.arange(r), q_len)
        position = plan.computed[row] + np.arange(t) - cu[row]
        packed = np.concatenate([plan.slots, cu, q_len, plan.computed + q_len, row, position]).astype(np.int64)
        slots, cu_t, q, kv_len, row_t, pos = state.to(packed).split([r, r + 1, r, r, t, t])
        slot_of = slots[row_t]
        ids = state.tokens[slot_of, pos].long()
        groups = len(self.worker.groups)
        slot_map = state.table[:, slot_of, pos // block].long() * block + pos % block
        # A row that met its end on the device while this step was on its way writes to the null block.
        slot_map = slot_map.masked_fill(state.stopped[slot_of], 0)
        decode_rows = int((q_len == 1).sum())
        meta = AttnMeta(
            slots=slots, cu_q=cu_t.int(), q_len=q.int(), kv_len=kv_len.int().expand(groups, r), position=pos, row=row_t,
            table=state.table, slot_map=slot_map, block=block, decode_rows=decode_rows, host_q_len=q_len,
            host_kv_len=np.broadcast_to(plan.computed + q_len, (groups, r)),
        )  # fmt: skip
        return meta, StepTensors(ids, pos, meta)

    def _recommit(self, plan: StepPlan) -> None:
        """Sequences that come back after a preemption: their columns start afresh, so the processors hear again of all
        the tokens that were accepted before."""
        join = plan.delta.join
        back = np.flatnonzero(join.known > join.prompt) if join is not None and any(self._commits) else ()
        if not len(back):
            return
        slots_np, prompt = join.slot[back].astype(np.int64), join.prompt[back].astype(np.int64)
        count = join.known[back] - prompt
        slots, first = self.state.to(np.stack([slots_np, prompt]))
        at = prompt[:, None] + np.minimum(np.arange(count.max()), count[:, None] - 1)
        tokens = self.state.tokens[slots[:, None], self.state.to(at)].long()
        rows = self.rows_of(slots, first, self.wiring.max_model_len)
        errors: list[StepError] = []
        self._commit(rows, slots_np, tokens, self.state.to(count), errors)
        self._poison.update({int(slots_np[r]): e for e in errors for r in e.rows})

    def _take_tokens(self, plan: StepPlan) -> None:
        """Tokens that the host chose: into the history, and to the processors as any accepted token."""
        if not len(plan.delta.token):
            return
        slots_np = plan.delta.token[:, 0].astype(np.int64)
        slots, tokens = self.state.to(slots_np), self.state.to(plan.delta.token[:, 1]).long()
        position = self.state.known[slots]
        self.state.tokens[slots, position] = tokens.int()
        self.state.known[slots] = position + 1
        rows = self.rows_of(slots, position, self.wiring.max_model_len)
        errors: list[StepError] = []
        self._commit(rows, slots_np, tokens[:, None], torch.ones_like(tokens), errors)
        self._poison.update({int(slots_np[r]): e for e in errors for r in e.rows})

    # ---- SAMPLE --------------------------------------------------------------------------------------------------

    def sample(self, running: Running, late: LateInputs | None = None) -> None:
        """Logits to tokens; commits them to the columns and starts the copy of the result."""
        running.sampled, running.sampler = True, self.names[-1]
        try:
            if running.hidden is not None and not running.errors:
                with torch.inference_mode():
                    if not self._sample_captured(running, late):
                        self._sample(running, late)
            running.event = self._mark()
        except BaseException as e:
            self._fail(running, "sampling", as_exception(e))
        if self.device.type == "cpu":
            running.device_ms = (time.perf_counter() - running.start) * 1e3
        running.hidden, running.seams = None, self.seams.take()

    def _sample_captured(self, running: Running, late: LateInputs | None) -> bool:
        """SAMPLE as one replay; False if the step asks for what cannot be captured."""
        plan = running.plan
        asked = self.graphs.asked(plan) if running.graph is not None and not self._poison else None
        done = self.graphs.sample(running.graph, asked, plan, late) if asked is not None else None
        if done is None:
            return False
        running.packed, running.pick = self._host(done[0]), plan.samples
        if done[1] is not None:
            running.logprobs = tuple(self._host(t) for t in done[1])
        return True

    def _sample(self, running: Running, late: LateInputs | None) -> None:
        plan, state = running.plan, self.state
        slots_np = plan.slots[plan.samples].astype(np.int64)
        position_np = (plan.computed + plan.q_len)[plan.samples].astype(np.int64)
        slots, position = state.to(np.stack([slots_np, position_np]))
        raw = self.model.logits(running.hidden)
        logits = raw.float()
        if plan.topk >= 0 and logits is raw and not self.processed:
            raw = logits.clone()
        rows = self.rows_of(slots, position, int(position_np.max()))
        if state.wants_min[slots_np].any():
            sampling.suppress_stops(logits, position, state.min_end[slots], state.stop_ids[slots])
        failed = np.zeros(len(slots_np), bool)
        for j in [j for j, slot in enumerate(slots_np.tolist()) if slot in self._poison] if self._poison else ():
            e = self._poison[int(slots_np[j])]
            running.errors.append(StepError(e.scope, e.plugin, e.message, (j,)))
            failed[j] = True
        for slot in slots_np[failed].tolist():
            self._poison.pop(slot, None)
        for p in range(len(self.processors) - 1):
            self._apply(p, logits, rows, slots_np, failed, running)
        if late is not None:
            sampling.apply_mask(logits, state.to(late.mask), state.to(plan.late).long())
        if len(plan.host):
            running.logits = self._host(logits[state.to(plan.host).long()])
        bad = sampling.bad_rows(logits)
        if plan.topk >= 0 and self.processed:
            raw = self._drawn_from(logits, rows, slots_np, failed, running)
        drawn = self._draw(logits, rows, slots_np, failed, running)
        tokens = drawn.clamp(0, logits.shape[1] - 1)
        flags = sampling.stop_flags(
            tokens, position, state.stop_ids[slots], state.n_eos[slots], state.min_end[slots], state.end[slots], bad
        )
        flags = torch.where((tokens != drawn) & ~bad, FAILED, flags.int())  # no token of the vocabulary
        self._accept(running, slots_np, rows, tokens, flags, failed)
        if plan.topk >= 0:
            found = sampling.logprobs_of(raw, tokens, plan.topk, fused(self.wiring), self.wiring.batch_invariant)
            running.logprobs = tuple(self._host(t) for t in found)

    def _accept(self, running, slots_np, rows: Rows, tokens, flags, failed: np.ndarray) -> None:
        """Write accepted tokens to the columns: not of rows that had ended, that failed, or that wait for the host."""
        plan, state = running.plan, self.state
        stopped = state.stopped[rows.slots]
        accept = ~stopped
        if failed.any():
            flags = flags.masked_fill(state.to(failed), FAILED)
        waits = np.concatenate([plan.host, plan.held])
        if len(waits):  # only a fault ends a row that waits for the host
            host = torch.zeros_like(stopped)
            host[state.to(waits).long()] = True
            flags = torch.where(host, flags & (FAILED | NAN), flags)
            accept &= ~host
        if len(plan.draft):  # what stands behind a draft that was rejected has no say
            held = holds(plan, state, rows.slots, rows.position, tokens, (flags != 0) | stopped)
            accept, flags = accept & held, torch.where(held, flags, 0)
        accept &= (flags & (FAILED | NAN)) == 0
        flags = torch.where(stopped, OVERSHOOT, flags)
        count = accept.int()
        old = state.tokens[rows.slots, rows.position]
        state.tokens[rows.slots, rows.position] = torch.where(accept, tokens.int(), old)
        if len(plan.draft):
            settle(plan, state, rows.slots, rows.position, accept, stopped | (flags != 0))
            heads, mine, total = by_row(plan, state, tokens, count)
            errors: list[StepError] = []
            for row in self._commit(rows.pick(state.to(heads)), slots_np[heads], mine, total, errors):
                flags[heads[row]] = FAILED
            running.errors += [replace(e, rows=tuple(heads[list(e.rows)].tolist())) for e in errors]
        else:
            state.known[rows.slots] = torch.where(accept, rows.position + 1, state.known[rows.slots])
            state.stopped[rows.slots] = stopped | (flags != 0)
            for row in self._commit(rows, slots_np, tokens[:, None], count, running.errors):
                flags[row] = FAILED
        running.packed = self._host(torch.stack([tokens.int(), count, flags]))

    def _apply(self, p: int, logits, rows: Rows, slots_np, failed: np.ndarray, running: Running) -> None:
        """Run one processor over the rows that bound it; if it raises they fail and their logits are made harmless."""
        held = self.state.processors[p]
        on = held.active[slots_np] & ~failed
        if not on.any():
            return
        every = bool(on.all())
        index = None if every else self.state.to(np.flatnonzero(on))
        part, sub = (logits, rows) if every else (logits[index], rows.pick(index))
        sub.variant = int(np.bitwise_or.reduce(held.variant[slots_np[on]]))
        try:
            self.seams.run(self._seam[p], self.processors[p].apply, part, sub, held.columns)
        except Exception as e:
            self._fail_rows(running, failed, np.flatnonzero(on), p, e)
            part.zero_()
        if not every:
            logits[index] = part

    def _drawn_from(self, logits, rows: Rows, slots_np, failed: np.ndarray, running: Running) -> torch.Tensor:
        held = self.state.processors[-1]
        rows.variant = int(np.bitwise_or.reduce(held.variant[slots_np]))
        try:
            found = self.seams.run("sampler", self.sampler.drawn_from, logits, rows, held.columns)
            if found.shape != logits.shape:
                raise ValueError(f"drawn_from gave {list(found.shape)}; want {list(logits.shape)}")
            return found
        except Exception as e:
            self._fail_rows(running, failed, np.flatnonzero(~failed), len(self.processors) - 1, e)
            return logits

    def _draw(self, logits, rows: Rows, slots_np, failed: np.ndarray, running: Running) -> torch.Tensor:
        """What the sampler drew, i64 [N]; it may be no token at all."""
        held = self.state.processors[-1]
        out = Draw(torch.full((len(slots_np),), -1, dtype=torch.int64, device=self.device))
        rows.variant = int(np.bitwise_or.reduce(held.variant[slots_np]))
        try:
            self.seams.run("sampler", self.sampler.draw, logits, rows, held.columns, out)
            out.check(logits)
        except Exception as e:
            self._fail_rows(running, failed, np.flatnonzero(~failed), len(self.processors) - 1, e)
            out.tokens = torch.zeros(len(slots_np), dtype=torch.int64, device=self.device)
        return out.tokens

    def draw_quietly(self, logits: torch.Tensor, rows: Rows, slots_np: np.ndarray) -> torch.Tensor:
        """Tokens i64 [N] as a step would draw them from these logits, which may be overwritten; changes no column.
        Raises what a processor raises."""
        for p, held in enumerate(self.state.processors):
            on = held.active[slots_np]
            if not on.any() and p < len(self.processors) - 1:
                continue
            index = None if on.all() else self.state.to(np.flatnonzero(on))
            rows.variant = int(np.bitwise_or.reduce(held.variant[slots_np]))
            if p == len(self.processors) - 1:
                out = Draw(torch.zeros(len(slots_np), dtype=torch.int64, device=self.device))
                self.sampler.draw(logits, rows, held.columns, out)
            elif index is None:
                self.processors[p].apply(logits, rows, held.columns)
            else:
                part, sub = logits[index], rows.pick(index)
                self.processors[p].apply(part, sub, held.columns)
                logits[index] = part
        return out.tokens.clamp_(0, logits.shape[1] - 1)

    def _commit(self, rows: Rows, slots_np, tokens, count, errors: list[StepError]) -> list[int]:
        """Tell the processors of accepted tokens i64 [N, k], the first of them at ``rows.position``; returns the rows
        that failed at it (and stops them)."""
        failed: list[int] = []
        for p, processor in enumerate(self.processors):
            if not self._commits[p]:
                continue
            on = self.state.processors[p].active[slots_np]
            if not on.any():
                continue
            held, index = self.state.processors[p], self.state.to(np.flatnonzero(on))
            some = rows.pick(index)
            some.variant = int(np.bitwise_or.reduce(held.variant[slots_np[on]]))
            try:
                self.seams.run(self._seam[p], processor.commit, tokens[index], count[index], some, held.columns)
            except Exception as e:
                errors.append(_error("rows", self.names[p], e, np.flatnonzero(on)))
                self.state.stopped[rows.slots[index]] = True
                failed += np.flatnonzero(on).tolist()
        return failed

    def rows_of(self, slots: torch.Tensor, position: torch.Tensor, longest: int) -> Rows:
        s = self.state
        return Rows(slots, position, s.prompt[slots], s.seed[slots], s.sample[slots], 0, s.tokens, longest)

    def _mark(self) -> Any:
        """An event behind everything enqueued so far; None on a CPU."""
        if self.device.type == "cpu":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mask_memory(self, rows: int, words: int) -> np.ndarray:
        """i32 [rows, words] that late masks are written to: what captures read from, or at least pinned."""
        held = self.graphs.late_masks() if self.graphs is not None else None
        if held is not None and len(held.host) >= rows:
            return held.host[:rows]
        return torch.empty(rows, words, dtype=torch.int32, pin_memory=self.device.type == "cuda").numpy()

    # ---- results and faults --------------------------------------------------------------------------------------

    def _host(self, t: torch.Tensor) -> torch.Tensor:
        if self.device.type == "cpu":
            return t
        pinned = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
        return pinned.copy_(t, non_blocking=True)

    def _fail_rows(self, running: Running, failed: np.ndarray, rows: np.ndarray, p: int, e: Exception) -> None:
        failed[rows] = True
        running.errors.append(_error("rows", self.names[p], e, rows))

    def _fail(self, running: Running, what: str, e: Exception) -> None:
        names = {"attention": self.wiring.parts["attention"].name, "forward": self.wiring.parts["model"].name}
        scope = "device" if what == "delta" else "step"
        running.errors = [_error(scope, names.get(what, what), e, np.empty(0, int))]
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
        """Give the device memory back, and end a profile that nobody wants any more."""
        if self._trace is not None:
            self._trace.close()
            self._trace = None
        if self.device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # a device that has failed has nothing left to wait for
                synchronize()  # graphs and memory go away: no step that is still on its way may need them
        self.worker = self.model = self.backend = self.state = self.graphs = self.drafting = None
        if self.device.type == "cuda":
            with ALONE:
                torch.cuda.empty_cache()


def _error(scope: str, plugin: str, e: Exception, rows: np.ndarray) -> StepError:
    text = f"{type(e).__name__}: {e}".splitlines()[0][:400]
    return StepError(scope, plugin, text, tuple(rows.tolist()))
