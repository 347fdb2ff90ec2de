"""How steps run: captured, fused, ahead of one another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from minivllm.core.interfaces.executor import StepWiring
from minivllm.errors import ConfigError, shown
from minivllm.validation import begins, source_of

if TYPE_CHECKING:
    from .values import EngineConfig


def wire_steps(config: EngineConfig, device: str, origins: Mapping[str, str]) -> StepWiring:
    """ConfigError where single kernels are left out of none, or of a result that may not depend on the batch."""
    graph, unfused = "off" if config.enforce_eager else config.graph, tuple(dict.fromkeys(config.unfused))
    if unfused:
        said = f"{begins(source_of(origins, 'unfused'))}unfused={shown(list(unfused))}"
        if not config.fuse:
            raise ConfigError(f"{said} with fuse=false, which leaves out all: want one of them")
        if device == "cpu":
            raise ConfigError(f"{said}: fused kernels are those of a GPU, and the device is a CPU; leave it out")
        if config.batch_invariant:
            raise ConfigError(f"{said} with batch_invariant=true: torch's operations go by the batch; want none")
    return StepWiring(graph, config.fuse, unfused, config.run_ahead)
