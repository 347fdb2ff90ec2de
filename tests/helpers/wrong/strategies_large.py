"""Wrong strategies: wide or long requests, and requests that have gone."""

from __future__ import annotations

from dataclasses import replace

from minivllm.plugins.strategy.beam import Beam
from minivllm.plugins.strategy.parallel import Parallel
from minivllm.registration.spec import Spec

SEAM = "strategy"
RULES = "test_wide_and_long_searches_keep_to_the_rules"
KEPT = "test_what_has_ended_leaves_nothing_behind"
FAULTS = {
    "SixtyFourBits": ("test_wide_requests_are_answered_as_narrow_ones",),
    "KnowsRequestsById": ("test_a_request_that_has_gone_is_forgotten",),
    "EightBeams": (RULES,),
    "SixteenSteps": (RULES,),
    "KeepsSearches": (KEPT,),
    "SeedsForGood": (KEPT,),
}
RIGHT = ("Lazy",)


def spec(name: str) -> Spec:
    return Spec(f"{__name__}:{name}", (1, 2), "for a test of the kit")


class SixtyFourBits(Parallel):
    """Branches that ended are bits of a number of 64."""

    spec = spec("SixtyFourBits")

    def result(self, params, ends):
        if params.width != params.n:
            return super().result(params, ends)
        return sorted({end.sample % 64 for end in ends})


class KnowsRequestsById(Parallel):
    """The branches of a request are made once."""

    spec = spec("KnowsRequestsById")

    def __init__(self, *args):
        super().__init__(*args)
        self.made = {}

    def start(self, params):
        if id(params) not in self.made:
            self.made[id(params)] = super().start(params)
        return self.made[id(params)]


class _Advances(Beam):
    """``advance(search, step, grown, ends)`` takes the place of the search's."""

    def search(self, params, most):
        made, step = super().search(params, most), [0]
        advance = made.advance

        def count(grown, ends):
            step[0] += 1
            return self.advance(advance, step[0], grown, ends)

        made.advance = count
        return made


class EightBeams(_Advances):
    """Beams behind the eighth go on as the first ones."""

    spec = spec("EightBeams")

    def advance(self, advance, step, grown, ends):
        moves = advance(grown, ends)
        return replace(moves, go_on=[moves.go_on[i % 8] for i in range(len(moves.go_on))])


class SixteenSteps(_Advances):
    """Its table of ends is full after 16 tokens."""

    spec = spec("SixteenSteps")

    def advance(self, advance, step, grown, ends):
        return advance(grown, ends if step < 16 else lambda branch, token: False)


class KeepsSearches(Beam):
    spec = spec("KeepsSearches")

    def search(self, params, most):
        self.made = [*getattr(self, "made", ()), super().search(params, most)]
        return self.made[-1]


class Lazy(Parallel):
    """Right.  It returns an iterable that can be read once."""

    spec = spec("Lazy")

    def start(self, params):
        return iter(super().start(params))

    def result(self, params, ends):
        return iter(super().result(params, ends))


class SeedsForGood(Parallel):
    """The branches of each seed, made once."""

    spec = spec("SeedsForGood")

    def __init__(self, *args):
        super().__init__(*args)
        self.made = {}

    def start(self, params):
        key = params.seed, params.width, params.n
        if key not in self.made:
            self.made[key] = super().start(params)
        return self.made[key]
