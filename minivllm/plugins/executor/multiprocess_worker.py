"""The worker of ``multiprocess``, which joins the ranks, loads its share of the model and runs the steps of its
channel.

Rank 0 sends results.  The other ranks run the same plans and only report failed steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import minivllm
from minivllm.core import progress
from minivllm.core.interfaces.executor import Wiring
from minivllm.core.interfaces.plan import StepResult
from minivllm.core.wiring import wiring_from_json
from minivllm.device.worker.process import build
from minivllm.errors import MinivllmError, ResourceError, part_fault
from minivllm.limits import threads_given
from minivllm.runtime.processes.channel import Channel, ChannelClosed
from minivllm.runtime.processes.child import attach
from minivllm.runtime.processes.status import BEGUN, CALLS, DONE, LEFT, MET, OPERATION, PHASE, StatusPage

from .fingerprint import fingerprint
from .local import Local
from .multiprocess import FINGERPRINT, GO, LOST, PARTED
from .process import FAILED, READY
from .process_worker import WorkerLoop, _answer, _failure, progress_to
from .shared_device import with_others

if TYPE_CHECKING:
    from minivllm.device.layers.communicator import ProcessGroup
    from minivllm.device.layers.peer_memory import PeerMemory

MEETS, LOADS, IS_READY = 1, 2, 3  # of ``status.PHASES``
SAYS = 0.2  # seconds between two updates of the device's progress in shared memory


def main(sock: str, memory: str) -> None:
    """Run a rank; ``sock`` and ``memory`` are file descriptors of the channel."""
    channel = attach(sock, memory)
    try:
        with contextlib.suppress(ChannelClosed):  # the channel closes when the engine ends
            Rank(channel).serve()
    finally:
        channel.close()


class Rank:
    """A rank, which is started with its wiring, the page of states, and the file by which the ranks connect."""

    def __init__(self, channel: Channel) -> None:
        first = channel.receive(wait=True)
        assert first is not None
        self.settings = json.loads(first.data)
        self.channel, self.executor = channel, Local()
        self.rank = self.settings["rank"]
        self.size = self.settings["size"]
        self.ranks: ProcessGroup | None = None
        page, self.store = self._files()  # the second file stays open, because torch uses its path
        self.page = StatusPage(page, self.size, ())
        os.close(page)

    def _files(self) -> tuple[int, int]:
        """Return the file descriptors of the shared page of states and of the file by which ranks connect; -1 for a
        missing one."""
        return self.channel.file(), self.channel.file()

    def _meeting(self) -> Any:
        """Return the path or store through which the ranks connect to each other."""
        return f"/proc/self/fd/{self.store}"

    def _interface(self) -> str:
        """Return the network interface between the ranks; "" lets torch find one."""
        return "lo"  # all ranks run on one machine, so the loopback interface is enough

    def note(self, word: int, value: int) -> None:
        self.page.set(self.rank, word, value)

    def serve(self) -> None:
        try:
            self.channel.send(FINGERPRINT, [json.dumps(self._fingerprint()).encode()])
            try:
                with contextlib.nullcontext() if self.rank else progress.listening(progress_to(self.channel)):
                    capacity = self.executor.adopt(build(self.settings["wiring"], self._make))
            except MinivllmError as e:
                self.channel.send(FAILED, [_failure(0, e)])
                return
            except RuntimeError as e:
                if (alone := self.ranks is None or self.ranks.lost is None) and part_fault(e) is None:
                    raise
                self.channel.send(FAILED if alone else LOST, [_failure(0, e)])
                return
            except Exception as e:
                if part_fault(e) is None:
                    raise
                self.channel.send(FAILED, [_failure(0, e)])
                return
            self.note(PHASE, IS_READY)
            self.channel.send(READY, [_answer(0, dataclasses.asdict(capacity))])
            RankLoop(self).run()
        finally:
            self.executor.stop()
            if self.ranks is not None:
                self.ranks.leave()

    def _fingerprint(self) -> dict[str, str]:
        try:
            return fingerprint(wiring_from_json(self.settings["wiring"]))
        except MinivllmError as e:
            return {"minivllm": f"{minivllm.__version__} ({e})"}

    def _make(self, wiring: Wiring) -> Any:
        import torch

        from minivllm.device.layers.communicator import LostRank, ProcessGroup
        from minivllm.device.worker.build import has_kernels

        from .ranks import RankRunner

        if wiring.device == "cuda":
            torch.cuda.set_device(self.settings.get("device", self.rank))
        elif not threads_given(os.environ):
            torch.set_num_threads(max(1, torch.get_num_threads() // self.size))
        self.note(PHASE, MEETS)
        ranks = self.ranks = ProcessGroup(self.rank, self.size, wiring.device, self._calls)
        if self.size > 1:
            if interface := self._interface():
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            try:
                ranks.join(self._meeting(), self.settings["timeout"])
            except LostRank as e:
                raise ResourceError(str(e)) from e
            if self.settings["sums"] == "auto" and has_kernels(wiring) and not self.settings.get("apart"):
                ranks.share_memory()
            if ranks.peers is not None:
                threading.Thread(target=self._say_met, args=(ranks.peers,), daemon=True).start()
        self.note(PHASE, LOADS)
        try:
            return RankRunner(wiring, ranks, self._failed, self.settings["checked"])
        except ResourceError as e:
            raise with_others(e, wiring.device) from e

    def _say_met(self, peers: PeerMemory) -> None:
        """Write the device's progress in collective calls to shared memory every ``SAYS`` seconds, while ``peers`` is
        in use.

        The host cannot report this progress, because it runs ahead of the device.
        """
        with contextlib.suppress(ValueError):  # the page of states is closed
            while self.ranks is not None and self.ranks.peers is peers:
                for word, value in zip((MET, LEFT), peers.reached(), strict=True):
                    self.note(word, value)
                time.sleep(SAYS)

    def _calls(self, call: int, operation: int) -> None:
        if operation:
            self.note(CALLS, call)
        self.note(OPERATION, operation)

    def _failed(self, step: int, where: str, message: str) -> None:
        """Report a failed step.  The engine finds out whether it failed on all ranks."""
        assert self.ranks is not None
        lost = self.ranks.lost is not None
        calls = self.ranks.calls
        report = {"step": step, "where": where, "calls": calls, "message": message, "lost": lost}
        self.channel.send(PARTED, [json.dumps(report).encode()])


class RankLoop(WorkerLoop):
    """The loop of one rank's worker process: it notes its progress in shared memory, and only rank 0 sends results."""

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank.channel, rank.executor)
        self.rank = rank

    def _do(self, kind: int, data: bytearray) -> None:
        if kind == GO:  # the masks of a step have arrived at rank 0
            step = json.loads(data)
            self._masked.discard(step)
            self.executor.supply(step, None)
            return
        super()._do(kind, data)

    def _submit(self, plan: Any) -> None:
        self.rank.note(BEGUN, plan.id + 1)
        super()._submit(plan)

    def _give_back(self, result: StepResult) -> None:
        self.rank.note(DONE, result.id + 1)
        if self.rank.rank == 0:
            super()._give_back(result)
        else:
            self._due.popleft()
            self._rhythm.begin()
