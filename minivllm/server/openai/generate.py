"""The path of a request through the server, which completions and chat completions share.

    body ──check──► prompts ──door──► ids ──params──► streams ──pieces──► choices of the protocol

An exit stack holds the resources of a request (its slot of the door, its streams) and releases them when the answer
ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote
from weakref import WeakValueDictionary

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from minivllm.core.interfaces.routes import RouteParams
from minivllm.server import errors, logs
from minivllm.server.background_jobs import Jobs
from minivllm.server.errors import ApiError
from minivllm.server.http import body as bodies
from minivllm.server.http.sse import DONE, EventStream, Gone, LongAnswer, dump, encode, supervise
from minivllm.server.link.live_states import LiveStates
from minivllm.server.link.streams import end, take
from minivllm.server.link.taps import NOTHING, PooledTaps
from minivllm.server.metrics import times_of
from minivllm.server.response_store import KeyResponses, ResponseStore

from . import JsonObject, Warnings, tools
from .adapters import ServedAdapters
from .answers import Shaper, Slices, pieces
from .bodies import Generation, read
from .expert_routes import members
from .images import ServedImages
from .parsers import Chosen, choose, spelling_of

if TYPE_CHECKING:
    from minivllm.config import Loaded
    from minivllm.config.server import ServerConfig
    from minivllm.core.interfaces.images import PlacedImage
    from minivllm.core.interfaces.params import SamplingParams
    from minivllm.runtime.replies.grammar import Spelling
    from minivllm.server.http.connection import Direct
    from minivllm.server.http.limits import Door
    from minivllm.server.link.client import EngineClient, Stream, TextPiece
    from minivllm.server.link.streams import Tell
    from minivllm.server.metrics import Metrics

    from .logprobs import Speller
    from .tokens import Tokens


WARNINGS = "X-Warnings"
SCORES = 512  # largest number of log-probabilities in a chunk of a stream, because a whole answer may arrive together
TEXT = "\0"  # placeholder for the text of a choice
NAMED = 8  # largest number of models that an error message names


@dataclass
class Service:
    """The state that all routes share.

    ``names`` are the served names of the model, then those of its adapters.  ``defaults`` has the sampling parameters
    of the model's generation_config.json, overridden by the ``[sampling]`` table.  ``most_tokens`` is ``max_tokens`` of
    that table, the most tokens of an answer; None means no limit."""

    client: EngineClient
    server: ServerConfig
    names: list[str]
    tokens: Tokens
    door: Door
    metrics: Metrics
    defaults: Mapping[str, Any]
    most_tokens: int | None = None
    allow_targets: Sequence[str] = ()  # modules from which the configuration may name a parser
    created: int = field(default_factory=lambda: int(time.time()))
    reload: Callable[[], Loaded] | None = None  # reads the configuration again

    def __post_init__(self) -> None:
        self.bodies = bodies.Bodies(self.tokens.pool)
        self.slices = Slices()
        self.images = ServedImages(self.client.info.images)
        self.adapters = ServedAdapters(self.names, self.server.lora_modules, self.server.lora_dir)
        self.responses = ResponseStore.of(self.server)
        self.background = Jobs()
        self.live = LiveStates(self.client, self.server)
        # identity of an API key -> responses kept for its WebSockets, while one of these is open
        self.socket_responses: WeakValueDictionary[str, KeyResponses] = WeakValueDictionary()
        self._chosen: dict[str, Chosen] = {}

    def chosen(self) -> Chosen:
        """Return the parser of replies that the configuration and the model's chat template choose."""
        name = self.server.tool_parser
        if name not in self._chosen:
            self._chosen[name] = choose(self.server, self.tokens.tokenizer, self.allow_targets)
        return self._chosen[name]

    def parser(self) -> Any:
        """Return the parser of replies: a ``ReplyParser``, or a class that ``tools.register`` has added."""
        name = self.server.tool_parser
        if name in tools.PARSERS:
            return tools.PARSERS[name]
        chosen = self.chosen()
        return tools.PARSERS.get(chosen.name, chosen.parser)

    def spelling(self) -> Spelling | None:
        """Return the format in which a grammar writes the model's calls, or None if there is no such grammar.

        The parser must have a description, and the engine's grammar plug-in must compile grammars of calls."""
        if "reply" not in self.client.info.forms:
            return None
        return spelling_of(self.parser(), self.tokens.tokenizer)

    async def close(self) -> None:
        """End the responses in the background, the states for pages and the worker pool."""
        await self.live.close()
        await self.background.close()
        await self.tokens.pool.close()
        await self.images.close()

    def check_model(self, name: str | None) -> str:
        """Return the model's name for the answer.  ApiError (404) for a model that is not served."""
        if name is None or name == "":
            return self.names[0]
        if name in self.names:
            return name
        served = ", ".join(map(repr, self.names[:NAMED]))
        text = f"The model `{errors.printable(name, 100)}` does not exist. Expected {served}, or no model."
        raise ApiError(404, text, "model")


