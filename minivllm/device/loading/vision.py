"""The image encoder of a checkpoint: a vision tower and a projector, as modules of transformers.

Only the weights of the encoder are read, and nothing from the model's directory is run.  The text model of the wrapper
is built without layers and dropped.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.errors import ModelError, shown

from . import Fields

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Family:
    """The form of the images of a model type.

    ``grid`` means that the values are patches with a grid (time, rows, columns).  ``mrope`` means that a part of an
    image has a position for each axis of the grid.  ``deepstack`` means that the encoder has further features, which
    are added behind the first layers of the text model."""

    grid: bool = False
    mrope: bool = False
    deepstack: bool = False


FAMILIES: Mapping[str, Family] = {
    "llava": Family(),
    "qwen2_vl": Family(grid=True, mrope=True),
    "qwen2_5_vl": Family(grid=True, mrope=True),
    "qwen3_vl": Family(grid=True, mrope=True, deepstack=True),
    "qwen3_vl_moe": Family(grid=True, mrope=True, deepstack=True),
}
TOWERS = ("clip_vision_model", "siglip_vision_model")  # of LLaVA
TEXT = "language_model"
# spellings of older checkpoints for the names of transformers' modules
SPELLINGS = (("vision_tower.", "vision_tower.vision_model."),)
PREFIXES = ("", "model.")


def tokens_of(family: str, vision: Fields, strategy: str, shape: Sequence[int]) -> int:
    """Return the number of tokens of an image with values of this shape (see ``PreparedImage``)."""
    if FAMILIES[family].grid:
        merge = merge_of(vision)
        return shape[0] * shape[1] * shape[2] // merge**2
    patch = int(vision["patch_size"])
    patches = (shape[1] // patch) * (shape[2] // patch)
    has_class = vision.get("model_type") == TOWERS[0]
    return patches + has_class - (strategy == "default")


def merge_of(vision: Fields) -> int:
    """Return the patches along each side of a square that becomes one token."""
    return int(vision.get("spatial_merge_size", 1))


def whole_config(raw: Fields) -> Any:
    """Return transformers' configuration of a whole checkpoint.  ModelError if it cannot be read."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        return CONFIG_MAPPING[str(raw["model_type"])].from_dict(copy.deepcopy(dict(raw)))
    except Exception as exc:  # transformers checks fields with errors of many types
        raise ModelError(f"config.json: {str(exc).splitlines()[0]}") from exc


class ImageEncoder:
    """The tower and the projector of a checkpoint.  A call returns the features of one image."""

    def __init__(self, model: Any, family: str, dtype: torch.dtype, device: torch.device) -> None:
        self.model, self.family, self.dtype, self.device = model, family, dtype, device
        vision = model.config.vision_config
        levels = list(getattr(vision, "deepstack_visual_indexes", ())) if FAMILIES[family].deepstack else []
        self.levels = 1 + len(levels)  # features of a token: for the embedding, and for the first layers
        self.bytes = sum(p.numel() * p.element_size() for p in model.parameters())

    def __call__(self, values: Tensor, shape: Sequence[int]) -> Tensor:
        """Return features [levels, tokens, hidden] of an image with values f32 [n] of this shape.

        Convolutions of float32 on a GPU use float32 products, as the matrix products do."""
        import torch

        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            return self._features(values, shape)

    def _features(self, values: Tensor, shape: Sequence[int]) -> Tensor:
        import torch

        if FAMILIES[self.family].grid:
            grid = torch.tensor([list(shape)])
            pixels = values.view(shape[0] * shape[1] * shape[2], -1)
            found = self.model.get_image_features(pixels.to(self.dtype), image_grid_thw=grid.to(self.device))
        else:
            pixels = values.view(1, *shape)
            found = self.model.get_image_features(pixels.to(self.dtype))
        features = [found.pooler_output[0]]
        if self.levels > 1:
            features += [_of_first(level) for level in found.deepstack_features]
        return torch.stack(features).to(self.dtype)


def _of_first(level: Tensor | Sequence[Tensor]) -> Tensor:
    """Return the features [tokens, hidden] of the first image.

    Some releases of transformers (5.17) give one tensor for all images, and some a tensor for each (5.24)."""
    first: Tensor = level[0] if isinstance(level, list | tuple) else level  # type: ignore[assignment]
    return first


def load_encoder(folder: Path, raw: Fields, dtype: torch.dtype, device: torch.device) -> ImageEncoder:
    """Return the image encoder of a checkpoint with its weights on the device.  ModelError for missing tensors."""
    import torch
    from transformers import AutoModel

    family = str(raw["model_type"])
    fields = whole_config(raw).to_dict()
    # without layers and with a small vocabulary, because this text model is dropped
    fields["text_config"].update(
        num_hidden_layers=0,
        vocab_size=8,
        layer_types=[],
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    try:
        model = AutoModel.from_config(whole_config(fields), dtype=dtype)
    except Exception as exc:  # modules of transformers raise errors of many types on wrong fields
        raise ModelError(f"{folder}: the image encoder cannot be built: {str(exc).splitlines()[0]}") from exc
    if hasattr(model, TEXT):
        delattr(model, TEXT)
    with torch.no_grad():
        _fill(folder, model.state_dict())
    model.eval().requires_grad_(False).to(device)
    return ImageEncoder(model, family, dtype, device)


def _fill(folder: Path, wanted: dict[str, Tensor]) -> None:
    """Copy the tensors of a checkpoint to those of the encoder.  ModelError if one is missing or has another shape."""
    from .tensor_files import checkpoint_tensors

    names = {spelled: name for name in wanted for spelled in _spelled(name)}
    missing = set(wanted)
    for source, tensor in checkpoint_tensors(folder):
        name = names.get(source)
        if name is None:
            continue
        if tensor.shape != wanted[name].shape or not tensor.is_floating_point():
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise ModelError(f"{folder}: {source} is {found}; expected floats {list(wanted[name].shape)}")
        wanted[name].copy_(tensor)
        missing.discard(name)
    if missing:
        raise ModelError(f"{folder}: the image encoder lacks {len(missing)} tensors, such as {shown(min(missing))}")


def _spelled(name: str) -> Iterator[str]:
    """Yield the names that checkpoints have for a tensor of the encoder."""
    for prefix in PREFIXES:
        yield prefix + name
        for new, old in SPELLINGS:
            if name.startswith(new):
                yield prefix + old + name.removeprefix(new)
