"""A request of ``LLM`` or ``AsyncLLM``: what the engine gets of it, and the text that its caller gets."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from minivllm.core.engine.request import Request
from minivllm.core.interfaces.finish import Finish, FinishReason
from minivllm.errors import RequestError, shown, told
from minivllm.plain import flaw
from minivllm.text.outputs import CompletionOutput, RequestMetrics, RequestOutput, SequenceText, StopProbe

from .prompts import read_prompt, with_token_ids

if TYPE_CHECKING:
    from minivllm.core.engine.engine import Engine
    from minivllm.core.engine.request import Seq
    from minivllm.core.interfaces.params import SamplingParams
    from minivllm.text.tokenizer import Tokenizer


@dataclass
class StreamOutput:
    """A piece of a stream: ``delta`` is the new text of sample ``index``, ``token_ids`` its new tokens.  The last piece
    of a request has ``finished`` set and carries the whole ``output``."""

    request_id: str
    index: int
    delta: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    finished: bool = False
    output: RequestOutput | None = None


class Tracked:
    """A request with its text side.  ``stream``: called with a StreamOutput for each piece as it comes."""

    def __init__(
        self, prompt: Any, params: SamplingParams, tokenizer: Tokenizer | None, request_id: str | None = None,
        stream: Callable[[StreamOutput], None] | None = None, done: Callable[[Tracked], None] | None = None,
    ) -> None:  # fmt: skip
        if request_id is not None and flaw(request_id):
            raise RequestError(f"request_id={shown(request_id)}: want Unicode text", "request_id")
        text, ids = read_prompt(prompt, tokenizer)
        params = with_token_ids(params, tokenizer)
        self.stream, self.done = stream, done
        self.texts = [SequenceText(tokenizer, params, i) for i in range(params.width)]
        # branches that may turn out to be no part of the answer: nothing is streamed before all have ended
        self.late = params.width > params.n or params.beam_width is not None
        self.engine: Engine | None = None
        self.request = Request(
            request_id or uuid.uuid4().hex,
            ids,
            params,
            arrival=time.monotonic(),
            text=text,
            watch=(stream is not None and not self.late) or bool(params.stop),
            completes=StopProbe(tokenizer, params) if params.beam_width is not None and params.stop else None,
            sink=self._sink,
            on_done=self._done,
        )

    def prepare(self, engine: Engine) -> None:
        """What takes time before the engine can have it, so not on the engine's thread: its grammar.  RequestError if
        that is refused."""
        params = self.request.params
        if params.structured_outputs is not None and self.request.grammar is None:
            self.request.grammar = engine.grammars.compile(params.structured_outputs, params.salt)

    def add_to(self, engine: Engine) -> None:
        """RequestError if the engine refuses it."""
        self.engine = engine
        self.prepare(engine)
        engine.add(self.request)

    def _sink(self, seq: Seq, ids: list[int], ended: Finish | None) -> str | None:
        text = self.texts[seq.sample]
        logprobs = seq.logprobs[len(text.token_ids) :] if self.request.params.logprobs is not None else None
        stop_token = ended is not None and ended.by_token
        delta = text.feed(ids, ended is not None, stop_token=stop_token, logprobs=logprobs)
        if ended is not None:
            text.finish(*ended)
        if self.stream is not None and not self.late and (delta.used or delta.text):
            new = ids[: delta.used]
            self.stream(StreamOutput(self.request.id, seq.sample, delta.text, new, text.finish_reason))
        return delta.stopped

    def _done(self, request: Request) -> None:
        try:
            self._finish(request)
        except BaseException as e:  # who reads a stream waits for its last piece, whatever became of the text
            if self.stream is not None:
                error = f"its output could not be made: {told(e)}"
                last = RequestOutput(request.id, request.text, request.prompt.tolist(), [], True, error=error)
                self.stream(StreamOutput(request.id, 0, "", [], "error", True, last))
            raise

    def _finish(self, request: Request) -> None:
        for seq in request.sequences:
            text = self.texts[seq.sample]
            if seq.error is not None and text.finish_reason is not None:  # its strategy failed on all that had ended
                text.finish_reason, text.stop_reason = "error", None
            if text.finish_reason is None:  # aborted or failed: what was held back comes out
                left = text.feed((), True)
                text.finish(seq.finish_reason or "abort", seq.stop_reason)
                if self.stream is not None and not self.late and left.text:
                    self.stream(StreamOutput(request.id, seq.sample, left.text, [], text.finish_reason))
        if self.stream is not None:
            for out in self.output().outputs if self.late else ():
                self.stream(StreamOutput(request.id, out.index, out.text, out.token_ids, out.finish_reason))
            reason = self.texts[0].finish_reason
            self.stream(StreamOutput(request.id, 0, "", [], reason, True, self.output()))
        if self.done is not None:
            self.done(self)

    def output(self) -> RequestOutput:
        """The answer so far; complete once the request is done."""
        r = self.request
        outputs: list[CompletionOutput]
        if r.finished is not None and self.engine is not None:
            answer = self.engine.answer(r)
            outputs = [self.texts[s.sample].output() for s in answer]
            if self.late:  # they were ranked
                outputs = [
                    replace(out, index=i, score=s.score, cumulative_logprob=s.cumulative_logprob)
                    for i, (out, s) in enumerate(zip(outputs, answer, strict=True))
                ]
        else:
            outputs = [t.output() for t in self.texts[: r.params.n]]
        error = next((s.error for s in r.sequences if s.error), None)
        metrics = RequestMetrics(
            r.arrival, r.first_token, r.finished, r.cached_tokens, r.drafted, r.accepted, r.scheduled
        )
        scores = None
        if r.params.prompt_logprobs is not None:
            scores = self.texts[0].prompt_logprobs(r.prompt.tolist(), r.prompt_parts)
        return RequestOutput(r.id, r.text, r.prompt.tolist(), outputs, r.finished is not None, metrics, error, scores)
