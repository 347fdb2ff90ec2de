"""What a protocol (HTTP, WebSocket) asks of an engine, and the clients that offer it.

    protocol ──stream()──► EngineClient ──commands──► EngineLoop   (a thread, or a process of its own)
             ◄── Piece ── Stream ◄──── frames, one a step ────┘

Text is made on this side (detokenizing, stop strings), never in the engine's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

import numpy as np

from minivllm.core.interfaces.params import SamplingParams
from minivllm.core.interfaces.plan import LogProbs
from minivllm.errors import EngineDeadError, PluginError, RequestError, error_from, shown
from minivllm.frontend.loop import Inbox

from .description import describe
from .engine_loop import EngineLoop
from .frames import ENDS, ROW, Frame
from .scored import Columns
from .streams import Stream, TextPiece
from .taps import NOTHING, PooledTaps, read_values

if TYPE_CHECKING:
    from minivllm.config import Loaded
    from minivllm.runtime.text.tokenizer import Tokenizer

__all__ = ["EngineClient", "EngineInfo", "LocalClient", "Stream", "TextPiece"]
ALIVE = 5.0  # seconds without a sign of life after which an engine is not healthy
NO_ERROR = (None, None)
log = logging.getLogger("minivllm")


@dataclass(frozen=True)
class EngineInfo:
    """``kv_tokens``: positions that the KV cache holds; ``selections``: seam -> name of what was chosen for it;
    ``reads``: the sampling parameters that its processors and its sampler read; ``tap_points``: name -> width of the
    points of the model that can be tapped; ``energy``: the counter of joules that is read, "": none; ``sampling``:
    the sampling defaults of the model's generation_config.json."""

    model: str
    max_model_len: int
    vocab_size: int
    kv_tokens: int
    max_num_seqs: int
    max_logprobs: int
    selections: dict[str, Any]
    version: str
    reads: list[str]
    device: str
    dtype: str
    tap_points: dict[str, int]
    energy: str
    sampling: dict[str, Any]


class EngineClient(Protocol):
    """One event loop's thread uses it.  ``info`` and ``tokenizer`` are there once it is open."""

    info: EngineInfo
    tokenizer: Tokenizer | None
    restarting: bool  # the engine has ended, and another one is being started
    restarted: int  # how often that was done
    on_gap: Callable[[float, int], None] | None  # on_gap(seconds, n): n tokens came that long after one another

    async def open(self) -> None:
        """Start the engine.  The errors are those of ``LLM(...)``."""

    async def stream(
        self,
        prompt_ids: Any,
        params: SamplingParams,
        request_id: str,
        *,
        pieces: bool = True,
        owner: str = "",
        taps: PooledTaps = NOTHING,
        energy: bool = False,
    ) -> Stream:
        """A request that the engine has accepted.  ``pieces=False``: one piece per branch, at its end, is enough.
        ``owner``: whose it is (``line.owner_of``); owners take turns wherever requests wait.  ``energy``: it ends once
        its joules are known.  RequestError if it is refused, EngineDeadError if there is no engine, or none for new
        requests."""

    async def abort(self, request_id: str) -> None:
        """End a request: its stream ends with what there is.  Unknown ids are ignored."""

    async def stats(self) -> dict[str, Any]: ...

    async def state(self, trim: bool) -> dict[str, Any]:
        """What the engine holds (``state.engine``): for who looks for a leak."""

    def tables(self) -> dict[str, int]:
        """Entries of the client's own tables: none at rest."""

    async def reset_prefix_cache(self) -> bool: ...

    async def profile(self, start: bool) -> str:
        """Begin a torch profiler trace, or end it; the path of the file that the end writes."""

    def healthy(self) -> tuple[bool, str]:
        """Whether the engine stepped or idled within the last 5 s, and if not, why."""

    async def close(self, drain: float = 0.0) -> bool:
        """Take no new requests, let the running ones finish for ``drain`` seconds, end the engine.  Streams that are
        left get EngineDeadError.  True if none was left.  Idempotent."""


