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
from .drawing import whole
from .sampling_data import Noted, keywords_of, make_sequences, unlike
from .sampling_rows import (
    GARBAGE,
    MAX_LEN,
    SCHEDULES,
    STANDARD,
    SampledSeq,
    Slots,
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
SEEDS = st.integers(0, 2**20)
Columns = Mapping[str, Tensor]


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

    def output(self, stage: Stage, slots: Slots, logits: Tensor, max_position: int = 0) -> Tensor:
        """Return the plug-in's results for logits [N, V]: changed logits of a processor, or tokens of a sampler."""
        raise NotImplementedError

    def call(self, worker: Any, logits: Tensor, rows: Rows, columns: Columns) -> Tensor:
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
        stage = self._stage_with(s, 0, 1, vocab=vocab, **how)
        return self._output_of(stage, 0, s.logits)

    def _stage_with(self, s: SampledSeq, slot: int, slots: int, **how: Any) -> Stage:
        """Return a stage with a sequence in one of its slots; ``how`` has further arguments of ``Stage``."""
        stage = Stage(self, slots, **how)
        stage.join([slot], [s])
        return stage

    def _output_of(self, stage: Stage, slot: int, logits: Tensor, max_position: int = 0) -> Tensor:
        """Return the output of a single row with logits [V]."""
        outputs = self.output(stage, [slot], logits[None], max_position)
        return outputs[0]

    def exercise(self, instance: Any) -> Any:
        row = check_row_type(self.bound(instance, SamplingParams()), "")
        if row is None:
            bound = None
        else:
            bound = (row.variant, str(row))
        return sorted(instance.reads), sorted(instance.columns()), bound

    def used_stage(self, instance: Any) -> Stage:
        """Return a stage with a sequence in slot 1, in which ``instance`` both binds requests and works on rows."""
        logits = torch.zeros(self.vocab)
        seq = SampledSeq(SamplingParams(), (1, 2, 3), (4, 4), logits)
        return self._stage_with(seq, 1, 2, instance=instance)

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
            fill = column.fill
            dtype = getattr(torch, column.dtype, None)
            assert isinstance(dtype, torch.dtype), f"column {name!r}: torch has no dtype {column.dtype!r}"
            filled = torch.full(column.shape, fill, dtype=dtype).double()
            error = (filled - fill).abs()
            near = error <= 1e-2 * abs(fill)
            same = math.isinf(fill) or bool(near.all())
            assert same, f"column {name!r}: {column.dtype} cannot hold fill={fill}"

    @since(1, 0)
    def test_bind_gives_values_for_the_declared_columns(self) -> None:
        """Check that ``bind`` is a function of the parameters and the prompt.

        The values that it returns must fit the names, shapes and ranges of the columns.
        """

        lengths = st.integers(1, MAX_LEN - 1)

        @self.for_all(60, st.data(), lengths)
        def holds(data: Any, prompt_len: int) -> None:
            requested = data.draw(self.keywords(self.vocab))

            def bound(instance: Any) -> Any:
                return self.bound(instance, SamplingParams.make(**requested), prompt_len)

            first = self.make(self.vocab)
            second = self.make(self.vocab)
            row = bound(first)
            check_row(row, first.columns(), str(requested))
            for instance in (first, second):
                again = bound(instance)
                assert same_rows(row, again), f"bind({requested}) returned {row}, and {again} when it was called again"

    @since(1, 0)
    def test_bad_values_are_refused_by_name(self) -> None:
        """Check that ``bind`` refuses a bad value with ``RequestError(message, parameter)``.

        So a client learns which parameter is wrong.  Another exception, or a row that does not fit the columns, fails
        the test.
        """
        instance = self.make(self.vocab)
        standard = self.reads & set(STANDARD)
        for name in sorted(standard):
            for value in wrong_values(name, self.vocab):
                self._check_refusal(instance, name, {name: value}, True)
        for requested in self.wrong_params(self.vocab):
            names = requested.get("extra") or requested
            name = next(iter(names))
            self._check_refusal(instance, name, requested, True)
        for name in sorted(self.reads - PROCESSED):
            for value in GARBAGE:
                extra = {name: value}
                self._check_refusal(instance, name, {"extra": extra}, False)

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
        other = {}
        for name, value in set_all.items():
            if name not in self.reads:
                other[name] = value

        @self.for_all(20, st.data())
        def holds(data: Any) -> None:
            requested = data.draw(self.keywords(self.vocab))
            params = SamplingParams.make(**requested)
            plain_row = self.bound(instance, params)
            plain = check_row_type(plain_row, str(requested))
            extra = {**requested.get("extra", {}), "no_one_reads_this": 1.0}
            keywords = {**other, **requested, "extra": extra}
            passed = SamplingParams.make(**keywords)
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
            number = whole(data, 2, 6)
            seqs = self.sequences(data, number)
            crowd = []
            for s in seqs[1:]:
                others = unlike(seqs[0].logits)
                crowd += [replace(s, logits=x) for x in rng.sample(others, 2)]
            if rng.random() < 0.7:
                seqs = [*seqs, *crowd]
            many = rng.random() < 0.25
            if many:
                seqs += [replace(rng.choice(crowd), seed=i) for i in range(18)]
            size = len(seqs) + 2
            stage = Stage(self, size)
            slots = rng.sample(range(size), len(seqs))
            stage.join(slots, seqs)
            rows = len(seqs) if many else rng.randint(2, len(seqs))
            order = rng.sample(range(len(seqs)), rows)
            seen["order"] += order != sorted(order)
            seen["many"] += rows > 16
            self._check_beside(stage, slots, seqs, order)

        self.meet(seen, order=5, many=2)

    def _check_beside(self, stage: Stage, slots: list[int], seqs: list[SampledSeq], order: list[int]) -> None:
        """Compare rows of a step, given by their order, with the same rows alone."""
        logits = stack_logits([seqs[i] for i in order])
        got = self.output(stage, [slots[i] for i in order], logits)
        for j, i in enumerate(order[:MOST_ALONE]):
            what = f"as row {j} of {len(order)} (slot {slots[i]}), beside {len(order) - 1} others, it"
            want = self.alone(seqs[i])
            self._same(got[j], want, seqs[i], what)

    @since(1, 0)
    def test_stale_history_and_other_slots_do_not_matter(self) -> None:
        """Check that only the history before ``position`` counts.

        Entries after it, the contents of other slots, the slot of a row and the size of ``max_position`` may not
        change a result.
        """
        seeds = st.integers(1, 2**20)
        slots = st.integers(0, 4)

        @self.for_all(40, st.data(), seeds, slots)
        def holds(data: Any, garbage: int, slot: int) -> None:
            (s,) = self.sequences(data, 1)
            stage = self._stage_with(s, slot, 5, garbage=garbage)
            want = self.alone(s)
            for most in (0, MAX_LEN):
                got = self._output_of(stage, slot, s.logits, most)
                reach = f"max_position {most or 'exact'}"
                self._same(got, want, s, f"in slot {slot} of 5, with garbage behind its history, {reach}, it")

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
            drawn = [[5], [6]]
            stage.accept([1, 4], drawn)
            for name, column in stage.columns(range(6)).items():
                old = before[name]
                changed = [i for i in (0, 2, 3, 5) if not torch.equal(column[i], old[i])]
                assert not changed, f"column {name!r} of slots {changed} changed in a step with the rows of slots 1, 4"

    # ---- state ---------------------------------------------------------------------------------------------------

    def _life(self, seqs: Sequence[SampledSeq], seed: int, **how: Any) -> list[Tensor]:
        """Return the outputs of three steps of some sequences, and their columns afterwards."""
        rng = np.random.default_rng(seed)
        n = len(seqs)
        stage = Stage(self, n + 1, **how)
        slots = list(range(n, 0, -1))
        stage.join(slots, seqs)
        out = []
        for _ in range(3):
            logits = normal_logits(rng, 3, n, self.vocab)
            out.append(self.output(stage, slots, logits))
            drawn = rng.integers(0, self.vocab, (n, 1))
            stage.accept(slots, drawn)
        columns = stage.columns(slots)
        return [*out, *columns.values()]

    @since(1, 0)
    def test_state_is_in_the_columns_alone(self) -> None:
        """Check that all state of a sequence is in the columns, and none in the instance.

        The engine makes one instance that binds and another that works, perhaps in another process.  State in ``self``
        would be lost, or used for the wrong row.
        """

        @self.for_all(20, st.data(), SEEDS)
        def holds(data: Any, seed: int) -> None:
            seqs = self.sequences(data, 3)
            one = self.make(self.vocab)
            fused = self._life(seqs, seed, instance=one)
            fresh = self._life(seqs, seed, fresh=True)
            pairs = zip(fused, fresh, strict=True)
            for step, (a, b) in enumerate(pairs):
                differ = [i for i in range(len(seqs)) if not torch.equal(a[i], b[i])]
                place = f"step {step}" if step < 3 else f"column {step - 3} at the end"
                rows = "; ".join(str(seqs[j]) for j in differ)
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

        self.meet(seen, twice=10)
        if not seen["changed"]:  # a parameter without known values may be the one that turns the state on
            self._skip_unknown()
        assert seen["changed"], "no commit changes a column: its tokens are lost, or stored where no fork copies them"

    def _check_commit(self, seqs: list[SampledSeq], rng: np.random.Generator, seen: Seen) -> None:
        """Compare one commit of several tokens with as many commits of one token, for three rows."""
        slots = [2, 0, 3]
        k = int(rng.integers(2, MOST_COMMITTED + 1))
        shape = (3, k)
        favourites = [3, 5, self.vocab - 1]
        tokens = rng.integers(0, self.vocab, shape)
        some = int(rng.integers(1, k))
        count = rng.permutation([0, some, k])
        favoured = rng.random(shape) < 0.5
        tokens = np.where(favoured, rng.choice(favourites, shape), tokens)
        logits = stack_logits(seqs)
        together = Stage(self, 4, max_len=MAX_LEN + MOST_COMMITTED)
        single = Stage(self, 4, max_len=MAX_LEN + MOST_COMMITTED)
        for stage in (together, single):
            stage.join(slots, seqs)
            # a draw may store state that the following commit reads, so one is made
            self.output(stage, slots, logits)
        before = together.columns(slots)
        accepted = np.arange(k) < count[:, None]
        rejected = rng.choice([0, 5, self.vocab - 1], shape)
        passed = np.where(accepted, tokens, rejected)
        variant = together.variant(np.array(slots))
        together.accept(slots, passed, count, variant=variant)
        for i in range(k):
            on = np.flatnonzero(count > i)
            on_slots = [slots[j] for j in on]
            single.accept(on_slots, tokens[on, i : i + 1])
        want = single.columns(slots)
        for name, column in together.columns(slots).items():
            for j, s in enumerate(seqs):
                label = f"{s}, then tokens {passed[j].tolist()} with count {count[j]}: column {name!r} is"
                old = before[name][j]
                expected = want[name][j]
                seen["changed"] += not torch.equal(expected, old)
                assert torch.equal(column[j], expected), f"{label} {column[j]}, one by one {expected}"
        got = self.output(together, slots, logits)
        want_out = self.output(single, slots, logits)
        for j, s in enumerate(seqs):
            label = f"after {count[j]} of the tokens {passed[j].tolist()} at once, it"
            self._same(got[j], want_out[j], s, label)
        kept = [tokens[j, :n].tolist() for j, n in enumerate(count)]
        seen["twice"] += any(len(set(row)) < len(row) for row in kept)

    @since(1, 0)
    def test_positions_of_one_row_are_served_together(self) -> None:
        """Check a step with a row and its drafts, if ``multi_position`` is claimed.

        Several rows of the step have one slot and consecutive positions, each with the history before its own
        position.  The results must equal those of one row at a time with accepted drafts.
        """
        self.need("multi_position")
        seen = Seen()

        @self.for_all(30, st.data(), SEEDS)
        def holds(data: Any, seed: int) -> None:
            (s,) = self.sequences(data, 1)
            rng = np.random.default_rng(seed)
            k = whole(data, 1, 4)
            choices = [3, 5, *s.prompt[:3], self.vocab - 1]
            tokens = rng.choice(choices, k)
            logits = torch.stack([s.logits.roll(i) for i in range(k + 1)])
            together = self._stage_with(s, 1, 3, max_len=MAX_LEN + 8)
            single = self._stage_with(s, 1, 3, max_len=MAX_LEN + 8)
            start = int(together.position[1])
            end = start + k
            drafts = torch.tensor(tokens, dtype=torch.int32)
            together.tokens[1, start:end] = drafts
            together.ahead = np.arange(k + 1)
            rows = [1] * (k + 1)
            got = self.output(together, rows, logits)
            for i, row in enumerate(logits):
                want = self._output_of(single, 1, row)
                self._same(got[i], want, s, f"behind the drafts {tokens[:i].tolist()}, in one step with them, it")
                if i < k:
                    token = int(tokens[i])
                    single.accept([1], [[token]])
            seen["drafts"] += k

        self.meet(seen, drafts=20)

    @since(1, 0)
    def test_a_fork_goes_on_as_its_source(self) -> None:
        """Check that after a fork, which copies the columns, both sequences continue as if each had been alone."""
        ids = st.integers(0, self.vocab - 1)

        @self.for_all(20, st.data(), ids, ids)
        def holds(data: Any, x: int, y: int) -> None:
            (s,) = self.sequences(data, 1)
            stage = self._stage_with(s, 1, 3, garbage=7)
            stage.fork(1, 0)
            logits = s.logits.repeat(2, 1)
            twins = self.output(stage, [0, 1], logits)
            alone = self.alone(s)
            self._same(twins[0], alone, s, "as a fork, it")
            stage.accept([1, 0], [[x], [y]])
            source, fork = self.output(stage, [1, 0], logits)
            self._check_grown(source, s, x, "after it was forked")
            self._check_grown(fork, s, y, "after a fork")

    def _check_grown(self, got: Tensor, s: SampledSeq, token: int, label: str) -> None:
        """Compare the output of a sequence after one more token with that of the sequence in a stage of its own."""
        single = self._stage_with(s, 0, 1)
        self._output_of(single, 0, s.logits)
        single.accept([0], [[token]])
        want = self._output_of(single, 0, s.logits)
        longer = replace(s, output=(*s.output, token))
        self._same(got, want, longer, label)
        columns = single.state.specs.values()
        if not any(column.kept for column in columns):
            self._same(got, self.alone(longer), longer, label)

    @since(1, 1)
    def test_a_preempted_row_goes_on_as_if_it_had_stayed(self) -> None:
        """Check a sequence that is preempted: it leaves its slot between two steps and returns in another slot.

        The columns there hold the fill, the values of ``bind`` and the effect of ``commit`` on its tokens; of the old
        columns only the ``kept`` ones are restored.  Other state that a draw stored is lost.
        """
        leaving = st.integers(1, 4)

        @self.for_all(30, st.data(), SEEDS, leaving)
        def holds(data: Any, seed: int, leaves: int) -> None:
            (s,) = self.sequences(data, 1)
            rng = np.random.default_rng(seed)
            s = replace(s, output=())
            stays = self._stage_with(s, 1, 3, garbage=5)
            moves = self._stage_with(s, 1, 3, garbage=5)
            slot = 1
            grown = s
            for step in range(6):
                if step == leaves:
                    saved = moves.state.save(1)
                    slot = 2
                    moves.poison([1])
                    moves.join([2], [grown])
                    moves.state.restore(2, saved)
                logits = normal_logits(rng, 2, self.vocab)
                a = self._output_of(stays, 1, logits)
                b = self._output_of(moves, slot, logits)
                self._same(b, a, grown, f"in step {step}, preempted before step {leaves}, it")
                token = int(rng.integers(0, self.vocab)) if a.ndim else int(a)
                stays.accept([1], [[token]])
                moves.accept([slot], [[token]])
                grown = replace(s, output=(*grown.output, token))

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
            joined = stage.state.active[slots]
            on &= joined | (self.kind == "sampler")
            variant |= stage.variant(slots)
        if not on.any():
            return
        at = np.flatnonzero(on)
        rows = stage.rows(slots[on], variant, MAX_LEN)
        logits = []
        for seqs in batches:
            rows_on = stack_logits([seqs[i] for i in at])
            logits.append(rows_on.cuda())
        source = logits[1].clone()
        worker = stage.worker
        columns = stage.state.columns
        with torch.inference_mode():
            got, replay = captured(lambda: self.call(worker, source.clone(), rows, columns))
            for seqs, now in zip(batches, logits, strict=True):
                stage.join(slots, seqs)
                fresh = stage.rows(slots[on], variant, MAX_LEN)
                for name in ("position", "prompt", "seed", "sample"):
                    tensor = getattr(rows, name)
                    tensor.copy_(getattr(fresh, name))
                source.copy_(now)
                replay()
                other = self.make(self.vocab)
                want = self.call(other, now.clone(), fresh, columns)
                for j, i in enumerate(at):
                    self._same(got[j], want[j], seqs[i], "replayed from a graph, it")
