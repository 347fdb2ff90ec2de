"""What goes wrong on purpose while ``soak.py --faults`` runs: requests whose plug-ins fail, and clients that misbehave.

Parts that fail when a request says so come with the package (``minivllm.testing.faulty``); ``SETS`` wires them.  A
fault may touch its own request only: every other request of the load has to be answered as ever.

Order of a request that fails: a plug-in raises or returns what cannot be, the request ends with an error.

Order of a client that misbehaves: it connects, does one of ``WIRE``, and the server closes the connection, or answers
with an error; within its time limits either way.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable

KEY = "soak"  # the server's key: /debug/state wants one
PARTS = "minivllm.testing.faulty"
SETS = (
    f'allow_targets=["{PARTS}"]',
    f'processors=["penalties","logit_bias","allowed_tokens","bad_words","{PARTS}:Faulty"]',
    f"sampler={PARTS}:FaultySampler",
)
# What a request brings for a plug-in, and the status that it ends with.  ``bind`` is asked when a request is taken.
FAILING: tuple[tuple[dict, int], ...] = (
    ({"fault": "bind"}, 400),
    ({"fault": "apply"}, 500),
    ({"fault": "commit"}, 500),
    ({"token": 10**9}, 500),
    ({"token": -1}, 500),
)
WAIT = 30.0  # seconds, longer than each limit of the server's


def failing_body(rng: random.Random) -> tuple[dict, int]:
    """A request that cannot be answered, and the status of its error."""
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
    """A stream that is asked for and not read for some time."""
    data = json.dumps({"prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": True, "n": 4}).encode()
    link[1].write(f"{HEAD}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    await asyncio.sleep(rng.uniform(1, 5))


async def says_nothing(link: Link, rng: random.Random) -> None:
    await asyncio.sleep(rng.uniform(0, 8))


WIRE: tuple[Callable[[Link, random.Random], Awaitable[None]], ...] = (
    half_a_head, half_a_body, garbage, no_json, reads_nothing, says_nothing,
)  # fmt: skip


async def misbehave(address: tuple[str, int], rng: random.Random) -> None:
    """One client of ``WIRE``, which leaves without a word.  Raises ValueError for an answer that should not be."""
    link = await asyncio.open_connection(*address)
    try:
        await rng.choice(WIRE)(link, rng)
    except ConnectionError:
        pass  # the server had enough of it first
    finally:
        link[1].transport.abort()
