"""Images of a prompt, as plain data.

The checkpoint's image processor turns an image into values (pixels or patches) and a number of tokens.  The prompt has
that number of placeholder tokens in a row.  The device computes one vector of features for each placeholder, and the
model reads these in place of the placeholders' embeddings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class PreparedImage:
    """An image after the checkpoint's processor.

    ``shape`` is the (channels, height, width) of the values, or the grid of patches (time, rows, columns).  ``digest``
    is the sha256 of the decoded pixels, which alone decide the values, so equal digests mean equal features."""

    values: np.ndarray  # f32 [n]
    shape: tuple[int, int, int]
    tokens: int
    digest: bytes


@dataclass(frozen=True, eq=False)
class PlacedImage:
    """An image of a prompt: its placeholders are the tokens ``[position, position + image.tokens)``."""

    image: PreparedImage
    position: int

    @property
    def end(self) -> int:
        """Return the position behind its last placeholder."""
        return self.position + self.image.tokens


def digest_of(values: np.ndarray, shape: Sequence[int]) -> bytes:
    """Return the sha256 of all elements of an array, and of the shape that an image has."""
    found = hashlib.sha256(repr(tuple(shape)).encode())
    found.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
    return found.digest()
