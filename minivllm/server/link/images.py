"""The images of a request as columns of a frame, and back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minivllm.core.interfaces.images import PlacedImage, PreparedImage, values_in

# numbers of an image in the column "images": position, tokens, shape of 3 numbers, bytes of its values and of a value
FIELDS = 7
DIGEST = 32  # size of a digest in bytes


def columns_of(images: Sequence[PlacedImage]) -> dict[str, np.ndarray]:
    """Return the columns "images" (a table), "pixels" and "digests" of the images of a request, none without images."""
    if not images:
        return {}
    rows, parts = [], []
    for placed in images:
        image = placed.image
        values = image.values
        row = placed.position, image.tokens, *image.shape, values.nbytes, values.itemsize
        rows.append(row)
        data = values.view(np.uint8)
        parts.append(data)
    digests = b"".join(placed.image.digest for placed in images)
    table = np.array(rows, np.int64)
    pixels = np.concatenate(parts)
    keys = np.frombuffer(digests, np.uint8)
    return {"images": table.ravel(), "pixels": pixels, "digests": keys}


def images_of(rows: np.ndarray, pixels: np.ndarray, digests: np.ndarray) -> tuple[PlacedImage, ...]:
    """Return the images in the columns of a request."""
    found: list[PlacedImage] = []
    at = 0
    keys = digests.tobytes()
    for row in rows.reshape(-1, FIELDS).tolist():
        position, tokens, a, b, c, size, each = row
        first = len(found) * DIGEST
        digest = keys[first : first + DIGEST]
        end = at + size
        data = pixels[at:end]
        values = values_in(data, each)
        shape = a, b, c
        image = PreparedImage(values, shape, tokens, digest)
        placed = PlacedImage(image, position)
        found.append(placed)
        at = end
    return tuple(found)
