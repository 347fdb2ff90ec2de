"""Run the steps in one separate worker process, while this process plans, serves HTTP and compiles grammars.

    this process                               worker (``process_worker``)
    submit(plan)    ─ PLAN, encoded ─────────► Local.submit
    supply(masks)   ─ MASKS, their place ────► Local.supply      masks are written to memory that both share
    collect()       ◄──────── RESULT, encoded  Local.collect
    call(verb)      ─ CALL, JSON ─► ◄─ ANSWER  Local.call

Plans and results are encoded by ``steps`` and ``core.interfaces.codec``, and sent by ``runtime.processes.channel``.
The end of a worker is noticed at once, and its last output is reported (``runtime.processes.child``).
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import resource
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from minivllm.core import progress
from minivllm.core.interfaces import codec
from minivllm.core.interfaces.executor import Capacity, Executor, Wiring
from minivllm.core.interfaces.plan import LateInputs, StepPlan, StepResult
from minivllm.core.wiring import wiring_to_json
from minivllm.errors import EngineDeadError, ResourceError, error_from
from minivllm.runtime.processes.channel import Message, shared_file
from minivllm.runtime.processes.child import Child, ChildEnded
from minivllm.runtime.processes.rhythm import Rhythm

from .steps import PLAIN, RESULT, Plans, StepResults

WORKER = "minivllm.plugins.executor.process_worker:main"
# kinds of messages in addition to those of ``steps``, in JSON except for LATE (``codec``), MASKS (``PLACE``) and MEMORY
# (with a descriptor)
START, LATE, MASKS, MEMORY, CALL, READY, ANSWER, FAILED = 1, 3, 4, 5, 6, 7, 9, 10
PROGRESS = 18  # kind of the message with the progress of the start, in JSON; it is sent before READY
# fields: step id; number of the shared memory, offset in bytes; rows and words of the masks
PLACE = struct.Struct("<qIQII")
MEMORY_SIZE = 1 << 20  # least size in bytes of a shared memory for masks
NOT_RUNNING = "the worker is not running: start() comes first"


class Process(Executor):
    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._child: Child | None = None
        self._due: deque[int] = deque()  # ids of the steps whose results have not arrived, in order
        self._masked: set[int] = set()  # ids of the steps in ``_due`` whose token masks have not been sent
        self._plans, self._answers = Plans(), StepResults()
        self._slots: deque[np.ndarray] = deque()  # slots of the plans of the steps in ``_due``
        self._results: list[StepResult] = []  # results that arrived while ``call`` waited for its answer
        # Shared memory for token masks: (memory, address, bytes in use).
        self._memories: list[tuple[int, int, mmap.mmap | bytes]] = []
        # times between the start of a step on an idle device, or the preceding result, and the result
        self._rhythm = Rhythm()
        self._calls = 0
        # an error that is raised after the results that arrived before it are returned
        self._fault: EngineDeadError | None = None

    # ---- its life ------------------------------------------------------------------------------------------------

    def start(self, wiring: Wiring) -> Capacity:
        try:
            self._child = Child(WORKER)
            self._send(START, wiring_to_json(wiring).encode())
            answer = self._await(READY, 0)
        except (EngineDeadError, OSError) as e:
            self.stop()
            raise ResourceError(cannot_start("process", e)) from e
        except BaseException:
            self.stop()
            raise
        return capacity_of(answer, wiring)

    def alive(self) -> bool:
        return self._child is not None and self._child.alive()

    def stop(self, deadline: float = 10.0) -> None:
        child = self._child
        self._child = None
        self._memories = []
        self._fault = None
        for waiting in (self._due, self._masked, self._slots, self._results):
            waiting.clear()
        self._plans, self._answers = Plans(), StepResults()
        if child is not None:
            child.end(deadline)

    # ---- steps ---------------------------------------------------------------------------------------------------

    def submit(self, plan: StepPlan) -> None:
        self._send_plan(*self._plans.encode(plan))
        if not self._due:
            self._rhythm.begin()
        self._due.append(plan.id)
        self._slots.append(plan.slots)
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
        """Return memory that is shared with the worker, i32 [rows, words]."""
        need = -(-rows * words * 4 // 64) * 64
        start, used, memory = self._memories[-1] if self._memories else (0, 0, b"")
        if used + need > len(memory):
            size = max(need, MEMORY_SIZE)
            file = shared_file(size)
            try:
                memory = mmap.mmap(file, size)
                used = 0
                self._send(MEMORY, json.dumps(size).encode(), file=file)
            finally:
                os.close(file)
            start = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
            self._memories.append((start, 0, memory))
        self._memories[-1] = (start, used + need, memory)
        return np.frombuffer(memory, np.int32, rows * words, used).reshape(rows, words)

    def collect(self, in_flight: int) -> Sequence[StepResult]:
        found = self._results
        self._results = []
        if self._fault is not None:
            raise self._fault
        try:
            if not self._due and not self.alive():
                self._receive(wait=False)  # raises an error that says why the worker has ended
            while self._due:
                # a step that waits for its masks returns no result, so the worker's end must be checked here
                waits = self._due[0] in self._masked
                wait = len(self._due) > in_flight and not waits
                message = self._receive(wait) if wait or waits or self._ready() else None
                if message is None:
                    break
                found.append(self._result(message))
        except EngineDeadError as e:
            if not found:
                raise
            self._fault = e  # raised by the next call, because results have arrived before
        return found

    def _result(self, message: Message) -> StepResult:
        if message.kind not in (RESULT, PLAIN):
            raise self._failure(message)
        slots = self._slots.popleft() if self._slots else None
        self._rhythm.came()
        result = self._answers.decode(message.kind, message.data, slots)
        if not self._due or self._due.popleft() != result.id:
            raise EngineDeadError(f"the worker returned step {result.id} out of order")
        return result

    # ---- verbs ---------------------------------------------------------------------------------------------------

    def call(self, verb: str, args: Mapping[str, Any] | None = None) -> Any:
        self._calls += 1
        self._send(CALL, json.dumps([self._calls, verb, None if args is None else dict(args)]).encode())
        return self._await(ANSWER, self._calls)

    def _await(self, kind: int, call: int) -> Any:
        """Return the answer to a call, or raise its error.

        Results that arrive before the answer are kept.  Answers to earlier, abandoned calls are dropped.
        """
        while True:
            message = self._receive(wait=True)
            assert message is not None
            if message.kind == PROGRESS:
                progress.report(*json.loads(message.data))
                continue
            if message.kind not in (kind, FAILED):
                self._results.append(self._result(message))
                continue
            reply = json.loads(message.data)
            if reply["call"] < call:
                continue
            if message.kind == FAILED:
                raise self._failure(message)
            return reply["answer"]

    def _failure(self, message: Message) -> Exception:
        if message.kind == FAILED:
            return error_from(**json.loads(message.data)["error"])
        return EngineDeadError(f"the worker sent a message of kind {message.kind} out of order")

    def _send_plan(self, kind: int, parts: Sequence[bytes]) -> None:
        self._send(kind, *parts)

    # ---- the channel ---------------------------------------------------------------------------------------------

    def _send(self, kind: int, *parts: bytes, file: int = -1) -> None:
        if self._child is None:
            raise EngineDeadError(NOT_RUNNING)
        try:
            self._child.send(kind, parts, file)
        except ChildEnded as e:
            raise EngineDeadError(str(e)) from e

    def _receive(self, wait: bool) -> Message | None:
        if self._child is None:
            raise EngineDeadError(NOT_RUNNING)
        try:
            return self._child.receive(wait, self._rhythm)
        except ChildEnded as e:
            raise EngineDeadError(str(e)) from e

    def _ready(self) -> bool:
        return self._child is not None and self._child.ready()


def cannot_start(what: str, e: Exception) -> str:
    """Describe why a worker could not start, by the error of the system or by the worker's last output."""
    if not isinstance(e, OSError):
        return str(e)
    limit = ""
    if e.errno in (errno.EMFILE, errno.ENFILE):
        limit = f" (this process may have {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}: ulimit -n raises that)"
    return f"the worker {what} cannot be started: {e}{limit}"


def capacity_of(answer: dict[str, Any], wiring: Wiring) -> Capacity:
    """Return the capacity that a worker has reported.  Steps run ahead of the engine on a CPU too."""
    if wiring.steps.run_ahead is None:
        answer["depth"] = max(answer["depth"], 1)
    for name, value in answer.items():
        if isinstance(value, list):
            answer[name] = tuple(value)
    return Capacity(**answer)
