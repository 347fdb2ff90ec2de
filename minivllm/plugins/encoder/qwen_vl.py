"""The image encoders of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5, which read patches of images of any resolution.

Each token has a position for each axis of the grid of patches (m-rope).  Qwen3-VL has further features, which are added
behind the first layers of the text model (deepstack).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.core.interfaces.encoder import ImageFacts, ImageValues
from minivllm.errors import ModelError, shown

from .tower import TowerEncoder

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

BLOCKS = ("qwen2_vl", "qwen2_5_vl")  # model types whose sections are blocks of frequencies; later ones alternate


class QwenVL(TowerEncoder):
    """Encodes an image as one token for each square of patches.  Its shape is the grid (time, rows, columns)."""

    def facts_with(self, token: int) -> ImageFacts:
        """Return the facts of a checkpoint.  ModelError for sections that are not half the rotary dimensions."""
        text = self.whole.get_text_config()
        rope = text.rope_parameters or {}
        sections = tuple(rope.get("mrope_section") or ())
        _check_sections(sections, text, rope)
        interleaved = self.family not in BLOCKS
        levels = 1 + len(self._deepstack)
        return ImageFacts(token, levels=levels, merge=self._merge, sections=sections, interleaved=interleaved)

    @property
    def _merge(self) -> int:
        """Return the patches along each side of a square that becomes one token."""
        return int(self.whole.vision_config.spatial_merge_size)

    @property
    def _deepstack(self) -> Sequence[int]:
        """Return the layers of the tower whose features are added behind the first layers of the text model."""
        return list(getattr(self.whole.vision_config, "deepstack_visual_indexes", None) or ())

    def prepare(self, image: Image) -> ImageValues:
        """Return the patches of an image, and their grid."""
        found = self.processed(image)
        frames, rows, columns = (int(n) for n in found["image_grid_thw"][0])
        tokens = frames * rows * columns // self._merge**2
        return ImageValues(np.asarray(found["pixel_values"], np.float32), (frames, rows, columns), tokens)

    def features(self, values: Tensor, shape: tuple[int, int, int]) -> list[Tensor]:
        """Return the features of an image with these patches."""
        import torch

        grid = torch.tensor([list(shape)]).to(values.device)
        pixels = values.view(shape[0] * shape[1] * shape[2], -1)
        found = self.model.get_image_features(pixels, image_grid_thw=grid)
        features = [found.pooler_output[0]]
        if self._deepstack:
            features += [_of_first(level) for level in found.deepstack_features]
        return features


def _of_first(level: Tensor | Sequence[Tensor]) -> Tensor:
    """Return the features [tokens, hidden] of the first image.

    Some releases of transformers (5.17) give one tensor for all images, and some a tensor for each (5.24)."""
    first: Tensor = level[0] if isinstance(level, list | tuple) else level  # type: ignore[assignment]
    return first


def _check_sections(sections: tuple[Any, ...], text: Any, rope: Mapping[str, Any]) -> None:
    """Raise ModelError if the parts of the rotary embedding for time, height and width are not half its dimensions."""
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    share = rope.get("partial_rotary_factor", getattr(text, "partial_rotary_factor", None)) or 1.0
    half = int(head * share) // 2
    numbers = all(type(part) is int and part >= 0 for part in sections)
    if len(sections) != 3 or not numbers or sum(sections) != half:
        raise ModelError(f"mrope_section={shown(sections)}: expected three numbers with the sum {half}")