class ProtocolWork(Protocol):
    """One request of a protocol: its streams, and the choices of its answer in the protocol's shape.

    ``stream_type`` is the response with the events of a stream.  ``media_type`` is the content type of an answer
    without a stream."""

    stream_type: type[EventStream]
    media_type: str

    speller: Speller
    empty_choice: Mapping[str, Any]  # the part of a stream's choice that has no text
    sends_empty: bool  # whether a stream sends pieces with empty text

    async def prepare(self, held: AsyncExitStack) -> Answer:
        """Return the answer, with the streams of the request open; ``held`` closes them."""

    def events(self, answer: Answer, direct: Direct | None = None) -> AsyncIterator[bytes]:
        """Yield the answer as the events of a stream (``Answer.events``)."""

    def written(self, answer: Answer) -> AsyncIterator[bytes]:
        """Yield the answer without a stream, in pieces (``Answer.whole``)."""

    def opening(self, answer: Answer) -> list[JsonObject]:
        """Return the choices that a stream sends before the first piece."""

    def text_choice(self, number: int) -> JsonObject | None:
        """Return the object that a stream sends for a piece of text of the choice ``number``; its text is ``TEXT``.

        None means that the choice depends on more than the text.
        """

    def choices(self, answer: Answer, number: int, piece: TextPiece) -> Iterator[JsonObject]:
        """Yield the objects that a stream sends for a piece of the choice ``number``, each with at most ``SCORES``
        scores.
        """

    async def whole(self, answer: Answer) -> list[JsonObject]:
        """Return the choices of an answer without a stream.

        Their log-probabilities are converted to JSON later (``answers.WrittenInParts``)."""


