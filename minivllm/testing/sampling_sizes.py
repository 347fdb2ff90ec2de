"""Tests of processors and samplers at large sizes, at which a buffer, a grid or a packed number might end.

There are many rows, long lists and histories, and limits that keep many tokens.
"""

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
from .sampling_rows import SampledSeq, Stage, normal_logits, some_prompt, stack_logits
from .waiting import no_wait

ROWS = 150  # number of rows of a large step
WIDE = 2500  # size of a vocabulary in which limits keep many tokens
ENTRIES = (17, 40, 65, 129, 257, 300)  # lengths of lists in a request's parameters
LENGTHS = (4, 5, 6, 9, 16, 17, 33)  # numbers of tokens of a bad word, and of an n-gram
HISTORY = 3000  # number of tokens of a long prompt
# token ids whose noise is equal if ids are reduced to few bits
FAR = (0, 1 << 8, 1 << 12, 1 << 15, 1 << 16, 1 << 17)


class SamplingSizes(Lasting):
    """The tests of large sizes for processors and samplers alike."""

    if TYPE_CHECKING:
        alone: Any
        default_probabilities: Any
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
        """Return keywords of SamplingParams that send a row through each branch of the plug-in."""
        raise NotImplementedError

    def _keywords_to_try(self) -> list[Mapping[str, Any]]:
        return self.tried_rows() or [{}]

    @since(1, 0)
    def test_what_can_be_captured_does_not_wait_for_the_device(self) -> None:
        """Check that a plug-in that claims ``graph_safe`` never waits for the device.

        ``apply`` and ``draw`` read no tensor's value on the host, and make no tensor whose shape depends on values.
        Facts that the host may use are in ``rows.variant``.
        """
        self.need("graph_safe")
        if "cuda" not in self.values("device", "cpu", "cuda"):
            pytest.skip("it claims only the CPU, where nothing waits")
        rng = np.random.default_rng(4)
        logits = normal_logits(rng, 2, self.vocab)
        for requested in self._keywords_to_try():
            stage = Stage(self, 1)  # type: ignore[arg-type]
            params = SamplingParams.make(**requested)
            seq = SampledSeq(params, (1, 2, 3), (4, 5), logits, seed=1)
            stage.join([0], [seq])
            stage.waited = []
            self.output(stage, [0], logits[None])
            no_wait(stage.waited, f"with {requested} it")

    def once_more(self, instance: Any, number: int) -> None:
        """Serve a new sequence: bind it, commit its tokens, and change its logits or draw from them."""
        rng = np.random.default_rng(number)
        tried = self._keywords_to_try()
        requested = {"seed": number, **tried[number % len(tried)]}
        params = SamplingParams.make(**requested)
        length = 4 + number % 7
        ids = tuple(rng.integers(0, self.vocab, length).tolist())
        logits = normal_logits(rng, 2, self.vocab)
        seq = SampledSeq(params, ids[:3], ids[3:], logits, seed=number)
        self.alone(seq, instance=instance)

    @since(1, 0)
    def test_many_rows_get_what_each_gets_alone(self) -> None:
        """Check a step of 150 rows, as a server has: each row gets the output that it gets alone."""
        rng = np.random.default_rng(11)
        params = [SamplingParams.make(**requested) for requested in self._keywords_to_try()]
        seqs = []
        for i in range(ROWS):
            ids = tuple(rng.integers(0, 9, 7).tolist())
            logits = normal_logits(rng, 2, self.vocab)
            drawn_params = params[rng.integers(len(params))]
            seqs.append(SampledSeq(drawn_params, ids[:3], ids[3:], logits, seed=i))
        stage = Stage(self, ROWS)  # type: ignore[arg-type]
        stage.join(range(ROWS), seqs)
        got = self.output(stage, range(ROWS), stack_logits(seqs))
        for i, seq in enumerate(seqs):
            self._same(got[i], self.alone(seq), seq, f"as row {i} of {ROWS} it")


def _token(i: int) -> int:
    """Return a token id that is different for each i below ``WIDE``."""
    return (17 * i + 5) % WIDE


