"""Convert token ids to text, for ``LLM``, ``AsyncLLM`` (``requests.Tracked``) and the server (``Stream``).

an engine's sink ──┐                                       ┌──► StreamOutput, RequestOutput
                   ├──► RequestText.accept ──► TextDelta ──┤
frames of a link ──┘      a SequenceText per sample        └──► TextPiece, read when the client is ready
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from minivllm.runtime.text.outputs import RequestMetrics, SequenceText, TextDelta

if TYPE_CHECKING:
    from minivllm.core.engine.scores import TokenLogprobs
    from minivllm.core.interfaces.finish import Finish
    from minivllm.core.interfaces.params import SamplingParams
    from minivllm.runtime.text.tokenizer import Tokenizer


class RequestText:
    """The text of one request: the text of each sample, the reasons why samples ended, and the samples of the answer.

    ``samples`` is the number of samples that may receive tokens.  ``arrival`` is in seconds of ``time.monotonic``.
    ``scored`` means that each ``SequenceText`` stores the requested log-probabilities; it is False in a subclass that
    stores them elsewhere.  ``marks`` maps token ids to the characters that stand for them in the text of each
    ``TextDelta`` (``marks.Marks``).

    Invariant: a sample is in ``open`` until it has a ``finish_reason``; its text does not change afterwards.  ``order``
    lists the samples of the answer, best first, once the request has ended.
    """

    def __init__(
        self,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        samples: int,
        arrival: float,
        scored: bool = True,
        marks: Mapping[int, str] | None = None,
    ) -> None:
        """Create an empty text for each sample."""
        self.params = params
        self.texts = [SequenceText(tokenizer, params, i, scored, marks) for i in range(samples)]
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
        """Add tokens to a sample.  Return the new text and whether the sample ended, or None if it had ended before.

        A stop string that is found in the text (``TextDelta.stopped``) ends the sample, whatever ``ended`` is.
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
        """Return the samples of the answer, best first.  While the request runs, these are its first ``n`` samples."""
        return self.texts[: self.params.n] if self.order is None else [self.texts[i] for i in self.order]

    @property
    def completion_tokens(self) -> int:
        """Return the number of tokens of all samples so far.  Tokens after a stop string do not count."""
        return sum(len(text.token_ids) for text in self.texts)
