"""The options of how steps run: captured in CUDA graphs, with fused kernels, ahead of each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from minivllm.core.interfaces.executor import StepWiring
from minivllm.errors import ConfigError, shown
from minivllm.validation import begins, source_of

if TYPE_CHECKING:
    from .values import EngineConfig


def wire_steps(config: EngineConfig, device: str, origins: Mapping[str, str]) -> StepWiring:
    """Return the step options.  ConfigError if ``unfused`` contradicts other options or the device."""
    graph = "off" if config.enforce_eager else config.graph
    unfused = tuple(dict.fromkeys(config.unfused))
    if unfused:
        setting = f"{begins(source_of(origins, 'unfused'))}unfused={shown(list(unfused))}"
        if not config.fuse:
            raise ConfigError(
                f"{setting} with fuse=false, which already turns off all fused kernels: set only one of the two"
            )
        if device == "cpu":
            raise ConfigError(f"{setting}: fused kernels run on GPUs only, and the device is a CPU; leave it out")
        if config.batch_invariant:
            raise ConfigError(
                f"{setting} with batch_invariant=true: the results of torch's operations depend on the batch; "
                "leave out unfused"
            )
    return StepWiring(
        graph,
        config.fuse,
        unfused,
        config.run_ahead,
        config.tpot_target_ms,
        config.graph_captures,
        config.compile_ahead,
    )


def captures_drafts(config: EngineConfig, drafts: int, device: str, origins: Mapping[str, str]) -> bool:
    """Return whether steps with drafts are captured.  ConfigError if other options contradict ``captured_drafts=true``.

    ``drafts`` is the largest number of drafts of a row, 0 without a drafter.  ``device`` is "cpu" or "cuda"."""
    split, off = config.tensor_parallel_size > 1, config.enforce_eager or config.graph == "off"
    if config.captured_drafts == "auto":
        return device != "cpu" and drafts > 0 and not off and not split
    if not config.captured_drafts:
        return False
    setting = f"{begins(source_of(origins, 'captured_drafts'))}captured_drafts=true"
    if not drafts:
        raise ConfigError(f"{setting} without a drafter: no step has drafts; choose a drafter, or leave it out")
    if off:
        option = "enforce_eager=true" if config.enforce_eager else "graph=off"
        raise ConfigError(f"{setting} with {option}, which captures no steps: set only one of them")
    if split:
        size = f"tensor_parallel_size={config.tensor_parallel_size}"
        raise ConfigError(f"{setting} with {size}: drafts are captured on one device only; leave it out")
    return True
