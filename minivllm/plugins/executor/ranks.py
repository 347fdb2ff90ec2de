"""The runner of one rank.  Of the processes that share a model, rank 0 draws, and the others follow.

    rank 0     head: tokens ──► FORWARD ──► hidden ─ head ─ gather ─► logits ─ processors, masks, draw ─► columns
                       │           │                           ▲
    rank 1     head: tokens ──► FORWARD ──► hidden ─ head ─────┘

All ranks have the same columns.  Only rank 0 has the tokens that a step drew.  It sends them at the *head* of the next
step, before the delta of that step is applied.  So no rank waits in a collective call while a grammar is compiled,
because no rank begins a step behind one whose masks are missing.  Rank 0 also proposes all drafts, and computes all
models besides the shared one.

All ranks gather logits of the same rows.  After a captured FORWARD these are its padded rows, even if rank 0 does not
draw by a capture, because the other ranks cannot know this.

FORWARD must fail on all ranks, or the engine ends.  An exception of a plug-in occurs on each rank before the same
collective call.  A failed rank reports its number of calls, which the process that started the ranks compares.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import astuple, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from minivllm.core.interfaces.codec import encode_plan
from minivllm.core.interfaces.drafter import Ask, Drafter
from minivllm.core.interfaces.executor import Part, Wiring
from minivllm.core.interfaces.plan import LateInputs, StepPlan
from minivllm.device.worker.drafting import Drafting
from minivllm.device.worker.runner import Runner
from minivllm.device.worker.running import Running

if TYPE_CHECKING:
    from minivllm.device.layers.communicator import ProcessGroup

FailureReport = Callable[[int, str, str], None]  # (step id, "forward" or "sample", error message) -> None


class RankDrafter(Drafter):
    """The drafter in the configuration of a rank other than 0.  It is never called, because rank 0 proposes all
    drafts."""

    def propose(self, ask: Ask) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("rank 0 proposes the drafts of all ranks")


def follower(wiring: Wiring) -> Wiring:
    """Return the configuration of a rank that draws no tokens: without a drafter, and without models that only rank 0
    computes."""
    drafter = Part("minivllm/rank", "minivllm.plugins.executor.ranks:RankDrafter")
    return replace(
        wiring,
        parts={**wiring.parts, "drafter": drafter},
        speculation=replace(wiring.speculation, draft_model=None),
        own_models={},
    )


class RankRunner(Runner):
    """Runs the steps of one rank (one of the processes that share a model).

    ``report`` is called for a step that failed here, because it may have succeeded on other ranks."""

    def __init__(self, wiring: Wiring, ranks: ProcessGroup, report: FailureReport, checked: bool = False) -> None:
        self.ranks = ranks
        self._report_failure = report
        self._checked = checked
        self.leads = ranks.rank == 0
        self._seen = [0, 0]
        self._drawn: np.ndarray | None = None
        if ranks.size > 1 and find_spec("triton") is not None:
            self.captures = rank_graphs(ranks)
        if ranks.size > 1:
            self.drafts = partial(RankDrafting, ranks)
        super().__init__(wiring if self.leads else follower(wiring), ranks if ranks.size > 1 else None)
        if self.leads and ranks.why_not:
            self.worker.notes.append(f"ranks add by NCCL alone: {ranks.why_not}")
        if not self.leads:
            self.model = self.worker.model = _Quiet(self.model, self.worker.vocab_size)
            self.chain.commits = [False] * len(self.chain.commits)

    # ---- FORWARD -------------------------------------------------------------------------------------------------

    def forward(self, plan: StepPlan) -> Running:
        try:
            with torch.inference_mode():
                self._meet(plan)
        except Exception as e:  # the columns of this rank may now differ from those of other ranks
            running = Running(plan, start=time.perf_counter(), begun=self._mark())
            self._fail(running, "delta", e)
        else:
            running = super().forward(plan)
            if not self.leads and self._poison:
                slot, error = next(iter(self._poison.items()))
                self._report_failure(plan.id, "sample", f"row of slot {slot}: {error.message}")
        if running.errors:
            self._report_failure(plan.id, "forward", running.errors[0].message)
        elif self._checked and running.hidden is not None:
            self._seen[1] = zlib.crc32(_bytes(running.hidden))
        return running

    def _meet(self, plan: StepPlan) -> None:
        """Share the tokens of the last step from rank 0 with the other ranks, at the head of a step."""
        drawn = self._drawn
        self._drawn = None
        if self.ranks.size == 1:
            return
        if len(plan.samples):
            position = (plan.computed + plan.q_len)[plan.samples]
            self._drawn = np.stack([plan.slots[plan.samples], position]).astype(np.int64)
        if drawn is not None:
            slots, at = self.state.to(drawn)
            self.ranks.share_drawn(slots, at, self.state)
        if self._checked:
            self._compare(plan)

    def _compare(self, plan: StepPlan) -> None:
        """Raise RuntimeError unless all ranks have the same plans, columns and hidden states."""
        s = self.state
        self._seen[0] = zlib.crc32(b"".join(encode_plan(plan)), self._seen[0])
        rows = torch.arange(len(s.known), device=s.device)
        last = (s.known - 1).clamp(min=0)
        newest = s.tokens[rows, last]
        columns = b"".join(map(_bytes, (s.known, s.stopped, newest)))
        found = self.ranks.all_gather([*self._seen, zlib.crc32(columns)])
        compared = ("plans", "hidden states", "columns")
        for what, sums in zip(compared, zip(*found, strict=True), strict=True):
            if len(set(sums)) > 1:
                listed = ", ".join(f"rank {rank} {one:08x}" for rank, one in enumerate(sums))
                raise RuntimeError(f"the ranks have different {what} before step {plan.id}: {listed}")

    # ---- SAMPLE --------------------------------------------------------------------------------------------------

    def sample(self, running: Running, late: LateInputs | None = None) -> None:
        """Draw tokens on rank 0, with the token masks ``late`` if the step waited for some.

        The other ranks send their part of the logits.  A failure after which the ranks may differ is reported.
        """
        drew = running.hidden is not None and not running.errors and self.ranks.size > 1
        calls = self.ranks.calls
        whole = self._whole(running) if drew else running.hidden
        if not self.leads:
            self._follow(running, whole)
        elif whole is None or whole is running.hidden:
            super().sample(running, late)
        else:
            self._sample_padded(running, late, whole)
        parted = self.ranks.lost is not None or self.ranks.calls != calls + drew
        if parted or (running.errors and drew and not self.leads):
            words = self.ranks.lost or (running.errors[0].message if running.errors else "calls were left out")
            self._report_failure(running.plan.id, "sample", str(words))

    def _whole(self, running: Running) -> Tensor | None:
        """Return the hidden states from which all ranks compute logits, None if the step has none.

        After a captured FORWARD they include padding rows.
        """
        if running.graph is None:
            return running.hidden
        return self.graphs.buffers[running.graph.rows].hidden

    def _sample_padded(self, running: Running, late: LateInputs | None, whole: Tensor) -> None:
        """Draw tokens on rank 0 after a captured FORWARD, whose padded hidden states are ``whole``."""
        model = self.model
        samples = running.plan.samples
        assert running.hidden is not None
        self.model = _Padded(model, running.hidden, whole, lambda: self.state.to(samples).long())
        try:
            super().sample(running, late)
        finally:
            self.model = model

    def _follow(self, running: Running, whole: Tensor | None) -> None:
        running.sampled = True
        try:
            if running.hidden is not None and not running.errors:
                with torch.inference_mode():
                    self.model.share(whole)
            running.event = self._mark()
        except Exception as e:
            self._fail(running, "sampling", e)
        running.hidden, running.seams = None, self.seams.take()

    def _sample_captured(self, running: Running, late: LateInputs | None) -> bool:
        done = super()._sample_captured(running, late)
        if done and self.ranks.size > 1:
            self.ranks.replayed("gather")
        return done


class _Padded:
    """Wraps the model of rank 0 while it draws tokens after a captured FORWARD.

    ``logits`` of ``hidden`` computes the logits of ``whole``, the padded hidden states of the capture, and returns the
    rows that sample.  All ranks compute logits of ``whole``, so that the shapes of their collective call are equal."""

    def __init__(self, model: Any, hidden: Tensor, whole: Tensor, rows: Callable[[], Tensor]) -> None:
        self._model = model
        self._hidden = hidden
        self._whole = whole
        self._rows = rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def logits(self, hidden: Tensor) -> Tensor:
        if hidden is self._hidden:
            return self._model.logits(self._whole)[self._rows()]
        return self._model.logits(hidden)


class _Quiet:
    """Wraps the model of a rank other than 0.  It takes part in computing the logits and returns zeros, because only
    rank 0 has them."""

    def __init__(self, model: Any, vocab: int) -> None:
        self._model = model
        self._vocab = vocab
        self.share = model.logits

    def __call__(self, step: Any) -> Tensor:
        return self._model(step)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def logits(self, hidden: Tensor) -> Tensor:
        self.share(hidden)
        return hidden.new_zeros(len(hidden), self._vocab)


class RankDrafting(Drafting):
    """The drafting of a rank: rank 0 proposes drafts, and the other ranks receive them."""

    def __init__(self, ranks: ProcessGroup, *args: Any) -> None:
        super().__init__(*args)
        self._ranks = ranks
        self._gone = False

    def _ask(self, running: Running, packed: Tensor, ask: Ask) -> tuple[Tensor, Tensor] | None:
        """Return rank 0's drafts on every rank."""
        found = None
        if self._ranks.rank == 0 and not self._gone:
            found = super()._ask(running, packed, ask)
            # a failed drafter is not called again, but rank 0 still sends the message for which the other ranks wait
            self._gone = self.broken
            self.broken = False
        rows = packed.shape[1]
        both = torch.zeros(rows, ask.k + 1, dtype=torch.int64, device=packed.device)
        if found is not None:
            both[:, : ask.k] = found[0]
            both[:, ask.k] = found[1]
        self._ranks.broadcast(both)
        return both[:, : ask.k], both[:, ask.k]


