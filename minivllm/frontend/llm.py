"""The offline front door: prompts in, outputs back, the engine's loop run by the caller's thread."""

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
    from minivllm.registry import Selection
    from minivllm.runtime.text.outputs import RequestOutput
    from minivllm.runtime.text.tokenizer import Tokenizer

    from .requests import StreamOutput


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
) -> dict[str, Any]:
    """Return a conversation as a prompt, made by the model's chat template; the arguments are those of ``LLM.chat``.
    RequestError if there is no template, or on bad messages."""
    if tokenizer is None:
        raise RequestError("chat needs a tokenizer; drop skip_tokenizer_init", "messages")
    asked: dict[str, Any] = {
        "tools": tools,
        "documents": documents,
        "chat_template": chat_template,
        "continue_final_message": continue_final_message,
        "variables": chat_template_kwargs,
    }
    if split_special_tokens:
        prompt = tokenizer.chat_prompt(messages, add_generation_prompt, **asked)
        return {"prompt": prompt.text, "prompt_token_ids": tokenizer.encode_chat(prompt)}
    text = tokenizer.apply_chat_template(messages, add_generation_prompt, tokenize=False, **asked)
    return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}


TEMPLATE_KEYWORDS = ("continue_final_message", "tools", "documents", "chat_template", "chat_template_kwargs")


def check_template_keywords(given: Iterable[str], others: Sequence[str] = ()) -> None:
    """Check the keywords of a chat; RequestError for one that is none of ``TEMPLATE_KEYWORDS`` or ``others``."""
    known = (*TEMPLATE_KEYWORDS, *others)
    for name in given:
        if name not in known:
            hint = CHAT_HINTS.get(name) or f"want {', '.join(known)}.{suggest(name, known)}"
            raise RequestError(f"chat: unknown keyword {shown(name)}; {hint}", name)


# keywords of vLLM's ``LLM.chat`` and of other libraries that mean nothing here
CHAT_HINTS = {
    "lora_request": "adapters are not served",
    "mm_processor_kwargs": "this engine serves text",
    "chat_template_content_format": "the form of content that the template reads is found from its text",
    "enable_thinking": "put it into chat_template_kwargs",
    "tokenize": "the prompt is always tokenized; see LLM.tokenizer.apply_chat_template",
}


