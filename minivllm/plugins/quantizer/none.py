"""No quantization, so weights have the dtype of the activations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minivllm.core.interfaces.quantizer import ModuleInfo, Quantizer
from minivllm.errors import ModelError


def refuse_quantized(checkpoint: Mapping[str, Any] | None, name: str) -> None:
    """Raise ModelError for a quantized checkpoint, whose tensors ``name`` cannot read."""
    if checkpoint:
        method = checkpoint.get("quant_method", "an unnamed method")
        raise ModelError(
            f"the checkpoint is quantized with {method}, which quantizer={name} cannot read; choose another, or auto"
        )


class Unquantized(Quantizer):
    """The quantizer that keeps the floating-point weight of every module."""

    def __init__(self, options: Any = None, checkpoint: Mapping[str, Any] | None = None) -> None:
        super().__init__(options, checkpoint)
        refuse_quantized(checkpoint, "none")

    def scheme(self, m: ModuleInfo) -> None:
        return None
