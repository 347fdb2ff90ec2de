"""Captured steps on a CPU.  FORWARD is one call of the native library; SAMPLE is one if it only draws tokens.

    plan ─► box ─► forward ─► hidden of sampling tokens ─► sample ─► columns, packed result
                                          └──────────────► ``step.sample``, for logits processors or data for the host

A step of more tokens than ``MOST_TOKENS`` runs as separate torch operations, because torch's products are faster then.
Without fast products in torch the limit is ``MANY_TOKENS``, which bounds the memory of the activations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from minivllm.core.interfaces.plan import StepPlan, merged, rows_with_drafts
from minivllm.device.native import library
from minivllm.device.native.program import DRAW, FORMATS, LOGITS, HeadStates, Program, address
from minivllm.device.native.recurrent import rows_of as state_rows
from minivllm.errors import PluginError

from .lowering import HeadLowering, Lowering, NotLowered
from .pooling import pool, rows_of, used_tokens
from .stored_product import widened

if TYPE_CHECKING:
    from collections.abc import Callable

    from minivllm.core.interfaces.executor import Wiring

    from .parts import ModelParts

# attributes of the worker's ``DeviceState`` whose memory the native program reads or writes
COLUMNS = (
    "tokens", "table", "block", "stop_ids", "rope_first", "dropped", "stopped", "known", "end", "min_end", "seed",
    "sample", "n_eos",
)  # fmt: skip
MOST_TOKENS = 64
MANY_TOKENS = 512


class NativeSteps:
    """The native program of a model, and the calls that run a step with it.

    The constructor raises NotLowered, with the reason, if the model or the configuration cannot run natively.
    ``state`` is the ``DeviceState`` of ``device/worker/state.py``, ``parts`` the factory that made the model's modules
    and KV cache.  Copies of weights take up to ``room`` bytes.  ``watched`` are the ``TargetStates`` of a drafter that
    reads hidden states, or None.  ``adapters`` is the index of the adapter method whose low-rank products the program
    computes; None means no adapters.
    """

    def __init__(
        self,
        wiring: Wiring,
        state: Any,
        model: Any,
        parts: ModelParts,
        sampler: Any,
        room: int,
        watched: Any = None,
        adapters: int | None = None,
    ) -> None:
        self.state = state
        self.watched = watched
        self.adapters = adapters
        self._check(wiring, parts)
        with_drafts = len(state.stopped) * (1 + wiring.speculation.num_speculative_tokens)
        rows = min(with_drafts, MOST_TOKENS)
        self.plain = int(replaceable(sampler))  # variant bits of the sampler for which the native program can draw
        self.columns = {name: getattr(state, name) for name in COLUMNS}
        self.columns["longest"] = state.tokens.shape[1]
        self.columns["slots"] = state.table.shape[1]
        self.columns["blocks"] = state.table.shape[2]
        self.columns["per_row"] = state.stop_ids.shape[1]
        self.columns["temperature"] = self._temperature(wiring) if self.plain else None
        self.columns["ahead"] = 0
        threads = torch.get_num_threads()
        self._dtype = getattr(torch, wiring.dtype)
        self.most_tokens = MANY_TOKENS if widened(self._dtype) else MOST_TOKENS
        program = Program(threads, self.most_tokens, self.columns)
        made = Lowering(model, parts, program, rows, state.block, room, adapters=adapters)
        if self.watched is not None:
            made.keep_states(self.watched.memory)
        self.program = made.program
        self.hidden = made.hidden
        self.logits = made.logits
        self.copied = made.copied  # bytes of the program's copies of weights
        self.narrowed = made.narrowed  # the copies themselves
        self.head: NativeHead | None = None  # native program of a drafter's head, or None
        self.drafts: Any = None  # ``NativeDrafts``, which run steps with drafts of the head, or None
        self._decode = wiring.steps.graph == "decode"
        self._box = np.zeros(2 + 4 * self.most_tokens, np.int64)
        self._at = address(self._box)
        # i32 [S] index of each slot's adapter in the adapter memory; None if no row of the step has an adapter
        self.places: np.ndarray | None = None

    def _check(self, wiring: Wiring, parts: ModelParts) -> None:
        """Raise NotLowered if the program would not do the same as the configured plug-ins and options.

        The program replaces the attention back end, the KV format and the model's own code."""
        if reason := library.why_not():
            raise NotLowered(reason)
        if self.watched is not None and self.watched.points != {"norm"}:
            raise NotLowered("the drafter reads hidden states inside of the model")
        if wiring.batch_invariant:
            raise NotLowered("batch_invariant=true")
        if parts.shard.size > 1:
            raise NotLowered(f"{parts.shard.size} processes share the model, and native code does not sum over them")
        backend = parts.backend
        for seam, plugin in (("attention", backend), ("kvformat", backend.ctx.kv_format)):
            if not replaceable(plugin):
                raise NotLowered(f"the plug-in {wiring.parts[seam].name} ({seam}) has code of its own, which must run")
        if not parts.described:
            raise NotLowered(f"the model {wiring.parts['model'].name} has a build() of its own, which may compute more")

    def _temperature(self, wiring: Wiring) -> torch.Tensor:
        """Return the sampler's column of temperatures, f32 [S].  PluginError if no column has this dtype and shape."""
        column = self.state.processors[-1].columns.get("temperature")
        if column is None or column.dtype != torch.float32 or column.shape != self.state.stopped.shape:
            name = wiring.parts["sampler"].name
            raise PluginError(
                f"the sampler {name} declares native={self.plain}: expected a column `temperature`, f32 per row"
            )
        return column

    def takes(self, plan: StepPlan) -> bool:
        """Return whether the native program can run the layers of a step (FORWARD).

        The step needs 1 to ``MOST_TOKENS`` rows, at most ``most_tokens`` tokens, and no prompt logprobs, taps, steering
        or given experts.  If only decode steps are captured, each row must have one token.  The buffer must have room
        for all used hidden states.
        """
        rows = len(plan.slots)
        if not 0 < rows <= MOST_TOKENS or len(plan.prompt) or len(plan.taps):
            return False
        if len(plan.steered) or len(plan.given) or len(plan.observe) or len(plan.sums):
            return False
        if len(plan.pooled):
            used = len(plan.samples) + int(plan.pooled[:, 2].sum())
            if not 0 < used <= len(self.hidden):
                return False
        most = rows if self._decode else self.most_tokens
        return 0 < int(plan.q_len.sum()) <= most

    def forward(self, plan: StepPlan) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Run the layers of a step (FORWARD).

        Return (hidden states [N, H] of the N tokens from which a token is drawn, sums of ``plan.pooled``).

        The hidden states are None if N is 0; the next step may overwrite them.  The sums are None if the step pools
        nothing.  ``sample`` cannot follow a step that pools, because the buffer then has other hidden states too."""
        at = plan.q_len.cumsum()[plan.samples] - 1
        if self.watched is not None:
            return self._watched(plan, at)
        if not len(plan.pooled):
            return self._forward(plan, at), None
        used = used_tokens(plan, at)
        hidden = self._forward(plan, used)
        assert hidden is not None
        sums = pool(plan, hidden, used, self.state)
        if not len(at):
            return None, sums
        drawing = self.state.to(rows_of(at, used))
        return hidden[drawing], sums

    def _watched(self, plan: StepPlan, at: np.ndarray) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Run FORWARD of a step whose hidden states a drafter reads, and return the same as ``forward``.

        ``at`` i64 [N] are the indices of the tokens from which a token is drawn."""
        every = np.arange(int(plan.q_len.sum()))
        hidden = self._forward(plan, every)
        assert hidden is not None
        sums = pool(plan, hidden, every, self.state) if len(plan.pooled) else None
        n = len(at)
        if not n:
            return None, sums
        self.hidden[:n] = self.hidden[torch.from_numpy(at)]  # ``sample`` reads the first rows of the buffer
        return self.hidden[:n].to(self._dtype), sums

    def _forward(self, plan: StepPlan, used: np.ndarray) -> torch.Tensor | None:
        """Run the layers of a step, and return the hidden states [N, H] of the tokens with indices ``used`` i64 [N];
        None if N is 0."""
        whole = merged(plan) if len(plan.draft) else plan
        box = self._box
        r = len(whole.slots)
        n = len(used)
        box[0] = r
        box[1] = n
        columns = columns_of(box, r)
        columns[0] = whole.slots
        columns[1] = whole.q_len
        columns[2] = whole.computed
        if n:
            end = 2 + columns.size
            box[end : end + n] = used
        advance = self._set_states(plan, whole)
        if self.places is None:
            self.program.forward(self._at)
        else:
            places = np.repeat(self.places[whole.slots], whole.q_len)
            self.program.forward(self._at, address(places))
        advance()
        if not n:
            return None
        return self.hidden[:n].to(self._dtype)

    def _set_states(self, plan: StepPlan, whole: StepPlan) -> Callable[[], None]:
        """Set the recurrent states of a step, and return a function that records the tokens that the states cover after
        it.

        In ``whole`` a row and its drafts are one row.  Without recurrent states the function does nothing.
        """
        memory = self.state.recurrent
        if memory is None:
            return lambda: None
        cu_q = np.zeros(len(whole.slots) + 1, np.int32)
        whole.q_len.cumsum(out=cu_q[1:])
        slots = torch.from_numpy(whole.slots.astype(np.int64))
        start = torch.from_numpy(whole.computed.astype(np.int32))
        drafts = torch.from_numpy(rows_with_drafts(plan))
        step = memory.of_step(slots, start, torch.from_numpy(cu_q), self.state.stopped, drafts)
        rows, held = state_rows(step)
        self.program.states(rows)

        def advance() -> None:
            held.clear()  # the program no longer needs the tensors whose memory it has read
            step.advance()

        return advance

    def draws(self, plan: StepPlan) -> bool:
        """Return whether the native program can draw the tokens of a step whose layers it has run (SAMPLE).

        It cannot if ``draws_rows`` is False, or if the step has log-probabilities, token masks, guides, beams or logits
        for the host.  Such a step needs ``step.sample``.
        """
        if plan.topk >= 0 or len(plan.late) or len(plan.host):
            return False
        if len(plan.held) or len(plan.guided):
            return False
        if not 0 < len(plan.samples) <= len(self.logits):
            return False
        return self.draws_rows(plan.slots[plan.samples])

    def draws_rows(self, slots: np.ndarray) -> bool:
        """Return whether the program can draw the tokens of the rows ``slots`` i32 [N]: no processor is active for any
        of them, and the program has the sampler's variant of each row."""
        if not self.plain:
            return False
        if self.state.active[:-1, slots].any():
            return False
        variant = self.state.processors[-1].variant[slots]
        drawable = (variant & self.plain) == variant
        return bool(drawable.all() and variant.all())

    def sample(self, plan: StepPlan) -> torch.Tensor:
        """Draw the tokens of N rows, write them to the columns, and return i32 [3, N]: tokens, counts and flags."""
        box = self._box
        n = len(plan.samples)
        box[0] = n
        box[1] = LOGITS | DRAW
        ends = plan.computed + plan.q_len
        columns = columns_of(box, n)
        columns[0] = plan.slots[plan.samples]
        columns[1] = ends[plan.samples]
        columns[2] = plan.draft[plan.samples] if len(plan.draft) else 0
        packed = np.empty((3, n), np.int32)
        self.program.sample(self._at, address(packed))
        return torch.from_numpy(packed)

    def close(self) -> None:
        self.program.close()
        if self.head is not None:
            self.head.close()


