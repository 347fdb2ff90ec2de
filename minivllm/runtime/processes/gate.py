"""Where processes that this one did not start itself come in: they prove that they know a secret, and so does this one.

    comes in                                    is let in by (``Gate``)
               ◄── nonce, 32 bytes ────────────
    ── nonce, proof of both, words about itself ──►
               ◄── proof of both ──────────────

A proof is an HMAC-SHA256, so the secret itself goes over no network.  What goes over a connection afterwards is neither
encrypted nor signed: the network between machines that share a model should be nobody else's.
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

NONCE = 32  # bytes, of a proof too
SIZE = struct.Struct("<I")
MOST = 1 << 16  # bytes of what one says about itself
PATIENCE = 5.0  # seconds for a greeting
AT_ONCE = 64  # greetings that are under way
COMES, LETS_IN = b"minivllm: comes in", b"minivllm: lets in"


class Refused(ConnectionError):
    """The other side does not know the secret, is another program, or is too slow."""


class Guest(NamedTuple):
    """``said``: JSON that it told of itself."""

    said: dict[str, Any]
    sock: socket.socket


def _proof(secret: bytes, role: bytes, *what: bytes) -> bytes:
    return hmac.digest(secret, role + b"".join(SIZE.pack(len(one)) + one for one in what), "sha256")


def _exactly(sock: socket.socket, size: int, end: float) -> bytes:
    """Until ``end``, by ``time.monotonic``."""
    found = b""
    while len(found) < size:
        sock.settimeout(max(1e-3, end - time.monotonic()))
        if not (more := sock.recv(size - len(found))):
            raise Refused("the connection has ended")
        found += more
    return found


def greet(sock: socket.socket, secret: bytes, said: dict[str, Any]) -> None:
    """Come in.  Refused, if it is not the one that knows the secret."""
    words, ours = json.dumps(said).encode(), secrets.token_bytes(NONCE)
    end = time.monotonic() + PATIENCE
    try:
        theirs = _exactly(sock, NONCE, end)
        sock.sendall(ours + _proof(secret, COMES, theirs, ours, words) + SIZE.pack(len(words)) + words)
        if not hmac.compare_digest(_exactly(sock, NONCE, end), _proof(secret, LETS_IN, ours, theirs)):
            raise Refused("who answers does not know the secret")
    except OSError as e:
        raise e if isinstance(e, Refused) else Refused(str(e)) from e
    sock.settimeout(None)


def admit(sock: socket.socket, secret: bytes) -> dict[str, Any]:
    """Let one in, and hear what it says of itself.  Refused."""
    ours, end = secrets.token_bytes(NONCE), time.monotonic() + PATIENCE
    sock.settimeout(PATIENCE)
    try:
        sock.sendall(ours)
        theirs, proof = _exactly(sock, NONCE, end), _exactly(sock, NONCE, end)
        (size,) = SIZE.unpack(_exactly(sock, SIZE.size, end))
        words = _exactly(sock, size, end) if size <= MOST else b""
        if not hmac.compare_digest(proof, _proof(secret, COMES, ours, theirs, words)):
            raise Refused("it does not know the secret")
        sock.sendall(_proof(secret, LETS_IN, theirs, ours))
    except OSError as e:
        raise e if isinstance(e, Refused) else Refused(str(e)) from e
    sock.settimeout(None)
    return json.loads(words)


class Gate:
    """Listens until it is closed; each greeting has a thread of its own, so that one who is silent keeps nobody out."""

    def __init__(self, secret: bytes, host: str = "") -> None:
        """``host``: the address at which other machines may come; "": this machine only.  OSError."""
        self._secret = secret
        self.name = f"minivllm-{secrets.token_hex(8)}"  # of no file: it is gone with this process
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
        self._selector.register(sock, selectors.EVENT_READ)
        sock.bind(address)
        sock.listen(AT_ONCE)
        return sock

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fd == self._closes:
                    return
                with contextlib.suppress(OSError):  # who came has gone
                    sock, _ = key.fileobj.accept()  # type: ignore[union-attr]
                    if self._greetings.acquire(blocking=False):
                        threading.Thread(target=self._greet, args=(sock,), daemon=True).start()
                    else:
                        sock.close()

    def _greet(self, sock: socket.socket) -> None:
        try:
            self.guests.put(Guest(admit(sock, self._secret), sock))
        except (Refused, ValueError):
            self.refused += 1
            sock.close()
        finally:
            self._greetings.release()

    def close(self) -> None:
        """Idempotent; guests that nobody has taken are sent away."""
        if self._closed < 0:
            return
        os.close(self._closed)
        self._closed = -1
        self._thread.join()
        self._end()
        while not self.guests.empty():
            self.guests.get().sock.close()

    def _end(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        os.close(self._closes)
