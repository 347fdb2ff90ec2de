"""Columns with a value for each slot (place of a running sequence) on the device, and the changes that the host sends.

The device stores the state of each running sequence: its tokens, its length, and whether it has ended.  The host sends
only changes that the device cannot compute itself (see ``plan.Delta``).

    slot         0      1      2    ...  S-1        S = max_num_seqs, L = max_model_len
    tokens     [ids..][ids..][ids..]                i32 [S, L + 1]
    known        17     0      230                  i64 [S] valid tokens in ``tokens``
    stopped      0      1      0                    the sequence has ended; steps already queued skip the slot
    table      [b, b ][     ][b, b..]               i32 [G, S, M] blocks
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from minivllm.core.interfaces.plan import NO_CHANGE, STOP_IDS, Delta, Join

if TYPE_CHECKING:
    from minivllm.core.interfaces.sampling import Processor

    from .recurrent import StateMemory


Caches = Sequence[Sequence[Mapping[str, Tensor]]]  # KV group -> layer of the group -> cache tensors by name
# columns with one number for each slot; ``Join`` has a field of the same name for each
NUMBERS = ("known", "prompt", "end", "min_end", "seed", "sample", "n_eos")
# smallest size in bytes of host arrays that are pinned: CUDA passes smaller arrays with the call of the copy, and lets
# the host wait for the copy of a larger array that is not pinned
PINNED_FROM = 16 << 10
# sizes in bytes of the pinned arrays that are allocated at the start, and their number for each size: three steps can
# be queued
AHEAD_SIZES = tuple(1 << n for n in range(23))
AHEAD_EACH = 3


def staged(array: np.ndarray, device: torch.device) -> Tensor:
    """Return the array as a host tensor whose copy to the device does not block the host (pinned if it is large)."""
    contiguous = np.ascontiguousarray(array)
    tensor = torch.from_numpy(contiguous)
    large = array.nbytes >= PINNED_FROM
    if large and device.type == "cuda":
        return tensor.pin_memory()
    return tensor


def pin_ahead(device: torch.device) -> None:
    """Allocate pinned memory for the copies of steps to and from a GPU, which torch then keeps for later arrays.

    CUDA waits for all queued steps when it allocates pinned memory, so the first steps of new sizes would not run ahead
    of the host.  torch rounds sizes up to powers of two."""
    if device.type != "cuda":
        return
    made = []
    for size in AHEAD_SIZES:
        for _ in range(AHEAD_EACH):
            pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            made.append(pinned)
    made.clear()


def to_host(tensor: Tensor) -> Tensor:
    """Start the copy of a tensor to pinned host memory, and return the copy.  A CPU tensor is returned unchanged."""
    if tensor.device.type == "cpu":
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


def _index(array: np.ndarray, device: torch.device) -> Tensor:
    wide = array.astype(np.int64)
    return staged(wide, device).to(device, non_blocking=True)


class ProcessorState:
    """The columns of one processor on the device; on the host also the slots that use it, and their variant bits.

    ``active`` bool [slots] is the memory that marks the slots with the processor; None allocates it."""

    def __init__(
        self, processor: Processor, slots: int, device: torch.device, active: np.ndarray | None = None
    ) -> None:
        self.specs = dict(processor.columns())
        self.kept = [name for name, spec in self.specs.items() if spec.kept]
        self.device = device
        self.columns: dict[str, Tensor] = {}
        for name, column in self.specs.items():
            shape = (slots, *column.shape)
            dtype = getattr(torch, column.dtype)
            self.columns[name] = torch.full(shape, column.fill, dtype=dtype, device=device)
        if active is None:
            active = np.zeros(slots, bool)
        self.active = active
        self.variant = np.zeros(slots, np.int64)

    def join(self, slots: np.ndarray, at: Tensor, rows: Mapping[int, Any]) -> None:
        """Set the processor's columns for new sequences in ``slots`` i32 [n]; ``at`` i64 [n] are the slots on the
        device.

        ``rows`` maps an index into ``slots`` to the ``Row`` (column values) of a sequence that uses the processor.  The
        columns of the other sequences get their fill values."""
        self.active[slots] = False
        self.variant[slots] = 0
        for name, spec in self.specs.items():
            self.columns[name].index_fill_(0, at, spec.fill)
        if not rows:
            return
        index = np.fromiter(rows, np.int64, len(rows))
        used = slots[index]
        self.active[used] = True
        self.variant[used] = [row.variant for row in rows.values()]
        for name, spec in self.specs.items():
            having = {i: row.values[name] for i, row in rows.items() if name in row.values}
            if not having:
                continue
            column = self.columns[name]
            where = _index(slots[list(having)], self.device)
            arrays = [np.asarray(value) for value in having.values()]
            stacked = torch.as_tensor(np.stack(arrays))
            values = stacked.to(column.dtype).reshape(len(having), *spec.shape)
            column[where] = values.to(column.device, non_blocking=True)

    def save(self, slot: int) -> list[Tensor]:
        """Return copies of a slot's values in the columns that are kept across a preemption (``Column.kept``)."""
        return [self.columns[name][slot].clone() for name in self.kept]

    def restore(self, slot: int, saved: Sequence[Tensor]) -> None:
        for name, values in zip(self.kept, saved, strict=True):
            self.columns[name][slot].copy_(values)

    def fork(self, source: np.ndarray, to: np.ndarray) -> None:
        self.active[to] = self.active[source]
        self.variant[to] = self.variant[source]
        a = _index(source, self.device)
        b = _index(to, self.device)
        for column in self.columns.values():
            column[b] = column[a]


