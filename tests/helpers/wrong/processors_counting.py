"""Wrong processors that count in columns as tokens are committed: ``frequency_penalty`` with one fault each."""

from __future__ import annotations

import torch

from minivllm.core.interfaces.sampling import Column, Processor, Row
from minivllm.registration.spec import ANY, Spec

SEAM = "processor"
STATE = "test_state_is_in_the_columns_alone"
COMMIT = "test_commit_counts_accepted_tokens_only"
LONG = "test_a_long_history_counts_to_its_end"
FAULTS = {
    "CommitsRejected": (COMMIT,),
    "CommitsOneOfMany": (COMMIT,),
    "KeptInTheInstance": (STATE,),
    "BoundOnTheHost": (STATE, "test_every_parameter_that_it_reads_changes_something"),
    "CapsEverySlot": ("test_only_the_columns_of_its_rows_change",),
    "CommitsWritingToRows": (COMMIT,),
    "CountsTwiceOnce": (COMMIT,),
    "CountsInAByte": (LONG,),
    "ForkForgets": ("test_a_fork_goes_on_as_its_source",),
    "CountsAndClaims": ("test_positions_of_one_row_are_served_together",),
}
RIGHT = ("CountedFrequency",)


def spec(name: str, *features: str) -> Spec:
    features = frozenset(features)
    return Spec(f"{__name__}:{name}", (1, 0), "a planted fault", limits={"device": ANY}, features=features)


class Counter(Processor):
    """frequency_penalty as a running count in a column, which is right."""

    reads = frozenset(("frequency_penalty",))

    def columns(self):
        return {"penalty": Column(), "count": Column((self.ctx.vocab_size,), "int32")}

    def bind(self, params, prompt_len):
        return Row({"penalty": params.frequency_penalty}) if params.frequency_penalty else None

    def apply(self, logits, rows, state):
        logits -= state["count"][rows.slots] * state["penalty"][rows.slots][:, None]

    def commit(self, tokens, count, rows, state):
        valid = torch.arange(tokens.shape[1], device=tokens.device) < count[:, None]
        slots = rows.slots[:, None].expand_as(tokens)
        state["count"].index_put_((slots, tokens), valid.int(), accumulate=True)


class CountedFrequency(Counter):
    """Right.  The state is in a column, updated by commit."""

    spec = spec("CountedFrequency")


class CountsAndClaims(Counter):
    """Its count ignores drafts, although it claims to handle several positions."""

    spec = spec("CountsAndClaims", "multi_position")


class CommitsRejected(Counter):
    """Counts every token that it is shown."""

    spec = spec("CommitsRejected")

    def commit(self, tokens, count, rows, state):
        super().commit(tokens, torch.full_like(count, tokens.shape[1]), rows, state)


class CommitsOneOfMany(Counter):
    """Expects one token a step."""

    spec = spec("CommitsOneOfMany")

    def commit(self, tokens, count, rows, state):
        super().commit(tokens[:, :1], count, rows, state)


class CommitsWritingToRows(Counter):
    """Takes the engine's tensor for its own count."""

    spec = spec("CommitsWritingToRows")

    def commit(self, tokens, count, rows, state):
        super().commit(tokens, count, rows, state)
        rows.position.add_(count)


class CountsTwiceOnce(Counter):
    """A token that comes twice in a commit counts once."""

    spec = spec("CountsTwiceOnce")

    def commit(self, tokens, count, rows, state):
        valid = torch.arange(tokens.shape[1], device=tokens.device) < count[:, None]
        slots = rows.slots[:, None].expand_as(tokens)
        state["count"][slots[valid], tokens[valid]] += 1


class CountsInAByte(Counter):
    """256 of a token are none."""

    spec = spec("CountsInAByte")

    def columns(self):
        return {**super().columns(), "count": Column((self.ctx.vocab_size,), "uint8")}

    def apply(self, logits, rows, state):
        logits -= state["count"][rows.slots].float() * state["penalty"][rows.slots][:, None]

    def commit(self, tokens, count, rows, state):
        for j in range(tokens.shape[1]):
            state["count"][rows.slots[count > j], tokens[count > j, j]] += 1


class KeptInTheInstance(Counter):
    """Counts in ``self``, by slot, where no fork and no other process finds it."""

    spec = spec("KeptInTheInstance")

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.count = {}

    def apply(self, logits, rows, state):
        for i, slot in enumerate(rows.slots.tolist()):
            count = self.count.get(slot, torch.zeros(logits.shape[1], device=logits.device))
            logits[i] -= count * state["penalty"][slot]

    def commit(self, tokens, count, rows, state):
        for i, slot in enumerate(rows.slots.tolist()):
            if int(rows.position[i]) == int(rows.prompt[i]):
                self.count.pop(slot, None)
            for token in tokens[i, : int(count[i])].tolist():
                row = self.count.setdefault(slot, torch.zeros(self.ctx.vocab_size, device=tokens.device))
                row[token] += 1


class BoundOnTheHost(Counter):
    """Stores data in bind for apply, although these run in different instances."""

    spec = spec("BoundOnTheHost")

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.scale = 0.0

    def bind(self, params, prompt_len):
        self.scale = 1.0
        return super().bind(params, prompt_len)

    def apply(self, logits, rows, state):
        super().apply(logits, rows, {**state, "penalty": state["penalty"] * self.scale})


class CapsEverySlot(Counter):
    """Limits the counts of all slots, not only of those in the step."""

    spec = spec("CapsEverySlot")

    def commit(self, tokens, count, rows, state):
        super().commit(tokens, count, rows, state)
        state["count"].clamp_(max=50)


class ForkForgets(Counter):
    """Starts the count anew for a slot whose first token it has not processed."""

    spec = spec("ForkForgets")

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.known = set()

    def apply(self, logits, rows, state):
        for slot in set(rows.slots.tolist()) - self.known:
            state["count"][slot] = 0
        super().apply(logits, rows, state)

    def commit(self, tokens, count, rows, state):
        self.known |= set(rows.slots.tolist())
        super().commit(tokens, count, rows, state)
