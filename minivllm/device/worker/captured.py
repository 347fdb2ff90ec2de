"""The parts of a step that a capture has in forms of its own: kernels for its two ends, plug-ins without a guard.

begin   slots ──► ids, positions, lengths, places of rows of one token      (``step.read_rows`` with tables)
calls   processors run on all rows if any row bound them: a graph-safe one does nothing where its columns hold
        their fill.  Nothing looks at the host, and what raises ends the capture
commit  tokens ──► columns and result                                       (``step.accept``)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minivllm.core.interfaces.attention import AttnMeta
from minivllm.core.interfaces.model import StepTensors
from minivllm.core.interfaces.sampling import Draw, Rows
from minivllm.device.kernels.mask import apply as apply_masks
from minivllm.device.kernels.peaks import best_of_tiles
from minivllm.device.kernels.step import begin, gather
from minivllm.device.kernels.step import commit as commit_columns

from . import sampling, step
from .calls import SampleCalls

if TYPE_CHECKING:
    from minivllm.core.interfaces.attention import GraphKey
    from minivllm.device.kernels.mask import DeviceMasks

    from .runner import Runner
    from .state import DeviceState


class Asked(NamedTuple):
    """What the rows of a step ask of SAMPLE; each kind has a capture of its own."""

    variants: tuple[int, ...]  # of each processor, the sampler last; -1: no row bound it
    wants_min: bool  # stop ids are forbidden to some row
    topk: int  # log-probabilities, as in ``StepPlan``
    late: bool  # some row has a mask


@dataclass
class Buffers:
    """What the captures of B rows share."""

    slots: Tensor  # i64 [B] of the rows that draw; the others are the spare slot
    hidden: Tensor  # [B, H] FORWARD's result
    out: Tensor  # i32 [3, B] tokens, counts, flags: SAMPLE's result
    host_slots: np.ndarray  # what ``slots`` holds, on the host


def bounds(key: GraphKey, groups: int) -> step.HostLengths:
    """Of any step that runs in the capture: only the device knows its lengths."""
    most = np.full(key.rows, 1 if key.kind == "decode" else key.tokens, np.int32)
    kv_len = np.full((groups, key.rows), key.span, np.int32)
    return step.HostLengths(key.tokens, key.rows, most, kv_len)


def column_tensors(state: DeviceState, slots: Tensor, host: step.HostLengths) -> StepTensors:
    """Static tensors of a decode step of ``slots`` i64 [B], as ``read_columns`` fills them."""
    size, groups, device = len(slots), len(state.table), slots.device
    make = lambda *shape, dtype=torch.int64: torch.zeros(shape, dtype=dtype, device=device)  # noqa: E731
    ids, position = make(size), make(size)
    meta = AttnMeta(
        slots=slots,
        cu_q=torch.arange(size + 1, dtype=torch.int32, device=device),
        q_len=make(size, dtype=torch.int32) + 1,
        kv_len=make(groups, size, dtype=torch.int32),
        position=position if state.rope_first is None else make(size),
        row=torch.arange(size, device=device),
        table=state.table,
        slot_map=make(groups, size),
        block=state.block,
        decode_rows=host.decode_rows,
        host_q_len=host.q_len,
        host_kv_len=host.kv_len,
    )
    return StepTensors(ids, position, meta)


def read_columns(state: DeviceState, static: StepTensors) -> StepTensors:
    """What a model is called with: the newest token of each slot, read from the columns alone."""
    meta = static.meta
    begin(meta.slots, state, static.ids, static.position, meta.kv_len, meta.slot_map)
    if state.rope_first is not None:
        torch.add(static.position, state.rope_first[meta.slots], out=meta.position)
    return StepTensors(static.ids, static.position, meta, states=step.states_of(state, meta))


class CapturedCalls(SampleCalls):
    """Over all rows of ``b``, straight."""

    def __init__(self, runner: Runner, b: Buffers, asked: Asked, masks: DeviceMasks | None) -> None:
        super().__init__(runner.chain, asked.wants_min)
        self.runner, self.b, self.asked = runner, b, asked
        self.masks, self.sampler = masks if asked.late else None, runner.sampler
        self.topk, self.processed = asked.topk, runner.processed
        written = asked.wants_min or max(asked.variants[:-1], default=-1) >= 0
        self.float32 = written or not self.sampler.any_dtype
        self.changes = written or asked.late or not self.sampler.keeps_logits

    def bound(self, p: int) -> tuple[None, int] | None:
        variant = self.asked.variants[p]
        return None if variant < 0 else (None, variant)

    def sampler_variant(self) -> int:
        return self.asked.variants[-1]

    def blank(self, logits: Tensor) -> Tensor:
        return torch.empty(len(logits), dtype=torch.int64, device=logits.device)

    def guide(self, logits: Tensor) -> Tensor:
        """A step with guides is drawn as separate launches."""
        return logits

    def rows(self) -> Rows:
        """Each behind its newest token."""
        state, slots = self.state, self.b.slots
        columns = gather(slots, (state.known, state.prompt, state.seed, state.sample))
        return Rows(slots, *columns, 0, state.tokens, state.tokens.shape[1] - 1)

    def meet_host(self, logits: Tensor) -> None:
        if self.masks is not None:
            apply_masks(logits, self.masks.index[: len(logits)], self.masks.mask)

    def peaks(self, logits: Tensor) -> Tensor | None:
        """f32 [B, tiles]; None if the sampler leaves the logits as they are, and may bring its own."""
        return None if self.sampler.keeps_logits else best_of_tiles(logits)

    def accept(self, logits: Tensor, rows: Rows, drawn: Draw, peaks: Tensor | None) -> Tensor:
        state, b = self.state, self.b
        if peaks is None:
            peaks = drawn.peaks if drawn.peaks is not None else best_of_tiles(logits)
        commit_columns(b.slots, drawn.tokens, peaks, state, b.out, logits.shape[1])
        self.commit(drawn.tokens[:, None], b.out[1], rows)
        return drawn.tokens

    def score(self, logits: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        invariant = self.runner.wiring.batch_invariant
        return sampling.logprobs_of(logits, tokens, self.topk, fuse=True, batch_invariant=invariant)
