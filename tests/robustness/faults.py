"""A table of faults in an engine's process with their expected results, and the code that runs one line of it.

After each line the engine must be at rest and answer a golden request bit for bit, or it must be dead, have reported
the reason to all streams, and have ended with status 7.  In both cases no stream, process or descriptor may be left.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from minivllm import EngineDeadError, RequestError, SamplingParams
from minivllm.frontend.front_door import load
from minivllm.server.link.process_client import ProcessClient
from minivllm.testing.faulty import TARGETS

from .faulty_parts import VARIABLE

HERE = f"{__package__}.faulty_parts"
OPTIONS: dict[str, Any] = dict(
    model="pocket",
    max_num_seqs=16,
    num_kvcache_blocks=400,
    dtype="float32",
    batch_invariant=True,
    max_model_len=1024,
    allow_targets=[HERE, TARGETS],
)
GOLDEN = SamplingParams(temperature=0, max_tokens=32, logprobs=1, ignore_eos=True)


@dataclass(frozen=True)
class Fault:
    """A fault, which ``check(client, load)`` causes.

    ``load`` has the outcomes of the streams so far (see ``Load``).  If ``dies`` is not empty, the engine is dead
    afterwards and its message contains this text.
    """

    id: str
    what: str
    check: Callable[[ProcessClient, Load], Awaitable[None]]
    options: dict[str, Any] = field(default_factory=dict)
    fault: str = ""  # of ``faulty_parts``
    dies: str = ""
    stuck_after: float = 120.0
    slow: bool = False


class Load:
    """Streams that run during the fault.  ``ends`` counts their ends: a finish reason, "dead" or "refused"."""

    def __init__(self, client: ProcessClient) -> None:
        self.client, self.ends = client, Counter[str]()
        self.errors: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    def start(self, count: int, tokens: int = 24, **params: Any) -> None:
        for _ in range(count):
            number = len(self.tasks)
            made = SamplingParams(max_tokens=tokens, seed=number, ignore_eos=True, **params)
            self.tasks.append(asyncio.create_task(self._one(number, made)))

    async def _one(self, number: int, params: SamplingParams) -> None:
        try:
            stream = await self.client.stream(range(number % 50 + 1, number % 50 + 9), params, f"load{number}")
            last = [piece async for piece in stream][-1]
            self.ends[last.finish_reason or "none"] += 1
            if last.error:
                self.errors.append(last.error)
        except EngineDeadError as e:
            self.ends["dead"] += 1
            self.errors.append(str(e))
        except RequestError as e:
            self.ends["refused"] += 1
            self.errors.append(str(e))

    async def all(self, seconds: float = 60.0) -> None:
        await asyncio.wait_for(asyncio.gather(*self.tasks), seconds)


async def golden(client: ProcessClient) -> list[Any]:
    stream = await client.stream([5, 6, 7, 8, 9], GOLDEN, "golden")
    return [(token, piece.logprobs[i]) async for piece in stream for i, token in enumerate(piece.token_ids)]


async def at_rest(client: ProcessClient, seconds: float) -> None:
    """Check that all blocks are free or evictable, that nothing runs or waits, and that no table of the client has an
    entry (I1, I4, I5).
    """
    until = time.monotonic() + seconds
    while True:
        stats = await client.stats()
        if not (stats["running"] or stats["waiting"]):
            break
        assert time.monotonic() < until, stats
        await asyncio.sleep(0.01)
    assert stats["blocks_free"] + stats["blocks_cached"] == stats["blocks_total"]
    tables = client._streams, client._ids, client._accepting, client._questions, client._read
    assert not any(map(len, tables)), tables


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def run(fault: Fault, want: list[Any], monkeypatch: Any) -> None:
    """Run one line of the table; ``want`` is the answer to the golden request."""
    if fault.fault:
        monkeypatch.setenv(VARIABLE, fault.fault)
    asyncio.run(asyncio.wait_for(_run(fault, want), 180))


async def _run(fault: Fault, want: list[Any]) -> None:
    before = descriptors()
    client = ProcessClient(load(None, {**OPTIONS, **fault.options}), stuck_after=fault.stuck_after)
    await client.open()
    child, beside = client._child, Load(client)
    try:
        await fault.check(client, beside)
        await beside.all()
        assert not fault.fault or "fault " in client._printed.last_output, "the fault did not happen"
        if fault.dies:
            healthy, why = client.healthy()
            assert not healthy and fault.dies in why, why
            assert await asyncio.wait_for(child.wait(), 10) != 0
        else:
            await at_rest(client, 10)
            assert await golden(client) == want
            assert client.healthy() == (True, "")
            await at_rest(client, 10)
    finally:
        for task in beside.tasks:
            task.cancel()
        await client.close()
    assert child.returncode is not None and not os.path.exists(f"/proc/{child.pid}")
    for _ in range(200):
        if descriptors() <= before + 2:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{descriptors()} descriptors are open, {before} were")
