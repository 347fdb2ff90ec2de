"""Prepared images that came as files, kept by a hash of the file, so that a file that comes again is not decoded."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minivllm.core.interfaces.images import PreparedImage

LIMIT = 128 << 20  # largest number of bytes of the values of all kept images


class KeptImages:
    """The most recently used prepared images, whose values have at most ``limit`` bytes together.

    Its methods may be called from several threads."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit, self.bytes = limit, 0
        self._images: OrderedDict[bytes, PreparedImage] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> PreparedImage | None:
        """Return the image of a key and mark it as used; None if it is not kept."""
        with self._lock:
            image = self._images.get(key)
            if image is not None:
                self._images.move_to_end(key)
            return image

    def put(self, key: bytes, image: PreparedImage) -> None:
        """Keep an image, unless it alone exceeds the limit.  The least recently used ones make room."""
        size = image.values.nbytes
        if size > self.limit:
            return
        with self._lock:
            old = self._images.pop(key, None)
            self.bytes += size - (0 if old is None else old.values.nbytes)
            self._images[key] = image
            while self.bytes > self.limit:
                _, oldest = self._images.popitem(last=False)
                self.bytes -= oldest.values.nbytes


def key_of(*parts: str | bytes) -> bytes:
    """Return the sha256 of a file, of the client to which it belongs, and of the facts on which its decoding depends.

    The size of each part is hashed too, so different parts have different keys."""
    found = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        found.update(len(data).to_bytes(8, "little"))
        found.update(data)
    return found.digest()
