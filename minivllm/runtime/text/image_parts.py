"""Images in the messages of a chat: they are taken out, and a part without data stands for each of them.

The part is ``PLACEHOLDER``.  A chat template prints the model's placeholder for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from minivllm.errors import RequestError, shown

PLACEHOLDER = {"type": "image", "placeholder": True}
URL, BASE64, OBJECT = "url", "base64", "object"
TYPES = ("image_url", "input_image", "image")


class ImageSource(NamedTuple):
    """An image of a message, which is not decoded yet.

    ``kind`` is URL (a data URL), BASE64 (text, with ``media_type`` or None) or OBJECT (a PIL image, array or bytes)."""

    kind: str
    value: Any
    media_type: Any = None


def is_placeholder(part: Mapping[str, Any]) -> bool:
    """Return whether a part of content stands for an image."""
    return part == PLACEHOLDER


def has_images(messages: Any) -> bool:
    """Return whether a message has a part with an image."""
    return any(_is_image(part) for message in _listed(messages) for part in _parts(message))


def take_images(messages: Any) -> tuple[Any, list[ImageSource]]:
    """Return a conversation with placeholders for its images, and the images in their order.

    RequestError for a part that has no image, or a form that is not read."""
    if not has_images(messages):
        return messages, []
    found: list[ImageSource] = []
    taken = []
    for i, message in enumerate(messages):
        parts = _parts(message)
        if not any(_is_image(part) for part in parts):
            taken.append(message)
            continue
        content = []
        for k, part in enumerate(parts):
            if _is_image(part):
                found.append(_source(part, f"messages[{i}].content[{k}]"))
                content.append(dict(PLACEHOLDER))
            else:
                content.append(part)
        taken.append({**message, "content": content})
    return taken, found


def _listed(value: Any) -> Sequence[Any]:
    """Return a list or tuple, and an empty list for anything else."""
    return value if isinstance(value, (list, tuple)) else []


def _parts(message: Any) -> Sequence[Any]:
    """Return the parts of a message's content, none if it is text."""
    return _listed(message.get("content")) if isinstance(message, Mapping) else []


def _is_image(part: Any) -> bool:
    """Return whether a part of content is an image."""
    return isinstance(part, Mapping) and part.get("type") in TYPES


def _source(part: Mapping[str, Any], at: str) -> ImageSource:
    """Return the image of a part.  ``at`` is the place of the part for errors."""
    value = part.get("image_url")
    if isinstance(value, Mapping):
        if value.get("detail") not in (None, "auto"):
            raise _wrong(f"{at}.image_url.detail", f"={shown(value['detail'])}: expected auto")
        value = value.get("url")
    if part.get("detail") not in (None, "auto"):
        raise _wrong(f"{at}.detail", f"={shown(part['detail'])}: expected auto")
    if value is not None:
        return ImageSource(URL, value)
    source = part.get("source")
    if isinstance(source, Mapping):
        if source.get("type") != "base64":
            raise _wrong(f"{at}.source.type", f"={shown(source.get('type'))}: expected base64")
        return ImageSource(BASE64, source.get("data"), source.get("media_type"))
    value = part.get("image")
    if isinstance(value, str):
        return ImageSource(URL, value)
    if value is None:
        raise _wrong(at, ": the image is missing; expected image_url with a data URL")
    return ImageSource(OBJECT, value)


def _wrong(place: str, text: str) -> RequestError:
    """Return the error about a place of the conversation."""
    return RequestError(f"{place}{text}", place)
