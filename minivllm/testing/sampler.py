"""The conformance suite of samplers, which draw tokens from logits.

Exactly the right tokens may be drawn, their frequencies pass chi-square tests of stated power, and a draw is a
function of (logits, seed, position, sample) only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from minivllm.core.interfaces.params import SamplingParams
from minivllm.core.interfaces.sampling import Draw, Rows, Sampler

from .base import Seen, since
from .chisquare import ALPHA, check_draws, detectable
from .sampler_batch import Batches
from .sampler_limits import LIMITS, supports, surprising, typical_supports
from .sampling import SamplingConformance
from .sampling_data import keywords_of, random_keywords
from .sampling_rows import (
    DRAWS,
    LARGE,
    MAX_LEN,
    SampledSeq,
    Slots,
    Stage,
    WatchedProcessor,
    normal_logits,
    stack_logits,
    unwritten,
)
from .sampling_sizes import SamplerSizes

BATCH = 1 << 15  # most rows of a call
CELLS = 1 << 21  # most logits of a call
# (seed, lane): at position 1 and sample 0, ``noise()`` of that lane is near its smallest, 2**-32, or its largest, 1 -
# 2**-24
SMALLEST = (
    (72065041, 6), (76614094, 54), (78542660, 62), (40338542, 32), (98449035, 62), (65013961, 8), (71773003, 62),
    (84679424, 27), (8631303, 60), (118688796, 36), (54863386, 1 << 30), (24811895, 1 << 30),
)  # fmt: skip
LARGEST = ((54644982, 0), (52997598, 0), (2891928, 66), (54501843, 1 << 30), (11753474, 1 << 30))
TRIED: tuple[dict[str, Any], ...] = (  # keywords that send a row through each branch of a usual sampler
    {}, {"temperature": 0.0}, {"temperature": 0.6}, {"top_k": 2}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.1},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.01}, {"typical_p": 0.7},
    {"typical_p": 0.5, "temperature": 0.6, "top_k": 9}, {"mirostat_tau": 1.5}, {"mirostat_tau": 4.0},
)  # fmt: skip
# unit vectors: steps of 1 in each element of a key (seed, position, sample)
SEED, POSITION, SAMPLE = torch.eye(3, dtype=torch.int64)
LOW = -1e30
FEW: tuple[dict[int, float], ...] = (  # the finite logits of a row by their tokens
    {3: -100.0, 60: -104.0}, {66: LOW}, {0: 0.0}, {33: 0.0}, {65: 0.0}, {7: LOW, 8: LOW},
)  # fmt: skip


def _keys(seed: Tensor, position: Tensor) -> Tensor:
    """Return draw keys (seed, position, sample) with sample 0, int64 [n, 3]."""
    parts = [seed, position, torch.zeros_like(seed)]
    return torch.stack(parts, 1)


def _new_sequence(params: SamplingParams, logits: Tensor, seed: int = 0) -> SampledSeq:
    """Return a sequence whose prompt is a single token 0 and whose output is empty."""
    prompt = (0,)
    return SampledSeq(params, prompt, (), logits, seed=seed)


class SamplerConformance(SamplerSizes, Batches, SamplingConformance):
    """The conformance suite of samplers.

    Override ``params`` and ``probabilities`` if the sampler has parameters of its own.
    """

    kind = "sampler"

    def probabilities(self, params: SamplingParams, logits: Tensor) -> Tensor | None:
        """Return the probabilities f64 [V] that the sampler gives to the next token after a prompt of one token 0.

        None means that the kit computes them from the standard parameters.  Override this if the sampler has other
        parameters.
        """
        return None

    def output(self, stage: Stage, slots: Slots, logits: Tensor, max_position: int = 0) -> Tensor:
        return stage.draw(slots, logits, max_position)

    def call(self, worker: Sampler, logits: Tensor, rows: Rows, columns: Mapping[str, Tensor]) -> Tensor:
        out = Draw(torch.zeros_like(rows.slots))
        worker.draw(logits, rows, columns, out)
        return out.tokens

    def exercise(self, instance: Sampler) -> Any:
        stage = self.used_stage(instance)
        logits = torch.linspace(-1, 1, self.vocab)[None]
        draws = []
        for seed in range(9):
            stage.seed[:] = seed
            draw = stage.draw([1], logits).item()
            draws.append(draw)
        return super().exercise(instance), draws

    def temperature(self, params: SamplingParams) -> float:
        """Return the temperature of a request; it is 1 for a sampler that does not read this parameter."""
        return params.temperature if "temperature" in self.reads else 1.0

    def must_and_may(self, params: SamplingParams, logits: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return masks of the tokens that must and that may be drawable, bool [V], and probabilities f64 [V].

        None in place of the probabilities means that ties leave them open.
        """
        exact = logits.double()
        own = self.probabilities(params, exact)
        if own is not None:
            possible = own > 0
            return possible, possible, own
        temperature = self.temperature(params)
        if temperature == 0:
            best = logits == logits.max()
            single = best.sum() == 1
            return best & single, best, None
        prob = torch.softmax(exact / temperature, 0)
        must, may = self.limited(params, prob)
        if not torch.equal(must, may):
            return must, may, None
        kept = torch.where(may, prob, 0.0)
        prob = kept / prob[may].sum()
        return must, may, prob

    def limited(self, params: SamplingParams, prob: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two masks of ``must_and_may`` for probabilities f64 [V], by the limits that the sampler reads."""
        if params.mirostat_tau is not None and "mirostat_tau" in self.reads:
            return surprising(prob, params)
        if params.typical_p == 1 or "typical_p" not in self.reads:
            return supports(prob, params)
        return typical_supports(prob, params)

    def default_probabilities(self, logits: Tensor) -> Tensor:
        """Return the probabilities f64 [V] with default parameters, or skip the test if they are unknown."""
        prob = self.must_and_may(SamplingParams(), logits)[2]
        return pytest.skip("probabilities() leaves them open") if prob is None else prob

    def draws(
        self, params: SamplingParams, logits: Tensor, keys: Tensor, others: Sequence[SampledSeq] = (), most: int = BATCH
    ) -> Tensor:
        """Draw a token for each key from one row of logits [V]; return int64 [n].

        A key, a row of int64 [n, 3], is (seed, position, sample). A step draws for up to ``most`` keys.  The sequences
        ``others`` are in each step too, in the rows before.
        """
        m = len(others)
        n = len(logits)
        fitting = max(CELLS // n, 1)
        batch = min(most, len(keys), fitting)
        farthest = int(keys[:, 1].max()) + 2
        size = m + batch
        stage = Stage(self, size, vocab=n, max_len=max(farthest, MAX_LEN))
        slots = np.arange(size)[::-1].copy()
        if m:
            stage.join(slots[:m], others)
        own = slots[m:].copy()
        first = own[0]
        stage.join(own[:1], [_new_sequence(params, logits)])
        stage.state.fork(np.repeat(first, batch), own)
        stage.tokens[own] = stage.tokens[first].clone()
        stage.prompt[own] = 1
        tokens = []
        for part in keys.split(batch):
            at = own[: len(part)]
            seed, position, sample = part.numpy().T
            stage.seed[at] = seed
            stage.position[at] = position
            stage.sample[at] = sample
            rows = logits.expand(len(part), -1)
            if m:
                before = stack_logits(others)
                rows = torch.cat([before, rows])
            drawn = stage.draw(slots[: len(rows)], rows)
            token = drawn[m:].cpu()
            tokens.append(token)
        return torch.cat(tokens)

    def keys(self, n: int, start: int = 0) -> Tensor:
        """Return n draw keys [n, 3] as requests make them: small seeds, each with all positions of a sequence."""
        i = torch.arange(n)
        positions = MAX_LEN - 2
        return _keys(start + i // positions, 1 + i % positions)

    def check(self, params: SamplingParams, logits: Tensor, n: int, others: Sequence = (), start: int = 0) -> bool:
        """Draw n tokens and fail if they do not fit the reference.

        Return whether the reference has probabilities; otherwise it only says which tokens may be drawn.
        """
        must, may, prob = self.must_and_may(params, logits)
        keys = self.keys(n, start)
        tokens = self.draws(params, logits, keys, others)
        spread = f"from {logits.min():.4g} to {logits.max():.4g}"
        label = f"{_new_sequence(params, logits)}, {len(logits)} logits {spread}"
        bins = tokens.clamp(0, len(logits) - 1)
        count = torch.bincount(bins, minlength=len(logits))
        outside = (count > 0) & ~may
        if outside.any():
            first = int(outside.nonzero()[0])
            better = logits > logits[first]
            rank = 1 + int(better.sum())
            pytest.fail(
                f"{label}: drew token {first} (logit {logits[first]:.5g}, the {rank}. best) {int(count[first])} times "
                f"of {n}, which the parameters exclude; {int(may.sum())} tokens may be drawn, the last of them with "
                f"logit {logits[may].min():.5g}",
                pytrace=False,
            )
        if prob is not None:
            check_draws(tokens, prob, label, ALPHA / 1000)
            return True
        if int(must.sum()) == int(may.sum()) == 1:
            assert count[must] == n, f"{label}: expected token {int(must.nonzero())} each time"
        return False

    # ---- frequencies ---------------------------------------------------------------------------------------------

    @since(1, 0)
    def test_draws_come_with_the_probabilities_of_the_softmax(self) -> None:
        """Check 2**23 draws from 8 tokens by a chi-square test with alpha = 1e-6.

        With probability 0.999 it finds an effect size w (see ``chisquare.detectable``) of 0.0032.  This finds any one
        token whose probability is off by 1 % (w = 0.01 sqrt(p (1 - p)) >= 0.0032 for p >= 0.113).
        """
        n = 1 << 23
        logits = torch.linspace(-0.1, 0.1, 8)
        prob = self.default_probabilities(logits)
        if prob.min() > 0:
            deviation = float((prob * (1 - prob)).sqrt().min())
            assert detectable(n, 7) < 0.01 * deviation
        tokens = self.draws(SamplingParams(), logits, self.keys(n))
        check_draws(tokens, prob, "8 tokens of probability 0.113 to 0.138")

    @since(1, 0)
    def test_parameters_leave_the_tokens_and_the_probabilities_of_the_reference(self) -> None:
        """Check temperature, then min-p, then top-k, then top-p (vLLM's order), as far as the sampler reads them.

        Other rows share the step.  There are 2**14 draws each, alpha = 1e-9.  A token that is kept and expected 40
        times must be drawn, an excluded token never.
        """
        seen = Seen()
        own = self.params(self.vocab)
        if keywords_of(self.reads, own, self.vocab) is None:
            self._skip_unknown()
        read = self.reads & set(DRAWS)
        limits = read - {"temperature"}

        # all else is drawn from the seed, because hypothesis repeats parts of an example in the next ones
        @self.for_all(120, st.integers(0, 2**32))
        def holds(seed: int) -> None:
            rng = np.random.default_rng(seed)
            vocab = int(rng.choice([2, 3, 17, 33, 40, 40]))
            params, row = self._drawn_row(rng, vocab)
            exact = row.double()
            if params.extra and self.probabilities(params, exact) is None:
                return
            others = []
            for i in range(rng.integers(4)):
                other, logits = self._drawn_row(rng, vocab)
                others.append(_new_sequence(other, logits, i))
            start = int(rng.integers(2**40))
            seen["compared"] += self.check(params, row, 1 << 14, others, start)
            may = self.must_and_may(params, row)[1]
            finite = row > -torch.inf
            seen["limited"] += not torch.equal(may, finite)
            effective = {name for name in read if self._matters(name, params, row)}
            seen.update(effective)
            seen["several"] += len(effective & limits) > 1

        if read == self.reads:
            self.meet(seen, compared=5, **dict.fromkeys(sorted(read), 4))
            if limits:
                self.meet(seen, limited=10)
            if len(limits) > 1:
                self.meet(seen, several=3)

    def _drawn_row(self, rng: np.random.Generator, vocab: int) -> tuple[SamplingParams, Tensor]:
        """Return random parameters that the sampler reads, and logits f32 [V], some of them equal or -inf."""
        spread = rng.choice([0.1, 1.0, 2.0])
        logits = normal_logits(rng, spread, vocab)
        if rng.random() < 1 / 3:
            logits = (logits * 2).round() / 2
        share = rng.choice([0.0, 0.3])
        excluded = rng.random(vocab - 1) < share
        logits[1:][torch.tensor(excluded)] = -torch.inf
        logits += float(rng.choice([0.0, -30.0, 50.0]))
        own = self.params(vocab)
        requested = random_keywords(rng, self.reads, own, vocab)
        return SamplingParams.make(**requested), logits

    def _matters(self, name: str, params: SamplingParams, logits: Tensor) -> bool:
        """Return whether the tokens or the probabilities of the reference differ without the named parameter."""
        without = replace(params, **{name: getattr(SamplingParams(), name)})
        both = self.must_and_may(params, logits)
        plain = self.must_and_may(without, logits)
        for got, other in zip(both, plain, strict=True):
            if got is None or other is None:
                if got is not other:
                    return True
                continue
            difference = got.double() - other.double()
            if difference.abs().max() > 1e-3:
                return True
        return False

    def _readable(self, tried: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the sets of keywords in ``tried`` that contain only parameters that the sampler reads."""
        return [requested for requested in tried if requested.keys() <= self.reads]

    @since(1, 0)
    def test_each_limit_is_where_it_should_be(self) -> None:
        """Check how many of twelve nearly equal tokens each limit (such as top_k) keeps.

        Together, limits apply in the order of vLLM, and top-p keeps the token that crosses it.
        """
        logits = torch.linspace(0.6, 0.0, 12)
        limits = self._readable(LIMITS)
        if not limits:
            pytest.skip("it reads no top_k, top_p or min_p")
        for requested in limits:
            self.check(SamplingParams.make(**requested), logits, 1 << 13)

    @since(1, 1)
    def test_what_it_says_it_draws_from_is_what_it_draws_from(self) -> None:
        """Check ``drawn_from``, if the sampler has it: it returns the logits of the distribution from which it draws.

        The result is new float32 logits whose softmax is the distribution of the reference, or for a greedy row that
        of the logits.  The call changes neither its argument nor the columns.
        """
        instance = self.make(12, MAX_LEN)
        if type(instance).drawn_from is Sampler.drawn_from:
            pytest.skip("it has no drawn_from")
        logits = torch.linspace(0.6, 0.0, 12)
        for requested in [{}, *self._readable(LIMITS)]:
            params = SamplingParams.make(**requested)
            row, greedy = self._drawn_from(params, logits, str(requested))
            if "temperature" in self.reads:
                plain = logits.double().softmax(0)
                assert torch.allclose(greedy, plain, atol=1e-6), f"greedy row: {greedy}"
            must, may, want = self.must_and_may(params, logits)
            outside = (row[~may] > 0).any()
            inside = (row[must] > 0).all()
            assert inside and not outside, f"{requested}: {row}, drawn are {may}"
            assert want is None or torch.allclose(row, want, atol=1e-5), f"{requested}: {row}; expected {want}"

    def _drawn_from(self, params: SamplingParams, logits: Tensor, label: str) -> Tensor:
        """Return the probabilities f64 [2, V] of ``drawn_from``: for a row with ``params``, and a greedy row."""
        stage = Stage(self, 3, vocab=len(logits))
        slots = np.array([2, 0])
        greedy = SamplingParams(temperature=0)
        seqs = [_new_sequence(p, logits) for p in (params, greedy)]
        stage.join(slots, seqs)
        row = logits.to(self.place())
        passed = row.repeat(2, 1)
        before = passed.clone()
        variant = stage.variant(slots)
        rows = stage.rows(slots, variant)
        every = range(3)
        columns = stage.columns(every)
        with torch.inference_mode(), unwritten(rows, "drawn_from"):
            got = stage.worker.drawn_from(passed, rows, stage.state.columns)
        after = stage.columns(every)
        assert torch.equal(passed, before), f"{label}: drawn_from writes to the logits that it receives"
        changed = [name for name in columns if not torch.equal(after[name], columns[name])]
        assert not changed, f"{label}: drawn_from writes to columns"
        described = f"drawn_from: {got.dtype} {got.shape}"
        assert got.dtype == torch.float32, described
        assert got.shape == before.shape, described
        prob = got.double().softmax(1)
        return prob.cpu()

    @since(1, 0)
    def test_what_ties_at_a_limit_is_all_that_is_open(self) -> None:
        """Check tokens that tie with the last token that a limit (such as top_k) keeps: any of them may be kept.

        Better tokens must be kept, worse tokens never may.
        """
        logits = torch.tensor([1.0, 2.0, 1.0, 0.5, 1.0, 2.5, 0.5, 1.0])
        tried: list[dict[str, Any]] = [
            {"top_k": 1}, {"top_k": 2}, {"top_k": 4}, {"top_k": 6}, {"top_p": 0.65}, {"top_k": 4, "top_p": 0.8},
        ]  # fmt: skip
        for requested in self._readable(tried):
            params = SamplingParams.make(**requested)
            self.check(params, logits, 1 << 12)
            must = self.must_and_may(params, logits)[0]
            keys = self.keys(1 << 12)
            drawn = self.draws(params, logits, keys)
            needed = must.nonzero().flatten()
            missing = set(needed.tolist()) - set(drawn.tolist())
            assert not missing, (
                f"{requested}: tokens {sorted(missing)} are better than those at the edge and never come"
            )

    @since(1, 0)
    def test_logits_keep_the_precision_of_float32(self) -> None:
        """Check 4,096 logits of 1000 +- 0.24, whose differences are lost in float16 or bfloat16.

        A loss gives an effect size w of about 0.3; 2**15 draws in 16 groups of tokens find 0.05.  Most steps of a
        cumulative sum would be lost too.
        """
        rng = np.random.default_rng(3)
        values = 1000 + rng.uniform(-0.24, 0.24, 4096)
        logits = torch.tensor(values, dtype=torch.float32)
        prob = self.default_probabilities(logits)
        keys = self.keys(1 << 15)
        tokens = self.draws(SamplingParams(), logits, keys)
        label = "4,096 tokens with logits of 1000 +- 0.24"
        check_draws(tokens, prob, label)
        group = logits.argsort().argsort() // 256
        grouped = torch.bincount(group, prob, 16)
        check_draws(group[tokens], grouped, f"{label}, by rank in 16 groups")

    @since(1, 0)
    def test_unlikely_tokens_come_as_often_as_they_should(self) -> None:
        """Check 32,767 tokens of probability 2**-19 each, beside a likely token: 2**11 draws give about 128 of them.

        A sampler with noise of 16 bits draws none of them, or 19 if it draws the likely token badly; with 17 bits it
        draws half.
        """
        tail = 2.0**-19
        vocab = 1 << 15
        likely = 12_345
        logits = torch.zeros(vocab)
        others = (vocab - 1) * tail
        logits[likely] = math.log((1 - others) / tail)
        all_prob = self.default_probabilities(logits)
        rare = 1 - float(all_prob[likely])
        keys = self.keys(1 << 11)
        drawn = self.draws(SamplingParams(), logits, keys)
        prob = torch.tensor([1 - rare, rare], dtype=torch.float64)
        is_rare = (drawn != likely).long()
        check_draws(is_rare, prob, "1 = a token of probability 2**-19")

    # ---- edges ---------------------------------------------------------------------------------------------------

    def tried_rows(self) -> list[Mapping[str, Any]]:
        own = [dict(p) for p in self.params(self.vocab)]
        return self._readable(TRIED) + own

    @since(1, 0)
    def test_impossible_tokens_are_never_drawn(self) -> None:
        """Check that a token with logit -inf is never drawn.

        The other logits are very small, the random noise is the smallest and the largest, or only one token is
        possible.
        """
        seeds = [seed for seed, _ in (*SMALLEST, *LARGEST)]
        extreme = torch.tensor([[seed, 1, 0] for seed in seeds])
        keys = torch.cat([extreme, self.keys(1 << 12)])
        for requested in self.tried_rows():
            params = SamplingParams.make(**requested)
            for few in FEW:
                logits = torch.full((67,), -torch.inf)
                for token, logit in few.items():
                    logits[token] = logit
                drawn = self.draws(params, logits, keys).tolist()
                wrong = [t for t in drawn if t not in few]
                shown = f"drew {wrong[:5]}, {len(wrong)} times"
                assert not wrong, f"{requested}: all logits but those of {few} are -inf; {shown}"

    @since(1, 0)
    def test_greedy_takes_a_best_token_and_no_noise(self) -> None:
        """Check temperature=0: the best token is taken.

        This holds if only its last bit is larger; of equal best tokens, always the same one is taken.
        """
        self.need_temperature()
        logits = torch.linspace(-3, 5, 67)
        above_five = np.nextafter(np.float32(5), np.float32(9))
        logits[13] = float(above_five)
        ties = logits.clone()
        ties[[4, 13, 50]] = 6.0
        tried = [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}]
        limits = self._readable(tried)
        keys = self.keys(512)
        for requested, others in itertools.product(limits, ((), self._others())):
            params = SamplingParams.make(temperature=0.0, **requested)
            drawn = self._distinct(params, logits, keys, others)
            assert drawn == [13], f"{requested}: drew {drawn}; expected 13, the best by one unit in the last place"
            drawn = self._distinct(params, ties, keys, others)
            same = drawn in ([4], [13], [50])
            assert same, f"{requested}: drew {drawn}; expected one of 4, 13, 50, always the same"

    def _distinct(self, params: SamplingParams, logits: Tensor, keys: Tensor, others: Sequence = ()) -> list[int]:
        """Return the tokens that ``draws`` returns for some keys, each once, in ascending order."""
        tokens = self.draws(params, logits, keys, others)
        return sorted(set(tokens.tolist()))

    def _others(self) -> tuple[SampledSeq, ...]:
        """Return a sequence for each set of parameters in ``tried_rows``."""
        logits = torch.linspace(-1, 1, 67)
        rows = [SamplingParams.make(**requested) for requested in self.tried_rows()]
        return tuple(_new_sequence(params, logits) for params in rows)

    @since(1, 0)
    def test_extreme_temperatures_and_logits(self) -> None:
        """Check that small temperatures take the best token without overflow, and large ones draw all tokens evenly."""
        self.need_temperature()
        far = torch.tensor([1e4, -1e4, 9999.0, 0.0, -torch.inf, -1e30])
        keys = self.keys(64)
        temperatures = (1e-2, 1e-4, 1.1e-5, 1e-5, 1e-7, 1e-30)
        scales = (1.0, -1.0, 3.0)
        finite = far.isfinite()
        for temperature, scale in itertools.product(temperatures, scales):
            scaled = torch.where(finite, far * scale, far)
            logits = scaled.clamp(max=3e4)
            best = int(logits.argmax())
            for requested in self._readable([{}, {"top_p": 0.9}]):
                params = SamplingParams.make(temperature=temperature, **requested)
                drawn = self._distinct(params, logits, keys)
                assert drawn == [best], f"temperature={temperature}: drew {drawn} of {logits.tolist()}; expected {best}"
        warm = SamplingParams(temperature=2.0)
        self.check(warm, torch.linspace(-0.1, 0.1, 8), 1 << 16)

    @since(1, 0)
    def test_rows_without_a_distribution_leave_the_others_alone(self) -> None:
        """Check that a row with NaN or +inf, or with only -inf, raises no error and does not change other rows.

        The engine ends such a sequence, and the step must continue.
        """
        rng = torch.Generator().manual_seed(4)
        fine = [0, 4]
        for requested in self.tried_rows():
            params = SamplingParams.make(**requested)
            logits = torch.randn(5, self.vocab, generator=rng)
            stage = Stage(self, 5)
            every = range(5)
            seqs = [_new_sequence(params, row, i) for i, row in enumerate(logits)]
            stage.join(every, seqs)
            before = stage.draw(every, logits)
            want = before[fine].tolist()
            logits[1, 5] = torch.nan
            logits[2] = -torch.inf
            logits[3, 7] = torch.inf
            beside = stage.draw(every, logits)
            got = beside[fine].tolist()
            assert got == want, f"{requested}: rows {fine} drew {got}, and {want} beside rows with finite logits"

    @since(1, 0)
    def test_a_large_vocabulary(self) -> None:
        """Check 151,936 tokens: a drawn token is one that may be drawn, and the same alone as in the batch."""
        rng = np.random.default_rng(5)
        logits = normal_logits(rng, 2, LARGE)
        wide = self._readable([{"top_k": 2000}, {"top_p": 0.99}])
        tried = [*self.tried_rows(), *wide]
        seqs = []
        for i, requested in enumerate(tried):
            params = SamplingParams.make(**requested)
            row = logits.roll(977 * i)
            seqs.append(_new_sequence(params, row, i))
        n = len(seqs)
        stage = Stage(self, n, vocab=LARGE)
        slots = range(n)
        stage.join(slots, seqs)
        drawn = stage.draw(slots, stack_logits(seqs)).cpu()
        for token, s in zip(drawn, seqs, strict=True):
            alone = self.alone(s, LARGE).cpu()
            self._same(token, alone, s, f"beside {n - 1} others, it")
            if not s.params.extra:
                may = self.must_and_may(s.params, s.logits)[1]
                assert may[token], f"{s}: drew token {token}, logit {s.logits[token]:.4g}, which is excluded"

    # ---- independence --------------------------------------------------------------------------------------------

    def _check_pairs(self, pairs: Iterator[tuple[str, Tensor, Tensor]]) -> None:
        """Check that the draws of the two keys in each pair are independent.

        ``pairs`` has (difference of the keys, first keys [n, 3], second keys [n, 3]).
        """
        logits = torch.linspace(-0.5, 0.5, 8)
        prob = self.default_probabilities(logits)
        for difference, a, b in pairs:
            first = self.draws(SamplingParams(), logits, a)
            second = self.draws(SamplingParams(), logits, b)
            both = (prob[:, None] * prob).flatten()
            check_draws(first * 8 + second, both, f"pairs (8 a + b) of draws at a {difference}")

    def _pairs(self, n: int) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield (difference, first keys [n, 3], second keys [n, 3]) of pairs of draw keys.

        A pair shares no key with another pair.
        """
        i = torch.arange(n)
        position = 1 + i % (MAX_LEN - 3)
        base = _keys(4 * i + 11, position)
        yield "position and the next", base, base + POSITION
        yield "seed and the next", base, base + SEED
        yield "seed and seed + 2**32", base, base + (SEED << 32)
        yield "sample and the next", base, base + SAMPLE
        yield "the next position or the next seed", base + POSITION, base + SEED
        yield "the next position or the next sample", base + POSITION, base + SAMPLE
        yield "the next seed or the next sample", base + SEED, base + SAMPLE

    @since(1, 0)
    def test_draws_of_neighbouring_keys_are_independent(self) -> None:
        """Check that draws whose position, seed or sample differ by one are independent, in a table of 64 cells.

        With probability 0.999, at alpha = 1e-6, 2**17 pairs find an effect size w = 0.033, such as 3 % too many equal
        pairs.
        """
        self._check_pairs(self._pairs(1 << 17))

    def _far_pairs(self, n: int) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield pairs as ``_pairs`` does, whose keys become equal in a sampler that stores a key in fewer bits.

        Positions go up to 2**16 if no draw reads a history.
        """
        i = torch.arange(n)
        base = _keys(4 * i + 11, 1 + i % 17)
        minus = torch.tensor([-1, 1, 1])
        yield "seed and its negative", base, base * minus
        sign = (SEED << 62) * 2
        yield "seed and the seed without its sign bit", base - sign, base
        powers = range(5, 17 if self._without_history() else 6)
        for k in powers:
            far = base + (POSITION << k)
            yield f"position and position + 2**{k}", base, far
            yield f"position + 2**{k} or the next seed", far, base + SEED
            yield f"position + 2**{k} or the next sample", far, base + SAMPLE
        for k in range(1, 7):
            far = base + (SAMPLE << k)
            yield f"sample and sample + 2**{k}", base, far
            yield f"sample + 2**{k} or the next seed", far, base + SEED
            yield f"sample + 2**{k} or the next position", far, base + POSITION
        for k in (8, 16, 24, 31, 40, 48, 62):
            far = base + (SEED << k)
            yield f"seed and seed + 2**{k}", base, far

    def _without_history(self) -> bool:
        """Return whether default draws do not read ``rows.tokens``, so that any position is valid."""
        stage = Stage(self, 2)
        logits = torch.zeros(2, self.vocab)
        seq = _new_sequence(SamplingParams(), logits[0])
        slots = [0, 1]
        stage.join(slots, [seq, seq])
        stage.tokens = tokens = stage.tokens.as_subclass(WatchedProcessor)
        stage.draw(slots, logits)
        return not tokens.used

    @since(1, 0)
    def test_no_two_keys_are_taken_for_one(self) -> None:
        """Check pairs of keys that seed * 4096 + position, position & 255 or abs(seed) would make equal.

        2**13 pairs of each kind find an effect size w = 0.13, such as 5 % too many equal pairs.
        """
        self._check_pairs(self._far_pairs(1 << 13))

    @since(1, 0)
    def test_a_key_draws_the_same_token_again(self) -> None:
        """Check that a draw is a function of (logits, seed, position, sample).

        It does not depend on the other rows, the number of earlier draws or their order.
        """
        logits = torch.linspace(-1, 1, 67)
        keys = self.keys(256)
        for requested in self.tried_rows():
            params = SamplingParams.make(**requested)
            first = self.draws(params, logits, keys)
            reversed_keys = keys.flip(0)
            backwards = self.draws(params, logits, reversed_keys)
            repeats = {
                "again": self.draws(params, logits, keys),
                "in the order reversed": backwards.flip(0),
                "beside others": self.draws(params, logits, keys, self._others()),
                "in steps of one row": self.draws(params, logits, keys[:16], (), 1),
            }
            for order, got in repeats.items():
                differ = got != first[: len(got)]
                wrong = differ.nonzero().flatten().tolist()
                if wrong:
                    at = wrong[0]
                    rows = f"{len(wrong)} of {len(got)} rows, such as row {at}"
                    pytest.fail(f"{requested}: {order}, other tokens come in {rows}: {got[at]}, not {first[at]}")
