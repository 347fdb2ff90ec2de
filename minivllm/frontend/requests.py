"""A request of ``LLM`` or ``AsyncLLM``: its conversion for the engine, and the text that its caller receives."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from minivllm.core.engine.request import Request
from minivllm.core.interfaces.finish import Finish, FinishReason
from minivllm.core.interfaces.taps import KEPT
from minivllm.errors import RequestError, describe_error, shown
from minivllm.runtime.text.outputs import RequestMetrics, RequestOutput, StopProbe
from minivllm.validation import flaw

from .prompts import read_prompt, with_salt, with_token_ids
from .tap_values import kept_of, route_outputs, routes_of, values_of
from .text import RequestText

if TYPE_CHECKING:
    from minivllm.core.engine.engine import Engine
    from minivllm.core.engine.request import Seq
    from minivllm.core.interfaces.adapters import LoRARequest
    from minivllm.core.interfaces.params import SamplingParams
    from minivllm.core.interfaces.taps import Tap
    from minivllm.runtime.images.reader import ImageReader
    from minivllm.runtime.text.tokenizer import Tokenizer


@dataclass
class StreamOutput:
    """A piece of a stream: the new text (``delta``) and new tokens of sample ``index``.  The last piece of a request
    has ``finished`` set and contains the complete ``output``."""

    request_id: str
    index: int
    delta: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    finished: bool = False
    output: RequestOutput | None = None


class Tracked(RequestText):
    """A request of an engine in this process, and its text.  ``stream`` is called with a StreamOutput for each new
    piece.  ``done`` is called once after the request has ended."""

    def __init__(
        self,
        prompt: Any,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        request_id: str | None = None,
        stream: Callable[[StreamOutput], None] | None = None,
        done: Callable[[Tracked], None] | None = None,
        taps: tuple[Tap, ...] = (),
        lora: LoRARequest | None = None,
        reader: ImageReader | None = None,
    ) -> None:
        """Convert the prompt and the parameters.  RequestError if they are malformed."""
        if request_id is not None and flaw(request_id):
            raise RequestError(f"request_id={shown(request_id)}: expected Unicode text", "request_id")
        text, ids, salt, images = read_prompt(prompt, tokenizer, reader)
        params = with_salt(with_token_ids(params, tokenizer), salt)
        super().__init__(params, tokenizer, params.width, time.monotonic())
        self.stream, self.done = stream, done
        self.ended = False  # whether the last piece was passed on
        self._whole: RequestOutput | None = None  # the output of the ended request
        self._energy: Any = None  # energy.account.EnergyAccount
        # Some branches may not be outputs, so no output is streamed before all branches have ended.
        self.late = params.width > params.n or params.beam_width is not None
        self.request = Request(
            request_id or uuid.uuid4().hex,
            ids,
            params,
            self.metrics.arrival_time,
            text,
            watch=(stream is not None and not self.late) or bool(params.stop),
            completes=StopProbe(tokenizer, params) if params.beam_width is not None and params.stop else None,
            sink=self._sink,
            on_done=self._ended,
            taps=taps,
            lora=lora,
            images=images,
        )
        self.sequences = self.request.sequences  # the engine adds them; they stay when the request releases them

    def prepare(self, engine: Engine) -> None:
        """Compile the grammar of the request.  RequestError if the grammar is refused.

        It takes time, so it must not run on the engine's thread.
        """
        if self.needs_grammar:
            params = self.request.params
            engine.grammars.gates.add(self.request, engine.eos_ids, engine.capacity.vocab_size)
            self.request.grammar = engine.grammars.compile(params.structured_outputs, params.salt)

    @property
    def needs_grammar(self) -> bool:
        """Return whether the request has a grammar that is not compiled yet."""
        return self.request.params.structured_outputs is not None and self.request.grammar is None

    def add_to(self, engine: Engine) -> None:
        """Add the request to an engine.  RequestError if the engine refuses it."""
        self.prepare(engine)
        self._energy = engine.energy
        engine.add(self.request)

    def _sink(self, seq: Seq, ids: list[int], ended: Finish | None) -> str | None:
        """Receive new tokens from the engine.  Return the stop string that was found, or None."""
        before = len(self.texts[seq.sample].token_ids)
        logprobs = None if self.params.logprobs is None else seq.logprobs[before:]
        return self._take(seq.sample, ids, ended, logprobs)

    def _take(self, sample: int, ids: list[int], ended: Finish | None, logprobs: Any = None) -> str | None:
        """Add tokens to the text of a sample, and stream the new text.  Return the stop string that was found, or
        None."""
        delta = self.accept(sample, ids, ended, logprobs)
        if delta is None:
            return None
        if self.stream is not None and not self.late and (delta.used or delta.text):
            new, reason = ids[: delta.used], self.texts[sample].finish_reason
            self.stream(StreamOutput(self.request.id, sample, delta.text, new, reason))
        return delta.stopped

    def _ended(self, request: Request) -> None:
        """Finish the request after the engine has finished it.  If energy is counted, wait until its energy is
        known."""
        if self._energy is None:
            self._done(request)
        else:
            self._energy.when_known(request, partial(self._done, request))

    def _done(self, request: Request) -> None:
        """Finish the request.  If that fails, stream the error as the last piece, for which the reader waits."""
        self.ended = True
        try:
            self._finish(request)
        except BaseException as e:
            if self.stream is not None:
                error = f"its output could not be made: {describe_error(e)}"
                last = RequestOutput(request.id, request.text, request.prompt.tolist(), [], True, error=error)
                self.stream(StreamOutput(request.id, 0, "", [], "error", True, last))
            raise

    def _finish(self, request: Request) -> None:
        """Store the metrics and the output, end the texts of all samples, stream the last pieces and call ``done``.
        Then reference counts can free the request's sequences, which refer to the request."""
        self.order = [seq.sample for seq in request.answer]
        self.metrics = RequestMetrics(
            request.arrival,
            request.first_token,
            request.finished,
            request.cached_tokens,
            request.drafted,
            request.accepted,
            request.scheduled,
            None if request.energy is None else request.energy.joules,
        )
        for seq in request.sequences:
            text = self.texts[seq.sample]
            if seq.error is not None and text.finish_reason is not None:  # the strategy failed after the sample ended
                text.finish_reason = "error"
                text.stop_reason = None
            # A sample that is still open was aborted or failed.  Stream the text that was withheld.
            self._take(seq.sample, [], Finish(seq.finish_reason or "abort", seq.stop_reason))
        self._whole = whole = self.output()
        if self.stream is not None:
            for out in whole.outputs if self.late else ():
                self.stream(StreamOutput(request.id, out.index, out.text, out.token_ids, out.finish_reason))
            self.stream(StreamOutput(request.id, 0, "", [], self.texts[0].finish_reason, True, whole))
        if self.done is not None:
            self.done(self)
        request.release()

    def routes(self) -> list[tuple[Any, int]]:
        """Return (routes [positions, layers, k], experts of a layer) of each sequence whose routes were read."""
        found = []
        for seq in self.sequences:
            routes = routes_of(seq, seq.emitted or None)
            if routes is not None:
                assert seq.request.tapped is not None and seq.request.tapped.routes is not None
                found.append((routes, seq.request.tapped.routes.layers[0].experts))
        return found

    def output(self) -> RequestOutput:
        """Return the answer so far, with the values of taps and routes if the request reads them.  It is complete once
        the request has ended."""
        if self._whole is not None:
            return self._whole
        r = self.request
        outputs = [text.output() for text in self.answer]
        by_sample = {seq.sample: seq for seq in self.sequences}
        for out, text in zip(outputs, self.answer, strict=True):
            if text.index in by_sample:
                out.set_versions(by_sample[text.index].weights)
        if r.tapped is not None:
            for out, text in zip(outputs, self.answer, strict=True):
                seq, tokens = by_sample[text.index], len(text.token_ids) or None
                out.taps = values_of(seq, tokens)
                out.routes, out.route_counts = route_outputs(seq, tokens)
        if r.reads_kept:
            for out, text in zip(outputs, self.answer, strict=True):
                out.taps = {**(out.taps or {}), KEPT: kept_of(by_sample[text.index])}
        if self.late and self.order is not None:  # outputs are numbered by rank
            best = [by_sample[sample] for sample in self.order]
            outputs = [
                replace(out, index=i, score=s.score, cumulative_logprob=s.cumulative_logprob)
                for i, (out, s) in enumerate(zip(outputs, best, strict=True))
            ]
        error = next((s.error for s in self.sequences if s.error), None)
        scores = None
        if r.params.prompt_logprobs is not None:
            scores = self.texts[0].prompt_logprobs(r.prompt.tolist(), r.prompt_parts)
        done = r.finished is not None
        return RequestOutput(r.id, r.text, r.prompt.tolist(), outputs, done, self.metrics, error, scores)
