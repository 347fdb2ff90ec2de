"""Prepare the images of a prompt: decode them, and call the encoder plug-in for their values."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np

from minivllm.core.interfaces.encoder import EncoderContext, ImageEncoder
from minivllm.core.interfaces.images import PreparedImage, digest_of
from minivllm.errors import PluginError, RequestError, describe_error, shown
from minivllm.registry import build_part
from minivllm.runtime.text.image_parts import BASE64, URL, ImageSource, has_images, take_images

from .decode import bytes_of_base64, bytes_of_url, decoded, pillow, refuse
from .kept import KeptImages, key_of

if TYPE_CHECKING:
    from PIL.Image import Image

    from minivllm.core.interfaces.executor import ImageWiring, Part

NO_ENCODER = "the model has no image encoder"  # reason of an engine that reads no images


class ImageReader:
    """Reads images for one checkpoint.  Its methods may be called from several threads.

    ``why_not`` is the reason if the engine reads none, else "".  ``part`` is the encoder plug-in; without one images
    are refused."""

    def __init__(
        self,
        wiring: ImageWiring,
        part: Part | None,
        folder: str | Path,
        raw: Any,
        max_tokens: int,
        why_not: str = "",
        decode: Callable[[Any], Image] = decoded,
    ) -> None:
        """Store the facts of the checkpoint in ``folder``, whose config.json is ``raw``.  The first image constructs
        the plug-in.  ``decode`` returns the pixels of an image."""
        self.wiring, self.part, self.folder, self.raw = wiring, part, Path(folder), raw
        self.why_not, self.max_tokens, self.decode = why_not, max_tokens, decode
        self._encoder: ImageEncoder | None = None
        self.kept = KeptImages()
        self._prepared: WeakValueDictionary[bytes, PreparedImage] = WeakValueDictionary()
        self._lock = threading.Lock()
        # held while Pillow copies pixels, because it keeps the interpreter's lock: copies of several threads would
        # delay the engine's thread by as many switch intervals of the interpreter
        self._copying = threading.Lock()

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

    def prepare(self, source: Any, salt: str = "") -> PreparedImage:
        """Return an image after the encoder plug-in's ``prepare``.  RequestError if it is refused.

        A file that was read lately with the same ``salt`` is not decoded again."""
        given = read_source(source) if isinstance(source, ImageSource) else source
        if not isinstance(given, (bytes, bytearray, memoryview)):
            return self._prepared_of(self.decode(given))
        file = bytes(given)
        key = key_of(salt, file)
        image = self.kept.get(key)
        if image is None:
            image = self._prepared_of(self.decode(file))
            self.kept.put(key, image)
        return image

    def _prepared_of(self, image: Image) -> PreparedImage:
        """Return a decoded image after ``prepare``, or the equal image that a request has.  RequestError if it has too
        many tokens."""
        with self._copying:
            pixels = np.array(image)  # the program may change its image at any time
        digest = digest_of(pixels, image.size)
        with self._lock:
            prepared = self._prepared.get(digest)
        if prepared is not None:
            return prepared
        values, shape, tokens = values_of(self.encoder(), pixels)
        if not 0 < tokens < self.max_tokens:
            most = f"max_model_len={self.max_tokens}"
            raise refuse(f"the image has {tokens} tokens; expected fewer than {most}: send a smaller one")
        return self.keep(PreparedImage(values, shape, tokens, digest))

    def keep(self, image: PreparedImage) -> PreparedImage:
        """Return the prepared image with the same digest that a request has already, or else the given one."""
        with self._lock:  # requests with the same image share its values
            return self._prepared.setdefault(image.digest, image)

    def encoder(self) -> ImageEncoder:
        """Return the encoder plug-in, which is constructed once."""
        with self._lock:
            if self._encoder is None:
                assert self.part is not None, "an engine without an encoder refuses images before"
                self._encoder = build_part("encoder", self.part, EncoderContext(str(self.folder), self.raw))
            return self._encoder


def values_of(encoder: ImageEncoder, pixels: np.ndarray) -> tuple[np.ndarray, tuple[int, int, int], int]:
    """Return the values f32 or u8 [n] of pixels u8 [height, width, 3], their shape and the number of tokens, from the
    plug-in.

    RequestError if the plug-in refuses the image, and PluginError for results of another form."""
    try:
        found = encoder.prepare_pixels(pixels)
        if found is None:
            found = encoder.prepare(pillow().fromarray(pixels))
    except (RequestError, MemoryError):
        raise
    except Exception as exc:  # processors check sizes with errors of many types
        raise refuse(f"the model's processor refuses it: {describe_error(exc, encoder)}") from exc
    try:
        values, shape, tokens = found
        a, b, c = (int(n) for n in shape)
        whole = np.asarray(values)
        flat = np.ascontiguousarray(whole, whole.dtype if whole.dtype == np.uint8 else np.float32).reshape(-1)
        count = int(tokens)
    except (TypeError, ValueError) as exc:
        raise PluginError(f"prepare() gave {shown(found)}; expected ImageValues(values, shape, tokens)") from exc
    return flat, (a, b, c), count


def read_source(source: ImageSource) -> Any:
    """Return the bytes, PIL image or array of an image of a message.  RequestError for a URL or base64 text that is not
    accepted."""
    if source.kind == URL:
        return bytes_of_url(source.value)
    if source.kind == BASE64:
        return bytes_of_base64(source.value, source.media_type)
    return source.value
