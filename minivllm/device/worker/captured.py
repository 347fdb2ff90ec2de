"""The parts of a captured step that differ from a step of separate launches (``step``).

begin   slots ──► ids, positions, lengths and cache places of rows with one token    (kernel; else ``step.read_rows``)
calls   A processor runs on all rows if at least one row uses it.  A graph-safe processor changes nothing in rows
        whose columns hold the fill values.  No call reads from the host.  An exception ends the capture.
commit  tokens ──► columns and result                                                (kernel; else ``step.accept``)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minivllm.core.interfaces.attention import AttnMeta
from minivllm.core.interfaces.model import StepTensors
from minivllm.core.interfaces.params import SamplingParams
from minivllm.core.interfaces.sampling import Draw, Rows, Sampler
from minivllm.device.kernels.mask import apply as apply_masks
from minivllm.device.kernels.peaks import best_of_tiles
from minivllm.device.kernels.step import begin, gather
from minivllm.device.kernels.step import commit as commit_columns

from . import sampling, step
from .calls import SampleCalls

if TYPE_CHECKING:
    from minivllm.core.interfaces.attention import GraphKey
    from minivllm.device.kernels.mask import DeviceMasks

    from .query_store import StepQueries
    from .runner import Runner
    from .state import DeviceState


class SampleOperations(NamedTuple):
    """The options of the draw of a step (processors, minimum tokens, log-probabilities, masks).  Each distinct value
    has a separate capture."""

    variants: tuple[int, ...]  # variant bits of each processor, the sampler last; -1 if no row uses it
    wants_min: bool  # whether at least one row has ``min_tokens``
    topk: int  # log-probabilities of the k likeliest tokens are returned; -1 means none
    late: bool  # whether at least one row has a token mask


class Drawn(NamedTuple):
    """The shape of a captured draw: its number of rows and its options."""

    rows: int
    operations: SampleOperations


def sampler_variants(sampler: Sampler) -> list[int]:
    """Return the variant bits of the sampler for greedy requests and for requests with a temperature, ascending."""
    prompt = np.zeros(1, np.int32)
    variants = set()
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature)
        row = sampler.bind_prompt(params, prompt)
        if row is not None:
            variants.add(row.variant)
    return sorted(variants)


def plain_draws(rows: Sequence[int], processors: int, variants: Sequence[int]) -> list[Drawn]:
    """Return the shapes of draws without processors for numbers of rows, the largest first.

    ``processors`` is the number of processors with the sampler, and ``variants`` are the sampler's variant bits."""
    unused = (-1,) * (processors - 1)
    operations = [SampleOperations((*unused, variant), False, -1, False) for variant in variants]
    descending = sorted(set(rows), reverse=True)
    return [Drawn(n, each) for n in descending for each in operations]


@dataclass
class Buffers:
    """The fixed tensors that all captures of B rows read and write."""

    slots: Tensor  # i64 [B] slot of each row that draws a token; the other rows have the spare slot
    hidden: Tensor  # [B, H] hidden states that a replay of the layers writes
    out: Tensor  # i32 [3, B] tokens, counts and flags that a replay of the draw writes
    host_slots: np.ndarray  # [B] copy of ``slots`` on the host


@dataclass
class Captured:
    """A captured graph, the tensors that a replay reads, and the tensors of its result."""

    graph: Any
    result: Any = None
    # i64 row table of a mixed step (see ``step.pack_rows``)
    rows: Tensor | None = None
    # tensors that the graph uses without having allocated them; it stores only their addresses, so they must stay alive
    keep: Any = None
    queries: StepQueries | None = None  # queries of a replay of a decode step, if a compressor reads them


def bounds(key: GraphKey, groups: int) -> step.HostLengths:
    """Return upper bounds of the lengths of rows, for all steps that can run in a capture of shape ``key``.

    A capture serves steps of many lengths, and only the device has the exact ones."""
    longest = 1 if key.kind == "decode" else key.tokens
    most = np.full(key.rows, longest, np.int32)
    kv_len = np.full((groups, key.rows), key.span, np.int32)
    return step.HostLengths(key.tokens, key.rows, most, kv_len)


