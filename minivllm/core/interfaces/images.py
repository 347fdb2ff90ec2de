"""Images of a prompt, as plain data.

The checkpoint's image processor turns an image into values (pixels or patches) and a number of tokens.  The prompt has
that number of placeholder tokens in a row.  The device computes one vector of features for each placeholder, and the
model reads these in place of the placeholders' embeddings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from threading import Barrier

import numpy as np

_DTYPES = {1: np.uint8, 4: np.float32}  # number of bytes of a value -> dtype
SEGMENT = 512 << 10  # bytes of an array that one thread hashes at a time, in about 0.3 ms
HASHES_AT_ONCE = 6
START = 10.0  # seconds that the start of the hashing threads may take


@dataclass(frozen=True, eq=False)
class PreparedImage:
    """An image after the checkpoint's processor.

    ``shape`` is the (channels, height, width) of the values, or the grid of patches (time, rows, columns).  ``digest``
    is the sha256 of the decoded pixels, and only these decide the values, so equal digests mean equal features."""

    values: np.ndarray  # pixels or patches, f32 or u8 [n]
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
        """Return the position after the last placeholder token of the image."""
        return self.position + self.image.tokens


def values_in(data: np.ndarray, each: int) -> np.ndarray:
    """Return the values of an image, given as bytes u8 [n].  A value has ``each`` bytes: 1 means u8, 4 means f32."""
    return np.require(data.view(_DTYPES[each]), requirements="A")


def digest_of(values: np.ndarray, shape: Sequence[int]) -> bytes:
    """Return a sha256 of all elements of an array, and of the shape that an image has.

    The elements of a large array are hashed in segments, by several threads, and the hash of a segment stands for its
    bytes."""
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
    found = hashlib.sha256(repr((tuple(shape), len(data))).encode())
    segments = [data[at : at + SEGMENT] for at in range(0, len(data), SEGMENT)]
    if len(segments) > 1:
        for digest in _hashing().map(_sha256, segments):
            found.update(digest)
    else:
        found.update(data)
    return found.digest()


def _sha256(data: memoryview) -> bytes:
    return hashlib.sha256(data).digest()


def start_hashing() -> None:
    """Start all threads that hash segments, so that their stacks and heaps exist."""
    together = Barrier(HASHES_AT_ONCE)

    def run(data: memoryview) -> bytes:
        together.wait(START)
        return _sha256(data)

    list(_hashing().map(run, [memoryview(b"")] * HASHES_AT_ONCE))


@cache
def _hashing() -> ThreadPoolExecutor:
    """Return the pool of threads that hash the segments of arrays.  It is created when it is first needed."""
    return ThreadPoolExecutor(HASHES_AT_ONCE, "minivllm-hashes")
