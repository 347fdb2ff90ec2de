"""Wrong tables: a family of models with one field of its description left out or taken for another."""

from __future__ import annotations

from dataclasses import replace

from minivllm.device.layers.decoder import DecoderBlock
from minivllm.device.layers.fused import Normed
from minivllm.plugins.model.cohere import Cohere
from minivllm.plugins.model.gemma import Gemma2, Gemma3
from minivllm.plugins.model.glm4 import Glm4
from minivllm.plugins.model.granite import Granite
from minivllm.plugins.model.llama import Llama
from minivllm.plugins.model.phi3 import Phi3
from minivllm.registration.spec import Spec

from .models import CLAIMS, CONFIGS, changed, layers
from .models import spec as family_spec

SEAM = "model"
POINTS = "test_each_point_passes_once_and_what_comes_back_goes_on"
FAULTS = {
    "ForgetsTheOffset": (CLAIMS, CONFIGS),
    "OneRopeForAll": (CONFIGS,),
    "ForgetsTheMultiplier": (CONFIGS,),
    "TakesPairsForHalves": (CLAIMS, CONFIGS),
    "MlpBehindAttention": (CLAIMS, CONFIGS),
    "NeverLong": (CONFIGS,),
    "LeavesOutAPoint": (POINTS,),
    "PassesAfterTheSum": (POINTS,),
    "DropsWhatIsAdded": (POINTS,),
}
RIGHT = ()


def spec(name: str, family: str) -> Spec:
    return replace(family_spec(name, family), impl=f"{__name__}:{name}")


class ForgetsTheOffset(Gemma2):
    """Takes the weights of norms as they are, which hold their difference from 1."""

    spec = spec("ForgetsTheOffset", "gemma2")

    def describe(self, cfg):
        made = super().describe(cfg)
        return replace(made, norm=replace(made.norm, offset=0.0))


class OneRopeForAll(Gemma3):
    """The first layer's rotary embedding serves all."""

    spec = spec("OneRopeForAll", "gemma3_text")

    def describe(self, cfg):
        made = super().describe(changed(cfg, layer_types=list(cfg.layer_types)))
        return layers(made, rope=made.layers[0].rope)


class ForgetsTheMultiplier(Granite):
    spec = spec("ForgetsTheMultiplier", "granite")

    def describe(self, cfg):
        return layers(super().describe(cfg), residual_scale=1.0)


class TakesPairsForHalves(Glm4):
    spec = spec("TakesPairsForHalves", "glm4")

    def rope(self, cfg, layer):
        return replace(super().rope(cfg, layer), interleaved=False)


class MlpBehindAttention(Cohere):
    """The MLP reads the stream to which attention was added, in a parallel layer."""

    spec = spec("MlpBehindAttention", "cohere")

    def build(self, cfg, parts):
        model = super().build(cfg, parts)
        for block in model.blocks:
            block.__class__ = _OneAfterTheOther
        return model


class _OneAfterTheOther(DecoderBlock):
    def __call__(self, h, residual, step):
        q, k, v = self.qkv(h).split(self.sizes, dim=-1)
        out = self.out(self.attn(q, k, v, step, self.pre))
        return self.both.add(self.both.linear(self.up(Normed(h.x + out))) + out, residual)


class NeverLong(Phi3):
    """The frequencies of short sequences serve long ones."""

    spec = spec("NeverLong", "phi3")

    def switch(self, cfg):
        super().switch(cfg)


class PointOfABlock(Llama):
    """A model whose blocks compute differently if they are tapped."""

    block: type

    def build(self, cfg, parts):
        model = super().build(cfg, parts)
        for block in model.blocks:
            block.__class__ = self.block
        return model


def tapped_spec(name: str) -> Spec:
    return replace(spec(name, "llama"), api=(2, 1))


class _WithoutMlp(DecoderBlock):
    def tapped(self, h, residual, step):
        taps = step.taps
        step = replace(step, taps=lambda point, x: x if point.endswith("mlp") else taps(point, x))
        return super().tapped(h, residual, step)


class LeavesOutAPoint(PointOfABlock):
    spec, block = tapped_spec("LeavesOutAPoint"), _WithoutMlp


class _Doubled(DecoderBlock):
    def tapped(self, h, residual, step):
        h, residual = super().tapped(h, residual, step)
        return h, residual.mul(1.01)


class PassesAfterTheSum(PointOfABlock):
    """The stream behind a layer that is tapped is another one."""

    spec, block = tapped_spec("PassesAfterTheSum"), _Doubled


class _Deaf(DecoderBlock):
    def tapped(self, h, residual, step):
        taps = step.taps
        return super().tapped(h, residual, replace(step, taps=lambda point, x: (taps(point, x), x)[1]))


class DropsWhatIsAdded(PointOfABlock):
    spec, block = tapped_spec("DropsWhatIsAdded"), _Deaf
