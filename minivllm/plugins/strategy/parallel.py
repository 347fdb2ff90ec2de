"""n independent samples of one prompt that share its blocks, or the n likeliest of best_of samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from minivllm.core.interfaces.strategy import Branch, BranchEnd, DecodingStrategy
from minivllm.errors import RequestError

if TYPE_CHECKING:
    from minivllm.core.interfaces.params import SamplingParams


class Parallel(DecodingStrategy):
    """A strategy in which branch i draws with sample number i, and the answer has all branches in that order.

    With ``best_of`` > n the answer has the n branches with the highest cumulative log-probability, best first.
    Branches that failed or were aborted are last.
    """

    reads = frozenset({"best_of"})

    def takes(self, params: SamplingParams) -> bool:
        return params.beam_width is None

    def start(self, params: SamplingParams) -> Sequence[Branch]:
        if params.beam_width is not None:
            what = f"beam_width={params.beam_width}: the strategy 'parallel' draws; use 'beam'"
            raise RequestError(what, "beam_width")
        return tuple(Branch(i) for i in range(params.width))

    def topk(self, params: SamplingParams) -> int:
        return 0 if params.width > params.n else -1

    def result(self, params: SamplingParams, ends: Sequence[BranchEnd]) -> Sequence[int]:
        if params.width == params.n:
            return tuple(sorted(end.sample for end in ends))
        return tuple(end.sample for end in sorted(ends, key=_rank)[: params.n])


def _rank(end: BranchEnd) -> tuple[bool, float, int]:
    """Return the sort key of a branch; the best branch has the smallest key."""
    score = -math.inf if end.cumulative_logprob is None else end.cumulative_logprob
    return end.finish_reason in ("abort", "error"), -score, end.sample