@dataclass
class Answer:
    """The streams of one request, one for each prompt, and their common data.

    The choice of sample ``s`` of prompt ``p`` has the number ``p * n + s``."""

    service: Service
    id: str
    object: str
    model: str
    streams: list[Stream]
    n: int
    include_usage: bool = False  # whether a stream ends with a chunk that has the usage
    continuous: bool = False  # whether every chunk of a stream has the usage so far
    warnings: Warnings = field(default_factory=list)
    more: JsonObject = field(default_factory=dict)  # further members of an answer, or of a stream's first chunks
    hidden: bool = False  # whether the answer hides the generated text
    # tap points (named tensors of the model) that the request reads, and the kind of pooling
    reads: Sequence[tuple[str, str]] = ()
    routes: RouteParams | None = None  # set if the request reads or counts expert routes
    energy: bool = False  # whether the usage reports joules
    timed: bool = False  # whether the answer, or every chunk of a stream, has llama.cpp's timings
    sent: int = 0  # number of tokens in the chunks of a stream so far
    # choice -> number of tokens of its reasoning; None for answers without reasoning
    thought: dict[int, int] | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self) -> JsonObject:
        """Return the members that all chunks of an answer share."""
        return {"id": self.id, "object": self.object, "created": self.created, "model": self.model}

    def usage(self, sent: int | None = None) -> JsonObject:
        """Return the token counts of an answer, and its joules if the request asks for them.

        ``sent`` is the number of generated tokens that a running stream has sent; None means all tokens of a complete
        answer.
        """
        prompt = sum(s.prompt_tokens for s in self.streams)
        completion = sum(s.completion_tokens for s in self.streams) if sent is None else sent
        if self.hidden:
            completion = 0
        counts: JsonObject = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(s.cached_tokens for s in self.streams)},
        }
        if self.thought is not None:
            counts["completion_tokens_details"] = {"reasoning_tokens": sum(self.thought.values())}
        if self.energy and sent is None:
            counts["energy"] = self._joules(completion)
        return counts

    def _joules(self, completion: int) -> JsonObject:
        """Return the joules of all prompts together, or None if the joules of a prompt are unknown."""
        measured = [s.metrics.joules for s in self.streams if s.metrics.joules is not None]
        joules = sum(measured) if len(measured) == len(self.streams) else None
        each = None if joules is None or not completion else joules / completion
        return {"joules": joules, "joules_per_output_token": each, "counter": self.service.client.info.energy}

    def tapped(self, number: int, sample: int) -> list[JsonObject]:
        """Return the values that the branch ``sample`` has read for the choice ``number``, after its end."""
        found = self.streams[number // self.n].tapped.get(sample, ())
        taps = []
        for (point, pooling), values in zip(self.reads, found, strict=False):
            taps.append({"point": point, "read": pooling, "values": numbers(values)})
        return taps

    def values(self, number: int, sample: int) -> JsonObject:
        """Return the members ``taps``, ``routes`` and ``route_counts`` of the choice ``number``, as requested."""
        found: JsonObject = {"taps": self.tapped(number, sample)} if self.reads else {}
        if self.routes is not None:
            found.update(members(self.routes, self.streams[number // self.n].routes.get(sample)))
        return found

    def _tapped_choices(self, work: ProtocolWork) -> Iterator[JsonObject]:
        """Yield the chunks with the values of taps and routes, which a stream sends after the text of all choices."""
        for number in range(len(self.streams) * self.n) if self.reads or self.routes is not None else ():
            rest = {"logprobs": None, "finish_reason": None, **self.values(number, number % self.n)}
            yield self._chunk({"index": number, **work.empty_choice, **rest})

    async def take(self, tell: Sequence[Tell] | None = None) -> list[tuple[int, TextPiece]]:
        """Wait for pieces of the streams, and return each with the number of its choice, or [] at the end.

        ApiError if a branch failed: 400 if a field of the request is the cause, else 500.  ``tell`` is passed to
        ``streams.take``.
        """
        found = [(at * self.n + piece.sample, piece) for at, piece in await take(self.streams, tell)]
        for _, piece in found:
            if piece.finish_reason == "error":
                if piece.param is not None:
                    raise ApiError(400, piece.error or "", piece.param)
                logs.event("the engine failed on a request", 40, answer=self.id, reason=piece.error)
                raise ApiError(500, "the engine failed on this request; the server's log has the reason")
        return found

    async def events(self, work: ProtocolWork, direct: Direct | None = None) -> AsyncIterator[bytes]:
        """Yield the answer as server-sent events.

        All waiting events are yielded together, so a slow client receives fewer and larger parts.  Text in the middle
        of the answer is written to ``direct``, the client's connection, where there is one and it accepts the text."""
        # the bytes before the choices, which are equal in all chunks
        before = encode({**self.head(), "choices": []})[: -len(b"]}\n\n")]
        behind = b'],"usage":null}\n\n' if self.include_usage else b"]}\n\n"
        choice_of, slices = work.choices, self.service.slices
        if opening := [encode(chunk) for chunk in self._opening(work)]:
            yield b"".join(opening)
        writers = None
        while pieces := await self.take(writers):
            plain = not (self.warnings or self.continuous or self.timed)
            events: list[bytes] = []
            until = slices.begin()
            for number, piece in pieces:
                self.sent += len(piece.token_ids)
                for choice in choice_of(self, number, piece):
                    events.append(before + dump(choice) + behind if plain else encode(self._chunk(choice)))
                    if time.perf_counter() > until:  # much text was waiting for a slow client
                        yield b"".join(events)
                        events = []
                        until = await slices.next()
            if events:
                yield b"".join(events)
            if plain and writers is None and direct is not None:
                writers = self._direct_writers(work, direct.write, before, behind)
        for chunk in self._tapped_choices(work):
            yield encode(chunk)
        if self.include_usage:
            yield encode(self._usage_chunk())
        yield DONE

    def _direct_writers(
        self, work: ProtocolWork, write: Callable[[bytes], bool], before: bytes, behind: bytes
    ) -> list[Tell] | None:
        """Return a function for each stream that writes the event of a piece of text, for ``streams.take``.

        None means that the choices have more than text at present."""
        around = []
        for number in range(len(self.streams) * self.n):
            if (choice := work.text_choice(number)) is None:
                return None
            left, right = dump(choice).split(dump(TEXT))
            around.append((before + left, right + behind))
        empty = work.sends_empty

        def of(first: int) -> Tell:
            def tell(sample: int, text: str, tokens: int) -> bool:
                if text or empty:
                    left, right = around[first + sample]
                    if not write(left + dump(text) + right):
                        return False
                self.sent += tokens
                return True

            return tell

        return [of(at * self.n) for at in range(len(self.streams))]

    async def chunks(self, work: ProtocolWork) -> AsyncIterator[JsonObject]:
        """Yield the chunks of a stream, each with one choice, then those with values of taps, and a last one with the
        usage if requested."""
        slices = self.service.slices
        for chunk in self._opening(work):
            yield chunk
        while pieces := await self.take():
            until = slices.begin()
            for chunk in self._chunks(work, pieces):
                yield chunk
                if time.perf_counter() > until:
                    until = await slices.next()
        for chunk in self._tapped_choices(work):
            yield chunk
        if self.include_usage:
            yield self._usage_chunk()

    def _opening(self, work: ProtocolWork) -> Iterator[JsonObject]:
        """Yield the chunks before the first piece."""
        for choice in work.opening(self):
            yield {**self._chunk(choice), **self.more}

    def _chunks(self, work: ProtocolWork, pieces: Sequence[tuple[int, TextPiece]]) -> Iterator[JsonObject]:
        """Yield the chunks of some pieces."""
        for number, piece in pieces:
            self.sent += len(piece.token_ids)
            for choice in work.choices(self, number, piece):
                yield self._chunk(choice)

    def _chunk(self, choice: JsonObject) -> JsonObject:
        """Return a chunk with one choice.  The first chunk of a stream also has the warnings."""
        chunk = {**self.head(), "choices": [choice]}
        if self.warnings:
            chunk["warnings"] = self.warnings
            self.warnings = []
        if self.include_usage:
            chunk["usage"] = self.usage(self.sent) if self.continuous else None
        if self.timed:
            chunk["timings"] = timings(self.streams, self.sent)
        return chunk

    def _usage_chunk(self) -> JsonObject:
        """Return the last chunk of a stream, which has no choice."""
        chunk = {**self.head(), "choices": [], "usage": self.usage()}
        if (found := self.fingerprint()) is not None:
            chunk["system_fingerprint"] = found
        if self.timed:
            chunk["timings"] = timings(self.streams, self.sent)
        return chunk

    def fingerprint(self) -> str | None:
        """Return the newest version of the weights that drew tokens; None for the first weights of the engine."""
        version = max(stream.weights_version for stream in self.streams)
        return f"weights-{version}" if version else None

    async def whole(self, work: ProtocolWork, owner: str) -> AsyncIterator[bytes]:
        """Yield the answer as JSON, in pieces.  ``owner`` identifies the client in the queue of the worker pool."""
        choices = await work.whole(self)
        for choice in choices if self.reads or self.routes is not None else ():
            prompt, rank = divmod(choice["index"], self.n)
            order = self.streams[prompt].order or range(self.n)
            choice.update(self.values(choice["index"], order[rank]))
        out = {**self.head(), "choices": choices, "usage": self.usage()}
        out["system_fingerprint"] = self.fingerprint()
        out.update(self.more)
        if self.timed:
            generated = sum(s.completion_tokens for s in self.streams)
            out["timings"] = timings(self.streams, generated)
        if self.warnings:
            out["warnings"] = self.warnings
        tokens = self.service.tokens
        shaper = Shaper(tokens.pool, tokens.tokenizer, work.speller, owner)
        async for piece in pieces(out, shaper, self.service.slices):
            yield piece


def timings(streams: Sequence[Stream], sent: int) -> JsonObject:
    """Return the speeds of a request in the form of llama.cpp.  Prompts that run together count together.

    ``sent`` is the number of generated tokens so far."""
    cached = sum(stream.cached_tokens for stream in streams)
    total = sum(stream.prompt_tokens for stream in streams)
    times = [stream.metrics for stream in streams]
    now = time.monotonic()
    starts = [each.scheduled_time or each.arrival_time for each in times]
    firsts = [each.first_token_time or now for each in times]
    ends = [each.finished_time or now for each in times]
    first = min(firsts)
    found: JsonObject = {"cache_n": cached}
    found.update(_speed("prompt", total - cached, first - min(starts)))
    found.update(_speed("predicted", sent, max(ends) - first))
    return found


def _speed(part: str, tokens: int, seconds: float) -> JsonObject:
    """Return the count and the speeds of the tokens of a part of a request.

    A speed without a duration, and a duration of a token without a token, is 0."""
    ms = max(1e3 * seconds, 0.0)
    found: JsonObject = {f"{part}_n": tokens, f"{part}_ms": ms}
    found[f"{part}_per_token_ms"] = ms / tokens if tokens else 0.0
    found[f"{part}_per_second"] = 1e3 * tokens / ms if ms else 0.0
    return found


def numbers(values: np.ndarray) -> list[float | None]:
    """Return the values as JSON has them, with None for infinity and NaN."""
    finite = np.isfinite(values)
    if finite.all():
        return values.tolist()
    return [value if good else None for value, good in zip(values.tolist(), finite, strict=True)]


async def read_values(request: Request, service: Service, any_type: bool = False) -> JsonObject:
    """Return the body of a request as a JSON object, read within the limits of the server.

    ``any_type`` accepts content types other than JSON if the guard accepts them (clients of Ollama).  ApiError if the
    body is wrong, or if the server cannot serve it now.
    """
    server = service.server
    owner = request.scope["state"]["owner"]
    return await service.bodies.read(request, server.max_body_bytes, server.body_timeout, owner, any_type)


async def read_body(request: Request, service: Service, model: type[Any], any_type: bool = False) -> Any:
    """Return the body of a request, checked by its model.  The errors and ``any_type`` are those of ``read_values``."""
    values = await read_values(request, service, any_type)
    return await checked(service, model, values, request.scope["state"]["owner"])


async def checked(
    service: Service, model: type[Any], values: Mapping[str, Any], owner: str, sent: Mapping[str, str] | None = None
) -> Any:
    """Return the values as a body, checked by its model.  If computing the constraint on the answer's text takes long,
    the worker pool does it.

    ``sent`` is passed to ``bodies.read``."""
    body = read(model, values, sent)
    if isinstance(body, Generation):
        spelling = service.spelling() if getattr(body, "tools", None) else None
        body._known_form = await service.tokens.pool.form(body, owner, spelling)
    return body


def _slowest(streams: Sequence[Stream]) -> dict[str, float]:
    """Return the longest times of all prompts in the queue and to the first token, in milliseconds."""
    times = [times_of(stream) for stream in streams]
    slowest = {}
    for part in ("queue", "ttft"):
        values = [of_prompt[part] for of_prompt in times if part in of_prompt]
        if values:
            slowest[f"{part}_ms"] = round(1e3 * max(values), 1)
    return slowest


async def open_streams(
    service: Service,
    held: AsyncExitStack,
    state: dict[str, Any],
    prompts: Sequence[tuple[Any, SamplingParams]],
    pieces: bool,
    taps: PooledTaps = NOTHING,
    energy: bool = False,
    marks: Mapping[int, str] | None = None,
    model: str = "",
    images: Sequence[PlacedImage] = (),
) -> list[Stream]:
    """Open one stream for each prompt, with the same taps, to be closed by ``held``.

    ``model`` is the name of the model or of an adapter.  ``images`` are those of a single prompt.
    ``marks`` maps token ids to the characters that stand for them in the text of the streams.
    If the engine refuses a prompt, all streams are closed and the error of the first refused prompt is raised."""
    client, log = service.client, state["log"]
    shared = {"pieces": pieces, "owner": state["owner"], "taps": taps, "energy": energy, "marks": marks}
    shared["session"] = state.get("session", "")
    if images:
        shared["images"] = images
    shared["lora"] = service.adapters.by_name.get(model)
    if model:
        service.check_model(model)  # an adapter may have been unloaded since its name was checked
    # Set the counts in the log line now, in case the client leaves before the streams are open.
    log["prompt_tokens"] = sum(len(ids) for ids, _ in prompts)
    log["completion_tokens"] = 0
    opening: list[asyncio.Task[Stream]] = []
    try:
        for number, (ids, params) in enumerate(prompts):
            name = f"{state['request_id']}-{number}"
            stream = client.stream(ids, params, name, **shared)
            opening.append(asyncio.create_task(stream))
            await asyncio.sleep(0)  # sending the parameters of a prompt takes time, so other requests run in between
        opened = await asyncio.gather(*opening, return_exceptions=True)
    except asyncio.CancelledError:  # the client has left
        for task in opening:
            task.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
        raise
    streams: list[Stream] = [one for one in opened if not isinstance(one, BaseException)]

    async def close() -> None:
        await end(client.abort, streams)
        for stream in streams:
            service.metrics.finished(stream)
        log["prompt_tokens"] = sum(s.prompt_tokens for s in streams)
        log["completion_tokens"] = sum(s.completion_tokens for s in streams)
        log["cached_tokens"] = sum(s.cached_tokens for s in streams)
        log["finished"] = sorted({text.finish_reason or "abort" for s in streams for text in s.texts})
        log.update(_slowest(streams))

    held.push_async_callback(close)
    for one in opened:
        if isinstance(one, BaseException):
            raise one
    return streams


def warned(warnings: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the header that names the fields of the warnings, for clients that do not read further fields of JSON."""
    names = [quote(warning["field"], safe="_.-") for warning in warnings]
    return {WARNINGS: ",".join(names)[:1024]} if names else {}


async def respond(request: Request, service: Service, stream: bool, seconds: float, work: ProtocolWork) -> Any:
    """Return the response to a request: a stream of events, or one JSON object.  It must end within ``seconds``."""
    state = request.scope["state"]
    end = time.monotonic() + seconds
    async with AsyncExitStack() as held:
        try:
            answer = await supervise(work.prepare(held), request.receive, service.door, seconds)
            left = max(end - time.monotonic(), 0.001)
            if stream:
                headers = warned(answer.warnings)
                events = work.events(answer, state.get("direct"))
                return work.stream_type(events, held.pop_all(), service.door, service.server, left, headers)
            written = work.written(answer)
            begun = await supervise(_begin(written), request.receive, service.door, left)
            headers = warned(answer.warnings)
            if len(begun) == 1:  # the usual case, in which the response has a Content-Length
                return Response(begun[0], media_type=work.media_type, headers=headers)
            left = max(end - time.monotonic(), 0.001)
            return LongAnswer(_resumed(begun, written), held.pop_all(), service.door, service.server, left, headers)
        except Gone:
            state["log"]["gone"] = True
            return Response(status_code=499)  # the client has left, so the status 499 is for the log only


async def _begin(written: AsyncIterator[bytes]) -> list[bytes]:
    """Return the first two pieces of an answer, or the only one."""
    begun = [await anext(written)]
    async for piece in written:
        return [*begun, piece]
    return begun


async def _resumed(begun: list[bytes], rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the pieces ``begun``, which were taken from an iterator before, then the pieces ``rest`` that are left in
    it."""
    for piece in begun:
        yield piece
    async for piece in rest:
        yield piece
