"""Between a front door and the engine: prompts to requests, sequences to text, and the engine built from a config."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.core.engine.request import Request
from minivllm.core.interfaces.finish import Finish, FinishReason, eos_within
from minivllm.core.interfaces.grammar import GrammarContext
from minivllm.core.interfaces.params import SamplingParams
from minivllm.errors import RequestError, shown, told
from minivllm.plain import flaw
from minivllm.text.outputs import CompletionOutput, RequestMetrics, RequestOutput, SequenceText, StopProbe

if TYPE_CHECKING:
    from minivllm.config import EngineConfig, Loaded
    from minivllm.config.resolve import Resolved
    from minivllm.core.engine.engine import Engine
    from minivllm.core.engine.request import Seq
    from minivllm.core.interfaces.executor import Part
    from minivllm.structured.service import Grammars, NoGrammars
    from minivllm.text.tokenizer import Tokenizer

MOST_WORDS = 1024  # in ``bad_words`` that are looked at here; more are refused by who reads them


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


def build_engine(loaded: Loaded) -> tuple[Engine, Resolved, Tokenizer | None]:
    """Choose the parts, load the model, start the executor."""
    from minivllm.config.resolve import resolve
    from minivllm.core.engine.engine import Engine
    from minivllm.core.engine.parts import CacheOptions, EngineParts
    from minivllm.core.functions.host_rows import HostDraw
    from minivllm.core.worker.build import make_processors
    from minivllm.hooks.bridge import EngineHooks
    from minivllm.hooks.manager import HookManager
    from minivllm.registry import Catalog, build_part
    from minivllm.text.tokenizer import configured_eos, load_tokenizer

    config = loaded.engine
    resolved = resolve(config, Catalog.discover(), loaded.origins)
    model_dir = resolved.wiring.model_dir
    folder = config.tokenizer or model_dir
    tokenizer = None if config.skip_tokenizer_init else load_tokenizer(folder, config.chat_template)
    eos_ids = tuple(configured_eos(Path(model_dir))) if tokenizer is None else tokenizer.eos_ids
    wiring = replace(resolved.wiring, eos_ids=eos_ids)
    parts = resolved.parts
    hooks = HookManager.make(resolved.hooks) if resolved.hooks else None  # a wrong one is refused before a model loads
    grammars: Any = None
    executor = build_part("executor", parts["executor"])
    try:
        capacity = executor.start(wiring)
        notes = tuple(("capacity", note) for note in capacity.notes)
        resolved = replace(resolved, wiring=wiring, notes=(*resolved.notes, *notes))
        grammars = make_grammars(config, parts.get("grammar"), tokenizer, eos_ids, capacity.vocab_size)
        engine = Engine(
            wiring,
            executor,
            capacity,
            EngineParts(
                policy=lambda ctx: build_part("scheduler", parts["scheduler"], ctx),
                evictor=lambda ctx: build_part("evictor", parts["evictor"], ctx),
                processors=make_processors(wiring, capacity.vocab_size),
                strategies=[(p.name, build_part("strategy", p)) for p in resolved.strategies],
                host_sampler=HostDraw,
                grammars=grammars,
            ),
            CacheOptions(resolved.windows, config.enable_prefix_caching, config.partial_prefix_hits),
        )
        if config.grammar.name != "auto":  # who names one means to use it
            grammars.warm()
        if hooks is not None:
            EngineHooks(hooks, {seam: part.name for seam, part in parts.items()}, engine).started()
    except BaseException:
        executor.stop()  # what it had taken is given back
        if grammars is not None:
            grammars.close()
        raise
    return engine, resolved, tokenizer


def make_grammars(
    config: EngineConfig, part: Part | None, tokenizer: Tokenizer | None, eos_ids: Sequence[int], width: int
) -> Grammars | NoGrammars:
    """Who compiles for structured output, or says why nobody does."""
    from minivllm.config.resolve import NO_GRAMMAR
    from minivllm.structured.service import Grammars, NoGrammars, default_threads
    from minivllm.text.vocabulary import token_bytes

    eos = eos_within(eos_ids, width)
    if part is None:
        return NoGrammars(NO_GRAMMAR)
    if tokenizer is None:
        return NoGrammars("needs the vocabulary of the tokenizer; drop skip_tokenizer_init")
    if not eos:
        return NoGrammars("needs an end-of-sequence token, by which an answer ends, and the model names none")

    def context() -> GrammarContext:
        return GrammarContext(token_bytes(tokenizer, width), width, eos, default_threads())

    return Grammars(
        part,
        context,
        config.grammar_compile_seconds,
        config.grammar_compile_mb,
        config.grammar_cache_mb << 20,
        config.grammar_workers,
    )


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


def read_prompt(prompt: Any, tokenizer: Tokenizer | None) -> tuple[str | None, np.ndarray]:
    """(text, ids i32) of a prompt: a string, token ids, or a mapping with ``prompt`` or ``prompt_token_ids``."""
    text = None
    if isinstance(prompt, Mapping):
        ids = prompt.get("prompt_token_ids")
        if ids is not None:
            text, prompt = prompt.get("prompt"), ids
        elif "prompt" in prompt:
            prompt = prompt["prompt"]
        else:
            raise RequestError(
                f"a prompt with the keys {sorted(map(str, prompt))}; want 'prompt' or 'prompt_token_ids'", "prompt"
            )
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError("a text prompt needs a tokenizer; pass token ids or drop skip_tokenizer_init", "prompt")
        text, prompt = prompt, tokenizer.encode(prompt)
    try:
        array = np.asarray(prompt)
    except ValueError:  # lists of unequal length
        array = np.empty(1, object)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise RequestError(f"a prompt of {type(prompt).__name__}; want a string or a list of whole token ids", "prompt")
    if array.size and (array.max() >= 2**31 or array.min() < -(2**31)):
        raise RequestError("prompt: a token id does not fit 32 bits", "prompt")
    return text, array.astype(np.int32)


def with_token_ids(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """The parameters with token ids in place of the words in ``bad_words``: as they are spelt at the beginning of a
    text and after a space, which most vocabularies tell apart."""
    words = params.bad_words
    if not isinstance(words, (list, tuple)) or not any(isinstance(word, str) for word in words[:MOST_WORDS]):
        return params
    if tokenizer is None:
        raise RequestError(
            "bad_words: words need a tokenizer; give token ids, or drop skip_tokenizer_init", "bad_words"
        )
    found: dict[tuple[Any, ...], None] = {}
    for word in words[:MOST_WORDS]:
        if not isinstance(word, str):
            found[tuple(word) if isinstance(word, (list, tuple, np.ndarray)) else (word,)] = None
            continue
        if not word.strip() or len(word) > 256:
            raise RequestError(f"bad_words: the word {shown(word)}: want text of at most 256 characters", "bad_words")
        try:
            for text in (word, " " + word.lstrip()):
                found[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
        except RequestError as e:
            raise RequestError(f"bad_words: the word {shown(word)}: {e}", "bad_words") from e
    return replace(params, bad_words=(*found, *words[MOST_WORDS:]))


def is_one_prompt(prompts: Any) -> bool:
    """A single prompt rather than a list of them."""
    if isinstance(prompts, (str, Mapping)):
        return True
    if isinstance(prompts, np.ndarray):
        return prompts.ndim == 1
    return bool(prompts) and isinstance(prompts, Sequence) and all(isinstance(p, (int, np.integer)) for p in prompts)


def params_for(params: Any, n: int) -> list[SamplingParams]:
    """One SamplingParams per prompt from one, a list of them, a mapping, or None."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, Mapping):
        params = SamplingParams.make(**{str(name): value for name, value in params.items()})
    if isinstance(params, SamplingParams):
        return [params] * n
    if isinstance(params, str) or not isinstance(params, Sequence):
        raise RequestError(
            f"sampling_params of {type(params).__name__}; want SamplingParams or a list", "sampling_params"
        )
    made = [p if isinstance(p, SamplingParams) else SamplingParams.make(**(p or {})) for p in params]
    if len(made) != n:
        raise RequestError(f"{len(made)} sampling_params for {n} prompts; want one, or one each", "sampling_params")
    return made
