"""Test data for processors and samplers: sets of sampling parameters, and sequences that have them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from minivllm.core.interfaces.params import SamplingParams

from .drawing import one_of, whole
from .sampling_rows import BANS, DRAWS, MAX_LEN, PENALTIES, VALUES, SampledSeq, normal_logits, values_of

Keywords = st.SearchStrategy[dict[str, Any]]
DRAWN = (*DRAWS, "typical_p")
GROUPS = (PENALTIES, ("logit_bias",), BANS, ("temperature_schedule",), DRAWN)  # tested together


def keywords_of(reads: Collection[str], params: Sequence[Mapping[str, Any]], vocab: int) -> Keywords | None:
    """Return a hypothesis strategy that draws keywords of SamplingParams that a plug-in reads.

    They are standard parameters that are tested together, or one of ``params``, the values of the plug-in's own
    parameters. None means that the kit has no values for any parameter in ``reads``.
    """
    found = []
    for group in GROUPS:
        values = {}
        for name in group:
            if name in reads:
                values[name] = values_of(name, vocab)
        if values:
            found.append(st.fixed_dictionaries({}, optional=values))
    if "mirostat_tau" in reads:  # mirostat replaces the limits top-k, top-p and min-p
        eta = st.sampled_from([0.05, 0.5])
        temperature = st.sampled_from([0.4, 1.7])
        more = {"mirostat_eta": eta, "temperature": temperature}
        tau = {"mirostat_tau": values_of("mirostat_tau", vocab)}
        found.append(st.fixed_dictionaries(tau, optional=more))
    if params:
        own = st.sampled_from(list(params))
        found.append(own.map(dict))
    if found:
        return st.one_of(found)
    return None if reads else st.just({})


def random_keywords(
    rng: np.random.Generator, reads: Collection[str], params: Sequence[Mapping[str, Any]], vocab: int
) -> dict[str, Any]:
    """Return random keywords of SamplingParams that a sampler reads, or one of ``params``, its own parameters.

    Most cases set several limits, as an error in their order needs two that have an effect.  Mirostat replaces them.
    """
    if params and rng.random() < 0.5:
        return dict(params[int(rng.integers(len(params)))])
    names = [name for name in (*DRAWS, "typical_p") if name in reads and rng.random() < 0.75]
    if "mirostat_tau" in reads and rng.random() < 0.5:
        names = ["mirostat_tau", *(name for name in names if name == "temperature")]
    many: dict[str, Sequence[Any]] = {"top_k": range(1, vocab + 2), "top_p": (*VALUES["top_p"], 0.7512345, 0.853579)}
    if "mirostat_tau" in names:
        many["temperature"] = (0.4, 1.7)  # a temperature of 0 is refused
    requested = {}
    for name in names:
        values = many.get(name, VALUES[name])
        requested[name] = values[int(rng.integers(len(values)))]
    return requested


class Noted(dict[str, Any]):
    """A dict for ``SamplingParams.extra`` that records in ``names`` the parameters that code looks up."""

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
    """Return rows of logits f32 [V] that differ from a given row as much as possible.

    One token is certain, all tokens are alike, all logits are much larger, much smaller or far apart, or only one
    token is possible.
    """
    certain = logits.clone()
    before_best = int(logits.argmax()) - 1
    certain[before_best] = 60.0
    single = torch.full_like(logits, -torch.inf)
    single[0] = 1.0
    level = torch.where(logits.isfinite(), 0.0, logits)
    level_zero = torch.zeros_like(logits)
    moved = [logits + 50, logits - 300, 20 * logits, logits.flip(0)]
    return [certain, level, level_zero, *moved, single]


def histories(vocab: int) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return histories after which a parameter may take effect, as name -> (prompt tokens, output tokens).

    A penalty or a ban may need a token that came often, a tail that repeats, a token of the prompt, or an empty
    output.
    """
    rng = np.random.default_rng(1)

    def some(n: int) -> tuple[int, ...]:
        ids = rng.integers(0, vocab, n)
        return tuple(ids.tolist())

    prompt = some(9)
    distinct = rng.permutation(vocab)
    phrase = tuple(distinct[:4].tolist())
    end = vocab - 1
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
    """Draw n sequences with parameters from ``keywords``, repeated tokens, and some logits of -inf and 0."""
    seed = whole(data, 0, 2**32)
    rng = np.random.default_rng(seed)
    return [_make_sequence(data, rng, vocab, keywords) for _ in range(n)]


def _make_sequence(data: Any, rng: np.random.Generator, vocab: int, keywords: Callable[[int], Keywords]) -> SampledSeq:
    keywords_drawn = data.draw(keywords(vocab))
    params = SamplingParams.make(**keywords_drawn)
    some = rng.integers(0, vocab, 3).tolist()
    favourites = [0, vocab - 1, *some]
    length = whole(data, 1, MAX_LEN - 5)
    repeats = rng.random(length) < 0.5
    repeated = rng.choice(favourites, length)
    others = rng.integers(0, vocab, length)
    tokens = np.where(repeats, repeated, others)
    words = []
    for word in params.bad_words or ():
        if 1 < len(word) <= length:
            words.append(word[:-1])
    end_of_prompt = whole(data, 1, length)
    if words and rng.random() < 0.7:  # random tokens would hardly ever end with the start of a bad word
        word = words[rng.integers(len(words))]
        tokens[length - len(word) :] = word
        if rng.random() < 0.4:  # the word begins in the prompt, where it is no bad word
            end_of_prompt = length - int(rng.integers(len(word)))
    tail = params.no_repeat_ngram_size - 1
    if tail > 0 and 2 * tail < length and rng.random() < 0.6:  # the first tokens become those of the end
        tokens[:tail] = tokens[length - tail :]
    spread = one_of(data, 0.3, 4.0)
    logits = normal_logits(rng, spread, vocab).numpy()
    logits[rng.random(vocab) < 0.1] = 0.0
    excluded = rng.random(vocab - 1) < 0.1
    logits[1:][excluded] = -np.inf
    ids = tuple(tokens.tolist())
    prompt = ids[:end_of_prompt]
    output = ids[end_of_prompt:]
    seed = int(rng.integers(-(2**62), 2**62))
    sample = int(rng.integers(0, 4))
    return SampledSeq(params, prompt, output, torch.tensor(logits), seed, sample)
