"""Connections from processes that this one did not start: both sides prove that they know a shared secret.

    client (``greet``)                          server (``ProcessGate``, ``admit``)
               ◄── nonce, 32 bytes ────────────
    ── nonce, proof, JSON about the client ────►
               ◄── proof ──────────────────────

A proof is an HMAC-SHA256 of both nonces, so the secret itself is never sent.  Later data on the connection is neither
encrypted nor signed, so the machines that share a model need a private network.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import queue
import secrets
import selectors
import socket
import struct
import threading
import time
from typing import Any, NamedTuple

NONCE = 32  # size in bytes of a nonce and of a proof
SIZE = struct.Struct("<I")
MOST = 1 << 16  # largest size in bytes of the client's JSON
PATIENCE = 5.0  # longest time in seconds of a greeting
AT_ONCE = 64  # largest number of concurrent greetings
COMES, LETS_IN = b"minivllm: comes in", b"minivllm: lets in"


class Refused(ConnectionError):
    """Error about a peer that lacks the secret, is another program, or is too slow."""


class Guest(NamedTuple):
    """A client that has proved that it has the secret: the JSON that it sent, and its connection."""

    hello: dict[str, Any]
    sock: socket.socket


def _proof(secret: bytes, role: bytes, *parts: bytes) -> bytes:
    """Return the proof of a role for some data."""
    data = b"".join(SIZE.pack(len(part)) + part for part in parts)
    return hmac.digest(secret, role + data, "sha256")


def _exactly(sock: socket.socket, size: int, end: float) -> bytes:
    """Return ``size`` bytes received from the socket until the time ``end`` (``time.monotonic``).  Raise Refused if the
    connection ends."""
    found = b""
    while len(found) < size:
        sock.settimeout(max(1e-3, end - time.monotonic()))
        more = sock.recv(size - len(found))
        if not more:
            raise Refused("the connection has ended")
        found += more
    return found


def greet(sock: socket.socket, secret: bytes, hello: dict[str, Any]) -> None:
    """Prove the secret to a ``ProcessGate`` and send it the JSON ``hello``.

    Refused if the server has another secret, is another program, or does not answer within ``PATIENCE`` seconds."""
    words = json.dumps(hello).encode()
    ours = secrets.token_bytes(NONCE)
    end = time.monotonic() + PATIENCE
    try:
        theirs = _exactly(sock, NONCE, end)
        sock.sendall(ours + _proof(secret, COMES, theirs, ours, words) + SIZE.pack(len(words)) + words)
        if not hmac.compare_digest(_exactly(sock, NONCE, end), _proof(secret, LETS_IN, ours, theirs)):
            raise Refused("the server has another secret")
    except OSError as e:
        raise e if isinstance(e, Refused) else Refused(str(e)) from e
    sock.settimeout(None)


def admit(sock: socket.socket, secret: bytes) -> dict[str, Any]:
    """Answer a client's greeting and return its JSON.  Refused if the client has another secret."""
    ours = secrets.token_bytes(NONCE)
    end = time.monotonic() + PATIENCE
    sock.settimeout(PATIENCE)
    try:
        sock.sendall(ours)
        theirs, proof = _exactly(sock, NONCE, end), _exactly(sock, NONCE, end)
        (size,) = SIZE.unpack(_exactly(sock, SIZE.size, end))
        words = _exactly(sock, size, end) if size <= MOST else b""
        if not hmac.compare_digest(proof, _proof(secret, COMES, ours, theirs, words)):
            raise Refused("the client has another secret")
        sock.sendall(_proof(secret, LETS_IN, theirs, ours))
    except OSError as e:
        raise e if isinstance(e, Refused) else Refused(str(e)) from e
    sock.settimeout(None)
    return json.loads(words)


class ProcessGate:
    """A server that accepts clients until it is closed.

    Each greeting has a separate thread, so a silent client does not delay other clients.
    """

    def __init__(self, secret: bytes, host: str = "") -> None:
        """Listen on this machine, and at the address ``host`` for other machines unless it is "".  OSError."""
        self._secret = secret
        self.name = f"minivllm-{secrets.token_hex(8)}"  # an abstract socket, which ends with this process
        self.address: tuple[str, int] | None = None
        self.guests: queue.SimpleQueue[Guest] = queue.SimpleQueue()
        self.refused = 0
        self._greetings = threading.Semaphore(AT_ONCE)
        self._selector = selectors.DefaultSelector()
        self._closes, self._closed = os.pipe()
        self._selector.register(self._closes, selectors.EVENT_READ)
        try:
            self._listen(socket.socket(socket.AF_UNIX), "\0" + self.name)
            if host:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                sock = self._listen(socket.socket(family), (host, 0))
                self.address = sock.getsockname()[:2]
        except BaseException:
            os.close(self._closed)
            self._end()
            raise
        self._thread = threading.Thread(target=self._run, name="minivllm: the gate for ranks", daemon=True)
        self._thread.start()

    def _listen(self, sock: socket.socket, address: Any) -> socket.socket:
        """Listen on a socket at an address, and return the socket."""
        self._selector.register(sock, selectors.EVENT_READ)
        sock.bind(address)
        sock.listen(AT_ONCE)
        return sock

    def _run(self) -> None:
        """Accept connections until the gate is closed.  Each is greeted on a thread; beyond the limit of greetings it
        is closed."""
        while True:
            for key, _ in self._selector.select():
                if key.fd == self._closes:
                    return
                with contextlib.suppress(OSError):  # the client has left already
                    sock, _ = key.fileobj.accept()  # type: ignore[union-attr]
                    if self._greetings.acquire(blocking=False):
                        threading.Thread(target=self._greet, args=(sock,), daemon=True).start()
                    else:
                        sock.close()

    def _greet(self, sock: socket.socket) -> None:
        """Add the client of a connection to the guests, or count it as refused."""
        try:
            self.guests.put(Guest(admit(sock, self._secret), sock))
        except (Refused, ValueError):
            self.refused += 1
            sock.close()
        finally:
            self._greetings.release()

    def close(self) -> None:
        """Stop listening and close the connections of guests in the queue.  Further calls do nothing."""
        if self._closed < 0:
            return
        os.close(self._closed)
        self._closed = -1
        self._thread.join()
        self._end()
        while not self.guests.empty():
            self.guests.get().sock.close()

    def _end(self) -> None:
        """Close all listening sockets."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        os.close(self._closes)
