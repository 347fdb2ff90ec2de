"""The image encoder of Gemma 3: a tower of SigLIP whose patches are averaged to a fixed number of tokens.

The tokens of an image attend to each other in both directions.  In a prompt ``<start_of_image>`` stands for an image.
It becomes two newlines, the image between its marks, and two newlines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minivllm import files
from minivllm.core.interfaces.encoder import ImageFacts, ImageValues
from minivllm.errors import ModelError

from .tower import PROCESSOR, SIGLIP, TowerEncoder, check_tower

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

TOKENIZER = "tokenizer.json"
LONGEST = 32  # largest number of newlines in a token


class Gemma3Images(TowerEncoder):
    """Encodes an image as ``mm_tokens_per_image`` tokens.  The shape of the pixels is (channels, height, width)."""

    def facts_with(self, token: int) -> ImageFacts:
        """Return the facts of a checkpoint: how an image is written in a prompt; ``token`` is the id of an image token.

        Raise ModelError for a processor that cuts images into pieces, and for a tokenizer without a token of two
        newlines.
        """
        check_tower(self.whole, (SIGLIP,))
        fields = files.read_json(self.folder / PROCESSOR, files.PART, ModelError)
        if fields.get("do_pan_and_scan"):
            raise ModelError(f"{PROCESSOR}: do_pan_and_scan=true is not implemented; set it to false")
        lines = self._newlines()
        if 2 not in lines:
            raise ModelError(f"{TOKENIZER} has no token of two newlines, which the image encoder writes around images")
        joined = {(lines[a], lines[b], lines[a + b]) for a in lines for b in lines if a + b in lines and 2 in (a, b)}
        start, end = int(self.whole.boi_token_index), int(self.whole.eoi_token_index)
        return ImageFacts(
            token,
            placeholder=start,
            before=(lines[2], start),
            after=(end, lines[2]),
            joined=tuple(sorted(joined)),
            span=int(self.whole.mm_tokens_per_image),
        )

    def _newlines(self) -> dict[int, int]:
        """Return the ids of the tokens that consist of newlines, by the number of their newlines."""
        path = self.folder / TOKENIZER
        if not files.is_there(path):
            raise ModelError(f"the checkpoint has no {TOKENIZER}, which the image encoder reads")
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as exc:  # the library may raise its own errors
            raise ModelError(f"{TOKENIZER}: {exc}") from exc
        found = {}
        for count in range(1, LONGEST + 1):
            ids = tokenizer.encode("\n" * count, add_special_tokens=False).ids
            if len(ids) == 1:
                found[count] = int(ids[0])
        return found

    def prepare(self, image: Image) -> ImageValues:
        """Return the pixels of an image."""
        values = np.asarray(self.processed(image)["pixel_values"], np.float32)[0]
        channels, height, width = values.shape
        return ImageValues(values, (channels, height, width), int(self.whole.mm_tokens_per_image))

    def features(self, values: Tensor, shape: tuple[int, int, int]) -> list[Tensor]:
        """Return the features of an image with these pixels."""
        found = self.model.get_image_features(values.view(1, *shape).to(self.dtype))
        return [found.pooler_output[0]]
