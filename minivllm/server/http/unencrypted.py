"""Answer plain HTTP requests to an HTTPS port with an error in plain HTTP.

Otherwise the TLS handshake would fail, and most clients do not report the reason.
"""

from __future__ import annotations

import asyncio
import socket

from .connection import response

LINGER = 2.0  # seconds for the client to read the answer and to close the connection
WANTED = "this port serves HTTPS: expected a URL that begins with https:// (wss:// for a WebSocket)"


async def speaks_http(link: socket.socket) -> bool:
    """Wait for the first byte and return whether it is a letter, as in an HTTP method.  A TLS handshake begins with
    another byte.

    The byte is not removed from the socket.  Raise OSError if the connection breaks.
    """
    loop = asyncio.get_running_loop()
    come = asyncio.Event()
    loop.add_reader(link.fileno(), come.set)
    try:
        await come.wait()
    finally:
        loop.remove_reader(link.fileno())
    return link.recv(1, socket.MSG_PEEK).isalpha()


async def refuse(link: socket.socket) -> None:
    """Answer 400 and read until the client closes the connection.

    If data were left unread, the kernel would reset the connection and the client would lose the answer.
    """
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(link, response(400, WANTED))
    link.shutdown(socket.SHUT_WR)
    while await loop.sock_recv(link, 65536):
        pass
