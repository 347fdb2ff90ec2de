"""Wrong samplers: right for few tokens and usual temperatures."""

from __future__ import annotations

from dataclasses import replace

import torch

from minivllm.device.worker.sampling import gumbel
from minivllm.plugins.sampler.default import DefaultSampler
from minivllm.registration.spec import ANY, Spec

SEAM = "sampler"
MANY = "test_limits_that_keep_many_tokens_keep_all_of_them"
FAULTS = {
    "ColdIsGreedy": ("test_a_low_temperature_is_not_greedy",),
    "BestOf64": (MANY,),
    "NucleusOf1024": (MANY,),
    "NearlyOneIsOne": (MANY,),
    "LaneOf16Bits": ("test_tokens_that_are_far_apart_have_noise_of_their_own",),
    "SixtyFourRows": ("test_many_rows_get_what_each_gets_alone",),
    "SeedsForGood": ("test_what_has_ended_leaves_nothing_behind",),
    "LooksAtTheTemperature": ("test_what_can_be_captured_does_not_wait_for_the_device",),
    "KeepsItsRows": ("test_what_has_ended_leaves_nothing_behind",),
}
RIGHT = ("InHalves",)


def spec(name: str) -> Spec:
    return Spec(f"{__name__}:{name}", (1, 1), "for a test of the kit", limits={"device": ANY}, features=frozenset())


class Changed(DefaultSampler):
    """A sampler in which ``change`` alters the parameters of a request."""

    def bind(self, params, prompt_len):
        return super().bind(self.change(params), prompt_len)


class ColdIsGreedy(Changed):
    """Below 0.1 it takes the best token."""

    spec = spec("ColdIsGreedy")

    def change(self, params):
        return replace(params, temperature=0.0) if params.temperature < 0.1 else params


class BestOf64(Changed):
    """There is room for 64 candidates."""

    spec = spec("BestOf64")

    def change(self, params):
        return replace(params, top_k=min(params.top_k, 64))


class NucleusOf1024(Changed):
    """top_p looks at the best 1,024 tokens."""

    spec = spec("NucleusOf1024")

    def change(self, params):
        return replace(params, top_k=1024) if params.top_p < 1 and params.top_k <= 0 else params


class NearlyOneIsOne(Changed):
    """Ignores a top_p above 0.95 to save a sort."""

    spec = spec("NearlyOneIsOne")

    def change(self, params):
        return replace(params, top_p=1.0) if params.top_p > 0.95 else params


class LaneOf16Bits(DefaultSampler):
    """The noise of a token equals that of the token 65,536 ids before it."""

    spec = spec("LaneOf16Bits")

    def draw(self, logits, rows, state, out):
        x = self.drawn_from(logits, rows, state)
        noise = gumbel(rows.seed, rows.position, rows.sample, min(x.shape[1], 1 << 16))
        drawn = (x + noise[:, torch.arange(x.shape[1]) % (1 << 16)]).argmax(1)
        out.tokens.copy_(torch.where(state["temperature"][rows.slots] > 0, drawn, logits.argmax(1)))


class SixtyFourRows(DefaultSampler):
    """Of more rows than 64 the rest are drawn with the parameters of the first ones, if they are no thousands."""

    spec = spec("SixtyFourRows")

    def drawn_from(self, logits, rows, state):
        n = len(logits)
        at = torch.arange(n) % (64 if 64 < n < 1000 else n)
        return super().drawn_from(logits, replace(rows, slots=rows.slots[at]), state)


class KeepsItsRows(DefaultSampler):
    """Stores drawn tokens for a report that is never requested."""

    spec = spec("KeepsItsRows")

    def draw(self, logits, rows, state, out):
        super().draw(logits, rows, state, out)
        self.drawn = [*getattr(self, "drawn", ()), out.tokens]


class InHalves(DefaultSampler):
    """Right.  It finds the best token of each half of the vocabulary, and then of both."""

    spec = spec("InHalves")

    def draw(self, logits, rows, state, out):
        x = self.drawn_from(logits, rows, state)
        x += gumbel(rows.seed, rows.position, rows.sample, x.shape[1])
        half = max(x.shape[1] // 2, 1)
        found = [part.max(1) for part in x.split(half, 1)]
        which = torch.stack([f.values for f in found]).argmax(0)
        places = torch.stack([f.indices + i * half for i, f in enumerate(found)])
        drawn = places.gather(0, which[None])[0]
        out.tokens.copy_(torch.where(state["temperature"][rows.slots] > 0, drawn, logits.argmax(1)))


class SeedsForGood(Changed):
    """A row for each seed, made once."""

    spec = spec("SeedsForGood")

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.made = {}

    def bind(self, params, prompt_len):
        return self.made.setdefault(params.seed, super(Changed, self).bind(params, prompt_len))


class LooksAtTheTemperature(DefaultSampler):
    """Reads from the device whether any row is sampled."""

    spec = replace(spec("LooksAtTheTemperature"), features=frozenset({"graph_safe"}))

    def draw(self, logits, rows, state, out):
        if bool((state["temperature"][rows.slots] > 0).any()) or len(rows.slots):
            super().draw(logits, rows, state, out)
