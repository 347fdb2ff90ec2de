"""Search with beams by the rules of transformers: each step keeps the ``beam_width`` most likely continuations.

    score of an output = sum of its log-probabilities / its tokens ** length_penalty      (end-of-sequence counts)

Among equal sums the earlier beam precedes, and within a beam the lower token id.  Among equal scores the output that
was found first precedes.  A continuation that ends becomes an output if it is among the ``beam_width`` most likely of
all continuations.  The best ``beam_width`` outputs are kept.  ``early_stopping`` decides when the search ends:

    True       as soon as there are ``beam_width`` outputs
    False      when the best beam, if it ended now, would score no better than the worst of the kept outputs.  This is a
               heuristic, since with length_penalty > 0 the beam may still reach a better score
    "never"    the same, but with the score at full length if length_penalty > 0, which rewards length
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
    """The decoding strategy for requests that set ``beam_width``: beam search, with one branch for each beam."""

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
    """The state of a search.

    ``sums`` are the sums of log-probabilities of the beams.  ``best`` holds (score, index) of each kept output,
    best first.
    """

    def __init__(self, width: int, penalty: float, early: bool | str, most: int) -> None:
        self.width = width
        self.penalty = penalty
        self.early = early
        self.most = most
        self.sums = np.zeros(1)
        self.best: list[tuple[float, int]] = []
        self.kept = 0

    def advance(self, grown: Sequence[Grown], ends: Callable[[int, int], bool]) -> Moves:
        total = np.concatenate([before + g.logprobs for before, g in zip(self.sums, grown, strict=True)])
        tokens = [g.tokens for g in grown]
        token = np.concatenate(tokens)
        branch = np.repeat(np.arange(len(grown)), list(map(len, tokens)))
        length = grown[0].length + 1
        go_on: list[Pick] = []
        sums: list[float] = []
        keep: list[Pick] = []
        order = np.argsort(-total, kind="stable")
        for rank, at in enumerate(order.tolist()):
            if len(go_on) == self.width and rank >= self.width:
                break
            b = int(branch[at])
            t = int(token[at])
            logprob = float(total[at])
            if not ends(b, t):
                if len(go_on) < self.width:
                    go_on.append(Pick(b, t))
                    sums.append(logprob)
            elif rank < self.width:
                keep.append(Pick(b, t, logprob / length**self.penalty))
        self.sums = np.array(sums)
        self.best += [(pick.score, number) for number, pick in enumerate(keep, self.kept)]
        self.best.sort(key=lambda output: (-output[0], output[1]))
        del self.best[self.width :]
        self.kept += len(keep)
        return Moves(go_on, keep, done=not go_on or not self._may_improve(length))

    def _may_improve(self, length: int) -> bool:
        if len(self.best) < self.width:
            return True
        if self.early is True:
            return False
        if self.early == "never" and self.penalty > 0:
            length = self.most
        worst, _ = self.best[-1]
        return float(self.sums[0]) / length**self.penalty > worst

    def result(self) -> Sequence[int]:
        return [number for _, number in self.best]
