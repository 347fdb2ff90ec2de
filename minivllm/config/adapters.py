"""The options of adapters, and the methods that read and apply them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from minivllm.core.interfaces.executor import AdapterWiring, Part
from minivllm.errors import ConfigError, shown
from minivllm.validation import begins, source_of

from .values import PluginChoice

if TYPE_CHECKING:
    from .values import EngineConfig

FIELDS = ("max_loras", "max_lora_rank", "max_cpu_loras")
HOST = 4  # default of max_cpu_loras, as a multiple of max_loras
LORA = "lora"  # name of the adapter method that enable_lora adds
# a function (seam, choices, names of facts) that returns the chosen plug-ins
Choose = Callable[[str, Sequence[PluginChoice], Sequence[str]], Sequence[Part]]
TYPE = "peft_type"  # trait of an adapter method: the ``peft_type`` of the adapter folders that it reads
RANKED = "ranked"  # trait of adapter methods that use max_lora_rank


def _with_lora(config: EngineConfig) -> list[PluginChoice]:
    """Return the choices of adapter methods, with LoRA if ``enable_lora`` is set."""
    names = {choice.name for choice in config.adapters}
    if not config.enable_lora or names & {LORA, f"minivllm/{LORA}"}:
        return list(config.adapters)
    return [*config.adapters, PluginChoice(name=LORA)]


def wire_adapters(config: EngineConfig, origins: Mapping[str, str], choose: Choose) -> AdapterWiring:
    """Choose the adapter methods, and return the adapter options.  ConfigError if the options contradict each other."""
    methods = tuple(choose("adapter", _with_lora(config), ("device",)))
    if not methods:
        _refuse_changed(config, origins, FIELDS, "enable_lora=true or adapters")
        return AdapterWiring()
    _check_types(methods, origins)
    if not any(part.traits.get(RANKED, True) for part in methods):
        _refuse_changed(config, origins, ("max_lora_rank",), "a method with ranks, such as lora,")
    host = HOST * config.max_loras if config.max_cpu_loras is None else config.max_cpu_loras
    if host < config.max_loras:
        raise ConfigError(
            f"{begins(source_of(origins, 'max_cpu_loras'))}max_cpu_loras={host} is less than "
            f"max_loras={config.max_loras}: adapters on the device are in host memory too; raise max_cpu_loras"
        )
    return AdapterWiring(config.max_loras, config.max_lora_rank, host, methods)


def _refuse_changed(config: EngineConfig, origins: Mapping[str, str], names: Sequence[str], needed: str) -> None:
    """Raise ConfigError for an option that has no effect without ``needed``, unless it has its default.

    An option that is set to its default is accepted, because the record of a run sets all options.
    """
    fields = type(config).model_fields
    named = next((name for name in names if getattr(config, name) != fields[name].default), None)
    if named is not None:
        where = begins(source_of(origins, named))
        raise ConfigError(f"{where}{named} without {needed} has no effect: add {needed}, or leave out {named}")


def _check_types(methods: Sequence[Part], origins: Mapping[str, str]) -> None:
    """Raise ConfigError for an adapter method that declares no folder type, or the folder type of an earlier one."""
    label = begins(source_of(origins, "adapters"))
    found: dict[str, str] = {}
    for part in methods:
        kind = part.traits.get(TYPE)
        if kind is None:
            raise ConfigError(
                f"{label}adapters: {part.name} has no trait {TYPE}: its spec must declare the peft_type of the "
                "adapter folders that it reads"
            )
        if kind in found:
            both = f"{found[kind]} and {part.name} both read folders of {TYPE}={shown(kind)}"
            raise ConfigError(f"{label}adapters: {both}; remove one of them")
        found[kind] = part.name
