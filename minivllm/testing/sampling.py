"""What holds for processors and samplers alike: parameters, rows that know nothing of each other, state in columns."""

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
    same_rows,
    wrong_values,
)
from .spec import SpecConformance

MOST_ALONE = 5  # rows of a step that are compared with themselves alone
MOST_COMMITTED = 12  # tokens that a row gets at once


class SamplingConformance(DeclaringOnRows, SpecConformance):
    """The kit knows values and references of the standard sampling parameters; a plug-in that reads parameters of its
    own overrides ``params`` (what to try) and ``wrong_params`` (what must be refused)."""

    vocab = 67  # width of the logits: not a multiple of 32

    def params(self, vocab: int) -> Sequence[Mapping[str, Any]]:
        """Keywords of SamplingParams that exercise the plug-in's own parameters: ``[{"mine": 2}]``."""
        return []

    def wrong_params(self, vocab: int) -> Sequence[Mapping[str, Any]]:
        """Keywords, one own parameter each, that ``bind`` must refuse."""
        return []

    def output(self, stage: Stage, slots: Sequence[int], logits: Tensor, max_position: int = 0) -> Tensor:
        """What the plug-in makes of logits [N, V], a row each: logits of a processor, tokens of a sampler."""
        raise NotImplementedError

    def call(self, worker: Any, logits: Tensor, rows: Rows, columns: Mapping[str, Tensor]) -> Tensor:
        """The bare call on the device; returns the tensor that was written."""
        raise NotImplementedError

    def make(self, vocab: int, max_len: int = MAX_LEN) -> Any:
        return self.build(SamplingContext(vocab, max_len, (2,)))

    def own_logits(self, ids: Sequence[int], vocab: int) -> Tensor:
        """Return logits f32 [V] of the own model of a processor behind some tokens."""
        return torch.tensor(np.random.default_rng([vocab, *ids]).normal(0, 3, vocab), dtype=torch.float32)

    def context(self) -> tuple[Any, ...]:
        return (SamplingContext(self.vocab, MAX_LEN, (2,)),)

    @property
    def reads(self) -> frozenset[str]:
        return self.make(self.vocab).reads

    def unknown(self) -> list[str]:
        """Parameters that it reads and that neither the kit nor ``params`` has values for."""
        own = {name for p in self.params(self.vocab) for name in (*p, *p.get("extra", ()))}
        return sorted(self.reads - own - set(STANDARD))

    def keywords(self, vocab: int) -> st.SearchStrategy[dict[str, Any]]:
        """Keywords of SamplingParams that the plug-in reads.  A bias does not come with penalties: which of them is
        first is not laid down."""
        found = keywords_of(self.reads, self.params(vocab), vocab)
        if found is None:
            pytest.skip(f"no values known of {', '.join(self.unknown())}: override params()")
        return found

    def sequences(self, data: Any, n: int, vocab: int = 0) -> list[SampledSeq]:
        """n sequences with parameters that the plug-in reads, tokens that repeat, and some logits of -inf and 0."""
        return make_sequences(data, n, vocab or self.vocab, self.keywords)

    def alone(self, s: SampledSeq, vocab: int = 0, **how: Any) -> Tensor:
        """The output of one sequence in an engine of its own."""
        stage = Stage(self, 1, vocab=vocab, **how)
        stage.join([0], [s])
        return self.output(stage, [0], s.logits[None])[0]

    def exercise(self, instance: Any) -> Any:
        row = check_row_type(self.bound(instance, SamplingParams()), "")
        return sorted(instance.reads), sorted(instance.columns()), None if row is None else (row.variant, str(row))

    def _same(self, got: Tensor, want: Tensor, s: SampledSeq, what: str) -> None:
        if not torch.equal(got, want):
            at = (got != want).nonzero().flatten().tolist()
            shown = f"at tokens {at[:8]}: {got[at[:8]].tolist()}, not {want[at[:8]].tolist()}" if got.ndim else ""
            pytest.fail(f"{s}: {what} gives {shown or f'token {got.item()}, not {want.item()}'}", pytrace=False)

    # ---- parameters ----------------------------------------------------------------------------------------------

    @since(1, 0)
    def test_it_reads_parameters_that_exist(self) -> None:
        """``reads`` names fields of SamplingParams that are for processors and samplers, or own names in ``extra``; a
        misspelt one means that no request reaches the plug-in."""
        assert isinstance(self.reads, (set, frozenset)), f"reads is {self.reads!r}: want a frozenset of names"
        for name in sorted(self.reads):
            assert isinstance(name, str), f"reads has {name!r}: want names"
            assert name in PROCESSED or name not in NAMES, f"reads has {name!r}, which the engine itself serves"
            near = difflib.get_close_matches(name, PROCESSED, 1, 0.85) if name not in NAMES | self.spec.reads else []
            assert not near, f"reads has {name!r}, which is no sampling parameter: did you mean {near[0]!r}?"
        if unknown := self.unknown():
            pytest.skip(f"no values known of {', '.join(unknown)}: override params()")

    @since(1, 0)
    def test_columns_can_be_made(self) -> None:
        """``columns()`` is the same each time, of dtypes that torch has, with fills that they can hold."""
        first, second = self.make(self.vocab).columns(), self.make(self.vocab).columns()
        assert dict(first) == dict(second), f"columns() differs between two instances: {first} and {second}"
        for name, column in first.items():
            dtype = getattr(torch, column.dtype, None)
            assert isinstance(dtype, torch.dtype), f"column {name!r}: torch has no dtype {column.dtype!r}"
            filled = torch.full(column.shape, column.fill, dtype=dtype).double()
            same = bool((filled - column.fill).abs().le(1e-2 * abs(column.fill)).all()) or math.isinf(column.fill)
            assert same, f"column {name!r}: {column.dtype} cannot hold fill={column.fill}"

    @since(1, 0)
    def test_bind_gives_values_for_the_declared_columns(self) -> None:
        """A function of the parameters and the prompt; the names, shapes and ranges are the columns'."""

        @self.for_all(60, st.data(), st.integers(1, MAX_LEN - 1))
        def holds(data: Any, prompt_len: int) -> None:
            asked = data.draw(self.keywords(self.vocab))
            one, two = self.make(self.vocab), self.make(self.vocab)
            row = self.bound(one, SamplingParams.make(**asked), prompt_len)
            check_row(row, one.columns(), str(asked))
            for again in (one, two):
                other = self.bound(again, SamplingParams.make(**asked), prompt_len)
                assert same_rows(row, other), f"bind({asked}) gave {row}, and {other} when it was asked again"

    @since(1, 0)
    def test_bad_values_are_refused_by_name(self) -> None:
        """``RequestError(message, parameter)``, so that a client learns which parameter is wrong; never another
        exception, never a row that does not fit its columns."""
        made = self.make(self.vocab)
        wrong = [(n, {n: v}) for n in sorted(self.reads & set(STANDARD)) for v in wrong_values(n, self.vocab)]
        wrong += [(next(iter(p.get("extra") or p)), dict(p)) for p in self.wrong_params(self.vocab)]
        for name, asked in wrong:
            try:
                row = self.bound(made, SamplingParams.make(**asked))
            except RequestError as e:
                assert e.param == name, f"bind({asked}): RequestError names parameter {e.param!r}: want {name!r}"
            except Exception as e:
                pytest.fail(f"bind({asked}) raised {type(e).__name__}: {e}; want a RequestError", pytrace=False)
            else:
                pytest.fail(f"bind({asked}) gave {row}: want a RequestError that names {name!r}", pytrace=False)
        for name in sorted(self.reads - PROCESSED):
            for value in GARBAGE:
                asked = {"extra": {name: value}}
                try:
                    check_row(
                        self.bound(made, SamplingParams.make(**asked)),
                        made.columns(),
                        str(asked),
                    )
                except RequestError as e:
                    assert e.param == name, f"bind({asked}): RequestError names parameter {e.param!r}: want {name!r}"
                except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as e:
                    pytest.fail(f"bind({asked}) raised {type(e).__name__}: {e}; want a RequestError", pytrace=False)

    @since(1, 0)
    def test_a_parameter_that_it_does_not_read_has_no_effect(self) -> None:
        """Else the engine would refuse, or give to another plug-in, what this one acts on."""
        set_all = {
            "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.2, "repetition_penalty": 1.5,
            "presence_penalty": 1.0, "frequency_penalty": 1.0, "logit_bias": {1: 5.0}, "bad_words": [[1]],
            "allowed_token_ids": [1], "no_repeat_ngram_size": 2, "temperature_schedule": SCHEDULES[0],
            "typical_p": 0.5, "mirostat_tau": 2.0, "encoder_repetition_penalty": 2.0,
        }  # fmt: skip
        made, other = self.make(self.vocab), {k: v for k, v in set_all.items() if k not in self.reads}

        @self.for_all(20, st.data())
        def holds(data: Any) -> None:
            asked = data.draw(self.keywords(self.vocab))
            plain = check_row_type(self.bound(made, SamplingParams.make(**asked)), str(asked))
            extra = {**asked.get("extra", {}), "no_one_reads_this": 1.0}
            row = self.bound(made, SamplingParams.make(**{**other, **asked, "extra": extra}))
            assert same_rows(plain, row), (
                f"bind({asked}) gave {plain}, and {row} with {sorted(other)} set, which `reads` does not name"
            )
            looked = Noted((params := SamplingParams.make(**asked)).extra)
            self.bound(made, replace(params, extra=looked))
            hidden = sorted(looked.names - self.reads)
            assert not hidden, (
                f"bind({asked}) looks for {', '.join(hidden)} in extra, which `reads` does not name: a request that "
                "sets it is refused, so declare it there"
            )

    # ---- rows ----------------------------------------------------------------------------------------------------

    @since(1, 0)
    def test_a_row_does_not_depend_on_the_rows_beside_it(self) -> None:
        """Alone or in any batch, few or many, in any order, whatever the others' parameters, variant bits, histories
        and logits (peaked, even, larger, smaller, nearly all -inf): the same bits."""
        seen = Seen()

        @self.for_all(40, st.data(), st.integers(0, 2**32))
        def holds(data: Any, seed: int) -> None:
            rng = random.Random(seed)
            seqs = self.sequences(data, data.draw(st.integers(2, 6)))
            crowd = [replace(s, logits=x) for s in seqs[1:] for x in rng.sample(unlike(seqs[0].logits), 2)]
            seqs = [*seqs, *crowd] if rng.random() < 0.7 else seqs
            if many := rng.random() < 0.25:
                seqs += [replace(rng.choice(crowd), seed=i) for i in range(18)]
            stage, slots = Stage(self, len(seqs) + 2), rng.sample(range(len(seqs) + 2), len(seqs))
            stage.join(slots, seqs)
            order = rng.sample(range(len(seqs)), len(seqs) if many else rng.randint(2, len(seqs)))
            got = self.output(stage, [slots[i] for i in order], torch.stack([seqs[i].logits for i in order]))
            seen["order"] += order != sorted(order)
            seen["many"] += len(order) > 16
            for j, i in list(enumerate(order))[:MOST_ALONE]:
                what = f"as row {j} of {len(order)} (slot {slots[i]}), beside {len(order) - 1} others, it"
                self._same(got[j], self.alone(seqs[i]), seqs[i], what)

        seen.require(order=5, many=2)

    @since(1, 0)
    def test_stale_history_and_other_slots_do_not_matter(self) -> None:
        """A history counts up to ``position``; what lies behind, what other slots hold, in which slot a row is, and how
        far ``max_position`` reaches, is chance."""

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
        """Columns of slots that are not in the step belong to others, and histories and the rows' own numbers are the
        engine's."""

        @self.for_all(20, st.data(), st.integers(1, 2**20))
        def holds(data: Any, garbage: int) -> None:
            seqs = self.sequences(data, 3)
            stage = Stage(self, 6, garbage=garbage)
            stage.join([4, 1, 3], seqs)
            stage.poison([0, 2, 5])
            before, tokens = stage.columns(range(6)), stage.tokens.clone()
            self.output(stage, [1, 4], torch.stack([seqs[1].logits, seqs[0].logits]))
            assert torch.equal(stage.tokens, tokens), "wrote into rows.tokens, the engine's token history"
            stage.accept([1, 4], [[5], [6]])
            for name, column in stage.columns(range(6)).items():
                touched = [i for i in (0, 2, 3, 5) if not torch.equal(column[i], before[name][i])]
                assert not touched, f"column {name!r} of slots {touched} changed in a step with the rows of slots 1, 4"

    # ---- state ---------------------------------------------------------------------------------------------------

    def _life(self, seqs: Sequence[SampledSeq], rng: np.random.Generator, **how: Any) -> list[Tensor]:
        """Outputs and columns over some steps."""
        stage, slots = Stage(self, len(seqs) + 1, **how), list(range(len(seqs), 0, -1))
        stage.join(slots, seqs)
        out = []
        for _ in range(3):
            logits = torch.tensor(rng.normal(0, 3, (len(seqs), self.vocab)), dtype=torch.float32)
            out.append(self.output(stage, slots, logits))
            stage.accept(slots, rng.integers(0, self.vocab, (len(seqs), 1)))
        return out + list(stage.columns(slots).values())

    @since(1, 0)
    def test_state_is_in_the_columns_alone(self) -> None:
        """The engine makes one instance that binds and another, maybe in another process, that works; what is kept in
        ``self`` is lost, or given to the wrong row."""

        @self.for_all(20, st.data(), st.integers(0, 2**20))
        def holds(data: Any, seed: int) -> None:
            seqs = self.sequences(data, 3)
            fused = self._life(seqs, np.random.default_rng(seed), fused=True)
            fresh = self._life(seqs, np.random.default_rng(seed), fresh=True)
            for step, (a, b) in enumerate(zip(fused, fresh, strict=True)):
                differ = [i for i in range(len(seqs)) if not torch.equal(a[i], b[i])]
                where = f"step {step}" if step < 3 else f"column {step - 3} at the end"
                rows = "; ".join(str(seqs[j]) for j in differ)
                assert not differ, f"{where}: rows {differ} differ if another instance serves each call: {rows}"

    @since(1, 0)
    def test_commit_counts_accepted_tokens_only(self) -> None:
        """k tokens at once, some of them equal, are k commits of one; what lies beyond ``count`` was rejected; a count
        of 0 changes nothing; ``rows.variant`` says nothing here."""
        if not Stage(self, 1).commits:
            pytest.skip("it has no commit")
        seen = Seen()

        @self.for_all(40, st.data(), st.integers(0, 2**20))
        def holds(data: Any, seed: int) -> None:
            seqs, rng, slots = self.sequences(data, 3), np.random.default_rng(seed), [2, 0, 3]
            k = int(rng.integers(2, MOST_COMMITTED + 1))
            tokens, count = rng.integers(0, self.vocab, (3, k)), rng.permutation([0, int(rng.integers(1, k)), k])
            tokens = np.where(rng.random((3, k)) < 0.5, rng.choice([3, 5, self.vocab - 1], (3, k)), tokens)
            logits = torch.stack([s.logits for s in seqs])
            got, want = (Stage(self, 4, max_len=MAX_LEN + MOST_COMMITTED) for _ in range(2))
            for stage in (got, want):
                stage.join(slots, seqs)
                self.output(stage, slots, logits)  # what a draw leaves for its commit
            before = got.columns(slots)
            poisoned = np.where(np.arange(k) < count[:, None], tokens, rng.choice([0, 5, self.vocab - 1], (3, k)))
            got.accept(slots, poisoned, count, variant=got.variant(np.array(slots)))
            seen["twice"] += any(len(set(row[:n])) < n for row, n in zip(tokens.tolist(), count.tolist(), strict=True))
            for i in range(k):
                on = [j for j in range(3) if count[j] > i]
                want.accept([slots[j] for j in on], tokens[on, i : i + 1])
            a, b = got.columns(slots), want.columns(slots)
            for name, column in a.items():
                for j, s in enumerate(seqs):
                    what = f"{s}, then tokens {poisoned[j].tolist()} with count {count[j]}: column {name!r} is"
                    seen["changed"] += not torch.equal(b[name][j], before[name][j])
                    assert torch.equal(column[j], b[name][j]), f"{what} {column[j]}, one by one {b[name][j]}"
            out, again = self.output(got, slots, logits), self.output(want, slots, logits)
            for j, s in enumerate(seqs):
                self._same(out[j], again[j], s, f"after {count[j]} of the tokens {poisoned[j].tolist()} at once, it")

        seen.require(twice=10)
        if not seen["changed"] and (unknown := self.unknown()):  # what turns its state on may be one of these
            pytest.skip(f"no values known of {', '.join(unknown)}: override params()")
        assert seen["changed"], "no commit changes a column: what it hears is lost, or kept where no fork finds it"

    @since(1, 0)
    def test_positions_of_one_row_are_served_together(self) -> None:
        """With ``multi_position`` a step may hold a row and its drafts: several rows of one slot at consecutive
        positions, each with the history up to its own.  They come out as one by one, with the tokens accepted."""
        self.need("multi_position")
        seen = Seen()

        @self.for_all(30, st.data(), st.integers(0, 2**20))
        def holds(data: Any, seed: int) -> None:
            (s,), rng, k = self.sequences(data, 1), np.random.default_rng(seed), data.draw(st.integers(1, 4))
            tokens = rng.choice([3, 5, *s.prompt[:3], self.vocab - 1], k)
            logits = torch.stack([s.logits.roll(i) for i in range(k + 1)])
            together, single = (Stage(self, 3, max_len=MAX_LEN + 8) for _ in range(2))
            for stage in (together, single):
                stage.join([1], [s])
            start = int(together.position[1])
            together.tokens[1, start : start + k] = torch.tensor(tokens, dtype=torch.int32)
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
        """A fork gets copies of the columns; then each goes its own way, as if it had been alone from the start."""

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
            for j, token in enumerate((x, y)):
                own, single = replace(s, output=(*s.output, token)), Stage(self, 1)
                single.join([0], [s])
                self.output(single, [0], s.logits[None])
                single.accept([0], [[token]])
                want = self.output(single, [0], s.logits[None])[0]
                self._same(got[j], want, own, "after a fork" if j else "after it was forked")
                if not any(column.kept for column in stage.state.specs.values()):
                    self._same(got[j], self.alone(own), own, "after a fork" if j else "after it was forked")

    @since(1, 1)
    def test_a_preempted_row_goes_on_as_if_it_had_stayed(self) -> None:
        """It leaves its slot between two steps and comes back in another, whose columns hold the fill, what ``bind``
        gave, and what ``commit`` makes of its tokens; of its old columns those that are ``kept``.  What else a draw has
        left in the state is lost."""

        @self.for_all(30, st.data(), st.integers(0, 2**20), st.integers(1, 4))
        def holds(data: Any, seed: int, leaves: int) -> None:
            (s,), rng = self.sequences(data, 1), np.random.default_rng(seed)
            s = replace(s, output=())
            stages, slots, came = [Stage(self, 3, garbage=5) for _ in range(2)], [1, 1], ()
            for stage in stages:
                stage.join([1], [s])
            for step in range(6):
                if step == leaves:
                    saved, slots = stages[1].state.save(1), [1, 2]
                    stages[1].poison([1])
                    stages[1].join([2], [replace(s, output=came)])
                    stages[1].state.restore(2, saved)
                logits = torch.tensor(rng.normal(0, 2, (1, self.vocab)), dtype=torch.float32)
                a, b = (self.output(stage, [slot], logits) for stage, slot in zip(stages, slots, strict=True))
                self._same(b[0], a[0], replace(s, output=came), f"in step {step}, preempted before step {leaves}, it")
                token = int(a[0]) if a.ndim == 1 else int(rng.integers(0, self.vocab))
                for stage, slot in zip(stages, slots, strict=True):
                    stage.accept([slot], [[token]])
                came = (*came, token)

    @since(1, 0)
    def test_a_graph_replays_on_new_data(self) -> None:
        """Captured in a CUDA graph, ``apply`` or ``draw`` works on what its tensors hold at each replay."""
        self.need("graph_safe")
        if self.place() != "cuda":
            pytest.skip("CUDA graphs need a GPU")

        @self.for_all(5, st.data())
        def holds(data: Any) -> None:
            both, slots, stage = [self.sequences(data, 4) for _ in range(2)], np.array([2, 0, 3, 5]), Stage(self, 6)
            on, variant = np.ones(4, bool), 0
            for seqs in both:
                stage.join(slots, seqs)
                on &= stage.state.active[slots] | (self.kind == "sampler")
                variant |= stage.variant(slots)
            if not on.any():
                return
            at, rows = np.flatnonzero(on), stage.rows(slots[on], variant, MAX_LEN)
            logits = [torch.stack([seqs[i].logits for i in at]).cuda() for seqs in both]
            source, worker, columns = logits[1].clone(), stage.worker, stage.state.columns
            with torch.inference_mode():
                got, replay = captured(lambda: self.call(worker, source.clone(), rows, columns))
                for seqs, now in zip(both, logits, strict=True):
                    stage.join(slots, seqs)
                    fresh = stage.rows(slots[on], variant, MAX_LEN)
                    for name in ("position", "prompt", "seed", "sample"):
                        getattr(rows, name).copy_(getattr(fresh, name))
                    source.copy_(now)
                    replay()
                    want = self.call(self.make(self.vocab), now.clone(), fresh, columns)
                    for j, i in enumerate(at):
                        self._same(got[j], want[j], seqs[i], "replayed from a graph, it")
