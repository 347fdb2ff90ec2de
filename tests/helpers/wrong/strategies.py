"""Wrong strategies, and right ones that are not like ``Parallel``."""

from __future__ import annotations

from dataclasses import replace

from minivllm.core.interfaces.params import SamplingParams
from minivllm.core.interfaces.strategy import Branch, DecodingStrategy, Moves, Pick, Search
from minivllm.errors import RequestError
from minivllm.plugins.strategy.beam import Beam
from minivllm.plugins.strategy.parallel import Parallel
from minivllm.plugins.strategy.single import Single
from minivllm.registration.parameters import Param
from minivllm.registration.spec import Spec

SEAM = "strategy"
BRANCHES = "test_a_request_of_n_has_n_branches_numbered_from_0"
ANSWER = "test_the_answer_is_made_of_branches_that_ended"
ENGINE = "test_the_engine_serves_it"
APART = "test_requests_know_nothing_of_each_other"
SEARCH = "test_a_search_keeps_to_its_candidates_and_comes_to_an_end"
SEARCHES = "test_searches_know_nothing_of_each_other"
DECLARES = "test_it_declares_the_parameters_that_it_reads"
REFUSES = "test_what_it_does_not_take_it_refuses_by_name"
FAULTS = {
    "SameSample": (BRANCHES, ENGINE),
    "FromOne": (BRANCHES, ENGINE),
    "OneMore": (BRANCHES, ENGINE),
    "OnlyOne": (BRANCHES,),
    "TakesAndRefuses": (BRANCHES,),
    "ServesWhatItDoesNotTake": (REFUSES,),
    "RefusesWithoutAName": (REFUSES,),
    "NamesNobody": (ANSWER, ENGINE),
    "AnswersByPlace": (ANSWER, ENGINE),
    "NothingFromTheFailed": (ANSWER,),
    "BestTwice": (ANSWER, ENGINE),
    "CountsOn": (BRANCHES, APART, "test_two_instances_share_no_state"),
    "RemembersN": (APART,),
    "TakesN": ("test_the_parameters_of_a_request_stay_as_they_are",),
    "GreedyOnce": (BRANCHES,),
    "SeedIsTruth": (BRANCHES,),
    "GoesOnPastItsEnd": (SEARCH, "test_the_engine_gives_what_the_search_gives"),
    "OneBeamMore": (SEARCH,),
    "TokensFromElsewhere": (SEARCH,),
    "NeverDone": (SEARCH,),
    "OneSearchForAll": (SEARCHES,),
    "CountsItsOutputsFromOne": (SEARCH, "test_the_engine_gives_what_the_search_gives"),
    "WantsItsExtra": ("test_takes_answers_for_any_request",),
    "ReadsUndeclared": (DECLARES,),
    "AsksUndeclared": (DECLARES,),
    "RanksByUndeclared": (DECLARES,),
    "DeclaresAField": (DECLARES,),
    "NotInItsSpec": ("test_its_spec_declares_the_parameters_that_are_its_own",),
    "NeverLooksForIt": ("test_it_looks_for_every_parameter_that_it_declares",),
}
RIGHT = ("BestFirst", "BestOnly", "UpToFour", "GreedyTree", "ByExtra")
SUITE = {
    name: {"params": lambda self, n: SamplingParams(n=n, max_tokens=6, ignore_eos=True, extra={"rank": "sample"})}
    for name in ("ByExtra", "ReadsUndeclared")
}


def spec(name: str) -> Spec:
    return Spec(f"{__name__}:{name}", (1, 1), "a planted fault")


class SameSample(Parallel):
    """All branches draw the same tokens."""

    spec = spec("SameSample")

    def start(self, params):
        return [Branch(0)] * params.n


class FromOne(Parallel):
    spec = spec("FromOne")

    def start(self, params):
        return [Branch(i + 1) for i in range(params.n)]


class OneMore(Parallel):
    """Adds a spare branch to choose from, for which no room is reserved."""

    spec = spec("OneMore")

    def start(self, params):
        return [Branch(i) for i in range(params.n + 1)]


class OnlyOne(Single):
    """Takes every request and gives it one output."""

    spec = spec("OnlyOne")

    def takes(self, params):
        return True

    def start(self, params):
        return (Branch(0),)


