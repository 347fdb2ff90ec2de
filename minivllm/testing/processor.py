"""The conformance suite of processors: the logits that they change equal a float64 reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
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
from .drawing import whole
from .sampling import SamplingConformance
from .sampling_data import histories
from .sampling_reference import standard_reference
from .sampling_rows import LARGE, LOGITS, MAX_LEN, SCHEDULES, SampledSeq, Slots, Stage, normal_logits, stack_logits
from .sampling_sizes import ProcessorSizes

TOLERANCE = 2e-6  # allowed error relative to the largest number of a row: a few roundings of float32


class ProcessorConformance(ProcessorSizes, SamplingConformance):
    """The conformance suite of processors.

    Override ``params`` and ``reference`` if the processor has parameters of its own.  A processor that claims
    ``own_model`` gets the logits of ``own_logits``, which ``reference`` may call too.
    """

    kind = "processor"

    def reference(
        self, params: SamplingParams, logits: Tensor, prompt: Sequence[int], output: Sequence[int]
    ) -> Tensor | None:
        """Return the expected logits f64 [V] of one row.

        None means that they are unknown, so that only the properties of all processors are tested."""
        if not self.reads or self.reads - set(LOGITS):
            return None
        return standard_reference(self.reads, params, logits, prompt, output)

    def output(self, stage: Stage, slots: Slots, logits: Tensor, max_position: int = 0) -> Tensor:
        return stage.apply(slots, logits, max_position)

    def call(self, worker: Processor, logits: Tensor, rows: Rows, columns: Mapping[str, Tensor]) -> Tensor:
        worker.apply(logits, rows, columns)
        return logits

    def exercise(self, instance: Processor) -> Any:
        logits = torch.linspace(-3, 3, self.vocab)
        stage = self.used_stage(instance)
        changed = stage.apply([1], logits[None])
        return super().exercise(instance), changed.tolist()

    def check(self, got: Tensor, s: SampledSeq, seen: Seen) -> None:
        """Fail unless the changed logits of one row are right.

        They are compared with the reference, or checked for the properties of all processors if there is none.
        """
        got = got.cpu().double()
        before = s.logits.double()
        impossible = before.isneginf()
        assert not got.isnan().any(), f"{s}: NaN at tokens {got.isnan().nonzero().flatten().tolist()[:8]}"
        seen["banned"] += bool(impossible.any())
        prompt = list(s.prompt)
        output = list(s.output)
        want = self.reference(s.params, before.clone(), prompt, output)
        if want is None:
            revived = impossible & ~got.isneginf()
            revived = revived.nonzero().flatten().tolist()[:8]
            assert not revived, (
                f"{s}: logits of -inf at tokens {revived} became {got[revived].tolist()}: a token that another "
                "processor or the engine forbade could be drawn; if that is intended, return it in reference()"
            )
            return
        seen["changed"] += not torch.equal(want, before)
        finite = torch.cat([before, want]).abs()
        finite = finite[finite.isfinite()]
        allowed = TOLERANCE * max(1.0, float(finite.max()))
        near = (got - want).abs() <= allowed
        wrong = ~near & (got != want)  # equal infinities have a difference of NaN
        if wrong.any():
            t = int(wrong.nonzero()[0])
            pytest.fail(
                f"{s}: the logit of token {t} (in the prompt {s.prompt.count(t)} times, in the output "
                f"{s.output.count(t)} times) was {before[t]:.7g}, became {got[t]:.7g}; expected {want[t]:.7g} within "
                f"{allowed:.2g}; {int(wrong.sum())} of {len(want)} tokens are wrong",
                pytrace=False,
            )

    @since(1, 0)
    def test_logits_are_those_of_the_float64_reference(self) -> None:
        """Check changed logits, float32 and in place, for every row of any batch; -inf stays -inf and gives no NaN."""
        seen = Seen()

        randoms = st.randoms(use_true_random=False)
        seeds = st.integers(0, 2**20)

        @self.for_all(120, st.data(), randoms, seeds)
        def holds(data: Any, random: Any, garbage: int) -> None:
            number = whole(data, 1, 5)
            seqs = self.sequences(data, number)
            size = number + 2
            slots = random.sample(range(size), number)
            stage = Stage(self, size, garbage=garbage)
            stage.join(slots, seqs)
            most = random.choice([0, MAX_LEN])
            got = stage.apply(slots, stack_logits(seqs), most)
            for row, s in zip(got, seqs, strict=True):
                self.check(row, s, seen)
            active = stage.state.active[slots]
            seen["bound"] += bool(active.any())

        assert seen["bound"], "bind returned None for all test values: override params() with values that turn it on"
        self.meet(seen, banned=20)
        if self.reads and not self.reads - set(LOGITS):
            self.meet(seen, changed=60)

    @since(1, 0)
    def test_a_single_token_that_is_left_stays(self) -> None:
        """Check a row in which all logits but one are -inf, as a grammar leaves them: that token must stay possible."""

        tokens = st.integers(0, self.vocab - 1)
        values = st.sampled_from([-1e4, -1.0, 0.0, 1e4])

        @self.for_all(15, st.data(), tokens, values)
        def holds(data: Any, token: int, value: float) -> None:
            (s,) = self.sequences(data, 1)
            logits = torch.full((self.vocab,), -torch.inf)
            logits[token] = value
            s = replace(s, seed=0, sample=0, logits=logits)
            got = self.alone(s)
            self.check(got, s, Seen())
            expected = self.reference(s.params, logits.double(), list(s.prompt), list(s.output))
            if expected is None:
                assert got[token].isfinite(), (
                    f"{s}: the only possible token, {token}, became {got[token]}; if the processor may ban it, return "
                    "the expected logits in reference()"
                )

    @since(1, 4, spec_only=True)
    def test_an_own_model_is_named_by_an_option(self) -> None:
        """Check that a processor that claims ``own_model`` has the option ``model``, which names the model to load.

        The engine reads each row of such a processor once in a step and outside of a capture.  So the spec must claim
        neither ``multi_position`` nor ``graph_safe``.
        """
        self.need("own_model")
        if self.spec.options:
            options = import_target(self.spec.options).model_fields
        else:
            options = {}
        assert "model" in options, f"own_model is claimed, and the options are {sorted(options)}: expected also `model`"
        others = sorted(self.spec.features & set(WITHOUT))
        assert not others, f"own_model is claimed together with {', '.join(others)}: claim it without them"

    def keywords_with(self, name: str) -> list[Mapping[str, Any]]:
        """Return keywords of SamplingParams that set a parameter that the processor reads."""
        standard: dict[str, Any] = {
            "repetition_penalty": 1.7, "presence_penalty": 1.1, "frequency_penalty": 1.1,
            "logit_bias": {3: 7.0, "5": -7.0}, "bad_words": [[3], [8, 8, 5], [40, 41]],
            "allowed_token_ids": [0, 3, 8, self.vocab - 1], "no_repeat_ngram_size": 1,
            "temperature_schedule": SCHEDULES[0], "encoder_repetition_penalty": 1.7,
        }  # fmt: skip
        own = []
        for p in self.params(self.vocab):
            if name in p or name in p.get("extra", ()):
                own.append(p)
        if name in standard:
            return [{name: standard[name]}, *own]
        return own

    @since(1, 0)
    def test_a_long_history_counts_to_its_end(self) -> None:
        """Check a history of 400 tokens that has one token 300 times, in the output or in the prompt.

        No buffer may be too short for it, and no counter may wrap around.
        """
        rng = np.random.default_rng(2)
        # the tokens of ``late`` occur only at the end
        early = rng.choice(np.arange(0, self.vocab, 5), 50)
        late = rng.choice(np.arange(0, self.vocab, 7), 50)
        repeated = rng.permutation([8] * 300 + [9, 11] * 5)
        joined = np.concatenate([early, repeated, late[:40]])
        history = tuple(joined.tolist())
        n = len(history)
        logits = normal_logits(rng, 3, self.vocab)
        tried = self.tried_rows() or [{}]
        params = [SamplingParams.make(**requested) for requested in tried]
        slots = range(len(params))
        for start in (10, n - 10):  # of the output
            prompt = history[:start]
            output = history[start:]
            seqs = [SampledSeq(p, prompt, output, logits) for p in params]
            stage = Stage(self, len(seqs), max_len=n + 8)
            stage.join(slots, seqs)
            changed = stage.apply(slots, stack_logits(seqs))
            for row, s in zip(changed, seqs, strict=True):
                self.check(row, s, Seen())

    @since(1, 0)
    def test_a_large_vocabulary(self) -> None:
        """Check rows of 151,936 logits, with token ids beyond 16 bits."""

        @self.for_all(4, st.data())
        def holds(data: Any) -> None:
            (s,) = self.sequences(data, 1, LARGE)
            got = self.alone(s, LARGE)
            self.check(got, s, Seen())

    @since(1, 0)
    def test_default_parameters_change_nothing(self) -> None:
        """Check that a processor that reads parameters is off until a request sets one of them.

        ``bind`` should return None then, because every step of the request is slower otherwise; in any case the logits
        must stay as they are.
        """
        if not self.reads:
            pytest.skip("it reads no parameter: it is on if it is in the config")

        @self.for_all(10, st.data())
        def holds(data: Any) -> None:
            (s,) = self.sequences(data, 1)
            s = SampledSeq(SamplingParams(), s.prompt, s.output, s.logits)
            got = self.alone(s).cpu()
            self._same(got, s.logits, s, "it is on and")

    @since(1, 0)
    def test_every_parameter_that_it_reads_changes_something(self) -> None:
        """Check that each parameter in ``reads`` changes a logit after some history, such as a tail that repeats.

        The engine accepts a request because ``reads`` names its parameter, so the parameter may not be ignored.
        """
        names = histories(self.vocab)
        known = self.reads - set(self.unknown())
        for name in sorted(known):
            keywords = self.keywords_with(name)
            params = [SamplingParams.make(**requested) for requested in keywords]
            assert any(self._changes_a_logit(p) for p in params), (
                f"reads has {name!r}, and no logit changes with {keywords} after any of {len(names)} histories "
                f"({', '.join(names)}): if it needs other values, override params()"
            )

    def _changes_a_logit(self, params: SamplingParams) -> bool:
        """Return whether the processor changes a logit after any of the histories of ``histories``."""
        rng = np.random.default_rng(1)
        random_logits = normal_logits(rng, 3, self.vocab)
        for prompt, output in histories(self.vocab).values():
            for logits in (random_logits, torch.zeros(self.vocab)):
                s = SampledSeq(params, prompt, output, logits)
                if not torch.equal(self.alone(s).cpu(), logits):
                    return True
        return False
