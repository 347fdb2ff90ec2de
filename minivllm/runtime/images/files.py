"""Decode the files of images for ``LLM`` and ``AsyncLLM``, in processes with limits of time and memory.

    any thread ──bytes of a file──► thread with an event loop ──► worker: decode ──► pixels in RGB (shared memory)

The workers start with the first file.  The encoder plug-in gets the pixels in the thread of the caller: a worker that
prepared them too would have to send its values back, which have more bytes.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

from minivllm.errors import RequestError
from minivllm.runtime.processes.confined import Confined, Work, prepare

from . import confined
from .decode import check_bytes, decoded, file_of, head_of, pillow

if TYPE_CHECKING:
    from PIL.Image import Image

# Only Linux can limit the memory of the decoding processes; elsewhere, files are decoded in the caller's process.
CONFINES = sys.platform == "linux"


# number of memory blocks of 16 MiB that Pillow keeps for the next image; allocating new memory takes longer than
# decoding
BLOCKS = "8"


class FileDecoder:
    """Decodes files in other processes.  Its methods may be called from several threads."""

    def __init__(self) -> None:
        self._memory: list[int] = []  # descriptors of files in memory, for the pixels of each worker
        self._confined = Confined("minivllm.runtime.images.files:make", bytes, (0,) * confined.AT_ONCE, self._memory)
        self._seats = confined.Seats(confined.AT_ONCE)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    def decode(self, source: Any) -> Image:
        """Return a PIL image in RGB of a PIL image, an array or the bytes of a file, as ``decode.decoded`` does.

        Bytes, and the unread file of a PIL image, are decoded in a worker.  RequestError if the image is refused or
        exceeds a limit, ResourceError if no process can run the job."""
        data = file_of(source) if CONFINES else None
        if data is None:
            return decoded(source)
        check_bytes(data)
        head = [source.mode, *source.size] if isinstance(source, pillow().Image) else None
        requested = self._in_turn({"head": head}, data)
        found = asyncio.run_coroutine_threadsafe(requested, self._running_loop()).result()
        return decoded(source) if found is None else found

    async def _in_turn(self, job: dict[str, Any], data: bytes) -> Image | None:
        """Return the image that a worker process has decoded from a file.  None if the mode or size in the head of the
        file differs from the job's."""
        async with self._seats.one() as worker:
            memory = self._memory[worker]
            answer, _ = await confined.run_job(self._confined, worker, {**job, "memory": memory}, data)
            if "size" not in answer:
                return None
            width, height = answer["size"]
            pixels = os.pread(memory, 3 * width * height, 0)
            os.ftruncate(memory, 0)
        image: Image = pillow().frombuffer("RGB", (width, height), pixels, "raw", "RGB", 0, 1)
        return image

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop of the workers, whose thread starts with the first file."""
        with self._lock:
            if self._loop is None:
                self._memory += [os.memfd_create("pixels") for _ in range(confined.AT_ONCE)]
                weakref.finalize(self, _close, self._memory)
                self._loop = loop = asyncio.new_event_loop()
                threading.Thread(target=_run, args=(loop,), name="image files", daemon=True).start()
                weakref.finalize(self, loop.call_soon_threadsafe, loop.stop)
            return self._loop

    def close(self) -> None:
        """End the processes.  A later file starts others."""
        with self._lock:
            if self._loop is not None:
                asyncio.run_coroutine_threadsafe(self._confined.close(), self._loop).result()


def _close(descriptors: list[int]) -> None:
    """Close files in memory."""
    for one in descriptors:
        os.close(one)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run an event loop until it is stopped."""
    loop.run_forever()
    loop.close()


def make(hello: bytes) -> Work:
    """Return the function that decodes a file, after Pillow has loaded its readers."""
    os.environ["PILLOW_BLOCKS_MAX"] = BLOCKS  # Pillow reads this variable when it is imported
    prepare(lambda: pillow().init(), confined.WARM * confined.SECONDS, confined.WARM * confined.MEGABYTES)

    def work(job: dict[str, Any], parts: list[bytes]) -> list[bytes]:
        """Write the pixels of the decoded file to the job's shared memory, and return its size, or the error, as JSON.

        Nothing is decoded for a PIL image whose reader was set to another size or mode; the JSON is then {}."""
        if job["head"] not in (None, head_of(parts[0])):
            return [b"{}"]
        try:
            image = decoded(parts[0])
        except RequestError as exc:
            return [json.dumps({"error": [str(exc), exc.param]}).encode()]
        left, at = memoryview(image.tobytes()), 0
        while left:
            written = os.pwrite(job["memory"], left, at)
            left, at = left[written:], at + written
        return [json.dumps({"size": image.size}).encode()]

    return work