class TakesAndRefuses(Single):
    """Accepts requests and then refuses them, so that later strategies never get them."""

    spec = spec("TakesAndRefuses")

    def takes(self, params):
        return True


class ServesWhatItDoesNotTake(Single):
    spec = spec("ServesWhatItDoesNotTake")

    def start(self, params):
        return (Branch(0),)


class RefusesWithoutAName(Single):
    spec = spec("RefusesWithoutAName")

    def start(self, params):
        if params.n != 1:
            raise RequestError("cannot do that")
        return (Branch(0),)


class NamesNobody(Parallel):
    """Counts from 1."""

    spec = spec("NamesNobody")

    def result(self, params, ends):
        return [end.sample + 1 for end in ends]


class AnswersByPlace(Parallel):
    """Ranks without translating: the places in a list of scores with one too many."""

    spec = spec("AnswersByPlace")

    def result(self, params, ends):
        return range(len(ends) + 1)


class NothingFromTheFailed(Parallel):
    spec = spec("NothingFromTheFailed")

    def result(self, params, ends):
        return [end.sample for end in ends if end.finish_reason != "error"]


class BestTwice(Parallel):
    """The best, and then all."""

    spec = spec("BestTwice")

    def result(self, params, ends):
        best = max(ends, key=lambda end: end.cumulative_logprob or 0.0)
        return [best.sample, *(end.sample for end in ends)]


class CountsOn(Parallel):
    """Sample numbers go on from request to request, over all instances."""

    spec = spec("CountsOn")
    next: list = [0]

    def start(self, params):
        self.next[0] += params.n
        return [Branch(i) for i in range(self.next[0] - params.n, self.next[0])]


class RemembersN(Parallel):
    """Answers with as many as the last request wanted."""

    spec = spec("RemembersN")
    n = 128

    def start(self, params):
        self.n = params.n
        return super().start(params)

    def result(self, params, ends):
        return super().result(params, ends)[: self.n]


class TakesN(Parallel):
    """Hands each branch on as a request of one."""

    spec = spec("TakesN")

    def start(self, params):
        made = super().start(params)
        params.n = 1
        return made


class GreedyOnce(Parallel):
    """All greedy branches would be equal, so it starts one."""

    spec = spec("GreedyOnce")

    def start(self, params):
        return super().start(params)[: 1 if params.temperature == 0 else None]


class SeedIsTruth(Parallel):
    """Treats the seed 0 as no seed."""

    spec = spec("SeedIsTruth")

    def takes(self, params):
        return not params.seed

    def start(self, params):
        if params.seed is not None:
            raise RequestError(f"seed={params.seed}: expected none", "seed")
        return super().start(params)


class WantsItsExtra(Parallel):
    """Raises for everybody else's requests."""

    spec = spec("WantsItsExtra")

    def takes(self, params):
        return params.extra["best_of"] > 1


class ByExtra(Parallel):
    """Right.  It accepts requests with its own parameter, so a test class must override params()."""

    spec = spec("ByExtra")
    reads = Parallel.reads | {"rank"}

    def takes(self, params):
        return params.extra.get("rank") == "sample"

    def start(self, params):
        if not self.takes(params):
            raise RequestError(f"rank={params.extra.get('rank')!r}: expected 'sample'", "rank")
        return super().start(params)


class ReadsUndeclared(ByExtra):
    """Its own parameter is in nobody's ``reads``, so no request can bring it."""

    spec = spec("ReadsUndeclared")
    reads = Parallel.reads


class AsksUndeclared(Parallel):
    """Reads an undeclared parameter."""

    spec = spec("AsksUndeclared")

    def takes(self, params):
        return "off" not in params.extra


class RanksByUndeclared(Parallel):
    """Looks for it when the answer is made."""

    spec = spec("RanksByUndeclared")

    def result(self, params, ends):
        found = list(super().result(params, ends))
        return found[::-1] if params.extra.get("worst_first") else found


class DeclaresAField(Parallel):
    spec = spec("DeclaresAField")
    reads = Parallel.reads | {"temperature"}


class NotInItsSpec(Parallel):
    """Its class reads a parameter that its spec does not declare."""

    spec = Spec(f"{__name__}:NotInItsSpec", (1, 3), "a planted fault")
    reads = Parallel.reads | {"shuffled"}

    def takes(self, params):
        return not params.extra.get("shuffled")


