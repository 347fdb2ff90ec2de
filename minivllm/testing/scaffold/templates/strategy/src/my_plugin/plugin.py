"""Draw n samples of a prompt, and return the sample of the highest mean log-probability first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from minivllm.plugin import Branch, BranchEnd, DecodingStrategy, RequestError

if TYPE_CHECKING:
    from minivllm import SamplingParams


class MyPlugin(DecodingStrategy):
    """A strategy that ranks samples; failed and aborted samples come last."""

    def takes(self, params: SamplingParams) -> bool:
        return params.n > 1

    def start(self, params: SamplingParams) -> Sequence[Branch]:
        if params.n < 2:
            raise RequestError(f"n={params.n}: my-plugin ranks several samples, expected n of at least 2", "n")
        return tuple(Branch(i) for i in range(params.n))

    def topk(self, params: SamplingParams) -> int:
        return 0  # 0 candidates: only the log-probabilities of the chosen tokens

    def result(self, params: SamplingParams, ends: Sequence[BranchEnd]) -> Sequence[int]:
        return [end.sample for end in sorted(ends, key=rank)]


def rank(end: BranchEnd) -> tuple[bool, float, int]:
    """Return the sort key of a sample; the smallest is the best."""
    score = end.cumulative_logprob
    if score is None:
        mean = -math.inf
    else:
        mean = score / max(end.length, 1)
    return end.finish_reason in ("abort", "error"), -mean, end.sample