class DeviceState:
    """The columns of one device: tensors with a value for each slot, such as tokens and lengths of the sequences.

    No method waits for the device.  ``column[index] = 0`` would copy the number from the host after all queued work.
    ``index_fill_`` passes the number with the kernel launch, so it is used instead."""

    def __init__(
        self,
        slots: int,
        max_len: int,
        groups: int,
        block: int,
        device: torch.device,
        rope_switch: int | None = None,
        compresses: bool = False,
        offsets: bool = False,
    ) -> None:

        def make(*shape: int, dtype: torch.dtype = torch.int64, fill: int = 0) -> Tensor:
            return torch.full(shape, fill, dtype=dtype, device=device)

        self.device = device
        self.block = block
        i32 = torch.int32
        self.tokens = make(slots, max_len + 1, dtype=i32)
        # A model may have two tables of rotary embeddings, stored one after the other.  ``rope_first`` is the row at
        # which the table of a slot begins: a sequence that may become longer than ``rope_switch`` uses the second.
        # With ``offsets`` it is instead the offset of the positions behind the images of a slot, or of the positions
        # behind a compression that rotates keys to new positions.
        self.rope_switch = rope_switch
        self.rope_rows = max_len + 1
        self.rope_first: Tensor | None = None
        if offsets or rope_switch is not None:
            self.rope_first = make(slots)
        # one tensor, so that a join needs one copy; each column begins at a multiple of 128 bytes
        padded = -(-slots // 16) * 16
        numbers = make(len(NUMBERS), padded)
        self.numbers = numbers[:, :slots]
        self.known, self.prompt, self.end, self.min_end, self.seed, self.sample, self.n_eos = self.numbers
        self.stop_ids = make(slots, STOP_IDS, dtype=i32, fill=-1)
        self.stopped = make(slots, dtype=torch.bool, fill=True)
        blocks = -(-max_len // block) + 1
        self.table = make(groups, slots, blocks, dtype=i32)
        # i64 [G, S] number of a slot's tokens that compressions removed from the KV cache of each group, on the device
        # and on the host; None without a compressor
        self.dropped = make(groups, slots) if compresses else None
        self.dropped_host = np.zeros((groups, slots), np.int64)
        self.wants_min = np.zeros(slots, bool)  # on the host: whether the request in a slot has ``min_tokens``
        self.processors: list[ProcessorState] = []
        self.active = np.zeros((0, slots), bool)  # [processor, slot] whether the slot uses it, the sampler last
        self.recurrent: StateMemory | None = None  # states of recurrent layers; None for a model without such layers
        # id of a sequence -> columns of each processor that were saved at its last preemption
        self.saved: dict[int, list[list[Tensor]]] = {}

    def to(self, array: np.ndarray) -> Tensor:
        return staged(array, self.device).to(self.device, non_blocking=True)

    def apply(self, delta: Delta, caches: Caches) -> None:
        """Apply the changes ``delta`` of a step to the columns, block tables and caches, except ``delta.token``.

        ``Runner`` applies ``delta.token``, because the processors must see these tokens.  ``caches[g]`` holds the cache
        tensors of the layers of group g."""
        if delta is NO_CHANGE:
            return
        recurrent = self.recurrent
        for slot, seq in delta.keep.tolist():
            self.saved[seq] = [p.save(slot) for p in self.processors]
        if len(delta.leave):
            left = self.to(delta.leave).long()
            self.stopped.index_fill_(0, left, True)
        if recurrent is not None and len(delta.state):
            source, to = self.to(delta.state.T).long()
            recurrent.copy(source, to)
        if delta.join is not None:
            self._join(delta.join, delta.state[:, 1])
        if len(delta.fork):
            self._fork(delta.fork)
        if recurrent is not None and len(delta.save):
            columns = self.to(delta.save.T).long()
            recurrent.save(*columns)
        if len(delta.table):
            changes = self.to(delta.table.T)
            group, slot, column, block = changes.long()
            self.table[group, slot, column] = block.int()
        for group, slot, first, count in delta.trim.tolist():
            end = first + count
            self.table[group, slot, first:end] = 0
        if len(delta.copy):
            self._copy_blocks(delta.copy, caches)
        for seq in delta.forget.tolist():
            self.saved.pop(seq, None)

    def _copy_blocks(self, copies: np.ndarray, caches: Caches) -> None:
        """Copy blocks of the KV cache.  ``copies`` [n, 3] has the group, the source and the target of each block."""
        groups = copies[:, 0]
        for g in np.unique(groups).tolist():
            rows = copies[groups == g]
            source = self.to(rows[:, 1]).long()
            to = self.to(rows[:, 2]).long()
            for layer in caches[g]:
                for tensor in layer.values():
                    tensor[to] = tensor[source]

    def stored(self, slots: Tensor, tokens: Tensor) -> Tensor:
        """Return the numbers i64 [G, N] of tokens in the KV cache of each group, for ``slots`` i64 [N] with ``tokens``
        i64 [N] computed tokens.  The numbers are smaller than ``tokens`` for rows that were compressed."""
        assert self.dropped is not None
        return tokens - self.dropped[:, slots]

    def rope_position(self, slots: Tensor, position: Tensor) -> Tensor:
        """Return the rows i64 [T] of the rotary embedding tables for ``position`` i64 [T] of ``slots`` i64 [T]."""
        if self.rope_first is None:
            return position
        return position + self.rope_first[slots]

    def restore(self, join: Join | None) -> None:
        """Copy the saved processor columns of preempted sequences back when these join again.

        The caller has reported the accepted tokens to the processors before.  ``join`` None means that no sequence
        joins."""
        if join is None:
            return
        sequences = join.saved.tolist()
        for slot, seq in zip(join.slot.tolist(), sequences, strict=False):
            if seq < 0:
                continue
            saved = self.saved[seq]
            for processor, values in zip(self.processors, saved, strict=False):
                processor.restore(slot, values)

    def _join(self, j: Join, with_states: np.ndarray) -> None:
        """Fill the columns of the slots of sequences that join.

        ``with_states`` [n] are the slots whose recurrent states were just copied; the states of the other slots are
        emptied."""
        at = self.to(j.slot).long()
        self._write_tokens(j)
        numbers = [getattr(j, name) for name in NUMBERS]
        self.numbers[:, at] = self.to(np.stack(numbers))
        if self.rope_first is not None and self.rope_switch is None:
            self.rope_first.index_fill_(0, at, 0)  # ``ImageState`` later sets the offsets of rows with images
        elif self.rope_first is not None:
            # the last token of a sequence is never computed, so a sequence of ``end`` tokens has end - 1 positions
            longer = j.end - 1 > self.rope_switch
            first_rows = self.to(longer * self.rope_rows)
            self.rope_first[at] = first_rows.long()
        if self.dropped is not None:
            self.dropped[:, at] = 0
            self.dropped_host[:, j.slot] = 0
        self.stop_ids[at] = self.to(j.stop_ids)
        self.stopped.index_fill_(0, at, False)
        if self.recurrent is not None:
            copied = np.isin(j.slot, with_states)
            without = self.to(j.slot[~copied])
            self.recurrent.begin(at, without.long())
        self.wants_min[j.slot] = j.min_end > j.prompt
        for state, bound in zip(self.processors, j.bound, strict=True):
            state.join(j.slot, at, bound)

    def _write_tokens(self, j: Join) -> None:
        """Write the known tokens of sequences that join to the columns of their slots."""
        slots = j.slot.astype(np.int64)
        slot_of = np.repeat(slots, j.known)
        firsts = np.cumsum(j.known) - j.known
        first_of = np.repeat(firsts, j.known)
        index = np.arange(len(slot_of)) - first_of
        packed = np.stack([slot_of, index, j.tokens])
        rows, columns, tokens = self.to(packed)
        self.tokens[rows, columns] = tokens.int()

    def _fork(self, fork: np.ndarray) -> None:
        source = fork[:, 0].astype(np.int64)
        to = fork[:, 1].astype(np.int64)
        a = self.to(source)
        b = self.to(to)
        self.numbers[:, b] = self.numbers[:, a]
        for column in (self.tokens, self.stop_ids):
            column[b] = column[a]
        if self.rope_first is not None:
            self.rope_first[b] = self.rope_first[a]
        if self.dropped is not None:
            self.dropped[:, b] = self.dropped[:, a]
            self.dropped_host[:, to] = self.dropped_host[:, source]
        # The fork goes on, although its source may be marked as stopped because it was preempted in the same delta.
        self.stopped.index_fill_(0, b, False)
        samples = self.to(fork[:, 2])
        self.sample[b] = samples.long()
        self.wants_min[to] = self.wants_min[source]
        for state in self.processors:
            state.fork(source, to)