def column_tensors(state: DeviceState, slots: Tensor, host: step.HostLengths) -> StepTensors:
    """Create the fixed tensors of a captured decode step for ``slots`` i64 [B]; ``read_columns`` fills them in each
    replay."""
    size = len(slots)
    groups = len(state.table)
    device = slots.device

    def make(*shape: int, dtype: torch.dtype = torch.int64, fill: int = 0) -> Tensor:
        return torch.full(shape, fill, dtype=dtype, device=device)

    ids = make(size)
    position = make(size)
    rotary = position if state.rope_first is None else make(size)
    cu_q = torch.arange(size + 1, dtype=torch.int32, device=device)
    row = torch.arange(size, device=device)
    q_len = make(size, dtype=torch.int32, fill=1)
    kv_len = make(groups, size, dtype=torch.int32)
    slot_map = make(groups, size)
    meta = AttnMeta(
        slots=slots,
        cu_q=cu_q,
        q_len=q_len,
        kv_len=kv_len,
        position=rotary,
        row=row,
        table=state.table,
        slot_map=slot_map,
        block=state.block,
        decode_rows=host.decode_rows,
        host_q_len=host.q_len,
        host_kv_len=host.kv_len,
    )
    return StepTensors(ids, position, meta)


def read_columns(state: DeviceState, static: StepTensors) -> StepTensors:
    """Fill the fixed tensors ``static`` of a decode step from the columns, and return the inputs of the model.

    Each row has one token, the newest of its slot.  Nothing is read from the host."""
    meta = static.meta
    begin(meta.slots, state, static.ids, static.position, meta.kv_len, meta.slot_map)
    if state.rope_first is not None:
        torch.add(static.position, state.rope_first[meta.slots], out=meta.position)
    states = step.states_of(state, meta)
    return StepTensors(static.ids, static.position, meta, states=states)


class CapturedCalls(SampleCalls):
    """The calls of processors and the sampler while a draw is captured.  Plug-ins run on all rows of ``b``, and their
    exceptions are raised."""

    def __init__(self, runner: Runner, b: Buffers, operations: SampleOperations, masks: DeviceMasks | None) -> None:
        super().__init__(runner.chain, operations.wants_min)
        self.runner = runner
        self.b = b
        self.operations = operations
        self.masks = masks if operations.late else None
        self.sampler = runner.sampler
        self.topk = operations.topk
        self.processed = runner.processed
        processors = operations.variants[:-1]
        written = operations.wants_min or max(processors, default=-1) >= 0
        self.float32 = written or not self.sampler.any_dtype
        self.changes = written or operations.late or not self.sampler.keeps_logits

    def bound(self, p: int) -> tuple[None, int] | None:
        variant = self.operations.variants[p]
        return None if variant < 0 else (None, variant)

    def sampler_variant(self) -> int:
        return self.operations.variants[-1]

    def blank(self, logits: Tensor) -> Tensor:
        return torch.empty(len(logits), dtype=torch.int64, device=logits.device)

    def guide(self, logits: Tensor) -> Tensor:
        """Return the logits unchanged, because steps with guides are not captured (``Graphs.sample_operations``)."""
        return logits

    def rows(self) -> Rows:
        """Return the rows of the draw; each draws the token behind the newest token of its slot."""
        state = self.state
        slots = self.b.slots
        columns = (state.known, state.prompt, state.seed, state.sample)
        position, prompt, seed, sample = gather(slots, columns)
        last = state.tokens.shape[1] - 1
        return Rows(slots, position, prompt, seed, sample, 0, state.tokens, last)

    def meet_host(self, logits: Tensor) -> None:
        if self.masks is not None:
            apply_masks(logits, self.masks.index[: len(logits)], self.masks.mask)

    def peaks(self, logits: Tensor) -> Tensor | None:
        """Return the largest logit of each tile of the vocabulary, f32 [B, tiles].

        Return None if the sampler does not change the logits.  ``accept`` then uses ``Draw.peaks`` of the sampler, or
        computes them."""
        return None if self.sampler.keeps_logits else best_of_tiles(logits)

    def accept(self, logits: Tensor, rows: Rows, drawn: Draw, peaks: Tensor | None) -> Tensor:
        state = self.state
        b = self.b
        if peaks is None:
            peaks = drawn.peaks
        if peaks is None:
            peaks = best_of_tiles(logits)
        commit_columns(b.slots, drawn.tokens, peaks, state, b.out, logits.shape[1])
        self.commit(drawn.tokens[:, None], b.out[1], rows)
        return drawn.tokens

    def score(self, logits: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        invariant = self.runner.wiring.batch_invariant
        return sampling.logprobs_of(logits, tokens, self.topk, fuse=True, batch_invariant=invariant)
