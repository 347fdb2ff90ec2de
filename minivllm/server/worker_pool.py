"""The worker pool: processes that do the work whose amount a client chooses.

    route ──► WorkerPool ──turns──► quick workers: chats of ordinary size, which must not wait for long jobs
                        └───► bulk workers: large bodies and texts, parts of answers; they run at a lower priority

The jobs are to read large bodies, fill chat templates, tokenize long texts and write many log-probabilities.
The event loop does small work itself.  Each owner (an API key, else an address) has at most one quick and one bulk job
at a time (``FairSlots``).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.runtime.processes.confined import Buffer, Confined, Exceeded, JobPart, decode_text, encode_text, size_of

from .errors import ApiError, FlawedMessage
from .fair_slots import FairSlots

if TYPE_CHECKING:
    from minivllm.runtime.replies.grammar import Spelling
    from minivllm.runtime.text.tokenizer import Tokenizer

QUICK, BULK = range(2), range(2, 4)  # numbers of the worker processes for quick jobs and for bulk jobs
BULK_NICE = 5  # nice value (priority) of bulk workers
LARGE = 1 << 16  # size of a job in bytes above which it counts as large
READ_SECONDS, READ_MB = 10.0, 64  # limits of CPU seconds and MB for reading a body, without the memory of its bytes
BYTES_A_BYTE = 16  # number of bytes of memory per byte of a body, enough for lists of ids and characters above U+FFFF
SECONDS_A_BYTE = 1e-5  # seconds of CPU time for tokenizing a byte
# size in bytes of the fields ``FORMS`` above which a worker reads them, because a schema takes milliseconds
FORM = 4096
FORMS = ("structured_outputs", "response_format", "tool_choice", "tools", "parallel_tool_calls")

Parts = tuple[dict[str, Any], list[Buffer]]  # (JSON object, other parts) of the answer of a job
Limits = tuple[float, int]  # CPU seconds, megabytes


class WorkerPool:
    """Runs jobs in worker processes for one event loop.

    Filling a chat template may take ``seconds`` of CPU time and ``megabytes`` of memory.  Every method takes the job's
    ``owner`` and raises ApiError: 400 for a job beyond its limits, 429 if too many of the owner's jobs wait.
    """

    def __init__(self, tokenizer: Tokenizer | None, seconds: float = 2.0, megabytes: int = 256) -> None:
        self.seconds = seconds
        self.megabytes = megabytes
        self._tokenizer = tokenizer
        nices = [0] * len(QUICK) + [BULK_NICE] * len(BULK)
        self._confined = Confined("minivllm.server.pool_jobs:make", self._hello, nices)
        self._turns = {True: FairSlots(BULK), False: FairSlots(QUICK)}
        self._running: set[asyncio.Task[Parts]] = set()

    def _hello(self) -> bytes:
        """Return the JSON from which ``pool_jobs.make`` makes the workers' tokenizer and limits.

        It contains the whole tokenizer, since the tokenizer's files may have been moved."""
        tokenizer = None if self._tokenizer is None else self._tokenizer.to_json()
        return json.dumps({"tokenizer": tokenizer, "seconds": self.seconds, "megabytes": self.megabytes}).encode()

    def start(self) -> None:
        """Start the processes, so that the first job need not wait for them."""
        self._confined.start()

    async def close(self) -> None:
        """Cancel all jobs and end the processes."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._confined.close()

    async def read(self, raw: JobPart, owner: str, inner: str = "") -> dict[str, Any]:
        """Return a request body as ``body.parse_object`` reads it, after the checks of ``bounds``.

        Long lists of token ids in ``prompt`` and ``tokens`` become arrays: i64 [n], or a list of them.
        ``inner`` is the field of a WebSocket message that has the body; "" means that ``raw`` is the body itself.
        Raise the ApiErrors of ``parse_object`` and ``bounds``; for a message, FlawedMessage is that of its text.
        """
        limits = READ_SECONDS, READ_MB + (BYTES_A_BYTE * size_of(raw) >> 20)
        about, (rest, *arrays) = await self._run(owner, {"op": "read", "inner": inner}, [raw], limits)
        value = json.loads(str(rest, "utf-8", "surrogatepass"))
        body = value.get(inner) if inner else value
        view = memoryview(arrays.pop() if about["texts"] else b"")
        for (name, lengths), array in zip(about["columns"], arrays, strict=True):
            ids = np.frombuffer(array, np.int64)
            body[name] = ids if lengths is None else _split(ids, lengths)
        for (*path, last), sizes in about["texts"]:
            holder = value
            for name in path:
                holder = holder[name]
            holder[last] = await decode_text(view, sizes)
            view = view[sum(sizes) :]
        if about["flawed"] is not None:
            raise FlawedMessage(ApiError(*about["flawed"]), value)
        return value

    async def chat(self, conversation: bytes, split: bool, most: int, owner: str) -> list[int]:
        """Return the token ids of a conversation, given as JSON of the arguments of ``Tokenizer.chat_prompt``.

        With ``split``, text of the conversation that spells a special token stays text.
        ``most`` is the maximum number of characters of the prompt.
        Raise ApiError (400) if the template refuses the conversation or exceeds its time or memory.
        """
        job = {"op": "chat", "split": split, "most": most, "render": self.seconds}
        size = len(conversation)
        seconds = self.seconds + READ_SECONDS + SECONDS_A_BYTE * size
        megabytes = self.megabytes + (BYTES_A_BYTE * size >> 20)
        message = "the chat template takes more {} for this conversation than it may ({}); send less"
        _, (ids,) = await self._run(owner, job, [conversation], (seconds, megabytes), "messages", message)
        return np.frombuffer(ids, np.int32).tolist()

    async def encode(self, texts: Sequence[str], special: bool, owner: str) -> list[list[int]]:
        """Return the token ids of each text.  ``special`` adds the tokens that the tokenizer puts around a text."""
        raw = await encode_text(*texts)
        job = {"op": "encode", "special": special, "lengths": list(map(len, texts))}
        # the limits are for JSON with escapes, which take up to three times the bytes of other characters in UTF-8
        widest = 1 if all(text.isascii() for text in texts) else 3
        about, (ids,) = await self._run(owner, job, [raw], _limits(widest * size_of(raw)), "prompt")
        rows = _split(np.frombuffer(ids, np.int32), about["lengths"])
        return [row.tolist() for row in rows]

    async def decode(self, ids: Any, skip: bool, owner: str) -> str:
        """Return the text of token ids.  ``skip`` leaves special tokens out."""
        column = np.ascontiguousarray(ids, np.int64).data.cast("B")
        job = {"op": "decode", "skip": skip}
        _, (text,) = await self._run(owner, job, [column], _limits(len(column)), "tokens")
        return str(text, "utf-8", "surrogatepass")

    async def form(self, body: Any, owner: str, spelling: Spelling | None = None) -> dict[str, Any] | None:
        """Return the constraint on the text of an answer (``params.whole_form`` of its request body).

        None means that the body is small, so that the event loop can compute the constraint itself.  ``spelling`` is
        the format in which the model writes calls.  Raise the errors of ``whole_form`` as ApiError.
        """
        declared = vars(body)
        values = {name: declared.get(name) for name in FORMS}
        wanted = values["structured_outputs"] or values["response_format"]
        if not wanted and values["tool_choice"] in (None, "none", "auto") and not _any_strict(values["tools"]):
            return None
        part = to_json(values)
        if len(part) < FORM:
            return None
        _, megabytes = _limits(len(part))
        limits = READ_SECONDS, megabytes
        job = {"op": "form", "spelling": None if spelling is None else asdict(spelling)}
        _, (form,) = await self._run(owner, job, [part], limits, "structured_outputs")
        return json.loads(bytes(form))

    async def shape(self, job: dict[str, Any], columns: Sequence[bytes], owner: str) -> list[bytes]:
        """Return the JSON (``answers.shaped``) of log-probabilities that ``Scored.pack`` has packed.

        ``job`` has the other arguments of ``pool_jobs.shape``.
        """
        limits = READ_SECONDS, READ_MB
        _, parts = await self._run(owner, {"op": "shape", **job}, columns, limits, answers=True)
        return list(map(bytes, parts))

    async def places(self, tokens: Sequence[int], skip: bool, begin: int, prompt: str | None, owner: str) -> np.ndarray:
        """Return the result of ``answers.places``, i64 [n], for n tokens."""
        column = np.asarray(tokens, np.int64).tobytes()
        text = (prompt or "").encode("utf-8", "surrogatepass")
        job = {"op": "places", "skip": skip, "begin": begin, "given": prompt is not None}
        limits = _limits(len(column))
        _, (positions,) = await self._run(owner, job, [column, text], limits, answers=True)
        return np.frombuffer(positions, np.int64)

    async def _run(
        self,
        owner: str,
        job: dict[str, Any],
        parts: Sequence[JobPart],
        limits: Limits,
        param: str | None = None,
        message: str = "reading this takes more {} than it may ({}); send less",
        answers: bool = False,
    ) -> Parts:
        """Run a job when it is the owner's turn, and return its answer.

        Raise the job's error as ApiError, or ApiError (400) with the message ``message`` and the field ``param`` if the
        job exceeds its ``limits``.
        ``answers`` marks the writing of an answer.  Such a job is bulk, and is never refused, since its request has
        been accepted.
        """
        turns = self._turns[answers or sum(map(size_of, parts)) > LARGE]
        worker = await turns.take(owner, refuses=not answers)
        seconds, megabytes = limits

        async def run_job() -> Parts:
            try:
                return await self._confined.run_job(worker, job, parts, seconds=seconds, megabytes=megabytes)
            finally:
                turns.give(owner, worker)

        # a separate task: if the caller is cancelled, the worker stays busy until its answer has arrived
        task = asyncio.create_task(run_job())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            about, found = await asyncio.shield(task)
        except Exceeded as e:
            limit = f"{job.get('render', seconds):g} s" if e.resource == "time" else f"{megabytes} MB"
            raise ApiError(400, message.format(e.resource, limit), param) from None
        error = about.get("error")
        if error is not None:
            raise ApiError(*error)
        return about, found


def _any_strict(tools: Any) -> bool:
    """Return whether a function of a request is strict."""
    for tool in tools if isinstance(tools, list) else ():
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(function, dict) and function.get("strict"):
            return True
    return False


def _limits(size: int) -> Limits:
    """Return the limits of a job that tokenizes ``size`` bytes."""
    return READ_SECONDS + SECONDS_A_BYTE * size, READ_MB + (4 * BYTES_A_BYTE * size >> 20)


def _split(ids: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    """Return the consecutive parts of an array with the given lengths."""
    ends = np.cumsum(lengths).tolist()
    rows = []
    for end, length in zip(ends, lengths, strict=True):  # np.split takes four times as long
        start = end - length
        rows.append(ids[start:end])
    return rows


def to_json(value: Any) -> bytes:
    """Return compact JSON that ``json.loads`` reads back unchanged, halves of surrogate pairs included."""
    from pydantic_core import PydanticSerializationError
    from pydantic_core import to_json as fast

    try:
        return fast(value, inf_nan_mode="constants")
    except (PydanticSerializationError, UnicodeEncodeError, ValueError):
        return json.dumps(value, separators=(",", ":")).encode()
