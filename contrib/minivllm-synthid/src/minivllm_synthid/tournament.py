"""The tournament of SynthID-Text and its detector (Dathathri et al., "Scalable watermarking for identifying large
language model outputs", Nature 634, 2024, doi:10.1038/s41586-024-08025-4).

A hash of a secret key and of the last few tokens, the *context*, gives each token of the vocabulary one bit a layer,
its *g-values*.  A layer of the tournament lets pairs of tokens that were drawn from the distribution meet, of which one
with g = 1 wins; of m layers the winner has more ones than chance gives it.  In the limit of the paper's two-token
tournament a layer turns the distribution p into::

    p'(x) = p(x) (1 + g(x) - sum over y of p(y) g(y))

so that p itself can be watermarked and then drawn from, with the engine's own noise.  Averaged over keys it stays p.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.plugin import noise_bits

MULTIPLIER = 6364136223846793005  # of Knuth's MMIX generator: odd, so that no bit of a token is lost


def context_hash(tokens: Tensor, key: int) -> Tensor:
    """Return hashes i64 [...] of contexts i64 [..., context].  A hash is never 0, which means "no context"."""
    h = torch.full(tokens.shape[:-1], key, dtype=torch.int64, device=tokens.device)
    for token in tokens.unbind(-1):
        h = (h ^ token) * MULTIPLIER  # int64 wraps around
        h = h ^ ((h >> 29) & 0x7FFFFFFFF)
    return torch.where(h == 0, 1, h)


def g_bits(context: Tensor, tokens: Tensor) -> Tensor:
    """Return 32 g-values as the bits of an int32, in the broadcast shape of context hashes and token ids."""
    zero = torch.zeros((), dtype=torch.int64, device=context.device)
    return noise_bits(context, zero, zero, tokens)


def tournament(prob: Tensor, context: Tensor, layers: int) -> Tensor:
    """Return probabilities [N, V] after ``layers`` rounds for context hashes i64 [N].  Probability 0 stays 0."""
    bits = g_bits(context[:, None], torch.arange(prob.shape[1], device=prob.device))
    for layer in range(layers):
        g = ((bits >> layer) & 1).to(prob.dtype)
        # a sum may round above 1, which would give a probability below 0
        mean = (prob * g).sum(dim=1, keepdim=True).clamp_(max=1.0)
        prob = prob * (1 + g - mean)
    return prob


def detect(tokens: list[int], key: int = 0x5EED, context: int = 4, layers: int = 30) -> tuple[float, int]:
    """Return (z, n): the standard deviations by which the mean g-value exceeds that of unmarked text, over n tokens."""
    ids = torch.tensor(tokens, dtype=torch.int64)
    if len(ids) <= context:
        return 0.0, 0
    hashes = context_hash(ids[:-1].unfold(0, context, 1), key)
    seen: set[int] = set()
    first = torch.tensor([h not in seen and not seen.add(h) for h in hashes.tolist()])  # type: ignore[func-returns-value]
    bits = g_bits(hashes[first], ids[context:][first])
    ones = sum(int(((bits >> layer) & 1).sum()) for layer in range(layers))
    n = int(first.sum())
    return (ones - n * layers / 2) / (n * layers / 4) ** 0.5, n
