"""Run the steps in several worker processes that share the model, one for each device (tensor parallelism).

    this process            rank 0                       rank 1 ...              (``multiprocess_worker``)
    submit(plan) ─ PLAN ──► Local.submit ◄═ gloo, NCCL ═► Local.submit           the same bytes to each channel
    supply(masks) ─ MASKS ► Local.supply    ─ GO ───────► Local.supply
    collect()  ◄─ RESULT ── Local.collect

Each rank has its own channel (``process``) with numbered messages, and a line of a page of shared memory for its state
(``runtime.processes.status``).  Every wait has a limit.  If no rank makes progress for ``timeout`` seconds, the engine
ends with an error that names the missing ranks.  If a rank ends, the engine ends at once and reports the rank's last
output.  A failed step must fail on all ranks at the same place, as exceptions of plug-ins do.  Otherwise the columns of
the ranks differ, and the engine ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from minivllm.core import progress
from minivllm.core.interfaces.executor import Capacity, ParallelWiring, Wiring
from minivllm.core.interfaces.plan import LateInputs, StepResult
from minivllm.core.wiring import wiring_to_json
from minivllm.errors import EngineDeadError, ResourceError, error_from
from minivllm.runtime.processes.channel import Message, shared_file
from minivllm.runtime.processes.child import LOOK, Child, ChildEnded
from minivllm.runtime.processes.status import BEGUN, CALLS, StatusPage

from .fingerprint import differences
from .options import MultiprocessOptions
from .process import CALL, FAILED, NOT_RUNNING, PROGRESS, READY, START, Process, cannot_start, capacity_of

WORKER = "minivllm.plugins.executor.multiprocess_worker:main"
# names of the collective operations by the number in a rank's state, written out here because the communicator's module
# imports torch
OPERATIONS = (
    "",
    "all_reduce",
    "gather",
    "broadcast",
    "all_gather",
)
# kinds of messages between the processes, in addition to those of ``process``; their content is JSON
GO, PARTED, LOST, MEETING, FINGERPRINT = range(13, 18)
OF_ALL = (
    "kv_resident",
    "devices",
    "figures",
    "kv_tiers",
    "adapters",
    "weights",
)  # methods of ``call`` whose results are added up over all ranks
AGREE = 5.0  # seconds in which all ranks must report a step that failed on one of them
DYING = 1.0  # after a rank has reported the loss of another one, seconds to find out which rank has ended
# extra seconds of a call between ranks, so that the parent process, which has more information, reports first
PATIENCE = 2.0
STARTING = 0.01  # seconds between checks during the start


class Multiprocess(Process):
    """The executor ``Process`` with rank 0, and further ranks that run the same plans."""

    def __init__(self, options: MultiprocessOptions | None = None) -> None:
        super().__init__(options or MultiprocessOptions())
        self._others: list[Child] = []
        self._page: StatusPage | None = None
        self._device = ""
        self._looked = 0.0  # time of the last check whether the other ranks are alive
        self._limit = self.options.timeout  # seconds of standstill
        self._calling = False  # whether ``call`` waits for an answer
        # step -> rank -> the rank's report that the step failed
        self._parted: dict[int, dict[int, dict[str, Any]]] = {}

    # ---- its life ------------------------------------------------------------------------------------------------

    def start(self, wiring: Wiring) -> Capacity:
        size = wiring.parallel.tensor_parallel_size
        self._device = wiring.device
        try:
            self._start(wiring, size)
            self._compare_all(size)
            answers = self._ready_all(size)
        except (ChildEnded, EngineDeadError, OSError) as e:
            self._kill()
            self.stop()
            raise ResourceError(cannot_start("processes", e)) from e
        except BaseException:
            self._kill()
            self.stop()
            raise
        capacity = capacity_of(answers[0], wiring)
        shares = [tuple(one["block_bytes"]) for one in answers]
        return replace(
            capacity,
            block_bytes=tuple(sum(share) for share in zip(*shares, strict=True)),
            weight_bytes=sum(one["weight_bytes"] for one in answers),
            state_bytes=sum(one["state_bytes"] for one in answers),
        )

    def _start(self, wiring: Wiring, size: int) -> None:
        files = [shared_file(StatusPage.room(size)), shared_file(0)]
        try:
            self._page = StatusPage(files[0], size, OPERATIONS)
            for rank, child in enumerate(self._launch(wiring, size)):
                if rank:
                    self._others.append(child)
                else:
                    self._child = child
                text = wiring_to_json(replace(wiring, parallel=ParallelWiring(size, rank)))
                settings = {"rank": rank, "size": size, "wiring": text}
                settings |= {"timeout": PATIENCE * self.options.timeout}
                settings |= {"checked": self.options.checked, "sums": self.options.sums}
                with self._named(rank):
                    self._begin(child, rank, settings, files)
        finally:
            for file in files:
                os.close(file)

    def _launch(self, wiring: Wiring, size: int) -> Iterator[Child]:
        """Yield the ranks in order.  Each receives its configuration before the next is launched."""
        for _ in range(size):
            yield Child(WORKER, self.options.timeout)

    def _begin(self, child: Child, rank: int, settings: dict[str, Any], files: Sequence[int]) -> None:
        """Send a rank its configuration and two files: the page of states, and the file by which the ranks connect."""
        child.send(START, [json.dumps(settings).encode()], files[0])
        child.send(START, [b""], files[1])

    def _compare_all(self, size: int) -> None:
        """Raise ResourceError if a rank has other files or versions than rank 0.

        The fingerprint is the first message of each rank.
        """
        fingerprints: dict[int, dict[str, str]] = {}
        end = time.monotonic() + self.options.start_timeout
        while len(fingerprints) < size:
            for rank in [rank for rank in range(size) if rank not in fingerprints]:
                with self._named(rank):
                    message = self._rank(rank).receive(wait=False)
                if message is None:
                    self._still_starts(rank)
                elif message.kind == FINGERPRINT:
                    fingerprints[rank] = json.loads(message.data)
                else:
                    raise EngineDeadError(f"{self._name(rank)} sent an unexpected message of kind {message.kind}")
            if time.monotonic() > end:
                missing = "; ".join(self._where(rank) for rank in range(size) if rank not in fingerprints)
                raise ResourceError(f"not started within {self.options.start_timeout:.0f} s: {missing}")
            time.sleep(STARTING)
        for rank in range(1, size):
            if words := differences(fingerprints[0], fingerprints[rank]):
                raise ResourceError(
                    f"{self._name(rank)} has other files or versions than {self._name(0)}: {words}; all ranks need the "
                    "same"
                )

    @contextlib.contextmanager
    def _named(self, rank: int) -> Iterator[None]:
        """Raise EngineDeadError with the name of a rank that has ended inside this context."""
        try:
            yield
        except ChildEnded as e:
            raise EngineDeadError(f"{self._name(rank)}: {e}") from e

    def _still_starts(self, rank: int) -> None:
        if (ended := self._rank(rank).ended()) is not None:
            raise EngineDeadError(f"{self._name(rank)}: {ended}")

    def _ready_all(self, size: int) -> list[dict[str, Any]]:
        """Return the answers of all ranks when they are ready.  Raise the error of a rank that cannot start."""
        answers: dict[int, dict[str, Any]] = {}
        end = time.monotonic() + self.options.start_timeout
        failed: Exception | None = None  # error of a rank other than 0; an error of rank 0 takes precedence
        lost: Exception | None = None  # an error that reports the loss of another rank
        done: set[int] = set()  # ranks that have reported why they ended
        while len(answers) < size:
            for rank in [r for r in range(size) if r not in answers and r not in done]:
                try:
                    message = self._rank(rank).receive(wait=False)
                    ended = None if message is not None else self._rank(rank).ended()
                except ChildEnded as e:
                    message = None
                    ended = e
                if ended is not None and failed is None:
                    raise EngineDeadError(f"{self._name(rank)}: {ended}")
                if message is None:
                    continue
                content = json.loads(message.data)
                if message.kind == MEETING:  # rank 0 sends the address at which the ranks connect to each other
                    self._send_all(MEETING, bytes(message.data))
                    continue
                if message.kind == PROGRESS:
                    progress.report(*content)
                    continue
                if message.kind == READY:
                    answers[rank] = content["answer"]
                    continue
                done.add(rank)
                end = min(end, time.monotonic() + DYING)
                if message.kind != FAILED:
                    lost = lost or ResourceError(content["error"]["message"])
                    continue
                error = error_from(**content["error"])
                if rank == 0:
                    raise error
                failed = failed or type(error)(f"{self._name(rank)}: {error}")
            if time.monotonic() > end:
                missing = "; ".join(self._where(rank) for rank in range(size) if rank not in answers)
                late = ResourceError(f"not ready within {self.options.start_timeout:.0f} s: {missing}")
                raise failed or lost or late
            time.sleep(STARTING)
        return [answers[rank] for rank in range(size)]

    def _ranks(self) -> list[Child]:
        return [*([self._child] if self._child is not None else []), *self._others]

    def _rank(self, rank: int) -> Child:
        return self._ranks()[rank]

    def _name(self, rank: int) -> str:
        device = f"{self._device}:{rank}" if self._device != "cpu" else "cpu"
        return f"rank {rank} of {1 + len(self._others)} ({device}, process {self._rank(rank).pid})"

    def _where(self, rank: int) -> str:
        return f"{self._name(rank)}: {self._page.describe(rank) if self._page is not None else ''}"

    def alive(self) -> bool:
        return self._fault is None and self._child is not None and all(child.alive() for child in self._ranks())

    def stop(self, deadline: float = 10.0) -> None:
        others, self._others, end = self._others, [], time.monotonic() + deadline
        for child in (*others, *([self._child] if self._child is not None else [])):
            child.leave()
        super().stop(deadline)
        for child in others:
            child.end(max(0.2, end - time.monotonic()))
        page = self._page
        self._page = None
        self._parted = {}
        self._limit = self.options.timeout
        if page is not None:
            page.close()

    # ---- to the ranks --------------------------------------------------------------------------------------------

    def _send(self, kind: int, *parts: bytes, file: int = -1) -> None:
        try:
            super()._send(kind, *parts, file=file)
        except EngineDeadError as e:
            raise e if self._child is None else self._lost(0, e) from e

    def _send_plan(self, kind: int, parts: Sequence[bytes]) -> None:
        if not self._due and self._page is not None:
            self._page.moves()
        data = b"".join(parts)
        self._send(kind, data)
        self._send_all(kind, data)

    def supply(self, step: int, late: LateInputs) -> None:
        if self._page is not None:
            self._page.moves()
        super().supply(step, late)
        self._send_all(GO, json.dumps(step).encode())

    def _send_all(self, kind: int, data: bytes) -> None:
        for rank, child in enumerate(self._others, 1):
            try:
                child.send(kind, [data])
            except ChildEnded as e:
                raise self._lost(rank, e) from e

    def call(self, verb: str, args: Mapping[str, Any] | None = None) -> Any:
        """Call a verb on all ranks, and return the answer of rank 0.

        Only for the verbs in OF_ALL, such as those for memory of the KV cache, devices and figures of plug-ins, the
        answers of all ranks are combined.
        """
        self._limit = self.options.start_timeout
        self._calling = True
        try:
            if self._page is not None:
                self._page.moves()
            found = super().call(verb, args)
            return self._sum(verb, found, args) if verb in OF_ALL else found
        finally:
            self._limit = self.options.timeout
            self._calling = False

    def _sum(self, verb: str, found: Any, args: Mapping[str, Any] | None) -> Any:
        given = None if args is None else dict(args)
        message = json.dumps([self._calls, verb, given])
        self._send_all(CALL, message.encode())
        for rank, child in enumerate(self._others, 1):
            report = json.loads(self._receive_from(rank, child).data)
            answer = report.get("answer")
            found = None if found is None or answer is None else found + answer
        return found

    def _receive_from(self, rank: int, child: Child) -> Message:
        while True:
            try:
                message = child.receive(wait=False)
                if message is not None and message.kind == PARTED:
                    self._note(rank, message)
                elif message is not None:
                    return message
            except ChildEnded as e:
                raise self._lost(rank, e) from e
            if not child.rest(LOOK):
                self._look()

    # ---- from the ranks ------------------------------------------------------------------------------------------

    def _receive(self, wait: bool) -> Message | None:
        while self._child is not None:
            try:
                message = self._child.receive(wait=False)
            except ChildEnded as e:
                raise self._lost(0, e) from e
            if message is not None and message.kind == PARTED:
                self._note(0, message)
                continue
            if message is not None:
                return message
            rested = wait and self._child.rest(LOOK, self._rhythm)
            if not rested and (wait or time.monotonic() - self._looked > LOOK or not self.alive()):
                self._look()
            if not wait:
                return None
        raise EngineDeadError(NOT_RUNNING)

    def _look(self) -> None:
        """Check that the other ranks are alive and agree, and that not too much time has passed.

        Raise EngineDeadError if a rank has ended, if ranks disagree about a step, or if no rank has made progress."""
        self._looked = time.monotonic()
        self._gather()
        for rank, child in enumerate(self._ranks()):
            if (ended := child.ended()) is not None:
                raise self._lost(rank, ended)
        for step, reports in self._parted.items():
            if self._looked - min(one["at"] for one in reports.values()) > AGREE or self._passed(step, reports):
                raise self._dead(self._differ(step))
        waits = self._due and self._due[0] not in self._masked
        if not waits and not self._calling:
            return
        assert self._page is not None
        if (still := self._page.standstill()) > self._limit:
            missing = self._page.missing()
            where = "; ".join(self._where(rank) for rank in range(1 + len(self._others)))
            who = " and ".join(f"rank {rank}" for rank in missing) or "nobody, the device does not answer"
            raise self._dead(f"no rank has made progress for {still:.0f} s.  Missing: {who}.  {where}")

    def _passed(self, step: int, reports: Mapping[int, Mapping[str, Any]]) -> bool:
        """Return whether a rank that reported no failure has passed the collective call at which other ranks failed in
        ``step``.
        """
        page = self._page
        least = min(one["calls"] for one in reports.values())
        if page is None:
            return False
        ranks = [rank for rank in range(page.size) if rank not in reports]
        # read CALLS before BEGUN, because a rank may begin the next step between the two reads
        calls = {rank: page.get(rank, CALLS) for rank in ranks}
        return any(calls[rank] > least and page.get(rank, BEGUN) == step + 1 for rank in ranks)

    def _gather(self) -> None:
        """Collect the messages of other ranks about failed steps."""
        for rank, child in enumerate(self._others, 1):
            while child.ready():
                try:
                    message = child.receive(wait=False)
                except ChildEnded as e:
                    raise self._lost(rank, e) from e
                if message is not None and message.kind == PARTED:
                    self._note(rank, message)

    def _note(self, rank: int, message: Message) -> None:
        report = json.loads(message.data) | {"at": time.monotonic()}
        self._parted.setdefault(report["step"], {})[rank] = report
        if report["lost"]:  # another rank has ended or hangs, which the next checks show
            end = time.monotonic() + DYING
            while time.monotonic() < end:
                for other, child in enumerate(self._ranks()):
                    if not child.alive() and (ended := child.ended()) is not None:
                        raise self._lost(other, ended)
                time.sleep(STARTING)
        if report["where"] == "sample":  # only the rank that draws can report a failure of the draw
            raise self._dead(self._differ(report["step"]))

    def _result(self, message: Message) -> StepResult:
        result = super()._result(message)
        self._gather()
        if self._parted or result.failure is not None:
            self._agree(result)
        return result

    def _agree(self, result: StepResult) -> None:
        """Check that a step that failed on rank 0 failed on all ranks at the same place.

        Raise EngineDeadError otherwise.
        """
        reports = self._parted.get(result.id, {})
        size = 1 + len(self._others)
        if not reports:
            return  # the draw failed, which only rank 0 does, or the report is about another step
        end = time.monotonic() + AGREE
        while len(reports) < size and result.failure is not None and time.monotonic() < end:
            time.sleep(STARTING)
            self._gather()
        if len(reports) < size or len({one["calls"] for one in reports.values()}) > 1:
            raise self._dead(self._differ(result.id))
        del self._parted[result.id]

    def _differ(self, step: int) -> str:
        reports = self._parted[step]
        size = 1 + len(self._others)
        words = [
            f"{self._name(rank)} failed after {one['calls']} calls: {one['message']}" for rank, one in reports.items()
        ]
        words += [f"{self._where(rank)}, and has not failed" for rank in range(size) if rank not in reports]
        return f"the ranks have parted in step {step}: {'; '.join(words)}"

    def _lost(self, rank: int, how: Exception) -> EngineDeadError:
        """Return the error for a rank that has ended, with the place in its work that it reported last."""
        where = "" if self._page is None else f", {self._page.describe(rank)}"
        return self._dead(f"{self._name(rank)}{where}: {how}")

    def _dead(self, words: str) -> EngineDeadError:
        """Store and return the error with which the engine ends, and end all ranks."""
        self._fault = EngineDeadError(words)
        self._kill()
        return self._fault

    def _kill(self) -> None:
        """Kill all ranks, because they would wait for each other forever."""
        for seconds in (0.0, DYING):
            for child in self._ranks():
                child.kill(seconds)
