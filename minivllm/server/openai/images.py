"""The images of chats: prepared in processes with limits, so that the event loop goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.runtime.images.confined import ConfinedImages, reader_of
from minivllm.runtime.images.placing import place
from minivllm.runtime.images.reader import NO_ENCODER

if TYPE_CHECKING:
    from minivllm.core.interfaces.images import PlacedImage, PreparedImage
    from minivllm.runtime.text.image_parts import ImageSource

Placed = tuple["PlacedImage", ...]


class ServedImages:
    """Reads the images of the requests of a server."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        """Make the reader of an engine with the ``facts`` of ``EngineInfo.images``."""
        self.reader = reader_of(facts, facts["why_not"])
        self.workers = ConfinedImages(self.reader)

    def start(self) -> None:
        """Start the processes that prepare images, if the engine reads images."""
        if not self.reader.why_not:
            self.workers.start()

    async def close(self) -> None:
        """End the processes."""
        await self.workers.close()

    @property
    def reads(self) -> bool:
        """Return whether the checkpoint has an image encoder, so that images of chats are read or refused here."""
        return self.reader.why_not != NO_ENCODER

    @property
    def most(self) -> int:
        """Return the number of images that a request may have, 0 if the engine reads none."""
        return 0 if self.reader.why_not else self.reader.wiring.max_images

    async def place(
        self, ids: Sequence[int], sources: Sequence[ImageSource], salt: Sequence[str] = ()
    ) -> tuple[list[int], tuple[PlacedImage, ...]]:
        """Return the token ids of a prompt with the placeholders of its images, and the images.

        ``salt`` is the salt of the request; a file of a request with another salt is decoded again.  RequestError if an
        image is refused, or if the prompt does not have one placeholder per image.
        """
        prepared: list[PreparedImage] = []
        for source in sources:
            prepared.append(await self.workers.prepare(source, salt))
            self.reader.check_tokens(prepared)
        whole, placed = place(np.asarray(ids, np.int32), prepared, self.reader.wiring.facts)
        return whole.tolist(), placed
