"""Predict the mean length of the answers so far.  Change ``output_tokens`` to make another predictor.

``request`` has the prompt's token ids, the client, the session and ``expected``, which the client sent.
"""

from __future__ import annotations

from typing import Any

from minivllm.plugin import Predictor, PredictorContext, RequestFacts


class MyPlugin(Predictor):
    """A predictor that learns one number."""

    def __init__(self, options: Any, ctx: PredictorContext) -> None:
        super().__init__(options, ctx)
        self.answers = 0  # answers that have ended
        self.tokens = 0  # their tokens

    def output_tokens(self, request: RequestFacts) -> float | None:
        if request.expected is not None:
            return request.expected
        return self.tokens / self.answers if self.answers else None

    def ended(self, request: RequestFacts, tokens: int, cut: bool) -> None:
        self.answers += 1
        self.tokens += tokens
