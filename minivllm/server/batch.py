"""``minivllm run-batch``: send the requests of an OpenAI batch file through the server's application, in this process.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}                          input
    {"id": "batch_req_...", "custom_id": "a", "response": {"status_code", "request_id", "body"}, "error": null}  output

The engine runs in a process of its own, as for ``minivllm serve``, but there is no socket: each request is one call of
the ASGI application.  Lines are read as they are needed, and a result is written as soon as it is there.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import itertools
import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from minivllm import files
from minivllm.errors import ConfigError, EngineDeadError, ResourceError, shown

from . import logs
from .app import Application
from .replicas.client import make_client
from .serve import Stop, check_config, make_service

if TYPE_CHECKING:
    from minivllm.config import Loaded

    from .link.client import EngineClient

URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/v1/score",
    "/v1/rerank",
    "/score",
    "/rerank",
    "/v2/rerank",
)
KEYS = ("custom_id", "method", "url", "body")
LONGEST = 64 << 20  # largest size of a line in bytes
MOST_ID = 512  # largest number of characters of a custom_id
FULL, NO_ENGINE = 429, 503  # statuses after which a request is sent again, or the engine is looked at
AHEAD = 16  # number of requests beyond the number that the engine can run at the same time
PAUSE = 0.2  # seconds before a request is sent again


class LineError(Exception):
    """A line of the input that is no request.  ``custom_id`` is the line's, or None."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code, self.custom_id = code, custom_id


@dataclass(frozen=True)
class BatchRequest:
    """The request of one line.  ``body`` is JSON."""

    line: int
    custom_id: str
    url: str
    body: bytes


@dataclass(frozen=True)
class BatchFiles:
    """The files of a batch.  ``resume`` appends to the output, and skips the lines that have a result in it."""

    source: Path
    target: Path
    resume: bool = False


@dataclass
class Tally:
    """The number of results: ``answered`` with a status below 400, ``failed`` others, ``skipped`` of an earlier run."""

    answered: int = 0
    failed: int = 0
    skipped: int = 0
    interrupted: bool = False


def read_request(text: bytes, line: int, seen: dict[str, int]) -> BatchRequest:
    """Return the request of a line.  Raise a LineError for a line without a valid request.

    ``seen`` maps each custom_id to the number of its first line.  The line is added, even if another part of it is
    wrong, so that no two lines have a result with the same custom_id.
    """
    if len(text) > LONGEST:
        raise LineError("invalid_line", f"line {line} has more than {LONGEST} bytes")
    try:
        value = files.parse_json(text.decode(), f"line {line}")
    except UnicodeDecodeError:
        raise LineError("invalid_json_line", f"line {line}: not UTF-8; save the file as UTF-8") from None
    except ConfigError as exc:
        raise LineError("invalid_json_line", str(exc)) from None
    if not isinstance(value, dict):
        raise LineError("invalid_line", f"line {line} is not a JSON object with {', '.join(KEYS)}")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MOST_ID:
        expected = f"a text of 1 to {MOST_ID} characters"
        raise LineError("invalid_custom_id", f"line {line}: custom_id={shown(custom_id)}: expected {expected}")
    first = seen.setdefault(custom_id, line)
    if first != line:
        raise LineError(
            "duplicate_custom_id",
            (f"line {line}: custom_id={shown(custom_id)} was used in line {first}; expected another one"),
        )
    method, url, body = value.get("method"), value.get("url"), value.get("body")
    if method != "POST":
        raise LineError("invalid_method", f"line {line}: method={shown(method)}: expected 'POST'", custom_id)
    if url not in URLS:
        raise LineError("invalid_url", f"line {line}: url={shown(url)}: expected {', '.join(URLS)}", custom_id)
    if not isinstance(body, dict):
        raise LineError("invalid_body", f"line {line}: body={shown(body)}: expected an object", custom_id)
    for name in ("stream", "background"):
        if body.get(name):
            text_ = f"line {line}: body.{name}: a batch has whole answers; leave {name} out"
            raise LineError("invalid_body", text_, custom_id)
    return BatchRequest(line, custom_id, url, json.dumps(body).encode())


