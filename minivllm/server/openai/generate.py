"""The way of one request through the server, which completions and chat completions share.

    body ──check──► prompts ──door──► ids ──params──► streams ──pieces──► choices of the protocol

What a request holds (its place inside, its streams) lies on an exit stack: it is given back when the answer ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from minivllm.server import errors, logs
from minivllm.server.errors import ApiError
from minivllm.server.http import body as bodies
from minivllm.server.http.sse import DONE, EventStream, Gone, LongAnswer, dump, encode, supervise
from minivllm.server.link.client import params_to_json
from minivllm.server.link.streams import end, take
from minivllm.server.link.taps import NOTHING, PooledTaps
from minivllm.server.metrics import times_of
from minivllm.server.worker_pool import to_json

from .answers import Shaper, Slices, pieces
from .bodies import Generation, read

if TYPE_CHECKING:
    from minivllm.config.server import ServerConfig
    from minivllm.core.interfaces.params import SamplingParams
    from minivllm.server.http.connection import Direct
    from minivllm.server.http.limits import Door
    from minivllm.server.link.client import EngineClient, Stream, TextPiece
    from minivllm.server.link.streams import Tell
    from minivllm.server.metrics import Metrics

    from .logprobs import Speller
    from .tokens import Tokens


WARNINGS = "X-Warnings"
SCORES = 512  # log-probabilities in a chunk of a stream: what is there at once may be a whole answer's
TEXT = "\0"  # stands for the text of a choice
NAMED = 8  # models that an error names


@dataclass
class Service:
    """State of all routes.  ``names`` are those of the model; ``defaults`` are sampling parameters of the model's
    generation_config.json and, over them, of the ``[sampling]`` table, whose ``max_tokens`` is the most that an answer
    may have (``most_tokens``)."""

    client: EngineClient
    server: ServerConfig
    names: Sequence[str]
    tokens: Tokens
    door: Door
    metrics: Metrics
    defaults: Mapping[str, Any]
    most_tokens: int | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.bodies, self.slices = bodies.Bodies(self.tokens.pool), Slices()

    async def close(self) -> None:
        await self.tokens.pool.close()

    def check_model(self, name: str | None) -> str:
        """The name that the answer has.  ApiError (404) for a model that is not served."""
        if name is None or name == "":
            return self.names[0]
        if name not in self.names:
            what, names = errors.printable(name, 100), ", ".join(map(repr, self.names[:NAMED]))
            raise ApiError(404, f"The model `{what}` does not exist. Want {names}, or leave it out.", "model")
        return name


class ProtocolWork(Protocol):
    """What a protocol makes of one request."""

    async def prepare(self, held: AsyncExitStack) -> Answer: ...

    def opening(self, answer: Answer) -> list[dict[str, Any]]:
        """What a stream says of choices before the first piece."""

    speller: Speller
    silent: Mapping[str, Any]  # of a stream's choice that has no text to tell

    def spoken(self, number: int) -> dict[str, Any] | None:
        """What a stream says of the choice ``number`` with a piece that has but the text ``TEXT``; None where that
        depends on more than the text.  An empty text is left out unless ``tells_empty``."""

    tells_empty: bool

    def choices(self, answer: Answer, number: int, piece: TextPiece) -> Iterator[dict[str, Any]]:
        """What a stream says of the choice ``number`` with a piece; it may be nothing.  Each is made when it is asked
        for, and has a bounded number of scores."""

    async def whole(self, answer: Answer) -> list[dict[str, Any]]:
        """The choices of an answer in one piece; their log-probabilities are leaves (``answers.WrittenInParts``)."""


@dataclass
class Answer:
    """Streams of one request and what they have in common.  The choice of sample ``s`` of prompt ``p`` has the number
    ``p * n + s``."""

    service: Service
    id: str
    object: str
    model: str
    streams: list[Stream]
    n: int
    include_usage: bool = False
    continuous: bool = False
    warnings: list[dict[str, str]] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)  # beside the choices of an answer, or of a stream's opening
    hidden: bool = False  # what was generated is no part of the answer
    reads: Sequence[tuple[str, str]] = ()  # points that the request reads, and how
    energy: bool = False  # joules are a part of its usage
    told: int = 0  # tokens in the chunks of a stream so far
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self) -> dict[str, Any]:
        return {"id": self.id, "object": self.object, "created": self.created, "model": self.model}

    def usage(self, told: int | None = None) -> dict[str, Any]:
        """``told``: tokens of an answer that is on its way; None: all."""
        prompt = sum(s.prompt_tokens for s in self.streams)
        completion = sum(s.completion_tokens for s in self.streams) if told is None else told
        completion = 0 if self.hidden else completion
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(s.cached_tokens for s in self.streams)},
            **({"energy": self._joules(completion)} if self.energy and told is None else {}),
        }

    def _joules(self, completion: int) -> dict[str, Any]:
        """Of all prompts; null if those of one are not known."""
        found = [s.metrics.joules for s in self.streams if s.metrics.joules is not None]
        whole = sum(found) if len(found) == len(self.streams) else None
        each = None if whole is None or not completion else whole / completion
        return {"joules": whole, "joules_per_output_token": each, "counter": self.service.client.info.energy}

    def tapped(self, number: int, sample: int) -> list[dict[str, Any]]:
        """What the branch ``sample`` read, of the stream that the choice ``number`` is of; it has ended."""
        found = self.streams[number // self.n].tapped.get(sample, ())
        return [
            {"point": point, "read": how, "values": numbers(values)}
            for (point, how), values in zip(self.reads, found, strict=False)
        ]

    def _tapped_choices(self, work: ProtocolWork) -> Iterator[dict[str, Any]]:
        """Of a stream, behind the text of all choices."""
        for number in range(len(self.streams) * self.n) if self.reads else ():
            rest = {"logprobs": None, "finish_reason": None, "taps": self.tapped(number, number % self.n)}
            yield self._chunk({"index": number, **work.silent, **rest})

    async def take(self, tell: Sequence[Tell] | None = None) -> list[tuple[int, TextPiece]]:
        """(number of the choice, piece) of all that is there, once something is; [] at the end.  ApiError if a
        branch failed: 400 if a field of the request is at fault, else 500.  ``tell``: see ``streams.take``."""
        found = [(at * self.n + piece.sample, piece) for at, piece in await take(self.streams, tell)]
        for _, piece in found:
            if piece.finish_reason == "error":
                if piece.param is not None:
                    raise ApiError(400, piece.error or "", piece.param)
                logs.event("the engine failed on a request", 40, answer=self.id, reason=piece.error)
                raise ApiError(500, "the engine failed on this request; the server's log says why")
        return found

    async def events(self, work: ProtocolWork, direct: Direct | None = None) -> AsyncIterator[bytes]:
        """Server-sent events.  What is there at once is sent at once: who is slow gets fewer, larger pieces.  Text in
        the middle of the answer goes ``direct``, where that is and takes it."""
        before = encode({**self.head(), "choices": []})[: -len(b"]}\n\n")]  # the same for every chunk
        behind = b'],"usage":null}\n\n' if self.include_usage else b"]}\n\n"
        choice_of, slices = work.choices, self.service.slices
        if opening := [encode(chunk) for chunk in self._opening(work)]:
            yield b"".join(opening)
        tell = None
        while pieces := await self.take(tell):
            plain = not (self.warnings or self.continuous)
            said, until = [], slices.begin()
            for number, piece in pieces:
                self.told += len(piece.token_ids)
                for choice in choice_of(self, number, piece):
                    said.append(before + dump(choice) + behind if plain else encode(self._chunk(choice)))
                    if time.perf_counter() > until:  # a slow reader's: much was waiting for it
                        yield b"".join(said)
                        said, until = [], await slices.next()
            if said:
                yield b"".join(said)
            if plain and tell is None and direct is not None:
                tell = self._tells(work, direct.write, before, behind)
        for chunk in self._tapped_choices(work):
            yield encode(chunk)
        if self.include_usage:
            yield encode({**self.head(), "choices": [], "usage": self.usage()})
        yield DONE

    def _tells(
        self, work: ProtocolWork, write: Callable[[bytes], bool], before: bytes, behind: bytes
    ) -> list[Tell] | None:
        """For ``take``, a function a stream that writes the event of a text; None while choices say more than that."""
        around = []
        for number in range(len(self.streams) * self.n):
            if (choice := work.spoken(number)) is None:
                return None
            left, right = dump(choice).split(dump(TEXT))
            around.append((before + left, right + behind))
        empty = work.tells_empty

        def of(first: int) -> Tell:
            def tell(sample: int, text: str, tokens: int) -> bool:
                if text or empty:
                    left, right = around[first + sample]
                    if not write(left + dump(text) + right):
                        return False
                self.told += tokens
                return True

            return tell

        return [of(at * self.n) for at in range(len(self.streams))]

    async def chunks(self, work: ProtocolWork) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a stream, one a choice that has something to say."""
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
            yield {**self.head(), "choices": [], "usage": self.usage()}

    def _opening(self, work: ProtocolWork) -> Iterator[dict[str, Any]]:
        for choice in work.opening(self):
            yield {**self._chunk(choice), **self.more}

    def _chunks(self, work: ProtocolWork, pieces: Sequence[tuple[int, TextPiece]]) -> Iterator[dict[str, Any]]:
        for number, piece in pieces:
            self.told += len(piece.token_ids)
            for choice in work.choices(self, number, piece):
                yield self._chunk(choice)

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        """The first one has the warnings."""
        chunk = {**self.head(), "choices": [choice]}
        if self.warnings:
            chunk["warnings"], self.warnings = self.warnings, []
        if self.include_usage:
            chunk["usage"] = self.usage(self.told) if self.continuous else None
        return chunk

    async def whole(self, work: ProtocolWork, who: str) -> AsyncIterator[bytes]:
        """The answer as JSON, in pieces; ``who`` asks."""
        choices = await work.whole(self)
        for choice in choices if self.reads else ():
            order = self.streams[choice["index"] // self.n].order or range(self.n)
            choice["taps"] = self.tapped(choice["index"], order[choice["index"] % self.n])
        out = {**self.head(), "choices": choices, "usage": self.usage(), "system_fingerprint": None, **self.more}
        out |= {"warnings": self.warnings} if self.warnings else {}
        tokens = self.service.tokens
        shaper = Shaper(tokens.pool, tokens.tokenizer, work.speller, who)
        async for piece in pieces(out, shaper, self.service.slices):
            yield piece


def numbers(values: np.ndarray) -> list[float | None]:
    """As JSON has them: None for one that is not finite."""
    finite = np.isfinite(values)
    if finite.all():
        return values.tolist()
    return [value if good else None for value, good in zip(values.tolist(), finite, strict=True)]


async def read_body(request: Request, service: Service, model: type[Any]) -> Any:
    """The body within the limits.  ApiError where it is wrong, or where nobody can answer it now."""
    server = service.server
    who = request.scope["state"]["owner"]
    values = await service.bodies.read(request, server.max_body_bytes, server.body_timeout, who)
    return await checked(service, model, values, who)


async def checked(service: Service, model: type[Any], values: Mapping[str, Any], who: str) -> Any:
    """The values as a body, its form worked out where that takes long."""
    body = read(model, values)
    if isinstance(body, Generation):
        body._known_form = await service.tokens.pool.form(body, who)
    return body


def _slowest(streams: Sequence[Stream]) -> dict[str, float]:
    """Milliseconds in the queue and to the first token, of the prompt that waited longest."""
    times = [times_of(stream) for stream in streams]
    found = {part: max((t[part] for t in times if part in t), default=None) for part in ("queue", "ttft")}
    return {f"{part}_ms": round(1e3 * value, 1) for part, value in found.items() if value is not None}


def check_counts(service: Service, n: int | None, best_of: int | None = None) -> None:
    """ApiError (400) for more answers to a prompt than a request may ask for."""
    most, n = service.server.max_n, 1 if n is None else n
    if not 1 <= n <= most:
        raise ApiError(400, f"n={str(n)[:24]}: want a whole number from 1 to {most}", "n")
    if best_of is not None and not n <= best_of <= most:
        raise ApiError(400, f"best_of={str(best_of)[:24]}: want a whole number from n={n} to {most}", "best_of")


def check_branches(service: Service, prompts: int, params: SamplingParams) -> None:
    """ApiError (400) for more branches of all prompts together than a request may have, whatever they are: answers
    (``n``), samples of which some are answers (``best_of``), or beams."""
    most, branches = service.server.max_branches, prompts * params.width
    if branches > most:
        wide = next((name for name in ("beam_width", "best_of") if getattr(params, name) is not None), "n")
        what = f"{prompts} prompt{'s' * (prompts > 1)} times {wide}={params.width} are {branches} branches"
        raise ApiError(400, f"{what}; want at most {most} in a request (max_branches)", wide)


CPU_COST, COST = 1 << 15, 1 << 20  # tokens that a request may cost by default, on a CPU and elsewhere
UNSAID = 512  # tokens that a branch counts as whose end the model decides, not the client
SCORED = 20  # log-probabilities of a token that cost as much as the token


def check_cost(service: Service, asks: Sequence[tuple[Any, SamplingParams]], unsaid: bool = False) -> None:
    """Raise ApiError (400) for a request that would keep the engine busy for too long.

    ``asks``: token ids and parameters of each prompt.  ``unsaid``: the client has set no ``max_tokens``, so answers
    end where the model ends them."""
    info, most = service.client.info, service.server.max_request_cost
    if most is None:
        most = max(CPU_COST if info.device == "cpu" else COST, 2 * info.max_model_len)
    cost = 0.0
    for ids, params in asks:
        each = params.max_tokens or 0
        each = min(each, UNSAID) if unsaid and not params.ignore_eos else each
        scores, of_prompt = params.logprobs or 0, params.prompt_logprobs or 0
        cost += len(ids) * (1 + of_prompt / SCORED) + params.width * each * (1 + scores / SCORED)
    if not most or cost <= most:
        return
    params = asks[0][1]
    wide = next((name for name in ("beam_width", "best_of") if getattr(params, name) is not None), "n")
    shape = f"prompts: {len(asks)}, {wide}={params.width}, max_tokens={params.max_tokens}"
    if params.logprobs or params.prompt_logprobs:
        shape += f", log-probabilities a token: {max(params.logprobs or 0, params.prompt_logprobs or 0)}"
    what = f"this request may cost {round(cost):,} tokens ({shape}); want at most {most:,} (max_request_cost)"
    raise ApiError(400, f"{what}: lower one of them, or send several requests", "max_tokens")


def check_told(service: Service, prompts: int, params: SamplingParams, taps: PooledTaps) -> None:
    """ApiError (400) for parameters, vectors of taps among them, that are too large to be told, and read, once for each
    prompt of a batch."""
    if prompts == 1:
        return
    most, size = service.server.max_body_bytes, len(to_json(params_to_json(params))) + taps.bytes
    if size * prompts > most:
        what = f"the parameters of this request are {size} bytes for each of {prompts} prompts"
        raise ApiError(400, f"{what}; want at most {most} together: send fewer prompts at once", "prompt")


def seconds_of(service: Service, asked: float | None) -> float:
    most = service.server.request_timeout
    if asked is not None and not asked > 0:
        raise ApiError(400, f"timeout_s={asked}: want a positive number of seconds", "timeout_s")
    return most if asked is None else min(asked, most)


async def open_streams(
    service: Service,
    held: AsyncExitStack,
    state: dict[str, Any],
    prompts: Sequence[tuple[Any, SamplingParams]],
    pieces: bool,
    taps: PooledTaps = NOTHING,
    energy: bool = False,
) -> list[Stream]:
    """One stream a prompt with the same taps, closed by ``held``.  The error of the first that is refused; then none
    stays."""
    client, request_id, log = service.client, state["request_id"], state["log"]
    log.update(prompt_tokens=sum(len(ids) for ids, _ in prompts), completion_tokens=0)  # if it goes before it begins
    opening: list[asyncio.Task[Stream]] = []
    try:
        for number, (ids, params) in enumerate(prompts):
            name, owner = f"{request_id}-{number}", state["owner"]
            asked = client.stream(ids, params, name, pieces=pieces, owner=owner, taps=taps, energy=energy)
            opening.append(asyncio.create_task(asked))
            await asyncio.sleep(0)  # others have their turn: each prompt is told with all its parameters
        opened = await asyncio.gather(*opening, return_exceptions=True)
    except asyncio.CancelledError:  # who asked has left
        for task in opening:
            task.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
        raise
    streams: list[Stream] = [one for one in opened if not isinstance(one, BaseException)]

    async def close() -> None:
        await end(client.abort, streams)
        for stream in streams:
            service.metrics.finished(stream)
        log.update(
            prompt_tokens=sum(s.prompt_tokens for s in streams),
            completion_tokens=sum(s.completion_tokens for s in streams),
            cached_tokens=sum(s.cached_tokens for s in streams),
            finished=sorted({text.finish_reason or "abort" for s in streams for text in s.texts}),
            **_slowest(streams),
        )

    held.push_async_callback(close)
    for one in opened:
        if isinstance(one, BaseException):
            raise one
    return streams


def warned(warnings: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The header that names the fields of the warnings, for clients that read no further fields of an answer."""
    names = [quote(warning["field"], safe="_.-") for warning in warnings]
    return {WARNINGS: ",".join(names)[:1024]} if names else {}


async def respond(request: Request, service: Service, stream: bool, seconds: float, work: ProtocolWork) -> Any:
    """The answer to a request within ``seconds``: a stream of events, or one JSON object."""
    state = request.scope["state"]
    end = time.monotonic() + seconds
    async with AsyncExitStack() as held:
        try:
            answer = await supervise(work.prepare(held), request.receive, service.door, seconds)
            left = max(end - time.monotonic(), 0.001)
            if stream:
                headers = warned(answer.warnings)
                events = answer.events(work, state.get("direct"))
                return EventStream(events, held.pop_all(), service.door, service.server, left, headers)
            written = answer.whole(work, state["owner"])
            begun = await supervise(_begin(written), request.receive, service.door, left)
            headers = warned(answer.warnings)
            if len(begun) == 1:  # most of them, and their length is said
                return Response(begun[0], media_type="application/json", headers=headers)
            left = max(end - time.monotonic(), 0.001)
            return LongAnswer(_resumed(begun, written), held.pop_all(), service.door, service.server, left, headers)
        except Gone:
            state["log"]["gone"] = True
            return Response(status_code=499)  # nobody reads it


async def _begin(written: AsyncIterator[bytes]) -> list[bytes]:
    """The first two pieces, or the only one."""
    begun = [await anext(written)]
    async for piece in written:
        return [*begun, piece]
    return begun


async def _resumed(begun: list[bytes], rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    for piece in begun:
        yield piece
    async for piece in rest:
        yield piece
