"""Samplers: supports exactly, frequencies by chi-square with stated power, and draws that depend on nothing else than
(logits, seed, position, sample).
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
from .sampler_limits import LIMITS, NEAR, nearest, supports, surprising
from .sampling import SamplingConformance
from .sampling_rows import DRAWS, LARGE, MAX_LEN, SampledSeq, Stage, WatchedProcessor, unwritten
from .sampling_sizes import SamplerSizes

BATCH, CELLS = 1 << 15, 1 << 21  # rows and logits of a call at most
# (seed, lane): at position 1 and sample 0 noise() of that lane is near its smallest, 2**-32, or its largest, 1 - 2**-24
SMALLEST = (
    (72065041, 6), (76614094, 54), (78542660, 62), (40338542, 32), (98449035, 62), (65013961, 8), (71773003, 62),
    (84679424, 27), (8631303, 60), (118688796, 36), (54863386, 1 << 30), (24811895, 1 << 30),
)  # fmt: skip
LARGEST = ((54644982, 0), (52997598, 0), (2891928, 66), (54501843, 1 << 30), (11753474, 1 << 30))


class SamplerConformance(SamplerSizes, Batches, SamplingConformance):
    """An author whose sampler has parameters of its own overrides ``params`` and ``probabilities``."""

    kind = "sampler"

    def probabilities(self, params: SamplingParams, logits: Tensor) -> Tensor | None:
        """Probabilities f64 [V] that the sampler gives to the tokens of one row, whose history is a single token 0;
        None: unknown.  Used for parameters that the standard ones do not describe."""
        return None

    def output(self, stage: Stage, slots: Sequence[int], logits: Tensor, max_position: int = 0) -> Tensor:
        return stage.draw(slots, logits, max_position)

    def call(self, worker: Sampler, logits: Tensor, rows: Rows, columns: Mapping[str, Tensor]) -> Tensor:
        out = Draw(torch.zeros_like(rows.slots))
        worker.draw(logits, rows, columns, out)
        return out.tokens

    def exercise(self, instance: Sampler) -> Any:
        stage = Stage(self, 2)
        stage.host = stage._worker = instance
        stage.join([1], [SampledSeq(SamplingParams(), (1, 2, 3), (4, 4), torch.zeros(self.vocab))])
        draws = []
        for seed in range(9):
            stage.seed[:] = seed
            draws.append(stage.draw([1], torch.linspace(-1, 1, self.vocab)[None]).item())
        return super().exercise(instance), draws

    def temperature(self, params: SamplingParams) -> float:
        return params.temperature if "temperature" in self.reads else 1.0

    def must_and_may(self, params: SamplingParams, logits: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """(must be drawable, may be drawn, probabilities f64 [V] or None where ties leave them open)."""
        own = self.probabilities(params, logits.double())
        if own is not None:
            return own > 0, own > 0, own
        temperature = self.temperature(params)
        if temperature == 0:
            best = logits == logits.max()
            return best & (best.sum() == 1), best, None
        prob = torch.softmax(logits.double() / temperature, 0)
        must, may = self.limited(params, prob)
        exact = torch.where(may, prob, 0.0) / prob[may].sum() if torch.equal(must, may) else None
        return must, may, exact

    def limited(self, params: SamplingParams, prob: Tensor) -> tuple[Tensor, Tensor]:
        """(must be drawable, may be drawn) of probabilities f64 [V], by the limits that it reads."""
        if params.mirostat_tau is not None and "mirostat_tau" in self.reads:
            return surprising(prob, params)
        if params.typical_p == 1 or "typical_p" not in self.reads:
            return supports(prob, params)
        must, may = prob > 0, prob < 0
        for by in (-NEAR, 0.0, NEAR):
            for left in nearest(prob, params.typical_p + by):
                if not left.any():
                    must = left
                    continue
                sure, maybe = supports(torch.where(left, prob, 0.0) / prob[left].sum().clamp(min=1e-300), params)
                must, may = must & sure, may | maybe
        return must, may

    def draws(
        self, params: SamplingParams, logits: Tensor, keys: Tensor, others: Sequence[SampledSeq] = (), most: int = BATCH
    ) -> Tensor:
        """Tokens i64 [n] of one row of logits [V] for keys i64 [n, 3] (seed, position, sample), in few large steps, or
        ``most`` in each; sequences ``others`` are in each step too, ahead of the rest."""
        m, batch = len(others), min(most, len(keys), max(CELLS // len(logits), 1))
        far = int(keys[:, 1].max()) + 2
        stage = Stage(self, m + batch, vocab=len(logits), max_len=max(far, MAX_LEN))
        slots = np.arange(m + batch)[::-1].copy()
        if m:
            stage.join(slots[:m], others)
        stage.join([slots[m]], [SampledSeq(params, (0,), (), logits)])
        mine = slots[m:]
        stage.state.fork(np.repeat(mine[0], batch), mine)
        stage.tokens[mine.copy()] = stage.tokens[mine[0]].clone()
        stage.prompt[mine] = 1
        out = []
        for part in keys.split(batch):
            at = mine[: len(part)]
            stage.seed[at], stage.position[at], stage.sample[at] = part.numpy().T
            rows = torch.cat([torch.stack([s.logits for s in others]), logits.expand(len(part), -1)]) if m else None
            here = logits.expand(len(part), -1) if rows is None else rows
            out.append(stage.draw(slots[: m + len(part)], here)[m:].cpu())
        return torch.cat(out)

    def keys(self, n: int, start: int = 0) -> Tensor:
        """Keys [n, 3] as users make them: small seeds, each over all positions of a sequence."""
        i = torch.arange(n)
        return torch.stack([start + i // (MAX_LEN - 2), 1 + i % (MAX_LEN - 2), torch.zeros_like(i)], 1)

    def check(self, params: SamplingParams, logits: Tensor, n: int, others: Sequence = (), start: int = 0) -> bool:
        """Draw n tokens and compare with the reference; returns whether the probabilities were compared too."""
        must, may, prob = self.must_and_may(params, logits)
        tokens = self.draws(params, logits, self.keys(n, start), others)
        seq, ends = SampledSeq(params, (0,), (), logits), (logits.min(), logits.max())
        what = f"{seq}, {len(logits)} logits from {ends[0]:.4g} to {ends[1]:.4g}"
        count = torch.bincount(tokens.clamp(0, len(logits) - 1), minlength=len(logits))
        if outside := ((count > 0) & ~may).nonzero().flatten().tolist():
            rank = 1 + int((logits > logits[outside[0]]).sum())
            pytest.fail(
                f"{what}: drew token {outside[0]} (logit {logits[outside[0]]:.5g}, the {rank}. best) "
                f"{int(count[outside[0]])} times of {n}, which the parameters exclude; {int(may.sum())} tokens may be "
                f"drawn, the last of them with logit {logits[may].min():.5g}",
                pytrace=False,
            )
        if prob is not None:
            check_draws(tokens, prob, what, ALPHA / 1000)
            return True
        if int(must.sum()) == int(may.sum()) == 1:
            assert count[must] == n, f"{what}: want token {int(must.nonzero())} each time"
        return False

    # ---- frequencies ---------------------------------------------------------------------------------------------

    @since(1, 0)
    def test_draws_come_with_the_probabilities_of_the_softmax(self) -> None:
        """2**23 draws from 8 tokens find with probability 0.999, at alpha = 1e-6, a w (see ``chisquare.detectable``) of
        0.0032: any one token whose probability is off by 1 % (w = 0.01 sqrt(p (1 - p)) >= 0.0032 for p >= 0.113)."""
        logits, n = torch.linspace(-0.1, 0.1, 8), 1 << 23
        prob = self.must_and_may(SamplingParams(), logits)[2]
        if prob is None:
            pytest.skip("probabilities() leaves them open")
        if prob.min() > 0:
            assert detectable(n, 7) < 0.01 * float((prob * (1 - prob)).sqrt().min())
        tokens = self.draws(SamplingParams(), logits, self.keys(n))
        check_draws(tokens, prob, "8 tokens of probability 0.113 to 0.138")

    @since(1, 0)
    def test_parameters_leave_the_tokens_and_the_probabilities_of_the_reference(self) -> None:
        """Temperature, then min-p, then top-k, then top-p, as in vLLM, those of them that it reads; other rows share
        the step.  2**14 draws each, alpha = 1e-9: a kept token that is expected 40 times comes, another one never."""
        seen = Seen()

        @self.for_all(60, st.data())
        def holds(data: Any) -> None:
            vocab = data.draw(st.sampled_from([2, 3, 17, 33, 40]))
            rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
            logits = rng.normal(0, data.draw(st.sampled_from([0.1, 1.0, 2.0])), vocab).astype(np.float32)
            if data.draw(st.integers(0, 2)) == 0:
                logits = np.round(logits * 2) / 2
            logits[1:][rng.random(vocab - 1) < data.draw(st.sampled_from([0.0, 0.3]))] = -np.inf
            params = SamplingParams.make(**data.draw(self.keywords(vocab)))
            others = self.sequences(data, data.draw(st.integers(0, 3)), vocab)
            row = torch.tensor(logits) + data.draw(st.sampled_from([0.0, -30.0, 50.0]))
            if params.extra and self.probabilities(params, row.double()) is None:
                return
            seen["compared"] += self.check(params, row, 1 << 14, others, data.draw(st.integers(0, 2**40)))
            seen["limited"] += not torch.equal(self.must_and_may(params, row)[1], row > -torch.inf)
            for name in DRAWS:
                seen[name] += getattr(params, name) != getattr(SamplingParams(), name)

        if not self.reads - set(DRAWS):
            seen.require(compared=5, **dict.fromkeys(sorted(self.reads & set(DRAWS)), 5))
            seen.require(limited=10 if self.reads & {"top_k", "top_p", "min_p"} else 0)

    @since(1, 0)
    def test_each_limit_is_where_it_should_be(self) -> None:
        """Twelve tokens of nearly equal probability: each limit alone keeps exactly as many as it says; together they
        come in vLLM's order, and top-p keeps the token that crosses it."""
        logits = torch.linspace(0.6, 0.0, 12)
        limits = [asked for asked in LIMITS if asked.keys() <= self.reads]
        if not limits:
            pytest.skip("it reads no top_k, top_p or min_p")
        for asked in limits:
            self.check(SamplingParams.make(**asked), logits, 1 << 13)

    @since(1, 1)
    def test_what_it_says_it_draws_from_is_what_it_draws_from(self) -> None:
        """``drawn_from``, if it has one: new logits float32 whose softmax is the distribution of the reference, of a
        greedy row beside it that of the logits; neither those that it is given nor its columns change."""
        if type(self.make(12, MAX_LEN)).drawn_from is Sampler.drawn_from:
            pytest.skip("it has no drawn_from")
        logits, beside = torch.linspace(0.6, 0.0, 12), SamplingParams(temperature=0)
        for asked in [{}, *(asked for asked in LIMITS if asked.keys() <= self.reads)]:
            params, stage = SamplingParams.make(**asked), Stage(self, 3, vocab=12)
            stage.join([2, 0], [SampledSeq(params, (0,), (), logits), SampledSeq(beside, (0,), (), logits)])
            slots, given = np.array([2, 0]), logits.to(self.place()).repeat(2, 1)
            rows, before, columns = stage.rows(slots, stage.variant(slots)), given.clone(), stage.columns([0, 1, 2])
            with torch.inference_mode(), unwritten(rows, "drawn_from"):
                got = stage.worker.drawn_from(given, rows, stage.state.columns)
            after = stage.columns([0, 1, 2])
            assert torch.equal(given, before), f"{asked}: drawn_from writes to the logits that it is given"
            assert all(torch.equal(after[name], columns[name]) for name in columns), (
                f"{asked}: drawn_from writes columns"
            )
            assert got.dtype == torch.float32 and got.shape == given.shape, f"drawn_from: {got.dtype} {got.shape}"
            prob, own = got.double().softmax(1).cpu(), logits.double().softmax(0)
            assert "temperature" not in self.reads or torch.allclose(prob[1], own, atol=1e-6), f"greedy row: {prob[1]}"
            must, may, want = self.must_and_may(params, logits)
            assert not (prob[0][~may] > 0).any() and (prob[0][must] > 0).all(), f"{asked}: {prob[0]}, drawn are {may}"
            assert want is None or torch.allclose(prob[0], want, atol=1e-5), f"{asked}: {prob[0]}; want {want}"

    @since(1, 0)
    def test_what_ties_at_a_limit_is_all_that_is_open(self) -> None:
        """Of tokens that tie with the last one kept any may stay; better ones stay, worse ones never."""
        logits = torch.tensor([1.0, 2.0, 1.0, 0.5, 1.0, 2.5, 0.5, 1.0])
        tried: list[dict[str, Any]] = [{"top_k": k} for k in (1, 2, 4, 6)]
        for asked in [*tried, {"top_p": 0.65}, {"top_k": 4, "top_p": 0.8}]:
            if asked.keys() <= self.reads:
                params = SamplingParams.make(**asked)
                self.check(params, logits, 1 << 12)
                must = self.must_and_may(params, logits)[0]
                got = set(self.draws(params, logits, self.keys(1 << 12)).tolist())
                gone = set(must.nonzero().flatten().tolist()) - got
                assert not gone, f"{asked}: tokens {sorted(gone)} are better than those at the edge and never come"

    @since(1, 0)
    def test_logits_keep_the_precision_of_float32(self) -> None:
        """4,096 logits of 1000 and a little: in float16 or bfloat16 the differences are gone (w about 0.3; 2**15 draws
        in 16 groups of tokens find 0.05), and so are most steps of a cumulative sum."""
        rng = np.random.default_rng(3)
        logits = torch.tensor(1000 + rng.uniform(-0.24, 0.24, 4096), dtype=torch.float32)
        prob = self.must_and_may(SamplingParams(), logits)[2]
        if prob is None:
            pytest.skip("probabilities() leaves them open")
        tokens = self.draws(SamplingParams(), logits, self.keys(1 << 15))
        check_draws(tokens, prob, "4,096 tokens with logits of 1000 +- 0.24")
        group = logits.argsort().argsort() // 256
        grouped = torch.zeros(16, dtype=torch.float64).index_add_(0, group, prob)
        check_draws(group[tokens], grouped, "4,096 tokens with logits of 1000 +- 0.24, by rank in 16 groups")

    @since(1, 0)
    def test_unlikely_tokens_come_as_often_as_they_should(self) -> None:
        """32,767 tokens of probability 2**-19 each, beside one that takes the rest: 2**11 draws bring about 128 of
        them.  Noise of 16 bits reaches none of them unless the likely one draws badly (19 come), of 17 bits half."""
        n, tail, vocab, likely = 1 << 11, 2.0**-19, 1 << 15, 12_345
        logits = torch.zeros(vocab)
        logits[likely] = math.log((1 - (vocab - 1) * tail) / tail)
        prob = self.must_and_may(SamplingParams(), logits)[2]
        if prob is None:
            pytest.skip("probabilities() leaves them open")
        came = (self.draws(SamplingParams(), logits, self.keys(n)) != likely).long()
        rare = 1 - float(prob[likely])
        check_draws(came, torch.tensor([1 - rare, rare], dtype=torch.float64), "1 = a token of probability 2**-19")

    # ---- edges ---------------------------------------------------------------------------------------------------

    def _tried(self) -> list[dict[str, Any]]:
        """Keywords that send a row through each branch of a usual sampler."""
        tried = [
            {}, {"temperature": 0.0}, {"temperature": 0.6}, {"top_k": 2}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.1},
            {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.01}, {"typical_p": 0.7},
            {"typical_p": 0.5, "temperature": 0.6, "top_k": 9}, {"mirostat_tau": 1.5}, {"mirostat_tau": 4.0},
        ]  # fmt: skip
        return [asked for asked in tried if asked.keys() <= self.reads] + [dict(p) for p in self.params(self.vocab)]

    @since(1, 0)
    def test_impossible_tokens_are_never_drawn(self) -> None:
        """-inf has probability 0, beside logits however small, with noise at its ends, with one token left."""
        n, low = 1 << 12, -1e30
        rare = torch.tensor([[seed, 1, 0] for seed, lane in (*SMALLEST, *LARGEST)])
        for asked in self._tried():
            params = SamplingParams.make(**asked)
            for few in ({3: -100.0, 60: -104.0}, {66: low}, {0: 0.0}, {33: 0.0}, {65: 0.0}, {7: low, 8: low}):
                logits = torch.full((67,), -torch.inf)
                logits[list(few)] = torch.tensor(list(few.values()))
                tokens = self.draws(params, logits, torch.cat([rare, self.keys(n)]))
                wrong = [t for t in tokens.tolist() if t not in few]
                some = f"drew {wrong[:5]}, {len(wrong)} times"
                assert not wrong, f"{asked}: all logits but those of {few} are -inf; {some}"

    @since(1, 0)
    def test_greedy_takes_a_best_token_and_no_noise(self) -> None:
        """temperature=0: the best even if it is so by the last bit; of equal ones always the same."""
        if "temperature" not in self.reads:
            pytest.skip("it does not read temperature")
        logits = torch.linspace(-3, 5, 67)
        logits[13] = float(np.nextafter(np.float32(5), np.float32(9)))
        ties = logits.clone()
        ties[[4, 13, 50]] = 6.0
        rest = [{k: v} for k, v in (("top_k", 5), ("top_p", 0.5), ("min_p", 0.1)) if k in self.reads]
        for asked, others in itertools.product(({}, *rest), ((), self._others())):
            params = SamplingParams.make(temperature=0.0, **asked)
            got = set(self.draws(params, logits, self.keys(512), others).tolist())
            assert got == {13}, f"{asked}: drew {sorted(got)}; want 13, the best by one unit in the last place"
            got = set(self.draws(params, ties, self.keys(512), others).tolist())
            assert len(got) == 1 and got < {4, 13, 50}, f"{asked}: drew {sorted(got)}; want one of 4, 13, 50, always"

    def _others(self) -> tuple[SampledSeq, ...]:
        logits = torch.linspace(-1, 1, 67)
        return tuple(SampledSeq(SamplingParams.make(**asked), (0,), (), logits) for asked in self._tried())

    @since(1, 0)
    def test_extreme_temperatures_and_logits(self) -> None:
        """Small temperatures end in the best token without overflow, large ones in an even draw."""
        if "temperature" not in self.reads:
            pytest.skip("it does not read temperature")
        far = torch.tensor([1e4, -1e4, 9999.0, 0.0, -torch.inf, -1e30])
        for temperature, scale in itertools.product((1e-2, 1e-4, 1.1e-5, 1e-5, 1e-7, 1e-30), (1.0, -1.0, 3.0)):
            logits = torch.where(far.isfinite(), far * scale, far).clamp(max=3e4)
            best = int(logits.argmax())
            for asked in [{}, *([{"top_p": 0.9}] if "top_p" in self.reads else [])]:
                params = SamplingParams.make(temperature=temperature, **asked)
                got = set(self.draws(params, logits, self.keys(64)).tolist())
                assert got == {best}, f"temperature={temperature}: drew {sorted(got)} of {logits.tolist()}; want {best}"
        self.check(SamplingParams(temperature=2.0), torch.linspace(-0.1, 0.1, 8), 1 << 16)

    @since(1, 0)
    def test_rows_without_a_distribution_leave_the_others_alone(self) -> None:
        """A row with NaN or +inf, or with -inf throughout, is ended by the engine; it must not end the step."""
        rng = torch.Generator().manual_seed(4)
        for asked in self._tried():
            params, logits = SamplingParams.make(**asked), torch.randn(5, self.vocab, generator=rng)
            stage, fine = Stage(self, 5), [0, 4]
            stage.join(range(5), [SampledSeq(params, (0,), (), row, seed=i) for i, row in enumerate(logits)])
            want = stage.draw(range(5), logits)[fine].tolist()
            logits[1, 5], logits[2], logits[3, 7] = torch.nan, -torch.inf, torch.inf
            got = stage.draw(range(5), logits)[fine].tolist()
            assert got == want, f"{asked}: rows {fine} drew {got}, not {want} as beside rows that are fine"

    @since(1, 0)
    def test_a_large_vocabulary(self) -> None:
        """151,936 tokens: what is drawn is in the support, and the same alone as in the batch."""
        rng = np.random.default_rng(5)
        logits = torch.tensor(rng.normal(0, 2, LARGE), dtype=torch.float32)
        tried = [*self._tried(), *({k: v} for k, v in (("top_k", 2000), ("top_p", 0.99)) if k in self.reads)]
        rolled = [(SamplingParams.make(**one), logits.roll(977 * i)) for i, one in enumerate(tried)]
        seqs = [SampledSeq(params, (0,), (), row, seed=i) for i, (params, row) in enumerate(rolled)]
        stage = Stage(self, len(seqs), vocab=LARGE)
        stage.join(range(len(seqs)), seqs)
        got = stage.draw(range(len(seqs)), torch.stack([s.logits for s in seqs])).cpu()
        for token, s in zip(got, seqs, strict=True):
            self._same(token, self.alone(s, LARGE).cpu(), s, f"beside {len(seqs) - 1} others, it")
            if not s.params.extra:
                may = self.must_and_may(s.params, s.logits)[1]
                assert may[token], f"{s}: drew token {token}, logit {s.logits[token]:.4g}, which is excluded"

    # ---- independence --------------------------------------------------------------------------------------------

    def _pairs(self, n: int) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(what differs, keys [n, 3], keys [n, 3]); a pair shares no key with another."""
        i = torch.arange(n)
        base = torch.stack([4 * i + 11, 1 + i % (MAX_LEN - 3), torch.zeros_like(i)], 1)
        seed, position, sample = torch.eye(3, dtype=torch.int64)
        yield "position and the next", base, base + position
        yield "seed and the next", base, base + seed
        yield "seed and seed + 2**32", base, base + (seed << 32)
        yield "sample and the next", base, base + sample
        yield "the next position or the next seed", base + position, base + seed
        yield "the next position or the next sample", base + position, base + sample
        yield "the next seed or the next sample", base + seed, base + sample

    @since(1, 0)
    def test_draws_of_neighbouring_keys_are_independent(self) -> None:
        """Pairs of draws whose position, seed or sample differ by one, in a table of 64 cells: 2**17 pairs find w =
        0.033, as of pairs that are equal 3 % too often, with probability 0.999 at alpha = 1e-6."""
        logits = torch.linspace(-0.5, 0.5, 8)
        prob = self.must_and_may(SamplingParams(), logits)[2]
        if prob is None:
            pytest.skip("probabilities() leaves them open")
        for what, a, b in self._pairs(1 << 17):
            cells = self.draws(SamplingParams(), logits, a) * 8 + self.draws(SamplingParams(), logits, b)
            check_draws(cells, (prob[:, None] * prob).flatten(), f"pairs (8 a + b) of draws at a {what}")

    def _far_pairs(self, n: int) -> Iterator[tuple[str, Tensor, Tensor]]:
        """As ``_pairs``, of keys that a packed or shortened key makes equal; positions up to 2**16 if no draw reads a
        history."""
        i = torch.arange(n)
        base = torch.stack([4 * i + 11, 1 + i % 17, torch.zeros_like(i)], 1)
        seed, position, sample = torch.eye(3, dtype=torch.int64)
        yield "seed and its negative", base, base * torch.tensor([-1, 1, 1])
        yield "seed and the seed without its sign bit", base - (seed << 62) * 2, base
        powers = range(5, 17 if self._without_history() else 6)
        for k in powers:
            far = base + (position << k)
            yield f"position and position + 2**{k}", base, far
            yield f"position + 2**{k} or the next seed", far, base + seed
            yield f"position + 2**{k} or the next sample", far, base + sample
        for k in range(1, 7):
            far = base + (sample << k)
            yield f"sample and sample + 2**{k}", base, far
            yield f"sample + 2**{k} or the next seed", far, base + seed
            yield f"sample + 2**{k} or the next position", far, base + position
        for k in (8, 16, 24, 31, 40, 48, 62):
            yield f"seed and seed + 2**{k}", base, base + (seed << k)

    def _without_history(self) -> bool:
        """Whether a draw with default parameters leaves ``rows.tokens`` alone, so that a position may be any number."""
        stage = Stage(self, 2)
        stage.join([0, 1], [SampledSeq(SamplingParams(), (0,), (), torch.zeros(self.vocab))] * 2)
        stage.tokens = tokens = stage.tokens.as_subclass(WatchedProcessor)
        stage.draw([0, 1], torch.zeros(2, self.vocab))
        return not tokens.used

    @since(1, 0)
    def test_no_two_keys_are_taken_for_one(self) -> None:
        """seed * 4096 + position, position & 255, abs(seed): 2**13 pairs of each kind find w = 0.13, as of pairs that
        are equal 5 % too often."""
        logits = torch.linspace(-0.5, 0.5, 8)
        prob = self.must_and_may(SamplingParams(), logits)[2]
        if prob is None:
            pytest.skip("probabilities() leaves them open")
        for what, a, b in self._far_pairs(1 << 13):
            cells = self.draws(SamplingParams(), logits, a) * 8 + self.draws(SamplingParams(), logits, b)
            check_draws(cells, (prob[:, None] * prob).flatten(), f"pairs (8 a + b) of draws at a {what}")

    @since(1, 0)
    def test_a_key_draws_the_same_token_again(self) -> None:
        """(logits, seed, position, sample) decide, not which rows are beside it, how often it was asked, or when."""
        logits, keys = torch.linspace(-1, 1, 67), self.keys(256)
        for asked in self._tried():
            params = SamplingParams.make(**asked)
            first = self.draws(params, logits, keys)
            for what, got in (
                ("again", self.draws(params, logits, keys)),
                ("in the order reversed", self.draws(params, logits, keys.flip(0)).flip(0)),
                ("beside others", self.draws(params, logits, keys, self._others())),
                ("in steps of one row", torch.cat([self.draws(params, logits, k[None]) for k in keys[:16]])),
            ):
                at = (got != first[: len(got)]).nonzero().flatten().tolist()
                place = f"{len(at)} of {len(got)} rows, such as row {at[0]}" if at else ""
                assert not at, f"{asked}: {what}, other tokens come in {place}: {got[at[0]]}, not {first[at[0]]}"
