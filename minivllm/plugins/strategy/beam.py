"""Beam search with transformers' rules: after each step the ``beam_width`` likeliest continuations go on.

    score of an output = sum of its log-probabilities / its tokens ** length_penalty      (end-of-sequence counts)

Of equal sums the one of the earlier beam goes first, in a beam the lower id; of equal scores the output found first.
A continuation that ends is an output perhaps if it is among the ``beam_width`` likeliest of all, those that end
included; the best ``beam_width`` outputs are kept.  The search ends once none of the beams can better them:

    early_stopping=True       as soon as there are ``beam_width`` outputs
    early_stopping=False      when the best beam, ended now, would score no better than the worst of them (a heuristic:
                              with length_penalty > 0 it might still come to more)
    early_stopping="never"    the same, but ended at its full length where length_penalty > 0, which rewards length
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from minivllm.core.interfaces.strategy import Branch, DecodingStrategy, Grown, Moves, Pick, Search
from minivllm.errors import RequestError

if TYPE_CHECKING:
    from minivllm.core.interfaces.params import SamplingParams


class Beam(DecodingStrategy):
    """Takes requests with ``beam_width``."""

    mode = "stepwise"
    reads = frozenset({"beam_width"})

    def takes(self, params: SamplingParams) -> bool:
        return params.beam_width is not None

    def start(self, params: SamplingParams) -> Sequence[Branch]:
        if params.beam_width is None:
            raise RequestError("beam_width is not set: the strategy 'beam' is for requests that set it", "beam_width")
        return tuple(Branch(i) for i in range(params.beam_width))

    def topk(self, params: SamplingParams) -> int:
        return params.beam_width or 1

    def search(self, params: SamplingParams, most: int) -> BeamSearch:
        return BeamSearch(params.beam_width or 1, params.length_penalty, params.early_stopping, most)


class BeamSearch(Search):
    """``sums`` are those of the beams; ``best`` holds (score, number) of the outputs, best first."""

    def __init__(self, width: int, penalty: float, early: bool | str, most: int) -> None:
        self.width, self.penalty, self.early, self.most = width, penalty, early, most
        self.sums = np.zeros(1)
        self.best: list[tuple[float, int]] = []
        self.kept = 0

    def advance(self, grown: Sequence[Grown], ends: Callable[[int, int], bool]) -> Moves:
        total = np.concatenate([before + g.logprobs for before, g in zip(self.sums, grown, strict=True)])
        token = np.concatenate([g.tokens for g in grown])
        branch = np.repeat(np.arange(len(grown)), [len(g.tokens) for g in grown])
        length = grown[0].length + 1
        go_on: list[Pick] = []
        sums: list[float] = []
        keep: list[Pick] = []
        for rank, at in enumerate(np.argsort(-total, kind="stable").tolist()):
            if len(go_on) == self.width and rank >= self.width:
                break
            b, t = int(branch[at]), int(token[at])
            if not ends(b, t):
                if len(go_on) < self.width:
                    go_on.append(Pick(b, t))
                    sums.append(float(total[at]))
            elif rank < self.width:
                keep.append(Pick(b, t, float(total[at]) / length**self.penalty))
        self.sums = np.array(sums)
        self.best += [(p.score, self.kept + i) for i, p in enumerate(keep)]
        self.best.sort(key=lambda found: (-found[0], found[1]))
        del self.best[self.width :]
        self.kept += len(keep)
        return Moves(go_on, keep, done=not go_on or not self._may_improve(length))

    def _may_improve(self, length: int) -> bool:
        if len(self.best) < self.width:
            return True
        if self.early is True:
            return False
        reach = self.most if self.early == "never" and self.penalty > 0 else length
        return float(self.sums[0]) / reach**self.penalty > self.best[-1][0]

    def result(self) -> Sequence[int]:
        return [number for _, number in self.best]
