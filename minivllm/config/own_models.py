"""The models of a drafter and of processors, beside the model that is served: each is chosen as that one is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from minivllm.core.interfaces.attention import AttnSpec
from minivllm.core.interfaces.executor import DraftWiring, Part
from minivllm.device.loading.hf_config import Checkpoint
from minivllm.errors import PluginError, shown
from minivllm.registry import build_part

from .draft_limits import DraftLimits
from .kv_groups import attention_layers
from .places import ModelPlaces, told

# what a processor with a model of its own cannot claim: the model reads a row once in a step, outside of a capture
WITHOUT = ("graph_safe", "multi_position")


@dataclass
class OwnModels:
    """Collects the models that parts name by their option ``model``, and ``revision`` where they have it: their
    attention layers, and notes of what was chosen.  ``choose`` gives the parts (model, quantizer) of a checkpoint, by
    seam."""

    limits: DraftLimits
    choose: Callable[[Checkpoint], Mapping[str, Part]]
    places: ModelPlaces
    layers: list[AttnSpec] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)

    def add(self, part: Part, claim: str, note: str, said: str) -> DraftWiring:
        """The model of ``part``, which claims that it has one.  PluginError if it names none; ConfigError, which begins
        with ``said``, if it does not fit the model that is served."""
        path, revision = part.options.get("model"), part.options.get("revision")
        if not isinstance(path, str) or not path:
            raise PluginError(f"{part.name}: it claims {claim}, and its option 'model' is {shown(path)}; want a path")
        checkpoint = self.places.checkpoint(path, revision, f"revision of {part.name}")
        said, own = f"{said} {checkpoint.folder}", checkpoint.hf_config()
        self.limits.check_config(said, own)
        parts = self.choose(checkpoint)
        arch = build_part("model", parts["model"])
        layers = attention_layers(arch, own)
        self.limits.check_layers(said, layers, arch.switch(own))
        self.layers += layers
        self.notes.append((note, f"{told(checkpoint.folder)} ({checkpoint.architecture})"))
        return DraftWiring(str(checkpoint.folder), parts)

    def of_processors(self, processors: Sequence[Part], begins: str) -> dict[str, DraftWiring]:
        """By the name of each processor that has one.  PluginError for a claim that contradicts it."""
        found = {}
        for part in processors:
            if "own_model" not in part.features:
                continue
            for name in WITHOUT:
                if name in part.features:
                    raise PluginError(f"{part.name}: it claims own_model and {name}; want a spec without {name}")
            found[part.name] = self.add(part, "own_model", "own_model", f"{begins}the model of {part.name},")
        return found