class NeverLooksForIt(Parallel):
    """Requests that set its parameter are taken, and it is ignored."""

    spec = Spec(
        f"{__name__}:NeverLooksForIt", (1, 3), "a planted fault", params=(Param("worst", bool, False, summary="last"),)
    )
    reads = Parallel.reads | spec.reads


class BestFirst(DecodingStrategy):
    """Right.  All branches, the likeliest first."""

    spec = spec("BestFirst")

    def start(self, params):
        return [Branch(i) for i in range(params.n)]

    def result(self, params, ends):
        return [e.sample for e in sorted(ends, key=lambda e: (-(e.cumulative_logprob or 0.0), e.sample))]


class BestOnly(BestFirst):
    """Right.

    Of n branches it returns the one with the highest log-probability per token, and a failed one only if there is no
    other.
    """

    spec = spec("BestOnly")

    def result(self, params, ends):
        score = lambda e: (e.finish_reason == "error", -(e.cumulative_logprob or 0.0) / max(1, e.length))  # noqa: E731
        return [min(ends, key=score).sample]


class UpToFour(BestFirst):
    """Right.  It leaves wide requests to other strategies."""

    spec = spec("UpToFour")

    def takes(self, params):
        return params.n <= 4

    def start(self, params):
        if params.n > 4:
            raise RequestError(f"n={params.n}: expected 4 at most", "n")
        return super().start(params)


# ---- stepwise --------------------------------------------------------------------------------------------------------


class _Changed(Beam):
    """A search whose moves ``change(moves, grown)`` alters."""

    def search(self, params, most):
        made = super().search(params, most)
        advance = made.advance
        made.advance = lambda grown, ends: self.change(advance(grown, ends), grown)
        return made


class GoesOnPastItsEnd(_Changed):
    """Continues a branch that is also an output."""

    spec = spec("GoesOnPastItsEnd")

    def change(self, moves, grown):
        return replace(moves, go_on=[*moves.keep, *moves.go_on][: max(1, len(moves.go_on))])


class OneBeamMore(_Changed):
    spec = spec("OneBeamMore")

    def change(self, moves, grown):
        used = {(p.branch, p.token) for p in (*moves.go_on, *moves.keep)}
        free = [Pick(b, int(t)) for b, g in enumerate(grown) for t in g.tokens if (b, int(t)) not in used]
        return replace(moves, go_on=[*moves.go_on, *free])


class TokensFromElsewhere(_Changed):
    """Takes all from the first branch's candidates."""

    spec = spec("TokensFromElsewhere")

    def change(self, moves, grown):
        first = [int(t) for t in grown[0].tokens]
        picks = [replace(p, token=first[i % len(first)]) for i, p in enumerate(moves.go_on)]
        return replace(moves, go_on=picks)


class NeverDone(Beam):
    """Starts again when it has come to the end."""

    spec = spec("NeverDone")

    def search(self, params, most):
        made = super().search(params, most)
        advance = made.advance
        made.advance = lambda grown, ends: advance(grown, lambda branch, token: False)
        return made


class OneSearchForAll(Beam):
    spec = spec("OneSearchForAll")
    made = None

    def search(self, params, most):
        self.made = self.made or super().search(params, most)
        return self.made


class CountsItsOutputsFromOne(Beam):
    spec = spec("CountsItsOutputsFromOne")

    def search(self, params, most):
        made = super().search(params, most)
        result = made.result
        made.result = lambda: [i + 1 for i in result()]
        return made


class _Tree(Search):
    """Every branch by itself, greedily, after a first step that gives each another token."""

    def __init__(self, width):
        self.width, self.kept = width, 0

    def advance(self, grown, ends):
        rows = [(b, g.tokens[0]) for b, g in enumerate(grown)] if grown[0].length else None
        picks = [Pick(b, int(t)) for b, t in rows or [(0, t) for t in grown[0].tokens[: self.width]]]
        keep = [p for p in picks if ends(p.branch, p.token)]
        self.kept += len(keep)
        return Moves([p for p in picks if p not in keep], keep)

    def result(self):
        return range(self.kept)


class GreedyTree(Beam):
    """Right.  It is no beam search."""

    spec = spec("GreedyTree")

    def search(self, params, most):
        return _Tree(params.beam_width)
