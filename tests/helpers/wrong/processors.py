"""Wrong processors: ``Penalties`` or ``LogitBias`` with one fault each."""

from __future__ import annotations

from dataclasses import replace

import torch

from minivllm.core.interfaces.sampling import Column, Processor, Row
from minivllm.plugins.processor.logit_bias import LogitBias
from minivllm.plugins.processor.penalties import OUTPUT, REPETITION, Penalties
from minivllm.registration.spec import ANY, Spec

SEAM = "processor"
EXACT = "test_logits_are_those_of_the_float64_reference"
BATCH = "test_a_row_does_not_depend_on_the_rows_beside_it"
STALE = "test_stale_history_and_other_slots_do_not_matter"
STATE = "test_state_is_in_the_columns_alone"
COMMIT = "test_commit_counts_accepted_tokens_only"
LONG = "test_a_long_history_counts_to_its_end"
DEFAULT = "test_default_parameters_change_nothing"
FAULTS = {
    "PresenceOfThePrompt": (EXACT,),
    "CountsStale": (EXACT, STALE),
    "ByRow": (EXACT, BATCH),
    "LeaksTheVariant": (BATCH,),
    "NanFromInf": (EXACT, "test_a_single_token_that_is_left_stays"),
    "Half": (EXACT,),
    "WrongSign": (EXACT,),
    "Stored": (EXACT,),
    "OutOfPlace": (EXACT, "test_every_parameter_that_it_reads_changes_something"),
    "LongestOfTheBatch": (STALE,),
    "SmallIds": ("test_a_large_vocabulary", "test_bind_gives_values_for_the_declared_columns"),
    "OnForAll": (DEFAULT,),
    "TakesAnyBias": ("test_bad_values_are_refused_by_name",),
    "NamesNoParameter": ("test_bad_values_are_refused_by_name",),
    "ReadsMore": ("test_a_parameter_that_it_does_not_read_has_no_effect",),
    "IgnoresOne": (EXACT, "test_every_parameter_that_it_reads_changes_something"),
    "Misspelt": ("test_it_reads_parameters_that_exist",),
    "ShortRow": ("test_bind_gives_values_for_the_declared_columns",),
    "WritesToRows": (EXACT,),
    "SixtyFourTokens": (LONG,),
}
RIGHT = ("SlowPenalties", "Watermark", "Captured")


def spec(name: str, *features: str) -> Spec:
    features = frozenset(features)
    return Spec(f"{__name__}:{name}", (1, 0), "a planted fault", limits={"device": ANY}, features=features)


class PresenceOfThePrompt(Penalties):
    """Presence and frequency count the prompt too."""

    spec = spec("PresenceOfThePrompt")

    def apply(self, logits, rows, state):
        super().apply(logits, replace(rows, prompt=torch.zeros_like(rows.prompt)), state)


class CountsStale(Penalties):
    """Counts all that is in the row of the token history."""

    spec = spec("CountsStale")

    def apply(self, logits, rows, state):
        tokens = rows.tokens.clamp(0, logits.shape[1] - 1)
        position = torch.full_like(rows.position, rows.max_position)
        super().apply(logits, replace(rows, tokens=tokens, position=position), state)


class ByRow(Penalties):
    """Indexes its columns by row instead of by slot."""

    spec = spec("ByRow")

    def apply(self, logits, rows, state):
        state = {name: c[: len(logits)].clone() for name, c in state.items()}
        state = {
            name: torch.empty_like(rows.tokens[:, 0], dtype=c.dtype).index_copy(0, rows.slots, c)
            for name, c in state.items()
        }
        super().apply(logits, rows, state)


class LeaksTheVariant(Penalties):
    """Applies a parameter of one row to every row, because it treats a bit of the step as a bit of the row."""

    spec = spec("LeaksTheVariant")

    def apply(self, logits, rows, state):
        if rows.variant & OUTPUT and rows.variant & REPETITION:
            logits -= 0.01
        super().apply(logits, rows, state)


class WritesToRows(Penalties):
    """Changes the engine's rows to the preceding token, also for later plug-ins."""

    spec = spec("WritesToRows")

    def apply(self, logits, rows, state):
        super().apply(logits, rows, state)
        rows.position.sub_(1)


class SixtyFourTokens(Penalties):
    """A buffer of 64 tokens of history."""

    spec = spec("SixtyFourTokens")

    def apply(self, logits, rows, state):
        super().apply(logits, replace(rows, max_position=min(rows.max_position, 64)), state)


class NanFromInf(Penalties):
    """Selects by multiplying with 0 and 1: 0 * inf."""

    spec = spec("NanFromInf")

    def apply(self, logits, rows, state):
        before = logits.clone()
        super().apply(logits, rows, state)
        same = (logits == before).float()
        logits.copy_(before * same + logits * (1 - same))


class Half(Penalties):
    """Computes in float16."""

    spec = spec("Half")

    def apply(self, logits, rows, state):
        half = logits.half()
        super().apply(half, rows, {name: c.half() for name, c in state.items()})
        logits.copy_(half)