class LLM(FrontDoor):
    """``LLM(model="pocket")``, ``LLM(config="exp.toml")``, ``LLM(model=..., attention="sdpa",
    scheduler={"name": "fcfs", "options": {...}})``.  Options are the fields of ``EngineConfig``.

    ``record``: a .json file that ``close`` writes, with the bill of materials, the results, and the requests, so that
    ``minivllm run`` can run them again.  Use as a context manager or call ``close``; one thread at a time (``AsyncLLM``
    serves many).
    """

    def __init__(
        self, model: Any = None, *, config: Any = None, record: str | os.PathLike[str] | None = None, **options: Any
    ) -> None:
        super().__init__(model, config, record, options)
        self._left: deque[str] = deque()  # requests whose stream was forgotten in the middle of a step

    # ---- generation ----------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Any = None, sampling_params: Any = None, use_tqdm: bool = True, taps: Any = None, **other: Any
    ) -> list[RequestOutput]:
        """Complete prompts: a string, token ids, ``{"prompt_token_ids": [...]}``, or a list of these; one
        SamplingParams or one each; a list of ``Tap`` for all, or a list of them each.  Outputs come in the order of the
        prompts.  RequestError (and nothing is run) if one is refused; a request that fails later has finish_reason
        "error" and says why in ``error``.  Keywords of vLLM's are accepted as None (``lora_request=None``)."""
        from .prompts import check_call, is_one_prompt, params_for, taps_for
        from .requests import Tracked

        check_call(other, ("prompts", "sampling_params", "use_tqdm", "taps"))
        if hasattr(prompts, "tolist"):  # a tensor or an array
            prompts = prompts.tolist()
        one = is_one_prompt(prompts)
        if not one and not isinstance(prompts, Iterable):
            raise RequestError(f"prompts of {type(prompts).__name__}; want a string, token ids, or a list", "prompt")
        items = [prompts] if one else list(prompts)
        params = params_for(self._given(sampling_params), len(items))
        bar = _bar(len(items)) if use_tqdm else None
        done = None if bar is None else lambda t: bar.update(1)
        tracked = [
            Tracked(p, sp, self.tokenizer, done=done, taps=own)
            for p, sp, own in zip(items, params, taps_for(taps, len(items)), strict=True)
        ]
        with contextlib.nullcontext() if bar is None else bar:
            self._run(tracked)
        return [t.output() for t in tracked]

    def chat(
        self,
        messages: Any,
        sampling_params: Any = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool | None = None,
        split_special_tokens: bool = True,
        taps: Any = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation ([{"role": ..., "content": ...}, ...]) or a list of them, through the chat template.

        ``tools``: a list of functions as JSON schemas; ``documents``: a list of mappings; ``chat_template``: the name
        of one of the model's templates, or the text of one; ``chat_template_kwargs``: variables of the template;
        ``continue_final_message``: go on with the last message, where ``add_generation_prompt`` is None or False.

        What a message spells like a special token stays text, so that none can end its turn; with
        ``split_special_tokens=False`` it is the token, as with transformers' ``apply_chat_template``.  ``taps`` as in
        ``generate``.  RequestError for other keywords, and for messages that are malformed."""
        check_template_keywords(template)
        many = bool(messages) and isinstance(messages, Sequence) and all(isinstance(m, (list, tuple)) for m in messages)
        prompts = [
            render_chat(self.tokenizer, one, add_generation_prompt, split_special_tokens, **template)
            for one in (messages if many else [messages])
        ]
        return self.generate(prompts, sampling_params, use_tqdm, taps)

    def stream(self, prompt: Any, sampling_params: Any = None, taps: Any = None) -> OutputStream:
        """Pieces of one answer as its tokens come; leaving the loop early, or ``close``, aborts the request.  ``taps``:
        a list of ``Tap``; what is read comes with the last piece."""
        from .prompts import params_for, taps_for
        from .requests import Tracked

        pieces: deque[StreamOutput] = deque()
        params = params_for(self._given(sampling_params), 1)[0]
        tracked = Tracked(prompt, params, self.tokenizer, stream=pieces.append, taps=taps_for(taps, 1)[0])
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
        """Stream the answer to a conversation; further keywords and ``split_special_tokens`` as in ``chat``."""
        check_template_keywords(template, ("add_generation_prompt", "taps"))
        taps = template.pop("taps", None)
        prompt = render_chat(self.tokenizer, messages, split_special_tokens=split_special_tokens, **template)
        return self.stream(prompt, sampling_params, taps)

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer (``encode``, ``decode``, ``apply_chat_template``); RequestError without one."""
        return self._tokenizer()

    def _given(self, params: Any) -> Any:
        """Return the sampling parameters of a call, the default ones if it gives none."""
        return self.get_default_sampling_params() if params is None else params

    def _run(self, tracked: list[Any]) -> None:
        refuse_within(self.engine.within, "generate")
        added = []
        self._recorder.tally.next_batch()
        try:
            for i, t in enumerate(tracked):
                try:
                    t.prepare(self.engine)
                    added.append(t)  # before: an interrupt may come once it is there
                    with uninterrupted():
                        t.add_to(self.engine)
                        self._recorder.tally.watch(t)
                except RequestError as e:
                    raise (
                        e if len(tracked) == 1 else RequestError(f"prompt {i + 1} of {len(tracked)}: {e}", e.param)
                    ) from e
            waited_for = deque(tracked)

            def done() -> bool:
                while waited_for and waited_for[0].told:
                    waited_for.popleft()
                return not waited_for

            self._turns(done)
        except BaseException:  # refused, interrupted or dead: nothing of this call stays behind
            with uninterrupted():
                for t in added:
                    self._forget(t.request)
            raise

    def _forget(self, request: Any) -> None:
        """Abort a request of this call; unless it is another one's that has the same id, or another thread is in a
        step, after which it is aborted."""
        found = self.engine.requests.get(request.id)
        if found is None or found is not request:
            return
        try:
            self.engine.abort(request.id)
        except RequestError:
            self._left.append(request.id)

    def _turns(self, done: Callable[[], bool]) -> None:
        """Turns of the engine until it is ``done``; no signal cuts one in two."""
        while not done():
            worked = True
            with uninterrupted() as came:
                while worked and not came and not done():
                    while self._left:
                        self.engine.abort(self._left.popleft())
                    worked = self.engine.step()
            if not worked:
                time.sleep(LOOK if settles(self.engine) else self.engine.idle())

    # ---- care ----------------------------------------------------------------------------------------------------

    def explain(self, seam: str | None = None, all: bool = False) -> str:
        """What was wired and why."""
        return self.resolved.explain(seam, all)

    @property
    def selections(self) -> tuple[Selection, ...]:
        """Each choice with its candidates and the reasons against them, in the order in which they were made."""
        return self.resolved.selections

    def stats(self) -> dict[str, Any]:
        """Counts of requests, tokens and blocks, and median milliseconds of each part of a step."""
        return self.engine.stats()

    def bill_of_materials(self) -> dict[str, Any]:
        """What was wired, from which distribution, version and source, with which options, and why; the machine, the
        versions, git, a fingerprint over what decides the tokens, and the results so far.  JSON: what ``record``
        writes.  Takes some 100 ms the first time."""
        return self._recorder.bill_of_materials()

    def record(self, path: str | os.PathLike[str]) -> None:
        """Write the bill of materials with the results so far; ``minivllm diff`` compares two of them."""
        self._recorder.write(path)

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """The steps so far, part by part, as a Chrome trace."""
        self.engine.clock.chrome_trace(os.fspath(path))

    def check(self) -> None:
        """Walk every block table and every KV block; AssertionError names what does not add up.  MINIVLLM_CHECK=1 does
        it after every step."""
        self.engine.check()

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix that no running request uses; results do not change, the next prompts compute
        all of their tokens."""
        self.engine.reset_prefix_cache()

    def start_profile(self) -> None:
        """Begin a torch profiler trace of everything the executor runs."""
        self.engine.call("profile_start")

    def stop_profile(self, path: str | os.PathLike[str] = "minivllm-profile.json") -> str:
        """End it and write a Chrome trace; returns the path."""
        self.engine.call("profile_stop", {"path": os.fspath(path)})
        return os.fspath(path)

    def close(self) -> None:
        """Give the memory back, and write the record if one was asked for; idempotent."""
        self.engine.stop()
        self._recorder.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class OutputStream:
    """An iterator over the pieces of one request.  Several may be read in turns: each drives the same engine."""

    def __init__(self, llm: LLM, tracked: Any, pieces: deque[StreamOutput]) -> None:
        self._llm, self._tracked, self._pieces = llm, tracked, pieces

    def __iter__(self) -> OutputStream:
        return self

    def __next__(self) -> StreamOutput:
        self._llm._turns(lambda: bool(self._pieces) or self._tracked.told)
        if not self._pieces:
            raise StopIteration
        return self._pieces.popleft()

    def close(self) -> None:
        """Abort what still runs; idempotent."""
        if self._tracked.request.finished is None:
            with uninterrupted():
                self._llm.engine.abort(self._tracked.request.id)
            self._pieces.clear()

    def __del__(self) -> None:
        if self._llm.engine.within:  # it may be forgotten anywhere, in a step too
            self._llm._left.append(self._tracked.request.id)
        else:
            self.close()


# What applications handle in Python beside Ctrl-C: a polite end, an alarm by which a call is to end, and their own.
SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
)


@contextlib.contextmanager
def uninterrupted() -> Iterator[list[tuple[Any, ...]]]:
    """Signals take effect at the end of the block: what their handlers raise, KeyboardInterrupt or any other exception,
    would cut a step in two, and one that is half done leaves the engine in doubt.  Gives the list of those that have
    come."""
    came: list[tuple[Any, ...]] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    before: dict[int, Any] = {n: handler for n in SIGNALS if callable(handler := signal.getsignal(n))}
    hold = lambda *args: came.append(args)  # noqa: E731
    try:
        before[signal.SIGINT] = signal.signal(signal.SIGINT, hold)
        for number in before.keys() - {signal.SIGINT}:
            signal.signal(number, hold)
        yield came
    finally:
        with contextlib.ExitStack() as each:  # from the last to the first, all of them, whatever one raises
            for args in reversed(came):
                if callable(handler := before[args[0]]):
                    each.callback(handler, *args)
            for number, handler in before.items():
                if number != signal.SIGINT:
                    each.callback(signal.signal, number, handler)
            if signal.SIGINT in before:
                each.callback(signal.signal, signal.SIGINT, before[signal.SIGINT])


def _bar(total: int) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc="requests", dynamic_ncols=True)
