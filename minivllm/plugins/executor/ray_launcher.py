"""The process that uses Ray's client.  It starts or joins a cluster, requests places, and starts a rank in each.

    engine (``ray_executor``)          this process                         actors of the cluster (``ray_worker``)
    START: the requirements ─────────► ray.init; does the cluster have room?
      ◄──────────────────────── FOUND: the node
    OPEN: address of the gate ───────► placement group, actors ───────────► connect to the engine's gate
      ◄──────────────────────── ENDED: an actor with Ray's description, or that its node does not answer
    ALL_IN ──────────────────────────► stop checking nodes, because the engine now watches the ranks
    closes ──────────────────────────► end actors, group, and a cluster that was started here

Ray's client ends its process when the cluster ends, and installs signal handlers, so it has a process of its own.  No
data of steps passes through it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import resource
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from minivllm.errors import MinivllmError, ResourceError, describe_error
from minivllm.runtime.processes.channel import Channel, ChannelClosed
from minivllm.runtime.processes.child import attach, ignore_signals
from minivllm.runtime.processes.wire import GONE

from .options import ADDRESS

START, FOUND, OPEN, PLACED, FAILED, ENDED, KILL, ALL_IN = range(1, 9)  # kinds of messages, in JSON
TARGET = "minivllm.plugins.executor.ray_launcher:main"
LOOK = 0.1  # seconds between checks of the actors
PROBE = 2.0  # seconds in which a node must answer
ANSWERS = 3.0  # seconds in which the cluster at a given address must answer
OBJECTS = 80 << 20  # bytes of Ray's object store, which is not used, so this is the smallest possible size
FILES = 1024  # limit of open files, enough for Ray's processes
# prefix of the folders of clusters that are started here; short, because names of sockets are limited
TEMPORARY = "minivllm-ray-"


def main(sock: str, memory: str) -> None:
    """Run the launcher; ``sock`` and ``memory`` are file descriptors of the channel."""
    # a session of its own: Ctrl-C is handled by the engine, and the cluster's processes can be found by their session
    os.setsid()
    launcher = Launcher()
    channel = attach(sock, memory, last=launcher.sweep)
    try:
        with contextlib.suppress(ChannelClosed):
            launcher.run(channel)
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        with contextlib.suppress(ChannelClosed):
            channel.close()
        launcher.end()


class RankPlace:
    """The class of the actor.  It is sent as bytes, and imports no module before it receives the import path."""

    def serve(self, given: dict[str, Any]) -> str:
        """Run a rank until the engine ends, and return the reason if it cannot run."""
        import importlib
        import os
        import sys

        import ray

        context = ray.get_runtime_context()
        given["node"], given["gpus"] = context.get_node_id(), context.get_accelerator_ids().get("GPU", [])
        given["ip"] = ray.util.get_node_ip_address()
        if given["node"] == given["engine_node"]:  # a rank on the engine's machine uses the engine's files
            sys.path[:] = [*given["path"], *(one for one in sys.path if one not in given["path"])]
            os.chdir(given["folder"])
        for name, value in given["environment"].items():  # as in the engine, because Ray sets missing variables
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        try:
            worker = importlib.import_module("minivllm.plugins.executor.ray_worker")
        except ImportError as e:
            return f"minivllm cannot be imported there ({e}): install the same version on all nodes"
        return worker.main(given)


class NodeProbe(threading.Thread):
    """A thread that checks whether nodes answer connections, because Ray needs a minute to notice a lost node."""

    def __init__(self, nodes: Mapping[int, tuple[str, int]]) -> None:
        """Store the address and the port of each place's node."""
        super().__init__(name="minivllm: asks the nodes", daemon=True)
        self.nodes = nodes
        self.asks = True
        self.lost: dict[int, str] = {}  # place of a rank -> reason why its node counts as lost

    def run(self) -> None:
        answered = dict.fromkeys(self.nodes.values(), time.monotonic())
        while self.asks:
            for address, since in answered.items():
                try:
                    socket.create_connection(address, PROBE).close()
                    answered[address] = time.monotonic()
                except OSError as e:
                    if time.monotonic() - since > GONE:
                        reason = f"its node at {address[0]} has not answered for {GONE} s: {e}"
                        self.lost |= {place: reason for place, node in self.nodes.items() if node == address}
            time.sleep(PROBE / 2)


