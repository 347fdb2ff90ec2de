"""The kernels of ``minivllm.device.kernels`` for quantized weights, if they support a weight on its device."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from minivllm.device.layers.linear import CAPTURED

FP8 = torch.float8_e4m3fn
GROUPS = (32, 64, 128)  # group sizes (inputs per scale of 4-bit weights) that the kernels support
LEAST = {FP8: (8, 9)}  # lowest compute capability for which Triton supports a dtype; OTHERS is that of all other dtypes
OTHERS = (8, 0)


def kernels_of(
    weight: Tensor, scale: Tensor, zero: Tensor | None = None, group: int = 0, table: Tensor | None = None
) -> Any:
    """Return the kernels ``Quantized`` for a weight, or None.

    The arguments are the fields of ``StoredWeight``; ``table`` maps 4-bit codes to numbers.  None means that Triton or
    a suitable GPU is missing, or that 4-bit groups have a size outside GROUPS.
    """
    if weight.dtype == torch.uint8 and group not in GROUPS:
        return None
    if not _served(weight, LEAST.get(weight.dtype, OTHERS)):
        return None
    from minivllm.device.kernels.quant import Quantized

    return Quantized(weight, scale, zero, group, table)


def grouped_kernels_of(weight: Tensor, scale: Tensor, zero: Tensor | None) -> Any:
    """Return ``GroupedProduct`` for a weight, None if Triton or a suitable GPU is missing."""
    if not _served(weight, LEAST.get(weight.dtype, OTHERS)):
        return None
    from minivllm.device.kernels.grouped import GroupedProduct

    return GroupedProduct(weight, scale, zero)


def scaled_kernels_of(weight: Tensor, scale: Tensor) -> Any:
    """Return ``ScaledProduct`` for a weight, None if the device cannot run it.

    Its large tiles are loaded by the copy engine of Hopper GPUs.
    """
    if not _served(weight, (9, 0)):
        return None
    from minivllm.device.kernels.launch import roomy
    from minivllm.device.kernels.scaled import ScaledProduct

    return ScaledProduct(weight, scale) if roomy(weight.device) else None


def joined(kernels: Any, bias: Any, mode: int, activation: str) -> Any:
    """Return the ``FusedProduct`` of kernels that ``kernels_of`` returned, or None if ``kernels`` is None."""
    if kernels is None:
        return None
    from minivllm.device.kernels.quant import FusedProduct

    return FusedProduct(kernels, bias, mode, activation)


def joined_scaled(kernels: Any, bias: Any, mode: int, activation: str) -> Any:
    """Return the ``FusedProduct`` of kernels that ``scaled_kernels_of`` returned, or None if ``kernels`` is None."""
    if kernels is None:
        return None
    from minivllm.device.kernels.quant import FusedProduct

    return FusedProduct(kernels.wide, bias, mode, activation, kernels.weight.dtype, scaled=kernels)


def served_by(
    dtype: torch.dtype,
    device: str,
    sm: int,
    table: bool = False,
    rounded: torch.dtype | None = None,
    native: bool = False,
    rounds_rows: bool = True,
) -> Mapping[str, str]:
    """Return descriptions of the kernels that multiply by a weight of a dtype, by the number of rows of x.

    The keys are those of ``WeightScheme.served``.  ``table`` means codes with a table.  ``rounded`` is the dtype to
    which rows of x are rounded.  ``native`` means that the native library of a CPU multiplies any number of rows.
    ``rounds_rows`` is that of ``quant.Quantized``.
    """
    if device.startswith("cuda") and _runs_kernels(dtype, sm, rounded):
        from minivllm.device.kernels.quant import described

        return described(dtype, sm, table, rounded, rounds_rows)
    if native:
        return {"any": "read as they lie by the native part"}
    kernels = {}
    if device == "cpu" and rounded is None and not table and dtype != FP8:
        kernels[CAPTURED] = "read as they lie by the native part, where it is there"
    kernels["any"] = "made numbers of the run's dtype, then the library's product"
    return kernels


def _runs_kernels(dtype: torch.dtype, sm: int, rounded: torch.dtype | None) -> bool:
    """Return whether Triton's kernels multiply by a weight of a dtype on a GPU of compute capability ``sm`` / 10."""
    if find_spec("triton") is None:
        return False
    if rounded is not None:
        return 90 <= sm < 120  # ``scaled_kernels_of``
    major, minor = LEAST.get(dtype, OTHERS)
    return sm >= 10 * major + minor


def _served(weight: Tensor, least: tuple[int, int]) -> bool:
    if weight.device.type != "cuda" or torch.version.hip is not None or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(weight.device) >= least
