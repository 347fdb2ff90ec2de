"""Processors with parameters of their own, as a test class gives them values: a right one that waits for a tail which
repeats, and wrong ones that look at the rows beside a row or at parameters that they do not name."""

from __future__ import annotations

import torch

from minivllm.core.interfaces.sampling import Column, Processor, Row
from minivllm.errors import RequestError
from minivllm.registration.spec import ANY, Spec

SEAM = "processor"
BATCH = "test_a_row_does_not_depend_on_the_rows_beside_it"
UNREAD = "test_a_parameter_that_it_does_not_read_has_no_effect"
CHANGES = "test_every_parameter_that_it_reads_changes_something"
FAULTS = {
    "OfTheLargest": (BATCH,),
    "CoarseInACrowd": (BATCH,),
    "AsksForMore": (UNREAD,),
    "AsksWhetherItIsThere": (UNREAD,),
    "Never": (CHANGES,),
    "ReturnsANumber": (BATCH, CHANGES, "test_bind_gives_values_for_the_declared_columns"),
}
RIGHT = ("RepeatedTail", "SecondTime", "LongTail")
OWN = {"params": lambda self, vocab: [{"extra": {"tail": x}} for x in (0.5, 3.0)],
       "wrong_params": lambda self, vocab: [{"extra": {"tail": x}} for x in (-1, "a")]}  # fmt: skip
SUITE = dict.fromkeys([*FAULTS, *RIGHT], OWN)


def spec(name: str) -> Spec:
    return Spec(f"{__name__}:{name}", (1, 1), "for a test of the kit", limits={"device": ANY}, features=frozenset())


class RepeatedTail(Processor):
    """Right.  It makes a token less likely that has followed the last ``length`` tokens before."""

    spec = spec("RepeatedTail")
    reads = frozenset({"tail"})
    length = 4

    def columns(self):
        return {"tail": Column()}

    def bind(self, params, prompt_len):
        x = params.extra.get("tail")
        if x is None:
            return None
        if not isinstance(x, (int, float)) or isinstance(x, bool) or not 0 <= x < 1e6:
            raise RequestError(f"tail={x!r}: expected a number >= 0", "tail")
        return Row({"tail": float(x)})

    def apply(self, logits, rows, state):
        by = state["tail"][rows.slots]
        for i, (slot, n) in enumerate(zip(rows.slots.tolist(), rows.position.tolist(), strict=True)):
            ids = rows.tokens[slot, :n].tolist()
            tail = ids[n - self.length :]
            for at in range(n - self.length if n > self.length else 0):
                if ids[at : at + self.length] == tail:
                    logits[i, ids[at + self.length]] -= by[i]


class LongTail(RepeatedTail):
    """Right.  It uses a tail of six tokens."""

    spec = spec("LongTail")
    length = 6


class SecondTime(RepeatedTail):
    """Right.  A token that occurred twice in succession must not occur a third time."""

    spec = spec("SecondTime")

    def apply(self, logits, rows, state):
        at = (rows.position - 1)[:, None]
        history = rows.tokens[rows.slots].long()
        last, before = history.gather(1, at), history.gather(1, (at - 1).clamp(min=0))
        twice = (last == before) & (at > 0)
        logits.scatter_add_(1, last, torch.where(twice, -state["tail"][rows.slots][:, None], 0.0))


class OfTheLargest(RepeatedTail):
    """Takes a share of the largest logit of the step."""

    spec = spec("OfTheLargest")

    def apply(self, logits, rows, state):
        most = logits.masked_fill(~logits.isfinite(), 0.0).amax()
        last = rows.tokens[rows.slots, rows.position - 1].long()
        logits.scatter_add_(1, last[:, None], (-1e-3 * most * state["tail"][rows.slots])[:, None])


class CoarseInACrowd(RepeatedTail):
    """Of many rows in half the precision."""

    spec = spec("CoarseInACrowd")

    def apply(self, logits, rows, state):
        last = rows.tokens[rows.slots, rows.position - 1].long()
        logits.scatter_add_(1, last[:, None], -state["tail"][rows.slots][:, None])
        if len(logits) > 16:
            logits.copy_(logits.bfloat16())


class AsksForMore(RepeatedTail):
    """Multiplies with a parameter that no request can bring."""

    spec = spec("AsksForMore")

    def bind(self, params, prompt_len):
        row = super().bind(params, prompt_len)
        return row and Row({"tail": row.values["tail"] * float(params.extra.get("tail_scale", 1.0))})


class AsksWhetherItIsThere(RepeatedTail):
    spec = spec("AsksWhetherItIsThere")

    def bind(self, params, prompt_len):
        return None if "no_tail" in params.extra else super().bind(params, prompt_len)


class Never(RepeatedTail):
    """Waits for a tail that is longer than the tokens that it reads."""

    spec = spec("Never")

    def apply(self, logits, rows, state):
        pass


class ReturnsANumber(RepeatedTail):
    """Returns a bare number instead of a Row."""

    spec = spec("ReturnsANumber")

    def bind(self, params, prompt_len):
        return params.extra.get("tail") and 5
