"""Checks that several processes can share a model, given its heads and the devices of this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from minivllm.errors import ConfigError
from minivllm.validation import begins, source_of

if TYPE_CHECKING:
    from minivllm.core.interfaces.attention import AttnSpec
    from minivllm.core.interfaces.executor import Part
    from minivllm.device.hardware import Device


def fits(size: int, spec: AttnSpec) -> bool:
    """Return whether ``size`` processes can share an attention layer.

    Query heads are divided among the processes.  KV heads are divided, or copied if there are fewer heads than
    processes.
    """
    if spec.heads % size:
        return False
    return spec.kv_heads % size == 0 or size % spec.kv_heads == 0


def elsewhere(executor: Part) -> bool:
    """Return whether an executor uses devices of other machines, which is the case if the option that its trait
    ``cluster`` names is set."""
    option = str(executor.traits.get("cluster", ""))
    return bool(executor.options.get(option))


def check(size: int, specs: Sequence[AttnSpec], device: Device, executor: Part, origins: Mapping[str, str]) -> None:
    """Raise ConfigError if ``size`` processes cannot share the model.  The message lists the possible sizes."""
    setting = f"{begins(source_of(origins, 'tensor_parallel_size'))}tensor_parallel_size={size}"
    if device.devices < size and device.kind != "cpu" and not elsewhere(executor):
        raise ConfigError(
            f"{setting}: each process has a device, and torch sees {device.devices} on "
            f"{device.kind}; expected at most {device.devices}"
        )
    for layer, spec in enumerate(specs):
        if not fits(size, spec):
            every = range(1, spec.heads + 1)
            sizes = [n for n in every if all(fits(n, other) for other in specs)]
            raise ConfigError(
                f"{setting}: layer {layer} of the model has {spec.heads} heads and "
                f"{spec.kv_heads} KV heads, which so many processes cannot share; expected "
                f"{' or '.join(map(str, sizes))}"
            )


def refuse_invariant(size: int, setting: str) -> None:
    """Raise ConfigError for several processes with batch-invariant results.  ``setting`` begins the message."""
    if size > 1:
        raise ConfigError(
            f"{setting} with tensor_parallel_size={size}: matrix sizes and the order of sums depend on the number of "
            "processes; set tensor_parallel_size=1"
        )


def queries_per_kv(size: int, specs: Sequence[AttnSpec]) -> frozenset[int]:
    """Return the numbers of query heads per KV head in a process, for all layers."""
    return frozenset(spec.heads // size // max(1, spec.kv_heads // size) for spec in specs)
