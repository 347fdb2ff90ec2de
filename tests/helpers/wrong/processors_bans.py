"""Wrong processors that ban tokens or schedule the temperature, with one fault each."""

from __future__ import annotations

from dataclasses import replace

import torch

from minivllm.core.interfaces.sampling import Row
from minivllm.device.worker.sampling import apply_mask
from minivllm.plugins.processor.allowed_tokens import AllowedTokens
from minivllm.plugins.processor.bad_words import BadWords
from minivllm.plugins.processor.no_repeat_ngram import NoRepeatNgram
from minivllm.plugins.processor.temperature_schedule import TemperatureSchedule
from minivllm.registration.spec import ANY, Spec

SEAM = "processor"
EXACT = "test_logits_are_those_of_the_float64_reference"
STALE = "test_stale_history_and_other_slots_do_not_matter"
BAD = "test_bad_values_are_refused_by_name"
FAULTS = {
    "GramsOfTheOutput": (EXACT,),
    "StaleGrams": (EXACT, STALE),
    "StepsFromThePrompt": (EXACT,),
    "OneMore": (EXACT,),
    "AnyId": (BAD,),
    "SharedMask": (EXACT, "test_a_row_does_not_depend_on_the_rows_beside_it"),
    "WordsOfThePrompt": (EXACT,),
}
RIGHT = ()


def spec(name: str) -> Spec:
    return Spec(f"{__name__}:{name}", (1, 1), "a planted fault", limits={"device": ANY}, features=frozenset())


class WordsOfThePrompt(BadWords):
    """A bad word may begin in the prompt."""

    spec = spec("WordsOfThePrompt")

    def apply(self, logits, rows, state):
        super().apply(logits, replace(rows, prompt=torch.zeros_like(rows.prompt)), state)


class GramsOfTheOutput(NoRepeatNgram):
    """Repeats n-grams of the prompt."""

    spec = spec("GramsOfTheOutput")

    def apply(self, logits, rows, state):
        tokens = rows.tokens.clone()
        for slot, n in zip(rows.slots.tolist(), rows.prompt.tolist(), strict=True):
            tokens[slot, :n] = torch.arange(-n, 0, dtype=tokens.dtype) % 2 * 3
        super().apply(logits, replace(rows, tokens=tokens), state)


class StaleGrams(NoRepeatNgram):
    """Reads the memory behind the history as part of it."""

    spec = spec("StaleGrams")

    def apply(self, logits, rows, state):
        super().apply(logits, replace(rows, position=rows.position.clamp(max=rows.max_position - 1) + 1), state)


class StepsFromThePrompt(TemperatureSchedule):
    """Counts the prompt as steps."""

    spec = spec("StepsFromThePrompt")

    def apply(self, logits, rows, state):
        super().apply(logits, replace(rows, prompt=torch.zeros_like(rows.prompt)), state)


class OneMore(AllowedTokens):
    """Allows the token behind the largest id too."""

    spec = spec("OneMore")

    def bind(self, params, prompt_len):
        ids = params.allowed_token_ids
        if not ids or not all(isinstance(i, int) for i in ids):
            return super().bind(params, prompt_len)
        more = [*ids, min(max(ids) + 1, self.ctx.vocab_size - 1)]
        return super().bind(replace(params, allowed_token_ids=more), prompt_len)


class AnyId(AllowedTokens):
    """Drops ids that are not in the vocabulary."""

    spec = spec("AnyId")

    def bind(self, params, prompt_len):
        ids = params.allowed_token_ids
        if isinstance(ids, list) and all(isinstance(i, int) for i in ids):
            params = replace(params, allowed_token_ids=[i for i in ids if 0 <= i < self.ctx.vocab_size] or [0])
        return super().bind(params, prompt_len)


class SharedMask(AllowedTokens):
    """All rows of a step get the first one's list."""

    spec = spec("SharedMask")

    def bind(self, params, prompt_len):
        row = super().bind(params, prompt_len)
        return row and Row(row.values)

    def apply(self, logits, rows, state):
        apply_mask(logits, state["mask"][rows.slots[:1]].expand(len(logits), -1))
