"""Int8 weights, with products in the dtype of the model: W[o, i] = scale[o] * q[o, i], scale[o] = max |W[o]| / 127."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.plugin import ModelError, ModuleInfo, Quantizer, WeightScheme, check_shape, no_adapter, part_rows


class Weight(WeightScheme):
    """The ``weight`` int8 [out, in] and ``scale`` float32 [out] of a module; ``tensors`` holds all its memory."""

    def __init__(self, info: ModuleInfo) -> None:
        self.info = info
        self.weight = torch.empty(info.out_features, info.in_features, dtype=torch.int8, device=info.device)
        self.scale = torch.empty(info.out_features, dtype=torch.float32, device=info.device)
        self.tensors = {"weight": self.weight, "scale": self.scale}

    def params(self) -> Mapping[str, tuple[int, ...]]:
        return {"weight": tuple(self.weight.shape)}

    def load(self, param: str, tensor: Tensor, part: str) -> None:
        rows = part_rows(self.info, part)  # q, k and v are rows of one matrix
        check_shape(tensor, self.weight[rows].shape)
        w = tensor.to(self.weight.device).float()
        largest = w.abs().amax(dim=1)
        scale = largest.div(127).clamp(min=torch.finfo(torch.float32).tiny)  # a row of zeros stays zero
        self.scale[rows] = scale
        codes = (w / scale[:, None]).round()
        codes = codes.clamp(-127, 127)
        self.weight[rows] = codes.to(torch.int8)

    def apply(self, x: Tensor, out: Tensor | None = None, adapter: Any = None) -> Tensor:
        no_adapter(self, adapter)
        weight = self.weight * self.scale[:, None]
        y = F.linear(x, weight.to(x.dtype))
        return y if out is None else out.copy_(y)


class MyPlugin(Quantizer):
    """Quantize all linear layers; embeddings and the head stay unquantized."""

    def __init__(self, options: Any = None, checkpoint: Mapping[str, Any] | None = None) -> None:
        super().__init__(options, checkpoint)
        if checkpoint:
            method = checkpoint.get("quant_method", "an unnamed method")
            raise ModelError(f"the checkpoint is quantized with {method}, which my-plugin cannot read")

    def scheme(self, m: ModuleInfo) -> WeightScheme | None:
        return Weight(m) if m.kind == "linear" else None
