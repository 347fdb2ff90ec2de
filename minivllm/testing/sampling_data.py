"""What processors and samplers are tried with: keywords of ``SamplingParams``, and sequences that have them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from minivllm.core.interfaces.params import SamplingParams

from .sampling_rows import BANS, DRAWS, MAX_LEN, PENALTIES, SampledSeq, values_of

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


class Noted(dict[str, Any]):
    """``SamplingParams.extra`` that notes in ``names`` which parameters somebody looked for."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return super().__contains__(name)


def unlike(logits: Tensor) -> list[Tensor]:
    """Logits f32 [V] of neighbours that have nothing in common with a row's: one token that is certain, all tokens
    alike, much larger and much smaller ones, far apart, and one that is left."""
    finite = logits.isfinite()
    peaked, last = logits.clone(), torch.full_like(logits, -torch.inf)
    peaked[int(logits.argmax()) - 1] = 60.0
    last[0] = 1.0
    level = torch.where(finite, 0.0, logits)
    return [peaked, level, torch.zeros_like(logits), logits + 50, logits - 300, 20 * logits, logits.flip(0), last]


def histories(vocab: int) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """What a sequence may look like when a parameter takes effect, (prompt, output) each: penalties and bans may need a
    token that came often, a tail that repeats, one that was in the prompt, or none of it."""
    rng = np.random.default_rng(1)
    some = lambda n: tuple(rng.integers(0, vocab, n).tolist())  # noqa: E731
    prompt, phrase, end = some(9), tuple(rng.permutation(vocab)[:4].tolist()), vocab - 1
    return {
        "tokens at random": (prompt, some(12)), "one token again and again": (prompt, (5,) * 12),
        "a tail of two that repeats": (prompt, (*some(3), *(3, 8) * 5)),
        "a tail of four that repeats": (prompt, (*some(2), *phrase * 4)),
        "the prompt again": (phrase * 3, phrase * 3), "a prompt that repeats": ((*prompt, *phrase * 4), ()),
        "each token once": ((0,), tuple(range(1, min(vocab, 40)))), "nothing yet": ((end,), ()),
        "one token": (prompt, (2,)), "the first and the last token": ((0, end), (0, end, end, 0)),
        "an end of the prompt that repeats": (phrase * 3, phrase[:2]),
        "a long answer": (prompt, (*some(20), *phrase * 3)),
    }  # fmt: skip


def make_sequences(data: Any, n: int, vocab: int, keywords: Callable[[int], Keywords]) -> list[SampledSeq]:
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
        out.append(SampledSeq(params, ids[:prompt], ids[prompt:], torch.tensor(logits), seed, sample))
    return out