class Launcher:
    """Starts or joins a Ray cluster and starts the ranks.  ``settings`` has size, device, address, placement_timeout,
    and the settings of actors."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.folder = ""  # temporary folder of the cluster, if this process has started it
        self.ray: Any = None
        self.group: Any = None
        self.actors: list[Any] = []
        self.probe = NodeProbe({})

    def run(self, channel: Channel) -> None:
        first = channel.receive(wait=True)
        assert first is not None
        self.settings = json.loads(first.data)
        try:
            self._connect()
            node = self.ray.get_runtime_context().get_node_id()
            ip = self.ray.util.get_node_ip_address()
            _send(channel, FOUND, node=node, ip=ip, folder=self.folder)
            self._check_room()
            second = channel.receive(wait=True)
            assert second is not None
            running = self._place(json.loads(second.data), node, channel)
        except MinivllmError as e:
            _send(channel, FAILED, name=type(e).__name__, message=str(e))
            return
        _send(channel, PLACED)
        self._watch(running, channel)

    # ---- the cluster ---------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        address = self.settings["address"]
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        more: dict[str, Any] = {"address": address}
        if not address:
            self.folder = tempfile.mkdtemp(prefix=TEMPORARY)
            more = {"address": "local", "num_cpus": self.settings["size"], "include_dashboard": False}
            more |= {"object_store_memory": OBJECTS, "_temp_dir": self.folder}
            more |= {"num_gpus": 0} if self.settings["device"] == "cpu" else {}
            os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # otherwise Ray warns of a future change
            # the head of the cluster is never restarted
            os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "5")
            if "RAY_AUTH_MODE" not in os.environ:
                # a random token for this cluster alone, or Ray would leave one in the user's home
                os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        else:
            check_address(address)
        with contextlib.redirect_stdout(sys.stderr):
            import ray

            self.ray = ray
            try:
                ray.init(**more, log_to_driver=False, logging_level=logging.ERROR, configure_logging=True)
            except Exception as e:  # the library raises errors of many types
                raise ResourceError(refused(address, e)) from e
        ignore_signals()  # again, because Ray's client has installed its own handlers
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - it tells of ends, as the engine does itself

    def _check_room(self) -> None:
        nodes = [(node["NodeManagerHostname"], node["Resources"]) for node in self.ray.nodes() if node["Alive"]]
        if reason := lacks(nodes, self.settings["size"], rank_resources(self.settings["device"])):
            raise ResourceError(reason)

    def _place(self, opened: Mapping[str, Any], node: str, channel: Channel) -> dict[Any, int]:
        """Start a rank in each place.  Return, for each of Ray's references to the end of a rank, the number of its
        place."""
        ray = self.ray
        size = self.settings["size"]
        want = rank_resources(self.settings["device"])
        util = ray.util
        self.group = util.placement_group([want] * size, strategy="PACK")
        end = time.monotonic() + self.settings["placement_timeout"]
        while not self.group.wait(LOOK):
            if time.monotonic() > end:
                free = shown_resources(ray.available_resources())
                raise ResourceError(
                    f"no free places within {self.settings['placement_timeout']:.0f} s: {size} are needed, each with "
                    f"{shown_resources(want)}, and of the Ray cluster {free} are free; stop what runs there, or raise "
                    "placement_timeout"
                )
            channel.rest(0.0)
            channel.receive(wait=False)
        where = util.placement_group_table(self.group)["bundles_to_node_id"]
        at = {one["NodeID"]: (one["NodeManagerAddress"], one["NodeManagerPort"]) for one in ray.nodes()}
        self.probe = NodeProbe({place: at[name] for place, name in where.items() if name != node})
        self.probe.start()
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        kind = ray.remote(RankPlace)
        given = {**self.settings["given"], **opened, "engine_node": node}
        running = {}
        for place in range(size):
            strategy = util.scheduling_strategies.PlacementGroupSchedulingStrategy(self.group, place)
            resources = {"num_cpus": want["CPU"], "num_gpus": want.get("GPU", 0), "max_restarts": 0}
            actor = kind.options(scheduling_strategy=strategy, max_task_retries=0, **resources).remote()
            self.actors.append(actor)
            running[actor.serve.remote({**given, "place": place})] = place
        return running

    def _watch(self, running: dict[Any, int], channel: Channel) -> None:
        while True:
            done, _ = self.ray.wait(list(running), timeout=0) if running else ([], [])
            for one in done:
                try:
                    how = self.ray.get(one)
                except Exception as e:  # the library raises errors of many types
                    how = reason_of_end(e)
                _send(channel, ENDED, place=running.pop(one), how=how)
            for place in [place for place in self.probe.lost if place in running.values()]:
                running = {one: its for one, its in running.items() if its != place}
                _send(channel, ENDED, place=place, how=self.probe.lost[place])
            channel.rest(LOOK)
            message = channel.receive(wait=False)
            if message is not None and message.kind == KILL:
                self.ray.kill(self.actors[json.loads(message.data)])
            elif message is not None and message.kind == ALL_IN:
                self.probe.asks = False

    # ---- the end -------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """End the actors, free their places, and stop the launcher's own cluster."""
        if self.ray is not None:
            with contextlib.suppress(Exception):  # the cluster may have ended
                for actor in self.actors if not self.folder else ():
                    self.ray.kill(actor)
                if self.group is not None and not self.folder:
                    self.ray.util.remove_placement_group(self.group)
            with contextlib.suppress(Exception):
                self.ray.shutdown()
        self.sweep()

    def sweep(self) -> None:
        """Kill the remaining processes of a cluster that the launcher has started."""
        if self.folder:
            sweep(os.getpid(), self.folder)


