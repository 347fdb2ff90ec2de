"""Write the drafts of speculative decoding to the columns before FORWARD.  ``step.accept`` decides which are accepted.

    row of a slot       newest    draft 1   draft 2        rows of one token, position after position
    token               x         d0        d1
    draw                y0        y1        y2             d0 is right if y0 = d0; d1 if also y1 = d1
    accepted            y0        y1        y2             if all drafts before it are right and no token was an end

Nothing here waits for a GPU.  A rejected draft stays in the columns and in the KV cache beyond the length of the
sequence.  It is never read, and the next step overwrites it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from minivllm.core.interfaces.drafter import Ask, Drafter, DrafterContext, DraftModel
from minivllm.core.interfaces.plan import StepError, StepPlan, group_rows
from minivllm.device.layers.native_steps import replaceable
from minivllm.errors import describe_error
from minivllm.registry import build_part

from .dropped_rows import without
from .head_model import HeadModel
from .host_tokens import HostTokens
from .running import Running
from .state import DeviceState, to_host
from .step import rows_of

if TYPE_CHECKING:
    from minivllm.core.interfaces.executor import Wiring
    from minivllm.core.timing import SeamTimes


class Drafting:
    """The drafter of a runner.  ``model`` is the drafter's model, or None if it needs none."""

    def __init__(
        self, wiring: Wiring, state: DeviceState, seams: SeamTimes, vocab_size: int, model: DraftModel | None
    ) -> None:
        self.state = state
        self.seams = seams
        self.vocab_size = vocab_size
        self.part = wiring.parts["drafter"]
        ctx = DrafterContext(vocab_size, wiring.max_model_len, wiring.device, model)
        self.drafter: Drafter = build_part("drafter", self.part, ctx)
        # the head whose native program replaces calls of the drafter, None without one
        self.head = model if isinstance(model, HeadModel) and replaceable(self.drafter) else None
        self.broken = False
        self.host: HostTokens | None = None
        if "host_tokens" in self.part.features:
            self.host = HostTokens(len(state.known), wiring.max_model_len, self._learn)
        self.captured: Any = None  # ``CapturedProposals``, None if calls of the drafter cannot be captured
        self._failed: StepError | None = None  # an error of ``learn``, which the next step with drafts reports

    def _learn(self, *args: Any) -> None:
        """Pass the tokens of a sequence to the drafter, unless that has failed."""
        if not self.broken:
            try:
                self.seams.run("drafter", self.drafter.learn, *args)
            except Exception as e:
                self._failed = self._fail(e)

    def _fail(self, e: Exception) -> StepError:
        """Return the error of a drafter that raised; steps then run without drafts."""
        self.broken = True
        return StepError("drafts", f"drafter {self.part.name}", describe_error(e, self.drafter))

    def prepare(self, running: Running) -> None:
        """Write the drafts of a step to the columns.

        On a CPU, draft rows for which the drafter proposed no token are removed from the plan of the step."""
        plan = running.plan
        state = self.state
        if self.host is not None:
            self.host.apply(plan)
            running.host_tokens = self.host
        if not len(plan.draft):
            return
        running.without_drafts = self._failed
        self._failed = None
        first, heads = group_rows(plan.draft)
        sizes = np.bincount(first, minlength=len(first))
        wanted = sizes[heads] - 1
        k = int(wanted.max())
        slots_np = plan.slots[heads]
        known = plan.computed[heads] + 1
        count = None
        if not self.broken:
            count = self.propose(running, Ask(None, k, slots_np, known))  # type: ignore[arg-type]
        if count is None:
            count = torch.zeros(len(heads), dtype=torch.int32, device=state.device)
        elif (wanted < k).any():
            count = torch.minimum(count, state.to(wanted.astype(np.int32)))
        running.drafted = to_host(count)
        if state.device.type == "cpu":
            plan = running.plan
            keep = _kept(plan, first, heads, running.drafted.numpy())
            if not keep.all():
                running.came = plan
                (running.plan, running.back) = without(plan, keep)

    def propose(self, running: Running, ask: Ask) -> torch.Tensor | None:
        """Write the drafts of the rows of ``ask``, which has no ``rows`` yet, to the history.

        Return the number of usable drafts of each row, i32 [N] on the device, or None if the drafter fails."""
        plan = running.plan
        heads = group_rows(plan.draft)[1]
        if self.captured is not None:
            slack = np.zeros(len(heads), np.int32)
            if len(plan.slack):
                slack = plan.slack[heads]
            try:
                count = self.seams.run("drafter", self.captured.propose, ask.slots, ask.known, ask.k, slack)
            except Exception as e:  # the drafter's model raised in an operation that is not captured
                running.without_drafts = self._fail(e)
                return None
            if count is not None:
                return count
        state = self.state
        if len(plan.slack):
            ask = replace(ask, known=running.settle(state).computed[heads] + 1)
        if self.head is not None:
            drafts = self.seams.run("drafter", self.head.propose, ask.slots, ask.known, ask.k)
            if drafts is not None:  # the first token of a sequence has no states before it
                counts = np.where(ask.known > 1, ask.k, 0)
                return torch.from_numpy(counts.astype(np.int32))
        columns = np.stack([ask.slots, ask.known])
        packed = state.to(columns.astype(np.int64))
        found = self._ask(running, packed, ask)
        if found is None:
            return None
        tokens, usable = found
        slots, position = packed
        last = state.tokens.shape[1] - 1
        at = position[:, None] + torch.arange(ask.k, device=state.device)
        state.tokens[slots[:, None], at.clamp_(max=last)] = tokens.int()
        return usable.int()

    def _ask(self, running: Running, packed: torch.Tensor, ask: Ask) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the drafter's tokens i64 [N, k] and their counts i64 [N]; None if it fails."""
        slots, position = packed
        longest = int(ask.known.max())
        ask = replace(ask, rows=rows_of(self.state, slots, position, longest))
        if self.host is not None:
            history = self.host.known(ask.slots, ask.known)
            ask = replace(ask, history=history, owner=self.host.owner[ask.slots])
        try:
            tokens, count = self.seams.run("drafter", self.drafter.propose, ask)
            return _usable(tokens, count, len(slots), ask.k, self.vocab_size)
        except Exception as e:  # steps run without drafts after an exception of the drafter
            running.without_drafts = self._fail(e)
            return None


