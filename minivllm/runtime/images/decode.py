"""Decode images of clients.  Each limit is checked before the pixels are decoded.

An image is a PIL image, an array, or the bytes of a file.  Paths and URLs are never opened.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.errors import RequestError, shown

if TYPE_CHECKING:
    from PIL.Image import Image

INSTALL = 'pip install "minivllm[images]"'
FORMATS = {"png": "PNG", "jpeg": "JPEG", "jpg": "JPEG", "webp": "WEBP", "gif": "GIF", "bmp": "BMP"}
OPENS = {*FORMATS.values(), "MPO"}  # PIL's names of the accepted file formats; PIL calls a JPEG with a preview MPO
MEDIA_TYPES = "image/png, image/jpeg, image/webp, image/gif or image/bmp"
MAX_BYTES = 20 << 20  # largest size of a file in bytes
MAX_PIXELS = 1 << 24
MAX_RATIO = 200  # largest ratio of the longer side of an image to the shorter one
OPENED = threading.Lock()  # held while an opened file of a client is decoded, because PIL's files are not thread-safe
ORIENTATION, TURNED = 0x0112, range(2, 9)  # the field of EXIF data, and its values for pictures that are not upright
DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?((?:;[\w.+-]+=[^;,]*)*)(;base64)?,", re.IGNORECASE)


def refuse(text: str) -> RequestError:
    """Return a RequestError about an image, with ``text`` after the prefix "image: "."""
    return RequestError(f"image: {text}", "images")


def pillow() -> Any:
    """Return the module ``PIL.Image``.  RequestError if Pillow is missing."""
    try:
        from PIL import Image
    except ImportError:
        raise refuse(f"reading images needs Pillow ({INSTALL})") from None
    return Image


def bytes_of_url(url: Any) -> bytes:
    """Return the bytes in a data URL.  RequestError for other URLs, paths, and media types that are not read."""
    if not isinstance(url, str):
        raise refuse(f"url={shown(url)}: expected a data URL, as in data:image/png;base64,...")
    head = DATA_URL.match(url[:256])
    if head is None:
        problem = "remote and local files are not opened" if ":" in url[:16] or "/" in url[:16] else "it is no data URL"
        raise refuse(f"url={shown(url[:64])}: {problem}; expected data:image/png;base64,...")
    if head.group(3) is None:
        raise refuse("the data URL has no ;base64; expected data:image/png;base64,...")
    return bytes_of_base64(url[head.end() :], head.group(1) or "")


def bytes_of_base64(text: Any, media_type: Any = None) -> bytes:
    """Return the bytes in base64 text.  ``media_type`` None means that the client has named none.  RequestError for
    other media types, malformed text and too large files."""
    if media_type is not None:
        kind = str(media_type).lower().removeprefix("image/") if isinstance(media_type, str) else ""
        if kind not in FORMATS or not str(media_type).lower().startswith("image/"):
            raise refuse(f"media type {shown(media_type)}: expected {MEDIA_TYPES}")
    if not isinstance(text, str):
        raise refuse(f"data={shown(text)}: expected base64 text")
    if len(text) * 3 // 4 > MAX_BYTES + 3:
        raise refuse(f"the file has more than {MAX_BYTES >> 20} MiB; send a smaller one")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise refuse("the base64 text is malformed; encode the file again") from None


def decoded(source: Any) -> Image:
    """Return a PIL image in RGB of a PIL image, an array or the bytes of a file.  RequestError if it is refused."""
    module = pillow()
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _of_file(module, bytes(source))
    if isinstance(source, module.Image):
        return _of_image(module, source)
    if isinstance(source, np.ndarray):
        return _rgb(module.fromarray(_checked_array(source)))
    if isinstance(source, str):
        raise refuse(f"{shown(source[:64])}: paths and URLs are not opened; open the file, and give its bytes")
    raise refuse(f"a {type(source).__name__}; expected a PIL image, an array or the bytes of a file")


def _checked_array(array: np.ndarray) -> np.ndarray:
    """Return an array of pixels.  RequestError for one that is not u8 [height, width] or [height, width, 3 or 4]."""
    channels = array.shape[2:] in ((), (3,), (4,))
    if array.ndim not in (2, 3) or not channels or array.dtype != np.uint8:
        found = f"{array.dtype} {list(array.shape)}"
        raise refuse(f"an array {found}; expected uint8 [height, width], or [height, width, 3 or 4]")
    _check_size(array.shape[1], array.shape[0])
    return np.ascontiguousarray(array)


def _check_size(width: int, height: int) -> None:
    """Raise RequestError for an image without pixels, or with too many, or that is too narrow."""
    if width < 1 or height < 1:
        raise refuse(f"{width} x {height} pixels; expected at least one")
    if width * height > MAX_PIXELS:
        raise refuse(f"{width} x {height} pixels; expected at most {MAX_PIXELS} in all: send a smaller one")
    if max(width, height) > MAX_RATIO * min(width, height):
        raise refuse(f"{width} x {height} pixels; expected sides of a ratio below {MAX_RATIO}")


def check_bytes(data: bytes) -> None:
    """Raise RequestError for a file that is too large."""
    if len(data) > MAX_BYTES:
        raise refuse(f"the file has {len(data)} bytes; expected at most {MAX_BYTES}")


def file_of(source: Any) -> bytes | None:
    """Return the bytes of the file that a source is, or that a PIL image has not read yet.

    None for pixels, for a file of another format or that cannot be read again, and for a PIL image whose file is larger
    than ``MAX_BYTES``: its pixels are allowed, and the caller has opened it."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        return bytes(source)
    file = getattr(source, "fp", None)
    unread = getattr(source, "tile", None) and file is not None and isinstance(source, pillow().Image)
    if not unread or source.format not in OPENS or source.tell():
        return None
    _check_size(*source.size)
    with OPENED:
        try:
            return _all_of(file)
        except (OSError, ValueError, AttributeError):
            return None


