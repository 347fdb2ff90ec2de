"""The memory that is reserved for encoding images: that of the largest image, from the measured ones."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from minivllm.core.interfaces.encoder import ImageValues
from minivllm.device.worker import build
from minivllm.device.worker.encoder_memory import EncodingMemory, encoding_memory

PATCH = 32  # pixels along each side of a token
KEPT, PASSING, FIXED = 100, 700, 5000  # bytes: for each token between two parts and within a part, and for any image
CPU = torch.device("cpu")


class Memory:
    """Counts the bytes of an encoding, as the allocator of a GPU does."""

    def start(self):
        self.bytes = self.peak = 0

    def take(self, count):
        self.bytes += count
        self.peak = max(self.peak, self.bytes)

    def now(self):
        return self.bytes

    def most(self):
        return self.peak


class Encoder:
    """Takes memory that grows with the tokens of an image.  ``least`` and ``most`` limit the tokens, as processors
    do."""

    def __init__(self, memory, most, least=0):
        self.memory, self.least, self.most = memory, least, most
        self.encoded = []
        self.plugin = self

    def prepare(self, image):
        tokens = max(min(image.width * image.height // PATCH**2, self.most), self.least)
        return ImageValues(np.zeros(tokens, np.uint8), (1, 1, tokens), tokens)

    def parts(self, values, shape):
        tokens = len(values)
        self.encoded.append(tokens)
        for share in (0.25, 0.5, 0.75):
            self.memory.take(PASSING * tokens)
            self.memory.take(-PASSING * tokens)
            if share == 0.25:
                self.memory.take(KEPT * tokens + FIXED)
            yield share
        self.memory.take(PASSING * tokens)
        self.memory.take(-PASSING * tokens - KEPT * tokens - FIXED)
        yield torch.zeros(1, tokens, 1)

    def describe(self, exc):
        return f"it failed: {exc}"


@pytest.mark.parametrize(
    ("most", "max_tokens", "largest", "encoded"),
    [
        (10**6, 10**6, 128**2, [32**2, 64**2]),  # the largest image itself takes seconds
        (10**6, 5000, 5000, [32**2, 64**2]),
        (10**6, 3000, 3000, [749, 2997]),
        (10**6, 300, 300, [74, 299]),
        (9000, 10**6, 9000, [32**2, 64**2]),
        (2000, 1500, 1500, [374, 1499]),  # larger images are made smaller, as processors do
    ],
)
def test_the_memory_of_the_largest_image_is_reserved(most, max_tokens, largest, encoded):
    """No image is encoded that has more tokens than a request may have."""
    memory = Memory()
    encoder = Encoder(memory, most)
    found = encoding_memory(encoder, CPU, max_tokens, memory)
    assert found == EncodingMemory(KEPT * largest + FIXED, PASSING * largest)
    assert encoder.encoded == encoded


@pytest.mark.parametrize(("least", "max_tokens"), [(64, 63), (64, 1), (9, 0)])
def test_no_image_is_encoded_if_each_has_more_tokens_than_a_request_may_have(least, max_tokens):
    memory = Memory()
    encoder = Encoder(memory, 10**6, least)
    assert encoding_memory(encoder, CPU, max_tokens, memory) == EncodingMemory()
    assert not encoder.encoded


def test_images_of_one_size_reserve_the_measured_memory():
    memory = Memory()
    found = encoding_memory(Encoder(memory, 64), CPU, 10**6, memory)
    assert found == EncodingMemory(KEPT * 64 + FIXED, PASSING * 64)


def test_a_divided_image_has_room_beside_the_activations_of_a_step():
    found = EncodingMemory(kept=10, passing=50)
    assert found.beside(200) == 210  # a part and a step never run at the same time
    assert found.beside(20) == 60


def test_an_encoder_that_fails_on_a_trial_image_reserves_nothing_and_is_noted():
    def fail(image):
        raise ValueError("too white")

    encoder = Encoder(Memory(), 64)
    encoder.prepare = fail
    worker = SimpleNamespace(encoder=encoder, device=CPU, notes=[])
    assert build._trial_images(worker, SimpleNamespace(max_model_len=64)) == EncodingMemory()
    assert worker.notes == ["no memory is reserved for encoding images: it failed: too white"]
