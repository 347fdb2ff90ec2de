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
HOST = 4  # adapters in host memory for each on the device, by default
LORA = "lora"  # the method that enable_lora adds
# (seam, choices, names of facts) -> the chosen plug-ins
Choose = Callable[[str, Sequence[PluginChoice], Sequence[str]], Sequence[Part]]
TYPE = "peft_type"  # the trait that names the folders of a method
RANKED = "ranked"  # trait of adapter methods that use max_lora_rank


def _with_lora(config: EngineConfig) -> list[PluginChoice]:
    """Return the chosen methods, with LoRA if ``enable_lora`` is set."""
    names = {choice.name for choice in config.adapters}
    if not config.enable_lora or names & {LORA, f"minivllm/{LORA}"}:
        return list(config.adapters)
    return [*config.adapters, PluginChoice(name=LORA)]


def wire_adapters(config: EngineConfig, origins: Mapping[str, str], choose: Choose) -> AdapterWiring:
    """Choose the methods of adapters, and return the options.  ConfigError if they contradict each other."""
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
            f"{begins(source_of(origins, 'max_cpu_loras'))}max_cpu_loras={host} is less than max_loras="
            f"{config.max_loras}: adapters on the device are in host memory too; raise it"
        )
    return AdapterWiring(config.max_loras, config.max_lora_rank, host, methods)


def _refuse_changed(config: EngineConfig, origins: Mapping[str, str], names: Sequence[str], needed: str) -> None:
    """Raise ConfigError for an option that has no effect without ``needed``, unless it has its default.

    A record of a run names all options, with their defaults."""
    fields = type(config).model_fields
    named = next((name for name in names if getattr(config, name) != fields[name].default), None)
    if named is not None:
        where = begins(source_of(origins, named))
        raise ConfigError(f"{where}{named} without {needed} has no effect: set one of them, or leave it out")


def _check_types(methods: Sequence[Part], origins: Mapping[str, str]) -> None:
    """Raise ConfigError for a method without folder types, or with a folder type of another method."""
    label = begins(source_of(origins, "adapters"))
    found: dict[str, str] = {}
    for part in methods:
        kind = part.traits.get(TYPE)
        if kind is None:
            raise ConfigError(
                f"{label}adapters: {part.name} has no trait {TYPE}: its spec must name the folders it reads"
            )
        if kind in found:
            both = f"{found[kind]} and {part.name} both read folders of {TYPE}={shown(kind)}"
            raise ConfigError(f"{label}adapters: {both}; remove one of them")
        found[kind] = part.name
