"""The encoder seam (plug-in interface): the vision tower and projector that turn images into inputs of the text model.

    front end   facts() ── prepare(picture) ──► values, shape, tokens ──► placeholders in the prompt
    worker      load(device, dtype) ── encode(values, shape) ──► features in place of the placeholders' embeddings
                                    ── encode_parts(values, shape) ──► the same, computed between several steps

The front end and each worker construct instances of their own.  The engine keeps the features under a hash of the
values, frees them, and computes them again, so a plug-in stores nothing about an image.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from minivllm.errors import ModelError

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image
    from torch import Tensor

# added in 1.1: ImageEncoder.load_dummy; in 1.2: u8 values, prepare_pixels; in 1.3: EncoderContext.repeatable; in 1.4:
# encode_parts
API = (1, 4)


@dataclass(frozen=True)
class EncoderContext:
    """The arguments with which the engine constructs an encoder."""

    folder: str  # directory of the checkpoint
    config: Mapping[str, Any]  # contents of its config.json, with the changes of hf_overrides
    # whether equal images must have features with equal bits, whatever was encoded before (batch_invariant)
    repeatable: bool = False


@dataclass(frozen=True)
class ImageFacts:
    """How a checkpoint represents images in token ids and features."""

    token: int = -1  # id of the token that stands for a part of an image in the model's input
    placeholder: int = -1  # id that stands for a whole image in a prompt; -1 means ``token``
    before: tuple[int, ...] = ()  # ids that the engine writes before the tokens of an image
    after: tuple[int, ...] = ()  # ids that the engine writes after the tokens of an image
    # (a, b, c): where a and b meet at either end of these ids, the tokenizer writes the one token c
    joined: tuple[tuple[int, int, int], ...] = ()
    # Vectors of features for each token of an image: one in place of its embedding, and one for
    # each of the first layers that read features.
    levels: int = 1
    merge: int = 1  # side length, in patches, of the square that becomes one token
    # Number of rotary frequencies that follow the time, row and column of a part of an image (m-rope).  Empty means
    # that each token has one position, as text.
    sections: tuple[int, ...] = ()
    # True: frequencies for time, row and column alternate instead of following each other in
    # sections
    interleaved: bool = False
    # Largest number of tokens of an image, if all tokens of an image attend to each other; 0 means causal attention.
    span: int = 0

    @property
    def prompt_token(self) -> int:
        """Return the id that stands for a whole image in a prompt."""
        return self.token if self.placeholder < 0 else self.placeholder


class ImageValues(NamedTuple):
    """The pixels or patches of an image after ``ImageEncoder.prepare``, and its number of tokens."""

    # f32 or u8, any shape.  ``encode`` receives the same dtype; u8 takes a quarter of the time to the device.
    values: np.ndarray
    # three numbers that ``encode`` receives; with ``sections`` the grid of patches (time, rows, columns)
    shape: tuple[int, int, int]
    tokens: int  # number of placeholders


class ImageEncoder(ABC):
    """Turns images into features for the text model.

    Contract.  The constructor is cheap: it loads neither weights nor torch.  ``facts`` and ``prepare`` are called in
    processes without weights, ``prepare`` by several threads at once.  ``load`` is called once in each worker, before
    ``encode``.  The start of a worker on a GPU prepares and encodes blank images, to measure their memory.  Results
    depend only on the arguments: the values of an image on its pixels alone, and features up to rounding errors, or
    with ``EncoderContext.repeatable`` bit for bit.  No result is changed or used again by a later call."""

    def __init__(self, options: Any, ctx: EncoderContext) -> None:
        self.options, self.ctx = options, ctx

    @abstractmethod
    def facts(self) -> ImageFacts:
        """Return the facts of the checkpoint's images.  ModelError if the encoder cannot serve the checkpoint."""

    @abstractmethod
    def prepare(self, image: Image) -> ImageValues:
        """Return the values of an upright PIL image in RGB.

        An exception refuses the image, and its message is shown to the client."""

    def prepare_pixels(self, pixels: np.ndarray) -> ImageValues | None:
        """Return the values of pixels u8 [height, width, 3], as ``prepare`` returns them for their image.

        The pixels themselves may be the values.  None means that ``prepare`` must be called; images of a size that the
        encoder need not change are prepared in less time by this method."""
        return None

    @abstractmethod
    def load(self, device: str, dtype: str) -> int:
        """Load the weights of the encoder in ``dtype`` on a device, and return their size in bytes.

        ModelError for weights that are missing or have another shape."""

    def load_dummy(self, device: str, dtype: str, seed: int) -> int:
        """Draw random weights in place of ``load`` (``load_format=dummy``), and return their size in bytes.

        They depend on ``seed``, and no file with weights is read.  An encoder without this method reads no images
        there: ModelError."""
        raise ModelError(
            "the image encoder has no dummy weights; expected load_format=auto or safetensors"
        )

    @abstractmethod
    def encode(self, values: Tensor, shape: tuple[int, int, int]) -> Tensor:
        """Return the features [levels, tokens, hidden] of an image, in the dtype of ``load``, on its device.

        ``values`` f32 or u8 [n] are those of ``prepare``, flat, on the device, and ``shape`` is its shape.  An
        exception ends the requests that read the image."""

    def encode_parts(self, values: Tensor, shape: tuple[int, int, int]) -> Iterator[float | Tensor]:
        """Yield the share of the work that is done, ascending in [0, 1), after each part of it, and at last the
        features as ``encode`` returns them.

        The engine computes the features of a large image in this way while other requests decode: between two values
        it runs steps, and may encode other images.  It may end the iterator early.  A part should take a few
        milliseconds at most.  By default the whole work is one part."""
        yield self.encode(values, shape)
