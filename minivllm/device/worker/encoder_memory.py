"""The device memory that the encoding of the largest image takes, measured before the KV cache gets the rest.

    two blank images ──► encoder, part by part ──► bytes at the most, and bytes between two parts
                                                   (a line through them gives those of the largest image)

Neither image has more tokens than a request may have, because its encoding could take more memory than there is.
Features have memory of their own (``image_cache_mb``).  The tensors between two parts belong to an image that several
steps encode, so they exist beside the tensors of the model's layers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from minivllm.core.external_calls import call_foreign

if TYPE_CHECKING:
    from minivllm.core.interfaces.encoder import ImageValues

    from .encoder import LoadedEncoder

SIDE = 2048  # pixels along each side of the larger image whose encoding is measured; the other has half of it
LEAST_SIDE = 64  # of the smallest image that is tried if larger ones have too many tokens
LARGEST_SIDE = 4096  # of the image whose tokens are taken as the most that an image has


class EncodingMemory(NamedTuple):
    """Bytes of device memory of an encoding.  ``kept`` is the most between two of its parts, and ``passing`` what a
    part takes besides."""

    kept: int = 0
    passing: int = 0

    def beside(self, activations: float) -> float:
        """Return the bytes to reserve for encodings and steps, which take ``activations`` bytes and never run at the
        same time."""
        return self.kept + max(self.passing, activations)


class MemoryMeter:
    """Reads the bytes that tensors take on the current GPU, beyond those at the last ``start``."""

    def start(self) -> None:
        """Begin a measurement."""
        torch.cuda.reset_peak_memory_stats()
        self.before = torch.cuda.memory_allocated()

    def now(self) -> int:
        return torch.cuda.memory_allocated() - self.before

    def most(self) -> int:
        """Return the largest number of bytes since ``start``."""
        return torch.cuda.max_memory_allocated() - self.before


def encoding_memory(
    encoder: LoadedEncoder, device: torch.device, max_tokens: int, meter: MemoryMeter | None = None
) -> EncodingMemory:
    """Measure the memory of encoding an image of at most ``max_tokens`` tokens.

    Exceptions of the plug-in and torch.OutOfMemoryError are raised unchanged."""
    meter = MemoryMeter() if meter is None else meter
    side = _side(encoder, max_tokens)
    if side is None:
        return EncodingMemory()
    images = [_blank(encoder, one) for one in (side // 2, side)]
    sizes = [image.tokens for image in images]
    measured = [_measured(encoder, device, image, meter) for image in images]
    largest = max_tokens
    if side == SIDE:
        largest = min(_blank(encoder, LARGEST_SIDE).tokens, max_tokens)
    kept, passing = (_on_line(sizes, [one[i] for one in measured], largest) for i in range(2))
    return EncodingMemory(kept, passing)


def _side(encoder: LoadedEncoder, max_tokens: int) -> int | None:
    """Return the side in pixels of the largest square image up to SIDE of at most ``max_tokens`` tokens.

    None means that each image has more tokens, so that requests with images are refused."""
    side = SIDE
    while side >= LEAST_SIDE:
        tokens = _blank(encoder, side).tokens
        if tokens <= max_tokens:
            return side
        smaller = math.isqrt(side * side * max_tokens // tokens)
        side = min(smaller, side - 1)
    return None


def _blank(encoder: LoadedEncoder, side: int) -> ImageValues:
    """Return the values of a white square image, as the front end prepares them."""
    from PIL import Image

    found: ImageValues = call_foreign(encoder.plugin.prepare, Image.new("RGB", (side, side), "white"))
    return found


def _measured(encoder: LoadedEncoder, device: torch.device, image: ImageValues, meter: MemoryMeter) -> EncodingMemory:
    """Encode an image part by part, and return the memory that it takes."""
    kept = 0
    meter.start()
    values = np.ascontiguousarray(image.values).reshape(-1)
    if values.dtype != np.uint8:
        values = values.astype(np.float32, copy=False)
    with torch.inference_mode():
        for found in encoder.parts(torch.from_numpy(values).to(device), image.shape):
            if isinstance(found, float):
                kept = max(kept, meter.now())
    return EncodingMemory(kept, max(meter.most() - kept, 0))


def _on_line(sizes: list[int], found: list[int], at: int) -> int:
    """Return the bytes for ``at`` tokens, on the line through those that were found for two sizes in tokens.  For one
    size they are the larger of both."""
    (a, b), (low, high) = sizes, found
    if a == b:
        return max(low, high)
    return max(round(low + (high - low) * (at - a) / (b - a)), 0)
