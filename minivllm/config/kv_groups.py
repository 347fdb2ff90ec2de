"""Which layers of a model share block tables: a KV group has one table for all of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minivllm.core.interfaces.attention import AttnSpec


def group_layers(specs: Sequence[AttnSpec]) -> tuple[tuple[int, ...], ...]:
    """Layers of equal geometry, groups of full attention before those with a window, otherwise by first layer."""
    found: dict[tuple, list[int]] = {}
    for layer, spec in enumerate(specs):
        found.setdefault(spec.geometry, []).append(layer)
    groups = sorted(found.values(), key=lambda layers: (specs[layers[0]].window is not None, layers[0]))
    return tuple(tuple(layers) for layers in groups)
