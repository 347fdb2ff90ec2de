"""Faults that ``soak.py --faults`` causes, by requests whose plug-ins fail and by faulty clients.

The package has parts that fail if a request says so (``minivllm.testing.faulty``), and ``SETS`` configures them.  A
fault may affect only its own request, and every other request must be answered as usual.

For a failing request a plug-in raises or returns an invalid value, and the request ends with an error.

A faulty client connects and does one of ``WIRE``.  The server closes the connection or answers with an error, within
its time limits.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable

KEY = "soak"  # the server's key, which /debug/state needs
PARTS = "minivllm.testing.faulty"
SETS = (
    f'allow_targets=["{PARTS}"]',
    f'processors=["penalties","logit_bias","allowed_tokens","bad_words","{PARTS}:Faulty"]',
    f"sampler={PARTS}:FaultySampler",
)
# Options of a request for a plug-in, and the status with which it ends.  ``bind`` is called when a request arrives.
FAILING: tuple[tuple[dict, int], ...] = (
    ({"fault": "bind"}, 400),
    ({"fault": "apply"}, 500),
    ({"fault": "commit"}, 500),
    ({"token": 10**9}, 500),
    ({"token": -1}, 500),
)
WAIT = 30.0  # seconds, longer than each time limit of the server


def failing_body(rng: random.Random) -> tuple[dict, int]:
    """Return a request that cannot be answered, and the status of its error."""
    extra, status = rng.choice(FAILING)
    body = {"prompt": "Once upon", "max_tokens": 8, "ignore_eos": True, "vllm_xargs": extra}
    return {**body, "n": rng.choice([1, 1, 3])}, status


Link = tuple[asyncio.StreamReader, asyncio.StreamWriter]
HEAD = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nX-API-Key: {KEY}\r\n"


async def half_a_head(link: Link, rng: random.Random) -> None:
    link[1].write(HEAD[: rng.randint(1, len(HEAD) - 1)].encode())
    await asyncio.sleep(rng.uniform(0, 2))


async def half_a_body(link: Link, rng: random.Random) -> None:
    data = json.dumps({"prompt": "Once", "max_tokens": 4}).encode()
    link[1].write(f"{HEAD}Content-Length: {len(data)}\r\n\r\n".encode() + data[: rng.randint(0, len(data) - 1)])
    await asyncio.sleep(rng.uniform(0, 2))


async def garbage(link: Link, rng: random.Random) -> None:
    link[1].write(rng.randbytes(rng.randint(1, 3000)) + b"\r\n\r\n")
    await asyncio.wait_for(link[0].read(), WAIT)


async def no_json(link: Link, rng: random.Random) -> None:
    data = rng.choice([b"{", b"[" * 5000, b'{"prompt": "\\ud800"}', b"null", b'{"prompt": ' + b"9" * 6000 + b"}"])
    link[1].write(f"{HEAD}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    answer = await asyncio.wait_for(link[0].read(), WAIT)
    if not answer.startswith(b"HTTP/1.1 4"):
        raise ValueError(f"{data[:40]!r} was answered with {answer[:200]!r}")


async def reads_nothing(link: Link, rng: random.Random) -> None:
    """Request a stream and do not read it for some time."""
    data = json.dumps({"prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": True, "n": 4}).encode()
    link[1].write(f"{HEAD}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    await asyncio.sleep(rng.uniform(1, 5))


async def says_nothing(link: Link, rng: random.Random) -> None:
    await asyncio.sleep(rng.uniform(0, 8))


WIRE: tuple[Callable[[Link, random.Random], Awaitable[None]], ...] = (
    half_a_head, half_a_body, garbage, no_json, reads_nothing, says_nothing,
)  # fmt: skip


async def misbehave(address: tuple[str, int], rng: random.Random) -> None:
    """Behave as one faulty client of ``WIRE``, which leaves without a message.  ValueError for an unexpected answer."""
    link = await asyncio.open_connection(*address)
    try:
        await rng.choice(WIRE)(link, rng)
    except ConnectionError:
        pass  # the server has closed the connection first
    finally:
        link[1].transport.abort()
