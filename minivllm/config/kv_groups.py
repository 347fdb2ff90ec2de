"""The attention layers of a model and their KV groups.  The layers of a group share one block table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from minivllm.errors import PluginError, from_file, shown

if TYPE_CHECKING:
    from minivllm.core.interfaces.attention import AttnSpec
    from minivllm.core.interfaces.model import ModelArch


def attention_layers(arch: ModelArch, cfg: Any) -> tuple[AttnSpec, ...]:
    """Return the ``AttnSpec`` of each attention layer of a model with the configuration ``cfg``.

    ``arch.attention(cfg)`` may return any iterable of them, or a single one.  PluginError if it returns anything that
    is not an ``AttnSpec``."""
    from minivllm.core.interfaces.attention import AttnSpec

    value: Any = arch.attention(cfg)
    found = tuple(value) if isinstance(value, Iterable) else (value,)
    if not all(isinstance(layer, AttnSpec) for layer in found):
        label = f"model {type(arch).__name__}{from_file(arch)}"
        raise PluginError(f"{label}: attention() gave {shown(value)}; expected an AttnSpec for each layer")
    return found


def group_layers(specs: Sequence[AttnSpec]) -> tuple[tuple[int, ...], ...]:
    """Return the indices of the layers in each KV group.  Layers of equal geometry form a group.

    Groups of full attention precede groups with a window; otherwise groups have the order of their first layers.
    """
    groups: dict[tuple, list[int]] = {}
    for layer, spec in enumerate(specs):
        groups.setdefault(spec.geometry, []).append(layer)
    # The groups are in the order of their first layers already, and sorting is stable.
    ordered = sorted(groups.values(), key=lambda layers: specs[layers[0]].window is not None)
    return tuple(map(tuple, ordered))
