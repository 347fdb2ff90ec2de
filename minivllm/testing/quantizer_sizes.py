"""Tests of a quantizer on large modules and steps, and of the tensors of a checkpoint during a load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from . import quantizer_data as data
from .base import since

WIDE = (((3008, 1088), 64), ((16,), 9216))  # (output rows of each part, number of inputs) of large modules
TOKENS = (1, 1200)


class QuantizerSizes:
    """The tests of large sizes and of loading, a base class of ``QuantizerConformance``."""

    if TYPE_CHECKING:
        checkpoint_tensors: Any
        info: Any
        loaded: Any
        quantized: Any
        scheme: Any
        _within: Any

    @since(1, 0)
    def test_large_modules_and_steps_lose_nothing(self) -> None:
        """Check modules of 4,096 outputs and of 9,216 inputs, and steps of 1,200 tokens.

        No grid, tile or index may end before them.
        """
        infos = [self.info(rows, inp) for rows, inp in WIDE]
        for info in (i for i in infos if self.scheme(i) is not None):
            torch.manual_seed(9)
            # no format rounds an element to zero that is at least two thirds of the largest
            weight = torch.rand(info.out_features, info.in_features) / 2 + 1
            scheme = self.loaded(info, weight)
            for tokens in TOKENS:
                column = torch.arange(tokens) * 7 % info.in_features
                x = self._one_hot(column, info)
                got = scheme.apply(x).cpu().double()
                label = f"{info.parts}, {tokens} tokens"
                first: dict[int, int] = {}
                for row, at in enumerate(column.tolist()):  # equal inputs must have equal outputs in every row
                    same = first.setdefault(at, row)
                    near = torch.allclose(got[row], got[same], rtol=1e-2, atol=1e-6)
                    assert near, f"{label}: token {row} differs from token {same}, whose inputs are equal"
                lost = (got[0] == 0).float().mean()
                assert not lost, f"{label}: {100 * lost:.0f} % of the outputs are 0"
            last = self._one_hot(torch.tensor([info.in_features - 1]), info)
            assert (scheme.apply(last) != 0).all(), f"{info.in_features} inputs: the last input has no effect"

    def _one_hot(self, column: torch.Tensor, info: Any) -> torch.Tensor:
        """Return rows of the identity matrix, whose products are the columns ``column`` of the held weight."""
        x = torch.zeros(len(column), info.in_features, dtype=data.dtype_of(info), device=info.device)
        x[torch.arange(len(column)), column] = 1
        return x

    @since(1, 0)
    def test_loading_leaves_the_checkpoint_as_it_is(self) -> None:
        """Check that ``load`` does not write to the tensors of the checkpoint.

        A tensor may belong to another module too (tied weights), or lie in a mapped file.  Weights come in any
        floating dtype, also float64, and not always contiguous.
        """
        for info in self.quantized():
            torch.manual_seed(10)
            weight = data.random_weight(info)
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                self._load_as(info, weight, dtype)

    def _load_as(self, info: Any, weight: torch.Tensor, dtype: torch.dtype) -> None:
        """Load a weight from a checkpoint of a dtype, and check that its tensors stay the same.

        Plain weights come transposed, packed ones as they are.
        """
        scheme = self.scheme(info)
        plain = False
        for part, rows in data.by_part(weight, info).items():
            tensors = self.checkpoint_tensors(info, part, rows)
            plain = set(tensors) == {"weight"} and tensors["weight"].is_floating_point()
            for param, tensor in tensors.items():
                if plain:
                    tensor = tensor.to(dtype).T.contiguous().T
                before = tensor.clone()
                scheme.load(param, tensor, part)
                assert torch.equal(tensor, before), f"load writes to {param} of part {part!r}, {dtype}"
        scheme.finish()
        if info.dtype == "float32":
            # packed codes are written from the float32 weight
            written = weight.to(dtype) if plain else weight
            self._within(scheme, info, written.double(), f"a checkpoint in {dtype}")
