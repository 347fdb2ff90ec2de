"""Convert many texts at the same time, on several cores.

Threads are fast for tokenizers that release Python's lock, as the libraries tokenizers and tiktoken do.  Processes also
help a tokenizer that is written in Python, but they take a second to start, and texts and ids are copied.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np

from minivllm.errors import ResourceError
from minivllm.limits import usable_cores
from minivllm.registration import fresh

from .tokenizer import Tokenizer

# largest number of characters or token ids that one thread converts in less time than other threads need to start
FEW = 1 << 16
PART = 1 << 15  # largest number of characters, or token ids, of a job, which takes a few milliseconds
MOST = 8  # largest number of threads that ``size=None`` starts
GAIN = 0.8  # largest relative time, compared with one thread, for which ``auto`` uses threads
PARALLELISM = "TOKENIZERS_PARALLELISM"
T = TypeVar("T")
R = TypeVar("R")


class TokenizerPool:
    """Converts lists of texts in their order.  It starts threads or processes at the first long list.

    ``name`` is "auto", "none", "threads" or "process".  "auto" uses threads if the tokenizer is one of the library
    tokenizers, or if they are faster in a measurement of the first long list.  ``size`` is the number of threads or
    processes; None means one for each usable core, at most 8.  An exception or an interrupt ends the conversion after
    the jobs that run."""

    def __init__(self, tokenizer: Tokenizer, name: str = "auto", size: int | None = None) -> None:
        self._tokenizer = tokenizer
        self.size = min(usable_cores(), MOST) if size is None else size
        self.name = name
        if name == "auto" and (tokenizer.backend is not None or self.size == 1):
            self.name = "threads" if self.size > 1 else "none"
        self._threads: ThreadPoolExecutor | None = None
        self._idle: SimpleQueue[PoolProcess] = SimpleQueue()
        self._started: list[PoolProcess] = []

    def encode_all(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of each text.  RequestError if one is not valid text."""
        job = {"op": "encode", "flag": add_special_tokens}
        return self._convert(job, texts)

    def decode_all(self, batch: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        """Return the text of each list of token ids."""
        job = {"op": "decode", "flag": skip_special_tokens}
        return self._convert(job, batch)

    def close(self) -> None:
        """End the threads and processes."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            self._threads = None
        for process in self._started:
            process.close()
        self._started.clear()
        self._idle = SimpleQueue()

    def _convert(self, job: dict[str, Any], items: Sequence[Any]) -> list[Any]:
        """Return the results of a job for all items: here if they are few, else with the chosen method (threads or
        processes)."""
        parts = divided(items)
        if self.name == "none" or sum(map(len, items)) < FEW:
            found = [run(self._tokenizer, job, part) for part in parts]
        elif self.name == "auto":
            found = self._measured(job, parts)
        else:
            found = list(self._in_order(self._function(job), parts))
        return list(chain.from_iterable(found))

    def _function(self, job: dict[str, Any]) -> Callable[[Sequence[Any]], list[Any]]:
        """Return the function that converts a part, in a thread or in a process."""
        if self.name != "process":
            return lambda part: run(self._tokenizer, job, part)
        if not self._started:
            hello = json.dumps(self._tokenizer.to_json()).encode()
            self._started += [PoolProcess(hello) for _ in range(self.size)]
            for process in self._started:
                self._idle.put(process)
        return lambda part: self._remote(job, part)

    def _remote(self, job: dict[str, Any], part: Sequence[Any]) -> list[Any]:
        """Return the results of a part (some texts, or some lists of token ids), converted in an idle process.  If that
        process refuses a text, the part is converted here, so that the error is the same."""
        process = self._idle.get()
        try:
            found = process.convert(job, part)
        finally:
            self._idle.put(process)
        return run(self._tokenizer, job, part) if found is None else found

    def _measured(self, job: dict[str, Any], parts: list[Sequence[Any]]) -> list[list[Any]]:
        """Return the results of all parts, the first converted with one thread and the next with all threads, and
        choose the faster method for later lists."""

        def convert(part: Sequence[Any]) -> list[Any]:
            return run(self._tokenizer, job, part)

        first, some = parts[:1], parts[1 : 1 + self.size]
        begin = time.perf_counter()
        found = list(map(convert, first))
        alone = (time.perf_counter() - begin) * len(some)
        begin = time.perf_counter()
        found += self._in_order(convert, some)
        together = time.perf_counter() - begin
        if len(some) == self.size:  # otherwise there were too few parts for a measurement
            self.name = "threads" if together < GAIN * alone else "none"
        rest = parts[1 + self.size :]
        return found + list(map(convert, rest) if self.name == "none" else self._in_order(convert, rest))

    def _in_order(self, function: Callable[[T], R], parts: Sequence[T]) -> Iterator[R]:
        """Yield the results of all parts in their order.  At most twice ``size`` parts are submitted at a time."""
        if self._threads is None:
            # the library's threads would compete with these, and the library warns in each process that is forked after
            # their use
            os.environ.setdefault(PARALLELISM, "false")
            self._threads = ThreadPoolExecutor(self.size, "tokenizer")
        waiting: deque[Future[R]] = deque()
        rest = iter(parts)
        try:
            for part in islice(rest, 2 * self.size):
                waiting.append(self._threads.submit(function, part))
            while waiting:
                yield waiting[0].result()
                waiting.popleft()
                for part in islice(rest, 1):
                    waiting.append(self._threads.submit(function, part))
        finally:
            for future in waiting:
                future.cancel()


def divided(items: Sequence[Any]) -> list[Sequence[Any]]:
    """Return the items in parts of at most ``PART`` characters or ids, or of one longer item."""
    parts = []
    begin = size = 0
    for end, item in enumerate(items):
        if size and size + len(item) > PART:
            parts.append(items[begin:end])
            begin = end
            size = 0
        size += len(item)
    return [*parts, items[begin:]]


def run(tokenizer: Tokenizer, job: dict[str, Any], items: Sequence[Any]) -> list[Any]:
    """Return the token ids of each text of ``items`` (a job "encode"), or the text of each list of token ids."""
    if job["op"] == "encode":
        return tokenizer.encode_some(items, job["flag"])
    return [tokenizer.decode(ids, job["flag"]) for ids in items]


# ---- processes -------------------------------------------------------------------------------------------------------


class PoolProcess:
    """A process with a separate tokenizer, which is built from the JSON ``hello``."""

    def __init__(self, hello: bytes) -> None:
        self._hello = hello
        self._start()

    def _start(self) -> None:
        """Start the process."""
        ours, theirs = socket.socketpair()
        argv = fresh.command("minivllm.runtime.text.pool:main", str(theirs.fileno()))
        quiet = {**os.environ, PARALLELISM: "false", "OMP_NUM_THREADS": "1"}
        try:
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=quiet)
        finally:
            theirs.close()
        self._link = Connection(ours.detach())
        self._link.send_bytes(self._hello)

    def convert(self, job: dict[str, Any], items: Sequence[Any]) -> list[Any] | None:
        """Return the results of a job, or None if the tokenizer raised an exception.

        A process that has ended is started once more.  ResourceError if it ends again."""
        for _ in range(2):
            try:
                self._link.send_bytes(packed(job, items))
                return unpacked(self._link.recv_bytes())
            except (OSError, EOFError):
                self.close()
                self._start()
        raise ResourceError("a process of tokenizer_pool ended twice; use tokenizer_pool=threads or none")

    def close(self) -> None:
        """End the process."""
        self._link.close()
        self._process.kill()
        self._process.wait()


def packed(job: dict[str, Any], items: Sequence[Any]) -> bytes:
    """Return a job and its texts, or lists of ids, as bytes: a line of JSON, and the ids (i32)."""
    if not items or isinstance(items[0], str):
        return json.dumps([job, list(items)]).encode() + b"\n"
    lengths = [len(ids) for ids in items]
    ids = np.fromiter(chain.from_iterable(items), np.int32, sum(lengths))
    return json.dumps([job, lengths]).encode() + b"\n" + ids.tobytes()


def unpacked(data: bytes) -> list[Any] | None:
    """Return the results, which are packed like a job.  None means that the tokenizer raised an exception."""
    head, _, column = data.partition(b"\n")
    job, found = json.loads(head)
    if job is None:
        return None
    return split_ids(found, column) if job["op"] == "encode" else found


def split_ids(lengths: Sequence[int], column: bytes) -> list[list[int]]:
    """Return lists of the given lengths from ids (i32)."""
    ids = np.frombuffer(column, np.int32).tolist()
    rows = []
    begin = 0
    for length in lengths:
        rows.append(ids[begin : begin + length])
        begin += length
    return rows


def main(number: str) -> None:
    """Serve jobs on the socket with the file descriptor ``number`` until the other end closes it.

    The answer "null" means that a job failed.  The caller then runs the job itself.
    """
    link = Connection(int(number))
    tokenizer = Tokenizer.from_json(json.loads(link.recv_bytes()))
    while True:
        try:
            head, _, column = link.recv_bytes().partition(b"\n")
        except (EOFError, OSError):
            sys.exit(0)
        job, items = json.loads(head)
        if job["op"] == "decode":
            items = split_ids(items, column)
        try:
            answer = packed(job, run(tokenizer, job, items))
        except Exception:  # the caller repeats the job, and so receives the exception
            answer = packed({}, []).replace(b"{}", b"null", 1)
        link.send_bytes(answer)
