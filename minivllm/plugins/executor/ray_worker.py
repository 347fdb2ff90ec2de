"""A rank in an actor of Ray, which connects to the engine's gate and then runs as a rank of ``multiprocess``.

On the engine's machine its channel is shared memory, as for a process that the engine starts.  On another machine it
makes three connections, for its channel, its standard error and its state (``status``).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import struct
import sys
import threading
import time
import traceback
from typing import Any

from minivllm.runtime.processes.channel import Channel, ChannelClosed, shared_file
from minivllm.runtime.processes.child import follow
from minivllm.runtime.processes.gate import Refused, greet
from minivllm.runtime.processes.status import StatusPage
from minivllm.runtime.processes.wire import Wire, watch_peer

from .multiprocess import MEETING
from .multiprocess_worker import Rank
from .ray_rank import CHANNEL, STATE, WORDS

COMES = 10.0  # seconds in which the engine must be reached
SAYS = 0.25  # seconds between two checks of the rank's progress
LEAVES = 0.5  # after the end of the engine or its node, the rank ends within this many seconds
SIOCGIFADDR = 0x8915


def main(given: dict[str, Any]) -> str:
    """Run a rank until the engine ends, then end this process.  Return the reason if the rank cannot run."""
    try:
        channel, state = come_in(given)
    except (OSError, Refused) as e:
        return f"it cannot reach the engine at {given['tcp'] or 'its own machine'}: {e}"
    code = 1
    try:
        follow(channel.socket, *([] if state is None else [state]), patience=LEAVES)
        with contextlib.suppress(ChannelClosed):  # the engine has ended
            RayRank(channel, given, state).serve()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(ChannelClosed):
            channel.close()
        sys.stderr.flush()
        os._exit(code)  # ends the process immediately and frees its memory, independent of Ray


def come_in(given: dict[str, Any]) -> tuple[Channel, socket.socket | None]:
    """Connect to the engine, and return the channel and, for another machine, the connection for states.

    Standard error is redirected to the engine.
    """
    if given["node"] == given["engine_node"] and given["transport"] == "auto":
        sock = _reach(given, CHANNEL, "\0" + given["name"])
        _, files, _, _ = socket.recv_fds(sock, 1, 2)
        memory, words = files
        channel = Channel(sock, memory, started=True)
        state = None
        os.close(memory)
    else:
        channel = Wire(_reach(given, CHANNEL, tuple(given["tcp"])))
        words = _reach(given, WORDS, tuple(given["tcp"])).detach()
        state = _reach(given, STATE, tuple(given["tcp"]))
    os.dup2(words, 2)
    os.close(words)
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    return channel, state


def _reach(given: dict[str, Any], role: str, address: Any) -> socket.socket:
    if isinstance(address, tuple):
        sock = socket.create_connection(address, COMES)
        watch_peer(sock)
    else:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(address)
    hello = {name: given[name] for name in ("place", "node", "ip", "gpus")}
    try:
        greet(
            sock,
            bytes.fromhex(given["secret"]),
            {**hello, "role": role, "pid": os.getpid(), "host": socket.gethostname()},
        )
    except BaseException:
        sock.close()
        raise
    return sock


class RayRank(Rank):
    """A rank in an actor.

    ``settings`` also has ``visible``, the GPUs of this machine that ranks use, and ``apart``, whether a rank is on
    another machine.
    """

    def __init__(self, channel: Channel, given: dict[str, Any], state: socket.socket | None) -> None:
        self._state = state
        self._ip = given["ip"]
        self._stores: list[Any] = []  # objects that must exist until the rank ends
        super().__init__(channel)
        if state is not None:
            threading.Thread(target=self._send_status, args=(state,), daemon=True).start()
        if self.settings["visible"]:
            os.environ["CUDA_VISIBLE_DEVICES"] = self.settings["visible"]

    def _files(self) -> tuple[int, int]:
        if self._state is None:
            return super()._files()
        return shared_file(StatusPage.room(self.size)), -1

    def _send_status(self, sock: socket.socket) -> None:
        last = b""
        with contextlib.suppress(OSError, ValueError):  # the engine has ended, or the page is closed
            while True:
                now = self.page.line(self.rank)
                if now != last:
                    sock.sendall(now)
                last = now
                time.sleep(SAYS)

    def _interface(self) -> str:
        return interface_of(self._ip) if self.settings["apart"] else super()._interface()

    def _meeting(self) -> Any:
        """Return the store by which ranks on several machines connect.

        Rank 0 listens, and only ranks receive its address and the random prefix of keys.
        """
        if not self.settings["apart"]:
            return super()._meeting()
        from datetime import timedelta

        import torch.distributed as dist

        limit = timedelta(seconds=self.settings["timeout"])
        if self.rank == 0:
            family = socket.AF_INET6 if ":" in self._ip else socket.AF_INET
            listens = socket.socket(family)
            listens.bind((self._ip, 0))
            listens.listen(2 * self.size)
            where = {"port": listens.getsockname()[1], "name": secrets.token_hex(16), "ip": self._ip}
            store = dist.TCPStore(
                where["ip"],
                where["port"],
                timeout=limit,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listens.detach(),
            )
            self.channel.send(MEETING, [json.dumps(where).encode()])
        else:
            message = self.channel.receive(wait=True)
            assert message is not None and message.kind == MEETING
            where = json.loads(message.data)
            store = dist.TCPStore(where["ip"], where["port"], is_master=False, timeout=limit, wait_for_workers=False)
        self._stores.append(store)
        return dist.PrefixStore(where["name"], store)


def interface_of(ip: str) -> str:
    """Return the name of the network interface with an IPv4 address, "" if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # the interface has no such address
                if socket.inet_ntoa(fcntl.ioctl(sock.fileno(), SIOCGIFADDR, request)[20:24]) == ip:
                    return name
    return ""
