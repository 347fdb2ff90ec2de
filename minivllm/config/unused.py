"""Refuse settings without effect: options for kinds of plug-ins that the chosen executor does not run, and quantized
checkpoints that no quantizer reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from minivllm.errors import ConfigError, ModelError, PluginError, shown
from minivllm.registration.spec import ANY, OPTION_OF, allows
from minivllm.validation import begins, source_of

_GPTQ = "use the same model as GPTQ with checkpoint_format=gptq (GPTQModel writes it with format=gptq)"
# Quantization methods that only reorder the weights of another method for one kernel, and what to do.
INSTEAD = {
    "marlin": f"its words are in the order of the kernel Marlin, which is not supported; {_GPTQ}",
    "gptq_marlin_24": f"its weights are sparse, in the order of the kernel Marlin, which is not supported; {_GPTQ}",
    "gptq_marlin": "is vLLM's name for a kernel; set quant_method=gptq, which reads the same files",
    "awq_marlin": "is vLLM's name for a kernel; set quant_method=awq, which reads the same files",
}

if TYPE_CHECKING:
    from minivllm.device.loading.hf_config import Checkpoint
    from minivllm.registry import Candidate, Registry

    from .values import EngineConfig, PluginChoice


def refuse_unused(config: EngineConfig, executor: Candidate, origins: Mapping[str, str]) -> None:
    """Raise ConfigError if a plug-in was chosen by name for a seam (kind of plug-in) that the executor does not run.

    The executor's trait ``unused`` lists these seams, separated by spaces.
    """
    spec = executor.require_spec()
    for seam in str(spec.traits.get("unused", "")).split():
        option = OPTION_OF.get(seam, seam)
        name = getattr(config, option).name
        if name != "auto":
            setting = f"{begins(source_of(origins, option))}{option}={name} with executor={config.executor.name}"
            raise ConfigError(
                f"{setting}: this executor does not run {seam} plug-ins; leave {option} out, or use executor=local"
            )


def method_read(checkpoint: Checkpoint, registry: Registry, choice: PluginChoice) -> str:
    """Return the quantization method of a checkpoint, or "none".

    ModelError if no installed quantizer reads it on any machine.  If the user chose a quantizer by name, that plug-in
    reports the error.
    """
    method = checkpoint.quantization
    supported = set[str]()
    if choice.name != "auto":
        return method
    for entry in registry.entries:
        try:
            limits = registry.spec(entry).limits
        except PluginError:  # the selection reports the broken spec
            continue
        if limits == ANY or allows(limits.get("checkpoint", ()), method):
            return method
        if isinstance(limits.get("checkpoint"), (set, frozenset)):
            supported |= limits["checkpoint"]
    readers = ", ".join(sorted(supported - {"none"}))
    advice = INSTEAD.get(method) or (
        f"no quantizer reads it; use {readers}, a package with a plug-in for it, or the model in floating numbers"
    )
    raise ModelError(f"{checkpoint.folder}/config.json: quantization_config.quant_method={shown(method)}: {advice}")


def online_counterpart(registry: Registry, choice: PluginChoice, method: str) -> tuple[PluginChoice, str]:
    """Return the quantizer to use instead of ``choice`` and a note, or ``choice`` and "".

    A plug-in that reads quantized checkpoints may name the plug-in that quantizes in the same way during loading (its
    trait ``online``).  That plug-in is used if the checkpoint is not quantized.
    """
    if method != "none" or choice.name == "auto":
        return choice, ""
    try:
        online = registry.spec(registry.find(choice.name)).traits.get("online")
    except PluginError:  # the selection of the plug-in reports this error
        return choice, ""
    if online is None:
        return choice, ""
    note = f"{choice.name} reads quantized checkpoints; this one is quantized while it is loaded, with {online}"
    return choice.model_copy(update={"name": online}), note
