"""Captured decode steps: a step in which every row brings one token is two replays and no work per row on the host.

    host:    slots ──► (copied only if they changed)                                     packed ──► pinned memory
    device:  FORWARD[rows]   begin ─ embed ─ layers ─ norm ─ head ──► logits                 ▲
             SAMPLE[rows, what is asked]   processors ─ draw ─ commit ───────────────────────┘

``begin`` reads token, length and block table of each slot from the device's own columns and ``commit`` writes them, so
step N + 1 can be launched before the host has seen the tokens of step N.  A batch is filled up to the next captured
size with rows of the *spare slot*, the last one of the columns: it belongs to nobody, counts as ended, and what it
computes goes to the null block.

What cannot be captured (a processor that is not graph safe, masks from the host, a model that waits for the device)
runs as separate launches instead; ``notes`` says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from . import sampling
from .interfaces.attention import AttnMeta, GraphKey
from .interfaces.model import StepTensors
from .interfaces.sampling import Draw, Processor, Rows
from .kernels import draw, step
from .request import SamplingParams

if TYPE_CHECKING:
    from .interfaces.plan import StepPlan
    from .runner import Runner

SHORT = 8192  # contexts up to here share their captures; longer ones are cut differently by the attention back end
MIN_TOKENS = 1 << 40  # beside the variant bits of processors: some row has min_tokens


def sizes(most: int) -> list[int]:
    """Captured batch sizes up to ``most``: close together where a filled-up row costs the most, relatively."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32), *range(512, 1025, 64)]
    return sorted({n for n in steps if n < most} | {min(most, 1024)})


@dataclass
class Buffers:
    """What a captured size reads and writes: B rows, G KV groups, V tokens."""

    slots: torch.Tensor  # i64 [B]
    after: torch.Tensor  # i64 [B] index of the token that is about to be drawn
    out: torch.Tensor  # i32 [3, B] tokens, counts, flags
    meta: AttnMeta
    ids: torch.Tensor  # i64 [B]
    held: np.ndarray  # what ``slots`` holds, on the host
    logits: torch.Tensor | None = None  # [B, V], the model's own dtype; FORWARD writes it


@dataclass
class Captured:
    graph: Any
    result: Any = None


