"""The conformance suite of samplers, which draw tokens from logits.

Exactly the right tokens may be drawn, their frequencies pass chi-square tests of stated power, and a draw is a
function of (logits, seed, position, sample) only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
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
from .sampling_rows import DRAWS, LARGE, MAX_LEN, SampledSeq, Stage, WatchedProcessor, stack_logits, unwritten
from .sampling_sizes import SamplerSizes

BATCH, CELLS = 1 << 15, 1 << 21  # most rows of a call, and most logits of a call
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


def _keys(seed: Tensor, position: Tensor) -> Tensor:
    """Return draw keys (seed, position, sample) with sample 0, int64 [n, 3]."""
    parts = [seed, position, torch.zeros_like(seed)]
    return torch.stack(parts, 1)


def _new_sequence(params: SamplingParams, logits: Tensor, seed: int = 0) -> SampledSeq:
    """Return a sequence whose prompt is a single token 0 and whose output is empty."""
    return SampledSeq(params, (0,), (), logits, seed=seed)


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

    def output(self, stage: Stage, slots: Sequence[int], logits: Tensor, max_position: int = 0) -> Tensor:
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
        own = self.probabilities(params, logits.double())
        if own is not None:
            return own > 0, own > 0, own
        temperature = self.temperature(params)
        if temperature == 0:
            best = logits == logits.max()
            return best & (best.sum() == 1), best, None
        prob = torch.softmax(logits.double() / temperature, 0)
        must, may = self.limited(params, prob)
        if not torch.equal(must, may):
            return must, may, None
        prob = torch.where(may, prob, 0.0) / prob[may].sum()
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
        batch = min(most, len(keys), max(CELLS // len(logits), 1))
        farthest = int(keys[:, 1].max()) + 2
        stage = Stage(self, m + batch, vocab=len(logits), max_len=max(farthest, MAX_LEN))
        slots = np.arange(m + batch)[::-1].copy()
        if m:
            stage.join(slots[:m], others)
        own = slots[m:]
        stage.join(own[:1], [_new_sequence(params, logits)])
        stage.state.fork(np.repeat(own[0], batch), own)
        stage.tokens[own.copy()] = stage.tokens[own[0]].clone()
        stage.prompt[own] = 1
        tokens = []
        for part in keys.split(batch):
            at = own[: len(part)]
            stage.seed[at], stage.position[at], stage.sample[at] = part.numpy().T
            rows = logits.expand(len(part), -1)
            if m:
                rows = torch.cat([stack_logits(others), rows])
            token = stage.draw(slots[: m + len(part)], rows)[m:].cpu()
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
        low = logits.min()
        high = logits.max()
        label = f"{_new_sequence(params, logits)}, {len(logits)} logits from {low:.4g} to {high:.4g}"
        bins = tokens.clamp(0, len(logits) - 1)
        count = torch.bincount(bins, minlength=len(logits))
        if outside := ((count > 0) & ~may).nonzero().flatten().tolist():
            first = outside[0]
            rank = 1 + int((logits > logits[first]).sum())
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

        @self.for_all(60, st.data())
        def holds(data: Any) -> None:
            vocab = data.draw(st.sampled_from([2, 3, 17, 33, 40]))
            seed = data.draw(st.integers(0, 2**32))
            rng = np.random.default_rng(seed)
            scale = data.draw(st.sampled_from([0.1, 1.0, 2.0]))
            logits = rng.normal(0, scale, vocab).astype(np.float32)
            if data.draw(st.integers(0, 2)) == 0:
                logits = np.round(logits * 2) / 2
            share = data.draw(st.sampled_from([0.0, 0.3]))
            logits[1:][rng.random(vocab - 1) < share] = -np.inf
            params = SamplingParams.make(**data.draw(self.keywords(vocab)))
            number = data.draw(st.integers(0, 3))
            others = self.sequences(data, number, vocab)
            offset = data.draw(st.sampled_from([0.0, -30.0, 50.0]))
            row = torch.tensor(logits) + offset
            if params.extra and self.probabilities(params, row.double()) is None:
                return
            start = data.draw(st.integers(0, 2**40))
            seen["compared"] += self.check(params, row, 1 << 14, others, start)
            may = self.must_and_may(params, row)[1]
            seen["limited"] += not torch.equal(may, row > -torch.inf)
            for name in DRAWS:
                seen[name] += getattr(params, name) != getattr(SamplingParams(), name)

        if not self.reads - set(DRAWS):
            seen.require(compared=5, **dict.fromkeys(sorted(self.reads & set(DRAWS)), 5))
            limited = 10 if self.reads & {"top_k", "top_p", "min_p"} else 0
            seen.require(limited=limited)

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
        if type(self.make(12, MAX_LEN)).drawn_from is Sampler.drawn_from:
            pytest.skip("it has no drawn_from")
        logits = torch.linspace(0.6, 0.0, 12)
        for requested in [{}, *self._readable(LIMITS)]:
            params = SamplingParams.make(**requested)
            row, greedy = self._drawn_from(params, logits, str(requested))
            near = "temperature" not in self.reads or torch.allclose(greedy, logits.double().softmax(0), atol=1e-6)
            assert near, f"greedy row: {greedy}"
            must, may, want = self.must_and_may(params, logits)
            assert not (row[~may] > 0).any() and (row[must] > 0).all(), f"{requested}: {row}, drawn are {may}"
            assert want is None or torch.allclose(row, want, atol=1e-5), f"{requested}: {row}; expected {want}"

    def _drawn_from(self, params: SamplingParams, logits: Tensor, label: str) -> Tensor:
        """Return the probabilities f64 [2, V] of ``drawn_from``: for a row with ``params``, and a greedy row."""
        stage = Stage(self, 3, vocab=len(logits))
        slots = np.array([2, 0])
        seqs = [_new_sequence(p, logits) for p in (params, SamplingParams(temperature=0))]
        stage.join(slots, seqs)
        passed = logits.to(self.place()).repeat(2, 1)
        before = passed.clone()
        rows = stage.rows(slots, stage.variant(slots))
        columns = stage.columns([0, 1, 2])
        with torch.inference_mode(), unwritten(rows, "drawn_from"):
            got = stage.worker.drawn_from(passed, rows, stage.state.columns)
        after = stage.columns([0, 1, 2])
        assert torch.equal(passed, before), f"{label}: drawn_from writes to the logits that it receives"
        same = all(torch.equal(after[name], columns[name]) for name in columns)
        assert same, f"{label}: drawn_from writes to columns"
        assert got.dtype == torch.float32 and got.shape == before.shape, f"drawn_from: {got.dtype} {got.shape}"
        return got.double().softmax(1).cpu()

    @since(1, 0)
    def test_what_ties_at_a_limit_is_all_that_is_open(self) -> None:
        """Check tokens that tie with the last token that a limit (such as top_k) keeps: any of them may be kept.

        Better tokens must be kept, worse tokens never may.
        """
        logits = torch.tensor([1.0, 2.0, 1.0, 0.5, 1.0, 2.5, 0.5, 1.0])
        tried: list[dict[str, Any]] = [{"top_k": k} for k in (1, 2, 4, 6)]
        for requested in self._readable([*tried, {"top_p": 0.65}, {"top_k": 4, "top_p": 0.8}]):
            params = SamplingParams.make(**requested)
            self.check(params, logits, 1 << 12)
            must = self.must_and_may(params, logits)[0].nonzero().flatten()
            keys = self.keys(1 << 12)
            drawn = self.draws(params, logits, keys)
            missing = set(must.tolist()) - set(drawn.tolist())
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
        grouped = torch.zeros(16, dtype=torch.float64).index_add_(0, group, prob)
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
        logits[likely] = math.log((1 - (vocab - 1) * tail) / tail)
        rare = 1 - float(self.default_probabilities(logits)[likely])
        keys = self.keys(1 << 11)
        drawn = self.draws(SamplingParams(), logits, keys)
        prob = torch.tensor([1 - rare, rare], dtype=torch.float64)
        check_draws((drawn != likely).long(), prob, "1 = a token of probability 2**-19")

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
        low = -1e30
        pairs = (*SMALLEST, *LARGEST)
        extreme = torch.tensor([[seed, 1, 0] for seed, _ in pairs])
        parts = [extreme, self.keys(1 << 12)]
        keys = torch.cat(parts)
        for requested in self.tried_rows():
            params = SamplingParams.make(**requested)
            for few in ({3: -100.0, 60: -104.0}, {66: low}, {0: 0.0}, {33: 0.0}, {65: 0.0}, {7: low, 8: low}):
                logits = torch.full((67,), -torch.inf)
                logits[list(few)] = torch.tensor(list(few.values()))
                wrong = []
                for t in self.draws(params, logits, keys).tolist():
                    if t not in few:
                        wrong.append(t)
                shown = f"drew {wrong[:5]}, {len(wrong)} times"
                assert not wrong, f"{requested}: all logits but those of {few} are -inf; {shown}"

    @since(1, 0)
    def test_greedy_takes_a_best_token_and_no_noise(self) -> None:
        """Check temperature=0: the best token is taken.

        This holds if only its last bit is larger; of equal best tokens, always the same one is taken.
        """
        self.need_temperature()
        logits = torch.linspace(-3, 5, 67)
        logits[13] = float(np.nextafter(np.float32(5), np.float32(9)))
        ties = logits.clone()
        ties[[4, 13, 50]] = 6.0
        tried = [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}]
        limits = self._readable(tried)
        for requested, others in itertools.product(limits, ((), self._others())):
            params = SamplingParams.make(temperature=0.0, **requested)
            drawn = self.draws(params, logits, self.keys(512), others)
            drawn = set(drawn.tolist())
            assert drawn == {13}, (
                f"{requested}: drew {sorted(drawn)}; expected 13, the best by one unit in the last place"
            )
            drawn = self.draws(params, ties, self.keys(512), others)
            drawn = set(drawn.tolist())
            same = len(drawn) == 1 and drawn < {4, 13, 50}
            assert same, f"{requested}: drew {sorted(drawn)}; expected one of 4, 13, 50, always the same"

    def _others(self) -> tuple[SampledSeq, ...]:
        """Return a sequence for each set of parameters in ``tried_rows``."""
        logits = torch.linspace(-1, 1, 67)
        return tuple(_new_sequence(SamplingParams.make(**requested), logits) for requested in self.tried_rows())

    @since(1, 0)
    def test_extreme_temperatures_and_logits(self) -> None:
        """Check that small temperatures take the best token without overflow, and large ones draw all tokens evenly."""
        self.need_temperature()
        far = torch.tensor([1e4, -1e4, 9999.0, 0.0, -torch.inf, -1e30])
        for temperature, scale in itertools.product((1e-2, 1e-4, 1.1e-5, 1e-5, 1e-7, 1e-30), (1.0, -1.0, 3.0)):
            logits = torch.where(far.isfinite(), far * scale, far).clamp(max=3e4)
            best = int(logits.argmax())
            for requested in self._readable([{}, {"top_p": 0.9}]):
                params = SamplingParams.make(temperature=temperature, **requested)
                drawn = self.draws(params, logits, self.keys(64)).tolist()
                drawn = sorted(set(drawn))
                assert drawn == [best], f"temperature={temperature}: drew {drawn} of {logits.tolist()}; expected {best}"
        self.check(SamplingParams(temperature=2.0), torch.linspace(-0.1, 0.1, 8), 1 << 16)

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
            seqs = [_new_sequence(params, row, i) for i, row in enumerate(logits)]
            stage.join(range(5), seqs)
            want = stage.draw(range(5), logits)[fine].tolist()
            logits[1, 5] = torch.nan
            logits[2] = -torch.inf
            logits[3, 7] = torch.inf
            got = stage.draw(range(5), logits)[fine].tolist()
            assert got == want, f"{requested}: rows {fine} drew {got}, and {want} beside rows with finite logits"

    @since(1, 0)
    def test_a_large_vocabulary(self) -> None:
        """Check 151,936 tokens: a drawn token is one that may be drawn, and the same alone as in the batch."""
        rng = np.random.default_rng(5)
        logits = torch.tensor(rng.normal(0, 2, LARGE), dtype=torch.float32)
        wide = self._readable([{"top_k": 2000}, {"top_p": 0.99}])
        tried = [*self.tried_rows(), *wide]
        seqs = []
        for i, requested in enumerate(tried):
            params = SamplingParams.make(**requested)
            seqs.append(_new_sequence(params, logits.roll(977 * i), i))
        stage = Stage(self, len(seqs), vocab=LARGE)
        stage.join(range(len(seqs)), seqs)
        drawn = stage.draw(range(len(seqs)), stack_logits(seqs)).cpu()
        for token, s in zip(drawn, seqs, strict=True):
            self._same(token, self.alone(s, LARGE).cpu(), s, f"beside {len(seqs) - 1} others, it")
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
        yield "seed and its negative", base, base * torch.tensor([-1, 1, 1])
        yield "seed and the seed without its sign bit", base - (SEED << 62) * 2, base
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
            yield f"seed and seed + 2**{k}", base, base + (SEED << k)

    def _without_history(self) -> bool:
        """Return whether default draws do not read ``rows.tokens``, so that any position is valid."""
        stage = Stage(self, 2)
        seq = _new_sequence(SamplingParams(), torch.zeros(self.vocab))
        stage.join([0, 1], [seq] * 2)
        stage.tokens = tokens = stage.tokens.as_subclass(WatchedProcessor)
        stage.draw([0, 1], torch.zeros(2, self.vocab))
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
            for order, got in (
                ("again", self.draws(params, logits, keys)),
                ("in the order reversed", self.draws(params, logits, keys.flip(0)).flip(0)),
                ("beside others", self.draws(params, logits, keys, self._others())),
                ("in steps of one row", self.draws(params, logits, keys[:16], (), 1)),
            ):
                differ = got != first[: len(got)]
                wrong = differ.nonzero().flatten().tolist()
                if wrong:
                    at = wrong[0]
                    rows = f"{len(wrong)} of {len(got)} rows, such as row {at}"
                    pytest.fail(f"{requested}: {order}, other tokens come in {rows}: {got[at]}, not {first[at]}")
