"""The image encoders of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5, which read patches of images of any resolution.

Each token has a position for each axis of the grid of patches (m-rope).  Qwen3-VL has further features, which are added
behind the first layers of the text model (deepstack).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.core.interfaces.encoder import ImageFacts, ImageValues
from minivllm.errors import ModelError, shown

from .tower import TowerEncoder

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from minivllm.device.layers.patch_tower import PatchTower

# image processors with the same steps (resize, scale, normalize, cut into patches): one uses Pillow, the other
# torchvision, whose resized pixels differ
PLAIN, OTHER_SIZES = "Qwen2VLImageProcessorPil", ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast")
FRAMES = 2  # a patch of an image has its pixels twice, as two frames of a video
# model types in which each section of the rotary embedding is a block of frequencies; in other types the sections
# alternate
BLOCKS = ("qwen2_vl", "qwen2_5_vl")


class QwenVL(TowerEncoder):
    """Encodes an image as one token for each square of patches.  The shape of an image is its grid of patches (time,
    rows, columns).
    """

    # the scaled and normalized values of 0 to 255 for each colour [3 * 256], in the dtype of the tower, after ``load``
    scaled: Tensor
    colours: Tensor  # i64 [3] where the values of each colour begin in ``scaled``

    def facts_with(self, token: int) -> ImageFacts:
        """Return the facts of a checkpoint: how an image is written in a prompt; ``token`` is the id of an image token.

        Raise ModelError if the rotary sections of time, height and width do not sum to half the rotary dimensions.
        """
        text = self.whole.get_text_config()
        rope = text.rope_parameters or {}
        sections = tuple(rope.get("mrope_section") or ())
        _check_sections(sections, text, rope)
        interleaved = self.family not in BLOCKS
        levels = 1 + len(self._deepstack)
        return ImageFacts(token, levels=levels, merge=self._merge, sections=sections, interleaved=interleaved)

    @property
    def _merge(self) -> int:
        """Return the number of patches along each side of a square that becomes one token."""
        return int(self.whole.vision_config.spatial_merge_size)

    @property
    def _deepstack(self) -> Sequence[int]:
        """Return the layers of the vision tower whose features are added after the first layers of the text model."""
        return list(getattr(self.whole.vision_config, "deepstack_visual_indexes", None) or ())

    def prepare(self, image: Image) -> ImageValues:
        """Return the resized pixels [height, width, 3] of an image, or its patches, and their grid.

        Pixels u8 have an eighth of the bytes of patches f32, which contain each pixel twice; ``features`` makes the
        patches on the device.  If the processor has other steps than ``_plain``, the patches are made here.
        """
        size = self._plain_size(*image.size)
        if size is not None:
            resized = image.resize(size, self._processor.resample)
            pixels = np.array(resized)
            return self._of_pixels(pixels)
        found = self.processed(image)
        frames, rows, columns = (int(n) for n in found["image_grid_thw"][0])
        tokens = frames * rows * columns // self._merge**2
        return ImageValues(np.asarray(found["pixel_values"], np.float32), (frames, rows, columns), tokens)

    def prepare_pixels(self, pixels: np.ndarray) -> ImageValues | None:
        """Return pixels of a size that the processor does not change, and their grid; None for other sizes."""
        height, width, _ = pixels.shape
        size = self._plain_size(width, height)
        if size != (width, height):
            return None
        return self._of_pixels(pixels)

    def _of_pixels(self, pixels: np.ndarray) -> ImageValues:
        """Return the values of an image from its resized pixels u8: the pixels and their grid of patches."""
        height, width, _ = pixels.shape
        rows = height // self._patch
        columns = width // self._patch
        tokens = rows * columns // self._merge**2
        grid = (1, rows, columns)
        return ImageValues(pixels, grid, tokens)

    def _serve(self, model: Any, device: str) -> int:
        """Move the modules to a device, and compute the values that the processor gives to the pixels of each colour.
        Return the bytes of the weights.
        """
        import torch

        size = super()._serve(model, device)
        self._load_processor()
        found = self._processor
        if found.do_rescale and found.do_normalize:  # else ``prepare`` returns patches
            mean, std = (torch.tensor(list(one)) for one in (found.image_mean, found.image_std))
            pixels = torch.arange(256).double() * found.rescale_factor
            by_colour = (pixels.float()[:, None] - mean) / std
            self.scaled = by_colour.T.flatten().to(device, self.dtype)
            self.colours = 256 * torch.arange(3, device=device)
        return size

    @property
    def _patch(self) -> int:
        """Return the length in pixels of the sides of a patch."""
        return int(self.whole.vision_config.patch_size)

    def _plain_size(self, width: int, height: int) -> tuple[int, int] | None:
        """Return the width and height to which the processor resizes an image, or None if the processor has other
        steps."""
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
        rows, columns = resize(height, width, self._patch * self._merge, *limits)
        return (columns, rows) if name == PLAIN or (width, height) == (columns, rows) else None

    def _patches(self, values: Tensor, shape: tuple[int, int, int]) -> Tensor:
        """Return patches [patches, values] in the dtype of the tower, of pixels u8 or patches f32 [n]."""
        count, side, merge = shape[0] * shape[1] * shape[2], self._patch, self._merge
        if values.numel() != count * side**2 * 3:
            return values.view(count, -1).to(self.dtype)
        _, rows, columns = shape
        squares = values.view(rows // merge, merge, side, columns // merge, merge, side, 3)
        places = squares.permute(0, 3, 1, 4, 6, 2, 5) + self.colours[:, None, None]
        patches = self.scaled[places].unsqueeze(5)
        return patches.expand(*patches.shape[:5], FRAMES, side, side).reshape(count, -1)

    def features(self, values: Tensor, shape: tuple[int, int, int]) -> list[Tensor]:
        """Return the features of an image with these pixels or patches."""
        import torch

        grid = torch.tensor([list(shape)]).to(values.device)
        found = self.model.get_image_features(self._patches(values, shape), image_grid_thw=grid)
        return [found.pooler_output[0]]


class Qwen3VL(QwenVL):
    """Encodes an image by ``PatchTower``, whose kernels can be captured in a CUDA graph."""

    tower: PatchTower

    def _serve(self, model: Any, device: str) -> int:
        """Move the modules to a device, and build the ``PatchTower``.  Return the bytes of the weights."""
        from minivllm.device.layers.patch_tower import PatchTower

        size = super()._serve(model, device)
        self.tower = PatchTower(self.model.visual, self._deepstack, self.ctx.repeatable)
        return size

    def features(self, values: Tensor, shape: tuple[int, int, int]) -> list[Tensor]:
        """Return the features of an image with these pixels or patches: for its tokens' embeddings, and for each of the
        first layers that also receive features.
        """
        return self.tower(self._patches(values, shape), shape)

    def encode_parts(self, values: Tensor, shape: tuple[int, int, int]) -> Iterator[float | Tensor]:
        """Yield the share of the tower's layers that are computed, after each of them, and at last the features."""
        import torch

        for found in self.tower.parts(self._patches(values, shape), shape):
            yield found if isinstance(found, float) else torch.stack(found).to(self.dtype)


def _check_sections(sections: tuple[Any, ...], text: Any, rope: Mapping[str, Any]) -> None:
    """Raise ModelError unless the rotary sections of time, height and width sum to half the rotary dimensions."""
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    share = rope.get("partial_rotary_factor", getattr(text, "partial_rotary_factor", None)) or 1.0
    half = int(head * share) // 2
    numbers = all(type(part) is int and part >= 0 for part in sections)
    if len(sections) != 3 or not numbers or sum(sections) != half:
        raise ModelError(f"mrope_section={shown(sections)}: expected three numbers with the sum {half}")
