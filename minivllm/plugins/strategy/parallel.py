"""n independent samples of one prompt, whose blocks they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from minivllm.core.interfaces.strategy import Branch, BranchEnd, DecodingStrategy

if TYPE_CHECKING:
    from minivllm.core.request import SamplingParams


class Parallel(DecodingStrategy):
    """Branch i draws with sample number i; the answer is all of them, in that order."""

    def start(self, params: SamplingParams) -> Sequence[Branch]:
        return tuple(Branch(i) for i in range(params.n))

    def result(self, params: SamplingParams, ends: Sequence[BranchEnd]) -> Sequence[int]:
        return tuple(sorted(end.sample for end in ends))
