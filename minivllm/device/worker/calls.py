"""Calls of processors and the sampler on the logits of a step.  Each runs on the rows that use it.

    logits [N, V] ──rows that use it──► [n, V] ─ apply ─► back to their rows

``BoundCalls`` draws the tokens of a drafter's model; an exception of a plug-in costs all drafts of the step.
``GuardedCalls`` is for steps of separate launches; an exception ends the rows that use the plug-in.  ``captured`` has
the calls of a capture.  A row uses (has bound) a processor if the parameters of its request need it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from minivllm.core.interfaces.plan import FAILED, StepError
from minivllm.core.interfaces.sampling import Draw, Processor, Rows
from minivllm.core.timing import SeamTimes, processor_seams
from minivllm.errors import describe_error

from . import sampling, step
from .build import fused
from .running import Running
from .state import DeviceState, ProcessorState, to_host

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from minivllm.core.interfaces.executor import Wiring
    from minivllm.core.interfaces.plan import LateInputs


class ProcessorChain:
    """The processors of a config in order, with the sampler last, and their columns."""

    def __init__(
        self,
        made: Sequence[tuple[str, Processor]],
        state: DeviceState,
        slots: int,
        seams: SeamTimes,
    ) -> None:
        self.names = [name for name, _ in made]
        self.made = [processor for _, processor in made]
        self.sampler: Any = self.made[-1]
        self.state = state
        self.seams = seams
        self.seam_names = processor_seams(self.names)
        state.active = np.zeros((len(self.made), slots), bool)
        state.processors = []
        for processor, active in zip(self.made, state.active, strict=True):
            state.processors.append(ProcessorState(processor, slots, state.device, active))
        self.commits = [type(p).commit is not Processor.commit for p in self.made]


class SampleCalls(ABC):
    """Calls of processors and the sampler for N rows and V tokens of the vocabulary.

    Exceptions of plug-ins are raised to the caller, and their time is not measured; subclasses change both."""

    def __init__(self, chain: ProcessorChain, wants_min: bool) -> None:
        self.chain = chain
        self.state = chain.state
        self.wants_min = wants_min

    @abstractmethod
    def bound(self, p: int) -> tuple[np.ndarray | None, int] | None:
        """Return (indices i64 [n] of the rows that use processor ``p``, or None for all rows; their combined variant
        bits).

        Return None if no row uses the processor."""

    @abstractmethod
    def sampler_variant(self) -> int:
        """Return the variant bits of the sampler, combined by OR over all rows."""

    @abstractmethod
    def blank(self, logits: Tensor) -> Tensor:
        """Return a tensor i64 [N] to which the sampler writes its tokens."""

    def own_logits(self, p: int, some: np.ndarray | None) -> Tensor | None:
        """Return the logits f32 [n, V] from the own model of processor ``p``, or None if it has no model.

        ``some`` i64 [n] are the indices of its rows; None means all rows."""
        return None

    def run(self, p: int, call: Callable[..., Any], *args: Any) -> Any:
        return call(*args)

    def fail(self, p: int, e: Exception, rows: np.ndarray | None = None) -> None:
        """Raise the exception ``e`` of processor ``p``.  A subclass may instead end the rows with the indices ``rows``
        i64 [n] (None means all)."""
        raise e

    def apply(self, logits: Tensor, rows: Rows) -> None:
        """Call the processors in order; they change ``logits`` [N, V] in place.

        If a processor fails, the logits of its rows become 0, so that the sampler can still run."""
        for p in range(len(self.chain.made) - 1):
            found = self.bound(p)
            if found is not None:
                self._apply(p, logits, rows, *found)

    def _apply(self, p: int, logits: Tensor, rows: Rows, some: np.ndarray | None, variant: int) -> None:
        index = None
        part = logits
        its = rows
        if some is not None:
            index = self.state.to(some)
            part = logits[index]
            its = rows.pick(index)
        its.variant = variant
        processor = self.chain.made[p]
        columns = self.state.processors[p].columns
        try:
            its.own_logits = self.own_logits(p, some)
            self.run(p, processor.apply, part, its, columns)
        except Exception as e:
            self.fail(p, e, some)
            part.zero_()
        # ``its`` may be the object ``rows``, which is passed to other processors too; they must not get the logits of
        # this processor's model
        its.own_logits = None
        if index is not None:
            logits[index] = part

    def drawn_from(self, logits: Tensor, rows: Rows) -> Tensor:
        """Return the logits f32 [N, V] whose softmax the sampler draws from (``Sampler.drawn_from``)."""
        rows.variant = self.sampler_variant()
        columns = self.state.processors[-1].columns
        try:
            found = self.run(-1, self.chain.sampler.drawn_from, logits, rows, columns)
            if found.shape != logits.shape:
                raise ValueError(f"drawn_from gave {list(found.shape)}; expected {list(logits.shape)}")
            return found
        except Exception as e:
            self.fail(-1, e)
            return logits

    def draw(self, logits: Tensor, rows: Rows) -> Draw:
        """Call the sampler; return its tokens i64 [N], which may be outside the vocabulary."""
        rows.variant = self.sampler_variant()
        out = Draw(self.blank(logits))
        columns = self.state.processors[-1].columns
        try:
            self.run(-1, self.chain.sampler.draw, logits, rows, columns, out)
            out.check(logits)
        except Exception as e:
            self.fail(-1, e)
            out.tokens = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        return out

    def commit(self, tokens: Tensor, count: Tensor, rows: Rows) -> None:
        """Report accepted tokens to the processors (``Processor.commit``).

        ``tokens`` is i64 [N, k]; of row i the first ``count[i]`` are accepted.  If a processor raises and ``fail``
        returns, the rows that use the processor are stopped."""
        for p, processor in enumerate(self.chain.made):
            if not self.chain.commits[p]:
                continue
            found = self.bound(p)
            if found is None:
                continue
            some, variant = found
            its = rows
            sampled = tokens, count
            if some is not None:
                index = self.state.to(some)
                its = rows.pick(index)
                sampled = tokens[index], count[index]
            its.variant = variant
            columns = self.state.processors[p].columns
            try:
                self.run(p, processor.commit, *sampled, its, columns)
            except Exception as e:
                self.fail(p, e, some)
                self.state.stopped[its.slots] = True


class BoundCalls(SampleCalls):
    """Calls of processors and the sampler for the rows in ``slots`` i64 [N].  Each processor runs on the rows that use
    it."""

    def __init__(self, chain: ProcessorChain, slots: np.ndarray) -> None:
        super().__init__(chain, bool(chain.state.wants_min[slots].any()))
        self.slots = slots
        self.failed = np.zeros(len(slots), bool)

    def bound(self, p: int) -> tuple[np.ndarray | None, int] | None:
        its = self.state.processors[p]
        on = its.active[self.slots] & ~self.failed
        if not on.any():
            return None
        rows = None if on.all() else np.flatnonzero(on)
        variants = its.variant[self.slots[on]]
        return rows, int(np.bitwise_or.reduce(variants))

    def sampler_variant(self) -> int:
        variants = self.state.processors[-1].variant[self.slots]
        return int(np.bitwise_or.reduce(variants))

    def blank(self, logits: Tensor) -> Tensor:
        """Return a tensor i64 [N] of -1.  A row that the sampler leaves out keeps -1, which is no token, and so
        fails."""
        return torch.full((len(logits),), -1, dtype=torch.int64, device=logits.device)


class GuardedCalls(BoundCalls):
    """Calls that measure the time of each plug-in, and add an exception as an error of its rows to ``errors``."""

    def __init__(self, chain: ProcessorChain, slots: np.ndarray, errors: list[StepError]) -> None:
        super().__init__(chain, slots)
        self.errors = errors

    def run(self, p: int, call: Callable[..., Any], *args: Any) -> Any:
        return self.chain.seams.run(self.chain.seam_names[p], call, *args)

    def fail(self, p: int, e: Exception, rows: np.ndarray | None = None) -> None:
        rows = np.flatnonzero(~self.failed) if rows is None else rows
        self.failed[rows] = True
        name = self.chain.names[p]
        message = describe_error(e, self.chain.made[p])
        error = StepError("rows", name, message, tuple(rows.tolist()))
        self.errors.append(error)


class ProcessorModel(Protocol):
    """The second model that a processor uses (see ``own_model``)."""

    def logits_behind(self, slots: np.ndarray, known: np.ndarray) -> Tensor:
        """Return logits [N, V] that follow the first ``known`` i32 [N] tokens of the sequences in ``slots`` i32 [N]."""
        ...


class SeparateCalls(GuardedCalls):
    """The calls of a step that runs as separate launches.

    ``own_models`` maps the name of a processor to its model.  ``poison`` maps a slot to the error of a processor that
    failed between steps; these rows end in this step, and their errors are removed from it.
    """

    float32 = True
    changes = True

    def __init__(
        self,
        chain: ProcessorChain,
        wiring: Wiring,
        own_models: Mapping[str, ProcessorModel],
        running: Running,
        late: LateInputs | None,
        poison: dict[int, StepError],
    ) -> None:
        plan = running.plan
        slots = plan.slots[plan.samples].astype(np.int64)
        super().__init__(chain, slots, running.errors)
        self.wiring = wiring
        self.own_models = own_models
        self.running = running
        self.plan = plan
        self.late = late
        ends = plan.computed + plan.q_len
        self.position = ends[plan.samples].astype(np.int64)
        self.topk = plan.topk
        self.processed = wiring.logprobs_mode == "processed_logprobs"
        self.pairs: Tensor | None = None
        if len(plan.guided):
            self.pairs = self.state.to(plan.guided.T).long()
        if poison:
            self._fail_poisoned(poison)

    def _fail_poisoned(self, poison: dict[int, StepError]) -> None:
        """End the rows whose slots have an error in ``poison`` with this error, and remove it from ``poison``."""
        for row, slot in enumerate(self.slots.tolist()):
            if slot in poison:
                self.errors.append(replace(poison[slot], rows=(row,)))
                self.failed[row] = True
        for slot in self.slots[self.failed].tolist():
            poison.pop(slot, None)

    def own_logits(self, p: int, some: np.ndarray | None) -> Tensor | None:
        own = self.own_models.get(self.chain.names[p])
        if own is None:
            return None
        at = slice(None) if some is None else some
        slots = self.slots[at].astype(np.int32)
        known = self.position[at].astype(np.int32)
        return self.run(p, own.logits_behind, slots, known)

    def guide(self, logits: Tensor) -> Tensor:
        """Combine the logits of each guided row with the logits of its guide (``sampling.guide_rows``).

        A guide is a second sequence with its own prompt, as in classifier-free guidance.  Return f32 [N, V], or
        ``logits`` unchanged if no row of the step has a guide.  Logits in float32 are changed in place.
        """
        if self.pairs is None:
            return logits
        logits = logits.float()
        scale = self.state.to(self.plan.scale)
        sampling.guide_rows(logits, self.pairs, scale, self.wiring.batch_invariant)
        return logits

    def draw(self, logits: Tensor, rows: Rows) -> Draw:
        """Call the sampler, then copy the token of each guided row to the row of its guide."""
        drawn = super().draw(logits, rows)
        if self.pairs is not None:
            row, guide = self.pairs
            drawn.tokens = drawn.tokens.index_copy(0, guide, drawn.tokens[row])
        return drawn

    def rows(self) -> Rows:
        both = np.stack([self.slots, self.position])
        slots, position = self.state.to(both)
        longest = int(self.position.max())
        return step.rows_of(self.state, slots, position, longest)

    def meet_host(self, logits: Tensor) -> None:
        """Apply the token masks to ``logits`` in place, and start the copy of the logits in ``plan.host``."""
        plan = self.plan
        to = self.state.to
        if self.late is not None:
            mask = to(self.late.mask)
            sampling.apply_mask(logits, mask, to(plan.late).long())
        if len(plan.host):
            rows = to(plan.host).long()
            self.running.logits = to_host(logits[rows])

    def peaks(self, logits: Tensor) -> Tensor:
        """Return bool [N], True for rows whose logits allow no draw (see ``sampling.bad_rows``)."""
        return sampling.bad_rows(logits)

    def accept(self, logits: Tensor, rows: Rows, drawn: Draw, peaks: Tensor) -> Tensor:
        """Write the drawn tokens to the columns, report them to the processors, and start the copy of tokens, counts
        and flags to the host."""
        plan = self.plan
        to = self.state.to
        waits = np.concatenate([plan.host, plan.held])
        draft = plan.draft[plan.samples] if len(plan.draft) else None
        failed = to(self.failed) if self.failed.any() else None
        waiting = to(waits).long() if len(waits) else None
        width = logits.shape[1]
        tokens, count, flags = step.accept(self.state, rows, drawn.tokens, peaks, width, failed, waiting, draft)
        before = len(self.errors)
        if draft is None:
            self.commit(tokens[:, None], count, rows)
        else:
            self._commit_slots(tokens, count, rows, draft)
        for error in self.errors[before:]:
            for row in error.rows:
                flags[row] = FAILED
        packed = torch.stack([tokens.int(), count, flags])
        self.running.packed = to_host(packed)
        return tokens

    def _commit_slots(self, tokens: Tensor, count: Tensor, rows: Rows, draft: np.ndarray) -> None:
        """Report the accepted tokens of a step with drafts to the processors, one call for all tokens of a slot.

        An error of a slot is assigned to its first row."""
        heads, tokens, count = step.by_slot(self.state, draft, tokens, count)
        calls = GuardedCalls(self.chain, self.slots[heads], [])
        calls.commit(tokens, count, rows.pick(self.state.to(heads)))
        for error in calls.errors:
            first = heads[list(error.rows)]
            self.errors.append(replace(error, rows=tuple(first.tolist())))

    def score(self, logits: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        wiring = self.wiring
        return sampling.logprobs_of(logits, tokens, self.topk, fused(wiring), wiring.batch_invariant)
