"""Tests of a quantizer on the weights of mixture-of-experts layers and of an embedding."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from minivllm.core.interfaces.quantizer import WeightScheme

from . import quantizer_data as data
from .base import since

COUNT = 3  # experts


class QuantizerExperts:
    """The tests of experts and embeddings, a base class of ``QuantizerConformance``."""

    if TYPE_CHECKING:
        fill: Any
        info: Any
        loaded: Any
        quantized: Any
        scheme: Any
        spec: Any
        step: Any

    @since(1, 1)
    def test_each_expert_multiplies_by_its_own_rows(self) -> None:
        """Check that ``WeightScheme.expert`` multiplies by the rows of one expert.

        A module of kind "experts" holds the gate and up projections of all experts, or their down projections.
        """
        torch.manual_seed(7)
        tested = False
        for parts, inp in ((("gate", 32), ("up", 32)), 64), ((("", 64),), 32):
            tested |= self._check_experts(parts, inp)
        if not tested:
            pytest.skip("leaves experts as they are, or reads them from a checkpoint in its own format")

    def _check_experts(self, parts: tuple, inp: int) -> bool:
        """Check the products of an experts module; return False if it is left unquantized.

        ``parts`` has (name, output rows) of the parts of each expert, ``inp`` is the number of inputs.
        """
        names = [(f"{e}.{part}".rstrip("."), rows) for e in range(COUNT) for part, rows in parts]
        like = self.info((1,), inp, kind="experts", name="layers.3.mlp.experts.down", experts=COUNT)
        info = replace(like, parts=tuple(names))
        scheme = self.scheme(info)
        if scheme is None or "weight" not in scheme.params():
            return False
        weight = data.random_weight(info)
        backwards = reversed(data.by_part(weight, info).items())
        self.fill(scheme, info, dict(backwards))
        for e, rows in enumerate(weight.double().chunk(COUNT)):
            expert = self.info((len(rows),), inp)
            product = scheme.expert(data.identity(info), e)
            held = product.double().cpu().T.contiguous()
            tolerance = self.step(rows, expert) * 0.502 + 1e-6
            if info.dtype != "float32":
                tolerance = tolerance + 1e-2 * rows.abs()
            data.compare(held, rows, tolerance, expert, f"expert {e} of {COUNT}")
        return True

    @since(1, 6)
    def test_rows_that_are_gathered_are_those_that_it_multiplies_by(self) -> None:
        """Check that ``WeightScheme.gather`` returns rows of the held weight in the requested dtype.

        Row indices come in any order and repeated.  If products round ``x``, the rows are compared within that
        rounding.
        """
        torch.manual_seed(8)
        for info in self.quantized((((96,), 64), ((33,), 128))):
            scheme = self.loaded(info, data.random_weight(info))
            if type(scheme).gather is WeightScheme.gather:
                pytest.skip("gathers no rows: an embedding is left as it is")
            held = data.dequantized(scheme, info)
            ids = torch.tensor([5, 5, 0, info.out_features - 1, 7])
            want = held[ids]
            for dtype in (torch.float32, data.dtype_of(info)):
                got = scheme.gather(ids.to(info.device), dtype)
                assert got.shape == want.shape and got.dtype == dtype
                if "inputs" in self.spec.traits:
                    rounding = 0.02
                else:
                    rounding = 2 * torch.finfo(dtype).eps
                tolerance = want.abs().amax(1, keepdim=True) * rounding
                data.compare(got.double().cpu(), want, tolerance, info, f"rows in {dtype}")
