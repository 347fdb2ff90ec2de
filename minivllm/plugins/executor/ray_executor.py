"""The executor ``multiprocess`` with ranks that are actors of a Ray cluster, which may be on several machines.

    this process         the launcher (``ray_launcher``)          actors (``ray_worker``)
    gate   ◄───────────────────────────────────────────────────── connect, and send their machine
    ranks are numbered by their machines, this machine first
    plans, results  ◄══════ shared memory, or TCP ══════════════► as in ``multiprocess``

Ray finds places and starts the actors.  A step is sent to the ranks as in ``multiprocess``, through shared memory on
this machine (``runtime.processes.channel``), and over TCP to other machines (``runtime.processes.wire``).
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from minivllm.core.interfaces.executor import Executor, Wiring
from minivllm.errors import ResourceError, error_from
from minivllm.registration.fresh import import_path
from minivllm.runtime.processes.channel import ChannelClosed
from minivllm.runtime.processes.child import Child, ChildEnded
from minivllm.runtime.processes.gate import Guest, ProcessGate

from .multiprocess import START, Multiprocess
from .options import RayOptions
from .ray_launcher import ALL_IN, ENDED, FAILED, FOUND, KILL, OPEN, PLACED, TARGET, sweep
from .ray_launcher import START as ASK
from .ray_rank import CHANNEL, PlacedRank

# environment variables of this process that actors receive, because Ray sets them to other values
KEPT = ("OMP_NUM_THREADS",)


class Ray(Multiprocess):
    options: RayOptions

    def __init__(self, options: RayOptions | None = None) -> None:
        super().__init__(options or RayOptions())
        self._cluster: RayCluster | None = None

    def _launch(self, wiring: Wiring, size: int) -> Iterator[Any]:
        cluster = self._cluster = RayCluster(self.options)
        assert self._page is not None
        yield from cluster.ranks(wiring.device, size, self._page)

    def _begin(self, child: Any, rank: int, settings: dict[str, Any], files: Sequence[int]) -> None:
        assert self._cluster is not None
        settings |= self._cluster.settings_of(rank)
        if child.here:
            super()._begin(child, rank, settings, files)
        else:
            child.send(START, [json.dumps(settings).encode()])

    def _name(self, rank: int) -> str:
        child: Any = self._rank(rank)
        device = self._device if self._device == "cpu" else f"{self._device}:{child.gpu}"
        return f"rank {rank} of {1 + len(self._others)} ({device} of {child.host}, process {child.pid})"

    def mask_memory(self, rows: int, words: int) -> np.ndarray:
        """Return memory for masks, which is not shared if the rank runs on another machine."""
        child: Any = self._child
        return (
            super().mask_memory(rows, words) if child is None or child.here else Executor.mask_memory(self, rows, words)
        )

    def call(self, verb: str, args: Mapping[str, Any] | None = None) -> Any:
        if verb == "weights":  # ranks on other machines cannot read the folder of an update
            raise NotImplementedError("the executor ray does not change weights")
        return super().call(verb, args)

    def _look(self) -> None:
        if self._cluster is not None and (ended := self._cluster.ended()) is not None:
            raise self._dead(ended)
        super()._look()

    def _still_starts(self, rank: int) -> None:
        assert self._cluster is not None
        if (ended := self._cluster.ended()) is not None:
            raise ResourceError(ended)
        super()._still_starts(rank)

    def alive(self) -> bool:
        return super().alive() and self._cluster is not None and self._cluster.ended() is None

    def stop(self, deadline: float = 10.0) -> None:
        super().stop(deadline / 2)
        cluster = self._cluster
        self._cluster = None
        if cluster is not None:
            cluster.end(deadline)


class RayCluster:
    """The Ray cluster with its ranks, as a separate process (``ray_launcher``) starts it and reports it."""

    def __init__(self, options: RayOptions) -> None:
        self.options = options
        self._launcher = Child(TARGET)
        self._folder = ""  # temporary folder of the cluster, if the launcher has started it
        self._node = ""  # Ray's id of the machine of this process
        self._ranks: list[PlacedRank] = []
        self._reasons: dict[int, str] = {}  # place (number of an actor) -> Ray's description of how the actor ended
        self._placed = False
        self._gate: ProcessGate | None = None

    # ---- start ---------------------------------------------------------------------------------------------------

    def ranks(self, device: str, size: int, page: Any) -> list[PlacedRank]:
        """Start all ranks and return them in order.  Raise ResourceError if they do not start."""
        secret = secrets.token_bytes(32)
        options = self.options
        given: dict[str, Any] = {
            "secret": secret.hex(),
            "transport": options.transport,
            "path": import_path(),
            "folder": os.getcwd(),
        }
        given["environment"] = {name: os.environ.get(name) for name in KEPT}
        request = {"address": options.address, "placement_timeout": options.placement_timeout}
        request |= {"size": size, "device": device, "given": given}
        self._launcher.send(ASK, [json.dumps(request).encode()])
        end = time.monotonic() + options.start_timeout
        try:
            found = self._await_message(FOUND, end)
            self._folder = found["folder"]
            self._node = found["node"]
            host = found["ip"] if options.address or options.transport == "tcp" else ""
            gate = self._gate = ProcessGate(secret, host)
            opened = {"name": gate.name, "tcp": gate.address}
            self._launcher.send(OPEN, [json.dumps(opened).encode()])
            guests = self._all_in(gate, size, end)
            self._launcher.send(ALL_IN, [b"{}"])
        finally:
            if self._gate is not None:
                self._gate.close()
        places = sorted(guests, key=self._order(guests))
        self._ranks = [PlacedRank(self, guests[place], options.timeout) for place in places]
        for rank, one in enumerate(self._ranks):
            one.show(page, rank)
        return self._ranks

    def _await_message(self, kind: int, end: float) -> dict[str, Any]:
        """Wait for the launcher's next message of this kind, and return its content."""
        while True:
            message = self._launcher.receive(wait=False)
            if message is None:
                if time.monotonic() > end:
                    raise ResourceError(f"Ray has not started within {self.options.start_timeout:.0f} s")
                self._launcher.rest(0.1)
            elif message.kind == kind:
                return json.loads(message.data)
            else:
                self._note(message.kind, json.loads(message.data))

    def _note(self, kind: int, report: dict[str, Any]) -> None:
        if kind == FAILED:
            raise error_from(**report)
        if kind == ENDED:
            self._reasons[report["place"]] = report["how"]
        if kind == PLACED:
            self._placed = True

    def _all_in(self, gate: ProcessGate, size: int, end: float) -> dict[int, dict[str, Guest]]:
        """Wait until the actors of all places have connected, and return the connections of each place by their
        role."""
        guests: dict[int, dict[str, Guest]] = {place: {} for place in range(size)}
        while missing := [place for place in range(size) if not _complete(guests[place])]:
            with contextlib.suppress(queue.Empty):
                guest = gate.guests.get(timeout=0.02)
                guests[guest.hello["place"]][guest.hello["role"]] = guest
            while (message := self._launcher.receive(wait=False)) is not None:
                self._note(message.kind, json.loads(message.data))
            ended = [place for place in missing if place in self._reasons]
            if ended:
                how = self._reasons[ended[0]] or "its actor has ended before it came"
                raise ResourceError(f"rank in place {ended[0]} of {size}: {how}")
            if time.monotonic() > end:
                places = ", ".join(map(str, missing))
                limit = self.options.start_timeout
                raise ResourceError(
                    f"{len(missing)} of {size} ranks have not come within {limit:.0f} s: places {places}; "
                    f"{gate.refused} others were refused"
                )
        return guests

    def _order(self, guests: Mapping[int, Mapping[str, Guest]]) -> Any:
        """Return the sort key for the numbers of actors: those on this machine come first, then by machine and GPU."""

        def key(place: int) -> tuple[Any, ...]:
            hello = guests[place][CHANNEL].hello
            gpus = [int(gpu) if gpu.isdigit() else gpu for gpu in hello["gpus"]]
            return hello["node"] != self._node, hello["node"], *map(str, gpus[1:]), *gpus[:1], place

        return key

    def settings_of(self, rank: int) -> dict[str, Any]:
        """Return the settings of a rank that depend on the machines of all ranks: the visible GPUs of its machine, the
        index of its own GPU among them, and whether ranks are on several machines.
        """
        mine = self._ranks[rank]
        gpus: list[str] = []
        for other in self._ranks:
            if other.node == mine.node:
                gpus += other.gpus
        device = gpus.index(mine.gpus[0]) if mine.gpus else 0
        apart = not all(one.here for one in self._ranks)
        return {"visible": ",".join(gpus), "device": device, "apart": apart}

    # ---- later ---------------------------------------------------------------------------------------------------

    def ended(self) -> str | None:
        """Return why all ranks have ended if the launcher has ended, else None."""
        try:
            while (message := self._launcher.receive(wait=False)) is not None:
                self._note(message.kind, json.loads(message.data))
            ended = self._launcher.ended()
        except ChildEnded as e:
            ended = e
        return None if ended is None else f"the process that keeps the ranks with Ray: {ended}"

    def end_of(self, place: int, seconds: float) -> str:
        """Return Ray's description of the end of an actor, "" if Ray does not report it in time."""
        end = time.monotonic() + seconds
        while place not in self._reasons and self.ended() is None and time.monotonic() < end:
            self._launcher.rest(0.05)
        reason = self._reasons.get(place, "")
        return f"Ray says: {reason}" if reason else self.ended() or ""

    def kill(self, place: int) -> None:
        """Kill an unreachable actor through Ray."""
        with contextlib.suppress(ChildEnded, ChannelClosed):
            self._launcher.send(KILL, [json.dumps(place).encode()])

    def end(self, deadline: float) -> None:
        for one in self._ranks:
            one.end(0.0)
        self._launcher.end(deadline)
        if self._folder and os.path.exists(self._folder):  # the launcher may have ended before it created the folder
            sweep(self._launcher.pid, self._folder)


def _complete(came: Mapping[str, Guest]) -> bool:
    return CHANNEL in came and (came[CHANNEL].sock.family == 1 or len(came) == 3)