def lines_of(source: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not empty, with their numbers from 1.

    A longer line than ``LONGEST`` is cut.  A byte order mark at the beginning is left out."""
    for number in itertools.count(1):
        text = source.readline(LONGEST + 1)
        if not text:
            return
        if number == 1:
            text = text.removeprefix(codecs.BOM_UTF8)
        while len(text) > LONGEST and not text.endswith(b"\n"):
            rest = source.readline(LONGEST)
            if not rest or rest.endswith(b"\n"):
                break
        if text.strip():
            yield number, text


class Results:
    """The output file of a batch, and the lines of the input that have a result in it."""

    def __init__(self, paths: BatchFiles) -> None:
        self.ids: set[str] = set()
        self.numbers: set[int] = set()  # numbers of the lines without a custom_id that have a result
        self.tally = Tally()
        if paths.resume and os.path.exists(paths.target):
            self._read(paths.target)
        self._file = open(paths.target, "ab", buffering=0)  # noqa: SIM115  (closed by ``close``)
        self._name = paths.target

    def _read(self, target: Path) -> None:
        """Read the results of an earlier run, and remove a last line that is not complete.  ConfigError for any other
        line that no batch has written."""
        end = 0
        with open(target, "r+b") as file:
            for text in file:
                if not text.endswith(b"\n"):
                    break
                try:
                    value = json.loads(text)
                    custom_id, error = value["custom_id"], value["error"]
                except (ValueError, TypeError, KeyError, RecursionError):
                    custom_id, error = -1, None
                if custom_id is not None and not isinstance(custom_id, str):
                    raise ConfigError(f"{target}: not the output of a batch: {shown(text[:80])}")
                end += len(text)
                if custom_id is None:
                    number = error.get("line") if isinstance(error, dict) else None
                    self.numbers.add(number if isinstance(number, int) else 0)
                else:
                    self.ids.add(custom_id)
            file.truncate(end)

    def add(self, custom_id: str | None, name: str, response: bytes, error: Any = None) -> None:
        """Write a result.  ``name`` is the id of its request, and ``response`` the JSON of the response.

        ResourceError if it cannot be written; no part of it then stays in the file."""
        head = json.dumps({"id": f"batch_req_{name}", "custom_id": custom_id})
        tail = json.dumps({"error": error})
        line = head[:-1].encode() + b', "response": ' + response + b", " + tail[1:].encode() + b"\n"
        end = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(line) == len(line):
                return
            why = "the disk is full"
        except OSError as exc:
            why = exc.strerror or str(exc)
        with contextlib.suppress(OSError):
            self._file.truncate(end)
        raise ResourceError(f"{self._name}: a result cannot be written: {why}; make room, then continue with --resume")

    def add_answer(self, request: BatchRequest, status: int, name: str, body: bytes) -> None:
        """Write the answer to a request."""
        if status < 400:
            self.tally.answered += 1
        else:
            self.tally.failed += 1
        head = json.dumps({"status_code": status, "request_id": name})
        self.add(request.custom_id, name, head[:-1].encode() + b', "body": ' + body + b"}")

    def add_error(self, line: int, exc: LineError) -> None:
        """Write the result of a line that is no request: an error, and null as the response."""
        self.tally.failed += 1
        error = {"code": exc.code, "message": str(exc), "line": line}
        self.add(exc.custom_id, f"line_{line}", b"null", error)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


async def call(app: Any, url: str, body: bytes) -> tuple[int, str, bytes]:
    """Send a request to an ASGI application.  Return its status, the request's id and the body of the answer."""
    status, name = 0, ""
    parts: list[bytes] = []
    stopping = False
    never = asyncio.Event()

    async def receive() -> dict[str, Any]:
        """Return the body at the first call.  The client does not leave."""
        nonlocal stopping
        if stopping:
            await never.wait()
        stopping = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        """Store a part of the answer."""
        nonlocal status, name
        if message["type"] == "http.response.start":
            status = message["status"]
            names = dict(message.get("headers", ()))
            name = names.get(b"x-request-id", b"").decode()
        else:
            parts.append(message.get("body", b""))

    length = str(len(body)).encode()
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", length)]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": url,
        "raw_path": url.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 0),
        "server": ("localhost", 80),
        "state": {},
    }
    await app(scope, receive, send)
    return status, name, b"".join(parts)


