"""Wrong image encoders with one fault each, and right ones."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from minivllm.plugin import ANY, ImageEncoder, ImageFacts, ImageValues, Spec

SEAM = "encoder"
FACTS = "test_facts_are_plain_data_of_the_checkpoint"
VALUES = "test_values_are_numbers_and_tokens_are_those_of_the_shape"
PIXELS = "test_pixels_alone_decide_the_values"
KEPT = "test_pictures_do_not_change"
THREADS = "test_threads_prepare_what_one_thread_prepares"
FORM = "test_features_have_the_form_that_facts_and_prepare_promise"
SAME = "test_features_are_those_of_the_image_and_stay_so"
RANDOM = "test_arguments_and_the_random_state_do_not_change"
SERVED = "test_the_engine_serves_it"
PARTS = "test_parts_end_with_the_features_of_the_whole"
FAULTS = {
    "FeaturesOfTheImageBefore": (SAME, SERVED),
    "HashesTheFileName": (PIXELS,),
    "EncodesTheLastPrepared": (FORM, SERVED),
    "ReusesItsBuffer": (SAME,),
    "KeepsFeaturesByShape": (SAME, SERVED),
    "ReturnsFloat64": (FORM, SERVED),
    "ReturnsTokensFirst": (FORM, SERVED),
    "LacksTheLastToken": (FORM, SERVED),
    "CountsPatches": (VALUES,),
    "PreparesInOneBuffer": (SERVED, THREADS),
    "AveragesWithTheImageBefore": (PIXELS,),
    "PaintsACorner": (KEPT, PIXELS),
    "ScalesInPlace": (RANDOM,),
    "AddsNoise": (RANDOM, SAME),
    "DividesByTheDeviation": (VALUES,),
    "NamesAnUnknownToken": (FACTS,),
    "CountsItsFacts": (FACTS,),
    "EncodesTheDarkerOfTwo": (SAME, SERVED),
    "KeepsOneImageInParts": (PARTS,),
    "CountsPartsDown": (PARTS,),
}
RIGHT = ("Colours", "Grid")
SIDE = 4  # patches along each side


def spec(name, contract=(1, 0)):
    limits = {"device": ANY, "dtype": ANY, "model_type": ANY}
    return Spec(f"{__name__}:{name}", contract, "for a test of the kit", limits=limits)


def patches_of(image):
    """Return the pixels [16, 192] of 4 x 4 patches of an image."""
    small = np.asarray(image.resize((8 * SIDE, 8 * SIDE)), np.float32) / 127.5 - 1
    return small.reshape(SIDE, 8, SIDE, 8, 3).swapaxes(1, 2).reshape(SIDE**2, -1)


class Colours(ImageEncoder):
    """An encoder with one token for each patch, whose features are a projection of the patch's pixels."""

    spec = spec("Colours")

    def facts(self):
        return ImageFacts(self.ctx.config["image_token_id"])

    def prepare(self, image):
        return ImageValues(patches_of(image), (3, 8 * SIDE, 8 * SIDE), SIDE**2)

    def load(self, device, dtype):
        weight = torch.randn(192, self.ctx.config["hidden_size"], generator=torch.Generator().manual_seed(0))
        self.weight = (weight / 10).to(device, getattr(torch, dtype))
        return self.weight.numel() * self.weight.element_size()

    def encode(self, values, shape):
        return values.view(1, SIDE**2, -1).to(self.weight.dtype) @ self.weight


class Grid(Colours):
    """Each token has a position for each axis."""

    spec = spec("Grid")

    def facts(self):
        return ImageFacts(self.ctx.config["image_token_id"], sections=(1, 2, 1), merge=2)

    def prepare(self, image):
        return ImageValues(patches_of(image), (1, 2 * SIDE, 2 * SIDE), SIDE**2)


class FeaturesOfTheImageBefore(Colours):
    spec = spec("FeaturesOfTheImageBefore")
    before = None

    def encode(self, values, shape):
        last, self.before = self.before, super().encode(values, shape)
        return self.before.clone() if last is None else last.clone()


class HashesTheFileName(Colours):
    spec = spec("HashesTheFileName")

    def prepare(self, image):
        found = super().prepare(image)
        name = getattr(image, "filename", "") or "none"
        found.values[0, 0] = hashlib.sha256(name.encode()).digest()[0]
        return found


