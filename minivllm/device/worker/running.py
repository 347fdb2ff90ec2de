"""A step that the device has not finished."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

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


def _array(tensor: torch.Tensor | None, missing: np.ndarray) -> np.ndarray:
    """Return a host tensor as an array, or ``missing`` for None."""
    return missing if tensor is None else tensor.numpy()


@dataclass
class Running:
    """The state of a step between its submission and its collection."""

    plan: StepPlan
    hidden: torch.Tensor | None = None  # [N, H]
    graph: GraphKey | None = None  # shape of the capture in which the step runs; None for separate launches
    captures: Any = None  # ``Graphs`` or ``DraftedSteps``, which hold the capture of shape ``graph``
    shared: int = 0  # decoding rows that share prefixes, which the attention reads once
    native: bool = False  # the native CPU code computed the layers
    # whether the native code returned the hidden states of the drawing rows, so that it can draw their tokens
    draws_natively: bool = False
    start: float = 0.0
    device_ms: float = 0.0
    sampled: bool = False
    sampler: str = ""  # name of the sampler, for error messages
    # i32 [3, N] tokens, count, flags (host memory once ``event`` has passed)
    packed: torch.Tensor | None = None
    logprobs: tuple[torch.Tensor, ...] | None = None
    prompt: tuple[torch.Tensor, ...] | None = None
    logits: torch.Tensor | None = None
    taps: torch.Tensor | None = None  # f32, in the order of ``plan.taps``
    pooled: torch.Tensor | None = None  # f64, the sums of ``plan.pooled``
    kept: torch.Tensor | None = None  # i32, the kept tokens of ``delta.kept``
    errors: list[StepError] = field(default_factory=list)
    # images whose features are missing -> reason (see ``StepResult.lost``)
    lost: dict[int, str] = field(default_factory=dict)
    without_drafts: StepError | None = None  # the error of the drafter; the step runs without drafts
    drafted: torch.Tensor | None = None  # i32 number of drafts of each speculating row
    widths: tuple[int, ...] = ()  # widths of the points of the model
    came: StepPlan | None = None  # the submitted plan if rows were removed from the executed plan, else None
    back: np.ndarray | None = None  # for each remaining drawing row, its index in ``came.samples``
    # receives the tokens of the step; None if no drafter reads tokens on the host
    host_tokens: HostTokens | None = None
    seams: dict[str, float] = field(default_factory=dict)
    # indices of the rows that draw, because a captured SAMPLE returns all rows; None without a capture
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
        except RuntimeError:  # ``result`` reports the device fault
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
        """Return how the layers ran."""
        if self.graph is not None:
            return StepForm(self.graph.kind, self.graph.rows, self.graph.tokens)
        return NATIVE if self.native else SEPARATE

    def _explain_failures(self, flags: np.ndarray) -> None:
        """Add an error for rows that have FAILED in ``flags`` [N] but no error yet.

        Their sampler drew a token outside the vocabulary, which only the device detects."""
        failed = np.flatnonzero(flags & FAILED)
        if not len(failed):
            return
        named = {row for e in self.errors for row in e.rows}
        lost = tuple(row for row in failed.tolist() if row not in named)
        if lost:
            self.errors.append(StepError("rows", self.sampler, "it drew a token that is not in the vocabulary", lost))
