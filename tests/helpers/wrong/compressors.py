"""Wrong compressors with one fault each, and right ones."""

from __future__ import annotations

import torch

from minivllm.core.interfaces.compressor import Compressor
from minivllm.plugins.compressor.attention_weights import last_attention
from minivllm.registration.spec import ANY, Spec

SEAM = "compressor"
SCORED = "test_each_stored_token_gets_a_score"
ALONE = "test_scores_depend_on_the_arguments_alone"
KEPT = "test_arguments_and_the_random_state_do_not_change"
ONE = "test_one_query_is_enough"
FIXED = "test_declared_inputs_are_fixed"
UNREAD = "test_inputs_that_are_not_declared_are_not_read"
JOINED = "test_joined_layers_have_the_scores_of_each_layer"
SERVED = "test_the_engine_serves_it"
FAULTS = {
    "ScoresHeadsLast": (SCORED, SERVED),
    "ReturnsAList": (SCORED, SERVED),
    "DividesByTheNumberOfOthers": (SCORED,),
    "NormalizesInPlace": (KEPT,),
    "DrawsFromTheGlobalGenerator": (ALONE, KEPT),
    "CountsItsCalls": (ALONE,),
    "NeedsTwoQueries": (ONE,),
    "DividesByNoQueries": (SCORED,),
    "NormalizesSumsInPlace": (KEPT,),
    "AddsUpItsCalls": (ALONE,),
    "RotatesLater": (FIXED,),
    "TurnsKeysItself": (KEPT,),
    "ReadsOneName": (FIXED,),
    "ReadsValuesWithoutDeclaration": (UNREAD,),
    "MixesLayers": (JOINED,),
    "ScoresTheFirstLayerOnly": (JOINED, SERVED),
}
RIGHT = ("Norms", "Attended", "Sums", "JoinedNorms")


def spec(name):
    return Spec(f"{__name__}:{name}", (1, 2), "for a test of the kit", limits={"device": ANY})


class Norms(Compressor):
    spec = spec("Norms")

    def score(self, stored):
        return stored.keys.norm(dim=-1).T


class ScoresHeadsLast(Norms):
    spec = spec("ScoresHeadsLast")

    def score(self, stored):
        return super().score(stored).T


class ReturnsAList(Norms):
    spec = spec("ReturnsAList")

    def score(self, stored):
        return super().score(stored).tolist()


class DividesByTheNumberOfOthers(Norms):
    spec = spec("DividesByTheNumberOfOthers")

    def score(self, stored):
        others = torch.tensor(len(stored.keys) - 1.0)
        return super().score(stored) * (others / others)


class NormalizesInPlace(Norms):
    spec = spec("NormalizesInPlace")

    def score(self, stored):
        return stored.keys.sub_(stored.keys.mean(dim=0)).norm(dim=-1).T


class DrawsFromTheGlobalGenerator(Compressor):
    spec = spec("DrawsFromTheGlobalGenerator")

    def score(self, stored):
        return torch.rand(len(stored.keys))


class CountsItsCalls(Norms):
    spec = spec("CountsItsCalls")

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.calls = 0

    def score(self, stored):
        self.calls += 1
        return super().score(stored) + self.calls


class Attended(Compressor):
    spec = spec("Attended")
    window = 4

    def score(self, stored):
        return last_attention(stored, stored.queries).mean(dim=(1, 2))


class NeedsTwoQueries(Attended):
    spec = spec("NeedsTwoQueries")

    def score(self, stored):
        first, last = stored.queries[-2], stored.queries[-1]
        return last_attention(stored, torch.stack([first, last])).mean(dim=(1, 2))


class Sums(Compressor):
    spec = spec("Sums")
    attention_sums = True

    def score(self, stored):
        return stored.attention_sums / stored.sum_queries.clamp(min=1)


class DividesByNoQueries(Sums):
    spec = spec("DividesByNoQueries")

    def score(self, stored):
        return stored.attention_sums / stored.sum_queries


class NormalizesSumsInPlace(Sums):
    spec = spec("NormalizesSumsInPlace")

    def score(self, stored):
        return stored.attention_sums.div_(stored.sum_queries.clamp(min=1))


class AddsUpItsCalls(Sums):
    """Own sums over all calls, which are not dropped when another row is scored."""

    spec = spec("AddsUpItsCalls")

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.totals = {}

    def score(self, stored):
        own = super().score(stored)
        self.totals[own.shape] = self.totals.get(own.shape, 0) + own
        return self.totals[own.shape]


class RotatesLater(Norms):
    """Declares new positions when the first request is compressed, after the engine has started without them."""

    spec = spec("RotatesLater")

    def score(self, stored):
        self.rerotates = True
        return super().score(stored)


class TurnsKeysItself(Norms):
    """Turns the keys that the engine rotates too."""

    spec = spec("TurnsKeysItself")
    rerotates = True

    def score(self, stored):
        stored.keys.copy_(stored.keys.roll(stored.keys.shape[-1] // 2, -1))
        return super().score(stored)


class JoinedNorms(Norms):
    spec = spec("JoinedNorms")
    loads = ("keys",)
    joins_layers = True


class ReadsOneName(Norms):
    """Declares a name in place of a tuple, of which each letter would be an input."""

    spec = spec("ReadsOneName")
    loads = "keys"


class ReadsValuesWithoutDeclaration(JoinedNorms):
    spec = spec("ReadsValuesWithoutDeclaration")

    def score(self, stored):
        return super().score(stored) * stored.values.norm(dim=-1).T


class MixesLayers(JoinedNorms):
    spec = spec("MixesLayers")

    def score(self, stored):
        scores = super().score(stored)
        return scores - scores.mean(dim=0)


class ScoresTheFirstLayerOnly(JoinedNorms):
    spec = spec("ScoresTheFirstLayerOnly")

    def score(self, stored):
        return super().score(stored)[: stored.keys.shape[1] // stored.layers]
