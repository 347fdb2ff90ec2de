"""What a client's text costs is paid for in other processes: large bodies, chat templates, long texts, and answers with
many log-probabilities.

    route ──► WorkerPool ──turns──► quick workers: chats of ordinary size, where nobody waits for a long job
                        └───► bulk workers: large bodies and texts, parts of answers; they stand back from others

The event loop never does work whose amount a client chooses: what is small it does at once, the rest is asked here.
Each asker (a key, else an address) has one job at a time of each kind; see ``FairSlots``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.runtime.processes.confined import Confined, Exceeded

from .errors import ApiError
from .fair_slots import FairSlots

if TYPE_CHECKING:
    from minivllm.runtime.text.tokenizer import Tokenizer

QUICK, BULK = range(2), range(2, 4)  # workers
BACK = 5  # how far bulk workers stand back (nice)
LARGE = 1 << 16  # bytes of a job that is bulk
READ_SECONDS, READ_MB = 10.0, 64  # CPU time and memory for a body, beside what its bytes take
BYTES_A_BYTE = 16  # of memory, for each byte of a body: ids in a list, characters beyond Unicode's first 65,536
SECONDS_A_BYTE = 1e-5  # of CPU time, for tokenizing
FORM = 4096  # bytes of a form that are worked out elsewhere: a schema takes some milliseconds
FORMS = ("structured_outputs", "response_format", "tool_choice", "tools", "parallel_tool_calls")

Parts = tuple[dict[str, Any], list[bytes]]


class WorkerPool:
    """Asked from one event loop.  ``seconds`` of CPU time and ``megabytes`` for one filling of the chat template."""

    def __init__(self, tokenizer: Tokenizer | None, seconds: float = 2.0, megabytes: int = 256) -> None:
        self.seconds, self.megabytes = seconds, megabytes
        self._tokenizer = tokenizer
        nices = [0] * len(QUICK) + [BACK] * len(BULK)
        self._confined = Confined("minivllm.server.pool_jobs:make", self._hello, nices)
        self._turns = {True: FairSlots(BULK), False: FairSlots(QUICK)}
        self._running: set[asyncio.Task[Parts]] = set()

    def _hello(self) -> bytes:
        """What the other side makes its tokenizer of: this one, wherever its files are now."""
        told = None if self._tokenizer is None else self._tokenizer.to_json()
        return json.dumps({"tokenizer": told, "seconds": self.seconds, "megabytes": self.megabytes}).encode()

    def start(self) -> None:
        """The first who asks need not wait for it."""
        self._confined.start()

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._confined.close()

    async def read(self, raw: bytes, who: str, inner: str = "") -> dict[str, Any]:
        """The body as ``body.parse_object`` reads it, within the bounds of its shape; token ids of ``prompt`` and
        ``tokens`` as arrays (i64 [n], or a list of them).  ``inner``: the field that holds the body, of a WebSocket's
        message.  ApiError as there."""
        most = READ_MB + (BYTES_A_BYTE * len(raw) >> 20)
        told, parts = await self._ask(who, {"op": "read", "inner": inner}, [raw], READ_SECONDS, most)
        value = json.loads(parts[0])
        body = value[inner] if inner else value
        for (name, lengths), column in zip(told["columns"], parts[1:], strict=True):
            ids = np.frombuffer(column, np.int64)
            body[name] = ids if lengths is None else np.split(ids, np.cumsum(lengths)[:-1])
        return value

    async def chat(self, conversation: bytes, split: bool, most: int, who: str) -> list[int]:
        """Return the token ids of a conversation, which is JSON of the arguments of ``Tokenizer.chat_prompt``.
        ``most``: characters that the prompt may have.  ApiError (400) if the template refuses the conversation or takes
        too much time or memory for it."""
        job = {"op": "chat", "split": split, "most": most, "render": self.seconds}
        seconds = self.seconds + READ_SECONDS + SECONDS_A_BYTE * len(conversation)
        most_mb = self.megabytes + (BYTES_A_BYTE * len(conversation) >> 20)
        what = "the chat template takes more {} for this conversation than it may ({}); send less"
        _, parts = await self._ask(who, job, [conversation], seconds, most_mb, "messages", what)
        return np.frombuffer(parts[0], np.int32).tolist()

    async def encode(self, texts: Sequence[str], special: bool, who: str) -> list[list[int]]:
        """Token ids of each text; ``special``: with those that the tokenizer puts round a text."""
        parts = [json.dumps(list(texts)).encode()]
        seconds = READ_SECONDS + SECONDS_A_BYTE * len(parts[0])
        most = READ_MB + (4 * BYTES_A_BYTE * len(parts[0]) >> 20)
        told, got = await self._ask(who, {"op": "encode", "special": special}, parts, seconds, most, "prompt")
        ids = np.frombuffer(got[0], np.int32)
        return [one.tolist() for one in np.split(ids, np.cumsum(told["lengths"])[:-1])]

    async def decode(self, ids: Any, skip: bool, who: str) -> str:
        """The text of token ids; ``skip``: without special ones."""
        column = np.asarray(ids, np.int64).tobytes()
        seconds = READ_SECONDS + SECONDS_A_BYTE * len(column)
        most = READ_MB + (4 * BYTES_A_BYTE * len(column) >> 20)
        _, parts = await self._ask(who, {"op": "decode", "skip": skip}, [column], seconds, most, "tokens")
        return parts[0].decode("utf-8", "surrogatepass")

    async def form(self, body: Any, who: str) -> dict[str, Any] | None:
        """``params.whole_form`` of a body, of which nothing is left to work out.  Its errors."""
        given = vars(body)  # the fields that the body declares
        values = {name: given.get(name) for name in FORMS}
        asked = values["structured_outputs"] or values["response_format"]
        if not asked and values["tool_choice"] in (None, "none", "auto"):
            return None
        part = to_json(values)
        if len(part) < FORM:
            return None
        seconds, most = READ_SECONDS, READ_MB + (4 * BYTES_A_BYTE * len(part) >> 20)
        _, parts = await self._ask(who, {"op": "form"}, [part], seconds, most, "structured_outputs")
        return json.loads(parts[0])

    async def shape(self, asked: dict[str, Any], columns: Sequence[bytes], who: str) -> list[bytes]:
        """A part of an answer: ``answers.shaped`` of log-probabilities (``Scored.pack``) with what is ``asked``."""
        return (await self._ask(who, {"op": "shape", **asked}, columns, READ_SECONDS, READ_MB, answers=True))[1]

    async def places(self, tokens: Sequence[int], skip: bool, begin: int, prompt: str | None, who: str) -> np.ndarray:
        """``answers.places``."""
        column, text = np.asarray(tokens, np.int64).tobytes(), (prompt or "").encode("utf-8", "surrogatepass")
        job = {"op": "places", "skip": skip, "begin": begin, "given": prompt is not None}
        seconds, most = READ_SECONDS + SECONDS_A_BYTE * len(column), READ_MB + (4 * BYTES_A_BYTE * len(column) >> 20)
        _, parts = await self._ask(who, job, [column, text], seconds, most, answers=True)
        return np.frombuffer(parts[0], np.int64)

    async def _ask(
        self,
        who: str,
        job: dict[str, Any],
        parts: Sequence[bytes],
        seconds: float,
        megabytes: int,
        param: str | None = None,
        what: str = "reading this takes more {} than it may ({}); send less",
        answers: bool = False,
    ) -> Parts:
        """``answers``: a part of an answer, whose request was let in: it is bulk, and waits as long as it has to."""
        turns = self._turns[answers or sum(map(len, parts)) > LARGE]
        worker = await turns.take(who, refuses=not answers)

        async def run() -> Parts:
            try:
                return await self._confined.ask(worker, job, parts, seconds=seconds, megabytes=megabytes)
            finally:
                turns.give(who, worker)

        task = asyncio.create_task(run())  # who asked may leave: the worker is taken until its answer has come
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            told, found = await asyncio.shield(task)
        except Exceeded as e:
            limit = f"{job.get('render', seconds):g} s" if e.what == "time" else f"{megabytes} MB"
            raise ApiError(400, what.format(e.what, limit), param) from None
        if (error := told.get("error")) is not None:
            raise ApiError(*error)
        return told, found


def to_json(value: Any) -> bytes:
    """Compact JSON that ``json.loads`` reads back as it was, halves of surrogate pairs too."""
    from pydantic_core import PydanticSerializationError
    from pydantic_core import to_json as fast

    try:
        return fast(value, inf_nan_mode="constants")
    except (PydanticSerializationError, UnicodeEncodeError, ValueError):
        return json.dumps(value, separators=(",", ":")).encode()
