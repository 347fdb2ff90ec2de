"""Prepare the images of a prompt: the checkpoint's processor, and the placeholders of each image."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from minivllm.core.interfaces.executor import ImageWiring
from minivllm.core.interfaces.images import PlacedImage, PreparedImage, digest_of
from minivllm.device.loading.vision import FAMILIES, tokens_of, whole_config
from minivllm.errors import RequestError, describe_error
from minivllm.runtime.text.image_parts import BASE64, URL, ImageSource, has_images, take_images

from .decode import bytes_of_base64, bytes_of_url, decoded, refuse

NO_ENCODER = "the model has no image encoder"  # reason of an engine that reads no images
PROCESSOR = "preprocessor_config.json"  # file of a checkpoint's image processor


class ImageReader:
    """Reads images for one checkpoint.  Its methods may be called from several threads.

    ``why_not`` is the reason if the engine reads none, else ""."""

    def __init__(self, wiring: ImageWiring, folder: str | Path, raw: Any, max_tokens: int, why_not: str = "") -> None:
        """Store the facts of the checkpoint; its processor is loaded with the first image."""
        self.wiring, self.folder, self.why_not, self.max_tokens = wiring, Path(folder), why_not, max_tokens
        self.raw = raw
        self._processor: Any = None
        self._prepared: WeakValueDictionary[bytes, PreparedImage] = WeakValueDictionary()
        self._vision: Any = None
        self._lock = threading.Lock()

    def check(self, count: int) -> None:
        """Raise RequestError if a request with this number of images cannot be read."""
        if self.why_not:
            raise RequestError(f"images: this engine reads text only ({self.why_not})", "images")
        if count > self.wiring.max_images:
            raise RequestError(f"{count} images; expected at most max_images={self.wiring.max_images}", "images")

    def take(self, messages: Any) -> tuple[Any, list[ImageSource]]:
        """Return a conversation with placeholders for its images, and the images.

        RequestError if the engine reads none although the checkpoint has an encoder.  Without an encoder the images
        stay in the conversation, and its check refuses them."""
        if self.why_not == NO_ENCODER or not has_images(messages):
            return messages, []
        taken, found = take_images(messages)
        self.check(len(found))
        return taken, found

    def check_tokens(self, images: Sequence[PreparedImage]) -> None:
        """Raise RequestError if the images of a request, so far, have more tokens than a prompt may have.

        It bounds the memory of images that are prepared one after another."""
        tokens = sum(image.tokens for image in images)
        if tokens >= self.max_tokens:
            most = f"max_model_len={self.max_tokens}"
            raise RequestError(f"the images have {tokens} tokens or more; expected fewer than {most}", "images")

    def prepare(self, source: Any) -> PreparedImage:
        """Return an image after the checkpoint's processor.  RequestError if it is refused."""
        image = decoded(read_source(source) if isinstance(source, ImageSource) else source)
        self._load()
        try:
            found = self._processor(images=[image], return_tensors="np")
            values = np.asarray(found["pixel_values"], np.float32)
            grid = found["image_grid_thw"][0] if FAMILIES[self.wiring.family].grid else values.shape[1:]
        except Exception as exc:  # processors check sizes with errors of many types
            raise refuse(f"the model's processor refuses it: {describe_error(exc)}") from exc
        shape = (int(grid[0]), int(grid[1]), int(grid[2]))
        strategy = str(getattr(self._vision, "strategy", ""))
        tokens = tokens_of(self.wiring.family, self._vision.fields, strategy, shape)
        if not 0 < tokens < self.max_tokens:
            most = f"max_model_len={self.max_tokens}"
            raise refuse(f"it has {tokens} tokens; expected fewer than {most}: send a smaller one")
        flat = np.ascontiguousarray(values).reshape(-1)
        digest = digest_of(flat, shape)
        with self._lock:  # requests with the same image share its values
            return self._prepared.setdefault(digest, PreparedImage(flat, shape, tokens, digest))

    def _load(self) -> None:
        """Load the processor of the checkpoint, once.  No code from the model's directory is run."""
        with self._lock:
            if self._processor is not None:
                return
            from transformers import AutoImageProcessor

            whole = whole_config(self.raw)
            self._vision = _Vision(whole.vision_config.to_dict(), getattr(whole, "vision_feature_select_strategy", ""))
            try:
                with quiet():
                    self._processor = AutoImageProcessor.from_pretrained(
                        self.folder, local_files_only=True, trust_remote_code=False
                    )
            except Exception as exc:  # transformers raises errors of many types
                raise refuse(f"{PROCESSOR} cannot be read: {describe_error(exc)}") from exc


def read_source(source: ImageSource) -> Any:
    """Return the bytes, PIL image or array of an image of a message.  RequestError for text that is not read."""
    if source.kind == URL:
        return bytes_of_url(source.value)
    if source.kind == BASE64:
        return bytes_of_base64(source.value, source.media_type)
    return source.value


class _Vision:
    """The facts of the encoder that decide the number of tokens."""

    def __init__(self, fields: dict[str, Any], strategy: str) -> None:
        self.fields, self.strategy = fields, strategy


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Stop transformers' notes about missing libraries, for which it has a replacement."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def check_placeholders(ids: np.ndarray, count: int, token: int) -> None:
    """Raise RequestError if a prompt i32 [n] does not have one placeholder for each of ``count`` images."""
    found = np.count_nonzero(ids == token)
    if found != count:
        raise RequestError(
            f"the prompt has {found} placeholders of images (token id {token}) and {count} images; "
            "expected one placeholder for each image",
            "images",
        )


def place(ids: np.ndarray, images: Sequence[PreparedImage], token: int) -> tuple[np.ndarray, tuple[PlacedImage, ...]]:
    """Replace each placeholder in a prompt i32 [n] by as many as its image has tokens.

    Return the new prompt and the images with their positions.  RequestError if the prompt does not have one placeholder
    for each image."""
    check_placeholders(ids, len(images), token)
    at = np.flatnonzero(ids == token)
    counts = np.ones(len(ids), np.int64)
    counts[at] = [image.tokens for image in images]
    starts = counts.cumsum() - counts
    placed = tuple(PlacedImage(image, int(starts[i])) for image, i in zip(images, at.tolist(), strict=True))
    return ids.repeat(counts), placed
