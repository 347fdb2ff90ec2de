"""Predictors with one fault each, and the tests of the kit that must catch it."""

from __future__ import annotations

import math
import random
import time

from minivllm.core.interfaces.predictor import Predictor
from minivllm.plugins.predictor.lengths import ClientHistory
from minivllm.registration.spec import Spec

SEAM = "predictor"
NUMBER = "test_a_prediction_is_a_positive_number_or_none"
TWICE = "test_a_prediction_does_not_depend_on_the_number_of_calls"
EQUAL = "test_equal_histories_give_equal_predictions"
ENDS = "test_requests_that_never_end_and_ends_in_any_order_do_no_harm"
ENGINE = "test_an_engine_with_it_generates_the_same_tokens"
FAULTS = {
    "PredictsZero": (NUMBER, ENGINE),
    "PredictsInfinity": (NUMBER,),
    "PredictsText": (NUMBER,),
    "FailsWithoutHistory": (NUMBER, ENGINE),
    "LearnsFromQuestions": (TWICE,),
    "DrawsFromAnyone": (EQUAL,),
    "ReadsTheClock": (EQUAL,),
    "SortsThePrompt": ("test_a_call_changes_no_prompt",),
    "NeedsEveryEnd": (ENDS,),
    "SecondsForMilliseconds": ("test_learned_times_of_steps_are_near_the_measured_ones",),
    "ReadsThePromptSlowly": ("test_a_call_is_fast",),
    "KeepsEveryClient": ("test_what_has_ended_leaves_nothing_behind",),
    "SharesMeans": ("test_two_instances_share_no_state",),
    "CountsReads": ("test_figures_are_numbers_and_change_nothing",),
}
RIGHT = ("AsItIs",)


def spec(name):
    return Spec(f"{__name__}:{name}", (1, 0), "for a test of the kit")


class AsItIs(ClientHistory):
    """Right."""

    spec = spec("AsItIs")


class PredictsZero(Predictor):
    spec = spec("PredictsZero")

    def output_tokens(self, request):
        return 0


class PredictsInfinity(Predictor):
    spec = spec("PredictsInfinity")

    def output_tokens(self, request):
        return math.inf if len(request.prompt) == 1 else 10.0


class PredictsText(Predictor):
    spec = spec("PredictsText")

    def output_tokens(self, request):
        return "12"


class FailsWithoutHistory(ClientHistory):
    spec = spec("FailsWithoutHistory")

    def output_tokens(self, request):
        return math.exp(self.means[self.key(request)])


class LearnsFromQuestions(Predictor):
    spec = spec("LearnsFromQuestions")
    requested = 0

    def output_tokens(self, request):
        self.requested += 1
        return float(self.requested)


class DrawsFromAnyone(Predictor):
    """Draws from the process's generator, so that another run differs."""

    spec = spec("DrawsFromAnyone")

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.factor = 1 + random.random()

    def output_tokens(self, request):
        return 10 * self.factor


class ReadsTheClock(ClientHistory):
    spec = spec("ReadsTheClock")

    def ended(self, request, tokens, cut):
        super().ended(request, tokens + time.perf_counter() % 1, cut)


class SortsThePrompt(Predictor):
    spec = spec("SortsThePrompt")

    def output_tokens(self, request):
        if request.prompt.flags.writeable:
            request.prompt.sort()
        return float(request.prompt[-1] + 1)


class NeedsEveryEnd(Predictor):
    """Takes ends for those of the requests in the order of their arrival."""

    spec = spec("NeedsEveryEnd")

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.open = []

    def output_tokens(self, request):
        self.open = [*self.open, request.number][-64:]
        return 10.0

    def ended(self, request, tokens, cut):
        number = self.open.pop(0)
        if number != request.number:
            raise ValueError(f"request {request.number} ended before {number}")


class SecondsForMilliseconds(ClientHistory):
    spec = spec("SecondsForMilliseconds")

    def step_ms(self, work):
        found = super().step_ms(work)
        return None if found is None else found / 1e3


class ReadsThePromptSlowly(Predictor):
    spec = spec("ReadsThePromptSlowly")

    def output_tokens(self, request):
        total = 0
        for _ in range(10):
            for token in request.prompt:
                total += int(token) % 7
        return 1.0 + total


class KeepsEveryClient(ClientHistory):
    spec = spec("KeepsEveryClient")

    def ended(self, request, tokens, cut):
        self.means[self.key(request)] = math.log(tokens)


class SharesMeans(ClientHistory):
    spec = spec("SharesMeans")
    shared: dict = {}

    def output_tokens(self, request):
        return self.shared.get(request.client)

    def ended(self, request, tokens, cut):
        self.shared[request.client] = tokens


class CountsReads(ClientHistory):
    spec = spec("CountsReads")
    reads = 0

    def figures(self):
        self.reads += 1
        return {"reads": self.reads}
