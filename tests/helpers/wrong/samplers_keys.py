"""Wrong samplers, which are ``DefaultSampler`` with a fault in the noise, or that change the passed rows."""

from __future__ import annotations

from dataclasses import replace

import torch

from minivllm.core.interfaces.sampling import Sampler
from minivllm.device.worker.sampling import noise
from minivllm.plugins.sampler.default import DefaultSampler
from minivllm.registration.spec import ANY, Spec

SEAM = "sampler"
ODDS = "test_draws_come_with_the_probabilities_of_the_softmax"
BATCH = "test_a_key_draws_the_same_token_again"
PAIRS = "test_draws_of_neighbouring_keys_are_independent"
KEYS = "test_no_two_keys_are_taken_for_one"
TAIL = "test_unlikely_tokens_come_as_often_as_they_should"
FAULTS = {
    "RowInTheSeed": (BATCH,),
    "CallInTheSeed": (BATCH,),
    "IgnoresPosition": (PAIRS,),
    "IgnoresSample": (PAIRS,),
    "IgnoresHighSeed": (PAIRS,),
    "SumOfKeys": (PAIRS,),
    "SameForAllRows": (ODDS, BATCH),
    "WritesToRows": (ODDS,),
    "PositionInAByte": (KEYS,),
    "PackedKey": (KEYS,),
    "SampleInABit": (KEYS,),
    "SizeOfTheSeed": (KEYS,),
    "SixteenBits": (TAIL,),
}
RIGHT = ()


def spec(name: str, *features: str) -> Spec:
    features = frozenset(features)
    return Spec(f"{__name__}:{name}", (1, 0), "a planted fault", limits={"device": ANY}, features=features)


class Keyed(DefaultSampler):
    """Changes the key of the noise."""

    def draw(self, logits, rows, state, out):
        super().draw(logits, replace(rows, **self.change(rows)), state, out)


class RowInTheSeed(Keyed):
    spec = spec("RowInTheSeed")

    def change(self, rows):
        return {"seed": rows.seed + torch.arange(len(rows.seed), device=rows.seed.device)}


class CallInTheSeed(Keyed):
    """Counts its calls, as a generator would."""

    spec = spec("CallInTheSeed")
    calls = 0

    def change(self, rows):
        type(self).calls += 1
        return {"seed": rows.seed + self.calls}


class IgnoresPosition(Keyed):
    spec = spec("IgnoresPosition")

    def change(self, rows):
        return {"position": torch.zeros_like(rows.position)}


class IgnoresSample(Keyed):
    spec = spec("IgnoresSample")

    def change(self, rows):
        return {"sample": torch.zeros_like(rows.sample)}


class IgnoresHighSeed(Keyed):
    """Keeps 32 bits of the seed."""

    spec = spec("IgnoresHighSeed")

    def change(self, rows):
        return {"seed": rows.seed & 0xFFFFFFFF}


class SumOfKeys(Keyed):
    """seed + position: the next seed's draws are this one's, one token later."""

    spec = spec("SumOfKeys")

    def change(self, rows):
        return {"seed": rows.seed + rows.position, "position": torch.zeros_like(rows.position)}


class PositionInAByte(Keyed):
    """The noise repeats every 256 tokens."""

    spec = spec("PositionInAByte")

    def change(self, rows):
        return {"position": rows.position & 255}


class PackedKey(Keyed):
    """seed * 4096 + position: 4096 tokens later the next seed's draws begin."""

    spec = spec("PackedKey")

    def change(self, rows):
        return {"seed": rows.seed * 4096 + rows.position, "position": torch.zeros_like(rows.position)}


class SampleInABit(Keyed):
    """Samples 0 and 2 draw the same."""

    spec = spec("SampleInABit")

    def change(self, rows):
        return {"sample": rows.sample & 1}


class SizeOfTheSeed(Keyed):
    spec = spec("SizeOfTheSeed")

    def change(self, rows):
        return {"seed": rows.seed.abs()}


class WritesToRows(DefaultSampler):
    """Moves the engine's rows forward for later plug-ins."""

    spec = spec("WritesToRows")

    def draw(self, logits, rows, state, out):
        super().draw(logits, rows, state, out)
        rows.position.add_(1)


class SixteenBits(Sampler):
    """Noise of 16 bits, so that tokens less likely than 2**-16 hardly occur."""

    spec = spec("SixteenBits")

    def bind(self, params, prompt_len):
        return None

    def draw(self, logits, rows, state, out):
        lane = torch.arange(logits.shape[1], device=logits.device)
        u = noise(rows.seed[:, None], rows.position[:, None], rows.sample[:, None], lane)
        u = ((u * 65536).floor() + 0.5) / 65536
        out.tokens.copy_((logits - (-u.log()).log()).argmax(dim=1))


class SameForAllRows(DefaultSampler):
    """One vector of noise for the whole step."""

    spec = spec("SameForAllRows")

    def draw(self, logits, rows, state, out):
        first = {name: getattr(rows, name)[:1].expand(len(logits)) for name in ("seed", "position", "sample")}
        super().draw(logits, replace(rows, **first), state, out)
