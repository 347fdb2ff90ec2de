"""One sequence per request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from minivllm.core.interfaces.strategy import Branch, BranchEnd, DecodingStrategy
from minivllm.errors import RequestError

if TYPE_CHECKING:
    from minivllm.core.interfaces.params import SamplingParams


class Single(DecodingStrategy):
    """Runs one sequence per request (n = 1)."""

    def takes(self, params: SamplingParams) -> bool:
        return params.width == 1

    def start(self, params: SamplingParams) -> Sequence[Branch]:
        if params.n != 1:
            raise RequestError(f"n={params.n}: the strategy 'single' gives one output; use 'parallel'", "n")
        if params.width != 1:
            field = "best_of" if params.beam_width is None else "beam_width"
            raise RequestError(f"{field}={params.width}: the strategy 'single' has one branch", field)
        return (Branch(0),)

    def result(self, params: SamplingParams, ends: Sequence[BranchEnd]) -> Sequence[int]:
        return tuple(end.sample for end in ends)
