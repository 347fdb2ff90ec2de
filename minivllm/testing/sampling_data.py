"""What processors and samplers are tried with: keywords of ``SamplingParams``, and sequences that have them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from minivllm.core.request import SamplingParams

from .sampling_rows import BANS, DRAWS, MAX_LEN, PENALTIES, Seq, values_of

Keywords = st.SearchStrategy[dict[str, Any]]


def keywords_of(reads: Collection[str], params: Sequence[Mapping[str, Any]], vocab: int) -> Keywords | None:
    """Keywords that a plug-in reads: standard ones, or one of its own ``params``.  None: there is nothing to try."""
    all_groups = (PENALTIES, ("logit_bias",), BANS, ("temperature_schedule",), (*DRAWS, "typical_p"))
    groups = [[n for n in group if n in reads] for group in all_groups]
    found = [st.fixed_dictionaries({}, optional={n: values_of(n, vocab) for n in g}) for g in groups if g]
    if "mirostat_tau" in reads:  # it takes the place of the other limits
        more = {"mirostat_eta": st.sampled_from([0.05, 0.5]), "temperature": st.sampled_from([0.4, 1.7])}
        found.append(st.fixed_dictionaries({"mirostat_tau": values_of("mirostat_tau", vocab)}, optional=more))
    own = list(params)
    found += [st.sampled_from(own).map(dict)] if own else []
    if not found and reads:
        return None
    return st.one_of(found) if found else st.just({})


def unlike(logits: Tensor) -> list[Tensor]:
    """Logits f32 [V] of neighbours that have nothing in common with a row's: one token that is certain, all tokens
    alike, much larger and much smaller ones, far apart, and one that is left."""
    finite = logits.isfinite()
    peaked, last = logits.clone(), torch.full_like(logits, -torch.inf)
    peaked[int(logits.argmax()) - 1] = 60.0
    last[0] = 1.0
    level = torch.where(finite, 0.0, logits)
    return [peaked, level, torch.zeros_like(logits), logits + 50, logits - 300, 20 * logits, logits.flip(0), last]


def make_sequences(data: Any, n: int, vocab: int, keywords: Callable[[int], Keywords]) -> list[Seq]:
    """n sequences with such parameters, tokens that repeat, and some logits of -inf and 0."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    out = []
    for _ in range(n):
        params = SamplingParams.make(**data.draw(keywords(vocab)))
        favourites = [0, vocab - 1, *rng.integers(0, vocab, 3).tolist()]
        length = data.draw(st.integers(1, MAX_LEN - 5))
        tokens = np.where(rng.random(length) < 0.5, rng.choice(favourites, length), rng.integers(0, vocab, length))
        words = [word[:-1] for word in params.bad_words or () if 1 < len(word) <= length]
        if words and rng.random() < 0.7:  # or hardly any would come
            word = words[rng.integers(len(words))]
            tokens[length - len(word) :] = word
        prompt = data.draw(st.integers(1, length))
        logits = rng.normal(0, data.draw(st.sampled_from([0.3, 4.0])), vocab).astype(np.float32)
        logits[rng.random(vocab) < 0.1] = 0.0
        logits[1:][rng.random(vocab - 1) < 0.1] = -np.inf
        ids = tuple(tokens.tolist())
        seed, sample = int(rng.integers(-(2**62), 2**62)), int(rng.integers(0, 4))
        out.append(Seq(params, ids[:prompt], ids[prompt:], torch.tensor(logits), seed, sample))
    return out
