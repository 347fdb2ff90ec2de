"""The result of choosing all plug-ins of a configuration, with the reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .explanation import Explanation

if TYPE_CHECKING:
    from minivllm.core.interfaces.attention import AttnSpec
    from minivllm.core.interfaces.executor import Part, Wiring
    from minivllm.core.interfaces.states import Recurrent
    from minivllm.device.hardware import Device
    from minivllm.registry import Catalog, Selection

    from .values import EngineConfig


@dataclass(frozen=True)
class Resolved:
    """The chosen plug-ins and the reasons.  ``parts`` has one entry for each seam (kind of plug-in) with one plug-in:
    those of ``wiring.parts``, executor, evictor and scheduler.  ``facts`` are the facts after the last choice."""

    config: EngineConfig
    wiring: Wiring
    hf_config: Any
    device: Device
    attention: tuple[AttnSpec, ...]  # one entry per layer with attention
    states: tuple[Recurrent, ...]  # one entry per layer with a recurrent state
    groups: tuple[tuple[int, ...], ...]  # indices of the layers of each KV group; groups of full attention come first
    parts: Mapping[str, Part]
    strategies: tuple[Part, ...]
    hooks: tuple[Part, ...]
    selections: tuple[Selection, ...]
    facts: Mapping[str, Any]
    notes: tuple[tuple[str, str], ...]  # (name, sentence) for values that are not plug-ins, such as device and dtype
    catalog: Catalog
    tokenizer_dir: str | None  # None with skip_tokenizer_init
    sampling: Mapping[str, Any] = field(default_factory=dict)  # defaults of the model's generation_config.json
    # the choices without drafts, if ``drafter = auto`` chose the head of the checkpoint
    without_head: Resolved | None = None

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Return the attention window of each KV group, None for full attention."""
        return tuple(self.attention[layers[0]].window for layers in self.groups)

    @property
    def explanation(self) -> Explanation:
        """Return the reasons of all choices."""
        return Explanation(self.selections, self.notes, self.catalog)

    def explain(self, seam: str | None = None, all: bool = False) -> str:
        """Return the reasons of all choices as text.  ``all`` adds the plug-ins that were not considered."""
        return self.explanation.text(seam, all)
