"""Tests of ``lse``, the logarithm of the softmax denominator, which merges results over parts of a context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from minivllm.errors import MinivllmError

from .attention_math import largest
from .attention_world import World, WorldSeq
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
        features = [{"window": 4}, {"sinks": True}, {"softcap": 2.0}]
        claimed = [more for more in features if self.claims(*more)]
        for more in ({}, {"scale": 0.8}, *claimed):
            setting = self.plain(**more)
            self.run(setting, rows, lse=True)

    @since(1, 2)
    def test_answers_over_parts_of_a_context_merge_by_their_lse(self) -> None:
        """Check that attention over two parts of a context merges into attention over the whole context by ``lse``.

        Two rows have the query of a third row, and the first and the last part of its keys.  The sum of their outputs,
        weighted by exp(lse), is the output of the third row (Ring Attention, arXiv:2310.01889; FlashDecoding).
        """
        self.need("lse")
        total = 37  # number of keys of the whole context
        first = 13  # number of keys of the first part of the context
        world = World(self, self.plain(), 3, total + 1)
        start = world.add()
        end = world.add()
        whole = world.add()
        _copy_part(whole, start, slice(0, first), total - 1)
        _copy_part(whole, end, slice(first, total), total - 1)
        seqs = (start, end, whole)
        lengths = (first, total - first, total)
        cached = [(seq, n - 1) for seq, n in zip(seqs, lengths, strict=True)]
        world.step(cached)
        last = [(seq, 1) for seq in seqs]
        for result in world.step(last, lse=True):
            assert result.lse is not None
            out = result.out.double()
            lse = result.lse.double()
            merged_lse = torch.logaddexp(lse[0], lse[1])
            weights = (lse[:2] - merged_lse).exp()
            weighted = weights[..., None] * out[:2]
            merged = weighted.sum(0)
            eps = torch.finfo(result.out.dtype).eps
            allowed = 1e-5 + 4 * eps * largest(out)
            out_error = largest(merged - out[2])
            lse_error = largest(merged_lse - lse[2])
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
            pytest.fail("forward() ignores lse: raise a PluginError if it is not None")
        assert str(caught.value).strip(), "lse is refused without a message"


def _copy_part(whole: WorldSeq, part: WorldSeq, keys: slice, query: int) -> None:
    """Give ``part`` some keys and values of the sequence ``whole``, and for its newest token a query of ``whole``."""
    n = keys.stop - keys.start
    for x, source in zip((*part.k, *part.v), (*whole.k, *whole.v), strict=True):
        x[:n] = source[keys]
    for x, source in zip(part.q, whole.q, strict=True):
        x[n - 1] = source[query]
