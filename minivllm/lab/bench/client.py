"""Send requests to a server's ``/v1/completions`` over HTTP, and measure the time of each piece of an answer.

The client speaks plain HTTP/1.1 on asyncio streams, so that its own work adds little to the times.  Each request opens
a connection, whose time is measured too, as in ``vllm bench serve``.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

from minivllm.errors import ConfigError, ResourceError, brief, describe_error, shown

from . import Row
from .answers import TimedAnswer
from .workload import BenchAsk

MOST = 1 << 22  # largest number of bytes of a line in a response
TIMEOUT = 600.0  # seconds to wait for a whole answer
PATIENCE = 5.0  # seconds to wait for the list of models


class HttpServer:
    """A server that is measured.

    ``url`` is http://host:port, with or without /v1.  ``model`` "" means the server's first model.  ``extra`` are
    further fields of each request.  ``timeout`` is in seconds, for a whole answer.  Raise ConfigError for a wrong URL.
    """

    def __init__(
        self,
        url: str,
        model: str = "",
        api_key: str = "",
        extra: Row | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        try:
            parts = urlsplit(url)
            self.port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            raise ConfigError(f"--url {shown(url)}: expected http://host:port") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url {shown(url)}: expected http://host:port or https://host:port")
        self.url = url
        self.host = parts.hostname
        self.model = model
        self.base = parts.path.rstrip("/").removesuffix("/v1")
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.extra = dict(extra or {})
        self.timeout = timeout
        self.headers = f"Host: {parts.netloc}\r\nConnection: close\r\n"
        if api_key:
            self.headers += f"Authorization: Bearer {api_key}\r\n"

    async def find_model(self) -> str:
        """Return the name of the model, which by default is the server's first.  Raise ResourceError if it has none."""
        if not self.model:
            try:
                found = await asyncio.wait_for(self._get("/v1/models"), PATIENCE)
                self.model = str(found["data"][0]["id"])
            except (OSError, ValueError, LookupError, TypeError, asyncio.TimeoutError) as exc:
                reason = describe_error(exc)
                raise ResourceError(f"{self.url}/v1/models names no model ({reason}); is a server there?") from None
        return self.model

    async def _get(self, path: str) -> Any:
        """Return the JSON value at a path of the server.  Raise ValueError for an HTTP error."""
        reader, writer = await self._connect()
        try:
            writer.write(f"GET {self.base}{path} HTTP/1.1\r\n{self.headers}\r\n".encode())
            status, body = await _head(reader)
            text = b"".join([line async for line in body])
            if status != 200:
                raise ValueError(f"status {status}: {brief(text.decode(errors='replace'))}")
            return json.loads(text)
        finally:
            writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.host, self.port, ssl=self.tls, limit=MOST)

    async def ask(self, ask: BenchAsk, seed: int) -> TimedAnswer:
        """Send a request and return its answer; a failure is stored in ``error`` and not raised."""
        body = {
            "model": self.model,
            "prompt": ask.prompt if isinstance(ask.prompt, str) else list(ask.prompt),
            "max_tokens": ask.max_tokens,
            "ignore_eos": True,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }
        data = json.dumps({k: v for k, v in body.items() if v is not None}).encode()
        answer = TimedAnswer()
        began = time.perf_counter()
        try:
            await asyncio.wait_for(self._post(data, answer, began), self.timeout)
        except asyncio.TimeoutError:
            answer.error = f"no whole answer within {self.timeout:g} s (--timeout)"
        except (OSError, ValueError, LookupError, TypeError, AttributeError, asyncio.IncompleteReadError) as exc:
            answer.error = describe_error(exc)  # the errors include those of JSON values of a wrong type
        if not answer.error and not answer.output_tokens:
            answer.error = "the answer has no tokens"
        return answer

    async def _post(self, data: bytes, answer: TimedAnswer, began: float) -> None:
        """Send a request body and read the answer."""
        reader, writer = await self._connect()
        try:
            head = f"POST {self.base}/v1/completions HTTP/1.1\r\n{self.headers}Content-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            await self._read(reader, answer, began)
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader, answer: TimedAnswer, began: float) -> None:
        """Read the server-sent events of an answer and fill in its times and token counts."""
        status, lines = await _head(reader)
        if status != 200:
            text = b"".join([line async for line in lines]).decode(errors="replace")
            answer.error = f"status {status}: {brief(text, 300)}"
            return
        pieces = 0
        usage = None
        last = began
        async for line in lines:
            now = time.perf_counter()
            if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                continue
            event = json.loads(line[5:])
            if not isinstance(event, dict):
                raise ValueError(f"an event is not a JSON object: {shown(event)}")
            if "error" in event:
                answer.error = brief(str(event["error"]), 300)
                return
            usage = event.get("usage") or usage
            # a piece may have an empty text, since the text of a token can depend on the next token
            if [choice.get("text") for choice in event.get("choices", ())]:
                if pieces:
                    answer.itls.append(now - last)
                else:
                    answer.ttft = now - began
                pieces += 1
                last = now
        # the last piece ends the answer, because later events carry no tokens
        answer.latency = (last if pieces else time.perf_counter()) - began
        answer.ttft = answer.ttft or answer.latency
        answer.output_tokens = int(usage["completion_tokens"]) if usage else pieces
        answer.prompt_tokens = int(usage["prompt_tokens"]) if usage else 0


async def _head(reader: asyncio.StreamReader) -> tuple[int, AsyncIterator[bytes]]:
    """Return the status of a response, and the lines of its body.  Raise ValueError if it is not HTTP."""
    words = (await reader.readline()).split(None, 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        raise ValueError(f"the response is not HTTP: {shown(b' '.join(words))}")
    headers = {}
    while (line := (await reader.readline()).strip()) != b"":
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip().lower()
    chunked = "chunked" in headers.get("transfer-encoding", "")
    length = int(headers["content-length"]) if "content-length" in headers else None
    body = _chunks(reader) if chunked else _plain(reader, length)
    return int(words[1]), _lines(body)


async def _plain(reader: asyncio.StreamReader, length: int | None) -> AsyncIterator[bytes]:
    """Yield the parts of a body of ``length`` bytes; None means up to the end of the connection."""
    while length is None or length > 0:
        data = await reader.read(MOST if length is None else min(length, MOST))
        if not data:
            return
        if length is not None:
            length -= len(data)
        yield data


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the parts of a chunked body (RFC 9112, section 7.1); trailers are not read."""
    while size := int((await reader.readline()).split(b";")[0] or b"0", 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the lines of a body."""
    rest = b""
    async for data in pieces:
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield line
    if rest:
        yield rest
