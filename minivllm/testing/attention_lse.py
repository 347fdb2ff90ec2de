"""Tests of ``lse``, the logarithm of the softmax denominator, which merges results over parts of a context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from minivllm.errors import MinivllmError

from .attention_world import World
from .base import since


class AttentionLse:
    """The tests of the output ``lse``, a base class of ``AttentionConformance``."""

    if TYPE_CHECKING:
        claims: Any
        need: Any
        plain: Any
        run: Any

    @since(1, 0)
    def test_lse_is_the_logarithm_of_the_denominator(self) -> None:
        """Check that lse is the natural logarithm of the denominator, float32 [T, heads].

        The denominator includes the sink, and its scores are scaled and soft-capped.
        """
        self.need("lse")
        rows = [(0, 5), (7, 1), (6, 4), (0, 1), (30, 1), (11, 9), (0, 20)]
        for more in ({}, {"window": 4}, {"sinks": True}, {"softcap": 2.0}, {"scale": 0.8}):
            if all(feature == "scale" or self.claims(feature) for feature in more):
                self.run(self.plain(**more), rows, lse=True)

    @since(1, 2)
    def test_answers_over_parts_of_a_context_merge_by_their_lse(self) -> None:
        """Check that attention over two parts of a context merges into attention over the whole context by ``lse``.

        Two rows have the query of a third row, and the first and the last part of its keys.  The sum of their outputs,
        weighted by exp(lse), is the output of the third row (Ring Attention, arXiv:2310.01889; FlashDecoding).
        """
        self.need("lse")
        total, first = 37, 13  # numbers of keys: of the whole context, and of its first part
        world = World(self, self.plain(), 3, total + 1)
        start, end, whole = (world.add() for _ in range(3))
        for seq, keys in ((start, slice(0, first)), (end, slice(first, total))):
            n = keys.stop - keys.start
            for part, source in zip((*seq.k, *seq.v), (*whole.k, *whole.v), strict=True):
                part[:n] = source[keys]
            for part, source in zip(seq.q, whole.q, strict=True):
                part[n - 1] = source[total - 1]
        world.step([(start, first - 1), (end, total - first - 1), (whole, total - 1)])
        for result in world.step([(start, 1), (end, 1), (whole, 1)], lse=True):
            assert result.lse is not None
            out = result.out.double()
            lse = result.lse.double()
            merged_lse = torch.logaddexp(lse[0], lse[1])
            weights = (lse[:2] - merged_lse).exp()
            merged = (weights[..., None] * out[:2]).sum(0)
            eps = torch.finfo(result.out.dtype).eps
            allowed = 1e-5 + 4 * eps * float(out.abs().max())
            out_error = float((merged - out[2]).abs().max())
            lse_error = float((merged_lse - lse[2]).abs().max())
            error = max(out_error, lse_error)
            assert error <= allowed, f"merged results are off by {error:.2g}; at most {allowed:.2g} is allowed"

    @since(1, 0)
    def test_an_output_that_is_not_claimed_is_refused(self) -> None:
        """Check that a back end that does not claim ``lse`` raises an error for the argument, such as PluginError."""
        if self.claims("lse"):
            pytest.skip("claimed: lse")
        world = World(self, self.plain(), 1, 4)
        rows = [(world.add(2), 1)]
        with pytest.raises((MinivllmError, NotImplementedError, ValueError)) as caught:
            world.step(rows, lse=True)
        assert str(caught.value).strip(), "lse is refused without a message"
