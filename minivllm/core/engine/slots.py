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
    from minivllm.core.interfaces.scheduler import QueueView

    from .request import Seq


class Slots:
    """S rows.  Invariants: a row in ``running`` has a Seq; ``computed <= known <= end``; ``collected <= known``;
    blocks of a row are ``table[g, slot, :blocks[g, slot]]`` (null where trimmed), zero beyond."""

    def __init__(self, size: int, max_len: int, groups: int, block: int) -> None:
        self.size, self.block = size, block
        self.seq: list[Seq | None] = [None] * size
        self.free = list(range(size - 1, -1, -1))
        # left since the last plan: a delta must not name a row's old and new owner
        self.cooling: list[int] = []
        # slots in order of admission; numpy is five times as fast with indices of this type
        self.running = np.empty(0, np.intp)
        self.next_serial = 0
        self.changes = (
            0  # counts whenever a later step may differ from the last in more than tokens
        )
        self.serial = np.full(size, -1, np.int64)  # stamp of the present stay
        self.step = np.zeros(size, np.int64)  # id of the last step that holds the row
        self.published = 0  # id of the last step whose result is in the columns
        self.id, self.stream = np.zeros((2, size), np.int64)
        # Columns of one type are rows of one table, so that ``enter`` sets them all at once.
        self._times = np.full((4, size), np.inf)
        # tpot: seconds a token may take
        self.arrival, self.ttft_due, self.tpot_due, self.tpot = self._times
        self._ints = np.zeros((16, size), np.int32)
        self.prompt, self.known, self.computed, self.collected, self.end = self._ints[:5]
        self.priority, self.tenant, self.preempted, self.expected = self._ints[5:9]
        # compute up to here: ``known``, or prompt - 1 while branches wait to fork
        self.schedulable = self._ints[9]
        self.topk = self._ints[10]
        self.prompt_topk = self._ints[11]  # -1, or its prompt's log-probabilities are still wanted
        self.owner_number = self._ints[14]  # number of the request's owner, see ``owners``
        self.emitted = self._ints[12]  # tokens handed to the text side, the prompt's among them
        self.sample = self._ints[13]
        self.partner = self._ints[15]  # slot of the row that draws with it (see ``guides``), or -1
        self._flags = np.zeros((11, size), bool)
        self.forking = self._flags[0]  # waits for branches, or for its partner
        # False: sits out until its last token was collected (host rows)
        self.ready = self._flags[1]
        self.late, self.host = self._flags[2:4]
        self.beam = self._flags[4]  # of a stepwise strategy: held after each step (see ``beams``)
        self.speculates = self._flags[5]  # its steps may bring drafts
        # a step with drafts is in flight: known and computed are upper bounds
        self.drafting = self._flags[6]
        self.watch = self._flags[7]  # somebody wants each token as it comes
        self.scored = self._flags[8]  # it wants log-probabilities
        self.leads = self._flags[9]  # its partner is its guide
        self.tapped = self._flags[10]  # its request reads or adds at points of the model
        self.scale = np.zeros(size, np.float32)  # of the guide
        self.topk[:], self.prompt_topk[:], self.ready[:] = -1, -1, True
        self.asking = 0  # rows with such
        self.special = 0  # rows that are late or host, or want log-probabilities
        self.watched = 0  # rows with ``watch``
        self.timed = 0  # rows with ``tpot``
        self.paired = 0  # rows with a partner
        self.tapping = 0  # rows with taps
        self.prefix_published = np.zeros(size, np.int32)  # blocks handed to the prefix index
        self.blocks = np.zeros((groups, size), np.int32)
        # leading blocks given back (sliding window)
        self.trimmed = np.zeros((groups, size), np.int32)
        self.table = np.zeros((groups, size, -(-max_len // block) + 1), np.int32)
        self.tokens = np.zeros((size, max_len + 1), np.int32)

    @property
    def n_running(self) -> int:
        """Sequences of requests that run, which their guides are not."""
        return len(self.running) - self.paired // 2

    def enter(self, seq: Seq) -> int:
        """Give a sequence a row; all columns are set from it."""
        slot = self.free.pop()
        r, p = seq.request, seq.request.params
        seq.slot, seq.serial = slot, self.next_serial
        self.next_serial += 1
        self.changes += 1
        self.seq[slot] = seq
        self.serial[slot], self.step[slot] = seq.serial, 0
        self.id[slot] = seq.id
        self.stream[slot] = r.stream
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
        )
        self._flags[:, slot] = (
            False,
            True,
            late,
            host,
            beam,
            r.speculates and not host,
            False,
            bool(r.watch) or host,
            r.topk >= 0,
            False,
            r.tapped is not None,
        )
        self.tokens[slot, :n] = seq.tokens[:n]
        self.asking += r.prompt_topk >= 0
        self.special += late or host or r.topk >= 0
        self.watched += bool(r.watch) or host
        self.timed += int(self.tpot[slot] < np.inf)
        self.tapping += r.tapped is not None
        self.prefix_published[slot] = 0
        self.blocks[:, slot], self.trimmed[:, slot] = 0, 0
        self.running = np.concatenate((self.running, np.array((slot,), np.intp)))
        return slot

    def at(self, slot: int) -> Seq:
        """The sequence in a row that is taken."""
        seq = self.seq[slot]
        assert seq is not None, f"row {slot} is free"
        return seq

    def leave(self, slot: int) -> None:
        """Take the row back; the caller has released its blocks.  The tokens that the host has seen go to the Seq."""
        seq = self.at(slot)
        self.changes += 1
        self.asking -= int(self.prompt_topk[slot] >= 0)
        self.special -= bool(self.late[slot] or self.host[slot] or self.scored[slot])
        self.watched -= int(self.watch[slot])
        self.timed -= int(self.tpot[slot] < np.inf)
        self.paired -= int(self.partner[slot] >= 0)
        self.tapping -= int(self.tapped[slot])
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

    def view(self, slots: np.ndarray) -> QueueView:
        """What a policy sees of these rows."""

        made = {
            "cached": lambda: np.zeros(len(slots), np.int32),
            "predicted_out": lambda: self.expected[slots],
            "max_out": lambda: self.end[slots] - self.prompt[slots],
            "blocks": lambda: self.blocks[:, slots].sum(axis=0),
            "aborted": lambda: np.zeros(len(slots), np.int32),
        }
        return LazyView(
            len(slots), lambda name: made[name]() if name in made else getattr(self, name)[slots]
        )
