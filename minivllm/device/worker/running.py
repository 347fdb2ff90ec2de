"""The state of a step that the device has not finished."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from minivllm.core.interfaces.attention import GraphKey
from minivllm.core.interfaces.plan import FAILED, LogProbs, StepError, StepForm, StepPlan, StepResult, no_rows

from .dropped_rows import spread
from .host_tokens import HostTokens

if TYPE_CHECKING:
    from .state import DeviceState

NO_TAPS = no_rows(dtype=np.float32)
NO_DRAFTS = no_rows()
NO_KEPT = no_rows()
NO_SUMS = no_rows(0, 0, dtype=np.float64)
NATIVE = StepForm("native")
SEPARATE = StepForm("separate")


def _array(tensor: Tensor | None, missing: np.ndarray) -> np.ndarray:
    """Return a host tensor as an array; ``missing`` is returned for None."""
    return missing if tensor is None else tensor.numpy()


@dataclass
class Running:
    """A step that was submitted to the device and whose result has not been collected."""

    plan: StepPlan
    hidden: Tensor | None = None  # [N, H]
    graph: GraphKey | None = None  # shape of the capture that ran the layers; None if they ran as separate launches
    captures: Any = None  # ``Graphs`` or ``DraftedSteps``, which hold the capture of shape ``graph``
    shared: int = 0  # number of decoding rows whose common prefixes attention reads once
    native: bool = False  # whether the native CPU code computed the layers
    # whether the native code returned the hidden states of the drawing rows, so that it can draw their tokens
    draws_natively: bool = False
    start: float = 0.0
    device_ms: float = 0.0
    sampled: bool = False
    sampler: str = ""  # name of the sampler, for error messages
    # i32 [3, N] tokens, counts and flags in host memory, which are valid after ``event``
    packed: Tensor | None = None
    logprobs: tuple[Tensor, ...] | None = None
    prompt: tuple[Tensor, ...] | None = None
    logits: Tensor | None = None
    taps: Tensor | None = None  # f32 values read at tap points, in the order of ``plan.taps``
    pooled: Tensor | None = None  # f64 sums of hidden states that ``plan.pooled`` requests
    kept: Tensor | None = None  # i32 indices of the tokens that compressions kept
    errors: list[StepError] = field(default_factory=list)
    # id of an image without features -> reason why it has none (see ``StepResult.lost``)
    lost: dict[int, str] = field(default_factory=dict)
    without_drafts: StepError | None = None  # error of the drafter, after which the step runs without drafts
    drafted: Tensor | None = None  # i32 number of drafts of each row with drafts
    widths: tuple[int, ...] = ()  # numbers of elements of a token's value at each tap point of the model
    came: StepPlan | None = None  # the plan before rows were removed from it; None if none were removed
    back: np.ndarray | None = None  # index in ``came.samples`` of each drawing row that was not removed
    # gets the tokens of the step, for a drafter that reads tokens on the host; None without such a drafter
    host_tokens: HostTokens | None = None
    seams: dict[str, float] = field(default_factory=dict)
    # indices of the rows that draw in the result of a captured draw, which has all rows; None without a capture
    pick: np.ndarray | None = None
    event: Any = None
    begun: Any = None

    def settle(self, state: DeviceState) -> StepPlan:
        """Replace upper bounds of lengths in the plan by the lengths on the device, and return the plan.

        This waits for the steps before.  Captured steps read the lengths on the device and do not need it."""
        plan = self.plan
        if len(plan.slack):
            slots = state.to(plan.slots.astype(np.int64))
            exact = state.known[slots].cpu().numpy() - 1
            if len(plan.draft):
                exact += plan.draft
            computed = np.where(plan.slack > 0, exact, plan.computed).astype(np.int32)
            self.plan = replace(plan, computed=computed, slack=NO_DRAFTS)
        return self.plan

    def finished(self) -> bool:
        try:
            return self.sampled and (self.event is None or self.event.query())
        except RuntimeError:  # the device has failed; ``result`` reports this
            return True

    def result(self) -> StepResult:
        """Wait for the device and return the result of the step.

        A fault of the device becomes an error in the result."""
        if self.event is not None:
            try:
                self.event.synchronize()
                self.device_ms = self.begun.elapsed_time(self.event)
            except RuntimeError as e:  # an asynchronous fault of the device is raised here
                self.packed = None
                self.errors = [StepError("device", "device", str(e).splitlines()[0])]
        plan = self.plan
        n = len(plan.samples)
        mine = slice(None) if self.pick is None else self.pick
        if self.packed is None:
            packed = np.zeros((3, n), np.int32)
        else:
            packed = self.packed.numpy()[:, mine]
        lp = None
        if self.logprobs is not None:
            chosen, rank, ids, top = (t.numpy()[mine] for t in self.logprobs)
            lp = LogProbs(chosen, rank, ids, top)
        flags = packed[2].astype(np.uint8)
        if np.count_nonzero(flags):
            self._explain_failures(flags)
        errors = tuple(self.errors)
        if self.without_drafts is not None:
            errors += (self.without_drafts,)
        prompt = None
        if self.prompt is not None:
            prompt = LogProbs(*(t.numpy() for t in self.prompt))
        result = StepResult(
            id=plan.id,
            slots=plan.slots if n == len(plan.slots) else plan.slots[plan.samples],
            tokens=packed[0],
            count=packed[1],
            flags=flags,
            logprobs=lp,
            errors=errors,
            device_ms=self.device_ms,
            logits=None if self.logits is None else self.logits.numpy(),
            seams=self.seams,
            prompt=prompt,
            drafted=_array(self.drafted, NO_DRAFTS),
            taps=_array(self.taps, NO_TAPS),
            pooled=_array(self.pooled, NO_SUMS),
            kept=_array(self.kept, NO_KEPT),
            lost=self.lost,
            form=self.form,
            shared=self.shared,
        )
        submitted = plan
        if self.came is not None and self.back is not None:
            submitted = self.came
            result = spread(result, self.back, submitted, self.widths)
        if self.host_tokens is not None:
            self.host_tokens.collect(submitted, result)
        return result

    @property
    def form(self) -> StepForm:
        """Return whether the layers ran in a capture, in native CPU code or as separate launches."""
        if self.graph is not None:
            return StepForm(self.graph.kind, self.graph.rows, self.graph.tokens)
        return NATIVE if self.native else SEPARATE

    def _explain_failures(self, flags: np.ndarray) -> None:
        """Add an error for rows that have the flag FAILED in ``flags`` [N] and no error yet.

        Their sampler drew an id outside the vocabulary; only the device checks this."""
        failed = np.flatnonzero(flags & FAILED)
        if not len(failed):
            return
        named = {row for e in self.errors for row in e.rows}
        lost = tuple(row for row in failed.tolist() if row not in named)
        if lost:
            self.errors.append(StepError("rows", self.sampler, "it drew a token that is not in the vocabulary", lost))