class WrongSign(Penalties):
    """Divides negative logits too, which makes repeated tokens likelier."""

    spec = spec("WrongSign")

    def apply(self, logits, rows, state):
        sign, size, variant = logits.sign(), logits.abs(), rows.variant
        super().apply(size, replace(rows, variant=variant & REPETITION), state)
        logits.copy_(size * sign)
        super().apply(logits, replace(rows, variant=variant & OUTPUT), state)


class Stored(LogitBias):
    """The bias takes the place of the logit."""

    spec = spec("Stored")

    def apply(self, logits, rows, state):
        ids, bias = state["ids"][rows.slots], state["bias"][rows.slots]
        for row, i, b in zip(logits, ids, bias, strict=True):
            row[i[i >= 0].long()] = b[i >= 0]


class OutOfPlace(LogitBias):
    """Works on a copy."""

    spec = spec("OutOfPlace")

    def apply(self, logits, rows, state):
        super().apply(logits.clone(), rows, state)


class LongestOfTheBatch(Penalties):
    """Takes ``max_position`` for the length of each row: divides by it."""

    spec = spec("LongestOfTheBatch")

    def apply(self, logits, rows, state):
        before = logits.clone()
        super().apply(logits, rows, state)
        logits.copy_(torch.where(logits == before, logits, logits - 1 / rows.max_position))


class SmallIds(LogitBias):
    """Ids in int16, biases in float16: fine with a toy vocabulary."""

    spec = spec("SmallIds")

    def columns(self):
        return {
            name: Column(c.shape, "int16" if name == "ids" else "float16", c.fill)
            for name, c in super().columns().items()
        }

    def bind(self, params, prompt_len):
        row = super().bind(params, prompt_len)
        return row and Row({**row.values, "bias": row.values["bias"] * 1e3})

    def apply(self, logits, rows, state):
        super().apply(logits, rows, {"ids": state["ids"].int(), "bias": state["bias"].float() / 1e3})


class OnForAll(Penalties):
    """Is on for everybody, with a penalty of its own."""

    spec = spec("OnForAll")

    def bind(self, params, prompt_len):
        return super().bind(params, prompt_len) or Row({"repetition": 1.05}, REPETITION)


class TakesAnyBias(LogitBias):
    """Detects an id outside the vocabulary only by the error of scatter."""

    spec = spec("TakesAnyBias")

    def _token(self, key):
        return int(key)


class NamesNoParameter(LogitBias):
    """Raises Python's own error without the parameter's name."""

    spec = spec("NamesNoParameter")

    def bind(self, params, prompt_len):
        for token, bias in (params.logit_bias or {}).items():
            if not 0 <= int(token) < self.ctx.vocab_size or not -100 <= bias <= 100:
                raise ValueError("bad bias")
        return super().bind(params, prompt_len)


class ReadsMore(Penalties):
    """Also reads the temperature, and does not declare it."""

    spec = spec("ReadsMore")

    def bind(self, params, prompt_len):
        row = super().bind(params, prompt_len)
        if row is not None and params.temperature < 1:
            row = Row({**row.values, "presence": 0.0}, row.variant)
        return row


class IgnoresOne(Penalties):
    """Declares frequency_penalty, so that requests with it are accepted, but ignores it."""

    spec = spec("IgnoresOne")

    def bind(self, params, prompt_len):
        row = super().bind(params, prompt_len)
        return row and Row({k: v for k, v in row.values.items() if k != "frequency"}, row.variant)


class Misspelt(Penalties):
    spec = spec("Misspelt")
    reads = frozenset(("repetition_penality", "presence_penalty", "frequency_penalty"))


class ShortRow(LogitBias):
    """Gives as many values as the request has, not as the column holds."""

    spec = spec("ShortRow")

    def bind(self, params, prompt_len):
        row = super().bind(params, prompt_len)
        return row and Row({k: v[: len(params.logit_bias)] for k, v in row.values.items()})


class SlowPenalties(Processor):
    """Right.  It computes row by row in float64 on the host."""

    spec = spec("SlowPenalties")
    reads = Penalties.reads

    def columns(self):
        return {"all": Column((3,), "float64")}

    def bind(self, params, prompt_len):
        values = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        return None if values == (1, 0, 0) else Row({"all": values})

    def apply(self, logits, rows, state):
        for i, slot in enumerate(rows.slots.tolist()):
            end, prompt = int(rows.position[i]), int(rows.prompt[i])
            history = rows.tokens[slot, :end].tolist()
            repetition, presence, frequency = state["all"][slot].tolist()
            row = logits[i].double()
            for token in set(history):
                row[token] *= 1 / repetition if row[token] > 0 else repetition
                times = history[prompt:].count(token)
                row[token] -= frequency * times + presence * (times > 0)
            logits[i] = row.float()


class Watermark(Processor):
    """Right.

    It reads no parameter, because the config enables it.  The preceding token decides which tokens are preferred.
    """

    spec = spec("Watermark")

    def bind(self, params, prompt_len):
        return Row()

    def apply(self, logits, rows, state):
        last = rows.tokens[rows.slots, rows.position - 1].long()
        token = torch.arange(logits.shape[1], device=logits.device)
        logits += 0.5 * ((token * 7919 + last[:, None] * 104729) % 4 == 0)


class Captured(Penalties):
    """Right.  The built-in processor, which may be captured in a graph."""

    spec = spec("Captured", "graph_safe")
