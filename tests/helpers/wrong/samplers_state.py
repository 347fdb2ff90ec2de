"""Wrong samplers, which are typical and mirostat with one fault each in their state or their exclusions."""

from __future__ import annotations

from dataclasses import replace

import torch

from minivllm.core.interfaces.sampling import Column
from minivllm.plugins.sampler.default import DefaultSampler
from minivllm.plugins.sampler.mirostat import MirostatSampler
from minivllm.plugins.sampler.typical import TypicalSampler
from minivllm.registration.spec import ANY, Spec

SEAM = "sampler"
LIMIT = "test_each_limit_is_where_it_should_be"
PREEMPTED = "test_a_preempted_row_goes_on_as_if_it_had_stayed"
COMMIT = "test_commit_counts_accepted_tokens_only"
SAYS = "test_what_it_says_it_draws_from_is_what_it_draws_from"
FAULTS = {
    "ForgetsMu": (PREEMPTED,),
    "LearnsFromTheDraw": (PREEMPTED,),
    "CountsNothing": (COMMIT,),
    "LearnsAgain": (COMMIT,),
    "Likeliest": (LIMIT,),
    "HalfOfTheTarget": (LIMIT,),
    "SaysTypicalIsAll": (SAYS,),
    "SaysMirostatIsAll": (SAYS,),
    "SaysInPlace": (SAYS,),
}
RIGHT = ()


def spec(name: str) -> Spec:
    return Spec(f"{__name__}:{name}", (1, 1), "a planted fault", limits={"device": ANY}, features=frozenset())


class ForgetsMu(MirostatSampler):
    """A row that comes back starts with the first mu."""

    spec = spec("ForgetsMu")

    def columns(self):
        return {name: replace(column, kept=False) for name, column in super().columns().items()}


class LearnsFromTheDraw(MirostatSampler):
    """Keeps its state in a column that nobody declared as kept, and writes it while it draws."""

    spec = spec("LearnsFromTheDraw")

    def columns(self):
        return {**super().columns(), "drawn": Column()}

    def draw(self, logits, rows, state, out):
        logits -= state["drawn"][rows.slots][:, None] * torch.arange(logits.shape[1], device=logits.device)
        super().draw(logits, rows, state, out)
        state["drawn"][rows.slots] += 0.25


class CountsNothing(MirostatSampler):
    """Updates its state with tokens that were not accepted."""

    spec = spec("CountsNothing")

    def commit(self, tokens, count, rows, state):
        super().commit(tokens, torch.ones_like(count), rows, state)


class LearnsAgain(MirostatSampler):
    """Uses the surprise of the drawn token for each committed token."""

    spec = spec("LearnsAgain")

    def commit(self, tokens, count, rows, state):
        error = state["error"].clone()
        super().commit(tokens, count, rows, state)
        state["error"].copy_(error)


class Likeliest(TypicalSampler):
    """Takes top-p for typical."""

    spec = spec("Likeliest")

    def bind(self, params, prompt_len):
        return super().bind(replace(params, top_p=params.typical_p, typical_p=1.0), prompt_len)


class HalfOfTheTarget(MirostatSampler):
    """mu starts at tau."""

    spec = spec("HalfOfTheTarget")

    def bind(self, params, prompt_len):
        row = super().bind(params, prompt_len)
        mu = row.values.get("mu")
        return row if mu is None else replace(row, values={**row.values, "mu": mu / 2})


class SaysTypicalIsAll(TypicalSampler):
    """Returns the log-probabilities before typical excludes tokens."""

    spec = spec("SaysTypicalIsAll")

    def drawn_from(self, logits, rows, state):
        return DefaultSampler.drawn_from(self, logits, rows, state)


class SaysMirostatIsAll(MirostatSampler):
    spec = spec("SaysMirostatIsAll")

    def drawn_from(self, logits, rows, state):
        return DefaultSampler.drawn_from(self, logits, rows, state)


class SaysInPlace(MirostatSampler):
    """Writes the distribution into the logits, which the draw reads afterwards."""

    spec = spec("SaysInPlace")

    def drawn_from(self, logits, rows, state):
        return logits.copy_(super().drawn_from(logits, rows, state))
