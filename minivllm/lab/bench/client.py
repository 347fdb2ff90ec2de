"""Asks a server with OpenAI's ``/v1/completions`` over HTTP, and takes the time of each piece of an answer.

Bare HTTP/1.1 on asyncio streams: a client that parses less measures itself less.  Each request has a connection of its
own, which is part of what it measures, as in ``vllm bench serve``.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from minivllm.errors import ConfigError, ResourceError, brief, describe_error, shown

from .answers import TimedAnswer
from .workload import BenchAsk

MOST = 1 << 22  # bytes of a line
TIMEOUT = 600.0  # seconds for an answer
PATIENCE = 5.0  # seconds that looking at the server may take


class HttpServer:
    """``url`` as http://host:port, with or without /v1; ``extra``: fields of each request beside those of the workload;
    ``timeout``: seconds for a whole answer.  ConfigError of a URL that is none."""

    def __init__(
        self,
        url: str,
        model: str = "",
        api_key: str = "",
        extra: Mapping[str, Any] | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        try:
            parts = urlsplit(url)
            self.port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            raise ConfigError(f"--url {shown(url)}: want http://host:port") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url {shown(url)}: want http://host:port or https://host:port")
        self.url, self.host, self.model = url, parts.hostname, model
        self.base = parts.path.rstrip("/").removesuffix("/v1")
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.extra, self.timeout = dict(extra or {}), timeout
        self.headers = f"Host: {parts.netloc}\r\nConnection: close\r\n"
        if api_key:
            self.headers += f"Authorization: Bearer {api_key}\r\n"

    async def find_model(self) -> str:
        """The name of the first model that the server has, unless one was given.  ResourceError if it does not say."""
        if not self.model:
            try:
                found = await asyncio.wait_for(self._get("/v1/models"), PATIENCE)
                self.model = str(found["data"][0]["id"])
            except (OSError, ValueError, LookupError, TypeError, asyncio.TimeoutError) as exc:
                said = describe_error(exc)
                raise ResourceError(f"{self.url}/v1/models names no model ({said}); is a server there?") from None
        return self.model

    async def _get(self, path: str) -> Any:
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
        """One answer; what goes wrong is its ``error``, never raised."""
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
        answer, began = TimedAnswer(), time.perf_counter()
        try:
            await asyncio.wait_for(self._post(data, answer, began), self.timeout)
        except asyncio.TimeoutError:
            answer.error = f"no whole answer within {self.timeout:g} s (--timeout)"
        except (OSError, ValueError, LookupError, TypeError, AttributeError, asyncio.IncompleteReadError) as exc:
            answer.error = describe_error(exc)  # of values too that are not of the kind that OpenAI's have
        if not answer.error and not answer.output_tokens:
            answer.error = "the answer has no tokens"
        return answer

    async def _post(self, data: bytes, answer: TimedAnswer, began: float) -> None:
        reader, writer = await self._connect()
        try:
            head = f"POST {self.base}/v1/completions HTTP/1.1\r\n{self.headers}Content-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            await self._read(reader, answer, began)
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader, answer: TimedAnswer, began: float) -> None:
        status, lines = await _head(reader)
        if status != 200:
            text = b"".join([line async for line in lines]).decode(errors="replace")
            answer.error = f"status {status}: {brief(text, 300)}"
            return
        pieces, usage, last = 0, None, began
        async for line in lines:
            now = time.perf_counter()
            if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                continue
            event = json.loads(line[5:])
            if not isinstance(event, dict):
                raise ValueError(f"an event is no object: {shown(event)}")
            if "error" in event:
                answer.error = brief(str(event["error"]), 300)
                return
            usage = event.get("usage") or usage
            # whatever its text: that of a token may wait for the next one's
            if [choice.get("text") for choice in event.get("choices", ())]:
                if pieces:
                    answer.itls.append(now - last)
                else:
                    answer.ttft = now - began
                pieces, last = pieces + 1, now
        # the end of an answer is its last piece
        answer.latency = (last if pieces else time.perf_counter()) - began
        answer.ttft = answer.ttft or answer.latency
        answer.output_tokens = int(usage["completion_tokens"]) if usage else pieces
        answer.prompt_tokens = int(usage["prompt_tokens"]) if usage else 0


async def _head(reader: asyncio.StreamReader) -> tuple[int, AsyncIterator[bytes]]:
    """The status of a response, and the lines of its body as they come.  ValueError if it is no HTTP."""
    words = (await reader.readline()).split(None, 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        raise ValueError(f"no HTTP: {shown(b' '.join(words))}")
    headers = {}
    while (line := (await reader.readline()).strip()) != b"":
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip().lower()
    chunked = "chunked" in headers.get("transfer-encoding", "")
    left = int(headers["content-length"]) if "content-length" in headers else None
    return int(words[1]), _lines(_chunks(reader) if chunked else _plain(reader, left))


async def _plain(reader: asyncio.StreamReader, left: int | None) -> AsyncIterator[bytes]:
    while left is None or left > 0:
        data = await reader.read(MOST if left is None else min(left, MOST))
        if not data:
            return
        left = None if left is None else left - len(data)
        yield data


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """RFC 9112, section 7.1; trailers are not read."""
    while size := int((await reader.readline()).split(b";")[0] or b"0", 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    rest = b""
    async for data in pieces:
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield line
    if rest:
        yield rest