def rank_graphs(ranks: ProcessGroup) -> type:
    """Return a class of ``Graphs`` for ranks, which all capture FORWARD for the same sizes.  Sizes are not
    chosen by measurement, which would differ between ranks.  Rank 0 captures SAMPLE if logits are in memory that all
    GPUs can reach, and the capture waits for the other ranks' parts.  Other ranks draw nothing."""
    from minivllm.device.worker.graphs import Graphs
    from minivllm.device.worker.step_costs import StepCosts

    parts = 1e12  # costs are compared as whole numbers of 1e-12 ms

    class RankGraphs(Graphs):
        measured_from = 1 << 30
        # captures and draws contain exchanges between ranks, so all ranks must begin them together
        gradual = draws_apart = False

        def __post_init__(self) -> None:
            super().__post_init__()
            self.costs = self._agreed(self.costs)
            if (shared := self.runner.shared) is not None:  # all ranks choose the same capture
                shared.least_tokens = ranks.least([shared.least_tokens])[0]

        def _agreed(self, costs: StepCosts) -> StepCosts:
            """Return the minimum of each cost over all ranks, so that all ranks choose the same sizes to capture."""
            least = ranks.least([int(cost * parts) for cost in astuple(costs)])
            return StepCosts(*(n / parts for n in least))

        def _measure(self, key: Any) -> StepCosts:
            return self._agreed(super()._measure(key))

        def warm(self) -> None:
            # all ranks compile the kernels of the first and the last tile size before rank 0 captures a step
            if ranks.peers is not None:
                self.runner.model.logits(self._buffers(self.coarse[0]).hidden[:1])
                slots, at = self.runner.state.to(np.array([[self.spare], [0]]))
                ranks.share_drawn(slots, at, self.runner.state)
            super().warm()

        def _capture_forward(self, key: Any) -> None:
            """Capture a step on all ranks or on none, since its collective calls depend on it."""
            failed: BaseException | None = None
            try:
                super()._capture_forward(key)
            except BaseException as e:
                failed = e
            if not ranks.least([failed is None])[0]:
                self.forwards.pop(key, None)
                raise failed or RuntimeError("another rank could not capture it")

        def _sample_of(self, *args: Any) -> Any:
            return super()._sample_of(*args) if ranks.rank == 0 and ranks.peers is not None else None

        def _capture_sample(self, *args: Any) -> Any:
            peers = ranks.peers
            assert peers is not None  # see ``_sample_of``
            peers.alone = True
            try:
                return super()._capture_sample(*args)
            finally:
                peers.alone = False

    return RankGraphs


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes()
