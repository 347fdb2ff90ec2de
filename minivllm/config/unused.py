"""What nobody would use is refused: options that mean nothing to the executor that was chosen, as nobody measures a
part that does not run; and checkpoints that no quantizer reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from minivllm.errors import ConfigError, ModelError, PluginError, shown
from minivllm.registration.spec import ANY, OPTION_OF, allows
from minivllm.validation import begins, source_of

_GPTQ = "want the same model as GPTQ with checkpoint_format=gptq (GPTQModel writes it with format=gptq)"
# methods that are another method's weights in the order of one kernel, and what to do
INSTEAD = {
    "marlin": f"its words lie in the order of the kernel Marlin, which is not read; {_GPTQ}",
    "gptq_marlin_24": f"its weights are sparse, in the order of the kernel Marlin, which is not read; {_GPTQ}",
    "gptq_marlin": "is vLLM's name for a kernel; want quant_method=gptq, which reads the files that it reads",
    "awq_marlin": "is vLLM's name for a kernel; want quant_method=awq, which reads the files that it reads",
}

if TYPE_CHECKING:
    from minivllm.device.loading.hf_config import Checkpoint
    from minivllm.registry import Candidate, Registry

    from .values import EngineConfig, PluginChoice


def refuse_unused(config: EngineConfig, executor: Candidate, origins: Mapping[str, str]) -> None:
    """ConfigError for a plug-in that is chosen by name for a seam which the executor does not run (trait ``unused``:
    the seams, with spaces between them)."""
    spec = executor.require_spec()
    for seam in str(spec.traits.get("unused", "")).split():
        option = OPTION_OF.get(seam, seam)
        if (choice := getattr(config, option)).name != "auto":
            said = f"{begins(source_of(origins, option))}{option}={choice.name} with executor={config.executor.name}"
            raise ConfigError(f"{said}, which runs no {seam}: leave {option} out, or take executor=local")


def method_read(checkpoint: Checkpoint, registry: Registry, choice: PluginChoice) -> str:
    """The method that a checkpoint is quantized with, "none" if it is not.  ModelError if no quantizer that is
    installed reads it, whatever the machine; one that is chosen by name says so itself."""
    method, read = checkpoint.quantization, set[str]()
    if choice.name != "auto":
        return method
    for entry in registry.entries:
        try:
            limits = registry.spec(entry).limits
        except PluginError:  # the choice says what is wrong with it
            continue
        if limits == ANY or allows(limits.get("checkpoint", ()), method):
            return method
        if isinstance(limits.get("checkpoint"), (set, frozenset)):
            read |= limits["checkpoint"]
    if said := INSTEAD.get(method):
        raise ModelError(f"{checkpoint.folder}/config.json: quantization_config.quant_method={shown(method)}: {said}")
    known = ", ".join(sorted(read - {"none"}))
    raise ModelError(
        f"{checkpoint.folder}/config.json: quantization_config.quant_method={shown(method)}: no quantizer reads it; "
        f"want {known}, a package with a plug-in for it, or the model in floating numbers"
    )


def online_counterpart(registry: Registry, choice: PluginChoice, method: str) -> tuple[PluginChoice, str]:
    """Return the quantizer to choose and a note, empty if the choice stays.

    A plug-in that reads checkpoints of a library may name the plug-in that quantizes in the same way while loading (the
    trait ``online``).  That one is chosen for a checkpoint without a quantization.
    """
    if method != "none" or choice.name == "auto":
        return choice, ""
    try:
        online = registry.spec(registry.find(choice.name)).traits.get("online")
    except PluginError:  # the selection reports it
        return choice, ""
    if online is None:
        return choice, ""
    note = f"{choice.name} reads quantized checkpoints; this one is quantized while it is loaded, with {online}"
    return choice.model_copy(update={"name": online}), note
