"""Wrong strategies: guides that no branch can have."""

from __future__ import annotations

from dataclasses import replace

from minivllm.core.interfaces.strategy import Branch, Guide
from minivllm.plugins.strategy.beam import Beam
from minivllm.plugins.strategy.guidance import Guidance
from minivllm.plugins.strategy.parallel import Parallel
from minivllm.plugins.strategy.spec import GUIDANCE

SEAM = "strategy"
GUIDES = "test_a_guide_has_a_scale_and_token_ids"
FAULTS = {
    "GuidesTheFirst": (GUIDES, "test_the_engine_serves_it"),
    "ScalesWithEachRequest": ("test_rows_and_guides_are_preempted_and_come_back",),
    "PromptOfText": (GUIDES,),
    "GuidesBeams": (GUIDES,),
    "NamesAnyParameter": (GUIDES,),
}
RIGHT = ("AlwaysGuided",)


def spec(name: str):
    return replace(GUIDANCE, impl=f"{__name__}:{name}", summary="for a test of the kit", params=())


class Guided(Parallel):
    """Every request has a guide."""

    guide = Guide(1.5, (3, 4))

    def start(self, params):
        return [Branch(b.sample, self.guide) for b in super().start(params)]


class AlwaysGuided(Guided):
    """Right."""

    spec = spec("AlwaysGuided")


class GuidesTheFirst(Guided):
    """And no other branch."""

    spec = spec("GuidesTheFirst")

    def start(self, params):
        return [b if b.sample == 0 else Branch(b.sample) for b in super().start(params)]


class ScalesWithEachRequest(Guidance):
    """Adds the number of the request."""

    spec = replace(GUIDANCE, impl=f"{__name__}:ScalesWithEachRequest", summary="for a test of the kit")
    starts = 0

    def start(self, params):
        (branch,) = super().start(params)
        self.starts += 1
        return (Branch(0, replace(branch.guide, scale=branch.guide.scale + self.starts)),)


class PromptOfText(Guided):
    """A prompt that nobody has encoded."""

    spec = spec("PromptOfText")
    guide = Guide(1.5, "no")


class GuidesBeams(Beam):
    """Adds guides to beams, which are chosen after each step."""

    spec = spec("GuidesBeams")

    def start(self, params):
        return [Branch(b.sample, Guide(2.0)) for b in super().start(params)]


class NamesAnyParameter(Guided):
    """A refusal would name a parameter that nobody has set."""

    spec = spec("NamesAnyParameter")
    guide = Guide(1.5, (3, 4), "away_from")
