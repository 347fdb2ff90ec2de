"""The image encoder of Mistral 3 and Ministral 3: a tower of Pixtral, and a projector that merges squares of patches.

In a prompt ``[IMG]`` stands for an image.  It becomes a token for each merged patch, a ``[IMG_BREAK]`` behind each row
of them, and ``[IMG_END]`` in place of the last break.  The tokens of an image are in a row, so the features have the
embedding of ``[IMG_BREAK]`` at the end of each row but the last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minivllm import files
from minivllm.core.interfaces.encoder import ImageFacts, ImageValues
from minivllm.errors import ModelError, shown

from .tower import DUMMY_STD, TowerEncoder, check_tower

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

TEXT_MODELS = ("mistral", "ministral3")
TOKENIZER = "tokenizer.json"
BREAK, END = "[IMG_BREAK]", "[IMG_END]"
EMBEDDINGS = (
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "language_model.embed_tokens.weight",
)


class Pixtral(TowerEncoder):
    """Encodes an image as rows of merged patches.  The shape of the pixels is (channels, height, width)."""

    def facts_with(self, token: int) -> ImageFacts:
        """Return how a checkpoint with Pixtral's tower writes images in token ids, with the placeholder ``token``.

        Raise ModelError if the tokenizer lacks the tokens that end a row or an image, or the text model is not Mistral.
        """
        check_tower(self.whole, ("pixtral",))
        kind = self.whole.text_config.model_type
        if kind not in TEXT_MODELS:
            raise ModelError(f"text_config.model_type={shown(kind)}: expected {' or '.join(TEXT_MODELS)}")
        self._id(BREAK)
        return ImageFacts(token, after=(self._id(END),))

    @property
    def side(self) -> int:
        """Return the pixels along each side of a merged patch."""
        return int(self.whole.vision_config.patch_size * self.whole.spatial_merge_size)

    def _id(self, word: str) -> int:
        """Return the id of a special token.  ModelError if the tokenizer has none."""
        path = self.folder / TOKENIZER
        if not files.is_there(path):
            raise ModelError(f"the checkpoint has no {TOKENIZER}, which the image encoder reads")
        from tokenizers import Tokenizer

        try:
            found = Tokenizer.from_file(str(path)).token_to_id(word)
        except Exception as exc:  # the library may raise its own errors
            raise ModelError(f"{TOKENIZER}: {exc}") from exc
        if found is None:
            raise ModelError(f"{TOKENIZER} has no token {word}, which the image encoder writes into images")
        return int(found)

    def prepare(self, image: Image) -> ImageValues:
        """Return the pixels of an image whose sides are multiples of a merged patch."""
        patch = {"height": self.side, "width": self.side}
        values = np.asarray(self.processed(image, patch_size=patch)["pixel_values"], np.float32)[0]
        channels, height, width = values.shape
        tokens = (height // self.side) * (width // self.side + 1) - 1
        return ImageValues(values, (channels, height, width), tokens)

    def load(self, device: str, dtype: str) -> int:
        """Build the modules with the weights of the checkpoint, and read the embedding of ``[IMG_BREAK]``."""
        from minivllm.device.loading.tensor_files import checkpoint_tensors

        size = super().load(device, dtype)
        index = self._id(BREAK)
        for name, tensor in checkpoint_tensors(self.folder):
            if name in EMBEDDINGS:
                if index >= len(tensor):
                    raise ModelError(f"{self.folder}: {name} has {len(tensor)} rows; expected one for {BREAK}={index}")
                return size + self._end_rows_with(tensor[index].clone(), device)
        raise ModelError(f"{self.folder}: the checkpoint lacks the embedding of {BREAK}, such as {EMBEDDINGS[0]}")

    def load_dummy(self, device: str, dtype: str, seed: int) -> int:
        """Build the modules with random weights, and draw the embedding of ``[IMG_BREAK]``."""
        import torch

        size = super().load_dummy(device, dtype, seed)
        generator = torch.Generator().manual_seed(seed)
        row = torch.randn(self.whole.text_config.hidden_size, generator=generator) * DUMMY_STD
        return size + self._end_rows_with(row, device)

    def _end_rows_with(self, row: Tensor, device: str) -> int:
        """Use the vector ``row`` [hidden] as the feature behind each row of patches, and return its size in bytes."""
        self.row = row.to(device, self.dtype)
        return self.row.numel() * self.row.element_size()

    def features(self, values: Tensor, shape: tuple[int, int, int]) -> list[Tensor]:
        """Return the features of an image with these pixels, with the embeddings of its breaks."""
        import torch

        sizes = [shape[1:]]
        found = self.model.get_image_features(values.view(1, *shape).to(self.dtype), image_sizes=sizes)
        rows = found.pooler_output[0].unflatten(0, (shape[1] // self.side, shape[2] // self.side))
        ends = self.row.expand(len(rows), 1, -1)
        return [torch.cat([rows, ends], dim=1).flatten(0, 1)[:-1]]
