"""Processors and samplers beyond the sizes at which a buffer, a grid or a packed number would end: many rows, long
lists and histories, limits that keep many tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from minivllm.core.interfaces.params import SamplingParams
from minivllm.errors import RequestError

from .base import Seen, since
from .chisquare import ALPHA, check_draws
from .kept import Lasting
from .sampling_rows import SampledSeq, Stage, some_prompt
from .waiting import no_wait

ROWS = 150  # of a step
WIDE = 2500  # tokens of a vocabulary in which limits keep many
ENTRIES = (17, 40, 65, 129, 257, 300)  # of a list that a request gives
LENGTHS = (4, 5, 6, 9, 16, 17, 33)  # of a bad word, and of an n-gram
HISTORY = 3000  # tokens
FAR = (0, 1 << 8, 1 << 12, 1 << 15, 1 << 16, 1 << 17)  # tokens that a shortened lane takes for one


class SamplingSizes(Lasting):
    """What holds for both seams."""

    if TYPE_CHECKING:
        alone: Any
        draws: Any
        keys: Any
        make: Any
        need: Any
        place: Any
        values: Any
        must_and_may: Any
        output: Any
        reads: Any
        vocab: int
        _same: Any

    def tried_rows(self) -> list[Mapping[str, Any]]:
        raise NotImplementedError

    @since(1, 0)
    def test_what_can_be_captured_does_not_wait_for_the_device(self) -> None:
        """``graph_safe``: ``apply`` and ``draw`` read no tensor's value on the host and make no tensor whose shape
        depends on values, whatever a request asks for.  What the host knows of the rows is in ``rows.variant``."""
        self.need("graph_safe")
        if "cuda" not in self.values("device", "cpu", "cuda"):
            pytest.skip("it claims the CPU alone, for which nobody waits")
        logits = torch.tensor(np.random.default_rng(4).normal(0, 2, self.vocab), dtype=torch.float32)
        for asked in self.tried_rows() or [{}]:
            stage = Stage(self, 1)  # type: ignore[arg-type]
            stage.join([0], [SampledSeq(SamplingParams.make(**asked), (1, 2, 3), (4, 5), logits, seed=1)])
            stage.waited = []
            self.output(stage, [0], logits[None])
            no_wait(stage.waited, f"with {asked} it")

    def once_more(self, instance: Any, number: int) -> None:
        """Serve a new sequence: bind it, let its tokens be accepted, and change its logits or draw from them."""
        rng, asked = np.random.default_rng(number), self.tried_rows() or [{}]
        params = SamplingParams.make(**{"seed": number, **asked[number % len(asked)]})
        ids = tuple(rng.integers(0, self.vocab, 4 + number % 7).tolist())
        logits = torch.tensor(rng.normal(0, 2, self.vocab), dtype=torch.float32)
        stage = Stage(self, 1)  # type: ignore[arg-type]
        stage.host = stage._worker = instance
        stage.join([0], [SampledSeq(params, ids[:3], ids[3:], logits, seed=number)])
        self.output(stage, [0], logits[None])

    @since(1, 0)
    def test_many_rows_get_what_each_gets_alone(self) -> None:
        """150 rows in one step, as a server has them: no grid, buffer or index ends before them."""
        rng = np.random.default_rng(11)
        asked = [SamplingParams.make(**p) for p in self.tried_rows()] or [SamplingParams()]
        seqs = []
        for i in range(ROWS):
            ids = tuple(rng.integers(0, 9, 7).tolist())
            logits = torch.tensor(rng.normal(0, 2, self.vocab), dtype=torch.float32)
            seqs.append(SampledSeq(asked[rng.integers(len(asked))], ids[:3], ids[3:], logits, seed=i))
        stage = Stage(self, ROWS)  # type: ignore[arg-type]
        stage.join(range(ROWS), seqs)
        got = self.output(stage, range(ROWS), torch.stack([s.logits for s in seqs]))
        for i in range(ROWS):
            self._same(got[i], self.alone(seqs[i]), seqs[i], f"as row {i} of {ROWS} it")


class ProcessorSizes(SamplingSizes):
    """Part of ``ProcessorConformance``."""

    if TYPE_CHECKING:
        check: Any
        reference: Any
        unknown: Any
        _tried: Any

    def tried_rows(self) -> list[Mapping[str, Any]]:
        return [p for name in sorted(self.reads - set(self.unknown())) for p in self._tried(name)]

    def _long(self) -> Iterator[tuple[str, dict[str, Any], tuple[int, ...]]]:
        """(parameter, keywords, the end of a history at which they take effect)."""
        token = lambda i: (17 * i + 5) % WIDE  # noqa: E731  (a different one for each i below WIDE)
        for n in ENTRIES:
            yield "logit_bias", {"logit_bias": {token(i): 1.0 + i % 9 for i in range(n)}}, (3,)
            yield "bad_words", {"bad_words": [[7, token(i)] for i in range(n)]}, (7,)
            yield "allowed_token_ids", {"allowed_token_ids": [token(i) for i in range(n)]}, (3,)
        for n in LENGTHS:
            word = [token(i) for i in range(n)]
            for near in ((word, word[:-1]), (word, [word[1], *word[1:-1]])):  # all of it came, or all but the first
                yield "bad_words", {"bad_words": [near[0]]}, tuple(near[1])
                yield "no_repeat_ngram_size", {"no_repeat_ngram_size": n}, (*near[0], 1, *near[1])

    @since(1, 0)
    def test_what_is_long_is_served_whole_or_refused(self) -> None:
        """Lists of up to 300 entries, words and n-grams of up to 33 tokens: a processor that has no room for one says
        so in a ``RequestError`` that names the parameter; it cuts nothing off."""
        logits = torch.tensor(np.random.default_rng(4).normal(0, 3, WIDE), dtype=torch.float32)
        worker, done = self.make(WIDE), 0
        for name, asked, end in self._long():
            if name not in self.reads:
                continue
            params = SamplingParams.make(**asked)
            try:
                worker.bind_prompt(params, some_prompt(2, WIDE))
            except RequestError as e:
                assert e.param == name, f"RequestError names parameter {e.param!r}: want {name!r}"
                continue
            s, done = SampledSeq(params, (1, 2), end, logits), done + 1
            if self.reference(params, logits.double(), list(s.prompt), list(s.output)) is not None:
                stage = Stage(self, 1, vocab=WIDE, max_len=len(end) + 9)  # type: ignore[arg-type]
                stage.join([0], [s])
                self.check(self.output(stage, [0], logits[None])[0], s, Seen())
        if not done:
            pytest.skip("it reads no list, word or n-gram that is known here, or refuses all that are long")

    @since(1, 0)
    def test_a_very_long_history_counts_too(self) -> None:
        """3,000 tokens of a prompt and some of the output, those that come once at either end."""
        rng = np.random.default_rng(3)
        prompt = (50, *rng.integers(0, 40, HISTORY).tolist(), 51)
        logits = torch.tensor(rng.normal(0, 3, self.vocab), dtype=torch.float32)
        for asked in self.tried_rows() or [{}]:
            s = SampledSeq(SamplingParams.make(**asked), prompt, (52, 3, 52), logits)
            stage = Stage(self, 1, max_len=HISTORY + 9, history=HISTORY + 9)  # type: ignore[arg-type]
            stage.join([0], [s])
            self.check(self.output(stage, [0], logits[None])[0], s, Seen())


class SamplerSizes(SamplingSizes):
    """Part of ``SamplerConformance``."""

    if TYPE_CHECKING:
        _tried: Any

    def tried_rows(self) -> list[Mapping[str, Any]]:
        return list(self._tried())

    @since(1, 0)
    def test_limits_that_keep_many_tokens_keep_all_of_them(self) -> None:
        """top-k of 100 and 2,000, and a top-p that needs 2,400 tokens and leaves out a few: a sampler that looks at the
        best 64, or 1,024, draws too few, and one that takes 0.97 for 1 too many."""
        logits, n = torch.linspace(0.6, 0.0, WIDE), 1 << 10
        tried: Sequence[dict[str, Any]] = ({"top_k": 100}, {"top_k": 2000}, {"top_p": 0.97})
        for asked in (a for a in tried if a.keys() <= self.reads):
            must, may, prob = self.must_and_may(SamplingParams.make(**asked), logits)
            tokens = self.draws(SamplingParams.make(**asked), logits, self.keys(n))
            assert may[tokens].all(), f"{asked} of {WIDE} tokens: drew {tokens[~may[tokens]][:5].tolist()}: left out"
            if prob is not None or torch.equal(must, may):
                exact = torch.where(may, logits.double().softmax(0), 0.0) if prob is None else prob
                check_draws(tokens, exact / exact.sum(), f"{asked} of {WIDE} tokens", ALPHA)

    @since(1, 0)
    def test_tokens_that_are_far_apart_have_noise_of_their_own(self) -> None:
        """Tokens 2**8 to 2**17 apart that are equally likely all come: those that share their noise would always lose
        to the first of them."""
        logits = torch.full((FAR[-1] + 1,), -torch.inf)
        logits[list(FAR)] = 0.0
        prob = self.must_and_may(SamplingParams(), logits)[2]
        if prob is None:
            pytest.skip("probabilities() leaves them open")
        check_draws(self.draws(SamplingParams(), logits, self.keys(96)), prob, f"tokens {FAR}, equally likely")

    @since(1, 0)
    def test_a_low_temperature_is_not_greedy(self) -> None:
        """Tokens whose logits are closer than the temperature come as often as they should, at 0.05 and at 0.002."""
        if "temperature" not in self.reads:
            pytest.skip("it does not read temperature")
        for temperature in (0.05, 0.002):
            params, logits = SamplingParams(temperature=temperature), torch.linspace(-1, 1, 8) * temperature
            prob = self.must_and_may(params, logits)[2]
            if prob is not None:
                check_draws(self.draws(params, logits, self.keys(1 << 12)), prob, f"temperature={temperature}")
