"""Quantizers beyond small modules and steps, and what loading does to the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from . import quantizer_data as data
from .base import since

WIDE = (((3008, 1088), 64), ((16,), 9216))  # (rows of parts, inputs)
TOKENS = (1, 1200)


class QuantizerSizes:
    """Part of ``QuantizerConformance``."""

    if TYPE_CHECKING:
        checkpoint_tensors: Any
        info: Any
        loaded: Any
        quantized: Any
        scheme: Any
        _within: Any

    @since(1, 0)
    def test_large_modules_and_steps_lose_nothing(self) -> None:
        """4,096 outputs, 9,216 inputs, 1,200 tokens: no grid, tile or index ends before them."""
        infos = [self.info(rows, inp) for rows, inp in WIDE]
        for info in (i for i in infos if self.scheme(i) is not None):
            torch.manual_seed(9)
            scheme = self.loaded(info, torch.rand(info.out_features, info.in_features) + 0.5)
            assert scheme is not None
            for tokens in TOKENS:
                x = torch.zeros(tokens, info.in_features, dtype=getattr(torch, info.dtype), device=info.device)
                at = torch.arange(tokens) * 7 % info.in_features
                x[torch.arange(tokens), at] = 1  # rows of the identity: what is held comes out
                got = scheme.apply(x).cpu().double()
                first: dict[int, int] = {}
                for row, column in enumerate(at.tolist()):  # the same input gives the same outputs in every row
                    same = first.setdefault(column, row)
                    near = torch.allclose(got[row], got[same], rtol=1e-2, atol=1e-6)
                    assert near, f"{info.parts}, {tokens} tokens: token {row} differs from token {same}, its equal"
                lost = (got[0] == 0).float().mean()
                assert not lost, f"{info.parts}, {tokens} tokens: {100 * lost:.0f} % of the outputs are 0"
            last = torch.zeros(1, info.in_features, dtype=getattr(torch, info.dtype), device=info.device)
            last[0, -1] = 1
            assert (scheme.apply(last) != 0).all(), f"{info.in_features} inputs: the last one is lost"

    @since(1, 0)
    def test_loading_leaves_the_checkpoint_as_it_is(self) -> None:
        """A tensor may be another module's too (tied weights), or a file that is mapped into memory; it comes in any
        floating dtype, float64 among them, and not always contiguous."""
        for info in self.quantized():
            torch.manual_seed(10)
            weight = torch.randn(info.out_features, info.in_features)
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                scheme = self.scheme(info)
                assert scheme is not None
                for part, rows in data.by_part(weight, info).items():
                    for param, tensor in self._given(info, part, rows, dtype).items():
                        before = tensor.clone()
                        scheme.load(param, tensor, part)
                        assert torch.equal(tensor, before), f"load writes to {param} of part {part!r}, {dtype}"
                scheme.finish()
                if info.dtype == "float32":
                    held = weight.to(dtype) if self._plain(info) else weight  # who packs it had all of its bits
                    self._within(scheme, info, held.double(), f"a checkpoint in {dtype}")

    def _plain(self, info: Any) -> bool:
        """Whether a checkpoint has the weight itself."""
        part, rows = next(iter(data.by_part(torch.zeros(info.out_features, info.in_features), info).items()))
        made = self.checkpoint_tensors(info, part, rows)
        return set(made) == {"weight"} and made["weight"].is_floating_point()

    def _given(self, info: Any, part: str, rows: torch.Tensor, dtype: torch.dtype) -> Mapping[str, torch.Tensor]:
        """Tensors of a checkpoint, of which one that holds the weight itself has the dtype, and lies transposed."""
        made, plain = self.checkpoint_tensors(info, part, rows), self._plain(info)
        return {k: t.to(dtype).T.contiguous().T if plain else t for k, t in made.items()}
