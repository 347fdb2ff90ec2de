"""A model without weights, whose tokens, log-probabilities and logits are functions of the history.

    history ──► 64-bit hash, extended token by token ──► a, b, q ──► rank of token t = (a t + b) mod V
                                                                     probability of rank r ~ q ** r

Each history orders the vocabulary differently, so all tokens are equally frequent.  A row costs O(1), and its k best
tokens O(k).  The first sample of a request is greedy, and the others are drawn at random.  If the engine computes with
a wrong history, the tokens differ.

Hashes are polynomials modulo 2**64 with an odd base, so the hashes of all prefixes of n tokens are one cumulative sum.
"""

from __future__ import annotations

import math

import numpy as np

from minivllm.core.interfaces.plan import LogProbs

BASE, START = np.uint64(0x9E3779B97F4A7C15), np.uint64(0x2545F4914F6CDD1D)
INVERSE = np.uint64(pow(int(BASE), -1, 1 << 64))
# Constants from which independent random numbers are derived for one hash.
SAMPLE, LENGTH_LANE = np.uint64(0xD6E8FEB86659FD93), np.uint64(0xA0761D6478BD642F)
MULTIPLIERS = 16  # number of multipliers; each orders the vocabulary in another way
PROBED = 64  # number of best tokens whose mask bits are checked before the whole mask is read


