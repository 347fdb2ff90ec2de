"""What a quantizer makes of the weights of experts, and of an embedding's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from minivllm.core.interfaces.quantizer import ModuleInfo, WeightScheme

from . import quantizer_data as data
from .base import since

COUNT = 3  # experts


class QuantizerExperts:
    """The tests of experts and embeddings; part of ``QuantizerConformance``."""

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

    @since(1, 6)
    def test_rows_that_are_gathered_are_those_that_it_multiplies_by(self) -> None:
        """``WeightScheme.gather``, of any rows in any order and again: those of the weight that is held, in the dtype
        that is asked for; of what it multiplies by, where no rounding of ``x`` is between."""
        torch.manual_seed(8)
        for info in self.quantized((((96,), 64), ((33,), 128))):
            scheme = self.loaded(info, torch.randn(info.out_features, info.in_features))
            if scheme is None or type(scheme).gather is WeightScheme.gather:
                pytest.skip("gathers no rows: an embedding is left as it is")
            rounds = "inputs" in self.spec.traits
            held = data.dequantized(scheme, info)
            ids = torch.tensor([5, 5, 0, info.out_features - 1, 7])
            for dtype in (torch.float32, getattr(torch, info.dtype)):
                got = scheme.gather(ids.to(info.device), dtype)
                assert got.shape == (5, info.in_features) and got.dtype == dtype
                room = 0.02 if rounds else 2 * torch.finfo(dtype).eps
                near = held[ids].abs().amax(1, keepdim=True) * room
                data.compare(got.double().cpu(), held[ids], near.expand(5, -1), info, f"rows in {dtype}")
