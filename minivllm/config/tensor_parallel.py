"""Whether processes can share a model: by its heads, and by the devices that there are."""

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
    """Query heads are cut; KV heads are cut, or copied where there are fewer of them than processes."""
    return spec.heads % size == 0 and (spec.kv_heads % size == 0 or size % spec.kv_heads == 0)


def elsewhere(executor: Part) -> bool:
    """Whether an executor has devices that this machine does not see: its trait ``cluster`` names the option."""
    return bool(executor.options.get(str(executor.traits.get("cluster", ""))))


def check(size: int, specs: Sequence[AttnSpec], device: Device, executor: Part, origins: Mapping[str, str]) -> None:
    """ConfigError, with the sizes that would do."""
    said = begins(source_of(origins, "tensor_parallel_size"))
    if device.devices < size and device.kind != "cpu" and not elsewhere(executor):
        raise ConfigError(
            f"{said}tensor_parallel_size={size}: each process has a device, and torch sees {device.devices} on "
            f"{device.kind}; want at most {device.devices}"
        )
    for layer, spec in enumerate(specs):
        if not fits(size, spec):
            able = [n for n in range(1, spec.heads + 1) if all(fits(n, one) for one in specs)]
            raise ConfigError(
                f"{said}tensor_parallel_size={size}: layer {layer} of the model has {spec.heads} heads and "
                f"{spec.kv_heads} KV heads, which so many processes cannot share; want {' or '.join(map(str, able))}"
            )


def refuse_invariant(size: int, said: str) -> None:
    """ConfigError for bits that shall not depend on the batch: ``said`` is where that was asked for."""
    if size > 1:
        raise ConfigError(
            f"{said} with tensor_parallel_size={size}: the products of a process's share go by other sizes, and on "
            "GPUs the order of the sum is the library's; want tensor_parallel_size=1"
        )


def queries_per_kv(size: int, specs: Sequence[AttnSpec]) -> frozenset[int]:
    """Query heads that share a KV head in each process."""
    return frozenset(spec.heads // size // max(1, spec.kv_heads // size) for spec in specs)
