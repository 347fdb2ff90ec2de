"""Per-sequence columns on the host: a running sequence keeps one row until it ends or is preempted.

    slot        0     1     2     3   ...  S-1
    seq         A     -     B     C         -        list of Seq or None
    known       17    .     230   64        .        tokens known, or promised by steps in flight
    computed    16    .     128   63        .        tokens whose KV is written, or will be by steps in flight
    collected   15    .     200   64        .        tokens whose ids the host has seen

A decode step touches these arrays with a handful of numpy operations, however many sequences there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minivllm.core.interfaces.scheduler import ABSENT

from .admission import LazyView, session_column

if TYPE_CHECKING:
    from minivllm.core.interfaces.scheduler import QueueView

    from .request import Seq

NEVER = np.iinfo(np.int32).max  # in ``compress_at``


class Slots:
    """The columns of S slots: one array per quantity, with an element per running sequence.

    Invariants: a slot in ``running`` has a Seq; ``computed <= known <= end``; ``collected <= known``; the blocks of a
    sequence are ``table[g, slot, :blocks[g, slot]]`` for KV group g (null blocks before a sliding window), with zeros
    behind them."""

    def __init__(self, size: int, max_len: int, groups: int, block: int) -> None:
        self.size = size
        self.block = block
        self.seq: list[Seq | None] = [None] * size
        self.free = list(range(size - 1, -1, -1))
        # slots that sequences have left since the last plan; they are not used again before the
        # next one, because the changes of a step must not contain two sequences of a slot
        self.cooling: list[int] = []
        # slots of the running sequences in the order of admission; intp, because numpy indexes five
        # times as fast with it
        self.running = np.empty(0, np.intp)
        self.next_serial = 0
        # count of the changes of rows; while it stays equal, the next step differs from the last
        # one only in its tokens
        self.changes = 0
        # serial number of the sequence's stay in the slot, -1 if the slot is free
        self.serial = np.full(size, -1, np.int64)
        self.step = np.zeros(size, np.int64)  # id of the last step that contains the sequence
        self.published = 0  # id of the last step whose result was processed
        self.asking = 0  # rows with ``prompt_topk``
        # count of rows with a token mask, with a token choice on the host, or with
        # log-probabilities
        self.special = 0
        self.watched = 0  # rows with ``watch``
        self.timed = 0  # rows with ``tpot``
        # count of rows that are a guide (a row that steers the sampling of another one) or have one
        self.paired = 0
        self.tapping = 0  # rows with taps
        self.pooling = 0  # rows with ``pooled``
        self._add_request_columns(size, max_len)
        self._add_flags(size)
        self._add_cache_columns(groups, size, -(-max_len // block) + 1)

    def _add_request_columns(self, size: int, max_len: int) -> None:
        """Add the columns of the requests and their tokens: ``size`` rows of up to ``max_len`` tokens."""
        self.id, self.stream = np.zeros((2, size), np.int64)
        self.arrival, self.ttft_due, self.tpot_due, self.tpot = np.full(
            (4, size), np.inf
        )  # seconds
        self.prompt, self.known, self.computed, self.collected = np.zeros((4, size), np.int32)
        self.end, self.priority, self.tenant, self.preempted = np.zeros((4, size), np.int32)
        self.expected, self.sample = np.zeros((2, size), np.int32)
        # number of tokens up to which a row may compute: ``known``, or one less than the prompt
        # until branches fork
        self.schedulable = np.zeros(size, np.int32)
        self.topk = np.full(size, -1, np.int32)
        # how many of the best log-probabilities of each prompt token are still to be returned; -1
        # means none
        self.prompt_topk = np.full(size, -1, np.int32)
        # number that stands for the owner of the row's request; 0 without an owner (see ``owners``)
        self.owner_number = np.zeros(size, np.int32)
        # prompt length plus the count of generated tokens that were sent to the client
        self.emitted = np.zeros(size, np.int32)
        # slot of the row's guide, or of the row that it guides, or -1 (see ``guides``)
        self.partner = np.zeros(size, np.int32)
        # number of computed tokens at which the row is compressed next
        self.compress_at = np.zeros(size, np.int32)
        self.scale = np.zeros(size, np.float32)  # of the guide
        # index of the LoRA adapter on the device; -1 without one
        self.adapter = np.full(size, -1, np.int32)
        self.tokens = np.zeros((size, max_len + 1), np.int32)
        # drafts in flight, by which ``known`` and ``computed`` may be too large, and the count of
        # rejected drafts since the row entered its slot
        self.slack, self.rejected = np.zeros((2, size), np.int32)
        # counts of checked and of accepted drafts since the row entered its slot
        self.drafts = np.zeros((2, size), np.int64)

    def _add_flags(self, size: int) -> None:
        """Add the columns of booleans: one element for each of ``size`` rows."""
        # whether the row may not draw yet, because its branches must fork or its guide is not ready
        self.forking = np.zeros(size, bool)
        # whether the row may be in the next step; False if its last token must be collected first
        self.ready = np.ones(size, bool)
        # whether the row has a token mask, and whether the host chooses its tokens
        self.late, self.host = np.zeros((2, size), bool)
        # whether the row belongs to a beam search, which decides after each step (see ``beams``)
        self.beam = np.zeros(size, bool)
        # whether steps may have draft tokens of the row
        self.speculates = np.zeros(size, bool)
        # whether a client receives each token as soon as it is drawn
        self.watch = np.zeros(size, bool)
        # whether log-probabilities of the row's tokens are returned
        self.scored = np.zeros(size, bool)
        # whether the row has a guide (another row that steers its sampling)
        self.leads = np.zeros(size, bool)
        # whether the request reads or changes tensors of the model
        self.tapped = np.zeros(size, bool)
        # whether the request is for an embedding: it pools hidden states and draws no token
        self.pooled = np.zeros(size, bool)

    def _add_cache_columns(self, groups: int, size: int, blocks: int) -> None:
        """Add the columns of the KV cache: for ``size`` rows, block tables of ``blocks`` entries in each KV group."""
        # count of the row's first blocks that entered the prefix cache
        self.prefix_published = np.zeros(size, np.int32)
        self.blocks = np.zeros((groups, size), np.int32)
        # count of the row's first blocks that were released, because they lie before a sliding
        # window
        self.trimmed = np.zeros((groups, size), np.int32)
        # count of computed tokens that compressions have removed from the KV cache
        self.dropped = np.zeros((groups, size), np.int32)
        self.table = np.zeros((groups, size, blocks), np.int32)

    @property
    def n_running(self) -> int:
        """Return the count of running sequences, without guides."""
        return len(self.running) - self.paired // 2

    def enter(self, seq: Seq) -> int:
        """Move a sequence into a free slot, set all its columns, and return the slot."""
        slot = self.free.pop()
        r = seq.request
        seq.slot = slot
        seq.serial = self.next_serial
        self.next_serial += 1
        self.changes += 1
        self.seq[slot] = seq
        self.serial[slot] = seq.serial
        self.step[slot] = 0
        self.slack[slot] = self.rejected[slot] = 0
        self.id[slot] = seq.id
        self.stream[slot] = r.stream
        n = seq.known
        self._enter_request(slot, seq)
        self._enter_flags(slot, seq)
        self.tokens[slot, :n] = seq.tokens[:n]
        self.asking += int(self.prompt_topk[slot] >= 0)
        self.special += bool(self.late[slot] or self.host[slot] or self.scored[slot])
        self.watched += int(self.watch[slot])
        self.timed += int(self.tpot[slot] < np.inf)
        self.tapping += int(self.tapped[slot])
        self.pooling += int(self.pooled[slot])
        self.adapter[slot] = -1 if r.adapter is None else r.adapter.place
        self.prefix_published[slot] = self.blocks[:, slot] = 0
        self.trimmed[:, slot] = self.dropped[:, slot] = 0
        self.running = np.concatenate((self.running, np.array((slot,), np.intp)))
        return slot

    def _enter_request(self, slot: int, seq: Seq) -> None:
        """Set the columns of a row that depend on its request and on its known tokens."""
        r = seq.request
        p = r.params
        n = seq.known
        prompt = len(r.prompt)
        self.arrival[slot] = r.arrival
        self.ttft_due[slot] = np.inf if p.ttft_ms is None else r.arrival + p.ttft_ms / 1e3
        self.tpot_due[slot] = np.inf
        self.tpot[slot] = np.inf if p.tpot_ms is None else p.tpot_ms / 1e3
        self.prompt[slot] = prompt
        self.known[slot] = self.collected[slot] = self.schedulable[slot] = n
        self.computed[slot] = 0
        self.end[slot] = r.end
        self.priority[slot] = p.priority
        self.tenant[slot] = r.tenant
        self.owner_number[slot] = r.owner_number
        self.preempted[slot] = seq.preempted
        self.expected[slot] = r.expected
        self.topk[slot] = r.topk
        self.prompt_topk[slot] = r.prompt_topk
        self.emitted[slot] = prompt + seq.emitted
        self.sample[slot] = seq.sample
        self.partner[slot] = -1
        regular = r.first_compression if r.keep else NEVER
        self.compress_at[slot] = min([regular, *seq.compressions])

    def _enter_flags(self, slot: int, seq: Seq) -> None:
        """Set the columns of booleans of a row that has entered a slot."""
        r = seq.request
        beam = r.beams is not None
        host = seq.choose is not None or beam
        self.forking[slot] = self.leads[slot] = False
        self.ready[slot] = True
        self.late[slot] = seq.masked
        self.host[slot] = host
        self.beam[slot] = beam
        self.speculates[slot] = r.speculates and not host
        self.watch[slot] = bool(r.watch) or host
        self.scored[slot] = r.topk >= 0
        self.tapped[slot] = r.tapped is not None
        self.pooled[slot] = r.pooling is not None

    def at(self, slot: int) -> Seq:
        """Return the sequence in a slot, which must not be free."""
        seq = self.seq[slot]
        assert seq is not None, f"row {slot} is free"
        return seq

    def least_computed(self, slots: np.ndarray) -> np.ndarray:
        """Return how many tokens of each row are computed at least, i32 [n], if all its drafts in flight are
        rejected."""
        return self.computed[slots] - self.slack[slots]

    def leave(self, slot: int) -> None:
        """Free a slot.  The tokens that the host has received are copied to the sequence.  The caller has released its
        blocks."""
        seq = self.at(slot)
        self.changes += 1
        self.asking -= int(self.prompt_topk[slot] >= 0)
        self.special -= bool(self.late[slot] or self.host[slot] or self.scored[slot])
        self.watched -= int(self.watch[slot])
        self.timed -= int(self.tpot[slot] < np.inf)
        self.paired -= int(self.partner[slot] >= 0)
        self.tapping -= int(self.tapped[slot])
        self.pooling -= int(self.pooled[slot])
        if self.drafts[0, slot]:
            self._count_drafts(slot, seq)
        n = int(self.collected[slot])
        seq.tokens = self.tokens[slot, :n].copy()
        seq.known = n
        seq.slot = -1
        if seq.tap_values is not None:
            seq.tap_values.upto = max(seq.tap_values.upto, int(self.computed[slot]))
        last = int(self.step[slot])
        seq.in_flight = last if last > self.published else 0
        seq.emitted = int(self.emitted[slot] - self.prompt[slot])
        self.seq[slot] = None
        self.serial[slot] = -1
        longest = int(self.blocks[:, slot].max(initial=0))
        self.table[:, slot, :longest] = 0
        self.blocks[:, slot] = 0
        self.running = self.running[self.running != slot]
        self.cooling.append(slot)

    def _count_drafts(self, slot: int, seq: Seq) -> None:
        """Add the counts of a row's drafts to those of its request, and set them to 0."""
        drafted, accepted = self.drafts[:, slot].tolist()
        seq.request.drafted += drafted
        seq.request.accepted += accepted
        self.drafts[:, slot] = 0

    def view(self, slots: np.ndarray) -> QueueView:
        """Return the columns of the sequences in these slots for a scheduling policy.  Each column is computed when it
        is first read."""

        def column(name: str) -> np.ndarray:
            if name in ("cached", "aborted"):
                return np.zeros(len(slots), np.int32)
            if name == "predicted_out":
                return self.expected[slots]
            if name == "blocks":
                return self.blocks[:, slots].sum(axis=0)
            if name == "max_out" or name in ABSENT:
                seqs = [self.at(slot) for slot in slots.tolist()]
                if name in ABSENT:
                    return session_column(seqs, name)
                return np.array([seq.request.most_out for seq in seqs], np.int32)
            return getattr(self, name)[slots]

        return LazyView(len(slots), column)
