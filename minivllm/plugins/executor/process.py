"""Runs the steps in one worker process of its own, which computes while this one plans, serves and compiles grammars.

    this process                               worker (``process_worker``)
    submit(plan)    ─ PLAN, encoded ─────────► Local.submit
    supply(masks)   ─ MASKS, where they lie ─► Local.supply      masks are written to memory that both share
    collect()       ◄──────── RESULT, encoded  Local.collect
    call(verb)      ─ CALL, JSON ─► ◄─ ANSWER  Local.call

Plans and results go as ``core.interfaces.codec`` writes them, through ``processes.channel``.  The worker's standard
error is passed on; the end of it is told if the worker dies, which is noticed at once: its end of the channel closes.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from minivllm import errors
from minivllm.core.interfaces import codec
from minivllm.core.interfaces.executor import Capacity, Executor, Wiring
from minivllm.core.interfaces.plan import LateInputs, StepPlan, StepResult
from minivllm.errors import EngineDeadError, MinivllmError, RequestError
from minivllm.processes import fresh
from minivllm.processes.channel import Channel, ChannelClosed, shared_file
from minivllm.wiring import wiring_to_json

WORKER = "minivllm.plugins.executor.process_worker:main"
# kinds of messages; JSON but PLAN, LATE, RESULT (``codec``), MASKS (``PLACE``) and MEMORY (a descriptor beside it)
START, PLAN, LATE, MASKS, MEMORY, CALL, STOP, READY, RESULT, ANSWER, FAILED = range(1, 12)
PLACE = struct.Struct("<qIQII")  # step; which shared memory, at which byte; rows and words of the masks
MEMORY_SIZE = 1 << 20  # bytes of the shared memories that masks lie in, at least
LAST_WORDS = 2000  # bytes of the worker's standard error that its end is explained with
PATIENCE = 5.0  # seconds for a worker whose channel has closed to end


class Process(Executor):
    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._child: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._listener: threading.Thread | None = None
        self._words = b""  # the end of what the worker has said
        self._due: deque[int] = deque()  # steps whose results have not come, in order
        self._masked: set[int] = set()  # those that wait for their masks
        self._results: list[StepResult] = []  # that came while an answer was awaited
        self._memories: list[tuple[int, int, mmap.mmap]] = []  # address, bytes in use, of what masks are written to

    # ---- its life ------------------------------------------------------------------------------------------------

    def start(self, wiring: Wiring) -> Capacity:
        try:
            self._spawn()
            self._send(START, wiring_to_json(wiring).encode())
            told = json.loads(self._await(READY))
        except EngineDeadError as e:
            self.stop()
            raise errors.ResourceError(str(e)) from e
        except BaseException:
            self.stop()
            raise
        told["depth"] = max(told["depth"], 1) if wiring.steps.run_ahead is None else told["depth"]
        return Capacity(**{name: tuple(v) if isinstance(v, list) else v for name, v in told.items()})

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        memory = shared_file(Channel.BYTES)
        try:
            argv = fresh.command(WORKER, str(theirs.fileno()), str(memory))
            self._child = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, pass_fds=(theirs.fileno(), memory)
            )
            self._channel = Channel(ours, memory, started=False)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(memory)
        self._listener = threading.Thread(target=self._listen, name="minivllm worker's words", daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        """Pass on what the worker says, until nobody holds the other end of the pipe any more."""
        assert self._child is not None and self._child.stderr is not None
        while said := os.read(self._child.stderr.fileno(), 1 << 16):
            self._words = (self._words + said)[-LAST_WORDS:]
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(said.decode(errors="replace"))
                sys.stderr.flush()

    def alive(self) -> bool:
        return self._channel is not None and self._child is not None and self._child.poll() is None

    def stop(self, deadline: float = 10.0) -> None:
        end = time.monotonic() + deadline
        child, channel, listener = self._child, self._channel, self._listener
        if channel is not None:
            with contextlib.suppress(ChannelClosed):
                channel.send(STOP, [])
        if child is not None:
            try:
                child.wait(max(0.0, end - time.monotonic()) / 2)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        if listener is not None:
            listener.join(max(0.1, end - time.monotonic()))
        if child is not None and child.stderr is not None:
            child.stderr.close()
        if channel is not None:
            channel.close()
        self._child = self._channel = self._listener = None
        self._memories = []
        for waiting in (self._due, self._masked, self._results):
            waiting.clear()

    # ---- steps ---------------------------------------------------------------------------------------------------

    def submit(self, plan: StepPlan) -> None:
        self._send(PLAN, *codec.encode_plan(plan))
        self._due.append(plan.id)
        if len(plan.late):
            self._masked.add(plan.id)

    def supply(self, step: int, late: LateInputs) -> None:
        rows, words = late.mask.shape
        address = late.mask.__array_interface__["data"][0]
        whole = late.mask.flags.c_contiguous and late.mask.dtype == np.int32
        for i, (start, used, _) in enumerate(self._memories if whole else ()):
            if start <= address < start + used:
                self._send(MASKS, PLACE.pack(step, i, address - start, rows, words))
                break
        else:
            self._send(LATE, *codec.encode_late(step, late))
        self._masked.discard(step)

    def mask_memory(self, rows: int, words: int) -> np.ndarray:
        """Memory that is shared with the worker."""
        need = -(-rows * words * 4 // 64) * 64
        start, used, memory = self._memories[-1] if self._memories else (0, 0, b"")
        if used + need > len(memory):
            size = max(need, MEMORY_SIZE)
            file = shared_file(size)
            try:
                memory, used = mmap.mmap(file, size), 0
                self._send(MEMORY, json.dumps(size).encode(), file=file)
            finally:
                os.close(file)
            start = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
            self._memories.append((start, 0, memory))
        self._memories[-1] = (start, used + need, memory)
        return np.frombuffer(memory, np.int32, rows * words, used).reshape(rows, words)

    def collect(self, in_flight: int) -> Sequence[StepResult]:
        found, self._results = self._results, []
        if not self._due and not self.alive():
            raise EngineDeadError(self._why())
        while self._due:
            wait = len(self._due) > in_flight and self._due[0] not in self._masked
            result = self._result(wait)
            if result is None:
                break
            found.append(result)
        return found

    def _result(self, wait: bool) -> StepResult | None:
        message = self._receive(wait)
        return None if message is None else self._came(message.data)

    def _came(self, data: bytearray) -> StepResult:
        result = codec.decode_result(data)
        if not self._due or self._due.popleft() != result.id:
            raise EngineDeadError(f"the worker answered step {result.id} out of turn")
        return result

    # ---- verbs ---------------------------------------------------------------------------------------------------

    def call(self, verb: str, args: Mapping[str, Any] | None = None) -> Any:
        self._send(CALL, json.dumps([verb, None if args is None else dict(args)]).encode())
        return json.loads(self._await(ANSWER))

    def _await(self, kind: int) -> bytearray:
        """The next message of this kind; results that come before it are kept.  Its error, if there is one instead."""
        while True:
            message = self._receive(wait=True)
            assert message is not None
            if message.kind == kind:
                return message.data
            if message.kind == FAILED:
                raise error_of(**json.loads(message.data))
            self._results.append(self._came(message.data))

    # ---- the channel ---------------------------------------------------------------------------------------------

    def _send(self, kind: int, *parts: bytes, file: int = -1) -> None:
        if self._channel is None:
            raise EngineDeadError(self._why())
        try:
            self._channel.send(kind, parts, file)
        except ChannelClosed as e:
            raise EngineDeadError(self._why()) from e

    def _receive(self, wait: bool) -> Any:
        if self._channel is None:
            raise EngineDeadError(self._why())
        try:
            return self._channel.receive(wait)
        except ChannelClosed as e:
            raise EngineDeadError(self._why()) from e

    def _why(self) -> str:
        """How the worker has ended, with its last words."""
        child, listener = self._child, self._listener
        if child is None or listener is None:
            return "the worker is not running: start() comes first"
        try:
            code = child.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            return f"the worker process {child.pid} has closed its channel, and runs on"
        listener.join(1.0)
        how = f"exit code {code}" if code >= 0 else f"signal {-code} ({_signal(-code)})"
        words = self._words.decode(errors="replace").strip().splitlines()
        last = f"; its last words: {' | '.join(words[-3:])}" if words else ""
        return f"the worker process {child.pid} has ended, {how}{last}"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def error_of(name: str, message: str, param: str | None = None) -> Exception:
    """The error that a worker told of: minivllm's own, or that of a verb which is not known."""
    if name == "NotImplementedError":
        return NotImplementedError(message)
    kind = getattr(errors, name, None)
    if kind is RequestError:
        return RequestError(message, param)
    if isinstance(kind, type) and issubclass(kind, MinivllmError):
        return kind(message)
    return MinivllmError(f"{name}: {message}")
