"""From token ids to text, for every front door: ``LLM``, ``AsyncLLM`` (``requests.Tracked``), the server (``Stream``).

an engine's sink ──┐                                       ┌──► StreamOutput, RequestOutput
                   ├──► RequestText.accept ──► TextDelta ──┤
frames of a link ──┘      a SequenceText per sample        └──► TextPiece, read when the client is ready
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from minivllm.runtime.text.outputs import RequestMetrics, SequenceText, TextDelta

if TYPE_CHECKING:
    from minivllm.core.engine.scores import TokenLogprobs
    from minivllm.core.interfaces.finish import Finish
    from minivllm.core.interfaces.params import SamplingParams
    from minivllm.runtime.text.tokenizer import Tokenizer


class RequestText:
    """The text of one request: what its samples have said, why each ended, which of them are the answer.

    ``samples``: how many tokens may come for.  ``arrival``: seconds of ``time.monotonic``.  ``scored``: each
    ``SequenceText`` keeps the log-probabilities that were asked for; False where a subclass keeps them.

    Invariant: a sample is in ``open`` until it has a ``finish_reason``, and nothing is added to its text afterwards.
    ``order``: known once the request has ended, the samples of the answer, best first.
    """

    def __init__(
        self, params: SamplingParams, tokenizer: Tokenizer | None, samples: int, arrival: float, scored: bool = True
    ) -> None:
        self.params = params
        self.texts = [SequenceText(tokenizer, params, i, scored) for i in range(samples)]
        self.open = set(range(samples))
        self.order: list[int] | None = None
        self.metrics = RequestMetrics(arrival)

    def accept(
        self,
        sample: int,
        ids: Sequence[int],
        ended: Finish | None = None,
        logprobs: Sequence[TokenLogprobs] | None = None,
    ) -> TextDelta | None:
        """The text of new tokens of a sample, and why it ended if it did; None if it had ended before.

        A stop string that is found here (``TextDelta.stopped``) ends the sample whatever ``ended`` says.
        """
        if sample not in self.open:
            return None
        text = self.texts[sample]
        if ended is None:
            delta = text.feed(ids, False, False, logprobs)
        else:
            delta = text.feed(ids, True, ended.by_token, logprobs)
            text.finish(*ended)
        if text.finish_reason is not None:
            self.open.discard(sample)
        return delta

    @property
    def answer(self) -> list[SequenceText]:
        """The samples of the answer, best first; the first ``n`` as they are while the request runs."""
        return self.texts[: self.params.n] if self.order is None else [self.texts[i] for i in self.order]

    @property
    def completion_tokens(self) -> int:
        """Tokens of all samples so far; those behind a stop string are not counted."""
        return sum(len(text.token_ids) for text in self.texts)
