"""Processors with declared parameters, a right one and some whose spec and class differ."""

from __future__ import annotations

from minivllm.core.interfaces.sampling import Column, Processor, Row
from minivllm.registration.parameters import Param
from minivllm.registration.spec import ANY, Spec

SEAM = "processor"
DECLARES = "test_its_spec_declares_the_parameters_that_are_its_own"
FAULTS = {
    "ReadsUndeclared": (DECLARES,),
    "DeclaresUnread": (DECLARES,),
    "NeverLooks": ("test_it_looks_for_every_parameter_that_it_declares",),
    "LooksForAnothers": ("test_a_parameter_that_it_does_not_read_has_no_effect",),
    "DeclaresAField": (DECLARES,),
    "MeansSomethingElse": (DECLARES,),
    "NoSummary": (DECLARES,),
}
RIGHT = ("Recent",)
OWN = {
    "params": lambda self, vocab: [{"recent": x} for x in (0.5, 3.0)],
    "wrong_params": lambda self, vocab: [{"recent": x} for x in (-1, "a", 1e9)],
}
SUITE = dict.fromkeys([*FAULTS, *RIGHT], OWN)
RECENT = Param("recent", float, 0.0, ge=0, le=1e6, summary="off the logit of the token that came last")
SPAN = Param("recent_span", int, 1, ge=1, le=9, summary="of how many tokens")


def spec(name: str, *params: Param) -> Spec:
    return Spec(f"{__name__}:{name}", (1, 2), "for a test of the kit", limits={"device": ANY}, params=params)


class Recent(Processor):
    """Right.  It subtracts ``recent`` from the logit of the newest token."""

    spec = spec("Recent", RECENT)
    reads = spec.reads

    def columns(self):
        return {"recent": Column()}

    def bind(self, params, prompt_len):
        return Row({"recent": params.recent}) if params.recent else None

    def apply(self, logits, rows, state):
        last = rows.tokens[rows.slots, rows.position - 1].long()
        logits.scatter_add_(1, last[:, None], -state["recent"][rows.slots][:, None])


class ReadsUndeclared(Recent):
    """Its second parameter comes unchecked, and only in ``extra``."""

    spec = spec("ReadsUndeclared", RECENT)
    reads = frozenset({"recent", "recent_scale"})

    def bind(self, params, prompt_len):
        row = super().bind(params, prompt_len)
        return row and Row({"recent": row.values["recent"] * float(params.extra.get("recent_scale", 1.0))})


class DeclaresUnread(Recent):
    """Requests that set the second one are refused, because ``reads`` does not name it."""

    spec = spec("DeclaresUnread", RECENT, SPAN)
    reads = frozenset({"recent"})


class NeverLooks(Recent):
    """The engine takes requests that set the second one, and it is ignored."""

    spec = spec("NeverLooks", RECENT, SPAN)
    reads = spec.reads


class LooksForAnothers(Recent):
    """It is off if n-grams are banned, which it does not declare."""

    spec = spec("LooksForAnothers", RECENT)

    def bind(self, params, prompt_len):
        return None if params.no_repeat_ngram_size else super().bind(params, prompt_len)


class DeclaresAField(Recent):
    spec = spec("DeclaresAField", RECENT, Param("min_p", float, 0.0, ge=0, le=1, summary="what all requests have"))
    reads = frozenset({"recent", "min_p"})


class MeansSomethingElse(Recent):
    """``typical_p`` is a number up to 1 elsewhere."""

    spec = spec("MeansSomethingElse", RECENT, Param("typical_p", float, 0.0, ge=0, le=9, summary="of another kind"))
    reads = spec.reads


class NoSummary(Recent):
    spec = spec("NoSummary", Param("recent_x", float, 0.0, ge=0))
    reads = spec.reads