class Batch:
    """A running batch, with at most ``most`` requests at a time."""

    def __init__(self, app: Any, client: Any, results: Results, most: int) -> None:
        self.app, self.client, self.results, self.most = app, client, results, most
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, source: IO[bytes]) -> None:
        """Send the requests of all lines and write their results.  Raise EngineDeadError if the engine dies."""
        results, seen = self.results, dict[str, int]()
        try:
            for line, text in lines_of(source):
                try:
                    request = read_request(text, line, seen)
                except LineError as exc:
                    if exc.custom_id in results.ids or line in results.numbers:
                        results.tally.skipped += 1
                    else:
                        results.add_error(line, exc)
                    continue
                if request.custom_id in results.ids:
                    results.tally.skipped += 1
                    continue
                self._tasks.add(asyncio.create_task(self._one(request)))
                await self._wait(self.most - 1)
            await self._wait(0)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _wait(self, most: int) -> None:
        """Wait until at most ``most`` requests run.  Raise the error of a request that failed."""
        while len(self._tasks) > most:
            ended, self._tasks = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            failed = [task.exception() for task in ended]  # of all, because asyncio logs an exception that nobody reads
            if error := next(filter(None, failed), None):
                raise error

    async def _one(self, request: BatchRequest) -> None:
        """Send a request until it is not refused for lack of room, and write its answer."""
        while True:
            status, name, body = await call(self.app, request.url, request.body)
            if status == NO_ENGINE and not self.client.restarting:
                healthy, why = self.client.healthy()
                if not healthy:
                    raise EngineDeadError(why)
            if status not in (FULL, NO_ENGINE):
                break
            await asyncio.sleep(PAUSE)
        self.results.add_answer(request, status, name, body)


async def run_batch(loaded: Loaded, paths: BatchFiles, most: int | None = None) -> Tally:
    """Run a batch and return the numbers of its results.

    ``most`` is the number of requests that run at once; None means ``AHEAD`` more than the engine runs sequences, or
    fewer if ``max_queue`` is smaller.  SIGINT and SIGTERM end the batch and set ``Tally.interrupted``.  Results
    that are finished by then are written.

    Raise ConfigError for a wrong configuration, the errors of ``LLM(...)`` if the engine cannot start, and
    EngineDeadError if the engine ends with an error.
    """
    check_config(loaded)
    server = loaded.server
    app = Application(server)
    client = make_client(loaded)
    stop = Stop()
    results = Results(paths)
    with stop.listening():
        stopping = asyncio.create_task(stop.first.wait())
        work = asyncio.create_task(_run(loaded, app, client, paths, results, most))
        try:
            await asyncio.wait({stopping, work}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            else:
                results.tally.interrupted = True
        finally:
            stopping.cancel()
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            if app.service is not None:
                await app.service.close()
            await client.close()
            results.close()
    return results.tally


async def _run(
    loaded: Loaded, app: Application, client: EngineClient, paths: BatchFiles, results: Results, most: int | None
) -> None:
    """Start the engine and send the requests of the input, at most ``most`` at the same time (None means as many as the
    engine takes)."""
    await client.open()
    service = make_service(client, loaded.server, loaded.engine.model, loaded.sampling, loaded.engine.allow_targets)
    service.chosen()  # raises ConfigError for formats that cannot be combined
    service.tokens.pool.start()
    service.images.start()
    app.open(service)
    room = min(client.info.max_num_seqs + AHEAD, service.door.room)
    batch = Batch(app, client, results, room if most is None else most)
    progress = asyncio.create_task(_report(results.tally, loaded.server.stats_interval))
    try:
        with open(paths.source, "rb") as source:
            await batch.run(source)
    finally:
        progress.cancel()


async def _report(tally: Tally, seconds: float) -> None:
    """Log the numbers of results every ``seconds``; 0 means never."""
    start = time.monotonic()
    while seconds > 0:
        await asyncio.sleep(seconds)
        counts = {"answered": tally.answered, "failed": tally.failed, "skipped": tally.skipped}
        sentence = f"{tally.answered} answers, {tally.failed} errors after {time.monotonic() - start:.0f} s"
        logs.event("progress", logging.WARNING, sentence=sentence, **counts)


def check_files(paths: BatchFiles) -> None:
    """Raise ConfigError for an input that cannot be read, or an output that would overwrite results."""
    if not os.path.isfile(paths.source):
        raise ConfigError(f"-i {paths.source}: there is no such file")
    target = paths.target
    if os.path.exists(target) and os.path.samefile(paths.source, target):
        raise ConfigError(f"-o {target}: is the input; expected another file")
    if not paths.resume and os.path.exists(target) and target.stat().st_size:
        raise ConfigError(f"-o {target}: the file has results; --resume continues them, or name another file")
