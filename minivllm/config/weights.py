"""What the weights that a configuration chose would take, for ``minivllm explain quantizer``: imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minivllm.device.loading.hf_config import open_checkpoint
from minivllm.device.loading.outline import outline
from minivllm.registry import build_part

if TYPE_CHECKING:
    from minivllm.core.interfaces.executor import Wiring

AS_THEY_COME = "as the checkpoint has them; what they take once they are loaded minivllm bench memory says"


def weights_explained(wiring: Wiring, sm: int) -> list[tuple[str, str]]:
    """(what, sentence); ``sm`` as in ``hardware.Device``.  Of a checkpoint that comes quantized its files say it."""
    cfg = open_checkpoint(wiring.model_dir, overrides=wiring.hf_overrides).hf_config()
    if getattr(cfg, "quantization_config", None):
        return [("weights", AS_THEY_COME)]
    arch, quantizer = (build_part(kind, wiring.parts[kind], *more) for kind, *more in (("model",), ("quantizer", None)))
    return outline(arch, cfg, quantizer, wiring.dtype, wiring.max_model_len, wiring.device, sm)
