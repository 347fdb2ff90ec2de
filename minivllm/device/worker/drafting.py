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
from torch import Tensor

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
    from minivllm.device.layers.native_steps import NativeSteps


class Drafting:
    """Calls of a runner's drafter, and the drafts of its steps.  ``model`` is the drafter's model; None without one."""

    def __init__(
        self, wiring: Wiring, state: DeviceState, seams: SeamTimes, vocab_size: int, model: DraftModel | None
    ) -> None:
        self.state = state
        self.seams = seams
        self.vocab_size = vocab_size
        self.part = wiring.parts["drafter"]
        ctx = DrafterContext(vocab_size, wiring.max_model_len, wiring.device, model)
        self.drafter: Drafter = build_part("drafter", self.part, ctx)
        # drafter's head whose native CPU code draws the drafts instead of the drafter; None without such a head
        self.head = model if isinstance(model, HeadModel) and replaceable(self.drafter) else None
        self.broken = False
        self.host: HostTokens | None = None
        if "host_tokens" in self.part.features:
            self.host = HostTokens(len(state.known), wiring.max_model_len, self._learn)
        self.captured: Any = None  # ``CapturedProposals``; None if calls of the drafter cannot be captured
        self._failed: StepError | None = None  # error of ``Drafter.learn``, reported by the next step with drafts

    def _learn(self, *args: Any) -> None:
        """Pass the tokens of a finished sequence to the drafter, unless the drafter has raised before."""
        if not self.broken:
            try:
                self.seams.run("drafter", self.drafter.learn, *args)
            except Exception as e:
                self._failed = self._fail(e)

    def _fail(self, e: Exception) -> StepError:
        """Mark the drafter as broken, so that steps run without drafts, and return the error to report."""
        self.broken = True
        return StepError("drafts", f"drafter {self.part.name}", describe_error(e, self.drafter))

    def run_natively(self, running: Running, native: NativeSteps | None) -> bool:
        """Run a whole step with drafts in calls of native CPU code, and return True.

        Return False, without a change, if the step has no drafts or native code cannot run all its parts."""
        plan = running.plan
        drafts = None if native is None else native.drafts
        if drafts is None or self.broken or not drafts.takes(plan):
            return False
        found = self.seams.run("drafter", drafts.draft)
        if found is None:
            return False
        running.drafted = torch.from_numpy(found)
        self.seams.run("model", drafts.forward, found)
        running.packed = self.seams.run("sampler", drafts.sample)
        running.native = True
        return True

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

    def propose(self, running: Running, ask: Ask) -> Tensor | None:
        """Write drafts for the sequences of ``ask`` to the columns of tokens.  ``ask.rows`` is not set yet.

        Return the number of usable drafts of each sequence, i32 [N] on the device, or None if the drafter fails."""
        plan = running.plan
        heads = group_rows(plan.draft)[1]
        if self.captured is not None:
            slack = np.zeros(len(heads), np.int32)
            if len(plan.slack):
                slack = plan.slack[heads]
            try:
                count = self.seams.run("drafter", self.captured.propose, ask.slots, ask.known, ask.k, slack)
            except Exception as e:  # an operation of the drafter's model outside the capture raised
                running.without_drafts = self._fail(e)
                return None
            if count is not None:
                return count
        state = self.state
        if len(plan.slack):
            ask = replace(ask, known=running.settle(state).computed[heads] + 1)
        if self.head is not None:
            drafts = self.seams.run("drafter", self.head.propose, ask.slots, ask.known, ask.k)
            if drafts is not None:  # a row of one token has no usable drafts, because no hidden state precedes it
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

    def _ask(self, running: Running, packed: Tensor, ask: Ask) -> tuple[Tensor, Tensor] | None:
        """Return the drafts i64 [N, k] of the drafter, and the number of usable drafts of each row i64 [N]; None if it
        fails."""
        slots, position = packed
        longest = int(ask.known.max())
        ask = replace(ask, rows=rows_of(self.state, slots, position, longest))
        if self.host is not None:
            history = self.host.known(ask.slots, ask.known)
            ask = replace(ask, history=history, owner=self.host.owner[ask.slots])
        try:
            tokens, count = self.seams.run("drafter", self.drafter.propose, ask)
            return _usable(tokens, count, len(slots), ask.k, self.vocab_size)
        except Exception as e:  # after an exception of the drafter, steps run without drafts
            running.without_drafts = self._fail(e)
            return None


def check_drafts(tokens: Tensor, count: Tensor, n: int, k: int) -> None:
    """Raise ValueError unless ``tokens`` and ``count`` have the shapes and dtypes of k drafts for n rows."""
    shape = tuple(tokens.shape)
    counts = tuple(count.shape)
    if shape != (n, k) or counts != (n,):
        raise ValueError(f"drafts of shape {shape}, count {counts}; expected {(n, k)} and {(n,)}")
    for name, found in (("drafts", tokens), ("count", count)):
        if found.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"{name} are {found.dtype}; expected int64 or int32")


def _usable(tokens: Tensor, count: Tensor, n: int, k: int, vocab: int) -> tuple[Tensor, Tensor]:
    """Check the output of a drafter; return the drafts [n, k] and the number of usable drafts of each of n rows.

    The usable drafts of a row end before the first that is not a token of the vocabulary.  Raise ValueError for wrong
    shapes or dtypes, and on a CPU also for a wrong count or token.  On a GPU this check would wait for the device."""
    check_drafts(tokens, count, n, k)
    there = (tokens >= 0) & (tokens < vocab)
    valid = there.int().cumprod(1).sum(1)  # number of drafts before the first that is no id of the vocabulary
    usable = torch.minimum(count, valid).clamp_(min=0)
    if tokens.device.type == "cpu":
        least = int(count.min())
        most = int(count.max())
        if least < 0 or most > k:
            raise ValueError(f"count goes from {least} to {most}; expected 0 to {k} drafts a row")
        if (usable < count).any():
            raise ValueError(f"a draft is out of range; expected token ids 0 to {vocab - 1}")
    return torch.where(there, tokens, 0), usable


def _kept(plan: StepPlan, first: np.ndarray, heads: np.ndarray, drafted: np.ndarray) -> np.ndarray:
    """Return bool [R], False for draft rows for which the drafter proposed no token.

    ``first`` and ``heads`` come from ``group_rows``.  ``drafted`` is the number of drafts of each row in ``heads``."""
    there = np.zeros(len(first), np.int64)
    there[heads] = drafted
    return plan.draft <= there[first]
