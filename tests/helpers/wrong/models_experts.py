"""Wrong mixtures of experts: a family of them with one fault each."""

from __future__ import annotations

from dataclasses import replace

from minivllm.core.interfaces.decoder import SOFTMAX
from minivllm.device.layers.experts import Mixture
from minivllm.plugins.model.gpt_oss import GptOss
from minivllm.plugins.model.mixtral import Mixtral
from minivllm.plugins.model.qwen2_moe import Qwen2Moe
from minivllm.plugins.model.qwen3_moe import Qwen3Moe
from minivllm.plugins.model.spec import GPT_OSS, MIXTRAL, QWEN2_MOE, QWEN3_MOE

from .models import CLAIMS, CONFIGS, TENSORS, layers

SEAM = "model"
POINTS = "test_each_point_passes_once_and_what_comes_back_goes_on"
GIVEN = "test_given_experts_are_used_in_place_of_the_chosen_ones"
FAULTS = {
    "NeverNormalizes": (CONFIGS,),
    "ExpertsInEveryLayer": (CONFIGS,),
    "NeverClamps": (CONFIGS,),
    "ForgetsTheGateOfTheShared": (CLAIMS, CONFIGS),
    "HalvesForTurns": (CLAIMS, CONFIGS),
    "UpForGate": (CLAIMS, TENSORS),
    "AlwaysTheFirst": (CLAIMS, CONFIGS),
    "SoftmaxOfAll": (CLAIMS, CONFIGS),
    "DropsTheLastChoice": (CLAIMS, CONFIGS),
    "RoutesWithoutItsTap": (POINTS,),
    "KeepsItsOwnExperts": (GIVEN,),
    "KeepsTheWeightsOfItsOwn": (GIVEN,),
}
RIGHT = ()


def spec(name, of):
    return replace(of, impl=f"{__name__}:{name}", priority=0)


def experts(made, change):
    """A table with something else in place of the experts of each layer."""
    return replace(made, layers=tuple(replace(layer, mlp=change(layer.mlp)) for layer in made.layers))


class NeverNormalizes(Qwen3Moe):
    spec = spec("NeverNormalizes", QWEN3_MOE)

    def experts(self, cfg):
        made = super().experts(cfg)
        return replace(made, router=replace(made.router, normalize=False))


class ExpertsInEveryLayer(Qwen3Moe):
    spec = spec("ExpertsInEveryLayer", QWEN3_MOE)

    def describe(self, cfg):
        made = super().describe(cfg)
        return layers(made, mlp=made.layers[0].mlp)


class NeverClamps(GptOss):
    spec = spec("NeverClamps", GPT_OSS)

    def describe(self, cfg):
        return experts(super().describe(cfg), lambda mlp: replace(mlp, limit=None))


class Mixed:
    """A model whose mixtures of experts are of another class."""

    mixture: type

    def build(self, cfg, parts):
        model = super().build(cfg, parts)
        for block in model.blocks:
            if block.experts is not None:
                block.experts.__class__ = self.mixture
        return model


class _Ungated(Mixture):
    def _of_shared(self, x, up, down):
        kept, self.shared_gate = self.shared_gate, None
        try:
            return super()._of_shared(x, up, down)
        finally:
            self.shared_gate = kept


class ForgetsTheGateOfTheShared(Mixed, Qwen2Moe):
    spec = spec("ForgetsTheGateOfTheShared", QWEN2_MOE)
    mixture = _Ungated


class HalvesForTurns(GptOss):
    """The rows of gate and up are taken to lie one after another."""

    spec = spec("HalvesForTurns", GPT_OSS)

    def describe(self, cfg):
        made = super().describe(cfg)
        forms = tuple(replace(form, interleaved=False) for form in made.names.experts)
        return replace(made, names=replace(made.names, experts=forms))


class UpForGate(Mixtral):
    """w3 is taken for the gate."""

    spec = spec("UpForGate", MIXTRAL)

    def describe(self, cfg):
        made = super().describe(cfg)
        hub, *rest = made.names.experts
        forms = (replace(hub, gate_up=hub.gate_up[::-1]), *rest)
        return replace(made, names=replace(made.names, experts=forms))


class _First(Mixture):
    def route(self, logits):
        weights, ids = super().route(logits)
        return weights, ids[:, :1].expand_as(ids).contiguous()


class AlwaysTheFirst(Mixed, Mixtral):
    spec = spec("AlwaysTheFirst", MIXTRAL)
    mixture = _First


class SoftmaxOfAll(GptOss):
    spec = spec("SoftmaxOfAll", GPT_OSS)

    def describe(self, cfg):
        return experts(super().describe(cfg), lambda m: replace(m, router=replace(m.router, score=SOFTMAX)))


class _Fewer(Mixture):
    def products(self, x, ids, weights):
        keep = max(1, ids.shape[1] - 1)
        return super().products(x, ids[:, :keep].contiguous(), weights[:, :keep].contiguous())


class DropsTheLastChoice(Mixed, Qwen3Moe):
    spec = spec("DropsTheLastChoice", QWEN3_MOE)
    mixture = _Fewer


class _Deaf(Mixture):
    def choose(self, h, tap=None):
        tap = tap or self.taps
        return super().choose(h, None if tap is None else _Shown(tap))


class _Shown:
    """Taps that see each value, and whose changes are dropped."""

    def __init__(self, tap):
        self.tap = tap

    def __call__(self, point, value):
        self.tap(point, value)
        return value

    def given(self, point):
        return self.tap.given(point)


class RoutesWithoutItsTap(Mixed, Qwen3Moe):
    """Ignores the vector that is added to the router's logits."""

    spec = spec("RoutesWithoutItsTap", QWEN3_MOE)
    mixture = _Deaf


class _Stubborn(Mixture):
    """Reports the given experts, and multiplies by those of the router."""

    def choose(self, h, tap=None):
        tap = tap or self.taps
        return super().choose(h, None if tap is None else _Pretends(tap))


class _Pretends(_Shown):
    def __call__(self, point, value):
        given = self.tap.given(point) if point == "experts" else None
        return self.tap(point, value if given is None else given.float())

    def given(self, point):
        return None


class KeepsItsOwnExperts(Mixed, Qwen3Moe):
    spec = spec("KeepsItsOwnExperts", QWEN3_MOE)
    mixture = _Stubborn


class _Reuses(Mixture):
    def route(self, logits, given=None):
        weights, ids = super().route(logits)
        return (weights, ids) if given is None else (weights.flip(1), given)


class KeepsTheWeightsOfItsOwn(Mixed, Qwen3Moe):
    """The weights of given experts do not follow from the router's logits."""

    spec = spec("KeepsTheWeightsOfItsOwn", QWEN3_MOE)
    mixture = _Reuses
