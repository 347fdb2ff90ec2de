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
    """Columns of S rows.  Invariants: a row in ``running`` has a Seq; ``computed <= known <= end``; ``collected <=
    known``; the blocks of a row are ``table[g, slot, :blocks[g, slot]]`` (null where trimmed), with zeros behind
    them."""

    def __init__(self, size: int, max_len: int, groups: int, block: int) -> None:
        self.size, self.block = size, block
        self.seq: list[Seq | None] = [None] * size
        self.free = list(range(size - 1, -1, -1))
        # slots left since the last plan; not reused yet, because a delta must not contain two sequences of a slot
        self.cooling: list[int] = []
        # slots in order of admission; intp, because numpy indexes five times as fast with it
        self.running = np.empty(0, np.intp)
        self.next_serial = 0
        # number of changes after which the next step differs from the last one in more than its tokens
        self.changes = 0
        self.serial = np.full(size, -1, np.int64)  # stamp of the present stay
        self.step = np.zeros(size, np.int64)  # id of the last step that contains the row
        self.published = 0  # id of the last step whose result is in the columns
        self.id, self.stream = np.zeros((2, size), np.int64)
        # Columns of one type are rows of one table, so that ``enter`` sets them all at once.
        self._times = np.full((4, size), np.inf)
        self.arrival, self.ttft_due, self.tpot_due, self.tpot = self._times  # seconds
        self._ints = np.zeros((17, size), np.int32)
        self.prompt, self.known, self.computed, self.collected, self.end = self._ints[:5]
        self.priority, self.tenant, self.preempted, self.expected = self._ints[5:9]
        self.schedulable = self._ints[
            9
        ]  # tokens to compute: ``known``, or prompt - 1 before a fork
        self.topk = self._ints[10]
        # log-probabilities per prompt token still to collect; -1 = none
        self.prompt_topk = self._ints[11]
        self.owner_number = self._ints[14]  # number of the request's owner (see ``owners``)
        self.emitted = self._ints[12]  # tokens sent to the sink, including the prompt's
        self.sample = self._ints[13]
        self.partner = self._ints[15]  # slot of the row's guide or lead (see ``guides``), or -1
        self.compress_at = self._ints[16]  # computed tokens at the next compression
        self._flags = np.zeros((11, size), bool)
        self.forking = self._flags[0]  # whether the row waits for branches, or for its partner
        # False means that the row is not planned until its last token is collected
        self.ready = self._flags[1]
        self.late, self.host = self._flags[2:4]
        # rows of a stepwise strategy, which wait for its decision after each step (see ``beams``)
        self.beam = self._flags[4]
        self.speculates = self._flags[5]  # whether steps of the row may have drafts
        self.watch = self._flags[6]  # whether a client receives each token as soon as it is drawn
        self.scored = self._flags[7]  # the request returns log-probabilities
        self.leads = self._flags[8]  # whether the row's partner is its guide
        self.tapped = self._flags[9]  # whether the request has taps
        self.pooled = self._flags[10]  # whether the request pools hidden states and draws no token
        self.scale = np.zeros(size, np.float32)  # of the guide
        self.adapter = np.full(size, -1, np.int32)  # place on the device; -1 = none
        self.topk[:], self.prompt_topk[:], self.ready[:] = -1, -1, True
        self.asking = 0  # rows with ``prompt_topk``
        self.special = 0  # rows that are late (have a token mask), host or scored
        self.watched = 0  # rows with ``watch``
        self.timed = 0  # rows with ``tpot``
        self.paired = 0  # rows with a partner
        self.tapping = 0  # rows with taps
        self.pooling = 0  # rows with ``pooled``
        self.tokens = np.zeros((size, max_len + 1), np.int32)
        # tokens by which known and computed may be too large, and rejected drafts since the row entered its slot
        self.slack, self.rejected = np.zeros((2, size), np.int32)
        self.drafts = np.zeros((2, size), np.int64)  # checked and accepted drafts of this stay
        self._add_cache_columns(groups, size, -(-max_len // block) + 1)

    def _add_cache_columns(self, groups: int, size: int, blocks: int) -> None:
        """Add the columns of the KV cache, of ``size`` rows with tables of ``blocks`` blocks."""
        self.prefix_published = np.zeros(size, np.int32)  # blocks published in the prefix index
        self.blocks = np.zeros((groups, size), np.int32)
        # leading blocks released (sliding window)
        self.trimmed = np.zeros((groups, size), np.int32)
        # computed tokens that compressions have removed from the KV cache
        self.dropped = np.zeros((groups, size), np.int32)
        self.table = np.zeros((groups, size, blocks), np.int32)

    @property
    def n_running(self) -> int:
        """Count the running sequences of requests, without their guides."""
        return len(self.running) - self.paired // 2

    def enter(self, seq: Seq) -> int:
        """Move a sequence into a free slot, set all its columns, and return the slot."""
        slot = self.free.pop()
        r, p = seq.request, seq.request.params
        seq.slot, seq.serial = slot, self.next_serial
        self.next_serial += 1
        self.changes += 1
        self.seq[slot] = seq
        self.serial[slot], self.step[slot] = seq.serial, 0
        self.slack[slot] = self.rejected[slot] = 0
        self.id[slot], self.stream[slot] = seq.id, r.stream
        n, at, beam = seq.known, r.arrival, r.beams is not None
        host = seq.choose is not None or beam
        late = p.allowed_tokens_fn is not None or r.grammar is not None
        due = np.inf if p.ttft_ms is None else at + p.ttft_ms / 1e3
        self._times[:, slot] = at, due, np.inf, np.inf if p.tpot_ms is None else p.tpot_ms / 1e3
        self._ints[:, slot] = (
            len(r.prompt),
            n,
            0,
            n,
            r.end,
            p.priority,
            r.tenant,
            seq.preempted,
            r.expected,
            n,
            r.topk,
            r.prompt_topk,
            len(r.prompt) + seq.emitted,
            seq.sample,
            r.owner_number,
            -1,
            min([r.first_compression if r.keep else NEVER, *seq.compressions]),
        )
        self._flags[:, slot] = (
            False,
            True,
            late,
            host,
            beam,
            r.speculates and not host,
            bool(r.watch) or host,
            r.topk >= 0,
            False,
            r.tapped is not None,
            r.pooling is not None,
        )
        self.tokens[slot, :n] = seq.tokens[:n]
        self.asking += r.prompt_topk >= 0
        self.special += late or host or r.topk >= 0
        self.watched += bool(r.watch) or host
        self.timed += int(self.tpot[slot] < np.inf)
        self.tapping += r.tapped is not None
        self.pooling += r.pooling is not None
        self.adapter[slot] = -1 if r.adapter is None else r.adapter.place
        self.prefix_published[slot] = self.blocks[:, slot] = 0
        self.trimmed[:, slot] = self.dropped[:, slot] = 0
        self.running = np.concatenate((self.running, np.array((slot,), np.intp)))
        return slot

    def at(self, slot: int) -> Seq:
        """Return the sequence in an occupied slot."""
        seq = self.seq[slot]
        assert seq is not None, f"row {slot} is free"
        return seq

    def least_computed(self, slots: np.ndarray) -> np.ndarray:
        """Return the least number of computed tokens i32 [n] of each of ``slots``, as if all drafts in flight were
        rejected."""
        return self.computed[slots] - self.slack[slots]

    def leave(self, slot: int) -> None:
        """Free a slot whose blocks the caller has released.  The tokens that the host has seen are copied to the
        Seq."""
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
        self.seq[slot], self.serial[slot] = None, -1
        self.table[:, slot, : int(self.blocks[:, slot].max(initial=0))] = 0
        self.blocks[:, slot] = 0
        self.running = self.running[self.running != slot]
        self.cooling.append(slot)

    def _count_drafts(self, slot: int, seq: Seq) -> None:
        """Add the drafts of a row to the counts of its request."""
        drafted, accepted = self.drafts[:, slot].tolist()
        seq.request.drafted += drafted
        seq.request.accepted += accepted
        self.drafts[:, slot] = 0

    def view(self, slots: np.ndarray) -> QueueView:
        """Return the columns of these rows as a policy reads them.  Each column is computed when it is first read."""

        made = {
            "cached": lambda: np.zeros(len(slots), np.int32),
            "predicted_out": lambda: self.expected[slots],
            "max_out": lambda: np.array(
                [self.at(slot).request.most_out for slot in slots.tolist()], np.int32
            ),
            "blocks": lambda: self.blocks[:, slots].sum(axis=0),
            "aborted": lambda: np.zeros(len(slots), np.int32),
        }

        def column(name: str) -> np.ndarray:
            if name in ABSENT:
                return session_column([self.at(slot) for slot in slots.tolist()], name)
            return made[name]() if name in made else getattr(self, name)[slots]

        return LazyView(len(slots), column)
