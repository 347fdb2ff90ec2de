"""Who speaks HTTP to a port of HTTPS is told so, in HTTP: of a handshake that fails clients say nothing of use."""

from __future__ import annotations

import asyncio
import socket

from .connection import response

LINGER = 2.0  # seconds for such a client to take its answer and to leave
WANTED = "this port speaks HTTPS: want a URL that begins with https:// (wss:// for a WebSocket)"


async def speaks_http(link: socket.socket) -> bool:
    """Whether the first byte that comes is a letter, as that of a method: TLS begins with another.  It stays to be
    read.  OSError if the connection breaks."""
    loop = asyncio.get_running_loop()
    come = asyncio.Event()
    loop.add_reader(link.fileno(), come.set)
    try:
        await come.wait()
    finally:
        loop.remove_reader(link.fileno())
    return link.recv(1, socket.MSG_PEEK).isalpha()


async def refuse(link: socket.socket) -> None:
    """Answer 400 and read on until the client closes, since what is left unread would take the answer with it."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(link, response(400, WANTED))
    link.shutdown(socket.SHUT_WR)
    while await loop.sock_recv(link, 65536):
        pass
