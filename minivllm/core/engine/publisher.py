"""Publish step results to sequences, which stores tokens, ends sequences, sends streams and publishes prefixes.

The work is vectorized over the rows.  Python code per row runs only for rows that ended, that a client watches (a
server does so in columns), or that filled a block.

A result may arrive for a row that has left its slot (finished, aborted, preempted).  The serial number that was noted
in the plan then differs from the slot's, and the sequence is in ``planner.departed``.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from minivllm.core import checks
from minivllm.core.external_calls import call_foreign
from minivllm.core.interfaces.finish import Finish, finish_of
from minivllm.core.interfaces.plan import (
    ENDED,
    FAILED,
    NAN,
    LogProbs,
    StepError,
    StepPlan,
    StepResult,
)
from minivllm.errors import describe_error

from . import publication
from .images import lost_image
from .pooling import NOT_FINITE, keep_pooled
from .prompt_scores import keep_prompt
from .request import FINISHED, WAITING
from .speculation import StepClass, class_of
from .steady import ONE
from .steady_drafts import DraftedRows, drafted_rows
from .taps import NO_LIMITS, TapKeeper, TapLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from .beams import Beams
    from .cache import KVCache
    from .events import EngineEvents
    from .flight import Flight
    from .planner import Planner
    from .request import FinishSequence, Seq
    from .slots import Slots
    from .speculation import Speculation

# log-probabilities are stored for this many tokens at most before they are converted to the entries
# of an answer
FLUSH_LOGPROBS = 32


class Publisher:
    """Processes the results of steps: stores tokens in the columns of the rows, sends them to clients, and ends
    sequences.  ``now`` returns the time of the engine's clock in seconds."""

    def __init__(
        self,
        slots: Slots,
        cache: KVCache,
        planner: Planner,
        finish: FinishSequence,
        events: EngineEvents,
        now: Callable[[], float],
        speculation: Speculation | None = None,
        taps: TapLimits = NO_LIMITS,
    ) -> None:
        self.taps = TapKeeper(taps)
        self.slots = slots
        self.cache = cache
        self.planner = planner
        self.finish = finish
        self.events = events
        self.now = now
        self.speculation = speculation
        # the rows of the last step with drafts, by sequence
        self._rows: DraftedRows | None = None
        self.tokens = self.overshoot = 0
        # count of steps in which rows with a common prefix read its KV once, and count of these
        # rows
        self.shared_steps = self.shared_rows = 0

    def stats(self) -> dict[str, int]:
        """Return the entries of ``Engine.stats`` that count results."""
        return {
            "generated_tokens": self.tokens,
            "overshoot_tokens": self.overshoot,
            "prefix_shared_steps": self.shared_steps,
            "prefix_shared_rows": self.shared_rows,
        }

    def publish(self, flight: Flight, result: StepResult) -> list[Beams]:
        """Process the result of a step.  Return the beam searches whose live beams all have their candidates, so that
        the engine calls their strategies."""
        s = self.slots
        live = self.slots.serial[flight.slots] == flight.serial
        flight.settle(s, live)
        plan = flight.plan
        s.published = flight.plan.id
        if result.failure is not None:
            self._fail_step(flight, live, result.failure)
            return []
        self.planner.note(plan, result.device_ms)
        self.shared_steps += result.shared > 0
        self.shared_rows += result.shared
        if result.lost:
            live = self._end_without_features(flight, live, result.lost)
        pick = plan.samples
        ok = (live if len(pick) == len(live) else live[pick]) & (result.count > 0)
        now = self.now()
        self._store_tokens(flight, result, ok, now)
        sequence = partial(self._sequence, flight, live)
        if result.prompt is not None:
            keep_prompt(s, plan, sequence, result.prompt)
        many = self._keep_read(flight, live, sequence, result)
        pooled = len(plan.pooled) > 0
        whole: Iterable[Seq] = keep_pooled(plan, sequence, result.pooled) if pooled else ()
        if self.speculation is not None:
            self._speculated(self.speculation, flight, live, result, now)
        self._publish_blocks(flight, live, result)
        if np.count_nonzero(live) < len(live):
            self._departed(flight, result, live)
        if result.logprobs is not None:
            self._store_logprobs(flight, result.logprobs, ok)
        self._tell(flight, result, live, ok)
        for seq in whole:
            if seq.status != FINISHED:
                self._end_pooled(seq)
        if len(plan.host):
            self._choose(flight, result, live)
        for seq in many:
            if seq.status != FINISHED:
                self.finish(seq, "error", error=self.taps.limits.too_many)
        return self._hold(flight, result)

    def _store_tokens(self, flight: Flight, result: StepResult, ok: np.ndarray, now: float) -> None:
        """Store the tokens that a step drew in the columns of their rows.  ``ok`` bool [N] marks the sampled rows that
        received a token and still hold their slot.  ``now`` is in seconds."""
        s = self.slots
        mine = flight.drawn
        pos = flight.position
        tokens = result.tokens
        if np.count_nonzero(ok) < len(ok):
            mine = mine[ok]
            pos = pos[ok]
            tokens = tokens[ok]
        s.tokens[mine, pos] = tokens
        if s.timed:
            s.tpot_due[mine] = now + s.tpot[mine]
        self._note_first_tokens(mine[pos == s.prompt[mine]], now)
        length = pos + 1
        s.collected[mine] = length
        # A row with more known tokens has a later step in flight, so it does not become ready here.
        s.ready[mine] |= s.known[mine] == length
        self.tokens += len(mine)
        guided = flight.plan.guided
        # A guide (a row that steers another one) draws the same token, which is counted once.
        if len(guided):
            self.tokens -= int(ok[guided[:, 1]].sum())

    def _store_logprobs(self, flight: Flight, logprobs: LogProbs, ok: np.ndarray) -> None:
        """Store the log-probabilities of the tokens of a step with their sequences.  ``ok`` bool [N] marks the sampled
        rows that received a token."""
        s = self.slots
        slots = flight.drawn
        for j in np.flatnonzero(ok & s.scored[slots]).tolist():
            seq = s.seq[slots[j]]
            seq.defer_logprobs(logprobs, j)
            # Log-probabilities are converted after every few tokens, because converting those of a
            # whole answer at its end takes long.
            if (int(flight.position[j]) + seq.slot) % FLUSH_LOGPROBS == 0:
                seq.flush_logprobs()

    def _keep_read(
        self,
        flight: Flight,
        live: np.ndarray,
        sequence: Callable[[int], Seq | None],
        result: StepResult,
    ) -> list[Seq]:
        """Store the tap values of a step (tensors of the model that requests read) with their sequences, and which
        tokens its compressions kept.

        Return the sequences whose request has read more bytes than it may.  ``sequence`` is as in ``TapKeeper.keep``.
        ``live`` bool marks the step's rows that still hold their slot."""
        plan = flight.plan
        many: list[Seq] = []
        if len(plan.taps):
            refused = rejected_drafts(plan, result)
            many += self.taps.keep(plan, bool(live.all()), sequence, result.taps, refused)
        if flight.kept and self.taps.limits.kept is not None:
            many += self.taps.limits.kept.keep(flight.kept, result.kept)
        return many

    def _note_first_tokens(self, slots: np.ndarray, now: float) -> None:
        """Store ``now`` as the time of the first token of the requests in these slots, unless they have one."""
        for slot in slots.tolist():
            r = self.slots.at(slot).request
            r.first_token = r.first_token or now

    def _end_without_features(
        self, flight: Flight, live: np.ndarray, lost: Mapping[int, str]
    ) -> np.ndarray:
        """End the sequences of a step that read the features of an image in ``lost``, because the device could not
        compute these features.  Return ``live`` without the rows that have ended."""
        images = self.planner.images
        assert images is not None, "a step without images loses none"
        images.lose(lost)
        first = flight.plan.computed.tolist()
        for r, upto in enumerate(flight.after.tolist()):
            seq = self._sequence(flight, live, r)
            if seq is None or seq.status == FINISHED:
                continue
            number = lost_image(seq.request, first[r], upto, lost)
            if number is not None:
                self.finish(seq, "error", error=lost[number])
        return self.slots.serial[flight.slots] == flight.serial

    def _tell(self, flight: Flight, result: StepResult, live: np.ndarray, ok: np.ndarray) -> None:
        """Send new tokens to the sinks (callbacks) of clients that receive each token at once, and finish the rows that
        have ended.

        ``live`` marks the step's rows that still hold their slot.  ``ok`` marks the sampled rows that received a token.
        """
        s = self.slots
        plan = flight.plan
        slots = flight.drawn
        at = flight.position
        if not s.watched and not np.count_nonzero(result.flags):
            return
        pick = plan.samples
        ended = (result.flags & ENDED) != 0
        busy = live[pick] & (ended | (s.watch[slots] & ok))
        # A row with drafts has several result rows, and only its last token is handled here.
        if len(plan.draft):
            follows = np.append(plan.draft[pick][1:] > 0, False)
            busy &= ~(follows & np.append((result.count | (ended * 1))[1:] > 0, False))
        if not np.count_nonzero(busy):
            return
        column = busy & ~ended & (s.stream[slots] > 0)
        column &= (at > s.prompt[slots]) & (s.emitted[slots] == at)
        if np.count_nonzero(column):
            mine = slots[column]
            s.emitted[mine] += 1
            self.events.tokens_streamed(s.stream[mine], s.sample[mine], result.tokens[column])
        for j in np.flatnonzero(busy & ~column).tolist():
            seq = s.seq[slots[j]]
            if seq is not None and seq.serial == flight.serial[pick[j]]:
                self._deliver(seq, result, j)

    def _end_pooled(self, seq: Seq) -> None:
        """End the sequence of an embedding request, whose hidden states have all been added up or are not finite."""
        if seq.request.pooling.end(len(seq.request.prompt)):
            self.send(seq, Finish("stop"))
        else:
            self.finish(seq, "error", error=NOT_FINITE)

    # ---- rows with drafts --------------------------------------------------------------------------------------------

    def _speculated(
        self, spec: Speculation, flight: Flight, live: np.ndarray, result: StepResult, now: float
    ) -> None:
        """Count the accepted and the rejected drafts of a step, and lower the token counts of the rows by the rejected
        ones.  ``now`` is in seconds."""
        plan = flight.plan
        kind, rows, fresh = _class_of(plan)
        if not len(plan.draft):
            spec.time(kind, 0, plan.draft, rows, now, fresh)
            return
        self._rows = grouped = drafted_rows(plan.draft, self._rows)
        heads = grouped.heads
        given = result.count
        if len(plan.samples) < len(plan.slots):
            given = np.zeros(len(plan.slots), np.int32)
            given[plan.samples] = result.count
        got = np.bincount(grouped.first, given, len(plan.slots))[heads].astype(np.int32)
        spec.collect(plan, result, heads, got)
        taken = np.maximum(got - 1, 0)
        spec.time(kind, int(grouped.drafts.max()), taken, rows, now, fresh)
        alive = live[heads]
        if len(result.drafted) == len(heads):
            mine = plan.slots[heads]
            checked, accepted = self.slots.drafts
            checked[mine] += result.drafted * alive
            accepted[mine] += np.minimum(taken, result.drafted) * alive
        if np.count_nonzero(alive) < len(heads):
            grouped = grouped.of_heads(alive)
            got = got[alive]
        self._take_back(flight, grouped, got)

    def _take_back(self, flight: Flight, rows: DraftedRows, got: np.ndarray) -> None:
        """Lower the columns ``known`` and ``computed`` of rows with drafts to the accepted tokens.  The plan had
        counted all drafts as accepted.  ``rows`` are the plan rows of live sequences with drafts, and ``got`` i32 [H]
        has the number of tokens that each of them received.  KV behind the last accepted token was written but is not
        read.  The row keeps the blocks and fills them next."""
        s = self.slots
        plan = flight.plan
        slots = flight.slots[rows.heads]
        rejected = rows.drafts + ONE - got
        upto = plan.computed[rows.heads] + got
        collected = upto + ONE
        s.collected[slots] = collected
        known = s.known[slots] - rejected
        s.known[slots] = known
        s.schedulable[slots] -= rejected
        s.computed[slots] -= rejected
        s.rejected[slots] += rejected
        s.slack[slots] -= rows.drafts
        s.ready[slots] |= known == collected
        flight.after[rows.rows] = np.minimum(
            flight.after[rows.rows], upto.repeat(ONE + rows.drafts)
        )

    # ---- one row -----------------------------------------------------------------------------------------------------

    def _deliver(self, seq: Seq, result: StepResult, j: int) -> None:
        """Send a row's new tokens to its client, and end its sequence if the flags of result row ``j`` say so.  The
        sequence of a row that failed or has NaN logits ends with an error."""
        flags = int(result.flags[j])
        if flags & (FAILED | NAN):
            error = next((e for e in result.errors if j in e.rows), None)
            message = "nothing can be drawn: the model gave NaN, or processors left no token"
            if error is not None:
                message = f"{error.plugin}: {error.message}"
            elif contradiction := seq.contradiction():
                message = contradiction[0]
            self.finish(seq, "error", error=message)
            return
        self.send(seq, finish_of(flags, int(result.tokens[j])))

    def send(self, seq: Seq, ended: Finish | None) -> None:
        """Send a sequence's new tokens to its sink (the callback of the client).  End it if ``ended`` is not None, or
        if its text contains a stop string now."""
        if (stopped := self.flush(seq, ended)) is not None:
            ended = Finish("stop", stopped)
        if ended is not None and seq.status != FINISHED:
            self.finish(seq, *ended)

    def flush(self, seq: Seq, ended: Finish | None = None) -> str | None:
        """Send the tokens that the sink (the callback of the client) has not received yet, and return the stop string
        that they complete, or None.  If the sink raises, only this sequence ends, with an error."""
        seq.flush_logprobs()
        s = self.slots
        slot = seq.slot
        prompt = len(seq.request.prompt)
        if slot >= 0:
            ids = s.tokens[slot, s.emitted[slot] : s.collected[slot]].tolist()
            s.emitted[slot] += len(ids)
            seq.emitted = int(s.emitted[slot]) - prompt
        else:
            ids = seq.tokens[prompt + seq.emitted : seq.known].tolist()
            seq.emitted += len(ids)
        if seq.request.sink is None or (not ids and ended is None):
            return None
        try:
            return call_foreign(seq.request.sink, seq, ids, ended)
        except Exception as e:
            seq.request.sink = None
            self.finish(seq, "error", error=f"what receives its tokens failed: {describe_error(e)}")
            return None

    def _publish_blocks(self, flight: Flight, live: np.ndarray, result: StepResult) -> None:
        """Enter the blocks that this step has filled into the prefix cache.  Rows that failed in the step are left out,
        and so are rows whose pooled hidden states are not finite."""
        if not self.cache.prefix:
            return
        s = self.slots
        slots = flight.slots
        full = live & (flight.after // s.block > s.prefix_published[slots])
        if not np.count_nonzero(full):
            return
        if np.count_nonzero(wrong := result.flags & (NAN | FAILED)):
            full[np.isin(slots, flight.drawn[wrong != 0])] = False
        if len(result.pooled):
            finite = np.isfinite(result.pooled).all(axis=1)
            full[flight.plan.pooled[~finite, 0]] = False
        # A row with a steering vector could still fail for lack of memory until its first token is
        # drawn.
        if s.tapping:
            full &= ~s.tapped[slots] | (s.collected[slots] > s.prompt[slots])
        if np.count_nonzero(full):
            mine = slots[full]
            done = np.minimum(flight.after[full], s.collected[mine])
            rows = zip(mine.tolist(), done.tolist(), strict=True)
            publication.publish(self.cache, rows)

    # ---- rows that have left -----------------------------------------------------------------------------------------

    def _sequence(self, flight: Flight, live: np.ndarray, row: int) -> Seq | None:
        """Return the sequence of plan row ``row``, or None if it has ended.

        The sequence may have left its slot.
        """
        if live[row]:
            return self.slots.seq[flight.plan.slots[row]]
        return self.planner.departed.get(int(flight.serial[row]))

    def _departed(self, flight: Flight, result: StepResult, live: np.ndarray) -> None:
        """Process the results of rows that have left their slot since the step was planned.  A preempted sequence keeps
        its token; the token of an ended sequence is dropped."""
        plan = flight.plan
        drawn: dict[int, list[int]] = {}
        for j, r in enumerate(plan.samples.tolist()):
            drawn.setdefault(int(flight.serial[r]), []).append(j)
        for r in np.flatnonzero(~live & ((plan.draft == 0) if len(plan.draft) else True)).tolist():
            serial = int(flight.serial[r])
            seq = self.planner.departed.get(serial)
            mine = drawn.get(serial, [])
            if mine and (seq is None or seq.status == FINISHED):
                self.overshoot += 1
            if seq is None:
                continue
            for j in mine:
                if seq.status == WAITING and result.count[j]:
                    seq.tokens = np.append(seq.tokens[: seq.known], np.int32(result.tokens[j]))
                    seq.known += 1
                    self.tokens += seq.lead is None
                    # log-probabilities that the client requested, or by which a strategy ranks
                    # outputs
                    if result.logprobs is not None and seq.request.topk >= 0:
                        seq.defer_logprobs(result.logprobs, j)
                    self._deliver(seq, result, j)
            self._rest(seq, plan)
            if not seq.in_flight and seq.status == WAITING:
                self.planner.requeue(seq)

    def _rest(self, seq: Seq, plan: StepPlan) -> None:
        """Record that no step in flight contains a sequence that has left its slot, if ``plan`` was the last
        such step."""
        if seq.in_flight <= plan.id:
            seq.in_flight = 0
            del self.planner.departed[seq.serial]

    def _fail_step(self, flight: Flight, live: np.ndarray, error: StepError) -> None:
        """End all sequences of a failed step with the error.  Their blocks do not enter the prefix cache.  An error of
        scope "device" ends all running sequences, because the device's copies of their columns may be wrong."""
        named = f"{error.plugin}: {error.message}" if error.plugin else error.message
        if self.planner.images is not None:
            # the device may not have computed the image features that the step requested
            self.planner.images.lose(flight.plan.delta.image[:, 0].tolist())
        if self.planner.adapters is not None and error.scope == "device":
            self.planner.adapters.repeat(flight.plan.delta.adapter.tolist())
        for r in (
            np.flatnonzero(flight.plan.draft == 0)
            if len(flight.plan.draft)
            else range(len(flight.serial))
        ):
            seq = self._sequence(flight, live, int(r))
            if seq is None:
                continue
            if not live[r]:
                self._rest(seq, flight.plan)
            if seq.status != FINISHED:
                self.finish(seq, "error", error=f"the step failed: {named}")
        if error.scope == "device":
            for slot in self.slots.running.tolist():
                self.finish(self.slots.seq[slot], "error", error=f"the device failed: {named}")

    # ---- rows whose token is chosen on the host ----------------------------------------------------------------------

    def _hold(self, flight: Flight, result: StepResult) -> list[Beams]:
        """Pass the candidates for the next token of beams to their searches, and return the searches that have the
        candidates of all live beams."""
        complete = []
        for j in flight.plan.held.tolist():
            r = int(flight.plan.samples[j])
            slot = int(flight.plan.slots[r])
            if self.slots.serial[slot] != flight.serial[r]:
                continue  # the row has left its slot or failed
            seq = self.slots.at(slot)
            seq.request.first_token = seq.request.first_token or self.now()
            if seq.request.beams.take(seq.sample, result.logprobs, j):
                complete.append(seq.request.beams)
        return complete

    def _choose(self, flight: Flight, result: StepResult, live: np.ndarray) -> None:
        s = self.slots
        plan = flight.plan
        logits = result.logits
        assert logits is not None, "a step with host rows gives their logits"
        for h, j in enumerate(plan.host.tolist()):
            r = int(plan.samples[j])
            if not live[r] or int(result.flags[j]) & ENDED:
                continue
            slot = int(plan.slots[r])
            seq = s.at(slot)
            n = int(s.known[slot])
            try:
                ids = seq.request.ids(s.tokens[slot, :n])
                token = call_foreign(_chosen, seq, logits[h], ids)
            except Exception as e:  # the function of the user failed
                what = (
                    "choose_fn" if seq.request.params.choose_fn is not None else "logits_processors"
                )
                self.finish(seq, "error", error=f"{what}: {describe_error(e)}")
                continue
            s.tokens[slot, n] = token
            s.known[slot] = s.schedulable[slot] = s.collected[slot] = n + 1
            s.ready[slot] = True
            self.tokens += 1
            self.planner.chosen.append((slot, token))
            seq.request.first_token = seq.request.first_token or self.now()
            self.send(seq, seq.request.stops.finish(token, n + 1))


def _chosen(seq: Seq, logits: np.ndarray, ids: list[int]) -> int:
    assert seq.choose is not None
    return checks.chosen_token(seq.choose(logits, ids), len(logits))


def _class_of(plan: StepPlan) -> tuple[StepClass, int, bool]:
    """Return (class, decoding rows, fresh) of a step for ``Speculation.time``.  ``fresh`` means that all its rows have
    just entered."""
    rows = plan.q_len if not len(plan.draft) else plan.q_len[plan.draft == 0]
    decodes = int(np.count_nonzero(rows == 1))
    prompt = int(rows.sum()) - decodes
    joined = 0 if plan.delta.join is None else len(plan.delta.join.slot)
    return class_of(decodes, prompt), decodes, joined >= len(rows)


def rejected_drafts(plan: StepPlan, result: StepResult) -> np.ndarray | None:
    """Return bool [R], True for the rows of a step that are rejected draft tokens; None for a step without drafts."""
    if not len(plan.draft):
        return None
    accepted = np.zeros(len(plan.slots), np.int32)
    accepted[plan.samples] = result.count
    return (plan.draft > 0) & (accepted == 0)
