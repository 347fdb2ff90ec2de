"""An image as the engine handles it: its number in the prefix cache, and the state of its features on the device."""

from __future__ import annotations

from dataclasses import dataclass

ContentKey = tuple[tuple[str, ...], bytes]  # (salt of a request, digest of the image)


@dataclass(eq=False)
class Content:
    """The content of an image under one salt.  Requests with the same image and salt share it."""

    number: int
    size: int  # bytes of the image's features on the device
    key: ContentKey
    requests: int = 0  # count of unfinished requests with the image
    rows: int = 0  # count of sequences in slots that have not computed the image's tokens yet
    # whether the device has the features, or computes them with the next step
    encoded: bool = False
    # whether the features were computed ahead of time and no step has read them yet
    ahead: bool = False
    listed: bool = True  # whether later requests with the same image get this content
