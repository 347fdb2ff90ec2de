"""The shapes of captured steps with further operations: of adapters, of images, or of taps."""

from __future__ import annotations

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
    """The captured shape of a step with taps.

    ``steered`` are the numbers of the points at which a vector is added, ``read`` those of the points whose values are
    read.  ``given`` means that rows have given experts, and ``changed`` are the names of the points that adapters
    change.
    """

    steered: tuple[int, ...] = ()
    read: tuple[int, ...] = ()
    adapted: bool = False  # rows have adapters
    given: bool = False
    changed: tuple[str, ...] = ()


def holds(capture: GraphKey, key: GraphKey) -> bool:
    """Return whether a capture of shape ``capture`` can run a step of shape ``key``, possibly with padding."""
    if type(capture) is not type(key) or capture.kind != key.kind or capture.shared != key.shared:
        return False
    return capture.rows >= key.rows and capture.tokens >= key.tokens and capture.span >= key.span


def adapted(key: GraphKey) -> bool:
    """Return whether a captured shape contains the operations of adapters."""
    return key.adapted if isinstance(key, TappedKey) else isinstance(key, AdaptedKey)
