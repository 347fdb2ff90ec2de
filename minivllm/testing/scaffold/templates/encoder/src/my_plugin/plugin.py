"""Cut an image into 4 x 4 patches, and project the colours of each patch to the width of the text model.

The projection is random, with a fixed seed.  Load trained weights in ``load``, for example from ``ctx.folder``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minivllm.plugin import EncoderContext, ImageEncoder, ImageFacts, ImageValues, ModelError

SIDE, PATCHES = 32, 4  # pixels and patches along each side
PIXELS = SIDE // PATCHES  # of a patch


class MyPlugin(ImageEncoder):
    """An encoder with one token for each patch.  Only ``load`` and ``encode`` need torch."""

    def __init__(self, options: Any, ctx: EncoderContext) -> None:
        super().__init__(options, ctx)
        self.projection: Any = None

    def facts(self) -> ImageFacts:
        token = self.ctx.config.get("image_token_id")
        if not isinstance(token, int):
            raise ModelError("config.json has no image_token_id")
        return ImageFacts(token)

    def prepare(self, image: Any) -> ImageValues:
        small = image.resize((SIDE, SIDE))
        colours = np.asarray(small, np.float32) / 127.5 - 1
        patches = colours.reshape(PATCHES, PIXELS, PATCHES, PIXELS, 3)
        values = patches.swapaxes(1, 2).reshape(PATCHES**2, -1)
        return ImageValues(values, (3, SIDE, SIDE), PATCHES**2)

    def load(self, device: str, dtype: str) -> int:
        import torch

        draw = torch.Generator().manual_seed(0)
        width = 3 * PIXELS**2
        hidden = int(self.ctx.config["hidden_size"])
        weight = torch.randn(width, hidden, generator=draw) / width**0.5
        self.projection = weight.to(device, getattr(torch, dtype))
        return self.projection.numel() * self.projection.element_size()

    def encode(self, values: Any, shape: tuple[int, int, int]) -> Any:
        patches = values.view(1, PATCHES**2, -1)
        return patches.to(self.projection.dtype) @ self.projection