@dataclass
class Graphs:
    """The captures of one runner.  All share one memory pool: they run one after another."""

    runner: Runner
    buffers: dict[int, Buffers] = field(default_factory=dict)
    forwards: dict[GraphKey, Captured] = field(default_factory=dict)
    samples: dict[tuple, Captured | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sizes = sizes(self.runner.wiring.max_num_seqs)
        self.spare = self.runner.wiring.max_num_seqs
        self.pool = torch.cuda.graph_pool_handle()
        self.off = False

    # ---- which capture -------------------------------------------------------------------------------------------

    def key(self, plan: StepPlan) -> GraphKey | None:
        """The capture that a step can run in, or None."""
        rows = len(plan.slots)
        if self.off or not rows or rows > self.sizes[-1] or len(plan.samples) != rows or plan.q_len.max() != 1:
            return None
        size = self.sizes[int(np.searchsorted(self.sizes, rows))]
        longest = int(plan.computed.max()) + 1
        span = SHORT if longest <= SHORT else self.runner.wiring.max_model_len
        return GraphKey("decode", size, size, span)

    def asked(self, plan: StepPlan) -> tuple | None:
        """What the rows of a step ask of processors and sampler; None if that cannot be captured."""
        if len(plan.late) or len(plan.host):
            return None
        slots = plan.slots
        state = self.runner.state
        variants = []
        for i, held in enumerate(state.processors):
            on = held.active[slots]
            active = bool(on.any()) or i == len(state.processors) - 1
            if active and not self.runner.graph_safe[i]:
                return None
            variants.append(int(np.bitwise_or.reduce(held.variant[slots])) if active else -1)
        return (*variants, bool(state.wants_min[slots].any()), plan.topk)

    # ---- run -----------------------------------------------------------------------------------------------------

    def forward(self, key: GraphKey, slots: np.ndarray) -> torch.Tensor:
        """Logits [R, V] of the rows; capture the step first if this is the first of its size."""
        captured = self.forwards.get(key) or self._capture_forward(key)
        b = self._take(key.rows, slots)
        captured.graph.replay()
        b.logits = captured.result
        return captured.result[: len(slots)]

    def sample(self, key: GraphKey, asked: tuple) -> tuple[torch.Tensor, Any] | None:
        """(i32 [3, B] tokens, counts and flags; log-probabilities or None), or None if that cannot be captured."""
        at = (key, asked)
        if at not in self.samples:
            self.samples[at] = self._capture_sample(key, asked)
        captured = self.samples[at]
        if captured is None:
            return None
        captured.graph.replay()
        return self.buffers[key.rows].out, captured.result

    def warm(self) -> None:
        """Capture every size, largest first so that the smaller ones find their memory in the pool."""
        plain = tuple([-1] * (len(self.runner.processors) - 1))
        bound = [self.runner.sampler.bind(SamplingParams(temperature=t), 1) for t in (0.0, 1.0)]
        variants = sorted({row.variant for row in bound if row is not None})
        for size in reversed(self.sizes):
            key = GraphKey("decode", size, size, SHORT)
            self.forward(key, np.full(size, self.spare))
            for variant in variants:
                self.sample(key, (*plain, variant, False, -1))

    def _take(self, size: int, slots: np.ndarray) -> Buffers:
        """The buffers of a size, holding these slots."""
        b = self.buffers[size]
        if not np.array_equal(b.held[: len(slots)], slots) or (b.held[len(slots) :] != self.spare).any():
            b.held[: len(slots)], b.held[len(slots) :] = slots, self.spare
            b.slots.copy_(torch.from_numpy(b.held.copy()), non_blocking=True)
        return b

    # ---- capture -------------------------------------------------------------------------------------------------

    def _buffers(self, size: int) -> Buffers:
        if size not in self.buffers:
            r = self.runner
            groups, device = len(r.worker.groups), r.device
            make = lambda *shape, dtype=torch.int64: torch.zeros(shape, dtype=dtype, device=device)  # noqa: E731
            slots = torch.full((size,), self.spare, dtype=torch.int64, device=device)
            meta = AttnMeta(
                slots=slots, cu_q=torch.arange(size + 1, dtype=torch.int32, device=device),
                q_len=torch.ones(size, dtype=torch.int32, device=device), kv_len=make(groups, size, dtype=torch.int32),
                position=make(size), row=torch.arange(size, device=device), table=r.state.table,
                slot_map=make(groups, size), block=r.wiring.block, decode_rows=size,
                host_q_len=np.ones(size, np.int32), host_kv_len=np.ones((groups, size), np.int32),
            )  # fmt: skip
            out = make(3, size, dtype=torch.int32)
            self.buffers[size] = Buffers(slots, make(size), out, meta, make(size), np.full(size, self.spare))
        return self.buffers[size]

    def _capture_forward(self, key: GraphKey) -> Captured:
        b, r = self._buffers(key.rows), self.runner
        b.meta.work, b.meta.host_kv_len[:] = {}, key.span

        def run() -> torch.Tensor:
            step.begin(b.slots, r.state, b.ids, b.meta.position, b.meta.kv_len, b.meta.slot_map, b.after)
            r.backend.plan(b.meta, key)
            return r.model.logits(r.model(StepTensors(b.ids, b.meta.position, b.meta)))

        self.forwards[key] = self._capture(b, run)
        return self.forwards[key]

    def _capture_sample(self, key: GraphKey, asked: tuple) -> Captured | None:
        b, r = self.buffers[key.rows], self.runner
        assert b.logits is not None
        logits = b.logits
        try:
            return self._capture(b, lambda: run_sample(r, b, logits, asked))
        except Exception as e:  # a plug-in that cannot be captured runs uncaptured
            note = f"sampling is not captured: {type(e).__name__}: {str(e).splitlines()[0][:200]}"
            if note not in self.notes:
                self.notes.append(note)
            return None

    def _capture(self, b: Buffers, run: Callable[[], Any]) -> Captured:
        """Run once by itself (kernels are compiled, scratch is taken), then record; on rows of the spare slot."""
        b.held[:] = self.spare
        b.slots.fill_(self.spare)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        captured = Captured(torch.cuda.CUDAGraph())
        with torch.cuda.graph(captured.graph, pool=self.pool, capture_error_mode="thread_local"):
            captured.result = run()
        return captured


def run_sample(r: Runner, b: Buffers, logits: torch.Tensor, asked: Sequence[Any]) -> tuple[torch.Tensor, ...] | None:
    """SAMPLE on the rows of ``b``: what ``Runner._sample`` does, without a look at the host.  Processors run on all rows
    if any row bound them: a graph-safe one does nothing where its columns hold their fill."""
    state = r.state
    *variants, wants_min, topk = asked
    active = [i for i, v in enumerate(variants[:-1]) if v >= 0]
    x = logits
    if active or wants_min or not r.sampler.any_dtype:
        x = logits.float()
    if topk >= 0 and x is logits:
        x = logits.clone()  # the log-probabilities are those of the model's own logits
    slots = b.slots
    rows = Rows(
        slots, b.after, state.prompt[slots], state.seed[slots], state.sample[slots], 0, state.tokens,
        state.tokens.shape[1] - 1,
    )  # fmt: skip
    if wants_min:
        sampling.suppress_stops(x, b.after, state.min_end[slots], state.stop_ids[slots])
    for i in active:
        rows.variant = variants[i]
        r.processors[i].apply(x, rows, state.processors[i].columns)
    peaks = draw.best_of_tiles(x)
    drawn = Draw(torch.zeros(len(slots), dtype=torch.int64, device=slots.device), peaks)
    rows.variant = variants[-1]
    r.sampler.draw(x, rows, state.processors[-1].columns, drawn)
    step.commit(slots, drawn.tokens, peaks, state, b.out, logits.shape[1])
    count = b.out[1]
    for i, processor in enumerate(r.processors):
        if variants[i] >= 0 and type(processor).commit is not Processor.commit:
            processor.commit(drawn.tokens[:, None], count, rows, state.processors[i].columns)
    return sampling.logprobs_of(logits.float(), drawn.tokens, topk) if topk >= 0 else None