class FrameClient:
    """What clients have in common: streams by number, questions by number, and what a frame means for them.

    A subclass sends commands (``_send``), brings frames (``_on_frame``) and says when the engine is gone (``_lost``).
    Invariant: a stream belongs to who reads it; one that nobody holds any more, however that came, is aborted.
    """

    def __init__(self) -> None:
        self.tokenizer: Tokenizer | None = None
        self.on_gap: Callable[[float, int], None] | None = None
        self._streams: WeakValueDictionary[int, Stream] = WeakValueDictionary()
        self._ids: dict[str, int] = {}
        self._read: set[Stream] = set()  # somebody waits for their next piece
        self._accepting: dict[int, asyncio.Future[None]] = {}
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._last_written: tuple[SamplingParams, dict[str, Any]] | None = None
        self._numbers = itertools.count(1)
        self._heard = -math.inf  # time.monotonic of the last frame
        self._why = "the engine has not been started"
        self._gone = True  # no engine: every request is refused with ``_why``
        self._draining = False
        # number -> owner and frame of requests without a token yet, where another engine may be started for them
        self._untouched: dict[int, tuple[str, bytes]] = {}
        self.restarting, self.restarted = False, 0  # another engine is being started; how often that was done
        self._empty: asyncio.Event | None = None

    def _send(self, kind: str, header: dict[str, Any], columns: dict[str, np.ndarray] | None = None) -> None:
        raise NotImplementedError

    def _opened(self, told: dict[str, Any]) -> None:
        """The engine has started; ``told`` is what ``describe`` said of it."""
        self.info = EngineInfo(**{f.name: told[f.name] for f in fields(EngineInfo)})
        self._gone, self._why, self._heard = False, "", time.monotonic()

    # ---- requests ------------------------------------------------------------------------------------------------

    async def stream(
        self,
        prompt_ids: Any,
        params: SamplingParams,
        request_id: str,
        *,
        pieces: bool = True,
        owner: str = "",
        taps: PooledTaps = NOTHING,
        energy: bool = False,
    ) -> Stream:
        self._check_open()
        ids = _prompt(prompt_ids)
        if request_id in self._ids:
            raise RequestError(f"request id {shown(request_id)} is in use; want a new one", "request_id")
        taps.check_size()
        wire = self._written(params)
        number = next(self._numbers)
        stream = Stream(number, request_id, len(ids), params, self.tokenizer, self._drop, self._cut, self._read)
        stream.prompt = ids
        accepted = asyncio.get_running_loop().create_future()
        header = {
            "number": number,
            "id": request_id,
            "params": wire,
            "arrival": stream.metrics.arrival_time,
            "watch": pieces or bool(params.stop),
            "owner": owner,
            **(taps.header() if taps else {}),
            **({"energy": True} if energy else {}),
        }
        try:
            self._send("add", header, {"prompt": ids, **taps.columns()})
        except (TypeError, ValueError) as e:
            raise RequestError(f"a sampling parameter cannot be sent to the engine: {e}", "extra") from e
        self._streams[number], self._ids[request_id] = stream, number
        self._accepting[number] = accepted
        try:
            await accepted
        except BaseException:  # refused, dead, or who asked has gone
            await stream.aclose()
            self._forget(stream)
            raise
        finally:
            self._accepting.pop(number, None)
        return stream

    def _written(self, params: SamplingParams) -> dict[str, Any]:
        """The parameters as the engine is told them, once for all prompts of a batch, which share them."""
        from minivllm.frontend.prompts import with_token_ids

        if self._last_written is None or self._last_written[0] is not params:
            self._last_written = params, params_to_json(with_token_ids(params, self.tokenizer))
        return self._last_written[1]

    async def abort(self, request_id: str) -> None:
        if (number := self._ids.get(request_id)) is not None and not self._gone:
            self._send("abort", {"number": number})

    def _drop(self, stream: Stream) -> None:
        """Nobody reads the stream any more."""
        self._forget(stream)
        if not self._gone:
            with contextlib.suppress(EngineDeadError):  # it died, and we have not heard of it yet
                self._send("abort", {"number": stream.number})

    def _cut(self, stream: Stream, sample: int, stop: str) -> None:
        """Tell the engine that the text of a branch has ended: by the stop string ``stop``, or (empty) for its reader,
        who needs no more."""
        if not self._gone:
            with contextlib.suppress(EngineDeadError):
                self._send("cut", {"number": stream.number, "sample": sample, "stop": stop})

    def _refuse(self, number: int, error: Exception) -> None:
        self._untouched.pop(number, None)
        if (waiting := self._accepting.get(number)) is not None:
            settle(waiting, None, error)
        elif self.restarted and (stream := self._streams.get(number)) is not None:
            stream.fail(error)  # another engine had taken it
            self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        self._streams.pop(stream.number, None)
        self._untouched.pop(stream.number, None)
        if self._ids.get(stream.request_id) == stream.number:
            del self._ids[stream.request_id]
        if not self._ids and self._empty is not None:
            self._empty.set()

    def _check_open(self) -> None:
        if self._gone:
            raise EngineDeadError(self._why)
        if self._draining:
            raise EngineDeadError("the engine is shutting down and takes no new requests")

    # ---- questions -----------------------------------------------------------------------------------------------

    async def stats(self) -> dict[str, Any]:
        return await self._ask("stats")

    async def state(self, trim: bool) -> dict[str, Any]:
        return await self._ask("state", trim=trim)

    def tables(self) -> dict[str, int]:
        return {
            "streams": len(self._streams),
            "ids": len(self._ids),
            "accepting": len(self._accepting),
            "asked": len(self._asked),
            "read": len(self._read),
        }

    async def reset_prefix_cache(self) -> bool:
        return await self._ask("reset_prefix_cache")

    async def profile(self, start: bool) -> str:
        if start:
            self._profile = f"minivllm-profile-{time.strftime('%Y%m%d-%H%M%S')}.json"
        return await self._ask("profile", start=start, path=getattr(self, "_profile", "minivllm-profile.json"))

    async def _ask(self, what: str, **args: Any) -> Any:
        if self._gone:
            raise EngineDeadError(self._why)
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self._send("ask", {"ask": number, "what": what, "args": args})
            return await answer
        finally:
            self._asked.pop(number, None)

    def healthy(self) -> tuple[bool, str]:
        silent = time.monotonic() - self._heard
        if self._gone:
            return False, self._why
        if silent > ALIVE:
            return False, f"the engine has neither stepped nor idled for {silent:.1f} s"
        return True, ""

    # ---- frames --------------------------------------------------------------------------------------------------

    def _on_frame(self, header: Mapping[str, Any], columns: Mapping[str, np.ndarray]) -> None:
        self._heard = time.monotonic()
        for number in header.get("accepted", ()):
            settle(self._accepting.get(number), None)
        for number, *error in header.get("refused", ()):
            self._refuse(number, error_from(*error))
        for number, value, error in header.get("answers", ()):
            settle(self._asked.get(number), value, error and error_from(*error))
        if "first" in columns:
            firsts = (columns[name].tolist() for name in ("first", "first_at", "cached", "entered"))
            for number, at, cached, entered in zip(*firsts, strict=True):
                if (stream := self._streams.get(number)) is not None:
                    stream.started(at, cached, entered)
        if "dead" in header:
            self._feed({**header, "errors": ()}, columns, ends=False)
            self._died(header["dead"])
            return
        self._score_prompts(columns)
        self._feed(header, columns)
        for number, sample, values in read_values(columns):
            if (stream := self._streams.get(number)) is not None:
                stream.tapped.setdefault(sample, []).append(values)
        orders, failed = dict(header.get("order", ())), dict(header.get("failed", ()))
        if "done" in columns:
            joules = columns.get("joules", np.full(len(columns["done"]), np.nan))
            for number, at, spent in zip(
                *(c.tolist() for c in (columns["done"], columns["done_at"], joules)), strict=True
            ):
                if (stream := self._streams.get(number)) is not None:
                    stream.metrics.joules = None if math.isnan(spent) else spent
                    if number in failed:
                        stream.fail(PluginError(failed[number]))
                    stream.finished(at, orders.get(number))
                    self._forget(stream)

    def _score_prompts(self, columns: Mapping[str, np.ndarray]) -> None:
        """Log-probabilities of prompts to their streams, before the first piece of each."""
        if "prompts" not in columns:
            return
        names = ("chosen", "rank", "top_ids", "top")
        rest = [columns[f"prompt_{name}"] for name in names]
        parts: dict[int, list[tuple[int, LogProbs]]] = {}
        for number, first, count, best in columns["prompts"].reshape(-1, 4).tolist():
            sizes = (count, count, count * best, count * best)
            chosen, rank, ids, top = (column[:size] for column, size in zip(rest, sizes, strict=True))
            rest = [column[size:] for column, size in zip(rest, sizes, strict=True)]
            lp = LogProbs(chosen, rank, ids.reshape(count, best), top.reshape(count, best))
            parts.setdefault(number, []).append((first, lp))
        for number, found in parts.items():
            if (stream := self._streams.get(number)) is not None:
                stream.score_prompt(found)

    def _feed(self, header: Mapping[str, Any], columns: Mapping[str, np.ndarray], ends: bool = True) -> None:
        """The rows of a frame to their streams.  ``ends`` False: only what ended well, the rest is about to fail."""
        if "stream" not in columns:
            return
        errors = {(number, sample): rest for number, sample, *rest in header.get("errors", ())}
        tokens, scores = columns["tokens"].tolist(), Columns(columns)
        at, on_gap = 0, self.on_gap
        for number, sample, count, end, stop_id, scored in zip(*(columns[n].tolist() for n in ROW), strict=True):
            ids = tokens[at : at + count]
            at += count
            logprobs = scores.take(ids) if scored else None
            stream = self._streams.get(number)
            if stream is None:
                continue
            reason = ENDS[end] if ends or ENDS[end] != "error" else None
            stop_token = None if stop_id < 0 else stop_id
            if on_gap is not None and count and (gap := stream.gap(sample, count, self._heard)) is not None:
                on_gap(*gap)
            error, param = errors.get((number, sample), NO_ERROR) if errors else NO_ERROR
            stream.feed(sample, ids, reason, stop_token, logprobs, error, param)
            if self._untouched and (count or reason):
                self._untouched.pop(number, None)

    def _died(self, why: str) -> None:
        """The engine has ended by itself."""
        self._lost(why)

    def _lost(self, why: str) -> None:
        """There is no engine any more: everybody is told at once."""
        if not self._gone:
            self._gone, self._why = True, why
        error = EngineDeadError(self._why)
        for stream in list(self._streams.values()):
            stream.fail(error)
            self._forget(stream)
        for waiting in (*self._accepting.values(), *self._asked.values()):
            settle(waiting, None, EngineDeadError(self._why))

    async def _drain(self, seconds: float) -> bool:
        self._draining = True
        if self._ids and seconds > 0 and not self._gone:
            self._empty = asyncio.Event()
            try:
                await asyncio.wait_for(self._empty.wait(), seconds)
            except asyncio.TimeoutError:
                log.warning("%d requests had not ended after %g s", len(self._ids), seconds)
        return not self._ids


