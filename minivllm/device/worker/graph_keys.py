"""The shapes of captured steps that contain operations for adapters, for images, or for tap points (named values of the
model that requests read or change)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from minivllm.core.interfaces.attention import GraphKey


@dataclass(frozen=True)
class ImagedKey(GraphKey):
    """The captured shape of a step that computes parts of images."""


@dataclass(frozen=True)
class AdaptedKey(GraphKey):
    """The captured shape of a step in which rows have adapters.  Other captures contain no operations of adapters."""


@dataclass(frozen=True)
class TappedKey(GraphKey):
    """The shape of a captured step in which rows read or change values at tap points.

    ``steered`` are the indices of the tap points at which a vector is added, and ``read`` the indices of the points
    whose values are read.  ``given`` means that requests set the experts of tokens.  ``changed`` are the names of the
    points whose values adapters change.
    """

    steered: tuple[int, ...] = ()
    read: tuple[int, ...] = ()
    adapted: bool = False  # whether rows have adapters
    given: bool = False
    changed: tuple[str, ...] = ()


def holds(capture: GraphKey, key: GraphKey) -> bool:
    """Return whether a capture of shape ``capture`` can run a step of shape ``key``, possibly with padding."""
    if type(capture) is not type(key):
        return False
    if capture.kind != key.kind or capture.shared != key.shared:
        return False
    return capture.rows >= key.rows and capture.tokens >= key.tokens and capture.span >= key.span


def adapted(key: GraphKey) -> bool:
    """Return whether a captured shape contains the operations of adapters."""
    if isinstance(key, TappedKey):
        return key.adapted
    return isinstance(key, AdaptedKey)


def padded_rows(sizes: Sequence[int], rows: int) -> int:
    """Return the smallest of the captured numbers of rows, ``sizes`` in ascending order, that is at least ``rows``."""
    return sizes[bisect_left(sizes, rows)]
