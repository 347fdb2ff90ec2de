"""The second models of a drafter and of processors.  Their plug-ins are chosen in the same way as those of the served
model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minivllm.core.interfaces.attention import AttnSpec
from minivllm.core.interfaces.drafter import HeadFiles
from minivllm.core.interfaces.executor import DraftWiring, Part
from minivllm.core.interfaces.states import Recurrent
from minivllm.device.loading.hf_config import Checkpoint
from minivllm.device.loading.tensor_names import names_in
from minivllm.errors import ConfigError, ModelError, PluginError, shown
from minivllm.registry import build_part, head_of

from .draft_limits import DraftLimits
from .kv_groups import attention_layers
from .places import ModelPlaces, describe_folder

# Features that exclude own_model: a second model runs once per row and step, outside of CUDA graphs.
WITHOUT = ("graph_safe", "multi_position")


@dataclass(frozen=True)
class Served:
    """The served model: its folder, architecture and config object, and the names of its tensors.

    ``names`` None means that the names are not known before the weights are loaded."""

    folder: Path
    arch: Any
    cfg: Any
    names: Sequence[str] | None

    @property
    def files(self) -> HeadFiles:
        """Return the files of a head that is stored in the model's own checkpoint."""
        return HeadFiles(str(self.folder), self.cfg, self.names)


def has_head(names: Sequence[str] | None) -> bool:
    """Return whether a checkpoint with tensors of these names holds a head for next-token prediction (``mtp.*``)."""
    return any(name.startswith("mtp.fc.") for name in names or ())


def check_head(part: Part, served: Served, files: HeadFiles | None = None) -> Any:
    """Return the ``drafter.Head`` of a drafter: layers that read hidden states of the served model.

    Its weights come from its own ``files`` or, if None, from those of the model.  ConfigError if tensors of the head
    are missing; nothing is checked if the names of the tensors are unknown.  ModelError if the drafter refuses the
    model."""
    files = files or served.files
    head = head_of(part, files, served.arch, served.cfg)
    missing = missing_tensors(head, files.names)
    if missing:
        raise ConfigError(
            f"{files.folder} has no tensor {missing}; use a checkpoint with such a head, or another drafter"
        )
    return head


def missing_tensors(head: Any, names: Sequence[str] | None) -> str:
    """Return the first name in a head's loading rules with which no tensor name of the checkpoint begins, or "".

    The result is also "" if the names of the tensors are unknown (None).
    """
    if names is None:
        return ""
    for rule in head.arch.weights(head.cfg):
        if rule.module is None or rule.form:
            continue
        root = rule.source.partition(".")[0]
        pattern = re.escape(rule.source).replace(r"\{i\}", r"\d+").replace(r"\{e\}", r"\d+")
        if not any(root in name and re.search(rf"(^|\.){pattern}(\.|$)", name) for name in names):
            return rule.source
    return ""


@dataclass
class OwnModels:
    """Collects the second models, their attention layers, and notes about the choice.

    Plug-ins name a model with their option ``model``, and optionally ``revision``.  ``choose`` returns the model and
    quantizer plug-ins for a checkpoint, by seam, and ``quantizer`` the quantizer only.
    """

    limits: DraftLimits
    choose: Callable[[Checkpoint], Mapping[str, Part]]
    quantizer: Callable[[Checkpoint], Mapping[str, Part]]
    places: ModelPlaces
    layers: list[AttnSpec] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)
    # claim, recurrent states and number of layers of each model with recurrent layers
    states: list[tuple[str, Sequence[Recurrent], int]] = field(default_factory=list)

    def add(self, part: Part, claim: str, label: str) -> DraftWiring:
        """Choose the plug-ins of the second model of ``part``, which declares the feature ``claim``; return its wiring.

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
        if states := arch.states(cfg):
            self.states.append((claim, states, len(layers) + len(states)))
        self.notes.append((claim, f"{describe_folder(checkpoint.folder)} ({checkpoint.architecture})"))
        return DraftWiring(str(checkpoint.folder), parts)

    def add_head(self, part: Part, served: Served, label: str) -> DraftWiring:
        """Check the layers of ``part``, a drafter that reads hidden states of the ``served`` model, and return the
        wiring of its head.

        ConfigError, whose message begins with ``label``, if the drafter has no head or its head does not fit the model.
        """
        parts: Mapping[str, Part] = {}
        try:
            files = served.files
            if part.options.get("model"):
                files, parts = self._own_files(part)
            head = check_head(part, served, files)
        except (ConfigError, ModelError) as exc:
            raise type(exc)(f"{label}: {exc}") from exc
        switch = head.arch.switch(head.cfg)
        # A head that declares no ``switch`` uses one rotary table, regardless of the served model.
        if switch is not None:
            self.limits.check_switch(f"{label}: {files.folder}", switch)
        self.layers += attention_layers(head.arch, head.cfg)
        self.notes.append(("target_head", f"{describe_folder(Path(files.folder))} reads {', '.join(head.points)}"))
        return DraftWiring(files.folder, parts)

    def _own_files(self, part: Part) -> tuple[HeadFiles, Mapping[str, Part]]:
        """Return the files that the option ``model`` of a drafter names, and the head's quantizer."""
        checkpoint = self.places.checkpoint(
            part.options["model"], part.options.get("revision"), f"revision of {part.name}"
        )
        names = names_in(checkpoint.folder, self.places.config.load_format)
        return HeadFiles(str(checkpoint.folder), checkpoint.hf_config(), names), self.quantizer(checkpoint)

    def of_processors(self, processors: Sequence[Part], begins: str) -> dict[str, DraftWiring]:
        """Choose the plug-ins of the processors' second models, and return their wirings by processor name.

        PluginError for features that exclude each other."""
        models = {}
        for part in processors:
            if "own_model" not in part.features:
                continue
            for name in WITHOUT:
                if name in part.features:
                    raise PluginError(
                        f"the spec of {part.name} claims the features own_model and {name}, which exclude each other; "
                        f"remove {name} from it"
                    )
            models[part.name] = self.add(part, "own_model", f"{begins}the model of {part.name},")
        return models
