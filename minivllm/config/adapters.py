"""The options of adapters (LoRA)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from minivllm.core.interfaces.executor import AdapterWiring
from minivllm.errors import ConfigError
from minivllm.validation import begins, source_of

if TYPE_CHECKING:
    from .values import EngineConfig

FIELDS = ("max_loras", "max_lora_rank", "max_cpu_loras")
HOST = 4  # adapters in host memory for each on the device, by default


def wire_adapters(config: EngineConfig, origins: Mapping[str, str]) -> AdapterWiring:
    """Return the options of adapters.  ConfigError if they contradict each other."""
    if not config.enable_lora:
        # a record of a run names all options, with their defaults
        fields = type(config).model_fields
        named = next((name for name in FIELDS if getattr(config, name) != fields[name].default), None)
        if named is not None:
            where = begins(source_of(origins, named))
            raise ConfigError(
                f"{where}{named} without enable_lora=true has no effect: set enable_lora, or leave it out"
            )
        return AdapterWiring()
    host = HOST * config.max_loras if config.max_cpu_loras is None else config.max_cpu_loras
    if host < config.max_loras:
        raise ConfigError(
            f"{begins(source_of(origins, 'max_cpu_loras'))}max_cpu_loras={host} is less than max_loras="
            f"{config.max_loras}: adapters on the device are in host memory too; raise it"
        )
    return AdapterWiring(config.max_loras, config.max_lora_rank, host)
