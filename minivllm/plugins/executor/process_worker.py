"""The worker of ``process``, which runs the messages of its channel with a ``Local`` executor until the
channel closes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import mmap
import os
from collections import deque
from typing import Any

import numpy as np

from minivllm.core import progress
from minivllm.core.interfaces import codec
from minivllm.core.interfaces.plan import LateInputs, StepPlan, StepResult
from minivllm.device.worker.process import build
from minivllm.errors import MinivllmError, ResourceError, describe_error, part_fault
from minivllm.runtime.processes.channel import Channel, ChannelClosed
from minivllm.runtime.processes.child import attach
from minivllm.runtime.processes.rhythm import Rhythm, let_others

from .local import Local
from .process import ANSWER, CALL, FAILED, LATE, MASKS, MEMORY, PLACE, PROGRESS, READY
from .shared_device import with_others
from .steps import NEXT, PLAN, Plans, StepResults


def main(sock: str, memory: str) -> None:
    """Run the worker; ``sock`` and ``memory`` are file descriptors of the channel."""
    channel = attach(sock, memory)
    try:
        with contextlib.suppress(ChannelClosed):  # the channel closes when the engine ends
            _serve(channel)
    finally:
        channel.close()


def _serve(channel: Channel) -> None:
    executor = Local()
    first = channel.receive(wait=True)
    assert first is not None
    try:
        try:
            with progress.listening(progress_to(channel)):
                capacity = executor.adopt(build(first.data.decode()))
        except Exception as e:
            if isinstance(e, ResourceError):
                e = with_others(e, json.loads(first.data)["device"])
            elif not isinstance(e, MinivllmError) and part_fault(e) is None:
                raise  # an error in this package, which is shown with its traceback
            channel.send(FAILED, [_failure(0, e)])
            return
        channel.send(READY, [_answer(0, dataclasses.asdict(capacity))])
        WorkerLoop(channel, executor).run()
    finally:
        executor.stop()


def progress_to(channel: Channel) -> progress.Listener:
    """Return a function that sends reports about the start, at a limited rate, to the parent process."""
    return progress.thinned(lambda *report: channel.send(PROGRESS, [json.dumps(report).encode()]))


class WorkerLoop:
    """The loop of the worker.  It sends the results of steps as soon as they are done.

    While the device computes, the process polls for messages and results and keeps one core busy, because a sleep would
    cost each step about 50 us.  When nothing runs, it polls for the time that ``Rhythm`` gives, and then sleeps.
    """

    def __init__(self, channel: Channel, executor: Local) -> None:
        self.channel = channel
        self.executor = executor
        self._due: deque[StepPlan] = deque()  # submitted steps whose results have not been sent
        self._plans, self._results = Plans(), StepResults()
        self._masked: set[int] = set()  # ids of steps that wait for their token masks
        self._memories: list[mmap.mmap] = []
        self._rhythm = Rhythm()  # predicts from earlier messages how long to poll for the next one

    def run(self) -> None:
        while True:
            idle = not self._due or self._due[0].id in self._masked
            message = self.channel.receive(idle, self._rhythm) if idle or self.channel.ready() else None
            if message is not None:
                if idle:
                    self._rhythm.came()
                self._do(message.kind, message.data)
            if self._due:
                for result in self.executor.collect(len(self._due)):
                    self._give_back(result)
                if message is None:
                    let_others()

    def _do(self, kind: int, data: bytearray) -> None:
        if kind in (PLAN, NEXT):
            plan = self._plans.decode(kind, data)
            self._due.append(plan)
            if len(plan.late):
                self._masked.add(plan.id)
            self._submit(plan)
        elif kind in (MASKS, LATE):
            step, late = self._masks(data) if kind == MASKS else codec.decode_late(data)
            self._masked.discard(step)
            self.executor.supply(step, late)
        elif kind == MEMORY:
            file = self.channel.file()
            self._memories.append(mmap.mmap(file, json.loads(data)))
            os.close(file)
        elif kind == CALL:
            self._call(*json.loads(data))

    def _submit(self, plan: StepPlan) -> None:
        self.executor.submit(plan)

    def _give_back(self, result: StepResult) -> None:
        """Send the result of the oldest submitted step to the engine."""
        self.channel.send(*self._results.encode(result, self._due.popleft().slots))
        self._rhythm.begin()

    def _masks(self, data: bytearray) -> tuple[int, LateInputs]:
        step, memory, at, rows, words = PLACE.unpack(data)
        return step, LateInputs(np.frombuffer(self._memories[memory], np.int32, rows * words, at).reshape(rows, words))

    def _call(self, number: int, verb: str, args: dict[str, Any] | None) -> None:
        try:
            answer = _answer(number, self.executor.call(verb, args))
        except Exception as e:  # The call failed, but the worker goes on.
            self.channel.send(FAILED, [_failure(number, e)])
        else:
            self.channel.send(ANSWER, [answer])


def _answer(call: int, value: Any) -> bytes:
    return json.dumps({"call": call, "answer": value}).encode()


def _failure(call: int, e: Exception) -> bytes:
    e = part_fault(e) or e
    words = str(e) if isinstance(e, (MinivllmError, NotImplementedError)) else describe_error(e)
    error = {"name": type(e).__name__, "message": words, "param": getattr(e, "param", None)}
    return json.dumps({"call": call, "error": error}).encode()
