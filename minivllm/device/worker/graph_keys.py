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
    """The captured shape of a step with taps: values are read or changed at tap points (named places in the model).

    ``steered`` are the numbers of the tap points at which a vector is added.  ``read`` are the numbers of the tap
    points whose values are read.  ``given`` means that requests set the experts of some tokens, in place of the
    router.  ``changed`` are the names of the tap points whose values adapters change.
    """

    steered: tuple[int, ...] = ()
    read: tuple[int, ...] = ()
    adapted: bool = False  # rows have adapters
    given: bool = False
    changed: tuple[str, ...] = ()


def adapted(key: GraphKey) -> bool:
    """Return whether a captured shape contains the operations of adapters."""
    return key.adapted if isinstance(key, TappedKey) else isinstance(key, AdaptedKey)
