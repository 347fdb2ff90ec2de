"""The synchronous interface: prompts in, outputs back.  The caller's thread runs the engine."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from minivllm.core.external_calls import refuse_within
from minivllm.errors import RequestError, shown, suggest

from .front_door import FrontDoor
from .loop import LOOK, settles

if TYPE_CHECKING:
    import numpy as np

    from minivllm.core.engine.request import Request
    from minivllm.core.interfaces.params import SamplingParams
    from minivllm.registry import Selection
    from minivllm.runtime.images.reader import ImageReader
    from minivllm.runtime.text.embeddings import EmbeddingRequestOutput, ScoringRequestOutput
    from minivllm.runtime.text.outputs import RequestOutput
    from minivllm.runtime.text.tokenizer import Tokenizer

    from .requests import StreamOutput, Tracked


def render_chat(
    tokenizer: Any,
    messages: Any,
    add_generation_prompt: bool | None = None,
    split_special_tokens: bool = True,
    *,
    continue_final_message: bool = False,
    tools: Any = None,
    documents: Any = None,
    chat_template: str | None = None,
    chat_template_kwargs: Any = None,
    reader: ImageReader | None = None,
) -> dict[str, Any]:
    """Return a conversation as a prompt, rendered by the model's chat template.  The arguments are those of
    ``LLM.chat``.  ``reader`` None means that images are refused.

    RequestError if there is no template, or if the messages are malformed.
    """
    if tokenizer is None:
        raise RequestError("chat needs a tokenizer; drop skip_tokenizer_init", "messages")
    options: dict[str, Any] = {
        "tools": tools,
        "documents": documents,
        "chat_template": chat_template,
        "continue_final_message": continue_final_message,
        "variables": chat_template_kwargs,
    }
    messages, images = (messages, []) if reader is None else reader.take(messages)
    more = {"multi_modal_data": {"image": images}} if images else {}
    if split_special_tokens:
        prompt = tokenizer.chat_prompt(messages, add_generation_prompt, **options)
        return {"prompt": prompt.text, "prompt_token_ids": tokenizer.encode_chat(prompt), **more}
    text = tokenizer.apply_chat_template(messages, add_generation_prompt, tokenize=False, **options)
    return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False), **more}


TEMPLATE_KEYWORDS = ("continue_final_message", "tools", "documents", "chat_template", "chat_template_kwargs")


def check_template_keywords(names: Iterable[str], others: Sequence[str] = ()) -> None:
    """Check the keywords of a chat.  RequestError for a keyword that is not in ``TEMPLATE_KEYWORDS`` or ``others``."""
    accepted = (*TEMPLATE_KEYWORDS, *others)
    for name in names:
        if name not in accepted:
            hint = CHAT_HINTS.get(name) or f"expected {', '.join(accepted)}.{suggest(name, accepted)}"
            raise RequestError(f"chat: unknown keyword {shown(name)}; {hint}", name)


# keywords of vLLM's ``LLM.chat`` and of other libraries that this engine does not have -> hint
CHAT_HINTS = {
    "mm_processor_kwargs": "leave it out; images are processed with the settings of the checkpoint",
    "chat_template_content_format": "the content format is determined from the text of the template",
    "enable_thinking": "pass it in chat_template_kwargs",
    "tokenize": "the prompt is always tokenized; see LLM.tokenizer.apply_chat_template",
}


class LLM(FrontDoor):
    """An engine for one thread (``AsyncLLM`` serves many): ``LLM(model="pocket")``, ``LLM(config="exp.toml")``,
    ``LLM(model=..., attention="sdpa", scheduler={"name": "fcfs", "options": {...}})``.

    Options are the fields of ``EngineConfig``.  ``record`` is a .json file that ``close`` writes.  It contains the bill
    of materials, the results, and the requests, so that ``minivllm run`` can run them again.  Use ``LLM`` as a context
    manager, or call ``close``.
    """

    def __init__(
        self, model: Any = None, *, config: Any = None, record: str | os.PathLike[str] | None = None, **options: Any
    ) -> None:
        """Build the engine."""
        super().__init__(model, config, record, options)
        # ids of requests whose stream was deleted during a step; they are aborted after it
        self._abandoned: deque[str] = deque()

    # ---- generation ----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Any = None,
        sampling_params: Any = None,
        use_tqdm: bool = True,
        taps: Any = None,
        lora_request: Any = None,
        **other: Any,
    ) -> list[RequestOutput]:
        """Complete prompts and return the outputs in the order of the prompts.

        ``prompts`` is a string, token ids, ``{"prompt_token_ids": [...]}``, or a list of these.  ``sampling_params`` is
        a SamplingParams, or a list with one for each prompt.  ``taps`` is a list of ``Tap`` for all prompts, or a list
        of such lists.  ``lora_request`` is a LoRARequest for all prompts, or a list with one or None for each prompt.
        Other keywords of vLLM are accepted if they are None (``prompt_adapter_request=None``).

        RequestError if a prompt is refused; then nothing runs.  A request that fails later has finish_reason "error"
        and a message in ``error``.
        """
        from .prompts import adapters_for, check_call, is_one_prompt, params_for, taps_for, tokenized
        from .requests import Tracked

        check_call(other, ("prompts", "sampling_params", "use_tqdm", "taps", "lora_request"))
        if hasattr(prompts, "tolist"):  # a tensor or an array is converted to lists
            prompts = prompts.tolist()
        single = is_one_prompt(prompts)
        if not single and not isinstance(prompts, Iterable):
            raise RequestError(
                f"prompts of {type(prompts).__name__}; expected a string, token ids, or a list", "prompt"
            )
        items = [prompts] if single else list(prompts)
        params = params_for(self._params_or_default(sampling_params), len(items))
        all_taps = taps_for(taps, len(items))
        adapters = adapters_for(lora_request, len(items))
        items = tokenized(items, self.tokenizer)
        bar = _bar(len(items)) if use_tqdm else None
        done = None if bar is None else lambda _: bar.update(1)
        tracked = [
            Tracked(prompt, params_, self.tokenizer, done=done, taps=taps_, lora=lora, reader=self.images)
            for prompt, params_, taps_, lora in zip(items, params, all_taps, adapters, strict=True)
        ]
        with contextlib.nullcontext() if bar is None else bar:
            self._run(tracked)
        return [t.output() for t in tracked]

    def embed(
        self,
        prompts: Any,
        pooling: str = "auto",
        normalize: bool = True,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        **other: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Embed prompts: pool the output of the model's last norm over the tokens of each prompt.

        ``prompts`` is as in ``generate``.  ``pooling`` is "mean", "last" or "cls" (the first token); "auto" uses the
        checkpoint's sentence-transformers files if it has them, else "last".  ``dimensions`` keeps the first values.
        ``normalize`` then scales the vector to length 1.  ``truncate_prompt_tokens`` keeps the last tokens of a prompt;
        -1 keeps as many as the context holds.

        RequestError if a prompt is refused; then nothing runs.  A request that fails later has an empty embedding and a
        message in ``error``.
        """
        from . import embedding

        embedding.check_keywords("embed", other, embedding.KEYWORDS)
        options = embedding.EmbedOptions.of(self, pooling, normalize, dimensions, truncate_prompt_tokens)
        items = embedding.listed(prompts)
        bar = _bar(len(items)) if use_tqdm else None
        done = None if bar is None else lambda _: bar.update(1)
        tracked = embedding.embed_requests(self, items, options, done)
        with contextlib.nullcontext() if bar is None else bar:
            self._run(tracked)
        return [embedding.embedding_output(t, options) for t in tracked]

    def score(
        self,
        text_1: Any,
        text_2: Any,
        pooling: str = "auto",
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        **other: Any,
    ) -> list[ScoringRequestOutput]:
        """Return the similarity of texts: the cosine of the angle between their embeddings.

        Each text is a prompt or a list of prompts.  One prompt in ``text_1`` is compared with each in ``text_2``; lists
        of equal length are compared pair by pair.  The other arguments are those of ``embed``.  RequestError if a
        prompt is refused, and PluginError if an embedding fails.
        """
        from . import embedding

        accepted = ("text_1", "text_2", "pooling", "truncate_prompt_tokens", "use_tqdm")
        embedding.check_keywords("score", other, accepted)
        prompts, index = embedding.unique_texts(*embedding.paired(text_1, text_2))
        cut = truncate_prompt_tokens
        outputs = self.embed(prompts, pooling, truncate_prompt_tokens=cut, use_tqdm=use_tqdm)
        return embedding.score_outputs(outputs, index)

    def chat(
        self,
        messages: Any,
        sampling_params: Any = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool | None = None,
        split_special_tokens: bool = True,
        taps: Any = None,
        lora_request: Any = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation ([{"role": ..., "content": ...}, ...]), or a list of conversations, with the chat
        template.

        ``tools`` is a list of functions as JSON schemas, and ``documents`` a list of mappings.  ``chat_template`` is
        the name of one of the model's templates, or the text of a template; ``chat_template_kwargs`` are its variables.
        ``continue_final_message`` continues the last message; it requires that ``add_generation_prompt`` is None or
        False.  ``taps`` and ``lora_request`` are as in ``generate``.

        Text in a message that looks like a special token remains text, so that no message can end its turn.  With
        ``split_special_tokens=False`` it becomes the special token, as in transformers' ``apply_chat_template``.
        RequestError for other keywords, and for malformed messages.
        """
        check_template_keywords(template)
        many = bool(messages) and isinstance(messages, Sequence) and all(isinstance(m, (list, tuple)) for m in messages)
        prompts = [
            render_chat(
                self.tokenizer,
                conversation,
                add_generation_prompt,
                split_special_tokens,
                **template,
                reader=self.images,
            )
            for conversation in (messages if many else [messages])
        ]
        return self.generate(prompts, sampling_params, use_tqdm, taps, lora_request)

    def stream(
        self, prompt: Any, sampling_params: Any = None, taps: Any = None, lora_request: Any = None
    ) -> OutputStream:
        """Return an iterator over pieces of one answer, as tokens are generated.

        Leaving the loop early, or ``close``, aborts the request.  ``taps`` is a list of ``Tap``; their values are in
        the last piece.  ``lora_request`` is a LoRARequest or None.
        """
        from .prompts import adapters_for, params_for, taps_for
        from .requests import Tracked

        pieces: deque[StreamOutput] = deque()
        params = params_for(self._params_or_default(sampling_params), 1)[0]
        tap_list, lora = taps_for(taps, 1)[0], adapters_for(lora_request, 1)[0]
        tracked = Tracked(
            prompt, params, self.tokenizer, stream=pieces.append, taps=tap_list, lora=lora, reader=self.images
        )
        refuse_within(self.engine.within, "stream")
        self._recorder.tally.next_batch()
        tracked.prepare(self.engine)
        with uninterrupted():
            tracked.add_to(self.engine)
            self._recorder.tally.watch(tracked)
            return OutputStream(self, tracked, pieces)

    def chat_stream(
        self, messages: Any, sampling_params: Any = None, split_special_tokens: bool = True, **template: Any
    ) -> OutputStream:
        """Return a stream of the answer to a conversation.  Further keywords and ``split_special_tokens`` are those of
        ``chat``.  RequestError if the conversation or a keyword is wrong."""
        check_template_keywords(template, ("add_generation_prompt", "taps", "lora_request"))
        taps, lora = template.pop("taps", None), template.pop("lora_request", None)
        template["reader"] = self.images
        prompt = render_chat(self.tokenizer, messages, split_special_tokens=split_special_tokens, **template)
        return self.stream(prompt, sampling_params, taps, lora)

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer (``encode``, ``decode``, ``apply_chat_template``).  RequestError if there is
        none."""
        return self._tokenizer()

    def _params_or_default(self, params: Any) -> Any:
        """Return the sampling parameters of a call, or the defaults if they are None."""
        return self.get_default_sampling_params() if params is None else params

    def _run(self, tracked: list[Tracked]) -> None:
        """Run requests to their end.  If one is refused or the call is interrupted, abort all of them."""
        refuse_within(self.engine.within, "generate")
        self.engine.weights.refuse_held()
        added: list[Tracked] = []
        self._recorder.tally.next_batch()
        try:
            while len(added) < len(tracked):
                self._add_some(tracked, added)
            unfinished = deque(tracked)

            def done() -> bool:
                """Return whether all requests have ended."""
                while unfinished and unfinished[0].ended:
                    unfinished.popleft()
                return not unfinished

            self._turns(done)
        except BaseException:
            with uninterrupted():
                for t in added:
                    self._forget(t.request)
            raise

    def _add_some(self, tracked: list[Tracked], added: list[Tracked]) -> None:
        """Add the requests of ``tracked`` that follow those in ``added``, until a signal arrives or a grammar must be
        compiled.

        Signals are delayed once for all of them, because a delay takes a tenth of the time of an addition.  The first
        request is prepared before, so that a grammar is compiled without the delay.
        RequestError if a request is refused."""
        number = len(added) + 1
        try:
            tracked[len(added)].prepare(self.engine)
            with uninterrupted() as signals:
                while len(added) < len(tracked) and not signals:
                    t = tracked[len(added)]
                    if t.needs_grammar:
                        return
                    added.append(t)  # before ``add_to``, so that the call also forgets a request that is refused
                    number = len(added)
                    t.add_to(self.engine)
                    self._recorder.tally.watch(t)
        except RequestError as e:
            if len(tracked) == 1:
                raise
            raise RequestError(f"prompt {number} of {len(tracked)}: {e}", e.param) from e

    def _forget(self, request: Request) -> None:
        """Abort a request of this call, now or, if another thread runs a step, after that step."""
        if self.engine.requests.get(request.id) is not request:  # the id may belong to another request
            return
        try:
            self.engine.abort(request.id)
        except RequestError:
            self._abandoned.append(request.id)

    def _turns(self, done: Callable[[], bool]) -> None:
        """Run steps until ``done`` returns True.  Signals are handled between steps only."""
        while not done():
            self.engine.weights.refuse_held()
            worked = True
            with uninterrupted() as signals:
                while worked and not signals and not done():
                    while self._abandoned:
                        self.engine.abort(self._abandoned.popleft())
                    worked = self.engine.step()
            if not worked:
                time.sleep(LOOK if settles(self.engine) else self.engine.idle())

    # ---- inspection and maintenance ------------------------------------------------------------------------------

    def explain(self, seam: str | None = None, all: bool = False) -> str:
        """Return the chosen plug-ins and the reasons, as text."""
        return self.resolved.explain(seam, all)

    @property
    def selections(self) -> tuple[Selection, ...]:
        """Return each choice of a plug-in with its candidates and the reasons against them, in the order of the
        choices."""
        return self.resolved.selections

    def stats(self) -> dict[str, Any]:
        """Return counts of requests, tokens and blocks, and the median milliseconds of each part of a step."""
        return self.engine.stats()

    def bill_of_materials(self) -> dict[str, Any]:
        """Return the bill of materials of this run, which is the content of a record, as JSON values.

        It contains each plug-in with its distribution, version, source, options and reasons; the machine, library
        versions and the state of git; a fingerprint of everything that determines the tokens; and the results so far.
        The first call takes about 100 ms."""
        return self._recorder.bill_of_materials()

    def record(self, path: str | os.PathLike[str]) -> None:
        """Write the bill of materials with the results so far to a file.  ``minivllm diff`` compares two such files."""
        self._recorder.write(path)

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the times of the stored steps as a Chrome trace, with a bar for each part of a step."""
        self.engine.clock.chrome_trace(os.fspath(path))

    def check(self) -> None:
        """Check every block table and every KV block.  AssertionError names an inconsistency.

        MINIVLLM_CHECK=1 does this after every step.
        """
        self.engine.check()

    def reset_prefix_cache(self) -> None:
        """Remove every cached prefix that no running request uses.  Results do not change, but the next prompts compute
        all of their tokens."""
        self.engine.reset_prefix_cache()

    def save_prefix(self, name: str, prompt: Any, tenant: str = "", cache_salt: str | None = None) -> int:
        """Compute a prompt, and keep its blocks on the disk under a name until ``drop_prefix``, also over restarts.

        Return the number of tokens that are kept: those of whole blocks, and with recurrent states up to their last
        copy.  Requests with this beginning, ``tenant`` and ``cache_salt`` find them; if the rotary embedding changes
        with the length of a request, only those that may become as long as the prompt.  RequestError if no tier keeps
        names, or if there is no room."""
        from minivllm.core.interfaces.params import SamplingParams

        from .prompts import read_prompt

        self.engine.named_prefixes()  # raises if the executor has no tiers with names, before tokens are computed
        params = SamplingParams(max_tokens=1, temperature=0.0, tenant=tenant, cache_salt=cache_salt)
        ids = read_prompt(prompt, self.tokenizer).ids
        output = self.generate({"prompt_token_ids": ids.tolist()}, params, use_tqdm=False)[0]
        if output.error:
            raise RequestError(output.error)
        return self.engine.save_prefix(name, ids, self._salt(ids, params))

    def drop_prefix(self, name: str) -> None:
        """Forget the name of a prefix, so that its blocks may be evicted."""
        self.engine.drop_prefix(name)

    def prefixes(self) -> dict[str, int]:
        """Return the names of the saved prefixes, each with its number of tokens."""
        return self.engine.named_prefixes().tokens()

    def block_keys(self, prompt: Any, tenant: str = "", cache_salt: str | None = None) -> list[str]:
        """Return the prefix-cache keys (hex) of the full KV blocks of a prompt.

        The keys are those of a request that generates one token.  They are the same in every process with the same
        model and options.  RequestError if the engine has no tiers (option ``kvstore``).
        """
        from minivllm.core.interfaces.params import SamplingParams

        from .prompts import read_prompt

        tiers = self.engine.cache.tiers
        if tiers is None:
            raise RequestError("the engine has no tier of the KV cache, so blocks have no keys: set kvstore")
        ids = read_prompt(prompt, self.tokenizer).ids
        salt = self._salt(ids, SamplingParams(max_tokens=1, tenant=tenant, cache_salt=cache_salt))
        keys = tiers.keys_of(ids, salt, [], len(ids) // tiers.cache.block)
        return [key.hex() for key in keys]

    def _salt(self, ids: np.ndarray, params: SamplingParams) -> tuple[str, ...]:
        """Return the texts on which the block keys of a prompt i32 [n] depend besides its tokens."""
        from minivllm.core.engine.request_checks import salt_of_prompt

        return self.engine.weights.salted(salt_of_prompt(ids, params, self.engine.wiring))

    # ---- weights -------------------------------------------------------------------------------------------------

    def pause(self, keep_requests: bool = True) -> None:
        """Run no steps until ``resume``.  Open streams stay open; ``keep_requests=False`` aborts them.

        Calls that would run a step, ``next`` of a stream too, raise RequestError."""
        with uninterrupted():
            self.engine.weights.pause(keep_requests)

    def resume(self) -> None:
        """Continue after ``pause``."""
        self.engine.weights.resume()

    def update_weights(self, weights: Any, *, partial: bool = False, finite: bool = True, kv: str = "recompute") -> int:
        """Replace the weights in place, and return their new version, which counts from 0.

        ``weights`` is a folder with the files of a checkpoint, a mapping of names to tensors, or pairs of both, with
        the names of the model's checkpoint.  ``partial`` keeps weights that are not given.  ``finite`` refuses
        infinite numbers and NaN.  Open streams continue with the new weights: with ``kv="recompute"`` their keys and
        values are computed again, with ``kv="keep"`` they stay those of the old weights.

        RequestError if the weights are refused or cannot be written; the old weights then serve, unless ``sleep(2)``
        has dropped them.  EngineDeadError if the old weights cannot be restored, or if the update does not end."""
        from . import weights as given

        with uninterrupted():
            return given.update(self.engine, weights, partial, finite, kv)

    def sleep(self, level: int = 1) -> None:
        """Free the memory of the KV cache and of the weights until ``wake``.

        Level 1 keeps the weights in host memory; on a CPU they stay where they are.  Level 2 drops them: call
        ``update_weights`` before ``wake``, or ``wake`` reads the files of the model again."""
        with uninterrupted():
            self.engine.weights.sleep(level)

    def wake(self) -> None:
        """Allocate the memory again after ``sleep``."""
        with uninterrupted():
            self.engine.weights.wake()

    def start_profile(self) -> None:
        """Start a torch profiler trace of everything that the executor runs."""
        self.engine.call("profile_start")

    def stop_profile(self, path: str | os.PathLike[str] = "minivllm-profile.json") -> str:
        """End the profiler trace, write it as a Chrome trace, and return its path."""
        self.engine.call("profile_stop", {"path": os.fspath(path)})
        return os.fspath(path)

    def close(self) -> None:
        """Free the memory, and write the record if the user set ``record``.  A second call does nothing."""
        self._close_pool()
        try:
            self.engine.stop()
        finally:
            self._end_exclusion()
            self._recorder.close()

    def __enter__(self) -> LLM:
        """Return the engine."""
        return self

    def __exit__(self, *_: Any) -> None:
        """Close the engine."""
        self.close()


class OutputStream:
    """An iterator over the pieces of one request.  Several may be read alternately; reading any of them runs the shared
    engine."""

    def __init__(self, llm: LLM, tracked: Any, pieces: deque[StreamOutput]) -> None:
        self._llm, self._tracked, self._pieces = llm, tracked, pieces

    def __iter__(self) -> OutputStream:
        """Return the iterator itself."""
        return self

    def __next__(self) -> StreamOutput:
        """Run the engine until there is a piece, and return it."""
        self._llm._turns(lambda: bool(self._pieces) or self._tracked.ended)
        if not self._pieces:
            raise StopIteration
        return self._pieces.popleft()

    def close(self) -> None:
        """Abort the request if it still runs.  A second call does nothing."""
        if self._tracked.request.finished is None:
            with uninterrupted():
                self._llm.engine.abort(self._tracked.request.id)
            self._pieces.clear()

    def __del__(self) -> None:
        """Abort the request of a deleted iterator."""
        if self._llm.engine.within:  # Python may delete the iterator during a step
            self._llm._abandoned.append(self._tracked.request.id)
        else:
            self.close()


# signals, besides Ctrl-C, for which applications often have Python handlers
SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
)


@contextlib.contextmanager
def uninterrupted() -> Iterator[list[tuple[Any, ...]]]:
    """Delay the handlers of signals until the context ends.  Yield the list of signals that have arrived.

    A handler may raise KeyboardInterrupt or any other exception.  In the middle of a step, that would leave the engine
    in an inconsistent state.  A signal without a Python handler (SIG_DFL, SIG_IGN) acts as usual.
    """
    arrived: list[tuple[Any, ...]] = []
    if threading.current_thread() is not threading.main_thread():
        yield arrived
        return
    handlers: dict[int, Any] = {}
    for number in (signal.SIGINT, *SIGNALS):
        handler = signal.getsignal(number)  # None for a handler in C, and while Python ends
        if callable(handler):
            handlers[number] = handler

    def hold(*args: Any) -> None:
        """Store a signal."""
        arrived.append(args)

    try:
        for number in handlers:
            signal.signal(number, hold)
        yield arrived
    finally:
        # The exit stack calls all functions in reverse order, even if one raises: first all handlers are restored,
        # SIGINT first, then the handlers of the stored signals run in the order of arrival.
        with contextlib.ExitStack() as stack:
            for args in reversed(arrived):
                stack.callback(handlers[args[0]], *args)
            for number, handler in handlers.items():
                if number != signal.SIGINT:
                    stack.callback(signal.signal, number, handler)
            if signal.SIGINT in handlers:
                stack.callback(signal.signal, signal.SIGINT, handlers[signal.SIGINT])


def _bar(total: int) -> Any:
    """Return a progress bar over requests."""
    from tqdm import tqdm

    return tqdm(total=total, desc="requests", dynamic_ncols=True)
