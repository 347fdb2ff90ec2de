"""An image as the engine handles it: its number in the prefix cache, its part in the keys of stored pages, and the
state of its features on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minivllm.core.interfaces.images import PlacedImage

OF_IMAGE = -1  # in place of the tokens of an image; no token has this id
ContentKey = tuple[tuple[str, ...], bytes]  # (salt of a request, digest of the image)


@dataclass(eq=False)
class Content:
    """The content of an image under one salt.  Requests with the same image and salt share it."""

    number: int
    size: int  # bytes of the image's features on the device
    key: ContentKey
    requests: int = 0  # count of unfinished requests with the image
    rows: int = 0  # count of sequences in slots that have not computed the image's tokens yet
    # whether the device has the features, or computes them with the next steps
    encoded: bool = False
    # id of the first step that finds all features computed; a step before it would compute the rest
    due: int = 0
    steps: int = 1  # number of steps among which the computation of the features is divided
    # whether the features were computed ahead of time and no step has read them yet
    ahead: bool = False
    listed: bool = True  # whether later requests with the same image get this content

    def ready(self, step: int) -> bool:
        """Return whether all features of the image are computed before the step with this id."""
        return self.encoded and self.due <= step


def without_numbers(tokens: np.ndarray, images: Sequence[PlacedImage]) -> np.ndarray:
    """Return the tokens i32 [n] of the prefix cache, with OF_IMAGE in place of the tokens of ``images``."""
    ids = np.ascontiguousarray(tokens, np.int32)
    if images:
        ids = ids.copy()
        for placed in images:
            ids[placed.position : placed.end] = OF_IMAGE
    return ids


def digests_by_block(
    images: Sequence[PlacedImage], size: int, first: int, last: int
) -> dict[int, bytes]:
    """Return bytes that identify the parts of images in each block of ``size`` tokens, for the blocks ``first`` to
    ``last`` - 1 of a prompt.  A block without a part of an image is left out.

    The bytes are the digest of each image, its first token relative to the block, and its number of tokens."""
    parts: dict[int, bytes] = {}
    for placed in images:
        digest = placed.image.digest
        for i in range(max(first, placed.position // size), min(last, -(-placed.end // size))):
            where = placed.position - i * size, placed.image.tokens
            parts[i] = parts.get(i, b"") + digest + np.array(where, "<i4").tobytes()
    return parts
