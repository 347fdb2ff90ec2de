"""Processors with their own model, a right one and some that read its logits or claim it wrongly."""

from __future__ import annotations

from minivllm.core.interfaces.sampling import Column, Processor, Row
from minivllm.registration.parameters import Param
from minivllm.registration.spec import ANY, Spec

SEAM = "processor"
EXACT = "test_logits_are_those_of_the_float64_reference"
NAMED = "test_an_own_model_is_named_by_an_option"
FAULTS = {
    "OfAnotherRow": (EXACT, "test_a_row_does_not_depend_on_the_rows_beside_it"),
    "WithoutOption": (NAMED,),
    "CapturedToo": (NAMED,),
}
RIGHT = ("Added",)
OWN = {
    "params": lambda self, vocab: [{"added": x} for x in (0.5, 3.0)],
    "wrong_params": lambda self, vocab: [{"added": x} for x in (-1, "a", 1e9)],
    "reference": lambda self, params, logits, prompt, output: (
        logits + (params.added or 0) * self.own_logits([*prompt, *output], len(logits)).double()
    ),
}
SUITE = dict.fromkeys([*FAULTS, *RIGHT], OWN)
ADDED = Param("added", float, 0.0, ge=0, le=1e6, summary="how often the logits of the other model count")


def spec(name: str, *more: str, options: str = "minivllm.plugins.drafter.options:ModelOptions") -> Spec:
    return Spec(
        f"{__name__}:{name}",
        (1, 4),
        "for a test of the kit",
        limits={"device": ANY},
        params=(ADDED,),
        features=frozenset({"own_model", *more}),
        options=options,
    )


class Added(Processor):
    """Right.  It adds the logits of its own model."""

    spec = spec("Added")
    reads = spec.reads

    def columns(self):
        return {"added": Column()}

    def bind(self, params, prompt_len):
        return Row({"added": params.added}) if params.added else None

    def apply(self, logits, rows, state):
        logits += rows.own_logits * state["added"][rows.slots][:, None]


class OfAnotherRow(Added):
    """All rows get the logits of the first."""

    spec = spec("OfAnotherRow")

    def apply(self, logits, rows, state):
        logits += rows.own_logits[0] * state["added"][rows.slots][:, None]


class WithoutOption(Added):
    """No option names the model."""

    spec = spec("WithoutOption", options="")


class CapturedToo(Added):
    """Its model would have to be part of a capture."""

    spec = spec("CapturedToo", "graph_safe")
