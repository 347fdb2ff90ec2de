"""The placeholders of images in a prompt.

    placeholder of an image ──► before ── token × number of its tokens ── after

Where the ids before and behind an image meet others, two tokens of the text may be one token of the tokenizer
(``ImageFacts.joined``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from minivllm.core.interfaces.images import PlacedImage, PreparedImage
from minivllm.errors import RequestError

if TYPE_CHECKING:
    from minivllm.core.interfaces.encoder import ImageFacts


def check_placeholders(ids: np.ndarray, count: int, facts: ImageFacts) -> None:
    """Raise RequestError if a prompt i32 [n] does not have one placeholder for each of ``count`` images."""
    token = facts.prompt_token
    found = np.count_nonzero(ids == token)
    if found != count:
        raise RequestError(
            f"the prompt has {found} placeholders of images (token id {token}) and {count} images; "
            "expected one placeholder for each image",
            "images",
        )
    if facts.token != token and (ids == facts.token).any():
        raise RequestError(
            f"the prompt has the token id {facts.token}, which stands for a part of an image; expected one placeholder "
            f"(token id {token}) for each image",
            "images",
        )


def place(
    ids: np.ndarray, images: Sequence[PreparedImage], facts: ImageFacts
) -> tuple[np.ndarray, tuple[PlacedImage, ...]]:
    """Replace each placeholder in a prompt i32 [n] by the tokens of its image.

    Return the new prompt and the images with their positions.  RequestError if the prompt does not have one placeholder
    for each image."""
    check_placeholders(ids, len(images), facts)
    written = _Written(facts)
    placed, behind = [], 0
    ends = np.flatnonzero(ids == facts.prompt_token).tolist()
    for image, end in zip(images, ends, strict=True):
        written.add(ids[behind:end].tolist())
        written.add(facts.before)
        placed.append(PlacedImage(image, len(written.ids)))
        written.add([facts.token] * image.tokens)
        written.add(facts.after)
        behind = end + 1
    written.add(ids[behind:].tolist())
    return np.array(written.ids, np.int32), tuple(placed)


class _Written:
    """The tokens of a prompt so far.  Two tokens that meet are joined if the tokenizer writes them as one."""

    def __init__(self, facts: ImageFacts) -> None:
        self.ids: list[int] = []
        self.joined = {(a, b): c for a, b, c in facts.joined}

    def add(self, ids: Iterable[int]) -> None:
        """Append tokens, and join tokens that meet where the tokenizer writes them as one."""
        new = list(ids)
        if self.ids and new:
            whole = self.joined.get((self.ids[-1], new[0]))
            if whole is not None:
                self.ids[-1:] = [whole]
                del new[0]
        self.ids += new
