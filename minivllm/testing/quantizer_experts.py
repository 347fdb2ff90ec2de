"""What a quantizer makes of the weights of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from minivllm.core.interfaces.quantizer import ModuleInfo

from . import quantizer_data as data
from .base import since

COUNT = 3  # experts


class QuantizerExperts:
    """The test of experts; part of ``QuantizerConformance``."""

    if TYPE_CHECKING:
        info: Any
        scheme: Any
        fill: Any
        step: Any

    @since(1, 1)
    def test_each_expert_multiplies_by_its_own_rows(self) -> None:
        """``WeightScheme.expert``, of modules of kind "experts": gate and up of each expert, and its down."""
        torch.manual_seed(7)
        some = False
        for parts, inp in ((("gate", 32), ("up", 32)), 64), ((("", 64),), 32):
            names = tuple((f"{e}.{part}".rstrip("."), rows) for e in range(COUNT) for part, rows in parts)
            like = self.info((1,), inp, kind="experts", name="layers.3.mlp.experts.down", experts=COUNT)
            info = ModuleInfo(**{**vars(like), "parts": names})
            scheme = self.scheme(info)
            if scheme is None or "weight" not in scheme.params():
                continue
            some, weight = True, torch.randn(info.out_features, inp)
            given = data.by_part(weight, info)
            self.fill(scheme, info, dict(reversed(given.items())))
            one = torch.eye(inp, dtype=getattr(torch, info.dtype), device=info.device)
            for e, rows in enumerate(weight.double().chunk(COUNT)):
                mine = self.info((len(rows),), inp)
                held = scheme.expert(one, e).double().cpu().T.contiguous()
                near = self.step(rows, mine) * 0.502 + 1e-2 * rows.abs() * (info.dtype != "float32") + 1e-6
                data.compare(held, rows, near, mine, f"expert {e} of {COUNT}")
        if not some:
            pytest.skip("leaves experts as they are, or takes them from a checkpoint of its own")
