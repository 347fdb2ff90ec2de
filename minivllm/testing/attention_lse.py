"""The logarithm of the softmax's denominator, by which answers over parts of a context are merged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from minivllm.errors import MinivllmError

from .attention_world import World
from .base import since


class AttentionLse:
    """Part of ``AttentionConformance``."""

    if TYPE_CHECKING:
        claims: Any
        need: Any
        plain: Any
        run: Any

    @since(1, 0)
    def test_lse_is_the_logarithm_of_the_denominator(self) -> None:
        """Natural logarithm, float32 [T, heads], the sink included, after scale and soft cap."""
        self.need("lse")
        rows = [(0, 5), (7, 1), (6, 4), (0, 1), (30, 1), (11, 9), (0, 20)]
        for more in ({}, {"window": 4}, {"sinks": True}, {"softcap": 2.0}, {"scale": 0.8}):
            if all(feature == "scale" or self.claims(feature) for feature in more):
                self.run(self.plain(**more), rows, lse=True)

    @since(1, 2)
    def test_answers_over_parts_of_a_context_merge_by_their_lse(self) -> None:
        """The keys of a row are dealt to two rows with its query: their answers, weighed by exp(lse), are its own (Ring
        Attention, arXiv:2310.01889; FlashDecoding's reduction)."""
        self.need("lse")
        whole, first = 37, 13
        world = World(self, self.plain(), 3, whole + 1)
        a, b, both = (world.add() for _ in range(3))
        for seq, keys in ((a, slice(0, first)), (b, slice(first, whole))):
            for mine, theirs in zip((*seq.k, *seq.v), (*both.k, *both.v), strict=True):
                mine[: keys.stop - keys.start] = theirs[keys]
            for mine, theirs in zip(seq.q, both.q, strict=True):
                mine[keys.stop - keys.start - 1] = theirs[whole - 1]
        world.step([(a, first - 1), (b, whole - first - 1), (both, whole - 1)])
        for got in world.step([(a, 1), (b, 1), (both, 1)], lse=True):
            assert got.lse is not None
            out, lse = got.out.double(), got.lse.double()
            total = torch.logaddexp(lse[0], lse[1])
            merged = sum((lse[i] - total).exp()[:, None] * out[i] for i in range(2))
            near = 1e-5 + 4 * torch.finfo(got.out.dtype).eps * float(out.abs().max())
            error = max(float((merged - out[2]).abs().max()), float((total - lse[2]).abs().max()))
            assert error <= near, f"merged answers are off by {error:.2g}; want at most {near:.2g}"

    @since(1, 0)
    def test_an_output_that_is_not_claimed_is_refused(self) -> None:
        """Raise a PluginError rather than leave the caller's tensor as it is."""
        if self.claims("lse"):
            pytest.skip("claimed: lse")
        world = World(self, self.plain(), 1, 4)
        rows = [(world.add(2), 1)]
        with pytest.raises((MinivllmError, NotImplementedError, ValueError)) as caught:
            world.step(rows, lse=True)
        assert str(caught.value).strip(), "lse is refused without words"