class ProcessorSizes(SamplingSizes):
    """The tests of large sizes in ``ProcessorConformance``."""

    if TYPE_CHECKING:
        check: Any
        reference: Any
        unknown: Any
        keywords_with: Any

    def tried_rows(self) -> list[Mapping[str, Any]]:
        known = sorted(self.reads - set(self.unknown()))
        return [keywords for name in known for keywords in self.keywords_with(name)]

    def _long(self) -> Iterator[tuple[str, dict[str, Any], tuple[int, ...]]]:
        """Yield long values of parameters that are lists, words or n-grams: (parameter, keywords, output tokens).

        ``keywords`` set the parameter.  The output tokens decide whether a word or an n-gram can be completed by the
        next token.
        """
        for n in ENTRIES:
            tokens = [_token(i) for i in range(n)]
            biases = {token: 1.0 + i % 9 for i, token in enumerate(tokens)}
            yield "logit_bias", {"logit_bias": biases}, (3,)
            words = [[7, token] for token in tokens]
            yield "bad_words", {"bad_words": words}, (7,)
            yield "allowed_token_ids", {"allowed_token_ids": tokens}, (3,)
        for n in LENGTHS:
            word = [_token(i) for i in range(n)]
            # the history ends with the word without its last token, or the first token of the word differs
            for tail in (word[:-1], [word[1], *word[1:-1]]):
                yield "bad_words", {"bad_words": [word]}, tuple(tail)
                yield "no_repeat_ngram_size", {"no_repeat_ngram_size": n}, (*word, 1, *tail)

    @since(1, 0)
    def test_what_is_long_is_served_whole_or_refused(self) -> None:
        """Check lists of up to 300 entries, and words and n-grams of up to 33 tokens.

        A processor that has no room for a list must raise a ``RequestError`` that names the parameter; it may not cut
        the list.
        """
        logits = normal_logits(np.random.default_rng(4), 3, WIDE)
        worker = self.make(WIDE)
        served = False
        for name, requested, end in self._long():
            if name not in self.reads:
                continue
            seq = SampledSeq(SamplingParams.make(**requested), (1, 2), end, logits)
            try:
                worker.bind_prompt(seq.params, some_prompt(2, WIDE))
            except RequestError as e:
                assert e.param == name, f"RequestError names parameter {e.param!r}: expected {name!r}"
                continue
            served = True
            if self.reference(seq.params, logits.double(), list(seq.prompt), list(end)) is not None:
                self._check_alone(seq, vocab=WIDE, max_len=len(end) + 9)
        if not served:
            pytest.skip("it reads no list, word or n-gram that is known here, or refuses all that are long")

    def _check_alone(self, seq: SampledSeq, **sizes: int) -> None:
        """Check the logits of one sequence in a stage of its own."""
        self.check(self.alone(seq, **sizes), seq, Seen())

    @since(1, 0)
    def test_a_very_long_history_counts_too(self) -> None:
        """Check a prompt of 3,000 tokens with some output.  Tokens at both ends count, even if they occur once."""
        rng = np.random.default_rng(3)
        middle = rng.integers(0, 40, HISTORY).tolist()
        prompt = (50, *middle, 51)
        logits = normal_logits(rng, 3, self.vocab)
        for requested in self._keywords_to_try():
            output = (52, 3, 52)
            seq = SampledSeq(SamplingParams.make(**requested), prompt, output, logits)
            self._check_alone(seq, max_len=HISTORY + 9, history=HISTORY + 9)


class SamplerSizes(SamplingSizes):
    """The tests of large sizes in ``SamplerConformance``."""

    @since(1, 0)
    def test_limits_that_keep_many_tokens_keep_all_of_them(self) -> None:
        """Check a top-k of 100 and of 2,000, and a top-p that keeps 2,400 tokens and drops a few.

        A sampler that looks only at the best 64 or 1,024 tokens draws too few different ones; one that treats 0.97 as
        1 draws too many.
        """
        logits = torch.linspace(0.6, 0.0, WIDE)
        tried: Sequence[dict[str, Any]] = ({"top_k": 100}, {"top_k": 2000}, {"top_p": 0.97})
        for requested in (a for a in tried if a.keys() <= self.reads):
            params = SamplingParams.make(**requested)
            must, may, prob = self.must_and_may(params, logits)
            tokens = self.draws(params, logits, self.keys(1 << 10))
            wrong = tokens[~may[tokens]][:5].tolist()
            assert not wrong, f"{requested} of {WIDE} tokens: drew {wrong}, which the limit excludes"
            if prob is None and torch.equal(must, may):
                prob = torch.where(may, logits.double().softmax(0), 0.0)
            if prob is not None:
                check_draws(tokens, prob / prob.sum(), f"{requested} of {WIDE} tokens", ALPHA)

    @since(1, 0)
    def test_tokens_that_are_far_apart_have_noise_of_their_own(self) -> None:
        """Check that equally likely tokens whose ids are 2**8 to 2**17 apart are all drawn.

        Tokens with the same random noise would always lose to the first of them.
        """
        logits = torch.full((FAR[-1] + 1,), -torch.inf)
        logits[list(FAR)] = 0.0
        prob = self.default_probabilities(logits)
        drawn = self.draws(SamplingParams(), logits, self.keys(96))
        check_draws(drawn, prob, f"tokens {FAR}, equally likely")

    @since(1, 0)
    def test_a_low_temperature_is_not_greedy(self) -> None:
        """Check that tokens whose logits differ by less than the temperature come as often as they should, at 0.05 and
        at 0.002."""
        self.need_temperature()
        for temperature in (0.05, 0.002):
            params = SamplingParams(temperature=temperature)
            logits = torch.linspace(-1, 1, 8) * temperature
            prob = self.must_and_may(params, logits)[2]
            if prob is not None:
                drawn = self.draws(params, logits, self.keys(1 << 12))
                check_draws(drawn, prob, f"temperature={temperature}")

    def need_temperature(self) -> None:
        """Skip the test unless the sampler reads ``temperature``."""
        if "temperature" not in self.reads:
            pytest.skip("it does not read temperature")
