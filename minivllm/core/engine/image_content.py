"""The content of an image: its number in the prefix index, and the state of its features."""

from __future__ import annotations

from dataclasses import dataclass

ContentKey = tuple[tuple[str, ...], bytes]  # salt of a request, digest of the image


@dataclass(eq=False)
class Content:
    """The content of an image of one owner."""

    number: int
    size: int  # bytes of the features
    key: ContentKey
    requests: int = 0  # requests that have not ended and have the image
    rows: int = 0  # sequences in slots that have not computed the image yet
    encoded: bool = False  # the device has the features, or will have them with the next delta
    ahead: bool = False  # the features were computed ahead of time, and no step has read them
    listed: bool = True  # later requests with this image receive the same number