def _send(channel: Channel, kind: int, **words: Any) -> None:
    channel.send(kind, [json.dumps(words).encode()])


def sweep(session: int, folder: str) -> None:
    """End all other processes of a launcher's session, and remove the folder of its cluster."""
    for pid in of_session(session):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def of_session(session: int) -> Iterable[int]:
    """Yield the ids of other processes in a session."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # the process has just ended
            pid = int(stat.parent.name)
            if int(stat.read_text().rpartition(") ")[2].split()[3]) == session and pid != session:
                yield pid


# ---- words -----------------------------------------------------------------------------------------------------------


def rank_resources(device: str) -> dict[str, float]:
    """Return the resources of Ray that a rank needs on this kind of device."""
    return {"CPU": 1} if device == "cpu" else {"CPU": 1, "GPU": 1}


def shown_resources(found: Mapping[str, float]) -> str:
    shown = [f"{found[name]:g} {name}" for name in ("GPU", "CPU") if name in found]
    return " and ".join(shown) or "none"


def lacks(nodes: Sequence[tuple[str, Mapping[str, float]]], size: int, want: Mapping[str, float]) -> str:
    """Describe why a cluster of such nodes could never hold so many places, "" if it could."""
    places = [int(min(have.get(what, 0) // n for what, n in want.items())) for _, have in nodes]
    if sum(places) >= size:
        return ""
    have = "; ".join(
        f"{name} has {shown_resources({what: have.get(what, 0) for what in want})}, so {n}"
        for (name, have), n in zip(nodes, places, strict=True)
    )
    return (
        f"tensor_parallel_size={size}: {size} places are needed, each with {shown_resources(want)}, and the Ray "
        f"cluster has {sum(places)}: {have or 'no node that is alive'}; add nodes, or use at most "
        f"tensor_parallel_size={max(1, sum(places))}"
    )


def check_address(address: str) -> None:
    """Raise ResourceError if nothing listens at host:port, since Ray itself would try for minutes."""
    found = re.fullmatch(ADDRESS, address)
    if address == "auto":
        return
    if found is None:
        raise ResourceError(f"address={address}: expected host:port of a Ray cluster, or auto")
    try:
        socket.create_connection((found[1] or found[2], int(found[3])), ANSWERS).close()
    except (OSError, OverflowError) as e:
        raise ResourceError(f"{no_cluster(address)}: {e}") from e


def no_cluster(address: str) -> str:
    return (
        f"address={address}: no Ray cluster answers there (`ray start --head` starts one; without address one is "
        "started with the engine)"
    )


def refused(address: str, e: Exception) -> str:
    if address and isinstance(e, ConnectionError):
        return f"{no_cluster(address)}: {describe_error(e)}"
    what = f"join the cluster at {address}" if address else "start a cluster here"
    few = ""
    if not address and 0 <= (limit := resource.getrlimit(resource.RLIMIT_NOFILE)[0]) < FILES:
        few = f"  Ray needs some {FILES} open files, and there may be {limit}: ulimit -n raises that."
    return f"Ray cannot {what}: {type(e).__name__}: {' '.join(str(e).split())[:400]}{few}"


def reason_of_end(e: Exception) -> str:
    """Return Ray's description of an actor's end, without Ray's advice."""
    text = " ".join(str(e).split())
    for mark in ("Worker exit detail: ", "worker exit detail: ", "The actor is dead because ", "has died"):
        if mark in text:
            text = text[text.index(mark) + len(mark) * (mark != "has died") :]
            break
    reason = text.split(". ")[0].strip(" .")[:300]
    # Ray has no description of some ends, such as an end by a signal
    return "" if reason.startswith("Worker unexpectedly exits") else reason
