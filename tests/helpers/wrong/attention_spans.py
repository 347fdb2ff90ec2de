"""Wrong attention back ends: tokens of an image see too little or too much of it."""

from __future__ import annotations

import numpy as np

from minivllm.plugins.attention.sdpa import Sdpa
from minivllm.registration.spec import Spec

from .attention import LIMITS

SEAM = "attention"
SPANS = "test_tokens_of_a_span_see_all_of_it"
FAULTS = {
    "IgnoresSpans": (SPANS,),
    "SeesTheStepInstead": (SPANS,),
    "SpansOfWholePromptsOnly": (SPANS,),
    "LacksTheLastOfASpan": (SPANS,),
}
RIGHT = ()


class WithSpans(Sdpa):
    """A back end that changes ``host_sees`` before it computes a step."""

    def sees(self, meta, own):
        return meta.host_sees

    def forward(self, layer, q, meta, out, lse=None):
        found = meta.host_sees
        if found is not None:
            ends = np.cumsum(meta.host_q_len)
            rows = np.repeat(np.arange(len(ends)), meta.host_q_len)
            own = (meta.host_kv_len[layer.group] - ends)[rows] + np.arange(len(rows))
            meta.host_sees = self.sees(meta, own)
        super().forward(layer, q, meta, out, lse)
        meta.host_sees = found


def spec(name):
    features = frozenset({"spans", "window", "sinks", "softcap", "lse"})
    return Spec(f"{__name__}:{name}", (1, 7), "for a test of the kit", limits=LIMITS, features=features)


class IgnoresSpans(WithSpans):
    spec = spec("IgnoresSpans")

    def sees(self, meta, own):
        return None


class SeesTheStepInstead(WithSpans):
    spec = spec("SeesTheStepInstead")

    def sees(self, meta, own):
        ends = np.repeat(meta.host_kv_len[0], meta.host_q_len) - 1
        return np.where(meta.host_sees > own, ends, own)


class SpansOfWholePromptsOnly(WithSpans):
    spec = spec("SpansOfWholePromptsOnly")

    def sees(self, meta, own):
        fresh = np.repeat(meta.host_kv_len[0] == meta.host_q_len, meta.host_q_len)
        return np.where(fresh, meta.host_sees, own)


class LacksTheLastOfASpan(WithSpans):
    spec = spec("LacksTheLastOfASpan")

    def sees(self, meta, own):
        return np.maximum(meta.host_sees - 1, own)
