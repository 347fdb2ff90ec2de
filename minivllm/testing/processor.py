"""Processors: logits against a float64 reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from minivllm.config.own_models import WITHOUT
from minivllm.core.interfaces.params import SamplingParams
from minivllm.core.interfaces.sampling import Processor, Rows
from minivllm.registry import import_target

from .base import Seen, since
from .sampling import SamplingConformance
from .sampling_data import histories
from .sampling_reference import standard_reference
from .sampling_rows import LARGE, LOGITS, MAX_LEN, SCHEDULES, SampledSeq, Stage
from .sampling_sizes import ProcessorSizes

TOLERANCE = 2e-6  # of the largest number in a row: some roundings of float32


class ProcessorConformance(ProcessorSizes, SamplingConformance):
    """Beside ``params`` an author overrides ``reference`` for parameters of the processor's own.  One that claims
    ``own_model`` gets ``own_logits`` here, which its ``reference`` may ask for too."""

    kind = "processor"

    def reference(
        self, params: SamplingParams, logits: Tensor, prompt: Sequence[int], output: Sequence[int]
    ) -> Tensor | None:
        """What the logits f64 [V] of one row must become; None: unknown, only what holds for all is tested."""
        if self.reads - set(LOGITS) or not self.reads:
            return None
        return standard_reference(self.reads, params, logits, prompt, output)

    def output(self, stage: Stage, slots: Sequence[int], logits: Tensor, max_position: int = 0) -> Tensor:
        return stage.apply(slots, logits, max_position)

    def call(self, worker: Processor, logits: Tensor, rows: Rows, columns: Mapping[str, Tensor]) -> Tensor:
        worker.apply(logits, rows, columns)
        return logits

    def exercise(self, instance: Processor) -> Any:
        stage = Stage(self, 2)
        stage.host = stage._worker = instance
        stage.join([1], [SampledSeq(SamplingParams(), (1, 2, 3), (4, 4), torch.zeros(self.vocab))])
        return super().exercise(instance), stage.apply([1], torch.linspace(-3, 3, self.vocab)[None]).tolist()

    def check(self, got: Tensor, s: SampledSeq, seen: Seen) -> None:
        """Compare one row with the reference, or with what holds for all if there is none."""
        got, before = got.cpu().double(), s.logits.double()
        assert not got.isnan().any(), f"{s}: NaN at tokens {got.isnan().nonzero().flatten().tolist()[:8]}"
        want = self.reference(s.params, before.clone(), list(s.prompt), list(s.output))
        if want is None:
            revived = (before.isneginf() & ~got.isneginf()).nonzero().flatten().tolist()
            assert not revived, (
                f"{s}: logits of -inf at tokens {revived[:8]} became {got[revived[:8]].tolist()}: what another "
                "processor or the engine forbade would be drawn; if that is meant, say so in reference()"
            )
            seen["banned"] += bool(before.isneginf().any())
            return
        seen["changed"] += not torch.equal(want, before)
        seen["banned"] += bool(before.isneginf().any())
        finite = torch.cat([before[before.isfinite()], want[want.isfinite()]]).abs()
        allowed = TOLERANCE * max(1.0, float(finite.max()))
        wrong = ~((got - want).abs() <= allowed) & (got != want)  # equal infinities differ by NaN
        if wrong.any():
            t = int(wrong.nonzero()[0])
            pytest.fail(
                f"{s}: the logit of token {t} (in the prompt {s.prompt.count(t)} times, in the output "
                f"{s.output.count(t)} times) was {before[t]:.7g}, became {got[t]:.7g}; want {want[t]:.7g} within "
                f"{allowed:.2g}; {int(wrong.sum())} of {len(want)} tokens are wrong",
                pytrace=False,
            )

    @since(1, 0)
    def test_logits_are_those_of_the_float64_reference(self) -> None:
        """In place, float32, for every row whatever is beside it; -inf stays -inf and gives no NaN."""
        seen = Seen()

        @self.for_all(120, st.data(), st.randoms(use_true_random=False), st.integers(0, 2**20))
        def holds(data: Any, random: Any, garbage: int) -> None:
            seqs = self.sequences(data, data.draw(st.integers(1, 5)))
            slots = random.sample(range(len(seqs) + 2), len(seqs))
            stage = Stage(self, len(seqs) + 2, garbage=garbage)
            stage.join(slots, seqs)
            got = stage.apply(slots, torch.stack([s.logits for s in seqs]), random.choice([0, MAX_LEN]))
            for row, s in zip(got, seqs, strict=True):
                self.check(row, s, seen)
            seen["bound"] += bool(stage.state.active[slots].any())

        assert seen["bound"], "bind returned None for all that was tried: override params() with what turns it on"
        seen.require(banned=20)
        if self.reads and not self.reads - set(LOGITS):
            seen.require(changed=60)

    @since(1, 0)
    def test_a_single_token_that_is_left_stays(self) -> None:
        """All but one logit are -inf, as a grammar leaves them."""

        @self.for_all(15, st.data(), st.integers(0, self.vocab - 1), st.sampled_from([-1e4, -1.0, 0.0, 1e4]))
        def holds(data: Any, token: int, value: float) -> None:
            (s,) = self.sequences(data, 1)
            logits = torch.full((self.vocab,), -torch.inf)
            logits[token] = value
            s = SampledSeq(s.params, s.prompt, s.output, logits)
            got = self.alone(s)
            self.check(got, s, Seen())
            if self.reference(s.params, logits.double(), list(s.prompt), list(s.output)) is None:
                assert got[token].isfinite(), (
                    f"{s}: the one token that was left, {token}, became {got[token]}; a processor that may ban it "
                    "says so in reference(): what the logits must become"
                )

    @since(1, 4, spec_only=True)
    def test_an_own_model_is_named_by_an_option(self) -> None:
        """The engine loads what the option ``model`` names.  It reads a row once in a step, outside of a capture, so
        the spec claims neither ``multi_position`` nor ``graph_safe`` beside ``own_model``."""
        self.need("own_model")
        options = import_target(self.spec.options).model_fields if self.spec.options else {}
        assert "model" in options, f"own_model is claimed, and the options are {sorted(options)}: want one called model"
        beside = sorted(self.spec.features & set(WITHOUT))
        assert not beside, f"own_model is claimed, and {', '.join(beside)} beside it: want it alone"

    def _tried(self, name: str) -> list[Mapping[str, Any]]:
        """Keywords that set one of the parameters that it reads."""
        own = [p for p in self.params(self.vocab) if name in p or name in p.get("extra", ())]
        standard: dict[str, Any] = {
            "repetition_penalty": 1.7, "presence_penalty": 1.1, "frequency_penalty": 1.1,
            "logit_bias": {3: 7.0, "5": -7.0}, "bad_words": [[3], [8, 8, 5], [40, 41]],
            "allowed_token_ids": [0, 3, 8, self.vocab - 1], "no_repeat_ngram_size": 1,
            "temperature_schedule": SCHEDULES[0], "encoder_repetition_penalty": 1.7,
        }  # fmt: skip
        return [*([{name: standard[name]}] if name in standard else []), *own]

    @since(1, 0)
    def test_a_long_history_counts_to_its_end(self) -> None:
        """400 tokens of which one comes 300 times, in the output or in the prompt: no buffer is too short for them and
        no counter wraps around."""
        rng = np.random.default_rng(2)
        early, late = (rng.choice(np.arange(0, self.vocab, step), 50) for step in (5, 7))  # some come only at the end
        history = tuple(map(int, [*early, *rng.permutation([8] * 300 + [9, 11] * 5), *late[:40]]))
        logits = torch.tensor(rng.normal(0, 3, self.vocab), dtype=torch.float32)
        asked = [p for name in sorted(self.reads - set(self.unknown())) for p in self._tried(name)] or [{}]
        for at in (10, len(history) - 10):  # where the output begins
            seqs = [SampledSeq(SamplingParams.make(**p), history[:at], history[at:], logits) for p in asked]
            stage = Stage(self, len(seqs), max_len=len(history) + 8)
            stage.join(range(len(seqs)), seqs)
            for row, s in zip(stage.apply(range(len(seqs)), torch.stack([s.logits for s in seqs])), seqs, strict=True):
                self.check(row, s, Seen())

    @since(1, 0)
    def test_a_large_vocabulary(self) -> None:
        """Ids beyond 16 bits, and rows of 151,936 logits."""

        @self.for_all(4, st.data())
        def holds(data: Any) -> None:
            (s,) = self.sequences(data, 1, LARGE)
            self.check(self.alone(s, LARGE), s, Seen())

    @since(1, 0)
    def test_default_parameters_change_nothing(self) -> None:
        """A processor that reads parameters is off until one is set; ``bind`` returns None, or it costs each step of
        everybody and still must leave the logits as they are."""
        if not self.reads:
            pytest.skip("it reads no parameter: being in the config turns it on")

        @self.for_all(10, st.data())
        def holds(data: Any) -> None:
            (s,) = self.sequences(data, 1)
            s = SampledSeq(SamplingParams(), s.prompt, s.output, s.logits)
            self._same(self.alone(s).cpu(), s.logits, s, "it is on and")

    @since(1, 0)
    def test_every_parameter_that_it_reads_changes_something(self) -> None:
        """The engine takes a request because ``reads`` names its parameter: it must not be ignored.  Several histories
        are tried, among them tails that repeat."""
        logits = torch.tensor(np.random.default_rng(1).normal(0, 3, self.vocab), dtype=torch.float32)
        tried = histories(self.vocab)
        for name in sorted(self.reads - set(self.unknown())):
            keywords = self._tried(name)
            assert any(
                not torch.equal(self.alone(SampledSeq(SamplingParams.make(**asked), prompt, output, x)).cpu(), x)
                for asked in keywords
                for prompt, output in tried.values()
                for x in (logits, torch.zeros(self.vocab))
            ), (
                f"reads has {name!r}, and no logit changes with {keywords} after any of {len(tried)} histories "
                f"({', '.join(tried)}): if it needs other values, override params()"
            )
