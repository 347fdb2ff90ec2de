"""Prepare images of clients in processes with limits of time and memory, so that no file stops the event loop.

    event loop ──► source of an image ──► worker: decode, ``ImageEncoder.prepare`` ──► values, shape, tokens

``ConfinedImages`` sends the jobs, and ``make`` runs in the started process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from minivllm.core.interfaces.executor import ImageWiring
from minivllm.core.interfaces.images import PreparedImage, start_hashing
from minivllm.errors import RequestError
from minivllm.registration.spec import Part
from minivllm.runtime.processes.confined import (
    Buffer,
    Confined,
    Exceeded,
    JobPart,
    Work,
    encode_text,
    limit_memory,
    prepare,
)
from minivllm.runtime.text.image_parts import OBJECT, ImageSource

from .decode import MAX_BYTES, refuse
from .kept import key_of
from .reader import ImageReader

AT_ONCE = 2  # largest number of images that are prepared at the same time, which bounds the memory
SECONDS = 10.0  # limit of the CPU time for preparing an image
MEGABYTES = 1536  # limit of the memory for preparing an image
WARM = 6  # factor on the time limit for the first image, because preparing it also loads the processor
NICE = 5  # niceness of the worker processes, so that the engine and the event loop are scheduled first
LONGEST = MAX_BYTES * 4 // 3 + 4096  # largest number of characters of a data URL: base64 text and the head before it


class ConfinedImages:
    """The workers that prepare the images of one event loop.  They start with the first image."""

    def __init__(self, reader: ImageReader) -> None:
        self.reader = reader
        target = "minivllm.runtime.images.confined:make"
        self._confined = Confined(target, lambda: hello_of(reader), (NICE,) * AT_ONCE)
        self._seats = Seats(AT_ONCE)
        self._running: set[asyncio.Task[PreparedImage]] = set()

    def start(self) -> None:
        """Start the processes, so that the first image need not wait for them."""
        self._confined.start()

    async def prepare(self, source: ImageSource, salt: Sequence[str] = ()) -> PreparedImage:
        """Return an image after the encoder plug-in's ``prepare``.

        A file that was read lately with the same ``salt``, which identifies its client, is not decoded again.
        RequestError if it is refused or exceeds a limit, ResourceError if no process can run the job."""
        if source.kind == OBJECT or not isinstance(source.value, str):
            return await asyncio.to_thread(self.reader.prepare, source)
        if len(source.value) > LONGEST:
            raise refuse(f"the file has more than {MAX_BYTES >> 20} MiB; send a smaller one")
        key = await asyncio.to_thread(key_of, *salt, source.kind, repr(source.media_type), source.value)
        kept = self.reader.kept.get(key)
        if kept is not None:
            return kept
        # a task of its own: if the caller is cancelled, the worker stays busy until its answer has come
        task = asyncio.create_task(self._in_turn(source))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        image = await asyncio.shield(task)
        self.reader.kept.put(key, image)
        return image

    async def _in_turn(self, source: ImageSource) -> PreparedImage:
        """Return an image that a worker process has prepared, as soon as a worker is free."""
        job = {"kind": source.kind, "media_type": source.media_type}
        data = await encode_text(source.value)
        async with self._seats.one() as worker:
            answer, more = await run_job(self._confined, worker, job, data)
        a, b, c = answer["shape"]
        values = np.frombuffer(more[1], answer["dtype"])
        return self.reader.keep(PreparedImage(values, (a, b, c), answer["tokens"], bytes(more[0])))

    async def close(self) -> None:
        """Cancel the jobs and end the processes."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._confined.close()


class Seats:
    """The workers that run no job."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        self._turns = asyncio.Semaphore(count)

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[int]:
        """Wait for a free worker, and hold it until the context ends."""
        async with self._turns:
            worker = self._free.pop()
            try:
                yield worker
            finally:
                self._free.append(worker)


async def run_job(
    confined: Confined, worker: int, job: dict[str, Any], data: JobPart
) -> tuple[dict[str, Any], list[Buffer]]:
    """Run the job of an image in a free worker, and return its answer.

    RequestError if the work refuses the image, or if it exceeds a limit."""
    try:
        answer, more = await confined.run_job(worker, job, [data], seconds=SECONDS, megabytes=MEGABYTES)
    except Exceeded as exc:
        limit = f"{SECONDS:g} s of CPU time" if exc.resource == "time" else f"{MEGABYTES} MiB of memory"
        raise refuse(f"reading it takes more than {limit}; send a smaller or simpler one") from None
    if "error" in answer:
        raise RequestError(*answer["error"])
    return answer, more


def hello_of(reader: ImageReader) -> bytes:
    """Return the JSON from which ``make`` builds the image reader in a started process."""
    part = None if reader.part is None else asdict(reader.part)
    facts = {"part": part, "folder": str(reader.folder), "raw": reader.raw, "max_tokens": reader.max_tokens}
    return json.dumps({**facts, "wiring": asdict(reader.wiring)}).encode()


def reader_of(facts: Any, why_not: str = "") -> ImageReader:
    """Return the reader of images whose arguments came as JSON."""
    part = None if facts["part"] is None else Part(**facts["part"])
    wiring = ImageWiring.from_json(facts["wiring"])
    return ImageReader(wiring, part, facts["folder"], facts["raw"], facts["max_tokens"], why_not)


def make(hello: bytes) -> Work:
    """Return the function that prepares an image, after the encoder plug-in has been loaded."""
    reader = reader_of(json.loads(hello))
    prepare(lambda: warm(reader), WARM * SECONDS, WARM * MEGABYTES)
    started = False  # whether this worker has started its threads, which a fork does not inherit

    def work(job: dict[str, Any], parts: list[bytes]) -> list[bytes]:
        nonlocal started
        if not started:
            limit_memory(None)  # the stacks and heaps of the threads must not count for the memory limit of an image
            start_hashing()
            limit_memory(job["megabytes"])
            started = True
        source = ImageSource(job["kind"], parts[0].decode("utf-8", "surrogatepass"), job["media_type"])
        try:
            image = reader.prepare(source)
        except RequestError as exc:
            return [_json({"error": [str(exc), exc.param]})]
        facts = {"shape": image.shape, "tokens": image.tokens, "dtype": str(image.values.dtype)}
        return [_json(facts), image.digest, image.values.tobytes()]

    return work


def warm(reader: ImageReader) -> None:
    """Prepare a white image, so that workers inherit the objects that the first image creates."""
    reader.prepare(np.full((64, 64, 3), 255, np.uint8))


def _json(value: Any) -> bytes:
    """Return the bytes of a value as JSON."""
    return json.dumps(value).encode()