def _all_of(file: Any) -> bytes | None:
    """Return the bytes of an opened file, and leave its position as it was.

    None if it is no file of bytes, or has more than ``MAX_BYTES``."""
    at = file.tell()
    try:
        file.seek(0)
        found = file.read(MAX_BYTES + 1)
    finally:
        file.seek(at)
    return found if isinstance(found, bytes) and len(found) <= MAX_BYTES else None


def head_of(data: bytes) -> list[Any]:
    """Return the mode, width and height of the image in the bytes of a file, empty if there is none."""
    try:
        image = _opened(pillow(), data)
        return [image.mode, *image.size]
    except Exception:  # ``decoded`` describes the fault
        return []


def _of_file(module: Any, data: bytes) -> Image:
    """Return the image in the bytes of a file.  RequestError if they are no picture of a supported format, if it has
    too many pixels, or if it is an animation."""
    check_bytes(data)
    try:
        image = _opened(module, data)
        _check_size(*image.size)
        _check_frames(image)
        return _upright(image)
    except (RequestError, MemoryError):
        raise
    except (module.DecompressionBombError, module.DecompressionBombWarning):
        raise refuse(f"the image has more than {MAX_PIXELS} pixels; send a smaller one") from None
    except Exception as exc:  # decoders raise errors of many types on broken files
        why = "" if isinstance(exc, module.UnidentifiedImageError) else _first_line(exc)
        raise refuse(
            f"the bytes of the file are no picture that can be read{why}; expected PNG, JPEG, WebP, GIF or BMP"
        ) from None


def _opened(module: Any, data: bytes) -> Image:
    """Return the PIL image of a file, whose pixels are not decoded."""
    image: Image = module.open(io.BytesIO(data), formats=sorted(set(FORMATS.values())))
    return image


def _of_image(module: Any, image: Image) -> Image:
    """Return a PIL image in RGB.  Several threads may pass one image, whose file may not be read yet.  RequestError if
    it cannot be read."""
    _check_size(*image.size)
    try:
        with OPENED:
            _check_frames(image)
            return _upright(image)
    except (RequestError, MemoryError):
        raise
    except Exception as exc:  # the file behind the image is broken
        raise refuse(f"the PIL image cannot be read{_first_line(exc)}") from None


def _check_frames(image: Image) -> None:
    """Raise RequestError for an animation.  A photo may have a preview behind it, which makes its format MPO."""
    if getattr(image, "is_animated", False) and image.format != "MPO":
        raise refuse("an animation; expected a single picture, as copy() of a PIL image gives it")


def _first_line(exc: Exception) -> str:
    """Return the first line of an error's message in brackets, "" for none."""
    line = str(exc).partition("\n")[0]
    return f" ({line[:200]})" if line else ""


def _upright(image: Image) -> Image:
    """Decode an image, turn it upright by its EXIF data, and return it in RGB."""
    from PIL import ImageOps

    image.load()
    turned = image.getexif().get(ORIENTATION, 1) in TURNED
    # exif_transpose also copies images that are upright
    return _rgb(ImageOps.exif_transpose(image) if turned else image)


def _rgb(image: Image) -> Image:
    """Return an image in RGB.  Transparent pixels become white, and 16 bits of gray become 8.  RequestError for 32-bit
    pixels."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I;16"):
        high_bytes = np.asarray(image).astype(np.uint16) >> 8
        return pillow().fromarray(high_bytes.astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise refuse(f"pixels of the PIL mode {image.mode}; expected 8 bits a channel, or 16 bits of gray")
    if image.has_transparency_data:
        with_alpha = image.convert("RGBA")
        white = pillow().new("RGBA", image.size, "white")
        return pillow().alpha_composite(white, with_alpha).convert("RGB")
    return image.convert("RGB")
