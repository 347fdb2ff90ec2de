"""The image encoder of LLaVA: a tower of CLIP or SigLIP, and a projector of two layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minivllm.core.interfaces.encoder import ImageFacts, ImageValues

from .tower import CLIP, SIGLIP, TowerEncoder, check_tower

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor


class Llava(TowerEncoder):
    """Encodes an image as one token for each patch.  The shape of the pixels is (channels, height, width)."""

    def facts_with(self, token: int) -> ImageFacts:
        """Return the facts of a checkpoint: how an image is written in a prompt; ``token`` is the id of an image token.

        Raise ModelError for a vision tower other than CLIP or SigLIP.
        """
        check_tower(self.whole, (CLIP, SIGLIP))
        return ImageFacts(token)

    def prepare(self, image: Image) -> ImageValues:
        """Return the pixels of an image, and the number of patches that the projector reads."""
        values = np.asarray(self.processed(image)["pixel_values"], np.float32)[0]
        channels, height, width = values.shape
        vision = self.whole.vision_config
        patches = (height // vision.patch_size) * (width // vision.patch_size)
        with_class = patches + (vision.model_type == CLIP)
        tokens = with_class - (self.whole.vision_feature_select_strategy == "default")
        return ImageValues(values, (channels, height, width), tokens)

    def features(self, values: Tensor, shape: tuple[int, int, int]) -> list[Tensor]:
        """Return the features of an image with these pixels."""
        found = self.model.get_image_features(values.view(1, *shape).to(self.dtype))
        return [found.pooler_output[0]]
