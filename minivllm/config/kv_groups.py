"""Which layers of a model share block tables, and which there are: a KV group has one table for all of its layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from minivllm.errors import PluginError, from_file, shown

if TYPE_CHECKING:
    from minivllm.core.interfaces.attention import AttnSpec
    from minivllm.core.interfaces.model import ModelArch


def attention_layers(arch: ModelArch, cfg: Any) -> tuple[AttnSpec, ...]:
    """The attention layers of a model.  PluginError for what is none."""
    from minivllm.core.interfaces.attention import AttnSpec

    given: Any = arch.attention(cfg)
    found = tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(layer, AttnSpec) for layer in found):
        who = f"model {type(arch).__name__}{from_file(arch)}"
        raise PluginError(f"{who}: attention() gave {shown(given)}; want an AttnSpec for each layer")
    return found


def group_layers(specs: Sequence[AttnSpec]) -> tuple[tuple[int, ...], ...]:
    """Layers of equal geometry, groups of full attention before those with a window, otherwise by first layer."""
    found: dict[tuple, list[int]] = {}
    for layer, spec in enumerate(specs):
        found.setdefault(spec.geometry, []).append(layer)
    groups = sorted(found.values(), key=lambda layers: (specs[layers[0]].window is not None, layers[0]))
    return tuple(tuple(layers) for layers in groups)