def check_drafts(tokens: torch.Tensor, count: torch.Tensor, n: int, k: int) -> None:
    """Raise ValueError unless ``tokens`` and ``count`` have the shapes and dtypes of k drafts for n rows."""
    shape = tuple(tokens.shape)
    counts = tuple(count.shape)
    if shape != (n, k) or counts != (n,):
        raise ValueError(f"drafts of shape {shape}, count {counts}; expected {(n, k)} and {(n,)}")
    for name, found in (("drafts", tokens), ("count", count)):
        if found.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"{name} are {found.dtype}; expected int64")


def _usable(tokens: torch.Tensor, count: torch.Tensor, n: int, k: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Check the output of a drafter; return the drafts [n, k] and the number of usable drafts of each of n rows.

    The usable drafts of a row end before the first that is not a token of the vocabulary.  Raise ValueError for wrong
    shapes or dtypes, and on a CPU also for a wrong count or token.  On a GPU this check would wait for the device."""
    check_drafts(tokens, count, n, k)
    there = (tokens >= 0) & (tokens < vocab)
    valid = there.int().cumprod(1).sum(1)  # number of tokens before the first that is none
    usable = torch.minimum(count, valid).clamp_(min=0)
    if tokens.device.type == "cpu":
        least = int(count.min())
        most = int(count.max())
        if least < 0 or most > k:
            raise ValueError(f"count goes from {least} to {most}; expected 0 to {k} drafts a row")
        if (usable < count).any():
            raise ValueError(f"a draft is out of range; expected tokens 0 to {vocab - 1}")
    return torch.where(there, tokens, 0), usable


def _kept(plan: StepPlan, first: np.ndarray, heads: np.ndarray, drafted: np.ndarray) -> np.ndarray:
    """Return bool [R], False for draft rows for which the drafter proposed no token.

    ``first`` and ``heads`` come from ``group_rows``.  ``drafted`` is the number of drafts of each row in ``heads``."""
    there = np.zeros(len(first), np.int64)
    there[heads] = drafted
    return plan.draft <= there[first]