class NativeHead:
    """The native program of a drafter's head, and the calls that compute pairs and draw drafts with it.

    ``steps`` are the native steps of the served model, ``model`` is the ``PredictionHead`` and ``parts`` the factory
    that made its modules.  With ``one_rope`` the head has one rotary table.  Copies of weights take up to ``room``
    bytes.  NotLowered, with the reason, if the head cannot run natively."""

    def __init__(self, steps: NativeSteps, model: Any, parts: ModelParts, one_rope: bool, room: int) -> None:
        state = steps.state
        self.steps = steps
        self.state = state
        for plugin in (parts.backend, parts.backend.ctx.kv_format):
            if not replaceable(plugin):
                raise NotLowered(f"{type(plugin).__name__} of the drafter's head has code of its own, which must run")
        # drafts are not accepted yet, so the program gets separate lengths and end flags of the sequences to write
        self.known = torch.zeros_like(state.known)
        self.stopped = torch.zeros_like(state.stopped)
        columns = dict(steps.columns)
        columns["known"] = self.known
        columns["stopped"] = self.stopped
        columns["end"] = torch.full_like(state.end, 1 << 40)
        columns["ahead"] = 1
        if one_rope:
            columns["rope_first"] = None
        threads = torch.get_num_threads()
        rows = min(len(state.stopped), MOST_TOKENS)
        program = Program(threads, MOST_TOKENS, columns)
        made = HeadLowering(model, parts, program, rows, state.block, room, narrowed=steps.narrowed)
        self.program = made.program
        self.hidden = made.hidden
        self.states = made.states
        self.logits = made.logits
        self.copied = made.copied
        self._box = np.zeros(2 + 4 * MOST_TOKENS, np.int64)
        self._out = np.zeros((3, rows), np.int32)
        self._at = address(self._box)
        self._out_at = address(self._out)

    def takes(self, q_len: np.ndarray) -> bool:
        """Return whether the program can run the head on rows of ``q_len`` i32 [N] (hidden state, token) pairs."""
        return len(q_len) <= len(self.logits) and int(q_len.sum()) <= MOST_TOKENS

    def forward(
        self, slots: np.ndarray, q_len: np.ndarray, computed: np.ndarray, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the head on ``q_len`` i32 [N] (hidden state, token) pairs of each of N rows.  They follow its first
        ``computed`` i32 [N] pairs, which are in the head's KV cache.

        ``states`` [T, H] are the hidden states of the pairs.  Return (the results f32 [N, H] and the logits f32 [N, V]
        of the last pair of each row), which the next call overwrites.
        """
        box = self._box
        r = len(slots)
        self.states[: len(states)] = states
        self.stopped.copy_(self.state.stopped)
        box[0] = box[1] = r
        columns = columns_of(box, r, 4)
        columns[0] = slots
        columns[1] = q_len
        columns[2] = computed
        columns[3] = q_len.cumsum() - 1
        self.program.forward(self._at)
        box[1] = LOGITS
        self.program.sample(self._at, self._out_at)
        return self.hidden[:r], self.logits[:r]

    def draws(self, slots: np.ndarray, logits: torch.Tensor) -> bool:
        """Return whether ``draw`` can draw drafts of rows in ``slots`` i32 [N] from ``logits``."""
        return logits.data_ptr() == self.logits.data_ptr() and self.steps.draws_rows(slots)

    def draw(self, slots: np.ndarray, position: np.ndarray) -> torch.Tensor:
        """Draw a token of each row from the logits of the last call, and write it to the columns of tokens.

        ``position`` i32 [N] are the indices of the tokens in their sequences.  Return the tokens i64 [N]."""
        box = self._box
        r = len(slots)
        box[0] = r
        box[1] = DRAW
        last = self.state.tokens.shape[1] - 1
        columns = columns_of(box, r)
        columns[0] = slots
        columns[1] = np.minimum(position, last)
        columns[2] = 0
        self.program.sample(self._at, self._out_at)
        return torch.from_numpy(self._out.ravel()[:r].astype(np.int64))

    def propose(
        self,
        slots: np.ndarray,
        q_len: np.ndarray,
        computed: np.ndarray,
        known: np.ndarray,
        k: int,
        memory: torch.Tensor,
    ) -> np.ndarray:
        """Draw k drafts of each of N rows and write them to the columns of tokens.  Return the drafts i32 [k, N].

        First the head computes ``q_len`` i32 [N] (hidden state, token) pairs of each row.  They follow its first
        ``computed`` i32 [N] pairs, which are in the head's KV cache.  ``known`` i32 [N] are the rows' numbers of known
        tokens.  ``NativeSteps.draws_rows(slots)`` must be True.  ``memory`` [places, H] holds the hidden states of the
        served model; the index of a token is its place in the KV cache of group 0."""
        box = self._box
        r = len(slots)
        at = memory.data_ptr(), FORMATS[memory.dtype], memory.shape[1]
        last = self.state.tokens.shape[1] - 2
        source = HeadStates(*at, self.states.data_ptr(), self.hidden.data_ptr(), last)
        self.stopped.copy_(self.state.stopped)
        box[0] = r
        box[1] = k
        columns = columns_of(box, r, 4)
        columns[0] = slots
        columns[1] = q_len
        columns[2] = computed
        columns[3] = known
        drafts = np.empty((k, r), np.int32)
        self.program.propose(self._at, source, address(drafts))
        return drafts

    def close(self) -> None:
        self.program.close()


def columns_of(box: np.ndarray, rows: int, count: int = 3) -> np.ndarray:
    """Return the views [count, rows] of the arguments of a native call that have a number for each row of the step."""
    return box[2 : 2 + count * rows].reshape(count, rows)


def replaceable(plugin: Any) -> Any:
    """Return the attribute ``native`` that the plug-in's own class defines, or 0 if it defines none.

    A non-zero value allows the native program to replace the plug-in.  It is not inherited, because a subclass may
    compute something else, so its own code must run."""
    return vars(type(plugin)).get("native", 0)


def native_steps(
    wiring: Wiring,
    state: Any,
    model: Any,
    parts: ModelParts,
    sampler: Any,
    room: int,
    watched: Any = None,
    adapters: int | None = None,
) -> tuple[NativeSteps | None, str]:
    """Return (the native steps of a model, ""), or (None, the reason) if it cannot run natively."""
    try:
        return NativeSteps(wiring, state, model, parts, sampler, room, watched, adapters), ""
    except NotLowered as e:
        return None, str(e)
