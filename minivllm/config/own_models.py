"""The second models of a drafter and of processors.  Their plug-ins are chosen in the same way as those of the served
model."""

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
from .places import ModelPlaces, describe_folder

# Features that exclude own_model: a second model runs once per row and step, outside of CUDA graphs.
WITHOUT = ("graph_safe", "multi_position")


@dataclass
class OwnModels:
    """Collects the second models, their attention layers, and notes about the choice.

    Plug-ins name a model with their option ``model``, and optionally ``revision``.  ``choose`` returns the model and
    quantizer plug-ins for a checkpoint, by seam.
    """

    limits: DraftLimits
    choose: Callable[[Checkpoint], Mapping[str, Part]]
    places: ModelPlaces
    layers: list[AttnSpec] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)

    def add(self, part: Part, claim: str, label: str) -> DraftWiring:
        """Choose the plug-ins of the second model of ``part``, which declares the feature ``claim``.

        PluginError if its options name no model.  ConfigError, whose message begins with ``label``, if the model is not
        compatible with the served model.
        """
        path, revision = part.options.get("model"), part.options.get("revision")
        if not isinstance(path, str) or not path:
            raise PluginError(
                f"{part.name}: it claims {claim}, and its option 'model' is {shown(path)}; expected a path"
            )
        checkpoint = self.places.checkpoint(path, revision, f"revision of {part.name}")
        label = f"{label} {checkpoint.folder}"
        cfg = checkpoint.hf_config()
        self.limits.check_config(label, cfg)
        parts = self.choose(checkpoint)
        arch = build_part("model", parts["model"])
        layers = attention_layers(arch, cfg)
        self.limits.check_layers(label, layers, arch.switch(cfg))
        self.layers += layers
        self.notes.append((claim, f"{describe_folder(checkpoint.folder)} ({checkpoint.architecture})"))
        return DraftWiring(str(checkpoint.folder), parts)

    def of_processors(self, processors: Sequence[Part], begins: str) -> dict[str, DraftWiring]:
        """Choose the plug-ins of the processors' second models, by processor name.  PluginError for contradictory
        features."""
        models = {}
        for part in processors:
            if "own_model" not in part.features:
                continue
            for name in WITHOUT:
                if name in part.features:
                    raise PluginError(f"{part.name}: it claims own_model and {name}; expected a spec without {name}")
            models[part.name] = self.add(part, "own_model", f"{begins}the model of {part.name},")
        return models
