"""Tests for processors and samplers alike: their parameters, the independence of rows, and state in columns.

A column is a tensor with an entry for each slot, in which a plug-in keeps the state of the sequence in the slot.
"""

from __future__ import annotations

import difflib
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from minivllm.core.interfaces.params import NAMES, PROCESSED, SamplingParams
from minivllm.core.interfaces.sampling import Rows, SamplingContext
from minivllm.errors import RequestError

from .base import Seen, since
from .declaring import DeclaringOnRows
from .sampling_data import Noted, keywords_of, make_sequences, unlike
from .sampling_rows import (
    GARBAGE,
    MAX_LEN,
    SCHEDULES,
    STANDARD,
    SampledSeq,
    Stage,
    captured,
    check_row,
    check_row_type,
    normal_logits,
    same_rows,
    stack_logits,
    wrong_values,
)
from .spec import SpecConformance

MOST_ALONE = 5  # number of rows of a step that are compared with the same rows alone
MOST_COMMITTED = 12  # largest number of tokens in one commit of a row


class SamplingConformance(DeclaringOnRows, SpecConformance):
    """The tests for processors and samplers alike.

    The kit has values and references of the standard sampling parameters.  Override ``params`` (values to test) and
    ``wrong_params`` (values to refuse) for a plug-in that reads other parameters.
    """

    vocab = 67  # width of the logits; not a multiple of 32

    def params(self, vocab: int) -> Sequence[Mapping[str, Any]]:
        """Return keywords of SamplingParams that set the plug-in's own parameters, such as ``[{"mine": 2}]``."""
        return []

    def wrong_params(self, vocab: int) -> Sequence[Mapping[str, Any]]:
        """Return keywords that ``bind`` must refuse, each with one of the plug-in's own parameters."""
        return []

    def output(self, stage: Stage, slots: Sequence[int], logits: Tensor, max_position: int = 0) -> Tensor:
        """Return the plug-in's results for logits [N, V]: changed logits of a processor, or tokens of a sampler."""
        raise NotImplementedError

    def call(self, worker: Any, logits: Tensor, rows: Rows, columns: Mapping[str, Tensor]) -> Tensor:
        """Call the plug-in without any check, and return the tensor that it wrote."""
        raise NotImplementedError

    def make(self, vocab: int, max_len: int = MAX_LEN) -> Any:
        """Return a new instance of the plug-in."""
        return self.build(SamplingContext(vocab, max_len, (2,)))

    def own_logits(self, ids: Sequence[int], vocab: int) -> Tensor:
        """Return logits f32 [V] of a processor's own model after some tokens."""
        rng = np.random.default_rng([vocab, *ids])
        return normal_logits(rng, 3, vocab)

    def context(self) -> tuple[Any, ...]:
        return (SamplingContext(self.vocab, MAX_LEN, (2,)),)

    @property
    def reads(self) -> frozenset[str]:
        """Return the names of the request parameters that the plug-in reads."""
        return self.make(self.vocab).reads

    def unknown(self) -> list[str]:
        """Return the parameters that the plug-in reads and for which neither the kit nor ``params`` has values."""
        own = set()
        for p in self.params(self.vocab):
            own |= {*p, *p.get("extra", ())}
        return sorted(self.reads - own - set(STANDARD))

    def _skip_unknown(self) -> None:
        """Skip the test if the kit has no values for a parameter that the plug-in reads."""
        if unknown := self.unknown():
            pytest.skip(f"no values known of {', '.join(unknown)}: override params()")

    def keywords(self, vocab: int) -> st.SearchStrategy[dict[str, Any]]:
        """Return a hypothesis strategy that draws keywords of SamplingParams that the plug-in reads.

        A bias never comes together with penalties, as their order is not specified.
        """
        found = keywords_of(self.reads, self.params(vocab), vocab)
        if found is None:
            self._skip_unknown()
        return found

    def sequences(self, data: Any, n: int, vocab: int = 0) -> list[SampledSeq]:
        """Draw n sequences with parameters that the plug-in reads, repeated tokens, and some logits of -inf and 0."""
        return make_sequences(data, n, vocab or self.vocab, self.keywords)

    def alone(self, s: SampledSeq, vocab: int = 0, **how: Any) -> Tensor:
        """Return the output of a sequence in an engine without others; ``how`` has arguments of ``Stage``."""
        stage = Stage(self, 1, vocab=vocab, **how)
        stage.join([0], [s])
        return self.output(stage, [0], s.logits[None])[0]

    def exercise(self, instance: Any) -> Any:
        row = check_row_type(self.bound(instance, SamplingParams()), "")
        if row is None:
            bound = None
        else:
            bound = (row.variant, str(row))
        return sorted(instance.reads), sorted(instance.columns()), bound

    def used_stage(self, instance: Any) -> Stage:
        """Return a stage with a sequence in slot 1, in which ``instance`` both binds requests and works on rows."""
        stage = Stage(self, 2, instance=instance)
        seq = SampledSeq(SamplingParams(), (1, 2, 3), (4, 4), torch.zeros(self.vocab))
        stage.join([1], [seq])
        return stage

    def _same(self, got: Tensor, want: Tensor, s: SampledSeq, what: str) -> None:
        """Fail unless two outputs of a sequence are equal bit for bit."""
        if torch.equal(got, want):
            return
        if got.ndim:
            differ = (got != want).nonzero()
            at = differ.flatten().tolist()[:8]
            shown = f"at tokens {at}: {got[at].tolist()}, not {want[at].tolist()}"
        else:
            shown = f"token {got.item()}, not {want.item()}"
        pytest.fail(f"{s}: {what} gives {shown}", pytrace=False)

    # ---- parameters ----------------------------------------------------------------------------------------------

    @since(1, 0)
    def test_it_reads_parameters_that_exist(self) -> None:
        """Check that ``reads`` names fields of SamplingParams that plug-ins may read, or declared names in ``extra``.

        If a name is misspelt, no request ever uses the plug-in.
        """
        assert isinstance(self.reads, (set, frozenset)), f"reads is {self.reads!r}: expected a frozenset of names"
        known = NAMES | self.spec.reads
        for name in sorted(self.reads):
            assert isinstance(name, str), f"reads has {name!r}: expected names"
            assert name in PROCESSED or name not in NAMES, f"reads has {name!r}, which the engine itself serves"
            if name not in known:
                near = difflib.get_close_matches(name, PROCESSED, 1, 0.85)
            else:
                near = []
            assert not near, f"reads has {name!r}, which is no sampling parameter: did you mean {near[0]!r}?"
        self._skip_unknown()

    @since(1, 0)
    def test_columns_can_be_made(self) -> None:
        """Check that ``columns()`` is the same for each instance, with torch dtypes that can hold the fill values."""
        first = dict(self.make(self.vocab).columns())
        second = dict(self.make(self.vocab).columns())
        assert first == second, f"columns() differs between two instances: {first} and {second}"
        for name, column in first.items():
            dtype = getattr(torch, column.dtype, None)
            assert isinstance(dtype, torch.dtype), f"column {name!r}: torch has no dtype {column.dtype!r}"
            filled = torch.full(column.shape, column.fill, dtype=dtype).double()
            near = (filled - column.fill).abs() <= 1e-2 * abs(column.fill)
            same = math.isinf(column.fill) or bool(near.all())
            assert same, f"column {name!r}: {column.dtype} cannot hold fill={column.fill}"

    @since(1, 0)
    def test_bind_gives_values_for_the_declared_columns(self) -> None:
        """Check that ``bind`` is a function of the parameters and the prompt.

        The values that it returns must fit the names, shapes and ranges of the columns.
        """

        @self.for_all(60, st.data(), st.integers(1, MAX_LEN - 1))
        def holds(data: Any, prompt_len: int) -> None:
            requested = data.draw(self.keywords(self.vocab))
            first, second = self.make(self.vocab), self.make(self.vocab)
            row = self.bound(first, SamplingParams.make(**requested), prompt_len)
            check_row(row, first.columns(), str(requested))
            for instance in (first, second):
                again = self.bound(instance, SamplingParams.make(**requested), prompt_len)
                assert same_rows(row, again), f"bind({requested}) returned {row}, and {again} when it was called again"

    @since(1, 0)
    def test_bad_values_are_refused_by_name(self) -> None:
        """Check that ``bind`` refuses a bad value with ``RequestError(message, parameter)``.

        So a client learns which parameter is wrong.  Another exception, or a row that does not fit the columns, fails
        the test.
        """
        instance = self.make(self.vocab)
        for name in sorted(self.reads & set(STANDARD)):
            for value in wrong_values(name, self.vocab):
                self._check_refusal(instance, name, {name: value}, True)
        for requested in self.wrong_params(self.vocab):
            name = next(iter(requested.get("extra") or requested))
            self._check_refusal(instance, name, requested, True)
        for name in sorted(self.reads - PROCESSED):
            for value in GARBAGE:
                self._check_refusal(instance, name, {"extra": {name: value}}, False)

    def _check_refusal(self, instance: Any, name: str, requested: Mapping[str, Any], required: bool) -> None:
        """Bind parameters that are wrong, or that are wrong only for some plug-ins.

        If ``required``, ``bind`` must refuse them by ``name``; otherwise it may also accept them.
        """
        try:
            row = self.bound(instance, SamplingParams.make(**requested))
        except RequestError as e:
            assert e.param == name, f"bind({requested}): RequestError names parameter {e.param!r}: expected {name!r}"
        except Exception as e:
            pytest.fail(f"bind({requested}) raised {type(e).__name__}: {e}; expected a RequestError", pytrace=False)
        else:
            if required:
                wish = f"expected a RequestError that names {name!r}"
                pytest.fail(f"bind({requested}) returned {row}: {wish}", pytrace=False)
            check_row(row, instance.columns(), str(requested))

    @since(1, 0)
    def test_a_parameter_that_it_does_not_read_has_no_effect(self) -> None:
        """Check that a parameter outside of ``reads`` does not change the output.

        The engine refuses a request that sets such a parameter, or passes it to another plug-in.
        """
        set_all = {
            "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.2, "repetition_penalty": 1.5,
            "presence_penalty": 1.0, "frequency_penalty": 1.0, "logit_bias": {1: 5.0}, "bad_words": [[1]],
            "allowed_token_ids": [1], "no_repeat_ngram_size": 2, "temperature_schedule": SCHEDULES[0],
            "typical_p": 0.5, "mirostat_tau": 2.0, "encoder_repetition_penalty": 2.0,
        }  # fmt: skip
        instance = self.make(self.vocab)
        other = {k: v for k, v in set_all.items() if k not in self.reads}

        @self.for_all(20, st.data())
        def holds(data: Any) -> None:
            requested = data.draw(self.keywords(self.vocab))
            params = SamplingParams.make(**requested)
            plain = check_row_type(self.bound(instance, params), str(requested))
            extra = {**requested.get("extra", {}), "no_one_reads_this": 1.0}
            passed = SamplingParams.make(**{**other, **requested, "extra": extra})
            row = self.bound(instance, passed)
            assert same_rows(plain, row), (
                f"bind({requested}) returned {plain}, and {row} with {sorted(other)} set, which `reads` does not name"
            )
            noted = Noted(params.extra)
            self.bound(instance, replace(params, extra=noted))
            hidden = sorted(noted.names - self.reads)
            assert not hidden, (
                f"bind({requested}) looks up {', '.join(hidden)} in extra, which `reads` does not name: a request that "
                "sets it is refused, so declare it there"
            )

    # ---- rows ----------------------------------------------------------------------------------------------------

    @since(1, 0)
    def test_a_row_does_not_depend_on_the_rows_beside_it(self) -> None:
        """Check that the output of a row has the same bits alone and in any batch, small or large, in any order.

        The other rows have other parameters, variant bits, histories and logits (peaked, even, larger, smaller, nearly
        all -inf).
        """
        seen = Seen()

        @self.for_all(40, st.data(), st.integers(0, 2**32))
        def holds(data: Any, seed: int) -> None:
            rng = random.Random(seed)
            seqs = self.sequences(data, data.draw(st.integers(2, 6)))
            crowd = []
            for s in seqs[1:]:
                crowd += [replace(s, logits=x) for x in rng.sample(unlike(seqs[0].logits), 2)]
            seqs = [*seqs, *crowd] if rng.random() < 0.7 else seqs
            if many := rng.random() < 0.25:
                seqs += [replace(rng.choice(crowd), seed=i) for i in range(18)]
            stage, slots = Stage(self, len(seqs) + 2), rng.sample(range(len(seqs) + 2), len(seqs))
            stage.join(slots, seqs)
            order = rng.sample(range(len(seqs)), len(seqs) if many else rng.randint(2, len(seqs)))
            logits = torch.stack([seqs[i].logits for i in order])
            got = self.output(stage, [slots[i] for i in order], logits)
            seen["order"] += order != sorted(order)
            seen["many"] += len(order) > 16
            for j, i in list(enumerate(order))[:MOST_ALONE]:
                what = f"as row {j} of {len(order)} (slot {slots[i]}), beside {len(order) - 1} others, it"
                want = self.alone(seqs[i])
                self._same(got[j], want, seqs[i], what)

        seen.require(order=5, many=2)

    @since(1, 0)
    def test_stale_history_and_other_slots_do_not_matter(self) -> None:
        """Check that only the history before ``position`` counts.

        Entries after it, the contents of other slots, the slot of a row and the size of ``max_position`` may not
        change a result.
        """

        @self.for_all(40, st.data(), st.integers(1, 2**20), st.integers(0, 4))
        def holds(data: Any, garbage: int, slot: int) -> None:
            (s,) = self.sequences(data, 1)
            stage = Stage(self, 5, garbage=garbage)
            stage.join([slot], [s])
            for most in (0, MAX_LEN):
                got = self.output(stage, [slot], s.logits[None], most)[0]
                reach = f"max_position {most or 'exact'}"
                self._same(got, self.alone(s), s, f"in slot {slot} of 5, with garbage behind its history, {reach}, it")

    @since(1, 0)
    def test_only_the_columns_of_its_rows_change(self) -> None:
        """Check that a step changes the columns at the slots of its rows only.

        Columns of other slots belong to other sequences.  Histories and the row metadata belong to the engine.
        """

        @self.for_all(20, st.data(), st.integers(1, 2**20))
        def holds(data: Any, garbage: int) -> None:
            seqs = self.sequences(data, 3)
            stage = Stage(self, 6, garbage=garbage)
            stage.join([4, 1, 3], seqs)
            stage.poison([0, 2, 5])
            before = stage.columns(range(6))
            tokens = stage.tokens.clone()
            logits = stack_logits([seqs[1], seqs[0]])
            self.output(stage, [1, 4], logits)
            assert torch.equal(stage.tokens, tokens), "wrote into rows.tokens, the engine's token history"
            stage.accept([1, 4], [[5], [6]])
            for name, column in stage.columns(range(6)).items():
                changed = []
                for i in (0, 2, 3, 5):
                    if not torch.equal(column[i], before[name][i]):
                        changed.append(i)
                assert not changed, f"column {name!r} of slots {changed} changed in a step with the rows of slots 1, 4"

    # ---- state ---------------------------------------------------------------------------------------------------

    def _life(self, seqs: Sequence[SampledSeq], seed: int, **how: Any) -> list[Tensor]:
        """Return the outputs of three steps of some sequences, and their columns afterwards."""
        rng = np.random.default_rng(seed)
        stage = Stage(self, len(seqs) + 1, **how)
        slots = list(range(len(seqs), 0, -1))
        stage.join(slots, seqs)
        out = []
        for _ in range(3):
            logits = normal_logits(rng, 3, len(seqs), self.vocab)
            out.append(self.output(stage, slots, logits))
            drawn = rng.integers(0, self.vocab, (len(seqs), 1))
            stage.accept(slots, drawn)
        return out + list(stage.columns(slots).values())

    @since(1, 0)
    def test_state_is_in_the_columns_alone(self) -> None:
        """Check that all state of a sequence is in the columns, and none in the instance.

        The engine makes one instance that binds and another that works, perhaps in another process.  State in ``self``
        would be lost, or used for the wrong row.
        """

        @self.for_all(20, st.data(), st.integers(0, 2**20))
        def holds(data: Any, seed: int) -> None:
            seqs = self.sequences(data, 3)
            fused = self._life(seqs, seed, instance=self.make(self.vocab))
            fresh = self._life(seqs, seed, fresh=True)
            for step, (a, b) in enumerate(zip(fused, fresh, strict=True)):
                differ = []
                for i in range(len(seqs)):
                    if not torch.equal(a[i], b[i]):
                        differ.append(i)
                place = f"step {step}" if step < 3 else f"column {step - 3} at the end"
                parts = (str(seqs[j]) for j in differ)
                rows = "; ".join(parts)
                assert not differ, f"{place}: rows {differ} differ if another instance serves each call: {rows}"

    @since(1, 0)
    def test_commit_counts_accepted_tokens_only(self) -> None:
        """Check that a commit of k tokens, some of them equal, does the same as k commits of one token.

        Tokens after the first ``count`` were rejected, a count of 0 changes nothing, and ``rows.variant`` has no
        meaning here.
        """
        if not Stage(self, 1).commits:
            pytest.skip("it has no commit")
        seen = Seen()

        @self.for_all(40, st.data(), st.integers(0, 2**20))
        def holds(data: Any, seed: int) -> None:
            seqs = self.sequences(data, 3)
            self._check_commit(seqs, np.random.default_rng(seed), seen)

        seen.require(twice=10)
        if not seen["changed"]:  # a parameter without known values may be the one that turns the state on
            self._skip_unknown()
        assert seen["changed"], "no commit changes a column: its tokens are lost, or stored where no fork copies them"

    def _check_commit(self, seqs: list[SampledSeq], rng: np.random.Generator, seen: Seen) -> None:
        """Compare one commit of several tokens with as many commits of one token, for three rows."""
        slots = [2, 0, 3]
        k = int(rng.integers(2, MOST_COMMITTED + 1))
        favourites = [3, 5, self.vocab - 1]
        tokens = rng.integers(0, self.vocab, (3, k))
        some = int(rng.integers(1, k))
        count = rng.permutation([0, some, k])
        tokens = np.where(rng.random((3, k)) < 0.5, rng.choice(favourites, (3, k)), tokens)
        logits = stack_logits(seqs)
        together = Stage(self, 4, max_len=MAX_LEN + MOST_COMMITTED)
        single = Stage(self, 4, max_len=MAX_LEN + MOST_COMMITTED)
        for stage in (together, single):
            stage.join(slots, seqs)
            # a draw may store state that the following commit reads, so one is made
            self.output(stage, slots, logits)
        before = together.columns(slots)
        accepted = np.arange(k) < count[:, None]
        rejected = rng.choice([0, 5, self.vocab - 1], (3, k))
        passed = np.where(accepted, tokens, rejected)
        variant = together.variant(np.array(slots))
        together.accept(slots, passed, count, variant=variant)
        for i in range(k):
            on = [j for j in range(3) if count[j] > i]
            on_slots = [slots[j] for j in on]
            single.accept(on_slots, tokens[on, i : i + 1])
        want = single.columns(slots)
        for name, column in together.columns(slots).items():
            for j, s in enumerate(seqs):
                label = f"{s}, then tokens {passed[j].tolist()} with count {count[j]}: column {name!r} is"
                seen["changed"] += not torch.equal(want[name][j], before[name][j])
                assert torch.equal(column[j], want[name][j]), f"{label} {column[j]}, one by one {want[name][j]}"
        got = self.output(together, slots, logits)
        want_out = self.output(single, slots, logits)
        for j, s in enumerate(seqs):
            label = f"after {count[j]} of the tokens {passed[j].tolist()} at once, it"
            self._same(got[j], want_out[j], s, label)
        kept = []
        for row, n in zip(tokens.tolist(), count.tolist(), strict=True):
            kept.append(row[:n])
        seen["twice"] += any(len(set(row)) < len(row) for row in kept)

    @since(1, 0)
    def test_positions_of_one_row_are_served_together(self) -> None:
        """Check a step with a row and its drafts, if ``multi_position`` is claimed.

        Several rows of the step have one slot and consecutive positions, each with the history before its own
        position.  The results must equal those of one row at a time with accepted drafts.
        """
        self.need("multi_position")
        seen = Seen()

        @self.for_all(30, st.data(), st.integers(0, 2**20))
        def holds(data: Any, seed: int) -> None:
            (s,) = self.sequences(data, 1)
            rng = np.random.default_rng(seed)
            k = data.draw(st.integers(1, 4))
            choices = [3, 5, *s.prompt[:3], self.vocab - 1]
            tokens = rng.choice(choices, k)
            rows = [s.logits.roll(i) for i in range(k + 1)]
            logits = torch.stack(rows)
            together = Stage(self, 3, max_len=MAX_LEN + 8)
            single = Stage(self, 3, max_len=MAX_LEN + 8)
            for stage in (together, single):
                stage.join([1], [s])
            start = int(together.position[1])
            drafts = torch.tensor(tokens, dtype=torch.int32)
            together.tokens[1, start : start + k] = drafts
            together.ahead = np.arange(k + 1)
            got = self.output(together, [1] * (k + 1), logits)
            for i in range(k + 1):
                want = self.output(single, [1], logits[i : i + 1])[0]
                self._same(got[i], want, s, f"behind the drafts {tokens[:i].tolist()}, in one step with them, it")
                if i < k:
                    single.accept([1], [[int(tokens[i])]])
            seen["drafts"] += k

        seen.require(drafts=20)

    @since(1, 0)
    def test_a_fork_goes_on_as_its_source(self) -> None:
        """Check that after a fork, which copies the columns, both sequences continue as if each had been alone."""

        @self.for_all(20, st.data(), st.integers(0, self.vocab - 1), st.integers(0, self.vocab - 1))
        def holds(data: Any, x: int, y: int) -> None:
            (s,) = self.sequences(data, 1)
            stage = Stage(self, 3, garbage=7)
            stage.join([1], [s])
            stage.fork(1, 0)
            twins = self.output(stage, [0, 1], s.logits.repeat(2, 1))
            self._same(twins[0], self.alone(s), s, "as a fork, it")
            stage.accept([1, 0], [[x], [y]])
            got = self.output(stage, [1, 0], s.logits.repeat(2, 1))
            kept = any(column.kept for column in stage.state.specs.values())
            for j, token in enumerate((x, y)):
                label = "after a fork" if j else "after it was forked"
                longer = replace(s, output=(*s.output, token))
                single = Stage(self, 1)
                single.join([0], [s])
                self.output(single, [0], s.logits[None])
                single.accept([0], [[token]])
                want = self.output(single, [0], s.logits[None])[0]
                self._same(got[j], want, longer, label)
                if not kept:
                    self._same(got[j], self.alone(longer), longer, label)

    @since(1, 1)
    def test_a_preempted_row_goes_on_as_if_it_had_stayed(self) -> None:
        """Check a sequence that is preempted: it leaves its slot between two steps and returns in another slot.

        The columns there hold the fill, the values of ``bind`` and the effect of ``commit`` on its tokens; of the old
        columns only the ``kept`` ones are restored.  Other state that a draw stored is lost.
        """

        @self.for_all(30, st.data(), st.integers(0, 2**20), st.integers(1, 4))
        def holds(data: Any, seed: int, leaves: int) -> None:
            (s,), rng = self.sequences(data, 1), np.random.default_rng(seed)
            s = replace(s, output=())
            stages = [Stage(self, 3, garbage=5) for _ in range(2)]
            slots = [1, 1]
            came = ()
            for stage in stages:
                stage.join([1], [s])
            for step in range(6):
                if step == leaves:
                    saved = stages[1].state.save(1)
                    slots = [1, 2]
                    stages[1].poison([1])
                    stages[1].join([2], [replace(s, output=came)])
                    stages[1].state.restore(2, saved)
                values = rng.normal(0, 2, (1, self.vocab))
                logits = torch.tensor(values, dtype=torch.float32)
                a = self.output(stages[0], [slots[0]], logits)
                b = self.output(stages[1], [slots[1]], logits)
                grown = replace(s, output=came)
                self._same(b[0], a[0], grown, f"in step {step}, preempted before step {leaves}, it")
                if a.ndim == 1:
                    token = int(a[0])
                else:
                    token = int(rng.integers(0, self.vocab))
                for stage, slot in zip(stages, slots, strict=True):
                    stage.accept([slot], [[token]])
                came = (*came, token)

    @since(1, 0)
    def test_a_graph_replays_on_new_data(self) -> None:
        """Check that a replay of a captured ``apply`` or ``draw`` works on the current values of its tensors."""
        self.need("graph_safe")
        if self.place() != "cuda":
            pytest.skip("CUDA graphs need a GPU")

        @self.for_all(5, st.data())
        def holds(data: Any) -> None:
            self._check_replay([self.sequences(data, 4) for _ in range(2)])

    def _check_replay(self, batches: Sequence[list[SampledSeq]]) -> None:
        """Capture a call with the values of the second batch, replay it with those of both, and compare with calls
        outside a graph.
        """
        slots = np.array([2, 0, 3, 5])
        stage = Stage(self, 6)
        on = np.ones(4, bool)
        variant = 0
        for seqs in batches:
            stage.join(slots, seqs)
            on &= stage.state.active[slots] | (self.kind == "sampler")
            variant |= stage.variant(slots)
        if not on.any():
            return
        at = np.flatnonzero(on)
        rows = stage.rows(slots[on], variant, MAX_LEN)
        logits = [stack_logits([seqs[i] for i in at]).cuda() for seqs in batches]
        source = logits[1].clone()
        worker = stage.worker
        columns = stage.state.columns
        with torch.inference_mode():
            got, replay = captured(lambda: self.call(worker, source.clone(), rows, columns))
            for seqs, now in zip(batches, logits, strict=True):
                stage.join(slots, seqs)
                fresh = stage.rows(slots[on], variant, MAX_LEN)
                for name in ("position", "prompt", "seed", "sample"):
                    getattr(rows, name).copy_(getattr(fresh, name))
                source.copy_(now)
                replay()
                want = self.call(self.make(self.vocab), now.clone(), fresh, columns)
                for j, i in enumerate(at):
                    self._same(got[j], want[j], seqs[i], "replayed from a graph, it")
