"""Routers with one fault each, and the tests of the kit that must catch it."""

from __future__ import annotations

import time

from minivllm.core.interfaces.router import ReplicaRouter
from minivllm.plugins.router.loads import LeastTokens, RoundRobin
from minivllm.plugins.router.options import SessionOptions
from minivllm.plugins.router.session import SessionRouter
from minivllm.registration.spec import Spec

SEAM = "router"
OFFERED = "test_a_choice_is_a_replica_that_accepts_requests"
SPREAD = "test_new_prompts_of_new_sessions_reach_every_replica"
BACK = "test_a_replica_that_is_started_again_gets_requests"
STICKY = "test_a_session_stays_on_its_replica"
ALONE = "test_a_choice_changes_neither_its_request_nor_the_loads"
FAST = "test_a_choice_is_fast"
FAULTS = {
    "ReturnsThePlace": (OFFERED,),
    "PassesEndedReplicas": (OFFERED,),
    "ReturnsText": (OFFERED,),
    "FailsWithoutKeys": (OFFERED,),
    "FailsAlone": (OFFERED,),
    "AlwaysTheFirst": (SPREAD, BACK),
    "ForgetsRestarts": (BACK,),
    "MovesSessions": (STICKY,),
    "FollowsNoMove": (STICKY,),
    "SortsTheLoads": (ALONE,),
    "ReversesKeys": (ALONE,),
    "ComparesEveryKey": (FAST,),
    "KeepsEveryPrompt": ("test_what_has_ended_leaves_nothing_behind",),
    "SharesTurns": ("test_two_instances_share_no_state",),
}
RIGHT = ("AsItIs",)


def spec(name, *features, options=""):
    return Spec(f"{__name__}:{name}", (1, 0), "for a test of the kit", options=options, features=frozenset(features))


class AsItIs(LeastTokens):
    """Right."""

    spec = spec("AsItIs")


class ReturnsThePlace(LeastTokens):
    spec = spec("ReturnsThePlace")

    def choose(self, request, loads):
        return min(range(len(loads)), key=lambda place: loads[place].tokens)


class PassesEndedReplicas(RoundRobin):
    spec = spec("PassesEndedReplicas")

    def choose(self, request, loads):
        self.last = (self.last + 1) % self.ctx.replicas
        return self.last


class ReturnsText(LeastTokens):
    spec = spec("ReturnsText")

    def choose(self, request, loads):
        return str(super().choose(request, loads))


class FailsWithoutKeys(LeastTokens):
    spec = spec("FailsWithoutKeys")

    def choose(self, request, loads):
        assert request.keys[0]
        return super().choose(request, loads)


class FailsAlone(LeastTokens):
    spec = spec("FailsAlone")

    def choose(self, request, loads):
        first, second = sorted(loads, key=lambda load: (load.tokens, load.number))[:2]
        return first.number if first.tokens <= second.tokens else second.number


class AlwaysTheFirst(ReplicaRouter):
    spec = spec("AlwaysTheFirst")

    def choose(self, request, loads):
        return min(load.number for load in loads)


class ForgetsRestarts(LeastTokens):
    spec = spec("ForgetsRestarts")

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.seen = set(range(ctx.replicas))

    def choose(self, request, loads):
        open_ = {load.number for load in loads}
        self.seen &= open_
        known = [load for load in loads if load.number in self.seen]
        return super().choose(request, known or loads)


class MovesSessions(LeastTokens):
    spec = spec("MovesSessions", "sticky")


class FollowsNoMove(SessionRouter):
    """Returns to the first replica of a session once that accepts requests again."""

    spec = spec("FollowsNoMove", "sticky", options="minivllm.plugins.router.options:SessionOptions")

    def __init__(self, options, ctx):
        super().__init__(options or SessionOptions(), ctx)

    def sent(self, request, number):
        if request.session not in self.homes:
            super().sent(request, number)


class SortsTheLoads(LeastTokens):
    spec = spec("SortsTheLoads")

    def choose(self, request, loads):
        loads.sort(key=lambda load: (load.tokens, load.requests, load.number))
        return loads[0].number


class ReversesKeys(LeastTokens):
    spec = spec("ReversesKeys")

    def sent(self, request, number):
        if request.keys:
            request.keys.reverse()


class ComparesEveryKey(LeastTokens):
    spec = spec("ComparesEveryKey")

    def choose(self, request, loads):
        time.sleep(1e-6 * len(request.keys))
        return super().choose(request, loads)


class KeepsEveryPrompt(LeastTokens):
    spec = spec("KeepsEveryPrompt")

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.prompts = []

    def sent(self, request, number):
        self.prompts.append(str(request.keys[:1]))


class SharesTurns(RoundRobin):
    spec = spec("SharesTurns")
    turns = [0]

    def choose(self, request, loads):
        numbers = sorted(load.number for load in loads)
        self.turns[0] += 1
        return numbers[self.turns[0] % len(numbers)]