class EncodesTheLastPrepared(Colours):
    spec = spec("EncodesTheLastPrepared")
    last = None

    def prepare(self, image):
        found = super().prepare(image)
        self.last = torch.from_numpy(found.values)
        return found

    def encode(self, values, shape):
        return super().encode(self.last, shape)


class ReusesItsBuffer(Colours):
    spec = spec("ReusesItsBuffer")

    def encode(self, values, shape):
        found = super().encode(values, shape)
        if not hasattr(self, "buffer"):
            self.buffer = torch.empty_like(found)
        return self.buffer.copy_(found)


class KeepsFeaturesByShape(Colours):
    spec = spec("KeepsFeaturesByShape")

    def load(self, device, dtype):
        self.found = {}
        return super().load(device, dtype)

    def encode(self, values, shape):
        return self.found.setdefault(shape, super().encode(values, shape)).clone()


class ReturnsFloat64(Colours):
    spec = spec("ReturnsFloat64")

    def encode(self, values, shape):
        return super().encode(values, shape).double()


class ReturnsTokensFirst(Colours):
    spec = spec("ReturnsTokensFirst")

    def encode(self, values, shape):
        return super().encode(values, shape).transpose(0, 1)


class LacksTheLastToken(Colours):
    spec = spec("LacksTheLastToken")

    def encode(self, values, shape):
        return super().encode(values, shape)[:, :-1]


class CountsPatches(Grid):
    spec = spec("CountsPatches")

    def prepare(self, image):
        return super().prepare(image)._replace(tokens=4 * SIDE**2)


class PreparesInOneBuffer(Colours):
    spec = spec("PreparesInOneBuffer")
    buffer = None

    def prepare(self, image):
        found = super().prepare(image)
        if self.buffer is None:
            self.buffer = found.values.copy()
        self.buffer[:] = found.values
        return found._replace(values=self.buffer)


class AveragesWithTheImageBefore(Colours):
    spec = spec("AveragesWithTheImageBefore")
    mean = 0.0

    def prepare(self, image):
        found = super().prepare(image)
        self.mean = 0.9 * self.mean + 0.1 * found.values.mean()
        return found._replace(values=found.values - np.float32(self.mean))


class PaintsACorner(Colours):
    spec = spec("PaintsACorner")

    def prepare(self, image):
        image.putpixel((0, 0), tuple((value + 60) % 256 for value in image.getpixel((0, 0))))
        return super().prepare(image)


class ScalesInPlace(Colours):
    spec = spec("ScalesInPlace")

    def encode(self, values, shape):
        return super().encode(values.mul_(0.5), shape)


class AddsNoise(Colours):
    spec = spec("AddsNoise")

    def encode(self, values, shape):
        found = super().encode(values, shape)
        return found + 0.01 * torch.randn_like(found)


class DividesByTheDeviation(Colours):
    spec = spec("DividesByTheDeviation")

    def prepare(self, image):
        found = super().prepare(image)
        with np.errstate(all="ignore"):
            return found._replace(values=(found.values - found.values.mean()) / found.values.std())


class NamesAnUnknownToken(Colours):
    spec = spec("NamesAnUnknownToken")

    def facts(self):
        return ImageFacts(100000)


class CountsItsFacts(Colours):
    spec = spec("CountsItsFacts")
    calls = 0

    def facts(self):
        type(self).calls += 1
        return ImageFacts(self.ctx.config["image_token_id"], before=(type(self).calls % 50,))


class EncodesTheDarkerOfTwo(Colours):
    """The features of an image depend on the image before."""

    spec = spec("EncodesTheDarkerOfTwo")

    def load(self, device, dtype):
        self.seen = []
        return super().load(device, dtype)

    def encode(self, values, shape):
        self.seen = sorted([*self.seen[-1:], values.clone()], key=lambda one: float(one.sum()))
        return super().encode(self.seen[0], shape)


class KeepsOneImageInParts(Colours):
    """The second part reads the values of the image that was begun last."""

    spec = spec("KeepsOneImageInParts", (1, 4))

    def encode_parts(self, values, shape):
        self.begun = values
        yield 0.5
        yield self.encode(self.begun, shape)


class CountsPartsDown(Colours):
    spec = spec("CountsPartsDown", (1, 4))

    def encode_parts(self, values, shape):
        yield from (0.6, 0.3)
        yield self.encode(values, shape)
