"""The sources of answers for ``minivllm chat``: an engine in this process, or a server with OpenAI's API."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from minivllm.cli.answer_views import AnswerView, PlainView, printable
from minivllm.cli.chat_thoughts import TAIL, Separated, parser_of
from minivllm.cli.commands import write_stream
from minivllm.errors import ConfigError, ResourceError, shown

Messages = list[dict[str, str]]
TIMEOUT = 600.0  # seconds without a byte from a server
MOST_ERROR = 100_000  # number of bytes of a server's error response that are read
# sampling parameters that /set can change -> their names in a request of OpenAI's API
KINDS: dict[str, type] = {
    "max_tokens": int,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "seed": int,
}


@dataclass
class Facts:
    """Token counts and times of an answer, in seconds; a time is None if the source does not report it."""

    prompt: int = 0
    cached: int = 0
    tokens: int = 0
    waited: float | None = None
    first: float = 0.0
    seconds: float = 0.0
    reason: str = ""
    thought: str = ""  # the reasoning, if the source returns it apart from the answer

    def why(self) -> str:
        """Return the counts and times as lines of text, for the command /why."""
        rate = (self.tokens - 1) / (self.seconds - self.first) if self.seconds > self.first and self.tokens > 1 else 0.0
        lines = [f"prompt     {self.prompt} tokens, of which {self.cached} were a prefix hit and were not computed"]
        if self.waited is not None:
            lines.append(f"waited     {1e3 * self.waited:.1f} ms for a row and blocks")
        lines.append(f"first      after {1e3 * self.first:.0f} ms")
        lines.append(f"answer     {self.tokens} tokens in {self.seconds:.2f} s, {rate:.1f} tok/s")
        ends = {"stop": "the model ended it", "length": "it reached the most tokens, or the end of the context"}
        lines.append(f"ended      {ends.get(self.reason, self.reason or 'you stopped it')}")
        return "\n".join(lines)


class ChatSource(Protocol):
    """A source of answers.

    ``last`` has the counts and times of the last answer, ``partial`` its text so far.
    """

    last: Facts | None
    partial: str
    sampling: dict[str, Any]

    def answer(self, messages: Messages) -> str:
        """Show an answer while it is generated, and return its text.  A KeyboardInterrupt stops the answer."""

    def check(self, sampling: Mapping[str, Any]) -> None:
        """Raise RequestError for sampling parameters that are not valid."""

    def stats(self) -> dict[str, Any]:
        """Return figures of the engine or the server."""


class LocalSource:
    """Answer with an engine in this process."""

    def __init__(self, llm: Any, sampling: dict[str, Any], view: AnswerView) -> None:
        self.llm, self.sampling, self._view = llm, sampling, view
        self._parser: Any = None  # the parser that separates the reasoning from a reply, None if the model has none
        self._parser_found = False
        self.last: Facts | None = None
        self.partial = ""

    def check(self, sampling: Mapping[str, Any]) -> None:
        """Raise RequestError for sampling parameters that are not valid."""
        from minivllm.core.interfaces.params import SamplingParams

        SamplingParams.make(**sampling)

    def answer(self, messages: Messages) -> str:
        """Show an answer and return it as the model wrote it, with its reasoning."""
        from minivllm.core.interfaces.params import SamplingParams

        params = SamplingParams.make(**self.sampling)
        self.last = facts = Facts()
        stream = self.llm.chat_stream(messages, params)
        view = self._separated(messages)
        try:
            return write_stream(self._noted(stream, facts), self.llm.engine, params.max_tokens, view)
        finally:
            stream.close()  # closing the stream of an interrupted answer aborts its request
            facts.thought = view.thoughts

    def _separated(self, messages: Messages) -> Separated:
        """Return an object that passes the pieces of an answer to the view.

        It separates the reasoning, except for a plain view, which shows reasoning as the model wrote it.
        """
        if isinstance(self._view, PlainView):
            return Separated(self._view, None)
        if not self._parser_found:
            self._parser_found, self._parser = True, parser_of(self.llm.get_tokenizer())
        if self._parser is None:
            return Separated(self._view, None)
        prompt = self.llm.get_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return Separated(self._view, self._parser, self._parser.opens(prompt[-TAIL:]))

    def _noted(self, pieces: Iterator[Any], facts: Facts) -> Iterator[Any]:
        """Yield the pieces of an answer, and add their text to ``partial`` and their counts to ``facts``."""
        begin = time.monotonic()
        self.partial = ""
        for piece in pieces:
            if piece.token_ids and not facts.tokens:
                facts.first = time.monotonic() - begin
            facts.tokens += len(piece.token_ids)
            self.partial += piece.delta
            facts.seconds = time.monotonic() - begin
            if piece.output is not None:
                _note_output(piece.output, facts)
            yield piece

    def stats(self) -> dict[str, Any]:
        """Return the statistics of the engine."""
        return self.llm.stats()


def _note_output(output: Any, facts: Facts) -> None:
    """Copy the counts and times of a finished request to ``facts``."""
    metrics = output.metrics
    facts.prompt = len(output.prompt_token_ids)
    facts.cached = output.num_cached_tokens
    facts.reason = output.outputs[0].finish_reason or ""
    if metrics.scheduled_time is not None:
        facts.waited = max(0.0, metrics.scheduled_time - metrics.arrival_time)


class Server:
    """Answer with a server that has OpenAI's API.  ``url`` ends with or without /v1."""

    def __init__(self, url: str, key: str, model: str | None, sampling: dict[str, Any], view: AnswerView) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(f"--url {shown(url)}: expected http://HOST:PORT or https://HOST, perhaps with /v1")
        plain = url.rstrip("/")
        self.base = plain if plain.endswith("/v1") else f"{plain}/v1"
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self.sampling, self._view = sampling, view
        self.last: Facts | None = None
        self.partial = ""
        self.model = model if model is not None else self._first_model()

    def _first_model(self) -> str:
        """Return the name of the first model that the server lists.  ResourceError if there is none."""
        with self._open("/models") as answer:
            found = json.load(answer)
        names = [card["id"] for card in found.get("data", [])]
        if not names:
            raise ResourceError(f"{self.base} serves no model; expected --model NAME")
        return names[0]

    def _open(self, path: str, body: Any = None) -> Any:
        """Send a request, and return its open HTTP response.  ResourceError with the server's message if it fails."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, self._headers)
        try:
            return urllib.request.urlopen(request, timeout=TIMEOUT)
        except urllib.error.HTTPError as exc:
            text = exc.read(MOST_ERROR).decode("utf-8", "replace")
            raise ResourceError(f"{self.base}{path}: status {exc.code}: {_message(text)}") from None
        except OSError as exc:
            raise ResourceError(f"{self.base}{path} cannot be reached: {getattr(exc, 'reason', exc)}") from None

    def check(self, sampling: Mapping[str, Any]) -> None:
        """Accept all parameters, because the server checks them."""

    def answer(self, messages: Messages) -> str:
        """Show an answer and return its text without the reasoning.  ResourceError if the server reports an error."""
        usage = {"include_usage": True}
        sent = {name: value for name, value in self.sampling.items() if value is not None}
        body = {"model": self.model, "messages": messages, "stream": True, "stream_options": usage, **sent}
        self.last = facts = Facts()
        begin = time.monotonic()
        self.partial = ""
        view = Separated(self._view, None)
        try:
            with self._open("/chat/completions", body) as answer:
                for event in _events(answer):
                    if "error" in event:
                        raise ResourceError(f"{self.base}: {_message(json.dumps(event))}")
                    part, thought = _note_event(event, facts, time.monotonic() - begin)
                    self.partial += part
                    view.thought(thought)
                    view.text(part)
        finally:
            view.end()
            facts.thought = view.thoughts
        return self.partial

    def stats(self) -> dict[str, Any]:
        """Return the names of the server and the model."""
        return {"server": self.base, "model": self.model}


def _events(lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a stream of server-sent events, until the event ``[DONE]``."""
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        yield json.loads(data)


def _note_event(event: Mapping[str, Any], facts: Facts, seconds: float) -> tuple[str, str]:
    """Copy the counts and times in an event to ``facts``, and return the text and the reasoning of the event."""
    usage = event.get("usage") or {}
    if usage:
        facts.prompt = usage.get("prompt_tokens", 0)
        facts.tokens = usage.get("completion_tokens", 0)
        facts.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    choices = event.get("choices") or [{}]
    delta = choices[0].get("delta") or {}
    text = delta.get("content") or ""
    thought = delta.get("reasoning") or delta.get("reasoning_content") or ""
    if (text or thought) and not facts.first:
        facts.first = seconds
    facts.seconds = seconds if text or thought else facts.seconds
    facts.reason = choices[0].get("finish_reason") or facts.reason
    return text, thought


def _message(text: str) -> str:
    """Return the message in the JSON of a server's error, or the start of the text if it is no JSON."""
    try:
        error = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        return printable(text[:300].strip())
    return printable(error if isinstance(error, str) else str(error.get("message", error)))
