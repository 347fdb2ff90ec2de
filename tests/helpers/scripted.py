"""Server whose model writes given texts, for tests of protocols, tool calls and reasoning.

    with scripted(server, ["<tool_call>...</tool_call>", "done"]) as script:
        ...                     # each request gets the next text; script.prompts has the prompts
    python tests/helpers/scripted.py --port 8010 texts.json      a server for a client that is tried by hand

The engine is not used.  Its client feeds the tokens of the text to the stream of the request.  Everything behind it
(detokenizer, stop strings, parser, protocol) is the server's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np


class Script:
    """The texts of the next answers, and the prompts of the requests so far.

    An element of ``texts`` is a text, a list of texts and token ids (for special tokens), or a function of the prompt
    that returns either.  ``step`` is the number of tokens that a stream gets at once, and ``pause`` the seconds between
    two steps.  After the last text, requests are refused."""

    def __init__(self, client: Any, texts: Sequence[Any], step: int = 1, pause: float = 0.0) -> None:
        self.client, self.texts, self.step, self.pause = client, list(texts), step, pause
        self.prompts: list[str] = []
        self.stopped: set[int] = set()  # numbers of streams that were aborted or cut
        self.tasks: set[asyncio.Task[None]] = set()

    def send(self, kind: str, header: dict[str, Any], columns: Any = None) -> None:
        """Handle a command to the engine."""
        if kind == "add":
            task = asyncio.get_running_loop().create_task(self._answer(header["number"], columns["prompt"]))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        elif kind in ("abort", "cut"):
            self.stopped.add(header["number"])
        else:
            self.client.unscripted(kind, header, *([] if columns is None else [columns]))

    def _ids(self, text: Any, prompt: str) -> list[int]:
        """Return the token ids of an answer."""
        if callable(text):
            text = text(prompt)
        parts = [text] if isinstance(text, str) else text
        encode = self.client.tokenizer.encode
        return [i for part in parts for i in ([part] if isinstance(part, int) else encode(part, False))]

    async def _answer(self, number: int, prompt: np.ndarray) -> None:
        """Feed the next text to a stream."""
        client, stream = self.client, self.client._streams[number]
        text = client.tokenizer.decode(list(map(int, prompt)), skip_special_tokens=False)
        self.prompts.append(text)
        header: dict[str, Any] = {"accepted": [number]}
        if not self.texts:
            client._on_frame({"refused": [(number, "RequestError", "the script has no text left", None)]}, {})
            return
        ids = self._ids(self.texts.pop(0), text)
        client._on_frame(header, {})
        most = stream.params.max_tokens
        reason = "stop" if most is None or len(ids) < most else "length"
        ids = ids[:most]
        stream.started(time.monotonic(), 0, stream.metrics.arrival_time)
        for at in range(0, len(ids), self.step):
            await asyncio.sleep(self.pause)
            if number in self.stopped:
                break
            for sample in sorted(stream.open):
                stream.feed(sample, ids[at : at + self.step])
        for sample in sorted(stream.open):
            stream.feed(sample, [], "abort" if number in self.stopped else reason)
        stream.finished(time.monotonic())
        client._forget(stream)


@contextlib.contextmanager
def scripted(server: Any, texts: Sequence[Any], context: int | None = None, **options: Any) -> Iterator[Script]:
    """Let the model of a server (``http_helpers.Running``) write the texts, one a request.

    ``context`` is the length of the context that the server reports meanwhile.  ``options`` are those of ``Script``."""
    service = server.app.service
    client, info, most = service.client, service.client.info, service.tokens.most
    script = Script(client, texts, **options)
    client.unscripted, client._send = client._send, script.send
    if context is not None:
        client.info, service.tokens.most = replace(info, max_model_len=context), 16 * context
    try:
        yield script
    finally:
        client._send = client.unscripted
        client.info, service.tokens.most = info, most
        del client.unscripted


def serve(port: int, texts: Sequence[Any], until: Callable[[], Any], **server: Any) -> Script:
    """Serve the texts on a port until ``until`` returns."""
    from http_helpers import Running

    running = Running(port=port, **server)
    with scripted(running, texts, context=1 << 18) as script:
        until()
    running.close()
    return script


def main() -> None:
    """Serve the texts of a JSON file (a list of texts) until a signal."""
    parser = argparse.ArgumentParser()
    parser.add_argument("texts")
    parser.add_argument("--port", type=int, default=8010)
    parser.add_argument("--tool-parser", default="hermes")
    args = parser.parse_args()
    with open(args.texts, encoding="utf-8") as file:
        texts = json.load(file)
    with contextlib.suppress(KeyboardInterrupt):
        serve(args.port, texts, threading.Event().wait, tool_parser=args.tool_parser)


if __name__ == "__main__":
    main()
