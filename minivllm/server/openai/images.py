"""The images of chats: decoded and prepared by threads, so that the event loop goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.core.interfaces.executor import ImageWiring
from minivllm.registration.spec import Part
from minivllm.runtime.images.placing import place
from minivllm.runtime.images.reader import NO_ENCODER, ImageReader

if TYPE_CHECKING:
    from minivllm.core.interfaces.images import PlacedImage, PreparedImage
    from minivllm.runtime.text.image_parts import ImageSource

Placed = tuple["PlacedImage", ...]
AT_ONCE = 2  # images that are decoded at the same time, which bounds the memory


class ServedImages:
    """Reads the images of the requests of a server."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        """Make the reader of an engine with the ``facts`` of ``EngineInfo.images``."""
        part = None if facts["part"] is None else Part(**facts["part"])
        images = ImageWiring.from_json(facts["wiring"])
        self.reader = ImageReader(images, part, facts["folder"], facts["raw"], facts["max_tokens"], facts["why_not"])
        self._turns = asyncio.Semaphore(AT_ONCE)

    @property
    def reads(self) -> bool:
        """Return whether the checkpoint has an image encoder, so that images of chats are read or refused here."""
        return self.reader.why_not != NO_ENCODER

    @property
    def most(self) -> int:
        """Return the number of images that a request may have, 0 if the engine reads none."""
        return 0 if self.reader.why_not else self.reader.wiring.max_images

    async def place(
        self, ids: Sequence[int], sources: Sequence[ImageSource]
    ) -> tuple[list[int], tuple[PlacedImage, ...]]:
        """Return the token ids of a prompt with the placeholders of its images, and the images.

        RequestError if an image is refused, or if the prompt has not one placeholder for each."""
        prepared: list[PreparedImage] = []
        for source in sources:
            async with self._turns:
                prepared.append(await asyncio.to_thread(self.reader.prepare, source))
            self.reader.check_tokens(prepared)
        whole, placed = place(np.asarray(ids, np.int32), prepared, self.reader.wiring.facts)
        return whole.tolist(), placed
