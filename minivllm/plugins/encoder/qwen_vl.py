"""The image encoders of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5, which read patches of images of any resolution.

Each token has a position for each axis of the grid of patches (m-rope).  Qwen3-VL has further features, which are added
behind the first layers of the text model (deepstack).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.core.interfaces.encoder import ImageFacts, ImageValues
from minivllm.errors import ModelError, shown

from .tower import TowerEncoder

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

# processors that resize, scale, normalize and cut into patches: with Pillow, and with torchvision, whose resized pixels
# are others
PLAIN, OTHER_SIZES = "Qwen2VLImageProcessorPil", ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast")
FRAMES = 2  # a patch of an image has its pixels twice, as two frames of a video
LENGTHS = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")  # towers that take the lengths of frames
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
        """Return the resized pixels [height, width, 3] of an image or its patches, and their grid.

        Pixels u8 have an eighth of the bytes of patches f32, which have each pixel twice, and ``features`` makes the
        patches on the device.  A processor with other steps than those of ``_plain`` makes them here."""
        size = self._plain_size(image)
        if size is not None:
            width, height = size
            resized = image if image.size == size else image.resize(size, self._processor.resample)
            grid = (1, height // self._patch, width // self._patch)
            return ImageValues(np.array(resized), grid, grid[1] * grid[2] // self._merge**2)
        found = self.processed(image)
        frames, rows, columns = (int(n) for n in found["image_grid_thw"][0])
        tokens = frames * rows * columns // self._merge**2
        return ImageValues(np.asarray(found["pixel_values"], np.float32), (frames, rows, columns), tokens)

    def _serve(self, model: Any, device: str) -> int:
        """Use modules on a device, and load the processor, whose scale the first image needs."""
        self._load_processor()
        return super()._serve(model, device)

    @property
    def _patch(self) -> int:
        """Return the pixels along each side of a patch."""
        return int(self.whole.vision_config.patch_size)

    def _plain_size(self, image: Image) -> tuple[int, int] | None:
        """Return the width and height to which the processor resizes an image, None if it has other steps."""
        self._load_processor()
        found = self._processor
        name = type(found).__name__
        plain = name in (PLAIN, *OTHER_SIZES) and found.do_resize and found.do_rescale and found.do_normalize
        same = (found.patch_size, found.merge_size, found.temporal_patch_size) == (self._patch, self._merge, FRAMES)
        if not plain or not same:
            return None
        resize = getattr(sys.modules[type(found).__module__], "smart_resize", None)
        if resize is None:
            return None
        limits = found.size["shortest_edge"], found.size["longest_edge"]
        height, width = resize(image.height, image.width, self._patch * self._merge, *limits)
        return (width, height) if name == PLAIN or image.size == (width, height) else None

    def _patches(self, values: Tensor, shape: tuple[int, int, int]) -> Tensor:
        """Return patches [patches, values] in the dtype of the tower, of pixels u8 or patches f32 [n]."""
        import torch

        count, side, merge = shape[0] * shape[1] * shape[2], self._patch, self._merge
        if values.numel() != count * side**2 * 3:
            return values.view(count, -1).to(self.dtype)
        self._load_processor()
        scaled = (values.double() * self._processor.rescale_factor).float().view(-1, 3)
        mean, std = (torch.tensor(list(one), device=values.device) for one in self._scale())
        _, rows, columns = shape
        squares = ((scaled - mean) / std).view(rows // merge, merge, side, columns // merge, merge, side, 3)
        patches = squares.permute(0, 3, 1, 4, 6, 2, 5).unsqueeze(5)
        return patches.expand(*patches.shape[:5], FRAMES, side, side).reshape(count, -1).to(self.dtype)

    def _scale(self) -> tuple[Sequence[float], Sequence[float]]:
        """Return the mean and the standard deviation of each colour."""
        return self._processor.image_mean, self._processor.image_std

    def features(self, values: Tensor, shape: tuple[int, int, int]) -> list[Tensor]:
        """Return the features of an image with these pixels or patches."""
        import torch

        grid = torch.tensor([list(shape)]).to(values.device)
        more = {}
        if self.family in LENGTHS and find_spec("transformers.vision_utils") is not None:
            # on the host: attention of each layer reads them, and would wait for the device
            frames = torch.arange(shape[0] + 1, dtype=torch.int32)
            more["cu_seqlens"] = frames * (shape[1] * shape[2])
        found = self.model.get_image_features(self._patches(values, shape), image_grid_thw=grid, **more)
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