class LocalClient(FrameClient):
    """The engine in a thread of this process: for tests, and where one process is wanted."""

    def __init__(self, loaded: Loaded) -> None:
        super().__init__()
        self._loaded = loaded
        self._inbox: Inbox[Frame] = Inbox()
        self._thread: threading.Thread | None = None

    async def open(self) -> None:
        from minivllm.frontend.building import build_engine

        self._loop = asyncio.get_running_loop()
        self._engine, resolved, self.tokenizer = await asyncio.to_thread(build_engine, self._loaded, True)
        self._opened(describe(self._engine, resolved))
        self._thread = EngineLoop(self._engine, self).start()

    def _send(self, kind: str, header: dict[str, Any], columns: dict[str, np.ndarray] | None = None) -> None:
        self._inbox.put(Frame(kind, header, columns or {}))

    async def close(self, drain: float = 0.0) -> bool:
        whole = await self._drain(drain)
        if self._thread is not None:
            self._send("stop", {})
            await asyncio.to_thread(self._thread.join)
            self._thread = None
            await asyncio.to_thread(self._engine.stop)
        self._lost("the engine was stopped")
        return whole

    # ---- the link, on the engine's thread ------------------------------------------------------------------------

    def receive(self, seconds: float) -> list[Frame]:
        self._inbox.wait(seconds)
        return list(iter(self._inbox.take, None))

    def send(self, header: dict[str, Any], columns: dict[str, np.ndarray]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._on_frame, header, columns)
        except RuntimeError as e:
            raise EngineDeadError("the event loop of its client was closed") from e


def params_to_json(params: SamplingParams) -> dict[str, Any]:
    """The parameters that are not at their defaults.  RequestError for what has no form outside of a process."""
    from minivllm.frontend.record.tally import plain_params

    found = plain_params(params)
    for name, value in found.items():
        if isinstance(value, Mapping) and "function" in value and not isinstance(getattr(params, name), Mapping):
            raise RequestError(f"{name}: a Python function cannot be sent to an engine in another process", name)
    return found


def _prompt(prompt_ids: Any) -> np.ndarray:
    from minivllm.frontend.prompts import read_prompt

    return read_prompt({"prompt_token_ids": prompt_ids}, None).ids


def settle(waiting: asyncio.Future[Any] | None, value: Any, error: Exception | None = None) -> None:
    if waiting is None or waiting.done():
        return
    if error is None:
        waiting.set_result(value)
    else:
        waiting.set_exception(error)
