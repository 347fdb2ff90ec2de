"""The client of an engine for the server's protocols (HTTP, WebSocket), and a client whose engine is in this process.

    protocol ──stream()──► EngineClient ──commands──► EngineLoop   (a thread, or a process of its own)
             ◄── Piece ── Stream ◄──── frames, one a step ────┘

Text is made on the client's side (detokenizing, stop strings), never in the engine's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np

from minivllm.core.interfaces.params import SamplingParams
from minivllm.core.interfaces.plan import LogProbs
from minivllm.errors import EngineDeadError, PluginError, RequestError, error_from, shown
from minivllm.frontend.loop import Inbox

from .description import describe
from .engine_loop import EngineLoop
from .frames import ENDS, ROW, Frame
from .images import columns_of
from .routes import read_columns
from .scored import Columns
from .streams import Stream, TextPiece
from .taps import NOTHING, PooledTaps, read_values

if TYPE_CHECKING:
    from minivllm.config import Loaded
    from minivllm.core.interfaces.adapters import LoRARequest
    from minivllm.core.interfaces.images import PlacedImage
    from minivllm.runtime.text.tokenizer import Tokenizer

__all__ = ["EngineClient", "EngineInfo", "LocalClient", "Stream", "TextPiece"]
ALIVE = 5.0  # seconds without a frame after which an engine is not healthy
NO_ERROR = (None, None)
log = logging.getLogger("minivllm")


@dataclass(frozen=True)
class EngineInfo:
    """The facts about an engine that a client has.

    ``kv_tokens`` is the number of tokens that fit into the KV cache.  ``selections`` maps a kind of plug-in to the name
    of the chosen plug-in, or to a list of names.  ``reads`` are the extra sampling parameters that plug-ins read.
    ``tap_points`` maps each point of the model that can be tapped to its width.  ``energy`` is the name of the counter
    of joules, "" for none.  ``sampling`` are the sampling defaults of the model's generation_config.json.
    ``weight_bytes`` is the memory of the weights.  ``shape`` has the model's type and sizes (``description.SHAPE``).
    ``hidden`` is the width of an embedding, 0 if the engine makes none.  ``pooling`` and ``pooling_fault`` are those of
    ``frontend.pooling.DefaultPooling``.  ``for_embeddings`` is true for a model whose files name a pooling.  ``forms``
    are the kinds of grammars that the engine compiles.  ``explained`` has (seam, plug-in, reasons) for each choice.
    ``block`` is the number of tokens of a KV block.  ``images`` are the arguments of an ``ImageReader``.
    """

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
    weight_bytes: int
    shape: dict[str, Any]
    hidden: int
    pooling: str
    pooling_fault: str
    for_embeddings: bool
    forms: list[str]
    explained: list[list[str]]
    block: int
    images: dict[str, Any]


class EngineClient:
    """The client of an engine, used only by the event loop's thread.

    It has the tables of streams and questions, and handles frames.  A subclass starts and ends the engine (``open``,
    ``close``), sends commands (``_send``), passes on received frames (``_on_frame``) and reports the end of the engine
    (``_lost``).
    Invariant: only the reader of a stream holds it.  A stream without any reference is aborted.
    """

    info: EngineInfo  # facts about the engine, which ``open`` sets

    def __init__(self) -> None:
        self.tokenizer: Tokenizer | None = None
        # on_gap(seconds, n) is called after n gaps of ``seconds`` between the tokens of a branch
        self.on_gap: Callable[[float, int], None] | None = None
        self._streams: WeakValueDictionary[int, Stream] = WeakValueDictionary()
        self._ids: dict[str, int] = {}  # request id -> number of the stream
        self._read: set[Stream] = set()  # streams for whose next piece a task waits
        self._accepting: dict[int, asyncio.Future[None]] = {}  # requests that the engine has not accepted yet
        self._questions: dict[int, asyncio.Future[Any]] = {}  # questions without an answer
        self._last_written: tuple[SamplingParams, dict[str, Any]] | None = None
        self._numbers = itertools.count(1)
        self._last_frame = -math.inf  # time.monotonic() of the last frame
        self._why = "the engine has not been started"
        self._gone = True  # whether there is no engine; every request is then refused with ``_why``
        self._draining = False
        # number -> owner and frame of each request without a token yet, if the engine can be restarted
        self._untouched: dict[int, tuple[str, bytes]] = {}
        self.restarting = False  # whether the engine has ended and is being restarted
        self.restarted = 0  # number of restarts
        self._empty: asyncio.Event | None = None  # set when no request is left

    async def open(self) -> None:
        """Start the engine.  Raise the errors of ``LLM(...)``."""
        raise NotImplementedError

    async def close(self, drain: float = 0.0) -> bool:
        """Refuse new requests, wait ``drain`` seconds for the running ones, and end the engine.

        Return whether all requests ended in time.  Other streams get EngineDeadError.  A second call does nothing.
        """
        raise NotImplementedError

    def _send(self, kind: str, header: dict[str, Any], columns: dict[str, np.ndarray] | None = None) -> None:
        """Send a command to the engine."""
        raise NotImplementedError

    def _opened(self, description: dict[str, Any]) -> None:
        """Accept requests, since the engine has started.  ``description`` is the result of ``describe``."""
        self.info = EngineInfo(**{f.name: description[f.name] for f in fields(EngineInfo)})
        self._gone = False
        self._why = ""
        self._last_frame = time.monotonic()

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
        marks: Mapping[int, str] | None = None,
        pooling: str | None = None,
        session: str = "",
        lora: LoRARequest | None = None,
        images: Sequence[PlacedImage] = (),
    ) -> Stream:
        """Send a request and return its stream once the engine has accepted it.

        With ``pieces=False``, each branch may come as a single piece at its end.  ``owner`` is the request's owner
        (``fair_queue.owner_of``); owners take turns wherever requests wait.  With ``energy``, the request ends only
        when its joules are known.  ``marks`` maps token ids to the characters that stand for them in the stream's text.
        ``pooling`` requests an embedding (``Stream.tapped``).  Replicas read ``session``.  ``lora`` names an adapter.
        ``images`` are those of the prompt, which has their placeholders.
        Raise RequestError if the engine refuses the request, and EngineDeadError if no engine accepts requests.
        """
        self._check_open()
        ids = _prompt(prompt_ids)
        if request_id in self._ids:
            raise RequestError(f"request id {shown(request_id)} is in use; expected a new one", "request_id")
        taps.check_size()
        written = self._written(params)
        number = next(self._numbers)
        of_client = (self.tokenizer, self._drop, self._cut, self._read)
        stream = Stream(number, request_id, len(ids), params, *of_client, marks)
        stream.prompt = ids
        accepted = asyncio.get_running_loop().create_future()
        header = {
            "number": number,
            "id": request_id,
            "params": written,
            "arrival": stream.metrics.arrival_time,
            "watch": pieces or bool(params.stop),
            "owner": owner,
        }
        optional = {"energy": energy, "pooling": pooling, "lora": lora and astuple(lora)}
        header |= {name: value for name, value in optional.items() if value} | (taps.header() if taps else {})
        self._add(header, {"prompt": ids, **taps.columns(), **columns_of(images)})
        self._streams[number] = stream
        self._ids[request_id] = number
        self._accepting[number] = accepted
        try:
            await accepted
        except BaseException:  # the engine refused the request or died, or the caller was cancelled
            await stream.aclose()
            self._forget(stream)
            raise
        finally:
            self._accepting.pop(number, None)
        return stream

    def _add(self, header: dict[str, Any], columns: dict[str, np.ndarray]) -> None:
        """Send a new request.  RequestError if a frame cannot hold it."""
        try:
            self._send("add", header, columns)
        except (TypeError, ValueError) as e:
            if "pixels" in columns:
                raise RequestError(f"the images are too large for the engine: {e}", "images") from e
            raise RequestError(f"a sampling parameter cannot be sent to the engine: {e}", "extra") from e

    def _written(self, params: SamplingParams) -> dict[str, Any]:
        """Return the parameters as JSON data.  The last result is kept, because the prompts of a batch share it."""
        from minivllm.frontend.prompts import with_token_ids

        if self._last_written is None or self._last_written[0] is not params:
            self._last_written = params, params_to_json(with_token_ids(params, self.tokenizer))
        return self._last_written[1]

    async def abort(self, request_id: str) -> None:
        """Abort a request.  Its stream ends with the tokens so far.  Unknown ids are ignored."""
        number = self._ids.get(request_id)
        if number is not None and not self._gone:
            self._send("abort", {"number": number})

    def _drop(self, stream: Stream) -> None:
        """Abort the request of a stream that is not read any longer."""
        self._forget(stream)
        if not self._gone:
            with contextlib.suppress(EngineDeadError):  # the engine has died unnoticed
                self._send("abort", {"number": stream.number})

    def _cut(self, stream: Stream, sample: int, stop: str) -> None:
        """End a branch in the engine because its text has ended.

        ``stop`` is the stop string that was found.  "" means that the reader needs no more text.
        """
        if not self._gone:
            with contextlib.suppress(EngineDeadError):
                self._send("cut", {"number": stream.number, "sample": sample, "stop": stop})

    def _refuse(self, number: int, error: Exception) -> None:
        """Pass the engine's refusal to the caller of ``stream``.

        A restarted engine may also refuse a request that the engine before had accepted.  Then its stream fails.
        """
        self._untouched.pop(number, None)
        waiting = self._accepting.get(number)
        if waiting is not None:
            settle(waiting, None, error)
            return
        stream = self._streams.get(number)
        if stream is not None and self.restarted:
            stream.fail(error)
            self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        """Remove a stream from all tables."""
        self._streams.pop(stream.number, None)
        self._untouched.pop(stream.number, None)
        if self._ids.get(stream.request_id) == stream.number:
            del self._ids[stream.request_id]
        if not self._ids and self._empty is not None:
            self._empty.set()

    def _check_open(self) -> None:
        """Raise EngineDeadError if there is no engine that accepts requests."""
        if self._gone:
            raise EngineDeadError(self._why)
        if self._draining:
            raise EngineDeadError("the engine is shutting down and accepts no new requests")

    # ---- questions -----------------------------------------------------------------------------------------------

    async def stats(self) -> dict[str, Any]:
        """Return the engine's statistics."""
        return await self._ask("stats")

    async def state(self, trim: bool) -> dict[str, Any]:
        """Return the engine's tables and memory (``state.engine``), to find leaks."""
        return await self._ask("state", trim=trim)

    async def snapshot(self, owner: str | None, steps: int = 0, ended: int = 0) -> dict[str, Any]:
        """Return a snapshot of the engine (``snapshot.Snapshots.take``)."""
        return await self._ask("snapshot", owner=owner, steps=steps, ended=ended)

    def tables(self) -> dict[str, int]:
        """Return the numbers of entries in the client's tables, all 0 without requests."""
        return {
            "streams": len(self._streams),
            "ids": len(self._ids),
            "accepting": len(self._accepting),
            "asked": len(self._questions),
            "read": len(self._read),
        }

    async def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache, and return True."""
        return await self._ask("reset_prefix_cache")

    async def load_adapter(self, adapter: LoRARequest) -> None:
        """Load an adapter into host memory.  RequestError if it does not fit the model."""
        await self._ask("load_adapter", lora=astuple(adapter))

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter by its name.  An unknown name is ignored."""
        await self._ask("unload_adapter", name=name)

    async def weights(self, do: str, **args: Any) -> dict[str, Any]:
        """Call ``pause``, ``resume``, ``update``, ``sleep`` or ``wake`` of the engine's weights, and return their
        state.  "stats" returns the state only."""
        return await self._ask("weights", do=do, args=args)

    async def prefixes(self) -> dict[str, Any]:
        """Return the ``tokens`` of the named prefixes by name, and the ``store`` that keeps them, with ``options``."""
        return await self._ask("prefixes")

    async def save_prefix(self, name: str, ids: list[int], tenant: str, cache_salt: str | None) -> int:
        """Store the KV blocks of a computed prompt ``ids`` under a name, and return the number of stored tokens."""
        return await self._ask("save_prefix", name=name, ids=ids, tenant=tenant, cache_salt=cache_salt)

    async def drop_prefix(self, name: str) -> None:
        """Remove the name of a saved prefix, so that its blocks may be evicted."""
        await self._ask("drop_prefix", name=name)

    async def profile(self, start: bool) -> str:
        """Start a trace of the torch profiler, or end it, and return the path of the file that the end writes."""
        if start:
            self._profile = f"minivllm-profile-{time.strftime('%Y%m%d-%H%M%S')}.json"
        return await self._ask("profile", start=start, path=getattr(self, "_profile", "minivllm-profile.json"))

    async def _ask(self, what: str, **args: Any) -> Any:
        """Call the method ``_ask_`` + ``what`` of ``EngineLoop`` on the engine's loop, and return its result.
        EngineDeadError if the engine has ended."""
        if self._gone:
            raise EngineDeadError(self._why)
        return await self._question(what, args)

    def front_version(self, version: int) -> int:
        """Return the version of weights that clients see, for a version of the engine."""
        return version

    async def _question(self, what: str, args: dict[str, Any]) -> Any:
        """Send a question to the engine's loop, also to an engine that does not serve yet, and return the answer."""
        number = next(self._numbers)
        answer = self._questions[number] = asyncio.get_running_loop().create_future()
        try:
            self._send("ask", {"ask": number, "what": what, "args": args})
            return await answer
        finally:
            self._questions.pop(number, None)

    def health(self) -> dict[str, Any]:
        """Return the fields of /health besides the status."""
        return {"restarts": self.restarted} if self.restarted else {}

    @property
    def ended(self) -> bool:
        """Return True if the engine has ended, and is not being started again."""
        return self._gone and not self.restarting

    def healthy(self) -> tuple[bool, str]:
        """Return whether the engine ran a step or was idle within the last 5 s, and the reason if not."""
        silent = time.monotonic() - self._last_frame
        if self._gone:
            return False, self._why
        if silent > ALIVE:
            return False, f"the engine has neither run a step nor been idle for {silent:.1f} s"
        return True, ""

    # ---- frames --------------------------------------------------------------------------------------------------

    def _on_frame(self, header: Mapping[str, Any], columns: Mapping[str, np.ndarray]) -> None:
        """Pass the content of a frame to the requests and questions that it is for."""
        self._last_frame = time.monotonic()
        for number in header.get("accepted", ()):
            settle(self._accepting.get(number), None)
        for number, *error in header.get("refused", ()):
            self._refuse(number, error_from(*error))
        for number, value, error in header.get("answers", ()):
            settle(self._questions.get(number), value, error and error_from(*error))
        if "first" in columns:
            firsts = (columns[name].tolist() for name in ("first", "first_at", "cached", "entered"))
            for number, at, cached, entered in zip(*firsts, strict=True):
                stream = self._streams.get(number)
                if stream is not None:
                    stream.started(at, cached, entered)
        if "dead" in header:
            self._feed({**header, "errors": ()}, columns, ends=False)
            self._died(header["dead"])
            return
        self._score_prompts(columns)
        self._feed(header, columns)
        for number, sample, values in read_values(columns):
            stream = self._streams.get(number)
            if stream is not None:
                stream.tapped.setdefault(sample, []).append(values)
        for number, sample, routes in read_columns(columns):
            if (stream := self._streams.get(number)) is not None:
                stream.routes[sample] = routes
        if "done" in columns:
            self._finish(header, columns)

    def _finish(self, header: Mapping[str, Any], columns: Mapping[str, np.ndarray]) -> None:
        """End the streams of requests that have ended in the engine, with their energy, error, version of the weights
        and order."""
        orders = dict(header.get("order", ()))
        failed = dict(header.get("failed", ()))
        versions = dict(header.get("weights", ()))
        done = columns["done"]
        joules = columns.get("joules", np.full(len(done), np.nan))
        rows = zip(done.tolist(), columns["done_at"].tolist(), joules.tolist(), strict=True)
        for number, at, spent in rows:
            stream = self._streams.get(number)
            if stream is None:
                continue
            stream.metrics.joules = None if math.isnan(spent) else spent
            if number in failed:
                stream.fail(PluginError(failed[number]))
            stream.weights_version = self.front_version(versions.get(number, 0))
            stream.finished(at, orders.get(number))
            self._forget(stream)

    def _score_prompts(self, columns: Mapping[str, np.ndarray]) -> None:
        """Pass log-probabilities of prompts to their streams, before the first piece of each."""
        if "prompts" not in columns:
            return
        rest = [columns[f"prompt_{name}"] for name in ("chosen", "rank", "top_ids", "top")]
        parts: dict[int, list[tuple[int, LogProbs]]] = {}
        for number, first, count, best in columns["prompts"].reshape(-1, 4).tolist():
            sizes = (count, count, count * best, count * best)
            chosen, rank, ids, top = (column[:size] for column, size in zip(rest, sizes, strict=True))
            rest = [column[size:] for column, size in zip(rest, sizes, strict=True)]
            lp = LogProbs(chosen, rank, ids.reshape(count, best), top.reshape(count, best))
            parts.setdefault(number, []).append((first, lp))
        for number, found in parts.items():
            stream = self._streams.get(number)
            if stream is not None:
                stream.score_prompt(found)

    def _feed(self, header: Mapping[str, Any], columns: Mapping[str, np.ndarray], ends: bool = True) -> None:
        """Pass the rows of a frame to their streams.

        ``ends=False`` leaves out the ends of failed branches, whose streams will receive the engine's error.
        """
        if "stream" not in columns:
            return
        errors = {(number, sample): rest for number, sample, *rest in header.get("errors", ())}
        tokens = columns["tokens"].tolist()
        scores = Columns(columns)
        on_gap = self.on_gap
        at = 0
        rows = zip(*(columns[name].tolist() for name in ROW), strict=True)
        for number, sample, count, end, stop_id, scored in rows:
            ids = tokens[at : at + count]
            at += count
            logprobs = scores.take(ids) if scored else None
            stream = self._streams.get(number)
            if stream is None:
                continue
            reason = ENDS[end] if ends or ENDS[end] != "error" else None
            stop_token = None if stop_id < 0 else stop_id
            if on_gap is not None and count:
                gap = stream.gap(sample, count, self._last_frame)
                if gap is not None:
                    on_gap(*gap)
            error, param = errors.get((number, sample), NO_ERROR) if errors else NO_ERROR
            stream.feed(sample, ids, reason, stop_token, logprobs, error, param)
            if self._untouched and (count or reason):
                self._untouched.pop(number, None)

    def _died(self, why: str) -> None:
        """Handle an engine that has ended by itself."""
        self._lost(why)

    def _lost(self, why: str) -> None:
        """Fail all streams, requests and questions with ``why``, because there is no engine any longer."""
        if not self._gone:
            self._gone = True
            self._why = why
        error = EngineDeadError(self._why)
        for stream in list(self._streams.values()):
            stream.fail(error)
            self._forget(stream)
        for waiting in (*self._accepting.values(), *self._questions.values()):
            settle(waiting, None, EngineDeadError(self._why))

    async def _drain(self, seconds: float) -> bool:
        """Refuse new requests and wait ``seconds`` for the running ones.  Return whether none is left."""
        self._draining = True
        if self._ids and seconds > 0 and not self._gone:
            self._empty = asyncio.Event()
            try:
                await asyncio.wait_for(self._empty.wait(), seconds)
            except asyncio.TimeoutError:
                log.warning("%d requests had not ended after %g s", len(self._ids), seconds)
        return not self._ids


class LocalClient(EngineClient):
    """A client whose engine runs in a thread of this process, for tests and for use in a single process."""

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
        drained = await self._drain(drain)
        if self._thread is not None:
            self._send("stop", {})
            await asyncio.to_thread(self._thread.join)
            self._thread = None
            await asyncio.to_thread(self._engine.stop)
        self._lost("the engine was stopped")
        return drained

    # ---- the methods of ``engine_loop.Link``, called on the engine's thread ---------------------------------------

    def receive(self, seconds: float) -> list[Frame]:
        self._inbox.wait(seconds)
        return list(iter(self._inbox.take, None))

    def send(self, header: dict[str, Any], columns: dict[str, np.ndarray]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._on_frame, header, columns)
        except RuntimeError as e:
            raise EngineDeadError("the event loop of the engine's client was closed") from e


def params_to_json(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters that are not at their defaults as JSON data.  Raise RequestError for a Python function."""
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
    """Set a future's result or error, if there is a future that has neither."""
    if waiting is None or waiting.done():
        return
    if error is None:
        waiting.set_result(value)
    else:
        waiting.set_exception(error)
