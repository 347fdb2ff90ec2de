"""Strategies whose answers are in a wrong order, and a right one with its own order."""

from __future__ import annotations

from dataclasses import replace

from minivllm.plugins.strategy.beam import Beam
from minivllm.plugins.strategy.parallel import Parallel
from minivllm.registration.spec import Spec

SEAM = "strategy"
ORDER = "test_the_answer_has_the_order_of_the_reference"
SEARCH = "test_a_search_keeps_to_its_candidates_and_comes_to_an_end"


def longest(self, params, ends):
    """Return the longest first, of equal ones the likelier."""
    return [e.sample for e in sorted(ends, key=lambda e: (-e.length, -(e.cumulative_logprob or 0.0)))]


FAULTS = {
    "WorstFirst": (ORDER,),
    "ByNumber": (ORDER,),
    "ByLength": (ORDER,),
    "ShortestOfItsOwn": (ORDER,),
    "BeamsBackwards": (SEARCH,),
}
RIGHT = ("LongestFirst",)
SUITE = {name: {"reference": longest} for name in ("ShortestOfItsOwn", "LongestFirst")}


def spec(name: str) -> Spec:
    return Spec(f"{__name__}:{name}", (1, 1), "a planted fault")


class Ranked(Parallel):
    def result(self, params, ends):
        return [e.sample for e in sorted(ends, key=self.rank)[: params.n]]


class WorstFirst(Ranked):
    spec = spec("WorstFirst")

    def rank(self, end):
        return end.cumulative_logprob or 0.0


class ByNumber(Ranked):
    spec = spec("ByNumber")

    def rank(self, end):
        return end.sample


class ByLength(Ranked):
    spec = spec("ByLength")

    def rank(self, end):
        return -end.length


class LongestFirst(Ranked):
    """Right, by its own reference."""

    spec, reads = spec("LongestFirst"), frozenset()

    def rank(self, end):
        return -end.length, -(end.cumulative_logprob or 0.0), end.sample


class ShortestOfItsOwn(LongestFirst):
    spec = spec("ShortestOfItsOwn")

    def rank(self, end):
        return end.length


class BeamsBackwards(Beam):
    spec = replace(spec("BeamsBackwards"), api=(1, 1))

    def search(self, params, most):
        made = super().search(params, most)
        result = made.result
        made.result = lambda: list(result())[::-1]
        return made
