"""The content of an image: its number in the prefix index, and the state of its features."""

from __future__ import annotations

from dataclasses import dataclass

ContentKey = tuple[tuple[str, ...], bytes]  # salt of a request, digest of the image


@dataclass(eq=False)
class Content:
    """The content of an image of one owner."""

    number: int
    size: int  # bytes of its features
    key: ContentKey
    requests: int = 0  # requests that have not ended and have the image
    rows: int = 0  # sequences in slots that have not computed the image yet
    encoded: bool = False  # the device has its features, or will with the next delta
    ahead: bool = False  # they were computed ahead, and no step has read them
    listed: bool = True  # later requests with the image get its number
