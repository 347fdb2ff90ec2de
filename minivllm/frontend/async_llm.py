"""The asynchronous interface: many coroutines use one engine thread.

event loop                      engine thread
──────────                      ─────────────
generate ──add──► inbox ──────► engine.add
                                engine.step ... engine.step
pieces ◄── queue ◄── call_soon_threadsafe ◄── publish
cancel ──abort──► urgent inbox ► engine.abort   (before other items of the inbox, and before the next step)
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from minivllm.core.external_calls import refusal, refuse_within
from minivllm.errors import EngineDeadError, MinivllmError, RequestError, describe_error

from .front_door import FrontDoor
from .llm import check_template_keywords, render_chat
from .loop import STOPPED, Inbox, TurnLoop

if TYPE_CHECKING:
    from minivllm.core.engine.engine import Engine
    from minivllm.runtime.text.embeddings import EmbeddingRequestOutput, ScoringRequestOutput
    from minivllm.runtime.text.tokenizer import Tokenizer

    from .requests import StreamOutput, Tracked

log = logging.getLogger("minivllm")
# Requests whose images are prepared at the same time.  More threads compete with the engine's thread for the
# interpreter, and finish the first image later: with 4 threads, 64 requests with an image took 7 % longer on an H200.
IMAGES_AT_ONCE = 2


class AsyncLLM(FrontDoor):
    """The asynchronous engine: ``async for piece in llm.generate(prompt, params)``.  Options are those of ``LLM``.

    Leaving the loop, or cancelling its task, aborts the request.  Its blocks are free within a step.
    """

    live = True

    def __init__(
        self, model: Any = None, *, config: Any = None, record: str | os.PathLike[str] | None = None, **options: Any
    ) -> None:
        super().__init__(model, config, record, options)
        self._preparing = ThreadPoolExecutor(IMAGES_AT_ONCE, "minivllm-images")
        self._loop = JobLoop(self.engine)
        self._thread = self._loop.start()

    # ---- on the event loop ---------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Any,
        sampling_params: Any = None,
        request_id: str | None = None,
        taps: Any = None,
        lora_request: Any = None,
    ) -> AsyncIterator[StreamOutput]:
        """Yield pieces of the answer as tokens are generated.  The last piece has ``finished`` and the complete
        ``output``.

        ``taps`` is a list of ``Tap``, ``lora_request`` a LoRARequest or None.  RequestError if the request is refused.
        """
        self._refuse_within("generate")
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[StreamOutput | MinivllmError] = asyncio.Queue()
        put = partial(_call, loop, queue.put_nowait)
        tracked = await self._tracked(prompt, sampling_params, request_id, put, taps, lora_request)
        params = tracked.request.params
        if params.structured_outputs is not None:
            try:
                await asyncio.to_thread(tracked.prepare, self.engine)
            except KeyboardInterrupt as e:  # raised by a grammar plug-in on the thread of the plug-in
                raise refusal(e) from e

        abandoned = False

        def add() -> None:
            """Add the request, on the engine's thread, unless its task was cancelled.  An error is put into the
            stream."""
            if abandoned:
                return
            try:
                self._recorder.tally.next_batch()
                tracked.add_to(self.engine)
                self._recorder.tally.watch(tracked)
            except BaseException as e:
                put(refusal(e))

        def leave() -> None:
            """Abort the request, on the engine's thread."""
            if self.engine.requests.get(tracked.request.id) is tracked.request:
                self.engine.abort(tracked.request.id)

        self._send(add, adds=tracked.request.id)
        try:
            while True:
                piece = await queue.get()
                if isinstance(piece, MinivllmError):
                    raise piece
                yield piece
                if piece.finished:
                    return
        finally:
            abandoned = True
            if tracked.request.finished is None:
                self._send(leave, ends=True)

    async def _tracked(
        self,
        prompt: Any,
        sampling_params: Any,
        request_id: str | None,
        put: Callable[[Any], None],
        taps: Any,
        lora_request: Any,
    ) -> Tracked:
        """Return a request of ``generate``, whose pieces go to ``put``.  Images are decoded on another thread."""
        from .prompts import adapters_for, images_in, params_for, taps_for
        from .requests import Tracked

        default = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params, tap_list = params_for(default, 1)[0], taps_for(taps, 1)[0]
        more: dict[str, Any] = {
            "stream": put,
            "taps": tap_list,
            "lora": adapters_for(lora_request, 1)[0],
            "reader": self.images,
        }
        make: Callable[[], Tracked] = partial(Tracked, prompt, params, self.tokenizer, request_id, **more)
        if isinstance(prompt, Mapping) and images_in(prompt):
            return await asyncio.get_running_loop().run_in_executor(self._preparing, make)
        return make()

    def chat(
        self,
        messages: Any,
        sampling_params: Any = None,
        request_id: str | None = None,
        split_special_tokens: bool = True,
        **template: Any,
    ) -> AsyncIterator[StreamOutput]:
        """Stream the answer to a conversation.  Further keywords and ``split_special_tokens`` are those of
        ``LLM.chat``."""
        check_template_keywords(template, ("add_generation_prompt", "taps", "lora_request"))
        taps, lora = template.pop("taps", None), template.pop("lora_request", None)
        template["reader"] = self.images
        prompt = render_chat(self.tokenizer, messages, split_special_tokens=split_special_tokens, **template)
        return self.generate(prompt, sampling_params, request_id, taps, lora)

    async def embed(
        self,
        prompts: Any,
        pooling: str = "auto",
        normalize: bool = True,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embeddings of prompts, as ``LLM.embed`` does.  Cancelling the task aborts the requests."""
        from . import embedding

        self._refuse_within("embed")
        options = embedding.EmbedOptions.of(self, pooling, normalize, dimensions, truncate_prompt_tokens)
        items = embedding.listed(prompts)
        left = len(items)
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Any] = loop.create_future()

        def count(_: Any) -> None:
            """Note the end of a request, on the engine's thread."""
            nonlocal left
            left -= 1
            if not left:
                _call(loop, _settle, ended, None, None)

        tracked = await asyncio.to_thread(embedding.embed_requests, self, items, options, count)

        def add() -> None:
            """Add all requests, or none if one is refused, on the engine's thread."""
            try:
                for t in tracked if not ended.done() else ():
                    t.add_to(self.engine)
            except BaseException as e:
                leave()
                _call(loop, _settle, ended, None, refusal(e))

        def leave() -> None:
            """Abort the requests, on the engine's thread."""
            for t in tracked:
                if self.engine.requests.get(t.request.id) is t.request:
                    self.engine.abort(t.request.id)

        if tracked:
            self._send(add)
            try:
                await ended
            except asyncio.CancelledError:
                self._send(leave, ends=True)
                raise
        return [embedding.embedding_output(t, options) for t in tracked]

    async def score(
        self, text_1: Any, text_2: Any, pooling: str = "auto", truncate_prompt_tokens: int | None = None
    ) -> list[ScoringRequestOutput]:
        """Return the similarity of texts, as ``LLM.score`` does."""
        from . import embedding

        prompts, index = embedding.unique_texts(*embedding.paired(text_1, text_2))
        outputs = await self.embed(prompts, pooling, truncate_prompt_tokens=truncate_prompt_tokens)
        return embedding.score_outputs(outputs, index)

    def abort(self, request_id: str) -> None:
        """End a request.  Unknown ids are ignored.  Any thread except the engine's own may call it."""
        self._refuse_within("abort")
        self._loop.abort(request_id)

    async def stats(self) -> dict[str, Any]:
        """Return the statistics of the engine, as ``LLM.stats`` does, taken between two steps."""
        return await self._ask(self.engine.stats)

    async def bill_of_materials(self) -> dict[str, Any]:
        """Return the bill of materials, as ``LLM.bill_of_materials`` does.  Its results are read between two steps."""
        await asyncio.to_thread(self._recorder.prepare)  # reads files and runs git, which would delay steps
        return await self._ask(self._recorder.bill_of_materials)

    async def record(self, path: str | os.PathLike[str]) -> None:
        """Write the bill of materials with the results so far to a file, as ``LLM.record`` does."""
        await asyncio.to_thread(self._recorder.write, path, await self.bill_of_materials())

    async def pause(self, keep_requests: bool = True) -> None:
        """Run no steps until ``resume``.  New and running requests wait; ``keep_requests=False`` aborts the running
        ones."""
        await self._ask(lambda: self.engine.weights.pause(keep_requests))

    async def resume(self) -> None:
        """Continue after ``pause``."""
        await self._ask(self.engine.weights.resume)

    async def update_weights(
        self, weights: Any, *, partial: bool = False, finite: bool = True, kv: str = "recompute"
    ) -> int:
        """Replace the weights between two steps and return the number of the new version, as ``LLM.update_weights``
        does."""
        from .weights import update

        return await self._ask(lambda: update(self.engine, weights, partial, finite, kv))

    async def sleep(self, level: int = 1) -> None:
        """Free memory until ``wake``, as ``LLM.sleep`` does.  Requests wait."""
        await self._ask(lambda: self.engine.weights.sleep(level))

    async def wake(self) -> None:
        """Allocate the memory again after ``sleep``."""
        await self._ask(self.engine.weights.wake)

    async def start_profile(self) -> None:
        """Start a torch profiler trace of everything that the executor runs."""
        await self._ask(lambda: self.engine.call("profile_start"))

    async def stop_profile(self, path: str = "minivllm-profile.json") -> str:
        """End the profiler trace, write it as a Chrome trace, and return its path."""
        await self._ask(lambda: self.engine.call("profile_stop", {"path": path}))
        return path

    async def _ask(self, question: Callable[[], Any]) -> Any:
        """Run a function on the engine's thread and return its result."""
        self._refuse_within("a question")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def run() -> None:
            """Call the function and send its result to the event loop."""
            value: Any = None
            error: BaseException | None = None
            try:
                value = question()
            except Exception as e:
                error = e
            except BaseException as e:  # such an exception would cancel the future or stop the event loop
                error = refusal(e)
            _call(loop, _settle, answer, value, error)

        self._send(run)
        return await answer

    def _send(self, run: Callable[[], object], adds: str = "", ends: bool = False) -> None:
        """Run a function on the engine's thread.  EngineDeadError if the engine has stopped.

        ``ends`` means that the function ends a request.  It then precedes all waiting functions, and is ignored if the
        engine has stopped.
        """
        if not self._loop.send(run, adds, ends) and not ends:
            raise EngineDeadError(self.engine.dead or STOPPED)

    async def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer.  RequestError if there is none.  It is a coroutine, as in vLLM."""
        return self._tokenizer()

    def close(self, timeout: float = 10.0) -> None:
        """Abort running requests, end the thread and free the memory.  A second call does nothing.  EngineDeadError if
        the thread is still in a step after ``timeout`` seconds; call ``close`` again later."""
        self._refuse_within("close")
        self._loop.inbox.close()
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise EngineDeadError(f"the engine's thread is still in a step after {timeout} s; call close again later")
        self._preparing.shutdown(wait=False, cancel_futures=True)
        self._close_pool()
        try:
            self.engine.stop()
        finally:
            self._end_exclusion()
            self._recorder.close()

    async def __aenter__(self) -> AsyncLLM:
        """Return the engine."""
        return self

    async def __aexit__(self, *_: Any) -> None:
        """Close the engine."""
        await asyncio.to_thread(self.close)

    def _refuse_within(self, method: str) -> None:
        """Raise RequestError on the engine's own thread, where external code would wait for itself."""
        if threading.current_thread() is self._thread:
            refuse_within(self.engine.within or "a step", method)


class _EngineJob(NamedTuple):
    """A function to run on the engine's thread."""

    number: int  # jobs are numbered in the order in which they are sent
    adds: str  # id of the request that the job adds, or ""
    run: Callable[[], object]


class JobLoop(TurnLoop):
    """Runs an engine and the jobs that are sent to its thread.  A job that raises does not affect anything else."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.inbox: Inbox[_EngineJob] = Inbox()
        self._numbers = itertools.count()

    def send(self, run: Callable[[], object], adds: str = "", ends: bool = False) -> bool:
        """Send a job, from any thread.  Return False if the loop has ended.  A job that ``ends`` a request precedes the
        others."""
        return self.inbox.put(_EngineJob(next(self._numbers), adds, run), urgent=ends)

    def abort(self, request_id: str) -> bool:
        """End a request, from any thread, even if the job that adds it still waits.  Its stream ends in the usual
        way."""
        number = next(self._numbers)

        def end() -> None:
            """Abort the request.  If it was not added yet, add it first, so that its stream ends."""
            if self.engine.abort(request_id):
                return
            job = self.inbox.remove(lambda job: job.adds == request_id and job.number < number)
            if job is not None:
                job.run()
                self.engine.abort(request_id)

        return self.send(end, ends=True)

    # ---- the engine's thread -------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Return whether the loop must end."""
        return self.inbox.closed

    def turn(self, wait: float | None) -> bool:
        """Wait for jobs, run them, and run a step.  Return False if no step was run."""
        self.inbox.wait(wait)
        self.do_jobs()
        try:
            return not self.engine.dead and self.engine.busy and self.engine.step()
        except RequestError:  # another thread is in a method of the engine
            log.exception("the engine's thread met an error")
            return False

    def leave(self, error: BaseException | None) -> None:
        """Refuse further jobs, and run the waiting ones, which then report that the engine has stopped."""
        self.inbox.close()
        self.do_jobs()

    def do_jobs(self) -> None:
        """Run all waiting jobs."""
        job = self.inbox.take()
        while job is not None:
            try:
                job.run()
            except (Exception, KeyboardInterrupt):
                log.exception("the engine's thread met an error")
            job = self.inbox.take()


def _call(loop: asyncio.AbstractEventLoop, *call: Any) -> None:
    """Call a function on an event loop, which may have been closed in the meantime."""
    try:
        loop.call_soon_threadsafe(*call)
    except RuntimeError:
        log.debug("an event loop was closed before its answer came")


def _settle(answer: asyncio.Future, value: Any, error: BaseException | None) -> None:
    """Set the result or the exception of a future, unless it was cancelled."""
    if answer.cancelled():
        return
    if isinstance(error, StopIteration):  # a future cannot hold a StopIteration
        error = RuntimeError(describe_error(error))
    if error is None:
        answer.set_result(value)
    else:
        answer.set_exception(error)
