"""The memory of the weights, for ``minivllm explain quantizer``.  This module imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minivllm.device.loading.hf_config import open_checkpoint
from minivllm.device.loading.outline import outline
from minivllm.registry import build_part

if TYPE_CHECKING:
    from minivllm.core.interfaces.executor import Wiring

AS_THEY_COME = "as in the checkpoint; minivllm bench memory reports their size once they are loaded"


def weights_explained(wiring: Wiring, sm: int) -> list[tuple[str, str]]:
    """Return (name, sentence) pairs that describe the weights of the chosen plug-ins.

    ``sm`` is the compute capability times 10, such as 90, and 0 on a CPU.  The size of a quantized checkpoint is not
    computed; the sentence refers to ``minivllm bench memory``.
    """
    cfg = open_checkpoint(wiring.model_dir, overrides=wiring.hf_overrides).hf_config()
    if getattr(cfg, "quantization_config", None):
        return [("weights", AS_THEY_COME)]
    arch = build_part("model", wiring.parts["model"])
    quantizer = build_part("quantizer", wiring.parts["quantizer"], None)
    return outline(arch, cfg, quantizer, wiring.dtype, wiring.max_model_len, wiring.device, sm)
