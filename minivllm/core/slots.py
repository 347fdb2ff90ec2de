"""Per-sequence columns on the host: a running sequence keeps one row for its life.

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

from .admission import LazyView

if TYPE_CHECKING:
    from .interfaces.scheduler import QueueView
    from .request import Seq


class Slots:
    """S rows.  Invariants: a row in ``running`` has a Seq; ``computed <= known <= end``; ``collected <= known``;
    blocks of a row are ``table[g, slot, :blocks[g, slot]]`` (null where trimmed), zero beyond."""

    def __init__(self, size: int, max_len: int, groups: int, block: int) -> None:
        self.size, self.block = size, block
        self.seq: list[Seq | None] = [None] * size
        self.free = list(range(size - 1, -1, -1))
        self.cooling: list[int] = []  # left since the last plan: a delta must not name a row's old and new owner
        self.running = np.empty(0, np.int32)  # slots in order of admission
        self.next_serial = 0
        i32 = lambda: np.zeros(size, np.int32)  # noqa: E731
        self.serial = np.full(size, -1, np.int64)  # stamp of the present stay
        self.id = np.zeros(size, np.int64)
        self.arrival = np.zeros(size, np.float64)
        self.prompt, self.known, self.computed, self.collected, self.end = i32(), i32(), i32(), i32(), i32()
        self.priority, self.tenant, self.preempted, self.expected = i32(), i32(), i32(), i32()
        self.ttft_due = np.full(size, np.inf)
        self.tpot_due = np.full(size, np.inf)
        self.tpot = np.full(size, np.inf)  # seconds a token may take
        self.goal = i32()  # known length to compute up to: ``known``, or prompt - 1 while branches wait to fork
        self.forking = np.zeros(size, bool)
        self.ready = np.ones(size, bool)  # False: sits out until its last token was collected (host rows)
        self.flying = i32()  # steps in flight that hold the row
        self.late = np.zeros(size, bool)
        self.host = np.zeros(size, bool)
        self.lane = np.zeros(size, bool)  # of a stepwise strategy: held after each step (see ``stepwise``)
        self.speculates = np.zeros(size, bool)  # its steps may bring drafts
        self.drafting = np.zeros(size, bool)  # a step with drafts is in flight: known and computed are upper bounds
        self.watch = np.zeros(size, bool)  # somebody wants each token as it comes
        self.scored = np.zeros(size, bool)  # it wants log-probabilities
        self.topk = np.full(size, -1, np.int32)
        self.prompt_topk = np.full(size, -1, np.int32)  # its prompt's log-probabilities are still wanted
        self.asking = 0  # rows with such
        self.published = i32()  # blocks handed to the prefix index
        self.blocks = np.zeros((groups, size), np.int32)
        self.trimmed = np.zeros((groups, size), np.int32)  # leading blocks given back (sliding window)
        self.table = np.zeros((groups, size, -(-max_len // block) + 1), np.int32)
        self.tokens = np.zeros((size, max_len + 1), np.int32)

    def enter(self, seq: Seq) -> int:
        """Give a sequence a row; all columns are set from it."""
        slot = self.free.pop()
        r, p = seq.request, seq.request.params
        seq.slot, seq.serial = slot, self.next_serial
        self.next_serial += 1
        self.seq[slot], self.serial[slot], self.id[slot], self.arrival[slot] = seq, seq.serial, seq.id, r.arrival
        n = seq.known
        self.prompt[slot], self.known[slot], self.end[slot] = len(r.prompt), n, r.end
        self.computed[slot], self.collected[slot], self.goal[slot] = 0, n, n
        self.tokens[slot, :n] = seq.tokens[:n]
        self.priority[slot], self.tenant[slot], self.preempted[slot] = p.priority, r.tenant, seq.preempted
        self.expected[slot] = r.expected
        self.ttft_due[slot] = np.inf if p.ttft_ms is None else r.arrival + p.ttft_ms / 1e3
        self.tpot_due[slot] = np.inf
        self.tpot[slot] = np.inf if p.tpot_ms is None else p.tpot_ms / 1e3
        self.forking[slot], self.ready[slot], self.flying[slot] = False, True, 0
        self.late[slot] = p.allowed_tokens_fn is not None or r.grammar is not None
        self.lane[slot] = r.lanes is not None
        self.host[slot] = seq.choose is not None or self.lane[slot]
        self.topk[slot] = r.topk
        self.prompt_topk[slot] = r.prompt_topk
        self.asking += r.prompt_topk >= 0
        self.speculates[slot], self.drafting[slot] = r.speculates and not self.host[slot], False
        self.watch[slot] = bool(r.watch) or self.host[slot]
        self.scored[slot] = r.topk >= 0
        self.published[slot] = 0
        self.blocks[:, slot], self.trimmed[:, slot] = 0, 0
        self.running = np.concatenate((self.running, np.array((slot,), np.int32)))
        return slot

    def leave(self, slot: int) -> None:
        """Take the row back; the caller has released its blocks.  The tokens that the host has seen go to the Seq."""
        seq = self.seq[slot]
        self.asking -= int(self.prompt_topk[slot] >= 0)
        n = int(self.collected[slot])
        seq.tokens, seq.known, seq.slot, seq.in_flight = self.tokens[slot, :n].copy(), n, -1, int(self.flying[slot])
        self.seq[slot], self.serial[slot] = None, -1
        self.table[:, slot, : int(self.blocks[:, slot].max(initial=0))] = 0
        self.blocks[:, slot] = 0
        self.running = self.running[self.running != slot]
        self.cooling.append(slot)

    def view(self, slots: np.ndarray) -> QueueView:
        """What a policy sees of these rows."""

        def column(name: str) -> np.ndarray:
            match name:
                case "cached":
                    return np.zeros(len(slots), np.int32)
                case "predicted_out":
                    return self.expected[slots]
                case "max_out":
                    return self.end[slots] - self.prompt[slots]
                case "blocks":
                    return self.blocks[:, slots].sum(axis=0)
            return getattr(self, name)[slots]

        return LazyView(len(slots), column)