def mixed(h: np.ndarray) -> np.ndarray:
    """Return hashes u64 in which every bit depends on every bit of ``h`` (the finalizer of MurmurHash3)."""
    h = (h ^ (h >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    h = (h ^ (h >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return h ^ (h >> np.uint64(33))


def uniform(h: np.ndarray) -> np.ndarray:
    """Return f64 in (0, 1) from mixed hashes."""
    return ((h >> np.uint64(11)).astype(np.float64) + 0.5) / (1 << 53)


class MadeUpModel:
    """A model without weights for a vocabulary of ``vocab`` token ids.

    ``eos`` is the id that ends an answer, after ``answer_tokens`` tokens on average.  If ``answer_tokens`` is 0,
    ``eos`` is as frequent as other tokens."""

    def __init__(self, vocab: int, eos: int = -1, answer_tokens: int = 0) -> None:
        self.vocab = vocab
        self.eos = eos
        self.answer_tokens = answer_tokens if eos >= 0 else 0
        start = max(1, int(vocab * 0.618))
        candidates = range(start, start + 64 * MULTIPLIERS)
        coprime = [a for a in candidates if math.gcd(a, vocab) == 1]
        self._a = np.array(coprime[:MULTIPLIERS], np.int64) % vocab
        self._inverse = np.zeros(len(self._a), np.int64)
        if vocab > 1:
            self._inverse[:] = [pow(a, -1, vocab) for a in self._a.tolist()]

    def _order(self, h: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return two arrays i64 that define the order of the vocabulary after each history: the index of the
        multiplier, and the offset."""
        m = mixed(h)
        which = m % np.uint64(len(self._a))
        offset = (m >> np.uint64(8)) % np.uint64(self.vocab)
        return which.astype(np.int64), offset.astype(np.int64)

    def decay(self, h: np.ndarray) -> np.ndarray:
        """Return the ratio q of the probabilities of a rank and the rank before it, f64 from 0.3 to 0.9."""
        return 0.3 + 0.6 * uniform(mixed(h ^ BASE))

    def at_rank(self, h: np.ndarray, rank: np.ndarray) -> np.ndarray:
        """Return the token ids i64 with these ranks after the histories ``h`` (hashes).  Rank 0 is the most likely
        token."""
        which, offset = self._order(h)
        return (rank - offset) % self.vocab * self._inverse[which] % self.vocab

    def rank_of(self, h: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return the ranks i64 of these token ids after the histories ``h`` (hashes); the most likely token has
        rank 0."""
        which, offset = self._order(h)
        return (self._a[which] * tokens + offset) % self.vocab

    def log_prob(self, h: np.ndarray, rank: np.ndarray) -> np.ndarray:
        """Return the log-probabilities f32 of the tokens with these ranks after the histories ``h`` (hashes)."""
        q = self.decay(h)
        whole = np.log1p(-(q**self.vocab))  # so that all probabilities add up to 1
        found = rank * np.log(q) + np.log1p(-q) - whole
        return found.astype(np.float32)

    def draw(self, h: np.ndarray, sample: np.ndarray) -> np.ndarray:
        """Return the next token id i64 [N] after each history, for the branch with the number ``sample`` i64 [N].

        Branch 0 gets the most likely token, other branches draw at random."""
        noise = mixed(h ^ (sample.astype(np.uint64) * SAMPLE))
        geometric = np.log(uniform(noise)) / np.log(self.decay(h))
        drawn = np.minimum(geometric, self.vocab - 1).astype(np.int64)
        drawn[sample == 0] = 0
        tokens = self.at_rank(h, drawn)
        if self.answer_tokens:
            ends = uniform(mixed(noise ^ LENGTH_LANE)) * self.answer_tokens < 1
            tokens = np.where(ends, self.eos, tokens)
        return tokens

    def logits(self, h: np.ndarray) -> np.ndarray:
        """Return the log-probabilities of all tokens, f32 [N, V]."""
        if not len(h):
            return np.empty((0, self.vocab), np.float32)
        each = h[:, None]
        rank = self.rank_of(each, np.arange(self.vocab)[None])
        return self.log_prob(each, rank)

    def scores(self, h: np.ndarray, tokens: np.ndarray, k: int) -> LogProbs:
        """Return the log-probabilities and ranks of the tokens [N] that follow these histories, and the ``k`` best
        tokens after each."""
        rank = self.rank_of(h, tokens)
        best = np.arange(min(k, self.vocab))[None]
        each = h[:, None]
        ids = self.at_rank(each, best).astype(np.int32)
        chosen = self.log_prob(h, rank)
        top = self.log_prob(each, best)
        return LogProbs(chosen, (rank + 1).astype(np.int32), ids, top)

    def likeliest(self, h: np.uint64, words: np.ndarray) -> int:
        """Return the most likely token that a mask allows: bit t % 32 of ``words[t // 32]``, i32 [ceil(V / 32)]."""
        bits = words.view(np.uint32)
        one = np.array([h])
        probed = np.arange(min(PROBED, self.vocab))
        best = self.at_rank(one, probed)
        shift = (best & 31).astype(np.uint32)
        allowed = bits[best >> 5] >> shift & 1
        if allowed.any():
            return int(best[allowed.argmax()])
        tokens = allowed_tokens(bits)
        tokens = tokens[tokens < self.vocab]
        if not len(tokens):
            return int(best[0])
        rank = self.rank_of(one, tokens)
        return int(tokens[rank.argmin()])


def allowed_tokens(words: np.ndarray) -> np.ndarray:
    """Return the token ids i64 whose bits are set in the words u32 of a mask."""
    at = np.flatnonzero(words)
    octets = words[at].astype("<u4").view(np.uint8)
    bits = np.unpackbits(octets, bitorder="little").reshape(-1, 32)
    tokens = at[:, None] * 32 + np.arange(32)
    return tokens[bits > 0]


def scores_of(scores: LogProbs, rows: np.ndarray, logits: np.ndarray, tokens: np.ndarray) -> LogProbs:
    """Return the log-probabilities of a step's ``tokens`` [N], where those of ``rows`` [n] are replaced: these tokens
    were drawn from ``logits`` f32 [n, V]."""
    chosen = np.array(scores.chosen)
    rank = np.array(scores.rank)
    ids = np.array(scores.top_ids)
    top = np.array(scores.top)
    shifted = logits - logits.max(axis=1, keepdims=True)
    mass = np.exp(shifted).sum(axis=1, keepdims=True)
    found = shifted - np.log(mass)
    mine = found[np.arange(len(rows)), tokens[rows]]
    order = np.argsort(-logits, axis=1, kind="stable")
    best = order[:, : ids.shape[1]]
    larger = found > mine[:, None]
    chosen[rows] = mine
    rank[rows] = 1 + larger.sum(axis=1)
    ids[rows] = best
    top[rows] = np.take_along_axis(found, best, axis=1)
    return LogProbs(chosen, rank, ids, top)


class Histories:
    """The tokens of each slot and the hashes of all their prefixes."""

    def __init__(self, slots: int, length: int) -> None:
        self.tokens = np.zeros((slots, length + 1), np.int32)
        self.prefix = np.zeros((slots, length + 2), np.uint64)  # [slot, n] is the hash of the first n tokens
        self.prefix[:, 0] = START
        self._up = powers(BASE, length + 2)
        self._down = powers(INVERSE, length + 2)

    def put(self, slot: int, tokens: np.ndarray) -> None:
        """Store the whole history of a slot."""
        n = len(tokens)
        self.tokens[slot, :n] = tokens
        digits = tokens.astype(np.uint64) + np.uint64(1)
        terms = digits * self._down[1 : n + 1]
        sums = START + np.cumsum(terms, dtype=np.uint64)
        self.prefix[slot, 1 : n + 1] = sums * self._up[1 : n + 1]

    def fork(self, source: int, slot: int, n: int) -> None:
        self.tokens[slot, :n] = self.tokens[source, :n]
        self.prefix[slot, : n + 1] = self.prefix[source, : n + 1]

    def append(self, slots: np.ndarray, at: np.ndarray, tokens: np.ndarray) -> None:
        """Store token ``at`` of each slot.  Later tokens of the slots become invalid."""
        self.tokens[slots, at] = tokens
        digits = tokens.astype(np.uint64) + np.uint64(1)
        self.prefix[slots, at + 1] = self.prefix[slots, at] * BASE + digits


def powers(base: np.uint64, n: int) -> np.ndarray:
    """Return base ** i modulo 2 ** 64, u64 [n]."""
    factors = np.full(n, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)


def hash_of(tokens: np.ndarray) -> np.ndarray:
    """Return the hash u64 [1] of a whole history."""
    found = Histories(1, len(tokens))
    found.put(0, np.asarray(tokens, np.int64))
    return found.prefix[0, len(tokens)][None]


def logits_after(tokens: np.ndarray, vocab: int) -> np.ndarray:
    """Return the logits f32 [V] of the token after ``tokens``, as the executor sim computes them."""
    return MadeUpModel(vocab).logits(hash_of(np.asarray(tokens)))[0]
