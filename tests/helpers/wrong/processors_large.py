"""Wrong processors that silently cut off long inputs."""

from __future__ import annotations

from dataclasses import replace

import torch

from minivllm.plugins.processor.allowed_tokens import AllowedTokens
from minivllm.plugins.processor.bad_words import BadWords
from minivllm.plugins.processor.logit_bias import LogitBias
from minivllm.plugins.processor.no_repeat_ngram import NoRepeatNgram
from minivllm.plugins.processor.penalties import Penalties
from minivllm.registration.spec import ANY, Spec

SEAM = "processor"
WHOLE = "test_what_is_long_is_served_whole_or_refused"
FAULTS = {
    "HistoryOf512": ("test_a_very_long_history_counts_too",),
    "BiasOf32": (WHOLE,),
    "AllowsThe64First": (WHOLE,),
    "SixteenWords": (WHOLE,),
    "WordsOfFour": (WHOLE,),
    "GramsOfEight": (WHOLE,),
    "SixtyFourRows": ("test_many_rows_get_what_each_gets_alone",),
    "RemembersBinds": ("test_what_has_ended_leaves_nothing_behind",),
}
RIGHT = ("LastRowFirst",)


def spec(name: str) -> Spec:
    return Spec(f"{__name__}:{name}", (1, 1), "for a test of the kit", limits={"device": ANY}, features=frozenset())


class HistoryOf512(Penalties):
    """A buffer of 512 tokens of history."""

    spec = spec("HistoryOf512")

    def apply(self, logits, rows, state):
        super().apply(logits, replace(rows, max_position=min(rows.max_position, 512)), state)


class BiasOf32(LogitBias):
    """Room for 32 entries."""

    spec = spec("BiasOf32")

    def bind(self, params, prompt_len):
        if isinstance(params.logit_bias, dict):
            params = replace(params, logit_bias=dict(list(params.logit_bias.items())[:32]))
        return super().bind(params, prompt_len)


class AllowsThe64First(AllowedTokens):
    spec = spec("AllowsThe64First")

    def bind(self, params, prompt_len):
        if isinstance(params.allowed_token_ids, list):
            params = replace(params, allowed_token_ids=params.allowed_token_ids[:64])
        return super().bind(params, prompt_len)


class SixteenWords(BadWords):
    spec = spec("SixteenWords")

    def bind(self, params, prompt_len):
        if isinstance(params.bad_words, list):
            params = replace(params, bad_words=params.bad_words[:16])
        return super().bind(params, prompt_len)


class WordsOfFour(BadWords):
    """Longer words do not fit, and are left out."""

    spec = spec("WordsOfFour")

    def bind(self, params, prompt_len):
        if isinstance(params.bad_words, list) and all(isinstance(word, list) for word in params.bad_words):
            params = replace(params, bad_words=[word for word in params.bad_words if len(word) <= 4])
        return super().bind(params, prompt_len)


class GramsOfEight(NoRepeatNgram):
    """Longer n-grams are taken for ones of eight."""

    spec = spec("GramsOfEight")

    def bind(self, params, prompt_len):
        return super().bind(replace(params, no_repeat_ngram_size=min(params.no_repeat_ngram_size, 8)), prompt_len)


class SixtyFourRows(Penalties):
    """The grid ends."""

    spec = spec("SixtyFourRows")

    def apply(self, logits, rows, state):
        super().apply(logits[:64], rows.pick(torch.arange(min(64, len(logits)))), state)


class RemembersBinds(Penalties):
    """Keeps the parameters of all requests."""

    spec = spec("RemembersBinds")

    def bind(self, params, prompt_len):
        self.bound = [*getattr(self, "bound", ()), params]
        return super().bind(params, prompt_len)


class LastRowFirst(Penalties):
    """Right.  It works on a copy, from the last row to the first."""

    spec = spec("LastRowFirst")

    def apply(self, logits, rows, state):
        at = torch.arange(len(logits)).flip(0)
        x = logits[at]
        super().apply(x, rows.pick(at), state)
        logits[at] = x
