"""The asynchronous front door: many coroutines, one engine thread.

event loop                      engine thread
──────────                      ─────────────
generate ──add──► inbox ──────► engine.add
                                engine.step ... engine.step
pieces ◄── queue ◄── call_soon_threadsafe ◄── publish
cancel ──abort──► ends ───────► engine.abort   (before the inbox is looked at, and the next step is planned)
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from minivllm.core.external_calls import refusal, refuse_within
from minivllm.errors import EngineDeadError, MinivllmError, RequestError, describe_error

from .front_door import FrontDoor
from .llm import check_template_keywords, render_chat
from .loop import STOPPED, Inbox, TurnLoop

if TYPE_CHECKING:
    from minivllm.core.engine.engine import Engine
    from minivllm.runtime.text.tokenizer import Tokenizer

    from .requests import StreamOutput

log = logging.getLogger("minivllm")


class AsyncLLM(FrontDoor):
    """``async for piece in llm.generate(prompt, params)``.  Options are those of ``LLM``.

    Abandoning the iterator (or cancelling its task) aborts the request: its blocks are free within a step.
    """

    live = True

    def __init__(
        self, model: Any = None, *, config: Any = None, record: str | os.PathLike[str] | None = None, **options: Any
    ) -> None:
        super().__init__(model, config, record, options)
        self._loop = JobLoop(self.engine)
        self._thread = self._loop.start()

    # ---- the event loop's side -----------------------------------------------------------------------------------

    async def generate(
        self, prompt: Any, sampling_params: Any = None, request_id: str | None = None, taps: Any = None
    ) -> AsyncIterator[StreamOutput]:
        """Pieces as they come; the last has ``finished`` and the whole ``output``.  ``taps``: a list of ``Tap``.
        RequestError if it is refused."""
        from .prompts import params_for, taps_for
        from .requests import Tracked

        self._refuse_within("generate")
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[StreamOutput | MinivllmError] = asyncio.Queue()
        default = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params = params_for(default, 1)[0]
        put = lambda piece: _post(loop, queue, piece)  # noqa: E731
        tracked = Tracked(prompt, params, self.tokenizer, request_id, stream=put, taps=taps_for(taps, 1)[0])

        if params.structured_outputs is not None:
            try:
                await asyncio.to_thread(tracked.prepare, self.engine)
            except KeyboardInterrupt as e:  # of a grammar plug-in, on that thread
                raise refusal(e) from e

        gone = False

        def add() -> None:
            if gone:
                return
            try:
                self._recorder.tally.next_batch()
                tracked.add_to(self.engine)
                self._recorder.tally.watch(tracked)
            except BaseException as e:
                put(refusal(e))

        def leave() -> None:
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
            gone = True
            if tracked.request.finished is None:
                self._send(leave, ends=True)

    def chat(
        self,
        messages: Any,
        sampling_params: Any = None,
        request_id: str | None = None,
        split_special_tokens: bool = True,
        **template: Any,
    ) -> AsyncIterator[StreamOutput]:
        """Stream the answer to a conversation; further keywords and ``split_special_tokens`` as in ``LLM.chat``."""
        check_template_keywords(template, ("add_generation_prompt", "taps"))
        taps = template.pop("taps", None)
        prompt = render_chat(self.tokenizer, messages, split_special_tokens=split_special_tokens, **template)
        return self.generate(prompt, sampling_params, request_id, taps)

    def abort(self, request_id: str) -> None:
        """End a request; unknown ids are ignored.  Any thread may call it, but for the engine's own."""
        self._refuse_within("abort")
        self._loop.abort(request_id)

    async def stats(self) -> dict[str, Any]:
        """As ``LLM.stats``, taken between two steps."""
        return await self._ask(self.engine.stats)

    async def bill_of_materials(self) -> dict[str, Any]:
        """As ``LLM.bill_of_materials``, with the results as they are between two steps."""
        await asyncio.to_thread(self._recorder.prepare)  # reads files, asks git: not on the engine's thread
        return await self._ask(self._recorder.bill_of_materials)

    async def record(self, path: str | os.PathLike[str]) -> None:
        """As ``LLM.record``."""
        await asyncio.to_thread(self._recorder.write, path, await self.bill_of_materials())

    async def start_profile(self) -> None:
        await self._ask(lambda: self.engine.call("profile_start"))

    async def stop_profile(self, path: str = "minivllm-profile.json") -> str:
        await self._ask(lambda: self.engine.call("profile_stop", {"path": path}))
        return path

    async def _ask(self, question: Callable[[], Any]) -> Any:
        """Run something on the engine's thread and bring the answer back."""
        self._refuse_within("a question")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def run() -> None:
            try:
                value, error = question(), None
            except Exception as e:
                value, error = None, e
            except BaseException as e:  # a future takes it for its own end, or that of the event loop
                value, error = None, refusal(e)
            _call(loop, _settle, answer, value, error)

        self._send(run)
        return await answer

    def _send(self, run: Callable[[], object], adds: str = "", ends: bool = False) -> None:
        """Have the engine's thread do something.  ``ends``: it ends a request, so it goes before all that waits, and no
        matter if the engine has stopped meanwhile."""
        if not self._loop.send(run, adds, ends) and not ends:
            raise EngineDeadError(self.engine.dead or STOPPED)

    async def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer; RequestError without one.  A coroutine, as in vLLM."""
        return self._tokenizer()

    def close(self, timeout: float = 10.0) -> None:
        """Abort what runs, end the thread, give the memory back; idempotent."""
        self._refuse_within("close")
        self._loop.inbox.close()
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise EngineDeadError(f"the engine's thread is still in a step after {timeout} s")
        self.engine.stop()
        self._recorder.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await asyncio.to_thread(self.close)

    def _refuse_within(self, what: str) -> None:
        """RequestError on the engine's own thread, where only a function that the engine calls can ask for anything:
        it would wait for itself."""
        if threading.current_thread() is self._thread:
            refuse_within(self.engine.within or "a step", what)


class _EngineJob(NamedTuple):
    number: int  # jobs in the order in which they were sent
    adds: str  # the id of the request that it adds
    run: Callable[[], object]


class JobLoop(TurnLoop):
    """Runs an engine and what is sent to its thread.  A job that raises ends nothing but itself."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.inbox: Inbox[_EngineJob] = Inbox()
        self._numbers = itertools.count()

    def send(self, run: Callable[[], object], adds: str = "", ends: bool = False) -> bool:
        """From any thread; False if the loop takes nothing more.  What ``ends`` a request overtakes the others."""
        return self.inbox.put(_EngineJob(next(self._numbers), adds, run), urgent=ends)

    def abort(self, request_id: str) -> bool:
        """From any thread: end a request, also one that is still to be added, whose stream ends as any other does."""
        number = next(self._numbers)

        def end() -> None:
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
        return self.inbox.closed

    def turn(self, wait: float | None) -> bool:
        self.inbox.wait(wait)
        self.do_jobs()
        try:
            return not self.engine.dead and self.engine.busy and self.engine.step()
        except RequestError:  # another thread called the engine, whose turn it is not
            log.exception("the engine's thread met an error")
            return False

    def leave(self, error: BaseException | None) -> None:
        self.inbox.close()
        self.do_jobs()  # what came last is refused, not forgotten

    def do_jobs(self) -> None:
        while (job := self.inbox.take()) is not None:
            try:
                job.run()
            except (Exception, KeyboardInterrupt):
                log.exception("the engine's thread met an error")


def _post(loop: asyncio.AbstractEventLoop, queue: asyncio.Queue, piece: Any) -> None:
    _call(loop, queue.put_nowait, piece)


def _call(loop: asyncio.AbstractEventLoop, *call: Any) -> None:
    """Run something on an event loop that may have been closed meanwhile."""
    try:
        loop.call_soon_threadsafe(*call)
    except RuntimeError:
        log.debug("an event loop was closed before its answer came")


def _settle(answer: asyncio.Future, value: Any, error: BaseException | None) -> None:
    if answer.cancelled():
        return
    if error is None:
        answer.set_result(value)
    else:  # a future refuses to hold a StopIteration
        answer.set_exception(RuntimeError(describe_error(error)) if isinstance(error, StopIteration) else error)
