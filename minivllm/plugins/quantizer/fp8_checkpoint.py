"""Checkpoints whose weights are float8 (e4m3), in the format of DeepSeek and Qwen (``quant_method: fp8``).

    weight            float8 [out, in]
    weight_scale_inv  f32 [out / 128, in / 128], a factor for each block (``weight_block_size``), in spite of its name
    weight_scale      without blocks, one number or [out, 1]

Scales of activations are not used, because products take unquantized activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minivllm.core.interfaces.quantizer import ModuleInfo, PartSource
from minivllm.errors import ModelError

from .packed import CheckpointQuantizer, PartLayout, Share, Want
from .scaled_bytes import BytesLayout

SCALES = ("weight_scale_inv", "weight_scale")
UNUSED = ("input_scale", "activation_scale")
LEFT_OUT = ("modules_to_not_convert", "ignored_layers")


class Fp8Checkpoint(CheckpointQuantizer):
    """The quantizer for modules whose weight is float8.

    The tensors decide, and must agree with ``modules_to_not_convert``.
    """

    method = "fp8"
    packed_by = ("weight_scale_inv", "weight_scale")

    def __init__(self, options: Any = None, checkpoint: Mapping[str, Any] | None = None) -> None:
        super().__init__(options, checkpoint)
        settings = self.settings
        settings.one_of("fmt", (None, "e4m3", "float8_e4m3fn"), None)
        settings.one_of("activation_scheme", (None, "dynamic", "static"), None)
        self.block = None
        if settings.given.get("weight_block_size"):
            self.block = settings.pair("weight_block_size")
        self.left_out: list[str] = []
        for key in LEFT_OUT:
            self.left_out += settings.names(key)

    def layout(self, m: ModuleInfo, source: PartSource | None, share: Share) -> PartLayout | None:
        name = SCALES[0] if self.block else SCALES[1]
        rows, columns = self.block or (share.outputs, share.inputs)
        has = {} if source is None else source.tensors
        if source is not None:
            scales = [one for one in SCALES if one in has]
            if not scales:
                return None
            name = scales[0]
            if source.name in self.left_out:
                key = " or ".join(LEFT_OUT)
                raise ModelError(f"the checkpoint has {source.name}.{name}, but {key} excludes it from quantization")
            if self.block is None and has[name][0] == (share.outputs, 1):
                rows = 1
        size = None if self.block is None else list(self.block)
        why = f" with weight_block_size={size}"
        made = BytesLayout(share, "F8_E4M3", rows, columns, why, name)
        for unused in UNUSED:
            if unused in has:
                shape, dtype = has[unused]
                made.want[unused] = Want(dtype, shape)
        return made
