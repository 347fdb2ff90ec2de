"""The content of an image: its number in the prefix index, and the state of its features."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class Content:
    """The content of an image of one owner."""

    number: int
    size: int  # bytes of its features
    rows: int = 0  # sequences in slots that have the image
    encoded: bool = False  # the device has its features, or will with the next delta
